//! What a container used, cheaply.
//!
//! **Problem.** The engine's statistics cost it about 2 ms of CPU for each question (it asks its container runtime, walks
//! the network namespace and writes kilobytes of JSON): with 50 containers read every second that is a tenth of a core.
//!
//! **Approach.** When the engine runs on this machine, its containers' cgroups are files here. Their place is found once from the container's
//! first process; a reading is then four or five small files, some 50 µs. The place is trusted only if its path names the container's id, so a
//! reused process number can never show another job. Where no such place is found (an engine in a virtual machine), the engine's own
//! statistics are asked, one-shot.
//!
//! **Terms.** Working set: memory in use less the file pages the kernel would drop first.

use super::limits::Knob;
use crate::{Counters, Pressure};
use bollard::models::ContainerStatsResponse;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Where a container's files are.
#[derive(Debug, Clone)]
pub(super) struct Place {
    pid: i64,
    id: String,
    dirs: Dirs,
    /// Shares the machine's network, so its traffic cannot be told apart.
    host_network: bool,
}

#[derive(Debug, Clone)]
enum Dirs {
    V1 { cpu: PathBuf, cpuacct: PathBuf, cpuset: PathBuf, memory: PathBuf, blkio: PathBuf },
    V2(PathBuf),
}

impl Place {
    /// The cgroup of process `pid`, if it is that of container `id` and its files can be read here.
    pub(super) fn find(pid: i64, id: &str, host_network: bool) -> Option<Place> {
        let cgroups = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
        let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
        let dir = |controller: &str| -> Option<PathBuf> {
            let path = path_of(&cgroups, controller).filter(|path| path.contains(id))?;
            let dir = mount_of(&mounts, controller)?.join(path.trim_start_matches('/'));
            dir.is_dir().then_some(dir)
        };
        let v1 = || {
            Some(Dirs::V1 {
                cpu: dir("cpu")?,
                cpuacct: dir("cpuacct")?,
                cpuset: dir("cpuset")?,
                memory: dir("memory")?,
                blkio: dir("blkio")?,
            })
        };
        // A hybrid machine has an empty v2 hierarchy beside the v1 ones, so v1 is looked for first.
        let dirs = v1().or_else(|| dir("").map(Dirs::V2))?;
        Some(Place { pid, id: id.to_owned(), dirs, host_network })
    }

    /// Whether the container's first process still runs. Needs no engine.
    pub(super) fn is_alive(&self) -> bool {
        let Ok(cgroups) = fs::read_to_string(format!("/proc/{}/cgroup", self.pid)) else { return false };
        let dead = || {
            // A process that ended but was not yet collected by its parent keeps its cgroup.
            let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap_or_default();
            stat.rsplit_once(')').is_none_or(|(_, rest)| rest.trim_start().starts_with(['Z', 'X']))
        };
        cgroups.contains(&self.id) && !dead()
    }

    pub(super) fn read(&self) -> io::Result<Counters> {
        let net_bytes = if self.host_network {
            None
        } else {
            fs::read_to_string(format!("/proc/{}/net/dev", self.pid)).ok().map(|text| net_bytes(&text))
        };
        match &self.dirs {
            Dirs::V1 { cpuacct, memory, blkio, .. } => {
                let used = number(&read(memory, "memory.usage_in_bytes")?);
                let droppable = field(&read(memory, "memory.stat")?, "total_inactive_file");
                let block = read(blkio, "blkio.throttle.io_service_bytes_recursive")
                    .or_else(|_| read(blkio, "blkio.throttle.io_service_bytes"));
                Ok(Counters {
                    cpu_ns: number(&read(cpuacct, "cpuacct.usage")?),
                    memory_bytes: used.saturating_sub(droppable),
                    block_bytes: block.ok().map(|text| field(&text, "Total")),
                    net_bytes,
                    pressure: None,
                })
            }
            Dirs::V2(dir) => {
                let used = number(&read(dir, "memory.current")?);
                let droppable = field(&read(dir, "memory.stat")?, "inactive_file");
                let stalled = |what: &str| read(dir, &format!("{what}.pressure")).ok().map(|text| some_total_us(&text));
                let pressure =
                    || Some(Pressure { cpu_us: stalled("cpu")?, memory_us: stalled("memory")?, io_us: stalled("io")? });
                Ok(Counters {
                    cpu_ns: field(&read(dir, "cpu.stat")?, "usage_usec") * 1_000,
                    memory_bytes: used.saturating_sub(droppable),
                    block_bytes: read(dir, "io.stat").ok().map(|text| io_stat_bytes(&text)),
                    net_bytes,
                    pressure: pressure(),
                })
            }
        }
    }

