//! Where faults sit, and what they do there.

use std::fmt;
use std::time::Duration;

/// Where a fault sits.
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

/// What it does there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    Delay(Duration),
    Hang,
    Stall,
    Fail(u32),
    Kill,
}
