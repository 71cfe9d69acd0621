//! Why a communicator is ended before its time.

use std::sync::Arc;

use nccl_base::fault::{Cause, Fault};

use crate::error::Error;

/// Why a communicator is ended before its time.
#[derive(Debug)]
pub(crate) enum Why<'w> {
    /// For a reason of this rank, which the others are told.
    Own(Box<Cause>),
    /// Because of what another rank told, or because it is gone.
    Told(&'w Arc<Fault>),
    /// Because this rank is done with it: what the others do goes on without it, or not.
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
