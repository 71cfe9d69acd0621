//! Pseudorandom numbers that are a function of a seed and a position.

/// SplitMix64's mixing function (Steele, Lea, Flood 2014): every bit of the result depends on every bit of the argument.
fn mix(mut z: u64) -> u64 {
    z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Returns 64 pseudorandom bits for a seed and a position.
pub(crate) fn bits(seed: u64, position: u64) -> u64 {
    mix(mix(seed) ^ position)
}

/// The same, uniformly distributed in [0, 1).
pub(crate) fn uniform(seed: u64, position: u64) -> f64 {
    (bits(seed, position) >> 11) as f64 / (1u64 << 53) as f64
}

/// The same, normally distributed with mean 0 and deviation 1 (Box and Muller).
pub(crate) fn normal(seed: u64, position: u64) -> f64 {
    let radius = (-2.0 * (1.0 - uniform(seed, 2 * position)).ln()).sqrt();
    radius * (std::f64::consts::TAU * uniform(seed, 2 * position + 1)).cos()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_numbers_have_mean_0_and_deviation_1() {
        let n = 100_000;
        let numbers: Vec<f64> = (0..n).map(|i| normal(7, i)).collect();
        let mean = numbers.iter().sum::<f64>() / n as f64;
        let square = numbers.iter().map(|x| x * x).sum::<f64>() / n as f64;
        // Five standard errors.
        assert!(mean.abs() < 5.0 / (n as f64).sqrt(), "{mean}");
        assert!(
            (square - 1.0).abs() < 5.0 * (2.0 / n as f64).sqrt(),
            "{square}"
        );
    }

    #[test]
    fn neighbouring_seeds_and_positions_have_nothing_in_common() {
        let all: std::collections::BTreeSet<u64> = (0..100)
            .flat_map(|seed| (0..100).map(move |position| bits(seed, position)))
            .collect();
        assert_eq!(all.len(), 10_000);
    }
}
