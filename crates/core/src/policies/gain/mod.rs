//! Our own rule: the node goes where a unit of it gains most, and no job ends later than with equal
//! shares.
//!
//! **Problem.** The mean completion time is least when the job with the least work left goes first.
//! But the work left is not known, the longest job would starve, and a wrong guess would let one
//! job hold the node for ever.
//!
//! **Approach.** (`docs/gain-policy.md` has the whole story.)
//! 1. *Work left* is predicted from what the job itself reports: steps of a total; else its curve,
//!    since people train some time past the point where it flattens ([`Gain::past_flat`]); and
//!    never less than a part of what it has consumed ([`Gain::past_age`]), because the older a job
//!    is, the longer it is likely to last.
//! 2. *Gain per unit*: finishing a job is worth 1, the part of its improvement still to come is
//!    worth [`Gain::quality`] more; both divided by the work left. Jobs are served in this order,
//!    each as much as it can use.
//! 3. *Guard*: a world that shares equally is simulated beside the real one ([`world`]). When it
//!    would end a job is that job's deadline. A job may go out of deadline order only while every
//!    deadline before its own can still be kept; otherwise deadlines decide. Serving in deadline
//!    order ends no job later than equal sharing does (E. Friedman and S. Henderson, "Fairness and
//!    efficiency in web server protocols", SIGMETRICS 2003), and arrivals only push the deadlines
//!    of others back: with true predictions no job loses.
//! 4. *When in doubt* (no report yet, none for long) a job gets an equal part, the same as in the
//!    fair world.
//! 5. Each job keeps a small part of an equal share, so that it goes on reporting; a job that is
//!    being served stays unless another one is better by more than [`Gain::switch`].
//!
//! **Terms.** Work and service are node-seconds of CPU. All times derive from the jobs' own; there
//! is no threshold in seconds.

mod disturbance;
mod machine;
mod moves;
mod numbers;
mod world;

pub(crate) use moves::MoveRule;
pub use numbers::{Gain, GainMove};

use super::{Group, Homes, Opinion, Prediction, Share as ShareRule, Shares, Silence, Stake};
use crate::model::{JobId, NodeId, PerResource, Share, Span, Time};
use crate::plan::Reason;
use crate::signal::Category;
use crate::signal::predict::FLAT;
use crate::view::{JobView, Phase, View};
use disturbance::{Company, Disturbance};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use world::{FairWorld, Observation};

/// The rule with its numbers and its memory.
pub(crate) struct Rule<'a> {
    pub(crate) numbers: &'a Gain,
    pub(crate) silence: Silence,
    pub(crate) memory: &'a mut Memory,
}

impl ShareRule for Rule<'_> {
    fn observe(&mut self, view: &View) {
        observe(self.numbers, view, self.memory);
    }

    fn share(&mut self, group: &Group<'_>) -> Shares {
        let Group { now, jobs, part, .. } = *group;
        let (opinions, wait) = run(self.numbers, self.silence, now, jobs, part, self.memory);
        Shares { opinions, wait: Some(wait) }
    }

    fn stake(&self, job: JobId) -> Option<Stake> {
        self.memory.stake(job)
    }

    fn homes(&mut self) -> Option<&mut dyn Homes> {
        Some(&mut self.memory.fair)
    }
}

