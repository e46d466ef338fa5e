//! The custom resource `SharePolicy`: which pods share, and by what rule.
//!
//! The schema is generated from these types (`gainshare-operator crd`), with rules in the API
//! server's own expression language. So the API server refuses a mistake at once, with a sentence
//! that says what to write instead. Field names follow related projects: `selector` and `targetRef`
//! as in autoscalers, `objective` as in Katib.
#![allow(clippy::duplicated_attributes, reason = "every printed column has a type, and many have the same")]
#![allow(unreachable_pub, reason = "the schema macro makes private copies of public types")]

use crate::aim::AimKind;
use crate::wire::{CollectorKind, Mode, PolicyKind, Settings};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Shares the CPU (and, if asked, the memory) of each node among the training pods it selects, by
/// what each pod gains from its share. Running pods are resized in place: none is restarted, and
/// all get their own values back when the policy goes.
#[derive(CustomResource, KubeSchema, Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[kube(
    group = "gainshare.dev",
    version = "v1alpha1",
    kind = "SharePolicy",
    plural = "sharepolicies",
    shortname = "shp",
    category = "gainshare",
    namespaced,
    status = "SharePolicyStatus",
    derive = "PartialEq",
    doc = "Shares the CPU of each node among the training pods it selects, by what each pod gains from its share.",
    printcolumn(
        name = "Policy",
        type_ = "string",
        json_path = ".spec.policy",
        description = "The rule by which shares are found"
    ),
    printcolumn(name = "Pods", type_ = "integer", json_path = ".status.pods", description = "Running pods it selects"),
    printcolumn(name = "Growing", type_ = "integer", json_path = ".status.growing"),
    printcolumn(name = "Watching", type_ = "integer", json_path = ".status.watching"),
    printcolumn(name = "Converged", type_ = "integer", json_path = ".status.converged"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type=='Ready')].status"),
    printcolumn(
        name = "Message",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Ready')].message",
        priority = "1"
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    cel,
    validation = Rule::new("has(self.selector) != has(self.targetRef)")
        .message("give exactly one of selector (pods by label) and targetRef (pods by what made them)"),
    validation = Rule::new("!has(self.aim) || !has(self.policy) || self.policy in ['gainshare', 'qos']")
        .message("aim belongs to the policies gainshare and qos: leave it out, or choose one of them")
)]
pub struct SharePolicySpec {
    /// Pods of this namespace by their labels; an empty selector means all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<LabelSelector>,
    /// Pods by what made them: a Job, a PyTorchJob, a TrainJob, a Deployment, any kind at all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_ref: Option<TargetRef>,
    /// `flowcon` goes by growth efficiency, `gainshare` by what a core gains, `na` treats all
    /// alike. `qos` keeps deadlines with the least that is enough; all other pods share the rest by
    /// gain.
    #[serde(default)]
    pub policy: PolicyKind,
    /// What comes as early as possible, in the mean over pods: their end (`finish`), or nine tenths of their
    /// improvement (`quality`) (gainshare and qos; `finish` if left out).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub aim: Option<AimKind>,
    /// Growth below this part counts as "no longer growing" (flowcon; 0.05 if left out).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("self > 0.0 && self < 1.0").message("alpha lies between 0 and 1, both excluded: 0.05 is a good start"))]
    pub alpha: Option<f64>,
    /// A pod that no longer grows keeps at least 1/(beta n) of the pool of n pods (flowcon; 2 if
    /// left out).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("self >= 1.0 && self <= 100.0").message("beta lies between 1 and 100: the paper uses 2"))]
    pub beta: Option<f64>,
    /// Time between two decisions, e.g. 20s or 1m30s (flowcon; 20s if left out).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 20))]
    #[x_kube(validation = Rule::new("self.matches('^([0-9]+(ms|s|m|h))+$') && duration(self) >= duration('1s') && duration(self) <= duration('1h')")
        .message("interval is a time from 1s to 1h with a unit, such as 20s or 1m30s"))]
    pub interval: Option<String>,
    /// `weight`: requests move, and what one pod leaves the others use. `quota`: limits move too,
    /// as hard caps.
    #[serde(default)]
    pub mode: Mode,
    /// What is reshaped.
    #[serde(default = "cpu_only")]
    #[schemars(length(min = 1, max = 2))]
    #[x_kube(validation = Rule::new("'cpu' in self").message("resources must name cpu: memory can be added, not replace it"))]
    pub resources: Vec<SharedResource>,
    /// Each pod keeps at least this percentage of what the pods of a node share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("self >= 0 && self <= 50").message("floorPercent lies between 0 and 50: it is granted to every pod at once"))]
    pub floor_percent: Option<i32>,
    /// The container that trains, if a pod has several; the first one if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63))]
    pub container: Option<String>,
    /// The metric to follow. Default: chosen from the output.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub objective: Option<Objective>,
    /// How progress is read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub collector: Option<CollectorSpec>,
    /// Stops sharing and gives every pod its own values back, without deleting the policy.
    #[serde(default)]
    pub suspend: bool,
}

