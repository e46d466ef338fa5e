//! Opens files below a job's folder, and no others.
//!
//! A path comes from the job, so it may point anywhere: out of the folder by `..` or a symbolic link
//! (also one swapped in at the last moment), at a FIFO that would block, at a device. The kernel
//! resolves the path beneath the folder (`openat2`). The file's kind is checked before it is opened,
//! the file is opened without waiting, and its kind is checked again. Kernels and sandboxes without
//! `openat2` get a walk that follows no link at all.

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat, openat2};
use nix::sys::stat::Mode;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// A job's folder, held open, so that renaming it does not lead elsewhere.
#[derive(Debug)]
pub struct Root {
    dir: OnceLock<OwnedFd>,
    path: PathBuf,
    /// 0: not known yet.
    device: AtomicU64,
}

impl Root {
    pub fn open(path: &Path) -> io::Result<Root> {
        let root = Root::later(path);
        root.dir()?;
        Ok(root)
    }

    /// A folder that is opened when it is first used. Opening can take as long as its file system takes.
    pub(crate) fn later(path: &Path) -> Root {
        Root { dir: OnceLock::new(), path: path.to_path_buf(), device: AtomicU64::new(0) }
    }

    fn dir(&self) -> nix::Result<&OwnedFd> {
        if let Some(dir) = self.dir.get() {
            return Ok(dir);
        }
        let dir = open(&self.path, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())?;
        Ok(self.dir.get_or_init(|| dir))
    }

