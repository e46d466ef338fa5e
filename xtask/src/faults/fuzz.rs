//! `cargo xtask fuzz`: every test on arbitrary input, again and again for a while.
//!
//! The tests are property tests: each run draws new input, and an input that fails is printed smaller. Files in folders
//! named `corpus` beside the tests are inputs that are kept; ordinary tests read them at every run.

use super::table::{self, NamedTest};
use super::{Circumstances, build, locate, run_test};
use anyhow::{Result, ensure};
use std::time::{Duration, Instant};

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
    let programs = build(&args.profile)?;
    let mut failed = Vec::new();
    for (name, test) in &chosen {
        let (program, full_name) = locate(test, &programs)?;
        let (began, mut runs) = (Instant::now(), 0);
        while runs == 0 || began.elapsed() < Duration::from_secs(args.seconds) {
            let (passed, printed) = run_test(program, &full_name, &Circumstances::default())?;
            runs += 1;
            if !passed {
                eprintln!("{printed}");
                failed.push(*name);
                break;
            }
        }
        let state = if failed.contains(name) { "FAILED" } else { "ok" };
        println!("{state:<6} {name:<36} {runs} runs in {:.0} s", began.elapsed().as_secs_f64());
    }
    ensure!(failed.is_empty(), "an input above fails: {}", failed.join("; "));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sh;

    #[test]
    fn every_target_is_a_test() {
        assert_eq!(targets().count(), TARGETS.len());
        for (name, test) in targets() {
            test.needs(&sh::root()).unwrap_or_else(|error| panic!("{name}: {error:#}"));
        }
    }
}
