//! What is done with jobs from outside: `submit`, `ps`, `logs`, `stop`, `events`.

use crate::args::SubmitArgs;
use crate::link::Link;
use crate::notice::notice;
use crate::outlook;
use anyhow::{Result, bail};
use gainshare_daemon::api::client::{ClientError, EventStream};
use gainshare_daemon::api::types::{Event, JobInfo, JobState, RhythmInfo, WAITS_FOR_GPU_MEMORY};
use gainshare_daemon::deadline;
use gainshare_daemon::spec::{self, JobSpec};
use gainshare_figures::terminal::{
    Colour, NOTHING, Printer, Side, Table, bytes, number, optional, percent, printable, seconds,
};
use serde_json::json;
use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// Between two pictures of `ps --watch`.
const WATCH_EVERY: Duration = Duration::from_secs(1);

/// How long after its grace a stopped job may take to be gone before we stop waiting for it.
const AFTER_GRACE: Duration = Duration::from_secs(10);

pub fn submit(args: &SubmitArgs, link: &Link, out: &Printer) -> Result<u8> {
    let mut jobs = Vec::new();
    for file in &args.files {
        jobs.extend(spec::load(file)?);
    }
    if let Some(runtime) = args.runtime {
        jobs.iter_mut().for_each(|job| job.runtime = runtime.into());
    }
    jobs.iter_mut().for_each(|job| args.finish.apply(job));
    let mut jobs = spec::prepare(jobs)?;
    let now = deadline::now();
    jobs.iter_mut().try_for_each(|job| job.resolve(&now))?;
    if args.dry_run {
        return show_specs(&jobs, out);
    }
    link.ensure()?;
    let submitted = link.call(link.client.submit(jobs, environment()))?;
    print_waits_for_gpu(&submitted);
    outlook::print(&submitted);
    if out.is_json() {
        out.json(&json!({"jobs": submitted}))?;
    } else {
        let names: Vec<&str> = submitted.iter().map(|job| job.name.as_str()).collect();
        out.text(&format!("submitted {} job(s): {}\n", names.len(), names.join(" ")))?;
    }
    Ok(0)
}

/// Prints which of these jobs wait because they would not fit into the memory of a GPU.
pub fn print_waits_for_gpu(jobs: &[JobInfo]) {
    for job in jobs {
        if let Some(reason) = job.reason.as_ref().filter(|reason| reason.why == WAITS_FOR_GPU_MEMORY) {
            notice!("{}: {}", job.name, printable(&reason.text));
        }
    }
}

/// The environment of this process, for the jobs to start with. JSON cannot hold a variable that is not UTF-8, so it is
/// left out.
fn environment() -> BTreeMap<String, String> {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect()
}

fn show_specs(jobs: &[JobSpec], out: &Printer) -> Result<u8> {
    if out.is_json() {
        // As in every answer: the names of variables, never their values.
        let shown: Vec<serde_json::Value> = jobs
            .iter()
            .map(|job| {
                let mut value = serde_json::to_value(job).unwrap_or_default();
                value["env"] = json!(job.env_names());
                value
            })
            .collect();
        out.json(&json!({"jobs": shown}))?;
        return Ok(0);
    }
    let mut table = Table::new(&[("NAME", Side::Left), ("RUNTIME", Side::Left), ("COMMAND", Side::Left)]);
    for job in jobs {
        let runtime = format!("{:?}", job.runtime).to_lowercase();
        table.row(vec![
            (job.name.clone().unwrap_or_else(|| format!("{}-…", job.base_name())), Colour::Plain),
            (runtime, Colour::Plain),
            (job.command.join(" "), Colour::Dim),
        ]);
    }
    out.text(&table.render(out, 0))?;
    Ok(0)
}

pub fn ps(all: bool, watch: bool, link: &Link, out: &Printer) -> Result<u8> {
    if !watch {
        let jobs = if link.ensure_if_used()? { link.call(link.client.jobs(all))? } else { Vec::new() };
        if out.is_json() {
            out.json(&json!({"jobs": jobs}))?;
        } else {
            out.text(&table(&jobs, out))?;
        }
        return Ok(0);
    }
    let on_screen = std::io::stdout().is_terminal() && !out.is_json();
    if on_screen {
        out.text("\x1b[2J")?;
    }
    loop {
        let jobs = if link.ensure_if_used()? { link.call(link.client.jobs(all))? } else { Vec::new() };
        if out.is_json() {
            out.json_line(&json!({"jobs": jobs}))?;
        } else {
            let text = table(&jobs, out);
            let text = if on_screen { screenful(&text) } else { text + "\n" };
            out.text(&text)?;
        }
        std::thread::sleep(WATCH_EVERY);
    }
}

