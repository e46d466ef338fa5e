//! All names that appear on other people's objects: labels, annotations, finalizers, gates, and the
//! name of the writer. They are here and nowhere else, so that one list says what Gainshare leaves
//! on a cluster.
//!
//! The types at the end keep names and uids of different things apart, so that the compiler finds one that stands where
//! another belongs.

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Serialize};
use std::borrow::{Borrow, Cow};
use std::fmt;
use std::ops::Deref;

/// The API group, and the domain of every name below.
pub const GROUP: &str = "gainshare.dev";
/// Annotations and labels with this prefix are ours.
pub const PREFIX: &str = "gainshare.dev/";
/// The version of our custom resources, as object references write it.
pub const API_VERSION: &str = "gainshare.dev/v1alpha1";

/// On a pod: its resources before our first change (JSON by container), so that any later operator
/// can put them back.
pub const ORIGINAL_ANNOTATION: &str = "gainshare.dev/original-resources";
/// On a pod: category, share and decision ([`crate::pod_note::PodNote`]), written when one of them
/// changes.
pub const STATUS_ANNOTATION: &str = "gainshare.dev/status";
/// On a namespace: `enabled` stands for a SharePolicy with all defaults for its pods. On a pod:
/// `disabled` keeps it out of every policy.
pub const SHARE_LABEL: &str = "gainshare.dev/share";
/// On a namespace: `tuned` lets new pods start with settings that share well. The webhook of the
/// chart selects by it.
pub const START_LABEL: &str = "gainshare.dev/start";
/// On a namespace: `enabled` lets the operator create the pods of TrainingJobs there. The chart's
/// admission policy asks for it.
pub const JOBS_LABEL: &str = "gainshare.dev/jobs";
/// On a namespace: `enabled` lets pods of TrainingJobs mount its Secrets.
pub const JOB_SECRETS_LABEL: &str = "gainshare.dev/job-secrets";
/// On a namespace: the ServiceAccount, other than `default`, under which pods of TrainingJobs may run.
pub const JOB_ACCOUNT_ANNOTATION: &str = "gainshare.dev/job-service-account";
/// On a pod that the webhook changed: what was added at its start.
pub const START_ANNOTATION: &str = "gainshare.dev/start";
/// On a namespace: `enabled` adds the library inside jobs to new pods, so that their threads follow their shares. The
/// webhook of the chart selects by it.
pub const INSIDE_LABEL: &str = "gainshare.dev/inside";
/// On a pod: `disabled` keeps the library out. On a pod that the webhook changed: the containers that load the library.
pub const INSIDE_ANNOTATION: &str = "gainshare.dev/inside";
/// On a namespace: `enabled` lets the library pace the GPU work of new pods, beside [`INSIDE_LABEL`].
pub const GPU_LABEL: &str = "gainshare.dev/gpu";
/// On a pod: `enabled` or `disabled`, whatever its namespace says. The webhook writes `enabled` on pods whose work it
/// lets the library pace.
pub const GPU_ANNOTATION: &str = "gainshare.dev/gpu";
/// On a node: how fast its cores are, relative to an ordinary one, such as `1.5`.
pub const SPEED_LABEL: &str = "gainshare.dev/speed";

/// On a pod: the metric to follow. This annotation and the next six override the policy.
pub const METRIC_ANNOTATION: &str = "gainshare.dev/metric";
/// On a pod: `minimize` or `maximize`.
pub const OBJECTIVE_ANNOTATION: &str = "gainshare.dev/objective";
/// On a pod: the value of the metric at which the job stops, such as `loss=0.05`, or `0.05` where the metric is named
/// elsewhere.
pub const TARGET_ANNOTATION: &str = "gainshare.dev/target";
/// On a pod: a pattern for output that nothing else understands.
pub const PATTERN_ANNOTATION: &str = "gainshare.dev/pattern";
/// On a pod: how progress is read.
pub const COLLECTOR_ANNOTATION: &str = "gainshare.dev/collector";
/// On a pod: in which file progress is.
pub const PATH_ANNOTATION: &str = "gainshare.dev/path";
/// On a pod: the container that trains.
pub const CONTAINER_ANNOTATION: &str = "gainshare.dev/container";

