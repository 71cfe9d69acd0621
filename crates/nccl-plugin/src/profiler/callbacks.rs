//! The functions that NCCL calls. They neither lock, allocate nor panic, and dereference only the descriptor and the
//! strings in it, which are valid for the call.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64, Ordering};

use super::abi::{
    COLLECTIVE, CollectiveV1, CollectiveV2, CollectiveV3, CollectiveV4, Descriptor, GROUP, InitV1,
    InitV4, InitV5, KERNEL_CHANNEL, KERNEL_STOP, KernelChannel, KernelChannelV4, KernelEnd,
    POINT_TO_POINT, PROXY_OPERATION, PROXY_STEP, PointToPointV1, PointToPointV2, PointToPointV4,
    ProxyOperation, ProxyStep, SUCCESS, Table,
};
use super::events::{
    ALL_COMMUNICATORS, ALL_OPERATIONS, ALL_TRANSFERS, Communicator, Handle, Kind, NAME, NO_NAME,
    STEPS, Transfer, UNKNOWN_NAME, monotonic_ns,
};
use super::names::{ALGORITHMS, FUNCTIONS, PROTOCOLS, element_size, function_v1, index, number_v1};

/// The addresses from which libraries read their masks: each a static of the library, which stays loaded. One entry per
/// libnccl; libraries beyond the last entry keep the mask that they were given first.
static MASKS: [AtomicPtr<c_int>; 4] = [const { AtomicPtr::new(null_mut()) }; 4];

/// The requested events, as NCCL's mask.
static WANTED: AtomicU64 = AtomicU64::new(0);

/// The additional events requested once there is a communicator of several hosts.
static WANTED_BETWEEN_HOSTS: AtomicU64 = AtomicU64::new(0);

/// When the mask last changed, on the monotonic clock.
static CHANGED_NS: AtomicU64 = AtomicU64::new(0);

/// The highest interface version with which a library has taken the plugin; 0 until one has.
pub(super) static VERSION: AtomicI32 = AtomicI32::new(0);

pub(super) fn wanted() -> u64 {
    WANTED.load(Ordering::SeqCst)
}

/// Requests these events for operations that are enqueued from now on.
pub(super) fn want(mask: u64) {
    WANTED.store(mask, Ordering::SeqCst);
    write_masks();
}

/// Requests these events as well, from the first communicator of several hosts on.
pub(super) fn want_between_hosts(mask: u64) {
    WANTED_BETWEEN_HOSTS.store(mask, Ordering::SeqCst);
}

fn write_masks() {
    CHANGED_NS.store(monotonic_ns(), Ordering::SeqCst);
    for place in &MASKS {
        write_mask(place.load(Ordering::SeqCst));
    }
}

/// Writes the requested mask where NCCL reads it. The request is read again after the store, so that of two concurrent
/// writers the last value stays.
fn write_mask(place: *mut c_int) {
    if place.is_null() {
        return;
    }
    // SAFETY: NCCL gave the address of a static `int`, which it reads atomically; its library was pinned when it did.
    let mask = unsafe { AtomicI32::from_ptr(place) };
    loop {
        let wanted = wanted();
        mask.store(wanted as c_int, Ordering::SeqCst);
        if wanted == self::wanted() {
            return;
        }
    }
}

/// Registers the address from which a library reads its mask, and writes the mask there.
fn register_mask(place: *mut c_int) {
    if !is_pinned(place) {
        return;
    }
    for known in &MASKS {
        let before = known.compare_exchange(null_mut(), place, Ordering::SeqCst, Ordering::SeqCst);
        if before.is_ok() || before == Err(place) {
            break;
        }
    }
    write_mask(place);
}

