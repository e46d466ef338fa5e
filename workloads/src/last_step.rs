//! The last step that a run took, in a file beside its checkpoints.
//!
//! A run that is killed cannot report how far it was. Each run therefore writes the number of every step to a small
//! file, and the next run tells the user how many steps were lost. The file is not synced: it survives the death of
//! the process, and after a power cut it may be behind. Nothing depends on it, so errors are ignored.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

const NAME: &str = ".last-step";
const TEMPORARY: &str = ".last-step.new";

/// The file of one run.
#[derive(Debug)]
pub(crate) struct LastStep {
    dir: PathBuf,
    /// The step of the run before this one.
    before: Option<u64>,
    file: Option<File>,
    has_failed: bool,
}

impl LastStep {
    pub(crate) fn open(dir: &Path) -> Self {
        let before = fs::read_to_string(dir.join(NAME)).ok().and_then(|text| text.trim().parse().ok());
        LastStep { dir: dir.to_owned(), before, file: None, has_failed: false }
    }

    /// How many steps after this one the run before has taken.
    pub(crate) fn lost_after(&self, step: u64) -> u64 {
        self.before.unwrap_or(0).saturating_sub(step)
    }

    pub(crate) fn record(&mut self, step: u64) {
        if self.has_failed {
            return;
        }
        // Every number has the same width, so that a later one replaces all of an earlier one.
        let text = format!("{step:>20}\n");
        let written = match &self.file {
            Some(file) => file.write_all_at(text.as_bytes(), 0),
            None => self.create(&text).map(|file| self.file = Some(file)),
        };
        self.has_failed = written.is_err();
    }

    /// The first step of this run replaces the file, so that an older run that still works writes to a file of its own.
    fn create(&self, text: &str) -> io::Result<File> {
        let temporary = self.dir.join(TEMPORARY);
        let file = File::create(&temporary)?;
        file.write_all_at(text.as_bytes(), 0)?;
        fs::rename(&temporary, self.dir.join(NAME))?;
        Ok(file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_run_reads_the_last_step() {
        let dir = tempfile::tempdir().unwrap();
        let mut first = LastStep::open(dir.path());
        assert_eq!(first.lost_after(0), 0);
        for step in [9, 10, 11] {
            first.record(step);
        }
        let mut second = LastStep::open(dir.path());
        assert_eq!((second.lost_after(8), second.lost_after(11), second.lost_after(20)), (3, 0, 0));
        second.record(9);
        first.record(12);
        assert_eq!(LastStep::open(dir.path()).lost_after(0), 9, "the older run has a file of its own");
        fs::write(dir.path().join(NAME), "no number").unwrap();
        assert_eq!(LastStep::open(dir.path()).lost_after(0), 0);
    }
}
