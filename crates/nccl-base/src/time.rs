//! Deadlines that cannot overflow.

use std::time::{Duration, Instant};

/// Returns the moment `timeout` from now; a timeout beyond the range of a clock counts as none.
#[doc(hidden)]
pub fn deadline_after(timeout: Duration) -> Instant {
    later(Instant::now(), timeout)
}

/// Returns the moment `timeout` after `start`; a timeout beyond the range of a clock counts as none.
#[inline]
#[doc(hidden)]
pub fn later(start: Instant, timeout: Duration) -> Instant {
    const LONG: Duration = Duration::from_secs(100 * 365 * 86_400);
    start.checked_add(timeout.min(LONG)).unwrap_or(start)
}

/// Returns a duration in milliseconds, as used in events.
#[doc(hidden)]
pub fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_limit_is_too_long() {
        assert!(deadline_after(Duration::MAX) > Instant::now() + Duration::from_secs(86_400));
        assert!(deadline_after(Duration::ZERO) <= Instant::now());
    }
}
