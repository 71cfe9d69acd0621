//! The public functions that make communicators, new or from an existing one.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use nccl_sys as sys;

use super::{CommunicatorBuilder, Resized, grow, init_all, raw, shrink, split};
use crate::background_call::BackgroundCall;
use crate::communicator::Communicator;
#[cfg(doc)]
use crate::communicator::Timeouts;
#[cfg(doc)]
use crate::error::ErrorKind;
use crate::error::Result;
use crate::library::Library;
use crate::peers::AsWorld;
use crate::unique_id::UniqueId;

impl Communicator {
    /// Returns a builder for a communicator of `world_size` ranks, in which this process is rank `rank`.
    ///
    /// One rank makes `id` with [`UniqueId::new`] and sends it to all others. `World::communicator` does that itself.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// use nccl::{Communicator, Library, UniqueId};
    ///
    /// let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// let id = UniqueId::new(&Library::load()?)?;
    /// let comm = Communicator::builder("demo", id, 0, 1).stream(&stream).build()?;
    /// assert_eq!((comm.rank(), comm.world_size()), (0, 1));
    /// # Ok(())
    /// # }
    /// ```
    pub fn builder(
        name: &str,
        id: UniqueId,
        rank: usize,
        world_size: usize,
    ) -> CommunicatorBuilder<'_> {
        CommunicatorBuilder::with_id(name, id, rank, world_size)
    }

    /// Makes the communicators of a world whose ranks are all in this process, one per stream.
    ///
    /// Rank `i` uses the device of `streams[i]`; two ranks need two devices. If one thread drives all ranks, it has to
    /// issue operations that belong together in one [`group`](crate::group).
    ///
    /// # Errors
    /// [`ErrorKind::InvalidConfig`] without a stream; otherwise as [`CommunicatorBuilder::build`], for
    /// the rank that failed first.
    ///
    /// Does what `ncclCommInitAll` does, under a deadline.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// use cudarc::driver::CudaContext;
    ///
    /// let streams = [CudaContext::new(0)?.new_stream()?, CudaContext::new(1)?.new_stream()?];
    /// let comms = nccl::Communicator::init_all("both", &streams)?;
    /// assert_eq!(comms[1].rank(), 1);
    /// # Ok(())
    /// # }
    /// ```
    pub fn init_all(name: &str, streams: &[Arc<CudaStream>]) -> Result<Vec<Self>> {
        Self::init_all_with(name, streams, |builder| builder)
    }

    /// Like [`init_all`](Self::init_all); `set` configures the builder of each rank.
    ///
    /// # Errors
    /// As [`init_all`](Self::init_all).
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// use std::time::Duration;
    ///
    /// let streams = [cudarc::driver::CudaContext::new(0)?.new_stream()?];
    /// let comms = nccl::Communicator::init_all_with("one", &streams, |builder| {
    ///     builder.with(|comm| comm.timeouts.operation = Duration::from_secs(5))
    /// })?;
    /// assert_eq!(comms.len(), 1);
    /// # Ok(())
    /// # }
    /// ```
    pub fn init_all_with(
        name: &str,
        streams: &[Arc<CudaStream>],
        set: impl Fn(CommunicatorBuilder<'_>) -> CommunicatorBuilder<'_> + Sync,
    ) -> Result<Vec<Self>> {
        init_all::init_all(name, streams, set)
    }

    /// Takes over a communicator that was made elsewhere, for instance by another binding.
    ///
    /// The communicator is finalized or aborted like a communicator of this crate. Its rank and number of ranks are
    /// queried from NCCL, which does not report whether it blocks. It must have been made with `blocking = 0`; for
    /// other communicators use [`from_raw_blocking`](Self::from_raw_blocking). Its ranks do not report faults to each
    /// other.
    ///
    /// # Safety
    /// `raw` is a communicator of `library` that is ready, was made with `blocking = 0`, on the device of
    /// `stream`, and nothing else uses or frees it from now on.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidConfig`] for a null pointer or a stream of another device, [`ErrorKind::Nccl`]
    /// when NCCL refuses the queries, [`ErrorKind::TimedOut`] when a query does not return within 30 s;
    /// the communicator is left unchanged then.
    ///
    /// Wraps `ncclCommUserRank`, `ncclCommCount` and `ncclCommCuDevice`.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let foreign: nccl_sys::ncclComm_t = std::ptr::null_mut();
    /// let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// let library = nccl::Library::load()?;
    /// // SAFETY: `foreign` is given up by whoever made it, and lives on device 0.
    /// let comm = unsafe { nccl::Communicator::from_raw(&library, foreign, "foreign", &stream) }?;
    /// # Ok(())
    /// # }
    /// ```
    pub unsafe fn from_raw(
        library: &Library,
        raw: sys::ncclComm_t,
        name: &str,
        stream: &Arc<CudaStream>,
    ) -> Result<Self> {
        // SAFETY: guaranteed by the caller.
        unsafe { raw::take_over(library, raw, name, stream, false) }
    }

    /// Like [`from_raw`](Self::from_raw), for a communicator that blocks (`blocking = 1`, NCCL's default).
    ///
    /// Its calls cannot be given a deadline. An abort does not end a call that waits for ever, because NCCL would free
    /// the communicator under the thread inside; the communicator is then reported as leaked. It cannot be in one
    /// [`group`](crate::group) with communicators that do not block.
    ///
    /// # Safety
    /// As [`from_raw`](Self::from_raw), but made with `blocking = 1`.
    ///
    /// # Errors
    /// As [`from_raw`](Self::from_raw).
    ///
    /// Wraps `ncclCommUserRank`, `ncclCommCount` and `ncclCommCuDevice`.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let foreign: nccl_sys::ncclComm_t = std::ptr::null_mut();
    /// let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// let library = nccl::Library::load()?;
    /// // SAFETY: `foreign` is of ncclCommInitRank, is given up by whoever made it, and lives on device 0.
    /// let comm = unsafe { nccl::Communicator::from_raw_blocking(&library, foreign, "foreign", &stream) }?;
    /// # Ok(())
    /// # }
    /// ```
    pub unsafe fn from_raw_blocking(
        library: &Library,
        raw: sys::ncclComm_t,
        name: &str,
        stream: &Arc<CudaStream>,
    ) -> Result<Self> {
        // SAFETY: guaranteed by the caller.
        unsafe { raw::take_over(library, raw, name, stream, true) }
    }

    /// Returns NCCL's pointer; `None` once the end of the communicator has begun. Never waits.
    ///
    /// NCCL serves one call on a communicator at a time. A call with this pointer must not overlap with an operation of
    /// this crate on any thread, and must not free the communicator.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// assert!(comm.as_raw().is_some());
    /// comm.finalize()?;
    /// assert!(comm.as_raw().is_none());
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn as_raw(&self) -> Option<sys::ncclComm_t> {
        raw::pointer(self)
    }

    /// Makes a communicator of the ranks that pass the same `color`. A rank that passes `None` gets no communicator.
    ///
    /// The new ranks are ordered by `key`, and by old rank where keys are equal. All ranks have
    /// to call it. The new communicator has this one's stream, timeouts and launch mode.
    ///
    /// # Errors
    /// As [`CommunicatorBuilder::build`]. When a rank cannot take part, all ranks of its colour return an error that
    /// names it. [`TimedOut`](crate::ErrorKind::TimedOut) when a rank does not make the call.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let world = nccl::World::threads(1).remove(0);
    /// # let comm = world.communicator("model").stream(&stream).build()?;
    /// // Pairs of neighbours.
    /// let pair = comm.split("model/tp", Some(comm.rank() as u32 / 2), 0)?;
    /// assert_eq!(pair.expect("a colour was given").world_size(), 1); // one rank only
    /// # Ok(())
    /// # }
    /// ```
    pub fn split(&self, name: &str, color: Option<u32>, key: i64) -> Result<Option<Self>> {
        self.split_with(name, color, key, |builder| builder)
    }

    /// Like [`split`](Self::split), without blocking the calling thread, for tasks of an executor. The ranks of the new
    /// communicator are already connected, as by [`warm_up`](Self::warm_up), so that its first operations do not block for that
    /// in their call.
    ///
    /// A background thread makes the call, and its place among the operations of this communicator is not determined before
    /// that: do not use the communicator until this is ready, even if the future was dropped.
    ///
    /// ```
    /// # async fn example(comm: nccl::Communicator) -> nccl::Result<()> {
    /// let pairs = comm.split_async("pairs", Some(comm.rank() as u32 / 2), 0).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn split_async(
        &self,
        name: &str,
        color: Option<u32>,
        key: i64,
    ) -> BackgroundCall<Option<Self>> {
        let (comm, name) = (self.clone(), name.to_owned());
        BackgroundCall::start(move || {
            let split = comm.split(&name, color, key)?;
            if let Some(split) = &split {
                split.warm_up(comm.inner.timeouts.init)?;
            }
            Ok(split)
        })
    }

    /// Like [`split`](Self::split); `set` configures the builder of the new communicator.
    ///
    /// # Errors
    /// As [`split`](Self::split).
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let context = cudarc::driver::CudaContext::new(0)?;
    /// # let stream = context.new_stream()?;
    /// # let world = nccl::World::threads(1).remove(0);
    /// # let comm = world.communicator("model").stream(&stream).build()?;
    /// let other = context.new_stream()?;
    /// let all = comm.split_with("model/ep", Some(0), 0, |builder| builder.stream(&other))?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn split_with(
        &self,
        name: &str,
        color: Option<u32>,
        key: i64,
        set: impl FnOnce(CommunicatorBuilder<'_>) -> CommunicatorBuilder<'_>,
    ) -> Result<Option<Self>> {
        split::split(self, name, color, key, set)
    }

    /// Makes a communicator of all ranks of `world`, in which the ranks of this one come first.
    ///
    /// Every rank of this communicator calls this function, and every other rank of `world`
    /// [builds](CommunicatorBuilder::build) a communicator of the same name. The ranks of this communicator keep their
    /// numbers; the new one has its stream, timeouts and launch mode.
    ///
    /// `world` is either the generation that new processes have joined (`World::next_generation_keeping` keeps this
    /// communicator until then), or a world of which this communicator has only some ranks.
    ///
    /// No operation may be under way on this communicator: wait for them first. This communicator stays unchanged; drop
    /// it when it is not needed any more. If NCCL fails during the grow, this communicator is aborted on all of its
    /// ranks.
    ///
    /// # Errors
    /// As [`CommunicatorBuilder::build`], within this communicator's init timeout ([`Timeouts::init`]). It is not an
    /// error if `ncclCommGrow` is not possible: a new communicator is made instead, and [`Resized::way`] contains the
    /// reason.
    ///
    /// Wraps `ncclCommGetUniqueId` and `ncclCommGrow` (NCCL 2.29.2).
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// use nccl::{Communicator, ResizeWay, LaunchMode, Library, UniqueId, World};
    ///
    /// std::thread::scope(|scope| {
    ///     for world in World::threads(2) {
    ///         scope.spawn(move || -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    ///             let stream = cudarc::driver::CudaContext::new(world.rank())?.new_stream()?;
    ///             if world.rank() == 0 {
    ///                 let id = UniqueId::new(&Library::load()?)?;
    ///                 let one = Communicator::builder("one", id, 0, 1).stream(&stream);
    ///                 let one = one.with(|comm| comm.launch_mode = Some(LaunchMode::NonBlocking)).build()?;
    ///                 let grown = one.grow(&world, "both")?;
    ///                 assert_eq!(grown.way, ResizeWay::Native);
    ///             } else {
    ///                 let both = world.communicator("both").stream(&stream).build()?;
    ///                 assert_eq!((both.rank(), both.world_size()), (1, 2));
    ///             }
    ///             Ok(())
    ///         });
    ///     }
    /// });
    /// # Ok(())
    /// # }
    /// ```
    pub fn grow(&self, world: &impl AsWorld, name: &str) -> Result<Resized> {
        grow::grow(self, world.parameters(), name)
    }

    /// Makes a communicator without the ranks `without`, and without ranks that are gone.
    ///
    /// All remaining ranks have to call it with the same `without`; the ranks in `without` do not call it, and drop
    /// or abort this communicator. The new ranks keep the old order. The new communicator has this one's stream
    /// and timeouts.
    ///
    /// No operation may be under way on this communicator: wait for them first. This communicator stays unchanged. A shrink is
    /// also possible after a rank's death has ended this communicator; the remaining ranks then make a new one. If NCCL
    /// refuses on any rank, because it has noticed that a peer is gone, all ranks abort this communicator and make a new one.
    ///
    /// # Errors
    /// As [`CommunicatorBuilder::build`]. [`ErrorKind::Rendezvous`] names ranks that did not arrive within the init
    /// timeout, or that passed another `without`; [`ErrorKind::InvalidConfig`] for a communicator whose ranks did not
    /// meet in a `World`, and on a rank in `without`.
    ///
    /// Wraps `ncclCommShrink` where that is possible ([`Resized::way`]).
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let context = cudarc::driver::CudaContext::new(0)?;
    /// # let streams = [context.new_stream()?, cudarc::driver::CudaContext::new(1)?.new_stream()?];
    /// let comms = nccl::Communicator::init_all("both", &streams)?;
    /// let shrunk = comms[1].shrink("without rank 0", &[0])?;
    /// assert_eq!(shrunk.communicator.world_size(), 1);
    /// # Ok(())
    /// # }
    /// ```
    pub fn shrink(&self, name: &str, without: &[usize]) -> Result<Resized> {
        shrink::shrink(self, name, without, false)
    }

    /// Like [`shrink`](Self::shrink), without blocking the calling thread, for tasks of an executor. The ranks of the new
    /// communicator are already connected, as by [`warm_up`](Self::warm_up), so that its first operations do not block for that
    /// in their call.
    ///
    /// A background thread makes the call, and its place among the operations of this communicator is not determined before
    /// that: do not use the communicator until this is ready, even if the future was dropped.
    ///
    /// ```
    /// # async fn example(comm: nccl::Communicator) -> nccl::Result<()> {
    /// let smaller = comm.shrink_async("model", &[]).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn shrink_async(&self, name: &str, without: &[usize]) -> BackgroundCall<Resized> {
        let (comm, name, without) = (self.clone(), name.to_owned(), without.to_owned());
        BackgroundCall::start(move || {
            let resized = comm.shrink(&name, &without)?;
            resized.communicator.warm_up(comm.inner.timeouts.init)?;
            Ok(resized)
        })
    }

    /// Like [`shrink`](Self::shrink), but ends operations that are under way, and with them this communicator, on all
    /// ranks, including those in `without`.
    ///
    /// # Errors
    /// As [`shrink`](Self::shrink).
    ///
    /// Wraps `ncclCommShrink` with `NCCL_SHRINK_ABORT`, and `ncclCommAbort`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let context = cudarc::driver::CudaContext::new(0)?;
    /// # let streams = [context.new_stream()?, cudarc::driver::CudaContext::new(1)?.new_stream()?];
    /// let comms = nccl::Communicator::init_all("both", &streams)?;
    /// let shrunk = comms[1].shrink_aborting("without rank 0", &[0])?;
    /// assert!(comms[1].finalize().is_err(), "it has ended");
    /// # Ok(())
    /// # }
    /// ```
    pub fn shrink_aborting(&self, name: &str, without: &[usize]) -> Result<Resized> {
        shrink::shrink(self, name, without, true)
    }
}
