//! One job's use of its GPU, and what the page of each job must contain so that jobs get their shares.
//!
//! **GPU time.** NVML measures the GPU time of a job that has the GPU to itself ([`GpuUse::measure`]). While several
//! jobs compute, NVML is wrong: on an H200 it showed no use of one of three jobs for up to six seconds, and half of the
//! GPU for a job that was paced to 0.3 %. Then, and where NVML is missing, the time is taken from how long the library
//! says that a job paused ([`slices`]). The rest of the time the job *works*. While several jobs work, the driver's
//! slices are equal, so a job that works for a second beside two others gets a third of it. A job that does not fill
//! the GPU while it works is then taken for one that does. [`TimeSource`] says which of the two is the case.
//!
//! **Slack.** A job that prepares its launches slowly leaves the GPU idle, even if all of the GPU is its own. Such a
//! job hardly waits for the GPU. While the jobs that are not paced hardly wait, the others work more than their shares
//! say: first the one with the largest share, and of equal shares the one that gains most. The next one follows when
//! that job works all the time and hardly waits either.
//!
//! **Terms.** *Working part*: the part of the wall time in which a job works. *Waiting part*: the part of its work in
//! which a job waits for the GPU. *Favourites*: the jobs that are not paced. Shares and parts are 0..1.
//!
//! **Jobs whose launches are not caught** are measured by NVML alone. They are stopped and continued for the same parts
//! of the time.
//!
//! **Properties.** `what_a_favourite_leaves_goes_to_the_next_job_first`,
//! `beside_others_the_pauses_of_the_library_count`, `nobody_pauses_for_a_job_that_does_not_wait`,
//! `slices_of_the_working_jobs_sum_to_what_is_used`, `working_parts_give_the_shares`, `the_largest_share_is_not_paced`,
//! `a_job_alone_is_not_paced`.

use super::measurement::GpuMeasurement;
use gainshare_core::model::{JobId, Span, Time};
use gainshare_page::{Report, WHOLE_GPU};

/// A job that launched nothing for this long does not use its GPU: it is no longer part of the decisions.
const SILENT_AFTER: Span = Span::from_secs(15);

/// A job has work if it launched some in this many readings in a row. A single reading may be the start of a program,
/// which launches a little and then prepares for seconds. A job without work leaves its share to the others.
const READINGS_WITH_WORK: u32 = 2;

/// A job whose launches are not caught has no work if NVML showed none in this many readings in a row. Beside another
/// job, NVML has no sample of a job in some seconds although the job computes.
const READINGS_WITHOUT_WORK: u32 = 4;

/// A job with this many launches in a single reading has work: it computes, it does not only prepare.
const MANY_LAUNCHES: u64 = 200;

/// Over less time than this the counters of a report say nothing.
const SHORTEST_READING: Span = Span::from_millis(200);

/// The same of a job that is paced: it pauses for up to half a second.
const SHORTEST_READING_PACED: Span = Span::from_millis(700);

/// A job that launched nothing, but waited for the GPU for more than this part of the time, has work there: a kernel
/// that takes long.
const WAITS_FOR_WORK: f64 = 0.5;

/// Time between two readings of the report of a job in which, as far as is known, no launches are caught: a script may
/// have set the variable for its own programs.
const SEARCH_PACE: Span = Span::from_secs(10);

/// Shares closer than this to the largest one are as large.
const SAME_SHARE: f64 = 0.02;

/// While favourites wait for more than this part of their work, the others are held to their shares more and more.
/// Favourites become slower by about this part at most. A job that uses two fifths of the GPU waits for a tenth to a
/// fifth of its time for its turn beside one that fills the GPU. With a tenth here, the others paused for a third of
/// the time beside such a favourite, and a quarter of the GPU was idle (in the model of `model_tests.rs`).
const MOST_WAITING: f64 = 0.2;

/// How much the slack changes at a reading, for a waiting part that is by one too small or too large.
const SLACK_PER_WAITING: f64 = 10.0;