fn cpu_only() -> Vec<SharedResource> {
    vec![SharedResource::Cpu]
}

/// What made the pods.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    cel,
    validation = Rule::new("self.kind != '' && self.name != ''").message("targetRef needs a kind and a name, such as kind: Job, name: sweep-3")
)]
pub struct TargetRef {
    /// E.g. `batch/v1`; any version of any group if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 317))]
    pub api_version: Option<String>,
    #[schemars(length(max = 63))]
    pub kind: String,
    #[schemars(length(max = 253))]
    pub name: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum SharedResource {
    Cpu,
    Memory,
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Objective {
    /// The metric's name as the job prints it, e.g. val_loss.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub metric: Option<String>,
    /// `minimize` or `maximize`. Default: by the metric's name.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<Direction>,
    /// The value at which the job stops by itself. The end of a job that names no number of steps is predicted from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub goal: Option<f64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Direction {
    Minimize,
    Maximize,
}

#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    cel,
    validation = Rule::new("!(self.kind in ['file', 'tensorboard']) || has(self.path)")
        .message("kinds file and tensorboard need a path, such as metrics.csv, below the root of one of the pod's volumes"),
    validation = Rule::new("!has(self.path) || (self.kind in ['file', 'tensorboard'] && !self.path.startsWith('/') && !self.path.contains('..'))")
        .message("path belongs to kinds file and tensorboard, and is relative to the volume's root, without .. in it")
)]
pub struct CollectorSpec {
    /// `stdout`: the container's output. `file` and `tensorboard`: what lies at `path` in one of
    /// the pod's volumes, if node agents may read there (`agent.podFiles` of the chart). `none`:
    /// nothing is read, and the pod gets an equal part.
    #[serde(default)]
    pub kind: CollectorKind,
    /// A metrics file (CSV, JSON lines, text), or a folder with TensorBoard's event files, below
    /// the root of the volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 512))]
    pub path: Option<String>,
    /// A regular expression with a group named value, for output that nothing else understands.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1000))]
    pub pattern: Option<String>,
}

/// What the operator publishes about a policy. Written when it changes, never at every report of a
/// job.
#[derive(KubeSchema, Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SharePolicyStatus {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// `Ready`: pods are being shared. `Selected`: some pod matches. `Resizable`: all that match
    /// can be resized. `AgentsReady`: their nodes have agents.
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    #[serde(default)]
    pub conditions: Vec<Condition>,
    /// Running pods that the policy selects.
    #[serde(default)]
    pub pods: u32,
    /// Selected pods that run and can be resized.
    #[serde(default)]
    pub resizable: u32,
    #[serde(default)]
    pub growing: u32,
    #[serde(default)]
    pub watching: u32,
    #[serde(default)]
    pub converged: u32,
    /// The first few that cannot be resized.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blocked: Vec<BlockedPod>,
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BlockedPod {
    pub pod: String,
    pub reason: String,
    /// Why, and what its author could do.
    pub message: String,
}

/// A duration as people write it for Kubernetes: whole numbers with units, largest first or not.
pub fn parse_interval_ms(text: &str) -> Option<u64> {
    let mut rest = text;
    let mut total: u64 = 0;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit())?;
        let count: u64 = rest[..digits].parse().ok()?;
        rest = &rest[digits..];
        let (unit, unit_ms) = [("ms", 1), ("s", 1_000), ("m", 60_000), ("h", 3_600_000)]
            .into_iter()
            .find(|(unit, _)| rest.starts_with(unit))?;
        rest = &rest[unit.len()..];
        total = total.checked_add(count.checked_mul(unit_ms)?)?;
    }
    (!text.is_empty()).then_some(total)
}

