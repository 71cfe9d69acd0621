//! Groups: the work that a thread queues between `ncclGroupStart` and `ncclGroupEnd`, and its
//! execution at the end.
//!
//! The state of a group belongs to the thread: nesting, the recorded error, the queues. A call
//! outside a group is a group of one. An error that a call records poisons the group: the outermost
//! end returns the error and drops all queued work. An error found before the call reaches the group
//! does not poison it, in NCCL and here.
//!
//! The outermost end runs four steps. First it runs the jobs (init, split, finalize, destroy …), each
//! on a thread of its own if there are several. Then it does the work that all ranks of a
//! communicator do together, one communicator after the other. Then it sets up connections on first
//! use, which may wait for peers. Then each communicator's operations become one
//! [`Launch`](super::work::Launch) on its stream. All of this happens in the call, unless the
//! communicators are non-blocking: then the work is [`Pending`](pending::Pending), and the call
//! returns `ncclInProgress`.

mod end;
mod jobs;
mod launch;
mod one_sided;
mod open;
mod operation;
mod pending;
mod tasks;

pub(crate) use jobs::{Job, JobKind};
pub(crate) use one_sided::{OneSided, enqueue_one_sided};
pub(crate) use open::{
    add_job, add_symmetric, communicators, end, is_outermost, record, run_or_add_job, simulate_end,
    start,
};
pub(crate) use operation::{Call, enqueue};
