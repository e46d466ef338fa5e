//! The process runtime on a real cgroup v2 kernel, whatever kernel this machine runs.
//!
//! The program of the conformance tests, built beside this one, is put into an initramfs with its shared
//! libraries and busybox, and runs on Debian's cloud kernel in an emulated machine (no hardware support
//! needed). There it runs three times: as root; as a user in a delegated subtree; and as a user alone in a
//! delegated group, which must first move its own process aside. The guest prints the test harness's own
//! lines on the serial console; this test asserts on them.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Boot and tests take some 40 s on two cores.
const PATIENCE: Duration = Duration::from_secs(240);

const INIT: &str = r#"#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev
mount -t cgroup2 none /sys/fs/cgroup
chmod 1777 /tmp
echo; echo "CONTROLLERS $(cat /sys/fs/cgroup/cgroup.controllers)"

echo "RUN root"
/conformance --include-ignored --test-threads=1 --show-output 2>&1
echo "EXIT root $?"

cd /sys/fs/cgroup
for c in cpu cpuset memory io pids; do echo +$c > cgroup.subtree_control; done
mkdir user alone
for c in cpu cpuset memory io pids; do echo +$c > user/cgroup.subtree_control; done
mkdir user/session
chown -R jane user alone
cd /

echo "RUN user"
(
    echo 0 > /sys/fs/cgroup/user/session/cgroup.procs
    tests="process_runtime_conforms a_child_of_the_job_cannot_leave_and_dies_with_it nothing_is_left_behind"
    exec su jane -c "exec /conformance --include-ignored --test-threads=1 --exact $tests" 2>&1
)
echo "EXIT user $?"

echo "RUN alone"
(
    echo 0 > /sys/fs/cgroup/alone/cgroup.procs
    exec su jane -c "exec /conformance --include-ignored --test-threads=1 --exact quota_caps_and_lets_go" 2>&1
)
echo "EXIT alone $?"

echo "LEFT $(find /sys/fs/cgroup -name 'gainshare-test*' | wc -l)"
poweroff -f
"#;

#[test]
#[ignore = "needs qemu and a kernel of Debian"]
fn process_runtime_conforms_on_v2_in_qemu() {
    let work = tempfile::tempdir().unwrap();
    let program = conformance_program();
    let image = make_initramfs(work.path(), &program);
    let console = boot(&newest_cloud_kernel(), &image);

    print!("{console}");
    let line = |start: &str| console.lines().map(str::trim).find_map(|l| l.strip_prefix(start));
    let controllers = line("CONTROLLERS ").expect("the guest boots");
    for needed in ["cpu", "cpuset", "memory", "io", "pids"] {
        assert!(controllers.split(' ').any(|c| c == needed), "{needed} is not among {controllers}");
    }
    for run in ["root", "user", "alone"] {
        assert_eq!(line(&format!("EXIT {run} ")), Some("0"), "as {run}");
    }
    let passed = console.lines().filter(|l| l.trim().ends_with("... ok")).count();
    assert!(passed >= 14, "only {passed} tests ran");
    assert_eq!(line("LEFT "), Some("0"), "groups are left behind");
}

/// The conformance tests as they were built beside this test. Where there are several builds, the newest
/// has the newest source.
fn conformance_program() -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let folder = own.parent().expect("a program lies in a folder");
    let is_program = |path: &Path| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.starts_with("conformance-") && path.extension().is_none()
    };
    let built = std::fs::read_dir(folder).unwrap().flatten().map(|entry| entry.path()).filter(|path| is_program(path));
    let newest = built.max_by_key(|path| path.metadata().and_then(|meta| meta.modified()).ok());
    newest.expect("the tests of this crate are built together: cargo test -p gainshare-limits")
}

/// Puts a program and the shared libraries it needs into the folder of a root file system.
fn copy_with_libraries(program: &Path, name: &str, root: &Path) {
    std::fs::copy(program, root.join(name)).unwrap();
    let ldd = Command::new("ldd").arg(program).output().expect("ldd is part of Debian's libc-bin");
    let printed = String::from_utf8(ldd.stdout).unwrap();
    for library in printed.lines().filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/'))) {
        let inside = root.join(library.trim_start_matches('/'));
        std::fs::create_dir_all(inside.parent().unwrap()).unwrap();
        std::fs::copy(library, inside).unwrap();
    }
}

fn make_initramfs(work: &Path, program: &Path) -> PathBuf {
    let root = work.join("root");
    for dir in ["bin", "dev", "etc", "proc", "sys", "tmp"] {
        std::fs::create_dir_all(root.join(dir)).unwrap();
    }
    std::fs::copy("/bin/busybox", root.join("bin/busybox"))
        .expect("busybox is needed: apt-get install busybox-static (cargo xtask test does it)");
    copy_with_libraries(program, "conformance", &root);
    std::fs::write(root.join("etc/passwd"), "root:x:0:0::/:/bin/sh\njane:x:1000:1000::/:/bin/sh\n").unwrap();
    std::fs::write(root.join("etc/group"), "root:x:0:\njane:x:1000:\n").unwrap();
    std::fs::write(root.join("init"), INIT).unwrap();
    let image = work.join("initramfs");
    let script = "chmod +x init && find . | cpio --quiet -o -H newc > ../initramfs";
    let status = Command::new("sh").args(["-c", script]).current_dir(&root).status().unwrap();
    assert!(status.success() && image.exists(), "cpio is needed: apt-get install cpio (cargo xtask test does it)");
    image
}

fn newest_cloud_kernel() -> PathBuf {
    let mut kernels: Vec<PathBuf> = std::fs::read_dir("/boot")
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.to_string_lossy().contains("/vmlinuz-") && path.to_string_lossy().contains("-cloud-amd64"))
        .collect();
    kernels.sort();
    kernels.pop().expect("a v2 kernel is needed: apt-get install linux-image-cloud-amd64 (cargo xtask test does it)")
}

/// Boots and returns what the guest wrote on its console until it switched itself off.
fn boot(kernel: &Path, initramfs: &Path) -> String {
    let mut machine = Command::new("qemu-system-x86_64")
        .args([
            "-m",
            "768",
            "-smp",
            "2",
            "-accel",
            "tcg,thread=multi",
            "-cpu",
            "max",
            "-nographic",
            "-no-reboot",
            "-nic",
            "none",
        ])
        .args(["-append", "console=ttyS0 quiet panic=-1", "-kernel"])
        .arg(kernel)
        .arg("-initrd")
        .arg(initramfs)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("qemu is needed: apt-get install qemu-system-x86 (cargo xtask test does it)");
    let mut pipe = machine.stdout.take().unwrap();
    let reader = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = pipe.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).replace('\r', "")
    });
    let start = Instant::now();
    while start.elapsed() < PATIENCE && machine.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_millis(100));
    }
    let _ = machine.kill();
    let _ = machine.wait();
    reader.join().unwrap()
}
