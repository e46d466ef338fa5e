//! The status of a SharePolicy. [`status`] is pure; [`pass`] writes it where it has changed.

use super::Shares;
use super::write::point;
use crate::isolate::skip_on_panic;
use crate::state::agents::Agents;
use crate::state::events::{self, Subject, Text};
use crate::state::world::{PolicyKey, World};
use gainshare_kube_api::names::{API_VERSION, FIELD_MANAGER, NodeName};
use gainshare_kube_api::select::PolicyFacts;
use gainshare_kube_api::share_policy::{BlockedPod, SharePolicy, SharePolicyStatus};
use gainshare_kube_api::wire::{PodOnNode, ReportedCategory};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::Client;
use kube::api::{Api, Patch, PatchParams};
use kube::runtime::events::Recorder;
use serde_json::json;
use std::collections::BTreeSet;
use std::time::Instant;

/// The number of pods that cannot be resized and are named one by one.
const NAMED: usize = 10;

/// A condition before it has a time.
struct Finding {
    kind: &'static str,
    holds: bool,
    reason: &'static str,
    message: String,
}

/// The status of a policy now. Conditions keep the time at which they last changed.
pub(crate) fn status(
    world: &World,
    policy: &PolicyFacts,
    agents: &Agents,
    now: Instant,
    at: jiff::Timestamp,
) -> SharePolicyStatus {
    let key: PolicyKey = (policy.namespace.clone(), policy.name.clone());
    let pods: Vec<_> = world.pods_of_policy(&key).collect();
    let blocked: Vec<&PodOnNode> = pods.iter().copied().filter(|pod| pod.blocked.is_some()).collect();
    let count = |category: ReportedCategory| {
        let of_it = pods.iter().filter(|pod| agents.job(&pod.uid).is_some_and(|job| job.category == category));
        of_it.count() as u32
    };
    let nodes: BTreeSet<&NodeName> = pods.iter().filter_map(|pod| world.node_of(&pod.uid)).collect();
    let silent: Vec<&NodeName> = nodes.iter().copied().filter(|node| !agents.is_heard(node, now)).collect();
    let paused = !policy.is_active() || world.is_off();
    let findings = [
        ready(world, policy, pods.len(), blocked.len(), &silent),
        Finding {
            kind: "Selected",
            holds: !pods.is_empty(),
            reason: if pods.is_empty() { "NothingMatches" } else { "PodsMatch" },
            message: selected(world, policy, pods.len(), paused),
        },
        resizable(pods.len(), &blocked),
        agents_ready(nodes.len(), &silent),
    ];
    let before = policy.status.clone().unwrap_or_default();
    SharePolicyStatus {
        observed_generation: Some(policy.generation),
        conditions: findings.into_iter().map(|finding| condition(finding, &before, policy.generation, at)).collect(),
        pods: pods.len() as u32,
        resizable: (pods.len() - blocked.len()) as u32,
        growing: count(ReportedCategory::Growing),
        watching: count(ReportedCategory::Watching),
        converged: count(ReportedCategory::Converged),
        blocked: blocked
            .iter()
            .take(NAMED)
            .filter_map(|pod| {
                let why = pod.blocked.clone()?;
                Some(BlockedPod { pod: pod.name.clone(), reason: why.reason, message: why.message })
            })
            .collect(),
    }
}

fn resizable(pods: usize, blocked: &[&PodOnNode]) -> Finding {
    let message = match blocked.first() {
        None => "every selected pod can be resized in place".to_owned(),
        Some(first) => {
            let why = first.blocked.as_ref().map(|blocked| blocked.message.as_str()).unwrap_or_default();
            format!("{} of {pods} pods cannot be resized; {}: {why}", blocked.len(), first.name)
        }
    };
    Finding {
        kind: "Resizable",
        holds: blocked.is_empty(),
        reason: if blocked.is_empty() { "AllResizable" } else { "SomeBlocked" },
        message,
    }
}

fn agents_ready(nodes: usize, silent: &[&NodeName]) -> Finding {
    let message = if silent.is_empty() {
        "every node with selected pods has an agent".to_owned()
    } else {
        let first: Vec<&str> = silent.iter().map(|node| node.as_str()).take(NAMED).collect();
        format!("the agents of {} of {nodes} nodes do not report: {}", silent.len(), first.join(", "))
    };
    Finding {
        kind: "AgentsReady",
        holds: silent.is_empty(),
        reason: if silent.is_empty() { "AllHeard" } else { "SomeSilent" },
        message,
    }
}

fn ready(world: &World, policy: &PolicyFacts, pods: usize, blocked: usize, silent: &[&NodeName]) -> Finding {
    let finding = |holds, reason, message: String| Finding { kind: "Ready", holds, reason, message };
    if world.is_off() {
        return finding(false, "SwitchedOff", "sharing is switched off for the whole cluster".to_owned());
    }
    if policy.spec.suspend {
        return finding(false, "Suspended", "suspended: every pod has its own values".to_owned());
    }
    if pods == 0 {
        return finding(false, "NothingSelected", "no running pod is selected: see the condition Selected".to_owned());
    }
    if blocked == pods {
        return finding(
            false,
            "NothingResizable",
            "no selected pod can be resized: see the condition Resizable".to_owned(),
        );
    }
    if !silent.is_empty() {
        return finding(
            false,
            "AgentsMissing",
            "not every node has a working agent: see the condition AgentsReady".to_owned(),
        );
    }
    finding(true, "Sharing", format!("{} pods share their nodes", pods - blocked))
}

