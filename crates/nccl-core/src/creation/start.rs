//! The calls that begin to make a communicator, and the wait until it is ready. Each runs on a thread that can be given
//! up, because the stuck-call monitor does not watch these calls.

use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::CudaContext;
use nccl_sys as sys;

use crate::communicator::AbortFlagParent;
use crate::communicator::free::discard;
use crate::communicator::handle::{NotIdle, RawComm, wait_until_idle};
use crate::cuda_driver;
use crate::detached_call::{self, NoResult};
use crate::error::{Error, Result};
use crate::ffi;
use crate::library::Library;
use crate::state::PartialInit;
use crate::unique_id::UniqueId;

pub(super) const CALL: &str = "ncclCommInitRankConfig";
pub(super) const BINDING: &str = "binding the context to this thread (cuCtxSetCurrent)";
pub(super) const SPLIT: &str = "ncclCommSplit";

/// Begins to split the child that carries the data from the idle parent, on a thread that can be given up as in
/// [`start`].
pub(super) fn start_split(
    library: &Library,
    parent: RawComm,
    rank: usize,
    abort_flag_parent: &Arc<AbortFlagParent>,
    config: &sys::ncclConfig_t,
    limits: CallLimit<'_>,
) -> Result<(), (PartialInit<RawComm>, Error)> {
    const COLOR: i32 = 0;
    let here = |error| (PartialInit::Here(parent), error);
    let split = library.function(sys::Api::ncclCommSplit).map_err(here)?;
    let key = as_int(rank).map_err(here)?;
    let CallLimit {
        context,
        deadline,
        timeout,
        interrupted,
    } = limits;
    let mut config = SendConfig(*config);
    let (theirs, context, freeing) = (library.clone(), Arc::clone(context), library.clone());
    let (abort_flag_parent, held) = (Arc::clone(abort_flag_parent), Arc::clone(abort_flag_parent));
    let begun = detached_call::run(
        deadline,
        interrupted,
        move || {
            cuda_driver::bind(&context).map_err(Error::cuda(BINDING))?;
            let (parent, config) = (parent, &mut config);
            // SAFETY: the parent is idle and only this thread uses it; the child's memory stays valid until the
            // parent is idle again or freed (the abort-flag parent keeps it); the config is valid for the call, and
            // the strings that it points to are never freed.
            let code = unsafe {
                split(
                    parent.as_ptr(),
                    COLOR,
                    key,
                    abort_flag_parent.child_out_pointer(),
                    &mut config.0,
                )
            };
            ffi::check(&theirs, SPLIT, code)?;
            Ok(())
        },
        move |_: Result<()>| {
            discard(&freeing, parent, Some(&held));
        },
    );
    call_result(begun, SPLIT, timeout, here)
}

/// Returns the result of a call that could be given up. If the call failed, or was not made, `with_partial` adds the
/// remains of the communicator.
pub(super) fn call_result<T>(
    call: std::result::Result<Result<T>, NoResult>,
    name: &'static str,
    timeout: Duration,
    with_partial: impl FnOnce(Error) -> (PartialInit<RawComm>, Error),
) -> Result<T, (PartialInit<RawComm>, Error)> {
    match call {
        Ok(result) => result.map_err(with_partial),
        Err(not_back) => {
            let lost = !matches!(not_back, NoResult::NoThread(_));
            let error = not_back.into_error(name, timeout);
            Err(if lost {
                (PartialInit::HeldByStuckCall, error)
            } else {
                with_partial(error)
            })
        }
    }
}

