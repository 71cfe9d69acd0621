//! Feeds all parsers with valid, nearly valid and invalid input.
//!
//! `corpus/` contains one file for each message in its wire format. After a change of the protocol (and of its
//! version), `NCCL_UPDATE_CORPUS=1 cargo test -p nccl-control corpus` rewrites the files.

use std::path::PathBuf;

use super::*;
use crate::coordinator_message::{Answer, CoordinatorMessage, Push, RankRecord};
use crate::departure::{
    Departure, Exit, Failure, HeardOnly, LastCall, LossKind, Lost, OomKill, ProcessEnd, Reason,
    Signal, UnreachableEvidence, UnreachableHost,
};
use crate::endpoint::Endpoint;
use crate::frame::{Decoder, Frame, HEADER, LARGEST_FRAME, LARGEST_HANDSHAKE_MESSAGE, Outgoing};
use crate::handshake::{HandshakeFailure, HandshakeMessage, Hello, PeerRole, Preamble, Retry};
use crate::noise::{Initiator, Responder};
use crate::operation::OperationKind;
use crate::phase::Phase;
use crate::process_state::{Held, ProcessState};
use crate::request::{ChannelPosition, ExpectedValue, FollowedBefore, NO_ANSWER, Request};
use crate::round::{Missing, RequestError};
use crate::secret::Secret;
use crate::slot::Slot;
use crate::{EntryReport, LateRank, QueriedOperation, StragglerQueryRequest, StragglerReport};
use crate::{interface, tcp};

fn bytes_of(frames: &[Outgoing]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for frame in frames {
        bytes.extend_from_slice(&frame.head);
        bytes.extend_from_slice(&frame.payload);
    }
    bytes
}

fn answer(answer: &Answer) -> Outgoing {
    Outgoing::new(7, answer.encode())
}

