//! Operations through all layers: safe layer, bindings, C ABI and back, between threads and between processes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use nccl::all_to_all::AllToAllAlgorithm;
use nccl::cudarc::driver::CudaStream;
use nccl::{Communicator, DataType, Erased, ErasedMut, ErrorKind, NcclType, ReduceOp, World};

use crate::support::{self, ranks_as_processes, ranks_as_threads};

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn start(world: &World) -> Result<(Arc<CudaStream>, Communicator), Box<dyn std::error::Error>> {
    let stream = support::device(world)?.new_stream()?;
    let comm = world.communicator("test").stream(&stream).build()?;
    Ok((stream, comm))
}

/// The element that `from` sends to `to` at `index`.
fn element(from: usize, to: usize, index: usize) -> u32 {
    (from * 1_000_000 + to * 10_000 + index) as u32
}

fn all_to_all(world: &World) -> Outcome {
    let (stream, comm) = start(world)?;
    let (rank, ranks) = (world.rank(), world.size());
    for algorithm in [
        AllToAllAlgorithm::Auto,
        AllToAllAlgorithm::Native,
        AllToAllAlgorithm::Grouped,
    ] {
        for count in [1, 7, 1000, 100_003] {
            let block = |from, to| (0..count).map(move |index| element(from, to, index));
            let sent: Vec<u32> = (0..ranks).flat_map(|to| block(rank, to)).collect();
            let expected: Vec<u32> = (0..ranks).flat_map(|from| block(from, rank)).collect();
            let x = stream.clone_htod(&sent)?;
            let mut y = stream.alloc_zeros::<u32>(ranks * count)?;
            comm.all_to_all_with(&x, &mut y, algorithm)?.wait()?;
            assert_eq!(stream.clone_dtoh(&y)?, expected, "{algorithm:?} {count}");
        }
    }
    comm.finalize()?;
    Ok(())
}

#[test]
fn all_to_all_is_right_between_threads() {
    for ranks in [1, 2, 3, 4] {
        ranks_as_threads(ranks, |world| all_to_all(&world));
    }
}

#[test]
fn all_to_all_is_right_between_processes() {
    for ranks in [1, 2, 4] {
        ranks_as_processes(ranks, |world| all_to_all(&world));
    }
}

fn group(world: &World) -> Outcome {
    let (stream, comm) = start(world)?;
    let (rank, ranks) = (world.rank(), world.size());
    // Rank `from` sends `from + to` elements to `to`; nothing where that is 0.
    let count = |from: usize, to: usize| from + to;
    for _ in 0..3 {
        let sent: Vec<u32> = (0..ranks)
            .flat_map(|to| (0..count(rank, to)).map(move |index| element(rank, to, index)))
            .collect();
        let x = stream.clone_htod(&sent)?;
        let mut parts = (0..ranks)
            .map(|from| stream.alloc_zeros::<u32>(count(from, rank).max(1)))
            .collect::<Result<Vec<_>, _>>()?;
        let done = comm.group(|group| {
            let mut at = 0;
            for (peer, part) in parts.iter_mut().enumerate() {
                group.isend(x.slice(at..at + count(rank, peer)), peer)?;
                group.irecv(part.slice_mut(..count(peer, rank)), peer)?;
                at += count(rank, peer);
            }
            Ok(())
        })?;
        done.wait()?;
        for (from, part) in parts.iter().enumerate() {
            let expected: Vec<u32> = (0..count(from, rank))
                .map(|index| element(from, rank, index))
                .collect();
            assert_eq!(
                stream.clone_dtoh(part)?[..count(from, rank)],
                expected,
                "from {from}"
            );
        }
    }
    comm.finalize()?;
    Ok(())
}

#[test]
fn grouped_messages_of_unequal_lengths_arrive() {
    for ranks in [1, 2, 4] {
        ranks_as_threads(ranks, |world| group(&world));
        ranks_as_processes(ranks, |world| group(&world));
    }
}

#[test]
fn messages_to_one_peer_arrive_in_the_order_they_were_recorded() {
    ranks_as_threads(2, |world| -> Outcome {
        let (stream, comm) = start(&world)?;
        let peer = 1 - world.rank();
        let sent: Vec<_> = (0..5u8)
            .map(|n| stream.clone_htod(&vec![n; 100]))
            .collect::<Result<_, _>>()?;
        let mut received: Vec<_> = (0..5)
            .map(|_| stream.alloc_zeros::<u8>(100))
            .collect::<Result<_, _>>()?;
        comm.group(|group| {
            sent.iter()
                .try_for_each(|buffer| group.isend(buffer, peer))?;
            received
                .iter_mut()
                .try_for_each(|buffer| group.irecv(buffer, peer))
        })?
        .wait()?;
        for (n, buffer) in received.iter().enumerate() {
            assert_eq!(stream.clone_dtoh(buffer)?, vec![n as u8; 100]);
        }
        Ok(())
    });
}

