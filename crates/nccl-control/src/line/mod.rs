//! A rank's line to the others: what its world and its communicators share.
//!
//! A program may drop its `World` and go on with its communicators, and these still have
//! to hear of a rank that died. So the connection is theirs together: it stays open until the last of
//! them is gone, and only then says goodbye. Of a world that is gone while communicators live, the
//! others learn at once that this rank comes to no exchange any more ([`Request::Stay`]); should its
//! process die after that, they hear of it like of any other death.
//!
//! [`Request::Stay`]: crate::request::Request::Stay
//!
//! - `link`: the value itself, and the way to the coordinator; `open`: how it comes to be, and all lines of the process;
//! - `facts`: what this rank knows of itself and of the others;
//! - `asking`: requests and their answers; `explain`: the errors of those that fail; `ends`: the end of a communicator, waited for together;
//! - `recordings`: what other processes have recorded, and how their clocks stand to this one's;
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
