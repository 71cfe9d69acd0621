//! How NCCL is called to put work on a stream: the two arrangements, which environment variables contradict each, and how ranks
//! agree on one.

use std::fmt;

use crate::system::variables::number;

/// How a communicator calls NCCL, and how a call that does not return is ended.
///
/// The operations, timeouts and errors are the same in both; all ranks of a communicator use the same. A captured
/// plan (`Communicator::capture`) calls NCCL once, when it is made.
///
/// | | `BlockingChild` | `NonBlocking` |
/// |---|---|---|
/// | inside NCCL | a blocking communicator, split from an idle one with the same abort flag | one communicator, `blocking = 0` |
/// | a call | works in the calling thread, and returns when that is done | works in a thread of NCCL's, and is polled until done |
/// | what ends it | a thread of this crate aborts the idle parent, whose flag the call checks | deadline and signals, between polls |
/// | costs | memory and start-up time of a second communicator | a thread of NCCL's for every group |
/// | covered by NCCL's documentation | each call is, their combination is not | yes |
/// | needs NCCL | ≥ 2.26.2 | ≥ 2.18.1 |
///
/// Unless a mode is set (`CommunicatorBuilder::launch_mode`,
/// `World::with_launch_mode`, or the variable `NCCL_RUN_LAUNCH_MODE=blocking-child` or
/// `non-blocking` where the program sets none), the ranks agree on `BlockingChild` where the library of every rank can
/// do that and no variable of NCCL's contradicts it, and on `NonBlocking` otherwise. On NCCL 2.32.3 a grouped exchange
/// of 8 bytes between processes took 98 µs of host time in `NonBlocking` and 4 µs in `BlockingChild`, the medians of
/// `docs/results/host_costs.md`. Ranks with different releases have to leave out the checks before the start
/// (`CommunicatorBuilder::preflight`), which refuse that.
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
///     .with(|comm| comm.launch_mode = Some(LaunchMode::NonBlocking))
///     .build()?;
/// assert_eq!(comm.launch_mode(), Some(LaunchMode::NonBlocking));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LaunchMode {
    /// One communicator whose calls return at once; the only arrangement that NCCL's documentation covers.
    ///
    /// NCCL starts and joins a thread for every group, which takes tens of microseconds of the host's time.
    NonBlocking,
    /// A blocking communicator for the data, split from an idle parent that shares its abort flag; used where all
    /// ranks support it and no other mode is set.
    ///
    /// A call works in the thread that makes it, without polling. When its timeout passes, or the
    /// communicator is aborted, the idle parent is aborted first: that raises the flag, which NCCL
    /// checks wherever it waits. Only when no thread is inside any more is the child aborted, because NCCL
    /// frees a blocking communicator under a thread that is inside it. A call that does not return all the
    /// same, because NCCL does not check the flag there, cannot be given up as a poll can: the process ends
    /// after the abort timeout, with a sentence on stderr.
    BlockingChild,
}

impl LaunchMode {
    /// Returns how this value of the variable contradicts the mode; `None` if it does not.
    #[doc(hidden)]
    pub fn contradiction_of(self, variable: &str, value: &str) -> Option<&'static str> {
        self.contradiction(variable, integer(value))
    }

    fn contradiction(self, variable: &str, value: Option<i64>) -> Option<&'static str> {
        match (self, variable, value?) {
            (Self::NonBlocking, "NCCL_COMM_BLOCKING", 1) => {
                Some("makes NCCL's calls block, so that no deadline could end them")
            }
            (Self::BlockingChild, "NCCL_COMM_BLOCKING", 1) => Some(
                "makes the idle communicator of launch mode BlockingChild block as well, so that no deadline \
                 could end its calls",
            ),
            (Self::BlockingChild, "NCCL_COMM_BLOCKING", 0) => Some(
                "makes the communicator for the data of launch mode BlockingChild not block, so that it would \
                 not be what was asked for",
            ),
            (_, "NCCL_COMM_SPLIT_SHARE_RESOURCES", 1) => Some(
                "makes communicators that are split from each other end together: an abort of one is an \
                 abort of all",
            ),
            (Self::BlockingChild, "NCCL_COMM_SPLIT_SHARE_RESOURCES", 0) => Some(
                "takes from the idle communicator of launch mode BlockingChild the abort flag that it is there \
                 to share, so that nothing could end a call",
            ),
            _ => None,
        }
    }
}

/// The suffix of NCCL's name for the idle parent of `BlockingChild`; the communicator's name is in front of it.
#[doc(hidden)]
pub const IDLE_PARENT: &str = " (idle parent)";

/// One rank's part in the choice of the mode, as sent between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub enum LaunchPreference {
    /// The program asked for it, or `NCCL_RUN_LAUNCH_MODE`.
    Asked(LaunchMode),
    /// No mode was asked for, and this rank supports both.
    Either,
    /// No mode was asked for, and this rank does not support `BlockingChild`.
    OnlyNonBlocking,
}

impl LaunchPreference {
    /// Returns the code for messages between ranks.
    #[doc(hidden)]
    pub fn code(self) -> u8 {
        match self {
            Self::Asked(LaunchMode::NonBlocking) => 0,
            Self::Asked(LaunchMode::BlockingChild) => 1,
            Self::Either => 2,
            Self::OnlyNonBlocking => 3,
        }
    }

