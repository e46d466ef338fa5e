//! A daemon and real processes: submit, queue, admission, stop, and the messages that users read.

use crate::common::{self, Daemon, sh, trainer, wait_until};
use gainshare_daemon::api::client::ClientError;
use gainshare_daemon::api::types::*;
use gainshare_daemon::spec::JobSpec;
use gainshare_limits::process::Identity;

fn refused(result: Result<impl std::fmt::Debug, ClientError>) -> (ErrorCode, String) {
    match result.unwrap_err() {
        ClientError::Refused { code, message, .. } => {
            assert!(!message.contains('\n'), "one line: {message}");
            (code.unwrap(), message)
        }
        other => panic!("{other}"),
    }
}

#[test]
fn jobs_run_to_their_end_and_leave_their_history() {
    let d = Daemon::start("");
    let mut bad = sh("fails", "echo to stderr >&2; exit 3");
    bad.env.insert("CANARY".into(), "must-stay-hidden".into());
    d.submit(vec![trainer("good", 5, "0.05"), bad]).unwrap();
    let (good, bad) = (d.wait_end("good"), d.wait_end("fails"));
    assert_eq!((good.state, good.exit_code, good.attempt), (JobState::Done, Some(0), 1));
    assert_eq!((bad.state, bad.exit_code), (JobState::Failed, Some(3)));
    assert_eq!(bad.env_names, ["CANARY"]);
    let metric = good.metric.unwrap();
    assert_eq!((metric.name.as_str(), metric.value, metric.step, metric.total), ("loss", 200.5, Some(5), Some(5)));

    let history = d.call(d.client.samples("good", 0.0)).unwrap();
    let steps: Vec<_> = history.samples.iter().map(|s| s.step.unwrap()).collect();
    assert_eq!(steps, [1, 2, 3, 4, 5]);
    assert!(history.samples.is_sorted_by(|a, b| a.time_s <= b.time_s));
    let later = d.call(d.client.samples("good", history.samples[2].time_s)).unwrap();
    assert!(later.samples.len() <= 3, "only what came later: {later:?}");

    let log = d.call(async {
        let mut stream = d.client.logs("fails", 3, true).await.unwrap();
        let mut all = Vec::new();
        while let Some(piece) = stream.next().await.unwrap() {
            all.extend_from_slice(&piece);
        }
        all
    });
    assert_eq!(String::from_utf8(log).unwrap(), "stderr\n");

    let explained = d.call(d.client.explain("fails")).unwrap();
    let decision = d.call(d.client.view(None)).unwrap();
    let replay = decision.replay().expect("the decision can be made again");
    assert_eq!(replay.differences, vec![], "the plan that was carried out is made again, bit for bit");
    let everything = format!("{explained:?} {decision:?} {:?}", d.call(d.client.jobs(true)).unwrap());
    assert!(!everything.contains("must-stay-hidden"), "values of the environment are never shown");
    assert!(explained.decisions.iter().any(|d| d.reason.why == "started"));
    d.forget("fails");
    assert_eq!(refused(d.call(d.client.job("fails"))).0, ErrorCode::NotFound);
    assert!(d.call(d.client.jobs(false)).unwrap().is_empty());
}

#[test]
fn a_job_that_runs_learns_of_a_run_of_its_program_that_ends() {
    let d = Daemon::start("");
    // It announces a hundred steps and ends after one.
    let busy = "end=$(($(date +%s) + 3)); while [ $(date +%s) -lt $end ]; do :; done";
    let run = |name: &str, rest_s: &str| {
        let mut spec = sh(name, &format!("echo step 1/100 loss=0.5; {busy}; sleep $REST_S"));
        spec.env.insert("REST_S".into(), rest_s.into());
        spec
    };
    let trust = || d.call(d.client.job("stays")).unwrap().metric.and_then(|metric| metric.total_trust);
    d.submit(vec![run("stays", "600")]).unwrap();
    wait_until("its line is read", 60, || trust() == Some(1.0));
    d.submit(vec![run("ends", "0")]).unwrap();
    assert_eq!(d.wait_end("ends").state, JobState::Done);
    wait_until("its total is believed less", 60, || trust() == Some(0.5));
    d.call(d.client.stop("stays", 0.0)).unwrap();
}

