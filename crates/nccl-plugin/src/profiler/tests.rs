//! The plugin, called as NCCL of each version calls it.

use std::ffi::{CStr, c_int, c_void};
use std::mem::offset_of;
use std::ptr::{null, null_mut};
use std::sync::atomic::AtomicI32;

use super::abi::{
    CollectiveV1, CollectiveV2, CollectiveV3, CollectiveV4, Descriptor, InitV1, InitV4, InitV5,
    KernelChannel, KernelChannelV4, KernelEnd, POINT_TO_POINT, PointToPointV1, PointToPointV2,
    PointToPointV4, ProxyOperation, ProxyStep, Table,
};
use super::*;

/// The table that NCCL finds.
fn table<Init, T>(version: u32) -> &'static Table<Init, T> {
    assert_eq!(*install(), Offer::Made);
    // SAFETY: the stand-in has this name, and a table of this version.
    unsafe {
        let handle = libc::dlopen(c"libnccl-profiler.so".as_ptr(), libc::RTLD_NOW);
        assert!(!handle.is_null());
        let name = CString::new(format!("ncclProfiler_v{version}")).unwrap();
        let table = libc::dlsym(handle, name.as_ptr());
        assert!(!table.is_null());
        &*table.cast()
    }
}

/// A descriptor with its body behind it.
#[repr(C)]
struct Whole<T, B> {
    kind: T,
    parent: *mut c_void,
    rank: c_int,
    body: Aligned<B>,
}

#[repr(C, align(8))]
struct Aligned<B>(B);

/// NCCL of one version, with one communicator.
struct Nccl<Init: 'static, T: 'static> {
    table: &'static Table<Init, T>,
    context: *mut c_void,
    rank: c_int,
}

impl<Init, T: Copy + TryFrom<u64>> Nccl<Init, T> {
    fn start<B>(&self, kind: u64, parent: *mut c_void, body: B) -> *mut c_void {
        assert_eq!(
            offset_of!(Whole<T, B>, body),
            offset_of!(Descriptor<T>, body)
        );
        let Ok(kind) = T::try_from(kind) else {
            panic!("a kind of this version");
        };
        let whole = Whole {
            kind,
            parent,
            rank: self.rank,
            body: Aligned(body),
        };
        let mut handle = null_mut();
        // SAFETY: as NCCL calls it.
        let code = unsafe {
            (self.table.start_event)(
                self.context,
                &raw mut handle,
                (&raw const whole).cast::<Descriptor<T>>(),
            )
        };
        assert_eq!(code, 0);
        handle
    }

    fn stop(&self, handle: *mut c_void) {
        assert_eq!((self.table.stop_event)(handle), 0);
    }

    fn state(&self, handle: *mut c_void, state: c_int) {
        // SAFETY: as NCCL calls it.
        let code = unsafe { (self.table.record_event_state)(handle, state, null()) };
        assert_eq!(code, 0);
    }

    fn end_kernel(&self, handle: *mut c_void, time: u64) {
        let end = KernelEnd { time };
        // SAFETY: as NCCL calls it.
        let code = unsafe {
            (self.table.record_event_state)(handle, abi::KERNEL_STOP, (&raw const end).cast())
        };
        assert_eq!(code, 0);
        self.stop(handle);
    }

    fn finalize(&self) {
        assert_eq!((self.table.finalize)(self.context), 0);
    }
}

fn nccl_v1(version: u32, rank: c_int) -> Nccl<InitV1, u8> {
    let table = table::<InitV1, u8>(version);
    let mut context = null_mut();
    // SAFETY: as NCCL calls it.
    let code = unsafe { (table.init)(&raw mut context, NCCLS_MASK.as_ptr()) };
    assert_eq!(code, 0);
    Nccl {
        table,
        context,
        rank,
    }
}

fn nccl_v4(name: &CStr, rank: c_int) -> Nccl<InitV4, u8> {
    let table = table::<InitV4, u8>(4);
    let mut context = null_mut();
    // SAFETY: as NCCL calls it.
    let code = unsafe {
        (table.init)(
            &raw mut context,
            NCCLS_MASK.as_ptr(),
            name.as_ptr(),
            1,
            1,
            8,
            rank,
            null(),
        )
    };
    assert_eq!(code, 0);
    Nccl {
        table,
        context,
        rank,
    }
}

