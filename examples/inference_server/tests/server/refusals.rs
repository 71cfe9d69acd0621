//! Refused requests, and their errors.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::client::{Stream, complete, get, post};
use crate::program::{Server, command, ends, for_gpus};
use crate::{Question, until};

#[test]
fn what_cannot_be_answered_is_refused_in_openais_words() {
    let server = Server::start(&["--ranks", "1"]);
    let url = &server.url;
    let refused = |body: &str| {
        let answer = post(&format!("{url}/v1/completions"), body);
        (answer.status, answer.json()["error"].clone())
    };
    let (status, error) = refused(r#"{"model": "gpt-9", "prompt": "x"}"#);
    assert_eq!((status, &error["code"]), (404, &json!("model_not_found")));
    let message = error["message"].as_str().unwrap();
    let expected = "there is no model \"gpt-9\" here: this server serves tiny, and the option --model starts it with \
                    one of tiny, smollm2";
    assert_eq!(message, expected);
    let (status, error) = refused("{\"model\": \"tiny\"");
    assert_eq!(
        (status, &error["type"]),
        (400, &json!("invalid_request_error"))
    );
    let long = json!({"model": "tiny", "prompt": "x".repeat(2000)});
    let (status, error) = refused(&long.to_string());
    assert_eq!(
        (status, &error["code"]),
        (400, &json!("context_length_exceeded"))
    );
    let (status, error) = refused(r#"{"model": "tiny", "prompt": "x", "temperature": -1}"#);
    assert_eq!((status, &error["param"]), (400, &json!("temperature")));
    // Even if a client reads no answer before it has sent everything.
    for more in [1, 6 << 20] {
        let (status, error) = refused(&"x".repeat((2 << 20) + more));
        assert_eq!(
            (status, &error["type"]),
            (413, &json!("invalid_request_error"))
        );
    }
    let answer = get(&format!("{url}/v1/nothing"));
    assert_eq!(answer.status, 404);
    let message = answer.json()["error"]["message"].clone();
    let message = message.as_str().unwrap();
    assert!(
        message.contains("/v1/nothing") && message.contains("/v1/completions"),
        "{message}"
    );
    let answer = get(&format!("{url}/v1/completions"));
    assert_eq!(answer.status, 405);
    assert_eq!(
        server.metric("inference_requests_total{outcome=\"invalid\"}"),
        6.0
    );
    // The refused requests did no harm.
    complete(url, &Question::number(2).body()).completion();
}

#[test]
fn who_comes_when_the_queue_is_full_is_told_to_come_again_and_a_client_that_goes_away_makes_room() {
    let server = Server::start(&["--ranks", "1", "--slots", "1", "--queue", "1"]);
    let url = &server.url;
    let endless = |seed| {
        let mut body = Question::long(seed).streaming();
        body["max_tokens"] = json!(1000);
        body
    };
    let mut running = Stream::new(url, &endless(1));
    running.read(1);
    let mut waiting = Stream::new(url, &endless(2));
    until("one waits", || {
        (server.metric("inference_requests_waiting") == 1.0).then_some(())
    });
    let answer = complete(url, &Question::number(1).body());
    assert_eq!(answer.status, 429);
    assert_eq!(answer.retry_after.as_deref(), Some("1"));
    assert_eq!(answer.json()["error"]["code"], "queue_full");
    // The client disconnects in the middle of its text.
    drop(running);
    waiting.read(1);
    until("nobody waits", || {
        (server.metric("inference_requests_waiting") == 0.0).then_some(())
    });
    let made = server.metric("inference_generated_tokens_total");
    assert!(
        made < 900.0,
        "{made} tokens were made for a client that had gone away"
    );
    drop(waiting);
    until("nothing runs", || {
        (server.metric("inference_requests_running") == 0.0).then_some(())
    });
    complete(url, &Question::number(1).body()).completion();
    assert_eq!(
        server.metric("inference_requests_total{outcome=\"gone\"}"),
        2.0
    );
}

fn fails(arguments: &[&str]) -> (Option<i32>, String) {
    ends(command(arguments))
}

/// Returns a server that may open this many files.
fn with_files(number: usize, arguments: &[&str]) -> Command {
    let server = command(arguments);
    let mut shell = Command::new("sh");
    let words = format!("ulimit -n {number}; exec \"$0\" \"$@\"");
    shell.args(["-c", &words]).arg(server.get_program());
    shell.args(server.get_args()).stdin(Stdio::null());
    shell.stdout(Stdio::null()).stderr(Stdio::piped());
    shell
}

#[test]
fn a_server_that_cannot_begin_says_why_and_what_to_do() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let (code, text) = fails(&["--ranks", "2", "--listen", &address]);
    assert_eq!(code, Some(1), "{text}");
    assert!(
        text.contains(&address) && text.contains("--listen"),
        "{text}"
    );
    let (code, text) = fails(&["--model", "gpt-9"]);
    assert_eq!(code, Some(2));
    assert!(
        text.contains("\"gpt-9\": there are tiny, smollm2"),
        "{text}"
    );
    let (code, text) = fails(&["--ranks", "3"]);
    assert_eq!(code, Some(1));
    assert!(text.contains("take 1, 2, 4 or 8 ranks"), "{text}");
    let (code, text) = fails(&["--model", "smollm2", "--models", "/nowhere"]);
    assert_eq!(code, Some(1));
    assert!(
        text.contains("/nowhere/SmolLM2") && text.contains("scripts/get-smollm2"),
        "{text}"
    );
    let (code, text) = ends(with_files(256, &["--connections", "200"]));
    assert_eq!(code, Some(1), "{text}");
    assert!(
        text.contains("--connections 200") && text.contains("enough for 128; `ulimit -n 328`"),
        "{text}"
    );
    let (code, text) = fails(&["--recovery", "pray"]);
    assert_eq!(code, Some(2), "{text}");
}

#[test]
fn without_a_gpu_the_server_ends_with_one_error_that_names_the_flag() {
    let mut server = for_gpus(&["--ranks", "2", "--listen", "127.0.0.1:0"]);
    // On a machine with GPUs, the server does not see them either.
    server.env("CUDA_VISIBLE_DEVICES", "");
    let (code, text) = ends(server);
    assert_eq!(code, Some(1), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    let begins = text.starts_with("inference-server: there is no GPU to run on: ");
    assert!(begins && text.contains("--emulator"), "{text}");
}

#[test]
fn ranks_that_end_again_and_again_are_not_started_for_ever() {
    let mut server = command(&["--ranks", "2", "--listen", "127.0.0.1:0"]);
    // An invalid value for every rank.
    server.env("NCCL_EMULATOR_DEVICES", "some");
    let (code, text) = ends(server);
    assert_eq!(code, Some(1), "{text}");
    let last = text.lines().last().unwrap();
    let expected = "inference-server: ranks were started again 10 times with nothing done in between; the last end: rank";
    assert!(last.starts_with(expected), "{text}");
    assert!(text.contains("NCCL_EMULATOR_DEVICES"), "{text}");
}

#[test]
fn those_who_wait_are_told_why_the_server_gives_up() {
    let mut command = command(&["--ranks", "1", "--listen", "127.0.0.1:0"]);
    command.env("NCCL_EMULATOR_DEVICES", "some");
    let mut server = Server::begin(command);
    let url = server.url.clone();
    let question = Question::number(1);
    let (answer, stream) = std::thread::scope(|scope| {
        let answer = scope.spawn(|| complete(&url, &question.body()));
        let mut stream = Stream::new(&url, &question.streaming());
        while stream.next() {}
        (answer.join().unwrap(), stream)
    });
    assert_eq!(answer.status, 503);
    assert_eq!(answer.retry_after.as_deref(), Some("1"));
    assert!(!stream.done);
    for error in [answer.json()["error"].clone(), stream.error.unwrap()] {
        assert_eq!(error["type"], "server_error");
        let message = error["message"].as_str().unwrap();
        assert!(
            message.starts_with("ranks were started again 10 times with nothing done in between"),
            "{message}"
        );
    }
    assert_eq!(server.until_ended().code(), Some(1));
}

#[test]
fn what_is_asked_in_another_way_is_answered_with_the_ways_that_there_are() {
    let server = Server::start(&["--ranks", "1"]);
    let ask = |method: &str, path: &str| {
        let mut stream = server.connect();
        let request = format!("{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    // The same answer, without its body.
    let (whole, head) = (ask("GET", "/livez"), ask("HEAD", "/livez"));
    assert!(
        whole.starts_with("HTTP/1.1 200 ") && whole.ends_with("alive\n"),
        "{whole}"
    );
    assert!(
        head.starts_with("HTTP/1.1 200 ") && head.ends_with("\r\n\r\n"),
        "{head}"
    );
    for (method, path, allowed) in [
        ("OPTIONS", "/v1/completions", "allow: POST\r\n"),
        ("GET", "/v1/completions", "allow: POST\r\n"),
        ("DELETE", "/v1/models", "allow: GET,HEAD\r\n"),
        ("POST", "/readyz", "allow: GET,HEAD\r\n"),
    ] {
        let answer = ask(method, path);
        assert!(answer.starts_with("HTTP/1.1 405 "), "{answer}");
        assert!(answer.contains(allowed), "{answer}");
        let (_, json) = answer.split_once("\r\n\r\n").unwrap();
        let json: Value = serde_json::from_str(json).unwrap();
        let message = json["error"]["message"].as_str().unwrap();
        assert!(
            message.starts_with(&format!("{method} is not for {path}")),
            "{message}"
        );
    }
}

#[test]
fn an_unknown_field_is_not_looked_at() {
    let server = Server::start(&["--ranks", "1"]);
    let mut body = Question::number(4).body();
    body["user"] = Value::from("somebody");
    assert_eq!(complete(&server.url, &body).status, 200);
}
