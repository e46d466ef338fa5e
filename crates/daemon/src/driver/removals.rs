//! Removal of jobs' folders.
//!
//! **Problem.** A job can fill its folder with millions of files. Their removal takes minutes, and the driver must
//! renew its lease meanwhile.
//!
//! **How.** A folder that goes is renamed into the folder `removed` of the state directory, which takes no time. One
//! thread empties that folder. What a daemon leaves there at its end, the next daemon removes.

use super::Driver;
use std::io;
use std::path::{Path, PathBuf};

/// Folders that wait for their removal.
pub(super) struct Removals {
    /// They lie in here.
    dir: PathBuf,
    /// How many were set aside by this daemon.
    count: u64,
    /// A thread empties the folder.
    is_running: bool,
}

impl Removals {
    pub(super) fn new(dir: PathBuf) -> Removals {
        Removals { dir, count: 0, is_running: false }
    }

    /// Renames `folder` to a name that no other daemon gives: `epoch` is that of this daemon.
    fn set_aside(&mut self, folder: &Path, epoch: u64) -> io::Result<()> {
        self.count += 1;
        std::fs::rename(folder, self.dir.join(format!("{epoch}-{}", self.count)))
    }
}

impl Driver {
    /// Removes a job's folder: its name is free at once, its files go on another thread.
    pub(super) fn remove_folder(&mut self, folder: &Path) {
        match self.removals.set_aside(folder, self.store.journal.epoch()) {
            Ok(()) => self.empty_removed(),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => tracing::warn!("cannot remove {}: {e}", folder.display()),
        }
    }

    /// Empties the folder of removed folders, unless that is under way.
    pub(super) fn empty_removed(&mut self) {
        if std::mem::replace(&mut self.removals.is_running, true) {
            return;
        }
        let (dir, count) = (self.removals.dir.clone(), self.removals.count);
        self.off_thread(
            "remove",
            move || empty(&dir),
            move |driver, ()| {
                driver.removals.is_running = false;
                // The thread may have missed what came while it worked.
                if driver.removals.count > count {
                    driver.empty_removed();
                }
            },
        );
    }
}

/// Removes all that is in `dir`, as far as possible.
fn empty(dir: &Path) {
    let Ok(entries) = std::fs::read_dir(dir) else { return };
    for entry in entries.flatten() {
        let path = entry.path();
        // A job can put a link or a file in place of its folder.
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        let removed = if is_folder { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
        if let Err(e) = removed {
            tracing::warn!("cannot remove {}: {e}", path.display());
        }
    }
}
