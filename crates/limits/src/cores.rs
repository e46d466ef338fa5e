//! Dealing out whole cores by share.
//!
//! **Problem.** On many cores a weight hardly binds: a team of threads is as slow as its last thread, and each of
//! its threads shares a core with another job. Jobs need cores of their own, as many as their shares stand for, near
//! each other, and the same ones for as long as possible.
//!
//! **Approach.** [`deal`] is a pure function of claims and of what the jobs have now.
//! - Where there are two cores or more for each job, no job gets less than half of an equal part.
//! - A job whose claim is at least one core is a *holder*. Jobs with less share a *pool* by weight.
//! - With a pool, holders and pool get whole cores by largest remainder. A pool that would be empty takes a core
//!   from the holder that is furthest above its claim; if every holder has one core, the smallest joins the pool.
//! - Without a pool, every holder gets the whole part of its claim. Cores that are left go to the largest
//!   remainders, except the last one: it becomes the *border core*, which the holders that were rounded down share by
//!   weight, unless one remainder is so large that it takes this core for itself.
//! - Holders keep cores that they have. New cores are those next to them, or the smallest gap that fits.
//! - While no claim is more than [`KEPT_WITHIN_CORES`] away from what its job has, nothing changes.
//!
//! **Terms.** A *claim* is a share of all cores. Claims are scaled so that they sum to one. *Own* cores are those of
//! one job, *shared* cores those of the pool or the border.
//!
//! **Properties.** `every_core_dealt`: with at least one job, each core belongs to a holder or is shared.
//! `every_job_has_one`: each job has at least one core. `half_of_an_equal_part`: on many cores each job has at least
//! half of an equal part, rounded down. `apart`: own cores belong to one job only. `close`: a holder
//! has at most one core more and one core less than its claim, where all jobs are holders. `stable`: the same claims,
//! and claims that moved a little, change nothing. `near`: jobs that are dealt cores for the first time get
//! neighbours.

use crate::cpus::CpuList;

/// The cores of one job.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct CoreSet {
    /// No other job has these.
    pub own: CpuList,
    /// The pool or the border core; other jobs have these too.
    pub shared: CpuList,
}

impl CoreSet {
    /// All cores that the job may use.
    pub(crate) fn all(&self) -> CpuList {
        self.own.iter().chain(self.shared.iter()).collect()
    }
}

/// A remainder from here on takes the last core for itself instead of sharing it as the border core.
const WHOLE_FROM: f64 = 0.75;

/// The cores stay as they are while each claim is at most this many cores away from what its job has.
const KEPT_WITHIN_CORES: f64 = 1.0;

/// Where an equal part is at least this many cores, each job gets at least [`FLOOR_PART`] of it.
const FLOOR_FROM_CORES: f64 = 2.0;

/// A policy may give nearly all to one job, and on one core that costs nothing: the others come later. On many cores
/// the last cores of a large team bring little, and a job with a single core falls far behind.
const FLOOR_PART: f64 = 0.5;

/// Rounding of sums: a hair below a whole core is a whole core.
const HAIR: f64 = 1e-9;

/// Which cores each job gets. `claims` are shares of the whole; `held` is what the jobs have now (missing or empty
/// for a new job); `cores` are in the order of neighbourhood. The result has one set for each job, which is empty
/// only if there are no cores.
pub(crate) fn deal(cores: &[u32], claims: &[f64], held: &[CoreSet]) -> Vec<CoreSet> {
    if cores.is_empty() || claims.is_empty() {
        return vec![CoreSet::default(); claims.len()];
    }
    let wanted = wanted_cores(cores.len(), claims);
    if may_stay(cores, &wanted, held) {
        return held.to_vec();
    }
    hand_out(cores, &core_counts(cores.len(), &wanted), held)
}

