//! What the operator, the node agents and the kubectl plugin agree on.
//!
//! **Problem.** Three programs of a cluster read and write the same objects and talk to each other.
//! They must agree on the names, the fields and the arithmetic, also while one of them is being
//! upgraded.
//!
//! **How.** This crate holds types and pure functions only: the custom resources
//! ([`share_policy::SharePolicy`], [`training_job::TrainingJob`], Kubeflow's [`tfjob::TfJob`]), the policies that they
//! take ([`policy_names`]), jobs of several
//! tasks ([`tasks`]) and the pods and Services of a task ([`task_objects`]), all names on objects
//! ([`names`]), the annotations ([`pod_note`], [`adopted`], [`facts::Originals`]), why a pod has its share
//! ([`share_reason`]), whether its GPU work is paced ([`gpu_pacing`]), the messages between node agent and operator
//! ([`wire`]), where recorded decisions are served ([`decision_record`]), which policy selects which pod ([`select`]),
//! what a resize may be ([`resize`], [`bounds`]), and deadlines ([`deadline`], [`deadline_input`]). Code that reads and
//! writes objects is compiled here once for all crates (`compiled`). The crate has no client, no clock and no async
//! code.
//!
//! **Terms.** *Original*: a pod's resources before our first change. An annotation keeps them, and
//! they are put back when the pod is no longer shared. *Pool*: what the pods of one policy on one
//! node requested together. Shares divide it.
//!
//! **Property.** Tenants write these objects. No object makes a function of this crate panic: the
//! operator's `hostile_tests` feed arbitrary ones through it.

pub mod adopted;
pub mod aim;
pub mod attempt;
pub mod bounds;
// Tests of this crate compile what they need.
#[cfg(not(test))]
pub mod compiled;
pub mod deadline;
pub mod deadline_input;
pub mod decision_record;
pub mod facts;
#[cfg(any(test, feature = "fixtures"))]
pub mod fixtures;
pub mod gpu_pacing;
pub mod immovable;
pub mod names;
pub mod node_rules;
pub mod placement_reason;
pub mod pod_note;
pub mod policy_names;
pub mod quantity;
pub mod resize;
pub mod resources;
pub mod run_policy;
pub mod select;
pub mod share_policy;
pub mod share_reason;
pub mod specon_marks;
pub mod task_objects;
pub mod tasks;
pub mod tfjob;
pub mod training_job;
pub mod wire;
