//! Tensors of several ranks, on the emulator: results compared with those of one process, gradients, memory, faults.

#[path = "../../../tests/support/mod.rs"]
mod support;

mod elements;
mod faults;
mod gradients;
mod operations;
mod parallel;
mod refusals;
mod staging;
mod views;

use candle_core::{DType, Device, Result, Tensor};
use nccl::World;
use nccl_candle::TensorCommunicator;

/// What a rank of a test returns.
type Outcome = std::result::Result<(), Box<dyn std::error::Error>>;

/// Returns the communicator of all ranks, for tensors on the CPU.
fn join(world: &World) -> std::result::Result<TensorCommunicator, nccl_candle::Error> {
    TensorCommunicator::join(world, "tensors", &Device::Cpu)
}

/// Returns a rank's tensor: whole numbers from 1 to 3, so that sums are exact in every type, different on each rank.
fn tensor(rank: usize, shape: &[usize], dtype: DType) -> Result<Tensor> {
    let count: usize = shape.iter().product();
    let values = (0..count).map(|index| ((index * 5 + rank * 7 + index / 3) % 3 + 1) as f32);
    Tensor::from_iter(values, &Device::Cpu)?
        .reshape(shape)?
        .to_dtype(dtype)
}

/// Returns the tensors of all ranks.
fn tensors(ranks: usize, shape: &[usize], dtype: DType) -> Result<Vec<Tensor>> {
    (0..ranks).map(|rank| tensor(rank, shape, dtype)).collect()
}

/// Returns the same values in f64.
fn wide(tensor: &Tensor) -> Result<Tensor> {
    match tensor.dtype() {
        // Directly to f64, candle 0.11.1 recurses until the stack overflows.
        DType::F8E4M3 => tensor.to_dtype(DType::F32)?.to_dtype(DType::F64),
        _ => tensor.to_dtype(DType::F64),
    }
}

/// Returns their sum, as one process computes it in f64.
fn sum(tensors: &[Tensor]) -> Result<Tensor> {
    let mut sum = wide(&tensors[0])?;
    for tensor in &tensors[1..] {
        sum = (sum + wide(tensor)?)?;
    }
    Ok(sum)
}

/// # Panics
/// Unless both have the same shape and the same values; `expected` may be of a wider type.
#[track_caller]
fn assert_same(found: &Tensor, expected: &Tensor) {
    assert_close(found, expected, 0.0);
}

/// As [`assert_same`], but for differences up to `tolerance`.
#[track_caller]
fn assert_close(found: &Tensor, expected: &Tensor, tolerance: f64) {
    assert_eq!(found.dims(), expected.dims());
    let values = |tensor: &Tensor| wide(tensor)?.flatten_all()?.to_vec1::<f64>();
    let (found, expected) = (values(found).unwrap(), values(expected).unwrap());
    let differ = found
        .iter()
        .zip(&expected)
        .any(|(a, b)| (a - b).abs() > tolerance || a.is_nan());
    assert!(!differ, "{found:?}\nis not\n{expected:?}");
}
