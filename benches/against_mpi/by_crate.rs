//! The same ranks, with the same memory, through the safe crate instead of the C functions, as in a program, in the
//! default launch mode.

use std::sync::Arc;
use std::time::Duration;

use nccl::cudarc::driver::{CudaContext, CudaStream};
use nccl::{Communicator, DataType, Erased, ErasedMut, Rendezvous, Request, World};

use super::Outcome;
use super::rank::BATCH;

/// Limit of operations, far above their duration.
const LIMIT: Duration = Duration::from_secs(60);

pub(crate) struct ByCrate {
    world: World,
    stream: Arc<CudaStream>,
    comm: Communicator,
}

impl ByCrate {
    /// The rank in a world whose rendezvous is the socket `path`.
    pub(crate) fn new(rank: usize, ranks: usize, path: &str) -> Outcome<Self> {
        let world = World::join(Rendezvous::unix(path, rank, ranks)?)?;
        let context = CudaContext::new(rank)?;
        // As the benchmark examples do.
        // SAFETY: no memory of cudarc's is used on this stream.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream()?;
        let comm = world
            .communicator("work")
            .stream(&stream)
            .with(|comm| comm.timeouts.operation = LIMIT)
            .build()?;
        Ok(Self {
            world,
            stream,
            comm,
        })
    }

    /// Returns when all ranks are here, without NCCL.
    pub(crate) fn meet(&self) -> Outcome {
        Ok(self.world.barrier("cycle")?)
    }

    /// Enqueues an all-to-all of `count` floats.
    ///
    /// # Safety
    /// Both addresses have `count` floats, which nothing else uses until the stream has been waited for.
    pub(crate) unsafe fn start(&self, from: u64, to: u64, count: usize) -> Outcome<Request> {
        let kind = DataType::Float32;
        // SAFETY: the caller's promise.
        let (x, y) = unsafe {
            (
                Erased::from_raw(from, count, kind, &self.stream)?,
                ErasedMut::from_raw(to, count, kind, &self.stream)?,
            )
        };
        Ok(self.comm.all_to_all(x, y)?)
    }

    /// After operation `turn` of `count`: waits as often as [`super::rank`] does for the operations by the C functions.
    pub(crate) fn settle(&self, turn: usize, count: usize, done: &Request) -> Outcome {
        if (turn + 1).is_multiple_of(BATCH) || turn + 1 == count {
            // As the benchmark examples wait, and nccl-tests. A wait for the request alone sleeps between its polls,
            // and the emulator hands the work to another thread, on the same core.
            self.stream.synchronize()?;
            done.wait()?;
        }
        Ok(())
    }
}
