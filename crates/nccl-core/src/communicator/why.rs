//! The reason for an early end.

use std::sync::Arc;

use nccl_base::fault::{Cause, Fault};

use crate::error::Error;

/// Why a communicator is ended before its time.
#[derive(Debug)]
pub(crate) enum Why<'w> {
    /// A cause on this rank, which the other ranks are told.
    Own(Box<Cause>),
    /// A fault that another rank reported, or the loss of another rank.
    Told(&'w Arc<Fault>),
    /// This rank is done with it; the other ranks are not told.
    Quietly(&'static str),
}

impl Why<'_> {
    pub(crate) fn own(cause: Cause) -> Self {
        Self::Own(Box::new(cause))
    }
}

impl From<&str> for Why<'_> {
    fn from(reason: &str) -> Self {
        Self::own(Cause::asked(reason))
    }
}

impl From<&Error> for Why<'_> {
    fn from(error: &Error) -> Self {
        Self::own(error.into())
    }
}

impl<'w> From<&'w Arc<Fault>> for Why<'w> {
    fn from(fault: &'w Arc<Fault>) -> Self {
        Self::Told(fault)
    }
}