#[test]
fn mistakes_are_reported_in_one_line_and_change_nothing() {
    let d = Daemon::start("");
    let (code, message) = refused(d.submit(vec![sh("a", "true"), JobSpec::new(vec!["no-such-program".into()])]));
    assert_eq!(code, ErrorCode::MissingProgram);
    assert!(message.contains("no-such-program"), "{message}");
    let mut bad = sh("b", "true");
    bad.metric.pattern = Some("(".into());
    assert_eq!(refused(d.submit(vec![bad])).0, ErrorCode::InvalidSpec);
    let mut docker = sh("c", "true");
    docker.runtime = gainshare_limits::RuntimeKind::Docker;
    docker.image = Some("x".into());
    assert!(refused(d.submit(vec![docker])).1.contains("--runtime"));
    let mut lonely = sh("d", "true");
    lonely.after = vec!["absent".into()];
    assert!(refused(d.submit(vec![lonely])).1.contains("absent"));
    let (mut x, mut y) = (sh("x", "true"), sh("y", "true"));
    (x.after, y.after) = (vec!["y".into()], vec!["x".into()]);
    assert!(refused(d.submit(vec![x, y])).1.contains("circle"));
    assert!(d.call(d.client.jobs(true)).unwrap().is_empty(), "nothing was taken");

    d.submit(vec![sh("twin", "sleep 30")]).unwrap();
    assert_eq!(refused(d.submit(vec![sh("twin", "true")])).0, ErrorCode::DuplicateName);
    assert_eq!(refused(d.call(d.client.forget("twin"))).0, ErrorCode::WrongState);
    let (ok, said) = d.second();
    let pid = d.pid().to_string();
    assert!(!ok && said.contains(&pid) && said.contains("api.sock") && said.trim().lines().count() == 1, "{said}");
}

#[test]
fn the_queue_keeps_slots_priorities_and_dependencies() {
    let d = Daemon::start("slots = 1");
    let note = d.dir.path().join("order");
    let job = |name: &str, script: &str| sh(name, &format!("echo {name} >> {}; {script}", note.display()));
    let mut urgent = job("urgent", "true");
    urgent.priority = 5;
    let (mut after, mut never, mut third) = (job("after", "true"), job("never", "true"), job("third", "true"));
    after.after = vec!["low".into()];
    never.after = vec!["breaks".into()];
    third.after = vec!["never".into()];
    let mut breaks = job("breaks", "exit 1");
    breaks.priority = -5;
    d.submit(vec![job("first", "sleep 0.7")]).unwrap();
    d.submit(vec![job("low", "true"), urgent, after, never, third, breaks]).unwrap();
    let waiting = d.job("low").reason.unwrap();
    assert_eq!(waiting.why, "waits-for-slot", "{waiting:?}");
    let text = d.job("after").reason.unwrap().text;
    assert!(text.contains("low"), "names, not numbers: {text}");
    for name in ["first", "urgent", "low", "after"] {
        assert_eq!(d.wait_end(name).state, JobState::Done, "{name}");
    }
    assert_eq!(d.wait_end("breaks").state, JobState::Failed);
    for name in ["never", "third"] {
        let job = d.wait_end(name);
        assert_eq!((job.state, job.started_at), (JobState::Failed, None));
        assert!(job.reason.unwrap().text.contains("ended as failed"));
    }
    assert_eq!(
        common::read(&note).split_whitespace().collect::<Vec<_>>(),
        ["first", "urgent", "low", "after", "breaks"]
    );
}

#[test]
#[ignore = "needs root and cgroups"]
fn an_attached_supervisor_is_admitted_and_fenced() {
    let d = Daemon::start("slots = 1");
    d.submit(vec![sh("holder", "sleep 30")]).unwrap();
    let names = vec!["OMP_NUM_THREADS".to_owned()];
    let mine = d.call(d.client.submit_attached(sh("mine", "true"), names)).unwrap();
    d.call(d.client.stop("holder", 0.0)).unwrap();
    let Admission::Start { start } = d.call(d.client.admission(mine.id)).unwrap() else { panic!("a slot is free") };
    assert!(!start.procs_files.is_empty() && start.attempt == 1);
    assert!(start.env.iter().any(|v| v.name == "OMP_WAIT_POLICY"));
    assert!(!start.env.iter().any(|v| v.name.ends_with("NUM_THREADS") && v.name.starts_with("O")), "the user set it");
    let again = d.call(d.client.admission(mine.id)).unwrap();
    assert_eq!(again, Admission::Start { start: start.clone() }, "asking again changes nothing");

    let mut child = std::process::Command::new("sleep").arg("30").spawn().unwrap();
    for file in &start.procs_files {
        std::fs::write(file, child.id().to_string()).unwrap();
    }
    let me = Identity::of(child.id() as i32).unwrap();
    let stale = StartReport { attempt: 7, pid: me.pid, start_ticks: me.start_ticks, notes: vec![] };
    assert_eq!(refused(d.call(d.client.started(mine.id, &stale))).0, ErrorCode::WrongState);
    let started = StartReport { attempt: 1, ..stale };
    assert_eq!(d.call(d.client.started(mine.id, &started)).unwrap().state, JobState::Running);
    assert_eq!(
        d.call(d.client.started(mine.id, &started)).unwrap().pid,
        Some(me.pid),
        "a second report changes nothing"
    );
    child.kill().unwrap();
    child.wait().unwrap();
    let exited = ExitReport { attempt: 1, signal: Some(9), ..ExitReport::default() };
    let info = d.call(d.client.exited(mine.id, &exited)).unwrap();
    assert_eq!((info.state, info.signal), (JobState::Failed, Some(9)));
    let dir = std::path::Path::new(&start.procs_files[0]).parent().unwrap();
    assert!(!dir.exists(), "its group is gone: {}", dir.display());
}

