//! A new process finds the current coordinator wherever it listens, and no other process admits it.

use std::collections::BTreeSet;
use std::sync::Barrier;

use super::super::{Observer, WorldEvent};
use super::*;
use crate::error::Result;

const TIMEOUT: Duration = Duration::from_secs(20);

/// Creates the worlds of `size` ranks, which are threads with connections of their own.
fn joined(size: usize, meet: impl Fn(usize) -> Rendezvous + Sync) -> Vec<World> {
    std::thread::scope(|scope| {
        let meet = &meet;
        let ranks: Vec<_> = (0..size)
            .map(|rank| scope.spawn(move || World::join(meet(rank)).unwrap()))
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Simulates the death of the first world's process; waits until another rank coordinates.
fn bereave(worlds: &mut Vec<World>) {
    // A communicator keeps the session, so to speak: otherwise its end is the end of its world.
    let dead = worlds.remove(0);
    dead.session.cut_for_a_test();
    drop(dead);
    let next = worlds[0].rank();
    let deadline = Instant::now() + TIMEOUT;
    let leads = |world: &World| {
        world.session.coordinator() == next
            && (world.rank() != next || world.session.is_coordinator_for_a_test())
    };
    while !worlds.iter().all(leads) {
        assert!(Instant::now() < deadline, "nobody takes over");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Takes all of these worlds to the next generation, with one joiner that joins by `meet`.
fn take_in(worlds: Vec<World>, meet: Rendezvous) -> Vec<World> {
    let size = worlds.len();
    std::thread::scope(|scope| {
        let new = scope.spawn(move || World::join_running(meet));
        let old: Vec<_> = worlds
            .into_iter()
            .map(|world| {
                scope.spawn(move || {
                    let begun = Instant::now();
                    while world.joiners() == 0 {
                        assert!(begun.elapsed() < TIMEOUT, "nobody came");
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    world.next_generation(TIMEOUT).unwrap()
                })
            })
            .collect();
        let mut all: Vec<_> = old.into_iter().map(|rank| rank.join().unwrap()).collect();
        all.push(new.join().unwrap().unwrap());
        assert_eq!(all[size].rank(), size);
        all
    })
}

fn talk(worlds: &[World]) {
    std::thread::scope(|scope| {
        for world in worlds {
            scope.spawn(move || {
                assert_eq!(world.size(), worlds.len());
                let ranks = world.all_gather("ranks", &[world.rank() as u8]).unwrap();
                let expected: Vec<_> = (0..world.size()).map(|rank| vec![rank as u8]).collect();
                assert_eq!(ranks, expected);
            });
        }
    });
}

#[test]
fn after_rank_0s_death_it_is_the_next_one_that_is_found_at_its_place_time_and_again() {
    let meet = |rank| rendezvous("place", rank, 3);
    let mut worlds = joined(3, meet);
    let mut longest = 0;
    for round in 0..4 {
        bereave(&mut worlds);
        worlds = take_in(worlds, meet(0).with(|meet| meet.generation = 7));
        talk(&worlds);
        assert_eq!(worlds[0].generation(), round + 1);
        let names = worlds
            .iter()
            .map(|world| world.session.address_of(world.rank()).map_or(0, str::len));
        longest = names.max().unwrap();
    }
    // The names do not grow with the number of deaths.
    let place = match meet(0).address {
        super::super::address::Address::Path(path) => path,
        other => panic!("{other}"),
    };
    let most = "unix:".len() + place.as_os_str().len() + ".0-ffffffff".len();
    assert!(longest <= most, "{longest} > {most}");
    assert!(place.exists());
    drop(worlds);
    assert!(!place.exists(), "the last of them takes the socket away");
}

#[test]
fn over_tcp_whoever_takes_over_is_found_at_the_address_of_its_own_that_all_were_told() {
    let ports = [1, 2].map(|host| {
        let free = std::net::TcpListener::bind((std::net::Ipv4Addr::new(127, 0, 0, host), 0));
        free.unwrap().local_addr().unwrap().port()
    });
    let meet = |rank| {
        let meet = Rendezvous::tcp("127.0.0.1", ports[0], rank, 3).unwrap();
        let other = format!("tcp:127.0.0.2:{}", ports[1]);
        meet.with(|meet| {
            meet.secret = Some(SECRET.into());
            meet.timeout = TIMEOUT;
        })
        .add_address(&other)
        .unwrap()
    };
    let mut worlds = joined(3, meet);
    bereave(&mut worlds);
    // The second address alone: the first might belong to a host that is gone.
    let other = format!("tcp:127.0.0.2:{}", ports[1]);
    let new = Rendezvous::observer(&other).unwrap();
    let worlds = take_in(
        worlds,
        new.with(|meet| {
            meet.secret = Some(SECRET.into());
            meet.timeout = TIMEOUT;
        }),
    );
    talk(&worlds);
}

#[test]
fn a_rank_that_does_not_coordinate_says_who_does() {
    let meet = |rank| rendezvous("refer", rank, 4);
    let mut worlds = joined(4, meet);
    bereave(&mut worlds);
    let door = worlds[2].session.address_of(2).unwrap().to_owned();
    let new = Rendezvous::observer(&door)
        .unwrap()
        .with(|meet| meet.timeout = TIMEOUT);
    let worlds = take_in(worlds, new);
    talk(&worlds);
}

#[test]
fn who_waits_at_the_door_of_one_that_dies_comes_in_at_the_next() {
    let meet = |rank| rendezvous("waits", rank, 3);
    let mut worlds = joined(3, meet);
    std::thread::scope(|scope| {
        let new = scope.spawn(move || World::join_running(meet(1)).unwrap());
        let begun = Instant::now();
        while worlds[0].joiners() == 0 {
            assert!(begun.elapsed() < TIMEOUT, "nobody came");
            std::thread::sleep(Duration::from_millis(1));
        }
        bereave(&mut worlds);
        let old: Vec<_> = worlds
            .iter()
            .map(|world| {
                scope.spawn(move || {
                    while world.joiners() == 0 {
                        assert!(begun.elapsed() < TIMEOUT, "it did not come again");
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    world.next_generation(TIMEOUT).unwrap()
                })
            })
            .collect();
        let mut all: Vec<_> = old.into_iter().map(|rank| rank.join().unwrap()).collect();
        all.push(new.join().unwrap());
        talk(&all);
    });
}

#[test]
fn a_new_observer_finds_the_generation_of_today_and_the_rank_that_coordinates_it() {
    let meet = |rank| rendezvous("today", rank, 3);
    let mut worlds = joined(3, meet);
    bereave(&mut worlds);
    let watching = |worlds: &[World]| -> Result<()> {
        let observer = Observer::join(meet(0))?;
        let mut events = observer.events();
        let begun = Instant::now();
        let own: BTreeSet<_> = worlds.iter().map(World::rank).collect();
        // The observer may also learn that a departed rank had joined.
        let mut here = BTreeSet::new();
        while here != own {
            assert!(begun.elapsed() < TIMEOUT, "{here:?}");
            match events.next_within(TIMEOUT) {
                Some(WorldEvent::Joined { rank, .. }) => _ = here.insert(rank),
                Some(WorldEvent::Gone { rank, .. }) => _ = here.remove(&rank),
                _ => {}
            }
        }
        let asked = observer.ask_for_recordings(TIMEOUT, &|rank, _, _| Ok(rank));
        assert_eq!(asked.answers.len(), worlds.len(), "{:?}", asked.missing);
        Ok(())
    };
    watching(&worlds).unwrap();
    worlds = take_in(worlds, meet(0));
    watching(&worlds).unwrap();
    bereave(&mut worlds);
    watching(&worlds).unwrap();
}

#[test]
fn where_nobody_answers_the_error_says_where_it_looked_and_what_to_do() {
    let soon = Duration::from_millis(200);
    let one = rendezvous("nobody", 0, 2).with(|meet| {
        meet.timeout = soon;
        meet.job = "job-7".into();
    });
    let error = World::join_running(one.clone()).unwrap_err().to_string();
    for words in [
        "nccl-nobody-",
        "job-7",
        "is it running",
        "NCCL_RUN_RENDEZVOUS",
    ] {
        assert!(error.contains(words), "{error}");
    }
    let several = one.add_address("unix:@nccl-nobody-else").unwrap();
    let error = World::join_running(several).unwrap_err().to_string();
    for words in ["nccl-nobody-", "unix:@nccl-nobody-else", "start it again"] {
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn a_leftover_of_the_last_generation_refers_to_the_new_one_and_takes_nobody_in() {
    let meet = |rank| rendezvous("leftover", rank, 3);
    let worlds = joined(3, meet);
    let gate = Barrier::new(3);
    let gate = &gate;
    let next: Vec<_> = std::thread::scope(|scope| {
        let all: Vec<_> = worlds
            .iter()
            .map(|world| {
                scope.spawn(move || {
                    gate.wait();
                    world.next_generation(TIMEOUT).unwrap()
                })
            })
            .collect();
        all.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    // An address of an earlier generation: a process has one address for all generations.
    let at = worlds[2].session.address_of(2).unwrap().to_owned();
    let all = take_in(
        next,
        Rendezvous::observer(&at)
            .unwrap()
            .with(|meet| meet.timeout = TIMEOUT),
    );
    assert_eq!(all[0].generation(), 2);
    talk(&all);
}
