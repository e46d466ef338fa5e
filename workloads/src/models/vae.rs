//! Variational auto-encoder of drawn digits.
//!
//! The encoder and the decoder have one hidden layer each, and the latent code is small, as in the well-known
//! examples of the large frameworks. The loss is the negative evidence lower bound: the cross-entropy of the
//! pixels plus the divergence of the latent code from a standard normal distribution.

use super::{Batch, Model, Pictures, Pool, Score};
use crate::glyphs::PIXELS;
use crate::nn::{Dense, Params};
use crate::rng::Rng;
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;

/// Numbers of a latent code.
const LATENT: usize = 16;

pub(crate) struct Vae {
    pictures: Pictures,
    encode: Dense,
    mean: Dense,
    log_variance: Dense,
    widen: Dense,
    decode: Dense,
}

impl Vae {
    pub(crate) fn new(params: &mut Params, hidden: usize, seed: u64) -> Self {
        Vae {
            pictures: Pictures::new(seed, 0.0),
            encode: Dense::new(params, "encode", PIXELS, hidden),
            mean: Dense::new(params, "mean", hidden, LATENT),
            log_variance: Dense::new(params, "log_variance", hidden, LATENT),
            widen: Dense::new(params, "widen", LATENT, hidden),
            decode: Dense::new(params, "decode", hidden, PIXELS),
        }
    }
}

impl Model for Vae {
    /// The input is the noise of the latent code, so that scoring draws no random numbers; the targets are the
    /// pictures.
    fn batch(&self, pool: Pool, size: usize, rng: &mut Rng) -> Batch {
        let (pictures, _) = self.pictures.draw(pool, size, rng);
        let noise = (0..size * LATENT).map(|_| rng.normal()).collect();
        Batch { inputs: vec![Tensor::new(size, LATENT, noise)], targets: pictures }
    }

    fn score<'a>(&self, tape: &mut Tape<'a>, batch: &'a Batch) -> Score {
        let pictures = tape.data(&batch.targets);
        let noise = tape.data(&batch.inputs[0]);
        let hidden = self.encode.forward(tape, pictures);
        let hidden = tape.relu(hidden);
        let mean = self.mean.forward(tape, hidden);
        let log_variance = self.log_variance.forward(tape, hidden);

        // The code is mean + e^(log_variance / 2) · noise.
        let log_deviation = tape.affine(log_variance, 0.5, 0.0);
        let deviation = tape.exp(log_deviation);
        let scatter = tape.multiply(deviation, noise);
        let code = tape.add(mean, scatter);

        let hidden = self.widen.forward(tape, code);
        let hidden = tape.relu(hidden);
        let logits = self.decode.forward(tape, hidden);
        let reconstruction = tape.binary_cross_entropy(logits, pictures);
        let divergence = divergence(tape, mean, log_variance);
        Score { loss: tape.add(reconstruction, divergence), accuracy: None }
    }
}

/// Kullback–Leibler divergence from the standard normal distribution, in nats per picture:
/// −½ Σ (1 + log_variance − mean² − e^log_variance).
fn divergence(tape: &mut Tape<'_>, mean: Var, log_variance: Var) -> Var {
    let pictures = tape.value(mean).rows();
    let one_plus = tape.affine(log_variance, 1.0, 1.0);
    let mean_square = tape.multiply(mean, mean);
    let variance = tape.exp(log_variance);
    let terms = tape.subtract(one_plus, mean_square);
    let terms = tape.subtract(terms, variance);
    let sum = tape.sum(terms);
    tape.affine(sum, -0.5 / pictures as f32, 0.0)
}
