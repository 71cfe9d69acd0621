//! Makes a communicator: one call, then polls until every rank is there or a deadline passes.
//!
//! Its [`Inner`] exists from before NCCL is called, so that anything that ends communicators also ends this one. Until
//! the communicator is ready, the thread that makes it has NCCL's pointer, and frees it if the creation fails.

use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaEvent, CudaStream};
use nccl_sys as sys;

use super::start::{
    BINDING, CALL, CallLimit, SPLIT, as_int, start, start_split, wait_until_idle_on_thread,
};
use crate::abort::AbortSignal;
use crate::communicator::free::call_within;
use crate::communicator::handle::{Handle, HandleLock, NotIdle, RawComm};
use crate::communicator::launch_mode::{self, LaunchPreference, Obstacle};
use crate::communicator::registry::PendingInit;
use crate::communicator::revocation::Revocation;
use crate::communicator::{
    AbortFlagParent, DetectionPhase, Inner, PeerKernels, Timeouts, blocking_call_monitor,
    stream_order, timeouts,
};
use crate::config::Config;
use crate::cuda_driver;
use crate::detached_call;
use crate::error::{Error, ErrorKind, Result, StreamRefusal};
use crate::events;
use crate::ffi;
use crate::graphs::Plans;
use crate::library::Library;
use crate::operation::{OperationKind, Shape};
use crate::peers::{Peers, SupervisionRequest};
use crate::recorder::{Identity, RecorderScope, TrackHandle};
use crate::state::{Lifecycle, PartialInit};
use crate::stats::CounterHandle;
use crate::supervision::{stuck_call_monitor, watchdog};
use crate::sync::Mutex;
use crate::time::deadline_after;
use crate::unique_id::UniqueId;
use nccl_base::fault::Roster;
use nccl_base::launch_mode::{IDLE_PARENT, LaunchMode};

/// The inputs that are known before NCCL is called.
pub(super) struct InitPlan<'a> {
    pub(super) library: Library,
    pub(super) name: &'a str,
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) stream: Arc<CudaStream>,
    pub(super) config: &'a Config,
    pub(super) preference: LaunchPreference,
    pub(super) timeouts: Timeouts,
    pub(super) abort_signal: AbortSignal,
    /// The peers, and the world ranks of its ranks.
    pub(super) world_members: Option<WorldMembers>,
    /// The world ranks of its ranks, without a connection to the other ranks.
    pub(super) members: Option<Arc<[usize]>>,
    /// The record of the call that makes it.
    pub(super) pending_init: Arc<PendingInit>,
}

/// The peers of a communicator, and the world ranks of its ranks, in order.
pub(super) type WorldMembers = (Arc<dyn Peers>, Arc<[usize]>);

/// Returns the world and launcher ranks of these ranks.
pub(super) fn roster_of(world_members: Option<&WorldMembers>) -> Roster {
    world_members.map_or_else(Roster::default, |(peers, members)| peers.roster(members))
}

/// A communicator that passed the checks of this rank alone.
pub(super) struct PreparedInit {
    library: Library,
    name: Arc<str>,
    rank: usize,
    world_size: usize,
    stream: Arc<CudaStream>,
    timeouts: Timeouts,
    abort_signal: AbortSignal,
    context: Arc<CudaContext>,
    preference: LaunchPreference,
    /// The mode of the communicator that it is made from.
    inherited: Option<LaunchMode>,
    /// The obstacle to `BlockingChild` on this rank, if no mode was requested.
    obstacle: Option<Obstacle>,
    more_tokens: Vec<UniqueId>,
    mode: LaunchMode,
    configs: AnyConfigs,
    is_zero_cta: bool,
    rma_limits: (usize, usize),
    ordering_event: CudaEvent,
    capture_stream: Arc<CudaStream>,
    world_members: Option<WorldMembers>,
    pending_init: Arc<PendingInit>,
    /// The function that begins to make the communicator; `None` for `ncclCommInitRankConfig`.
    begin: Option<Begin>,
    /// For the recorder: the rank of the world that makes it, and the world ranks of its ranks.
    scope: Option<Arc<RecorderScope>>,
    members: Option<Arc<[usize]>>,
    roster: Arc<Roster>,
}