fn reduce<T: NcclType + PartialEq + std::fmt::Debug + num::Small>(world: &World) -> Outcome {
    let (stream, comm) = start(world)?;
    let ranks = world.size();
    let value = |rank: usize, index: usize| T::small(1 + (rank * 2 + index) % 5);
    for count in [1, 33, 10_007] {
        let x: Vec<T> = (0..count).map(|index| value(world.rank(), index)).collect();
        let x = stream.clone_htod(&num::bytes(&x))?;
        for (op, fold) in [
            (ReduceOp::Sum, (|a, b| a + b) as fn(usize, usize) -> usize),
            (ReduceOp::Prod, |a, b| a * b),
            (ReduceOp::Max, usize::max),
            (ReduceOp::Min, usize::min),
        ] {
            let mut y = stream.alloc_zeros::<u8>(count * size_of::<T>())?;
            let (from, to) = (
                Erased::from_bytes(x.as_view(), T::DATA_TYPE)?,
                ErasedMut::from_bytes(y.as_view_mut(), T::DATA_TYPE)?,
            );
            comm.all_reduce(from, to, op)?.wait()?;
            let expected: Vec<T> = (0..count)
                .map(|index| {
                    let values = (0..ranks).map(|rank| 1 + (rank * 2 + index) % 5);
                    T::small(values.reduce(fold).unwrap())
                })
                .collect();
            assert_eq!(
                stream.clone_dtoh(&y)?,
                num::bytes(&expected),
                "{op} {}",
                T::DATA_TYPE
            );
        }
    }
    comm.finalize()?;
    Ok(())
}

/// Small whole numbers in every element type: exact, so that the order of additions does not matter.
mod num {
    use half::{bf16, f16};

    pub(crate) trait Small: Copy {
        fn small(value: usize) -> Self;
        fn to_bytes(self) -> Vec<u8>;
    }

    macro_rules! small {
        ($($type:ty => $convert:expr),* $(,)?) => {
            $(impl Small for $type {
                fn small(value: usize) -> Self {
                    ($convert)(value)
                }
                fn to_bytes(self) -> Vec<u8> {
                    self.to_le_bytes().to_vec()
                }
            })*
        };
    }
    small! {
        i8 => |v| v as i8, u8 => |v| v as u8, i32 => |v| v as i32, u32 => |v| v as u32,
        i64 => |v| v as i64, u64 => |v| v as u64, f32 => |v| v as f32, f64 => |v| v as f64,
        f16 => |v| f16::from_f32(v as f32), bf16 => |v| bf16::from_f32(v as f32),
    }

    pub(crate) fn bytes<T: Small>(values: &[T]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_bytes()).collect()
    }
}

fn reduce_every_type(world: &World) -> Outcome {
    reduce::<i8>(world)?;
    reduce::<u8>(world)?;
    reduce::<i32>(world)?;
    reduce::<u32>(world)?;
    reduce::<i64>(world)?;
    reduce::<u64>(world)?;
    reduce::<half::f16>(world)?;
    reduce::<half::bf16>(world)?;
    reduce::<f32>(world)?;
    reduce::<f64>(world)
}

#[test]
fn all_reduce_is_right_for_every_type_and_operator() {
    ranks_as_threads(3, |world| reduce_every_type(&world));
    ranks_as_processes(2, |world| reduce_every_type(&world));
}

#[test]
fn all_reduce_in_place_and_average_are_right() {
    ranks_as_threads(4, |world| -> Outcome {
        let (stream, comm) = start(&world)?;
        let mut y = stream.clone_htod(&[world.rank() as f32; 1000])?;
        comm.all_reduce_in_place(&mut y, ReduceOp::Avg)?.wait()?;
        assert_eq!(stream.clone_dtoh(&y)?, [1.5; 1000]);
        Ok(())
    });
}

#[test]
fn buffers_that_do_not_fit_are_refused_before_nccl_is_asked() {
    ranks_as_threads(2, |world| -> Outcome {
        let (stream, comm) = start(&world)?;
        let x = stream.alloc_zeros::<f32>(8)?;
        let mut short = stream.alloc_zeros::<f32>(6)?;
        let mut odd = stream.alloc_zeros::<f32>(7)?;
        for error in [
            comm.all_reduce(&x, &mut short, ReduceOp::Sum).unwrap_err(),
            comm.all_to_all(&x, &mut short).unwrap_err(),
            comm.all_to_all(x.slice(..7), &mut odd).unwrap_err(),
        ] {
            assert!(
                matches!(error.kind(), ErrorKind::Length { .. }),
                "{error:#}"
            );
            assert!(error.operation().is_some(), "{error:#}");
        }
        let ints = stream.alloc_zeros::<u8>(24)?;
        let ints = Erased::from_bytes(ints.as_view(), DataType::Int32)?;
        let mut bytes = stream.alloc_zeros::<u8>(24)?;
        let floats = ErasedMut::from_bytes(bytes.as_view_mut(), DataType::Float32)?;
        let error = comm.all_reduce(ints, floats, ReduceOp::Sum).unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::DataTypeMismatch { .. }),
            "{error:#}"
        );
        let error = comm.group(|group| group.irecv(&mut short, 2)).unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::NoSuchRank { rank: 2, .. }),
            "{error:#}"
        );
        let error = comm
            .group(|group| group.isend(&x, world.rank()))
            .unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::UnpairedOwnMessages { .. }),
            "{error:#}"
        );
        // And the communicator still works.
        let mut y = stream.alloc_zeros::<f32>(8)?;
        comm.all_reduce(&x, &mut y, ReduceOp::Sum)?.wait()?;
        Ok(())
    });
}

