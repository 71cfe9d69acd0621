//! The flight recorder: what each communicator did last, for whoever asks why it does not go on.
//!
//! It is always on. Every call leaves a fingerprint in a ring of its communicator: its sequence number and
//! time, and for each operation in it what it was, count, type, peer or root, reduction, and which message to
//! that peer. Writing it allocates nothing, takes no lock that the call does not have anyway, and asks CUDA
//! nothing; `docs/results/overhead.md` has what it costs.
//! The last 512 calls and the last 2048 operations of each communicator are kept, also of the last 16 that
//! ended.
//!
//! [`snapshot`] copies everything at any time, from any thread, and holds nobody up.
//!
//! - `lane`: the ring, and why a reader never sees half a record;
//! - `track`: what one communicator writes;
//! - `usual`: of which calls the watchdog does not have to be told;
//! - `notes`: what the program says; `spans`: in which of its spans a call was made;
//! - `shape`: what a call was about, for its error;
//! - `snapshot`: what is read; `json`: how it is written, and read again;
//! - `turns`: which collective of its communicator a call is;
//! - `dump`: a file of it when a communicator is aborted.
//!
//! The snapshots of several ranks together are a `Timeline`.

mod dump;
mod fields;
#[doc(hidden)]
pub mod json;
mod lane;
mod notes;
mod shape;
mod snapshot;
mod spans;
mod track;
mod turns;
mod usual;

pub use crate::identity::{Clock, ClockSource, Place};
#[doc(hidden)]
pub use crate::identity::{Home, Identity};
#[doc(hidden)]
pub use dump::is_wanted;
#[doc(hidden)]
pub use fields::since_1970;
#[doc(hidden)]
pub use notes::phase;
pub use notes::{Note, note};
#[doc(hidden)]
pub use snapshot::of_place;
#[doc(hidden)]
pub use snapshot::read_one;
pub use snapshot::{
    Call, CallState, RecordedOperation, RecordedReduction, Recording, Snapshot, snapshot,
};
pub use spans::{CallSpan, describe_spans};
#[doc(hidden)]
pub use track::Track;
#[doc(hidden)]
pub use track::last_call;
#[doc(hidden)]
pub use track::origin;
#[doc(hidden)]
pub use track::progress_of;
#[doc(hidden)]
pub use track::tracks;
pub(crate) use track::{
    OperationSlot, Room, Tracked, TrackedCall, Writer, handle_of, limit_of_word, limit_word,
};
#[doc(hidden)]
pub use turns::Turn;
pub(crate) use turns::{Turns, is_collective};
