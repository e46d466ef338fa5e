//! `order: deadline` and `scale: deadline`: jobs end by their deadlines with the least that is enough.
//!
//! **Problem.** A user gives a job a deadline and no resource request. The job should have the
//! smallest share that makes the deadline, no deadline should be promised that cannot be kept, and
//! jobs without a deadline should have all the rest. (The QoS framework for deep learning, IJCNN
//! 2019.)
//!
//! **Approach.** At each decision, for the jobs of one owner on one node:
//! 1. *Predict.* A job's pace ([`crate::signal::speed`]) and its steps left give the time it needs at
//!    any share, with a standard deviation; the rule plans [`Finish::caution`] deviations on the slow
//!    side. Of a job that is not measured yet earlier runs of its program say both ([`crate::signal::past`]). Without
//!    them it has an equal part, before jobs that will miss their deadlines, until it is measured.
//! 2. *Promise.* Promises already given are planned first. Then new ones are added in order of their
//!    deadlines as long as [`fill`] finds room for all; where there is none, the candidate that takes
//!    most of the node is left out, because that leaves room for the most others. A promise whose
//!    prediction turned out wrong is given up only if it cannot be kept, without any caution, with all that
//!    earlier promises leave. A job with a tolerance that cannot be promised its deadline is tried again with the
//!    tolerated lateness.
//!    *Unproven promises* rest on earlier runs alone. What jobs have shown themselves comes before them, and a
//!    promise counts from the moment at which the job's own reports confirm it: a wrong history costs no other promise.
//!    A job that is refused by its history has an equal part all the same until it shows its own speed.
//!    *Trials.* Of a job that has had only small shares it is not known how fast it is with larger ones. If
//!    caution alone keeps it from a plan, it is planned for at the speed that is expected. It is promised its deadline
//!    only when it was measured near the share that it needs; if it would have that share only later, it is probed
//!    ([`probe`]). No earlier promise has less for it.
//! 3. *Reserve.* A promised job has the least that makes its deadline, and [`Finish::reserve`] before it where there is
//!    room: what goes wrong in the last seconds can no longer be corrected. More is given at once; less
//!    only if it falls by more than [`Finish::give_back`], and half of the way each time, so that
//!    noise in the predictions does not move limits.
//! 4. *The rest* goes to jobs without a promise by the share rule. A job whose deadline cannot be met
//!    is one of them: its reason names the earliest possible end, it runs as best effort and takes nothing
//!    from a promise. If every job beside the promised ones is such a job, promised jobs run ahead of
//!    their deadlines instead, because that leaves room for deadlines to come.
//!
//! **Terms.** A *promise* is a deadline that the rule plans to keep. Shares are parts of the node,
//! times are seconds from now.
//!
//! **Properties** (tests of that name in `tests/deadline.rs`): `promises_fit_the_node`;
//! `a_promise_is_kept_before_a_new_one_is_made`;
//! `earlier_runs_that_mislead_by_a_factor_of_two_cost_no_promise_that_a_job_has_earned`;
//! `a_job_is_not_starved_because_earlier_runs_took_too_long`;
//! `a_job_that_cannot_meet_its_deadline_learns_that_and_starves_no_other_job`; `a_job_that_is_early_gives_back`;
//! `without_deadlines_the_share_rule_decides_alone`;
//! `a_deadline_is_promised_when_the_job_was_measured_near_the_share_that_it_needs`;
//! `a_share_that_is_needed_only_later_is_probed_at_once_if_no_deadline_suffers`.

mod admit;
mod fill;
mod moves;
mod nodes;
mod numbers;
mod order;
mod probe;

pub(crate) use moves::{MoveMemory, MoveRule};
pub use nodes::{LateJob, NodeKind, NodeNeed, Room, nodes_needed};
pub use numbers::{Admission, Finish};
pub(crate) use order::BY_DEADLINE;

use super::{Claim, Group, Reservations, Scale};
use crate::model::{JobId, Share, Span, Time};
use crate::plan::Reason;
use crate::view::{Deadline, JobView, View};
use admit::Candidate;
use fill::{Allocation, Free, Task, by_deadline, deal_spare, earliest_s, fill_free};
use probe::{PastProbe, Probe, Trial};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The rule with its numbers and its memory.
pub(crate) struct Rule<'a> {
    pub(crate) numbers: &'a Finish,
    pub(crate) memory: &'a mut Memory,
}

/// What the rule remembers between two runs.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Memory {
    promises: BTreeMap<JobId, Promise>,
    /// Jobs that were refused for good; only [`Admission::Final`] refuses so.
    #[serde(default)]
    declined: BTreeSet<JobId>,
}