/// Begins to make a communicator, which is usually not ready on return.
pub(super) type Begin = Box<
    dyn FnOnce(
        &Inner,
        &sys::ncclConfig_t,
        CallLimit<'_>,
    ) -> Result<Begun, (PartialInit<RawComm>, Error)>,
>;

/// The communicator that a call has begun to make, and whether that call failed nevertheless.
pub(super) type Begun = (RawComm, Result<()>);

impl InitPlan<'_> {
    /// Checks everything that this rank can check without the other ranks.
    pub(super) fn prepare(self) -> Result<PreparedInit> {
        check_ranks(self.rank, self.world_size)?;
        let context = Arc::clone(self.stream.context());
        const WHAT: &str = "the communicator's stream";
        if !context.is_primary() {
            let reason = StreamRefusal::NotPrimary;
            return Err(Error::new(ErrorKind::Stream { what: WHAT, reason }));
        }
        stream_order::check_operation_stream(WHAT, &self.stream, &context)?;
        let (capture_stream, ordering_event) =
            stream_and_event(WHAT, &self.stream, self.timeouts.init / 2)?;
        let mode = self.preference.alone();
        launch_mode::check_supported(mode, &self.library)?;
        if mode == LaunchMode::BlockingChild {
            blocking_call_monitor::ensure()?;
        }
        let configs = AnyConfigs::new(self.config, mode, &self.library, self.name)?;
        let world_members = self.world_members.as_ref();
        Ok(PreparedInit {
            scope: world_members.map(|(peers, _)| peers.scope()),
            members: world_members
                .map(|(_, members)| Arc::clone(members))
                .or(self.members),
            roster: Arc::new(roster_of(world_members)),
            library: self.library,
            name: Arc::from(self.name),
            rank: self.rank,
            world_size: self.world_size,
            stream: self.stream,
            timeouts: self.timeouts,
            abort_signal: self.abort_signal,
            context,
            preference: self.preference,
            inherited: None,
            obstacle: None,
            more_tokens: Vec::new(),
            mode,
            configs,
            is_zero_cta: self.config.is_zero_cta(),
            rma_limits: self.config.rma_limits(),
            ordering_event,
            capture_stream,
            // A single rank has no peers to inform.
            world_members: self.world_members.filter(|_| self.world_size > 1),
            pending_init: self.pending_init,
            begin: None,
        })
    }
}

/// Creates the communicator's own stream and event, in addition to a `stream` that may carry its operations. Limited by
/// `timeout`, because a device may be stuck before its first use here.
fn stream_and_event(
    what: &'static str,
    stream: &Arc<CudaStream>,
    timeout: Duration,
) -> Result<(Arc<CudaStream>, CudaEvent)> {
    let stream = Arc::clone(stream);
    let made = detached_call::run(
        deadline_after(timeout),
        || false,
        move || {
            stream_order::check_not_capturing(what, &stream)?;
            let context = stream.context();
            let stream = cuda_driver::ignoring_stored_error(context, || context.new_stream())
                .map_err(Error::cuda("creating a stream (cuStreamCreate)"))?;
            let event = cuda_driver::new_event(context, None)
                .map_err(Error::cuda("creating an event (cuEventCreate)"))?;
            Ok((stream, event))
        },
        drop,
    );
    made.map_err(|not_back| not_back.into_error("cuStreamCreate or cuEventCreate", timeout))?
}

impl PreparedInit {
    /// The tokens of further roots; all ranks have the same, in the same order.
    pub(super) fn with_more_tokens(mut self, tokens: Vec<UniqueId>) -> Self {
        self.more_tokens = tokens;
        self
    }

    /// Makes the communicator with `begin` instead of `ncclCommInitRankConfig`; the token then only identifies it.
    pub(super) fn begun_by(mut self, begin: Begin) -> Self {
        self.begin = Some(begin);
        self
    }

    pub(super) fn with_obstacle(mut self, obstacle: Option<Obstacle>) -> Self {
        self.obstacle = obstacle;
        self
    }

