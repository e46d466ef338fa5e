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
mod places;
mod prose;
mod tree;
mod unsafe_code;

pub(crate) use generated::generate;

use crate::programs::Programs;
use crate::setup;
use crate::sh::{self, Urgency};
use anyhow::{Context, Result, bail};
use std::process::Command;
use tree::SourceTree;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only the rules about the text of the tree, which need no build: layers, cycles, fail points, unsafe code, prose,
    /// names, places.
    #[arg(long)]
    text: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    text_rules()?;
    if args.text {
        return Ok(());
    }
    formatting()?;
    lints()?;
    dependencies(Urgency::Normal)?;
    generated::check_fresh(&Programs::build()?)
}

/// The rules that are checked in seconds, so that nobody waits for a build to learn of a line that is too long.
pub(crate) fn before_build() -> Result<()> {
    text_rules()?;
    formatting()
}

/// What the programs generate, with programs that are there already.
pub(crate) fn after_build(programs: &Programs) -> Result<()> {
    generated::check_fresh(programs)
}

/// The lints and the rules about dependencies, in the time that other programs leave unused.
pub(crate) fn beside() -> Result<()> {
    let dependencies = dependencies(Urgency::Idle);
    sh::run(&mut sh::idle(&clippy(&["--quiet"]))).and(dependencies)
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
    findings.extend(places::check(&tree));
    if !findings.is_empty() {
        bail!("the rules of the project are broken:\n  {}", findings.join("\n  "));
    }
    eprintln!("layers, module cycles, fail points, unsafe code, prose, names and places are in order");
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
fn dependencies(urgency: Urgency) -> Result<()> {
    let program = setup::tool(setup::CARGO_DENY, urgency)?;
    let deny = |args: &[&str]| {
        let mut deny = Command::new(&program);
        deny.args(args).current_dir(sh::root());
        sh::remove_own_variables(&mut deny);
        urgency.apply(deny)
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
