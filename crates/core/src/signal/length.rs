//! How much of a job is still before it: a distribution over the steps left, not one number.
//!
//! **Problem.** Most jobs do not say how many steps they will make. One guess is wrong by factors,
//! and a scheduler that believes it hurts either the job or its neighbours.
//!
//! **Approach.** Everything that is known of a job's length makes atoms (a total number of steps,
//! with a weight); those that the job has passed are struck out, and the rest is scaled to one.
//! - *A claim* ("Epoch 3/20") is one atom. It is believed as far as claims from the same source (a bar, the
//!   command, …) came true in earlier runs of the program and in other programs of the owner ([`trust`]).
//! - *History*: earlier runs of the same program, each spread a little.
//! - *Epochs*: a job that says where in an epoch it is makes a whole number of them. [`EPOCHS`]
//!   has the numbers that public training scripts use.
//! - *Curve*: people stop when the curve has become flat, or some time after. So the time scale of
//!   the fall is about [`TYPICAL_SCALE`] of the whole; read the other way round, the whole is
//!   log-normal around the fitted scale divided by that, the wider the less the points tell of the
//!   scale. Epochs are weighted by the same law.
//! - *Age*: whatever the others say, a job may last for some multiple of its age.
//!
//! **Terms.** Positions are steps, or reports of a job that counts no steps. The *Gittins effort*
//! is the least, over all amounts of service Δ, of the expected service within Δ divided by the
//! chance to end within Δ: serving the job with the least effort first minimises the mean
//! completion time where only distributions are known (J. Gittins, 1979). For a job whose length is
//! known it is the work left.

use super::predict::TYPICAL_SCALE;
use super::speed::Interval;
use super::{ClaimRecord, FinishedRun, Signal};

/// Numbers of epochs, and how many of 95 public training scripts have each as their default. The
/// scripts were the first ten hits each of ten spellings of the option (`--epochs`,
/// `--num_epochs`, `--n_epochs`, `--max_epochs`, `num_train_epochs`, …) in an index of public
/// repositories.
const EPOCHS: [(f64, f64); 27] = [
    (1.0, 4.0),
    (2.0, 3.0),
    (3.0, 5.0),
    (4.0, 1.0),
    (5.0, 3.0),
    (10.0, 13.0),
    (15.0, 2.0),
    (20.0, 4.0),
    (25.0, 1.0),
    (30.0, 3.0),
    (32.0, 1.0),
    (40.0, 2.0),
    (50.0, 11.0),
    (60.0, 1.0),
    (65.0, 1.0),
    (80.0, 1.0),
    (100.0, 14.0),
    (150.0, 3.0),
    (200.0, 4.0),
    (250.0, 1.0),
    (300.0, 4.0),
    (450.0, 1.0),
    (500.0, 3.0),
    (1000.0, 4.0),
    (1500.0, 2.0),
    (2000.0, 2.0),
    (10000.0, 1.0),
];

/// Where only the flat point of a curve is known: the whole length as a multiple of the time to that point, and the
/// deviation of its logarithm.
const PAST_FLAT: f64 = 2.0;
const PAST_FLAT_SPREAD: f64 = 0.5;

/// The weight of the curve alone beside the whole numbers of epochs.
const UNEVEN: f64 = 0.15;

/// Weight of one earlier run, relative to all other evidence.
const RUN_WEIGHT: f64 = 4.0;

/// How the length of one run differs from the next of the same program.
const RUN_SPREAD: [(f64, f64); 5] = [(0.9, 0.1), (0.97, 0.2), (1.0, 0.4), (1.03, 0.2), (1.1, 0.1)];

/// Total lengths, as multiples of the job's age; equally likely. Then their weight together.
const AGES: [f64; 6] = [1.1, 1.25, 1.5, 2.0, 3.0, 5.0];
const AGE_WEIGHT: f64 = 0.02;

