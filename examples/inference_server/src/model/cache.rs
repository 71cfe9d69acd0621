//! Keys and values of past positions, for one layer and one rank's heads.
//!
//! Memory is allocated once: `slots * positions` rows. A slot belongs to one request at a time. A request that begins at
//! position 0 overwrites the previous contents, and never reads a position that it has not written.

/// The cache of one layer.
pub(super) struct LayerCache {
    positions: usize,
    /// The length of a row: all heads of this rank.
    width: usize,
    /// `[slot][position][head][number]`.
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl LayerCache {
    pub(super) fn new(slots: usize, positions: usize, width: usize) -> Self {
        let numbers = slots * positions * width;
        Self {
            positions,
            width,
            keys: vec![0.0; numbers],
            values: vec![0.0; numbers],
        }
    }

    pub(super) fn write(&mut self, slot: usize, position: usize, key: &[f32], value: &[f32]) {
        let at = (slot * self.positions + position) * self.width;
        self.keys[at..at + self.width].copy_from_slice(key);
        self.values[at..at + self.width].copy_from_slice(value);
    }

    pub(super) fn key(&self, slot: usize, position: usize) -> &[f32] {
        &self.keys[(slot * self.positions + position) * self.width..][..self.width]
    }

    pub(super) fn value(&self, slot: usize, position: usize) -> &[f32] {
        &self.values[(slot * self.positions + position) * self.width..][..self.width]
    }
}
