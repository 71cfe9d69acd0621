//! The algorithms of an all-to-all.

use std::fmt;
use std::num::NonZeroUsize;
use std::str::FromStr;

/// The algorithm of an all-to-all.
///
/// Its text form is used in benchmarks: `auto`, `native`, `grouped`, `chunked:4`, `pairwise:2`, `two-level`, `copy-engine`;
/// without a number there are 4 pieces and 1 peer.
///
/// ```
/// use nccl::all_to_all::AllToAllAlgorithm;
///
/// assert_eq!(AllToAllAlgorithm::default(), AllToAllAlgorithm::Auto);
/// let pairwise: AllToAllAlgorithm = "pairwise:2".parse()?;
/// assert_eq!(pairwise.to_string(), "pairwise:2");
/// # Ok::<(), nccl::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Algorithm {
    /// In a plan ([`AllToAll`](crate::AllToAll)), the fastest algorithm by the cost model. In a single call,
    /// `ncclAlltoAll` if the release has it, otherwise grouped messages.
    #[default]
    Auto,
    /// `ncclAlltoAll` (NCCL ≥ 2.28.3): equal parts only.
    Native,
    /// One message to and one from every rank, in one group.
    Grouped,
    /// Every part is sent in several pieces, with one group for each piece of all parts. Later work can begin on the
    /// first pieces, and each group uses NCCL's buffers for a shorter time.
    Chunked {
        /// The number of pieces.
        pieces: NonZeroUsize,
    },
    /// Groups of a few peers, so that a rank receives from fewer peers at a time.
    Pairwise {
        /// The number of peers in a group.
        width: NonZeroUsize,
    },
    /// First exchanges inside the nodes, then sends one message to each other node; for many nodes and small parts.
    /// Available only in a plan, which allocates the memory for it.
    TwoLevel,
    /// `ncclAlltoAll` with the copy engines, without multiprocessors; for buffers in symmetric windows of a communicator
    /// whose policy is [`CtaPolicy::Zero`](crate::CtaPolicy::Zero).
    CopyEngine,
}

/// The defaults for a text without a number.
const PIECES: NonZeroUsize = NonZeroUsize::MIN.saturating_add(3);
const WIDTH: NonZeroUsize = NonZeroUsize::MIN;

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Native => f.write_str("native"),
            Self::Grouped => f.write_str("grouped"),
            Self::Chunked { pieces } => write!(f, "chunked:{pieces}"),
            Self::Pairwise { width } => write!(f, "pairwise:{width}"),
            Self::TwoLevel => f.write_str("two-level"),
            Self::CopyEngine => f.write_str("copy-engine"),
        }
    }
}

impl FromStr for Algorithm {
    type Err = crate::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (name, number) = match text.split_once(':') {
            Some((name, number)) => (name, Some(number)),
            None => (text, None),
        };
        let number_or = |default: NonZeroUsize| match number {
            None => Ok(default),
            Some(number) => number.parse().map_err(|_| unknown(text)),
        };
        let algorithm = match name {
            "chunked" => {
                return Ok(Self::Chunked {
                    pieces: number_or(PIECES)?,
                });
            }
            "pairwise" => {
                return Ok(Self::Pairwise {
                    width: number_or(WIDTH)?,
                });
            }
            "auto" => Self::Auto,
            "native" => Self::Native,
            "grouped" => Self::Grouped,
            "two-level" => Self::TwoLevel,
            "copy-engine" => Self::CopyEngine,
            _ => return Err(unknown(text)),
        };
        match number {
            None => Ok(algorithm),
            Some(_) => Err(unknown(text)),
        }
    }
}

fn unknown(text: &str) -> crate::Error {
    crate::error::Error::new(crate::error::ErrorKind::InvalidConfig {
        field: "algorithm",
        reason: format!(
            "{text:?} is none: auto, native, grouped, chunked:PIECES, pairwise:PEERS, two-level or copy-engine"
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_algorithm_has_a_text_and_nothing_else_is_one() {
        for text in [
            "auto",
            "native",
            "grouped",
            "chunked:3",
            "pairwise:1",
            "two-level",
            "copy-engine",
        ] {
            let algorithm: Algorithm = text.parse().unwrap();
            assert_eq!(algorithm.to_string(), text);
        }
        assert_eq!(
            "chunked".parse::<Algorithm>().unwrap().to_string(),
            "chunked:4"
        );
        for text in [
            "",
            "Native",
            "native:2",
            "chunked:0",
            "chunked:",
            "pairwise:-1",
        ] {
            let error = text.parse::<Algorithm>().unwrap_err();
            assert!(error.to_string().contains("none: auto, native"), "{error}");
        }
    }
}
