//! `cargo xtask bench`: the figures the project promises, each printed in one run.
//!
//! Timings on shared machines are noisy, so every benchmark prints counts or ratios of things measured in
//! the same run, and no test depends on them.

mod build;
mod cores;
mod daemon;
mod gpu;
mod gpu_gain;
mod inside;
mod kube;
mod kube_move;
pub(crate) mod lab;
mod requests;
mod tasks;
mod threads;
mod torch;
mod training;

use crate::sh;
use anyhow::{Context, Result, ensure};
use clap::{Subcommand, ValueEnum};
pub(crate) use lab::Lab;

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: Benchmark,
    /// How to print the figures.
    #[arg(short, long, global = true, value_enum, default_value_t = Format::Table)]
    output: Format,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Format {
    Table,
    Json,
}

#[derive(Subcommand)]
enum Benchmark {
    /// The daemon with 50, 200 and 600 jobs that report once a second: CPU, memory, journal, latency, restart.
    #[command(alias = "agent")]
    Daemon(daemon::Args),
    /// 500 pushes a second to a daemon whose disk is slow: latency, lease, decisions.
    Requests(requests::Args),
    /// Six real PyTorch jobs of different kinds under `na`, `flowcon` and `gainshare`, and once with a plain start.
    Torch(torch::Args),
    /// A PyTorch job on two cores that is left alone, and four together: teams that follow the share.
    Threads(threads::Args),
    /// Three and six PyTorch jobs on a machine with at least eight cores, under several policies.
    Cores(cores::Args),
    /// Two jobs that each fill a GPU, the second one paced, and three jobs by gain. Needs an NVIDIA GPU, PyTorch and
    /// JAX.
    Gpu(gpu::Args),
    /// What the library inside jobs costs: the start of /bin/true, the speed of an OpenMP loop, its size.
    Inside(inside::Args),
    /// The operator of a cluster of 1,000 simulated nodes and 10,000 pods: memory, lag, writes. Needs root.
    Kube(kube::Args),
    /// The operator of a cluster of 5,000 simulated nodes and 50,000 training jobs: passes, placements,
    /// moves, a change of the leader. Needs root.
    KubeMove(kube_move::Args),
    /// The operator's decisions about 1,000 distributed jobs of 8 tasks, in one process; with `--cluster`, in front
    /// of a real API server.
    Tasks(tasks::Args),
    /// A build of the demo's program from nothing: time, number of crates, size of the program.
    Build,
    /// The simulator: replay of 80,000 jobs, cost of a decision and of an event, memory.
    Sim,
}

/// A benchmark with bars lists here which it missed, in a sentence each. The command then fails.
const BARS_MISSED: &str = "bars_missed";

pub(crate) fn run(args: Args) -> Result<()> {
    let figures = match args.what {
        Benchmark::Daemon(a) => daemon::run(&a)?,
        Benchmark::Requests(a) => requests::run(&a)?,
        Benchmark::Torch(a) => torch::run(&a)?,
        Benchmark::Threads(a) => threads::run(&a)?,
        Benchmark::Cores(a) => cores::run(&a)?,
        Benchmark::Gpu(a) => gpu::run(&a)?,
        Benchmark::Inside(a) => inside::run(&a)?,
        Benchmark::Kube(a) => kube::run(&a)?,
        Benchmark::KubeMove(a) => kube_move::run(&a)?,
        Benchmark::Tasks(a) => tasks::run(&a)?,
        Benchmark::Build => build::run()?,
        Benchmark::Sim => simulator()?,
    };
    match args.output {
        Format::Json => println!("{}", serde_json::to_string_pretty(&figures)?),
        Format::Table => table(&figures, 0),
    }
    let missed: Vec<&str> =
        figures[BARS_MISSED].as_array().into_iter().flatten().filter_map(|bar| bar.as_str()).collect();
    ensure!(missed.is_empty(), "bars were missed: {}", missed.join("; "));
    Ok(())
}

/// Measured by the simulator's own example, in a process of its own: its memory is one of the figures.
fn simulator() -> Result<serde_json::Value> {
    let printed = sh::output(sh::cargo().args([
        "run",
        "--release",
        "--quiet",
        "--package",
        "gainshare-sim",
        "--example",
        "bench",
    ]))?;
    serde_json::from_str(&printed).with_context(|| format!("the simulator's benchmark printed no JSON: {printed}"))
}

/// Prints an object as indented lines: enough for people, and the same names as the JSON.
fn table(value: &serde_json::Value, depth: usize) {
    let indent = "  ".repeat(depth);
    let fields: Vec<(String, &serde_json::Value)> = match value {
        serde_json::Value::Object(map) => map.iter().map(|(k, v)| (k.clone(), v)).collect(),
        serde_json::Value::Array(items) => items.iter().enumerate().map(|(i, v)| (format!("[{i}]"), v)).collect(),
        _ => return,
    };
    for (name, value) in fields {
        match value {
            serde_json::Value::Object(_) | serde_json::Value::Array(_) => {
                println!("{indent}{name}");
                table(value, depth + 1);
            }
            other => println!("{indent}{name:<32} {other}"),
        }
    }
}

pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
