//! A feed-forward layer of a transformer that several ranks share: the first matrix is cut by columns, the second by rows, and one
//! all-reduce adds the parts up (Megatron's cut).
//!
//! ```text
//! cargo run --release -p nccl-candle --example tensor_parallel_candle
//! ```

use std::error::Error;
use std::process::ExitCode;

use candle_core::{Device, Result, Tensor, bail};
use nccl::{ReduceOp, World};
use nccl_candle::TensorCommunicator;

const TOKENS: usize = 6;
const WIDTH: usize = 32;
const INNER: usize = 128;

fn main() -> ExitCode {
    nccl::launch::local_ranks(2, rank)
}

/// The layer as one rank has it.
struct FeedForward {
    /// Some columns of the first matrix, and the rows of the second that belong to them.
    up: Tensor,
    down: Tensor,
    tp: TensorCommunicator,
}

impl FeedForward {
    /// Cuts the rank's part out of the whole matrices, as from a file of weights.
    fn part_of(
        up: &Tensor,
        down: &Tensor,
        tp: TensorCommunicator,
        (rank, ranks): (usize, usize),
    ) -> Result<Self> {
        if !INNER.is_multiple_of(ranks) {
            bail!("{INNER} columns cannot be dealt out evenly to {ranks} ranks");
        }
        let part = INNER / ranks;
        Ok(Self {
            up: up.narrow(1, rank * part, part)?.contiguous()?,
            down: down.narrow(0, rank * part, part)?.contiguous()?,
            tp,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        // Every rank has all of `x`, its own part of the inner activations, and a part of the sum.
        let inner = x.matmul(&self.up)?.gelu()?;
        self.tp
            .all_reduce(&inner.matmul(&self.down)?, ReduceOp::Sum)
    }
}

pub(crate) fn rank(world: &World) -> std::result::Result<(), Box<dyn Error>> {
    nccl_emulator::install_unless_gpu()?;
    // With the feature `cuda`: Device::new_cuda_with_stream(world.local_rank())?
    let device = Device::Cpu;
    let tp = TensorCommunicator::join(world, "model/tp", &device)?;

    // The same on all ranks: a model would read them from its file.
    let numbers = |rows: usize, columns: usize, step: f64| {
        let numbers = (0..rows * columns).map(|at| (at as f64 * at as f64 * step).sin() as f32);
        Tensor::from_iter(numbers, &device)?.reshape((rows, columns))
    };
    let (up, down) = (numbers(WIDTH, INNER, 0.7)?, numbers(INNER, WIDTH, 1.3)?);
    let x = numbers(TOKENS, WIDTH, 0.1)?;

    let layer = FeedForward::part_of(&up, &down, tp, (world.rank(), world.size()))?;
    let y = layer.forward(&x)?;

    let whole = x.matmul(&up)?.gelu()?.matmul(&down)?;
    let largest = whole.abs()?.max_all()?.to_scalar::<f32>()?;
    let difference = (y - whole)?.abs()?.max_all()?.to_scalar::<f32>()?;
    println!(
        "with {INNER} / {} columns here, the largest difference is {difference:e}, of values up to {largest:.1}",
        world.size()
    );
    assert!(difference < 1e-5 * largest, "{difference}");
    Ok(())
}
