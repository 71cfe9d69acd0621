//! Waits with a limit.

use std::time::{Duration, Instant};

/// The limit of any wait, on a machine with other work.
pub(crate) const DEADLINE: Duration = Duration::from_secs(120);

/// Calls `ask` repeatedly, until it returns a value.
pub(crate) fn until<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(
            begun.elapsed() < DEADLINE,
            "{what}: not within {DEADLINE:?}"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}
