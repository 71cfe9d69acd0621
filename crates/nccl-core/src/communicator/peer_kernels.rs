//! Kernels that reach the memory of other ranks through windows.
//!
//! When NCCL frees a communicator, it unmaps its windows, and a kernel that still accesses them would destroy the context. So
//! such kernels are told to leave when an abort begins, and NCCL frees the communicator only when they are over. If one of
//! them does not end, the communicator is leaked.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaEvent, CudaStream};

use super::context_lost::is_context_lost;
use super::handle::Backoff;
use super::{Communicator, Inner};
use crate::cuda_driver;
use crate::error::{Error, Result};
use crate::forked;
use crate::sync::Mutex;
use crate::time::deadline_after;

/// A kernel that may be under way, launched any number of times.
#[doc(hidden)]
pub trait PeerKernel: Send + Sync {
    /// Tells the kernel to leave, now and whenever it is launched again. Never waits.
    fn leave(&self);

    /// Whether none of its launches is under way, or waits on its stream.
    fn is_over(&self) -> bool;

    /// Returns the failure of a launch, which an orderly end reports.
    fn failure(&self) -> Option<Error>;
}

/// The kernels of a communicator. Each is kept until it is over, even if its owner was dropped.
#[derive(Default)]
pub(crate) struct PeerKernels(Mutex<Vec<Arc<dyn PeerKernel>>>);

impl PeerKernels {
    fn all(&self) -> Vec<Arc<dyn PeerKernel>> {
        self.0.lock().clone()
    }

    /// Whether there are no kernels.
    pub(super) fn is_empty(&self) -> bool {
        self.0.lock().is_empty()
    }

    /// Tells all kernels to leave.
    pub(super) fn leave(&self) {
        self.all().iter().for_each(|kernel| kernel.leave());
    }

    /// Waits until no kernel is under way; false at the deadline, or when interrupted.
    pub(super) fn wait(&self, deadline: Instant, interrupted: impl Fn() -> bool) -> bool {
        let kernels = self.all();
        let mut backoff = Backoff::new();
        while !kernels.iter().all(|kernel| kernel.is_over()) {
            if Instant::now() >= deadline || interrupted() {
                return false;
            }
            backoff.pause();
        }
        true
    }

    /// Returns the failure of a kernel that has failed.
    pub(super) fn failure(&self) -> Option<Error> {
        self.all().iter().find_map(|kernel| kernel.failure())
    }

    /// Removes the kernels that are over and have no other owner.
    fn forget(&self) {
        let mut gone = Vec::new();
        {
            let mut all = self.0.lock();
            let mut index = 0;
            while index < all.len() {
                let is_gone = Arc::strong_count(&all[index]) == 1 && all[index].is_over();
                match is_gone {
                    true => gone.push(all.swap_remove(index)),
                    false => index += 1,
                }
            }
        }
        // Dropped after the lock is released.
        drop(gone);
    }
}

impl Inner {
    /// Adds a kernel.
    #[doc(hidden)]
    pub fn add_peer_kernel(&self, kernel: Arc<dyn PeerKernel>) {
        self.peer_kernels.forget();
        self.peer_kernels.0.lock().push(Arc::clone(&kernel));
        // An abort that began before the kernel was added has not told it to leave.
        if self.has_ended() {
            kernel.leave();
        }
    }

    /// Whether the communicator has ended, or its abort has begun.
    #[doc(hidden)]
    pub fn has_ended(&self) -> bool {
        let state = self.lifecycle.get();
        state.abort_has_begun() || state.is_final()
    }

    /// Returns how long other work may be ahead of an operation on its stream; `None` for no limit.
    #[doc(hidden)]
    pub fn queue_timeout(&self) -> Option<Duration> {
        self.timeouts.queue_timeout()
    }

    /// Tells kernels to leave, and waits for them for three quarters of the abort timeout; the rest is for NCCL.
    pub(super) fn end_peer_kernels(&self) -> bool {
        self.peer_kernels.leave();
        // Divided first: without a timeout, a multiplication would overflow.
        let patience = self.timeouts.abort / 4 * 3;
        self.peer_kernels.wait(deadline_after(patience), || false)
    }
}

/// Keeps NCCL from unmapping the windows of a communicator; from [`Communicator::hold_windows`].
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # nccl_emulator::install_unless_gpu()?;
/// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
/// # let world = nccl::World::threads(1).remove(0);
/// # let comm = world.communicator("demo").stream(&stream).build()?;
/// # let window = comm.window::<f32>(4)?;
/// let hold = comm.hold_windows()?;
/// let address = window.peer_address(0)?;
/// // … launch a kernel on `stream` that uses the address …
/// hold.until(&stream)?;
/// # Ok(())
/// # }
/// ```
#[must_use = "dropped at once, it holds nothing"]
#[derive(Debug)]
pub struct WindowHold {
    hold: Arc<Hold>,
}

