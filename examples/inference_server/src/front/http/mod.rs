//! What the server answers.
//!
//! - `completions`: OpenAI's `POST /v1/completions`; `ask`: what may be asked there; `stream`: its answer in pieces;
//! - `status`: whether it lives, is ready, and how it stands with the ranks; `metrics`: the same in numbers;
//! - `refusal`: errors, in OpenAI's words.

mod ask;
mod completions;
mod metrics;
mod refusal;
mod status;
mod stream;

use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::Router;
use axum::http::{StatusCode, Uri};
use axum::response::IntoResponse;
use axum::routing::{get, post};

use self::refusal::Refusal;
use super::crew::SharedObserver;
use super::engine::Event;
use super::view::View;
use crate::model::Settings;
use crate::model::tokenizer::Tokenizer;

/// What all answers are made of.
pub(super) struct Server {
    pub(super) engine: Sender<Event>,
    pub(super) view: Arc<Mutex<View>>,
    pub(super) observer: SharedObserver,
    pub(super) model: String,
    pub(super) tokenizer: Tokenizer,
    pub(super) settings: Settings,
    pub(super) queue: usize,
}

impl Server {
    fn view(&self) -> MutexGuard<'_, View> {
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request is over.
    fn count(&self, outcome: &'static str) {
        *self.view().numbers.requests.entry(outcome).or_default() += 1;
    }
}

/// All of it.
pub(super) fn router(server: Arc<Server>) -> Router {
    Router::new()
        .route("/v1/completions", post(completions::complete))
        .route("/v1/models", get(completions::models))
        .route("/livez", get(|| async { "alive\n" }))
        .route("/readyz", get(status::ready))
        .route("/health", get(status::health))
        .route("/metrics", get(metrics::metrics))
        .route("/debug/timeline", get(status::timeline))
        .fallback(|uri: Uri| async move {
            let text = format!("there is no {}", uri.path());
            Refusal::new(StatusCode::NOT_FOUND, text).into_response()
        })
        .method_not_allowed_fallback(|uri: Uri| async move {
            let text = format!("{} is asked in another way", uri.path());
            Refusal::new(StatusCode::METHOD_NOT_ALLOWED, text).into_response()
        })
        .with_state(server)
}
