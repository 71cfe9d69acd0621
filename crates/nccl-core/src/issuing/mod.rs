//! The path of an operation to NCCL.
//!
//! - `issue_buffers`: the buffers of one operation while it is issued;
//! - `issue`: one operation, from the checks to the request; `steps`: an operation of several groups, with copies in between;
//! - `check`: the ranks compare their calls, if that is enabled;
//! - `compute`: kernels and copies of this crate; `replay`: the launch of a captured plan.

mod check;
mod compute;
pub(crate) mod issue;
mod issue_buffers;
mod replay;
mod steps;

#[doc(hidden)]
pub use compute::read_back;
#[doc(hidden)]
pub use issue::{failed_check, issue};
pub use issue_buffers::IssueBuffers;
pub(crate) use replay::{NotLaunched, Replayed};
pub(crate) use steps::{DeviceCopy, Step, launch_step};
