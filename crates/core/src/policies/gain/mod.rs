//! Our own rule: the node goes where a unit of it gains most, and jobs seldom end later than with equal
//! shares.
//!
//! **Problem.** The mean completion time is least when the job with the least work left goes first.
//! But the work left is not known, the longest job would starve, and a wrong guess would let one
//! job hold the node for ever.
//!
//! **Approach.** (`docs/gain-policy.md` has the whole story.)
//! 1. *Work left* is a distribution, from what the job itself reports and from earlier runs of the
//!    same program ([`crate::signal::length`]).
//! 2. *Gain per unit*: finishing a job is worth 1, the part of its improvement still to come is
//!    worth [`Gain::quality`] more; both divided by the work left ([`Gain::boldness`] says by which
//!    number of its distribution). Jobs are served in this order, each as much as it can use, or,
//!    where teams of threads follow the shares, core by core where a core gains most ([`cores`]).
//!    Under [`Aim::Quality`] the work until nine tenths of the improvement takes the place of the
//!    work left.
//! 3. *Guard*: a world that shares equally is simulated beside the real one ([`world`]). When it
//!    would end a job is that job's deadline, for a job that ends as early as may well be
//!    ([`Gain::guard`]). A job may go out of deadline order only while every
//!    deadline before its own can still be kept; otherwise deadlines decide. Serving in deadline
//!    order ends no job later than equal sharing does (E. Friedman and S. Henderson, "Fairness and
//!    efficiency in web server protocols", SIGMETRICS 2003), and arrivals only push the deadlines
//!    of others back: with true predictions no job loses. Where each job can have a core of its own and
//!    teams of threads follow the shares, a job that fell behind cannot catch up, because further
//!    cores bring little. There the first job in the order has more cores, as far as all deadlines can be kept and it
//!    gains more than the others lose ([`favour`]).
//! 4. *When in doubt* (no report yet, none for long) a job gets an equal part, the same as in the
//!    fair world.
//! 5. Each job keeps a small part of an equal share, so that it goes on reporting; a job that is
//!    being served stays unless another one is better by more than [`Gain::switch`].
//!
//! **Terms.** Work and service are node-seconds of CPU. All times derive from the jobs' own, but
//! for the bounds of the time between two decisions and the patience with a silent job.

mod cores;
mod disturbance;
mod estimate;
mod favour;
mod machine;
mod moves;
mod numbers;
mod quality;
mod teams;
mod world;

pub(crate) use moves::MoveRule;
pub use numbers::{Aim, Gain, GainMove, OneNode};

use super::{Group, Homes, JobOutlook, Opinion, Prediction, Share as ShareRule, Shares, Silence};
use crate::model::{JobId, NodeId, PerResource, Share, Span, Time};
use crate::plan::Reason;
use crate::signal::Category;
use crate::signal::predict::FLAT;
use crate::view::{JobView, Phase, View};
use disturbance::Disturbance;
use estimate::{EstimatedJob, Interval, ROOM, SPARE, WorkLeft};
use favour::Contender;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use teams::{Lending, TeamUse};
use world::{EndedJob, FairWorld, Observation};

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
        let (opinions, wait) = run(self.numbers, self.silence, group, self.memory);
        Shares { opinions, wait: Some(wait) }
    }

    fn outlook(&self, job: JobId) -> Option<JobOutlook> {
        self.memory.outlook(job)
    }

    fn homes(&mut self) -> Option<&mut dyn Homes> {
        Some(&mut self.memory.fair)
    }
}

/// What the rule remembers between two runs.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Memory {
    at: Time,
    jobs: BTreeMap<JobId, EstimatedJob>,
    /// Counters of unused CPU at the last run.
    #[serde(rename = "idle", default)]
    idle_node_s: BTreeMap<NodeId, f64>,
    fair: FairWorld,
    #[serde(default)]
    disturbance: Disturbance,
}

