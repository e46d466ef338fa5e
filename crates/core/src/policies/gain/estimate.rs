//! What one job's counters and reports tell: what a step costs, what the job can use, what it has
//! left.
//!
//! **Terms.** Work is in node-seconds of the node that the job is on, less what neighbours made the
//! job lose. The *position* is in steps, or in reports of a job that counts no steps.

use super::disturbance::{Disturbance, NeighbourStats};
use super::numbers::Caution;
use crate::model::{NodeId, Time};
use crate::scaling::{TYPICAL_SERIAL, busy_cores, speed};
use crate::signal::length::{self, Residual};
use crate::view::{JobView, NodeView};
use serde::{Deserialize, Serialize};

/// The work a job has left, as three numbers of one distribution.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct WorkLeft {
    /// The mean.
    pub(super) mean_s: f64,
    /// Jobs with less of this go first: between the mean and the Gittins effort.
    pub(super) rank_s: f64,
    /// What is left if the job ends as early as may well be: what its deadline is computed from.
    pub(super) guard_s: f64,
}

impl WorkLeft {
    fn of(caution: &Caution, left: &Residual) -> Option<WorkLeft> {
        let (bold, mean_s) = (caution.boldness, left.mean());
        let found = WorkLeft {
            mean_s,
            rank_s: left.effort().powf(bold) * mean_s.powf(1.0 - bold),
            guard_s: left.quantile(caution.guard),
        };
        (found.mean_s.is_finite() && found.rank_s.is_finite()).then_some(found)
    }

    fn at_least(self, least: f64) -> WorkLeft {
        WorkLeft { mean_s: self.mean_s.max(least), rank_s: self.rank_s.max(least), guard_s: self.guard_s.max(least) }
    }
}

/// One job, as far as its counters and reports tell.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct EstimatedJob {
    pub(super) node: NodeId,
    /// CPU counter at the last run.
    pub(super) counter: f64,
    /// Consumed when it came to this node, and the step it had reached; what a step cost before, in
    /// node-seconds of this node.
    pub(super) joined_with: f64,
    joined_at_step: f64,
    /// What its share exceeded an equal part by, times the time, in node-seconds.
    #[serde(default)]
    pub(super) extra_s: f64,
    before: Option<f64>,
    /// The job moved here during a step; that step is not used to measure cost.
    midst: bool,
    /// Consumed at the last run and since the run before it, less what neighbours made it lose.
    #[serde(rename = "consumed")]
    pub(super) consumed_node_s: f64,
    #[serde(rename = "newly")]
    pub(super) newly_node_s: f64,
    company: NeighbourStats,
    /// Consumed when the newest report seen was made, and the reports and the step at that moment.
    pub(super) reported_with: f64,
    pub(super) reports: u64,
    step: f64,
    /// Used since the last measurement of what it can use; granted meanwhile; and for how long.
    /// Time on the floor does not count: it shows nothing.
    #[serde(rename = "used")]
    used_node_s: f64,
    #[serde(rename = "granted")]
    granted_node_s: f64,
    granted_s: f64,
    /// On a GPU: what it could use by the last measurements; 1 where they told nothing.
    #[serde(default = "unknown", skip_serializing_if = "is_unknown")]
    could_use: [f64; MEASUREMENTS],
    /// The largest part of the node it can use, as far as is known.
    pub(super) usable: f64,
    /// The work it does in a second with the whole node, in what it does at the moment.
    #[serde(default = "whole")]
    pub(super) rate: f64,
    /// The work it does in a second with an equal share, where its team of threads would follow that share.
    #[serde(default)]
    pub(super) equal_rate: Option<f64>,
    /// The part of the node that one core is.
    #[serde(default = "whole")]
    pub(super) core: f64,
    /// The least number of steps it ever claimed to be all.
    least_total: Option<u64>,
    /// The job's share since the last run.
    pub(super) share: f64,
    /// The cores that it had between the last two runs, borrowed ones included.
    #[serde(default)]
    pub(super) had_cores: f64,
    /// Whether it worked on one core at the last run.
    #[serde(default)]
    pub(super) on_one_core: bool,
    /// Whether that share was below half of what it would use with an equal share.
    pub(super) throttled: bool,
    pub(super) left: Option<WorkLeft>,
}

