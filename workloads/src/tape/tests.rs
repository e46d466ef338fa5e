//! Every operation of the tape against finite differences, and the values of those that are more than one line.

use super::*;
use crate::rng::Rng;

/// A matrix of numbers between −2 and 2, none of them near 0, where `relu` has no slope.
fn random(name: &str, rows: usize, columns: usize) -> Tensor {
    let mut rng = Rng::stream(1, name, 0);
    let mut number = || rng.between(0.2, 2.0) * if rng.below(2) == 0 { 1.0 } else { -1.0 };
    Tensor::new(rows, columns, (0..rows * columns).map(|_| number()).collect())
}

/// Compares the gradients of all parameters with the slopes that appear when one element at a time is changed.
///
/// The loss is a sum of the operation's elements with random weights, so that no error of a gradient cancels out.
fn check(mut parameters: Vec<Tensor>, operation: impl Fn(&mut Tape<'_>, &[Var]) -> Var) {
    let vars: Vec<Var> = (0..parameters.len()).map(Var::parameter).collect();
    let loss = |tape: &mut Tape<'_>| {
        let result = operation(tape, &vars);
        let (rows, columns) = tape.value(result).shape();
        let weights = tape.constant(random("weights", rows, columns));
        let weighted = tape.multiply(result, weights);
        tape.sum(weighted)
    };
    let mut tape = Tape::new(&parameters, 1);
    let recorded = loss(&mut tape);
    let gradients = tape.backward(recorded);
    for (index, gradient) in gradients.iter().enumerate() {
        for (element, &expected) in gradient.values().iter().enumerate() {
            let width = 0.01;
            let original = parameters[index].values()[element];
            let mut loss_at = |value: f32| {
                parameters[index].values_mut()[element] = value;
                let mut tape = Tape::new(&parameters, 1);
                let loss = loss(&mut tape);
                tape.value(loss).scalar()
            };
            let slope = (loss_at(original + width) - loss_at(original - width)) / (2.0 * width);
            loss_at(original);
            // The curvature over the width costs about 1e-4, the rounding of the loss about as much.
            let tolerance = 2e-3 * expected.abs().max(1.0);
            assert!(
                (slope - expected).abs() < tolerance,
                "parameter {index}, element {element}: slope {slope}, gradient {expected}"
            );
        }
    }
}