/// Home, as many lines as fit with each line's rest erased, then everything below erased: no flicker, no scrolling.
fn screenful(text: &str) -> String {
    let rows = crate::supervise::terminal_rows().unwrap_or(usize::MAX);
    let lines: Vec<&str> = text.lines().take(rows.saturating_sub(1)).collect();
    format!("\x1b[H{}\x1b[K\n\x1b[J", lines.join("\x1b[K\n"))
}

/// Where the share of a GPU stands, after that of the CPU, and where its memory stands, after that of the machine.
const GPU_COLUMN: usize = 3;
const GPU_MEMORY_COLUMN: usize = 5;

fn table(jobs: &[JobInfo], out: &Printer) -> String {
    if jobs.is_empty() {
        return "no jobs; start one with `gainshare run -- CMD`\n".into();
    }
    let mut columns = vec![
        ("NAME", Side::Left),
        ("STATE", Side::Left),
        ("SHARE", Side::Right),
        ("CPU", Side::Right),
        ("MEM", Side::Right),
        ("METRIC", Side::Left),
        ("GROWTH", Side::Right),
        ("CATEGORY", Side::Left),
        ("TIME", Side::Right),
        ("DONE", Side::Left),
    ];
    // Most machines have no GPU.
    let has_gpu = jobs.iter().any(|job| job.gpu_share.is_some());
    let has_gpu_memory = jobs.iter().any(|job| job.gpu_memory_bytes.is_some());
    if has_gpu_memory {
        columns.insert(GPU_MEMORY_COLUMN, ("GPU MEM", Side::Right));
    }
    if has_gpu {
        columns.insert(GPU_COLUMN, ("GPU", Side::Right));
    }
    let mut table = Table::new(&columns);
    for job in jobs {
        let live = !job.state.is_final();
        let metric = job.metric.as_ref().map(|m| {
            let step = match (m.step, m.total) {
                (Some(step), Some(total)) => format!(" {step}/{total}"),
                (Some(step), None) => format!(" @{step}"),
                _ => String::new(),
            };
            format!("{}={}{step}", m.name, number(m.value))
        });
        let metric = metric.or_else(|| job.rhythm.as_ref().map(rhythm));
        let mut row = vec![
            (job.name.clone(), Colour::Bold),
            (state(job), state_colour(job.state)),
            (optional(job.share.filter(|_| live), percent), Colour::Plain),
            (optional(job.cpu_cores.filter(|_| live), |cores| format!("{cores:.2}")), Colour::Plain),
            (optional(job.memory_bytes.filter(|_| live), bytes), Colour::Plain),
            (optional(metric, |text| text), Colour::Plain),
            (optional(job.growth, number), Colour::Plain),
            (optional(job.category.clone(), |name| name), category_colour(job.category.as_deref())),
            (optional(job.elapsed_s, seconds), Colour::Plain),
            outlook::done(job),
        ];
        if has_gpu_memory {
            let memory = optional(job.gpu_memory_bytes.filter(|_| live), bytes);
            row.insert(GPU_MEMORY_COLUMN, (memory, Colour::Plain));
        }
        if has_gpu {
            row.insert(GPU_COLUMN, (optional(job.gpu_share.filter(|_| live), percent), Colour::Plain));
        }
        table.row(row);
    }
    table.render(out, 0)
}

/// The pace of a job that reports no steps.
pub fn rhythm(rhythm: &RhythmInfo) -> String {
    let total = rhythm.total.map_or_else(String::new, |total| format!("/{total}"));
    let at = format!("about {}{total}", rhythm.steps);
    match rhythm.stalled_s {
        Some(stalled_s) => format!("stands still for {}, {at}", seconds(stalled_s)),
        None => format!("{} steps/s, {at}", number(rhythm.steps_per_s)),
    }
}

