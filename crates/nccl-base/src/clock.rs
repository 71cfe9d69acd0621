//! The clock by which everything is recorded.

use std::sync::OnceLock;
use std::time::{Instant, SystemTime};

/// The zero of all times: monotonic, and what the clock on the wall said then.
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

/// How much time has passed since then.
#[doc(hidden)]
pub fn now() -> std::time::Duration {
    origin().monotonic.elapsed()
}

/// What the clock of the recorder says: nanoseconds since 1970, counted by a clock that only goes forward.
#[doc(hidden)]
pub fn clock() -> u64 {
    let at = origin().wall + now();
    let since = at.duration_since(SystemTime::UNIX_EPOCH);
    u64::try_from(since.unwrap_or_default().as_nanos()).unwrap_or(u64::MAX)
}
