//! The public handle of a communicator.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::CudaStream;

use super::inner::Inner;
use super::launch_mode::LaunchMode;
use super::{lifecycle, revoke};
use crate::collective_config::RawCollectiveConfig;
use crate::error::Result;
#[cfg(doc)]
use crate::error::{Error, ErrorKind};
use crate::forked::{self, ForkGuarded};
use crate::library::Library;
use crate::recorder::{Recording, read_one};
use crate::state::State;
use nccl_base::env_timeouts;
use nccl_base::fault::Fault;
#[cfg(doc)]
use nccl_base::fault::FaultClass;

/// A communicator, as one of its ranks sees it (`ncclComm_t`).
///
/// Cheap to clone; the operations take `&self` and may be called from any thread. NCCL serves one call
/// on a communicator at a time, so concurrent callers take turns; all ranks must issue their operations
/// in the same order.
///
/// Dropping the last clone finalizes the communicator in the background, within the finalize timeout, and aborts
/// it after that; [`finalize`](Self::finalize) does the same in the foreground and returns the outcome.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # nccl_emulator::install_unless_gpu()?;
/// use nccl::{ReduceOp, World};
///
/// let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
/// let comm = World::single().communicator("demo").stream(&stream).build()?;
/// let mut y = stream.clone_htod(&[1i32, 2, 3])?;
/// comm.all_reduce_in_place(&mut y, ReduceOp::Max)?.wait()?;
/// comm.finalize()?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Communicator {
    #[doc(hidden)]
    pub inner: ForkGuarded<Arc<Inner>>,
    /// The stream for operations of this clone.
    pub(crate) stream: ForkGuarded<Arc<CudaStream>>,
    /// The timeout for each operation.
    #[doc(hidden)]
    pub timeout: Duration,
    /// The configuration of this clone's collectives.
    pub(crate) config: Option<Arc<RawCollectiveConfig>>,
}

impl Communicator {
    /// Returns this rank, from 0.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// assert!(comm.rank() < comm.world_size());
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn rank(&self) -> usize {
        self.inner.rank
    }

