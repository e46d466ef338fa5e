//! Reading what the operator and the API server publish about themselves, and summing up.

use super::{Plan, Result};
use gainshare_limits::process::ProcessStat;
use kube::Client;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const PATIENCE: Duration = Duration::from_secs(1800);
const READ_INTERVAL: Duration = Duration::from_millis(250);

/// A page of the operator's plain port; an error unless it is answered well.
pub(super) async fn page(address: &str, path: &str) -> Result<String> {
    let mut stream = tokio::net::TcpStream::connect(address).await?;
    stream.write_all(format!("GET {path} HTTP/1.0\r\nhost: operator\r\n\r\n").as_bytes()).await?;
    let mut text = String::new();
    stream.read_to_string(&mut text).await?;
    let (head, body) = text.split_once("\r\n\r\n").ok_or("no answer")?;
    if !head.contains(" 200 ") {
        return Err(format!("{path}: {body}").into());
    }
    Ok(body.to_owned())
}

/// When the operator whose metrics are there wrote last, after it has written nothing for this
/// time.
pub(super) async fn settled(metrics: &str, quiet: Duration) -> Result<Instant> {
    let began = Instant::now();
    let (mut known, mut since) = (-1.0, Instant::now());
    while since.elapsed() < quiet {
        let count = metric(&page(metrics, "/metrics").await?, "gainshare_operator_writes_total", &[]);
        if count != known {
            (known, since) = (count, Instant::now());
        }
        if began.elapsed() > PATIENCE {
            return Err("the operator does not stop writing".into());
        }
        tokio::time::sleep(READ_INTERVAL).await;
    }
    Ok(since)
}

pub(super) async fn wait<F: Future<Output = bool>>(what: &str, done: impl Fn() -> F) -> Result<()> {
    let began = Instant::now();
    eprintln!("crowd: waiting for {what}");
    while !done().await {
        if began.elapsed() > PATIENCE {
            return Err(format!("waited {} s for {what}", PATIENCE.as_secs()).into());
        }
        tokio::time::sleep(READ_INTERVAL).await;
    }
    Ok(())
}

/// The sum of a metric's lines that contain all of these words.
pub(super) fn metric(text: &str, name: &str, words: &[&str]) -> f64 {
    let lines = text.lines().filter(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' '])));
    let fitting = lines.filter(|line| words.iter().all(|word| line.contains(word)));
    fitting.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

/// A kind of request: its name in figures, its verb, resource and subresource, and whether only the operator makes such
/// requests.
pub(super) type Kind = (&'static str, &'static str, &'static str, &'static str, bool);

/// In a cluster of pods that a SharePolicy selects.
pub(super) const OF_PODS: &[Kind] = &[
    ("pod_notes", "PATCH", "pods", "", true),
    ("pod_resizes", "PATCH", "pods", "resize", true),
    ("policy_statuses", "PATCH", "sharepolicies", "status", true),
];

/// In a cluster of training jobs.
pub(super) const OF_JOBS: &[Kind] = &[
    ("job_marks", "PATCH", "trainingjobs", "", true),
    ("job_journals", "PATCH", "trainingjobs", "status", true),
    ("pod_creations", "POST", "pods", "", true),
    ("pod_patches", "PATCH", "pods", "", true),
    ("pod_resizes", "PATCH", "pods", "resize", true),
    ("service_creations", "POST", "services", "", true),
    ("pod_bindings", "POST", "pods", "binding", false),
    ("pod_deletions", "DELETE", "pods", "", false),
    ("events", "POST", "events", "", false),
    ("token_reviews", "POST", "tokenreviews", "", false),
];

/// Successful requests by kind, as the API server counts them.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Counts {
    kinds: &'static [Kind],
    counts: BTreeMap<&'static str, f64>,
}

impl Counts {
    async fn of(client: &Client, kinds: &'static [Kind]) -> Result<Counts> {
        let text = client.request_text(http_get("/metrics")?).await?;
        let count = |verb: &str, resource: &str, part: &str| {
            let label = |name: &str, value: &str| format!("{name}=\"{value}\"");
            // What was refused (the pod had changed meanwhile, say) has written nothing.
            let done = "code=\"20".to_owned();
            let words = [label("verb", verb), label("resource", resource), label("subresource", part), done];
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            metric(&text, "apiserver_request_total", &words)
        };
        let counts = kinds.iter().map(|(name, verb, resource, part, _)| (*name, count(verb, resource, part)));
        Ok(Counts { kinds, counts: counts.collect() })
    }