/// Use below this part of what was granted means that the job cannot use more.
const UNUSED: f64 = 0.9;

/// Below this part of idle CPU the rule cannot tell "could not use more" from "was crowded out", so
/// `usable` is not lowered. Overestimating it costs at most this part of the node.
pub(super) const SPARE: f64 = 0.1;

/// A job is granted a little more than it was seen to use, so that growing demand shows.
pub(super) const ROOM: f64 = 1.25;

/// Use above this part of what a job was thought able to use shows that it was underestimated.
const MORE: f64 = 1.1;

/// No job is believed to be unable to use this much: a pause for a checkpoint must not look like a
/// small job.
const LEAST_USABLE: f64 = 0.02;

/// The number of measurements of a job on a GPU that count: the job can use the most that one of them says. Use is read
/// roughly, once a second, and some readings show nothing of a job that computes beside others. By such a reading
/// alone, a job that fills the GPU would be one that can hardly use it and cannot catch up: all others would wait for
/// it. With three measurements that still happened in a model of a driver that counts four fifths of the time, with
/// four it did not (`tests/gpu.rs`).
const MEASUREMENTS: usize = 4;

/// A job on a GPU that can use more than this part of it can use all of it: readings are that rough.
const FILLS: f64 = 0.5;

/// A job that has made all its steps still saves and tidies up: this part of all it consumed.
const EPILOGUE: f64 = 0.01;

impl EstimatedJob {
    pub(super) fn new(view: &JobView, node: NodeId) -> EstimatedJob {
        let step = position(view);
        EstimatedJob {
            node,
            counter: view.consumed_node_s.cpu,
            joined_with: view.consumed_node_s.cpu,
            joined_at_step: step,
            extra_s: 0.0,
            before: None,
            midst: view.signal.reports > 0,
            consumed_node_s: view.consumed_node_s.cpu,
            newly_node_s: 0.0,
            company: NeighbourStats::default(),
            reported_with: view.consumed_node_s.cpu,
            reports: view.signal.reports,
            step,
            used_node_s: 0.0,
            granted_node_s: 0.0,
            granted_s: 0.0,
            could_use: unknown(),
            usable: 1.0,
            rate: 1.0,
            equal_rate: None,
            core: 1.0,
            least_total: None,
            share: 0.0,
            had_cores: 0.0,
            on_one_core: view.on_one_core,
            throttled: false,
            left: None,
        }
    }

    /// Came to another node, where a second is worth `faster` times as much.
    pub(super) fn moved(&self, view: &JobView, node: NodeId, faster: f64) -> EstimatedJob {
        EstimatedJob {
            usable: self.usable,
            before: self.per_step().map(|s| s / faster),
            ..EstimatedJob::new(view, node)
        }
    }

    /// Takes in what happened since the last run.
    pub(super) fn observe(&mut self, view: &JobView, since: &Interval, disturbance: &mut Disturbance) {
        let Interval { now, elapsed_s, shared, scarce, had_cores, equal } = *since;
        let used = (view.consumed_node_s.cpu - self.counter).max(0.0);
        self.counter = view.consumed_node_s.cpu;
        (self.had_cores, self.on_one_core) = (had_cores, view.on_one_core);
        self.newly_node_s = used * self.worth_of_cores(view) / (1.0 + disturbance.gamma() * shared);
        self.consumed_node_s += self.newly_node_s;
        self.extra_s += (self.share - equal).max(0.0) * elapsed_s;
        if !self.throttled {
            self.used_node_s += used;
            self.granted_node_s += if scarce { used } else { self.share * elapsed_s };
            self.granted_s += elapsed_s;
        }
        let step = position(view);
        let has_reported = view.signal.reports != self.reports;
        // A job whose value is no longer a number goes on with its steps.
        if !has_reported && step <= self.step {
            disturbance.observe(&mut self.company, used, shared, None);
            return;
        }
        // The report came some time ago; what was consumed since then went into later steps.
        let reported = view.signal.last.filter(|_| has_reported);
        let since_report = reported.map_or(0.0, |l| now.since(l.at).as_secs_f64());
        let part = if elapsed_s > 0.0 { (since_report / elapsed_s).min(1.0) } else { 0.0 };
        // A job that begins at a later step than the first has made those before it elsewhere, or
        // does not print every step: little is known of their cost.
        let is_first = self.reports == 0 && step > 1.0 && !self.midst;
        let midst = std::mem::take(&mut self.midst) || is_first;
        let steps = if midst { 0.0 } else { step - self.step };
        disturbance.observe(&mut self.company, used, shared, Some((steps, used * part)));
        self.reports = view.signal.reports;
        self.step = step;
        self.reported_with = self.consumed_node_s - self.newly_node_s * part;
        if midst {
            // Nor does what it used show what it can use: most of it went into its start.
            (self.joined_with, self.joined_at_step) = (self.reported_with, self.step);
            (self.used_node_s, self.granted_node_s, self.granted_s) = (0.0, 0.0, 0.0);
            if is_first && self.before.is_none() && first_report_tells(step, view.signal.total) {
                self.before = Some(self.reported_with / step).filter(|cost| *cost > 0.0);
            }
        }
        if view.on_gpu { self.measure_on_gpu(scarce) } else { self.measure() }
    }

