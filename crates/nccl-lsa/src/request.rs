//! An exchange that was launched.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::CudaEvent;
use lsa_protocol::Outcome;

use crate::communicator::{Communicator, PeerKernel};
use crate::cuda_driver;
use crate::error::{Error, ErrorKind, Result};
use crate::kernel::Kernel;

/// How much longer than its own timeout a kernel may take to end.
const SLACK: Duration = Duration::from_secs(1);

/// The pause between two looks at a kernel that takes long.
const PAUSE: Duration = Duration::from_micros(50);

/// An exchange under way; from [`LoadStoreAllToAll::exchange`](crate::LoadStoreAllToAll::exchange). Dropped without a wait, its failure
/// is told by the next exchange.
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
    deadline: Instant,
}

impl LoadStoreRequest {
    pub(crate) fn new(comm: Communicator, kernel: Arc<Kernel>, done: CudaEvent) -> Self {
        let deadline = Instant::now() + comm.timeout.saturating_add(SLACK);
        Self {
            comm,
            kernel,
            done,
            deadline,
        }
    }

    /// Returns whether the exchange is over, well or not.
    ///
    /// # Errors
    /// [`ErrorKind::Cuda`] when the driver fails.
    ///
    /// ```
    /// # fn example(done: &nccl::device_api::LoadStoreRequest) -> nccl::Result<()> {
    /// if !done.is_over()? { println!("waiting for blocks") }
    /// # Ok(())
    /// # }
    /// ```
    pub fn is_over(&self) -> Result<bool> {
        let context = self.comm.stream().context();
        cuda_driver::bind(context)
            .and_then(|()| cuda_driver::is_reached(&self.done))
            .map_err(Error::cuda("asking for an event (cuEventQuery)"))
    }

    /// Waits until the exchange is over.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] when a block did not come within the communicator's timeout for operations, naming its rank, or when the
    /// stream did not come to the kernel; [`ErrorKind::Aborted`] when the communicator was aborted; [`ErrorKind::Cuda`] when the driver
    /// fails. The communicator is aborted then.
    ///
    /// ```
    /// # fn example(done: nccl::device_api::LoadStoreRequest) -> nccl::Result<()> {
    /// done.wait()
    /// # }
    /// ```
    pub fn wait(self) -> Result<()> {
        nccl_base::forked::check()?;
        let mut looks = 0u32;
        loop {
            match self.is_over() {
                Ok(true) => break,
                Ok(false) => {}
                Err(error) => {
                    self.comm.inner.fail(&error);
                    return Err(self.comm.inner.final_error(error));
                }
            }
            if self.comm.inner.has_ended() {
                self.kernel.leave();
            }
            if Instant::now() >= self.deadline {
                let error = Error::new(ErrorKind::TimedOut {
                    what: String::from(
                        "an all-to-all by loads and stores, which the stream has not begun,",
                    ),
                    timeout: self.comm.timeout,
                });
                self.comm.inner.fail(&error);
                return Err(self.comm.inner.final_error(error));
            }
            looks = looks.saturating_add(1);
            match looks {
                0..64 => std::hint::spin_loop(),
                64..256 => std::thread::yield_now(),
                _ => std::thread::sleep(PAUSE),
            }
        }
        match self.kernel.outcome() {
            Outcome::Done => Ok(()),
            outcome => Err(failure(&self.comm, outcome)),
        }
    }
}

/// Aborts the communicator because of an exchange that failed, and returns the error.
pub(crate) fn failure(comm: &Communicator, outcome: Outcome) -> Error {
    let error = match outcome {
        Outcome::Missing(rank) => Error::new(ErrorKind::TimedOut {
            what: format!("the block of rank {rank} in an all-to-all by loads and stores"),
            timeout: comm.timeout,
        }),
        Outcome::Done | Outcome::Aborted => Error::new(ErrorKind::Aborted {
            reason: String::from(
                "its communicator was aborted during an all-to-all by loads and stores",
            ),
        }),
    };
    comm.inner.fail(&error);
    comm.inner.final_error(error)
}

impl fmt::Debug for LoadStoreRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadStoreRequest")
            .field("communicator", &self.comm.name())
            .finish_non_exhaustive()
    }
}
