//! Who comes late, who does not, and how far apart ranks come.

use std::time::{Duration, Instant};

use nccl::{ReduceOp, World};

use crate::Outcome;
use crate::seen::{Seen, await_seen, seen, subscribe};
use crate::support::{self, ranks_as_threads};

/// A rank that is late by this, where others are asked after [`PATIENCE`].
const LATE: Duration = Duration::from_millis(700);

const PATIENCE: Duration = Duration::from_millis(150);

fn one_comes_late(world: World) -> Outcome {
    const NAME: &str = "observed/straggler";
    let stream = support::device(&world)?.new_stream()?;
    let timeouts = nccl::Timeouts::new().straggler(PATIENCE);
    let comm = world.communicator(NAME).stream(&stream).timeouts(timeouts);
    let comm = comm.build()?;
    let mut y = stream.alloc_zeros::<f32>(4)?;
    comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
    // Numbers of calls differ among ranks from here on.
    if let Some(peer) = [Some(1), Some(0), None][world.rank()] {
        let x = stream.alloc_zeros::<f32>(4)?;
        let messages = comm.group(|group| {
            group.isend(&x, peer)?;
            group.irecv(&mut y, peer)
        })?;
        messages.wait()?;
    }
    world.barrier("begin")?;
    if world.rank() == 2 {
        world.phase("load shards");
        std::thread::sleep(LATE);
    }
    let sum = comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?;
    let own = if world.rank() == 2 { 2 } else { 3 };
    assert_eq!(sum.sequence(), own);
    sum.wait()?;
    let told = await_seen("nccl.straggler", NAME, 3);
    for rank in ["0", "1", "2"] {
        let mine = told.iter().find(|seen| seen.fields["on_rank"] == rank);
        let Seen { level, fields, .. } = mine.ok_or("each rank tells of it")?;
        assert_eq!(level, "warn");
        let expected = [
            ("rank", "2"),
            ("op", "all_reduce"),
            ("seq", "3"),
            ("phase", "load shards"),
            ("answers", "true"),
            ("more", "0"),
        ];
        for (name, value) in expected {
            assert_eq!(fields[name], value, "{name} of {fields:?}");
        }
        assert!(fields["last"].contains("all_reduce #1"), "{fields:?}");
        let behind: u128 = fields["behind_ms"].parse()?;
        assert!(behind >= PATIENCE.as_millis(), "{behind}");
    }
    let entered = await_seen("nccl.straggler.entered", NAME, 3);
    let behind: u128 = entered[0].fields["behind_ms"].parse()?;
    assert!((LATE.as_millis() - 50..5000).contains(&behind), "{behind}");
    assert!(nccl::stats().stragglers >= 3);
    world.barrier("end")?;
    Ok(())
}

#[test]
fn a_straggler_is_named_on_every_rank_with_its_phase_and_heard_of_when_it_comes() {
    subscribe();
    ranks_as_threads(3, one_comes_late);
}

/// All have called it, and one of them has other work on its stream.
fn one_is_busy(world: World) -> Outcome {
    const NAME: &str = "observed/busy";
    let stream = support::device(&world)?.new_stream()?;
    let timeouts = nccl::Timeouts::new().straggler(PATIENCE);
    let comm = world.communicator(NAME).stream(&stream).timeouts(timeouts);
    let comm = comm.build()?;
    let mut y = stream.alloc_zeros::<f32>(4)?;
    comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
    let gate = (world.rank() == 1).then(|| support::gate::Gate::closed_on(&stream));
    let gate = gate.transpose()?;
    world.barrier("begin")?;
    let sum = comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?;
    std::thread::sleep(4 * PATIENCE);
    drop(gate);
    sum.wait()?;
    let told = seen("nccl.straggler", NAME);
    assert!(told.is_empty(), "{told:?}");
    Ok(())
}

#[test]
fn nobody_is_called_a_straggler_while_all_have_called_the_operation() {
    if !support::needs_emulator("a stream that is held up") {
        return;
    }
    subscribe();
    ranks_as_threads(2, one_is_busy);
}

/// Works on a communicator of two ranks, of which the second is always later, until that shows.
pub(super) fn until_skewed(world: &World, name: &str) -> Outcome {
    let stream = support::device(world)?.new_stream()?;
    let comm = world.communicator(name).stream(&stream).build()?;
    let mut y = stream.alloc_zeros::<f32>(4)?;
    let begun = Instant::now();
    loop {
        if world.rank() == 1 {
            std::thread::sleep(Duration::from_millis(40));
        }
        comm.all_reduce_in_place(&mut y, ReduceOp::Max)?.wait()?;
        let stats = nccl::stats();
        let skew = &stats.communicator(name).ok_or("it counts")?.arrival_skew;
        // They stop together.
        let mut done = stream.clone_htod(&[u32::from(skew.samples.count() > 0)])?;
        comm.all_reduce_in_place(&mut done, ReduceOp::Min)?.wait()?;
        if stream.clone_dtoh(&done)? == [1] {
            let mean = skew.samples.mean();
            assert!(mean < Duration::from_secs(5), "{mean:?}");
            let times: u64 = skew.last.iter().map(|(_, times)| times).sum();
            assert_eq!(times, skew.samples.count());
            return Ok(());
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "no sample");
    }
}

#[test]
fn how_far_apart_the_ranks_come_is_sampled() {
    ranks_as_threads(2, |world| until_skewed(&world, "observed/skewed"));
}
