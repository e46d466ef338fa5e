//! One job's use of its GPU, and what the page of each job must contain so that jobs get their shares.
//!
//! **GPU time.** The library reports how long a job waited. The rest of the time the job *works*. While several jobs
//! work, the driver's slices are equal, so a job that works for a second beside two others gets a third of it. A job
//! that does not fill the GPU while it works is taken for one that does.
//!
//! **Terms.** *Working part*: the part of the wall time in which a job works. Shares and working parts are 0..1.
//!
//! **Properties.** `slices_of_the_working_jobs_sum_to_what_is_used`, `working_parts_give_the_shares`,
//! `the_largest_share_is_not_paced`, `a_job_alone_is_not_paced`, `a_job_without_work_leaves_its_share_to_the_others`.

use gainshare_core::model::{Span, Time};
use gainshare_page::{Report, WHOLE_GPU};

/// A job that launched nothing for so long does not use its GPU: it is no longer part of the decisions.
const SILENT_AFTER: Span = Span::from_secs(15);

/// A job has work if it launched some in so many readings in a row. A single reading may be the start of a program,
/// which launches a little and then prepares for seconds. A job without work leaves its share to the others.
const READINGS_WITH_WORK: u32 = 2;

/// Over less time than this the counters of a report say nothing: a paced job pauses for up to half a second.
const SHORTEST_READING: Span = Span::from_millis(700);

/// Shares closer than this to the largest one are as large.
const SAME_SHARE: f64 = 0.02;

/// Rounds in which working parts and contention are fitted to each other.
const FITTING_ROUNDS: usize = 20;

/// What is known of one job's use of its GPU.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct GpuUse {
    /// The job's GPU; 0: none.
    pub(super) gpu: u64,
    /// The job uses several GPUs or has several ranks.
    is_several: bool,
    launches: u64,
    paused_ns: u64,
    read_at: Option<Time>,
    launched_at: Option<Time>,
    /// The last readings in a row in which the job launched work.
    readings_with_work: u32,
    /// The working part since the report before the last one.
    pub(super) working: f64,
    /// GPU time used, in seconds of a whole GPU.
    pub(super) used_s: f64,
    /// The job's share of its GPU, while it uses one.
    pub(super) share: Option<f64>,
    /// What the page says: the part of GPU time in millionths, and the number of jobs; zeros: not paced.
    pub(super) order: (u32, u32),
}

impl GpuUse {
    /// Takes in a report.
    pub(super) fn record(&mut self, report: &Report, now: Time) {
        // Counters that fell belong to another attempt.
        let is_new = report.launches < self.launches || report.paused_ns < self.paused_ns;
        let elapsed = self.read_at.map(|at| now.since(at));
        if !is_new && elapsed.is_some_and(|elapsed| elapsed < SHORTEST_READING) {
            return;
        }
        let (launches, paused_ns) = if is_new { (0, 0) } else { (self.launches, self.paused_ns) };
        let has_launched = report.launches > launches;
        if has_launched {
            self.launched_at = Some(now);
            self.readings_with_work = self.readings_with_work.saturating_add(1);
        } else {
            self.readings_with_work = 0;
        }
        let paused_s = (report.paused_ns - paused_ns) as f64 / 1e9;
        self.working = match elapsed.map(Span::as_secs_f64) {
            Some(elapsed_s) if has_launched && elapsed_s > 0.0 => (1.0 - paused_s / elapsed_s).clamp(0.0, 1.0),
            _ => 0.0,
        };
        (self.launches, self.paused_ns) = (report.launches, report.paused_ns);
        (self.gpu, self.is_several) = (report.gpu, report.gpus > 1);
        self.read_at = Some(now);
    }

    /// Whether the job has work for its GPU now.
    pub(super) fn is_busy(&self, now: Time) -> bool {
        self.is_active(now) && self.readings_with_work >= READINGS_WITH_WORK
    }

    pub(super) fn is_active(&self, now: Time) -> bool {
        self.gpu != 0 && !self.is_several && self.launched_at.is_some_and(|at| now.since(at) < SILENT_AFTER)
    }