    pub(super) fn preference(&self) -> LaunchPreference {
        match (self.preference, self.inherited) {
            (LaunchPreference::Asked(_), _) | (_, None) => self.preference,
            (_, Some(mode)) => LaunchPreference::Asked(mode),
        }
    }

    /// Inherits the mode of the communicator from which this one is made, unless the program requested another mode.
    pub(super) fn inherits(mut self, mode: Option<LaunchMode>) -> Self {
        self.inherited = mode;
        self.mode = self.preference().alone();
        self
    }

    /// Returns the obstacle to `BlockingChild` on this rank.
    pub(super) fn obstacle(&self) -> Option<&Obstacle> {
        self.obstacle.as_ref()
    }

    /// Sets the mode in which the communicator is made; this rank's preference admits it.
    pub(super) fn in_mode(mut self, mode: LaunchMode) -> Self {
        self.mode = mode;
        self
    }

    /// Logs the obstacle, if any, for a communicator whose mode is not agreed between the ranks.
    pub(super) fn alone(self) -> Self {
        if let Some(obstacle) = &self.obstacle {
            launch_mode::log_fallback((&self.name, &self.roster), self.rank, &obstacle.to_string());
        }
        self
    }

    pub(super) fn library(&self) -> &Library {
        &self.library
    }

    /// Joins the other ranks, until `deadline`, or until `is_void` returns true.
    pub(super) fn join(
        self,
        id: &UniqueId,
        deadline: Instant,
        is_void: impl Fn() -> bool,
    ) -> Result<Arc<Inner>> {
        self.join_or(id, deadline, is_void, |_, _| ())
    }

