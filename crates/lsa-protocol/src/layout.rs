//! The positions of flags and slots in a window.
//!
//! ```text
//! 0                       flags   [2][ranks]  FLAG_BYTES each, so that no two share a line of the cache; in each, behind
//!                                             the flag, the size of the block
//! behind them             failed              how the first exchange failed that did; of this rank alone
//! next multiple of 4096   slots   [2][ranks]  capacity bytes each
//! ```
//!
//! The first index is the buffer of the epoch, the second the rank that writes.

use std::error::Error;
use std::fmt;

/// The distance between two flags in bytes. A flag is a `u32` at its start; [`Layout::size_offset`] is in it as well.
///
/// ```
/// assert_eq!(lsa_protocol::FLAG_BYTES, 64);
/// ```
pub const FLAG_BYTES: u64 = 64;

/// The capacity of a slot is a multiple of this many bytes, the most that a thread moves at once.
///
/// ```
/// assert_eq!(lsa_protocol::SLOT_ALIGNMENT, 16);
/// ```
pub const SLOT_ALIGNMENT: u64 = 16;

/// The slots begin at a multiple of this.
const DATA_ALIGNMENT: u64 = 4096;

/// The maximum number of ranks: the kernel has a block for each, and a grid is not larger.
const MOST_RANKS: u32 = i32::MAX.cast_unsigned();

/// The positions of the flags and slots of a window, in bytes from its start; the same on all ranks.
///
/// ```
/// use lsa_protocol::Layout;
///
/// let layout = Layout::new(8, 1024)?;
/// // Flags and the word of a failure: (2 * 8 + 1) * 64 bytes, which end before 4096.
/// assert_eq!(layout.flag_offset(1, 0), 8 * 64);
/// assert_eq!(layout.data_offset(2, 3), 4096 + 3 * 1024);
/// assert_eq!(layout.window_bytes(), 4096 + 2 * 8 * 1024);
/// # Ok::<(), lsa_protocol::LayoutError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    ranks: u32,
    capacity: u64,
    data: u64,
    bytes: u64,
}

impl Layout {
    /// The layout for this many ranks, with blocks of at most `capacity` bytes.
    ///
    /// # Errors
    /// There are no ranks, or more than a grid has blocks; `capacity` is not a multiple of [`SLOT_ALIGNMENT`]; or the
    /// window has more bytes than fit into 63 bits.
    ///
    /// ```
    /// use lsa_protocol::{Layout, LayoutError};
    ///
    /// let refused = Layout::new(8, 1000).unwrap_err();
    /// assert_eq!(refused, LayoutError::UnevenCapacity { capacity: 1000 });
    /// ```
    pub const fn new(ranks: u32, capacity: u64) -> Result<Self, LayoutError> {
        if ranks == 0 || ranks > MOST_RANKS {
            return Err(LayoutError::Ranks { ranks });
        }
        if !capacity.is_multiple_of(SLOT_ALIGNMENT) {
            return Err(LayoutError::UnevenCapacity { capacity });
        }
        let slots = 2 * ranks as u64;
        let data = ((slots + 1) * FLAG_BYTES).next_multiple_of(DATA_ALIGNMENT);
        let too_large = LayoutError::TooLarge { ranks, capacity };
        let Some(data_bytes) = slots.checked_mul(capacity) else {
            return Err(too_large);
        };
        match data.checked_add(data_bytes) {
            Some(bytes) if bytes <= i64::MAX.cast_unsigned() => Ok(Self {
                ranks,
                capacity,
                data,
                bytes,
            }),
            _ => Err(too_large),
        }
    }

    /// The number of ranks.
    ///
    /// ```
    /// assert_eq!(lsa_protocol::Layout::new(8, 1024)?.ranks(), 8);
    /// # Ok::<(), lsa_protocol::LayoutError>(())
    /// ```
    #[must_use]
    pub const fn ranks(&self) -> u32 {
        self.ranks
    }

    /// The maximum number of bytes of a block.
    ///
    /// ```
    /// assert_eq!(lsa_protocol::Layout::new(8, 1024)?.capacity(), 1024);
    /// # Ok::<(), lsa_protocol::LayoutError>(())
    /// ```
    #[must_use]
    pub const fn capacity(&self) -> u64 {
        self.capacity
    }

    /// The bytes of a window.
    ///
    /// ```
    /// assert_eq!(lsa_protocol::Layout::new(1, 0)?.window_bytes(), 4096);
    /// # Ok::<(), lsa_protocol::LayoutError>(())
    /// ```
    #[must_use]
    pub const fn window_bytes(&self) -> u64 {
        self.bytes
    }

    /// The bytes at the start of a window that must be 0 before the first epoch.
    ///
    /// ```
    /// assert_eq!(lsa_protocol::Layout::new(8, 1024)?.flag_bytes(), (2 * 8 + 1) * 64);
    /// # Ok::<(), lsa_protocol::LayoutError>(())
    /// ```
    #[must_use]
    pub const fn flag_bytes(&self) -> u64 {
        self.failed_offset() + FLAG_BYTES
    }

    /// The position of the word that records how an exchange of this rank has failed.
    ///
    /// ```
    /// assert_eq!(lsa_protocol::Layout::new(8, 1024)?.failed_offset(), 2 * 8 * 64);
    /// # Ok::<(), lsa_protocol::LayoutError>(())
    /// ```
    #[must_use]
    pub const fn failed_offset(&self) -> u64 {
        2 * self.ranks as u64 * FLAG_BYTES
    }

