//! Shares of pods: resizes on behalf of node agents, original values, annotations and policy statuses.

pub(crate) mod contest;
pub(crate) mod notes;
pub(crate) mod policies;
pub(crate) mod release;
pub(crate) mod resizes;
pub(crate) mod restore;
pub(crate) mod write;

use crate::fail_point::FailPoint;
use crate::state::lead::Leader;
use crate::state::metrics::Metrics;
use contest::Contests;
use gainshare_kube_api::names::PodUid;
use kube::Client;
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::sync::Arc;
use write::Writer;

/// What the writers of shares work with while this replica leads.
pub(crate) struct Shares {
    pub(crate) leader: Arc<Leader>,
    pub(crate) contests: Mutex<Contests>,
    /// The uids of pods whose last resize has an unknown outcome: it was sent, and no answer came.
    doubts: Mutex<BTreeSet<PodUid>>,
    pub(crate) writer: Writer,
}

impl Shares {
    pub(crate) fn new(leader: Arc<Leader>, client: Client, metrics: Arc<Metrics>) -> Shares {
        Shares { leader, contests: Mutex::default(), doubts: Mutex::default(), writer: Writer::new(client, metrics) }
    }

    /// The process ends at this point, if it reaches it.
    pub(crate) fn with_fail_point(mut self, fail_at: FailPoint) -> Shares {
        self.writer.fail_at = fail_at;
        self
    }
}
