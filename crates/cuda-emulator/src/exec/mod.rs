//! Streams, events and the threads that run their work.
//!
//! A [`Stream`] is a queue of jobs and a token, the lock around its [`job::Front`]. The thread that
//! holds the token runs the queue, one job after the other; enqueueing never runs jobs. The
//! holder is
//!
//! 1. a thread inside `cuStreamSynchronize`, `cuEventSynchronize`, `cuCtxSynchronize` or a copy
//!    that waits: it would sleep anyway, so no job is handed to another thread ([`run`]);
//! 2. for one bounded step, a thread inside `cuStreamQuery` or `cuEventQuery`, so that polling
//!    moves the work;
//! 3. else, after a tick without progress, a worker thread of this process ([`dispatch`]).
//!
//! A job ([`Work`]) is a state machine whose step never blocks. While a job is blocked, its runner
//! spins, then yields, then sleeps on the job's [`Bell`] ([`spin`]).
//!
//! Between `cuStreamBeginCapture` and `cuStreamEndCapture` a stream's work is recorded in a
//! [`Capture`] instead, and becomes a [`Graph`].
//!
//! The NCCL side enqueues its operations with [`Stream::enqueue`] ([`queue`]); the driver functions do the
//! rest.

mod attention;
mod backoff;
mod bell;
pub mod capture;
pub(crate) mod context;
mod dispatch;
mod event;
mod executable;
mod graph;
mod host_call;
mod job;
mod object;
mod queue;
mod run;
mod spin;
mod stream;
mod visits;
mod waiters;
mod work;

use std::ffi::c_void;
use std::sync::Arc;

pub use backoff::Backoff;
pub use bell::Bell;
pub use capture::{Capture, Info, Standing};
pub use event::Event;
pub use executable::{EXECUTABLES, Executable};
pub use graph::{Action, GRAPHS, Graph, Last, NODES, NodeOf, Recipe};
pub use host_call::HostCall;
pub use object::{OBJECTS, UserObject};
pub use spin::local_spinners;
pub(crate) use stream::STREAMS;
pub use stream::{Kind, Stream, look, named, per_thread};
pub use work::{Pause, Step, Work};

use crate::result::CUresult;
use context::Context;

/// Returns the stream that a `CUstream` names for the calling thread. 0x0 and 0x1 are the legacy stream of
/// `context`, 0x2 is the calling thread's own stream in `context`. Any other handle is looked up,
/// never dereferenced, and may belong to another context (compare [`Stream::context`]).
///
/// # Errors
/// `CUDA_ERROR_INVALID_HANDLE` for a handle that no live stream has.
pub fn lookup(handle: *mut c_void, context: &Arc<Context>) -> Result<Arc<Stream>, CUresult> {
    match handle.addr() {
        0 | 1 => context.legacy_stream(),
        2 => per_thread(context),
        _ => named(handle).ok_or(CUresult::ERROR_INVALID_HANDLE),
    }
}

/// Waits for all jobs enqueued on a device so far, in all contexts.
pub fn synchronize_device(device: i32) {
    for (mark, stream) in stream::marks(device) {
        // A sticky error of another context is not the caller's.
        let _ = stream.wait_until(mark);
    }
}

/// True while the calling thread runs a host function of a stream, which may not call the driver.
pub fn in_host_function() -> bool {
    host_call::in_host_function()
}

#[cfg(test)]
mod tests;
