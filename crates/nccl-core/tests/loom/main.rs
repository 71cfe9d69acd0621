//! Models of concurrent threads, explored in every interleaving.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p nccl-core --test loom --release
//! ```
//!
//! - `life`: a communicator that is made, used, and ended in every way at once;
//! - `lanes`: the recorder's rings;
//! - `listing`: calls that are not reported to the watchdog, and a stream that it releases.
//!
//! The crate's own code runs; only NCCL and the other ranks are modelled.
#![cfg(loom)]

mod lanes;
mod life;
mod listing;

#[allow(unreachable_pub, missing_docs, unused_imports)]
#[path = "../../../nccl-base/src/sync.rs"]
mod sync;

#[allow(dead_code, unreachable_pub)]
#[path = "../../src/state.rs"]
mod state;

#[allow(dead_code)]
#[path = "../../src/recorder/lane.rs"]
mod lane;

#[allow(dead_code)]
#[path = "../../src/recorder/usual.rs"]
mod usual;
