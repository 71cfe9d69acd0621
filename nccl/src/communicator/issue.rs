//! One operation, from the checks to the request.
//!
//! The order of things is what makes it safe:
//! 1. everything that can fail without NCCL: state, streams, lengths (checked by the caller), waits and
//!    guards;
//! 2. the C calls, between group start and end when there are several, in one go;
//! 3. the poll until NCCL has put its work on the stream: before that nothing may be recorded behind
//!    it, and no borrow may end;
//! 4. the other half of the joins, and the end of cudarc's guards: on every path, also when a call
//!    failed, because part of the work may be on the stream.
//!
//! When the poll does not come to an end in time, the communicator is aborted. When even that does not
//! come back, NCCL still holds pointers into memory that is only borrowed, and this function must not
//! return: it ends the process.

use std::ffi::c_void;
use std::io::Write as _;
use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaStream, SyncOnDrop};
use nccl_sys as sys;

use super::handle::{Handle, RawComm, settle};
use super::lifecycle::Outcome;
use super::{Inner, State, lock, order};
use crate::error::{Error, ErrorKind, NcclFailure, Result};
use crate::ffi::Progress;
use crate::library::Library;
use crate::operation::{OperationKind, Shape};
use crate::request::Request;
use crate::time::deadline_after;

/// The address of a buffer and the guard that keeps cudarc's order of streams.
pub(crate) type Leased<'s> = (CUdeviceptr, SyncOnDrop<'s>);

/// One operation: its buffers, and the C calls that put it on a stream.
pub(crate) trait Issue<'s> {
    /// Shows the stream of every buffer.
    fn streams(&self, visit: impl FnMut(&Arc<CudaStream>) -> Result<()>) -> Result<()>;

    /// Turns the buffers into addresses; the guards are dropped when the operation is on `on`.
    fn lease(&mut self, on: &'s CudaStream, leases: &mut Vec<Leased<'s>>);

    /// Makes the C calls.
    fn call(&self, calls: &Calls<'_>) -> Result<Progress, NcclFailure>;
}

/// What the C calls of one operation need.
pub(crate) struct Calls<'c> {
    pub(crate) library: &'c Library,
    pub(crate) comm: sys::ncclComm_t,
    pub(crate) stream: sys::cudaStream_t,
    /// In the order in which [`Issue::lease`] pushed them.
    leases: &'c [Leased<'c>],
}

impl Calls<'_> {
    /// The address of the buffer that was leased as number `index`.
    #[inline]
    pub(crate) fn address(&self, index: usize) -> *mut c_void {
        self.leases[index].0 as *mut c_void
    }
}

/// Why an operation was not issued.
enum Refused {
    /// NCCL was not asked; the communicator is as good as before.
    Before(Error),
    /// NCCL was not asked, because the abort signal was given.
    Signalled(Error),
    /// NCCL was asked, and part of the work may be on its way; the communicator cannot be used again.
    Underway(Error),
}

