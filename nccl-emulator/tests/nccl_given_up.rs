//! Operations that a rank has given up, by an abort, a revoke, a shrink that aborts, or its death: no other rank completes
//! them, and none touches the rank's memory afterwards.

mod ranks;

use std::ptr::null_mut;
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::result;
use nccl_sys::{NCCL_SHRINK_ABORT, ncclDataType_t as Kind, ncclRedOp_t as Op};
use ranks::{Memory, Process, Rank, last_error, nccl, processes, processes_ending};

/// Long enough for an operation that can complete to do so.
const LONG_ENOUGH: Duration = Duration::from_millis(150);

/// What rank 0 gives up. Rank 1 comes later.
#[derive(Debug, Clone, Copy)]
enum Operation {
    Receive,
    AllReduce,
}

use Operation::{AllReduce, Receive};

impl Operation {
    /// Issues a rank's part: rank 0 gets ones in its memory if the operation runs.
    fn issue(self, rank: &Rank, memory: &Memory<u8>) {
        let code = match (self, rank.rank) {
            (Receive, 0) => rank.receive(memory, Kind::ncclUint8, 1),
            (Receive, _) => rank.send(memory, Kind::ncclUint8, 0),
            (AllReduce, _) => rank.all_reduce(memory, memory, Kind::ncclUint8, Op::ncclMax),
        };
        assert_eq!(code, 0, "{}", last_error());
    }

    /// A communicator that is connected for this operation, and memory: zeros on rank 0, ones on rank 1.
    fn prepare(self, process: &Process, name: &str, len: usize) -> (Rank, Memory<u8>) {
        let rank = Rank::join(process.id(name), process.ranks, process.rank);
        let small = rank.memory(&[rank.rank as u8]);
        self.issue(&rank, &small);
        rank.sync();
        let memory = rank.memory(&vec![rank.rank as u8; len]);
        (rank, memory)
    }
}

/// Moves a rank's stream for a while. It must not get to its end.
fn hangs(rank: &Rank) {
    let start = Instant::now();
    while start.elapsed() < LONG_ENOUGH {
        assert!(!rank.is_idle());
        thread::sleep(Duration::from_millis(1));
    }
}

/// The ways to give up, as a rank whose peers are alive.
#[derive(Debug, Clone, Copy)]
enum Ending {
    Abort,
    Revoke,
    Shrink,
}

impl Ending {
    const ALL: [Self; 3] = [Self::Abort, Self::Revoke, Self::Shrink];

    /// Gives up what runs. Returns the communicator that is left.
    fn end(self, rank: &Rank) -> Option<Rank> {
        let mut comm = null_mut();
        let code = match self {
            Self::Abort => return (rank.abort() != 0).then(|| panic!("{}", last_error())),
            Self::Revoke => nccl!(ncclCommRevoke(rank.comm, 0)),
            Self::Shrink => {
                let (mut without, flags) = ([1], NCCL_SHRINK_ABORT);
                let (list, config) = (without.as_mut_ptr(), null_mut());
                nccl!(ncclCommShrink(rank.comm, list, 1, &mut comm, config, flags))
            }
        };
        assert_eq!(code, 0, "{}", last_error());
        if !comm.is_null() {
            assert_eq!(nccl!(ncclCommAbort(comm)), 0);
        }
        Some(Rank {
            comm: rank.comm,
            gpu: rank.gpu.clone(),
            stream: rank.stream.clone(),
            ..*rank
        })
    }
}

#[test]
fn what_a_rank_has_given_up_is_completed_by_nobody() {
    let test = "what_a_rank_has_given_up_is_completed_by_nobody";
    processes(test, 2, &[], |process| {
        for (operation, ending) in [Receive, AllReduce]
            .into_iter()
            .flat_map(|operation| Ending::ALL.map(|ending| (operation, ending)))
        {
            let name = format!("{operation:?}-{ending:?}");
            let (rank, memory) = operation.prepare(&process, &name, 1000);
            let (ended, tried) = (format!("{name}.ended"), format!("{name}.tried"));
            if rank.rank == 0 {
                operation.issue(&rank, &memory);
                hangs(&rank);
                let left = ending.end(&rank);
                process.mark(&ended);
                process.wait_for(&tried);
                assert!(memory.read().iter().all(|&byte| byte == 0), "{name}");
                assert!(left.is_none_or(|left| left.abort() == 0));
            } else {
                process.wait_for(&ended);
                operation.issue(&rank, &memory);
                hangs(&rank);
                process.mark(&tried);
                assert_eq!(rank.abort(), 0);
            }
        }
    });
}

