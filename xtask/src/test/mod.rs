//! `cargo xtask test`: everything a change must pass, and `cargo xtask test --quick`: what an ordinary user
//! can run at once.
//!
//! Tests that need more than Rust carry `#[ignore = "needs root"]` or the like. The quick form leaves them
//! out and needs no installation. The full form installs what they need and runs them all; nothing is
//! skipped, and whatever is missing is a failure. [`runner`] runs the programs that cargo has built. Then the soak and
//! the stories follow. Beside all of these, in the time that they leave unused, examples in documentation, the rules
//! about dependencies and the lints run, and then arbitrary input is fed to everything that reads input from outside.
//!
//! Both forms use the release profile: the same build serves the tests, the demo, the benchmarks and the
//! test bed's image.

pub(crate) mod runner;

use crate::programs::Programs;
use crate::setup::{self, Step, TestTools};
use crate::{check, e2e, sh, soak};
use anyhow::{Result, ensure};
use runner::{Selection, TestProgram, TestRun};
use std::ffi::OsString;
use std::sync::atomic::{AtomicBool, Ordering};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only tests that need no root, Docker, cluster, qemu or Python frameworks; installs nothing and
    /// leaves out the checks.
    #[arg(long)]
    quick: bool,
    /// Leave out the checks (formatting, lints, rules of the project) and run the tests only.
    #[arg(long)]
    no_check: bool,
    /// Only tests whose names contain one of these words.
    #[arg(trailing_var_arg = true)]
    words: Vec<String>,
}

/// Minutes on two cores: the workspace with all tests from nothing, and after a change in one crate.
const BUILD_COLD_MIN: u32 = 20;
const BUILD_WARM_MIN: u32 = 1;
/// Minutes on two cores: the tests of the quick form, and of the full form with the stories on a cluster.
const QUICK_RUN_MIN: u32 = 3;
const FULL_RUN_MIN: u32 = 25;

/// How many seeds the fault simulation runs, and the number of the quick form. The full form runs as many as the
/// simulation itself names.
const FAULT_SEEDS: &str = "GAINSHARE_FAULT_SEEDS";
const QUICK_FAULT_SEEDS: &str = "100";

/// Work with the programs of tests beside tests and stories. The flag says when these are over.
type Beside = fn(&[TestProgram], &AtomicBool) -> Result<()>;

/// `fuzz` runs beside the tests and stories of the full form.
pub(crate) fn run(args: &Args, fuzz: Beside) -> Result<()> {
    if args.quick { quick(&args.words) } else { full(args, fuzz) }
}

/// Runs both, the second one also after a failure of the first one.
fn both(first: impl FnOnce() -> Result<()>, second: impl FnOnce() -> Result<()>) -> Result<()> {
    let first = first();
    second().and(first)
}

/// The examples in the documentation of the code, in the time that other programs leave unused.
fn documentation() -> Result<()> {
    sh::run(&mut sh::idle(sh::cargo().args(["test", "--release", "--workspace", "--doc", "--quiet"])))
}

fn quick(words: &[String]) -> Result<()> {
    eprint!("{}", announcement(&[], QUICK_RUN_MIN));
    // The tests of the test bed need the programs only in the full form.
    let (tests, selection) = (runner::build()?, Selection { with_ignored: false, words });
    let environment = [(FAULT_SEEDS, OsString::from(QUICK_FAULT_SEEDS))];
    let passed = runner::run(&tests, &selection, &environment)?.finish(&selection, &environment)?;
    println!("{passed} passed, 0 failed");
    Ok(())
}