/// Keeps the library that contains this address loaded for ever; a program or a framework may otherwise unload it.
/// Called once per communicator, by NCCL, under the lock under which NCCL opens libraries itself.
fn is_pinned(place: *mut c_int) -> bool {
    if MASKS
        .iter()
        .any(|known| known.load(Ordering::SeqCst) == place)
    {
        return true;
    }
    let mut info = libc::Dl_info {
        dli_fname: null(),
        dli_fbase: null_mut(),
        dli_sname: null(),
        dli_saddr: null_mut(),
    };
    // SAFETY: writes one value of this type; the name that it finds lives as long as the library, which calls here.
    unsafe {
        if libc::dladdr(place.cast(), &raw mut info) == 0 || info.dli_fname.is_null() {
            // The address is in no library: in a test, or on the heap.
            return true;
        }
        let flags = libc::RTLD_LAZY | libc::RTLD_NOLOAD | libc::RTLD_NODELETE;
        let handle = libc::dlopen(info.dli_fname, flags);
        if handle.is_null() {
            // The program itself has no name by which it can be opened, and stays loaded.
            libc::dlerror();
        }
    }
    true
}

/// What NCCL reports about a new communicator; version 1 reports nothing.
struct Introduction {
    hash: u64,
    name: *const c_char,
    rank: c_int,
    world_size: c_int,
    /// The number of hosts; 0 if NCCL does not report it.
    nodes: c_int,
}

/// # Safety
/// `context` and `mask` are where NCCL wants its answers; the name is null or a C string.
unsafe fn begin(
    version: c_int,
    context: *mut *mut c_void,
    mask: *mut c_int,
    introduction: &Introduction,
) -> c_int {
    let no_name = if version < 4 { UNKNOWN_NAME } else { NO_NAME };
    VERSION.fetch_max(version, Ordering::SeqCst);
    let between_hosts = WANTED_BETWEEN_HOSTS.load(Ordering::SeqCst);
    if introduction.nodes > 1 && wanted() & between_hosts != between_hosts {
        WANTED.fetch_or(between_hosts, Ordering::SeqCst);
        write_masks();
    }
    if !mask.is_null() {
        register_mask(mask);
    }
    let is_in_use = |slot: &Communicator| slot.is_over.load(Ordering::Relaxed) == 0;
    let turn = ALL_COMMUNICATORS.push_beside(is_in_use, |slot| {
        // SAFETY: guaranteed by the caller.
        unsafe { keep_name(slot, introduction.name, no_name) };
        slot.hash.store(introduction.hash, Ordering::Relaxed);
        slot.rank.store(introduction.rank, Ordering::Relaxed);
        slot.world_size
            .store(introduction.world_size, Ordering::Relaxed);
        slot.mask.store(wanted(), Ordering::Relaxed);
        slot.is_over.store(0, Ordering::Relaxed);
    });
    let handle = turn.map_or(null_mut(), |turn| {
        Handle::of(Kind::Communicator, turn).to_pointer()
    });
    if !context.is_null() {
        // SAFETY: guaranteed by the caller.
        unsafe { *context = handle };
    }
    SUCCESS
}

/// # Safety
/// `name` is null or a C string.
unsafe fn keep_name(slot: &Communicator, name: *const c_char, no_name: u32) {
    if name.is_null() {
        slot.name_length.store(no_name, Ordering::Relaxed);
        return;
    }
    // SAFETY: guaranteed by the caller.
    let name = unsafe { CStr::from_ptr(name) }.to_bytes();
    let kept = &name[..name.len().min(NAME)];
    for (place, byte) in slot.name.iter().zip(kept) {
        place.store(*byte, Ordering::Relaxed);
    }
    slot.name_length.store(kept.len() as u32, Ordering::Relaxed);
}

unsafe extern "C" fn init_v1<const V: c_int>(context: *mut *mut c_void, mask: *mut c_int) -> c_int {
    let unknown = Introduction {
        hash: 0,
        name: null_mut(),
        rank: -1,
        world_size: -1,
        nodes: 0,
    };
    // SAFETY: as NCCL calls it.
    unsafe { begin(V, context, mask, &unknown) }
}

