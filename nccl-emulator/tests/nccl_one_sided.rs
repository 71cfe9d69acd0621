//! Windows, and operations that only one side calls.

mod ranks;

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use cudarc::driver::result;
use nccl_emulator::ViolationKind;
use nccl_sys::{
    NCCL_CONFIG_INITIALIZER, NCCL_SHRINK_ABORT, NCCL_WIN_COLL_SYMMETRIC, ncclDataType_t as Kind,
    ncclWaitSignalDesc_t, ncclWindow_t,
};
use ranks::{Rank, alone, last_error, nccl, processes, processes_ending, threads, unique_id};

/// Memory of `ncclMemAlloc`, registered as a window with all ranks.
struct Shown {
    address: *mut c_void,
    window: ncclWindow_t,
    bytes: usize,
}

impl Shown {
    fn new(rank: &Rank, bytes: usize) -> Self {
        let address = memory(rank, bytes);
        let mut window = null_mut();
        let code = register(rank, address, bytes, &mut window);
        assert_eq!(code, 0, "{}", last_error());
        assert!(!window.is_null());
        Self {
            address,
            window,
            bytes,
        }
    }

    fn write(&self, values: &[u8]) {
        // SAFETY: the memory is as large.
        unsafe { result::memcpy_htod_sync(self.address.addr() as u64, values) }.unwrap();
    }

    fn read(&self) -> Vec<u8> {
        let mut values = vec![0; self.bytes];
        // SAFETY: the memory is as large.
        unsafe { result::memcpy_dtoh_sync(&mut values, self.address.addr() as u64) }.unwrap();
        values
    }

    fn end(self, rank: &Rank) {
        assert_eq!(nccl!(ncclCommWindowDeregister(rank.comm, self.window)), 0);
        assert_eq!(nccl!(ncclMemFree(self.address)), 0);
    }
}

fn memory(rank: &Rank, bytes: usize) -> *mut c_void {
    rank.gpu.bind_to_thread().unwrap();
    let mut address = null_mut();
    assert_eq!(nccl!(ncclMemAlloc(&mut address, bytes)), 0);
    address
}

fn register(rank: &Rank, address: *mut c_void, bytes: usize, window: &mut ncclWindow_t) -> u32 {
    let flags = NCCL_WIN_COLL_SYMMETRIC;
    nccl!(ncclCommWindowRegister(
        rank.comm, address, bytes, window, flags
    ))
}

fn put(rank: &Rank, from: *mut c_void, count: usize, peer: i32, to: &Shown, at: usize) -> u32 {
    let (kind, stream) = (Kind::ncclUint8, rank.cuda_stream());
    nccl!(ncclPutSignal(
        from, count, kind, peer, to.window, at, 0, 0, 0, rank.comm, stream
    ))
}

fn signal(rank: &Rank, peer: i32, index: i32, context: i32) -> u32 {
    let stream = rank.cuda_stream();
    nccl!(ncclSignal(peer, index, context, 0, rank.comm, stream))
}

fn from(peer: i32, count: i32) -> ncclWaitSignalDesc_t {
    ncclWaitSignalDesc_t {
        opCnt: count,
        peer,
        sigIdx: 0,
        ctx: 0,
    }
}

fn wait(rank: &Rank, descriptors: &mut [ncclWaitSignalDesc_t]) -> u32 {
    let (count, list) = (descriptors.len() as i32, descriptors.as_mut_ptr());
    nccl!(ncclWaitSignal(count, list, rank.comm, rank.cuda_stream()))
}

/// Every rank puts its values into its own part of every rank's window.
fn everyone_to_everyone(rank: &Rank) {
    const EACH: usize = 300_000;
    let ranks = rank.ranks as usize;
    let source = Shown::new(rank, EACH);
    let target = Shown::new(rank, EACH * ranks);
    for turn in 0..3u8 {
        source.write(&vec![rank.rank as u8 * 10 + turn; EACH]);
        assert_eq!(nccl!(ncclGroupStart()), 0);
        for peer in 0..rank.ranks {
            let at = EACH * rank.rank as usize;
            let code = put(rank, source.address, EACH, peer, &target, at);
            assert_eq!(code, 0, "{}", last_error());
        }
        assert_eq!(nccl!(ncclGroupEnd()), 0, "{}", last_error());
        let mut all: Vec<_> = (0..rank.ranks).map(|peer| from(peer, 1)).collect();
        assert_eq!(wait(rank, &mut all), 0, "{}", last_error());
        rank.sync();
        let values = target.read();
        for (peer, part) in values.chunks(EACH).enumerate() {
            let expected = peer as u8 * 10 + turn;
            assert!(part.iter().all(|&value| value == expected));
        }
        // No rank writes again before all ranks have read.
        for peer in 0..rank.ranks {
            assert_eq!(signal(rank, peer, 0, 0), 0);
        }
        assert_eq!(wait(rank, &mut all), 0);
        rank.sync();
    }
    target.end(rank);
    source.end(rank);
}

