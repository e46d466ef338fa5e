//! Finds event files and metrics files below a job's folder.
//!
//! A folder may hold a data set of a million files. So a scan is bounded in depth and in entries, goes
//! level by level (what a job writes is seldom deep), follows no link, and leaves out folders that are
//! known to hold something else. Only files changed since the job's start count. A metrics file must
//! also have been created since then, because its name does not tell which job writes it.
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

/// Identifies a folder whatever its name: device and inode of the root, and the path below it.
type FolderKey = (u64, u64, PathBuf);

/// Listings of folders that jobs share. Hundreds of jobs often run in one folder, and each of them searches
/// it: without sharing, the work would grow with the square of the number of jobs.
#[derive(Debug, Default)]
pub struct FolderListings {
    listings: BTreeMap<FolderKey, (Time, Arc<Vec<Candidate>>)>,
}

impl FolderListings {
    /// Scans the folder `under` for files changed since `since`, the start of the job. A listing of the same
    /// folder that is younger than [`LISTING_AGE`] is used again.
    pub(crate) fn scan(&mut self, now: Time, root: &Root, under: &Path, since: SystemTime) -> FolderScan {
        self.listings.retain(|_, (made, _)| now >= *made && now.since(*made) < LISTING_AGE);
        let Ok((device, inode)) = root.identity() else { return select(&list(root, under), since) };
        let made = || (now, Arc::new(list(root, under)));
        let (_, listing) = self.listings.entry((device, inode, under.to_path_buf())).or_insert_with(made);
        select(listing, since)
    }
}

/// The candidates that changed since the start of a job.
fn select(candidates: &[Candidate], since: SystemTime) -> FolderScan {
    let since = since.checked_sub(CLOCK_SLACK).unwrap_or(since);
    let mut found = FolderScan::default();
    let mut metrics = Vec::new();
    for candidate in candidates.iter().filter(|c| c.modified.is_some_and(|t| t >= since)) {
        let born = candidate.born.unwrap_or(since);
        if candidate.is_event_file {
            found.events.push(candidate.path.clone());
        } else if born >= since {
            metrics.push((born, candidate.path.clone()));
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
        FolderListings::default().scan(Time::ZERO, root, under, since)
    }

    #[test]
    fn jobs_in_one_folder_share_a_listing_for_a_second() {
        let temporary = tempfile::tempdir().unwrap();
        let count = |listings: &mut FolderListings, now: Time| {
            // Each job opens the folder for itself.
            let root = Root::open(temporary.path()).unwrap();
            listings.scan(now, &root, Path::new(""), SystemTime::UNIX_EPOCH).metrics.len()
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
