//! Plain data that names memory of a device.

/// A device's number, as in `cuDeviceGet`.
pub type DeviceOrdinal = i32;

/// A range inside one allocation of one pool. Plain data: it may travel to a peer and be checked
/// there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Span {
    /// Slot in the pool's table.
    pub index: u32,
    /// The allocation's number on its device; it changes when the slot is reused.
    pub generation: u32,
    /// The offset of the first byte from the start of the pool's data.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

impl Span {
    /// Whether the two ranges of one pool are in the same allocation, and have bytes in common.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        let are_empty = self.len == 0 || other.len == 0;
        !are_empty
            && (self.index, self.generation) == (other.index, other.generation)
            && self.offset < other.offset.saturating_add(other.len)
            && other.offset < self.offset.saturating_add(self.len)
    }
}

/// An allocation of device memory: of this process, or opened from another process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    /// The device that uses it as its memory.
    pub device: DeviceOrdinal,
    /// Its first address.
    pub start: u64,
    /// Bytes.
    pub size: u64,
    /// A number that is unique in this process.
    pub id: u64,
    /// Whether other processes can open it.
    pub ipc: bool,
    /// The memory pool of the allocation; 0 for `cuMemAlloc`.
    pub mempool: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_overlap_if_they_have_bytes_in_common() {
        let span = |offset: u64, len: u64| Span {
            index: 1,
            generation: 2,
            offset,
            len,
        };
        let ten = span(10, 10);
        for (offset, len, overlaps) in [
            (0, 10, false),
            (0, 11, true),
            (12, 1, true),
            (19, 9, true),
            (20, 9, false),
            (0, 40, true),
            (15, 0, false),
        ] {
            let other = span(offset, len);
            assert_eq!(ten.overlaps(&other), overlaps, "{other:?}");
            assert_eq!(other.overlaps(&ten), overlaps, "{other:?}");
        }
        let later = Span {
            generation: 3,
            ..ten
        };
        assert!(!ten.overlaps(&later));
    }
}
