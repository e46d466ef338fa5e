//! Requests to a daemon whose disk is slow.
//!
//! Some clients push 500 values a second, each at its own moment, whether or not earlier answers have come. The
//! *latency* of a request counts from that moment until its whole answer is there. A library that is loaded into the
//! daemon makes every sync of a file 8 ms longer, as on a slow disk; a push is answered after the commit. Meanwhile the
//! daemon decides once a second, and renews its *lease*.
//!
//! The bars: the 99th percentile of the latency, no request without its answer, no long pause between two renewals of
//! the lease, and a decision in nearly every second.

use super::daemon::wait_until_running;
use super::lab::Lab;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// How long requests are sent.
    #[arg(long, default_value_t = 30.0)]
    seconds: f64,
    /// How many requests are sent a second.
    #[arg(long, default_value_t = 500.0)]
    rate: f64,
    /// How much longer a sync of a file takes, in milliseconds.
    #[arg(long, default_value_t = 8)]
    sync_ms: u32,
    /// A program that is built already; without it the program is built as users get it.
    #[arg(long)]
    program: Option<PathBuf>,
}

/// The 99th percentile of the latency.
const LONGEST_P99_MS: f64 = 50.0;

/// The lease is renewed every second. The guard acts after 15 s.
const LONGEST_PAUSE_S: f64 = 3.0;

/// Decisions a second. One a second is asked for.
const FEWEST_DECISIONS_PER_S: f64 = 0.8;

/// Connections, which stay open. Each has one request under way.
const CLIENTS: usize = 16;

const JOBS: usize = 4;

/// Makes every sync as slow as `SYNC_US` says.
const SLOW_DISK: &str = r#"
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>
static int wait_after(int code) { const char *us = getenv("SYNC_US"); if (us) usleep(atoi(us)); return code; }
int fsync(int fd) { return wait_after(syscall(SYS_fsync, fd)); }
int fdatasync(int fd) { return wait_after(syscall(SYS_fdatasync, fd)); }
"#;

/// Where the daemon is reached, and the token that it asks for.
#[derive(Debug, Clone)]
struct Access {
    address: String,
    token: String,
}

/// A connection that stays open.
struct Connection {
    access: Access,
    stream: BufReader<TcpStream>,
}

impl Connection {
    fn open(access: &Access) -> Result<Connection> {
        let stream = TcpStream::connect(&access.address).with_context(|| format!("cannot reach {}", access.address))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        Ok(Connection { access: access.clone(), stream: BufReader::new(stream) })
    }

    /// The status and the body of an answer.
    fn ask(&mut self, method: &str, path: &str, body: &str) -> Result<(u16, String)> {
        let Access { address, token } = &self.access;
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: {address}\r\nauthorization: Bearer {token}\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        self.stream.get_mut().write_all(request.as_bytes())?;
        read_answer(&mut self.stream)
    }
}

fn read_answer(stream: &mut impl BufRead) -> Result<(u16, String)> {
    let (mut status, mut length) = (None, 0);
    loop {
        let mut line = String::new();
        ensure!(stream.read_line(&mut line)? > 0, "the connection was closed");
        let line = line.trim_end();
        if line.is_empty() {
            break;
        }
        match line.split_once(": ") {
            _ if status.is_none() => status = line.split(' ').nth(1).and_then(|code| code.parse().ok()),
            Some((name, value)) if name.eq_ignore_ascii_case("content-length") => length = value.parse()?,
            _ => {}
        }
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body)?;
    Ok((status.context("an answer without a status")?, String::from_utf8_lossy(&body).into_owned()))
}