    #[doc(hidden)]
    pub fn of_code(code: u8) -> Option<Self> {
        match code {
            0 => Some(Self::Asked(LaunchMode::NonBlocking)),
            1 => Some(Self::Asked(LaunchMode::BlockingChild)),
            2 => Some(Self::Either),
            3 => Some(Self::OnlyNonBlocking),
            _ => None,
        }
    }

    /// Returns the mode for a communicator without other ranks.
    #[doc(hidden)]
    pub fn alone(self) -> LaunchMode {
        match self {
            Self::Asked(mode) => mode,
            Self::Either => LaunchMode::BlockingChild,
            Self::OnlyNonBlocking => LaunchMode::NonBlocking,
        }
    }

    /// Returns whether a rank with this preference can use `mode`.
    fn admits(self, mode: LaunchMode) -> bool {
        match self {
            Self::Asked(asked) => asked == mode,
            Self::Either => true,
            Self::OnlyNonBlocking => mode == LaunchMode::NonBlocking,
        }
    }

    /// Returns the mode of each rank if they do not agree: the requested mode, if the rank can use it.
    #[doc(hidden)]
    pub fn modes(wishes: &[Option<Self>]) -> Vec<Option<LaunchMode>> {
        let asked = Self::agree(wishes).unwrap_or_else(|(mode, _)| mode);
        let mode_of = |wish: Self| match wish.admits(asked) {
            true => asked,
            false => wish.alone(),
        };
        wishes.iter().map(|wish| wish.map(mode_of)).collect()
    }

    /// Returns the mode that all ranks with these preferences use.
    ///
    /// # Errors
    /// The requested mode, and the first rank that cannot use it.
    #[doc(hidden)]
    pub fn agree(wishes: &[Option<Self>]) -> std::result::Result<LaunchMode, (LaunchMode, usize)> {
        let asked = wishes.iter().flatten().find_map(|wish| match wish {
            Self::Asked(mode) => Some(*mode),
            _ => None,
        });
        let all_can = || wishes.iter().all(|wish| *wish == Some(Self::Either));
        let mode = asked.unwrap_or(match all_can() {
            true => LaunchMode::BlockingChild,
            false => LaunchMode::NonBlocking,
        });
        let odd = wishes
            .iter()
            .position(|wish| !wish.is_some_and(|wish| wish.admits(mode)));
        odd.map_or(Ok(mode), |rank| Err((mode, rank)))
    }
}

impl fmt::Display for LaunchMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NonBlocking => "NonBlocking",
            Self::BlockingChild => "BlockingChild",
        })
    }
}

/// Returns NCCL's value of this text: NCCL reads numbers like C does, decimal, `0x…` or with a leading 0 octal,
/// stops at the first character that is no digit, and takes a text that does not begin with a number for 0. An empty
/// text counts as unset.
fn integer(text: &str) -> Option<i64> {
    if text.is_empty() {
        return None;
    }
    Some(number(text).unwrap_or(0))
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
        use LaunchMode::{BlockingChild, NonBlocking};
        const BLOCKING: &str = "NCCL_COMM_BLOCKING";
        const SHARING: &str = "NCCL_COMM_SPLIT_SHARE_RESOURCES";
        for (mode, variable, value, refused) in [
            (NonBlocking, BLOCKING, 0, false),
            (NonBlocking, BLOCKING, 1, true),
            (NonBlocking, SHARING, 0, false),
            (NonBlocking, SHARING, 1, true),
            (BlockingChild, BLOCKING, 0, true),
            (BlockingChild, BLOCKING, 1, true),
            (BlockingChild, SHARING, 0, true),
            (BlockingChild, SHARING, 1, true),
            // NCCL ignores values out of range.
            (BlockingChild, BLOCKING, 7, false),
            (BlockingChild, SHARING, -1, false),
            (NonBlocking, "NCCL_DEBUG", 1, false),
        ] {
            let found = mode.contradiction(variable, Some(value));
            assert_eq!(found.is_some(), refused, "{mode} {variable}={value}");
        }
    }

    #[test]
    fn the_ranks_agree_on_what_was_asked_for_and_else_on_what_all_can() {
        use LaunchMode::{BlockingChild, NonBlocking};
        use LaunchPreference::{Asked, Either, OnlyNonBlocking};
        for (wishes, agreed) in [
            (&[Either, Either][..], Ok(BlockingChild)),
            (&[Either, OnlyNonBlocking], Ok(NonBlocking)),
            (&[Either, Asked(NonBlocking)], Ok(NonBlocking)),
            (&[OnlyNonBlocking, Asked(NonBlocking)], Ok(NonBlocking)),
            (&[Either, Asked(BlockingChild)], Ok(BlockingChild)),
            (
                &[OnlyNonBlocking, Asked(BlockingChild)],
                Err((BlockingChild, 0)),
            ),
            (
                &[Asked(NonBlocking), Either, Asked(BlockingChild)],
                Err((NonBlocking, 2)),
            ),
        ] {
            let sent: Vec<_> = wishes
                .iter()
                .map(|wish| LaunchPreference::of_code(wish.code()))
                .collect();
            assert_eq!(LaunchPreference::agree(&sent), agreed, "{wishes:?}");
        }
        assert_eq!(
            LaunchPreference::agree(&[Some(Either), None]),
            Err((NonBlocking, 1))
        );
        for wish in [
            Either,
            OnlyNonBlocking,
            Asked(NonBlocking),
            Asked(BlockingChild),
        ] {
            assert!(wish.admits(wish.alone()));
        }
    }
}
