//! The `gainshare` command: reads the command line, carries it out, and ends with a code that scripts can use.
#![allow(unreachable_pub, reason = "a program exports nothing; `pub` says what a module offers to the others")]

mod args;
mod demo;
mod docker;
mod docs;
mod doctor;
mod explain;
mod jobs;
mod link;
mod neighbour;
mod notice;
mod outlook;
mod plan;
mod predict;
mod progress_bar;
mod replay;
mod run;
mod simulate;
mod supervise;
mod system;
mod tasks;
mod up;
mod values;

use anyhow::Result;
use args::{Cli, Command};
use clap::Parser;
use gainshare_daemon::api::client::ClientError;
use gainshare_daemon::paths::Paths;
use gainshare_figures::terminal::{self, Format, Printer};
use link::Link;
use std::process::ExitCode;

const WRONG_USAGE: u8 = 2;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() && asks_for_json() => {
            let message = error.to_string();
            terminal::print_error("gainshare", Format::Json, message.trim_start_matches("error: "), None);
            return ExitCode::from(WRONG_USAGE);
        }
        Err(error) => error.exit(),
    };
    let out = Printer::new(cli.output);
    match execute(cli.command, &out) {
        Ok(code) => code,
        Err(error) => {
            let code = error.downcast_ref::<ClientError>().and_then(ClientError::code);
            let code =
                code.and_then(|code| serde_json::to_value(code).ok()).and_then(|v| v.as_str().map(str::to_owned));
            terminal::report_error("gainshare", out.format, &error, code.as_deref())
        }
    }
}

fn execute(command: Command, out: &Printer) -> Result<ExitCode> {
    let link = || Link::new(Paths::find(None, None));
    let code = match command {
        // Before anything else could have started a thread: the trainer sets its thread pool through the environment.
        Command::Train(args) => return gainshare_workloads::train(&args),
        Command::TrainPs(args) => return gainshare_workloads::train_ps(&args),
        Command::Tasks(args) => tasks::run(&args)?,
        Command::Run(args) => run::run(&args, out)?,
        Command::Up(args) => up::up(&args, out)?,
        Command::Down { stop_jobs } => up::down(stop_jobs, &link()?, out)?,
        Command::Submit(args) => jobs::submit(&args, &link()?, out)?,
        Command::Plan(args) => plan::plan(&args, &link()?, out)?,
        Command::Ps { all, watch } => jobs::ps(all, watch, &link()?, out)?,
        Command::Logs { job, follow, tail } => jobs::logs(&job, follow, tail, &link()?)?,
        Command::Stop { jobs, grace, no_wait } => jobs::stop(&jobs, grace, !no_wait, &link()?, out)?,
        Command::Explain { job, dump: None, .. } => explain::explain(&job, &link()?, out)?,
        Command::Explain { job, dump: Some(file), gpu } => explain::dump(&job, gpu, &file, &link()?, out)?,
        Command::Replay { file } => replay::replay(&file, out)?,
        Command::Events => jobs::events(&link()?, out)?,
        Command::Doctor => doctor::doctor(&link()?, out)?,
        Command::Demo(args) => demo::demo(&args, out)?,
        Command::Sim(args) => simulate::sim(&args, out)?,
        Command::Paper(args) => simulate::paper(&args, out)?,
        Command::Predict(args) => predict::predict(&args, out)?,
        Command::Trace { command } => simulate::trace(&command, out)?,
        Command::Operator { args } => return Err(neighbour::become_program("gainshare-operator", &args)),
        Command::Crd => return Err(neighbour::become_program("gainshare-operator", &["crd".into()])),
        Command::Convert { file } => {
            return Err(neighbour::become_program("gainshare-operator", &["convert".into(), file.into()]));
        }
        Command::Agent { args } => return Err(neighbour::become_program("gainshare-node-agent", &args)),
        Command::Completions { shell } => docs::completions(shell, out)?,
        Command::Man { dir } => docs::man(&dir)?,
        Command::Reference => docs::reference(out)?,
        Command::Policies => docs::policies(out)?,
        Command::Supervise(args) => run::supervise_detached(&args, out)?,
        Command::Guard { state_dir, runtime_dir, lease } => {
            gainshare_daemon::guard::run(state_dir, runtime_dir, lease)?;
            0
        }
        Command::Keep => {
            gainshare_limits::process::keeper::run()?;
            0
        }
    };
    Ok(ExitCode::from(code))
}

/// Whether the caller is a program, for a command line that could not be understood.
fn asks_for_json() -> bool {
    let words: Vec<String> = std::env::args().skip(1).take_while(|word| word != "--").collect();
    let apart = words.windows(2).any(|pair| matches!(pair[0].as_str(), "-o" | "--output") && pair[1] == "json");
    apart || words.iter().any(|word| matches!(word.as_str(), "-ojson" | "-o=json" | "--output=json"))
}
