//! One rank's part of a Llama, and its steps.

use std::ops::Range;

use candle_core::{Device, Tensor};
use candle_nn::ops::rms_norm;

use super::config::LlamaConfig;
use super::file::{EMBEDDING, LlamaFile, NORM, of_layer};
use crate::model::attention::Attention;
use crate::model::batch_invariant::linear;
use crate::model::cache::LayerCache;
use crate::model::collectives::Collectives;
use crate::model::decoder::add;
use crate::model::error::{Error, Result};
use crate::model::rotary::Rotary;
use crate::model::step::{Logits, Part, Row, Settings, Slots, same_rank};

/// One rank's part of a model of the architecture of Llama.
pub struct Llama<C> {
    config: LlamaConfig,
    settings: Settings,
    ranks: C,
    rotary: Rotary,
    /// The tokens whose rows are in `vocabulary`.
    own: Range<usize>,
    /// The embedding, which is also the projection to logits: `[own tokens, hidden]`.
    vocabulary: Tensor,
    layers: Vec<Layer>,
    norm: Tensor,
    slots: Slots,
    ends: Vec<u32>,
}

/// The weights of a layer: each matrix has the rows of this rank's output numbers.
struct Layer {
    norm: Tensor,
    attention: Attention,
    output: Tensor,
    inner_norm: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    cache: LayerCache,
}

impl<C: Collectives> Llama<C> {
    /// Reads this rank's part of the file, and allocates the cache.
    ///
    /// # Errors
    /// [`Error::Ranks`]; [`Error::Unusable`] for settings that do not fit the model; [`Error::Weights`].
    pub fn load(file: &LlamaFile, ranks: C, settings: Settings) -> Result<Self> {
        let config = file.config().clone();
        let shard = config.shard(ranks.rank(), ranks.ranks())?;
        if settings.rows == 0 || settings.slots == 0 {
            let Settings { rows, slots, .. } = settings;
            let text = format!("steps of {rows} rows and {slots} slots: neither may be 0");
            return Err(Error::Unusable(text));
        }
        settings.fit(config.max_position_embeddings)?;
        let size = config.head_size();
        let group = config.num_attention_heads / config.num_key_value_heads;
        let load = |layer| -> Result<Layer> {
            let name = |which| of_layer(layer, which);
            let shared = shard.heads.start * size..shard.heads.end * size;
            let queries = shard.heads.start * group..shard.heads.end * group;
            let heads = [
                file.heads(&name("attn_q"), queries)?,
                file.heads(&name("attn_k"), shard.heads.clone())?,
                file.rows(&name("attn_v"), shared.clone())?,
            ];
            Ok(Layer {
                norm: file.whole(&name("attn_norm"))?,
                attention: Attention::grouped(heads, size, group, settings.positions),
                output: file.rows(&name("attn_output"), shard.hidden.clone())?,
                inner_norm: file.whole(&name("ffn_norm"))?,
                gate: file.rows(&name("ffn_gate"), shard.inner.clone())?,
                up: file.rows(&name("ffn_up"), shard.inner.clone())?,
                down: file.rows(&name("ffn_down"), shard.hidden.clone())?,
                cache: LayerCache::new(settings.slots, settings.positions, shared.len()),
            })
        };
        Ok(Self {
            rotary: Rotary::new(size, config.rope_theta, settings.positions)?,
            vocabulary: file.rows(EMBEDDING, shard.vocabulary.clone())?,
            own: shard.vocabulary.clone(),
            layers: (0..config.num_hidden_layers)
                .map(load)
                .collect::<Result<_>>()?,
            norm: file.whole(NORM)?,
            slots: Slots::new(settings, config.vocab_size),
            ends: file.ends()?,
            config,
            settings,
            ranks,
        })
    }

    /// Returns the model's configuration.
    #[must_use]
    pub fn config(&self) -> &LlamaConfig {
        &self.config
    }

    /// Returns the embeddings of the tokens. The rank with a token's row sends it to all ranks.
    fn embed(&mut self, rows: &[Row]) -> Result<Vec<f32>> {
        let hidden = self.config.hidden_size;
        let mut given = vec![0.0; rows.len() * hidden];
        for (given, row) in given.chunks_exact_mut(hidden).zip(rows) {
            let token = row.token as usize;
            if self.own.contains(&token) {
                let own = self.vocabulary.get(token - self.own.start)?;
                given.copy_from_slice(&own.to_vec1::<f32>()?);
            }
        }
        let mut all = vec![0.0; self.ranks.ranks() * given.len()];
        self.ranks.all_gather(&given, &mut all)?;
        let of = |(number, row): (usize, &Row)| {
            let at = (row.token as usize / self.own.len() * rows.len() + number) * hidden;
            &all[at..at + hidden]
        };
        Ok(rows.iter().enumerate().flat_map(of).copied().collect())
    }

