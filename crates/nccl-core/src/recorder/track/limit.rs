//! An issue's limit, in the bits that its state word has left.

use std::time::Duration;

/// A limit in 48 bits, in steps of about a microsecond; longer limits are larger words.
#[inline]
pub(crate) fn limit_word(limit: Duration) -> u64 {
    limit.as_secs().min(FOR_EVER) << 20 | u64::from(limit.subsec_nanos() >> 10)
}

/// The limit that a word stands for; `None` for more than eight years.
pub(crate) fn limit_of_word(word: u64) -> Option<Duration> {
    const ROUND: u32 = 10_000;
    let seconds = word >> 20;
    let nanos = (word as u32 & 0xf_ffff) << 10;
    // Limits are mostly round numbers: what was cut off is added again.
    let round = nanos.next_multiple_of(ROUND);
    let nanos = if round - nanos < 1 << 10 {
        round
    } else {
        nanos
    };
    (seconds < FOR_EVER).then(|| Duration::new(seconds, nanos))
}

const FOR_EVER: u64 = (1 << 28) - 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_kept_in_48_bits_to_a_microsecond_and_round_ones_exactly() {
        let round = [1, 10, 100, 300, 999, 5000, 30_000, 86_400_000];
        let round = round.map(Duration::from_millis);
        for limit in round {
            assert_eq!(limit_of_word(limit_word(limit)), Some(limit));
        }
        let odd = Duration::from_nanos(1_999_999_999);
        let kept = limit_of_word(limit_word(odd)).expect("not for ever");
        assert!(kept.abs_diff(odd) < Duration::from_micros(2), "{kept:?}");
        for pair in round.windows(2) {
            assert!(limit_word(pair[0]) < limit_word(pair[1]));
        }
        assert!(limit_word(Duration::MAX) < 1 << 48);
        assert_eq!(limit_of_word(limit_word(Duration::MAX)), None);
    }
}
