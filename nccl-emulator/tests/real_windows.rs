//! Windows of NVIDIA's own library: collectives over symmetric memory by its kernels and by copies, registered buffers, and
//! operations that only one side calls.

mod ranks;
mod real;

use std::env;
use std::ptr::null_mut;
use std::time::Duration;

use nccl_sys::{ncclDataType_t as Kind, ncclRedOp_t as Op, ncclWaitSignalDesc_t};
use ranks::{Process, Rank, children, is_child_of, last_error, nccl, wait_until};
use real::windows::{Buffers, COUNTS, Collective, LARGEST, MACHINE, Shown, over_windows};
use real::{on_each, version};

/// Runs `body` with NCCL held to each of these kernels over symmetric memory, and checks that it was used.
fn with_each_kernel(test: &str, ranks: i32, kernels: &[&str], body: impl Fn(&Process, &Rank)) {
    for kernel in kernels {
        let environment = [MACHINE, ("NCCL_SYM_KERNEL", kernel)];
        on_each(test, ranks, &environment, |process| {
            let rank = process.join();
            body(&process, &rank);
            let violations = nccl_emulator::violations();
            assert!(violations.is_empty(), "{violations:?}");
            let kernel = env::var("NCCL_SYM_KERNEL").unwrap();
            let used = process.log().contains(&format!("-> Kernel {kernel} "));
            assert!(used || process.rank != 0, "{kernel} was not used");
            rank.destroy();
        });
        if is_child_of(test) {
            break;
        }
    }
}

#[test]
fn all_gathers_over_windows_use_kernels_over_symmetric_memory() {
    with_each_kernel(
        "all_gathers_over_windows_use_kernels_over_symmetric_memory",
        3,
        &["AllGather_LL", "AllGather_ST"],
        |_, rank| {
            let kinds = [Kind::ncclUint8, Kind::ncclFloat];
            over_windows(rank, Collective::AllGather, &kinds, Op::ncclSum);
        },
    );
}

#[test]
fn all_reduces_over_windows_use_kernels_over_symmetric_memory() {
    with_each_kernel(
        "all_reduces_over_windows_use_kernels_over_symmetric_memory",
        3,
        &["AllReduce_AGxLL_R", "AllReduce_RSxLD_AGxST"],
        |_, rank| {
            let kinds = [
                Kind::ncclFloat,
                Kind::ncclHalf,
                Kind::ncclBfloat16,
                Kind::ncclFloat8e4m3,
            ];
            over_windows(rank, Collective::AllReduce, &kinds, Op::ncclSum);
        },
    );
}

#[test]
fn reduce_scatters_over_windows_use_kernels_over_symmetric_memory() {
    with_each_kernel(
        "reduce_scatters_over_windows_use_kernels_over_symmetric_memory",
        4,
        &["ReduceScatter_LL", "ReduceScatter_LD"],
        |_, rank| {
            let kinds = [Kind::ncclFloat, Kind::ncclHalf, Kind::ncclBfloat16];
            over_windows(rank, Collective::ReduceScatter, &kinds, Op::ncclSum);
            // Releases before 2.28 use a kernel of another kind.
            over_windows(rank, Collective::ReduceScatter, &kinds, Op::ncclAvg);
        },
    );
}

#[test]
fn nccl_chooses_kernels_over_symmetric_memory_for_windows_by_itself() {
    let name = "nccl_chooses_kernels_over_symmetric_memory_for_windows_by_itself";
    on_each(name, 2, &[MACHINE], |process| {
        let rank = process.join();
        for collective in [
            Collective::AllGather,
            Collective::AllReduce,
            Collective::ReduceScatter,
        ] {
            over_windows(&rank, collective, &[Kind::ncclFloat], Op::ncclSum);
            let used = process
                .log()
                .contains(&format!("-> Kernel {collective:?}_"));
            assert!(used || process.rank != 0, "{collective:?}");
        }
        rank.destroy();
    });
}

#[test]
fn ranks_of_one_process_use_each_others_windows() {
    let name = "ranks_of_one_process_use_each_others_windows";
    on_each(name, 1, &[MACHINE], |_| {
        ranks::threads(3, |rank| {
            over_windows(rank, Collective::AllReduce, &[Kind::ncclFloat], Op::ncclSum);
            over_windows(rank, Collective::AllGather, &[Kind::ncclFloat], Op::ncclSum);
        });
    });
}

