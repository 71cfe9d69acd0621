//! Observers, and the reports of the process that has started a rank.

use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::events::{Events, WorldEvent};
use crate::observer::Observer;
use crate::operation::OperationKind;
use crate::world_view::RankEnd;
use crate::{EntryReport, QueriedOperation, StragglerQueryRequest};

const LONG: Duration = Duration::from_secs(10);

/// Waits for the next event of interest.
fn wait_for<T>(events: &mut Events, wanted: impl Fn(&WorldEvent) -> Option<T>) -> T {
    let deadline = Instant::now() + LONG;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let event = events.next_within(left);
        let event = event.unwrap_or_else(|| panic!("no such event within {LONG:?}"));
        if let Some(found) = wanted(&event) {
            return found;
        }
    }
}

fn joined(events: &mut Events, rank: usize) {
    wait_for(events, |event| {
        matches!(event, WorldEvent::Joined { rank: r, .. } if *r == rank).then_some(())
    });
}

#[test]
fn an_observer_sees_what_becomes_of_the_ranks_and_is_none_of_them() {
    let meet = |rank| rendezvous("seen", rank, 3).with(|meet| meet.secret = Some(SECRET.into()));
    std::thread::scope(|scope| {
        let observers: Vec<_> = (0..3)
            .map(|_| scope.spawn(|| Observer::join(meet(0)).unwrap()))
            .collect();
        let ranks: Vec<_> = (0..3)
            .map(|rank| scope.spawn(move || World::join(meet(rank)).unwrap()))
            .collect();
        let mut worlds: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
        for observer in observers {
            let observer = observer.join().unwrap();
            let mut events = observer.events();
            let mut seen = [false; 3];
            for _ in 0..3 {
                let rank = wait_for(&mut events, |event| match event {
                    WorldEvent::Joined { rank, pid, .. } => {
                        assert_eq!(*pid, std::process::id());
                        Some(*rank)
                    }
                    _ => None,
                });
                seen[rank] = true;
            }
            assert_eq!(seen, [true; 3]);
            assert!(observer.snapshot().connected);
            drop(observer);
        }
        // A later observer sees the same state, and the events that follow.
        let observer = Observer::join(meet(1)).unwrap();
        let mut events = observer.events();
        joined(&mut events, 2);
        worlds[2].phase("load weights");
        wait_for(&mut events, |event| {
            matches!(event, WorldEvent::Phase { rank: 2, name } if name == "load weights")
                .then_some(())
        });
        // The time that a repeated report was under way is not part of the age.
        let begun = Instant::now();
        loop {
            let (name, since) = observer.snapshot().ranks[2].phase.clone().unwrap();
            assert_eq!(name, "load weights");
            assert!(since < LONG, "{since:?}");
            if since >= Duration::from_millis(30) {
                break;
            }
            assert!(begun.elapsed() < LONG, "{since:?}");
            std::thread::sleep(Duration::from_millis(5));
        }

        worlds
            .remove(2)
            .fail(&std::io::Error::other("no space left"));
        wait_for(&mut events, |event| {
            matches!(event, WorldEvent::Failed { rank: 2, chain } if chain == "no space left")
                .then_some(())
        });
        drop(worlds.remove(1));
        wait_for(&mut events, |event| {
            matches!(event, WorldEvent::Left { rank: 1 }).then_some(())
        });
        drop(worlds);
        let why = wait_for(&mut events, |event| match event {
            WorldEvent::Ended { why } => Some(why.clone()),
            _ => None,
        });
        assert!(why.contains("left the world"), "{why}");
        assert_eq!(
            events.next_within(LONG),
            None,
            "nothing comes after the end"
        );
        let state = observer.snapshot();
        assert_eq!(state.ranks[0].end, Some(RankEnd::Left));
        assert!(!state.connected && state.ended.is_some());
    });
}

