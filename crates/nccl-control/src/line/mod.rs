//! A rank's line to the others: what its world and its communicators share.
//!
//! A program may drop its `World` and go on with its communicators, which still have
//! to learn of a rank that died. They therefore share the connection: it stays open until the last of
//! them is dropped, and only then says goodbye. When a world is dropped while communicators live, the
//! other ranks learn at once that this rank takes part in no exchange any more ([`Request::Stay`]); should its
//! process die after that, that is reported like any other death.
//!
//! [`Request::Stay`]: crate::request::Request::Stay
//!
//! - `link`: the value itself, and the way to the coordinator; `open`: opening a line, and all lines of the process;
//! - `facts`: what this rank knows of itself and of the others;
//! - `asking`: requests and their answers; `explain`: the errors of those that fail; `ends`: the joint end of a communicator;
//! - `recordings`: the recordings of other processes, and their clocks relative to this one's;
//! - `farewell`: how the line says goodbye.

mod asking;
mod ends;
mod explain;
mod facts;
mod farewell;
mod link;
mod open;
mod recordings;

pub use farewell::say_goodbye;
pub use link::Line;
pub(crate) use link::Link;
pub use open::lines;
