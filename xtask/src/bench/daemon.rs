//! What the daemon itself costs, and how fast it is.
//!
//! 50, 200 and 600 jobs print a loss once a second. *CPU* and *memory* of the daemon are read from `/proc` over a
//! minute under the default settings. The cost of one job must be at most [`BAR_PERCENT_PER_JOB`] of a core at each
//! size. *Journal*: the size of its files, how much they grow and how much is written for an hour of a job. Both have
//! bars too ([`BAR_GROWN_BYTES`], [`BAR_WRITTEN_BYTES`]). The command fails if a bar is missed, after it has printed
//! all figures.
//! *Restart*: `kill -9`, start again, until every job is there and running.
//! *Latency*: a daemon that decides at every report (`--react sample`) and shares by weights (`--mode weight`); two of
//! the jobs take turns in growing, and the clock runs from the moment a job is handed its line to print until its CPU
//! weight in the kernel is another.

use super::lab::Lab;
use anyhow::{Context, Result, bail};
use nix::sys::stat::Mode;
use nix::time::{ClockId, clock_getcpuclockid};
use nix::unistd::Pid;
use serde_json::{Value, json};
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// How many jobs; for several numbers, separated by commas, the cost is measured at each. Restart and latency
    /// are measured at the first one.
    #[arg(long, value_delimiter = ',', default_values_t = [50usize, 200, 600])]
    jobs: Vec<usize>,
    /// How long CPU use is measured.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// A program that is built already; without it the program is built as users get it.
    #[arg(long)]
    program: Option<PathBuf>,
    /// The policy of the daemon whose cost is measured.
    #[arg(long, default_value = "gainshare")]
    policy: String,
    /// How many times the latency is measured; 0 leaves it out.
    #[arg(long, default_value_t = 200)]
    rounds: usize,
}

/// What one job may cost, in percent of a core.
const BAR_PERCENT_PER_JOB: f64 = 0.03;

/// By how much the journal may grow for an hour of a job. 3,600 samples take about 0.2 MB, and the job's part of the
/// plans takes about as much.
const BAR_GROWN_BYTES: f64 = 2.0 * 1024.0 * 1024.0;
/// The write-ahead log grows to this size once and is then used again.
const LOG_BYTES: f64 = 8.0 * 1024.0 * 1024.0;
/// How much may be written for an hour of a job. The samples of all jobs are committed every 5 s, and each job then has
/// two pages of 4 KiB, in the log and in the file.
const BAR_WRITTEN_BYTES: f64 = 64.0 * 1024.0 * 1024.0;

/// A job that reports once a second and does next to nothing else. It waits without starting a program: hundreds of
/// new processes a second would be most of the load.
const REPORTER: &str = "exec 3<> <(:); i=100000; \
    while :; do i=$((i-7)); echo \"step $((100000-i))/100000 loss: 0.$i\"; read -t 1 -u 3; done";

/// A job that prints the lines it is handed, and burns some CPU for each so that its growth per CPU can be measured.
/// Its arguments are the pipe that it reads and the length of the loop.
const ECHO: &str = "while read line; do echo \"$line\"; i=0; while [ $i -lt $1 ]; do i=$((i+1)); done; done < \"$0\"";

/// The same loop alone, to measure how fast it is.
const LOOP: &str = "i=0; while [ $i -lt $0 ]; do i=$((i+1)); done";

/// How long the loop takes, for each core. FlowCon measures no growth of a job that uses less than a thousandth of the
/// machine, however many cores that is, and then the job's weight stays as it is. With a line every 0.2 s the job uses
/// about a hundredth.
const LOOP_PER_CORE: Duration = Duration::from_micros(2500);

/// The loop must end before the next line comes.
const LONGEST_LOOP: Duration = Duration::from_millis(60);

pub(crate) fn run(args: &Args) -> Result<Value> {
    let (&first, others) = args.jobs.split_first().context("give at least one number of jobs")?;
    let (cost, mut figures) = measure(args, first, args.rounds)?;
    let mut sizes = vec![cost];
    for &jobs in others {
        sizes.push(measure(args, jobs, 0)?.0);
    }
    let most = sizes.iter().filter_map(|size| size["ratio_to_bar"].as_f64()).fold(0.0, f64::max);
    let missed: Vec<String> = sizes.iter().flat_map(missed_bars).collect();
    figures[super::BARS_MISSED] = json!(missed);
    figures["sizes"] = json!(sizes);
    figures["bar_percent_per_job"] = json!(BAR_PERCENT_PER_JOB);
    figures["largest_ratio_to_bar"] = json!(most);
    Ok(figures)
}

