//! The same server with SmolLM2, which must be downloaded first.

use rustix::process::Signal;
use serde_json::json;

use crate::client::{Stream, complete, get};
use crate::program::{Server, signal};

#[test]
#[ignore = "needs the file that scripts/get-smollm2 fetches"]
fn smollm2_goes_on_with_the_same_words_when_one_of_its_three_ranks_is_killed() {
    let server = Server::start(&["--model", "smollm2"]);
    let models = get(&format!("{}/v1/models", server.url)).json();
    assert_eq!(models["data"][0]["id"], "smollm2");
    assert_eq!(models["data"][0]["max_model_len"], 2048);
    assert_eq!(server.ranks().len(), 3);
    let mut body = json!({
        "model": "smollm2",
        "prompt": "The capital of France is",
        "max_tokens": 12,
        "temperature": 0,
    });
    let answer = complete(&server.url, &body);
    let expected = answer.completion();
    assert!(expected.starts_with(" Paris."), "{expected}");
    assert_eq!(answer.json()["usage"]["prompt_tokens"], 5);

    body["stream"] = json!(true);
    let mut stream = Stream::new(&server.url, &body);
    stream.read(3);
    signal(server.ranks()[1], Signal::KILL);
    let (text, comments) = stream.finish();
    assert_eq!(text, expected);
    assert!(
        comments.iter().any(|comment| comment.contains("SIGKILL")),
        "{comments:?}"
    );

    body["prompt"] = json!(" a".repeat(2048));
    let answer = complete(&server.url, &body);
    assert_eq!(answer.status, 400);
    let error = &answer.json()["error"];
    assert_eq!(error["code"], "context_length_exceeded");
    let message = error["message"].as_str().unwrap();
    assert!(
        message.contains("2048 tokens (pieces of words): 2047 are possible"),
        "{message}"
    );
}
