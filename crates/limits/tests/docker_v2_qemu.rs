//! The Docker runtime on a real cgroup v2 kernel, whatever kernel this machine runs, with both of Docker's cgroup
//! drivers.
//!
//! Debian's Docker engine and the program of these tests run on Debian's cloud kernel in an emulated machine. First the
//! guest's first process is a shell, and the engine makes the groups of its containers itself (driver `cgroupfs`). With
//! `GAINSHARE_SYSTEMD=1`, which takes some minutes more, systemd then becomes the first process, and the engine asks
//! systemd for the groups (driver `systemd`). The guest prints the test harness's own lines on the serial console; this
//! test asserts on them.

use crate::guest::{Machine, Root, newest_cloud_kernel, write_disk_initramfs};
use std::path::Path;
use std::time::Duration;

/// Boot and tests take one to four minutes on two idle cores, and twice that beside other tests.
const PATIENCE: Duration = Duration::from_secs(13 * 60);

const INIT: &str = r#"#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
mount -t proc none /proc
mount -t sysfs none /sys
mount -t cgroup2 none /sys/fs/cgroup
mount -t tmpfs none /run
mount -t tmpfs none /tmp
chmod 1777 /tmp
for m in $(cat /modules/order); do insmod /modules/$m; done
echo; echo "CONTROLLERS $(cat /sys/fs/cgroup/cgroup.controllers)"
/suite cgroupfs docker_conformance
exec NEXT
"#;

/// What the guest does after the tests with the first driver.
const POWER_OFF: &str = "poweroff -f";
const SYSTEMD: &str =
    "/lib/systemd/systemd --unit=suite.target --show-status=no --log-target=console --log-level=notice";

/// Runs all tests with one driver.
const SUITE: &str = r#"#!/bin/busybox sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin GAINSHARE_TEST_CGROUP_DRIVER=$1
echo "FIRST $1 $(cat /proc/1/comm)"
for program in $2; do
    echo "RUN $1 $program after $(cut -d ' ' -f 1 /proc/uptime) s"
    /tests $program:: --include-ignored --test-threads=1 --show-output 2>&1
    echo "EXIT $1 $program $?"
done
echo "LEFT $1 $(find /sys/fs/cgroup -name '*gainshare*' | wc -l)"
echo "END $1 after $(cut -d ' ' -f 1 /proc/uptime) s"
[ $1 = cgroupfs ] || poweroff -f
"#;

/// The drivers with the guest's first process and the programs that run with them. An emulated machine takes seconds to
/// start a container, so the driver that has more to differ in gets more tests.
const ROUNDS: [(&str, &str, &[&str]); 2] =
    [("cgroupfs", "init", &["docker_conformance"]), ("systemd", "systemd", &["docker_conformance", "docker_limits"])];

/// systemd starts the tests and nothing else.
const TARGET: &str = "[Unit]\nDefaultDependencies=no\nRequires=suite.service\n";
const SERVICE: &str = "[Unit]\nDefaultDependencies=no\n[Service]\nExecStart=/suite systemd \"docker_conformance docker_limits\"\nDelegate=yes\n\
                       StandardOutput=tty\nStandardError=tty\nTTYPath=/dev/console\n";

/// The engine and what it starts.
const ENGINE: [&str; 5] = [
    "/usr/sbin/dockerd",
    "/usr/bin/containerd",
    "/usr/bin/containerd-shim-runc-v2",
    "/usr/sbin/runc",
    "/usr/bin/docker-init",
];

#[test]
#[ignore = "needs qemu, a kernel of Debian, Docker and systemd"]
fn docker_runtime_conforms_on_v2_in_qemu() {
    let work = tempfile::tempdir().unwrap();
    let kernel = &newest_cloud_kernel().unwrap();
    let with_systemd = std::env::var("GAINSHARE_SYSTEMD").is_ok_and(|value| value == "1");
    let (rounds, next) = if with_systemd { (&ROUNDS[..], SYSTEMD) } else { (&ROUNDS[..1], POWER_OFF) };
    let root = Root::new(&work.path().join("root"), &INIT.replace("NEXT", next)).unwrap();
    for program in ENGINE {
        root.add_program(Path::new(program), program).unwrap();
    }
    root.add_program(Path::new("/lib/systemd/systemd"), "/lib/systemd/systemd").unwrap();
    root.add_program(&std::env::current_exe().unwrap(), "/tests").unwrap();
    root.add_modules(kernel, &["overlay"]).unwrap();
    root.write("/etc/passwd", "root:x:0:0::/:/bin/sh\n").unwrap();
    root.write("/etc/group", "root:x:0:\n").unwrap();
    root.write_script("/suite", SUITE).unwrap();
    root.write("/etc/systemd/system/suite.target", TARGET).unwrap();
    root.write("/etc/systemd/system/suite.service", SERVICE).unwrap();
    let (initramfs, disk) = (work.path().join("initramfs"), work.path().join("disk"));
    root.into_disk(&disk, 640).unwrap();
    write_disk_initramfs(work.path(), kernel, &initramfs).unwrap();
    let machine = Machine { kernel, initramfs: &initramfs, disk: Some(&disk), memory_mib: 2048, network: "none" };
    let console = machine.start().unwrap().wait(PATIENCE);

    print!("{console}");
    let line = |start: &str| console.lines().map(str::trim).find_map(|l| l.strip_prefix(start));
    let controllers = line("CONTROLLERS ").expect("the guest boots");
    for needed in ["cpu", "cpuset", "memory", "io", "pids"] {
        assert!(controllers.split(' ').any(|c| c == needed), "{needed} is not among {controllers}");
    }
    for &(driver, first, programs) in rounds {
        assert_eq!(line(&format!("FIRST {driver} ")), Some(first), "the first process");
        for program in programs {
            assert_eq!(line(&format!("EXIT {driver} {program} ")), Some("0"), "with the driver {driver}");
        }
        assert_eq!(line(&format!("LEFT {driver} ")), Some("0"), "groups are left behind with the driver {driver}");
    }
    let passed = console.lines().filter(|l| l.trim().ends_with("... ok")).count();
    assert_eq!(passed, if with_systemd { 3 + 3 + 5 } else { 3 }, "tests that ran");
}
