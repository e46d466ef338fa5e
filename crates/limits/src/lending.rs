//! Cores that a job leaves unused work for others until it needs them.
//!
//! **Problem.** Whole cores waste what a job does not use: a program that imports its libraries for ten seconds uses
//! one of its eight cores.
//!
//! **Approach.** A holder that uses at most half of its cores *lends* the others. Jobs that use nearly all of what
//! they have *borrow* them, by share. The lender keeps the right to all of its cores. A borrower *yields*: the kernel
//! runs the lender's threads first wherever both want a core (`cpu.idle`, or the smallest weight). On its own cores
//! a borrower is alone, so yielding costs it nothing there. As soon as the lender uses more than it kept, it lends
//! nothing for [`PAUSE`].
//!
//! **Terms.** *Used*: cores in use lately, measured over at least [`SHORTEST`].
//!
//! **Properties.** `only_idle_cores_are_lent`: a lender keeps what it uses and one core more. `lent_to_one`: a lent
//! core goes to one borrower, or to those that share a border core or the pool of the lent ones. Jobs of the pool lend
//! nothing.

use crate::cores::{CoreSet, deal};
use crate::cpus::CpuList;
use std::time::{Duration, Instant};

/// A job with fewer cores of its own lends none.
const SMALLEST_LENDER: usize = 3;

/// A job lends if it uses at most this part of its own cores.
const IDLE_PART: f64 = 0.5;

/// A job borrows if it uses at least this part of its own cores, or of an equal part of the pool.
const BUSY_PART: f64 = 0.7;

/// A lender that needed its cores again keeps them for this long.
const PAUSE: Duration = Duration::from_secs(3);

/// Use over less time is noise.
const SHORTEST: Duration = Duration::from_millis(400);

/// How many cores one job used lately, and what it lends.
#[derive(Debug, Clone, Default)]
pub(crate) struct CoreUse {
    since: Option<(Instant, u64)>,
    used_cores: Option<f64>,
    /// Cores that the job kept while it lent the others; 0: it lends none.
    kept: usize,
    paused_until: Option<Instant>,
}

impl CoreUse {
    /// Takes a reading of the job's CPU time.
    pub(crate) fn record(&mut self, now: Instant, cpu_ns: u64) {
        let Some((since, before_ns)) = self.since else {
            self.since = Some((now, cpu_ns));
            return;
        };
        let elapsed = now.saturating_duration_since(since);
        if elapsed >= SHORTEST {
            self.used_cores = Some(cpu_ns.saturating_sub(before_ns) as f64 / elapsed.as_nanos().max(1) as f64);
            self.since = Some((now, cpu_ns));
        }
    }

    /// How many of its own cores the job keeps; the others are lent.
    fn keep(&mut self, own: usize, now: Instant) -> usize {
        let Some(used) = self.used_cores else { return own };
        if self.kept > 0 && used > self.kept as f64 - 0.5 {
            self.paused_until = Some(now + PAUSE);
        }
        let is_paused = self.paused_until.is_some_and(|until| now < until);
        let keeps = used.ceil() as usize + 1;
        let lends = own >= SMALLEST_LENDER && !is_paused && used <= IDLE_PART * own as f64 && keeps < own;
        self.kept = if lends { keeps } else { 0 };
        if lends { keeps } else { own }
    }

    fn is_busy(&self, cores: f64) -> bool {
        self.used_cores.is_some_and(|used| used >= BUSY_PART * cores)
    }
}

