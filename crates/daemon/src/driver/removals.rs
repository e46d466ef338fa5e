//! Removal of jobs' folders.
//!
//! **Problem.** A job can fill its folder with millions of files. Their removal takes minutes, and the driver must
//! renew its lease meanwhile.
//!
//! **How.** A folder that goes is renamed into the folder `removed` of the state directory, which takes no time. One
//! thread empties that folder. What a daemon leaves there at its end, the next daemon removes.

use super::DriverHandle;
use std::io;
use std::path::{Path, PathBuf};

/// Folders that wait for their removal.
pub(super) struct Removals {
    /// The folders lie in here.
    dir: PathBuf,
    /// How many folders this daemon set aside.
    count: u64,
    /// A thread empties the folder.
    is_running: bool,
    /// The number of this daemon. No other daemon has it.
    epoch: u64,
    handle: DriverHandle,
}

impl Removals {
    pub(super) fn new(dir: PathBuf, epoch: u64, handle: DriverHandle) -> Removals {
        Removals { dir, count: 0, is_running: false, epoch, handle }
    }

    /// Renames `folder` to a name that no other daemon gives.
    fn set_aside(&mut self, folder: &Path) -> io::Result<()> {
        self.count += 1;
        std::fs::rename(folder, self.dir.join(format!("{}-{}", self.epoch, self.count)))
    }

    /// Removes a job's folder: its name is free at once, its files go on another thread.
    pub(super) fn remove(&mut self, folder: &Path) {
        match self.set_aside(folder) {
            Ok(()) => self.empty(),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => tracing::warn!("cannot remove {}: {e}", folder.display()),
        }
    }

    /// Empties the folder of removed folders, unless that is under way.
    pub(super) fn empty(&mut self) {
        if std::mem::replace(&mut self.is_running, true) {
            return;
        }
        let (dir, count) = (self.dir.clone(), self.count);
        self.handle.off_thread("remove", move || empty(&dir), move |driver, ()| driver.removals.emptied(count));
    }

    /// The thread has removed what was there when this `count` of folders had been set aside.
    fn emptied(&mut self, count: u64) {
        self.is_running = false;
        // The thread may have missed what came while it worked.
        if self.count > count {
            self.empty();
        }
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
