//! Runs the programs of tests that cargo has built, and reports each in a line.
//!
//! A runner from crates.io would be a larger build than the project's own. What is needed is small:
//! tests that start engines or machines of their own run one at a time, a program that hangs is
//! ended, ignored tests run in the full form, and a failure does not hide those after it. A program that failed runs
//! once more when all others have ended: one that then passes is named as unsteady, with the output of its failure.
//!
//! Three workers run the programs side by side, each one program after the other. Two of them take the programs that
//! start a cluster: most of their time passes with waiting, and test beds do not disturb each other. The third one
//! takes all others. A worker without programs helps the others; programs that start engines or machines run one at a
//! time. Other work with the programs may run beside all of them ([`super`]).

use crate::programs::TESTS;
use crate::sh;
use anyhow::{Context, Result, ensure};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use serde_json::Value;
use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsString;
use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Tests whose name contains one of these are programs that other tests start.
const STARTED_BY_OTHERS: [&str; 3] = ["inner_", "keeper_main", "daemon_main"];

/// Programs of tests whose package and target contain one of these start engines or machines: one test at a time.
const ALONE: [&str; 4] = ["docker", "qemu", "real_frameworks", "conformance"];

/// Programs of tests that start a cluster: one test at a time.
const CLUSTERS: [&str; 14] = [
    "operator cluster",
    "operator crashes",
    "operator gangs",
    "operator jobs",
    "operator kills",
    "operator nodes",
    "operator outages",
    "operator secrets",
    "operator share_crashes",
    "operator task_jobs",
    "operator tensorflow",
    "operator upgrades",
    "operator watches",
    "xtask testbed",
];

/// Programs of tests that wait most of the time. Without clusters they run beside the others.
const WAITING: [&str; 3] = ["daemon engine", "daemon faults", "daemon floods"];

/// How the name of a program ends that contains several files of tests, as its modules (`tests/all.rs`).
const SEVERAL_FILES: &str = " all";

/// A program that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(10 * 60);
const POLL: Duration = Duration::from_millis(50);

/// Which tests run.
pub(super) struct Selection<'a> {
    /// Also those marked `#[ignore]`.
    pub(super) with_ignored: bool,
    /// Only those whose name contains one of these words, if there are any.
    pub(super) words: &'a [String],
}

/// A program of tests.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TestProgram {
    /// The package and the name of the target.
    pub(crate) name: String,
    executable: PathBuf,
    /// Tests run in the folder of their package.
    folder: PathBuf,
    /// The names of its tests, where the program is one module of a larger one.
    tests: Vec<String>,
}

impl TestProgram {
    /// The program in its folder.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.executable);
        command.current_dir(&self.folder).env("CARGO_MANIFEST_DIR", &self.folder);
        command
    }

    /// Whether it is one module of a larger program.
    pub(crate) fn is_module(&self) -> bool {
        !self.tests.is_empty()
    }

    /// The same in the time that all other programs leave unused.
    pub(crate) fn idle_command(&self) -> Command {
        sh::idle(&self.command())
    }

    /// A program that is a script of the shell, in this folder.
    #[cfg(test)]
    pub(crate) fn of_script(name: &str, folder: &Path, text: &str) -> TestProgram {
        use std::os::unix::fs::PermissionsExt;
        let executable = folder.join(name.replace(' ', "-"));
        std::fs::write(&executable, format!("#!/bin/sh\n{text}\n")).unwrap();
        std::fs::set_permissions(&executable, PermissionsExt::from_mode(0o755)).unwrap();
        TestProgram { name: name.to_owned(), executable, folder: folder.to_path_buf(), tests: Vec::new() }
    }
}

/// What the test harness counts at its end.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Counts {
    pub(crate) passed: u32,
    failed: u32,
    ignored: u32,
}

/// Builds all tests.
pub(super) fn build() -> Result<Vec<TestProgram>> {
    // Tests load this library by its path, and cargo builds no `cdylib` for tests by itself.
    sh::run(sh::cargo().args(["build", "--release", "--package", "gainshare-inside"]))?;
    // Tests start the example among these.
    let mut build = sh::cargo();
    build.args(["build", "--release", "--workspace", "--message-format", "json-render-diagnostics"]).args(TESTS);
    let output = build.stderr(Stdio::inherit()).output().context("cannot start cargo")?;
    ensure!(output.status.success(), "the tests do not build: see above");
    let programs = programs(&String::from_utf8_lossy(&output.stdout))?;
    ensure!(!programs.is_empty(), "cargo built no tests");
    Ok(programs)
}