pub(crate) fn run(args: &Args) -> Result<Value> {
    ensure!(args.seconds > 0.0 && args.rate > 0.0, "give a time and a number of requests above 0");
    let mut lab = match &args.program {
        Some(program) => Lab::with_program(program.clone())?,
        None => Lab::new()?,
    };
    let library = build_slow_disk(&lab)?;
    let slow = [("LD_PRELOAD", library), ("SYNC_US", (u64::from(args.sync_ms) * 1000).to_string())];
    lab.up_with(&["--policy", "flowcon", "--interval", "1s"], &slow)?;
    let job = |number: usize| format!("[[job]]\nname = \"pushes-{number}\"\ncommand = [\"sleep\", \"3600\"]\n");
    let file = lab.path("jobs.toml");
    std::fs::write(&file, (0..JOBS).map(job).collect::<String>())?;
    lab.ask(&["submit", file.to_str().context("a temporary path is text")?])?;
    wait_until_running(&lab, JOBS, Duration::from_secs(60))?;
    let access = Access { address: read(&lab.path("run/address"))?, token: read(&lab.path("state/token"))? };
    let (before, began) = (decisions(&access)?, Instant::now());
    let (is_over, lease) = (AtomicBool::new(false), lab.path("run/lease"));
    let (sent, pause_s) = std::thread::scope(|scope| {
        let watch = scope.spawn(|| longest_pause_s(&lease, &is_over));
        let client = |client: usize| {
            let access = &access;
            scope.spawn(move || send(access, args, client, began))
        };
        let clients: Vec<_> = (0..CLIENTS).map(client).collect();
        let sent: Vec<Result<Sent>> = clients.into_iter().filter_map(|client| client.join().ok()).collect();
        is_over.store(true, Ordering::Relaxed);
        (sent, watch.join().unwrap_or(f64::INFINITY))
    });
    let took_s = began.elapsed().as_secs_f64();
    ensure!(sent.len() == CLIENTS, "a client panicked");
    let sent: Vec<Sent> = sent.into_iter().collect::<Result<_>>()?;
    let decisions_per_s = (decisions(&access)? - before) / took_s;
    let has_lapsed = lab.path("run/lapsed").exists();
    lab.down()?;
    let mut latencies_ms: Vec<f64> = sent.iter().flat_map(|one| one.latencies_ms.iter().copied()).collect();
    latencies_ms.sort_by(f64::total_cmp);
    let at = |q: f64| latencies_ms.get((latencies_ms.len().saturating_sub(1) as f64 * q).round() as usize);
    let mut figures = json!({
        "requests": latencies_ms.len(), "requests_per_s": latencies_ms.len() as f64 / took_s,
        "refused": sent.iter().map(|one| one.refused).sum::<usize>(), "sync_ms": args.sync_ms,
        "latency_p50_ms": at(0.5), "latency_p99_ms": at(0.99), "latency_max_ms": at(1.0),
        "lease_longest_pause_s": pause_s, "lease_lapsed": has_lapsed, "decisions_per_s": decisions_per_s,
    });
    figures[super::BARS_MISSED] = json!(missed_bars(&figures));
    Ok(figures)
}

/// The bars that these figures do not meet, in a sentence each.
fn missed_bars(figures: &Value) -> Vec<String> {
    let number = |name: &str| figures[name].as_f64().unwrap_or(f64::INFINITY);
    let (p99_ms, pause_s) = (number("latency_p99_ms"), number("lease_longest_pause_s"));
    // A number that is missing meets no bar.
    let decisions_per_s = figures["decisions_per_s"].as_f64().unwrap_or(0.0);
    let bars = [
        (p99_ms <= LONGEST_P99_MS, format!("99 % within {p99_ms:.1} ms, and the bar is {LONGEST_P99_MS} ms")),
        (figures["refused"] == 0, format!("{} requests were refused", figures["refused"])),
        (
            pause_s <= LONGEST_PAUSE_S && figures["lease_lapsed"] == false,
            format!("the lease was not renewed for {pause_s:.1} s, and the bar is {LONGEST_PAUSE_S} s"),
        ),
        (
            decisions_per_s >= FEWEST_DECISIONS_PER_S,
            format!("{decisions_per_s:.2} decisions a second, and the bar is {FEWEST_DECISIONS_PER_S}"),
        ),
    ];
    bars.into_iter().filter(|(is_met, _)| !is_met).map(|(_, sentence)| sentence).collect()
}

