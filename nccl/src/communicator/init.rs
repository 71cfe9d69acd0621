//! The making of a communicator: one call, then polls until every rank is there or a deadline passes.

use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaEvent, CudaStream};
use nccl_sys as sys;

use super::handle::{Handle, RawComm, Turn, Unsettled, settle};
use super::lifecycle::{Outcome, discard};
use super::state::Phase;
use super::{Inner, Pins, Timeouts, order};
use crate::abort::AbortSignal;
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result, StreamRefusal};
use crate::expendable::{self, NotBack};
use crate::ffi;
use crate::library::Library;
use crate::operation::{Operation, OperationKind, Shape};
use crate::plan::Plans;
use crate::rendezvous::Line;
use crate::supervision::recorder::Tracked;
use crate::supervision::{Board, Cause};
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
    board: Option<Arc<Board>>,
}

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
            board: None,
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
    /// Joins the other ranks, until `deadline`, or until there is no use in it any more.
    pub(super) fn join(
        mut self,
        id: &UniqueId,
        deadline: Instant,
        is_void: impl Fn() -> bool,
    ) -> Result<Inner> {
        let started = Instant::now();
        // Before NCCL is asked: what happens to the others meanwhile ends this, too.
        let board = self.company.take().map(|(line, members)| {
            let confirm = self.timeouts.confirm;
            Board::new(&line, &self.name, id, members, self.rank, confirm)
        });
        self.board = board.clone();
        let (raw, error) = match self.join_nccl(id, deadline, is_void) {
            Ok(raw) => return Ok(self.adopt(raw)),
            Err(failed) => failed,
        };
        let error = error.during(|| Operation {
            kind: OperationKind::Init,
            communicator: Arc::clone(&self.name),
            rank: self.rank,
            world_size: self.world_size,
            host: crate::host::name(),
            pid: std::process::id(),
            sequence: None,
            shape: Shape::default(),
            elapsed: started.elapsed(),
        });
        if let Some(board) = &board
            && board.fault().is_none()
        {
            // Before the end here: it may need that of the others.
            board.announce(Cause::from(&error));
        }
        let freed = match raw {
            Some(raw) => discard(&self.library, raw, self.timeouts.abort) == Outcome::Freed,
            None => true,
        };
        if !freed {
            // NCCL may still be at work in the context.
            std::mem::forget(self.context);
            tracing::error!(target: "nccl", communicator = &*self.name, "a failed init is leaked");
        }
        let Some(board) = board else {
            return Err(error);
        };
        let also = board.conclude(freed);
        Err(match board.fault() {
            Some(fault) => error.because_of(fault, board.is_own(fault), also),
            None => error,
        })
    }

    /// A failure leaves a communicator that is to be freed, or none.
    fn join_nccl(
        &self,
        id: &UniqueId,
        deadline: Instant,
        is_void: impl Fn() -> bool,
    ) -> Result<RawComm, (Option<RawComm>, Error)> {
        self.context
            .bind_to_thread()
            .map_err(|error| (None, Error::cuda(BINDING)(error)))?;
        let struck = || {
            let board = self.board.as_ref();
            board.is_some_and(|board| board.fault().is_some())
        };
        let interrupted = || self.abort_signal.is_aborted() || struck() || is_void();
        let patience = Patience {
            context: &self.context,
            deadline,
            limit: self.timeouts.init,
            interrupted: &interrupted,
        };
        let config = &self.config;
        let (raw, started) = start(
            &self.library,
            self.rank,
            self.world_size,
            id,
            config,
            patience,
        )
        .map_err(|error| (None, error))?;
        let mut lost = false;
        let settled = started.and_then(|()| {
            settle_apart(&self.library, raw, CALL, deadline, &interrupted).map_err(|unsettled| {
                lost = matches!(unsettled, Unsettled::Lost);
                unsettled.into_error("joining the ranks", self.timeouts.init)
            })
        });
        match settled {
            Ok(()) => Ok(raw),
            // A thread is inside a call on it, and frees it if it ever comes out.
            Err(error) if lost => Err((None, error)),
            Err(error) => Err((Some(raw), error)),
        }
    }

    /// The communicator around a pointer that is ready.
    pub(super) fn adopt(self, raw: RawComm) -> Inner {
        let phase = Arc::new(Phase::new());
        let (tracked, recorder) = Tracked::new(&self.name, self.rank, self.world_size, &phase);
        let handle = Handle {
            raw: Some(raw),
            sequence: 0,
            join: self.join,
            recorder,
        };
        Inner {
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
            plans: Plans::default(),
            kept: AtomicUsize::new(0),
            handle: Turn::new(handle),
            board: self.board,
            blocks: false,
            pins: Some(Pins {
                stream: self.pins_stream,
            }),
        }
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
) -> Result<(RawComm, Result<()>)> {
    let init = library.function(sys::Api::ncclCommInitRankConfig)?;
    let (rank, world_size) = (as_int(rank)?, as_int(world_size)?);
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
                let _ = discard(&freeing, raw, Timeouts::default().abort);
            }
        },
    );
    made.map_err(|not_back| not_back.into_error(CALL, limit))?
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
            let _ = discard(&freeing, raw, Timeouts::default().abort);
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
