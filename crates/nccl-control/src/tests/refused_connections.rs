//! Connections that do not belong to the job: each is named, and no rank is affected.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Weak;

use super::*;
use crate::Observer;
use crate::address::Address;
use crate::connection::{Connection, Received};
use crate::error::Error;
use crate::frame::Decoder;
use crate::node::Node;
use crate::session::SessionBackend;
use crate::transport::{MachineDriver, PeerConnections};

fn path(rendezvous: &Rendezvous) -> std::path::PathBuf {
    match &rendezvous.address {
        Address::Path(path) => path.clone(),
        other => panic!("{other}"),
    }
}

/// Connects once a rank listens.
fn connect(rendezvous: &Rendezvous) -> UnixStream {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        match UnixStream::connect(path(rendezvous)) {
            Ok(stream) => return stream,
            Err(error) if Instant::now() > deadline => panic!("{error}"),
            Err(_) => std::thread::sleep(Duration::from_millis(2)),
        }
    }
}

#[test]
fn garbage_and_half_greetings_and_silence_lose_nothing_of_the_others() {
    let meet = |rank| rendezvous("garbage", rank, 3);
    let came = &std::sync::Barrier::new(40 + 3);
    std::thread::scope(|scope| {
        for seed in 0..40u8 {
            scope.spawn(move || {
                let mut stream = connect(&meet(1));
                came.wait();
                let bytes: Vec<u8> = (0..2000u32).map(|n| (n as u8).wrapping_mul(seed)).collect();
                let _ = stream.write_all(&bytes[..usize::from(seed) * 50]);
                if seed % 2 == 0 {
                    // Half open: the peer sends no more data, but stays connected.
                    let _ = stream.shutdown(std::net::Shutdown::Write);
                }
                let mut rest = Vec::new();
                let _ = stream.set_read_timeout(Some(Duration::from_millis(500)));
                let _ = stream.read_to_end(&mut rest);
            });
        }
        for rank in 0..3 {
            scope.spawn(move || {
                let world = World::join(meet(rank)).unwrap();
                for turn in 0..200u64 {
                    let parts = world.all_gather("x", &turn.to_le_bytes()).unwrap();
                    assert_eq!(parts, vec![turn.to_le_bytes(); 3]);
                    if turn == 0 {
                        came.wait();
                    }
                }
            });
        }
    });
}

#[test]
fn somebody_who_says_nothing_is_closed_and_named_to_those_who_wait() {
    let meet =
        |rank| rendezvous("silent", rank, 2).with(|meet| meet.timeout = Duration::from_secs(7));
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| World::join(meet(0)).map(drop));
        let mut stream = connect(&meet(1));
        let begun = Instant::now();
        stream
            .set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        // Byte by byte, the peer would eventually complete the handshake.
        let _ = stream.write_all(&[0]);
        assert_eq!(stream.read(&mut [0; 64]).unwrap(), 0);
        let after = begun.elapsed();
        assert!(
            after > Duration::from_secs(4) && after < Duration::from_secs(7),
            "{after:?}"
        );
        let error = zero.join().unwrap().unwrap_err().to_string();
        let process = format!("process {} was refused", std::process::id());
        assert!(error.contains("rank 1 of 2 did not come"), "{error}");
        assert!(error.contains("never reached rank 0"), "{error}");
        assert!(
            error.contains(&process) && error.contains("within 5 s"),
            "{error}"
        );
    });
}

#[test]
fn another_secret_job_or_generation_is_named_on_both_sides() {
    let meet = |rank| {
        rendezvous("others", rank, 2).with(|meet| {
            meet.job = "a".into();
            meet.generation = 3;
            meet.secret = Some(SECRET.into());
            meet.timeout = Duration::from_secs(4);
        })
    };
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| World::join(meet(0)).map(drop));
        let begun = Instant::now();
        for (other, words) in [
            (
                meet(1).with(|meet| meet.secret = Some(OTHER_SECRET.into())),
                &["another secret", "NCCL_RUN_SECRET"][..],
            ),
            (
                meet(1).with(|meet| meet.job = "b".into()),
                &["job \"b\"", "job \"a\""],
            ),
            (
                meet(1).with(|meet| meet.generation = 2),
                &["generation 2", "generation 3"],
            ),
            (
                rendezvous("others", 1, 2).with(|meet| {
                    meet.job = "a".into();
                    meet.generation = 3;
                }),
                &["no secret"],
            ),
        ] {
            let error = World::join(other).unwrap_err().to_string();
            for word in words {
                assert!(error.contains(word), "{word:?} in {error:?}");
            }
        }
        assert!(begun.elapsed() < SOON);
        let error = zero.join().unwrap().unwrap_err().to_string();
        for word in ["another secret", "job \"b\"", "generation 2", "no secret"] {
            assert!(error.contains(word), "{word:?} in {error:?}");
        }
    });
}

