//! Every collective against a plain reference: in and out of place, alone and in groups, on several
//! streams, between threads and between processes, and made of messages as for an older library.

use std::sync::Arc;

use nccl::cudarc::driver::CudaStream;
use nccl::{Communicator, ErrorKind, ReduceOp, World};

use crate::support::{self, Ranks, ranks_as_processes, ranks_as_threads};

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn start(world: &World) -> Result<(Arc<CudaStream>, Communicator), Box<dyn std::error::Error>> {
    let stream = support::device(world)?.new_stream()?;
    let comm = world.communicator("test").stream(&stream).build()?;
    Ok((stream, comm))
}

/// Element `index` of block `block` of rank `rank`.
fn element(rank: usize, block: usize, index: usize) -> i32 {
    (rank * 10_007 + block * 101 + index) as i32
}

fn block(rank: usize, block: usize, n: usize) -> Vec<i32> {
    (0..n).map(|index| element(rank, block, index)).collect()
}

/// One block for each rank.
fn blocks(rank: usize, ranks: usize, n: usize) -> Vec<i32> {
    (0..ranks).flat_map(|to| block(rank, to, n)).collect()
}

/// The sum over all ranks of block `of`.
fn sum(ranks: usize, of: usize, n: usize) -> Vec<i32> {
    let add = |index| (0..ranks).map(|rank| element(rank, of, index)).sum();
    (0..n).map(add).collect()
}

/// Runs every collective alone, with `n` elements in a block and every rank as root.
fn alone(comm: &Communicator, stream: &Arc<CudaStream>, n: usize) -> Outcome {
    let (rank, ranks) = (comm.rank(), comm.world_size());
    let up = |data: &[i32]| stream.clone_htod(data);
    let down = |data: &nccl::cudarc::driver::CudaSlice<i32>| stream.clone_dtoh(data);
    let one = || stream.alloc_zeros::<i32>(n);
    let all = || stream.alloc_zeros::<i32>(n * ranks);

    let x = up(&block(rank, 0, n))?;
    let xs = up(&blocks(rank, ranks, n))?;
    let gathered: Vec<i32> = (0..ranks).flat_map(|from| block(from, 0, n)).collect();
    let unchanged = block(rank, 0, n);

    let mut y = one()?;
    comm.all_reduce(&x, &mut y, ReduceOp::Sum)?.wait()?;
    assert_eq!(down(&y)?, sum(ranks, 0, n));
    let mut y = up(&block(rank, 0, n))?;
    comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
    assert_eq!(down(&y)?, sum(ranks, 0, n));

    let mut y = all()?;
    comm.all_gather(&x, &mut y)?.wait()?;
    assert_eq!(down(&y)?, gathered);
    let mut own = vec![0; n * ranks];
    own[rank * n..(rank + 1) * n].copy_from_slice(&block(rank, 0, n));
    let mut y = up(&own)?;
    comm.all_gather_in_place(&mut y)?.wait()?;
    assert_eq!(down(&y)?, gathered);

    let mut y = one()?;
    comm.reduce_scatter(&xs, &mut y, ReduceOp::Sum)?.wait()?;
    assert_eq!(down(&y)?, sum(ranks, rank, n));
    let mut y = up(&blocks(rank, ranks, n))?;
    comm.reduce_scatter_in_place(&mut y, ReduceOp::Sum)?
        .wait()?;
    assert_eq!(down(&y)?[rank * n..(rank + 1) * n], sum(ranks, rank, n));

    let mut y = all()?;
    comm.all_to_all(&xs, &mut y)?.wait()?;
    let exchanged: Vec<i32> = (0..ranks).flat_map(|from| block(from, rank, n)).collect();
    assert_eq!(down(&y)?, exchanged);

    for root in 0..ranks {
        let is_root = rank == root;

        let mut y = one()?;
        comm.broadcast(is_root.then_some(&x), &mut y, root)?
            .wait()?;
        assert_eq!(down(&y)?, block(root, 0, n));
        let mut y = up(&block(rank, 0, n))?;
        comm.broadcast_in_place(&mut y, root)?.wait()?;
        assert_eq!(down(&y)?, block(root, 0, n));

        let mut y = up(&unchanged)?;
        comm.reduce(&x, is_root.then_some(&mut y), ReduceOp::Sum, root)?
            .wait()?;
        let expected = if is_root {
            sum(ranks, 0, n)
        } else {
            unchanged.clone()
        };
        assert_eq!(down(&y)?, expected);
        let mut y = up(&unchanged)?;
        comm.reduce_in_place(&mut y, ReduceOp::Sum, root)?.wait()?;
        assert_eq!(down(&y)?, expected);

        let mut y = all()?;
        comm.gather(&x, is_root.then_some(&mut y), root)?.wait()?;
        let expected = if is_root {
            gathered.clone()
        } else {
            vec![0; n * ranks]
        };
        assert_eq!(down(&y)?, expected);
        let mut y = up(if is_root { &own } else { &unchanged })?;
        comm.gather_in_place(&mut y, root)?.wait()?;
        let expected = if is_root {
            gathered.clone()
        } else {
            unchanged.clone()
        };
        assert_eq!(down(&y)?, expected);

        let mut y = one()?;
        comm.scatter(is_root.then_some(&xs), &mut y, root)?.wait()?;
        assert_eq!(down(&y)?, block(root, rank, n));
        let own_blocks = blocks(rank, ranks, n);
        let mut y = up(if is_root { &own_blocks } else { &unchanged })?;
        comm.scatter_in_place(&mut y, root)?.wait()?;
        let at = if is_root { rank * n } else { 0 };
        assert_eq!(down(&y)?[at..at + n], block(root, rank, n));
    }
    Ok(())
}

