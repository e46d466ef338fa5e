//! Jobs on GPUs, with a library that plays NVIDIA's management library. The jobs are ordinary processes.

mod common;

use common::{Daemon, read, wait_until};
use gainshare_daemon::api::types::JobState;
use gainshare_daemon::spec::JobSpec;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::path::{Path, PathBuf};
use std::process::Command;

const GIB: u64 = 1 << 30;

/// Two GPUs, and what the driver says about them.
struct FakeDriver {
    dir: tempfile::TempDir,
}

impl FakeDriver {
    fn new() -> FakeDriver {
        let dir = tempfile::tempdir().unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../limits/tests/fake_nvml.c");
        let built = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1"])
            .arg(format!("-DSTATE=\"{}\"", dir.path().join("state").display()))
            .arg("-o")
            .args([&dir.path().join("libnvidia-ml.so.1"), &source])
            .output()
            .unwrap();
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        let driver = FakeDriver { dir };
        driver.set("");
        driver
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Says that these processes are on the GPUs: `process GPU PID MEMORY PERCENT`, a line each.
    fn set(&self, processes: &str) {
        let gpus = format!("gpu 0 27 0 {} {}\ngpu 0 59 0 {} {}\n", 80 * GIB, 60 * GIB, 80 * GIB, 20 * GIB);
        std::fs::write(self.path("new"), gpus + processes).unwrap();
        std::fs::rename(self.path("new"), self.path("state")).unwrap();
    }

    fn start(&self, daemon: &mut Daemon) {
        let library = self.path("libnvidia-ml.so.1");
        daemon.up_with(&[("GAINSHARE_NVML", library.to_str().unwrap())]);
        daemon.wait_up();
    }
}

fn job(name: &str, script: &str) -> JobSpec {
    let command = vec!["sh".to_owned(), "-c".to_owned(), script.to_owned()];
    JobSpec { name: Some(name.into()), ..JobSpec::new(command) }
}

fn stop(d: &Daemon, names: &[&str]) {
    for name in names {
        d.call(d.client.stop(name, 5.0)).unwrap();
        d.wait_end(name);
    }
}

#[test]
fn memory_and_time_on_a_gpu_are_shown_of_each_job() {
    let driver = FakeDriver::new();
    let mut d = Daemon::new("");
    driver.start(&mut d);
    let file = driver.path("pid");
    // The second job computes in a process that left its session.
    let script = format!("setsid sh -c 'echo $$ > {0}.new; mv {0}.new {0}; exec sleep 120' & wait", file.display());
    d.submit(vec![job("one", "exec sleep 600"), job("two", &script)]).unwrap();
    wait_until("both jobs run", 30, || file.exists() && d.job("one").pid.is_some());
    let (one, two) = (d.job("one").pid.unwrap(), read(&file).trim().to_owned());
    let own = std::process::id();
    let processes = |gib: u64| {
        format!("process 0 {one} {} 30\nprocess 1 {two} {} 60\nprocess 1 {own} {} 40\n", gib * GIB, 5 * GIB, 7 * GIB)
    };
    driver.set(&processes(12));
    wait_until("the memory of both is known", 30, || {
        d.job("one").gpu_memory_bytes == Some(12 * GIB) && d.job("two").gpu_memory_bytes == Some(5 * GIB)
    });
    wait_until("their GPU time grows", 30, || {
        let used_s = |name: &str| d.job(name).gpu_time_s.unwrap_or(0.0);
        used_s("one") > 0.5 && used_s("two") > used_s("one")
    });
    let notes = d.call(d.client.explain("one")).unwrap().notes;
    let expected = "GPU memory: 12.0 GiB of this job, 60.0 GiB of 80.0 GiB are free on its GPU";
    assert!(notes.iter().any(|note| note == expected), "{notes:?}");
    driver.set(&processes(3));
    wait_until("less memory is shown", 30, || d.job("one").gpu_memory_bytes == Some(3 * GIB));
    assert_eq!(d.job("one").gpu_memory_peak_bytes, Some(12 * GIB));
    stop(&d, &["one", "two"]);
    // Its job does not wait for a process that left the session.
    let _ = kill(Pid::from_raw(two.parse().unwrap()), Signal::SIGKILL);
    assert_eq!(d.job("one").gpu_memory_bytes, None);
    d.kill9();
    driver.start(&mut d);
    assert_eq!(d.job("one").gpu_memory_peak_bytes, Some(12 * GIB), "the journal keeps it");
}

#[test]
fn a_driver_that_does_not_answer_delays_nothing() {
    let driver = FakeDriver::new();
    driver.set("sleep 600\n");
    let mut d = Daemon::new("");
    driver.start(&mut d);
    d.submit(vec![job("long", "exec sleep 600")]).unwrap();
    d.wait_state("long", JobState::Running);
    for i in 0..3 {
        let name = format!("short-{i}");
        d.submit(vec![job(&name, "sleep 0.7")]).unwrap();
        assert_eq!(d.wait_end(&name).state, JobState::Done);
    }
    assert_eq!(d.job("long").gpu_memory_bytes, None);
    stop(&d, &["long"]);
    d.call(d.client.shutdown(false)).unwrap();
    d.wait_dead();
}

#[test]
fn explain_says_why_the_driver_measures_nothing() {
    let mut d = Daemon::new("");
    d.up_with(&[("GAINSHARE_NVML", "/nowhere/libnvidia-ml.so.1")]);
    d.wait_up();
    d.submit(vec![JobSpec { gpu: true, ..job("one", "exec sleep 600") }]).unwrap();
    let notes = || d.call(d.client.explain("one")).unwrap().notes;
    wait_until("explain has a note", 30, || {
        notes().iter().any(|note| note.starts_with("GPU memory is not measured: cannot load /nowhere/"))
    });
    stop(&d, &["one"]);
}
