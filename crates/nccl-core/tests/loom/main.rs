//! Models of concurrent threads, explored in every interleaving.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p nccl-core --test loom --release
//! ```
//!
//! - `life`: a communicator that is made, used, and ended in every way at once;
//! - `rings`: the recorder's rings;
//! - `listing`: calls that are not reported to the watchdog, and a stream that it releases.
//!
//! The crate's own code runs; only NCCL and the other ranks are modelled.
#![cfg(loom)]

mod life;
mod listing;
mod rings;

#[allow(unreachable_pub, missing_docs, unused_imports)]
#[path = "../../../nccl-base/src/sync.rs"]
mod sync;

#[allow(dead_code, unreachable_pub)]
#[path = "../../src/state.rs"]
mod state;

#[allow(dead_code)]
#[path = "../../src/recorder/seqlock_ring.rs"]
mod seqlock_ring;

#[allow(dead_code)]
#[path = "../../src/recorder/fast_path.rs"]
mod fast_path;
