//! The identity of a process: pid and start time.
//!
//! The kernel gives a pid to another process once the first is gone; the start times (in clock ticks since
//! boot) tell the two apart. Every signal to a process that was not started a moment ago goes through this
//! check.
//!
//! A [`ProcessWatch`] answers the same question again and again by one cheap call.

use crate::system;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::{Deserialize, Serialize};
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Identity {
    pub pid: i32,
    /// Clock ticks after boot, field 22 of `/proc/PID/stat`.
    pub start_ticks: u64,
}

impl Identity {
    /// The identity of a process that runs now (or is a zombie: its pid is still taken).
    pub fn of(pid: i32) -> Option<Identity> {
        ProcessStat::of(pid).map(|stat| Identity { pid, start_ticks: stat.start_ticks })
    }

    /// Whether exactly this process still runs. A zombie does not run.
    pub fn is_alive(&self) -> bool {
        ProcessStat::of(self.pid).is_some_and(|stat| stat.start_ticks == self.start_ticks && !stat.has_ended())
    }

    /// Whether the pid was given to another process since.
    pub fn was_reused(&self) -> bool {
        ProcessStat::of(self.pid).is_some_and(|stat| stat.start_ticks != self.start_ticks)
    }
}

/// A longer line of parents is a loop.
const MAX_ANCESTORS: usize = 64;

/// The sessions of a process and of its ancestors, the nearest first. A job's leader leads one of them, unless the
/// process left the session and its parent has ended. Empty if there is no such process.
pub fn sessions_of(pid: i32) -> Vec<i32> {
    let mut sessions = Vec::new();
    let mut at = pid;
    for _ in 0..MAX_ANCESTORS {
        let Some(stat) = ProcessStat::of(at) else { break };
        if !sessions.contains(&stat.session) {
            sessions.push(stat.session);
        }
        if stat.parent <= 1 {
            break;
        }
        at = stat.parent;
    }
    sessions
}

/// A process that is asked every second whether it still runs. The kernel shows the end of a process through a
/// descriptor of it, for a fraction of what `/proc/PID/stat` costs.
#[derive(Debug)]
pub struct ProcessWatch {
    identity: Identity,
    /// Missing where the kernel gives none (before 5.3, or no descriptor is left): then `/proc` is read.
    fd: Option<OwnedFd>,
}

impl ProcessWatch {
    pub fn new(identity: Identity) -> ProcessWatch {
        let opened = if identity.pid > 0 { system::open_process(identity.pid).ok() } else { None };
        // Asked after the descriptor was opened: the process that has the pid now may be another one.
        ProcessWatch { identity, fd: opened.filter(|_| identity.is_alive()) }
    }

    pub fn identity(&self) -> Identity {
        self.identity
    }

    /// Whether exactly this process still runs. A process of which a thread is left runs.
    pub fn is_alive(&self) -> bool {
        let Some(fd) = &self.fd else { return self.identity.is_alive() };
        let mut fds = [PollFd::new(fd.as_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::ZERO).map_or_else(|_| self.identity.is_alive(), |ended| ended == 0)
    }
}

/// The fields of `/proc/PID/stat` that our programs use. No other code of ours reads that file, except xtask, which
/// depends on none of our crates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessStat {
    pub state: char,
    pub parent: i32,
    pub group: i32,
    pub session: i32,
    /// User and system time.
    pub cpu_ticks: u64,
    /// The same of children that ended and were waited for.
    pub children_cpu_ticks: u64,
    /// Clock ticks after boot.
    pub start_ticks: u64,
}

impl ProcessStat {
    /// A process that runs now, or a zombie: its pid is still taken.
    pub fn of(pid: i32) -> Option<ProcessStat> {
        if pid <= 0 {
            return None;
        }
        ProcessStat::read(Path::new(&format!("/proc/{pid}/stat")))
    }

    /// The process whose file this is.
    pub(crate) fn read(file: &Path) -> Option<ProcessStat> {
        // The line is some 400 bytes long, and the kernel gives all of it to the first read.
        let mut line = [0; 1024];
        let length = std::fs::File::open(file).ok()?.read(&mut line).ok()?;
        ProcessStat::parse(&String::from_utf8_lossy(&line[..length]))
    }

