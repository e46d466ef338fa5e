//! Bi-directional recurrent network that reads a drawn digit row by row, from the top and from the bottom at once.

use candle_core::{Result, Tensor};

use super::{Batch, Model, Pictures, Pool, Score, tensor};
use crate::glyphs::{CLASSES, PIXELS, SIDE};
use crate::nn::{Dense, Params, accuracy, cross_entropy};
use crate::rng::Rng;

/// Keeps the loss from falling to zero, where relative progress would mean nothing.
const PIXEL_NOISE: f32 = 0.6;

pub(crate) struct BiRnn {
    pictures: Pictures,
    down: Direction,
    up: Direction,
    output: Dense,
}

/// A plain tanh cell.
struct Direction {
    hidden: usize,
    input: Dense,
    state: Dense,
}

impl Direction {
    fn new(params: &mut Params, name: &str, hidden: usize) -> Result<Self> {
        Ok(Direction {
            hidden,
            input: Dense::new(params, &format!("{name}.input"), SIDE, hidden)?,
            state: Dense::new(params, &format!("{name}.state"), hidden, hidden)?,
        })
    }

    fn read<'a>(&self, rows: impl Iterator<Item = &'a Tensor>, batch: usize) -> Result<Tensor> {
        let mut state = tensor(vec![0f32; batch * self.hidden], &[batch, self.hidden])?;
        for row in rows {
            state = (self.input.forward(row)? + self.state.forward(&state)?)?.tanh()?;
        }
        Ok(state)
    }
}

impl BiRnn {
    pub(crate) fn new(params: &mut Params, hidden: usize, seed: u64) -> Result<Self> {
        Ok(BiRnn {
            pictures: Pictures::new(seed, PIXEL_NOISE),
            down: Direction::new(params, "down", hidden)?,
            up: Direction::new(params, "up", hidden)?,
            output: Dense::new(params, "output", 2 * hidden, CLASSES)?,
        })
    }
}

impl Model for BiRnn {
    /// One input per picture row, each of `size × SIDE` pixels.
    fn batch(&self, pool: Pool, size: usize, rng: &mut Rng) -> Result<Batch> {
        let (pixels, labels) = self.pictures.draw(pool, size, rng);
        let row = |row: usize| -> Vec<f32> {
            pixels
                .chunks_exact(PIXELS)
                .flat_map(|picture| picture[row * SIDE..(row + 1) * SIDE].iter().copied())
                .collect()
        };
        let inputs = (0..SIDE).map(|r| tensor(row(r), &[size, SIDE])).collect::<Result<_>>()?;
        Ok(Batch { inputs, targets: tensor(labels, &[size])? })
    }

    fn score(&self, batch: &Batch) -> Result<Score> {
        let size = batch.targets.dim(0)?;
        let down = self.down.read(batch.inputs.iter(), size)?;
        let up = self.up.read(batch.inputs.iter().rev(), size)?;
        let logits = self.output.forward(&Tensor::cat(&[down, up], 1)?)?;
        let loss = cross_entropy(&logits, &batch.targets)?;
        Ok(Score { loss, accuracy: Some(accuracy(&logits, &batch.targets)?) })
    }
}
