//! Placeholders: pods that stand for nodes that are needed.
//!
//! **How.** A placeholder requests [`REQUESTED_PERCENT`] of what jobs can have of a node of its kind. It finds no
//! place until such a node comes, so programs that add nodes read it as a request. [`reconcile`] (pure) compares the
//! placeholders that exist with those that are wanted.
//!
//! **Nodes that exist.** A node that exists may have room for a placeholder and be no help for the job: the job runs
//! there already, or only a part of a gang fits. The placeholder excludes those nodes by name, and only those:
//! Karpenter ignores pods that name nodes.
//!
//! **When one goes.** At once when it has a node, because the node is for jobs; when its kind is not needed any more;
//! and when sharing is switched off. For [`REST`] after a placeholder has got a node, no other one of its kind is
//! made: the jobs take their time to start on the node that has come.
//!
//! **Giving way.** Its PriorityClass is below that of ordinary pods, so a pod that needs the room preempts it, and its
//! requests count as free room everywhere in the operator. It has no finalizer and no grace period, it carries the
//! annotation by which cluster-autoscaler may evict it, and it belongs to the operator's ConfigMap: an uninstall
//! removes it.

use super::kinds::{KindSize, to_core_room};
use gainshare_core::policies::deadline::NodeKind;
use gainshare_kube_api::facts::PodFacts;
use gainshare_kube_api::names::{NodeName, PLACEHOLDER_LABEL, PLACEHOLDER_PREFIX, PodUid, SHARE_LABEL};
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// The part of a node that a placeholder requests, in hundredths. What programs expect of a new node is a little less
/// than what the node then has.
const REQUESTED_PERCENT: u64 = 90;

/// How long no other placeholder of a kind is made after one has got a node. Longer than the scaler takes to notice
/// that the need is met.
const REST: SignedDuration = SignedDuration::from_secs(60);

/// At most this many nodes are excluded; a cluster with more free nodes needs none.
const MOST_EXCLUDED: usize = 100;

/// How placeholders are made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScalerConfig {
    /// An image that contains this program.
    pub image: String,
    pub priority_class: String,
    /// There are never more placeholders than this.
    pub most_nodes: usize,
}

/// A placeholder that exists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Placeholder {
    pub(super) name: String,
    pub(super) uid: PodUid,
    pub(super) kind: String,
    pub(super) has_node: bool,
}

impl Placeholder {
    pub(super) fn of(pod: &PodFacts) -> Option<Placeholder> {
        let kind = pod.labels.get(PLACEHOLDER_LABEL)?.clone();
        let has_node = pod.node.is_some();
        Some(Placeholder { name: pod.name.clone(), uid: pod.uid.clone(), kind, has_node })
    }
}

/// What is to be done about placeholders.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Changes {
    /// Names and uids.
    pub(super) delete: Vec<(String, PodUid)>,
    /// Names, and the kind of each.
    pub(super) create: Vec<(String, String)>,
}

/// When placeholders of each kind got a node last.
#[derive(Debug, Default)]
pub(super) struct Arrivals {
    last: BTreeMap<String, Timestamp>,
}

/// Compares what exists with what is wanted: a number of placeholders by kind, and at most `most` in all.
pub(super) fn reconcile(
    existing: &[Placeholder],
    wanted: &BTreeMap<String, usize>,
    most: usize,
    arrivals: &mut Arrivals,
    now: Timestamp,
) -> Changes {
    arrivals.last.retain(|_, at| (SignedDuration::ZERO..REST).contains(&now.duration_since(*at)));
    let mut changes = Changes::default();
    let mut kept: BTreeMap<&str, usize> = BTreeMap::new();
    let mut sorted: Vec<&Placeholder> = existing.iter().collect();
    sorted.sort_by(|a, b| a.name.cmp(&b.name));
    for one in sorted {
        let number = kept.values().sum::<usize>();
        let of_kind = kept.entry(&one.kind).or_default();
        if one.has_node {
            arrivals.last.insert(one.kind.clone(), now);
        }
        if one.has_node || number >= most || *of_kind >= wanted.get(&one.kind).copied().unwrap_or(0) {
            changes.delete.push((one.name.clone(), one.uid.clone()));
        } else {
            *of_kind += 1;
        }
    }
    // A name is free again when the object is gone.
    let mut taken: BTreeSet<String> = existing.iter().map(|one| one.name.clone()).collect();
    let mut number: usize = kept.values().sum();
    for (kind, count) in wanted.iter().filter(|(kind, _)| !arrivals.last.contains_key(*kind)) {
        for _ in kept.get(kind.as_str()).copied().unwrap_or(0)..*count {
            if number >= most {
                return changes;
            }
            let name =
                (0..).map(|index| format!("{PLACEHOLDER_PREFIX}{kind}-{index}")).find(|name| !taken.contains(name));
            let name = name.unwrap_or_default();
            taken.insert(name.clone());
            changes.create.push((name, kind.clone()));
            number += 1;
        }
    }
    changes
}

