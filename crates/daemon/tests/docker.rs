//! Containers as jobs, with a real engine: adopted by label, started by us, found again, let go as they were.

use crate::common::{Daemon, read, sh, trainer, wait_until};
use crate::dockerd::{Dockerd, IMAGE};
use bollard::models::HostConfig;
use gainshare_daemon::api::types::JobState;
use gainshare_daemon::spec::{Format, JobSpec, parse};
use gainshare_limits::RuntimeKind;

fn settings(docker: &Dockerd) -> String {
    format!(
        "runtime = [\"process\", \"docker\"]\ndocker_socket = {:?}\nlease = \"3s\"\ndocker_trust_labels = true",
        docker.socket()
    )
}

fn in_docker(mut spec: JobSpec) -> JobSpec {
    spec.runtime = RuntimeKind::Docker;
    spec.image = Some(IMAGE.into());
    spec
}

#[test]
#[ignore = "needs Docker"]
fn a_labelled_container_is_a_job_until_it_ends_and_keeps_its_own_limits() {
    let docker = Dockerd::start();
    let script =
        "i=0; while [ $i -lt 200 ]; do i=$((i+1)); echo step $i/200 loss=$((1000/i)).5; sleep 0.05; done; exit 3";
    let labels = [("gainshare.enable", "true"), ("gainshare.name", "adopted"), ("gainshare.floor", "0.7")];
    let host = || HostConfig { cpu_shares: Some(300), ..Default::default() };
    let id = docker.run("somebody", script, &labels, host());
    let other = docker.run("stranger", "sleep 60", &[], host());
    let mut d = Daemon::start(&settings(&docker));
    wait_until("the container is adopted", 10, || d.call(d.client.job("adopted")).is_ok());
    d.submit(vec![sh("neighbour", "exec sleep 60")]).unwrap();
    let job = d.wait("adopted", "reporting", |j| j.metric.as_ref().is_some_and(|m| m.step > Some(3)));
    assert_eq!((job.runtime.as_str(), job.state), ("docker", JobState::Running));
    d.wait("adopted", "limited", |j| j.share.is_some_and(|s| s > 0.69));
    wait_until("its limit is in force", 10, || docker.cgroup_text(&id, "cpu.shares") != "300");

    d.kill9();
    d.up();
    let again = d.job("adopted");
    assert_eq!((again.id, again.state), (job.id, JobState::Running), "the same job, not another");
    let guarded = docker.cgroup_text(&id, "cpu.shares");
    assert_ne!(guarded, "300");
    d.kill9();
    wait_until("the guard puts its limit back", 15, || docker.cgroup_text(&id, "cpu.shares") == "300");
    d.up();
    wait_until("its limit is in force again", 10, || docker.cgroup_text(&id, "cpu.shares") == guarded);

    let end = d.wait_end("adopted");
    assert_eq!((end.state, end.exit_code), (JobState::Failed, Some(3)));
    let history = d.call(d.client.samples("adopted", 0.0)).unwrap();
    let steps: Vec<u64> = history.samples.iter().map(|s| s.step.unwrap()).collect();
    assert_eq!(steps, (1..=200).collect::<Vec<u64>>(), "no sample lost, none twice");
    assert_eq!(docker.host_config(&id).cpu_shares, Some(300), "as it was");
    assert_eq!(docker.host_config(&other).cpu_shares, Some(300), "never touched");
    assert_eq!(d.call(d.client.jobs(true)).unwrap().len(), 2, "the stranger is no job");
}

#[test]
#[ignore = "needs Docker"]
fn the_same_job_file_runs_as_a_process_and_as_a_container() {
    let docker = Dockerd::start();
    let d = Daemon::start(&settings(&docker));
    let folder = d.dir.path().join("work");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("data"), "7").unwrap();
    let file = format!(
        "image = {IMAGE:?}\nstart = \"plain\"\ncommand = [\"sh\", \"-c\", \"echo loss=$(cat data) word=$WORD; echo $WORD >> made\"]\n[env]\nWORD = \"both\"\n"
    );
    let specs = parse(&file, Format::Toml, "job.toml", &folder).unwrap();
    for (name, kind) in [("as-process", RuntimeKind::Process), ("as-container", RuntimeKind::Docker)] {
        let mut spec = specs[0].clone();
        (spec.name, spec.runtime) = (Some(name.into()), kind);
        d.submit(vec![spec]).unwrap();
        let job = d.wait_end(name);
        assert_eq!((job.state, job.exit_code), (JobState::Done, Some(0)), "{job:?}");
        assert_eq!(job.metric.unwrap().value, 7.0);
        let log = read(std::path::Path::new(&job.dir).join("output.log").as_ref());
        assert_eq!(log, "loss=7 word=both\n");
    }
    assert_eq!(read(&folder.join("made")), "both\nboth\n");

    d.submit(vec![in_docker(sh("stubborn", "trap '' TERM; echo up; while :; do sleep 0.1; done"))]).unwrap();
    d.wait_state("stubborn", JobState::Running);
    d.call(d.client.stop("stubborn", 1.0)).unwrap();
    assert_eq!(d.wait_end("stubborn").state, JobState::Stopped);
    let mut missing = in_docker(sh("missing", "true"));
    missing.image = Some("no-such-image:1".into());
    d.submit(vec![missing]).unwrap();
    let missing = d.wait_end("missing");
    let why = missing.reason.unwrap().text;
    assert!(missing.state == JobState::Failed && why.contains("no-such-image:1"), "{why}");

    let mut d = d;
    d.submit(vec![in_docker(trainer("survivor", 40, "0.05"))]).unwrap();
    d.wait("survivor", "reporting", |j| j.metric.is_some());
    d.kill9();
    d.up();
    assert_eq!(d.wait_end("survivor").state, JobState::Done);
    assert_eq!(d.call(d.client.samples("survivor", 0.0)).unwrap().samples.len(), 40);
    wait_until("our containers are removed", 10, || {
        let all = bollard::query_parameters::ListContainersOptions { all: true, ..Default::default() };
        docker.call(async |engine| engine.list_containers(Some(all.clone())).await).is_empty()
    });
}
