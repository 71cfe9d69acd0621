//! A rank's session with the other ranks, shared by its world and its communicators.
//!
//! A program may drop its `World` and keep its communicators, which still must learn of a rank that died. They
//! therefore share the session: it stays open until the last of them is dropped, and only then leaves. When a world is
//! dropped while communicators exist, the other ranks learn at once that this rank takes part in no further exchange
//! ([`Request::LeaveWorld`]); if its process dies after that, the death is reported like any other.
//!
//! [`Request::LeaveWorld`]: crate::request::Request::LeaveWorld
//!
//! - `handle`: the value itself, and its backend; `open`: opening a session, and all sessions of the process;
//! - `status`: the state of this rank and of the others, as far as known here;
//! - `requests`: requests and their answers; `errors`: the errors of failed requests; `gather`: the parts of the
//!   members of a communicator, and its joint end;
//! - `recordings`: the recordings of other processes, and the offsets of their clocks;
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
