//! The project's chores: `cargo xtask --help` lists them.

mod bench;
mod cache;
mod check;
mod e2e;
mod faults;
mod faultsim;
mod guest;
mod guide;
mod image;
mod install;
mod packages;
mod programs;
mod sanitize;
mod setup;
mod sh;
mod soak;
mod test;
mod testbed;

use clap::{Parser, Subcommand};

/// Chores of the Gainshare project.
#[derive(Parser)]
#[command(name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// Installs what the tests need, then runs the checks and every test; with --quick, the tests that need nothing.
    ///
    /// Debian packages are installed with apt-get, as root. Tools that come from crates.io and the Python
    /// environment are kept in ~/.cache/gainshare, named after their content, and built again only when
    /// that changes. `--quick` installs nothing and runs as an ordinary user.
    Test(test::Args),
    /// Formatting, lints, dependency rules, licences, freshness of generated files.
    Check(check::Args),
    /// Measures what the project promises and prints the figures.
    Bench(bench::Args),
    /// Runs many seeds of the deterministic fault simulation: see docs/testing.md.
    Faultsim(faultsim::Args),
    /// Changes the code that decides in many small ways and counts which changes the tests notice: see docs/testing.md.
    Mutants(faultsim::MutantArgs),
    /// Injects the faults of docs/faults.md and prints what held.
    Faults(faults::Args),
    /// Feeds arbitrary input to everything that reads input from outside: see docs/testing.md.
    Fuzz(faults::fuzz::Args),
    /// Writes the generated files: references of the programs, custom resources, plain YAML of the chart.
    Generate,
    /// Follows docs/write-a-policy.md on a clean clone, in minutes.
    ///
    /// Makes the page's files and edits, runs its commands, and looks for the new policy in the simulator, the help
    /// and the custom resources. Programs are built in the folder `guide` of the target folder.
    Guide(guide::Args),
    /// Builds all programs and puts them into a container image, as an archive for `docker load` or `kind
    /// load image-archive`.
    Image(image::Args),
    /// Builds all programs and copies them, with the library inside jobs, into a folder of programs.
    Install(install::Args),
    /// Runs the tests of the library inside jobs with valgrind and sanitizers: see docs/testing.md.
    Sanitize(sanitize::Args),
    /// Submits short jobs without end and checks that nothing of the daemon grows.
    Soak(soak::Args),
    /// Only installs what the tests need.
    Setup,
    /// A real Kubernetes on this machine: see docs/testbed.md.
    Testbed(testbed::Args),
    /// Whole stories on a real cluster, or on this machine: see docs/testbed.md.
    E2e(e2e::Args),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().chore {
        Chore::Test(args) => test::run(&args, faults::fuzz::run_beside),
        Chore::Check(args) => check::run(&args),
        Chore::Bench(args) => bench::run(args),
        Chore::Faultsim(args) => faultsim::run(&args),
        Chore::Mutants(args) => faultsim::run_mutants(&args),
        Chore::Faults(args) => faults::run(&args),
        Chore::Fuzz(args) => faults::fuzz::run(&args),
        Chore::Generate => check::generate(),
        Chore::Guide(args) => guide::run(&args),
        Chore::Image(args) => image::run(&args),
        Chore::Install(args) => install::run(&args),
        Chore::Sanitize(args) => sanitize::run(&args),
        Chore::Soak(args) => soak::run(&args),
        Chore::Setup => setup::everything(),
        Chore::Testbed(args) => testbed::run(args),
        Chore::E2e(args) => e2e::run(args),
    }
}
