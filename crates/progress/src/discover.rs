//! Finds event files and metrics files below a job's folder.
//!
//! A folder may hold a data set of a million files. So a scan is bounded in depth and in entries, goes
//! level by level (what a job writes is seldom deep), follows no link, and leaves out folders that are
//! known to hold something else. Only files changed since the job's start count. A metrics file must
//! also have been created since then, because its name does not tell which job writes it.
//!
//! Files are stamped by the wall clock, which can be set back while a job runs: files of the job then seem older
//! than the job. See [`JobStart`].
//!
//! Several jobs often share one folder (four runs in four terminals). Event files carry the writer's
//! process id in their name, see [`writer_pid`].

use crate::root::Root;
use crate::words::{is_event_file, is_foreign_folder, is_metrics_file};
use gainshare_core::model::{Span, Time};
use nix::dir::Type;
use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Levels of folders; `lightning_logs/version_0/checkpoints` has three.
const MAX_DEPTH: usize = 6;

/// Entries read in one scan: about 1 ms.
const MAX_ENTRIES: usize = 3000;

/// File systems stamp with a clock that lags a little behind.
const CLOCK_SLACK: Duration = Duration::from_millis(50);

/// A listing is used for this long, also for other jobs in the same folder.
const LISTING_AGE: Span = Span::from_secs(1);

/// The files that a scan found, as paths relative to the root.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct FolderScan {
    pub(crate) events: Vec<PathBuf>,
    /// The oldest first.
    pub(crate) metrics: Vec<PathBuf>,
}

/// A file that may be a job's event or metrics file.
#[derive(Debug)]
struct Candidate {
    path: PathBuf,
    is_event_file: bool,
    modified: Option<SystemTime>,
    born: Option<SystemTime>,
}

/// When a job began, on the clock that stamps files.
///
/// A file with an earlier time was there before the job, unless the clock was set back since. After that, a file counts
/// if its time is since the start by the clock as it is set now, and if the first scan did not find the file with the
/// same time.
#[derive(Debug)]
pub(crate) struct JobStart {
    /// By the clock as it was set then.
    then: SystemTime,
    /// The same moment by the clock as it is set now.
    today: SystemTime,
    /// What the first scan found of files that were older than the job: when each changed and was created.
    old: Option<BTreeMap<PathBuf, FileTimes>>,
}

type FileTimes = (Option<SystemTime>, Option<SystemTime>);

impl JobStart {
    pub(crate) fn new(then: SystemTime) -> JobStart {
        JobStart { then, today: then, old: None }
    }

    /// `today` is the job's start by the clock as it is set now.
    pub(crate) fn correct(&mut self, today: SystemTime) {
        self.today = today;
    }

    /// Remembers which files are older than the job, at the first scan.
    fn remember(&mut self, candidates: &[Candidate]) {
        let since = less_slack(self.then);
        let is_old = |c: &&Candidate| [c.modified, c.born].into_iter().flatten().any(|time| time < since);
        self.old.get_or_insert_with(|| {
            candidates.iter().filter(is_old).map(|c| (c.path.clone(), (c.modified, c.born))).collect()
        });
    }

    /// Whether `time`, a time of the file, is since the start. `before` picks the same time of what the first scan
    /// found.
    fn is_since(&self, file: &Path, time: SystemTime, before: impl Fn(&FileTimes) -> Option<SystemTime>) -> bool {
        let is_known = || self.old.as_ref().and_then(|old| before(old.get(file)?)) == Some(time);
        time >= less_slack(self.then) || (time >= less_slack(self.today) && !is_known())
    }
}

fn less_slack(time: SystemTime) -> SystemTime {
    time.checked_sub(CLOCK_SLACK).unwrap_or(time)
}

/// Identifies a folder whatever its name: device and inode of the root, and the path below it.
type FolderKey = (u64, u64, PathBuf);

/// Listings of folders that jobs share. Hundreds of jobs often run in one folder, and each of them searches
/// it: without sharing, the work would grow with the square of the number of jobs.
#[derive(Debug, Default)]
pub struct FolderListings {
    listings: BTreeMap<FolderKey, (Time, Arc<Vec<Candidate>>)>,
}

impl FolderListings {
    /// Scans the folder `under` for files changed since the start of the job. A listing of the same folder that is
    /// younger than [`LISTING_AGE`] is used again.
    pub(crate) fn scan(&mut self, now: Time, root: &Root, under: &Path, start: &mut JobStart) -> FolderScan {
        self.listings.retain(|_, (made, _)| now >= *made && now.since(*made) < LISTING_AGE);
        let Ok((device, inode)) = root.identity() else { return select(&list(root, under), start) };
        let made = || (now, Arc::new(list(root, under)));
        let (_, listing) = self.listings.entry((device, inode, under.to_path_buf())).or_insert_with(made);
        select(listing, start)
    }
}

