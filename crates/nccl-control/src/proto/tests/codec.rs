//! Encoding frames and decoding them again.

use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use nccl_base::wire::{decode, encode};

use super::super::*;
use crate::departure::{
    Departure, Exit, Failure, LastCall, LossKind, Lost, ProcessEnd, UnreachableEvidence,
};

fn text(random: &mut Rng) -> String {
    let characters = ['a', 'Z', '0', ' ', '-', '.', ':', '/', 'é', '漢', '🦀'];
    let length = random.usize(0..12);
    (0..length)
        .map(|_| characters[random.usize(0..characters.len())])
        .collect()
}

fn bytes(random: &mut Rng) -> Vec<u8> {
    let length = random.usize(0..40);
    (0..length).map(|_| random.u8(..)).collect()
}

fn many<T>(random: &mut Rng, mut one: impl FnMut(&mut Rng) -> T) -> Vec<T> {
    let length = random.usize(0..4);
    (0..length).map(|_| one(random)).collect()
}

/// Returns small and large numbers.
fn number(random: &mut Rng) -> u64 {
    random.u64(..) >> random.u32(0..64)
}

fn id(random: &mut Rng) -> MemberId {
    MemberId {
        slot: random.u32(..) >> random.u32(0..32),
        incarnation: number(random),
    }
}

fn generation(random: &mut Rng) -> Generation {
    Generation {
        number: number(random),
        proposer: id(random),
    }
}

fn term(random: &mut Rng) -> Term {
    Term {
        round: random.u32(0..9),
        coordinator: id(random),
    }
}

fn process_info(random: &mut Rng) -> ProcessInfo {
    ProcessInfo {
        id: id(random),
        host: text(random),
        pid: random.u32(..),
        kernel: random.u64(..),
        at: text(random),
        start_time: number(random),
        launcher_rank: random.bool().then(|| random.u32(..64)),
        observed: random.bool(),
        tolerates_unreachable: random.bool(),
    }
}

fn membership(random: &mut Rng) -> SharedMembership {
    let (members, witnesses) = (many(random, process_info), many(random, process_info));
    let first = Membership::new(generation(random), members, witnesses.clone());
    let kept = first.members.iter().filter(|_| random.bool()).cloned();
    let members: Vec<_> = kept.collect();
    let members = members.into_iter().chain(many(random, process_info));
    Arc::new(first.successor(generation(random), members.collect(), witnesses))
}

fn duration(random: &mut Rng) -> Duration {
    Duration::from_millis(random.u64(0..1_000_000))
}

fn end(random: &mut Rng) -> ProcessEnd {
    match random.bool() {
        true => ProcessEnd::in_words("killed by signal 9", &text(random)),
        false => ProcessEnd::seen(Exit::Code(random.i32(0..256)), None, None, &text(random)),
    }
}

fn departure(random: &mut Rng) -> Departure {
    let how = match random.u8(0..9) {
        0 => return Departure::Left,
        1 => return Departure::Failed(Failure::Error(text(random))),
        2 => return Departure::Failed(Failure::Exits(random.i32(..))),
        3 => LossKind::Ended(Box::new(end(random))),
        4 => LossKind::Exited {
            pid: number(random),
        },
        5 => LossKind::LeftBehind {
            after: duration(random),
        },
        6 => LossKind::Reported(text(random)),
        7 => {
            let evidence = match random.bool() {
                true => UnreachableEvidence::Error(text(random)),
                false => UnreachableEvidence::Unheard {
                    unheard: duration(random),
                    unacknowledged: duration(random),
                },
            };
            return Departure::Lost(Lost::from(evidence));
        }
        _ => LossKind::Superseded,
    };
    let last_call = random.bool().then(|| LastCall {
        call: text(random),
        before: duration(random),
    });
    Departure::Lost(Lost { how, last_call })
}

fn broadcast_of(random: &mut Rng) -> Arc<Broadcast> {
    Arc::new(Broadcast {
        from: id(random),
        number: number(random),
        topic: text(random),
        bytes: bytes(random),
    })
}

fn decision_of(random: &mut Rng) -> OperatorDecision {
    OperatorDecision {
        generation: number(random),
        members: many(random, id),
    }
}

