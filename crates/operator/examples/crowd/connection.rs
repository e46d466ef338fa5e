//! How one make-believe node agent speaks with the operator: over TLS, with the real agent's code.

use super::{Plan, Result};
use gainshare_kube_api::names::NodeName;
use gainshare_kube_api::wire::{Answer, JobReport, NodeTotals, Resize, SyncRequest};
use gainshare_node_agent::Link;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The pause after a failure.
const PAUSE: Duration = Duration::from_millis(500);
/// Failures that are printed, of all agents together.
const PRINTED: u64 = 5;

/// What every make-believe node reports of its machine.
pub(super) const BUSY_NODE: NodeTotals = NodeTotals {
    growing: 0,
    watching: 0,
    converged: 0,
    cpu_used_cores: 4.0,
    memory_used_bytes: 8 << 30,
    cores: 32.0,
    memory_bytes: 256 << 30,
    at_us: 0,
};

/// What an agent says in one request.
pub(super) struct Message {
    pub(super) beat: NodeTotals,
    pub(super) jobs: Option<Vec<JobReport>>,
    pub(super) resizes: Vec<Resize>,
    pub(super) wait_ms: u32,
}

pub(super) struct Connection {
    node: NodeName,
    link: Link,
    epoch: u64,
    seq: u64,
    /// The revision of the operator's list that the agent has.
    seen: u64,
}

impl Connection {
    pub(super) fn new(plan: &Plan, index: usize) -> Result<Connection> {
        let link = Link::new(&plan.operator, &plan.folder.join("tls.crt"), &plan.token_file(index))?;
        let epoch = SystemTime::now().duration_since(UNIX_EPOCH)?.as_micros() as u64;
        Ok(Connection { node: plan.node(index), link, epoch, seq: 0, seen: 0 })
    }

    /// The operator's answer and how long it took; `None` after a failure, which is counted, and a pause.
    pub(super) async fn ask(&mut self, message: Message, failures: &AtomicU64) -> Option<(Answer, Duration)> {
        self.seq += 1;
        let Message { beat, jobs, resizes, wait_ms } = message;
        let (node, finished) = (self.node.clone(), Vec::new());
        let (epoch, seq, seen) = (self.epoch, self.seq, self.seen);
        let request = SyncRequest { node, epoch, seq, seen, wait_ms, beat, jobs, resizes, finished };
        let began = Instant::now();
        match self.link.sync(&request).await {
            Ok(answer) => {
                self.seen = answer.revision;
                Some((answer, began.elapsed()))
            }
            Err(error) => {
                if failures.fetch_add(1, Ordering::Relaxed) < PRINTED {
                    eprintln!("crowd: {}: {error}", self.node);
                }
                self.seen = 0;
                tokio::time::sleep(PAUSE).await;
                None
            }
        }
    }
}
