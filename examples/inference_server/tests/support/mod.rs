//! Models for tests: random, and small enough to be fast in a debug build.

// Each test file is a crate of its own, and uses a part of this.
#![allow(dead_code, unreachable_pub)]

use std::collections::BTreeMap;
use std::path::PathBuf;

use inference_server::model::{Alone, Config, Decoder, Row, Settings, Shape, WeightsFile};
use inference_server::train::Network;
use tempfile::TempDir;

/// Steps have spare room, and the window is shorter than the texts.
pub const SETTINGS: Settings = Settings {
    rows: 24,
    slots: 8,
    positions: 64,
};

pub fn config() -> Config {
    Config {
        vocab_size: 256,
        hidden_size: 32,
        intermediate_size: 24,
        num_hidden_layers: 2,
        num_attention_heads: 8,
        num_local_experts: 8,
        num_experts_per_tok: 2,
        sliding_window: 20,
        max_position_embeddings: 64,
        rope_theta: 10_000.0,
        rms_norm_eps: 1e-5,
    }
}

/// A file in a separate directory.
pub struct Model {
    directory: TempDir,
}

impl Model {
    pub fn new(config: &Config) -> Self {
        Self::changed(config, |_| {})
    }

    /// Creates a model with changed parameters.
    pub fn changed(config: &Config, change: impl FnOnce(&mut BTreeMap<String, Vec<f32>>)) -> Self {
        let model = Self {
            directory: tempfile::tempdir().unwrap(),
        };
        let mut numbers = Network::new(config, 3).unwrap().numbers().unwrap();
        change(&mut numbers);
        WeightsFile::write(&model.path(), config, "{}", &numbers).unwrap();
        model
    }

    pub fn path(&self) -> PathBuf {
        self.directory.path().join("model.safetensors")
    }

    /// Returns the reference: one rank without NCCL.
    pub fn alone(&self, settings: Settings) -> Decoder<Alone> {
        let file = WeightsFile::open(self.path()).unwrap();
        let alone = Alone::new(Shape::new(file.config(), settings.rows));
        Decoder::load(&file, alone, settings).unwrap()
    }
}

/// Rows of one request, all of which want logits.
pub fn rows(slot: usize, from: usize, tokens: &[u32]) -> Vec<Row> {
    let row = |(position, &token)| Row {
        slot,
        position,
        token,
        logits: true,
    };
    (from..).zip(tokens).map(row).collect()
}

/// Returns a meaningless text.
pub fn text(seed: u64, length: usize) -> Vec<u32> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..length).map(|_| random.u32(1..256)).collect()
}

pub fn bits(logits: &[f32]) -> Vec<u32> {
    assert!(logits.iter().all(|number| number.is_finite()), "{logits:?}");
    logits.iter().map(|number| number.to_bits()).collect()
}
