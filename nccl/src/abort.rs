//! A switch that ends a communicator from another thread, while it is being made or used.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Ends the communicator it was given to, from any thread, even while it is still being made.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # nccl_emulator::install_unless_gpu()?;
/// use nccl::{AbortSignal, ErrorKind, UniqueId, Communicator, Library};
///
/// let library = Library::load()?;
/// let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
/// let stop = AbortSignal::new();
/// let other = stop.clone();
/// std::thread::spawn(move || other.abort());
/// // Rank 1 never comes, and nobody waits for it.
/// let error = Communicator::builder("demo", UniqueId::new(&library)?, 0, 2)
///     .stream(&stream)
///     .abort_signal(&stop)
///     .build()
///     .unwrap_err();
/// assert!(matches!(error.kind(), ErrorKind::Aborted { .. }));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct AbortSignal(Arc<AtomicBool>);

impl AbortSignal {
    /// A signal that has not been given.
    ///
    /// ```
    /// assert!(!nccl::AbortSignal::new().is_aborted());
    /// ```
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Gives the signal; it cannot be taken back.
    ///
    /// A communicator that is being made stops at once. One that is in use ends the call that is
    /// being issued or waited for; the communicator is aborted by that call.
    ///
    /// ```
    /// let stop = nccl::AbortSignal::new();
    /// stop.abort();
    /// assert!(stop.is_aborted());
    /// ```
    pub fn abort(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether the signal was given.
    ///
    /// ```
    /// assert!(!nccl::AbortSignal::new().is_aborted());
    /// ```
    #[must_use]
    pub fn is_aborted(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}
