//! Layers whose weights the ranks share give the results of the undivided ones, forward and backward.

use candle_core::{DType, Device, Result, Tensor, Var};
use nccl::{ReduceOp, World};
use nccl_candle::{Gradient, TensorCommunicator};

use crate::support::ranks_as_threads;
use crate::{Outcome, assert_close, join};

const TOKENS: usize = 6;
const WIDTH: usize = 8;
const HIDDEN: usize = 24;
/// Sums of the ranks are rounded in another order.
const TOLERANCE: f64 = 1e-9;

fn values(shape: (usize, usize), seed: usize) -> Result<Tensor> {
    let count = shape.0 * shape.1;
    let values = (0..count).map(|index| ((index * 37 + seed * 11) % 101) as f64 / 50.0 - 1.0);
    Tensor::from_iter(values, &Device::Cpu)?.reshape(shape)
}

struct Weights {
    up: Var,
    down: Var,
}

impl Weights {
    fn whole() -> Result<Self> {
        Ok(Self {
            up: Var::from_tensor(&values((WIDTH, HIDDEN), 1)?)?,
            down: Var::from_tensor(&values((HIDDEN, WIDTH), 2)?)?,
        })
    }

    /// Returns this rank's columns of the first and rows of the second.
    fn part(&self, comm: &TensorCommunicator) -> Result<Self> {
        let part = |w: &Var, dim| Var::from_tensor(&share(w, dim, comm)?);
        Ok(Self {
            up: part(&self.up, 1)?,
            down: part(&self.down, 0)?,
        })
    }
}

/// Returns this rank's part along a dimension.
fn share(x: &Tensor, dim: usize, comm: &TensorCommunicator) -> Result<Tensor> {
    x.chunk(comm.world_size(), dim)?[comm.rank()].contiguous()
}

/// A loss that is not linear, so that a wrong sum shows.
fn loss(y: &Tensor) -> Result<Tensor> {
    y.sqr()?.tanh()?.sum_all()
}

fn pair(world: World) -> Outcome {
    let comm = join(&world)?.with_gradient(Gradient::Replicated);
    let whole = Weights::whole()?;
    let x = Var::from_tensor(&values((TOKENS, WIDTH), 3)?)?;
    let reference = x.matmul(&whole.up)?.gelu()?.matmul(&whole.down)?;
    let expected = loss(&reference)?.backward()?;

    let own = whole.part(&comm)?;
    let hidden = comm.copy_to_ranks(&x)?.matmul(&own.up)?.gelu()?;
    let y = comm.all_reduce(&hidden.matmul(&own.down)?, ReduceOp::Sum)?;
    assert_close(&y, &reference, TOLERANCE);
    let found = loss(&y)?.backward()?;

    let of = |var: &Var| expected.get(var).expect("a gradient");
    let up = share(of(&whole.up), 1, &comm)?;
    let down = share(of(&whole.down), 0, &comm)?;
    assert_close(found.get(&own.up).expect("a gradient"), &up, TOLERANCE);
    assert_close(found.get(&own.down).expect("a gradient"), &down, TOLERANCE);
    assert_close(found.get(&x).expect("a gradient"), of(&x), TOLERANCE);
    Ok(())
}

#[test]
fn a_column_parallel_and_a_row_parallel_layer_equal_the_undivided_pair() {
    for ranks in 1..=4 {
        ranks_as_threads(ranks, pair);
    }
}

#[test]
fn between_the_layers_the_ranks_can_share_the_tokens() {
    // Megatron's sequence parallelism: each rank's part of the loss is different.
    ranks_as_threads(3, |world| {
        let comm = join(&world)?.with_gradient(Gradient::Summed);
        let whole = Weights::whole()?;
        let all = Var::from_tensor(&values((TOKENS, WIDTH), 3)?)?;
        let reference = all.matmul(&whole.up)?.gelu()?.matmul(&whole.down)?;
        let expected = loss(&reference)?.backward()?;

        let own = whole.part(&comm)?;
        let x = Var::from_tensor(&share(&all, 0, &comm)?)?;
        let hidden = comm.all_gather(&x, 0)?.matmul(&own.up)?.gelu()?;
        let y = comm.reduce_scatter(&hidden.matmul(&own.down)?, 0, ReduceOp::Sum)?;
        assert_close(&y, &share(&reference, 0, &comm)?, TOLERANCE);
        let found = loss(&y)?.backward()?;

        let of = |var: &Var| expected.get(var).expect("a gradient");
        let up = share(of(&whole.up), 1, &comm)?;
        assert_close(found.get(&own.up).expect("a gradient"), &up, TOLERANCE);
        let tokens = share(of(&all), 0, &comm)?;
        assert_close(found.get(&x).expect("a gradient"), &tokens, TOLERANCE);
        Outcome::Ok(())
    });
}

#[test]
fn a_tensor_without_gradients_is_not_copied_to_the_ranks() {
    ranks_as_threads(1, |world| {
        let comm = join(&world)?;
        let x = Tensor::ones(3, DType::F32, &Device::Cpu)?;
        assert_eq!(comm.copy_to_ranks(&x)?.id(), x.id());
        let view = Var::from_tensor(&values((4, 6), 5)?)?;
        let copied = comm.copy_to_ranks(&view.t()?.narrow(0, 1, 3)?)?;
        assert_close(&copied, &view.t()?.narrow(0, 1, 3)?, 0.0);
        Outcome::Ok(())
    });
}
