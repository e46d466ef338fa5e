//! Gated recurrent unit that forecasts noisy waves one moment ahead.

use super::{Batch, Model, Pool, Score};
use crate::nn::{Dense, Params};
use crate::rng::Rng;
use crate::sequences::{CHANNELS, waves};
use crate::tape::Tape;
use crate::tensor::Tensor;

/// Moments that the model reads of each wave.
const MOMENTS: usize = 32;

pub(crate) struct Gru {
    hidden: usize,
    /// The update gate and the reset gate, from the input and from the state.
    gates_in: Dense,
    gates_state: Dense,
    /// The candidate for the next state, from the input and from the state.
    candidate_in: Dense,
    candidate_state: Dense,
    output: Dense,
}

impl Gru {
    pub(crate) fn new(params: &mut Params, hidden: usize) -> Self {
        Gru {
            hidden,
            gates_in: Dense::new(params, "gates_in", CHANNELS, 2 * hidden),
            gates_state: Dense::new(params, "gates_state", hidden, 2 * hidden),
            candidate_in: Dense::new(params, "candidate_in", CHANNELS, hidden),
            candidate_state: Dense::new(params, "candidate_state", hidden, hidden),
            output: Dense::new(params, "output", hidden, CHANNELS),
        }
    }
}

impl Model for Gru {
    /// Every batch has new waves, so training waves and held-out waves differ by their random streams.
    fn batch(&self, _: Pool, size: usize, rng: &mut Rng) -> Batch {
        let all: Vec<Vec<f32>> = (0..size).map(|_| waves(MOMENTS + 1, rng)).collect();
        let moment = |m: usize| all.iter().flat_map(move |wave| wave[m * CHANNELS..(m + 1) * CHANNELS].iter().copied());
        Batch {
            inputs: (0..MOMENTS).map(|m| Tensor::new(size, CHANNELS, moment(m).collect())).collect(),
            targets: Tensor::new(MOMENTS * size, CHANNELS, (1..=MOMENTS).flat_map(moment).collect()),
        }
    }

    fn score<'a>(&self, tape: &mut Tape<'a>, batch: &'a Batch) -> Score {
        let waves = batch.inputs[0].rows();
        let mut state = tape.constant(Tensor::zeros(waves, self.hidden));
        let mut states = Vec::with_capacity(batch.inputs.len());
        for input in &batch.inputs {
            let input = tape.data(input);
            let from_input = self.gates_in.forward(tape, input);
            let from_state = self.gates_state.forward(tape, state);
            let gates = tape.add(from_input, from_state);
            let gates = tape.sigmoid(gates);
            let update = tape.columns(gates, 0, self.hidden);
            let reset = tape.columns(gates, self.hidden, self.hidden);

            let from_input = self.candidate_in.forward(tape, input);
            let from_state = self.candidate_state.forward(tape, state);
            let remembered = tape.multiply(reset, from_state);
            let candidate = tape.add(from_input, remembered);
            let candidate = tape.tanh(candidate);

            // The next state is update · state + (1 − update) · candidate, written with one product less.
            let difference = tape.subtract(state, candidate);
            let kept = tape.multiply(update, difference);
            state = tape.add(candidate, kept);
            states.push(state);
        }
        let states = tape.stack_rows(&states);
        let forecast = self.output.forward(tape, states);
        let targets = tape.data(&batch.targets);
        let error = tape.subtract(forecast, targets);
        let square = tape.multiply(error, error);
        let sum = tape.sum(square);
        let loss = tape.affine(sum, 1.0 / batch.targets.values().len() as f32, 0.0);
        Score { loss, accuracy: None }
    }
}
