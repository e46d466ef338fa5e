//! Reverse-mode automatic differentiation.
//!
//! **Problem.** Training needs the slope of one number, the loss, with respect to every parameter of a model.
//!
//! **How.** A [`Tape`] records every operation while the loss is computed: its value, its kind and its
//! operands. Operands are recorded before the operations that use them, so one walk from the end of the tape to
//! its start meets every value after all its uses. [`Tape::backward`] takes this walk. At each operation, the
//! chain rule turns the gradient of the value into contributions to the gradients of the operands, and
//! contributions are added up. A tape serves one batch: it borrows the parameters and the data and is dropped
//! after the walk.
//!
//! **Terms.** *Gradient* of a value: the slope of the loss with respect to each of its elements, a matrix of
//! the same shape. [`Var`]: the place of a value on the tape. *Parameter*: a value that training changes; the
//! parameters are the first values of every tape of a model, in one fixed order, so that a layer keeps the same
//! `Var` for all tapes. *Constant*: a value that depends on no parameter, such as the data. Its gradient is
//! never computed, which saves a product for the first layer of a model.
//!
//! **Properties.** The gradient of every operation is checked against finite differences in a test of its own.
//! The same operations on the same values give the same bits.

use std::borrow::Cow;

use crate::tensor::Tensor;

/// The place of a value on a tape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Var(usize);

impl Var {
    /// The place of parameter number `index`, counted from 0, on every tape.
    pub(crate) fn parameter(index: usize) -> Self {
        Var(index)
    }
}

/// The operations of one computation, in the order in which they were done.
#[derive(Debug)]
pub(crate) struct Tape<'a> {
    nodes: Vec<Node<'a>>,
    /// The first nodes are this many parameters.
    parameters: usize,
    /// Threads that a large product may use.
    threads: usize,
}

#[derive(Debug)]
struct Node<'a> {
    value: Cow<'a, Tensor>,
    operation: Operation,
    /// Whether the value depends on a parameter, and therefore needs a gradient.
    differentiable: bool,
}

/// How a value was computed, with all that its chain rule needs besides the values on the tape.
#[derive(Debug)]
enum Operation {
    /// Not computed: a parameter or a constant.
    Leaf,
    Linear {
        input: Var,
        weight: Var,
        base: Var,
    },
    Add(Var, Var),
    Subtract(Var, Var),
    Multiply(Var, Var),
    Affine {
        input: Var,
        factor: f32,
    },
    Relu(Var),
    Tanh(Var),
    Sigmoid(Var),
    Exp(Var),
    Columns {
        input: Var,
        start: usize,
    },
    JoinColumns(Var, Var),
    StackRows(Vec<Var>),
    Sum(Var),
    CrossEntropy {
        logits: Var,
        probabilities: Tensor,
        targets: Var,
    },
}

impl<'a> Tape<'a> {
    /// A tape that starts with the parameters of a model.
    pub(crate) fn new(parameters: &'a [Tensor], threads: usize) -> Self {
        let parameter =
            |tensor| Node { value: Cow::Borrowed(tensor), operation: Operation::Leaf, differentiable: true };
        Tape { nodes: parameters.iter().map(parameter).collect(), parameters: parameters.len(), threads }
    }

    pub(crate) fn value(&self, var: Var) -> &Tensor {
        &self.nodes[var.0].value
    }

    /// A constant that outlives the tape, such as the data of the batch.
    pub(crate) fn data(&mut self, tensor: &'a Tensor) -> Var {
        self.push(Node { value: Cow::Borrowed(tensor), operation: Operation::Leaf, differentiable: false })
    }

    /// A constant that the tape keeps, such as the first state of a recurrent network.
    pub(crate) fn constant(&mut self, tensor: Tensor) -> Var {
        self.record(tensor, Operation::Leaf, &[])
    }

    fn record(&mut self, value: Tensor, operation: Operation, operands: &[Var]) -> Var {
        let differentiable = operands.iter().any(|operand| self.nodes[operand.0].differentiable);
        self.push(Node { value: Cow::Owned(value), operation, differentiable })
    }

