//! Matrices of single-precision numbers and their product.
//!
//! **Problem.** Training needs few operations on matrices, but it needs them fast, and with the same bits on
//! every run.
//!
//! **How.** A [`Tensor`] is a matrix with its rows stored one after the other. The product is the only costly
//! operation; the `matrixmultiply` crate computes it with the vector instructions that the processor has. A
//! [`View`] tells the product to read a matrix as stored or transposed, so that no transposed copy is made. A
//! large product is divided among threads by blocks of result rows.
//!
//! **Terms.** *Row vector*: a matrix of one row. *Multiplication*: one multiply-add of a product; a product of an
//! `m × k` and a `k × n` matrix has `m · k · n`.
//!
//! **Properties.** A product has the same bits for every number of threads: each element is summed by one
//! thread, in an order that does not depend on the division. Shapes that do not fit are mistakes in the
//! program, and panic.

use std::thread;

/// Blocks of a divided product start at multiples of this. The kernels compute tiles of at most this many rows, and a
/// tile that was cut by a division could be rounded in another way.
const TILE_ROWS: usize = 16;
/// Multiplications that are worth a thread: about 0.1 ms of one core, several times what it costs to start and
/// join it.
const THREAD_MULTIPLICATIONS: usize = 4 << 20;

/// A matrix.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tensor {
    rows: usize,
    columns: usize,
    /// `rows × columns` values, row after row.
    values: Vec<f32>,
}

impl Tensor {
    pub(crate) fn new(rows: usize, columns: usize, values: Vec<f32>) -> Self {
        assert_eq!(values.len(), rows * columns, "a {rows} × {columns} matrix");
        Tensor { rows, columns, values }
    }

    pub(crate) fn filled(rows: usize, columns: usize, value: f32) -> Self {
        Tensor { rows, columns, values: vec![value; rows * columns] }
    }

    pub(crate) fn zeros(rows: usize, columns: usize) -> Self {
        Tensor::filled(rows, columns, 0.0)
    }

    /// One row per class number: 1 in the column of that number, 0 elsewhere.
    pub(crate) fn one_hot(numbers: &[u32], classes: usize) -> Self {
        let mut tensor = Tensor::zeros(numbers.len(), classes);
        for (row, &number) in tensor.values.chunks_exact_mut(classes).zip(numbers) {
            row[number as usize] = 1.0;
        }
        tensor
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn columns(&self) -> usize {
        self.columns
    }

    pub(crate) fn shape(&self) -> (usize, usize) {
        (self.rows, self.columns)
    }

    pub(crate) fn values(&self) -> &[f32] {
        &self.values
    }

    pub(crate) fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }

    /// The rows, first to last.
    pub(crate) fn by_row(&self) -> impl Iterator<Item = &[f32]> {
        self.values.chunks_exact(self.columns)
    }

    /// The rows, first to last, to be changed.
    pub(crate) fn by_row_mut(&mut self) -> impl Iterator<Item = &mut [f32]> {
        self.values.chunks_exact_mut(self.columns)
    }

    /// The only element of a 1 × 1 matrix.
    pub(crate) fn scalar(&self) -> f32 {
        assert_eq!(self.shape(), (1, 1), "a scalar is a 1 × 1 matrix");
        self.values[0]
    }

    /// The matrix of `function(x)` for every element `x`.
    pub(crate) fn map(&self, function: impl Fn(f32) -> f32) -> Tensor {
        Tensor { values: self.values.iter().map(|&x| function(x)).collect(), ..*self }
    }

    /// The matrix of `function(x, y)` for every element `x` and the element `y` of `other` at the same place.
    pub(crate) fn zip(&self, other: &Tensor, function: impl Fn(f32, f32) -> f32) -> Tensor {
        assert_eq!(self.shape(), other.shape());
        Tensor { values: self.values.iter().zip(&other.values).map(|(&x, &y)| function(x, y)).collect(), ..*self }
    }

    /// Adds `function(x, y)` to every element, with the elements `x` and `y` of two other matrices at the same place.
    pub(crate) fn add_zip(&mut self, left: &Tensor, right: &Tensor, function: impl Fn(f32, f32) -> f32) {
        assert!(self.shape() == left.shape() && self.shape() == right.shape());
        for ((sum, &x), &y) in self.values.iter_mut().zip(&left.values).zip(&right.values) {
            *sum += function(x, y);
        }
    }

    /// This matrix as operand of a product.
    pub(crate) fn view(&self) -> View<'_> {
        let Tensor { rows, columns, ref values } = *self;
        View { values, rows, columns, row_stride: columns, column_stride: 1 }
    }

    /// The transpose of this matrix as operand of a product.
    pub(crate) fn transposed(&self) -> View<'_> {
        let Tensor { rows, columns, ref values } = *self;
        View { values, rows: columns, columns: rows, row_stride: 1, column_stride: columns }
    }

    /// Adds the product `left · right` to this matrix, on at most `threads` threads.
    pub(crate) fn add_product(&mut self, left: View<'_>, right: View<'_>, threads: usize) {
        assert_eq!(left.columns, right.rows, "the inner sizes of a product are equal");
        assert_eq!(
            self.shape(),
            (left.rows, right.columns),
            "the product has the rows of the left and the columns of the right"
        );
        self.add_product_in_blocks(left, right, block_rows(left.rows, left.columns * right.columns, threads));
    }

    /// Adds the product `left · right`, with one thread for each block of `block_rows` rows.
    fn add_product_in_blocks(&mut self, left: View<'_>, right: View<'_>, block_rows: usize) {
        let mut blocks = self.values.chunks_mut(block_rows * right.columns).zip(left.blocks(block_rows));
        let first = blocks.next();
        thread::scope(|scope| {
            for (result, left) in blocks {
                scope.spawn(move || add_product_block(result, left, right));
            }
            if let Some((result, left)) = first {
                add_product_block(result, left, right);
            }
        });
    }
}

