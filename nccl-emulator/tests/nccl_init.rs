//! Creating communicators: every init function, and every way in which an init fails.

mod ranks;

use std::fs;
use std::ptr::null_mut;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use nccl_sys::{NCCL_CONFIG_INITIALIZER, ncclDataType_t as Kind, ncclRedOp_t as Op};
use ranks::{Rank, alone, last_error, nccl, processes, threads, unique_id, wait_until};

/// A handle that another thread may read, as NCCL allows for aborting.
struct Shared(Mutex<usize>);

impl Shared {
    const fn new() -> Self {
        Self(Mutex::new(0))
    }

    /// Calls `init` with a place for the handle that [`Shared::get`] watches.
    fn init(&self, init: impl FnOnce(*mut nccl_sys::ncclComm_t) -> u32) -> u32 {
        let place: *mut usize = {
            let mut guard = self.0.lock().unwrap();
            &raw mut *guard
        };
        init(place.cast())
    }

    fn get(&self) -> nccl_sys::ncclComm_t {
        let guard = self.0.lock().unwrap();
        // SAFETY: the value lives in the mutex; the library writes to it from another thread.
        let handle = unsafe { (&raw const *guard).read_volatile() };
        std::ptr::with_exposed_provenance_mut(handle)
    }
}

#[test]
fn every_way_in_gives_the_same_communicator() {
    alone("every_way_in_gives_the_same_communicator", &[], || {
        for way in 0..3 {
            let ids = [unique_id(), unique_id()];
            thread::scope(|scope| {
                for rank in 0..2 {
                    scope.spawn(move || {
                        let mut this = Rank::alone(2, rank);
                        let mut config = NCCL_CONFIG_INITIALIZER;
                        let (comm, mut ids) = (&mut this.comm, ids);
                        let code = match way {
                            0 => nccl!(ncclCommInitRank(comm, 2, ids[0], rank)),
                            1 => nccl!(ncclCommInitRankConfig(comm, 2, ids[0], rank, &mut config)),
                            _ => nccl!(ncclCommInitRankScalable(
                                comm,
                                2,
                                rank,
                                2,
                                ids.as_mut_ptr(),
                                null_mut()
                            )),
                        };
                        assert_eq!(code, 0, "{}", last_error());
                        let (mut count, mut device, mut own) = (0, 0, 0);
                        assert_eq!(nccl!(ncclCommCount(this.comm, &mut count)), 0);
                        assert_eq!(nccl!(ncclCommCuDevice(this.comm, &mut device)), 0);
                        assert_eq!(nccl!(ncclCommUserRank(this.comm, &mut own)), 0);
                        assert_eq!((count, device, own), (2, rank, rank));
                        let memory = this.memory(&[1i32]);
                        assert_eq!(
                            this.all_reduce(&memory, &memory, Kind::ncclInt32, Op::ncclSum),
                            0
                        );
                        this.sync();
                        assert_eq!(memory.read(), [2]);
                        this.destroy();
                    });
                }
            });
        }
    });
}

#[test]
fn nccl_comm_id_replaces_the_exchange_of_ids() {
    let environment = [("NCCL_COMM_ID", "127.0.0.1:23456")];
    processes(
        "nccl_comm_id_replaces_the_exchange_of_ids",
        3,
        &environment,
        |process| {
            let rank = Rank::join(unique_id(), process.ranks, process.rank);
            rank.destroy();
        },
    );
}

#[test]
fn a_malformed_nccl_comm_id_is_refused() {
    alone(
        "a_malformed_nccl_comm_id_is_refused",
        &[("NCCL_COMM_ID", "garbage")],
        || {
            let mut id = nccl_sys::ncclUniqueId::default();
            assert_eq!(nccl!(ncclGetUniqueId(&mut id)), 4);
            assert!(
                last_error().starts_with("Invalid NCCL_COMM_ID"),
                "{}",
                last_error()
            );
        },
    );
}

