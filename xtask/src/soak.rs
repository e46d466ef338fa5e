//! `cargo xtask soak`: short jobs without end, and nothing grows.
//!
//! 200 short jobs a minute are submitted to a daemon of its own. Every few seconds its memory, descriptors,
//! threads, control groups and the bytes of its journal are read. The first third of the readings is the
//! warm-up; a quantity is *flat* if its median over the last third is at most a little above its median over
//! the second third.
//!
//! The daemon remembers the last [`JOBS_KEPT`] jobs. Before this number has ended, memory and journal grow as
//! intended; they are judged by their growth only in a run that is long enough. A shorter run judges their growth for
//! each job instead. When all jobs have ended, no control group of a job may be left.
//!
//! `--short` takes a quarter of a minute and is judged by counts.

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
    /// A quarter of a minute, judged by counts.
    #[arg(long, requires = "program", conflicts_with_all = ["minutes", "jobs_per_minute"])]
    short: bool,
}

/// The daemon remembers this many ended jobs.
const JOBS_KEPT: u64 = 1000;

/// The number of jobs that are submitted at a time.
const BATCH: u32 = 10;

/// What one remembered job may cost before [`JOBS_KEPT`] have ended: memory of the daemon and bytes of the journal. A
/// job with two samples takes a few KiB of both.
const JOB_MEMORY_KIB: f64 = 64.0;
const JOB_JOURNAL_KIB: f64 = 64.0;

/// The short form submits [`BATCH`] jobs this many times: about a quarter of a minute.
const SHORT_BATCHES: u32 = 12;

/// Jobs that have not ended after this time hang.
const PATIENCE: Duration = Duration::from_secs(120);

/// A short job that reports.
const JOB: &str = "echo loss=2.5; sleep 0.2; echo loss=1.5";

/// Where the kernel shows control groups.
const GROUPS: &str = "/sys/fs/cgroup";

/// One reading.
#[derive(Debug, Clone, Copy, PartialEq)]
struct ProcessReading {
    rss_kib: f64,
    descriptors: f64,
    threads: f64,
    groups: f64,
    journal_kib: f64,
}