/// How far guesses at a length are believed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Belief {
    /// How likely the curve makes any length at least, where it makes the likeliest one 1: above 0, the numbers of
    /// epochs that scripts use count also where the curve speaks against them.
    pub least_likelihood: f64,
    /// Larger numbers of epochs are not expected.
    pub most_epochs: f64,
}

impl Belief {
    /// The curve is believed in full, and every number of epochs that was ever seen is possible.
    pub const FULL: Belief = Belief { least_likelihood: 0.0, most_epochs: f64::INFINITY };
}

/// How much is left: pairs of (steps or work, probability), ascending; the probabilities sum to 1.
#[derive(Debug, Clone, PartialEq)]
pub struct Residual {
    atoms: Vec<(f64, f64)>,
}

impl Residual {
    /// Exactly `left`.
    pub fn known(left: f64) -> Residual {
        Residual { atoms: vec![(left.max(0.0), 1.0)] }
    }

    fn of(mut atoms: Vec<(f64, f64)>) -> Option<Residual> {
        let sum: f64 = atoms.iter().map(|a| a.1).sum();
        if !(sum > 0.0 && sum.is_finite()) {
            return None;
        }
        atoms.retain(|a| a.1 > 1e-6 * sum);
        atoms.sort_by(|a, b| a.0.total_cmp(&b.0));
        let sum: f64 = atoms.iter().map(|a| a.1).sum();
        atoms.iter_mut().for_each(|a| a.1 /= sum);
        Some(Residual { atoms })
    }

    /// The same in another unit: `factor` of it make one step, `less` of it are done already.
    pub fn scaled(mut self, factor: f64, less: f64) -> Residual {
        self.atoms.iter_mut().for_each(|a| a.0 = (a.0 * factor - less).max(0.0));
        self
    }

    pub fn mean(&self) -> f64 {
        self.atoms.iter().map(|(left, p)| left * p).sum()
    }

    /// The least amount that is enough with probability `q`.
    pub fn quantile(&self, q: f64) -> f64 {
        let mut sum = 0.0;
        for (left, p) in &self.atoms {
            sum += p;
            if sum >= q - 1e-9 {
                return *left;
            }
        }
        self.atoms.last().map_or(0.0, |a| a.0)
    }

    /// The Gittins effort.
    pub fn effort(&self) -> f64 {
        let (mut chance, mut service, mut least) = (0.0, 0.0, f64::INFINITY);
        for (left, p) in &self.atoms {
            chance += p;
            service += left * p;
            least = least.min((service + left * (1.0 - chance).max(0.0)) / chance);
        }
        least
    }
}

/// The steps left of a job at position `at`; `None` where nothing is known that tells its length. `others` is how
/// claims like its own fared in other programs.
pub fn residual(signal: &Signal, history: &[FinishedRun], others: ClaimRecord, at: f64) -> Option<Residual> {
    residual_by(Belief::FULL, signal, history, others, at)
}

/// The same, where guesses are believed as `belief` says.
pub fn residual_by(
    belief: Belief,
    signal: &Signal,
    history: &[FinishedRun],
    others: ClaimRecord,
    at: f64,
) -> Option<Residual> {
    if at.is_nan() || at < 0.0 {
        return None;
    }
    let mut atoms: Vec<(f64, f64)> = vec![];
    let claim = signal.total.map(|t| t as f64).filter(|t| *t > at);
    let trust = if claim.is_some() { trust(signal, history, others) } else { 0.0 };
    if let Some(total) = claim {
        if trust >= 1.0 {
            return Some(Residual::known(total - at));
        }
        atoms.push((total, trust));
    }
    let runs: Vec<f64> = history.iter().filter_map(|r| r.steps).map(|s| s as f64).filter(|s| *s > 0.0).collect();
    let known = RUN_WEIGHT * runs.len() as f64;
    let by_history = (1.0 - trust) * known / (known + 1.0);
    for steps in &runs {
        let weight = by_history / runs.len() as f64;
        atoms.extend(RUN_SPREAD.iter().map(|(factor, p)| (factor * steps, weight * p)));
    }
    by_curve_and_epochs(belief, signal, (1.0 - trust) - by_history, &mut atoms);
    atoms.retain(|a| a.0 > at);
    if at > 0.0 {
        let weight = AGE_WEIGHT / AGES.len() as f64;
        atoms.extend(AGES.iter().map(|factor| (factor * at, weight)));
    }
    atoms.iter_mut().for_each(|a| a.0 -= at);
    Residual::of(atoms)
}

