//! The time of a machine.

use std::time::{Duration, Instant};

use crate::proto::Time;

/// Translates between the system's monotonic clock and the time of one machine.
pub(crate) struct Clock(Instant);

impl Clock {
    /// The time at which a machine begins. It is not 0, because a machine treats events as old as that as expired.
    pub(crate) const ORIGIN: Time = Time(3_600_000_000_000);

    /// Starts a clock at [`ORIGIN`](Self::ORIGIN).
    pub(crate) fn start() -> Self {
        Self(Instant::now())
    }

    pub(crate) fn time(&self, at: Instant) -> Time {
        let since = at.saturating_duration_since(self.0).as_nanos();
        Self::ORIGIN.after(u64::try_from(since).unwrap_or(u64::MAX))
    }

    /// Returns `None` for a time that is never reached.
    pub(crate) fn instant(&self, time: Time) -> Option<Instant> {
        let since = Duration::from_nanos(time.since(Self::ORIGIN));
        (time != Time::NEVER).then(|| self.0 + since)
    }
}
