//! The barrier between the blocks of the same index on all ranks.
//!
//! A block tells each peer the number of its arrivals, and waits until all peers have arrived as often. The number is stored in
//! the communicator's buffer between kernels.

use std::sync::atomic::Ordering;

use super::super::block::{Stop, Wait};
use super::super::memory::View;
use super::block::Block;

pub(super) struct Barrier<'a> {
    block: &'a Block,
    /// How often the barrier was passed.
    epoch: u32,
    kept: View,
    /// The arrivals of the peers, which they write.
    inbox: View,
    /// The words that the peers' blocks read, by peer.
    outboxes: Vec<View>,
}

/// Returns whether `count`, which wraps around, has reached `goal`.
fn reached(count: u32, goal: u32) -> bool {
    count.wrapping_sub(goal) <= u32::MAX >> 1
}

impl<'a> Barrier<'a> {
    pub(super) fn open(block: &'a Block) -> Result<Self, Stop> {
        let (shared, team) = (&block.launch.shared, block.launch.team);
        let memory = block.memory();
        let view = |rank, offset, length| shared.buffer.view(memory, team, rank, offset, length);
        let kept = view(team.rank, shared.barrier_epochs.at(block.index), 4)?;
        let inbox = shared.inboxes.at(block.index);
        let own = inbox + 4 * team.rank as u64;
        Ok(Self {
            epoch: kept.half_word(0)?.load(Ordering::Acquire),
            kept,
            inbox: view(team.rank, inbox, 4 * team.ranks)?,
            outboxes: team
                .peers()
                .map(|peer| view(peer, own, 4))
                .collect::<Result<_, _>>()?,
            block,
        })
    }

    /// Tells the peers that this block has arrived; publishes its earlier writes.
    pub(super) fn arrive(&self) -> Result<(), Stop> {
        for outbox in &self.outboxes {
            let word = outbox.half_word(0)?;
            word.store(self.epoch.wrapping_add(1), Ordering::Release);
        }
        self.block.context.meter.progress();
        Ok(())
    }

    /// Waits for the peers.
    pub(super) async fn wait(&mut self) -> Result<(), Stop> {
        let goal = self.epoch.wrapping_add(1);
        for peer in self.block.launch.team.peers() {
            let word = 4 * peer;
            let arrived = || {
                Ok(reached(
                    self.inbox.half_word(word)?.load(Ordering::Acquire),
                    goal,
                ))
            };
            self.block.wait(Wait::Arrival { peer }, arrived).await?;
        }
        self.epoch = goal;
        Ok(())
    }

    /// Stores the number for the next kernel.
    pub(super) fn close(self) -> Result<(), Stop> {
        self.kept.half_word(0)?.store(self.epoch, Ordering::Release);
        for view in self.outboxes.iter().chain([&self.kept, &self.inbox]) {
            view.still_valid()?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_arrivals_wrap_around() {
        assert!(reached(5, 5) && reached(6, 5) && !reached(4, 5));
        assert!(reached(0, u32::MAX) && !reached(u32::MAX, 0));
    }
}