/// What the rule remembers between two runs.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Memory {
    at: Time,
    jobs: BTreeMap<JobId, Job>,
    /// Counters of unused CPU at the last run.
    #[serde(default)]
    idle: BTreeMap<NodeId, f64>,
    fair: FairWorld,
    #[serde(default)]
    disturbance: Disturbance,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct Job {
    node: NodeId,
    /// CPU counter at the last run.
    counter: f64,
    /// Consumed when it came to this node, and the step it had reached; what a step cost before, in
    /// node-seconds of this node.
    joined_with: f64,
    joined_at_step: f64,
    before: Option<f64>,
    /// Whether it came here in the midst of a step, the rest of which says nothing of what a step
    /// costs.
    midst: bool,
    /// Consumed at the last run and since the run before it, less what neighbours made it lose.
    consumed: f64,
    newly: f64,
    company: Company,
    /// Consumed when the newest report seen was made, and the reports and the step at that moment.
    reported_with: f64,
    reports: u64,
    step: f64,
    /// Used since the last measurement of what it can use; granted meanwhile; and for how long.
    /// Time on the floor does not count: it shows nothing.
    used: f64,
    granted: f64,
    granted_s: f64,
    /// The largest part of the node it can use, as far as is known.
    usable: f64,
    /// The least number of steps it ever claimed to be all.
    least_total: Option<u64>,
    /// Its share since the last run, and whether that was little more than the floor.
    share: f64,
    throttled: bool,
    left: Option<f64>,
}

/// Use below this part of what was granted means that the job cannot use more.
const UNUSED: f64 = 0.9;

/// Below this part of idle CPU the rule cannot tell "could not use more" from "was crowded out", so
/// `usable` is not lowered. Overestimating it costs at most this part of the node.
const SPARE: f64 = 0.1;

/// A job is granted a little more than it was seen to use, so that growing demand shows.
const ROOM: f64 = 1.25;

/// Use above this part of what a job was thought able to use shows that it was underestimated.
const MORE: f64 = 1.1;

/// No job is believed to be unable to use this much: a pause for a checkpoint must not look like a
/// small job.
const LEAST_USABLE: f64 = 0.02;

/// A job that has made all its steps still saves and tidies up: this part of all it consumed.
const EPILOGUE: f64 = 0.01;

impl Job {
    fn new(view: &JobView, node: NodeId) -> Job {
        let step = position(view);
        Job {
            node,
            counter: view.consumed.cpu,
            joined_with: view.consumed.cpu,
            joined_at_step: step,
            before: None,
            midst: view.signal.reports > 0,
            consumed: view.consumed.cpu,
            newly: 0.0,
            company: Company::default(),
            reported_with: view.consumed.cpu,
            reports: view.signal.reports,
            step,
            used: 0.0,
            granted: 0.0,
            granted_s: 0.0,
            usable: 1.0,
            least_total: None,
            share: 0.0,
            throttled: false,
            left: None,
        }
    }

    /// Came to another node, where a second is worth `faster` times as much.
    fn moved(&self, view: &JobView, node: NodeId, faster: f64) -> Job {
        Job { usable: self.usable, before: self.per_step().map(|s| s / faster), ..Job::new(view, node) }
    }

    /// Takes in what happened since the last run.
    fn observe(&mut self, view: &JobView, since: &Interval, disturbance: &mut Disturbance) {
        let Interval { now, elapsed_s, shared, scarce } = *since;
        let used = (view.consumed.cpu - self.counter).max(0.0);
        self.counter = view.consumed.cpu;
        self.newly = used / (1.0 + disturbance.gamma() * shared);
        self.consumed += self.newly;
        if !self.throttled {
            self.used += used;
            self.granted += if scarce { used } else { self.share * elapsed_s };
            self.granted_s += elapsed_s;
        }
        if view.signal.reports == self.reports {
            disturbance.observe(&mut self.company, used, shared, None);
            return;
        }
        // The report came some time ago; what was consumed since then went into later steps.
        let since_report = view.signal.last.map_or(0.0, |l| now.since(l.at).as_secs_f64());
        let part = if elapsed_s > 0.0 { (since_report / elapsed_s).min(1.0) } else { 0.0 };
        let step = position(view);
        // A job that begins at a later step than the first has made those before it elsewhere, or
        // has not been listened to: nothing is known of their cost.
        let midst = std::mem::take(&mut self.midst) || (self.reports == 0 && step > 1.0);
        let steps = if midst { 0.0 } else { step - self.step };
        disturbance.observe(&mut self.company, used, shared, Some((steps, used * part)));
        self.reports = view.signal.reports;
        self.step = step;
        self.reported_with = self.consumed - self.newly * part;
        if midst {
            // Nor does what it used show what it can use: most of it went into its start.
            (self.joined_with, self.joined_at_step) = (self.reported_with, self.step);
            (self.used, self.granted, self.granted_s) = (0.0, 0.0, 0.0);
        }
        self.measure();
    }

