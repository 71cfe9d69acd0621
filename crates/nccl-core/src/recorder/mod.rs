//! The flight recorder: the last calls of each communicator, to find out why it does not continue.
//!
//! It is always on. Every call leaves a record in a ring of its communicator: its sequence number and time,
//! and for each of its operations the kind, count, type, peer or root, reduction, and the number of the
//! message to that peer. Writing the record allocates nothing, takes no lock that the call does not take
//! anyway, and does not call CUDA; `docs/results/overhead.md` has its cost. The last 512 calls and the last
//! 2048 operations of each communicator are kept, also of the last 16 communicators that ended.
//!
//! [`snapshot`] copies everything at any time, from any thread, and delays no other thread.
//!
//! - `seqlock_ring`: the ring, and why a reader never sees half a record;
//! - `track`: the track of a communicator, with its records;
//! - `fast_path`: the calls that need not be reported to the watchdog;
//! - `notes`: notes of the program; `spans`: the program's span in which a call was made;
//! - `shape`: the shape of a call, for its error;
//! - `snapshot`: the values that readers get; `json`: how they are written and read;
//! - `collective_index`: the number of a call among the collectives of its communicator;
//! - `dump`: writes a recording to a file when a communicator is aborted.
//!
//! The snapshots of several ranks together are a `Timeline`.

mod collective_index;
mod dump;
mod fast_path;
mod fields;
#[doc(hidden)]
pub mod json;
mod notes;
mod seqlock_ring;
mod shape;
mod snapshot;
mod spans;
mod track;

pub use crate::identity::{Clock, ClockSource, WorldRank};
#[doc(hidden)]
pub use crate::identity::{Identity, RecorderScope};
#[doc(hidden)]
pub use collective_index::{IndexedCall, is_of_some_ranks};
pub(crate) use collective_index::{RecordedCollectives, is_collective};
#[doc(hidden)]
pub use dump::is_enabled;
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
#[doc(hidden)]
pub use snapshot::{ras_address, set_inside_nccl, set_ras_address};
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
    OperationSlot, RecordedCall, TrackHandle, Writer, handle_of, timeout_code, timeout_of_code,
};