fn full(args: &Args, fuzz: Beside) -> Result<()> {
    eprint!("{}", announcement(&setup::steps()?, FULL_RUN_MIN));
    let is_root = nix::unistd::geteuid().is_root();
    ensure!(is_root, "the full tests make control groups, namespaces and mounts: run them as root, or use --quick");
    if !args.no_check {
        check::before_build()?;
    }
    let (installed, programs) = install_and_build()?;
    if !args.no_check {
        check::after_build(&programs)?;
    }
    let (tests, environment) = (runner::build()?, installed.environment());
    let selection = Selection { with_ignored: true, words: &args.words };
    // A selection of tests runs alone.
    let is_whole = args.words.is_empty();
    let others_are_over = AtomicBool::new(false);
    let beside = || {
        let lints = || if args.no_check { Ok(()) } else { check::beside() };
        if !is_whole {
            return lints();
        }
        both(|| both(documentation, lints), || fuzz(&tests, &others_are_over))
    };
    let stories = || e2e::short(&programs, || soak::short(programs.gainshare()));
    let (run, from_stories, done_beside) = std::thread::scope(|scope| {
        let beside = scope.spawn(beside);
        let run = runner::run(&tests, &selection, &environment);
        // A program that failed runs again alone, before the stories.
        let is_green = run.as_ref().is_ok_and(TestRun::is_green);
        let from_stories = (is_whole && is_green).then(stories);
        others_are_over.store(true, Ordering::Relaxed);
        (run, from_stories, beside.join().expect("the work beside the tests panicked"))
    });
    let passed = run?.finish(&selection, &environment)?;
    if is_whole {
        from_stories.unwrap_or_else(stories)?;
    }
    // What has failed there was printed when it failed.
    done_beside?;
    println!("{passed} passed, 0 failed");
    Ok(())
}

/// Installs what is missing while cargo builds: one waits for the network while the other one computes.
fn install_and_build() -> Result<(TestTools, Programs)> {
    std::thread::scope(|scope| {
        let everything = || {
            setup::before_tests().inspect_err(|error| {
                eprintln!(
                    "error: {error:#}\nThe tests will not start. The build goes on, and serves the next attempt."
                );
            })
        };
        let installing = scope.spawn(everything);
        let programs = Programs::build_with_tests();
        let installed = installing.join().expect("the installation does not panic")?;
        Ok((installed, programs?))
    })
}

/// What is about to happen, and how long it takes on two cores from nothing and the next time.
fn announcement(steps: &[Step], run_min: u32) -> String {
    let mut text = String::new();
    for step in steps {
        let state = if step.missing { format!("about {} min", step.cold_min) } else { "installed".to_owned() };
        text += &format!("  {:<14} {}\n", state, step.what);
    }
    let install_min: u32 = steps.iter().filter(|step| step.missing).map(|step| step.cold_min).sum();
    if !steps.is_empty() {
        text = format!("To install, once per machine:\n{text}");
    }
    text += &format!(
        "To build: the workspace and its tests, about {BUILD_COLD_MIN} min from nothing, {BUILD_WARM_MIN} min after a change.\n\
         To run: about {run_min} min. Altogether about {} min now, {} min the next time (two idle cores).\n",
        install_min + BUILD_COLD_MIN + run_min,
        BUILD_WARM_MIN + run_min,
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_of_the_lints_hides_none_of_arbitrary_input() {
        let ran = std::cell::Cell::new(false);
        let fuzz = || {
            ran.set(true);
            Ok(())
        };
        assert!(both(|| anyhow::bail!("a lint"), fuzz).is_err());
        assert!(ran.get(), "arbitrary input runs after lints that failed");
        assert!(both(|| Ok(()), || anyhow::bail!("an input failed")).is_err());
        assert!(both(|| Ok(()), || Ok(())).is_ok());
    }

    #[test]
    fn the_announcement_counts_what_is_missing() {
        let step = |what: &str, missing| Step { what: what.to_owned(), missing, cold_min: 7 };
        let text = announcement(&[step("engine", true), step("kernel", false)], 10);
        assert!(text.contains("about 7 min    engine") && text.contains("installed      kernel"), "{text}");
        assert!(text.contains(&format!("about {} min now", 7 + BUILD_COLD_MIN + 10)), "{text}");
        assert!(!announcement(&[], 3).contains("To install"), "the quick form installs nothing");
    }
}
