//! What has come for one rank: answers to requests that threads wait for, and notices.
//!
//! - `state`: all of it, behind one lock, with what a notice changes in it;
//! - `sink`: how what comes gets in; `facts`: what can be looked up; `closing`: when nothing comes any more;
//! - `ticket`: a request whose answer is waited for; `slot`: where that comes;
//! - `notice`, `handlers`: what comes unasked, and who is called with it;
//! - `messages`: what comes over channels;

mod closing;
mod facts;
mod handlers;
mod happenings;
mod messages;
mod notice;
mod sink;
mod slot;
mod state;
mod ticket;

pub(crate) use messages::Taken;
pub use notice::Notice;
pub(crate) use state::Mailbox;
pub(crate) use ticket::Waited;
