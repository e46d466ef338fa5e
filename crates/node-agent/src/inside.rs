//! The pages of the library inside pods: how many threads the parallel regions of each pod have, and how much of its
//! GPU each pod may use.
//!
//! **Problem.** A resize changes what a pod gets of its node, but the number of its threads stays. The library that the
//! webhook puts into pods changes it, if the page says so. The page lies in a volume that the pod can write, too.
//!
//! **How.** Under the kernel's weights a pod's part of the node is its CPU request by the requests of all pods that are
//! shared here. Teams are dealt out by these parts with the rules of the daemon ([`gainshare_core::teams`]), and no
//! team is larger than the pod's CPU limit. Shares of GPUs are decided elsewhere ([`super::gpu`]). What changes is
//! written at once, and every page once a second: the library ignores a page whose heartbeat is old. The page is opened
//! again for each write, so that nothing is kept of a volume that is gone.
//!
//! **Properties.** `the_team_follows_the_request`. `links_are_not_followed`: a path is resolved below the kubelet's
//! folder of pods without following any link, what is no page is left alone, and nothing is mapped. A pod can spoil its
//! own page only.

use super::job::{PageState, PodJob};
use gainshare_core::model::{Span, Time};
use gainshare_core::teams::{TURN, TeamClaim, deal_teams};
use gainshare_kube_api::names::{PAGE_FILE, PAGE_VOLUME, PodUid};
use gainshare_kube_api::resources::LEAST_CPU_MILLI;
use gainshare_limits::machine::monotonic_ns;
use gainshare_page::{HEADER_BYTES, Orders, PAGE_BYTES, REPORT_SUFFIX, Report, decode, decode_report, encode};
use gainshare_progress::Root;
use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Component, Path, PathBuf};

/// The time between two heartbeats.
const BEAT: Span = Span::from_secs(1);

/// The kubelet's folder of a pod's volumes of the kind emptyDir.
const VOLUMES: &str = "volumes/kubernetes.io~empty-dir";

/// The teams of the node's pods.
#[derive(Debug, Default)]
pub(crate) struct Teams {
    /// The kubelet's folder of pods, if the agent may write pages there.
    pods: Option<Root>,
    /// The last turn of the teams.
    turn: usize,
    next_beat: Time,
}

/// The CPU of a node.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NodeCpu {
    pub(crate) cores: f64,
    /// The node has no CPU to spare.
    pub(crate) is_scarce: bool,
}

impl Teams {
    /// `pods` is the place where the kubelet's folder of pods is mounted.
    pub(crate) fn at(pods: &Path) -> io::Result<Teams> {
        Ok(Teams { pods: Some(Root::open(pods)?), ..Teams::default() })
    }

    /// The kubelet's folder of pods, if the agent may write pages there.
    pub(crate) fn pods(&self) -> Option<&Root> {
        self.pods.as_ref()
    }

    /// Deals the teams out and writes the pages. `generation` is the number of the last plan.
    pub(crate) fn step(&mut self, now: Time, jobs: &mut BTreeMap<PodUid, PodJob>, cpu: NodeCpu, generation: u64) {
        let Some(pods) = &self.pods else { return };
        let mut running: Vec<&mut PodJob> = jobs.values_mut().filter(|job| job.pod.started_ms.is_some()).collect();
        running.iter_mut().for_each(|job| record_use(job, cpu));
        let weight = |job: &PodJob| job.pod.now.requests.cpu_milli.unwrap_or(0).max(LEAST_CPU_MILLI) as f64;
        let all: f64 = running.iter().map(|job| weight(job)).sum();
        let claim = |job: &&mut PodJob| TeamClaim {
            share: weight(job) / all,
            team: job.team,
            is_serial: job.team_use.is_serial(),
            is_new: job.page == PageState::Written && job.team_use.serial().is_none(),
        };
        let claims: Vec<TeamClaim> = running.iter().map(claim).collect();
        let turn = (now.0 / TURN.0) as usize;
        let is_same_turn = std::mem::replace(&mut self.turn, turn) == turn;
        let is_due = now >= self.next_beat;
        if is_due {
            self.next_beat = now + BEAT;
        }
        for (job, team) in running.into_iter().zip(deal_teams(cpu.cores, &claims, turn, is_same_turn)) {
            let gpu = job.gpu.order;
            let has_changed = (job.team, job.gpu_written) != (team, gpu);
            (job.team, job.gpu_written) = (team, gpu);
            if is_due || has_changed {
                write_page(pods, job, generation);
            }
        }
    }
}

