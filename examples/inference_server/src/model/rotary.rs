//! Rotary position embedding: rotations of the halves of queries and keys.

use candle_core::{Device, Result, Tensor};
use candle_nn::rotary_emb::rope;

/// Cosine and sine for each position and pair: `[positions, half of a head]`.
pub(crate) struct Rotary {
    pub(crate) cosines: Tensor,
    pub(crate) sines: Tensor,
}

impl Rotary {
    /// `theta` is the base of the wavelengths.
    pub(crate) fn new(head_size: usize, theta: f64, positions: usize) -> Result<Self> {
        let half = head_size / 2;
        let all = |of: fn(f64) -> f64| {
            let angles = (0..positions * half).map(|at| {
                let fraction = 2.0 * (at % half) as f64 / head_size as f64;
                (at / half) as f64 / theta.powf(fraction)
            });
            let numbers: Vec<f32> = angles.map(|angle| of(angle) as f32).collect();
            Tensor::from_vec(numbers, (positions, half), &Device::Cpu)
        };
        Ok(Self {
            cosines: all(f64::cos)?,
            sines: all(f64::sin)?,
        })
    }

    /// Rotates each head of each row: number `i` of a head and number `i + half` are a pair. `x` is `[rows, heads * size]`, and
    /// `positions` has the position of each row.
    pub(super) fn turn(&self, x: &Tensor, positions: &Tensor) -> Result<Tensor> {
        let of_rows = |all: &Tensor| all.index_select(positions, 0)?.unsqueeze(1);
        let size = 2 * self.cosines.dim(1)?;
        let heads = x.reshape((x.dim(0)?, x.dim(1)? / size, 1, size))?;
        let turned = rope(&heads, &of_rows(&self.cosines)?, &of_rows(&self.sines)?)?;
        turned.reshape(x.shape())
    }
}

#[cfg(test)]
mod tests {
    use super::super::batch_invariant::dot;
    use super::*;

    #[test]
    fn what_a_query_finds_in_a_key_depends_on_their_distance_only() {
        let rotary = Rotary::new(16, 10_000.0, 1024).unwrap();
        let query_row = [[0.5f32, 1.0, -2.0, 0.25, 1.5, 3.0, -1.0, 0.75]; 2].concat();
        let key_row: Vec<f32> = query_row.iter().rev().copied().collect();
        let rows = [query_row, key_row].concat();
        let rows = Tensor::from_vec(rows, (2, 16), &Device::Cpu).unwrap();
        let product = |query: u32, key: u32| {
            let positions = Tensor::new(&[query, key], &Device::Cpu).unwrap();
            let turned = rotary.turn(&rows, &positions).unwrap().to_vec2().unwrap();
            dot(&turned[0], &turned[1])
        };
        assert!((product(7, 3) - product(504, 500)).abs() < 1e-4);
        assert!((product(7, 3) - product(7, 4)).abs() > 1e-2);
    }
}