    /// What a step costs on this node; before the first one here, what it cost so far.
    fn per_step(&self) -> Option<f64> {
        let (work, steps) = (self.reported_with - self.joined_with, self.step - self.joined_at_step);
        if work > 0.0 && steps > 0.0 { Some(work / steps) } else { self.before }
    }

    /// Compares what was used since the last measurement with what was granted.
    fn measure(&mut self) {
        if self.granted > 0.0 {
            let rate = self.used / self.granted_s;
            if self.used < UNUSED * self.granted {
                self.usable = rate.clamp(LEAST_USABLE, 1.0);
            } else if rate > MORE * self.usable {
                // It used all it had, and more than it was thought able to: it may well use much
                // more.
                self.usable = (2.0 * rate).min(1.0);
            }
        }
        (self.used, self.granted, self.granted_s) = (0.0, 0.0, 0.0);
    }

    /// The work left, as far as plans go: until it has ended there is something.
    fn rest(&self) -> Option<f64> {
        self.left.map(|left| left.max(EPILOGUE * self.consumed))
    }

    /// Predicts the work left.
    fn predict(&mut self, rule: &Gain, view: &JobView) -> Option<f64> {
        let signal = &view.signal;
        let per_step = self.per_step()?;
        let since = self.consumed - self.reported_with;
        let left = match signal.total {
            Some(total) => {
                let least = self.least_total.map_or(total, |l| l.min(total));
                self.least_total = Some(least);
                let until = |total: u64| per_step * (total as f64 - self.step) - since;
                // A job that goes on after what it once said is believed to have at least as much
                // left as it has gone on.
                until(total).max(-until(least)).max(0.0)
            }
            None => {
                let until = signal.outlook.map_or(0.0, |o| per_step * (rule.past_flat * o.flat_at - self.step) - since);
                until.max(rule.past_age * self.consumed)
            }
        };
        left.is_finite().then_some(left)
    }
}

/// What a job's node saw since the last run.
struct Interval {
    now: Time,
    elapsed_s: f64,
    /// The chance that a neighbour took its turn before the job did.
    shared: f64,
    /// There was no CPU to spare.
    scarce: bool,
}

/// How far a job is: steps, or reports where it counts no steps.
fn position(view: &JobView) -> f64 {
    view.signal.step.unwrap_or(view.signal.reports) as f64
}

/// Why a job's reports are not to be relied on.
fn doubt(silence: Silence, now: Time, view: &JobView, job: &Job) -> Option<Reason> {
    let Phase::Running { since, .. } = view.phase else { return None };
    match view.signal.last {
        None => {
            let waited = now.since(since);
            Some(if waited > silence.patience { Reason::NoSignal { waited } } else { Reason::NotYetMeasured })
        }
        Some(last) => {
            let silent = now.since(last.at.max(since));
            let usual = view.signal.longest_gap.as_secs_f64();
            // A job that was given little is silent for long; what counts is how much it consumed
            // without a word.
            let per_report = job.reported_with / view.signal.reports.max(1) as f64;
            let mute = job.consumed - job.reported_with > silence.factor * per_report;
            if mute && silent > silence.patience && silent.as_secs_f64() > silence.factor * usual {
                Some(Reason::StaleSignal { silent })
            } else {
                job.left.is_none().then_some(Reason::NotYetMeasured)
            }
        }
    }
}

/// One job in the race for the node.
struct Runner {
    place: usize,
    left: f64,
    usable: f64,
    /// Gain per unit of work.
    gain: f64,
    /// Seconds from now.
    deadline_s: f64,
    share: f64,
    owed: bool,
}