/// The slack grows by no more than this at a reading.
const MOST_SLACK_GROWTH: f64 = 0.5;

/// A job that may work for more than this part of the time is not paced: its pauses would be short and cost more.
const ALMOST_ALWAYS: f64 = 0.95;

/// Rounds in which working parts and contention are fitted to each other.
const FITTING_ROUNDS: usize = 20;

/// Where the GPU time of a job comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum TimeSource {
    /// NVML.
    Driver,
    /// The pauses of the library, because several jobs compute.
    PausesBesideOthers,
    /// The pauses of the library, because NVML says nothing.
    #[default]
    Pauses,
}

impl std::fmt::Display for TimeSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            TimeSource::Driver => "now measured by the driver",
            TimeSource::PausesBesideOthers => "now by its pauses, because several jobs compute",
            TimeSource::Pauses => "now by its pauses, because the driver does not say",
        })
    }
}

/// What is known of one job's use of its GPU.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GpuUse {
    /// The job's GPU; 0: none.
    pub gpu: u64,
    /// The job uses several GPUs or has several ranks.
    is_several: bool,
    launches: u64,
    paused_ns: u64,
    waited_ns: u64,
    read_at: Option<Time>,
    launched_at: Option<Time>,
    /// The last readings in a row in which the job launched work.
    readings_with_work: u32,
    /// Readings in a row in which NVML showed no work of a job whose launches are not caught.
    readings_without_work: u32,
    /// The working part since the report before the last one.
    pub working: f64,
    /// The waiting part since then; not known of a job that had the GPU to itself, because it may queue without end.
    pub(super) waiting: Option<f64>,
    /// GPU time used, in seconds of a whole GPU.
    pub used_s: f64,
    /// Where the last part of it comes from.
    source: TimeSource,
    /// The job's share of its GPU, while it uses one.
    pub share: Option<f64>,
    /// What a unit of GPU time brings it, by the policy.
    pub(super) growth: f64,
    /// What the page says: the part of GPU time in millionths, and the number of jobs; zeros: not paced.
    pub order: (u32, u32),
    /// What NVML shows of the job.
    pub measured: Option<GpuMeasurement>,
    /// No launches of the job are caught: it is stopped and continued instead.
    pub is_uncaught: bool,
}

impl GpuUse {
    /// Takes in a report.
    pub fn record(&mut self, report: &Report, now: Time) {
        if report.gpu == 0 && self.is_uncaught {
            return;
        }
        self.is_uncaught = false;
        // Counters that fell belong to another attempt.
        let is_new = report.launches < self.launches || report.paused_ns < self.paused_ns;
        let elapsed = self.read_at.map(|at| now.since(at));
        let shortest = if self.order.0 > 0 { SHORTEST_READING_PACED } else { SHORTEST_READING };
        if !is_new && elapsed.is_some_and(|elapsed| elapsed < shortest) {
            return;
        }
        let (launches, paused_ns) = if is_new { (0, 0) } else { (self.launches, self.paused_ns) };
        let elapsed_s = elapsed.map_or(0.0, Span::as_secs_f64);
        let waited_s = report.waited_ns.saturating_sub(if is_new { 0 } else { self.waited_ns }) as f64 / 1e9;
        let has_launched = report.launches > launches;
        self.launched_at = if has_launched { Some(now) } else { self.launched_at };
        let is_many = report.launches.saturating_sub(launches) >= MANY_LAUNCHES;
        let has_work = has_launched || waited_s > WAITS_FOR_WORK * elapsed_s;
        self.readings_with_work = match (has_work, is_many) {
            (true, true) => READINGS_WITH_WORK,
            (true, false) => self.readings_with_work.saturating_add(1),
            (false, _) => 0,
        };
        let paused_s = (report.paused_ns - paused_ns) as f64 / 1e9;
        self.working = if has_work && elapsed_s > 0.0 { (1.0 - paused_s / elapsed_s).clamp(0.0, 1.0) } else { 0.0 };
        let worked_s = self.working * elapsed_s;
        let is_shared = self.order.1 > 1;
        self.waiting = (is_shared && worked_s > 0.0).then(|| (waited_s / worked_s).clamp(0.0, 1.0));
        (self.launches, self.paused_ns, self.waited_ns) = (report.launches, report.paused_ns, report.waited_ns);
        (self.gpu, self.is_several) = (report.gpu, report.gpus > 1);
        self.read_at = Some(now);
    }

