//! Deadlines under a real daemon: predictions, promises, warnings and the result at the end.

use crate::common::{Daemon, sh, trainer, wait_until};
use gainshare_daemon::api::types::*;
use gainshare_daemon::clock::unix_s;
use gainshare_daemon::spec::JobSpec;
use std::time::Duration;

fn due(name: &str, steps: u32, deadline: &str) -> JobSpec {
    JobSpec { deadline: Some(deadline.into()), ..trainer(name, steps, "0.2") }
}

/// The value says so, and a note has its sentence.
fn assert_met(ended: &JobInfo) {
    let deadline = ended.deadline.as_ref().expect("it has one");
    let outcome = deadline.outcome.expect("it ended");
    assert_eq!((deadline.state, outcome.is_met, outcome.state), (DeadlineState::Met, true, JobState::Done));
    assert!((outcome.early_s - (deadline.at_s - ended.ended_s.expect("it ended"))).abs() < 1e-3, "{outcome:?}");
    assert!(ended.notes.contains(&outcome.to_string()), "{:?}", ended.notes);
}

fn miss(job: &JobInfo) -> Option<&PredictedMiss> {
    job.deadline.as_ref()?.miss.as_ref()
}

#[test]
fn the_end_is_predicted_and_a_kept_deadline_is_reported_as_met() {
    let d = Daemon::start("policy = \"qos\"\n");
    d.submit(vec![due("soon", 30, "1h")]).unwrap();
    let job = d.wait("soon", "a prediction", |j| j.done.is_some());
    let done = job.done.expect("it was waited for");
    assert!(done.earliest_s <= done.at_s && done.at_s <= done.latest_s, "{done:?}");
    assert_eq!(job.deadline.expect("it has one").state, DeadlineState::OnTime);
    let ended = d.wait_end("soon");
    // How exact the prediction is depends on the load of this machine; docs/measurements/deadlines.md says more.
    println!("the end was predicted with an error of {:.1} s", ended.ended_s.expect("it ended") - done.at_s);
    assert!(done.at_s > job.started_s.expect("it runs"), "the predicted end follows the start: {done:?}");
    assert_met(&ended);

    // The same command again: its past answers for it.
    let answers = d.call(d.client.plan(vec![due("soon", 30, "1h"), due("other", 31, "1h")])).unwrap();
    assert_eq!(answers[0].like.as_deref(), Some("soon"));
    assert!(answers[0].text.contains("(by 1 earlier run of this command)"), "{answers:?}");
    assert!(answers[0].text.contains("would make its deadline"), "{answers:?}");
    assert!(answers[1].like.is_none() && answers[1].text.contains("not known"), "{answers:?}");
    assert!(d.call(d.client.jobs(false)).unwrap().is_empty(), "nothing was submitted");
}

#[test]
fn an_impossible_deadline_is_announced_while_the_job_runs_on() {
    let d = Daemon::start("policy = \"qos\"\n");
    d.submit(vec![due("late", 200, "8s")]).unwrap();
    wait_until("a warning", 20, || miss(&d.job("late")).is_some());
    let job = d.job("late");
    assert_eq!(miss(&job).map(|miss| miss.deadline_s), job.deadline.as_ref().map(|due| due.at_s));
    assert_eq!(job.notes.iter().filter(|note| note.contains("will be missed")).count(), 1, "{:?}", job.notes);
    assert!(job.deadline.as_ref().expect("it has one").outcome.is_none(), "it runs");
    assert_eq!(job.state, JobState::Running);
    let state = job.deadline.as_ref().expect("it has one").state;
    assert!(matches!(state, DeadlineState::AtRisk | DeadlineState::Missed), "{state:?}");
    d.call(d.client.stop("late", 0.0)).unwrap();
    let ended = d.wait_end("late");
    assert_eq!(miss(&ended), miss(&job), "it is kept");
    let deadline = ended.deadline.expect("it has one");
    assert_eq!(deadline.state, DeadlineState::Missed);
    assert!(deadline.outcome.is_some_and(|outcome| !outcome.is_met), "{:?}", deadline.outcome);
}

