//! Another program (an autoscaler), or a person, writes the same values. The operator notices that,
//! leaves the pod alone for a while, and publishes why, instead of writing against the other.
//!
//! What the operator last wrote for a pod is remembered here only; an operator that has just
//! started accepts the values it finds.
//!
//! **Lost answers.** The intention of a resize is recorded before the request. If the answer is
//! lost (a timeout, a node agent that hung up), the write may or may not have happened. A value
//! that matches the intention is then our own, not another program's.

use gainshare_core::backoff::Backoff;
use gainshare_kube_api::names::PodUid;
use gainshare_kube_api::resources::Resources;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long a pod is left alone: a minute at first, and about an hour after some times.
const RESTS: Backoff = Backoff::new(Duration::from_secs(60), Duration::from_secs(64 * 60));
/// The number of lost answers of one pod that are remembered.
const MOST_UNANSWERED: usize = 8;

/// Another program or a person has written the pod's CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "something else has changed this pod's CPU (another autoscaler?): it is left alone for {rest_s} s; keep one of the two away from it"
)]
pub(crate) struct ContestError {
    rest_s: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Contests {
    pods: BTreeMap<PodUid, Contest>,
}

#[derive(Debug)]
struct Contest {
    /// What we last wrote, or accepted.
    set: Resources,
    /// What requests whose answers we do not have would have written, the newest last.
    unanswered: Vec<Resources>,
    rests: Backoff,
    rest_until: Option<Instant>,
}

impl Contest {
    fn new(now: Resources) -> Contest {
        Contest { set: now, unanswered: Vec::new(), rests: RESTS, rest_until: None }
    }

    fn accept(&mut self, now: Resources) {
        self.set = now;
        self.unanswered.clear();
    }
}

impl Contests {
    /// A request is about to be sent that changes the pod from `now` to `to`.
    pub(crate) fn intend(&mut self, uid: &PodUid, now: Resources, to: Resources) {
        let unanswered = &mut self.pods.entry(uid.clone()).or_insert(Contest::new(now)).unanswered;
        unanswered.push(to.over(now));
        let surplus = unanswered.len().saturating_sub(MOST_UNANSWERED);
        unanswered.drain(..surplus);
    }

    /// The API server refused the newest request: it changed nothing. An older one may still have had its effect.
    pub(crate) fn withdraw(&mut self, uid: &PodUid) {
        if let Some(contest) = self.pods.get_mut(uid) {
            contest.unanswered.pop();
        }
    }

    /// The API server answered that it has written this.
    pub(crate) fn confirm(&mut self, uid: &PodUid, now: Resources) {
        self.pods.entry(uid.clone()).or_insert(Contest::new(now)).accept(now);
    }

    /// An error if the pod is to be left alone now.
    pub(crate) fn check(&mut self, uid: &PodUid, now: &Resources, at: Instant) -> Result<(), ContestError> {
        let Some(contest) = self.pods.get_mut(uid) else { return Ok(()) };
        let same_cpu = |ours: &Resources| {
            ours.requests.cpu_milli == now.requests.cpu_milli && ours.limits.cpu_milli == now.limits.cpu_milli
        };
        if contest.unanswered.iter().any(same_cpu) {
            contest.accept(*now);
        }
        if !same_cpu(&contest.set) {
            contest.rest_until = Some(at + contest.rests.next_pause());
            contest.accept(*now);
        }
        match contest.rest_until {
            Some(until) if until > at => Err(ContestError { rest_s: (until - at).as_secs().max(1) }),
            _ => Ok(()),
        }
    }

    /// Whether the pod is left alone at this time.
    pub(crate) fn is_resting(&self, uid: &PodUid, at: Instant) -> bool {
        self.pods.get(uid).and_then(|contest| contest.rest_until).is_some_and(|until| until > at)
    }

    /// The pod has its own values again: what the operator wrote before does not count any more.
    pub(crate) fn forget(&mut self, uid: &PodUid) {
        self.pods.remove(uid);
    }

    /// Forgets pods that are no longer there.
    pub(crate) fn keep(&mut self, alive: impl Fn(&PodUid) -> bool) {
        self.pods.retain(|uid, _| alive(uid));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gainshare_kube_api::resources::Amounts;

    fn cpu(milli: u64) -> Resources {
        Resources { requests: Amounts { cpu_milli: Some(milli), memory_bytes: None }, limits: Amounts::default() }
    }

    #[test]
    fn we_do_not_fight() {
        let (mut contests, start) = (Contests::default(), Instant::now());
        assert!(contests.check(&"a".into(), &cpu(500), start).is_ok(), "a value that we never wrote is not contested");
        contests.confirm(&"a".into(), cpu(300));
        assert!(contests.check(&"a".into(), &cpu(300), start).is_ok());
        let why = contests.check(&"a".into(), &cpu(500), start).unwrap_err().to_string();
        assert!(why.contains("left alone for 60 s"), "{why}");
        assert!(contests.check(&"a".into(), &cpu(500), start + RESTS.pause_after(1) / 2).is_err());
        assert!(
            contests.check(&"a".into(), &cpu(500), start + RESTS.pause_after(1)).is_ok(),
            "after the rest we try again"
        );
        contests.confirm(&"a".into(), cpu(300));
        let again = contests.check(&"a".into(), &cpu(500), start);
        assert_eq!(again, Err(ContestError { rest_s: 120 }), "and rest longer the next time");
        contests.keep(|_| false);
        assert!(contests.check(&"a".into(), &cpu(500), start).is_ok());
    }

    #[test]
    fn a_resize_whose_answer_was_lost_is_not_taken_for_anothers() {
        let (mut contests, start) = (Contests::default(), Instant::now());
        contests.confirm(&"a".into(), cpu(300));
        contests.intend(&"a".into(), cpu(300), cpu(450));
        assert!(contests.check(&"a".into(), &cpu(300), start).is_ok(), "the write did not happen");
        assert!(contests.check(&"a".into(), &cpu(450), start).is_ok(), "the write happened, and its answer was lost");
        assert!(
            contests.check(&"a".into(), &cpu(300), start).is_err(),
            "the intention is used up: this is another program"
        );
        // The first write had its effect late: the second was refused because of it.
        contests.confirm(&"d".into(), cpu(300));
        contests.intend(&"d".into(), cpu(300), cpu(450));
        contests.intend(&"d".into(), cpu(300), cpu(600));
        contests.withdraw(&"d".into());
        assert!(contests.check(&"d".into(), &cpu(450), start).is_ok());
        // The first write of a pod.
        contests.intend(&"b".into(), cpu(500), cpu(200));
        assert!(contests.check(&"b".into(), &cpu(200), start).is_ok());
        // A write that the API server refused explains nothing.
        contests.confirm(&"c".into(), cpu(300));
        contests.intend(&"c".into(), cpu(300), cpu(450));
        contests.withdraw(&"c".into());
        assert!(contests.check(&"c".into(), &cpu(450), start).is_err());
    }
}
