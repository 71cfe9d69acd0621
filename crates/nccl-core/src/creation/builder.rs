//! What a communicator is made from.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::CudaStream;

use super::init::Company;
use crate::abort::AbortSignal;
use crate::communicator::{Communicator, Timeouts};
use crate::config::Config;
use crate::library::Library;
use crate::local;
use crate::peers::Terms;
use crate::unique_id::UniqueId;
use nccl_base::launch_mode::LaunchMode;

/// Makes a [`Communicator`]; from `World::communicator` or
/// [`Communicator::builder`].
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # nccl_emulator::install_unless_gpu()?;
/// use std::time::Duration;
///
/// let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
/// let comm = nccl::World::single()
///     .communicator("model/tp")
///     .stream(&stream)
///     .timeout(Duration::from_secs(5))
///     .build()?;
/// assert_eq!(comm.name(), "model/tp");
/// # Ok(())
/// # }
/// ```
#[must_use = "a builder makes nothing until `build`"]
pub struct CommunicatorBuilder<'a> {
    pub(super) name: &'a str,
    pub(super) origin: Origin<'a>,
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) stream: Option<Arc<CudaStream>>,
    pub(super) config: Config,
    pub(super) mode: Option<LaunchMode>,
    pub(super) timeouts: Timeouts,
    pub(super) abort_signals: Vec<AbortSignal>,
    pub(super) library: Option<Library>,
    pub(super) company: Option<Company>,
    /// Which ranks of the world its ranks are, where there is no way to others.
    pub(super) members: Option<Arc<[usize]>>,
    pub(super) checks: bool,
}

/// Where the token comes from with which the ranks meet inside NCCL.
pub(super) enum Origin<'a> {
    Given(UniqueId),
    /// Rank 0 of the world makes one, and everybody learns whether everybody is ready.
    World(Terms<'a>),
    /// The ranks of another communicator exchange it.
    Split,
}

impl<'a> CommunicatorBuilder<'a> {
    pub(super) fn with_id(name: &'a str, id: UniqueId, rank: usize, world_size: usize) -> Self {
        Self::new(name, Origin::Given(id), rank, world_size)
    }

    #[doc(hidden)]
    pub fn with_world(name: &'a str, terms: Terms<'a>) -> Self {
        let peers = &terms.peers;
        let (rank, size) = (peers.rank(), peers.size());
        Self {
            company: Some((Arc::clone(peers), (0..size).collect())),
            timeouts: terms.timeouts,
            mode: terms.launch_mode,
            ..Self::new(name, Origin::World(terms.clone()), rank, size)
        }
    }

    /// Of the ranks `members` of `parent`, of which this is number `rank`.
    pub(super) fn of_split(
        name: &'a str,
        rank: usize,
        parent: &Communicator,
        members: &[usize],
    ) -> Self {
        let inner = &parent.inner;
        let company = inner.board.as_ref().map(|board| {
            let ranks = board.members();
            let ranks = members.iter().map(|&member| ranks[member]).collect();
            (Arc::clone(board.peers()), ranks)
        });
        let world = parent.world_ranks();
        let world_ranks = members.iter().map(|&member| world.get(member).copied());
        Self {
            members: world_ranks.collect(),
            stream: Some(Arc::clone(&parent.stream)),
            timeouts: inner.timeouts,
            mode: inner.asked_mode,
            library: Some(inner.library.clone()),
            abort_signals: vec![inner.abort_signal.clone()],
            company,
            ..Self::new(name, Origin::Split, rank, members.len())
        }
    }

    /// Of all ranks of `world`, of which those of `parent` are the first.
    pub(super) fn of_grow(name: &'a str, terms: Terms<'a>, parent: &Communicator) -> Self {
        let inner = &parent.inner;
        Self {
            stream: Some(Arc::clone(&parent.stream)),
            timeouts: inner.timeouts,
            mode: inner.asked_mode,
            // What serves a world of one rank is of no use for more.
            library: Some(&inner.library)
                .filter(|library| !local::is(library))
                .cloned(),
            abort_signals: vec![inner.abort_signal.clone()],
            ..Self::with_world(name, terms)
        }
    }

