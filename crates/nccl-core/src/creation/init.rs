//! Makes a communicator: one call, then polls until every rank is there or a deadline passes.
//!
//! Its [`Inner`] exists from before NCCL is called, so that whatever ends communicators ends this one as well. Until
//! it is ready, the thread that makes it has NCCL's pointer, and frees it if the creation fails.

use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaEvent, CudaStream};
use nccl_sys as sys;

use super::start::{BINDING, CALL, Patience, SPLIT, as_int, settle_apart, start, start_split};
use crate::abort::AbortSignal;
use crate::communicator::everybody::Birth;
use crate::communicator::free::within;
use crate::communicator::handle::{Handle, RawComm, Turn, Unsettled};
use crate::communicator::launch_mode::{self, Obstacle, Wish};
use crate::communicator::revocation::Revocation;
use crate::communicator::{Inner, Noticed, Switch, Timeouts, guard, order, timeouts};
use crate::config::Config;
use crate::driver;
use crate::error::{Error, ErrorKind, Result, StreamRefusal};
use crate::events;
use crate::expendable;
use crate::ffi;
use crate::graphs::Plans;
use crate::library::Library;
use crate::operation::{OperationKind, Shape};
use crate::peers::{Peers, Ward};
use crate::recorder::{Home, Identity, Tracked};
use crate::state::{Left, Phase};
use crate::stats::Counting;
use crate::supervision::{sentinel, watchdog};
use crate::sync::Mutex;
use crate::time::deadline_after;
use crate::unique_id::UniqueId;
use nccl_base::fault::Roster;
use nccl_base::launch_mode::{IDLE_PARENT, LaunchMode};

/// The inputs that are known before NCCL is called.
pub(super) struct Plan<'a> {
    pub(super) library: Library,
    pub(super) name: &'a str,
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) stream: Arc<CudaStream>,
    pub(super) config: &'a Config,
    pub(super) wish: Wish,
    pub(super) timeouts: Timeouts,
    pub(super) abort_signal: AbortSignal,
    /// The peers, and the world ranks of its ranks.
    pub(super) company: Option<Company>,
    /// The world ranks of its ranks, without a connection to the other ranks.
    pub(super) members: Option<Arc<[usize]>>,
    /// The record of the call that makes it.
    pub(super) birth: Arc<Birth>,
}

/// The peers of a communicator, and the world ranks of its ranks, in order.
pub(super) type Company = (Arc<dyn Peers>, Arc<[usize]>);

/// Returns the world and launcher ranks of these ranks.
pub(super) fn roster_of(company: Option<&Company>) -> Roster {
    company.map_or_else(Roster::default, |(peers, members)| peers.roster(members))
}

/// A communicator that passed the checks of this rank alone.
pub(super) struct Prepared {
    library: Library,
    name: Arc<str>,
    rank: usize,
    world_size: usize,
    stream: Arc<CudaStream>,
    timeouts: Timeouts,
    abort_signal: AbortSignal,
    context: Arc<CudaContext>,
    wish: Wish,
    /// The mode of the communicator that it is made from.
    inherited: Option<LaunchMode>,
    /// The obstacle to `BlockingChild`, if no mode was requested.
    obstacle: Option<Obstacle>,
    mode: LaunchMode,
    configs: AnyConfigs,
    is_zero_cta: bool,
    join: CudaEvent,
    own_stream: Arc<CudaStream>,
    company: Option<Company>,
    birth: Arc<Birth>,
    /// The function that begins to make it, unless that is `ncclCommInitRankConfig`.
    begin: Option<Begin>,
    /// For the recorder: the rank of the world that makes it, and the world ranks of its ranks.
    home: Option<Arc<Home>>,
    members: Option<Arc<[usize]>>,
    roster: Arc<Roster>,
}