fn nccl_v5(version: u32, name: &CStr, rank: c_int) -> Nccl<InitV5, u64> {
    let table = table::<InitV5, u64>(version);
    let mut context = null_mut();
    // SAFETY: as NCCL calls it.
    let code = unsafe {
        (table.init)(
            &raw mut context,
            1,
            NCCLS_MASK.as_ptr(),
            name.as_ptr(),
            1,
            8,
            rank,
            null(),
        )
    };
    assert_eq!(code, 0);
    Nccl {
        table,
        context,
        rank,
    }
}

fn all_reduce() -> CollectiveV4 {
    CollectiveV4 {
        sequence: 3,
        function: c"AllReduce".as_ptr(),
        send: null(),
        recv: null(),
        count: 1000,
        root: 0,
        data_type: c"ncclFloat32".as_ptr(),
        channels: 2,
        warps: 16,
        algorithm: c"RING".as_ptr(),
        protocol: c"SIMPLE".as_ptr(),
    }
}

fn transfer(peer: c_int, is_send: bool) -> ProxyOperation {
    ProxyOperation {
        pid: std::process::id().cast_signed(),
        channel: 1,
        peer,
        steps: 88,
        chunk_size: 1 << 19,
        is_send: is_send.into(),
    }
}

fn seen(name: &str, rank: usize) -> Option<Vec<ObservedOperation>> {
    let query = CommunicatorQuery {
        name,
        rank,
        world_size: 8,
        is_alone: true,
    };
    observe(query, 0).map(|seen| seen.operations)
}

/// The mask belongs to the process: tests that set it take turns.
static MASK: std::sync::Mutex<()> = std::sync::Mutex::new(());

/// Where NCCL reads it: one place per library.
static NCCLS_MASK: AtomicI32 = AtomicI32::new(-1);

const ALL: Events = Events {
    operations: true,
    transfers: true,
    steps: true,
    kernels: true,
};

#[test]
fn an_operation_its_kernel_and_its_transfers_are_seen() {
    let _turn = MASK.lock().unwrap();
    set_events(ALL);
    let nccl = nccl_v4(c"seen", 3);
    assert!(taken_by() >= Some(4));
    let operation = nccl.start(abi::COLLECTIVE, null_mut(), all_reduce());
    nccl.stop(operation);
    let kernel = |channel| {
        let body = KernelChannelV4 { channel, time: 0 };
        nccl.start(abi::KERNEL_CHANNEL, operation, body)
    };
    let (first, _second) = (kernel(0), kernel(63));
    nccl.stop(first);
    let receives = nccl.start(abi::PROXY_OPERATION, operation, transfer(2, false));
    let step = |step| nccl.start(abi::PROXY_STEP, receives, ProxyStep { step });
    let (one, two, three) = (step(0), step(1), step(2));
    nccl.stop(one);
    nccl.stop(two);
    nccl.state(three, abi::RECV_WAIT);
    let sends = nccl.start(abi::PROXY_OPERATION, operation, transfer(4, true));
    nccl.stop(sends);

    let operations = seen("seen", 3).unwrap();
    let [only] = &operations[..] else {
        panic!("{operations:?}");
    };
    assert_eq!(only.function, "AllReduce");
    assert_eq!((only.algorithm, only.protocol), ("RING", "SIMPLE"));
    assert_eq!((only.count, only.channels), (1000, 2));
    let expected = KernelChannels {
        started: 2,
        ended: 1,
    };
    assert_eq!(only.kernel, Some(expected));
    let [receives, sends] = &only.transfers[..] else {
        panic!("{only:?}");
    };
    assert_eq!((receives.peer, receives.is_send), (2, false));
    assert_eq!((receives.done, receives.steps), (Some(2), 88));
    assert_eq!(receives.waits_for, Some(WaitsFor::PeerData));
    assert!(!receives.is_over);
    assert!(sends.is_over && sends.is_send);

    nccl.finalize();
    assert_eq!(seen("seen", 3), None);
}

