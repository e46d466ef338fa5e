//! Our rule: which jobs are promised their deadline, and which jobs have the GPUs now?
//!
//! **Approach.** At every event the planner computes a new plan of all jobs, in four steps.
//! 1. The promised jobs and the new ones are filled in order of deadline with their minimum satisfactory
//!    share ([`Timeline::fill`]): first with efficient levels only, then with all levels. If a job does not
//!    fit, the new job that needs the most GPU time is refused (the rule of Moore and Hodgson for the
//!    largest number of jobs in time) and the filling goes on without it. If no new job is left and a
//!    promised job still does not fit, the previous plan stays in force.
//! 2. Refused jobs that could still make their deadline are tried again in what is left free, the cheapest
//!    first. Such a job may fit now because other jobs ended early or because it ran on spare GPUs.
//! 3. Every job in the plan is promised its deadline.
//! 4. GPUs that the plan leaves free for the next slot go where they save the most GPU time of later, level
//!    by level. Refused jobs run on such GPUs only.
//!
//! **Why promises hold.** A plan contains the restarts it causes, so a plan that is carried out keeps every
//! promise. A new plan replaces it only if it keeps them too. A job gets GPUs beyond the plan only if the
//! GPUs are free for at least a slot and the work of that time exceeds the planned work by the cost of
//! changing back; the job then keeps them for that time. So every job is always at least as far as its plan.
//! This holds as far as speeds and lengths are true; [`super::learned`] can be wrong about them.

use super::timeline::{JobDemand, Period, Reservation, SLOT_S, Timeline, slot_boundary};
use super::{Cluster, Level};
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::sync::Arc;

/// What a saved GPU second of a refused job counts, against one of a promised job.
const REFUSED_WORTH: f64 = 0.5;

/// The same for a job that can no longer make its deadline.
const LATE_WORTH: f64 = 1e-4;

/// A job of unknown speed gets its first GPUs before any job grows.
const PROBE_WORTH: f64 = 1e9;

/// A restart is weighed against what the job gains in this time.
const GROWTH_HORIZON_S: f64 = 600.0;

/// What a planner knows of one unfinished job.
#[derive(Debug, Clone)]
pub struct JobView {
    pub id: usize,
    pub deadline_s: i64,
    /// Iterations that remain; none while the job's speed and length are unknown.
    pub left: Option<f64>,
    /// All useful levels, and those of them that are efficient.
    pub useful: Arc<[Level]>,
    pub efficient: Arc<[Level]>,
    pub gpus: u32,
    /// What remains of the job's last restart.
    pub restart_left_s: i64,
}

/// What to do now.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Decision {
    /// GPUs of each job that has any.
    pub gpus: BTreeMap<usize, u32>,
    /// When the plan changes by itself.
    pub wake_s: Option<i64>,
}

/// What the planner remembers of a job.
#[derive(Debug, Clone, Default)]
struct Entry {
    /// The job has been admitted or refused once.
    judged: bool,
    promised: bool,
    reservation: Reservation,
    /// Until then the job keeps GPUs beyond its plan.
    held_until_s: i64,
}

/// The rule and the last plan.
#[derive(Debug, Clone)]
pub struct Planner {
    cluster: Cluster,
    entries: BTreeMap<usize, Entry>,
}

impl JobView {
    fn speed(&self, gpus: u32) -> f64 {
        self.useful.iter().rev().find(|l| l.gpus <= gpus).map_or(0.0, |l| l.speed)
    }

    /// Iterations that remain; of an unknown job, none will be enough.
    fn left(&self) -> f64 {
        self.left.unwrap_or(f64::MAX)
    }

    /// Whether the job would be in time with its fastest level from now on.
    fn can_meet_deadline(&self, now_s: i64) -> bool {
        let fastest = self.useful.last().map_or(0.0, |l| l.speed);
        self.left() <= fastest * (self.deadline_s - now_s) as f64
    }

    /// GPU time per iteration at the least level that makes the deadline if the GPUs are free.
    fn cost(&self, now_s: i64) -> f64 {
        let window_s = (self.deadline_s - now_s).max(1) as f64;
        let level = self.efficient.iter().find(|l| self.left() <= l.speed * window_s).or(self.useful.last());
        level.map_or(0.0, |l| f64::from(l.gpus) / l.speed)
    }

