//! An attacker between two ranks, or at the listener with recorded messages: no process is admitted, nothing is read,
//! and every change is detected.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::*;
use crate::frame::{Decoder, Frame, HEADER, LARGEST_FRAME, Outgoing};
use crate::handshake::{HandshakeMessage, Retry};
use crate::noise::Seal;
use crate::sync::Mutex;

/// The direction of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// From the side that opened the connection.
    There,
    Back,
}

/// How the relay changes a message. Messages are numbered for each connection and direction; the first one is the
/// handshake message in plaintext.
type Tamper = dyn Fn(Way, usize, Vec<u8>) -> Vec<Vec<u8>> + Send + Sync;

/// Messages in the order in which they arrived, each with its number.
type Seen = Mutex<Vec<(Way, usize, Vec<u8>)>>;

/// A relay that listens at one port of the loopback and forwards everything to another port.
struct Relay {
    port: u16,
    /// All messages, as they arrived.
    seen: Arc<Seen>,
    connections: Arc<AtomicUsize>,
}

impl Relay {
    fn start(listener: TcpListener, to: u16, tamper: Arc<Tamper>) -> Self {
        let port = listener.local_addr().unwrap().port();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let connections = Arc::new(AtomicUsize::new(0));
        let (all, count) = (Arc::clone(&seen), Arc::clone(&connections));
        std::thread::spawn(move || {
            for near in listener.incoming() {
                let Ok(near) = near else { return };
                let Ok(far) = TcpStream::connect(("127.0.0.1", to)) else {
                    continue;
                };
                count.fetch_add(1, Ordering::SeqCst);
                for (way, from, to) in [
                    (
                        Way::There,
                        near.try_clone().unwrap(),
                        far.try_clone().unwrap(),
                    ),
                    (Way::Back, far, near),
                ] {
                    let (all, tamper) = (Arc::clone(&all), Arc::clone(&tamper));
                    std::thread::spawn(move || pass(way, from, to, &all, &*tamper));
                }
            }
        });
        Self {
            port,
            seen,
            connections,
        }
    }

    fn honest(listener: TcpListener, to: u16) -> Self {
        Self::start(listener, to, Arc::new(|_, _, message| vec![message]))
    }

    fn bytes(&self) -> Vec<u8> {
        let seen = self.seen.lock();
        let messages = seen.iter().map(|(.., message)| &message[..]);
        messages.collect::<Vec<_>>().concat()
    }
}

fn pass(way: Way, mut from: TcpStream, mut to: TcpStream, seen: &Seen, tamper: &Tamper) {
    for number in 0.. {
        let Some(message) = read_message(&mut from, number == 0) else {
            break;
        };
        seen.lock().push((way, number, message.clone()));
        let out = tamper(way, number, message).concat();
        if to.write_all(&out).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}

/// Reads a plaintext frame, or a sealed message.
fn read_message(from: &mut TcpStream, is_plain: bool) -> Option<Vec<u8>> {
    let mut message = vec![0; if is_plain { HEADER } else { 2 }];
    from.read_exact(&mut message).ok()?;
    let length = match *message {
        [a, b] => usize::from(u16::from_le_bytes([a, b])),
        _ => u32::from_le_bytes(*message.first_chunk()?) as usize,
    };
    let head = message.len();
    message.resize(head + length, 0);
    from.read_exact(&mut message[head..]).ok()?;
    Some(message)
}

/// Returns two consecutive ports: one at which an unrelated listener already listens, and the next one.
fn range() -> (TcpListener, u16) {
    (0..50)
        .find_map(|_| {
            let first = TcpListener::bind("127.0.0.1:0").unwrap();
            let port = first.local_addr().unwrap().port();
            let second = port.checked_add(1)?;
            drop(TcpListener::bind(("127.0.0.1", second)).ok()?);
            Some((first, port))
        })
        .unwrap()
}

fn connect(port: u16) -> TcpStream {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => {
                let timeout = Some(Duration::from_secs(10));
                stream.set_read_timeout(timeout).unwrap();
                return stream;
            }
            Err(error) if Instant::now() > deadline => panic!("{error}"),
            Err(_) => std::thread::sleep(Duration::from_millis(2)),
        }
    }
}