#[test]
fn a_job_beyond_the_limits_is_refused_by_its_own_rank_before_anything_is_sent() {
    // There is no coordinator: a search for one would take 20 s.
    let rank = || rendezvous("limits", 1, 2);
    let long = || rank().with(|meet| meet.job = "j".repeat(5000));
    let late = || rank().with(|meet| meet.generation = u64::MAX);
    let cause = Error::rendezvous("out of memory");
    let begun = Instant::now();
    for (refused, words) in [
        (
            World::join(long()).err(),
            "has 5000 bytes, and 2048 is the most",
        ),
        (World::join_running(long()).err(), "has 5000 bytes"),
        (Observer::join(long()).err(), "has 5000 bytes"),
        (long().fail(&cause).err(), "has 5000 bytes"),
        (
            World::join(rank().with(|meet| meet.secret = Some("".into()))).err(),
            "the job's secret is empty",
        ),
        (
            World::join(rank().with(|meet| meet.secret = Some(" hush\n".into()))).err(),
            "the job's secret has 4 bytes, and 16 random ones are the least: make one with (umask 077; openssl rand -hex 32 > \
             FILE)",
        ),
        (
            World::join_running(rank().with(|meet| meet.secret = Some("fifteen bytes..".into())))
                .err(),
            "the job's secret has 15 bytes",
        ),
        (
            Observer::start(rank().with(|meet| meet.secret = Some("".into()))).err(),
            "the job's secret is empty",
        ),
        (World::join(late()).err(), "9223372036854775807 is the last"),
        (
            World::join(rendezvous("limits", 0, 1).with(|meet| meet.generation = u64::MAX)).err(),
            "is the last",
        ),
    ] {
        let error = refused.unwrap().to_string();
        assert!(error.contains(words), "{error}");
    }
    assert!(begun.elapsed() < SOON);
    // The longest name fits into a handshake message.
    let longest = |rank| rendezvous("longest", rank, 2).with(|meet| meet.job = "j".repeat(2048));
    std::thread::scope(|scope| {
        scope.spawn(|| World::join(longest(1)).unwrap().barrier("end").unwrap());
        World::join(longest(0)).unwrap().barrier("end").unwrap();
    });
}

#[test]
fn a_rank_of_the_next_generation_waits_until_the_last_one_is_over() {
    let meet = |rank, generation| {
        rendezvous("generations", rank, 2).with(|meet| meet.generation = generation)
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| World::join(meet(1, 3)).map(drop));
        let zero = World::join(meet(0, 3)).unwrap();
        other.join().unwrap().unwrap();
        // The rank was restarted, and rank 0 does not know that yet.
        let early = scope.spawn(|| World::join(meet(1, 4)).map(drop));
        let short = meet(1, 4).with(|meet| meet.timeout = Duration::from_secs(2));
        let error = World::join(short).unwrap_err().to_string();
        for word in ["generation 4", "still of generation 3"] {
            assert!(error.contains(word), "{word:?} in {error:?}");
        }
        assert!(!early.is_finished());
        drop(zero);
        let zero = World::join(meet(0, 4)).map(drop);
        early.join().unwrap().unwrap();
        zero.unwrap();
    });
}

#[test]
fn a_connection_that_carries_nonsense_ends_and_nothing_else_does() {
    let meet = |rank| rendezvous("nonsense-once", rank, 2);
    std::thread::scope(|scope| {
        let zero = scope.spawn(move || World::join(meet(0)).unwrap().barrier("end"));
        let (address, job) = (meet(1).address, meet(1).job_identity());
        let deadline = Instant::now() + SOON;
        let claimed_role = connect::ClaimedRole::rank(1, 2);
        let mut established =
            connect::connect_to_rank_0(&address, &job, claimed_role, deadline).unwrap();
        let frame = super::super::frame::Outgoing::new(0, vec![99].into());
        established.connection.enqueue(frame);
        established.connection.drain(deadline).unwrap();
        while established
            .connection
            .receive(&mut established.decoder)
            .unwrap()
            != Received::End
        {
            assert!(Instant::now() < deadline, "it is still heard");
            std::thread::sleep(Duration::from_millis(1));
        }
        World::join(meet(1)).unwrap().barrier("end").unwrap();
        zero.join().unwrap().unwrap();
    });
}

