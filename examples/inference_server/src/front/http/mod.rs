//! What the server answers.
//!
//! - `connections`: how many clients there may be, and how long they may take; `router`: who is asked for what;
//! - `completions`: OpenAI's `POST /v1/completions`; `body`: how a request comes in; `ask`: what may be asked there;
//!   `stream`: its answer in pieces;
//! - `status`: whether it lives, is ready, and how it stands with the ranks; `metrics`: the same in numbers;
//! - `server`: what all of these need; `refusal`: errors, in OpenAI's words.

mod ask;
mod body;
mod completions;
mod connections;
mod metrics;
mod refusal;
mod router;
mod server;
mod status;
mod stream;

pub(super) use self::connections::{Limits, serve};
pub(super) use self::server::Server;