/// The cores of the pod's CPU limit.
fn most_threads(job: &PodJob) -> u32 {
    let limit = job.pod.now.limits.cpu_milli;
    limit.map_or(u32::MAX, |milli| u32::try_from(milli.div_ceil(1000)).unwrap_or(u32::MAX).max(1))
}

/// Takes the last reading of the pod's counters. The use of a pod with a limit shows the limit and not the pod.
fn record_use(job: &mut PodJob, cpu: NodeCpu) {
    let Some(at) = job.meter.read_at().filter(|_| job.team > 0 && job.pod.now.limits.cpu_milli.is_none()) else {
        return;
    };
    job.team_use.record(at, job.meter.consumed().cpu * cpu.cores, job.team, cpu.is_scarce);
}

fn write_page(pods: &Root, job: &mut PodJob, generation: u64) {
    let name = |job: &PodJob| format!("{}/{}", job.pod.namespace, job.pod.name);
    let (team, (gpu_share, gpu_jobs)) = (job.team.min(most_threads(job)), job.gpu.order);
    let orders = Orders { generation, team, gpu_share, gpu_jobs, ..Orders::default() };
    let state = match write_orders(pods, &job.pod.uid, &orders) {
        Ok(()) => PageState::Written,
        Err(error) if error.kind() == io::ErrorKind::NotFound => PageState::Absent,
        Err(error) => {
            if job.page != PageState::Refused {
                tracing::warn!(
                    pod = name(job),
                    "its threads do not follow its share, its page cannot be written: {error}"
                );
            }
            PageState::Refused
        }
    };
    if state == PageState::Written && job.page != state {
        tracing::info!(pod = name(job), team = job.team, "its threads follow its share");
    }
    job.page = state;
}

/// Writes orders into a pod's page, with a new heartbeat.
fn write_orders(pods: &Root, uid: &str, orders: &Orders) -> io::Result<()> {
    let no_page = |why| io::Error::new(io::ErrorKind::InvalidData, why);
    let path = page_path(uid).ok_or_else(|| no_page("its uid is not a name"))?;
    let file = pods.writable(&path)?;
    let mut bytes = [0; PAGE_BYTES];
    if file.metadata()?.len() != PAGE_BYTES as u64 {
        return Err(no_page("the file has another length than a page"));
    }
    file.read_exact_at(&mut bytes, 0)?;
    // The container that made the page knows whether the pool of OpenBLAS may grow.
    let found = decode(&bytes).ok_or_else(|| no_page("the file is not a page"))?;
    let orders = Orders { blas_may_grow: found.blas_may_grow, ..*orders };
    file.write_all_at(&encode(&orders, monotonic_ns())[..HEADER_BYTES], 0)
}

/// What the library inside a pod has reported; `None`: there is no report. No link is followed, as for the page.
pub(crate) fn read_report(pods: &Root, uid: &str) -> Option<Report> {
    let path = page_path(uid)?.with_file_name(format!("{PAGE_FILE}{REPORT_SUFFIX}"));
    let mut bytes = [0; PAGE_BYTES];
    pods.writable(&path).ok()?.read_exact_at(&mut bytes, 0).ok()?;
    let report = decode_report(&bytes)?;
    Some(Report { waited_ns: report.waited_until(monotonic_ns()), ..report })
}

