//! Numbers for seeded simulations: everything that a run chooses follows from its seed.
//!
//! Only tests compile this module (feature `fixtures`). Decisions never use it.

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

    /// True in so many cases of a hundred.
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
    fn lists_have_comments() {
        assert_eq!(parse_list("# kept\n12 # a torn header\n\n7\n"), [12, 7]);
    }
}
