//! Numbers for seeded simulations: everything that a run chooses follows from its seed.
//!
//! [`Dice`] draws the numbers, and a [`Campaign`] runs many seeds and says how a failing one is
//! replayed. Only tests compile this module (feature `fixtures`). Decisions never use it.

use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};

/// A small generator of pseudorandom numbers (SplitMix64). The same seed gives the same numbers on
/// every machine and in every version of this program, so that a failing seed can be kept.
#[derive(Debug, Clone)]
pub struct Dice(u64);

impl Dice {
    /// One stream for each purpose, so that a new choice in one part does not shift the others.
    pub fn new(seed: u64, purpose: &str) -> Dice {
        let purpose = purpose
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
        Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ purpose)
    }

    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number from 0 to `count - 1`; 0 if `count` is 0.
    pub fn below(&mut self, count: usize) -> usize {
        (self.number() % count.max(1) as u64) as usize
    }

    /// True in `chance` cases of a hundred.
    pub fn percent(&mut self, chance: u64) -> bool {
        self.number() % 100 < chance
    }

    /// One of the items, each with its weight.
    ///
    /// # Panics
    /// If no item has a weight.
    pub fn weighted<T: Copy>(&mut self, items: &[(u64, T)]) -> T {
        let sum: u64 = items.iter().map(|(weight, _)| weight).sum();
        let mut at = self.number() % sum;
        for (weight, item) in items {
            if at < *weight {
                return *item;
            }
            at -= weight;
        }
        unreachable!("the weights sum to more than the number")
    }
}

/// One part of the fault simulation: what it is called, and where its failing seeds are kept.
#[derive(Debug, Clone, Copy)]
pub struct Campaign {
    pub part: &'static str,
    pub package: &'static str,
    /// The path of the test in its crate.
    pub test: &'static str,
    /// The committed list of seeds that once failed, and its file.
    pub kept: &'static str,
    pub kept_in: &'static str,
    /// How many seeds the test command runs.
    pub few: u64,
}

/// What the seeds of a campaign found.
#[derive(Debug)]
pub struct CampaignReport {
    /// One object of JSON: `part`, `seeds`, `injected` (faults), `violations`.
    pub json: String,
    /// How many faults all seeds injected.
    pub injected: u64,
    /// The seeds that failed, without those of the committed list.
    pub new_seeds: Vec<u64>,
    /// For each failing seed what failed, and how to replay it.
    pub failures: Vec<String>,
}

impl Campaign {
    /// Runs the kept seeds first and then `0..N`, on two threads. `setting` reads a variable of the environment:
    /// `GAINSHARE_FAULT_SEED` runs one seed, `GAINSHARE_FAULT_SEEDS` sets `N`. `run` answers how many faults a
    /// seed has injected, or what failed.
    ///
    /// # Panics
    /// If a run panics.
    pub fn run(
        &self,
        setting: impl Fn(&str) -> Option<String>,
        run: impl Fn(u64) -> Result<u64, String> + Sync,
    ) -> CampaignReport {
        let number = |name| setting(name).and_then(|text| text.parse::<u64>().ok());
        let seeds: Vec<u64> = match number("GAINSHARE_FAULT_SEED") {
            Some(seed) => vec![seed],
            None => {
                let count = number("GAINSHARE_FAULT_SEEDS").unwrap_or(self.few);
                parse_list(self.kept).into_iter().chain(0..count).collect()
            }
        };
        let (next, injected) = (AtomicU64::new(0), AtomicU64::new(0));
        let mut failed: Vec<(u64, String)> = std::thread::scope(|scope| {
            let work = || {
                let mut failed = Vec::new();
                while let Some(seed) = seeds.get(next.fetch_add(1, Ordering::Relaxed) as usize) {
                    match run(*seed) {
                        Ok(count) => drop(injected.fetch_add(count, Ordering::Relaxed)),
                        Err(failure) => failed.push((*seed, failure)),
                    }
                }
                failed
            };
            let workers = [scope.spawn(work), scope.spawn(work)];
            workers.into_iter().flat_map(|worker| worker.join().expect("a run panicked")).collect()
        });
        // The threads end in any order.
        failed.sort();
        let injected = injected.load(Ordering::Relaxed);
        let json = format!(
            r#"{{"part": "{}", "seeds": {}, "injected": {injected}, "violations": {}}}"#,
            self.part,
            seeds.len(),
            failed.len(),
        );
        let kept = parse_list(self.kept);
        let new_seeds = failed.iter().map(|(seed, _)| *seed).filter(|seed| !kept.contains(seed)).collect();
        let failures = failed.iter().map(|(seed, failure)| self.failure_text(*seed, failure)).collect();
        CampaignReport { json, injected, new_seeds, failures }
    }