#[test]
fn everyone_puts_to_everyone_and_waits_for_all() {
    alone("everyone_puts_to_everyone_and_waits_for_all", &[], || {
        threads(4, everyone_to_everyone);
        assert!(nccl_emulator::violations().is_empty());
    });
}

#[test]
fn processes_put_to_each_other() {
    processes("processes_put_to_each_other", 3, &[], |process| {
        let rank = process.join();
        everyone_to_everyone(&rank);
        assert!(races().is_empty());
        rank.destroy();
    });
}

#[test]
fn a_wait_takes_as_many_signals_as_it_waits_for() {
    alone("a_wait_takes_as_many_signals_as_it_waits_for", &[], || {
        let looked = Barrier::new(2);
        threads(2, |rank| {
            if rank.rank == 1 {
                for _ in 0..3 {
                    assert_eq!(signal(rank, 0, 0, 0), 0, "{}", last_error());
                }
                rank.sync();
                looked.wait();
                assert_eq!(signal(rank, 0, 0, 0), 0);
                rank.sync();
                return;
            }
            assert_eq!(wait(rank, &mut [from(1, 1), from(1, 1)]), 0);
            rank.sync();
            // One signal is left, and the wait is for two.
            assert_eq!(wait(rank, &mut [from(1, 2)]), 0);
            thread::sleep(Duration::from_millis(50));
            assert!(!rank.is_idle());
            looked.wait();
            rank.sync();
        });
    });
}

/// The texts of the races found since the last call.
fn races() -> Vec<String> {
    let all = nccl_emulator::violations();
    nccl_emulator::clear_violations();
    let races = all.iter().filter(|one| one.kind() == ViolationKind::Race);
    assert_eq!(races.clone().count(), all.len(), "{all:?}");
    races.map(ToString::to_string).collect()
}

/// Makes the first one-sided operation, which connects all ranks.
fn connect(rank: &Rank) {
    assert_eq!(signal(rank, rank.rank, 0, 0), 0, "{}", last_error());
    assert_eq!(wait(rank, &mut [from(rank.rank, 1)]), 0);
    rank.sync();
}

/// Rank 0 puts, and rank 1 looks too early. `meet` returns when both ranks are at the same point.
fn looks_too_early(rank: &Rank, meet: impl Fn(&str)) {
    let source = Shown::new(rank, 4096);
    let target = Shown::new(rank, 4096);
    connect(rank);
    let puts = |at: usize, bytes: usize| {
        if rank.rank == 0 {
            assert_eq!(put(rank, source.address, bytes, 1, &target, at), 0);
            rank.sync();
        }
    };
    let copy = |from: usize, to: usize, bytes: usize| {
        let [from, to] = [from, to].map(|at| target.address.addr() as u64 + at as u64);
        // SAFETY: both are inside of the window.
        unsafe { result::memcpy_dtod_async(to, from, bytes, rank.stream.cu_stream()) }.unwrap();
        rank.sync();
    };
    puts(100, 50);
    meet("the first is there");
    if rank.rank == 1 {
        // Beside it.
        copy(0, 2048, 100);
        copy(150, 2048, 100);
        assert!(races().is_empty());
        copy(149, 2048, 10);
        let found = races();
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(
            found[0].contains("bytes 149 to 150 of the window"),
            "{found:?}"
        );
        assert!(found[0].contains("rank 0's put"), "{found:?}");
        // Each put is reported once.
        target.read();
        assert!(races().is_empty());
        assert_eq!(wait(rank, &mut [from(0, 1)]), 0);
        target.read();
        assert!(races().is_empty());
    }
    meet("the first was seen");
    puts(0, 8);
    puts(8, 8);
    puts(16, 8);
    meet("three are there");
    if rank.rank == 1 {
        assert_eq!(wait(rank, &mut [from(0, 2)]), 0);
        rank.sync();
        copy(0, 2048, 16);
        assert!(races().is_empty());
        // What is overwritten may be lost.
        copy(2048, 16, 1);
        let found = races();
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("bytes 16 to 17"), "{found:?}");
        assert_eq!(wait(rank, &mut [from(0, 1)]), 0);
        rank.sync();
    }
    meet("three were seen");
    puts(0, 1024);
    meet("the last is there");
    // An operation of NCCL uses it, too.
    let (kind, stream) = (Kind::ncclUint8, rank.cuda_stream());
    let here = match rank.rank {
        0 => source.address,
        _ => target.address,
    };
    let code = nccl!(ncclAllReduce(
        here,
        here,
        4,
        kind,
        nccl_sys::ncclRedOp_t::ncclMax,
        rank.comm,
        stream
    ));
    assert_eq!(code, 0, "{}", last_error());
    rank.sync();
    if rank.rank == 1 {
        let found = races();
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("bytes 0 to 4"), "{found:?}");
        assert_eq!(wait(rank, &mut [from(0, 1)]), 0);
        rank.sync();
    }
    target.end(rank);
    source.end(rank);
}

