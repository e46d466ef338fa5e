//! FlowCon's Algorithm 1 and 2: shares follow growth efficiency.
//!
//! **Source.** W. Zheng et al., "FlowCon: Elastic Flow Configuration for Containerized Deep
//! Learning Applications", ICPP 2019, and the thesis that extends it.
//!
//! **Terms.** Each job is in one of three lists, here its [`Category`]: growing (NL), watching
//! (WL), converged (CL). `G_r` is its growth efficiency for resource `r` since the previous run; α
//! a threshold; β a floor's divisor; `n` the jobs of the group.
//!
//! **Algorithm.** `G < α` moves a job from growing to watching, and from watching to converged; `G
//! ≥ α` brings it back to growing. Then, if every job has converged, every limit is 1 (free
//! competition) and the interval doubles. Otherwise, for each resource: converged jobs get
//! `max(G/ΣG, 1/(β·n))`, watching ones keep what they have, growing ones get `G/ΣG`. A job not yet
//! measured has limit 1, which is all the growth there is: until it is measured, converged jobs
//! keep only their floor (the thesis reports exactly that split, 0.25 against 1, at the launch of
//! its second job). A job that comes or goes resets the interval and runs the algorithm at once
//! (Algorithm 2); that is seen by comparing sets, so that one job replacing another is noticed.
//!
//! **Where the paper is silent.** A job that has not reported since the previous run keeps its
//! growth and its list: the paper would read its growth as zero and squeeze every job whose epochs
//! are longer than the interval. A job that never reports, or fell silent for far longer than it
//! ever was, gets an equal part. A resource a job does not use is not limited for it.

use super::error::PolicyError;
use super::{Group, Opinion, Share as ShareRule, Shares, Silence};
use crate::model::{JobId, NodeId, OwnerId, PerResource, Resource, Share, Span, Time};
use crate::plan::{Reason, Target};
use crate::signal::{Category, Normalisation, growth_efficiency};
use crate::view::{JobView, Phase, View};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The numbers of FlowCon's Algorithm 1.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Flowcon {
    /// α: growth efficiency below it counts as "no longer growing".
    pub alpha: f64,
    /// β: a converged job keeps at least 1/(β·n) of a node with n jobs.
    pub beta: f64,
    /// The first interval between two runs; doubled each time every job has converged.
    pub interval: Span,
    /// Back-off ends here, so that a long quiet spell cannot put the next run off for ever.
    pub longest_interval: Span,
    pub normalisation: Normalisation,
    /// The resource whose growth efficiency is compared with α.
    pub judged_by: Resource,
}

impl Default for Flowcon {
    /// α = 5 %, every 20 s, β = 2: the thesis's middle setting.
    fn default() -> Self {
        Flowcon {
            alpha: 0.05,
            beta: 2.0,
            interval: Span::from_secs(20),
            longest_interval: Span::from_secs(20 * 64),
            normalisation: Normalisation::Relative,
            judged_by: Resource::Cpu,
        }
    }
}

impl Flowcon {
    pub(crate) fn validate(&self) -> Result<(), PolicyError> {
        if !(self.alpha.is_finite() && self.alpha >= 0.0) {
            return Err(PolicyError::Alpha(self.alpha));
        }
        if !(self.beta.is_finite() && self.beta >= 1.0) {
            return Err(PolicyError::Beta(self.beta));
        }
        if self.interval == Span::ZERO { Err(PolicyError::Interval) } else { Ok(()) }
    }
}

/// The rule with its numbers and its memory.
pub(crate) struct Rule<'a> {
    pub(crate) numbers: &'a Flowcon,
    pub(crate) silence: Silence,
    pub(crate) memory: &'a mut Memory,
}

impl ShareRule for Rule<'_> {
    fn observe(&mut self, view: &View) {
        self.memory.forget_groups_without_jobs(view);
    }

    fn share(&mut self, group: &Group<'_>) -> Shares {
        let Group { now, jobs, changed, .. } = *group;
        let memory = self.memory.group(jobs[0]);
        let (opinions, wait) = run(self.numbers, self.silence, now, jobs, changed, memory);
        Shares { opinions, wait: Some(wait) }
    }
}

