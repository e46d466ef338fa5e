//! Built-in trainers: five small models that learn for real.
//!
//! Whoever wants to see a scheduler of training jobs at work needs training jobs: with real losses that fall steeply and then
//! flatten, real memory and CPU use, real output in the formats people's frameworks print, and checkpoints that can be
//! trusted. This crate has them without Python, downloads or data sets, so that they can live in one static program.
//!
//! The layers, from pure to worldly: `rng`, `glyphs` and `sequences` make data; `nn`, `models` and `adam` are the mathematics
//! (gradients by candle); `trainer` is a run as a value, exact to the bit; `checkpoint`, `report`, `metrics_file` and
//! `stop` touch the world; `run` is the loop that ties them together.
//!
//! Properties: the same options give the same losses; a run that is stopped, killed or torn from the machine and started again
//! prints the losses it would have printed; with one thread a run uses one core.

mod adam;
mod args;
mod checkpoint;
mod glyphs;
mod metrics_file;
mod models;
mod nn;
mod report;
mod rng;
mod run;
mod sequences;
mod stop;
mod trainer;

use std::process::ExitCode;

use anyhow::{Result, ensure};

pub use args::{Resume, TrainArgs};
pub use metrics_file::MetricsFormat;
pub use models::ModelKind;
pub use report::Format;

/// Trains as the options say and returns the exit code: 0 when finished, 143 or 130 when stopped by SIGTERM or SIGINT.
///
/// Must be called while the process has a single thread, because the size of the matrix library's thread pool is taken
/// from the environment, which no other thread may read while it is written.
pub fn train(args: &TrainArgs) -> Result<ExitCode> {
    size_thread_pool(args.threads)?;
    run::run(args)
}

fn size_thread_pool(threads: u32) -> Result<()> {
    const VARIABLE: &str = "RAYON_NUM_THREADS";
    if std::env::var(VARIABLE).is_ok_and(|value| value == threads.to_string()) {
        return Ok(());
    }
    let running = std::fs::read_dir("/proc/self/task").map_or(1, Iterator::count);
    ensure!(
        running == 1,
        "cannot set {VARIABLE}={threads} beside {} other threads; set it before the start",
        running - 1
    );
    // SAFETY: this is the only thread, so nobody reads the environment meanwhile.
    unsafe { std::env::set_var(VARIABLE, threads.to_string()) };
    Ok(())
}
