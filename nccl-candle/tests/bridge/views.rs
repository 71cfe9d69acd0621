//! Views: with an offset, and with strides.

use candle_core::{DType, Tensor};
use nccl::ReduceOp;
use nccl_candle::{Error, ops};

use crate::support::ranks_as_threads;
use crate::{Outcome, assert_same, join, sum, tensors};

#[test]
fn a_view_that_begins_later_is_taken_as_it_is() {
    ranks_as_threads(2, |world| {
        let comm = join(&world)?;
        let all = tensors(2, &[6, 5], DType::F32)?;
        let views = all.iter().map(|x| x.narrow(0, 1, 4));
        let views = views.collect::<Result<Vec<_>, _>>()?;
        let x = &views[comm.rank()];
        assert!(x.is_contiguous() && x.layout().start_offset() == 5);
        // The operation itself, which refuses what would have to be copied before.
        let y = x.apply_op1(ops::AllReduce::new(&comm, ReduceOp::Sum))?;
        assert_same(&y, &sum(&views)?);
        assert_same(&comm.all_gather(x, 0)?, &Tensor::cat(&views, 0)?);
        let part = comm.reduce_scatter(x, 0, ReduceOp::Sum)?;
        assert_same(&part, &sum(&views)?.chunk(2, 0)?[comm.rank()]);
        let single = x.get(2)?.get(3)?;
        assert_same(&comm.broadcast(&single, 1)?, &views[1].get(2)?.get(3)?);
        Outcome::Ok(())
    });
}

#[test]
fn in_place_nothing_beside_the_view_changes() {
    ranks_as_threads(2, |world| {
        let comm = join(&world)?;
        let all = tensors(2, &[4, 3], DType::I64)?;
        let x = all[comm.rank()].copy()?;
        comm.all_reduce_in_place(&x.narrow(0, 1, 2)?, ReduceOp::Sum)?;
        let own = &all[comm.rank()];
        assert_same(&x.get(0)?, &own.get(0)?);
        assert_same(&x.narrow(0, 1, 2)?, &sum(&all)?.narrow(0, 1, 2)?);
        assert_same(&x.get(3)?, &own.get(3)?);
        Outcome::Ok(())
    });
}

#[test]
fn a_strided_view_is_made_contiguous_by_the_methods_and_refused_by_the_operations() {
    ranks_as_threads(2, |world| {
        let comm = join(&world)?;
        let all = tensors(2, &[4, 6], DType::F32)?;
        let views = all.iter().map(|x| x.t()?.narrow(0, 2, 4));
        let views = views.collect::<Result<Vec<_>, _>>()?;
        let x = &views[comm.rank()];
        assert_same(&comm.all_reduce(x, ReduceOp::Sum)?, &sum(&views)?);
        assert_same(&comm.all_gather(x, 1)?, &Tensor::cat(&views, 1)?);
        assert_same(&comm.broadcast(x, 0)?, &views[0]);
        let part = comm.reduce_scatter(x, 1, ReduceOp::Sum)?;
        assert_same(&part, &sum(&views)?.chunk(2, 1)?[comm.rank()]);

        let error = x.apply_op1(ops::AllToAll::new(&comm)).unwrap_err();
        let text = format!("{error:#}");
        assert!(
            text.contains("all_to_all") && text.contains("[1, 6]"),
            "{text}"
        );
        assert!(text.contains("contiguous()"), "{text}");
        let error = comm.all_reduce_in_place(x, ReduceOp::Sum).unwrap_err();
        assert!(
            matches!(Error::of(&error), Some(Error::Strided { .. })),
            "{error:#}"
        );
        Outcome::Ok(())
    });
}
