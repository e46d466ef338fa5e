//! The process runtime without cgroup rights, as an ordinary user on the real kernel.
//!
//! The tests start as root. Each starts its own program again as `nobody` on one CPU, with a
//! [`Role`] in the environment: the inner test, or the daemon that is killed. The keepers are the
//! same program in a third role. To cover both means of sharing, the inner process is put either
//! where the kernel may schedule by session (the topmost cpu group) or into a group of its own,
//! where it does not and only stopping and continuing is left.

#![allow(unsafe_code, reason = "a step between fork and exec")]

use crate::suite::{self, Subject, cpu_target, wait_until};
use gainshare_core::fixtures::checked_target;
use gainshare_core::model::JobId;
use gainshare_core::plan::Target;
use gainshare_limits::cgroup::{BaseGroup, CpuList, Hierarchy};
use gainshare_limits::process::{Config, Identity, ProcessRuntime, ProcessStat, keeper, start};
use gainshare_limits::{JobHandle, LimitMode, Runtime, RuntimeError};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const BUSY: &str = "while :; do :; done";

/// What this process is. Set in the environment by the process that starts it.
const ROLE: &str = "GAINSHARE_TEST_ROLE";

#[derive(Debug, Clone, Copy, PartialEq)]
enum Role {
    /// Root: starts the others.
    Outer,
    /// The test itself, as nobody.
    Inner,
    /// A keeper of the fallback.
    Keeper,
}

impl Role {
    fn own() -> Role {
        match std::env::var(ROLE).as_deref() {
            Ok("inner") => Role::Inner,
            Ok("keeper") => Role::Keeper,
            _ => Role::Outer,
        }
    }
}

// ---- outside: root, starts the inner processes as nobody ----

struct Stage {
    base: BaseGroup,
    group: gainshare_limits::cgroup::Group,
    dir: tempfile::TempDir,
    /// Held until the stage is dropped.
    _only_stage: std::fs::File,
}

impl Stage {
    fn new(name: &str) -> Stage {
        assert!(nix::unistd::geteuid().is_root(), "these tests become an ordinary user and so start as root");
        // All stages compete for CPU 0, with the same weight: one at a time, also between test processes.
        let only_stage = std::fs::File::create(std::env::temp_dir().join("gainshare-test-fallback.lock")).unwrap();
        only_stage.lock().expect("a lock on the temporary directory");
        let base = format!("gainshare-test-fallback-{name}-{}", std::process::id());
        let mut base = BaseGroup::open(Hierarchy::detect().expect("cgroup rights"), &base).expect("a base group");
        let group = base.create("inner").expect("a group");
        // The duty cycle takes CPU time that other programs use for a lack of demand: on a busy
        // machine two jobs would never compete. With the largest weight the inner processes have
        // CPU 0 almost for themselves.
        base.set_weight_for(256);
        // The user `nobody` must be able to read the program, wherever it was built.
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("inner");
        // By another process: a program that is still open for writing, be it by a child another
        // test's thread has just forked, cannot be started.
        let copied = Command::new("cp").arg(std::env::current_exe().unwrap()).arg(&program).status().unwrap();
        assert!(copied.success());
        for path in [dir.path(), &program] {
            std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        }
        Stage { base, group, dir, _only_stage: only_stage }
    }

    /// The same test again as a command: in the inner role, as nobody, on CPU 0. `grouped`: in a
    /// group below the topmost.
    fn command(&self, test: &str, grouped: bool) -> Command {
        let mut command = Command::new(self.dir.path().join("inner"));
        command.args([&in_module(test), "--exact", "--ignored", "--nocapture", "--test-threads=1"]).env(ROLE, "inner");
        let files = if grouped { self.group.procs_files() } else { Vec::new() };
        start::enter(&mut command, &files, Some(&CpuList::new(vec![0]))).unwrap();
        // Joining comes first: nobody could not. SAFETY: system calls only.
        unsafe {
            command.pre_exec(|| {
                let nobody = 65_534;
                if libc::setgroups(0, std::ptr::null()) != 0 || libc::setgid(nobody) != 0 || libc::setuid(nobody) != 0 {
                    return Err(std::io::Error::last_os_error());
                }
                Ok(())
            });
        }
        command.current_dir("/").env("TMPDIR", "/tmp");
        command
    }
}

/// Runs `inner` as nobody, in the test `name` started again.
fn as_nobody(name: &str, grouped: bool, inner: impl FnOnce(&str)) {
    match Role::own() {
        Role::Inner => inner(name),
        Role::Keeper => keeper::run().expect("the keeper runs"),
        Role::Outer => {
            let stage = Stage::new(name);
            let output = stage.command(name, grouped).output().expect("the inner test starts");
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success(), "{name}:\n{text}\n{}", String::from_utf8_lossy(&output.stderr));
            assert!(text.contains("1 passed"), "{name} did not run:\n{text}");
            print!("{text}");
        }
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let _ = self.group.kill();
        let _ = self.group.remove();
        self.base.remove();
    }
}