    /// For ranks that did not meet in a world: the way to each other.
    pub(super) fn in_company(mut self, company: Option<Company>) -> Self {
        self.company = company;
        self
    }

    pub(super) fn init_limit(&self) -> Duration {
        self.timeouts.init
    }

    fn new(name: &'a str, origin: Origin<'a>, rank: usize, world_size: usize) -> Self {
        Self {
            name,
            origin,
            rank,
            world_size,
            stream: None,
            config: Config::new(),
            mode: None,
            timeouts: Timeouts::default(),
            abort_signals: Vec::new(),
            library: None,
            company: None,
            members: None,
            checks: true,
        }
    }

    /// The stream on which operations are put; it also says which device this rank uses.
    ///
    /// Memory that is communicated is best allocated on this stream, too: the order of the stream then
    /// keeps it alive for nothing.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// let comm = nccl::World::single().communicator("demo").stream(&stream).build()?;
    /// assert!(std::sync::Arc::ptr_eq(comm.stream(), &stream));
    /// # Ok(())
    /// # }
    /// ```
    pub fn stream(mut self, stream: &Arc<CudaStream>) -> Self {
        self.stream = Some(Arc::clone(stream));
        self
    }

    /// Settings for NCCL.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// let comm = nccl::World::single()
    ///     .communicator("demo")
    ///     .stream(&stream)
    ///     .config(nccl::Config::new().max_ctas(8))
    ///     .build()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn config(mut self, config: Config) -> Self {
        self.config = config;
        self
    }

    /// How NCCL is called. Unless set, here or for the world (`World::with_launch_mode`), the ranks agree on
    /// [`LaunchMode::BlockingChild`] where all can do that, and on [`LaunchMode::NonBlocking`] otherwise. Ranks that
    /// ask for different modes get an error; ranks that come together with a [`UniqueId`](crate::UniqueId) cannot
    /// agree, and all have to be alike.
    ///
    /// What is made by a split, a shrink or a grow has the mode of the communicator that it is made from.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// let world = nccl::World::threads(1).remove(0);
    /// let comm = world
    ///     .communicator("demo")
    ///     .stream(&stream)
    ///     .launch_mode(nccl::LaunchMode::NonBlocking)
    ///     .build()?;
    /// let mut y = stream.clone_htod(&[1.0f32; 8])?;
    /// comm.all_reduce_in_place(&mut y, nccl::ReduceOp::Sum)?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn launch_mode(mut self, mode: LaunchMode) -> Self {
        self.mode = Some(mode);
        self
    }

    /// The library to use, instead of [`Library::load`]'s.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// let library = nccl::Library::load()?;
    /// let comm = nccl::World::single().communicator("demo").stream(&stream).library(&library).build()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn library(mut self, library: &Library) -> Self {
        self.library = Some(library.clone());
        self
    }

    /// How long everything may take, in place of the world's [`Timeouts`].
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// use std::time::Duration;
    /// let comm = nccl::World::single()
    ///     .communicator("demo")
    ///     .stream(&stream)
    ///     .timeouts(nccl::Timeouts::new().operation(Duration::from_secs(5)))
    ///     .build()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn timeouts(mut self, timeouts: Timeouts) -> Self {
        self.timeouts = timeouts;
        self
    }

    /// How long an operation may wait for its turn on its stream, behind work that is not the
    /// communicator's; ten times [`timeout`](Self::timeout) unless set, which is 300 s.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// use std::time::Duration;
    /// let comm = nccl::World::single()
    ///     .communicator("demo")
    ///     .stream(&stream)
    ///     .queue_timeout(Duration::from_secs(3600))
    ///     .build()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn queue_timeout(mut self, limit: Duration) -> Self {
        self.timeouts.queue = Some(limit);
        self
    }

    /// How long an operation may take, once it is called and nothing is in front of it; 30 s unless set.
    ///
    /// That holds whether or not anybody waits for it: an operation whose [`Request`](crate::Request) was
    /// dropped ends its communicator, on all ranks, at most an eighth of the limit (and at most a quarter
    /// of a second) after it. Work of others that is in front of it on its stream does not count, see
    /// [`queue_timeout`](Self::queue_timeout). Operations that are issued within less than 10 ms cannot
    /// always be told apart from each other, and from what else is put on the stream meanwhile: what a
    /// program puts there in one go should not take longer than the limit.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// use std::time::Duration;
    /// let comm = nccl::World::single()
    ///     .communicator("demo")
    ///     .stream(&stream)
    ///     .timeout(Duration::from_secs(5))
    ///     .build()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.timeouts.operation = limit;
        self
    }

    /// How long [`build`](Self::build) may take; 60 s unless set.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// use std::time::Duration;
    /// let comm = nccl::World::single()
    ///     .communicator("demo")
    ///     .stream(&stream)
    ///     .init_timeout(Duration::from_secs(10))
    ///     .build()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn init_timeout(mut self, limit: Duration) -> Self {
        self.timeouts.init = limit;
        self
    }

    /// How long the ranks may take to get to the end together; 30 s unless set.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// use std::time::Duration;
    /// let comm = nccl::World::single()
    ///     .communicator("demo")
    ///     .stream(&stream)
    ///     .finalize_timeout(Duration::from_secs(5))
    ///     .build()?;
    /// comm.finalize()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn finalize_timeout(mut self, limit: Duration) -> Self {
        self.timeouts.finalize = limit;
        self
    }

    /// How long NCCL may take to give an aborted communicator back; 10 s unless set.
    ///
    /// While NCCL is at a call or a launch, it is 4 s at least: as long as NCCL may sleep between two attempts to connect,
    /// where it does not look whether it is to end.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// use std::time::Duration;
    /// let comm = nccl::World::single()
    ///     .communicator("demo")
    ///     .stream(&stream)
    ///     .abort_timeout(Duration::from_secs(2))
    ///     .build()?;
    /// comm.abort("an example")?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn abort_timeout(mut self, limit: Duration) -> Self {
        self.timeouts.abort = limit;
        self
    }

    /// How long the other ranks of an aborted communicator may take to confirm that they aborted it as
    /// well; 3 s unless set.
    ///
    /// Until then an error that follows from the abort is not handed out, because they may still write
    /// into memory of this rank. It names those that did not confirm.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// use std::time::Duration;
    /// let comm = nccl::World::single()
    ///     .communicator("demo")
    ///     .stream(&stream)
    ///     .confirm_timeout(Duration::from_secs(1))
    ///     .build()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn confirm_timeout(mut self, limit: Duration) -> Self {
        self.timeouts.confirm = limit;
        self
    }

    /// A signal that ends the communicator, even while it is being made; one of several, if this is
    /// called more than once.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// let stop = nccl::AbortSignal::new();
    /// let comm = nccl::World::single().communicator("demo").stream(&stream).abort_signal(&stop).build()?;
    /// stop.abort(); // from any thread
    /// let mut y = stream.alloc_zeros::<f32>(4)?;
    /// assert!(comm.all_reduce_in_place(&mut y, nccl::ReduceOp::Sum).is_err());
    /// # Ok(())
    /// # }
    /// ```
    pub fn abort_signal(mut self, signal: &AbortSignal) -> Self {
        self.abort_signals.push(signal.clone());
        self
    }

    /// Does not check first what has to agree between the ranks, even if this is the world's first
    /// communicator; all ranks have to say so (`World::preflight`).
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// let world = nccl::World::threads(1).remove(0);
    /// let comm = world.communicator("demo").stream(&stream).without_preflight().build()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn without_preflight(mut self) -> Self {
        self.checks = false;
        self
    }
}
