//! Kubernetes: in-place shares for pods that people already have.
//!
//! **Problem.** Training pods on one node compete as if all of them gained the same from a core. Kubernetes can change a running pod's
//! resources without a restart (`pods/resize`), but nobody tells it to whom the node's CPU is worth most.
//!
//! **How.** Two programs. The *agent* runs on every node without any right at the API server: it reads the pods' logs and cgroups, runs the
//! node's share decision (the same core as on a single machine), and asks the manager for resizes. The *manager* watches
//! pods and [`crd::SharePolicy`] objects, tells each agent which pods of its node are to be shared ([`wire`]), and resizes on the
//! agents' behalf: only pods of the node that the agent's token proves, only pods a policy selects, only within the rules of [`resize`].
//!
//! **Terms.** *Original*: a pod's resources before our first change, kept in an annotation and put back when we let go.
//! *Pool*: what the pods of one policy on one node requested together; shares divide it.
//!
//! **Properties.** A pod is never restarted, its QoS class never changes, and everything that must survive a restart of either program is
//! on the objects themselves.

mod bounds;
pub mod crd;
pub mod facts;
pub mod jobs;
pub mod manager;
pub mod node;
mod quantity;
pub mod resize;
pub mod select;
pub mod tls;
pub mod training_job;
mod webhook;
pub mod wire;

/// The client library and its types, so that commands use the same version of them.
pub use {jiff, k8s_openapi, kube};
