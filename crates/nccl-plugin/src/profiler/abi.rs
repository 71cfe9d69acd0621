//! NCCL's profiler interface, versions 1 to 7: the parts of its structures that are read here.
//!
//! Source: `src/include/plugin/profiler/profiler_v1.h` to `profiler_v7.h` of NCCL. Versions 5 to 7 only append fields to the
//! descriptors of version 4.

use std::ffi::{c_char, c_int, c_void};

/// Kinds of events, as bits of the mask.
pub(super) const GROUP: u64 = 1;
pub(super) const COLLECTIVE: u64 = 1 << 1;
pub(super) const POINT_TO_POINT: u64 = 1 << 2;
pub(super) const PROXY_OPERATION: u64 = 1 << 3;
pub(super) const PROXY_STEP: u64 = 1 << 4;
pub(super) const KERNEL_CHANNEL: u64 = 1 << 6;

/// States of a step.
pub(super) const SEND_GPU_WAIT: c_int = 8;
pub(super) const SEND_WAIT: c_int = 9;
pub(super) const RECV_WAIT: c_int = 10;
pub(super) const RECV_FLUSH_WAIT: c_int = 11;
pub(super) const RECV_GPU_WAIT: c_int = 12;
pub(super) const SEND_PEER_WAIT: c_int = 20;

/// State of a kernel on a channel: it ends.
pub(super) const KERNEL_STOP: c_int = 22;

pub(super) const SUCCESS: c_int = 0;

/// `ncclProfiler_v*_t`. `T` is the type of a descriptor's kind.
#[repr(C)]
pub(super) struct Table<Init, T> {
    pub(super) name: *const c_char,
    pub(super) init: Init,
    pub(super) start_event:
        unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *const Descriptor<T>) -> c_int,
    pub(super) stop_event: extern "C" fn(*mut c_void) -> c_int,
    pub(super) record_event_state: unsafe extern "C" fn(*mut c_void, c_int, *const c_void) -> c_int,
    pub(super) finalize: extern "C" fn(*mut c_void) -> c_int,
}

// SAFETY: constants.
unsafe impl<Init: Sync, T> Sync for Table<Init, T> {}

/// `init` of versions 1 to 3.
pub(super) type InitV1 = unsafe extern "C" fn(*mut *mut c_void, *mut c_int) -> c_int;

/// `init` of version 4: mask, name, hash, nodes, ranks, rank, log function.
pub(super) type InitV4 = unsafe extern "C" fn(
    *mut *mut c_void,
    *mut c_int,
    *const c_char,
    u64,
    c_int,
    c_int,
    c_int,
    *const c_void,
) -> c_int;

/// `init` of versions 5 to 7: hash, mask, name, nodes, ranks, rank, log function.
pub(super) type InitV5 = unsafe extern "C" fn(
    *mut *mut c_void,
    u64,
    *mut c_int,
    *const c_char,
    c_int,
    c_int,
    c_int,
    *const c_void,
) -> c_int;

/// `ncclProfilerEventDescr_v*_t` up to the union, at which `body` points. The kind has 8 bits in versions 1 to 4, and 64 from
/// version 5.
#[repr(C)]
pub(super) struct Descriptor<T> {
    pub(super) kind: T,
    pub(super) parent: *mut c_void,
    pub(super) rank: c_int,
    pub(super) body: [u64; 0],
}

/// `coll` of version 1, whose names are numbers.
#[repr(C)]
pub(super) struct CollectiveV1 {
    pub(super) name: *const c_char,
    pub(super) hash: u64,
    pub(super) sequence: u64,
    pub(super) function: u8,
    pub(super) send: *const c_void,
    pub(super) recv: *const c_void,
    pub(super) count: usize,
    pub(super) root: c_int,
    pub(super) data_type: u8,
    pub(super) op: u32,
    pub(super) traffic: usize,
    pub(super) channels: u8,
    pub(super) warps: u8,
    pub(super) algorithm: u8,
    pub(super) protocol: u8,
}

/// `coll` of version 2.
#[repr(C)]
pub(super) struct CollectiveV2 {
    pub(super) name: *const c_char,
    pub(super) hash: u64,
    pub(super) sequence: u64,
    pub(super) function: *const c_char,
    pub(super) send: *const c_void,
    pub(super) recv: *const c_void,
    pub(super) count: usize,
    pub(super) root: c_int,
    pub(super) data_type: *const c_char,
    pub(super) traffic: usize,
    pub(super) channels: u8,
    pub(super) warps: u8,
    pub(super) algorithm: *const c_char,
    pub(super) protocol: *const c_char,
}

/// `coll` of version 3.
#[repr(C)]
pub(super) struct CollectiveV3 {
    pub(super) name: *const c_char,
    pub(super) hash: u64,
    pub(super) common: CollectiveV4,
}

/// `coll` of versions 4 to 7, which append fields.
#[repr(C)]
pub(super) struct CollectiveV4 {
    pub(super) sequence: u64,
    pub(super) function: *const c_char,
    pub(super) send: *const c_void,
    pub(super) recv: *const c_void,
    pub(super) count: usize,
    pub(super) root: c_int,
    pub(super) data_type: *const c_char,
    pub(super) channels: u8,
    pub(super) warps: u8,
    pub(super) algorithm: *const c_char,
    pub(super) protocol: *const c_char,
}

/// `p2p` of version 1.
#[repr(C)]
pub(super) struct PointToPointV1 {
    pub(super) name: *const c_char,
    pub(super) hash: u64,
    pub(super) function: u8,
    pub(super) buffer: *const c_void,
    pub(super) data_type: u8,
    pub(super) count: usize,
    pub(super) peer: c_int,
}

/// `p2p` of versions 2 and 3.
#[repr(C)]
pub(super) struct PointToPointV2 {
    pub(super) name: *const c_char,
    pub(super) hash: u64,
    pub(super) function: *const c_char,
    pub(super) buffer: *const c_void,
    pub(super) data_type: *const c_char,
    pub(super) count: usize,
    pub(super) peer: c_int,
}

/// `p2p` of versions 4 to 7, which append fields.
#[repr(C)]
pub(super) struct PointToPointV4 {
    pub(super) function: *const c_char,
    pub(super) buffer: *const c_void,
    pub(super) data_type: *const c_char,
    pub(super) count: usize,
    pub(super) peer: c_int,
    pub(super) channels: u8,
}

/// `proxyOp`.
#[repr(C)]
pub(super) struct ProxyOperation {
    pub(super) pid: libc::pid_t,
    pub(super) channel: u8,
    pub(super) peer: c_int,
    pub(super) steps: c_int,
    pub(super) chunk_size: c_int,
    pub(super) is_send: c_int,
}

/// `proxyStep`.
#[repr(C)]
pub(super) struct ProxyStep {
    pub(super) step: c_int,
}

/// `kernelCh` of version 3.
#[repr(C)]
pub(super) struct KernelChannel {
    pub(super) channel: u8,
}

/// `kernelCh` of versions 4 to 7, with the time on the GPU's clock, in ns.
#[repr(C)]
pub(super) struct KernelChannelV4 {
    pub(super) channel: u8,
    pub(super) time: u64,
}

/// `ncclProfilerEventStateArgs_v*_t` of versions 4 to 7, for the end of a kernel on a channel.
#[repr(C)]
pub(super) struct KernelEnd {
    pub(super) time: u64,
}