#[test]
fn a_window_that_is_used_before_the_signal_is_waited_for_is_a_race() {
    let name = "a_window_that_is_used_before_the_signal_is_waited_for_is_a_race";
    alone(name, &[], || {
        let both = Barrier::new(2);
        threads(2, |rank| {
            looks_too_early(rank, |_| {
                both.wait();
            });
        });
        assert!(races().is_empty());
    });
}

#[test]
fn a_race_between_processes_is_found_by_the_one_that_looks() {
    let name = "a_race_between_processes_is_found_by_the_one_that_looks";
    processes(name, 2, &[], |process| {
        let rank = process.join();
        looks_too_early(&rank, |point| {
            process.mark(&format!("{point}.{}", rank.rank));
            process.wait_for(&format!("{point}.{}", 1 - rank.rank));
        });
        assert!(races().is_empty());
        rank.destroy();
    });
}

/// Two ranks of a communicator with two contexts and three signals in each, and a window to put into. `meet` returns when both
/// are there.
fn pair(name: &str, body: impl Fn(&Rank, &Shown, &Shown, &dyn Fn()) + Sync) {
    alone(name, &[], || {
        let (both, id) = (Barrier::new(2), unique_id());
        thread::scope(|scope| {
            for number in 0..2 {
                let (both, body) = (&both, &body);
                scope.spawn(move || {
                    let mut rank = Rank::alone(2, number);
                    let mut config = NCCL_CONFIG_INITIALIZER;
                    (config.numRmaCtx, config.numRmaSig) = (2, 3);
                    let comm = &mut rank.comm;
                    let code = nccl!(ncclCommInitRankConfig(comm, 2, id, number, &mut config));
                    assert_eq!(code, 0, "{}", last_error());
                    let (source, target) = (Shown::new(&rank, 4096), Shown::new(&rank, 4096));
                    connect(&rank);
                    body(&rank, &source, &target, &|| {
                        both.wait();
                    });
                    rank.sync();
                });
            }
        });
    });
}

/// Puts `bytes` of rank 0 at `at` in rank 1's window, followed by a signal.
fn put_with(rank: &Rank, source: &Shown, to: &Shown, (at, bytes): (usize, usize), of: (i32, i32)) {
    let (kind, stream, (index, context)) = (Kind::ncclUint8, rank.cuda_stream(), of);
    let from = source.address;
    let code = nccl!(ncclPutSignal(
        from, bytes, kind, 1, to.window, at, index, context, 0, rank.comm, stream
    ));
    assert_eq!(code, 0, "{}", last_error());
}

/// As [`pair`]; at first, rank 0 puts `bytes` at `at`.
fn after_a_put(name: &str, range: (usize, usize), body: impl Fn(&Rank, &Shown, &dyn Fn()) + Sync) {
    pair(name, |rank, source, target, meet| {
        if rank.rank == 0 {
            put_with(rank, source, target, range, (0, 0));
            rank.sync();
        }
        meet();
        body(rank, target, meet);
        meet();
    });
}

fn wait_for(rank: &Rank, (index, context): (i32, i32)) {
    let wanted = ncclWaitSignalDesc_t {
        sigIdx: index,
        ctx: context,
        ..from(0, 1)
    };
    assert_eq!(wait(rank, &mut [wanted]), 0);
    rank.sync();
}

#[test]
fn a_later_signal_of_the_same_context_shows_a_put_and_one_of_another_does_not() {
    let name = "a_later_signal_of_the_same_context_shows_a_put_and_one_of_another_does_not";
    pair(name, |rank, source, target, meet| {
        if rank.rank == 0 {
            put_with(rank, source, target, (0, 8), (0, 0));
            put_with(rank, source, target, (8, 8), (2, 0));
            put_with(rank, source, target, (16, 8), (0, 1));
            assert_eq!(signal(rank, 1, 1, 0), 0);
            rank.sync();
        }
        meet();
        if rank.rank == 1 {
            let read = |at: usize| {
                let from = target.address.addr() as u64 + at as u64;
                // SAFETY: both are as long.
                unsafe { result::memcpy_dtoh_sync(&mut [0u8; 8], from) }.unwrap();
                races().len()
            };
            wait_for(rank, (1, 0));
            assert_eq!([read(0), read(8), read(16)], [0, 0, 1]);
            wait_for(rank, (0, 1));
            assert_eq!(read(16), 0);
        }
        meet();
    });
}