/// An example of each message.
fn examples() -> Vec<(&'static str, Outgoing)> {
    let text = String::from;
    let hello = Hello {
        job: text("job"),
        generation: 3,
        world_size: 4,
        role: PeerRole::Observer,
        rank: 2,
        host: text("node-a"),
        pid: 77,
        kernel: text("boot 4026531836"),
    };
    let here = || Endpoint::written(text("tcp:10.0.0.5:29400"));
    let handshake_message = |dialled, first| HandshakeMessage::Hello {
        preamble: Preamble {
            has_secret: true,
            dialled,
        },
        first,
    };
    let other_address = HandshakeFailure::OtherAddress { here: here() };
    let refused = HandshakeMessage::Refused {
        why: text("no"),
        retry: Retry::Elsewhere,
    };
    let refused_at = HandshakeMessage::Refused {
        why: text("this is rank 2"),
        retry: Retry::At {
            rank: 1,
            at: text("tcp:10.0.0.6:31001"),
        },
    };
    let round = |members: &[usize]| Round {
        topic: text("barrier/x"),
        number: 1,
        members: (!members.is_empty()).then(|| members.into()),
    };
    let collect = |members: &[usize]| Request::Exchange {
        round: round(members),
        waited: Duration::from_millis(1500),
        timeout: Duration::from_secs(60),
        part: b"part".to_vec(),
    };
    let outcome = Request::Outcome {
        round: round(&[2, 0]),
        answer: Answer::Parts(Arc::new(vec![b"one".to_vec(), Vec::new()])),
    };
    let subject = QueriedOperation {
        key: text("k"),
        name: text("model/tp"),
        collective_index: 41,
        kind: OperationKind::AllReduce,
        sequence: 42,
    };
    let query = StragglerQueryRequest {
        subject: subject.clone(),
        members: vec![2, 0],
        since: Duration::from_millis(1500),
        is_sample: false,
    };
    let attends = EntryReport {
        key: text("k"),
        collective_index: 41,
        entered: Some(Duration::from_micros(12)),
        last: text("l"),
    };
    let lateness = StragglerReport {
        subject,
        ranks: 2,
        late: vec![LateRank {
            rank: 0,
            communicator_rank: 1,
            host: text("node-a"),
            pid: 77,
            behind: Duration::from_millis(1501),
            has_entered: false,
            answers: true,
            phase: text("load"),
            last: text("l"),
        }],
        more: 3,
        reporter: 1,
    };
    let error = |why| answer(&Answer::Failed(Arc::new(why)));
    vec![
        // As if the handshake encrypted nothing.
        (
            "hello",
            handshake_message(Some(here()), hello.encode()).encode(),
        ),
        (
            "hello-translated",
            handshake_message(None, Vec::new()).encode(),
        ),
        ("answer", HandshakeMessage::Answer(vec![4; 48]).encode()),
        (
            "unproved",
            HandshakeMessage::Failed(HandshakeFailure::OtherSecret).encode(),
        ),
        (
            "unproved-at",
            HandshakeMessage::Failed(other_address).encode(),
        ),
        ("present", HandshakeMessage::Confirm.encode()),
        (
            "welcome",
            HandshakeMessage::Welcome {
                by: 1,
                generation: 3,
            }
            .encode(),
        ),
        ("refused", refused.encode()),
        ("collect", collect(&[]).encode(1)),
        ("collect-some", collect(&[2, 0]).encode(2)),
        (
            "cancel",
            Request::Cancel {
                reason: Reason::Text(text("x")),
            }
            .encode(1),
        ),
        (
            "set",
            Request::Set {
                key: text("k"),
                value: b"v".to_vec(),
            }
            .encode(3),
        ),
        (
            "get",
            Request::Get {
                key: text("k"),
                timeout: Duration::from_millis(5),
            }
            .encode(4),
        ),
        ("try-get", Request::TryGet { key: text("k") }.encode(4)),
        (
            "await-keys",
            Request::AwaitKeys {
                keys: vec![text("k"), text("l")],
                timeout: Duration::from_millis(5),
            }
            .encode(4),
        ),
        (
            "add",
            Request::Add {
                key: text("k"),
                amount: -2,
            }
            .encode(4),
        ),
        (
            "compare-set",
            Request::CompareSet {
                key: text("k"),
                expected: Some(ExpectedValue(b"old".to_vec())),
                value: b"v".to_vec(),
            }
            .encode(4),
        ),
        ("delete", Request::Delete { key: text("k") }.encode(4)),
        ("phase", Request::Phase { name: text("p") }.encode(5)),
        (
            "announce",
            Request::Announce {
                topic: text("t"),
                bytes: b"b".to_vec(),
            }
            .encode(6),
        ),
        ("clock", Request::Clock.encode(1)),
        ("recording", Request::Recording { bytes: 1 << 20 }.encode(2)),
        (
            "tell",
            Request::Direct {
                to: 2,
                topic: text("t"),
                bytes: b"b".to_vec(),
            }
            .encode(0),
        ),
        (
            "told",
            Push::Direct {
                from: 1,
                topic: text("t"),
                bytes: b"b"[..].into(),
            }
            .encode(),
        ),
        ("refused-at", refused_at.encode()),
        (
            "last",
            Request::LastCall {
                call: text("all_reduce #4"),
            }
            .encode(0),
        ),
        (
            "saw",
            Request::ProcessProbed {
                rank: 2,
                state: ProcessState::stopped(),
            }
            .encode(0),
        ),
        (
            "query-stragglers",
            Request::QueryStragglers(query).encode(0),
        ),
        ("attends", Request::EntryReport(attends).encode(0)),
        (
            "inquire",
            Push::StragglerQuery {
                key: text("k"),
                collective_index: 41,
                is_sample: false,
            }
            .encode(),
        ),
        ("lateness", Push::Stragglers(Arc::new(lateness)).encode()),
        (
            "skew",
            Push::Skewed {
                key: text("k"),
                skew: Duration::from_micros(70),
                last: 3,
            }
            .encode(),
        ),
        ("look", Push::ProbeProcess { rank: 2, pid: 77 }.encode()),
        ("want-outcome", Push::WantOutcome(round(&[])).encode()),
        (
            "suspected",
            Push::Suspected {
                rank: 2,
                silence: Some(Duration::from_millis(3200)),
                state: Some(ProcessState::stopped()),
            }
            .encode(),
        ),
        ("stay", Request::LeaveWorld { why: None }.encode(0)),
        (
            "stay-failed",
            Request::LeaveWorld {
                why: Some(Failure::Error(String::from("a: b"))),
            }
            .encode(0),
        ),
        (
            "send",
            Request::Send {
                channel: text("steps"),
                to: Some(2),
                timeout: Duration::from_secs(1),
                bytes: b"b".to_vec(),
            }
            .encode(9),
        ),
        (
            "took",
            Request::Consumed {
                channel: text("steps"),
                taken: 16,
            }
            .encode(0),
        ),
        (
            "message",
            Push::Message {
                channel: text("steps"),
                from: 1,
                number: 7,
                bytes: b"b"[..].into(),
            }
            .encode(),
        ),
        ("channels-lost", Push::ChannelsLost { rank: 1 }.encode()),
        (
            "over",
            Push::ChannelsClosed {
                rank: 1,
                departure: Departure::Left,
            }
            .encode(),
        ),
        (
            "watches",
            Request::WatchRanks {
                ranks: vec![(1, 77)],
            }
            .encode(0),
        ),
        (
            "ended",
            Request::ExitReport {
                rank: 1,
                pid: 77,
                end: ProcessEnd::in_words("killed", ""),
            }
            .encode(8),
        ),
        (
            "parts",
            answer(&Answer::Parts(Arc::new(vec![b"a".to_vec(), Vec::new()]))),
        ),
        ("done", answer(&Answer::Done)),
        ("absent", answer(&Answer::Absent)),
        ("sum", answer(&Answer::Sum(-2))),
        ("value", answer(&Answer::Value(b"v"[..].into()))),
        (
            "timed-out",
            error(RequestError::TimedOut {
                missing: vec![
                    Missing {
                        rank: 1,
                        phase: None,
                    },
                    Missing {
                        rank: 2,
                        phase: Some((Phase::Named(text("load")), Duration::from_secs(3))),
                    },
                ],
                waited: Duration::from_secs(9),
                notes: vec![text("somebody")],
            }),
        ),
        (
            "gone",
            error(RequestError::Departed {
                rank: 1,
                departure: Departure::lost(LossKind::Unknown),
            }),
        ),
        ("twice", error(RequestError::Twice)),
        ("too-large", error(RequestError::TooLarge { bytes: 9 })),
        (
            "given-up",
            error(RequestError::GivenUp {
                rank: 1,
                reason: Reason::Text(text("x")),
            }),
        ),
        ("other-members", error(RequestError::OtherMembers)),
        (
            "no-key",
            error(RequestError::NoKey {
                waited: Duration::from_secs(1),
            }),
        ),
        (
            "no-keys",
            error(RequestError::NoKeys {
                missing: vec![text("k"), text("l")],
                waited: Duration::from_secs(1),
            }),
        ),
        (
            "not-a-number",
            error(RequestError::NotANumber { found: text("v") }),
        ),
        (
            "sum-overflows",
            error(RequestError::SumOverflows {
                counter: i64::MAX,
                amount: 1,
            }),
        ),
        ("store-lost", error(RequestError::StoreLost)),
        ("outcome-lost", error(RequestError::OutcomeLost)),
        ("old-generation", error(RequestError::OldGeneration)),
        ("interrupted", error(RequestError::Interrupted)),
        (
            "no-majority",
            error(RequestError::NoMajority {
                waited: Duration::from_secs(3),
            }),
        ),
        (
            "notice",
            Push::Announced {
                from: 1,
                topic: text("t"),
                bytes: b"b"[..].into(),
            }
            .encode(),
        ),
        (
            "push-failed",
            Push::Departed {
                rank: 1,
                departure: Departure::Failed(Failure::Error(String::from("a: b"))),
            }
            .encode(),
        ),
        (
            "follow",
            Request::Follow {
                outcomes: vec![(round(&[2, 0]), true), (round(&[]), false)],
                before: FollowedBefore::Same {
                    number: 2,
                    received: vec![ChannelPosition {
                        channel: text("steps"),
                        received: 9,
                        taken: 7,
                    }],
                },
            }
            .encode(NO_ANSWER),
        ),
        (
            "follow-another",
            Request::Follow {
                outcomes: Vec::new(),
                before: FollowedBefore::Other(2),
            }
            .encode(NO_ANSWER),
        ),
        ("followed", Push::Followed(2).encode()),
        ("not-served", Push::NotServed.encode()),
        ("outcome", outcome.encode(NO_ANSWER)),
        ("newcomers", Push::Joiners(2).encode()),
        ("size", Push::WorldSize(4).encode()),
        (
            "member",
            Push::Rank(RankRecord {
                rank: 1,
                slot: Some(Slot {
                    number: 4,
                    incarnation: 0x51,
                }),
                host: text("node-a"),
                pid: 77,
                kernel: text("boot 4026531836"),
                at: text("unix:@a"),
                phase: Some((Phase::Named(text("load")), Duration::from_secs(3))),
                departure: Some(Departure::Left),
            })
            .encode(),
        ),
        (
            "push-killed",
            Push::Departed {
                rank: 1,
                departure: Departure::Lost(Lost {
                    last_call: Some(LastCall {
                        call: text("all_reduce #4"),
                        before: Duration::from_millis(300),
                    }),
                    ..ProcessEnd::seen(
                        Exit::Signal {
                            signal: Signal::Kill,
                            core_dumped: false,
                        },
                        Some(Signal::Term),
                        Some(OomKill {
                            group: text("/job"),
                            killed: 1,
                            limit: Some(64 << 20),
                        }),
                        "oh",
                    )
                    .into()
                }),
            }
            .encode(),
        ),
        (
            "push-unreachable",
            Push::Departed {
                rank: 1,
                departure: Departure::lost(LossKind::Unreachable(Box::new(UnreachableHost {
                    evidence: UnreachableEvidence::Unheard {
                        unheard: Duration::from_secs(3),
                        unacknowledged: Duration::from_secs(4),
                    },
                    heard: Some(HeardOnly {
                        heard: Duration::from_secs(1),
                        unacknowledged: Duration::from_secs(4),
                    }),
                    undecided: Some(text("cut off")),
                }))),
            }
            .encode(),
        ),
        (
            "push-left",
            Push::Departed {
                rank: 1,
                departure: Departure::Left,
            }
            .encode(),
        ),
    ]
}