/// Calls `ncclCommInitRankConfig`, or with several tokens `ncclCommInitRankScalable`, on a thread that can be given up, because
/// the call should not wait but may. The communicator that it returns is not ready yet, and has to be freed if the call failed.
pub(super) fn start(
    library: &Library,
    rank: usize,
    world_size: usize,
    tokens: &[UniqueId],
    config: &sys::ncclConfig_t,
    limits: CallLimit<'_>,
) -> Result<(RawComm, Result<()>), (PartialInit<RawComm>, Error)> {
    let nothing = |error| (PartialInit::Nothing, error);
    let init = library.function(sys::Api::ncclCommInitRankConfig);
    let init = init.map_err(nothing)?;
    let scalable = match tokens {
        [_] => None,
        _ => Some(
            library
                .function(sys::Api::ncclCommInitRankScalable)
                .map_err(nothing)?,
        ),
    };
    let rank = as_int(rank).map_err(nothing)?;
    let world_size = as_int(world_size).map_err(nothing)?;
    let CallLimit {
        context,
        deadline,
        timeout,
        interrupted,
    } = limits;
    if !crate::single_rank::is(library) {
        nccl_base::system::env_drift::record_environment();
    }
    let mut tokens: Vec<_> = tokens.iter().map(UniqueId::raw).collect();
    let mut config = SendConfig(*config);
    let (theirs, context, freeing) = (library.clone(), Arc::clone(context), library.clone());
    let made = detached_call::run(
        deadline,
        interrupted,
        move || {
            cuda_driver::bind(&context).map_err(Error::cuda(BINDING))?;
            let config = &mut config;
            // Null, because releases up to 2.18 follow this pointer when they fail.
            let mut comm: sys::ncclComm_t = std::ptr::null_mut();
            let code = match scalable {
                // SAFETY: `comm` and `config` are valid for the call, which writes the communicator before it
                // returns; the strings that `config` points to are never freed.
                None => unsafe { init(&mut comm, world_size, tokens[0], rank, &mut config.0) },
                // SAFETY: likewise; there are as many tokens as the call is told, and no more than ranks.
                Some(scalable) => unsafe {
                    scalable(
                        &mut comm,
                        world_size,
                        rank,
                        tokens.len() as i32,
                        tokens.as_mut_ptr(),
                        &mut config.0,
                    )
                },
            };
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
        // No other code knows of the communicator, and this thread may block.
        move |made: Result<(RawComm, Result<()>)>| {
            if let Ok((raw, _)) = made {
                discard(&freeing, raw, None);
            }
        },
    );
    call_result(made, CALL, timeout, nothing)
}

/// Polls until the communicator is idle, on a thread that can be given up: the stuck-call monitor does not watch
/// these calls.
pub(super) fn wait_until_idle_on_thread(
    library: &Library,
    raw: RawComm,
    abort_flag_parent: Option<Arc<AbortFlagParent>>,
    call: &'static str,
    deadline: Instant,
    interrupted: &dyn Fn() -> bool,
) -> Result<(), NotIdle> {
    /// How long a query of NCCL's state may take.
    const LOOK: Duration = Duration::from_secs(1);
    let stop = Arc::new(AtomicBool::new(false));
    let (theirs, stopped, freeing) = (library.clone(), Arc::clone(&stop), library.clone());
    let since: Cell<Option<Instant>> = Cell::new(None);
    let settled = detached_call::run(
        deadline.checked_add(LOOK).unwrap_or(deadline),
        || {
            if since.get().is_none() && interrupted() {
                stop.store(true, Ordering::Release);
                since.set(Some(Instant::now()));
            }
            since.get().is_some_and(|since| since.elapsed() > LOOK)
        },
        move || {
            wait_until_idle(&theirs, raw, call, deadline, || {
                stopped.load(Ordering::Acquire)
            })
        },
        move |_| {
            discard(&freeing, raw, abort_flag_parent.as_deref());
        },
    );
    match settled {
        Ok(settled) => settled,
        Err(NoResult::NoThread(_)) => wait_until_idle(library, raw, call, deadline, interrupted),
        Err(NoResult::TimedOut | NoResult::Interrupted) => Err(NotIdle::Unresponsive),
    }
}

/// The timeouts of a call.
pub(super) struct CallLimit<'p> {
    pub(super) context: &'p Arc<CudaContext>,
    pub(super) deadline: Instant,
    /// The timeout that the error contains.
    pub(super) timeout: Duration,
    pub(super) interrupted: &'p dyn Fn() -> bool,
}

/// A configuration that is sent to the thread of the call.
pub(super) struct SendConfig(pub(super) sys::ncclConfig_t);

// SAFETY: its pointers are null or point to strings that are never freed or changed.
unsafe impl Send for SendConfig {}

/// In releases from 2.23.4 on, this thread stays inside a group when the very first CUDA call fails, and every later
/// call on this thread would be queued for ever. This crate never calls init inside a group of its own, so one group
/// end repairs that. Without an open group, NCCL refuses the call without harm.
fn close_leaked_group(library: &Library) {
    if let Some(end) = library.api().ncclGroupEnd {
        // SAFETY: takes no arguments; outside of a group it only returns an error.
        let _ = unsafe { end() };
    }
}

pub(super) fn as_int(rank: usize) -> Result<i32> {
    i32::try_from(rank).map_err(|_| {
        Error::rendezvous(format!(
            "{rank} is more than the {} ranks that NCCL can count",
            i32::MAX
        ))
    })
}
