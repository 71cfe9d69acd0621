//! Bandwidth by nccl-tests' definitions.

/// Bandwidths in GB/s (10⁹ bytes).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bandwidth {
    /// Bytes of one rank over time.
    pub algorithm: f64,
    /// The part of that which a link between ranks has to carry.
    pub bus: f64,
}

impl Bandwidth {
    /// The bandwidth of an operation with `bytes` per rank in `seconds`; `factor` is the bus bandwidth over the
    /// algorithm bandwidth.
    ///
    /// ```
    /// use nccl_tools::bandwidth::Bandwidth;
    /// let all_to_all_of_four = Bandwidth::of(4_000_000_000, 2.0, 3.0 / 4.0);
    /// assert_eq!((all_to_all_of_four.algorithm, all_to_all_of_four.bus), (2.0, 1.5));
    /// ```
    #[must_use]
    pub fn of(bytes: u64, seconds: f64, factor: f64) -> Self {
        let algorithm = bytes as f64 / 1e9 / seconds;
        Self {
            algorithm,
            bus: algorithm * factor,
        }
    }
}