/// The page of a pod below the kubelet's folder of pods.
fn page_path(uid: &str) -> Option<PathBuf> {
    let mut parts = Path::new(uid).components();
    let (Some(Component::Normal(uid)), None) = (parts.next(), parts.next()) else { return None };
    Some(Path::new(uid).join(VOLUMES).join(PAGE_VOLUME).join(PAGE_FILE))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    fn make_page(pods: &Path, uid: &str) -> PathBuf {
        let page = pods.join(page_path(uid).unwrap());
        fs::create_dir_all(page.parent().unwrap()).unwrap();
        let orders = Orders { team: 9, blas_may_grow: true, gpu_share: 7, ..Orders::default() };
        fs::write(&page, encode(&orders, 1)).unwrap();
        page
    }

    fn write_team(pods: &Root, uid: &str, team: u32, generation: u64) -> io::Result<()> {
        write_orders(pods, uid, &Orders { generation, team, ..Orders::default() })
    }

    fn read(page: &Path) -> Option<Orders> {
        decode(&fs::read(page).unwrap().try_into().unwrap())
    }

    #[test]
    fn a_page_gets_team_and_heartbeat() {
        let dir = tempfile::tempdir().unwrap();
        let page = make_page(dir.path(), "u1");
        let pods = Root::open(dir.path()).unwrap();
        write_team(&pods, "u1", 3, 5).unwrap();
        let expected = Orders { generation: 5, team: 3, blas_may_grow: true, ..Orders::default() };
        assert_eq!(read(&page), Some(expected));
        let bytes = fs::read(&page).unwrap();
        let words: Vec<_> = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_ne_bytes(*word).into()).collect();
        assert_eq!(gainshare_page::read(&words, monotonic_ns()), Some(expected), "the heartbeat is new");
        assert_eq!(write_team(&pods, "u2", 3, 5).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn links_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let victim = make_page(dir.path(), "victim");
        let page = make_page(dir.path(), "u1");
        let pods = Root::open(dir.path()).unwrap();
        let refused = |uid: &str| {
            let error = write_team(&pods, uid, 3, 5).unwrap_err();
            assert_eq!(
                read(&victim).map(|orders| orders.team),
                Some(9),
                "{uid}: another pod's page was written: {error}"
            );
        };
        // A link to another pod's page, and a link within the volume.
        fs::remove_file(&page).unwrap();
        symlink(&victim, &page).unwrap();
        refused("u1");
        fs::remove_file(&page).unwrap();
        fs::write(page.with_file_name("real"), encode(&Orders::default(), 1)).unwrap();
        symlink("real", &page).unwrap();
        refused("u1");
        // The volume itself is a link.
        let volume = page.parent().unwrap();
        fs::remove_dir_all(volume).unwrap();
        symlink(victim.parent().unwrap(), volume).unwrap();
        refused("u1");
        // The uid leads elsewhere.
        for uid in ["../victim", "u1/../victim", "/victim", "", "."] {
            refused(uid);
        }
    }

    #[test]
    fn what_is_no_page_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let page = make_page(dir.path(), "u1");
        let pods = Root::open(dir.path()).unwrap();
        for bytes in [&b""[..], &[7; PAGE_BYTES], &[0; 2 * PAGE_BYTES]] {
            fs::write(&page, bytes).unwrap();
            assert_eq!(write_team(&pods, "u1", 3, 5).unwrap_err().kind(), io::ErrorKind::InvalidData);
            assert_eq!(fs::read(&page).unwrap(), bytes, "{} bytes", bytes.len());
        }
        let report = page.with_file_name("page.report");
        for bytes in [&b""[..], &[7; PAGE_BYTES], &encode(&Orders::default(), 1)] {
            fs::write(&report, bytes).unwrap();
            assert_eq!(read_report(&pods, "u1"), None, "{} bytes are no report", bytes.len());
        }
        fs::write(&report, gainshare_page::empty_report()).unwrap();
        assert_eq!(read_report(&pods, "u1"), Some(Report::default()));
        // A reader of a FIFO waits for a writer; the agent does not.
        fs::remove_file(&page).unwrap();
        nix::unistd::mkfifo(&page, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(write_team(&pods, "u1", 3, 5).is_err());
        fs::remove_file(&page).unwrap();
        fs::create_dir(&page).unwrap();
        assert!(write_team(&pods, "u1", 3, 5).is_err());
    }
}
