//! The Adam optimizer, with a state that can be saved.
//!
//! The learning rate falls with the square root of the step, so that the loss does not jitter on its plateau.
//! The rate depends on the step alone: a longer run starts exactly as a shorter one. The next update depends on
//! the parameters, both moments and the number of updates, and on nothing else; a checkpoint holds all of them.
//! Updates run in one fixed order on one thread, so the same gradients give the same bits.

use crate::tensor::Tensor;

const BETA1: f32 = 0.9;
const BETA2: f32 = 0.999;
const EPSILON: f32 = 1e-8;
/// Steps after which the learning rate has fallen to 1/√2; by then the steep part of the built-in models is over.
const DECAY_STEPS: f64 = 100.0;

#[derive(Debug)]
pub(crate) struct Adam {
    learning_rate: f64,
    /// A gradient longer than this, over all parameters, is shortened to this length.
    clip_norm: Option<f32>,
    /// One entry per parameter.
    pub(crate) moments: Vec<Moments>,
}

/// Running means of the gradient and of its square, for every element of a parameter.
#[derive(Debug)]
pub(crate) struct Moments {
    pub(crate) first: Vec<f32>,
    pub(crate) second: Vec<f32>,
}

/// How a gradient is shortened before an update.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Clip {
    /// Length over all parameters, before clipping.
    pub(crate) norm: f32,
    pub(crate) scale: f32,
}

impl Adam {
    pub(crate) fn new(parameters: &[Tensor], learning_rate: f64, clip_norm: Option<f32>) -> Self {
        let zeros = |tensor: &Tensor| {
            let count = tensor.values().len();
            Moments { first: vec![0.0; count], second: vec![0.0; count] }
        };
        Adam { learning_rate, clip_norm, moments: parameters.iter().map(zeros).collect() }
    }

    /// The learning rate of update number `step`, counted from 1.
    pub(crate) fn rate(&self, step: u64) -> f64 {
        self.learning_rate / (1.0 + (step - 1) as f64 / DECAY_STEPS).sqrt()
    }

    /// The length of a gradient, and the factor that shortens it to the limit.
    pub(crate) fn clip(&self, gradients: &[Tensor]) -> Clip {
        let norm = gradients.iter().map(sum_of_squares).sum::<f64>().sqrt() as f32;
        let scale = match self.clip_norm {
            Some(limit) if norm > limit => limit / norm,
            _ => 1.0,
        };
        Clip { norm, scale }
    }

    /// Update number `step`, counted from 1. Returns the length of the gradient before it was clipped.
    pub(crate) fn update(&mut self, parameters: &mut [Tensor], gradients: &[Tensor], step: u64) -> f32 {
        let Clip { norm, scale } = self.clip(gradients);
        // Both bias corrections fold into the rate; `step` is far below 2³¹ in any run.
        let power = step.min(i32::MAX as u64) as i32;
        let correction = (1.0 - f64::from(BETA2).powi(power)).sqrt() / (1.0 - f64::from(BETA1).powi(power));
        let rate = (self.rate(step) * correction) as f32;
        for ((parameter, moments), gradient) in parameters.iter_mut().zip(&mut self.moments).zip(gradients) {
            let state = moments.first.iter_mut().zip(&mut moments.second);
            for ((value, (first, second)), gradient) in
                parameter.values_mut().iter_mut().zip(state).zip(gradient.values())
            {
                let gradient = gradient * scale;
                *first = BETA1 * *first + (1.0 - BETA1) * gradient;
                *second = BETA2 * *second + (1.0 - BETA2) * gradient * gradient;
                *value -= rate * *first / (second.sqrt() + EPSILON);
            }
        }
        norm
    }
}

/// In double precision: the sum of a million small squares does not fit the 24 bits of a float.
fn sum_of_squares(tensor: &Tensor) -> f64 {
    tensor.values().iter().map(|&x| f64::from(x) * f64::from(x)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adam's first update is the learning rate in size, whatever the size of the gradient.
    #[test]
    fn first_update_moves_by_the_learning_rate_against_the_gradient() {
        let mut parameters = [Tensor::filled(1, 2, 1.0)];
        let mut adam = Adam::new(&parameters, 0.01, None);
        let norm = adam.update(&mut parameters, &[Tensor::new(1, 2, vec![300.0, -0.02])], 1);
        let after = parameters[0].values();
        assert!((after[0] - 0.99).abs() < 1e-5 && (after[1] - 1.01).abs() < 1e-5, "{after:?}");
        assert!((norm - 300.0).abs() < 1e-3, "{norm}");
    }

    /// The norm is that of all parameters together: 3, 4 and 12 make 13.
    #[test]
    fn a_long_gradient_is_shortened_to_the_limit() {
        let mut parameters = [Tensor::zeros(1, 2), Tensor::zeros(1, 1)];
        let gradients = [Tensor::new(1, 2, vec![3.0, 4.0]), Tensor::new(1, 1, vec![12.0])];
        let mut adam = Adam::new(&parameters, 0.01, Some(1.3));
        assert_eq!(adam.update(&mut parameters, &gradients, 1), 13.0);
        let first: Vec<f32> = adam.moments.iter().flat_map(|moments| moments.first.clone()).collect();
        for (first, expected) in first.iter().zip([0.03, 0.04, 0.12]) {
            assert!((first - expected).abs() < 1e-6, "{first}, expected {expected}");
        }
    }

    #[test]
    fn the_rate_falls_with_the_square_root_of_the_step() {
        let adam = Adam::new(&[], 0.01, None);
        assert_eq!(adam.rate(1), 0.01);
        assert!((adam.rate(301) - 0.005).abs() < 1e-12);
    }
}
