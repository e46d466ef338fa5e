//! Jobs that are Docker containers: those that opted in, and those that Gainshare starts.
//!
//! **Problem.** Training containers of a Docker host should get the share that their progress earns while
//! they run, with nothing but the engine's own interface, and must have their original limits again after the
//! release.
//!
//! **Approach.** [`Engine`] is the connection: it reports which containers start and end
//! ([`Engine::events`]), follows their output ([`Engine::follow_logs`]), and starts, stops and removes
//! containers. [`DockerRuntime`] applies plans: [`DockerRuntime::adopt`] reads a container's
//! [`OriginalLimits`] (for the caller's journal), and from then on targets are written through the engine's
//! live update and read back from the engine. Before the next change the kernel's own files are compared with
//! their values after our last write; a difference is a foreign write: the job gets an error and is left
//! alone for a while, longer each time.
//!
//! **Terms.** A handle's key is the container's full id. A *life* is one start of a container: a restarted
//! container has the same id and counts as another job, which must be adopted again.
//!
//! **Properties.** Only adopted containers are ever written to. A value in force is not written again, and an
//! older plan is refused. The hard memory limit is never touched. Restoring is possible from the
//! [`OriginalLimits`] alone, by another process and also for a container that has stopped, whose limits the
//! engine would otherwise apply at its next start. After a restart of the engine the next request simply
//! succeeds again.
//!
//! **Imports** go one way: `engine`, `labels`, `limits` ← `containers`, `events`, `logs`, `usage` ← `adopted`
//! ← `runtime`.

mod adopted;
mod containers;
mod engine;
mod events;
mod find;
pub mod labels;
mod limits;
mod logs;
mod runtime;
mod usage;

pub use containers::{Bind, ContainerSpec, Network};
pub use engine::{Engine, default_socket};
pub use events::{AdoptionRule, ContainerInfo, DockerEvent};
pub use find::ContainerSnapshot;
pub use limits::{EngineLimit, LimitValue, LimitValues, OriginalLimits};
pub use logs::{LogChunk, LogCursor};
pub use runtime::DockerRuntime;