/// A matrix as operand of a product: the element of row `i` and column `j` is
/// `values[i · row_stride + j · column_stride]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct View<'a> {
    values: &'a [f32],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a> View<'a> {
    /// Blocks of `block_rows` rows each; the last one may have fewer.
    fn blocks(self, block_rows: usize) -> impl Iterator<Item = View<'a>> {
        (0..self.rows).step_by(block_rows).map(move |start| View {
            values: &self.values[start * self.row_stride..],
            rows: block_rows.min(self.rows - start),
            ..self
        })
    }
}

/// Rows that each thread computes of a product with `rows` rows of `row_multiplications` each.
fn block_rows(rows: usize, row_multiplications: usize, threads: usize) -> usize {
    let worthwhile = rows * row_multiplications / THREAD_MULTIPLICATIONS;
    rows.div_ceil(threads.min(worthwhile).max(1)).next_multiple_of(TILE_ROWS)
}

/// Adds `left · right` to `result`, which holds the rows of the product one after the other.
fn add_product_block(result: &mut [f32], left: View<'_>, right: View<'_>) {
    let (rows, inner, columns) = (left.rows, left.columns, right.columns);
    assert_eq!(result.len(), rows * columns);
    let stride = |stride: usize| stride as isize;
    // SAFETY: a view's rows, columns and strides reach only elements of its values, because a view is made of a whole
    // matrix or of a block of its rows. The result has `rows × columns` elements, and nothing else refers to them.
    unsafe {
        matrixmultiply::sgemm(
            rows,
            inner,
            columns,
            1.0,
            left.values.as_ptr(),
            stride(left.row_stride),
            stride(left.column_stride),
            right.values.as_ptr(),
            stride(right.row_stride),
            stride(right.column_stride),
            1.0,
            result.as_mut_ptr(),
            stride(columns),
            1,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    fn random(rows: usize, columns: usize) -> Tensor {
        let mut rng = Rng::stream(1, "tensor", (rows * 1000 + columns) as u64);
        Tensor::new(rows, columns, (0..rows * columns).map(|_| rng.between(-1.0, 1.0)).collect())
    }

    fn transpose(tensor: &Tensor) -> Tensor {
        let (rows, columns) = tensor.shape();
        let values = (0..columns).flat_map(|j| (0..rows).map(move |i| tensor.values[i * columns + j]));
        Tensor::new(columns, rows, values.collect())
    }

    #[test]
    fn product_matches_hand_arithmetic() {
        let left = Tensor::new(2, 3, vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let right = Tensor::new(3, 2, vec![1.0, 0.0, 0.0, 1.0, 2.0, -1.0]);
        let mut sum = Tensor::new(2, 2, vec![100.0, 200.0, 300.0, 400.0]);
        sum.add_product(left.view(), right.view(), 1);
        assert_eq!(sum.values, [107.0, 199.0, 316.0, 399.0]);
    }

    #[test]
    fn product_reads_transposed_operands() {
        let (left, right) = (random(7, 5), random(5, 19));
        let mut expected = Tensor::zeros(7, 19);
        expected.add_product(left.view(), right.view(), 1);
        let mut from_transposed = Tensor::zeros(7, 19);
        from_transposed.add_product(transpose(&left).transposed(), transpose(&right).transposed(), 1);
        assert_eq!(from_transposed, expected);
    }

    /// The row count is no multiple of a tile, the inner size is above what the kernels sum at once, and the
    /// product is added to numbers that are not zero: all this could change the rounding.
    #[test]
    fn product_has_the_same_bits_for_every_division() {
        let (left, right) = (random(85, 600), random(600, 21));
        let (left_transpose, right_transpose) = (transpose(&left), transpose(&right));
        for (left, right) in [(left.view(), right.view()), (left_transpose.transposed(), right_transpose.transposed())]
        {
            let product = |block_rows| {
                let mut sum = random(85, 21);
                sum.add_product_in_blocks(left, right, block_rows);
                sum
            };
            for block_rows in [TILE_ROWS, 2 * TILE_ROWS, 3 * TILE_ROWS] {
                assert_eq!(product(block_rows), product(85), "blocks of {block_rows} rows");
            }
        }
    }

    #[test]
    fn only_large_products_are_divided() {
        assert_eq!(block_rows(32, 64 * 256, 8), 32, "half a million multiplications");
        assert_eq!(block_rows(64, 784 * 400, 1), 64, "one thread");
        assert_eq!(block_rows(64, 784 * 400, 2), 32);
        assert_eq!(block_rows(64, 784 * 400, 1024), 16, "no block is smaller than a tile");
        assert_eq!(block_rows(65, 1 << 30, 2), 48, "blocks start at multiples of a tile");
    }

    #[test]
    fn one_hot_rows_have_a_one_in_the_column_of_their_class() {
        let tensor = Tensor::one_hot(&[2, 0], 3);
        assert_eq!(tensor, Tensor::new(2, 3, vec![0.0, 0.0, 1.0, 1.0, 0.0, 0.0]));
    }
}
