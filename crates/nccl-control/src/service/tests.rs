//! The service in virtual time.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::*;
use crate::coordinator_message::{Answer, Push};
use crate::departure::{Departure, Failure, LossKind, Reason};
use crate::operation::OperationKind;
use crate::phase::Phase;
use crate::request::{ChannelPosition, ExpectedValue, FollowedBefore, NO_ANSWER, Request};
use crate::round::{END_TOPIC, Missing, RequestError, Round};
use crate::straggler::{EntryReport, QueriedOperation, StragglerQueryRequest, StragglerReport};

mod takeover;

/// A service, and its time.
struct World {
    service: Service,
    begun: Instant,
    now: Instant,
}

impl World {
    fn new(size: usize) -> Self {
        Self::with(size, 0..size)
    }

    /// A service of `size` ranks, of which some have joined.
    fn with(size: usize, come: impl IntoIterator<Item = usize>) -> Self {
        let (mut service, begun) = (Service::new(size), Instant::now());
        for rank in come {
            service.arrive(begun, rank, "node", 70 + rank as u64);
        }
        Self {
            service,
            begun,
            now: begun,
        }
    }

    fn ask(&mut self, rank: usize, id: u64, request: Request) -> Vec<Output> {
        self.service.handle(self.now, rank, id, request);
        self.outputs()
    }

    /// Advances to `millis` milliseconds after the beginning.
    fn at(&mut self, millis: u64) -> Vec<Output> {
        self.now = self.begun + Duration::from_millis(millis);
        self.service.handle_timeout(self.now);
        self.outputs()
    }

    fn leave(&mut self, rank: usize, departure: Departure, stays: bool) -> Vec<Output> {
        self.service
            .record_departure(self.now, rank, departure, stays);
        self.outputs()
    }

    fn outputs(&mut self) -> Vec<Output> {
        std::iter::from_fn(|| self.service.poll()).collect()
    }
}

fn collect(topic: &str, seconds: u64, members: Option<&[usize]>) -> Request {
    Request::Exchange {
        round: Round {
            topic: topic.to_owned(),
            number: 0,
            members: members.map(Arc::from),
        },
        waited: Duration::ZERO,
        timeout: Duration::from_secs(seconds),
        part: topic.as_bytes()[..1].to_vec(),
    }
}

fn get(key: &str, seconds: u64) -> Request {
    Request::Get {
        key: key.to_owned(),
        timeout: Duration::from_secs(seconds),
    }
}

fn set(key: &str, value: &[u8]) -> Request {
    Request::Set {
        key: key.to_owned(),
        value: value.to_vec(),
    }
}

fn send(to: Option<usize>, seconds: u64, byte: u8) -> Request {
    Request::Send {
        channel: String::from("steps"),
        to,
        timeout: Duration::from_secs(seconds),
        bytes: vec![byte],
    }
}

fn consume(taken: u64) -> Request {
    Request::Consumed {
        channel: String::from("steps"),
        taken,
    }
}

/// The message that follows what is sent again.
fn followed(rank: usize) -> Output {
    Output::Push {
        to: Recipients::Rank(rank),
        push: Push::Followed(1),
    }
}

/// With the last received and the last taken message of each channel.
fn follow(channels: &[(&str, u64, u64)]) -> Request {
    let position = |&(channel, received, taken): &(&str, u64, u64)| ChannelPosition {
        channel: channel.to_owned(),
        received,
        taken,
    };
    Request::Follow {
        outcomes: Vec::new(),
        before: FollowedBefore::Same {
            number: 1,
            received: channels.iter().map(position).collect(),
        },
    }
}

fn phase(name: &str) -> Request {
    Request::Phase {
        name: name.to_owned(),
    }
}

fn query(key: &str, collective_index: u64, members: &[usize], is_sample: bool) -> Request {
    Request::QueryStragglers(StragglerQueryRequest {
        subject: QueriedOperation {
            key: key.to_owned(),
            name: String::from("tp"),
            collective_index,
            kind: OperationKind::AllReduce,
            sequence: collective_index,
        },
        members: members.to_vec(),
        since: Duration::from_secs(2),
        is_sample,
    })
}

fn attend(key: &str, collective_index: u64, entered: Option<u64>) -> Request {
    Request::EntryReport(EntryReport {
        key: key.to_owned(),
        collective_index,
        entered: entered.map(Duration::from_millis),
        last: String::from("none"),
    })
}

fn failed() -> Departure {
    Departure::Failed(Failure::Error(String::from("out of paper")))
}

fn answer(to: &[(usize, u64)], answer: Answer) -> Output {
    Output::Answer {
        to: to.to_vec(),
        answer,
    }
}

fn error_answer(to: &[(usize, u64)], why: RequestError) -> Output {
    answer(to, Answer::Failed(Arc::new(why)))
}

fn parts(to: &[(usize, u64)], parts: &[&[u8]]) -> Output {
    let parts = parts.iter().map(|part| part.to_vec()).collect();
    answer(to, Answer::Parts(Arc::new(parts)))
}

fn value(to: &[(usize, u64)], bytes: &[u8]) -> Output {
    answer(to, Answer::Value(bytes.into()))
}

