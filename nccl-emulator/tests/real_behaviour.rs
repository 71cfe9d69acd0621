//! The behaviour of NVIDIA's own library and of the emulator's NCCL in case of faults. Each row of the table of
//! behaviour in `docs/real-nccl.md` is a test here: the code that a call returns, how soon, and the log line with the reason.

mod ranks;
mod real;

use std::ptr::null_mut;
use std::sync::Barrier;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nccl_sys::{NCCL_SHRINK_ABORT, NCCL_SHRINK_DEFAULT, ncclComm_t};
use ranks::{Process, Rank, nccl, wait_until};
use real::{
    Buffers, P2P, SHM, SOCKETS, asynchronous_error, die, killed, last_error, on_both,
    processes_on_both, stays, version, within,
};

/// Long enough to show that a call does not return.
const WATCHED: Duration = Duration::from_secs(2);
/// The limit for calls that return at once, on a loaded machine too.
const SOON: Duration = Duration::from_secs(5);

const SYSTEM_ERROR: u32 = 2;
const INVALID_ARGUMENT: u32 = 4;
const INVALID_USAGE: u32 = 5;
const REMOTE_ERROR: u32 = 6;
const IN_PROGRESS: u32 = 7;

/// A communicator's handle that another thread may use.
#[derive(Clone, Copy)]
struct Handle(ncclComm_t);

// SAFETY: a number for NCCL; the tests say which thread uses it when.
unsafe impl Send for Handle {}

impl Handle {
    fn of(rank: &Rank) -> Self {
        Self(rank.comm)
    }

    fn destroy(self) -> u32 {
        nccl!(ncclCommDestroy(self.0))
    }

    fn finalize(self) -> u32 {
        nccl!(ncclCommFinalize(self.0))
    }
}

/// Runs an all-reduce of all ranks, after which rank 1 dies.
fn until_rank_1_is_dead(process: &Process, rank: &Rank) -> Buffers {
    let buffers = Buffers::of(rank);
    buffers.check(rank);
    process.meet("reduced");
    if process.rank == 1 {
        die();
    }
    // Its descriptors are closed when it is a zombie.
    thread::sleep(Duration::from_millis(300));
    buffers
}

fn only_rank_1_is_killed(rank: i32, status: std::process::ExitStatus) -> bool {
    if rank == 1 {
        killed(status)
    } else {
        status.success()
    }
}

#[test]
fn a_blocking_init_waits_for_ever_for_a_rank_that_never_comes() {
    let name = "a_blocking_init_waits_for_ever_for_a_rank_that_never_comes";
    on_both(name, 1, &[], |process| {
        let id = process.id("id");
        let came_back = within(WATCHED, move || Rank::join(id, 2, 0).rank);
        assert_eq!(came_back, None);
    });
}

#[test]
fn an_init_that_waits_is_ended_by_an_abort_at_once() {
    on_both(
        "an_init_that_waits_is_ended_by_an_abort_at_once",
        1,
        &[],
        |process| {
            let (rank, code) = process.begin(2, 0);
            assert_eq!(code, IN_PROGRESS);
            assert!(stays(WATCHED, || rank.state() == IN_PROGRESS));
            let start = Instant::now();
            assert_eq!(rank.abort(), 0, "{}", last_error());
            assert!(start.elapsed() < SOON);
        },
    );
}

#[test]
fn an_interface_that_does_not_exist_is_invalid_usage_at_once() {
    let name = "an_interface_that_does_not_exist_is_invalid_usage_at_once";
    on_both(name, 1, &[("NCCL_SOCKET_IFNAME", "nope0")], |process| {
        ranks::api();
        let mut id = nccl_sys::ncclUniqueId::default();
        assert_eq!(nccl!(ncclGetUniqueId(&mut id)), INVALID_USAGE);
        let mut rank = Rank::alone(1, 0);
        let mut config = nccl_sys::NCCL_CONFIG_INITIALIZER;
        config.blocking = 0;
        let code = nccl!(ncclCommInitRankConfig(
            &mut rank.comm,
            2,
            id,
            0,
            &mut config
        ));
        assert_eq!(code, INVALID_USAGE);
        assert!(rank.comm.is_null());
        let log = process.log();
        assert!(log.contains("no socket interface found"), "{log}");
    });
}