#[test]
fn buffers_in_no_window_are_sent_in_lines() {
    let name = "buffers_in_no_window_are_sent_in_lines";
    let environment = [MACHINE, ("NCCL_SYM_NOWIN_ENABLE", "1")];
    on_each(name, 3, &environment, |process| {
        let rank = process.join();
        if version() < 23000 {
            return rank.destroy();
        }
        for collective in [
            Collective::AllGather,
            Collective::AllReduce,
            Collective::ReduceScatter,
        ] {
            let room = 4 * 4097 * rank.ranks as usize;
            let buffers = Buffers {
                input: Shown::without_window(&rank, room),
                output: Shown::without_window(&rank, room),
                offsets: [0; 2],
            };
            for count in [1, 7, 1000, 4097] {
                let (kind, op) = (Kind::ncclFloat, Op::ncclSum);
                buffers.issue(&rank, collective, kind, op, count);
                rank.sync();
                buffers.check(&rank, collective, kind, op, count);
            }
            let log = process.log();
            let mut used = log
                .lines()
                .filter(|line| line.contains(&format!("-> Kernel {collective:?}_")));
            // 2.32 chooses a ring.
            let judged = process.rank == 0 && version() < 23200;
            assert!(
                !judged || used.any(|line| line.contains("LL")),
                "{collective:?}"
            );
            buffers.input.end(&rank);
            buffers.output.end(&rank);
        }
        rank.destroy();
    });
}

#[test]
fn collectives_of_a_group_over_windows_share_a_launch() {
    let name = "collectives_of_a_group_over_windows_share_a_launch";
    on_each(name, 3, &[MACHINE], |process| {
        let rank = process.join();
        for collective in [
            Collective::AllGather,
            Collective::AllReduce,
            Collective::ReduceScatter,
        ] {
            let counts = [40_000, 3, 1000, 100_001, 17];
            let room = 4 * counts.iter().sum::<usize>() * rank.ranks as usize;
            let all: Vec<_> = counts
                .iter()
                .map(|_| Buffers {
                    input: Shown::new(&rank, room),
                    output: Shown::new(&rank, room),
                    offsets: [0; 2],
                })
                .collect();
            assert_eq!(nccl!(ncclGroupStart()), 0);
            for (buffers, count) in all.iter().zip(counts) {
                buffers.issue(&rank, collective, Kind::ncclFloat, Op::ncclSum, count);
            }
            assert_eq!(nccl!(ncclGroupEnd()), 0, "{}", last_error());
            rank.sync();
            for (buffers, count) in all.into_iter().zip(counts) {
                buffers.check(&rank, collective, Kind::ncclFloat, Op::ncclSum, count);
                buffers.input.end(&rank);
                buffers.output.end(&rank);
            }
        }
        rank.destroy();
    });
}

#[test]
fn an_abort_ends_a_kernel_over_symmetric_memory_that_waits() {
    let name = "an_abort_ends_a_kernel_over_symmetric_memory_that_waits";
    let environment = [MACHINE, ("NCCL_SYM_KERNEL", "AllReduce_RSxLD_AGxST")];
    on_each(name, 2, &environment, |process| {
        let rank = process.join();
        let buffers = Buffers {
            input: Shown::new(&rank, 4096),
            output: Shown::new(&rank, 4096),
            offsets: [0; 2],
        };
        process.meet("registered");
        if process.rank == 0 && version() >= 22800 {
            let (collective, kind, op) = (Collective::AllReduce, Kind::ncclFloat, Op::ncclSum);
            buffers.issue(&rank, collective, kind, op, 100);
            assert!(real::stays(Duration::from_millis(200), || !rank.is_idle()));
            assert_eq!(rank.abort(), 0, "{}", last_error());
            wait_until("the stream is idle", || rank.is_idle());
        }
        process.meet("aborted");
    });
}

