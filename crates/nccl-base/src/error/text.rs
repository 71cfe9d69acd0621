//! An error as text: the operation, the cause, and what can be done.

use std::fmt;

use nccl_sys as sys;

use super::{Error, ErrorKind, Mark};
use crate::fault::ALONE;
use crate::threads;

impl Error {
    /// Returns what can be done about it, where that is known.
    #[doc(hidden)]
    pub fn hint(&self) -> Option<&str> {
        match &self.0.kind {
            _ if self.0.is_told => self.0.fault.as_ref()?.hint(),
            ErrorKind::Aborted { .. } => self.0.fault.as_ref()?.hint(),
            ErrorKind::TimedOut { .. } if self.is_of_one_rank() => Some(ALONE),
            ErrorKind::TimedOut { .. } => Some(
                "a rank that did not call the same operation, or whose process died, makes the \
                 others wait; look at the ranks that print nothing",
            ),
            ErrorKind::Queued { .. } => Some(
                "look at what the program put on that stream before the operation, and at what that waits \
                 for; where it may take so long, set a longer `queue_timeout`",
            ),
            ErrorKind::Busy { .. } => Some(
                "calls on one communicator take turns: try again, give it a longer timeout, or give each \
                 thread a communicator of its own",
            ),
            _ if self.is(Mark::NoThread) => Some(threads::FIX),
            ErrorKind::Nccl(failure) => match sys::ncclResult_t(failure.code) {
                sys::ncclResult_t::ncclRemoteError => Some(
                    "a peer's process exited or the network failed: this rank is a victim, look for \
                     the rank that failed first",
                ),
                sys::ncclResult_t::ncclSystemError | sys::ncclResult_t::ncclUnhandledCudaError => {
                    Some("run with NCCL_DEBUG=INFO to see the failing system or CUDA call")
                }
                _ => None,
            },
            _ => None,
        }
    }
}

impl Error {
    /// Returns whether the communicator has no other rank to wait for.
    fn is_of_one_rank(&self) -> bool {
        let operation = self.0.operation.as_ref();
        operation.is_some_and(|operation| operation.world_size == 1)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.say(f)?;
        match f.alternate() {
            true => write!(f, "\n  help:       {}", self.help()),
            false => Ok(()),
        }
    }
}

impl Error {
    fn say(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.0.operation, &self.0.fault) {
            (Some(operation), Some(fault)) => {
                write!(f, "nccl: {operation}")?;
                // What this rank saw itself, where that is more than all ranks report.
                let own = (!self.0.is_told).then_some(&self.0.kind);
                if let Some(seen) = own.or(self.0.seen.as_ref()) {
                    write!(f, "\n  seen here:  {seen}")?;
                }
                if let Some(beside) = &self.0.beside {
                    write!(f, "\n  also here:  {beside}")?;
                }
                write!(f, "\n{}", fault.explain())?;
                if let (None, Some(hint)) = (fault.hint(), self.hint()) {
                    write!(f, "\n  hint:       {hint}")?;
                }
                if let Some(also) = &self.0.also {
                    write!(f, "\n  left open:  {also}")?;
                }
                Ok(())
            }
            (Some(operation), None) => {
                write!(f, "nccl: {operation}\n  cause: {}", self.0.kind)?;
                if let Some(beside) = &self.0.beside {
                    write!(f, "\n  also:  {beside}")?;
                }
                if let Some(also) = &self.0.also {
                    write!(f, "\n  also:  {also}")?;
                }
                if let Some(hint) = self.hint() {
                    write!(f, "\n  hint:  {hint}")?;
                }
                Ok(())
            }
            (None, fault) => {
                match fault.as_ref().filter(|_| self.is_told()) {
                    Some(fault) => write!(f, "the communicator was aborted: {fault}")?,
                    None => write!(f, "{}", self.0.seen.as_ref().unwrap_or(&self.0.kind))?,
                }
                if let Some(beside) = &self.0.beside {
                    write!(f, "; {beside}")?;
                }
                if let Some(also) = &self.0.also {
                    write!(f, "; {also}")?;
                }
                if let Some(hint) = self.hint() {
                    write!(f, " ({hint})")?;
                }
                Ok(())
            }
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Error")
            .field("kind", &self.0.kind)
            .field("operation", &self.0.operation)
            .finish()
    }
}
