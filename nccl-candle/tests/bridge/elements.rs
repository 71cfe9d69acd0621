//! Element types that are known while the program runs.

use candle_core::{DType, Tensor};
use nccl::ReduceOp;
use nccl_candle::Error;

use crate::support::ranks_as_threads;
use crate::{Outcome, assert_same, join, sum, tensors, wide};

const TYPES: [DType; 9] = [
    DType::U8,
    DType::U32,
    DType::I32,
    DType::I64,
    DType::BF16,
    DType::F16,
    DType::F32,
    DType::F64,
    DType::F8E4M3,
];

#[test]
fn every_element_type_that_nccl_has_goes_through_every_operation() {
    ranks_as_threads(4, |world| {
        let comm = join(&world)?;
        let rank = comm.rank();
        for dtype in TYPES {
            let all = tensors(4, &[8, 3], dtype)?;
            let x = &all[rank];
            let all = all.iter().map(wide).collect::<Result<Vec<_>, _>>()?;
            let total = comm.all_reduce(x, ReduceOp::Sum)?;
            assert_eq!(total.dtype(), dtype);
            assert_same(&total, &sum(&all)?);
            assert_same(&comm.broadcast(x, 3)?, &all[3]);
            assert_same(&comm.all_gather(x, 0)?, &Tensor::cat(&all, 0)?);
            let part = comm.reduce_scatter(x, 0, ReduceOp::Sum)?;
            assert_same(&part, &sum(&all)?.narrow(0, rank * 2, 2)?);
            let parts = all.iter().map(|x| x.narrow(0, rank * 2, 2));
            let parts = parts.collect::<Result<Vec<_>, _>>()?;
            assert_same(&comm.all_to_all(x)?, &Tensor::cat(&parts, 0)?);
            comm.all_reduce_in_place(x, ReduceOp::Max)?;
            assert_eq!(x.dtype(), dtype);
        }
        Outcome::Ok(())
    });
}

#[test]
fn an_element_type_that_nccl_has_not_is_refused_with_its_name_and_what_to_do() {
    ranks_as_threads(1, |world| {
        let comm = join(&world)?;
        let short = Tensor::zeros(4, DType::I16, &candle_core::Device::Cpu)?;
        let error = comm.all_to_all(&short).unwrap_err();
        let text = format!("{error:#}");
        for part in ["all_to_all", "\"tensors\"", "i16", "to_dtype(DType::I32)"] {
            assert!(text.contains(part), "{part} is not in: {text}");
        }
        assert!(matches!(
            Error::of(&error),
            Some(Error::DType {
                dtype: DType::I16,
                ..
            })
        ));
        assert!(comm.all_reduce_in_place(&short, ReduceOp::Sum).is_err());

        let exponents =
            Tensor::from_raw_buffer(&[1; 4], DType::F8E8M0, &[4], &candle_core::Device::Cpu)?;
        let text = comm.all_gather(&exponents, 0).unwrap_err().to_string();
        assert!(
            text.contains("f8e8m0") && text.contains("tensor of u8"),
            "{text}"
        );
        Outcome::Ok(())
    });
}