    /// Whether the process has ended, and its parent has not been told yet.
    pub fn has_ended(&self) -> bool {
        matches!(self.state, 'Z' | 'X')
    }

    /// The program's name stands in parentheses and may itself hold blanks and parentheses: fields count from the
    /// last one.
    pub(crate) fn parse(text: &str) -> Option<ProcessStat> {
        let mut fields = text.rsplit_once(')')?.1.split_ascii_whitespace();
        let state = fields.next()?.chars().next()?;
        let parent = fields.next()?.parse().ok()?;
        let group = fields.next()?.parse().ok()?;
        let session = fields.next()?.parse().ok()?;
        // Fields 14 to 17 are utime, stime, cutime, cstime; the next one taken here is field 7.
        let mut times = [0u64; 4];
        for (time, field) in times.iter_mut().zip(fields.by_ref().skip(7)) {
            *time = field.parse::<i64>().ok()?.max(0) as u64;
        }
        let [user, system, user_of_children, system_of_children] = times;
        let cpu_ticks = user.saturating_add(system);
        let children_cpu_ticks = user_of_children.saturating_add(system_of_children);
        let start_ticks = fields.nth(4)?.parse().ok()?;
        Some(ProcessStat { state, parent, group, session, cpu_ticks, children_cpu_ticks, start_ticks })
    }
}

/// Clock ticks in one second: 100 on every Linux of today, but the kernel may have another rate.
#[cfg(feature = "fallback")]
pub(crate) fn ticks_per_second() -> u64 {
    let rate = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK).ok().flatten();
    rate.and_then(|n| u64::try_from(n).ok()).filter(|&n| n > 0).unwrap_or(100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_parentheses_does_not_confuse() {
        let text =
            "42 (a) R (b)) S 1 42 41 0 -1 4194560 1 2 3 4 100 20 3 4 20 0 1 0 98765 1000 200 18446744073709551615";
        let stat = ProcessStat::parse(text).unwrap();
        let ticks = (stat.cpu_ticks, stat.children_cpu_ticks, stat.start_ticks);
        assert_eq!((stat.state, stat.parent, stat.group, stat.session, ticks), ('S', 1, 42, 41, (120, 7, 98765)));
    }

    #[test]
    fn a_process_is_of_its_own_session_and_of_those_of_its_ancestors() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let own = ProcessStat::of(std::process::id() as i32).unwrap().session;
        assert_eq!(sessions_of(child.id() as i32).first(), Some(&own));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(sessions_of(0).is_empty());
    }

    #[test]
    fn a_process_is_itself_and_no_other() {
        let me = Identity::of(std::process::id() as i32).unwrap();
        assert!(me.is_alive() && !me.was_reused());
        let other = Identity { start_ticks: me.start_ticks + 1, ..me };
        assert!(!other.is_alive() && other.was_reused());
        assert!(Identity::of(0).is_none() && Identity::of(-1).is_none());
    }

    #[test]
    fn a_zombie_is_not_alive_but_keeps_its_pid() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let id = Identity::of(child.id() as i32).unwrap();
        let mut tries = 0;
        while id.is_alive() && tries < 500 {
            std::thread::sleep(std::time::Duration::from_millis(10));
            tries += 1;
        }
        assert!(!id.is_alive() && !id.was_reused());
        child.wait().unwrap();
        assert!(!id.is_alive());
    }

    #[test]
    fn a_watch_notices_the_end_of_its_process_and_of_no_other() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let id = Identity::of(child.id() as i32).unwrap();
        let watch = ProcessWatch::new(id);
        assert!(watch.fd.is_some(), "this kernel has descriptors of processes");
        assert!(watch.is_alive());
        let earlier = ProcessWatch::new(Identity { start_ticks: id.start_ticks + 1, ..id });
        assert!(!earlier.is_alive(), "the pid belongs to another process");
        let without = ProcessWatch { identity: id, fd: None };
        assert!(without.is_alive());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!watch.is_alive() && !without.is_alive() && !ProcessWatch::new(id).is_alive());
    }

    proptest::proptest! {
        #[test]
        fn garbage_never_panics(text in "\\PC*") {
            let _ = ProcessStat::parse(&text);
        }
    }
}
