//! Runs one world under one policy.
//!
//! **Problem.** A policy decides, jobs work on, and what they report depends on what was decided. All of it
//! must be exact and repeatable, and the policy must be the production code, not a copy.
//!
//! **Approach.** Between two events every job works at a constant rate, so time jumps from event to event:
//! an arrival, a job that is ready to work after its start or restore, a finish, a moment control asked
//! for. Jobs are advanced in one step and the reports they made on the way are handed to their trackers
//! with the times at which they were made. Then the [`Decider`] decides until nothing is due; every plan is
//! checked and carried out at once.
//!
//! **Terms.** Events are ordered by (time, sequence number). A finish carries the version of the rate it
//! was computed from; when the rate changes, the old event is void.
//!
//! **Properties.** The same world and policy give the same outcome, bit for bit. Work is conserved: what a
//! job has done when it finishes is its work, and a node never deals out more than it has.

use crate::outcome::{Course, JobOutcome, Migration, Outcome, Stay};
use crate::random::Stream;
use crate::world::{Actuator, Node, World, appetite, slowdowns};
use gainshare_core::check::CheckedPlan;
use gainshare_core::deal::deal_by_weight;
use gainshare_core::decider::{self, Decider, Decision};
use gainshare_core::model::{JobId, NodeId, OwnerId, PerResource, Share, Span, Time};
use gainshare_core::plan::Target;
use gainshare_core::policy::{PlaceRule, Policy, Preset, Rank, ShareRule};
use gainshare_core::signal::past::expected_pace;
use gainshare_core::signal::speed::{Pace, PaceReading, PaceTracker};
use gainshare_core::signal::{Sample, Signal, Tracker};
use gainshare_core::view::{FinishedRun, JobView, NodeView, Phase, View};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// What went wrong, which is always a bug in a policy or an impossible world.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SimError {
    #[error("at {at_s:.3} s the policy made an unsound plan: {what}; this is a bug of the policy, please report it")]
    Unsound { at_s: f64, what: String },
    #[error(
        "after {at_s:.3} s nothing can happen any more, but {left} job(s) have not ended; does any node have room for {first}?"
    )]
    Stuck { at_s: f64, left: usize, first: String },
    #[error(
        "the policy still wants to decide after {0} rounds at the same moment; this is a bug of the policy, please report it"
    )]
    Restless(usize),
}

/// What to write down on the way, beyond when each job ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Record {
    /// Losses and shares over time, for figures.
    pub courses: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Arrive(usize),
    Ready { job: usize, attempt: u32 },
    Finish { job: usize, version: u64 },
    Report { job: usize, version: u64 },
    Due,
    Probe,
}

#[derive(Debug, Clone)]
struct LiveJob {
    phase: Phase,
    /// No work before this moment: the job starts or is being restored.
    ready: Time,
    target: Target,
    /// What is promised to it, whatever others gain.
    promised: f64,
    advanced: Time,
    done_core_s: f64,
    rate: f64,
    /// The part of its node it uses now.
    used: f64,
    /// The part of its node's memory it holds.
    memory: f64,
    version: u64,
    reports: u64,
    noise: Stream,
    tracker: Tracker,
    pace: PaceTracker,
    consumed_node_s: PerResource<f64>,
    /// CPU consumed, in seconds of a core of speed 1.
    core_s: f64,
    /// Runs of the same program that have ended.
    history: Vec<FinishedRun>,
    /// The measured paces of earlier runs.
    past_paces: Vec<Pace>,
    outcome: JobOutcome,
    course: Course,
}

/// One run.
struct Run<'a> {
    world: &'a World,
    decider: Decider,
    record: Record,
    clairvoyant: bool,
    /// Jobs reserve and may not exceed what their owners requested.
    by_request: bool,
    /// Some job has a deadline, so paces are measured.
    has_deadlines: bool,
    reacts: bool,
    /// Nodes with idle CPU since the last event.
    has_idle: Vec<bool>,
    now: Time,
    heap: BinaryHeap<Reverse<(Time, u64, Event)>>,
    sequence: u64,
    due: Option<Time>,
    jobs: Vec<LiveJob>,
    /// Arrived and not ended, in order of id.
    active: Vec<usize>,
    migrations: Vec<Migration>,
    events: u64,
    plans: u64,
    /// Gets every decision, recorded.
    observer: Option<&'a mut dyn FnMut(&Decision)>,
    probe: Option<Probe<'a>>,
}

