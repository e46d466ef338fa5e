//! Variational auto-encoder of drawn digits.
//!
//! One hidden layer on each side and a small latent space, as in the well-known examples of the large frameworks. The loss
//! is the negative evidence lower bound: pixel cross-entropy plus the divergence of the latent code from a standard normal.

use candle_core::{Result, Tensor};

use super::{Batch, Model, Pictures, Pool, Score, tensor};
use crate::glyphs::PIXELS;
use crate::nn::{Dense, Params, pixel_cross_entropy};
use crate::rng::Rng;

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
    pub(crate) fn new(params: &mut Params, hidden: usize, seed: u64) -> Result<Self> {
        Ok(Vae {
            pictures: Pictures::new(seed, 0.0),
            encode: Dense::new(params, "encode", PIXELS, hidden)?,
            mean: Dense::new(params, "mean", hidden, LATENT)?,
            log_variance: Dense::new(params, "log_variance", hidden, LATENT)?,
            widen: Dense::new(params, "widen", LATENT, hidden)?,
            decode: Dense::new(params, "decode", hidden, PIXELS)?,
        })
    }
}

impl Model for Vae {
    /// The second input is the noise of the latent code, so that scoring itself draws nothing.
    fn batch(&self, pool: Pool, size: usize, rng: &mut Rng) -> Result<Batch> {
        let (pixels, _) = self.pictures.draw(pool, size, rng);
        let noise: Vec<f32> = (0..size * LATENT).map(|_| rng.normal()).collect();
        let pictures = tensor(pixels, &[size, PIXELS])?;
        Ok(Batch { inputs: vec![pictures.clone(), tensor(noise, &[size, LATENT])?], targets: pictures })
    }

    fn score(&self, batch: &Batch) -> Result<Score> {
        let hidden = self.encode.forward(&batch.inputs[0])?.relu()?;
        let mean = self.mean.forward(&hidden)?;
        let log_variance = self.log_variance.forward(&hidden)?;
        let code = (&mean + (log_variance.affine(0.5, 0.0)?.exp()? * &batch.inputs[1])?)?;
        let logits = self.decode.forward(&self.widen.forward(&code)?.relu()?)?;
        let divergence = self.divergence(&mean, &log_variance)?;
        Ok(Score { loss: (pixel_cross_entropy(&logits, &batch.targets)? + divergence)?, accuracy: None })
    }
}

impl Vae {
    /// Kullback–Leibler divergence from the standard normal, in nats per picture.
    fn divergence(&self, mean: &Tensor, log_variance: &Tensor) -> Result<Tensor> {
        let inner = (log_variance.affine(1.0, 1.0)? - mean.sqr()? - log_variance.exp()?)?;
        inner.sum_all()? * (-0.5 / mean.dim(0)? as f64)
    }
}
