//! The jobs that came so far, as a sample of those to come.

use crate::model::{JobId, Span, Time};
use crate::signal::Signal;
use crate::signal::speed::Pace;
use crate::view::{Deadline, JobView, Phase, View};
use std::collections::{BTreeMap, VecDeque};

/// Number of the newest arrivals that are remembered.
const KEPT: usize = 32;

/// At most this many later jobs are part of a projection: each costs decisions.
const MOST_EXPECTED: usize = 24;

/// Jobs that come within this many seconds of the one before came together.
const TOGETHER_S: f64 = 0.5;

/// How likely arrivals go on at the moment of the last one.
const GOES_ON: f64 = 0.9;

/// Remembers arrivals. A driver shows it every view that it decides on.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Arrivals {
    jobs: VecDeque<Arrival>,
}

/// One job that came, as far as it is known.
#[derive(Debug, Clone, PartialEq)]
struct Arrival {
    id: JobId,
    at: Time,
    /// All its steps and its pace, once both are known.
    run: Option<(f64, Pace)>,
    /// From its arrival to its deadline, and its tolerance.
    deadline: Option<(Span, Span)>,
}

/// A job that is expected to come.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct FutureJob {
    pub(super) in_s: f64,
    pub(super) job: JobView,
    pub(super) steps: f64,
}

impl Arrivals {
    /// Takes in the jobs of a view.
    pub fn observe(&mut self, view: &View) {
        let mut places: BTreeMap<JobId, usize> = self.jobs.iter().enumerate().map(|(i, a)| (a.id, i)).collect();
        let newest = self.jobs.iter().map(|a| a.id).max();
        for job in view.jobs.iter().filter(|j| j.tasks.is_none()) {
            let place = match places.get(&job.id) {
                Some(place) => *place,
                // An older job that is not remembered was forgotten because newer ones came.
                None if newest.is_some_and(|id| job.id < id) && self.jobs.len() == KEPT => continue,
                None => {
                    let deadline = job.deadline.map(|d| (d.at.since(job.arrived), d.tolerance));
                    self.jobs.push_back(Arrival { id: job.id, at: job.arrived, run: None, deadline });
                    places.insert(job.id, self.jobs.len() - 1);
                    self.jobs.len() - 1
                }
            };
            if let (Some(left), Some(pace)) = (job.steps_left(), job.signal.pace) {
                self.jobs[place].run = Some((job.signal.position() + left.mid, pace));
            }
        }
        while self.jobs.len() > KEPT {
            self.jobs.pop_front();
        }
    }

    /// The paces of the jobs seen.
    pub(super) fn paces(&self) -> impl Iterator<Item = Pace> {
        self.jobs.iter().filter_map(|a| a.run).map(|(_, pace)| pace)
    }

    /// The mean work of the jobs seen, in node-seconds; `None` before any is known.
    pub(super) fn mean_work_s(&self) -> Option<f64> {
        let works: Vec<f64> =
            self.jobs.iter().filter_map(|a| a.run).map(|(steps, pace)| steps * work_s(&pace)).collect();
        if works.is_empty() { None } else { Some(works.iter().sum::<f64>() / works.len() as f64) }
    }

    /// The jobs that come within `horizon_s`, the first one first, if arrivals go on for as long as they do with
    /// this chance.
    pub(super) fn expected(&self, view: &View, horizon_s: f64, chance: f64) -> Vec<FutureJob> {
        let mut moments: Vec<Time> = self.jobs.iter().map(|a| a.at).collect();
        moments.sort_unstable();
        // Jobs that came together are one event.
        let mut events: Vec<Time> = vec![];
        let mut newest: Option<Time> = None;
        for at in moments {
            if newest.is_none_or(|newest| at.since(newest).as_secs_f64() > TOGETHER_S) {
                events.push(at);
            }
            newest = Some(at);
        }
        let templates: Vec<&Arrival> = self.jobs.iter().filter(|a| a.run.is_some()).collect();
        let (Some(first), Some(last)) = (events.first(), events.last()) else { return vec![] };
        let (elapsed_s, went_on_s) = (view.now.since(*first).as_secs_f64(), last.since(*first).as_secs_f64());
        if events.len() < 2 || templates.is_empty() || elapsed_s <= 0.0 || went_on_s <= 0.0 {
            return vec![];
        }
        // Arrivals per second so far. The first event begins the measurement and is not counted.
        let first_batch = events.get(1).map_or(0, |second| self.jobs.iter().filter(|a| a.at < *second).count());
        let rate = (self.jobs.len() - first_batch) as f64 / elapsed_s;
        // The longer no job has come, the less likely one will: while they go on, a silence of this length has
        // the chance exp(-events per second · silence).
        let silence = (-((events.len() - 1) as f64) * (elapsed_s - went_on_s) / went_on_s).exp();
        let goes_on = GOES_ON * silence / (GOES_ON * silence + 1.0 - GOES_ON);
        // They go on for x with the chance goes_on · T / (T + x).
        let until_s = horizon_s.min(went_on_s * (goes_on / chance - 1.0));
        let next_id = view.jobs.last().map_or(1, |j| j.id.0 + 1);
        let owner = view.jobs.last().map(|j| j.owner).unwrap_or_default();
        let mut found = vec![];
        for k in 0..MOST_EXPECTED {
            let in_s = (k as f64 + 0.5) / rate;
            if !in_s.is_finite() || in_s > until_s {
                break;
            }
            let template = templates[k % templates.len()];
            let Some((steps, pace)) = template.run else { continue };
            let arrived = view.now + Span::from_secs_f64(in_s);
            let signal = Signal { total: Some(steps.max(1.0) as u64), pace: Some(pace), ..Signal::default() };
            let deadline = template.deadline.map(|(left, tolerance)| Deadline { at: arrived + left, tolerance });
            let job = JobView {
                id: JobId(next_id + k as u64),
                owner,
                arrived,
                phase: Phase::Waiting,
                signal,
                deadline,
                ..JobView::default()
            };
            found.push(FutureJob { in_s, job, steps });
        }
        found
    }
}

/// Node-seconds of one step at the largest share that the job can use.
pub(super) fn work_s(pace: &Pace) -> f64 {
    pace.step_s(1.0) * pace.usable.min(1.0)
}
