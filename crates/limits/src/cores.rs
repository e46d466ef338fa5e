//! Dealing out whole cores.
//!
//! **Problem.** In `cores` mode a job's threads should run together on cores of their own, as many as its share buys,
//! and what is less than a core should still be shared fairly.
//!
//! **Approach.** A job whose share buys at least one core is a *holder*; all others live together in one
//! *pool* and share it by weight. Holders and pool get seats by largest remainder. A pool that would come out
//! empty takes a core from the holder that is furthest above its claim; if every holder has one core only,
//! the smallest holder joins the pool. Cores are then handed out so that a job keeps those it has, and takes
//! new ones next to each other.
//!
//! **Terms.** Claims are shares of all cores; they are scaled down together if they sum to more than one.
//!
//! **Properties.** `every_core_dealt`: with at least one job, each core belongs to a holder or to the pool.
//! `every_job_has_one`: each job has at least one core. `apart`: holders share no core with another job.
//! `stable`: the same claims again change nothing.

use crate::cpus::CpuList;

/// Which cores each job gets. `claims` are shares of the whole, `held` what the jobs have now (empty for a
/// new one), `cores` in the order of neighbourhood. The result has one list for each job; a list is empty
/// only if there are no cores.
pub(crate) fn deal(cores: &[u32], claims: &[f64], held: &[CpuList]) -> Vec<CpuList> {
    if cores.is_empty() || claims.is_empty() {
        return vec![CpuList::default(); claims.len()];
    }
    let seats = seats(cores.len(), claims);
    hand_out(cores, &seats, held)
}

/// `Some(n)`: n cores of its own; `None`: in the pool.
struct Seats {
    own: Vec<Option<usize>>,
    pool: usize,
}

fn seats(cores: usize, claims: &[f64]) -> Seats {
    let sum: f64 = claims.iter().map(|c| c.max(0.0)).sum();
    let scale = if sum > 1.0 { 1.0 / sum } else { 1.0 };
    let wanted: Vec<f64> = claims.iter().map(|c| c.max(0.0) * scale * cores as f64).collect();
    // A hair below a whole core is a whole core: 1/3 of three cores must not lose it to rounding.
    let mut holder: Vec<bool> = wanted.iter().map(|&w| w >= 1.0 - 1e-9).collect();
    loop {
        let pool_wanted: f64 = wanted.iter().zip(&holder).filter(|(_, h)| !**h).map(|(w, _)| w).sum();
        let pool_exists = holder.iter().any(|h| !h);
        // Entities: the holders in order, then the pool.
        let mut entities: Vec<f64> = wanted.iter().zip(&holder).filter(|(_, h)| **h).map(|(w, _)| *w).collect();
        if pool_exists {
            entities.push(pool_wanted);
        }
        let mut got = largest_remainder(cores, &entities);
        if pool_exists && got.last() == Some(&0) {
            let pool = got.len() - 1;
            let giver = (0..pool)
                .filter(|&i| got[i] > 1)
                .max_by(|&a, &b| (got[a] as f64 - entities[a]).total_cmp(&(got[b] as f64 - entities[b])));
            match giver {
                Some(giver) => {
                    got[giver] -= 1;
                    got[pool] = 1;
                }
                None => {
                    let smallest =
                        (0..wanted.len()).filter(|&i| holder[i]).min_by(|&a, &b| wanted[a].total_cmp(&wanted[b]));
                    holder[smallest.expect("the pool is empty only because holders have every core")] = false;
                    continue;
                }
            }
        }
        let pool = if pool_exists { got.pop().unwrap_or(0) } else { 0 };
        let mut got = got.into_iter();
        return Seats { own: holder.iter().map(|&h| if h { got.next() } else { None }).collect(), pool };
    }
}