#[test]
fn a_put_of_nothing_and_one_before_the_registration_are_no_races() {
    let name = "a_put_of_nothing_and_one_before_the_registration_are_no_races";
    pair(name, |rank, source, target, meet| {
        if rank.rank == 0 {
            put_with(rank, source, target, (8, 0), (0, 0));
            rank.sync();
        }
        meet();
        if rank.rank == 1 {
            target.read();
            assert!(races().is_empty());
        }
        meet();
        if rank.rank == 0 {
            put_with(rank, source, target, (8, 8), (0, 0));
            rank.sync();
        }
        meet();
        // Nobody has waited, and the memory has a new life as another window.
        assert_eq!(nccl!(ncclCommWindowDeregister(rank.comm, target.window)), 0);
        let mut again = null_mut();
        let code = register(rank, target.address, target.bytes, &mut again);
        assert_eq!(code, 0, "{}", last_error());
        target.read();
        assert!(races().is_empty());
        let again = Shown {
            window: again,
            ..*target
        };
        meet();
        if rank.rank == 0 {
            put_with(rank, source, &again, (8, 8), (0, 0));
            rank.sync();
        }
        meet();
        if rank.rank == 1 {
            again.read();
            assert_eq!(races().len(), 1);
        }
        meet();
    });
}

#[test]
fn the_gaps_between_rows_are_not_used() {
    use cudarc::driver::sys;

    let name = "the_gaps_between_rows_are_not_used";
    after_a_put(name, (64, 8), |rank, target, _| {
        if rank.rank == 1 {
            // Four rows with a pitch of 64 bytes, to behind them.
            let rows = |width: usize| {
                let device = sys::CUmemorytype_enum::CU_MEMORYTYPE_DEVICE;
                let at = target.address.addr() as u64;
                let description = sys::CUDA_MEMCPY2D {
                    srcXInBytes: 0,
                    srcY: 0,
                    srcMemoryType: device,
                    srcHost: std::ptr::null(),
                    srcDevice: at + 16,
                    srcArray: null_mut(),
                    srcPitch: 64,
                    dstXInBytes: 0,
                    dstY: 0,
                    dstMemoryType: device,
                    dstHost: null_mut(),
                    dstDevice: at + 2048,
                    dstArray: null_mut(),
                    dstPitch: 64,
                    WidthInBytes: width,
                    Height: 4,
                };
                // SAFETY: all rows are inside of the window.
                unsafe { sys::cuMemcpy2DAsync_v2(&raw const description, rank.stream.cu_stream()) }
                    .result()
                    .unwrap();
                rank.sync();
                races().len()
            };
            assert_eq!(rows(48), 0);
            assert_eq!(rows(49), 1);
        }
    });
}

#[test]
fn what_a_revoke_leaves_in_a_window_is_no_race() {
    let name = "what_a_revoke_leaves_in_a_window_is_no_race";
    after_a_put(name, (0, 8), |rank, target, _| {
        if rank.rank == 1 {
            // The second signal never comes.
            let mut two = [from(0, 2)];
            assert_eq!(wait(rank, &mut two), 0);
        }
        assert_eq!(nccl!(ncclCommRevoke(rank.comm, 0)), 0, "{}", last_error());
        rank.sync();
        target.read();
        assert!(races().is_empty());
    });
}

#[test]
fn after_a_revoke_nobody_can_wait_so_that_nothing_is_a_race() {
    let name = "after_a_revoke_nobody_can_wait_so_that_nothing_is_a_race";
    after_a_put(name, (0, 8), |rank, target, _| {
        assert_eq!(nccl!(ncclCommRevoke(rank.comm, 0)), 0, "{}", last_error());
        target.read();
        assert!(races().is_empty());
    });
}

/// Rank 1 ends its part of the communicator, while the other rank of the process still has it.
fn ends_first(name: &str, end: fn(&Rank) -> u32) {
    after_a_put(name, (0, 8), |rank, target, meet| {
        if rank.rank == 1 {
            assert_eq!(end(rank), 0);
            target.read();
            assert!(races().is_empty());
        }
        meet();
        if rank.rank == 0 {
            assert_eq!(end(rank), 0);
        }
    });
}

#[test]
fn after_an_abort_nobody_can_wait_so_that_nothing_is_a_race() {
    let name = "after_an_abort_nobody_can_wait_so_that_nothing_is_a_race";
    ends_first(name, Rank::abort);
}

#[test]
fn after_a_destroy_nobody_can_wait_so_that_nothing_is_a_race() {
    let name = "after_a_destroy_nobody_can_wait_so_that_nothing_is_a_race";
    ends_first(name, |rank| nccl!(ncclCommDestroy(rank.comm)));
}