impl Inner {
    /// Issues one operation on `on`.
    pub(crate) fn issue<'s>(
        self: &Arc<Self>,
        on: &'s Arc<CudaStream>,
        kind: OperationKind,
        shape: Shape,
        operation: &mut impl Issue<'s>,
    ) -> Result<Request> {
        let started = Instant::now();
        match self.issue_locked(on, operation) {
            Ok(sequence) => Ok(Request::new(self, on, kind, shape, sequence, started)),
            Err((refused, sequence)) => {
                let error = match refused {
                    Refused::Before(error) => error,
                    Refused::Signalled(error) => {
                        // Nothing is lent to NCCL by this operation: it may well be leaked.
                        self.abort("its abort signal was given");
                        error
                    }
                    Refused::Underway(error) => {
                        self.abandon(&error);
                        error
                    }
                };
                Err(error.during(|| self.operation(kind, shape, Some(sequence), started)))
            }
        }
    }

    fn issue_locked<'s>(
        &self,
        on: &'s Arc<CudaStream>,
        operation: &mut impl Issue<'s>,
    ) -> Result<u64, (Refused, u64)> {
        let mut handle = lock(&self.handle);
        let sequence = handle.sequence + 1;
        match self.issue_on(&mut handle, on, operation) {
            Ok(()) => Ok(sequence),
            Err(refused) => Err((refused, sequence)),
        }
    }

    fn issue_on<'s>(
        &self,
        handle: &mut Handle,
        on: &'s Arc<CudaStream>,
        operation: &mut impl Issue<'s>,
    ) -> Result<(), Refused> {
        let raw = match handle.raw {
            Some(raw) if self.phase.get() == State::Ready => raw,
            _ => return Err(Refused::Before(self.out_of_use())),
        };
        if self.abort_signal.is_aborted() {
            return Err(Refused::Signalled(Error::new(ErrorKind::Aborted {
                reason: String::from("its abort signal was given"),
            })));
        }

        // 1. Nothing of this reaches NCCL.
        let leases = self
            .prepare(handle, on, operation)
            .map_err(Refused::Before)?;

        // 2. and 3.
        let lent = Lent;
        handle.sequence += 1;
        let made = operation.call(&Calls {
            library: &self.library,
            comm: raw.as_ptr(),
            stream: on.cu_stream().cast(),
            leases: &leases,
        });
        let launched = match made {
            Ok(Progress::Done) => Ok(()),
            Ok(Progress::Pending) => self.settled(raw),
            Err(failure) => Err(Error::from(failure)),
        };

        // 4. On every path.
        let ordered = order::leave(on, &handle.foreign, &handle.join);
        handle.leases = recycle(leases);
        std::mem::forget(lent);
        launched.and(ordered).map_err(Refused::Underway)
    }

    /// Checks the streams, makes the operation wait for its buffers, and turns these into addresses.
    fn prepare<'s>(
        &self,
        handle: &mut Handle,
        on: &'s Arc<CudaStream>,
        operation: &mut impl Issue<'s>,
    ) -> Result<Vec<Leased<'s>>> {
        const WHAT: &str = "the operation's stream";
        order::admit(WHAT, on, &self.context)?;
        // Binds the context to this thread, which all that follows relies on.
        order::not_capturing(WHAT, on)?;
        handle.foreign.clear();
        operation.streams(|stream| order::visit(stream, on, &mut handle.foreign))?;
        order::enter(on, &handle.foreign, &handle.join)?;
        let mut leases = recycle(std::mem::take(&mut handle.leases));
        operation.lease(on, &mut leases);
        // The guards swallow their errors; an operation that is not ordered must not be issued.
        self.context
            .check_err()
            .map_err(Error::cuda("ordering the operation behind its buffers"))?;
        Ok(leases)
    }

    /// Polls until the work is on the stream.
    fn settled(&self, raw: RawComm) -> Result<()> {
        let limit = self.timeouts.operation;
        settle(&self.library, raw, "launch", deadline_after(limit), || {
            self.interrupted()
        })
        .map_err(|unsettled| unsettled.into_error("putting the operation on its stream", limit))
    }

    fn interrupted(&self) -> bool {
        // Not by a finalize: that waits for this operation.
        self.abort_signal.is_aborted() || self.phase.get().is_aborted()
    }

    /// Aborts a communicator that cannot be used again. Ends the process when NCCL keeps pointers into
    /// memory that it was only lent.
    fn abandon(self: &Arc<Self>, reason: &Error) {
        let lent = Lent;
        let outcome = self.abort(&reason.kind().to_string());
        std::mem::forget(lent);
        if outcome == Outcome::Leaked {
            // Nobody may be reading, and this is the last word.
            let _ = writeln!(
                std::io::stderr(),
                "nccl: rank {} of {:?}: NCCL did not give the communicator back within {:?} and may \
                 still use memory that was lent to it; ending the process",
                self.rank,
                &*self.name,
                self.timeouts.abort
            );
            std::process::abort();
        }
    }
}

/// Memory is lent to NCCL while this lives: a panic must not give it back to the caller.
struct Lent;

impl Drop for Lent {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

/// An empty vector with the allocation of `used`, for elements of another lifetime.
pub(crate) fn recycle<'a, 'b>(mut used: Vec<Leased<'a>>) -> Vec<Leased<'b>> {
    used.clear();
    used.into_iter()
        .map(|_| unreachable!("the vector is empty"))
        .collect()
}