/// Takes in a view, before shares are decided in it: how far each job is, what it has left, and
/// what the fair world makes of that.
fn observe(rule: &Gain, view: &View, memory: &mut Memory) {
    let Memory { at, jobs, idle, fair, disturbance } = memory;
    let elapsed_s = if *at == Time::ZERO { 0.0 } else { view.now.since(*at).as_secs_f64() };
    *at = view.now;
    jobs.retain(|id, _| view.job(*id).is_some_and(|j| j.node().is_some()));
    // What was used of each node since the last run, and the sum of the squares, which tells how
    // much jobs shared it.
    let mut uses: BTreeMap<NodeId, (f64, f64)> = BTreeMap::new();
    for seen in &view.jobs {
        let Some(node) = seen.node() else { continue };
        let job = jobs.entry(seen.id).or_insert_with(|| Job::new(seen, node));
        // Counters that fell belong to another attempt; on another node steps cost something else.
        if seen.consumed.cpu < job.counter || seen.signal.reports < job.reports {
            *job = Job::new(seen, node);
        } else if job.node != node {
            let speed = |id: NodeId| view.node(id).map_or(1.0, |n| n.cores * n.speed);
            *job = job.moved(seen, node, speed(node) / speed(job.node));
        }
        let used = seen.consumed.cpu - job.counter;
        let (sum, squares) = uses.entry(node).or_default();
        (*sum, *squares) = (*sum + used, *squares + used * used);
    }
    let mut scarce: BTreeSet<NodeId> = BTreeSet::new();
    for node in &view.nodes {
        let before = node.idle.and_then(|counter| idle.insert(node.id, counter));
        if let (Some(counter), Some(before)) = (node.idle, before)
            && counter - before < SPARE * elapsed_s
        {
            scarce.insert(node.id);
        }
    }
    // Both are in order of id, and the same by now.
    for (seen, job) in view.jobs.iter().filter(|j| j.node().is_some()).zip(jobs.values_mut()) {
        let (sum, squares) = uses[&job.node];
        let shared = if sum > 0.0 { (1.0 - squares / (sum * sum)).max(0.0) } else { 0.0 };
        let since = Interval { now: view.now, elapsed_s, shared, scarce: scarce.contains(&job.node) };
        job.observe(seen, &since, disturbance);
        job.usable = seen.usable.map_or(job.usable, |usable| usable.clamp(LEAST_USABLE, 1.0));
        job.left = job.predict(rule, seen);
    }
    let news = jobs.values().map(|job| Observation {
        done: job.newly,
        prediction: job.left.map(|left| Prediction { left_s: left, usable: job.usable }),
    });
    fair.step(view, disturbance.gamma(), news);
}

/// Runs the rule over one group, sorted by id. `part` is the group's part of the node. Returns one
/// opinion for each job, in the same order, and how long to wait until the next run.
fn run(
    rule: &Gain,
    silence: Silence,
    now: Time,
    jobs: &[&JobView],
    part: f64,
    memory: &mut Memory,
) -> (Vec<Opinion>, Span) {
    let equal = part / jobs.len().max(1) as f64;
    let pairs: Vec<(&JobView, Job)> = jobs.iter().map(|v| (*v, memory.jobs[&v.id])).collect();
    let doubts: Vec<Option<Reason>> = pairs.iter().map(|(v, job)| doubt(silence, now, v, job)).collect();
    let mut runners = line_up(rule, &pairs, &doubts, part, memory);
    let wait_s = next_look(rule, &pairs, &doubts, part, now);
    let fair = equal * runners.len() as f64;
    let probe = probe(rule, &pairs, &runners, equal, part);
    let mut shares = vec![equal; jobs.len()];
    let mut capacity = fair;
    if let Some((place, share)) = probe {
        capacity -= share - equal;
        shares[place] = share;
    }
    serve(rule, &mut runners, capacity, fair, equal, wait_s);

    let mut reasons: Vec<Reason> = doubts.iter().map(|d| d.unwrap_or(Reason::NotYetMeasured)).collect();
    let mut by_share: Vec<usize> = (0..runners.len()).collect();
    by_share
        .sort_by(|&a, &b| runners[b].share.total_cmp(&runners[a].share).then(runners[a].place.cmp(&runners[b].place)));
    for (ahead, r) in by_share.into_iter().map(|i| &runners[i]).enumerate() {
        shares[r.place] = r.share;
        reasons[r.place] =
            if r.owed { Reason::Owed { left_s: r.left } } else { Reason::Gaining { left_s: r.left, ahead } };
    }
    let opinions = jobs.iter().zip(shares).zip(reasons).map(|((view, share), reason)| {
        let job = memory.jobs.get_mut(&view.id).expect("every job of the group was entered above");
        job.share = share;
        job.throttled = share < 0.5 * equal.min(job.usable);
        let limit = Share::clamped(share / part);
        Opinion {
            limit: PerResource { cpu: limit, memory: Share::FULL, block_io: Share::FULL, net_io: Share::FULL },
            growth: PerResource { cpu: job.rest().map(|l| worth(rule, view) / l), ..PerResource::default() },
            category: category(view),
            reason,
        }
    });
    (opinions.collect(), Span::from_secs_f64(wait_s))
}

