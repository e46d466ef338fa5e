//! One stream of random numbers for each purpose.
//!
//! **Problem.** With a single generator, adding one job shifts every number that is drawn after it, and two
//! policies could not be compared on the same world.
//!
//! **Approach.** A stream is named by (seed, entity, purpose). The name is mixed into the state of a PCG
//! generator, so that streams of different names share nothing. The transforms are our own, so that a new
//! version of a library cannot change them.

use rand_core::Rng;
use rand_pcg::Pcg64;

/// Random numbers for one purpose of one entity.
#[derive(Debug, Clone)]
pub struct Stream {
    generator: Pcg64,
}

impl Stream {
    pub fn new(seed: u64, entity: u64, purpose: &str) -> Stream {
        let mut mixed = mix(seed ^ 0x6761_696e_7368_6172);
        mixed = mix(mixed ^ entity.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        for byte in purpose.bytes() {
            mixed = mix(mixed ^ u64::from(byte));
        }
        let state = (u128::from(mixed) << 64) | u128::from(mix(mixed.wrapping_add(1)));
        let stream = (u128::from(mix(mixed.wrapping_add(2))) << 64) | u128::from(mix(mixed.wrapping_add(3)));
        Stream { generator: Pcg64::new(state, stream) }
    }

    /// Uniform in 0…1, without 1.
    pub fn unit(&mut self) -> f64 {
        (self.generator.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    pub fn uniform(&mut self, from: f64, to: f64) -> f64 {
        from + (to - from) * self.unit()
    }

    /// A whole number below `n`; zero if there is none.
    pub fn below(&mut self, n: usize) -> usize {
        ((self.unit() * n as f64) as usize).min(n.saturating_sub(1))
    }

    /// Normal with mean 0 and deviation 1 (Box and Muller; the second number is thrown away to keep the
    /// stream simple).
    pub fn normal(&mut self) -> f64 {
        let (u, v) = (1.0 - self.unit(), self.unit());
        (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
    }

    /// Exponential with mean 1.
    pub fn exponential(&mut self) -> f64 {
        -(1.0 - self.unit()).ln()
    }
}

/// The finaliser of SplitMix64: every bit of the input reaches every bit of the output.
fn mix(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_name_gives_the_same_numbers_and_another_name_others() {
        let draw = |seed, entity, purpose| Stream::new(seed, entity, purpose).unit();
        assert_eq!(draw(1, 2, "noise"), draw(1, 2, "noise"));
        let others = [draw(2, 2, "noise"), draw(1, 3, "noise"), draw(1, 2, "start"), draw(2, 1, "noise")];
        assert!(others.iter().all(|x| *x != draw(1, 2, "noise")));
    }

    #[test]
    fn moments_are_right() {
        let mut s = Stream::new(7, 0, "test");
        let n = 20_000;
        let normal: Vec<f64> = (0..n).map(|_| s.normal()).collect();
        let mean = normal.iter().sum::<f64>() / n as f64;
        let variance = normal.iter().map(|x| x * x).sum::<f64>() / n as f64;
        assert!(mean.abs() < 0.03 && (variance - 1.0).abs() < 0.05, "{mean} {variance}");
        let exponential = (0..n).map(|_| s.exponential()).sum::<f64>() / n as f64;
        assert!((exponential - 1.0).abs() < 0.03, "{exponential}");
        assert!((0..n).all(|_| s.below(3) < 3));
    }
}
