//! A rank's session with the others: what its world and its communicators share.
//!
//! A program may drop its `World` and keep its communicators, which still have
//! to learn of a rank that died. They therefore share the session: it stays open until the last of
//! them is dropped, and only then leaves. When a world is dropped while communicators live, the
//! other ranks learn at once that this rank takes part in no exchange any more ([`Request::LeaveWorld`]); should its
//! process die after that, that is reported like any other death.
//!
//! [`Request::LeaveWorld`]: crate::request::Request::LeaveWorld
//!
//! - `handle`: the value itself, and the way to the coordinator; `open`: opening a session, and all sessions of the process;
//! - `status`: the state of this rank and of the others, as far as known here;
//! - `requests`: requests and their answers; `errors`: the errors of those that fail; `gather`: the parts of the members of a communicator, and its joint end;
//! - `recordings`: the recordings of other processes, and their clocks relative to this one's;
//! - `leave`: how the session ends.

mod errors;
mod gather;
mod handle;
mod leave;
mod open;
mod recordings;
mod requests;
mod status;

pub use handle::RankSession;
pub(crate) use handle::SessionBackend;
pub use leave::leave_all;
pub use open::sessions;
pub(crate) use requests::BegunRequest;