#[test]
fn a_relay_at_another_port_gets_nobody_in_and_both_sides_say_why() {
    let (listener, first) = range();
    let relay = Relay::honest(listener, first + 1);
    let at = |rank| {
        let meet = Rendezvous::tcp("127.0.0.1", first, rank, 3).unwrap();
        meet.with(|meet| {
            meet.secret = Some(SECRET.into());
            meet.timeout = Duration::from_secs(5);
        })
    };
    let dialled = format!("dialled tcp:127.0.0.1:{first}, and ");
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| World::join(at(0).up_to_port(first + 1)).map(drop));
        drop(connect(first + 1));
        // The rank reaches the relay first, and continues to search.
        let one = scope.spawn(|| World::join(at(1).up_to_port(first + 1)).map(drop));
        let error = World::join(at(2)).unwrap_err().to_string();
        for words in [
            &format!(
                "this rank {dialled}the process that answers is tcp:127.0.0.1:{}",
                first + 1
            )[..],
            "(a relay), or addresses are translated",
            "NCCL_RUN_TRANSLATED=1",
        ] {
            assert!(error.contains(words), "{words:?} in {error:?}");
        }
        for rank in [zero, one] {
            let error = rank.join().unwrap().unwrap_err().to_string();
            for words in [
                "rank 2 of 3 did not come",
                &format!("it {dialled}this is tcp:127.0.0.1:{}", first + 1),
            ] {
                assert!(error.contains(words), "{words:?} in {error:?}");
            }
        }
    });
    assert!(relay.connections.load(Ordering::SeqCst) >= 2);
    let seen = relay.seen.lock();
    assert!(seen.iter().all(|(_, number, _)| *number == 0), "{seen:?}");
}

#[test]
fn a_relay_that_changes_the_address_in_a_greeting_gets_nobody_in_and_both_sides_say_why() {
    let (listener, first) = range();
    let (there, here) = (format!(":{first}"), format!(":{}", first + 1));
    let change = move |_, _, mut message: Vec<u8>| {
        let mut at = 0;
        while let Some(found) = message[at..]
            .windows(there.len())
            .position(|bytes| bytes == there.as_bytes())
        {
            at += found;
            message[at..at + here.len()].copy_from_slice(here.as_bytes());
        }
        vec![message]
    };
    if format!("{first}").len() != format!("{}", first + 1).len() {
        return;
    }
    let _relay = Relay::start(listener, first + 1, Arc::new(change));
    let at = |port, rank| {
        let meet = Rendezvous::tcp("127.0.0.1", port, rank, 2).unwrap();
        meet.with(|meet| {
            meet.secret = Some(SECRET.into());
            meet.timeout = Duration::from_secs(4);
        })
    };
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| World::join(at(first + 1, 0)).map(drop));
        drop(connect(first + 1));
        let error = World::join(at(first, 1)).unwrap_err().to_string();
        let words =
            "another secret than this rank, or a relay between the two has changed the handshake";
        assert!(error.contains(words), "{error}");
        let error = zero.join().unwrap().unwrap_err().to_string();
        let words = "another secret than this job, or its handshake was meant for another address";
        assert!(error.contains(words), "{error}");
    });
}

#[test]
fn one_socket_may_be_dialled_by_several_paths() {
    let directory = tempfile::tempdir().unwrap();
    let (real, link) = (directory.path().join("real"), directory.path().join("link"));
    std::fs::create_dir(&real).unwrap();
    std::os::unix::fs::symlink(&real, &link).unwrap();
    let at = |directory: &std::path::Path, rank| {
        let meet = Rendezvous::unix(directory.join("socket"), rank, 3).unwrap();
        meet.with(|meet| {
            meet.secret = Some(SECRET.into());
            meet.timeout = Duration::from_secs(10);
        })
    };
    std::thread::scope(|scope| {
        for (directory, rank) in [(&real, 1), (&real.join("../link"), 2)] {
            let meet = at(directory, rank);
            scope.spawn(|| World::join(meet).unwrap().barrier("end").unwrap());
        }
        let world = World::join(at(&link, 0)).unwrap();
        world.barrier("end").unwrap();
    });
}