#[test]
fn registered_buffers_are_used_in_place() {
    let name = "registered_buffers_are_used_in_place";
    on_each(name, 2, &[MACHINE], |process| {
        let rank = process.join();
        let room = 4 * LARGEST * rank.ranks as usize + 64;
        let buffers = Buffers {
            input: Shown::without_window(&rank, room),
            output: Shown::without_window(&rank, room),
            offsets: [0; 2],
        };
        let handles = [&buffers.input, &buffers.output].map(|shown| {
            let mut handle = null_mut();
            let (address, bytes) = (shown.address, shown.bytes);
            let code = nccl!(ncclCommRegister(rank.comm, address, bytes, &mut handle));
            assert_eq!(code, 0, "{}", last_error());
            handle
        });
        for collective in [
            Collective::AllGather,
            Collective::AllReduce,
            Collective::ReduceScatter,
        ] {
            for count in COUNTS {
                let (kind, op) = (Kind::ncclFloat, Op::ncclSum);
                buffers.issue(&rank, collective, kind, op, count);
                rank.sync();
                buffers.check(&rank, collective, kind, op, count);
            }
        }
        // A send and a receive between the two ranks.
        let peer = 1 - rank.rank;
        buffers.input.write(0, &[rank.rank as u8 + 1; 1 << 20]);
        let (from, to, stream) = (
            buffers.input.address,
            buffers.output.address,
            rank.cuda_stream(),
        );
        let (count, kind) = (1 << 20, Kind::ncclUint8);
        assert_eq!(nccl!(ncclGroupStart()), 0);
        assert_eq!(
            nccl!(ncclSend(from, count, kind, peer, rank.comm, stream)),
            0
        );
        assert_eq!(nccl!(ncclRecv(to, count, kind, peer, rank.comm, stream)), 0);
        assert_eq!(nccl!(ncclGroupEnd()), 0, "{}", last_error());
        rank.sync();
        let found = buffers.output.read(0, count);
        assert!(found.iter().all(|&byte| byte == peer as u8 + 1));
        let log = process.log();
        assert!(log.contains("IPC register"), "no buffer was registered");
        for handle in handles {
            assert_eq!(nccl!(ncclCommDeregister(rank.comm, handle)), 0);
        }
        buffers.input.end(&rank);
        buffers.output.end(&rank);
        rank.destroy();
    });
}

#[test]
fn without_thread_blocks_collectives_over_windows_are_copies() {
    let name = "without_thread_blocks_collectives_over_windows_are_copies";
    on_each(name, 3, &[MACHINE, ("NCCL_CTA_POLICY", "2")], |process| {
        let rank = process.join();
        if version() < 22800 {
            return rank.destroy();
        }
        over_windows(
            &rank,
            Collective::AllGather,
            &[Kind::ncclUint8],
            Op::ncclSum,
        );
        let ranks = rank.ranks as usize;
        let (input, output) = (
            Shown::new(&rank, 100_001 * ranks),
            Shown::new(&rank, 100_001 * ranks),
        );
        for count in [1, 100, 100_001] {
            for peer in 0..ranks {
                let value = 10 * rank.rank as u8 + peer as u8;
                input.write(peer * count, &vec![value; count]);
            }
            let (from, to, stream) = (input.address, output.address, rank.cuda_stream());
            let kind = Kind::ncclUint8;
            let code = nccl!(ncclAlltoAll(from, to, count, kind, rank.comm, stream));
            assert_eq!(code, 0, "{}", last_error());
            rank.sync();
            for peer in 0..ranks {
                let value = 10 * peer as u8 + rank.rank as u8;
                let found = output.read(peer * count, count);
                assert!(found.iter().all(|&byte| byte == value), "from {peer}");
            }
        }
        if process.rank == 0 {
            let log = process.log();
            for collective in ["AllGather", "AlltoAll"] {
                let used = log.contains(&format!("{collective} [Copy Engine]"));
                assert!(used, "{collective} was no copy");
            }
        }
        input.end(&rank);
        output.end(&rank);
        rank.destroy();
    });
}

fn from(peer: i32, count: i32) -> ncclWaitSignalDesc_t {
    ncclWaitSignalDesc_t {
        opCnt: count,
        peer,
        sigIdx: 0,
        ctx: 0,
    }
}

/// Waits for signals, and for the stream.
fn wait(rank: &Rank, descriptors: &mut [ncclWaitSignalDesc_t]) {
    let (count, list) = (descriptors.len() as i32, descriptors.as_mut_ptr());
    let code = nccl!(ncclWaitSignal(count, list, rank.comm, rank.cuda_stream()));
    assert_eq!(code, 0, "{}", last_error());
    rank.sync();
}

fn put(rank: &Rank, from: &Shown, count: usize, peer: i32, to: &Shown, at: usize) -> u32 {
    let (kind, stream) = (Kind::ncclUint8, rank.cuda_stream());
    let (address, window) = (from.address, to.window);
    nccl!(ncclPutSignal(
        address, count, kind, peer, window, at, 0, 0, 0, rank.comm, stream
    ))
}

