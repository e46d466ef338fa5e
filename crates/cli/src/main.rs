//! The `gainshare` command: reads the command line, does it, and ends with a code that scripts can use.
#![allow(unreachable_pub, reason = "a program exports nothing; `pub` says what a module offers to the others")]

mod args;
mod demo;
mod docker;
mod docs;
mod doctor;
mod explain;
mod figure;
mod jobs;
mod kube;
mod link;
mod predict;
mod print;
mod run;
mod simulate;
mod supervise;
mod up;

use anyhow::Result;
use args::{Cli, Command};
use clap::Parser;
use gainshare_agent::api::client::ClientError;
use gainshare_agent::paths::Paths;
use link::Link;
use print::Out;
use std::process::ExitCode;

/// What a shell reports for a program that wrote into a closed pipe; we end the same way, only without dying of it.
const BROKEN_PIPE: u8 = 128 + libc::SIGPIPE as u8;

const WRONG_USAGE: u8 = 2;

fn main() -> ExitCode {
    if is_plugin() {
        return plugin();
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() && asks_for_json() => {
            complain(&Out::new(args::Format::Json), error.to_string().trim_start_matches("error: "));
            return ExitCode::from(WRONG_USAGE);
        }
        Err(error) => error.exit(),
    };
    let out = Out::new(cli.output);
    match execute(cli.command, &out) {
        Ok(code) => code,
        Err(error) if is_broken_pipe(&error) => ExitCode::from(BROKEN_PIPE),
        Err(error) => {
            let code = error.downcast_ref::<ClientError>().and_then(ClientError::code);
            complain_with(&out, &format!("{error:#}"), code.map(|c| serde_json::json!(c)));
            ExitCode::FAILURE
        }
    }
}

/// Whether kubectl called us: its plugins are found by their names.
fn is_plugin() -> bool {
    let name = std::env::args_os().next().map(std::path::PathBuf::from);
    name.is_some_and(|path| path.file_stem().is_some_and(|stem| stem == "kubectl-gainshare"))
}

fn plugin() -> ExitCode {
    match kube::plugin::plugin(kube::plugin::PluginCli::parse()) {
        Ok(code) => ExitCode::from(code),
        Err(error) if is_broken_pipe(&error) => ExitCode::from(BROKEN_PIPE),
        Err(error) => {
            complain(&Out::new(args::Format::Table), &format!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn execute(command: Command, out: &Out) -> Result<ExitCode> {
    let link = || Link::new(Paths::find(None, None));
    let code = match command {
        // Before anything else could have started a thread: the trainer sets its thread pool through the environment.
        Command::Train(args) => return gainshare_workloads::train(&args),
        Command::Run(args) => run::run(&args, out)?,
        Command::Up(args) => up::up(&args, out)?,
        Command::Down { stop_jobs } => up::down(stop_jobs, &link()?, out)?,
        Command::Submit(args) => jobs::submit(&args, &link()?, out)?,
        Command::Ps { all, watch } => jobs::ps(all, watch, &link()?, out)?,
        Command::Logs { job, follow, tail } => jobs::logs(&job, follow, tail, &link()?)?,
        Command::Stop { jobs, grace, no_wait } => jobs::stop(&jobs, grace, !no_wait, &link()?, out)?,
        Command::Explain { job } => explain::explain(&job, &link()?, out)?,
        Command::Events => jobs::events(&link()?, out)?,
        Command::Doctor => doctor::doctor(&link()?, out)?,
        Command::Demo(args) => demo::demo(&args, out)?,
        Command::Sim(args) => simulate::sim(&args, out)?,
        Command::Paper(args) => simulate::paper(&args, out)?,
        Command::Predict(args) => predict::predict(&args, out)?,
        Command::Trace { command } => simulate::trace(&command, out)?,
        Command::Operator(args) => kube::operator::operator(&args)?,
        Command::Crd => kube::crd::crd(out)?,
        Command::Agent(args) => kube::agent::agent(&args)?,
        Command::Completions { shell } => docs::completions(shell, out)?,
        Command::Man { dir } => docs::man(&dir)?,
        Command::Reference => docs::reference(out)?,
        Command::Supervise(args) => run::supervise_detached(&args, out)?,
        Command::Guard { state_dir, runtime_dir, lease } => {
            gainshare_agent::guard::run(state_dir, runtime_dir, lease)?;
            0
        }
        Command::Keep => {
            gainshare_runtime::process::keeper::run()?;
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

/// One line on standard error, or one JSON object there if the caller is a program.
fn complain(out: &Out, message: &str) {
    complain_with(out, message, None);
}

fn complain_with(out: &Out, message: &str, code: Option<serde_json::Value>) {
    use std::io::Write;
    let lines: Vec<&str> = message.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let message = lines.join(" | ");
    let line = if out.is_json() {
        let mut body = serde_json::json!({ "error": message });
        if let Some(code) = code {
            body["code"] = code;
        }
        body.to_string()
    } else {
        format!("gainshare: {message}")
    };
    // Whoever closed standard error does not want to read it.
    let _ = writeln!(std::io::stderr(), "{line}");
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .any(|cause| cause.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe))
}
