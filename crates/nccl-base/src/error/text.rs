//! An error as text: the operation, the cause, and the remedy.

use std::fmt;

use nccl_sys as sys;

use super::{Error, ErrorKind, ErrorProperty};
use crate::fault::ALONE;
use crate::threads;

impl Error {
    /// Returns the remedy, if known.
    #[doc(hidden)]
    pub fn hint(&self) -> Option<&str> {
        match &self.0.kind {
            _ if self.0.kind_is_of_fault => self.0.fault.as_ref()?.hint(),
            ErrorKind::Aborted { .. } => self.0.fault.as_ref()?.hint(),
            ErrorKind::TimedOut { .. } if self.is_of_one_rank() => Some(ALONE),
            ErrorKind::TimedOut { .. } => Some(
                "a rank that did not call the same operation, or whose process died, makes the \
                 others wait; look at the ranks that print nothing",
            ),
            ErrorKind::Queued { .. } => Some(
                "look at what the program put on that stream before the operation, and at what that waits \
                 for; where it may take so long, set a longer `Timeouts::queue`",
            ),
            ErrorKind::Busy { .. } => Some(
                "calls on one communicator take turns: try again, give it a longer timeout, or give each \
                 thread a communicator of its own",
            ),
            _ if self.is(ErrorProperty::NoThread) => Some(threads::FIX),
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
    /// Prints one line; with `{:#}` all that is known, one line for each part.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !f.alternate() {
            return self.in_one_line(f);
        }
        self.in_full(f)?;
        write!(f, "\n  help:       {}", self.help())
    }
}

impl Error {
    /// Returns what this rank observed itself, if that is more than all ranks report.
    fn own_view(&self) -> Option<&ErrorKind> {
        let own = (!self.0.kind_is_of_fault).then_some(&self.0.kind);
        own.or(self.0.seen.as_ref())
    }

    fn in_one_line(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (operation, fault) = (&self.0.operation, &self.0.fault);
        let Some(operation) = operation else {
            return self.outside_of_operations(f);
        };
        write!(f, "nccl: {operation}: ")?;
        match (fault, self.own_view()) {
            (Some(fault), Some(seen)) => write!(f, "{seen}; root cause: {fault:#}")?,
            (Some(fault), None) => write!(f, "root cause: {fault:#}")?,
            (None, _) => write!(f, "{}", self.0.kind)?,
        }
        match &self.0.beside {
            Some(beside) => write!(f, "; also here: {beside}"),
            None => Ok(()),
        }
    }

    fn in_full(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(operation) = &self.0.operation else {
            return self.outside_of_operations(f);
        };
        write!(f, "nccl: {operation}")?;
        let label = match &self.0.fault {
            Some(fault) => {
                if let Some(seen) = self.own_view() {
                    write!(f, "\n  seen here:  {seen:#}")?;
                }
                if let Some(beside) = &self.0.beside {
                    write!(f, "\n  also here:  {beside}")?;
                }
                write!(f, "\n{}", fault.explain())?;
                "left open: "
            }
            None => {
                write!(f, "\n  cause:      {:#}", self.0.kind)?;
                if let Some(beside) = &self.0.beside {
                    write!(f, "\n  also:       {beside}")?;
                }
                "also:      "
            }
        };
        let has_hint = self
            .0
            .fault
            .as_ref()
            .is_some_and(|fault| fault.hint().is_some());
        if let (false, Some(hint)) = (has_hint, self.hint()) {
            write!(f, "\n  hint:       {hint}")?;
        }
        if let Some(text) = &self.0.unconfirmed {
            write!(f, "\n  {label} {text}")?;
        }
        Ok(())
    }

    /// Prints an error without an operation: its text, the second cause, and a hint.
    fn outside_of_operations(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.fault.as_ref().filter(|_| self.kind_is_of_fault()) {
            Some(fault) => write!(f, "the communicator was aborted: {fault}")?,
            // With the formatter's flags, because some kinds have one line for each finding.
            None => fmt::Display::fmt(self.0.seen.as_ref().unwrap_or(&self.0.kind), f)?,
        }
        if let Some(beside) = &self.0.beside {
            write!(f, "; {beside}")?;
        }
        if let Some(unconfirmed) = &self.0.unconfirmed {
            write!(f, "; {unconfirmed}")?;
        }
        if let Some(hint) = self.hint() {
            write!(f, " ({hint})")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    /// Prints the same as `{:#}`, for `unwrap` and for a `main` that returns the error; `{:#?}` prints the fields.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !f.alternate() {
            return write!(f, "{self:#}");
        }
        f.debug_struct("Error")
            .field("kind", &self.0.kind)
            .field("operation", &self.0.operation)
            .finish()
    }
}
