//! What a pod demands of its node besides CPU and memory, and which nodes meet that.
//!
//! **Problem.** The tasks of a gang are sent to nodes by us. A task that is sent to a node without its labels, with a
//! taint that it does not tolerate, or without its GPUs is refused there, and the whole gang with it.
//!
//! **How.** [`NodeRules`] are read from a template: `nodeSelector`, required node affinity, tolerations, and the
//! extended resources (*devices*, such as `nvidia.com/gpu`). [`NodeTraits`] are read from a node.
//!
//! Affinities between pods, spread constraints and preferences are not part of this: the cluster's scheduler checks
//! them.

use crate::names::NodeName;
use crate::quantity::whole;
use k8s_openapi::api::core::v1::{
    Node, NodeSelectorRequirement, NodeSelectorTerm, PodSpec, PodTemplateSpec, Toleration,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use std::collections::BTreeMap;

/// Numbers of extended resources by their names.
pub type Devices = BTreeMap<String, u64>;

/// What rules can demand of a node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeTraits {
    pub labels: BTreeMap<String, String>,
    /// The taints that keep new pods away, if nothing else closes the node.
    pub taints: Vec<NodeTaint>,
    /// What the node has for pods.
    pub devices: Devices,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeTaint {
    pub key: String,
    pub value: String,
    pub effect: String,
}

impl NodeTraits {
    /// A node without labels, taints and devices.
    pub const NONE: NodeTraits = NodeTraits { labels: BTreeMap::new(), taints: Vec::new(), devices: BTreeMap::new() };

    /// `only_taints`: the node is ready and not cordoned.
    pub(crate) fn of(node: &Node, only_taints: bool) -> NodeTraits {
        let taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
        let taints = taints.filter(|taint| only_taints && is_closing(&taint.effect)).map(|taint| NodeTaint {
            key: taint.key.clone(),
            value: taint.value.clone().unwrap_or_default(),
            effect: taint.effect.clone(),
        });
        let allocatable = node.status.as_ref().and_then(|status| status.allocatable.as_ref());
        NodeTraits {
            labels: node.metadata.labels.clone().unwrap_or_default(),
            taints: taints.collect(),
            devices: allocatable.map(devices).unwrap_or_default(),
        }
    }
}

/// Whether a taint of this effect keeps pods away that do not tolerate it.
pub(crate) fn is_closing(effect: &str) -> bool {
    effect == "NoSchedule" || effect == "NoExecute"
}

/// Extended resources have a domain in their names.
fn devices(quantities: &BTreeMap<String, Quantity>) -> Devices {
    let extended = quantities.iter().filter(|(name, _)| name.contains('/'));
    extended.filter_map(|(name, quantity)| Some((name.clone(), whole(quantity)?))).collect()
}

/// What a pod demands of its node.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct NodeRules {
    labels: BTreeMap<String, String>,
    /// One of them must hold, if there are any.
    terms: Option<Vec<NodeSelectorTerm>>,
    tolerations: Vec<Toleration>,
    /// What all its containers request together.
    pub devices: Devices,
}

impl NodeRules {
    /// `None` if every open node will do.
    pub fn of(template: &PodTemplateSpec) -> Option<NodeRules> {
        let spec = template.spec.as_ref()?;
        let affinity = spec.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
        let required = affinity.and_then(|node| node.required_during_scheduling_ignored_during_execution.as_ref());
        let rules = NodeRules {
            labels: spec.node_selector.clone().unwrap_or_default(),
            terms: required.map(|required| required.node_selector_terms.clone()),
            tolerations: spec.tolerations.clone().unwrap_or_default(),
            devices: requested_devices(spec),
        };
        (rules != NodeRules::default()).then_some(rules)
    }

