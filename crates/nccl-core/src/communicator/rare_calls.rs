//! Calls other than operations: queries about a communicator, and calls that all ranks make together. Each runs on a thread
//! that can be given up.

use std::sync::Arc;
use std::time::Instant;

use nccl_sys as sys;

use super::handle::{Handle, RawComm};
use super::{Communicator, Inner};
use crate::cuda_driver;
use crate::detached_call;
use crate::error::{Error, Result};
use crate::ffi::{self, Progress};
use crate::forked;
use crate::library::Library;
use crate::time::deadline_after;

/// A failure of a call that all ranks make together.
enum Failure {
    /// NCCL was not called, or refused without involving the other ranks.
    NotStarted(Error),
    PartlyIssued(Error),
}

/// Runs a query that NCCL answers without the other ranks, also on a suspended communicator. `question` runs under the
/// lock, while the communicator is alive.
pub(crate) fn ask<R: Send + 'static>(
    comm: &Communicator,
    name: &'static str,
    question: impl FnOnce(&Inner, RawComm) -> Result<R> + Send + 'static,
) -> Result<R> {
    forked::check()?;
    let inner = Arc::clone(&comm.inner);
    let timeout = comm.timeout;
    let asked = detached_call::run(
        // The wait for the lock has a deadline of its own.
        deadline_after(timeout.saturating_add(detached_call::SLACK)),
        || inner.interrupted(),
        {
            let inner = Arc::clone(&inner);
            move || {
                let binding = Error::cuda("binding the context to this thread (cuCtxSetCurrent)");
                cuda_driver::bind(&inner.context).map_err(binding)?;
                let (handle, _) = inner.handle.lock_within(None, timeout)?;
                question(&inner, inner.alive(&handle)?)
            }
        },
        drop,
    );
    asked.unwrap_or_else(|not_back| {
        let error = not_back.into_error(name, timeout);
        Err(inner.final_error(error))
    })
}

/// Makes a call that all ranks make together, and waits until NCCL has settled. Aborts the communicator if the call fails.
/// All three closures run under the lock: `begin` before NCCL is called, `done` after the call has succeeded.
pub(crate) fn together(
    comm: &Communicator,
    name: &'static str,
    begin: impl FnOnce(&Arc<Inner>, &Handle) -> Result<RawComm> + Send + 'static,
    call: impl FnOnce(RawComm) -> sys::ncclResult_t + Send + 'static,
    done: impl FnOnce(&Inner) + Send + 'static,
) -> Result<()> {
    let (inner, timeout) = (Arc::clone(&comm.inner), comm.timeout);
    let made = detached_call::run(
        // The waits for the lock, and for the other ranks, have deadlines of their own.
        deadline_after(timeout.saturating_add(detached_call::SLACK)),
        || false,
        move || {
            let binding = Error::cuda("binding the context to this thread (cuCtxSetCurrent)");
            let bound = cuda_driver::bind(&inner.context).map_err(binding);
            bound.map_err(Failure::NotStarted)?;
            let started = Instant::now();
            let locked = inner.handle.lock_within(None, timeout);
            let (guard, _) = locked.map_err(Failure::NotStarted)?;
            let raw = begin(&inner, &guard).map_err(Failure::NotStarted)?;
            let remaining = timeout.saturating_sub(started.elapsed());
            let library: &Library = &inner.library;
            let launched = inner.launch(raw, started, (timeout, remaining), || {
                let code = call(raw);
                // In a nonblocking communicator the call may return success before it is done.
                ffi::check(library, name, code).map(|_| Progress::Pending)
            });
            launched.map_err(Failure::PartlyIssued)?;
            done(&inner);
            Ok(())
        },
        drop,
    );
    let error = match made {
        Ok(Ok(())) => return Ok(()),
        Ok(Err(Failure::NotStarted(error))) => return Err(comm.inner.final_error(error)),
        Ok(Err(Failure::PartlyIssued(error))) => error,
        Err(not_back) => not_back.into_error(name, timeout),
    };
    comm.inner.abort(&error);
    Err(comm.inner.final_error(error))
}

impl Inner {
    /// Returns NCCL's pointer, even of a suspended communicator.
    pub(crate) fn alive(self: &Arc<Self>, handle: &Handle) -> Result<RawComm> {
        let raw = self.lifecycle.usable(handle.raw);
        raw.ok_or_else(|| self.out_of_use())
    }
}
