//! A profiler plugin for NCCL in Rust: it counts events, and keeps those of kernels' channels.
//!
//! NCCL asks the dynamic linker for the plugin's library; a stand-in answers, whose symbol is a table of the functions here.
//! The table is that of version 4 of the interface (`ncclProfiler_v4`), which 2.27 to 2.32 take.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null;
use std::sync::{Mutex, PoisonError};

use cuda_emulator::stand_in;

/// The setting for NCCL: a plugin of this name is in the process.
pub(crate) const PLUGIN: (&str, &str) = ("NCCL_PROFILER_PLUGIN", "libnccl-profiler-counts.so");
const SONAME: &CStr = c"libnccl-profiler-counts.so";

/// Kinds of events, by the bits of NCCL's mask.
pub(crate) const COLLECTIVE: u8 = 1 << 1;
pub(crate) const POINT_TO_POINT: u8 = 1 << 2;
pub(crate) const PROXY: u8 = 1 << 3;
pub(crate) const CHANNEL: u8 = 1 << 6;

/// The state of a channel's event when its kernel has ended.
const CHANNEL_IS_OVER: c_int = 22;

/// An event that NCCL reported.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Event {
    pub(crate) kind: u8,
    /// For a collective or a message.
    pub(crate) channels: u8,
    /// For a kernel's channel: its number, and the device's clock when it began and ended.
    pub(crate) channel: u8,
    pub(crate) begun: u64,
    pub(crate) ended: u64,
    pub(crate) stopped: bool,
}

/// All events of this process. An event's handle is its index plus one.
static EVENTS: Mutex<Vec<Event>> = Mutex::new(Vec::new());

/// The events so far.
pub(crate) fn events() -> Vec<Event> {
    EVENTS
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .clone()
}

fn at(handle: *mut c_void, change: impl FnOnce(&mut Event)) {
    let mut events = EVENTS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(event) = handle
        .addr()
        .checked_sub(1)
        .and_then(|at| events.get_mut(at))
    {
        change(event);
    }
}

/// The beginning of a descriptor, and the parts of it that are used here: 24 bytes in, one structure for each kind.
#[repr(C)]
struct Descriptor {
    kind: u8,
    parent: *mut c_void,
    rank: c_int,
    of_kind: OfKind,
}

#[repr(C)]
union OfKind {
    collective: Collective,
    message: Message,
    channel: Channel,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Collective {
    sequence: u64,
    function: *const c_char,
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    root: c_int,
    ty: *const c_char,
    channels: u8,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Message {
    function: *const c_char,
    buffer: *mut c_void,
    ty: *const c_char,
    count: usize,
    peer: c_int,
    channels: u8,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Channel {
    id: u8,
    time: u64,
}

#[repr(C)]
struct Table {
    name: *const c_char,
    #[allow(clippy::type_complexity)]
    init: unsafe extern "C" fn(
        *mut *mut c_void,
        *mut c_int,
        *const c_char,
        u64,
        c_int,
        c_int,
        c_int,
        *const c_void,
    ) -> c_int,
    start: unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *const Descriptor) -> c_int,
    stop: unsafe extern "C" fn(*mut c_void) -> c_int,
    record: unsafe extern "C" fn(*mut c_void, c_int, *const u64) -> c_int,
    finalize: unsafe extern "C" fn(*mut c_void) -> c_int,
}

// SAFETY: a constant.
unsafe impl Sync for Table {}

static TABLE: Table = Table {
    name: c"counts".as_ptr(),
    init,
    start,
    stop,
    record,
    finalize,
};

/// Makes the plugin known to this process. Call it before the first communicator.
pub(crate) fn install() {
    let table = (&raw const TABLE).cast();
    stand_in::load(SONAME, &[(c"ncclProfiler_v4", table)]).unwrap();
}

unsafe extern "C" fn init(
    context: *mut *mut c_void,
    mask: *mut c_int,
    _name: *const c_char,
    _hash: u64,
    _nodes: c_int,
    _ranks: c_int,
    _rank: c_int,
    _log: *const c_void,
) -> c_int {
    // SAFETY: NCCL passes places for both.
    unsafe {
        context.write(null::<c_void>().cast_mut());
        mask.write(c_int::from(COLLECTIVE | POINT_TO_POINT | PROXY | CHANNEL));
    }
    0
}

unsafe extern "C" fn start(
    _context: *mut c_void,
    handle: *mut *mut c_void,
    descriptor: *const Descriptor,
) -> c_int {
    // SAFETY: NCCL passes a descriptor, whose kind says which structure is in it.
    let event = unsafe {
        let descriptor = &*descriptor;
        let mut event = Event {
            kind: descriptor.kind,
            ..Event::default()
        };
        match event.kind {
            COLLECTIVE => event.channels = descriptor.of_kind.collective.channels,
            POINT_TO_POINT => event.channels = descriptor.of_kind.message.channels,
            CHANNEL => {
                let Channel { id, time } = descriptor.of_kind.channel;
                (event.channel, event.begun) = (id, time);
            }
            _ => {}
        }
        event
    };
    let mut events = EVENTS.lock().unwrap_or_else(PoisonError::into_inner);
    events.push(event);
    // SAFETY: NCCL passes a place for the handle.
    unsafe { handle.write(std::ptr::without_provenance_mut(events.len())) };
    0
}

unsafe extern "C" fn stop(handle: *mut c_void) -> c_int {
    at(handle, |event| event.stopped = true);
    0
}

unsafe extern "C" fn record(handle: *mut c_void, state: c_int, arguments: *const u64) -> c_int {
    if state == CHANNEL_IS_OVER && !arguments.is_null() {
        // SAFETY: the arguments of this state begin with the time.
        let time = unsafe { arguments.read() };
        at(handle, |event| event.ended = time);
    }
    0
}

unsafe extern "C" fn finalize(_context: *mut c_void) -> c_int {
    0
}
