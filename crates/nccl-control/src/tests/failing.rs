//! Ranks that fail or panic, and what the other ranks learn.

use super::*;
use crate::panics;
use crate::witness::Witness;

#[test]
fn a_rank_0_that_fails_before_it_joins_is_named_on_all_ranks_and_knows_that_they_heard() {
    for place in ["unix", "tcp"] {
        let published =
            std::env::temp_dir().join(format!("nccl-zero-fails-{}", std::process::id()));
        let meet = |rank| match place {
            "unix" => rendezvous("zero-fails", rank, 3),
            _ => Rendezvous::tcp("127.0.0.1", 0, rank, 3)
                .unwrap()
                .publish(&published)
                .with(|meet| meet.timeout = Duration::from_secs(20)),
        };
        std::thread::scope(|scope| {
            let early = scope.spawn(|| World::join(meet(1)).unwrap_err().to_string());
            std::thread::sleep(Duration::from_millis(50));
            let begun = Instant::now();
            let zero = scope.spawn(|| meet(0).fail(&std::io::Error::other("no GPU here")));
            let late = World::join(meet(2)).unwrap_err().to_string();
            for error in [early.join().unwrap(), late] {
                let word = "it failed: no GPU here";
                assert!(error.contains("rank 0") && error.contains(word), "{error}");
            }
            zero.join().unwrap().unwrap();
            assert!(begun.elapsed() < SOON);
        });
        let soon = meet(0).with(|meet| meet.timeout = Duration::from_millis(50));
        let error = soon.fail(&std::io::Error::other("x")).unwrap_err();
        assert!(
            error.to_string().contains("ranks 1-2 did not connect"),
            "{error}"
        );
    }
}

#[test]
fn who_has_lost_the_coordinator_waits_for_its_successor_no_longer_than_it_wants_to() {
    let worlds = World::threads(2);
    let lost = |deadline: Instant, interrupted: Option<&dyn Fn() -> bool>| {
        let why = (0, crate::departure::LossKind::Closed.into());
        let begun = Instant::now();
        let session = &worlds[1].session;
        let error = session.lost_with_coordinator("topic", why, deadline, interrupted);
        (error, begun.elapsed())
    };
    let soon = Duration::from_secs(4);
    // No rank reports that rank 0 is gone, because rank 0 is still alive.
    let (error, took) = lost(Instant::now(), None);
    assert!(took < soon, "{took:?} after the deadline");
    let text = error.to_string();
    assert!(
        text.contains("cannot be reached") && !text.contains("is gone"),
        "{text}"
    );
    let (error, took) = lost(Instant::now() + Duration::from_secs(60), Some(&|| true));
    assert!(took < soon, "{took:?} after its abort signal");
    assert!(matches!(error.kind(), ErrorKind::Aborted { .. }), "{error}");
}

#[test]
fn the_message_of_a_panic_travels_where_the_program_wants_it() {
    crate::install_panic_hook();
    let mut worlds = World::threads(2);
    let (one, zero) = (worlds.pop().unwrap(), worlds.pop().unwrap());
    let panicking = std::thread::spawn(move || {
        let _world = one;
        let _caught = std::panic::catch_unwind(|| panic!("another, which is caught"));
        panic!("no such expert: {}", 7);
    });
    assert!(panicking.join().is_err());
    let error = zero.barrier("never").unwrap_err().to_string();
    for word in [
        "rank 1",
        "its thread panicked at ",
        "failing.rs:",
        "no such expert: 7",
    ] {
        assert!(error.contains(word), "{word:?} in {error:?}");
    }
}

/// Starts a test of this file again, as the process with the given `role`.
fn again(test: &str, role: &str, place: &std::path::Path) -> std::process::Child {
    std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("tests::failing::{test}")])
        .env(role, place)
        .stderr(std::process::Stdio::null())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap()
}

/// The effect of the hook in a program whose panics abort: no thread unwinds, and no world is dropped. This test starts
/// itself again as the rank, which then aborts.
#[test]
fn a_process_that_aborts_tells_of_its_panic_before() {
    const ROLE: &str = "NCCL_TEST_ABORTING_RANK";
    let meet = |place: &str, rank| {
        Rendezvous::unix(place, rank, 2)
            .unwrap()
            .with(|meet| meet.timeout = Duration::from_secs(20))
    };
    if let Ok(place) = std::env::var(ROLE) {
        let world = World::join(meet(&place, 1)).unwrap();
        world.barrier("met").unwrap();
        panics::fail_all_sessions("its thread panicked at x.rs:1:2: out of cheese");
        std::process::abort();
    }
    let place = std::env::temp_dir().join(format!("nccl-aborts-{}.sock", std::process::id()));
    let name = "a_process_that_aborts_tells_of_its_panic_before";
    let mut child = again(name, ROLE, &place);
    let world = World::join(meet(place.to_str().unwrap(), 0)).unwrap();
    world.barrier("met").unwrap();
    let error = world.barrier("never").unwrap_err().to_string();
    let word = "it failed: its thread panicked at x.rs:1:2: out of cheese";
    assert!(error.contains(word), "{error}");
    assert!(!child.wait().unwrap().success());
}

/// Restarted ranks would wait for a witness that still waits for the previous ranks.
#[test]
fn a_witness_does_not_wait_for_ranks_whose_first_has_ended() {
    const ROLE: &str = "NCCL_TEST_RANK_0_OF_TWO";
    if let Ok(place) = std::env::var(ROLE) {
        let meet = Rendezvous::unix(&place, 0, 2).unwrap();
        let _ = World::join(meet.with(|meet| meet.witnesses = 1));
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().join("ranks");
    let name = "a_witness_does_not_wait_for_ranks_whose_first_has_ended";
    let mut child = again(name, ROLE, &place);
    let meet = Rendezvous::observer(&format!("unix:{}", place.display())).unwrap();
    let witness = std::thread::spawn(move || Witness::join(meet, 0).unwrap_err().to_string());
    // Wait until the witness has joined.
    let own = directory.path().join("ranks.1073741824");
    let begun = Instant::now();
    while !own.exists() {
        assert!(begun.elapsed() < SOON, "the witness does not listen");
        std::thread::sleep(Duration::from_millis(5));
    }
    std::thread::sleep(Duration::from_millis(100));
    child.kill().unwrap();
    child.wait().unwrap();
    let killed = Instant::now();
    let error = witness.join().unwrap();
    assert!(error.contains("rank 0 has ended"), "{error}");
    assert!(killed.elapsed() < SOON);
}
