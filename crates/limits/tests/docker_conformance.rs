//! The Docker runtime against the conformance suite that every runtime passes, seen from this machine and from afar.

mod dockerd;
mod suite;

use bollard::models::HostConfig;
use dockerd::{Dockerd, eventually, signal};
use gainshare_core::model::JobId;
use gainshare_limits::docker::DockerRuntime;
use gainshare_limits::{Handle, Mode, Runtime, RuntimeError};
use suite::{Subject, cpu_target, free};

struct Containers {
    runtime: DockerRuntime,
    docker: Dockerd,
    count: u64,
}

impl Containers {
    fn new(mode: Mode, from_afar: bool) -> Containers {
        let docker = Dockerd::start();
        let runtime = DockerRuntime::connect(&docker.socket(), mode).unwrap();
        let runtime = if from_afar { runtime.from_afar() } else { runtime };
        Containers { runtime, docker, count: 0 }
    }

    fn start(&mut self, cpus: Option<&str>) -> Handle {
        self.count += 1;
        let host = HostConfig { cpuset_cpus: cpus.map(str::to_owned), ..Default::default() };
        let id = self.docker.run(&format!("job-{}", self.count), "while :; do :; done", &[], host);
        self.runtime.adopt(JobId(self.count), &id, None).unwrap().0
    }
}

impl Subject for Containers {
    fn runtime(&mut self) -> &mut dyn Runtime {
        &mut self.runtime
    }

    fn start_busy(&mut self) -> Handle {
        self.start(Some("0"))
    }

    fn end(&mut self, job: &Handle) {
        let pid = self.docker.pid(&job.key);
        if pid > 0 {
            signal(pid, libc::SIGKILL);
        }
        eventually("the container ends", || self.docker.pid(&job.key) == 0);
    }

    fn limits_outside(&mut self, job: &Handle) -> Vec<(String, String)> {
        let files = ["cpu.shares", "cpu.cfs_quota_us", "cpuset.cpus", "memory.soft_limit_in_bytes"];
        files.map(|file| (file.to_owned(), self.docker.cgroup_text(&job.key, file))).to_vec()
    }
}

#[test]
fn docker_runtime_conforms() {
    suite::run_all(&mut Containers::new(Mode::Weight, false));
}

#[test]
fn docker_runtime_conforms_from_afar() {
    let mut far = Containers::new(Mode::Weight, true);
    suite::applied_limits_read_back(&mut far);
    suite::the_same_plan_again_is_harmless(&mut far);
    suite::an_older_plan_is_refused(&mut far);
    suite::release_restores_what_was(&mut far);
    suite::counters_only_grow(&mut far);
    suite::a_job_that_ended_is_told(&mut far);
    // Somebody else's write through the engine is noticed without the kernel's files, too.
    let (job, other) = (far.start_busy(), far.start_busy());
    let plan = [(job.clone(), cpu_target(0.6, 0.6)), (other, cpu_target(0.4, 0.4))];
    far.runtime.apply(70, &plan).into_iter().for_each(|result| drop(result.unwrap()));
    let theirs = bollard::models::ContainerUpdateBody { cpu_shares: Some(77), ..Default::default() };
    far.docker.call(async |engine| engine.update_container(&job.key, theirs).await);
    let error = far.runtime.apply(71, &plan).remove(0).unwrap_err();
    assert!(matches!(&error, RuntimeError::Contested { found, .. } if found == "77"), "{error}");
}

#[test]
fn cores_mode_deals_whole_cores_and_leaves_the_pinned_alone() {
    let mut containers = Containers::new(Mode::Cores, false);
    if containers.runtime.capacity().cores < 2.0 {
        println!("SKIPPED: cores_mode_deals_whole_cores_and_leaves_the_pinned_alone needs two cores");
        return;
    }
    let (a, b, pinned) = (containers.start(None), containers.start(None), containers.start(Some("1")));
    let before = containers.limits_outside(&a);
    let plan = [&a, &b, &pinned].map(|job| (job.clone(), cpu_target(0.5, 0.5)));
    let results = containers.runtime.apply(1, &plan);
    let notes = results[2].as_ref().unwrap().notes.join(" ");
    assert!(notes.contains("pinned"), "{notes}");
    let [of_a, of_b, of_pinned] = [&a, &b, &pinned].map(|job| containers.docker.cgroup_text(&job.key, "cpuset.cpus"));
    assert!(of_a != of_b && !of_a.is_empty() && !of_b.is_empty(), "{of_a} and {of_b}");
    assert_eq!(of_pinned, "1");
    containers.runtime.apply(2, &plan).into_iter().for_each(|result| drop(result.unwrap()));
    assert_eq!(containers.docker.cgroup_text(&a.key, "cpuset.cpus"), of_a, "the same plan moves nobody");
    containers.runtime.apply(3, &[(a.clone(), free())]).remove(0).unwrap();
    containers.runtime.release(&a).unwrap();
    assert_eq!(containers.limits_outside(&a), before);
}
