//! What a job reports, read from where it reports it, and what must be kept so that a restart goes on at the same byte.

use gainshare_core::signal::{Sample, Tracker};
use gainshare_runtime::collect::push::PushError;
use gainshare_runtime::collect::{Batch, Chooser, Counters, MetricSpec, OutputParser, OutputState, Verdict, push};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

pub(super) struct Reports {
    log: PathBuf,
    inode: u64,
    offset: u64,
    parser: OutputParser,
    chooser: Chooser,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Position {
    inode: u64,
    offset: u64,
    parser: OutputState,
    chooser: Chooser,
}

/// What one look gave.
#[derive(Debug, Default)]
pub(super) struct Look {
    /// Earlier samples belong to another metric.
    pub(super) forget: bool,
    pub(super) samples: Vec<Sample>,
    pub(super) more: bool,
}

impl Reports {
    pub(super) fn new(spec: &MetricSpec, log: PathBuf) -> Reports {
        Reports::resume(spec, log, Position { chooser: Chooser::new(spec.name.as_deref()), ..Position::default() })
    }

    pub(super) fn resume(_spec: &MetricSpec, log: PathBuf, p: Position) -> Reports {
        Reports {
            log,
            inode: p.inode,
            offset: p.offset,
            parser: OutputParser::resume(None, p.parser),
            chooser: p.chooser,
        }
    }

    pub(super) fn position(&self) -> Position {
        Position {
            inode: self.inode,
            offset: self.offset,
            parser: self.parser.state().clone(),
            chooser: self.chooser.clone(),
        }
    }

    pub(super) fn metric(&self) -> Option<&str> {
        self.chooser.metric()
    }

    pub(super) fn source(&self) -> &'static str {
        "output"
    }

    pub(super) fn counters(&self) -> Counters {
        self.parser.counters()
    }

    pub(super) fn poll(&mut self, last: bool) -> Look {
        let mut look = Look::default();
        let mut batch = Batch::default();
        if let Ok(mut file) = File::open(&self.log) {
            let (inode, len) = file.metadata().map(|m| (m.ino(), m.len())).unwrap_or_default();
            if inode != self.inode || len < self.offset {
                (self.inode, self.offset) = (inode, 0);
            }
            let mut bytes = vec![0; 64 << 10];
            if file.seek(SeekFrom::Start(self.offset)).is_ok() {
                while let Ok(n) = file.read(&mut bytes) {
                    if n == 0 {
                        break;
                    }
                    self.parser.feed(&bytes[..n], &mut batch);
                    self.offset += n as u64;
                }
            }
        }
        if last {
            self.parser.finish(&mut batch);
        }
        self.choose(&batch, &mut look);
        look
    }

    pub(super) fn push(&mut self, body: &[u8]) -> Result<Look, PushError> {
        let mut look = Look::default();
        let batch = push::parse(body, &mut Counters::default())?;
        self.choose(&batch, &mut look);
        Ok(look)
    }

    fn choose(&mut self, batch: &Batch, look: &mut Look) {
        for reading in &batch.readings {
            match self.chooser.offer(&reading.metric) {
                Verdict::Take => look.samples.push(reading.into()),
                Verdict::TakeAndForget => {
                    look.forget = true;
                    look.samples.clear();
                    look.samples.push(reading.into());
                }
                Verdict::Ignore => {}
            }
        }
    }
}

/// All that a restart needs to go on with a job's reports.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Progress {
    pub(super) tracker: Tracker,
    pub(super) reports: Option<Position>,
    pub(super) meter: super::usage::Meter,
    /// The number of the next sample.
    pub(super) next_seq: u64,
    /// Only samples whose number is a multiple of this are kept.
    pub(super) stride: u64,
    pub(super) metric: Option<String>,
    pub(super) source: Option<String>,
}
