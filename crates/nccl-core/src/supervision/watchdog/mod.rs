//! The watchdog: finds operations that do not end, although no thread waits for them.
//!
//! A [`Request`](crate::Request) that is waited for has a deadline of its own. If it was dropped, because
//! the program waits for the stream or for another thread, no thread enforces its deadline; so one thread of
//! the process polls everything that was issued and is not known to be done. A call that runs longer than
//! its timeout, or waits longer for its turn than the queue timeout, ends its communicator on all ranks, with an
//! error that reports what was found.
//!
//! Nothing on the path of an operation queries the device for progress, so the watchdog finds that out now
//! and then, by *marks*: events on the streams. A mark *covers* the calls that were on its stream when it
//! was put there; when it is reached, they are done.
//!
//! ```text
//! stream   … other work │ #41 │ #42 │ #43 … │ other work …
//!                       ▲     ▲             ▲
//!                       │     └─ behind #41 └─ the watchdog's own, behind whatever was last
//!                       └─ in front of #41: reached, so #41 can run
//! ```
//!
//! - The issuing thread puts a mark in front of a call and one behind it when the call is the first after a
//!   pause, and otherwise at most every 10 ms ([`report_before`], [`report_after`]). Only these two tell a call
//!   apart from work that is not the communicator's.
//! - The watchdog puts a mark behind calls that no mark covers yet.
//!
//! Two clocks. A call is *queued* while a mark in front of it is not reached; its wait is bounded by the
//! communicator's queue timeout. Afterwards it is *running*, and its own timeout counts: from that mark, from
//! its issue, or from the end of the call before it on its stream or communicator, whichever is latest.
//! Calls that were issued within less than 10 ms may have no mark between them: then the first stands for
//! all, and for any other work put on the stream meanwhile.
//!
//! The hot path compares three words of its track ([`FastPathFilter`](crate::recorder)) and reports a call only when one
//! does not fit. All shared state is behind one lock, which no thread holds while it calls CUDA or NCCL.
//! With nothing pending the watchdog sleeps until it is called.
//!
//! A call into CUDA or NCCL may hang, and with it the polling thread. The monitor, which makes no such
//! calls, notices that, starts a successor, and enforces the deadlines of the communicator at which the
//! first one is stuck.
//!
//! - `tracker`: what marks prove, and which call is overdue: no CUDA, no clock;
//! - `registry`: what is watched; `report_call`: how calls are added to it;
//! - `poll`: one poll at one communicator;
//! - `threads`: the polling thread and its schedule;
//! - `results`: the results that other code can read.

mod poll;
mod registry;
mod report_call;
mod results;
mod threads;
mod tracker;

#[doc(hidden)]
pub use crate::pending_call::CallStage;
#[doc(hidden)]
pub use registry::pending;
#[doc(hidden)]
pub use report_call::answer;
pub(crate) use report_call::{ReportedCall, ensure, report_after, report_before, report_unmarked};
#[allow(unused_imports, reason = "used by the metrics of the nccl crate")]
pub(crate) use results::OldestCall;
#[doc(hidden)]
pub use results::PendingCommunicator;