fn message(to: usize, number: u64, from: usize, byte: u8) -> Output {
    message_to(Recipients::Ranks(vec![to]), number, from, byte)
}

fn message_to(to: Recipients, number: u64, from: usize, byte: u8) -> Output {
    Output::Push {
        to,
        push: Push::Message {
            channel: String::from("steps"),
            from,
            number,
            bytes: [byte].into(),
        },
    }
}

fn missing(rank: usize, phase: Option<(&str, u64)>) -> Missing {
    let phase =
        phase.map(|(name, millis)| (Phase::Named(name.to_owned()), Duration::from_millis(millis)));
    Missing { rank, phase }
}

#[test]
fn a_round_ends_once_for_all_by_the_first_patience_with_who_was_turned_away() {
    let mut world = World::with(4, [0, 1, 2]);
    for n in 0..10 {
        world.service.note_for_errors(format!("stranger {n}"));
    }
    assert_eq!(world.at(1000), []);
    assert_eq!(world.ask(2, 0, phase("load")), []);
    assert_eq!(world.ask(0, 5, collect("x", 60, None)), []);
    assert_eq!(world.at(2000), []);
    assert_eq!(world.ask(1, 6, collect("x", 3, None)), []);
    let note_deadline = world.begun + Duration::from_secs(5);
    assert_eq!(world.service.next_timeout(), Some(note_deadline));
    assert_eq!(world.at(4999), []);
    let ended = world.at(5000);
    let mut notes: Vec<_> = (2..10).map(|n| format!("stranger {n}")).collect();
    notes.push(String::from("and 2 more before these"));
    let why = RequestError::TimedOut {
        missing: vec![missing(2, Some(("load", 4000))), missing(3, None)],
        waited: Duration::from_secs(4),
        notes,
    };
    assert_eq!(ended, [error_answer(&[(0, 5), (1, 6)], why.clone())]);
    assert_eq!(world.service.next_timeout(), None);
    // A later rank gets the same answer; with the last one, the round is forgotten.
    let later = world.ask(2, 7, collect("x", 60, None));
    assert_eq!(later, [error_answer(&[(2, 7)], why)]);
    assert_eq!(world.service.rounds().count(), 1);
    world.leave(3, Departure::lost(LossKind::Closed), false);
    assert_eq!(world.service.rounds().count(), 0);
}

#[test]
fn a_round_ends_with_all_parts_with_a_rank_that_leaves_or_with_one_that_gives_up() {
    let mut world = World::new(3);
    assert_eq!(world.ask(2, 1, collect("all", 60, Some(&[2, 0]))), []);
    let all = world.ask(0, 1, collect("all", 60, Some(&[2, 0])));
    assert_eq!(all, [parts(&[(2, 1), (0, 1)], &[b"a", b"a"])]);
    assert_eq!(world.ask(2, 2, collect("given up", 60, None)), []);
    assert_eq!(world.ask(1, 2, collect("given up", 60, None)), []);
    let reason = Reason::Aborted;
    let given_up = world.ask(
        1,
        2,
        Request::Cancel {
            reason: reason.clone(),
        },
    );
    let why = RequestError::GivenUp { rank: 1, reason };
    assert_eq!(given_up, [error_answer(&[(2, 2), (1, 2)], why)]);
    // Ranks learn how their rounds ended, then that their channels are over.
    assert_eq!(world.ask(2, 3, collect("left", 60, None)), []);
    assert_eq!(world.ask(2, 4, get("key", 60)), []);
    let gone = |rank| RequestError::Departed {
        rank,
        departure: failed(),
    };
    let over = Output::Push {
        to: Recipients::All,
        push: Push::ChannelsClosed {
            rank: 1,
            departure: failed(),
        },
    };
    assert_eq!(
        world.leave(1, failed(), false),
        [
            error_answer(&[(2, 3)], gone(1)),
            error_answer(&[(2, 4)], gone(1)),
            over
        ]
    );
    let never = world.ask(0, 5, collect("never", 60, None));
    assert_eq!(never, [error_answer(&[(0, 5)], gone(1))]);
    assert!(
        !world
            .service
            .record_departure(world.now, 1, Departure::Left, false)
    );
}

