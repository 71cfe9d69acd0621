//! The hyperparameters of a model, and how ranks share it.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::error::{Error, Result};

/// The hyperparameters of a model. The field names and the architecture are those of Hugging Face's Mixtral.
///
/// ```
/// use inference_server::model::Config;
/// let config = Config::tiny();
/// assert_eq!(config.rank_counts(), [1, 2, 4, 8]);
/// assert_eq!(config.head_size(), 16);
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Config {
    /// Size of the vocabulary.
    pub vocab_size: usize,
    /// Width of a row.
    pub hidden_size: usize,
    /// Inner width of an expert.
    pub intermediate_size: usize,
    /// Number of layers.
    pub num_hidden_layers: usize,
    /// Attention heads; each has its own keys and values.
    pub num_attention_heads: usize,
    /// Experts of each layer.
    pub num_local_experts: usize,
    /// Experts chosen for each token.
    pub num_experts_per_tok: usize,
    /// The number of positions that a head attends to: its own and those before it.
    pub sliding_window: usize,
    /// The longest text, in tokens.
    pub max_position_embeddings: usize,
    /// Base of the wavelengths of the positions.
    pub rope_theta: f64,
    /// Added to a mean square before a norm divides by its root.
    pub rms_norm_eps: f64,
}

/// A rank's part of the heads and the experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// The number of the rank.
    pub rank: usize,
    /// The number of ranks.
    pub ranks: usize,
    /// The rank's heads.
    pub heads: Range<usize>,
    /// The rank's experts.
    pub experts: Range<usize>,
}

impl Config {
    /// Returns the configuration of `models/tiny.safetensors`: 1.9 million parameters, of which a token uses 0.7 million.
    #[must_use]
    pub const fn tiny() -> Self {
        Self {
            vocab_size: super::tokenizer::VOCABULARY,
            hidden_size: 128,
            intermediate_size: 128,
            num_hidden_layers: 4,
            num_attention_heads: 8,
            num_local_experts: 8,
            num_experts_per_tok: 2,
            sliding_window: 64,
            max_position_embeddings: 1024,
            rope_theta: 10_000.0,
            rms_norm_eps: 1e-5,
        }
    }

    /// Width of a head.
    #[must_use]
    pub fn head_size(&self) -> usize {
        self.hidden_size / self.num_attention_heads
    }

    /// Returns the numbers of ranks that can share the model: those that divide both its heads and its experts.
    #[must_use]
    pub fn rank_counts(&self) -> Vec<usize> {
        let divides = |&ranks: &usize| {
            self.num_attention_heads.is_multiple_of(ranks)
                && self.num_local_experts.is_multiple_of(ranks)
        };
        (1..=self.num_attention_heads).filter(divides).collect()
    }

    /// Returns the part of rank `rank` of `ranks`.
    ///
    /// # Errors
    /// [`Error::Ranks`], with the numbers of ranks that can share the model.
    pub fn shard(&self, rank: usize, ranks: usize) -> Result<Shard> {
        let counts = self.rank_counts();
        if !counts.contains(&ranks) || rank >= ranks {
            return Err(Error::Ranks {
                ranks,
                parts: format!(
                    "{} heads and {} experts",
                    self.num_attention_heads, self.num_local_experts
                ),
                works: listed(&counts),
            });
        }
        let part = |of: usize| rank * (of / ranks)..(rank + 1) * (of / ranks);
        Ok(Shard {
            rank,
            ranks,
            heads: part(self.num_attention_heads),
            experts: part(self.num_local_experts),
        })
    }

    /// Refuses an invalid configuration.
    ///
    /// # Errors
    /// [`Error::Config`] for the first invalid field.
    pub fn check(&self) -> Result<()> {
        let refuse = |field, value, reason: String| {
            Err(Error::Config {
                field,
                value,
                reason,
            })
        };
        let counts = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_local_experts", self.num_local_experts),
            ("num_experts_per_tok", self.num_experts_per_tok),
            ("sliding_window", self.sliding_window),
            ("max_position_embeddings", self.max_position_embeddings),
        ];
        // Far above any model, and low enough that no product of two overflows.
        const MOST: usize = 1 << 24;
        for (field, value) in counts {
            if value == 0 || value > MOST {
                return refuse(field, value, format!("1 to {MOST} are possible"));
            }
        }
        let heads = self.num_attention_heads;
        if !self.hidden_size.is_multiple_of(2 * heads) {
            let reason = format!("each of the {heads} heads needs an even width");
            return refuse("hidden_size", self.hidden_size, reason);
        }
        if self.num_experts_per_tok > self.num_local_experts {
            let reason = format!("there are {} experts", self.num_local_experts);
            return refuse("num_experts_per_tok", self.num_experts_per_tok, reason);
        }
        Ok(())
    }
}

/// Formats the numbers as a list, such as `1, 2, 4 or 8`.
pub(super) fn listed(numbers: &[usize]) -> String {
    let words: Vec<_> = numbers.iter().map(usize::to_string).collect();
    match words.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, others)) => format!("{} or {last}", others.join(", ")),
        None => String::from("no"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_number_of_ranks_is_told_which_work() {
        let error = Config::tiny().shard(0, 3).unwrap_err();
        assert_eq!(
            error.to_string(),
            "3 ranks cannot share 8 heads and 8 experts: take 1, 2, 4 or 8 ranks"
        );
        let six = Config {
            num_attention_heads: 6,
            num_local_experts: 9,
            ..Config::tiny()
        };
        assert_eq!(six.rank_counts(), [1, 3]);
        assert!(six.shard(0, 0).is_err());
    }

    #[test]
    fn the_shards_of_all_ranks_are_the_whole() {
        let config = Config::tiny();
        for ranks in config.rank_counts() {
            let shards: Vec<_> = (0..ranks)
                .map(|rank| config.shard(rank, ranks).unwrap())
                .collect();
            let heads: Vec<_> = shards
                .iter()
                .flat_map(|shard| shard.heads.clone())
                .collect();
            assert_eq!(heads, Vec::from_iter(0..8));
            let experts = shards.iter().flat_map(|shard| shard.experts.clone());
            assert_eq!(Vec::from_iter(experts), Vec::from_iter(0..8));
        }
    }

    #[test]
    fn numbers_that_do_not_fit_together_are_refused_by_name() {
        let odd = Config {
            hidden_size: 120,
            ..Config::tiny()
        };
        let text = odd.check().unwrap_err().to_string();
        assert!(text.starts_with("a model with hidden_size = 120"), "{text}");
        let greedy = Config {
            num_experts_per_tok: 9,
            ..Config::tiny()
        };
        let text = greedy.check().unwrap_err().to_string();
        assert!(text.contains("num_experts_per_tok = 9"), "{text}");
        let none = Config {
            sliding_window: 0,
            ..Config::tiny()
        };
        assert!(none.check().is_err());
    }
}
