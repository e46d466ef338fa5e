//! The project's chores, so that nobody needs to remember commands: `cargo xtask --help`.

mod bench;
mod check;
mod e2e;
mod setup;
mod sh;
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
    /// Installs what the tests need, then runs the checks and every test.
    ///
    /// Debian packages are installed with apt-get (as root, or through sudo). Tools that come from crates.io and the Python
    /// environment are kept in ~/.cache/gainshare, named after their content, and built again only when that changes.
    Test(test::Args),
    /// Formatting, lints, dependency rules, licences, freshness of generated files.
    Check(check::Args),
    /// Measures what the project promises and prints the figures.
    Bench(bench::Args),
    /// Writes the generated files (CLI reference, custom resource, plain YAML of the chart) anew.
    Generate,
    /// Only installs what the tests need.
    Setup,
    /// A real Kubernetes on this machine: see docs/testbed.md.
    Testbed(testbed::Args),
    /// Whole stories on a real cluster: see docs/testbed.md.
    E2e(e2e::Args),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().chore {
        Chore::Test(args) => test::run(args),
        Chore::Check(args) => check::run(args),
        Chore::Bench(args) => bench::run(args),
        Chore::Generate => check::generate(),
        Chore::Setup => setup::everything().map(drop),
        Chore::Testbed(args) => testbed::run(args),
        Chore::E2e(args) => e2e::run(args),
    }
}