unsafe extern "C" fn init_v4(
    context: *mut *mut c_void,
    mask: *mut c_int,
    name: *const c_char,
    hash: u64,
    nodes: c_int,
    world_size: c_int,
    rank: c_int,
    _log: *const c_void,
) -> c_int {
    let introduction = Introduction {
        hash,
        name,
        rank,
        world_size,
        nodes,
    };
    // SAFETY: as NCCL calls it.
    unsafe { begin(4, context, mask, &introduction) }
}

unsafe extern "C" fn init_v5<const V: c_int>(
    context: *mut *mut c_void,
    hash: u64,
    mask: *mut c_int,
    name: *const c_char,
    nodes: c_int,
    world_size: c_int,
    rank: c_int,
    _log: *const c_void,
) -> c_int {
    let introduction = Introduction {
        hash,
        name,
        rank,
        world_size,
        nodes,
    };
    // SAFETY: as NCCL calls it.
    unsafe { begin(V, context, mask, &introduction) }
}

/// An operation as all versions describe it.
#[derive(Default)]
struct NewOperation {
    function: u8,
    algorithm: u8,
    protocol: u8,
    channels: u8,
    element_size: u8,
    count: usize,
    peer: c_int,
}

/// # Safety
/// `descriptor` is one of version `V` of a collective operation.
unsafe fn collective<const V: c_int>(body: *const c_void) -> NewOperation {
    /// # Safety
    /// The strings are null or C strings.
    unsafe fn named(
        function: *const c_char,
        algorithm: *const c_char,
        protocol: *const c_char,
        rest: NewOperation,
    ) -> NewOperation {
        // SAFETY: guaranteed by the caller.
        unsafe {
            NewOperation {
                function: index(&FUNCTIONS, function),
                algorithm: index(&ALGORITHMS, algorithm),
                protocol: index(&PROTOCOLS, protocol),
                ..rest
            }
        }
    }
    // SAFETY: guaranteed by the caller, here and below: the body has the version's type.
    unsafe {
        match V {
            1 => {
                let body = &*body.cast::<CollectiveV1>();
                NewOperation {
                    function: function_v1(body.function),
                    algorithm: number_v1(&ALGORITHMS, body.algorithm),
                    protocol: number_v1(&PROTOCOLS, body.protocol),
                    channels: body.channels,
                    count: body.count,
                    peer: body.root,
                    ..NewOperation::default()
                }
            }
            2 => {
                let body = &*body.cast::<CollectiveV2>();
                let rest = NewOperation {
                    element_size: element_size(body.data_type),
                    channels: body.channels,
                    count: body.count,
                    peer: body.root,
                    ..NewOperation::default()
                };
                named(body.function, body.algorithm, body.protocol, rest)
            }
            _ => {
                let body = match V {
                    3 => &(*body.cast::<CollectiveV3>()).common,
                    _ => &*body.cast::<CollectiveV4>(),
                };
                let rest = NewOperation {
                    element_size: element_size(body.data_type),
                    channels: body.channels,
                    count: body.count,
                    peer: body.root,
                    ..NewOperation::default()
                };
                named(body.function, body.algorithm, body.protocol, rest)
            }
        }
    }
}

/// # Safety
/// `descriptor` is one of version `V` of a send or a receive.
unsafe fn point_to_point<const V: c_int>(body: *const c_void) -> NewOperation {
    // SAFETY: guaranteed by the caller, here and below: the body has the version's type.
    unsafe {
        match V {
            1 => {
                let body = &*body.cast::<PointToPointV1>();
                NewOperation {
                    function: function_v1(body.function),
                    count: body.count,
                    peer: body.peer,
                    ..NewOperation::default()
                }
            }
            2 | 3 => {
                let body = &*body.cast::<PointToPointV2>();
                NewOperation {
                    function: index(&FUNCTIONS, body.function),
                    count: body.count,
                    peer: body.peer,
                    ..NewOperation::default()
                }
            }
            _ => {
                let body = &*body.cast::<PointToPointV4>();
                NewOperation {
                    function: index(&FUNCTIONS, body.function),
                    element_size: element_size(body.data_type),
                    count: body.count,
                    peer: body.peer,
                    channels: body.channels,
                    ..NewOperation::default()
                }
            }
        }
    }
}

