//! What the ranks of a world did last, as a value.

use serde::{Deserialize, Serialize};

use super::words;
use nccl_core::recorder::{Clock, Snapshot};

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
    pub(super) fn who(&self) -> String {
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
    pub(super) fn who(&self) -> String {
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
