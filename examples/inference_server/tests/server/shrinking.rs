//! Recovery with fewer ranks.

use rustix::process::Signal;

use crate::client::{Stream, complete};
use crate::program::{Server, signal};
use crate::{Question, reference, until};

#[test]
fn those_that_are_left_share_the_model_anew_and_texts_go_on_with_the_same_words() {
    let server = Server::start(&["--ranks", "4", "--recovery", "shrink"]);
    let question = Question::long(60);
    let expected = &reference(std::slice::from_ref(&question))[0];
    let before = server.ranks();
    let mut stream = Stream::new(&server.url, &question.streaming());
    stream.read(5);
    signal(before[1], Signal::KILL);
    // Three ranks cannot share the model: two of them serve, and the third is a spare for the next death.
    let pieces = stream.pieces;
    stream.read(pieces + 20);
    let health = server.health();
    assert_eq!(health["parts"], 2, "{health}");
    let states: Vec<_> = (0..4)
        .map(|rank| health["ranks"][rank]["state"].clone())
        .collect();
    assert_eq!(states, ["serving", "gone", "serving", "spare"]);
    signal(before[0], Signal::KILL);
    assert_eq!(stream.finish().0, *expected);
    until("two serve", || {
        let health = server.health();
        (health["ranks"][3]["state"] == "serving" && health["parts"] == 2).then_some(())
    });
    let after = server.ranks();
    assert_eq!(after, [0, 0, before[2], before[3]]);
    // Down to one rank, and then from none, with a restart of all.
    signal(before[2], Signal::KILL);
    until("one serves", || {
        (server.health()["parts"] == 1).then_some(())
    });
    signal(before[3], Signal::KILL);
    until("all serve", || {
        (server.health()["parts"] == 4).then_some(())
    });
    let mut stream = Stream::new(&server.url, &question.streaming());
    stream.read(1);
    assert_eq!(stream.finish().0, *expected);
}

/// No surviving rank has a connection to the stopped rank, so only its parent can report its death.
#[test]
fn the_last_one_goes_on_when_the_first_has_died_and_the_spare_one_was_stopped() {
    let server = Server::start(&["--ranks", "4", "--recovery", "shrink", "--deadline", "2"]);
    let before = server.ranks();
    signal(before[1], Signal::KILL);
    until("two serve", || {
        (server.health()["parts"] == 2).then_some(())
    });
    assert_eq!(server.health()["ranks"][3]["state"], "spare");
    signal(before[3], Signal::STOP);
    signal(before[0], Signal::KILL);
    until("one serves", || {
        (server.health()["parts"] == 1).then_some(())
    });
    // The new generation may be ready before the front has heard of the end of the rank that it has killed.
    until("the stopped rank has ended", || {
        (server.ranks() == [0, 0, before[2], 0]).then_some(())
    });
    let question = Question::number(5);
    let answer = complete(&server.url, &question.body()).completion();
    assert_eq!(answer, reference(std::slice::from_ref(&question))[0]);
}
