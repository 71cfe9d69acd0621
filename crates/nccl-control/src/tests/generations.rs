//! Reconfiguration: the remaining ranks agree on the next generation, whatever happens in the meantime.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use super::super::{Rendezvous, World};
use super::rendezvous;
use crate::error::Result;

const TIMEOUT: Duration = Duration::from_secs(20);

/// Simulates the death of this world's process.
fn die(world: &World) {
    world.session.cut_for_a_test();
}

/// Runs `rank` as each of `size` ranks, which are threads with connections of their own.
fn ranks(name: &str, size: usize, rank: impl Fn(World) + Sync) {
    std::thread::scope(|scope| {
        for number in 0..size {
            let rank = &rank;
            scope.spawn(move || rank(World::join(rendezvous(name, number, size)).unwrap()));
        }
    });
}

fn talk(world: &World) {
    let ranks = world.all_gather("ranks", &[world.rank() as u8]).unwrap();
    let expected: Vec<_> = (0..world.size()).map(|rank| vec![rank as u8]).collect();
    assert_eq!(ranks, expected);
}

#[test]
fn those_who_are_left_go_on_with_dense_ranks_and_know_who_was_who() {
    ranks("on", 4, |world| {
        if world.rank() == 1 {
            return die(&world);
        }
        let next = world.next_generation(TIMEOUT).unwrap();
        let before = world.rank();
        assert_eq!(next.generation(), 1);
        assert_eq!(next.size(), 3);
        assert_eq!(next.rank(), [0, 9, 1, 2][before]);
        assert_eq!(
            next.local_rank(),
            world.local_rank(),
            "its device is what it was"
        );
        let from: Vec<_> = (0..4).map(|rank| next.previous_rank(rank)).collect();
        assert_eq!(from, [Some(0), Some(2), Some(3), None]);
        talk(&next);
        let error = world.barrier("of the past").unwrap_err().to_string();
        assert!(error.contains("now in generation 1"), "{error}");
        drop(world);
        talk(&next);
    });
}

#[test]
fn a_world_that_goes_on_without_a_limit_waits_for_whoever_is_there() {
    let alone = World::single();
    let next = alone.next_generation(Duration::MAX).unwrap();
    assert_eq!(next.generation(), 1);
    let kept = next.next_generation(Duration::MAX).unwrap();
    assert_eq!(kept.generation(), 2);
    ranks("unlimited", 2, |world| {
        let next = world.next_generation(Duration::MAX).unwrap();
        assert_eq!(next.generation(), 1);
        talk(&next);
    });
}

#[test]
fn a_world_goes_on_as_often_as_ranks_die() {
    ranks("twice", 4, |mut world| {
        for generation in 1..4 {
            if world.rank() + 1 == world.size() {
                return die(&world);
            }
            world = world.next_generation(TIMEOUT).unwrap();
            assert_eq!(
                (world.generation(), world.size()),
                (generation, 4 - generation as usize)
            );
            talk(&world);
        }
        assert_eq!(world.rank(), 0);
    });
}

#[test]
fn a_rank_that_does_not_come_is_named_to_all_and_nobody_goes_on() {
    let (late, over) = (Barrier::new(3), Barrier::new(3));
    ranks("late", 3, |world| {
        if world.rank() == 2 {
            world.phase("load weights");
            late.wait();
        } else {
            let error = world.next_generation(Duration::from_secs(3)).unwrap_err();
            let error = error.to_string();
            assert!(error.contains("rank 2 of 3 did not come"), "{error}");
            assert!(error.contains("load weights"), "{error}");
            late.wait();
        }
        // The world is unchanged.
        talk(&world);
        let next = world.next_generation(TIMEOUT).unwrap();
        assert_eq!((next.generation(), next.size()), (1, 3));
        talk(&next);
        over.wait();
    });
}

#[test]
fn a_rank_that_does_not_come_is_left_behind_where_all_want_that() {
    let late = Barrier::new(3);
    ranks("behind", 3, |world| {
        if world.rank() == 1 {
            late.wait();
            let error = world.next_generation(TIMEOUT).unwrap_err().to_string();
            assert!(error.contains("left behind"), "{error}");
            return;
        }
        let next = world.next_generation_leaving_behind(Duration::from_secs(3));
        let next = next.unwrap();
        assert_eq!(next.size(), 2);
        let departed = world.departed();
        assert!(
            departed.len() == 1 && departed[0].0 == 1 && departed[0].1.contains("left behind"),
            "{departed:?}"
        );
        talk(&next);
        late.wait();
        talk(&next);
    });
}

