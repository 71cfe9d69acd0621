//! A fault, and the time to continue after it.

use std::time::{Duration, Instant};

use nccl::{Communicator, ReduceOp, World};

use crate::Outcome;
use crate::support::{self, ranks_as_threads};

pub(super) fn await_fault(comm: &Communicator) -> Outcome<nccl::fault::Fault> {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        if let Some(fault) = comm.fault() {
            return Ok(fault);
        }
        if Instant::now() > deadline {
            return Err("there is a fault".into());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Rank 1 does not enter a call, and all ranks continue in the next generation.
pub(super) fn a_fault_is_recovered_from(world: World) -> Outcome<World> {
    const NAME: &str = "observed/broken";
    let stream = support::device(&world)?.new_stream()?;
    let comm = world.communicator(NAME).stream(&stream).build()?;
    let mut y = stream.alloc_zeros::<f32>(4)?;
    if world.rank() == 0 {
        let comm = comm.within(Duration::from_millis(200));
        let late = comm.all_reduce_in_place(&mut y, ReduceOp::Sum);
        assert!(late.and_then(|late| late.wait()).is_err());
    }
    await_fault(&comm)?;
    Ok(world.next_generation(Duration::from_secs(20))?)
}

#[test]
fn going_on_after_a_fault_is_timed_until_there_is_a_communicator() {
    ranks_as_threads(2, |world| -> Outcome {
        let begun = Instant::now();
        let next = a_fault_is_recovered_from(world)?;
        assert_eq!(nccl::stats().recover.count, 0, "there is none yet");
        next.barrier("all are there")?;
        let pause = Duration::from_millis(50);
        std::thread::sleep(pause);
        let stream = support::device(&next)?.new_stream()?;
        for name in ["observed/mended", "observed/another"] {
            next.communicator(name).stream(&stream).build()?;
        }
        next.barrier("all have made theirs")?;
        let detect = nccl::stats().detect;
        assert_eq!(detect.count, 1, "on the rank that gave up");
        let timeout = Duration::from_millis(200);
        assert!(
            (timeout..begun.elapsed()).contains(&detect.longest),
            "{detect:?}"
        );
        let recover = nccl::stats().recover;
        assert_eq!(recover.count, 2, "once on each rank");
        assert!(recover.mean() >= pause, "{recover:?}");
        assert!(recover.longest <= begun.elapsed(), "{recover:?}");
        Ok(next.barrier("all have looked")?)
    });
}