/// A function that gets the decider and the view, and how often.
type Probe<'a> = (Span, &'a mut dyn FnMut(&Decider, &View));

/// More rounds than any policy needs at one moment: starts change the view, which may lead to shares, which
/// may lead to moves.
const ROUNDS: usize = 16;

/// Number of the newest runs of a program that are known, as in the daemon.
const MOST_RUNS: usize = 8;

/// A node of which less is used has idle CPU.
const IDLE_BELOW: f64 = 0.9;

/// Runs `world` to its end under `policy`.
pub fn run(world: &World, policy: &Policy, record: Record) -> Result<Outcome, SimError> {
    Run::new(world, policy, record).run_until_done()
}

/// As [`run`], and shows every decision to `observer` before it is carried out. Each can be recorded and
/// replayed, which costs time.
pub fn run_observed(world: &World, policy: &Policy, observer: &mut dyn FnMut(&Decision)) -> Result<Outcome, SimError> {
    let mut run = Run::new(world, policy, Record::default());
    run.observer = Some(observer);
    run.run_until_done()
}

/// As [`run`], and shows the decider and the view to `probe` every `every`. Paces are measured then, whether or not
/// a job has a deadline.
pub fn run_probed(
    world: &World,
    policy: &Policy,
    every: Span,
    probe: &mut dyn FnMut(&Decider, &View),
) -> Result<Outcome, SimError> {
    let mut run = Run::new(world, policy, Record::default());
    run.has_deadlines = true;
    run.probe = Some((every, probe));
    run.push(Time::ZERO + every, Event::Probe);
    run.run_until_done()
}

