//! A test bed that goes down with the test, and what the tests ask of it.
//!
//! The tests of other crates that need a test bed use this file too, by `#[path]`. They start the
//! programs that lie in the build folder: `cargo build --workspace --bins --tests` in the profile
//! of the test puts them there.
//!
//! Bringing a test bed up costs more than most checks on it, so the scenarios of a file share one:
//! [`Scenarios`] runs them one after the other and reports each, and a failed scenario does not
//! hide those after it.
#![allow(dead_code, reason = "every test binary has its own copy and uses a part of it")]

pub(crate) mod shared_pods;
pub(crate) mod training;

use serde_json::Value;
use std::fmt::Display;
use std::fs;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

pub(crate) const SYSTEM: &str = "gainshare-system";

/// A command of the test bed of this name.
pub(crate) fn testbed(name: &str, args: &[&str]) -> Output {
    let mut command = Command::new(program("xtask"));
    command.args(["testbed", "--name", name]).args(args).stdin(Stdio::null());
    command.output().expect("our own program starts")
}

/// A program of the same build.
pub(crate) fn program(name: &str) -> PathBuf {
    let own = std::env::current_exe().expect("a test knows its own program");
    // Tests lie in the folder `deps` beside the programs.
    let path = own.parent().and_then(Path::parent).expect("tests lie in a build folder").join(name);
    assert!(path.is_file(), "{} is missing: cargo build --workspace --bins --tests, in this profile", path.display());
    path
}