/// Connects two ranks through a relay that the addresses do not reveal.
fn meet_through(
    tamper: Arc<Tamper>,
    name: &str,
    rank: impl Fn(World) -> String + Sync,
) -> (Relay, [String; 2]) {
    let (listener, first) = range();
    let relay = Relay::start(listener, first + 1, tamper);
    let at = |port, rank| {
        let meet = Rendezvous::tcp("127.0.0.1", port, rank, 2).unwrap();
        meet.with(|meet| {
            meet.job = name.into();
            meet.secret = Some(SECRET.into());
            meet.translated_addresses = true;
            meet.timeout = Duration::from_secs(10);
        })
    };
    let join = |meet| match World::join(meet) {
        Ok(world) => rank(world),
        Err(error) => error.to_string(),
    };
    let said = std::thread::scope(|scope| {
        let zero = scope.spawn(|| join(at(first + 1, 0)));
        drop(connect(first + 1));
        let one = scope.spawn(|| join(at(relay.port, 1)));
        [zero.join().unwrap(), one.join().unwrap()]
    });
    (relay, said)
}

#[test]
fn a_relay_where_addresses_are_translated_reads_nothing() {
    let marker = b"the marker that nobody else reads";
    let (relay, said) = meet_through(
        Arc::new(|_, _, message| vec![message]),
        "marked job",
        |world| {
            let large = marker.repeat(10_000);
            for _ in 0..3 {
                let parts = world.all_gather("marked topic", &large).unwrap();
                assert!(parts.iter().all(|part| *part == large));
            }
            world.barrier("end").unwrap();
            String::new()
        },
    );
    assert_eq!(said, ["", ""]);
    assert!(relay.connections.load(Ordering::SeqCst) >= 1);
    let bytes = relay.bytes();
    assert!(bytes.len() > 9 * 10_000 * marker.len());
    for preamble in [&marker[..], b"marked", b"barrier", SECRET.as_bytes()] {
        let found = bytes.windows(preamble.len()).any(|bytes| bytes == preamble);
        assert!(!found, "{:?}", String::from_utf8_lossy(preamble));
    }
}

#[test]
fn what_a_relay_changes_repeats_leaves_out_or_puts_in_ends_the_connection_and_is_not_delivered() {
    /// Changes the sealed message with this number; the second argument is a copy of the previous message.
    type Change = fn(Vec<u8>, Vec<u8>) -> Vec<Vec<u8>>;
    let changes: [(&str, Change); 6] = [
        ("flipped", |_, mut message| {
            let middle = message.len() / 2;
            message[middle] ^= 0x10;
            vec![message]
        }),
        ("dropped", |_, _| Vec::new()),
        ("repeated", |_, message| vec![message.clone(), message]),
        ("an old one", |before, message| vec![before, message]),
        ("shorter", |_, mut message| {
            message.pop();
            let length = (message.len() - 2) as u16;
            message[..2].copy_from_slice(&length.to_le_bytes());
            vec![message]
        }),
        ("forged", |_, message| {
            let mut forged = vec![40, 0];
            forged.extend_from_slice(&[7; 40]);
            vec![forged, message]
        }),
    ];
    // The session continues over another connection, with the messages that the other side lacks.
    for way in [Way::There, Way::Back] {
        for (what, change) in changes {
            let changed = AtomicBool::new(false);
            // After the handshake, the answers of joining and the first rounds.
            let last = Mutex::new(Vec::new());
            let tamper = move |to: Way, number: usize, message: Vec<u8>| {
                if to != way {
                    return vec![message];
                }
                let before = std::mem::replace(&mut *last.lock(), message.clone());
                match number {
                    12 if !changed.swap(true, Ordering::SeqCst) => change(before, message),
                    _ => vec![message],
                }
            };
            let (relay, said) = meet_through(Arc::new(tamper), "tampered", |world| {
                for turn in 0..100 {
                    match world.all_gather("x", &u64::to_le_bytes(turn)) {
                        Ok(parts) => assert_eq!(parts, vec![u64::to_le_bytes(turn); 2]),
                        Err(error) => return error.to_string(),
                    }
                }
                String::from("nothing was noticed")
            });
            assert_eq!(said, ["nothing was noticed"; 2], "{what} {way:?}");
            let connections = relay.connections.load(Ordering::SeqCst);
            assert!(connections > 1, "{what} {way:?}: {connections}");
        }
    }
}