#[test]
#[ignore = "needs root and cgroups"]
fn duty_cycle_conforms_as_an_ordinary_user() {
    as_nobody("duty_cycle_conforms_as_an_ordinary_user", true, |name| {
        let fixture = Fixture::new(name, LimitMode::Weight);
        assert!(!fixture.by_session(), "a group of its own is not scheduled by session: {:?}", fixture.runtime.notes());
        conforms(fixture);
    });
}

/// In the topmost group the kernel schedules by session if autogroups are on. Conformance is the
/// same either way.
#[test]
#[ignore = "needs root and cgroups"]
fn the_topmost_group_conforms_as_an_ordinary_user() {
    as_nobody("the_topmost_group_conforms_as_an_ordinary_user", false, |name| {
        let autogroups = std::fs::read_to_string("/proc/sys/kernel/sched_autogroup_enabled").unwrap_or_default();
        let membership = std::fs::read_to_string("/proc/self/cgroup").unwrap();
        let topmost = membership.lines().any(|l| l.ends_with(":cpu:/") || l == "0::/");
        let fixture = Fixture::new(name, LimitMode::Weight);
        assert!(!fixture.by_session() || (autogroups.trim() == "1" && topmost), "{:?}", fixture.runtime.notes());
        conforms(fixture);
    });
}

#[test]
#[ignore = "needs root and cgroups"]
fn duty_cycle_caps() {
    as_nobody("duty_cycle_caps", true, |name| {
        let mut fixture = Fixture::new(name, LimitMode::Quota);
        // The free job beside the capped one is the control: without the cap the two would share
        // the CPU 1 to 1.
        let (capped, free) = (fixture.start_busy(), fixture.start_busy());
        let wanted = [(capped.clone(), cpu_target(0.3, 0.3)), (free.clone(), checked_target(Target::FREE))];
        fixture.runtime.apply(1, &wanted).into_iter().for_each(|r| _ = r.unwrap());
        let ratio = suite::cpu_ratio(&mut fixture.runtime, &capped, &free);
        println!("a cap of 0.30 cores beside a free job came out as {ratio:.2} to 1");
        assert!((0.15..0.8).contains(&ratio), "3 to 7 became {ratio:.2} to 1");
    });
}

#[test]
#[ignore = "needs root and cgroups"]
fn cores_are_given_without_any_right() {
    as_nobody("cores_are_given_without_any_right", true, |name| {
        // This process may use one CPU only: the runtime must not promise more.
        let mut fixture = Fixture::new(name, LimitMode::Cores);
        assert_eq!(fixture.runtime.capacity().cores, 1.0);
        let (a, b) = (fixture.start_busy(), fixture.start_busy());
        let wanted = [(a.clone(), cpu_target(0.5, 0.5)), (b.clone(), cpu_target(0.5, 0.5))];
        for result in fixture.runtime.apply(1, &wanted) {
            assert!(result.unwrap().settings.contains(&("affinity".into(), "0".into())));
        }
        let status = std::fs::read_to_string(format!("/proc/{}/status", fixture.pid(&a))).unwrap();
        assert!(status.contains("Cpus_allowed_list:\t0\n"), "{status}");
    });
}

/// A daemon in a process of its own, with two jobs under the duty cycle, to be killed or stopped.
struct Victim {
    stage: Stage,
    daemon: Child,
    jobs: Vec<i32>,
}

impl Victim {
    fn new(name: &str) -> Victim {
        let stage = Stage::new(name);
        let mut daemon = stage.command(name, true).stdout(Stdio::piped()).stdin(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(daemon.stdout.take().unwrap()).lines();
        let jobs = lines.map_while(Result::ok).find_map(|l| l.split_once("JOBS ").map(|(_, pids)| pids.to_owned()));
        let jobs: Vec<i32> = jobs.expect("the daemon names its jobs").split(' ').map(|p| p.parse().unwrap()).collect();
        let victim = Victim { stage, daemon, jobs };
        assert!(victim.see_stopped(Duration::from_secs(5)), "the duty cycle never stops a job");
        victim
    }

    fn state(pid: i32) -> char {
        ProcessStat::of(pid).map_or('-', |stat| stat.state)
    }

    /// Whether any job is seen stopped within `patience`.
    fn see_stopped(&self, patience: Duration) -> bool {
        let start = Instant::now();
        while start.elapsed() < patience {
            if self.jobs.iter().any(|&pid| Victim::state(pid) == 'T') {
                return true;
            }
            std::thread::sleep(Duration::from_millis(3));
        }
        false
    }

    fn keepers(&self) -> Vec<i32> {
        self.stage.group.pids().into_iter().filter(|pid| is_keeper(*pid)).collect()
    }

    fn signal(&self, pid: i32, signal: nix::sys::signal::Signal) {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), signal).unwrap();
    }
}