    /// [`Campaign::run`] as a test: every seed must hold. Writes the report into the folder that
    /// `GAINSHARE_FAULT_REPORTS` names, if it names one, and adds seeds that fail to the list of kept seeds in the
    /// checkout that `GAINSHARE_FAULT_KEEP` names.
    ///
    /// # Panics
    /// If a seed fails, with all failures and how to replay them, or if a file cannot be written.
    pub fn must_hold(&self, setting: impl Fn(&str) -> Option<String>, run: impl Fn(u64) -> Result<u64, String> + Sync) {
        let report = self.run(&setting, run);
        if let Some(folder) = setting("GAINSHARE_FAULT_REPORTS") {
            std::fs::write(format!("{folder}/{}.json", self.part), &report.json).expect("the report can be written");
        }
        if let Some(checkout) = setting("GAINSHARE_FAULT_KEEP") {
            append_seeds(&format!("{checkout}/{}", self.kept_in), &report.new_seeds).expect("the seeds can be kept");
        }
        println!("fault: injected={} violations={}", report.injected, report.failures.len());
        assert!(report.failures.is_empty(), "{} seeds failed:\n{}", report.failures.len(), report.failures.join("\n"));
    }

    fn failure_text(&self, seed: u64, failure: &str) -> String {
        let Campaign { package, test, kept_in, .. } = self;
        format!(
            "seed {seed}: {failure}\n  replay: GAINSHARE_FAULT_SEED={seed} cargo test --release -p {package} --lib \
             {test}\n  keep: `cargo xtask faultsim` adds the seed to {kept_in}"
        )
    }
}

/// Adds seeds to a list, one a line. A list without new seeds is not touched.
fn append_seeds(path: &str, seeds: &[u64]) -> std::io::Result<()> {
    if seeds.is_empty() {
        return Ok(());
    }
    let lines: String = seeds.iter().map(|seed| format!("{seed} # failed, not yet examined\n")).collect();
    std::fs::OpenOptions::new().append(true).open(path)?.write_all(lines.as_bytes())
}

/// The first failure among 200 seeds, for tests that turn a check off: a simulation that notices nothing then would
/// find no defect either.
///
/// # Panics
/// If no seed fails.
pub fn first_failure(off: impl std::fmt::Debug, run: impl Fn(u64) -> Result<u64, String>) -> (u64, String) {
    let found = (0..200).find_map(|seed| Some((seed, run(seed).err()?)));
    found.unwrap_or_else(|| panic!("{off:?} is off, and 200 seeds notice nothing"))
}

