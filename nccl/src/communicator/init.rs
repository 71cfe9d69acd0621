//! The making of a communicator: one call, then polls until every rank is there or a deadline passes.
//!
//! It is [`Inner`] from before NCCL is asked, so that whatever ends communicators ends this one as well. Until
//! it is ready, the thread that makes it has NCCL's pointer, and frees it when it comes to nothing.

use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaEvent, CudaStream};
use nccl_sys as sys;

use super::everybody::Birth;
use super::free::{free, within};
use super::handle::{Handle, RawComm, Turn, Unsettled, settle};
use super::lifecycle::Why;
use super::state::{Left, Phase, Way};
use super::{Inner, Pins, State, Timeouts, order};
use crate::abort::AbortSignal;
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result, StreamRefusal};
use crate::expendable::{self, NotBack};
use crate::ffi;
use crate::library::Library;
use crate::operation::{OperationKind, Shape};
use crate::plan::Plans;
use crate::rendezvous::Line;
use crate::supervision::Board;
use crate::supervision::recorder::Tracked;
use crate::time::deadline_after;
use crate::unique_id::UniqueId;

/// Everything that is known before NCCL is asked.
pub(super) struct Plan<'a> {
    pub(super) library: Library,
    pub(super) name: &'a str,
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) stream: Arc<CudaStream>,
    pub(super) config: &'a Config,
    pub(super) timeouts: Timeouts,
    pub(super) abort_signal: AbortSignal,
    /// The way to the other ranks, and which of its ranks they are.
    pub(super) company: Option<Company>,
    /// The call that makes it.
    pub(super) birth: Arc<Birth>,
}

/// The way to the other ranks of a communicator, and which of its ranks they are, in order.
pub(super) type Company = (Arc<Line>, Arc<[usize]>);

/// What passed the checks of this rank alone.
pub(super) struct Prepared {
    library: Library,
    name: Arc<str>,
    rank: usize,
    world_size: usize,
    stream: Arc<CudaStream>,
    timeouts: Timeouts,
    abort_signal: AbortSignal,
    context: Arc<CudaContext>,
    config: sys::ncclConfig_t,
    join: CudaEvent,
    pins_stream: Arc<CudaStream>,
    company: Option<Company>,
    birth: Arc<Birth>,
    /// What begins to make it, if it is not a call of its own.
    begin: Option<Begin>,
}

/// Begins to make a communicator, which need not be ready when it comes back.
pub(super) type Begin =
    Box<dyn FnOnce(&sys::ncclConfig_t) -> Result<RawComm, (Left<RawComm>, Error)>>;

impl Plan<'_> {
    /// Everything that can be found wrong without the other ranks.
    pub(super) fn prepare(self) -> Result<Prepared> {
        check_ranks(self.rank, self.world_size)?;
        let context = Arc::clone(self.stream.context());
        const WHAT: &str = "the communicator's stream";
        if !context.is_primary() {
            let reason = StreamRefusal::NotPrimary;
            return Err(Error::new(ErrorKind::Stream { what: WHAT, reason }));
        }
        order::admit(WHAT, &self.stream, &context)?;
        let (pins_stream, join) = stream_and_event(WHAT, &self.stream, self.timeouts.init / 2)?;
        let config = self.config.to_raw(&self.library, self.name)?;
        Ok(Prepared {
            library: self.library,
            name: Arc::from(self.name),
            rank: self.rank,
            world_size: self.world_size,
            stream: self.stream,
            timeouts: self.timeouts,
            abort_signal: self.abort_signal,
            context,
            config,
            join,
            pins_stream,
            // Alone, there is nobody to tell.
            company: self.company.filter(|_| self.world_size > 1),
            birth: self.birth,
            begin: None,
        })
    }
}

/// Of the communicator's own, beside a `stream` that may carry its operations; within `limit`, because a device
/// may be wedged before it is first used here.
fn stream_and_event(
    what: &'static str,
    stream: &Arc<CudaStream>,
    limit: Duration,
) -> Result<(Arc<CudaStream>, CudaEvent)> {
    let stream = Arc::clone(stream);
    let made = expendable::call(
        deadline_after(limit),
        || false,
        move || {
            order::not_capturing(what, &stream)?;
            let context = stream.context();
            let stream = context
                .new_stream()
                .map_err(Error::cuda("creating a stream (cuStreamCreate)"))?;
            let event = context
                .new_event(None)
                .map_err(Error::cuda("creating an event (cuEventCreate)"))?;
            Ok((stream, event))
        },
        drop,
    );
    made.map_err(|not_back| not_back.into_error("cuStreamCreate or cuEventCreate", limit))?
}

