//! `cargo xtask soak`: short jobs without end, and nothing grows.
//!
//! 200 short jobs a minute are submitted to a daemon of its own. Every few seconds its memory, descriptors,
//! threads, control groups and the bytes of its journal are read. The first third of the readings is the
//! warm-up; a quantity is *flat* if its median over the last third is at most a little above its median over
//! the second third.
//!
//! The daemon remembers the last [`JOBS_KEPT`] jobs. Before this number has ended, memory and journal grow as
//! intended; they are judged only in a run that is long enough, and printed in any.

use crate::bench::{self, Lab};
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// How long jobs are submitted.
    #[arg(long, default_value_t = 60.0)]
    minutes: f64,
    /// How many jobs are submitted a minute.
    #[arg(long, default_value_t = 200)]
    jobs_per_minute: u32,
    /// A program that is built already; without it the program is built as users get it.
    #[arg(long)]
    program: Option<PathBuf>,
}

/// The daemon remembers this many ended jobs.
const JOBS_KEPT: u64 = 1000;

/// The number of jobs that are submitted at a time.
const BATCH: u32 = 10;

/// A short job that reports.
const JOB: &str = "echo loss=2.5; sleep 0.2; echo loss=1.5";

/// One reading.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Reading {
    rss_kib: f64,
    descriptors: f64,
    threads: f64,
    groups: f64,
    journal_kib: f64,
}

impl Reading {
    fn of(lab: &Lab) -> Result<Reading> {
        let pid = lab.pid()?;
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        let field = |name: &str| -> Result<f64> {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).context("odd /proc/PID/status")?;
            Ok(line.split_whitespace().next().context("odd /proc/PID/status")?.parse()?)
        };
        let journal: u64 = ["journal.db", "journal.db-wal", "journal.db-shm"]
            .iter()
            .filter_map(|name| std::fs::metadata(lab.path("state").join(name)).ok())
            .map(|meta| meta.len())
            .sum();
        Ok(Reading {
            rss_kib: field("VmRSS:")?,
            threads: field("Threads:")?,
            descriptors: std::fs::read_dir(format!("/proc/{pid}/fd"))?.count() as f64,
            groups: job_groups(Path::new("/sys/fs/cgroup"), 0) as f64,
            journal_kib: journal as f64 / 1024.0,
        })
    }
}

/// Control groups of jobs below a folder, of all daemons of this machine.
fn job_groups(folder: &Path, depth: usize) -> usize {
    // Mount, controller, the daemon's own group, the base group, the job.
    if depth > 7 {
        return 0;
    }
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    folders
        .map(|entry| match entry.file_name().to_string_lossy().starts_with("job-") {
            true => 1,
            false => job_groups(&entry.path(), depth + 1),
        })
        .sum()
}

/// Whether a quantity stays: the medians of the second and the last third, and the verdict. `slack` is what
/// may be added in any case.
fn check_flat(values: &[f64], slack: f64) -> (f64, f64, bool) {
    let third = values.len() / 3;
    let middle = bench::median(values[third..2 * third].to_vec());
    let last = bench::median(values[2 * third..].to_vec());
    (middle, last, last <= middle * 1.1 + slack)
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let mut lab = match &args.program {
        Some(program) => Lab::with_program(program.clone())?,
        None => Lab::new()?,
    };
    let length = Duration::try_from_secs_f64(args.minutes * 60.0).context("give a number of minutes")?;
    ensure!(length >= Duration::from_secs(15), "readings of less than a quarter of a minute say nothing");
    lab.up(&["--slots", "64"])?;
    let pace = Duration::from_secs_f64(f64::from(BATCH) * 60.0 / f64::from(args.jobs_per_minute.max(1)));
    let (began, mut submitted, mut readings) = (Instant::now(), 0u64, Vec::new());
    let mut next = Duration::ZERO;
    while began.elapsed() < length {
        let file = lab.path("jobs.toml");
        let job = |i: u64| {
            format!("[[job]]\nname = \"soak-{}\"\ncommand = [\"sh\", \"-c\", {}]\n", submitted + i, json!(JOB))
        };
        std::fs::write(&file, (0..u64::from(BATCH)).map(job).collect::<String>())?;
        lab.ask(&["submit", file.to_str().context("a temporary path is text")?])?;
        submitted += u64::from(BATCH);
        next += pace;
        std::thread::sleep(next.saturating_sub(began.elapsed()));
        readings.push(Reading::of(&lab)?);
    }
    let patience = Instant::now();
    while !lab.jobs()?.is_empty() {
        if patience.elapsed() > Duration::from_secs(60) {
            bail!("{} jobs have not ended after a minute", lab.jobs()?.len());
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    let groups_left = Reading::of(&lab)?.groups;
    lab.down()?;
    let report = report(&readings, submitted);
    println!("{}", serde_json::to_string_pretty(&report)?);
    let grows: Vec<&str> = report["quantities"]
        .as_object()
        .into_iter()
        .flatten()
        .filter(|(_, quantity)| quantity["flat"] == false)
        .map(|(name, _)| name.as_str())
        .collect();
    ensure!(grows.is_empty(), "these grow: {}", grows.join(", "));
    eprintln!("{groups_left} control groups of jobs are left on this machine");
    Ok(())
}

fn report(readings: &[Reading], jobs: u64) -> Value {
    let is_long = jobs > 2 * JOBS_KEPT;
    let quantity = |read: fn(&Reading) -> f64, slack: f64, is_judged: bool| {
        let (middle, last, flat) = check_flat(&readings.iter().map(read).collect::<Vec<_>>(), slack);
        json!({"middle": middle, "last": last, "flat": is_judged.then_some(flat)})
    };
    json!({
        "jobs": jobs,
        "readings": readings.len(),
        "quantities": {
            "memory_kib": quantity(|r| r.rss_kib, 4096.0, is_long),
            "journal_kib": quantity(|r| r.journal_kib, 1024.0, is_long),
            "descriptors": quantity(|r| r.descriptors, 8.0, true),
            "threads": quantity(|r| r.threads, 4.0, true),
            "groups": quantity(|r| r.groups, 40.0, true),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_told_from_noise() {
        let flat: Vec<f64> = (0..30).map(|i| 100.0 + f64::from(i % 3)).collect();
        assert!(check_flat(&flat, 0.0).2);
        let grows: Vec<f64> = (0..30).map(|i| 100.0 + 3.0 * f64::from(i)).collect();
        assert!(!check_flat(&grows, 0.0).2);
        assert!(check_flat(&grows, 50.0).2, "within the slack");
    }

    #[test]
    fn a_short_run_judges_what_does_not_depend_on_the_history() {
        let reading = |i: u32| Reading {
            rss_kib: 1e6 * f64::from(i),
            descriptors: 20.0,
            threads: 4.0,
            groups: 2.0,
            journal_kib: 9.0,
        };
        let readings: Vec<Reading> = (0..9).map(reading).collect();
        let short = report(&readings, 30);
        assert!(short["quantities"]["memory_kib"]["flat"].is_null());
        assert_eq!(short["quantities"]["descriptors"]["flat"], true);
        assert_eq!(report(&readings, 5000)["quantities"]["memory_kib"]["flat"], false);
    }
}
