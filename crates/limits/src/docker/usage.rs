//! A container's counters and the kernel's limits for it, read cheaply.
//!
//! **Problem.** The engine's statistics are slow and expensive: version 20.10 answers a single request after
//! a whole second and spends 1.6 ms of CPU on it, so that 50 containers could not be read every second one by
//! one.
//!
//! **Approach.** When the engine runs on this machine, its containers' cgroups are directories here. They are
//! found once, from the container's first process ([`ContainerGroup`]); a reading is then a few small files,
//! some 60 µs. They are used only if their path names the container's id, so that a reused pid can never show
//! another job. Where there are no such directories (an engine in a virtual machine), a follower reads the
//! engine's statistics in the background, once a second, and a reading is the latest of them
//! ([`StatsFollower`]).
//!
//! **Terms.** Working set: memory in use less the file pages the kernel would drop first.

use super::engine::{Engine, is_missing};
use super::limits::EngineLimit;
use crate::cgroup::file::BUFFER_BYTES;
use crate::cgroup::{Group, Version, group_of};
use crate::process::ProcessStat;
use crate::{Counters, RuntimeError, net_dev};
use bollard::models::ContainerStatsResponse;
use bollard::query_parameters::StatsOptions;
use futures_util::StreamExt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

/// The cgroup and the first process of a container.
#[derive(Debug)]
pub(super) struct ContainerGroup {
    group: Group,
    /// Uses the machine's network, so its traffic cannot be distinguished from that of others.
    host_network: bool,
    proc: PathBuf,
}

impl ContainerGroup {
    /// The cgroup of process `pid`, if it is that of container `id` and its files can be read here.
    pub(super) fn find(root: &Path, pid: i64, id: &str, host_network: bool) -> Option<ContainerGroup> {
        let pid = i32::try_from(pid).ok().filter(|&pid| pid > 0)?;
        let proc = root.join("proc").join(pid.to_string());
        Some(ContainerGroup { group: group_of(root, pid, id)?, host_network, proc })
    }

    /// Whether the container's first process still runs. Needs no engine.
    pub(super) fn is_alive(&self) -> bool {
        let Ok(cgroups) = fs::read_to_string(self.proc.join("cgroup")) else { return false };
        // A process that ended but was not yet collected by its parent keeps its cgroup.
        let is_running = ProcessStat::read(&self.proc.join("stat")).is_some_and(|stat| !stat.has_ended());
        cgroups.contains(self.group.key()) && is_running
    }

    pub(super) fn read(&mut self) -> Result<Counters, RuntimeError> {
        let mut counters = self.group.usage(&mut [0; BUFFER_BYTES])?;
        if !self.host_network {
            let text = fs::read_to_string(self.proc.join("net/dev")).ok();
            counters.net_bytes = text.map(|text| net_dev::parse(&text).unwrap_or_default().total());
        }
        Ok(counters)
    }

    /// The kernel's values, by the names of its files. Read after our own writes and compared later, they
    /// show every foreign write.
    pub(super) fn settings(&self) -> Vec<(String, String)> {
        let all = [
            EngineLimit::CpuShares,
            EngineLimit::CpuQuota,
            EngineLimit::CpusetCpus,
            EngineLimit::MemoryReservation,
            EngineLimit::BlkioWeight,
        ];
        let files = all.iter().flat_map(|&limit| files_of(limit));
        let text = |name: &&'static str| {
            let text = self.group.get(name).ok()?;
            Some(((*name).to_owned(), text.lines().next().unwrap_or_default().trim_end().to_owned()))
        };
        files.filter_map(text).collect()
    }

    /// The weight the engine's `blkio-weight` starts from; `None` where the kernel has no file that takes it. The
    /// engine of cgroup v1 knows only CFQ's file; on v2 `runc` writes BFQ's weight as it is and else spreads 10…1000
    /// over `io.weight`'s 1…10000, where 20 comes out as the kernel's default of 100.
    pub(super) fn default_block_weight(&self) -> Option<i64> {
        let candidates: &[(&str, i64)] = match self.group.version() {
            Version::V1 => &[("blkio.weight", 500)],
            Version::V2 => &[("io.bfq.weight", 100), ("io.weight", 20)],
        };
        candidates.iter().find(|(file, _)| self.group.has(file)).map(|&(_, weight)| weight)
    }
}

/// Which of the kernel's files hold a limit of the engine.
pub(super) fn files_of(limit: EngineLimit) -> &'static [&'static str] {
    match limit {
        EngineLimit::CpuShares => &["cpu.shares", "cpu.weight"],
        EngineLimit::CpuQuota | EngineLimit::Cpus => &["cpu.cfs_quota_us", "cpu.max"],
        EngineLimit::CpusetCpus => &["cpuset.cpus"],
        EngineLimit::MemoryReservation => &["memory.soft_limit_in_bytes", "memory.low"],
        EngineLimit::BlkioWeight => &["blkio.weight", "io.weight", "io.bfq.weight"],
    }
}

