//! The last calls of the ranks of a world, as a value.

use serde::{Deserialize, Serialize};

use super::describe;
use nccl_core::recorder::{Clock, Snapshot};

/// The last calls of the ranks of a world, on one time axis.
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
    /// The attempt of the job.
    pub generation: u64,
    /// The rank whose clock the corrected times refer to: `rank 0 (node-a, pid 4021)`.
    pub reference: String,
    /// The ranks with a recording, in order. A restarted rank may occur twice.
    pub ranks: Vec<RankRecording>,
    /// The ranks without a recording.
    pub missing: Vec<MissingRank>,
    /// Recordings and files that were left out, and why.
    #[serde(default)]
    pub left_out: Vec<String>,
}

impl Timeline {
    #[doc(hidden)]
    #[must_use]
    pub fn new(
        (job, generation): (String, u64),
        reference: String,
        ranks: Vec<RankRecording>,
        missing: Vec<MissingRank>,
    ) -> Self {
        Self {
            job,
            generation,
            reference,
            ranks,
            missing,
            left_out: Vec::new(),
        }
    }

    /// The launcher's number of rank `rank` of the world, if a recording has it; the launcher prefixes lines of output
    /// with it.
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
        let mut own = recordings.filter(|one| one.generation == self.generation);
        own.find_map(|recording| {
            let place = match &recording.members {
                Some(members) => members.iter().position(|member| *member == rank)?,
                None => (rank < recording.world_size).then_some(rank)?,
            };
            let launched = recording.launcher_ranks.as_ref();
            let launched = launched.and_then(|ranks| ranks.get(place));
            Some(launched.copied().unwrap_or(rank))
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
    /// How its clock is related to the one of [`Timeline::reference`].
    pub clock: Clock,
    /// Its recording.
    pub snapshot: Snapshot,
}

/// A rank without a recording.
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
    /// Its host, if known.
    #[serde(default)]
    pub host: Option<String>,
    /// Its process number, if known.
    #[serde(default)]
    pub pid: Option<u32>,
    /// Why there is no recording, and what is known about the rank.
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

    /// The rank with its host and process.
    pub(super) fn who(&self) -> String {
        describe::who(self.rank, "", self.host.as_deref(), self.pid)
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

    /// The rank with its host and process.
    pub(super) fn who(&self) -> String {
        let launched = self.snapshot.launcher_rank();
        let launched = launched.map_or_else(String::new, |rank| format!("launcher rank {rank}, "));
        describe::who(
            self.rank,
            &launched,
            Some(&self.snapshot.host),
            Some(self.snapshot.pid),
        )
    }
}