/// Checks an operation of one matrix.
fn check_unary(operation: impl Fn(&mut Tape<'_>, Var) -> Var) {
    check(vec![random("x", 3, 4)], |tape, vars| operation(tape, vars[0]));
}

/// Checks an operation of two matrices of the same shape.
fn check_binary(operation: impl Fn(&mut Tape<'_>, Var, Var) -> Var) {
    check(vec![random("x", 3, 4), random("y", 3, 4)], |tape, vars| operation(tape, vars[0], vars[1]));
}

#[test]
fn gradient_of_linear_with_a_bias_row() {
    let parameters = vec![random("x", 3, 5), random("w", 5, 4), random("b", 1, 4)];
    check(parameters, |tape, vars| tape.linear(vars[0], vars[1], vars[2]));
}

#[test]
fn gradient_of_linear_with_a_base_of_full_size() {
    let parameters = vec![random("x", 3, 5), random("w", 5, 4), random("b", 3, 4)];
    check(parameters, |tape, vars| tape.linear(vars[0], vars[1], vars[2]));
}

#[test]
fn gradient_of_add() {
    check_binary(|tape, x, y| tape.add(x, y));
}

#[test]
fn gradient_of_subtract() {
    check_binary(|tape, x, y| tape.subtract(x, y));
}

#[test]
fn gradient_of_multiply() {
    check_binary(|tape, x, y| tape.multiply(x, y));
}

#[test]
fn gradient_of_affine() {
    check_unary(|tape, x| tape.affine(x, -1.5, 0.25));
}

#[test]
fn gradient_of_relu() {
    check_unary(|tape, x| tape.relu(x));
}

#[test]
fn gradient_of_tanh() {
    check_unary(|tape, x| tape.tanh(x));
}

#[test]
fn gradient_of_sigmoid() {
    check_unary(|tape, x| tape.sigmoid(x));
}

#[test]
fn gradient_of_exp() {
    check_unary(|tape, x| tape.exp(x));
}

#[test]
fn gradient_of_columns() {
    check_unary(|tape, x| tape.columns(x, 1, 2));
}

#[test]
fn gradient_of_join_columns() {
    check(vec![random("x", 3, 2), random("y", 3, 4)], |tape, vars| tape.join_columns(vars[0], vars[1]));
}

#[test]
fn gradient_of_stack_rows() {
    check(vec![random("x", 1, 4), random("y", 2, 4), random("z", 3, 4)], |tape, vars| tape.stack_rows(vars));
}

#[test]
fn gradient_of_sum() {
    check_unary(|tape, x| tape.sum(x));
}

#[test]
fn gradient_of_cross_entropy() {
    check_unary(|tape, x| {
        let targets = tape.constant(Tensor::one_hot(&[3, 0, 3], 4));
        tape.cross_entropy(x, targets)
    });
}

#[test]
fn gradient_of_binary_cross_entropy() {
    check_unary(|tape, x| {
        let targets = (0..12).map(|i| i as f32 / 11.0).collect();
        let targets = tape.constant(Tensor::new(3, 4, targets));
        tape.binary_cross_entropy(x, targets)
    });
}

/// A value that is used several times receives the contributions of all uses.
#[test]
fn gradient_of_a_value_with_several_uses() {
    check_unary(|tape, x| {
        let square = tape.multiply(x, x);
        let cube = tape.multiply(square, x);
        tape.add(cube, square)
    });
}

#[test]
fn gradient_of_a_parameter_without_use_is_zero() {
    let parameters = [random("x", 3, 4), random("unused", 2, 5)];
    let mut tape = Tape::new(&parameters, 1);
    let loss = tape.sum(Var::parameter(0));
    assert_eq!(tape.backward(loss), [Tensor::filled(3, 4, 1.0), Tensor::zeros(2, 5)]);
}

#[test]
fn parts_and_their_combinations_hold_the_right_elements() {
    let mut tape = Tape::new(&[], 1);
    let left = tape.constant(Tensor::new(2, 2, vec![1.0, 2.0, 3.0, 4.0]));
    let right = tape.constant(Tensor::new(2, 1, vec![5.0, 6.0]));
    let joined = tape.join_columns(left, right);
    assert_eq!(tape.value(joined), &Tensor::new(2, 3, vec![1.0, 2.0, 5.0, 3.0, 4.0, 6.0]));
    let columns = tape.columns(joined, 1, 2);
    assert_eq!(tape.value(columns), &Tensor::new(2, 2, vec![2.0, 5.0, 4.0, 6.0]));
    let stacked = tape.stack_rows(&[columns, left]);
    assert_eq!(tape.value(stacked), &Tensor::new(4, 2, vec![2.0, 5.0, 4.0, 6.0, 1.0, 2.0, 3.0, 4.0]));
}

#[test]
fn losses_match_hand_arithmetic_and_do_not_overflow() {
    let mut tape = Tape::new(&[], 1);
    let logits = tape.constant(Tensor::new(2, 2, vec![0.0, 0.0, 1000.0, 0.0]));
    // The first row is undecided between two classes (ln 2), the second is certain and right (0).
    let classes = tape.constant(Tensor::one_hot(&[1, 0], 2));
    let loss = tape.cross_entropy(logits, classes);
    assert!((tape.value(loss).scalar() - std::f32::consts::LN_2 / 2.0).abs() < 1e-6);
    // Three elements at logit 0 cost ln 2 each, the saturated right one costs nothing; two rows.
    let targets = tape.constant(Tensor::new(2, 2, vec![0.0, 1.0, 1.0, 0.0]));
    let loss = tape.binary_cross_entropy(logits, targets);
    assert!((tape.value(loss).scalar() - 3.0 * std::f32::consts::LN_2 / 2.0).abs() < 1e-6);
}

#[test]
fn sigmoid_saturates() {
    let mut tape = Tape::new(&[], 1);
    let x = tape.constant(Tensor::new(1, 3, vec![0.0, 1000.0, -1000.0]));
    let y = tape.sigmoid(x);
    assert_eq!(tape.value(y).values(), [0.5, 1.0, 0.0]);
}
