//! `batch/v1` Jobs that the operator may move: what their annotations and specs mean.
//!
//! The annotation [`names::ADOPT_ANNOTATION`] lets the operator move a Job. The operator keeps a
//! [`Journal`] in the annotation [`names::ADOPTED_ANNOTATION`]. Tenants can write that annotation,
//! too: [`Journal::read`] bounds every number in it, and an unreadable one makes the Job unmovable,
//! with a sentence that says what to remove.

use crate::immovable::ImmovableReason;
use crate::names::{self, ADOPTED_ANNOTATION, JobUid, NodeName, POLICY_ANNOTATION, PodUid, QUEUE_LABEL};
use crate::quantity;
use crate::training_job::{JobPolicy, MOVES_KEPT, Migration, Move, SpeconMarks, specon_marks};
use gainshare_core::view::Marks;
use jiff::Timestamp;
use k8s_openapi::api::batch::v1::{Job, JobSpec};
use k8s_openapi::api::core::v1::PodSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

const JOB_CONTROLLER: &str = "kubernetes.io/job-controller";
/// What the API server uses if a template gives no grace period.
const DEFAULT_GRACE_S: i64 = 30;
/// The strongest preference there is.
const WEIGHT: i64 = 100;
const PREFERRED: &str = "preferredDuringSchedulingIgnoredDuringExecution";
/// A Job is not moved more often than this: a larger count was forged.
const MOST_MOVES: u32 = 1_000_000;

/// What the operator must remember about an adopted Job, and what people want to know.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Journal {
    /// The Job's state, in one sentence.
    #[serde(default)]
    pub message: String,
    /// Where it runs, or ran last, and since when the operator has followed it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeName>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub began: Option<MicroTime>,
    /// The node that our preference in the template names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefers: Option<NodeName>,
    /// The pod that is stopped for the move under way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<StoppedPod>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub migration: Option<Migration>,
    #[serde(default)]
    pub moves: u32,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub last_moves: Vec<Move>,
    /// Why it is not moved any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unmovable: Option<String>,
    /// The last value of the annotation gainshare.dev/node that was followed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked_node: Option<NodeName>,
    /// Under policy `specon`: what was done with the Job and is not done again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub specon: Option<SpeconMarks>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoppedPod {
    pub name: String,
    pub uid: PodUid,
}

impl Journal {
    /// Reads the annotation. For any content, counts and lists are within the bounds that the
    /// operator itself keeps.
    pub fn read(text: &str) -> Result<Journal, serde_json::Error> {
        let mut journal: Journal = serde_json::from_str(text)?;
        journal.moves = journal.moves.min(MOST_MOVES);
        let surplus = journal.last_moves.len().saturating_sub(MOVES_KEPT);
        journal.last_moves.drain(..surplus);
        if let Some(migration) = &mut journal.migration {
            migration.epoch = migration.epoch.min(MOST_MOVES + 1);
        }
        Ok(journal)
    }

    /// What SpeCon has done with the Job.
    pub fn marks(&self) -> Marks {
        specon_marks(self.specon.as_ref(), &self.last_moves, self.migration.as_ref())
    }

    /// The journal in which these marks are stored, too.
    pub fn with_marks(self, marks: Marks) -> Journal {
        Journal { specon: SpeconMarks::add(self.specon, marks), ..self }
    }

    /// What in the annotation the operator cannot have written, if anything.
    pub fn fault(text: &str) -> Option<String> {
        let written = match serde_json::from_str::<Journal>(text) {
            Ok(written) => written,
            Err(error) => return Some(format!("it cannot be read ({error})")),
        };
        let bounded = Journal::read(text).ok()?;
        (written != bounded).then(|| "it holds numbers that the operator never writes".to_owned())
    }
}

/// A Job as it was read.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct BatchJobSnapshot {
    pub namespace: String,
    pub name: String,
    pub uid: JobUid,
    pub resource_version: String,
    pub created: Timestamp,
    /// The Job's pods have a deadline.
    pub has_deadline: bool,
    pub deleting: bool,
    /// The Job's author wants it to be moved.
    pub asked: bool,
    /// The pod that an administrator declares to have stopped.
    pub declared_stopped: Option<String>,
    /// The node that a person wants it to run on.
    pub wanted_node: Option<NodeName>,
    pub policy: JobPolicy,
    pub suspended: bool,
    /// The Job has a start time, with which its template cannot change.
    pub has_start_time: bool,
    /// The Job is complete, or has failed.
    pub ended: bool,
    /// Why it cannot be moved, and what to do about it.
    pub problem: Option<String>,
    pub grace_s: i64,
    /// Thousandths of a core, and bytes.
    pub requests: (u64, u64),
    /// The node preferences of its template.
    pub preferred: Vec<Value>,
    /// Whether there is a journal, and what it says.
    pub has_journal: bool,
    pub journal: Journal,
}

