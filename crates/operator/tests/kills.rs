//! Moves in a cluster with node agents: one that the operator decides on its own, and some during which nodes die.
//!
//! First a Job of the cluster's own kind converges beside two jobs that still improve, and SpeCon moves it
//! away, once and for good. Then nodes die in the middle of moves: in each phase of a move the node agents of
//! source and target are killed, one of the two nodes loses its kubelet (its containers live on), and the
//! other one its power.
//!
//! The operator stops at a fail point, so that the phase is certain; then the nodes die, a new operator
//! continues, and the nodes come back. A watcher reads from the kernel which attempts live: never two of
//! one job. Each job ends up running once, and its object says what happened.

use crate::common::training::{COUNTS, Operator, batch_job, job};
use crate::common::{FaultTally, SYSTEM, Scenarios, TestBed, eventually, is_long, program, text};
use crate::invariants::{Watch, alive};
use serde_json::{Value, json};
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// The job's loss falls towards a half, by less in each report: after some ten seconds it hardly changes any more.
/// It never stops falling, so that an operator that forgot the job would find it converged again.
const FLATTENS: &str = r#"echo "step=$i loss=$((500000 + 5000000 / (10 + i)))"; sleep 0.2"#;

/// The job's loss falls by a twentieth of the first loss every second.
const GROWS: &str = r#"echo "step=$i loss=$((1000000 - i * 10000))"; sleep 0.2"#;

fn the_decision_moves_an_adopted_job(bed: &TestBed) {
    let watch = Watch::begin(bed);
    let _operator = Operator::with(bed, None, &["--specon-interval", "2s"]);
    // All three begin on the same node.
    bed.kubectl(&["cordon", "right"]);
    let counts = |and: &str| COUNTS.replace("sleep 0.1", and);
    let mut flattens = batch_job("flattens", &counts(FLATTENS), "Failed");
    flattens["metadata"]["annotations"]["gainshare.dev/policy"] = json!("specon");
    bed.apply(flattens);
    for name in ["grows-1", "grows-2"] {
        bed.apply(job(name, &counts(GROWS), json!({"policy": "specon"})));
        bed.until(name, "Running", Some("left"));
    }
    let runs_on = |node: &str| {
        let journal = bed.adopted("flattens");
        let there = journal["node"] == node && journal["migration"].is_null();
        there.then_some(journal)
    };
    eventually("the Job on the left", || runs_on("left"));
    bed.kubectl(&["uncordon", "right"]);
    let journal = eventually("the Job on the right", || runs_on("right"));
    let why = journal["lastMoves"][0]["message"].as_str().unwrap_or_default();
    assert!(why.contains("has converged beside jobs that still grow"), "{journal:#}");
    let explained = bed.plugin(&["explain", "flattens"]);
    assert!(explained.contains(why), "{explained}");
    let counts = bed.resumed_at("flattens");
    assert!(matches!(counts[..], [0, resumed] if resumed > 10), "it did not resume: {counts:?}");
    let watched = watch.end(bed, &["flattens", "grows-1", "grows-2"]);
    assert!(watched.broken.is_empty() && watched.pods["flattens"].len() == 2, "{watched:?}");
    bed.kubectl(&["delete", "trainingjob", "grows-1", "grows-2", "-n", "team", "--timeout=60s"]);
}

/// For how long a node has no node agent. The long form is longer than anything is remembered about a node that is not
/// heard of.
fn absence() -> Duration {
    Duration::from_secs(if is_long() { 95 } else { 10 })
}

/// Ten runs of the rule, of which three move a job that has converged.
const TEN_RUNS: Duration = Duration::from_secs(20);

