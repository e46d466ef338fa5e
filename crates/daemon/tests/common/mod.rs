//! A real daemon in a directory of its own, for tests: started, killed, stopped and started again.
#![allow(dead_code, unreachable_pub, reason = "each test file uses another part")]

use gainshare_core::invariants::{BrokenInvariant, Guarantee, Invariants, Observation};
use gainshare_core::model::JobId;
use gainshare_core::plan::{Plan, Verdict};
use gainshare_daemon::api::client::{Client, ClientError};
use gainshare_daemon::api::types::{JobInfo, JobState};
use gainshare_daemon::journal::{Entry, Journal};
use gainshare_daemon::record::{Change, JobRecord, replay};
use gainshare_daemon::spec::JobSpec;
use gainshare_limits::process::ProcessStat;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

pub struct Daemon {
    pub dir: TempDir,
    pub client: Client,
    config: String,
    child: Option<Child>,
    runtime: tokio::runtime::Runtime,
    /// Knows the jobs that were acknowledged, by their numbers.
    invariants: RefCell<Invariants>,
}

/// The daemon of these tests, built beside them.
pub fn program() -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let path = tests.parent().unwrap().parent().unwrap().join("examples/test_daemon");
    assert!(path.exists(), "{} is missing: build the examples of this crate", path.display());
    path
}

impl Daemon {
    /// A daemon with these settings beside the test's own directories.
    pub fn start(settings: &str) -> Daemon {
        let mut daemon = Daemon::new(settings);
        daemon.up();
        daemon
    }

    pub fn new(settings: &str) -> Daemon {
        let dir = tempfile::Builder::new().prefix("gsd").tempdir().unwrap();
        let (state, runtime_dir) = (dir.path().join("state"), dir.path().join("run"));
        let own = format!("state_dir = {state:?}\nruntime_dir = {runtime_dir:?}\n{settings}");
        let client = Client::new(runtime_dir.join("api.sock"));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        Daemon { dir, client, config: own, child: None, runtime, invariants: RefCell::default() }
    }

    fn command(&self) -> Command {
        let config = self.dir.path().join("config.toml");
        std::fs::write(&config, &self.config).unwrap();
        let mut command = Command::new(program());
        command.arg("up").arg(config).stdin(Stdio::null()).stdout(Stdio::null()).env("RUST_LOG", "info");
        let log = std::fs::OpenOptions::new().create(true).append(true).open(self.dir.path().join("log")).unwrap();
        command.stderr(log);
        command
    }

    pub fn up(&mut self) {
        self.up_with(&[]);
        self.wait_up();
    }

    /// Starts it without waiting until it answers.
    pub fn up_with(&mut self, env: &[(&str, &str)]) {
        assert!(self.child.is_none());
        let child = self.command().envs(env.iter().copied()).spawn().unwrap();
        self.child = Some(child);
    }

    pub fn wait_up(&mut self) {
        let begun = Instant::now();
        while let Err(e) = self.call(self.client.health()) {
            assert!(!self.is_dead() && begun.elapsed() < Duration::from_secs(10), "{e}; log:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// A second one beside the first: whether it ends well and what it says.
    pub fn second(&self) -> (bool, String) {
        let out = self.command().stderr(Stdio::piped()).output().unwrap();
        (out.status.success(), String::from_utf8(out.stderr).unwrap())
    }

    pub fn pid(&self) -> Pid {
        Pid::from_raw(self.child.as_ref().unwrap().id() as i32)
    }

    pub fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).unwrap();
    }

    pub fn kill9(&mut self) {
        self.signal(Signal::SIGKILL);
        self.wait_dead();
    }

    pub fn wait_dead(&mut self) {
        wait_until("the daemon's end", 20, || self.is_dead());
        self.child = None;
    }

    pub fn is_dead(&mut self) -> bool {
        self.child.as_mut().is_none_or(|c| c.try_wait().unwrap().is_some())
    }

    pub fn call<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime.block_on(future)
    }

