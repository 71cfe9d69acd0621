//! Holding the windows of a communicator mapped while kernels of the program use them.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaEvent, CudaStream};

#[cfg(doc)]
use super::Communicator;
use super::Inner;
use super::context_lost::is_context_lost;
use super::peer_kernels::PeerKernel;
use super::stream_order::check_not_capturing;
use crate::cuda_driver;
use crate::error::{Error, Result};
use crate::forked;
use crate::state::State;
use crate::sync::Mutex;

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

    fn is_hold(&self) -> bool {
        true
    }
}

/// Whether an event was reached, or its context is lost, so that nothing runs there any more.
#[doc(hidden)]
pub fn is_reached(context: &CudaContext, event: &CudaEvent) -> bool {
    let reached = cuda_driver::bind(context).and_then(|()| cuda_driver::is_reached(event));
    reached.unwrap_or_else(|error| is_context_lost(error.0 as u32))
}

/// Holds the windows of a communicator.
pub(crate) fn hold_windows(inner: &Arc<Inner>) -> Result<WindowHold> {
    forked::check()?;
    let hold = Arc::new(Hold {
        context: Arc::clone(&inner.context),
        state: Mutex::new(HoldState::Held),
    });
    let made = WindowHold { hold };
    inner.add_peer_kernel(Arc::<Hold>::clone(&made.hold));
    // Checked after the hold was added: an end that begins later sees the hold. One that has begun, a finalize included,
    // may not.
    match inner.lifecycle.get() {
        State::Ready => Ok(made),
        _ => Err(inner.out_of_use()),
    }
}

impl WindowHold {
    /// Holds the windows until the work that is on the stream now is over. Never waits.
    ///
    /// # Errors
    /// [`ErrorKind::Cuda`](crate::error::ErrorKind::Cuda) when the driver fails, and
    /// [`ErrorKind::Stream`](crate::error::ErrorKind::Stream) when the stream is capturing, because the end of its graph cannot
    /// be seen there. The windows then stay mapped for ever, and the communicator is leaked when it ends.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator) -> nccl::Result<()> {
    /// let hold = comm.hold_windows()?;
    /// // … launch …
    /// hold.until(comm.stream())
    /// # }
    /// ```
    pub fn until(self, stream: &CudaStream) -> Result<()> {
        let failed = Error::cuda("recording an event (cuEventRecord)");
        let recorded = || {
            check_not_capturing("the stream", stream)?;
            let recorded = cuda_driver::new_event(stream.context(), None).and_then(|event| {
                cuda_driver::bind(stream.context())?;
                cuda_driver::record(&event, stream)?;
                Ok(event)
            });
            recorded.map_err(failed)
        };
        match recorded() {
            Ok(event) => {
                *self.hold.state.lock() = HoldState::Until(event);
                Ok(())
            }
            Err(error) => {
                *self.hold.state.lock() = HoldState::Lost;
                Err(error)
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