fn is_keeper(pid: i32) -> bool {
    let keeper = format!("{ROLE}=keeper");
    std::fs::read(format!("/proc/{pid}/environ")).is_ok_and(|e| e.split(|&b| b == 0).any(|v| v == keeper.as_bytes()))
}

/// Does `harm` to a daemon that runs as nobody.
fn to_a_daemon(name: &str, harm: impl FnOnce(Victim)) {
    match Role::own() {
        Role::Inner => run_daemon(name),
        Role::Keeper => keeper::run().expect("the keeper runs"),
        Role::Outer => harm(Victim::new(name)),
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
        let _ = self.stage.group.kill();
    }
}

use nix::sys::signal::Signal::{SIGKILL, SIGSTOP};

#[test]
#[ignore = "needs root and cgroups"]
fn no_job_stays_stopped_when_the_daemon_is_killed() {
    to_a_daemon("no_job_stays_stopped_when_the_daemon_is_killed", |victim| {
        victim.signal(victim.daemon.id() as i32, SIGKILL);
        let exited = wait_until(Duration::from_secs(20), || victim.keepers().is_empty());
        assert!(exited, "the keeper exits after it released the jobs");
        assert!(!victim.see_stopped(Duration::from_secs(1)));
        assert!(victim.jobs.iter().all(|&pid| Victim::state(pid) == 'R'), "the jobs run on");
    });
}

#[test]
#[ignore = "needs root and cgroups"]
fn no_job_stays_stopped_when_the_daemon_hangs() {
    to_a_daemon("no_job_stays_stopped_when_the_daemon_hangs", |victim| {
        victim.signal(victim.daemon.id() as i32, SIGSTOP);
        assert!(wait_until(Duration::from_secs(20), || !victim.see_stopped(Duration::from_secs(1))));
    });
}

#[test]
#[ignore = "needs root and cgroups"]
fn no_job_stays_stopped_when_the_keeper_is_killed() {
    to_a_daemon("no_job_stays_stopped_when_the_keeper_is_killed", |victim| {
        let before = victim.keepers();
        assert!(!before.is_empty(), "no keeper runs");
        // When it has just stopped a job, which is the worst moment.
        assert!(victim.see_stopped(Duration::from_secs(10)));
        before.iter().for_each(|&pid| victim.signal(pid, SIGKILL));
        let another = wait_until(Duration::from_secs(20), || victim.keepers().iter().any(|pid| !before.contains(pid)));
        assert!(another, "the daemon starts another keeper");
        for &job in &victim.jobs {
            assert!(wait_until(Duration::from_secs(5), || Victim::state(job) == 'R'), "job {job} stays stopped");
        }
    });
}

// ---- inside: nobody ----

/// The fallback runtime with real jobs.
struct Fixture {
    runtime: ProcessRuntime,
    children: BTreeMap<String, Child>,
    next: u64,
}

/// A test of this file as its program names it.
fn in_module(test: &str) -> String {
    format!("fallback::{test}")
}

impl Fixture {
    /// `test` is started again as the keeper.
    fn new(test: &str, mode: LimitMode) -> Fixture {
        let me = std::env::current_exe().unwrap().into_os_string();
        let role = format!("{ROLE}=keeper").into();
        let keeper: [OsString; 7] = [
            "env".into(),
            role,
            me,
            in_module(test).into(),
            "--exact".into(),
            "--ignored".into(),
            "--nocapture".into(),
        ];
        let config = Config { mode, keeper: Some(keeper.into()), ..Config::new("gainshare-test-nobody") };
        let runtime = ProcessRuntime::detect(config).expect("the fallback needs no right");
        assert!(runtime.notes()[0].starts_with("no cgroups: "), "nobody may not make cgroups: {:?}", runtime.notes());
        println!("notes: {:?}", runtime.notes());
        Fixture { runtime, children: BTreeMap::new(), next: 0 }
    }

    fn start(&mut self, script: &str) -> JobHandle {
        self.next += 1;
        let name = format!("job-{}", self.next);
        let group = self.runtime.prepare(JobId(self.next), &name).unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::null());
        start::enter(&mut command, &group.procs_files, None).unwrap();
        let child = command.spawn().unwrap();
        self.runtime.started(&group.handle, Identity::of(child.id() as i32).unwrap()).unwrap();
        self.children.insert(name, child);
        group.handle
    }

    /// Whether the runtime shares by the priority of sessions.
    fn by_session(&self) -> bool {
        self.runtime.notes().iter().any(|note| note.contains("scheduling priority"))
    }

    fn pid(&self, job: &JobHandle) -> i32 {
        self.children[&job.key].id() as i32
    }
}

