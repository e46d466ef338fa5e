//! `cargo xtask faults`: injects every fault of `docs/faults.md` and prints what was injected, what did not
//! hold and how long recovery took.
//!
//! Each row of the document names tests. They are built once, and each is run by its exact name in a process
//! of its own. A test prints lines such as `fault: injected=12 violations=0 recovery_s=1.4`; the numbers of a
//! row are the sums, and for `recovery_s` the largest. A test that prints no such line counts as one
//! injection; a test that fails counts as one violation more.
//!
//! A row whose tests need more than this machine has is *not run*, with the reason. It is neither passed nor
//! failed, and the end of the report counts such rows.

pub(crate) mod fuzz;
mod report;
mod table;

use crate::test::runner::{self, TestProgram};
use crate::{packages, sh};
use anyhow::{Context, Result, bail, ensure};
use report::{Numbers, RowReport};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use table::{NamedTest, Row};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only these rows.
    rows: Vec<String>,
    /// Lists the rows with what they need, and runs nothing.
    #[arg(long)]
    list: bool,
    /// How the report is printed.
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
    /// The profile of the build.
    #[arg(long, default_value = "release")]
    profile: String,
    /// Also tests that need Docker, qemu or the test bed. Install what they need with `cargo xtask setup`.
    #[arg(long)]
    all: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    Table,
    Json,
}

/// A test that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(10 * 60);

pub(crate) fn run(args: &Args) -> Result<()> {
    let document = sh::root().join(table::DOCUMENT);
    let text = std::fs::read_to_string(&document).with_context(|| format!("cannot read {}", document.display()))?;
    let all = table::rows(&text);
    for wanted in &args.rows {
        ensure!(all.iter().any(|row| row.id == *wanted), "there is no row `{wanted}`: `--list` names them");
    }
    let rows: Vec<Row> = all.into_iter().filter(|row| args.rows.is_empty() || args.rows.contains(&row.id)).collect();
    if args.list {
        for row in &rows {
            println!("{:<18} {}{}", row.id, row.fault, needs_text(row)?);
        }
        return Ok(());
    }
    let programs = build(rows.iter().flat_map(|row| &row.tests), &args.profile)?;
    let mut reports = Vec::new();
    for row in &rows {
        let report = run_row(row, &programs, args.all)?;
        eprintln!("{}", report.line());
        reports.push(report);
    }
    if args.output == Format::Json {
        println!("{}", serde_json::to_string_pretty(&serde_json::json!({ "rows": reports }))?);
    }
    let (failed, left_out) = report::count(&reports);
    eprintln!("{} rows held, {failed} did not, {left_out} were not run or only in part", reports.len() - failed);
    ensure!(failed == 0, "{failed} rows did not hold: see above");
    Ok(())
}

fn needs_text(row: &Row) -> Result<String> {
    let needs: BTreeSet<String> = row
        .tests
        .iter()
        .map(|test| test.needs(&sh::root()))
        .collect::<Result<Vec<_>>>()?
        .into_iter()
        .flatten()
        .collect();
    let list = needs.into_iter().collect::<Vec<_>>().join("; ");
    Ok(if list.is_empty() { list } else { format!(" [{list}]") })
}

/// Builds the packages of these tests.
fn build<'a>(tests: impl Iterator<Item = &'a NamedTest>, profile: &str) -> Result<BTreeMap<String, TestProgram>> {
    let folders: BTreeSet<&str> = tests.map(NamedTest::package_folder).collect();
    let mut packages = Vec::new();
    for folder in folders {
        packages.extend(["--package".to_owned(), package_name(folder)?]);
    }
    // The tests of the daemon start programs that lie beside them.
    let programs = ["--package", "gainshare", "--bins", "--examples", "--tests", "--lib"];
    let mut args = vec!["build".to_owned(), "--profile".to_owned(), profile.to_owned()];
    args.extend(["--message-format", "json-render-diagnostics"].map(str::to_owned));
    args.extend(packages);
    args.extend(programs.map(str::to_owned));
    let output =
        sh::cargo().args(&args).stderr(std::process::Stdio::inherit()).output().context("cannot start cargo")?;
    ensure!(output.status.success(), "the tests do not build: see above");
    let found = runner::programs(&String::from_utf8_lossy(&output.stdout));
    Ok(found.into_iter().map(|program| (program.name.clone(), program)).collect())
}

/// The name of the package in a folder.
fn package_name(folder: &str) -> Result<String> {
    let manifest = sh::root().join(folder).join("Cargo.toml");
    let text = std::fs::read_to_string(&manifest).with_context(|| format!("cannot read {}", manifest.display()))?;
    let name = text.lines().find_map(|line| line.strip_prefix("name = \""));
    let name = name.and_then(|rest| rest.strip_suffix('"'));
    Ok(name.with_context(|| format!("{} has no name", manifest.display()))?.to_owned())
}

