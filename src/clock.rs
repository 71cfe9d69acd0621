//! The time of day, as nccl-tests prints it: local, to the second.

use std::time::{SystemTime, UNIX_EPOCH};

use crate::format::TIMESTAMP_FORMAT;

/// Now, as `2026-01-02 03:04:05`.
///
/// ```
/// assert_eq!(nccl_tools::clock::now().len(), 19);
/// ```
#[must_use]
pub fn now() -> String {
    let seconds = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    local(seconds as libc::time_t)
}

fn local(seconds: libc::time_t) -> String {
    // SAFETY: `tm` is plain data for which all zeros is valid.
    let mut parts: libc::tm = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are to live values of the right type; the function is re-entrant.
    if unsafe { libc::localtime_r(&seconds, &mut parts) }.is_null() {
        return format!("{seconds} s");
    }
    debug_assert_eq!(TIMESTAMP_FORMAT, "%Y-%m-%d %H:%M:%S");
    format!(
        "{:04}-{:02}-{:02} {:02}:{:02}:{:02}",
        parts.tm_year + 1900,
        parts.tm_mon + 1,
        parts.tm_mday,
        parts.tm_hour,
        parts.tm_min,
        parts.tm_sec
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_is_printed_with_all_its_digits() {
        // Whatever the time zone, the seconds of this moment are the same, and the date is one of two.
        let text = local(1_767_323_045);
        assert!(text.starts_with("2026-01-0"), "{text}");
        assert!(text.ends_with(":05"), "{text}");
    }
}