/// The steps left of a job at position `at` that names no total, with their middle 80 %, from earlier runs of its
/// program alone; `None` where no earlier run counted its steps.
pub fn steps_left_by_history(history: &[FinishedRun], at: f64) -> Option<Interval> {
    history.iter().find(|run| run.steps.is_some_and(|steps| steps > 0))?;
    let left = residual(&Signal::default(), history, ClaimRecord::default(), at)?;
    Some(Interval { mid: left.quantile(0.5), low: left.quantile(0.1), high: left.quantile(0.9) })
}

/// The node-seconds left of a job that has consumed `done` of them and reported nothing yet, from
/// what earlier runs of its program consumed. `core_s` core-seconds make one node-second.
pub fn residual_work(history: &[FinishedRun], core_s: f64, done: f64) -> Option<Residual> {
    let runs = history.iter().map(|r| r.core_s / core_s).filter(|w| *w > 0.0 && w.is_finite());
    let mut atoms: Vec<(f64, f64)> =
        runs.flat_map(|work| RUN_SPREAD.map(|(factor, p)| (factor * work, p))).filter(|a| a.0 > done).collect();
    if atoms.is_empty() {
        return None;
    }
    atoms.extend(AGES.iter().filter(|_| done > 0.0).map(|factor| (factor * done, AGE_WEIGHT / AGES.len() as f64)));
    atoms.iter_mut().for_each(|a| a.0 -= done);
    Residual::of(atoms)
}

/// How far the job's claim is believed, 0 to 1: by how claims from the same source fared, in earlier runs of the same
/// program (`history`) and in other programs of the same owner (`others`). What other programs did counts as much as
/// one run of this one, and a claim is believed before there is anything to go by.
pub fn trust(signal: &Signal, history: &[FinishedRun], others: ClaimRecord) -> f64 {
    let is_alike = |run: &&FinishedRun| match (run.claimed_by, signal.claimed_by) {
        (Some(then), Some(now)) => then == now,
        // Runs of which the source was not recorded count for every source.
        _ => true,
    };
    let mut own = ClaimRecord::default();
    history.iter().filter(is_alike).for_each(|run| own.add(run));
    let believed = |record: ClaimRecord, before: f64| {
        let all = f64::from(record.kept) + f64::from(record.broken);
        (before + f64::from(record.kept)) / (1.0 + all)
    };
    believed(own, believed(others, 1.0))
}

/// Adds the atoms of epochs and curve, together of `weight`.
fn by_curve_and_epochs(belief: Belief, signal: &Signal, weight: f64, atoms: &mut Vec<(f64, f64)>) {
    let epoch = signal.epoch_steps.map(|s| s as f64);
    let center = signal.outlook.and_then(|o| {
        let (center, spread) = match o.scale > 0.0 {
            true => (o.scale / TYPICAL_SCALE, o.scale_spread),
            false => (PAST_FLAT * o.flat_at, PAST_FLAT_SPREAD),
        };
        (center > 0.0 && center.is_finite()).then_some((center, spread.clamp(0.0, 3.0)))
    });
    let likely = |total: f64| {
        let Some((center, spread)) = center else { return 1.0 };
        let z2 = (total / center).ln().powi(2) / (1.0 + spread * spread);
        belief.least_likelihood + (1.0 - belief.least_likelihood) * (-0.5 * z2).exp()
    };
    let epochs = EPOCHS.iter().filter(|(n, _)| *n <= belief.most_epochs);
    let mut add = |part: f64, totals: &mut dyn Iterator<Item = (f64, f64)>| {
        let drawn: Vec<(f64, f64)> = totals.map(|(total, count)| (total, count * likely(total))).collect();
        let sum: f64 = drawn.iter().map(|a| a.1).sum();
        if sum > 0.0 {
            atoms.extend(drawn.into_iter().map(|(total, w)| (total, part * w / sum)));
        }
    };
    match (epoch, center) {
        (Some(epoch), center) => {
            let even = if center.is_some() { 1.0 - UNEVEN } else { 1.0 };
            add(weight * even, &mut epochs.map(|(n, count)| (n * epoch, *count)));
            if let Some((center, _)) = center {
                add(weight * UNEVEN, &mut grid(center));
            }
        }
        (None, Some((center, _))) => add(weight, &mut grid(center)),
        (None, None) => {}
    }
}

