//! Many clients, and slow ones: monitoring requests are still answered.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};
use serde_json::{Value, json};

use crate::client::{Answer, Stream, complete, get};
use crate::program::{Server, signal};
use crate::tiny_llama::{self, LlamaModel};
use crate::{Question, until};

/// Sends a part of a request, and reads the answer until the connection is closed.
fn say(server: &Server, words: &str) -> String {
    let mut stream = server.connect();
    stream.write_all(words.as_bytes()).unwrap();
    rest(&mut stream)
}

fn rest(stream: &mut TcpStream) -> String {
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
        Err(error) => panic!("{error}, after {:?}", String::from_utf8_lossy(&answer)),
    }
    String::from_utf8(answer).unwrap()
}

fn is_too_many(answer: &Answer) -> bool {
    if answer.status != 503 {
        return false;
    }
    assert_eq!(answer.retry_after.as_deref(), Some("1"));
    let error = &answer.json()["error"];
    assert_eq!(error["code"], "too_many_connections");
    assert_eq!(error["type"], "server_error");
    true
}

/// Checks that monitoring requests are answered.
fn is_looked_after(server: &Server) {
    for what in ["livez", "readyz", "metrics"] {
        let answer = get(&format!("{}/{what}", server.url));
        assert_eq!(answer.status, 200, "{what}: {}", answer.text);
    }
}

#[test]
fn probes_are_answered_when_a_thousand_clients_have_all_places_and_others_are_told_to_come_again() {
    // The clients' sockets are open files as well.
    let files = getrlimit(Resource::Nofile);
    let all = Rlimit {
        current: files.maximum,
        maximum: files.maximum,
    };
    setrlimit(Resource::Nofile, all).unwrap();
    let words = ["--ranks", "1", "--slots", "1", "--queue", "1000"];
    let more = ["--connections", "1000", "--client-timeout", "60"];
    let server = Server::start(&[&words[..], &more[..]].concat());
    let mut body = Question::long(1).streaming();
    body["max_tokens"] = json!(1000);
    let body = body.to_string();
    let request = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut clients = Vec::new();
    for _ in 0..1000 {
        let mut stream = server.connect();
        stream.write_all(request.as_bytes()).unwrap();
        clients.push(stream);
    }
    // All of them have an answer that has begun.
    for client in &mut clients {
        let mut first = [0; 15];
        client.read_exact(&mut first).unwrap();
        assert_eq!(first, *b"HTTP/1.1 200 OK");
    }
    let question = Question::number(1);
    assert!(is_too_many(&complete(&server.url, &question.body())));
    is_looked_after(&server);
    drop(clients);
    until("there is room again", || {
        let answer = complete(&server.url, &question.body());
        (answer.status == 200).then_some(())
    });
}

#[test]
fn who_says_nothing_has_a_place_for_as_long_as_a_client_may_take() {
    let words = [
        "--ranks",
        "1",
        "--connections",
        "2",
        "--client-timeout",
        "2",
    ];
    let server = Server::start(&words);
    // More connections than there are places, including the reserve.
    let silent: Vec<_> = (0..100).map(|_| server.connect()).collect();
    is_looked_after(&server);
    for mut stream in silent {
        assert_eq!(rest(&mut stream), "");
    }
    let question = Question::number(1);
    until("there is room again", || {
        let answer = complete(&server.url, &question.body());
        (answer.status == 200).then_some(())
    });
}

#[test]
fn a_request_that_does_not_come_is_not_waited_for_and_an_answer_that_takes_longer_is_not_cut() {
    let server = Server::start(&["--ranks", "4", "--client-timeout", "0.5"]);
    let begun = Instant::now();
    assert_eq!(say(&server, "GET /livez HTTP/1.1\r\nho"), "");
    // Without the option the timeout would be 30 s.
    assert!(begun.elapsed() < Duration::from_secs(20));
    // A client that keeps writing headers does not get more time.
    let mut stream = server.connect();
    stream.write_all(b"GET /livez HTTP/1.1\r\n").unwrap();
    let mut written = 0;
    until("the end of the connection", || {
        std::thread::sleep(Duration::from_millis(50));
        written += 1;
        stream.write_all(b"x: y\r\n").is_err().then_some(())
    });
    // 100 are too many in any case.
    assert!(written < 90, "{written}");
    let before = "inference_requests_total{outcome=\"invalid\"}";
    assert_eq!(server.metric(before), 0.0);
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n";
    let answer = say(&server, &format!("{head}{{\"model\""));
    assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
    let (_, json) = answer.split_once("\r\n\r\n").unwrap();
    let json: Value = serde_json::from_str(json).unwrap();
    let message = json["error"]["message"].as_str().unwrap();
    assert!(message.contains("within 0.5 s"), "{message}");
    assert_eq!(server.metric(before), 1.0);
    // An invalid body is distinguished from one that ends too early.
    let chunks = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n";
    let answer = say(&server, &format!("{chunks}no number\r\n"));
    assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
    assert!(answer.contains("chunk size"), "{answer}");
    assert_eq!(server.metric(before), 2.0);
    // A client that disconnects in the middle gets no answer.
    drop({
        let mut stream = server.connect();
        stream.write_all(head.as_bytes()).unwrap();
        stream
    });
    until("that it is noticed", || {
        let gone = server.metric("inference_requests_total{outcome=\"gone\"}");
        (gone == 1.0).then_some(())
    });
    // Nor does a client that disconnects before an immediate answer.
    let mut body = Question::long(2).body();
    body["max_tokens"] = json!(900);
    let words = body.to_string();
    let mut stream = server.connect();
    let head = head.replace("100", &words.len().to_string());
    stream
        .write_all(format!("{head}{words}").as_bytes())
        .unwrap();
    until("that it runs", || {
        (server.metric("inference_requests_running") == 1.0).then_some(())
    });
    drop(stream);
    until("that it is noticed", || {
        let gone = server.metric("inference_requests_total{outcome=\"gone\"}");
        (gone == 2.0).then_some(())
    });
    body["stream"] = json!(true);
    let begun = Instant::now();
    let mut stream = Stream::new(&server.url, &body);
    stream.read_all();
    assert_eq!(stream.finish.as_deref(), Some("length"));
    assert!(begun.elapsed() > Duration::from_millis(500));
}