/// The ranks could be on the side of a network partition that does not continue.
#[test]
fn what_some_ranks_agree_on_waits_for_a_majority_of_all() {
    let mut world = World::new(3);
    world.service.set_majority(world.now, false);
    assert_eq!(world.ask(0, 1, collect("late", 2, Some(&[0]))), []);
    assert_eq!(world.ask(1, 2, collect("token", 60, Some(&[1, 2]))), []);
    assert_eq!(world.ask(2, 2, collect("token", 60, Some(&[1, 2]))), []);
    assert_eq!(world.ask(1, 3, collect("open", 60, Some(&[1, 0]))), []);
    // Rounds of all ranks need no majority, because other ranks cannot continue without these; rounds of ends cannot
    // wait.
    let ends = format!("{END_TOPIC}x");
    let end = world.ask(2, 4, collect(&ends, 60, Some(&[2])));
    assert_eq!(end, [parts(&[(2, 4)], &[&ends.as_bytes()[..1]])]);
    for rank in 0..2 {
        assert_eq!(world.ask(rank, 5, collect("all", 60, None)), []);
    }
    let all = world.ask(2, 5, collect("all", 60, None));
    assert_eq!(all, [parts(&[(0, 5), (1, 5), (2, 5)], &[b"a", b"a", b"a"])]);
    let waited = Duration::from_secs(2);
    let why = RequestError::NoMajority { waited };
    assert_eq!(world.at(2000), [error_answer(&[(0, 1)], why)]);
    world.service.set_majority(world.now, true);
    let token = parts(&[(1, 2), (2, 2)], &[b"t", b"t"]);
    assert_eq!(world.outputs(), [token]);
    let open = world.ask(0, 6, collect("open", 60, Some(&[1, 0])));
    assert_eq!(open, [parts(&[(1, 3), (0, 6)], &[b"o", b"o"])]);
}

#[test]
fn a_part_that_cannot_be_of_the_round_is_refused_at_once() {
    let mut world = World::new(3);
    assert_eq!(world.ask(0, 1, collect("x", 60, Some(&[0, 1]))), []);
    for (rank, members, why) in [
        (0, &[0, 1][..], RequestError::Twice),
        (2, &[0, 1], RequestError::OtherMembers),
        (1, &[1, 0], RequestError::OtherMembers),
        (1, &[1, 3], RequestError::OtherMembers),
    ] {
        let refused = world.ask(rank, 2, collect("x", 60, Some(members)));
        assert_eq!(refused, [error_answer(&[(rank, 2)], why)]);
    }
    let bytes = LONGEST_NAME + 1;
    let refused = world.ask(0, 3, collect(&"x".repeat(bytes), 60, None));
    assert_eq!(
        refused,
        [error_answer(&[(0, 3)], RequestError::TooLarge { bytes })]
    );
    let other = world.ask(2, 4, collect("x", 60, Some(&[2])));
    assert_eq!(other, [parts(&[(2, 4)], &[b"x"])]);
    // A coordinator that leaves repeats its requests when it coordinates in a later term.
    world.leave(0, Departure::Left, false);
    let (rank, departure) = (0, Departure::Left);
    let why = RequestError::Departed { rank, departure };
    let refused = world.ask(0, 1, collect("x", 60, Some(&[0, 1])));
    assert_eq!(refused, [error_answer(&[(0, 1)], why)]);
}

#[test]
fn a_round_of_ends_does_without_ranks_that_are_gone_and_waits_for_one_that_stays() {
    let mut world = World::new(4);
    assert_eq!(world.ask(0, 1, collect("end/x", 60, None)), []);
    world.leave(1, Departure::Left, true);
    world.leave(2, Departure::lost(LossKind::Closed), false);
    assert_eq!(world.ask(3, 1, collect("end/x", 60, None)), []);
    let other = collect("other", 60, None);
    assert!(matches!(
        &world.ask(3, 2, other)[..],
        [Output::Answer { .. }]
    ));
    // The rank takes part in rounds of ends, until it leaves a second time.
    assert_eq!(
        world.ask(1, 1, collect("end/x", 60, None)),
        [parts(&[(0, 1), (3, 1), (1, 1)], &[b"e", b"e", b"", b"e"])]
    );
    // A round that ended without the rank gives it the outcome when the rank enters.
    assert_eq!(world.ask(0, 2, collect("end/late", 1, Some(&[0, 1]))), []);
    let timed_out = world.at(1000);
    let later = world.ask(1, 2, collect("end/late", 60, Some(&[0, 1])));
    for (outputs, rank) in [(timed_out, 0), (later, 1)] {
        let [
            Output::Answer {
                to,
                answer: Answer::Failed(why),
            },
        ] = &outputs[..]
        else {
            panic!("one answer: {outputs:?}");
        };
        assert_eq!(to[..], [(rank, 2)]);
        assert!(
            matches!(&**why, RequestError::TimedOut { missing, .. } if missing.len() == 1),
            "{why:?}"
        );
    }
    assert_eq!(world.ask(0, 3, collect("end/y", 60, None)), []);
    assert_eq!(world.ask(3, 3, collect("end/y", 60, None)), []);
    assert_eq!(
        world.leave(1, Departure::Left, false),
        [parts(&[(0, 3), (3, 3)], &[b"e", b"", b"", b"e"])]
    );
}

#[test]
fn a_get_is_answered_by_a_set_and_otherwise_in_vain() {
    let mut world = World::new(3);
    assert_eq!(world.ask(0, 1, get("key", 60)), []);
    assert_eq!(world.ask(1, 1, get("key", 60)), []);
    assert_eq!(world.ask(1, 2, get("other", 2)), []);
    assert_eq!(
        world.ask(2, 1, set("key", b"value")),
        [
            answer(&[(2, 1)], Answer::Done),
            value(&[(0, 1), (1, 1)], b"value")
        ]
    );
    assert_eq!(world.ask(2, 2, get("key", 0)), [value(&[(2, 2)], b"value")]);
    assert_eq!(world.at(1999), []);
    let waited = Duration::from_secs(2);
    let in_vain = error_answer(&[(1, 2)], RequestError::NoKey { waited });
    assert_eq!(world.at(2000), [in_vain]);
    let bytes = "key".len() + (64 << 20);
    let too_large = error_answer(&[(2, 3)], RequestError::TooLarge { bytes });
    assert_eq!(world.ask(2, 3, set("key", &vec![0; 64 << 20])), [too_large]);
}

