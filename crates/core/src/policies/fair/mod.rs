//! `fair`: equal shares, as a plain machine gives them. The papers call it NA and compare all other
//! rules with it.

use super::plain::PlainShare;
use super::{Group, Opinion, Share, Shares};
use crate::model::Share as Part;
use crate::plan::Reason;

pub(crate) const FAIR: PlainShare = PlainShare::new("fair", |_| Box::new(Fair));

/// The rule has no numbers and no memory.
struct Fair;

impl Share for Fair {
    fn share(&mut self, group: &Group<'_>) -> Shares {
        let neighbours = group.jobs.len().saturating_sub(1);
        let opinion = Opinion::of_cpu(Part::FULL, Reason::Fair { neighbours });
        Shares { opinions: vec![opinion; group.jobs.len()], wait: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::running;
    use crate::model::Time;
    use crate::plan::Target;

    #[test]
    fn every_job_may_use_all_that_the_others_leave() {
        let jobs = [running(1, 0), running(2, 0), running(3, 0)];
        let jobs: Vec<_> = jobs.iter().collect();
        let group = Group { now: Time::ZERO, jobs: &jobs, part: 1.0, changed: true };
        let shares = Fair.share(&group);
        assert_eq!(shares.wait, None);
        assert!(shares.opinions.iter().all(|o| o.limit == Target::FREE.limit));
        assert_eq!(shares.opinions[0].reason, Reason::Fair { neighbours: 2 });
    }
}