/// Begins to make a communicator, which need not be ready on return.
pub(super) type Begin = Box<
    dyn FnOnce(&Inner, &sys::ncclConfig_t, Patience<'_>) -> Result<Begun, (Left<RawComm>, Error)>,
>;

/// The communicator that a call has begun to make, and whether the call failed all the same.
pub(super) type Begun = (RawComm, Result<()>);

impl Plan<'_> {
    /// Checks everything that this rank can check without the other ranks.
    pub(super) fn prepare(self) -> Result<Prepared> {
        check_ranks(self.rank, self.world_size)?;
        let context = Arc::clone(self.stream.context());
        const WHAT: &str = "the communicator's stream";
        if !context.is_primary() {
            let reason = StreamRefusal::NotPrimary;
            return Err(Error::new(ErrorKind::Stream { what: WHAT, reason }));
        }
        order::admit(WHAT, &self.stream, &context)?;
        let (own_stream, join) = stream_and_event(WHAT, &self.stream, self.timeouts.init / 2)?;
        let mode = self.wish.alone();
        launch_mode::admit(mode, &self.library)?;
        if mode == LaunchMode::BlockingChild {
            guard::ensure()?;
        }
        let configs = AnyConfigs::new(self.config, mode, &self.library, self.name)?;
        let company = self.company.as_ref();
        Ok(Prepared {
            home: company.map(|(peers, _)| peers.home()),
            members: company
                .map(|(_, members)| Arc::clone(members))
                .or(self.members),
            roster: Arc::new(roster_of(company)),
            library: self.library,
            name: Arc::from(self.name),
            rank: self.rank,
            world_size: self.world_size,
            stream: self.stream,
            timeouts: self.timeouts,
            abort_signal: self.abort_signal,
            context,
            wish: self.wish,
            inherited: None,
            obstacle: None,
            mode,
            configs,
            is_zero_cta: self.config.is_zero_cta(),
            join,
            own_stream,
            // A single rank has no peers to tell.
            company: self.company.filter(|_| self.world_size > 1),
            birth: self.birth,
            begin: None,
        })
    }
}

/// Makes the communicator's own stream and event, beside a `stream` that may carry its operations; within `timeout`, because
/// a device may be wedged before its first use here.
fn stream_and_event(
    what: &'static str,
    stream: &Arc<CudaStream>,
    timeout: Duration,
) -> Result<(Arc<CudaStream>, CudaEvent)> {
    let stream = Arc::clone(stream);
    let made = expendable::call(
        deadline_after(timeout),
        || false,
        move || {
            order::not_capturing(what, &stream)?;
            let context = stream.context();
            let stream = driver::undisturbed(context, || context.new_stream())
                .map_err(Error::cuda("creating a stream (cuStreamCreate)"))?;
            let event = driver::new_event(context, None)
                .map_err(Error::cuda("creating an event (cuEventCreate)"))?;
            Ok((stream, event))
        },
        drop,
    );
    made.map_err(|not_back| not_back.into_error("cuStreamCreate or cuEventCreate", timeout))?
}

impl Prepared {
    /// Lets `begin` make it instead of `ncclCommInitRankConfig`; the token then only identifies it.
    pub(super) fn begun_by(mut self, begin: Begin) -> Self {
        self.begin = Some(begin);
        self
    }

    pub(super) fn with_obstacle(mut self, obstacle: Option<Obstacle>) -> Self {
        self.obstacle = obstacle;
        self
    }

    pub(super) fn wish(&self) -> Wish {
        match (self.wish, self.inherited) {
            (Wish::Asked(_), _) | (_, None) => self.wish,
            (_, Some(mode)) => Wish::Asked(mode),
        }
    }

    /// Inherits the mode of the communicator it is made from, unless the program requested another one.
    pub(super) fn inherits(mut self, mode: Option<LaunchMode>) -> Self {
        self.inherited = mode;
        self.mode = self.wish().alone();
        self
    }

    /// Returns the obstacle to `BlockingChild` on this rank.
    pub(super) fn obstacle(&self) -> Option<&Obstacle> {
        self.obstacle.as_ref()
    }

    /// Sets the mode in which it is made, which this rank's wish admits.
    pub(super) fn in_mode(mut self, mode: LaunchMode) -> Self {
        self.mode = mode;
        self
    }