#[test]
fn what_a_shrink_that_aborts_leaves_in_a_window_is_no_race() {
    let name = "what_a_shrink_that_aborts_leaves_in_a_window_is_no_race";
    after_a_put(name, (0, 8), |rank, target, _| {
        if rank.rank == 1 {
            // The second signal never comes.
            assert_eq!(wait(rank, &mut [from(0, 2)]), 0);
            let (mut gone, mut child) = ([0], null_mut());
            let flags = NCCL_SHRINK_ABORT;
            let config = null_mut();
            let code = nccl!(ncclCommShrink(
                rank.comm,
                gone.as_mut_ptr(),
                1,
                &mut child,
                config,
                flags
            ));
            assert_eq!(code, 0, "{}", last_error());
            rank.sync();
            target.read();
            assert!(races().is_empty());
            assert_eq!(nccl!(ncclCommDestroy(child)), 0);
        }
    });
}

/// An abort ends a wait, and what follows on the stream then uses the window.
#[test]
fn what_follows_a_wait_that_an_abort_ends_is_no_race() {
    let name = "what_follows_a_wait_that_an_abort_ends_is_no_race";
    after_a_put(name, (0, 50), |rank, target, _| {
        if rank.rank == 0 {
            assert_eq!(rank.abort(), 0);
            return;
        }
        // The second signal never comes.
        assert_eq!(wait(rank, &mut [from(0, 2)]), 0);
        let at = target.address.addr() as u64;
        // SAFETY: both are inside of the window.
        unsafe { result::memcpy_dtod_async(at + 2048, at, 50, rank.stream.cu_stream()) }.unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(50));
                assert_eq!(rank.abort(), 0);
            });
            rank.sync();
        });
        assert!(races().is_empty());
    });
}

#[test]
fn signals_of_other_numbers_and_contexts_are_others() {
    alone(
        "signals_of_other_numbers_and_contexts_are_others",
        &[],
        || {
            let mut rank = Rank::alone(1, 0);
            let mut config = NCCL_CONFIG_INITIALIZER;
            (config.numRmaCtx, config.numRmaSig) = (2, 3);
            let (id, ranks) = (unique_id(), 1);
            let code = nccl!(ncclCommInitRankConfig(
                &mut rank.comm,
                ranks,
                id,
                0,
                &mut config
            ));
            assert_eq!(code, 0);
            let there = [(0, 0), (2, 0), (1, 1), (2, 1)];
            for (index, context) in there {
                assert_eq!(signal(&rank, 0, index, context), 0, "{}", last_error());
            }
            let mut all = there.map(|(index, context)| ncclWaitSignalDesc_t {
                sigIdx: index,
                ctx: context,
                ..from(0, 1)
            });
            assert_eq!(wait(&rank, &mut all), 0);
            rank.sync();
            assert_eq!(signal(&rank, 0, 3, 0), 4);
            assert_eq!(signal(&rank, 0, 0, 2), 4);
            assert_eq!(signal(&rank, 0, -1, 0), 4);
            // This signal has index 1, and the wait is for index 0.
            assert_eq!(signal(&rank, 0, 1, 0), 0);
            all[0].sigIdx = 0;
            assert_eq!(wait(&rank, &mut all[..1]), 0);
            thread::sleep(Duration::from_millis(50));
            assert!(!rank.is_idle());
            assert_eq!(rank.abort(), 0);
            rank.sync();
        },
    );
}

#[test]
fn what_one_sided_operations_are_given_is_checked() {
    alone(
        "what_one_sided_operations_are_given_is_checked",
        &[],
        || {
            threads(1, |rank| {
                let shown = Shown::new(rank, 8192);
                let hidden = rank.memory(&[0u8; 16]);
                let check = |code: u32, text: &str| {
                    assert_eq!((code, last_error().as_str()), (4, text));
                };
                let nowhere = Shown {
                    window: null_mut(),
                    ..shown
                };
                let own = shown.address;
                check(
                    put(rank, own, 1, 1, &shown, 0),
                    "PutSignal : invalid root 1 (root should be in the 0..1 range)",
                );
                check(
                    put(rank, own, 1, 0, &nowhere, 0),
                    "ncclPutSignal: peerWin is NULL",
                );
                check(
                    put(rank, null_mut(), 1, 0, &shown, 0),
                    "ncclPutSignal: srcBuff is NULL",
                );
                check(
                    put(rank, hidden.ptr(), 1, 0, &shown, 0),
                    "ncclPutSignal: srcWinHost is not in a valid symmetric window",
                );
                check(wait(rank, &mut []), "ncclWaitSignal: invalid arguments");
                check(
                    wait(rank, &mut [from(0, 0)]),
                    "ncclWaitSignal: descriptor 0 has invalid opCnt 0",
                );
                let (comm, stream) = (rank.comm, rank.cuda_stream());
                check(
                    nccl!(ncclSignal(0, 0, 0, 7, comm, stream)),
                    "Flags 7 is invalid (must be 0)",
                );
                check(
                    nccl!(ncclSignal(0, 0, 0, 0, null_mut(), stream)),
                    "Signal : comm argument is NULL",
                );
                // The end of a group returns the errors of its calls.
                assert_eq!(nccl!(ncclGroupStart()), 0);
                assert_eq!(put(rank, null_mut(), 1, 0, &shown, 0), 4);
                assert_eq!(nccl!(ncclGroupEnd()), 4);
                shown.end(rank);
            });
        },
    );
}