fn corpus() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/tests/corpus")
}

/// Feeds bytes to all parsers of socket data; parsed messages are encoded and decoded again.
fn feed(bytes: &[u8], limit: usize) -> usize {
    let mut decoder = Decoder::new(limit);
    let mut understood = 0;
    // In two pieces, as the bytes may arrive.
    let (one, two) = bytes.split_at(bytes.len() / 2);
    for piece in [one, two] {
        decoder.push(piece);
        while let Ok(Some(frame)) = decoder.next() {
            assert!(frame.payload.len() <= limit);
            understood += usize::from(retry(&frame));
        }
    }
    understood
}

/// Whether one of the parsers accepts the frame: without its kind, a frame may be valid for several parsers.
fn retry(frame: &Frame) -> bool {
    let copy = |out: Outgoing| Frame {
        id: frame.id,
        payload: out.payload.to_vec(),
    };
    let handshake_message = HandshakeMessage::decode(frame);
    if let Ok(handshake_message) = &handshake_message {
        if let HandshakeMessage::Hello { first, .. } = handshake_message
            && let Ok(hello) = Hello::decode(first)
        {
            assert_eq!(Hello::decode(&hello.encode()), Ok(hello));
        }
        let back = HandshakeMessage::decode(&copy(handshake_message.encode()));
        assert_eq!(back.as_ref(), Ok(handshake_message));
    }
    let request = Request::decode(frame);
    if let Ok(request) = &request {
        let back = Request::decode(&copy(request.encode(frame.id)));
        assert_eq!(back.as_ref(), Ok(request));
    }
    let incoming = CoordinatorMessage::decode(frame);
    if let Ok(incoming) = &incoming {
        let out = match incoming {
            CoordinatorMessage::Answer(answer) => Outgoing::new(frame.id, answer.encode()),
            CoordinatorMessage::Push(push) => push.encode(),
        };
        assert_eq!(
            CoordinatorMessage::decode(&copy(out)).as_ref(),
            Ok(incoming)
        );
    }
    handshake_message.is_ok() || request.is_ok() || incoming.is_ok()
}

