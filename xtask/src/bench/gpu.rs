//! GPU shares by pacing: two jobs that each fill a GPU, the second one paced by the library inside it.
//!
//! `bench/gpu/pace.py` starts the jobs (PyTorch and JAX) and writes the pages. It needs a machine with an NVIDIA GPU
//! and a Python with both frameworks. Figures are parts of the speed of a job alone: favoured, paced.

use super::lab::Lab;
use crate::programs::target_dir;
use crate::sh;
use anyhow::{Context, Result};
use serde_json::Value;
use std::path::PathBuf;
use std::process::{Command, Stdio};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// How long one measurement takes, in seconds.
    #[arg(long, default_value_t = 4.0)]
    seconds: f64,
    /// The kinds of jobs, separated by commas.
    #[arg(long, default_value = "mlp,transformer,jax")]
    jobs: String,
    /// Do not build, but use this library.
    #[arg(long)]
    library: Option<PathBuf>,
    /// The Python with PyTorch and JAX.
    #[arg(long, default_value = "python3")]
    python: PathBuf,
}

pub(crate) fn run(args: &Args) -> Result<Value> {
    let library = match &args.library {
        Some(library) => library.clone(),
        None => {
            Lab::build()?;
            target_dir()?.join("release/libgainshare_inside.so")
        }
    };
    let mut command = Command::new(&args.python);
    command.arg(sh::root().join("bench/gpu/pace.py")).arg(library).arg(args.seconds.to_string()).arg(&args.jobs);
    let output = command.stderr(Stdio::inherit()).output().context("cannot start Python")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    serde_json::from_str(&text).with_context(|| format!("the benchmark printed no JSON: {text}"))
}
