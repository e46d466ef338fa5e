//! The trainers as a program of their own, for use without the daemon and for the tests of this crate.

use std::process::ExitCode;

use clap::Parser;
use gainshare_workloads::{TrainArgs, train};

#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(flatten)]
    args: TrainArgs,
}

fn main() -> ExitCode {
    train(&Cli::parse().args).unwrap_or_else(|error| {
        eprintln!("gainshare-train: {error:#}");
        ExitCode::FAILURE
    })
}
