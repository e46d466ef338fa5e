//! Somebody else writes the same values: another autoscaler, a person. We notice, stay away for a while, and say so, rather than fight.
//!
//! What we last wrote for a pod is remembered here only; a manager that starts anew takes what it finds as agreed.

use gainshare_kube_api::resize::Resources;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

const FIRST_REST: Duration = Duration::from_secs(60);
/// Each further time doubles the rest, up to this many doublings: about an hour.
const MOST_DOUBLINGS: u32 = 6;

#[derive(Debug, Default)]
pub(crate) struct Contests {
    pods: BTreeMap<String, Contest>,
}

#[derive(Debug)]
struct Contest {
    set: Resources,
    times: u32,
    rest_until: Option<Instant>,
}

impl Contests {
    /// We have just written this.
    pub(crate) fn wrote(&mut self, uid: &str, now: Resources) {
        let contest = self.pods.entry(uid.to_owned()).or_insert(Contest { set: now, times: 0, rest_until: None });
        contest.set = now;
    }

    /// Why the pod should be left alone now, if it should.
    pub(crate) fn judge(&mut self, uid: &str, now: &Resources, at: Instant) -> Result<(), String> {
        let Some(contest) = self.pods.get_mut(uid) else { return Ok(()) };
        if contest.set.requests.cpu_milli != now.requests.cpu_milli
            || contest.set.limits.cpu_milli != now.limits.cpu_milli
        {
            contest.rest_until = Some(at + FIRST_REST * 2u32.pow(contest.times.min(MOST_DOUBLINGS)));
            contest.times = contest.times.saturating_add(1);
            contest.set = *now;
        }
        match contest.rest_until {
            Some(until) if until > at => Err(format!(
                "something else has changed this pod's CPU (another autoscaler?): it is left alone for {} s; keep one of the two away from it",
                (until - at).as_secs().max(1)
            )),
            _ => Ok(()),
        }
    }

    /// Whether the pod is left alone at this time.
    pub(crate) fn rests(&self, uid: &str, at: Instant) -> bool {
        self.pods.get(uid).and_then(|contest| contest.rest_until).is_some_and(|until| until > at)
    }

    /// The pod has its own values again: what we wrote before is no measure any more.
    pub(crate) fn forget(&mut self, uid: &str) {
        self.pods.remove(uid);
    }

    /// Forgets pods that are no longer there.
    pub(crate) fn keep(&mut self, alive: impl Fn(&str) -> bool) {
        self.pods.retain(|uid, _| alive(uid));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gainshare_kube_api::resize::Amounts;

    fn cpu(milli: u64) -> Resources {
        Resources { requests: Amounts { cpu_milli: Some(milli), memory_bytes: None }, limits: Amounts::default() }
    }

    #[test]
    fn we_do_not_fight() {
        let (mut contests, start) = (Contests::default(), Instant::now());
        assert!(contests.judge("a", &cpu(500), start).is_ok(), "what we never wrote is nobody's contest");
        contests.wrote("a", cpu(300));
        assert!(contests.judge("a", &cpu(300), start).is_ok());
        let why = contests.judge("a", &cpu(500), start).unwrap_err();
        assert!(why.contains("left alone for 60 s"), "{why}");
        assert!(contests.judge("a", &cpu(500), start + FIRST_REST / 2).is_err());
        assert!(contests.judge("a", &cpu(500), start + FIRST_REST).is_ok(), "after the rest we try again");
        contests.wrote("a", cpu(300));
        assert!(contests.judge("a", &cpu(500), start).unwrap_err().contains("120 s"), "and rest longer the next time");
        contests.keep(|_| false);
        assert!(contests.judge("a", &cpu(500), start).is_ok());
    }
}
