//! Messages received for one rank: answers to requests that threads wait for, and notices.
//!
//! - `state`: the whole state, behind one lock, and the effect of a notice on it;
//! - `sink`: how messages get in; `facts`: state that can be read at any time; `closing`: the end of the mailbox;
//! - `ticket`: a request whose answer is awaited; `slot`: where that answer arrives;
//! - `notice`, `handlers`: unsolicited messages, and the functions called with them;
//! - `messages`: messages over channels;

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
