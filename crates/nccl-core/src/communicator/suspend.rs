//! The device memory of a communicator: its size, and releasing it for a while.
//!
//! NCCL does not refuse operations on a suspended communicator: their kernels would read unmapped memory. So this crate
//! refuses them, under the lock that every call takes. Launches of graphs do not take that lock; they check under the lock of
//! their graph, which a suspend takes once after it has set the flag.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use nccl_sys as sys;

use super::handle::Handle;
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

impl Communicator {
    /// Returns how much device memory NCCL has allocated for the communicator on this rank: its own buffers, not those of the
    /// program.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] before NCCL 2.29.7; [`ErrorKind::Nccl`] where `NCCL_DISABLE_MEM_MANAGER=1` turns the accounting
    /// off; [`ErrorKind::Aborted`] and [`ErrorKind::Closed`] when the communicator has ended.
    ///
    /// Wraps `ncclCommMemStats`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let world = nccl::World::threads(1).remove(0);
    /// # let comm = world.communicator("demo").stream(&stream).build()?;
    /// let memory = comm.memory()?;
    /// assert!(!memory.is_suspended && memory.suspendable <= memory.total);
    /// # Ok(())
    /// # }
    /// ```
    pub fn memory(&self) -> Result<CommunicatorMemory> {
        let function = self.library().function(sys::Api::ncclCommMemStats)?;
        self.ask(STATS, move |inner, raw| {
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

    /// Releases the device memory of the communicator's own buffers until [`resume`](Self::resume), for instance while an
    /// inference server sleeps. All ranks have to call this. It waits for all work on the device, and for the other ranks.
    ///
    /// Until the communicator is resumed, every operation and every launch of a plan is refused; plans stay valid. It can be
    /// finalized, aborted and dropped. It must have been made with
    /// [`CommunicatorBuilder::suspendable`](crate::CommunicatorBuilder::suspendable).
    ///
    /// # Errors
    /// [`ErrorKind::InvalidConfig`] for a communicator that was not made `suspendable`; [`ErrorKind::Unsupported`] before NCCL
    /// 2.29.7; [`ErrorKind::Nccl`] if `NCCL_DISABLE_MEM_MANAGER=1` forbids it; [`ErrorKind::Closed`] when the communicator is
    /// already suspended. [`ErrorKind::TimedOut`] when not all ranks make the call within the timeout for operations, and
    /// [`ErrorKind::Nccl`] when NCCL fails; the communicator is then aborted.
    ///
    /// Wraps `ncclCommSuspend`.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # nccl_emulator::install_unless_gpu()?;
    /// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
    /// # let world = nccl::World::threads(1).remove(0);
    /// let comm = world.communicator("model").stream(&stream).with(|comm| comm.suspendable = true).build()?;
    /// comm.suspend()?;
    /// assert!(comm.barrier().is_err());
    /// comm.resume()?;
    /// comm.barrier()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn suspend(&self) -> Result<()> {
        self.check_suspendable()?;
        let function = self.library().function(sys::Api::ncclCommSuspend)?;
        // Fails on every rank alike, before any rank waits for the others.
        let memory = self.memory()?;
        if memory.is_suspended {
            return Err(self.inner.suspended());
        }
        let timeout = self.timeout;
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
        self.together(
            SUSPEND,
            begin,
            // SAFETY: the communicator is alive, under its lock, and none of its operations is issued until it is resumed.
            move |raw| unsafe { function(raw.as_ptr(), sys::NCCL_SUSPEND_MEM) },
            |_| {},
        )
    }

    /// Allocates the memory again that [`suspend`](Self::suspend) released. All ranks have to call this.
    ///
    /// # Errors
    /// As [`suspend`](Self::suspend), and [`ErrorKind::InvalidConfig`] when the communicator is not suspended.
    ///
    /// Wraps `ncclCommResume`.
    ///
    /// ```
    /// # fn example(comm: &nccl::Communicator) -> nccl::Result<()> {
    /// comm.suspend()?;
    /// // … another model uses the memory …
    /// comm.resume()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn resume(&self) -> Result<()> {
        self.check_suspendable()?;
        let function = self.library().function(sys::Api::ncclCommResume)?;
        let begin = |inner: &Arc<Inner>, handle: &Handle| {
            let raw = inner.alive(handle)?;
            match inner.is_suspended.load(Ordering::Acquire) {
                true => Ok(raw),
                false => Err(not_possible("it is not suspended")),
            }
        };
        self.together(
            RESUME,
            begin,
            // SAFETY: the communicator is alive, under its lock.
            move |raw| unsafe { function(raw.as_ptr()) },
            |inner| inner.is_suspended.store(false, Ordering::Release),
        )
    }

    fn check_suspendable(&self) -> Result<()> {
        forked::check()?;
        match self.inner.has_blocking_calls {
            // An idle parent shares the memory. Without an idle parent, a call that does not return could not be ended.
            true => Err(not_possible(
                "it was not made `suspendable`: NCCL shares the memory of a communicator in launch mode BlockingChild with its idle parent",
            )),
            false => Ok(()),
        }
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