fn state(job: &JobInfo) -> String {
    match (job.state, job.exit_code, job.signal) {
        (JobState::Failed, Some(code), _) => format!("failed({code})"),
        (JobState::Failed, None, Some(signal)) => {
            let name = nix::sys::signal::Signal::try_from(signal).map_or("signal", |s| s.as_str());
            format!("failed({name})")
        }
        (state, ..) => state.name().to_owned(),
    }
}

pub fn state_colour(state: JobState) -> Colour {
    match state {
        JobState::Running => Colour::Green,
        JobState::Starting | JobState::Queued => Colour::Yellow,
        JobState::Failed | JobState::Lost => Colour::Red,
        JobState::Done | JobState::Stopped => Colour::Dim,
    }
}

pub fn category_colour(category: Option<&str>) -> Colour {
    match category {
        Some("growing") => Colour::Green,
        Some("watching") => Colour::Yellow,
        Some("converged") => Colour::Blue,
        _ => Colour::Plain,
    }
}

pub fn logs(job: &str, follow: bool, tail: Option<usize>, link: &Link) -> Result<u8> {
    need_daemon(link, job)?;
    let offset = match tail {
        Some(lines) => {
            let dir = link.call(link.client.job(job))?.dir;
            tail_offset(Path::new(&dir), lines)
        }
        None => 0,
    };
    let mut output = Output { job: job.to_owned(), offset };
    if !follow {
        link.call(output.copy(link, false))?;
        return Ok(0);
    }
    while let Err(error) = link.call(output.copy(link, true)) {
        output.mend(link, error)?;
    }
    Ok(0)
}

fn need_daemon(link: &Link, job: &str) -> Result<()> {
    if link.ensure_if_used()? { Ok(()) } else { bail!("there is no job `{job}`: nothing was ever run here") }
}

/// A job's output on its way to ours, and how far it came.
pub struct Output {
    pub job: String,
    pub offset: u64,
}

impl Output {
    /// Prints what there is and, with `follow`, what comes until the job has ended.
    pub async fn copy(&mut self, link: &Link, follow: bool) -> Result<()> {
        let mut stream = link.client.logs(&self.job, self.offset, follow).await?;
        while let Some(piece) = stream.next().await? {
            let mut stdout = std::io::stdout().lock();
            stdout.write_all(&piece)?;
            stdout.flush()?;
            self.offset += piece.len() as u64;
        }
        Ok(())
    }

    /// After a stream broke: makes sure that there is a daemon, so that the next one goes on where this one ended.
    pub fn mend(&self, link: &Link, error: anyhow::Error) -> Result<()> {
        if !error.downcast_ref::<ClientError>().is_some_and(ClientError::is_unreachable) {
            return Err(error);
        }
        std::thread::sleep(Duration::from_millis(300));
        link.ensure()
    }
}

/// Where the last `lines` lines of a job's output begin, counted over the rotated file and the current one.
fn tail_offset(dir: &Path, lines: usize) -> u64 {
    let older = dir.join("output.log.1");
    match last_lines(&dir.join("output.log"), lines) {
        (start, 0) => start + older.metadata().map_or(0, |m| m.len()),
        (_, lacking) => last_lines(&older, lacking).0,
    }
}

/// Where the last `lines` lines of a file begin, and how many of them it lacks.
fn last_lines(path: &Path, lines: usize) -> (u64, usize) {
    const PIECE: u64 = 64 << 10;
    let Ok(file) = std::fs::File::open(path) else { return (0, lines) };
    let size = file.metadata().map_or(0, |m| m.len());
    let (mut end, mut left) = (size, lines);
    while end > 0 && left > 0 {
        let start = end.saturating_sub(PIECE);
        let mut piece = vec![0; (end - start) as usize];
        if file.read_exact_at(&mut piece, start).is_err() {
            return (0, 0);
        }
        for (i, _) in piece.iter().enumerate().rev().filter(|(_, byte)| **byte == b'\n') {
            let after = start + i as u64 + 1;
            // The line end at the very end closes the last line, it begins no new one.
            left -= usize::from(after < size);
            if left == 0 {
                return (after, 0);
            }
        }
        end = start;
    }
    // The first line begins without a line end before it.
    if left == 0 || size == 0 { (size, left) } else { (0, left - 1) }
}