impl<'a> Run<'a> {
    fn new(world: &'a World, policy: &Policy, record: Record) -> Run<'a> {
        let mut policy = policy.clone();
        // Where a policy leaves something to chance, every seed is another chance.
        if let PlaceRule::Kubernetes { seed } = &mut policy.place {
            *seed ^= world.seed;
        }
        let jobs = world.jobs.iter().enumerate().map(|(i, job)| LiveJob {
            phase: Phase::Waiting,
            ready: Time::ZERO,
            target: Target::FREE,
            promised: 0.0,
            advanced: job.arrival,
            done_core_s: 0.0,
            rate: 0.0,
            used: 0.0,
            memory: 0.0,
            version: 0,
            reports: 0,
            noise: Stream::new(world.seed, i as u64, "report noise"),
            tracker: job.tracker(),
            pace: PaceTracker::default(),
            consumed_node_s: PerResource::default(),
            core_s: 0.0,
            history: job.history.clone(),
            past_paces: vec![],
            outcome: JobOutcome::new(job, &world.nodes),
            course: Course::default(),
        });
        let mut run = Run {
            world,
            record,
            clairvoyant: matches!(policy.share, ShareRule::Rank(Rank::Remaining)),
            by_request: policy.order == Policy::from(Preset::Requests).order,
            has_deadlines: world.jobs.iter().any(|j| j.deadline.is_some()),
            reacts: policy.react_to_reports,
            has_idle: vec![false; world.nodes.len()],
            decider: Decider::new(policy),
            now: Time::ZERO,
            heap: BinaryHeap::new(),
            sequence: 0,
            due: None,
            jobs: jobs.collect(),
            active: vec![],
            migrations: vec![],
            events: 0,
            plans: 0,
            observer: None,
            probe: None,
        };
        for (i, job) in world.jobs.iter().enumerate() {
            run.push(job.arrival, Event::Arrive(i));
        }
        run
    }

    fn run_until_done(mut self) -> Result<Outcome, SimError> {
        while let Some(Reverse((at, _, event))) = self.heap.pop() {
            self.now = at;
            let mut anything = self.process(event);
            // What happens at the same moment is decided on together.
            while self.heap.peek().is_some_and(|Reverse((t, _, _))| *t == at) {
                let Some(Reverse((_, _, event))) = self.heap.pop() else { break };
                anything |= self.process(event);
            }
            if anything {
                self.decide()?;
            }
            if self.has_deadlines {
                self.note_idle();
            }
        }
        self.finish()
    }

    fn push(&mut self, at: Time, event: Event) {
        self.sequence += 1;
        self.heap.push(Reverse((at, self.sequence, event)));
    }

    /// Takes one event in; `false` if it was void.
    fn process(&mut self, event: Event) -> bool {
        self.events += 1;
        match event {
            Event::Arrive(job) => {
                let place = self.active.partition_point(|&j| j < job);
                self.active.insert(place, job);
                true
            }
            Event::Ready { job, attempt } => {
                let current = matches!(self.jobs[job].phase, Phase::Running { attempt: a, .. } if a == attempt);
                if current && self.jobs[job].outcome.finished.is_none() {
                    self.redeal(self.node_of(job));
                }
                // Nothing to decide: a job that starts to work is no news until it reports.
                false
            }
            Event::Finish { job, version } if self.jobs[job].version == version => {
                self.end(job);
                true
            }
            Event::Report { job, version } if self.jobs[job].version == version => {
                self.advance(job);
                self.plan_report(job);
                true
            }
            Event::Due if self.due == Some(self.now) => {
                self.due = None;
                true
            }
            Event::Probe => {
                self.run_probe();
                false
            }
            Event::Finish { .. } | Event::Report { .. } | Event::Due => false,
        }
    }

    fn node_of(&self, job: usize) -> usize {
        match self.jobs[job].phase {
            Phase::Running { node, .. } => node.0 as usize,
            Phase::Waiting => unreachable!("only running jobs have a node"),
        }
    }

    /// Brings one job to the present and hands its reports of the time between to its tracker.
    fn advance(&mut self, index: usize) {
        let (job, live) = (&self.world.jobs[index], &mut self.jobs[index]);
        let seconds = self.now.since(live.advanced).as_secs_f64();
        let (from, was) = (live.advanced, live.done_core_s);
        live.advanced = self.now;
        if seconds <= 0.0 || live.phase == Phase::Waiting {
            return;
        }
        live.consumed_node_s.memory += live.memory * seconds;
        let allocated = job.request.filter(|_| self.by_request).unwrap_or(live.promised);
        live.outcome.allocated_node_s += allocated * seconds;
        live.outcome.used_of_allocated_node_s += live.used.min(allocated) * seconds;
        if live.rate <= 0.0 {
            return;
        }
        live.done_core_s = (was + live.rate * seconds).min(job.work_core_s);
        live.consumed_node_s.cpu += live.used * seconds;
        if let Phase::Running { node, .. } = live.phase {
            let node = &self.world.nodes[node.0 as usize];
            live.core_s += live.used * seconds * node.cores * node.speed;
        }
        let when = |done: f64| from + Span::from_secs_f64((done - was) / live.rate);
        for mark in &mut live.outcome.marks {
            if mark.at.is_none() && live.done_core_s >= mark.work_core_s {
                mark.at = Some(when(mark.work_core_s));
            }
        }
        while let Some(next) = job.report_at(live.reports + 1) {
            if next > live.done_core_s * (1.0 + 1e-12) {
                break;
            }
            live.reports += 1;
            let value = job.curve.loss(live.reports as f64 / job.planned() as f64, live.noise.normal());
            let total = job.claimed(live.reports);
            let at = when(next).min(self.now);
            live.tracker.push(at, Sample { value, step: Some(live.reports), total });
            if self.record.courses {
                live.course.loss.push((at.as_secs_f64(), value));
            }
        }
    }

    fn end(&mut self, index: usize) {
        let work = self.world.jobs[index].work_core_s;
        // The finish was computed from the rate; what rounding left of the work is done now.
        self.advance(index);
        let node = self.node_of(index);
        let live = &mut self.jobs[index];
        live.done_core_s = work;
        live.outcome.finished = Some(self.now);
        for mark in &mut live.outcome.marks {
            mark.at.get_or_insert(self.now);
        }
        if let Some(stay) = live.outcome.stays.last_mut() {
            stay.to = self.now;
        }
        live.outcome.consumed_node_s = live.consumed_node_s.cpu;
        self.set_rate(index, 0.0, 0.0);
        self.jobs[index].phase = Phase::Waiting;
        self.remember(index);
        self.active.retain(|&j| j != index);
        self.redeal(node);
    }

    /// A run has ended: the other jobs of the same program know how long and how fast it was, as from the journal of a
    /// real daemon.
    fn remember(&mut self, index: usize) {
        let Some(program) = self.world.jobs[index].program else { return };
        let (signal, core_s) = (self.jobs[index].tracker.signal(), self.jobs[index].core_s);
        let pace = self.jobs[index].pace.own_pace();
        let run = FinishedRun { steps: signal.step, claimed: signal.total, claimed_by: None, core_s };
        let owner = self.world.jobs[index].owner;
        for (job, live) in self.world.jobs.iter().zip(&mut self.jobs) {
            if job.program == Some(program) && job.owner == owner && live.outcome.finished.is_none() {
                live.history.push(run);
                live.past_paces.extend(pace);
                let old = |known: usize| known.saturating_sub(MOST_RUNS);
                live.history.drain(..old(live.history.len()));
                live.past_paces.drain(..old(live.past_paces.len()));
                live.pace.expect(expected_pace(&live.past_paces));
            }
        }
    }

    /// Sets what a job does from now on; it must have been advanced to the present.
    fn set_rate(&mut self, index: usize, rate: f64, used: f64) {
        let live = &mut self.jobs[index];
        if self.record.courses && (live.used - used).abs() > 1e-9 {
            live.course.share.push((self.now.as_secs_f64(), used));
        }
        if live.rate == rate && live.used == used {
            return;
        }
        (live.rate, live.used) = (rate, used);
        live.version += 1;
        if rate > 0.0 && live.outcome.finished.is_none() {
            let left = (self.world.jobs[index].work_core_s - live.done_core_s).max(0.0);
            // A rate next to nothing may put the end beyond all time.
            let at = self.now + Span(((left / rate) * 1e6).ceil() as u64);
            let version = live.version;
            self.push(at, Event::Finish { job: index, version });
            self.plan_report(index);
        }
    }

    /// Where reports count at once, the next one is an event of its own.
    fn plan_report(&mut self, index: usize) {
        let (job, live) = (&self.world.jobs[index], &self.jobs[index]);
        if !self.reacts || live.rate <= 0.0 {
            return;
        }
        let Some(next) = job.report_at(live.reports + 1) else { return };
        let left = next - live.done_core_s;
        let at = self.now + Span((((left.max(0.0) / live.rate) * 1e6).ceil() as u64).saturating_add(1));
        self.push(at, Event::Report { job: index, version: live.version });
    }

    /// Deals one node out again, after anything on it changed.
    fn redeal(&mut self, node: usize) {
        let spec = &self.world.nodes[node];
        let here = |j: &usize| self.jobs[*j].phase != Phase::Waiting && self.node_of(*j) == node;
        let jobs: Vec<usize> = self.active.iter().copied().filter(here).collect();
        for &j in &jobs {
            self.advance(j);
        }
        let held: f64 = jobs.iter().map(|&j| self.world.jobs[j].memory_bytes as f64).sum();
        let swapping = (held / spec.memory_bytes.max(1) as f64).max(1.0);
        let (mut weights, mut caps) = (vec![], vec![]);
        for &j in &jobs {
            let (job, live) = (&self.world.jobs[j], &self.jobs[j]);
            let most = job.request.filter(|_| self.by_request).unwrap_or(1.0);
            let able = if live.ready > self.now { 0.0 } else { (job.max_cores / spec.cores).min(most) };
            let (weight, cap) = match self.world.actuator {
                Actuator::Weight => (live.target.share.cpu.get(), able),
                Actuator::Quota => (1.0, able.min(live.target.limit.cpu.get())),
            };
            weights.push(weight);
            caps.push(cap);
        }
        let parts = deal_by_weight(&weights, &caps, 1.0);
        let appetites: Vec<f64> = jobs.iter().map(|&j| appetite(&self.world.jobs[j].model)).collect();
        let slows = slowdowns(self.world.law, self.world.interference, &parts, &appetites);
        for ((&j, part), slow) in jobs.iter().zip(parts).zip(slows) {
            let job = &self.world.jobs[j];
            let rate = spec.speed * job.speedup.rate(part * spec.cores) / (slow * swapping);
            self.jobs[j].memory = job.memory_bytes as f64 / spec.memory_bytes.max(1) as f64;
            self.set_rate(j, rate, part);
        }
    }

    fn view(&mut self) -> View {
        for i in 0..self.active.len() {
            self.advance(self.active[i]);
        }
        let nodes = self.world.nodes.iter().enumerate().map(|(i, n)| NodeView {
            id: NodeId(i as u32),
            cores: n.cores,
            speed: n.speed,
            memory_bytes: n.memory_bytes,
            slots: n.slots,
            idle_node_s: None,
        });
        if self.has_deadlines {
            self.measure_paces();
        }
        let jobs = self.active.iter().map(|&j| {
            let (job, live) = (&self.world.jobs[j], &self.jobs[j]);
            let request = job.request.filter(|_| self.by_request);
            let node = &self.world.nodes[live.outcome.stays.last().map_or(0, |s| s.node)];
            let most = job.max_cores.min(node.cores) / node.cores;
            let left = (1.0 - live.done_core_s / job.work_core_s).max(0.0) * job.alone_s(node) * most;
            JobView {
                id: JobId(j as u64),
                owner: OwnerId(job.owner),
                arrived: job.arrival,
                phase: live.phase,
                signal: self.signal(j, node),
                consumed_node_s: live.consumed_node_s,
                floor: Share::clamped(request.unwrap_or(job.floor)),
                max: Share::clamped(request.unwrap_or(1.0)),
                priority: job.priority,
                waits_for: vec![],
                pinned: false,
                usable: None,
                has_team: false,
                serial: None,
                on_one_core: false,
                known_left_s: self.clairvoyant.then_some(left),
                history: live.history.clone(),
                deadline: job.deadline,
                ..JobView::default()
            }
        });
        View { now: self.now, nodes: nodes.collect(), jobs: jobs.collect() }
    }

    /// Notes which nodes have idle CPU until the next event.
    fn note_idle(&mut self) {
        let mut used = vec![0.0; self.world.nodes.len()];
        for live in self.active.iter().map(|&j| &self.jobs[j]) {
            if let Phase::Running { node, .. } = live.phase {
                used[node.0 as usize] += live.used;
            }
        }
        self.has_idle = used.into_iter().map(|used| used < IDLE_BELOW).collect();
    }

    fn measure_paces(&mut self) {
        for &j in &self.active {
            let live = &mut self.jobs[j];
            if let Phase::Running { node, .. } = live.phase {
                let (granted, has_idle) = (live.target.share.cpu.get(), self.has_idle[node.0 as usize]);
                let (now, consumed_node_s) = (self.now, live.consumed_node_s.cpu);
                let reading =
                    PaceReading { now, consumed_node_s, granted, scarce: false, has_idle, is_disturbed: false };
                live.pace.observe(reading, &live.tracker.signal());
            }
        }
    }

    /// What a policy sees of a job's reports and its pace.
    fn signal(&self, j: usize, node: &Node) -> Signal {
        let (job, live) = (&self.world.jobs[j], &self.jobs[j]);
        let mut signal = live.tracker.signal();
        if job.tells_pace {
            signal.total = Some((job.work_core_s / job.report_every_core_s).round() as u64);
            signal.pace = Some(job.pace(node));
        } else if job.shows_pace && live.pace.is_measured() {
            signal.pace = Some(job.pace(node));
        } else if self.has_deadlines {
            signal.pace = live.pace.pace();
        }
        signal
    }

    fn run_probe(&mut self) {
        let view = self.view();
        let Some((every, probe)) = &mut self.probe else { return };
        probe(&self.decider, &view);
        let at = self.now + *every;
        // Without any other event the jobs are stuck, and the run ends.
        if !self.heap.is_empty() {
            self.push(at, Event::Probe);
        }
    }

    fn decide(&mut self) -> Result<(), SimError> {
        for _ in 0..ROUNDS {
            let view = self.view();
            let outcome = match self.observer {
                Some(_) => self.decider.decide_recorded(view),
                None => self.decider.decide(view),
            };
            match outcome {
                decider::Outcome::NotDue => {
                    self.ask_again();
                    return Ok(());
                }
                decider::Outcome::Rejected(rejection) => {
                    return Err(SimError::Unsound { at_s: self.now.as_secs_f64(), what: rejection.reasons() });
                }
                decider::Outcome::Decision(decision) => {
                    self.plans += 1;
                    if let Some(observer) = &mut self.observer {
                        observer(&decision);
                    }
                    self.carry_out(&decision.plan);
                }
            }
        }
        Err(SimError::Restless(ROUNDS))
    }

    fn ask_again(&mut self) {
        let due = self.decider.due().map(|d| d.max(Time(self.now.0 + 1)));
        if due != self.due {
            self.due = due;
            if let Some(at) = due {
                self.push(at, Event::Due);
            }
        }
    }

    fn carry_out(&mut self, plan: &CheckedPlan) {
        let mut touched = vec![false; self.world.nodes.len()];
        for start in &plan.starts {
            let (job, node) = (start.job.0 as usize, start.node.0 as usize);
            self.settle(job, node, self.world.jobs[job].start);
            touched[node] = true;
        }
        for m in &plan.moves {
            let (job, to) = (m.job.0 as usize, m.to.0 as usize);
            let spec = &self.world.jobs[job];
            touched[self.leave(job)] = true;
            self.settle(job, to, Span(spec.save.0 + spec.restore.0));
            self.migrations.push(Migration { job, at: self.now, why: m.why });
            touched[to] = true;
        }
        for (id, verdict) in &plan.verdicts {
            let (job, Some(target)) = (id.0 as usize, verdict.target) else { continue };
            // A job that moves competes freely until the next plan knows it where it is.
            if plan.moves.iter().any(|m| m.job == *id) {
                continue;
            }
            let promised = verdict.least.get();
            if self.jobs[job].target != target || self.jobs[job].promised != promised {
                self.advance(job);
                (self.jobs[job].target, self.jobs[job].promised) = (target, promised);
                touched[self.node_of(job)] = true;
            }
        }
        for (node, _) in touched.iter().enumerate().filter(|(_, t)| **t) {
            self.redeal(node);
        }
    }

    /// Takes a running job off its node and returns which it was.
    fn leave(&mut self, index: usize) -> usize {
        self.advance(index);
        self.set_rate(index, 0.0, 0.0);
        if let Some(stay) = self.jobs[index].outcome.stays.last_mut() {
            stay.to = self.now;
        }
        self.node_of(index)
    }

    /// Puts a job onto a node, where it can work after `delay`.
    fn settle(&mut self, index: usize, node: usize, delay: Span) {
        let live = &mut self.jobs[index];
        let attempt = live.outcome.stays.len() as u32 + 1;
        live.phase = Phase::Running { node: NodeId(node as u32), since: self.now, attempt };
        live.ready = self.now + delay;
        live.target = Target::FREE;
        live.outcome.stays.push(Stay { node, from: self.now, to: self.now });
        let ready = live.ready;
        self.push(ready, Event::Ready { job: index, attempt });
    }

    fn finish(self) -> Result<Outcome, SimError> {
        if let Some(first) = self.active.first() {
            let first = self.world.jobs[*first].name.clone();
            return Err(SimError::Stuck { at_s: self.now.as_secs_f64(), left: self.active.len(), first });
        }
        let (jobs, courses) = self.jobs.into_iter().map(|l| (l.outcome, l.course)).unzip();
        Ok(Outcome { jobs, courses, migrations: self.migrations, events: self.events, plans: self.plans })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::{self, SPECON};
    use crate::world::Law;

    #[test]
    fn an_unsound_plan_is_not_carried_out_and_ends_the_run() {
        let node = Node { name: "n".into(), cores: 4.0, speed: 1.0, memory_bytes: 64 << 30, slots: None };
        let jobs = (0..2).map(|i| models::job(&SPECON[0], 1, i, format!("job {i}"), 0.0)).collect();
        let world = World {
            seed: 1,
            nodes: vec![node],
            jobs,
            actuator: Actuator::Weight,
            interference: 0.0,
            law: Law::default(),
        };
        for preset in [Preset::Na, Preset::Gainshare] {
            let mut run = Run::new(&world, &Policy::from(preset), Record::default());
            run.decider.break_plans();
            run.process(Event::Arrive(0));
            run.process(Event::Arrive(1));
            let error = run.decide().expect_err("the plan is unsound");
            assert!(matches!(&error, SimError::Unsound { what, .. } if what.contains("another moment")), "{error}");
            assert_eq!(run.plans, 0);
            for job in &run.jobs {
                assert_eq!((job.phase, job.target), (Phase::Waiting, Target::FREE), "it is not started");
                assert!(job.outcome.stays.is_empty());
            }
        }
    }
}
