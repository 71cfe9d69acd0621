//! Recovery with all remaining ranks, whose experts have copies.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;

use crate::client::{Stream, complete, post};
use crate::program::{Server, command, ends, signal};
use crate::tiny_llama::{self, LlamaModel};
use crate::{Question, reference, until};

/// Returns the copies of each expert and the number of serving ranks, once no possible copy is missing.
fn whole(server: &Server) -> (u64, u64) {
    until("the copies are there", || {
        let health = server.health();
        let (copies, parts) = (health["copies"].as_u64()?, health["parts"].as_u64()?);
        (Some(copies) == health["copies_planned"].as_u64()).then_some((copies, parts))
    })
}

fn parts(server: &Server, number: u64) {
    until("those that are left serve", || {
        (server.health()["parts"] == number).then_some(())
    });
}

#[test]
fn one_after_another_dies_and_texts_go_on_with_the_same_words() {
    let server = Server::start(&["--ranks", "8", "--recovery", "elastic"]);
    let questions: Vec<_> = (60..63).map(Question::long).collect();
    let expected = reference(&questions);
    let before = server.ranks();
    assert_eq!(whole(&server), (2, 8));
    let mut left = 8;
    // The victims include the first rank, which draws the tokens. Two ranks are left after these rounds.
    for victims in [[0, 5, 3], [7, 1, 2]] {
        let mut streams: Vec<_> = questions
            .iter()
            .map(|question| Stream::new(&server.url, &question.streaming()))
            .collect();
        for victim in victims {
            for stream in &mut streams {
                let pieces = stream.pieces;
                stream.read(pieces + 5);
            }
            signal(before[victim], Signal::KILL);
            left -= 1;
            parts(&server, left);
            // All remaining ranks serve, and none was restarted.
            let health = server.health();
            let serving = |rank: &&Value| rank["state"] == "serving";
            let ranks = health["ranks"].as_array().unwrap();
            assert_eq!(
                ranks.iter().filter(serving).count() as u64,
                left,
                "{health}"
            );
            assert_eq!(whole(&server), (2.min(left), left));
        }
        for (stream, expected) in streams.into_iter().zip(&expected) {
            assert_eq!(stream.finish().0, *expected);
        }
    }
    signal(before[4], Signal::KILL);
    parts(&server, 1);
    assert_eq!(whole(&server), (1, 1));
    let answer = complete(&server.url, &questions[0].body()).completion();
    assert_eq!(answer, expected[0]);
    // No rank is left: all are restarted.
    signal(before[6], Signal::KILL);
    parts(&server, 8);
    assert_eq!(whole(&server), (2, 8));
    let answer = complete(&server.url, &questions[1].body()).completion();
    assert_eq!(answer, expected[1]);
}

#[test]
fn ranks_that_agree_on_each_step_give_it_up_for_one_that_is_late_and_go_on_with_it() {
    let options = ["--ranks", "4", "--recovery", "elastic"];
    let agreeing = ["--agree-steps", "0.5"];
    let server = Server::start(&[&options[..], &agreeing].concat());
    let questions: Vec<_> = (90..92).map(Question::long).collect();
    let expected = reference(&questions);
    let before = server.ranks();
    let generation = || server.health()["generation"].as_u64();
    let first = generation();
    // The stopped rank misses the first step. An operation would wait for it for 10 s.
    signal(before[2], Signal::STOP);
    std::thread::scope(|scope| {
        let write =
            |question: &Question| Stream::new(&server.url, &question.streaming()).finish().0;
        let texts = questions
            .iter()
            .map(|question| scope.spawn(move || write(question)));
        let texts: Vec<_> = texts.collect();
        until("the step is given up", || {
            let state = server.health()["ranks"][0]["state"].clone();
            (state != "serving").then_some(())
        });
        signal(before[2], Signal::CONT);
        until("the next generation serves", || {
            (generation() > first).then_some(())
        });
        assert_eq!(server.ranks(), before);
        signal(before[0], Signal::KILL);
        for (text, expected) in texts.into_iter().zip(&expected) {
            assert_eq!(text.join().expect("a text"), *expected);
        }
    });
    parts(&server, 3);
}

#[test]
fn as_many_die_at_once_as_there_are_copies_but_one() {
    let options = ["--ranks", "8", "--recovery", "elastic", "--copies", "4"];
    for victims in [[0, 1, 2], [1, 4, 7], [5, 6, 0]] {
        let server = Server::start(&options);
        let questions: Vec<_> = (70..72).map(Question::long).collect();
        let expected = reference(&questions);
        let before = server.ranks();
        let mut streams: Vec<_> = questions
            .iter()
            .map(|question| Stream::new(&server.url, &question.streaming()))
            .collect();
        for stream in &mut streams {
            stream.read(7);
        }
        for victim in victims {
            signal(before[victim], Signal::KILL);
        }
        for (stream, expected) in streams.into_iter().zip(&expected) {
            assert_eq!(stream.finish().0, *expected);
        }
        assert_eq!(whole(&server), (4, 5));
    }
}

