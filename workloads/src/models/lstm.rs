//! Long short-term memory that guesses the next letter of sentences of a small language.
//!
//! The four gates are computed by one product per moment. A letter is a one-hot row, so the product with the
//! input matrix selects the row of that letter.

use super::{Batch, Model, Pool, Score};
use crate::nn::{Dense, Params, accuracy};
use crate::rng::Rng;
use crate::sequences::{ALPHABET, sentences};
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;

/// Letters that the model reads of each text.
const MOMENTS: usize = 24;

pub(crate) struct Lstm {
    hidden: usize,
    /// One row of gate inputs per letter.
    letters: Var,
    recurrent: Dense,
    output: Dense,
}

impl Lstm {
    pub(crate) fn new(params: &mut Params, hidden: usize) -> Self {
        Lstm {
            hidden,
            letters: params.matrix("letters", ALPHABET, 4 * hidden),
            recurrent: Dense::new(params, "recurrent", hidden, 4 * hidden),
            output: Dense::new(params, "output", hidden, ALPHABET),
        }
    }
}

impl Model for Lstm {
    /// Every batch is new text, so training text and held-out text differ by their random streams.
    fn batch(&self, _: Pool, size: usize, rng: &mut Rng) -> Batch {
        let texts: Vec<Vec<u32>> = (0..size).map(|_| sentences(MOMENTS + 1, rng)).collect();
        let column = |moment: usize| texts.iter().map(move |text| text[moment]);
        let one_hot = |letters: Vec<u32>| Tensor::one_hot(&letters, ALPHABET);
        Batch {
            inputs: (0..MOMENTS).map(|moment| one_hot(column(moment).collect())).collect(),
            targets: one_hot((1..=MOMENTS).flat_map(column).collect()),
        }
    }

    fn score<'a>(&self, tape: &mut Tape<'a>, batch: &'a Batch) -> Score {
        let texts = batch.inputs[0].rows();
        let mut state = tape.constant(Tensor::zeros(texts, self.hidden));
        let mut cell = tape.constant(Tensor::zeros(texts, self.hidden));
        let mut states = Vec::with_capacity(batch.inputs.len());
        for letters in &batch.inputs {
            let letters = tape.data(letters);
            let from_state = self.recurrent.forward(tape, state);
            let gates = tape.linear(letters, self.letters, from_state);
            let [keep, write, show, new] =
                [0, 1, 2, 3].map(|gate| tape.columns(gates, gate * self.hidden, self.hidden));
            // The constant makes the cell keep its content by default, before the model has learnt when to keep it.
            let keep = tape.affine(keep, 1.0, 1.0);
            let [keep, write, show] = [keep, write, show].map(|gate| tape.sigmoid(gate));
            let new = tape.tanh(new);
            let kept = tape.multiply(keep, cell);
            let written = tape.multiply(write, new);
            cell = tape.add(kept, written);
            let content = tape.tanh(cell);
            state = tape.multiply(show, content);
            states.push(state);
        }
        let states = tape.stack_rows(&states);
        let logits = self.output.forward(tape, states);
        let targets = tape.data(&batch.targets);
        let loss = tape.cross_entropy(logits, targets);
        Score { loss, accuracy: Some(accuracy(tape.value(logits), &batch.targets)) }
    }
}
