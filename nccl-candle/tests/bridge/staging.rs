//! The staging memory of tensors on the CPU.

use std::sync::Barrier;

use candle_core::DType;
use nccl::cudarc::driver::{DriverError, sys};
use nccl::{ReduceOp, World};

use crate::support::ranks_as_threads;
use crate::{Outcome, assert_same, join, sum, tensor, tensors};

#[test]
fn memory_is_kept_for_the_next_operation_and_grows_in_powers_of_two() {
    ranks_as_threads(2, |world| {
        let comm = join(&world)?;
        let rank = comm.rank();
        assert_eq!(comm.staged().allocations, 0);
        let small = tensor(rank, &[100], DType::F32)?;
        comm.all_reduce(&small, ReduceOp::Sum)?;
        assert_eq!((comm.staged().areas, comm.staged().bytes), (1, 4096));
        let large = tensor(rank, &[3000], DType::F32)?;
        comm.all_reduce(&large, ReduceOp::Sum)?;
        let grown = comm.staged();
        // 12000 bytes to read and as many to write.
        assert_eq!((grown.areas, grown.bytes, grown.allocations), (1, 32768, 2));
        for _ in 0..20 {
            comm.all_reduce(&small, ReduceOp::Sum)?;
            comm.all_gather(&small, 0)?;
            comm.reduce_scatter(&large, 0, ReduceOp::Sum)?;
            comm.all_to_all(&large)?;
        }
        assert_eq!(comm.staged(), grown);
        Outcome::Ok(())
    });
}

#[test]
fn what_is_left_of_a_larger_tensor_does_not_get_into_a_smaller_one() {
    ranks_as_threads(2, |world| {
        let comm = join(&world)?;
        for length in [4096, 1, 65, 0, 1000, 3] {
            let all = tensors(2, &[length], DType::U8)?;
            assert_same(
                &comm.all_reduce(&all[comm.rank()], ReduceOp::Sum)?,
                &sum(&all)?,
            );
        }
        Outcome::Ok(())
    });
}

#[test]
fn memory_that_was_reserved_is_used() {
    ranks_as_threads(1, |_| {
        let comm = join(&World::single())?;
        comm.reserve(100_000)?;
        let reserved = comm.staged();
        assert_eq!(
            (reserved.areas, reserved.bytes, reserved.allocations),
            (1, 1 << 17, 1)
        );
        comm.all_reduce(&tensor(0, &[10_000], DType::F32)?, ReduceOp::Sum)?;
        assert_eq!(comm.staged(), reserved);
        Outcome::Ok(())
    });
}

#[test]
fn threads_have_memory_of_their_own() {
    ranks_as_threads(1, |_| {
        const THREADS: usize = 4;
        let comm = join(&World::single())?;
        let together = Barrier::new(THREADS);
        std::thread::scope(|scope| {
            let threads = (0..THREADS).map(|thread| {
                let (comm, together) = (comm.clone(), &together);
                scope.spawn(move || {
                    let x = tensor(thread, &[5000], DType::F32).unwrap();
                    for _ in 0..25 {
                        together.wait();
                        assert_same(&comm.all_reduce(&x, ReduceOp::Sum).unwrap(), &x);
                    }
                })
            });
            for thread in threads.collect::<Vec<_>>() {
                thread.join().expect("a thread got what it gave");
            }
        });
        let staged = comm.staged();
        assert!((1..=THREADS).contains(&staged.areas), "{staged:?}");
        assert_eq!(staged.bytes, staged.areas * (1 << 16));
        assert_eq!(staged.allocations, staged.areas as u64);
        Outcome::Ok(())
    });
}

#[test]
fn a_communicator_that_goes_frees_its_memory() {
    ranks_as_threads(1, |world| {
        let context = crate::support::device(&world)?;
        let free = || context.mem_get_info().map(|(free, _)| free);
        let before = free()?;
        for _ in 0..3 {
            let comm = join(&World::single())?;
            comm.all_reduce(&tensor(0, &[1 << 20], DType::F32)?, ReduceOp::Sum)?;
            assert!(free()? < before);
        }
        nccl_tools::testing::eventually("the memory is free again", || {
            free().is_ok_and(|free| free == before)
        });
        assert!(nccl_emulator::violations().is_empty());
        Outcome::Ok(())
    });
}

#[test]
fn memory_that_may_still_be_in_use_is_given_up_instead_of_used_again() {
    if !crate::support::needs_emulator("a device that fails on purpose") {
        return;
    }
    ranks_as_threads(1, |world| {
        let comm = join(&World::single())?;
        let x = tensor(0, &[10], DType::F32)?;
        comm.all_reduce(&x, ReduceOp::Sum)?;
        // From now on the device fails.
        let stream = crate::support::device(&world)?.new_stream()?;
        let gone = stream.alloc_zeros::<u8>(64)?.leak();
        // SAFETY: nothing on the emulator can touch memory that is not there.
        let refused = unsafe {
            nccl::cudarc::driver::result::free_sync(gone)?;
            nccl::cudarc::driver::result::memset_d8_async(gone, 1, 64, stream.cu_stream())
        };
        assert!(refused.is_err() && stream.synchronize().is_err());
        let error = comm.all_reduce(&x, ReduceOp::Sum).unwrap_err();
        assert!(
            format!("{error:#}").contains("CUDA_ERROR_ILLEGAL_ADDRESS"),
            "{error:#}"
        );
        let staged = comm.staged();
        assert_eq!((staged.areas, staged.bytes, staged.leaked), (0, 0, 1));
        Outcome::Ok(())
    });
}

/// In global mode a capture forbids all threads of the process the calls that may wait, unless they have exempted
/// themselves.
#[test]
fn a_global_capture_of_another_thread_outlives_collectives_of_tensors_on_the_cpu() {
    ranks_as_threads(1, |world| {
        let comm = join(&World::single())?;
        let captured = crate::support::device(&world)?.new_stream()?;
        captured.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL)?;
        std::thread::scope(|scope| {
            let reduces = scope.spawn(|| {
                // The second needs a larger area, and frees the first.
                for length in [10, 10_000] {
                    let x = tensor(0, &[length], DType::F32)?;
                    assert_same(&comm.all_reduce(&x, ReduceOp::Sum)?, &x);
                }
                candle_core::Result::Ok(())
            });
            reduces.join().expect("no panic")
        })?;
        captured.end_capture(sys::CUgraphInstantiate_flags(0))?;
        let staged = comm.staged();
        assert_eq!((staged.areas, staged.leaked), (1, 0));
        Outcome::Ok(())
    });
}

#[test]
fn an_error_that_the_program_has_left_in_the_context_does_not_fail_a_collective() {
    ranks_as_threads(1, |_| {
        let comm = join(&World::single())?;
        let context = comm.communicator().stream().context();
        let error = Err(DriverError(
            sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
        ));
        for length in [10, 10, 10_000] {
            context.record_err::<()>(error);
            let x = tensor(0, &[length], DType::F32)?;
            assert_same(&comm.all_reduce(&x, ReduceOp::Sum)?, &x);
            assert_eq!(context.check_err(), error);
        }
        assert_eq!(comm.staged().leaked, 0);
        Outcome::Ok(())
    });
}