/// The weight of each job, as a part of the whole: equal on all cores, so that a job with few cores loses none of
/// them to other programs of the machine. The kernel spreads the weight of all jobs over the cores by the weights of
/// the jobs there: a small share as the weight of a job with a core of its own would leave it next to nothing there.
/// On shared cores the claims decide.
pub(crate) fn weights(cores: usize, claims: &[f64], sets: &[CoreSet]) -> Vec<f64> {
    let sharing: f64 = sets.iter().zip(claims).filter(|(set, _)| !set.shared.is_empty()).map(|(_, c)| c.max(0.0)).sum();
    let sharers = sets.iter().filter(|set| !set.shared.is_empty()).count().max(1) as f64;
    let weight = |(set, claim): (&CoreSet, &f64)| {
        let part = if sharing > 0.0 { claim.max(0.0) / sharing } else { 1.0 / sharers };
        (set.own.len() as f64 + part * set.shared.len() as f64) / cores.max(1) as f64
    };
    sets.iter().zip(claims).map(weight).collect()
}

/// What jobs have, as read from their lists of CPUs: a core in several lists is shared. A list of all cores is that
/// of a job that no deal has reached.
#[cfg(feature = "docker")]
pub(crate) fn split(lists: &[CpuList], cores: usize) -> Vec<CoreSet> {
    let dealt: Vec<&CpuList> = lists.iter().map(|list| if list.len() < cores { list } else { &NONE }).collect();
    let is_shared = |cpu: &u32| dealt.iter().filter(|list| list.contains(*cpu)).count() > 1;
    let set = |list: &CpuList| CoreSet {
        own: list.iter().filter(|cpu| !is_shared(cpu)).collect(),
        shared: list.iter().filter(is_shared).collect(),
    };
    dealt.iter().map(|list| set(list)).collect()
}

/// The claims in cores; they sum to all cores.
fn wanted_cores(cores: usize, claims: &[f64]) -> Vec<f64> {
    let sum: f64 = claims.iter().map(|c| c.max(0.0)).sum();
    let equal = cores as f64 / claims.len().max(1) as f64;
    let wanted = match sum > 0.0 {
        true => claims.iter().map(|c| c.max(0.0) / sum * cores as f64).collect(),
        false => vec![equal; claims.len()],
    };
    if equal < FLOOR_FROM_CORES { wanted } else { lift(wanted, FLOOR_PART * equal) }
}

/// Lifts every claim to `floor` and takes that from the claims above it, in proportion to what they have above it.
/// `floor` times their number must not exceed their sum.
fn lift(mut wanted: Vec<f64>, floor: f64) -> Vec<f64> {
    let missing: f64 = wanted.iter().map(|w| (floor - w).max(0.0)).sum();
    let spare: f64 = wanted.iter().map(|w| (w - floor).max(0.0)).sum();
    if missing > 0.0 && spare > 0.0 {
        for w in &mut wanted {
            *w = floor + (*w - floor).max(0.0) * (1.0 - missing / spare);
        }
    }
    wanted
}

/// Whether `held` deals out all these cores, and near enough to what is wanted.
fn may_stay(cores: &[u32], wanted: &[f64], held: &[CoreSet]) -> bool {
    let shared = held.iter().map(|set| &set.shared).find(|shared| !shared.is_empty()).unwrap_or(&NONE);
    let own_count: usize = held.iter().map(|set| set.own.len()).sum();
    let dealt: CpuList = held.iter().flat_map(|set| set.own.iter()).chain(shared.iter()).collect();
    // Counts that add up mean that no core was dealt twice.
    let is_deal = held.len() == wanted.len()
        && dealt == cores.iter().copied().collect()
        && own_count + shared.len() == cores.len()
        && held.iter().all(|set| set.shared.is_empty() || set.shared == *shared)
        && held.iter().all(|set| !set.own.is_empty() || !set.shared.is_empty());
    let is_near = |have: usize, wanted: f64| (have as f64 - wanted).abs() <= KEPT_WITHIN_CORES;
    let in_pool = |set: &CoreSet| set.own.is_empty();
    let pool_wanted: f64 = held.iter().zip(wanted).filter(|(set, _)| in_pool(set)).map(|(_, w)| w).sum();
    is_deal
        && (!held.iter().any(in_pool) || is_near(shared.len(), pool_wanted))
        && held.iter().zip(wanted).all(|(set, &wanted)| match in_pool(set) {
            true => wanted < 1.0 - HAIR,
            false => wanted >= 1.0 - HAIR && is_near(set.own.len(), wanted),
        })
}