impl Prepared {
    /// The same, to be made by another call: the token only names it then.
    pub(super) fn begun_by(mut self, begin: Begin) -> Self {
        self.begin = Some(begin);
        self
    }

    /// Joins the other ranks, until `deadline`, or until there is no use in it any more.
    pub(super) fn join(
        mut self,
        id: &UniqueId,
        deadline: Instant,
        is_void: impl Fn() -> bool,
    ) -> Result<Arc<Inner>> {
        let started = Instant::now();
        let config = self.config;
        let birth = Arc::clone(&self.birth);
        let begin = self.begin.take();
        let inner = self.into_inner(Some(id), false);
        // What happens to the others meanwhile ends this, too.
        inner.come_under_protection();
        let (left, error) = match inner.join_nccl(id, begin, &config, deadline, is_void) {
            Ok(raw) if inner.phase.made(&inner, raw) => return Ok(inner),
            // At the last moment.
            Ok(raw) => (Left::Here(raw), inner.out_of_use()),
            Err(failed) => failed,
        };
        Err(inner.not_made(left, birth.explain(error), started))
    }

    /// The communicator around a pointer that is ready.
    pub(super) fn adopt(self, raw: RawComm, blocks: bool) -> Arc<Inner> {
        let inner = self.into_inner(None, blocks);
        inner.come_under_protection();
        if !inner.phase.made(&inner, raw) {
            // All communicators of the process are being aborted.
            inner.end_unmade(Left::Here(raw));
        }
        inner
    }

    /// The communicator before NCCL is asked; with the token that its ranks have in common.
    fn into_inner(self, id: Option<&UniqueId>, blocks: bool) -> Arc<Inner> {
        let phase = Arc::new(Phase::new());
        self.birth.lives(&phase);
        let (tracked, recorder) = Tracked::new(&self.name, self.rank, self.world_size, &phase);
        let board = self.company.zip(id).map(|((line, members), id)| {
            let confirm = self.timeouts.confirm;
            Board::new(&line, &self.name, id, members, self.rank, confirm)
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
            phase,
            tracked,
            abort_signal: self.abort_signal,
            marks: Mutex::new(Vec::new()),
            events: Mutex::new(Vec::new()),
            overdue: OnceLock::new(),
            plans: Plans::default(),
            kept: AtomicUsize::new(0),
            handle: Turn::new(handle),
            board,
            blocks,
            pins: Some(Pins {
                stream: self.pins_stream,
            }),
        })
    }
}

impl Inner {
    /// A failure comes with what it leaves behind.
    fn join_nccl(
        &self,
        id: &UniqueId,
        begin: Option<Begin>,
        config: &sys::ncclConfig_t,
        deadline: Instant,
        is_void: impl Fn() -> bool,
    ) -> Result<RawComm, (Left<RawComm>, Error)> {
        self.context
            .bind_to_thread()
            .map_err(|error| (Left::Nothing, Error::cuda(BINDING)(error)))?;
        let interrupted = || self.interrupted() || is_void();
        let patience = Patience {
            context: &self.context,
            deadline,
            limit: self.timeouts.init,
            interrupted: &interrupted,
        };
        let (library, rank, world_size) = (&self.library, self.rank, self.world_size);
        let (raw, started) = match begin {
            Some(begin) => (begin(config)?, Ok(())),
            None => start(library, rank, world_size, id, config, patience)?,
        };
        let settled = match started {
            Ok(()) => settle_apart(library, raw, CALL, deadline, &interrupted),
            Err(error) => return Err((Left::Here(raw), error)),
        };
        settled.map_err(|unsettled| {
            let left = match unsettled {
                // A thread is inside a call on it, and frees it if it ever comes out.
                Unsettled::Lost => Left::Lost,
                _ => Left::Here(raw),
            };
            let error = unsettled.into_error("joining the ranks", self.timeouts.init);
            (left, error)
        })?;
        Ok(raw)
    }

