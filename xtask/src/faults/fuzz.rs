//! `cargo xtask fuzz`: every test on arbitrary input, again and again for a while.
//!
//! The tests are property tests: each run draws new input, and an input that fails is printed smaller. Files in folders
//! named `corpus` beside the tests are inputs that are kept; ordinary tests read them at every run.
//!
//! `cargo xtask test` runs each target for a minute, too, in the time that its other programs leave unused. When these
//! are over, each target that is left runs once.

use super::table::{self, NamedTest};
use super::{Circumstances, build, by_name, locate, run_test};
use crate::test::runner::TestProgram;
use anyhow::{Result, ensure};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long each target runs beside the tests.
const LENGTH_BESIDE: Duration = Duration::from_secs(60);

/// Targets that run beside the tests at a time: enough that the tests take longer than all targets together.
const WORKERS_BESIDE: usize = 2;

/// How long one run may take beside the tests, which may leave it hardly any time.
const PATIENCE_BESIDE: Duration = Duration::from_secs(60 * 60);

/// What reads input from outside, and the test that feeds it.
const TARGETS: [(&str, &str); 17] = [
    (
        "collectors with stored states",
        "`crates/progress/tests/garbage.rs::no_state_and_no_input_makes_a_collector_panic`",
    ),
    ("pushes and Prometheus answers", "`crates/progress/tests/garbage.rs::no_answer_and_no_push_makes_a_parser_panic`"),
    ("patterns and output", "`crates/progress/tests/garbage.rs::no_pattern_and_no_output_makes_the_parser_panic`"),
    ("event files", "`crates/progress/src/tensorboard.rs::any_bytes_are_survived`"),
    ("job files", "`crates/daemon/tests/spec.rs::garbage_never_panics`"),
    ("job files that are nearly valid", "`crates/daemon/tests/spec.rs::no_damaged_job_file_makes_a_parser_panic`"),
    ("submissions", "`crates/daemon/tests/spec.rs::no_submission_makes_the_parser_panic`"),
    ("the journal", "`crates/daemon/tests/journal.rs::replaying_the_journal_gives_the_state`"),
    ("damaged journals", "`crates/daemon/tests/journal.rs::no_damage_makes_the_journal_panic`"),
    ("scenario files", "`crates/sim/tests/scenario_files.rs::no_scenario_file_makes_the_parser_panic`"),
    ("admission reviews", "`crates/operator/src/http/body_tests.rs::any_admission_review_is_answered`"),
    ("bodies of node agents", "`crates/operator/src/http/body_tests.rs::any_body_of_an_agent_is_taken_or_refused`"),
    ("pods, Jobs, TrainingJobs, policies", "`crates/operator/src/jobs/hostile_tests.rs::any_objects_pass`"),
    ("jobs of tasks", "`crates/operator/src/jobs/hostile_task_tests.rs::any_jobs_of_tasks_pass`"),
    (
        "agents' messages and nodes",
        "`crates/operator/src/placement/hostile_tests.rs::any_messages_nodes_and_jobs_pass`",
    ),
    ("quantities", "`crates/kube-api/src/quantity.rs::never_panics`"),
    ("container logs", "`crates/node-agent/src/cri.rs::random_bytes_cause_no_panic_and_no_long_output`"),
];

#[derive(clap::Args)]
pub(crate) struct Args {
    /// How long each target runs, in seconds.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Only targets whose name contains this.
    target: Option<String>,
    /// The profile of the build.
    #[arg(long, default_value = "release")]
    profile: String,
}

fn targets() -> impl Iterator<Item = (&'static str, NamedTest)> {
    TARGETS.into_iter().flat_map(|(name, test)| table::tests(test).into_iter().map(move |test| (name, test)))
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let wanted = |name: &str| args.target.as_ref().is_none_or(|part| name.contains(part.as_str()));
    let chosen: Vec<(&str, NamedTest)> = targets().filter(|(name, _)| wanted(name)).collect();
    ensure!(!chosen.is_empty(), "no target has this name; targets are: {}", TARGETS.map(|(name, _)| name).join("; "));
    let campaign = Campaign {
        programs: build(&args.profile)?,
        length: Duration::from_secs(args.seconds),
        is_short: &AtomicBool::new(false),
        circumstances: Circumstances::default(),
    };
    campaign.run(chosen, 1)
}

/// Runs each target for a minute, in the time that other programs leave unused, and once when these are over.
pub(crate) fn run_beside(programs: &[TestProgram], others_are_over: &AtomicBool) -> Result<()> {
    let circumstances = Circumstances { patience: PATIENCE_BESIDE, is_idle: true, ..Circumstances::default() };
    let (programs, length) = (by_name(programs.to_vec()), LENGTH_BESIDE);
    let campaign = Campaign { programs, length, is_short: others_are_over, circumstances };
    campaign.run(targets().collect(), WORKERS_BESIDE)
}

/// How targets run.
struct Campaign<'a> {
    programs: BTreeMap<String, TestProgram>,
    /// How long each target runs.
    length: Duration,
    /// From when on each target runs only once.
    is_short: &'a AtomicBool,
    circumstances: Circumstances,
}

