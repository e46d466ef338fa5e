//! Long short-term memory that guesses the next letter of sentences of a small language.
//!
//! The four gates share one product per moment. A letter enters through its own row of the input matrix, which is what a
//! one-hot product would select.

use candle_core::{Result, Tensor};

use super::{Batch, Model, Pool, Score, tensor};
use crate::nn::{Dense, Params, accuracy, cross_entropy, sigmoid};
use crate::rng::Rng;
use crate::sequences::{ALPHABET, sentences};

/// Letters the model reads before a batch ends.
const MOMENTS: usize = 24;

pub(crate) struct Lstm {
    hidden: usize,
    /// One row of gate inputs per letter.
    letters: Tensor,
    recurrent: Dense,
    output: Dense,
}

impl Lstm {
    pub(crate) fn new(params: &mut Params, hidden: usize) -> Result<Self> {
        Ok(Lstm {
            hidden,
            letters: params.matrix("letters", ALPHABET, 4 * hidden)?,
            recurrent: Dense::new(params, "recurrent", hidden, 4 * hidden)?,
            output: Dense::new(params, "output", hidden, ALPHABET)?,
        })
    }
}

impl Model for Lstm {
    /// Text is drawn afresh for every batch, so training and held-out text differ by their streams alone.
    fn batch(&self, _: Pool, size: usize, rng: &mut Rng) -> Result<Batch> {
        let texts: Vec<Vec<u32>> = (0..size).map(|_| sentences(MOMENTS + 1, rng)).collect();
        let column = |moment: usize| texts.iter().map(move |text| text[moment]);
        let inputs = (0..MOMENTS).map(|m| tensor(column(m).collect(), &[size])).collect::<Result<_>>()?;
        let targets: Vec<u32> = (1..=MOMENTS).flat_map(column).collect();
        Ok(Batch { inputs, targets: tensor(targets, &[MOMENTS * size])? })
    }

    fn score(&self, batch: &Batch) -> Result<Score> {
        let rows = batch.inputs[0].dim(0)?;
        let mut state = self.output_zeros(rows)?;
        let mut cell = self.output_zeros(rows)?;
        let mut states = Vec::with_capacity(batch.inputs.len());
        for letters in &batch.inputs {
            let gates = (self.letters.index_select(letters, 0)? + self.recurrent.forward(&state)?)?;
            let gate = |index: usize| gates.narrow(1, index * self.hidden, self.hidden);
            // The constant in the forget gate makes the cell remember by default while it has learnt nothing yet.
            let keep = sigmoid(&gate(0)?.affine(1.0, 1.0)?)?;
            let (write, show) = (sigmoid(&gate(1)?)?, sigmoid(&gate(2)?)?);
            cell = ((keep * cell)? + (write * gate(3)?.tanh()?)?)?;
            state = (show * cell.tanh()?)?;
            states.push(state.clone());
        }
        let logits = self.output.forward(&Tensor::cat(&states, 0)?)?;
        let loss = cross_entropy(&logits, &batch.targets)?;
        Ok(Score { loss, accuracy: Some(accuracy(&logits, &batch.targets)?) })
    }
}

impl Lstm {
    fn output_zeros(&self, rows: usize) -> Result<Tensor> {
        tensor(vec![0f32; rows * self.hidden], &[rows, self.hidden])
    }
}
