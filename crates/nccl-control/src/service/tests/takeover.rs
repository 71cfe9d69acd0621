//! A coordinator that takes over, and the outcomes that ranks have from the previous one.

use super::*;

/// Creates a coordinator of three ranks that takes over.
fn successor() -> World {
    let mut world = World::new(3);
    world.service.takes_over(world.now, 2);
    // These tests look at outcomes.
    world.service.channels.former = None;
    world
}

fn gone() -> Departure {
    Departure::lost(LossKind::Closed)
}

fn all(topic: &str) -> Round {
    Round {
        topic: topic.to_owned(),
        number: 0,
        members: None,
    }
}

fn told(topics: &[(&str, bool)]) -> Request {
    let round = |(topic, has_failed): &(&str, bool)| (all(topic), *has_failed);
    Request::Follow {
        outcomes: topics.iter().map(round).collect(),
        before: FollowedBefore::None,
    }
}

fn all_parts() -> Answer {
    Answer::Parts(Arc::new(vec![vec![0], vec![1], vec![2]]))
}

fn outcome(topic: &str, answer: Answer) -> Request {
    let round = all(topic);
    Request::Outcome { round, answer }
}

fn want(rank: usize, topic: &str) -> Output {
    Output::Push {
        to: Recipients::Rank(rank),
        push: Push::WantOutcome(all(topic)),
    }
}

/// The message that is repeated to a rank that may not have received it.
fn closed(to: usize) -> Output {
    Output::Push {
        to: Recipients::Rank(to),
        push: Push::ChannelsClosed {
            rank: 2,
            departure: gone(),
        },
    }
}

fn failed_with(why: RequestError) -> Answer {
    Answer::Failed(Arc::new(why))
}

#[test]
fn who_waits_in_a_round_of_an_earlier_coordinator_gets_what_another_rank_has_of_it() {
    let mut world = successor();
    assert_eq!(world.ask(0, 1, collect("x", 60, None)), []);
    // A rank that has another outcome may still report it.
    assert_eq!(world.ask(1, NO_ANSWER, told(&[("x", true)])), []);
    assert_eq!(
        world.ask(2, NO_ANSWER, told(&[("y", true), ("x", false)])),
        [want(2, "x")]
    );
    assert_eq!(world.ask(0, NO_ANSWER, told(&[])), []);
    // Ignored: an outcome from a rank that has reported none, and one with a different number of parts.
    assert_eq!(world.ask(0, NO_ANSWER, outcome("x", all_parts())), []);
    let few = Answer::Parts(Arc::new(vec![vec![0]]));
    assert_eq!(world.ask(2, NO_ANSWER, outcome("x", few)), []);
    assert_eq!(
        world.ask(2, NO_ANSWER, outcome("x", all_parts())),
        [answer(&[(0, 1)], all_parts())]
    );
    assert_eq!(world.service.rounds().count(), 0);
    // The round failed on the only rank that has its outcome.
    assert_eq!(world.ask(0, 2, collect("y", 60, None)), [want(2, "y")]);
    let why = failed_with(RequestError::TooLarge { bytes: 1 });
    assert_eq!(
        world.ask(2, NO_ANSWER, outcome("y", why.clone())),
        [answer(&[(0, 2)], why)]
    );
}

#[test]
fn a_rank_that_does_not_give_its_outcome_is_not_waited_for() {
    let mut world = successor();
    assert_eq!(world.ask(0, 1, collect("x", 60, None)), []);
    assert_eq!(
        world.ask(1, NO_ANSWER, told(&[("x", false)])),
        [want(1, "x")]
    );
    assert_eq!(world.ask(2, NO_ANSWER, told(&[("x", false)])), []);
    // The rank that was asked does not answer, and neither does the other one.
    assert_eq!(world.at(999), []);
    assert_eq!(world.at(1000), [want(2, "x")]);
    assert_eq!(world.at(2000), [want(1, "x")]);
    // The rank has lost the question, or no longer has the outcome.
    assert_eq!(
        world.ask(1, NO_ANSWER, told(&[("x", false)])),
        [want(2, "x")]
    );
    let lost = || failed_with(RequestError::OutcomeLost);
    assert_eq!(
        world.ask(2, NO_ANSWER, outcome("x", lost())),
        [want(1, "x")]
    );
    assert_eq!(
        world.ask(1, NO_ANSWER, outcome("x", lost())),
        [answer(&[(0, 1)], lost())]
    );

    let mut world = successor();
    assert_eq!(world.ask(0, 1, collect("x", 60, None)), []);
    assert_eq!(
        world.ask(1, NO_ANSWER, told(&[("x", false)])),
        [want(1, "x")]
    );
    assert_eq!(world.ask(2, NO_ANSWER, told(&[("x", false)])), []);
    assert_eq!(world.ask(0, NO_ANSWER, told(&[])), []);
    assert_eq!(world.leave(1, gone(), false)[0], want(2, "x"));
    let departed = RequestError::Departed {
        rank: 1,
        departure: gone(),
    };
    assert_eq!(
        world.leave(2, gone(), false),
        [error_answer(&[(0, 1)], departed)]
    );
}