    /// Takes in that NVML shows the job on one GPU although no launches were caught. `may_stop`: the job may be stopped
    /// and continued.
    pub fn record_uncaught(&mut self, may_stop: bool, now: Time) {
        let place = self.measured.as_ref().and_then(|measured| measured.only_place(now)).filter(|_| may_stop);
        let Some(place) = place.filter(|_| self.gpu == 0 || self.is_uncaught) else {
            if self.is_uncaught {
                let (used_s, measured) = (self.used_s, self.measured.take());
                *self = GpuUse { used_s, measured, ..GpuUse::default() };
            }
            return;
        };
        if self.is_uncaught && self.read_at.is_some_and(|at| now.since(at) < SHORTEST_READING_PACED) {
            return;
        }
        // Without samples of its use, a job that is on the GPU is taken for one that works.
        let is_seen = self.measured_slice(now).is_none_or(|busy| busy > 0.0);
        self.readings_without_work = if is_seen { 0 } else { self.readings_without_work.saturating_add(1) };
        let works = is_seen || (self.readings_with_work > 0 && self.readings_without_work < READINGS_WITHOUT_WORK);
        self.readings_with_work = if works { self.readings_with_work.saturating_add(1) } else { 0 };
        self.launched_at = if works { Some(now) } else { self.launched_at };
        self.working = if works { self.stopped_part().unwrap_or(1.0) } else { 0.0 };
        (self.gpu, self.is_several, self.is_uncaught, self.waiting) = (place, false, true, None);
        self.read_at = Some(now);
    }

    /// Whether NVML shows the job on a GPU.
    pub fn is_shown(&self, now: Time) -> bool {
        self.measured.as_ref().is_some_and(|measured| measured.is_fresh(now))
    }

    /// The part of the time in which a job that is stopped and continued runs; `None` for all others.
    pub fn stopped_part(&self) -> Option<f64> {
        let (part, jobs) = self.order;
        let part = f64::from(part) / f64::from(WHOLE_GPU) * f64::from(jobs);
        (self.is_uncaught && part > 0.0 && part < 1.0).then_some(part)
    }

    /// Takes in what NVML shows of the job since the reading `elapsed_s` before.
    pub fn measure(&mut self, measured: Option<GpuMeasurement>, elapsed_s: f64) {
        // The time of a job with a share is counted with that of the other jobs of its GPU.
        if self.share.is_none() {
            self.used_s += measured.as_ref().and_then(GpuMeasurement::busy_then).unwrap_or(0.0) * elapsed_s;
        }
        self.measured = measured;
    }

    /// Whether the job is known to wait little for the GPU.
    fn hardly_waits(&self) -> bool {
        self.waiting.is_some_and(|waiting| waiting < MOST_WAITING)
    }

    /// The part of the GPU's time that the job gets, as NVML measures it.
    pub fn measured_slice(&self, now: Time) -> Option<f64> {
        self.measured.as_ref()?.busy(now).map(|busy| busy.min(1.0))
    }

    /// The job's memory on GPUs.
    pub fn memory_bytes(&self, now: Time) -> Option<u64> {
        self.measured.as_ref()?.memory_bytes(now)
    }

    /// Whether the job's report is to be read now. `is_caught`: launches of the job are caught for sure.
    pub fn is_due(&self, is_caught: bool, now: Time) -> bool {
        is_caught || self.gpu != 0 || self.read_at.is_none_or(|at| now.since(at) >= SEARCH_PACE)
    }