#[test]
fn ranks_put_to_each_other_and_wait_for_signals() {
    const EACH: usize = 100_000;
    let name = "ranks_put_to_each_other_and_wait_for_signals";
    on_each(name, 3, &[MACHINE], |process| {
        let rank = process.join();
        if lacks_signals() {
            return rank.destroy();
        }
        let ranks = rank.ranks;
        let source = Shown::new(&rank, EACH);
        let target = Shown::new(&rank, EACH * ranks as usize);
        let others = || (0..ranks).filter(|&peer| peer != rank.rank);
        for turn in 0..3 {
            source.write(0, &vec![10 * rank.rank as u8 + turn; EACH]);
            assert_eq!(nccl!(ncclGroupStart()), 0);
            for peer in others() {
                let at = EACH * rank.rank as usize;
                let code = put(&rank, &source, EACH, peer, &target, at);
                assert_eq!(code, 0, "{}", last_error());
            }
            assert_eq!(nccl!(ncclGroupEnd()), 0, "{}", last_error());
            let mut all: Vec<_> = others().map(|peer| from(peer, 1)).collect();
            wait(&rank, &mut all);
            for peer in others() {
                let found = target.read(EACH * peer as usize, EACH);
                let expected = 10 * peer as u8 + turn;
                assert!(found.iter().all(|&byte| byte == expected), "of {peer}");
            }
            // No rank writes again before all ranks have read.
            assert_eq!(nccl!(ncclGroupStart()), 0);
            for peer in others() {
                let stream = rank.cuda_stream();
                let code = nccl!(ncclSignal(peer, 0, 0, 0, rank.comm, stream));
                assert_eq!(code, 0, "{}", last_error());
            }
            assert_eq!(nccl!(ncclGroupEnd()), 0, "{}", last_error());
            wait(&rank, &mut all);
        }
        source.end(&rank);
        target.end(&rank);
        rank.destroy();
    });
}

/// The arrangement of launch mode `BlockingChild` of the crate nccl.
#[test]
fn a_blocking_child_of_an_idle_parent_puts_and_waits_for_signals() {
    const EACH: usize = 10_000;
    let name = "a_blocking_child_of_an_idle_parent_puts_and_waits_for_signals";
    on_each(name, 2, &[MACHINE], |process| {
        let id = process.id("all");
        let shared = children::config(|config| (config.blocking, config.splitShare) = (0, 1));
        let parent = children::parent(id, process.ranks, process.rank, shared);
        if lacks_signals() {
            return parent.destroy();
        }
        let mut own = children::config(|config| (config.blocking, config.splitShare) = (1, 0));
        let (mut comm, key) = (null_mut(), parent.rank);
        let code = nccl!(ncclCommSplit(parent.comm, 0, key, &mut comm, &mut own));
        assert!(matches!(code, 0 | 7), "{}", last_error());
        assert_eq!(parent.settle(), 0, "{}", last_error());
        let rank = children::described(&parent, comm);
        let peer = 1 - rank.rank;
        let (source, target) = (Shown::new(&rank, EACH), Shown::new(&rank, EACH));
        for turn in 0..3 {
            source.write(0, &vec![10 * rank.rank as u8 + turn; EACH]);
            let code = put(&rank, &source, EACH, peer, &target, 0);
            assert_eq!(code, 0, "{}", last_error());
            wait(&rank, &mut [from(peer, 1)]);
            let found = target.read(0, EACH);
            let expected = 10 * peer as u8 + turn;
            assert!(found.iter().all(|&byte| byte == expected), "turn {turn}");
            process.meet(&format!("read {turn}"));
        }
        source.end(&rank);
        target.end(&rank);
        assert_eq!(parent.state(), 0, "{}", last_error());
        rank.destroy();
        parent.destroy();
        let violations = nccl_emulator::violations();
        assert!(violations.is_empty(), "{violations:?}");
    });
}

/// Whether the release has no operations that only one side calls.
fn lacks_signals() -> bool {
    ranks::api().ncclPutSignal().is_err()
}

#[test]
fn over_two_hosts_there_are_no_windows_and_no_puts() {
    let name = "over_two_hosts_there_are_no_windows_and_no_puts";
    on_each(name, 2, &[], |process| {
        // SAFETY: nothing else uses the environment yet.
        unsafe { env::set_var("NCCL_HOSTID", format!("host{}", process.rank)) };
        let rank = process.join();
        let shown = Shown::new(&rank, 4096);
        // Not an error: there is no window. 2.27 registers the buffer for other uses.
        assert_eq!(shown.window.is_null(), version() >= 22800);
        if !lacks_signals() {
            let code = put(&rank, &shown, 1, 1 - rank.rank, &shown, 0);
            assert_eq!(code, 4);
            let error = last_error();
            assert!(error.contains("host RMA is not supported"), "{error}");
        }
        shown.end(&rank);
        rank.destroy();
    });
}
