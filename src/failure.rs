//! Why a program ends early: one sentence for the person, one exit code for the script.

use std::fmt;
use std::process::ExitCode;

/// What kind of end it is, and with it the exit code.
///
/// From 3 on they are nccl-tests' codes; 2 is what command lines usually return for bad input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Something else went wrong, for instance a rank died.
    Failed = 1,
    /// The command line or the machine cannot give what was asked for.
    Usage = 2,
    /// NCCL or the CUDA driver failed.
    Nccl = 3,
    /// An operation did not finish in time.
    TimedOut = 4,
    /// Wrong elements arrived, or the bandwidth fell below `NCCL_TESTS_MIN_BW`.
    Wrong = 7,
    /// Nobody reads standard output any more: what a shell returns for a broken pipe.
    OutputClosed = 141,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// An end that is not the good one.
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

    /// Something was asked for that cannot be had; `sentence` says what and what would do.
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
