//! Stops and continues jobs for a part of the time, in periods of 0.1 s, whatever shares their CPU.
//!
//! **Problem.** A GPU has no weights, and the launches of some programs cannot be caught. Such a program works for a
//! part of the time only if it is stopped for the rest of it. A process that stops jobs must not die before it has
//! continued them.
//!
//! **How.** A [`super::keeper`] of its own sends the signals. It continues all jobs when the daemon is gone or silent.
//! It is started with the first job that is to be paced. If the keeper itself dies, the next call of [`Pacer::hold`]
//! continues the jobs and starts another.
//!
//! **Properties.** `a_stopped_job_goes_on_when_the_daemon_is_killed` (`crates/daemon/tests/gpu.rs`).

use super::duty::Window;
use super::link::KeeperLink;
use super::table::ProcessTable;
use super::{Identity, groups, keeper_line, signal_group};
use nix::sys::signal::Signal;
use std::ffi::OsString;
use std::io;
use std::time::Instant;

/// Long enough that a job launches work between two stops, short enough that its GPU is seldom left idle.
const PERIOD_US: u64 = 100_000;

/// A job that works for less than this in each period would hardly get anything done.
const LEAST_PART: f64 = 0.05;

/// A job that works for a part of the time.
#[derive(Debug, Clone, PartialEq)]
pub struct PacedJob {
    pub key: String,
    pub leader: Identity,
    /// 0…1.
    pub part: f64,
}

/// See the module documentation.
#[derive(Debug)]
pub struct Pacer {
    /// Runs `keeper::run` and nothing else.
    command: Vec<OsString>,
    link: Option<KeeperLink>,
    /// The process groups that may be stopped now.
    held: Vec<Identity>,
    table: ProcessTable,
}

impl Pacer {
    pub fn new(command: Vec<OsString>) -> Pacer {
        Pacer { command, link: None, held: Vec::new(), table: ProcessTable::default() }
    }

    /// Paces exactly these jobs from now on. To be called every second while there are any; without that the keeper
    /// lets all jobs run.
    pub fn hold(&mut self, jobs: &[PacedJob]) -> io::Result<()> {
        if jobs.is_empty() && self.held.is_empty() {
            return Ok(());
        }
        if !jobs.is_empty() {
            self.table.refresh(Instant::now());
        }
        let leaders: Vec<i32> = jobs.iter().map(|job| job.leader.pid).collect();
        let mut members = self.table.members(&leaders);
        let mut held = Vec::new();
        let mut lines = Vec::with_capacity(jobs.len());
        for (i, job) in jobs.iter().enumerate() {
            let of_job = groups(job.leader, &members.remove(&job.leader.pid).unwrap_or_default());
            // Jobs work one after the other where that is possible.
            let offset = i as f64 / jobs.len() as f64;
            let window = Window { offset, on: job.part.clamp(LEAST_PART, 1.0) };
            lines.push((job.key.clone(), keeper_line(&job.key, PERIOD_US, window, 0, &of_job)));
            held.extend(of_job);
        }
        if let Some(link) = &mut self.link {
            if link.send(&lines).is_ok() {
                self.held = held;
                return Ok(());
            }
            // The keeper is dead. The jobs that it had stopped must run, before anything else.
            self.link = None;
            self.held.drain(..).for_each(|group| continue_group(&group));
        }
        let mut link = KeeperLink::start(&self.command)?;
        link.send(&lines)?;
        (self.link, self.held) = (Some(link), held);
        Ok(())
    }
}

/// Continues a process group that an earlier daemon may have left stopped.
pub fn continue_group(leader: &Identity) {
    signal_group(leader, Signal::SIGCONT);
}
