//! Containers that come and go on a real engine, which itself goes and comes back.

use crate::dockerd::{Dockerd, eventually, next, next_within, signal};
use bollard::models::HostConfig;
use gainshare_core::fixtures::checked_target;
use gainshare_core::model::JobId;
use gainshare_core::plan::Target;
use gainshare_limits::docker::{AdoptionRule, ContainerInfo, DockerEvent, DockerRuntime, labels};
use gainshare_limits::{LimitMode, Runtime};
use std::time::Duration;
use tokio::sync::mpsc::Receiver;

const SLEEP: &str = "while :; do sleep 1; done";
const IN: (&str, &str) = (labels::ENABLE, "true");
const OUT: (&str, &str) = (labels::ENABLE, "false");

fn appeared(events: &mut Receiver<DockerEvent>) -> ContainerInfo {
    match next(events) {
        DockerEvent::Appeared(info) => info,
        other => panic!("{other:?}"),
    }
}

/// Starts a container that opted in, one that did not, and one that opted out. Returns the id of the first.
fn start_early(docker: &Dockerd) -> String {
    let own_labels = [IN, (labels::NAME, "vae"), (labels::METRIC, "loss"), (labels::FLOOR, "0.1")];
    let id = docker.run("early", SLEEP, &own_labels, HostConfig::default());
    docker.run("stranger", SLEEP, &[], HostConfig::default());
    docker.run("refuses", SLEEP, &[OUT], HostConfig::default());
    id
}

#[test]
#[ignore = "needs Docker"]
fn the_opted_in_are_followed_and_the_others_left_alone() {
    let docker = Dockerd::start();
    let before = start_early(&docker);
    let engine = docker.engine();
    let mut events = engine.events(AdoptionRule::OptedIn);
    let info = appeared(&mut events);
    assert_eq!((info.id.as_str(), info.name.as_str()), (before.as_str(), "early"));
    assert_eq!(info.labels[labels::NAME], "vae");
    assert!(info.started_ns > 1_700_000_000_000_000_000);

    // Those that come later, with their ends.
    docker.run("late-stranger", "exit 3", &[], HostConfig::default());
    let failing = docker.run("failing", "exit 7", &[IN], HostConfig::default());
    assert_eq!(appeared(&mut events).id, failing);
    assert_eq!(next(&mut events), DockerEvent::Died { id: failing, exit_code: Some(7), oom_killed: false });

    let limited = HostConfig { memory: Some(24 << 20), memory_swap: Some(24 << 20), ..Default::default() };
    let eater =
        docker.run("eater", "sleep 0.3; head -c 64m /dev/zero | tail >/dev/null; exit 0", &[IN], limited.clone());
    assert_eq!(appeared(&mut events).id, eater);
    let mut ooms = 0;
    loop {
        match next(&mut events) {
            DockerEvent::Oom { id } if id == eater => ooms += 1,
            DockerEvent::Died { id, oom_killed, .. } if id == eater => break assert!(oom_killed || ooms > 0),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(next_within(&mut events, Duration::from_millis(300)), None, "nothing else was reported");
}

#[test]
#[ignore = "needs Docker"]
fn a_restart_is_an_end_and_a_new_life_and_a_new_follower_lists_what_runs() {
    let docker = Dockerd::start();
    let before = start_early(&docker);
    let engine = docker.engine();
    let mut events = engine.events(AdoptionRule::OptedIn);
    let info = appeared(&mut events);
    docker.call(async |engine| {
        engine.kill_container(&before, None).await?;
        engine.start_container(&before, None).await
    });
    assert_eq!(next(&mut events), DockerEvent::Died { id: before.clone(), exit_code: Some(137), oom_killed: false });
    let again = appeared(&mut events);
    assert!(again.id == before && again.started_ns > info.started_ns);
    assert_eq!(next_within(&mut events, Duration::from_millis(300)), None, "nothing else was reported");

    // A follower that starts now reports the containers that run.
    let listed = |rule, count: usize| {
        let mut events = engine.events(rule);
        let mut names: Vec<String> = (0..count).map(|_| appeared(&mut events).name).collect();
        assert_eq!(next_within(&mut events, Duration::from_millis(300)), None, "more than {count} containers");
        names.sort();
        names
    };
    assert_eq!(listed(AdoptionRule::OptedIn, 1), ["early"]);
    assert_eq!(listed(AdoptionRule::All, 2), ["early", "stranger"]);
}

#[test]
#[ignore = "needs Docker"]
fn an_engine_that_restarts_loses_nothing() {
    let mut docker = Dockerd::start_to_restart();
    let stays = docker.run("stays", SLEEP, &[IN], HostConfig::default());
    let goes = docker.run("goes", SLEEP, &[IN], HostConfig::default());
    let pid = docker.pid(&goes);
    let mut runtime = DockerRuntime::connect(&docker.socket(), LimitMode::Weight).unwrap();
    let mut events = runtime.engine().events(AdoptionRule::OptedIn);
    let mut seen = [appeared(&mut events).id, appeared(&mut events).id];
    seen.sort();
    let mut both = [stays.clone(), goes.clone()];
    both.sort();
    assert_eq!(seen, both);
    let (job, _) = runtime.adopt(JobId(1), &stays, None).unwrap();
    let (other, _) = runtime.adopt(JobId(2), &goes, None).unwrap();
    let mut half = Target::FREE;
    half.share.cpu = gainshare_core::model::Share::clamped(0.5);
    let half = checked_target(half);
    let plan = [(job.clone(), checked_target(Target::FREE)), (other.clone(), half)];

    docker.shut_down();
    assert!(matches!(next(&mut events), DockerEvent::EngineLost { .. }));
    let error = runtime.apply(1, &plan).remove(0).unwrap_err().to_string();
    assert!(error.contains("no engine answers at") && !error.contains('\n'), "{error}");
    assert!(runtime.is_alive(&job).unwrap(), "its processes run on without the engine");
    runtime.read(&job).expect("usage is read from the kernel");
    signal(pid, libc::SIGKILL);
    eventually("the process is gone", || !runtime.is_alive(&other).unwrap());

    docker.launch().unwrap();
    match next(&mut events) {
        DockerEvent::Died { id, oom_killed: false, .. } => assert_eq!(id, goes, "it ended while the engine was away"),
        event => panic!("{event:?}"),
    }
    assert_eq!(next(&mut events), DockerEvent::EngineBack);
    runtime.apply(2, &[(job.clone(), half), (job.clone(), half)]).remove(0).expect("the engine is asked again");
    let new = docker.run("new", SLEEP, &[IN], HostConfig::default());
    assert_eq!(appeared(&mut events).id, new);
    runtime.release(&job).unwrap();
}
