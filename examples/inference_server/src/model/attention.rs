//! Attention of one rank's heads.

use candle_core::{Device, Tensor};

use super::batch_invariant::{dot, linear};
use super::cache::LayerCache;
use super::config::{Config, Shard};

use super::error::Result;
use super::rotary::Rotary;
use super::step::Row;
use super::weights::{Tensors, WeightsFile};

/// The attention of one layer: the rows of the projections for this rank's heads.
pub(super) struct Attention {
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_size: usize,
    window: usize,
    /// The number of query heads that share the same keys and values.
    group: usize,
}

impl Attention {
    pub(super) fn load(
        file: &WeightsFile,
        layer: usize,
        config: &Config,
        shard: &Shard,
    ) -> Result<Self> {
        let size = config.head_size();
        let rows = shard.heads.start * size..shard.heads.end * size;
        let part = |which| file.rows(&Tensors::attention(layer, which), rows.clone());
        Ok(Self {
            query: part("q_proj")?,
            key: part("k_proj")?,
            value: part("v_proj")?,
            head_size: size,
            window: config.sliding_window,
            group: 1,
        })
    }

    /// Creates the attention of a model without a sliding window, with `group` query heads for each head of keys and values.
    pub(super) fn grouped(
        [query, key, value]: [Tensor; 3],
        head_size: usize,
        group: usize,
        positions: usize,
    ) -> Self {
        Self {
            query,
            key,
            value,
            head_size,
            window: positions,
            group,
        }
    }

    /// Returns the output of the rank's heads for the rows `x` (`[rows, hidden]`): `[row][own heads][number]`.
    ///
    /// Keys and values of all rows are written first: a row attends to earlier rows of its request in the same step.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        rows: &[Row],
        rotary: &Rotary,
        cache: &mut LayerCache,
    ) -> Result<Vec<f32>> {
        let positions = rows.iter().map(|row| row.position as u32);
        let positions = Tensor::from_iter(positions, &Device::Cpu)?;
        let flat = |x: Tensor| x.flatten_all()?.to_vec1::<f32>();
        let turned = |weight| flat(rotary.turn(&linear(x, weight)?, &positions)?);
        let (queries, keys) = (turned(&self.query)?, turned(&self.key)?);
        let values = flat(linear(x, &self.value)?)?;
        let (width, shared) = (queries.len() / rows.len(), values.len() / rows.len());
        for (i, row) in rows.iter().enumerate() {
            let at = i * shared..(i + 1) * shared;
            cache.write(row.slot, row.position, &keys[at.clone()], &values[at]);
        }
        let mut out = vec![0.0; queries.len()];
        let mut scores = Vec::with_capacity(self.window.min(1024));
        for ((query, out), row) in queries
            .chunks_exact(width)
            .zip(out.chunks_exact_mut(width))
            .zip(rows)
        {
            let heads = query
                .chunks_exact(self.head_size)
                .zip(out.chunks_exact_mut(self.head_size));
            for (number, (query, out)) in heads.enumerate() {
                let at = number / self.group * self.head_size;
                self.look(row, query, at, cache, &mut scores);
                let first = row.position + 1 - scores.len();
                for (position, score) in (first..).zip(&scores) {
                    let value = &cache.value(row.slot, position)[at..at + self.head_size];
                    for (out, value) in out.iter_mut().zip(value) {
                        *out += score * value;
                    }
                }
            }
        }
        Ok(out)
    }

    /// Computes the attention weights of one head for each position of the window, the oldest first. Their sum is 1.
    fn look(
        &self,
        row: &Row,
        query: &[f32],
        head: usize,
        cache: &LayerCache,
        scores: &mut Vec<f32>,
    ) {
        let scale = 1.0 / (self.head_size as f32).sqrt();
        let first = (row.position + 1).saturating_sub(self.window);
        scores.clear();
        scores.extend((first..=row.position).map(|position| {
            let key = &cache.key(row.slot, position)[head..head + self.head_size];
            dot(query, key) * scale
        }));
        let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut sum = 0.0;
        for score in scores.iter_mut() {
            *score = (*score - largest).exp();
            sum += *score;
        }
        for score in scores.iter_mut() {
            *score /= sum;
        }
    }
}
