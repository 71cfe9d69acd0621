//! The offsets between the clocks of several processes.

use serde::{Deserialize, Serialize};

/// The offset from a process's clock to another process's clock.
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
    /// The number of nanoseconds to add to the process's times.
    pub offset_ns: i64,
    /// The bound of the error, in nanoseconds; `None` if unknown.
    #[serde(default)]
    pub uncertainty_ns: Option<u64>,
    /// How the offset was determined.
    pub source: ClockSource,
}

/// How the offset of a [`Clock`] was determined.
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
    /// This clock is the reference.
    Reference,
    /// Measured with the shortest of several round trips; half of its duration is the uncertainty.
    RoundTrip,
    /// Both processes run under one kernel and share its clock.
    SameMachine,
    /// Not measured: the wall clocks of the two machines are assumed to be equal.
    Wall,
}

impl Clock {
    /// The reference clock, to which the others are compared.
    #[doc(hidden)]
    pub const REFERENCE: Self = Self {
        offset_ns: 0,
        uncertainty_ns: Some(0),
        source: ClockSource::Reference,
    };

    /// A clock with these values.
    #[doc(hidden)]
    #[must_use]
    pub const fn new(offset_ns: i64, uncertainty_ns: Option<u64>, source: ClockSource) -> Self {
        Self {
            offset_ns,
            uncertainty_ns,
            source,
        }
    }

    /// Makes a clock from the shortest round trip: its duration, and by how much the other clock was ahead of this one
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
