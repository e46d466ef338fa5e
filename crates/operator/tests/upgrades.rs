//! A rolling upgrade while jobs train: operators and node agents are replaced one after the other.
//!
//! Two operators (a leader and a standby) and the agents of two nodes serve three training jobs. First the agents are
//! replaced, node by node, as a DaemonSet does it. Then the standby is replaced, and then the leader, as a Deployment
//! does it: each is asked to end, and another program takes its place. Meanwhile the jobs train. Each keeps its pod and
//! counts on; the progress that the cluster shows never goes back; the requests of the pods on a node stay within what
//! their authors requested. Afterwards agents report to the new leader, a job moves with its checkpoint, and a new job
//! finds a place.

use crate::common::training::{COUNTS, Operator, SYNC_PORT, job};
use crate::common::{FaultTally, SYSTEM, Scenarios, TestBed, eventually, within_a_minute};
use crate::invariants::{Watch, check_pool};
use gainshare_kube_api::names::STATUS_ANNOTATION;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

/// The jobs and the nodes where they run.
const JOBS: [(&str, &str); 3] = [("first", "left"), ("second", "left"), ("third", "right")];

/// What the container of each job requests.
const REQUEST: &str = "50m";

/// The port of the second operator. The Service leads to the operator that leads.
const SECOND_PORT: u16 = 8444;

/// The number of steps that the jobs announce: more than the test takes.
const TOTAL_STEPS: u64 = 1000;

/// A job reports five times a second, and keeps each of its steps in a file.
fn script() -> String {
    let report = format!(
        r#"echo "step=$i/{TOTAL_STEPS} loss=$((1000000 - i * 500))"; echo "$GAINSHARE_ATTEMPT $i" >> steps; sleep 0.2"#
    );
    COUNTS.replace("sleep 0.1", &report)
}

fn training_job(name: &str, node: Option<&str>) -> Value {
    let mut training: Value = serde_json::from_str(&job(name, &script(), json!({}))).unwrap();
    match node {
        Some(node) => training["metadata"]["annotations"]["gainshare.dev/node"] = json!(node),
        None => training["metadata"]["annotations"] = json!({}),
    }
    training
}

/// The attempt and the step of everything that a job has done, in its order.
fn steps(bed: &TestBed, name: &str) -> Vec<(u64, u64)> {
    let text = fs::read_to_string(bed.kept(name).join("steps")).unwrap_or_default();
    let parse = |line: &str| {
        let (attempt, step) = line.split_once(' ')?;
        Some((attempt.parse().ok()?, step.parse().ok()?))
    };
    text.lines().filter_map(parse).collect()
}

/// The progress that the cluster shows of a job, in percent.
fn percent(job: &Value) -> Option<u64> {
    job["status"]["progress"].as_str()?.strip_suffix('%')?.parse().ok()
}

/// The operator that leads; empty before the first operator has made the lease, and while none leads.
fn holder(bed: &TestBed) -> String {
    let lease = ["get", "lease", "gainshare-operator", "-n", SYSTEM, "--ignore-not-found"];
    bed.kubectl(&[&lease[..], &["-o", "jsonpath={.spec.holderIdentity}"]].concat())
}

fn next_leader(bed: &TestBed, before: &str) -> String {
    eventually("another leader", || Some(holder(bed)).filter(|now| !now.is_empty() && *now != before))
}

/// The pod of a job, its container, and how often that was restarted.
fn pod_of(bed: &TestBed, name: &str) -> Value {
    let pod = bed.get("pod", bed.job(name)["status"]["attempt"]["pod"].as_str().unwrap_or_default());
    let container = &pod["status"]["containerStatuses"][0];
    json!({
        "pod": pod["metadata"]["name"], "uid": pod["metadata"]["uid"], "deleted": pod["metadata"]["deletionTimestamp"],
        "container": container["containerID"], "restarts": container["restartCount"],
    })
}

/// What was read while parts were replaced, and what of it must not be.
#[derive(Debug, Default)]
struct Observations {
    readings: usize,
    violations: Vec<String>,
    progress: BTreeMap<String, u64>,
}

