//! The algorithms over lines (LL), for small sizes and for buffers outside of windows.

use super::super::block::Stop;
use super::super::functions::Collective;
use super::super::memory;
use super::block::Block;
use super::direct::sum;
use super::exchange::Exchange;
use super::parts::{PACK, PACKS};
use super::profile::Phase;

/// The most bytes that a rank sends to each peer in an epoch.
const EPOCH: usize = PACK * PACKS;

pub(super) async fn run(block: &Block) -> Result<(), Stop> {
    let (team, element) = (block.launch.team, block.element());
    let collective = block.launch.kernel.collective;
    let part = block.launch.single(block.index, element)?;
    let mut exchange = Exchange::open(block)?;
    let sum = sum(block, &part);
    let (input, output) = block.buffers(&part.work)?;
    let (begin, total) = (
        part.begin as usize * element,
        part.work.elements as usize * element,
    );
    let bytes = part.count as usize * element;
    // The offset of the data for or from a rank, for collectives with a separate block for each rank.
    let place = |rank: usize, own: Collective| if collective == own { rank * total } else { 0 };
    let (mut packs, mut sums) = (Vec::new(), Vec::new());
    for at in (0..bytes).step_by(EPOCH) {
        let length = (bytes - at).min(EPOCH);
        let slots = length.div_ceil(PACK);
        block.context.meter.grant(2 * length * team.ranks).await;
        packs.resize(length, 0);
        for rank in team.from(team.rank) {
            let offset = begin + at + place(rank, Collective::ReduceScatter);
            let address = input.plus(offset as u64).own();
            let from = memory::view(block.memory(), address, length)?;
            from.read(0, &mut packs)?;
            exchange.send(rank, slots * team.rank, &packs)?;
            from.still_valid()?;
        }
        for rank in 0..team.ranks {
            exchange.wait(rank, slots * rank, &mut packs).await?;
            if let Some(sum) = sum {
                match rank {
                    0 => sum.begin(&packs, &mut sums),
                    _ => sum.add(&packs, &mut sums),
                }
                if rank + 1 < team.ranks {
                    continue;
                }
                sum.finish(&sums, &mut packs);
            }
            let offset = begin + at + place(rank, Collective::AllGather);
            let address = output.plus(offset as u64).own();
            let to = memory::view(block.memory(), address, length)?;
            to.write(0, &packs)?;
            to.still_valid()?;
        }
        exchange.advance()?;
        if let Some(profile) = block.profile().filter(|_| at == 0) {
            profile.reached(block.memory(), block.index, Phase::Ready)?;
        }
    }
    if let Some(profile) = block.profile() {
        profile.reached(block.memory(), block.index, Phase::Moved)?;
    }
    exchange.close()
}
