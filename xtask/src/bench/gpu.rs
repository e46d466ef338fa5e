//! GPU shares by pacing, in two stories.
//!
//! *pace*: two jobs that each fill a GPU, the second one paced by the library inside it. `bench/gpu/pace.py` starts
//! the jobs (PyTorch and JAX) and writes the pages. It needs a machine with an NVIDIA GPU and a Python with both
//! frameworks. Figures are parts of the speed of a job alone: favoured, paced.
//!
//! *gain*: three jobs under a real daemon (`gpu_gain`).

use super::gpu_gain::{self, Story};
use super::lab::Lab;
use crate::programs::target_dir;
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::{Command, Stdio};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// The stories.
    #[arg(long, value_delimiter = ',', default_values = ["pace", "gain"])]
    stories: Vec<String>,
    /// How often the rounds of `gain` are repeated; medians are reported.
    #[arg(long, default_value_t = 3)]
    repeat: usize,
    /// Do not build, but use this `gainshare`, with the library beside it, in `gain`.
    #[arg(long)]
    program: Option<PathBuf>,
    /// Writes the shares of `gain` once a second into this file.
    #[arg(long)]
    trace: Option<PathBuf>,
    /// How long one measurement takes, in seconds.
    #[arg(long, default_value_t = 4.0)]
    seconds: f64,
    /// The kinds of jobs, separated by commas.
    #[arg(long, default_value = "mlp,transformer,jax")]
    jobs: String,
    /// Do not build, but use this library in `pace`.
    #[arg(long)]
    library: Option<PathBuf>,
    /// The Python with PyTorch and JAX.
    #[arg(long, default_value = "python3")]
    python: PathBuf,
}

/// The script, so that the benchmark needs no checkout.
const PACE: &str = include_str!("../../../bench/gpu/pace.py");

pub(crate) fn run(args: &Args) -> Result<Value> {
    let mut figures = json!({});
    for story in &args.stories {
        figures[story] = match story.as_str() {
            "pace" => pace(args)?,
            "gain" => gpu_gain::run(&Story {
                program: args.program.clone(),
                python: &args.python,
                repeat: args.repeat,
                trace: args.trace.as_deref(),
            })?,
            other => bail!("--stories knows `pace` and `gain`, not `{other}`"),
        };
    }
    Ok(figures)
}

fn pace(args: &Args) -> Result<Value> {
    let library = match &args.library {
        Some(library) => library.clone(),
        None => {
            Lab::build()?;
            target_dir()?.join("release/libgainshare_inside.so")
        }
    };
    let mut command = Command::new(&args.python);
    command.args(["-c", PACE]).arg(library).arg(args.seconds.to_string()).arg(&args.jobs);
    let output = command.stderr(Stdio::inherit()).output().context("cannot start Python")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    serde_json::from_str(&text).with_context(|| format!("the benchmark printed no JSON: {text}"))
}
