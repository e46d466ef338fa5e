//! Nodes for deadlines: how many more nodes of which kind would keep the deadlines that cannot be kept now.
//!
//! **Problem.** A job waits for a node, or runs on a node that is too crowded, and will miss its deadline. The
//! user and the administrator should learn what would help. Where a program adds nodes to the cluster
//! (cluster-autoscaler, Karpenter, Cluster API), that program should add them.
//!
//! **How.** A loop ([`run`]) reads late jobs, free room and the kinds of nodes that exist ([`snapshot`],
//! [`kinds`]), and lets the core work out what is needed ([`plan`]). A need counts when it has stayed the same for
//! some passes ([`damper`]). It is published as an event of each job, as `finish.nodesNeeded` in the status of
//! TrainingJobs (through [`Leader::nodes_needed`](crate::state::lead::Leader::nodes_needed), because only the job's
//! state machine writes the status), and as metrics.
//!
//! **Placeholders.** Programs that add nodes act on pods that find no place. Where the scaler is switched on, a pod
//! per needed node asks for nearly all of such a node, with a priority below that of all other pods
//! ([`placeholders`]). It does nothing, and is deleted as soon as it has a node or the need is gone. A waiting pod
//! that the cluster's scheduler has already refused is such a request by itself: it gets no placeholder beside it.
//!
//! **Properties**, each a test: `a_need_counts_after_some_passes_and_goes_after_more`,
//! `a_need_that_flickers_changes_nothing`, `a_placeholder_with_a_node_is_deleted_at_once`,
//! `no_more_placeholders_than_allowed`, `a_waiting_pod_is_its_own_request`, `pods_that_select_nodes_are_left_out`,
//! `a_gang_without_room_gets_placeholders_until_the_node_has_come`.

mod damper;
mod kinds;
mod placeholders;
mod plan;
pub(crate) mod run;
mod snapshot;

pub use placeholders::ScalerConfig;
