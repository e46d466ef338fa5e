//! Limits on real containers: the values of a plan are in force in the kernel, and the original ones after
//! the release.

use crate::dockerd::{Dockerd, LEAST_RESERVATION_BYTES, eventually, is_v2, signal};
use crate::suite;
use bollard::models::{ContainerUpdateBody, HostConfig};
use gainshare_core::check::CheckedTarget;
use gainshare_core::fixtures::checked_target;
use gainshare_core::model::{JobId, PerResource, Share};
use gainshare_core::plan::Target;
use gainshare_limits::docker::{DockerRuntime, OriginalLimits};
use gainshare_limits::{JobHandle, LimitMode, Runtime, RuntimeError};

const BURN: &str = "while :; do :; done";
const SLEEP: &str = "while :; do sleep 1; done";

fn target(cpu: f64, memory: f64) -> CheckedTarget {
    let part = |cpu| PerResource {
        cpu: Share::clamped(cpu),
        memory: Share::clamped(memory),
        block_io: Share::FULL,
        net_io: Share::FULL,
    };
    checked_target(Target { limit: part(cpu), share: part(cpu) })
}

fn adopt(runtime: &mut DockerRuntime, job: u64, id: &str) -> (JobHandle, OriginalLimits) {
    runtime.adopt(JobId(job), id, None).expect("a running container can be adopted")
}

fn apply(
    runtime: &mut DockerRuntime,
    generation: u64,
    job: &JobHandle,
    target: CheckedTarget,
) -> Result<(), RuntimeError> {
    runtime.apply(generation, &[(job.clone(), target)]).remove(0).map(drop)
}

#[test]
#[ignore = "needs Docker"]
fn weights_are_in_force_and_put_back() {
    let docker = Dockerd::start();
    // On one CPU, so that the two compete.
    let pinned = || HostConfig { cpuset_cpus: Some("0".to_owned()), ..Default::default() };
    let ids = ["large", "small"].map(|name| docker.run(name, BURN, &[], pinned()));
    let bystander = docker.run("bystander", SLEEP, &[], HostConfig::default());
    let before = docker.host_config(&bystander);
    let mut runtime = DockerRuntime::connect(&docker.socket(), LimitMode::Weight).unwrap();
    assert!(runtime.capacity().cores >= 1.0 && runtime.capacity().memory_bytes > 1 << 28);
    let [large, small] = [0, 1].map(|i| adopt(&mut runtime, i as u64, &ids[i]).0);

    let plan = [(large.clone(), target(0.75, 1.0)), (small.clone(), target(0.25, 1.0))];
    for result in runtime.apply(1, &plan) {
        let in_force = result.unwrap();
        assert!(in_force.settings.iter().any(|(name, _)| name == "cpu.shares" || name == "cpu.weight"), "{in_force:?}");
    }
    if !is_v2() {
        assert_eq!(docker.host_config(&ids[0]).cpu_shares, Some(1536));
    }
    assert_eq!(docker.cpu_weight(&ids[0]), 150);
    assert_eq!(docker.cpu_weight(&ids[1]), 50);
    assert_eq!(docker.host_config(&bystander), before, "a container that was not adopted is left alone");

    let ratio = suite::cpu_ratio(&mut runtime, &large, &small);
    assert!((2.0..4.5).contains(&ratio), "3:1 was asked for, {ratio:.2} is in effect");

    runtime.release(&large).unwrap();
    assert_eq!(docker.cpu_weight(&ids[0]), 100);
    assert_eq!(docker.cpu_weight(&ids[1]), 50, "the other one is still ours");
    runtime.release(&large).unwrap();
    assert!(apply(&mut runtime, 2, &large, target(0.5, 1.0)).is_err(), "a released container is not written to");
    assert_eq!(docker.cpu_weight(&ids[0]), 100);
}