    fn gpu_time(&self, now_s: i64) -> f64 {
        self.left() * self.cost(now_s)
    }
}

impl Planner {
    pub fn new(cluster: Cluster) -> Planner {
        Planner { cluster, entries: BTreeMap::new() }
    }

    /// Whether the job is promised its deadline.
    pub fn is_promised(&self, id: usize) -> bool {
        self.entries.get(&id).is_some_and(|e| e.promised)
    }

    /// Computes a new plan. `jobs` are all unfinished jobs.
    pub fn decide(&mut self, now_s: i64, jobs: &[JobView]) -> Decision {
        let present: BTreeSet<usize> = jobs.iter().map(|j| j.id).collect();
        self.entries.retain(|id, _| present.contains(id));
        for job in jobs.iter().filter(|j| j.left.is_none()) {
            // The length on which a promise rested can prove to be unknown.
            if let Some(entry) = self.entries.get_mut(&job.id) {
                (entry.judged, entry.promised, entry.reservation) = (false, false, Reservation::default());
            }
        }
        let mut timeline = Timeline::new(now_s, self.cluster);
        for job in jobs {
            let end_s = self.free_from(job, now_s);
            if end_s > now_s {
                timeline.take(&Period { start_s: now_s, end_s, gpus: job.gpus });
            }
        }
        let mut timeline = self.plan(now_s, jobs, timeline);
        self.retry(now_s, jobs, &mut timeline);
        self.share_out(now_s, jobs, &timeline)
    }

    /// From when on the job's GPUs may change: later than now while the job is held. A hold ends as soon as a
    /// measurement shows that fewer GPUs are at least as fast.
    fn free_from(&self, job: &JobView, now_s: i64) -> i64 {
        match self.entries.get(&job.id) {
            Some(entry) if job.useful.iter().any(|l| l.gpus == job.gpus) => entry.held_until_s.max(now_s),
            _ => now_s,
        }
    }

    fn fill(&self, job: &JobView, now_s: i64, timeline: &Timeline) -> Option<Reservation> {
        let need = |levels| JobDemand {
            left: job.left(),
            deadline_s: job.deadline_s,
            levels,
            gpus: job.gpus,
            restart_left_s: job.restart_left_s,
            held_speed: job.speed(job.gpus),
            held_until_s: self.free_from(job, now_s),
        };
        timeline.fill(&need(&job.efficient)).or_else(|| timeline.fill(&need(&job.useful)))
    }

    /// Step 1. Returns what is left free.
    fn plan(&mut self, now_s: i64, jobs: &[JobView], base: Timeline) -> Timeline {
        let is_new = |id: &usize| !self.entries.get(id).is_some_and(|e| e.judged);
        let plannable = |j: &&JobView| j.left.is_some() && (is_new(&j.id) || self.is_promised(j.id));
        let mut planned: Vec<&JobView> = jobs.iter().filter(plannable).collect();
        planned.sort_by_key(|j| (j.deadline_s, j.id));
        let mut refused: Vec<usize> = vec![];
        let mut filled: Vec<Reservation> = vec![];
        // The timeline before each new job of `filled`, to take the job out again.
        let mut before: Vec<Option<Timeline>> = vec![];
        let mut timeline = base.clone();
        while let Some(&job) = planned.get(filled.len()) {
            if let Some(reservation) = self.fill(job, now_s, &timeline) {
                before.push(is_new(&job.id).then(|| timeline.clone()));
                timeline.reserve(&reservation, self.free_from(job, now_s));
                filled.push(reservation);
                continue;
            }
            let costliest = (0..=filled.len())
                .filter(|&i| is_new(&planned[i].id))
                .max_by(|&a, &b| planned[a].gpu_time(now_s).total_cmp(&planned[b].gpu_time(now_s)));
            let unsound = || (0..planned.len()).find(|&i| !self.is_sound(planned[i], now_s));
            let Some(i) = costliest.or_else(unsound) else {
                refused.extend(planned.iter().map(|j| j.id).filter(is_new));
                refused.into_iter().for_each(|id| self.refuse(id));
                return self.keep_plan(now_s, jobs, base);
            };
            let job = planned.remove(i);
            refused.push(job.id);
            if i < filled.len() {
                // A promised job has no timeline of its own; then the filling starts again.
                let (without, kept) = before[i].take().map_or((base.clone(), 0), |t| (t, i));
                timeline = without;
                filled.truncate(kept);
                before.truncate(kept);
            }
        }
        refused.into_iter().for_each(|id| self.refuse(id));
        for (job, reservation) in planned.iter().zip(filled) {
            let entry = self.entries.entry(job.id).or_default();
            (entry.judged, entry.promised, entry.reservation) = (true, true, reservation);
        }
        timeline
    }

