//! `young`: a job gets twice the share while it is younger than a minute.
//!
//! **Problem.** Short jobs should not wait behind long ones, but how long a job will take is not
//! known when it starts.
//!
//! **Rule.** A young job weighs two, any other job one; shares are in proportion to the weights.

use super::plain::PlainShare;
use super::{Group, Opinion, Share, Shares};
use crate::model::{Share as Part, Span};
use crate::plan::Reason;
use crate::view::JobView;

/// A job is young for this long after its arrival.
const YOUNG: Span = Span::from_secs(60);

/// The weights change with time, so the rule wants to be asked again.
const INTERVAL: Span = Span::from_secs(5);

/// The rule, for the row of the table.
pub(crate) const RULE: PlainShare = PlainShare::new("young", |_| Box::new(Young));

/// The rule has no memory.
struct Young;

impl Share for Young {
    fn share(&mut self, group: &Group<'_>) -> Shares {
        let weight = |job: &JobView| if group.now.since(job.arrived) < YOUNG { 2.0 } else { 1.0 };
        let total: f64 = group.jobs.iter().map(|job| weight(job)).sum();
        let opinion = |job: &&JobView| {
            let part = Part::clamped(weight(job) / total);
            Opinion::of_cpu(part, Reason::Portion { part })
        };
        Shares { opinions: group.jobs.iter().map(opinion).collect(), wait: Some(INTERVAL) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::running;
    use crate::model::Time;

    #[test]
    fn a_young_job_gets_twice_as_much() {
        let (old, mut new) = (running(1, 0), running(2, 0));
        new.arrived = Time::from_secs_f64(50.0);
        let jobs = [&old, &new];
        let group = Group { now: Time::from_secs_f64(70.0), jobs: &jobs, part: 1.0, changed: true };
        let shares = Young.share(&group);
        let got: Vec<f64> = shares.opinions.iter().map(|o| o.limit.cpu.get()).collect();
        assert_eq!(got, [1.0 / 3.0, 2.0 / 3.0]);
    }
}