    /// What `explain` shows.
    pub(super) fn note(&self) -> Option<String> {
        if self.is_several {
            return Some("GPU: several GPUs or ranks, not paced; GAINSHARE_INSIDE_GPU=all paces such jobs, too".into());
        }
        let share = self.share?;
        let pace = if self.order.0 > 0 { "paced" } else { "not paced" };
        Some(format!(
            "GPU: {:.0} % of its time, {pace}; {:.1} s used, {} launches, waited {:.1} s",
            share * 100.0,
            self.used_s,
            self.launches,
            self.paused_ns as f64 / 1e9
        ))
    }
}

/// The part of the GPU's time that each job gets, from the working parts: while k jobs work, each has a k-th. Jobs
/// work independently of each other.
pub(super) fn slices(working: &[f64]) -> Vec<f64> {
    let one = |i: usize| {
        // The chances that 0, 1, 2 … of the others work.
        let mut chances = vec![1.0];
        for (_, w) in working.iter().enumerate().filter(|(k, _)| *k != i) {
            let mut next = vec![0.0; chances.len() + 1];
            for (count, chance) in chances.iter().enumerate() {
                next[count] += chance * (1.0 - w);
                next[count + 1] += chance * w;
            }
            chances = next;
        }
        working[i] * chances.iter().enumerate().map(|(others, chance)| chance / (others + 1) as f64).sum::<f64>()
    };
    (0..working.len()).map(one).collect()
}

/// The working part of each job that gives it its share; 1 for a job that is not paced.
fn working_parts(shares: &[f64], is_paced: &[bool]) -> Vec<f64> {
    let mut working = vec![1.0; shares.len()];
    for _ in 0..FITTING_ROUNDS {
        let got = slices(&working);
        for i in 0..shares.len() {
            if is_paced[i] && got[i] > 0.0 {
                working[i] = (working[i] * shares[i] / got[i]).clamp(1e-4, 1.0);
            }
        }
    }
    working
}

