//! Who is asked for what.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};

use super::connections::RESERVED_TIMEOUT;
use super::refusal::Refusal;
use super::server::{Server, Ticket};
use super::{body, completions, metrics, status};

/// What is there, for who looks for something else.
const ALL: &str =
    "POST /v1/completions, GET /v1/models, /livez, /readyz, /health, /metrics and /debug/timeline";

/// All of it.
pub(super) fn all(server: Arc<Server>) -> Router {
    Router::new()
        .route("/v1/completions", post(completions::complete))
        .route("/v1/models", get(completions::models))
        .route("/health", get(status::health))
        .route("/debug/timeline", get(status::timeline))
        .merge(probes())
        .fallback(|uri: Uri| async move {
            let text = format!("there is no {} here: there are {ALL}", uri.path());
            Refusal::new(StatusCode::NOT_FOUND, text)
        })
        .method_not_allowed_fallback(|method: Method, uri: Uri| async move {
            let text = format!("{method} is not for {}: there are {ALL}", uri.path());
            Refusal::new(StatusCode::METHOD_NOT_ALLOWED, text)
        })
        .with_state(server)
}

/// For those who come when there are too many clients: who looks after the server is answered, the others are told to
/// come again.
pub(super) fn narrow(server: Arc<Server>) -> Router {
    probes()
        .fallback(crowded)
        .method_not_allowed_fallback(crowded)
        .with_state(server)
}

/// What costs nothing, and has to be known at all times.
fn probes() -> Router<Arc<Server>> {
    Router::new()
        .route("/livez", get(|| async { "alive\n" }))
        .route("/readyz", get(status::ready))
        .route("/metrics", get(metrics::metrics))
}

async fn crowded(State(server): State<Arc<Server>>, body: Body) -> Response {
    Ticket::new(&server).ends("crowded");
    // A connection that is closed before all was read may take the answer with it.
    let _ = body::read(body, RESERVED_TIMEOUT).await;
    let text = "too many clients are connected: try again later";
    let refusal = Refusal::new(StatusCode::SERVICE_UNAVAILABLE, text);
    refusal.code("too_many_connections").into_response()
}