impl Memory {
    /// What is predicted of `job` and when it is to end, if its work left can be told.
    fn stake(&self, id: JobId) -> Option<Stake> {
        let job = self.jobs.get(&id)?;
        let deadline_s =
            self.fair.ends(id).map_or(f64::INFINITY, |(ends, _)| ends.as_secs_f64() - self.at.as_secs_f64());
        let home = self.fair.home(id).unwrap_or(job.node);
        let prediction = Prediction { left_s: job.rest()?, usable: job.usable };
        Some(Stake { prediction, home, deadline_s })
    }

    /// The largest part of its node that a job can use, once it has been measured.
    pub(crate) fn usable(&self, id: JobId) -> Option<f64> {
        self.jobs.get(&id).filter(|job| job.left.is_some()).map(|job| job.usable)
    }
}

/// The part of a job's improvement that is still to come, 0…1; all of it before anything is known.
fn to_come(view: &JobView) -> f64 {
    view.signal.outlook.map_or(1.0, |o| o.gain_left / (1.0 + o.gain_left))
}

fn worth(rule: &Gain, view: &JobView) -> f64 {
    1.0 + rule.quality * to_come(view)
}

fn category(view: &JobView) -> Category {
    match to_come(view) {
        g if g < FLAT => Category::Converged,
        g if g < 5.0 * FLAT => Category::Watching,
        _ => Category::Growing,
    }
}

/// The jobs whose work left is known, each with its gain and its deadline.
fn line_up(
    rule: &Gain,
    jobs: &[(&JobView, Job)],
    doubts: &[Option<Reason>],
    part: f64,
    memory: &Memory,
) -> Vec<Runner> {
    let runner = |(place, (view, job)): (usize, &(&JobView, Job))| {
        let left = job.rest()?;
        if doubts[place].is_some() {
            return None;
        }
        let served = job.share > 0.5 * job.usable.min(part);
        let stay = if served { 1.0 + rule.switch } else { 1.0 };
        // Slack is granted on the whole time the job would take with equal shares.
        let deadline_s = memory.fair.ends(view.id).map_or(f64::INFINITY, |(ends, since)| {
            let late_s = rule.slack * ends.since(since).as_secs_f64();
            (ends.as_secs_f64() - memory.at.as_secs_f64()).max(0.0) + late_s
        });
        Some(Runner {
            place,
            left,
            usable: job.usable,
            gain: stay * worth(rule, view) / left.max(f64::MIN_POSITIVE),
            deadline_s,
            share: 0.0,
            owed: false,
        })
    };
    jobs.iter().enumerate().filter_map(runner).collect()
}

