//! MNIST-style classifier: two hidden layers over the pixels of a noisy drawn digit.

use candle_core::Result;

use super::{Batch, Model, Pictures, Pool, Score, tensor};
use crate::glyphs::{CLASSES, PIXELS};
use crate::nn::{Dense, Params, accuracy, cross_entropy};
use crate::rng::Rng;

/// Strong enough that the classifier keeps making mistakes, and the loss flattens above zero.
const PIXEL_NOISE: f32 = 1.0;

pub(crate) struct Mlp {
    pictures: Pictures,
    first: Dense,
    second: Dense,
    output: Dense,
}

impl Mlp {
    pub(crate) fn new(params: &mut Params, hidden: usize, seed: u64) -> Result<Self> {
        Ok(Mlp {
            pictures: Pictures::new(seed, PIXEL_NOISE),
            first: Dense::new(params, "first", PIXELS, hidden)?,
            second: Dense::new(params, "second", hidden, hidden)?,
            output: Dense::new(params, "output", hidden, CLASSES)?,
        })
    }
}

impl Model for Mlp {
    fn batch(&self, pool: Pool, size: usize, rng: &mut Rng) -> Result<Batch> {
        let (pixels, labels) = self.pictures.draw(pool, size, rng);
        Ok(Batch { inputs: vec![tensor(pixels, &[size, PIXELS])?], targets: tensor(labels, &[size])? })
    }

    fn score(&self, batch: &Batch) -> Result<Score> {
        let hidden = self.first.forward(&batch.inputs[0])?.relu()?;
        let hidden = self.second.forward(&hidden)?.relu()?;
        let logits = self.output.forward(&hidden)?;
        let loss = cross_entropy(&logits, &batch.targets)?;
        Ok(Score { loss, accuracy: Some(accuracy(&logits, &batch.targets)?) })
    }
}