    /// Takes a job out of the plan.
    fn refuse(&mut self, id: usize) {
        let entry = self.entries.entry(id).or_default();
        (entry.judged, entry.promised) = (true, false);
        entry.reservation = Reservation::default();
    }

    /// Whether the previous plan of a promised job is still enough. It is, unless the job proved slower or
    /// longer than predicted. Restarts are left out, so that this never fails by rounding.
    fn is_sound(&self, job: &JobView, now_s: i64) -> bool {
        let Some(entry) = self.entries.get(&job.id) else { return true };
        let from_s = self.free_from(job, now_s);
        let held = job.speed(job.gpus) * (from_s - now_s) as f64;
        let work_s = |p: &Period| (p.end_s - p.start_s.max(from_s)).max(0) as f64;
        let planned: f64 = entry.reservation.periods.iter().map(|p| job.speed(p.gpus) * (work_s(p) + 1.0)).sum();
        held + planned >= job.left() * 0.999
    }

    /// The previous plan of the promised jobs.
    fn keep_plan(&mut self, now_s: i64, jobs: &[JobView], mut timeline: Timeline) -> Timeline {
        for job in jobs {
            let from_s = self.free_from(job, now_s);
            let Some(entry) = self.entries.get_mut(&job.id).filter(|e| e.promised) else { continue };
            // A plan that rests on wrong speeds can be past its end.
            if entry.reservation.end_s <= now_s || !timeline.reserve(&entry.reservation, from_s) {
                entry.reservation = Reservation::default();
            }
        }
        timeline
    }

    /// Step 2.
    fn retry(&mut self, now_s: i64, jobs: &[JobView], timeline: &mut Timeline) {
        let outside = |j: &&JobView| !self.is_promised(j.id) && j.can_meet_deadline(now_s);
        let mut outside: Vec<&JobView> = jobs.iter().filter(outside).collect();
        outside.sort_by(|a, b| a.gpu_time(now_s).total_cmp(&b.gpu_time(now_s)).then(a.id.cmp(&b.id)));
        for job in outside {
            if let Some(reservation) = self.fill(job, now_s, timeline) {
                timeline.reserve(&reservation, self.free_from(job, now_s));
                let entry = self.entries.entry(job.id).or_default();
                (entry.judged, entry.promised, entry.reservation) = (true, true, reservation);
            }
        }
    }

    /// Step 4.
    fn share_out(&mut self, now_s: i64, jobs: &[JobView], timeline: &Timeline) -> Decision {
        let mut decision = Decision::default();
        let mut free = timeline.least_free(now_s, hold_end_s(now_s));
        let mut growths: Vec<Growth> = vec![];
        for job in jobs {
            let entry = self.entries.entry(job.id).or_default().clone();
            let held = self.free_from(job, now_s) > now_s;
            let gpus = if held { job.gpus } else { entry.reservation.gpus_at(now_s) };
            if gpus > 0 {
                decision.gpus.insert(job.id, gpus);
            }
            // The end of a hold needs no event: the next change of the plan takes the GPUs back.
            let change_s = entry.reservation.next_change_s(now_s);
            decision.wake_s = decision.wake_s.into_iter().chain(change_s).min();
            if !held {
                growths.push(self.growth(job, &entry, gpus, now_s));
            }
        }
        let step = |i: usize, g: &Growth, free: u32| {
            g.best_level(self.cluster, free).map(|(gpus, gain)| Step { gain, growth: i, gpus })
        };
        let mut steps: BinaryHeap<Step> = growths.iter().enumerate().filter_map(|(i, g)| step(i, g, free)).collect();
        while let Some(best) = steps.pop() {
            let growth = &mut growths[best.growth];
            if best.gpus - growth.gpus <= free {
                free -= best.gpus - growth.gpus;
                growth.gpus = best.gpus;
                decision.gpus.insert(growth.job.id, best.gpus);
            }
            steps.extend(step(best.growth, growth, free));
        }
        let grown: Vec<usize> = growths.iter().filter(|g| g.gpus > g.planned).map(|g| g.job.id).collect();
        for id in grown {
            if let Some(entry) = self.entries.get_mut(&id) {
                entry.held_until_s = hold_end_s(now_s);
            }
        }
        decision
    }

