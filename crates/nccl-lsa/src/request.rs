//! An exchange in progress.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::CudaEvent;
use nccl_base::operation::{Operation, OperationKind, Shape};
use nccl_base::time::later;

use crate::communicator::{Communicator, PeerKernel};
use crate::cuda_driver;
use crate::error::{Error, ErrorKind, Result};
use crate::kernel::{Kernel, aborted};

/// How much longer than its own timeout a kernel may take to end, and how long a kernel may take to leave when told to.
pub(crate) const SLACK: Duration = Duration::from_secs(1);

/// The pause between two checks of a kernel that takes long.
const PAUSE: Duration = Duration::from_micros(50);

/// An exchange in progress; returned by [`LoadStoreAllToAll::exchange`](crate::LoadStoreAllToAll::exchange). If it is
/// dropped without a wait, its failure aborts the communicator all the same.
///
/// ```
/// # fn example(done: nccl::device_api::LoadStoreRequest) -> nccl::Result<()> {
/// done.wait()
/// # }
/// ```
#[must_use = "the exchange may fail, which only `wait` tells"]
pub struct LoadStoreRequest {
    comm: Communicator,
    kernel: Arc<Kernel>,
    done: CudaEvent,
    epoch: u32,
    of: Exchanged,
    issued: Instant,
}

/// The operation of an exchange.
pub(crate) struct Exchanged {
    pub(crate) number: u64,
    pub(crate) shape: Shape,
    pub(crate) started: Instant,
}

/// Why a wait has ended.
#[derive(Clone, Copy)]
enum End {
    Over,
    /// The stream did not reach the kernel.
    Queued,
    /// The kernel has begun, and has not ended by itself.
    Overdue,
    /// The communicator has ended, and the kernel has not.
    Aborted,
}

impl LoadStoreRequest {
    pub(crate) fn new(
        comm: Communicator,
        kernel: Arc<Kernel>,
        done: CudaEvent,
        epoch: u32,
        of: Exchanged,
    ) -> Self {
        Self {
            comm,
            kernel,
            done,
            epoch,
            of,
            issued: Instant::now(),
        }
    }

    /// Returns whether the exchange has ended, with success or failure.
    ///
    /// # Errors
    /// [`ErrorKind::Cuda`] when the driver fails; [`ErrorKind::Forked`] in a forked child.
    ///
    /// ```
    /// # fn example(done: &nccl::device_api::LoadStoreRequest) -> nccl::Result<()> {
    /// if !done.is_over()? { println!("waiting for blocks") }
    /// # Ok(())
    /// # }
    /// ```
    pub fn is_over(&self) -> Result<bool> {
        nccl_base::forked::check()?;
        let context = self.comm.stream().context();
        cuda_driver::bind(context)
            .and_then(|()| cuda_driver::is_reached(&self.done))
            .map_err(Error::cuda("asking for an event (cuEventQuery)"))
    }

    /// Waits until the exchange is over.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] when a block did not arrive within the communicator's timeout for operations, naming its
    /// rank; [`ErrorKind::InvalidConfig`] when the blocks of a rank, which it names, have another size than those of this rank;
    /// [`ErrorKind::Queued`] when other work was on the stream for longer than
    /// [`Timeouts::queue`](nccl_core::communicator::Timeouts::queue); [`ErrorKind::Aborted`] when the communicator was
    /// aborted; [`ErrorKind::Cuda`] when the driver fails. Each of these errors aborts the communicator.
    ///
    /// ```
    /// # fn example(done: nccl::device_api::LoadStoreRequest) -> nccl::Result<()> {
    /// done.wait()
    /// # }
    /// ```
    pub fn wait(self) -> Result<()> {
        let failed = |error: Error| failed(&self.comm, error.during(|| self.operation()));
        let end = self.wait_for_end().map_err(failed)?;
        let error = match (end, self.kernel.error()) {
            (End::Over, None) => return Ok(()),
            (_, Some(error)) => error,
            (End::Aborted, None) => aborted(),
            (End::Queued, None) => Error::new(ErrorKind::Queued {
                what: "an all-to-all by loads and stores",
                waited: self.issued.elapsed(),
                timeout: self.comm.inner.queue_timeout().unwrap_or(Duration::MAX),
            }),
            (End::Overdue, None) => Error::new(ErrorKind::TimedOut {
                what: String::from("an all-to-all by loads and stores, whose kernel does not end,"),
                timeout: self.comm.timeout,
            }),
        };
        Err(failed(error))
    }

    fn operation(&self) -> Operation {
        let Exchanged {
            number,
            shape,
            started,
        } = self.of;
        let inner = &self.comm.inner;
        inner.operation(OperationKind::AllToAll, shape, Some(number), started)
    }

    fn wait_for_end(&self) -> Result<End> {
        let queue_timeout = self.comm.inner.queue_timeout();
        let queued_until = queue_timeout.map(|timeout| later(self.issued, timeout));
        // The deadline of a kernel that has begun; and the deadline of a kernel that was told to leave, with the
        // reason.
        let (mut running_until, mut leaving) = (None, None);
        let mut looks = 0u32;
        while !self.is_over()? {
            let now = Instant::now();
            let passed =
                |deadline: &Option<Instant>| deadline.is_some_and(|deadline| now >= deadline);
            if running_until.is_none() && self.has_begun() {
                running_until = Some(later(now, self.comm.timeout.saturating_add(SLACK)));
            }
            match leaving {
                Some((deadline, end)) if now >= deadline => return Ok(end),
                Some(_) => {}
                None if self.comm.inner.has_ended() => {
                    self.kernel.leave();
                    leaving = Some((later(now, SLACK), End::Aborted));
                }
                None if passed(&running_until) => {
                    self.kernel.leave();
                    leaving = Some((later(now, SLACK), End::Overdue));
                }
                None if running_until.is_none() && passed(&queued_until) => return Ok(End::Queued),
                None => {}
            }
            looks = looks.saturating_add(1);
            match looks {
                0..64 => std::hint::spin_loop(),
                64..256 => std::thread::yield_now(),
                _ => std::thread::sleep(PAUSE),
            }
        }
        Ok(End::Over)
    }

    /// Whether the kernel of this exchange, or of a later one, has begun. Epochs wrap around after about 2³² exchanges.
    fn has_begun(&self) -> bool {
        let begun = self.kernel.begun();
        begun != 0 && begun.wrapping_sub(self.epoch) < u32::MAX / 2
    }
}

/// Aborts the communicator because of a failed exchange, and returns the error for the caller.
pub(crate) fn failed(comm: &Communicator, error: Error) -> Error {
    comm.inner.fail_alone(error)
}

impl fmt::Debug for LoadStoreRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadStoreRequest")
            .field("communicator", &self.comm.name())
            .finish_non_exhaustive()
    }
}