    fn push(&mut self, node: Node<'a>) -> Var {
        self.nodes.push(node);
        Var(self.nodes.len() - 1)
    }

    /// `input · weight + base`. The base has the shape of the result, or is a row vector that is added to every row.
    pub(crate) fn linear(&mut self, input: Var, weight: Var, base: Var) -> Var {
        let (x, w, b) = (self.value(input), self.value(weight), self.value(base));
        let mut result = Tensor::new(x.rows(), w.columns(), b.values().repeat(x.rows() / b.rows()));
        result.add_product(x.view(), w.view(), self.threads);
        self.record(result, Operation::Linear { input, weight, base }, &[input, weight, base])
    }

    /// `left + right`, element by element.
    pub(crate) fn add(&mut self, left: Var, right: Var) -> Var {
        self.binary(left, right, |x, y| x + y, Operation::Add)
    }

    /// `left − right`, element by element.
    pub(crate) fn subtract(&mut self, left: Var, right: Var) -> Var {
        self.binary(left, right, |x, y| x - y, Operation::Subtract)
    }

    /// `left · right`, element by element.
    pub(crate) fn multiply(&mut self, left: Var, right: Var) -> Var {
        self.binary(left, right, |x, y| x * y, Operation::Multiply)
    }

    fn binary(
        &mut self,
        left: Var,
        right: Var,
        function: impl Fn(f32, f32) -> f32,
        operation: fn(Var, Var) -> Operation,
    ) -> Var {
        let value = self.value(left).zip(self.value(right), function);
        self.record(value, operation(left, right), &[left, right])
    }

    /// `factor · x + shift` of every element `x`.
    pub(crate) fn affine(&mut self, input: Var, factor: f32, shift: f32) -> Var {
        self.unary(input, |x| factor * x + shift, Operation::Affine { input, factor })
    }

    /// `x` where it is positive, and 0 elsewhere.
    pub(crate) fn relu(&mut self, input: Var) -> Var {
        self.unary(input, |x| x.max(0.0), Operation::Relu(input))
    }

    pub(crate) fn tanh(&mut self, input: Var) -> Var {
        self.unary(input, f32::tanh, Operation::Tanh(input))
    }

    /// The logistic function `1 / (1 + e^−x)`.
    pub(crate) fn sigmoid(&mut self, input: Var) -> Var {
        self.unary(input, |x| 1.0 / (1.0 + (-x).exp()), Operation::Sigmoid(input))
    }

    pub(crate) fn exp(&mut self, input: Var) -> Var {
        self.unary(input, f32::exp, Operation::Exp(input))
    }

    fn unary(&mut self, input: Var, function: impl Fn(f32) -> f32, operation: Operation) -> Var {
        let value = self.value(input).map(function);
        self.record(value, operation, &[input])
    }

    /// The `count` columns from column `start`.
    pub(crate) fn columns(&mut self, input: Var, start: usize, count: usize) -> Var {
        let whole = self.value(input);
        let mut values = Vec::with_capacity(whole.rows() * count);
        whole.by_row().for_each(|row| values.extend_from_slice(&row[start..start + count]));
        let value = Tensor::new(whole.rows(), count, values);
        self.record(value, Operation::Columns { input, start }, &[input])
    }

    /// The columns of `left`, then the columns of `right`.
    pub(crate) fn join_columns(&mut self, left: Var, right: Var) -> Var {
        let (x, y) = (self.value(left), self.value(right));
        let values = x.by_row().zip(y.by_row()).flat_map(|(x, y)| x.iter().chain(y).copied()).collect();
        let value = Tensor::new(x.rows(), x.columns() + y.columns(), values);
        self.record(value, Operation::JoinColumns(left, right), &[left, right])
    }

    /// The rows of all parts, part after part; there must be a part.
    pub(crate) fn stack_rows(&mut self, parts: &[Var]) -> Var {
        let columns = self.value(parts[0]).columns();
        let mut values = Vec::new();
        parts.iter().for_each(|&part| values.extend_from_slice(self.value(part).values()));
        let value = Tensor::new(values.len() / columns, columns, values);
        self.record(value, Operation::StackRows(parts.to_vec()), parts)
    }