#[test]
fn ranks_meet_over_the_loopback_interface() {
    let name = "ranks_meet_over_the_loopback_interface";
    on_both(name, 2, &[("NCCL_SOCKET_IFNAME", "lo")], |process| {
        let rank = process.join();
        Buffers::of(&rank).check(&rank);
        rank.destroy();
    });
}

#[test]
fn a_network_that_is_not_there_is_invalid_usage() {
    for net in ["IB", "no-such-network"] {
        on_both(
            "a_network_that_is_not_there_is_invalid_usage",
            1,
            &[("NCCL_NET", net)],
            |process| {
                let mut rank = Rank::alone(1, 0);
                let code = nccl!(ncclCommInitRank(&mut rank.comm, 1, process.id("id"), 0));
                assert_eq!(code, INVALID_USAGE);
                let log = process.log();
                assert!(log.contains("Failed to initialize any NET plugin"), "{log}");
            },
        );
    }
}

#[test]
fn two_ranks_on_one_device_are_invalid_usage() {
    on_both(
        "two_ranks_on_one_device_are_invalid_usage",
        2,
        &[("CUDA_VISIBLE_DEVICES", "3")],
        |process| {
            let mut rank = Rank::alone(2, process.rank);
            let code = nccl!(ncclCommInitRank(
                &mut rank.comm,
                2,
                process.id("id"),
                process.rank
            ));
            assert_eq!(code, INVALID_USAGE);
            let log = process.log();
            assert!(
                log.contains("uplicate GPU") || log.contains("using the same GPU"),
                "{log}"
            );
        },
    );
}

#[test]
fn ranks_that_disagree_about_their_number_hang_and_the_root_says_why() {
    let name = "ranks_that_disagree_about_their_number_hang_and_the_root_says_why";
    on_both(name, 2, &[], |process| {
        let ranks = 2 + process.rank;
        let (rank, code) = process.begin(ranks, process.rank);
        assert_eq!(code, IN_PROGRESS);
        assert!(stays(WATCHED, || rank.state() == IN_PROGRESS));
        if process.rank == 0 {
            let log = process.log();
            assert!(log.contains("mismatch in"), "{log}");
        }
        process.meet("watched");
        assert_eq!(rank.abort(), 0);
    });
}

#[test]
fn ranks_that_come_twice_hang_and_the_root_says_why() {
    on_both(
        "ranks_that_come_twice_hang_and_the_root_says_why",
        2,
        &[],
        |process| {
            let (rank, code) = process.begin(2, 0);
            assert_eq!(code, IN_PROGRESS);
            assert!(stays(WATCHED, || rank.state() == IN_PROGRESS));
            if process.rank == 0 {
                let log = process.log();
                assert!(log.contains("already checked in"), "{log}");
            }
            process.meet("watched");
            assert_eq!(rank.abort(), 0);
        },
    );
}

#[test]
fn a_rank_beyond_the_number_of_ranks_is_an_invalid_argument() {
    on_both(
        "a_rank_beyond_the_number_of_ranks_is_an_invalid_argument",
        1,
        &[],
        |process| {
            let (_, code) = process.begin(2, 2);
            assert_eq!(code, INVALID_ARGUMENT);
        },
    );
}

#[test]
fn a_death_is_noticed_by_nobody_while_another_rank_is_awaited() {
    // Of three ranks the third never joins; either the second dies, or the one whose process has the root.
    for dies in ["1", "0"] {
        let environment = [("TEST_DIES", dies)];
        let name = "a_death_is_noticed_by_nobody_while_another_rank_is_awaited";
        let victim: i32 = dies.parse().unwrap();
        processes_on_both(
            name,
            2,
            &environment,
            |rank, status| {
                if rank == victim {
                    killed(status)
                } else {
                    status.success()
                }
            },
            |process| {
                let victim: i32 = std::env::var("TEST_DIES").unwrap().parse().unwrap();
                let (rank, code) = process.begin(3, process.rank);
                assert_eq!(code, IN_PROGRESS);
                thread::sleep(Duration::from_millis(300));
                process.meet("inside");
                if process.rank == victim {
                    die();
                }
                assert!(stays(WATCHED, || rank.state() == IN_PROGRESS));
                assert_eq!(rank.abort(), 0);
            },
        );
    }
}