    /// What the kernel has in force, by the names of its files. Read after our own writes and compared later, it shows every foreign write.
    pub(super) fn settings(&self) -> Vec<(String, String)> {
        let files: &[(&Path, &str)] = match &self.dirs {
            Dirs::V1 { cpu, cpuset, memory, .. } => &[
                (cpu, "cpu.shares"),
                (cpu, "cpu.cfs_quota_us"),
                (cpuset, "cpuset.cpus"),
                (memory, "memory.soft_limit_in_bytes"),
            ],
            Dirs::V2(dir) => {
                &[(dir, "cpu.weight"), (dir, "cpu.max"), (dir, "cpuset.cpus"), (dir, "memory.low"), (dir, "io.weight")]
            }
        };
        let text = |(dir, name): &(&Path, &str)| Some(((*name).to_owned(), read(dir, name).ok()?.trim().to_owned()));
        files.iter().filter_map(text).collect()
    }

    /// The weight the engine's `blkio-weight` starts from; `None` where the kernel has no file that takes it. The
    /// engine of cgroup v1 knows only CFQ's file; on v2 `runc` writes BFQ's weight as it is and else spreads 10…1000 over `io.weight`'s 1…10000,
    /// where 20 comes out as the kernel's default of 100.
    pub(super) fn default_block_weight(&self) -> Option<i64> {
        match &self.dirs {
            Dirs::V1 { blkio, .. } => blkio.join("blkio.weight").exists().then_some(500),
            Dirs::V2(dir) if dir.join("io.bfq.weight").exists() => Some(100),
            Dirs::V2(dir) => dir.join("io.weight").exists().then_some(20),
        }
    }
}

/// The same from the engine's own statistics.
pub(super) fn from_stats(stats: &ContainerStatsResponse) -> Counters {
    let memory = stats.memory_stats.as_ref();
    let used = memory.and_then(|m| m.usage).unwrap_or(0);
    let part = |name: &str| memory.and_then(|m| m.stats.as_ref()?.get(name).copied());
    let droppable = part("total_inactive_file").or_else(|| part("inactive_file")).unwrap_or(0);
    let cpu = stats.cpu_stats.as_ref().and_then(|cpu| cpu.cpu_usage.as_ref()?.total_usage);
    let block = stats.blkio_stats.as_ref().and_then(|block| block.io_service_bytes_recursive.as_ref());
    let counted = ["read", "write"];
    Counters {
        cpu_ns: cpu.unwrap_or(0),
        memory_bytes: used.saturating_sub(droppable),
        block_bytes: block.map(|entries| {
            let counts =
                |op: &Option<String>| op.as_deref().is_some_and(|op| counted.contains(&op.to_lowercase().as_str()));
            entries.iter().filter(|e| counts(&e.op)).filter_map(|e| e.value).sum()
        }),
        net_bytes: stats
            .networks
            .as_ref()
            .map(|nets| nets.values().map(|net| net.rx_bytes.unwrap_or(0) + net.tx_bytes.unwrap_or(0)).sum()),
        pressure: None,
    }
}

/// Which of the kernel's files hold a limit of the engine.
pub(super) fn files_of(knob: Knob) -> &'static [&'static str] {
    match knob {
        Knob::CpuShares => &["cpu.shares", "cpu.weight"],
        Knob::CpuQuota | Knob::Cpus => &["cpu.cfs_quota_us", "cpu.max"],
        Knob::CpusetCpus => &["cpuset.cpus"],
        Knob::MemoryReservation => &["memory.soft_limit_in_bytes", "memory.low"],
        Knob::BlkioWeight => &["io.weight"],
    }
}

fn read(dir: &Path, name: &str) -> io::Result<String> {
    fs::read_to_string(dir.join(name))
}

