//! A profiler plugin that records all calls of it, as a library that the dynamic linker finds.
//!
//! Its tables are those of versions 4 to 7 of the interface. Handles and contexts are places in the lists of events and communicators,
//! counted from 1.

// Each test file uses its own part of this.
#![allow(dead_code)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cuda_emulator::stand_in;
use nccl_sys::{ncclDataType_t as Kind, ncclRedOp_t as Op};

use crate::ranks::{Memory, Rank, nccl, wait_until};

pub(crate) const GROUP: u64 = 1 << 0;
pub(crate) const COLL: u64 = 1 << 1;
pub(crate) const P2P: u64 = 1 << 2;
pub(crate) const PROXY_OP: u64 = 1 << 3;
pub(crate) const PROXY_STEP: u64 = 1 << 4;
pub(crate) const KERNEL_CH: u64 = 1 << 6;
pub(crate) const GROUP_API: u64 = 1 << 8;
pub(crate) const COLL_API: u64 = 1 << 9;
pub(crate) const P2P_API: u64 = 1 << 10;
pub(crate) const KERNEL_LAUNCH: u64 = 1 << 11;
pub(crate) const ALL: c_int = 0xfff;

pub(crate) const SEND_GPU_WAIT: c_int = 8;
pub(crate) const SEND_WAIT: c_int = 9;
pub(crate) const RECV_WAIT: c_int = 10;
pub(crate) const RECV_FLUSH_WAIT: c_int = 11;
pub(crate) const RECV_GPU_WAIT: c_int = 12;
pub(crate) const IN_PROGRESS: c_int = 19;
pub(crate) const SEND_PEER_WAIT: c_int = 20;
pub(crate) const KERNEL_CH_STOP: c_int = 22;
pub(crate) const GROUP_START_STOP: c_int = 23;
pub(crate) const GROUP_END_START: c_int = 24;

/// What happened, in order: the beginning and the end of events, by their handles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moment {
    Start(usize),
    Stop(usize),
}

/// An event.
#[derive(Debug, Clone, Default)]
pub(crate) struct Event {
    pub(crate) handle: usize,
    pub(crate) context: usize,
    pub(crate) kind: u64,
    pub(crate) parent: usize,
    /// The parent that tasks have for plugins of version 4; another one for version 5 and later.
    pub(crate) group: usize,
    pub(crate) rank: c_int,
    pub(crate) function: String,
    pub(crate) data_type: String,
    pub(crate) algorithm: String,
    pub(crate) count: usize,
    pub(crate) sequence: u64,
    pub(crate) channels: u8,
    /// Root or peer.
    pub(crate) peer: c_int,
    pub(crate) steps: c_int,
    pub(crate) step: c_int,
    pub(crate) chunk: c_int,
    pub(crate) is_send: bool,
    pub(crate) is_captured: bool,
    pub(crate) pid: u32,
    pub(crate) time: u64,
    pub(crate) tag: u64,
    pub(crate) states: Vec<(c_int, u64)>,
    pub(crate) stops: u32,
}

/// A communicator.
#[derive(Debug, Clone)]
pub(crate) struct Communicator {
    pub(crate) version: u32,
    pub(crate) hash: u64,
    pub(crate) name: String,
    /// The same text, read again when the communicator is finalized: plugins may keep the pointer.
    pub(crate) name_at_the_end: String,
    name_at: usize,
    pub(crate) nodes: c_int,
    pub(crate) ranks: c_int,
    pub(crate) rank: c_int,
    pub(crate) is_finalized: bool,
}

#[derive(Default)]
pub(crate) struct Told {
    pub(crate) communicators: Vec<Communicator>,
    pub(crate) events: Vec<Event>,
    pub(crate) moments: Vec<Moment>,
}

impl Told {
    /// The events of a kind, in the order of their beginnings.
    pub(crate) fn of(&self, kind: u64) -> Vec<Event> {
        let of_kind = self.events.iter().filter(|event| event.kind == kind);
        of_kind.cloned().collect()
    }

    /// The events below another one.
    pub(crate) fn below(&self, parent: &Event, kind: u64) -> Vec<Event> {
        let mut events = self.of(kind);
        events.retain(|event| event.parent == parent.handle);
        events
    }

    /// The index of `moment` in the order of all moments.
    pub(crate) fn when(&self, moment: Moment) -> usize {
        let at = self.moments.iter().position(|&other| other == moment);
        at.unwrap_or_else(|| panic!("{moment:?} did not happen"))
    }
}

static TOLD: Mutex<Told> = Mutex::new(Told {
    communicators: Vec::new(),
    events: Vec::new(),
    moments: Vec::new(),
});
/// The mask that the plugin sets in its next init.
static FIRST_MASK: AtomicI32 = AtomicI32::new(ALL);
/// NCCL's mask.
static MASK: AtomicPtr<c_int> = AtomicPtr::new(std::ptr::null_mut());

/// What NCCL has reported to the plugin.
pub(crate) fn told() -> MutexGuard<'static, Told> {
    TOLD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Forgets the events.