impl Campaign<'_> {
    /// Runs the targets, as many at a time as there are workers. One that fails does not hide the others.
    fn run(&self, targets: Vec<(&str, NamedTest)>, workers: usize) -> Result<()> {
        let queue = Mutex::new(VecDeque::from(targets));
        let next = || queue.lock().expect("nothing panics while it takes a target").pop_front();
        let work = || -> Result<Vec<&str>> {
            let mut failed = Vec::new();
            while let Some((name, test)) = next() {
                if !self.run_target(name, &test)? {
                    failed.push(name);
                }
            }
            Ok(failed)
        };
        let failed = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
            let results = workers.into_iter().map(|worker| worker.join().expect("a worker panicked"));
            results.collect::<Result<Vec<_>>>()
        })?;
        let failed = failed.concat();
        ensure!(failed.is_empty(), "an input above fails: {}", failed.join("; "));
        Ok(())
    }

    /// Runs one target again and again, and prints a line about it; whether it held.
    fn run_target(&self, name: &str, test: &NamedTest) -> Result<bool> {
        let (program, full_name) = locate(test, &self.programs)?;
        let (began, mut runs, mut held) = (Instant::now(), 0, true);
        let goes_on = || began.elapsed() < self.length && !self.is_short.load(Ordering::Relaxed);
        while held && (runs == 0 || goes_on()) {
            let (passed, printed) = run_test(program, &full_name, &self.circumstances)?;
            (runs, held) = (runs + 1, passed);
            if !passed {
                eprintln!("\n---- arbitrary input: {name} ----\n{printed}");
            }
        }
        let (state, took_s) = (if held { "ok" } else { "FAILED" }, began.elapsed().as_secs_f64());
        eprintln!("{state:<6} {name:<36} {runs} runs in {took_s:.0} s");
        Ok(held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sh;
    use std::path::Path;

    /// A program of tests with one test, which does what the script says.
    fn program(name: &str, folder: &Path, script: &str) -> TestProgram {
        let passes = "echo 'test result: ok. 1 passed; 0 failed; 0 ignored'";
        let text = format!("if [ \"$1\" = --list ]; then echo 'holds: test'; exit; fi\n{script}\n{passes}");
        TestProgram::of_script(name, folder, &text)
    }

    fn target(file: &str) -> NamedTest {
        NamedTest { file: format!("crates/{file}"), name: "holds".to_owned() }
    }

    #[test]
    fn a_target_that_fails_is_named_and_hides_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let programs = vec![
            program("a one", folder.path(), "echo run >> one; exit 1"),
            program("b two", folder.path(), "echo run >> two"),
            program("c three", folder.path(), "echo run >> three; sleep 0.3"),
        ];
        let is_short = AtomicBool::new(false);
        let campaign = |length| {
            let (programs, circumstances) = (by_name(programs.clone()), Circumstances::default());
            Campaign { programs, length, is_short: &is_short, circumstances }
        };
        let targets = || {
            vec![
                ("first", target("a/tests/one.rs")),
                ("second", target("b/tests/two.rs")),
                ("third", target("c/tests/three.rs")),
            ]
        };
        let runs = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap().lines().count();
        for workers in [1, 2] {
            let error = campaign(Duration::ZERO).run(targets(), workers).unwrap_err();
            assert_eq!(error.to_string(), "an input above fails: first");
            assert_eq!((runs("one"), runs("two"), runs("three")), (workers, workers, workers));
        }
        // A target runs again until its time is over. One that failed does not.
        assert!(campaign(Duration::from_millis(400)).run(targets(), 3).is_err());
        assert_eq!(runs("one"), 3);
        assert!(runs("three") >= 4, "{}", runs("three"));
        // When it shall be short, each target runs once, however long it might.
        let before = [runs("two"), runs("three")];
        is_short.store(true, Ordering::Relaxed);
        assert!(campaign(Duration::from_secs(600)).run(targets(), 1).is_err());
        assert_eq!([runs("two"), runs("three")], before.map(|runs| runs + 1));
    }

    #[test]
    fn beside_the_tests_a_target_has_only_unused_time() {
        let folder = tempfile::tempdir().unwrap();
        let class = program("a one", folder.path(), "chrt --pid $$ | grep -q SCHED_IDLE || exit 1");
        let run = |is_idle| {
            let circumstances = Circumstances { is_idle, ..Circumstances::default() };
            let programs = by_name(vec![class.clone()]);
            let campaign =
                Campaign { programs, length: Duration::ZERO, is_short: &AtomicBool::new(false), circumstances };
            campaign.run(vec![("one", target("a/tests/one.rs"))], 1)
        };
        run(true).unwrap();
        let is_idle_here = sh::output(std::process::Command::new("chrt").args(["--pid", "0"])).unwrap();
        assert!(run(false).is_err() || is_idle_here.contains("SCHED_IDLE"), "{is_idle_here}");
    }

    #[test]
    fn a_program_that_was_not_built_fails_the_run() {
        let error = run_beside(&[], &AtomicBool::new(false)).unwrap_err();
        assert!(error.to_string().contains("no program was built"), "{error:#}");
    }

    #[test]
    fn every_target_is_a_test() {
        assert_eq!(targets().count(), TARGETS.len());
        for (name, test) in targets() {
            test.needs(&sh::root()).unwrap_or_else(|error| panic!("{name}: {error:#}"));
        }
    }
}