    /// The end of one that did not come up, and the error to hand out.
    fn not_made(self: &Arc<Self>, left: Left<RawComm>, error: Error, started: Instant) -> Error {
        let describe = || self.operation(OperationKind::Init, Shape::default(), None, started);
        let error = error.during(describe);
        let ours = self.begin_abort(Why::from(&error));
        let freed = self.end_unmade(left);
        if ours {
            let _ = self.conclude_end(freed);
        } else {
            self.wait_for_the_end();
        }
        if self.phase.get() == State::Leaked {
            tracing::error!(target: "nccl", communicator = &*self.name, "a failed init is leaked");
        }
        let fault = self
            .board
            .as_ref()
            .and_then(|board| board.fault().map(|fault| (board, fault)));
        match fault {
            Some((board, fault)) => {
                error.because_of(fault, board.is_own(fault), board.conclusion())
            }
            // Whoever ended it knows why.
            None if !ours => self.out_of_use().during(describe),
            None => error,
        }
    }

    /// Frees what NCCL had built, on a thread that can be given up.
    fn end_unmade(self: &Arc<Self>, left: Left<RawComm>) -> bool {
        if !matches!(left, Left::Here(_)) {
            return self.phase.unmade(self, left);
        }
        let inner = Arc::clone(self);
        let freed = within(self.timeouts.abort, "nccl-abort", move || {
            inner.phase.unmade(&inner, left)
        });
        freed == Some(true)
    }
}

const CALL: &str = "ncclCommInitRankConfig";
const BINDING: &str = "binding the context to this thread (cuCtxSetCurrent)";

/// Makes the call, on a thread that can be given up: it may wait although it should not. The communicator that
/// comes back is not ready yet, and has to be freed when the call failed.
fn start(
    library: &Library,
    rank: usize,
    world_size: usize,
    id: &UniqueId,
    config: &sys::ncclConfig_t,
    patience: Patience<'_>,
) -> Result<(RawComm, Result<()>), (Left<RawComm>, Error)> {
    let nothing = |error| (Left::Nothing, error);
    let init = library.function(sys::Api::ncclCommInitRankConfig);
    let init = init.map_err(nothing)?;
    let rank = as_int(rank).map_err(nothing)?;
    let world_size = as_int(world_size).map_err(nothing)?;
    let Patience {
        context,
        deadline,
        limit,
        interrupted,
    } = patience;
    let (id, mut config) = (id.raw(), Sent(*config));
    let (theirs, context, freeing) = (library.clone(), Arc::clone(context), library.clone());
    let made = expendable::call(
        deadline,
        interrupted,
        move || {
            context.bind_to_thread().map_err(Error::cuda(BINDING))?;
            let config = &mut config;
            // Null, because releases up to 2.18 follow whatever they find here when they fail.
            let mut comm: sys::ncclComm_t = std::ptr::null_mut();
            // SAFETY: `comm` and `config` are valid for the call, which writes the communicator before it
            // returns; the strings that `config` points to are never freed.
            let code = unsafe { init(&mut comm, world_size, id, rank, &mut config.0) };
            let raw = NonNull::new(comm).map(RawComm);
            match (ffi::check(&theirs, CALL, code), raw) {
                (Ok(_), Some(raw)) => Ok((raw, Ok(()))),
                (Ok(_), None) => Err(ffi::missing(&theirs, CALL).into()),
                (Err(failure), raw) => {
                    if failure.is(sys::ncclResult_t::ncclUnhandledCudaError) {
                        close_leaked_group(&theirs);
                    }
                    match raw {
                        Some(raw) => Ok((raw, Err(failure.into()))),
                        None => Err(failure.into()),
                    }
                }
            }
        },
        // Nobody knows of it, and this thread may wait.
        move |made: Result<(RawComm, Result<()>)>| {
            if let Ok((raw, _)) = made {
                let _ = free(&freeing, Way::Abort, raw);
            }
        },
    );
    match made {
        Ok(made) => made.map_err(nothing),
        Err(NotBack::NoThread(error)) => {
            Err(nothing(NotBack::NoThread(error).into_error(CALL, limit)))
        }
        Err(not_back) => Err((Left::Lost, not_back.into_error(CALL, limit))),
    }
}

