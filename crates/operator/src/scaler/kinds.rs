//! The kinds of nodes of a cluster: nodes with the same label for their instance type, or, without that label, of the
//! same size.
//!
//! **How.** Nodes of one machine type differ by some MiB in what they can give to pods, so the smallest counts. On
//! every node some pods run that belong to the node (of DaemonSets, and static ones); they will run on a new node,
//! too, so the most that they request on a node of the kind is not for jobs.
//!
//! **Memory.** The last node of a kind may go while no job needs it. A kind is remembered for [`REMEMBERED`].
//! Tainted, cordoned and silent nodes are no example of what a new node can do for a job.
//!
//! **Units.** Thousandths of a core, and bytes.

use crate::state::world::World;
use gainshare_core::policies::deadline::{NodeKind, Room};
use gainshare_kube_api::bounds::NodeFacts;
use gainshare_kube_api::deadline::NodesNeeded;
use gainshare_kube_api::facts::PodFacts;
use gainshare_kube_api::names::NodeName;
use gainshare_kube_api::quantity::total;
use jiff::{SignedDuration, Timestamp};
use std::collections::BTreeMap;

/// A kind of which no node exists is forgotten after this time.
const REMEMBERED: SignedDuration = SignedDuration::from_hours(24);

/// More kinds are not kept apart.
const MOST_KINDS: usize = 64;

/// Nodes without the label for their type are alike if their memory differs by less than this.
const MEMORY_STEP_BYTES: u64 = 256 << 20;

/// The name of a kind is a label's value and a part of a pod's name.
const LONGEST_NAME: usize = 40;

/// What nodes of one kind have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct KindSize {
    pub(super) instance_type: Option<String>,
    /// What a node can give to pods.
    pub(super) size: (u64, u64),
    /// What pods that run on every node request.
    pub(super) overhead: (u64, u64),
    pub(super) speed_percent: u32,
}

impl KindSize {
    /// What jobs can have of a node.
    pub(super) fn room(&self) -> (u64, u64) {
        (self.size.0.saturating_sub(self.overhead.0), self.size.1.saturating_sub(self.overhead.1))
    }

    pub(super) fn to_core(&self, name: &str) -> NodeKind {
        NodeKind {
            name: name.to_owned(),
            room: to_core_room(self.room()),
            speed: f64::from(self.speed_percent) / 100.0,
        }
    }

    pub(super) fn needed(&self, count: usize) -> NodesNeeded {
        NodesNeeded {
            count: u32::try_from(count).unwrap_or(u32::MAX),
            cpu: format!("{}m", self.size.0),
            memory: format!("{}Mi", self.size.1 >> 20),
            instance_type: self.instance_type.clone(),
        }
    }
}

pub(super) fn to_core_room((milli, bytes): (u64, u64)) -> Room {
    Room { cores: milli as f64 / 1000.0, memory_bytes: bytes }
}

/// The kinds of nodes, by name, and when a node of each was read last.
#[derive(Debug, Default)]
pub(super) struct Kinds {
    known: BTreeMap<String, (KindSize, Timestamp)>,
}

impl Kinds {
    /// Takes in the nodes that exist now.
    pub(super) fn observe(&mut self, world: &World, now: Timestamp) {
        let overheads = overheads(world);
        let mut present: BTreeMap<String, KindSize> = BTreeMap::new();
        for (node, facts) in world.nodes().iter().filter(|(_, facts)| facts.open) {
            let (Some(milli), Some(bytes)) = (facts.cpu_milli, facts.memory_bytes) else { continue };
            let overhead = overheads.get(node).copied().unwrap_or_default();
            let one = KindSize {
                instance_type: facts.instance_type.clone(),
                size: (milli, bytes),
                overhead,
                speed_percent: facts.speed_percent,
            };
            present
                .entry(name(facts, milli, bytes))
                .and_modify(|kind| {
                    kind.size = (kind.size.0.min(milli), kind.size.1.min(bytes));
                    kind.overhead = (kind.overhead.0.max(overhead.0), kind.overhead.1.max(overhead.1));
                })
                .or_insert(one);
        }
        for (name, kind) in present {
            if self.known.len() < MOST_KINDS || self.known.contains_key(&name) {
                self.known.insert(name, (kind, now));
            }
        }
        self.known.retain(|_, (_, at)| now.duration_since(*at) < REMEMBERED);
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&String, &KindSize)> {
        self.known.iter().map(|(name, (kind, _))| (name, kind))
    }

    pub(super) fn get(&self, name: &str) -> Option<&KindSize> {
        self.known.get(name).map(|(kind, _)| kind)
    }
}

/// The name of a node's kind.
fn name(facts: &NodeFacts, milli: u64, bytes: u64) -> String {
    let size = || format!("{milli}m-{}mi", (bytes / MEMORY_STEP_BYTES * MEMORY_STEP_BYTES) >> 20);
    let base = facts.instance_type.as_deref().map_or_else(size, plain);
    if facts.speed_percent == 100 { base } else { format!("{base}-s{}", facts.speed_percent) }
}