    /// The sum of all elements, a 1 × 1 matrix.
    pub(crate) fn sum(&mut self, input: Var) -> Var {
        // In double precision: a sum of many small numbers does not fit the 24 bits of a float.
        let sum: f64 = self.value(input).values().iter().map(|&x| f64::from(x)).sum();
        self.record(Tensor::filled(1, 1, sum as f32), Operation::Sum(input), &[input])
    }

    /// Mean over the rows of the cross-entropy of the softmax of a row of logits, in nats. A row of targets holds the
    /// probabilities of the classes, which sum to 1; targets are constants.
    pub(crate) fn cross_entropy(&mut self, logits: Var, targets: Var) -> Var {
        let mut probabilities = self.value(logits).clone();
        let mut sum = 0.0;
        for (row, targets) in probabilities.by_row_mut().zip(self.value(targets).by_row()) {
            // Relative to the largest logit, no exponential overflows.
            let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let (mut expected, mut total) = (0.0f32, 0.0f32);
            for (x, target) in row.iter_mut().zip(targets) {
                *x -= largest;
                expected += target * *x;
                *x = x.exp();
                total += *x;
            }
            sum += f64::from(total.ln() - expected);
            row.iter_mut().for_each(|x| *x /= total);
        }
        self.record_cross_entropy(sum, logits, probabilities, targets)
    }

    /// Mean over the rows of the summed cross-entropies of the logistic function of each logit, in nats. A
    /// target is the probability of a yes; targets are constants.
    pub(crate) fn binary_cross_entropy(&mut self, logits: Var, targets: Var) -> Var {
        let mut probabilities = self.value(logits).clone();
        let mut sum = 0.0;
        for (x, target) in probabilities.values_mut().iter_mut().zip(self.value(targets).values()) {
            // No exponent is positive, so that nothing overflows.
            let tail = (-x.abs()).exp();
            sum += f64::from(x.max(0.0) - *x * target + tail.ln_1p());
            *x = if *x >= 0.0 { 1.0 } else { tail } / (1.0 + tail);
        }
        self.record_cross_entropy(sum, logits, probabilities, targets)
    }

    fn record_cross_entropy(&mut self, sum: f64, logits: Var, probabilities: Tensor, targets: Var) -> Var {
        assert_eq!(probabilities.shape(), self.value(targets).shape(), "logits and targets");
        assert!(!self.nodes[targets.0].differentiable, "targets are constants");
        let mean = (sum / probabilities.rows() as f64) as f32;
        let operation = Operation::CrossEntropy { logits, probabilities, targets };
        self.record(Tensor::filled(1, 1, mean), operation, &[logits])
    }

    /// The gradient of each parameter for a loss on this tape, in the order of the parameters.
    pub(crate) fn backward(&self, loss: Var) -> Vec<Tensor> {
        assert_eq!(self.value(loss).shape(), (1, 1), "a loss is a scalar");
        let mut gradients = Gradients { tape: self, sums: vec![None; self.nodes.len()] };
        gradients.add_to(loss, |sum| sum.values_mut()[0] = 1.0);
        for index in (self.parameters..=loss.0).rev() {
            // A value without contributions does not reach the loss.
            if let Some(gradient) = gradients.sums[index].take() {
                gradients.propagate(&self.nodes[index], &gradient);
            }
        }
        let parameters = gradients.sums.into_iter().zip(&self.nodes).take(self.parameters);
        parameters.map(|(sum, node)| sum.unwrap_or_else(|| zeros_like(&node.value))).collect()
    }
}

/// The gradients of a walk backward, as far as they are summed.
struct Gradients<'t, 'a> {
    tape: &'t Tape<'a>,
    /// One place per value on the tape, empty until the first contribution.
    sums: Vec<Option<Tensor>>,
}

impl Gradients<'_, '_> {
    /// Lets `contribute` add to the gradient of a value, unless the value is a constant.
    fn add_to(&mut self, var: Var, contribute: impl FnOnce(&mut Tensor)) {
        let node = &self.tape.nodes[var.0];
        if node.differentiable {
            contribute(self.sums[var.0].get_or_insert_with(|| zeros_like(&node.value)));
        }
    }

