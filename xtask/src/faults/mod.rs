//! `cargo xtask faults`: injects every fault of `docs/faults.md` and prints what was injected, what did not
//! hold and how long recovery took.
//!
//! Each row of the document names tests. They are built once, and each is run by its exact name in a process
//! of its own. A test prints lines such as `fault: injected=12 violations=0 recovery_s=1.4`; the numbers of a
//! row are the sums, and for `recovery_s` the largest. A test that prints no such line counts as one
//! injection; a test that fails counts as at least one violation. A test that several rows name is run once, and its
//! lines say which row they concern (`fault: row=two-operators injected=1 violations=0`).
//!
//! A row whose tests need more than this machine has is *not run*, with the reason. It is neither passed nor
//! failed, and the end of the report counts such rows. Under `--all` nothing may be left out: a row without an
//! injection, or with a test that was not run, is a failure.

pub(crate) mod fuzz;
mod report;
mod table;

use crate::test::runner::{self, TestProgram};
use crate::{packages, programs, sh};
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
    /// Also the long forms: outages of 60 and 360 s besides that of 5 s, and cuts of the journal at every byte.
    #[arg(long)]
    long: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    Table,
    Json,
}

/// A test that takes longer hangs. The outages that a test sleeps through come on top.
const PATIENCE: Duration = Duration::from_secs(10 * 60);
/// The same for long forms: a cut of the journal at every byte takes half an hour.
const LONG_PATIENCE: Duration = Duration::from_secs(90 * 60);

/// A test reads from this variable for how many seconds a part of the control plane is away. Rows whose fault names
/// the variable are run with each of [`OUTAGES_S`].
const OUTAGE: &str = "GAINSHARE_OUTAGE_S";
/// Outages in seconds. The first one is the default, the others are added by `--long`. The last one is longer than the
/// lease of any part.
const OUTAGES_S: [u64; 3] = [5, 60, 360];
/// The largest number of outages that follow each other in one test.
const OUTAGES_PER_TEST: u32 = 4;
/// Tests that have a long form run it if this variable is set.
const LONG: &str = "GAINSHARE_LONG";

/// The variables with which a test runs, and how long it may take.
struct Circumstances {
    environment: Vec<(&'static str, String)>,
    patience: Duration,
    /// Only in the time that other programs leave unused.
    is_idle: bool,
}

impl Default for Circumstances {
    fn default() -> Circumstances {
        Circumstances { environment: Vec::new(), patience: PATIENCE, is_idle: false }
    }
}

impl Circumstances {
    /// One for each run of the row's tests. `outage_s` is the user's choice of an outage.
    fn of(row: &Row, is_long: bool, outage_s: Option<u64>) -> Vec<Circumstances> {
        let long = is_long.then(|| (LONG, "1".to_owned()));
        let patience = if is_long { LONG_PATIENCE } else { PATIENCE };
        if !row.fault.contains(OUTAGE) {
            return vec![Circumstances { environment: long.into_iter().collect(), patience, is_idle: false }];
        }
        let outages_s = match (outage_s, is_long) {
            (Some(outage_s), _) => vec![outage_s],
            (None, true) => OUTAGES_S.to_vec(),
            (None, false) => OUTAGES_S[..1].to_vec(),
        };
        let one = |outage_s: u64| Circumstances {
            environment: long.iter().cloned().chain([(OUTAGE, outage_s.to_string())]).collect(),
            patience: patience + Duration::from_secs(outage_s) * OUTAGES_PER_TEST,
            is_idle: false,
        };
        outages_s.into_iter().map(one).collect()
    }