/// A text as the names of objects are written: `Standard_D4s_v3` becomes `standard-d4s-v3`.
fn plain(text: &str) -> String {
    let letter = |letter: char| if letter.is_ascii_alphanumeric() { letter.to_ascii_lowercase() } else { '-' };
    let text: String = text.chars().take(LONGEST_NAME).map(letter).collect();
    let text = text.trim_matches('-');
    if text.is_empty() { "unnamed".to_owned() } else { text.to_owned() }
}

/// What the pods that belong to their node request, by node.
fn overheads(world: &World) -> BTreeMap<&NodeName, (u64, u64)> {
    let mut overheads: BTreeMap<&NodeName, (u64, u64)> = BTreeMap::new();
    let of_nodes = world.pods().filter(|pod| pod.holds_node && belongs_to_node(pod));
    for (pod, node) in of_nodes.filter_map(|pod| Some((pod, pod.node.as_ref()?))) {
        let requests = || pod.containers.iter().map(|container| container.resources.requests);
        let sum = overheads.entry(node).or_default();
        sum.0 = sum.0.saturating_add(total(requests().filter_map(|asked| asked.cpu_milli)));
        sum.1 = sum.1.saturating_add(total(requests().filter_map(|asked| asked.memory_bytes)));
    }
    overheads
}

fn belongs_to_node(pod: &PodFacts) -> bool {
    pod.is_static || pod.owners.iter().any(|owner| owner.controller && owner.kind == "DaemonSet")
}

#[cfg(test)]
mod tests {
    use super::*;
    use gainshare_kube_api::facts::{ContainerFacts, Owner};

    fn node(milli: u64, gib: u64, instance_type: Option<&str>) -> NodeFacts {
        NodeFacts {
            cpu_milli: Some(milli),
            memory_bytes: Some(gib << 30),
            open: true,
            speed_percent: 100,
            instance_type: instance_type.map(str::to_owned),
            ..NodeFacts::default()
        }
    }

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn names(kinds: &Kinds) -> Vec<&str> {
        kinds.iter().map(|(name, _)| name.as_str()).collect()
    }

    #[test]
    fn nodes_are_distinguished_by_their_type_or_by_their_size() {
        let mut world = World::new(1);
        world.put_node(&"a".into(), node(4000, 16, None));
        world.put_node(&"b".into(), NodeFacts { memory_bytes: Some((16 << 30) + (3 << 20)), ..node(4000, 16, None) });
        world.put_node(&"c".into(), node(8000, 16, Some("Standard_D8s_v3")));
        world.put_node(&"d".into(), node(7900, 15, Some("Standard_D8s_v3")));
        world.put_node(&"e".into(), NodeFacts { speed_percent: 150, ..node(4000, 16, None) });
        world.put_node(&"closed".into(), NodeFacts { open: false, ..node(64_000, 16, None) });
        let mut kinds = Kinds::default();
        kinds.observe(&world, at(0));
        assert_eq!(names(&kinds), ["4000m-16384mi", "4000m-16384mi-s150", "standard-d8s-v3"]);
        let kind = kinds.get("standard-d8s-v3").unwrap();
        assert_eq!(kind.size, (7900, 15 << 30));
        let needed = kind.needed(2);
        assert_eq!((needed.count, needed.cpu.as_str(), needed.memory.as_str()), (2, "7900m", "15360Mi"));
        assert_eq!(needed.to_string(), "2 more nodes of 7.9 cores / 15 GiB (Standard_D8s_v3)");
    }

    #[test]
    fn a_kind_is_remembered_for_a_day() {
        let mut world = World::new(1);
        world.put_node(&"a".into(), node(4000, 16, None));
        let mut kinds = Kinds::default();
        kinds.observe(&world, at(0));
        world.remove_node(&"a".into(), std::time::Instant::now());
        kinds.observe(&world, at(80_000));
        assert_eq!(names(&kinds), ["4000m-16384mi"]);
        kinds.observe(&world, at(90_000));
        assert_eq!(names(&kinds), [""; 0]);
    }

    #[test]
    fn what_runs_on_every_node_is_not_for_jobs() {
        let mut world = World::new(1);
        world.put_node(&"a".into(), node(4000, 16, None));
        world.put_node(&"b".into(), node(4000, 16, None));
        let pod = |uid: &str, node: &str, kind: &str, milli: u64| {
            let mut container = ContainerFacts::default();
            container.resources.requests.cpu_milli = Some(milli);
            PodFacts {
                uid: uid.into(),
                namespace: "n".to_owned(),
                name: uid.to_owned(),
                node: Some(node.into()),
                holds_node: true,
                containers: vec![container],
                owners: vec![Owner { kind: kind.to_owned(), controller: true, ..Owner::default() }],
                ..PodFacts::default()
            }
        };
        world.put_pod(pod("1", "a", "DaemonSet", 100));
        world.put_pod(pod("2", "b", "DaemonSet", 100));
        world.put_pod(pod("3", "b", "DaemonSet", 150));
        world.put_pod(pod("4", "b", "ReplicaSet", 3000));
        let mut kinds = Kinds::default();
        kinds.observe(&world, at(0));
        assert_eq!(kinds.get("4000m-16384mi").unwrap().room(), (3750, 16 << 30));
    }
}