/// Whole seats in proportion to `wanted`: the whole parts first, then one each by the largest fraction, from the
/// front on a tie. All seats are given.
fn largest_remainder(seats: usize, wanted: &[f64]) -> Vec<usize> {
    let sum: f64 = wanted.iter().sum();
    let claims: Vec<f64> = match sum > 0.0 {
        true => wanted.iter().map(|w| w / sum * seats as f64).collect(),
        false => vec![seats as f64 / wanted.len() as f64; wanted.len()],
    };
    let mut got: Vec<usize> = claims.iter().map(|c| (c + 1e-9).floor() as usize).collect();
    let mut by_fraction: Vec<usize> = (0..wanted.len()).collect();
    by_fraction.sort_by(|&a, &b| (claims[b] - got[b] as f64).total_cmp(&(claims[a] - got[a] as f64)).then(a.cmp(&b)));
    let left = seats.saturating_sub(got.iter().sum());
    for i in 0..left {
        got[by_fraction[i % by_fraction.len()]] += 1;
    }
    got
}

fn hand_out(cores: &[u32], seats: &Seats, held: &[CpuList]) -> Vec<CpuList> {
    let mut free: Vec<u32> = cores.to_vec();
    let mut dealt: Vec<Vec<u32>> = vec![Vec::new(); seats.own.len()];
    // First each holder keeps cores it has, then missing ones are filled up.
    for (i, own) in seats.own.iter().enumerate() {
        let Some(count) = *own else { continue };
        // A job that held all cores until now (free, or new) has no cores worth keeping.
        let before = held.get(i).filter(|h| h.len() < cores.len());
        let keep: Vec<u32> =
            free.iter().copied().filter(|&c| before.is_some_and(|h| h.contains(c))).take(count).collect();
        free.retain(|c| !keep.contains(c));
        dealt[i] = keep;
    }
    for (i, own) in seats.own.iter().enumerate() {
        let missing = own.map_or(0, |count| count - dealt[i].len());
        dealt[i].extend(free.drain(..missing.min(free.len())));
    }
    debug_assert!(free.len() == seats.pool, "all seats are dealt");
    let pool = CpuList::new(free);
    seats
        .own
        .iter()
        .zip(dealt)
        .map(|(own, cores)| if own.is_some() { CpuList::new(cores) } else { pool.clone() })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn deal_new(cores: u32, claims: &[f64]) -> Vec<String> {
        let all: Vec<u32> = (0..cores).collect();
        deal(&all, claims, &[]).iter().map(CpuList::to_string).collect()
    }

    #[test]
    fn worked_by_hand() {
        assert_eq!(deal_new(2, &[0.6, 0.3, 0.1]), ["0", "1", "1"]);
        assert_eq!(deal_new(8, &[0.5, 0.25, 0.25]), ["0-3", "4-5", "6-7"]);
        // 2.8 and 1.2 of four cores: the larger remainder takes the fourth core.
        assert_eq!(deal_new(4, &[0.7, 0.3]), ["0-2", "3"]);
        // One core for three jobs: all of them in the pool.
        assert_eq!(deal_new(1, &[0.8, 0.1, 0.1]), ["0", "0", "0"]);
        // Two holders of one core each on two cores leave no pool for the third: the smaller one joins it.
        assert_eq!(deal_new(2, &[0.51, 0.49, 0.0]), ["0", "1", "1"]);
        assert_eq!(deal_new(4, &[1.0]), ["0-3"]);
        // Free competition: claims beyond the whole are scaled down.
        assert_eq!(deal_new(4, &[1.0, 1.0]), ["0-1", "2-3"]);
    }

    proptest! {
        #[test]
        fn every_core_dealt_every_job_has_one_apart_stable(
            cores in 1u32..70,
            claims in proptest::collection::vec(0.0f64..1.0, 1..12),
            shift in proptest::collection::vec(0.0f64..1.0, 12),
        ) {
            let all: Vec<u32> = (0..cores).collect();
            let first = deal(&all, &claims, &[]);
            let again = deal(&all, &claims, &first);
            prop_assert_eq!(&first, &again, "stable");
            let moved = deal(&all, &shift[..claims.len()], &first);
            for dealt in [&first, &moved] {
                let mut owners = vec![Vec::new(); cores as usize];
                for list in dealt {
                    prop_assert!(!list.is_empty(), "every_job_has_one");
                    list.iter().for_each(|c| owners[c as usize].push(list));
                }
                for owners in owners {
                    prop_assert!(!owners.is_empty(), "every_core_dealt");
                    prop_assert!(owners.iter().all(|l| *l == owners[0]), "apart");
                }
            }
        }
    }
}
