//! Why a communicator was ended: the cause that all of its ranks return.
//!
//! - `value`: where the fault began, and what it was; `cause`, `operation`: parts of it;
//! - `diagnosis`: the root cause before it is assigned to a rank, and how it becomes a fault;
//! - `text`: the fault as text; `wire`: the fault between processes.

pub mod cause;
mod diagnosis;
mod operation;
mod text;
mod value;
mod wire;

#[cfg(test)]
mod tests;

pub use self::cause::{
    Ending, FaultRole, MismatchField, MismatchSide, PastEvent, RootCause, Waiting,
};
#[doc(hidden)]
pub use self::diagnosis::{Cause, FaultSite};
#[doc(hidden)]
pub use self::operation::FaultOperation;
#[doc(hidden)]
pub use self::value::{ALONE, NOT_COLLECTED};
pub use self::value::{Fault, FaultClass};
pub use crate::roster::{Roster, short_key};