    /// The chain rule: turns the gradient of a node into contributions to the gradients of its operands.
    fn propagate(&mut self, node: &Node<'_>, gradient: &Tensor) {
        let (tape, result) = (self.tape, &*node.value);
        let value = |var: Var| tape.value(var);
        match node.operation {
            Operation::Leaf => {}
            Operation::Linear { input, weight, base } => {
                let (x, w, threads) = (value(input), value(weight), tape.threads);
                self.add_to(input, |sum| sum.add_product(gradient.view(), w.transposed(), threads));
                self.add_to(weight, |sum| sum.add_product(x.transposed(), gradient.view(), threads));
                self.add_to(base, |sum| {
                    let repeated = sum.values().len();
                    gradient.values().chunks_exact(repeated).for_each(|part| add(sum.values_mut(), part));
                });
            }
            Operation::Add(left, right) => {
                self.add_to(left, |sum| add(sum.values_mut(), gradient.values()));
                self.add_to(right, |sum| add(sum.values_mut(), gradient.values()));
            }
            Operation::Subtract(left, right) => {
                self.add_to(left, |sum| add(sum.values_mut(), gradient.values()));
                self.add_to(right, |sum| sum.add_zip(gradient, gradient, |g, _| -g));
            }
            Operation::Multiply(left, right) => {
                self.add_to(left, |sum| sum.add_zip(gradient, value(right), |g, y| g * y));
                self.add_to(right, |sum| sum.add_zip(gradient, value(left), |g, x| g * x));
            }
            // The slopes of the functions of one value are written with their result `y`.
            Operation::Affine { input, factor } => {
                self.add_to(input, |sum| sum.add_zip(gradient, result, |g, _| g * factor));
            }
            Operation::Relu(input) => {
                self.add_to(input, |sum| sum.add_zip(gradient, result, |g, y| if y > 0.0 { g } else { 0.0 }));
            }
            Operation::Tanh(input) => {
                self.add_to(input, |sum| sum.add_zip(gradient, result, |g, y| g * (1.0 - y * y)));
            }
            Operation::Sigmoid(input) => {
                self.add_to(input, |sum| sum.add_zip(gradient, result, |g, y| g * y * (1.0 - y)));
            }
            Operation::Exp(input) => {
                self.add_to(input, |sum| sum.add_zip(gradient, result, |g, y| g * y));
            }
            Operation::Columns { input, start } => self.add_to(input, |sum| {
                for (sum, part) in sum.by_row_mut().zip(gradient.by_row()) {
                    add(&mut sum[start..start + part.len()], part);
                }
            }),
            Operation::JoinColumns(left, right) => {
                let middle = value(left).columns();
                self.add_to(left, |sum| {
                    sum.by_row_mut().zip(gradient.by_row()).for_each(|(sum, row)| add(sum, &row[..middle]));
                });
                self.add_to(right, |sum| {
                    sum.by_row_mut().zip(gradient.by_row()).for_each(|(sum, row)| add(sum, &row[middle..]));
                });
            }
            Operation::StackRows(ref parts) => {
                let mut rest = gradient.values();
                for &part in parts {
                    let (own, after) = rest.split_at(value(part).values().len());
                    self.add_to(part, |sum| add(sum.values_mut(), own));
                    rest = after;
                }
            }
            Operation::Sum(input) => {
                let slope = gradient.scalar();
                self.add_to(input, |sum| sum.values_mut().iter_mut().for_each(|sum| *sum += slope));
            }
            Operation::CrossEntropy { logits, ref probabilities, targets } => {
                let slope = gradient.scalar() / probabilities.rows() as f32;
                self.add_to(logits, |sum| sum.add_zip(probabilities, value(targets), |p, t| slope * (p - t)));
            }
        }
    }
}

fn zeros_like(tensor: &Tensor) -> Tensor {
    Tensor::zeros(tensor.rows(), tensor.columns())
}

fn add(sums: &mut [f32], values: &[f32]) {
    assert_eq!(sums.len(), values.len());
    sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
}

#[cfg(test)]
mod tests;
