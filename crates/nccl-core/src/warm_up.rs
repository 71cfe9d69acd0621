//! The first contact of all pairs of ranks, at a time of one's own choosing.

use std::time::{Duration, Instant};

use crate::all_to_all::Algorithm;
use crate::communicator::Communicator;
use crate::driver;
#[cfg(doc)]
use crate::error::ErrorKind;
use crate::error::{Error, Result};
use crate::forked;
use nccl_base::from_outside;
use nccl_base::reduce_op::ReduceOp;

impl Communicator {
    /// Connects this rank with all others, and waits until that is done, at most for `limit`, over
    /// which `NCCL_RUN_TIMEOUT` in the environment wins.
    ///
    /// NCCL connects two ranks when they first need each other, which takes from milliseconds to seconds
    /// and waits for both. A service pays that here, before its first request. All ranks have to call it.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] when not all ranks came in time; the communicator is aborted then.
    /// Otherwise as [`all_reduce`](Self::all_reduce).
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// comm.warm_up(std::time::Duration::from_secs(60))?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn warm_up(&self, limit: Duration) -> Result<()> {
        forked::check()?;
        let started = Instant::now();
        let limit = from_outside::operation(limit);
        let left = || match limit {
            Duration::MAX => limit,
            _ => limit.saturating_sub(started.elapsed()),
        };
        // A stream of its own, so that work on the user's is neither waited for nor timed.
        let context = &self.inner.context;
        let stream = driver::undisturbed(context, || context.new_stream())
            .map_err(Error::cuda("creating a stream (cuStreamCreate)"))?;
        let comm = self.on(&stream).within(limit);
        let zeros = |n| {
            driver::undisturbed(context, || stream.alloc_zeros::<u8>(n))
                .map_err(Error::cuda("allocating memory for the first messages"))
        };
        let x = zeros(comm.world_size())?;
        let mut y = zeros(comm.world_size())?;
        // Messages connect all pairs; the collectives have connections of their own.
        comm.all_to_all_with(&x, &mut y, Algorithm::Grouped)?;
        let comm = Self {
            limit: left(),
            ..comm
        };
        let done = comm.all_reduce_in_place(&mut y, ReduceOp::Max)?;
        done.limited_to(left()).wait()
    }
}
