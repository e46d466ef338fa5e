//! One training run as a value: take a step, measure the loss, save or restore the whole state.
//!
//! The trainer reads no clock and no files, and prints nothing. Two trainers with the same [`Setup`] that have
//! taken the same number of steps are equal bit for bit, and so is a trainer that was restored from the state
//! of another: batches and noise depend only on the seed and the step, and the state holds every parameter,
//! both moments of the optimizer and the step.
//!
//! Equality holds on one kind of processor; another one may round matrix products differently. The number of threads
//! does not matter.

use std::collections::BTreeMap;

use crate::adam::Adam;
use crate::checkpoint::{Array, State};
use crate::models::{Batch, EPOCH_EXAMPLES, Model, ModelKind, Pool};
use crate::nn::Params;
use crate::rng::Rng;
use crate::tape::Tape;
use crate::tensor::Tensor;

/// The random stream of the batches of a run in one process, and of the first worker of several.
pub(crate) const TRAINING_STREAM: &str = "training batch";

/// All that determines the losses of a run; a checkpoint with another setup is refused.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Setup {
    pub(crate) kind: ModelKind,
    pub(crate) hidden: usize,
    pub(crate) batch: usize,
    pub(crate) learning_rate: f64,
    pub(crate) seed: u64,
}

impl Setup {
    pub(crate) fn epoch_steps(&self) -> u64 {
        EPOCH_EXAMPLES.div_ceil(self.batch) as u64
    }

    /// The setup as a checkpoint holds it, with the names of the options.
    pub(crate) fn settings(&self) -> [(&'static str, String); 5] {
        [
            ("model", self.kind.name().to_owned()),
            ("hidden", self.hidden.to_string()),
            ("batch", self.batch.to_string()),
            ("lr", self.learning_rate.to_string()),
            ("seed", self.seed.to_string()),
        ]
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum TrainerError {
    #[error("the loss is {loss} after step {step}: training diverged; use a lower --lr than {learning_rate}")]
    Diverged { step: u64, loss: f32, learning_rate: f64 },
    #[error(
        "it was made with {name} {theirs}, this run has {name} {mine}; \
         use the same options or another --checkpoint directory"
    )]
    OtherSetup { name: &'static str, theirs: String, mine: String },
    #[error(
        "it was made with {name} {theirs}, this server has {name} {mine}; \
         use the same options or another --checkpoint directory"
    )]
    OtherPart { name: String, theirs: String, mine: String },
    #[error("its {name} is missing or has the wrong shape; remove it or use another --checkpoint directory")]
    Incomplete { name: String },
}

/// The result of one update.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepResult {
    pub(crate) gradient_norm: f32,
    pub(crate) learning_rate: f64,
}

/// The loss on the held-out batch, and the fraction of right answers of models that classify.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Measurement {
    pub(crate) loss: f32,
    pub(crate) accuracy: Option<f64>,
}

pub(crate) struct Trainer {
    setup: Setup,
    threads: usize,
    params: Params,
    model: Box<dyn Model>,
    adam: Adam,
    held_out: Batch,
    step: u64,
}

impl Trainer {
    /// A trainer before its first step. Large matrix products use up to `threads` threads.
    pub(crate) fn new(setup: Setup, threads: usize) -> Self {
        let mut params = Params::new(setup.seed);
        let model = setup.kind.build(&mut params, setup.hidden, setup.seed);
        let defaults = setup.kind.defaults();
        let adam = Adam::new(params.tensors(), setup.learning_rate, defaults.clip_norm);
        let mut rng = Rng::stream(setup.seed, "held-out batch", 0);
        let held_out = model.batch(Pool::HeldOut, defaults.held_out, &mut rng);
        Trainer { setup, threads, params, model, adam, held_out, step: 0 }
    }

    /// Steps taken so far, those before a restore included.
    pub(crate) fn step(&self) -> u64 {
        self.step
    }

    /// Computes the gradient on one batch and updates the parameters.
    pub(crate) fn advance(&mut self) -> Result<StepResult, TrainerError> {
        let gradients = self.gradients(TRAINING_STREAM)?;
        self.step += 1;
        let gradient_norm = self.adam.update(self.params.tensors_mut(), &gradients, self.step);
        Ok(StepResult { gradient_norm, learning_rate: self.adam.rate(self.step) })
    }

    /// The gradients on the batch that `stream` has for the next step.
    fn gradients(&self, stream: &str) -> Result<Vec<Tensor>, TrainerError> {
        let mut rng = Rng::stream(self.setup.seed, stream, self.step);
        let batch = self.model.batch(Pool::Training, self.setup.batch, &mut rng);
        let mut tape = Tape::new(self.params.tensors(), self.threads);
        let loss = self.model.score(&mut tape, &batch).loss;
        self.expect_finite(tape.value(loss).scalar())?;
        Ok(tape.backward(loss))
    }

