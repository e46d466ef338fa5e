//! Which of many waiting jobs runs next on whole devices, and which running one steps aside?
//!
//! **Problem.** On GPU clusters jobs hold whole devices, all or none (a *gang*), and tens of thousands of
//! them come and go. Looking at every job at every event, as the sharing decisions do, would cost more than
//! the jobs are worth.
//!
//! **Approach.** The queue is kept, not rebuilt: waiting jobs sorted by rank within each gang size, running
//! jobs sorted by rank. An event touches only what it changes, so a decision costs the logarithm of the
//! number of jobs times the number of different gang sizes.
//!
//! **Answers.** `fifo`: first come, first served, strictly: no job passes the first in line. `srtf`:
//! shortest remaining time first, where it is known; preempts. `las`: Tiresias' discretised two-dimensional
//! least attained service (J. Gu et al., NSDI 2019): attained service is devices × seconds; a job that exceeds
//! a queue's limit falls into the next queue; within a queue first come, first served; preempts. Under the
//! last two a job that fits may pass one that does not.
//!
//! **Properties.** `never_more_than_there_is`: the devices of running jobs never exceed the cluster;
//! `no_idle_device_a_waiting_job_could_use` under `srtf` and `las`; ranks are total (ties go to the lower
//! id), so that the same events give the same decisions.

use gainshare_core::model::{JobId, Span, Time};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The order of the queue.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "by")]
pub enum GangOrder {
    Fifo,
    Srtf,
    /// Limits of the queues in device-seconds, ascending.
    Las {
        limits_s: Vec<f64>,
    },
}

impl GangOrder {
    /// Tiresias with two queues; the limit is the one its authors use in their evaluation (3,200 GPU-seconds).
    pub fn tiresias() -> GangOrder {
        GangOrder::Las { limits_s: vec![3200.0] }
    }
}

/// What to do now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Act {
    Start(JobId),
    /// Save it and put it back into the queue.
    Stop(JobId),
}

/// A rank: lower goes first. The queue, then a number whose meaning is the order's, then the id.
type Rank = (usize, u64, JobId);

#[derive(Debug, Clone, PartialEq)]
struct QueuedJob {
    arrived: Time,
    devices: u32,
    /// Known remaining time; only `srtf` looks at it.
    left: Span,
    /// Device-seconds attained before the present run.
    attained_s: f64,
    queue: usize,
    started: Option<Time>,
}

/// The queue of one cluster.
#[derive(Debug, Clone)]
pub struct Gang {
    order: GangOrder,
    free: u32,
    jobs: BTreeMap<JobId, QueuedJob>,
    /// By gang size.
    waiting: BTreeMap<u32, BTreeSet<Rank>>,
    running: BTreeSet<Rank>,
    /// When running jobs will fall into the next queue.
    falls: BTreeSet<(Time, JobId)>,
}

impl Gang {
    pub fn new(order: GangOrder, devices: u32) -> Gang {
        Gang {
            order,
            free: devices,
            jobs: BTreeMap::new(),
            waiting: BTreeMap::new(),
            running: BTreeSet::new(),
            falls: BTreeSet::new(),
        }
    }

    /// A job came. `left` is its remaining time, where it is known.
    pub fn arrive(&mut self, now: Time, id: JobId, devices: u32, left: Span) {
        let job = QueuedJob { arrived: now, devices, left, attained_s: 0.0, queue: 0, started: None };
        self.waiting.entry(devices).or_default().insert(waiting_rank(&self.order, id, &job));
        self.jobs.insert(id, job);
    }

    /// A running job ended.
    pub fn finish(&mut self, id: JobId) {
        let Some(job) = self.jobs.remove(&id) else { return };
        self.free += job.devices;
        self.running.remove(&running_rank(&self.order, id, &job));
        if let Some(at) = falls_at(&self.order, &job) {
            self.falls.remove(&(at, id));
        }
    }

    /// When to decide again, if nothing happens before.
    pub fn due(&self) -> Option<Time> {
        self.falls.first().map(|f| f.0)
    }

