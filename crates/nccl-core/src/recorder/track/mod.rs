//! The record of one communicator: two rings, its marks, and its identity.
//!
//! An *issue* is one call of this crate that has a sequence number: a collective, a group, a replay of a
//! plan. Its *operations* are the C calls it is made of. Both lie in rings of their own, because a group may
//! have hundreds; an issue names the first of its operations by number.
//!
//! - `record`: both rings and the rest of one communicator;
//! - `slots`: the slots of both rings, and copies of them; `limit`: an issue's limit, in few bits;
//! - `writer`: writes the rings; `calls`: what is read while the communicator goes on;
//! - `marks`: up to which call the work on each stream is done;
//! - `tracked`: the records that can be read.

mod calls;
mod limit;
mod marks;
mod record;
mod slots;
mod tracked;
mod writer;

use nccl_base::clock;

pub(crate) use self::calls::TrackedCall;
pub(super) use self::clock::now;
#[doc(hidden)]
pub use self::clock::origin;
pub(crate) use self::limit::{limit_of_word, limit_word};
#[doc(hidden)]
pub use self::record::Track;
pub(crate) use self::record::handle_of;
use self::record::{ISSUES, OPERATIONS};
pub(crate) use self::slots::OperationSlot;
pub(super) use self::slots::{IssueProgress, IssueRecord};
pub(crate) use self::tracked::Tracked;
#[doc(hidden)]
pub use self::tracked::tracks;
#[doc(hidden)]
pub use self::tracked::{last_call, progress_of};
pub(crate) use self::writer::{IssueTicket, OperationRoom, Writer};
