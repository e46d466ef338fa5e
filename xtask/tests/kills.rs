//! Moves in a cluster with agents: one that nobody asked for, and some during which nodes die.
//!
//! A Job of the cluster's own kind flattens beside two that grow, and SpeCon sends it away by itself. Then nodes die in the middle of moves: in each phase of a move the agents of source and
//! target are killed, one of the two nodes loses its kubelet (its containers live on), and the other one its power.
//!
//! The manager is stopped at a fail point, so that the phase is certain; then the nodes die, a new manager goes on, and the nodes come back. All the while the kernel is
//! asked who is alive: never two attempts of a job; and each job ends up running once, with a word on its object about what happened. Needs root.

mod common;

use common::training::{COUNTS, Manager, batch_job, job, program};
use common::{Bed, SYSTEM, Watch, alive, eventually, text};
use serde_json::json;
use std::path::Path;
use std::time::{Duration, Instant};

/// Agents on all nodes, as the chart makes them; they reach the managers of this test by the chart's name for them.
fn start_agents(bed: &mut Bed) {
    let program = program();
    let loaded = bed.testbed(&["load-image", program.to_str().unwrap(), "--image", "gainshare:local"]);
    assert!(loaded.status.success(), "{}", text(&loaded.stderr));
    bed.kubectl(&["create", "configmap", "gainshare-manager", "-n", SYSTEM]);
    let (address, port) = (bed.machine(), 8443);
    bed.listen = format!("{address}:{port}");
    let named = json!({"name": "gainshare-manager", "namespace": SYSTEM, "labels": {"kubernetes.io/service-name": "gainshare-manager"}});
    let ports = json!([{"name": "sync", "port": port, "protocol": "TCP"}]);
    bed.apply(json!({"apiVersion": "v1", "kind": "Service", "metadata": named, "spec": {"ports": ports}}));
    bed.apply(json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": named, "addressType": "IPv4",
        "ports": ports, "endpoints": [{"addresses": [address], "conditions": {"ready": true}}],
    }));
    let _manager = Manager::start(bed, None);
    let certificate = || {
        let map = bed.kubectl(&["get", "configmap", "gainshare-manager", "-n", SYSTEM, "-o", "jsonpath={.data}"]);
        map.contains("ca.crt").then_some(())
    };
    eventually("the manager's certificate", certificate);
    let chart = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/chart");
    let rendered = bed.run(
        "helm",
        &[
            "template",
            "gainshare",
            chart.to_str().unwrap(),
            "-n",
            SYSTEM,
            "--kube-version",
            "1.35.0",
            "--show-only",
            "templates/agent.yaml",
            "--set",
            "image.repository=gainshare,image.tag=local",
        ],
        "",
    );
    bed.apply(rendered);
    bed.kubectl(&["rollout", "status", "daemonset/gainshare-agent", "-n", SYSTEM, "--timeout=60s"]);
}

/// Loses a half of its loss, less and less of it in each report: after some ten seconds it hardly changes any more.
const FLATTENS: &str =
    r#"d=$((${d:-$((i > 1 ? 1 : 500000))} * 93 / 100)); echo "step=$i loss=$((500000 + d))"; sleep 0.2"#;

/// Twentieths of the first loss in every second.
const GROWS: &str = r#"echo "step=$i loss=$((1000000 - i * 10000))"; sleep 0.2"#;

fn the_decision_moves_an_adopted_job(bed: &Bed) {
    let watch = Watch::begin(bed);
    let _manager = Manager::with(bed, None, &["--specon-interval", "2s"]);
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
    let watched = watch.end();
    assert!(watched.twice.is_empty() && watched.pods["flattens"].len() == 2, "{watched:?}");
    bed.kubectl(&["delete", "trainingjob", "grows-1", "grows-2", "-n", "team", "--timeout=60s"]);
    // Its pod too: whoever watches next is to see none of this.
    bed.kubectl(&["delete", "job", "flattens", "-n", "team", "--cascade=foreground", "--timeout=60s"]);
}

#[test]
fn nodes_and_agents_die_in_every_phase_of_a_move() {
    let mut bed = Bed::with_training("killtest", &["left", "right"]);
    start_agents(&mut bed);
    let bed = bed;
    the_decision_moves_an_adopted_job(&bed);
    let watch = Watch::begin(&bed);
    // Being stopped; stopped, without a pod; starting, with a pod on its way to the target.
    let phases = ["after-delete", "after-stopped", "after-open"];
    let rounds = phases.into_iter().flat_map(|phase| [(phase, "left", "right"), (phase, "right", "left")]);
    let mut agents_killed = 0;
    for (round, (phase, without_kubelet, without_power)) in rounds.enumerate() {
        let begun = Instant::now();
        let name = format!("kill-{round}");
        let manager = Manager::start(&bed, None);
        bed.apply(job(&name, COUNTS, json!({"runPolicy": {"terminationGracePeriodSeconds": 5}})));
        bed.until(&name, "Running", Some("left"));
        drop(manager);

        let mut manager = Manager::start(&bed, Some(phase));
        bed.send_to(&name, "right");
        manager.died();
        bed.kill_kubelet(without_kubelet);
        bed.kill_kubelet(without_power);
        for node in [without_kubelet, without_power] {
            agents_killed += bed.kill_processes(node, "gainshare agent");
        }
        bed.kill_processes(without_power, "");

        let manager = Manager::start(&bed, None);
        std::thread::sleep(Duration::from_secs(2));
        for node in ["left", "right"] {
            assert!(bed.testbed(&["start", &format!("kubelet-{node}")]).status.success());
        }
        let looks = || {
            let status = bed.job(&name)["status"].clone();
            let pod = status["attempt"]["pod"].as_str()?.to_owned();
            let lives = alive(bed.name).get(&name).is_some_and(|pods| pods.iter().eq([&pod]));
            (status["state"] == "Running" && status["migration"].is_null() && lives).then_some(status)
        };
        let status = eventually(&format!("{name} running once after {phase} without {without_power}"), looks);
        eprintln!(
            "{phase}, {without_power} without power: {:.1} s, {} {}",
            begun.elapsed().as_secs_f64(),
            status["message"],
            status["lastMoves"]
        );
        assert!(status["attempt"]["epoch"].as_u64() > Some(1), "{status:#}");
        assert!(!status["lastMoves"].as_array().unwrap().is_empty(), "the object does not tell: {status:#}");
        bed.kubectl(&["delete", "trainingjob", &name, "-n", "team", "--timeout=60s"]);
        drop(manager);
    }
    let watched = watch.end();
    assert!(watched.twice.is_empty(), "{:?}", watched.twice);
    assert!(watched.pods.len() == 6 && watched.pods.values().all(|pods| pods.len() > 1), "{:?}", watched.pods);
    assert!(agents_killed >= 4, "agents were not there to be killed: {agents_killed}");
}
