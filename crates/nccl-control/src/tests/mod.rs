//! Ranks that meet at real sockets.

mod channels;
mod codec;
mod ends;
mod failing;
mod failover;
mod generations;
mod joiners;
mod observer;
mod refused_connections;
mod relays;
mod tcp;
mod waiting;

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::connect;
use super::round::Round;
use super::session::SessionBackend;
use super::{Rendezvous, World};
use crate::error::ErrorKind;

/// Shorter than any timeout of these tests, and longer than a busy machine needs.
const SOON: Duration = Duration::from_secs(7);

/// As long as required.
const SECRET: &str = "what the tests know";
const OTHER_SECRET: &str = "what others know";

fn rendezvous(name: &str, rank: usize, size: usize) -> Rendezvous {
    let path = std::env::temp_dir().join(format!("nccl-{name}-{}.sock", std::process::id()));
    Rendezvous::unix(path, rank, size)
        .unwrap()
        .with(|meet| meet.timeout = Duration::from_secs(20))
}

#[test]
fn ranks_meet_at_a_socket_and_talk() {
    std::thread::scope(|scope| {
        for rank in [2, 0, 1] {
            scope.spawn(move || {
                let world = World::join(rendezvous("meet", rank, 3)).unwrap();
                for turn in 0..5u8 {
                    let parts = world.all_gather("x", &[rank as u8, turn]).unwrap();
                    assert_eq!(parts, [[0, turn], [1, turn], [2, turn]]);
                }
                world.barrier("end").unwrap();
            });
        }
    });
}

#[test]
fn a_rank_that_leaves_is_named_at_once() {
    std::thread::scope(|scope| {
        scope.spawn(|| drop(World::join(rendezvous("leave", 1, 2)).unwrap()));
        let world = World::join(rendezvous("leave", 0, 2)).unwrap();
        let error = world.barrier("never").unwrap_err().to_string();
        assert!(
            error.contains("rank 1") && error.contains("left the world"),
            "{error}"
        );
    });
}

#[test]
fn several_large_values_for_one_rank_at_one_moment_keep_its_connection() {
    const READERS: usize = 6;
    let value = vec![7; 50 << 20];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let world = World::join(rendezvous("backlog", 1, 2)).unwrap();
            std::thread::scope(|scope| {
                for _ in 0..READERS {
                    scope.spawn(|| assert!(world.get("large").unwrap() == value));
                }
            });
            world.barrier("end").unwrap();
        });
        let world = World::join(rendezvous("backlog", 0, 2)).unwrap();
        // Sooner, and fewer of them wait: then this shows less.
        std::thread::sleep(Duration::from_millis(500));
        world.set("large", &value).unwrap();
        world.barrier("end").unwrap();
    });
}

#[test]
fn a_connection_that_ends_is_made_again_and_the_world_goes_on() {
    std::thread::scope(|scope| {
        for rank in 0..2 {
            scope.spawn(move || {
                let world = World::join(rendezvous("cut", rank, 2)).unwrap();
                for turn in 0..20u8 {
                    if rank == turn as usize % 4
                        && let SessionBackend::Node { node, .. } = world.session.backend()
                    {
                        node.cut_connections_for_a_test();
                    }
                    let parts = world.all_gather("x", &[turn]).unwrap();
                    assert_eq!(parts, [[turn], [turn]]);
                }
                assert_eq!(world.departed(), []);
                world.barrier("end").unwrap();
            });
        }
    });
}

#[test]
fn what_is_too_large_is_refused_on_every_rank_and_the_world_goes_on() {
    std::thread::scope(|scope| {
        for rank in 0..3 {
            scope.spawn(move || {
                let world = World::join(rendezvous("large", rank, 3)).unwrap();
                let error = world.all_gather("x", &vec![0; 22 << 20]).unwrap_err();
                assert!(matches!(error.kind(), ErrorKind::Io { .. }), "{error}");
                assert!(error.to_string().contains("64 MiB"), "{error}");
                world.all_gather("x", &vec![0; 21 << 20]).unwrap();
            });
        }
    });
}

#[test]
fn a_key_that_is_too_long_is_refused_by_every_call_of_the_store() {
    let world = World::single();
    let key = "k".repeat(1025);
    let errors = [
        world.set(&key, b"").err(),
        world.get(&key).err(),
        world.try_get(&key).err(),
        world.wait(&[&key]).err(),
        world.add(&key, 1).err(),
        world.compare_set(&key, None, b"").err(),
        world.delete(&key).err(),
    ];
    for error in errors {
        let error = error.unwrap();
        assert!(matches!(error.kind(), ErrorKind::Io { .. }), "{error}");
    }
    let longest = "k".repeat(1024);
    world.set(&longest, b"").unwrap();
    world.get(&longest).unwrap();
}

