//! `POST /v1/completions` and `GET /v1/models`.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tokio::sync::mpsc::{self, UnboundedReceiver};

use super::Server;
use super::ask::Ask;
use super::body::{self, NoBody};
use super::refusal::{Refusal, in_json};
use super::server::Ticket;
use super::stream;
use crate::front::caller::{Caller, Said};
use crate::front::engine::Event;
use crate::front::scheduler::{Finish, Request};
use crate::front::view::unix_seconds;

/// The longest body that is parsed on the runtime's own threads, in bytes.
const SHORT: usize = 4 << 10;

/// The common fields of all parts of an answer.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    id: String,
    created: u64,
    model: &'static str,
}

impl Answer {
    /// Returns the answer with one choice, or none.
    pub(super) fn json(&self, choice: Option<(&str, Option<Finish>)>) -> Value {
        let choice = choice.map(|(text, finish)| {
            let finish = finish.map(|finish| match finish {
                Finish::Stop => "stop",
                Finish::Length => "length",
            });
            json!({"index": 0, "text": text, "logprobs": null, "finish_reason": finish})
        });
        json!({
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choice.into_iter().collect::<Vec<_>>(),
        })
    }
}

pub(super) fn usage(prompt: usize, made: usize) -> Value {
    json!({"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made})
}

/// Returns a random number.
fn chance() -> u64 {
    RandomState::new().hash_one(0)
}

pub(super) async fn complete(State(server): State<Arc<Server>>, body: Body) -> Response {
    let ticket = Ticket::new(&server);
    let taken = match begin(&server, body).await {
        Ok(taken) => taken,
        Err((outcome, refusal)) => {
            ticket.ends(outcome);
            return refusal.into_response();
        }
    };
    let answer = Answer {
        id: format!("cmpl-{:016x}", chance()),
        created: unix_seconds(),
        model: server.model,
    };
    match taken.pieces {
        Some(usage) => stream::respond(ticket, answer, taken.said, usage),
        None => match whole(&answer, taken.said).await {
            Ok(json) => {
                ticket.ends("done");
                in_json(StatusCode::OK, &json)
            }
            Err(refusal) => {
                ticket.ends("failed");
                refusal.into_response()
            }
        },
    }
}

/// A request that has a place in the queue.
struct Taken {
    said: UnboundedReceiver<Said>,
    /// For an answer in pieces: whether the last piece is the usage.
    pieces: Option<bool>,
}

/// Reads a request. Long texts take long to tokenize, so separate threads do that, a few at a time.
async fn read(server: &Arc<Server>, body: Vec<u8>) -> Result<Ask, (&'static str, Refusal)> {
    let invalid = |refusal| ("invalid", refusal);
    let read = |server: &Server, body: &[u8]| {
        let (tokenizer, settings) = (&server.tokenizer, &server.settings);
        Ask::read(body, server.model, tokenizer, settings, chance())
    };
    if body.len() <= SHORT {
        return read(server, &body).map_err(invalid);
    }
    let permit = Arc::clone(&server.readers).acquire_owned();
    let Ok(permit) = tokio::time::timeout(server.client_timeout, permit).await else {
        let text = "other long prompts are being read: try again later";
        let refusal = Refusal::new(StatusCode::SERVICE_UNAVAILABLE, text);
        return Err(("refused", refusal));
    };
    let server = Arc::clone(server);
    let reading = tokio::task::spawn_blocking(move || {
        let ask = read(&server, &body);
        // Held until the work is done, even if the client disconnects meanwhile.
        drop(permit);
        ask
    });
    let ask = reading.await;
    let ask = ask.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()));
    ask.map_err(invalid)
}

async fn begin(server: &Arc<Server>, body: Body) -> Result<Taken, (&'static str, Refusal)> {
    let invalid = |refusal| ("invalid", refusal);
    let body = body::read(body, server.client_timeout).await;
    let body = body.map_err(|error| match error {
        NoBody::Refused(refusal) => invalid(refusal),
        NoBody::Gone => {
            let text = "the body of the request ended before it was whole";
            ("gone", Refusal::new(StatusCode::BAD_REQUEST, text))
        }
    })?;
    let ask = read(server, body).await?;
    let (to, mut said) = mpsc::unbounded_channel();
    let request = Request {
        prompt: ask.prompt,
        most: ask.most,
        draw: ask.draw,
        client: Caller::new(to, server.tokenizer.clone(), ask.stops),
    };
    // If the engine is gone, no message arrives.
    let _ = server.engine.send(Event::Ask(request));
    match said.recv().await {
        Some(Said::Full) => {
            let text = format!(
                "all {} slots are taken, and {} requests wait already: try again later",
                server.settings.slots, server.queue
            );
            let refusal = Refusal::new(StatusCode::TOO_MANY_REQUESTS, text);
            Err(("refused", refusal.code("queue_full")))
        }
        Some(Said::Failed(why)) => Err(("failed", failed(Some(why)))),
        None => Err(("failed", failed(None))),
        Some(_) => Ok(Taken {
            said,
            pieces: ask.stream.then_some(ask.usage),
        }),
    }
}

/// Returns the refusal for a failed answer.
pub(super) fn failed(why: Option<String>) -> Refusal {
    let why = why.unwrap_or_else(|| String::from("the server has ended"));
    Refusal::new(StatusCode::SERVICE_UNAVAILABLE, why)
}

/// Returns a whole answer. Stops early when the client disconnects.
async fn whole(answer: &Answer, mut said: UnboundedReceiver<Said>) -> Result<Value, Refusal> {
    let mut text = String::new();
    loop {
        match said.recv().await {
            Some(Said::Text(more)) => text += &more,
            Some(Said::End {
                text: more,
                why,
                prompt,
                made,
            }) => {
                text += &more;
                let mut json = answer.json(Some((&text, Some(why))));
                json["usage"] = usage(prompt, made);
                return Ok(json);
            }
            Some(Said::Failed(why)) => return Err(failed(Some(why))),
            None => return Err(failed(None)),
            Some(Said::Taken | Said::Full | Said::Stalled(_) | Said::GoesOn(_)) => {}
        }
    }
}

pub(super) async fn models(State(server): State<Arc<Server>>) -> Response {
    let model = json!({
        "id": server.model,
        "object": "model",
        "created": 0,
        "owned_by": "nccl",
        "max_model_len": server.settings.positions,
    });
    in_json(StatusCode::OK, &json!({"object": "list", "data": [model]}))
}
