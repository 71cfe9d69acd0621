//! Makes a communicator without some of its ranks.
//!
//! There are two ways, and the remaining ranks agree on one of them through their world before any of them
//! calls NCCL:
//!
//! ```text
//! all have ncclCommShrink, the parent lives on all, nobody is gone ──▶ ncclCommShrink
//! otherwise                                                       ──▶ a token, and a new communicator
//! ```
//!
//! A communicator that ended with a rank's death cannot be shrunk: an error is returned only when no rank writes into
//! this rank's memory any more, and only an abort guarantees that. So after a death, the ranks always take the second
//! way. The first way is for leaving out a live rank; NCCL then reuses its knowledge of the machine.
//!
//! An aborting shrink ends the operations under way, and with them the parent. NCCL lowers the parent's abort flag
//! again, so a destroy would wait for the rank that was left out, but an abort does not. The parent is aborted after
//! all ranks have their new communicator, because an abort is announced to all ranks.
//!
//! NCCL refuses the first way if the parent has an asynchronous error. The ranks then take the second way together
//! (`attempt`).
//!
//! A revoked communicator has already been stopped on all ranks, and can be shrunk as if it were idle.

mod agree;
mod attempt;
mod call;
mod native;
mod shrunk;

pub(super) use call::shrink;
pub use shrunk::{ResizeWay, Resized};
