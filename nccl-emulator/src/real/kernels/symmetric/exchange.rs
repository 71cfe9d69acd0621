//! Lines with flags, in which ranks send each other packs of 8 bytes (LL).
//!
//! A line has 16 bytes: two halves of a pack, each followed by the number of the epoch, so that each word of 8 bytes is valid
//! by itself. An epoch ends when a block has read all lines that it waits for. There are lines for two epochs, since a peer may
//! be one epoch ahead. The number of the last epoch is stored in the communicator's buffer between kernels.

use std::sync::atomic::Ordering;

use super::super::block::{Stop, Wait};
use super::super::memory::{View, Violation};
use super::block::Block;
use super::parts::PACK;

/// Bytes of a line.
const LINE: usize = 16;

pub(super) struct Exchange<'a> {
    block: &'a Block,
    epoch: u32,
    kept: View,
    /// The lines of each rank for both epochs, by rank.
    lines: Vec<View>,
}

/// Returns the next epoch. It is never 0 or 1, the numbers in new and cleared lines.
fn next(epoch: u32) -> u32 {
    epoch.wrapping_add(if epoch == u32::MAX { 3 } else { 1 })
}

impl<'a> Exchange<'a> {
    pub(super) fn open(block: &'a Block) -> Result<Self, Stop> {
        let (shared, team) = (&block.launch.shared, block.launch.team);
        let memory = block.memory();
        let epoch = shared.line_epochs.at(block.index);
        let kept = shared.buffer.view(memory, team, team.rank, epoch, 4)?;
        let length = 2 * shared.lines_length as usize;
        let lines = shared.lines.at(block.index);
        Ok(Self {
            epoch: kept.half_word(0)?.load(Ordering::Acquire).wrapping_add(2),
            kept,
            lines: shared.buffer.views(memory, team, lines, length)?,
            block,
        })
    }

    /// Returns the offset of a slot's line in this epoch.
    fn line(&self, slot: usize) -> usize {
        (self.epoch as usize & 1) * self.block.launch.shared.lines_length as usize + LINE * slot
    }

    /// Writes packs into the lines of `rank`, from slot `slot` on. The last pack may be short.
    pub(super) fn send(&self, rank: usize, slot: usize, packs: &[u8]) -> Result<(), Stop> {
        let flag = u64::from(self.epoch) << 32;
        for (index, pack) in packs.chunks(PACK).enumerate() {
            let mut bytes = [0; PACK];
            bytes[..pack.len()].copy_from_slice(pack);
            let pack = u64::from_le_bytes(bytes);
            let at = self.line(slot + index);
            let lines = &self.lines[rank];
            for (word, half) in [(at, pack & 0xffff_ffff), (at + 8, pack >> 32)] {
                lines.word(word)?.store(half | flag, Ordering::Release);
            }
        }
        self.block.context.meter.progress();
        Ok(())
    }

    /// Returns the pack in a slot of this rank's lines, if it has arrived.
    fn receive(&self, slot: usize) -> Result<Option<[u8; PACK]>, Violation> {
        let lines = &self.lines[self.block.launch.team.rank];
        let at = self.line(slot);
        let low = lines.word(at)?.load(Ordering::Acquire);
        let high = lines.word(at + 8)?.load(Ordering::Acquire);
        let here = |word: u64| word >> 32 == u64::from(self.epoch);
        let pack = low & 0xffff_ffff | high << 32;
        Ok((here(low) && here(high)).then_some(pack.to_le_bytes()))
    }

    /// Waits for packs of a peer, from slot `slot` on, until `into` is full. Excess bytes of the last pack are dropped.
    pub(super) async fn wait(&self, peer: usize, slot: usize, into: &mut [u8]) -> Result<(), Stop> {
        for (index, chunk) in into.chunks_mut(PACK).enumerate() {
            let pack = loop {
                if let Some(pack) = self.receive(slot + index)? {
                    break pack;
                }
                let here = || Ok(self.receive(slot + index)?.is_some());
                self.block.wait(Wait::Lines { peer }, here).await?;
            };
            chunk.copy_from_slice(&pack[..chunk.len()]);
        }
        Ok(())
    }

    /// Ends the epoch.
    pub(super) fn advance(&mut self) -> Result<(), Stop> {
        if self.epoch >= u32::MAX - 1 {
            // Clears the lines, because their flags may occur again.
            let own = &self.lines[self.block.launch.team.rank];
            for at in (0..self.block.launch.shared.lines_length as usize).step_by(8) {
                own.word(self.line(0) + at)?.store(0, Ordering::Relaxed);
            }
        }
        self.epoch = next(self.epoch);
        Ok(())
    }

    /// Stores the number for the next kernel.
    pub(super) fn close(self) -> Result<(), Stop> {
        let epoch = self.epoch.wrapping_sub(2);
        self.kept.half_word(0)?.store(epoch, Ordering::Release);
        for view in self.lines.iter().chain([&self.kept]) {
            view.still_valid()?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::next;

    #[test]
    fn no_epoch_has_the_number_of_lines_that_were_never_written() {
        assert_eq!([2, u32::MAX - 1, u32::MAX].map(next), [3, u32::MAX, 2]);
    }
}
