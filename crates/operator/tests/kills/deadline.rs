//! A job that will miss its deadline on a crowded node moves once, to a node on which it makes it.
//!
//! **How.** The jobs are built-in trainers. A pod that Gainshare does not share requests most of the node [`CROWDED`].
//! The job `due` gets about a sixth of that node, and would end there long after its deadline. On the node [`LARGE`]
//! runs a second job, whose deadline leaves most of the node free. How long each job works follows from what a step
//! costs on this machine. As long as a step costs 0.85 to 1.5 times as much in a pod, `due` is late on one node and in
//! time on the other one, also by the far end of its prediction: a job that had little of a node may be slower with
//! more of it than it seems.
//!
//! All facts are read from the API server.
//!
//! **Terms.** Work is in seconds of one core.

use crate::common::training::{Operator, job};
use crate::common::{TestBed, eventually, program, text};
use serde_json::{Value, json};
use std::process::Command;

/// A node with 0.6 cores. Pods get a little less: the kubelet uses some.
const CROWDED: &str = "right";
/// A node that is closed for all other scenarios.
pub(super) const LARGE: &str = "large";
/// This one is closed here.
const OTHER: &str = "left";

const MODEL: &str = "mlp";
/// A report a second or more, also with a tenth of a core.
const REPORT_EVERY: &str = "8";

/// The job takes more than two minutes on the crowded node, and twenty seconds on the other one.
const WORK_S: f64 = 13.0;
const DEADLINE_S: u32 = 100;

/// The resident works during the whole scenario. Its deadline needs about an eighth of its node.
const RESIDENT_WORK_S: f64 = 60.0;
const RESIDENT_DEADLINE_S: u32 = 600;

pub(super) fn check(bed: &TestBed) {
    let _operator = Operator::start(bed, None);
    let _stage = Stage::begin(bed);
    let speed = steps_per_s();
    bed.apply(crowd());
    bed.apply(trainer("resident", LARGE, RESIDENT_WORK_S * speed, RESIDENT_DEADLINE_S));
    bed.until("resident", "Running", Some(LARGE));
    open(bed, CROWDED);
    bed.kubectl(&["wait", "--for=condition=Ready", "pod/crowd", "-n", "team", "--timeout=60s"]);

    bed.apply(trainer("due", CROWDED, WORK_S * speed, DEADLINE_S));
    bed.until("due", "Running", Some(CROWDED));
    // With the annotation it would be kept where it was sent.
    bed.kubectl(&["annotate", "trainingjob", "due", "-n", "team", "gainshare.dev/node-"]);
    eventually("a predicted miss on the crowded node", || {
        let status = bed.job("due")["status"].clone();
        let is_late = status["finish"]["standing"] == "AtRisk" && status["attempt"]["node"] == CROWDED;
        is_late.then_some(())
    });

    let moved = bed.until("due", "Running", Some(LARGE))["status"].clone();
    let made = &moved["lastMoves"][0];
    assert_eq!(
        (&made["reason"], &made["from"], &made["to"], &moved["moves"]),
        (&json!("Deadline"), &json!(CROWDED), &json!(LARGE), &json!(1)),
        "{moved:#}"
    );
    assert!(moved["specon"]["forDeadline"].is_string(), "the move is not marked: {moved:#}");
    let why = made["message"].as_str().unwrap_or_default();
    assert!(why.contains("would miss its deadline where it is"), "{moved:#}");
    let explained = bed.plugin(&["explain", "due"]);
    assert!(explained.contains(why), "{explained}");
    let pod = moved["attempt"]["pod"].as_str().unwrap();
    let resumed_after = eventually("the step after which it continues", || {
        let log = text(&bed.output("kubectl", &["logs", pod, "-n", "team"], "").stdout);
        log.lines().find_map(|line| line.split_once("continues after step ")?.1.split(' ').next()?.parse::<u64>().ok())
    });
    assert!(resumed_after > 0, "it has lost its steps");

    // The node that it left is free again, and it stays where it is.
    bed.kubectl(&["delete", "pod", "crowd", "-n", "team", "--wait=false"]);
    let ended = bed.until("due", "Succeeded", Some(LARGE))["status"].clone();
    assert_eq!(
        (&ended["finish"]["standing"], &ended["moves"], &ended["failures"]),
        (&json!("Met"), &json!(1), &json!(0)),
        "{ended:#}"
    );
    assert_eq!(ended["lastMoves"].as_array().map(Vec::len), Some(1), "{ended:#}");

    // The promise of its neighbour was never in doubt.
    let resident = bed.job("resident")["status"].clone();
    assert_eq!((&resident["finish"]["standing"], &resident["moves"]), (&json!("OnTime"), &json!(0)), "{resident:#}");
    let warned = warned(bed);
    assert!(warned.iter().any(|name| name == "due"), "no event says that it will be late: {warned:?}");
    assert!(!warned.iter().any(|name| name.starts_with("resident")), "{warned:?}");
}