/// Deals `capacity` out to the runners: by gain where the deadlines before allow it, else by
/// deadline. `fair` is what all of them together would have with equal shares, `equal` what one
/// has.
fn serve(rule: &Gain, runners: &mut [Runner], capacity: f64, fair: f64, equal: f64, wait_s: f64) {
    let n = runners.len();
    let floor = rule.floor * equal;
    // In order of deadline; ties (all that are late) by what is least left.
    let mut by_deadline: Vec<usize> = (0..n).collect();
    by_deadline.sort_by(|&a, &b| {
        let (a, b) = (&runners[a], &runners[b]);
        a.deadline_s.total_cmp(&b.deadline_s).then(a.left.total_cmp(&b.left)).then(a.place.cmp(&b.place))
    });
    // The time to spare before each deadline if all before it are served first; a job may pass
    // others only while all of them can spare the time until the next look. A job that can use only
    // a part of the node cannot catch up by being served alone: it may have no time to spare long
    // before its deadline comes first, and then must run now.
    let mut may_pass = vec![true; n];
    let mut must_run = vec![false; n];
    let (mut sum, mut all_can_wait) = (0.0, true);
    for &i in &by_deadline {
        let r = &runners[i];
        may_pass[i] = all_can_wait;
        must_run[i] = r.usable < fair && r.deadline_s - r.left / r.usable <= wait_s;
        sum += r.left;
        all_can_wait &= must_run[i] || r.deadline_s - sum / fair > wait_s;
    }
    let mut by_gain: Vec<usize> = (0..n).collect();
    by_gain.sort_by(|&a, &b| {
        let (a, b) = (&runners[a], &runners[b]);
        b.gain.total_cmp(&a.gain).then(a.place.cmp(&b.place))
    });
    let mut left = (capacity - floor * n as f64).max(0.0);
    let urgent = by_deadline.iter().copied().filter(|&i| must_run[i]);
    let passing = by_gain.iter().copied().filter(|&i| !must_run[i] && may_pass[i]);
    let waiting = by_deadline.iter().copied().filter(|&i| !must_run[i] && !may_pass[i]);
    let first = by_gain.first().copied();
    for i in urgent.chain(passing).chain(waiting) {
        let r = &mut runners[i];
        let grant = (r.usable * ROOM - floor).clamp(0.0, left);
        r.share = floor + grant;
        r.owed = grant > 0.0 && first.is_some_and(|f| f != i && (must_run[i] || !may_pass[f]));
        left -= grant;
    }
    // What no job can use is split equally.
    for r in runners.iter_mut() {
        r.share += left / n as f64;
    }
}

/// The newcomer to be measured first, and the share it gets for that: what a job takes, and how
/// much it can use, is worth knowing soon. It lasts until the first report, but no longer than
/// until it has cost the others [`Gain::probe`] of what they have left.
fn probe(rule: &Gain, jobs: &[(&JobView, Job)], runners: &[Runner], equal: f64, part: f64) -> Option<(usize, f64)> {
    let budget = rule.probe * runners.iter().map(|r| r.left).sum::<f64>();
    let (place, _) = jobs
        .iter()
        .enumerate()
        .filter(|(_, (_, job))| job.left.is_none() && job.consumed - job.joined_with < budget)
        .min_by_key(|(_, (v, _))| (v.arrived, v.id))?;
    let share = equal.max(0.75 * part).min(equal * (1 + runners.len()) as f64 * 0.95);
    Some((place, share.max(equal)))
}

/// Looks again after a part of what the job that ends first has left, and of the age of those not
/// yet measured: often for jobs of seconds, rarely for jobs of days.
fn next_look(rule: &Gain, jobs: &[(&JobView, Job)], doubts: &[Option<Reason>], part: f64, now: Time) -> f64 {
    let scale = jobs.iter().zip(doubts).map(|((view, job), doubt)| match (doubt, job.rest(), view.phase) {
        (None, Some(left), _) => left / job.usable.min(part),
        (_, _, Phase::Running { since, .. }) => now.since(since).as_secs_f64(),
        _ => 0.0,
    });
    let shortest = scale.fold(f64::INFINITY, f64::min);
    (rule.look * shortest).clamp(rule.shortest_look.as_secs_f64(), rule.longest_look.as_secs_f64())
}