/// On a pod: when it must be done, a moment (RFC 3339) or a length of time from its start (`2h`).
pub const DEADLINE_ANNOTATION: &str = "gainshare.dev/deadline";
/// On a pod: the lateness that is tolerated, such as `15m`.
pub const DEADLINE_TOLERANCE_ANNOTATION: &str = "gainshare.dev/deadline-tolerance";

/// On a distributed job: the queue in which it waits. On a Job of the cluster's own kind: Kueue decides about its
/// suspension.
pub const QUEUE_LABEL: &str = "kueue.x-k8s.io/queue-name";

/// On a pod: the TrainingJob, or the adopted Job, that it is an attempt of.
pub const JOB_LABEL: &str = "gainshare.dev/job";
/// On a pod: which attempt it is.
pub const EPOCH_LABEL: &str = "gainshare.dev/epoch";
/// On a pod of a job of several tasks: its role and its number within the role.
pub const ROLE_LABEL: &str = "gainshare.dev/role";
pub const INDEX_LABEL: &str = "gainshare.dev/index";
/// On a job of several tasks: how many tasks of each role are wanted now, such as `Worker=4`, within the bounds of
/// the job's author.
pub const REPLICAS_ANNOTATION: &str = "gainshare.dev/replicas";
/// On a job of several tasks: `sync` (a step needs all workers) or `async` (every gradient is a step). The policy
/// `operator` predicts speeds by it.
pub const TRAINING_MODE_ANNOTATION: &str = "gainshare.dev/training-mode";
/// The labels by which Kubeflow's tools find the pods and Services of a TFJob begin with this.
pub const KUBEFLOW_PREFIX: &str = "training.kubeflow.org/";
/// On a pod: the policy of its job, by which its node shares.
pub const POLICY_ANNOTATION: &str = "gainshare.dev/policy";
/// On pods of TrainingJobs and adopted Jobs: what the policy makes as early as possible.
pub const AIM_ANNOTATION: &str = "gainshare.dev/aim";
/// Keeps a pod's object until its end has been read and written down.
pub const ATTEMPT_FINALIZER: &str = "gainshare.dev/attempt";
/// Keeps a TrainingJob until its last pod has ended.
pub const JOB_FINALIZER: &str = "gainshare.dev/training-job";
/// A pod is made with this scheduling gate: it cannot run before the gate is opened.
pub const PLACE_GATE: &str = "gainshare.dev/place";
/// On a job: the name of a pod that an administrator declares to have stopped, where nothing else
/// proves it.
pub const STOPPED_ANNOTATION: &str = "gainshare.dev/stopped";
/// On a job: the node where it is to run, written by a person. Each new value is followed once.
pub const NODE_ANNOTATION: &str = "gainshare.dev/node";
/// On a `batch/v1` Job: "true" lets the operator move it ([`crate::adopted`]).
pub const ADOPT_ANNOTATION: &str = "gainshare.dev/adopt";
/// On such a Job: our journal ([`crate::adopted::Journal`]).
pub const ADOPTED_ANNOTATION: &str = "gainshare.dev/adopted";

/// The controller that takes jobs without `managedBy`, and the reporter of our events.
pub const CONTROLLER: &str = "gainshare.dev/operator";
/// The same controller, as jobs of version 0.1 name it. `managedBy` cannot change, so the name stays ours.
const EARLIER_CONTROLLER: &str = "gainshare.dev/manager";

/// Whether a job with this `managedBy` is ours.
pub fn is_our_job(managed_by: Option<&str>) -> bool {
    managed_by.is_none_or(|name| [CONTROLLER, EARLIER_CONTROLLER].contains(&name))
}

/// The writer, in the objects' managed fields.
pub const FIELD_MANAGER: &str = "gainshare-operator";
/// On the operator's pod that leads; the Service selects it.
pub const LEADER_LABEL: &str = "gainshare.dev/leader";
/// On a pod that stands for a node that is needed: the kind of the node. It gives way to every other pod.
pub const PLACEHOLDER_LABEL: &str = "gainshare.dev/placeholder";
/// The names of such pods begin with this. The chart's PriorityClass has it without the hyphen at the end.
pub const PLACEHOLDER_PREFIX: &str = "gainshare-placeholder-";
/// The container that puts the library into a pod before its other containers start, and the volume with the library.
pub const INSIDE_VOLUME: &str = "gainshare-inside";
/// The volume with the page by which the node agent changes the teams of a pod.
pub const PAGE_VOLUME: &str = "gainshare-page";
/// The page's file in that volume.
pub const PAGE_FILE: &str = "page";
/// The volume that holds a TrainingJob's checkpoint claim.
pub const CHECKPOINT_VOLUME: &str = "gainshare-checkpoint";

