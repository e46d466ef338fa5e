//! Adam with a state that can be saved.
//!
//! The learning rate falls with the square root of the step, which is what takes the jitter out of a plateau; it depends on
//! nothing but the step, so that a longer run starts exactly as a shorter one. The moments are plain vectors in the order of the parameters, so that a checkpoint holds everything the next update
//! depends on: parameters, both moments and the step count. Updates run in one fixed order on one thread and are
//! therefore the same bit for bit wherever the same gradients come in.

use candle_core::backprop::GradStore;
use candle_core::{Device, Result, Tensor};

use crate::nn::Params;

const BETA1: f32 = 0.9;
const BETA2: f32 = 0.999;
const EPSILON: f32 = 1e-8;
/// Steps after which the learning rate has fallen to 1/√2; by then the steep part of the built-in models is over.
const DECAY_STEPS: f64 = 100.0;

/// First and second moment of every parameter.
#[derive(Debug)]
pub(crate) struct Adam {
    learning_rate: f64,
    /// Gradients longer than this, taken over all parameters, are shortened to it.
    clip_norm: Option<f32>,
    pub(crate) moments: Vec<Moments>,
}

#[derive(Debug)]
pub(crate) struct Moments {
    pub(crate) first: Vec<f32>,
    pub(crate) second: Vec<f32>,
}

impl Adam {
    pub(crate) fn new(params: &Params, learning_rate: f64, clip_norm: Option<f32>) -> Self {
        let zeros = |(_, var): (&str, &candle_core::Var)| {
            let count = var.as_tensor().elem_count();
            Moments { first: vec![0.0; count], second: vec![0.0; count] }
        };
        Adam { learning_rate, clip_norm, moments: params.iter().map(zeros).collect() }
    }

    /// The learning rate of update number `step`, counted from 1.
    pub(crate) fn rate(&self, step: u64) -> f64 {
        self.learning_rate / (1.0 + (step - 1) as f64 / DECAY_STEPS).sqrt()
    }

    /// Update number `step`, counted from 1. Returns the length of the gradient before clipping.
    pub(crate) fn update(&mut self, params: &Params, grads: &GradStore, step: u64) -> Result<f32> {
        let mut gradients = Vec::with_capacity(self.moments.len());
        for (name, var) in params.iter() {
            let gradient =
                grads.get(var).ok_or_else(|| candle_core::Error::Msg(format!("parameter {name} has no gradient")))?;
            gradients.push(gradient.flatten_all()?.to_vec1::<f32>()?);
        }
        // In double precision: the squares of a million small numbers do not fit a float's 24 bits.
        let norm = gradients.iter().flatten().map(|&g| f64::from(g) * f64::from(g)).sum::<f64>().sqrt() as f32;
        let scale = match self.clip_norm {
            Some(limit) if norm > limit => limit / norm,
            _ => 1.0,
        };
        // Both bias corrections fold into the step size; `step` is far below 2³¹ in any run.
        let power = step.min(i32::MAX as u64) as i32;
        let correction = (1.0 - f64::from(BETA2).powi(power)).sqrt() / (1.0 - f64::from(BETA1).powi(power));
        let rate = (self.rate(step) * correction) as f32;
        for (((_, var), moments), gradient) in params.iter().zip(&mut self.moments).zip(gradients) {
            let mut values = var.as_tensor().flatten_all()?.to_vec1::<f32>()?;
            let state = moments.first.iter_mut().zip(&mut moments.second);
            for ((value, (first, second)), gradient) in values.iter_mut().zip(state).zip(gradient) {
                let gradient = gradient * scale;
                *first = BETA1 * *first + (1.0 - BETA1) * gradient;
                *second = BETA2 * *second + (1.0 - BETA2) * gradient * gradient;
                *value -= rate * *first / (second.sqrt() + EPSILON);
            }
            var.set(&Tensor::from_vec(values, var.as_tensor().shape(), &Device::Cpu)?)?;
        }
        Ok(norm)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_update_moves_by_the_learning_rate_against_the_gradient() {
        // Adam's first step is the learning rate in size, whatever the gradient's size: m̂/√v̂ = ±1.
        let mut params = Params::new(1);
        let x = params.bias("x", 2, 1.0).unwrap();
        let mut adam = Adam::new(&params, 0.01, None);
        let weights = Tensor::new(&[300f32, -0.02], &Device::Cpu).unwrap();
        let grads = (x * weights).unwrap().sum_all().unwrap().backward().unwrap();
        let norm = adam.update(&params, &grads, 1).unwrap();
        let after = params.iter().next().unwrap().1.as_tensor().to_vec1::<f32>().unwrap();
        assert!((after[0] - 0.99).abs() < 1e-5 && (after[1] - 1.01).abs() < 1e-5, "{after:?}");
        assert!((norm - 300.0).abs() < 1e-3);
    }
}