/// What a placeholder of this kind requests: thousandths of a core, and bytes.
fn requests(kind: &KindSize) -> (u64, u64) {
    let (milli, bytes) = kind.room();
    (milli / 100 * REQUESTED_PERCENT, bytes / 100 * REQUESTED_PERCENT)
}

/// The nodes that have room for a placeholder of this kind; `None` if there are too many to exclude.
pub(super) fn excluded(kind: &KindSize, free: &[NodeKind]) -> Option<Vec<NodeName>> {
    let wanted = to_core_room(requests(kind));
    let holds = |node: &&NodeKind| node.room.cores >= wanted.cores && node.room.memory_bytes >= wanted.memory_bytes;
    let names: Vec<NodeName> = free.iter().filter(holds).map(|node| node.name.as_str().into()).collect();
    (names.len() <= MOST_EXCLUDED).then_some(names)
}

/// The object that owns placeholders.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Owner {
    pub(super) namespace: String,
    pub(super) config_map: String,
    pub(super) uid: String,
}

/// The manifest of a placeholder that runs on none of the excluded nodes.
pub(super) fn manifest(
    (name, kind_name): (&str, &str),
    kind: &KindSize,
    excluded: &[NodeName],
    owner: &Owner,
    config: &ScalerConfig,
) -> Value {
    let (milli, bytes) = requests(kind);
    let mut pod = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": owner.namespace,
            "labels": {
                "app.kubernetes.io/name": "gainshare",
                "app.kubernetes.io/component": "placeholder",
                PLACEHOLDER_LABEL: kind_name,
                SHARE_LABEL: "disabled",
            },
            "annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "true"},
            "ownerReferences": [
                {"apiVersion": "v1", "kind": "ConfigMap", "name": owner.config_map, "uid": owner.uid},
            ],
        },
        "spec": {
            "priorityClassName": config.priority_class,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": false,
            "enableServiceLinks": false,
            "securityContext": {
                "runAsNonRoot": true, "runAsUser": 65532, "runAsGroup": 65532, "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [{
                "name": "placeholder",
                "image": config.image,
                "command": ["/usr/local/bin/gainshare-operator", "pause"],
                "resources": {"requests": {"cpu": format!("{milli}m"), "memory": bytes.to_string()}},
                "securityContext": {
                    "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true, "capabilities": {"drop": ["ALL"]},
                },
            }],
        },
    });
    if !excluded.is_empty() {
        let other = |node: &NodeName| json!({"key": "metadata.name", "operator": "NotIn", "values": [node]});
        let others: Vec<Value> = excluded.iter().map(other).collect();
        let required = json!({"nodeSelectorTerms": [{"matchFields": others}]});
        pod["spec"]["affinity"] = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}});
    }
    pod
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::core::v1::Pod;

    fn placeholder(name: &str, has_node: bool) -> Placeholder {
        let kind = name.rsplit_once('-').unwrap().0.trim_start_matches(PLACEHOLDER_PREFIX).to_owned();
        Placeholder { name: name.to_owned(), uid: format!("uid-{name}").into(), kind, has_node }
    }

    fn name(kind: &str, index: usize) -> String {
        format!("{PLACEHOLDER_PREFIX}{kind}-{index}")
    }

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn wanted(all: &[(&str, usize)]) -> BTreeMap<String, usize> {
        all.iter().map(|(kind, count)| ((*kind).to_owned(), *count)).collect()
    }

    fn created(changes: &Changes) -> Vec<&str> {
        changes.create.iter().map(|(name, _)| name.as_str()).collect()
    }

    fn deleted(changes: &Changes) -> Vec<&str> {
        changes.delete.iter().map(|(name, _)| name.as_str()).collect()
    }

    #[test]
    fn a_placeholder_with_a_node_is_deleted_at_once() {
        let mut arrivals = Arrivals::default();
        let existing = [placeholder(&name("a", 0), true), placeholder(&name("a", 1), false)];
        let changes = reconcile(&existing, &wanted(&[("a", 2)]), 10, &mut arrivals, at(0));
        assert_eq!((deleted(&changes), created(&changes)), (vec![name("a", 0).as_str()], vec![]));
        // For a while no other one is made, even if the need seems to be the same.
        let changes = reconcile(&existing[1..], &wanted(&[("a", 2)]), 10, &mut arrivals, at(59));
        assert_eq!(changes, Changes::default());
        let changes = reconcile(&existing[1..], &wanted(&[("a", 2)]), 10, &mut arrivals, at(61));
        assert_eq!(created(&changes), [name("a", 0)]);
    }

    #[test]
    fn what_exists_is_kept_and_what_is_too_much_goes() {
        let mut arrivals = Arrivals::default();
        let changes = reconcile(&[], &wanted(&[("a", 2), ("b", 1)]), 10, &mut arrivals, at(0));
        assert_eq!(created(&changes), [name("a", 0), name("a", 1), name("b", 0)]);
        let existing: Vec<Placeholder> = changes.create.iter().map(|(name, _)| placeholder(name, false)).collect();
        let again = reconcile(&existing, &wanted(&[("a", 2), ("b", 1)]), 10, &mut arrivals, at(5));
        assert_eq!(again, Changes::default());
        let fewer = reconcile(&existing, &wanted(&[("a", 1)]), 10, &mut arrivals, at(10));
        assert_eq!((deleted(&fewer), created(&fewer)), (vec![name("a", 1).as_str(), &name("b", 0)], vec![]));
        assert_eq!(reconcile(&existing, &wanted(&[]), 10, &mut arrivals, at(15)).delete.len(), 3);
    }

    #[test]
    fn no_more_placeholders_than_allowed() {
        let mut arrivals = Arrivals::default();
        let changes = reconcile(&[], &wanted(&[("a", 5), ("b", 5)]), 3, &mut arrivals, at(0));
        assert_eq!(changes.create.len(), 3);
        let existing: Vec<Placeholder> = (0..5).map(|index| placeholder(&name("a", index), false)).collect();
        let changes = reconcile(&existing, &wanted(&[("a", 5)]), 3, &mut arrivals, at(0));
        assert_eq!((changes.delete.len(), changes.create.len()), (2, 0));
        assert_eq!(reconcile(&[], &wanted(&[("a", 5)]), 0, &mut arrivals, at(0)), Changes::default());
    }

    #[test]
    fn a_manifest_is_a_pod_that_keeps_no_node() {
        let kind = KindSize { instance_type: None, size: (4000, 16 << 30), overhead: (1000, 0), speed_percent: 100 };
        let owner =
            Owner { namespace: "system".to_owned(), config_map: "gainshare-operator".to_owned(), uid: "u".to_owned() };
        let config = ScalerConfig { image: "g:1".to_owned(), priority_class: "low".to_owned(), most_nodes: 3 };
        let value = manifest((&name("a", 0), "a"), &kind, &["n".into()], &owner, &config);
        let pod: Pod = serde_json::from_value(value.clone()).unwrap();
        assert_eq!(serde_json::to_value(&pod).unwrap(), value, "every field is one of a pod");
        let requests = &value["spec"]["containers"][0]["resources"]["requests"];
        assert_eq!((requests["cpu"].as_str(), requests["memory"].as_str()), (Some("2700m"), Some("15461882190")));
        assert!(value["metadata"]["finalizers"].is_null());
        let roomy = |name: &str, milli: u64| NodeKind {
            name: name.to_owned(),
            room: to_core_room((milli, 16 << 30)),
            speed: 1.0,
        };
        let free = [roomy("full", 2600), roomy("empty", 2700)];
        assert_eq!(excluded(&kind, &free), Some(vec!["empty".into()]));
        assert_eq!(excluded(&kind, &vec![roomy("n", 4000); MOST_EXCLUDED + 1]), None);
        let unhindered = manifest((&name("a", 0), "a"), &kind, &[], &owner, &config);
        assert!(unhindered["spec"]["affinity"].is_null(), "Karpenter ignores pods that name nodes");
        let notes = pod.metadata.annotations.unwrap();
        assert_eq!(notes["cluster-autoscaler.kubernetes.io/safe-to-evict"], "true");
        assert_eq!(pod.metadata.owner_references.unwrap()[0].block_owner_deletion, None);
    }
}