/// What the programs of tests did when they ran side by side.
pub(super) struct TestRun<'p> {
    results: Vec<ProgramResult<'p>>,
}

/// Runs the selected tests of these programs; `environment` is added to that of the programs.
pub(super) fn run<'p>(
    programs: &'p [TestProgram],
    selection: &Selection,
    environment: &[(&str, OsString)],
) -> Result<TestRun<'p>> {
    let logs = log_folder()?;
    let is_waiting = |program: &&TestProgram| {
        is_cluster(&program.name) || (!selection.with_ignored && WAITING.contains(&program.name.as_str()))
    };
    let (waiting, mut others): (Vec<_>, Vec<_>) = programs.iter().partition(is_waiting);
    // Those that take longest begin first: emulated machines.
    others.sort_by_key(|program| !program.name.contains("qemu"));
    let (waiting, others) = (Mutex::new(VecDeque::from(waiting)), Mutex::new(VecDeque::from(others)));
    let waiting = || waiting.lock().expect("nothing panics while it takes a program");
    let others = || others.lock().expect("nothing panics while it takes a program");
    let run = |program| run_one(program, selection, environment, logs.path());
    // No worker holds both locks at a time.
    let first = || {
        let program = waiting().pop_front();
        program.or_else(|| take_last(&mut others(), |program| !is_alone(&program.name)))
    };
    let next = || {
        let program = others().pop_front();
        program.or_else(|| waiting().pop_back())
    };
    let results = std::thread::scope(|scope| {
        let work = || std::iter::from_fn(&first).map(run).collect::<Result<Vec<_>>>();
        let workers = [scope.spawn(work), scope.spawn(work)];
        let third = std::iter::from_fn(&next).map(run).collect();
        let [first, second] = workers.map(|worker| worker.join().expect("a worker of tests panicked"));
        [first, second, third]
    });
    let results = results.into_iter().collect::<Result<Vec<_>>>()?;
    Ok(TestRun { results: results.into_iter().flatten().collect() })
}

/// A folder for the output of programs. It goes with the value.
fn log_folder() -> Result<tempfile::TempDir> {
    Ok(tempfile::Builder::new().prefix("gainshare-tests-").tempdir()?)
}

impl TestRun<'_> {
    /// Whether no program failed.
    pub(super) fn is_green(&self) -> bool {
        self.results.iter().all(|result| result.failure.is_none())
    }

    /// Runs the programs that failed once more, and fails if one of them fails again. Returns how many tests passed.
    pub(super) fn finish(self, selection: &Selection, environment: &[(&str, OsString)]) -> Result<u32> {
        let logs = log_folder()?;
        let (mut failed, mut unsteady, mut total) = (Vec::new(), Vec::new(), Counts::default());
        for mut result in self.results {
            if result.failure.is_some() {
                eprintln!("\n---- {} ----\n{}", result.program.name, result.output);
                // A fault of the project fails again when the program has the machine to itself.
                result = run_one(result.program, selection, environment, logs.path())?;
                let list = if result.failure.is_some() { &mut failed } else { &mut unsteady };
                list.push(result.program.name.as_str());
            }
            if result.failure.is_some() {
                eprintln!("\n---- {}, second run ----\n{}", result.program.name, result.output);
            }
            total.passed += result.counts.passed;
            total.ignored += result.counts.ignored;
        }
        if !unsteady.is_empty() {
            eprintln!("UNSTEADY: {} failed beside other programs and passed alone: see above", unsteady.join(", "));
        }
        ensure!(failed.is_empty(), "tests failed in {}", failed.join(", "));
        ensure!(total.passed > 0, "no test has a name with {:?} in it", selection.words);
        ensure!(!selection.with_ignored || total.ignored == 0, "{} tests were left out", total.ignored);
        eprintln!("{} tests passed, {} need more than Rust and were left out", total.passed, total.ignored);
        Ok(total.passed)
    }
}

