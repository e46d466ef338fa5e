//! Make-believe nodes by the thousand, in the same API server as the real ones.
//!
//! kwok plays the kubelet of nodes that do not exist: they report ready, pods bound to them start at once
//! and run until they are deleted, and a resize is carried out as soon as it is asked for. Beside real
//! nodes they have a taint, so only pods that tolerate it land there.

use super::plane::{Plane, write, write_json};
use crate::sh;
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Taint, label and annotation of a make-believe node.
const MARK: &str = "kwok.x-k8s.io/node";

/// What a make-believe kubelet does to pods. Nodes follow kwok's own defaults.
const STAGES: &str = include_str!("../../../testbed/kwok.yaml");

/// How long a make-believe node's lease lasts; it is renewed every quarter of that. Thousands of them would
/// leave the API server time for nothing else: 20 renewals a second are enough.
fn lease_s(nodes: u32) -> u32 {
    (nodes / 5).max(100)
}

/// After how long without a renewal a node counts as lost.
pub(crate) fn grace_s(nodes: u32) -> u32 {
    lease_s(nodes) * 2 / 5
}

/// How many clients make nodes at once: one alone is held back by its own rate limit.
const CLIENTS: usize = 4;

/// Writes kwok's settings and returns how it is called.
pub(crate) fn prepare(plane: &Plane, nodes: u32) -> Result<Vec<String>> {
    let config = plane.dir.join("kwok.yaml");
    write(&config, STAGES)?;
    Ok(vec![
        plane.bin.join("kwok").display().to_string(),
        format!("--kubeconfig={}", plane.kubeconfig("admin").display()),
        format!("--config={}", config.display()),
        "--manage-all-nodes=false".to_owned(),
        format!("--manage-nodes-with-annotation-selector={MARK}=fake"),
        format!("--node-lease-duration-seconds={}", lease_s(nodes)),
    ])
}

fn node(index: u32, tainted: bool) -> Value {
    let name = format!("kwok-{index}");
    let size = json!({ "cpu": "32", "memory": "256Gi", "pods": "110" });
    let taint = json!({ "key": MARK, "value": "fake", "effect": "NoSchedule" });
    let taints = if tainted { vec![taint] } else { vec![] };
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": { MARK: "fake", "node.alpha.kubernetes.io/ttl": "0" },
            "labels": { "kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "type": "kwok" },
        },
        "spec": { "taints": taints },
        "status": { "allocatable": size, "capacity": size },
    })
}

/// Makes the nodes; `tainted`: there are real ones beside them, which pods should find.
pub(crate) fn create_nodes(kubectl: impl Fn() -> Command, dir: &Path, count: u32, tainted: bool) -> Result<()> {
    let nodes: Vec<Value> = (0..count).map(|index| node(index, tainted)).collect();
    let mut clients = Vec::new();
    for (i, part) in nodes.chunks(nodes.len().div_ceil(CLIENTS).max(1)).enumerate() {
        let file: PathBuf = dir.join(format!("kwok-nodes-{i}.json"));
        write_json(&file, &json!({ "apiVersion": "v1", "kind": "List", "items": part }))?;
        let mut create = kubectl();
        create.args(["create", "--validate=false", "--filename"]).arg(&file);
        clients.push(create.stdout(Stdio::null()).spawn().context("cannot start kubectl")?);
    }
    for mut client in clients {
        if !client.wait()?.success() {
            bail!("make-believe nodes could not be created: see above");
        }
    }
    Ok(())
}

/// How many make-believe nodes are ready.
pub(crate) fn ready_nodes(mut kubectl: Command) -> Result<usize> {
    let status = "{range .items[*]}{.status.conditions[?(@.type==\"Ready\")].status}{\"\\n\"}{end}";
    let selector = ["get", "nodes", "--selector=type=kwok", "--output"];
    let listed = sh::output(kubectl.args(selector).arg(format!("jsonpath={status}")))?;
    Ok(listed.lines().filter(|l| *l == "True").count())
}
