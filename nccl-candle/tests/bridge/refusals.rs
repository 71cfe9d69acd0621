//! Refusals before NCCL is called, and where the error can be read.

use candle_core::{DType, Tensor};
use nccl::ReduceOp;
use nccl_candle::Error;

use crate::support::ranks_as_threads;
use crate::{Outcome, assert_same, join, sum, tensor, tensors};

#[test]
fn a_dimension_that_the_ranks_cannot_share_is_refused_with_rank_shape_and_ranks() {
    ranks_as_threads(3, |world| {
        let comm = join(&world)?;
        let x = tensor(comm.rank(), &[6, 4], DType::F32)?;
        let wrong = x.narrow(0, 0, 5)?;
        let errors = [
            comm.reduce_scatter(&wrong, 0, ReduceOp::Sum).unwrap_err(),
            comm.reduce_scatter(&x, 1, ReduceOp::Sum).unwrap_err(),
            comm.all_to_all(&wrong).unwrap_err(),
        ];
        let rank = format!("rank {}", comm.rank());
        for (error, shape) in errors.iter().zip(["[5, 4]", "[6, 4]", "[5, 4]"]) {
            let text = format!("{error:#}");
            for part in [shape, &rank, "3 ranks", "multiple of 3"] {
                assert!(text.contains(part), "{part} is not in: {text}");
            }
            assert!(matches!(Error::of(error), Some(Error::NotDivisible { .. })));
        }
        let error = comm
            .reduce_scatter(&x.sum_all()?, 0, ReduceOp::Sum)
            .unwrap_err();
        assert!(
            matches!(Error::of(&error), Some(Error::Scalar { ranks: 3, .. })),
            "{error:#}"
        );
        // Nothing was issued, so the ranks are still together.
        let all = tensors(3, &[6, 4], DType::F32)?;
        assert_same(&comm.all_reduce(&x, ReduceOp::Sum)?, &sum(&all)?);
        Outcome::Ok(())
    });
}

#[test]
fn an_error_that_candle_lost_can_be_read_beside_the_call() {
    ranks_as_threads(1, |world| {
        let comm = join(&world)?;
        assert!(comm.last_error().is_none());
        let layer = comm.clone();
        let x = Tensor::zeros(3, DType::F32, &candle_core::Device::Cpu)?;
        // Converts the error to text, as model layers do.
        let lost = layer
            .broadcast(&x, 7)
            .map_err(|error| candle_core::Error::wrap(format!("{error:#}")));
        let lost = lost.unwrap_err();
        assert!(Error::of(&lost).is_none());
        let error = comm.last_error().expect("it is kept");
        let kind = error.nccl().expect("it is nccl's").kind();
        assert!(
            matches!(kind, nccl::ErrorKind::NoSuchRank { rank: 7, .. }),
            "{error:#}"
        );
        Outcome::Ok(())
    });
}