#[test]
fn a_rank_that_fails_or_panics_is_named_with_its_chain_at_once() {
    #[derive(Debug)]
    struct Loading(std::io::Error);
    impl std::fmt::Display for Loading {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("cannot load weights")
        }
    }
    impl std::error::Error for Loading {
        fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
            Some(&self.0)
        }
    }
    for (name, how, words) in [
        ("fail", 0, &["cannot load weights: no space"][..]),
        ("panic", 1, &["its thread panicked"]),
        ("bye", 2, &["left the world"]),
    ] {
        // Any rank may be the odd one, including the coordinator.
        for odd in [0, 2] {
            // A successor of rank 0 may hold its address slightly longer than the world exists.
            let name = format!("{name}-{odd}");
            // A coordinator that ends before the others have the result is tested elsewhere.
            let heard = std::sync::Barrier::new(3);
            std::thread::scope(|scope| {
                for rank in 0..4 {
                    let (heard, name) = (&heard, &name[..]);
                    scope.spawn(move || {
                        let world = World::join(rendezvous(name, rank, 4)).unwrap();
                        if rank == odd {
                            world.phase("load weights");
                            match how {
                                0 => world.fail(&Loading(std::io::Error::other("no space"))),
                                1 => {
                                    let call = std::panic::AssertUnwindSafe(move || {
                                        let _world = world;
                                        std::panic::resume_unwind(Box::new(()));
                                    });
                                    assert!(std::panic::catch_unwind(call).is_err());
                                }
                                _ => drop(world),
                            }
                            return;
                        }
                        let begun = Instant::now();
                        let error = world.barrier("loaded").unwrap_err().to_string();
                        heard.wait();
                        assert!(begun.elapsed() < SOON);
                        assert!(error.contains(&format!("rank {odd}")), "{error}");
                        for word in words {
                            assert!(error.contains(word), "{word:?} in {error:?}");
                        }
                    });
                }
            });
        }
    }
}

#[test]
fn at_the_deadline_all_ranks_hear_the_same_with_the_phase() {
    let errors = crate::sync::Mutex::new(Vec::new());
    let missed = std::sync::Barrier::new(4);
    std::thread::scope(|scope| {
        for rank in 0..4 {
            let (errors, missed) = (&errors, &missed);
            scope.spawn(move || {
                let world = World::join(rendezvous("phase", rank, 4)).unwrap();
                if rank == 2 {
                    world.phase("load weights");
                    // Wait until the others have their errors.
                    missed.wait();
                }
                // The shortest timeout ends the barrier for all ranks.
                let timeout = Duration::from_secs(if rank == 1 { 2 } else { 10 });
                let world = world.with_timeout(timeout);
                let error = world.barrier("loaded").unwrap_err().to_string();
                errors.lock().push(error);
                if rank != 2 {
                    missed.wait();
                }
                world
                    .with_timeout(Duration::from_secs(10))
                    .barrier("end")
                    .unwrap();
            });
        }
    });
    let errors = errors.into_inner();
    assert!(
        errors.iter().all(|error| *error == errors[0]),
        "{errors:#?}"
    );
    for word in [
        "rank 2 of 4",
        "barrier/loaded",
        "phase \"load weights\"",
        " for ",
    ] {
        assert!(errors[0].contains(word), "{word:?} in {:?}", errors[0]);
    }
}

#[test]
fn notices_reach_all_ranks_in_one_order_without_being_asked_for() {
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        for rank in 0..3 {
            let sender = sender.clone();
            scope.spawn(move || {
                let world = World::join(rendezvous("notice", rank, 3)).unwrap();
                world
                    .session
                    .on_notice(move |notice| drop(sender.send((rank, notice.clone()))));
                world.barrier("all listen").unwrap();
                for n in 0..50u8 {
                    world.session.announce("x", &[rank as u8, n]);
                }
                world.barrier("all said").unwrap();
                // A barrier's answer follows the notices that were sent before it.
                world.barrier("all heard").unwrap();
            });
        }
    });
    drop(sender);
    let mut heard = vec![Vec::new(); 3];
    for (rank, notice) in receiver {
        if let crate::inbox::Notice::Announced { from, bytes, .. } = notice {
            assert_eq!(usize::from(bytes[0]), from);
            heard[rank].push(bytes.to_vec());
        }
    }
    assert_eq!(heard[0].len(), 150);
    assert!(heard[0] == heard[1] && heard[1] == heard[2]);
}

