//! The results of the watchdog's last poll, for the code that displays them.

#![allow(dead_code, reason = "not everything is shown yet")]

use std::sync::Arc;
use std::time::Instant;

use crate::operation::{OperationKind, Shape};
use crate::pending_call::{CallStage, PendingCall};
use crate::recorder::{Track, origin};

/// A communicator whose operations are not known to be done, or were not a moment ago.
#[derive(Clone, Debug)]
#[doc(hidden)]
pub struct PendingCommunicator {
    #[doc(hidden)]
    pub communicator: Arc<str>,
    /// Its number among the communicators of this process, from 1.
    #[doc(hidden)]
    pub communicator_number: u64,
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    /// How many calls were issued and are not known to be done.
    #[doc(hidden)]
    pub depth: u64,
    /// The first of these calls.
    #[doc(hidden)]
    pub oldest: Option<OldestCall>,
    /// When a call was last seen to complete; `None` if none has completed while the communicator was watched.
    pub(crate) progress: Option<Instant>,
    /// When the watchdog polled last; `None` before the first time.
    pub(crate) polled: Option<Instant>,
}

/// A call that is not known to be done.
#[derive(Clone, Copy, Debug)]
#[doc(hidden)]
pub struct OldestCall {
    #[doc(hidden)]
    pub sequence: u64,
    pub(crate) kind: OperationKind,
    pub(crate) shape: Shape,
    /// When it was called.
    #[doc(hidden)]
    pub since: Instant,
    #[doc(hidden)]
    pub stage: CallStage,
    /// When its clock entered this state, as far as known.
    pub(crate) began: Instant,
}

/// The results for one communicator, as of the last poll.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PollResults {
    pub(super) pending_call: Option<PendingCall>,
    /// The shape of the call that `pending_call` names.
    pub(super) shape: Shape,
    pub(super) depth: u64,
    pub(super) progress: Option<Instant>,
    pub(super) polled: Option<Instant>,
}

impl PollResults {
    pub(super) fn of(&self, track: &Track) -> PendingCommunicator {
        let zero = origin().monotonic;
        PendingCommunicator {
            communicator: Arc::clone(&track.identity.name),
            communicator_number: track.communicator_number,
            rank: track.identity.rank,
            world_size: track.identity.world_size,
            depth: self.depth,
            oldest: self.pending_call.map(|pending_call| OldestCall {
                sequence: pending_call.call.sequence,
                kind: pending_call.call.kind,
                shape: self.shape,
                since: zero + pending_call.call.since,
                stage: pending_call.stage,
                began: zero + pending_call.began,
            }),
            progress: self.progress,
            polled: self.polled,
        }
    }
}
