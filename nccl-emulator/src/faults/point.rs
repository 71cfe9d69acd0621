//! The place and the action of a fault.

use std::fmt;
use std::time::Duration;

/// The place of a fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Point {
    Call(String),
    /// `None`: any operation.
    Operation(Option<String>),
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Call(function) => f.write_str(function),
            Self::Operation(None) => f.write_str("any operation"),
            Self::Operation(Some(name)) => write!(f, "the operation {name}"),
        }
    }
}

/// The action of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    Delay(Duration),
    Hang,
    Stall,
    Fail(u32),
    Kill,
}
