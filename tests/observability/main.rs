//! Observability: the log's names and fields are those of the page that lists them, and the numbers match the
//! operations.

mod lateness;
mod listed;
mod log;
mod metrics;
mod numbers;
mod page;
mod ranks;
mod recovering;
mod seen;
mod sources;
mod spans;
#[path = "../support/mod.rs"]
mod support;

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;