#[test]
fn every_version_gives_the_same() {
    let _turn = MASK.lock().unwrap();
    set_events(ALL);
    let is_all_reduce = |operations: Option<Vec<ObservedOperation>>| {
        let operations = operations.unwrap();
        let one = &operations[0];
        assert_eq!(one.function, "AllReduce");
        assert_eq!((one.algorithm, one.protocol), ("RING", "SIMPLE"));
        assert_eq!((one.count, one.channels), (1000, 2));
        let message = &operations[1];
        assert_eq!((message.function, message.peer), ("Recv", 5));
        assert_eq!((message.count, message.algorithm), (77, ""));
    };
    let v4 = all_reduce();
    let message = || PointToPointV4 {
        function: c"Recv".as_ptr(),
        buffer: null(),
        data_type: c"ncclFloat32".as_ptr(),
        count: 77,
        peer: 5,
        channels: 1,
    };
    for version in [5, 6, 7] {
        let nccl = nccl_v5(version, c"versions", 1);
        nccl.start(abi::COLLECTIVE, null_mut(), all_reduce());
        nccl.start(POINT_TO_POINT, null_mut(), message());
        is_all_reduce(seen("versions", 1));
        nccl.finalize();
    }
    let old_message = || PointToPointV2 {
        name: null(),
        hash: 0,
        function: c"Recv".as_ptr(),
        buffer: null(),
        data_type: c"ncclFloat32".as_ptr(),
        count: 77,
        peer: 5,
    };
    // Without a name and a rank at first: a rank that no other test has.
    let nccl = nccl_v1(3, 7);
    let v3 = CollectiveV3 {
        name: null(),
        hash: 0,
        common: all_reduce(),
    };
    nccl.start(abi::COLLECTIVE, null_mut(), v3);
    nccl.start(POINT_TO_POINT, null_mut(), old_message());
    is_all_reduce(seen("any name", 7));
    nccl.finalize();
    let nccl = nccl_v1(2, 7);
    let v2 = CollectiveV2 {
        name: null(),
        hash: 0,
        sequence: 3,
        function: v4.function,
        send: null(),
        recv: null(),
        count: v4.count,
        root: 0,
        data_type: v4.data_type,
        traffic: 9,
        channels: 2,
        warps: 16,
        algorithm: v4.algorithm,
        protocol: v4.protocol,
    };
    nccl.start(abi::COLLECTIVE, null_mut(), v2);
    nccl.start(POINT_TO_POINT, null_mut(), old_message());
    is_all_reduce(seen("any name", 7));
    nccl.finalize();
    let nccl = nccl_v1(1, 7);
    let v1 = CollectiveV1 {
        name: null(),
        hash: 0,
        sequence: 3,
        function: 4,
        send: null(),
        recv: null(),
        count: 1000,
        root: 0,
        data_type: 7,
        op: 0,
        traffic: 9,
        channels: 2,
        warps: 16,
        algorithm: 1,
        protocol: 2,
    };
    nccl.start(abi::COLLECTIVE, null_mut(), v1);
    let oldest_message = PointToPointV1 {
        name: null(),
        hash: 0,
        function: 7,
        buffer: null(),
        data_type: 7,
        count: 77,
        peer: 5,
    };
    nccl.start(POINT_TO_POINT, null_mut(), oldest_message);
    is_all_reduce(seen("any name", 7));
    nccl.finalize();
}

#[test]
fn the_mask_is_written_where_nccl_reads_it() {
    let _turn = MASK.lock().unwrap();
    set_events(Events::default());
    let value = || NCCLS_MASK.load(Ordering::SeqCst);
    let nccl = nccl_v4(c"mask", 3);
    assert_eq!(value(), 0);
    let operations = Events {
        operations: true,
        ..Events::default()
    };
    set_events(operations);
    assert_eq!(value(), 0b110);
    let steps = Events {
        steps: true,
        ..Events::default()
    };
    set_events(steps);
    assert_eq!(value(), 0b1_1110);
    // Kernels that are requested afterwards are ignored.
    set_events(ALL);
    let operation = nccl.start(abi::COLLECTIVE, null_mut(), all_reduce());
    let kernel = KernelChannelV4 {
        channel: 0,
        time: 0,
    };
    nccl.start(abi::KERNEL_CHANNEL, operation, kernel);
    assert_eq!(seen("mask", 3).unwrap()[0].kernel, None);
    nccl.finalize();
}

#[test]
fn a_communicator_of_several_hosts_brings_more_events() {
    let _turn = MASK.lock().unwrap();
    set_events(Events::default());
    add_events_between_hosts(Events {
        transfers: true,
        ..Events::default()
    });
    let value = || NCCLS_MASK.load(Ordering::SeqCst);
    let on_one = nccl_v5(7, c"on one host", 0);
    assert_eq!(value(), 0);
    let table = table::<InitV5, u64>(7);
    let mut context = null_mut();
    let (name, nodes) = (c"on two hosts".as_ptr(), 2);
    // SAFETY: as NCCL calls it.
    let code = unsafe {
        (table.init)(
            &raw mut context,
            1,
            NCCLS_MASK.as_ptr(),
            name,
            nodes,
            8,
            0,
            null(),
        )
    };
    assert_eq!((code, value()), (0, 0b1110));
    assert_eq!((table.finalize)(context), 0);
    // The events stay requested: another communicator of several hosts may come.
    assert_eq!(value(), 0b1110);
    on_one.finalize();
    add_events_between_hosts(Events::default());
}