/// What goes into the page of each job: the part of GPU time in millionths, and the number of jobs with work. A part of
/// 0: not paced.
///
/// Jobs without work leave their shares to the others and are not paced, so that they can begin at once. The library
/// takes a quantum of work beside n jobs for an n-th of it. Jobs that are paced leave more, so the part in the page is
/// the one with which the library works for the right part of the wall time.
pub(super) fn orders(shares: &[f64], is_busy: &[bool]) -> Vec<(u32, u32)> {
    let busy: Vec<usize> = (0..shares.len()).filter(|&i| is_busy[i]).collect();
    let jobs = busy.len();
    let whole: f64 = busy.iter().map(|&i| shares[i]).sum();
    let parts: Vec<f64> = busy.iter().map(|&i| if whole > 0.0 { shares[i] / whole } else { 1.0 }).collect();
    let largest = parts.iter().copied().fold(0.0, f64::max);
    let is_paced: Vec<bool> = parts.iter().map(|part| largest - part > SAME_SHARE).collect();
    let working = working_parts(&parts, &is_paced);
    let mut orders = vec![(0, 0); shares.len()];
    for ((i, is_paced), working) in busy.into_iter().zip(is_paced).zip(working) {
        let part = (working / jobs as f64 * f64::from(WHOLE_GPU)).round() as u32;
        orders[i] = (if is_paced { part.clamp(1, WHOLE_GPU - 1) } else { 0 }, jobs as u32);
    }
    orders
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_of_the_working_jobs_sum_to_what_is_used() {
        assert_eq!(slices(&[1.0]), [1.0]);
        assert_eq!(slices(&[0.25]), [0.25]);
        assert_eq!(slices(&[1.0, 1.0]), [0.5, 0.5]);
        for (got, expected) in slices(&[1.0, 0.2]).iter().zip([0.9, 0.1]) {
            assert!((got - expected).abs() < 1e-12);
        }
        for working in [vec![0.5, 0.5], vec![0.9, 0.1, 0.3], vec![0.0, 0.4, 1.0, 1.0]] {
            let used = 1.0 - working.iter().map(|w| 1.0 - w).product::<f64>();
            assert!((slices(&working).iter().sum::<f64>() - used).abs() < 1e-12, "{working:?}");
        }
    }

    #[test]
    fn working_parts_give_the_shares() {
        for shares in [vec![0.9, 0.1], vec![0.7, 0.15, 0.15], vec![0.5, 0.3, 0.1, 0.1], vec![0.94, 0.02, 0.04]] {
            let is_paced: Vec<bool> = (0..shares.len()).map(|i| i > 0).collect();
            let got = slices(&working_parts(&shares, &is_paced));
            for (got, share) in got.iter().zip(&shares) {
                assert!((got - share).abs() < 0.005, "{got} for {share} of {shares:?}");
            }
        }
    }

    fn orders_of_busy(shares: &[f64]) -> Vec<(u32, u32)> {
        orders(shares, &vec![true; shares.len()])
    }

    #[test]
    fn the_largest_share_is_not_paced() {
        // Beside one job, the library's pause for a share of a tenth is what the page says.
        assert_eq!(orders_of_busy(&[0.9, 0.1]), [(0, 2), (100_000, 2)]);
        assert_eq!(orders_of_busy(&[0.34, 0.33, 0.33]), [(0, 3); 3], "equal shares need no pace");
        let three = orders_of_busy(&[0.15, 0.7, 0.15]);
        assert_eq!(three[1], (0, 3));
        // With two paced jobs each works beside fewer than three.
        assert!(three[0] == three[2] && (100_000..150_000).contains(&three[0].0), "{three:?}");
    }

    #[test]
    fn a_job_alone_is_not_paced() {
        assert_eq!(orders_of_busy(&[1.0]), [(0, 1)]);
        assert_eq!(orders_of_busy(&[0.2]), [(0, 1)]);
        assert_eq!(orders_of_busy(&[]), []);
    }

    #[test]
    fn a_job_without_work_leaves_its_share_to_the_others() {
        assert_eq!(orders(&[0.05, 0.95], &[true, false]), [(0, 1), (0, 0)]);
        let [first, second, idle] = orders(&[0.09, 0.01, 0.9], &[true, true, false])[..] else { panic!("three jobs") };
        assert_eq!((first, second, idle), ((0, 2), (100_000, 2), (0, 0)));
        assert_eq!(orders(&[0.0, 0.0], &[true, true]), [(0, 2); 2]);
    }

    #[test]
    fn reports_become_working_parts() {
        let mut job = GpuUse::default();
        let report = |launches, paused_ns| Report { launches, paused_ns, gpu: 5, gpus: 1, ..Report::default() };
        let at = Time::from_secs_f64;
        job.record(&report(10, 0), at(1.0));
        assert!(job.is_active(at(1.0)) && !job.is_busy(at(1.0)), "it may only be starting");
        job.record(&report(20, 800_000_000), at(2.0));
        assert!((job.working - 0.2).abs() < 1e-9 && job.is_busy(at(2.0)));
        job.record(&report(20, 800_000_000), at(2.5));
        assert!((job.working - 0.2).abs() < 1e-9 && job.is_busy(at(2.5)), "too soon after the last report");
        job.record(&report(20, 800_000_000), at(3.0));
        assert!(job.working == 0.0 && job.is_active(at(3.0)) && !job.is_busy(at(3.0)), "nothing was launched");
        job.record(&report(20, 800_000_000), at(18.0));
        assert!(!job.is_active(at(18.0)), "no launch for long");
        job.record(&report(3, 0), at(19.0));
        assert!(job.is_active(at(19.0)), "another attempt");
        job.record(&Report { gpus: 2, ..report(9, 0) }, at(20.0));
        assert!(!job.is_active(at(20.0)));
        assert!(job.note().is_some_and(|note| note.contains("several GPUs")));
    }
}