/// Takes the last program of which `may` holds.
fn take_last<'p>(queue: &mut VecDeque<&'p TestProgram>, may: impl Fn(&TestProgram) -> bool) -> Option<&'p TestProgram> {
    let at = queue.iter().rposition(|program| may(program))?;
    queue.remove(at)
}

fn is_alone(name: &str) -> bool {
    ALONE.iter().any(|part| name.contains(part))
}

fn is_cluster(name: &str) -> bool {
    CLUSTERS.contains(&name)
}

/// What one program of tests did.
struct ProgramResult<'p> {
    program: &'p TestProgram,
    counts: Counts,
    failure: Option<String>,
    output: String,
}

/// Runs one program with its output in a file of `logs`, and prints a line about it.
fn run_one<'p>(
    program: &'p TestProgram,
    selection: &Selection,
    environment: &[(&str, OsString)],
    logs: &Path,
) -> Result<ProgramResult<'p>> {
    let mut command = program.command();
    let Some(arguments) = harness_arguments(program, selection) else {
        return Ok(ProgramResult { program, counts: Counts::default(), failure: None, output: String::new() });
    };
    command.args(arguments);
    command.envs(environment.iter().map(|(name, value)| (name, value)));
    let log = tempfile::Builder::new().suffix(".log").tempfile_in(logs)?.into_temp_path();
    let began = Instant::now();
    let ProgramEnd { failure, cpu_s } = run_logged(&mut command, &log, PATIENCE)?;
    let output = String::from_utf8_lossy(&std::fs::read(&log)?).into_owned();
    let counted = counts(&output);
    // A test that ends the process takes the result of all others with it.
    let failure = failure.or_else(|| counted.is_none().then(|| "it ended without a result of its tests".to_owned()));
    let counts = counted.unwrap_or_default();
    let (passed, took_s, name) = (counts.passed, began.elapsed().as_secs_f64(), &program.name);
    match &failure {
        // A program without a selected test is not worth a line.
        None if counts == Counts::default() => {}
        None => eprintln!("ok      {passed:>4} passed {took_s:>7.1} s {cpu_s:>7.1} s of CPU  {name}"),
        Some(reason) => eprintln!("FAILED  {passed:>4} passed {took_s:>7.1} s {cpu_s:>7.1} s of CPU  {name}: {reason}"),
    }
    Ok(ProgramResult { program, counts, failure, output })
}

/// Ends a process group when the process that made the guard ends, however it ends. Programs of tests have a group of
/// their own, so neither Ctrl-C nor the end of the runner would reach them.
struct Guard(Child);

impl Guard {
    fn of(group: u32) -> Result<Guard> {
        // The shell waits until its input is closed, which the kernel does when this process ends.
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", "read _; kill -s KILL -- -\"$0\"", &group.to_string()]).process_group(0);
        let output = shell.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Guard(output.spawn().context("cannot start /bin/sh")?))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        // The program has ended, and its group may soon be another one's.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// How a program of tests ended.
pub(crate) struct ProgramEnd {
    /// Why it failed, if it did.
    pub(crate) failure: Option<String>,
    /// Processor time of the program and of those of its children that it waited for.
    cpu_s: f64,
}

/// Runs a program of tests with its output in a file. After `patience`, or when this process ends, all its processes
/// are ended.
pub(crate) fn run_logged(command: &mut Command, log: &Path, patience: Duration) -> Result<ProgramEnd> {
    let log = File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    // A group of its own, so that all its processes can be ended together.
    let mut child = command.process_group(0).spawn().context("cannot start a program of tests")?;
    let _guard = Guard::of(child.id())?;
    let began = Instant::now();
    let pid = nix::unistd::Pid::from_raw(child.id() as i32);
    let has_ended = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
    loop {
        // The kernel still knows the processor time of a process that has ended and was not waited for.
        if waitid(Id::Pid(pid), has_ended)? != WaitStatus::StillAlive {
            let cpu_s = cpu_s(pid);
            let status = child.wait()?;
            return Ok(ProgramEnd { failure: (!status.success()).then(|| status.to_string()), cpu_s });
        }
        if began.elapsed() > patience {
            // The group may end by itself at this moment.
            let _ = nix::sys::signal::killpg(pid, nix::sys::signal::Signal::SIGKILL);
            child.wait()?;
            let failure = Some(format!("ended after {} min", patience.as_secs() / 60));
            return Ok(ProgramEnd { failure, cpu_s: 0.0 });
        }
        std::thread::sleep(POLL);
    }
}

