//! The reason for an early end.

use std::sync::Arc;

use nccl_base::fault::{Cause, Fault};

use crate::error::Error;

/// Why a communicator is ended early.
#[derive(Debug)]
pub(crate) enum EndReason<'w> {
    /// A cause on this rank, which is announced to the other ranks.
    OwnCause(Box<Cause>),
    /// A fault that another rank reported, or the loss of another rank.
    ReportedFault(&'w Arc<Fault>),
    /// This rank does not need the communicator any more; nothing is announced to the other ranks.
    Unannounced(&'static str),
}

impl EndReason<'_> {
    pub(crate) fn own(cause: Cause) -> Self {
        Self::OwnCause(Box::new(cause))
    }
}

impl From<&str> for EndReason<'_> {
    fn from(reason: &str) -> Self {
        Self::own(Cause::asked(reason))
    }
}

impl From<&Error> for EndReason<'_> {
    fn from(error: &Error) -> Self {
        Self::own(error.into())
    }
}

impl<'w> From<&'w Arc<Fault>> for EndReason<'w> {
    fn from(fault: &'w Arc<Fault>) -> Self {
        Self::ReportedFault(fault)
    }
}
