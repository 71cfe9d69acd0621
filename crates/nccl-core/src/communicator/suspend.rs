//! The device memory of a communicator: its size, and releasing it for a while.
//!
//! NCCL does not refuse operations on a suspended communicator: their kernels would read unmapped memory. So this crate
//! refuses them, under the lock that every call takes. Launches of graphs do not take that lock; they check under the lock of
//! their graph, which a suspend takes once after it has set the flag.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use nccl_sys as sys;

use super::handle::Handle;
use super::rare_calls::{ask, together};
use super::{Communicator, Inner};
use crate::config;
use crate::error::{Error, ErrorKind, Result};
use crate::ffi;
use crate::forked;
use crate::time::deadline_after;

const SUSPEND: &str = "ncclCommSuspend";
const RESUME: &str = "ncclCommResume";
const STATS: &str = "ncclCommMemStats";

/// The device memory that NCCL has allocated for a communicator, in bytes; see [`Communicator::memory`].
///
/// ```
/// # fn example(comm: &nccl::Communicator) -> nccl::Result<()> {
/// let memory = comm.memory()?;
/// println!("{} of {} bytes can be given back", memory.suspendable, memory.total);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CommunicatorMemory {
    /// All memory that NCCL tracks (`ncclStatGpuMemTotal`).
    pub total: u64,
    /// The memory that [`Communicator::suspend`] releases (`ncclStatGpuMemSuspend`).
    pub suspendable: u64,
    /// The memory that stays allocated (`ncclStatGpuMemPersist`).
    pub persistent: u64,
    /// Whether the communicator is suspended now (`ncclStatGpuMemSuspended`).
    pub is_suspended: bool,
}

pub(crate) fn memory(comm: &Communicator) -> Result<CommunicatorMemory> {
    let function = comm.library().function(sys::Api::ncclCommMemStats)?;
    ask(comm, STATS, move |inner, raw| {
        let ask = |stat| {
            let mut value = 0;
            // SAFETY: the communicator is alive, under its lock; the place is valid for the call.
            let code = unsafe { function(raw.as_ptr(), stat, &mut value) };
            ffi::check(&inner.library, STATS, code).map_err(Error::from)?;
            Ok::<u64, Error>(value)
        };
        use sys::ncclCommMemStat_t as Stat;
        Ok(CommunicatorMemory {
            total: ask(Stat::ncclStatGpuMemTotal)?,
            suspendable: ask(Stat::ncclStatGpuMemSuspend)?,
            persistent: ask(Stat::ncclStatGpuMemPersist)?,
            is_suspended: ask(Stat::ncclStatGpuMemSuspended)? != 0,
        })
    })
}

pub(crate) fn suspend(comm: &Communicator) -> Result<()> {
    check_suspendable(comm)?;
    let function = comm.library().function(sys::Api::ncclCommSuspend)?;
    // Fails on every rank alike, before any rank waits for the others.
    let memory = memory(comm)?;
    if memory.is_suspended {
        return Err(comm.inner.suspended());
    }
    let timeout = comm.timeout;
    let begin = move |inner: &Arc<Inner>, handle: &Handle| {
        let raw = inner.ready(handle)?;
        inner.is_suspended.store(true, Ordering::Release);
        if inner.plans.wait_for_launches(deadline_after(timeout / 2)) {
            return Ok(raw);
        }
        inner.is_suspended.store(false, Ordering::Release);
        Err(Error::new(ErrorKind::TimedOut {
            what: String::from("the launch of a plan"),
            timeout: timeout / 2,
        }))
    };
    together(
        comm,
        SUSPEND,
        begin,
        // SAFETY: the communicator is alive, under its lock, and none of its operations is issued until it is resumed.
        move |raw| unsafe { function(raw.as_ptr(), sys::NCCL_SUSPEND_MEM) },
        |_| {},
    )
}

pub(crate) fn resume(comm: &Communicator) -> Result<()> {
    check_suspendable(comm)?;
    let function = comm.library().function(sys::Api::ncclCommResume)?;
    let begin = |inner: &Arc<Inner>, handle: &Handle| {
        let raw = inner.alive(handle)?;
        match inner.is_suspended.load(Ordering::Acquire) {
            true => Ok(raw),
            false => Err(not_possible("it is not suspended")),
        }
    };
    together(
        comm,
        RESUME,
        begin,
        // SAFETY: the communicator is alive, under its lock.
        move |raw| unsafe { function(raw.as_ptr()) },
        |inner| inner.is_suspended.store(false, Ordering::Release),
    )
}

fn check_suspendable(comm: &Communicator) -> Result<()> {
    forked::check()?;
    match comm.inner.has_blocking_calls {
        // An idle parent shares the memory. Without an idle parent, a call that does not return could not be ended.
        true => Err(not_possible(
            "it was not made `suspendable`: NCCL shares the memory of a communicator in launch mode BlockingChild with its idle parent",
        )),
        false => Ok(()),
    }
}

impl Inner {
    /// The error for a call on a suspended communicator.
    #[cold]
    pub(crate) fn suspended(&self) -> Error {
        Error::new(ErrorKind::Closed { state: "suspended" })
    }
}

fn not_possible(reason: &str) -> Error {
    config::invalid("suspendable", String::from(reason))
}
