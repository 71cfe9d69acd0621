//! Health, readiness, and the state of the ranks.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use nccl::Observer;
use nccl::control::RankState;
use nccl::recorder::Timeline;
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::Server;
use super::body::{self, NoBody};
use super::refusal::{Refusal, in_json};
use crate::front::engine::Event;

/// How long ranks may take to send their recordings: for `/health`, and for a timeline.
const GLANCE: Duration = Duration::from_millis(300);
const LOOK: Duration = Duration::from_secs(5);

/// Returns 200 if the server would process a request now, otherwise 503 with the cause.
pub(super) async fn ready(State(server): State<Arc<Server>>) -> Response {
    let view = server.view();
    match view.trouble() {
        None => {
            let generation = view.serving.map(|(generation, ..)| generation);
            in_json(
                StatusCode::OK,
                &json!({"ready": true, "generation": generation}),
            )
        }
        Some(trouble) => {
            let mut json = json!(trouble);
            json["ready"] = Value::from(false);
            in_json(StatusCode::SERVICE_UNAVAILABLE, &json)
        }
    }
}

/// Changes the number of ranks: `{"ranks": 6}`. Answers before the change is complete; [`health`] reports its progress.
pub(super) async fn scale(State(server): State<Arc<Server>>, body: Body) -> Response {
    let body = match body::read(body, server.client_timeout).await {
        Ok(body) => body,
        Err(NoBody::Refused(refusal)) => return refusal.into_response(),
        // The client has disconnected and reads no answer.
        Err(NoBody::Gone) => return StatusCode::BAD_REQUEST.into_response(),
    };
    let Some(most) = server.ranks else {
        let text = "the number of ranks does not change: it does with --recovery elastic";
        return Refusal::new(StatusCode::CONFLICT, text).into_response();
    };
    let asked: Result<Value, _> = serde_json::from_slice(&body);
    let asked = asked.ok().and_then(|asked| asked["ranks"].as_u64());
    let asked = asked.and_then(|asked| usize::try_from(asked).ok());
    let Some(ranks) = asked.filter(|ranks| (1..=most).contains(ranks)) else {
        let text = format!("ranks: a number from 1 to {most}, with which the server was started");
        return Refusal::of("ranks", text).into_response();
    };
    tell(&server, Event::Scale(ranks), &json!({"ranks": ranks}))
}

/// Moves the experts according to how often each was chosen. Answers before the moves are complete; [`health`] reports their
/// progress.
pub(super) async fn balance(State(server): State<Arc<Server>>) -> Response {
    if server.ranks.is_none() {
        let text = "the experts stay where they are: they move with --recovery elastic";
        return Refusal::new(StatusCode::CONFLICT, text).into_response();
    }
    tell(&server, Event::Balance, &json!({}))
}

fn tell(server: &Server, event: Event, answer: &Value) -> Response {
    match server.engine.send(event) {
        Ok(()) => in_json(StatusCode::ACCEPTED, answer),
        Err(_) => {
            let text = "the server is ending";
            Refusal::new(StatusCode::SERVICE_UNAVAILABLE, text).into_response()
        }
    }
}

/// Returns the full state, always with status 200; [`ready`] gives the decision.
pub(super) async fn health(State(server): State<Arc<Server>>) -> Response {
    let asked = ask(&server, &server.glances, GLANCE, |observer| {
        let ranks = observer.snapshot().ranks;
        (ranks, observer.recordings(GLANCE))
    });
    let asked = asked.await;
    let mut json = server.view().health();
    json["not_asked"] = json!(asked.as_ref().err());
    if let Ok((ranks, timeline)) = asked
        && let Some(members) = json["ranks"].as_array_mut()
    {
        for member in members {
            let Some(pid) = member["pid"].as_u64() else {
                continue;
            };
            let its = |rank: &&RankState| rank.pid.map(u64::from) == Some(pid);
            if let Some(rank) = ranks.iter().find(its) {
                member["host"] = json!(rank.host);
                member["slot"] = json!(rank.slot.map(|slot| slot.number));
                let phase = rank.phase.as_ref();
                member["phase"] = json!(phase.map(|(name, _)| name));
                member["phase_seconds"] = json!(phase.map(|(_, age)| age.as_secs_f64()));
            }
            member["last_operation"] = last_operation(&timeline, pid);
        }
    }
    in_json(StatusCode::OK, &json)
}

/// Returns the last operation of a process on any communicator, from the flight recorder.
fn last_operation(timeline: &Timeline, pid: u64) -> Value {
    let its = timeline
        .ranks
        .iter()
        .map(|rank| &rank.snapshot)
        .find(|snapshot| u64::from(snapshot.pid) == pid);
    let Some(snapshot) = its else {
        return Value::Null;
    };
    let calls = snapshot.communicators.iter().flat_map(|recording| {
        let calls = recording.calls.iter();
        calls.map(|call| (&recording.name, call))
    });
    let Some((communicator, call)) = calls.max_by_key(|(_, call)| call.at) else {
        return Value::Null;
    };
    let age = snapshot.taken.duration_since(call.at).unwrap_or_default();
    json!({
        "communicator": communicator,
        "operation": call.kind.to_string(),
        "sequence": call.sequence,
        "state": call.state,
        "age_seconds": age.as_secs_f64(),
    })
}

/// Returns the last calls of all ranks, in Chrome's trace format, for <https://ui.perfetto.dev>.
pub(super) async fn timeline(State(server): State<Arc<Server>>) -> Response {
    let asked = ask(&server, &server.looks, Duration::ZERO, |observer| {
        observer.recordings(LOOK).to_chrome_trace()
    });
    match asked.await {
        Ok(trace) => ([(header::CONTENT_TYPE, "application/json")], trace).into_response(),
        Err(why) => Refusal::new(StatusCode::SERVICE_UNAVAILABLE, why).into_response(),
    }
}

/// Queries the ranks, on a thread that may wait. `room` limits the number of these threads: with a rank that does not
/// answer, each waits for its full time. Makes no query if no permit becomes free within `patience`.
async fn ask<T: Send + 'static>(
    server: &Server,
    room: &Arc<Semaphore>,
    patience: Duration,
    question: impl FnOnce(&Observer) -> T + Send + 'static,
) -> Result<T, &'static str> {
    let permit = timeout(patience, Arc::clone(room).acquire_owned());
    let Ok(Ok(permit)) = permit.await else {
        return Err("others ask the ranks already, and they have not answered yet");
    };
    let observer = Arc::clone(&server.observer.lock());
    let asking = tokio::task::spawn_blocking(move || {
        let answer = question(&observer);
        // Held until the query is done, even if the client disconnects meanwhile.
        drop(permit);
        answer
    });
    asking.await.map_err(|_| "the ranks could not be asked")
}
