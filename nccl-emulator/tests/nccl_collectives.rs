//! Results of collectives, in place and out of place, for each type, root and number of ranks; and
//! collectives that never complete.

mod ranks;

use std::thread;
use std::time::Duration;

use nccl_sys::{ncclDataType_t as Kind, ncclRedOp_t as Op};
use ranks::cases::{Case, FUNCTIONS, Function, KINDS, Reduction, at_random, every_function, seed};
use ranks::{Rank, alone, last_error, nccl, processes, threads, unique_id, wait_until};

#[test]
fn every_collective_is_right_in_place_and_not_for_any_number_of_ranks() {
    let name = "every_collective_is_right_in_place_and_not_for_any_number_of_ranks";
    alone(name, &[], || {
        for ranks in [1, 2, 3, 5] {
            threads(ranks, every_function);
        }
    });
}

#[test]
fn every_collective_is_right_between_processes() {
    let name = "every_collective_is_right_between_processes";
    processes(name, 3, &[], |process| {
        let rank = process.join();
        every_function(&rank);
        rank.destroy();
    });
}

#[test]
fn every_rank_can_be_the_root() {
    alone("every_rank_can_be_the_root", &[], || {
        threads(4, |rank| {
            for function in FUNCTIONS {
                for root in 0..rank.ranks {
                    let case = Case::new(function, 1000);
                    Case { root, ..case }.check(rank);
                }
            }
        });
    });
}

#[test]
fn every_type_travels_and_is_reduced_by_every_operator() {
    let name = "every_type_travels_and_is_reduced_by_every_operator";
    alone(name, &[], || {
        threads(4, |rank| {
            let operators = [
                Op::ncclSum,
                Op::ncclProd,
                Op::ncclMax,
                Op::ncclMin,
                Op::ncclAvg,
            ];
            for function in FUNCTIONS {
                for kind in KINDS {
                    let used = if function.reduces() {
                        &operators[..]
                    } else {
                        &operators[..1]
                    };
                    for &operator in used {
                        let case = Case {
                            kind,
                            reduction: Reduction::BuiltIn(operator),
                            shift: 1,
                            ..Case::new(function, 1003)
                        };
                        case.check(rank);
                    }
                }
            }
        });
    });
}

#[test]
fn random_groups_of_collectives_are_right() {
    alone("random_groups_of_collectives_are_right", &[], || {
        for ranks in [1, 2, 3, 4, 8] {
            threads(ranks, |rank| {
                at_random(rank, seed() + ranks as u64, 60 / ranks as usize + 10);
            });
        }
    });
}

#[test]
fn random_groups_of_collectives_are_right_between_processes() {
    let name = "random_groups_of_collectives_are_right_between_processes";
    processes(name, 4, &[], |process| {
        let rank = process.join();
        at_random(&rank, seed() + 100, 40);
        rank.destroy();
    });
}

#[test]
fn collectives_that_only_move_bytes_meet_with_different_types() {
    let name = "collectives_that_only_move_bytes_meet_with_different_types";
    alone(name, &[], || {
        threads(2, |rank| {
            let (kind, count) =
                [(Kind::ncclFloat64, 10), (Kind::ncclUint8, 80)][rank.rank as usize];
            let from = rank.memory(&[rank.rank as u8 + 1; 80]);
            let to = rank.memory(&[0u8; 160]);
            let (comm, stream) = (rank.comm, rank.cuda_stream());
            assert_eq!(
                nccl!(ncclAllGather(
                    from.ptr(),
                    to.ptr(),
                    count,
                    kind,
                    comm,
                    stream
                )),
                0
            );
            rank.sync();
            assert_eq!(to.read(), [[1u8; 80], [2; 80]].concat());
            assert_eq!(
                nccl!(ncclBroadcast(
                    from.ptr(),
                    to.ptr(),
                    count,
                    kind,
                    1,
                    comm,
                    stream
                )),
                0
            );
            rank.sync();
            assert_eq!(to.read(), [[2u8; 80], [2; 80]].concat());
        });
    });
}

#[test]
fn broadcasts_from_several_roots_in_a_group_meet_whatever_their_order() {
    let name = "broadcasts_from_several_roots_in_a_group_meet_whatever_their_order";
    alone(name, &[], || {
        threads(3, |rank| {
            // An all-gather of parts that differ in size.
            let mut cases: Vec<_> = (0..3)
                .map(|root| Case {
                    root,
                    ..Case::new(Function::Broadcast, 100 + root as usize)
                })
                .collect();
            cases.rotate_left(rank.rank as usize);
            let prepared: Vec<_> = cases.iter().map(|case| case.prepare(rank)).collect();
            assert_eq!(nccl!(ncclGroupStart()), 0);
            for prepared in &prepared {
                assert_eq!(prepared.issue(rank), 0);
            }
            assert_eq!(nccl!(ncclGroupEnd()), 0, "{}", last_error());
            rank.sync();
            prepared
                .into_iter()
                .for_each(|prepared| prepared.verify(rank));
        });
    });
}

