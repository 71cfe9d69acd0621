//! How a process ended, in words and numbers.

pub use nccl_base::signal::Signal;
use std::fmt;
use std::process::ExitStatus;

use std::os::unix::process::ExitStatusExt;

/// How a process ended.
///
/// ```
/// use nccl::launch::{Exit, Signal};
///
/// let exit = Exit::Signal { signal: Signal::SEGV, core_dumped: true };
/// assert_eq!(exit.to_string(), "killed by SIGSEGV (core dumped)");
/// assert_eq!((exit.code(), exit.is_success()), (139, false));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Exit {
    /// It returned this exit code.
    Code(i32),
    /// A signal ended it.
    Signal {
        /// Which one.
        signal: Signal,
        /// Whether the kernel wrote a core dump, or handed one to a program for that.
        core_dumped: bool,
    },
    /// Other code of this process took its exit status, or lets the kernel drop it (`SIGCHLD` ignored).
    Unknown,
}

impl Exit {
    /// Whether it returned 0.
    ///
    /// ```
    /// # use nccl::launch::Exit;
    /// assert!(Exit::Code(0).is_success() && !Exit::Unknown.is_success());
    /// ```
    #[must_use]
    pub fn is_success(&self) -> bool {
        *self == Self::Code(0)
    }

    /// What a shell returns for it: the exit code, or 128 and the signal.
    ///
    /// ```
    /// assert_eq!(nccl::launch::Exit::Code(3).code(), 3);
    /// ```
    #[must_use]
    pub fn code(&self) -> u8 {
        match *self {
            Self::Code(code) => u8::try_from(code).unwrap_or(1),
            Self::Signal { signal, .. } => signal.exit_code(),
            Self::Unknown => 1,
        }
    }

    /// The signal that ended it.
    ///
    /// ```
    /// assert_eq!(nccl::launch::Exit::Code(3).signal(), None);
    /// ```
    #[must_use]
    pub fn signal(&self) -> Option<Signal> {
        match *self {
            Self::Signal { signal, .. } => Some(signal),
            _ => None,
        }
    }
}

impl From<ExitStatus> for Exit {
    fn from(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Code(code),
            (None, Some(signal)) => Self::Signal {
                signal: Signal::new(signal),
                core_dumped: status.core_dumped(),
            },
            (None, None) => Self::Unknown,
        }
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exit code {code}"),
            Self::Signal {
                signal,
                core_dumped,
            } => {
                write!(f, "killed by {signal}")?;
                if *core_dumped {
                    f.write_str(" (core dumped)")?;
                }
                Ok(())
            }
            Self::Unknown => f.write_str(
                "exit status unknown (other code of the process that started it took it away)",
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exit_status_is_read_as_a_shell_reads_it() {
        for (raw, text, code) in [
            (0, "exit code 0", 0),
            (3 << 8, "exit code 3", 3),
            (9, "killed by SIGKILL", 137),
            (11 | 0x80, "killed by SIGSEGV (core dumped)", 139),
            (40, "killed by signal 40", 168),
        ] {
            let exit = Exit::from(ExitStatus::from_raw(raw));
            assert_eq!((exit.to_string().as_str(), exit.code()), (text, code));
            assert_eq!(exit.is_success(), raw == 0);
        }
        assert_eq!(Exit::Unknown.code(), 1);
    }

    #[test]
    fn signals_have_names_both_ways() {
        assert_eq!(Signal::named("SIGTERM"), Some(Signal::TERM));
        assert_eq!(Signal::named("Quit"), Some(Signal::QUIT));
        assert_eq!(Signal::named("SIG"), None);
        assert_eq!(Signal::named("nope"), None);
        assert_eq!(Signal::USR2.to_string(), "SIGUSR2");
        assert!(Signal::new(999).raw().is_none());
    }
}
