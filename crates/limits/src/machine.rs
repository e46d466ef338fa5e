//! CPUs, memory and idle time of this machine, as the kernel shows them in `/proc` and `/sys`; and its monotonic clock.
//!
//! Every reader takes the directory below which `proc` and `sys` lie: [`ROOT`] in production, a temporary
//! directory in tests. Numbers that are missing or malformed are `None` or a stated default, never an error:
//! a machine without a readable `/proc/meminfo` still runs jobs.

use crate::cpus::CpuList;
use nix::time::{ClockId, clock_gettime};
use std::path::Path;

/// The root of a real machine.
pub const ROOT: &str = "/";

/// The kernel shows CPU times in hundredths of a second, whatever its own clock rate.
const TICKS_PER_S: f64 = 100.0;

/// The monotonic clock, in nanoseconds; 0 where it cannot be read. The library inside jobs reads it, too.
pub fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC);
    now.map_or(0, |time| time.tv_sec() as u64 * 1_000_000_000 + time.tv_nsec() as u64)
}

/// Unused CPU time since boot, in seconds, as the mean over the processors that this process may use; `None` where
/// the kernel does not show it. Jobs are confined to the same processors as this process (those of a
/// container or a node), so idle time of other processors does not count. Where jobs are confined to fewer, see
/// [`idle_s_of_cpus`].
pub fn idle_s(root: &Path) -> Option<f64> {
    idle_s_of_cpus(root, &own_affinity())
}

/// The same for these processors.
pub fn idle_s_of_cpus(root: &Path, cpus: &CpuList) -> Option<f64> {
    idle_s_of(&std::fs::read_to_string(root.join("proc/stat")).ok()?, cpus)
}

/// The time in `/proc/stat` in which these processors were idle or waited for a disk, as the mean over the
/// processors.
fn idle_s_of(stat: &str, allowed: &CpuList) -> Option<f64> {
    let idle_ticks = |line: &str| {
        let mut words = line.strip_prefix("cpu")?.split(' ');
        words.next()?.parse().ok().filter(|&cpu| allowed.contains(cpu))?;
        let times: Vec<f64> = words.map_while(|word| word.parse().ok()).collect();
        Some(times.get(3)? + times.get(4)?)
    };
    let idle: Vec<f64> = stat.lines().filter_map(idle_ticks).collect();
    (!idle.is_empty()).then(|| idle.iter().sum::<f64>() / TICKS_PER_S / idle.len() as f64)
}

/// All memory of the machine; 0 where the kernel does not show it.
pub fn memory_bytes(root: &Path) -> u64 {
    let text = std::fs::read_to_string(root.join("proc/meminfo")).unwrap_or_default();
    let kib =
        text.lines().find_map(|l| l.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(0).saturating_mul(1024)
}

/// The CPUs this process may run on.
pub(crate) fn own_affinity() -> CpuList {
    let Ok(set) = nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0)) else { return CpuList::new(vec![0]) };
    (0..nix::sched::CpuSet::count()).filter(|&cpu| set.is_set(cpu).unwrap_or(false)).map(|cpu| cpu as u32).collect()
}

/// Sorts so that hardware threads of one core, cores with a common last cache, and cores of one memory node and
/// package are next to each other.
pub(crate) fn by_topology(root: &Path, cpus: &CpuList) -> Vec<u32> {
    let system = root.join("sys/devices/system");
    let read = |path: std::path::PathBuf| std::fs::read_to_string(path).ok();
    let number = |cpu: u32, what: &str| -> Option<i64> {
        read(system.join(format!("cpu/cpu{cpu}/{what}")))?.trim().parse().ok()
    };
    let nodes = memory_nodes(&system.join("node"));
    let node = |cpu: u32| nodes.iter().position(|(_, cpus)| cpus.contains(cpu));
    // The smallest CPU that shares the last cache names the cache.
    let cache = |cpu: u32| -> Option<u32> {
        CpuList::parse(&read(system.join(format!("cpu/cpu{cpu}/cache/index3/shared_cpu_list")))?)?.iter().next()
    };
    let mut sorted: Vec<u32> = cpus.iter().collect();
    sorted.sort_by_cached_key(|&cpu| {
        let package = number(cpu, "topology/physical_package_id").unwrap_or(cpu.into());
        let core = number(cpu, "topology/core_id").unwrap_or(cpu.into());
        (node(cpu), package, cache(cpu), core, cpu)
    });
    sorted
}

/// The memory nodes and their CPUs, by number.
fn memory_nodes(dir: &Path) -> Vec<(u32, CpuList)> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    let mut nodes: Vec<(u32, CpuList)> = entries
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let number = entry.file_name().to_str()?.strip_prefix("node")?.parse().ok()?;
            Some((number, CpuList::parse(&std::fs::read_to_string(entry.path().join("cpulist")).ok()?)?))
        })
        .collect();
    nodes.sort();
    nodes
}

/// Whether any disk uses the bfq scheduler, the only one for which bfq's weights have an effect.
pub(crate) fn some_disk_uses_bfq(root: &Path) -> bool {
    let Ok(disks) = std::fs::read_dir(root.join("sys/block")) else { return false };
    disks
        .filter_map(|disk| std::fs::read_to_string(disk.ok()?.path().join("queue/scheduler")).ok())
        .any(|text| text.contains("[bfq]"))
}

