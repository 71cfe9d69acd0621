//! Durations, counted in fixed buckets; single values are not kept.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The number of buckets with an upper bound.
const BOUNDED: usize = 14;

/// The bound of the first bucket in nanoseconds; each further bound is four times as large.
const FIRST: u64 = 1_000;

fn bound(bucket: usize) -> u64 {
    FIRST << (2 * bucket)
}

/// Durations to which several threads add. Not for use in every operation, because adding takes three atomic
/// operations.
#[derive(Debug, Default)]
#[doc(hidden)]
pub struct Timer {
    buckets: [AtomicU64; BOUNDED + 1],
    sum: AtomicU64,
    longest: AtomicU64,
}

impl Timer {
    pub(crate) const fn new() -> Self {
        Self {
            buckets: [const { AtomicU64::new(0) }; BOUNDED + 1],
            sum: AtomicU64::new(0),
            longest: AtomicU64::new(0),
        }
    }

    #[doc(hidden)]
    pub fn add(&self, took: Duration) {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let bucket = (0..BOUNDED).find(|&bucket| nanos <= bound(bucket));
        self.buckets[bucket.unwrap_or(BOUNDED)].fetch_add(1, Ordering::Relaxed);
        self.sum.fetch_add(nanos, Ordering::Relaxed);
        self.longest.fetch_max(nanos, Ordering::Relaxed);
    }

    #[doc(hidden)]
    pub fn read(&self) -> Durations {
        let buckets = self.buckets.each_ref().map(|b| b.load(Ordering::Relaxed));
        Durations {
            count: buckets.iter().sum(),
            buckets,
            sum: Duration::from_nanos(self.sum.load(Ordering::Relaxed)),
            longest: Duration::from_nanos(self.longest.load(Ordering::Relaxed)),
        }
    }
}

/// How long an action took, over all its executions.
///
/// ```
/// let init = nccl::stats().init;
/// if init.count > 0 {
///     println!("communicators took {:?} on average, at most {:?}", init.mean(), init.longest);
/// }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Durations {
    buckets: [u64; BOUNDED + 1],
    /// How many durations were counted.
    pub count: u64,
    /// Their sum.
    pub sum: Duration,
    /// The longest; zero for none.
    pub longest: Duration,
}

impl Durations {
    /// Returns the average; zero for none.
    ///
    /// ```
    /// println!("{:?} each", nccl::stats().init.mean());
    /// ```
    #[must_use]
    pub fn mean(&self) -> Duration {
        let nanos = u64::try_from(self.sum.as_nanos()).unwrap_or(u64::MAX);
        Duration::from_nanos(nanos.checked_div(self.count).unwrap_or_default())
    }

    /// Returns the upper bound and the number of durations of each bucket. A bucket contains durations above the
    /// previous bound. The bounds go from 1 µs to 67 s in factors of four; the bound of the last bucket, for all longer
    /// durations, is [`Duration::MAX`].
    ///
    /// ```
    /// for (at_most, count) in nccl::stats().init.buckets() {
    ///     println!("{at_most:?}: {count}");
    /// }
    /// ```
    pub fn buckets(&self) -> impl Iterator<Item = (Duration, u64)> + '_ {
        let bounds = (0..BOUNDED).map(|bucket| Duration::from_nanos(bound(bucket)));
        let bounds = bounds.chain(std::iter::once(Duration::MAX));
        bounds.zip(self.buckets.iter().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_falls_into_the_first_bucket_that_holds_it() {
        let timer = Timer::new();
        let micros = Duration::from_micros;
        for took in [micros(0), micros(1), micros(2), micros(4), micros(5)] {
            timer.add(took);
        }
        timer.add(Duration::from_secs(1000));
        let read = timer.read();
        let filled: Vec<_> = read.buckets().filter(|(_, count)| *count > 0).collect();
        let expected = [
            (micros(1), 2),
            (micros(4), 2),
            (micros(16), 1),
            (Duration::MAX, 1),
        ];
        assert_eq!(filled, expected);
        assert_eq!(read.count, 6);
        assert_eq!(read.longest, Duration::from_secs(1000));
        assert_eq!(read.sum, Duration::from_secs(1000) + micros(12));
        assert_eq!(read.mean(), read.sum / 6);
    }

    #[test]
    fn nothing_takes_no_time() {
        assert_eq!(Timer::new().read(), Durations::default());
        assert_eq!(Durations::default().mean(), Duration::ZERO);
    }
}
