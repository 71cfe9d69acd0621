//! The transfer of experts between ranks, while the model serves.

use std::collections::HashMap;

use nccl::moe::{ExpertPlacement, TransferPart};

use super::collectives::Collectives;
use super::error::Result;

/// The transfers of this rank until all ranks have the experts of a new placement.
pub(super) struct Moving {
    rounds: Box<dyn Iterator<Item = Vec<TransferPart>> + Send>,
    /// The length of an expert in numbers, over all layers.
    length: usize,
    /// The numbers of the experts that are being sent, and of those that are arriving or have arrived.
    leaving: HashMap<usize, Vec<f32>>,
    arrived: HashMap<usize, Vec<f32>>,
}

impl Moving {
    /// Plans the transfers, and returns the number of rounds. In each round a rank sends and receives at most `most` numbers.
    pub(super) fn new(
        now: &ExpertPlacement,
        next: &ExpertPlacement,
        length: usize,
        most: usize,
    ) -> Result<(Self, usize)> {
        let rounds = now.transfer_rounds(next, length, most)?;
        let count = rounds.clone().count();
        let moving = Self {
            rounds: Box::new(rounds),
            length,
            leaving: HashMap::new(),
            arrived: HashMap::new(),
        };
        Ok((moving, count))
    }

    /// Takes the next round together with the other ranks. `numbers` returns the numbers of an expert of this rank.
    pub(super) fn round(
        &mut self,
        ranks: &mut impl Collectives,
        numbers: impl Fn(usize) -> Result<Vec<f32>>,
    ) -> Result<()> {
        let (me, round) = (ranks.rank(), self.rounds.next().unwrap_or_default());
        for part in &round {
            if part.from == me && !self.leaving.contains_key(&part.expert) {
                self.leaving.insert(part.expert, numbers(part.expert)?);
            }
        }
        let sent = round.iter().filter(|part| part.from == me);
        let sent: Vec<_> = sent
            .map(|part| (part.to, &self.leaving[&part.expert][part.elements.clone()]))
            .collect();
        let own: Vec<_> = round.iter().filter(|part| part.to == me).collect();
        let mut received: Vec<_> = own
            .iter()
            .map(|part| (part.from, vec![0.0; part.elements.len()]))
            .collect();
        ranks.exchange(&sent, &mut received)?;
        for (part, (_, numbers)) in own.into_iter().zip(received) {
            let arrived = self.arrived.entry(part.expert);
            let arrived = arrived.or_insert_with(|| vec![0.0; self.length]);
            arrived[part.elements.clone()].copy_from_slice(&numbers);
        }
        // If another rank gets the same expert later, its numbers are collected again.
        let length = self.length;
        let is_sent = |part: &&TransferPart| part.from == me && part.elements.end == length;
        for part in round.iter().filter(is_sent) {
            self.leaving.remove(&part.expert);
        }
        Ok(())
    }

    /// Returns the numbers of the experts that have arrived.
    pub(super) fn finish(self) -> HashMap<usize, Vec<f32>> {
        self.arrived
    }
}