#[test]
fn old_and_foreign_handles_are_ignored() {
    let _turn = MASK.lock().unwrap();
    set_events(ALL);
    let nccl = nccl_v4(c"old", 3);
    let operation = nccl.start(abi::COLLECTIVE, null_mut(), all_reduce());
    // Of a proxy that serves another process.
    let mut foreign = transfer(2, false);
    foreign.pid += 1;
    assert!(
        nccl.start(abi::PROXY_OPERATION, operation, foreign)
            .is_null()
    );
    let receives = nccl.start(abi::PROXY_OPERATION, operation, transfer(2, false));
    let step = nccl.start(abi::PROXY_STEP, receives, ProxyStep { step: 0 });
    // An unrequested kind, no parent, a parent of another kind, and values that are no handles.
    assert!(nccl.start(1 << 5, null_mut(), [0u64; 16]).is_null());
    let none = nccl.start(abi::PROXY_OPERATION, null_mut(), transfer(2, false));
    assert!(none.is_null());
    let none = nccl.start(abi::PROXY_STEP, operation, ProxyStep { step: 0 });
    assert!(none.is_null());
    let none = nccl.start(
        abi::KERNEL_CHANNEL,
        operation,
        KernelChannelV4 {
            channel: 200,
            time: 0,
        },
    );
    assert!(none.is_null());
    // Version 4 reports no operation of a group without a handle; of later versions nothing depends on it.
    let group = nccl.start(abi::GROUP, null_mut(), [0u64; 16]);
    assert!(!group.is_null());
    nccl.stop(group);
    let newer = nccl_v5(5, c"newer", 3);
    assert!(newer.start(abi::GROUP, null_mut(), [0u64; 16]).is_null());
    newer.finalize();
    for value in [0usize, 1, 77, usize::MAX, 0x4fff_ffff_ffff_ffff, 5 << 60] {
        let value = std::ptr::without_provenance_mut(value);
        nccl.stop(value);
        nccl.state(value, abi::RECV_WAIT);
    }
    // Their places are given out again.
    for _ in 0..events::OPERATIONS {
        nccl.start(abi::COLLECTIVE, null_mut(), all_reduce());
    }
    assert!(
        nccl.start(abi::PROXY_OPERATION, operation, transfer(2, false))
            .is_null()
    );
    nccl.stop(step);
    nccl.stop(receives);
    let operations = seen("old", 3).unwrap();
    assert!(operations.len() > events::OPERATIONS / 2);
    assert!(operations.iter().all(|one| one.transfers.is_empty()));
    nccl.finalize();
}

#[test]
fn transfers_that_are_lost_are_missed_and_their_handles_ignored() {
    let _turn = MASK.lock().unwrap();
    set_events(ALL);
    let nccl = nccl_v4(c"lost", 3);
    let operation = nccl.start(abi::COLLECTIVE, null_mut(), all_reduce());
    let first = nccl.start(abi::PROXY_OPERATION, operation, transfer(2, false));
    let step = nccl.start(abi::PROXY_STEP, first, ProxyStep { step: 0 });
    let query = CommunicatorQuery {
        name: "lost",
        rank: 3,
        world_size: 8,
        is_alone: true,
    };
    let seen = observe(query, 0).unwrap();
    assert!(!seen.operations[0].is_incomplete);
    let later = nccl.start(abi::COLLECTIVE, null_mut(), all_reduce());
    for _ in 0..events::TRANSFERS {
        nccl.start(abi::PROXY_OPERATION, later, transfer(4, true));
    }
    nccl.state(step, abi::RECV_WAIT);
    nccl.stop(step);
    nccl.stop(first);
    let seen = observe(query, 0).unwrap();
    assert!(seen.operations[0].is_incomplete);
    assert!(!seen.operations[1].is_incomplete);
    let later = &seen.operations[1].transfers;
    assert_eq!(later.len(), events::TRANSFERS);
    assert!(later.iter().all(|one| one.done.is_none() && !one.is_over));
    nccl.finalize();
}

