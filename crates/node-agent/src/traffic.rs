//! What the tasks of distributed jobs send and receive.
//!
//! **Problem.** Placement keeps together what talks much. The kernel counts bytes for each network namespace, and the
//! agent may not enter those of pods.
//!
//! **How.** `/proc/PID/net/dev` shows the counters of the network namespace of that process. One process of each pod is
//! found by the uid of the pod in `/proc/PID/cgroup`. The agent has a process namespace of its own, so the host's
//! `/proc` is mounted for it, read-only, if the administrator wants that. Without it nothing is measured.
//!
//! **Properties.** Nothing is written. Only pods are measured that the operator marks: those with the network of their
//! node are not among them. The process is compared with the pod at each reading, because numbers of processes are used
//! again. A search reads at most [`MAX_PROCESSES`] processes, and [`SEARCH_PACE`] lies between two searches. A file is
//! read up to [`MAX_FILE_BYTES`]. Counters that went back, as after a restart of the pod's sandbox, give no rate.

use super::cgroups::uid_of;
use gainshare_core::model::{Span, Time};
use gainshare_kube_api::names::PodUid;
use gainshare_kube_api::wire::ReportedTraffic;
use gainshare_limits::net_dev::{self, NetBytes};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::{Path, PathBuf};

/// Between two readings of a pod's counters: long enough for a mean over many steps of training.
const READ_PACE: Span = Span::from_secs(5);
const SEARCH_PACE: Span = Span::from_secs(10);
const MAX_PROCESSES: usize = 100_000;
const MAX_FILE_BYTES: u64 = 64 * 1024;

/// The host's processes.
#[derive(Debug, Default)]
pub(crate) struct HostProcesses {
    /// The host's `/proc`, if the agent may read it.
    root: Option<PathBuf>,
    next_search: Time,
}

/// The traffic of one pod.
#[derive(Debug, Default)]
pub(crate) struct TrafficMeter {
    pid: Option<u32>,
    last: Option<(Time, NetBytes)>,
    rate: Option<ReportedTraffic>,
}

impl HostProcesses {
    pub(crate) fn at(root: Option<PathBuf>) -> HostProcesses {
        HostProcesses { root, next_search: Time::ZERO }
    }

    /// A process of each of these pods, of those that have one. Nothing before the next search is due.
    pub(crate) fn find(&mut self, now: Time, uids: &BTreeSet<&str>) -> BTreeMap<PodUid, u32> {
        let mut found = BTreeMap::new();
        let Some(root) = self.root.as_ref().filter(|_| !uids.is_empty() && now >= self.next_search) else {
            return found;
        };
        self.next_search = now + SEARCH_PACE;
        let names = std::fs::read_dir(root).into_iter().flatten().flatten().map(|entry| entry.file_name());
        let pids = names.filter_map(|name| name.to_str()?.parse::<u32>().ok());
        for pid in pids.take(MAX_PROCESSES) {
            if found.len() == uids.len() {
                break;
            }
            let Some(text) = cgroups_of(root, pid) else { continue };
            if let Some(uid) = pods_in(&text).find(|uid| uids.contains(uid.as_str())) {
                found.entry(uid).or_insert(pid);
            }
        }
        found
    }
}

impl TrafficMeter {
    /// Whether a process of the pod must be found first.
    pub(crate) fn is_lost(&self) -> bool {
        self.pid.is_none()
    }

    pub(crate) fn set_process(&mut self, pid: u32) {
        (self.pid, self.last) = (Some(pid), None);
    }

    pub(crate) fn rate(&self) -> Option<ReportedTraffic> {
        self.rate
    }

    /// Reads the pod's counters if that is due.
    pub(crate) fn measure(&mut self, now: Time, host: &HostProcesses, uid: &str) {
        let (Some(root), Some(pid)) = (&host.root, self.pid) else { return };
        if self.last.is_some_and(|(at, _)| now.since(at) < READ_PACE) {
            return;
        }
        let text = read_bounded(&root.join(pid.to_string()).join("net/dev"));
        let is_same = cgroups_of(root, pid).is_some_and(|text| pods_in(&text).any(|found| found == uid));
        let Some(bytes) = text.filter(|_| is_same).and_then(|text| net_dev::parse(&text)) else {
            *self = TrafficMeter::default();
            return;
        };
        if let Some((at, before)) = self.last {
            let elapsed_s = now.since(at).as_secs_f64();
            let rate = |now: u64, before: u64| now.checked_sub(before).map(|bytes| bytes as f64 / elapsed_s);
            let both = rate(bytes.received, before.received).zip(rate(bytes.sent, before.sent));
            self.rate = both.map(|(received_bytes_s, sent_bytes_s)| ReportedTraffic { received_bytes_s, sent_bytes_s });
        }
        self.last = Some((now, bytes));
    }
}