/// SpeCon moves a job once. The node of the job that was just moved has no node agent for a while, and the operator is
/// replaced. Then the same reasons to move hold again: they move another job, and this one stays.
fn a_mark_survives_absence_and_a_restart(bed: &TestBed) {
    let mark = bed.adopted("flattens")["specon"]["settled"].clone();
    assert!(mark.is_string(), "the move is not marked: {:#}", bed.adopted("flattens"));
    let agents_on = |node: Option<&str>| {
        let selector = json!({"kubernetes.io/hostname": node});
        let patch = json!({"spec": {"template": {"spec": {"nodeSelector": selector}}}}).to_string();
        bed.kubectl(&["patch", "daemonset", "gainshare-agent", "-n", SYSTEM, "--type=merge", "-p", &patch]);
        bed.kubectl(&["rollout", "status", "daemonset/gainshare-agent", "-n", SYSTEM, "--timeout=60s"]);
    };
    let first_operator = Operator::with(bed, None, &["--specon-interval", "2s"]);
    agents_on(Some("left"));
    std::thread::sleep(absence());
    agents_on(None);
    drop(first_operator);
    let _second_operator = Operator::with(bed, None, &["--specon-interval", "2s"]);
    // Just before the operator's first decision.
    bed.kubectl(&["cordon", "left"]);

    let counts = |and: &str| COUNTS.replace("sleep 0.1", and);
    let training_job = |name: &str, script: &str, node: Option<&str>| {
        let mut job: Value = serde_json::from_str(&job(name, &counts(script), json!({"policy": "specon"}))).unwrap();
        job["metadata"]["annotations"] = node.map_or(json!({}), |node| json!({"gainshare.dev/node": node}));
        job
    };
    // They are not to follow the others when the node is open again.
    for name in ["grows-3", "grows-4"] {
        bed.apply(training_job(name, GROWS, Some("right")));
        bed.until(name, "Running", Some("right"));
    }
    bed.apply(training_job("flattens-too", FLATTENS, None));
    bed.until("flattens-too", "Running", Some("right"));
    bed.kubectl(&["uncordon", "left"]);
    let moved = bed.until("flattens-too", "Running", Some("left"));
    assert!(moved["status"]["specon"]["settled"].is_string(), "the move is not marked: {:#}", moved["status"]);
    std::thread::sleep(TEN_RUNS);
    let moved_before = bed.adopted("flattens");
    let moves = moved_before["lastMoves"].as_array().map_or(0, Vec::len);
    assert_eq!((&moved_before["node"], moves), (&json!("right"), 1), "{moved_before:#}");
    assert_eq!(moved_before["specon"]["settled"], mark, "{moved_before:#}");
    bed.kubectl(&["delete", "trainingjob", "grows-3", "grows-4", "flattens-too", "-n", "team", "--timeout=60s"]);
    // With its pod, so that the next watcher does not see it.
    bed.kubectl(&["delete", "job", "flattens", "-n", "team", "--cascade=foreground", "--timeout=60s"]);
}

/// `kubectl gainshare explain NAME --dump FILE` with the rights of a kubeconfig.
fn dump(name: &str, file: &Path, kubeconfig: &Path) -> Output {
    let mut command = Command::new(program("kubectl-gainshare"));
    command.args(["explain", name, "-n", "team", "--dump"]).arg(file).env("KUBECONFIG", kubeconfig);
    command.output().unwrap()
}

/// The share of a job's pod is decided by the node agent of its node. The recorded decision comes through the
/// API server, and its plan is made again bit for bit.
fn a_share_is_dumped_and_replayed(bed: &TestBed) {
    let _operator = Operator::start(bed, None);
    bed.apply(job("dumped", &COUNTS.replace("sleep 0.1", GROWS), json!({})));
    let running = bed.until("dumped", "Running", Some("left"));
    let pod = running["status"]["attempt"]["pod"].as_str().unwrap();
    let file = bed.folder.path().join("decision.json");
    let (admin, operator) = (Path::new(&bed.kubeconfig), bed.folder.path().join("operator.kubeconfig"));
    let printed = eventually("a recorded decision", || {
        let output = dump(pod, &file, admin);
        output.status.success().then(|| text(&output.stdout))
    });
    let record = gainshare_record::from_json(&std::fs::read_to_string(&file).unwrap()).unwrap();
    let is_named = |view: &gainshare_core::view::JobView| printed.contains(&format!("{pod} is {}", view.id));
    assert!(record.view.jobs.iter().any(is_named), "{printed}");
    assert_eq!(record.replay().unwrap().differences, []);

    // The operator's account may read pods, but not forward ports.
    let refused = dump(pod, &file, &operator);
    let why = text(&refused.stderr);
    assert!(!refused.status.success() && why.contains("`pods/portforward`"), "{why}");
    // The operator of this test runs outside of the cluster, so the plugin finds no pod of it.
    let missing = dump("dumped", &file, admin);
    let why = text(&missing.stderr);
    assert!(!missing.status.success() && why.contains("no operator leads"), "{why}");
    bed.kubectl(&["delete", "trainingjob", "dumped", "-n", "team", "--timeout=60s"]);
}

