//! `up` and `down`: the daemon's life.
//!
//! Settings come from flags, else from the settings file, else from the defaults. While a daemon
//! runs, what it runs with is kept in the state directory, so that one started on demand after a
//! crash goes on with the same slots, policy and so on; a clean end removes the record.

use crate::args::{ModeChoice, NormaliseChoice, ReactChoice, UpArgs};
use crate::link::{self, DaemonState, Link};
use anyhow::{Context, Result, bail};
use gainshare_core::signal::Normalisation;
use gainshare_daemon::config::{DaemonConfig, React};
use gainshare_daemon::daemon;
use gainshare_daemon::paths::Paths;
use gainshare_figures::terminal::Printer;
use gainshare_limits::LimitMode;
use gainshare_limits::process::ProcessStat;
use serde_json::json;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::prelude::*;

/// How long a daemon that was started on demand stays without a job.
const ON_DEMAND_IDLE: Duration = Duration::from_secs(600);

/// A daemon that ends stops its jobs first if asked to, and they may use their grace.
const DOWN_TIMEOUT: Duration = Duration::from_secs(60);

/// Logs go to standard error. `GAINSHARE_LOG` sets the level.
fn start_logging() {
    let chosen: Option<Targets> = std::env::var("GAINSHARE_LOG").ok().and_then(|text| text.parse().ok());
    let filter = chosen.unwrap_or_else(|| Targets::new().with_default(LevelFilter::INFO));
    let is_terminal = std::io::stderr().is_terminal();
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(is_terminal).with_target(false);
    tracing_subscriber::registry().with(lines.with_filter(filter)).init();
}

pub fn up(args: &UpArgs, out: &Printer) -> Result<u8> {
    let config = settings(args)?;
    let paths = config.paths();
    config.validate()?;
    if args.detach {
        return up_detached(args, paths, out);
    }
    start_logging();
    let record = Record(paths.state.join(Record::NAME));
    let text = toml::to_string(&config).context("cannot write the settings as TOML")?;
    daemon::run(config, |ready| {
        record.write(&text);
        tracing::info!(pid = ready.pid, jobs = ready.live_jobs, "ready at {}", ready.socket.display());
    })?;
    record.remove();
    Ok(0)
}

fn up_detached(args: &UpArgs, paths: Paths, out: &Printer) -> Result<u8> {
    let link = Link::new(paths)?;
    let arguments = foreground_arguments(&link.paths, args.config.as_ref());
    let started = link::start_in_background(&link, &arguments)?;
    if !started && !args.on_demand {
        let pid = link.call(link.client.health()).map_or(0, |health| health.pid);
        bail!("a daemon is already running (pid {pid}); end it with `gainshare down` first");
    }
    if !args.on_demand {
        let health = link.call(link.client.health())?;
        if out.is_json() {
            out.json(&health)?;
        } else {
            out.text(&format!("daemon is up (pid {}, policy {})\n", health.pid, health.policy))?;
        }
    }
    Ok(0)
}

/// What this process was asked for, without what only concerns the way of starting; with absolute paths, because a
/// detached daemon lives in `/`.
fn foreground_arguments(paths: &Paths, config: Option<&PathBuf>) -> Vec<std::ffi::OsString> {
    let mut arguments: Vec<std::ffi::OsString> = Vec::new();
    let mut given = std::env::args_os().skip_while(|a| a != "up").skip(1);
    while let Some(argument) = given.next() {
        let text = argument.to_string_lossy();
        let name = text.split('=').next().unwrap_or_default();
        match name {
            "--detach" | "-d" => {}
            "--state-dir" | "--runtime-dir" | "--config" | "-o" | "--output" => {
                if !text.contains('=') {
                    given.next();
                }
            }
            _ => arguments.push(argument),
        }
    }
    for (flag, value) in [("--state-dir", &paths.state), ("--runtime-dir", &paths.runtime)] {
        arguments.extend([flag.into(), value.into()]);
    }
    if let Some(config) = config {
        arguments.extend(["--config".into(), std::path::absolute(config).unwrap_or_else(|_| config.clone()).into()]);
    }
    arguments
}