fn keep_operation(communicator: u64, rank: c_int, new: &NewOperation) -> Option<Handle> {
    let owner = ALL_COMMUNICATORS.get(communicator)?;
    // Versions 1 to 3 name the rank here alone.
    let _ = (owner.rank).compare_exchange(-1, rank, Ordering::Relaxed, Ordering::Relaxed);
    let turn = ALL_OPERATIONS.push(|slot| {
        slot.communicator.store(communicator, Ordering::Relaxed);
        slot.since_ns.store(monotonic_ns(), Ordering::Relaxed);
        slot.count.store(new.count as u64, Ordering::Relaxed);
        slot.peer.store(new.peer, Ordering::Relaxed);
        slot.function.store(new.function, Ordering::Relaxed);
        slot.algorithm.store(new.algorithm, Ordering::Relaxed);
        slot.protocol.store(new.protocol, Ordering::Relaxed);
        slot.channels.store(new.channels, Ordering::Relaxed);
        slot.mask.store(wanted(), Ordering::Relaxed);
        let mask_since = CHANGED_NS.load(Ordering::Relaxed);
        slot.mask_since_ns.store(mask_since, Ordering::Relaxed);
        slot.transfers.store(0, Ordering::Relaxed);
        slot.started.store(0, Ordering::Relaxed);
        slot.ended.store(0, Ordering::Relaxed);
        slot.kernel_begin_ns.store(0, Ordering::Relaxed);
        slot.kernel_end_ns.store(0, Ordering::Relaxed);
        slot.element_size.store(new.element_size, Ordering::Relaxed);
        slot.is_counted.store(0, Ordering::Relaxed);
    });
    Some(Handle::of(Kind::Operation, turn?))
}

/// Returns the parent if it is of this kind.
fn parent_of(pointer: *mut c_void, kind: Kind) -> Option<Handle> {
    Handle::from_pointer(pointer).filter(|handle| handle.kind == kind)
}

fn keep_transfer(
    version: c_int,
    operation: u64,
    rank: c_int,
    new: &ProxyOperation,
) -> Option<Handle> {
    let owner = ALL_OPERATIONS.get(operation)?;
    let communicator = ALL_COMMUNICATORS.get(owner.communicator.load(Ordering::Relaxed))?;
    // In another PID namespace another process may have the same number.
    let known = communicator.rank.load(Ordering::Relaxed);
    if known != -1 && known != rank {
        return None;
    }
    owner.transfers.fetch_add(1, Ordering::Relaxed);
    let turn = ALL_TRANSFERS.push(|slot| {
        slot.operation.store(operation, Ordering::Relaxed);
        slot.peer.store(new.peer, Ordering::Relaxed);
        slot.steps.store(new.steps, Ordering::Relaxed);
        slot.channel.store(new.channel, Ordering::Relaxed);
        slot.is_send
            .store(u8::from(new.is_send != 0), Ordering::Relaxed);
        slot.is_over.store(0, Ordering::Relaxed);
        slot.has_steps.store(0, Ordering::Relaxed);
        slot.has_credit_state
            .store(u8::from(version >= 4), Ordering::Relaxed);
        slot.done.store(0, Ordering::Relaxed);
        let now = monotonic_ns();
        slot.since_ns.store(now, Ordering::Relaxed);
        slot.moved_ns.store(now, Ordering::Relaxed);
        slot.in_network.store(0, Ordering::Relaxed);
        slot.in_network_ns.store(0, Ordering::Relaxed);
        for step in &slot.under_way {
            step.store(0, Ordering::Relaxed);
        }
    });
    Some(Handle::of(Kind::Transfer, turn?))
}

