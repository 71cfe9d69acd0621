//! The recordings of several ranks together, on one time axis.
//!
//! - `merge`: which recordings belong together, and how their clocks stand to each other; `files`: from files;
//! - `standing`: who is behind; `words`: calls as sentences;
//! - `layout`: where a call lies on the axis; `chrome`, `html`: what there is to look at.

mod chrome;
mod files;
mod html;
mod layout;
mod merge;
mod standing;
mod words;

use serde::{Deserialize, Serialize};

use super::snapshot::Snapshot;
pub use standing::Standing;

/// What the ranks of a world did last, on one time axis.
///
/// ```
/// use nccl::recorder::{self, Timeline};
///
/// let timeline = Timeline::merge(vec![recorder::snapshot()])?;
/// assert!(timeline.to_html().starts_with("<!doctype html>"));
/// # Ok::<(), nccl::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Timeline {
    /// The name of the job.
    pub job: String,
    /// Which attempt of the job it is.
    pub epoch: u64,
    /// Whose clock the times are of, once corrected: `rank 0 (node-a, pid 4021)`.
    pub reference: String,
    /// The ranks of which there is a recording, in order. A rank that was started again may be there twice.
    pub ranks: Vec<RankRecording>,
    /// Those of which there is none.
    pub missing: Vec<MissingRank>,
    /// What else was left out, and why.
    #[serde(default)]
    pub left_out: Vec<String>,
}

impl Timeline {
    #[doc(hidden)]
    #[must_use]
    pub fn new(
        (job, epoch): (String, u64),
        reference: String,
        ranks: Vec<RankRecording>,
        missing: Vec<MissingRank>,
    ) -> Self {
        Self {
            job,
            epoch,
            reference,
            ranks,
            missing,
            left_out: Vec::new(),
        }
    }

    /// As what the launcher started rank `rank` of the world, as far as the recordings say: the number before its lines of
    /// output.
    ///
    /// ```
    /// use nccl::recorder::{self, Timeline};
    ///
    /// let timeline = Timeline::merge(vec![recorder::snapshot()])?;
    /// assert_eq!(timeline.launcher_rank(1000), None);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn launcher_rank(&self, rank: usize) -> Option<usize> {
        let snapshots = self.ranks.iter().map(|part| &part.snapshot);
        let recordings = snapshots.flat_map(|snapshot| &snapshot.communicators);
        let mut own = recordings.filter(|one| one.epoch == self.epoch);
        own.find_map(|recording| {
            let roster = recording.roster();
            let place =
                (0..recording.world_size).find(|place| roster.world_rank(*place) == rank)?;
            Some(roster.launcher_rank(place).unwrap_or(rank))
        })
    }
}

/// One rank's part of a [`Timeline`].
///
/// ```
/// fn show(timeline: &nccl::recorder::Timeline) {
///     for part in &timeline.ranks {
///         println!("rank {}: {} communicators", part.rank, part.snapshot.communicators.len());
///     }
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RankRecording {
    /// The rank, in the world.
    pub rank: usize,
    /// How its clock stands to the one of [`Timeline::reference`].
    pub clock: Clock,
    /// What it recorded.
    pub snapshot: Snapshot,
}

/// A rank of which there is no recording.
///
/// ```
/// fn show(timeline: &nccl::recorder::Timeline) {
///     for missing in &timeline.missing {
///         println!("rank {} is missing: {}", missing.rank, missing.why);
///     }
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct MissingRank {
    /// The rank, in the world.
    pub rank: usize,
    /// Its host, where that is known.
    #[serde(default)]
    pub host: Option<String>,
    /// Its process, where that is known.
    #[serde(default)]
    pub pid: Option<u32>,
    /// Why, and what is known of it.
    pub why: String,
}

/// How the clock of a process stands to that of another.
///
/// ```
/// use std::time::Duration;
///
/// fn uncertainty(clock: &nccl::recorder::Clock) -> Option<Duration> {
///     clock.uncertainty_ns.map(Duration::from_nanos)
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Clock {
    /// What to add to its times, in nanoseconds.
    pub offset_ns: i64,
    /// By how much that may be wrong, in nanoseconds; `None` where nobody knows.
    #[serde(default)]
    pub uncertainty_ns: Option<u64>,
    /// How that is known.
    pub source: ClockSource,
}

/// How the offset of a [`Clock`] is known.
///
/// ```
/// use nccl::recorder::{ClockSource, Timeline};
///
/// /// Whether times of different ranks can be compared to better than what their hosts' clocks differ.
/// fn is_measured(timeline: &Timeline) -> bool {
///     timeline.ranks.iter().all(|part| part.clock.source != ClockSource::Wall)
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ClockSource {
    /// It is the clock itself.
    Reference,
    /// Measured: the shortest of several round trips; half of it is the uncertainty.
    RoundTrip,
    /// Both processes ran under one kernel, and so have one clock.
    SameMachine,
    /// Not at all: the clocks on the wall of two machines are taken for equal.
    Wall,
}

impl Clock {
    /// The one that the others are compared with.
    #[doc(hidden)]
    pub const REFERENCE: Self = Self {
        offset_ns: 0,
        uncertainty_ns: Some(0),
        source: ClockSource::Reference,
    };

    /// From the shortest round trip: how long it took, and by how much the other clock was ahead of this one
    /// in the middle of it.
    #[doc(hidden)]
    pub fn measured(ahead_ns: i128, round_trip_ns: u128) -> Self {
        let bounded = |number: i128| {
            let least = number.max(i64::MIN.into());
            i64::try_from(least).unwrap_or(i64::MAX)
        };
        Self {
            offset_ns: bounded(ahead_ns.saturating_neg()),
            uncertainty_ns: Some(u64::try_from(round_trip_ns.div_ceil(2)).unwrap_or(u64::MAX)),
            source: ClockSource::RoundTrip,
        }
    }
}

impl MissingRank {
    #[doc(hidden)]
    pub fn new(
        rank: usize,
        host: Option<String>,
        pid: Option<u32>,
        why: impl Into<String>,
    ) -> Self {
        Self {
            rank,
            host,
            pid,
            why: why.into(),
        }
    }

    /// Who it is.
    fn who(&self) -> String {
        words::who(self.rank, "", self.host.as_deref(), self.pid)
    }
}

impl RankRecording {
    #[doc(hidden)]
    #[must_use]
    pub fn new(rank: usize, clock: Clock, snapshot: Snapshot) -> Self {
        Self {
            rank,
            clock,
            snapshot,
        }
    }

    /// Who it is.
    fn who(&self) -> String {
        let launched = self.snapshot.launcher_rank();
        let launched = launched.map_or_else(String::new, |rank| format!("launcher rank {rank}, "));
        words::who(
            self.rank,
            &launched,
            Some(&self.snapshot.host),
            Some(self.snapshot.pid),
        )
    }
}
