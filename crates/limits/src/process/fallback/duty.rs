//! When each job may run, if jobs can only be stopped and continued.
//!
//! **Problem.** Shares of a machine must come out of on and off alone. Simply running each job for its share of the
//! time is wrong twice: two jobs on at the same time halve each other, and cores stand idle when few jobs want them.
//!
//! **Approach.** A job's *demand* is how many cores it uses while it may run. The cores are filled like
//! water by share, and no job gets more than it demands; a job's rate over its demand is the part of each
//! period in which it may run. The windows are laid end to end around the period, so that jobs which cannot
//! run together take turns.
//!
//! **Properties.** `work_conserving`: if all demand together fits the cores, no job is stopped. `proportional`: jobs
//! that want everything get their shares. `never_starved`: every job runs at least a twentieth of the time.

/// The smallest part of a period in which a job runs: a job that never runs would look hung and could not
/// react to SIGTERM.
const MIN_ON: f64 = 0.05;

/// The part of each period in which a job runs, as fractions of the period. The window may wrap around its end.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Window {
    pub(super) offset: f64,
    pub(super) on: f64,
}

impl Window {
    pub(super) const ALWAYS: Window = Window { offset: 0.0, on: 1.0 };
}

/// The share, the cap and the demand of one job.
#[derive(Debug, Clone, Copy)]
pub(super) struct JobDemand {
    /// Weight among the jobs, as a fraction of the machine.
    pub(super) share: f64,
    /// Never more cores than this.
    pub(super) cap_cores: f64,
    /// Cores it uses while it may run.
    pub(super) demand_cores: f64,
}

/// One window for each demand, in the same order.
pub(super) fn windows(cores: f64, demands: &[JobDemand]) -> Vec<Window> {
    let rates = fill(cores, demands);
    let mut cursor = 0.0;
    demands
        .iter()
        .zip(rates)
        .map(|(demand, rate)| {
            let on = (rate / demand.demand_cores.max(1e-9)).clamp(MIN_ON, 1.0);
            // Being stopped for half a percent of the time costs more in signals than it saves.
            if on > 0.995 {
                return Window::ALWAYS;
            }
            let window = Window { offset: cursor, on };
            cursor = (cursor + on) % 1.0;
            window
        })
        .collect()
}

/// Cores for each demand: in proportion to the shares, but no more than it demands or may have.
fn fill(cores: f64, demands: &[JobDemand]) -> Vec<f64> {
    let wants: Vec<f64> = demands.iter().map(|c| c.demand_cores.min(c.cap_cores).max(0.0)).collect();
    let mut rates = vec![0.0; demands.len()];
    let mut open: Vec<usize> = (0..demands.len()).collect();
    let mut left = cores;
    while !open.is_empty() {
        let weight: f64 = open.iter().map(|&i| demands[i].share.max(1e-6)).sum();
        let part = |i: usize| left * demands[i].share.max(1e-6) / weight;
        let content: Vec<usize> = open.iter().copied().filter(|&i| wants[i] <= part(i)).collect();
        if content.is_empty() {
            open.iter().for_each(|&i| rates[i] = part(i));
            break;
        }
        content.iter().for_each(|&i| rates[i] = wants[i]);
        left -= content.iter().map(|&i| wants[i]).sum::<f64>();
        open.retain(|i| !content.contains(i));
    }
    rates
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn demand_of(share: f64, demand_cores: f64) -> JobDemand {
        JobDemand { share, cap_cores: f64::INFINITY, demand_cores }
    }

    #[test]
    fn worked_by_hand() {
        // One core, 3 to 1: three quarters, then the other quarter.
        let two = windows(1.0, &[demand_of(0.75, 1.0), demand_of(0.25, 1.0)]);
        assert_eq!(two, [Window { offset: 0.0, on: 0.75 }, Window { offset: 0.75, on: 0.25 }]);
        // Two jobs of one thread on two cores: both always, whatever their shares.
        assert_eq!(windows(2.0, &[demand_of(0.9, 1.0), demand_of(0.1, 1.0)]), [Window::ALWAYS; 2]);
        // Three jobs of one thread on two cores at 6:3:1: the first has a core, the others share one at 3:1.
        let three = windows(2.0, &[demand_of(0.6, 1.0), demand_of(0.3, 1.0), demand_of(0.1, 1.0)]);
        assert_eq!(three[0], Window::ALWAYS);
        assert!((three[1].on - 0.75).abs() < 1e-9 && (three[2].offset - 0.75).abs() < 1e-9);
        // A cap holds even if the machine is idle.
        let capped = windows(4.0, &[JobDemand { cap_cores: 0.5, ..demand_of(1.0, 2.0) }]);
        assert_eq!(capped, [Window { offset: 0.0, on: 0.25 }]);
    }

    proptest! {
        #[test]
        fn work_conserving_proportional_never_starved(
            cores in 1.0f64..16.0,
            jobs in proptest::collection::vec((0.01f64..1.0, 0.1f64..16.0), 1..12),
        ) {
            let demands: Vec<JobDemand> = jobs.iter().map(|&(share, demand)| demand_of(share, demand)).collect();
            let demand: f64 = demands.iter().map(|c| c.demand_cores).sum();
            let windows = windows(cores, &demands);
            for window in &windows {
                prop_assert!(window.on >= MIN_ON && (0.0..1.0).contains(&window.offset), "never_starved {window:?}");
                prop_assert!(demand > cores || window.on == 1.0, "work_conserving {window:?}");
            }
            let rates = fill(cores, &demands);
            prop_assert!((rates.iter().sum::<f64>() - demand.min(cores)).abs() < 1e-6, "every core is used");
            for (a, ca) in rates.iter().zip(&demands) {
                for (b, cb) in rates.iter().zip(&demands) {
                    let both_want_more = *a < ca.demand_cores - 1e-6 && *b < cb.demand_cores - 1e-6;
                    let unequal = (a / ca.share - b / cb.share).abs() * ca.share.min(cb.share) / cores;
                    prop_assert!(!both_want_more || unequal < 1e-6, "proportional");
                }
            }
        }
    }
}