#[test]
fn an_operation_that_was_queued_behind_what_a_rank_gives_up_is_not_paired_with_a_later_one() {
    let test =
        "an_operation_that_was_queued_behind_what_a_rank_gives_up_is_not_paired_with_a_later_one";
    processes(test, 2, &[], |process| {
        let (rank, memory) = AllReduce.prepare(&process, "ranks", 1000);
        let other = rank.memory(&vec![7u8; 1000]);
        Receive.issue(&rank, &other);
        rank.sync();
        if rank.rank == 0 {
            Receive.issue(&rank, &other);
            AllReduce.issue(&rank, &other);
            hangs(&rank);
            let _left = Ending::Shrink.end(&rank);
            rank.sync();
            AllReduce.issue(&rank, &memory);
            process.mark("later");
        } else {
            process.wait_for("later");
            AllReduce.issue(&rank, &memory);
            hangs(&rank);
            process.mark("over");
        }
        process.wait_for("over");
        assert!(!rank.is_idle());
        assert_eq!(rank.abort(), 0);
        assert!(
            memory.read().iter().all(|&byte| byte == rank.rank as u8),
            "nothing was reduced"
        );
    });
}

#[test]
fn what_a_rank_gives_up_in_the_middle_changes_its_memory_no_more() {
    const LEN: usize = 128 << 20;
    let test = "what_a_rank_gives_up_in_the_middle_changes_its_memory_no_more";
    // NCCL's pause in an abort would let the other rank finish.
    let environment = [("NCCL_EMULATOR_PROXY_POLL_MS", "0")];
    processes(test, 2, &environment, |process| {
        for operation in [Receive, AllReduce] {
            let name = format!("{operation:?}");
            let (rank, memory) = operation.prepare(&process, &name, LEN);
            let (ready, over) = (format!("{name}.ready"), format!("{name}.over"));
            operation.issue(&rank, &memory);
            if rank.rank == 0 {
                process.wait_for(&ready);
                let byte = |at: usize| {
                    let mut byte = [0u8];
                    // SAFETY: the byte is inside of the memory.
                    unsafe { result::memcpy_dtoh_sync(&mut byte, memory.address + at as u64) }
                        .unwrap();
                    byte[0]
                };
                while byte(0) == 0 {}
                assert_eq!(rank.abort(), 0);
                let last = byte(LEN - 1);
                let then = memory.read();
                thread::sleep(LONG_ENOUGH);
                assert!(then == memory.read(), "{name}");
                assert_eq!(last, byte(LEN - 1), "{name}");
                process.mark(&over);
            } else {
                process.mark(&ready);
                // Moves the stream.
                while !process.is_marked(&over) {
                    rank.is_idle();
                }
                assert_eq!(rank.abort(), 0);
            }
        }
    });
}

#[test]
fn what_a_killed_rank_has_begun_is_completed_by_nobody() {
    let test = "what_a_killed_rank_has_begun_is_completed_by_nobody";
    let ending = |rank, status: std::process::ExitStatus| status.success() == (rank != 0);
    processes_ending(test, 2, &[], ending, |process| {
        let all = [Receive, AllReduce].map(|operation| {
            let (rank, memory) = operation.prepare(&process, &format!("{operation:?}"), 1000);
            (operation, rank, memory)
        });
        if process.rank == 0 {
            for (operation, rank, memory) in &all {
                operation.issue(rank, memory);
                hangs(rank);
            }
            process.mark("killed");
            // SAFETY: ends this process.
            unsafe { libc::raise(libc::SIGKILL) };
        }
        process.wait_for("killed");
        thread::sleep(LONG_ENOUGH);
        for (operation, rank, memory) in &all {
            operation.issue(rank, memory);
            hangs(rank);
            assert_eq!(rank.state(), 0);
            assert_eq!(rank.abort(), 0);
        }
    });
}
