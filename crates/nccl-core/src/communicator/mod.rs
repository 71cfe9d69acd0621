//! The life of a communicator: use, finalize or abort, drop. [`creation`](crate::creation) makes a communicator;
//! [`issuing`](crate::issuing) hands its operations to NCCL.
//!
//! A communicator is either non-blocking inside NCCL (`blocking = 0`), so that every call
//! returns and can be given a deadline; or it blocks, and has a switch with which another thread ends
//! a call ([`LaunchMode`]). One mutex guards every NCCL call on it, including the polling of its
//! state, which completes background work and is not a pure read. Calls that may block although
//! they should not (abort, destroy) run on a thread that can be given up.
//!
//! - `public`: the public handle; `inner`: the state that all handles share; `handle`: NCCL's pointer, under its lock;
//! - `launch_mode`: the two launch modes; `switch` and `guard`: the parts that end a blocking call;
//! - `order`: the order between streams;
//! - `keep_alive`: the handle of dropped plans and of registrations;
//! - `revoke`: ends all operations and keeps the communicator for a shrink;
//! - `lifecycle`: finalize and abort; `dropped`: drop; `free`: the NCCL calls that free a communicator, on threads
//!   that may be given up;
//! - `let_go`: when borrowed memory is free again; `lost`: contexts that failed for good;
//! - `everybody`: all communicators of the process, and their joint abort.

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
