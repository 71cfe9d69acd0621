//! What a communicator is made from.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::CudaStream;

use super::everybody::Birth;
use super::init::{Company, Plan, Prepared};
use super::{Communicator, LaunchMode, Timeouts};
use crate::abort::AbortSignal;
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use crate::events;
use crate::library::Library;
use crate::local;
use crate::operation::{Operation, OperationKind, Shape};
use crate::preflight::Settings;
use crate::rendezvous::World;
use crate::time::deadline_after;
use crate::unique_id::UniqueId;

/// Makes a [`Communicator`]; from [`World::communicator`](crate::World::communicator) or
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
    name: &'a str,
    origin: Origin<'a>,
    rank: usize,
    world_size: usize,
    stream: Option<Arc<CudaStream>>,
    config: Config,
    mode: LaunchMode,
    timeouts: Timeouts,
    abort_signals: Vec<AbortSignal>,
    library: Option<Library>,
    company: Option<Company>,
    checks: bool,
}

/// Where the token comes from with which the ranks meet inside NCCL.
enum Origin<'a> {
    Given(UniqueId),
    /// Rank 0 of the world makes one, and everybody learns whether everybody is ready.
    World(&'a World),
    /// The ranks of another communicator exchange it.
    Split,
}

impl<'a> CommunicatorBuilder<'a> {
    pub(super) fn with_id(name: &'a str, id: UniqueId, rank: usize, world_size: usize) -> Self {
        Self::new(name, Origin::Given(id), rank, world_size)
    }

