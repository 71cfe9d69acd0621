//! The clock of all recorded times.

use std::sync::OnceLock;
use std::time::{Instant, SystemTime};

/// The zero of all times: a time on the monotonic clock, and the wall-clock time at that moment.
#[doc(hidden)]
pub struct Origin {
    pub monotonic: Instant,
    pub wall: SystemTime,
}

#[doc(hidden)]
pub fn origin() -> &'static Origin {
    static ORIGIN: OnceLock<Origin> = OnceLock::new();
    ORIGIN.get_or_init(|| Origin {
        monotonic: Instant::now(),
        wall: SystemTime::now(),
    })
}

/// Returns the time since the origin.
#[doc(hidden)]
pub fn now() -> std::time::Duration {
    origin().monotonic.elapsed()
}

/// Returns the recorder's time: nanoseconds since 1970, counted with the monotonic clock.
#[doc(hidden)]
pub fn clock() -> u64 {
    let at = origin().wall + now();
    let since = at.duration_since(SystemTime::UNIX_EPOCH);
    u64::try_from(since.unwrap_or_default().as_nanos()).unwrap_or(u64::MAX)
}
