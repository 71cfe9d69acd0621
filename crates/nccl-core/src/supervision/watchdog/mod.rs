//! The watchdog: finds operations that do not end, even if no thread waits for them.
//!
//! A [`Request`](crate::Request) that a thread waits for has a deadline of its own. If the request was dropped, because
//! the program waits for the stream or for another thread, no thread enforces its deadline. So one thread of the
//! process polls all calls that were issued and are not known to be done. A call that runs longer than its timeout, or
//! waits for its turn longer than the queue timeout, ends its communicator on all ranks, with an error that reports the
//! findings.
//!
//! No code on the path of an operation queries the device for progress, so the watchdog determines the progress from
//! time to time, with *marks*: events on the streams. A mark *covers* the calls that were on its stream when it was put
//! there; when the mark is reached, those calls are done.
//!
//! ```text
//! stream   … other work │ #41 │ #42 │ #43 … │ other work …
//!                       ▲     ▲             ▲
//!                       │     └─ behind #41 └─ the watchdog's own, behind whatever was last
//!                       └─ in front of #41: reached, so #41 can run
//! ```
//!
//! - The issuing thread puts a mark before a call and one after it if the call is the first after a pause, and
//!   otherwise at most every 10 ms ([`report_before`], [`report_after`]). Only these two marks distinguish a call from
//!   work that does not belong to the communicator.
//! - The watchdog puts a mark after calls that no mark covers yet.
//!
//! There are two clocks. A call is *queued* while a mark before it is not reached; its wait is limited by the
//! communicator's queue timeout. Afterwards it is *running*, and its own timeout counts: from that mark, from its
//! issue, or from the end of the previous call on its stream or communicator, whichever is latest. Calls that were
//! issued within less than 10 ms may have no mark between them. Then the first call stands for all of them, and for any
//! other work put on the stream meanwhile.
//!
//! The hot path compares three words of its track ([`FastPathFilter`](crate::recorder)) and reports a call only when one
//! does not fit. All shared state is behind one lock, which no thread holds while it calls CUDA or NCCL.
//! While nothing is pending, the watchdog sleeps until it is called.
//!
//! A call into CUDA or NCCL may hang, and with it the polling thread. The monitor, which makes no such calls, detects
//! that, starts a new polling thread, and enforces the deadlines of the communicator at which the first thread is
//! stuck.
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
