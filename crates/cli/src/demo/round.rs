//! One round: a daemon of its own, the jobs of the schedule, and everything they did.

use super::outcome::{JobOutcome, Outcome};
use super::schedule::DemoJob;
use super::screen::Screen;
use crate::system;
use anyhow::{Context, Result, bail};
use gainshare_core::policy::Preset;
use gainshare_daemon::api::client::Client;
use gainshare_daemon::api::types::{JobInfo, JobState};
use gainshare_daemon::paths::Paths;
use gainshare_daemon::spec::JobSpec;
use nix::sys::signal::Signal;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

#[derive(Debug, Clone, Copy)]
pub(super) struct Settings {
    pub(super) policy: Preset,
    pub(super) cores: usize,
    pub(super) alpha: f64,
    /// About how long the round will take.
    pub(super) length_s: f64,
}

/// The thesis decides every 20 s in rounds of 394 s.
const DECISIONS_PER_ROUND: f64 = 394.0 / 20.0;

/// How often the screen is drawn and the daemon asked.
const BEAT: Duration = Duration::from_millis(200);

/// Plays a round; `None` if the user interrupted it.
pub(super) async fn play(settings: &Settings, jobs: &[DemoJob], title: &str) -> Result<Option<Outcome>> {
    let folder = tempfile::Builder::new().prefix("gainshare-demo-").tempdir()?;
    let paths = Paths::find(Some(folder.path().join("state")), Some(folder.path().join("run")));
    let mut daemon = Daemon::start(settings, &paths)?;
    let client = Client::new(paths.socket());
    daemon.wait_until_up(&client).await?;
    let mut screen = Screen::open(title, settings.length_s);
    let played = tokio::select! {
        played = watch(&client, jobs, &mut screen) => played.map(Some),
        () = broken_off() => Ok(None),
    };
    screen.close();
    let stopped = client.shutdown(true).await;
    daemon.wait()?;
    let played = played?;
    stopped.context("the demo's daemon did not end well")?;
    Ok(played.map(|jobs| Outcome { policy: settings.policy.name(), jobs }))
}

/// Until the user presses Ctrl-C, closes the terminal, or asks us to end.
async fn broken_off() {
    use tokio::signal::unix::{SignalKind, signal};
    let wait = async |kind| match signal(kind) {
        Ok(mut signals) => {
            signals.recv().await;
        }
        // Without a handler the signal ends us, which is what it is for.
        Err(_) => std::future::pending().await,
    };
    tokio::select! {
        () = wait(SignalKind::interrupt()) => {}
        () = wait(SignalKind::terminate()) => {}
        () = wait(SignalKind::hangup()) => {}
    }
}

/// Submits each job when its time has come, and follows all of them to their ends.
async fn watch(client: &Client, jobs: &[DemoJob], screen: &mut Screen) -> Result<Vec<JobOutcome>> {
    let began = Instant::now();
    let program = std::env::current_exe()?.display().to_string();
    let mut outcomes: Vec<JobOutcome> = Vec::new();
    let mut origin_s: Vec<f64> = Vec::new();
    let environment: std::collections::BTreeMap<String, String> = std::env::vars().collect();
    loop {
        let now = began.elapsed().as_secs_f64();
        if let Some(job) = jobs.get(outcomes.len()).filter(|j| now >= j.arrives_s) {
            let command = std::iter::once(program.clone()).chain(job.words.iter().cloned()).collect();
            let spec = JobSpec { name: Some(job.name.to_owned()), command, ..JobSpec::default() };
            let info = client.submit(vec![spec], environment.clone()).await?;
            let info = info.into_iter().next().context("the daemon took the job but named none")?;
            // The daemon's own clock, so that arrival and end come from the same place.
            origin_s.push(info.submitted_s - now);
            outcomes.push(JobOutcome { name: job.name.to_owned(), arrived_s: now, ..JobOutcome::default() });
        }
        let known = client.jobs(true).await?;
        let mut live = 0;
        for (outcome, origin_s) in outcomes.iter_mut().zip(&origin_s) {
            let info = known.iter().find(|j| j.name == outcome.name).context("the daemon forgot a job")?;
            live += usize::from(observe(outcome, info, now, *origin_s)?);
        }
        screen.draw(now, &outcomes);
        if live == 0 && outcomes.len() == jobs.len() {
            break;
        }
        tokio::time::sleep(BEAT).await;
    }
    for (outcome, origin_s) in outcomes.iter_mut().zip(&origin_s) {
        let history = client.samples(&outcome.name, 0.0).await?;
        let offset = history.origin_s - origin_s;
        outcome.losses = history.samples.iter().map(|s| (s.time_s + offset, s.value)).collect();
    }
    Ok(outcomes)
}

/// Notes what the daemon says of a job; whether it still lives.
fn observe(outcome: &mut JobOutcome, info: &JobInfo, now: f64, origin_s: f64) -> Result<bool> {
    if let Some(metric) = &info.metric
        && outcome.losses.last().is_none_or(|(_, value)| *value != metric.value)
    {
        outcome.losses.push((now, metric.value));
    }
    if !info.state.is_final() {
        if let Some(share) = info.share {
            outcome.shares.push((now, share));
        }
        return Ok(true);
    }
    if info.state != JobState::Done {
        let reason = info.reason.as_ref().map_or("", |r| r.text.as_str());
        bail!("{} ended as {}: {reason}; its output is in {}", info.name, info.state.name(), info.dir);
    }
    outcome.ended_s = info.ended_s.unwrap_or(now + origin_s) - origin_s;
    Ok(false)
}

/// The daemon of a round. Killed if it is dropped while it runs.
struct Daemon {
    child: Child,
    log: std::path::PathBuf,
}

impl Daemon {
    fn start(settings: &Settings, paths: &Paths) -> Result<Daemon> {
        let log = paths.state.with_file_name("daemon.log");
        let file = std::fs::File::create(&log)?;
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("up").arg("--state-dir").arg(&paths.state).arg("--runtime-dir").arg(&paths.runtime);
        command.args(["--listen", "none", "--cores", &settings.cores.to_string(), "--policy", settings.policy.name()]);
        if settings.policy == Preset::Flowcon {
            let interval = (settings.length_s / DECISIONS_PER_ROUND * 1000.0).round();
            command.args(["--alpha", &settings.alpha.to_string(), "--interval", &format!("{interval}ms")]);
        }
        // A group of its own: Ctrl-C is for us, and we end the round in order.
        command.process_group(0).stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        // If we are killed, no other process would end it.
        system::end_with_parent(&mut command, Signal::SIGTERM);
        let child = command.spawn().context("cannot start the demo's daemon")?;
        Ok(Daemon { child, log })
    }

    async fn wait_until_up(&mut self, client: &Client) -> Result<()> {
        let began = Instant::now();
        while client.health().await.is_err() {
            if self.child.try_wait()?.is_some() || began.elapsed() > Duration::from_secs(10) {
                let log = std::fs::read_to_string(&self.log).unwrap_or_default();
                bail!("the demo's daemon did not come up: {}", log.lines().last().unwrap_or("it logged nothing"));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    fn wait(&mut self) -> Result<()> {
        let began = Instant::now();
        while self.child.try_wait()?.is_none() {
            if began.elapsed() > Duration::from_secs(10) {
                self.child.kill()?;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Already reaped in the good case; then this does nothing.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