#[test]
fn a_plan_counts_the_wait_for_a_slot_and_for_other_jobs() {
    let d = Daemon::start("policy = \"qos\"\nslots = 1\n");
    d.submit(vec![due("soon", 20, "1h")]).unwrap();
    let soon = d.wait_end("soon");
    let alone_s = soon.ended_s.expect("it ended") - soon.started_s.expect("it began");
    let plan = |job: JobSpec| d.call(d.client.plan(vec![job])).map(|mut answers| answers.remove(0));
    let free = plan(due("soon", 20, "1h")).unwrap();
    assert!(!free.text.contains("wait") && free.share.is_some(), "{free:?}");
    d.submit(vec![trainer("busy", 300, "0.2")]).unwrap();
    let busy = d.wait("busy", "a prediction", |j| j.done.is_some()).done.expect("it was waited for");
    // On a loaded machine, the end of the running job is not known at every moment.
    let foreseen = |job: JobSpec| {
        let answers = std::iter::repeat_with(|| {
            std::thread::sleep(Duration::from_millis(100));
            plan(job.clone()).unwrap()
        });
        answers.take(300).find(|answer| answer.done.is_some()).expect("a prediction within half a minute")
    };
    let queued = foreseen(due("soon", 20, "1h"));
    let done = queued.done.as_ref().expect("it was waited for");
    // It ends some time after the other one, of which about a minute is left.
    assert!(queued.text.contains("would wait for a free slot first"), "{queued:?}");
    assert!(done.at_s > busy.earliest_s && done.at_s > unix_s() + 2.0 * alone_s, "{queued:?}, after {busy:?}");
    let tight = plan(due("soon", 20, "10s")).unwrap();
    assert_eq!(tight.deadline.expect("it has one").state, DeadlineState::AtRisk, "{}", tight.text);
    let mut after = due("soon", 20, "1h");
    after.after = vec!["busy".into()];
    let waits = foreseen(after.clone());
    assert!(waits.text.contains("would wait for the jobs that it names first"), "{waits:?}");
    assert!(waits.done.expect("it was waited for").at_s > busy.earliest_s);
    after.after = vec!["nobody".into()];
    let refused = plan(after).expect_err("no such job").to_string();
    assert!(refused.contains("waits for nobody, which is not known"), "{refused}");
}

/// The result follows from the end that the supervisor recorded, not from the time at which the daemon reads it.
#[test]
fn a_job_that_ended_in_time_without_a_daemon_has_met_its_deadline() {
    let mut d = Daemon::start("");
    let gate = d.dir.path().join("gate");
    let script = format!("while [ ! -e {} ]; do sleep 0.02; done", gate.display());
    let job = |name: &str, deadline: &str| JobSpec { deadline: Some(deadline.into()), ..sh(name, &script) };
    d.submit(vec![job("timely", "20s"), job("late", "1s")]).unwrap();
    for name in ["timely", "late"] {
        d.wait_state(name, JobState::Running);
    }
    let due_s = d.job("timely").deadline.expect("it has one").at_s;
    d.kill9();
    std::thread::sleep(Duration::from_millis(1500));
    std::fs::write(&gate, "").unwrap();
    wait_until("the deadline has passed", 60, || unix_s() > due_s + 0.5);
    d.up();
    let ended = d.wait_end("timely");
    let ended_s = ended.ended_s.expect("it ended");
    assert!(ended_s <= due_s && ended_s >= ended.started_s.expect("it began"), "{ended:?}");
    assert_met(&ended);
    assert_eq!(d.wait_end("late").deadline.expect("it has one").state, DeadlineState::Missed);
}

/// A job that sleeps uses little CPU. On a busy machine that is not taken for want of CPU.
#[test]
fn a_job_that_sleeps_beside_busy_ones_is_not_believed_to_end_at_once() {
    let d = Daemon::start("policy = \"qos\"\n");
    let cpus = std::thread::available_parallelism().unwrap().get();
    let mut jobs: Vec<JobSpec> = (0..cpus).map(|i| sh(&format!("busy{i}"), "while :; do :; done")).collect();
    jobs.push(due("sleeper", 2000, "60s"));
    d.submit(jobs).unwrap();
    let job = d.wait("sleeper", "a warning", |job| miss(job).is_some());
    let cause = &miss(&job).expect("it was waited for").cause;
    // Its steps sleep for 400 s in all.
    let is_predicted = matches!(cause, MissCause::EarliestEnd { .. } | MissCause::PredictedEnd { .. });
    assert!(is_predicted, "the miss is predicted, not past: {cause:?}");
}

#[test]
fn a_job_that_names_no_length_has_the_one_of_finished_runs_of_its_program() {
    let d = Daemon::start("policy = \"qos\"\n");
    let run = |name: &str, rate: &str| {
        let script = "i=0; while [ $i -lt 30 ]; do i=$((i+1)); echo \"step $i loss=$((1000/i)).5\"; sleep 0.2; done";
        let command = ["sh", "-c", script, rate].map(str::to_owned).to_vec();
        JobSpec { name: Some(name.into()), deadline: Some("1h".into()), command, ..JobSpec::default() }
    };
    d.submit(vec![run("first", "0.1")]).unwrap();
    let first = d.wait("first", "a reason", |j| j.reason.as_ref().is_some_and(|why| why.text.contains("deadline")));
    assert!(first.done.is_none(), "nothing says how long it is: {first:?}");
    d.wait_end("first");
    // Another number, the same program: its end is predicted in the answer to the submission.
    let second = d.submit(vec![run("second", "0.2")]).unwrap().remove(0);
    let done = second.done.expect("the first run says how long it takes");
    assert_eq!(done.basis.as_deref(), Some("1 earlier run of this program"));
    assert_eq!(second.deadline.expect("it has one").state, DeadlineState::OnTime);
    let second = d.wait("second", "its own reports", |j| j.done.as_ref().is_some_and(|done| done.basis.is_none()));
    assert_eq!(second.deadline.expect("it has one").state, DeadlineState::OnTime);
    d.wait_end("second");
    // A deadline that no share can keep is announced in the answer, and the job runs all the same.
    let late = JobSpec { deadline: Some("2s".into()), ..run("third", "0.2") };
    let late = d.submit(vec![late]).unwrap().remove(0);
    assert_eq!(late.deadline.as_ref().expect("it has one").state, DeadlineState::AtRisk, "{late:?}");
    let basis = match miss(&late).map(|miss| &miss.cause) {
        Some(MissCause::EarliestEnd { basis, .. }) => basis.as_deref(),
        other => panic!("{other:?}: {late:?}"),
    };
    assert_eq!(basis, Some("1 earlier run of this command"));
    assert_eq!(d.wait_end("third").state, JobState::Done);
}

