//! The HTTP interface.
//!
//! - `connections`: the limits of clients; `router`: the routes;
//! - `completions`: OpenAI's `POST /v1/completions`; `body`: reading of a body; `ask`: reading of a request;
//!   `stream`: the answer in pieces;
//! - `status`: health, readiness, and the state of the ranks; `metrics`: the same in numbers;
//! - `server`: the common state; `refusal`: errors, in OpenAI's format.

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
