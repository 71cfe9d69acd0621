//! The watchdog: finds operations that do not end although nobody waits for them.
//!
//! A [`Request`](crate::Request) that is waited for has a deadline of its own. One that was dropped, because
//! the program waits for the stream or for another thread, has nobody; so one thread of the process looks
//! at everything that was issued and is not known to be done. What runs longer than its limit, or waits
//! longer for its turn than that may take, ends its communicator on all ranks, with what was found.
//!
//! Nothing on the way of an operation asks the device how far it has come, so that has to be found out now
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
//! - The thread that issues puts a mark in front of a call and one behind it, when it is the first after a
//!   pause, and otherwise no more often than every 10 ms ([`before`], [`after`]). Only these two tell a call
//!   apart from work that is not the communicator's.
//! - The watchdog puts one behind what is not covered yet.
//!
//! Two clocks. A call is *queued* while a mark in front of it is not reached; that is bounded by the
//! communicator's queue limit. From then on, or from its issue, or from the end of what was before it on its
//! stream and on its communicator, it is *running*, and its own limit counts. Calls that were issued within
//! less than 10 ms may have no mark between them: then the first stands for all, and for whatever else was
//! put on the stream meanwhile.
//!
//! Who writes what: the hot path compares three words of its track ([`Usual`](crate::recorder)) and comes
//! here only when one does not fit. Whatever is shared lies behind one lock, which nobody has while CUDA or
//! NCCL is called. With nothing pending the watchdog sleeps until it is called.
//!
//! A call into CUDA or NCCL may hang, and with it the thread that looks. The monitor, which makes no such
//! calls, notices, gives the looking to a successor, and enforces the deadlines of what the first one was
//! looking at.
//!
//! - `judge`: what marks prove, and who is late: no CUDA, no clock;
//! - `registry`: what is watched; `enlist`: how it gets there;
//! - `look`: one look at one communicator;
//! - `threads`: who looks, and when;
//! - `facts`: what others can read.

mod enlist;
mod facts;
mod judge;
mod look;
mod registry;
mod threads;

#[doc(hidden)]
pub use crate::standing::Clock;
#[doc(hidden)]
pub use enlist::answer;
pub(crate) use enlist::{Issue, after, attend, before, ensure};
#[allow(unused_imports, reason = "for whoever shows it")]
pub(crate) use facts::Oldest;
#[doc(hidden)]
pub use facts::Pending;
#[doc(hidden)]
pub use registry::pending;
