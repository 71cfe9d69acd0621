//! A window, its request, and the memory that can be registered: see [`super::windows`].

use std::collections::BTreeMap;
use std::sync::Arc;

use cuda_emulator::memory::ipc::OpenPart;
use cuda_emulator::memory::{Span, Watch};
use cuda_emulator::registry::Registry;
use cuda_emulator::sync::{Mutex, MutexGuard};
use nccl_sys::ncclWindow_t;

pub(super) const KIND: u8 = 0x4D;
pub(super) static WINDOWS: Registry<Window> = Registry::new(KIND);

/// The size of each allocation of `ncclMemAlloc`, by address.
static ALLOCATED: Mutex<BTreeMap<u64, u64>> = Mutex::new(BTreeMap::new());

/// Returns the allocations that can be registered: sizes, by address.
pub(super) fn allocated() -> MutexGuard<'static, BTreeMap<u64, u64>> {
    ALLOCATED.lock()
}

/// Adds memory that can be registered.
pub(crate) fn remember_allocation(address: u64, size: u64) {
    allocated().insert(address, size);
}

/// Removes freed memory.
pub(crate) fn forget_allocation(address: u64) {
    allocated().remove(&address);
}

/// One rank's end of a window.
#[derive(Debug)]
pub(crate) struct Window {
    pub(super) communicator: usize,
    /// The address of this rank's part.
    pub(crate) address: u64,
    pub(super) size: u64,
    pub(super) flags: i32,
    /// Every rank's part, in its own pool.
    pub(crate) parts: Vec<Span>,
    /// The parts of peers that this rank's device can access, by rank; opened when first asked for.
    pub(super) reached: Mutex<BTreeMap<usize, OpenPart>>,
}

/// A window in the list of its communicator.
pub(super) struct Listed {
    pub(super) window: Arc<Window>,
    /// Watches the use of this rank's part, once the ranks may put.
    pub(super) watch: Option<Watch>,
}

/// The caller's place for a handle, written when the window is registered.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WindowSlot(pub(super) *mut ncclWindow_t);

// SAFETY: by the contract of `ncclCommWindowRegister` it stays valid until the group is over and, on a
// non-blocking communicator, until the communicator is not busy any more.
unsafe impl Send for WindowSlot {}
// SAFETY: as above; one job writes to it.
unsafe impl Sync for WindowSlot {}

impl WindowSlot {
    /// # Safety
    /// `out` may be written to until the job that fills it is over.
    pub(crate) unsafe fn new(out: *mut ncclWindow_t) -> Self {
        Self(out)
    }
}

/// The request of a window.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WindowRequest {
    pub(crate) address: u64,
    pub(crate) size: u64,
    pub(crate) flags: i32,
    pub(crate) out: WindowSlot,
}
