//! The keeper: a small process that stops and continues jobs for the daemon, and releases all of them when
//! the daemon is gone.
//!
//! **Problem.** A stopped job stays stopped if the process that should continue it is killed. So the daemon
//! itself must never stop a job.
//!
//! **Approach.** The daemon starts a keeper and writes lines to its input. The keeper stops and continues the
//! jobs' process groups by the clock and sets their scheduling priority. When its input ends (the daemon
//! ended, for whatever reason) or is silent for [`LEASE`] (the daemon hangs or is stopped), the keeper
//! continues every job and restores priorities; at the end of its input it exits. It ignores the signals that
//! a terminal or a shutdown sends to every process, so that it outlives the daemon for as long as that takes.
//! If the keeper itself is killed, the daemon continues the jobs at its next reading, within about a second,
//! and starts another keeper. Only if both are killed at the same moment does a job depend on the last
//! safeguard: its leader requested SIGCONT for the death of its parent (see
//! [`crate::process::start::enter`]).
//!
//! **Lines.** `set KEY OFFSET_US ON_US NICE PERIOD_US PID:START…` holds a job. In each period the job runs for `ON_US`
//! from `OFFSET_US` on. `PID:START` are the leaders of its process groups. `free KEY` releases the job. Every line
//! shows that the daemon is alive, also the empty message `beat`.

use super::super::identity::Identity;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// Long enough that the signals cost nothing, short enough to be invisible in a progress bar.
pub(super) const PERIOD_US: u64 = 200_000;

/// Periods that a line may ask for.
const PERIODS_US: std::ops::RangeInclusive<u64> = 20_000..=1_000_000;

/// After this time without a line the daemon counts as dead. It reads its jobs, and so writes a line, every second.
pub(super) const LEASE: Duration = Duration::from_secs(4);

/// The kernel allows one change of such a priority in 0.1 s, for all ordinary users together.
const NICE_PAUSE: Duration = Duration::from_millis(110);

/// Runs the keeper on standard input until the input ends. Meant to be the only work of its process.
pub fn run() -> std::io::Result<()> {
    let input = std::io::stdin();
    let mut keeper = Keeper::new(Instant::now());
    let mut pending: Vec<u8> = Vec::new();
    loop {
        let wait = keeper.tick(Instant::now());
        let mut fds = [PollFd::new(input.as_fd(), PollFlags::POLLIN)];
        // Rounded up: waking before the edge would mean polling until it comes.
        let wait_ms = u16::try_from(wait.as_micros().div_ceil(1000)).unwrap_or(u16::MAX);
        match poll(&mut fds, PollTimeout::from(wait_ms)) {
            Ok(0) | Err(Errno::EINTR) => continue,
            Ok(_) => {}
            Err(error) => {
                keeper.release_all();
                return Err(error.into());
            }
        }
        let mut chunk = [0u8; 4096];
        match nix::unistd::read(input.as_fd(), &mut chunk) {
            Ok(0) | Err(Errno::EIO) => break,
            Ok(n) => pending.extend_from_slice(&chunk[..n]),
            Err(_) => continue,
        }
        while let Some(end) = pending.iter().position(|&b| b == b'\n') {
            let line: Vec<u8> = pending.drain(..=end).collect();
            keeper.handle_line(&String::from_utf8_lossy(&line), Instant::now());
        }
        // The daemon writes lines of a few hundred bytes; a longer line is not from the daemon.
        if pending.len() > 1 << 20 {
            break;
        }
    }
    keeper.release_all();
    Ok(())
}

struct HeldJob {
    period_us: u64,
    offset_us: u64,
    on_us: u64,
    nice: i32,
    leaders: Vec<Identity>,
    stopped: bool,
    nice_is_set: bool,
}

struct Keeper {
    start: Instant,
    last_line_at: Instant,
    held: BTreeMap<String, HeldJob>,
    next_nice: Instant,
}

impl Keeper {
    fn new(now: Instant) -> Keeper {
        Keeper { start: now, last_line_at: now, held: BTreeMap::new(), next_nice: now }
    }

    fn handle_line(&mut self, line: &str, now: Instant) {
        self.last_line_at = now;
        let mut words = line.split_ascii_whitespace();
        match (words.next(), words.next()) {
            (Some("set"), Some(key)) => {
                let Some(mut new) = parse_held(words) else { return };
                if let Some(old) = self.held.get(key) {
                    new.stopped = old.stopped;
                    new.nice_is_set = old.nice == new.nice && old.nice_is_set;
                    // A group that is no longer named must not stay stopped.
                    if old.stopped {
                        old.leaders
                            .iter()
                            .filter(|l| !new.leaders.contains(l))
                            .for_each(|l| signal(l, Signal::SIGCONT));
                        new.leaders
                            .iter()
                            .filter(|l| !old.leaders.contains(l))
                            .for_each(|l| signal(l, Signal::SIGSTOP));
                    }
                }
                self.held.insert(key.to_owned(), new);
            }
            (Some("free"), Some(key)) => {
                if let Some(held) = self.held.remove(key) {
                    release(&held);
                }
            }
            _ => {}
        }
    }