    /// Whether the job has work for its GPU now.
    pub fn is_busy(&self, now: Time) -> bool {
        self.is_active(now) && self.readings_with_work >= READINGS_WITH_WORK
    }

    pub fn is_active(&self, now: Time) -> bool {
        self.gpu != 0 && !self.is_several && self.launched_at.is_some_and(|at| now.since(at) < SILENT_AFTER)
    }

    /// Whether the job uses several GPUs or has several ranks, and is therefore not paced.
    pub fn is_several(&self) -> bool {
        self.is_several
    }

    /// What `explain` shows of the job's time, and how it is paced. `why_uncaught` says why no launches are caught.
    pub fn note(&self, why_uncaught: &str) -> Option<String> {
        if self.is_several {
            return Some("GPU: several GPUs or ranks, not paced; GAINSHARE_INSIDE_GPU=all paces such jobs, too".into());
        }
        let share = self.share?;
        if self.is_uncaught {
            let pace = match self.stopped_part() {
                Some(part) => {
                    format!("stopped and continued every 0.1 s, it runs for {:.0} % of the time", part * 100.0)
                }
                None => "not stopped at the moment".into(),
            };
            return Some(format!(
                "GPU: {:.0} % of its time, {pace}, because its launches are not caught ({why_uncaught}); {:.1} s used",
                share * 100.0,
                self.used_s
            ));
        }
        let pace = if self.order.0 > 0 { "its launches are paced" } else { "not paced" };
        Some(format!(
            "GPU: {:.0} % of its time, {pace}; {:.1} s used ({}), {} launches, paused {:.1} s",
            share * 100.0,
            self.used_s,
            self.source,
            self.launches,
            self.paused_ns as f64 / 1e9
        ))
    }
}

/// The part of the GPU's time that each job of one GPU gets now. Keeps in each job where that comes from.
pub(super) fn time_slices(jobs: &mut [&mut GpuUse], now: Time) -> Vec<f64> {
    let by_waiting = slices(&jobs.iter().map(|of| of.working).collect::<Vec<f64>>());
    let is_shared = jobs.iter().filter(|of| !of.is_uncaught && of.is_busy(now)).count() > 1;
    let one = |(of, by_waiting): (&mut &mut GpuUse, f64)| {
        let measured = of.measured_slice(now).filter(|_| of.is_uncaught || !is_shared);
        of.source = match measured {
            Some(_) => TimeSource::Driver,
            None if is_shared => TimeSource::PausesBesideOthers,
            None => TimeSource::Pauses,
        };
        measured.unwrap_or(by_waiting)
    };
    jobs.iter_mut().zip(by_waiting).map(one).collect()
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

/// How much more than their shares the paced jobs of one GPU may work.
#[derive(Debug, Default)]
pub(super) struct Slack {
    /// How many of them may work all the time, in their order. Of 1.5 the first one may, and the second one for half of
    /// the time that it would pause.
    jobs: f64,
    favourites: Vec<JobId>,
}

impl Slack {
    /// Takes in the last reading of the jobs with work, of which `is_paced` says which ones are no favourites. Returns
    /// the part of its pauses in which each of them may work, 0..1.
    pub(super) fn update(&mut self, jobs: &[(JobId, &GpuUse)], is_paced: &[bool], now: Time) -> Vec<f64> {
        let favourites: Vec<&(JobId, &GpuUse)> =
            jobs.iter().zip(is_paced).filter(|(_, is_paced)| !**is_paced).map(|(job, _)| job).collect();
        let ids: Vec<JobId> = favourites.iter().map(|(id, _)| *id).collect();
        let is_other = ids != self.favourites;
        if is_other {
            // What is known of them from before, when others were favourites.
            let jobs = if favourites.iter().all(|(_, of)| of.hardly_waits()) { 1.0 } else { 0.0 };
            *self = Slack { jobs, favourites: ids };
        }
        let order = paced_in_order(jobs, is_paced);
        if is_other || favourites.iter().all(|(_, of)| of.read_at == Some(now)) {
            // A favourite of which nothing is known is taken for one that fills the GPU.
            let waiting = favourites.iter().map(|(_, of)| of.waiting.unwrap_or(1.0)).fold(0.0, f64::max);
            let change = SLACK_PER_WAITING * (MOST_WAITING - waiting);
            // Behind a job that works all the time and waits, nothing is left.
            let leaves_some = |(place, job): &(usize, &usize)| {
                self.jobs >= (place + 1) as f64 && jobs.get(**job).is_some_and(|(_, of)| of.hardly_waits())
            };
            let most = (1 + order.iter().enumerate().take_while(leaves_some).count()).min(order.len());
            self.jobs = (self.jobs + change.clamp(-1.0, MOST_SLACK_GROWTH)).clamp(0.0, most as f64);
        }
        let mut parts = vec![0.0; jobs.len()];
        for (place, job) in order.into_iter().enumerate() {
            parts[job] = (self.jobs - place as f64).clamp(0.0, 1.0);
        }
        parts
    }
}

/// The places of the paced jobs: the largest share first, and of equal shares the job that gains most.
fn paced_in_order(jobs: &[(JobId, &GpuUse)], is_paced: &[bool]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..jobs.len()).filter(|&job| is_paced[job]).collect();
    let (share, growth) = (|job: usize| jobs[job].1.share.unwrap_or(1.0), |job: usize| jobs[job].1.growth);
    order.sort_by(|&a, &b| share(b).total_cmp(&share(a)).then(growth(b).total_cmp(&growth(a))).then(a.cmp(&b)));
    order
}