/// The candidates that changed since the start of a job.
fn select(candidates: &[Candidate], start: &mut JobStart) -> FolderScan {
    start.remember(candidates);
    let mut found = FolderScan::default();
    let mut metrics = Vec::new();
    for candidate in candidates {
        let Candidate { path, modified: Some(modified), born, .. } = candidate else { continue };
        if !start.is_since(path, *modified, |times| times.0) {
            continue;
        }
        let born = born.unwrap_or(*modified);
        if candidate.is_event_file {
            found.events.push(path.clone());
        } else if start.is_since(path, born, |times| times.1) {
            metrics.push((born, path.clone()));
        }
    }
    metrics.sort();
    found.events.sort();
    found.metrics = metrics.into_iter().map(|(_, path)| path).collect();
    found
}

/// The event files and metrics files below a folder, level by level.
fn list(root: &Root, under: &Path) -> Vec<Candidate> {
    let mut candidates = Vec::new();
    let mut level = vec![under.to_path_buf()];
    let mut left = MAX_ENTRIES;
    for _ in 0..MAX_DEPTH {
        let mut next = Vec::new();
        for folder in level {
            let Ok(mut dir) = root.folder(&folder) else { continue };
            for entry in dir.iter().flatten() {
                let name = entry.file_name().to_bytes();
                if name == b"." || name == b".." {
                    continue;
                }
                if left == 0 {
                    return candidates;
                }
                left -= 1;
                let path = || folder.join(std::ffi::OsStr::from_bytes(name));
                match entry.file_type() {
                    Some(Type::Directory) if !is_foreign_folder(name) => next.push(path()),
                    // Some file systems do not give the kind; the file is checked before it is read.
                    Some(Type::File) | None if is_event_file(name) || is_metrics_file(name) => {
                        let Ok(meta) = root.peek(&path()).and_then(|f| f.metadata()) else { continue };
                        let (is_event_file, modified) = (is_event_file(name), meta.modified().ok());
                        let born = meta.created().ok().or(modified);
                        candidates.push(Candidate { path: path(), is_event_file, modified, born });
                    }
                    _ => {}
                }
            }
        }
        level = next;
    }
    candidates
}