/// Processor time of a process and of its children that it waited for, as the kernel counts it: in ticks.
fn cpu_s(pid: nix::unistd::Pid) -> f64 {
    let fields = sh::stat_fields(pid.as_raw()).unwrap_or_default();
    let ticks: f64 = fields.iter().skip(11).take(4).filter_map(|ticks| ticks.parse::<f64>().ok()).sum();
    let ticks_per_s = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK).ok().flatten().unwrap_or(100);
    ticks / ticks_per_s as f64
}

/// Nothing if no test of the program is selected.
fn harness_arguments(program: &TestProgram, selection: &Selection) -> Option<Vec<String>> {
    let (name, words) = (&program.name, selection.words);
    let mut arguments: Vec<String> = words.to_vec();
    if program.is_module() {
        let is_selected = |test: &&String| {
            (words.is_empty() || words.iter().any(|word| test.contains(word)))
                && !(selection.with_ignored && STARTED_BY_OTHERS.iter().any(|part| test.contains(part)))
        };
        arguments = program.tests.iter().filter(is_selected).cloned().collect();
        if arguments.is_empty() {
            return None;
        }
        arguments.push("--exact".to_owned());
    }
    if selection.with_ignored {
        arguments.push("--include-ignored".to_owned());
        if !program.is_module() {
            arguments.extend(STARTED_BY_OTHERS.iter().flat_map(|name| ["--skip".to_owned(), (*name).to_owned()]));
        }
    }
    if is_cluster(name) || is_alone(name) {
        arguments.push("--test-threads=1".to_owned());
    }
    Some(arguments)
}

/// The programs of tests that cargo names in its messages. A program that contains several files of tests counts as
/// one program for each of them: a process that ends, hangs or fails then concerns one file.
pub(crate) fn programs(messages: &str) -> Result<Vec<TestProgram>> {
    let mut programs = Vec::new();
    for program in built(messages) {
        match program.name.strip_suffix(SEVERAL_FILES) {
            Some(package) => {
                let listed = sh::output(program.command().args(["--list", "--format", "terse"]))?;
                programs.extend(modules(&listed).into_iter().map(|(module, tests)| TestProgram {
                    name: format!("{package} {module}"),
                    tests,
                    ..program.clone()
                }));
            }
            None => programs.push(program),
        }
    }
    Ok(programs)
}

/// The tests of each module, from the list that the harness prints.
fn modules(listed: &str) -> BTreeMap<&str, Vec<String>> {
    let mut modules: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for test in listed.lines().filter_map(|line| line.strip_suffix(": test")) {
        let module = test.split_once("::").map_or(test, |(module, _)| module);
        modules.entry(module).or_default().push(test.to_owned());
    }
    modules
}

/// The programs that cargo has built.
fn built(messages: &str) -> Vec<TestProgram> {
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let tests = messages.filter(|m| m["reason"] == "compiler-artifact" && m["profile"]["test"] == true);
    tests
        .filter_map(|message| {
            let folder = Path::new(message["manifest_path"].as_str()?).parent()?.to_path_buf();
            let package = folder.file_name()?.to_str()?.to_owned();
            let (target, kind) = (message["target"]["name"].as_str()?, message["target"]["kind"][0].as_str()?);
            // Unit tests are named after their kind: the library has the package's name anyway.
            let target = if kind == "test" { target } else { kind };
            let executable = PathBuf::from(message["executable"].as_str()?);
            Some(TestProgram { name: format!("{package} {target}"), executable, folder, tests: Vec::new() })
        })
        .collect()
}

