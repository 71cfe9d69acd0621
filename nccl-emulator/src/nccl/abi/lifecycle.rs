//! Communicators in use and at their end: queries, finalize, destroy, abort.

use std::ffi::c_int;

use nccl_sys::{ncclComm_t, ncclResult_t};

use super::guard::{call, guarded, not_null, strike};
use crate::code::{self, IN_PROGRESS, INVALID_ARGUMENT};
use crate::nccl::communicator::{self, Communicator};
use crate::nccl::debug::{info, subsystem, warn};
use crate::nccl::group::{self, Job, JobKind};

pub(super) unsafe extern "C" fn ncclCommFinalize(comm: ncclComm_t) -> ncclResult_t {
    call("ncclCommFinalize", comm, || {
        if comm.is_null() {
            return Ok(());
        }
        let communicator = communicator::lookup(comm, "CommFinalize")?;
        group::start();
        let result = communicator.ensure_ready().and_then(|()| {
            if !communicator.mark_finalized() {
                return Err(INVALID_ARGUMENT);
            }
            group::add_job(Job::new(JobKind::Finalize, &communicator))
        });
        if !communicator.config.blocking && result.is_err() {
            communicator.set_state(result);
        }
        let _ = group::record(result);
        match group::end() {
            Err(error) if error != IN_PROGRESS => Err(error),
            _ if !communicator.config.blocking => communicator.state(),
            _ => result,
        }
    })
}

pub(super) unsafe extern "C" fn ncclCommDestroy(comm: ncclComm_t) -> ncclResult_t {
    call("ncclCommDestroy", comm, || {
        if comm.is_null() {
            return Ok(());
        }
        let Some(communicator) = communicator::peek(comm) else {
            communicator::report_dead(comm, "ncclCommDestroy");
            // As in NCCL, the thread stays inside a group here, and below.
            group::start();
            warn!("comm {comm:p} has already been destroyed");
            return Err(INVALID_ARGUMENT);
        };
        group::start();
        communicator.mark_destroyed();
        communicator.ensure_ready()?;
        let result = group::record(group::add_job(Job::new(JobKind::Reclaim, &communicator)));
        group::end()?;
        result
    })
}

pub(super) unsafe extern "C" fn ncclCommAbort(comm: ncclComm_t) -> ncclResult_t {
    call("ncclCommAbort", comm, || {
        if comm.is_null() {
            return Ok(());
        }
        let communicator = communicator::lookup(comm, "CommAbort")?;
        if communicator.config.blocking && communicator.threads_inside() > 0 {
            communicator.violation(
                "ncclCommAbort on a blocking communicator while another thread is inside a call on it: NCCL frees it \
                 under that thread",
            );
        } else if communicator.threads_polling() > 0 {
            communicator.violation(
                "ncclCommAbort while another thread is inside ncclCommGetAsyncError on it: NCCL joins the same thread \
                 twice",
            );
        }
        info!(
            subsystem::DESTROY,
            "{} - Abort START",
            communicator::ending(&communicator, "nRanks")
        );
        group::start();
        communicator.raise_abort();
        communicator.mark_destroyed();
        // The background work ends because of the flag; its errors no longer matter.
        let _ = communicator.ensure_ready();
        let result = group::record(group::add_job(Job::new(JobKind::Reclaim, &communicator)));
        group::end()?;
        result
    })
}

/// Succeeds for NULL, regardless of the flags.
pub(super) unsafe extern "C" fn ncclCommRevoke(
    comm: ncclComm_t,
    revokeFlags: c_int,
) -> ncclResult_t {
    call("ncclCommRevoke", comm, || {
        if comm.is_null() {
            return Ok(());
        }
        if revokeFlags != 0 {
            return Err(INVALID_ARGUMENT);
        }
        let communicator = communicator::lookup(comm, "CommRevoke")?;
        if communicator.is_destroyed() || communicator.is_finalized() || communicator.is_revoked() {
            return Err(INVALID_ARGUMENT);
        }
        let line = format!("{} - Revoke", communicator::ending(&communicator, "nRanks"));
        info!(subsystem::DESTROY, "{line} START");
        group::start();
        communicator.raise_abort();
        communicator.mark_revoked();
        // The background work ends because of the flag; its errors no longer matter.
        let _ = communicator.ensure_ready();
        communicator.mark_finalized();
        let result = group::record(group::add_job(Job::new(JobKind::Revoke, &communicator)));
        if !communicator.config.blocking && result.is_err() {
            communicator.set_state(result);
        }
        let result = match group::end() {
            Err(error) if error != IN_PROGRESS => Err(error),
            _ if !communicator.config.blocking => communicator.state(),
            _ => result,
        };
        info!(
            subsystem::DESTROY,
            "{line} COMPLETE, result {}",
            code::number(result)
        );
        result
    })
}

pub(super) unsafe extern "C" fn ncclCommGetAsyncError(
    comm: ncclComm_t,
    asyncError: *mut ncclResult_t,
) -> ncclResult_t {
    guarded("ncclCommGetAsyncError", || {
        let communicator = communicator::lookup(comm, "ncclGetAsyncError")?;
        not_null(asyncError, "ncclGetAsyncError", "asyncError")?;
        if let Err(error) = strike("ncclCommGetAsyncError", comm) {
            communicator.set_state(Err(error));
        }
        let state = code::to_c(communicator.poll());
        // SAFETY: not null, and by the function's contract the caller's to write to.
        unsafe { asyncError.write(state) };
        Ok(())
    })
}

/// The three queries that are answered from the communicator.
///
/// # Safety
/// `out` is null or writable.
unsafe fn query(
    (symbol, function, argument): (&'static str, &str, &str),
    comm: ncclComm_t,
    out: *mut c_int,
    answer: impl FnOnce(&Communicator) -> c_int,
) -> ncclResult_t {
    call(symbol, comm, || {
        let communicator = communicator::lookup(comm, function)?;
        not_null(out, function, argument)?;
        communicator.ensure_ready()?;
        // SAFETY: not null, so writable by the caller's promise.
        unsafe { out.write(answer(&communicator)) };
        Ok(())
    })
}

pub(super) unsafe extern "C" fn ncclCommCount(comm: ncclComm_t, count: *mut c_int) -> ncclResult_t {
    // SAFETY: the function's contract.
    unsafe {
        query(
            ("ncclCommCount", "CommCount", "count"),
            comm,
            count,
            |communicator| communicator.ranks,
        )
    }
}

pub(super) unsafe extern "C" fn ncclCommCuDevice(
    comm: ncclComm_t,
    device: *mut c_int,
) -> ncclResult_t {
    // SAFETY: the function's contract.
    unsafe {
        query(
            ("ncclCommCuDevice", "CommCuDevice", "device"),
            comm,
            device,
            |communicator| communicator.device,
        )
    }
}

pub(super) unsafe extern "C" fn ncclCommUserRank(
    comm: ncclComm_t,
    rank: *mut c_int,
) -> ncclResult_t {
    // SAFETY: the function's contract.
    unsafe {
        query(
            ("ncclCommUserRank", "CommUserRank", "rank"),
            comm,
            rank,
            |communicator| communicator.rank,
        )
    }
}