fn keep_step(transfer: u64, step: c_int) -> Option<Handle> {
    let slot = ALL_TRANSFERS.get(transfer)?;
    let number = u64::try_from(step).ok()?;
    let place = (number % STEPS as u64) as u8;
    let now = monotonic_ns();
    if slot.has_steps.swap(1, Ordering::Relaxed) == 0 {
        slot.since_ns.store(now, Ordering::Relaxed);
        slot.moved_ns.store(now, Ordering::Relaxed);
    }
    slot.state_since_ns[usize::from(place)].store(now, Ordering::Relaxed);
    slot.under_way[usize::from(place)].store((number + 1) << 8, Ordering::Release);
    Some(Handle {
        kind: Kind::Step,
        part: place,
        turn: transfer,
    })
}

fn keep_kernel(operation: u64, channel: u8, time: u64) -> Option<Handle> {
    let slot = ALL_OPERATIONS.get(operation)?;
    let bit = 1u64.checked_shl(channel.into())?;
    if slot.started.fetch_or(bit, Ordering::Release) == 0 {
        slot.kernel_begin_ns.store(time, Ordering::Relaxed);
    } else {
        slot.kernel_begin_ns.fetch_min(time, Ordering::Relaxed);
    }
    Some(Handle {
        kind: Kind::Kernel,
        part: channel,
        turn: operation,
    })
}

unsafe extern "C" fn start_event<const V: c_int, T: Copy + Into<u64>>(
    context: *mut c_void,
    handle: *mut *mut c_void,
    descriptor: *const Descriptor<T>,
) -> c_int {
    if handle.is_null() || descriptor.is_null() {
        return SUCCESS;
    }
    // SAFETY: as NCCL calls it: the parts of a descriptor up to the union are written for every kind.
    let (kind, parent, rank, body) = unsafe {
        let body = (&raw const (*descriptor).body).cast::<c_void>();
        let descriptor = &*descriptor;
        (
            descriptor.kind.into(),
            descriptor.parent,
            descriptor.rank,
            body,
        )
    };
    let communicator = || parent_of(context, Kind::Communicator);
    // SAFETY: the body is that of the kind, here and below.
    let kept = unsafe {
        match kind {
            COLLECTIVE => communicator()
                .and_then(|owner| keep_operation(owner.turn, rank, &collective::<V>(body))),
            POINT_TO_POINT => communicator()
                .and_then(|owner| keep_operation(owner.turn, rank, &point_to_point::<V>(body))),
            // Before 2.28 NCCL reports no operation whose group has no handle.
            GROUP if V <= 4 => Some(Handle::of(Kind::Group, 1)),
            PROXY_OPERATION => {
                let body = &*body.cast::<ProxyOperation>();
                // The parent of an operation that this proxy does for another process is a handle of that process.
                let is_own = body.pid == libc::getpid();
                parent_of(parent, Kind::Operation)
                    .filter(|_| is_own)
                    .and_then(|operation| keep_transfer(V, operation.turn, rank, body))
            }
            PROXY_STEP => {
                let step = (*body.cast::<ProxyStep>()).step;
                parent_of(parent, Kind::Transfer)
                    .and_then(|transfer| keep_step(transfer.turn, step))
            }
            KERNEL_CHANNEL => {
                let (channel, time) = match V {
                    1..=3 => ((*body.cast::<KernelChannel>()).channel, 0),
                    _ => {
                        let body = &*body.cast::<KernelChannelV4>();
                        (body.channel, body.time)
                    }
                };
                parent_of(parent, Kind::Operation)
                    .and_then(|operation| keep_kernel(operation.turn, channel, time))
            }
            _ => None,
        }
    };
    // SAFETY: where NCCL wants the handle; null is none.
    unsafe { *handle = kept.map_or(null_mut(), Handle::to_pointer) };
    SUCCESS
}

