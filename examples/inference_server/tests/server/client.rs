//! An HTTP client.

use std::io::{BufRead, BufReader};
use std::time::Duration;

use serde_json::Value;
use ureq::{Agent, Body, BodyReader};

/// An answer.
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) retry_after: Option<String>,
    pub(crate) text: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    /// The text of a completion.
    pub(crate) fn completion(&self) -> String {
        assert_eq!(self.status, 200, "{}", self.text);
        let json = self.json();
        json["choices"][0]["text"].as_str().unwrap().to_owned()
    }
}

fn agent() -> Agent {
    let config = Agent::config_builder()
        // Longer than the waits for events: a long text takes minutes on a busy machine.
        .timeout_global(Some(Duration::from_secs(300)))
        .http_status_as_error(false);
    config.build().into()
}

fn read(mut response: ureq::http::Response<Body>) -> Answer {
    let retry_after = response.headers().get("retry-after");
    Answer {
        status: response.status().as_u16(),
        retry_after: retry_after.map(|value| value.to_str().unwrap().to_owned()),
        text: response.body_mut().read_to_string().unwrap(),
    }
}

pub(crate) fn get(url: &str) -> Answer {
    read(agent().get(url).call().unwrap())
}

pub(crate) fn post(url: &str, body: &str) -> Answer {
    read(agent().post(url).send(body).unwrap())
}

/// Asks for a completion.
pub(crate) fn complete(server: &str, body: &Value) -> Answer {
    post(&format!("{server}/v1/completions"), &body.to_string())
}

/// A completion that arrives in pieces. Dropping it closes its connection.
pub(crate) struct Stream {
    lines: std::io::Lines<BufReader<BodyReader<'static>>>,
    pub(crate) text: String,
    pub(crate) comments: Vec<String>,
    pub(crate) pieces: usize,
    pub(crate) finish: Option<String>,
    pub(crate) usage: Option<Value>,
    /// The number of pieces with a null usage.
    pub(crate) unused: usize,
    pub(crate) error: Option<Value>,
    pub(crate) done: bool,
}

impl Stream {
    pub(crate) fn new(server: &str, body: &Value) -> Self {
        let url = format!("{server}/v1/completions");
        let response = agent().post(&url).send(body.to_string()).unwrap();
        assert_eq!(response.status().as_u16(), 200);
        let kind = response.headers()["content-type"].to_str().unwrap();
        assert!(kind.starts_with("text/event-stream"), "{kind}");
        Self {
            lines: BufReader::new(response.into_body().into_reader()).lines(),
            text: String::new(),
            comments: Vec::new(),
            pieces: 0,
            finish: None,
            usage: None,
            unused: 0,
            error: None,
            done: false,
        }
    }

    /// Reads a line; false at the end.
    pub(crate) fn next(&mut self) -> bool {
        let Some(line) = self.lines.next() else {
            return false;
        };
        let line = line.unwrap();
        if let Some(comment) = line.strip_prefix(':') {
            self.comments.push(comment.trim().to_owned());
        } else if line == "data: [DONE]" {
            self.done = true;
        } else if let Some(data) = line.strip_prefix("data: ") {
            let json: Value = serde_json::from_str(data).unwrap();
            if json["error"].is_object() {
                self.error = Some(json["error"].clone());
                return true;
            }
            if json["usage"].is_object() {
                assert_eq!(json["choices"], Value::Array(Vec::new()));
                self.usage = Some(json["usage"].clone());
                return true;
            }
            self.text += json["choices"][0]["text"].as_str().unwrap();
            self.finish = json["choices"][0]["finish_reason"]
                .as_str()
                .map(str::to_owned);
            self.pieces += 1;
            self.unused += usize::from(json.get("usage") == Some(&Value::Null));
        } else {
            assert_eq!(line, "");
        }
        true
    }

    /// Reads this many pieces.
    pub(crate) fn read(&mut self, pieces: usize) {
        while self.pieces < pieces {
            assert!(self.next(), "the stream has ended: {:?}", self.text);
            assert_eq!(self.error, None);
        }
    }

    /// Reads the rest, and returns the text.
    pub(crate) fn finish(mut self) -> (String, Vec<String>) {
        self.read_all();
        (self.text, self.comments)
    }

    pub(crate) fn read_all(&mut self) {
        while self.next() {}
        assert_eq!(self.error, None);
        assert!(self.done, "no end after {:?}", self.text);
    }
}
