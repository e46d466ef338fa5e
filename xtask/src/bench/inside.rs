//! What the library inside jobs costs: the start of a small program, and the speed of a job that is not slowed.
//!
//! `/bin/true` is started many times, in turn with and without the library; the figure is the difference of the
//! medians. The speed is that of an OpenMP loop with very short regions, in turn with the library and a page that
//! wants all threads, and without the library: a training job opens far fewer regions a second.
//!
//! The bars: `/bin/true` starts less than a millisecond later, the loop keeps 99.5 % of its speed, and the library is
//! smaller than a mebibyte.

use super::lab::Lab;
use crate::programs::target_dir;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// How often `/bin/true` is started each way.
    #[arg(long, default_value_t = 1000)]
    starts: usize,
    /// How often the loop runs each way.
    #[arg(long, default_value_t = 7)]
    repeat: usize,
    /// Do not build, but use this library.
    #[arg(long)]
    library: Option<PathBuf>,
}

/// Regions of some 50 microseconds, as small operations of a training job are.
const LOOP: &str = r#"
#include <stdio.h>
#include <time.h>
int main(void) {
    static double values[40000];
    struct timespec a, b;
    clock_gettime(CLOCK_MONOTONIC, &a);
    for (int i = 0; i < 20000; i++) {
        #pragma omp parallel for
        for (int k = 0; k < 40000; k++) values[k] = values[k] * 0.999 + i;
    }
    clock_gettime(CLOCK_MONOTONIC, &b);
    printf("%f\n", b.tv_sec - a.tv_sec + (b.tv_nsec - a.tv_nsec) * 1e-9 + 0 * values[7]);
}
"#;

pub(crate) fn run(args: &Args) -> Result<Value> {
    let library = match &args.library {
        Some(library) => library.clone(),
        None => {
            Lab::build()?;
            target_dir()?.join("release/libgainshare_inside.so")
        }
    };
    ensure!(library.is_file(), "{} is missing", library.display());
    let dir = tempfile::tempdir()?;
    let page = dir.path().join("page");
    // No daemon writes this page: the library maps it, reads it before each region and changes nothing. Regions are
    // counted in the report and in the table of the rhythm.
    std::fs::write(&page, [0; 4096])?;
    for (suffix, name) in [("report", b"GAINRPRT"), ("rhythm", b"GAINRTHM")] {
        let mut file = [0; 4096];
        file[..8].copy_from_slice(name);
        file[8..12].copy_from_slice(&1_u32.to_ne_bytes());
        file[12..16].copy_from_slice(&4096_u32.to_ne_bytes());
        std::fs::write(page.with_extension(suffix), file)?;
    }
    let with = |command: &mut Command| {
        command.env("LD_PRELOAD", &library).env("GAINSHARE_INSIDE_PAGE", &page);
    };

    let [mut plain_s, mut inside_s] = [const { Vec::<f64>::new() }; 2];
    for _ in 0..args.starts {
        plain_s.push(start_s(&mut Command::new("/bin/true"))?);
        let mut command = Command::new("/bin/true");
        with(&mut command);
        inside_s.push(start_s(&mut command)?);
    }
    let delay_ms = (super::median(inside_s) - super::median(plain_s)) * 1e3;

    let program = compile(dir.path())?;
    let [mut plain_s, mut inside_s] = [const { Vec::<f64>::new() }; 2];
    for _ in 0..args.repeat {
        plain_s.push(loop_s(&mut Command::new(&program))?);
        let mut command = Command::new(&program);
        with(&mut command);
        inside_s.push(loop_s(&mut command)?);
    }
    let counted = |suffix: &str| std::fs::read(page.with_extension(suffix)).map(|file| file[16..] != [0; 4080]);
    ensure!(counted("report")? && counted("rhythm")?, "the library has counted no regions: is it of this version?");
    // The fastest runs are those that other programs disturbed least.
    let least = |values: &[f64]| values.iter().copied().fold(f64::INFINITY, f64::min);
    let bytes = stripped_bytes(&library, dir.path())?;
    let speed = least(&plain_s) / least(&inside_s);
    let mut figures = json!({
        "true_start_delay_ms": delay_ms,
        "unpaced_speed": speed,
        "library_bytes_stripped": bytes,
    });
    figures[super::BARS_MISSED] = json!(missed_bars(delay_ms, speed, bytes));
    Ok(figures)
}

/// How much later `/bin/true` may start.
const MOST_DELAY_MS: f64 = 1.0;

/// The least speed of a job that is not slowed, as a part of its speed without the library.
const LEAST_SPEED: f64 = 0.995;

/// How large the library may be.
const MOST_BYTES: u64 = 1 << 20;

fn missed_bars(delay_ms: f64, speed: f64, bytes: u64) -> Vec<String> {
    let mut missed = Vec::new();
    // A figure that could not be computed is no success.
    if delay_ms.is_nan() || delay_ms >= MOST_DELAY_MS {
        missed.push(format!("/bin/true starts {delay_ms:.2} ms later; the bar is {MOST_DELAY_MS} ms"));
    }
    if speed.is_nan() || speed < LEAST_SPEED {
        missed.push(format!("the loop runs at {speed:.4} of its speed; the bar is {LEAST_SPEED}"));
    }
    if bytes >= MOST_BYTES {
        missed.push(format!("the stripped library has {bytes} bytes; the bar is {MOST_BYTES}"));
    }
    missed
}

fn start_s(command: &mut Command) -> Result<f64> {
    let began = Instant::now();
    let status = command.stdin(Stdio::null()).status()?;
    ensure!(status.success(), "/bin/true failed: {status}");
    Ok(began.elapsed().as_secs_f64())
}

fn compile(dir: &Path) -> Result<PathBuf> {
    let (source, program) = (dir.join("loop.c"), dir.join("loop"));
    std::fs::write(&source, LOOP)?;
    let status = Command::new("cc").args(["-O2", "-fopenmp", "-o"]).args([&program, &source]).status()?;
    ensure!(status.success(), "the C compiler failed: {status}");
    Ok(program)
}

fn loop_s(command: &mut Command) -> Result<f64> {
    let output = command.env("OMP_WAIT_POLICY", "PASSIVE").output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.trim().parse().with_context(|| format!("the loop printed no time: {text}"))
}

fn stripped_bytes(library: &Path, dir: &Path) -> Result<u64> {
    let stripped = dir.join("stripped.so");
    let status = Command::new("strip").arg("-o").args([&stripped, library]).status()?;
    ensure!(status.success(), "strip failed: {status}");
    Ok(stripped.metadata()?.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_bar_is_judged() {
        assert!(missed_bars(0.24, 0.9951, 333_000).is_empty());
        assert_eq!(missed_bars(1.0, 0.99, 1 << 20).len(), 3);
        assert_eq!(missed_bars(f64::NAN, f64::NAN, 0).len(), 2);
        assert!(missed_bars(-0.1, 1.02, 0).is_empty(), "noise may favour the library");
    }
}
