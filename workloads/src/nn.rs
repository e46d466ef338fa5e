//! What the models are built of: named parameters, dense layers and the measure of right answers.
//!
//! Each parameter is initialised from a random stream of its own, named after the parameter, so that a new
//! layer does not change how the other layers start. Parameters keep the order in which they were created; this
//! is also their order on every [`Tape`].

use crate::rng::Rng;
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;

/// The trainable numbers of a model.
#[derive(Debug)]
pub(crate) struct Params {
    seed: u64,
    names: Vec<String>,
    tensors: Vec<Tensor>,
}

impl Params {
    pub(crate) fn new(seed: u64) -> Self {
        Params { seed, names: Vec::new(), tensors: Vec::new() }
    }

    pub(crate) fn names(&self) -> &[String] {
        &self.names
    }

    pub(crate) fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    pub(crate) fn tensors_mut(&mut self) -> &mut [Tensor] {
        &mut self.tensors
    }

    /// A `rows × columns` matrix, uniform with the width that Glorot and Bengio give for layers of these sizes.
    pub(crate) fn matrix(&mut self, name: &str, rows: usize, columns: usize) -> Var {
        let mut rng = Rng::stream(self.seed, &format!("init {name}"), 0);
        let bound = (6.0 / (rows + columns) as f32).sqrt();
        let values = (0..rows * columns).map(|_| rng.between(-bound, bound)).collect();
        self.add(name, Tensor::new(rows, columns, values))
    }

    /// A row vector of zeros.
    pub(crate) fn bias(&mut self, name: &str, columns: usize) -> Var {
        self.add(name, Tensor::zeros(1, columns))
    }

    fn add(&mut self, name: &str, tensor: Tensor) -> Var {
        self.names.push(name.to_owned());
        self.tensors.push(tensor);
        Var::parameter(self.tensors.len() - 1)
    }
}

/// A dense layer, `x · weight + bias`.
#[derive(Debug)]
pub(crate) struct Dense {
    weight: Var,
    bias: Var,
}

impl Dense {
    pub(crate) fn new(params: &mut Params, name: &str, inputs: usize, outputs: usize) -> Self {
        let weight = params.matrix(&format!("{name}.weight"), inputs, outputs);
        let bias = params.bias(&format!("{name}.bias"), outputs);
        Dense { weight, bias }
    }

    pub(crate) fn forward(&self, tape: &mut Tape<'_>, x: Var) -> Var {
        tape.linear(x, self.weight, self.bias)
    }
}

/// The part of the rows, 0 to 1, in which logits and targets have their largest element in the same column.
pub(crate) fn accuracy(logits: &Tensor, targets: &Tensor) -> f64 {
    let largest =
        |row: &[f32]| (1..row.len()).fold(0, |best, column| if row[column] > row[best] { column } else { best });
    let right = logits.by_row().zip(targets.by_row()).filter(|(logits, targets)| largest(logits) == largest(targets));
    right.count() as f64 / targets.rows() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accuracy_counts_the_rows_whose_largest_logit_is_the_right_class() {
        let logits = Tensor::new(4, 3, vec![0.1, 0.3, 0.2, 9.0, 1.0, 2.0, -3.0, -2.0, -1.0, 5.0, 6.0, 7.0]);
        let targets = Tensor::one_hot(&[1, 0, 2, 0], 3);
        assert!((accuracy(&logits, &targets) - 0.75).abs() < 1e-9);
    }

    #[test]
    fn a_parameter_starts_the_same_whatever_was_created_before_it() {
        let mut alone = Params::new(1);
        alone.matrix("weight", 3, 4);
        let mut second = Params::new(1);
        second.matrix("other", 3, 4);
        second.matrix("weight", 3, 4);
        assert_eq!(alone.tensors()[0], second.tensors()[1]);
        assert_ne!(second.tensors()[0], second.tensors()[1]);
    }
}