impl Observations {
    /// Progress never goes back.
    fn read_progress(&mut self, jobs: &Value) {
        for job in jobs["items"].as_array().into_iter().flatten() {
            let name = job["metadata"]["name"].as_str().unwrap_or_default();
            let Some(now) = percent(job) else { continue };
            let before = self.progress.insert(name.to_owned(), now).unwrap_or(0);
            if now < before {
                self.violations.push(format!("the progress of {name} went from {before} % to {now} %"));
            }
        }
    }

    /// The pods of a node request together no more than their authors did.
    fn read_requests(&mut self, pods: &Value) {
        let mut nodes: BTreeMap<&str, Vec<(&str, &str, &str)>> = BTreeMap::new();
        for pod in pods["items"].as_array().into_iter().flatten() {
            let (Some(node), "Running") =
                (pod["spec"]["nodeName"].as_str(), pod["status"]["phase"].as_str().unwrap_or(""))
            else {
                continue;
            };
            let cpu = pod["spec"]["containers"][0]["resources"]["requests"]["cpu"].as_str().unwrap_or_default();
            let name = pod["metadata"]["name"].as_str().unwrap_or_default();
            nodes.entry(node).or_default().push((name, REQUEST, cpu));
        }
        for (node, pods) in nodes {
            self.violations.extend(check_pool(node, pods));
        }
    }
}

/// Reads jobs and pods until it is to end.
fn observe(bed: &TestBed, ends: &AtomicBool) -> Observations {
    let mut observed = Observations::default();
    let list = |kind: &str| -> Option<Value> {
        let output = bed.output("kubectl", &["get", kind, "-n", "team", "-o", "json"], "");
        serde_json::from_slice(&output.stdout).ok()
    };
    while !ends.load(Ordering::Relaxed) {
        if let (Some(jobs), Some(pods)) = (list("trainingjobs"), list("pods")) {
            observed.readings += 1;
            observed.read_progress(&jobs);
            observed.read_requests(&pods);
        }
        std::thread::sleep(Duration::from_millis(500));
    }
    observed
}

/// Waits until the agents have reported progress beyond this to the leader.
fn wait_for_reports(bed: &TestBed, what: &str) {
    let before: Vec<u64> = JOBS.iter().map(|(name, _)| percent(&bed.job(name)).unwrap_or(0)).collect();
    let has_more = || {
        let more =
            |((name, _), before): (&(&str, &str), &u64)| percent(&bed.job(name)).is_some_and(|now| now > *before);
        JOBS.iter().zip(&before).all(more).then_some(())
    };
    let found = within_a_minute(has_more);
    assert!(found.is_some(), "no newer reports than {before:?} percent {what}\n{}", bed.operator_log());
}

/// Replaces agents and operators. Returns the new operators, how many programs were replaced, and the seconds from the
/// end of the leader until the agents' reports reached the cluster again.
fn replace_all(bed: &TestBed, first: Operator, second: Operator) -> ([Operator; 2], u32, f64) {
    let uids = |bed: &TestBed| {
        bed.kubectl(&[
            "get",
            "pods",
            "-n",
            SYSTEM,
            "-l",
            "app.kubernetes.io/component=agent",
            "-o",
            "jsonpath={.items[*].metadata.uid}",
        ])
    };
    let old_agents = uids(bed);
    bed.kubectl(&["rollout", "restart", "daemonset/gainshare-agent", "-n", SYSTEM]);
    bed.wait_for_agents();
    let new_agents = uids(bed);
    assert!(
        old_agents.split_whitespace().all(|uid| !new_agents.contains(uid)),
        "agents were not replaced: {old_agents}, then {new_agents}"
    );
    wait_for_reports(bed, "after the agents were replaced");

    let leads = holder(bed);
    second.end();
    let second = Operator::standby_at(bed, &bed.address(SECOND_PORT));
    assert_eq!(holder(bed), leads, "the end of the standby changed the leader");
    // The new standby has to take part in the election before the leader ends: a Deployment waits for its readiness.
    std::thread::sleep(Duration::from_secs(3));

    let began = Instant::now();
    first.end();
    next_leader(bed, &leads);
    bed.serve_at(SECOND_PORT);
    let first = Operator::standby_at(bed, &bed.address(SYNC_PORT));
    wait_for_reports(bed, "after the leader was replaced");
    let recovery_s = began.elapsed().as_secs_f64();
    ([first, second], old_agents.split_whitespace().count() as u32 + 2, recovery_s)
}

