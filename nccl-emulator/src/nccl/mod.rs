//! NCCL's C ABI of 2.32.3.
//!
//! ```text
//! abi            the exported functions: arguments checked, panics kept in, faults applied
//! group          what a thread queues, and what happens at ncclGroupEnd
//! communicator   handles, init, connect on first use, finalize, destroy, abort
//! bootstrap      how ranks find each other
//! task           one operation, as data: what a group queues and a launch works off
//! work           what a launch does on its stream, on top of `transport`
//! profiler       what a profiler plugin is told of all this
//! ras            the thread that answers what the ranks of a job are doing
//! debug          NCCL_DEBUG and the last error
//! ```

mod abi;
mod abort;
mod bootstrap;
mod communicator;
mod config;
mod debug;
mod env_plugin;
mod environment;
mod group;
mod network;
mod operators;
mod plugin;
mod plugin_log;
mod profiler;
mod ras;
mod task;
mod timer;
mod unique_id;
mod work;

/// Returns name and address of every function that the release has.
pub(crate) fn symbols() -> Vec<(&'static std::ffi::CStr, *const std::ffi::c_void)> {
    let mut symbols = abi::symbols();
    symbols.retain(|(name, _)| name.to_str().is_ok_and(crate::version::has));
    symbols
}