    /// What a second of CPU is worth with the team that the job had, as work on one core.
    fn worth_of_cores(&self, view: &JobView) -> f64 {
        let cores = self.had_cores;
        // Teams are whole threads: with less than one and a half cores it has one.
        if !view.has_team || view.on_one_core || cores < 1.5 {
            return 1.0;
        }
        (speed(view.serial, cores) / busy_cores(view.serial.unwrap_or(TYPICAL_SERIAL), cores)).min(1.0)
    }

    /// Takes over what the driver knows of the job's use, where `jobs` run on its node.
    ///
    /// A job whose team of threads follows its share uses less than the share however large the share is. If that were
    /// taken for all it can use, its share would shrink, then its team, then its use, and so on. Where the driver
    /// measures the part of the work on one thread, Amdahl's law tells what the job would use with the whole node. How
    /// fast it is there and with an equal share follows from what each core brings. A job that works on one core would
    /// do so in the fair world, too: a program that imports its libraries would else be promised an end that no machine
    /// can keep.
    pub(super) fn set_usable(&mut self, view: &JobView, node: Option<&NodeView>, jobs: usize) {
        if let Some(usable) = view.usable {
            self.usable = usable.clamp(LEAST_USABLE, 1.0);
        }
        (self.rate, self.equal_rate) = (self.usable, None);
        let Some(cores) = node.map(|node| node.cores).filter(|cores| *cores > 0.0) else { return };
        self.core = (1.0 / cores).min(1.0);
        let part = |busy: f64| (busy / cores).clamp(LEAST_USABLE, 1.0);
        if let Some(serial) = view.serial {
            self.usable = part(busy_cores(serial, cores));
            self.rate = self.usable;
        }
        if view.has_team {
            self.rate = part(speed(view.serial, cores));
            self.equal_rate = Some(part(speed(view.serial, cores / jobs.max(1) as f64)));
        }
        if view.on_one_core {
            self.rate = part(1.0);
        }
    }

    /// What a step costs on this node; before the first one here, what it cost so far.
    pub(super) fn per_step(&self) -> Option<f64> {
        let (work, steps) = (self.reported_with - self.joined_with, self.step - self.joined_at_step);
        if work > 0.0 && steps > 0.0 { Some(work / steps) } else { self.before }
    }

    /// Compares what was used since the last measurement with what was granted.
    fn measure(&mut self) {
        if self.granted_node_s > 0.0 {
            let rate = self.used_node_s / self.granted_s;
            if self.used_node_s < UNUSED * self.granted_node_s {
                self.usable = rate.clamp(LEAST_USABLE, 1.0);
            } else if rate > MORE * self.usable {
                // It used all it had, and more than it was thought able to: it may well use much
                // more.
                self.usable = (2.0 * rate).min(1.0);
            }
        }
        (self.used_node_s, self.granted_node_s, self.granted_s) = (0.0, 0.0, 0.0);
    }