/// Namespace and name: one object of a kind.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct NamespacedName {
    pub namespace: String,
    pub name: String,
}

impl NamespacedName {
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> NamespacedName {
        NamespacedName { namespace: namespace.into(), name: name.into() }
    }
}

impl From<(String, String)> for NamespacedName {
    fn from((namespace, name): (String, String)) -> NamespacedName {
        NamespacedName { namespace, name }
    }
}

impl fmt::Display for NamespacedName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// Makes a type for texts of one meaning. Outside the program it is the text alone: in JSON, in the schemas of our
/// custom resources, and in sentences. A map with such keys can be asked with a `&str`.
macro_rules! text_type {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(String);

        impl $name {
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl From<String> for $name {
            fn from(text: String) -> $name {
                $name(text)
            }
        }

        impl From<&str> for $name {
            fn from(text: &str) -> $name {
                $name(text.to_owned())
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> String {
                name.0
            }
        }

        impl Deref for $name {
            type Target = str;

            fn deref(&self) -> &str {
                &self.0
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl PartialEq<str> for $name {
            fn eq(&self, text: &str) -> bool {
                self.0 == text
            }
        }

        impl PartialEq<&str> for $name {
            fn eq(&self, text: &&str) -> bool {
                self.0 == *text
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }

        impl JsonSchema for $name {
            fn inline_schema() -> bool {
                String::inline_schema()
            }

            fn schema_name() -> Cow<'static, str> {
                String::schema_name()
            }

            fn json_schema(generator: &mut SchemaGenerator) -> Schema {
                String::json_schema(generator)
            }
        }
    };
}

text_type! {
    /// The name of a node.
    NodeName
}

text_type! {
    /// The uid of a pod. Another pod of the same name has another one.
    PodUid
}

text_type! {
    /// The uid of a TrainingJob, TFJob or Job. Another job of the same name has another one.
    JobUid
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn a_text_type_is_written_and_read_as_its_text() {
        let nodes: BTreeMap<NodeName, PodUid> = [("n".into(), "u".into())].into();
        assert_eq!(serde_json::to_string(&nodes).unwrap(), r#"{"n":"u"}"#);
        assert_eq!(serde_json::from_str::<BTreeMap<NodeName, PodUid>>(r#"{"n":"u"}"#).unwrap(), nodes);
        assert_eq!((nodes.get("n").unwrap(), format!("{:>3}", PodUid::from("u"))), (&PodUid::from("u"), "  u".into()));
        let schema = |schema: Schema| serde_json::to_value(schema).unwrap();
        let of_text = schema(SchemaGenerator::default().into_root_schema_for::<Option<String>>());
        let of_type = schema(SchemaGenerator::default().into_root_schema_for::<Option<NodeName>>());
        assert_eq!(of_text, of_type);
    }

    /// The chart cannot read constants of a program: it writes the names again.
    #[test]
    fn the_chart_uses_these_names() {
        let read = |file: &str| {
            let path = format!("{}/../../deploy/chart/templates/{file}", env!("CARGO_MANIFEST_DIR"));
            std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
        };
        assert!(read("webhook.yaml").contains(START_LABEL) && read("webhook.yaml").contains(INSIDE_LABEL));
        let admission = read("admission.yaml");
        for name in [PLACE_GATE, ADOPT_ANNOTATION, ADOPTED_ANNOTATION, PLACEHOLDER_LABEL, PLACEHOLDER_PREFIX] {
            assert!(admission.contains(name), "{name}");
        }
    }

    #[test]
    fn our_names_have_our_prefix() {
        for name in [ORIGINAL_ANNOTATION, JOB_LABEL, ATTEMPT_FINALIZER, PLACE_GATE, CONTROLLER, LEADER_LABEL] {
            assert!(name.starts_with(PREFIX), "{name}");
        }
        assert_eq!((PREFIX.trim_end_matches('/'), API_VERSION.split('/').next()), (GROUP, Some(GROUP)));
    }
}