/// Runs two ranks as threads, which call `wrong` after correct collectives: neither stream makes progress
/// until both ranks abort.
fn hangs_until_abort(function: Function, wrong: impl Fn(&Rank) -> Option<Case> + Sync) {
    let id = unique_id();
    let waiting = std::sync::Barrier::new(2);
    thread::scope(|scope| {
        for rank in 0..2 {
            let (wrong, waiting) = (&wrong, &waiting);
            scope.spawn(move || {
                let rank = Rank::join(id, 2, rank);
                for root in 0..2 {
                    // This establishes both connections of the pair.
                    Case {
                        root,
                        ..Case::new(function, 500)
                    }
                    .check(&rank);
                }
                let issued = wrong(&rank).map(|case| case.prepare(&rank));
                if let Some(prepared) = &issued {
                    assert_eq!(prepared.issue(&rank), 0, "{}", last_error());
                }
                waiting.wait();
                thread::sleep(Duration::from_millis(30));
                if issued.is_some() {
                    assert!(
                        !rank.is_idle(),
                        "rank {} is through with {function:?}",
                        rank.rank
                    );
                }
                waiting.wait();
                assert_eq!(rank.state(), 0);
                assert_eq!(rank.abort(), 0);
                wait_until("the stream is idle", || rank.is_idle());
                rank.sync();
            });
        }
    });
}

#[test]
fn a_collective_that_a_rank_does_not_join_hangs_until_it_is_aborted() {
    let name = "a_collective_that_a_rank_does_not_join_hangs_until_it_is_aborted";
    alone(name, &[], || {
        for function in FUNCTIONS {
            // The rank that waits for the other one.
            let waits = i32::from(matches!(function, Function::Scatter));
            hangs_until_abort(function, |rank| {
                (rank.rank == waits).then(|| Case::new(function, 500))
            });
        }
    });
}

#[test]
fn a_collective_of_different_counts_hangs_until_it_is_aborted() {
    let name = "a_collective_of_different_counts_hangs_until_it_is_aborted";
    alone(name, &[], || {
        for function in FUNCTIONS {
            hangs_until_abort(function, |rank| {
                Some(Case::new(function, 500 + rank.rank as usize))
            });
        }
        // Each function has one violation; the all-to-all has two, one for each of its messages.
        let told = nccl_emulator::violations();
        assert_eq!(told.len(), FUNCTIONS.len() + 1, "{told:?}");
    });
}

#[test]
fn a_collective_of_different_roots_or_operators_hangs_until_it_is_aborted() {
    let name = "a_collective_of_different_roots_or_operators_hangs_until_it_is_aborted";
    alone(name, &[], || {
        use Function::{AllReduce, Broadcast, Gather, Reduce, ReduceScatter, Scatter};
        for function in [Broadcast, Reduce, Gather, Scatter] {
            // Each rank waits for data that the other one does not send, because their roots differ.
            let root = |rank: &Rank| match function {
                Scatter => 1 - rank.rank,
                _ => rank.rank,
            };
            hangs_until_abort(function, |rank| {
                Some(Case {
                    root: root(rank),
                    ..Case::new(function, 500)
                })
            });
        }
        for function in [AllReduce, Reduce, ReduceScatter] {
            let operators = [Op::ncclSum, Op::ncclProd];
            hangs_until_abort(function, |rank| {
                let operator = operators[rank.rank as usize];
                Some(Case {
                    reduction: Reduction::BuiltIn(operator),
                    ..Case::new(function, 500)
                })
            });
        }
    });
}

#[test]
fn the_first_use_of_each_waits_on_the_host_and_an_abort_ends_it() {
    let name = "the_first_use_of_each_waits_on_the_host_and_an_abort_ends_it";
    alone(name, &[], || {
        for function in FUNCTIONS {
            let id = unique_id();
            let other = thread::spawn(move || Rank::join_nonblocking(id, 2, 1));
            let rank = Rank::join_nonblocking(id, 2, 0);
            let other = other.join().unwrap();
            // The rank that is connected to the other one in any case.
            let (this, that) = if function == Function::Scatter {
                (other, rank)
            } else {
                (rank, other)
            };
            let prepared = Case::new(function, 100).prepare(&this);
            assert_eq!(prepared.issue(&this), 7, "{function:?}: {}", last_error());
            thread::sleep(Duration::from_millis(20));
            assert_eq!(this.state(), 7, "{function:?} does not wait");
            assert!(this.is_idle());
            assert_eq!(this.abort(), 0);
            assert_eq!(that.abort(), 0);
        }
    });
}

#[test]
fn an_abort_in_the_middle_of_a_large_one_ends_it_on_each_rank_that_aborts() {
    let name = "an_abort_in_the_middle_of_a_large_one_ends_it_on_each_rank_that_aborts";
    alone(name, &[], || {
        for function in FUNCTIONS {
            let id = unique_id();
            thread::scope(|scope| {
                for rank in 0..3 {
                    scope.spawn(move || {
                        let rank = Rank::join(id, 3, rank);
                        let case = Case::new(function, 400_000);
                        case.check(&rank);
                        let prepared: Vec<_> = (0..4).map(|_| case.prepare(&rank)).collect();
                        for prepared in &prepared {
                            assert_eq!(prepared.issue(&rank), 0, "{}", last_error());
                        }
                        // Each rank aborts at another moment, somewhere within the issued collectives.
                        thread::sleep(Duration::from_micros(300 * rank.rank as u64));
                        assert_eq!(rank.abort(), 0);
                        rank.sync();
                    });
                }
            });
        }
    });
}