pub fn stop(jobs: &[String], grace: Duration, wait: bool, link: &Link, out: &Printer) -> Result<u8> {
    need_daemon(link, &jobs[0])?;
    let mut results = Vec::new();
    let mut failed = false;
    for job in jobs {
        match link.call(link.client.stop(job, grace.as_secs_f64())) {
            Ok(info) => results.push(info),
            Err(error) => {
                failed = true;
                out.complain(&error.to_string());
            }
        }
    }
    let deadline = Instant::now() + grace + AFTER_GRACE;
    for info in &mut results {
        while wait && !info.state.is_final() {
            if Instant::now() > deadline {
                failed = true;
                out.complain(&format!("{} is still there {} s after its grace", info.name, AFTER_GRACE.as_secs()));
                break;
            }
            std::thread::sleep(Duration::from_millis(50));
            *info = link.call(link.client.job(&info.id.to_string()))?;
        }
        if !out.is_json() {
            out.text(&format!("{}: {}\n", info.name, if wait { state(info) } else { "stopping".into() }))?;
        }
    }
    if out.is_json() {
        out.json(&json!({"jobs": results}))?;
    }
    Ok(u8::from(failed))
}

pub fn events(link: &Link, out: &Printer) -> Result<u8> {
    if !link.ensure_if_used()? {
        bail!("nothing happens here: nothing was ever run; `run`, `submit` and `up --detach` start a daemon");
    }
    let mut stream: EventStream = link.call(link.client.events())?;
    while let Some(event) = link.call(stream.next())? {
        if out.is_json() {
            out.json_line(&event)?;
        } else {
            out.text(&(line(&event) + "\n"))?;
        }
        if event == Event::ShuttingDown {
            break;
        }
    }
    Ok(0)
}

fn line(event: &Event) -> String {
    match event {
        Event::Job { job } => {
            let reason = job.reason.as_ref().map_or_else(String::new, |why| format!(": {}", why.text));
            format!("job     {} {}{reason}", job.name, state(job))
        }
        Event::Forgotten { name, .. } => format!("job     {name} forgotten"),
        Event::Sample { name, metric, step, value, .. } => {
            let step = step.map_or_else(String::new, |step| format!(" at step {step}"));
            format!("sample  {name} {metric}={}{step}", number(*value))
        }
        Event::Plan { plan } => {
            let shares: Vec<String> = plan
                .jobs
                .iter()
                .map(|job| format!("{} {} ({})", job.name, job.share.map_or(NOTHING.into(), percent), job.reason.why))
                .collect();
            format!("plan    {}: {}", plan.generation, shares.join(", "))
        }
        Event::Missed { events } => format!("missed  {events} event(s): this reader was too slow"),
        Event::ShuttingDown => "daemon  ends".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let write = |older: &str, newer: &str| {
            std::fs::write(dir.path().join("output.log.1"), older).unwrap();
            std::fs::write(dir.path().join("output.log"), newer).unwrap();
        };
        let tail = |older: &str, newer: &str, lines: usize| {
            write(older, newer);
            format!("{older}{newer}")[tail_offset(dir.path(), lines) as usize..].to_owned()
        };
        for older in ["", "older\n"] {
            assert_eq!(tail(older, "a\nb\nc\n", 1), "c\n");
            assert_eq!(tail(older, "a\nb\nc\n", 2), "b\nc\n");
            assert_eq!(tail(older, "a\nb\nc\n", 3), "a\nb\nc\n");
            assert_eq!(tail(older, "a\nb\nc\n", 4), format!("{older}a\nb\nc\n"));
            assert_eq!(tail(older, "a\nb\nc", 1), "c");
            assert_eq!(tail(older, "a\n\n\n", 2), "\n\n");
            assert_eq!(tail(older, "a\nb\n", 0), "");
            assert_eq!(tail(older, "a", 0), "");
            assert_eq!(tail(older, "", 3), older);
        }
        assert_eq!(tail("1\n2\n3\n", "4\n", 2), "3\n4\n");
        let long = format!("{}\nlast {}\n", "x".repeat(200_000), "y".repeat(100_000));
        assert_eq!(tail("", &long, 1).len(), 100_006);
        assert_eq!(tail_offset(Path::new("/nonexistent"), 3), 0);
    }
}