/// Brings the kubelets of both nodes back when a round is over, however it ended.
struct Kubelets<'a>(&'a TestBed);

impl Drop for Kubelets<'_> {
    fn drop(&mut self) {
        for node in ["left", "right"] {
            // A kubelet that runs already refuses to start again.
            self.0.testbed(&["start", &format!("kubelet-{node}")]);
        }
    }
}

/// One move during which both nodes die. Recovery is the time from the kubelets' return until the job runs once.
/// Returns how many node agents were killed.
fn nodes_die(
    bed: &TestBed,
    name: &str,
    phase: &str,
    (without_kubelet, without_power): (&str, &str),
    tally: &mut FaultTally,
) -> usize {
    let operator = Operator::start(bed, None);
    bed.apply(job(name, COUNTS, json!({"runPolicy": {"terminationGracePeriodSeconds": 5}})));
    bed.until(name, "Running", Some("left"));
    drop(operator);

    let mut operator = Operator::start(bed, Some(phase));
    bed.send_to(name, "right");
    operator.died();
    let kubelets = Kubelets(bed);
    bed.kill_kubelet(without_kubelet);
    bed.kill_kubelet(without_power);
    let nodes = [without_kubelet, without_power];
    let agents_killed: usize = nodes.iter().map(|node| bed.kill_processes(node, "gainshare-node-agent")).sum();
    bed.kill_processes(without_power, "");
    tally.inject(nodes.len() as u32 + agents_killed as u32);

    let operator = Operator::start(bed, None);
    std::thread::sleep(Duration::from_secs(2));
    drop(kubelets);
    let began = Instant::now();
    let running_once = || {
        let status = bed.job(name)["status"].clone();
        let pod = status["attempt"]["pod"].as_str()?.to_owned();
        let lives = alive(bed.name).get(name).is_some_and(|pods| pods.iter().eq([&pod]));
        (status["state"] == "Running" && status["migration"].is_null() && lives).then_some(status)
    };
    let status = eventually(&format!("{name} running once after {phase} without {without_power}"), running_once);
    tally.recover(began.elapsed().as_secs_f64());
    assert!(status["attempt"]["epoch"].as_u64() > Some(1), "{status:#}");
    let moves = status["lastMoves"].as_array().map_or(0, Vec::len);
    assert!(moves > 0, "the object does not say what happened: {status:#}");
    bed.kubectl(&["delete", "trainingjob", name, "-n", "team", "--timeout=60s"]);
    drop(operator);
    agents_killed
}

#[test]
#[ignore = "needs root and a test bed"]
fn nodes_and_agents_die_in_every_phase_of_a_move() {
    let mut bed = TestBed::with_training("killtest", &["left", "right"]);
    bed.start_agents();
    let bed = bed;
    let mut scenarios = Scenarios::default();
    scenarios.run("the decision moves an adopted job", || the_decision_moves_an_adopted_job(&bed));
    let mark = "a moved job's mark survives absence from the view and a restart of the operator";
    scenarios.run(mark, || a_mark_survives_absence_and_a_restart(&bed));
    scenarios.run("a share is dumped and replayed", || a_share_is_dumped_and_replayed(&bed));
    let watch = Watch::begin(&bed);
    // Being stopped; stopped, without a pod; starting, with a pod on its way to the target.
    let phases = ["after-delete", "after-stopped", "after-open"];
    let rounds = phases.into_iter().flat_map(|phase| [(phase, "left", "right"), (phase, "right", "left")]);
    let (mut agents_killed, mut tally) = (0, FaultTally::of("node-dies"));
    for (round, (phase, without_kubelet, without_power)) in rounds.enumerate() {
        let name = format!("kill-{round}");
        scenarios.run_counted(&format!("{phase}, {without_power} without power"), &mut tally, |tally| {
            agents_killed += nodes_die(&bed, &name, phase, (without_kubelet, without_power), tally);
        });
    }
    let watched = watch.end(&bed, &[]);
    scenarios.run_counted("the invariants held all the time, and each job moved", &mut tally, |tally| {
        watched.report(tally);
        assert!(watched.pods.len() == 6 && watched.pods.values().all(|pods| pods.len() > 1), "{:?}", watched.pods);
        assert!(agents_killed >= 4, "node agents were not there to be killed: {agents_killed}");
    });
    tally.print();
    scenarios.finish();
}