/// The bars that the cost at one number of jobs does not meet, in a sentence each.
fn missed_bars(cost: &Value) -> Vec<String> {
    let jobs = cost["jobs"].as_u64().unwrap_or_default();
    let bars = [
        ("cpu_core_percent_per_job", BAR_PERCENT_PER_JOB, "% of a core for each job"),
        ("journal_kept_bytes_per_job_hour", BAR_GROWN_BYTES, "bytes that the journal grows for an hour of a job"),
        ("journal_written_bytes_per_job_hour", BAR_WRITTEN_BYTES, "bytes that are written for an hour of a job"),
    ];
    let over = bars.into_iter().filter_map(|(name, bar, what)| {
        let found = cost[name].as_f64().unwrap_or(f64::INFINITY);
        (found > bar).then(|| format!("{jobs} jobs: {found} {what}, and the bar is {bar}"))
    });
    over.collect()
}

/// The cost at one number of jobs, and all figures with restart and latency.
fn measure(args: &Args, jobs: usize, rounds: usize) -> Result<(Value, Value)> {
    let mut lab = match &args.program {
        Some(program) => Lab::with_program(program.clone())?,
        None => Lab::new()?,
    };
    lab.up(&["--policy", &args.policy])?;
    let mut file = String::new();
    for i in 0..jobs {
        file += &format!("[[job]]\nname = \"reporter-{i}\"\ncommand = [\"bash\", \"-c\", {}]\n", json!(REPORTER));
    }
    let fifos: Vec<PathBuf> = ["left", "right"].iter().map(|name| lab.path(name)).collect();
    let length = loop_length()?.to_string();
    for (fifo, name) in fifos.iter().zip(["left", "right"]) {
        mkfifo(fifo)?;
        let words = json!(["sh", "-c", ECHO, fifo, length]);
        file += &format!("[[job]]\nname = \"{name}\"\ncommand = {words}\n");
    }
    let path = lab.path("jobs.toml");
    std::fs::write(&path, file)?;
    lab.ask(&["submit", path.to_str().context("a temporary path is text")?])?;
    // Opened before anything is written, and for both directions, so that neither side ever waits for the
    // other to come.
    let mut writers: Vec<File> =
        fifos.iter().map(|f| OpenOptions::new().read(true).write(true).open(f)).collect::<Result<_, _>>()?;
    let all = jobs + 2;
    wait_until_running(&lab, all, Duration::from_secs(60 + jobs as u64))?;
    eprintln!("{all} jobs run; measuring the daemon for {} s", args.seconds);
    std::thread::sleep(Duration::from_secs(15));

    let pid = lab.pid()?;
    let began = Instant::now();
    let (cpu_before, written_before, journal_before) = (cpu_seconds(pid)?, written_bytes(pid)?, journal_bytes(&lab));
    std::thread::sleep(Duration::from_secs(args.seconds));
    let per_job_hour = |change: f64| change / began.elapsed().as_secs_f64() * 3600.0 / all as f64;
    let cpu_core_fraction = (cpu_seconds(pid)? - cpu_before) / began.elapsed().as_secs_f64();
    let percent_per_job = 100.0 * cpu_core_fraction / all as f64;
    let journal_bytes = journal_bytes(&lab);
    let grown_bytes = journal_bytes as f64 - journal_before as f64;
    let cost = json!({
        "jobs": all,
        "cpu_core_fraction": cpu_core_fraction,
        "cpu_core_percent_per_job": percent_per_job,
        "ratio_to_bar": percent_per_job / BAR_PERCENT_PER_JOB,
        "journal_bytes": journal_bytes,
        "journal_grown_bytes_per_job_hour": per_job_hour(grown_bytes),
        "journal_kept_bytes_per_job_hour": per_job_hour((grown_bytes - LOG_BYTES).max(0.0)),
        "journal_written_bytes_per_job_hour": per_job_hour(written_bytes(pid)? - written_before),
        "rss_mib": rss_mib(pid)?,
    });
    eprintln!("{all} jobs cost {percent_per_job:.4} % of a core each; the bar is {BAR_PERCENT_PER_JOB} %");

    let mut figures = cost.clone();
    lab.kill()?;
    let began = Instant::now();
    lab.up(&["--policy", "flowcon", "--react", "sample", "--alpha", "0", "--mode", "weight"])?;
    wait_until_running(&lab, all, Duration::from_secs(30 + jobs as u64 / 10))?;
    figures["restart_s"] = json!(began.elapsed().as_secs_f64());

    let latencies = match rounds {
        0 => Vec::new(),
        rounds => latencies(&lab, &mut writers, rounds)?,
    };
    let at = |q: f64| latencies.get((latencies.len().saturating_sub(1) as f64 * q).round() as usize);
    figures["latency_p50_ms"] = json!(at(0.50));
    figures["latency_p99_ms"] = json!(at(0.99));
    figures["latency_max_ms"] = json!(at(1.0));
    figures["latency_rounds"] = json!(latencies.len());
    lab.down()?;
    Ok((cost, figures))
}