/// Totals around a middle one, a quarter apart.
fn grid(center: f64) -> impl Iterator<Item = (f64, f64)> {
    (-9..=9).map(move |i| (center * 1.25f64.powi(i), 1.0))
}

#[cfg(test)]
mod tests {
    use super::super::{ClaimSource, Outlook};
    use super::*;

    /// A curve whose run would be `whole` steps if it were typical.
    fn signal(whole: f64, epoch_steps: Option<u64>, total: Option<u64>) -> Signal {
        let outlook =
            Outlook { at: 1.0, flat_at: whole, gain_left: 0.5, scale: TYPICAL_SCALE * whole, scale_spread: 0.1 };
        Signal { reports: 5, step: Some(5), total, epoch_steps, outlook: Some(outlook), ..Signal::default() }
    }

    const NONE: ClaimRecord = ClaimRecord { kept: 0, broken: 0 };

    #[test]
    fn a_claim_is_believed_until_it_is_passed() {
        let announced = signal(40.0, None, Some(50));
        assert_eq!(residual(&announced, &[], NONE, 30.0), Some(Residual::known(20.0)));
        let past = residual(&announced, &[], NONE, 55.0).expect("it is still running");
        assert!(past.mean() > 1.0, "{past:?}");
    }

    #[test]
    fn steps_left_follow_from_earlier_runs_alone() {
        let run = |steps| FinishedRun { steps: Some(steps), claimed: None, claimed_by: None, core_s: 1.0 };
        let left = steps_left_by_history(&[run(100), run(100)], 40.0).expect("earlier runs counted their steps");
        assert!((left.mid - 60.0).abs() < 1.0 && left.low < 60.0 && left.high > 60.0, "{left:?}");
        // Runs of different lengths make a wide interval.
        let wide = steps_left_by_history(&[run(100), run(200)], 0.0).expect("earlier runs counted their steps");
        assert!(wide.low <= 100.0 && wide.high >= 200.0, "{wide:?}");
        // A job that has passed them all goes on for a part of its age.
        let passed = steps_left_by_history(&[run(100)], 150.0).expect("it still runs");
        assert!(passed.low > 0.0 && passed.high < 1000.0, "{passed:?}");
        let silent = FinishedRun { steps: None, ..run(1) };
        assert_eq!((steps_left_by_history(&[], 1.0), steps_left_by_history(&[silent], 1.0)), (None, None));
    }

    #[test]
    fn a_program_that_claimed_wrongly_is_believed_less() {
        let run = |steps| FinishedRun { steps: Some(steps), claimed: Some(50), claimed_by: None, core_s: 1.0 };
        let announced = signal(40.0, None, Some(50));
        let honest = residual(&announced, &[run(50), run(49)], NONE, 10.0).expect("known").mean();
        let liar = residual(&announced, &[run(200), run(200)], NONE, 10.0).expect("known").mean();
        assert!((honest - 40.0).abs() < 1e-9 && liar > 100.0, "{honest} and {liar}");
    }