extern "C" fn stop_event(handle: *mut c_void) -> c_int {
    let Some(Handle { kind, part, turn }) = Handle::from_pointer(handle) else {
        return SUCCESS;
    };
    match kind {
        // These report only that the operation was enqueued; its transfers and kernels come later.
        Kind::Operation | Kind::Communicator | Kind::Group => {}
        Kind::Transfer => {
            if let Some(slot) = ALL_TRANSFERS.get(turn) {
                slot.is_over.store(1, Ordering::Release);
            }
        }
        Kind::Step => {
            if let Some((slot, step)) = step_of(turn, part) {
                let now = monotonic_ns();
                let state = step.swap(0, Ordering::Relaxed) & 0xff;
                slot.change_state(state as u8, 0, now);
                slot.moved_ns.store(now, Ordering::Relaxed);
                slot.done.fetch_add(1, Ordering::Release);
            }
        }
        Kind::Kernel => {
            let bit = 1u64.checked_shl(part.into());
            if let Some((slot, bit)) = ALL_OPERATIONS.get(turn).zip(bit) {
                slot.ended.fetch_or(bit, Ordering::Release);
            }
        }
    }
    SUCCESS
}

fn step_of(transfer: u64, place: u8) -> Option<(&'static Transfer, &'static AtomicU64)> {
    let slot = ALL_TRANSFERS.get(transfer)?;
    Some((slot, slot.under_way.get(usize::from(place))?))
}

unsafe extern "C" fn record_event_state<const V: c_int>(
    handle: *mut c_void,
    state: c_int,
    arguments: *const c_void,
) -> c_int {
    let Some(Handle { kind, part, turn }) = Handle::from_pointer(handle) else {
        return SUCCESS;
    };
    match kind {
        Kind::Step => change_step(turn, part, state),
        Kind::Kernel if V >= 4 && state == KERNEL_STOP && !arguments.is_null() => {
            // SAFETY: what NCCL passes with this state.
            let time = unsafe { (*arguments.cast::<KernelEnd>()).time };
            if let Some(slot) = ALL_OPERATIONS.get(turn) {
                slot.kernel_end_ns.fetch_max(time, Ordering::Relaxed);
            }
        }
        _ => {}
    }
    SUCCESS
}

fn change_step(transfer: u64, part: u8, state: c_int) {
    let Some((slot, step)) = step_of(transfer, part) else {
        return;
    };
    let before = step.load(Ordering::Relaxed);
    if let (1.., Ok(state)) = (before, u8::try_from(state)) {
        let now = monotonic_ns();
        slot.change_state((before & 0xff) as u8, state, now);
        slot.state_since_ns[usize::from(part)].store(now, Ordering::Relaxed);
        step.store(before & !0xff | u64::from(state), Ordering::Release);
    }
}

extern "C" fn finalize(context: *mut c_void) -> c_int {
    let communicator = parent_of(context, Kind::Communicator);
    if let Some(slot) = communicator.and_then(|handle| ALL_COMMUNICATORS.get(handle.turn)) {
        slot.is_over.store(1, Ordering::Release);
    }
    SUCCESS
}

const NAME_OF_PLUGIN: *const c_char = c"nccl-rs".as_ptr();

const fn table<const V: c_int, Init, T: Copy + Into<u64>>(init: Init) -> Table<Init, T> {
    Table {
        name: NAME_OF_PLUGIN,
        init,
        start_event: start_event::<V, T>,
        stop_event,
        record_event_state: record_event_state::<V>,
        finalize,
    }
}

pub(super) static TABLE_V1: Table<InitV1, u8> = table::<1, _, _>(init_v1::<1> as InitV1);
pub(super) static TABLE_V2: Table<InitV1, u8> = table::<2, _, _>(init_v1::<2> as InitV1);
pub(super) static TABLE_V3: Table<InitV1, u8> = table::<3, _, _>(init_v1::<3> as InitV1);
pub(super) static TABLE_V4: Table<InitV4, u8> = table::<4, _, _>(init_v4 as InitV4);
pub(super) static TABLE_V5: Table<InitV5, u64> = table::<5, _, _>(init_v5::<5> as InitV5);
pub(super) static TABLE_V6: Table<InitV5, u64> = table::<6, _, _>(init_v5::<6> as InitV5);
pub(super) static TABLE_V7: Table<InitV5, u64> = table::<7, _, _>(init_v5::<7> as InitV5);