impl BatchJobSnapshot {
    pub fn of(job: &Job) -> Option<BatchJobSnapshot> {
        let (meta, spec) = (&job.metadata, job.spec.as_ref()?);
        let status = job.status.clone().unwrap_or_default();
        let note = |key: &str| meta.annotations.as_ref().and_then(|notes| notes.get(key)).cloned();
        let (journal, unreadable) = match note(ADOPTED_ANNOTATION).map(|text| Journal::read(&text)) {
            None => (Journal::default(), None),
            Some(Ok(journal)) => (journal, None),
            Some(Err(error)) => {
                let sentence =
                    format!("the annotation {ADOPTED_ANNOTATION} is ours and cannot be read ({error}): remove it");
                (Journal::default(), Some(sentence))
            }
        };
        let policy = note(POLICY_ANNOTATION).map(JobPolicy::try_from);
        let refusal = policy.as_ref().and_then(|policy| policy.as_ref().err());
        let bad_policy = refusal.map(|why| format!("the annotation {POLICY_ANNOTATION} cannot be used: {why}"));
        let condition = |kind: &str| {
            status.conditions.iter().flatten().any(|condition| condition.type_ == kind && condition.status == "True")
        };
        let pod = spec.template.spec.as_ref();
        let template_notes = spec.template.metadata.as_ref().and_then(|meta| meta.annotations.as_ref());
        let affinity = pod.and_then(|pod| pod.affinity.as_ref()?.node_affinity.as_ref());
        let preferred = affinity.map(|affinity| json!(affinity)[PREFERRED].as_array().cloned().unwrap_or_default());
        Some(BatchJobSnapshot {
            namespace: meta.namespace.clone()?,
            name: meta.name.clone()?,
            uid: meta.uid.clone()?.into(),
            resource_version: meta.resource_version.clone().unwrap_or_default(),
            created: meta.creation_timestamp.as_ref().map(|time| time.0).unwrap_or_default(),
            has_deadline: template_notes.is_some_and(|notes| notes.contains_key(names::DEADLINE_ANNOTATION)),
            deleting: meta.deletion_timestamp.is_some(),
            asked: note(names::ADOPT_ANNOTATION).as_deref() == Some("true"),
            declared_stopped: note(names::STOPPED_ANNOTATION),
            wanted_node: note(names::NODE_ANNOTATION).map(NodeName::from),
            policy: policy.and_then(Result::ok).unwrap_or_default(),
            suspended: spec.suspend == Some(true),
            has_start_time: status.start_time.is_some(),
            ended: condition("Complete") || condition("Failed"),
            problem: unreadable.or(bad_policy).or_else(|| problem(job, spec)),
            grace_s: pod.and_then(|pod| pod.termination_grace_period_seconds).unwrap_or(DEFAULT_GRACE_S),
            requests: quantity::template_requests(&spec.template),
            preferred: preferred.unwrap_or_default(),
            has_journal: note(ADOPTED_ANNOTATION).is_some(),
            journal,
        })
    }

    /// Whether the operator follows it: it is to be moved, or was.
    pub fn is_ours(&self) -> bool {
        self.asked || self.has_journal
    }

    /// Why the Job must stay where it is.
    pub fn movable(&self) -> Result<(), ImmovableReason> {
        match (&self.problem, &self.journal.unmovable) {
            (Some(why), _) => Err(ImmovableReason::Unsuitable(why.clone())),
            (None, Some(why)) => Err(ImmovableReason::FailedMove(why.clone())),
            (None, None) if !self.policy.places_pods() => Err(ImmovableReason::Policy(self.policy)),
            (None, None) => Ok(()),
        }
    }

