//! Reports of late ranks, and the time between the ranks' calls.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use nccl::{ReduceOp, World};

use crate::Outcome;
use crate::seen::{Seen, await_which, seen, subscribe};
use crate::support::{self, ranks_as_threads};

/// How long a rank stays away after all ranks know that it is late.
const LATE: Duration = Duration::from_millis(200);

/// The time after which a waiting rank queries the others. Ranks that are not held back arrive sooner, also on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(1);

fn one_comes_late(world: World) -> Outcome {
    const NAME: &str = "observed/straggler";
    let stream = support::device(&world)?.new_stream()?;
    let comm = world.communicator(NAME).stream(&stream);
    let comm = comm
        .with(|comm| comm.timeouts.straggler = Some(PATIENCE))
        .build()?;
    let mut y = stream.alloc_zeros::<f32>(4)?;
    comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
    // From here on, the ranks have different numbers of calls.
    if let Some(peer) = [Some(1), Some(0), None][world.rank()] {
        let x = stream.alloc_zeros::<f32>(4)?;
        let messages = comm.group(|group| {
            group.isend(&x, peer)?;
            group.irecv(&mut y, peer)
        })?;
        messages.wait()?;
    }
    // From the barrier on, waiting ranks may query the others.
    if world.rank() == 2 {
        world.phase("load shards");
    }
    let begun = Instant::now();
    world.barrier("begin")?;
    // Earlier loading may make other ranks late in other calls.
    let is_the_last = |seen: &Seen| seen.fields["seq"] == "3";
    if world.rank() == 2 {
        await_which("nccl.straggler", NAME, 3, is_the_last);
        std::thread::sleep(LATE);
    }
    let sum = comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?;
    let own = if world.rank() == 2 { 2 } else { 3 };
    assert_eq!(sum.sequence(), own);
    sum.wait()?;
    let told = await_which("nccl.straggler", NAME, 3, is_the_last);
    for rank in ["0", "1", "2"] {
        let mine = told.iter().find(|seen| seen.fields["on_rank"] == rank);
        let Seen { level, fields, .. } = mine.ok_or("each rank tells of it")?;
        // A job's log has one such line: the first waiting rank warns, for all.
        assert_eq!(level, if rank == "0" { "warn" } else { "debug" });
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
    let entered = await_which("nccl.straggler.entered", NAME, 3, is_the_last);
    for seen in &entered {
        let is_teller = seen.fields["on_rank"] == "0";
        assert_eq!(seen.level, if is_teller { "info" } else { "debug" });
    }
    let behind: u128 = entered[0].fields["behind_ms"].parse()?;
    // The others began to wait before the report, and after all ranks were at the barrier.
    let most = begun.elapsed().as_millis();
    let least = (PATIENCE + LATE).as_millis();
    assert!((least..=most).contains(&behind), "{behind} of {most}");
    assert!(nccl::stats().stragglers >= 3);
    world.barrier("end")?;
    Ok(())
}

#[test]
fn a_straggler_is_named_on_every_rank_with_its_phase_and_heard_of_when_it_comes() {
    subscribe();
    ranks_as_threads(3, one_comes_late);
}

/// All ranks have called it, and one of them has other work on its stream.
fn one_is_busy(world: World) -> Outcome {
    const NAME: &str = "observed/busy";
    const PATIENCE: Duration = Duration::from_millis(300);
    static CALLED: Mutex<Vec<Instant>> = Mutex::new(Vec::new());
    let stream = support::device(&world)?.new_stream()?;
    let comm = world.communicator(NAME).stream(&stream);
    let comm = comm
        .with(|comm| comm.timeouts.straggler = Some(PATIENCE))
        .build()?;
    let mut y = stream.alloc_zeros::<f32>(4)?;
    comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
    for _ in 0..50 {
        let gate = (world.rank() == 1).then(|| support::gate::Gate::closed_on(&stream));
        let gate = gate.transpose()?;
        world.barrier("begin")?;
        let before = Instant::now();
        let sum = comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?;
        let sequence = sum.sequence().to_string();
        CALLED.lock().unwrap().extend([before, Instant::now()]);
        world.barrier("called")?;
        let called = CALLED.lock().unwrap();
        let last = &called[called.len() - 4..];
        let first = last.iter().min().ok_or("both have called")?;
        let apart = last
            .iter()
            .max()
            .ok_or("both have called")?
            .duration_since(*first);
        drop(called);
        std::thread::sleep(3 * PATIENCE);
        drop(gate);
        sum.wait()?;
        world.barrier("done")?;
        // A rank whose call was delayed by other load of this machine is rightly reported.
        if apart < PATIENCE {
            let told = seen("nccl.straggler", NAME);
            assert!(
                told.iter().all(|one| one.fields["seq"] != sequence),
                "{told:?}"
            );
            return Ok(());
        }
    }
    Err("the two never called at the same time".into())
}

#[test]
fn nobody_is_called_a_straggler_while_all_have_called_the_operation() {
    if !support::needs_emulator("a stream that is held up") {
        return;
    }
    subscribe();
    ranks_as_threads(2, one_is_busy);
}

/// Works on a communicator of two ranks, of which the second is always later, until the skew shows that.
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
        // The ranks stop together.
        let mut done = stream.clone_htod(&[u32::from(skew.samples.count > 0)])?;
        comm.all_reduce_in_place(&mut done, ReduceOp::Min)?.wait()?;
        if stream.clone_dtoh(&done)? == [1] {
            let mean = skew.samples.mean();
            assert!(mean < Duration::from_secs(5), "{mean:?}");
            let times: u64 = skew.last.iter().map(|(_, times)| times).sum();
            assert_eq!(times, skew.samples.count);
            return Ok(());
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "no sample");
    }
}

#[test]
fn how_far_apart_the_ranks_come_is_sampled() {
    ranks_as_threads(2, |world| until_skewed(&world, "observed/skewed"));
}