fn await_keys(keys: &[&str], seconds: u64) -> Request {
    Request::AwaitKeys {
        keys: keys.iter().map(|key| (*key).to_owned()).collect(),
        timeout: Duration::from_secs(seconds),
    }
}

fn add(key: &str, amount: i64) -> Request {
    Request::Add {
        key: key.to_owned(),
        amount,
    }
}

fn compare_set(key: &str, expected: Option<&[u8]>, value: &[u8]) -> Request {
    Request::CompareSet {
        key: key.to_owned(),
        expected: expected.map(|bytes| ExpectedValue(bytes.to_vec())),
        value: value.to_vec(),
    }
}

fn delete(key: &str) -> Request {
    Request::Delete {
        key: key.to_owned(),
    }
}

#[test]
fn a_counter_begins_at_0_and_is_a_value_as_others_are() {
    let mut world = World::new(2);
    let sum = |id, sum| answer(&[(0, id)], Answer::Sum(sum));
    assert_eq!(world.ask(1, 1, get("n", 60)), []);
    assert_eq!(
        world.ask(0, 1, add("n", 5)),
        [sum(1, 5), value(&[(1, 1)], b"5")]
    );
    assert_eq!(world.ask(0, 2, add("n", -7)), [sum(2, -2)]);
    assert_eq!(world.ask(1, 2, get("n", 60)), [value(&[(1, 2)], b"-2")]);
    world.ask(1, 3, set("n", i64::MAX.to_string().as_bytes()));
    let overflows = RequestError::SumOverflows {
        counter: i64::MAX,
        amount: 1,
    };
    assert_eq!(
        world.ask(0, 3, add("n", 1)),
        [error_answer(&[(0, 3)], overflows)]
    );
    for (text, shown) in [("", ""), ("1.5", "1.5"), (&"x".repeat(99), &"x".repeat(64))] {
        world.ask(1, 4, set("n", text.as_bytes()));
        let found = shown.to_owned();
        let error = error_answer(&[(0, 4)], RequestError::NotANumber { found });
        assert_eq!(world.ask(0, 4, add("n", 1)), [error]);
        let kept = value(&[(0, 5)], text.as_bytes());
        assert_eq!(world.ask(0, 5, get("n", 0)), [kept]);
    }
    let bytes = LONGEST_NAME + 2;
    let refused = world.ask(0, 6, add(&"n".repeat(LONGEST_NAME + 1), 1));
    let bytes = bytes + 99 + 1;
    assert_eq!(
        refused,
        [error_answer(&[(0, 6)], RequestError::TooLarge { bytes })]
    );
}

#[test]
fn a_value_is_replaced_only_where_it_is_the_expected_one() {
    let mut world = World::new(2);
    let to = [(0, 1)];
    let done = || answer(&to, Answer::Done);
    let absent = || answer(&to, Answer::Absent);
    let mut ask = |request| world.ask(0, 1, request);
    assert_eq!(ask(compare_set("k", Some(b""), b"1")), [absent()]);
    assert_eq!(ask(compare_set("k", None, b"1")), [done()]);
    assert_eq!(ask(compare_set("k", None, b"2")), [value(&to, b"1")]);
    assert_eq!(ask(compare_set("k", Some(b"3"), b"2")), [value(&to, b"1")]);
    assert_eq!(ask(compare_set("k", Some(b"1"), b"2")), [done()]);
    let try_get = || Request::TryGet {
        key: String::from("k"),
    };
    assert_eq!(ask(try_get()), [value(&to, b"2")]);
    assert_eq!(ask(delete("k")), [done()]);
    assert_eq!(ask(delete("k")), [absent()]);
    assert_eq!(ask(try_get()), [absent()]);
    // The space of a deleted value is free again.
    for _ in 0..3 {
        assert_eq!(ask(set("k", &vec![0; 40 << 20])), [done()]);
        assert_eq!(ask(delete("k")), [done()]);
    }
    // A get is answered by a compare-and-set, too.
    assert_eq!(world.ask(1, 1, get("k", 60)), []);
    assert_eq!(
        world.ask(0, 1, compare_set("k", None, b"1")),
        [done(), value(&[(1, 1)], b"1")]
    );
}