#[test]
fn a_death_over_p2p_or_shared_memory_is_never_reported() {
    for environment in [&P2P[..], &SHM[..]] {
        let name = "a_death_over_p2p_or_shared_memory_is_never_reported";
        processes_on_both(name, 2, environment, only_rank_1_is_killed, |process| {
            let rank = process.join_nonblocking();
            let buffers = until_rank_1_is_dead(&process, &rank);
            buffers.begin(&rank);
            assert!(stays(WATCHED, || rank.state() == 0 && !rank.is_idle()));
            // An abort ends the waiting kernel.
            let start = Instant::now();
            assert_eq!(rank.abort(), 0);
            wait_until("the stream is over", || rank.is_idle());
            assert!(start.elapsed() < SOON);
        });
    }
}

#[test]
fn a_death_over_sockets_is_a_remote_error() {
    let name = "a_death_over_sockets_is_a_remote_error";
    processes_on_both(name, 2, &SOCKETS, only_rank_1_is_killed, |process| {
        let rank = process.join_nonblocking();
        let buffers = until_rank_1_is_dead(&process, &rank);
        buffers.begin(&rank);
        if version() < 22800 {
            // The proxy's error reaches the log, and not the communicator's state.
            assert!(stays(WATCHED, || rank.state() == 0 && !rank.is_idle()));
        } else {
            assert_eq!(asynchronous_error(&rank), REMOTE_ERROR);
        }
        let log = process.log();
        assert!(log.contains("Connection closed by remote peer"), "{log}");
        assert_eq!(rank.abort(), 0);
    });
}

#[test]
fn a_rank_that_is_stopped_is_waited_for_over_sockets() {
    let name = "a_rank_that_is_stopped_is_waited_for_over_sockets";
    on_both(name, 2, &SOCKETS, |process| {
        let rank = process.join_nonblocking();
        let buffers = Buffers::of(&rank);
        buffers.check(&rank);
        process.meet("reduced");
        if process.rank == 1 {
            // A shell continues this process.
            let wake = format!("sleep 2; kill -CONT {}", std::process::id());
            let mut shell = std::process::Command::new("sh")
                .args(["-c", &wake])
                .spawn()
                .unwrap();
            // SAFETY: stops this process until the shell wakes it.
            unsafe { libc::raise(libc::SIGSTOP) };
            shell.wait().unwrap();
            buffers.check(&rank);
        } else {
            thread::sleep(Duration::from_millis(200));
            let start = Instant::now();
            buffers.check(&rank);
            assert!(start.elapsed() > Duration::from_millis(1000));
        }
        process.meet("over");
        assert_eq!(rank.abort(), 0);
    });
}

/// Whether the release has `ncclCommRevoke`.
fn has_revoke() -> bool {
    let has = version() >= 22807;
    if !has {
        println!("NOT TESTED: this release has no ncclCommRevoke");
    }
    has
}

/// Shrinks a communicator to the ranks that are alive. If it is non-blocking, NCCL writes the child some time later.
fn shrink(rank: &Rank, flags: i32) -> (ncclComm_t, u32) {
    let mut dead = [1];
    // Never freed: NCCL may write to it at any later time.
    let child: &'static AtomicPtr<_> = Box::leak(Box::default());
    let code = nccl!(ncclCommShrink(
        rank.comm,
        dead.as_mut_ptr(),
        1,
        child.as_ptr(),
        null_mut(),
        flags
    ));
    // Success may also mean that the shrink has only begun.
    if !matches!(code, 0 | IN_PROGRESS) {
        return (null_mut(), code);
    }
    wait_until("the child is there", || {
        !child.load(Ordering::Acquire).is_null() || !matches!(rank.state(), 0 | IN_PROGRESS)
    });
    (child.load(Ordering::Acquire), rank.settle())
}

/// Checks that a child of ranks 0 and 2 of three works.
fn check_child(process: &Process, rank: &Rank, comm: ncclComm_t) {
    let child = Rank {
        rank: process.rank / 2,
        ranks: 2,
        comm,
        gpu: rank.gpu.clone(),
        stream: rank.gpu.new_stream().unwrap(),
    };
    assert_eq!(child.settle(), 0, "{}", last_error());
    Buffers::of(&child).check(&child);
    child.destroy();
}

