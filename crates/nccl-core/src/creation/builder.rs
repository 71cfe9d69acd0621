//! The settings with which a communicator is made.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::CudaStream;

use super::init::WorldMembers;
use crate::abort::AbortSignal;
use crate::communicator::{Communicator, Timeouts};
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use crate::library::Library;
use crate::peers::WorldParameters;
use crate::single_rank;
use crate::unique_id::UniqueId;
use nccl_base::launch_mode::LaunchMode;

/// Builds a [`Communicator`]; created by `World::communicator` or [`Communicator::builder`]. The fields are the
/// settings.
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
///     .with(|comm| {
///         comm.timeouts.operation = Duration::from_secs(5);
///         comm.config.max_ctas = Some(8);
///     })
///     .build()?;
/// assert_eq!(comm.name(), "model/tp");
/// # Ok(())
/// # }
/// ```
#[must_use = "a builder makes nothing until `build`"]
#[non_exhaustive]
pub struct CommunicatorBuilder<'a> {
    pub(super) name: &'a str,
    pub(super) origin: Origin<'a>,
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) stream: Option<Arc<CudaStream>>,
    /// NCCL's configuration.
    pub config: Config,
    /// How NCCL is called. With `None`, here and for the world (`World::with_launch_mode`), the ranks agree on
    /// [`LaunchMode::BlockingChild`] where all support it, and on [`LaunchMode::NonBlocking`] otherwise. Ranks that
    /// request different modes get an error; ranks that meet with a [`UniqueId`](crate::UniqueId) cannot
    /// agree, and all have to be configured alike.
    ///
    /// A split, a shrink or a grow inherits the mode of the communicator from which it makes the new one.
    pub launch_mode: Option<LaunchMode>,
    /// Whether the communicator can be suspended ([`Communicator::suspend`]). It then uses [`LaunchMode::NonBlocking`],
    /// even if `launch_mode` requests the other mode, in which NCCL shares the memory with an idle parent and does not
    /// suspend it. All ranks have to set the same. Default `false`.
    pub suspendable: bool,
    /// The number of ranks on which NCCL runs a thread for the rendezvous; default 1. Each thread serves its ranks one after
    /// another, so a start of thousands of ranks is faster with one thread for every few hundred ranks (NCCL ≥ 2.23.4). At most
    /// the number of ranks, the same on all ranks, and 1 for ranks that have not met in a world.
    pub roots: usize,
    /// The timeouts; initially those of the world (`World::with_timeouts`).
    pub timeouts: Timeouts,
    /// Signals that end the communicator, even while it is being made. A split inherits the signals of its parent.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// let stop = nccl::AbortSignal::new();
    /// let world = nccl::World::single();
    /// let builder = world.communicator("demo").stream(&stream);
    /// let comm = builder.with(|comm| comm.abort_signals.push(stop.clone())).build()?;
    /// stop.abort(); // from any thread
    /// let mut y = stream.alloc_zeros::<f32>(4)?;
    /// assert!(comm.all_reduce_in_place(&mut y, nccl::ReduceOp::Sum).is_err());
    /// # Ok(())
    /// # }
    /// ```
    pub abort_signals: Vec<AbortSignal>,
    /// The library to use; with `None`, the library of [`Library::load`].
    pub library: Option<Library>,
    /// Whether the ranks compare what has to agree between them before they make the world's first communicator
    /// (`World::preflight`); default `true`. All ranks have to set the same.
    pub preflight: bool,
    pub(super) world_members: Option<WorldMembers>,
    /// The world ranks of its ranks, without a connection to the other ranks.
    pub(super) members: Option<Arc<[usize]>>,
}

/// The source of the token with which the ranks meet inside NCCL.
pub(super) enum Origin<'a> {
    Given(UniqueId),
    /// Rank 0 of the world makes the token, and all ranks learn whether all are ready.
    World(WorldParameters<'a>),
    /// The ranks exchange the token over another communicator.
    Split,
}

impl<'a> CommunicatorBuilder<'a> {
    pub(super) fn with_id(name: &'a str, id: UniqueId, rank: usize, world_size: usize) -> Self {
        Self::new(name, Origin::Given(id), rank, world_size)
    }

    #[doc(hidden)]
    pub fn with_world(name: &'a str, parameters: WorldParameters<'a>) -> Self {
        let peers = &parameters.peers;
        let (rank, size) = (peers.rank(), peers.size());
        Self {
            world_members: Some((Arc::clone(peers), (0..size).collect())),
            timeouts: parameters.timeouts,
            launch_mode: parameters.launch_mode,
            ..Self::new(name, Origin::World(parameters.clone()), rank, size)
        }
    }

