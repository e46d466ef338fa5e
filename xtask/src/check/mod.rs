//! `cargo xtask check`: the project's rules that a program can verify.
//!
//! Each rule is a pure function over values (cargo's metadata, the text of the files) that returns what
//! breaks it, one line a finding with its place and its remedy. All rules run before the command fails, so
//! one run shows everything.

mod cycles;
mod fail_points;
mod generated;
mod layers;
mod names;
mod prose;
mod tree;
mod unsafe_code;

pub(crate) use generated::generate;

use crate::programs::Programs;
use crate::setup::{self, TestTools};
use crate::sh;
use anyhow::{Context, Result, bail};
use std::process::Command;
use tree::SourceTree;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only the rules about the text of the tree, which need no build: layers, cycles, fail points, unsafe code, prose,
    /// names.
    #[arg(long)]
    text: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    text_rules()?;
    if args.text {
        return Ok(());
    }
    let installed = TestTools { bin: setup::tools(&[setup::CARGO_DENY])?, venv: Default::default() };
    formatting()?;
    lints()?;
    dependencies(&installed)?;
    generated::check_fresh(&Programs::build()?)
}

/// The rules that are checked in seconds, so that nobody waits for a build to learn of a line that is too long.
pub(crate) fn before_build() -> Result<()> {
    text_rules()?;
    formatting()
}

/// All other rules but the lints, with programs and tools that are there already.
pub(crate) fn after_build(installed: &TestTools, programs: &Programs) -> Result<()> {
    dependencies(installed)?;
    generated::check_fresh(programs)
}

/// The lints, in the time that other programs leave unused.
pub(crate) fn lints_beside() -> Result<()> {
    sh::run(&mut sh::idle(&clippy(&["--quiet"])))
}

/// The rules that need no build.
pub(crate) fn text_rules() -> Result<()> {
    let metadata = sh::output(sh::cargo().args(["metadata", "--format-version", "1", "--locked"]))?;
    let metadata = serde_json::from_str(&metadata).context("cargo metadata prints no JSON")?;
    let tree = SourceTree::read(&sh::root())?;
    let mut findings = layers::check(&metadata);
    findings.extend(cycles::check(&tree));
    findings.extend(fail_points::check(&metadata, &tree));
    findings.extend(unsafe_code::check(&tree));
    findings.extend(prose::check(&tree));
    findings.extend(names::check(&tree));
    if !findings.is_empty() {
        bail!("the rules of the project are broken:\n  {}", findings.join("\n  "));
    }
    eprintln!("layers, module cycles, fail points, unsafe code, prose and names are in order");
    Ok(())
}

fn formatting() -> Result<()> {
    sh::run(sh::cargo().args(["fmt", "--all", "--check"]))
}

fn lints() -> Result<()> {
    sh::run(&mut clippy(&[]))
}

/// Clippy in the profile of the tests, whose build scripts and macros are shared: those of SQLite and ring compile C
/// for minutes.
fn clippy(options: &[&str]) -> Command {
    let mut clippy = sh::cargo();
    clippy.args(["clippy", "--release", "--workspace", "--all-targets"]).args(options).args(["--", "-D", "warnings"]);
    clippy
}

/// Licences, bans and sources come with the crates. Advisories need a database from the network: without a
/// network they are not checked, and a line says so.
fn dependencies(installed: &TestTools) -> Result<()> {
    let deny = |args: &[&str]| {
        let mut deny = sh::cargo();
        deny.arg("deny").args(args);
        installed.equip(&mut deny);
        deny
    };
    sh::run(&mut deny(&["--locked", "check", "bans", "licenses", "sources"]))?;
    match sh::output(&mut deny(&["--locked", "fetch", "db"])) {
        Ok(_) => sh::run(&mut deny(&["--locked", "--offline", "check", "advisories"])),
        Err(error) => {
            let text = error.to_string();
            let reason = text.lines().last().unwrap_or_default();
            eprintln!("NOT CHECKED: security advisories, because their database cannot be fetched ({reason})");
            Ok(())
        }
    }
}