#[test]
fn the_time_of_a_state_and_of_the_network_is_taken() {
    let _turn = MASK.lock().unwrap();
    set_events(ALL);
    let pause = || std::thread::sleep(std::time::Duration::from_millis(40));
    let nccl = nccl_v4(c"times", 3);
    let operation = nccl.start(abi::COLLECTIVE, null_mut(), all_reduce());
    let sends = nccl.start(abi::PROXY_OPERATION, operation, transfer(2, true));
    let step = |step| nccl.start(abi::PROXY_STEP, sends, ProxyStep { step });
    let (one, two) = (step(0), step(1));
    nccl.state(one, abi::SEND_GPU_WAIT);
    pause();
    nccl.state(one, abi::SEND_WAIT);
    nccl.state(two, abi::SEND_WAIT);
    pause();
    nccl.stop(one);
    pause();
    let sent = seen("times", 3).unwrap()[0].transfers[0].clone();
    assert_eq!(sent.waits_for, Some(WaitsFor::NetworkSend));
    // Two of three pauses, not one per step.
    assert!((80..sent.age_ms).contains(&sent.network_ms), "{sent:?}");
    assert!(sent.network_ms <= sent.age_ms - 40, "{sent:?}");
    assert!(
        sent.waits_ms >= 80 && sent.still_ms < sent.waits_ms,
        "{sent:?}"
    );
    nccl.stop(two);
    pause();
    let sent = seen("times", 3).unwrap()[0].transfers[0].clone();
    assert!(sent.network_ms <= sent.age_ms - 80, "{sent:?}");
    nccl.finalize();
}

#[test]
fn a_finished_kernel_is_returned_once_with_its_time() {
    let _turn = MASK.lock().unwrap();
    set_events(ALL);
    let nccl = nccl_v5(7, c"finished", 3);
    let begin = |operation, channel, time| {
        nccl.start(
            abi::KERNEL_CHANNEL,
            operation,
            KernelChannelV4 { channel, time },
        )
    };
    let finished = || {
        let mut all = take_finished();
        all.retain(|one| one.communicator == "finished");
        all
    };
    let operation = nccl.start(abi::COLLECTIVE, null_mut(), all_reduce());
    let (one, two) = (begin(operation, 0, 5000), begin(operation, 1, 4000));
    nccl.end_kernel(one, 9000);
    assert_eq!(finished(), []);
    nccl.end_kernel(two, 7000);
    let expected = FinishedOperation {
        communicator: String::from("finished"),
        world_size: 8,
        function: "AllReduce",
        peer: None,
        algorithm: "RING",
        protocol: "SIMPLE",
        bytes: 4000,
        kernel_ns: 5000,
    };
    assert_eq!(finished(), [expected]);
    assert_eq!(finished(), []);
    nccl.finalize();
    // Version 3 has no times.
    let nccl = nccl_v1(3, 7);
    let v3 = CollectiveV3 {
        name: null(),
        hash: 0,
        common: all_reduce(),
    };
    let operation = nccl.start(abi::COLLECTIVE, null_mut(), v3);
    let kernel = nccl.start(abi::KERNEL_CHANNEL, operation, KernelChannel { channel: 0 });
    nccl.stop(kernel);
    assert_eq!(seen("any name", 7).unwrap()[0].kernel.unwrap().ended, 1);
    nccl.finalize();
}

#[test]
fn before_version_4_a_wait_for_credit_is_not_told_from_one_for_the_gpu() {
    let _turn = MASK.lock().unwrap();
    set_events(ALL);
    let nccl = nccl_v1(3, 7);
    let v3 = CollectiveV3 {
        name: null(),
        hash: 0,
        common: all_reduce(),
    };
    let operation = nccl.start(abi::COLLECTIVE, null_mut(), v3);
    let sends = nccl.start(abi::PROXY_OPERATION, operation, transfer(2, true));
    let step = nccl.start(abi::PROXY_STEP, sends, ProxyStep { step: 0 });
    nccl.state(step, abi::SEND_GPU_WAIT);
    let sent = seen("any name", 7).unwrap()[0].transfers[0].clone();
    assert_eq!(sent.waits_for, Some(WaitsFor::OwnGpuOrPeerCredit));
    nccl.finalize();
}