/// The cores that each job borrows; empty for most. `cores` are in the order of neighbourhood.
pub(crate) fn lend(
    cores: &[u32],
    sets: &[CoreSet],
    claims: &[f64],
    uses: &mut [&mut CoreUse],
    now: Instant,
) -> Vec<CpuList> {
    let mut borrowed = vec![CpuList::default(); sets.len()];
    let mut lent: Vec<u32> = Vec::new();
    let mut borrowers: Vec<usize> = Vec::new();
    let in_pool = sets.iter().filter(|set| set.own.is_empty()).count();
    for (i, (set, job)) in sets.iter().zip(uses.iter_mut()).enumerate() {
        let keeps = job.keep(set.own.len(), now);
        if keeps < set.own.len() {
            lent.extend(cores.iter().filter(|cpu| set.own.contains(**cpu)).skip(keeps));
            continue;
        }
        let has = if set.own.is_empty() { set.shared.len() as f64 / in_pool as f64 } else { set.own.len() as f64 };
        if job.is_busy(has) {
            borrowers.push(i);
        }
    }
    lent.sort_by_key(|cpu| cores.iter().position(|c| c == cpu));
    let claims: Vec<f64> = borrowers.iter().filter_map(|&i| claims.get(i).copied()).collect();
    for (i, set) in borrowers.into_iter().zip(deal(&lent, &claims, &[])) {
        borrowed[i] = set.all();
    }
    borrowed
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A job that used `used` cores in the last second.
    fn using(used: f64, now: Instant) -> CoreUse {
        let mut job = CoreUse::default();
        job.record(now, 5);
        job.record(now + Duration::from_secs(1), 5 + (used * 1e9) as u64);
        job
    }

    fn lend_to(sets: &[CoreSet], uses: &mut [CoreUse], now: Instant) -> Vec<String> {
        let cores: Vec<u32> = (0..16).collect();
        let claims = vec![1.0; sets.len()];
        let mut uses: Vec<&mut CoreUse> = uses.iter_mut().collect();
        lend(&cores, sets, &claims, &mut uses, now).iter().map(CpuList::to_string).collect()
    }

    #[test]
    fn only_idle_cores_are_lent() {
        let now = Instant::now();
        let cores: Vec<u32> = (0..16).collect();
        let sets = deal(&cores, &[0.5, 0.5], &[]);
        let after = now + Duration::from_secs(1);
        assert_eq!(lend_to(&sets, &mut [using(8.0, now), using(0.9, now)], after), ["10-15", ""]);
        assert_eq!(lend_to(&sets, &mut [using(8.0, now), using(3.2, now)], after), ["13-15", ""]);
        assert_eq!(lend_to(&sets, &mut [using(8.0, now), using(4.5, now)], after), ["", ""], "more than half");
        assert_eq!(lend_to(&sets, &mut [using(5.0, now), using(1.0, now)], after), ["", ""], "no job needs more");
        assert_eq!(lend_to(&sets, &mut [CoreUse::default(), using(1.0, now)], after), ["", ""], "nothing is known");
    }

    #[test]
    fn lent_to_one() {
        let now = Instant::now();
        let cores: Vec<u32> = (0..16).collect();
        let sets = deal(&cores, &[0.25, 0.25, 0.5], &[]);
        let uses = &mut [using(4.0, now), using(4.0, now), using(1.0, now)];
        assert_eq!(lend_to(&sets, uses, now + Duration::from_secs(1)), ["2-4", "5-7", ""]);
    }

    #[test]
    fn a_lender_that_needs_its_cores_has_them_back_and_keeps_them() {
        let now = Instant::now();
        let cores: Vec<u32> = (0..16).collect();
        let sets = deal(&cores, &[0.5, 0.5], &[]);
        let mut uses = [using(8.0, now), using(1.0, now)];
        let seconds = |s: u64| now + Duration::from_secs(s);
        assert_eq!(lend_to(&sets, &mut uses, seconds(1)), ["10-15", ""]);
        uses[1].record(seconds(2), 4_000_000_000);
        assert_eq!(lend_to(&sets, &mut uses, seconds(2)), ["", ""], "more than it kept");
        uses[1].record(seconds(3), 5_000_000_000);
        assert_eq!(lend_to(&sets, &mut uses, seconds(3)), ["", ""], "a pause");
        uses[1].record(seconds(6), 8_000_000_000);
        assert_eq!(lend_to(&sets, &mut uses, seconds(6)), ["10-15", ""]);
    }

    #[test]
    fn a_job_of_the_pool_borrows_and_lends_nothing() {
        let now = Instant::now();
        let pool = CoreSet { own: CpuList::default(), shared: CpuList::new(vec![15]) };
        let holder = CoreSet { own: (0..15).collect(), shared: CpuList::default() };
        let sets = [holder, pool.clone(), pool];
        let after = now + Duration::from_secs(1);
        let uses = &mut [using(1.0, now), using(0.8, now), using(0.1, now)];
        assert_eq!(lend_to(&sets, uses, after), ["", "2-14", ""]);
        let uses = &mut [using(15.0, now), using(0.1, now), using(0.1, now)];
        assert_eq!(lend_to(&sets, uses, after), ["", "", ""]);
    }
}