    pub fn waiting(&self) -> usize {
        self.jobs.len() - self.running.len()
    }

    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// What to do now, in this order.
    pub fn decide(&mut self, now: Time) -> Vec<Act> {
        self.fall(now);
        let mut acts = vec![];
        while let Some((id, victims)) = self.next(now) {
            for victim in victims {
                self.stop(now, victim);
                acts.push(Act::Stop(victim));
            }
            self.start(now, id);
            acts.push(Act::Start(id));
        }
        acts
    }

    /// Moves running jobs whose service exceeds their queue's limit into the next queue.
    fn fall(&mut self, now: Time) {
        while let Some((_, id)) = self.falls.first().copied().filter(|f| f.0 <= now) {
            self.falls.pop_first();
            let job = self.jobs.get_mut(&id).expect("only running jobs fall");
            self.running.remove(&running_rank(&self.order, id, job));
            job.queue += 1;
            self.running.insert(running_rank(&self.order, id, job));
            self.falls.extend(falls_at(&self.order, job).map(|at| (at, id)));
        }
    }

    /// The first job in line that can run, and who has to step aside for it.
    fn next(&self, now: Time) -> Option<(JobId, Vec<JobId>)> {
        let mut heads: Vec<(Rank, u32)> =
            self.waiting.iter().filter_map(|(devices, ranks)| ranks.first().map(|r| (*r, *devices))).collect();
        heads.sort_unstable();
        if self.order == GangOrder::Fifo {
            heads.truncate(1);
        }
        heads.into_iter().find_map(|(rank, devices)| {
            if devices <= self.free {
                return Some((rank.2, vec![]));
            }
            let (mut victims, mut room) = (vec![], self.free);
            for victim in self.running.iter().rev().take_while(|r| self.outranks(now, &rank, r)) {
                victims.push(victim.2);
                room += self.jobs[&victim.2].devices;
                if room >= devices {
                    return Some((rank.2, victims));
                }
            }
            None
        })
    }

    fn outranks(&self, now: Time, waiting: &Rank, running: &Rank) -> bool {
        match self.order {
            GangOrder::Fifo => false,
            // A running job is ranked by when it will end, a waiting one by how long it will take.
            GangOrder::Srtf => now + Span(waiting.1) < Time(running.1),
            GangOrder::Las { .. } => waiting < running,
        }
    }

    fn start(&mut self, now: Time, id: JobId) {
        let job = self.jobs.get_mut(&id).expect("only known jobs start");
        let ranks = self.waiting.get_mut(&job.devices).expect("it waited");
        ranks.remove(&waiting_rank(&self.order, id, job));
        if ranks.is_empty() {
            self.waiting.remove(&job.devices);
        }
        self.free -= job.devices;
        job.started = Some(now);
        self.running.insert(running_rank(&self.order, id, job));
        self.falls.extend(falls_at(&self.order, job).map(|at| (at, id)));
    }

    fn stop(&mut self, now: Time, id: JobId) {
        let job = self.jobs.get_mut(&id).expect("only known jobs stop");
        self.running.remove(&running_rank(&self.order, id, job));
        if let Some(at) = falls_at(&self.order, job) {
            self.falls.remove(&(at, id));
        }
        let ran = now.since(job.started.expect("it ran"));
        job.attained_s += f64::from(job.devices) * ran.as_secs_f64();
        job.left = Span(job.left.0.saturating_sub(ran.0));
        job.started = None;
        self.free += job.devices;
        self.waiting.entry(job.devices).or_default().insert(waiting_rank(&self.order, id, job));
    }
}

/// When a running job's service will exceed its queue's limit, if it ever does.
fn falls_at(order: &GangOrder, job: &QueuedJob) -> Option<Time> {
    let GangOrder::Las { limits_s } = order else { return None };
    let (limit, started) = limits_s.get(job.queue).zip(job.started)?;
    let left_s = (limit - job.attained_s).max(0.0) / f64::from(job.devices.max(1));
    Some(started + Span((left_s * 1e6).ceil() as u64))
}

fn running_rank(order: &GangOrder, id: JobId, job: &QueuedJob) -> Rank {
    match order {
        GangOrder::Srtf => (0, (job.started.unwrap_or_default() + job.left).0, id),
        _ => waiting_rank(order, id, job),
    }
}