/// Polls until the communicator is at rest, on a thread that can be given up: nobody looks yet for calls on it
/// that do not come back.
fn settle_apart(
    library: &Library,
    raw: RawComm,
    call: &'static str,
    deadline: Instant,
    interrupted: &dyn Fn() -> bool,
) -> Result<(), Unsettled> {
    /// How long a look at NCCL's state may take.
    const LOOK: Duration = Duration::from_secs(1);
    let stop = Arc::new(AtomicBool::new(false));
    let (theirs, stopped, freeing) = (library.clone(), Arc::clone(&stop), library.clone());
    let since: Cell<Option<Instant>> = Cell::new(None);
    let settled = expendable::call(
        deadline.checked_add(LOOK).unwrap_or(deadline),
        || {
            if since.get().is_none() && interrupted() {
                stop.store(true, Ordering::Release);
                since.set(Some(Instant::now()));
            }
            since.get().is_some_and(|since| since.elapsed() > LOOK)
        },
        move || {
            settle(&theirs, raw, call, deadline, || {
                stopped.load(Ordering::Acquire)
            })
        },
        move |_| {
            let _ = free(&freeing, Way::Abort, raw);
        },
    );
    match settled {
        Ok(settled) => settled,
        Err(NotBack::NoThread(_)) => settle(library, raw, call, deadline, interrupted),
        Err(NotBack::TimedOut | NotBack::Interrupted) => Err(Unsettled::Lost),
    }
}

/// How long, and until when, the call may take.
struct Patience<'p> {
    context: &'p Arc<CudaContext>,
    deadline: Instant,
    /// For the error.
    limit: Duration,
    interrupted: &'p dyn Fn() -> bool,
}

/// On its way to the thread of the call.
struct Sent(sys::ncclConfig_t);

// SAFETY: its pointers are null or lead to strings that are never freed nor changed.
unsafe impl Send for Sent {}

/// Releases from 2.23.4 on leave this thread inside a group when the very first CUDA call fails; every
/// later call on this thread would be queued for ever. This crate never calls init inside a group of
/// its own, so one group end repairs it, and is refused harmlessly where there is nothing to repair.
fn close_leaked_group(library: &Library) {
    if let Some(end) = library.api().ncclGroupEnd {
        // SAFETY: takes no arguments; outside of a group it only returns an error.
        let _ = unsafe { end() };
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

fn as_int(rank: usize) -> Result<i32> {
    i32::try_from(rank).map_err(|_| {
        Error::rendezvous(format!(
            "{rank} is more than the {} ranks that NCCL can count",
            i32::MAX
        ))
    })
}

/// NCCL's environment beats its configuration: refuses what contradicts how this crate uses NCCL.
///
/// NCCL's files of settings are not looked at here, but by the checks of all ranks before a start.
pub(super) fn refuse_contradictions() -> Result<()> {
    let variables = [
        (
            "NCCL_COMM_BLOCKING",
            "blocking",
            "makes NCCL's calls block, so that no deadline could end them",
        ),
        (
            "NCCL_COMM_SPLIT_SHARE_RESOURCES",
            "splitShare",
            "makes communicators that are split from each other end together: an abort of one is an \
             abort of all",
        ),
    ];
    for (variable, field, does) in variables {
        if let Ok(value) = std::env::var(variable)
            && is_one(&value)
        {
            return Err(Error::new(ErrorKind::InvalidConfig {
                field,
                reason: format!("{variable}={value} in the environment {does}; unset it"),
            }));
        }
    }
    Ok(())
}

/// Whether NCCL takes this text for 1: it reads numbers like C does, decimal, `0x…` or with a leading 0
/// octal, and stops at the first character that is none.
fn is_one(text: &str) -> bool {
    let text = text.trim_start();
    let text = text.strip_prefix('+').unwrap_or(text);
    let (digits, radix) = match text.strip_prefix("0x").or(text.strip_prefix("0X")) {
        Some(hexadecimal) => (hexadecimal, 16),
        None if text.starts_with('0') => (text, 8),
        None => (text, 10),
    };
    let end = digits.find(|c: char| !c.is_digit(radix));
    digits[..end.unwrap_or(digits.len())].trim_start_matches('0') == "1"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blocking_communicator_is_recognized_however_the_one_is_written() {
        for text in ["1", " 1", "+1", "01", "0x1", "0X01", "1 ", "1,"] {
            assert!(is_one(text), "{text:?}");
        }
        for text in ["", "0", "-1", "10", "0x10", "11", "yes", "0x"] {
            assert!(!is_one(text), "{text:?}");
        }
    }
}