impl SharePolicySpec {
    /// What the policy asks for, before a pod's own annotations.
    pub fn settings(&self) -> Settings {
        let objective = self.objective.clone().unwrap_or_default();
        let collector = self.collector.clone().unwrap_or_default();
        Settings {
            policy: self.policy,
            aim: self.aim,
            alpha: self.alpha,
            beta: self.beta,
            interval_ms: self.interval.as_deref().and_then(parse_interval_ms),
            mode: self.mode,
            memory: self.resources.contains(&SharedResource::Memory),
            floor: f64::from(self.floor_percent.unwrap_or(0)) / 100.0,
            metric: objective.metric,
            maximize: objective.kind.map(|direction| direction == Direction::Maximize),
            target: objective.goal,
            collector: collector.kind,
            pattern: collector.pattern,
            path: collector.path,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kube::CustomResourceExt;
    use serde_json::json;

    fn messages(spec: serde_json::Value) -> String {
        match SharePolicySpec::validate_cel(&spec, None) {
            Ok(()) => String::new(),
            Err(errors) => format!("{errors:?}"),
        }
    }

    #[test]
    fn good_policies_pass() {
        for spec in [
            json!({"selector": {}}),
            json!({"selector": {"matchLabels": {"app": "train"}}, "policy": "gainshare", "alpha": 0.01, "interval": "1m30s"}),
            json!({"selector": {}, "policy": "qos", "aim": "quality"}),
            json!({"targetRef": {"kind": "PyTorchJob", "name": "bert"}, "floorPercent": 5, "resources": ["cpu", "memory"]}),
        ] {
            assert_eq!(messages(spec.clone()), "", "{spec}");
            serde_json::from_value::<SharePolicySpec>(spec).unwrap();
        }
    }

    #[test]
    fn an_aim_is_for_the_policies_that_share_by_gain() {
        for kind in PolicyKind::all() {
            let has_aim = gainshare_core::policy::Policy::from(kind.preset()).aim().is_some();
            let spec = json!({"selector": {}, "policy": kind.name(), "aim": "quality"});
            assert_eq!(messages(spec.clone()).is_empty(), has_aim, "{spec}");
            let settings = serde_json::from_value::<SharePolicySpec>(spec).unwrap().settings();
            assert_eq!(settings.aim, Some(AimKind::Quality));
        }
    }

    #[test]
    fn a_file_needs_a_path_within_its_volume() {
        for (spec, helps) in [
            (json!({"kind": "file"}), "need a path"),
            (json!({"kind": "tensorboard", "path": "/runs"}), "relative to the volume's root"),
            (json!({"kind": "file", "path": "../token"}), "relative to the volume's root"),
            (json!({"kind": "stdout", "path": "x"}), "belongs to kinds file"),
        ] {
            let said = format!("{:?}", CollectorSpec::validate_cel(&spec, None));
            assert!(said.contains(helps), "{spec} was answered with {said:?}");
        }
        assert!(CollectorSpec::validate_cel(&json!({"kind": "file", "path": "run/metrics.csv"}), None).is_ok());
    }

    #[test]
    fn mistakes_are_answered_with_what_to_write_instead() {
        let both = json!({"selector": {}, "targetRef": {"kind": "Job", "name": "a"}});
        for (spec, helps) in [
            (json!({}), "exactly one of selector"),
            (both, "exactly one of selector"),
            (json!({"selector": {}, "alpha": 5.0}), "alpha lies between 0 and 1"),
            (
                json!({"selector": {}, "policy": "flowcon", "aim": "finish"}),
                "aim belongs to the policies gainshare and qos",
            ),
            (json!({"selector": {}, "interval": "20"}), "such as 20s"),
            (json!({"selector": {}, "interval": "10ms"}), "such as 20s"),
            (json!({"selector": {}, "floorPercent": 80}), "between 0 and 50"),
            (json!({"selector": {}, "resources": ["memory"]}), "must name cpu"),
        ] {
            let said = messages(spec.clone());
            assert!(said.contains(helps), "{spec} was answered with {said:?}");
        }
    }

    #[test]
    fn intervals() {
        for (text, ms) in
            [("20s", Some(20_000)), ("1m30s", Some(90_000)), ("1500ms", Some(1_500)), ("2h", Some(7_200_000))]
        {
            assert_eq!(parse_interval_ms(text), ms, "{text}");
        }
        for text in ["", "20", "s", "1d", "-5s", "99999999999999999999s", "1.5s"] {
            assert_eq!(parse_interval_ms(text), None, "{text}");
        }
    }

    #[test]
    fn the_schema_has_columns_rules_and_defaults() {
        let crd = serde_json::to_value(SharePolicy::crd()).unwrap();
        let version = &crd["spec"]["versions"][0];
        let columns: Vec<&str> = version["additionalPrinterColumns"]
            .as_array()
            .unwrap()
            .iter()
            .map(|c| c["name"].as_str().unwrap())
            .collect();
        assert_eq!(columns, ["Policy", "Pods", "Growing", "Watching", "Converged", "Ready", "Message", "Age"]);
        let spec = &version["schema"]["openAPIV3Schema"]["properties"]["spec"];
        assert_eq!(spec["properties"]["policy"]["default"], "gainshare");
        assert_eq!(spec["properties"]["resources"]["default"], json!(["cpu"]));
        assert!(spec["x-kubernetes-validations"][0]["rule"].as_str().unwrap().contains("targetRef"));
    }
}