/// The latest of the engine's own statistics, read by a background task that ends when this is dropped.
#[derive(Debug)]
pub(super) struct StatsFollower {
    latest: Arc<Mutex<Option<Counters>>>,
}

/// The engine's first answer takes a second.
const FIRST_ANSWER: Duration = Duration::from_secs(3);
const RETRY: Duration = Duration::from_secs(1);

impl StatsFollower {
    pub(super) fn start(engine: &Engine, id: &str) -> StatsFollower {
        let latest = Arc::new(Mutex::new(None));
        let (slot, docker, id) = (Arc::downgrade(&latest), engine.docker.clone(), id.to_owned());
        engine.spawn(async move {
            while slot.strong_count() > 0 {
                let options = StatsOptions { stream: true, one_shot: false };
                let mut stream = std::pin::pin!(docker.stats(&id, Some(options)));
                while let Some(answer) = stream.next().await {
                    match answer {
                        Ok(stats) if store(&slot, from_stats(&stats)) => {}
                        Err(error) if !is_missing(&error) => break,
                        _ => return,
                    }
                }
                tokio::time::sleep(RETRY).await;
            }
        });
        StatsFollower { latest }
    }

    /// The latest reading; waits for the first one.
    pub(super) fn read(&self) -> Option<Counters> {
        let start = Instant::now();
        loop {
            let latest = *self.latest.lock().unwrap_or_else(PoisonError::into_inner);
            if latest.is_some() || start.elapsed() > FIRST_ANSWER {
                return latest;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Keeps a reading; `false` if the follower was dropped. For a container that has stopped the engine reports
/// zeros: these are not kept.
fn store(slot: &Weak<Mutex<Option<Counters>>>, now: Counters) -> bool {
    let Some(slot) = slot.upgrade() else { return false };
    let mut latest = slot.lock().unwrap_or_else(PoisonError::into_inner);
    if latest.is_none_or(|last| now.cpu_ns >= last.cpu_ns) {
        *latest = Some(now);
    }
    true
}

fn from_stats(stats: &ContainerStatsResponse) -> Counters {
    let memory = stats.memory_stats.as_ref();
    let used = memory.and_then(|m| m.usage).unwrap_or(0);
    let part = |name: &str| memory.and_then(|m| m.stats.as_ref()?.get(name).copied());
    let droppable = part("total_inactive_file").or_else(|| part("inactive_file")).unwrap_or(0);
    let cpu = stats.cpu_stats.as_ref().and_then(|cpu| cpu.cpu_usage.as_ref()?.total_usage);
    let block = stats.blkio_stats.as_ref().and_then(|block| block.io_service_bytes_recursive.as_ref());
    let is_counted = |op: &Option<String>| matches!(op.as_deref(), Some("Read" | "Write" | "read" | "write"));
    let networks = stats.networks.as_ref();
    Counters {
        cpu_ns: cpu.unwrap_or(0),
        memory_bytes: used.saturating_sub(droppable),
        block_bytes: block
            .map(|all| all.iter().filter(|e| is_counted(&e.op)).filter_map(|e| e.value).fold(0, u64::saturating_add)),
        net_bytes: networks.map(|all| {
            all.values().flat_map(|net| [net.rx_bytes, net.tx_bytes]).flatten().fold(0, u64::saturating_add)
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_of_any_size_are_summed_without_overflow() {
        let json = format!(
            r#"{{"networks": {{"eth0": {{"rx_bytes": {max}, "tx_bytes": 1}}}},
                 "blkio_stats": {{"io_service_bytes_recursive": [{{"op": "Read", "value": {max}}}, {{"op": "Write", "value": 7}}]}},
                 "memory_stats": {{"usage": 5, "stats": {{"inactive_file": 9}}}}}}"#,
            max = u64::MAX
        );
        let counters = from_stats(&serde_json::from_str(&json).unwrap());
        assert_eq!((counters.net_bytes, counters.block_bytes), (Some(u64::MAX), Some(u64::MAX)));
        assert_eq!((counters.cpu_ns, counters.memory_bytes), (0, 0));
    }

    #[test]
    fn the_zeros_of_a_stopped_container_do_not_turn_counters_back() {
        let latest = Arc::new(Mutex::new(None));
        let slot = Arc::downgrade(&latest);
        let used = Counters { cpu_ns: 5, ..Default::default() };
        assert!(store(&slot, used) && store(&slot, Counters::default()));
        assert_eq!(*latest.lock().unwrap(), Some(used));
        drop(latest);
        assert!(!store(&slot, used));
    }
}