/// The whole upgrade, with an observer beside it. Returns the new operators.
fn upgrade(bed: &TestBed, tally: &mut FaultTally) -> [Operator; 2] {
    let first = Operator::start(bed, None);
    eventually("a leader", || Some(holder(bed)).filter(|holder| !holder.is_empty()));
    let second = Operator::standby_at(bed, &bed.address(SECOND_PORT));
    for (name, node) in JOBS {
        bed.apply(training_job(name, Some(node)));
    }
    for (name, node) in JOBS {
        bed.until(name, "Running", Some(node));
    }
    wait_for_reports(bed, "before the upgrade");
    let before: Vec<Value> = JOBS.iter().map(|(name, _)| pod_of(bed, name)).collect();

    let ends = AtomicBool::new(false);
    let (replaced, observed) = std::thread::scope(|scope| {
        let observer: ScopedJoinHandle<'_, Observations> = scope.spawn(|| observe(bed, &ends));
        // The observer ends also when the upgrade fails.
        let replaced = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| replace_all(bed, first, second)));
        ends.store(true, Ordering::Relaxed);
        (replaced, observer.join().unwrap())
    });
    let (operators, count, recovery_s) = replaced.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    tally.inject(count);
    tally.recover(recovery_s);
    println!("{} readings; progress at the end: {:?}", observed.readings, observed.progress);
    assert!(observed.readings > 10, "{observed:#?}");
    observed.violations.iter().for_each(|violation| tally.demand(false, || violation.clone()));
    for ((name, _), before) in JOBS.iter().zip(before) {
        let after = pod_of(bed, name);
        tally.demand(after == before, || format!("{name} did not keep its pod: {before:#}, then {after:#}"));
        let counts = bed.resumed_at(name);
        tally.demand(counts == [0], || format!("{name} was started again: {counts:?}"));
        let steps = steps(bed, name);
        tally.demand(steps.len() > 50 && steps.is_sorted(), || format!("{name} went back: {steps:?}"));
    }
    operators
}

/// What is asked for after the upgrade is done by the new programs.
fn goes_on(bed: &TestBed) {
    bed.send_to("second", "right");
    let moved = bed.until("second", "Running", Some("right"));
    let counts = bed.resumed_at("second");
    assert!(matches!(counts[..], [0, resumed] if resumed > 50), "it did not resume: {counts:?}\n{moved:#}");
    let counted_on =
        || steps(bed, "second").last().filter(|(attempt, step)| *attempt == 2 && *step > counts[1]).copied();
    eventually("steps after the move", counted_on);
    let steps_of_moved: Vec<u64> = steps(bed, "second").into_iter().map(|(_, step)| step).collect();
    assert!(steps_of_moved.is_sorted(), "{steps_of_moved:?}");

    bed.apply(training_job("late", None));
    let late = bed.until("late", "Running", None);
    let pod = late["status"]["attempt"]["pod"].as_str().unwrap().to_owned();
    let has_note = || bed.get("pod", &pod)["metadata"]["annotations"][STATUS_ANNOTATION].as_str().map(str::to_owned);
    let note = within_a_minute(has_note);
    assert!(note.is_some(), "no agent reported on the new job: {:#}\n{}", bed.get("pod", &pod), bed.operator_log());
}

#[test]
#[ignore = "needs root and a test bed"]
fn jobs_train_on_while_operators_and_agents_are_replaced() {
    let mut bed = TestBed::with_training("upgrades", &["left", "right"]);
    bed.start_agents();
    let bed = bed;
    let watch = Watch::begin(&bed);
    let (mut scenarios, mut operators) = (Scenarios::default(), None);
    let mut tally = FaultTally::of("upgrade");
    scenarios.run_counted("agents and operators are replaced under load", &mut tally, |tally| {
        operators = Some(upgrade(&bed, tally));
    });
    if operators.is_some() {
        scenarios.run_counted("orders go on after the upgrade", &mut tally, |_| goes_on(&bed));
    }
    let watched = watch.end(&bed, &JOBS.map(|(name, _)| name));
    scenarios.run_counted("the invariants held all the time", &mut tally, |tally| watched.report(tally));
    tally.print();
    scenarios.finish();
}
