//! Summaries of repeated measurements.

use std::time::Duration;

/// The summary that `-I` reports of the iterations of one measurement.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// The smallest value.
    pub min: f64,
    /// The largest value.
    pub max: f64,
    /// The mean.
    pub mean: f64,
    /// The median; of an even number of values, the upper of the two in the middle.
    pub p50: f64,
    /// The 95th percentile.
    pub p95: f64,
    /// The 99th percentile; the largest value if there are fewer than 100.
    pub p99: f64,
    /// The standard deviation of the values themselves, not an estimate of a population's.
    pub deviation: f64,
}

impl Summary {
    /// Summarises `values`; `None` without values.
    ///
    /// ```
    /// let summary = nccl_tools::statistics::Summary::of(&[3.0, 1.0, 2.0]).unwrap();
    /// assert_eq!((summary.min, summary.p50, summary.max), (1.0, 2.0, 3.0));
    /// ```
    #[must_use]
    pub fn of(values: &[f64]) -> Option<Self> {
        let sorted = sorted(values)?;
        let n = sorted.len();
        // Nearest rank, counted in whole percents as nccl-tests does.
        let percentile = |percent: usize| sorted[((n * percent).div_ceil(100) - 1).min(n - 1)];
        let mean = sorted.iter().sum::<f64>() / n as f64;
        let variance = sorted.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n as f64;
        Some(Self {
            min: sorted[0],
            max: sorted[n - 1],
            mean,
            p50: sorted[n / 2],
            p95: percentile(95),
            p99: percentile(99),
            deviation: variance.sqrt(),
        })
    }

    /// The deviation in percent of the mean, 0 where the mean is 0.
    #[must_use]
    pub fn variation_percent(&self) -> f64 {
        if self.mean > 0.0 {
            self.deviation / self.mean * 100.0
        } else {
            0.0
        }
    }
}

/// The middle of `values`: of an even number, the mean of the two in the middle.
///
/// ```
/// assert_eq!(nccl_tools::statistics::median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
/// ```
#[must_use]
pub fn median(values: &[f64]) -> Option<f64> {
    let sorted = sorted(values)?;
    let (low, high) = ((sorted.len() - 1) / 2, sorted.len() / 2);
    Some((sorted[low] + sorted[high]) / 2.0)
}

/// The [`median`] of times.
///
/// ```
/// use std::time::Duration;
///
/// let times = [3, 1].map(Duration::from_micros);
/// assert_eq!(nccl_tools::statistics::median_time(&times), Some(Duration::from_micros(2)));
/// ```
#[must_use]
pub fn median_time(times: &[Duration]) -> Option<Duration> {
    let seconds: Vec<f64> = times.iter().map(Duration::as_secs_f64).collect();
    median(&seconds).map(Duration::from_secs_f64)
}

fn sorted(values: &[f64]) -> Option<Vec<f64>> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    if sorted.is_empty() {
        None
    } else {
        Some(sorted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_take_the_nearest_rank() {
        let values: Vec<f64> = (1..=200).map(f64::from).collect();
        let summary = Summary::of(&values).unwrap();
        assert_eq!(
            (summary.p50, summary.p95, summary.p99),
            (101.0, 190.0, 198.0)
        );
        let few = Summary::of(&[5.0, 7.0]).unwrap();
        assert_eq!((few.p50, few.p95, few.p99), (7.0, 7.0, 7.0));
    }

    #[test]
    fn the_deviation_is_that_of_the_values_themselves() {
        let summary = Summary::of(&[2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]).unwrap();
        assert_eq!(summary.mean, 5.0);
        assert_eq!(summary.deviation, 2.0);
        assert_eq!(summary.variation_percent(), 40.0);
    }

    #[test]
    fn nothing_has_no_summary() {
        assert_eq!(Summary::of(&[]), None);
        assert_eq!(median(&[]), None);
    }
}
