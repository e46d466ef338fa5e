//! The trainers as a program of their own, without the rest of Gainshare; the tests of this crate run it.

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