#[test]
fn several_keys_are_awaited_until_all_are_set_at_one_time() {
    let mut world = World::new(2);
    let done = |rank, id| answer(&[(rank, id)], Answer::Done);
    assert_eq!(world.ask(0, 1, await_keys(&["a", "b", "a"], 60)), []);
    assert_eq!(world.ask(0, 2, await_keys(&["b", "c", "d"], 2)), []);
    assert_eq!(world.ask(1, 1, set("a", b"")), [done(1, 1)]);
    assert_eq!(world.ask(1, 2, delete("a")), [done(1, 2)]);
    assert_eq!(world.ask(1, 3, set("b", b"")), [done(1, 3)]);
    assert_eq!(world.ask(1, 4, set("b", b"again")), [done(1, 4)]);
    let lines = world.service.reports(world.now + WAIT_LOG_INTERVAL);
    assert_eq!(lines.len(), 2);
    assert!(
        lines[1].contains("waiting for \"c\", \"d\" for"),
        "{lines:?}"
    );
    let waited = Duration::from_secs(2);
    let missing = vec![String::from("c"), String::from("d")];
    let in_vain = error_answer(&[(0, 2)], RequestError::NoKeys { missing, waited });
    assert_eq!(world.at(2000), [in_vain]);
    assert_eq!(
        world.ask(1, 5, add("a", 1)),
        [answer(&[(1, 5)], Answer::Sum(1)), done(0, 1)]
    );
    assert_eq!(world.ask(0, 3, await_keys(&["a", "b"], 0)), [done(0, 3)]);
    // A rank that dies may be the one that would have set the key.
    assert_eq!(world.ask(0, 4, await_keys(&["a", "e"], 60)), []);
    let why = RequestError::Departed {
        rank: 1,
        departure: failed(),
    };
    let ended = world.leave(1, failed(), false);
    assert_eq!(ended[0], error_answer(&[(0, 4)], why));
}

#[test]
fn a_channel_holds_a_sender_back_and_lets_it_go_on_in_order() {
    let mut world = World::new(3);
    let done = |rank, id| answer(&[(rank, id)], Answer::Done);
    for n in 0..CAPACITY as u8 {
        let sent = world.ask(0, n.into(), send(None, 60, n));
        let to = Recipients::Ranks(vec![1, 2]);
        let message = message_to(to, u64::from(n) + 1, 0, n);
        assert_eq!(sent, [message, done(0, n.into())]);
    }
    const ALL: u64 = CAPACITY as u64;
    world.ask(2, 0, consume(ALL));
    // A report that arrives late, or twice, says nothing new.
    world.ask(2, 0, consume(ALL - 1));
    assert_eq!(world.ask(0, 100, send(Some(1), 2, 100)), []);
    // Rank 2 has room, and the message of rank 0 comes first.
    assert_eq!(world.ask(1, 101, send(Some(2), 60, 101)), []);
    assert_eq!(world.ask(2, 102, send(Some(1), 60, 102)), []);
    assert_eq!(world.ask(0, 103, send(None, 60, 103)), []);
    assert_eq!(world.at(1000), []);
    assert_eq!(world.ask(1, 0, phase("think")), []);
    let why = RequestError::TimedOut {
        missing: vec![missing(1, Some(("think", 1000)))],
        waited: Duration::from_secs(2),
        notes: Vec::new(),
    };
    assert_eq!(
        world.at(2000),
        [
            error_answer(&[(0, 100)], why),
            message(2, ALL + 1, 1, 101),
            done(1, 101)
        ]
    );
    let released = world.ask(1, 0, consume(1));
    assert_eq!(released, [message(1, ALL + 1, 2, 102), done(2, 102)]);
    let [last, Output::Push { .. }] = &world.leave(2, Departure::Left, false)[..] else {
        panic!("the send that is held, and the end of the channels");
    };
    let gone = |rank| RequestError::Departed {
        rank,
        departure: Departure::Left,
    };
    assert_eq!(*last, error_answer(&[(0, 103)], gone(2)));
    let refused = world.ask(1, 104, send(Some(0), 60, 104));
    assert_eq!(refused, [error_answer(&[(1, 104)], gone(2))]);
}

#[test]
fn a_rank_that_follows_again_gets_the_messages_that_it_has_not_received() {
    let mut world = World::new(3);
    let done = |rank, id| answer(&[(rank, id)], Answer::Done);
    for n in 0..5u8 {
        world.ask(0, n.into(), send(Some(1), 60, n));
    }
    let again = |world: &mut World, channels: &[(&str, u64, u64)]| {
        let mut outputs = world.ask(1, NO_ANSWER, follow(channels));
        assert_eq!(outputs.pop(), Some(followed(1)));
        outputs
    };
    let messages = |from: u64| -> Vec<_> {
        let numbers = from..=5;
        numbers
            .map(|number| message_to(Recipients::Rank(1), number, 0, number as u8 - 1))
            .collect()
    };
    assert_eq!(again(&mut world, &[]), messages(1));
    assert_eq!(again(&mut world, &[("other", 9, 9)]), messages(1));
    assert_eq!(again(&mut world, &[("steps", 3, 2)]), messages(4));
    // What was taken is not kept.
    assert_eq!(again(&mut world, &[("steps", 0, 0)]), messages(3));
    assert_eq!(again(&mut world, &[("steps", 5, 2)]), []);
    assert_eq!(world.ask(2, NO_ANSWER, follow(&[])), [followed(2)]);
    // A lost report of taken messages makes room.
    for n in 5..CAPACITY as u8 + 2 {
        let sent = world.ask(0, n.into(), send(Some(1), 60, n));
        let number = u64::from(n) + 1;
        assert_eq!(sent, [message(1, number, 0, n), done(0, n.into())]);
    }
    assert_eq!(world.ask(0, 100, send(Some(1), 60, 100)), []);
    let all = CAPACITY as u64 + 2;
    assert_eq!(
        again(&mut world, &[("steps", all - 1, 3)]),
        [
            message_to(Recipients::Rank(1), all, 0, all as u8 - 1),
            message(1, all + 1, 0, 100),
            done(0, 100)
        ]
    );
    // Numbers that cannot be true are no reason to lose anything else.
    assert_eq!(again(&mut world, &[("steps", u64::MAX, u64::MAX)]), []);
    let sent = world.ask(0, 101, send(Some(1), 60, 101));
    assert_eq!(sent, [message(1, all + 2, 0, 101), done(0, 101)]);
}

