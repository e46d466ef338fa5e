//! The metrics file: every report is appended as one line, in a format that tools read.
//!
//! CSV has a header, NDJSON has one object per line, and the text of Katib is `time name=value` with the time
//! in UTC. Each report is one write. A resumed run appends; steps that are taken again after a crash appear
//! again, with the same values.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::time::{Duration, SystemTime};

use crate::report::{Progress, csv_header, csv_line, json_line};

/// Format of the metrics file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum MetricsFormat {
    /// Header line, then step, epoch, loss and, for classifiers, accuracy
    Csv,
    /// One JSON object per line
    Ndjson,
    /// Katib's text: time loss=0.5
    Katib,
}

impl MetricsFormat {
    /// The format for the extension of a file.
    pub(crate) fn of(path: &Path) -> Self {
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("csv") => MetricsFormat::Csv,
            Some("json" | "jsonl" | "ndjson") => MetricsFormat::Ndjson,
            _ => MetricsFormat::Katib,
        }
    }
}

#[derive(Debug)]
pub(crate) struct MetricsFile {
    file: File,
    format: MetricsFormat,
    empty: bool,
}

impl MetricsFile {
    pub(crate) fn open(path: &Path, format: MetricsFormat) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        let empty = file.metadata()?.len() == 0;
        Ok(MetricsFile { file, format, empty })
    }

    pub(crate) fn append(&mut self, progress: &Progress, now: SystemTime) -> io::Result<()> {
        let line = match self.format {
            MetricsFormat::Csv if self.empty => csv_header(progress) + &csv_line(progress),
            MetricsFormat::Csv => csv_line(progress),
            MetricsFormat::Ndjson => json_line(progress),
            MetricsFormat::Katib => {
                let accuracy = progress.accuracy.map(|a| format!(" accuracy={a}")).unwrap_or_default();
                let since = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
                format!(
                    "{} epoch={} step={} loss={}{accuracy}\n",
                    utc(since),
                    progress.epoch(),
                    progress.step,
                    progress.loss
                )
            }
        };
        self.file.write_all(line.as_bytes())?;
        self.empty = false;
        Ok(())
    }
}

/// The time since 1970 as text such as `2026-11-15T16:42:07Z`. Days are counted in cycles of 400 years that start in
/// March, so that a leap day is the last day of its year.
fn utc(since_1970: Duration) -> String {
    let seconds = since_1970.as_secs();
    let days = seconds / 86_400 + 719_468;
    let (cycle, day_of_cycle) = (days / 146_097, days % 146_097);
    let year_of_cycle = (day_of_cycle - day_of_cycle / 1_460 + day_of_cycle / 36_524 - day_of_cycle / 146_096) / 365;
    let day_of_year = day_of_cycle - (365 * year_of_cycle + year_of_cycle / 4 - year_of_cycle / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
    let year = cycle * 400 + year_of_cycle + u64::from(month <= 2);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_right_around_leap_days() {
        let at = |seconds| utc(Duration::from_secs(seconds));
        assert_eq!(at(0), "1970-01-01T00:00:00Z");
        assert_eq!(at(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(at(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(at(1_709_251_199), "2024-02-29T23:59:59Z");
        assert_eq!(at(4_107_542_400), "2100-03-01T00:00:00Z");
    }

    #[test]
    fn extension_names_the_format() {
        let of = |name: &str| MetricsFormat::of(Path::new(name));
        assert_eq!(of("a.csv"), MetricsFormat::Csv);
        assert_eq!(of("a.jsonl"), MetricsFormat::Ndjson);
        assert_eq!(of("metrics.log"), MetricsFormat::Katib);
    }

    fn progress(step: u64) -> Progress {
        Progress {
            step,
            total_steps: 100,
            epoch_steps: 50,
            batch: 64,
            loss: 0.5,
            accuracy: Some(0.75),
            learning_rate: 1e-3,
            gradient_norm: 1.0,
            elapsed_s: 1.0,
            session_steps: step,
        }
    }

    /// What a run that reports one step and a resumed run that reports another leave in the file.
    fn content_after_two_runs(format: MetricsFormat) -> String {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics");
        for step in [50, 51] {
            let now = SystemTime::UNIX_EPOCH + Duration::from_secs(step);
            MetricsFile::open(&path, format).unwrap().append(&progress(step), now).unwrap();
        }
        std::fs::read_to_string(&path).unwrap()
    }

    #[test]
    fn resumed_runs_append() {
        assert_eq!(
            content_after_two_runs(MetricsFormat::Csv),
            "step,epoch,loss,accuracy\n50,1,0.5,0.75\n51,2,0.5,0.75\n"
        );
        assert_eq!(
            content_after_two_runs(MetricsFormat::Katib),
            "1970-01-01T00:00:50Z epoch=1 step=50 loss=0.5 accuracy=0.75\n\
             1970-01-01T00:00:51Z epoch=2 step=51 loss=0.5 accuracy=0.75\n"
        );
        let ndjson = content_after_two_runs(MetricsFormat::Ndjson);
        let steps = ndjson.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["step"].clone());
        assert_eq!(steps.collect::<Vec<_>>(), [50, 51]);
    }
}
