//! Deterministic fault simulation of one machine.
//!
//! **Problem.** A crash between any two instructions, a torn write or a stopped daemon must lose nothing. Tests
//! that kill real processes reach few of these moments, and a failure seldom happens twice.
//!
//! **How.** The real journal, decisions, lease and guard rules run on a modelled disk ([`disk`]) and a modelled
//! machine ([`machine`]). One seed fixes the order of all steps and all faults. After every step one checker
//! ([`gainshare_core::invariants`]) checks I1 to I5.
//!
//! **Use.** `cargo xtask faultsim --seeds 10000`. A failure prints its seed. `GAINSHARE_FAULT_SEED=N` replays one
//! seed, `GAINSHARE_FAULT_SEEDS=N` sets how many run, and `GAINSHARE_FAULT_REPORTS=FOLDER` writes a summary as JSON.
//! Seeds that found a defect are kept in `seeds.txt` and run first.

mod disk;
mod machine;
mod parts;

use gainshare_core::seeds::{Campaign, first_failure};
use machine::Machine;
use parts::Safeguard;

const CAMPAIGN: Campaign = Campaign {
    part: "machine",
    package: "gainshare-daemon",
    test: "faultsim::every_seed_holds_the_invariants",
    kept: include_str!("seeds.txt"),
    kept_in: "crates/daemon/src/faultsim/seeds.txt",
    few: 500,
};
const STEPS: usize = 120;

/// Runs one seed. Answers how many crashes were injected, or what failed.
fn run_seed(seed: u64, off: Option<Safeguard>) -> Result<u64, String> {
    let mut machine = Machine::new(seed, off);
    machine.run(STEPS).map_err(|failure| failure.to_string())?;
    Ok(machine.crashes)
}

#[test]
fn every_seed_holds_the_invariants() {
    CAMPAIGN.must_hold(|name| std::env::var(name).ok(), |seed| run_seed(seed, None));
}

/// A seed is worth keeping only if it does the same every time.
#[test]
fn a_seed_does_the_same_every_time() {
    let (seed, failure) = first_failure(Safeguard::Sync, |seed| run_seed(seed, Some(Safeguard::Sync)));
    assert_eq!(run_seed(seed, Some(Safeguard::Sync)), Err(failure));
    assert_eq!(run_seed(seed, None), run_seed(seed, None));
}

/// The simulation would find a defect: with a check turned off, some of 200 seeds fail.
#[test]
fn a_missing_check_is_found_within_200_seeds() {
    for (safeguard, expected) in [
        (Safeguard::Sync, ""),
        (Safeguard::Lapse, "after the guard had put its limits back"),
        (Safeguard::Lock, "I1"),
        (Safeguard::Intent, "I4"),
    ] {
        let (_, found) = first_failure(safeguard, |seed| run_seed(seed, Some(safeguard)));
        assert!(found.contains(expected), "{safeguard:?}: {found}");
    }
}
