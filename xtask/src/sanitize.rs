//! `cargo xtask sanitize`: the tests of the library inside jobs, with programs that check memory and threads.
//!
//! **Problem.** The library runs inside programs of others. An access to wrong memory or a race may do its damage much
//! later, where no test notices it.
//!
//! **How.** The tests of `crates/inside` start small programs with the library. This command runs these tests again,
//! once for each *checker*. Valgrind's memcheck runs every program of a test on a modelled processor. For gcc's
//! AddressSanitizer with UndefinedBehaviorSanitizer, and for its ThreadSanitizer, the programs are compiled with checks
//! of each access to memory, and so is the library. The stable compiler of Rust contains these checks, but accepts
//! their option only with `RUSTC_BOOTSTRAP=1`. Findings go to files, because programs of tests are often killed, and
//! their output is compared.
//!
//! **Properties.** A finding fails the command, as a failed test does. So does a checker that would notice nothing:
//! each must first find an error that is made on purpose (`each_error_on_purpose_is_one_that_a_checker_knows`).

use crate::programs::{LIBRARY, target_dir};
use crate::test::runner::{TestProgram, counts, programs, run_logged};
use crate::{packages, sh};
use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only this checker.
    #[arg(long, value_enum)]
    checker: Option<Checker>,
    /// Only tests whose names contain one of these words.
    #[arg(trailing_var_arg = true)]
    words: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Checker {
    /// Valgrind: accesses to wrong memory, and decisions by memory that was never written.
    Memcheck,
    /// AddressSanitizer and UndefinedBehaviorSanitizer.
    Address,
    /// ThreadSanitizer: races. Only tests with threads of their own, because it does not know the barriers of OpenMP.
    Thread,
}

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// A program of tests that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(15 * 60);

/// A test that takes too long with a checker: each of its 10,000 forks would be checked, too.
const LEFT_OUT: &str = "ten_thousand_forks";

/// Tests for [`Checker::Thread`] have this in their names.
const WITH_THREADS: &str = "threads_at_once";

/// How memcheck begins a finding. It also reports signals, which are parts of tests.
const MEMCHECK_FINDINGS: [&str; 7] =
    ["Invalid ", "uninitialised", "unaddressable", "Mismatched", "overlap", "Jump to", "fishy"];

/// Reads memory that was given back.
const USE_AFTER_FREE: &str = r#"
#include <stdlib.h>
int main(int count, char **words) { volatile int *n = malloc(4 * count); *n = 1; free((void *)n); return *n > 5; }
"#;

/// Two threads write to the same variable.
const RACE: &str = r#"
#include <pthread.h>
static int n;
static void *add(void *unused) { for (int i = 0; i < 1000; i++) n++; return unused; }
int main(void) { pthread_t t; pthread_create(&t, 0, add, 0); add(0); pthread_join(t, 0); return n > 9999; }
"#;

