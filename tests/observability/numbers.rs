//! Counters and timers.

use std::time::{Duration, Instant};

use nccl::{OperationKind, ReduceOp, World};

use crate::Outcome;
use crate::support::{self, ranks_as_threads};

fn everything_is_counted(world: World) -> Outcome {
    const NAME: &str = "observed/counted";
    let stream = support::device(&world)?.new_stream()?;
    let comm = world.communicator(NAME).stream(&stream).build()?;
    let next = (world.rank() + 1) % world.size();
    let previous = (world.rank() + world.size() - 1) % world.size();
    let x = stream.clone_htod(&[1.0f32; 10])?;
    let mut y = stream.alloc_zeros::<f32>(10)?;
    for _ in 0..3 {
        comm.group(|group| {
            group.isend(x.slice(..6), next)?;
            group.irecv(y.slice_mut(..6), previous)
        })?
        .wait()?;
    }
    comm.all_reduce(&x, &mut y, ReduceOp::Sum)?.wait()?;
    let part = stream.clone_htod(&[world.rank() as u8; 4])?;
    let mut parts = stream.alloc_zeros::<u8>(4 * world.size())?;
    comm.all_gather(&part, &mut parts)?.wait()?;
    let buffer = stream.alloc_zeros::<f32>(8)?;
    let mut plan = comm.capture(buffer, |capture, mut buffer| {
        capture.group(|group| group.all_reduce_in_place(&mut buffer, ReduceOp::Sum))?;
        capture.next_part();
        capture.group(|group| group.broadcast_in_place(buffer, 0))
    })?;
    for part in [0, 0, 1, 0, 1, 0, 0] {
        plan.launch_part(part)?.wait()?;
    }
    world.barrier("all is done")?;
    counted(world.size() as u64)?;
    world.barrier("all have looked")?;
    drop(plan);
    comm.finalize()?;
    drop(comm);
    let deadline = Instant::now() + Duration::from_secs(10);
    while nccl::stats()
        .communicator(NAME)
        .is_none_or(|comm| comm.ended < 2)
    {
        assert!(Instant::now() < deadline, "both end");
        std::thread::sleep(Duration::from_millis(2));
    }
    counted(world.size() as u64)
}

fn counted(ranks: u64) -> Outcome {
    let stats = nccl::stats();
    let comm = stats
        .communicator("observed/counted")
        .ok_or("it was made")?;
    assert_eq!(
        (
            comm.calls_of(OperationKind::Group),
            comm.calls_of(OperationKind::Replay)
        ),
        (3 * ranks, 7 * ranks)
    );
    assert_eq!(comm.calls_of(OperationKind::AllReduce), ranks);
    let of = |kind| {
        let found = comm.operations.iter().find(|one| one.kind == kind);
        found.map_or((0, 0), |one| (one.count, one.bytes))
    };
    assert_eq!(of(OperationKind::Send), (3 * ranks, 3 * ranks * 24));
    assert_eq!(of(OperationKind::Recv), (3 * ranks, 3 * ranks * 24));
    // One call, and five launches; two of the other part.
    assert_eq!(
        of(OperationKind::AllReduce),
        (6 * ranks, ranks * (40 + 5 * 32))
    );
    assert_eq!(of(OperationKind::Broadcast), (2 * ranks, 2 * ranks * 32));
    assert_eq!(of(OperationKind::AllGather), (ranks, ranks * 4 * ranks));
    Ok(())
}

#[test]
fn calls_operations_and_bytes_are_counted_and_stay_counted() {
    ranks_as_threads(2, everything_is_counted);
}

#[test]
fn some_calls_are_timed() {
    ranks_as_threads(1, |world| {
        let stream = support::device(&world)?.new_stream()?;
        let comm = world
            .communicator("observed/timed")
            .stream(&stream)
            .build()?;
        let mut y = stream.alloc_zeros::<f32>(4)?;
        for _ in 0..130 {
            comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
        }
        let enqueue = nccl::stats().enqueue;
        let [(OperationKind::AllReduce, durations)] = &enqueue[..] else {
            return Err(format!("one kind was timed: {enqueue:?}").into());
        };
        assert_eq!(durations.count, 3); // the 2nd, the 66th, the 130th
        assert!(durations.longest >= durations.mean());
        Ok::<(), Box<dyn std::error::Error>>(())
    });
}

/// The watchdog looks at times of its own.
pub(super) fn await_took(
    comm: &str,
    kind: OperationKind,
    number: u64,
) -> Outcome<nccl::stats::Durations> {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let stats = nccl::stats();
        let comm = stats.communicator(comm).ok_or("it was made")?;
        let found = comm.took.iter().find(|(known, _)| *known == kind);
        match found {
            Some((_, took)) if took.count >= number => return Ok(took.clone()),
            _ if Instant::now() > deadline => return Err(format!("{:?}", comm.took).into()),
            _ => std::thread::sleep(Duration::from_millis(2)),
        }
    }
}

fn calls_take_time_on_their_stream(world: World) -> Outcome {
    const NAME: &str = "observed/took";
    let stream = support::device(&world)?.new_stream()?;
    let comm = world.communicator(NAME).stream(&stream).build()?;
    let mut y = stream.alloc_zeros::<f32>(4)?;
    comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
    let before = await_took(NAME, OperationKind::AllReduce, world.size() as u64)?;
    assert!(before.sum > Duration::ZERO);
    world.barrier("all have looked")?;
    // After a pause the next call gets a mark.
    std::thread::sleep(Duration::from_millis(30));
    let late = Duration::from_millis(300);
    let called = Instant::now();
    let mut z = stream.alloc_zeros::<f32>(4)?;
    if world.rank() == 1 {
        world.barrier("the other one waits")?;
        std::thread::sleep(late);
    }
    let sent = comm.broadcast_in_place(&mut z, 1)?;
    if world.rank() == 0 {
        world.barrier("the other one waits")?;
    }
    sent.wait()?;
    let waited = await_took(NAME, OperationKind::Broadcast, world.size() as u64)?;
    let whole = called.elapsed();
    if world.rank() == 0 {
        // Includes the wait for the other rank, and no more than measured here. A stream may begin late with its work.
        assert!(waited.longest > late / 2, "{waited:?}");
        assert!(waited.longest <= whole, "{waited:?} of {whole:?}");
    }
    Ok(world.barrier("all have seen it")?)
}

#[test]
fn what_calls_take_on_their_stream_is_sampled() {
    ranks_as_threads(2, calls_take_time_on_their_stream);
}
