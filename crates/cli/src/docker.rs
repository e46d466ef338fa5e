//! `run --runtime docker`: the engine is the parent of a container, so the job is submitted and its output followed.

use crate::jobs::Output;
use crate::link::Link;
use crate::notice::notice;
use crate::outlook;
use crate::supervise::signals::Signals;
use anyhow::{Context, Result};
use gainshare_daemon::api::types::JobInfo;
use gainshare_daemon::spec::JobSpec;
use nix::sys::signal::Signal;
use std::collections::BTreeMap;
use std::time::Duration;

/// Time between two checks whether the job has ended, once its output has.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// How long a container may take to end after the first Ctrl-C, and after the second.
const PATIENCE_S: f64 = 10.0;
const HASTE_S: f64 = 0.0;

/// What the wait for more output ended with.
enum Next {
    Ended(Result<()>),
    Signalled,
}

pub fn run(link: &Link, spec: JobSpec) -> Result<u8> {
    let signals = Signals::install().context("cannot catch signals")?;
    let mut jobs = link.call(link.client.submit(vec![spec], BTreeMap::new()))?;
    let job = jobs.pop().context("the daemon took the job but did not say which it is")?;
    outlook::print(std::slice::from_ref(&job));
    let id = job.id.to_string();
    let mut output = Output { job: id.clone(), offset: 0 };
    let mut stops = 0;
    loop {
        let next = link.call(async {
            tokio::select! {
                ended = output.copy(link, true) => Next::Ended(ended),
                _ = signals.arrived() => Next::Signalled,
            }
        });
        match next {
            Next::Ended(Ok(())) => break,
            Next::Ended(Err(error)) => output.mend(link, error)?,
            Next::Signalled => {
                while let Some(signal) = signals.next() {
                    if matches!(signal, Signal::SIGINT | Signal::SIGTERM | Signal::SIGHUP | Signal::SIGQUIT) {
                        stops += 1;
                        link.call(link.client.stop(&id, if stops > 1 { HASTE_S } else { PATIENCE_S }))?;
                    }
                }
            }
        }
    }
    loop {
        let job = link.call(link.client.job(&id))?;
        if job.state.is_final() {
            return Ok(exit_code(&job));
        }
        std::thread::sleep(CHECK_INTERVAL);
    }
}

fn exit_code(job: &JobInfo) -> u8 {
    match (job.exit_code, job.signal) {
        (Some(code), _) => code as u8,
        (None, Some(signal)) => 128u8.wrapping_add(signal as u8),
        (None, None) => {
            if let Some(reason) = &job.reason {
                notice!("{}: {}", job.name, gainshare_figures::terminal::printable(&reason.text));
            }
            1
        }
    }
}
