//! What a namespace and a node allow: LimitRange, ResourceQuota, the node's size.
//!
//! LimitRanges bound each container, and the sum of a pod's containers. [`bounds`] intersects all
//! LimitRanges of a namespace with the node's size. Quotas bound the sum over a namespace and
//! change with every pod, so [`over_quota`] checks them when a resize is requested. The API server
//! checks both again; this check comes first so that a refusal has a helpful reason.

use crate::facts::PodFacts;
use crate::names;
use crate::node_rules::{NodeTraits, is_closing};
use crate::quantity;
use crate::resize::Refusal;
use crate::resources::{Bounds, LEAST_CPU_MILLI, Range, Resources};
use k8s_openapi::api::core::v1::{LimitRange, Node, ResourceQuota};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use std::collections::BTreeMap;

/// A LimitRange, in numbers.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RangeFacts {
    container: Limits,
    pod: Limits,
}

#[derive(Debug, Clone, PartialEq, Default)]
struct Limits {
    cpu_min: Option<u64>,
    cpu_max: Option<u64>,
    memory_min: Option<u64>,
    memory_max: Option<u64>,
    cpu_ratio_milli: Option<u64>,
}

impl RangeFacts {
    pub fn of(range: &LimitRange) -> RangeFacts {
        let mut facts = RangeFacts::default();
        for item in range.spec.iter().flat_map(|spec| &spec.limits) {
            let get =
                |map: &Option<BTreeMap<String, Quantity>>, name: &str| map.as_ref().and_then(|m| m.get(name)).cloned();
            let limits = Limits {
                cpu_min: get(&item.min, "cpu").as_ref().and_then(quantity::cpu_milli),
                cpu_max: get(&item.max, "cpu").as_ref().and_then(quantity::cpu_milli),
                memory_min: get(&item.min, "memory").as_ref().and_then(quantity::whole),
                memory_max: get(&item.max, "memory").as_ref().and_then(quantity::whole),
                cpu_ratio_milli: get(&item.max_limit_request_ratio, "cpu").as_ref().and_then(quantity::cpu_milli),
            };
            match item.type_.as_str() {
                "Container" => facts.container = limits,
                "Pod" => facts.pod = limits,
                _ => {}
            }
        }
        facts
    }

    /// The least CPU (in thousandths of a core) and memory that each container must request.
    pub fn least(&self) -> (u64, u64) {
        (self.container.cpu_min.unwrap_or(0), self.container.memory_min.unwrap_or(0))
    }
}

/// The taint by which an administrator declares a node to be off.
const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";

/// The state of a node that a pod is bound to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NodeState {
    #[default]
    Ready,
    /// The node's kubelet does not answer: nothing is known about its pods.
    Silent,
    /// The Node object is missing, but not for long enough to prove anything: the machine may still
    /// run, cut off.
    Missing,
    /// An administrator declared it to be off, or its object has been missing for long.
    Off,
}

impl NodeState {
    pub fn of(node: &Node) -> NodeState {
        let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_ref());
        if taints.into_iter().flatten().any(|taint| taint.key == OUT_OF_SERVICE) {
            return NodeState::Off;
        }
        let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
        // A node without the condition has just come. "False" is a kubelet that reports, "Unknown"
        // one that does not.
        let silent = conditions.into_iter().flatten().any(|c| c.type_ == "Ready" && c.status == "Unknown");
        if silent { NodeState::Silent } else { NodeState::Ready }
    }
}

/// The label that says which kind of machine a node is.
const INSTANCE_TYPE: &str = "node.kubernetes.io/instance-type";

/// What a node can give to pods, and whether it works.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeFacts {
    pub cpu_milli: Option<u64>,
    pub memory_bytes: Option<u64>,
    /// The node is ready, and pods may come that tolerate nothing.
    pub open: bool,
    /// An administrator has closed it to new pods (`kubectl cordon`).
    pub cordoned: bool,
    /// How fast its cores are, in hundredths of an ordinary one: the label [`names::SPEED_LABEL`].
    pub speed_percent: u32,
    /// Which kind of machine it is, if its labels say so.
    pub instance_type: Option<String>,
    pub state: NodeState,
    /// What templates may demand of it.
    pub traits: NodeTraits,
}

impl NodeFacts {
    pub fn of(node: &Node) -> NodeFacts {
        let allocatable = node.status.as_ref().and_then(|status| status.allocatable.as_ref());
        let get = |name: &str| allocatable.and_then(|map| map.get(name));
        let spec = node.spec.clone().unwrap_or_default();
        let tainted = spec.taints.iter().flatten().any(|taint| is_closing(&taint.effect));
        let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
        let ready = conditions.clone().any(|c| c.type_ == "Ready" && c.status == "True");
        let label = |name: &str| node.metadata.labels.as_ref().and_then(|labels| labels.get(name));
        let speed = label(names::SPEED_LABEL);
        let speed = speed.and_then(|text| text.parse::<f64>().ok()).filter(|speed| (0.01..=100.0).contains(speed));
        let cordoned = spec.unschedulable.unwrap_or(false);
        NodeFacts {
            open: ready && !tainted && !cordoned,
            cordoned,
            speed_percent: (speed.unwrap_or(1.0) * 100.0).round() as u32,
            cpu_milli: get("cpu").and_then(quantity::cpu_milli),
            memory_bytes: get("memory").and_then(quantity::whole),
            instance_type: label(INSTANCE_TYPE).cloned(),
            state: NodeState::of(node),
            traits: NodeTraits::of(node, ready && !cordoned),
        }
    }
}

