//! Ranks that drop their world before their communicators, and rounds that succeed without dead ranks.

use super::super::inbox::Notice;
use super::*;
use crate::departure::{Departure, Failure, LossKind};
use crate::sync::Mutex;
use nccl_base::departure::GatherOutcome;

const PATIENCE: Duration = Duration::from_secs(20);

/// Creates two ranks that meet at a socket.
fn two(name: &'static str) -> (World, World) {
    let zero = std::thread::spawn(move || World::join(rendezvous(name, 0, 2)).unwrap());
    let one = World::join(rendezvous(name, 1, 2)).unwrap();
    (zero.join().unwrap(), one)
}

/// Records the departures that a rank receives.
fn departures(world: &World) -> Arc<Mutex<Vec<(usize, Departure)>>> {
    let heard = Arc::new(Mutex::new(Vec::new()));
    let record = Arc::clone(&heard);
    world.session.on_notice(move |notice| {
        if let Notice::Departed { rank, departure } = notice {
            record.lock().push((*rank, departure.clone()));
        }
    });
    heard
}

fn eventually(what: &str, condition: impl Fn() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < PATIENCE, "never happened: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_rank_whose_world_is_gone_comes_to_no_round_and_leaves_with_its_last_communicator() {
    for rank in [0, 1] {
        let (zero, one) = two(["stay-0", "stay-1"][rank]);
        let (stays, other) = if rank == 0 { (zero, one) } else { (one, zero) };
        let heard = departures(&other);
        let session = Arc::clone(&stays.session);
        drop(stays);
        let error = other.barrier("never").unwrap_err().to_string();
        assert!(error.contains("left the world"), "{error}");
        assert_eq!(*heard.lock(), []);
        // The rank still takes part in rounds of ends.
        std::thread::scope(|scope| {
            let members: Arc<[usize]> = [0, 1].into();
            scope.spawn({
                let members = Arc::clone(&members);
                move || {
                    assert_eq!(
                        session.gather_parts("x", &members, b"a", PATIENCE, None),
                        all([b"a", b"b"], rank)
                    )
                }
            });
            assert_eq!(
                other
                    .session
                    .gather_parts("x", &members, b"b", PATIENCE, None),
                all([b"a", b"b"], rank)
            );
        });
        eventually("the leave message", || {
            *heard.lock() == [(rank, Departure::Left)]
        });
    }
}

fn all(parts: [&[u8; 1]; 2], first: usize) -> GatherOutcome {
    let mut parts: Vec<_> = parts.iter().map(|part| part.to_vec()).collect();
    if first == 1 {
        parts.reverse();
    }
    GatherOutcome::All(parts)
}

#[test]
fn a_rank_that_dies_after_its_world_is_gone_is_heard_of() {
    for rank in [0, 1] {
        let (zero, one) = two(["dies-0", "dies-1"][rank]);
        let (stays, other) = if rank == 0 { (zero, one) } else { (one, zero) };
        let heard = departures(&other);
        let session = Arc::clone(&stays.session);
        drop(stays);
        let pid = std::process::id().into();
        let how = LossKind::Exited { pid };
        session.cut_for_a_test();
        eventually("the death", || {
            *heard.lock() == [(rank, Departure::lost(how.clone()))]
        });
        std::mem::forget(session);
    }
}

#[test]
fn a_rank_that_fails_is_heard_of_once_though_it_stays() {
    let (zero, one) = two("fails");
    let heard = departures(&zero);
    let session = Arc::clone(&one.session);
    one.fail(&std::io::Error::other("out of paper"));
    let failed = (
        1,
        Departure::Failed(Failure::Error(String::from("out of paper"))),
    );
    eventually("the failure", || *heard.lock() == [failed.clone()]);
    let members: Arc<[usize]> = [0, 1].into();
    let soon = Duration::from_millis(50);
    let missing = zero.session.gather_parts("x", &members, b"", soon, None);
    assert_eq!(
        missing,
        GatherOutcome::Missing(vec![1]),
        "it still has communicators"
    );
    drop(session);
    let begun = Instant::now();
    assert_eq!(
        zero.session
            .gather_parts("y", &members, b"b", PATIENCE, None),
        GatherOutcome::All(vec![b"b".to_vec(), Vec::new()])
    );
    assert!(begun.elapsed() < PATIENCE / 2);
    assert_eq!(*heard.lock(), [failed]);
}

#[test]
fn an_end_does_without_a_rank_that_dies_while_it_is_waited_for() {
    let worlds = World::threads(3);
    let members: Arc<[usize]> = [0, 1, 2].into();
    std::thread::scope(|scope| {
        let mut worlds = worlds.into_iter();
        let [zero, one, two] = [(); 3].map(|()| worlds.next().unwrap());
        for world in [zero, one] {
            let members = &members;
            scope.spawn(move || {
                let part = [world.rank() as u8];
                let ended = world
                    .session
                    .gather_parts("x", members, &part, PATIENCE, None);
                assert_eq!(
                    ended,
                    GatherOutcome::All(vec![vec![0], vec![1], Vec::new()])
                );
            });
        }
        scope.spawn(move || {
            std::thread::sleep(Duration::from_millis(30));
            drop(two);
        });
    });
}

#[test]
fn ranks_whose_connections_rank_0_closes_as_it_leaves_are_not_dead() {
    const RANKS: usize = 6;
    for _ in 0..60 {
        let established = std::sync::Barrier::new(RANKS);
        let seen = std::sync::Barrier::new(RANKS);
        std::thread::scope(|scope| {
            for rank in 0..RANKS {
                let (established, seen) = (&established, &seen);
                scope.spawn(move || {
                    let world = World::join(rendezvous("closes", rank, RANKS)).unwrap();
                    let heard = departures(&world);
                    established.wait();
                    if rank == 0 {
                        drop(world);
                        seen.wait();
                        return;
                    }
                    let of_0 = |(gone, _): &(usize, Departure)| *gone == 0;
                    eventually("rank 0 leaves", || heard.lock().iter().any(of_0));
                    // Rank 0's reports about other ranks arrive no later than its own end.
                    std::thread::sleep(Duration::from_millis(5));
                    seen.wait();
                    let mut all = heard.lock().clone();
                    // After that, another rank coordinates, and receives the leave messages of the others.
                    let others = all.split_off(1);
                    assert!(others.iter().all(|(_, how)| *how == Departure::Left));
                    assert_eq!(all, [(0, Departure::Left)]);
                });
            }
        });
    }
}

#[test]
fn a_thread_that_waits_in_an_exchange_ends_when_another_drops_the_world() {
    for rank in [0, 1] {
        let (zero, one) = two(["drop-0", "drop-1"][rank]);
        let (leaves, stays) = if rank == 0 { (zero, one) } else { (one, zero) };
        let pending = leaves.begin_exchange("never", b"", PATIENCE).unwrap();
        // As communicators do, this keeps the rank connected.
        let session = Arc::clone(&leaves.session);
        let begun = Instant::now();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| pending.wait());
            // Until the thread waits: its copy of the session is one more.
            eventually("a thread that waits", || Arc::strong_count(&session) > 2);
            drop(leaves);
            let error = waits.join().unwrap().unwrap_err().to_string();
            assert!(
                error.contains(&format!("rank {rank}")) && error.contains("left the world"),
                "{error}"
            );
        });
        assert!(begun.elapsed() < SOON);
        drop(session);
        drop(stays);
    }
}