/// Offsets in the headers of NCCL, counted by hand.
#[test]
fn the_layouts_are_those_of_the_headers() {
    macro_rules! offsets {
        ($type:ty: $($field:ident $offset:expr),*) => {
            $(assert_eq!(offset_of!($type, $field), $offset, stringify!($type, $field));)*
        };
    }
    offsets!(Descriptor<u8>: kind 0, parent 8, rank 16, body 24);
    offsets!(Descriptor<u64>: kind 0, parent 8, rank 16, body 24);
    offsets!(CollectiveV1: name 0, hash 8, sequence 16, function 24, send 32, recv 40, count 48, root 56, data_type 60, op 64,
        traffic 72, channels 80, warps 81, algorithm 82, protocol 83);
    offsets!(CollectiveV2: name 0, hash 8, sequence 16, function 24, send 32, recv 40, count 48, root 56, data_type 64,
        traffic 72, channels 80, warps 81, algorithm 88, protocol 96);
    offsets!(CollectiveV3: name 0, hash 8, common 16);
    offsets!(CollectiveV4: sequence 0, function 8, send 16, recv 24, count 32, root 40, data_type 48, channels 56, warps 57,
        algorithm 64, protocol 72);
    offsets!(PointToPointV1: name 0, hash 8, function 16, buffer 24, data_type 32, count 40, peer 48);
    offsets!(PointToPointV2: name 0, hash 8, function 16, buffer 24, data_type 32, count 40, peer 48);
    offsets!(PointToPointV4: function 0, buffer 8, data_type 16, count 24, peer 32, channels 36);
    offsets!(KernelChannelV4: channel 0, time 8);
    offsets!(ProxyOperation: pid 0, channel 4, peer 8, steps 12, chunk_size 16, is_send 20);
}

#[test]
fn two_communicators_of_one_name_are_not_told_apart() {
    let _turn = MASK.lock().unwrap();
    let first = nccl_v5(7, c"twice", 3);
    assert_eq!(seen("twice", 3), Some(Vec::new()));
    let second = nccl_v5(7, c"twice", 3);
    assert_eq!(seen("twice", 3), None);
    first.finalize();
    assert_eq!(seen("twice", 3), Some(Vec::new()));
    second.finalize();
}

#[test]
fn a_communicator_is_found_beside_an_aborted_one_of_its_name() {
    let _turn = MASK.lock().unwrap();
    set_events(ALL);
    // Aborted, and not freed yet.
    let old = nccl_v4(c"again", 3);
    old.start(abi::COLLECTIVE, null_mut(), all_reduce());
    let new = nccl_v4(c"again", 3);
    let since = monotonic_ns();
    let query = CommunicatorQuery {
        name: "again",
        rank: 3,
        world_size: 8,
        is_alone: true,
    };
    assert_eq!(observe(query, since), None);
    new.start(abi::COLLECTIVE, null_mut(), all_reduce());
    assert_eq!(observe(query, since).unwrap().operations.len(), 1);
    // The program may mean either.
    let is_shared = CommunicatorQuery {
        is_alone: false,
        ..query
    };
    assert_eq!(observe(is_shared, since), None);
    old.start(abi::COLLECTIVE, null_mut(), all_reduce());
    assert_eq!(observe(query, since), None);
    old.finalize();
    assert_eq!(observe(query, since).unwrap().operations.len(), 1);
    new.finalize();
}

#[test]
fn readers_beside_writers_see_whole_operations() {
    let _turn = MASK.lock().unwrap();
    set_events(ALL);
    let is_over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for (rank, function) in [(4, c"AllReduce"), (5, c"Broadcast")] {
            let is_over = &is_over;
            scope.spawn(move || {
                let nccl = nccl_v5(7, c"whole", rank);
                let mut body = all_reduce();
                body.function = function.as_ptr();
                body.count = rank.unsigned_abs() as usize;
                while !is_over.load(Ordering::Relaxed) {
                    let body = CollectiveV4 { ..body };
                    nccl.start(abi::COLLECTIVE, null_mut(), body);
                }
                nccl.finalize();
            });
        }
        let (mut total, mut torn) = (0, Vec::new());
        while total < 200_000 && torn.is_empty() {
            for (rank, function) in [(4, "AllReduce"), (5, "Broadcast")] {
                let operations = seen("whole", rank).unwrap_or_default();
                total += operations.len();
                let is_torn =
                    |one: &ObservedOperation| (one.function, one.count) != (function, rank as u64);
                torn.extend(operations.into_iter().filter(is_torn));
            }
        }
        // Before anything can panic: the scope waits for the threads.
        is_over.store(true, Ordering::Relaxed);
        assert!(torn.is_empty(), "{torn:?}");
    });
}