fn every_collective(world: &World) -> Outcome {
    let (stream, comm) = start(world)?;
    for n in [1, 5, 4096, 100_003] {
        alone(&comm, &stream, n)?;
    }
    comm.finalize()?;
    Ok(())
}

#[test]
fn every_collective_is_right_between_threads() {
    for ranks in [1, 2, 3, 4] {
        ranks_as_threads(ranks, |world| every_collective(&world));
    }
}

#[test]
fn every_collective_is_right_between_processes() {
    for ranks in [2, 3] {
        ranks_as_processes(ranks, |world| every_collective(&world));
    }
}

#[test]
fn a_library_without_gather_scatter_and_all_to_all_gets_messages() {
    // A library of that age does not let ranks share a device.
    if !support::needs_devices(3) {
        return;
    }
    Ranks::new(3)
        .variable("NCCL_EMULATOR_VERSION", "2.27.7")
        .threads(|world| -> Outcome {
            let (stream, comm) = start(&world)?;
            assert!(comm.library().version() < nccl::Version::new(2, 28, 0));
            alone(&comm, &stream, 1000)?;
            comm.finalize()?;
            Ok(())
        });
}

#[test]
fn a_world_of_one_rank_needs_no_library() {
    // In a process of its own, in which no other code loads a library.
    ranks_as_threads(1, |_| -> Outcome {
        let world = World::single();
        let (stream, comm) = start(&world)?;
        assert!(comm.library().path().to_string_lossy().starts_with("(none"));
        alone(&comm, &stream, 1000)?;
        let x = stream.clone_htod(&[1u8, 2, 3])?;
        let mut y = stream.alloc_zeros::<u8>(3)?;
        comm.group(|group| {
            group.isend(&x, 0)?;
            group.irecv(&mut y, 0)
        })?
        .wait()?;
        assert_eq!(stream.clone_dtoh(&y)?, [1, 2, 3]);
        // Several at once, of several lengths, and of two such worlds in one group.
        let part = comm
            .split("part", Some(3), 0)?
            .ok_or("a colour was given")?;
        part.warm_up(std::time::Duration::from_secs(20))?;
        let mut parts = stream.alloc_zeros::<u8>(6)?;
        let (mut long, mut short) = parts.split_at_mut(4);
        let ends = nccl::group(|group| {
            let group_of_part = group.on(&part)?;
            group_of_part.isend(x.slice(1..), 0)?;
            group_of_part.irecv(&mut short, 0)?;
            let group = group.on(&comm)?;
            group.isend(&x, 0)?;
            group.isend(x.slice(..1), 0)?;
            group.irecv(long.slice_mut(..3), 0)
        });
        assert!(matches!(
            ends.unwrap_err().kind(),
            ErrorKind::UnpairedOwnMessages { .. }
        ));
        let (mut first, mut second) = long.split_at_mut(3);
        nccl::group(|group| {
            let group_of_part = group.on(&part)?;
            group_of_part.isend(x.slice(1..), 0)?;
            group_of_part.irecv(&mut short, 0)?;
            let group = group.on(&comm)?;
            group.isend(&x, 0)?;
            group.isend(x.slice(..1), 0)?;
            group.irecv(&mut first, 0)?;
            group.irecv(&mut second, 0)
        })?
        .wait()?;
        assert_eq!(stream.clone_dtoh(&parts)?, [1, 2, 3, 1, 2, 3]);
        let error = comm.pre_mul_sum(2.0f32).unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Unsupported { .. }),
            "{error:#}"
        );
        comm.finalize()?;
        Ok(())
    });
}