/// The end of channels because rank 1 coordinated before.
fn lost(to: Recipients) -> Output {
    let push = Push::ChannelsLost { rank: 1 };
    Output::Push { to, push }
}

fn closed_by(rank: usize, to: Recipients) -> Output {
    let departure = Departure::Left;
    let push = Push::ChannelsClosed { rank, departure };
    Output::Push { to, push }
}

fn follow_after(former: usize) -> Request {
    Request::Follow {
        outcomes: Vec::new(),
        before: FollowedBefore::Other(former),
    }
}

/// A service of three ranks after rank 1 has coordinated. Rank 2 sends a message.
fn after_rank_1() -> World {
    let mut world = World::new(3);
    world.service.takes_over(world.now, 1);
    assert_eq!(world.ask(0, NO_ANSWER, follow_after(1)), []);
    assert_eq!(world.ask(2, 7, send(None, 60, 1)), []);
    world
}

#[test]
fn the_end_of_the_former_coordinator_ends_the_channels() {
    let mut world = after_rank_1();
    // The end of another rank is not the reason: messages from before it may be lost as well.
    let left = |rank| RequestError::Departed {
        rank,
        departure: Departure::Left,
    };
    assert_eq!(world.leave(0, Departure::Left, false), []);
    assert_eq!(world.at(4000), []);
    assert_eq!(
        world.leave(1, Departure::Left, false),
        [
            error_answer(&[(2, 7)], left(1)),
            closed_by(1, Recipients::All)
        ]
    );
    assert_eq!(world.at(6000), []);
    let told = world.ask(2, NO_ANSWER, follow(&[]));
    assert_eq!(told, [followed(2), closed_by(1, Recipients::Rank(2))]);
}

#[test]
fn messages_may_be_lost_with_a_former_coordinator_that_has_not_ended() {
    let why = || RequestError::ChannelsLost { rank: 1 };
    let expected = [error_answer(&[(2, 7)], why()), lost(Recipients::All)];
    // It follows, or nothing is known of it.
    let mut world = after_rank_1();
    let mut told = world.ask(1, NO_ANSWER, follow_after(1));
    assert_eq!(told.pop(), Some(lost(Recipients::Rank(1))));
    assert_eq!(told, expected);
    assert_eq!(world.at(6000), []);
    let mut world = after_rank_1();
    assert_eq!(world.at(4999), []);
    assert_eq!(world.at(5000), expected);
    let refused = world.ask(0, 8, send(None, 60, 1));
    assert_eq!(refused, [error_answer(&[(0, 8)], why())]);
    // Its end changes nothing any more.
    assert_eq!(world.leave(1, Departure::Left, false), []);
    let told = world.ask(0, NO_ANSWER, follow(&[]));
    assert_eq!(told, [followed(0), lost(Recipients::Rank(0))]);
}

#[test]
fn a_send_after_a_former_coordinator_ends_at_its_deadline() {
    let mut world = after_rank_1();
    assert_eq!(world.ask(0, 8, send(None, 1, 1)), []);
    let why = RequestError::ChannelsLost { rank: 1 };
    assert_eq!(world.at(1000), [error_answer(&[(0, 8)], why)]);
}

#[test]
fn a_coordinator_learns_from_a_rank_that_another_one_has_coordinated_meanwhile() {
    let mut world = World::new(3);
    for n in 0..=CAPACITY as u8 {
        world.ask(0, n.into(), send(Some(2), 60, n));
    }
    let why = RequestError::ChannelsLost { rank: 1 };
    assert_eq!(
        world.ask(2, NO_ANSWER, follow_after(1)),
        [
            error_answer(&[(0, CAPACITY as u64)], why),
            lost(Recipients::All),
            lost(Recipients::Rank(2))
        ]
    );
}

#[test]
fn a_rank_that_reports_again_after_a_lost_link_is_told_again_that_the_channels_are_closed() {
    let mut world = World::new(3);
    let report = || follow(&[]);
    assert_eq!(world.ask(0, NO_ANSWER, report()), [followed(0)]);
    let closed = |to| Output::Push {
        to,
        push: Push::ChannelsClosed {
            rank: 2,
            departure: Departure::Left,
        },
    };
    let left = world.leave(2, Departure::Left, false);
    assert_eq!(left, [closed(Recipients::All)]);
    // A later departure is not the cause.
    assert_eq!(world.leave(1, failed(), false), []);
    for _ in 0..2 {
        let told = world.ask(0, NO_ANSWER, report());
        assert_eq!(told, [followed(0), closed(Recipients::Rank(0))]);
    }
}

