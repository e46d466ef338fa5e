//! From a runtime's counters to node-seconds.
//!
//! The decisions want use as counters in node-seconds per resource. CPU, disk and network are counters already and only divided by what
//! the node has; memory is a level, so its integral is kept here, from look to look.

use crate::{Capacity, Counters};
use gainshare_core::model::{PerResource, Span, Time};
use nix::sched::sched_getaffinity;
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

/// What counts as the whole node.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Whole {
    pub capacity: Capacity,
    pub block_bytes_s: u64,
    pub net_bytes_s: u64,
}

impl Whole {
    /// A machine whose disk and network nobody has measured: an ordinary SSD and Gigabit Ethernet.
    pub const BLOCK_BYTES_S: u64 = 500_000_000;
    pub const NET_BYTES_S: u64 = 125_000_000;
}

/// CPU of this machine that nobody used since it started, in seconds of all processors that we may use; nothing where the kernel does not say. Jobs are confined as we are (a
/// container's or a node's processors): what lies idle on others is of no use to them.
pub fn machine_idle_s() -> Option<f64> {
    let ours = sched_getaffinity(Pid::from_raw(0)).ok()?;
    idle_s(&std::fs::read_to_string("/proc/stat").ok()?, |processor| ours.is_set(processor).unwrap_or(false))
}

/// The part of `/proc/stat` that is idle time or waiting for a disk, in seconds of these processors together.
fn idle_s(stat: &str, ours: impl Fn(usize) -> bool) -> Option<f64> {
    // The kernel shows times in hundredths of a second whatever its own clock.
    const TICKS_PER_S: f64 = 100.0;
    let idle = |line: &str| {
        let mut words = line.strip_prefix("cpu")?.split(' ');
        words.next()?.parse().ok().filter(|processor| ours(*processor))?;
        let times: Vec<f64> = words.map_while(|word| word.parse().ok()).collect();
        Some(times.get(3)? + times.get(4)?)
    };
    let idle: Vec<f64> = stat.lines().filter_map(idle).collect();
    (!idle.is_empty()).then(|| idle.iter().sum::<f64>() / TICKS_PER_S / idle.len() as f64)
}

/// Follows one job's use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Meter {
    consumed: PerResource<f64>,
    last: Option<Look>,
    /// Cores in use between the last two looks that were long enough apart.
    cores: Option<f64>,
    since: Option<Look>,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct Look {
    at: Time,
    counters: Counters,
}

/// Rates over less than this are noise.
const SHORTEST_RATE: Span = Span::from_millis(500);

impl Meter {
    pub fn take(&mut self, at: Time, counters: Counters, whole: &Whole) {
        let c = &mut self.consumed;
        // A counter that went backwards belongs to a new cgroup of the same job; what was consumed stays consumed.
        let last = self.last.map_or(Counters::default(), |l| l.counters);
        let grown = |now: u64, before: u64| if now >= before { now - before } else { now } as f64;
        c.cpu += grown(counters.cpu_ns, last.cpu_ns) / 1e9 / whole.capacity.cores.max(1e-9);
        if let (Some(now), Some(before)) = (counters.block_bytes, last.block_bytes.or(Some(0))) {
            c.block_io += grown(now, before) / whole.block_bytes_s.max(1) as f64;
        }
        if let (Some(now), Some(before)) = (counters.net_bytes, last.net_bytes.or(Some(0))) {
            c.net_io += grown(now, before) / whole.net_bytes_s.max(1) as f64;
        }
        if let Some(last) = self.last {
            let mean = (last.counters.memory_bytes as f64 + counters.memory_bytes as f64) / 2.0;
            c.memory += mean / whole.capacity.memory_bytes.max(1) as f64 * at.since(last.at).as_secs_f64();
        }
        let look = Look { at, counters };
        match self.since {
            Some(since) if at.since(since.at) >= SHORTEST_RATE => {
                let seconds = at.since(since.at).as_secs_f64();
                self.cores = Some(grown(counters.cpu_ns, since.counters.cpu_ns) / 1e9 / seconds);
                self.since = Some(look);
            }
            Some(_) => {}
            None => self.since = Some(look),
        }
        self.last = Some(look);
    }

    pub fn consumed(&self) -> PerResource<f64> {
        self.consumed
    }

    pub fn looked_at(&self) -> Option<Time> {
        self.last.map(|l| l.at)
    }

    pub fn cores(&self) -> Option<f64> {
        self.cores
    }

    pub fn memory_bytes(&self) -> Option<u64> {
        self.last.map(|l| l.counters.memory_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: Whole =
        Whole { capacity: Capacity { cores: 2.0, memory_bytes: 1000 }, block_bytes_s: 100, net_bytes_s: 10 };

    fn counters(cpu_ns: u64, memory_bytes: u64, block: u64) -> Counters {
        Counters { cpu_ns, memory_bytes, block_bytes: Some(block), net_bytes: None, pressure: None }
    }

    #[test]
    fn idle_time_is_that_of_our_processors_together() {
        let stat = "cpu  100 0 50 3000 1000 0 0 7 0 0\ncpu0 50 0 25 2500 500 0 0 3 0 0\ncpu1 50 0 25 500 500 0 0 4 0 0\nintr 1 2 3\n";
        assert_eq!(idle_s(stat, |_| true), Some(20.0));
        assert_eq!(idle_s(stat, |processor| processor == 1), Some(10.0));
        assert_eq!(idle_s(stat, |_| false), None);
        assert_eq!(idle_s("", |_| true), None);
        assert_eq!(idle_s("cpu  1 2\ncpu0 1 2\n", |_| true), None);
        assert!(machine_idle_s().is_some());
    }

    #[test]
    fn node_seconds() {
        let mut m = Meter::default();
        m.take(Time::from_secs_f64(0.0), counters(0, 500, 0), &WHOLE);
        m.take(Time::from_secs_f64(10.0), counters(10_000_000_000, 500, 50), &WHOLE);
        assert_eq!(m.consumed(), PerResource { cpu: 5.0, memory: 5.0, block_io: 0.5, net_io: 0.0 });
        assert_eq!((m.cores(), m.memory_bytes()), (Some(1.0), Some(500)));
    }

    #[test]
    fn only_grows_even_if_the_kernel_starts_over() {
        let mut m = Meter::default();
        m.take(Time::from_secs_f64(0.0), counters(4_000_000_000, 0, 0), &WHOLE);
        m.take(Time::from_secs_f64(1.0), counters(1_000_000_000, 0, 0), &WHOLE);
        assert_eq!(m.consumed().cpu, 2.5);
    }
}
