//! The routes.

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

/// The list of routes, for errors about other paths.
const ALL: &str = "POST /v1/completions, GET /v1/models, /livez, /readyz, /health, /metrics and /debug/timeline, POST /admin/ranks and /admin/balance";

/// Returns the router with all routes.
pub(super) fn all(server: Arc<Server>) -> Router {
    Router::new()
        .route("/v1/completions", post(completions::complete))
        .route("/v1/models", get(completions::models))
        .route("/admin/ranks", post(status::scale))
        .route("/admin/balance", post(status::balance))
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

/// Returns the router for reserved connections, when there are too many clients: monitoring requests are answered,
/// other requests are told to retry later.
pub(super) fn narrow(server: Arc<Server>) -> Router {
    probes()
        .fallback(crowded)
        .method_not_allowed_fallback(crowded)
        .with_state(server)
}

/// Returns the monitoring routes, which are cheap and always available.
fn probes() -> Router<Arc<Server>> {
    Router::new()
        .route("/livez", get(|| async { "alive\n" }))
        .route("/readyz", get(status::ready))
        .route("/metrics", get(metrics::metrics))
}

async fn crowded(State(server): State<Arc<Server>>, body: Body) -> Response {
    Ticket::new(&server).ends("crowded");
    // Closing a connection with unread data may discard the answer.
    let _ = body::read(body, RESERVED_TIMEOUT).await;
    let text = "too many clients are connected: try again later";
    let refusal = Refusal::new(StatusCode::SERVICE_UNAVAILABLE, text);
    refusal.code("too_many_connections").into_response()
}