    /// The same on a GPU, where a single measurement tells little, and nothing while the GPU was busy (`is_scarce`).
    fn measure_on_gpu(&mut self, is_scarce: bool) {
        if self.granted_node_s > 0.0 && !is_scarce {
            let rate = self.used_node_s / self.granted_s;
            self.could_use.rotate_left(1);
            self.could_use[MEASUREMENTS - 1] = if self.used_node_s < UNUSED * self.granted_node_s {
                rate
            } else if rate > MORE * self.usable {
                (2.0 * rate).min(1.0)
            } else {
                rate.max(self.usable)
            };
            let most = self.could_use.into_iter().fold(LEAST_USABLE, f64::max);
            self.usable = if most > FILLS { 1.0 } else { most };
        }
        (self.used_node_s, self.granted_node_s, self.granted_s) = (0.0, 0.0, 0.0);
    }

    /// The work left, as far as plans go: until it has ended there is something.
    pub(super) fn rest(&self) -> Option<WorkLeft> {
        self.left.map(|left| left.at_least(EPILOGUE * self.consumed_node_s))
    }

    /// What a step costs and how far the job is, with what it did since its last report.
    pub(super) fn place(&self) -> Option<(f64, f64)> {
        let per_step = self.per_step()?;
        Some((per_step, self.step + (self.consumed_node_s - self.reported_with) / per_step))
    }

    /// All its work, with its start, as far as it is known.
    pub(super) fn total(&self) -> Option<f64> {
        self.rest().map(|left| self.consumed_node_s + left.mean_s).filter(|total| *total > 0.0)
    }

    /// Predicts the work left.
    pub(super) fn predict(&mut self, caution: &Caution, view: &JobView, node: Option<&NodeView>) -> Option<WorkLeft> {
        let Some(per_step) = self.per_step() else {
            let core_s = node.map(|n| n.cores * n.speed)?;
            return WorkLeft::of(caution, &length::residual_work(&view.history, core_s, self.consumed_node_s)?);
        };
        let since = self.consumed_node_s - self.reported_with;
        let residual = match view.signal.total {
            Some(total) if length::trust(&view.signal, &view.history, view.claims) >= 1.0 => {
                let least = self.least_total.map_or(total, |l| l.min(total));
                self.least_total = Some(least);
                let until = |total: u64| per_step * (total as f64 - self.step) - since;
                // A job that goes on after what it once said is believed to have at least as much
                // left as it has gone on.
                Residual::known(until(total).max(-until(least)))
            }
            _ => {
                let at = self.step + since / per_step;
                let left = length::residual_by(caution.belief, &view.signal, &view.history, view.claims, at)?;
                left.scaled(per_step, 0.0)
            }
        };
        WorkLeft::of(caution, &residual)
    }
}

fn whole() -> f64 {
    1.0
}

fn unknown() -> [f64; MEASUREMENTS] {
    [1.0; MEASUREMENTS]
}

fn is_unknown(could_use: &[f64; MEASUREMENTS]) -> bool {
    *could_use == unknown()
}

/// What a job's node saw since the last run.
pub(super) struct Interval {
    pub(super) now: Time,
    pub(super) elapsed_s: f64,
    /// The chance that a neighbour took its turn before the job did.
    pub(super) shared: f64,
    /// There was no CPU to spare.
    pub(super) scarce: bool,
    /// The cores that the job had.
    pub(super) had_cores: f64,
    /// An equal part of the node.
    pub(super) equal: f64,
}

/// Whether the first report of a job tells what a step costs, although the job's start is counted in. The error is
/// small if a good part of the run is done by then. A first report from the second half of a run is rather that of a
/// job that was restored. Without a total the work left is a multiple of the work done, whatever a step costs.
fn first_report_tells(step: f64, total: Option<u64>) -> bool {
    total.is_none_or(|total| (0.2..=0.5).contains(&(step / total as f64)))
}

/// How far a job is: steps, or reports where it counts no steps.
fn position(view: &JobView) -> f64 {
    view.signal.step.unwrap_or(view.signal.reports) as f64
}

#[cfg(test)]
mod tests {
    use super::super::numbers::Gain;
    use super::*;
    use crate::fixtures::{node, running};
    use crate::model::NodeId;
    use crate::view::View;