#[test]
fn collectives_and_messages_of_one_group_are_issued_together() {
    ranks_as_threads(3, |world| -> Outcome {
        let (stream, comm) = start(&world)?;
        let (rank, ranks, n) = (comm.rank(), comm.world_size(), 1000);
        let x = stream.clone_htod(&block(rank, 0, n))?;
        let xs = stream.clone_htod(&blocks(rank, ranks, n))?;
        let mut reduced = stream.alloc_zeros::<i32>(n)?;
        let mut gathered = stream.alloc_zeros::<i32>(n * ranks)?;
        let mut exchanged = stream.alloc_zeros::<i32>(n * ranks)?;
        let mut received = stream.alloc_zeros::<i32>(n)?;
        let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        let done = comm.group(|group| {
            group.isend(&x, next)?;
            group.irecv(&mut received, previous)?;
            group.all_reduce(&x, &mut reduced, ReduceOp::Sum)?;
            group.all_gather(&x, &mut gathered)?;
            group.all_to_all(&xs, &mut exchanged)
        })?;
        done.wait()?;
        assert_eq!(stream.clone_dtoh(&received)?, block(previous, 0, n));
        assert_eq!(stream.clone_dtoh(&reduced)?, sum(ranks, 0, n));
        let expected: Vec<i32> = (0..ranks).flat_map(|from| block(from, 0, n)).collect();
        assert_eq!(stream.clone_dtoh(&gathered)?, expected);
        let expected: Vec<i32> = (0..ranks).flat_map(|from| block(from, rank, n)).collect();
        assert_eq!(stream.clone_dtoh(&exchanged)?, expected);
        comm.finalize()?;
        Ok(())
    });
}