fn entry(random: &mut Rng) -> Arc<Entry> {
    Arc::new(match random.u8(0..3) {
        0 => Entry::Departed {
            member: id(random),
            departure: departure(random),
            proven: random.bool(),
        },
        1 => Entry::Broadcast(broadcast_of(random)),
        _ => Entry::OperatorDecision(Arc::new(decision_of(random))),
    })
}

fn ended(random: &mut Rng) -> Ended {
    let proof = match random.u8(0..3) {
        0 => Proof::Launcher(Box::new(end(random))),
        1 => Proof::Kernel,
        _ => Proof::Leave(departure(random)),
    };
    Ended {
        member: id(random),
        proof,
        reduces_electorate: random.bool(),
    }
}

fn exclusion(random: &mut Rng) -> Exclusion {
    match random.u8(0..3) {
        0 => Exclusion::NoMajority {
            reached: random.u32(..),
            of: random.u32(..),
            unreached: many(random, id),
        },
        1 => Exclusion::LeftBehind(generation(random)),
        _ => Exclusion::Superseded(id(random)),
    }
}

fn report(random: &mut Rng) -> VoteReport {
    VoteReport {
        synced: term(random),
        promised: term(random),
        log: LogPart {
            first: number(random),
            entries: many(random, entry),
        },
        unlogged: many(random, broadcast_of),
        ended: many(random, ended),
        accepted: random.bool().then(|| (term(random), membership(random))),
        abstains: random.bool(),
        leaves: random.bool().then(|| departure(random)),
    }
}

/// The number of message kinds that [`message`] makes.
const KINDS: u8 = 31;

fn message(random: &mut Rng, kind: u8) -> Message {
    let shared = |random: &mut Rng| Arc::from(bytes(random));
    match kind {
        0 => Message::Join {
            process: process_info(random),
            role: [
                JoinRole::Rank,
                JoinRole::Witness,
                JoinRole::Joiner,
                JoinRole::Absent,
            ][random.usize(0..4)],
        },
        1 => Message::FormationAborted(shared(random)),
        2 => Message::Redirect(process_info(random)),
        3 => Message::Activate {
            membership: membership(random),
            accepted: random.bool(),
        },
        4 => Message::NewerGeneration(membership(random)),
        5 => Message::UnknownGeneration,
        6 => Message::Broadcast(broadcast_of(random)),
        7 => Message::Direct {
            from: id(random),
            to: id(random),
            bytes: bytes(random),
        },
        8 => Message::Request(shared(random)),
        9 => Message::Reply(shared(random)),
        10 => Message::ReportEnd(ended(random)),
        11 => Message::Reconfigure(ReconfigureRequest {
            number: number(random),
            timeout: number(random),
            leaves_behind: random.bool(),
        }),
        12 => Message::CancelReconfigure(number(random)),
        13 => Message::ReconfigureFailed {
            reconfigure_request: number(random),
            missing: many(random, id),
        },
        14 => Message::Abstain,
        15 => Message::LeaveBehind,
        16 => Message::Released,
        17 => Message::Leave(departure(random)),
        18 => Message::Append {
            term: term(random),
            at: number(random),
            entry: entry(random),
        },
        19 => Message::CutOff {
            term: term(random),
            why: exclusion(random),
        },
        20 => Message::RequestVote(VoteRequest {
            term: term(random),
            ended: many(random, ended),
            unresponsive: random.bool(),
            already_coordinates: random.bool(),
        }),
        21 => Message::Vote {
            term: term(random),
            report: Box::new(report(random)),
        },
        22 => Message::Follows {
            term: term(random),
            already_coordinates: random.bool(),
        },
        23 => Message::SyncLog {
            term: term(random),
            start: number(random),
            entries: many(random, entry),
        },
        24 => Message::Reject(exclusion(random)),
        25 => Message::Propose {
            term: term(random),
            membership: membership(random),
        },
        26 => Message::Accepted {
            term: term(random),
            generation: generation(random),
        },
        27 => Message::Coordinating {
            term: term(random),
            membership: membership(random),
        },
        28 => Message::Observe(process_info(random)),
        29 => Message::OperatorDecision(decision_of(random)),
        30 => Message::Forming(number(random)),
        _ => unreachable!("no such kind"),
    }
}