#[test]
fn a_window_needs_memory_that_can_be_shown() {
    alone("a_window_needs_memory_that_can_be_shown", &[], || {
        threads(1, |rank| {
            let (own, plain) = (memory(rank, 16384), rank.memory(&[0u8; 8192]));
            let mut window = std::ptr::dangling_mut();
            assert_eq!(register(rank, plain.ptr(), 4096, &mut window), 1);
            assert!(window.is_null());
            assert_eq!(
                register(rank, own.wrapping_byte_add(256), 4096, &mut window),
                4
            );
            assert_eq!(last_error(), "Window address must be suitably aligned.");
            assert_eq!(register(rank, null_mut(), 4096, &mut window), 4);
            assert_eq!(register(rank, own, 0, &mut window), 4);
            let inside = own.wrapping_byte_add(4096);
            assert_eq!(register(rank, inside, 4096, &mut window), 0);
            let mut back = null_mut();
            assert_eq!(nccl!(ncclWinGetUserPtr(rank.comm, window, &mut back)), 0);
            assert_eq!(back, inside);
            assert_eq!(
                nccl!(ncclWinGetUserPtr(rank.comm, null_mut(), &mut back)),
                4
            );
            assert_eq!(nccl!(ncclCommWindowDeregister(rank.comm, null_mut())), 0);
            assert_eq!(nccl!(ncclCommWindowDeregister(rank.comm, window)), 0);
            assert!(nccl_emulator::violations().is_empty());
            // The window is already deregistered.
            assert_eq!(nccl!(ncclCommWindowDeregister(rank.comm, window)), 3);
            assert_eq!(nccl!(ncclWinGetUserPtr(rank.comm, window, &mut back)), 3);
            assert_eq!(nccl_emulator::violations().len(), 2);
            assert_eq!(nccl!(ncclMemFree(own)), 0);
        });
    });
}

#[test]
fn a_communicator_without_windows_answers_with_none() {
    let off = [("NCCL_WIN_ENABLE", "0")];
    alone(
        "a_communicator_without_windows_answers_with_none",
        &off,
        || {
            // The call returns at once: the other rank need not make it.
            threads(2, |rank| {
                if rank.rank == 0 {
                    let own = memory(rank, 4096);
                    let mut window = std::ptr::dangling_mut();
                    assert_eq!(register(rank, own, 4096, &mut window), 0);
                    assert!(window.is_null());
                    assert_eq!(signal(rank, 1, 0, 0), 4);
                    let text = "One sided RMA: host RMA is not supported in this communicator.";
                    assert_eq!(last_error(), text);
                }
            });
        },
    );
}

#[test]
fn a_put_beyond_the_window_fails_the_context_of_its_rank() {
    let name = "a_put_beyond_the_window_fails_the_context_of_its_rank";
    alone(name, &[], || {
        let id = unique_id();
        thread::scope(|scope| {
            for rank in 0..2 {
                scope.spawn(move || {
                    let rank = Rank::join(id, 2, rank);
                    // The windows of the ranks differ in size.
                    let shown = Shown::new(&rank, 8192 - 4096 * rank.rank as usize);
                    assert_eq!(signal(&rank, rank.rank, 0, 0), 0, "{}", last_error());
                    if rank.rank == 0 {
                        assert_eq!(put(&rank, shown.address, 4097, 1, &shown, 0), 0);
                        rank.gpu.bind_to_thread().unwrap();
                        let error = rank.stream.synchronize().unwrap_err();
                        assert_eq!(
                            error.0,
                            cudarc::driver::sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
                        );
                        let text = nccl_emulator::violations()[0].to_string();
                        assert!(
                            text.contains("of the window of rank 1, which has 4096"),
                            "{text}"
                        );
                    }
                    assert_eq!(rank.abort(), 0);
                });
            }
        });
    });
}