/// The objects with an event of a predicted miss.
fn warned(bed: &TestBed) -> Vec<String> {
    let selector = "--field-selector=reason=DeadlineAtRisk";
    let events = bed.kubectl(&["get", "events", "-n", "team", selector, "-o", "json"]);
    let events: Value = serde_json::from_str(&events).unwrap();
    let name = |event: &Value| event["involvedObject"]["name"].as_str().map(str::to_owned);
    events["items"].as_array().into_iter().flatten().filter_map(name).collect()
}

/// Steps in a second of one core, reports included: the trainer says at its end what a step cost.
fn steps_per_s() -> f64 {
    let args = ["train", MODEL, "--steps", "200", "--report-every", REPORT_EVERY];
    let output = Command::new(program("gainshare")).args(args).output().unwrap();
    let said = text(&output.stderr);
    let before = said.split_once(" CPU ms per step").map(|(before, _)| before);
    let cost_ms = before.and_then(|before| before.rsplit(' ').next()?.parse::<f64>().ok());
    match cost_ms {
        Some(cost_ms) if cost_ms > 0.0 => 1e3 / cost_ms,
        _ => panic!("the trainer does not say what a step costs: {said}"),
    }
}

/// A job of the policy `gainshare` that makes this many steps and is sent to a node.
fn trainer(name: &str, node: &str, steps: f64, deadline_s: u32) -> Value {
    let steps = format!("{steps:.0}");
    let mut args = vec!["train", MODEL, "--steps", &steps, "--report-every", REPORT_EVERY];
    args.extend(["--checkpoint", "/keep", "--checkpoint-every", "0"]);
    let container = json!({
        "name": "main", "image": "gainshare:local", "imagePullPolicy": "Never", "args": args,
        "resources": {"requests": {"cpu": "90m", "memory": "48Mi"}},
    });
    let template = json!({"spec": {"containers": [container]}});
    let more = json!({"policy": "gainshare", "deadlineSeconds": deadline_s, "template": template});
    let mut job: Value = serde_json::from_str(&job(name, "", more)).unwrap();
    job["metadata"]["annotations"] = json!({"gainshare.dev/node": node});
    job
}

/// A pod that trains all the time, and that no policy selects.
fn crowd() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "crowd", "namespace": "team"},
        "spec": {
            "nodeName": CROWDED, "restartPolicy": "Never", "terminationGracePeriodSeconds": 1,
            "containers": [{
                "name": "main", "image": "gainshare:local", "imagePullPolicy": "Never",
                "args": ["train", MODEL, "--steps", "1000000", "--report-every", "100000"],
                "resources": {"requests": {"cpu": "400m", "memory": "48Mi"}},
            }],
        },
    })
}

/// Lets jobs come to a node.
fn open(bed: &TestBed, node: &str) {
    bed.kubectl(&["uncordon", node]);
    // A controller takes the taint away, a moment later.
    let taints = || bed.kubectl(&["get", "node", node, "-o", "jsonpath={.spec.taints}"]);
    eventually("a node without taints", || taints().trim().is_empty().then_some(()));
}

/// The nodes as the scenario needs them. At its end, however it ends, its jobs go and the nodes are as before.
struct Stage<'a>(&'a TestBed);

impl Stage<'_> {
    /// Opens the large node alone: so the resident belongs there, and the other job belongs on the crowded node.
    fn begin(bed: &TestBed) -> Stage<'_> {
        let stage = Stage(bed);
        bed.kubectl(&["cordon", OTHER, CROWDED]);
        open(bed, LARGE);
        stage
    }
}

impl Drop for Stage<'_> {
    fn drop(&mut self) {
        let ours = ["trainingjob/due", "trainingjob/resident", "pod/crowd"];
        let gone = ["-n", "team", "--ignore-not-found", "--timeout=60s"];
        self.0.output("kubectl", &[&["delete"], &ours[..], &gone[..]].concat(), "");
        self.0.output("kubectl", &["cordon", LARGE], "");
        self.0.output("kubectl", &["uncordon", OTHER, CROWDED], "");
    }
}
