//! The process runtime on a real cgroup v2 kernel, whatever kernel this machine runs.
//!
//! The program of these tests is put into an initramfs with its shared
//! libraries and busybox, and runs on Debian's cloud kernel in an emulated machine (no hardware support
//! needed). There it runs three times: as root; as a user in a delegated subtree; and as a user alone in a
//! delegated group, which must first move its own process aside. The guest prints the test harness's own
//! lines on the serial console; this test asserts on them.

use crate::guest::{Machine, Root, newest_cloud_kernel};
use std::time::Duration;

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
/tests conformance:: --skip docker_ --include-ignored --test-threads=1 --show-output 2>&1
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
    tests=
    for test in process_runtime_conforms a_child_of_the_job_cannot_leave_and_dies_with_it nothing_is_left_behind; do
        tests="$tests conformance::$test"
    done
    exec su jane -c "exec /tests --include-ignored --test-threads=1 --exact $tests" 2>&1
)
echo "EXIT user $?"

echo "RUN alone"
(
    echo 0 > /sys/fs/cgroup/alone/cgroup.procs
    exec su jane -c "exec /tests --include-ignored --test-threads=1 --exact conformance::quota_caps_and_lets_go" 2>&1
)
echo "EXIT alone $?"

echo "LEFT $(find /sys/fs/cgroup -name 'gainshare-test*' | wc -l)"
poweroff -f
"#;

#[test]
#[ignore = "needs qemu and a kernel of Debian"]
fn process_runtime_conforms_on_v2_in_qemu() {
    let work = tempfile::tempdir().unwrap();
    let root = Root::new(&work.path().join("root"), INIT).unwrap();
    root.add_program(&std::env::current_exe().unwrap(), "/tests").unwrap();
    root.write("/etc/passwd", "root:x:0:0::/:/bin/sh\njane:x:1000:1000::/:/bin/sh\n").unwrap();
    root.write("/etc/group", "root:x:0:\njane:x:1000:\n").unwrap();
    let initramfs = work.path().join("initramfs");
    root.into_initramfs(&initramfs).unwrap();
    let kernel = &newest_cloud_kernel().unwrap();
    let machine = Machine { kernel, initramfs: &initramfs, disk: None, memory_mib: 768, network: "none" };
    let console = machine.start().unwrap().wait(PATIENCE);

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
