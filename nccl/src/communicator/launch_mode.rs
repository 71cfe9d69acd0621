//! How NCCL is asked to put work on a stream: the two arrangements, what each needs, and what in the
//! environment contradicts it.

use std::fmt;

use crate::error::{Error, ErrorKind, Result};
use crate::library::{Capability, Library};

/// How a communicator calls NCCL, and how a call that does not come back is ended.
///
/// The operations, deadlines and errors are the same in both; all ranks of a communicator have to choose
/// alike. A captured plan ([`Communicator::capture`](crate::Communicator::capture)) calls NCCL once, when it
/// is made, and costs the same in both: it is the fast path in either.
///
/// | | `NonBlocking` | `KillSwitch` |
/// |---|---|---|
/// | inside NCCL | one communicator, `blocking = 0` | a blocking one for the data, split from an idle non-blocking one that shares its abort flag |
/// | a call | puts its work on a thread of NCCL's, and is polled until that is done | does its work itself, and returns when that is done |
/// | what ends it | it looks at deadline and signals between polls | a thread of this crate's aborts the idle communicator, whose flag the call looks at |
/// | costs | a thread of NCCL's for every group | memory and start-up time of a second communicator, until the end |
/// | covered by NCCL's documentation | yes | each call is, their combination is not |
/// | needs NCCL | ≥ 2.18.1 | ≥ 2.26.2 |
///
/// Choose `NonBlocking`, the default, unless the host's time per group matters, plans cannot be used, and it
/// was measured to be less with `KillSwitch` on the machine in question.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # nccl_emulator::install_unless_gpu()?;
/// # let stream = cudarc::driver::CudaContext::new(0)?.new_stream()?;
/// use nccl::LaunchMode;
///
/// let world = nccl::World::threads(1).remove(0);
/// let comm = world
///     .communicator("demo")
///     .stream(&stream)
///     .launch_mode(LaunchMode::KillSwitch)
///     .build()?;
/// assert_eq!(comm.launch_mode(), Some(LaunchMode::KillSwitch));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LaunchMode {
    /// One communicator whose calls return at once; the only arrangement that NCCL's documentation covers.
    ///
    /// NCCL starts and joins a thread for every group, which takes tens of microseconds of the host's time.
    #[default]
    NonBlocking,
    /// A blocking communicator for the data, and beside it an idle one that only shares its abort flag.
    ///
    /// A call works in the thread that makes it, without polling. When its limit passes, or the
    /// communicator is aborted, the idle communicator is aborted first: that raises the flag at which NCCL
    /// looks wherever it waits. Only when no thread is inside any more is the other one aborted, because NCCL
    /// frees a blocking communicator under a thread that is inside it. A call that does not come back all the
    /// same, because NCCL does not look at the flag there, cannot be given up as a poll can: the process ends
    /// after the abort limit, with a sentence on stderr.
    KillSwitch,
}

