//! How the deadlines of running jobs stand, as the node agents report them. Moves for deadlines and the need for nodes
//! rest on the same answer, so that a node is asked for only where no move helps.
//!
//! **When a job is late.** Its policy cannot promise the deadline on its node, and the end that is predicted for it
//! there is after the deadline all the same. A job without a promise that will probably make its deadline is not late.
//!
//! A job whose pod selects nodes is not late either: it is not known which other node could run it.
//!
//! **Units.** Core-seconds of a core of speed 1.

use super::agents::Agents;
use super::world::World;
use gainshare_core::view::{Ends, FinishView, WorkLeft};
use gainshare_kube_api::deadline::{Deadline, DeadlineState};
use gainshare_kube_api::names::{NodeName, PodUid};
use gainshare_kube_api::wire::JobReport;

/// The deadline of a pod on this node, and how it stands, where its node agent can tell.
pub(crate) fn finish(
    world: &World,
    agents: &Agents,
    node: &NodeName,
    pod_uid: &PodUid,
) -> Option<(Deadline, Option<FinishView>)> {
    let deadline = world.shared(pod_uid)?.deadline?;
    let view = || {
        let report = agents.job(pod_uid)?;
        let (left, cores) = (report.signal.as_ref()?.left?, agents.cores(node)?);
        let speed = world.nodes().get(node).map_or(1.0, |facts| f64::from(facts.speed_percent) / 100.0);
        let left = WorkLeft {
            work_core_s: left.parallel_node_s * cores * speed,
            serial_s: left.serial_s * speed,
            usable_cores: left.usable * cores,
            spread: left.spread,
        };
        // Nodes that the author of a pod has chosen are not known here.
        let is_choosy = world.pod(pod_uid).is_some_and(|pod| pod.attempt.as_ref().is_some_and(|pod| pod.choosy));
        let ends = match ends(report, deadline) {
            Ends::Late if is_choosy => Ends::Open,
            ends => ends,
        };
        Some(FinishView { ends, left })
    };
    Some((deadline, view()))
}

fn ends(report: &JobReport, deadline: Deadline) -> Ends {
    let is_predicted_late = || report.forecast.is_none_or(|forecast| forecast.done_ms > deadline.latest_ms());
    match report.deadline_state {
        Some(DeadlineState::OnTime) => Ends::InTime,
        Some(DeadlineState::AtRisk) if is_predicted_late() => Ends::Late,
        _ => Ends::Open,
    }
}
