//! What threads do to each other, in every interleaving.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p nccl-core --test loom --release
//! ```
//!
//! - `life`: a communicator that is made, used, and ended in every way at once;
//! - `lanes`: the recorder's rings;
//! - `listing`: calls of which the watchdog is not told, and a stream that it lets go of.
//!
//! What runs is the crate's own code; only what lies behind it, NCCL and the other ranks, is made up.
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
