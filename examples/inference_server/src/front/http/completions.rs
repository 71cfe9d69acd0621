//! `POST /v1/completions` and `GET /v1/models`.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::Server;
use super::ask::Ask;
use super::refusal::{Refusal, in_json};
use super::stream;
use crate::front::caller::{Caller, Said};
use crate::front::engine::Event;
use crate::front::scheduler::{Finish, Request};
use crate::front::view::unix_seconds;

/// What all parts of an answer have in common.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    id: String,
    created: u64,
    model: String,
}

impl Answer {
    /// With one choice, or none.
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

/// A number that nobody else has.
fn chance() -> u64 {
    RandomState::new().hash_one(0)
}

pub(super) async fn complete(
    State(server): State<Arc<Server>>,
    body: Result<Bytes, BytesRejection>,
) -> Response {
    match begin(&server, body).await {
        Ok(response) => response,
        Err((outcome, refusal)) => {
            server.count(outcome);
            refusal.into_response()
        }
    }
}

async fn begin(
    server: &Arc<Server>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, (&'static str, Refusal)> {
    let invalid = |refusal| ("invalid", refusal);
    let body = body.map_err(|error| invalid(Refusal::new(error.status(), error.body_text())))?;
    let ask = Ask::read(
        &body,
        &server.model,
        &server.tokenizer,
        &server.settings,
        chance(),
    )
    .map_err(invalid)?;
    let (to, mut said) = mpsc::unbounded_channel();
    let request = Request {
        prompt: ask.prompt,
        most: ask.most,
        draw: ask.draw,
        client: Caller::new(to, server.tokenizer.clone(), ask.stops),
    };
    let over = || {
        let text = "the server is ending: ask another one";
        let refusal = Refusal::new(StatusCode::SERVICE_UNAVAILABLE, text);
        ("failed", refusal)
    };
    server
        .engine
        .send(Event::Ask(request))
        .map_err(|_| over())?;
    match said.recv().await {
        Some(Said::Taken) => {}
        Some(Said::Full) => {
            let text = format!(
                "all {} slots are taken, and {} requests wait already: try again later",
                server.settings.slots, server.queue
            );
            let refusal = Refusal::new(StatusCode::TOO_MANY_REQUESTS, text);
            return Err(("refused", refusal.code("queue_full")));
        }
        _ => return Err(over()),
    }
    let answer = Answer {
        id: format!("cmpl-{:016x}", chance()),
        created: unix_seconds(),
        model: server.model.clone(),
    };
    if ask.stream {
        return Ok(stream::respond(server, answer, said, ask.usage));
    }
    // Nobody waits any more when the client has gone away: then this is dropped here, and counted nowhere.
    let mut text = String::new();
    while let Some(said) = said.recv().await {
        match said {
            Said::Text(more) => text += &more,
            Said::End {
                text: more,
                why,
                prompt,
                made,
            } => {
                text += &more;
                let mut json = answer.json(Some((&text, Some(why))));
                json["usage"] = usage(prompt, made);
                server.count("done");
                return Ok(in_json(StatusCode::OK, &json));
            }
            Said::Failed(_) => break,
            Said::Taken | Said::Full | Said::Stalled(_) | Said::GoesOn(_) => {}
        }
    }
    Err(over())
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