#[test]
fn a_rank_that_dies_while_the_others_agree_is_not_waited_for() {
    let begun = Instant::now();
    ranks("agree", 4, |world| {
        match world.rank() {
            3 => return die(&world),
            2 => {
                std::thread::sleep(Duration::from_millis(100));
                return die(&world);
            }
            _ => {}
        }
        let next = world.next_generation(TIMEOUT).unwrap();
        assert_eq!(next.size(), 2);
        talk(&next);
    });
    assert!(begun.elapsed() < TIMEOUT / 2);
}

#[test]
fn without_rank_0_the_others_go_on_with_the_next_one() {
    let established = Barrier::new(4);
    ranks("zero", 4, |world| {
        // All ranks know that all ranks have joined.
        established.wait();
        if world.rank() == 0 {
            // By then, the other ranks usually wait for its answer; they form the next generation either way.
            std::thread::sleep(Duration::from_millis(200));
            return die(&world);
        }
        let next = world.next_generation(TIMEOUT).unwrap();
        assert_eq!((next.rank() + 1, next.size()), (world.rank(), 3));
        assert_eq!(next.previous_rank(0), Some(1));
        talk(&next);
        talk(&next.next_generation(TIMEOUT).unwrap());
    });
}

fn newcomer(name: &str, timeout: Duration) -> Result<World> {
    // The rank and the size in the joiner's rendezvous do not matter.
    let rendezvous: Rendezvous = rendezvous(name, 1, 9).with(|meet| {
        meet.generation = 7;
        meet.timeout = timeout;
    });
    World::join_running(rendezvous)
}

#[test]
fn who_asks_to_come_in_is_a_rank_of_the_next_generation() {
    std::thread::scope(|scope| {
        let new = scope.spawn(|| {
            let world = newcomer("new", TIMEOUT).unwrap();
            assert_eq!((world.rank(), world.size(), world.generation()), (2, 3, 1));
            assert_eq!(world.previous_rank(2), None);
            talk(&world);
            let next = world.next_generation(TIMEOUT).unwrap();
            assert_eq!(next.previous_rank(2), Some(2));
            talk(&next);
        });
        ranks("new", 2, |world| {
            let begun = Instant::now();
            while world.joiners() == 0 {
                assert!(begun.elapsed() < TIMEOUT, "nobody came");
                std::thread::sleep(Duration::from_millis(1));
            }
            let world = world.next_generation(TIMEOUT).unwrap();
            assert_eq!((world.rank() < 2, world.joiners()), (true, 0));
            talk(&world);
            talk(&world.next_generation(TIMEOUT).unwrap());
        });
        new.join().unwrap();
    });
}

#[test]
fn a_newcomer_that_is_not_taken_in_says_what_has_to_be_done() {
    let over = Barrier::new(2);
    ranks("closed", 2, |world| {
        if world.rank() == 1 {
            // Long enough for the joiner to be admitted.
            let error = newcomer("closed", Duration::from_secs(2)).unwrap_err();
            let error = error.to_string();
            assert!(error.contains("World::next_generation"), "{error}");
        }
        over.wait();
        // The joiner no longer waits.
        let next = world.next_generation(TIMEOUT).unwrap();
        assert_eq!(next.size(), 2);
        talk(&next);
    });
}

/// Goes on to the next generation once another rank says so.
fn goes_on_at(signal: &Barrier, world: &World) {
    signal.wait();
    talk(&world.next_generation(TIMEOUT).unwrap());
}

/// Waits until a thread of this rank waits for the next generation.
fn until_one_waits(world: &World) {
    let super::SessionBackend::Node { node, .. } = world.session.backend() else {
        unreachable!("the ranks have connections");
    };
    let begun = Instant::now();
    while !node.is_reconfiguring_for_a_test() {
        assert!(begun.elapsed() < TIMEOUT);
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn of_two_threads_of_a_rank_that_want_to_go_on_one_does_and_the_other_learns_why_not() {
    let other_rank = Barrier::new(2);
    ranks("both", 2, |world| {
        if world.rank() == 1 {
            return goes_on_at(&other_rank, &world);
        }
        let (outcomes, arrived) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                let outcomes = outcomes.clone();
                let world = &world;
                scope.spawn(move || {
                    outcomes.send(world.next_generation(TIMEOUT)).unwrap();
                });
            }
            // The other rank does not come before one of the threads is refused.
            let error = arrived.recv().unwrap().unwrap_err().to_string();
            assert!(error.contains("twice"), "{error}");
            other_rank.wait();
            let next = arrived.recv().unwrap().unwrap();
            assert_eq!(next.generation(), 1);
            talk(&next);
        });
    });
}