/// NCCL pairs messages to oneself in their order and copies as much as was sent, so that a longer one
/// would be written past the end of a shorter buffer.
#[test]
fn a_collective_made_of_messages_must_not_come_between_a_message_to_oneself_and_its_counterpart() {
    ranks_as_threads(2, |world| -> Outcome {
        let (stream, comm) = start(&world)?;
        let me = comm.rank();
        let x = stream.clone_htod(&[7u8; 64])?;
        let mut y = stream.alloc_zeros::<u8>(64)?;
        let all = stream.alloc_zeros::<u8>(1024)?;
        let mut exchanged = stream.alloc_zeros::<u8>(1024)?;
        let refused = |error: nccl::Error| {
            assert!(
                matches!(error.kind(), ErrorKind::UnpairedOwnMessages { .. }),
                "{error:#}"
            );
        };
        refused(
            comm.group(|group| {
                group.isend(&x, me)?;
                group.all_to_all(&all, &mut exchanged)?;
                group.irecv(&mut y, me)
            })
            .unwrap_err(),
        );
        refused(
            comm.group(|group| {
                group.irecv(&mut y, me)?;
                group.all_to_all_v(&all, &[512; 2], &mut exchanged, &[512; 2])?;
                group.isend(&x, me)
            })
            .unwrap_err(),
        );
        let gathered = comm.group(|group| {
            group.isend(&x, me)?;
            group.gather(all.slice(..512), (me == 0).then_some(&mut exchanged), 0)?;
            group.irecv(&mut y, me)
        });
        if me == 0 {
            refused(gathered.unwrap_err());
        } else {
            // Rank 1 sends rank 0 its block once rank 0 gathers.
            gathered?;
            assert_eq!(stream.clone_dtoh(&y)?, [7; 64]);
        }
        if me == 0 {
            comm.gather(all.slice(..512), Some(&mut exchanged), 0)?;
        }
        // In order it works.
        comm.group(|group| {
            group.isend(&x, me)?;
            group.irecv(&mut y, me)?;
            group.all_to_all(&all, &mut exchanged)
        })?
        .wait()?;
        assert_eq!(stream.clone_dtoh(&y)?, [7; 64]);
        comm.finalize()?;
        Ok(())
    });
}

#[test]
fn scaled_values_are_summed_each_with_the_factor_of_its_rank() {
    ranks_as_threads(3, |world| -> Outcome {
        let (stream, comm) = start(&world)?;
        let other = world.communicator("other").stream(&stream).build()?;
        let factor = comm.pre_mul_sum(comm.rank() as f32 + 1.0)?;
        let mut y = stream.clone_htod(&[1.0f32, 10.0])?;
        comm.all_reduce_in_place(&mut y, &factor)?.wait()?;
        assert_eq!(stream.clone_dtoh(&y)?, [6.0, 60.0]);

        let error = other.all_reduce_in_place(&mut y, &factor).unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::WrongReduction { .. }),
            "{error:#}"
        );
        let mut wrong = stream.alloc_zeros::<f64>(2)?;
        let error = comm.all_reduce_in_place(&mut wrong, &factor).unwrap_err();
        assert!(format!("{error:#}").contains("f64"), "{error:#}");
        drop(factor);

        // A group keeps its operator until it is issued.
        let mut z = stream.clone_htod(&[1.0f32, 10.0])?;
        comm.group(|group| {
            let twice = comm.pre_mul_sum(2.0f32)?;
            group.all_reduce_in_place(&mut z, &twice)
        })?
        .wait()?;
        assert_eq!(stream.clone_dtoh(&z)?, [6.0, 60.0]);
        comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
        other.finalize()?;
        comm.finalize()?;
        Ok(())
    });
}

#[test]
fn an_operation_goes_to_the_stream_that_on_names() {
    ranks_as_threads(2, |world| -> Outcome {
        let (stream, comm) = start(&world)?;
        let other = stream.context().new_stream()?;
        // On the communicator's own stream these would wait for each other in opposite orders.
        let mut a = stream.clone_htod(&[1i32; 1000])?;
        let mut b = other.clone_htod(&[2i32; 1000])?;
        let first = comm.all_reduce_in_place(&mut a, ReduceOp::Sum)?;
        let second = comm.on(&other).all_reduce_in_place(&mut b, ReduceOp::Sum)?;
        second.wait()?;
        first.wait()?;
        assert_eq!(stream.clone_dtoh(&a)?, [2; 1000]);
        assert_eq!(other.clone_dtoh(&b)?, [4; 1000]);
        comm.finalize()?;
        Ok(())
    });
}