/// Reads `test result: ok. 14 passed; 0 failed; 1 ignored; …`.
pub(crate) fn counts(text: &str) -> Option<Counts> {
    let line = text.lines().rev().find_map(|line| line.strip_prefix("test result: "))?;
    let number = |what: &str| {
        let words: Vec<&str> = line.split([' ', ';']).filter(|word| !word.is_empty()).collect();
        words.windows(2).find(|pair| pair[1] == what).and_then(|pair| pair[0].parse().ok())
    };
    Some(Counts { passed: number("passed")?, failed: number("failed")?, ignored: number("ignored")? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargo_names_the_programs() {
        let messages = r#"
            not json
            {"reason":"compiler-artifact","profile":{"test":false},"manifest_path":"/a/crates/core/Cargo.toml","target":{"name":"x","kind":["lib"]},"executable":null}
            {"reason":"compiler-artifact","profile":{"test":true},"manifest_path":"/a/crates/core/Cargo.toml","target":{"name":"gainshare_core","kind":["lib"]},"executable":"/t/core-1"}
            {"reason":"compiler-artifact","profile":{"test":true},"manifest_path":"/a/xtask/Cargo.toml","target":{"name":"jobs","kind":["test"]},"executable":"/t/jobs-1"}
        "#;
        let found = built(messages);
        let names: Vec<&str> = found.iter().map(|program| program.name.as_str()).collect();
        assert_eq!(names, ["core lib", "xtask jobs"]);
        assert_eq!(found[1].folder, Path::new("/a/xtask"));
    }

    #[test]
    fn the_end_of_the_output_is_counted() {
        let text = "running 3 tests\ntest result: FAILED. 14 passed; 2 failed; 1 ignored; 0 measured; 5 filtered out; finished in 1.20s\n";
        assert_eq!(counts(text), Some(Counts { passed: 14, failed: 2, ignored: 1 }));
        assert_eq!(counts("killed"), None);
    }

    #[test]
    fn the_full_form_runs_ignored_tests_but_not_those_that_others_start() {
        let words = ["share".to_owned()];
        let arguments = |name: &str, with_ignored, words: &[String], tests: &[&str]| {
            let tests = tests.iter().map(|&test| test.to_owned()).collect();
            let program = TestProgram { name: name.to_owned(), executable: "x".into(), folder: "/".into(), tests };
            harness_arguments(&program, &Selection { with_ignored, words })
        };
        let full = arguments("limits docker_jobs", true, &words, &[]).unwrap();
        assert_eq!(full[..2], ["share", "--include-ignored"]);
        assert!(full.windows(2).any(|pair| pair == ["--skip", "inner_"]), "{full:?}");
        assert_eq!(full.last().map(String::as_str), Some("--test-threads=1"));
        assert_eq!(arguments("core lib", false, &[], &[]), Some(Vec::new()));
        // A module of a program runs by the names of its tests, which other modules may contain.
        let tests = ["a::shares_add_up", "a::inner_share", "a::other"];
        let selected = arguments("core a", true, &words, &tests).unwrap();
        assert_eq!(selected, ["a::shares_add_up", "--exact", "--include-ignored"]);
        assert_eq!(arguments("core a", true, &[], &tests).unwrap()[..2], ["a::shares_add_up", "a::other"]);
        assert_eq!(arguments("core a", true, &["nothing".to_owned()], &tests), None);
    }

    #[test]
    fn engines_and_machines_are_left_to_one_worker() {
        let program = |name: &str| TestProgram {
            name: name.to_owned(),
            executable: "x".into(),
            folder: "/".into(),
            tests: Vec::new(),
        };
        let programs = ["core lib", "limits lib", "limits docker_jobs", "limits v2_qemu"].map(program);
        let mut queue = VecDeque::from_iter(&programs);
        let mut take = || take_last(&mut queue, |program| !is_alone(&program.name)).map(|program| program.name.clone());
        assert_eq!([take(), take(), take()], [Some("limits lib".to_owned()), Some("core lib".to_owned()), None]);
        assert_eq!(queue.len(), 2);
    }

    #[test]
    fn a_program_of_several_files_counts_as_several() {
        let script = "printf 'jobs::run: test\\nkills::end: test\\njobs::stop::now: test\\n'";
        let (folder, program) = script_named("all", script);
        let message = serde_json::json!({
            "reason": "compiler-artifact",
            "profile": {"test": true},
            "manifest_path": folder.path().join("Cargo.toml"),
            "target": {"name": "all", "kind": ["test"]},
            "executable": program.executable,
        });
        let package = folder.path().file_name().unwrap().to_str().unwrap();
        let found = programs(&message.to_string()).unwrap();
        assert_eq!(
            found.iter().map(|p| p.name.clone()).collect::<Vec<_>>(),
            ["jobs", "kills"].map(|m| format!("{package} {m}"))
        );
        assert_eq!(found[0].tests, ["jobs::run", "jobs::stop::now"]);
    }

    /// A file of tests that `all.rs` does not name would never run.
    #[test]
    fn every_file_of_tests_belongs_to_a_program() {
        let crates = sh::root().join("crates");
        let mut missing = Vec::new();
        for package in std::fs::read_dir(crates).unwrap().map(|entry| entry.unwrap().path()) {
            let manifest = std::fs::read_to_string(package.join("Cargo.toml")).unwrap();
            let Ok(all) = std::fs::read_to_string(package.join("tests/all.rs")) else {
                assert!(!manifest.contains("autotests"), "{} has no tests/all.rs", package.display());
                continue;
            };
            for file in std::fs::read_dir(package.join("tests")).unwrap().map(|entry| entry.unwrap().path()) {
                let Some(name) = file.to_str().and_then(|file| file.strip_suffix(".rs")) else { continue };
                let name = name.rsplit('/').next().unwrap();
                let is_target = manifest.contains(&format!("path = \"tests/{name}.rs\""));
                if !is_target && !all.lines().any(|line| line == format!("mod {name};")) {
                    missing.push(file);
                }
            }
        }
        assert!(missing.is_empty(), "name them in `all.rs` beside them: {missing:?}");
    }

    fn script(text: &str) -> (tempfile::TempDir, TestProgram) {
        script_named("a b", text)
    }

    fn script_named(name: &str, text: &str) -> (tempfile::TempDir, TestProgram) {
        let folder = tempfile::tempdir().unwrap();
        let program = TestProgram::of_script(name, folder.path(), text);
        (folder, program)
    }

    #[test]
    fn processes_end_with_the_runner() {
        let group = Command::new("/bin/sleep").arg("60").process_group(0).spawn();
        let mut sleeping = group.unwrap();
        let mut guard = Guard::of(sleeping.id()).unwrap();
        // What the kernel does when the runner ends.
        drop(guard.0.stdin.take());
        let status = sleeping.wait().unwrap();
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9));
    }

    #[test]
    fn the_processor_time_of_a_program_and_its_children_is_known() {
        let (folder, program) = script("sh -c 'i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done'; sleep 0.2");
        let ended = run_logged(&mut program.command(), &folder.path().join("log"), PATIENCE).unwrap();
        assert_eq!(ended.failure, None);
        assert!(ended.cpu_s > 0.0, "a loop takes time");
    }

    #[test]
    fn a_program_that_fails_is_reported_with_its_output() {
        let selection = Selection { with_ignored: false, words: &[] };
        let (folder, program) = script("echo $GREETING; exit 3");
        let failed = run_one(&program, &selection, &[("GREETING", "hello".into())], folder.path()).unwrap();
        assert!(failed.failure.unwrap().contains('3'));
        assert_eq!(failed.output, "hello\n");
        let (folder, program) = script("echo 'test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured'");
        assert_eq!(run_one(&program, &selection, &[], folder.path()).unwrap().failure, None);
        // As if a test had ended the process.
        let (folder, program) = script("exit 0");
        let failure = run_one(&program, &selection, &[], folder.path()).unwrap().failure.unwrap();
        assert!(failure.contains("without a result"), "{failure}");
    }

    #[test]
    fn every_program_that_starts_a_cluster_is_listed() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let mut found = Vec::new();
        for (package, folder) in [("operator", "crates/operator/tests"), ("xtask", "xtask/tests")] {
            let files = std::fs::read_dir(root.join(folder)).unwrap().map(|entry| entry.unwrap().path());
            for file in files.filter(|file| file.extension().is_some_and(|kind| kind == "rs")) {
                let text = std::fs::read_to_string(&file).unwrap();
                if text.lines().any(|line| line.starts_with("#[ignore") && line.contains("test bed")) {
                    found.push(format!("{package} {}", file.file_stem().unwrap().to_str().unwrap()));
                }
            }
        }
        found.sort_unstable();
        assert_eq!(found, CLUSTERS);
    }
}
