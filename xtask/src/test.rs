//! `cargo xtask test`: everything a change must pass.

use crate::{check, e2e, setup, sh};
use anyhow::Result;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Leave out the checks (formatting, lints, dependency rules) and run the tests only.
    #[arg(long)]
    no_check: bool,
    /// Handed to nextest, e.g. a part of a test's name.
    #[arg(trailing_var_arg = true)]
    nextest: Vec<String>,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let installed = setup::everything()?;
    if !args.no_check {
        check::run_with(&installed)?;
    }
    // The release profile: one build serves the tests, the demo and the benchmarks, and the trainers are too slow without it.
    let mut tests = sh::cargo();
    tests.args(["nextest", "run", "--release", "--workspace"]).args(&args.nextest);
    installed.equip(&mut tests);
    sh::run(&mut tests)?;
    if args.nextest.is_empty() {
        sh::run(sh::cargo().args(["test", "--release", "--workspace", "--doc", "--quiet"]))?;
        e2e::short()?;
    }
    Ok(())
}