    /// Sends the signals that are due and returns the time until the next one.
    fn tick(&mut self, now: Instant) -> Duration {
        let silent = now.saturating_duration_since(self.last_line_at);
        if silent >= LEASE && !self.held.is_empty() {
            self.release_all();
        }
        let now_us = now.duration_since(self.start).as_micros() as u64;
        let mut wait = Duration::from_secs(1);
        for held in self.held.values_mut() {
            let period_us = held.period_us;
            if held.on_us < period_us {
                let phase = (now_us + period_us - held.offset_us) % period_us;
                let off = phase >= held.on_us;
                if off != held.stopped {
                    let which = if off { Signal::SIGSTOP } else { Signal::SIGCONT };
                    held.leaders.iter().for_each(|leader| signal(leader, which));
                    held.stopped = off;
                }
                let edge = if off { period_us } else { held.on_us };
                wait = wait.min(Duration::from_micros(edge - phase));
            } else if held.stopped {
                held.leaders.iter().for_each(|leader| signal(leader, Signal::SIGCONT));
                held.stopped = false;
            }
            if !held.nice_is_set {
                if now >= self.next_nice {
                    held.nice_is_set = held.leaders.first().is_none_or(|leader| set_group_nice(leader, held.nice));
                    self.next_nice = now + NICE_PAUSE;
                }
                wait = wait.min(NICE_PAUSE);
            }
        }
        wait
    }

    fn release_all(&mut self) {
        for held in std::mem::take(&mut self.held).into_values() {
            release(&held);
        }
    }
}

fn parse_held<'w>(mut words: impl Iterator<Item = &'w str>) -> Option<HeldJob> {
    let offset_us = words.next()?.parse::<u64>().ok()?;
    let on_us = words.next()?.parse::<u64>().ok()?;
    let nice = words.next()?.parse::<i32>().ok()?.clamp(0, 19);
    let period_us = words.next()?.parse::<u64>().ok()?.clamp(*PERIODS_US.start(), *PERIODS_US.end());
    let (offset_us, on_us) = (offset_us % period_us, on_us.min(period_us));
    let leaders = words
        .filter_map(|word| {
            let (pid, start) = word.split_once(':')?;
            Some(Identity { pid: pid.parse().ok()?, start_ticks: start.parse().ok()? })
        })
        .collect();
    Some(HeldJob { period_us, offset_us, on_us, nice, leaders, stopped: false, nice_is_set: false })
}

/// Signals a process group, unless its number belongs to another process by now. (While other processes of
/// the group live, the kernel does not reuse the number of a dead leader.)
fn signal(leader: &Identity, which: Signal) {
    if leader.pid > 1 && !leader.was_reused() {
        let _ = killpg(Pid::from_raw(leader.pid), which);
    }
}

fn release(held: &HeldJob) {
    held.leaders.iter().for_each(|leader| signal(leader, Signal::SIGCONT));
    if held.nice != 0
        && let Some(leader) = held.leaders.first()
    {
        let start = Instant::now();
        while !set_group_nice(leader, 0) && start.elapsed() < Duration::from_secs(2) {
            std::thread::sleep(NICE_PAUSE);
        }
    }
}

/// Sets the priority of the leader's session as a whole. `false`: the kernel asks for a later retry.
fn set_group_nice(leader: &Identity, nice: i32) -> bool {
    if leader.was_reused() {
        return true;
    }
    match std::fs::write(format!("/proc/{}/autogroup", leader.pid), nice.to_string()) {
        Err(error) => error.raw_os_error() != Some(libc::EAGAIN),
        Ok(()) => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_parsed_or_ignored() {
        let now = Instant::now();
        let mut keeper = Keeper::new(now);
        for garbage in
            ["", "beat", "set", "set a", "set a x y z", "set a 1 2", "set a 1 2 3", "free", "free unknown", "\u{fffd}"]
        {
            keeper.handle_line(garbage, now);
            assert!(keeper.held.is_empty(), "{garbage}");
        }
        keeper.handle_line("set a 10 200000 7 200000 2147483646:1\n", now);
        let held = &keeper.held["a"];
        assert_eq!((held.offset_us, held.on_us, held.nice, held.leaders.len()), (10, PERIOD_US, 7, 1));
        keeper.handle_line("set a 250000 50000 0 0", now);
        let held = &keeper.held["a"];
        assert_eq!(
            (held.period_us, held.offset_us, held.on_us),
            (20_000, 10_000, 20_000),
            "within a period that works"
        );
        keeper.handle_line("free a", now);
        assert!(keeper.held.is_empty());
    }

    #[test]
    fn silence_releases_every_job() {
        let now = Instant::now();
        let mut keeper = Keeper::new(now);
        keeper.handle_line("set a 0 100000 0 200000", now);
        keeper.tick(now + LEASE / 2);
        assert_eq!(keeper.held.len(), 1);
        keeper.tick(now + LEASE);
        assert!(keeper.held.is_empty());
    }
}