#[test]
fn the_corpus_holds_each_message_as_it_goes_over_the_wire() {
    let update = std::env::var_os("NCCL_UPDATE_CORPUS").is_some();
    for (name, frame) in examples() {
        let path = corpus().join(name);
        let bytes = bytes_of(&[frame]);
        if update {
            std::fs::create_dir_all(corpus()).unwrap();
            std::fs::write(&path, &bytes).unwrap();
        }
        let kept = std::fs::read(&path).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(
            kept, bytes,
            "{name}: the protocol has changed, and needs another version"
        );
        assert_eq!(
            feed(&bytes, LARGEST_HANDSHAKE_MESSAGE),
            1,
            "{name} is understood"
        );
    }
}

#[test]
fn no_bytes_make_a_parser_panic_or_keep_more_than_its_limit() {
    let seeds: Vec<Vec<u8>> = std::fs::read_dir(corpus())
        .unwrap()
        .map(|entry| std::fs::read(entry.unwrap().path()).unwrap())
        .collect();
    assert!(seeds.len() >= examples().len());
    let mut random = fastrand::Rng::with_seed(5);
    let mut understood = 0;
    for _ in 0..60_000 {
        let mut bytes = random.choice(&seeds).unwrap().clone();
        for _ in 0..random.usize(0..4) {
            let at = random.usize(..bytes.len());
            match random.u8(..6) {
                0 => bytes[at] ^= 1 << random.u8(..8),
                1 => bytes[at] = *random.choice(&[0, 1, 0x7f, 0x80, 0xff][..]).unwrap(),
                2 => bytes.truncate(at.max(1)),
                3 => bytes.insert(at, random.u8(..)),
                4 => {
                    let other = random.choice(&seeds).unwrap();
                    bytes.extend_from_slice(other);
                }
                // The variant of one message with the fields of another.
                _ => {
                    let kind = (HEADER + random.usize(..2)).min(bytes.len() - 1);
                    bytes[kind] = random.u8(..32);
                }
            }
        }
        let limit = *random
            .choice(&[LARGEST_HANDSHAKE_MESSAGE, LARGEST_FRAME][..])
            .unwrap();
        understood += feed(&bytes, limit);
        let text = String::from_utf8_lossy(&bytes);
        let _ = tcp::HostPorts::parse(&text);
        let _ = interface::Interface::parse(&text);
    }
    // Otherwise the mutations would be too strong to reach the parsers.
    assert!(understood > 10_000, "{understood}");
}