pub(crate) fn page_bytes() -> u64 {
    let bytes = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok().flatten();
    bytes.and_then(|n| u64::try_from(n).ok()).filter(|&n| n > 0).unwrap_or(4096)
}

/// The largest number of tasks of one job. Generous for any training job (data loaders times thread pools
/// grow with the cores), small enough that the daemon and a shell still work beside a fork bomb.
pub(crate) fn default_max_tasks() -> u32 {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
    let generous = cores.saturating_mul(256).clamp(4096, 32_768);
    let pid_max = std::fs::read_to_string("/proc/sys/kernel/pid_max").ok().and_then(|t| t.trim().parse::<u32>().ok());
    generous.min(pid_max.map_or(u32::MAX, |max| max / 2))
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &str = "cpu  100 0 50 3000 1000 0 0 7 0 0\ncpu0 50 0 25 2500 500 0 0 3 0 0\ncpu1 50 0 25 500 500 0 0 4 0 0\nintr 1 2\n";

    /// A root directory with these files.
    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        dir
    }

    #[test]
    fn idle_time_is_that_of_the_allowed_processors_together() {
        let with = |cpus: &str, stat: &str| {
            idle_s_of_cpus(tree(&[("proc/stat", stat)]).path(), &CpuList::parse(cpus).unwrap())
        };
        assert_eq!(with("0-1", STAT), Some(20.0));
        assert_eq!(with("1", STAT), Some(10.0));
        assert_eq!(with("7", STAT), None);
        assert_eq!(with("0", "cpu  1 2\ncpu0 1 2\n"), None);
        assert_eq!(with("0", ""), None);
        assert_eq!(idle_s(tree(&[]).path()), None);
        assert!(idle_s(Path::new(ROOT)).is_some_and(|idle| idle > 0.0), "this process may use some processor");
        let of_cpus = |cpus: Vec<u32>| idle_s_of_cpus(tree(&[("proc/stat", STAT)]).path(), &CpuList::new(cpus));
        assert_eq!((of_cpus(vec![0]), of_cpus(vec![1]), of_cpus(vec![7])), (Some(30.0), Some(10.0), None));
    }

    #[test]
    fn memory_is_read_and_never_overflows() {
        let with = |text: &str| memory_bytes(tree(&[("proc/meminfo", text)]).path());
        assert_eq!(with("MemFree: 1 kB\nMemTotal:       16331752 kB\n"), 16_331_752 * 1024);
        assert_eq!(with("MemTotal: 18446744073709551615 kB\n"), u64::MAX);
        assert_eq!(with("MemTotal: many\n"), 0);
        assert_eq!(memory_bytes(Path::new("/nonexistent")), 0);
    }

    #[test]
    fn neighbours_by_package_and_core() {
        // Two packages of two cores: CPUs 0 and 2 are in package 0, 1 and 3 in package 1.
        let topology = |cpu: u32, package: u32, core: u32| {
            let at = format!("sys/devices/system/cpu/cpu{cpu}/topology");
            [(format!("{at}/physical_package_id"), package.to_string()), (format!("{at}/core_id"), core.to_string())]
        };
        let files = [topology(0, 0, 0), topology(1, 1, 0), topology(2, 0, 1), topology(3, 1, 1)].concat();
        let files: Vec<(&str, &str)> = files.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
        let cpus: CpuList = (0..4).collect();
        assert_eq!(by_topology(tree(&files).path(), &cpus), [0, 2, 1, 3]);
        assert_eq!(by_topology(Path::new("/nonexistent"), &cpus), [0, 1, 2, 3]);
    }

    #[test]
    fn neighbours_by_memory_node_and_cache() {
        let file = |cpu: u32, name: &str, text: &str| (format!("sys/devices/system/cpu/cpu{cpu}/{name}"), text.into());
        let mut files: Vec<(String, String)> = Vec::new();
        for cpu in 0..8u32 {
            files.push(file(cpu, "topology/physical_package_id", "0"));
            files.push(file(cpu, "topology/core_id", &(cpu / 2).to_string()));
            // Two caches: even and odd pairs of CPUs.
            let cache = if cpu / 2 % 2 == 0 { "0-1,4-5" } else { "2-3,6-7" };
            files.push(file(cpu, "cache/index3/shared_cpu_list", cache));
        }
        let borrowed = |files: &[(String, String)]| -> Vec<u32> {
            let files: Vec<(&str, &str)> = files.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
            by_topology(tree(&files).path(), &(0..8).collect())
        };
        assert_eq!(borrowed(&files), [0, 1, 4, 5, 2, 3, 6, 7], "by cache");
        files.push(("sys/devices/system/node/node0/cpulist".into(), "4-7\n".into()));
        files.push(("sys/devices/system/node/node1/cpulist".into(), "0-3\n".into()));
        assert_eq!(borrowed(&files), [4, 5, 6, 7, 0, 1, 2, 3], "by memory node first");
    }

    #[test]
    fn bfq_counts_where_it_is_chosen() {
        let with = |text: &str| some_disk_uses_bfq(tree(&[("sys/block/sda/queue/scheduler", text)]).path());
        assert!(with("none mq-deadline [bfq]\n") && !with("[none] mq-deadline bfq\n"));
        assert!(!some_disk_uses_bfq(Path::new("/nonexistent")));
    }
}