    /// The position of the flag that `source` sets in `epoch`.
    ///
    /// # Panics
    /// There is no such rank.
    ///
    /// ```
    /// assert_eq!(lsa_protocol::Layout::new(8, 1024)?.flag_offset(2, 3), 3 * 64);
    /// # Ok::<(), lsa_protocol::LayoutError>(())
    /// ```
    #[must_use]
    pub const fn flag_offset(&self, epoch: u32, source: u32) -> u64 {
        self.slot(epoch, source) * FLAG_BYTES
    }

    /// The position of the `u64` in which `source` tells the size of its block in `epoch`: in the line of its flag.
    ///
    /// # Panics
    /// There is no such rank.
    ///
    /// ```
    /// assert_eq!(lsa_protocol::Layout::new(8, 1024)?.size_offset(2, 3), 3 * 64 + 8);
    /// # Ok::<(), lsa_protocol::LayoutError>(())
    /// ```
    #[must_use]
    pub const fn size_offset(&self, epoch: u32, source: u32) -> u64 {
        self.flag_offset(epoch, source) + size_of::<u64>() as u64
    }

    /// The position of the slot that `source` fills in `epoch`.
    ///
    /// # Panics
    /// There is no such rank.
    ///
    /// ```
    /// assert_eq!(lsa_protocol::Layout::new(8, 1024)?.data_offset(1, 0), 4096 + 8 * 1024);
    /// # Ok::<(), lsa_protocol::LayoutError>(())
    /// ```
    #[must_use]
    pub const fn data_offset(&self, epoch: u32, source: u32) -> u64 {
        self.data + self.slot(epoch, source) * self.capacity
    }

    const fn slot(&self, epoch: u32, source: u32) -> u64 {
        assert!(source < self.ranks, "there is no such rank");
        (epoch % 2) as u64 * self.ranks as u64 + source as u64
    }
}

/// Why there is no such [`Layout`].
///
/// ```
/// let refused = lsa_protocol::Layout::new(0, 16).unwrap_err();
/// assert_eq!(refused.to_string(), "a window for 0 ranks: there are 1 to 2147483647");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LayoutError {
    /// No ranks, or too many.
    Ranks {
        /// The number of ranks.
        ranks: u32,
    },
    /// The capacity is not a multiple of [`SLOT_ALIGNMENT`].
    UnevenCapacity {
        /// The capacity in bytes.
        capacity: u64,
    },
    /// The bytes of the window do not fit into 63 bits.
    TooLarge {
        /// The number of ranks.
        ranks: u32,
        /// The capacity in bytes.
        capacity: u64,
    },
}

impl fmt::Display for LayoutError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ranks { ranks } => {
                write!(f, "a window for {ranks} ranks: there are 1 to {MOST_RANKS}")
            }
            Self::UnevenCapacity { capacity } => write!(
                f,
                "slots of {capacity} bytes: take a multiple of {SLOT_ALIGNMENT}"
            ),
            Self::TooLarge { ranks, capacity } => write!(
                f,
                "a window for {ranks} ranks with slots of {capacity} bytes is larger than an address space"
            ),
        }
    }
}

impl Error for LayoutError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_and_slots_lie_side_by_side_and_fill_the_window() {
        for (ranks, capacity) in [(1, 16), (3, 4096), (8, 1008), (72, 16), (1000, 32)] {
            let layout = Layout::new(ranks, capacity).unwrap();
            let flags = layout.flag_bytes();
            let data = layout.data_offset(2, 0);
            assert!(data >= flags && data - flags < 4096 && data.is_multiple_of(4096));
            for epoch in [1, 2] {
                for source in 0..ranks {
                    let slot = u64::from(epoch % 2 * ranks + source);
                    assert_eq!(layout.flag_offset(epoch, source), slot * 64);
                    assert_eq!(layout.data_offset(epoch, source), data + slot * capacity);
                }
            }
            let end = layout.data_offset(1, ranks - 1) + capacity;
            assert_eq!(layout.window_bytes(), end);
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_with_its_numbers() {
        let (ranks, capacity) = (2, 1 << 62);
        let too_large = Err(LayoutError::TooLarge { ranks, capacity });
        assert_eq!(Layout::new(ranks, capacity), too_large);
        let ranks = i32::MAX.cast_unsigned();
        let capacity = u64::MAX - 15;
        let too_large = Err(LayoutError::TooLarge { ranks, capacity });
        assert_eq!(Layout::new(ranks, capacity), too_large);
        let ranks = ranks + 1;
        assert_eq!(Layout::new(ranks, 16), Err(LayoutError::Ranks { ranks }));
        assert_eq!(Layout::new(0, 16), Err(LayoutError::Ranks { ranks: 0 }));
        let text = Layout::new(2, 8).unwrap_err().to_string();
        assert_eq!(text, "slots of 8 bytes: take a multiple of 16");
    }

    #[test]
    #[should_panic(expected = "no such rank")]
    fn a_rank_that_does_not_exist_has_no_slot() {
        let _ = Layout::new(2, 16).unwrap().data_offset(1, 2);
    }
}