#[test]
fn an_abort_ends_a_registration_and_a_first_signal_that_wait_for_a_rank() {
    let name = "an_abort_ends_a_registration_and_a_first_signal_that_wait_for_a_rank";
    alone(name, &[], || {
        for first in ["window", "signal"] {
            let (id, looked) = (unique_id(), &Barrier::new(2));
            thread::scope(|scope| {
                for rank in 0..2 {
                    scope.spawn(move || {
                        let rank = Rank::join_nonblocking(id, 2, rank);
                        let own = memory(&rank, 4096);
                        let mut window = null_mut();
                        if rank.rank == 0 {
                            match first {
                                "window" => {
                                    assert_eq!(register(&rank, own, 4096, &mut window), 0);
                                }
                                _ => assert_eq!(signal(&rank, 1, 0, 0), 7),
                            }
                            thread::sleep(Duration::from_millis(50));
                            assert_eq!(rank.state(), 7);
                        }
                        looked.wait();
                        assert_eq!(rank.abort(), 0);
                        assert!(window.is_null());
                    });
                }
            });
        }
    });
}

#[test]
fn a_rank_that_waits_for_a_killed_process_gets_out_by_an_abort() {
    let name = "a_rank_that_waits_for_a_killed_process_gets_out_by_an_abort";
    let ending = |rank, status: std::process::ExitStatus| status.success() == (rank == 0);
    processes_ending(name, 2, &[], ending, |process| {
        let rank = process.join();
        let peer = 1 - process.rank;
        assert_eq!(signal(&rank, peer, 0, 0), 0);
        rank.sync();
        if process.rank == 1 {
            std::process::abort();
        }
        assert_eq!(wait(&rank, &mut [from(1, 1)]), 0);
        rank.sync();
        assert_eq!(wait(&rank, &mut [from(1, 1)]), 0);
        thread::sleep(Duration::from_millis(50));
        assert!(!rank.is_idle());
        assert_eq!(rank.abort(), 0);
        rank.sync();
    });
}

#[test]
fn a_registration_and_a_first_signal_without_a_killed_rank_are_remote_errors() {
    let name = "a_registration_and_a_first_signal_without_a_killed_rank_are_remote_errors";
    let ending = |rank, status: std::process::ExitStatus| status.success() == (rank == 0);
    processes_ending(name, 2, &[], ending, |process| {
        let join = |id| Rank::join(process.id(id), 2, process.rank);
        let (one, other) = (join("one"), join("other"));
        if process.rank == 1 {
            process.mark("joined");
            std::process::abort();
        }
        process.wait_for("joined");
        let is_remote = |code| {
            let text = last_error();
            assert!(text.contains("Connection closed by remote peer"), "{text}");
            assert_eq!(code, 6);
        };
        is_remote(register(&one, memory(&one, 4096), 4096, &mut null_mut()));
        is_remote(signal(&other, 1, 0, 0));
        assert_eq!((one.abort(), other.abort()), (0, 0));
    });
}

#[test]
fn a_graph_puts_again_at_every_launch() {
    use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
    alone("a_graph_puts_again_at_every_launch", &[], || {
        threads(2, |rank| {
            let (source, target) = (Shown::new(rank, 4096), Shown::new(rank, 4096));
            let peer = 1 - rank.rank;
            let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            rank.stream.begin_capture(mode).unwrap();
            let code = put(rank, source.address, 4096, peer, &target, 0);
            assert_eq!(code, 0, "{}", last_error());
            assert_eq!(wait(rank, &mut [from(peer, 1)]), 0, "{}", last_error());
            let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
            let graph = rank.stream.end_capture(flags).unwrap().unwrap();
            for turn in 1..4u8 {
                source.write(&[turn * 2 + rank.rank as u8; 4096]);
                graph.launch().unwrap();
                rank.sync();
                assert!(target.read() == [turn * 2 + peer as u8; 4096]);
                // The next replay must not begin before the other rank has read. These signals are outside of the graph.
                assert_eq!(signal(rank, peer, 0, 0), 0);
                assert_eq!(wait(rank, &mut [from(peer, 1)]), 0);
                rank.sync();
            }
            drop(graph);
            target.end(rank);
            source.end(rank);
        });
        assert!(races().is_empty());
    });
}

/// Returns the address at which the rank's device reaches another rank's part of the window.
fn reached(shown: &Shown, offset: usize, peer: i32) -> u64 {
    let mut by_lsa = null_mut();
    let code = nccl!(ncclGetLsaDevicePointer(
        shown.window,
        offset,
        peer,
        &mut by_lsa
    ));
    assert_eq!(code, 0, "{}", last_error());
    let mut by_rank = null_mut();
    let code = nccl!(ncclGetPeerDevicePointer(
        shown.window,
        offset,
        peer,
        &mut by_rank
    ));
    assert_eq!((code, by_rank), (0, by_lsa));
    by_lsa.addr() as u64
}

