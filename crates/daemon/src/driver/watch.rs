//! Notices what supervisors write into the jobs' directories.
//!
//! One inotify watch for each job's directory: output.log grew, started.json or exit.json appeared.
//! The kernel merges equal events that were not read yet, so a flood of output costs one event.
//! Where a watch cannot be had (the user's limit is reached), the job's files are polled instead.

use crate::jobdir;
use gainshare_core::model::{JobId, Time};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsFd;
use std::path::Path;

/// Which files of one job changed since the last call.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct ChangedFiles {
    pub(super) output: bool,
    pub(super) started: bool,
    pub(super) exit: bool,
}

#[derive(Debug)]
pub(super) struct Watch {
    inotify: Option<Inotify>,
    jobs: BTreeMap<WatchDescriptor, JobId>,
    unwatched: BTreeSet<JobId>,
    /// Changes that were read and not yet taken.
    waiting: BTreeMap<JobId, ChangedFiles>,
    /// When a change was last read, also of a file that means nothing here: a job can write such files without end.
    changed_at: Time,
}

impl Watch {
    pub(super) fn new() -> Watch {
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)
            .inspect_err(|e| tracing::warn!("no inotify ({e}): the jobs' output is polled"))
            .ok();
        let (jobs, waiting) = (BTreeMap::new(), BTreeMap::new());
        Watch { inotify, jobs, unwatched: BTreeSet::new(), waiting, changed_at: Time::ZERO }
    }

    pub(super) fn fd(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        self.inotify.as_ref().map(|i| i.as_fd())
    }

    pub(super) fn add(&mut self, job: JobId, dir: &Path) {
        let flags = AddWatchFlags::IN_MODIFY | AddWatchFlags::IN_CREATE | AddWatchFlags::IN_MOVED_TO;
        match self.inotify.as_ref().map(|i| i.add_watch(dir, flags)) {
            Some(Ok(wd)) => {
                self.jobs.insert(wd, job);
            }
            other => {
                if let Some(Err(e)) = other {
                    tracing::warn!(%job, "cannot watch {} ({e}): its output is polled", dir.display());
                }
                self.unwatched.insert(job);
            }
        }
    }

    pub(super) fn remove(&mut self, job: JobId) {
        self.unwatched.remove(&job);
        self.waiting.remove(&job);
        let Some((&wd, _)) = self.jobs.iter().find(|(_, j)| **j == job) else { return };
        self.jobs.remove(&wd);
        if let Some(inotify) = &self.inotify {
            // The directory may be gone already, and with it the watch.
            let _ = inotify.rm_watch(wd);
        }
    }

    /// Jobs that must be polled.
    pub(super) fn unwatched(&self) -> &BTreeSet<JobId> {
        &self.unwatched
    }

    /// When [`Watch::read`] last found a change.
    pub(super) fn changed_at(&self) -> Time {
        self.changed_at
    }

    /// Reads everything since the last call; [`Watch::take`] returns it.
    pub(super) fn read(&mut self, now: Time) {
        let Some(inotify) = &self.inotify else { return };
        while let Ok(events) = inotify.read_events() {
            for event in events {
                self.changed_at = now;
                if event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
                    // Events were lost: every file may have changed.
                    let all = ChangedFiles { output: true, started: true, exit: true };
                    self.waiting.extend(self.jobs.values().map(|&j| (j, all)));
                    continue;
                }
                let Some(&job) = self.jobs.get(&event.wd) else { continue };
                let mut found = ChangedFiles::default();
                match event.name.as_deref().and_then(|n| n.to_str()) {
                    Some(jobdir::OUTPUT) => found.output = true,
                    Some(jobdir::STARTED) => found.started = true,
                    Some(jobdir::EXIT) => found.exit = true,
                    // Such as the page, which this daemon writes itself.
                    _ => continue,
                }
                let files = self.waiting.entry(job).or_default();
                files.output |= found.output;
                files.started |= found.started;
                files.exit |= found.exit;
            }
        }
    }

    /// The files of the next job that has changes.
    pub(super) fn take(&mut self) -> Option<(JobId, ChangedFiles)> {
        self.waiting.pop_first()
    }

    /// Whether changes wait for the next round.
    pub(super) fn has_more(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Whether starts or ends of jobs are among the changes that wait.
    pub(super) fn has_starts_or_ends(&self) -> bool {
        self.waiting.values().any(|files| files.started || files.exit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_that_means_nothing_is_paced_like_any_other() {
        let dir = tempfile::tempdir().unwrap();
        let mut watch = Watch::new();
        watch.add(JobId(1), dir.path());
        watch.read(Time(1));
        assert_eq!(watch.changed_at(), Time::ZERO, "nothing has changed");
        std::fs::write(dir.path().join("of-the-job"), "text").unwrap();
        watch.read(Time(2));
        assert_eq!((watch.changed_at(), watch.take()), (Time(2), None));
        std::fs::write(dir.path().join(jobdir::OUTPUT), "text").unwrap();
        watch.read(Time(3));
        let output = ChangedFiles { output: true, ..ChangedFiles::default() };
        assert_eq!((watch.changed_at(), watch.take()), (Time(3), Some((JobId(1), output))));
    }
}
