//! An emulated machine with Debian's cloud kernel, for what this machine's kernel does not have: cgroup v2.
//!
//! A guest is made of files of this machine: programs with the shared libraries they need, and modules of the kernel.
//! They become an initramfs, or a disk that an initramfs of a few modules mounts as its root. No hardware support is
//! needed: the processor is emulated, some ten to twenty times slower than the real one. What the guest writes on its
//! console is the result.
//!
//! Tests of other crates use this file by its path, so it needs the standard library only.

#![allow(dead_code, reason = "each user of this file uses another part of it")]

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Modules without which the guest cannot read its disk.
const DISK_MODULES: [&str; 2] = ["virtio_pci", "virtio_blk"];

/// The first program of a guest with a disk.
const MOUNT_DISK: &str = r#"#!/bin/busybox sh
/bin/busybox mount -t devtmpfs none /dev
for m in $(/bin/busybox cat /modules/order); do /bin/busybox insmod /modules/$m; done
/bin/busybox mount -t ext4 /dev/vda /disk || exit 1
/bin/busybox mount -t devtmpfs none /disk/dev
exec /bin/busybox switch_root /disk /init
"#;

/// The newest of Debian's cloud kernels: `/boot/vmlinuz-VERSION`.
pub(crate) fn newest_cloud_kernel() -> io::Result<PathBuf> {
    let all = fs::read_dir("/boot")?.flatten().map(|entry| entry.path());
    let is_cloud = |path: &PathBuf| {
        let path = path.to_string_lossy();
        path.contains("/vmlinuz-") && path.contains("-cloud-amd64")
    };
    all.filter(is_cloud).max().ok_or_else(|| {
        failure("a v2 kernel is needed: apt-get install linux-image-cloud-amd64 (cargo xtask test does it)")
    })
}

fn failure(text: impl Into<String>) -> io::Error {
    io::Error::other(text.into())
}

fn naming<T>(result: io::Result<T>, what: &str) -> io::Result<T> {
    result.map_err(|error| failure(format!("{what}: {error}")))
}

fn run(command: &mut Command, remedy: &str) -> io::Result<String> {
    let output = naming(command.output(), remedy)?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(failure(format!("{command:?} failed: {}", String::from_utf8_lossy(&output.stderr).trim()))),
    }
}

/// The files of a guest, as a folder of this machine.
pub(crate) struct Root {
    folder: PathBuf,
}

impl Root {
    /// A root file system with busybox. The guest's first program is `init`, a script.
    pub(crate) fn new(folder: &Path, init: &str) -> io::Result<Root> {
        for dir in ["bin", "dev", "etc", "proc", "run", "sys", "tmp"] {
            fs::create_dir_all(folder.join(dir))?;
        }
        let root = Root { folder: folder.to_owned() };
        let busybox = fs::copy("/bin/busybox", folder.join("bin/busybox"));
        naming(busybox, "busybox is needed: apt-get install busybox-static (cargo xtask test does it)")?;
        root.write("/init", init)?;
        fs::set_permissions(folder.join("init"), fs::Permissions::from_mode(0o755))?;
        Ok(root)
    }

    /// Where a path of the guest lies on this machine.
    pub(crate) fn inside(&self, path: &str) -> PathBuf {
        self.folder.join(path.trim_start_matches('/'))
    }

    fn make_parent(&self, path: &str) -> io::Result<PathBuf> {
        let inside = self.inside(path);
        fs::create_dir_all(inside.parent().ok_or_else(|| failure("a file lies in a folder"))?)?;
        Ok(inside)
    }

    pub(crate) fn write(&self, path: &str, content: &str) -> io::Result<()> {
        fs::write(self.make_parent(path)?, content)
    }

    /// A script that the guest can start.
    pub(crate) fn write_script(&self, path: &str, content: &str) -> io::Result<()> {
        self.write(path, content)?;
        fs::set_permissions(self.inside(path), fs::Permissions::from_mode(0o755))
    }

    pub(crate) fn link(&self, path: &str, target: &str) -> io::Result<()> {
        symlink(target, self.make_parent(path)?)
    }

    /// Copies a file; its rights go with it.
    pub(crate) fn copy(&self, from: &Path, to: &str) -> io::Result<()> {
        naming(fs::copy(from, self.make_parent(to)?), &from.display().to_string()).map(drop)
    }