    /// Logs the obstacle, if any, for a communicator whose mode is not agreed between the ranks.
    pub(super) fn alone(self) -> Self {
        if let Some(obstacle) = &self.obstacle {
            launch_mode::not_by_default(
                (&self.name, &self.roster),
                self.rank,
                &obstacle.to_string(),
            );
        }
        self
    }

    pub(super) fn library(&self) -> &Library {
        &self.library
    }

    /// Joins the other ranks, until `deadline`, or until `is_void`.
    pub(super) fn join(
        self,
        id: &UniqueId,
        deadline: Instant,
        is_void: impl Fn() -> bool,
    ) -> Result<Arc<Inner>> {
        self.join_or(id, deadline, is_void, |_, _| ())
    }

    /// Does the same as [`join`](Self::join). On failure, calls `failing` with `None` before the unfinished communicator is
    /// freed, if this rank caused the failure; and afterwards with whether it was freed.
    pub(super) fn join_or(
        mut self,
        id: &UniqueId,
        deadline: Instant,
        is_void: impl Fn() -> bool,
        failing: impl Fn(&Error, Option<bool>),
    ) -> Result<Arc<Inner>> {
        let started = Instant::now();
        events::uses(&self.library);
        let configs = self.configs.of(self.mode);
        let birth = Arc::clone(&self.birth);
        let begin = self.begin.take();
        let blocks = self.mode == LaunchMode::BlockingChild;
        let inner = self.into_inner(Some(id), blocks);
        // From here on, faults of the other ranks end this communicator.
        inner.come_under_protection();
        // Before NCCL is called, so that no operation is issued without supervision.
        let watched = watchdog::ensure()
            .and_then(|()| sentinel::watch(&inner))
            .and_then(|()| inner.is_guarded());
        let joined = match watched {
            Ok(()) => inner.join_nccl(id, begin, &configs, deadline, is_void),
            Err(error) => Err((Left::Nothing, error)),
        };
        let (left, error) = match joined {
            Ok(raw) if inner.phase.made(&inner, raw) => return Ok(inner),
            // An abort came at the last moment.
            Ok(raw) => (Left::Here(raw), inner.out_of_use()),
            Err(failed) => failed,
        };
        let error = match error.kind() {
            // The other ranks are told this reason.
            ErrorKind::Aborted { reason } if inner.abort_signal.is_aborted() => {
                let reason = format!("its abort signal was given, and {reason}");
                Error::new(ErrorKind::Aborted { reason })
            }
            _ => error,
        };
        Err(inner.not_made(left, birth.explain(error), started, failing))
    }

    /// Returns the communicator around a pointer that is ready.
    pub(super) fn adopt(self, raw: RawComm, blocks: bool) -> Arc<Inner> {
        let inner = self.into_inner(None, blocks);
        if let Err(error) = inner.is_guarded() {
            tracing::error!(name: "nccl.no_thread", target: "nccl", what = "that guards calls that block", comm = &*inner.name, %error, "nobody ends calls that block");
        }
        inner.come_under_protection();
        if !inner.phase.made(&inner, raw) {
            // All communicators of the process are being aborted.
            inner.end_unmade(Left::Here(raw));
        }
        inner
    }

