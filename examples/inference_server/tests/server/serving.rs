//! Answers equal those of a single process.

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::client::{Stream, complete, get};
use crate::program::{Server, signal};
use crate::{Question, reference, until};

#[test]
fn sixteen_clients_at_once_get_what_a_single_process_says_on_all_numbers_of_ranks() {
    let questions: Vec<_> = (0..16).map(Question::number).collect();
    let expected = reference(&questions);
    for ranks in ["1", "2", "4"] {
        let server = Server::start(&["--ranks", ranks]);
        let url = &server.url;
        let found: Vec<String> = std::thread::scope(|scope| {
            let asking: Vec<_> = questions
                .iter()
                .enumerate()
                .map(|(number, question)| {
                    scope.spawn(move || match number % 2 {
                        0 => complete(url, &question.body()).completion(),
                        _ => Stream::new(url, &question.streaming()).finish().0,
                    })
                })
                .collect();
            asking.into_iter().map(|one| one.join().unwrap()).collect()
        });
        assert_eq!(found, expected, "{ranks} ranks");
        assert_eq!(
            server.metric("inference_requests_total{outcome=\"done\"}"),
            16.0
        );
        until("that nobody is worked on", || {
            (server.metric("inference_requests_running") == 0.0).then_some(())
        });
        assert_eq!(server.metric("inference_rank_ends_total"), 0.0);
    }
}

#[test]
fn an_answer_has_the_shape_that_clients_know_and_ends_where_it_is_told_to() {
    let server = Server::start(&["--ranks", "2"]);
    let question = Question::long(3);
    let whole = &reference(std::slice::from_ref(&question))[0];
    let answer = complete(&server.url, &question.body()).json();
    assert_eq!(answer["object"], "text_completion");
    assert_eq!(answer["choices"][0]["text"], **whole);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(answer["usage"]["prompt_tokens"], 16);
    assert_eq!(answer["usage"]["total_tokens"], 16 + 150);

    // The first place of some two characters.
    let (at, _) = whole.char_indices().nth(20).unwrap();
    let stop: String = whole[at..].chars().take(2).collect();
    let before = &whole[..whole.find(&stop).unwrap()];
    let mut body = question.body();
    body["stop"] = json!([stop]);
    let answer = complete(&server.url, &body).json();
    assert_eq!(answer["choices"][0]["text"], *before);
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    body["stream"] = json!(true);
    let (text, comments) = Stream::new(&server.url, &body).finish();
    assert_eq!(text, before);
    assert!(comments.is_empty(), "{comments:?}");
    let mut stream = Stream::new(&server.url, &body);
    stream.read_all();
    assert_eq!((stream.unused, stream.usage), (0, None));

    let models = get(&format!("{}/v1/models", server.url)).json();
    assert_eq!(models["data"][0]["id"], "tiny");
    assert_eq!(get(&format!("{}/livez", server.url)).status, 200);
}

#[test]
fn how_it_stands_with_the_ranks_and_what_they_did_last_can_be_seen() {
    let server = Server::start(&["--ranks", "2"]);
    complete(&server.url, &Question::number(1).body()).completion();
    let health = server.health();
    assert_eq!(
        (&health["ready"], &health["generation"]),
        (&json!(true), &json!(0))
    );
    for (number, rank) in health["ranks"].as_array().unwrap().iter().enumerate() {
        assert_eq!(rank["rank"], number);
        assert_eq!(rank["state"], "serving");
        assert_eq!(rank["phase"], "serve");
        assert!(rank["host"].is_string());
        assert_eq!(rank["slot"], rank["rank"]);
        assert_eq!(rank["last_operation"]["operation"], "all_gather", "{rank}");
        assert!(rank["last_operation"]["age_seconds"].as_f64().unwrap() < 60.0);
    }
    let steps = server.metric("inference_step_seconds_total");
    let share = server.metric("inference_communication_seconds_total") / steps;
    assert!(share > 0.0 && share <= 1.0, "{share}");
    let trace = get(&format!("{}/debug/timeline", server.url)).json();
    let events = trace["traceEvents"].as_array().unwrap();
    let pids: std::collections::BTreeSet<_> = events
        .iter()
        .filter_map(|event| event["pid"].as_u64())
        .collect();
    assert_eq!(pids.len(), 2, "{pids:?}");
}

/// Returns a completion in one or many pieces: its text, why it ended, and its reported usage.
fn all_of(server: &Server, body: &Value) -> (String, String, Value) {
    if body["stream"] == true {
        let mut stream = Stream::new(&server.url, body);
        stream.read_all();
        assert_eq!(stream.unused, stream.pieces);
        (stream.text, stream.finish.unwrap(), stream.usage.unwrap())
    } else {
        let answer = complete(&server.url, body);
        let (text, json) = (answer.completion(), answer.json());
        let why = json["choices"][0]["finish_reason"].as_str().unwrap();
        (text, why.to_owned(), json["usage"].clone())
    }
}