fn settings(args: &UpArgs) -> Result<DaemonConfig> {
    let directories = Paths::find(args.state_dir.clone(), args.runtime_dir.clone());
    let interrupted = Some(directories.state.join(Record::NAME)).filter(|path| args.on_demand && path.exists());
    let default_file = DaemonConfig::default_file().filter(|file| file.exists());
    let file = args.config.clone().or(interrupted.clone()).or(default_file);
    let mut config = match file {
        Some(file) => DaemonConfig::load(&file)?,
        None => DaemonConfig::default(),
    };
    if args.on_demand && interrupted.is_none() {
        config.idle_exit = config.idle_exit.or(Some(ON_DEMAND_IDLE));
    }
    overlay(&mut config, args);
    Ok(config)
}

fn overlay(config: &mut DaemonConfig, args: &UpArgs) {
    fn set<T: Clone>(field: &mut T, flag: Option<T>) {
        if let Some(value) = flag {
            *field = value;
        }
    }
    set(&mut config.policy, args.policy);
    set(
        &mut config.mode,
        args.mode.map(|choice| match choice {
            ModeChoice::Weight => LimitMode::Weight,
            ModeChoice::Quota => LimitMode::Quota,
            ModeChoice::Cores => LimitMode::Cores,
        }),
    );
    set(
        &mut config.react,
        args.react.map(|choice| match choice {
            ReactChoice::Tick => React::Tick,
            ReactChoice::Sample => React::Sample,
        }),
    );
    let normalise = args.normalise.map(|choice| match choice {
        NormaliseChoice::Relative => Normalisation::Relative,
        NormaliseChoice::Raw => Normalisation::Raw,
    });
    config.normalise = normalise.or(config.normalise);
    config.aim = args.aim.or(config.aim);
    config.alpha = args.alpha.or(config.alpha);
    config.beta = args.beta.or(config.beta);
    config.interval = args.interval.or(config.interval);
    config.slots = args.slots.or(config.slots);
    config.cores = args.cores.or(config.cores);
    config.expect = args.expect.or(config.expect);
    set(&mut config.runtime, args.runtime.as_ref().map(|choices| choices.iter().map(|&c| c.into()).collect()));
    config.gpu |= args.gpu;
    config.docker_all |= args.docker_all;
    config.docker_socket = args.docker_socket.clone().or(config.docker_socket.take());
    set(&mut config.listen, args.listen);
    config.state_dir = args.state_dir.clone().or(config.state_dir.take());
    config.runtime_dir = args.runtime_dir.clone().or(config.runtime_dir.take());
    config.idle_exit = args.idle_exit.or(config.idle_exit);
    set(&mut config.lease, args.lease);
}

/// What the running daemon runs with, on disk.
struct Record(PathBuf);

impl Record {
    const NAME: &str = "running.toml";

    /// Only the daemon that has the lock may write it. Not having it only matters after a crash; a
    /// full disk is reported by the journal, in better words.
    fn write(&self, settings: &str) {
        let _ = std::fs::write(&self.0, settings);
    }

    fn remove(self) {
        let _ = std::fs::remove_file(self.0);
    }
}

/// Whether the process still runs; one that ended and waits for its parent to notice does not.
fn is_running(pid: u32) -> bool {
    i32::try_from(pid).ok().and_then(ProcessStat::of).is_some_and(|stat| !stat.has_ended())
}

pub fn down(stop_jobs: bool, link: &Link, out: &Printer) -> Result<u8> {
    let say = |was_running: bool, text: &str| {
        if out.is_json() { out.json(&json!({"was_running": was_running})) } else { out.text(&format!("{text}\n")) }
    };
    match link.probe() {
        DaemonState::Running => {}
        DaemonState::Silent => return Err(link.silent_daemon()),
        DaemonState::Absent => {
            say(false, "no daemon is running")?;
            return Ok(0);
        }
    }
    let health = link.call(link.client.health())?;
    link.call(link.client.shutdown(stop_jobs))?;
    let start = Instant::now();
    // Not only until it no longer answers: `gainshare up` right after this must find the way free.
    while is_running(health.pid) {
        if start.elapsed() > DOWN_TIMEOUT {
            bail!(
                "the daemon (pid {}) is still running after {} s; see its log {}",
                health.pid,
                DOWN_TIMEOUT.as_secs(),
                link.paths.daemon_log().display()
            );
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let left = match health.live_jobs {
        0 => String::new(),
        n if stop_jobs => format!("; stopped {n} job(s)"),
        n => format!("; {n} job(s) go on without limits"),
    };
    say(true, &format!("daemon is down{left}"))?;
    Ok(0)
}
