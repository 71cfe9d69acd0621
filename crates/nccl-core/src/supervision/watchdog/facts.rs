//! The results of the watchdog's last look, for the code that shows them.

#![allow(dead_code, reason = "not everything is shown yet")]

use std::sync::Arc;
use std::time::Instant;

use crate::operation::{OperationKind, Shape};
use crate::recorder::{Track, origin};
use crate::standing::{Clock, Standing};

/// A communicator whose operations are not, or a moment ago were not, known to be done.
#[derive(Clone, Debug)]
#[doc(hidden)]
pub struct Pending {
    #[doc(hidden)]
    pub communicator: Arc<str>,
    /// Its number among the communicators of this process, from 1.
    #[doc(hidden)]
    pub number: u64,
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    /// How many calls were issued and are not known to be done.
    #[doc(hidden)]
    pub depth: u64,
    /// The first of these calls.
    #[doc(hidden)]
    pub oldest: Option<Oldest>,
    /// When a call was last seen to be done; `None` while it is watched and none was.
    pub(crate) progress: Option<Instant>,
    /// When the watchdog looked last; `None` before the first time.
    pub(crate) looked: Option<Instant>,
}

/// A call that is not known to be done.
#[derive(Clone, Copy, Debug)]
#[doc(hidden)]
pub struct Oldest {
    #[doc(hidden)]
    pub sequence: u64,
    pub(crate) kind: OperationKind,
    pub(crate) shape: Shape,
    /// When it was called.
    #[doc(hidden)]
    pub since: Instant,
    #[doc(hidden)]
    pub clock: Clock,
    /// Since when its clock has been in this state, as far as known.
    pub(crate) began: Instant,
}

/// The facts of one communicator, as of the last look.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Facts {
    pub(super) standing: Option<Standing>,
    /// The shape of the call that `standing` names.
    pub(super) shape: Shape,
    pub(super) depth: u64,
    pub(super) progress: Option<Instant>,
    pub(super) looked: Option<Instant>,
}

impl Facts {
    pub(super) fn of(&self, track: &Track) -> Pending {
        let zero = origin().monotonic;
        Pending {
            communicator: Arc::clone(&track.identity.name),
            number: track.number,
            rank: track.identity.rank,
            world_size: track.identity.world_size,
            depth: self.depth,
            oldest: self.standing.map(|standing| Oldest {
                sequence: standing.call.number,
                kind: standing.call.kind,
                shape: self.shape,
                since: zero + standing.call.since,
                clock: standing.clock,
                began: zero + standing.began,
            }),
            progress: self.progress,
            looked: self.looked,
        }
    }
}