#[test]
fn parts_of_all_lengths_are_exchanged_and_empty_ones_skipped() {
    ranks_as_threads(4, |world| -> Outcome {
        let (stream, comm) = start(&world)?;
        let (rank, ranks) = (comm.rank(), comm.world_size());
        let count = |from: usize, to: usize| (from * 3 + to * 5) % 4 * 100;
        let send_counts: Vec<usize> = (0..ranks).map(|to| count(rank, to)).collect();
        let recv_counts: Vec<usize> = (0..ranks).map(|from| count(from, rank)).collect();
        let sent: Vec<i32> = (0..ranks)
            .flat_map(|to| block(rank, to, send_counts[to]))
            .collect();
        let expected: Vec<i32> = (0..ranks)
            .flat_map(|from| block(from, rank, recv_counts[from]))
            .collect();
        let x = stream.clone_htod(&sent)?;
        let mut y = stream.alloc_zeros::<i32>(expected.len() + 7)?;
        comm.all_to_all_v(&x, &send_counts, &mut y, &recv_counts)?
            .wait()?;
        assert_eq!(stream.clone_dtoh(&y)?[..expected.len()], expected);

        let error = comm
            .all_to_all_v(&x, &send_counts[1..], &mut y, &recv_counts)
            .unwrap_err();
        assert!(
            format!("{error:#}").contains("one for each rank"),
            "{error:#}"
        );
        let error = comm
            .all_to_all_v(&x, &vec![usize::MAX; ranks], &mut y, &recv_counts)
            .unwrap_err();
        assert!(
            format!("{error:#}").contains("the send buffer"),
            "{error:#}"
        );
        let mut lopsided = recv_counts.clone();
        lopsided[rank] += 1;
        let error = comm
            .all_to_all_v(&x, &send_counts, &mut y, &lopsided)
            .unwrap_err();
        assert!(format!("{error:#}").contains("from itself"), "{error:#}");
        comm.all_to_all_v(&x, &vec![0; ranks], &mut y, &vec![0; ranks])?
            .wait()?;
        comm.finalize()?;
        Ok(())
    });
}

#[test]
fn a_root_or_a_length_that_does_not_fit_is_refused_before_nccl_is_asked() {
    ranks_as_threads(2, |world| -> Outcome {
        let (stream, comm) = start(&world)?;
        let x = stream.alloc_zeros::<f32>(4)?;
        let mut y = stream.alloc_zeros::<f32>(7)?;
        let error = comm.broadcast(Some(&x), &mut y, 2).unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::NoSuchRank { .. }),
            "{error:#}"
        );
        assert_eq!(
            error.operation().and_then(|operation| operation.root),
            Some(2)
        );
        let error = comm.all_gather(&x, &mut y).unwrap_err();
        assert!(format!("{error:#}").contains("needed are 8"), "{error:#}");
        let error = comm
            .reduce_scatter_in_place(&mut y, ReduceOp::Sum)
            .unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Length { .. }),
            "{error:#}"
        );
        if comm.rank() == 0 {
            let none: Option<&nccl::cudarc::driver::CudaSlice<f32>> = None;
            let error = comm.scatter(none, &mut y, 0).unwrap_err();
            assert!(
                matches!(error.kind(), ErrorKind::NoBuffer { .. }),
                "{error:#}"
            );
        }
        // None of these calls has reached NCCL.
        let mut z = stream.alloc_zeros::<f32>(4)?;
        let done = comm.all_reduce(&x, &mut z, ReduceOp::Sum)?;
        assert_eq!(done.sequence(), 1);
        done.wait()?;
        comm.finalize()?;
        Ok(())
    });
}

#[test]
fn eight_bit_floats_are_reduced_in_their_own_types() {
    ranks_as_threads(2, |world| -> Outcome {
        use float8::{F8E4M3, F8E5M2};
        let (stream, comm) = start(&world)?;
        let mut y = stream.clone_htod(&[F8E4M3::from_f32(1.5), F8E4M3::from_f32(-4.0)])?;
        comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
        let sums = stream.clone_dtoh(&y)?;
        assert_eq!([sums[0].to_f32(), sums[1].to_f32()], [3.0, -8.0]);
        let mut y = stream.clone_htod(&[F8E5M2::from_f32(comm.rank() as f32 + 1.0)])?;
        comm.all_reduce_in_place(&mut y, ReduceOp::Max)?.wait()?;
        assert_eq!(stream.clone_dtoh(&y)?[0].to_f32(), 2.0);
        comm.finalize()?;
        Ok(())
    });
}