    /// The device of the folder, once [`Root::identity`] has read it.
    pub(crate) fn device(&self) -> Option<u64> {
        Some(self.device.load(Ordering::Relaxed)).filter(|device| *device != 0)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Device and inode of the folder.
    pub(crate) fn identity(&self) -> io::Result<(u64, u64)> {
        let status = nix::sys::stat::fstat(self.dir()?)?;
        self.device.store(status.st_dev, Ordering::Relaxed);
        Ok((status.st_dev, status.st_ino))
    }

    /// `path` relative to the folder: relative paths as they are, absolute ones if they lie below it.
    pub fn relative<'a>(&self, path: &'a Path) -> Option<&'a Path> {
        let relative = if path.is_absolute() { path.strip_prefix(&self.path).ok()? } else { path };
        relative.components().all(|c| matches!(c, Component::Normal(_) | Component::CurDir)).then_some(relative)
    }

    /// Opens a regular file for reading. Never blocks on what is not one.
    pub fn file(&self, path: &Path) -> io::Result<File> {
        let regular = |file: &File| file.metadata().map(|m| m.is_file());
        // Opening a device can have side effects; a handle for `stat` has none.
        if !regular(&File::from(self.resolve(path, OFlag::O_PATH)?))? {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        let file = File::from(self.resolve(path, OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOCTTY)?);
        if regular(&file)? { Ok(file) } else { Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")) }
    }

    /// Opens a regular file for reading and writing. Follows no link at all, and never blocks on what is not a file.
    pub fn writable(&self, path: &Path) -> io::Result<File> {
        let strict =
            |flags: OFlag| self.resolve_with(path, flags | OFlag::O_NOFOLLOW, ResolveFlag::RESOLVE_NO_SYMLINKS);
        let regular = |file: &File| file.metadata().map(|m| m.is_file());
        let refused = || io::Error::new(io::ErrorKind::InvalidInput, "not a regular file");
        // As in [`Root::file`].
        if !regular(&File::from(strict(OFlag::O_PATH)?))? {
            return Err(refused());
        }
        let file = File::from(strict(OFlag::O_RDWR | OFlag::O_NONBLOCK | OFlag::O_NOCTTY)?);
        if regular(&file)? { Ok(file) } else { Err(refused()) }
    }

    /// A handle for `stat` only.
    pub fn peek(&self, path: &Path) -> io::Result<File> {
        self.resolve(path, OFlag::O_PATH).map(File::from)
    }

    /// Opens a folder for listing.
    pub fn folder(&self, path: &Path) -> io::Result<nix::dir::Dir> {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        let fd = self.resolve(path, OFlag::O_RDONLY | OFlag::O_DIRECTORY)?;
        Ok(nix::dir::Dir::from_fd(fd)?)
    }

    fn resolve(&self, path: &Path, flags: OFlag) -> io::Result<OwnedFd> {
        self.resolve_with(path, flags, ResolveFlag::empty())
    }

    fn resolve_with(&self, path: &Path, flags: OFlag, more: ResolveFlag) -> io::Result<OwnedFd> {
        let flags = flags | OFlag::O_CLOEXEC;
        let beneath = ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_MAGICLINKS;
        let how = OpenHow::new().flags(flags).resolve(beneath | more);
        match openat2(self.dir()?, path, how) {
            // Old sandboxes answer EPERM to system calls that they do not know.
            Err(Errno::ENOSYS | Errno::EPERM) => Ok(self.walk(path, flags)?),
            other => Ok(other?),
        }
    }

    /// Step by step, following no link.
    fn walk(&self, path: &Path, flags: OFlag) -> nix::Result<OwnedFd> {
        let mut dir: Option<OwnedFd> = None;
        let mut names = path.components().filter(|c| *c != Component::CurDir).peekable();
        while let Some(component) = names.next() {
            let Component::Normal(name) = component else { return Err(Errno::EXDEV) };
            let flags =
                if names.peek().is_some() { OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC } else { flags };
            let at = dir.as_ref().unwrap_or(self.dir()?);
            // With O_PATH a link itself would be opened; asking for its kind refuses it.
            let next = openat(at, name, flags | OFlag::O_NOFOLLOW, Mode::empty())?;
            if nix::sys::stat::fstat(&next)?.st_mode & libc::S_IFMT == libc::S_IFLNK {
                return Err(Errno::ELOOP);
            }
            dir = Some(next);
        }
        match dir {
            Some(fd) => Ok(fd),
            None => openat(self.dir()?, ".", flags, Mode::empty()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn nothing_outside_and_nothing_that_blocks() {
        let temporary = tempfile::tempdir().unwrap();
        let job = temporary.path().join("job");
        fs::create_dir_all(job.join("sub")).unwrap();
        fs::write(temporary.path().join("secret"), "x").unwrap();
        fs::write(job.join("sub/inside"), "y").unwrap();
        symlink("../secret", job.join("relative")).unwrap();
        symlink("/etc/hostname", job.join("absolute")).unwrap();
        symlink("sub/inside", job.join("fine")).unwrap();
        symlink("..", job.join("up")).unwrap();
        nix::unistd::mkfifo(&job.join("fifo"), Mode::S_IRWXU).unwrap();
        let root = Root::open(&job).unwrap();
        for bad in ["relative", "absolute", "up/secret", "../secret", "fifo", "sub", "missing", "/etc/hostname"] {
            assert!(root.file(Path::new(bad)).is_err(), "{bad}");
        }
        assert!(root.file(Path::new("sub/inside")).is_ok());
        assert!(root.file(Path::new("fine")).is_ok(), "a link that stays below the folder is the job's own business");

        for bad in ["relative", "absolute", "up/secret", "../secret", "fifo", "sub", "missing", "fine", "/etc/hostname"]
        {
            assert!(root.writable(Path::new(bad)).is_err(), "writable {bad}");
        }
        assert!(root.writable(Path::new("sub/inside")).is_ok());

        let walked = |path: &str| root.walk(Path::new(path), OFlag::O_PATH | OFlag::O_CLOEXEC);
        for bad in ["relative", "absolute", "up/secret", "../secret", "fine", "missing", "/etc/hostname"] {
            assert!(walked(bad).is_err(), "walk {bad}");
        }
        assert!(walked("sub/inside").is_ok() && walked("./sub").is_ok() && walked(".").is_ok());
    }

    /// A path is swapped between a file of the job and a link out of its folder while it is opened.
    #[test]
    fn a_link_swapped_in_while_opening_leads_nowhere() {
        const ROUNDS: u32 = 3000;
        let temporary = tempfile::tempdir().unwrap();
        let job = temporary.path().join("job");
        fs::create_dir_all(job.join("real")).unwrap();
        fs::create_dir(temporary.path().join("outside")).unwrap();
        fs::write(temporary.path().join("outside/file"), "secret").unwrap();
        fs::write(job.join("real/file"), "own").unwrap();
        symlink("../outside", job.join("link")).unwrap();
        symlink("../outside/file", job.join("link-to-file")).unwrap();
        fs::write(job.join("file"), "own").unwrap();
        let root = Root::open(&job).unwrap();
        let swap = |a: &str, b: &str| {
            use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
            renameat2(AT_FDCWD, &job.join(a), AT_FDCWD, &job.join(b), RenameFlags::RENAME_EXCHANGE).unwrap();
        };
        let is_over = std::sync::atomic::AtomicBool::new(false);
        let mut read = [0u32; 2];
        std::thread::scope(|scope| {
            let swaps = scope.spawn(|| {
                let mut count = 0u32;
                while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                    swap("real", "link");
                    swap("file", "link-to-file");
                    count += 2;
                }
                count
            });
            for _ in 0..ROUNDS {
                for path in ["real/file", "link/file", "file", "link-to-file"] {
                    let opened = root.file(Path::new(path)).and_then(std::io::read_to_string);
                    let is_secret = opened.as_ref().is_ok_and(|text| text != "own");
                    read[usize::from(is_secret)] += 1;
                    let walked = root.walk(Path::new(path), OFlag::O_RDONLY | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK);
                    let walked = walked.map_err(io::Error::from).and_then(|fd| std::io::read_to_string(File::from(fd)));
                    read[usize::from(walked.is_ok_and(|text| text != "own"))] += 1;
                }
            }
            is_over.store(true, std::sync::atomic::Ordering::Relaxed);
            println!("fault: injected={} violations={}", swaps.join().unwrap(), read[1]);
        });
        assert_eq!(read[1], 0, "a file outside was read");
    }

    #[test]
    fn absolute_paths_only_below_the_folder() {
        let temporary = tempfile::tempdir().unwrap();
        let root = Root::open(temporary.path()).unwrap();
        assert_eq!(root.relative(&temporary.path().join("a/b")), Some(Path::new("a/b")));
        assert_eq!(root.relative(Path::new("a")), Some(Path::new("a")));
        assert_eq!(root.relative(Path::new("/etc/passwd")), None);
        assert_eq!(root.relative(Path::new("a/../../b")), None);
    }
}
