//! The processes of each job, from one scan of `/proc` for all jobs.
//!
//! Without cgroups a job is every process in the session its leader started, and every descendant of those as
//! long as the line of parents is unbroken. A process that leaves the session and whose parent then ends is
//! lost.

use super::super::identity::ProcessStat;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// A scan costs some 10 µs for each process of the machine, so one scan serves all jobs for this long.
const FRESH: Duration = Duration::from_millis(400);

/// A longer line of parents is a loop.
const MAX_ANCESTORS: usize = 64;

#[derive(Debug, Default)]
pub(super) struct ProcessTable {
    processes: HashMap<i32, ProcessStat>,
    taken: Option<Instant>,
}

impl ProcessTable {
    /// Scans again if the last scan is too old. `true` if it did.
    pub(super) fn refresh(&mut self, now: Instant) -> bool {
        if self.taken.is_some_and(|t| now.saturating_duration_since(t) < FRESH) {
            return false;
        }
        self.scan(now);
        true
    }

    pub(super) fn scan(&mut self, now: Instant) {
        self.processes.clear();
        self.taken = Some(now);
        let Ok(entries) = std::fs::read_dir("/proc") else { return };
        let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
        self.processes.extend(pids.filter_map(|pid| Some((pid, ProcessStat::of(pid)?))));
    }

    /// The processes of each leader's job, zombies left out.
    pub(super) fn members(&self, leaders: &[i32]) -> HashMap<i32, Vec<(i32, ProcessStat)>> {
        let mut members: HashMap<i32, Vec<(i32, ProcessStat)>> = HashMap::new();
        for (&pid, &stat) in &self.processes {
            if !matches!(stat.state, 'Z' | 'X')
                && let Some(leader) = self.owner(pid, leaders)
            {
                members.entry(leader).or_default().push((pid, stat));
            }
        }
        members
    }

    fn owner(&self, pid: i32, leaders: &[i32]) -> Option<i32> {
        let mut at = pid;
        for _ in 0..MAX_ANCESTORS {
            let stat = self.processes.get(&at)?;
            if leaders.contains(&stat.session) {
                return Some(stat.session);
            }
            if stat.parent <= 1 {
                return None;
            }
            at = stat.parent;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(parent: i32, session: i32) -> ProcessStat {
        let (cpu_ticks, children_cpu_ticks) = (0, 0);
        ProcessStat { state: 'S', parent, group: session, session, cpu_ticks, children_cpu_ticks, start_ticks: 1 }
    }

    #[test]
    fn sessions_and_descendants_belong_to_the_job() {
        let mut table = ProcessTable::default();
        // 10 leads a job; 11 is in its session, 12 left it but is a child of 11; 20 is another job; 30 and 31 are
        // each other's parents.
        for (pid, parent, session) in
            [(10, 5, 10), (11, 10, 10), (12, 11, 12), (5, 1, 5), (20, 5, 20), (30, 31, 30), (31, 30, 31)]
        {
            table.processes.insert(pid, process(parent, session));
        }
        let mut members = table.members(&[10]);
        let mut pids: Vec<i32> = members.remove(&10).unwrap().into_iter().map(|(pid, _)| pid).collect();
        pids.sort();
        assert_eq!(pids, [10, 11, 12]);
        assert!(members.is_empty());
    }
}