#[test]
fn many_threads_of_one_rank_have_exchanges_in_flight_at_once_each_with_its_own_limit() {
    let zero = std::thread::spawn(|| World::join(rendezvous("turn", 0, 2)).unwrap());
    let one = World::join(rendezvous("turn", 1, 2)).unwrap();
    let zero = zero.join().unwrap();
    let soon = Instant::now() + Duration::from_secs(20);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| one.exchange_all("first", &[], soon, || false));
        let begun = Instant::now();
        let timeout = begun + Duration::from_millis(50);
        let error = one
            .exchange_all("second", &[], timeout, || false)
            .unwrap_err();
        assert!(error.to_string().contains("rank 0"), "{error}");
        let error = one.exchange_all("third", &[], soon, || true).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Aborted { .. }), "{error}");
        assert!(begun.elapsed() < Duration::from_secs(10));
        assert!(!first.is_finished());
        // After all of rank 1's messages.
        one.set("said", &[]).unwrap();
        zero.get("said").unwrap();
        zero.exchange_all("first", &[], soon, || false).unwrap();
        first.join().unwrap().unwrap();
        // A later rank gets the same outcome.
        let error = zero
            .exchange_all("second", &[], soon, || false)
            .unwrap_err();
        assert!(
            error.to_string().contains("rank 0 of 2 did not come"),
            "{error}"
        );
        let error = zero.exchange_all("third", &[], soon, || false).unwrap_err();
        assert!(error.to_string().contains("gave up"), "{error}");
    });
}

#[test]
fn two_processes_cannot_be_one_rank_and_sizes_must_agree() {
    use crate::{Observer, WorldEvent};

    let meet =
        |rank| rendezvous("claim", rank, 3).with(|meet| meet.timeout = Duration::from_secs(6));
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| World::join(meet(0)).map(drop));
        let first = scope.spawn(|| World::join(meet(1)).map(drop));
        // The first rank 1 has joined before the second comes.
        let observer = Observer::join(meet(0)).unwrap();
        let is_first = |event: WorldEvent| matches!(event, WorldEvent::Joined { rank: 1, .. });
        assert!(observer.events().any(is_first), "rank 1 never came");
        drop(observer);
        let other = World::join(rendezvous("claim", 1, 3))
            .unwrap_err()
            .to_string();
        assert!(other.contains("joined already"), "{other}");
        let other = World::join(rendezvous("claim", 1, 4))
            .unwrap_err()
            .to_string();
        assert!(
            other.contains("expects 4") && other.contains("expects 3"),
            "{other}"
        );
        // Both learn which rank never joined.
        for rank in [zero, first] {
            let error = rank.join().unwrap().unwrap_err().to_string();
            assert!(error.contains("rank 2 of 3"), "{error}");
        }
    });
}

#[test]
fn a_second_rank_0_is_told_who_holds_the_address() {
    let first = World::join(rendezvous("held", 0, 1)).unwrap();
    let error = World::join(rendezvous("held", 0, 1))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains(&format!("pid {}", std::process::id())),
        "{error}"
    );
    drop(first);
    World::join(rendezvous("held", 0, 1)).unwrap();
}

#[test]
fn what_a_rank_says_of_itself_is_no_command_to_the_terminals_of_the_others() {
    let meet = |rank| rendezvous("steered", rank, 2);
    std::thread::scope(|scope| {
        let one = scope.spawn(move || {
            let world = World::join(meet(1)).unwrap();
            world.fail(&std::io::Error::other(
                "gone\r\x1b[2Jrank 0 failed\u{202e}\nline 2",
            ));
        });
        let zero = World::join(meet(0)).unwrap();
        one.join().unwrap();
        let error = zero.barrier("together").unwrap_err().to_string();
        let shown = "gone\u{fffd}\u{fffd}[2Jrank 0 failed\u{fffd}\nline 2";
        assert!(error.contains(shown), "{error:?}");
        assert_eq!(zero.departed(), [(1, format!("it failed: {shown}"))]);
    });
}

/// The calls of programs.
impl World {
    fn next_generation(&self, timeout: Duration) -> crate::error::Result<Self> {
        self.reconfigure(timeout, false, &[])
    }

    fn next_generation_leaving_behind(&self, timeout: Duration) -> crate::error::Result<Self> {
        self.reconfigure(timeout, true, &[])
    }

    fn fail(mut self, error: &(dyn std::error::Error + 'static)) {
        self.fails(error);
    }

    fn with_timeout(mut self, timeout: Duration) -> Self {
        self.set_timeout(timeout);
        self
    }
}