#[test]
fn wrong_arguments_are_refused_before_anything_else() {
    alone(
        "wrong_arguments_are_refused_before_anything_else",
        &[],
        || {
            let id = unique_id();
            let mut comm = std::ptr::dangling_mut();
            assert_eq!(nccl!(ncclCommInitRank(&mut comm, 2, id, 2)), 4);
            assert_eq!(last_error(), "Invalid rank requested : 2/2");
            assert!(comm.is_null());
            assert_eq!(nccl!(ncclCommInitRank(&mut comm, 2, id, -1)), 4);
            assert_eq!(nccl!(ncclCommInitRank(null_mut(), 2, id, 0)), 4);
            let mut config = NCCL_CONFIG_INITIALIZER;
            config.magic = 1;
            assert_eq!(
                nccl!(ncclCommInitRankConfig(&mut comm, 2, id, 0, &mut config)),
                4
            );
            let text = "ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER";
            assert_eq!(last_error(), text);
            config = NCCL_CONFIG_INITIALIZER;
            config.blocking = 3;
            assert_eq!(
                nccl!(ncclCommInitRankConfig(&mut comm, 2, id, 0, &mut config)),
                4
            );
            assert_eq!(last_error(), "Invalid config blocking attribute value 3");
            let mut ids = [id; 3];
            let ids = ids.as_mut_ptr();
            assert_eq!(
                nccl!(ncclCommInitRankScalable(
                    &mut comm,
                    2,
                    0,
                    3,
                    ids,
                    null_mut()
                )),
                4
            );
            let text = "improper usage of ncclCommInitRank: nId = 3, nranks=2";
            assert_eq!(last_error(), text);
            let mut comms = [null_mut(); 2];
            assert_eq!(
                nccl!(ncclCommInitAll(comms.as_mut_ptr(), -1, std::ptr::null())),
                4
            );
            assert_eq!(
                nccl!(ncclCommInitAll(comms.as_mut_ptr(), 2, [0, 99].as_ptr())),
                4
            );
            assert_eq!(
                nccl!(ncclCommInitAll(comms.as_mut_ptr(), 2, [1, 1].as_ptr())),
                5
            );
            // None of these calls leaves the thread inside a group.
            assert_eq!(nccl!(ncclGroupEnd()), 5);
            let foreign = nccl_sys::ncclUniqueId::default();
            assert_eq!(nccl!(ncclCommInitRank(&mut comm, 1, foreign, 0)), 5);
        },
    );
}

#[test]
fn two_ranks_on_one_gpu_are_refused_unless_asked_for() {
    let test = "two_ranks_on_one_gpu_are_refused_unless_asked_for";
    let one = [("NCCL_EMULATOR_DEVICES", "1")];
    processes(test, 2, &one, |process| {
        let mut rank = Rank::alone(2, process.rank);
        let id = process.id("id");
        assert_eq!(
            nccl!(ncclCommInitRank(&mut rank.comm, 2, id, process.rank)),
            5
        );
        let text = "Multiple Ranks are using the same GPU/Partition. Set \
                    NCCL_MULTI_RANK_GPU_ENABLE=1 to enable this configuration.";
        assert_eq!(last_error(), text);
        assert_eq!(nccl!(ncclCommAbort(rank.comm)), 0);
    });
}

#[test]
fn two_ranks_share_a_gpu_when_asked_to() {
    let environment = [
        ("NCCL_EMULATOR_DEVICES", "1"),
        ("NCCL_MULTI_RANK_GPU_ENABLE", "1"),
    ];
    alone("two_ranks_share_a_gpu_when_asked_to", &environment, || {
        threads(3, |rank| {
            let memory = rank.memory(&[rank.rank; 1000]);
            assert_eq!(
                rank.all_reduce(&memory, &memory, Kind::ncclInt32, Op::ncclSum),
                0
            );
            rank.sync();
            assert_eq!(memory.read(), [3; 1000]);
        });
    });
}

#[test]
fn an_init_with_a_missing_rank_hangs_until_another_thread_aborts_it() {
    let test = "an_init_with_a_missing_rank_hangs_until_another_thread_aborts_it";
    alone(test, &[], || {
        let shared = Shared::new();
        let id = unique_id();
        thread::scope(|scope| {
            let init = scope.spawn(|| {
                ranks::api();
                shared.init(|comm| nccl!(ncclCommInitRank(comm, 2, id, 0)))
            });
            wait_until("the handle is there", || !shared.get().is_null());
            thread::sleep(Duration::from_millis(50));
            assert!(!init.is_finished());
            assert_eq!(nccl!(ncclCommAbort(shared.get())), 0);
            assert_eq!(init.join().unwrap(), 3);
        });
        // In NCCL the thread inside the call would use freed memory.
        let violations = nccl_emulator::violations();
        assert!(
            violations[0].to_string().contains("blocking communicator"),
            "{violations:?}"
        );
    });
}