impl Checker {
    fn name(self) -> &'static str {
        match self {
            Checker::Memcheck => "memcheck",
            Checker::Address => "address",
            Checker::Thread => "thread",
        }
    }

    fn compiler_flags(self) -> &'static str {
        match self {
            Checker::Memcheck => "-g",
            Checker::Address => "-g -fsanitize=address,undefined",
            Checker::Thread => "-g -fsanitize=thread",
        }
    }

    /// The library of gcc that must be loaded before all others.
    fn runtime(self) -> Result<Option<String>> {
        let name = match self {
            Checker::Memcheck => return Ok(None),
            Checker::Address => "libasan.so",
            Checker::Thread => "libtsan.so",
        };
        let path = sh::output(Command::new("gcc").arg(format!("-print-file-name={name}")))?;
        ensure!(Path::new(path.trim()).is_absolute(), "gcc has no {name}: install its package of sanitizers");
        Ok(Some(path.trim().to_owned()))
    }

    /// What starts a program of a test; findings go to files in `findings`.
    fn runner(self, findings: &Path) -> Vec<String> {
        let words = match self {
            Checker::Memcheck => {
                let log = format!("--log-file={}/memcheck.%p", findings.display());
                return ["valgrind", "-q", "--trace-children=yes", &log].map(str::to_owned).to_vec();
            }
            // ThreadSanitizer needs addresses that are not random.
            Checker::Thread => ["setarch", "-R"],
            Checker::Address => return Vec::new(),
        };
        words.map(str::to_owned).to_vec()
    }

    /// Variables for sanitizers. SIGBUS is the library's own matter: a truncated page raises it.
    fn options(self, findings: &Path) -> Vec<(&'static str, String)> {
        let log = format!("log_path={}/{}", findings.display(), self.name());
        vec![
            ("ASAN_OPTIONS", format!("{log}:detect_leaks=0:handle_sigbus=0")),
            ("UBSAN_OPTIONS", format!("{log}:print_stacktrace=1:handle_sigbus=0")),
            ("TSAN_OPTIONS", format!("{log}:handle_sigbus=0")),
        ]
    }

    fn error_on_purpose(self) -> &'static str {
        if self == Checker::Thread { RACE } else { USE_AFTER_FREE }
    }

    fn is_finding(self, text: &str) -> bool {
        match self {
            Checker::Memcheck => text.lines().any(|line| MEMCHECK_FINDINGS.iter().any(|part| line.contains(part))),
            Checker::Address | Checker::Thread => !text.trim().is_empty(),
        }
    }

    /// Builds the library, with checks of its own accesses to memory where the checker needs them.
    fn build_library(self, target: &Path) -> Result<PathBuf> {
        if self == Checker::Memcheck {
            sh::run(sh::cargo().args(["build", "--release", "--package", "gainshare-inside"]))?;
            return Ok(target.join("release").join(LIBRARY));
        }
        let folder = target.join(format!("sanitize-{}", self.name()));
        let flags = format!("-Zsanitizer={} -Cunsafe-allow-abi-mismatch=sanitizer", self.name());
        let mut build = sh::cargo();
        build.args(["build", "--release", "--package", "gainshare-inside", "--target", TARGET, "--target-dir"]);
        sh::run(build.arg(&folder).env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", flags))?;
        let library = folder.join(TARGET).join("release").join(LIBRARY);
        let symbols = sh::output(Command::new("nm").arg("-D").arg(&library))?;
        let prefix = if self == Checker::Address { "__asan_" } else { "__tsan_" };
        ensure!(symbols.contains(prefix), "{} was built without checks", library.display());
        Ok(library)
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    packages::install_sanitizers()?;
    let target = target_dir()?;
    let mut failures = Vec::new();
    for checker in Checker::value_variants() {
        if args.checker.is_none_or(|wanted| wanted == *checker) {
            failures.extend(check(*checker, &target, &args.words)?);
        }
    }
    ensure!(failures.is_empty(), "{}", failures.join("\n"));
    Ok(())
}

/// Runs the tests with one checker. Returns what failed.
fn check(checker: Checker, target: &Path, words: &[String]) -> Result<Vec<String>> {
    let library = checker.build_library(target)?;
    let scratch = tempfile::tempdir()?;
    let name = checker.name();
    let findings = scratch.path().join("on-purpose");
    std::fs::create_dir(&findings)?;
    make_error(checker, &findings, scratch.path())?;
    ensure!(!read_findings(checker, &findings)?.is_empty(), "{name} did not find an error that was made on purpose");

    let findings = scratch.path().join("findings");
    std::fs::create_dir(&findings)?;
    let args = ["test", "--release", "--package", "gainshare-inside", "--no-run", "--message-format", "json"];
    let output = sh::cargo().args(args).stderr(Stdio::inherit()).output().context("cannot start cargo")?;
    ensure!(output.status.success(), "the tests do not build: see above");
    let programs = programs(&String::from_utf8_lossy(&output.stdout))?;
    ensure!(!programs.is_empty(), "cargo built no tests");
    let (mut failures, mut passed) = (Vec::new(), 0);
    let began = Instant::now();
    for program in programs {
        let log = scratch.path().join("log");
        let mut command = test_command(checker, &program, &findings, &library)?;
        command.args(["--skip", LEFT_OUT]);
        match checker {
            Checker::Thread => command.arg(WITH_THREADS),
            Checker::Memcheck | Checker::Address => command.args(words),
        };
        let failure = run_logged(&mut command, &log, PATIENCE)?.failure;
        let text = String::from_utf8_lossy(&std::fs::read(&log)?).into_owned();
        passed += counts(&text).unwrap_or_default().passed;
        if let Some(reason) = failure {
            eprintln!("{text}");
            failures.push(format!("{name}: {} failed: {reason}", program.name));
        }
    }
    ensure!(passed > 0 || !failures.is_empty(), "no test was run with {name}");
    let found = read_findings(checker, &findings)?;
    found.iter().for_each(|text| eprintln!("{text}"));
    println!("{name}: {passed} tests passed, {} findings, {:.0} s", found.len(), began.elapsed().as_secs_f64());
    if !found.is_empty() {
        failures.push(format!("{name} has {} findings: see above", found.len()));
    }
    Ok(failures)
}

/// A program of tests that starts its own programs with the checker.
fn test_command(checker: Checker, program: &TestProgram, findings: &Path, library: &Path) -> Result<Command> {
    let runner = checker.runner(findings);
    let mut command = program.command();
    if program.name.ends_with("cdylib") && checker == Checker::Memcheck {
        // Unit tests start no program.
        let plain = command;
        command = Command::new(&runner[0]);
        command.args(&runner[1..]).arg(plain.get_program());
    }
    command.args(["--test-threads", "1"]);
    command.env("GAINSHARE_TEST_LIBRARY", library).env("GAINSHARE_TEST_FLAGS", checker.compiler_flags());
    command.env("GAINSHARE_TEST_PRELOAD", checker.runtime()?.unwrap_or_default());
    command.env("GAINSHARE_TEST_RUNNER", runner.join(" ")).envs(checker.options(findings));
    Ok(command)
}

/// Runs a program with an error in it.
fn make_error(checker: Checker, findings: &Path, scratch: &Path) -> Result<()> {
    let (code, program) = (scratch.join("error.c"), scratch.join("error"));
    std::fs::write(&code, checker.error_on_purpose())?;
    let flags = checker.compiler_flags().split_whitespace();
    sh::run(Command::new("cc").args(flags).args(["-pthread", "-o"]).args([&program, &code]))?;
    let mut runner = checker.runner(findings).into_iter();
    let mut command = match runner.next() {
        Some(first) => Command::new(first),
        None => Command::new("env"),
    };
    // The checker may end the program with a code of its own.
    let output = command.args(runner).arg(&program).envs(checker.options(findings)).output();
    match output {
        Ok(_) => Ok(()),
        Err(error) => bail!("cannot start {}: {error}", checker.name()),
    }
}

/// The texts of all findings.
fn read_findings(checker: Checker, folder: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let text = String::from_utf8_lossy(&std::fs::read(entry?.path())?).into_owned();
        if checker.is_finding(&text) {
            found.push(text);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_no_findings_of_memcheck() {
        let signal =
            "==7== \n==7== Process terminating with default action of signal 7 (SIGBUS)\n==7==    at 0x1: kill\n";
        assert!(!Checker::Memcheck.is_finding(signal));
        assert!(Checker::Memcheck.is_finding("==7== Invalid read of size 8\n"));
        assert!(Checker::Memcheck.is_finding("==7== Conditional jump or move depends on uninitialised value(s)\n"));
        assert!(Checker::Address.is_finding("==7==ERROR: AddressSanitizer: heap-use-after-free\n"));
        assert!(!Checker::Thread.is_finding("\n"));
    }

    #[test]
    #[ignore = "needs gcc's sanitizers"]
    fn each_error_on_purpose_is_one_that_a_checker_knows() {
        let scratch = tempfile::tempdir().unwrap();
        // Valgrind is installed by the command itself.
        for checker in [Checker::Address, Checker::Thread] {
            let findings = scratch.path().join(checker.name());
            std::fs::create_dir(&findings).unwrap();
            make_error(checker, &findings, scratch.path()).unwrap();
            assert_eq!(read_findings(checker, &findings).unwrap().len(), 1, "{}", checker.name());
        }
    }

    #[test]
    fn a_test_with_threads_of_its_own_exists() {
        let text = |file| std::fs::read_to_string(sh::root().join("crates/inside/tests").join(file)).unwrap();
        let tests = text("preload.rs");
        assert!(tests.contains(WITH_THREADS) && tests.contains(LEFT_OUT));
        let helpers = text("common/mod.rs");
        for variable in ["LIBRARY", "FLAGS", "PRELOAD", "RUNNER"] {
            assert!(helpers.contains(&format!("GAINSHARE_TEST_{variable}")), "{variable}");
        }
    }
}