#[test]
fn a_rank_whose_thread_still_waits_for_the_next_generation_is_refused_and_does_not_end_that_wait() {
    let other_rank = Barrier::new(2);
    ranks("again", 2, |world| {
        if world.rank() == 1 {
            return goes_on_at(&other_rank, &world);
        }
        std::thread::scope(|scope| {
            let first = scope.spawn(|| world.next_generation(TIMEOUT));
            until_one_waits(&world);
            let begun = Instant::now();
            let second = world.next_generation(Duration::from_millis(100));
            let waited = begun.elapsed();
            other_rank.wait();
            let error = second.unwrap_err().to_string();
            assert!(error.contains("twice"), "{error}");
            assert!(waited < TIMEOUT / 2, "{waited:?}");
            talk(&first.join().unwrap().unwrap());
        });
    });
}

#[test]
fn a_generation_that_came_too_late_for_its_program_does_not_keep_the_process_in_the_job() {
    ranks("too-late", 2, |world| {
        if world.rank() == 1 {
            let super::SessionBackend::Node { node, .. } = world.session.backend() else {
                unreachable!("the ranks have connections");
            };
            return node.activate_for_a_test();
        }
        let error = world.barrier("never").unwrap_err().to_string();
        assert!(
            error.contains("rank 1") && error.contains("left the world"),
            "{error}"
        );
    });
}

/// Counts the descriptors of its process, in which no other test may run: this test starts itself again, alone.
#[test]
fn nothing_is_left_of_many_generations() {
    const ROLE: &str = "NCCL_TEST_MANY_GENERATIONS";
    if std::env::var_os(ROLE).is_none() {
        let name = "tests::generations::nothing_is_left_of_many_generations";
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name])
            .env(ROLE, "1")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&child.stdout);
        let errors = String::from_utf8_lossy(&child.stderr);
        // Under a wrong name, no test would run, and so none would fail.
        let has_run = said.contains("1 passed");
        assert!(child.status.success() && has_run, "{said}{errors}");
        return;
    }
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let once = |rounds: u64| {
        let gate = &Barrier::new(3);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for round in 0..rounds {
                    let world = newcomer("many", TIMEOUT).unwrap();
                    assert_eq!(world.size(), 3, "round {round}");
                    talk(&world);
                    die(&world);
                    drop(world);
                    gate.wait();
                    // Wait until there are two ranks again.
                    gate.wait();
                }
            });
            for rank in 0..2 {
                scope.spawn(move || {
                    let mut world = World::join(super::rendezvous("many", rank, 2)).unwrap();
                    for _ in 0..rounds {
                        while world.joiners() == 0 {
                            std::thread::sleep(Duration::from_millis(1));
                        }
                        // Both ranks have seen the joiner.
                        world.barrier("somebody is there").unwrap();
                        world = world.next_generation(TIMEOUT).unwrap();
                        talk(&world);
                        gate.wait();
                        world = world.next_generation(TIMEOUT).unwrap();
                        assert_eq!(world.size(), 2);
                        gate.wait();
                    }
                });
            }
        });
    };
    once(2);
    let before = descriptors();
    once(20);
    let begun = Instant::now();
    // Other threads close their descriptors soon.
    while descriptors() > before {
        assert!(
            begun.elapsed() < TIMEOUT,
            "{before} descriptors are {} now",
            descriptors()
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_thread_that_gave_up_going_on_does_not_count_when_it_is_waited_again() {
    let worlds = World::threads(2);
    let long = Duration::from_millis(600);
    let error = worlds[0].next_generation(long).unwrap_err().to_string();
    assert!(error.contains("rank 1 of 2 did not come"), "{error}");
    let begun = Instant::now();
    let error = worlds[0]
        .next_generation(Duration::ZERO)
        .unwrap_err()
        .to_string();
    assert!(error.contains("within 0.0 s"), "{error}");
    assert!(begun.elapsed() < long);
}

#[test]
fn threads_are_left_behind_and_go_on_without_those_that_fail() {
    let mut worlds = World::threads(4);
    worlds.remove(1).fail(&std::io::Error::other("it broke"));
    let late = worlds.remove(1);
    let next: Vec<_> = std::thread::scope(|scope| {
        let go_on = |world: World| world.next_generation_leaving_behind(Duration::from_millis(300));
        let all: Vec<_> = worlds
            .into_iter()
            .map(|world| scope.spawn(move || go_on(world).unwrap()))
            .collect();
        all.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert_eq!(next.iter().map(World::rank).collect::<Vec<_>>(), [0, 1]);
    assert_eq!(next[1].previous_rank(1), Some(3));
    let error = late.next_generation(TIMEOUT).unwrap_err().to_string();
    assert!(error.contains("left behind"), "{error}");
}