    /// Returns the communicator before NCCL is called; `id` is the token that its ranks share.
    fn into_inner(self, id: Option<&UniqueId>, blocks: bool) -> Arc<Inner> {
        let phase = Arc::new(Phase::new());
        let switch = (self.mode == LaunchMode::BlockingChild).then(|| {
            let switch = Switch::new(&self.library, &self.abort_signal, &phase);
            let switch = Arc::new(switch);
            guard::watch(&switch);
            switch
        });
        self.birth.lives(&phase);
        let counting = Counting::new(&self.name, self.world_size, &phase);
        let key = id.and_then(UniqueId::key);
        let identity = Identity {
            name: Arc::clone(&self.name),
            rank: self.rank,
            world_size: self.world_size,
            key: key.clone(),
            home: self.home,
            members: self.members,
            roster: Arc::clone(&self.roster),
        };
        let (tracked, recorder) = Tracked::new(identity, &phase, counting.tally());
        let board = self.company.zip(key).map(|((peers, members), key)| {
            peers.supervise(Ward {
                key,
                name: &self.name,
                members,
                roster: self.roster,
                rank: self.rank,
                patience: self.timeouts.confirm,
            })
        });
        let handle = Handle {
            raw: None,
            sequence: 0,
            join: self.join,
            recorder,
        };
        Arc::new(Inner {
            library: self.library,
            name: self.name,
            rank: self.rank,
            world_size: self.world_size,
            host: crate::host::name(),
            context: self.context,
            stream: self.stream,
            timeouts: self.timeouts,
            notice: timeouts::notice(),
            phase,
            tracked,
            aborting: OnceLock::new(),
            _counting: counting,
            abort_signal: self.abort_signal,
            marks: Mutex::new(Vec::new()),
            events: Mutex::new(Vec::new()),
            overdue: OnceLock::new(),
            plans: Plans::default(),
            windows: Mutex::default(),
            is_zero_cta: self.is_zero_cta,
            kept: AtomicUsize::new(0),
            asked_mode: match self.wish {
                Wish::Asked(mode) if blocks == (mode == LaunchMode::BlockingChild) => Some(mode),
                _ => None,
            },
            in_use: Mutex::default(),
            ending: Mutex::default(),
            is_unsettled: AtomicBool::new(false),
            lends_to_proxies: AtomicBool::new(false),
            launch: Mutex::new(None),
            revocation: Revocation::default(),
            handle: Turn::new(handle),
            board,
            blocks,
            switch,
            own_stream: Some(self.own_stream),
        })
    }
}

impl Inner {
    /// Starts the monitor that ends blocking calls, unless it runs. Called after the switch is in the guard's list: the monitor
    /// ends when the list is empty, and the ranks may have taken a long time until here.
    fn is_guarded(&self) -> Result<()> {
        match self.switch {
            Some(_) => guard::ensure(),
            None => Ok(()),
        }
    }