/// Whether a listener opens the bytes of a first message, without a socket.
fn opens(bytes: &[u8], secret: &Secret, own: &Preamble) -> bool {
    let mut decoder = Decoder::new(LARGEST_HANDSHAKE_MESSAGE);
    decoder.push(bytes);
    let Ok(Some(frame)) = decoder.next() else {
        return false;
    };
    let Ok(HandshakeMessage::Hello { preamble, first }) = HandshakeMessage::decode(&frame) else {
        return false;
    };
    own.refuse(&preamble).is_ok()
        && Responder::open(Some(secret), &own.prologue(), &first).is_some()
}

#[test]
fn no_bytes_but_its_own_open_as_a_first_message() {
    let secret = Secret::new("a secret of sixteen");
    let own = |has_secret, dialled: Option<&str>| Preamble {
        has_secret,
        dialled: dialled.map(|at| Endpoint::written(at.to_owned())),
    };
    let preamble = own(true, Some("tcp:10.0.0.5:29400"));
    let payload = [7; 100];
    let (_, first) = Initiator::begin(Some(&secret), &preamble.prologue(), &payload).unwrap();
    let handshake_message = HandshakeMessage::Hello {
        preamble: preamble.clone(),
        first: first.clone(),
    };
    let bytes = bytes_of(&[handshake_message.encode()]);
    assert!(opens(&bytes, &secret, &preamble));
    for other in [
        own(true, Some("tcp:10.0.0.5:29401")),
        own(true, None),
        own(false, Some("tcp:10.0.0.5:29400")),
    ] {
        assert!(!opens(&bytes, &secret, &other));
        // The plain part was changed to the one that this listener expects.
        let changed = HandshakeMessage::Hello {
            preamble: other.clone(),
            first: first.clone(),
        };
        assert!(!opens(&bytes_of(&[changed.encode()]), &secret, &other));
    }
    // The number of the frame has no meaning in a handshake message.
    let means_nothing = 4..HEADER;
    for bit in 0..bytes.len() * 8 {
        let mut changed = bytes.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        assert!(
            means_nothing.contains(&(bit / 8)) || !opens(&changed, &secret, &preamble),
            "bit {bit}"
        );
    }
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..2000 {
        let mut changed = bytes.clone();
        for _ in 0..random.usize(1..4) {
            let at = random.usize(HEADER..changed.len());
            match random.u8(..3) {
                0 => changed[at] = random.u8(..),
                1 => changed.truncate(at.max(HEADER + 1)),
                _ => changed.insert(at, random.u8(..)),
            }
        }
        let is_same = changed.starts_with(&bytes);
        assert!(is_same || !opens(&changed, &secret, &preamble));
    }
}

