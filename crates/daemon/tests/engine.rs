//! The daemon and a container engine that fails at the wrong moment. The engine is a stand-in, so no Docker
//! is needed.

use crate::common::{Daemon, is_running, read, sh, wait_until};
use crate::false_engine::Engine;
use gainshare_daemon::api::types::JobState;
use gainshare_daemon::fail::DOCKER_POINTS;
use gainshare_daemon::spec::JobSpec;
use gainshare_limits::RuntimeKind;
use serde_json::{Value, json};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

fn settings(engine: &Engine) -> String {
    format!("runtime = [\"process\", \"docker\"]\ndocker_socket = {:?}\nlease = \"3s\"", engine.socket)
}

fn in_docker(mut spec: JobSpec) -> JobSpec {
    spec.runtime = RuntimeKind::Docker;
    spec.image = Some("image:1".into());
    spec
}

/// B7: the container that the dead daemon started is the job's; it is neither started twice nor lost.
#[test]
fn a_crash_between_the_engines_start_and_the_journal_loses_no_container() {
    for point in DOCKER_POINTS {
        let engine = Engine::start();
        let mut d = Daemon::new(&settings(&engine));
        d.up_with(&[("GAINSHARE_FAIL", point)]);
        d.wait_up();
        let mut job = in_docker(sh("job", "true"));
        job.env.insert("SECRET".into(), "canary".into());
        d.submit(vec![job]).unwrap();
        d.wait_dead();
        d.up();
        let job = d.wait_state("job", JobState::Running);
        assert_eq!(job.attempt, 1, "{point}");
        assert_eq!(engine.state.starts.load(Ordering::Relaxed), 1, "{point}: started once");
        assert_eq!(engine.state.containers.lock().unwrap().len(), 1, "{point}");
        assert!(!d.job_dir("job").join("spec.json").exists(), "{point}: its environment is gone from the disk");
    }
}

/// More rounds than the daemon has work for in these tests. A loop that does not rest makes thousands in a second.
const MOST_ROUNDS_PER_S: f64 = 200.0;

/// Rounds a second of the daemon's main loop during `meanwhile`.
fn rounds_per_s(d: &Daemon, meanwhile: impl FnOnce()) -> f64 {
    let (before, begun) = (d.rounds(), Instant::now());
    meanwhile();
    (d.rounds() - before) as f64 / begun.elapsed().as_secs_f64()
}

/// B10: the engine may take as long as it likes; lease, API and other jobs do not wait for it. The daemon rests,
/// although the moments of kills pass, and no stop is lost.
#[test]
fn an_engine_that_hangs_holds_nothing_up() {
    let engine = Engine::start();
    let d = Daemon::start(&settings(&engine));
    const CONTAINERS: usize = 8;
    let names: Vec<String> = (1..=CONTAINERS).map(|i| format!("container-{i}")).collect();
    d.submit(names.iter().map(|name| in_docker(sh(name, "true"))).collect()).unwrap();
    d.submit(vec![sh("reports", "while :; do echo loss=1.5; sleep 0.1; done")]).unwrap();
    for name in names.iter().map(String::as_str).chain(["reports"]) {
        d.wait_state(name, JobState::Running);
    }
    engine.state.set_hangs(true);
    // The graces end all over the time between two beats.
    for (i, name) in names.iter().enumerate() {
        d.call(d.client.stop(name, i as f64 / CONTAINERS as f64)).unwrap();
    }
    let lease = d.run_dir().join("lease");
    // Six beats and a job, while every request to the engine is pending.
    let mut renewals = std::collections::BTreeSet::new();
    d.submit(vec![sh("process", "true")]).unwrap();
    assert_eq!(d.wait_end("process").state, JobState::Done);
    let rounds_per_s = rounds_per_s(&d, || {
        wait_until("the lease is renewed all the time", 30, || {
            renewals.insert(read(&lease));
            renewals.len() > 6
        });
    });
    assert!(rounds_per_s < MOST_ROUNDS_PER_S, "{rounds_per_s} rounds a second");
    assert!(!d.run_dir().join("lapsed").exists(), "no limit was put back");
    assert_eq!(d.call(d.client.health()).unwrap().live_jobs, CONTAINERS + 1);
    // The daemon no longer waits for its first requests.
    engine.state.set_hangs(false);
    for name in &names {
        let job = d.wait_end(name);
        assert_eq!(job.state, JobState::Stopped, "{job:?}");
    }
    println!("fault: injected={CONTAINERS} violations=0 rounds_per_s={rounds_per_s:.0}");
}

/// A daemon that ends waits for the jobs that it stopped, here for containers whose engine hangs. It rests meanwhile,
/// although it makes no decision about the end of another job.
#[test]
fn a_daemon_that_waits_for_its_jobs_to_end_rests() {
    const SECONDS: u64 = 3;
    let engine = Engine::start();
    let mut d = Daemon::start(&settings(&engine));
    d.submit(vec![in_docker(sh("container", "true")), sh("process", "sleep 600")]).unwrap();
    for name in ["container", "process"] {
        d.wait_state(name, JobState::Running);
    }
    engine.state.set_hangs(true);
    d.call(d.client.shutdown(true)).unwrap();
    assert_eq!(d.wait_end("process").state, JobState::Stopped);
    let rounds_per_s = rounds_per_s(&d, || std::thread::sleep(Duration::from_secs(SECONDS)));
    assert!(rounds_per_s < MOST_ROUNDS_PER_S, "{rounds_per_s} rounds a second");
    assert_eq!(d.job("container").state, JobState::Running, "the daemon waits for it");
    engine.state.set_hangs(false);
    d.wait_dead();
    let (jobs, _) = d.journal();
    assert!(jobs.iter().all(|job| job.state == JobState::Stopped), "{jobs:?}");
    println!("fault: injected=1 violations=0 rounds_per_s={rounds_per_s:.0}");
}

