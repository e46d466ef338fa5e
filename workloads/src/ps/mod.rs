//! Training with parameter servers: several processes train one model over TCP.
//!
//! **Problem.** A scheduler of distributed training must be tested with distributed training: servers that hold
//! parts of the parameters, workers that come and go, tasks that are killed, checkpoints that are exact.
//!
//! **How.** All parameters form one row of numbers. Server `i` of `n` holds the `i`-th of `n` equal parts of the
//! row, with the moments of the optimizer for it. A worker reads all parts, computes the gradient on a batch of
//! its own, and sends each server its part of the gradient.
//!
//! - *Synchronous*: a server takes a step when every live worker has sent its gradient for the step; the step uses
//!   their average. A worker is live from its greeting until its connection ends.
//! - *Asynchronous*: a server takes a step for every gradient that it receives.
//!
//! The chief is a worker that also reports; without a chief, worker 0 reports. The roles and addresses come from
//! options or from `TF_CONFIG`.
//!
//! **Agreement on the step.** In synchronous training all servers must be at the same step when a worker computes.
//! A worker that joins is live on all servers before it reads a parameter, so that no server can leave its step
//! without this worker. If the servers are one step apart, because the other workers are between two servers, the
//! worker *skips* the step on the server behind. If every live worker skips on a server, no gradient for this step
//! can ever arrive, because a server was restarted. Then a worker begins a new *generation*: all servers go back to
//! the newest step that all of them can restore. Requests of an older generation have no effect, and waiting workers
//! learn of the new one. Several workers may begin the same generation at once: the first server accepts one of them.
//! The reporting worker prints how many steps were lost.
//!
//! **Properties**, each a test in `tests/parameter_server.rs`: one synchronous worker gives the losses of the
//! ordinary trainer, bit for bit; a run that is stopped and resumed gives the losses of an uninterrupted run; a
//! worker that is killed costs no step of the servers; a server that is killed and restarted costs the steps after
//! its checkpoint, and the number is printed; garbage, a truncated message and a message of a wrong size cost only
//! the connection on which they came.
//!
//! The protocol has no passwords. Use it on a loopback interface or in a network whose members are trusted, as
//! those of the frameworks.

mod cluster;
mod part;
mod server;
mod wire;
mod worker;

use std::collections::BTreeMap;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};

use crate::args::TrainArgs;
use crate::stop;
pub use cluster::Role;
use cluster::Task;

/// Train one model in several processes: parameter servers and workers over TCP.
///
/// Every process gets the same options; the role, the index and the addresses come from --role, --index and --servers,
/// or from the TF_CONFIG environment variable (also in its sparse form).
#[derive(Debug, Clone, clap::Args)]
pub struct PsArgs {
    #[command(flatten)]
    pub train: TrainArgs,

    /// What this process does [default: what TF_CONFIG says]
    #[arg(long, value_enum)]
    pub role: Option<Role>,

    /// Number of this server or worker, from 0 [default: what TF_CONFIG says, or 0]
    #[arg(long, value_name = "N")]
    pub index: Option<u32>,

    /// Addresses of all servers in the order of their numbers
    #[arg(long, value_name = "HOST:PORT", value_delimiter = ',')]
    pub servers: Vec<String>,

    /// Address at which a server listens [default: all interfaces with its port of TF_CONFIG, or its address of
    /// --servers]
    #[arg(long, value_name = "HOST:PORT")]
    pub listen: Option<String>,

    /// Whether a step waits for all live workers (sync), or every gradient is a step (async)
    #[arg(long, value_enum, default_value_t = Mode::Sync)]
    pub mode: Mode,

    /// Workers that a server waits for before its first step, the chief included; after --worker-timeout it starts
    /// with those that have come [default: as many as TF_CONFIG lists, or 1]
    #[arg(long, value_name = "N")]
    pub workers: Option<u32>,

    /// Seconds after which a silent worker no longer counts, while its gradient is awaited
    #[arg(long = "worker-timeout", value_name = "SECONDS", default_value_t = 60)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=86400))]
    pub worker_timeout_s: u64,

    /// Seconds after which a worker that cannot reach a server gives up
    #[arg(long = "connect-timeout", value_name = "SECONDS", default_value_t = 60)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=86400))]
    pub connect_timeout_s: u64,
}

/// When a server takes a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Mode {
    Sync,
    Async,
}

/// Runs one server, worker or chief and returns its exit code: 0 when training is complete, 143 or 130 when stopped.
pub fn train_ps(args: &PsArgs) -> Result<ExitCode> {
    stop::install_handlers().context("cannot listen for signals")?;
    if args.train.until_loss.is_some() {
        bail!("--until-loss is not available with parameter servers; give --steps");
    }
    let config = std::env::var("TF_CONFIG").ok().filter(|text| !text.is_empty());
    let task = Task::find(args, config.as_deref())?;
    match task.role {
        Role::Server => server::run(args, &task),
        Role::Worker | Role::Chief => worker::run(args, &task),
    }
}

/// What server and worker must agree on, with the names of the options.
fn settings(args: &PsArgs) -> BTreeMap<String, String> {
    let setup = args.train.setup();
    let mut settings: BTreeMap<String, String> =
        setup.settings().into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    settings.insert("steps".to_owned(), args.train.total_steps(&setup).to_string());
    settings.insert("mode".to_owned(), if args.mode == Mode::Sync { "sync" } else { "async" }.to_owned());
    settings
}
