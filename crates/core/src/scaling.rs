//! How many cores a job keeps busy with how many threads.
//!
//! **Problem.** A training job does a part of its work on one thread: Python itself, small operations, data. While it
//! does, the other threads of its team wait. A job with a team of five may so keep only four cores busy, although it
//! would use eight cores with a team of sixteen. Its use alone does not show how much of a machine it can use.
//!
//! **How.** Amdahl's law: if the part `serial` of the work runs on one thread and the rest on all `n` threads of a
//! team, then `n / (1 + serial · (n − 1))` cores are busy on average. One measurement with a known team gives
//! `serial`, and `serial` gives the use for every other team.
//!
//! A busy core of a team does less than the first core did alone: its threads wait for each other, and each region has
//! to be begun and ended. PyTorch's own examples gained 6 to 60 % from a second core. [`next_core`] counts that in.
//!
//! **Properties.** `one_team_tells_the_use_of_another`: from a team of five or more, the use of all other teams follows
//! within a tenth, for the jobs that were measured. `a_further_core_brings_less`.

/// Cores that a job keeps busy with a team of `threads`, if the part `serial` (0 to 1) of its work runs on one thread.
/// Less than one thread is a part of one core.
pub fn busy_cores(serial: f64, threads: f64) -> f64 {
    if threads <= 1.0 { threads.max(0.0) } else { threads / (1.0 + serial.clamp(0.0, 1.0) * (threads - 1.0)) }
}

/// The part of the work that runs on one thread, for a job that keeps `busy` cores busy with a team of `threads`.
/// `None` for teams of one thread, which show nothing.
pub fn serial_part(busy: f64, threads: u32) -> Option<f64> {
    if threads < 2 || busy.is_nan() || busy <= 0.0 {
        return None;
    }
    let threads = f64::from(threads);
    Some(((threads / busy - 1.0) / (threads - 1.0)).clamp(0.0, 1.0))
}

/// The part of the work on one thread, for a job of which nothing was measured yet.
pub const TYPICAL_SERIAL: f64 = 0.1;

/// What the second core brings to a job with no work on one thread, where the first one brings 1. Measured with PyTorch
/// on two machines: 0.06 to 0.6.
const TEAM: f64 = 0.6;

/// What one more core adds to the speed of a job that has `cores` of them, where the first core brings 1. Above one
/// core it is the slope of Amdahl's law, times what a thread of a team is worth.
pub fn next_core(serial: Option<f64>, cores: f64) -> f64 {
    let waits = 1.0 + serial.unwrap_or(TYPICAL_SERIAL).clamp(0.0, 1.0) * cores.max(0.0);
    // Shares are sums of small parts: the last thousandth of a core is not another core.
    if cores < 0.999 { 1.0 } else { TEAM / (waits * waits) }
}

/// More cores than this no job is helped by.
pub(crate) const MOST_CORES: f64 = 4096.0;

/// The speed of a job on `cores`, where one core has 1: the sum of what each core brings.
pub fn speed(serial: Option<f64>, cores: f64) -> f64 {
    let whole = cores.clamp(0.0, MOST_CORES).floor();
    let sum: f64 = (0..whole as u32).map(|core| next_core(serial, f64::from(core))).sum();
    sum + (cores - whole).clamp(0.0, 1.0) * next_core(serial, whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_team_tells_the_use_of_another() {
        // PyTorch 2.11 on 16 cores: threads, and cores in use, of a VAE and of a convolutional net alone.
        let vae = [(2, 1.79), (4, 3.07), (5, 3.76), (8, 4.90), (12, 6.67), (16, 7.38)];
        let conv = [(2, 1.82), (4, 3.28), (5, 4.13), (8, 5.82), (12, 7.73), (16, 9.32)];
        for job in [vae, conv] {
            for &(team, busy) in &job[2..] {
                let serial = serial_part(busy, team).unwrap();
                for (other, expected) in job {
                    let found = busy_cores(serial, f64::from(other));
                    assert!((found / expected - 1.0).abs() < 0.1, "{found} and not {expected}, from {team} to {other}");
                }
            }
        }
    }

    #[test]
    fn a_further_core_brings_less() {
        // Steps a second with 1, 2, 4, 5, 8, 12 and 16 threads alone on 16 cores, and the part on one thread.
        let conv = (0.055, [(1, 4.2), (2, 6.7), (4, 12.0), (5, 14.7), (8, 21.8), (12, 27.4), (16, 32.6)]);
        let vae = (0.08, [(1, 17.7), (2, 25.3), (4, 42.1), (5, 51.0), (8, 61.7), (12, 74.0), (16, 71.5)]);
        for (serial, steps) in [conv, vae] {
            for (cores, found) in steps {
                let (law, found) = (speed(Some(serial), f64::from(cores)), found / steps[0].1);
                assert!((0.7..1.3).contains(&(law / found)), "{cores} cores: {law} and not {found}");
            }
        }
        assert_eq!((next_core(None, 0.0), next_core(Some(0.3), 0.5)), (1.0, 1.0));
        assert!(next_core(None, 1.0) < 0.5, "two jobs with a core each do more than one with two");
        assert!((speed(None, 1.5) - 1.25).abs() < 0.01 && speed(None, 0.3) == 0.3 && speed(None, -1.0) == 0.0);
    }

    #[test]
    fn the_extremes() {
        assert_eq!(serial_part(1.0, 5), Some(1.0), "one thread works");
        assert_eq!(serial_part(5.0, 5), Some(0.0), "all threads work");
        assert_eq!(serial_part(8.0, 5), Some(0.0), "the job has other threads");
        assert_eq!(serial_part(0.2, 5), Some(1.0), "the job waits");
        assert_eq!((serial_part(1.0, 1), serial_part(0.0, 4), serial_part(f64::NAN, 4)), (None, None, None));
        assert_eq!((busy_cores(1.0, 16.0), busy_cores(0.0, 16.0)), (1.0, 16.0));
        assert_eq!((busy_cores(0.3, 0.5), busy_cores(0.3, -1.0)), (0.5, 0.0));
    }
}
