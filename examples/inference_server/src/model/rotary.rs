//! Positions, as rotations of the halves of queries and keys.

/// Cosine and sine of each position and pair.
pub(super) struct Rotary {
    half: usize,
    cosines: Vec<f32>,
    sines: Vec<f32>,
}

/// The angle by which pair `pair` of a head turns at `position`; `theta` is the base of the wavelengths.
pub(crate) fn angle(head_size: usize, theta: f64, position: usize, pair: usize) -> f64 {
    let fraction = 2.0 * pair as f64 / head_size as f64;
    position as f64 / theta.powf(fraction)
}

impl Rotary {
    pub(super) fn new(head_size: usize, theta: f64, positions: usize) -> Self {
        let half = head_size / 2;
        let all = |of: fn(f64) -> f64| {
            (0..positions)
                .flat_map(|position| {
                    (0..half).map(move |pair| angle(head_size, theta, position, pair))
                })
                .map(|angle| of(angle) as f32)
                .collect()
        };
        Self {
            half,
            cosines: all(f64::cos),
            sines: all(f64::sin),
        }
    }

    /// Turns each head of a row: number `i` of a head and number `i + half` are a pair.
    pub(super) fn turn(&self, row: &mut [f32], position: usize) {
        let at = position * self.half..(position + 1) * self.half;
        let (cosines, sines) = (&self.cosines[at.clone()], &self.sines[at]);
        for head in row.chunks_exact_mut(2 * self.half) {
            let (first, second) = head.split_at_mut(self.half);
            for (i, (a, b)) in first.iter_mut().zip(second).enumerate() {
                (*a, *b) = (
                    *a * cosines[i] - *b * sines[i],
                    *a * sines[i] + *b * cosines[i],
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::batch_invariant::dot;
    use super::*;

    #[test]
    fn what_a_query_finds_in_a_key_depends_on_their_distance_only() {
        let rotary = Rotary::new(16, 10_000.0, 1024);
        let product = |query: usize, key: usize| {
            let mut rows = [[0.5f32, 1.0, -2.0, 0.25, 1.5, 3.0, -1.0, 0.75]; 2].concat();
            let mut other: Vec<f32> = rows.iter().rev().copied().collect();
            rotary.turn(&mut rows, query);
            rotary.turn(&mut other, key);
            dot(&rows, &other)
        };
        assert!((product(7, 3) - product(504, 500)).abs() < 1e-4);
        assert!((product(7, 3) - product(7, 4)).abs() > 1e-2);
    }
}
