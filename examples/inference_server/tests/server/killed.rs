//! Ranks that are killed with SIGKILL, at any time.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::client::{Stream, complete, get};
use crate::program::{Server, lives, signal};
use crate::{Question, reference, until};

/// Kills a rank, and checks the server's report: not ready, with the rank, its process and the signal. Returns the time
/// until the report, or `None` if the server was ready again before the first look.
fn kill(server: &Server, rank: usize) -> Option<Duration> {
    let health = server.health();
    let (pid, generation) = (&health["ranks"][rank]["pid"], &health["generation"]);
    let pid = u32::try_from(pid.as_u64().unwrap()).unwrap();
    signal(pid, Signal::KILL);
    let begun = Instant::now();
    let found = until("that a rank is gone", || {
        let answer = get(&format!("{}/readyz", server.url));
        let json = answer.json();
        if answer.status == 503 && json["signal"] == "SIGKILL" {
            assert_eq!(json["rank"], rank, "{json}");
            assert_eq!(json["pid"], pid, "{json}");
            let cause = json["cause"].as_str().unwrap();
            let expected = format!("rank {rank} (pid {pid}) is gone: killed by SIGKILL");
            assert_eq!(cause, expected);
            return Some(Some(begun.elapsed()));
        }
        (answer.status == 200 && json["generation"] != *generation).then_some(None)
    });
    match found {
        Some(took) => println!("rank {rank}: not ready {took:?} after SIGKILL"),
        None => println!("rank {rank}: ready again before it was looked"),
    }
    found
}

/// Waits until the server is ready again, and checks that only this rank's process was replaced.
fn is_whole_again(server: &Server, front: u32, before: &[u32], rank: usize) {
    server.until_ready();
    let seconds = server.metric("inference_last_recovery_seconds");
    println!(
        "rank {rank}: ready {:.0} ms after the death was heard of",
        seconds * 1e3
    );
    assert_eq!(server.health()["pid"], front);
    let after = server.ranks();
    for (number, (old, new)) in before.iter().zip(&after).enumerate() {
        assert_eq!(number != rank, old == new, "{before:?}, {after:?}");
        assert!(lives(*new));
    }
    assert!(!lives(before[rank]));
    let health = server.health();
    // All ranks have the same part of the model as before, and did not load another one.
    for (number, rank) in health["ranks"].as_array().unwrap().iter().enumerate() {
        assert_eq!(rank["shard"], number, "{health}");
        assert!(rank["device"].is_u64(), "{health}");
    }
    let fault = &health["last_fault"];
    assert_eq!(fault["rank"], rank, "{fault}");
    assert_eq!(fault["pid"], before[rank], "{fault}");
    assert_eq!(fault["signal"], "SIGKILL", "{fault}");
    assert!(fault["ready_after_seconds"].as_f64().unwrap() > 0.0);
}

#[test]
fn a_rank_that_is_killed_while_nothing_is_done_is_named_and_replaced() {
    let server = Server::start(&["--ranks", "4"]);
    let question = Question::number(7);
    let expected = &reference(std::slice::from_ref(&question))[0];
    // Includes rank 0, the coordinator, and the next coordinator. The world renumbers its ranks each time.
    let mut seen = 0;
    for rank in [2, 0, 1, 0, 3] {
        let before = server.ranks();
        seen += usize::from(kill(&server, rank).is_some());
        is_whole_again(&server, server.pid(), &before, rank);
        assert_eq!(
            complete(&server.url, &question.body()).completion(),
            *expected
        );
    }
    assert!(seen > 0, "it was never seen that the server was not ready");
}

/// Kills a rank during generation, and compares the texts with those of an undisturbed process.
fn in_decode(rank: usize) {
    let server = Server::start(&["--ranks", "4"]);
    let questions: Vec<_> = (0..3).map(|seed| Question::long(seed + 10)).collect();
    let expected = reference(&questions);
    let before = server.ranks();
    let mut streams: Vec<_> = questions
        .iter()
        .map(|question| Stream::new(&server.url, &question.streaming()))
        .collect();
    for stream in &mut streams {
        stream.read(5);
    }
    kill(&server, rank);
    // A request that arrives during the recovery waits, and is answered.
    let late = Question::number(5);
    let answer = complete(&server.url, &late.body()).completion();
    assert_eq!(answer, reference(std::slice::from_ref(&late))[0]);
    for (stream, expected) in streams.into_iter().zip(&expected) {
        assert!(stream.text.len() < expected.len(), "it was over before");
        let (text, comments) = stream.finish();
        assert_eq!(text, *expected);
        assert_eq!(comments.len(), 2, "{comments:?}");
        assert!(comments[0].contains(&format!("rank {rank} (pid {})", before[rank])));
        assert!(comments[0].contains("SIGKILL"), "{comments:?}");
        assert!(comments[1].starts_with("goes on: "), "{comments:?}");
    }
    is_whole_again(&server, server.pid(), &before, rank);
    // The other ranks report the same cause.
    let fault = &server.health()["last_fault"];
    let report = fault["report"]
        .as_str()
        .unwrap_or_else(|| panic!("{fault}"));
    assert!(
        report.contains(&format!("pid {}", before[rank])),
        "{report}"
    );
    assert!(fault["hint"].is_string() && !fault["evidence"].as_array().unwrap().is_empty());
}

#[test]
fn texts_go_on_with_the_same_words_after_a_rank_was_killed() {
    in_decode(2);
}

#[test]
fn texts_go_on_with_the_same_words_after_rank_0_was_killed_which_answers() {
    in_decode(0);
}