#[test]
fn an_expert_of_which_there_is_no_copy_is_read_again_first() {
    let options = ["--ranks", "3", "--recovery", "elastic", "--copies", "1"];
    let server = Server::start(&options);
    assert_eq!(whole(&server), (1, 3));
    let question = Question::long(80);
    let expected = &reference(std::slice::from_ref(&question))[0];
    let before = server.ranks();
    let mut stream = Stream::new(&server.url, &question.streaming());
    stream.read(5);
    signal(before[1], Signal::KILL);
    assert_eq!(stream.finish().0, *expected);
    assert_eq!(whole(&server), (1, 2));
}

/// Stops one of the ranks for good, in the middle of a text. Returns the server, and the ranks from before.
fn one_stops(ranks: &str, deadline: &str, stopped: usize) -> (Server, Vec<u32>) {
    let options = ["--ranks", ranks, "--recovery", "elastic"];
    let server = Server::start(&[&options[..], &["--deadline", deadline]].concat());
    let question = Question::long(81);
    let expected = &reference(std::slice::from_ref(&question))[0];
    let before = server.ranks();
    let mut stream = Stream::new(&server.url, &question.streaming());
    stream.read(5);
    signal(before[stopped], Signal::STOP);
    assert_eq!(stream.finish().0, *expected);
    (server, before)
}

#[test]
fn a_rank_that_stops_is_ended_and_the_others_go_on() {
    let (server, _) = one_stops("4", "1", 2);
    assert_eq!(whole(&server), (2, 3));
}

/// The front has a vote: without it, neither of two ranks would continue alone for long, since the other may be alive.
#[test]
fn of_two_ranks_the_one_that_does_not_stop_goes_on() {
    for stopped in [0, 1] {
        // Longer than a lease, and longer than a rank without a majority waits for one.
        let (server, before) = one_stops("2", "20", stopped);
        assert_eq!(whole(&server), (1, 1));
        assert!(server.ranks().contains(&before[1 - stopped]));
    }
}

#[test]
fn a_model_without_experts_cannot_be_elastic() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("SmolLM2-135M-Instruct.Q4_1.gguf");
    let models = directory.path().to_str().unwrap().to_owned();
    let model = LlamaModel::new(&tiny_llama::config());
    std::fs::copy(model.path(), &path).unwrap();
    let words = [
        "--model",
        "smollm2",
        "--models",
        &models,
        "--recovery",
        "elastic",
    ];
    let (code, said) = ends(command(&words));
    assert_eq!(code, Some(1), "{said}");
    assert!(
        said.contains("smollm2 has no experts that could have copies"),
        "{said}"
    );
}

/// Requests a number of ranks; returns the status.
fn scale(server: &Server, ranks: usize) -> u16 {
    let body = format!("{{\"ranks\": {ranks}}}");
    post(&format!("{}/admin/ranks", server.url), &body).status
}

/// Waits until all of `ranks` processes have the slots of their numbers, whatever their ranks in the world are.
fn in_their_slots(server: &Server, ranks: usize) {
    until("all processes in their slots", || {
        let health = server.health();
        let members = health["ranks"].as_array().unwrap();
        let there = members.iter().filter(|member| member["slot"].is_u64());
        let own = there.clone().all(|member| member["slot"] == member["rank"]);
        assert!(own, "{health}");
        (there.count() == ranks).then_some(())
    });
}

#[test]
fn ranks_come_and_go_under_load_and_no_request_notices() {
    let server = Server::start(&["--ranks", "6", "--recovery", "elastic"]);
    let questions: Vec<_> = (0..24).map(Question::number).collect();
    let expected = reference(&questions);
    let is_over = AtomicBool::new(false);
    /// Ends the clients even if the test fails.
    struct Over<'a>(&'a AtomicBool);
    impl Drop for Over<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let url = &server.url;
    std::thread::scope(|scope| {
        for client in 0..3 {
            let (questions, expected, is_over) = (&questions, &expected, &is_over);
            scope.spawn(move || {
                let mut asked = 0;
                for number in (0..questions.len()).cycle().skip(client * 8) {
                    let answer = complete(url, &questions[number].body());
                    assert_eq!(answer.status, 200);
                    assert_eq!(answer.completion(), expected[number]);
                    asked += 1;
                    if is_over.load(Ordering::Relaxed) && asked > 8 {
                        return;
                    }
                }
            });
        }
        let over = Over(&is_over);
        for ranks in [3, 5, 1, 6] {
            assert_eq!(scale(&server, ranks), 202);
            parts(&server, ranks as u64);
            assert_eq!(whole(&server), (2.min(ranks as u64), ranks as u64));
            // The number of ranks does not change by itself.
            std::thread::sleep(Duration::from_millis(600));
            assert_eq!(server.health()["parts"], ranks);
            in_their_slots(&server, ranks);
        }
        drop(over);
    });
    // No rank has died.
    assert_eq!(server.metric("inference_rank_ends_total"), 0.0);
    assert_eq!(server.metric("inference_recoveries_total"), 0.0);
    // A rank that dies is replaced only on request.
    signal(server.ranks()[2], Signal::KILL);
    parts(&server, 5);
    assert_eq!(whole(&server), (2, 5));
    in_their_slots(&server, 5);
    assert_eq!(scale(&server, 6), 202);
    parts(&server, 6);
    assert_eq!(whole(&server), (2, 6));
    in_their_slots(&server, 6);
}