static NONE: CpuList = CpuList::EMPTY;

/// How many cores each job gets.
struct CoreCounts {
    /// By job; 0: in the pool.
    own: Vec<usize>,
    /// Jobs that may use the shared cores.
    shares: Vec<bool>,
    shared: usize,
}

fn core_counts(cores: usize, wanted: &[f64]) -> CoreCounts {
    let mut is_holder: Vec<bool> = wanted.iter().map(|&w| w >= 1.0 - HAIR).collect();
    if is_holder.iter().all(|h| *h) {
        return counts_with_border(wanted);
    }
    loop {
        let pool_wanted: f64 = wanted.iter().zip(&is_holder).filter(|(_, h)| !**h).map(|(w, _)| w).sum();
        // The holders in order, then the pool.
        let mut parts: Vec<f64> = wanted.iter().zip(&is_holder).filter(|(_, h)| **h).map(|(w, _)| *w).collect();
        parts.push(pool_wanted);
        let pool = parts.len() - 1;
        let mut got = largest_remainder(cores, &parts);
        if got[pool] == 0 {
            let giver = (0..pool)
                .filter(|&i| got[i] > 1)
                .max_by(|&a, &b| (got[a] as f64 - parts[a]).total_cmp(&(got[b] as f64 - parts[b])));
            let Some(giver) = giver else {
                let holders = (0..wanted.len()).filter(|&i| is_holder[i]);
                if let Some(smallest) = holders.min_by(|&a, &b| wanted[a].total_cmp(&wanted[b])) {
                    is_holder[smallest] = false;
                }
                continue;
            };
            got[giver] -= 1;
            got[pool] = 1;
        }
        let shared = got[pool];
        let mut got = got.into_iter();
        let own = is_holder.iter().map(|&h| if h { got.next().unwrap_or(0) } else { 0 }).collect();
        return CoreCounts { own, shares: is_holder.iter().map(|h| !h).collect(), shared };
    }
}

/// Core counts of holders only: whole parts, the largest remainders, and perhaps a border core.
fn counts_with_border(wanted: &[f64]) -> CoreCounts {
    let mut own: Vec<usize> = wanted.iter().map(|w| (w + HAIR).floor() as usize).collect();
    let sum: f64 = wanted.iter().sum();
    let mut left = (sum.round() as usize).saturating_sub(own.iter().sum());
    let remainder = |i: usize| wanted[i] - wanted[i].floor();
    let mut by_remainder: Vec<usize> = (0..wanted.len()).filter(|&i| wanted[i] - own[i] as f64 > HAIR).collect();
    by_remainder.sort_by(|&a, &b| remainder(b).total_cmp(&remainder(a)).then(a.cmp(&b)));
    let mut rest = by_remainder.into_iter();
    let mut shares = vec![false; wanted.len()];
    while left > 0 {
        let Some(next) = rest.next() else { break };
        if left == 1 && remainder(next) < WHOLE_FROM {
            shares[next] = true;
            rest.for_each(|i| shares[i] = true);
            break;
        }
        own[next] += 1;
        left -= 1;
    }
    // A border core of a single job is its own.
    if left == 1
        && let [alone] = (0..wanted.len()).filter(|&i| shares[i]).collect::<Vec<_>>()[..]
    {
        own[alone] += 1;
        shares[alone] = false;
        left = 0;
    }
    CoreCounts { own, shares, shared: left }
}

