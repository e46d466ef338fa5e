//! The five models and what they have in common.
//!
//! A model knows how to draw a batch of its own data from a random stream and how to score it. Everything else (updates,
//! reports, checkpoints) is the same for all of them and lives elsewhere.
//!
//! | model   | task                                             | loss                                             |
//! |---------|--------------------------------------------------|--------------------------------------------------|
//! | `vae`   | variational auto-encoder of drawn digits         | negative evidence lower bound, nats per picture  |
//! | `mlp`   | which digit is it, from noisy pixels             | cross-entropy, nats                              |
//! | `lstm`  | next letter of sentences of a small language     | cross-entropy, nats per letter                   |
//! | `gru`   | next value of noisy waves                        | mean squared error                               |
//! | `birnn` | which digit is it, read row by row in both directions | cross-entropy, nats                         |

mod birnn;
mod gru;
mod lstm;
mod mlp;
mod vae;

use candle_core::{Device, Result, Tensor};

use crate::glyphs::{Glyphs, PIXELS};
use crate::nn::Params;
use crate::rng::Rng;

/// Which model to train.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum ModelKind {
    /// Variational auto-encoder of drawn digits; the loss is in nats per picture
    Vae,
    /// MNIST-style classifier, two hidden layers, noisy drawn digits
    Mlp,
    /// Long short-term memory; guesses the next letter of a small language
    Lstm,
    /// Gated recurrent unit; forecasts noisy waves
    Gru,
    /// Bi-directional recurrent network; reads drawn digits row by row
    Birnn,
}

/// What a model does when the options say nothing; chosen so that a step costs 5 to 20 ms on one core.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Defaults {
    pub(crate) hidden: usize,
    pub(crate) batch: usize,
    pub(crate) learning_rate: f64,
    pub(crate) clip_norm: Option<f32>,
    /// Examples of the held-out batch the reported loss is measured on.
    pub(crate) held: usize,
}

impl ModelKind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            ModelKind::Vae => "vae",
            ModelKind::Mlp => "mlp",
            ModelKind::Lstm => "lstm",
            ModelKind::Gru => "gru",
            ModelKind::Birnn => "birnn",
        }
    }

    pub(crate) fn defaults(self) -> Defaults {
        let with = |hidden, batch, learning_rate| Defaults {
            hidden,
            batch,
            learning_rate,
            clip_norm: None,
            held: HELD_PICTURES,
        };
        // Recurrent gradients can explode through time; the limit is the one customary for such models. A sequence
        // counts for many examples, one per moment, so that fewer of them make a steady loss.
        let sequences = |defaults| Defaults { clip_norm: Some(1.0), held: 128, ..defaults };
        match self {
            ModelKind::Vae => with(400, 64, 1e-3),
            ModelKind::Mlp => with(512, 64, 1e-3),
            ModelKind::Lstm => sequences(with(64, 32, 6e-3)),
            ModelKind::Gru => sequences(with(64, 32, 4e-3)),
            ModelKind::Birnn => Defaults { clip_norm: Some(1.0), ..with(64, 64, 2e-3) },
        }
    }

    pub(crate) fn build(self, params: &mut Params, hidden: usize, seed: u64) -> Result<Box<dyn Model>> {
        Ok(match self {
            ModelKind::Vae => Box::new(vae::Vae::new(params, hidden, seed)?),
            ModelKind::Mlp => Box::new(mlp::Mlp::new(params, hidden, seed)?),
            ModelKind::Lstm => Box::new(lstm::Lstm::new(params, hidden)?),
            ModelKind::Gru => Box::new(gru::Gru::new(params, hidden)?),
            ModelKind::Birnn => Box::new(birnn::BiRnn::new(params, hidden, seed)?),
        })
    }
}

/// Data of one step, inputs and what the model is scored against. Recurrent models have one input per moment.
#[derive(Debug)]
pub(crate) struct Batch {
    pub(crate) inputs: Vec<Tensor>,
    pub(crate) targets: Tensor,
}

/// The score of one batch.
#[derive(Debug)]
pub(crate) struct Score {
    pub(crate) loss: Tensor,
    /// Part of right answers, 0 to 1, for models that give answers.
    pub(crate) accuracy: Option<f64>,
}

pub(crate) trait Model {
    /// Draws a batch; the same stream gives the same batch. `Held` data are never trained on.
    fn batch(&self, pool: Pool, size: usize, rng: &mut Rng) -> Result<Batch>;
    /// The mean loss of a batch, differentiable with respect to the model's parameters.
    fn score(&self, batch: &Batch) -> Result<Score>;
}

/// Where a batch is drawn from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pool {
    Training,
    Held,
}

/// Examples that count as one epoch, for every model.
pub(crate) const EPOCH_EXAMPLES: usize = 4096;
/// Held-out pictures.
const HELD_PICTURES: usize = 256;

/// Training and held-out pictures of the models that look at digits.
#[derive(Debug)]
pub(crate) struct Pictures {
    training: Glyphs,
    held: Glyphs,
    noise: f32,
}

impl Pictures {
    /// `noise` is the height of the uniform noise that is drawn anew for every pixel of every batch.
    pub(crate) fn new(seed: u64, noise: f32) -> Self {
        let draw = |count, purpose| Glyphs::draw(count, &mut Rng::stream(seed, purpose, 0));
        Pictures {
            training: draw(EPOCH_EXAMPLES, "training pictures"),
            held: draw(HELD_PICTURES, "held-out pictures"),
            noise,
        }
    }

    /// Pixels of `size` pictures, picture after picture, and their labels.
    pub(crate) fn draw(&self, pool: Pool, size: usize, rng: &mut Rng) -> (Vec<f32>, Vec<u32>) {
        let glyphs = match pool {
            Pool::Training => &self.training,
            Pool::Held => &self.held,
        };
        let mut pixels = Vec::with_capacity(size * PIXELS);
        let mut labels = Vec::with_capacity(size);
        for position in 0..size {
            let index = match pool {
                Pool::Training => rng.below(glyphs.len()),
                Pool::Held => position % glyphs.len(),
            };
            pixels.extend_from_slice(glyphs.picture(index));
            labels.push(glyphs.label(index));
        }
        if self.noise > 0.0 {
            for pixel in &mut pixels {
                *pixel += rng.between(-self.noise, self.noise);
            }
        }
        (pixels, labels)
    }
}

pub(crate) fn tensor<T: candle_core::WithDType>(values: Vec<T>, shape: &[usize]) -> Result<Tensor> {
    Tensor::from_vec(values, shape, &Device::Cpu)
}