#[test]
#[ignore = "needs Docker"]
fn quotas_and_memory_respect_what_the_owner_set() {
    let docker = Dockerd::start();
    let host = HostConfig { cpu_shares: Some(300), memory: Some(256 << 20), ..Default::default() };
    let plain = docker.run("plain", SLEEP, &[], host);
    let nano = docker.run("nano", SLEEP, &[], HostConfig { nano_cpus: Some(1_500_000_000), ..Default::default() });
    let mut runtime = DockerRuntime::connect(&docker.socket(), LimitMode::Quota).unwrap();
    let cores = runtime.capacity().cores;
    let own_weight = docker.cpu_weight(&plain);
    let (plain_job, plain_original) = adopt(&mut runtime, 1, &plain);
    let (nano_job, nano_original) = adopt(&mut runtime, 2, &nano);

    let plan = [(plain_job, target(0.25, 0.001)), (nano_job.clone(), target(0.25, 1.0))];
    for result in runtime.apply(1, &plan) {
        result.unwrap();
    }
    let quota = Some((cores * 25_000.0).round() as u64);
    assert_eq!(docker.cpu_quota_us(&plain), quota);
    assert_eq!(docker.cpu_quota_us(&nano), quota, "a container with --cpus takes its quota as --cpus");
    assert_eq!(docker.host_config(&nano).nano_cpus, Some((cores * 0.25 * 1e9) as i64));
    let soft = docker.soft_memory_bytes(&plain).expect("a limit of memory");
    assert!((LEAST_RESERVATION_BYTES..=256 << 20).contains(&soft), "{soft}");
    assert_eq!(docker.host_config(&plain).memory, Some(256 << 20), "the hard limit is the owner's");

    // Asking for more than the owner allowed gives what the owner allowed.
    apply(&mut runtime, 2, &nano_job, target(0.99, 1.0)).unwrap();
    assert!(docker.host_config(&nano).nano_cpus.unwrap() <= 1_500_000_000);

    // Another process cleans up from the journal; the container with `--cpus` has stopped in the meantime.
    drop(runtime);
    docker.call(async |engine| engine.kill_container(&nano, None).await);
    let journal = serde_json::to_string(&[plain_original, nano_original]).unwrap();
    let originals: Vec<OriginalLimits> = serde_json::from_str(&journal).unwrap();
    let mut cleaner = DockerRuntime::connect(&docker.socket(), LimitMode::Quota).unwrap();
    for original in &originals {
        cleaner.restore(original).unwrap();
        cleaner.restore(original).unwrap();
    }
    assert_eq!(docker.cpu_quota_us(&plain), None);
    assert_eq!(docker.cpu_weight(&plain), own_weight);
    assert_eq!(docker.soft_memory_bytes(&plain), None);
    assert_eq!(docker.host_config(&nano).nano_cpus, Some(1_500_000_000));
    docker.call(async |engine| engine.remove_container(&nano, None).await);
    cleaner.restore(&originals[1]).expect("does nothing for a container that is gone");
}

#[test]
#[ignore = "needs Docker"]
fn foreign_writes_are_reported_and_not_fought_over() {
    let docker = Dockerd::start();
    let id = docker.run("wanted", SLEEP, &[], HostConfig::default());
    let mut runtime = DockerRuntime::connect(&docker.socket(), LimitMode::Weight).unwrap();
    let (job, _) = adopt(&mut runtime, 1, &id);
    let rival = docker.run("rival", SLEEP, &[], HostConfig::default());
    let (other, _) = adopt(&mut runtime, 2, &rival);
    let plan = [(job.clone(), target(0.6, 1.0)), (other, target(0.4, 1.0))];
    runtime.apply(5, &plan).into_iter().for_each(|result| drop(result.unwrap()));
    assert_eq!(docker.cpu_weight(&id), 120);
    let ours = docker.host_config(&id).cpu_shares.unwrap().to_string();
    assert!(matches!(runtime.apply(4, &plan).remove(0), Err(RuntimeError::OldGeneration { given: 4, known: 5, .. })));
    runtime.apply(5, &plan).into_iter().for_each(|result| drop(result.expect("the same plan again changes nothing")));

    // A limit this mode does not manage is its owner's business.
    let quota = ContainerUpdateBody { cpu_quota: Some(90_000), ..Default::default() };
    docker.call(async |engine| engine.update_container(&id, quota).await);
    runtime.apply(6, &plan).remove(0).expect("the owner's quota is no contest");

    // A foreign write through the engine, and then one to the kernel's file around the engine.
    let shares = ContainerUpdateBody { cpu_shares: Some(700), ..Default::default() };
    docker.call(async |engine| engine.update_container(&id, shares).await);
    let error = runtime.apply(7, &plan).remove(0).unwrap_err();
    assert!(matches!(&error, RuntimeError::ForeignWrite { found, .. } if found == "700"), "{error}");
    assert!(error.to_string().contains(&ours), "{error}");
    let theirs = docker.cpu_weight(&id);
    assert!(runtime.original(&job).unwrap().values.values().any(|value| value.to_string() == "700"));
    docker.write_cpu_weight(&id, 80);
    assert!(matches!(runtime.apply(8, &plan).remove(0), Err(RuntimeError::ForeignWrite { .. })));
    assert_eq!(docker.cpu_weight(&id), 80, "not written while backing off");
    eventually("after the back-off our value is written again", || {
        let _ = runtime.apply(9, &plan);
        docker.cpu_weight(&id) == 120
    });
    runtime.release(&job).unwrap();
    assert_eq!(docker.cpu_weight(&id), theirs, "what its owner set last is what the owner gets back");
    assert_eq!(docker.cpu_quota_us(&id), Some(90_000));
}

