//! One training run as a value: take a step, measure the loss, hand out or take back the whole state.
//!
//! The trainer knows no clock, no files and no output. Two trainers built with the same [`Setup`] and taken through the same
//! number of steps are equal bit for bit, and so is one restored from the other's state: batches and noise depend on
//! `(seed, step)` alone, and the state holds every parameter, both moments of the optimizer and the step.
//!
//! Equality holds on one kind of processor and one thread count; matrix products may round differently on another.

use std::collections::BTreeMap;

use candle_core::{Device, Tensor};

use crate::adam::Adam;
use crate::checkpoint::{Array, State};
use crate::models::{Batch, EPOCH_EXAMPLES, Model, ModelKind, Pool};
use crate::nn::Params;
use crate::rng::Rng;

/// What makes a run this run; a checkpoint of another setup is refused.
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

    /// The setup as it is written into a checkpoint, named as the options that set it.
    fn facts(&self) -> [(&'static str, String); 5] {
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
    #[error("the model cannot be computed: {0}")]
    Compute(#[from] candle_core::Error),
    #[error("the loss is {loss} after step {step}: training diverged; use a lower --lr than {learning_rate}")]
    Diverged { step: u64, loss: f32, learning_rate: f64 },
    #[error(
        "it was made with {name} {theirs}, this run has {name} {mine}; use the same options or another --checkpoint directory"
    )]
    OtherSetup { name: &'static str, theirs: String, mine: String },
    #[error("its {name} is missing or has the wrong shape; remove it or use another --checkpoint directory")]
    Incomplete { name: String },
}

/// What a step learnt.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stepped {
    pub(crate) gradient_norm: f32,
    pub(crate) learning_rate: f64,
}

/// The loss on the held-out batch, and the part of right answers where the model gives any.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Measured {
    pub(crate) loss: f32,
    pub(crate) accuracy: Option<f64>,
}

pub(crate) struct Trainer {
    setup: Setup,
    params: Params,
    model: Box<dyn Model>,
    adam: Adam,
    held: Batch,
    step: u64,
}

impl Trainer {
    pub(crate) fn new(setup: Setup) -> Result<Self, TrainerError> {
        let mut params = Params::new(setup.seed);
        let model = setup.kind.build(&mut params, setup.hidden, setup.seed)?;
        let adam = Adam::new(&params, setup.learning_rate, setup.kind.defaults().clip_norm);
        let held =
            model.batch(Pool::Held, setup.kind.defaults().held, &mut Rng::stream(setup.seed, "held-out batch", 0))?;
        Ok(Trainer { setup, params, model, adam, held, step: 0 })
    }

    /// Steps taken so far, those before a restore included.
    pub(crate) fn step(&self) -> u64 {
        self.step
    }

    /// One batch forward and backward and one update.
    pub(crate) fn advance(&mut self) -> Result<Stepped, TrainerError> {
        let mut rng = Rng::stream(self.setup.seed, "training batch", self.step);
        let batch = self.model.batch(Pool::Training, self.setup.batch, &mut rng)?;
        let score = self.model.score(&batch)?;
        self.expect_finite(score.loss.to_scalar::<f32>()?)?;
        let grads = score.loss.backward()?;
        self.step += 1;
        let gradient_norm = self.adam.update(&self.params, &grads, self.step)?;
        Ok(Stepped { gradient_norm, learning_rate: self.adam.rate(self.step) })
    }

    /// The loss on the held-out batch.
    pub(crate) fn measure(&self) -> Result<Measured, TrainerError> {
        let score = self.model.score(&self.held)?;
        let loss = score.loss.to_scalar::<f32>()?;
        self.expect_finite(loss)?;
        Ok(Measured { loss, accuracy: score.accuracy })
    }

    fn expect_finite(&self, loss: f32) -> Result<(), TrainerError> {
        if loss.is_finite() {
            return Ok(());
        }
        Err(TrainerError::Diverged { step: self.step, loss, learning_rate: self.setup.learning_rate })
    }

    /// Everything the next step depends on.
    pub(crate) fn state(&self) -> Result<State, TrainerError> {
        let mut arrays = BTreeMap::new();
        for ((name, var), moments) in self.params.iter().zip(&self.adam.moments) {
            let shape = var.as_tensor().dims().to_vec();
            let mut put =
                |group: &str, values| arrays.insert(format!("{group}.{name}"), Array { shape: shape.clone(), values });
            put("param", var.as_tensor().flatten_all()?.to_vec1::<f32>()?);
            put("adam.first", moments.first.clone());
            put("adam.second", moments.second.clone());
        }
        let facts = self.setup.facts().into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        Ok(State { step: self.step, facts, arrays })
    }