#[test]
fn usage_counts_what_the_client_got_and_the_metrics_what_was_drawn() {
    let server = Server::start(&["--ranks", "2"]);
    let question = Question {
        temperature: 0.0,
        ..Question::long(3)
    };
    let whole = &reference(std::slice::from_ref(&question))[0];
    assert!(whole.is_ascii(), "{whole:?}");
    let stop = &whole[60..72];
    let before = &whole[..whole.find(stop).unwrap()];
    let usage = |made: usize| json!({"prompt_tokens": 16, "completion_tokens": made, "total_tokens": 16 + made});
    let mut drawn = 0.0;
    for stream in [false, true] {
        let mut body = question.body();
        body["stream"] = json!(stream);
        body["stream_options"] = json!({"include_usage": true});
        let expected = (whole.clone(), String::from("length"), usage(150));
        assert_eq!(all_of(&server, &body), expected);
        drawn += 150.0;
        assert_eq!(server.metric("inference_generated_tokens_total"), drawn);
        body["stop"] = json!(stop);
        let expected = (before.to_owned(), String::from("stop"), usage(before.len()));
        assert_eq!(all_of(&server, &body), expected);
        // A token is a byte.
        drawn += (before.len() + stop.len()) as f64;
        assert_eq!(server.metric("inference_generated_tokens_total"), drawn);
    }
    assert_eq!(server.metric("inference_prompt_tokens_total"), 4.0 * 16.0);
    assert_eq!(
        server.metric("inference_requests_total{outcome=\"done\"}"),
        4.0
    );
}

#[test]
fn a_text_stops_at_the_same_place_and_costs_the_same_when_a_rank_is_killed_meanwhile() {
    let server = Server::start(&["--ranks", "2"]);
    let question = Question {
        most: 700,
        ..Question::long(70)
    };
    let whole = &reference(std::slice::from_ref(&question))[0];
    // Tokens are bytes, so that each stop text has many tokens and is held back piece by piece; the other stop text never
    // completes.
    let characters: Vec<char> = whole.chars().collect();
    let stop: String = characters[450..462].iter().collect();
    let other: String = characters[300..306].iter().chain(&['\u{1}']).collect();
    let before = &whole[..whole.find(&stop).unwrap()];
    assert!(
        before.chars().count() > 300 && !whole.contains(&other),
        "{whole:?}"
    );
    let mut body = question.body();
    body["stop"] = json!([other, stop]);
    let expected = all_of(&server, &body);
    assert_eq!((expected.0.as_str(), expected.1.as_str()), (before, "stop"));
    let made = expected.2["completion_tokens"].as_f64().unwrap();

    let drawn = || server.metric("inference_generated_tokens_total");
    for (rank, streaming) in [(0, false), (1, true), (1, false), (0, true)] {
        body["stream"] = json!(streaming);
        body["stream_options"] = json!({"include_usage": true});
        let begun = drawn();
        let recoveries = server.metric("inference_recoveries_total");
        let pid = server.ranks()[rank];
        let found = std::thread::scope(|scope| {
            let asking = scope.spawn(|| all_of(&server, &body));
            until("some of it is there", || {
                (drawn() > begun + 50.0).then_some(())
            });
            assert!(drawn() < begun + made, "it was over before");
            signal(pid, Signal::KILL);
            asking.join().unwrap()
        });
        assert_eq!(found, expected, "rank {rank}, streaming: {streaming}");
        assert!(server.metric("inference_recoveries_total") > recoveries);
    }
}

#[test]
fn the_front_has_neither_cuda_nor_nccl_and_its_ranks_have() {
    let server = Server::start(&["--ranks", "2"]);
    complete(&server.url, &Question::number(1).body()).completion();
    assert!(get(&format!("{}/debug/timeline", server.url)).status == 200);
    // The emulator uses the same library names.
    let loaded = |pid| {
        let maps = Server::maps(pid);
        ["libcuda", "libnccl"].map(|library| maps.contains(library))
    };
    for pid in server.ranks() {
        assert_eq!(loaded(pid), [true, true], "{}", Server::maps(pid));
    }
    let maps = Server::maps(server.pid());
    assert_eq!(loaded(server.pid()), [false, false], "{maps}");
    assert!(
        !maps.contains("nccl-emu") && !maps.contains("nccl_emu"),
        "{maps}"
    );
}