/// The seeds of a committed list: one number a line, with a comment after `#`.
///
/// # Panics
/// If a line holds something else.
pub fn parse_list(text: &str) -> Vec<u64> {
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
    lines.filter(|line| !line.is_empty()).map(|line| line.parse().expect("a line holds one seed")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_numbers_and_purposes_differ() {
        let numbers = |seed, purpose| {
            let mut dice = Dice::new(seed, purpose);
            [dice.number(), dice.number(), dice.number()]
        };
        assert_eq!(numbers(7, "disk"), numbers(7, "disk"));
        assert_ne!(numbers(7, "disk"), numbers(8, "disk"));
        assert_ne!(numbers(7, "disk"), numbers(7, "net"));
        let mut dice = Dice::new(1, "x");
        let drawn: Vec<u8> = (0..300).map(|_| dice.weighted(&[(1, 1), (0, 2), (2, 3)])).collect();
        assert!(drawn.contains(&1) && drawn.contains(&3) && !drawn.contains(&2));
        assert!((0..300).all(|_| dice.below(3) < 3));
    }

    #[test]
    fn a_campaign_runs_kept_seeds_first_and_says_how_to_replay() {
        let campaign =
            Campaign { part: "p", package: "gainshare-x", test: "t", kept: "9 # old\n", kept_in: "seeds.txt", few: 3 };
        let run = |seed| if seed == 9 { Err("broken".to_owned()) } else { Ok(2) };
        let report = campaign.run(|_| None, run);
        assert_eq!(report.json, r#"{"part": "p", "seeds": 4, "injected": 6, "violations": 1}"#);
        assert!(report.failures[0].contains("GAINSHARE_FAULT_SEED=9 cargo test"), "{:?}", report.failures);
        let one = campaign.run(|name| (name == "GAINSHARE_FAULT_SEED").then(|| "5".to_owned()), run);
        assert_eq!(one.json, r#"{"part": "p", "seeds": 1, "injected": 2, "violations": 0}"#);
        let two = campaign.run(|name| (name == "GAINSHARE_FAULT_SEEDS").then(|| "1".to_owned()), run);
        assert!(two.json.contains(r#""seeds": 2"#), "the kept one, and one more");
    }

    #[test]
    fn a_failing_seed_fails_the_test_and_the_report_is_written() {
        let folder = std::env::temp_dir().join(format!("gainshare-seeds-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let campaign = Campaign { part: "p", package: "x", test: "t", kept: "", kept_in: "seeds.txt", few: 2 };
        let setting = |name: &str| (name == "GAINSHARE_FAULT_REPORTS").then(|| folder.to_str().unwrap().to_owned());
        campaign.must_hold(setting, |_| Ok(1));
        let is_written = folder.join("p.json").exists();
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(is_written);
        let failed = std::panic::catch_unwind(|| campaign.must_hold(|_| None, |_| Err("broken".to_owned())));
        assert!(failed.is_err());
        assert_eq!(first_failure("x", |seed| if seed == 7 { Err("found".to_owned()) } else { Ok(0) }).0, 7);
    }

    #[test]
    fn new_failing_seeds_are_added_to_the_list() {
        let folder = std::env::temp_dir().join(format!("gainshare-kept-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let list = folder.join("seeds.txt");
        std::fs::write(&list, "1 # old\n").unwrap();
        let campaign = Campaign { part: "p", package: "x", test: "t", kept: "1 # old", kept_in: "seeds.txt", few: 4 };
        let setting = |name: &str| (name == "GAINSHARE_FAULT_KEEP").then(|| folder.to_str().unwrap().to_owned());
        let fails = |bad: &'static [u64]| {
            let run = |seed| if bad.contains(&seed) { Err("broken".to_owned()) } else { Ok(0) };
            std::panic::catch_unwind(|| campaign.must_hold(setting, run)).is_err()
        };
        let has_failed = [fails(&[1, 2, 3]), fails(&[])];
        let kept = String::from_utf8(std::fs::read(&list).unwrap()).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(has_failed, [true, false]);
        assert_eq!(kept, "1 # old\n2 # failed, not yet examined\n3 # failed, not yet examined\n");
        assert_eq!(parse_list(&kept), [1, 2, 3]);
    }

    #[test]
    fn lists_have_comments() {
        assert_eq!(parse_list("# kept\n12 # a torn header\n\n7\n"), [12, 7]);
    }
}
