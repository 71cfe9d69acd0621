//! The results of one to four ranks equal those that one process computes.

use candle_core::{D, DType, Tensor};
use nccl::{ReduceOp, World};

use crate::support::ranks_as_threads;
use crate::{Outcome, assert_close, assert_same, join, sum, tensor, tensors};

const SHAPE: [usize; 3] = [12, 5, 24];

fn every_operation(world: World) -> Outcome {
    let comm = join(&world)?;
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let all = tensors(ranks, &SHAPE, DType::F32)?;
    let x = &all[rank];
    assert_same(&comm.all_reduce(x, ReduceOp::Sum)?, &sum(&all)?);
    for (root, expected) in all.iter().enumerate() {
        assert_same(&comm.broadcast(x, root)?, expected);
    }
    for dim in 0..3 {
        assert_same(&comm.all_gather(x, dim)?, &Tensor::cat(&all, dim)?);
    }
    assert_same(&comm.all_gather(x, D::Minus1)?, &Tensor::cat(&all, 2)?);
    for dim in [0, 2] {
        let part = comm.reduce_scatter(x, dim, ReduceOp::Sum)?;
        assert_same(&part, &sum(&all)?.chunk(ranks, dim)?[rank]);
    }
    let parts = all.iter().map(|x| Ok(x.chunk(ranks, 0)?[rank].clone()));
    let parts = parts.collect::<candle_core::Result<Vec<_>>>()?;
    let received = comm.all_to_all(x)?;
    assert_same(&received, &Tensor::cat(&parts, 0)?);
    assert_same(&comm.all_to_all(&received)?, x);
    Ok(())
}

#[test]
fn every_operation_gives_what_one_process_computes() {
    for ranks in 1..=4 {
        ranks_as_threads(ranks, every_operation);
    }
}

#[test]
fn every_operator_gives_what_one_process_computes() {
    ranks_as_threads(3, |world| {
        let comm = join(&world)?;
        let all = tensors(3, &[7], DType::F64)?;
        let x = &all[comm.rank()];
        let [a, b, c] = [0, 1, 2].map(|rank| &all[rank]);
        assert_same(
            &comm.all_reduce(x, ReduceOp::Max)?,
            &a.maximum(b)?.maximum(c)?,
        );
        assert_same(
            &comm.all_reduce(x, ReduceOp::Min)?,
            &a.minimum(b)?.minimum(c)?,
        );
        assert_same(&comm.all_reduce(x, ReduceOp::Prod)?, &((a * b)? * c)?);
        let mean = (sum(&all)? / 3.0)?;
        assert_close(&comm.all_reduce(x, ReduceOp::Avg)?, &mean, 1e-12);
        Outcome::Ok(())
    });
}

#[test]
fn in_place_the_tensor_itself_changes() {
    ranks_as_threads(2, |world| {
        let comm = join(&world)?;
        let all = tensors(2, &[4, 3], DType::BF16)?;
        let x = tensor(comm.rank(), &[4, 3], DType::BF16)?;
        comm.all_reduce_in_place(&x, ReduceOp::Sum)?;
        assert_same(&x, &sum(&all)?);
        let y = tensor(comm.rank(), &[4, 3], DType::BF16)?;
        y.inplace_op1(&nccl_candle::ops::Broadcast::new(&comm, 1))?;
        assert_same(&y, &all[1]);
        Outcome::Ok(())
    });
}

#[test]
fn scalars_are_reduced_and_gathered() {
    ranks_as_threads(3, |world| {
        let comm = join(&world)?;
        let x = Tensor::new(comm.rank() as f32 + 1.0, &candle_core::Device::Cpu)?;
        assert_eq!(comm.all_reduce(&x, ReduceOp::Sum)?.to_scalar::<f32>()?, 6.0);
        assert_eq!(comm.all_gather(&x, 0)?.to_vec1::<f32>()?, [1.0, 2.0, 3.0]);
        let raw = x.apply_op1(nccl_candle::ops::AllGather::new(&comm))?;
        assert_eq!(raw.to_vec1::<f32>()?, [1.0, 2.0, 3.0]);
        assert_eq!(comm.broadcast(&x, 2)?.to_scalar::<f32>()?, 3.0);
        Outcome::Ok(())
    });
}

#[test]
fn an_empty_tensor_moves_nothing_and_takes_its_place_in_the_order() {
    ranks_as_threads(2, |world| {
        let comm = join(&world)?;
        let none = Tensor::zeros((0, 3), DType::F32, &candle_core::Device::Cpu)?;
        let thin = Tensor::zeros((4, 0), DType::U8, &candle_core::Device::Cpu)?;
        assert_eq!(comm.all_reduce(&none, ReduceOp::Sum)?.dims(), [0, 3]);
        assert_eq!(comm.all_gather(&none, 0)?.dims(), [0, 3]);
        assert_eq!(comm.all_gather(&none, 1)?.dims(), [0, 6]);
        assert_eq!(comm.reduce_scatter(&thin, 0, ReduceOp::Sum)?.dims(), [2, 0]);
        assert_eq!(comm.all_to_all(&thin)?.dims(), [4, 0]);
        assert_eq!(comm.broadcast(&thin, 1)?.dims(), [4, 0]);
        comm.all_reduce_in_place(&none, ReduceOp::Sum)?;
        let all = tensors(2, &[3], DType::F32)?;
        assert_same(
            &comm.all_reduce(&all[comm.rank()], ReduceOp::Sum)?,
            &sum(&all)?,
        );
        Outcome::Ok(())
    });
}

#[test]
fn a_world_of_one_needs_no_nccl() {
    ranks_as_threads(1, |_| {
        let comm = join(&World::single())?;
        let x = tensor(0, &[6, 2], DType::F16)?;
        assert_same(&comm.all_reduce(&x, ReduceOp::Sum)?, &x);
        assert_same(&comm.all_gather(&x, 1)?, &x);
        assert_same(&comm.reduce_scatter(&x, 0, ReduceOp::Sum)?, &x);
        assert_same(&comm.all_to_all(&x)?, &x);
        comm.all_reduce_in_place(&x, ReduceOp::Sum)?;
        assert_same(&x, &tensor(0, &[6, 2], DType::F16)?);
        Outcome::Ok(())
    });
}