/// A deadline that the rule plans to keep.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct Promise {
    since: Time,
    /// What is reserved for the job.
    least: f64,
    /// What the job has, which may be more.
    share: f64,
    /// The promise rests on earlier runs of the program: the job itself has shown nothing yet.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    is_unproven: bool,
    /// The deadline is planned for, but not promised yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    trial: Option<Trial>,
}

/// No promised job has less: it must go on reporting until it ends.
const LEAST_RESERVED: f64 = 0.005;

/// A job that made all its steps still saves and tidies up, and how much of a step is made is not known
/// exactly: this part of a step is added.
const EPILOGUE_STEPS: f64 = 0.2;

/// What a job that is planned for has.
struct Given {
    least: f64,
    share: f64,
    gave_back: bool,
    need: Allocation,
    probe: Option<Probe>,
}

/// The jobs of a group by what is known of them; places are those of the group.
#[derive(Default)]
struct Sorted<'a> {
    claims: Vec<Claim>,
    /// Jobs whose deadlines may be promised, and what each has to do.
    candidates: Vec<Candidate<'a>>,
    tasks: Vec<Task>,
    /// Jobs that have shown nothing yet.
    unmeasured: Vec<usize>,
    /// How many have a claim of their own on what promises leave.
    without_deadline: usize,
}

impl Scale for Rule<'_> {
    fn observe(&mut self, view: &View) {
        let lives = |id: &JobId| view.job(*id).is_some_and(|j| j.deadline.is_some());
        self.memory.promises.retain(|id, _| lives(id));
        self.memory.declined.retain(lives);
    }

    fn reserve(&mut self, group: &Group<'_>) -> Reservations {
        let Group { now, jobs, part, .. } = *group;
        let Sorted { mut claims, candidates, mut tasks, mut unmeasured, without_deadline } = self.sort(group);
        if candidates.is_empty() {
            self.memory.promises.retain(|id, _| !jobs.iter().any(|j| j.id == *id));
            return Reservations { claims, rest: part, wait: None };
        }
        let others = jobs.len() - candidates.len();
        let capacity = self.capacity(group, others > 0);
        let accepted = self.admit(&candidates, &mut tasks, capacity);
        let order = by_deadline(&tasks, accepted.iter().copied());
        let (needs, probe) = self.needs(now, &candidates, &tasks, &order, capacity);
        let reserved = self.damp(&candidates, &needs, probe, capacity);
        let sum: f64 = reserved.iter().map(|(_, r)| r.0).sum();

        for (i, c) in candidates.iter().enumerate().filter(|(i, _)| !accepted.contains(i)) {
            self.memory.promises.remove(&c.job.id);
            let why = cannot_meet(earliest_s(&tasks, &order, capacity, &tasks[i]));
            claims[c.place] = Claim::Rest { why: Some(why) };
            // Of a job that has shown nothing yet it is not certain that it must miss: it has its part until it has.
            if tasks[i].pace.is_guess {
                unmeasured.push(c.place);
            }
        }
        let hopeless = jobs.len() - accepted.len() - without_deadline - unmeasured.len();
        let free = part - sum;
        let small = if hopeless > 0 { self.numbers.hopeless * part } else { 0.0 };
        let small = if unmeasured.is_empty() { small } else { small.min(0.5 * free) };
        // The sooner the speed of such a job is known, the sooner its deadline can be promised. So it does not share
        // the rest with the jobs that have missed theirs.
        let equal = part / jobs.len() as f64;
        let each = equal.min((free - small) / (unmeasured.len() + without_deadline).max(1) as f64).max(0.0);
        for &place in &unmeasured {
            claims[place] = until_measured(claims[place], each.min(jobs[place].max.get()));
        }
        let sum = sum + each * unmeasured.len() as f64;
        // What jobs beside these get. Jobs that missed are no reason to hold promised jobs back.
        let rest = if without_deadline > 0 { part - sum } else { small.min(part - sum) };
        let dealt: Vec<(Task, f64)> = reserved.iter().map(|(i, r)| (tasks[*i], r.0)).collect();
        let dealt = deal_spare(&dealt, part - sum - rest);
        for (((i, (least, gave_back)), share), (_, need)) in reserved.into_iter().zip(dealt).zip(&needs) {
            let given = Given { least, share, gave_back, need: *need, probe: probe.filter(|p| p.task == i) };
            claims[candidates[i].place] = self.promise(now, &candidates[i], &tasks[i], given);
        }
        let unmeasured_s =
            unmeasured.iter().map(|&place| deadline_left_s(now, jobs[place])).filter(|left_s| *left_s > 0.0);
        let wait = self.wait(tasks.iter().map(|task| task.left_s).chain(unmeasured_s), probe);
        let rest = if others + candidates.len() > accepted.len() { rest.max(LEAST_RESERVED * part) } else { 0.0 };
        Reservations { claims, rest, wait: Some(wait) }
    }
}

