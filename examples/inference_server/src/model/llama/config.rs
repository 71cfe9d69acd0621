//! The hyperparameters of a Llama, read from its file.

use std::collections::HashMap;
use std::ops::Range;

use candle_core::quantized::gguf_file::Value;

use crate::model::collectives::Shape;
use crate::model::config::listed;
use crate::model::error::{Error, Result};

/// The hyperparameters of a model, with the names of Hugging Face's Llama.
///
/// ```
/// use inference_server::model::LlamaConfig;
/// let config = LlamaConfig::smollm2();
/// assert_eq!(config.rank_counts(), [1, 3]);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    /// Size of the vocabulary.
    pub vocab_size: usize,
    /// Width of a row.
    pub hidden_size: usize,
    /// Inner width of the feed-forward block.
    pub intermediate_size: usize,
    /// Number of layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Heads of keys and values, each shared by the same number of query heads.
    pub num_key_value_heads: usize,
    /// The longest text, in tokens.
    pub max_position_embeddings: usize,
    /// Base of the wavelengths of the positions.
    pub rope_theta: f64,
    /// Added to a mean square before a norm divides by its root.
    pub rms_norm_eps: f64,
}

/// A rank's part of the model.
#[derive(Clone, Debug)]
pub(super) struct LlamaShard {
    /// Heads of keys and values.
    pub(super) heads: Range<usize>,
    pub(super) hidden: Range<usize>,
    pub(super) inner: Range<usize>,
    pub(super) vocabulary: Range<usize>,
}

impl LlamaConfig {
    /// Returns the configuration of SmolLM2-135M.
    #[must_use]
    pub const fn smollm2() -> Self {
        Self {
            vocab_size: 49_152,
            hidden_size: 576,
            intermediate_size: 1536,
            num_hidden_layers: 30,
            num_attention_heads: 9,
            num_key_value_heads: 3,
            max_position_embeddings: 8192,
            rope_theta: 100_000.0,
            rms_norm_eps: 1e-5,
        }
    }

    /// Reads the configuration from a file's metadata. The error names the missing or invalid entry.
    pub(super) fn read(metadata: &HashMap<String, Value>) -> Result<Self, String> {
        let value = |name: &str| {
            metadata
                .get(name)
                .ok_or_else(|| format!("its metadata has no `{name}`"))
        };
        let text = |name: &str| match value(name)? {
            Value::String(text) => Ok(text.clone()),
            other => Err(format!("`{name}` is {other:?}, and should be a text")),
        };
        let number = |name: &str| {
            let value = value(name)?;
            let number = value.to_u64().or_else(|_| value.to_u32().map(u64::from));
            number
                .ok()
                .and_then(|number| usize::try_from(number).ok())
                // Far above any model, and low enough that no product of two overflows.
                .filter(|&number| number > 0 && number <= 1 << 24)
                .ok_or_else(|| format!("`{name}` is {value:?}: 1 to {} are possible", 1 << 24))
        };
        let real = |name: &str| {
            let value = value(name)?;
            match value {
                Value::F32(number) => Ok(f64::from(*number)),
                Value::F64(number) => Ok(*number),
                other => Err(format!("`{name}` is {other:?}, and should be a number")),
            }
        };
        let architecture = text("general.architecture")?;
        if architecture != "llama" {
            return Err(format!(
                "its architecture is {architecture:?}: only \"llama\" is known here"
            ));
        }
        let vocabulary = match value("tokenizer.ggml.tokens")? {
            Value::Array(tokens) => tokens.len(),
            _ => return Err(String::from("`tokenizer.ggml.tokens` is no list")),
        };
        let config = Self {
            vocab_size: vocabulary,
            hidden_size: number("llama.embedding_length")?,
            intermediate_size: number("llama.feed_forward_length")?,
            num_hidden_layers: number("llama.block_count")?,
            num_attention_heads: number("llama.attention.head_count")?,
            num_key_value_heads: number("llama.attention.head_count_kv")?,
            max_position_embeddings: number("llama.context_length")?,
            rope_theta: real("llama.rope.freq_base")?,
            rms_norm_eps: real("llama.attention.layer_norm_rms_epsilon")?,
        };
        let (hidden, heads) = (config.hidden_size, config.num_attention_heads);
        if vocabulary == 0 || !hidden.is_multiple_of(2 * heads) {
            return Err(format!(
                "{vocabulary} tokens, and {heads} heads in a width of {hidden}: each head needs an even width"
            ));
        }
        if !heads.is_multiple_of(config.num_key_value_heads) {
            return Err(format!(
                "{heads} heads of queries cannot look at {} of keys and values",
                config.num_key_value_heads
            ));
        }
        let turned = number("llama.rope.dimension_count")?;
        if turned != config.head_size() {
            return Err(format!(
                "`llama.rope.dimension_count` is {turned}, and a head has {}: all of it has to turn",
                config.head_size()
            ));
        }
        Ok(config)
    }