    pub(crate) fn with_world(name: &'a str, world: &'a World) -> Self {
        Self {
            company: Some((Arc::clone(&world.line), (0..world.size()).collect())),
            timeouts: world.timeouts,
            mode: world.launch_mode(),
            ..Self::new(name, Origin::World(world), world.rank(), world.size())
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
            let (line, ranks) = board.line();
            let ranks = members.iter().map(|&member| ranks[member]).collect();
            (Arc::clone(line), ranks)
        });
        Self {
            stream: Some(Arc::clone(&parent.stream)),
            timeouts: inner.timeouts,
            mode: inner.launch_mode().unwrap_or_default(),
            library: Some(inner.library.clone()),
            abort_signals: vec![inner.abort_signal.clone()],
            company,
            ..Self::new(name, Origin::Split, rank, members.len())
        }
    }

    /// For ranks that did not meet in a world: the way to each other.
    pub(super) fn in_company(mut self, company: Company) -> Self {
        self.company = Some(company);
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
            mode: LaunchMode::default(),
            timeouts: Timeouts::default(),
            abort_signals: Vec::new(),
            library: None,
            company: None,
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

    /// How NCCL is called: [`LaunchMode::NonBlocking`] unless set, here or for the world
    /// ([`World::with_launch_mode`]). All ranks have to choose alike.
    ///
    /// A split has the mode of the communicator that it is split from.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// let world = nccl::World::threads(1).remove(0);
    /// let comm = world
    ///     .communicator("demo")
    ///     .stream(&stream)
    ///     .launch_mode(nccl::LaunchMode::KillSwitch)
    ///     .build()?;
    /// let mut y = stream.clone_htod(&[1.0f32; 8])?;
    /// comm.all_reduce_in_place(&mut y, nccl::ReduceOp::Sum)?.wait()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn launch_mode(mut self, mode: LaunchMode) -> Self {
        self.mode = mode;
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
    /// communicator; all ranks have to say so ([`World::preflight`](crate::World::preflight)).
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

    /// Makes the communicator, together with the other ranks.
    ///
    /// What this rank can find wrong by itself is found before any other rank waits for it. Made from a
    /// [`World`](crate::World), all ranks hear of it at once, instead of waiting for this one.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] when the ranks were not all there in time; what NCCL had built by then is
    /// freed. [`ErrorKind::Aborted`] when the abort signal was given. [`ErrorKind::Rendezvous`] when
    /// another rank could not take part. [`ErrorKind::Preflight`], on all ranks, when what NCCL needs is not
    /// there (see [`World::preflight`](crate::World::preflight)). [`ErrorKind::InvalidConfig`], [`ErrorKind::Unsupported`],
    /// [`ErrorKind::Stream`], [`ErrorKind::NoSuchRank`], [`ErrorKind::Load`] for what is wrong here.
    ///
    /// Wraps `ncclCommInitRankConfig`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// let world = nccl::World::single();
    /// let comm = world.communicator("demo").stream(&stream).build()?;
    /// assert_eq!(comm.world_size(), 1);
    /// let error = world.communicator("no stream").build().unwrap_err();
    /// assert!(error.to_string().contains("stream"));
    /// # Ok(())
    /// # }
    /// ```
    pub fn build(self) -> Result<Communicator> {
        let started = Instant::now();
        let (name, rank, world_size) = (self.name, self.rank, self.world_size);
        let span = events::init_span(name, rank, world_size);
        let _entered = span.enter();
        let made = self.build_until().map_err(|error| {
            error.during(|| Operation {
                kind: OperationKind::Init,
                communicator: Arc::from(name),
                rank,
                world_size,
                host: crate::host::name(),
                pid: std::process::id(),
                sequence: None,
                plan: None,
                shape: Shape::default(),
                elapsed: started.elapsed(),
            })
        });
        events::made(name, started.elapsed(), made.as_ref());
        made
    }

    fn build_until(self) -> Result<Communicator> {
        let deadline = deadline_after(self.timeouts.init);
        let (birth, signal) = self.begin();
        let (id, prepared) = match self.origin {
            Origin::Given(id) => (id, self.prepare(false, signal, &birth)?.0),
            Origin::World(world) => {
                let prepared = self.prepare(false, signal.clone(), &birth);
                // Before NCCL is asked for anything, because it remembers what it found in its environment.
                let interrupted = || signal.is_aborted();
                let about = self.checks.then(|| self.about());
                let checked = world.check(about.as_ref(), deadline, &interrupted);
                let prepared = match (prepared, checked) {
                    // It is the same on all ranks.
                    (_, Err(error)) if matches!(error.kind(), ErrorKind::Preflight { .. }) => {
                        return Err(error);
                    }
                    (Ok((prepared, _)), Ok(())) => {
                        // So that there is time left to tell the others why there is none.
                        let limit = deadline.saturating_duration_since(Instant::now()) / 2;
                        self.token(limit).map(|id| (prepared, id))
                    }
                    (Err(error), _) | (Ok(_), Err(error)) => Err(error),
                };
                agree(world, self.name, self.mode, prepared, deadline, &signal)
                    .map_err(|error| birth.explain(error))?
            }
            Origin::Split => {
                return Err(Error::new(ErrorKind::InvalidConfig {
                    field: "build",
                    reason: String::from("the builder of a split is built by the split"),
                }));
            }
        };
        let inner = prepared.join(&id, deadline, || false)?;
        Ok(Communicator::of(inner))
    }

    fn wanted_library(&self) -> Result<Library> {
        match (&self.library, &self.origin) {
            (Some(library), _) => Ok(library.clone()),
            (None, Origin::World(world)) if !world.needs_nccl() => local::library(),
            (None, _) => Library::load(),
        }
    }

    /// What the ranks compare before they start.
    fn about(&self) -> Settings {
        let mut settings = Settings::new().launch_mode(self.mode);
        if let Some(stream) = &self.stream {
            settings = settings.stream(stream);
        }
        match self.wanted_library() {
            Ok(library) => settings.library(&library),
            // Which `prepare` tells.
            Err(_) => settings,
        }
    }

    /// The token, which rank 0 makes.
    fn token(&self, limit: Duration) -> Result<Option<UniqueId>> {
        let makes_id = self.rank == 0;
        makes_id
            .then(|| UniqueId::within(&self.wanted_library()?, limit))
            .transpose()
    }

    /// As [`prepare`](Self::prepare), for a split.
    pub(super) fn prepare_split(&self, makes_id: bool) -> Result<(Prepared, Option<UniqueId>)> {
        let (birth, signal) = self.begin();
        self.prepare(makes_id, signal, &birth)
    }

    /// From here on, it is among what is aborted with all communicators of the process; and what else ends it.
    fn begin(&self) -> (Arc<Birth>, AbortSignal) {
        let birth = Birth::begin(self.name, self.rank, &self.timeouts);
        let mut signals = self.abort_signals.clone();
        signals.push(birth.signal().clone());
        (birth, AbortSignal::any(&signals))
    }

    /// Everything this rank can check alone; one rank also makes the token.
    fn prepare(
        &self,
        makes_id: bool,
        abort_signal: AbortSignal,
        birth: &Arc<Birth>,
    ) -> Result<(Prepared, Option<UniqueId>)> {
        let stream = self.stream.clone().ok_or_else(|| {
            Error::new(ErrorKind::InvalidConfig {
                field: "stream",
                reason: String::from("a communicator needs a stream to put its operations on"),
            })
        })?;
        let library = self.wanted_library()?;
        let plan = Plan {
            library: library.clone(),
            name: self.name,
            rank: self.rank,
            world_size: self.world_size,
            stream,
            config: &self.config,
            mode: self.mode,
            timeouts: self.timeouts,
            abort_signal,
            company: self.company.clone(),
            birth: Arc::clone(birth),
        };
        self.mode.refuse_contradictions()?;
        let prepared = plan.prepare()?;
        let limit = self.timeouts.init.min(self.timeouts.operation / 2);
        let id = makes_id
            .then(|| UniqueId::within(&library, limit))
            .transpose()?;
        Ok((prepared, id))
    }
}

