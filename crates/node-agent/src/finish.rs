//! When the jobs of a node will be done, and how their deadlines stand.
//!
//! **How.** At every step each job's counters and reports feed its
//! [`gainshare_core::signal::speed::PaceTracker`], under every policy. The prediction assumes that the job goes
//! on with the larger of its share and what it uses. A deadline that the policy has promised is on time, and
//! one that the policy cannot keep is at risk; without such a verdict the prediction decides.
//!
//! **Clocks.** Deadlines and predictions are moments of the wall clock (milliseconds since 1970). Views have
//! deadlines on the boot clock ([`Moment::deadline`]).

use super::job::{Job, Moment};
use gainshare_core::model::Time;
use gainshare_core::plan::Reason;
use gainshare_core::signal::speed::{LEAST_SHARE, Reading};
use gainshare_kube_api::deadline::{Deadline, Forecast, Standing};
use gainshare_limits::usage::NodeResources;

/// With less than this part of the node idle, a job that used little may have wanted more.
const SPARE: f64 = 0.1;

/// Whether the node has no CPU to spare. `idle_before` is the machine's idle time at the last step, which is
/// replaced by the present one.
pub(super) fn is_scarce(
    idle_before: &mut Option<(Time, f64)>,
    now: Time,
    idle_s: Option<f64>,
    used_cores: f64,
    node_cores: f64,
) -> bool {
    let before = std::mem::replace(idle_before, idle_s.map(|idle| (now, idle)));
    let machine_is_busy = match (before, idle_s) {
        (Some((at, before)), Some(idle)) if now > at => {
            idle - before < SPARE * node_cores * now.since(at).as_secs_f64()
        }
        _ => true,
    };
    // A node may be a part of its machine: then the machine can be idle while the node is not.
    machine_is_busy || used_cores > (1.0 - SPARE) * node_cores
}

/// Feeds the counters that were read last to the job's pace.
pub(super) fn measure_pace(job: &mut Job, now: Time, scarce: bool) {
    let granted = job.verdict.as_ref().and_then(|v| v.target).map_or(1.0, |target| target.share.cpu.get());
    let reading = Reading { now, consumed_s: job.meter.consumed().cpu, granted, scarce };
    let signal = job.signal();
    job.pace.observe(reading, &signal);
}

/// Predicts the end; `true` if the deadline stands differently now.
pub(super) fn predict(job: &mut Job, now: Moment, whole: &NodeResources) -> bool {
    job.forecast = forecast(job, now, whole);
    let standing = job.pod.deadline.map(|deadline| standing(job, deadline, now));
    std::mem::replace(&mut job.standing, standing) != standing
}

fn forecast(job: &Job, now: Moment, whole: &NodeResources) -> Option<Forecast> {
    let share = job.verdict.as_ref().and_then(|v| v.target).map_or(0.0, |target| target.share.cpu.get());
    let used = job.meter.cores().map_or(0.0, |cores| cores / whole.capacity.cores.max(1e-9));
    let end = job.signal().ends_in_s(now.time, share.max(used).clamp(LEAST_SHARE, 1.0))?;
    // Whole seconds: finer changes are no news. Casts of floats saturate.
    let at_ms = |seconds: f64| (now.unix_ns / 1_000_000).saturating_add((seconds * 1e3) as u64) / 1000 * 1000;
    Some(Forecast { done_ms: at_ms(end.mid), earliest_ms: at_ms(end.low), latest_ms: at_ms(end.high) })
}

fn standing(job: &Job, deadline: Deadline, now: Moment) -> Standing {
    if now.unix_ns / 1_000_000 > deadline.latest_ms() {
        return Standing::Missed;
    }
    match job.verdict.as_ref().map(|v| v.reason) {
        Some(Reason::CannotMeet { .. }) => Standing::AtRisk,
        Some(Reason::MeetsDeadline { .. } | Reason::Early { .. }) => Standing::OnTime,
        _ => match job.forecast {
            // At risk only if even the lucky end of the interval is late: a warning should not come and go.
            Some(done) if done.earliest_ms > deadline.latest_ms() => Standing::AtRisk,
            Some(_) => Standing::OnTime,
            None => Standing::Unknown,
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
    }
}
