//! Writes a timeline as JSON and reads it. `docs/flight-recorder.md` has the format.

use nccl_core::recorder::json::{MOST_RANKS, TIMELINE, implausible, kind, read, write};

use super::Timeline;
use crate::error::Result;

impl Timeline {
    /// Returns JSON in the format of `docs/flight-recorder.md`.
    ///
    /// ```
    /// use nccl::recorder::Timeline;
    ///
    /// let timeline = Timeline::merge(vec![nccl::recorder::snapshot()])?;
    /// assert_eq!(Timeline::from_json(&timeline.to_json())?, timeline);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn to_json(&self) -> String {
        write(TIMELINE, self)
    }

    /// Reads the text of [`to_json`](Self::to_json).
    ///
    /// # Errors
    /// As [`Snapshot::from_json`](nccl_core::recorder::Snapshot::from_json).
    ///
    /// ```
    /// let error = nccl::recorder::Timeline::from_json("[]").unwrap_err();
    /// assert!(error.to_string().contains("reading a recording"));
    /// ```
    pub fn from_json(text: &str) -> Result<Self> {
        read(TIMELINE, text, |timeline: &Self| {
            let ranks = timeline.ranks.iter().map(|one| one.rank);
            let missing = timeline.missing.iter().map(|one| one.rank);
            let wrong = ranks.chain(missing).find(|&rank| rank >= MOST_RANKS);
            let wrong = wrong.map(|rank| format!("{rank} is no rank"));
            let snapshots = timeline.ranks.iter().map(|one| &one.snapshot);
            wrong.or_else(|| snapshots.into_iter().find_map(implausible))
        })
    }

    /// Whether a text claims to be a timeline, and not one rank's snapshot.
    pub(super) fn is_meant(text: &str) -> bool {
        kind(text).as_deref() == Some(TIMELINE)
    }
}
