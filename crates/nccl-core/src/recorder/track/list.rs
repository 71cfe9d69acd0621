//! The tracks that can be read: those of the live communicators, and of the last ones that ended.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::slots::CallProgress;
use super::stream_progress::StreamProgressTable;
use super::{CallTicket, MAX_CALLS, MAX_OPERATIONS, Track, Writer};
use crate::identity::{Identity, RecorderScope};
use crate::operation::OperationKind;
use crate::recorder::fast_path::FastPathFilter;
use crate::recorder::seqlock_ring::SeqlockRing;
use crate::state::Lifecycle;
use crate::stats::Tally;
use crate::sync::{Mutex, MutexGuard};
use nccl_base::clock::{now, origin};

/// How many communicators are kept after their end, so that their last calls can be read.
const MAX_ENDED: usize = 16;

/// A communicator's handle to its track, which keeps the track readable.
pub(crate) struct TrackHandle(Arc<Track>);

impl TrackHandle {
    /// Creates the track of a communicator.
    pub(crate) fn new(
        identity: Identity,
        lifecycle: &Arc<Lifecycle>,
        tally: &Arc<Tally>,
    ) -> (Self, Writer) {
        let origin = origin().monotonic;
        let mut all = all();
        all.made += 1;
        let track = Arc::new(Track {
            communicator_number: all.made,
            identity,
            lifecycle: Arc::clone(lifecycle),
            call_ring: SeqlockRing::new(MAX_CALLS),
            operation_ring: SeqlockRing::new(MAX_OPERATIONS),
            stream_progress: StreamProgressTable::default(),
            launching: AtomicU64::new(0),
            queued_call: AtomicU64::new(0),
            fast_path: FastPathFilter::default(),
            reach: Mutex::default(),
            tally: Arc::clone(tally),
        });
        all.live.retain(|track| track.strong_count() > 0);
        all.live.push(Arc::downgrade(&track));
        let writer = Writer {
            track: Arc::clone(&track),
            origin,
            calls_written: 0,
            operations_written: 0,
            reach_noted: 0,
            tally: Arc::clone(tally),
        };
        (Self(track), writer)
    }

    pub(crate) fn track(&self) -> &Arc<Track> {
        &self.0
    }

    /// Records the end of the launch of `ticket`, without the communicator's lock.
    pub(crate) fn end_launch(&self, ticket: CallTicket, issued: bool) {
        let progress = if issued {
            CallProgress::Issued
        } else {
            CallProgress::Failed
        };
        self.0.set_progress(ticket, progress);
        self.0.launching.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Drop for TrackHandle {
    /// Keeps the track readable after the communicator's end, for a while.
    fn drop(&mut self) {
        let mut all = all();
        if all.ended.len() == MAX_ENDED {
            all.ended.pop_front();
        }
        all.ended.push_back(Arc::clone(&self.0));
    }
}

struct All {
    made: u64,
    live: Vec<Weak<Track>>,
    ended: VecDeque<Arc<Track>>,
}

/// Returns the list of tracks. Not used on the path of an operation: it is locked when communicators are made or end,
/// and by readers.
fn all() -> MutexGuard<'static, All> {
    static ALL: Mutex<All> = Mutex::new(All {
        made: 0,
        live: Vec::new(),
        ended: VecDeque::new(),
    });
    ALL.lock()
}

/// Every communicator that has a track, oldest first.
#[doc(hidden)]
pub fn tracks() -> Vec<Arc<Track>> {
    if crate::forked::is_child() {
        return Vec::new();
    }
    // Tracks of ended communicators are in both lists.
    all().live.iter().filter_map(Weak::upgrade).collect()
}

/// Returns a number that grows as long as operations complete that show that NCCL reaches all ranks of `scope`. It is the sum,
/// over each communicator of all its ranks, of the sequence number of the last such call that is known to be done.
#[doc(hidden)]
pub fn progress_of(scope: &Arc<RecorderScope>) -> u64 {
    let size = scope.place.world_size;
    let is_of_all = |track: &&Arc<Track>| {
        let Identity {
            scope: Some(other),
            world_size,
            ..
        } = &track.identity
        else {
            return false;
        };
        Arc::ptr_eq(other, scope) && *world_size == size
    };
    let tracks = tracks();
    let tracks = tracks.iter().filter(is_of_all);
    tracks.map(|track| track.last_reaching_all()).sum()
}

/// Describes the last call on any communicator of a world. Reads one record of each communicator.
#[doc(hidden)]
pub fn last_call() -> Option<String> {
    let tracks = tracks();
    let of_worlds = tracks.iter().filter(|track| track.identity.scope.is_some());
    let last = of_worlds.filter_map(|track| Some((track, track.call_ring.last()?)));
    let (track, raw) = last.max_by_key(|(_, raw)| raw.time)?;
    let age = now().saturating_sub(Duration::from_nanos(raw.time));
    let end = match CallProgress::from_word(raw.state) {
        CallProgress::Failed | CallProgress::GivenUp => " and failed",
        _ if raw.sequence <= track.done_on(raw.stream) => " and done",
        _ => "",
    };
    Some(format!(
        "{} #{} on {:?}, called {:.1} s before that{end}",
        OperationKind::from_code((raw.state >> 8) as u8),
        raw.sequence,
        &*track.identity.name,
        age.as_secs_f64()
    ))
}