#[test]
fn a_prompt_that_was_being_read_is_read_again() {
    let server = Server::start(&["--ranks", "2"]);
    let question = Question {
        prompt: "A rank that is gone is named. ".repeat(32),
        most: 12,
        ..Question::long(4)
    };
    let expected = &reference(std::slice::from_ref(&question))[0];
    let before = server.ranks();
    let url = &server.url;
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| complete(url, &question.body()).completion());
        until("some of it was read", || {
            (server.metric("inference_steps_total") > 2.0).then_some(())
        });
        signal(before[1], Signal::KILL);
        let made = server.metric("inference_generated_tokens_total");
        assert_eq!(made, 0.0, "the prompt was over before");
        assert_eq!(asking.join().unwrap(), *expected);
    });
    is_whole_again(&server, server.pid(), &before, 1);
}

#[test]
fn a_rank_that_is_killed_while_the_others_wait_for_it_is_replaced_once_more() {
    let server = Server::start(&["--ranks", "4"]);
    let question = Question::long(21);
    let expected = &reference(std::slice::from_ref(&question))[0];
    let before = server.ranks();
    let mut stream = Stream::new(&server.url, &question.streaming());
    stream.read(5);
    signal(before[3], Signal::KILL);
    // Kills the successor as soon as it exists, and a survivor right after it.
    let successor = until("a successor", || {
        let pid = server.ranks()[3];
        (pid != 0 && pid != before[3]).then_some(pid)
    });
    signal(successor, Signal::KILL);
    signal(before[1], Signal::KILL);
    assert_eq!(stream.finish().0, *expected);
    server.until_ready();
    let after = server.ranks();
    assert_eq!((after[0], after[2]), (before[0], before[2]));
    assert_eq!(server.metric("inference_rank_ends_total"), 3.0);
}

#[test]
fn all_ranks_may_be_killed_at_once_even_the_only_one() {
    for ranks in ["1", "4"] {
        let server = Server::start(&["--ranks", ranks]);
        let question = Question::long(30);
        let expected = &reference(std::slice::from_ref(&question))[0];
        let mut stream = Stream::new(&server.url, &question.streaming());
        stream.read(5);
        for pid in server.ranks() {
            signal(pid, Signal::KILL);
        }
        assert_eq!(stream.finish().0, *expected, "{ranks} ranks");
        server.until_ready();
        assert_eq!(server.health()["last_fault"]["signal"], "SIGKILL");
    }
}

#[test]
fn a_server_that_nobody_listens_to_goes_on_after_a_death_all_the_same() {
    let server = Server::start(&["--ranks", "2"]);
    server.stop_listening();
    let question = Question::number(8);
    for rank in [1, 0] {
        let before = server.ranks();
        kill(&server, rank);
        is_whole_again(&server, server.pid(), &before, rank);
        complete(&server.url, &question.body()).completion();
    }
}

#[test]
fn a_rank_that_is_killed_at_any_moment_of_its_coming_is_replaced_once_more() {
    let server = Server::start(&["--ranks", "2"]);
    let question = Question::number(6);
    let expected = &reference(std::slice::from_ref(&question))[0];
    let mut coming = 0;
    for round in 0..8 {
        let before = server.children();
        signal(server.ranks()[1], Signal::KILL);
        let successor = until("a successor", || {
            server.children().difference(&before).next().copied()
        });
        // Kills it while it starts, joins, meets the others, loads, or is ready.
        std::thread::sleep(Duration::from_millis(12 * round));
        coming += usize::from(get(&format!("{}/readyz", server.url)).status == 503);
        signal(successor, Signal::KILL);
        let answer = complete(&server.url, &question.body()).completion();
        assert_eq!(answer, *expected, "round {round}");
        server.until_ready();
    }
    println!("{coming} of 8 were killed before they served");
    assert!(coming > 0, "all were ready before");
    assert_eq!(server.metric("inference_rank_ends_total"), 16.0);
}

#[test]
fn the_rank_that_coordinates_is_killed_at_any_moment_while_the_others_replace_another_one() {
    let server = Server::start(&["--ranks", "4"]);
    let question = Question::number(6);
    let expected = &reference(std::slice::from_ref(&question))[0];
    let mut going_on = 0;
    for round in 0..8 {
        let (before, known) = (server.ranks(), server.children());
        let health = server.health();
        let world_rank = |place: &usize| health["ranks"][*place]["world_rank"].as_u64().unwrap();
        let mut order: Vec<usize> = (0..4).collect();
        order.sort_by_key(world_rank);
        signal(before[order[1]], Signal::KILL);
        until("a successor", || {
            server.children().difference(&known).next().copied()
        });
        // Kills a rank while the others detect the death, agree, meet, and wait for the successor.
        std::thread::sleep(Duration::from_millis(4 * round));
        going_on += usize::from(get(&format!("{}/readyz", server.url)).status == 503);
        signal(before[order[0]], Signal::KILL);
        let answer = complete(&server.url, &question.body()).completion();
        assert_eq!(answer, *expected, "round {round}");
        until("that both deaths were heard of", || {
            let ends = server.metric("inference_rank_ends_total");
            (ends == 2.0 * (round + 1) as f64).then_some(())
        });
        server.until_ready();
        let after = server.ranks();
        for place in &order[2..] {
            assert_eq!(before[*place], after[*place], "round {round}");
        }
    }
    println!("{going_on} of 8 were killed before the others served again");
    assert!(going_on > 0, "all served before");
}