/// Why a promised job has what it has.
fn kept(now: Time, c: &Candidate<'_>, task: &Task, least: f64, share: f64, gave_back: bool) -> Reason {
    let ends_s = task.steps / task.rate(share).max(f64::MIN_POSITIVE);
    // A deadline that only the tolerance can keep was moved back by it.
    let late_s = if task.left_s > deadline_left_s(now, c.job) { c.tolerance_s } else { 0.0 };
    let (least, spare_s) = (Share::clamped(least), (task.left_s - ends_s).max(0.0));
    if gave_back { Reason::Early { least, spare_s } } else { Reason::MeetsDeadline { least, spare_s, late_s } }
}

/// The claim of a job that has shown nothing yet.
fn until_measured(claim: Claim, share: f64) -> Claim {
    let why = match claim {
        Claim::Rest { why } => why,
        Claim::Reserved { reason, .. } => Some(reason),
    };
    let reason = why.unwrap_or(Reason::NotYetMeasured);
    Claim::Reserved { least: Share::ZERO, share: Share::clamped(share), reason }
}

fn cannot_meet(earliest_s: f64) -> Reason {
    Reason::CannotMeet { earliest_s: Some(earliest_s).filter(|s| s.is_finite()) }
}

fn deadline_left_s(now: Time, job: &JobView) -> f64 {
    job.deadline.map_or(0.0, |d| d.at.as_secs_f64() - now.as_secs_f64())
}