    pub fn submit(&self, jobs: Vec<JobSpec>) -> Result<Vec<JobInfo>, ClientError> {
        let path = std::env::var("PATH").unwrap();
        let accepted = self.call(self.client.submit(jobs, BTreeMap::from([("PATH".into(), path)])))?;
        for job in &accepted {
            self.invariants.borrow_mut().acknowledge(&JobId(job.id).to_string());
        }
        Ok(accepted)
    }

    /// Asks the daemon to forget a job.
    pub fn forget(&self, name: &str) {
        let id = JobId(self.job(name).id).to_string();
        self.call(self.client.forget(name)).unwrap();
        self.invariants.borrow_mut().forget(&id);
    }

    pub fn job(&self, name: &str) -> JobInfo {
        self.call(self.client.job(name)).unwrap()
    }

    /// Waits until the job is as `wanted`.
    pub fn wait(&self, name: &str, what: &str, wanted: impl Fn(&JobInfo) -> bool) -> JobInfo {
        let begun = Instant::now();
        loop {
            let job = self.job(name);
            if wanted(&job) {
                return job;
            }
            let patience = Duration::from_secs(20);
            assert!(begun.elapsed() < patience, "{name} is not {what}: {job:#?}; log:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub fn wait_state(&self, name: &str, state: JobState) -> JobInfo {
        self.wait(name, state.name(), |j| j.state == state)
    }

    pub fn wait_end(&self, name: &str) -> JobInfo {
        self.wait(name, "over", |j| j.state.is_final())
    }

    pub fn log(&self) -> String {
        read(&self.dir.path().join("log"))
    }

    /// How many rounds the daemon's main loop has made. A loop that does not rest makes thousands in a second, so a
    /// test that counts rounds needs no measure of CPU time. This question is one of them.
    pub fn rounds(&self) -> u64 {
        self.metric("gainshare_rounds_total")
    }

    /// A counter of `/metrics`.
    pub fn metric(&self, name: &str) -> u64 {
        let mut stream = UnixStream::connect(self.run_dir().join("api.sock")).unwrap();
        write!(stream, "GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let count = answer.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        count.unwrap_or_else(|| panic!("no {name} in {answer}")).trim().parse().unwrap()
    }

    pub fn state(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    pub fn run_dir(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    pub fn job_dir(&self, name: &str) -> PathBuf {
        PathBuf::from(self.job(name).dir)
    }

    /// The guard of this daemon's journal.
    pub fn guard_pid(&self) -> i32 {
        read(&self.state().join("guard.lock")).trim().parse().unwrap()
    }

    /// The guard, as soon as it runs.
    pub fn wait_for_guard(&self) -> i32 {
        wait_until("the guard runs", 20, || !read(&self.state().join("guard.lock")).trim().is_empty());
        self.guard_pid()
    }

    /// What the (dead) daemon left in its journal.
    pub fn journal(&self) -> (Vec<JobRecord>, Vec<Entry>) {
        let journal = Journal::open(&self.state().join("journal.db")).unwrap();
        let jobs = journal.load().unwrap().jobs.into_iter().map(|(record, _)| record).collect();
        (jobs, journal.entries().unwrap())
    }

    /// The invariants of docs/faults.md, of what the (dead) daemon left in its journal. Every test ends with this.
    pub fn assert_invariants(&self) {
        if !self.state().join("journal.db").exists() {
            return;
        }
        let (jobs, entries) = self.journal();
        let broken = check_journal(&mut self.invariants.borrow_mut(), &jobs, &entries);
        assert!(broken.is_empty(), "{broken:#?}");
    }

    /// I3 for what the running daemon answers.
    pub fn assert_answers_with_all_jobs(&self) {
        let mut observation = Observation::default();
        observation.set_recorded(self.call(self.client.jobs(true)).unwrap().iter().map(|job| JobId(job.id)));
        let broken = self.invariants.borrow_mut().check(&observation);
        assert!(broken.is_empty(), "{broken:#?}");
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if self.child.is_some() {
            self.end();
        }
        if std::thread::panicking() {
            eprintln!("--- the daemon's log\n{}", self.log());
        } else {
            self.assert_invariants();
        }
    }
}

impl Daemon {
    /// Ends the daemon with its jobs.
    fn end(&mut self) {
        let _ = kill(self.pid(), Signal::SIGCONT);
        let _ = self.call(self.client.shutdown(true));
        let begun = Instant::now();
        while !self.is_dead() {
            if begun.elapsed() > Duration::from_secs(15) {
                let _ = self.child.as_mut().map(Child::kill);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Everything that does not hold in a journal: after each of its entries, and of the state at its end. An attempt lives
/// from its order until the end of its job is on record.
pub fn check_journal(invariants: &mut Invariants, jobs: &[JobRecord], entries: &[Entry]) -> Vec<BrokenInvariant> {
    let mut live: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut broken = Vec::new();
    for entry in entries {
        let mut observation = Observation::default();
        if let Change::Plan { plan } = &entry.change {
            observation.add_node("this machine", 1.0, guarantees(plan, jobs));
        }
        if let Some(job) = entry.job.map(|id| id.to_string()) {
            let attempts = live.entry(job.clone()).or_default();
            match &entry.change {
                Change::Admitted { order, .. } => drop(attempts.insert(order.attempt.to_string())),
                Change::Ended { .. } => attempts.clear(),
                _ => {}
            }
            attempts.iter().for_each(|attempt| observation.add_live(&job, attempt, None));
        }
        broken.extend(invariants.check(&observation));
    }
    broken.extend(invariants.check(&state_and_replay(jobs, entries)));
    broken
}

/// What a plan guarantees the jobs of this machine.
fn guarantees(plan: &Plan, jobs: &[JobRecord]) -> Vec<Guarantee> {
    let guarantee = |(id, verdict): (&JobId, &Verdict)| {
        let target = verdict.target?;
        let max = jobs.iter().find(|job| job.id == *id).map_or(1.0, |job| job.spec.max);
        Some(Guarantee {
            job: id.to_string(),
            guaranteed: target.share.cpu.get(),
            floor: verdict.least.get(),
            limit: target.limit.cpu.get(),
            max,
        })
    };
    plan.verdicts.iter().filter_map(guarantee).collect()
}

/// The jobs on record, and what replaying their journal gives.
pub fn state_and_replay(jobs: &[JobRecord], entries: &[Entry]) -> Observation {
    let mut observation = Observation::default();
    let stored: BTreeMap<_, _> = jobs.iter().map(|r| (r.id, r.clone())).collect();
    observation.set_recorded(stored.keys());
    observation.add_replay(&stored, &replay(entries.iter().map(|e| (e.at, e.job, &e.change))));
    observation
}

/// I5 for a journal whose entries no daemon has written.
pub fn assert_replays(jobs: &[JobRecord], entries: &[Entry]) {
    let broken = Invariants::default().check(&state_and_replay(jobs, entries));
    assert!(broken.is_empty(), "{broken:#?}");
}

pub fn sh(name: &str, script: &str) -> JobSpec {
    let mut spec = JobSpec::new(vec!["sh".into(), "-c".into(), script.into()]);
    spec.name = Some(name.into());
    spec
}

/// A training run: `steps` reports, `pace` apart, of a loss that falls.
pub fn trainer(name: &str, steps: u32, pace: &str) -> JobSpec {
    let report = format!("echo \"step $i/{steps} loss=$((1000/i)).5\"");
    sh(name, &format!("i=0; while [ $i -lt {steps} ]; do i=$((i+1)); {report}; sleep {pace}; done"))
}

/// Builds a shared library from C, for `LD_PRELOAD`; its path.
pub fn build_library(dir: &Path, name: &str, source: &str) -> String {
    let (file, library) = (dir.join(format!("{name}.c")), dir.join(format!("{name}.so")));
    std::fs::write(&file, source).unwrap();
    let built = Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&library, &file]).output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    library.to_str().unwrap().to_owned()
}

/// Whether the process exists and is no zombie.
pub fn is_running(pid: i32) -> bool {
    ProcessStat::of(pid).is_some_and(|stat| !stat.has_ended())
}

pub fn wait_until(what: &str, seconds: u64, mut ready: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !ready() {
        assert!(begun.elapsed() < Duration::from_secs(seconds), "{what} did not happen");
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}