impl LaunchMode {
    /// For messages between ranks.
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::NonBlocking => 0,
            Self::KillSwitch => 1,
        }
    }

    pub(crate) fn of_code(code: u8) -> Option<Self> {
        match code {
            0 => Some(Self::NonBlocking),
            1 => Some(Self::KillSwitch),
            _ => None,
        }
    }

    /// # Errors
    /// [`ErrorKind::Unsupported`] when the library cannot keep the promise of this mode.
    pub(super) fn admit(self, library: &Library) -> Result<()> {
        match self {
            Self::KillSwitch if !library.has(Capability::KillSwitch) => Err(library.unsupported(
                String::from("launch mode KillSwitch"),
                Capability::KillSwitch.since(),
            )),
            _ => Ok(()),
        }
    }

    /// NCCL's environment beats its configuration: refuses what contradicts how this mode uses NCCL.
    ///
    /// NCCL's files of settings are not looked at here, but by the checks of all ranks before a start; and
    /// once NCCL has read them, what they set is found here as well.
    pub(super) fn refuse_contradictions(self) -> Result<()> {
        for (variable, field) in [
            ("NCCL_COMM_BLOCKING", "blocking"),
            ("NCCL_COMM_SPLIT_SHARE_RESOURCES", "splitShare"),
        ] {
            if let Ok(value) = std::env::var(variable)
                && let Some(does) = self.contradiction_of(variable, &value)
            {
                return Err(Error::new(ErrorKind::InvalidConfig {
                    field,
                    reason: format!(
                        "{variable}={value} in the environment {does}; unset {variable}"
                    ),
                }));
            }
        }
        Ok(())
    }

    /// What a variable with this text does that this mode cannot work with.
    pub(crate) fn contradiction_of(self, variable: &str, value: &str) -> Option<&'static str> {
        self.contradiction(variable, integer(value))
    }

    fn contradiction(self, variable: &str, value: Option<i64>) -> Option<&'static str> {
        match (self, variable, value?) {
            (Self::NonBlocking, "NCCL_COMM_BLOCKING", 1) => {
                Some("makes NCCL's calls block, so that no deadline could end them")
            }
            (Self::KillSwitch, "NCCL_COMM_BLOCKING", 1) => Some(
                "makes the idle communicator of launch mode KillSwitch block as well, so that no deadline \
                 could end its calls",
            ),
            (Self::KillSwitch, "NCCL_COMM_BLOCKING", 0) => Some(
                "makes the communicator for the data of launch mode KillSwitch not block, so that it would \
                 not be what was asked for",
            ),
            (_, "NCCL_COMM_SPLIT_SHARE_RESOURCES", 1) => Some(
                "makes communicators that are split from each other end together: an abort of one is an \
                 abort of all",
            ),
            (Self::KillSwitch, "NCCL_COMM_SPLIT_SHARE_RESOURCES", 0) => Some(
                "takes from the idle communicator of launch mode KillSwitch the abort flag that it is there \
                 to share, so that nothing could end a call",
            ),
            _ => None,
        }
    }
}

impl fmt::Display for LaunchMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NonBlocking => "NonBlocking",
            Self::KillSwitch => "KillSwitch",
        })
    }
}

/// What NCCL takes this text for: it reads numbers like C does, decimal, `0x…` or with a leading 0 octal,
/// stops at the first character that is none, and takes what does not begin with a number for 0. An empty
/// text is as good as none.
fn integer(text: &str) -> Option<i64> {
    if text.is_empty() {
        return None;
    }
    Some(crate::preflight::number(text).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_recognized_however_it_is_written() {
        for text in ["1", " 1", "+1", "01", "0x1", "0X01", "1 ", "1,"] {
            assert_eq!(integer(text), Some(1), "{text:?}");
        }
        for text in ["0", "-0", "yes", "0x", "x1", "00"] {
            assert_eq!(integer(text), Some(0), "{text:?}");
        }
        for text in ["-1", "10", "0x10", "11"] {
            assert!(integer(text).is_some_and(|value| value != 0 && value != 1));
        }
        assert_eq!(integer(""), None);
    }

    #[test]
    fn each_mode_refuses_what_contradicts_it_and_nothing_else() {
        use LaunchMode::{KillSwitch, NonBlocking};
        const BLOCKING: &str = "NCCL_COMM_BLOCKING";
        const SHARING: &str = "NCCL_COMM_SPLIT_SHARE_RESOURCES";
        for (mode, variable, value, refused) in [
            (NonBlocking, BLOCKING, 0, false),
            (NonBlocking, BLOCKING, 1, true),
            (NonBlocking, SHARING, 0, false),
            (NonBlocking, SHARING, 1, true),
            (KillSwitch, BLOCKING, 0, true),
            (KillSwitch, BLOCKING, 1, true),
            (KillSwitch, SHARING, 0, true),
            (KillSwitch, SHARING, 1, true),
            // NCCL leaves out values that make no sense.
            (KillSwitch, BLOCKING, 7, false),
            (KillSwitch, SHARING, -1, false),
            (NonBlocking, "NCCL_DEBUG", 1, false),
        ] {
            let found = mode.contradiction(variable, Some(value));
            assert_eq!(found.is_some(), refused, "{mode} {variable}={value}");
        }
        for mode in [NonBlocking, KillSwitch] {
            assert_eq!(LaunchMode::of_code(mode.code()), Some(mode));
        }
    }
}
