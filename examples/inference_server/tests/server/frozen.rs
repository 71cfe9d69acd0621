//! Ranks that are stopped but not dead, and may continue at any moment; and ranks that hang.

use rustix::process::Signal;

use crate::client::{Stream, complete, get};
use crate::program::{Server, signal};
use crate::{Question, reference, until};

/// Waits until the server reports that a rank is frozen.
fn is_named(server: &Server, rank: usize, pid: u32) {
    until("that a rank is frozen", || {
        let answer = get(&format!("{}/readyz", server.url));
        let json = answer.json();
        let cause = json["cause"].as_str().unwrap_or_default();
        let found = answer.status == 503 && cause.contains("frozen") && cause.contains("not dead");
        found.then(|| {
            assert_eq!(
                (&json["rank"], &json["pid"]),
                (&rank.into(), &pid.into()),
                "{json}"
            );
            assert!(json["signal"].is_null(), "{json}");
        })
    });
}

#[test]
fn a_rank_that_is_stopped_while_nothing_is_done_is_frozen_and_goes_on() {
    let server = Server::start(&["--ranks", "2"]);
    let before = server.ranks();
    signal(before[1], Signal::STOP);
    is_named(&server, 1, before[1]);
    assert_eq!(server.health()["ranks"][1]["state"], "frozen");
    assert_eq!(server.metric("inference_ranks{state=\"frozen\"}"), 1.0);
    signal(before[1], Signal::CONT);
    server.until_ready();
    let question = Question::number(3);
    let answer = complete(&server.url, &question.body()).completion();
    assert_eq!(answer, reference(std::slice::from_ref(&question))[0]);
    assert_eq!(server.ranks(), before);
    assert_eq!(server.metric("inference_rank_ends_total"), 0.0);
}

#[test]
fn a_text_waits_for_a_rank_that_is_stopped_for_less_than_the_limit() {
    let server = Server::start(&["--ranks", "2", "--deadline", "50"]);
    let before = server.ranks();
    let question = Question::long(40);
    let mut stream = Stream::new(&server.url, &question.streaming());
    stream.read(3);
    signal(before[0], Signal::STOP);
    is_named(&server, 0, before[0]);
    signal(before[0], Signal::CONT);
    let (text, comments) = stream.finish();
    assert_eq!(text, reference(std::slice::from_ref(&question))[0]);
    assert!(comments.is_empty(), "{comments:?}");
    assert_eq!(server.ranks(), before);
}

/// Stops a rank in the middle of a text, which comes nevertheless. Returns the processes of all ranks before and after.
fn stop_until_replaced(server: &Server, rank: usize) -> [Vec<u32>; 2] {
    let before = server.ranks();
    let question = Question::long(41);
    let mut stream = Stream::new(&server.url, &question.streaming());
    stream.read(3);
    signal(before[rank], Signal::STOP);
    is_named(server, rank, before[rank]);
    let (text, comments) = stream.finish();
    assert_eq!(text, reference(std::slice::from_ref(&question))[0]);
    assert_eq!(comments.len(), 2, "{comments:?}");
    server.until_ready();
    let after = server.ranks();
    assert_ne!(after[rank], before[rank]);
    [before, after]
}

#[test]
fn a_rank_that_is_stopped_for_longer_than_the_limit_is_replaced() {
    let server = Server::start(&["--ranks", "4", "--deadline", "3"]);
    let [before, after] = stop_until_replaced(&server, 2);
    assert_eq!(
        (after[0], after[1], after[3]),
        (before[0], before[1], before[3])
    );
    // The other ranks did not consider it dead: they report that it does not answer.
    let fault = &server.health()["last_fault"];
    let report = fault["report"]
        .as_str()
        .unwrap_or_else(|| panic!("{fault}"));
    assert!(report.contains(&format!("pid {}", before[2])), "{report}");
    assert!(report.contains("stopped"), "{report}");
}

/// No other rank waits for it in an operation.
#[test]
fn the_only_rank_is_replaced_when_it_is_stopped_for_longer_than_the_limit() {
    let server = Server::start(&["--ranks", "1", "--deadline", "2"]);
    stop_until_replaced(&server, 0);
}

#[test]
fn a_rank_that_is_stopped_while_nothing_is_done_is_replaced_when_another_one_dies() {
    let server = Server::start(&["--ranks", "4", "--deadline", "3"]);
    let before = server.ranks();
    signal(before[2], Signal::STOP);
    is_named(&server, 2, before[2]);
    signal(before[1], Signal::KILL);
    let question = Question::number(9);
    let answer = complete(&server.url, &question.body()).completion();
    assert_eq!(answer, reference(std::slice::from_ref(&question))[0]);
    server.until_ready();
    let after = server.ranks();
    assert_eq!((after[0], after[3]), (before[0], before[3]));
    assert!(after[1] != before[1] && after[2] != before[2], "{after:?}");
    assert_eq!(server.metric("inference_rank_ends_total"), 2.0);
}

/// Rank 1 does not return from a call: from the all-reduce of the next probe of idle ranks.
#[test]
fn a_rank_that_hangs_while_nothing_is_done_is_named_and_replaced_before_anybody_asks() {
    let faults = "call=ncclAllReduce,rank=1,nth=3,action=hang";
    let server = Server::start_with_faults(&["--ranks", "4", "--deadline", "3"], faults);
    let before = server.ranks();
    until("that the sign of life does not come", || {
        let answer = get(&format!("{}/readyz", server.url));
        let cause = answer.json()["cause"].to_string();
        (answer.status == 503 && cause.contains("sign of life")).then_some(())
    });
    until("that the rank is named", || {
        let json = get(&format!("{}/readyz", server.url)).json();
        let cause = json["cause"].as_str().unwrap_or_default();
        (json["rank"] == 1 && cause.contains("inside the call of all_reduce")).then_some(())
    });
    until("that it is replaced", || {
        (server.ranks()[1] != before[1]).then_some(())
    });
    server.until_ready();
    let after = server.ranks();
    assert_eq!(
        (after[0], after[2], after[3]),
        (before[0], before[2], before[3])
    );
    let fault = &server.health()["last_fault"];
    assert_eq!(
        (&fault["rank"], &fault["pid"]),
        (&1.into(), &before[1].into()),
        "{fault}"
    );
    let report = fault["report"].to_string();
    assert!(report.contains("inside the call"), "{report}");
}
