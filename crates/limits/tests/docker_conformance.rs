//! The Docker runtime against the conformance suite that every runtime passes: with the containers' cgroups
//! on this machine, and through the engine alone, as with an engine in a virtual machine.

use crate::dockerd::{Dockerd, eventually, signal};
use crate::processes::{BUSY, WAITING};
use crate::suite::{self, Subject, cpu_target, retried};
use bollard::models::HostConfig;
use gainshare_core::fixtures::checked_target;
use gainshare_core::model::JobId;
use gainshare_core::plan::Target;
use gainshare_limits::docker::DockerRuntime;
use gainshare_limits::{JobHandle, LimitMode, Runtime, RuntimeError};
use std::path::Path;

struct Containers {
    runtime: DockerRuntime,
    docker: Dockerd,
    /// Without the containers' cgroups.
    engine_only: bool,
    count: u64,
}

/// Files of a container's group that hold limits.
const LIMIT_FILES: [&str; 10] = [
    "cpu.shares",
    "cpu.weight",
    "cpu.cfs_quota_us",
    "cpu.max",
    "cpuset.cpus",
    "memory.soft_limit_in_bytes",
    "memory.low",
    "blkio.weight",
    "io.weight",
    "io.bfq.weight",
];

impl Containers {
    fn new(mode: LimitMode, engine_only: bool) -> Containers {
        let docker = Dockerd::start();
        // Below an empty root no cgroup is found.
        let empty = tempfile::tempdir().unwrap();
        let root = if engine_only { empty.path() } else { Path::new("/") };
        let runtime = retried(|| DockerRuntime::connect_at(&docker.socket(), mode, root)).unwrap();
        Containers { runtime, docker, engine_only, count: 0 }
    }

    fn start(&mut self, script: &str, cpus: Option<&str>) -> JobHandle {
        self.count += 1;
        let host = HostConfig { cpuset_cpus: cpus.map(str::to_owned), ..Default::default() };
        let id = self.docker.run(&format!("job-{}", self.count), script, &[], host);
        retried(|| self.runtime.adopt(JobId(self.count), &id, None)).unwrap().0
    }

    /// The limits in the kernel's files.
    fn files(&self, id: &str) -> Vec<(String, String)> {
        let present = LIMIT_FILES.into_iter().filter(|file| self.docker.cgroup_file(id, file).exists());
        present.map(|file| (file.to_owned(), self.docker.cgroup_text(id, file))).collect()
    }
}

impl Subject for Containers {
    fn runtime(&mut self) -> &mut dyn Runtime {
        &mut self.runtime
    }

    fn start_busy(&mut self) -> JobHandle {
        self.start(BUSY, Some("0"))
    }

    fn start_waiting(&mut self) -> JobHandle {
        self.start(WAITING, Some("0"))
    }

    fn end(&mut self, job: &JobHandle) {
        let pid = self.docker.pid(&job.key);
        if pid > 0 {
            signal(pid, libc::SIGKILL);
        }
        eventually("the container ends", || self.docker.pid(&job.key) == 0);
    }

    /// On cgroup v2 two values have no way back through the engine: an empty list of CPUs, for which it writes all of
    /// them, and a protection of no memory, for which it writes the least that it accepts.
    fn limits_outside(&mut self, job: &JobHandle) -> Vec<(String, String)> {
        let mut files = self.files(&job.key);
        for (file, value) in &mut files {
            match file.as_str() {
                "cpuset.cpus" if value.is_empty() => {
                    *value = self.docker.cgroup_text(&job.key, "cpuset.cpus.effective")
                }
                "memory.low" if self.docker.soft_memory_bytes(&job.key).is_none() => *value = "0".to_owned(),
                _ => {}
            }
        }
        files
    }

    /// Without the cgroups the runtime reports the engine's own values, as `docker inspect` shows them.
    fn reported_outside(&mut self, job: &JobHandle) -> Vec<(String, String)> {
        if !self.engine_only {
            return self.files(&job.key);
        }
        let host = self.docker.host_config(&job.key);
        let number = |value: Option<i64>| value.unwrap_or(0).to_string();
        [
            ("cpu-shares", number(host.cpu_shares)),
            ("cpu-quota", number(host.cpu_quota)),
            ("cpus", number(host.nano_cpus)),
            ("cpuset-cpus", host.cpuset_cpus.clone().unwrap_or_default()),
            ("memory-reservation", number(host.memory_reservation)),
            ("blkio-weight", number(host.blkio_weight.map(i64::from))),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .to_vec()
    }
}

#[test]
#[ignore = "needs Docker"]
fn docker_runtime_conforms() {
    suite::run_all(&mut Containers::new(LimitMode::Weight, false));
}

#[test]
#[ignore = "needs Docker"]
fn docker_runtime_conforms_through_the_engine_alone() {
    let mut far = Containers::new(LimitMode::Weight, true);
    suite::applied_limits_read_back(&mut far);
    suite::the_same_plan_again_changes_nothing(&mut far);
    suite::an_older_plan_is_refused(&mut far);
    suite::release_restores_what_was(&mut far);
    suite::counters_only_grow(&mut far);
    suite::the_end_of_a_job_is_reported(&mut far);
    // A foreign write through the engine is detected without the kernel's files, too.
    let (job, other) = (far.start_waiting(), far.start_waiting());
    let plan = [(job.clone(), cpu_target(0.6, 0.6)), (other, cpu_target(0.4, 0.4))];
    far.runtime.apply(70, &plan).into_iter().for_each(|result| drop(result.unwrap()));
    let theirs = bollard::models::ContainerUpdateBody { cpu_shares: Some(77), ..Default::default() };
    far.docker.call(async |engine| engine.update_container(&job.key, theirs).await);
    let error = far.runtime.apply(71, &plan).remove(0).unwrap_err();
    assert!(matches!(&error, RuntimeError::ForeignWrite { found, .. } if found == "77"), "{error}");
}

#[test]
#[ignore = "needs Docker and two cores"]
fn cores_mode_deals_whole_cores_and_leaves_the_pinned_alone() {
    let mut containers = Containers::new(LimitMode::Cores, false);
    assert!(containers.runtime.capacity().cores >= 2.0, "this test needs two cores");
    let [a, b, pinned] = [None, None, Some("1")].map(|cpus| containers.start(WAITING, cpus));
    let before = containers.limits_outside(&a);
    let plan = [&a, &b, &pinned].map(|job| (job.clone(), cpu_target(0.5, 0.5)));
    // In an emulated machine beside other tests, the engine may answer too late once.
    let results = retried(|| containers.runtime.apply(1, &plan).into_iter().collect::<Result<Vec<_>, _>>()).unwrap();
    let notes = results[2].notes.join(" ");
    assert!(notes.contains("pinned"), "{notes}");
    let [of_a, of_b, of_pinned] = [&a, &b, &pinned].map(|job| containers.docker.cgroup_text(&job.key, "cpuset.cpus"));
    assert!(of_a != of_b && !of_a.is_empty() && !of_b.is_empty(), "{of_a} and {of_b}");
    assert_eq!(of_pinned, "1");
    containers.runtime.apply(2, &plan).into_iter().for_each(|result| drop(result.unwrap()));
    assert_eq!(containers.docker.cgroup_text(&a.key, "cpuset.cpus"), of_a, "the same plan moves no container");
    containers.runtime.apply(3, &[(a.clone(), checked_target(Target::FREE))]).remove(0).unwrap();
    retried(|| containers.runtime.release(&a)).unwrap();
    assert_eq!(containers.limits_outside(&a), before);
}