pub(crate) fn forget() {
    let mut told = told();
    // Handles stay valid.
    told.events.iter_mut().for_each(|event| event.kind = 0);
    told.moments.clear();
}

/// Sets the kinds of events that the plugin wants: in its next init, and at once if NCCL has loaded it.
pub(crate) fn want(mask: c_int) {
    FIRST_MASK.store(mask, Ordering::SeqCst);
    let place = MASK.load(Ordering::SeqCst);
    if !place.is_null() {
        // SAFETY: NCCL's mask is never freed, and is an integer that both sides read and write.
        unsafe { AtomicI32::from_ptr(place).store(mask, Ordering::SeqCst) };
    }
}

/// Makes the plugin known to this process under its default name, with the tables of these versions.
pub(crate) fn install(versions: &[u32]) {
    let symbols: Vec<_> = versions
        .iter()
        .map(|version| match version {
            4 => (c"ncclProfiler_v4", (&raw const TABLE_4).cast::<c_void>()),
            5 => (c"ncclProfiler_v5", (&raw const TABLE_5).cast()),
            6 => (c"ncclProfiler_v6", (&raw const TABLE_6).cast()),
            _ => (c"ncclProfiler_v7", (&raw const TABLE_7).cast()),
        })
        .collect();
    stand_in::load(c"libnccl-profiler.so", &symbols).unwrap();
}

type InitV4 = unsafe extern "C" fn(
    *mut *mut c_void,
    *mut c_int,
    *const c_char,
    u64,
    c_int,
    c_int,
    c_int,
    *const c_void,
) -> c_int;

type InitV5 = unsafe extern "C" fn(
    *mut *mut c_void,
    u64,
    *mut c_int,
    *const c_char,
    c_int,
    c_int,
    c_int,
    *const c_void,
) -> c_int;

#[repr(C)]
struct Table<Init> {
    name: *const c_char,
    init: Init,
    start: unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *const u8) -> c_int,
    stop: unsafe extern "C" fn(*mut c_void) -> c_int,
    record: unsafe extern "C" fn(*mut c_void, c_int, *const u64) -> c_int,
    finalize: unsafe extern "C" fn(*mut c_void) -> c_int,
}

// SAFETY: a constant.
unsafe impl<Init> Sync for Table<Init> {}

const fn table<Init>(
    init: Init,
    start: unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *const u8) -> c_int,
) -> Table<Init> {
    Table {
        name: c"keeper".as_ptr(),
        init,
        start,
        stop,
        record,
        finalize,
    }
}

static TABLE_4: Table<InitV4> = table(init_4, start::<4>);
static TABLE_5: Table<InitV5> = table(init_later::<5>, start::<5>);
static TABLE_6: Table<InitV5> = table(init_later::<6>, start::<6>);
static TABLE_7: Table<InitV5> = table(init_later::<7>, start::<7>);

unsafe extern "C" fn init_4(
    context: *mut *mut c_void,
    mask: *mut c_int,
    name: *const c_char,
    hash: u64,
    nodes: c_int,
    ranks: c_int,
    rank: c_int,
    _log: *const c_void,
) -> c_int {
    // SAFETY: NCCL passes places for both, and a C string or null.
    unsafe { init(4, context, mask, name, (hash, nodes, ranks, rank)) }
}

unsafe extern "C" fn init_later<const VERSION: u32>(
    context: *mut *mut c_void,
    hash: u64,
    mask: *mut c_int,
    name: *const c_char,
    nodes: c_int,
    ranks: c_int,
    rank: c_int,
    _log: *const c_void,
) -> c_int {
    // SAFETY: as above.
    unsafe { init(VERSION, context, mask, name, (hash, nodes, ranks, rank)) }
}

/// # Safety
/// The places are writable; the name is a C string or null.
unsafe fn init(
    version: u32,
    context: *mut *mut c_void,
    mask: *mut c_int,
    name: *const c_char,
    (hash, nodes, ranks, rank): (u64, c_int, c_int, c_int),
) -> c_int {
    let mut told = told();
    told.communicators.push(Communicator {
        version,
        hash,
        // SAFETY: the caller's promise.
        name: unsafe { text(name) },
        name_at_the_end: String::new(),
        name_at: name.expose_provenance(),
        nodes,
        ranks,
        rank,
        is_finalized: false,
    });
    MASK.store(mask, Ordering::SeqCst);
    // SAFETY: the caller's promise.
    unsafe {
        context.write(std::ptr::without_provenance_mut(told.communicators.len()));
        AtomicI32::from_ptr(mask).store(FIRST_MASK.load(Ordering::SeqCst), Ordering::SeqCst);
    }
    0
}

/// # Safety
/// Null or a C string.
unsafe fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}

/// Reads a field of a descriptor.
///
/// # Safety
/// The descriptor has a field of this type there.
unsafe fn at<T: Copy>(descriptor: *const u8, offset: usize) -> T {
    // SAFETY: the caller's promise.
    unsafe { descriptor.add(offset).cast::<T>().read_unaligned() }
}