#[test]
fn no_flipped_bit_of_sealed_frames_comes_out_as_something_else() {
    let (ours, theirs) = Seal::pair();
    let frames = [
        Outgoing::new(4, b"first"[..].into()),
        Outgoing::new(6, vec![1; 100].into()),
        Outgoing::new(8, b"last"[..].into()),
    ];
    let mut bytes = Vec::new();
    for (number, frame) in (0..).zip(&frames) {
        let preamble = [&frame.head[..], &frame.payload[..]].concat();
        ours.seal(number, &preamble, &mut bytes).unwrap();
    }
    let same = |frame: &Frame, sent: &Outgoing| {
        frame.id == u64::from(sent.head[4]) && frame.payload == sent.payload[..]
    };
    for bit in 0..bytes.len() * 8 {
        let mut changed = bytes.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        let mut decoder = Decoder::new(LARGEST_FRAME);
        decoder.seal(Arc::clone(&theirs));
        decoder.push(&changed);
        // Finally, the bytes that the length claims arrive.
        decoder.push(&vec![0; 1 << 16]);
        let mut got = 0;
        let ended = loop {
            match decoder.next() {
                Ok(Some(frame)) => {
                    assert!(same(&frame, &frames[got]), "bit {bit}");
                    got += 1;
                }
                other => break other,
            }
        };
        assert!(ended.is_err() && got < frames.len(), "bit {bit}: {ended:?}");
    }
}

/// Returns the answer to a connection that is not a rank's, until the other side closes it.
fn answered(port: u16, messages: &[&[u8]]) -> Vec<u8> {
    let mut stream = connect(port);
    for message in messages {
        if stream.write_all(message).is_err() {
            break;
        }
        // As if the peer waited for an answer.
        std::thread::sleep(Duration::from_millis(20));
    }
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    answer
}

fn handshake_message_in(bytes: &[u8]) -> (HandshakeMessage, usize) {
    let mut decoder = Decoder::new(LARGEST_FRAME);
    decoder.push(bytes);
    let frame = decoder.next().unwrap().unwrap();
    let rest = bytes.len() - HEADER - frame.payload.len();
    (HandshakeMessage::decode(&frame).unwrap(), rest)
}

#[test]
fn a_recorded_greeting_lets_nobody_in_and_disturbs_no_rank() {
    let work = |world: &World| {
        for turn in 0..200u64 {
            let parts = world.all_gather("x", &turn.to_le_bytes()).unwrap();
            assert_eq!(parts, vec![turn.to_le_bytes(); 2]);
        }
    };
    let honest = Arc::new(|_, _, message| vec![message]);
    let (relay, said) = meet_through(honest, "recorded", |world| {
        work(&world);
        world.barrier("end").unwrap();
        String::new()
    });
    assert_eq!(said, ["", ""]);
    let of_rank_1 = |wanted| {
        let seen = relay.seen.lock();
        let there = seen.iter().filter(|(way, ..)| *way == Way::There);
        let mut numbered = there.filter(|(_, number, _)| *number == wanted);
        numbered.next().unwrap().2.clone()
    };
    let (hello, present) = (of_rank_1(0), of_rank_1(1));

    // The same job again.
    let (_, port) = range();
    let at = |rank| {
        let meet = Rendezvous::tcp("127.0.0.1", port + 1, rank, 2).unwrap();
        meet.with(|meet| {
            meet.job = "recorded".into();
            meet.secret = Some(SECRET.into());
            meet.translated_addresses = true;
            meet.timeout = Duration::from_secs(20);
        })
    };
    let replay = |messages: &[&[u8]]| {
        let answer = answered(port + 1, messages);
        let (handshake_message, behind) = handshake_message_in(&answer);
        assert!(
            matches!(handshake_message, HandshakeMessage::Answer(_)),
            "{handshake_message:?}"
        );
        // At most a refusal, under a seal that its receiver cannot open.
        assert!(behind < 300, "{behind} bytes");
    };
    let work_together = |zero: &World, one: &World| {
        std::thread::scope(|scope| {
            scope.spawn(|| work(zero));
            work(one);
        });
    };
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| World::join(at(0)).unwrap());
        let alone = scope.spawn(|| replay(&[&hello]));
        replay(&[&hello, &present]);
        // Rank 1 has not joined yet, and joins now.
        let one = World::join(at(1)).unwrap();
        let zero = zero.join().unwrap();
        let replays: Vec<_> = (0..8)
            .map(|_| scope.spawn(|| replay(&[&hello, &present, &present])))
            .collect();
        work_together(&zero, &one);
        replays.into_iter().for_each(|one| one.join().unwrap());
        alone.join().unwrap();
        work_together(&zero, &one);
    });
}

