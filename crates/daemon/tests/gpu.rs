//! Jobs on GPUs, with a library that plays NVIDIA's management library. The jobs are ordinary processes.

use crate::common::{Daemon, read, wait_until};
use gainshare_daemon::api::types::{JobState, ReasonInfo, WAITS_FOR_GPU_MEMORY};
use gainshare_daemon::spec::JobSpec;
use gainshare_limits::process::ProcessStat;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

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
        self.set_free([60, 20], processes);
    }

    /// The same, with this number of GiB free on each GPU.
    fn set_free(&self, free_gib: [u64; 2], processes: &str) {
        let free = free_gib.map(|gib| gib * GIB);
        let gpus = format!("gpu 0 27 0 {0} {1}\ngpu 0 59 0 {0} {2}\n", 80 * GIB, free[0], free[1]);
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

/// Whether the process is stopped now.
fn is_stopped(pid: i32) -> bool {
    ProcessStat::of(pid).is_some_and(|stat| stat.state == 'T')
}

/// The part of 300 moments, 5 ms or more apart, in which the process is stopped.
fn stopped_part(pid: i32) -> f64 {
    let moments = 300;
    let is_stopped = |_: &i32| {
        std::thread::sleep(Duration::from_millis(5));
        is_stopped(pid)
    };
    (0..moments).filter(is_stopped).count() as f64 / f64::from(moments)
}

/// Two jobs on one GPU whose launches nobody catches: they count loops. The second one may have a fifth of the GPU.
struct Pair {
    d: Daemon,
    driver: FakeDriver,
    large: i32,
    small: i32,
}

impl Pair {
    /// Needs control groups: without them jobs are stopped and continued for their share of the CPU.
    fn start() -> Pair {
        let driver = FakeDriver::new();
        let mut d = Daemon::new("policy = \"na\"");
        driver.start(&mut d);
        let spec = |name: &str, max: f64| {
            let file = driver.path(name);
            let count = format!("i=0; while :; do i=$((i+1)); echo $i > {}; done", file.display());
            JobSpec { gpu: true, max, ..job(name, &count) }
        };
        d.submit(vec![spec("large", 1.0), spec("small", 0.2)]).unwrap();
        wait_until("both jobs run", 30, || ["large", "small"].iter().all(|name| d.job(name).pid.is_some()));
        let (large, small) = (d.job("large").pid.unwrap(), d.job("small").pid.unwrap());
        let pair = Pair { d, driver, large, small };
        pair.show(&[(0, large), (0, small)]);
        pair
    }

    /// Shows these processes on these GPUs.
    fn show(&self, processes: &[(u32, i32)]) {
        let line = |(gpu, pid): &(u32, i32)| format!("process {gpu} {pid} {GIB} 50\n");
        self.driver.set(&processes.iter().map(line).collect::<String>());
    }

    fn note(&self, name: &str) -> String {
        let notes = self.d.call(self.d.client.explain(name)).unwrap().notes;
        notes.into_iter().find(|note| note.starts_with("GPU: ")).unwrap_or_default()
    }

    fn wait_note(&self, name: &str, part: &str) {
        wait_until(&format!("{name} is {part}"), 60, || self.note(name).contains(part));
    }

    fn wait_stopped(&self) {
        self.wait_note("small", "stopped and continued every 0.1 s");
        wait_until("the small job is stopped", 30, || is_stopped(self.small));
    }

    fn loops(&self, name: &str) -> u64 {
        // The file is empty for a moment while it is written, and for longer if the job is stopped there.
        let file = self.driver.path(name);
        let found = std::iter::repeat_with(|| read(&file).trim().parse().ok()).take(1_000_000).flatten().next();
        found.expect("the job counts")
    }

    fn assert_counts(&self, name: &str) {
        let before = self.loops(name);
        wait_until(&format!("{name} goes on"), 30, || self.loops(name) > before);
    }
}

#[test]
#[ignore = "needs root and cgroups"]
fn a_job_whose_launches_are_not_caught_is_stopped_for_a_part_of_the_time() {
    let pair = Pair::start();
    pair.wait_stopped();
    assert!(pair.note("small").contains("its launches are not caught"), "{}", pair.note("small"));
    let part = stopped_part(pair.small);
    assert!(part > 0.35, "it should be stopped for about three fifths of the time: {part}");
    assert_eq!(stopped_part(pair.large), 0.0, "the largest share is never stopped");
    pair.assert_counts("small");
    assert!(pair.d.job("small").gpu_share.is_some_and(|share| share < 0.3));

    // Alone on its GPU.
    pair.show(&[(1, pair.large), (0, pair.small)]);
    pair.wait_note("small", "not stopped at the moment");
    wait_until("who is alone is never stopped", 30, || stopped_part(pair.small) == 0.0);

    // On several GPUs.
    pair.show(&[(0, pair.large), (0, pair.small), (1, pair.small)]);
    pair.wait_note("small", "it is on several GPUs");
    wait_until("it is never stopped", 30, || stopped_part(pair.small) == 0.0);
    stop(&pair.d, &["large", "small"]);
}

#[test]
#[ignore = "needs root and cgroups"]
fn a_stopped_job_goes_on_when_the_daemon_is_killed() {
    let mut pair = Pair::start();
    pair.wait_stopped();
    // In the midst of a pause: the daemon is killed within a moment of it.
    wait_until("the small job is stopped", 30, || is_stopped(pair.small));
    pair.d.kill9();
    wait_until("the small job is stopped no more", 30, || stopped_part(pair.small) == 0.0);
    pair.assert_counts("small");

    // The next daemon paces it again, and lets it end when asked.
    pair.driver.start(&mut pair.d);
    pair.wait_stopped();
    stop(&pair.d, &["small", "large"]);
}

#[test]
#[ignore = "needs root and cgroups"]
fn a_job_that_the_keeper_left_stopped_goes_on() {
    let mut pair = Pair::start();
    pair.wait_stopped();
    let keeper = child_with_word(pair.d.pid(), "keep").expect("a keeper runs");
    wait_until("the small job is stopped", 30, || is_stopped(pair.small));
    kill(keeper, Signal::SIGKILL).unwrap();
    wait_until("another keeper runs", 30, || child_with_word(pair.d.pid(), "keep").is_some_and(|pid| pid != keeper));
    pair.assert_counts("small");

    // The daemon and its keeper at once: the next daemon continues the job.
    let keeper = child_with_word(pair.d.pid(), "keep").unwrap();
    pair.wait_stopped();
    kill(keeper, Signal::SIGKILL).unwrap();
    pair.d.kill9();
    pair.driver.start(&mut pair.d);
    pair.assert_counts("small");
    stop(&pair.d, &["small", "large"]);
}

/// A living child of this process whose last argument is `word`.
fn child_with_word(parent: Pid, word: &str) -> Option<Pid> {
    let is_wanted = |pid: i32| {
        let stat = ProcessStat::of(pid)?;
        let command = read(Path::new(&format!("/proc/{pid}/cmdline")));
        let is_child = stat.parent == parent.as_raw() && stat.state != 'Z';
        (is_child && command.trim_end_matches('\0').rsplit('\0').next() == Some(word)).then_some(Pid::from_raw(pid))
    };
    let pids =
        std::fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.into_iter().find_map(is_wanted)
}

/// Waits until the daemon knows the GPUs.
fn wait_for_reading(d: &Daemon, driver: &FakeDriver) {
    d.submit(vec![job("probe", "exec sleep 600")]).unwrap();
    let pid = d.wait_state("probe", JobState::Running).pid.unwrap();
    driver.set(&format!("process 0 {pid} {GIB} 1\n"));
    wait_until("the GPUs are read", 30, || d.job("probe").gpu_memory_bytes.is_some());
    stop(d, &["probe"]);
}

fn needs(name: &str, memory: &str) -> JobSpec {
    JobSpec { gpu_memory: Some(memory.into()), ..job(name, "exec sleep 600") }
}

/// Waits until the job waits for memory; the sentence about it.
fn wait_for_wait(d: &Daemon, name: &str) -> String {
    let is_without =
        |reason: &ReasonInfo| reason.why == WAITS_FOR_GPU_MEMORY && reason.text.contains("are free for it");
    let job = d.wait(name, "waiting for memory", |job| job.reason.as_ref().is_some_and(is_without));
    assert_eq!(job.state, JobState::Queued);
    job.reason.unwrap().text
}

#[test]
fn a_job_that_does_not_fit_waits_until_there_is_room() {
    let driver = FakeDriver::new();
    let mut d = Daemon::new("");
    driver.start(&mut d);
    wait_for_reading(&d, &driver);
    let refused = d.submit(vec![needs("never", "81G")]).unwrap_err().to_string();
    assert!(refused.contains("needs 81.0 GiB") && refused.contains("the largest GPU has 80.0 GiB"), "{refused}");

    d.submit(vec![needs("large", "70G")]).unwrap();
    let text = wait_for_wait(&d, "large");
    assert!(text.contains("70.0 GiB") && text.contains("60.0 GiB") && text.contains("--gpu-memory 0"), "{text}");
    d.submit(vec![needs("anyway", "0"), needs("small", "50GiB")]).unwrap();
    d.wait_state("anyway", JobState::Running);
    d.wait_state("small", JobState::Running);
    // The small job has allocated nothing yet, but it will.
    d.submit(vec![needs("next", "15G"), needs("after-next", "15G")]).unwrap();
    d.wait_state("next", JobState::Running);
    assert!(wait_for_wait(&d, "after-next").contains("at most 10.0 GiB are free"), "10 of 60 and 5 of 20 GiB");

    stop(&d, &["small", "next"]);
    d.wait_state("after-next", JobState::Running);
    driver.set_free([78, 20], "");
    wait_for_wait(&d, "large");
    stop(&d, &["after-next"]);
    d.wait_state("large", JobState::Running);
    stop(&d, &["large", "anyway"]);
}

#[test]
fn what_an_earlier_run_had_is_what_the_next_one_needs() {
    let driver = FakeDriver::new();
    let mut d = Daemon::new("");
    driver.start(&mut d);
    let end = driver.path("end");
    let run = |name: &str| job(name, &format!("while [ ! -e {} ]; do sleep 0.1; done", end.display()));
    d.submit(vec![run("first")]).unwrap();
    let pid = d.wait_state("first", JobState::Running).pid.unwrap();
    driver.set(&format!("process 0 {pid} {} 50\n", 30 * GIB));
    wait_until("its memory is known", 30, || d.job("first").gpu_memory_peak_bytes == Some(30 * GIB));
    std::fs::write(&end, "").unwrap();
    assert_eq!(d.wait_end("first").state, JobState::Done);
    std::fs::remove_file(&end).unwrap();
    d.kill9();
    driver.set_free([25, 20], "");
    driver.start(&mut d);

    d.submit(vec![run("second")]).unwrap();
    let text = wait_for_wait(&d, "second");
    assert!(text.contains("as its last run did, 30.0 GiB") && text.contains("25.0 GiB"), "{text}");
    d.submit(vec![JobSpec { gpu_memory: Some("0".into()), ..run("third") }]).unwrap();
    d.wait_state("third", JobState::Running);
    driver.set_free([30, 20], "");
    d.wait_state("second", JobState::Running);
    stop(&d, &["second", "third"]);
}
