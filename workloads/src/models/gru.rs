//! Gated recurrent unit that forecasts noisy waves one moment ahead.

use candle_core::{Result, Tensor};

use super::{Batch, Model, Pool, Score, tensor};
use crate::nn::{Dense, Params, sigmoid};
use crate::rng::Rng;
use crate::sequences::{CHANNELS, waves};

/// Moments the model reads before a batch ends.
const MOMENTS: usize = 32;

pub(crate) struct Gru {
    hidden: usize,
    /// Inputs of the update and reset gates, then of the candidate.
    gates_in: Dense,
    gates_state: Dense,
    candidate_in: Dense,
    candidate_state: Dense,
    output: Dense,
}

impl Gru {
    pub(crate) fn new(params: &mut Params, hidden: usize) -> Result<Self> {
        Ok(Gru {
            hidden,
            gates_in: Dense::new(params, "gates_in", CHANNELS, 2 * hidden)?,
            gates_state: Dense::new(params, "gates_state", hidden, 2 * hidden)?,
            candidate_in: Dense::new(params, "candidate_in", CHANNELS, hidden)?,
            candidate_state: Dense::new(params, "candidate_state", hidden, hidden)?,
            output: Dense::new(params, "output", hidden, CHANNELS)?,
        })
    }
}

impl Model for Gru {
    /// Waves are drawn afresh for every batch, so training and held-out waves differ by their streams alone.
    fn batch(&self, _: Pool, size: usize, rng: &mut Rng) -> Result<Batch> {
        let all: Vec<Vec<f32>> = (0..size).map(|_| waves(MOMENTS + 1, rng)).collect();
        let moment = |m: usize| all.iter().flat_map(move |wave| wave[m * CHANNELS..(m + 1) * CHANNELS].iter().copied());
        let inputs = (0..MOMENTS).map(|m| tensor(moment(m).collect(), &[size, CHANNELS])).collect::<Result<_>>()?;
        let targets: Vec<f32> = (1..=MOMENTS).flat_map(moment).collect();
        Ok(Batch { inputs, targets: tensor(targets, &[MOMENTS * size, CHANNELS])? })
    }

    fn score(&self, batch: &Batch) -> Result<Score> {
        let rows = batch.inputs[0].dim(0)?;
        let mut state = tensor(vec![0f32; rows * self.hidden], &[rows, self.hidden])?;
        let mut states = Vec::with_capacity(batch.inputs.len());
        for input in &batch.inputs {
            let gates = sigmoid(&(self.gates_in.forward(input)? + self.gates_state.forward(&state)?)?)?;
            let (update, reset) = (gates.narrow(1, 0, self.hidden)?, gates.narrow(1, self.hidden, self.hidden)?);
            let remembered = (reset * self.candidate_state.forward(&state)?)?;
            let candidate = (self.candidate_in.forward(input)? + remembered)?.tanh()?;
            // Equal to (1 − update) · candidate + update · state, with one product less.
            state = (&candidate + (update * (state - &candidate)?)?)?;
            states.push(state.clone());
        }
        let forecast = self.output.forward(&Tensor::cat(&states, 0)?)?;
        Ok(Score { loss: (forecast - &batch.targets)?.sqr()?.mean_all()?, accuracy: None })
    }
}