/// All ranks tell each other whether they can take part; rank 0 adds the token.
///
/// So a rank that cannot is the reason on every rank, at once, instead of a wait for it.
fn agree(
    world: &World,
    name: &str,
    mode: LaunchMode,
    prepared: Result<(Prepared, Option<UniqueId>)>,
    deadline: Instant,
    signal: &AbortSignal,
) -> Result<(UniqueId, Prepared)> {
    const READY: u8 = 0;
    const FAILED: u8 = 1;
    let message = match &prepared {
        Ok((_, id)) => {
            let id = id.as_ref().map(|id| world.line.seal(name, id));
            [&[READY, mode.code()], &id.unwrap_or_default()[..]].concat()
        }
        Err(error) => [&[FAILED], error.kind().to_string().as_bytes()].concat(),
    };
    let topic = format!("communicator/{name}");
    let answers = world.collect(&topic, &message, deadline, || signal.is_aborted());
    // What is wrong here is the better answer on this rank.
    let (prepared, _) = prepared?;
    let answers = answers?;
    for (rank, answer) in answers.iter().enumerate() {
        if let [FAILED, reason @ ..] = &answer[..] {
            return Err(Error::rendezvous(format!(
                "{} cannot make communicator {name:?}: {}",
                world.describe(rank),
                String::from_utf8_lossy(reason)
            )));
        }
        same_mode(mode, answer.get(1), || world.describe(rank))?;
    }
    let id = answers
        .first()
        .and_then(|answer| answer.get(2..))
        .unwrap_or_default();
    Ok((world.line.unseal(name, id)?, prepared))
}

/// The ranks split the communicator that carries their data together, or none does.
///
/// # Errors
/// [`ErrorKind::InvalidConfig`] when a rank, of which `who` tells, sent another mode.
pub(super) fn same_mode(
    mode: LaunchMode,
    sent: Option<&u8>,
    who: impl FnOnce() -> String,
) -> Result<()> {
    let its = sent.copied().and_then(LaunchMode::of_code);
    if its == Some(mode) {
        return Ok(());
    }
    let its = its.map_or_else(
        || String::from("one that is unknown here"),
        |its| its.to_string(),
    );
    Err(Error::new(ErrorKind::InvalidConfig {
        field: "launch_mode",
        reason: format!(
            "{} makes it in launch mode {its}, and this rank in {mode}: choose the same on all ranks",
            who()
        ),
    }))
}