#[test]
fn an_init_whose_other_rank_has_failed_and_ended_is_a_remote_error() {
    let test = "an_init_whose_other_rank_has_failed_and_ended_is_a_remote_error";
    // Both ranks have the same GPU, which only rank 1 permits.
    let environment = [
        ("NCCL_EMULATOR_DEVICES", "1"),
        ("NCCL_MULTI_RANK_GPU_ENABLE", "{rank}"),
    ];
    processes(test, 2, &environment, |process| {
        let mut rank = Rank::alone(2, process.rank);
        let id = process.id("id");
        let code = nccl!(ncclCommInitRank(&mut rank.comm, 2, id, process.rank));
        match process.rank {
            0 => assert_eq!(code, 5, "{}", last_error()),
            _ => {
                assert_eq!(code, 6);
                let text = last_error();
                assert!(text.contains("Connection closed by remote peer"), "{text}");
            }
        }
    });
}

/// Limits this process to the descriptors that it has and some more, or no longer limits it.
fn leave_descriptors(more: Option<u64>) {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: plain calls; the struct is ours to write to and to read from.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit), 0);
        limit.rlim_cur = match more {
            Some(more) => {
                let lowest = libc::dup(0);
                libc::close(lowest);
                u64::try_from(lowest).unwrap() + more
            }
            None => limit.rlim_max,
        };
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &limit), 0);
    }
}

#[test]
fn a_root_without_descriptors_for_its_ranks_tells_them_or_waits_for_some() {
    let test = "a_root_without_descriptors_for_its_ranks_tells_them_or_waits_for_some";
    processes(test, 3, &[], |process| {
        for (turn, more) in [0, 1].into_iter().enumerate() {
            let (name, over) = (format!("id-{turn}"), format!("over-{turn}"));
            let both_are = || (0..2).all(|rank| process.is_marked(&format!("{over}-{rank}")));
            if process.rank == 2 {
                process.put_id("hidden", &unique_id());
                leave_descriptors(Some(more));
                // Needs no descriptor.
                fs::rename(process.file("hidden"), process.file(&name)).unwrap();
                if turn == 0 {
                    thread::sleep(Duration::from_millis(600));
                    leave_descriptors(None);
                }
                wait_until("both ranks are over", both_are);
                leave_descriptors(None);
                continue;
            }
            let mut rank = Rank::alone(2, process.rank);
            let id = process.get_id(&name);
            let code = nccl!(ncclCommInitRank(&mut rank.comm, 2, id, process.rank));
            match turn {
                // It accepts no connection until it has descriptors again.
                0 => {
                    assert_eq!(code, 0, "{}", last_error());
                    rank.destroy();
                }
                // It accepts a connection, but not the memory that the rank sends.
                _ => {
                    assert_eq!(code, 5);
                    assert!(last_error().contains("ulimit"), "{}", last_error());
                }
            }
            process.mark(&format!("{over}-{}", process.rank));
        }
    });
}

#[test]
fn a_nonblocking_init_with_a_missing_rank_stays_in_progress_until_aborted() {
    let test = "a_nonblocking_init_with_a_missing_rank_stays_in_progress_until_aborted";
    alone(test, &[], || {
        let mut before = (0, 0);
        for turn in 0..6 {
            let mut rank = Rank::alone(2, 0);
            if turn == 1 {
                // By now the emulator has created its permanent resources.
                thread::sleep(Duration::from_millis(100));
                before = resources();
            }
            let mut config = NCCL_CONFIG_INITIALIZER;
            config.blocking = 0;
            let id = unique_id();
            let start = Instant::now();
            assert_eq!(
                nccl!(ncclCommInitRankConfig(
                    &mut rank.comm,
                    2,
                    id,
                    0,
                    &mut config
                )),
                7
            );
            assert!(start.elapsed() < Duration::from_secs(1));
            thread::sleep(Duration::from_millis(30));
            assert_eq!(rank.state(), 7);
            let mut count = 0;
            assert_eq!(nccl!(ncclCommCount(rank.comm, &mut count)), 4);
            let text = "Attempt to use communicator before the previous operation returned \
                        ncclSuccess";
            assert_eq!(last_error(), text);
            assert_eq!(nccl!(ncclCommAbort(rank.comm)), 0);
            assert!(start.elapsed() < Duration::from_secs(1));
        }
        assert!(nccl_emulator::violations().is_empty());
        // The roots detect that all ranks have left, and end.
        settles(before);
    });
}

/// Descriptors and threads of this process.
fn resources() -> (usize, usize) {
    let count = |directory| fs::read_dir(directory).unwrap().count();
    (count("/proc/self/fd"), count("/proc/self/task"))
}

/// Waits until the process has about as many again: the emulator keeps a few threads for a while.
fn settles((fds, threads): (usize, usize)) {
    let mut last = (0, 0);
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(10) {
        last = resources();
        if last.0 <= fds + 2 && last.1 <= threads + 6 {
            return;
        }
        thread::sleep(Duration::from_millis(20));
    }
    panic!(
        "descriptors and threads grew from {fds}, {threads} to {}, {}",
        last.0, last.1
    );
}