    /// What tells the runs of one test apart. The shortest outage is what a test does without the variable.
    fn key(&self) -> String {
        let is_default = |(name, value): &(&str, String)| *name == OUTAGE && *value == OUTAGES_S[0].to_string();
        let others = self.environment.iter().filter(|variable| !is_default(variable));
        others.map(|(name, value)| format!(" {name}={value}")).collect()
    }
}

/// Whether each test passed that was run, and what it printed, by its name and its circumstances: a test that several
/// rows name is run once.
type TestResults = BTreeMap<(String, String), (bool, String)>;

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
    let programs = build(&args.profile)?;
    let (mut reports, mut done) = (Vec::new(), TestResults::new());
    for row in &rows {
        let report = run_row(row, &programs, args, &mut done)?;
        eprintln!("{}", report.line());
        reports.push(report);
    }
    if args.output == Format::Json {
        println!("{}", serde_json::to_string_pretty(&serde_json::json!({ "rows": reports }))?);
    }
    let counts = report::count(&reports);
    let (failed, left_out) = (counts.failed, counts.left_out);
    eprintln!("{} rows held, {failed} did not, {left_out} were not run or only in part", counts.held);
    ensure!(failed == 0, "{failed} rows did not hold: see above");
    if args.all {
        let incomplete = report::incomplete(&reports);
        ensure!(
            incomplete.is_empty(),
            "nothing or not everything was injected in these rows: {}",
            incomplete.join(", ")
        );
    }
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

/// Builds all programs and all tests of the workspace. Tests start programs that lie beside them, and some of these
/// have their fail points only if the tests of another package are built together with them.
fn build(profile: &str) -> Result<BTreeMap<String, TestProgram>> {
    let mut cargo = sh::cargo();
    cargo.args(["build", "--profile", profile, "--message-format", "json-render-diagnostics"]);
    cargo.args(["--workspace", "--bins", "--lib"]).args(programs::TESTS);
    let output = cargo.stderr(std::process::Stdio::inherit()).output().context("cannot start cargo")?;
    ensure!(output.status.success(), "the tests do not build: see above");
    Ok(by_name(runner::programs(&String::from_utf8_lossy(&output.stdout))?))
}

fn by_name(programs: Vec<TestProgram>) -> BTreeMap<String, TestProgram> {
    programs.into_iter().map(|program| (program.name.clone(), program)).collect()
}

fn run_row(
    row: &Row,
    programs: &BTreeMap<String, TestProgram>,
    args: &Args,
    done: &mut TestResults,
) -> Result<RowReport> {
    let mut report = RowReport::new(&row.id);
    let outage_s = std::env::var(OUTAGE).ok().and_then(|text| text.parse().ok());
    let all_circumstances = Circumstances::of(row, args.long, outage_s);
    for test in &row.tests {
        if let Some(reason) = test.needs(&sh::root())?.and_then(|needs| missing(&needs, args.all)) {
            report.leave_out(&test.name, &reason);
            continue;
        }
        for circumstances in &all_circumstances {
            let key = (format!("{}::{}", test.file, test.name), circumstances.key());
            let (passed, printed) = match done.get(&key) {
                Some(result) => {
                    eprintln!("  (ran for another row)  {}{}", test.name, key.1);
                    result.clone()
                }
                None => done.entry(key).or_insert(run_named(test, programs, circumstances)?).clone(),
            };
            report.add(passed, Numbers::of(&printed, &row.id));
        }
    }
    Ok(report)
}

/// Runs a test that the document names, and prints a line about it.
fn run_named(
    test: &NamedTest,
    programs: &BTreeMap<String, TestProgram>,
    circumstances: &Circumstances,
) -> Result<(bool, String)> {
    let (program, full_name) = locate(test, programs)?;
    let began = Instant::now();
    let (passed, printed) = run_test(program, &full_name, circumstances)?;
    eprintln!(
        "  {:<6} {:>6.1} s  {}{}",
        if passed { "ok" } else { "FAILED" },
        began.elapsed().as_secs_f64(),
        test.name,
        circumstances.key()
    );
    if !passed {
        eprintln!("{printed}");
    }
    Ok((passed, printed))
}

/// Why a test cannot run here, if it cannot.
fn missing(needs: &str, all: bool) -> Option<String> {
    let is_root = nix::unistd::geteuid().is_root();
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
        // A file of tests may be a program of its own. All others are modules.
        let is_own = test.file.contains("/tests/") && !program.is_module();
        let is_wanted =
            |full: &&str| full.rsplit("::").next() == Some(&test.name) && (is_own || in_file(full, &test.file));
        if let Some(full) = names.find(is_wanted) {
            return Ok((program, full.to_owned()));
        }
    }
    bail!("no program was built that contains `{}` of {}", test.name, test.file)
}