#[test]
fn nothing_to_send_is_no_operation_for_nccl_and_done_at_once() {
    ranks_as_threads(2, |world| -> Outcome {
        let (stream, comm) = start(&world)?;
        let x = stream.alloc_zeros::<f32>(4)?;
        let mut y = stream.alloc_zeros::<f32>(4)?;
        comm.all_reduce(x.slice(..0), y.slice_mut(..0), ReduceOp::Sum)?
            .wait()?;
        comm.all_to_all(x.slice(..0), y.slice_mut(..0))?.wait()?;
        comm.group(|_| Ok(()))?.wait()?;
        Ok(())
    });
}

#[test]
fn a_failed_closure_issues_nothing_and_leaves_the_communicator_as_it_was() {
    ranks_as_threads(2, |world| -> Outcome {
        let (stream, comm) = start(&world)?;
        let peer = 1 - world.rank();
        let x = stream.clone_htod(&[7u8; 64])?;
        let error = comm.group(|group| {
            group.isend(&x, peer)?;
            group.isend(&x, 99)
        });
        assert!(error.is_err());
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _ = comm.group(|group| {
                group.isend(&x, peer)?;
                panic!("in the middle of a group")
            });
        }));
        assert!(panicked.is_err());
        let mut y = stream.alloc_zeros::<u8>(64)?;
        comm.group(|group| {
            group.isend(&x, peer)?;
            group.irecv(&mut y, peer)
        })?
        .wait()?;
        assert_eq!(stream.clone_dtoh(&y)?, [7; 64]);
        Ok(())
    });
}

#[test]
fn one_communicator_serves_several_threads() {
    ranks_as_threads(2, |world| -> Outcome {
        let (stream, comm) = start(&world)?;
        for _ in 0..20 {
            std::thread::scope(|scope| {
                for _ in 0..3 {
                    scope.spawn(|| {
                        let mut y = stream.clone_htod(&[1i32; 256]).unwrap();
                        comm.all_reduce_in_place(&mut y, ReduceOp::Sum)
                            .unwrap()
                            .wait()
                            .unwrap();
                        assert_eq!(stream.clone_dtoh(&y).unwrap(), [2; 256]);
                    });
                }
            });
        }
        Ok(())
    });
}

/// A value that goes through all ranks, each of which adds one; then all meet.
fn pipeline(world: &World) -> Outcome {
    let (stream, comm) = start(world)?;
    let (rank, ranks) = (comm.rank(), comm.world_size());
    for count in [1, 1000, 100_003] {
        let mut y = stream.alloc_zeros::<u32>(count)?;
        if rank > 0 {
            comm.recv(&mut y, rank - 1)?.wait()?;
            let one_more: Vec<u32> = stream.clone_dtoh(&y)?.iter().map(|one| one + 1).collect();
            stream.memcpy_htod(&one_more, &mut y)?;
        }
        if rank + 1 < ranks {
            comm.send(&y, rank + 1)?.wait()?;
        }
        assert_eq!(stream.clone_dtoh(&y)?, vec![rank as u32; count]);
        comm.barrier()?;
    }
    let x = stream.alloc_zeros::<u32>(4)?;
    let error = comm.send(&x, ranks).unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::NoSuchRank { .. }),
        "{error}"
    );
    // Its counterpart can be in the same group alone.
    let error = comm.send(&x, rank).unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::UnpairedOwnMessages { .. }),
        "{error}"
    );
    comm.barrier()?;
    Ok(())
}

#[test]
fn single_messages_go_through_all_ranks() {
    for ranks in [1, 2, 4] {
        ranks_as_threads(ranks, |world| pipeline(&world));
    }
    ranks_as_processes(3, |world| pipeline(&world));
}

#[test]
fn a_barrier_returns_on_no_rank_before_all_have_called_it() {
    static CALLED: AtomicUsize = AtomicUsize::new(0);
    ranks_as_threads(3, |world| -> Outcome {
        let (_stream, comm) = start(&world)?;
        for round in 1..=20 {
            if comm.rank() == round % 3 {
                std::thread::sleep(Duration::from_millis(5));
            }
            CALLED.fetch_add(1, Ordering::SeqCst);
            comm.barrier()?;
            let called = CALLED.load(Ordering::SeqCst);
            assert!(called >= 3 * round, "{called} of {}", 3 * round);
        }
        Ok(())
    });
}
