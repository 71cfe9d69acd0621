//! What one communicator recorded: two lanes, its marks, and who it is.
//!
//! An *issue* is one call of this crate that has a sequence number: a collective, a group, a replay of a
//! plan. Its *operations* are the C calls it is made of. Both lie in lanes of their own, because a group may
//! have hundreds; an issue names the first of its operations by number.
//!
//! - `slots`: where both are written, and copies of them; `limit`: how long an issue may run, in few bits;
//! - `writer`: who writes; `calls`: what is read of it while it goes on;
//! - `marks`: up to where the work on each stream is done; `clock`: the time by which all is recorded;
//! - `tracked`: the records that can be read.

mod calls;
use nccl_base::clock;
mod limit;
mod marks;
mod slots;
mod tracked;
mod writer;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::CudaStream;

use self::marks::{Mark, STREAMS};
use self::slots::Issue;
use super::lane::Lane;
use super::usual::Usual;
use crate::identity::Identity;
use crate::state::Phase;
use crate::stats::Tally;
use crate::sync::Mutex;

pub(crate) use self::calls::TrackedCall;
pub(super) use self::clock::now;
#[doc(hidden)]
pub use self::clock::origin;
pub(crate) use self::limit::{limit_of_word, limit_word};
pub(crate) use self::slots::OperationSlot;
pub(super) use self::slots::{IssueRecord, Progress};
pub(crate) use self::tracked::Tracked;
#[doc(hidden)]
pub use self::tracked::last_call;
#[doc(hidden)]
pub use self::tracked::tracks;
pub(crate) use self::writer::{Room, Ticket, Writer};

/// Issues and operations that are kept of each communicator.
pub(in crate::recorder) const ISSUES: usize = 512;

pub(crate) const OPERATIONS: usize = 2048;

/// The record of one communicator.
#[doc(hidden)]
pub struct Track {
    /// Its number among the communicators of this process, from 1.
    #[doc(hidden)]
    pub number: u64,
    #[doc(hidden)]
    pub identity: Identity,
    #[doc(hidden)]
    pub phase: Arc<Phase>,
    pub(in crate::recorder) issues: Lane<Issue>,
    pub(in crate::recorder) operations: Lane<OperationSlot>,
    marks: [Mark; STREAMS],
    /// The same of further streams, by handle.
    more_marks: Mutex<BTreeMap<u64, u64>>,
    /// Replays that are being launched, which happens without the communicator's lock.
    launching: AtomicU64,
    pub(crate) usual: Usual,
    pub(in crate::recorder) tally: Arc<Tally>,
}

/// CUDA's handle of a stream.
pub(crate) fn handle_of(stream: &CudaStream) -> u64 {
    stream.cu_stream().addr() as u64
}

impl Track {
    /// A replay is about to be launched, without the communicator's lock, which is held now.
    pub(crate) fn launches(&self) {
        self.launching.fetch_add(1, Ordering::AcqRel);
    }
}
