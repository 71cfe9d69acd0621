//! The life of a communicator: made, used, finalized or aborted, and let go of.
//!
//! A communicator is non-blocking inside NCCL (`blocking = 0`), because only then does every call come
//! back and can be given a deadline; or it blocks, and has a switch beside it with which another thread ends
//! a call ([`LaunchMode`]). One mutex lies around every NCCL call on it, the polling of its
//! state included, which completes background work and is no pure read. Calls that may block although
//! they should not (abort, destroy) run on a thread that can be given up.
//!
//! - [`builder`]: what it is made from; `build`: how its ranks come to make it;
//! - `timeouts`: how long things may take; `from_outside`: what the environment says of that;
//! - `init`: from before NCCL is asked until it is ready; `start`: the calls for that; `slot`: where NCCL puts
//!   what it makes in the background;
//! - `launch_mode`: the two arrangements; `switch` and `guard`: what ends a call that blocks;
//! - `state`: the state machine;
//! - `order`: which streams have to wait for which;
//! - `frame`: the buffers of one operation while it is issued;
//! - `issue`: one operation, from the checks to the request; `together`: those of several
//!   communicators;
//! - `keep_alive`: what dropped plans and registrations still need of it;
//! - `meeting`: the ranks tell each other whether they can take part; `grow`: a communicator with more ranks;
//! - `split`, `shrink`: communicators of some of the ranks; `revoke`: stopped, and kept for that;
//! - `compute`: kernels and copies of this crate's own; `replay`: the launch of a captured plan;
//! - `lifecycle`: finalize and abort; `dropped`: drop; `free`: the calls that give it back to NCCL, on threads
//!   that may be given up;
//! - `everybody`: all communicators of the process, and their abort together.

mod build;
mod builder;
mod check;
mod compute;
mod dropped;
mod everybody;
mod frame;
mod free;
mod grow;
mod guard;
mod handle;
mod init;
mod init_all;
mod inner;
mod issue;
mod keep_alive;
mod launch_mode;
mod let_go;
mod lifecycle;
mod lost;
mod meeting;
mod order;
mod raw;
mod replay;
mod revocation;
mod revoke;
mod shrink;
mod slot;
mod split;
mod start;
mod state;
mod steps;
mod switch;
mod timeouts;
mod together;
mod warm_up;
mod why;

pub use builder::CommunicatorBuilder;
pub use everybody::{AbortReport, EndedCommunicator, abort_all, leaked_communicators};
pub use frame::Frame;
pub use grow::{GrowWay, Grown};
pub(crate) use handle::Backoff;
pub use inner::Communicator;
#[doc(hidden)]
pub use inner::Inner;
pub(crate) use inner::SharedLaunch;
pub(crate) use issue::Calls;
pub(crate) use keep_alive::{KeepAlive, Visit};
pub use launch_mode::LaunchMode;
pub(crate) use launch_mode::Wish;
#[doc(hidden)]
pub use lifecycle::{end_struck, leave_struck};
pub(crate) use lost::{Noticed, is_lost};
pub(crate) use order::{admit_buffer, admit_owner, not_capturing, same as same_stream};
pub(crate) use replay::NotLaunched;
pub use shrink::{ShrinkWay, Shrunk};
#[doc(hidden)]
pub use state::Phase;
pub use state::State;
pub(crate) use steps::{Copy, Step};
pub(crate) use switch::Switch;
pub use timeouts::Timeouts;
pub(crate) use together::issue_together;
pub(crate) use why::Why;
