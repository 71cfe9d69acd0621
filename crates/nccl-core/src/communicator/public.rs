//! A communicator, as a program has it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::CudaStream;

use super::inner::Inner;
use super::launch_mode::LaunchMode;
use super::{lifecycle, revoke};
use crate::error::Result;
#[cfg(doc)]
use crate::error::{Error, ErrorKind};
use crate::forked::{self, Resident};
use crate::library::Library;
use crate::recorder::{Recording, read_one};
use crate::state::State;
use nccl_base::fault::Fault;
#[cfg(doc)]
use nccl_base::fault::FaultClass;
use nccl_base::from_outside;

/// The ranks that work together, seen from one of them (`ncclComm_t`).
///
/// Cheap to clone; the operations take `&self` and may be called from any thread. NCCL serves one call
/// on a communicator at a time, so concurrent callers take turns; all ranks must issue their operations
/// in the same order.
///
/// Dropping the last clone finalizes the communicator in the background, under a deadline, and aborts
/// it when that passes; [`finalize`](Self::finalize) does the same in the foreground and tells.
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
    pub inner: Resident<Arc<Inner>>,
    /// Where the operations of this clone are put.
    pub(crate) stream: Resident<Arc<CudaStream>>,
    /// How long each may take.
    #[doc(hidden)]
    pub limit: Duration,
}

impl Communicator {
    /// This rank, from 0.
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

    /// Which rank of the world each of its ranks is, in order: the world of the epoch in which the communicator was made.
    /// Empty for one that was made without a `World`.
    ///
    /// Texts and events say a rank's number in the world beside that in the communicator where they differ.
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
        let members = self.inner.tracked.track().identity.members.as_deref();
        members.unwrap_or_default()
    }

    /// The number of ranks.
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

    /// The name it was made with.
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

    /// The stream on which operations are put: the one it was made with, or that of [`on`](Self::on).
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

    /// The same communicator with another stream for its operations.
    ///
    /// NCCL runs the operations of a communicator one after another, whatever their streams; on every
    /// rank in the same order. A stream that cannot carry operations is refused by the first one.
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
            stream: Resident::new(Arc::clone(stream)),
            limit: self.limit,
        }
    }

    /// The same communicator with another limit for its operations: for the call, and for
    /// [`Request::wait`](crate::Request::wait). `NCCL_RUN_TIMEOUT` in the environment wins over it.
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
    pub fn within(&self, limit: Duration) -> Self {
        Self {
            limit: from_outside::operation(limit),
            ..self.clone()
        }
    }

    /// How it calls NCCL; `None` for one that was made elsewhere and blocks.
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

    /// What it did last.
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
        read_one(self.inner.tracked.track())
    }

    /// What its ranks call it, where there are others.
    #[doc(hidden)]
    pub fn key(&self) -> Option<&str> {
        self.inner.board.as_ref().map(|board| board.key())
    }

    /// What ended the communicator on all of its ranks, the same on each of them; `None` while it is in
    /// use, and when its ranks do not know each other (as [`Error::fault`]).
    ///
    /// For those whose own error types lose it.
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
        let board = self.inner.board.as_ref()?;
        if !self.inner.phase.get().is_aborted() {
            return None;
        }
        board.fault().map(|fault| Fault::clone(fault))
    }

    /// Where it is in its life.
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
        self.inner.phase.get()
    }

    /// The library it lives in.
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
    /// Every rank has to call it (or drop its communicator). The other clones of this communicator are
    /// out of use from then on.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] when the ranks did not all get there within the communicator's finalize
    /// limit (30 s unless set), operations that are being issued included; it is aborted then, which may take the
    /// abort limit (10 s unless set) and a second more. [`ErrorKind::Closed`] and [`ErrorKind::Aborted`] when it
    /// had ended before.
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
    /// Operations under way end; their results are void, and every call and request on this rank
    /// returns [`ErrorKind::Aborted`]. The other ranks of a `World`'s communicator are
    /// told, and abort theirs for the same reason; this returns when they have said so, or are gone, or
    /// their time is up (3 s unless set). Ranks that came together in another way each have to abort by
    /// themselves. A second abort does nothing.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] when NCCL did not come back within the abort limit (10 s unless set). The
    /// communicator is then leaked: nothing touches it any more, and memory that it was still using
    /// must stay where it is.
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

    /// Ends what is under way on this communicator, on all of its ranks, and all that would come: only
    /// [`shrink`](Self::shrink) is left; in [`LaunchMode::NonBlocking`](crate::LaunchMode::NonBlocking) by NCCL's own
    /// way, as long as no rank is gone.
    ///
    /// Every rank is told, and its calls and requests return [`ErrorKind::Aborted`] with this `reason` and a
    /// fault of the class [`Revoked`](FaultClass::Revoked). This returns when all have stopped, or are gone, or
    /// their time is up (3 s unless set). Any rank may call it, from any thread.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] in [`LaunchMode::NonBlocking`](crate::LaunchMode::NonBlocking) before NCCL 2.28.7;
    /// nothing has happened then. [`ErrorKind::InvalidConfig`] when it was made elsewhere and its calls block. [`ErrorKind::Aborted`] when it had ended before, or
    /// ends for another reason at the same moment. [`ErrorKind::TimedOut`] when NCCL did not come back within
    /// the abort limit: it is leaked then.
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
            .field("state", &self.inner.phase.get())
            .finish()
    }
}
