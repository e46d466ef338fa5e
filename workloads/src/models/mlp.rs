//! MNIST-style classifier: two hidden layers over the pixels of a noisy drawn digit.

use super::{Batch, Model, Pictures, Pool, Score};
use crate::glyphs::{CLASSES, PIXELS};
use crate::nn::{Dense, Params, accuracy};
use crate::rng::Rng;
use crate::tape::Tape;
use crate::tensor::Tensor;

/// With this much noise the classifier keeps making mistakes, and the loss flattens above zero.
const PIXEL_NOISE: f32 = 1.0;

pub(crate) struct Mlp {
    pictures: Pictures,
    first: Dense,
    second: Dense,
    output: Dense,
}

impl Mlp {
    pub(crate) fn new(params: &mut Params, hidden: usize, seed: u64) -> Self {
        Mlp {
            pictures: Pictures::new(seed, PIXEL_NOISE),
            first: Dense::new(params, "first", PIXELS, hidden),
            second: Dense::new(params, "second", hidden, hidden),
            output: Dense::new(params, "output", hidden, CLASSES),
        }
    }
}

impl Model for Mlp {
    fn batch(&self, pool: Pool, size: usize, rng: &mut Rng) -> Batch {
        let (pictures, labels) = self.pictures.draw(pool, size, rng);
        Batch { inputs: vec![pictures], targets: Tensor::one_hot(&labels, CLASSES) }
    }

    fn score<'a>(&self, tape: &mut Tape<'a>, batch: &'a Batch) -> Score {
        let pictures = tape.data(&batch.inputs[0]);
        let targets = tape.data(&batch.targets);
        let hidden = self.first.forward(tape, pictures);
        let hidden = tape.relu(hidden);
        let hidden = self.second.forward(tape, hidden);
        let hidden = tape.relu(hidden);
        let logits = self.output.forward(tape, hidden);
        let loss = tape.cross_entropy(logits, targets);
        Score { loss, accuracy: Some(accuracy(tape.value(logits), &batch.targets)) }
    }
}
