//! Replays a trace on a pool of devices under one order of the queue.
//!
//! Jobs need their devices all at once and keep them; a preempted job loses nothing but the time to restore
//! it. Only arrivals, ends and the moments the queue asked for are events, each of which costs the
//! logarithm of the number of jobs.

use super::TraceJob;
use super::gang::{Act, Gang, GangOrder};
use crate::study::quantile_of_sorted;
use gainshare_core::model::{JobId, Span, Time};
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// What became of a trace. Times in seconds from submission to end.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Replay {
    pub jobs: usize,
    pub devices: u32,
    pub mean_completion_s: f64,
    pub median_completion_s: f64,
    pub p95_completion_s: f64,
    pub p99_completion_s: f64,
    pub mean_wait_s: f64,
    pub makespan_s: f64,
    /// Device-seconds of work over devices times makespan.
    pub utilisation: f64,
    pub preemptions: u64,
    pub longest_queue: usize,
    pub events: u64,
    /// Jobs that ask for more devices than there are; they never run and are not counted above.
    pub impossible: usize,
}

#[derive(Debug, Clone, Copy, Default)]
struct LiveJob {
    left: Span,
    started: Option<Time>,
    /// Restoring ends here; work begins.
    ready: Time,
    version: u32,
    ran_before: bool,
    ended: Option<Time>,
}

/// What is counted on the way.
#[derive(Default)]
struct Counts {
    events: u64,
    preemptions: u64,
    longest_queue: usize,
    impossible: usize,
}

/// Replays `jobs`, which are in order of submission. A job that was preempted takes `restore` longer.
pub fn replay(jobs: &[TraceJob], devices: u32, order: GangOrder, restore: Span) -> Replay {
    let mut gang = Gang::new(order, devices);
    let mut live: Vec<LiveJob> =
        jobs.iter().map(|j| LiveJob { left: Span::from_secs_f64(j.duration_s), ..LiveJob::default() }).collect();
    let mut ends: BinaryHeap<Reverse<(Time, u32, u32)>> = BinaryHeap::new();
    let mut next = 0;
    let mut counts = Counts::default();
    loop {
        let arrival = jobs.get(next).map(|j| Time::from_secs_f64(j.submitted_s));
        let end = ends.peek().map(|Reverse((t, _, _))| *t);
        let Some(now) = [arrival, end, gang.due()].into_iter().flatten().min() else { break };
        counts.events += 1;
        // What happens at the same moment is decided on together; else a device that one job frees could go
        // to and fro between the others.
        while let Some(Reverse((_, id, version))) = ends.peek().copied().filter(|Reverse((t, _, _))| *t == now) {
            ends.pop();
            let job = &mut live[id as usize];
            if job.version == version {
                job.ended = Some(now);
                gang.finish(JobId(u64::from(id)));
            }
        }
        while let Some(job) = jobs.get(next).filter(|j| Time::from_secs_f64(j.submitted_s) == now) {
            if job.devices > devices {
                counts.impossible += 1;
            } else {
                gang.arrive(now, JobId(next as u64), job.devices, live[next].left);
            }
            next += 1;
        }
        for act in gang.decide(now) {
            match act {
                Act::Start(id) => {
                    let job = &mut live[id.0 as usize];
                    job.start(now, restore);
                    ends.push(Reverse((job.ready + job.left, id.0 as u32, job.version)));
                }
                Act::Stop(id) => {
                    counts.preemptions += 1;
                    live[id.0 as usize].stop(now);
                }
            }
        }
        counts.longest_queue = counts.longest_queue.max(gang.waiting());
    }
    figures(jobs, &live, devices, counts)
}

impl LiveJob {
    fn start(&mut self, now: Time, restore: Span) {
        self.ready = if self.ran_before { now + restore } else { now };
        (self.started, self.ran_before) = (Some(now), true);
    }

    fn stop(&mut self, now: Time) {
        self.left = Span(self.left.0.saturating_sub(now.since(self.ready).0));
        self.started = None;
        self.version += 1;
    }
}

fn figures(jobs: &[TraceJob], live: &[LiveJob], devices: u32, counts: Counts) -> Replay {
    let ended = || jobs.iter().zip(live).filter_map(|(j, l)| l.ended.map(|e| (j, e)));
    let mut taken: Vec<f64> = ended().map(|(j, e)| e.as_secs_f64() - j.submitted_s).collect();
    let work: f64 = ended().map(|(j, _)| j.duration_s * f64::from(j.devices)).sum();
    let worked: f64 = ended().map(|(j, _)| j.duration_s).sum();
    let count = taken.len().max(1) as f64;
    let mean = taken.iter().sum::<f64>() / count;
    taken.sort_unstable_by(f64::total_cmp);
    let part = |q| if taken.is_empty() { 0.0 } else { quantile_of_sorted(&taken, q) };
    let makespan_s = ended().map(|(_, e)| e).max().unwrap_or_default().as_secs_f64();
    Replay {
        jobs: taken.len(),
        devices,
        mean_completion_s: mean,
        median_completion_s: part(0.5),
        p95_completion_s: part(0.95),
        p99_completion_s: part(0.99),
        mean_wait_s: mean - worked / count,
        makespan_s,
        utilisation: work / (f64::from(devices) * makespan_s).max(1e-9),
        preemptions: counts.preemptions,
        longest_queue: counts.longest_queue,
        events: counts.events,
        impossible: counts.impossible,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(submitted_s: f64, duration_s: f64, devices: u32) -> TraceJob {
        TraceJob { name: String::new(), submitted_s, duration_s, devices, owner: String::new() }
    }

    #[test]
    fn a_small_trace_by_hand() {
        // Two devices. A long pair job from 0 to 100; two single jobs of 10 s come at 10 and 20.
        let jobs = [job(0.0, 100.0, 2), job(10.0, 10.0, 1), job(20.0, 10.0, 1)];
        let fifo = replay(&jobs, 2, GangOrder::Fifo, Span::ZERO);
        // 100, then 110 − 10 and 110 − 20.
        assert!((fifo.mean_completion_s - (100.0 + 100.0 + 90.0) / 3.0).abs() < 1e-6, "{fifo:?}");
        assert_eq!((fifo.preemptions, fifo.longest_queue), (0, 2));
        // Under SRTF the single jobs preempt: one from 10 to 20, the other from 20 to 30, then the pair job
        // goes on with 90 s left, plus 5 s to restore.
        let srtf = replay(&jobs, 2, GangOrder::Srtf, Span::from_secs(5));
        assert!((srtf.mean_completion_s - (125.0 + 10.0 + 10.0) / 3.0).abs() < 1e-6, "{srtf:?}");
        assert_eq!(srtf.preemptions, 1);
        // Tiresias with a limit of 20 device-seconds: the pair job falls at 10 s and gives way as well.
        let las = replay(&jobs, 2, GangOrder::Las { limits_s: vec![20.0] }, Span::from_secs(5));
        assert!((las.mean_completion_s - srtf.mean_completion_s).abs() < 1e-6, "{las:?}");
    }

    #[test]
    fn jobs_too_large_for_the_cluster_are_counted_apart() {
        let out = replay(&[job(0.0, 10.0, 9), job(1.0, 10.0, 8)], 8, GangOrder::Fifo, Span::ZERO);
        assert_eq!((out.jobs, out.impossible, out.makespan_s), (1, 1, 11.0));
    }
}