    /// Returns the world rank of each rank of the communicator, in order, in the generation of the world that made it. Empty
    /// for a communicator that was made without a `World`.
    ///
    /// If a rank's world rank differs from its rank in the communicator, texts and events contain both.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// assert_eq!(comm.world_ranks(), [0]);
    /// let tp = comm.split("tp", Some(0), 0)?.expect("this rank has a color");
    /// assert_eq!(tp.world_ranks()[tp.rank()], 0);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn world_ranks(&self) -> &[usize] {
        let members = self.inner.track_handle.track().identity.members.as_deref();
        members.unwrap_or_default()
    }

    /// Returns the number of ranks.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// assert_eq!(comm.world_size(), 1);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.inner.world_size
    }

    /// Returns the name that the communicator was given when it was made.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// assert_eq!(comm.name(), "demo");
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Returns the stream for operations: the stream with which the communicator was made, or that of [`on`](Self::on).
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// assert_eq!(comm.stream().cu_stream(), stream.cu_stream());
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Returns a handle to the same communicator with another stream for its operations.
    ///
    /// NCCL runs the operations of a communicator one after another, in the same order on every rank, whatever their
    /// streams. A stream that cannot carry operations is refused by the first operation.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let context = cudarc::driver::CudaContext::new(0)?;
    /// # let stream = context.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// let other = context.new_stream()?;
    /// let mut y = other.clone_htod(&[1.0f32, 2.0])?;
    /// comm.on(&other).all_reduce_in_place(&mut y, nccl::ReduceOp::Avg)?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn on(&self, stream: &Arc<CudaStream>) -> Self {
        Self {
            inner: self.inner.clone(),
            stream: ForkGuarded::new(Arc::clone(stream)),
            timeout: self.timeout,
            config: self.config.clone(),
        }
    }

    /// Returns a handle to the same communicator with another timeout for its operations: for the call, and for
    /// [`Request::wait`](crate::Request::wait). `NCCL_RUN_TIMEOUT` in the environment overrides it.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// use std::time::Duration;
    /// # let mut y = stream.clone_htod(&[1.0f32, 2.0])?;
    /// let first_step = comm.within(Duration::from_secs(120));
    /// first_step.all_reduce_in_place(&mut y, nccl::ReduceOp::Sum)?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn within(&self, timeout: Duration) -> Self {
        Self {
            timeout: env_timeouts::operation(timeout),
            ..self.clone()
        }
    }

    /// Returns the launch mode; `None` for a blocking communicator that was made elsewhere.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// assert_eq!(comm.launch_mode(), Some(nccl::LaunchMode::BlockingChild));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn launch_mode(&self) -> Option<LaunchMode> {
        self.inner.launch_mode()
    }

    /// Returns the recording of its last calls.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// # let x = stream.clone_htod(&[1.0f32; 8])?;
    /// # let mut y = stream.clone_htod(&[1.0f32; 8])?;
    /// comm.group(|group| {
    ///     group.isend(&x, 0)?;
    ///     group.irecv(&mut y, 0)
    /// })?;
    /// let recording = comm.recording();
    /// let [group] = &recording.calls[..] else { panic!("one call") };
    /// assert_eq!(group.operations[0].peer, Some(0));
    /// assert_eq!(group.operations[0].count, 8);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn recording(&self) -> Recording {
        read_one(self.inner.track_handle.track())
    }

    /// Returns the key that identifies the communicator on all of its ranks; `None` without other ranks.
    #[doc(hidden)]
    pub fn key(&self) -> Option<&str> {
        self.inner
            .supervisor
            .as_ref()
            .map(|supervisor| supervisor.key())
    }

    /// Returns the fault that ended the communicator on all of its ranks, the same on each of them; `None` while it is in
    /// use, and when its ranks do not know each other (as [`Error::fault`]).
    ///
    /// For programs whose own error types drop the fault.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// if let Some(fault) = comm.fault() {
    ///     eprintln!("{fault}");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn fault(&self) -> Option<Fault> {
        forked::check().ok()?;
        let supervisor = self.inner.supervisor.as_ref()?;
        if !self.inner.lifecycle.get().abort_has_begun() {
            return None;
        }
        supervisor.fault().map(|fault| Fault::clone(fault))
    }

    /// Returns its current state.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// use nccl::CommunicatorState;
    ///
    /// let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// assert_eq!(comm.state(), CommunicatorState::Ready);
    /// comm.abort("an example")?;
    /// assert_eq!(comm.state(), CommunicatorState::Aborted);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn state(&self) -> State {
        self.inner.lifecycle.get()
    }

    /// Returns the library that made it.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// println!("on NCCL {}", comm.library().version());
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn library(&self) -> &Library {
        &self.inner.library
    }

    /// Waits until all issued operations are done on all ranks, and frees the communicator.
    ///
    /// All ranks must call this, or drop their communicators. All clones of this communicator are unusable afterwards.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] when not all ranks finalized within the communicator's finalize
    /// timeout (30 s unless set), which includes operations that are being issued; it is aborted then, which may take the
    /// abort timeout (10 s unless set) and a second more. [`ErrorKind::Closed`] and [`ErrorKind::Aborted`] when it
    /// had ended before. The failure of an exchange of `LoadStoreAllToAll` whose request was dropped: the communicator is finalized
    /// then.
    ///
    /// Wraps `ncclCommFinalize` and `ncclCommDestroy`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// comm.finalize()?;
    /// assert!(comm.finalize().is_err());
    /// # Ok(())
    /// # }
    /// ```
    pub fn finalize(&self) -> Result<()> {
        lifecycle::finalize(&self.inner)
    }

    /// Ends the communicator now, whatever it is doing, from any thread.
    ///
    /// Operations under way end; their results are void, and every call and request on this rank returns
    /// [`ErrorKind::Aborted`]. For a `World`'s communicator, the other ranks receive the reason and abort as well; this
    /// call returns when each of them has confirmed its abort, is gone, or has exceeded the confirm timeout (3 s unless
    /// set). Without a `World`, each rank has to call abort itself. A second abort only waits for the end of the first.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] when NCCL did not return within the abort timeout (10 s unless set). The communicator is
    /// then leaked: this crate does not use it any more, and the memory that it was using must not be moved or freed.
    ///
    /// Wraps `ncclCommAbort`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// comm.abort("the service is shutting down")?;
    /// let mut y = stream.alloc_zeros::<f32>(4)?;
    /// assert!(comm.all_reduce_in_place(&mut y, nccl::ReduceOp::Sum).is_err());
    /// # Ok(())
    /// # }
    /// ```
    pub fn abort(&self, reason: &str) -> Result<()> {
        lifecycle::abort(&self.inner, reason)
    }

    /// Ends all operations under way on this communicator, on all of its ranks, and refuses all further ones: only
    /// [`shrink`](Self::shrink) remains possible; in [`LaunchMode::NonBlocking`](crate::LaunchMode::NonBlocking) by
    /// `ncclCommShrink`, as long as no rank is gone.
    ///
    /// The reason is announced to every rank. Calls and requests on all ranks return [`ErrorKind::Aborted`] with this `reason`
    /// and a fault of the class [`Revoked`](FaultClass::Revoked). This call returns when every rank has stopped, is gone, or
    /// has exceeded the confirm timeout (3 s unless set). Any rank may call this, from any thread.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] in [`LaunchMode::NonBlocking`](crate::LaunchMode::NonBlocking) before NCCL 2.28.7;
    /// the call then has no effect. [`ErrorKind::InvalidConfig`] for a blocking communicator that was made elsewhere.
    /// [`ErrorKind::Aborted`] when the communicator had already ended, or ends for another reason at the same moment.
    /// [`ErrorKind::TimedOut`] when NCCL did not return within the abort timeout; the communicator is then leaked.
    ///
    /// Wraps `ncclCommRevoke`; in [`LaunchMode::BlockingChild`](crate::LaunchMode::BlockingChild) `ncclCommAbort`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// let world = nccl::World::threads(1).remove(0);
    /// let comm = world.communicator("demo").stream(&stream).build()?;
    /// comm.revoke("this step is not wanted any more")?;
    /// let mut y = stream.alloc_zeros::<f32>(4)?;
    /// let error = comm.all_reduce_in_place(&mut y, nccl::ReduceOp::Sum).unwrap_err();
    /// assert!(error.to_string().contains("not wanted any more"));
    /// # Ok(())
    /// # }
    /// ```
    pub fn revoke(&self, reason: &str) -> Result<()> {
        revoke::revoke(&self.inner, reason)
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator")
            .field("name", &self.inner.name)
            .field("rank", &self.inner.rank)
            .field("world_size", &self.inner.world_size)
            .field("state", &self.inner.lifecycle.get())
            .finish()
    }
}
