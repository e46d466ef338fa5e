//! Leader election: which replica of the operator leads.
//!
//! **Problem.** Two replicas run, and one of them may write shares and move jobs. A replica can be stopped,
//! lose its connection to the API server, or have a clock that is an hour wrong.
//!
//! **How.** A Lease object names its holder. The holder writes the Lease again every [`RETRY_EVERY`]. Each
//! write carries the resourceVersion that the replica has read, so the API server refuses one of two replicas
//! that write at the same time. A standby never compares the times in the Lease with its own clock: it
//! remembers, on its own monotonic clock, when it saw the Lease change last, and claims it after
//! [`EXPIRES_AFTER`] without a change. The holder stops leading when its last successful write was sent
//! [`RENEW_WITHIN`] ago. That moment is always earlier than the one at which a standby may claim.
//!
//! **Terms.** *Identity*: the name of one process in the Lease; two processes never share one. *LeaderContext*: the
//! time from a successful write until [`RENEW_WITHIN`] later.
//!
//! **Properties.** `two_replicas_never_lead_together`, `a_wrong_wall_clock_changes_nothing`,
//! `without_the_api_server_leadership_ends`, `a_standby_takes_over_after_expiry`. A process that was stopped
//! (SIGSTOP) may run for a moment after it continues, before it finds that its time is over: that is why every
//! write to a pod or a job carries the version it was decided on.

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::{Api, PostParams};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// A standby claims the Lease when it has not changed for this long.
const EXPIRES_AFTER: Duration = Duration::from_secs(15);
/// The holder stops leading this long after it sent its last successful write.
const RENEW_WITHIN: Duration = Duration::from_secs(10);
/// The holder renews, and a standby reads, this often.
const RETRY_EVERY: Duration = Duration::from_secs(2);
/// One attempt: a read and a write.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(5);

/// What one replica knows about the Lease. Pure: every moment is passed in.
#[derive(Debug)]
pub(crate) struct Election {
    identity: String,
    observed: Option<Observation>,
    /// When the last successful write of this replica was sent; nothing while another replica holds the Lease.
    renewed_at: Option<Instant>,
}

/// The content of the Lease, and when this replica first saw it.
#[derive(Debug)]
struct Observation {
    spec: LeaseSpec,
    at: Instant,
}

impl Election {
    pub(crate) fn new(identity: String) -> Election {
        Election { identity, observed: None, renewed_at: None }
    }

    /// The Lease to write after this one was read; nothing if another replica holds it. `wall` is written for
    /// people to read.
    fn claim(&mut self, found: Option<&Lease>, now: Instant, wall: Timestamp) -> Option<Lease> {
        let spec = found.and_then(|lease| lease.spec.clone()).unwrap_or_default();
        let observed_at = match &self.observed {
            Some(observed) if observed.spec == spec => observed.at,
            _ => now,
        };
        self.observed = Some(Observation { spec: spec.clone(), at: observed_at });
        let holder = spec.holder_identity.as_deref().unwrap_or_default();
        let is_ours = holder == self.identity;
        if !is_ours {
            self.renewed_at = None;
        }
        if !is_ours && !holder.is_empty() && now.saturating_duration_since(observed_at) < EXPIRES_AFTER {
            return None;
        }
        let transitions = spec.lease_transitions.unwrap_or(0);
        let claimed = LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: Some(EXPIRES_AFTER.as_secs() as i32),
            acquire_time: if is_ours { spec.acquire_time } else { Some(MicroTime(wall)) },
            renew_time: Some(MicroTime(wall)),
            lease_transitions: Some(if is_ours { transitions } else { transitions.saturating_add(1) }),
            ..LeaseSpec::default()
        };
        let metadata = found.map(|lease| lease.metadata.clone()).unwrap_or_default();
        Some(Lease { metadata, spec: Some(claimed) })
    }

    /// The API server has accepted a write of ours that was sent at this moment.
    fn written(&mut self, lease: &Lease, sent: Instant) {
        self.renewed_at = Some(sent);
        self.observed = Some(Observation { spec: lease.spec.clone().unwrap_or_default(), at: sent });
    }

    /// The Lease without a holder, if this replica holds it.
    fn release(&mut self, found: &Lease) -> Option<Lease> {
        self.renewed_at = None;
        let spec = found.spec.as_ref().filter(|spec| spec.holder_identity.as_deref() == Some(&self.identity))?;
        let free = LeaseSpec { holder_identity: None, lease_duration_seconds: Some(1), ..spec.clone() };
        Some(Lease { metadata: found.metadata.clone(), spec: Some(free) })
    }

    /// The moment until which this replica leads, unless it renews.
    fn leads_until(&self) -> Option<Instant> {
        self.renewed_at.map(|at| at + RENEW_WITHIN)
    }

    fn is_leading(&self, now: Instant) -> bool {
        self.leads_until().is_some_and(|until| now < until)
    }
}