/// Why nothing is selected, as far as the operator can find out.
fn selected(world: &World, policy: &PolicyFacts, pods: usize, paused: bool) -> String {
    if pods > 0 {
        return format!("{pods} running pods");
    }
    if paused {
        return "suspended, or switched off: nothing is selected meanwhile".to_owned();
    }
    let (matching, taken) = world.matching(policy);
    if taken > 0 {
        return format!("{taken} matching pods belong to an older policy of this namespace");
    }
    if matching > 0 {
        return format!("{matching} pods match, but none of them runs yet");
    }
    match (&policy.spec.selector, &policy.spec.target_ref) {
        (_, Some(target)) => format!(
            "no pod in {} was made by a {} named {}: look at `kubectl get pods -o yaml` for the ownerReferences",
            policy.namespace, target.kind, target.name
        ),
        _ => format!(
            "no pod in {} has these labels: look at `kubectl get pods --show-labels -n {}`",
            policy.namespace, policy.namespace
        ),
    }
}

fn condition(finding: Finding, before: &SharePolicyStatus, generation: i64, at: jiff::Timestamp) -> Condition {
    let status = if finding.holds { "True" } else { "False" };
    let known = before.conditions.iter().find(|known| known.type_ == finding.kind && known.status == status);
    Condition {
        type_: finding.kind.to_owned(),
        status: status.to_owned(),
        reason: finding.reason.to_owned(),
        message: finding.message,
        observed_generation: Some(generation),
        last_transition_time: known.map_or(Time(at), |known| known.last_transition_time.clone()),
    }
}

/// Writes the status of these policies where it has changed. Answers those that could not be
/// written.
pub(crate) async fn pass(
    shares: &Shares,
    client: &Client,
    recorder: &Recorder,
    keys: impl IntoIterator<Item = PolicyKey>,
) -> Vec<PolicyKey> {
    let (leader, fail_at) = (&shares.leader, &shares.writer.fail_at);
    let mut again = Vec::new();
    for key in keys {
        let found = leader.read(|world| {
            let policy = world.policies.get(&key).filter(|policy| !policy.ending)?;
            let agents = leader.agents.lock();
            let name = format!("{}/{}", policy.namespace, policy.name);
            let compute = || status(world, policy, &agents, Instant::now(), jiff::Timestamp::now());
            let wanted = skip_on_panic("SharePolicy", &name, compute)?;
            (policy.status.as_ref() != Some(&wanted)).then(|| (policy.clone(), wanted))
        });
        let Some((policy, wanted)) = found else { continue };
        let api: Api<SharePolicy> = Api::namespaced(client.clone(), &policy.namespace);
        let params = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
        // The whole list is written, also when it is empty: a merge would leave what is no longer
        // true.
        let mut body = json!(wanted);
        body["blocked"] = json!(wanted.blocked);
        fail_at.reach("before", point::STATUS);
        match api.patch_status(&policy.name, &params, &Patch::Merge(json!({"status": body}))).await {
            Ok(written) => {
                fail_at.reach("after", point::STATUS);
                leader
                    .metrics
                    .writes
                    .get_or_create(&crate::state::metrics::WriteLabels { what: "status", outcome: "done" })
                    .inc();
                if let Some(facts) = PolicyFacts::of(&written) {
                    leader.change(|world| world.put_policy(facts));
                }
                publish_event(recorder, &policy, &wanted).await;
            }
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            Err(error) => {
                tracing::warn!(policy = policy.name, namespace = policy.namespace, %error, "cannot write a policy's status");
                again.push(key);
            }
        }
    }
    again
}

/// An event when `Ready` turns.
async fn publish_event(recorder: &Recorder, policy: &PolicyFacts, wanted: &SharePolicyStatus) {
    let ready = |status: &SharePolicyStatus| {
        status
            .conditions
            .iter()
            .find(|c| c.type_ == "Ready")
            .map(|c| (c.status.clone(), c.reason.clone(), c.message.clone()))
    };
    let (Some((state, reason, message)), before) = (ready(wanted), policy.status.as_ref().and_then(ready)) else {
        return;
    };
    if before.is_some_and(|(old_state, old_reason, _)| (old_state, old_reason) == (state.clone(), reason.clone())) {
        return;
    }
    let subject = Subject {
        api_version: API_VERSION,
        kind: "SharePolicy",
        namespace: &policy.namespace,
        name: &policy.name,
        uid: Some(&policy.uid),
    };
    let text = Text { warns: state != "True", reason: &reason, note: &message, action: "Share" };
    events::publish(recorder, subject, text).await;
}