#[test]
fn descriptors_and_threads_do_not_grow_over_many_communicators() {
    let test = "descriptors_and_threads_do_not_grow_over_many_communicators";
    alone(test, &[], || {
        let cycle = || {
            threads(2, |rank| {
                let memory = rank.memory(&[1u8]);
                assert_eq!(
                    rank.all_reduce(&memory, &memory, Kind::ncclUint8, Op::ncclSum),
                    0
                );
                rank.sync();
                memory.free();
            });
        };
        cycle();
        let before = resources();
        let maps = || fs::read_to_string("/proc/self/maps").unwrap();
        (0..200).for_each(|_| cycle());
        settles(before);
        assert_eq!(
            maps().matches("communicator").count(),
            0,
            "a segment is still mapped"
        );
    });
}

#[test]
fn ranks_that_disagree_on_their_number_hang_and_only_the_root_says_why() {
    let test = "ranks_that_disagree_on_their_number_hang_and_only_the_root_says_why";
    alone(test, &[], || {
        let shared = [Shared::new(), Shared::new()];
        let id = unique_id();
        thread::scope(|scope| {
            let inits: Vec<_> = shared
                .iter()
                .enumerate()
                .map(|(rank, shared)| {
                    scope.spawn(move || {
                        shared.init(|comm| {
                            nccl!(ncclCommInitRank(comm, 2 + rank as i32, id, rank as i32))
                        })
                    })
                })
                .collect();
            wait_until("the root has seen both", || {
                last_error().contains("mismatch in info")
            });
            assert!(
                last_error().starts_with("Bootstrap Root : mismatch in info from procs, nranks")
            );
            thread::sleep(Duration::from_millis(50));
            assert!(inits.iter().all(|init| !init.is_finished()));
            for shared in &shared {
                assert_eq!(nccl!(ncclCommAbort(shared.get())), 0);
            }
            assert!(inits.into_iter().all(|init| init.join().unwrap() == 3));
        });
    });
}

#[test]
fn under_strict_ranks_that_disagree_are_told_at_once() {
    let strict = [("NCCL_EMULATOR_STRICT", "1")];
    alone(
        "under_strict_ranks_that_disagree_are_told_at_once",
        &strict,
        || {
            let id = unique_id();
            thread::scope(|scope| {
                let twice = [0, 0].map(|rank| {
                    scope.spawn(move || {
                        let mut comm = null_mut();
                        nccl!(ncclCommInitRank(&mut comm, 2, id, rank))
                    })
                });
                assert_eq!(twice.map(|init| init.join().unwrap()), [5, 5]);
            });
            assert!(
                last_error().contains("rank 0 of 2 ranks has already checked in"),
                "{}",
                last_error()
            );
        },
    );
}

#[test]
fn an_id_is_good_for_one_communicator() {
    // Five quick attempts instead of a minute's worth.
    let quick = [
        ("NCCL_SOCKET_RETRY_CNT", "4"),
        ("NCCL_SOCKET_RETRY_SLEEP_MSEC", "1"),
    ];
    alone("an_id_is_good_for_one_communicator", &quick, || {
        let id = unique_id();
        Rank::join(id, 1, 0).destroy();
        let mut comm = null_mut();
        assert_eq!(nccl!(ncclCommInitRank(&mut comm, 1, id, 0)), 6);
        assert!(last_error().contains("exceeded error retry count after 5 attempts"));
        // A failed init leaves no communicator behind, unless it failed in a group.
        assert!(comm.is_null());
        let config = null_mut();
        assert_eq!(
            nccl!(ncclCommInitRankConfig(&mut comm, 1, id, 0, config)),
            6
        );
        assert!(!comm.is_null());
        assert_eq!(nccl!(ncclCommAbort(comm)), 0);
    });
}

#[test]
fn the_environment_beats_the_config() {
    alone(
        "the_environment_beats_the_config",
        &[("NCCL_COMM_BLOCKING", "0")],
        || {
            let id = unique_id();
            let mut rank = Rank::alone(1, 0);
            let code = nccl!(ncclCommInitRank(&mut rank.comm, 1, id, 0));
            assert!(matches!(code, 0 | 7), "{code}");
            assert_eq!(rank.settle(), 0);
            rank.destroy();
        },
    );
}