/// A container that ends and is started again is another job, though its id is the same.
#[test]
#[ignore = "needs Docker"]
fn a_restarted_container_is_another_job_and_ended_jobs_stay_ended() {
    let docker = Dockerd::start();
    let id = docker.run("restarted", SLEEP, &[], HostConfig::default());
    let mut runtime = DockerRuntime::connect(&docker.socket(), LimitMode::Weight).unwrap();
    let (job, _) = adopt(&mut runtime, 3, &id);
    apply(&mut runtime, 10, &job, target(0.5, 1.0)).unwrap();
    assert!(runtime.is_alive(&job).unwrap());
    signal(docker.pid(&id), libc::SIGKILL);
    eventually("the job is dead", || !runtime.is_alive(&job).unwrap());
    docker.call(async |engine| engine.start_container(&id, None).await);
    assert!(!runtime.is_alive(&job).unwrap());
    assert!(matches!(apply(&mut runtime, 11, &job, target(0.5, 1.0)), Err(RuntimeError::Gone { .. })));
    let (next, _) = adopt(&mut runtime, 4, &id);
    assert!(runtime.is_alive(&next).unwrap() && !runtime.is_alive(&job).unwrap());
    assert!(matches!(runtime.read(&job), Err(RuntimeError::Gone { .. })));
    runtime.read(&next).unwrap();
    docker.call(async |engine| {
        let force = bollard::query_parameters::RemoveContainerOptions { force: true, ..Default::default() };
        engine.remove_container(&id, Some(force)).await
    });
    assert!(matches!(runtime.read(&next), Err(RuntimeError::Gone { .. })));
    assert!(matches!(apply(&mut runtime, 12, &next, target(0.5, 1.0)), Err(RuntimeError::Gone { .. })));
    runtime.release(&next).expect("does nothing");
    for unknown in [id.as_str(), "", "..", "../images", "a/b?c", "no-such-name"] {
        assert!(matches!(runtime.adopt(JobId(5), unknown, None), Err(RuntimeError::Gone { .. })), "{unknown}");
    }
}

#[test]
#[ignore = "needs Docker"]
fn what_a_hung_engine_does_late_is_no_contest() {
    let docker = Dockerd::start();
    let ids = ["one", "two"].map(|name| docker.run(name, SLEEP, &[], HostConfig::default()));
    let mut runtime = DockerRuntime::connect(&docker.socket(), LimitMode::Weight).unwrap();
    let [one, two] = [0, 1].map(|i| adopt(&mut runtime, i as u64, &ids[i]).0);
    let plan = [(one.clone(), target(0.75, 1.0)), (two, target(0.25, 1.0))];
    docker.signal_engine(libc::SIGSTOP);
    let errors: Vec<String> = runtime.apply(1, &plan).into_iter().map(|r| r.unwrap_err().to_string()).collect();
    let is_alive = runtime.is_alive(&one);
    docker.signal_engine(libc::SIGCONT);
    assert!(errors.iter().all(|error| error.contains("did not answer") && !error.contains('\n')), "{errors:?}");
    assert!(is_alive.unwrap());
    eventually("the engine does what it was asked for", || docker.cpu_weight(&ids[0]) == 150);
    runtime.apply(2, &plan).into_iter().for_each(|result| drop(result.expect("it was our own write")));
    runtime.release(&one).unwrap();
    assert_eq!(docker.cpu_weight(&ids[0]), 100);
}
