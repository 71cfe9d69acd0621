//! A communicator without some of its ranks.
//!
//! Two ways lead there, and the ranks that stay agree on one of them over their line, before any of them
//! asks NCCL:
//!
//! ```text
//! all have ncclCommShrink, the parent lives on all, nobody is gone ──▶ ncclCommShrink
//! otherwise                                                       ──▶ a token, and a new communicator
//! ```
//!
//! Of a communicator that a rank's death has ended there is nothing to shrink: an error is handed out only
//! when nobody writes into this rank's memory any more, and only an abort makes sure of that. So after a death
//! it is always the second way. The first is for a rank that lives and is not wanted any more; NCCL then
//! reuses what it knows of the machine.
//!
//! A shrink that aborts ends what is under way, and with it the parent: NCCL lowers the parent's abort flag
//! again, so that a destroy would wait for the rank that was left out, and only an abort does not. The parent
//! is aborted after all ranks have their new one, because the abort of one is announced to all.
//!
//! NCCL refuses the first way where the parent has an asynchronous error. The ranks then take the second one together
//! (`attempt`).
//!
//! One that was revoked has been stopped on all ranks already, and can be shrunk as if it were idle.

mod agree;
mod attempt;
mod call;
mod native;
mod shrunk;

pub(super) use call::shrink;
pub use shrunk::{ShrinkWay, Shrunk};