    /// Continues from a saved state; on an error the trainer is as it was.
    pub(crate) fn restore(&mut self, mut state: State) -> Result<(), TrainerError> {
        for (name, mine) in self.setup.facts() {
            let theirs = state.facts.remove(name).unwrap_or_default();
            if theirs != mine {
                return Err(TrainerError::OtherSetup { name, theirs, mine });
            }
        }
        let mut restored = Vec::with_capacity(self.adam.moments.len());
        for (name, var) in self.params.iter() {
            let mut take = |group: &str| {
                let name = format!("{group}.{name}");
                match state.arrays.remove(&name) {
                    Some(array) if array.shape == var.as_tensor().dims() => Ok(array.values),
                    _ => Err(TrainerError::Incomplete { name }),
                }
            };
            restored.push((take("param")?, take("adam.first")?, take("adam.second")?));
        }
        for (((_, var), moments), (values, first, second)) in
            self.params.iter().zip(&mut self.adam.moments).zip(restored)
        {
            var.set(&Tensor::from_vec(values, var.as_tensor().shape(), &Device::Cpu)?)?;
            moments.first = first;
            moments.second = second;
        }
        self.step = state.step;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [ModelKind; 5] = [ModelKind::Vae, ModelKind::Mlp, ModelKind::Lstm, ModelKind::Gru, ModelKind::Birnn];

    fn small(kind: ModelKind) -> Trainer {
        let learning_rate = kind.defaults().learning_rate;
        Trainer::new(Setup { kind, hidden: 12, batch: 8, learning_rate, seed: 5 }).unwrap()
    }

    /// The gradient candle computes agrees with the slope seen when one parameter is nudged.
    #[test]
    fn gradients_match_finite_differences() {
        for kind in ALL {
            let trainer = small(kind);
            let loss = || f64::from(trainer.model.score(&trainer.held).unwrap().loss.to_scalar::<f32>().unwrap());
            let grads = trainer.model.score(&trainer.held).unwrap().loss.backward().unwrap();
            for (name, var) in trainer.params.iter() {
                let gradient = grads.get(var).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
                // The steepest entry has the best ratio of slope to rounding.
                let (index, &expected) =
                    gradient.iter().enumerate().max_by(|a, b| a.1.abs().total_cmp(&b.1.abs())).unwrap();
                let original = var.as_tensor().flatten_all().unwrap().to_vec1::<f32>().unwrap();
                let nudged = |by: f32| {
                    let mut values = original.clone();
                    values[index] += by;
                    var.set(&Tensor::from_vec(values, var.as_tensor().shape(), &Device::Cpu).unwrap()).unwrap();
                    loss()
                };
                let by = 0.01;
                let slope = (nudged(by) - nudged(-by)) / f64::from(2.0 * by);
                nudged(0.0);
                let expected = f64::from(expected);
                // Losses of single precision resolve slopes to about 1e-7 of the loss over the width of the nudge.
                let tolerance = 0.05 * expected.abs() + 3e-5 * loss().max(1.0);
                assert!((slope - expected).abs() <= tolerance, "{kind:?} {name}[{index}]: {slope} against {expected}");
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
            let mut state = small(kind).state().unwrap();
            let mut pieces = Vec::new();
            for steps in [5, 1, 6] {
                let mut piece = small(kind);
                piece.restore(state).unwrap();
                for _ in 0..steps {
                    piece.advance().unwrap();
                    pieces.push(piece.measure().unwrap().loss.to_bits());
                }
                state = piece.state().unwrap();
            }
            assert_eq!(losses, pieces, "{kind:?}");
            assert_eq!(state, whole.state().unwrap(), "{kind:?}");
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
            let mut trainer = Trainer::new(Setup { kind, hidden: 32, batch: 16, learning_rate, seed: 1 }).unwrap();
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
        let before = trainer.state().unwrap();

        let other = Trainer::new(Setup { batch: 9, ..small(ModelKind::Gru).setup }).unwrap().state().unwrap();
        let error = trainer.restore(other).unwrap_err().to_string();
        assert!(error.contains("batch 9") && error.contains("batch 8"), "{error}");

        let mut torn = before.clone();
        torn.arrays.remove("adam.second.output.bias").unwrap();
        torn.step = 77;
        let error = trainer.restore(torn).unwrap_err().to_string();
        assert!(error.contains("adam.second.output.bias"), "{error}");
        assert_eq!(trainer.state().unwrap(), before);
    }

    #[test]
    fn divergence_is_an_error_and_not_a_checkpoint_of_nonsense() {
        let setup = Setup { learning_rate: 1e30, ..small(ModelKind::Vae).setup };
        let mut trainer = Trainer::new(setup).unwrap();
        let error = (0..20).find_map(|_| trainer.advance().err()).expect("such a rate must diverge").to_string();
        assert!(error.contains("--lr"), "{error}");
    }
}