/// Between which values the container's resources may move. The author's own value is always
/// inside: the API server admitted it once.
pub fn bounds<'a>(
    pod: &PodFacts,
    container: &str,
    original: &Resources,
    ranges: impl IntoIterator<Item = &'a RangeFacts>,
    node: Option<&NodeFacts>,
) -> Bounds {
    let mut cpu = Range { min: LEAST_CPU_MILLI, max: node.and_then(|n| n.cpu_milli).unwrap_or(u64::MAX) };
    let mut memory = Range { min: 0, max: node.and_then(|n| n.memory_bytes).unwrap_or(u64::MAX) };
    let mut ratio: Option<u64> = None;
    let rest = |pick: fn(&Resources) -> Option<u64>| -> u64 {
        quantity::total(pod.containers.iter().filter(|c| c.name != container).filter_map(|c| pick(&c.resources)))
    };
    let other_cpu = rest(|r| r.limits.cpu_milli.or(r.requests.cpu_milli));
    let other_memory = rest(|r| r.limits.memory_bytes.or(r.requests.memory_bytes));
    for range in ranges {
        let (own, whole) = (&range.container, &range.pod);
        let narrow = |range: &mut Range, min: Option<u64>, max: Option<u64>| {
            range.min = range.min.max(min.unwrap_or(0));
            range.max = range.max.min(max.unwrap_or(u64::MAX));
        };
        narrow(&mut cpu, own.cpu_min, own.cpu_max);
        narrow(&mut memory, own.memory_min, own.memory_max);
        let left = |total: Option<u64>, others: u64| total.map(|total| total.saturating_sub(others));
        narrow(&mut cpu, left(whole.cpu_min, other_cpu), left(whole.cpu_max, other_cpu));
        narrow(&mut memory, left(whole.memory_min, other_memory), left(whole.memory_max, other_memory));
        ratio = [ratio, own.cpu_ratio_milli].into_iter().flatten().min();
    }
    let include = |range: Range, values: [Option<u64>; 2]| {
        let values: Vec<u64> = values.into_iter().flatten().collect();
        Range {
            min: values.iter().copied().fold(range.min, u64::min),
            max: values.iter().copied().fold(range.max, u64::max),
        }
    };
    Bounds {
        cpu_milli: include(cpu, [original.requests.cpu_milli, original.limits.cpu_milli]),
        memory_bytes: include(memory, [original.requests.memory_bytes, original.limits.memory_bytes]),
        cpu_ratio_milli: ratio,
    }
}

/// A ResourceQuota, in numbers: what is left of each resource it names.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct QuotaFacts {
    pub name: String,
    left: BTreeMap<&'static str, u64>,
}

const COUNTED: [&str; 6] = ["requests.cpu", "cpu", "limits.cpu", "requests.memory", "memory", "limits.memory"];

impl QuotaFacts {
    /// How much more CPU may be requested, if the quota counts that.
    pub fn cpu_requests_left_milli(&self) -> Option<u64> {
        let counted = self.left.iter().filter(|(what, _)| matches!(**what, "requests.cpu" | "cpu"));
        counted.map(|(_, left)| *left).min()
    }

    pub fn of(quota: &ResourceQuota) -> QuotaFacts {
        let status = quota.status.clone().unwrap_or_default();
        let hard = status.hard.unwrap_or_default();
        let used = status.used.unwrap_or_default();
        let read = |name: &str, quantity: &Quantity| {
            if name.ends_with("cpu") { quantity::cpu_milli(quantity) } else { quantity::whole(quantity) }
        };
        let left = COUNTED.into_iter().filter_map(|name| {
            let hard = read(name, hard.get(name)?)?;
            let used = used.get(name).and_then(|quantity| read(name, quantity)).unwrap_or(0);
            Some((name, hard.saturating_sub(used)))
        });
        QuotaFacts { name: quota.metadata.name.clone().unwrap_or_default(), left: left.collect() }
    }
}

/// The first quota that an increase would exceed. Decreases always pass.
pub fn over_quota<'a>(
    quotas: impl IntoIterator<Item = &'a QuotaFacts>,
    now: &Resources,
    to: &Resources,
) -> Result<(), Refusal> {
    let more = |now: Option<u64>, to: Option<u64>| to.map_or(0, |to| to.saturating_sub(now.unwrap_or(0)));
    let cpu_requests = more(now.requests.cpu_milli, to.requests.cpu_milli);
    let cpu_limits = more(now.limits.cpu_milli, to.limits.cpu_milli);
    let memory_requests = more(now.requests.memory_bytes, to.requests.memory_bytes);
    let memory_limits = more(now.limits.memory_bytes, to.limits.memory_bytes);
    for quota in quotas {
        for (what, &left) in &quota.left {
            let asked = match *what {
                "requests.cpu" | "cpu" => cpu_requests,
                "limits.cpu" => cpu_limits,
                "requests.memory" | "memory" => memory_requests,
                _ => memory_limits,
            };
            if asked > left {
                return Err(Refusal::Quota { quota: quota.name.clone(), what: (*what).to_owned(), left, asked });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "bounds_tests.rs"]
mod tests;
