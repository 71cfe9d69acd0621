//! Waiting for what comes some day, and not for ever.

use std::time::{Duration, Instant};

/// How long anything may take, on a machine that has other work to do.
pub(crate) const DEADLINE: Duration = Duration::from_secs(120);

/// Asks again and again, until there is an answer.
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