/// The length of the echo jobs' loop on this machine.
fn loop_length() -> Result<u64> {
    const SAMPLE: u32 = 20_000;
    let cores = std::thread::available_parallelism()?.get();
    let began = Instant::now();
    crate::sh::run(std::process::Command::new("sh").args(["-c", LOOP, &SAMPLE.to_string()]))?;
    let once = began.elapsed() / SAMPLE;
    let wanted = LOOP_PER_CORE.saturating_mul(u32::try_from(cores)?).min(LONGEST_LOOP);
    Ok((wanted.as_nanos() / once.as_nanos().max(1)) as u64)
}

pub(super) fn wait_until_running(lab: &Lab, count: usize, patience: Duration) -> Result<()> {
    let began = Instant::now();
    // Asking costs more with many jobs, and their start takes longer.
    let pause = Duration::from_millis(if count < 100 { 20 } else { 500 });
    loop {
        // A daemon that starts hundreds of jobs may answer late.
        let jobs = lab.jobs().or_else(|e| if began.elapsed() > patience { Err(e) } else { Ok(Vec::new()) })?;
        let running = jobs.iter().filter(|j| j["state"] == "running").count();
        if running == count {
            return Ok(());
        }
        if began.elapsed() > patience {
            bail!("only {running} of {count} jobs run after {} s", patience.as_secs());
        }
        std::thread::sleep(pause);
    }
}

/// The two echo jobs.
struct Echoes<'a> {
    writers: &'a mut [File],
    values: [f64; 2],
}

impl Echoes<'_> {
    /// Hands a job a line with a value that has changed.
    fn report(&mut self, who: usize, change: f64) -> Result<()> {
        self.values[who] += change;
        writeln!(self.writers[who], "loss={:.6}", self.values[who]).context("cannot hand a line to a job")
    }

    /// Lets both report until their growth is measured, as often as in the rounds.
    fn take_turns(&mut self) -> Result<()> {
        for who in [0, 1, 0, 1, 0, 1] {
            self.report(who, 1.0)?;
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }
}

