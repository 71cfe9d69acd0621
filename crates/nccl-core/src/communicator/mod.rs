//! The life of a communicator: used, finalized or aborted, and let go of. How one is made is in [`creation`](crate::creation), how
//! an operation gets to NCCL in [`issuing`](crate::issuing).
//!
//! A communicator is non-blocking inside NCCL (`blocking = 0`), because only then does every call come
//! back and can be given a deadline; or it blocks, and has a switch beside it with which another thread ends
//! a call ([`LaunchMode`]). One mutex lies around every NCCL call on it, the polling of its
//! state included, which completes background work and is no pure read. Calls that may block although
//! they should not (abort, destroy) run on a thread that can be given up.
//!
//! - `public`: one as a program has it; `inner`: what all handles of one share; `handle`: NCCL's pointer to it, under its lock;
//! - `launch_mode`: the two arrangements; `switch` and `guard`: what ends a call that blocks;
//! - `order`: which streams have to wait for which;
//! - `keep_alive`: what dropped plans and registrations still need of it;
//! - `revoke`: stopped, and kept for a shrink;
//! - `lifecycle`: finalize and abort; `dropped`: drop; `free`: the calls that give it back to NCCL, on threads
//!   that may be given up;
//! - `let_go`: when lent memory is free again; `lost`: a context that failed for good;
//! - `everybody`: all communicators of the process, and their abort together.

mod dropped;
pub(crate) mod everybody;
pub(crate) mod free;
pub(crate) mod guard;
pub(crate) mod handle;
mod inner;
mod keep_alive;
pub(crate) mod launch_mode;
mod let_go;
pub(crate) mod lifecycle;
mod lost;
pub(crate) mod order;
pub mod peers;
mod public;
pub(crate) mod revocation;
mod revoke;
pub(crate) mod switch;
pub(crate) mod timeouts;
mod why;

pub use everybody::{AbortReport, EndedCommunicator, abort_all, leaked_communicators};
pub(crate) use handle::Backoff;
#[doc(hidden)]
pub use inner::Inner;
pub(crate) use inner::SharedLaunch;
pub(crate) use keep_alive::{KeepAlive, Visit};
pub use launch_mode::LaunchMode;
#[doc(hidden)]
pub use lifecycle::{end_struck, leave_struck};
pub(crate) use lost::{Noticed, is_lost};
pub(crate) use order::{admit_buffer, admit_owner, not_capturing, same as same_stream};
pub use public::Communicator;
pub(crate) use switch::Switch;
pub use timeouts::Timeouts;
pub(crate) use why::Why;