/// The process that created an event file: `….tfevents.<time>.<host>.<pid>.<n>`, with `.v2` behind it by TensorFlow.
pub(crate) fn writer_pid(path: &Path) -> Option<u32> {
    let name = path.file_name()?.to_str()?;
    let name = name.strip_suffix(".v2").unwrap_or(name);
    let mut parts = name.rsplit('.');
    parts.next()?.parse::<u64>().ok()?;
    parts.next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn scan(root: &Root, under: &Path, since: SystemTime) -> FolderScan {
        FolderListings::default().scan(Time::ZERO, root, under, &mut JobStart::new(since))
    }

    #[test]
    fn jobs_in_one_folder_share_a_listing_for_a_second() {
        let temporary = tempfile::tempdir().unwrap();
        let count = |listings: &mut FolderListings, now: Time| {
            // Each job opens the folder for itself.
            let root = Root::open(temporary.path()).unwrap();
            let mut start = JobStart::new(SystemTime::UNIX_EPOCH);
            listings.scan(now, &root, Path::new(""), &mut start).metrics.len()
        };
        let mut listings = FolderListings::default();
        assert_eq!(count(&mut listings, Time(5_000_000)), 0);
        fs::write(temporary.path().join("metrics.csv"), "").unwrap();
        assert_eq!(count(&mut listings, Time(5_900_000)), 0, "the listing is used again");
        assert_eq!(count(&mut listings, Time(6_000_000)), 1, "it is too old");
        assert_eq!(count(&mut listings, Time(1_000_000)), 1, "a listing of the future is not used");
        assert_eq!(listings.listings.len(), 1);
    }

    #[test]
    fn finds_what_is_new_and_leaves_the_rest() {
        let temporary = tempfile::tempdir().unwrap();
        let at = |p: &str| temporary.path().join(p);
        fs::create_dir_all(at("old")).unwrap();
        fs::write(at("old/events.out.tfevents.1.h.1.0"), "").unwrap();
        fs::write(at("old/metrics.csv"), "").unwrap();
        let born = |name: &str| fs::metadata(at(name)).unwrap().created().expect("a file system with birth times");
        // The scan allows for a clock that lags; the old files are older than that, the new ones not.
        let start = born("old/metrics.csv") + CLOCK_SLACK + Duration::from_nanos(1);
        let ticked = |_: u32| {
            fs::write(at("probe"), "").unwrap();
            let born_later = born("probe") > born("old/metrics.csv");
            fs::remove_file(at("probe")).unwrap();
            born_later
        };
        assert!((0..1_000_000).any(ticked), "the clock of the file system advances");
        for p in [
            "runs/a/events.out.tfevents.2.h.77.0",
            "lightning_logs/version_0/metrics.csv",
            ".git/metrics.csv",
            "data/metrics.csv",
            "1/2/3/4/5/6/7/metrics.csv",
        ] {
            fs::create_dir_all(at(p).parent().unwrap()).unwrap();
            fs::write(at(p), "x").unwrap();
        }
        fs::write(at("old/metrics.csv"), "now changed, but made by an earlier run").unwrap();
        std::os::unix::fs::symlink("/", at("loop")).unwrap();
        let root = Root::open(temporary.path()).unwrap();
        let found = scan(&root, Path::new(""), start);
        assert_eq!(found.events, [PathBuf::from("runs/a/events.out.tfevents.2.h.77.0")]);
        assert_eq!(found.metrics, [PathBuf::from("lightning_logs/version_0/metrics.csv")]);
    }

    /// The clock is an hour ahead when the job starts, and is set back while the job runs.
    #[test]
    fn a_clock_that_is_set_back_hides_no_new_file_and_shows_no_old_one() {
        const HOUR: Duration = Duration::from_secs(3600);
        let temporary = tempfile::tempdir().unwrap();
        let at = |p: &str| temporary.path().join(p);
        fs::write(at("events.out.tfevents.1.h.1.0"), "of an earlier run").unwrap();
        fs::write(at("metrics.csv"), "of an earlier run").unwrap();
        let began = SystemTime::now();
        let root = Root::open(temporary.path()).unwrap();
        let mut start = JobStart::new(began + HOUR);
        let mut scan = || FolderListings::default().scan(Time::ZERO, &root, Path::new(""), &mut start);
        assert_eq!(scan(), FolderScan::default(), "the first scan finds files of an earlier run only");

        let later = began + Duration::from_secs(1);
        let write = |name: &str| {
            fs::write(at(name), "of this run").unwrap();
            fs::File::options().append(true).open(at(name)).unwrap().set_modified(later).unwrap();
        };
        fs::create_dir(at("runs")).unwrap();
        write("runs/events.out.tfevents.2.h.2.0");
        write("runs/metrics.csv");
        assert_eq!(scan(), FolderScan::default(), "they seem older than the job until the step is known");
        start.correct(began);
        let mut scan = || FolderListings::default().scan(Time::ZERO, &root, Path::new(""), &mut start);
        let found = scan();
        assert_eq!(found.events, [PathBuf::from("runs/events.out.tfevents.2.h.2.0")]);
        assert_eq!(found.metrics, [PathBuf::from("runs/metrics.csv")]);

        write("events.out.tfevents.1.h.1.0");
        write("metrics.csv");
        let found = scan();
        assert_eq!(found.events.len(), 2, "an event file that has changed counts");
        assert_eq!(found.metrics, [PathBuf::from("runs/metrics.csv")], "the other was made by an earlier run");
    }

    #[test]
    fn a_scan_is_bounded() {
        let temporary = tempfile::tempdir().unwrap();
        let files = |range: std::ops::Range<usize>| {
            range.for_each(|i| fs::write(temporary.path().join(format!("{i}.txt")), "").unwrap());
        };
        fs::create_dir(temporary.path().join("deep")).unwrap();
        fs::write(temporary.path().join("deep/metrics.csv"), "x").unwrap();
        let root = Root::open(temporary.path()).unwrap();
        let found = || scan(&root, Path::new(""), SystemTime::UNIX_EPOCH).metrics.len();
        // The folder and the file in it are two entries.
        files(0..MAX_ENTRIES - 2);
        assert_eq!(found(), 1);
        files(MAX_ENTRIES - 2..MAX_ENTRIES - 1);
        assert_eq!(found(), 0, "nothing is read beyond the bound");
    }

    #[test]
    fn writers_are_named() {
        let pid = |name: &str| writer_pid(Path::new(name));
        assert_eq!(pid("x/events.out.tfevents.1794760710.vm.31330.1.v2"), Some(31330));
        assert_eq!(pid("events.out.tfevents.1794760702.gpu1.example.org.31229.0"), Some(31229));
        assert_eq!(pid("events.out.tfevents.1794760702"), None);
    }
}