#[test]
fn a_context_that_has_failed_cannot_be_given_to_a_communicator() {
    let test = "a_context_that_has_failed_cannot_be_given_to_a_communicator";
    alone(test, &[], || {
        let mut rank = Rank::alone(1, 0);
        let memory = rank.memory(&[0u8; 64]);
        memory.free();
        let id = unique_id();
        let mut other = Rank::join(unique_id(), 1, 0);
        let to = other.memory(&[0u8; 64]);
        assert_eq!(
            other.all_reduce(&memory, &to, Kind::ncclUint8, Op::ncclSum),
            0
        );
        wait_until("the context has failed", || {
            other.stream.synchronize().is_err()
        });
        assert_eq!(nccl!(ncclCommInitRank(&mut rank.comm, 1, id, 0)), 1);
        assert!(rank.comm.is_null());
        other.comm = null_mut();
    });
}

#[test]
fn the_log_has_nccls_lines() {
    let place = std::env::temp_dir().join(format!("nccl-emulator-log-{}", std::process::id()));
    fs::create_dir_all(&place).unwrap();
    let file = place.join("log.%h.%p");
    let environment = [
        ("NCCL_DEBUG", "INFO"),
        ("NCCL_DEBUG_SUBSYS", "INIT,BOOTSTRAP,DESTROY,P2P,COLL"),
        ("NCCL_DEBUG_FILE", file.to_str().unwrap()),
    ];
    processes("the_log_has_nccls_lines", 2, &environment, |process| {
        let rank = process.join();
        let memory = rank.memory(&[1u8; 8]);
        assert_eq!(
            rank.all_reduce(&memory, &memory, Kind::ncclUint8, Op::ncclSum),
            0
        );
        let to = rank.memory(&[1u8; 8]);
        assert_eq!(rank.all_to_all(&memory, &to, Kind::ncclUint8), 0);
        rank.sync();
        assert_eq!(rank.send(&memory, Kind::ncclUint8, 9), 4);
        rank.destroy();
    });
    let logs: Vec<String> = fs::read_dir(&place)
        .unwrap()
        .map(|entry| fs::read_to_string(entry.unwrap().path()).unwrap())
        .collect();
    // In the child processes the directory has another name, and is empty.
    if !logs.is_empty() {
        assert_eq!(logs.len(), 2);
        for log in &logs {
            for part in [
                "NCCL INFO NCCL version 2.32.3+cuda13.0\n",
                "NCCL INFO NCCL git version nccl-emulator",
                "NCCL INFO Bootstrap: Using ",
                " ncclCommInitRank comm 0x",
                " - Init START\n",
                " - Init COMPLETE\n",
                " nRanks 2 nNodes 1 localRanks 2 localRank ",
                "NCCL INFO Using network Emulator\n",
                " via P2P/CUMEM\n",
                "NCCL INFO Connected all rings, use ring PXN 0 GDR 0\n",
                "NCCL INFO AllReduce: opCount 0 sendbuff 0x",
                " - Destroy COMPLETE\n",
                "NCCL INFO Init timings - ncclCommInitRank: rank ",
            ] {
                assert!(log.contains(part), "no {part:?} in\n{log}");
            }
            let place = |part| log.find(part).unwrap();
            assert!(place("Using network") < place("- Init START"), "{log}");
            let warning = log.split("\n\n").nth(2).unwrap().lines().next().unwrap();
            assert!(warning.starts_with("[20"), "{warning}");
            let text = " NCCL WARN Send : invalid root 9 (root should be in the 0..2 range)";
            assert!(warning.ends_with(text), "{warning}");
        }
    }
    fs::remove_dir_all(&place).unwrap();
}

#[test]
fn an_older_release_says_it_in_its_own_words() {
    let place = std::env::temp_dir().join(format!("nccl-emulator-old-{}", std::process::id()));
    fs::create_dir_all(&place).unwrap();
    let file = place.join("log.%p");
    let environment = [
        ("NCCL_DEBUG", "INFO"),
        ("NCCL_DEBUG_FILE", file.to_str().unwrap()),
        ("NCCL_EMULATOR_VERSION", "2.18.3"),
    ];
    processes(
        "an_older_release_says_it_in_its_own_words",
        1,
        &environment,
        |process| {
            process.join().destroy();
        },
    );
    let logs: Vec<String> = fs::read_dir(&place)
        .unwrap()
        .map(|entry| fs::read_to_string(entry.unwrap().path()).unwrap())
        .collect();
    for log in &logs {
        for part in [
            "NCCL INFO NCCL version 2.18.3+cuda",
            "NCCL INFO Bootstrap : Using ",
            "NCCL INFO comm 0x",
            " - Init COMPLETE\n",
        ] {
            assert!(log.contains(part), "no {part:?} in\n{log}");
        }
        assert!(
            !log.contains("[Rank 0]") && !log.contains("Init timings"),
            "{log}"
        );
    }
    fs::remove_dir_all(&place).unwrap();
}
