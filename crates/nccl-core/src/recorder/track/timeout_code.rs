//! A call's timeout, in the bits that remain free in its state word.

use std::time::Duration;

/// A timeout in 48 bits, in steps of about a microsecond; longer timeouts have larger codes.
#[inline]
pub(crate) fn timeout_code(timeout: Duration) -> u64 {
    timeout.as_secs().min(NO_TIMEOUT_SECONDS) << 20 | u64::from(timeout.subsec_nanos() >> 10)
}

/// Returns the timeout of a code; `None` for more than eight years.
pub(crate) fn timeout_of_code(code: u64) -> Option<Duration> {
    const ROUND: u32 = 10_000;
    let seconds = code >> 20;
    let nanos = (code as u32 & 0xf_ffff) << 10;
    // Timeouts are mostly round numbers, so rounding up restores what was cut off.
    let round = nanos.next_multiple_of(ROUND);
    let nanos = if round - nanos < 1 << 10 {
        round
    } else {
        nanos
    };
    (seconds < NO_TIMEOUT_SECONDS).then(|| Duration::new(seconds, nanos))
}

const NO_TIMEOUT_SECONDS: u64 = (1 << 28) - 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_is_kept_in_48_bits_to_a_microsecond_and_round_ones_exactly() {
        let round = [1, 10, 100, 300, 999, 5000, 30_000, 86_400_000];
        let round = round.map(Duration::from_millis);
        for timeout in round {
            assert_eq!(timeout_of_code(timeout_code(timeout)), Some(timeout));
        }
        let odd = Duration::from_nanos(1_999_999_999);
        let kept = timeout_of_code(timeout_code(odd)).expect("not for ever");
        assert!(kept.abs_diff(odd) < Duration::from_micros(2), "{kept:?}");
        for pair in round.windows(2) {
            assert!(timeout_code(pair[0]) < timeout_code(pair[1]));
        }
        assert!(timeout_code(Duration::MAX) < 1 << 48);
        assert_eq!(timeout_of_code(timeout_code(Duration::MAX)), None);
    }
}