    #[test]
    fn steps_without_a_value_tell_what_is_left() {
        let mut view = running(1, 0);
        (view.signal.reports, view.signal.step, view.signal.total) = (3, Some(30), Some(100));
        let mut job = EstimatedJob::new(&view, NodeId(0));
        let mut disturbance = Disturbance::default();
        for second in 1_u32..=4 {
            view.consumed_node_s.cpu = f64::from(second);
            view.signal.step = Some(30 + 10 * u64::from(second));
            let now = Time::from_secs_f64(f64::from(second));
            let since = Interval { now, elapsed_s: 1.0, shared: 0.0, scarce: true, had_cores: 0.0, equal: 1.0 };
            job.observe(&view, &since, &mut disturbance);
        }
        let caution = Gain::default().caution(&View { now: Time::ZERO, nodes: vec![node(0)], jobs: vec![] });
        // A step costs a tenth of a second, and 30 steps are left.
        assert_eq!(job.per_step(), Some(0.1));
        let left = job.predict(&caution, &view, Some(&node(0))).expect("the total is known");
        assert!((left.mean_s - 3.0).abs() < 1e-9, "{left:?}");
    }

    /// What a job is believed able to use after half a minute in which its team followed its share.
    fn usable_of(serial: Option<f64>) -> (f64, f64) {
        let node = NodeView { cores: 16.0, ..node(0) };
        let mut view = JobView { serial, ..running(1, 0) };
        let mut job = EstimatedJob::new(&view, node.id);
        for second in 1..30 {
            job.share = (ROOM * job.usable).min(0.5);
            // A team for the share keeps three quarters of its cores busy.
            view.consumed_node_s.cpu += 0.75 * job.share;
            (view.signal.reports, view.signal.step) = (second, Some(10 * second));
            let now = Time::from_secs_f64(second as f64);
            let had_cores = 16.0 * job.share;
            let since = Interval { now, elapsed_s: 1.0, shared: 0.0, scarce: false, had_cores, equal: 1.0 / 3.0 };
            job.observe(&view, &since, &mut Disturbance::default());
            job.set_usable(&view, Some(&node), 3);
        }
        (job.usable, job.rate)
    }

    #[test]
    fn a_team_that_follows_the_share_makes_no_job_small() {
        assert!(usable_of(None).0 < 0.3, "use alone shows the team and not the job");
        let (usable, rate) = usable_of(Some(0.055));
        assert!((usable - 0.548).abs() < 0.01 && (rate - 0.548).abs() < 0.01, "{usable} {rate}");
    }

    /// What a job on a GPU is believed able to use after these readings, each with all of the GPU for itself.
    fn usable_on_gpu(readings: &[f64]) -> f64 {
        let mut view = JobView { on_gpu: true, ..running(1, 0) };
        let mut job = EstimatedJob::new(&view, NodeId(0));
        // Nothing is measured before the first report.
        for (second, used) in (1..).zip(std::iter::once(&1.0).chain(readings)) {
            job.share = 0.99;
            view.consumed_node_s.cpu += used;
            (view.signal.reports, view.signal.step) = (second, Some(10 * second));
            let now = Time::from_secs_f64(second as f64);
            let since = Interval { now, elapsed_s: 1.0, shared: 0.0, scarce: false, had_cores: 0.99, equal: 0.5 };
            job.observe(&view, &since, &mut Disturbance::default());
        }
        job.usable
    }

    #[test]
    fn single_readings_of_a_gpu_make_no_job_small() {
        assert_eq!(usable_on_gpu(&[0.95, 0.0, 0.0, 0.9, 0.0]), 1.0);
        assert_eq!(usable_on_gpu(&[0.6, 0.7, 0.55, 0.65]), 1.0, "it may fill the GPU");
        let slow = usable_on_gpu(&[0.36, 0.44, 0.0, 0.4]);
        assert!((slow - 0.44).abs() < 1e-9, "it prepares its launches slowly: {slow}");
        assert_eq!(usable_on_gpu(&[0.36, 0.44, 0.4, 0.4, 0.98]), 1.0, "it has more to do now");
    }

    #[test]
    fn the_fair_world_gives_one_core_to_a_job_that_works_on_one() {
        let node = NodeView { cores: 16.0, ..node(0) };
        let view = JobView { serial: Some(0.055), on_one_core: true, ..running(1, 0) };
        let mut job = EstimatedJob::new(&view, node.id);
        job.set_usable(&view, Some(&node), 3);
        assert_eq!(job.rate, 1.0 / 16.0);
        assert!(job.usable > 0.5, "it will need its share again");
    }
}
