//! Answers are those of a single process.

use serde_json::json;

use crate::client::{Stream, complete, get};
use crate::program::Server;
use crate::{Question, reference};

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
        assert_eq!(server.metric("inference_requests_running"), 0.0);
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
        (&health["ready"], &health["epoch"]),
        (&json!(true), &json!(0))
    );
    for (number, rank) in health["ranks"].as_array().unwrap().iter().enumerate() {
        assert_eq!(rank["rank"], number);
        assert_eq!(rank["state"], "serving");
        assert_eq!(rank["phase"], "serve");
        assert!(rank["host"].is_string());
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