    /// Makes the communicator in NCCL. An error comes with the remains to be freed.
    fn join_nccl(
        &self,
        id: &UniqueId,
        begin: Option<Begin>,
        configs: &Configs,
        deadline: Instant,
        is_void: impl Fn() -> bool,
    ) -> Result<RawComm, (Left<RawComm>, Error)> {
        driver::bind(&self.context)
            .map_err(|error| (Left::Nothing, Error::cuda(BINDING)(error)))?;
        let interrupted = || self.interrupted() || is_void();
        let patience = || Patience {
            context: &self.context,
            deadline,
            timeout: self.timeouts.init,
            interrupted: &interrupted,
        };
        let (library, rank, world_size) = (&self.library, self.rank, self.world_size);
        let (raw, started) = match begin {
            Some(begin) => begin(self, &configs.own, patience())?,
            None => start(library, rank, world_size, id, &configs.own, patience())?,
        };
        let here = |error| (Left::Here(raw), error);
        started.map_err(here)?;
        let settled = |call: &'static str| {
            let switch = self.switch.clone();
            let settled = settle_apart(library, raw, switch, call, deadline, &interrupted);
            settled.map_err(|unsettled| {
                let left = match unsettled {
                    // A thread is inside a call on it, and frees it if the call ever returns.
                    Unsettled::Lost => Left::Lost,
                    _ => Left::Here(raw),
                };
                let what = match call {
                    SPLIT => "joining the ranks in launch mode BlockingChild (ncclCommSplit), to which all of them have to come,",
                    _ => "joining the ranks",
                };
                (left, unsettled.into_error(what, self.timeouts.init))
            })
        };
        settled(CALL)?;
        // A communicator that was ended meanwhile is no success, even if NCCL has completed it.
        if interrupted() {
            let timeout = self.timeouts.init;
            return Err(here(
                Unsettled::Interrupted.into_error("joining the ranks", timeout),
            ));
        }
        let (Some(switch), Some(config)) = (&self.switch, &configs.child) else {
            return Ok(raw);
        };
        start_split(library, raw, rank, switch, config, patience())?;
        settled(SPLIT)?;
        let child = switch.take_child();
        let child = child.ok_or_else(|| here(ffi::missing(library, SPLIT).into()))?;
        switch.install(raw);
        Ok(child)
    }

    /// Ends a communicator whose creation failed; returns the error to hand out.
    fn not_made(
        self: &Arc<Self>,
        left: Left<RawComm>,
        error: Error,
        started: Instant,
        failing: impl Fn(&Error, Option<bool>),
    ) -> Error {
        let describe = || self.operation(OperationKind::Init, Shape::default(), None, started);
        let error = error.during(describe);
        let ours = self.begin_abort(self.why(&error));
        self.ends_if_lost(&error, Noticed::Before);
        if ours {
            failing(&error, None);
        }
        let freed = self.end_unmade(left);
        if ours {
            let _ = self.conclude_end(freed);
        } else {
            self.wait_for_the_end();
        }
        let fault = self
            .board
            .as_ref()
            .and_then(|board| board.fault().map(|fault| (board, fault)));
        let error = match fault {
            Some((board, fault)) => {
                error.because_of(fault, board.is_own(fault), board.conclusion())
            }
            // The end's own reason is more precise than this error.
            None if !ours => self.out_of_use().during(describe),
            None => error,
        };
        failing(&error, Some(freed));
        error
    }

    /// Frees the remains of a failed creation, on a thread that can be given up.
    fn end_unmade(self: &Arc<Self>, left: Left<RawComm>) -> bool {
        if !matches!(left, Left::Here(_)) {
            return self.phase.unmade(self, left);
        }
        let inner = Arc::clone(self);
        let freed = within(self.abort_limit(), "nccl-abort", move || {
            inner.phase.unmade(&inner, left)
        });
        freed == Some(true)
    }
}

/// The configurations of the communicator in which the ranks meet, and of the child that carries the data, if
/// there is one. Both differ only in `blocking`, `splitShare` and the name: a child has no more channels than
/// its parent.
#[derive(Clone, Copy)]
struct Configs {
    own: sys::ncclConfig_t,
    child: Option<sys::ncclConfig_t>,
}

/// The configurations for all modes that are possible.
struct AnyConfigs {
    plain: sys::ncclConfig_t,
    /// For an idle parent, where the mode may need one.
    parent: Option<sys::ncclConfig_t>,
}

impl AnyConfigs {
    /// Returns the configurations for `mode`, and for `NonBlocking`, on which ranks without a requested mode may agree.
    fn new(config: &Config, mode: LaunchMode, library: &Library, name: &str) -> Result<Self> {
        let plain = config.to_raw(library, name)?;
        let parent = match mode {
            LaunchMode::BlockingChild => {
                // Lets NCCL's messages tell the two apart.
                let mut parent = config.to_raw(library, &format!("{name}{IDLE_PARENT}"))?;
                parent.splitShare = 1;
                Some(parent)
            }
            _ => None,
        };
        Ok(Self { plain, parent })
    }

    fn of(&self, mode: LaunchMode) -> Configs {
        match (mode, self.parent) {
            (LaunchMode::BlockingChild, Some(parent)) => {
                let mut child = self.plain;
                child.blocking = 1;
                child.splitShare = 0;
                Configs {
                    own: parent,
                    child: Some(child),
                }
            }
            _ => Configs {
                own: self.plain,
                child: None,
            },
        }
    }
}

pub(super) fn check_ranks(rank: usize, world_size: usize) -> Result<()> {
    as_int(world_size)?;
    if rank < world_size {
        Ok(())
    } else {
        Err(Error::new(ErrorKind::NoSuchRank {
            role: "rank",
            rank,
            world_size,
        }))
    }
}
