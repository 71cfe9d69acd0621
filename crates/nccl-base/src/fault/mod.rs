//! Why a communicator was ended: the cause that all of its ranks return.
//!
//! - `value`: where it began, and what it was; `cause`, `operation`: parts of it;
//! - `diagnosis`: what was at the root, before it is known whose it is, and how it becomes a fault;
//! - `text`: how it reads; `wire`: how it travels.

pub mod cause;
mod diagnosis;
mod operation;
mod text;
mod value;
mod wire;

#[cfg(test)]
mod tests;

pub use self::cause::{Differs, Earlier, Ending, FaultRole, RootCause, Side, Waiting};
#[doc(hidden)]
pub use self::diagnosis::{Cause, Place};
#[doc(hidden)]
pub use self::operation::FaultOperation;
#[doc(hidden)]
pub use self::value::{ALONE, NOT_COLLECTED};
pub use self::value::{Fault, FaultClass};
pub use crate::roster::{Roster, short_key};