#[test]
fn a_successor_ends_no_round_before_it_knows_what_all_ranks_have() {
    let departed = || {
        failed_with(RequestError::Departed {
            rank: 2,
            departure: gone(),
        })
    };
    let begin = |timeout| {
        let mut world = successor();
        world.service.departed_before(2, gone());
        world.service.disconnect(2);
        assert_eq!(world.ask(0, 1, collect("x", timeout, None)), []);
        assert_eq!(world.ask(0, NO_ANSWER, told(&[])), [closed(0)]);
        world
    };
    // All ranks have reported.
    let mut world = begin(60);
    assert_eq!(
        world.ask(1, NO_ANSWER, told(&[])),
        [closed(1), answer(&[(0, 1)], departed())]
    );
    // One rank does not report; also if the exchange has timed out by then.
    for timeout in [60, 0] {
        let mut world = begin(timeout);
        assert_eq!(world.at(799), []);
        assert_eq!(world.at(800), [answer(&[(0, 1)], departed())]);
    }
    // That rank has the outcome.
    let mut world = begin(0);
    assert_eq!(
        world.ask(1, NO_ANSWER, told(&[("x", false)])),
        [closed(1), want(1, "x")]
    );
    assert_eq!(world.at(900), []);
    assert_eq!(
        world.ask(1, NO_ANSWER, outcome("x", all_parts())),
        [answer(&[(0, 1)], all_parts())]
    );
    // That rank never sends the outcome.
    let mut world = begin(0);
    assert_eq!(
        world.ask(1, NO_ANSWER, told(&[("x", false)])),
        [closed(1), want(1, "x")]
    );
    assert_eq!(world.at(1000), [want(1, "x")]);
    assert_eq!(
        world.at(2000),
        [want(1, "x"), answer(&[(0, 1)], departed())]
    );
}

#[test]
fn an_exchange_that_is_given_up_during_a_takeover_completes_on_no_rank() {
    let mut world = successor();
    for rank in 0..2 {
        assert_eq!(world.ask(rank, 1, collect("x", 60, None)), []);
    }
    let cancel = Request::Cancel {
        reason: Reason::Aborted,
    };
    assert_eq!(world.ask(1, 1, cancel), []);
    let given_up = failed_with(RequestError::GivenUp {
        rank: 1,
        reason: Reason::Aborted,
    });
    assert_eq!(
        world.ask(2, 1, collect("x", 60, None)),
        [answer(&[(0, 1), (1, 1), (2, 1)], given_up)]
    );
}

#[test]
fn a_group_that_is_done_keeps_no_rank_from_the_next_of_its_topic() {
    let mut world = successor();
    world.service.departed_before(2, gone());
    world.service.disconnect(2);
    for rank in 0..2 {
        world.ask(rank, NO_ANSWER, told(&[]));
    }
    assert_eq!(world.ask(0, 1, collect("g", 60, Some(&[0, 1, 2]))).len(), 1);
    assert_eq!(world.ask(0, 2, collect("g", 60, Some(&[0, 1]))), []);
    assert_eq!(world.ask(1, 1, collect("g", 60, Some(&[0, 1, 2]))).len(), 1);
    let both: &[&[u8]] = &[b"g", b"g"];
    assert_eq!(
        world.ask(1, 2, collect("g", 60, Some(&[0, 1]))),
        [parts(&[(0, 2), (1, 2)], both)]
    );
    // A rank that has not entered the first round uses the topic with other ranks.
    let mut world = successor();
    world.service.departed_before(2, gone());
    world.service.disconnect(2);
    for rank in 0..2 {
        world.ask(rank, NO_ANSWER, told(&[]));
    }
    assert_eq!(world.ask(0, 1, collect("g", 60, Some(&[0, 1, 2]))).len(), 1);
    let refused = error_answer(&[(1, 1)], RequestError::OtherMembers);
    assert_eq!(world.ask(1, 1, collect("g", 60, Some(&[1, 0]))), [refused]);
}