#[derive(Debug)]
struct Hold {
    context: Arc<CudaContext>,
    state: Mutex<HoldState>,
}

#[derive(Debug)]
enum HoldState {
    Held,
    Until(CudaEvent),
    /// The event could not be recorded, so the hold never ends.
    Lost,
    Over,
}

impl PeerKernel for Hold {
    fn leave(&self) {}

    fn is_over(&self) -> bool {
        match &*self.state.lock() {
            HoldState::Held | HoldState::Lost => false,
            HoldState::Over => true,
            HoldState::Until(event) => is_reached(&self.context, event),
        }
    }

    fn failure(&self) -> Option<Error> {
        None
    }
}

/// Whether an event was reached, or its context is lost, so that nothing runs there any more.
#[doc(hidden)]
pub fn is_reached(context: &CudaContext, event: &CudaEvent) -> bool {
    let reached = cuda_driver::bind(context).and_then(|()| cuda_driver::is_reached(event));
    reached.unwrap_or_else(|error| is_context_lost(error.0 as u32))
}

impl Communicator {
    /// Keeps the windows of the communicator mapped while kernels of the program use [`Window::peer_address`] or a
    /// [`DeviceCommunicator`]. An abort, which a fault of another rank may begin at any time, and an orderly end wait until the
    /// work that is on the stream at [`WindowHold::until`] is over. If that takes longer than three quarters of the
    /// [abort timeout](crate::Timeouts::abort), the communicator is leaked, with its windows mapped.
    ///
    /// Take the hold before the launch. A kernel that waits for other ranks should check a flag or a clock, so that it ends if
    /// they do not arrive.
    ///
    /// [`Window::peer_address`]: crate::one_sided::Window::peer_address
    /// [`DeviceCommunicator`]: crate::device_api::DeviceCommunicator
    ///
    /// # Errors
    /// [`ErrorKind::Aborted`](crate::error::ErrorKind::Aborted) and [`ErrorKind::Closed`](crate::error::ErrorKind::Closed) when
    /// the communicator has ended, because its windows may be gone.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator) -> nccl::Result<()> {
    /// let hold = comm.hold_windows()?;
    /// drop(hold); // nothing was launched
    /// # Ok(())
    /// # }
    /// ```
    pub fn hold_windows(&self) -> Result<WindowHold> {
        forked::check()?;
        let hold = Arc::new(Hold {
            context: Arc::clone(&self.inner.context),
            state: Mutex::new(HoldState::Held),
        });
        let made = WindowHold { hold };
        self.inner.add_peer_kernel(Arc::<Hold>::clone(&made.hold));
        // Checked after the hold was added: an end that begins later sees the hold.
        match self.inner.has_ended() {
            true => Err(self.inner.out_of_use()),
            false => Ok(made),
        }
    }
}

impl WindowHold {
    /// Holds the windows until the work that is on the stream now is over. Never waits.
    ///
    /// # Errors
    /// [`ErrorKind::Cuda`](crate::error::ErrorKind::Cuda) when the driver fails. The windows then stay mapped for ever, and the
    /// communicator is leaked when it ends.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator) -> nccl::Result<()> {
    /// let hold = comm.hold_windows()?;
    /// // … launch …
    /// hold.until(comm.stream())
    /// # }
    /// ```
    pub fn until(self, stream: &CudaStream) -> Result<()> {
        let recorded = || {
            let event = cuda_driver::new_event(stream.context(), None)?;
            cuda_driver::bind(stream.context())?;
            cuda_driver::record(&event, stream)?;
            Ok(event)
        };
        match recorded() {
            Ok(event) => {
                *self.hold.state.lock() = HoldState::Until(event);
                Ok(())
            }
            Err(error) => {
                *self.hold.state.lock() = HoldState::Lost;
                Err(Error::cuda("recording an event (cuEventRecord)")(error))
            }
        }
    }
}

impl Drop for WindowHold {
    fn drop(&mut self) {
        let mut state = self.hold.state.lock();
        if matches!(*state, HoldState::Held) {
            *state = HoldState::Over;
        }
    }
}

/// How long a dropped communicator waits for kernels that were told to leave.
pub(super) const DROPPED: Duration = Duration::from_secs(5);