fn run_row(row: &Row, programs: &BTreeMap<String, TestProgram>, all: bool) -> Result<RowReport> {
    let mut report = RowReport::new(&row.id);
    for test in &row.tests {
        if let Some(reason) = test.needs(&sh::root())?.and_then(|needs| missing(&needs, all)) {
            report.leave_out(&test.name, &reason);
            continue;
        }
        let (program, full_name) = locate(test, programs)?;
        let began = Instant::now();
        let (passed, printed) = run_test(program, &full_name)?;
        eprintln!(
            "  {:<6} {:>6.1} s  {}",
            if passed { "ok" } else { "FAILED" },
            began.elapsed().as_secs_f64(),
            test.name
        );
        if !passed {
            eprintln!("{printed}");
        }
        report.add(passed, Numbers::of(&printed));
    }
    Ok(report)
}

/// Why a test cannot run here, if it cannot.
fn missing(needs: &str, all: bool) -> Option<String> {
    // SAFETY: geteuid has no preconditions.
    let is_root = unsafe { libc::geteuid() } == 0;
    let heavy = ["Docker", "qemu", "test bed", "Python"].iter().any(|word| needs.contains(word));
    if needs.contains("root") && !is_root {
        return Some(format!("{needs}, and this is not root"));
    }
    if !heavy {
        return None;
    }
    if !all {
        return Some(format!("{needs}: give --all"));
    }
    let packages = packages::missing_for_tests();
    (!packages.is_empty()).then(|| format!("{needs}, and these packages are missing: {}", packages.join(", ")))
}

/// The program that contains a test, and the test's name with its modules.
fn locate<'a>(test: &NamedTest, programs: &'a BTreeMap<String, TestProgram>) -> Result<(&'a TestProgram, String)> {
    for program in test.programs()?.iter().filter_map(|name| programs.get(name)) {
        let listed = sh::output(program.command().args(["--list", "--format", "terse"]))?;
        let mut names = listed.lines().filter_map(|line| line.strip_suffix(": test"));
        let is_wanted = |full: &&str| full.rsplit("::").next() == Some(&test.name) && in_file(full, &test.file);
        if let Some(full) = names.find(is_wanted) {
            return Ok((program, full.to_owned()));
        }
    }
    bail!("no program was built that contains `{}` of {}", test.name, test.file)
}

/// Whether the modules of a unit test lead to this file: the file's own name is one of them.
fn in_file(full: &str, file: &str) -> bool {
    let stem = |path: &str| path.rsplit('/').next().unwrap_or("").trim_end_matches(".rs").to_owned();
    let name = match stem(file).as_str() {
        "mod" => stem(file.rsplit_once('/').map_or("", |(folder, _)| folder)),
        name => name.to_owned(),
    };
    let is_unit_test = file.contains("/src/");
    !is_unit_test
        || ["lib", "main"].contains(&name.as_str())
        || full.split("::").any(|part| {
            // `world_tests.rs` may be the module `tests` of `world`.
            part == name || name.strip_suffix("_tests") == Some(part)
        })
}

/// Runs one test; whether it passed, and what it printed.
fn run_test(program: &TestProgram, full_name: &str) -> Result<(bool, String)> {
    let folder = tempfile::Builder::new().prefix("gainshare-faults-").tempdir()?;
    let log = folder.path().join("log");
    let mut command = program.command();
    command.args(["--exact", full_name, "--include-ignored", "--nocapture", "--test-threads=1"]);
    let ended = runner::run_logged(&mut command, &log, PATIENCE)?;
    let mut printed = String::from_utf8_lossy(&std::fs::read(&log)?).into_owned();
    let counts = runner::counts(&printed).unwrap_or_default();
    if let Some(reason) = &ended {
        printed += &format!("\n{reason}\n");
    }
    Ok((ended.is_none() && counts.passed == 1, printed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unit_test_is_found_by_the_module_of_its_file() {
        assert!(in_file("state::world_tests::stale", "crates/operator/src/state/world_tests.rs"));
        assert!(in_file("state::world::tests::stale", "crates/operator/src/state/world_tests.rs"));
        assert!(in_file("docker::tests::x", "crates/daemon/src/driver/docker/mod.rs"));
        assert!(!in_file("file::tests::garbage_never_panics", "crates/limits/src/process/identity.rs"));
        assert!(in_file("anything", "crates/daemon/tests/faults.rs"));
    }

    #[test]
    fn what_this_machine_lacks_is_a_reason() {
        assert!(missing("needs Docker", false).unwrap().contains("--all"));
        assert_eq!(missing("nothing", false), None);
    }
}