/// Whole cores in proportion to `wanted`: the whole parts first, then one each by the largest fraction, from the
/// front on a tie. All cores are given.
fn largest_remainder(cores: usize, wanted: &[f64]) -> Vec<usize> {
    let mut got: Vec<usize> = wanted.iter().map(|c| (c + HAIR).floor() as usize).collect();
    let mut by_fraction: Vec<usize> = (0..wanted.len()).collect();
    by_fraction.sort_by(|&a, &b| (wanted[b] - got[b] as f64).total_cmp(&(wanted[a] - got[a] as f64)).then(a.cmp(&b)));
    let left = cores.saturating_sub(got.iter().sum());
    for i in 0..left {
        got[by_fraction[i % by_fraction.len()]] += 1;
    }
    got
}

fn hand_out(cores: &[u32], counts: &CoreCounts, held: &[CoreSet]) -> Vec<CoreSet> {
    let mut free = FreeCores { order: cores, is_free: vec![true; cores.len()] };
    // First each holder keeps cores that it has. A job that had all cores has none worth keeping.
    let mut places: Vec<Vec<usize>> = vec![Vec::new(); counts.own.len()];
    for (i, &count) in counts.own.iter().enumerate() {
        let before = held.get(i).map(|set| &set.own).filter(|own| own.len() < cores.len());
        places[i] = free.keep(before.unwrap_or(&NONE), count);
    }
    // Jobs with many missing cores choose first: they need the large gaps.
    let mut order: Vec<usize> = (0..counts.own.len()).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(counts.own[i].saturating_sub(places[i].len())));
    for i in order {
        let missing = counts.own[i].saturating_sub(places[i].len());
        free.take_near(&mut places[i], missing);
    }
    let shared: CpuList = free.rest();
    debug_assert!(shared.len() == counts.shared, "all cores are dealt");
    let set = |(i, places): (usize, Vec<usize>)| CoreSet {
        own: places.into_iter().map(|place| cores[place]).collect(),
        shared: if counts.shares[i] { shared.clone() } else { CpuList::default() },
    };
    places.into_iter().enumerate().map(set).collect()
}

/// Cores by their place in the order of neighbourhood.
struct FreeCores<'c> {
    order: &'c [u32],
    is_free: Vec<bool>,
}