    /// All parameters in one row, in the order of their creation.
    pub(crate) fn flat_parameters(&self) -> Vec<f32> {
        self.params.tensors().iter().flat_map(|tensor| tensor.values()).copied().collect()
    }

    /// Takes over parameters that were updated elsewhere, after `step` steps.
    pub(crate) fn set_flat_parameters(&mut self, step: u64, mut values: &[f32]) {
        self.step = step;
        for tensor in self.params.tensors_mut() {
            let (own, rest) = values.split_at(tensor.values().len());
            tensor.values_mut().copy_from_slice(own);
            values = rest;
        }
    }

    /// The clipped gradient of the next step in one row, and its length before clipping. Nothing is updated.
    pub(crate) fn flat_gradient(&self, stream: &str) -> Result<(Vec<f32>, f32), TrainerError> {
        let gradients = self.gradients(stream)?;
        let clip = self.adam.clip(&gradients);
        let values = gradients.iter().flat_map(|tensor| tensor.values()).map(|value| value * clip.scale).collect();
        Ok((values, clip.norm))
    }

    /// The learning rate of update number `step`.
    pub(crate) fn learning_rate(&self, step: u64) -> f64 {
        self.adam.rate(step.max(1))
    }

    /// Measures the loss on the held-out batch.
    pub(crate) fn measure(&self) -> Result<Measurement, TrainerError> {
        let mut tape = Tape::new(self.params.tensors(), self.threads);
        let score = self.model.score(&mut tape, &self.held_out);
        let loss = tape.value(score.loss).scalar();
        self.expect_finite(loss)?;
        Ok(Measurement { loss, accuracy: score.accuracy })
    }

    fn expect_finite(&self, loss: f32) -> Result<(), TrainerError> {
        if loss.is_finite() {
            return Ok(());
        }
        Err(TrainerError::Diverged { step: self.step, loss, learning_rate: self.setup.learning_rate })
    }

    /// Everything that the next step depends on.
    pub(crate) fn state(&self) -> State {
        let mut arrays = BTreeMap::new();
        for ((name, tensor), moments) in self.params.names().iter().zip(self.params.tensors()).zip(&self.adam.moments) {
            for (group, values) in
                [("param", tensor.values()), ("adam.first", &moments.first), ("adam.second", &moments.second)]
            {
                let array = Array { shape: saved_shape(tensor), values: values.to_vec() };
                arrays.insert(format!("{group}.{name}"), array);
            }
        }
        let settings = self.setup.settings().into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        State { step: self.step, settings, arrays }
    }

    /// Continues from a saved state. After an error the trainer is unchanged.
    pub(crate) fn restore(&mut self, mut state: State) -> Result<(), TrainerError> {
        for (name, mine) in self.setup.settings() {
            let theirs = state.settings.remove(name).unwrap_or_default();
            if theirs != mine {
                return Err(TrainerError::OtherSetup { name, theirs, mine });
            }
        }
        let mut restored = Vec::with_capacity(self.adam.moments.len());
        for (name, tensor) in self.params.names().iter().zip(self.params.tensors()) {
            let mut take = |group: &str| {
                let name = format!("{group}.{name}");
                match state.arrays.remove(&name) {
                    Some(array) if array.shape == saved_shape(tensor) => Ok(array.values),
                    _ => Err(TrainerError::Incomplete { name }),
                }
            };
            restored.push((take("param")?, take("adam.first")?, take("adam.second")?));
        }
        for ((tensor, moments), (values, first, second)) in
            self.params.tensors_mut().iter_mut().zip(&mut self.adam.moments).zip(restored)
        {
            tensor.values_mut().copy_from_slice(&values);
            moments.first = first;
            moments.second = second;
        }
        self.step = state.step;
        Ok(())
    }
}

