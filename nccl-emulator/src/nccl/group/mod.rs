//! Groups: what a thread queues between `ncclGroupStart` and `ncclGroupEnd`, and what happens at
//! the end.
//!
//! All of it is the thread's own: nesting, the recorded error, the queues. A call outside a group
//! is a group of one. An error that is recorded by a call poisons the group: the outermost end
//! returns it and drops everything that was queued. Errors that are found before a call reaches the
//! group do not, in NCCL and here.
//!
//! At the outermost end: the jobs (init, split, finalize, destroy …) run, each on a thread of its own
//! if there are several; then what all ranks of a communicator do together, one communicator after
//! the other; then the connections that are used for the first time are set up, which may
//! wait for peers; then each communicator's operations become one [`Launch`](super::work::Launch)
//! on its stream. All of this happens in the call, unless the communicators are non-blocking: then
//! it is [`Pending`](pending::Pending), and the call returns `ncclInProgress`.

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
