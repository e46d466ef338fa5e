//! A job's counters as node-seconds.
//!
//! Decisions take a job's use as one growing number per resource, in node-seconds: 1 is the whole node for
//! one second. CPU, disk and network are growing counters already and are divided by what the node has.
//! Memory is a level, so a [`Meter`] integrates it from reading to reading.
//!
//! **Properties.** `node_seconds`: two readings give what a hand calculation gives.
//! `only_grows_even_if_the_kernel_starts_over`.

use crate::{Capacity, Counters};
use gainshare_core::model::{PerResource, Span, Time};
use serde::{Deserialize, Serialize};

/// The whole node, in the units of [`Counters`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NodeResources {
    pub capacity: Capacity,
    pub block_bytes_s: u64,
    pub net_bytes_s: u64,
}

impl NodeResources {
    /// Defaults for a machine whose disk and network were not measured: an ordinary SSD and Gigabit Ethernet.
    pub const BLOCK_BYTES_S: u64 = 500_000_000;
    pub const NET_BYTES_S: u64 = 125_000_000;
}

/// Adds up one job's use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Meter {
    #[serde(rename = "consumed")]
    consumed_node_s: PerResource<f64>,
    last: Option<CounterReading>,
    /// Cores in use between the last two readings that lie at least [`SHORTEST_RATE`] apart.
    cores: Option<f64>,
    since: Option<CounterReading>,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct CounterReading {
    at: Time,
    counters: Counters,
}

/// Rates over shorter times are noise.
const SHORTEST_RATE: Span = Span::from_millis(500);

impl Meter {
    /// Adds the use since the last reading.
    pub fn record(&mut self, at: Time, counters: Counters, whole: &NodeResources) {
        let c = &mut self.consumed_node_s;
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
        let reading = CounterReading { at, counters };
        match self.since {
            Some(since) if at.since(since.at) >= SHORTEST_RATE => {
                let seconds = at.since(since.at).as_secs_f64();
                self.cores = Some(grown(counters.cpu_ns, since.counters.cpu_ns) / 1e9 / seconds);
                self.since = Some(reading);
            }
            Some(_) => {}
            None => self.since = Some(reading),
        }
        self.last = Some(reading);
    }

    pub fn consumed(&self) -> PerResource<f64> {
        self.consumed_node_s
    }

    /// The time of the last reading.
    pub fn read_at(&self) -> Option<Time> {
        self.last.map(|l| l.at)
    }

    /// Cores in use lately; `None` before two readings.
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

    const WHOLE: NodeResources =
        NodeResources { capacity: Capacity { cores: 2.0, memory_bytes: 1000 }, block_bytes_s: 100, net_bytes_s: 10 };

    fn counters(cpu_ns: u64, memory_bytes: u64, block: u64) -> Counters {
        Counters { cpu_ns, memory_bytes, block_bytes: Some(block), net_bytes: None }
    }

    #[test]
    fn node_seconds() {
        let mut m = Meter::default();
        m.record(Time::from_secs_f64(0.0), counters(0, 500, 0), &WHOLE);
        m.record(Time::from_secs_f64(10.0), counters(10_000_000_000, 500, 50), &WHOLE);
        assert_eq!(m.consumed(), PerResource { cpu: 5.0, memory: 5.0, block_io: 0.5, net_io: 0.0 });
        assert_eq!((m.cores(), m.memory_bytes()), (Some(1.0), Some(500)));
    }

    #[test]
    fn only_grows_even_if_the_kernel_starts_over() {
        let mut m = Meter::default();
        m.record(Time::from_secs_f64(0.0), counters(4_000_000_000, 0, 0), &WHOLE);
        m.record(Time::from_secs_f64(1.0), counters(1_000_000_000, 0, 0), &WHOLE);
        assert_eq!(m.consumed().cpu, 2.5);
    }
}
