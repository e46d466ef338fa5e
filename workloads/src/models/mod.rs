//! The five models and what they have in common.
//!
//! A model draws a batch of its own data from a random stream, and computes the loss of a batch. Updates, reports and
//! checkpoints are the same for all models and live elsewhere.
//!
//! | model   | task                                                  | loss                                            |
//! |---------|-------------------------------------------------------|-------------------------------------------------|
//! | `vae`   | variational auto-encoder of drawn digits              | negative evidence lower bound, nats per picture |
//! | `mlp`   | which digit is it, from noisy pixels                  | cross-entropy, nats                             |
//! | `lstm`  | next letter of sentences of a small language          | cross-entropy, nats per letter                  |
//! | `gru`   | next value of noisy waves                             | mean squared error                              |
//! | `birnn` | which digit is it, read row by row in both directions | cross-entropy, nats                             |
//!
//! **Terms.** *Moment*: one position of a sequence; a recurrent model reads one input per moment. *Held-out*
//! data: data that the model is never trained on; the reported loss is measured on them.

mod birnn;
mod gru;
mod lstm;
mod mlp;
mod vae;

use crate::glyphs::{Glyphs, PIXELS};
use crate::nn::Params;
use crate::rng::Rng;
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;

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

/// The settings of a model for which no option is given. The sizes are chosen so that a step costs 5 to 20 ms
/// of one core.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Defaults {
    pub(crate) hidden: usize,
    pub(crate) batch: usize,
    pub(crate) learning_rate: f64,
    pub(crate) clip_norm: Option<f32>,
    /// Examples of the held-out batch, on which the reported loss is measured.
    pub(crate) held_out: usize,
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
            held_out: HELD_OUT_PICTURES,
        };
        // Recurrent gradients can explode through time; a limit of 1 is customary for such models. A sequence counts
        // for as many examples as it has moments, so fewer sequences are enough for a steady loss.
        let sequences = |defaults| Defaults { clip_norm: Some(1.0), held_out: 128, ..defaults };
        match self {
            ModelKind::Vae => with(400, 64, 1e-3),
            ModelKind::Mlp => with(512, 64, 1e-3),
            ModelKind::Lstm => sequences(with(64, 32, 6e-3)),
            ModelKind::Gru => sequences(with(64, 32, 4e-3)),
            ModelKind::Birnn => Defaults { clip_norm: Some(1.0), ..with(64, 64, 2e-3) },
        }
    }

    /// Creates the model's parameters in `params`, and the model that refers to them.
    pub(crate) fn build(self, params: &mut Params, hidden: usize, seed: u64) -> Box<dyn Model> {
        match self {
            ModelKind::Vae => Box::new(vae::Vae::new(params, hidden, seed)),
            ModelKind::Mlp => Box::new(mlp::Mlp::new(params, hidden, seed)),
            ModelKind::Lstm => Box::new(lstm::Lstm::new(params, hidden)),
            ModelKind::Gru => Box::new(gru::Gru::new(params, hidden)),
            ModelKind::Birnn => Box::new(birnn::BiRnn::new(params, hidden, seed)),
        }
    }
}

/// Data of one step. Recurrent models have one input per moment; classes and letters are one-hot rows.
#[derive(Debug)]
pub(crate) struct Batch {
    pub(crate) inputs: Vec<Tensor>,
    /// What the results of the model are compared with.
    pub(crate) targets: Tensor,
}

/// The score of one batch.
#[derive(Debug)]
pub(crate) struct Score {
    pub(crate) loss: Var,
    /// Fraction of right answers, 0 to 1, for models that classify.
    pub(crate) accuracy: Option<f64>,
}

pub(crate) trait Model {
    /// Draws a batch; the same stream gives the same batch.
    fn batch(&self, pool: Pool, size: usize, rng: &mut Rng) -> Batch;
    /// Computes the mean loss of a batch on a tape that starts with the model's parameters.
    fn score<'a>(&self, tape: &mut Tape<'a>, batch: &'a Batch) -> Score;
}

/// Where a batch is drawn from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pool {
    Training,
    HeldOut,
}

/// Examples that count as one epoch, for every model.
pub(crate) const EPOCH_EXAMPLES: usize = 4096;
const HELD_OUT_PICTURES: usize = 256;

/// Training and held-out pictures of the models that read digits.
#[derive(Debug)]
struct Pictures {
    training: Glyphs,
    held_out: Glyphs,
    noise: f32,
}

impl Pictures {
    /// Each pixel of each batch gets new uniform noise between `-noise` and `noise`.
    fn new(seed: u64, noise: f32) -> Self {
        let draw = |count, purpose| Glyphs::draw(count, &mut Rng::stream(seed, purpose, 0));
        Pictures {
            training: draw(EPOCH_EXAMPLES, "training pictures"),
            held_out: draw(HELD_OUT_PICTURES, "held-out pictures"),
            noise,
        }
    }

    /// The pixels of `size` pictures, one picture per row, and their labels. Held-out pictures come in a fixed order.
    fn draw(&self, pool: Pool, size: usize, rng: &mut Rng) -> (Tensor, Vec<u32>) {
        let glyphs = match pool {
            Pool::Training => &self.training,
            Pool::HeldOut => &self.held_out,
        };
        let mut pixels = Vec::with_capacity(size * PIXELS);
        let mut labels = Vec::with_capacity(size);
        for position in 0..size {
            let index = match pool {
                Pool::Training => rng.below(glyphs.len()),
                Pool::HeldOut => position % glyphs.len(),
            };
            pixels.extend_from_slice(glyphs.picture(index));
            labels.push(glyphs.label(index));
        }
        if self.noise > 0.0 {
            for pixel in &mut pixels {
                *pixel += rng.between(-self.noise, self.noise);
            }
        }
        (Tensor::new(size, PIXELS, pixels), labels)
    }
}
