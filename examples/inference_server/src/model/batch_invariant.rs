//! Products whose result for a row depends on that row alone, and not on the number of rows or on how many columns of the
//! matrix a rank has. candle's `rms_norm` already has this property, which is tested here.
//!
//! candle's own `matmul` is faster for large batches, but blocks and vectorises by the shape and the CPU's features: the result
//! for a row may differ beside other rows, on fewer ranks, or on another machine. Here each number is a [`dot`] of two rows,
//! whose order of additions is fixed by the length.

use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, bail};

/// The number of independent partial sums, which the compiler vectorises.
const LANES: usize = 16;

/// Returns the scalar product, always in the same order of additions: lane `i` adds up every 16th product from the `i`-th on,
/// and the lanes are added up as a tree.
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a, a_rest) = a.as_chunks::<LANES>();
    let (b, b_rest) = b.as_chunks::<LANES>();
    let mut lanes = [0.0f32; LANES];
    for (a, b) in a.iter().zip(b) {
        for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += a * b;
        }
    }
    for ((lane, a), b) in lanes.iter_mut().zip(a_rest).zip(b_rest) {
        *lane += a * b;
    }
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
    }
    lanes[0]
}

/// Returns `x · weightᵀ`: `x` is `[rows, in]`, `weight` is `[out, in]`, as in the file.
pub(super) fn linear(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    x.apply_op2_no_bwd(weight, &Linear)
}

struct Linear;

impl CustomOp2 for Linear {
    fn name(&self) -> &'static str {
        "batch-invariant linear"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (rows, width) = x_layout.shape().dims2()?;
        let (out, expected) = weight_layout.shape().dims2()?;
        if width != expected {
            bail!("rows of {width} numbers for a matrix of {expected}");
        }
        let (x, weight) = (dense(x, x_layout)?, dense(weight, weight_layout)?);
        let mut y = vec![0.0; rows * out];
        // A row of the matrix is read once, from the cache for all rows of `x` but the first.
        for (column, weight) in weight.chunks_exact(width).enumerate() {
            for (row, x) in x.chunks_exact(width).enumerate() {
                y[row * out + column] = dot(x, weight);
            }
        }
        Ok((CpuStorage::F32(y), Shape::from((rows, out))))
    }
}

/// Returns the numbers of a contiguous tensor.
fn dense<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    let Some((from, to)) = layout.contiguous_offsets() else {
        bail!("a tensor with gaps, shape {:?}", layout.shape());
    };
    Ok(&storage.as_slice::<f32>()?[from..to])
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use candle_nn::ops::rms_norm;

    use super::*;
    use crate::model::random::normal;

    fn random(shape: (usize, usize), seed: u64) -> Tensor {
        let numbers: Vec<f32> = (0..shape.0 * shape.1)
            .map(|i| normal(seed, i as u64) as f32)
            .collect();
        Tensor::from_vec(numbers, shape, &Device::Cpu).unwrap()
    }

    fn bits(x: &Tensor) -> Vec<u32> {
        let numbers = x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        numbers.into_iter().map(f32::to_bits).collect()
    }

    #[test]
    fn a_row_comes_out_alike_beside_any_number_of_rows_and_with_any_part_of_the_columns() {
        for width in [7, 16, 100, 128] {
            let (x, weight) = (random((33, width), 1), random((48, width), 2));
            let whole = linear(&x, &weight).unwrap();
            for rows in [1, 2, 5, 32] {
                for columns in [1, 3, 6, 16] {
                    let some = x.narrow(0, 33 - rows, rows).unwrap();
                    let part = weight.narrow(0, 24, columns).unwrap();
                    let expected = whole.narrow(0, 33 - rows, rows).unwrap();
                    let expected = expected.narrow(1, 24, columns).unwrap();
                    assert_eq!(bits(&linear(&some, &part).unwrap()), bits(&expected));
                }
            }
            let gain = random((1, width), 3).flatten_all().unwrap();
            let normed = rms_norm(&x, &gain, 1e-5).unwrap();
            let one = rms_norm(&x.narrow(0, 4, 1).unwrap(), &gain, 1e-5).unwrap();
            assert_eq!(bits(&one), bits(&normed.narrow(0, 4, 1).unwrap()));
        }
    }

    #[test]
    fn products_are_those_of_candle_but_for_rounding() {
        let (x, weight) = (random((5, 100), 4), random((9, 100), 5));
        let expected = x.matmul(&weight.t().unwrap()).unwrap();
        let difference = (linear(&x, &weight).unwrap() - expected).unwrap();
        let largest = difference.abs().unwrap().max_all().unwrap();
        assert!(largest.to_scalar::<f32>().unwrap() < 1e-4);
    }

    #[test]
    fn shapes_that_do_not_fit_are_refused() {
        assert!(linear(&random((2, 8), 1), &random((4, 9), 2)).is_err());
        let turned = random((8, 2), 1);
        assert!(linear(&turned.t().unwrap(), &random((4, 8), 2)).is_err());
        let gain = random((1, 9), 3).flatten_all().unwrap();
        assert!(rms_norm(&random((2, 8), 1), &gain, 1e-5).is_err());
    }
}