    fn layer(&mut self, number: usize, x: &mut [f32], rows: &[Row]) -> Result<()> {
        let (hidden, epsilon) = (self.config.hidden_size, self.config.rms_norm_eps as f32);
        let layer = &mut self.layers[number];
        let ranks = &mut self.ranks;
        let tensor =
            |x: &[f32]| Tensor::from_slice(x, (rows.len(), x.len() / rows.len()), &Device::Cpu);
        let flat = |x: Tensor| x.flatten_all()?.to_vec1::<f32>();

        let normed = rms_norm(&tensor(x)?, &layer.norm, epsilon)?;
        let heads = layer
            .attention
            .forward(&normed, rows, &self.rotary, &mut layer.cache)?;
        let heads = gather(ranks, &heads, rows.len())?;
        let made = flat(linear(&tensor(&heads)?, &layer.output)?)?;
        add(x, &gather(ranks, &made, rows.len())?);

        debug_assert_eq!(x.len(), rows.len() * hidden);
        let normed = rms_norm(&tensor(x)?, &layer.inner_norm, epsilon)?;
        let inner = (linear(&normed, &layer.gate)?.silu()? * linear(&normed, &layer.up)?)?;
        let inner = gather(ranks, &flat(inner)?, rows.len())?;
        let made = flat(linear(&tensor(&inner)?, &layer.down)?)?;
        add(x, &gather(ranks, &made, rows.len())?);
        Ok(())
    }

    fn logits(&mut self, x: &[f32], rows: &[Row]) -> Result<Logits> {
        let hidden = self.config.hidden_size;
        let wanted = rows.iter().filter(|row| row.logits).count();
        if wanted == 0 {
            return Ok(Logits(vec![None; rows.len()]));
        }
        let all = rows.iter().zip(x.chunks_exact(hidden));
        let ends = all.filter(|(row, _)| row.logits).flat_map(|(_, x)| x);
        let ends: Vec<f32> = ends.copied().collect();
        let ends = Tensor::from_vec(ends, (wanted, hidden), &Device::Cpu)?;
        let ends = rms_norm(&ends, &self.norm, self.config.rms_norm_eps as f32)?;
        // One product for all rows, so that the matrix is read once.
        let made = linear(&ends, &self.vocabulary)?.to_vec2::<f32>()?;
        let mut made = made.iter();
        let mut of = |row: &Row| -> Result<Option<Vec<f32>>> {
            let Some(own) = row.logits.then(|| made.next()).flatten() else {
                return Ok(None);
            };
            let mut all = vec![0.0; self.config.vocab_size];
            self.ranks.all_gather(own, &mut all)?;
            Ok(Some(all))
        };
        Ok(Logits(rows.iter().map(&mut of).collect::<Result<_>>()?))
    }
}

impl<C: Collectives> Part for Llama<C> {
    type Ranks = C;

    fn settings(&self) -> &Settings {
        &self.settings
    }

    fn ranks(&self) -> &C {
        &self.ranks
    }

    fn renew(&mut self, ranks: C) -> Result<()> {
        same_rank(&self.ranks, &ranks)?;
        self.ranks = ranks;
        self.slots.empty();
        Ok(())
    }

    fn step(&mut self, rows: &[Row]) -> Result<Logits> {
        let filled = self.slots.check(rows)?;
        if rows.is_empty() {
            return Ok(Logits::default());
        }
        let mut x = self.embed(rows)?;
        for layer in 0..self.layers.len() {
            self.layer(layer, &mut x, rows)?;
        }
        let logits = self.logits(&x, rows)?;
        self.slots.written(filled);
        Ok(logits)
    }

    fn ends(&self, token: u32) -> bool {
        self.ends.contains(&token)
    }
}

/// Gathers the results of all ranks for the same rows, side by side: each rank gives the same number of columns.
fn gather(ranks: &mut impl Collectives, made: &[f32], rows: usize) -> Result<Vec<f32>> {
    let mut blocks = vec![0.0; ranks.ranks() * made.len()];
    ranks.all_gather(made, &mut blocks)?;
    let width = made.len() / rows;
    let mut all = Vec::with_capacity(blocks.len());
    for row in 0..rows {
        for block in blocks.chunks_exact(made.len()) {
            all.extend_from_slice(&block[row * width..(row + 1) * width]);
        }
    }
    Ok(all)
}