#[test]
fn strangers_are_told_what_is_wrong_and_cost_a_line_each() {
    let (listener, port) = range();
    drop(listener);
    let at = |rank| {
        let meet = Rendezvous::tcp("127.0.0.1", port, rank, 2).unwrap();
        meet.with(|meet| {
            meet.secret = Some(SECRET.into());
            meet.timeout = Duration::from_secs(8);
        })
    };
    // The messages of a rank with the right version and a secret, followed by garbage.
    let hello = |first: Vec<u8>| {
        let preamble = crate::handshake::Preamble {
            has_secret: true,
            dialled: Some(crate::endpoint::Endpoint::written(format!(
                "tcp:127.0.0.1:{port}"
            ))),
        };
        let out = HandshakeMessage::Hello { preamble, first }.encode();
        [&out.head[..], &out.payload[..]].concat()
    };
    let mut other_version = hello(Vec::new());
    other_version[HEADER + 8] = 11;
    let before = crate::refused_connections();
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| World::join(at(0)).map(drop));
        for first in [Vec::new(), vec![0; 48], vec![7; 200], vec![9; 3000]] {
            let handshake_message = hello(first);
            scope.spawn(move || {
                let answer = handshake_message_in(&answered(port, &[&handshake_message]));
                let failure =
                    HandshakeMessage::Failed(crate::handshake::HandshakeFailure::OtherSecret);
                assert_eq!(answer, (failure, 0));
            });
        }
        for (stranger, words) in [
            (
                &other_version[..],
                "a handshake of another protocol version: all ranks need the same release",
            ),
            (
                b"GET / HTTP/1.1\r\n\r\n",
                "it sent a frame that is too long",
            ),
        ] {
            scope.spawn(move || {
                let (handshake_message, _) = handshake_message_in(&answered(port, &[stranger]));
                let HandshakeMessage::Refused { why, retry } = handshake_message else {
                    panic!("{handshake_message:?}")
                };
                assert_eq!(retry, Retry::Never);
                assert!(why.contains(words), "{why}");
            });
        }
        let error = zero.join().unwrap().unwrap_err().to_string();
        for words in ["another secret than this job", "another protocol version"] {
            assert!(error.contains(words), "{words:?} in {error:?}");
        }
    });
    assert!(crate::refused_connections() >= before + 6);
}

#[test]
fn a_rank_is_told_by_a_coordinator_of_another_version() {
    let (listener, port) = range();
    let at = Rendezvous::tcp("127.0.0.1", port, 1, 2).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            read_message(&mut stream, true).unwrap();
            let other = [&b"ncclmeet"[..], &11u64.to_le_bytes(), b"?"].concat();
            let out = Outgoing::new(0, other.into());
            stream
                .write_all(&[&out.head[..], &out.payload[..]].concat())
                .unwrap();
        });
        let error = World::join(at.with(|meet| {
            meet.secret = Some(SECRET.into());
            meet.timeout = Duration::from_secs(5);
        }));
        let error = error.unwrap_err().to_string();
        assert!(error.contains("another protocol version"), "{error}");
    });
}

/// A middlebox acknowledges data that it does not forward: no connection ends because of that, and no end is proven.
#[test]
fn what_a_relay_swallows_is_silence_and_no_death() {
    let cases = [&[Way::There][..], &[Way::Back], &[Way::There, Way::Back]];
    std::thread::scope(|scope| {
        for ways in cases {
            scope.spawn(move || {
                let swallows = move |to: Way, number: usize, message: Vec<u8>| match number >= 12
                    && ways.contains(&to)
                {
                    true => Vec::new(),
                    false => vec![message],
                };
                let begun = Instant::now();
                let (_relay, said) = meet_through(Arc::new(swallows), "swallowed", |mut world| {
                    world.set_timeout(Duration::from_secs(4));
                    for turn in 0..100 {
                        if let Err(error) = world.all_gather("x", &u64::to_le_bytes(turn)) {
                            return error.to_string();
                        }
                    }
                    String::from("fine")
                });
                println!("{ways:?}: after {:.1?}: {said:#?}", begun.elapsed());
                for (rank, said) in said.iter().enumerate() {
                    let other =
                        format!("rank {} (vm", 1 - rank).replace("vm", &crate::host::name());
                    assert!(said.contains(&other), "{ways:?}: {said}");
                    assert!(!said.contains("died") && !said.contains("ended"), "{said}");
                }
            });
        }
    });
}