#[test]
fn a_program_that_ended_well_before_is_promised_its_deadline_before_its_first_report() {
    let d = Daemon::start("policy = \"qos\"\n");
    // Each step takes some processor time: without control groups, times below a tick of the kernel are not seen.
    let step = "sleep 1; n=0; while [ $n -lt 50000 ]; do n=$((n+1)); done";
    let run = |name: &str| JobSpec {
        deadline: Some("1h".into()),
        ..sh(
            name,
            &format!("i=0; while [ $i -lt 4 ]; do {step}; i=$((i+1)); echo \"step $i loss=$((1000/i)).5\"; done"),
        )
    };
    d.submit(vec![run("first")]).unwrap();
    d.wait_end("first");
    d.submit(vec![run("second")]).unwrap();
    // It reports after a second for the first time.
    let is_promised = |j: &JobInfo| j.reason.as_ref().is_some_and(|reason| reason.why == "meets-deadline");
    let job = d.wait("second", "a promise", is_promised);
    let basis = job.done.and_then(|done| done.basis);
    assert_eq!(basis.as_deref(), Some("1 earlier run of this command"), "its own reports say nothing yet");
    assert_eq!(d.wait_end("second").deadline.expect("it has one").state, DeadlineState::Met);
}

/// A job that was believed to be late, is in time, and will be late after all. What is published is the prediction of
/// the moment: no miss while the job is in time, and then a new one.
#[test]
fn a_miss_that_is_no_more_predicted_is_withdrawn_and_a_later_one_is_another() {
    let d = Daemon::start("policy = \"qos\"\n");
    // Thirty seconds in all as it begins, six as it goes on, and more than thirty as it ends.
    let pace = "if [ $i -lt 12 ]; then sleep 0.3; elif [ $i -lt 60 ]; then sleep 0.05; else sleep 0.8; fi";
    let script =
        format!("i=0; while [ $i -lt 100 ]; do i=$((i+1)); echo \"step $i/100 loss=$((1000/i)).5\"; {pace}; done");
    d.submit(vec![JobSpec { deadline: Some("22s".into()), ..sh("changing", &script) }]).unwrap();
    let has_note = |job: &JobInfo| job.notes.iter().any(|note| note.contains("will be missed"));
    let late = d.wait("changing", "predicted to be late", |job| miss(job).is_some());
    assert!(has_note(&late), "{:?}", late.notes);
    let in_time = d.wait("changing", "in time again", |job| miss(job).is_none());
    assert_eq!(in_time.deadline.as_ref().map(|due| due.state), Some(DeadlineState::OnTime));
    assert!(!has_note(&in_time), "it contradicts the state: {:?}", in_time.notes);
    let again = d.wait("changing", "late after all", |job| miss(job).is_some());
    assert_ne!(miss(&again), miss(&late), "the numbers are those of the new prediction");
    assert_eq!(again.notes.iter().filter(|note| note.contains("will be missed")).count(), 1, "{:?}", again.notes);
    d.call(d.client.stop("changing", 0.0)).unwrap();
    assert!(d.wait_end("changing").deadline.and_then(|due| due.outcome).is_some_and(|outcome| !outcome.is_met));
    assert_eq!(d.metric("gainshare_deadline_misses_predicted_total"), 1, "jobs are counted");
}

#[test]
fn a_target_of_a_metric_that_the_job_does_not_print_is_named() {
    let d = Daemon::start("");
    let job = JobSpec { target: Some("accuracy=0.9".into()), ..due("other", 30, "1h") };
    d.submit(vec![job]).unwrap();
    d.wait("other", "running for a while", |job| job.elapsed_s.is_some_and(|elapsed_s| elapsed_s > 1.0));
    let explanation = d.call(d.client.explain("other")).unwrap();
    assert!(explanation.metric_notes.iter().any(|note| note.starts_with("`accuracy` was not seen")), "{explanation:?}");
}
