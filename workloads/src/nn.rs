//! The few building blocks the models share: named parameters, dense layers and losses.
//!
//! Parameters are kept in the order of their creation and initialised each from its own random stream, named after the
//! parameter, so that a new layer changes nobody else's start. Gradients come from candle's automatic differentiation.
//!
//! All losses are means over the rows of a batch, computed in the log domain where overflow threatens.

use candle_core::{D, DType, Device, Result, Tensor, Var};

use crate::rng::Rng;

/// The trainable numbers of a model.
#[derive(Debug)]
pub(crate) struct Params {
    seed: u64,
    named: Vec<(String, Var)>,
}

impl Params {
    pub(crate) fn new(seed: u64) -> Self {
        Params { seed, named: Vec::new() }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &Var)> {
        self.named.iter().map(|(name, var)| (name.as_str(), var))
    }

    /// A `rows × columns` matrix, uniform with the width Glorot and Bengio give for layers of these sizes.
    pub(crate) fn matrix(&mut self, name: &str, rows: usize, columns: usize) -> Result<Tensor> {
        let mut rng = Rng::stream(self.seed, &format!("init {name}"), 0);
        let bound = (6.0 / (rows + columns) as f32).sqrt();
        let values: Vec<f32> = (0..rows * columns).map(|_| rng.between(-bound, bound)).collect();
        self.add(name, values, &[rows, columns])
    }

    /// A bias row of one constant.
    pub(crate) fn bias(&mut self, name: &str, columns: usize, value: f32) -> Result<Tensor> {
        self.add(name, vec![value; columns], &[columns])
    }

    fn add(&mut self, name: &str, values: Vec<f32>, shape: &[usize]) -> Result<Tensor> {
        let var = Var::from_vec(values, shape, &Device::Cpu)?;
        let tensor = var.as_tensor().clone();
        self.named.push((name.to_owned(), var));
        Ok(tensor)
    }
}

/// A dense layer, `x · w + b`.
#[derive(Debug)]
pub(crate) struct Dense {
    weight: Tensor,
    bias: Tensor,
}

impl Dense {
    pub(crate) fn new(params: &mut Params, name: &str, inputs: usize, outputs: usize) -> Result<Self> {
        let weight = params.matrix(&format!("{name}.weight"), inputs, outputs)?;
        let bias = params.bias(&format!("{name}.bias"), outputs, 0.0)?;
        Ok(Dense { weight, bias })
    }

    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.matmul(&self.weight)?.broadcast_add(&self.bias)
    }
}

/// The logistic function, written with tanh because candle differentiates that in one pass.
pub(crate) fn sigmoid(x: &Tensor) -> Result<Tensor> {
    x.affine(0.5, 0.0)?.tanh()?.affine(0.5, 0.5)
}

/// Mean cross-entropy of rows of logits against class numbers.
pub(crate) fn cross_entropy(logits: &Tensor, classes: &Tensor) -> Result<Tensor> {
    let shifted = logits.broadcast_sub(&logits.max_keepdim(D::Minus1)?.detach())?;
    let log_sum = shifted.exp()?.sum_keepdim(D::Minus1)?.log()?;
    let chosen = shifted.gather(&classes.unsqueeze(1)?, 1)?;
    (log_sum - chosen)?.mean_all()
}

/// Part of the rows whose largest logit is the right class, 0 to 1.
pub(crate) fn accuracy(logits: &Tensor, classes: &Tensor) -> Result<f64> {
    let right = logits.argmax(D::Minus1)?.eq(classes)?.to_dtype(DType::F32)?.mean_all()?.to_scalar::<f32>()?;
    Ok(f64::from(right))
}

/// Cross-entropy of independent pixels, summed over a row's pixels and averaged over rows.
/// Written as `max(x, 0) − x·t + ln(1 + e^−|x|)`, which cannot overflow.
pub(crate) fn pixel_cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let tail = logits.abs()?.neg()?.exp()?.affine(1.0, 1.0)?.log()?;
    let loss = ((logits.relu()? - (logits * targets)?)? + tail)?;
    loss.sum_all()? / logits.dim(0)? as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scalar(tensor: &Tensor) -> f32 {
        tensor.to_scalar::<f32>().unwrap()
    }

    #[test]
    fn losses_match_hand_arithmetic() {
        let cpu = &Device::Cpu;
        let logits = Tensor::new(&[[0f32, 0.0], [100.0, 0.0]], cpu).unwrap();
        let classes = Tensor::new(&[1u32, 0], cpu).unwrap();
        // The first row is undecided between two classes (ln 2), the second is certain and right (0).
        assert!((scalar(&cross_entropy(&logits, &classes).unwrap()) - std::f32::consts::LN_2 / 2.0).abs() < 1e-6);
        assert!((accuracy(&logits, &classes).unwrap() - 0.5).abs() < 1e-9);
        let targets = Tensor::new(&[[0f32, 1.0], [1.0, 0.0]], cpu).unwrap();
        // Three pixels at logit 0 cost ln 2 each, the saturated right one costs nothing; two rows.
        let expected = 3.0 * std::f32::consts::LN_2 / 2.0;
        assert!((scalar(&pixel_cross_entropy(&logits, &targets).unwrap()) - expected).abs() < 1e-6);
        let half = sigmoid(&Tensor::new(&[0f32, 1000.0, -1000.0], cpu).unwrap()).unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(half, [0.5, 1.0, 0.0]);
    }
}