    /// Like [`join`](Self::join). On failure, calls `failing` with `None` before the unfinished communicator is freed, if
    /// this rank caused the failure, and afterwards with whether it was freed.
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
        let pending_init = Arc::clone(&self.pending_init);
        let begin = self.begin.take();
        let tokens = [&[*id][..], &self.more_tokens].concat();
        let has_blocking_calls = self.mode == LaunchMode::BlockingChild;
        let inner = self.into_inner(Some(id), has_blocking_calls);
        // From here on, faults of the other ranks end this communicator.
        inner.register();
        // Done before NCCL is called, so that no operation is issued without supervision.
        let watched = watchdog::ensure()
            .and_then(|()| stuck_call_monitor::watch(&inner))
            .and_then(|()| inner.start_blocking_call_monitor());
        let joined = match watched {
            Ok(()) => inner.join_nccl(&tokens, begin, &configs, deadline, is_void),
            Err(error) => Err((PartialInit::Nothing, error)),
        };
        let (partial, error) = match joined {
            Ok(raw) if inner.lifecycle.set_ready(&inner, raw) => return Ok(inner),
            // An abort began at the last moment.
            Ok(raw) => (PartialInit::Here(raw), inner.out_of_use()),
            Err(failed) => failed,
        };
        let error = match error.kind() {
            // This reason is announced to the other ranks.
            ErrorKind::Aborted { reason } if inner.abort_signal.is_aborted() => {
                let reason = format!("its abort signal was given, and {reason}");
                Error::new(ErrorKind::Aborted { reason })
            }
            _ => error,
        };
        Err(inner.fail_init(partial, pending_init.explain(error), started, failing))
    }

    /// Makes the communicator from a pointer that is ready.
    pub(super) fn adopt(self, raw: RawComm, has_blocking_calls: bool) -> Arc<Inner> {
        let inner = self.into_inner(None, has_blocking_calls);
        if let Err(error) = inner.start_blocking_call_monitor() {
            tracing::error!(name: "nccl.no_thread", target: "nccl", what = "that guards calls that block", comm = &*inner.name, %error, "calls that block are not ended at their timeout");
        }
        inner.register();
        if !inner.lifecycle.set_ready(&inner, raw) {
            // All communicators of the process are being aborted.
            inner.free_unfinished(PartialInit::Here(raw));
        }
        inner
    }

    /// Returns the communicator before NCCL is called; `id` is the token that its ranks share.
    fn into_inner(self, id: Option<&UniqueId>, has_blocking_calls: bool) -> Arc<Inner> {
        let lifecycle = Arc::new(Lifecycle::new());
        let abort_flag_parent = (self.mode == LaunchMode::BlockingChild).then(|| {
            let abort_flag_parent =
                AbortFlagParent::new(&self.library, &self.abort_signal, &lifecycle);
            let abort_flag_parent = Arc::new(abort_flag_parent);
            blocking_call_monitor::watch(&abort_flag_parent);
            abort_flag_parent
        });
        self.pending_init.set_lifecycle(&lifecycle);
        let counting = CounterHandle::new(&self.name, self.world_size, &lifecycle);
        let key = id.and_then(UniqueId::key);
        let identity = Identity {
            name: Arc::clone(&self.name),
            rank: self.rank,
            world_size: self.world_size,
            key: key.clone(),
            scope: self.scope,
            members: self.members,
            roster: Arc::clone(&self.roster),
        };
        let (track_handle, recorder) = TrackHandle::new(identity, &lifecycle, counting.tally());
        let supervisor = self.world_members.zip(key).map(|((peers, members), key)| {
            peers.supervise(SupervisionRequest {
                key,
                name: &self.name,
                members,
                roster: self.roster,
                rank: self.rank,
                confirm_timeout: self.timeouts.confirm,
                context: &self.context,
            })
        });
        let handle = Handle {
            raw: None,
            sequence: 0,
            ordering_event: self.ordering_event,
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
            abort_notice_timeout: timeouts::abort_notice_timeout(),
            lifecycle,
            track_handle,
            abort_started: OnceLock::new(),
            _counting: counting,
            abort_signal: self.abort_signal,
            completion_events: Mutex::new(Vec::new()),
            events: Mutex::new(Vec::new()),
            overdue_operation: OnceLock::new(),
            plans: Plans::default(),
            windows: Mutex::default(),
            is_zero_cta: self.is_zero_cta,
            rma_limits: self.rma_limits,
            non_user_handles: AtomicUsize::new(0),
            asked_mode: match self.preference {
                LaunchPreference::Asked(mode)
                    if has_blocking_calls == (mode == LaunchMode::BlockingChild) =>
                {
                    Some(mode)
                }
                _ => None,
            },
            in_use: Mutex::default(),
            exit_hold: Mutex::default(),
            has_unfinished_launch: AtomicBool::new(false),
            lends_beyond_kernels: AtomicBool::new(false),
            shared_launch: Mutex::new(None),
            window_turn: Mutex::default(),
            peer_kernels: PeerKernels::default(),
            has_window: AtomicBool::new(false),
            is_suspended: AtomicBool::new(false),
            revocation: Revocation::default(),
            handle: HandleLock::new(handle),
            supervisor,
            has_blocking_calls,
            abort_flag_parent,
            capture_stream: Some(self.capture_stream),
        })
    }
}

impl Inner {
    /// Starts the monitor that ends blocking calls, unless it runs. To be called when the abort-flag parent is in that
    /// monitor's list: the monitor ends when its list is empty, and the ranks may have taken long to get here.
    fn start_blocking_call_monitor(&self) -> Result<()> {
        match self.abort_flag_parent {
            Some(_) => blocking_call_monitor::ensure(),
            None => Ok(()),
        }
    }