/// Lets the two echo jobs take turns in growing; milliseconds from each line to the changed weight, sorted.
fn latencies(lab: &Lab, writers: &mut [File], rounds: usize) -> Result<Vec<f64>> {
    let jobs = lab.jobs()?;
    let mut weights: Vec<File> = Vec::new();
    for name in ["left", "right"] {
        let job = jobs.iter().find(|j| j["name"] == name).with_context(|| format!("{name} is gone"))?;
        weights.push(weight_file(job["pid"].as_u64().with_context(|| format!("{name} has no pid"))?)?);
    }
    let mut echoes = Echoes { writers, values: [0.0; 2] };
    echoes.take_turns()?;
    let mut found = Vec::new();
    let mut missed = 0;
    for round in 0..rounds {
        let who = round % 2;
        let before = read(&mut weights[who])?;
        let began = Instant::now();
        // A large step now and next to none when it was its turn before: its part of all growth changes every time.
        echoes.report(who, if round % 4 < 2 { 50.0 } else { 0.01 })?;
        loop {
            if read(&mut weights[who])? != before {
                found.push(began.elapsed().as_secs_f64() * 1e3);
                break;
            }
            if began.elapsed() > Duration::from_secs(2) {
                missed += 1;
                // Over such a silence the jobs used too little for a measurement.
                echoes.take_turns()?;
                break;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        std::thread::sleep(Duration::from_millis(60 + (round as u64 * 37) % 80));
    }
    if missed * 10 > rounds {
        let jobs = lab.jobs()?;
        let echoes = jobs.iter().filter(|job| job["name"] == "left" || job["name"] == "right");
        let states: Vec<String> = echoes.map(|j| format!("{}: {}, {}", j["name"], j["share"], j["reason"])).collect();
        bail!("in {missed} of {rounds} rounds the weight did not change within 2 s; shares now: {}", states.join("; "));
    }
    eprintln!("{missed} of {rounds} rounds changed nothing and are left out");
    found.sort_by(f64::total_cmp);
    Ok(found)
}

/// The file in which the kernel keeps the CPU weight of a process's cgroup.
fn weight_file(pid: u64) -> Result<File> {
    let cgroups = std::fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
    for line in cgroups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next().unwrap_or(""), fields.next().unwrap_or(""));
        let file = match controllers {
            "" => format!("/sys/fs/cgroup{path}/cpu.weight"),
            c if c.split(',').any(|c| c == "cpu") => {
                let mount = ["cpu", "cpu,cpuacct"]
                    .into_iter()
                    .find(|m| std::path::Path::new(&format!("/sys/fs/cgroup/{m}{path}/cpu.shares")).exists());
                let Some(mount) = mount else { continue };
                format!("/sys/fs/cgroup/{mount}{path}/cpu.shares")
            }
            _ => continue,
        };
        if let Ok(open) = File::open(&file) {
            return Ok(open);
        }
    }
    bail!("process {pid} is in no cgroup with a CPU weight; `gainshare doctor` says what this machine lacks")
}

fn read(file: &mut File) -> Result<String> {
    let mut text = String::new();
    file.seek(SeekFrom::Start(0))?;
    file.read_to_string(&mut text)?;
    Ok(text)
}

/// CPU time of a process, also of its threads that have ended, in nanoseconds as the scheduler counts it. The ticks in
/// `/proc/PID/stat` are too coarse for a process that runs for a fraction of a tick at a time.
fn cpu_seconds(pid: u32) -> Result<f64> {
    let pid = Pid::from_raw(i32::try_from(pid)?);
    let time = clock_getcpuclockid(pid).and_then(ClockId::now);
    let time = time.with_context(|| format!("cannot read the CPU time of process {pid}: it has ended"))?;
    Ok(time.tv_sec() as f64 + time.tv_nsec() as f64 / 1e9)
}

/// Bytes that the process has caused to be written to disks.
fn written_bytes(pid: u32) -> Result<f64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/io"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("write_bytes: ")).context("odd /proc/PID/io")?;
    Ok(line.trim().parse()?)
}

/// The size of the journal's files.
fn journal_bytes(lab: &Lab) -> u64 {
    let names = ["journal.db", "journal.db-wal"];
    names.iter().filter_map(|name| std::fs::metadata(lab.path("state").join(name)).ok()).map(|meta| meta.len()).sum()
}

fn rss_mib(pid: u32) -> Result<f64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find(|l| l.starts_with("VmRSS:")).context("no VmRSS in /proc/PID/status")?;
    Ok(line.split_whitespace().nth(1).context("odd VmRSS")?.parse::<f64>()? / 1024.0)
}

fn mkfifo(path: &std::path::Path) -> Result<()> {
    nix::unistd::mkfifo(path, Mode::S_IRUSR | Mode::S_IWUSR).with_context(|| format!("cannot make {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missed_bar_is_named_with_its_size() {
        let cost = |percent: f64, kept: f64| {
            json!({
                "jobs": 52,
                "cpu_core_percent_per_job": percent,
                "journal_kept_bytes_per_job_hour": kept,
                "journal_written_bytes_per_job_hour": 1e6,
            })
        };
        assert_eq!(missed_bars(&cost(BAR_PERCENT_PER_JOB, 0.0)), Vec::<String>::new());
        assert!(missed_bars(&cost(0.05, 0.0))[0].starts_with("52 jobs: 0.05 % of a core for each job"));
        assert_eq!(missed_bars(&cost(0.05, 1e9)).len(), 2);
        assert_eq!(missed_bars(&json!({})).len(), 3, "a figure that is missing meets no bar");
    }
}