    /// Copies a program and the shared libraries it needs.
    pub(crate) fn add_program(&self, program: &Path, to: &str) -> io::Result<()> {
        self.copy(program, to)?;
        // For a static program ldd fails; such a program needs no libraries.
        let printed = Command::new("ldd").arg(program).output();
        let printed =
            String::from_utf8_lossy(&naming(printed, "ldd is part of Debian's libc-bin")?.stdout).into_owned();
        for library in printed.lines().filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/'))) {
            if !self.inside(library).exists() {
                self.copy(Path::new(library), library)?;
            }
        }
        Ok(())
    }

    /// Copies modules of a kernel with the modules they need to `/modules`. The file `order` there names them in the
    /// order in which they can be loaded.
    pub(crate) fn add_modules(&self, kernel: &Path, names: &[&str]) -> io::Result<()> {
        let name = kernel.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let folder = Path::new("/lib/modules").join(name.trim_start_matches("vmlinuz-"));
        let list = folder.join("modules.dep");
        let list = naming(fs::read_to_string(&list), &list.display().to_string())?;
        let (mut order, mut seen) = (String::new(), BTreeSet::new());
        for name in names {
            let lines = list.lines().filter_map(|line| line.split_once(':'));
            let mut found = lines.filter(|(path, _)| path.ends_with(&format!("/{name}.ko")));
            let (path, needs) = found.next().ok_or_else(|| failure(format!("the kernel has no module {name}")))?;
            // The last of those that a module needs comes first.
            for path in needs.split_whitespace().rev().chain([path]).filter(|path| seen.insert(path.to_string())) {
                let file = path.rsplit('/').next().unwrap_or(path);
                self.copy(&folder.join(path), &format!("/modules/{file}"))?;
                order += &format!("{file}\n");
            }
        }
        self.write("/modules/order", &order)
    }

    /// All files as one archive, which the kernel unpacks into memory.
    pub(crate) fn into_initramfs(self, to: &Path) -> io::Result<()> {
        let script = format!("find . | cpio --quiet -o -H newc > '{}'", to.display());
        run(
            Command::new("sh").args(["-c", &script]).current_dir(&self.folder),
            "cpio is needed: apt-get install cpio (cargo xtask test does it)",
        )
        .map(drop)
    }

    /// All files as a disk with room for what the guest writes.
    pub(crate) fn into_disk(self, to: &Path, size_mib: u32) -> io::Result<()> {
        let size = format!("{size_mib}M");
        let mut make = Command::new("/sbin/mke2fs");
        make.args(["-q", "-F", "-t", "ext4", "-O", "^has_journal", "-m", "0", "-d"]);
        make.arg(&self.folder).arg(to).arg(size);
        run(&mut make, "mke2fs is needed: apt-get install e2fsprogs").map(drop)
    }
}

/// An initramfs that does nothing but mount the guest's disk and start `/init` there.
pub(crate) fn write_disk_initramfs(work: &Path, kernel: &Path, to: &Path) -> io::Result<()> {
    let root = Root::new(&work.join("early"), MOUNT_DISK)?;
    fs::create_dir_all(root.inside("/disk"))?;
    root.add_modules(kernel, &DISK_MODULES)?;
    root.into_initramfs(to)
}

/// What a guest is started with.
pub(crate) struct Machine<'a> {
    pub(crate) kernel: &'a Path,
    pub(crate) initramfs: &'a Path,
    pub(crate) disk: Option<&'a Path>,
    pub(crate) memory_mib: u32,
    /// The options of qemu's `-nic`.
    pub(crate) network: &'a str,
}

/// A running guest. It ends with the value.
pub(crate) struct Guest {
    process: Child,
    console: Arc<Mutex<String>>,
    reader: Option<JoinHandle<()>>,
}

impl Machine<'_> {
    pub(crate) fn command(&self) -> Command {
        // An emulated machine takes all the processor time that it gets: other tests go first.
        let mut command = Command::new("nice");
        command
            .args(["-n", "10", "qemu-system-x86_64"])
            .args(["-m", &self.memory_mib.to_string(), "-smp", "2", "-accel", "tcg,thread=multi", "-cpu", "max"])
            .args(["-nographic", "-no-reboot", "-nic", self.network]);
        if let Some(disk) = self.disk {
            // The disk is made for one boot.
            command.arg("-drive").arg(format!("file={},format=raw,if=virtio,cache=unsafe", disk.display()));
        }
        // Defences of the processor are expensive to emulate. Debian's engines would need a program to load AppArmor's
        // profiles. On a busy machine the kernel's test of its timer fails, and stops the guest.
        let words = "console=ttyS0 quiet panic=-1 mitigations=off audit=0 apparmor=0 selinux=0 no_timer_check";
        command.args(["-append", words, "-kernel"]).arg(self.kernel).arg("-initrd").arg(self.initramfs);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        command
    }

    pub(crate) fn start(&self) -> io::Result<Guest> {
        Guest::start(&mut self.command())
    }
}

impl Guest {
    /// Starts a command that [`Machine::command`] has made.
    pub(crate) fn start(command: &mut Command) -> io::Result<Guest> {
        let remedy = "qemu is needed: apt-get install qemu-system-x86 (cargo xtask test does it)";
        let mut process = naming(command.spawn(), remedy)?;
        let mut pipe = process.stdout.take().ok_or_else(|| failure("the console is piped"))?;
        let console = Arc::new(Mutex::new(String::new()));
        let kept = console.clone();
        let reader = std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = pipe.read(&mut bytes) {
                let text = String::from_utf8_lossy(&bytes[..count]).replace('\r', "");
                kept.lock().unwrap_or_else(PoisonError::into_inner).push_str(&text);
            }
        });
        Ok(Guest { process, console, reader: Some(reader) })
    }

    /// What the guest has written on its console.
    pub(crate) fn console(&self) -> String {
        self.console.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether the guest has not switched itself off.
    pub(crate) fn is_running(&mut self) -> bool {
        matches!(self.process.try_wait(), Ok(None))
    }

    /// Waits until the guest switches itself off, or ends it after `patience`. Returns what it wrote on its console.
    pub(crate) fn wait(mut self, patience: Duration) -> String {
        let start = Instant::now();
        while start.elapsed() < patience && self.is_running() {
            std::thread::sleep(Duration::from_millis(100));
        }
        self.end();
        self.console()
    }

    fn end(&mut self) {
        let _ = (self.process.kill(), self.process.wait());
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.end();
    }
}