impl ProcessReading {
    fn of(lab: &Lab) -> Result<ProcessReading> {
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
        Ok(ProcessReading {
            rss_kib: field("VmRSS:")?,
            threads: field("Threads:")?,
            descriptors: std::fs::read_dir(format!("/proc/{pid}/fd"))?.count() as f64,
            groups: job_groups(Path::new(GROUPS), 0) as f64,
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

/// A daemon under short jobs, and what was read about it.
struct Soak {
    lab: Lab,
    /// Other daemons of this machine may have jobs too.
    groups_before: usize,
    submitted: u64,
    readings: Vec<ProcessReading>,
}

impl Soak {
    fn begin(mut lab: Lab) -> Result<Soak> {
        let groups_before = job_groups(Path::new(GROUPS), 0);
        lab.up(&["--slots", "64"])?;
        Ok(Soak { lab, groups_before, submitted: 0, readings: Vec::new() })
    }

    fn submit(&mut self) -> Result<()> {
        let file = self.lab.path("jobs.toml");
        let job = |i: u64| {
            format!("[[job]]\nname = \"soak-{}\"\ncommand = [\"sh\", \"-c\", {}]\n", self.submitted + i, json!(JOB))
        };
        std::fs::write(&file, (0..u64::from(BATCH)).map(job).collect::<String>())?;
        self.lab.ask(&["submit", file.to_str().context("a temporary path is text")?])?;
        self.submitted += u64::from(BATCH);
        Ok(())
    }

    fn read(&mut self) -> Result<()> {
        self.readings.push(ProcessReading::of(&self.lab)?);
        Ok(())
    }

    /// Waits until no job is live and none has left its control group.
    fn wait_for_ends(&self) -> Result<()> {
        let began = Instant::now();
        loop {
            let (live, groups) = (self.lab.jobs()?.len(), job_groups(Path::new(GROUPS), 0));
            if live == 0 && groups <= self.groups_before {
                return Ok(());
            }
            if began.elapsed() > PATIENCE {
                let before = self.groups_before;
                bail!(
                    "{live} jobs have not ended, and {groups} control groups of jobs are left; {before} were there before"
                );
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// Ends the daemon and judges the readings.
    fn end(mut self) -> Result<()> {
        self.wait_for_ends()?;
        self.lab.down()?;
        let report = report(&self.readings, self.submitted);
        println!("{}", serde_json::to_string_pretty(&report)?);
        let grows: Vec<&str> = report["quantities"]
            .as_object()
            .into_iter()
            .flatten()
            .filter(|(_, quantity)| quantity["flat"] == false)
            .map(|(name, _)| name.as_str())
            .collect();
        ensure!(grows.is_empty(), "these grow: {}", grows.join(", "));
        Ok(())
    }
}

/// The form of the test command, with a program that is built already. Each reading is taken when all jobs have ended,
/// so that the load of the machine does not matter.
pub(crate) fn short(program: PathBuf) -> Result<()> {
    let mut soak = Soak::begin(Lab::with_program(program)?)?;
    for _ in 0..SHORT_BATCHES {
        soak.submit()?;
        soak.wait_for_ends()?;
        soak.read()?;
    }
    soak.end()
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if let (true, Some(program)) = (args.short, &args.program) {
        return short(program.clone());
    }
    let lab = match &args.program {
        Some(program) => Lab::with_program(program.clone())?,
        None => Lab::new()?,
    };
    let length = Duration::try_from_secs_f64(args.minutes * 60.0).context("give a number of minutes")?;
    ensure!(length >= Duration::from_secs(15), "readings of less than a quarter of a minute say nothing");
    let mut soak = Soak::begin(lab)?;
    let pace = Duration::from_secs_f64(f64::from(BATCH) * 60.0 / f64::from(args.jobs_per_minute.max(1)));
    let (began, mut next) = (Instant::now(), Duration::ZERO);
    while began.elapsed() < length {
        soak.submit()?;
        next += pace;
        std::thread::sleep(next.saturating_sub(began.elapsed()));
        soak.read()?;
    }
    soak.end()
}

fn report(readings: &[ProcessReading], jobs: u64) -> Value {
    let is_long = jobs > 2 * JOBS_KEPT;
    let quantity = |read: fn(&ProcessReading) -> f64, slack: f64| {
        let (middle, last, flat) = check_flat(&readings.iter().map(read).collect::<Vec<_>>(), slack);
        json!({"middle": middle, "last": last, "flat": flat})
    };
    // Between the middles of the second and the last third lies a third of the jobs.
    let remembered = |per_job: f64| if is_long { 0.0 } else { per_job * jobs as f64 / 3.0 };
    json!({
        "jobs": jobs,
        "readings": readings.len(),
        "quantities": {
            "memory_kib": quantity(|r| r.rss_kib, 4096.0 + remembered(JOB_MEMORY_KIB)),
            "journal_kib": quantity(|r| r.journal_kib, 1024.0 + remembered(JOB_JOURNAL_KIB)),
            "descriptors": quantity(|r| r.descriptors, 8.0),
            "threads": quantity(|r| r.threads, 4.0),
            "groups": quantity(|r| r.groups, 40.0),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_and_noise_are_distinguished() {
        let flat: Vec<f64> = (0..30).map(|i| 100.0 + f64::from(i % 3)).collect();
        assert!(check_flat(&flat, 0.0).2);
        let grows: Vec<f64> = (0..30).map(|i| 100.0 + 3.0 * f64::from(i)).collect();
        assert!(!check_flat(&grows, 0.0).2);
        assert!(check_flat(&grows, 50.0).2, "within the slack");
    }

    #[test]
    fn in_a_short_run_growth_of_the_history_is_compared_with_the_number_of_jobs() {
        let reading = |i: u32, job_kib: f64| ProcessReading {
            rss_kib: 20_000.0 + 30.0 * job_kib * f64::from(i),
            descriptors: 20.0,
            threads: 4.0,
            groups: 2.0,
            journal_kib: 9.0,
        };
        // Nine readings, thirty jobs between two of them.
        let is_flat = |job_kib: f64, jobs: u64| {
            let readings: Vec<ProcessReading> = (0..9).map(|i| reading(i, job_kib)).collect();
            let report = report(&readings, jobs);
            assert_eq!(report["quantities"]["descriptors"]["flat"], true);
            report["quantities"]["memory_kib"]["flat"] == true
        };
        assert!(is_flat(30.0, 270), "what a remembered job costs");
        assert!(!is_flat(400.0, 270), "far more than that");
        assert!(!is_flat(400.0, 5000) && !is_flat(200.0, 5000), "a long run has no history that still grows");
    }
}