    /// Whether a pod with these rules may run on the node. `open`: the node takes pods that tolerate nothing. How
    /// many of its devices are in use does not count here.
    pub fn admit(&self, name: &NodeName, open: bool, node: &NodeTraits) -> bool {
        let takes = open || !node.taints.is_empty() && node.taints.iter().all(|taint| self.tolerates(taint));
        takes
            && self.labels.iter().all(|(key, value)| node.labels.get(key) == Some(value))
            && self.terms.as_ref().is_none_or(|terms| terms.iter().any(|term| holds(term, name, node)))
            && self.devices.iter().all(|(device, count)| node.devices.get(device).is_some_and(|all| count <= all))
    }

    fn tolerates(&self, taint: &NodeTaint) -> bool {
        // Nodes with GPUs often have a taint of the device's name, and the API server adds the toleration to pods that
        // request such devices (its plugin ExtendedResourceToleration): templates do not have it.
        if self.devices.contains_key(&taint.key) {
            return true;
        }
        self.tolerations.iter().any(|one| {
            let is = |text: &Option<String>, other: &str| text.as_deref().unwrap_or_default() == other;
            let effect = is(&one.effect, "") || is(&one.effect, &taint.effect);
            let key = match one.operator.as_deref() {
                Some("Exists") => is(&one.key, "") || is(&one.key, &taint.key),
                _ => is(&one.key, &taint.key) && is(&one.value, &taint.value),
            };
            effect && key
        })
    }
}

fn requested_devices(spec: &PodSpec) -> Devices {
    let mut sum = Devices::new();
    for resources in spec.containers.iter().filter_map(|container| container.resources.as_ref()) {
        // A limit of an extended resource is its request.
        let mut all = resources.limits.as_ref().map(devices).unwrap_or_default();
        all.extend(resources.requests.as_ref().map(devices).unwrap_or_default());
        for (name, count) in all.into_iter().filter(|(_, count)| *count > 0) {
            let total = sum.entry(name).or_default();
            *total = total.saturating_add(count);
        }
    }
    sum
}

/// Whether a term of a node affinity holds. An empty term holds nowhere.
fn holds(term: &NodeSelectorTerm, name: &str, node: &NodeTraits) -> bool {
    let labels = term.match_expressions.iter().flatten();
    let fields = term.match_fields.iter().flatten();
    let mut all = labels
        .map(|rule| meets(rule, node.labels.get(&rule.key).map(String::as_str)))
        .chain(fields.map(|rule| meets(rule, (rule.key == "metadata.name").then_some(name))))
        .peekable();
    all.peek().is_some() && all.all(|held| held)
}