unsafe extern "C" fn start<const VERSION: u32>(
    context: *mut c_void,
    handle: *mut *mut c_void,
    descriptor: *const u8,
) -> c_int {
    // SAFETY: the offsets are those of the plugins' headers: 24 bytes, and a structure for each kind.
    let mut event = unsafe {
        let kind = match VERSION {
            4 => u64::from(at::<u8>(descriptor, 0)),
            _ => at::<u64>(descriptor, 0),
        };
        let mut event = Event {
            kind,
            context: context.addr(),
            parent: at::<usize>(descriptor, 8),
            rank: at::<c_int>(descriptor, 16),
            ..Event::default()
        };
        let of_kind = descriptor.add(24);
        match kind {
            GROUP_API => {
                event.is_captured = at(of_kind, 0);
                event.steps = at(of_kind, 4);
            }
            COLL_API | P2P_API => {
                event.function = text(at(of_kind, 0));
                event.count = at(of_kind, 8);
                event.data_type = text(at(of_kind, 16));
                let (captured, tag) = if kind == COLL_API { (40, 48) } else { (32, 40) };
                event.is_captured = at(of_kind, captured);
                if VERSION >= 7 {
                    event.tag = at(of_kind, tag);
                }
            }
            COLL => {
                event.sequence = at(of_kind, 0);
                event.function = text(at(of_kind, 8));
                event.count = at(of_kind, 32);
                event.peer = at(of_kind, 40);
                event.data_type = text(at(of_kind, 48));
                event.channels = at(of_kind, 56);
                event.algorithm = text(at(of_kind, 64)) + "/" + &text(at(of_kind, 72));
                if VERSION >= 5 {
                    event.group = at(of_kind, 80);
                }
                if VERSION >= 7 {
                    event.tag = at(of_kind, 104);
                }
            }
            P2P => {
                event.function = text(at(of_kind, 0));
                event.data_type = text(at(of_kind, 16));
                event.count = at(of_kind, 24);
                event.peer = at(of_kind, 32);
                event.channels = at(of_kind, 36);
                if VERSION >= 5 {
                    event.group = at(of_kind, 40);
                }
            }
            PROXY_OP => {
                event.pid = at(of_kind, 0);
                event.peer = at(of_kind, 8);
                event.steps = at(of_kind, 12);
                event.chunk = at(of_kind, 16);
                event.is_send = at::<c_int>(of_kind, 20) != 0;
            }
            PROXY_STEP => event.step = at(of_kind, 0),
            KERNEL_CH => event.time = at(of_kind, 8),
            _ => {}
        }
        event
    };
    let mut told = told();
    event.handle = told.events.len() + 1;
    told.moments.push(Moment::Start(event.handle));
    // SAFETY: NCCL passes a place for the handle.
    unsafe { handle.write(std::ptr::without_provenance_mut(event.handle)) };
    told.events.push(event);
    0
}

unsafe extern "C" fn stop(handle: *mut c_void) -> c_int {
    let mut told = told();
    told.events[handle.addr() - 1].stops += 1;
    told.moments.push(Moment::Stop(handle.addr()));
    0
}

unsafe extern "C" fn record(handle: *mut c_void, state: c_int, argument: *const u64) -> c_int {
    // SAFETY: null, or the arguments of the state, which begin with a number.
    let argument = unsafe { argument.as_ref() }.copied().unwrap_or_default();
    told().events[handle.addr() - 1]
        .states
        .push((state, argument));
    0
}

unsafe extern "C" fn finalize(context: *mut c_void) -> c_int {
    let mut told = told();
    let communicator = &mut told.communicators[context.addr() - 1];
    communicator.is_finalized = true;
    let name = std::ptr::with_exposed_provenance(communicator.name_at);
    // SAFETY: null or a C string, until this function returns.
    communicator.name_at_the_end = unsafe { text(name) };
    0
}

/// Sums the values of all ranks, in place.
pub(crate) fn sum(rank: &Rank, memory: &Memory<f32>) {
    let code = rank.all_reduce(memory, memory, Kind::ncclFloat32, Op::ncclSum);
    assert_eq!(code, 0);
}

/// A message to the next rank and one from the previous rank, in a group.
pub(crate) fn exchange(rank: &Rank, from: &Memory<f32>, to: &Memory<f32>) {
    let (next, previous) = (rank.rank + 1, rank.rank + rank.ranks - 1);
    assert_eq!(nccl!(ncclGroupStart()), 0);
    assert_eq!(rank.send(from, Kind::ncclFloat32, next % rank.ranks), 0);
    assert_eq!(
        rank.receive(to, Kind::ncclFloat32, previous % rank.ranks),
        0
    );
    assert_eq!(nccl!(ncclGroupEnd()), 0);
}

/// Waits until as many events of a kind have ended.
pub(crate) fn wait_for_ends(kind: u64, count: usize) {
    wait_until("the events have ended", || {
        let events = told().of(kind);
        events.len() == count && events.iter().all(|event| event.stops == 1)
    });
}

/// The states of an event.
pub(crate) fn states(event: &Event) -> Vec<i32> {
    event.states.iter().map(|&(state, _)| state).collect()
}
