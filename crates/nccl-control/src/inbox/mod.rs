//! Messages received for one rank: answers to requests that threads wait for, and notices.
//!
//! - `state`: the whole state, behind one lock, and the effect of a notice on it;
//! - `delivery`: adding received messages; `status`: state that can be read at any time; `closing`: the end of the
//!   inbox;
//! - `pending_request`: a request whose answer is awaited; `answer_slot`: where that answer arrives;
//! - `notice`, `handlers`: unsolicited messages, and the functions called with them;
//! - `channel_messages`: messages over channels.

mod answer_slot;
mod channel_messages;
mod closing;
mod delivery;
mod event_bus;
mod handlers;
mod notice;
mod pending_request;
mod state;
mod status;

#[cfg(any(test, feature = "simulator"))]
pub(crate) use answer_slot::AnswerSlot;
pub(crate) use channel_messages::ReceiveOutcome;
pub use notice::Notice;
pub(crate) use pending_request::{PendingRequest, WaitOutcome};
pub(crate) use state::Inbox;