    fn growth<'a>(&self, job: &'a JobView, entry: &Entry, gpus: u32, now_s: i64) -> Growth<'a> {
        let worth = match (entry.promised, job.can_meet_deadline(now_s)) {
            _ if job.left.is_none() && gpus == 0 => PROBE_WORTH,
            (true, _) => 1.0,
            (false, true) => REFUSED_WORTH,
            (false, false) => LATE_WORTH,
        };
        let hold_s = hold_end_s(now_s);
        let within_s = |p: &Period| (p.end_s.min(hold_s) - p.start_s.max(now_s)).max(0) as f64;
        let planned_work: f64 = entry.reservation.periods.iter().map(|p| job.speed(p.gpus) * within_s(p)).sum();
        let back = entry.reservation.gpus_at(hold_s);
        let back_s = if back > 0 { self.cluster.restart_s(back) as f64 } else { 0.0 };
        Growth {
            job,
            planned: gpus,
            gpus,
            worth: worth * job.cost(now_s),
            // A promised job that ends within the hold must end by its deadline.
            hold_s: (if entry.promised { hold_s.min(job.deadline_s) } else { hold_s } - now_s) as f64,
            hold_work: planned_work.min(job.left()) + job.speed(back) * back_s,
        }
    }
}

/// Until when a job keeps GPUs beyond its plan: at least a slot.
fn hold_end_s(now_s: i64) -> i64 {
    slot_boundary(now_s + SLOT_S)
}

/// A job that may have more GPUs than its plan needs now.
struct Growth<'a> {
    job: &'a JobView,
    planned: u32,
    gpus: u32,
    /// GPU time of later that one iteration done now saves.
    worth: f64,
    /// How long the job keeps its GPUs if it grows, and how many iterations this time must yield so that the
    /// plan stays sound afterwards.
    hold_s: f64,
    hold_work: f64,
}

impl Growth<'_> {
    /// The level whose additional GPUs save the most GPU time of later, and how much each GPU second saves.
    fn best_level(&self, cluster: Cluster, free: u32) -> Option<(u32, f64)> {
        let job = self.job;
        let work = |gpus: u32, over_s: f64| {
            let restart_s = if gpus == job.gpus { job.restart_left_s } else { cluster.restart_s(gpus.max(1)) };
            job.speed(gpus) * (over_s - restart_s as f64).max(0.0)
        };
        let gain = |l: &Level| {
            let over_s = GROWTH_HORIZON_S.min(job.left() / l.speed + cluster.restart_s(l.gpus) as f64);
            let saved = (work(l.gpus, over_s) - work(self.gpus, over_s)) * self.worth;
            (l.gpus, saved / (f64::from(l.gpus - self.gpus) * over_s))
        };
        // A probe needs no more than the lowest level.
        let most = if job.left.is_none() { job.useful.first().map_or(0, |l| l.gpus) } else { u32::MAX };
        let fits = |l: &&Level| l.gpus > self.gpus && l.gpus - self.gpus <= free && l.gpus <= most;
        let sound = |l: &&Level| work(l.gpus, self.hold_s) >= self.hold_work.min(job.left());
        let levels = job.useful.iter().filter(fits).filter(sound).map(gain).filter(|(_, gain)| *gain > 0.0);
        levels.max_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0)))
    }
}

/// A growth to `gpus` GPUs; the largest gain first, the first job among equals.
struct Step {
    gain: f64,
    growth: usize,
    gpus: u32,
}

impl Ord for Step {
    fn cmp(&self, other: &Step) -> std::cmp::Ordering {
        self.gain.total_cmp(&other.gain).then(other.growth.cmp(&self.growth)).then(self.gpus.cmp(&other.gpus))
    }
}

impl PartialOrd for Step {
    fn partial_cmp(&self, other: &Step) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Step {
    fn eq(&self, other: &Step) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Step {}