/// The shape under which a parameter is saved. A row vector has one dimension there, as biases have in all
/// frameworks.
fn saved_shape(tensor: &Tensor) -> Vec<usize> {
    match tensor.shape() {
        (1, columns) => vec![columns],
        (rows, columns) => vec![rows, columns],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [ModelKind; 5] = [ModelKind::Vae, ModelKind::Mlp, ModelKind::Lstm, ModelKind::Gru, ModelKind::Birnn];

    fn small(kind: ModelKind) -> Trainer {
        let learning_rate = kind.defaults().learning_rate;
        Trainer::new(Setup { kind, hidden: 12, batch: 8, learning_rate, seed: 5 }, 1)
    }

    /// The gradient of each parameter agrees with the slope that appears when one of its elements is changed.
    #[test]
    fn gradients_match_finite_differences() {
        for kind in ALL {
            let mut trainer = small(kind);
            let mut tape = Tape::new(trainer.params.tensors(), 1);
            let loss = trainer.model.score(&mut tape, &trainer.held_out).loss;
            let gradients = tape.backward(loss);
            let loss = f64::from(trainer.measure().unwrap().loss);
            for (parameter, gradient) in gradients.iter().enumerate() {
                // The steepest element has the best ratio of slope to rounding.
                let steepest = gradient.values().iter().enumerate().max_by(|a, b| a.1.abs().total_cmp(&b.1.abs()));
                let (element, &expected) = steepest.unwrap();
                let original = trainer.params.tensors()[parameter].values()[element];
                let mut loss_at = |value: f32| {
                    trainer.params.tensors_mut()[parameter].values_mut()[element] = value;
                    f64::from(trainer.measure().unwrap().loss)
                };
                let width = 0.01;
                let slope = (loss_at(original + width) - loss_at(original - width)) / f64::from(2.0 * width);
                loss_at(original);
                let expected = f64::from(expected);
                // Losses of single precision resolve slopes to about 1e-7 of the loss divided by the width.
                let tolerance = 0.05 * expected.abs() + 3e-5 * loss.max(1.0);
                let name = &trainer.params.names()[parameter];
                assert!((slope - expected).abs() <= tolerance, "{kind:?} {name}[{element}]: {slope}, not {expected}");
                assert!(expected != 0.0, "{kind:?} {name} does not reach the loss");
            }
        }
    }

    /// A run cut into three by saving and restoring equals an uninterrupted one bit for bit.
    #[test]
    fn resume_is_exact_for_every_model() {
        for kind in ALL {
            let mut whole = small(kind);
            let mut losses = Vec::new();
            for _ in 0..12 {
                whole.advance().unwrap();
                losses.push(whole.measure().unwrap().loss.to_bits());
            }
            let mut state = small(kind).state();
            let mut pieces = Vec::new();
            for steps in [5, 1, 6] {
                let mut piece = small(kind);
                piece.restore(state).unwrap();
                for _ in 0..steps {
                    piece.advance().unwrap();
                    pieces.push(piece.measure().unwrap().loss.to_bits());
                }
                state = piece.state();
            }
            assert_eq!(losses, pieces, "{kind:?}");
            assert_eq!(state, whole.state(), "{kind:?}");
        }
    }

    #[test]
    fn loss_falls_for_every_model() {
        for (kind, steps, factor) in [
            (ModelKind::Vae, 60, 0.6),
            (ModelKind::Mlp, 100, 0.8),
            (ModelKind::Lstm, 80, 0.9),
            (ModelKind::Gru, 60, 0.6),
            (ModelKind::Birnn, 100, 0.85),
        ] {
            let learning_rate = 3e-3;
            let mut trainer = Trainer::new(Setup { kind, hidden: 32, batch: 16, learning_rate, seed: 1 }, 1);
            let before = trainer.measure().unwrap().loss;
            for _ in 0..steps {
                trainer.advance().unwrap();
            }
            let after = trainer.measure().unwrap().loss;
            assert!(after < factor * before, "{kind:?}: {before} fell only to {after}");
        }
    }

    #[test]
    fn another_setup_or_a_missing_part_is_refused_and_changes_nothing() {
        let mut trainer = small(ModelKind::Gru);
        trainer.advance().unwrap();
        let before = trainer.state();

        let other = Trainer::new(Setup { batch: 9, ..small(ModelKind::Gru).setup }, 1).state();
        let error = trainer.restore(other).unwrap_err().to_string();
        assert!(error.contains("batch 9") && error.contains("batch 8"), "{error}");

        let mut torn = before.clone();
        torn.arrays.remove("adam.second.output.bias").unwrap();
        torn.step = 77;
        let error = trainer.restore(torn).unwrap_err().to_string();
        assert!(error.contains("adam.second.output.bias"), "{error}");
        assert_eq!(trainer.state(), before);
    }

    #[test]
    fn divergence_is_an_error_and_not_a_checkpoint_of_nonsense() {
        let setup = Setup { learning_rate: 1e30, ..small(ModelKind::Vae).setup };
        let mut trainer = Trainer::new(setup, 1);
        let error = (0..20).find_map(|_| trainer.advance().err()).expect("such a rate must diverge").to_string();
        assert!(error.contains("--lr"), "{error}");
    }
}
