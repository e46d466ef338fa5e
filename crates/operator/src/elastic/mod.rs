//! The sizes of the tasks of distributed jobs, while they run.
//!
//! **Problem.** Authors guess the CPU and the memory of parameter servers and workers, and how many workers a job
//! needs. A wrong guess holds the whole job back, or it wastes what other jobs wait for.
//!
//! **How.** One loop ([`run`]) for all jobs with the policy `operator`. It reads tasks, nodes, free room, waiting
//! gangs and the node agents' reports ([`snapshot`]), lets the core decide ([`decide`], preset `operator`, only
//! checked plans), and carries the decision out ([`apply`]): containers are resized in place; the number of workers
//! and the reasons go through [`ScaleOrder`](crate::state::task_job::ScaleOrder) to the job's own state machine,
//! which writes them to the status before it makes or removes a pod.
//!
//! **What counts as room.** A node has for tasks what no other pod requests, less [`snapshot::RESERVE_PERCENT`] of
//! it that growth leaves free for new pods. Gangs that wait are admitted by `crate::jobs::task_job::line`; here they
//! only keep jobs from growing, and make jobs return what exceeds their requests.
//!
//! **Traffic.** The same loop keeps what tasks send and receive ([`traffic`]), for the next placement of their job.
//!
//! **Units.** The cores of a task are its CPU request, because nodes are shared by requests. A limit moves in
//! proportion. Memory is the limit where there is one, because the kernel kills at the limit.
//!
//! **Properties**, each a test: `a_hot_server_grows_alone`, `nothing_is_decided_twice`,
//! `no_job_grows_while_a_gang_waits`, `growth_is_returned_to_a_gang_that_waits`, `workers_stay_within_the_bounds`,
//! `nonsense_stops_nothing`.

mod apply;
mod decide;
pub(crate) mod run;
mod snapshot;
mod traffic;

use crate::state::lead::Leader;
use gainshare_core::model::Time;
use gainshare_core::policy::Elastic;
use jiff::Timestamp;

/// Decisions that are measured and not carried out ([`crate::rehearsal`]).
pub(crate) struct SizeRehearsal(decide::SizeDecider);

impl Default for SizeRehearsal {
    fn default() -> SizeRehearsal {
        SizeRehearsal(decide::SizeDecider::new(Elastic::default()))
    }
}

impl SizeRehearsal {
    /// Reads the cluster and decides. Answers for how many jobs something was decided.
    pub(crate) fn pass(&mut self, leader: &Leader, now: Timestamp, clock_s: f64) -> usize {
        let snapshot = snapshot::read(leader, now);
        self.0.decide(&snapshot, Time::from_secs_f64(clock_s)).len()
    }
}
