//! Events inside NCCL, as NCCL reports them to a profiler plugin.
//!
//! NCCL (from 2.23) calls a profiler when it enqueues an operation, when its proxy thread begins and ends a transfer
//! and each step of it, and when a kernel starts and ends on a channel. This plugin keeps the most recent events in
//! rings, which readers examine when an operation hangs ([`observe`]).
//!
//! A mask selects the events that NCCL reports. NCCL reads it when it enqueues an operation: [`set_events`] affects
//! later operations, and not those already under way. Kernels are the exception: NCCL reports them correctly only on
//! communicators that were made after kernels were requested.
//!
//! The values belong to the process: every libnccl in it calls the same functions. No function here frees, locks or
//! allocates on a thread of NCCL's, and no handle is a pointer.

mod abi;
mod callbacks;
mod events;
mod names;
mod observation;
#[cfg(test)]
mod tests;

use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use stand_in_object::Symbol;

use crate::offer::{Offer, configured, installed, offer, open};
use callbacks::{TABLE_V1, TABLE_V2, TABLE_V3, TABLE_V4, TABLE_V5, TABLE_V6, TABLE_V7};

pub use events::monotonic_ns;
pub use observation::{
    CommunicatorQuery, FinishedOperation, KernelChannels, Observation, ObservedOperation,
    ObservedTransfer, WaitsFor, hash_of, observe, take_finished,
};

/// What NCCL reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Events {
    /// Operations that are enqueued: name, size, algorithm, protocol, channels.
    pub operations: bool,
    /// Transfers of the proxy thread: over the network, and by copy engines.
    pub transfers: bool,
    /// The steps of transfers, and what each waits for. Costs most.
    pub steps: bool,
    /// Start and end of kernels, channel by channel. Makes NCCL write timestamps in each kernel.
    pub kernels: bool,
}

impl Events {
    fn mask(self) -> u64 {
        let operations = abi::COLLECTIVE | abi::POINT_TO_POINT;
        let mut mask = 0;
        // NCCL reports each of the others with its parent operation; without operations they would have no parent.
        if self.operations || self.transfers || self.steps || self.kernels {
            mask |= operations;
        }
        if self.transfers || self.steps {
            mask |= abi::PROXY_OPERATION;
        }
        if self.steps {
            mask |= abi::PROXY_STEP;
        }
        if self.kernels {
            mask |= abi::KERNEL_CHANNEL;
        }
        mask
    }
}

/// Requests these events from NCCL, for the operations that are enqueued from now on.
pub fn set_events(events: Events) {
    callbacks::want(events.mask());
}

/// Requests these events as well once NCCL makes a communicator whose ranks are on several hosts.
pub fn add_events_between_hosts(events: Events) {
    callbacks::want_between_hosts(events.mask());
}

/// Returns the interface version with which a libnccl has taken the plugin.
#[must_use]
pub fn taken_by() -> Option<u32> {
    let version = callbacks::VERSION.load(Ordering::SeqCst);
    u32::try_from(version).ok().filter(|version| *version != 0)
}

/// Offers the plugin to NCCL. To be called before libnccl makes its first communicator; later calls return what the first
/// returned.
pub fn install() -> &'static Offer {
    static OFFER: OnceLock<Offer> = OnceLock::new();
    OFFER.get_or_init(|| {
        if let Some(other) = profiler_of_network_plugin() {
            return Offer::UserHasOne(other);
        }
        let symbol = |name, table: *const c_void| -> Symbol { (name, table) };
        let symbols = [
            symbol(c"ncclProfiler_v7", (&raw const TABLE_V7).cast()),
            symbol(c"ncclProfiler_v6", (&raw const TABLE_V6).cast()),
            symbol(c"ncclProfiler_v5", (&raw const TABLE_V5).cast()),
            symbol(c"ncclProfiler_v4", (&raw const TABLE_V4).cast()),
            symbol(c"ncclProfiler_v3", (&raw const TABLE_V3).cast()),
            symbol(c"ncclProfiler_v2", (&raw const TABLE_V2).cast()),
            symbol(c"ncclProfiler_v1", (&raw const TABLE_V1).cast()),
        ];
        offer("NCCL_PROFILER_PLUGIN", c"libnccl-profiler.so", &symbols)
    })
}

/// Returns the user's network plugin, if it contains a profiler: NCCL uses that one when it finds no profiler plugin.
fn profiler_of_network_plugin() -> Option<String> {
    let Some(value) = configured("NCCL_NET_PLUGIN") else {
        let found = installed(c"libnccl-net.so")?;
        return has_profiler(c"libnccl-net.so").then_some(found);
    };
    let names = value.split(',').filter(|name| !name.is_empty());
    for name in names {
        let candidates = [String::from(name), format!("libnccl-net-{name}.so")];
        for candidate in candidates {
            let is_one = CString::new(candidate).is_ok_and(|candidate| has_profiler(&candidate));
            if is_one {
                return Some(format!("NCCL_NET_PLUGIN={name}"));
            }
        }
    }
    None
}

/// Returns whether the dynamic linker finds this library and it contains a profiler. The library stays open: NCCL would
/// open it as well.
fn has_profiler(library: &CStr) -> bool {
    let Some(handle) = open(library) else {
        return false;
    };
    (1..=9).any(|version| {
        let name = format!("ncclProfiler_v{version}\0");
        // SAFETY: a live handle, and a C string.
        let symbol = unsafe { libc::dlsym(handle.as_ptr(), name.as_ptr().cast::<c_char>()) };
        !symbol.is_null()
    })
}