/// A name that no other process has: the pod's name and a random number.
pub(crate) fn identity(pod_name: Option<&str>) -> String {
    let random = RandomState::new().build_hasher().finish();
    format!("{}_{random:016x}", pod_name.unwrap_or("outside-a-pod"))
}

/// Takes part in the election until `end` is true, publishes in `leading` whether this replica leads, and frees
/// the Lease at the end.
pub(crate) async fn run(
    api: Api<Lease>,
    name: String,
    mut election: Election,
    leading: watch::Sender<bool>,
    mut end: watch::Receiver<bool>,
) {
    let mut failing = false;
    loop {
        let mut deadline = Instant::now() + ATTEMPT_TIMEOUT;
        if let Some(until) = election.leads_until().filter(|_| *leading.borrow()) {
            deadline = deadline.min(until);
        }
        let result = match tokio::time::timeout_at(deadline.into(), attempt(&api, &name, &mut election)).await {
            Ok(result) => result.map_err(|error| error.to_string()),
            Err(_) => Err("no answer in time".to_owned()),
        };
        match result {
            Ok(()) => failing = false,
            Err(error) if !std::mem::replace(&mut failing, true) => {
                tracing::warn!(lease = name, error, "cannot read or renew the lease; trying again");
            }
            Err(error) => tracing::debug!(lease = name, error, "cannot read or renew the lease"),
        }
        publish(&leading, &election);
        // A leader whose time ends before the next attempt stops at that moment.
        let mut next = Instant::now() + RETRY_EVERY;
        if let Some(until) = election.leads_until().filter(|_| *leading.borrow()) {
            next = next.min(until);
        }
        tokio::select! {
            () = tokio::time::sleep_until(next.into()) => publish(&leading, &election),
            _ = end.wait_for(|end| *end) => break,
        }
    }
    leading.send_replace(false);
    match tokio::time::timeout(ATTEMPT_TIMEOUT, release(&api, &name, &mut election)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!(%error, "the lease could not be freed: a standby waits until it expires"),
        Err(_) => tracing::warn!("the lease could not be freed in time: a standby waits until it expires"),
    }
}

fn publish(leading: &watch::Sender<bool>, election: &Election) {
    let now_leading = election.is_leading(Instant::now());
    leading.send_if_modified(|was| std::mem::replace(was, now_leading) != now_leading);
}

/// Reads the Lease and writes it if this replica may.
async fn attempt(api: &Api<Lease>, name: &str, election: &mut Election) -> kube::Result<()> {
    let found = api.get_opt(name).await?;
    let Some(mut wanted) = election.claim(found.as_ref(), Instant::now(), Timestamp::now()) else { return Ok(()) };
    let sent = Instant::now();
    let written = if found.is_some() {
        api.replace(name, &PostParams::default(), &wanted).await
    } else {
        wanted.metadata = ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() };
        api.create(&PostParams::default(), &wanted).await
    };
    match written {
        Ok(lease) => {
            election.written(&lease, sent);
            Ok(())
        }
        // Another replica was first: the next attempt reads what it wrote.
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
        Err(error) => Err(error),
    }
}

async fn release(api: &Api<Lease>, name: &str, election: &mut Election) -> kube::Result<()> {
    let Some(found) = api.get_opt(name).await? else { return Ok(()) };
    match election.release(&found) {
        Some(free) => api.replace(name, &PostParams::default(), &free).await.map(drop),
        None => Ok(()),
    }
}

#[cfg(test)]
#[path = "lease_tests.rs"]
mod tests;