/// Why a job's reports are not to be relied on.
fn doubt(silence: Silence, now: Time, view: &JobView, job: &EstimatedJob) -> Option<Reason> {
    let Phase::Running { since, .. } = view.phase else { return None };
    match view.signal.last {
        None => {
            let waited = now.since(since);
            if waited > silence.patience {
                Some(Reason::NoSignal { waited })
            } else {
                // Earlier runs of the program may tell what it has left before its first report.
                job.left.is_none().then_some(Reason::NotYetMeasured)
            }
        }
        Some(last) => {
            let silent = now.since(last.at.max(since));
            let usual = view.signal.longest_gap.as_secs_f64();
            // A job that was given little is silent for long; what counts is how much it consumed
            // without a word.
            let per_report = job.reported_with / view.signal.reports.max(1) as f64;
            let mute = job.consumed_node_s - job.reported_with > silence.factor * per_report;
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
    left_node_s: f64,
    /// The mean of what it has left.
    mean_node_s: f64,
    usable: f64,
    /// The work it does in a second with the whole node.
    rate: f64,
    /// The same with an equal share, where its team of threads would follow that.
    equal_rate: Option<f64>,
    /// Gain per unit of work.
    gain: f64,
    /// How much its delay counts, where the typical job has 1.
    weight: f64,
    /// Seconds from now.
    deadline_s: f64,
    /// The job's whole time with equal shares.
    fair_s: f64,
    share: f64,
    /// How many measured jobs go before it.
    ahead: usize,
    /// The job goes before a job that gains more, because it would end late otherwise.
    owed: bool,
    /// How it gains from further cores, where its team of threads follows its share.
    team: Option<Team>,
    /// The job is a newcomer that is to be measured, and goes before all others.
    is_new: bool,
}

/// How a job gains from further cores.
#[derive(Clone, Copy)]
struct Team {
    /// The part of its work on one thread, once that was measured.
    serial: Option<f64>,
    /// The part of the node that one core is.
    core: f64,
}

impl Team {
    fn of(view: &JobView, job: &EstimatedJob) -> Option<Team> {
        (view.has_team && job.core < 1.0).then_some(Team { serial: view.serial, core: job.core })
    }

    /// Whether `share` is a core or more. Shares are quotients of small parts.
    fn is_within(&self, share: f64) -> bool {
        share >= 0.999 * self.core
    }
}

/// A share of this many equal ones or more counts as an equal one: shares are rounded.
const ENOUGH: f64 = 0.99;

/// Takes in a view, before shares are decided in it: how far each job is, what it has left, and
/// what the fair world makes of that.
fn observe(rule: &Gain, view: &View, memory: &mut Memory) {
    let Memory { at, jobs, idle_node_s, fair, disturbance } = memory;
    let elapsed_s = if *at == Time::ZERO { 0.0 } else { view.now.since(*at).as_secs_f64() };
    *at = view.now;
    let caution = rule.caution(view);
    let has_ended = |id: &JobId| caution.knows_ends && view.job(*id).is_none();
    let ended = jobs.iter().filter(|(id, _)| has_ended(id)).map(|(id, job)| EndedJob {
        id: *id,
        node: job.node,
        done: job.share.min(job.usable) * elapsed_s,
    });
    let ended: Vec<EndedJob> = ended.collect();
    jobs.retain(|id, _| view.job(*id).is_some_and(|j| j.node().is_some()));
    // What was used of each node since the last run, and the sum of the squares, which tells how
    // much jobs shared it.
    let mut uses: BTreeMap<NodeId, (f64, f64)> = BTreeMap::new();
    let mut counts: BTreeMap<NodeId, usize> = BTreeMap::new();
    for seen in &view.jobs {
        let Some(node) = seen.node() else { continue };
        let job = jobs.entry(seen.id).or_insert_with(|| EstimatedJob::new(seen, node));
        // Counters that fell belong to another attempt; on another node steps cost something else.
        if seen.consumed_node_s.cpu < job.counter || seen.signal.reports < job.reports {
            *job = EstimatedJob::new(seen, node);
        } else if job.node != node {
            let speed = |id: NodeId| view.node(id).map_or(1.0, |n| n.cores * n.speed);
            *job = job.moved(seen, node, speed(node) / speed(job.node));
        }
        let used = seen.consumed_node_s.cpu - job.counter;
        let (sum, squares) = uses.entry(node).or_default();
        (*sum, *squares) = (*sum + used, *squares + used * used);
        *counts.entry(node).or_default() += 1;
    }
    let mut scarce: BTreeSet<NodeId> = BTreeSet::new();
    for node in &view.nodes {
        let before = node.idle_node_s.and_then(|counter| idle_node_s.insert(node.id, counter));
        if let (Some(counter), Some(before)) = (node.idle_node_s, before)
            && counter - before < SPARE * elapsed_s
        {
            scarce.insert(node.id);
        }
    }
    let mut lending: BTreeMap<NodeId, Lending> = BTreeMap::new();
    for job in jobs.values() {
        let cores = view.node(job.node).map_or(0.0, |node| node.cores / counts[&job.node] as f64);
        lending.entry(job.node).or_default().add(job.share / job.core, job.on_one_core, cores);
    }
    // Both are in order of id, and the same by now.
    for (seen, job) in view.jobs.iter().filter(|j| j.node().is_some()).zip(jobs.values_mut()) {
        let (sum, squares) = uses[&job.node];
        let shared = if sum > 0.0 { (1.0 - squares / (sum * sum)).max(0.0) } else { 0.0 };
        let had_cores = lending[&job.node].cores(job.share / job.core, job.on_one_core);
        let is_scarce = scarce.contains(&job.node);
        let equal = 1.0 / counts[&job.node] as f64;
        let since = Interval { now: view.now, elapsed_s, shared, scarce: is_scarce, had_cores, equal };
        job.observe(seen, &since, disturbance);
        let node = view.node(job.node);
        job.set_usable(seen, node, counts[&job.node]);
        job.left = job.predict(&caution, seen, node);
    }
    let running = view.jobs.iter().filter(|j| j.node().is_some());
    let news = running.zip(jobs.values()).map(|(seen, job)| Observation {
        done: job.newly_node_s,
        prediction: job.left.map(|left| Prediction { left_s: left.guard_s, usable: job.rate }),
        team: seen.has_team.then_some(TeamUse { serial: seen.serial, on_one_core: seen.on_one_core }),
        cores: job.had_cores,
        had_enough: seen.on_gpu && job.share * counts[&job.node] as f64 >= ENOUGH,
    });
    fair.step(view, disturbance.gamma(), news, &ended);
}

/// One decision about one group: what is known of its jobs, in their order.
struct Round<'a> {
    rule: &'a Gain,
    now: Time,
    jobs: Vec<(&'a JobView, EstimatedJob)>,
    /// Why a job's reports are not to be relied on.
    doubts: Vec<Option<Reason>>,
    /// The group's part of the node.
    part: f64,
    /// An equal share of that part.
    equal: f64,
    /// Each job can have a core of its own, and its team of threads follows its share.
    has_cores: bool,
}

/// What is dealt out to the runners. Shares are parts of the node.
struct Supply {
    capacity: f64,
    /// What all runners together would have with equal shares.
    fair: f64,
    /// What one of them would have.
    equal: f64,
    /// The time until the next decision.
    wait_s: f64,
    /// How long jobs may need that are no runners.
    unknown_s: f64,
}

/// Runs the rule over one group. Returns one opinion for each job, in the same order, and how long to wait until the
/// next run.
fn run(rule: &Gain, silence: Silence, group: &Group<'_>, memory: &mut Memory) -> (Vec<Opinion>, Span) {
    let Group { now, jobs, part, .. } = *group;
    let equal = part / jobs.len().max(1) as f64;
    let pairs: Vec<(&JobView, EstimatedJob)> = jobs.iter().map(|v| (*v, memory.jobs[&v.id])).collect();
    let doubts = pairs.iter().map(|(v, job)| doubt(silence, now, v, job)).collect();
    // Whether each job can have a core of its own, and teams of threads that follow the shares.
    let is_within =
        |(view, job): &(&JobView, EstimatedJob)| Team::of(view, job).is_some_and(|team| team.is_within(equal));
    let has_cores = pairs.iter().all(is_within);
    let round = Round { rule, now, jobs: pairs, doubts, part, equal, has_cores };
    let mut runners = round.line_up(memory);
    let wait_s = round.next_look();
    let fair = equal * runners.len() as f64;
    let probe = round.probe(&runners);
    let mut shares = vec![equal; jobs.len()];
    let mut capacity = fair;
    if has_cores {
        if let Some((place, share)) = probe {
            capacity -= share - equal;
            shares[place] = share;
        }
    } else if let Some((place, share)) = probe {
        let (view, job) = &round.jobs[place];
        if let Some(team) = Team::of(view, job) {
            capacity += equal;
            // A job that imports its libraries has no use for more than one core.
            let most = if view.on_one_core { share.min(team.core) } else { share };
            runners.push(Runner::newcomer(place, most, team));
        } else {
            capacity -= share - equal;
            shares[place] = share;
        }
    }
    // How long jobs need that are not measured yet is not known: nothing is expected of them.
    let unknown_s = if runners.iter().filter(|r| !r.is_new).count() < jobs.len() { f64::INFINITY } else { 0.0 };
    if has_cores {
        round.favour(&mut runners, capacity, memory.disturbance.gamma());
        count_larger_shares(&mut runners);
    } else {
        serve(rule, &mut runners, &Supply { capacity, fair, equal, wait_s, unknown_s });
    }

    let mut reasons: Vec<Reason> = round.doubts.iter().map(|d| d.unwrap_or(Reason::NotYetMeasured)).collect();
    for r in &runners {
        shares[r.place] = r.share;
        if !r.is_new {
            let (left_s, ahead) = (r.left_node_s, r.ahead);
            reasons[r.place] = if r.owed { Reason::Owed { left_s } } else { Reason::Gaining { left_s, ahead } };
        }
    }
    let opinions = jobs.iter().zip(shares).zip(reasons).map(|((view, share), reason)| {
        let job = memory.jobs.get_mut(&view.id).expect("every job of the group was entered above");
        job.share = share;
        job.throttled = share < 0.5 * equal.min(job.usable);
        let limit = Share::clamped(share / part);
        Opinion {
            limit: PerResource { cpu: limit, memory: Share::FULL, block_io: Share::FULL, net_io: Share::FULL },
            growth: PerResource { cpu: job.rest().map(|l| worth(rule, view) / l.rank_s), ..PerResource::default() },
            category: category(view),
            reason,
        }
    });
    (opinions.collect(), Span::from_secs_f64(wait_s))
}

impl Memory {
    /// What is predicted of `job` and when it is to end, if its work left is known.
    fn outlook(&self, id: JobId) -> Option<JobOutlook> {
        let job = self.jobs.get(&id)?;
        let deadline_s =
            self.fair.ends(id).map_or(f64::INFINITY, |(ends, _)| ends.as_secs_f64() - self.at.as_secs_f64()).max(0.0);
        let home = self.fair.home(id).unwrap_or(job.node);
        let left = job.rest()?;
        let prediction = Prediction { left_s: left.mean_s, usable: job.usable };
        Some(JobOutlook { prediction, promised_left_s: left.guard_s, home, deadline_s })
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

/// What a unit of work on this job gains. Under [`Aim::Quality`] jobs that have made nine tenths of
/// their improvement come after all others.
fn gain_per_unit(rule: &Gain, view: &JobView, job: &EstimatedJob, left: &WorkLeft) -> f64 {
    let finish = worth(rule, view) / left.rank_s.max(f64::MIN_POSITIVE);
    match rule.aim {
        Aim::Finish => finish,
        Aim::Quality => quality::chance_per_work(&view.signal, job, left) + AFTERWARDS * finish,
    }
}

/// What the end of a job is worth beside nine tenths of its improvement, under [`Aim::Quality`].
const AFTERWARDS: f64 = 1e-6;

fn category(view: &JobView) -> Category {
    match to_come(view) {
        g if g < FLAT => Category::Converged,
        g if g < 5.0 * FLAT => Category::Watching,
        _ => Category::Growing,
    }
}

/// The part of the group's part that a newcomer gets until its first report.
const PROBE_PART: f64 = 0.9;

impl Round<'_> {
    /// The jobs whose work left is known, each with its gain and its deadline.
    fn line_up(&self, memory: &Memory) -> Vec<Runner> {
        let Round { rule, ref jobs, ref doubts, part, equal, .. } = *self;
        let totals: Vec<f64> = jobs.iter().filter_map(|(_, job)| job.total()).collect();
        let typical = (totals.iter().map(|total| total.ln()).sum::<f64>() / totals.len().max(1) as f64).exp();
        let runner = |(place, (view, job)): (usize, &(&JobView, EstimatedJob))| {
            let left = job.rest()?;
            if doubts[place].is_some() {
                return None;
            }
            let team = Team::of(view, job);
            // Where several jobs have cores, the one with most of them stays first soonest.
            let served = match team {
                Some(_) => job.share / part,
                None if job.share > 0.5 * job.usable.min(part) => 1.0,
                None => 0.0,
            };
            let stay = 1.0 + rule.switch * served;
            // On many cores several jobs are served at once, and who goes first among jobs with about as much left
            // hardly changes the mean. There a delay counts by the length of the job: the mean slowdown is minimised.
            // With less than a core for each job that would cost much of the mean completion time.
            let has_cores = team.is_some_and(|team| team.is_within(equal));
            let weight = job.total().filter(|_| has_cores).map_or(1.0, |total| typical / total);
            // Slack is granted on the whole time the job would take with equal shares.
            let (deadline_s, fair_s) = memory.fair.ends(view.id).map_or((f64::INFINITY, 0.0), |(ends, since)| {
                let fair_s = ends.since(since).as_secs_f64();
                let left_s = ends.as_secs_f64() - memory.at.as_secs_f64();
                // How late a job is matters only where its lateness is bounded.
                let left_s = if self.has_cores { left_s } else { left_s.max(0.0) };
                (left_s + rule.slack * fair_s, fair_s)
            });
            Some(Runner {
                place,
                left_node_s: left.guard_s,
                mean_node_s: left.mean_s,
                usable: job.usable,
                rate: job.rate,
                equal_rate: job.equal_rate,
                gain: weight * stay * gain_per_unit(rule, view, job, &left),
                weight,
                deadline_s,
                fair_s,
                share: 0.0,
                ahead: 0,
                owed: false,
                team,
                is_new: false,
            })
        };
        jobs.iter().enumerate().filter_map(runner).collect()
    }

    /// The newcomer to be measured first, and the share it gets for that: what a job takes, and how
    /// much it can use, is worth knowing soon. It lasts until the first report, but no longer than
    /// until it has cost the others [`Gain::probe`] of what they have left.
    fn probe(&self, runners: &[Runner]) -> Option<(usize, f64)> {
        let Round { rule, ref jobs, part, equal, has_cores, .. } = *self;
        let budget = rule.probe * runners.iter().map(|r| r.left_node_s).sum::<f64>();
        // On many cores, only what exceeds an equal share is a cost.
        let is_within_budget = |job: &EstimatedJob| match has_cores {
            true => job.extra_s < favour::FOR_NEWCOMER * budget,
            false => job.consumed_node_s - job.joined_with < budget,
        };
        let (place, _) = jobs
            .iter()
            .enumerate()
            .filter(|(_, (_, job))| job.left.is_none() && is_within_budget(job))
            // A job that imports its libraries has no use for more than its part, and lends most of that.
            .filter(|(_, (view, _))| !(has_cores && view.on_one_core))
            .min_by_key(|(_, (v, _))| (v.arrived, v.id))?;
        let share = equal.max(PROBE_PART * part).min(equal * (1 + runners.len()) as f64 * 0.95);
        let share = if has_cores { share.min(favour::most_for_newcomer(equal, runners.len())) } else { share };
        Some((place, share.max(equal)))
    }

    /// Whether a job is not measured yet, but may soon be.
    fn has_newcomer(&self) -> bool {
        self.doubts.contains(&Some(Reason::NotYetMeasured))
    }

    /// Deals `capacity` out where each job can have a core of its own. While a newcomer imports its libraries, only the
    /// newcomer itself can be favoured: it lends its cores until it needs them, and may soon need what could be taken
    /// from the others.
    fn favour(&self, runners: &mut [Runner], capacity: f64, disturbance: f64) {
        // A job that is expected to report soon.
        let is_silent = |place: usize| matches!(self.doubts[place], Some(Reason::NoSignal { .. }));
        let imports = |place: usize, view: &JobView| view.on_one_core && view.signal.reports == 0 && !is_silent(place);
        let mut by_gain: Vec<&mut Runner> = runners.iter_mut().collect();
        by_gain.sort_by(|a, b| b.gain.total_cmp(&a.gain).then(a.place.cmp(&b.place)));
        let Some((first, core)) = by_gain.first().and_then(|r| Some((r.place, r.team?.core))) else { return };
        let is_known = |(place, (view, _)): (usize, &(&JobView, EstimatedJob))| place == first || !imports(place, view);
        let contender = |r: &&mut Runner| Contender {
            left_core_s: r.left_node_s / core,
            serial: r.team.and_then(|team| team.serial),
            deadline_s: r.deadline_s,
            fair_s: r.fair_s,
            weight: r.weight,
        };
        let line: Vec<Contender> = by_gain.iter().map(contender).collect();
        let cores = capacity / core;
        let mut parts = match self.jobs.iter().enumerate().all(is_known) {
            true => favour::deal(&line, cores, disturbance),
            false => vec![cores / line.len() as f64; line.len()],
        };
        if imports(first, self.jobs[first].0) && parts.len() > 1 {
            // What it lends is divided by shares: the others are to have the same.
            let each = (cores - parts[0]) / (parts.len() - 1) as f64;
            parts[1..].fill(each);
        }
        for (r, part) in by_gain.into_iter().zip(parts) {
            r.share = core * part;
        }
    }

    /// The work until the event that the rule waits for: the end of the job, or nine tenths of its improvement.
    fn next_event(&self, view: &JobView, job: &EstimatedJob, left: &WorkLeft) -> f64 {
        match self.rule.aim {
            Aim::Finish => left.rank_s,
            Aim::Quality => left.rank_s.min(quality::chance_per_work(&view.signal, job, left).recip()),
        }
    }

    /// Looks again after a part of what the job that ends first has left, and of the age of those not
    /// yet measured: often for jobs of seconds, rarely for jobs of days.
    fn next_look(&self) -> f64 {
        let Round { rule, now, part, .. } = *self;
        let scale =
            self.jobs.iter().zip(&self.doubts).map(|((view, job), doubt)| match (doubt, job.rest(), view.phase) {
                (None, Some(left), _) => self.next_event(view, job, &left) / job.usable.min(part),
                (_, _, Phase::Running { since, .. }) => now.since(since).as_secs_f64(),
                _ => 0.0,
            });
        let shortest = scale.fold(f64::INFINITY, f64::min);
        let (least_s, most_s) = (rule.shortest_look.as_secs_f64(), rule.longest_look.as_secs_f64());
        // On many cores no job is favoured while a newcomer imports its libraries, so its first reports matter.
        if self.has_cores && self.has_newcomer() {
            return 0.5 * least_s;
        }
        (rule.look * shortest).clamp(least_s, most_s)
    }
}

impl Runner {
    /// A newcomer that may have up to `share` until its first report.
    fn newcomer(place: usize, share: f64, team: Team) -> Runner {
        Runner {
            place,
            left_node_s: 0.0,
            mean_node_s: 0.0,
            usable: share / ROOM,
            rate: share / ROOM,
            equal_rate: None,
            gain: f64::INFINITY,
            weight: 1.0,
            deadline_s: f64::INFINITY,
            fair_s: 0.0,
            share: 0.0,
            ahead: 0,
            owed: false,
            team: Some(team),
            is_new: true,
        }
    }
}

/// Where all jobs run at once, those with larger shares are ahead.
fn count_larger_shares(runners: &mut [Runner]) {
    let shares: Vec<f64> = runners.iter().filter(|r| !r.is_new).map(|r| r.share).collect();
    for r in runners {
        r.ahead = shares.iter().filter(|share| **share > r.share).count();
    }
}

/// Deals the supply out to the runners: by gain where the deadlines allow it, else by deadline.
fn serve(rule: &Gain, runners: &mut [Runner], supply: &Supply) {
    let Supply { capacity, fair, equal, wait_s, unknown_s } = *supply;
    let n = runners.len();
    let floor = rule.floor * equal;
    // In order of deadline; ties (all that are late) by what is least left.
    let mut by_deadline: Vec<usize> = (0..n).collect();
    by_deadline.sort_by(|&a, &b| {
        let (a, b) = (&runners[a], &runners[b]);
        a.deadline_s.total_cmp(&b.deadline_s).then(a.left_node_s.total_cmp(&b.left_node_s)).then(a.place.cmp(&b.place))
    });
    // The time to spare before each deadline if all before it are served first; a job may pass
    // others only while all of them can spare the time until the next look. A job that can use only
    // a part of the node cannot catch up by being served alone: it may have no time to spare long
    // before its deadline comes first, and then must run now.
    let together = fair.min(runners.iter().filter(|r| !r.is_new).map(|r| r.equal_rate.unwrap_or(fair)).sum());
    let mut may_pass = vec![true; n];
    let mut must_run = vec![false; n];
    let (mut sum, mut all_can_wait) = (0.0, true);
    for &i in &by_deadline {
        let r = &runners[i];
        if r.is_new {
            continue;
        }
        may_pass[i] = all_can_wait;
        must_run[i] = r.rate < fair && r.deadline_s - r.left_node_s / r.rate <= wait_s;
        sum += r.left_node_s;
        all_can_wait &= must_run[i] || r.deadline_s - sum / together > wait_s;
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
    let order: Vec<usize> = urgent.chain(passing).chain(waiting).collect();
    let most = |r: &Runner| (r.usable * ROOM - floor).max(0.0);
    // A job that needs as long with one core as all jobs need with the whole machine must not wait for them.
    let all_s = runners.iter().map(|r| r.mean_node_s).sum::<f64>() / together + unknown_s;
    let least = |r: &Runner| {
        r.team.filter(|team| r.mean_node_s / team.core >= all_s && !r.is_new).map_or(0.0, |team| team.core)
    };
    let mut claims: Vec<cores::CoreClaim> = Vec::with_capacity(n);
    // What waits for a job is the job itself and all behind it.
    let mut waiting = 0.0;
    for &i in order.iter().rev() {
        let r = &runners[i];
        waiting += r.weight;
        claims.push(cores::CoreClaim { most: most(r), least: least(r), waiting, team: r.team });
    }
    claims.reverse();
    let grants = cores::deal(&claims, left);
    let mut ahead = 0;
    for (&i, grant) in order.iter().zip(&grants) {
        let r = &mut runners[i];
        (r.share, r.ahead) = (floor + grant, ahead);
        ahead += usize::from(!r.is_new);
        left -= grant;
    }
    let mut best_behind = f64::NEG_INFINITY;
    for (&i, grant) in order.iter().zip(&grants).rev() {
        let r = &mut runners[i];
        if r.is_new {
            continue;
        }
        r.owed = *grant > 0.0 && best_behind > r.gain;
        best_behind = best_behind.max(r.gain);
    }
    let left = left.max(0.0);
    // What no job can use is split equally.
    for r in runners.iter_mut() {
        r.share += left / n as f64;
    }
}