#[test]
fn after_a_death_over_p2p_a_revoked_communicator_shrinks() {
    let name = "after_a_death_over_p2p_a_revoked_communicator_shrinks";
    processes_on_both(name, 3, &P2P, only_rank_1_is_killed, |process| {
        if !has_revoke() {
            if process.rank == 1 {
                die();
            }
            return;
        }
        let rank = process.join_nonblocking();
        let buffers = until_rank_1_is_dead(&process, &rank);
        buffers.begin(&rank);
        assert!(matches!(
            nccl!(ncclCommRevoke(rank.comm, 0)),
            0 | IN_PROGRESS
        ));
        assert_eq!(rank.settle(), 0);
        wait_until("the kernel has ended", || rank.is_idle());
        let (child, code) = shrink(&rank, NCCL_SHRINK_DEFAULT);
        assert_eq!(code, 0, "{}", last_error());
        check_child(&process, &rank, child);
        rank.destroy();
    });
}

#[test]
fn a_revoked_communicator_takes_nothing_but_an_end() {
    let name = "a_revoked_communicator_takes_nothing_but_an_end";
    on_both(name, 2, &P2P, |process| {
        if !has_revoke() {
            return;
        }
        let rank = process.join();
        let buffers = Buffers::of(&rank);
        buffers.check(&rank);
        process.meet("reduced");
        assert_eq!(nccl!(ncclCommRevoke(rank.comm, 0)), 0);
        assert_eq!(buffers.issue(&rank), INVALID_USAGE);
        assert!(process.log().contains("was revoked"), "{}", process.log());
        assert_eq!(nccl!(ncclCommRevoke(rank.comm, 0)), INVALID_ARGUMENT);
        assert_eq!(nccl!(ncclCommFinalize(rank.comm)), INVALID_ARGUMENT);
        process.meet("refused");
        assert_eq!(rank.abort(), 0);
    });
}

#[test]
fn after_a_death_over_p2p_a_shrink_with_abort_works() {
    let name = "after_a_death_over_p2p_a_shrink_with_abort_works";
    processes_on_both(name, 3, &P2P, only_rank_1_is_killed, |process| {
        let rank = process.join_nonblocking();
        let buffers = until_rank_1_is_dead(&process, &rank);
        buffers.begin(&rank);
        let (child, code) = shrink(&rank, NCCL_SHRINK_ABORT);
        assert_eq!(code, 0, "{}", last_error());
        check_child(&process, &rank, child);
        assert_eq!(rank.abort(), 0);
    });
}

#[test]
fn after_an_asynchronous_error_a_shrink_is_refused() {
    let name = "after_an_asynchronous_error_a_shrink_is_refused";
    processes_on_both(name, 3, &SOCKETS, only_rank_1_is_killed, |process| {
        let rank = process.join_nonblocking();
        let buffers = until_rank_1_is_dead(&process, &rank);
        if version() < 22800 {
            println!("NOT TESTED: this release reports no asynchronous error over sockets");
            process.meet_of_two("over");
            return;
        }
        buffers.begin(&rank);
        assert_eq!(asynchronous_error(&rank), REMOTE_ERROR);
        let start = Instant::now();
        assert_eq!(shrink(&rank, NCCL_SHRINK_ABORT).1, REMOTE_ERROR);
        assert!(start.elapsed() < SOON);
        assert_eq!(Handle::of(&rank).destroy(), REMOTE_ERROR);
        process.meet_of_two("over");
    });
}

#[test]
fn a_shrink_without_an_error_works_after_a_death_over_sockets() {
    let name = "a_shrink_without_an_error_works_after_a_death_over_sockets";
    processes_on_both(name, 3, &SOCKETS, only_rank_1_is_killed, |process| {
        let rank = process.join_nonblocking();
        until_rank_1_is_dead(&process, &rank);
        let (child, code) = shrink(&rank, NCCL_SHRINK_DEFAULT);
        assert_eq!(code, 0, "{}", last_error());
        check_child(&process, &rank, child);
        assert_eq!(rank.abort(), 0);
    });
}

#[test]
fn a_blocking_finalize_waits_for_the_peer() {
    on_both(
        "a_blocking_finalize_waits_for_the_peer",
        2,
        &P2P,
        |process| {
            let rank = process.join();
            Buffers::of(&rank).check(&rank);
            process.meet("reduced");
            if process.rank == 0 {
                let start = Instant::now();
                assert_eq!(Handle::of(&rank).finalize(), 0);
                // Older releases do not wait for peers over P2P.
                let waits = version() >= 23203;
                assert_eq!(start.elapsed() > Duration::from_millis(1000), waits);
            } else {
                thread::sleep(Duration::from_millis(1500));
            }
            assert_eq!(Handle::of(&rank).destroy(), 0);
        },
    );
}