fn cgroups_of(root: &Path, pid: u32) -> Option<String> {
    read_bounded(&root.join(pid.to_string()).join("cgroup"))
}

/// The uids of pods in the groups of a process.
fn pods_in(cgroups: &str) -> impl Iterator<Item = PodUid> {
    cgroups.lines().flat_map(|line| line.split('/')).filter_map(uid_of)
}

fn read_bounded(path: &Path) -> Option<String> {
    let mut bytes = Vec::new();
    std::fs::File::open(path).ok()?.take(MAX_FILE_BYTES).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "6a1f3e5c-0b0e-4f7e-9a58-2f3f6f1f0d11";

    struct Host {
        dir: tempfile::TempDir,
        processes: HostProcesses,
        meter: TrafficMeter,
        second: u64,
    }

    impl Host {
        fn new() -> Host {
            let dir = tempfile::tempdir().unwrap();
            let processes = HostProcesses::at(Some(dir.path().to_owned()));
            Host { dir, processes, meter: TrafficMeter::default(), second: 100 }
        }

        fn process(&self, pid: u32, cgroup: &str, dev: &str) {
            let folder = self.dir.path().join(pid.to_string());
            std::fs::create_dir_all(folder.join("net")).unwrap();
            std::fs::write(folder.join("cgroup"), cgroup).unwrap();
            std::fs::write(folder.join("net/dev"), dev).unwrap();
        }

        fn pass(&mut self, seconds: u64) -> Option<(f64, f64)> {
            self.second += seconds;
            let now = Time::from_secs_f64(self.second as f64);
            if self.meter.is_lost() {
                let found = self.processes.find(now, &BTreeSet::from([UID, "another"]));
                found.get(UID).into_iter().for_each(|pid| self.meter.set_process(*pid));
            }
            self.meter.measure(now, &self.processes, UID);
            self.meter.rate().map(|rate| (rate.received_bytes_s, rate.sent_bytes_s))
        }
    }

    fn dev(received: u64, sent: u64) -> String {
        format!("h\nh\n lo: 9 0 0 0 0 0 0 0 9 0\n eth0: {received} 1 0 0 0 0 0 0 {sent} 1 0 0 0 0 0 0\n")
    }

    #[test]
    fn rates_are_those_of_a_process_of_the_pod() {
        let mut host = Host::new();
        let v2 = format!("0::/../../kubepods-pod{}.slice/cri-containerd-1.scope\n", UID.replace('-', "_"));
        host.process(7, "0::/system.slice/kubelet.service\n", &dev(5, 5));
        host.process(8, &format!("4:cpu:/kubepods/burstable/podother-{UID}/x\n"), &dev(7, 7));
        host.process(4000, &v2, &dev(1000, 10));
        assert_eq!(host.pass(1), None, "one reading is no rate");
        host.process(4000, &v2, &dev(6000, 60));
        assert_eq!(host.pass(2), None, "too early");
        assert_eq!(host.pass(3), Some((1000.0, 10.0)));
        // The sandbox was made again: its counters begin at zero.
        host.process(4000, &v2, &dev(3, 3));
        assert_eq!(host.pass(5), None);
        host.process(4000, &v2, &dev(8, 3));
        assert_eq!(host.pass(5), Some((1.0, 0.0)));
    }

    #[test]
    fn a_process_that_is_gone_or_anothers_is_replaced() {
        let mut host = Host::new();
        let v1 = format!("5:cpu:/kubepods/burstable/pod{UID}/0123\n4:memory:/\n");
        host.process(50, &v1, &dev(0, 0));
        host.pass(1);
        // The number was given to a process of another pod.
        host.process(50, "5:cpu:/kubepods/burstable/podsomebody/0123\n", &dev(u64::MAX, u64::MAX));
        assert_eq!(host.pass(5), None);
        host.process(60, &v1, &dev(100, 0));
        assert_eq!(host.pass(1), None, "the next search is not due yet");
        assert_eq!(host.pass(10), None);
        host.process(60, &v1, &dev(150, 5));
        assert_eq!(host.pass(5), Some((10.0, 1.0)));
        host.process(60, &v1, "garbage");
        assert_eq!(host.pass(5), None);
    }

    #[test]
    fn nothing_is_read_without_the_hosts_processes() {
        let mut host = Host::new();
        host.processes = HostProcesses::default();
        host.process(50, &format!("5:cpu:/pod{UID}\n"), &dev(0, 0));
        assert!((0..4).all(|_| host.pass(10).is_none()));
    }

    /// The kernel shows the namespace of the process to others, too: this test's own.
    #[test]
    fn the_kernels_own_file_is_read() {
        let text = read_bounded(Path::new("/proc/self/net/dev")).unwrap();
        assert!(text.contains("lo:"), "{text}");
    }
}
