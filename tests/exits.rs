//! Processes that end with communicators, plans and buffers in whatever state: they end soon, with their
//! own exit code, and nothing touches memory or communicators that are gone.

mod support;

use std::any::Any;
use std::process::exit;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl::cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use nccl::{Buffer, CapturedPlan, Communicator, ReduceOp, Registered, Request, World};
use nccl_emulator::faults;
use nccl_tools::spawn::{Ended, Outcome as End};
use support::Ranks;

type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

/// Everything that this crate makes, in use.
struct All {
    plan: CapturedPlan<(Registered<Buffer<f32>>, CudaSlice<f32>)>,
    registered: Registered<Buffer<u8>>,
    buffer: Buffer<u8>,
    comm: Communicator,
    request: Request,
    stream: Arc<CudaStream>,
    context: Arc<CudaContext>,
}

impl All {
    fn new(world: &World, name: &str) -> Result<Self> {
        let context = support::device(world)?;
        let stream = context.new_stream()?;
        let comm = world
            .communicator(name)
            .stream(&stream)
            .timeout(Duration::from_secs(20))
            .build()?;
        let buffers = (
            comm.register(comm.buffer::<f32>(100_000)?)?,
            context.new_stream()?.alloc_zeros::<f32>(1000)?,
        );
        let mut plan = comm.capture(buffers, |capture, (x, y)| {
            capture.group(|group| {
                group.all_reduce_in_place(x, ReduceOp::Sum)?;
                group.all_reduce_in_place(y, ReduceOp::Max)
            })
        })?;
        let mut buffer = comm.buffer::<u8>(1 << 20)?;
        let registered = comm.register(comm.buffer::<u8>(1 << 20)?)?;
        // All of it is still to run, or running.
        let late = faults::late(Duration::from_millis(10));
        let request = plan.launch()?;
        comm.all_reduce(&registered, &mut buffer, ReduceOp::Max)?;
        drop(late);
        Ok(Self {
            plan,
            registered,
            buffer,
            comm,
            request,
            stream,
            context,
        })
    }

    fn into_parts(self) -> Vec<Box<dyn Any>> {
        vec![
            Box::new(self.plan),
            Box::new(self.registered),
            Box::new(self.buffer),
            Box::new(self.comm),
            Box::new(self.request),
            Box::new((self.stream, self.context)),
        ]
    }
}

/// The ranks ended with `code`, soon, and the emulator caught nothing, the end of the process included.
fn ended_well(ended: &Ended, begun: Instant, code: i32) {
    match &ended.outcome {
        End::Succeeded if code == 0 => {}
        End::Failed(failure) if code != 0 => {
            let said = failure.to_string();
            assert!(said.contains(&format!("exit code {code}")), "{said}");
        }
        _ => support::expect_success(ended),
    }
    for rank in &ended.ranks {
        for line in &rank.stderr {
            assert!(!line.contains("violation"), "{line}");
        }
    }
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(20), "{took:?}");
}

/// The process ends right after the last drop, with the reaper at work.
#[test]
fn a_process_that_drops_everything_in_any_order_exits() {
    if !support::needs_emulator("work that runs late on purpose") {
        return;
    }
    let begun = Instant::now();
    let ended = Ranks::new(2).outcome(|world| -> Result<()> {
        for order in 0..12 {
            let mut parts = All::new(&world, &format!("order {order}"))?.into_parts();
            let turns = order % parts.len();
            parts.rotate_left(turns);
            if order >= parts.len() {
                parts.reverse();
            }
            parts.into_iter().for_each(drop);
        }
        Ok(())
    });
    ended_well(&ended, begun, 0);
}

#[test]
fn a_process_that_calls_exit_with_everything_alive_exits() {
    if !support::needs_emulator("work that runs late on purpose") {
        return;
    }
    let begun = Instant::now();
    let ended = Ranks::new(2).outcome(|world| -> Result<()> {
        let _all = All::new(&world, "alive")?;
        exit(0)
    });
    ended_well(&ended, begun, 0);
}

#[test]
fn a_thread_that_calls_exit_ends_a_process_whose_others_launch_and_drop() {
    if !support::needs_emulator("work that runs late on purpose") {
        return;
    }
    let begun = Instant::now();
    let ended = Ranks::new(2).outcome(|world| -> Result<()> {
        let mut all = All::new(&world, "busy")?;
        let exiting = std::thread::spawn(|| {
            std::thread::sleep(Duration::from_millis(100));
            exit(0)
        });
        while !exiting.is_finished() {
            // Also after the other rank is gone: then the launches only pile up, or fail.
            let Ok(_) = all.plan.launch() else { break };
            drop(all.comm.buffer::<u8>(1024)?);
        }
        exiting.join().expect("the thread exits");
        Ok(())
    });
    ended_well(&ended, begun, 0);
}

#[test]
fn a_process_that_panics_with_everything_in_use_ends_as_panics_do() {
    if !support::needs_emulator("work that runs late on purpose") {
        return;
    }
    let begun = Instant::now();
    let ended = Ranks::new(1).outcome(|world| -> Result<()> {
        let _all = All::new(&world, "panic")?;
        panic!("on purpose")
    });
    ended_well(&ended, begun, 101);
}

/// Its peer went without a finalize, so there is no orderly end: the exit aborts.
#[test]
fn a_process_whose_peer_is_gone_exits_soon() {
    if !support::needs_emulator("work that runs late on purpose") {
        return;
    }
    let begun = Instant::now();
    let ended = Ranks::new(2).outcome(|world| -> Result<()> {
        let all = All::new(&world, "left alone")?;
        all.request.wait()?;
        world.barrier("over")?;
        if world.rank() == 1 {
            exit(0);
        }
        drop(all);
        Ok(())
    });
    ended_well(&ended, begun, 0);
}

/// The other rank never launches: the replay, and what is behind it, waits until the exit aborts.
#[test]
fn a_process_with_work_that_never_ends_exits_soon() {
    if !support::needs_emulator("work that runs late on purpose") {
        return;
    }
    let begun = Instant::now();
    let ranks = Ranks::new(2)
        .variable("NCCL_DEBUG", "INFO")
        .variable("NCCL_DEBUG_SUBSYS", "ALL");
    let ended = ranks.outcome(|world| -> Result<()> {
        let mut all = All::new(&world, "unanswered")?;
        all.request.wait()?;
        world.barrier("over")?;
        if world.rank() == 0 {
            drop(all.plan.launch()?);
            all.into_parts().into_iter().for_each(drop);
        } else {
            // Longer than rank 0 needs to exit.
            std::thread::sleep(Duration::from_secs(5));
            exit(0);
        }
        Ok(())
    });
    ended_well(&ended, begun, 0);
    let mut said = ended.ranks[0].stdout.iter().chain(&ended.ranks[0].stderr);
    assert!(
        said.any(|line| line.contains("Abort COMPLETE")),
        "{ended:#?}"
    );
}