/// B10: containers end at the same moment, and the engine keeps their output open. The end of each is recorded only
/// when the daemon has waited for the rest of its output, which takes two seconds. The daemon waits for all of them
/// together, and not on the thread that renews the lease.
#[test]
fn containers_that_end_together_hold_nothing_up() {
    const CONTAINERS: usize = 8;
    let engine = Engine::start();
    let d = Daemon::start(&settings(&engine));
    let names: Vec<String> = (1..=CONTAINERS).map(|i| format!("container-{i}")).collect();
    d.submit(names.iter().map(|name| in_docker(sh(name, "true"))).collect()).unwrap();
    for name in &names {
        d.wait_state(name, JobState::Running);
    }
    let lease = d.run_dir().join("lease");
    let mut renewals = std::collections::BTreeSet::new();
    engine.state.end_all(3);
    wait_until("all have ended", 60, || {
        renewals.insert(read(&lease));
        d.call(d.client.health()).unwrap().live_jobs == 0
    });
    for name in &names {
        let job = d.job(name);
        assert_eq!((job.state, job.exit_code), (JobState::Failed, Some(3)), "{job:?}");
    }
    // One after the other, the ends would take longer than the lease.
    assert!(!d.run_dir().join("lapsed").exists(), "limits were put back: {} renewals", renewals.len());
    assert!(!d.log().contains("stood still"), "{}", d.log());
    println!("fault: injected={CONTAINERS} violations=0");
}

/// Name and labels of the only container.
fn only_container(engine: &Engine) -> (String, Value) {
    let containers = engine.state.containers.lock().unwrap();
    assert_eq!(containers.len(), 1);
    (containers[0].0.clone(), containers[0].2.clone())
}

/// The labels of a container of another owner: the same number and attempt, but another submission.
fn labels_of_another(mut labels: Value) -> Value {
    labels["gainshare.submitted"] = json!("1.000000");
    labels["gainshare.owner"] = json!("another");
    labels
}

/// While the daemon was away, its container was removed and another one got the name. The old job is gone, and neither
/// the daemon nor the guard touches the new container.
#[test]
fn a_container_whose_name_was_used_again_is_not_taken() {
    // Each has a daemon and an engine of its own. Most of the time they wait for the end of a guard.
    std::thread::scope(|scope| {
        for with_labels in [true, false] {
            scope.spawn(move || use_the_name_again(with_labels));
        }
    });
    println!("fault: injected=2 violations=0");
}

fn use_the_name_again(with_labels: bool) {
    let engine = Engine::start();
    let mut d = Daemon::start(&settings(&engine));
    d.submit(vec![in_docker(sh("job", "true"))]).unwrap();
    d.wait_state("job", JobState::Running);
    let guard = d.wait_for_guard();
    d.kill9();
    let (name, labels) = only_container(&engine);
    let labels = if with_labels { labels_of_another(labels) } else { json!({}) };
    let new = engine.state.replace(&name, labels);
    wait_until("the guard ends", 60, || !is_running(guard));
    d.up();
    let job = d.wait_end("job");
    assert_eq!((job.state, job.attempt), (JobState::Lost, 1), "{job:?}");
    assert_untouched(&engine, &d, &new);
    assert_eq!(d.call(d.client.health()).unwrap().live_jobs, 0, "the new container is no job");
}

/// The same before the id of the container was recorded: the daemon knows the name only, and the labels of the new
/// container have the same number and attempt.
#[test]
fn a_container_of_another_journal_is_not_taken_for_one_that_was_about_to_start() {
    let engine = Engine::start();
    let mut d = Daemon::start(&settings(&engine));
    d.submit(vec![in_docker(sh("first", "true"))]).unwrap();
    d.wait_state("first", JobState::Running);
    let (name, mut labels) = only_container(&engine);
    engine.state.holds_creates.store(true, Ordering::Relaxed);
    d.submit(vec![in_docker(sh("second", "true"))]).unwrap();
    d.wait_state("second", JobState::Starting);
    d.kill9();
    // The name of a container ends with the job's number and the attempt.
    let name = format!("{}-2-1", name.strip_suffix("-1-1").unwrap());
    labels["gainshare.job"] = json!("2");
    let new = engine.state.replace(&name, labels_of_another(labels));
    d.up();
    assert_untouched(&engine, &d, &new);
    assert_eq!(d.job("second").state, JobState::Starting, "the engine has not answered yet");
    engine.state.holds_creates.store(false, Ordering::Relaxed);
    let job = d.wait_end("second");
    assert_eq!((job.state, job.attempt), (JobState::Failed, 1), "{job:?}");
    assert_untouched(&engine, &d, &new);
    assert_eq!(d.wait_state("first", JobState::Running).attempt, 1);
    println!("fault: injected=1 violations=0");
}

/// No request changed the container.
fn assert_untouched(engine: &Engine, d: &Daemon, id: &str) {
    // What the daemon would do to the container, it does within some beats.
    let lease = d.run_dir().join("lease");
    let mut renewals = std::collections::BTreeSet::new();
    wait_until("the daemon goes on", 60, || {
        renewals.insert(read(&lease));
        renewals.len() > 3
    });
    let changes = engine.state.changes.lock().unwrap().clone();
    assert!(!changes.iter().any(|change| change.contains(id)), "{changes:?}");
    let containers = engine.state.containers.lock().unwrap();
    assert!(containers.iter().any(|(_, other, _)| other == id), "it was removed");
}