fn frame(random: &mut Rng) -> Frame {
    match random.u8(0..40) {
        0 => Frame::Hello {
            from: id(random),
            to: id(random),
            link_id: number(random),
            received: number(random),
        },
        1 => Frame::Welcome {
            from: id(random),
            superseded_up_to: number(random),
            received: number(random),
        },
        2 => Frame::Unknown,
        3 => Frame::Acknowledge(number(random)),
        4 => Frame::Heartbeat(Heartbeat {
            generation: number(random),
            term: term(random),
            number: number(random),
            answered: number(random),
            confirmed: number(random),
        }),
        5 => Frame::HeartbeatReply(HeartbeatReply {
            generation: number(random),
            term: term(random),
            number: number(random),
            progress: random.bool(),
        }),
        _ => {
            let kind = random.u8(0..KINDS);
            Frame::Data {
                sequence: number(random),
                acknowledged: number(random),
                generation: number(random),
                message: message(random, kind),
            }
        }
    }
}

#[test]
fn frames_come_back_as_they_were() {
    let mut random = Rng::with_seed(1);
    for _ in 0..30_000 {
        let frame = frame(&mut random);
        let bytes = encode(&frame);
        assert_eq!(decode::<Frame>(&bytes).as_ref(), Ok(&frame));
    }
}

#[test]
fn no_bytes_make_the_decoder_panic() {
    let mut random = Rng::with_seed(2);
    let mut understood = 0;
    for round in 0..60_000 {
        let mut bytes = match round % 4 {
            0 => bytes(&mut random),
            _ => encode(&frame(&mut random)),
        };
        for _ in 0..random.usize(0..4) {
            let at = random.usize(..bytes.len().max(1));
            match random.u8(..5) {
                _ if bytes.is_empty() => {}
                0 => bytes[at] ^= 1 << random.u8(..8),
                1 => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][random.usize(..5)],
                2 => bytes.truncate(at),
                3 => bytes.insert(at, random.u8(..)),
                _ => {
                    bytes.splice(at..at, [0xff, 0xff, 0xff, 0xff, 0x0f]);
                }
            }
        }
        // Decoding allocates only for received bytes: `nccl_base::wire` guarantees that for lengths.
        if let Ok(frame) = decode::<Frame>(&bytes) {
            understood += 1;
            assert!(encode(&frame).len() <= 4 * bytes.len() + 64);
        }
    }
    // Otherwise the mutations would be too strong to reach the decoders.
    assert!(understood > 10_000, "{understood}");
}

#[test]
fn a_length_that_promises_more_than_has_come_takes_no_memory() {
    let promise = [&[0xff; 9][..], &[1]].concat();
    let member = |random: &mut Rng| encode(&id(random));
    let mut random = Rng::with_seed(3);
    let head = encode(&Frame::Data {
        sequence: 1,
        acknowledged: 1,
        generation: 1,
        message: Message::NewerGeneration(Arc::new(Membership::new(
            generation(&mut random),
            Vec::new(),
            Vec::new(),
        ))),
    });
    // The lengths of its two empty lists are its last bytes.
    for cut in [1, 2] {
        let mut bytes = head[..head.len() - cut].to_vec();
        bytes.extend_from_slice(&promise);
        bytes.extend_from_slice(&member(&mut random));
        assert!(decode::<Frame>(&bytes).is_err());
    }
    let words = [
        Message::Request(Arc::from(&[][..])),
        Message::Reply(Arc::from(&[][..])),
    ];
    for message in words {
        let mut bytes = encode(&message);
        bytes.pop();
        bytes.extend_from_slice(&promise);
        assert!(decode::<Message>(&bytes).is_err());
    }
}

#[test]
fn the_bytes_of_a_question_go_in_one_piece() {
    let bytes: Arc<[u8]> = (0..=255).cycle().take(64 << 10).collect();
    let ask = Message::Request(Arc::clone(&bytes));
    assert_eq!(encode(&ask).len(), bytes.len() + 4);
}