/// The root of the checkout.
pub(crate) fn checkout() -> PathBuf {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = package.ancestors().find(|folder| folder.join("deploy/chart").is_dir());
    root.expect("the package lies in the checkout").to_path_buf()
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A reading of a cluster starts `kubectl`, which takes a third of a second of processor time.
const BETWEEN_READINGS: Duration = Duration::from_millis(300);

/// Repeats `read` until it returns a value, for at most a minute.
pub(crate) fn within_a_minute<T>(read: impl FnMut() -> Option<T>) -> Option<T> {
    within(Duration::from_secs(60), read)
}

/// The same with another patience.
pub(crate) fn within<T>(patience: Duration, mut read: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + patience;
    loop {
        match read() {
            Some(found) => return Some(found),
            None if Instant::now() > deadline => return None,
            None => std::thread::sleep(BETWEEN_READINGS),
        }
    }
}

pub(crate) fn eventually<T>(what: &str, read: impl FnMut() -> Option<T>) -> T {
    within_a_minute(read).unwrap_or_else(|| panic!("{what} did not come about in a minute"))
}

/// Scenarios on one test bed.
#[derive(Default)]
pub(crate) struct Scenarios {
    count: usize,
    failed: Vec<String>,
}

impl Scenarios {
    /// Runs one scenario and reports it. Its failure is counted, and the next scenario runs all the
    /// same.
    pub(crate) fn run(&mut self, name: &str, scenario: impl FnOnce()) {
        let began = Instant::now();
        // A scenario that panics leaves the test bed as it is; nothing else is shared.
        let result = catch_unwind(AssertUnwindSafe(scenario));
        let verdict = if result.is_ok() { "ok" } else { "FAILED" };
        eprintln!("scenario {name} ... {verdict} ({:.1} s)", began.elapsed().as_secs_f64());
        self.count += 1;
        if result.is_err() {
            self.failed.push(name.to_owned());
        }
    }

    /// Runs one scenario that injects faults of one row. A scenario with a violation has failed, and a scenario that
    /// could not go on is a violation.
    pub(crate) fn run_counted(&mut self, name: &str, tally: &mut FaultTally, scenario: impl FnOnce(&mut FaultTally)) {
        let (failed, found) = (self.failed.len(), tally.violations.len());
        self.run(name, || {
            scenario(tally);
            let new = &tally.violations[found..];
            assert!(new.is_empty(), "{}", new.join("\n"));
        });
        if self.failed.len() > failed && tally.violations.len() == found {
            tally.violations.push(format!("{name}: it could not go on"));
        }
    }

    /// Fails if a scenario failed.
    pub(crate) fn finish(self) {
        assert!(self.count > 0, "no scenario ran");
        assert!(
            self.failed.is_empty(),
            "{} of {} scenarios failed: {}",
            self.failed.len(),
            self.count,
            self.failed.join(", ")
        );
    }
}

/// Whether `cargo xtask faults --long` runs the test.
pub(crate) fn is_long() -> bool {
    std::env::var_os("GAINSHARE_LONG").is_some()
}

/// What a test injected for one row of `docs/faults.md`, and what did not hold.
#[derive(Debug)]
pub(crate) struct FaultTally {
    row: &'static str,
    injected: u32,
    /// The longest one.
    recovery_s: Option<f64>,
    violations: Vec<String>,
}

impl FaultTally {
    pub(crate) fn of(row: &'static str) -> FaultTally {
        FaultTally { row, injected: 0, recovery_s: None, violations: Vec::new() }
    }

    /// Counts faults at the moment at which they are injected, whatever comes of them.
    pub(crate) fn inject(&mut self, count: u32) {
        self.injected += count;
    }

    /// Everything held again, this long after the end of a fault.
    pub(crate) fn recover(&mut self, took_s: f64) {
        self.recovery_s = Some(self.recovery_s.map_or(took_s, |longest_s| longest_s.max(took_s)));
    }

    /// Counts a violation, and the scenario continues.
    pub(crate) fn demand(&mut self, holds: bool, violation: impl FnOnce() -> String) {
        if !holds {
            let violation = violation();
            eprintln!("violation: {violation}");
            self.violations.push(violation);
        }
    }

    /// Prints the line that `cargo xtask faults` reads.
    pub(crate) fn print(&self) {
        let recovery = self.recovery_s.map_or(String::new(), |took_s| format!(" recovery_s={took_s:.1}"));
        println!("fault: row={} injected={} violations={}{recovery}", self.row, self.injected, self.violations.len());
    }
}

/// Goes down with the value.
pub(crate) struct TestBed {
    pub(crate) name: &'static str,
    pub(crate) kubeconfig: String,
    bin: PathBuf,
    /// Files of the test.
    pub(crate) folder: tempfile::TempDir,
    /// Where operators listen for node agents.
    pub(crate) listen: String,
}

impl Drop for TestBed {
    fn drop(&mut self) {
        self.testbed(&["down"]);
    }
}

impl TestBed {
    pub(crate) fn up(name: &'static str, args: &[&str]) -> TestBed {
        let output = testbed(name, &[&["up"], args].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        let said = text(&output.stdout);
        let after = |prefix: &str| said.lines().find_map(|line| line.strip_prefix(prefix)).unwrap().to_owned();
        let bin = after("export PATH=").trim_end_matches(":$PATH").into();
        let (kubeconfig, folder) = (after("export KUBECONFIG="), tempfile::tempdir().unwrap());
        TestBed { name, kubeconfig, bin, folder, listen: "127.0.0.1:0".to_owned() }
    }

    pub(crate) fn testbed(&self, args: &[&str]) -> Output {
        testbed(self.name, args)
    }

    /// A program of the test bed, such as kubectl.
    pub(crate) fn program(&self, name: &str) -> PathBuf {
        self.bin.join(name)
    }

    pub(crate) fn output(&self, program: &str, args: &[&str], stdin: &str) -> Output {
        let mut command = Command::new(self.program(program));
        command.args(args).env("KUBECONFIG", &self.kubeconfig);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(stdin.as_bytes()).unwrap();
        child.wait_with_output().unwrap()
    }

    pub(crate) fn run(&self, program: &str, args: &[&str], stdin: &str) -> String {
        let output = self.output(program, args, stdin);
        assert!(output.status.success(), "{program} {args:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    pub(crate) fn kubectl(&self, args: &[&str]) -> String {
        self.run("kubectl", args, "")
    }

    pub(crate) fn apply(&self, object: impl Display) {
        self.run("kubectl", &["apply", "-f", "-"], &object.to_string());
    }

    /// An object of the namespace `team`, if it is there.
    pub(crate) fn find(&self, kind: &str, name: &str) -> Option<Value> {
        let output = self.output("kubectl", &["get", kind, name, "-n", "team", "-o", "json"], "");
        serde_json::from_slice(&output.stdout).ok()
    }

    pub(crate) fn get(&self, kind: &str, name: &str) -> Value {
        self.find(kind, name).unwrap_or_else(|| panic!("there is no {kind} {name}"))
    }

    /// An address of this machine that the cluster can reach.
    pub(crate) fn machine(&self) -> String {
        let server = self.kubectl(&["config", "view", "-o", "jsonpath={.clusters[0].cluster.server}"]);
        let host = server.trim_start_matches("https://").split(':').next().unwrap();
        let (network, _) = host.rsplit_once('.').unwrap();
        format!("{network}.1")
    }

    pub(crate) fn kill_kubelet(&self, node: &str) {
        assert!(self.testbed(&["kill", &format!("kubelet-{node}")]).status.success());
    }

    /// Kills the containers' processes on a node whose command line contains these words; returns
    /// how many.
    pub(crate) fn kill_processes(&self, node: &str, words: &str) -> usize {
        let place = format!("/gainshare-testbed-{}/{node}/", self.name);
        let inside =
            |pid: &str| fs::read_to_string(format!("/proc/{pid}/cgroup")).is_ok_and(|groups| groups.contains(&place));
        let says = |pid: &str| {
            let line = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.replace('\0', " ").contains(words)
        };
        let found: Vec<String> = pids().into_iter().filter(|pid| inside(pid) && says(pid)).collect();
        for pid in &found {
            // A process that ends by itself meanwhile needs no signal.
            let _ = Command::new("kill").args(["-9", pid]).stderr(Stdio::null()).status();
        }
        found.len()
    }
}

/// The numbers of all processes of this machine.
pub(crate) fn pids() -> Vec<String> {
    let names = fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.bytes().all(|byte| byte.is_ascii_digit())).collect()
}