impl FreeCores<'_> {
    /// Takes at most `count` of these cores.
    fn keep(&mut self, cores: &CpuList, count: usize) -> Vec<usize> {
        let is_held = |place: &usize| self.is_free[*place] && cores.contains(self.order[*place]);
        let kept: Vec<usize> = (0..self.order.len()).filter(is_held).take(count).collect();
        kept.iter().for_each(|&place| self.is_free[place] = false);
        kept
    }

    /// Takes `count` more cores near the places that the job has.
    fn take_near(&mut self, places: &mut Vec<usize>, count: usize) {
        for missing in (1..=count).rev() {
            let next = match places.is_empty() {
                true => self.gap(missing),
                false => self.nearest(places),
            };
            let Some(next) = next else { return };
            self.is_free[next] = false;
            places.push(next);
        }
    }

    fn nearest(&self, places: &[usize]) -> Option<usize> {
        let distance = |free: usize| places.iter().map(|p| p.abs_diff(free)).min().unwrap_or(usize::MAX);
        (0..self.order.len()).filter(|&place| self.is_free[place]).min_by_key(|&place| distance(place))
    }

    /// The start of the smallest gap with `count` free cores; of the largest gap if all are smaller.
    fn gap(&self, count: usize) -> Option<usize> {
        let mut gaps: Vec<(usize, usize)> = Vec::new();
        for place in (0..self.order.len()).filter(|&place| self.is_free[place]) {
            match gaps.last_mut() {
                Some((start, length)) if *start + *length == place => *length += 1,
                _ => gaps.push((place, 1)),
            }
        }
        let fitting = gaps.iter().filter(|(_, length)| *length >= count).min_by_key(|(_, length)| *length);
        fitting.or(gaps.iter().max_by_key(|(_, length)| *length)).map(|(start, _)| *start)
    }

    fn rest(self) -> CpuList {
        self.order.iter().zip(self.is_free).filter(|(_, is_free)| *is_free).map(|(cpu, _)| *cpu).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn deal_new(cores: u32, claims: &[f64]) -> Vec<String> {
        let all: Vec<u32> = (0..cores).collect();
        deal(&all, claims, &[]).iter().map(text).collect()
    }

    fn text(set: &CoreSet) -> String {
        match set.shared.is_empty() {
            true => set.own.to_string(),
            false => format!("{}+{}", set.own, set.shared),
        }
    }

    #[test]
    fn worked_by_hand() {
        assert_eq!(deal_new(2, &[0.6, 0.3, 0.1]), ["0", "+1", "+1"]);
        assert_eq!(deal_new(8, &[0.5, 0.25, 0.25]), ["0-3", "4-5", "6-7"]);
        // 2.8 and 1.2 of four cores: the larger remainder takes the fourth core.
        assert_eq!(deal_new(4, &[0.7, 0.3]), ["0-2", "3"]);
        // 5.33 each: five whole cores, and one border core for all three.
        assert_eq!(deal_new(16, &[1.0, 1.0, 1.0]), ["0-4+15", "5-9+15", "10-14+15"]);
        // 10.4, 2.8 and 2.8: the remainders of the small ones are the largest.
        assert_eq!(deal_new(16, &[0.65, 0.175, 0.175]), ["0-9", "10-12", "13-15"]);
        // Half of an equal part is the least: 3 of 12 for two jobs, 2 of 16 for four.
        assert_eq!(deal_new(12, &[0.995, 0.005]), ["0-8", "9-11"]);
        assert_eq!(deal_new(16, &[0.97, 0.01, 0.01, 0.01]), ["0-9", "10-11", "12-13", "14-15"]);
        assert_eq!(deal_new(16, &[1.0, 0.0, 0.0, 0.0]), ["0-9", "10-11", "12-13", "14-15"]);
        // 2.67 each of eight cores: two cores are left; the first job gets one, the others share one.
        assert_eq!(deal_new(8, &[1.0, 1.0, 1.0]), ["0-2", "3-4+7", "5-6+7"]);
        // One core for three jobs: all of them in the pool.
        assert_eq!(deal_new(1, &[0.8, 0.1, 0.1]), ["+0", "+0", "+0"]);
        assert_eq!(deal_new(2, &[0.51, 0.49, 0.0]), ["0", "+1", "+1"]);
        assert_eq!(deal_new(4, &[1.0]), ["0-3"]);
        // Claims beyond the whole are scaled down.
        assert_eq!(deal_new(4, &[1.0, 1.0]), ["0-1", "2-3"]);
    }

    #[test]
    fn every_core_has_the_same_weight() {
        let all: Vec<u32> = (0..16).collect();
        let weights_of = |claims: &[f64]| weights(16, claims, &deal(&all, claims, &[]));
        assert_eq!(weights_of(&[0.5, 0.5]), [0.5, 0.5]);
        // The job with half a percent has four cores of its own.
        assert_eq!(weights_of(&[0.995, 0.005]), [12.0 / 16.0, 4.0 / 16.0]);
        let claims = [0.92, 0.06, 0.02];
        let pool = weights(4, &claims, &deal(&all[..4], &claims, &[]));
        assert!((pool[1] - 0.75 / 4.0).abs() < 1e-12 && (pool[2] - 0.25 / 4.0).abs() < 1e-12, "{pool:?}");
        assert_eq!(weights(4, &[0.0, 0.0], &deal(&[0], &[0.0, 0.0], &[])), [0.125, 0.125]);
    }

    #[test]
    fn a_job_that_grows_takes_its_neighbours_cores() {
        let all: Vec<u32> = (0..16).collect();
        let first = deal(&all, &[0.25, 0.25, 0.5], &[]);
        assert_eq!(first.iter().map(text).collect::<Vec<_>>(), ["8-11", "12-15", "0-7"]);
        let grown = deal(&all, &[0.5, 0.25, 0.25], &first);
        assert_eq!(grown.iter().map(text).collect::<Vec<_>>(), ["4-11", "12-15", "0-3"]);
        let alone = deal(&all, &[1.0], &grown[..1]);
        assert_eq!(text(&alone[0]), "0-15");
    }

    #[cfg(feature = "docker")]
    #[test]
    fn a_deal_is_read_back_from_its_lists() {
        let all: Vec<u32> = (0..16).collect();
        for claims in [&[1.0, 1.0, 1.0][..], &[0.5, 0.25, 0.25], &[0.9, 0.06, 0.04]] {
            let dealt = deal(&all, claims, &[]);
            let lists: Vec<CpuList> = dealt.iter().map(CoreSet::all).collect();
            assert_eq!(split(&lists, all.len()), dealt);
        }
        assert_eq!(split(&[all.iter().copied().collect(), CpuList::new(vec![3])], 16)[1].own.to_string(), "3");
    }

    #[test]
    fn small_changes_move_no_core() {
        let all: Vec<u32> = (0..16).collect();
        let first = deal(&all, &[0.5, 0.3, 0.2], &[]);
        assert_eq!(deal(&all, &[0.53, 0.28, 0.19], &first), first);
        assert_ne!(deal(&all, &[0.6, 0.25, 0.15], &first), first);
        // A set that is no deal of these cores is not kept.
        let broken = [first[0].clone(), first[0].clone(), first[2].clone()];
        assert_ne!(deal(&all, &[0.5, 0.3, 0.2], &broken), broken);
    }

    proptest! {
        #[test]
        fn every_core_dealt_every_job_has_one_apart_close_stable(
            cores in 1u32..70,
            claims in proptest::collection::vec(0.0f64..1.0, 1..12),
            shift in proptest::collection::vec(0.0f64..1.0, 12),
        ) {
            let all: Vec<u32> = (0..cores).collect();
            let first = deal(&all, &claims, &[]);
            let again = deal(&all, &claims, &first);
            prop_assert_eq!(&first, &again, "stable");
            let other = &shift[..claims.len()];
            let moved = deal(&all, other, &first);
            for (dealt, claims) in [(&first, &claims[..]), (&moved, other)] {
                let shared: CpuList = dealt.iter().flat_map(|set| set.shared.iter()).collect();
                let mut owners = vec![0; cores as usize];
                for set in dealt {
                    prop_assert!(!set.all().is_empty(), "every_job_has_one");
                    set.own.iter().for_each(|c| owners[c as usize] += 1);
                }
                for core in 0..cores {
                    let count = owners[core as usize] + u32::from(shared.contains(core));
                    prop_assert_eq!(count, 1, "every_core_dealt and apart: core {}", core);
                }
                let wanted = wanted_cores(cores as usize, claims);
                let equal = f64::from(cores) / claims.len() as f64;
                if equal >= FLOOR_FROM_CORES {
                    let least = (FLOOR_PART * equal - HAIR) as usize;
                    prop_assert!(dealt.iter().all(|set| set.all().len() >= least), "half_of_an_equal_part");
                }
                if wanted.iter().all(|w| *w >= 1.0) {
                    for (set, wanted) in dealt.iter().zip(&wanted) {
                        let away = (set.own.len() as f64 - wanted).abs();
                        prop_assert!(away <= 1.0 + 1e-6, "close: {} cores for {wanted}", set.own.len());
                    }
                    prop_assert!(shared.len() <= 1, "one border core");
                }
            }
        }

        #[test]
        fn near(cores in 1u32..70, claims in proptest::collection::vec(0.1f64..1.0, 1..8)) {
            let all: Vec<u32> = (0..cores).collect();
            for set in deal(&all, &claims, &[]) {
                let cpus: Vec<u32> = set.own.iter().collect();
                prop_assert!(cpus.windows(2).all(|pair| pair[1] == pair[0] + 1), "{}", set.own);
            }
        }
    }
}