#[test]
fn stop_asks_first_and_kills_after_the_grace() {
    let d = Daemon::start("");
    d.submit(vec![
        sh("polite", "trap 'echo saved; exit 0' TERM; echo up; while :; do sleep 0.05; done"),
        sh("deaf", "trap '' TERM; echo up; while :; do sleep 0.05; done"),
        sh("early", "sleep 30"),
    ])
    .unwrap();
    for name in ["polite", "deaf"] {
        let log = d.state().join("jobs").join(d.job(name).id.to_string()).join("output.log");
        common::wait_until("the trap is set", 10, || common::read(&log).contains("up"));
        d.call(d.client.stop(name, 0.5)).unwrap();
    }
    let (polite, deaf) = (d.wait_end("polite"), d.wait_end("deaf"));
    assert_eq!((polite.state, polite.exit_code), (JobState::Stopped, Some(0)));
    assert_eq!((deaf.state, deaf.signal), (JobState::Stopped, Some(9)));
    assert_eq!(refused(d.call(d.client.stop("deaf", 0.0))).0, ErrorCode::WrongState);
}

#[test]
#[ignore = "needs root and cgroups"]
fn shares_follow_growth_down_to_the_kernel() {
    let d = Daemon::start("policy = \"flowcon\"\nreact = \"sample\"\ninterval = \"1s\"");
    let burn = "j=0; while [ $j -lt 3000 ]; do j=$((j+1)); done";
    let grows = sh("grows", &format!("i=1; while :; do i=$((i+1)); echo loss=$((100000/i)); {burn}; sleep 0.05; done"));
    let flat = sh("flat", &format!("echo loss=7; while :; do echo loss=5.0; {burn}; sleep 0.05; done"));
    d.submit(vec![grows, flat]).unwrap();
    let flat = d.wait("flat", "making room", |j| {
        j.share.is_some_and(|s| s < 0.4) && j.category.as_deref() == Some("converged")
    });
    let (low, high) = (d.call(d.client.explain("flat")).unwrap(), d.call(d.client.explain("grows")).unwrap());
    let weight = |e: &Explanation| {
        let cpu = e.in_force.iter().find(|s| ["cpu.shares", "cpu.weight"].contains(&s.name.as_str()));
        cpu.expect("a weight is in force").value.parse::<f64>().unwrap()
    };
    assert!(weight(&low) < weight(&high), "{:?} {:?}", low.in_force, high.in_force);
    let group = std::fs::read_to_string(format!("/proc/{}/cgroup", flat.pid.unwrap())).unwrap();
    assert!(group.contains("gainshare-"), "{group}");
    assert!(low.decisions.len() == 5 && low.neighbours[0].name == "grows");
    let plans = d.call(d.client.plans(3)).unwrap();
    assert!(plans.len() == 3 && plans[0].generation > plans[1].generation && plans[0].jobs.len() == 2);
}

#[test]
fn an_idle_daemon_ends_by_itself() {
    let mut d = Daemon::start("idle_exit = \"1s\"");
    d.submit(vec![sh("short", "true")]).unwrap();
    common::wait_until("the daemon ends", 10, || d.is_dead());
    let (jobs, entries) = d.journal();
    assert_eq!(jobs[0].state, JobState::Done);
    assert_eq!(entries.last().unwrap().change.kind(), "closed");
    d.assert_invariants();
    assert!(!d.run_dir().join("api.sock").exists());
}
