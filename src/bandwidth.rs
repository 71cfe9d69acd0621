//! Bandwidth of an all-to-all, by nccl-tests' definitions.

/// Bandwidths in GB/s (10⁹ bytes).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bandwidth {
    /// Bytes that each rank sends, itself included, over time.
    pub algorithm: f64,
    /// The share of that which leaves the rank: what a link between ranks has to carry.
    pub bus: f64,
}

/// The bandwidth of an all-to-all of `total_bytes` per rank in `seconds`.
///
/// ```
/// let bandwidth = nccl_tools::bandwidth::all_to_all(4_000_000_000, 4, 2.0);
/// assert_eq!((bandwidth.algorithm, bandwidth.bus), (2.0, 1.5));
/// ```
#[must_use]
pub fn all_to_all(total_bytes: u64, ranks: usize, seconds: f64) -> Bandwidth {
    let algorithm = total_bytes as f64 / 1e9 / seconds;
    let ranks = ranks as f64;
    Bandwidth {
        algorithm,
        bus: algorithm * ((ranks - 1.0) / ranks),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_rank_uses_no_bus() {
        assert_eq!(all_to_all(1 << 20, 1, 1e-3).bus, 0.0);
    }
}
