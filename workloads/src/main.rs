//! The trainers as a program of their own, without the rest of Gainshare; the tests of this crate run it.
//!
//! `gainshare-train MODEL` trains in this process; `gainshare-train ps MODEL` is one task of a job with parameter
//! servers.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use gainshare_workloads::{PsArgs, TrainArgs, train, train_ps};

#[derive(Parser)]
#[command(version, args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    args: Option<TrainArgs>,
}

#[derive(Subcommand)]
enum Command {
    /// One task of a training job with parameter servers
    Ps(Box<PsArgs>),
}

fn main() -> ExitCode {
    let result = match Cli::parse() {
        Cli { command: Some(Command::Ps(args)), .. } => train_ps(&args),
        Cli { args: Some(args), .. } => train(&args),
        // Without a subcommand, clap demands the model.
        Cli { command: None, args: None } => return ExitCode::from(2),
    };
    result.unwrap_or_else(|error| {
        eprintln!("gainshare-train: {error:#}");
        ExitCode::FAILURE
    })
}