    /// Makes the communicator in NCCL. An error comes with the part that has to be freed.
    fn join_nccl(
        &self,
        tokens: &[UniqueId],
        begin: Option<Begin>,
        configs: &Configs,
        deadline: Instant,
        is_void: impl Fn() -> bool,
    ) -> Result<RawComm, (PartialInit<RawComm>, Error)> {
        cuda_driver::bind(&self.context)
            .map_err(|error| (PartialInit::Nothing, Error::cuda(BINDING)(error)))?;
        let interrupted = || self.interrupted() || is_void();
        let limits = || CallLimit {
            context: &self.context,
            deadline,
            timeout: self.timeouts.init,
            interrupted: &interrupted,
        };
        let (library, rank, world_size) = (&self.library, self.rank, self.world_size);
        let (raw, started) = match begin {
            Some(begin) => begin(self, &configs.own, limits())?,
            None => start(library, rank, world_size, tokens, &configs.own, limits())?,
        };
        let here = |error| (PartialInit::Here(raw), error);
        started.map_err(here)?;
        let settled = |call: &'static str| {
            let abort_flag_parent = self.abort_flag_parent.clone();
            let settled = wait_until_idle_on_thread(
                library,
                raw,
                abort_flag_parent,
                call,
                deadline,
                &interrupted,
            );
            settled.map_err(|not_idle| {
                let partial = match not_idle {
                    // A thread is inside a call on the communicator, and frees it if the call ever returns.
                    NotIdle::Unresponsive => PartialInit::HeldByStuckCall,
                    _ => PartialInit::Here(raw),
                };
                let what = match call {
                    SPLIT => "joining the ranks in launch mode BlockingChild (ncclCommSplit), to which all of them have to come,",
                    _ => "joining the ranks",
                };
                (partial, not_idle.into_error(what, self.timeouts.init))
            })
        };
        settled(CALL)?;
        // If the communicator was ended meanwhile, this fails, even if NCCL has completed it.
        if interrupted() {
            let timeout = self.timeouts.init;
            return Err(here(
                NotIdle::Interrupted.into_error("joining the ranks", timeout),
            ));
        }
        let (Some(abort_flag_parent), Some(config)) = (&self.abort_flag_parent, &configs.child)
        else {
            return Ok(raw);
        };
        start_split(library, raw, rank, abort_flag_parent, config, limits())?;
        settled(SPLIT)?;
        let child = abort_flag_parent.take_child();
        let child = child.ok_or_else(|| here(ffi::missing(library, SPLIT).into()))?;
        abort_flag_parent.set_parent(raw);
        Ok(child)
    }

    /// Ends a communicator whose creation failed; returns the error for the caller.
    fn fail_init(
        self: &Arc<Self>,
        partial: PartialInit<RawComm>,
        error: Error,
        started: Instant,
        failing: impl Fn(&Error, Option<bool>),
    ) -> Error {
        let describe = || self.operation(OperationKind::Init, Shape::default(), None, started);
        let error = error.during(describe);
        let ours = self.begin_abort(self.end_reason_of_failed_init(&error));
        self.abort_if_context_lost(&error, DetectionPhase::BeforeIssue);
        if ours {
            failing(&error, None);
        }
        let freed = self.free_unfinished(partial);
        if ours {
            let _ = self.finish_abort(freed);
        } else {
            self.wait_for_end();
        }
        let fault = self
            .supervisor
            .as_ref()
            .and_then(|supervisor| supervisor.fault().map(|fault| (supervisor, fault)));
        let error = match fault {
            Some((supervisor, fault)) => error.because_of(
                fault,
                supervisor.is_own(fault),
                supervisor.unconfirmed_text(),
            ),
            // The reason of the abort is more precise than this error.
            None if !ours => self.out_of_use().during(describe),
            None => error,
        };
        failing(&error, Some(freed));
        error
    }

    /// Frees the remains of a failed creation, on a thread that can be given up.
    fn free_unfinished(self: &Arc<Self>, partial: PartialInit<RawComm>) -> bool {
        if !matches!(partial, PartialInit::Here(_)) {
            return self.lifecycle.free_unfinished(self, partial);
        }
        let inner = Arc::clone(self);
        let freed = call_within(self.abort_timeout(), "nccl-abort", move || {
            inner.lifecycle.free_unfinished(&inner, partial)
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
    /// The configuration of an idle parent, if the mode may need one.
    parent: Option<sys::ncclConfig_t>,
}

impl AnyConfigs {
    /// Returns the configurations for `mode`, and for `NonBlocking`, on which ranks without a requested mode may agree.
    fn new(config: &Config, mode: LaunchMode, library: &Library, name: &str) -> Result<Self> {
        let plain = config.to_raw(library, name)?;
        let parent = match mode {
            LaunchMode::BlockingChild => {
                // The name distinguishes the two communicators in NCCL's messages.
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
