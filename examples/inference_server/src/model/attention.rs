//! Attention of one rank's heads.

use candle_core::Tensor;

use super::batch_invariant::{dot, linear};
use super::cache::LayerCache;
use super::config::{Config, Shard};
use super::decoder::Row;
use super::error::Result;
use super::rotary::Rotary;
use super::weights::{Tensors, WeightsFile};

/// Of one layer: the rows of the projections that make this rank's heads.
pub(super) struct Attention {
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_size: usize,
    window: usize,
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
        let shape = [config.hidden_size, config.hidden_size];
        let part = |which| file.rows(&Tensors::attention(layer, which), shape, rows.clone());
        Ok(Self {
            query: part("q_proj")?,
            key: part("k_proj")?,
            value: part("v_proj")?,
            head_size: size,
            window: config.sliding_window,
        })
    }

    /// What the rank's heads make of the rows `x` (`[rows, hidden]`): `[row][own heads][number]`.
    ///
    /// Keys and values of all rows are written before any row looks: a row sees those before it of the same step.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        rows: &[Row],
        rotary: &Rotary,
        cache: &mut LayerCache,
    ) -> Result<Vec<f32>> {
        let project = |weight| linear(x, weight)?.flatten_all()?.to_vec1::<f32>();
        let (mut queries, mut keys) = (project(&self.query)?, project(&self.key)?);
        let values = project(&self.value)?;
        let width = values.len() / rows.len();
        for (i, row) in rows.iter().enumerate() {
            let at = i * width..(i + 1) * width;
            rotary.turn(&mut queries[at.clone()], row.position);
            rotary.turn(&mut keys[at.clone()], row.position);
            cache.write(row.slot, row.position, &keys[at.clone()], &values[at]);
        }
        let mut out = vec![0.0; queries.len()];
        let mut scores = Vec::with_capacity(self.window);
        for ((query, out), row) in queries
            .chunks_exact(width)
            .zip(out.chunks_exact_mut(width))
            .zip(rows)
        {
            for at in (0..width).step_by(self.head_size) {
                let head = at..at + self.head_size;
                self.look(row, &query[head.clone()], head.start, cache, &mut scores);
                let first = row.position + 1 - scores.len();
                for (position, score) in (first..).zip(&scores) {
                    let value = &cache.value(row.slot, position)[head.clone()];
                    for (out, value) in out[head.clone()].iter_mut().zip(value) {
                        *out += score * value;
                    }
                }
            }
        }
        Ok(out)
    }

    /// How much one head looks at each position of the window, the oldest first; all together, that is 1.
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
