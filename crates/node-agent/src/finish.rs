//! When the jobs of a node will be done, and how their deadlines stand.
//!
//! **How.** At every step each job's counters and reports feed its
//! [`gainshare_core::signal::speed::PaceTracker`], under every policy. About once a second the policy is played
//! forward on the pods that it shares on this node until each has ended ([`gainshare_core::forecast`]). Pods of
//! other policies, pods that wait for a node and moves between nodes are not part of it: the agent sees only its
//! node. A deadline that the policy has promised is on time, and
//! one that the policy cannot keep is at risk; without such a verdict the prediction decides.
//!
//! **Clocks.** Deadlines and predictions are moments of the wall clock (milliseconds since 1970). Views have
//! deadlines on the boot clock ([`Moment::deadline`]).

use super::job::{Moment, PodJob};
use gainshare_core::decider::Decider;
use gainshare_core::forecast::Forecaster;
use gainshare_core::model::{Span, Time};
use gainshare_core::plan::Reason;
use gainshare_core::signal::Signal;
use gainshare_core::signal::speed::PaceReading;
use gainshare_core::view::View;
use gainshare_kube_api::deadline::{Deadline, DeadlineState, Forecast};

/// With less than this part of the node idle, a job that used little may have wanted more.
const SPARE: f64 = 0.1;

/// Whether the node has no CPU to spare. `idle_before` is the machine's idle time at the last step, as the mean over
/// its CPUs, which is replaced by the present one.
pub(super) fn is_scarce(
    idle_before: &mut Option<(Time, f64)>,
    now: Time,
    idle_s: Option<f64>,
    used_cores: f64,
    node_cores: f64,
) -> bool {
    let before = std::mem::replace(idle_before, idle_s.map(|idle| (now, idle)));
    let machine_is_busy = match (before, idle_s) {
        (Some((at, before)), Some(idle)) if now > at => idle - before < SPARE * now.since(at).as_secs_f64(),
        _ => true,
    };
    // A node may be a part of its machine: then the machine can be idle while the node is not.
    machine_is_busy || used_cores > (1.0 - SPARE) * node_cores
}

/// Feeds the counters that were read last to the job's pace. `is_disturbed`: another pod of the node is starting.
pub(super) fn measure_pace(job: &mut PodJob, now: Time, node_cores: f64, scarce: bool, is_disturbed: bool) {
    // A new share takes effect seconds after its decision. A job that uses less than a share that it does not have yet
    // could well use more.
    let mut granted = job.share_in_force.unwrap_or(0.0);
    if scarce {
        // Shares divide what the pods of one policy requested, which may be little of the node. A node without CPU to
        // spare owes a pod no more than its request.
        let request_cores = job.pod.now.requests.cpu_milli.unwrap_or(0) as f64 / 1e3;
        granted = granted.min(request_cores / node_cores.max(f64::MIN_POSITIVE));
    }
    let consumed_node_s = job.meter.consumed().cpu;
    // A pod may be at its limit while CPU of its node is idle, so idle CPU says nothing of what the pod can use.
    let reading = PaceReading { now, consumed_node_s, granted, scarce, has_idle: false, is_disturbed };
    let signal = job.signal();
    job.pace.observe(reading, &signal);
}

/// The time between two forecasts of one policy.
const FORECAST_PACE: Span = Span::from_secs(1);

/// The ends that are predicted for the pods of one policy.
#[derive(Default)]
pub(super) struct Forecasts {
    forecaster: Forecaster,
    next: Time,
}

impl Forecasts {
    pub(super) fn is_due(&self, now: Time) -> bool {
        now >= self.next
    }

    /// A signal whose pace is that on a node as busy as this one is now.
    pub(super) fn on_this_node(&self, signal: Signal) -> Signal {
        Signal { pace: signal.pace.map(|pace| pace.with_available(self.forecaster.available())), ..signal }
    }

    pub(super) fn update(&mut self, decider: &Decider, view: &View, scarce: bool) {
        self.next = view.now + FORECAST_PACE;
        let consumed = view.jobs.iter().map(|job| (job.id, job.consumed_node_s.cpu));
        self.forecaster.measure(view.now, consumed, scarce);
        self.forecaster.update(decider, view);
    }
}

/// Publishes the end that is predicted for a job; `true` if the deadline stands differently now.
pub(super) fn predict(job: &mut PodJob, now: Moment, forecasts: &Forecasts) -> bool {
    job.forecast = forecasts.forecaster.ends_in_s(job.id, now.time).map(|end| {
        // Whole seconds: finer changes are no news. Casts of floats saturate.
        let at_ms = |seconds: f64| (now.unix_ns / 1_000_000).saturating_add((seconds * 1e3) as u64) / 1000 * 1000;
        Forecast { done_ms: at_ms(end.mid), earliest_ms: at_ms(end.low), latest_ms: at_ms(end.high) }
    });
    let deadline_state = job.pod.deadline.map(|deadline| deadline_state(job, deadline, now));
    std::mem::replace(&mut job.deadline_state, deadline_state) != deadline_state
}

fn deadline_state(job: &PodJob, deadline: Deadline, now: Moment) -> DeadlineState {
    if now.unix_ns / 1_000_000 > deadline.latest_ms() {
        return DeadlineState::Missed;
    }
    match job.verdict.as_ref().map(|v| v.reason) {
        Some(Reason::CannotMeet { .. }) => DeadlineState::AtRisk,
        Some(Reason::MeetsDeadline { .. } | Reason::Early { .. }) => DeadlineState::OnTime,
        _ => match job.forecast {
            // At risk only if even the lucky end of the interval is late: a warning should not come and go.
            Some(done) if done.earliest_ms > deadline.latest_ms() => DeadlineState::AtRisk,
            Some(_) => DeadlineState::OnTime,
            None => DeadlineState::Unknown,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_without_idle_cpu_is_scarce() {
        let (mut idle, s) = (None, Time::from_secs_f64);
        assert!(is_scarce(&mut idle, s(1.0), Some(10.0), 0.2, 1.0), "nothing is known at first");
        assert!(!is_scarce(&mut idle, s(2.0), Some(10.5), 0.2, 1.0));
        assert!(is_scarce(&mut idle, s(3.0), Some(10.55), 0.2, 1.0));
        assert!(is_scarce(&mut idle, s(4.0), Some(12.0), 0.95, 1.0), "the node is a part of its machine");
        assert!(!is_scarce(&mut idle, s(5.0), Some(12.5), 8.0, 16.0), "half of sixteen cores was idle");
    }
}
