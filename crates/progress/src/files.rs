//! The files of one job, apart from the rest of its collector.
//!
//! **Problem.** A job's folder may be on a network or FUSE file system, where any access can take minutes. A driver
//! that serves many jobs cannot wait for it.
//!
//! **How.** [`JobFiles`] is all of a collector that opens files. A reading has three steps. The collector gives its
//! files away as a [`FileTask`]. Any thread reads the task, which becomes a [`FilesReading`]. The collector takes that
//! reading back. Meanwhile the collector goes on with output, pushes and endpoints, and its stored state has the
//! positions from before the reading.
//!
//! **Properties.** Readings and the positions after them reach the collector together. So a task that never comes back
//! loses nothing that another reading from the stored state would not find, and nothing is counted twice. A panic
//! within a task goes no further. Making a task accesses no file.

use crate::discover::{self, FolderListings, JobStart};
use crate::metrics_file::{FileState, MetricsFile};
use crate::reading::{Batch, Counters};
use crate::root::Root;
use crate::spec::Source;
use crate::stored_path::StoredPath;
use crate::tail::Position;
use crate::tensorboard::EventFiles;
use gainshare_core::model::{Span, Time};
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

/// Readings of one source in one task.
pub(crate) const MAX_READINGS: usize = 256;

/// Time between two scans of the job's folder. It doubles from the first value to the second while
/// nothing is found.
pub(crate) const MIN_SCAN_PACE: Span = Span::from_secs(2);
pub(crate) const MAX_SCAN_PACE: Span = Span::from_secs(60);

/// Process ids remembered to know a job's own event files.
const MAX_PIDS: usize = 4096;

/// The folder of one job and what is followed in it.
#[derive(Debug)]
pub(crate) struct JobFiles {
    pub(crate) root: Arc<Root>,
    start: JobStart,
    events: EventFiles,
    pub(crate) file: Option<MetricsFile>,
    pids: BTreeSet<u32>,
    pub(crate) next_scan: Time,
    scan_pace: Span,
    pub(crate) first_call: Option<Time>,
}

/// What a collector knows of its files while they are away.
#[derive(Debug, Default)]
pub(crate) struct FilesState {
    pub(crate) events: BTreeMap<StoredPath, Position>,
    pub(crate) file: Option<(StoredPath, FileState)>,
    pub(crate) counters: Counters,
    pub(crate) note: Option<String>,
}

/// A search of the folder.
#[derive(Debug)]
pub(crate) struct FolderSearch {
    /// Relative to the root.
    pub(crate) under: PathBuf,
    /// Event files of other processes are left out.
    pub(crate) own_events_only: bool,
    /// A metrics file that is found is followed.
    pub(crate) takes_file: bool,
}

impl JobFiles {
    pub(crate) fn new(
        root: Arc<Root>,
        started: SystemTime,
        positions: BTreeMap<PathBuf, Position>,
        file: Option<MetricsFile>,
    ) -> JobFiles {
        JobFiles {
            events: EventFiles::new(root.clone(), positions),
            root,
            start: JobStart::new(started),
            file,
            pids: BTreeSet::new(),
            next_scan: Time::ZERO,
            scan_pace: MIN_SCAN_PACE,
            first_call: None,
        }
    }

    pub(crate) fn correct_start(&mut self, started: SystemTime) {
        self.start.correct(started);
    }

    pub(crate) fn add_pids(&mut self, pids: impl IntoIterator<Item = u32>) {
        for pid in pids {
            if self.pids.len() < MAX_PIDS {
                self.pids.insert(pid);
            }
        }
    }

    /// Whether a file is followed.
    pub(crate) fn has_any(&self) -> bool {
        !self.events.is_empty() || self.file.is_some()
    }

    pub(crate) fn counters(&self) -> Counters {
        let mut all = self.events.counters();
        all += self.file.as_ref().map(MetricsFile::counters).unwrap_or_default();
        all
    }

    pub(crate) fn note(&self) -> Option<String> {
        self.file.as_ref().and_then(MetricsFile::note)
    }

    pub(crate) fn events(&self) -> BTreeMap<StoredPath, Position> {
        self.events.positions().into_iter().map(|(path, at)| (StoredPath(path), at)).collect()
    }

    pub(crate) fn file(&self) -> Option<(StoredPath, FileState)> {
        self.file.as_ref().map(|f| (StoredPath(f.path().to_path_buf()), f.state()))
    }

    pub(crate) fn state(&self) -> FilesState {
        FilesState { events: self.events(), file: self.file(), counters: self.counters(), note: self.note() }
    }

    /// Searches the job's folder for files to follow.
    fn search(&mut self, now: Time, search: &FolderSearch, listings: &mut FolderListings) {
        self.next_scan = now + self.scan_pace;
        let found = listings.scan(now, &self.root, &search.under, &mut self.start);
        let mut is_news = false;
        for path in found.events {
            let foreign = search.own_events_only
                && !self.pids.is_empty()
                && discover::writer_pid(&path).is_some_and(|pid| !self.pids.contains(&pid));
            is_news |= !foreign && self.events.follow(&path);
        }
        if search.takes_file
            && self.file.is_none()
            && let Some(path) = found.metrics.first()
        {
            self.file = Some(MetricsFile::new(self.root.clone(), path, None, FileState::default()));
        }
        self.scan_pace = if is_news { MIN_SCAN_PACE } else { Span(self.scan_pace.0 * 2).min(MAX_SCAN_PACE) };
    }
}

