//! The track of one communicator, which holds all data that the recorder has of it: two rings, the progress of its streams,
//! and its identity.
//!
//! A *call* is one operation of this crate that has a sequence number: a collective, a group, a replay of a plan. Its
//! *operations* are the C calls of which it consists, as in a [`Recording`](crate::recorder::Recording). Calls and
//! operations have separate rings, because a group may have hundreds of operations; a call refers to its first
//! operation by number.
//!
//! - `communicator_track`: both rings and the rest of one communicator;
//! - `slots`: the slots of both rings, and copies of them; `timeout_code`: a call's timeout in a compact form;
//! - `writer`: writes the rings; `calls`: what is read while calls are being recorded;
//! - `stream_progress`: up to which call the work on each stream is done;
//! - `list`: the tracks that can be read.

mod calls;
mod communicator_track;
mod list;
mod reach;
mod slots;
mod stream_progress;
mod timeout_code;
mod writer;

use nccl_base::clock;

pub(crate) use self::calls::RecordedCall;
pub(super) use self::clock::now;
#[doc(hidden)]
pub use self::clock::origin;
#[doc(hidden)]
pub use self::communicator_track::Track;
pub(crate) use self::communicator_track::handle_of;
use self::communicator_track::{MAX_CALLS, MAX_OPERATIONS};
pub(crate) use self::list::TrackHandle;
#[doc(hidden)]
pub use self::list::tracks;
#[doc(hidden)]
pub use self::list::{last_call, progress_of};
pub(crate) use self::slots::OperationSlot;
pub(super) use self::slots::{CallProgress, RawCall};
pub(crate) use self::timeout_code::{timeout_code, timeout_of_code};
pub(crate) use self::writer::{CallTicket, Writer};
