//! What names memory of a device: plain data.

/// A device's number, as in `cuDeviceGet`.
pub type DeviceOrdinal = i32;

/// A range inside one allocation of one pool. Plain data: it may travel to a peer and be checked
/// there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Span {
    /// Slot in the pool's table.
    pub index: u32,
    /// The allocation's number on its device; a slot that was reused has another.
    pub generation: u32,
    /// First byte, counted from the start of the pool's data.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// An allocation of device memory, or what another process opened of one of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    /// The device it is used as memory of.
    pub device: DeviceOrdinal,
    /// Its first address.
    pub start: u64,
    /// Bytes.
    pub size: u64,
    /// No two of this process have the same.
    pub id: u64,
    /// Whether other processes can open it.
    pub ipc: bool,
    /// The memory pool it was allocated from; 0 if it is of `cuMemAlloc`.
    pub mempool: usize,
}