    /// The template's preferences with ours for `node` instead of the one that the journal names;
    /// `None` removes ours.
    pub fn preferring(&self, node: Option<&NodeName>) -> Value {
        let term = |node: &NodeName| {
            let field = json!({"key": "metadata.name", "operator": "In", "values": [node]});
            json!({"weight": WEIGHT, "preference": {"matchFields": [field]}})
        };
        let ours = self.journal.prefers.as_ref().map(term);
        let mut terms: Vec<Value> = self.preferred.iter().filter(|one| Some(*one) != ours.as_ref()).cloned().collect();
        terms.extend(node.map(term));
        // In a merge patch, null removes a field.
        let terms = if terms.is_empty() { Value::Null } else { json!(terms) };
        json!({"template": {"spec": {"affinity": {"nodeAffinity": {PREFERRED: terms}}}}})
    }
}

/// Why a Job cannot be moved.
fn problem(job: &Job, spec: &JobSpec) -> Option<String> {
    if spec.parallelism.unwrap_or(1) != 1 || spec.completions.unwrap_or(1) != 1 {
        return Some("it has several pods: only Jobs with completions and parallelism 1 are moved".to_owned());
    }
    if spec.pod_replacement_policy.as_deref() != Some("Failed") {
        return Some(
            "without podReplacementPolicy: Failed it may run twice while a pod ends: create it with that".to_owned(),
        );
    }
    if let Some(other) = spec.managed_by.as_deref().filter(|name| *name != JOB_CONTROLLER) {
        return Some(format!("{other} runs it (spec.managedBy), so the cluster's Job controller does not"));
    }
    if job.metadata.labels.as_ref().is_some_and(|labels| labels.contains_key(QUEUE_LABEL)) {
        return Some(format!("its queue decides when it is suspended (label {QUEUE_LABEL}): use one or the other"));
    }
    let owner = job.metadata.owner_references.iter().flatten().find(|owner| owner.controller == Some(true));
    if let Some(owner) = owner.filter(|owner| owner.kind != "CronJob") {
        return Some(format!("{} {} made it and would undo what we change", owner.kind, owner.name));
    }
    let pod = spec.template.spec.as_ref()?;
    if pod.node_name.is_some() {
        return Some("nodeName ties it to its node: use nodeSelector or affinity".to_owned());
    }
    (!mounts_a_claim(pod)).then(|| {
        "no container mounts a persistentVolumeClaim, so what it saves on one node is not found on another".to_owned()
    })
}

fn mounts_a_claim(pod: &PodSpec) -> bool {
    let claims = pod.volumes.iter().flatten().filter(|volume| volume.persistent_volume_claim.is_some());
    let mut mounts = pod.containers.iter().flat_map(|container| container.volume_mounts.iter().flatten());
    let claims: Vec<&str> = claims.map(|volume| volume.name.as_str()).collect();
    mounts.any(|mount| claims.contains(&mount.name.as_str()) && mount.read_only != Some(true))
}

/// What people see of a Job that is, or was, followed.
#[derive(Debug, Clone, PartialEq)]
pub struct AdoptedJob {
    pub namespace: String,
    pub name: String,
    pub policy: JobPolicy,
    /// Complete, Failed, Suspended or Running.
    pub state: &'static str,
    pub message: String,
    /// Where it runs, or ran last.
    pub node: Option<NodeName>,
    pub began: Option<Timestamp>,
    pub ended: Option<Timestamp>,
    /// Why it is not moved.
    pub unmovable: Option<String>,
    pub moves: u32,
    pub last_moves: Vec<Move>,
}

