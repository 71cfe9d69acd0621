//! How the clocks of several processes stand to each other.

use serde::{Deserialize, Serialize};

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

    /// With these numbers.
    #[doc(hidden)]
    #[must_use]
    pub const fn new(offset_ns: i64, uncertainty_ns: Option<u64>, source: ClockSource) -> Self {
        Self {
            offset_ns,
            uncertainty_ns,
            source,
        }
    }

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