/// What one client got.
#[derive(Debug, Default)]
struct Sent {
    latencies_ms: Vec<f64>,
    refused: usize,
}

/// Every [`CLIENTS`]th request of the schedule.
fn send(access: &Access, args: &Args, client: usize, began: Instant) -> Result<Sent> {
    let mut connection = Connection::open(access)?;
    let mut sent = Sent::default();
    let count = (args.seconds * args.rate) as usize;
    for number in (client..count).step_by(CLIENTS) {
        let due = began + Duration::from_secs_f64(number as f64 / args.rate);
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        let body = format!(r#"{{"metric":"loss","value":{},"step":{}}}"#, 1.0 / (number + 1) as f64, number + 1);
        let (status, _) = connection.ask("POST", &format!("/v1/jobs/pushes-{}/push", number % JOBS), &body)?;
        sent.refused += usize::from(status != 200);
        sent.latencies_ms.push(due.elapsed().as_secs_f64() * 1000.0);
    }
    Ok(sent)
}

/// The longest time for which the lease stayed as it was, in seconds.
fn longest_pause_s(lease: &Path, is_over: &AtomicBool) -> f64 {
    let (mut last, mut changed, mut longest_s) = (read(lease).ok(), Instant::now(), 0.0f64);
    while !is_over.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(20));
        longest_s = longest_s.max(changed.elapsed().as_secs_f64());
        let now = read(lease).ok();
        if now != last {
            (last, changed) = (now, Instant::now());
        }
    }
    longest_s
}

/// How many decisions the daemon has made.
fn decisions(access: &Access) -> Result<f64> {
    let (_, text) = Connection::open(access)?.ask("GET", "/metrics", "")?;
    let count = text.lines().find_map(|line| line.strip_prefix("gainshare_plans_total "));
    count.context("the metrics have no number of decisions")?.parse().context("the number of decisions is no number")
}

fn read(path: &Path) -> Result<String> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(text.trim().to_owned())
}

/// Compiles the library that makes the disk slow.
fn build_slow_disk(lab: &Lab) -> Result<String> {
    let (source, library) = (lab.path("slow_disk.c"), lab.path("slow_disk.so"));
    std::fs::write(&source, SLOW_DISK)?;
    crate::sh::run(Command::new("cc").args(["-O1", "-shared", "-fPIC", "-o"]).args([&library, &source]))?;
    Ok(library.to_str().context("a temporary path is text")?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_one_after_the_other() {
        let text = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nx: y\r\n\r\n{}HTTP/1.1 429 Too Many\r\n\r\n";
        let mut stream = BufReader::new(text.as_bytes());
        assert_eq!(read_answer(&mut stream).unwrap(), (200, "{}".to_owned()));
        assert_eq!(read_answer(&mut stream).unwrap(), (429, String::new()));
        assert!(read_answer(&mut stream).is_err(), "the connection was closed");
    }

    #[test]
    fn each_missed_bar_is_named() {
        let good = json!({
            "latency_p99_ms": 20.0, "refused": 0, "lease_longest_pause_s": 1.2, "lease_lapsed": false,
            "decisions_per_s": 1.0,
        });
        assert_eq!(missed_bars(&good), Vec::<String>::new());
        for (name, value, words) in [
            ("latency_p99_ms", json!(50.1), "99 % within 50.1 ms"),
            ("refused", json!(3), "3 requests"),
            ("lease_longest_pause_s", json!(4.0), "not renewed for 4.0 s"),
            ("lease_lapsed", json!(true), "not renewed"),
            ("decisions_per_s", json!(0.5), "0.50 decisions"),
        ] {
            let mut bad = good.clone();
            bad[name] = value;
            let missed = missed_bars(&bad);
            assert!(missed.len() == 1 && missed[0].contains(words), "{name}: {missed:?}");
        }
        assert_eq!(missed_bars(&json!({"lease_lapsed": false})).len(), 4, "a number that is missing meets no bar");
    }
}