/// The shares of the jobs with work, as parts of their sum, and which of these jobs are paced.
pub(super) fn parts(shares: &[f64]) -> (Vec<f64>, Vec<bool>) {
    let whole: f64 = shares.iter().sum();
    let parts: Vec<f64> = shares.iter().map(|share| if whole > 0.0 { share / whole } else { 1.0 }).collect();
    let largest = parts.iter().copied().fold(0.0, f64::max);
    let is_paced = parts.iter().map(|part| largest - part > SAME_SHARE).collect();
    (parts, is_paced)
}

/// What goes into the page of each job with work: the part of GPU time in millionths, and the number of such jobs. A
/// part of 0: not paced. `parts` and `is_paced` are those of [`parts`], `slack` is that of [`Slack::update`].
///
/// The library takes a quantum of work beside n jobs for an n-th of it. Jobs that are paced leave more, so the part in
/// the page is the one with which the library works for the right part of the wall time.
pub(super) fn orders(parts: &[f64], is_paced: &[bool], slack: &[f64]) -> Vec<(u32, u32)> {
    let jobs = parts.len() as u32;
    let order = |((is_paced, slack), working): ((&bool, &f64), f64)| {
        let working = working + slack * (1.0 - working);
        if !is_paced || working > ALMOST_ALWAYS {
            return (0, jobs);
        }
        let part = (working / f64::from(jobs) * f64::from(WHOLE_GPU)).round() as u32;
        (part.clamp(1, WHOLE_GPU - 1), jobs)
    };
    is_paced.iter().zip(slack).zip(working_parts(parts, is_paced)).map(order).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_whose_launches_are_not_caught_is_known_by_what_the_driver_shows() {
        let second = |s: u64| Time::from_secs_f64(s as f64);
        let mut of = GpuUse::default();
        of.record_uncaught(true, second(1));
        assert_eq!((of.gpu, of.is_uncaught), (0, false), "it is on no GPU");
        let shown = |at: u64, busy: f64| Some(GpuMeasurement::on(&[7], second(at), Some(busy)));
        for at in 2..=3 {
            of.measure(shown(at, 0.5), 1.0);
            of.record_uncaught(true, second(at));
        }
        assert!(of.is_busy(second(3)) && of.is_uncaught && of.gpu == 7);
        assert_eq!(of.stopped_part(), None, "it is not paced before a decision");
        of.order = (WHOLE_GPU / 10, 2);
        assert!(of.stopped_part().is_some_and(|part| (part - 0.2).abs() < 1e-9));
        of.order = (0, 2);
        assert_eq!(of.stopped_part(), None, "the largest share is never stopped");
        for at in 4..=7 {
            assert!(of.is_busy(second(at)), "readings without a sample mean little: {at}");
            of.measure(shown(at, 0.0), 1.0);
            of.record_uncaught(true, second(at));
        }
        assert!(!of.is_busy(second(7)), "it has no work");

        of.record(&Report { gpu: 7, launches: 900, ..Report::default() }, second(8));
        of.order = (WHOLE_GPU / 10, 2);
        of.record_uncaught(true, second(8));
        assert!(!of.is_uncaught && of.stopped_part().is_none(), "launches are caught after all");

        let mut of = GpuUse::default();
        of.measure(Some(GpuMeasurement::on(&[7, 8], second(1), Some(1.5))), 1.0);
        of.record_uncaught(true, second(1));
        assert_eq!((of.gpu, of.is_uncaught), (0, false), "jobs on several GPUs are never stopped");
        of.measure(shown(2, 0.5), 1.0);
        of.record_uncaught(false, second(2));
        assert!(!of.is_uncaught, "nobody asked for it");
    }

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

    fn orders_of(shares: &[f64], slack: f64) -> Vec<(u32, u32)> {
        let (parts, is_paced) = parts(shares);
        orders(&parts, &is_paced, &vec![slack; shares.len()])
    }

    #[test]
    fn the_largest_share_is_not_paced() {
        // Beside one job, the library's pause for a share of a tenth is what the page says.
        assert_eq!(orders_of(&[0.9, 0.1], 0.0), [(0, 2), (100_000, 2)]);
        assert_eq!(orders_of(&[0.34, 0.33, 0.33], 0.0), [(0, 3); 3], "equal shares need no pace");
        let three = orders_of(&[0.15, 0.7, 0.15], 0.0);
        assert_eq!(three[1], (0, 3));
        // With two paced jobs each works beside fewer than three.
        assert!(three[0] == three[2] && (100_000..150_000).contains(&three[0].0), "{three:?}");
        assert_eq!(orders_of(&[0.09, 0.01], 0.0), [(0, 2), (100_000, 2)], "shares are parts of those with work");
    }

    #[test]
    fn a_job_alone_is_not_paced() {
        assert_eq!(orders_of(&[1.0], 0.0), [(0, 1)]);
        assert_eq!(orders_of(&[0.2], 0.0), [(0, 1)]);
        assert_eq!(orders_of(&[], 0.0), []);
        assert_eq!(orders_of(&[0.0, 0.0], 0.0), [(0, 2); 2]);
    }

    #[test]
    fn nobody_pauses_for_a_job_that_does_not_wait() {
        let at = Time::from_secs_f64;
        let of = |waiting, now_s| GpuUse { waiting, read_at: Some(at(now_s)), ..GpuUse::default() };
        let mut slack = Slack::default();
        let mut update = |waiting: [Option<f64>; 2], is_paced: [bool; 2], read_s: f64, now_s: f64| {
            let uses = waiting.map(|waiting| of(waiting, read_s));
            let parts = slack.update(&[(JobId(1), &uses[0]), (JobId(2), &uses[1])], &is_paced, at(now_s));
            parts[usize::from(is_paced[1])]
        };
        let first = [false, true];
        assert_eq!(update([None, Some(0.0)], first, 1.0, 1.0), 0.0, "nothing is known of the favourite");
        assert_eq!(update([Some(0.0), Some(0.9)], first, 2.0, 2.0), 0.5, "the favourite does not wait");
        assert_eq!(update([Some(0.0), Some(0.9)], first, 2.0, 2.5), 0.5, "the same reading");
        assert_eq!(update([Some(0.02), Some(0.9)], first, 3.0, 3.0), 1.0);
        assert!((update([Some(0.25), Some(0.9)], first, 4.0, 4.0) - 0.5).abs() < 1e-9, "it waits a little");
        assert_eq!(update([Some(0.4), Some(0.9)], first, 5.0, 5.0), 0.0, "it fills the GPU");
        assert_eq!(update([Some(0.4), Some(0.0)], [true, false], 5.0, 5.5), 1.0, "another favourite is known already");
        assert_eq!(orders_of(&[0.9, 0.1], 0.5), [(0, 2), (300_000, 2)], "works for 0.6 of the time");
        assert_eq!(orders_of(&[0.9, 0.1], 1.0), [(0, 2); 2]);
    }

    #[test]
    fn what_a_favourite_leaves_goes_to_the_next_job_first() {
        let at = Time::from_secs_f64;
        let of = |share: f64, growth: f64, waiting: f64, now_s: f64| GpuUse {
            share: Some(share),
            growth,
            waiting: Some(waiting),
            read_at: Some(at(now_s)),
            ..GpuUse::default()
        };
        let mut slack = Slack::default();
        // A favourite that waits as said, a long job, and a short one with as small a share.
        let mut update = |waiting: [f64; 3], now_s: f64| {
            let shares = [(0.99, 1.0), (0.005, 0.1), (0.005, 0.3)];
            let uses: Vec<GpuUse> = shares
                .iter()
                .zip(waiting)
                .map(|((share, growth), waiting)| of(*share, *growth, waiting, now_s))
                .collect();
            let jobs: Vec<(JobId, &GpuUse)> = (1..).map(JobId).zip(&uses).collect();
            slack.update(&jobs, &[false, true, true], at(now_s))
        };
        assert_eq!(update([0.9, 0.9, 0.9], 1.0), [0.0, 0.0, 0.0], "it fills the GPU");
        assert_eq!(update([0.0, 0.9, 0.9], 2.0), [0.0, 0.0, 0.5]);
        for now_s in [3.0, 4.0, 5.0] {
            assert_eq!(update([0.0, 0.9, 0.9], now_s), [0.0, 0.0, 1.0], "the short one fills what is left");
        }
        assert_eq!(update([0.0, 0.9, 0.1], 6.0), [0.0, 0.5, 1.0], "the short one leaves some");
        assert_eq!(update([0.0, 0.9, 0.1], 7.0), [0.0, 1.0, 1.0]);
        assert_eq!(update([0.0, 0.9, 0.9], 8.0), [0.0, 0.0, 1.0], "now it fills what is left");
        assert_eq!(update([0.9, 0.9, 0.9], 9.0), [0.0, 0.0, 0.0]);
    }

    #[test]
    fn beside_others_the_pauses_of_the_library_count() {
        let at = Time::from_secs_f64;
        let computing = |working: f64, busy: Option<f64>| {
            let measured = busy.map(|busy| GpuMeasurement::on(&[5], at(9.0), Some(busy)));
            let (readings_with_work, launched_at) = (READINGS_WITH_WORK, Some(at(9.0)));
            GpuUse { gpu: 5, working, measured, readings_with_work, launched_at, share: Some(0.5), ..GpuUse::default() }
        };
        let slices_of = |jobs: &mut [&mut GpuUse]| {
            let found = time_slices(jobs, at(10.0)).into_iter().map(|part| (100.0 * part).round() as u32);
            (found.collect::<Vec<u32>>(), jobs.iter().map(|of| of.source).collect::<Vec<TimeSource>>())
        };
        // What NVML showed on an H200: nothing of the late job, and half of the GPU for one that is paced.
        let (mut late, mut paced) = (computing(1.0, Some(0.0)), computing(0.2, Some(0.5)));
        let beside = TimeSource::PausesBesideOthers;
        assert_eq!(slices_of(&mut [&mut late, &mut paced]), (vec![90, 10], vec![beside; 2]));
        assert!(late.note("").is_some_and(|note| note.contains("because several jobs compute")));
        // A job that launches nothing, and one without the library, are no neighbours with known pauses.
        paced.readings_with_work = 0;
        assert_eq!(slices_of(&mut [&mut late, &mut paced]), (vec![0, 50], vec![TimeSource::Driver; 2]));
        assert!(late.note("").is_some_and(|note| note.contains("measured by the driver")));
        let mut uncaught = GpuUse { is_uncaught: true, ..computing(1.0, Some(0.7)) };
        assert_eq!(slices_of(&mut [&mut late, &mut uncaught]), (vec![0, 70], vec![TimeSource::Driver; 2]));
        // Beside two jobs with the library, NVML still measures the one without.
        let mut other = computing(1.0, Some(0.9));
        let expected = (vec![33, 33, 70], vec![beside, beside, TimeSource::Driver]);
        assert_eq!(slices_of(&mut [&mut late, &mut other, &mut uncaught]), expected);
        // Without NVML, or with numbers that are old, nothing else is known of a job alone.
        let mut alone = computing(1.0, None);
        assert_eq!(slices_of(&mut [&mut alone]), (vec![100], vec![TimeSource::Pauses]));
        alone.measured = Some(GpuMeasurement::on(&[5], at(1.0), Some(0.3)));
        assert_eq!(slices_of(&mut [&mut alone]), (vec![100], vec![TimeSource::Pauses]));
        assert!(alone.note("").is_some_and(|note| note.contains("because the driver does not say")));
        let mut slow = computing(1.0, Some(0.4));
        assert_eq!(slices_of(&mut [&mut slow]), (vec![40], vec![TimeSource::Driver]));
    }

    #[test]
    fn reports_become_working_parts() {
        let mut job = GpuUse::default();
        let report = |launches, paused_ns| Report { launches, paused_ns, gpu: 5, gpus: 1, ..Report::default() };
        let at = Time::from_secs_f64;
        job.record(&report(10, 0), at(1.0));
        assert!(job.is_active(at(1.0)) && !job.is_busy(at(1.0)), "it may only be starting");
        job.order.1 = 2;
        job.record(&Report { waited_ns: 100_000_000, ..report(20, 800_000_000) }, at(2.0));
        assert!((job.working - 0.2).abs() < 1e-9 && job.is_busy(at(2.0)));
        assert!(job.waiting.is_some_and(|waiting| (waiting - 0.5).abs() < 1e-9), "half of its work");
        job.order.0 = 1;
        job.record(&report(20, 800_000_000), at(2.5));
        assert!((job.working - 0.2).abs() < 1e-9 && job.is_busy(at(2.5)), "it may pause all this time");
        job.order.0 = 0;
        job.record(&report(20, 800_000_000), at(2.1));
        assert!((job.working - 0.2).abs() < 1e-9 && job.is_busy(at(2.1)), "too soon after the last report");
        job.record(&Report { waited_ns: 800_000_000, ..report(20, 800_000_000) }, at(3.0));
        assert!(job.working == 1.0 && job.is_busy(at(3.0)), "it waits for a long kernel");
        job.record(&report(20, 800_000_000), at(3.25));
        assert!(job.working == 0.0 && job.is_active(at(3.25)) && !job.is_busy(at(3.25)), "nothing was launched");
        job.record(&report(20, 800_000_000), at(3.5));
        assert!(job.working == 0.0 && job.is_active(at(3.0)) && !job.is_busy(at(3.0)), "nothing was launched");
        job.record(&report(20, 800_000_000), at(18.0));
        assert!(!job.is_active(at(18.0)), "no launch for long");
        job.record(&report(3, 0), at(19.0));
        assert!(job.is_active(at(19.0)) && !job.is_busy(at(19.0)), "another attempt");
        job.record(&report(3 + MANY_LAUNCHES, 0), at(20.0));
        assert!(job.is_busy(at(20.0)), "it computes");
        job.record(&Report { gpus: 2, ..report(999, 0) }, at(21.0));
        assert!(!job.is_active(at(21.0)));
        assert!(job.note("").is_some_and(|note| note.contains("several GPUs")));
    }
}