/// Retries that end after about two seconds, where the defaults take sixty.
const FEW_RETRIES: [(&str, &str); 2] = [
    ("NCCL_SOCKET_RETRY_CNT", "5"),
    ("NCCL_SOCKET_RETRY_SLEEP_MSEC", "100"),
];

#[test]
fn a_destroy_with_a_dead_peer_retries_over_p2p() {
    let name = "a_destroy_with_a_dead_peer_retries_over_p2p";
    let environment = [&P2P[..], &FEW_RETRIES[..]].concat();
    processes_on_both(name, 2, &environment, only_rank_1_is_killed, |process| {
        let rank = process.join();
        until_rank_1_is_dead(&process, &rank);
        let start = Instant::now();
        assert_eq!(Handle::of(&rank).destroy(), 0);
        let elapsed = start.elapsed();
        let log = process.log();
        // Older releases do not retry the connection. The sleeps are 100 + 200 + … + 500 ms.
        let retries = version() >= 23203;
        assert_eq!(
            elapsed > Duration::from_millis(1200),
            retries,
            "{elapsed:?}"
        );
        assert_eq!(log.contains("retrying (5/5)"), retries, "{log}");
    });
}

#[test]
fn a_destroy_with_a_dead_peer_is_soon_over_on_sockets() {
    let name = "a_destroy_with_a_dead_peer_is_soon_over_on_sockets";
    processes_on_both(name, 2, &SOCKETS, only_rank_1_is_killed, |process| {
        let rank = process.join();
        until_rank_1_is_dead(&process, &rank);
        let handle = Handle::of(&rank);
        assert_eq!(within(SOON, move || handle.destroy()), Some(0));
    });
}

#[test]
fn a_first_operation_with_a_dead_peer_is_a_remote_error_after_its_retries() {
    let name = "a_first_operation_with_a_dead_peer_is_a_remote_error_after_its_retries";
    let environment = [&P2P[..], &FEW_RETRIES[..]].concat();
    processes_on_both(name, 2, &environment, only_rank_1_is_killed, |process| {
        let rank = process.join();
        process.meet("joined");
        if process.rank == 1 {
            die();
        }
        thread::sleep(Duration::from_millis(300));
        let buffers = Buffers::of(&rank);
        let start = Instant::now();
        assert_eq!(buffers.issue(&rank), REMOTE_ERROR);
        assert!(
            start.elapsed() > Duration::from_millis(1200),
            "{:?}",
            start.elapsed()
        );
        let log = process.log();
        assert!(log.contains("exceeded error retry count"), "{log}");
    });
}

#[test]
fn a_first_operation_whose_peer_never_calls_is_ended_by_an_abort() {
    let name = "a_first_operation_whose_peer_never_calls_is_ended_by_an_abort";
    on_both(name, 2, &P2P, |process| {
        let rank = process.join_nonblocking();
        process.meet("joined");
        if process.rank == 0 {
            let buffers = Buffers::of(&rank);
            let start = Instant::now();
            assert_eq!(buffers.issue(&rank), IN_PROGRESS);
            assert!(start.elapsed() < SOON);
            assert!(stays(WATCHED, || rank.state() == IN_PROGRESS));
            assert_eq!(rank.abort(), 0);
        }
        process.meet("over");
        if process.rank == 1 {
            assert_eq!(rank.abort(), 0);
        }
    });
}

#[test]
fn a_split_with_a_dead_peer_is_a_remote_error() {
    let name = "a_split_with_a_dead_peer_is_a_remote_error";
    processes_on_both(name, 2, &P2P, only_rank_1_is_killed, |process| {
        let rank = process.join();
        until_rank_1_is_dead(&process, &rank);
        let mut child = null_mut();
        let code = nccl!(ncclCommSplit(rank.comm, 0, 0, &mut child, null_mut()));
        assert_eq!(code, REMOTE_ERROR);
        let log = process.log();
        assert!(log.contains("Connection closed by remote peer"), "{log}");
    });
}

#[test]
fn an_address_of_another_host_for_the_root_is_a_system_error() {
    let name = "an_address_of_another_host_for_the_root_is_a_system_error";
    on_both(name, 1, &[("NCCL_COMM_ID", "192.0.2.1:4000")], |process| {
        ranks::api();
        let mut id = nccl_sys::ncclUniqueId::default();
        let code = nccl!(ncclGetUniqueId(&mut id));
        let code = if code == 0 {
            let mut rank = Rank::alone(1, 0);
            nccl!(ncclCommInitRank(&mut rank.comm, 2, id, 0))
        } else {
            code
        };
        assert_eq!(code, 2, "{}", last_error());
        let log = process.log();
        assert!(log.contains("Cannot assign requested address"), "{log}");
    });
}

