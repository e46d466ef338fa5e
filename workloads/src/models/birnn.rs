//! Bi-directional recurrent network that reads a drawn digit row by row, once from the top and once from the bottom.

use super::{Batch, Model, Pictures, Pool, Score};
use crate::glyphs::{CLASSES, SIDE};
use crate::nn::{Dense, Params, accuracy};
use crate::rng::Rng;
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;

/// With this much noise the loss does not fall to zero, where relative progress would have no meaning.
const PIXEL_NOISE: f32 = 0.6;

pub(crate) struct BiRnn {
    pictures: Pictures,
    down: Direction,
    up: Direction,
    output: Dense,
}

/// A recurrent cell with tanh that reads in one direction.
struct Direction {
    hidden: usize,
    input: Dense,
    state: Dense,
}

impl Direction {
    fn new(params: &mut Params, name: &str, hidden: usize) -> Self {
        Direction {
            hidden,
            input: Dense::new(params, &format!("{name}.input"), SIDE, hidden),
            state: Dense::new(params, &format!("{name}.state"), hidden, hidden),
        }
    }

    /// The state after all rows.
    fn read(&self, tape: &mut Tape<'_>, rows: impl Iterator<Item = Var>, pictures: usize) -> Var {
        let mut state = tape.constant(Tensor::zeros(pictures, self.hidden));
        for row in rows {
            let from_input = self.input.forward(tape, row);
            let from_state = self.state.forward(tape, state);
            let sum = tape.add(from_input, from_state);
            state = tape.tanh(sum);
        }
        state
    }
}

impl BiRnn {
    pub(crate) fn new(params: &mut Params, hidden: usize, seed: u64) -> Self {
        BiRnn {
            pictures: Pictures::new(seed, PIXEL_NOISE),
            down: Direction::new(params, "down", hidden),
            up: Direction::new(params, "up", hidden),
            output: Dense::new(params, "output", 2 * hidden, CLASSES),
        }
    }
}

impl Model for BiRnn {
    /// One input per row of the pictures, each with [`SIDE`] pixels of every picture.
    fn batch(&self, pool: Pool, size: usize, rng: &mut Rng) -> Batch {
        let (pictures, labels) = self.pictures.draw(pool, size, rng);
        let row = |row: usize| {
            let pixels = pictures.by_row().flat_map(|picture| picture[row * SIDE..(row + 1) * SIDE].iter().copied());
            Tensor::new(size, SIDE, pixels.collect())
        };
        Batch { inputs: (0..SIDE).map(row).collect(), targets: Tensor::one_hot(&labels, CLASSES) }
    }

    fn score<'a>(&self, tape: &mut Tape<'a>, batch: &'a Batch) -> Score {
        let pictures = batch.targets.rows();
        let rows: Vec<Var> = batch.inputs.iter().map(|row| tape.data(row)).collect();
        let down = self.down.read(tape, rows.iter().copied(), pictures);
        let up = self.up.read(tape, rows.iter().rev().copied(), pictures);
        let both = tape.join_columns(down, up);
        let logits = self.output.forward(tape, both);
        let targets = tape.data(&batch.targets);
        let loss = tape.cross_entropy(logits, targets);
        Score { loss, accuracy: Some(accuracy(tape.value(logits), &batch.targets)) }
    }
}