#[test]
fn groups_and_keys_work_beside_each_other() {
    // Whether rank 0 has entered the exchange that rank 1 has not entered yet.
    let is_there = std::sync::OnceLock::<Box<dyn Fn() -> bool + Send + Sync>>::new();
    std::thread::scope(|scope| {
        for rank in 0..4 {
            let is_there = &is_there;
            scope.spawn(move || {
                let world = World::join(rendezvous("groups", rank, 4)).unwrap();
                if rank == 0 {
                    let is_pair = |round: &Round| round.topic == "pair";
                    let _ = is_there.set(match world.session.backend() {
                        SessionBackend::Node { node, .. } => {
                            Box::new(move || node.has_round_for_a_test(is_pair))
                        }
                        SessionBackend::Threads(_) => unreachable!("they meet over sockets"),
                    });
                }
                let ranks = if rank % 2 == 0 { [2, 0] } else { [1, 3] };
                let half = world.subgroup("half", &ranks).unwrap();
                // The two halves do not wait for each other, and have separate topics.
                for _ in 0..5 {
                    let parts = half.all_gather("x", &[rank as u8]).unwrap();
                    assert_eq!(parts, ranks.map(|rank| vec![rank as u8]));
                }
                if rank == 3 {
                    std::thread::sleep(Duration::from_millis(50));
                    world.set("key", b"value").unwrap();
                }
                assert_eq!(world.get("key").unwrap(), b"value");
                assert_eq!(world.broadcast("b", 1, &[rank as u8]).unwrap(), [1]);
                let other = if rank == 0 { [0, 1] } else { [1, 0] };
                if rank == 1 {
                    // Rank 0 enters first.
                    let begun = Instant::now();
                    while !is_there.get().unwrap()() {
                        assert!(begun.elapsed() < SOON, "rank 0 does not come");
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
                if rank < 2 {
                    // Rank 0 waits only briefly.
                    let soon = Instant::now() + Duration::from_millis([400, 10_000][rank]);
                    let other = Arc::from(other);
                    let error = world.exchange("pair", Some(&other), &[], soon, None);
                    let error = error.unwrap_err().to_string();
                    let word = ["did not come", "other members"][rank];
                    assert!(error.contains(word), "{error}");
                }
                world.barrier("end").unwrap();
                if rank == 0 {
                    assert!(world.subgroup("x", &[1, 2]).is_err());
                    assert!(world.subgroup("x", &[0, 0]).is_err());
                    assert!(world.subgroup("x", &[0, 4]).is_err());
                }
            });
        }
    });
}

#[test]
fn a_rank_that_fails_before_it_joins_is_named_on_all_ranks_within_a_second() {
    std::thread::scope(|scope| {
        for rank in [0, 1, 3] {
            scope.spawn(move || {
                let error = World::join(rendezvous("early", rank, 4)).unwrap_err();
                let error = error.to_string();
                assert!(error.contains("rank 2"), "{error}");
                assert!(error.contains("it failed: no GPU here"), "{error}");
            });
        }
        std::thread::sleep(Duration::from_millis(200));
        let begun = Instant::now();
        let error = std::io::Error::other("no GPU here");
        rendezvous("early", 2, 4).fail(&error).unwrap();
        assert!(begun.elapsed() < SOON);
    });
}

#[test]
fn every_rank_listens_and_says_that_it_does_not_coordinate() {
    std::thread::scope(|scope| {
        for rank in 0..3 {
            scope.spawn(move || {
                let meet = rendezvous("doors", rank, 3);
                let world = World::join(meet.clone()).unwrap();
                let next = (rank + 1) % 3;
                let at = world.session.address_of(next).unwrap().to_owned();
                if next != 0 {
                    let path = at.strip_prefix("unix:").unwrap();
                    let mut other = meet;
                    other.address = Address::Path(path.into());
                    other.rank = 1;
                    let error = World::join(other).unwrap_err().to_string();
                    let words = format!("this is rank {next}, and rank 0 coordinates");
                    assert!(error.contains(&words), "{error}");
                }
                world.barrier("end").unwrap();
            });
        }
    });
}

#[test]
fn a_connection_that_comes_after_all_were_closed_is_closed_at_once() {
    let driver: Weak<Node> = Weak::new();
    let driver = driver as Weak<dyn MachineDriver>;
    let mut connections = PeerConnections::default();
    connections.close_all();
    let (near, mut far) = UnixStream::pair().unwrap();
    far.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let connection = Arc::new(Connection::new(near.into()));
    let accepted = connections.accepted(&driver, connection, Decoder::new(0));
    assert_eq!(far.read(&mut [0]).unwrap(), 0);
    assert!(connections.is_empty());
    drop(accepted);
}