#[test]
fn who_does_not_read_has_a_place_for_as_long_as_a_client_may_take() {
    let words = [
        "--ranks",
        "1",
        "--connections",
        "1",
        "--client-timeout",
        "5",
    ];
    let server = Server::start(&words);
    let question = Question::number(1);
    // It asks for more and more, until nothing more is taken.
    let mut stream = until("a place", || {
        let mut stream = server.connect();
        let asked = stream.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n");
        let mut first = [0; 15];
        let read = asked.and_then(|()| stream.read_exact(&mut first));
        (read.is_ok() && first == *b"HTTP/1.1 200 OK").then_some(stream)
    });
    stream
        .set_write_timeout(Some(Duration::from_secs(1)))
        .unwrap();
    let many = "GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n".repeat(1000);
    while stream.write_all(many.as_bytes()).is_ok() {}
    assert!(is_too_many(&complete(&server.url, &question.body())));
    until("there is room again", || {
        let answer = complete(&server.url, &question.body());
        (answer.status == 200).then_some(())
    });
    drop(stream);
}

#[test]
fn probes_are_answered_while_long_texts_are_cut_into_tokens() {
    // A model with as many positions, under the name of one that is downloaded. A byte tokenizer would finish at once.
    let mut config = tiny_llama::config();
    config.max_position_embeddings = 2048;
    let model = LlamaModel::new(&config);
    let path = model.path();
    let directory = path.parent().unwrap();
    let name = directory.join("SmolLM2-135M-Instruct.Q4_1.gguf");
    std::fs::rename(&path, name).unwrap();
    // Even on a slow machine, the last of the four is served.
    let words = [
        "--model",
        "smollm2",
        "--ranks",
        "1",
        "--client-timeout",
        "300",
        "--models",
    ];
    let server = Server::start(&[&words[..], &[directory.to_str().unwrap()]].concat());
    let body = json!({"model": "smollm2", "prompt": "the time of it ".repeat(100_000)});
    let before = server.cpu_seconds();
    std::thread::scope(|scope| {
        let ask = || complete(&server.url, &body);
        let asking: Vec<_> = (0..4).map(|_| scope.spawn(ask)).collect();
        // The requests have been sent.
        until("threads that read", || {
            (server.cpu_seconds() > before + 0.1).then_some(())
        });
        is_looked_after(&server);
        assert!(
            !asking.iter().any(|one| one.is_finished()),
            "they were read before"
        );
        for answer in asking {
            let answer = answer.join().unwrap();
            assert_eq!(answer.status, 400);
            assert_eq!(answer.json()["error"]["code"], "context_length_exceeded");
        }
    });
}

#[test]
fn however_many_ask_after_ranks_that_do_not_answer_few_threads_wait() {
    let server = Server::start(&["--ranks", "2", "--deadline", "50"]);
    let before = server.threads();
    let pid = server.ranks()[1];
    signal(pid, Signal::STOP);
    until("that it is stopped", || {
        let state = &server.health()["ranks"][1]["state"];
        (*state == "frozen").then_some(())
    });
    let url = &server.url;
    std::thread::scope(|scope| {
        let health = || get(&format!("{url}/health"));
        let healths: Vec<_> = (0..40).map(|_| scope.spawn(health)).collect();
        let timeline = || get(&format!("{url}/debug/timeline"));
        let timelines: Vec<_> = (0..4).map(|_| scope.spawn(timeline)).collect();
        let mut not_asked = 0;
        for answer in healths {
            let answer = answer.join().unwrap();
            assert_eq!(answer.status, 200);
            let json = answer.json();
            assert_eq!(json["ranks"][1]["state"], "frozen");
            match json["not_asked"].as_str() {
                None => assert_eq!(json["ranks"][0]["phase"], "serve"),
                Some(why) => {
                    not_asked += 1;
                    assert!(why.contains("others ask"), "{why}");
                    assert!(json["ranks"][0]["phase"].is_null());
                }
            }
        }
        assert!(not_asked > 0 && not_asked < 40, "{not_asked}");
        // Idle threads are kept for a while.
        let threads = server.threads();
        println!("{before} threads before, {threads} then; {not_asked} of 40 asked nobody");
        assert!(threads < before + 20, "{before} threads, then {threads}");
        let (mut answered, mut later) = (0, 0);
        for answer in timelines {
            let answer = answer.join().unwrap();
            match answer.status {
                200 => answered += 1,
                503 => {
                    later += 1;
                    assert_eq!(answer.retry_after.as_deref(), Some("1"));
                }
                status => panic!("{status}: {}", answer.text),
            }
        }
        assert!(answered > 0 && later > 0, "{answered}, {later}");
    });
    signal(pid, Signal::CONT);
    server.until_ready();
}