    #[test]
    fn a_source_is_believed_by_how_its_claims_fared() {
        use ClaimSource::{Bar, Command};
        let run = |steps, by| FinishedRun { steps: Some(steps), claimed: Some(50), claimed_by: Some(by), core_s: 1.0 };
        let claim = |by| Signal { claimed_by: Some(by), ..signal(40.0, None, Some(50)) };
        // The bars of this program counted one of four epochs, what its command says came true.
        let history = [run(200, Bar), run(50, Command), run(200, Bar)];
        assert_eq!(trust(&claim(Command), &history, NONE), 1.0);
        assert_eq!(trust(&claim(Bar), &history, NONE), 1.0 / 3.0);
        assert_eq!(residual(&claim(Command), &history, NONE, 10.0), Some(Residual::known(40.0)));
        // A program that never ran is judged by the other programs of its owner, until it has a record of its own.
        let others = ClaimRecord { kept: 1, broken: 8 };
        let new = trust(&claim(Bar), &[], others);
        assert_eq!(new, 0.2);
        let kept = [run(50, Bar), run(50, Bar), run(51, Bar)];
        assert!(trust(&claim(Bar), &kept, others) > 0.79 && trust(&claim(Bar), &kept[..1], others) > new);
        let doubted = residual(&claim(Bar), &[], others, 10.0).expect("its curve tells something");
        assert!(doubted.quantile(0.1) < 40.0, "{doubted:?}");
        // Where the source is not known, all runs count.
        let unknown = Signal { claimed_by: None, ..claim(Bar) };
        assert_eq!(trust(&unknown, &history, NONE), 0.5);
    }

    #[test]
    fn history_tells_more_than_the_curve() {
        let run = FinishedRun { steps: Some(200), claimed: None, claimed_by: None, core_s: 1.0 };
        let (without, with) = (
            residual(&signal(40.0, None, None), &[], NONE, 10.0),
            residual(&signal(40.0, None, None), &[run], NONE, 10.0),
        );
        let (without, with) = (without.expect("known"), with.expect("known"));
        assert!(without.quantile(0.5) < 80.0 && (with.quantile(0.5) - 190.0).abs() < 10.0, "{without:?} {with:?}");
    }

    #[test]
    fn a_job_ends_after_a_whole_number_of_epochs() {
        // A curve as of ten epochs of 100 steps each.
        let found = residual(&signal(1000.0, Some(100), None), &[], NONE, 300.0).expect("known");
        assert_eq!(found.quantile(0.5), 700.0);
        // Past ten, fifteen come next.
        let later = residual(&signal(1000.0, Some(100), None), &[], NONE, 1001.0).expect("known");
        assert!(later.quantile(0.5) >= 400.0, "{later:?}");
    }

    #[test]
    fn a_curve_that_is_believed_less_leaves_other_numbers_of_epochs_possible() {
        // A curve as of a run of two epochs, in a job that has made one.
        let job = signal(200.0, Some(100), None);
        let left = |belief| residual_by(belief, &job, &[], NONE, 100.0).expect("known");
        let doubtful = Belief { least_likelihood: 0.02, ..Belief::FULL };
        let (full, doubted) = (left(Belief::FULL), left(doubtful));
        assert_eq!(full, residual(&job, &[], NONE, 100.0).expect("known"));
        assert!(full.quantile(0.99) < 5000.0 && doubted.quantile(0.99) > 10_000.0, "{full:?} and {doubted:?}");
        assert!(doubted.mean() > 3.0 * full.mean(), "{} and {}", doubted.mean(), full.mean());
        // No more than 50 epochs are expected.
        let few = left(Belief { most_epochs: 50.0, ..doubtful });
        assert!(few.quantile(1.0) == 4900.0 && few.mean() < doubted.mean(), "{few:?}");
    }

    #[test]
    fn the_effort_is_the_work_left_where_it_is_known_and_less_than_the_mean_elsewhere() {
        assert_eq!(Residual::known(7.0).effort(), 7.0);
        // Half end after 1, half after 9: serving it for 1 costs 1 and ends it in one of two cases.
        let half = Residual::of(vec![(1.0, 1.0), (9.0, 1.0)]).expect("sound");
        assert_eq!((half.effort(), half.mean(), half.quantile(0.4), half.quantile(0.6)), (2.0, 5.0, 1.0, 9.0));
    }
}
