//! Why a program ends early: one sentence for the user, one exit code for scripts.

use std::fmt;
use std::process::ExitCode;

/// The kind of a failure, which decides the exit code.
///
/// From 3 on they are nccl-tests' codes; 2 is what command lines usually return for bad input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Another failure, for instance the death of a rank.
    Failed = 1,
    /// The command line or the machine cannot give what was asked for.
    Usage = 2,
    /// NCCL or the CUDA driver failed.
    Nccl = 3,
    /// An operation did not finish in time.
    TimedOut = 4,
    /// Wrong elements arrived, or the bandwidth fell below `NCCL_TESTS_MIN_BW`.
    Wrong = 7,
    /// Standard output has no reader any more: the code that a shell returns for a broken pipe.
    OutputClosed = 141,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// A failure of the program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    exit: Exit,
    message: String,
}

impl Failure {
    /// A failure of the given kind.
    #[must_use]
    pub fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self {
            exit,
            message: message.into(),
        }
    }

    /// A failure of input that cannot be satisfied; `sentence` names it and what would be accepted.
    #[must_use]
    pub fn usage(sentence: impl Into<String>) -> Self {
        Self::new(Exit::Usage, sentence)
    }

    /// The kind of end.
    #[must_use]
    pub fn exit(&self) -> Exit {
        self.exit
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}