impl Rule<'_> {
    /// Sorts the jobs of a group by what is known of them.
    fn sort<'a>(&self, group: &Group<'a>) -> Sorted<'a> {
        let mut sorted = Sorted { claims: vec![Claim::Rest { why: None }; group.jobs.len()], ..Sorted::default() };
        for (place, job) in group.jobs.iter().copied().enumerate() {
            let Some(Deadline { tolerance, .. }) = job.deadline else {
                sorted.without_deadline += 1;
                continue;
            };
            let promised = self.memory.promises.get(&job.id).copied();
            let tolerance_s = tolerance.as_secs_f64();
            match self.task(group.now, job, promised, group.part) {
                Some(task) if task.left_s + tolerance_s > 0.0 => {
                    sorted.candidates.push(Candidate { place, job, tolerance_s, promised });
                    sorted.tasks.push(task);
                }
                Some(task) => {
                    let why = cannot_meet(task.steps / task.rate(task.cap));
                    sorted.claims[place] = Claim::Rest { why: Some(why) };
                }
                None if job.signal.pace.is_some() && job.steps_left().is_none() => {
                    sorted.without_deadline += 1;
                    sorted.claims[place] = Claim::Rest { why: Some(Reason::UnknownEnd) };
                }
                None => sorted.unmeasured.push(place),
            }
        }
        sorted
    }

    /// The part of the node that may be promised.
    fn capacity(&self, group: &Group<'_>, has_others: bool) -> f64 {
        // Every owner's floor is left out of what is promised: a job without a promise keeps its own.
        let floors: f64 = group.jobs.iter().map(|j| j.floor.get()).sum();
        let keep = if has_others { self.numbers.keep } else { self.numbers.keep_idle };
        (group.part - (keep * group.part).max(floors)).max(0.0)
    }

    /// What the tasks of `order` need now, and which of them is probed.
    fn needs(
        &self,
        now: Time,
        candidates: &[Candidate<'_>],
        tasks: &[Task],
        order: &[usize],
        capacity: f64,
    ) -> (Vec<(usize, Allocation)>, Option<Probe>) {
        let free = Free::new(capacity);
        let needs = self.fill_early(tasks, order, &free).unwrap_or_default();
        if !self.numbers.probes {
            return (needs, None);
        }
        let beside = |probe: &Probe| {
            let mut free = free.clone();
            free.lend(probe.share, probe.seconds);
            self.fill_early(tasks, order, &free)
        };
        match probe::choose(now, candidates, tasks, &needs, capacity, beside) {
            Some((needs, probe)) => (needs, Some(probe)),
            None => (needs, None),
        }
    }

    /// What each task needs to end in time, and where there is room, earlier by the reserve: all of it, or a part. A
    /// job keeps at least half of the time that it can wait.
    fn fill_early(&self, tasks: &[Task], order: &[usize], free: &Free) -> Option<Vec<(usize, Allocation)>> {
        let reserve_s = self.numbers.reserve.as_secs_f64();
        let early = |part: f64, task: &Task| {
            let slack_s = (task.left_s - task.steps / task.rate(task.cap)).max(0.0);
            Task { left_s: task.left_s - (part * reserve_s).min(0.5 * slack_s), ..*task }
        };
        let with =
            |part: f64| fill_free(&tasks.iter().map(|task| early(part, task)).collect::<Vec<_>>(), order, free.clone());
        [1.0, 0.5, 0.25].into_iter().find_map(with).or_else(|| fill_free(tasks, order, free.clone()))
    }

    /// Notes that a deadline is planned for, and promises it if the job has shown the speed that it needs.
    fn promise(&mut self, now: Time, c: &Candidate<'_>, task: &Task, given: Given) -> Claim {
        let Given { least, share, gave_back, need, probe } = given;
        let is_unproven = task.pace.is_guess;
        let trial = self.trial(c, task, &need, probe);
        // A promise counts from the moment at which the job's own reports confirm it.
        let is_same = |p: &Promise| p.is_unproven == is_unproven && p.trial.is_some() == trial.is_some();
        let since = c.promised.filter(is_same).map_or(now, |p| p.since);
        self.memory.promises.insert(c.job.id, Promise { since, least, share, is_unproven, trial });
        let reason = match trial {
            Some(trial) => Reason::Probes { needs: Share::clamped(trial.needs), seen: Share::clamped(task.pace.seen) },
            None => kept(now, c, task, least, share, gave_back),
        };
        Claim::Reserved { least: Share::clamped(least), share: Share::clamped(share), reason }
    }

    /// When the rule looks again: the sooner, the nearer the next deadline is, also that of a job which may be measured
    /// by then, and soon while a job is probed.
    fn wait(&self, left_s: impl Iterator<Item = f64>, probe: Option<Probe>) -> Span {
        let soonest = left_s.map(|left_s| left_s.max(0.0)).fold(f64::INFINITY, f64::min);
        let wait = Span::from_secs_f64((self.numbers.look * soonest).max(0.0));
        let wait = probe.map_or(wait, |p| wait.min(Span::from_secs_f64(0.5 * p.seconds)));
        wait.clamp(self.numbers.shortest_look, self.numbers.longest_look)
    }

    /// Whether a job that is planned for still has to show its speed with the share that it needs.
    fn trial(&self, c: &Candidate<'_>, task: &Task, need: &Allocation, probe: Option<Probe>) -> Option<Trial> {
        let is_kept = c.promised.is_some_and(|p| p.trial.is_none());
        if !self.numbers.probes || is_kept || task.has_shown(need.most) {
            return None;
        }
        let tried = c.promised.and_then(|p| p.trial).and_then(|t| t.tried);
        let tried = probe.map(|p| PastProbe { since: p.since, share: p.share }).or(tried);
        Some(Trial { needs: need.most, tried })
    }

    /// What is known of a job, if enough is.
    fn task(&self, now: Time, job: &JobView, promised: Option<Promise>, part: f64) -> Option<Task> {
        let (steps, pace) = (job.steps_left()?, job.signal.pace?);
        let caution = self.numbers.caution;
        let share = promised.map_or(0.5 * part, |p| p.share);
        // A part of the next step is made already.
        let since_report = job.signal.last.map_or(0.0, |l| now.since(l.at).as_secs_f64());
        let made = (since_report / pace.step_s(share)).min(0.9);
        let wide = steps.mid + (steps.high - steps.mid) * caution.min(1.0);
        Some(Task {
            pace,
            steps: (wide - made).max(0.0) + EPILOGUE_STEPS,
            left_s: (1.0 - self.numbers.margin) * deadline_left_s(now, job),
            cap: (pace.usable * self.numbers.room).min(job.max.get()).min(part),
            caution,
        })
    }

    /// What is reserved for each promised task, and whether it gave something back: never less than
    /// it needs, and not much less than it had.
    fn damp(
        &self,
        candidates: &[Candidate<'_>],
        needs: &[(usize, Allocation)],
        probe: Option<Probe>,
        capacity: f64,
    ) -> Vec<(usize, (f64, bool))> {
        let wanted: Vec<(usize, f64, f64, bool)> = needs
            .iter()
            .map(|&(i, need)| {
                let job = candidates[i].job;
                let probed = probe.filter(|p| p.task == i).map_or(0.0, |p| p.share);
                let need = need.now.max(probed).max(LEAST_RESERVED).max(job.floor.get()).min(job.max.get());
                let had = candidates[i].promised.map_or(need, |p| p.least.min(job.max.get()));
                let falls = need < had * (1.0 - self.numbers.give_back);
                let least = if falls { 0.5 * (need + had) } else { need.max(had) };
                (i, need, least.max(need), falls)
            })
            .collect();
        let (needed, damped) = wanted.iter().fold((0.0, 0.0), |(n, d), w| (n + w.1, d + w.2));
        // What damping holds back may not cost another job its promise.
        let keep = if damped > capacity && damped > needed {
            ((capacity - needed) / (damped - needed)).clamp(0.0, 1.0)
        } else {
            1.0
        };
        let cut = if needed > capacity && needed > 0.0 { capacity / needed } else { 1.0 };
        wanted.into_iter().map(|(i, need, least, falls)| (i, ((need + keep * (least - need)) * cut, falls))).collect()
    }
}