fn late(outputs: &[Output]) -> &StragglerReport {
    match outputs {
        [
            Output::Push {
                to: Recipients::Ranks(_),
                push: Push::Stragglers(late),
            },
            Output::Push {
                to: Recipients::Observers,
                push: Push::Stragglers(_),
            },
        ] => late,
        other => panic!("one word on which rank is late: {other:?}"),
    }
}

#[test]
fn an_inquiry_names_the_rank_that_is_late_and_says_when_it_has_entered() {
    let mut world = World::new(4);
    world.ask(2, 0, phase("load"));
    let asked = world.ask(3, 0, query("k", 9, &[3, 2, 0], false));
    let open_straggler_query = Output::Push {
        to: Recipients::Ranks(vec![2, 0]),
        push: Push::StragglerQuery {
            key: String::from("k"),
            collective_index: 9,
            is_sample: false,
        },
    };
    assert_eq!(asked, [open_straggler_query]);
    assert_eq!(world.ask(0, 0, query("k", 9, &[3, 2, 0], false)), []);
    let note_deadline = world.begun + Duration::from_secs(1);
    assert_eq!(world.service.next_timeout(), Some(note_deadline));
    assert_eq!(world.at(999), []);
    let said = world.at(1000);
    let one = &late(&said).late[0];
    assert_eq!((one.rank, one.communicator_rank, one.pid), (2, 1, 72));
    assert_eq!((&*one.phase, one.answers), ("load", false));
    assert_eq!(one.behind, Duration::from_secs(3));
    assert_eq!(world.at(4000), []);
    // The rank entered half a second ago: 5.5 s behind the first; its answer was on its way for a second at most.
    let said = world.ask(2, 0, attend("k", 9, Some(500)));
    let one = &late(&said).late[0];
    assert!(one.has_entered);
    assert_eq!(one.behind, Duration::from_millis(4500));
    assert_eq!(world.service.next_timeout(), None);
}