fn waiting_rank(order: &GangOrder, id: JobId, job: &QueuedJob) -> Rank {
    match order {
        GangOrder::Fifo => (0, job.arrived.0, id),
        GangOrder::Srtf => (0, job.left.0, id),
        GangOrder::Las { .. } => (job.queue, job.arrived.0, id),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const fn s(seconds: u64) -> Time {
        Time(seconds * 1_000_000)
    }

    #[test]
    fn no_job_passes_the_first_in_line_under_fifo() {
        let mut gang = Gang::new(GangOrder::Fifo, 8);
        gang.arrive(s(0), JobId(1), 6, Span::ZERO);
        gang.arrive(s(1), JobId(2), 4, Span::ZERO);
        gang.arrive(s(2), JobId(3), 1, Span::ZERO);
        assert_eq!(gang.decide(s(2)), [Act::Start(JobId(1))]);
        gang.finish(JobId(1));
        assert_eq!(gang.decide(s(9)), [Act::Start(JobId(2)), Act::Start(JobId(3))]);
    }

    #[test]
    fn a_new_job_preempts_one_that_had_its_service_under_las() {
        let mut gang = Gang::new(GangOrder::Las { limits_s: vec![100.0] }, 4);
        gang.arrive(s(0), JobId(1), 4, Span::ZERO);
        gang.decide(s(0));
        // 4 devices reach 100 device-seconds after 25 s.
        assert_eq!(gang.due(), Some(s(25)));
        gang.arrive(s(10), JobId(2), 1, Span::ZERO);
        assert_eq!(gang.decide(s(10)), []);
        assert_eq!(gang.decide(s(25)), [Act::Stop(JobId(1)), Act::Start(JobId(2))]);
        gang.finish(JobId(2));
        assert_eq!(gang.decide(s(30)), [Act::Start(JobId(1))]);
        assert_eq!(gang.due(), None);
    }

    #[test]
    fn the_shorter_remaining_time_goes_first_under_srtf() {
        let mut gang = Gang::new(GangOrder::Srtf, 1);
        gang.arrive(s(0), JobId(1), 1, Span::from_secs(100));
        gang.decide(s(0));
        gang.arrive(s(60), JobId(2), 1, Span::from_secs(50));
        assert_eq!(gang.decide(s(60)), [], "40 s are left of the running one");
        gang.arrive(s(70), JobId(3), 1, Span::from_secs(20));
        assert_eq!(gang.decide(s(70)), [Act::Stop(JobId(1)), Act::Start(JobId(3))]);
        gang.finish(JobId(3));
        assert_eq!(gang.decide(s(90)), [Act::Start(JobId(1))], "30 s against 50 s");
    }

    proptest! {
        #[test]
        fn never_more_than_there_is_and_no_idle_device_a_waiting_job_could_use(
            events in prop::collection::vec((0u64..50, 1u32..9, 1u64..300, any::<bool>()), 1..60),
            kind in 0..3usize,
        ) {
            let orders = [GangOrder::Fifo, GangOrder::Srtf, GangOrder::Las { limits_s: vec![60.0, 600.0] }];
            let order = orders[kind].clone();
            let mut gang = Gang::new(order.clone(), 8);
            let (mut now, mut running, mut size) = (Time::ZERO, BTreeSet::new(), BTreeMap::new());
            for (i, (wait, devices, left, ends)) in events.into_iter().enumerate() {
                now = now + Span::from_secs(wait);
                let first = running.iter().next().copied();
                match first.filter(|_| ends) {
                    Some(id) => {
                        running.remove(&id);
                        gang.finish(id);
                    }
                    None => {
                        size.insert(JobId(i as u64), devices);
                        gang.arrive(now, JobId(i as u64), devices, Span::from_secs(left));
                    }
                }
                for act in gang.decide(now) {
                    match act {
                        Act::Start(id) => prop_assert!(running.insert(id)),
                        Act::Stop(id) => prop_assert!(running.remove(&id)),
                    }
                }
                let used: u32 = running.iter().map(|id| size[id]).sum();
                prop_assert!(used <= 8);
                prop_assert_eq!(gang.running(), running.len());
                let fits = gang.waiting.keys().any(|devices| *devices <= 8 - used);
                prop_assert!(order == GangOrder::Fifo || !fits);
                prop_assert_eq!(gang.decide(now), vec![], "deciding again changes nothing");
            }
        }
    }
}