/// What the algorithm remembers between two runs: of each group, by node and owner.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Memory {
    groups: BTreeMap<NodeId, BTreeMap<OwnerId, GroupMemory>>,
}

impl Memory {
    /// The memory of the group to which a running job belongs.
    fn group(&mut self, job: &JobView) -> &mut GroupMemory {
        let node = job.node().expect("shares are decided for running jobs only");
        self.groups.entry(node).or_default().entry(job.owner).or_default()
    }

    fn forget_groups_without_jobs(&mut self, view: &View) {
        let groups: BTreeSet<_> = view.jobs.iter().filter_map(|job| Some((job.node()?, job.owner))).collect();
        self.groups.retain(|node, owners| {
            owners.retain(|owner, _| groups.contains(&(*node, *owner)));
            !owners.is_empty()
        });
    }
}

/// What the algorithm remembers of one group.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
struct GroupMemory {
    /// The interval after back-off; zero before the first run.
    interval: Span,
    jobs: BTreeMap<JobId, FlowconJob>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct FlowconJob {
    category: Category,
    growth: PerResource<Option<f64>>,
    limit: PerResource<Share>,
    /// The last run at which the job had something new to say.
    seen: Option<Snapshot>,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct Snapshot {
    reports: u64,
    value: f64,
    reported_at: Time,
    run_at: Time,
    #[serde(rename = "consumed")]
    consumed_node_s: PerResource<f64>,
}

impl Default for FlowconJob {
    fn default() -> Self {
        FlowconJob {
            category: Category::Growing,
            growth: PerResource::default(),
            limit: Target::FREE.limit,
            seen: None,
        }
    }
}

impl FlowconJob {
    fn is_new(&self, rule: &Flowcon) -> bool {
        self.growth.get(rule.judged_by).is_none()
    }
}

/// Why a job's growth is not to be trusted.
enum MissingSignal {
    NoSignal(Span),
    Stale(Span),
}

/// Runs the algorithm once over one group, sorted by id. `changed`: a job came or went since the
/// last run. Returns one opinion for each job, in the same order, and how long to wait until the
/// next run.
fn run(
    rule: &Flowcon,
    silence: Silence,
    now: Time,
    jobs: &[&JobView],
    changed: bool,
    memory: &mut GroupMemory,
) -> (Vec<Opinion>, Span) {
    memory.jobs.retain(|id, _| jobs.binary_search_by_key(id, |j| j.id).is_ok());
    if memory.jobs.len() < jobs.len() {
        for view in jobs {
            memory.jobs.entry(view.id).or_default();
        }
    }
    if changed || memory.interval == Span::ZERO {
        memory.interval = rule.interval;
    }
    // Both are sorted by id and hold the same ids, so that they can be walked side by side.
    let mut states: Vec<&mut FlowconJob> = memory.jobs.values_mut().collect();
    let doubts: Vec<Option<MissingSignal>> = jobs
        .iter()
        .zip(states.iter_mut())
        .map(|(view, job)| {
            let measured = measure(rule, now, view, job);
            let doubt = doubt(silence, rule, now, view);
            if measured && doubt.is_none() {
                let growing = job.growth.get(rule.judged_by).is_some_and(|g| g >= rule.alpha);
                job.category = match (growing, job.category) {
                    (true, _) => Category::Growing,
                    (false, Category::Growing) => Category::Watching,
                    (false, Category::Watching | Category::Converged) => Category::Converged,
                };
            }
            doubt
        })
        .collect();

    let n = jobs.len();
    let converged = |i: usize| doubts[i].is_some() || states[i].category == Category::Converged;
    if n > 0 && (0..n).all(converged) && doubts.iter().any(Option::is_none) {
        let interval = Span((memory.interval.0.saturating_mul(2)).min(rule.longest_interval.0.max(rule.interval.0)));
        memory.interval = interval;
        let opinions = states.into_iter().map(|job| {
            job.limit = Target::FREE.limit;
            opinion(job, Reason::AllConverged { next_look: interval })
        });
        return (opinions.collect(), interval);
    }

    let trusted = || states.iter().zip(&doubts).filter(|(_, d)| d.is_none()).map(|(job, _)| job);
    let sum = PerResource::from_fn(|r| trusted().filter_map(|job| *job.growth.get(r)).sum::<f64>());
    let newcomer = trusted().any(|job| job.is_new(rule));
    let floor = Share::clamped(1.0 / (rule.beta * n as f64));
    let opinions = states.into_iter().zip(&doubts).map(|(job, doubt)| {
        let reason = match doubt {
            Some(doubt) => {
                job.limit = PerResource::from_fn(|_| Share::equal(n));
                match *doubt {
                    MissingSignal::NoSignal(waited) => Reason::NoSignal { waited },
                    MissingSignal::Stale(silent) => Reason::StaleSignal { silent },
                }
            }
            None => limit(rule, job, &sum, floor, newcomer),
        };
        opinion(job, reason)
    });
    (opinions.collect(), memory.interval)
}

fn opinion(job: &FlowconJob, reason: Reason) -> Opinion {
    Opinion { limit: job.limit, growth: job.growth, category: job.category, reason }
}

/// Measures growth since the last run at which the job had something new to say. `false`: nothing
/// new, or nothing to compare with.
fn measure(rule: &Flowcon, now: Time, view: &JobView, job: &mut FlowconJob) -> bool {
    let Some(last) = view.signal.last else { return false };
    let seen = Snapshot {
        reports: view.signal.reports,
        value: last.value,
        reported_at: last.at,
        run_at: now,
        consumed_node_s: view.consumed_node_s,
    };
    // Counters that fell belong to another attempt: start over instead of measuring across a
    // restart.
    let before = job.seen.filter(|b| b.reports <= seen.reports && b.consumed_node_s.cpu <= seen.consumed_node_s.cpu);
    let Some(before) = before else {
        job.seen = Some(seen);
        return false;
    };
    let (between_reports, between_runs) = (last.at.since(before.reported_at), now.since(before.run_at));
    if seen.reports == before.reports || between_reports == Span::ZERO || between_runs == Span::ZERO {
        return false;
    }
    let change = (last.value - before.value).abs() / view.signal.scale(rule.normalisation);
    let progress_per_second = change / between_reports.as_secs_f64();
    let used = PerResource::from_fn(|r| view.consumed_node_s.get(r) - before.consumed_node_s.get(r));
    job.growth = growth_efficiency(progress_per_second, used, between_runs);
    job.seen = Some(seen);
    job.growth.get(rule.judged_by).is_some()
}

fn doubt(silence: Silence, rule: &Flowcon, now: Time, view: &JobView) -> Option<MissingSignal> {
    let Phase::Running { since, .. } = view.phase else { return None };
    match view.signal.last {
        None => Some(now.since(since)).filter(|w| *w > silence.patience).map(MissingSignal::NoSignal),
        Some(last) => {
            let silent = now.since(last.at);
            let usual = view.signal.longest_gap.max(rule.interval).as_secs_f64();
            (silent > silence.patience && silent.as_secs_f64() > silence.factor * usual)
                .then_some(MissingSignal::Stale(silent))
        }
    }
}

/// Sets the limits of a job whose signal is sound, and says why.
fn limit(rule: &Flowcon, job: &mut FlowconJob, sum: &PerResource<f64>, floor: Share, newcomer: bool) -> Reason {
    let Some(growth) = *job.growth.get(rule.judged_by) else {
        job.limit = Target::FREE.limit;
        return Reason::NotYetMeasured;
    };
    let part = |r: Resource| {
        job.growth.get(r).map(|g| if *sum.get(r) > 0.0 { Share::clamped(g / sum.get(r)) } else { Share::ZERO })
    };
    match job.category {
        Category::Growing => {
            job.limit = PerResource::from_fn(|r| part(r).unwrap_or(Share::FULL));
            Reason::Growing { growth, total: *sum.get(rule.judged_by) }
        }
        Category::Watching => Reason::Watching { growth, threshold: rule.alpha },
        Category::Converged => {
            // A newcomer with limit 1 claims all growth until it is measured.
            let keep = |p: Share| if newcomer || p < floor { floor } else { p };
            job.limit = PerResource::from_fn(|r| part(r).map_or(Share::FULL, keep));
            Reason::Converged { growth, threshold: rule.alpha, floor }
        }
    }
}