#[test]
fn too_few_descriptors_are_a_system_error_of_the_first_operation() {
    let name = "too_few_descriptors_are_a_system_error_of_the_first_operation";
    on_both(name, 2, &P2P, |process| {
        let rank = process.join();
        let buffers = Buffers::of(&rank);
        process.meet("joined");
        // More descriptors than NCCL's proxy passes to `poll`: with a lower limit it gets EINVAL there, and hangs.
        let limit = libc::rlimit {
            rlim_cur: 128,
            rlim_max: 128,
        };
        // SAFETY: the call reads one structure, which this is.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
        let mut taken = Vec::new();
        while let Ok(file) = std::fs::File::open("/dev/null") {
            taken.push(file);
        }
        let code = buffers.issue(&rank);
        drop(taken);
        assert_eq!(code, SYSTEM_ERROR, "{}", last_error());
        let log = process.log();
        assert!(log.contains("Too many open files"), "{log}");
        process.meet("over");
    });
}

#[test]
fn a_good_init_leaves_a_last_error() {
    on_both("a_good_init_leaves_a_last_error", 2, &[], |process| {
        let rank = process.join();
        match version() >= 23200 {
            true => assert!(last_error().contains("GDR Copy is not available")),
            // Older releases do not ask for GDRCopy.
            false => assert_eq!(last_error(), ""),
        }
        Buffers::of(&rank).check(&rank);
        rank.destroy();
    });
}

/// The time that this process has used of all cores.
fn processor_time() -> Duration {
    // SAFETY: all-zero is a value of numbers, and the call writes one rusage.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &raw mut usage);
        usage
    };
    let of = |time: libc::timeval| {
        Duration::from_secs(time.tv_sec as u64) + Duration::from_micros(time.tv_usec as u64)
    };
    of(usage.ru_utime) + of(usage.ru_stime)
}

#[test]
fn eight_ranks_that_wait_in_an_all_reduce_use_at_most_one_core() {
    let name = "eight_ranks_that_wait_in_an_all_reduce_use_at_most_one_core";
    let environment = [P2P[0], ("NCCL_EMULATOR_DEVICES", "9")];
    on_both(name, 1, &environment, |process| {
        const RANKS: i32 = 9;
        let id = process.id("id");
        let meeting = Barrier::new(RANKS as usize);
        thread::scope(|scope| {
            for rank in 0..RANKS {
                let meeting = &meeting;
                scope.spawn(move || {
                    let rank = Rank::join(id, RANKS, rank);
                    let buffers = Buffers::of(&rank);
                    buffers.check(&rank);
                    meeting.wait();
                    if rank.rank == 0 {
                        // The eight other ranks wait for this one.
                        thread::sleep(Duration::from_millis(300));
                        let (start, before) = (Instant::now(), processor_time());
                        thread::sleep(WATCHED);
                        let (elapsed, used) = (start.elapsed(), processor_time() - before);
                        assert!(used <= elapsed, "{used:?} of {elapsed:?}");
                    }
                    buffers.check(&rank);
                    rank.destroy();
                });
            }
        });
    });
}

#[test]
fn an_abort_of_connected_ranks_waits_for_the_proxy_thread() {
    let name = "an_abort_of_connected_ranks_waits_for_the_proxy_thread";
    on_both(name, 2, &P2P, |process| {
        // NCCL's thread polls in periods of half a second, and an abort may come at any moment of one.
        let join = |turn: usize| {
            let id = process.id(&format!("id {turn}"));
            Rank::join_nonblocking(id, process.ranks, process.rank)
        };
        let aborts = (0..4).map(|turn| {
            let rank = join(turn);
            Buffers::of(&rank).check(&rank);
            process.meet(&format!("connected {turn}"));
            time(|| assert_eq!(rank.abort(), 0))
        });
        let longest = aborts.max().unwrap_or_default();
        assert!(longest > Duration::from_millis(200), "{longest:?}");
        assert!(longest < SOON, "{longest:?}");
    });
}

fn time(body: impl FnOnce()) -> Duration {
    let start = Instant::now();
    body();
    start.elapsed()
}