#[test]
fn ranks_that_wait_are_reported_every_ten_seconds_with_the_ranks_that_are_waited_for() {
    let mut world = World::with(6, [0, 1, 2]);
    world.ask(2, 0, phase("load weights"));
    for rank in [0, 1] {
        world.ask(rank, 0, collect("barrier/x", 60, None));
    }
    world.ask(1, 1, get("hash", 60));
    let begun = world.begun;
    let at = |seconds| begun + Duration::from_secs(seconds);
    assert_eq!(world.service.next_timeout(), Some(at(10)));
    assert_eq!(world.service.reports(at(9)), Vec::<String>::new());
    let said = world.service.reports(at(11));
    assert_eq!(
        said,
        [
            "2 of 6 ranks have been waiting in \"barrier/x\" for 11 s; missing: 2-5; rank 2 (node, pid 72) has been in phase \"load weights\" \
             for 11 s; rank 3 has never joined; rank 4 has never joined; rank 5 has never joined",
            "rank 1 has been waiting for \"hash\" for 11 s, which no rank has set"
        ]
    );
    assert_eq!(world.service.reports(at(15)), Vec::<String>::new());
    assert_eq!(world.service.next_timeout(), Some(at(21)));
    assert_eq!(world.service.reports(at(22)).len(), 2);
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Asked {
    Round { of_ends: bool },
    Get,
    Other,
}

/// A random request, and the answer that it expects, if any.
fn any_request(random: &mut fastrand::Rng, size: usize) -> (Request, Option<Asked>) {
    let seconds = random.u64(0..12);
    let key = ["a", "b"][random.usize(0..2)];
    match random.u8(0..16) {
        0..=6 => {
            let topic = ["x", "y", "end/x", "end/y"][random.usize(0..4)];
            let members = random.usize(0..=size);
            let members = random.choose_multiple(0..=size, members);
            let of_ends = topic.starts_with("end/");
            let mut request = collect(topic, seconds, (!members.is_empty()).then_some(&members));
            if let Request::Exchange { round, .. } = &mut request {
                round.number = random.u64(0..2);
                if random.bool() {
                    round.members = None;
                }
            }
            (request, Some(Asked::Round { of_ends }))
        }
        7 => (set(key, b"value"), Some(Asked::Other)),
        8 => {
            let key = random.u8(0..8).to_string();
            (get(&key, seconds), Some(Asked::Get))
        }
        9..=11 => {
            let to = random.bool().then(|| random.usize(0..=size));
            (send(to, seconds, 0), Some(Asked::Other))
        }
        12 => (consume(random.u64(0..6)), None),
        13 => (phase(key), None),
        14 => {
            let collective_index = random.u64(0..4);
            (query(key, collective_index, &[], random.bool()), None)
        }
        _ => {
            let entered = random.bool().then(|| random.u64(0..3000));
            (attend(key, random.u64(0..4), entered), None)
        }
    }
}

#[test]
fn every_request_is_answered_once_unless_its_rank_leaves_or_cancels_it() {
    for seed in 0..300 {
        let mut random = fastrand::Rng::with_seed(seed);
        let size = random.usize(1..6);
        let mut world = World::new(size);
        // Channels end with the first rank that leaves.
        let leaves = random.u8(0..3);
        let mut waiting: HashMap<(usize, u64), Asked> = HashMap::new();
        let heard = |outputs: Vec<Output>, waiting: &mut HashMap<_, _>| {
            for output in outputs {
                if let Output::Answer { to, .. } = output {
                    for request in to {
                        let was_waiting = waiting.remove(&request).is_some();
                        assert!(was_waiting, "{request:?} is answered, seed {seed}");
                    }
                }
            }
        };
        let mut millis = 0;
        for id in 0..1000 {
            let rank = random.usize(0..size);
            let outputs = match random.u8(0..=255) {
                0..=20 => {
                    millis += random.u64(0..4000);
                    world.at(millis)
                }
                chance if chance < 21 + leaves => {
                    let stays = random.bool();
                    let departure = match random.u8(0..3) {
                        0 => Departure::Left,
                        1 => failed(),
                        _ if stays => Departure::Left,
                        _ => Departure::lost(LossKind::Closed),
                    };
                    let has_left = world.service.departure(rank).is_some();
                    let outputs = world.leave(rank, departure, stays);
                    heard(outputs, &mut waiting);
                    let still =
                        |asked| stays && (has_left || asked == Asked::Round { of_ends: true });
                    waiting.retain(|(of, _), asked| *of != rank || still(*asked));
                    Vec::new()
                }
                _ if world.service.rank(rank).is_closed() => Vec::new(),
                24..=40 => {
                    let own = waiting.iter().filter(|((of, _), _)| *of == rank);
                    let mut own: Vec<_> = own.map(|(key, asked)| (key.1, *asked)).collect();
                    own.sort_by_key(|(id, _)| *id);
                    let Some(&(id, asked)) = random.choice(&own) else {
                        continue;
                    };
                    let reason = Reason::Aborted;
                    let outputs = world.ask(rank, id, Request::Cancel { reason });
                    // The sender of a message still gets its outcome.
                    match asked {
                        Asked::Get => drop(waiting.remove(&(rank, id))),
                        Asked::Round { .. } => assert_eq!(outputs.len(), 1, "seed {seed}"),
                        Asked::Other => assert_eq!(outputs, []),
                    }
                    outputs
                }
                _ => {
                    let (request, asked) = any_request(&mut random, size);
                    waiting.extend(asked.map(|asked| ((rank, id), asked)));
                    world.ask(rank, id, request)
                }
            };
            heard(outputs, &mut waiting);
        }
        let mut turns = 0;
        while let Some(next) = world.service.next_timeout() {
            world.service.handle_timeout(next);
            world.service.reports(next);
            heard(world.outputs(), &mut waiting);
            turns += 1;
            assert!(turns < 2000, "it comes to rest, seed {seed}");
        }
        let left = waiting.keys();
        assert_eq!(left.len(), 0, "without an answer: {left:?}, seed {seed}");
    }
}

#[test]
fn a_refused_part_begins_no_round() {
    let mut world = World::new(3);
    for (rank, members) in [(2, &[0, 1][..]), (0, &[0, 1, 0]), (0, &[0, 3])] {
        let refused = world.ask(rank, 1, collect("x", 60, Some(members)));
        let why = RequestError::OtherMembers;
        assert_eq!(refused, [error_answer(&[(rank, 1)], why)]);
        assert_eq!(world.service.rounds().count(), 0, "{members:?}");
    }
    assert_eq!(world.at(100_000), []);
}

#[test]
fn a_key_that_is_too_long_is_refused_at_once() {
    let mut world = World::new(1);
    let bytes = LONGEST_NAME + 1;
    let key = || "k".repeat(bytes);
    let requests = [
        get(&key(), 60),
        Request::TryGet { key: key() },
        Request::Delete { key: key() },
    ];
    for request in requests {
        let why = RequestError::TooLarge { bytes };
        let refused = world.ask(0, 1, request);
        assert_eq!(refused, [error_answer(&[(0, 1)], why)]);
    }
}

#[test]
fn what_waits_is_answered_when_its_rank_leaves_its_world_and_ends_go_on() {
    let mut world = World::new(2);
    let end = format!("{END_TOPIC}x");
    assert_eq!(world.ask(0, 1, collect("x", 60, None)), []);
    assert_eq!(world.ask(0, 2, get("key", 60)), []);
    assert_eq!(world.ask(0, 3, collect(&end, 60, None)), []);
    let outputs = world.leave(0, Departure::Left, true);
    let why = RequestError::Departed {
        rank: 0,
        departure: Departure::Left,
    };
    assert!(
        outputs.contains(&error_answer(&[(0, 1), (0, 2)], why)),
        "{outputs:?}"
    );
    let ended = world.ask(1, 4, collect(&end, 60, None));
    assert_eq!(ended, [parts(&[(0, 3), (1, 4)], &[b"e", b"e"])]);
}
