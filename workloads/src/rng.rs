//! Random numbers without a state to save.
//!
//! A run that was resumed from a checkpoint must draw the same numbers as a run without an interruption. One
//! long stream would have an inner state that must be saved. Instead, every purpose and every step has a short
//! stream of its own, derived from `(seed, purpose, index)`. The step number is then the only random state, and
//! one more number for one purpose changes the numbers of no other purpose.
//!
//! The generator is SplitMix64: 64 bits of state, equidistributed, and of far better quality than training data need.

/// A short stream of random numbers.
#[derive(Debug, Clone)]
pub(crate) struct Rng {
    state: u64,
}

impl Rng {
    /// The stream of one purpose (`"batch"`, `"init enc.w"`) and one index (a step number).
    pub(crate) fn stream(seed: u64, purpose: &str, index: u64) -> Self {
        // FNV-1a turns the purpose into a number; two rounds of mixing keep neighbouring seeds and indices apart.
        let tag =
            purpose.bytes().fold(0xcbf2_9ce4_8422_2325, |h: u64, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
        let mut rng = Rng { state: seed ^ tag };
        let mixed = rng.next_u64() ^ index.wrapping_mul(0xd1b5_4a32_d192_ed03);
        Rng { state: mixed }
    }

    pub(crate) fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `[0, 1)`, with the 24 bits an `f32` can hold.
    pub(crate) fn unit(&mut self) -> f32 {
        (self.next_u64() >> 40) as f32 / (1u32 << 24) as f32
    }

    /// Uniform in `[low, high)`.
    pub(crate) fn between(&mut self, low: f32, high: f32) -> f32 {
        low + (high - low) * self.unit()
    }

    /// Uniform in `0..n`; `n` must not be zero. The bias of the modulus is below 2⁻⁴⁰ for the sizes used here.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next_u64() % n as u64) as usize
    }

    /// Standard normal, by the transform of Box and Muller. Its second value is dropped, so that none is left
    /// for later.
    pub(crate) fn normal(&mut self) -> f32 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (std::f32::consts::TAU * self.unit()).cos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_repeat_and_differ() {
        let draw = |seed, purpose, index| Rng::stream(seed, purpose, index).next_u64();
        assert_eq!(draw(1, "batch", 7), draw(1, "batch", 7));
        let mut all = vec![draw(1, "batch", 7), draw(2, "batch", 7), draw(1, "batch", 8), draw(1, "init", 7)];
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 4, "seed, purpose and index must each matter");
    }

    #[test]
    fn moments_are_those_of_the_distribution() {
        let mut rng = Rng::stream(3, "moments", 0);
        let n = 20_000;
        let normals: Vec<f64> = (0..n).map(|_| f64::from(rng.normal())).collect();
        let mean = normals.iter().sum::<f64>() / f64::from(n);
        let variance = normals.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / f64::from(n);
        assert!(mean.abs() < 0.03, "mean {mean}");
        assert!((variance - 1.0).abs() < 0.05, "variance {variance}");
        let mean = (0..n).map(|_| f64::from(rng.between(2.0, 4.0))).sum::<f64>() / f64::from(n);
        assert!((mean - 3.0).abs() < 0.03, "mean {mean}");
    }
}