impl Subject for Fixture {
    fn runtime(&mut self) -> &mut dyn Runtime {
        &mut self.runtime
    }

    fn start_busy(&mut self) -> JobHandle {
        self.start(BUSY)
    }

    fn end(&mut self, job: &JobHandle) {
        let child = self.children.get_mut(&job.key).unwrap();
        let _ = child.kill();
        let _ = child.wait();
    }

    fn limits_outside(&mut self, job: &JobHandle) -> Vec<(String, String)> {
        let pid = self.pid(job);
        let nice = std::fs::read_to_string(format!("/proc/{pid}/autogroup")).unwrap_or_default();
        vec![("autogroup.nice".into(), nice.rsplit(' ').next().unwrap_or_default().trim().to_owned())]
    }

    /// A single job on an idle CPU is never stopped, which is a duty cycle of 100 %.
    fn reported_outside(&mut self, job: &JobHandle) -> Vec<(String, String)> {
        let mut outside = self.limits_outside(job);
        let stopped = wait_until(Duration::from_millis(500), || Victim::state(self.pid(job)) == 'T');
        outside.push(("duty-cycle".into(), if stopped { "below 100%".into() } else { "100%".into() }));
        outside
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        for child in self.children.values_mut() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn conforms(mut fixture: Fixture) {
    suite::applied_limits_read_back(&mut fixture);
    suite::the_same_plan_again_changes_nothing(&mut fixture);
    suite::an_older_plan_is_refused(&mut fixture);
    suite::counters_only_grow(&mut fixture);
    suite::the_end_of_a_job_is_reported(&mut fixture);
    suite::the_cpu_is_split_by_share(&mut fixture);

    // A released job runs freely.
    let (large, small) = (fixture.start_busy(), fixture.start_busy());
    let wanted = [(large.clone(), cpu_target(0.8, 0.8)), (small.clone(), cpu_target(0.2, 0.2))];
    fixture.runtime.apply(70, &wanted).into_iter().for_each(|r| _ = r.unwrap());
    std::thread::sleep(Duration::from_millis(600));
    fixture.runtime.release(&small).unwrap();
    assert!(wait_until(Duration::from_secs(3), || Victim::state(fixture.pid(&small)) == 'R'));
    std::thread::sleep(Duration::from_millis(300));
    let stopped = (0..60).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        Victim::state(fixture.pid(&small)) == 'T'
    });
    assert!(!stopped, "released but still stopped now and then");
    assert!(wait_until(Duration::from_secs(3), || fixture.limits_outside(&small)[0].1 == "0"), "its priority is back");

    // A job that traps SIGTERM gets the time to save, even if it was stopped; one that ignores it
    // is killed with its children.
    let dir = tempfile::tempdir().unwrap();
    let (ready, saved) = (dir.path().join("ready"), dir.path().join("saved"));
    let polite = fixture.start(&format!(
        "trap 'echo yes > {}; exit 0' TERM; echo > {}; {BUSY}",
        saved.display(),
        ready.display()
    ));
    fixture.runtime.apply(71, &[(large.clone(), cpu_target(0.9, 0.9)), (polite.clone(), cpu_target(0.1, 0.1))]);
    assert!(wait_until(Duration::from_secs(10), || ready.exists()));
    fixture.runtime.terminate(&polite).unwrap();
    assert!(wait_until(Duration::from_secs(10), || Path::new(&saved).exists()), "it could not save");
    let stubborn = fixture.start("trap '' TERM; (while :; do sleep 0.1; done) & while :; do sleep 0.1; done");
    assert!(suite::stop(&mut fixture.runtime, &stubborn, Duration::from_millis(200)));
    let _ = fixture.children.get_mut(&stubborn.key).unwrap().wait();
    assert!(!fixture.runtime.is_alive(&stubborn).unwrap());
    assert!(matches!(
        fixture.runtime.apply(72, &[(stubborn.clone(), checked_target(Target::FREE))]).remove(0),
        Err(RuntimeError::Gone { .. })
    ));
}

/// Two jobs under the duty cycle, read every half second, until this process is killed.
fn run_daemon(name: &str) {
    let mut fixture = Fixture::new(name, LimitMode::Weight);
    let (large, small) = (fixture.start_busy(), fixture.start_busy());
    let wanted = [(large.clone(), cpu_target(0.7, 0.7)), (small.clone(), cpu_target(0.3, 0.3))];
    fixture.runtime.apply(1, &wanted).into_iter().for_each(|r| _ = r.unwrap());
    println!("JOBS {} {}", fixture.pid(&large), fixture.pid(&small));
    loop {
        fixture.runtime.read(&large).unwrap();
        std::thread::sleep(Duration::from_millis(500));
    }
}