#[test]
fn texts_that_people_write_make_no_parser_panic() {
    let seeds = ["10.0.0.5:29400", "[fd00::1]:1-2", "node:0", "10.0.0.0/8"];
    let mut random = fastrand::Rng::with_seed(6);
    for _ in 0..60_000 {
        let mut text: Vec<char> = random.choice(&seeds).unwrap().chars().collect();
        for _ in 0..random.usize(1..4) {
            let at = random.usize(..text.len());
            let letters: Vec<char> = ":[]-/0Fxä €\u{0}".chars().collect();
            match random.bool() {
                true => text[at] = *random.choice(&letters).unwrap(),
                false => text.insert(at, *random.choice(&letters).unwrap()),
            }
        }
        let text: String = text.into_iter().collect();
        if let Some(place) = tcp::HostPorts::parse(&text) {
            assert!(place.ports.0 <= place.ports.1, "{text}");
        }
        let _ = interface::Interface::parse(&text);
    }
}

#[test]
fn what_is_shown_and_how_long_is_within_bounds_once_it_has_come() {
    let text = || String::from("\x1b[2Jline\r\n");
    let time = Duration::MAX;
    let phase = Some((Phase::Named(text()), time));
    let subject = QueriedOperation {
        key: String::from("k"),
        name: String::from("model/tp"),
        collective_index: 41,
        kind: OperationKind::AllReduce,
        sequence: 42,
    };
    let state = |held| ProcessState {
        letter: 'S',
        held: Some(held),
    };
    let round = Round {
        topic: String::from("t"),
        number: 1,
        members: Some([].into()),
    };
    let requests = [
        Request::Exchange {
            round,
            waited: time,
            timeout: time,
            part: Vec::new(),
        },
        Request::Cancel {
            reason: Reason::Text(text()),
        },
        Request::Get {
            key: String::from("k"),
            timeout: time,
        },
        Request::AwaitKeys {
            keys: Vec::new(),
            timeout: time,
        },
        Request::Phase { name: text() },
        Request::Send {
            channel: String::from("c"),
            to: None,
            timeout: time,
            bytes: Vec::new(),
        },
        Request::QueryStragglers(StragglerQueryRequest {
            subject: subject.clone(),
            members: Vec::new(),
            since: time,
            is_sample: false,
        }),
        Request::EntryReport(EntryReport {
            key: String::from("k"),
            collective_index: 41,
            entered: Some(time),
            last: text(),
        }),
        Request::LastCall { call: text() },
        Request::ProcessProbed {
            rank: 1,
            state: state(Held::Throttled {
                cgroup: text(),
                time,
            }),
        },
    ];
    let answers = [
        RequestError::TimedOut {
            missing: vec![Missing {
                rank: 1,
                phase: phase.clone(),
            }],
            waited: time,
            notes: vec![text()],
        },
        RequestError::NoKey { waited: time },
        RequestError::NoKeys {
            missing: vec![text()],
            waited: time,
        },
        RequestError::NotANumber { found: text() },
    ];
    let late = LateRank {
        rank: 0,
        communicator_rank: 1,
        host: text(),
        pid: 77,
        behind: time,
        has_entered: false,
        answers: true,
        phase: text(),
        last: text(),
    };
    let pushes = [
        Push::Stragglers(Arc::new(StragglerReport {
            subject,
            ranks: 2,
            late: vec![late],
            more: 3,
            reporter: 1,
        })),
        Push::Skewed {
            key: String::from("k"),
            skew: time,
            last: 3,
        },
        Push::Suspected {
            rank: 2,
            silence: Some(time),
            state: Some(state(Held::Frozen { cgroup: text() })),
        },
        Push::Rank(RankRecord {
            rank: 1,
            slot: None,
            host: text(),
            pid: 77,
            kernel: String::new(),
            at: String::new(),
            phase,
            departure: None,
        }),
    ];
    let refused = HandshakeMessage::Refused {
        why: text(),
        retry: Retry::Never,
    };
    let frame = |out: Outgoing| Frame {
        id: 0,
        payload: out.payload.to_vec(),
    };
    let answers = answers.map(|why| answer(&Answer::Failed(Arc::new(why))));
    let incoming = answers.into_iter().chain(pushes.map(|push| push.encode()));
    let incoming =
        incoming.map(|out| format!("{:?}", CoordinatorMessage::decode(&frame(out)).unwrap()));
    let requests = requests.map(|request| frame(request.encode(0)));
    let requests = requests.map(|frame| format!("{:?}", Request::decode(&frame).unwrap()));
    assert!(requests[0].contains("members: None"), "{}", requests[0]);
    let handshake_message = HandshakeMessage::decode(&frame(refused.encode())).unwrap();
    for heard in incoming
        .chain(requests)
        .chain([format!("{handshake_message:?}")])
    {
        for bad in ["\\u{1b}", "\\r", "18446744073709551615"] {
            assert!(!heard.contains(bad), "{heard}");
        }
    }
    let state = ProcessState {
        letter: ' ',
        held: None,
    };
    let saw = Request::ProcessProbed { rank: 1, state };
    assert!(Request::decode(&frame(saw.encode(0))).is_err());
}
