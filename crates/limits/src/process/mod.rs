//! Jobs as plain processes: each in a process group, a session and a cgroup of its own.
//!
//! **Problem.** Make the kernel give each job the share of the plan, for jobs that are ordinary programs
//! started from a shell; survive a restart of the daemon; never touch a process of another program; name
//! clearly what this machine cannot do.
//!
//! **Approach.** [`ProcessRuntime::prepare`] makes the job's group before the job exists and returns the
//! `cgroup.procs` files into which the child writes itself between fork and exec ([`start::enter`] does it),
//! so that not one instruction of the job runs outside. Limits go through [`crate::cgroup`]. On a machine
//! where the daemon may not make cgroups the runtime falls back to priorities and a stop/continue duty cycle
//! (module `fallback`, a feature); [`ProcessRuntime::notes`] name it. After a restart of the daemon
//! [`ProcessRuntime::adopt`] takes over the jobs that [`JobGroup`] and [`Identity`] recorded.
//!
//! **Terms.** A job's *leader* is the process that was started; its pid is also the number of its process
//! group and session.
//!
//! **Properties.** A group that is removed or recreated, and a pid that is reused, count as gone and are
//! never touched. The same plan twice writes nothing. A memory limit is never below the working set.
//! `release` leaves the kernel's defaults behind.
//!
//! **Imports** go one way: `config`, `identity`, `traffic` ← `cgroup_jobs`, `fallback` ← `runtime`.

mod cgroup_jobs;
mod config;
#[cfg(feature = "fallback")]
mod fallback;
mod identity;
mod runtime;
#[cfg(feature = "traffic")]
mod sock_diag;
pub mod start;
mod traffic;

pub use cgroup_jobs::restore;
pub use config::{Config, JobGroup};
#[cfg(feature = "fallback")]
pub use fallback::{PacedJob, Pacer, continue_group, keeper};
pub use identity::{Identity, ProcessStat, ProcessWatch, sessions_of};
pub use runtime::ProcessRuntime;