fn meets(rule: &NodeSelectorRequirement, value: Option<&str>) -> bool {
    let values = rule.values.as_deref().unwrap_or_default();
    let is_listed = || value.is_some_and(|value| values.iter().any(|one| one == value));
    let number = |text: Option<&str>| text.and_then(|text| text.parse::<i64>().ok());
    let compares = |is: fn(i64, i64) -> bool| {
        let both = number(value).zip(number(values.first().map(String::as_str)));
        both.is_some_and(|(own, bound)| is(own, bound))
    };
    match rule.operator.as_str() {
        "In" => is_listed(),
        "NotIn" => !is_listed(),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => compares(|own, bound| own > bound),
        "Lt" => compares(|own, bound| own < bound),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn rules(mut spec: Value) -> Option<NodeRules> {
        if spec["containers"].is_null() {
            spec["containers"] = json!([{"name": "tensorflow", "image": "x"}]);
        }
        NodeRules::of(&serde_json::from_value(json!({"spec": spec})).unwrap())
    }

    fn node(labels: Value, taints: Value, devices: Value) -> NodeTraits {
        let node = json!({
            "metadata": {"labels": labels}, "spec": {"taints": taints}, "status": {"allocatable": devices},
        });
        NodeTraits::of(&serde_json::from_value(node).unwrap(), true)
    }

    #[test]
    fn a_template_without_demands_has_no_rules() {
        assert_eq!(rules(json!({})), None);
        assert_eq!(rules(json!({"nodeSelector": {}, "tolerations": []})), None);
    }

    #[test]
    fn labels_must_be_there() {
        let rules = rules(json!({"nodeSelector": {"disk": "ssd"}})).unwrap();
        let admits = |labels: Value| rules.admit(&"n".into(), true, &node(labels, json!([]), json!({})));
        assert!(admits(json!({"disk": "ssd", "zone": "a"})));
        assert!(!admits(json!({"disk": "hdd"})) && !admits(json!({})));
    }

    #[test]
    fn one_term_of_a_required_affinity_must_hold() {
        for (term, labels, expected) in [
            (
                json!({"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a", "b"]}]}),
                json!({"zone": "b"}),
                true,
            ),
            (
                json!({"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}),
                json!({"zone": "b"}),
                false,
            ),
            (json!({"matchExpressions": [{"key": "zone", "operator": "NotIn", "values": ["a"]}]}), json!({}), true),
            (json!({"matchExpressions": [{"key": "zone", "operator": "Exists"}]}), json!({}), false),
            (json!({"matchExpressions": [{"key": "zone", "operator": "DoesNotExist"}]}), json!({}), true),
            (
                json!({"matchExpressions": [{"key": "cores", "operator": "Gt", "values": ["8"]}]}),
                json!({"cores": "16"}),
                true,
            ),
            (
                json!({"matchExpressions": [{"key": "cores", "operator": "Lt", "values": ["8"]}]}),
                json!({"cores": "16"}),
                false,
            ),
            (json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]}), json!({}), true),
            (json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["m"]}]}), json!({}), false),
            (json!({}), json!({}), false),
        ] {
            let none = json!({"matchExpressions": [{"key": "never", "operator": "Exists"}]});
            let required =
                json!({"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [none, term]}});
            let rules = rules(json!({"affinity": {"nodeAffinity": required}})).unwrap();
            assert_eq!(rules.admit(&"n".into(), true, &node(labels, json!([]), json!({}))), expected, "{term}");
        }
    }

    #[test]
    fn taints_must_be_tolerated() {
        let taints =
            json!([{"key": "gpu", "value": "yes", "effect": "NoSchedule"}, {"key": "x", "effect": "PreferNoSchedule"}]);
        let tainted = node(json!({}), taints, json!({}));
        assert_eq!(tainted.taints.len(), 1, "a preference keeps nobody away");
        for (toleration, expected) in [
            (json!({"key": "gpu", "value": "yes"}), true),
            (json!({"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}), true),
            (json!({"operator": "Exists"}), true),
            (json!({"key": "gpu", "value": "no"}), false),
            (json!({"key": "gpu", "operator": "Exists", "effect": "NoExecute"}), false),
        ] {
            let rules = rules(json!({"tolerations": [toleration]})).unwrap();
            assert_eq!(rules.admit(&"n".into(), false, &tainted), expected, "{toleration}");
            assert!(rules.admit(&"n".into(), true, &NodeTraits::NONE), "an open node takes it in any case");
            assert!(
                !rules.admit(&"n".into(), false, &NodeTraits::NONE),
                "no toleration opens a node that is not ready"
            );
        }
    }

    #[test]
    fn devices_are_requests_or_limits_of_all_containers() {
        let container = |resources: Value| json!({"name": "tensorflow", "image": "x", "resources": resources});
        let containers = json!([
            container(json!({"limits": {"nvidia.com/gpu": 2, "cpu": "4"}})),
            container(json!({"requests": {"nvidia.com/gpu": "1", "ephemeral-storage": "1Gi"}})),
        ]);
        let rules = rules(json!({"containers": containers})).unwrap();
        assert_eq!(rules.devices, [("nvidia.com/gpu".to_owned(), 3)].into());
        let admits = |count: u32| {
            rules.admit(
                &"n".into(),
                true,
                &node(json!({}), json!([]), json!({"nvidia.com/gpu": count.to_string(), "cpu": "8"})),
            )
        };
        assert!(admits(3) && !admits(2));
        let taints = json!([{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]);
        let tainted = node(json!({}), taints, json!({"nvidia.com/gpu": "8"}));
        assert!(rules.admit(&"n".into(), false, &tainted), "the API server adds this toleration");
        assert!(!rules.admit(&"n".into(), true, &NodeTraits::NONE));
    }
}