fn reaches_all(rank: &Rank, ranks: i32, meet: impl Fn(&str)) {
    let shown = Shown::new(rank, 8192);
    shown.write(&[0; 8192]);
    meet("shown");
    for peer in 0..ranks {
        let address = reached(&shown, 4096 + rank.rank as usize, peer);
        if peer == rank.rank {
            assert_eq!(
                address,
                shown.address.addr() as u64 + 4096 + rank.rank as u64
            );
        }
        // SAFETY: a byte of that rank's part that this rank alone writes.
        unsafe { result::memcpy_htod_sync(address, &[10 + rank.rank as u8]) }.unwrap();
    }
    meet("written");
    let all: Vec<u8> = (0..ranks).map(|rank| 10 + rank as u8).collect();
    assert_eq!(shown.read()[4096..4096 + ranks as usize], all);
    let mut pointer = null_mut();
    let beyond = nccl!(ncclGetLsaDevicePointer(
        shown.window,
        0,
        ranks,
        &mut pointer
    ));
    assert_eq!(beyond, 4);
    assert!(last_error().starts_with(&format!("The provided lsaRank {ranks} is not in")));
    let multicast = nccl!(ncclGetLsaMultimemDevicePointer(
        shown.window,
        0,
        &mut pointer
    ));
    assert_eq!((multicast, pointer), (0, null_mut()));
    meet("read");
    let address = reached(&shown, 0, (rank.rank + 1) % ranks);
    shown.end(rank);
    // The mapping ends with the window.
    // SAFETY: the address is not mapped any more, and the driver detects that.
    assert!(unsafe { result::memcpy_htod_sync(address, &[1]) }.is_err());
}

#[test]
fn a_device_reaches_the_windows_of_peers_in_its_process() {
    let name = "a_device_reaches_the_windows_of_peers_in_its_process";
    alone(name, &[], || {
        let barrier = Barrier::new(3);
        threads(3, |rank| {
            reaches_all(rank, 3, |_| {
                barrier.wait();
            });
        });
    });
}

#[test]
fn a_device_reaches_the_windows_of_peers_in_other_processes() {
    let name = "a_device_reaches_the_windows_of_peers_in_other_processes";
    processes(name, 3, &[], |process| {
        let rank = process.join();
        reaches_all(&rank, 3, |point| {
            process.mark(&format!("{point}.{}", rank.rank));
            (0..3).for_each(|other| process.wait_for(&format!("{point}.{other}")));
        });
        rank.destroy();
    });
}

fn has_teams(name: &str, hosts: &str, lsa: i32) {
    processes(name, 4, &[("NCCL_HOSTID", hosts)], |process| {
        let rank = process.join();
        let api = ranks::api();
        let facts = |team: nccl_sys::ncclTeam_t| (team.nRanks, team.rank, team.stride);
        // SAFETY: a live communicator.
        let [world, near, rail] = [api.ncclTeamWorld, api.ncclTeamLsa, api.ncclTeamRail]
            .map(|team| unsafe { team.unwrap()(rank.comm) });
        assert_eq!(facts(world), (4, rank.rank, 1));
        assert_eq!(facts(near), (lsa, rank.rank % lsa, 1));
        assert_eq!(facts(rail), (4 / lsa, rank.rank / lsa, lsa));
        let to_world = api.ncclTeamRankToWorld().unwrap();
        for place in 0..4 / lsa {
            // SAFETY: as above.
            let found = unsafe { to_world(rank.comm, rail, place) };
            assert_eq!(found, rank.rank % lsa + place * lsa);
        }
        let to_lsa = api.ncclTeamRankToLsa().unwrap();
        // SAFETY: as above.
        let place = unsafe { to_lsa(rank.comm, world, rank.rank) };
        assert_eq!(place, rank.rank % lsa);
        let mut properties = nccl_sys::NCCL_COMM_PROPERTIES_INITIALIZER;
        let code = nccl!(ncclCommQueryProperties(rank.comm, &mut properties));
        assert_eq!(code, 0, "{}", last_error());
        assert_eq!((properties.rank, properties.nRanks), (rank.rank, 4));
        assert_eq!(properties.cudaDev, rank.rank);
        assert_eq!(properties.nLsaTeams, 4 / lsa);
        assert_eq!(properties.deviceApiSupport, lsa == 4);
        assert_eq!(properties.hostRmaSupport, lsa == 4);
        properties.magic = 1;
        assert_eq!(
            nccl!(ncclCommQueryProperties(rank.comm, &mut properties)),
            5
        );
        rank.destroy();
    });
}

#[test]
fn on_one_host_all_ranks_are_in_one_team() {
    has_teams("on_one_host_all_ranks_are_in_one_team", "one", 4);
}

#[test]
fn on_hosts_of_one_rank_each_is_a_team() {
    has_teams("on_hosts_of_one_rank_each_is_a_team", "{rank}", 1);
}