/// The path of `controller` (empty for v2) in `/proc/PID/cgroup`.
fn path_of<'a>(cgroups: &'a str, controller: &str) -> Option<&'a str> {
    cgroups.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':');
        let (_, names, path) = (parts.next()?, parts.next()?, parts.next()?);
        names.split(',').any(|name| name == controller).then_some(path)
    })
}

/// Where the whole hierarchy of `controller` (empty for v2) is mounted. A mount of only a part of it is of no use.
fn mount_of(mountinfo: &str, controller: &str) -> Option<PathBuf> {
    mountinfo.lines().find_map(|line| {
        let (mount, source) = line.split_once(" - ")?;
        let mut mount = mount.split(' ').skip(3);
        let (root, point) = (mount.next()?, mount.next()?);
        let mut source = source.split(' ');
        let (kind, options) = (source.next()?, source.nth(1)?);
        let fits = match controller {
            "" => kind == "cgroup2",
            name => kind == "cgroup" && options.split(',').any(|option| option == name),
        };
        (fits && root == "/").then(|| PathBuf::from(point))
    })
}

fn number(text: &str) -> u64 {
    text.trim().parse().unwrap_or(0)
}

/// The number after `name` on its own line.
fn field(text: &str, name: &str) -> u64 {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.map_or(0, number)
}

/// Bytes read and written in an `io.stat`.
fn io_stat_bytes(text: &str) -> u64 {
    let words = text.split_whitespace();
    words.filter_map(|w| w.strip_prefix("rbytes=").or_else(|| w.strip_prefix("wbytes="))).map(number).sum()
}

/// The microseconds of `some … total=N` in a pressure file.
fn some_total_us(text: &str) -> u64 {
    let some = text.lines().find(|line| line.starts_with("some"));
    some.and_then(|line| line.rsplit_once("total=")).map_or(0, |(_, total)| number(total))
}

/// Bytes received and sent on every interface except the loopback in a `/proc/PID/net/dev`.
fn net_bytes(text: &str) -> u64 {
    let interfaces = text.lines().skip(2).filter_map(|line| line.split_once(':'));
    let counted = interfaces.filter(|(name, _)| name.trim() != "lo");
    counted
        .map(|(_, columns)| {
            let columns: Vec<u64> = columns.split_whitespace().map(number).collect();
            columns.first().unwrap_or(&0) + columns.get(8).unwrap_or(&0)
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn controllers_are_found_in_both_hierarchies() {
        let hybrid = "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/docker/abc\n";
        assert_eq!(path_of(hybrid, "cpuacct"), Some("/docker/abc"));
        assert_eq!(path_of(hybrid, "blkio"), None);
        assert_eq!(path_of("0::/system.slice/docker-abc.scope\n", ""), Some("/system.slice/docker-abc.scope"));
        let mounts = "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:1 - cgroup cgroup rw,cpu,cpuacct\n\
                      41 31 0:38 /part /mnt rw - cgroup2 cgroup2 rw\n\
                      42 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n";
        assert_eq!(mount_of(mounts, "cpuacct"), Some(PathBuf::from("/sys/fs/cgroup/cpu,cpuacct")));
        assert_eq!(mount_of(mounts, ""), Some(PathBuf::from("/sys/fs/cgroup/unified")));
        assert_eq!(mount_of(mounts, "memory"), None);
    }

    #[test]
    fn kernel_texts_are_read_and_garbage_is_zero() {
        let stat = "cache 9\ninactive_file 40\ntotal_inactive_file 50\n";
        assert_eq!((field(stat, "inactive_file"), field(stat, "total_inactive_file"), field(stat, "x")), (40, 50, 0));
        assert_eq!(io_stat_bytes("254:0 rbytes=10 wbytes=5 rios=1\n8:0 rbytes=1 wbytes=x\n"), 16);
        assert_eq!(some_total_us("some avg10=0.00 total=77\nfull avg10=0.00 total=3\n"), 77);
        let dev = "h\nh\n    lo: 9 0 0 0 0 0 0 0 9 0\n  eth0: 100 1 0 0 0 0 0 0 23 4\n";
        assert_eq!(net_bytes(dev), 123);
        assert_eq!(net_bytes(""), 0);
    }
}
