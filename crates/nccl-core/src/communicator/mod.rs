//! The life of a communicator: use, finalize or abort, drop. [`creation`](crate::creation) makes a communicator;
//! [`issuing`](crate::issuing) hands its operations to NCCL.
//!
//! A communicator is either non-blocking inside NCCL (`blocking = 0`), so that every call returns and can be given a
//! deadline; or it blocks, and has an abort-flag parent with which another thread ends a call ([`LaunchMode`]). One
//! mutex guards every NCCL call on a communicator, including the polling of its state, which completes background work
//! and is not a pure read. Calls that should not block but may (abort, destroy) run on a thread that can be given up.
//!
//! - `public`: the public handle; `inner`: the state that all handles share; `handle`: NCCL's pointer, under its lock;
//! - `launch_mode`: the two launch modes; `abort_flag_parent` and `blocking_call_monitor`: the parts that end a blocking call;
//! - `stream_order`: the order between streams;
//! - `keep_alive`: the handle of dropped plans and of registrations;
//! - `revoke`: ends all operations and keeps the communicator for a shrink;
//! - `lifecycle`: finalize and abort; `dropped`: drop; `free`: the NCCL calls that free a communicator, on threads
//!   that may be given up;
//! - `peer_kernels`: kernels that use the windows of other ranks; `window_hold`: how a program holds windows for its own;
//! - `suspend`: the communicator's device memory, and releasing it for a while;
//! - `memory_release`: when borrowed memory is released; `context_lost`: contexts that failed permanently;
//! - `registry`: all communicators of the process, and their joint abort.

pub(crate) mod abort_flag_parent;
pub(crate) mod blocking_call_monitor;
mod context_lost;
mod dropped;
mod end_reason;
pub(crate) mod free;
pub(crate) mod handle;
mod inner;
mod keep_alive;
pub(crate) mod launch_mode;
pub(crate) mod lifecycle;
mod memory_release;
mod peer_kernels;
pub mod peers;
mod public;
mod rare_calls;
pub(crate) mod registry;
pub(crate) mod revocation;
mod revoke;
pub(crate) mod stream_order;
pub(crate) mod suspend;
pub(crate) mod timeouts;
mod window_hold;

pub(crate) use abort_flag_parent::AbortFlagParent;
pub(crate) use context_lost::{DetectionPhase, is_context_lost};
pub(crate) use end_reason::EndReason;
pub(crate) use handle::Backoff;
#[doc(hidden)]
pub use inner::Inner;
pub(crate) use inner::SharedLaunch;
#[doc(hidden)]
pub use keep_alive::KeepAlive;
pub(crate) use keep_alive::TemporaryHandle;
pub use launch_mode::LaunchMode;
#[doc(hidden)]
pub use lifecycle::{end_failed, leak_failed};
#[doc(hidden)]
pub use peer_kernels::PeerKernel;
pub(crate) use peer_kernels::{Holds, PeerKernels};
pub use public::Communicator;
pub(crate) use rare_calls::{ask, together};
pub use registry::{AbortReport, EndedCommunicator, abort_all};
pub(crate) use stream_order::{
    check_allocation_stream, check_buffer_context, check_not_capturing, is_same as is_same_stream,
};
pub use suspend::CommunicatorMemory;
pub use timeouts::Timeouts;
pub use window_hold::WindowHold;
pub(crate) use window_hold::hold_windows;
#[doc(hidden)]
pub use window_hold::is_reached;
