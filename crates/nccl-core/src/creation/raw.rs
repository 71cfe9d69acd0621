//! Conversion from and to NCCL's own pointer.

use crate::communicator::{Communicator, Timeouts, timeouts};
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::CudaStream;
use nccl_sys as sys;

use super::first_handle::first_handle;
use super::init::InitPlan;
use crate::abort::AbortSignal;
use crate::communicator::handle::RawComm;
use crate::communicator::launch_mode::refuse_contradictions;
use crate::communicator::registry::PendingInit;
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use crate::forked;
use crate::library::Library;
use crate::state::State;
use crate::time::deadline_after;
use crate::{detached_call, ffi};
use nccl_base::env_timeouts::EnvTimeouts;
use nccl_base::launch_mode::LaunchMode;

/// Takes over a communicator that was made elsewhere.
///
/// # Safety
/// As [`Communicator::from_raw`]; `has_blocking_calls` is whether its calls block.
pub(super) unsafe fn take_over(
    library: &Library,
    raw: sys::ncclComm_t,
    name: &str,
    stream: &Arc<CudaStream>,
    has_blocking_calls: bool,
) -> Result<Communicator> {
    if !has_blocking_calls {
        refuse_contradictions(LaunchMode::NonBlocking)?;
    }
    forked::begin()?;
    let timeouts = timeouts::over(EnvTimeouts::of_process()?, Timeouts::default());
    let invalid = |field, reason: String| Error::new(ErrorKind::InvalidConfig { field, reason });
    let raw = NonNull::new(raw)
        .map(RawComm)
        .ok_or_else(|| invalid("raw", String::from("a null pointer is no communicator")))?;
    let ask = |call: &'static str, function: Option<Ask>| -> Result<i32> {
        let function = function.ok_or_else(|| ffi::missing(library, call))?;
        let theirs = library.clone();
        let timeout = timeouts.operation;
        let asked = detached_call::run(
            deadline_after(timeout),
            || false,
            move || {
                let raw = raw;
                let mut answer = 0;
                // SAFETY: the caller passes a ready communicator; `answer` is valid for the call.
                let code = unsafe { function(raw.as_ptr(), &mut answer) };
                ffi::check(&theirs, call, code)?;
                Ok::<_, Error>(answer)
            },
            drop,
        );
        asked.map_err(|not_back| not_back.into_error(call, timeout))?
    };
    let api = library.api();
    let rank = ask("ncclCommUserRank", api.ncclCommUserRank)?;
    let world_size = ask("ncclCommCount", api.ncclCommCount)?;
    let device = ask("ncclCommCuDevice", api.ncclCommCuDevice)?;
    let ordinal = stream.context().ordinal();
    if usize::try_from(device) != Ok(ordinal) {
        return Err(invalid(
            "stream",
            format!("it is on device {ordinal}, the communicator on device {device}"),
        ));
    }
    let plan = InitPlan {
        library: library.clone(),
        name,
        rank: rank as usize,
        world_size: world_size as usize,
        stream: Arc::clone(stream),
        config: &Config::default(),
        preference: crate::communicator::launch_mode::LaunchPreference::Asked(
            LaunchMode::NonBlocking,
        ),
        timeouts,
        abort_signal: AbortSignal::new(),
        world_members: None,
        members: None,
        pending_init: PendingInit::begin(name, rank as usize, &timeouts),
    };
    let inner = plan.prepare()?.adopt(raw, has_blocking_calls);
    // Other memory may be registered with it, or captured.
    inner.lends_beyond_kernels();
    Ok(first_handle(inner))
}

/// Returns NCCL's pointer; `None` once the communicator has ended, or its end has begun.
pub(super) fn pointer(comm: &Communicator) -> Option<sys::ncclComm_t> {
    forked::check().ok()?;
    let pointer = comm.inner.handle.pointer();
    pointer.filter(|_| comm.inner.lifecycle.get() == State::Ready)
}

type Ask = unsafe extern "C" fn(sys::ncclComm_t, *mut std::ffi::c_int) -> sys::ncclResult_t;