impl AdoptedJob {
    /// `None` if the Job was never followed.
    pub fn of(job: &Job) -> Option<AdoptedJob> {
        let snapshot = BatchJobSnapshot::of(job).filter(BatchJobSnapshot::is_ours)?;
        let conditions = job.status.iter().flat_map(|status| status.conditions.iter().flatten());
        let end = conditions.filter(|c| c.status == "True").find_map(|c| match c.type_.as_str() {
            "Complete" => Some(("Complete", "it ended with code 0".to_owned(), c.last_transition_time.as_ref()?.0)),
            "Failed" => Some(("Failed", c.message.clone().unwrap_or_default(), c.last_transition_time.as_ref()?.0)),
            _ => None,
        });
        let unmovable = snapshot.movable().err().map(|reason| reason.to_string());
        let journal = snapshot.journal;
        let now = if snapshot.suspended { "Suspended" } else { "Running" };
        let (state, message, ended) =
            end.map_or((now, journal.message, None), |(state, message, at)| (state, message, Some(at)));
        Some(AdoptedJob {
            namespace: snapshot.namespace,
            name: snapshot.name,
            policy: snapshot.policy,
            state,
            message,
            node: journal.node,
            began: journal.began.map(|time| time.0),
            ended,
            unmovable,
            moves: journal.moves,
            last_moves: journal.last_moves,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(change: impl FnOnce(&mut Value)) -> BatchJobSnapshot {
        let mut job = json!({
            "metadata": {"name": "run", "namespace": "team", "uid": "u", "annotations": {"gainshare.dev/adopt": "true"}},
            "spec": {"podReplacementPolicy": "Failed", "template": {"spec": {
                "containers": [{"name": "main", "volumeMounts": [{"name": "work", "mountPath": "/work"}]}],
                "volumes": [{"name": "work", "persistentVolumeClaim": {"claimName": "c"}}],
            }}},
        });
        change(&mut job);
        BatchJobSnapshot::of(&serde_json::from_value(job).unwrap()).unwrap()
    }

    #[test]
    fn what_cannot_be_moved_says_why_and_what_to_do() {
        let good = job(|_| ());
        assert!(good.is_ours() && good.problem.is_none(), "{:?}", good.problem);
        type Change = fn(&mut Value);
        let cases: [(Change, &str); 9] = [
            (|job| job["spec"]["parallelism"] = json!(2), "completions and parallelism 1"),
            (|job| job["spec"]["podReplacementPolicy"] = json!("TerminatingOrFailed"), "podReplacementPolicy: Failed"),
            (|job| job["spec"]["managedBy"] = json!("example.com/other"), "example.com/other runs it"),
            (|job| job["metadata"]["labels"] = json!({QUEUE_LABEL: "q"}), "its queue decides"),
            (
                |job| {
                    let owner = json!({"apiVersion": "jobset.x-k8s.io/v1", "kind": "JobSet", "name": "s", "uid": "s", "controller": true});
                    job["metadata"]["ownerReferences"] = json!([owner]);
                },
                "JobSet s made it",
            ),
            (|job| job["spec"]["template"]["spec"]["nodeName"] = json!("n"), "nodeSelector"),
            (|job| job["spec"]["template"]["spec"]["volumes"] = json!([]), "mounts a persistentVolumeClaim"),
            (|job| job["metadata"]["annotations"][POLICY_ANNOTATION] = json!("magic"), "takes gainshare, na, specon"),
            (|job| job["metadata"]["annotations"][ADOPTED_ANNOTATION] = json!("{"), "remove it"),
        ];
        for (change, helps) in cases {
            let found = job(change).problem.unwrap_or_default();
            assert!(found.contains(helps), "{helps:?} is not in {found:?}");
        }
    }

    #[test]
    fn our_preference_comes_and_goes_and_the_authors_stays() {
        let authors = json!({"weight": 5, "preference": {"matchExpressions": [{"key": "zone", "operator": "Exists"}]}});
        let terms = |spec: &Value| spec["template"]["spec"]["affinity"]["nodeAffinity"][PREFERRED].clone();
        let mut plain = job(|_| ());
        assert_eq!(terms(&plain.preferring(None)), Value::Null);
        plain.preferred = vec![authors.clone()];
        let moved = terms(&plain.preferring(Some(&"n1".into())));
        assert_eq!(moved[0], authors);
        assert_eq!(moved[1]["preference"]["matchFields"][0]["values"], json!(["n1"]));
        plain.journal.prefers = Some("n1".into());
        plain.preferred = moved.as_array().unwrap().clone();
        let again = terms(&plain.preferring(Some(&"n2".into())));
        assert_eq!((again.as_array().unwrap().len(), &again[0]), (2, &authors));
        assert_eq!(terms(&plain.preferring(None)), json!([authors]));
    }

    #[test]
    fn a_forged_journal_is_bounded() {
        let journal = Journal::read(&json!({"moves": u32::MAX}).to_string()).unwrap();
        assert_eq!(journal.moves, MOST_MOVES);
        let time = "2026-01-01T10:00:00.000000Z";
        let made = json!({"at": time, "from": "a", "to": "b", "why": "x", "saveS": 1e300, "restoreS": -1e300});
        let many: Vec<Value> = (0..1000).map(|_| made.clone()).collect();
        let migration =
            json!({"from": "a", "to": "b", "why": "x", "phase": "Stopping", "epoch": u32::MAX, "since": time});
        let journal = Journal::read(&json!({"lastMoves": many, "migration": migration}).to_string()).unwrap();
        assert_eq!((journal.last_moves.len(), journal.migration.unwrap().epoch), (MOVES_KEPT, MOST_MOVES + 1));
        assert!(Journal::read(&json!({"moves": -1}).to_string()).is_err());
    }
}