    fn since(&self, before: &Counts) -> Counts {
        let counts = self.counts.iter().map(|(kind, count)| (*kind, count - before.get(kind)));
        Counts { kinds: self.kinds, counts: counts.collect() }
    }

    pub(super) fn get(&self, kind: &str) -> f64 {
        self.counts.get(kind).copied().unwrap_or(0.0)
    }

    /// What only the operator writes. Events, of which others write some too, and reviews, which write nothing, are not
    /// among them.
    pub(super) fn ours(&self) -> f64 {
        self.kinds.iter().filter(|(.., ours)| *ours).map(|(name, ..)| self.get(name)).sum()
    }

    pub(super) fn json(&self) -> Value {
        json!(self.counts)
    }
}

/// One reading of all counters.
pub(super) struct Mark {
    pub(super) at: Instant,
    counts: Counts,
    cpu_s: f64,
}

/// What happened since a mark.
pub(super) struct Span {
    pub(super) seconds: f64,
    /// Seconds of processor time of the operator's process.
    pub(super) cpu_s: f64,
    pub(super) counts: Counts,
}

impl Mark {
    pub(super) async fn now(plan: &Plan, client: &Client, kinds: &'static [Kind]) -> Result<Mark> {
        let (_, cpu_s) = process(plan.operator_pid)?;
        Ok(Mark { at: Instant::now(), counts: Counts::of(client, kinds).await?, cpu_s })
    }

    pub(super) async fn since(&self, plan: &Plan, client: &Client) -> Result<Span> {
        let now = Mark::now(plan, client, self.counts.kinds).await?;
        let seconds = now.at.duration_since(self.at).as_secs_f64();
        Ok(Span { seconds, cpu_s: now.cpu_s - self.cpu_s, counts: now.counts.since(&self.counts) })
    }

    /// Waits until this number of requests of a kind has been made since the mark, and answers after how many seconds.
    pub(super) async fn until(&self, client: &Client, kind: &str, count: usize) -> Result<f64> {
        wait(&format!("{count} {kind}"), || async {
            let Ok(counts) = Counts::of(client, self.counts.kinds).await else { return false };
            counts.since(&self.counts).get(kind) >= count as f64
        })
        .await?;
        Ok(self.at.elapsed().as_secs_f64())
    }
}

impl Span {
    /// Processor seconds in a second.
    pub(super) fn cores(&self) -> f64 {
        self.cpu_s / self.seconds
    }
}

/// What the operator does while nothing changes.
pub(super) async fn idle(plan: &Plan, client: &Client, kinds: &'static [Kind]) -> Result<Span> {
    let mark = Mark::now(plan, client, kinds).await?;
    tokio::time::sleep(Duration::from_secs(plan.idle_s)).await;
    mark.since(plan, client).await
}

/// Waits until the operator leads.
pub(super) async fn leads(plan: &Plan) -> Result<()> {
    let leads = || async { page(&plan.metrics, "/readyz").await.is_ok_and(|text| text.contains("leading")) };
    wait("the operator to lead", leads).await
}

fn http_get(path: &str) -> Result<axum::http::Request<Vec<u8>>> {
    Ok(axum::http::Request::get(path).body(Vec::new())?)
}

/// Milliseconds within which half, all but one in a hundred, and all of these were.
pub(super) fn spread(times: &mut [Duration]) -> Value {
    times.sort_unstable();
    let at = |part: f64| {
        let index = ((times.len().saturating_sub(1)) as f64 * part).round() as usize;
        times.get(index).map(|time| (time.as_secs_f64() * 1e4).round() / 10.0)
    };
    json!({"count": times.len(), "p50_ms": at(0.5), "p99_ms": at(0.99), "max_ms": at(1.0)})
}

/// A process's largest memory in MiB and the processor seconds it has used.
pub(super) fn process(pid: u32) -> Result<(f64, f64)> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).ok_or("no VmHWM")?;
    let kib: f64 = peak.trim().trim_end_matches("kB").trim().parse()?;
    let stat = ProcessStat::of(i32::try_from(pid)?).ok_or("no such process")?;
    let per_second = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK)?.unwrap_or(100) as f64;
    Ok((kib / 1024.0, stat.cpu_ticks as f64 / per_second))
}