#[test]
fn a_report_of_a_past_generation_does_not_count_as_one_about_the_present_ranks() {
    let meet = |rank| rendezvous("past", rank, 4);
    let mut worlds = in_threads(0..4, |rank| World::join(meet(rank)).unwrap());
    let observer = Observer::join(meet(0)).unwrap();
    let mut events = observer.events();
    joined(&mut events, 3);
    worlds.remove(1).session.cut_for_a_test();
    let next = in_threads(&worlds, |world| world.next_generation(LONG).unwrap());
    wait_for(&mut events, |event| {
        matches!(event, WorldEvent::NextGeneration { .. }).then_some(())
    });

    // Rank 1 of the present was rank 2, as which another rank counts now.
    assert_eq!(
        (worlds[1].rank(), next[1].rank(), next[2].rank()),
        (2, 1, 2)
    );
    worlds[1].phase("past");
    next[1].phase("present");
    wait_for(&mut events, |event| match event {
        WorldEvent::Phase { rank, name } => {
            assert_eq!((*rank, name.as_str()), (1, "present"));
            Some(())
        }
        _ => None,
    });
    let (phase, _) = observer.snapshot().ranks[2].phase.clone().unwrap();
    assert_eq!(phase, "joined");
}

/// Makes a call with each item, at the same time.
fn in_threads<I: Send, T: Send>(
    items: impl IntoIterator<Item = I>,
    call: impl Fn(I) -> T + Sync,
) -> Vec<T> {
    let call = &call;
    std::thread::scope(|scope| {
        let threads: Vec<_> = items
            .into_iter()
            .map(|item| scope.spawn(move || call(item)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    })
}

#[test]
fn an_observer_hears_who_has_not_entered_an_operation() {
    let meet = |rank| rendezvous("awaited", rank, 2);
    std::thread::scope(|scope| {
        let one = scope.spawn(move || World::join(meet(1)).unwrap());
        let zero = World::join(meet(0)).unwrap();
        let one = one.join().unwrap();
        let observer = Observer::join(meet(0)).unwrap();
        zero.session.query_stragglers(StragglerQueryRequest {
            subject: QueriedOperation {
                key: String::from("k"),
                name: String::from("tp"),
                collective_index: 4,
                kind: OperationKind::AllReduce,
                sequence: 7,
            },
            members: Vec::new(),
            since: Duration::from_secs(2),
            is_sample: false,
        });
        let attends = |entered| EntryReport {
            key: String::from("k"),
            collective_index: 4,
            entered,
            last: String::new(),
        };
        let mut events = observer.events();
        for entered in [None, Some(Duration::ZERO)] {
            one.session.report_entry(attends(entered));
            let (behind, communicator) = wait_for(&mut events, |event| match event {
                WorldEvent::Straggler {
                    rank: 1,
                    operation: OperationKind::AllReduce,
                    sequence: 7,
                    has_entered,
                    behind,
                    communicator,
                } if *has_entered == entered.is_some() => Some((*behind, communicator.clone())),
                _ => None,
            });
            assert!(behind >= Duration::from_millis(1900), "{behind:?}");
            assert_eq!(communicator, "tp");
        }
    });
}

#[test]
fn an_observer_of_another_job_or_size_or_without_the_secret_is_turned_away_by_name() {
    let meet = || {
        rendezvous("unseen", 0, 1).with(|meet| {
            meet.job = "a".into();
            meet.secret = Some(SECRET.into());
        })
    };
    let world = World::join(meet()).unwrap();
    let path = format!("unix:{}", place_of(&meet()));
    let unknown_size = Rendezvous::observer(&path).unwrap().with(|meet| {
        meet.job = "a".into();
        meet.secret = Some(SECRET.into());
    });
    Observer::join(unknown_size).unwrap();
    let mut larger = meet();
    larger.world_size = 4;
    for (other, words) in [
        (
            meet().with(|meet| meet.secret = Some(OTHER_SECRET.into())),
            &["another secret"][..],
        ),
        (
            meet().with(|meet| meet.job = "b".into()),
            &["job \"b\"", "job \"a\""],
        ),
        (larger, &["expects 4 ranks", "expects 1"]),
        (
            Rendezvous::observer(&path)
                .unwrap()
                .with(|meet| meet.job = "a".into()),
            &["no secret"],
        ),
    ] {
        let error = Observer::join(other).unwrap_err().to_string();
        for word in words {
            assert!(error.contains(word), "{word:?} in {error:?}");
        }
    }
    let error = World::join(Rendezvous::observer(&path).unwrap()).unwrap_err();
    assert!(error.to_string().contains("Observer::join"), "{error}");
    drop(world);
}

fn place_of(rendezvous: &Rendezvous) -> String {
    let place = rendezvous.address.to_string();
    place.strip_prefix("unix:").unwrap().to_owned()
}

#[test]
fn there_are_not_too_many_observers_and_room_again_when_some_go() {
    let meet = || rendezvous("crowd", 0, 1);
    let world = World::join(meet()).unwrap();
    let observers: Vec<_> = (0..65).map(|_| Observer::join(meet()).unwrap()).collect();
    let error = Observer::join(meet()).unwrap_err().to_string();
    assert!(error.contains("65 observers already"), "{error}");
    drop(observers);
    // The leave messages of the dropped observers may still be on their way.
    let deadline = Instant::now() + LONG;
    while let Err(error) = Observer::join(meet()) {
        assert!(Instant::now() < deadline, "{error}");
    }
    drop(world);
}

#[test]
fn how_a_process_ended_is_what_every_rank_hears_when_its_parent_says_so_in_time() {
    let silence = "ended without goodbye: it died";
    let pid = std::process::id();
    for (name, says_so, word) in [
        (
            "word",
            true,
            "its process ended: killed by SIGKILL (out of memory); stderr ended with: x",
        ),
        ("silence", false, silence),
    ] {
        let meet = move |rank| rendezvous(name, rank, 3);
        std::thread::scope(|scope| {
            let observer = Observer::start(meet(0)).unwrap();
            observer.rank_started(1, pid).unwrap();
            let dying = scope.spawn(move || World::join(meet(1)).unwrap());
            let others: Vec<_> = [0, 2]
                .into_iter()
                .map(|rank| {
                    scope.spawn(move || {
                        let world = World::join(meet(rank)).unwrap();
                        (
                            Instant::now(),
                            world.barrier("never").unwrap_err().to_string(),
                        )
                    })
                })
                .collect();
            let dying = dying.join().unwrap();
            let mut events = observer.events();
            (0..3).for_each(|_| {
                wait_for(&mut events, |event| {
                    matches!(event, WorldEvent::Joined { .. }).then_some(())
                })
            });
            std::thread::sleep(Duration::from_millis(50));
            let cut = Instant::now();
            dying.session.cut_for_a_test();
            if says_so {
                std::thread::sleep(Duration::from_millis(20));
                let how = "killed by SIGKILL (out of memory)";
                observer.rank_ended(1, pid, how, "x\n").unwrap();
            }
            for rank in others {
                let (_, error) = rank.join().unwrap();
                assert!(error.contains("rank 1") && error.contains(word), "{error}");
            }
            let waited = cut.elapsed();
            if !says_so {
                assert!(waited >= Duration::from_millis(140), "{waited:?}");
            }
            assert!(waited < Duration::from_secs(2), "{waited:?}");
            assert!(observer.rank_ended(3, 1, "x", "").is_err());
        });
    }
}

#[test]
fn a_leave_message_counts_however_the_process_ended() {
    let meet = |rank| rendezvous("bye-and-end", rank, 2);
    std::thread::scope(|scope| {
        let one = scope.spawn(move || World::join(meet(1)).unwrap());
        let zero = World::join(meet(0)).unwrap();
        let observer = Observer::join(meet(0)).unwrap();
        observer.rank_started(1, std::process::id()).unwrap();
        let one = one.join().unwrap();
        // The report overtakes the leave message; the process still has its connection.
        observer
            .rank_ended(1, std::process::id(), "exited with status 0", "")
            .unwrap();
        std::thread::sleep(Duration::from_millis(20));
        drop(one);
        let error = zero.barrier("never").unwrap_err().to_string();
        assert!(error.contains("left the world"), "{error}");
    });
}

#[test]
fn a_process_that_ended_before_it_joined_is_named_at_once() {
    let meet = |rank| rendezvous("stillborn", rank, 3);
    std::thread::scope(|scope| {
        let observer = Observer::start(meet(0)).unwrap();
        let others: Vec<_> = [0, 1]
            .into_iter()
            .map(|rank| scope.spawn(move || World::join(meet(rank)).unwrap_err().to_string()))
            .collect();
        std::thread::sleep(Duration::from_millis(100));
        let begun = Instant::now();
        let tail = "Traceback:\nno CUDA device\n";
        observer
            .rank_ended(2, 99, "exited with status 1", tail)
            .unwrap();
        for other in others {
            let error = other.join().unwrap();
            let word = "its process ended: exited with status 1; stderr ended with: Traceback: | no CUDA \
                        device";
            assert!(error.contains("rank 2") && error.contains(word), "{error}");
        }
        assert!(begun.elapsed() < SOON);
    });
}

#[test]
fn a_rank_0_that_ended_before_it_listened_is_named_to_all_who_come() {
    for place in ["unix", "tcp"] {
        let published = std::env::temp_dir().join(format!("nccl-ghost-{}", std::process::id()));
        let meet = |rank| match place {
            "unix" => rendezvous("ghost", rank, 3),
            _ => Rendezvous::tcp("127.0.0.1", 0, rank, 3)
                .unwrap()
                .publish(&published)
                .with(|meet| meet.timeout = LONG),
        };
        std::thread::scope(|scope| {
            let observer = Observer::start(meet(0)).unwrap();
            observer.rank_started(0, 99).unwrap();
            let early = scope.spawn(|| World::join(meet(1)).unwrap_err().to_string());
            std::thread::sleep(Duration::from_millis(50));
            let begun = Instant::now();
            observer
                .rank_ended(0, 99, "exited with status 2", "no such option")
                .unwrap();
            let late = World::join(meet(2)).unwrap_err().to_string();
            for error in [early.join().unwrap(), late] {
                let word =
                    "its process ended: exited with status 2; stderr ended with: no such option";
                assert!(error.contains("rank 0") && error.contains(word), "{error}");
            }
            assert!(begun.elapsed() < SOON);
            let mut events = observer.events();
            wait_for(&mut events, |event| {
                matches!(event, WorldEvent::Ended { .. }).then_some(())
            });
        });
    }
}

#[test]
fn an_observer_whose_connection_breaks_comes_again_and_is_still_the_parent() {
    let meet = |rank| rendezvous("again", rank, 3);
    let pid = std::process::id();
    let went_on = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let went_on = &went_on;
        let observer = Observer::start(meet(0)).unwrap();
        observer.rank_started(1, pid).unwrap();
        let dying = scope.spawn(move || World::join(meet(1)).unwrap());
        let others: Vec<_> = [0, 2]
            .into_iter()
            .map(|rank| {
                scope.spawn(move || {
                    let world = World::join(meet(rank)).unwrap();
                    world.phase("waiting");
                    let deadline = Instant::now() + LONG;
                    while !went_on.load(Ordering::Acquire) && Instant::now() < deadline {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    world.phase("after the cut");
                    world.barrier("never").unwrap_err().to_string()
                })
            })
            .collect();
        let dying = dying.join().unwrap();
        let mut events = observer.events();
        for _ in 0..2 {
            wait_for(&mut events, |event| {
                matches!(event, WorldEvent::Phase { .. }).then_some(())
            });
        }
        observer.cut_for_a_test();
        went_on.store(true, Ordering::Release);
        wait_for(&mut events, |event| {
            matches!(event, WorldEvent::Phase { rank: 0, name } if name == "after the cut")
                .then_some(())
        });
        assert!(observer.snapshot().connected, "it comes again");
        dying.session.cut_for_a_test();
        std::thread::sleep(Duration::from_millis(20));
        observer.rank_ended(1, pid, "killed by SIGBUS", "").unwrap();
        for rank in others {
            let error = rank.join().unwrap();
            assert!(
                error.contains("its process ended: killed by SIGBUS"),
                "{error}"
            );
        }
        wait_for(&mut events, |event| {
            matches!(event, WorldEvent::Gone { rank: 1, how } if how.contains("SIGBUS"))
                .then_some(())
        });
    });
}

#[test]
fn observers_and_what_they_give_can_be_used_on_any_thread() {
    fn any_thread<T: Send + Sync>() {}
    any_thread::<Observer>();
    any_thread::<Events>();
    any_thread::<crate::Channel<'_>>();
}

#[test]
fn an_observer_finds_rank_0_again_behind_the_ports_of_others() {
    // The first port of the range is in use when rank 0 starts, and free later.
    let held = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let first = held.local_addr().unwrap().port();
    let meet = || {
        let meet = Rendezvous::tcp("127.0.0.1", first, 0, 1).unwrap();
        meet.up_to_port(first.saturating_add(5))
            .with(|meet| meet.timeout = LONG)
    };
    let world = World::join(meet()).unwrap();
    let observer = Observer::join(meet()).unwrap();
    drop(held);
    observer.cut_for_a_test();
    let mut events = observer.events();
    world.phase("after the cut");
    wait_for(&mut events, |event| {
        matches!(event, WorldEvent::Phase { name, .. } if name == "after the cut").then_some(())
    });
    assert!(observer.snapshot().connected);
}