/// The files of a job on their way to a reading.
#[derive(Debug)]
pub struct FileTask {
    files: Box<JobFiles>,
    now: Time,
    search: Option<FolderSearch>,
    /// The job has ended: a bounded piece of its files is read, and then they are closed.
    last: bool,
}

/// The files of a job on their way back.
#[derive(Debug)]
pub struct FilesReading {
    pub(crate) files: FilesAfter,
    pub(crate) events: Batch,
    pub(crate) file: Batch,
    /// The metrics file could not be read.
    pub(crate) has_failed: bool,
}

#[derive(Debug)]
pub(crate) enum FilesAfter {
    Open(Box<JobFiles>),
    Closed(Box<FilesState>),
    /// The collector of this source panicked, and the files are dropped.
    Panicked(Source),
}

impl FileTask {
    pub(crate) fn new(files: Box<JobFiles>, now: Time, search: Option<FolderSearch>, last: bool) -> FileTask {
        FileTask { files, now, search, last }
    }

    /// The device of the folder. It is known once the folder was opened.
    pub fn device(&self) -> Option<u64> {
        self.files.root.device()
    }

    /// Searches and reads. May take as long as the file system takes. `listings` are those of folders that several
    /// jobs share.
    pub fn read(self, listings: &mut FolderListings) -> FilesReading {
        let FileTask { mut files, now, search, last } = self;
        // The source that is being read: the one to blame for a panic.
        let mut reading = Source::Tensorboard;
        let (mut events, mut file, mut has_failed) = (Batch::default(), Batch::default(), false);
        let work = || {
            if files.root.device().is_none() {
                let _ = files.root.identity();
            }
            if let Some(search) = &search {
                // A listing may be older than what the job wrote last.
                let listings = if last { &mut FolderListings::default() } else { listings };
                files.search(now, search, listings);
            }
            files.events.poll(MAX_READINGS, &mut events);
            reading = Source::File;
            if let Some(of_file) = &mut files.file {
                // The CPU budget of a pattern is measured on the thread that reads.
                of_file.begin_round(now);
                let read = if last { of_file.finish(&mut file) } else { of_file.poll(MAX_READINGS, &mut file) };
                has_failed = read.is_err();
            }
        };
        let is_whole = catch_unwind(AssertUnwindSafe(work)).is_ok();
        let files = match (is_whole, last) {
            (false, _) => FilesAfter::Panicked(reading),
            (true, true) => FilesAfter::Closed(Box::new(files.state())),
            (true, false) => FilesAfter::Open(files),
        };
        FilesReading { files, events, file, has_failed }
    }
}

#[cfg(test)]
mod tests {
    use crate::collector::{Collector, CollectorState};
    use crate::discover::FolderListings;
    use crate::spec::{MetricSpec, Source};
    use gainshare_core::model::Time;
    use std::io::Write;
    use std::path::Path;
    use std::time::SystemTime;

    fn follow(dir: &Path, state: CollectorState) -> Collector {
        let spec = MetricSpec { source: Source::File, path: Some("m.csv".into()), ..MetricSpec::default() };
        Collector::new(&spec, Some(dir), SystemTime::UNIX_EPOCH, state).unwrap()
    }

    fn at(seconds: u64) -> Time {
        Time::from_secs_f64(seconds as f64)
    }

    #[test]
    fn readings_and_positions_come_back_together_and_a_lost_task_loses_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let mut file = std::fs::File::create(dir.path().join("m.csv")).unwrap();
        file.write_all(b"step,loss\n1,9.5\n2,8.5\n").unwrap();
        let mut job = follow(dir.path(), CollectorState::default());
        assert_eq!(job.poll(at(1)).readings.len(), 2);
        file.write_all(b"3,7.5\n").unwrap();

        let before = job.state();
        let task = job.begin_reading(at(2), false).unwrap();
        let reading = std::thread::spawn(move || task.read(&mut FolderListings::default())).join().unwrap();
        assert_eq!(job.state(), before, "the position is the one before the reading");
        assert!(job.begin_reading(at(3), false).is_none(), "the files are away");
        let pushed = job.pushed(at(3), br#"{"metric":"loss","value":1.0}"#).unwrap();
        assert_eq!(pushed.readings.len(), 0, "another source than the chosen one, but it is read");

        // The reading never comes back: another collector goes on from the stored state.
        let mut next = follow(dir.path(), before);
        let steps = |update: crate::Update| update.readings.iter().filter_map(|r| r.step).collect::<Vec<u64>>();
        assert_eq!(steps(next.poll(at(4))), [3]);
        // It does come back.
        assert_eq!(steps(job.end_reading(at(5), reading)), [3]);
        assert_eq!(job.state(), next.state());
        assert_eq!(steps(job.poll(at(6))), [0; 0]);

        file.write_all(b"4,6.5").unwrap();
        let last = job.begin_reading(at(7), true).unwrap().read(&mut FolderListings::default());
        assert_eq!(steps(job.end_reading(at(7), last)), [4], "at the end of a job a line counts without its end");
        assert!(job.begin_reading(at(8), true).is_none(), "the files are closed");
    }

    #[test]
    fn a_folder_is_opened_by_its_first_reading_and_tried_again() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("later");
        let mut job = follow(&folder, CollectorState::default());
        assert_eq!(job.poll(at(1)).readings.len(), 0);
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("m.csv"), "step,loss\n1,9.5\n").unwrap();
        assert_eq!(job.poll(at(2)).readings.len(), 1);
    }
}
