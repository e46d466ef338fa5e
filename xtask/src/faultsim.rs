//! `cargo xtask faultsim`: many seeds of the deterministic fault simulation, and `cargo xtask mutants`: whether the
//! tests notice changes of the code that decides.
//!
//! **How.** The simulations are tests of the crates whose code they run (docs/testing.md). This command builds these
//! tests once, runs them with as many seeds as it is asked for, and adds up their reports.

use crate::sh;
use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use serde_json::{Value, json};
use std::time::Instant;

/// All parts of the simulation have a test of this name.
const TEST: &str = "every_seed_holds_the_invariants";
const PACKAGES: [&str; 2] = ["gainshare-daemon", "gainshare-operator"];

/// The code whose mutants must be caught: the decisions, their check, and the state machines of moves.
const MUTATED: [(&str, &[&str]); 2] = [
    (
        "gainshare-core",
        &[
            "crates/core/src/check.rs",
            "crates/core/src/check/tasks.rs",
            "crates/core/src/decider.rs",
            "crates/core/src/control.rs",
            "crates/core/src/deal.rs",
            "crates/core/src/plan.rs",
        ],
    ),
    (
        "gainshare-operator",
        &[
            "crates/operator/src/jobs/moves.rs",
            "crates/operator/src/jobs/training_job/machine.rs",
            "crates/operator/src/jobs/training_job/ending.rs",
            "crates/operator/src/jobs/batch_job/machine.rs",
        ],
    ),
];

#[derive(clap::Args)]
pub(crate) struct Args {
    /// How many seeds each part runs, besides the kept ones.
    #[arg(long, default_value_t = 500)]
    seeds: u64,
    /// Runs only this seed.
    #[arg(long, conflicts_with = "seeds")]
    seed: Option<u64>,
    #[arg(short, long, value_enum, default_value = "text")]
    output: Format,
}

#[derive(Clone, Copy, ValueEnum)]
enum Format {
    Text,
    Json,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let folder = tempfile::tempdir().context("cannot make a folder for the reports")?;
    let packages = PACKAGES.iter().flat_map(|package| ["-p", package]);
    let mut build = sh::cargo();
    build.args(["test", "--release", "--lib", "--no-run"]).args(packages.clone());
    sh::run(&mut build)?;
    let begun = Instant::now();
    let mut test = sh::cargo();
    test.args(["test", "--release", "--lib", "--no-fail-fast", "-q"]).args(packages).arg(TEST);
    test.env("GAINSHARE_FAULT_REPORTS", folder.path());
    // Seeds that fail are added to the committed lists.
    test.env("GAINSHARE_FAULT_KEEP", sh::root());
    match args.seed {
        Some(seed) => test.env("GAINSHARE_FAULT_SEED", seed.to_string()),
        None => test.env("GAINSHARE_FAULT_SEEDS", args.seeds.to_string()),
    };
    // Cargo prints about tests on the standard output, which is for the report.
    test.stdout(std::io::stderr());
    let result = sh::run(&mut test);
    let wall_s = (begun.elapsed().as_secs_f64() * 10.0).round() / 10.0;
    let mut parts = Vec::new();
    for entry in std::fs::read_dir(folder.path()).context("cannot read the folder of the reports")? {
        let text = std::fs::read_to_string(entry?.path())?;
        parts.push(serde_json::from_str::<Value>(&text).with_context(|| format!("a report is no JSON: {text}"))?);
    }
    parts.sort_by_key(|part| part["part"].to_string());
    let violations: u64 = parts.iter().filter_map(|part| part["violations"].as_u64()).sum();
    match args.output {
        Format::Json => println!("{}", json!({"parts": parts, "violations": violations, "wall_s": wall_s})),
        Format::Text => {
            for part in &parts {
                let number = |key: &str| part[key].as_u64().unwrap_or_default();
                let (seeds, injected) = (number("seeds"), number("injected"));
                println!(
                    "{:8} {seeds} seeds, {injected} faults, {} violations",
                    part["part"].as_str().unwrap_or(""),
                    number("violations")
                );
            }
            println!("{wall_s} s");
        }
    }
    if parts.len() < 3 {
        bail!("{} of 3 parts of the simulation have reported: the output above says why", parts.len());
    }
    result
}

#[derive(clap::Args)]
pub(crate) struct MutantArgs {
    /// Only this part of all mutants, e.g. `0/4`: a sample takes a quarter of the time.
    #[arg(long)]
    shard: Option<String>,
    /// Only mutants of files whose path contains this.
    #[arg(long)]
    file: Option<String>,
}

/// Runs cargo-mutants, which must be installed (`cargo install cargo-mutants --locked`).
pub(crate) fn run_mutants(args: &MutantArgs) -> Result<()> {
    for (package, files) in MUTATED {
        let wanted = |path: &&&str| args.file.as_ref().is_none_or(|part| path.contains(part.as_str()));
        let files: Vec<&&str> = files.iter().filter(wanted).collect();
        if files.is_empty() {
            continue;
        }
        let mut mutants = sh::cargo();
        // Fewer cases of the property tests: each mutant runs all of them.
        mutants.env("PROPTEST_CASES", "16").args(["mutants", "-j1", "--no-shuffle", "-p", package]);
        for file in files {
            mutants.args(["-f", file]);
        }
        if let Some(shard) = &args.shard {
            mutants.args(["--shard", shard]);
        }
        mutants.args(["-o", &format!("target/mutants-{package}"), "--", "--lib"]);
        if package == "gainshare-core" {
            mutants.arg("--tests");
        }
        sh::run(&mut mutants)?;
    }
    Ok(())
}