    /// Width of a head.
    #[must_use]
    pub fn head_size(&self) -> usize {
        self.hidden_size / self.num_attention_heads
    }

    /// Width of all heads of keys, or of values.
    pub(super) fn shared_size(&self) -> usize {
        self.num_key_value_heads * self.head_size()
    }

    /// Returns the numbers of ranks that can share the model: those that divide its heads of keys and values, its widths and
    /// its vocabulary.
    #[must_use]
    pub fn rank_counts(&self) -> Vec<usize> {
        let all = [
            self.num_key_value_heads,
            self.hidden_size,
            self.intermediate_size,
            self.vocab_size,
        ];
        (1..=self.num_key_value_heads)
            .filter(|&ranks| all.iter().all(|number| number.is_multiple_of(ranks)))
            .collect()
    }

    /// Refuses a number of ranks that cannot share the model.
    pub(in crate::model) fn check_ranks(&self, ranks: usize) -> Result<()> {
        let counts = self.rank_counts();
        if counts.contains(&ranks) {
            return Ok(());
        }
        Err(Error::Ranks {
            ranks,
            parts: format!("{} heads of keys and values", self.num_key_value_heads),
            works: listed(&counts),
        })
    }

    pub(super) fn shard(&self, rank: usize, ranks: usize) -> Result<LlamaShard> {
        self.check_ranks(ranks)?;
        let part = |of: usize| rank * (of / ranks)..(rank + 1) * (of / ranks);
        Ok(LlamaShard {
            heads: part(self.num_key_value_heads),
            hidden: part(self.hidden_size),
            inner: part(self.intermediate_size),
            vocabulary: part(self.vocab_size),
        })
    }

    /// Returns the sizes of the exchanged data for steps of `rows` rows.
    #[must_use]
    pub fn shape(&self, rows: usize) -> Shape {
        // The sizes for a single rank are enough for any number of ranks.
        let row = self.hidden_size.max(self.intermediate_size);
        Shape {
            rows,
            hidden: self.hidden_size,
            gathers: (rows * row).max(self.vocab_size),
            ..Shape::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_number_of_ranks_is_told_which_work() {
        let error = LlamaConfig::smollm2().shard(0, 2).unwrap_err();
        assert_eq!(
            error.to_string(),
            "2 ranks cannot share 3 heads of keys and values: take 1 or 3 ranks"
        );
    }

    #[test]
    fn the_shards_of_all_ranks_are_the_whole() {
        let config = LlamaConfig::smollm2();
        let shards: Vec<_> = (0..3).map(|rank| config.shard(rank, 3).unwrap()).collect();
        let all = |of: fn(&LlamaShard) -> Range<usize>| -> Vec<usize> {
            shards.iter().flat_map(of).collect()
        };
        assert_eq!(all(|shard| shard.heads.clone()), Vec::from_iter(0..3));
        assert_eq!(all(|shard| shard.hidden.clone()), Vec::from_iter(0..576));
        assert_eq!(all(|shard| shard.inner.clone()), Vec::from_iter(0..1536));
        assert_eq!(
            all(|shard| shard.vocabulary.clone()),
            Vec::from_iter(0..49_152)
        );
    }
}