#[test]
fn what_lacks_comes_from_other_ranks_beside_the_service_at_the_rate_that_was_asked_for() {
    // Both experts of the dead rank have 768 KiB in two layers: two rounds of 256 KiB in a second.
    let options = ["--ranks", "4", "--recovery", "elastic", "--move-rate", "1"];
    let server = Server::start(&options);
    let question = Question::long(90);
    let expected = &reference(std::slice::from_ref(&question))[0];
    let mut stream = Stream::new(&server.url, &question.streaming());
    stream.read(5);
    signal(server.ranks()[3], Signal::KILL);
    parts(&server, 3);
    let steps = until("experts that move", || {
        let health = server.health();
        let rounds = health["moving"]["rounds"].as_u64()?;
        assert!(rounds > 4, "{health}");
        assert_eq!(
            (&health["copies"], &health["copies_planned"]),
            (&1.into(), &2.into())
        );
        health["steps"].as_u64()
    });
    until("steps beside that", || {
        let health = server.health();
        (health["steps"].as_u64() > Some(steps) && !health["moving"].is_null()).then_some(())
    });
    // If a rank dies meanwhile, the moves start again with the remaining experts.
    signal(server.ranks()[0], Signal::KILL);
    parts(&server, 2);
    assert_eq!(whole(&server), (2, 2));
    assert_eq!(stream.finish().0, *expected);
}

#[test]
fn experts_are_placed_by_how_often_they_are_chosen_in_the_middle_of_texts() {
    let options = ["--ranks", "4", "--recovery", "elastic", "--copies", "1"];
    let server = Server::start(&options);
    let questions: Vec<_> = (91..94).map(Question::long).collect();
    let expected = reference(&questions);
    let generation = server.health()["generation"].clone();
    assert!(server.health()["imbalance"].is_null());
    let mut streams: Vec<_> = questions
        .iter()
        .map(|question| Stream::new(&server.url, &question.streaming()))
        .collect();
    let mut found = Vec::new();
    for _ in 0..2 {
        for stream in &mut streams {
            let pieces = stream.pieces;
            stream.read(pieces + 20);
        }
        let answer = post(&format!("{}/admin/balance", server.url), "");
        assert_eq!(answer.status, 202, "{}", answer.text);
        until("experts in their places", || {
            let balances = server.metric("inference_expert_balances_total ");
            (balances == found.len() as f64 + 1.0).then_some(())
        });
        found.push(server.health()["imbalance"].as_f64().unwrap());
    }
    for (stream, expected) in streams.into_iter().zip(&expected) {
        assert_eq!(stream.finish().0, *expected);
    }
    // Blocks of equal size would give ranks unequal loads: experts have moved, without an interruption.
    assert!(server.metric("inference_expert_rounds_total ") > 0.0);
    assert_eq!(server.health()["generation"], generation);
    assert!(
        found.iter().all(|imbalance| (1.0..4.0).contains(imbalance)),
        "{found:?}"
    );
    let server = Server::start(&["--ranks", "1"]);
    let answer = post(&format!("{}/admin/balance", server.url), "");
    assert_eq!(answer.status, 409, "{}", answer.text);
}

#[test]
fn numbers_of_ranks_that_cannot_be_are_refused() {
    let server = Server::start(&["--ranks", "2", "--recovery", "elastic"]);
    let asked = |body: &str| post(&format!("{}/admin/ranks", server.url), body);
    for body in [
        "{\"ranks\": 0}",
        "{\"ranks\": 3}",
        "{\"ranks\": -1}",
        "{}",
        "ranks",
        "",
    ] {
        let answer = asked(body);
        assert_eq!(answer.status, 400, "{body}");
        assert!(
            answer.text.contains("a number from 1 to 2"),
            "{}",
            answer.text
        );
    }
    let server = Server::start(&["--ranks", "2"]);
    assert_eq!(scale(&server, 1), 409);
}