/// Whether the modules of a test lead to this file: the file's own name is one of them.
fn in_file(full: &str, file: &str) -> bool {
    let stem = |path: &str| path.rsplit('/').next().unwrap_or("").trim_end_matches(".rs").to_owned();
    let name = match stem(file).as_str() {
        "mod" => stem(file.rsplit_once('/').map_or("", |(folder, _)| folder)),
        name => name.to_owned(),
    };
    ["lib", "main"].contains(&name.as_str())
        || full.split("::").any(|part| {
            // `world_tests.rs` may be the module `tests` of `world`.
            part == name || name.strip_suffix("_tests") == Some(part)
        })
}

/// Runs one test; whether it passed, and what it printed.
fn run_test(program: &TestProgram, full_name: &str, circumstances: &Circumstances) -> Result<(bool, String)> {
    let folder = tempfile::Builder::new().prefix("gainshare-faults-").tempdir()?;
    let log = folder.path().join("log");
    let mut command = if circumstances.is_idle { program.idle_command() } else { program.command() };
    command.args(["--exact", full_name, "--include-ignored", "--nocapture", "--test-threads=1"]);
    command.envs(circumstances.environment.iter().map(|(name, value)| (name, value)));
    let ended = runner::run_logged(&mut command, &log, circumstances.patience)?;
    let mut printed = String::from_utf8_lossy(&std::fs::read(&log)?).into_owned();
    let counts = runner::counts(&printed).unwrap_or_default();
    if let Some(reason) = &ended.failure {
        printed += &format!("\n{reason}\n");
    }
    Ok((ended.failure.is_none() && counts.passed == 1, printed))
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
        assert!(in_file("faults::anything", "crates/daemon/tests/faults.rs"));
        assert!(!in_file("journal::anything", "crates/daemon/tests/faults.rs"));
    }

    #[test]
    fn outages_are_run_at_each_length_and_the_patience_grows_with_them() {
        let row = |fault: &str| Row { id: "a".to_owned(), fault: fault.to_owned(), tests: Vec::new() };
        let lengths = |row: &Row, is_long, outage_s| -> Vec<(Vec<String>, u64)> {
            let all = Circumstances::of(row, is_long, outage_s);
            let values =
                |c: &Circumstances| c.environment.iter().map(|(name, value)| format!("{name}={value}")).collect();
            all.iter().map(|c| (values(c), c.patience.as_secs())).collect()
        };
        let away = row("etcd is away (`GAINSHARE_OUTAGE_S`)");
        assert_eq!(lengths(&away, false, None), [(vec!["GAINSHARE_OUTAGE_S=5".to_owned()], 620)]);
        assert_eq!(lengths(&away, false, Some(100)), [(vec!["GAINSHARE_OUTAGE_S=100".to_owned()], 1000)]);
        let long = lengths(&away, true, None);
        assert_eq!(long.iter().map(|(_, patience_s)| *patience_s).collect::<Vec<_>>(), [5420, 5640, 6840]);
        assert!(long[2].0.contains(&"GAINSHARE_LONG=1".to_owned()), "{long:?}");
        assert_eq!(lengths(&row("a torn journal"), true, None), [(vec!["GAINSHARE_LONG=1".to_owned()], 5400)]);
        assert_eq!(lengths(&row("a torn journal"), false, None), [(Vec::new(), 600)]);
    }

    #[test]
    fn the_shortest_outage_is_what_a_test_does_anyway() {
        let row = |fault: &str| Row { id: "a".to_owned(), fault: fault.to_owned(), tests: Vec::new() };
        let keys = |fault: &str, is_long| -> Vec<String> {
            Circumstances::of(&row(fault), is_long, None).iter().map(Circumstances::key).collect()
        };
        let away = "etcd is away (`GAINSHARE_OUTAGE_S`)";
        assert_eq!(keys(away, false), keys("two operators", false));
        assert_eq!(keys(away, true)[0], keys("two operators", true)[0]);
        assert_eq!(keys(away, true)[2], " GAINSHARE_LONG=1 GAINSHARE_OUTAGE_S=360");
    }

    #[test]
    fn what_this_machine_lacks_is_a_reason() {
        assert!(missing("needs Docker", false).unwrap().contains("--all"));
        assert_eq!(missing("nothing", false), None);
    }
}