    /// Returns a builder for the ranks `members` of `parent`, in which this rank is `rank`.
    pub(super) fn of_split(
        name: &'a str,
        rank: usize,
        parent: &Communicator,
        members: &[usize],
    ) -> Self {
        let inner = &parent.inner;
        let world_members = inner.supervisor.as_ref().map(|supervisor| {
            let ranks = supervisor.members();
            let ranks = members.iter().map(|&member| ranks[member]).collect();
            (Arc::clone(supervisor.peers()), ranks)
        });
        let world = parent.world_ranks();
        let world_ranks = members.iter().map(|&member| world.get(member).copied());
        Self {
            members: world_ranks.collect(),
            stream: Some(Arc::clone(&parent.stream)),
            timeouts: inner.timeouts,
            launch_mode: inner.asked_mode,
            library: Some(inner.library.clone()),
            abort_signals: vec![inner.abort_signal.clone()],
            world_members,
            ..Self::new(name, Origin::Split, rank, members.len())
        }
    }

    /// Returns a builder for all ranks of the world of `parameters`, in which the ranks of `parent` come first.
    pub(super) fn of_grow(
        name: &'a str,
        parameters: WorldParameters<'a>,
        parent: &Communicator,
    ) -> Self {
        let inner = &parent.inner;
        Self {
            stream: Some(Arc::clone(&parent.stream)),
            timeouts: inner.timeouts,
            launch_mode: inner.asked_mode,
            // The library for a world of one rank does not support more ranks.
            library: Some(&inner.library)
                .filter(|library| !single_rank::is(library))
                .cloned(),
            abort_signals: vec![inner.abort_signal.clone()],
            ..Self::with_world(name, parameters)
        }
    }

    /// Sets the peers, for ranks that did not meet in a world.
    pub(super) fn with_world_members(mut self, world_members: Option<WorldMembers>) -> Self {
        self.world_members = world_members;
        self
    }

    /// Whether this rank makes one of the tokens.
    pub(super) fn is_root(&self) -> bool {
        roots(self.roots, self.world_size).any(|root| root == self.rank)
    }

    /// Checks the number of roots.
    pub(super) fn check_roots(&self, library: &Library) -> Result<()> {
        let refused = |reason: String| {
            Err(Error::new(ErrorKind::InvalidConfig {
                field: "roots",
                reason,
            }))
        };
        match (self.roots, &self.origin) {
            (1, _) => Ok(()),
            (_, Origin::Given(_) | Origin::Split) => refused(String::from(
                "ranks that meet with one token have one root: use `World::communicator`",
            )),
            (roots, Origin::World(_)) if roots == 0 || roots > self.world_size => refused(format!(
                "{roots} is not between 1 and the number of ranks, {}",
                self.world_size
            )),
            _ => library
                .function(nccl_sys::Api::ncclCommInitRankScalable)
                .map(drop),
        }
    }

    pub(super) fn asked_mode(&self) -> Option<LaunchMode> {
        match self.suspendable {
            true => Some(LaunchMode::NonBlocking),
            false => self.launch_mode,
        }
    }

    pub(super) fn init_timeout(&self) -> Duration {
        self.timeouts.init
    }

    fn new(name: &'a str, origin: Origin<'a>, rank: usize, world_size: usize) -> Self {
        Self {
            name,
            origin,
            rank,
            world_size,
            stream: None,
            config: Config::default(),
            launch_mode: None,
            suspendable: false,
            roots: 1,
            timeouts: Timeouts::default(),
            abort_signals: Vec::new(),
            library: None,
            world_members: None,
            members: None,
            preflight: true,
        }
    }

    /// Sets the stream on which operations are put, and with it the device of this rank.
    ///
    /// It is best to allocate memory for communication on this stream as well: stream order then
    /// keeps it alive without further cost.
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

    /// Sets fields in a chain of calls.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// let world = nccl::World::threads(1).remove(0);
    /// let comm = world
    ///     .communicator("demo")
    ///     .stream(&stream)
    ///     .with(|comm| comm.launch_mode = Some(nccl::LaunchMode::NonBlocking))
    ///     .build()?;
    /// let mut y = stream.clone_htod(&[1.0f32; 8])?;
    /// comm.all_reduce_in_place(&mut y, nccl::ReduceOp::Sum)?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn with(mut self, set: impl FnOnce(&mut Self)) -> Self {
        set(&mut self);
        self
    }
}

/// The ranks that make tokens: the first of each of `roots` parts.
pub(super) fn roots(roots: usize, world_size: usize) -> impl Iterator<Item = usize> {
    (0..roots).map(move |root| root * world_size / roots)
}
