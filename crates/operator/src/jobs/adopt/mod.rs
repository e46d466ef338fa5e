//! Jobs of the cluster's own kind (`batch/v1`) that may be moved.
//!
//! **Problem.** People have Jobs, not TrainingJobs. The cluster's Job controller makes their pods, and a Job's template cannot change while it runs.
//!
//! **How.** The annotation `gainshare.dev/adopt: "true"` lets us follow a Job and move it; the Job controller still makes every pod. A move goes
//! through [`Journal`], an annotation of the Job, written before each deed: our finalizer on the pod, so that its end is snapshot; `suspend: true`, by which the Job
//! controller asks the pod to end; proof of stop, as for TrainingJobs; and then, in one request, a preference for the chosen node in the
//! template and `suspend: false`. What the Job controller does to suspended pods counts as nobody's failure.
//!
//! **A preference, not a pin.** A running Job's template is out of reach, so whatever we write there stays after we are gone. A required node that vanishes would keep the
//! Job from ever running again; a preferred one does not. So the cluster's scheduler has the last word, and the journal says where the Job went.
//!
//! **Never two live attempts.** `podReplacementPolicy: Failed` is asked for: the Job controller itself makes no second pod before the first has ended. The
//! hole that it has, a pod whose object is removed by force while the Job is suspended, is closed by our finalizer.

mod machine;
mod run;
mod snapshot;

pub(crate) use run::give_back;
pub(super) use run::start;
pub use snapshot::Adopted;

use gainshare_kube_api::training_job::{Migration, Move};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use serde::{Deserialize, Serialize};

/// What must survive us, and what people want to know: an annotation of the Job.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Journal {
    /// How it stands, in one sentence.
    #[serde(default)]
    pub(crate) message: String,
    /// Where it runs, or ran last, and since when it has been followed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) node: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) began: Option<MicroTime>,
    /// The node that our preference in the template names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) prefers: Option<String>,
    /// The pod that is stopped for the move under way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) pod: Option<Stopped>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) migration: Option<Migration>,
    #[serde(default)]
    pub(crate) moves: u32,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) last_moves: Vec<Move>,
    /// Why it is not moved any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) unmovable: Option<String>,
    /// The last value of the annotation gainshare.dev/node that was followed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) asked_node: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Stopped {
    pub(crate) name: String,
    pub(crate) uid: String,
}
