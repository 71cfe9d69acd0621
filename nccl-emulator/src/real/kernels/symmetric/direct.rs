//! The algorithms that load from the peers' inputs and store to their outputs in place (LD, ST).
//!
//! A first barrier waits until all peers' buffers are ready. A second one keeps every rank until all reads and
//! writes are done.

use super::super::block::Stop;
use super::super::functions::Collective;
use super::super::memory::View;
use super::accumulate::Sum;
use super::address::Buffer;
use super::barrier::Barrier;
use super::block::Block;
use super::names::Algorithm;
use super::parts::{Part, Piece, stretch, tiles};
use super::profile::Phase;

pub(super) async fn run(block: &Block) -> Result<(), Stop> {
    let mut barrier = Barrier::open(block)?;
    barrier.arrive()?;
    barrier.wait().await?;
    if let Some(profile) = block.profile() {
        profile.reached(block.memory(), block.index, Phase::Ready)?;
    }
    for part in block.launch.parts(block.index, block.element())? {
        match block.launch.kernel.collective {
            Collective::AllGather => all_gather(block, &part).await?,
            Collective::ReduceScatter => reduce_scatter(block, &part).await?,
            _ => all_reduce(block, &part).await?,
        }
    }
    if let Some(profile) = block.profile() {
        profile.reached(block.memory(), block.index, Phase::Moved)?;
    }
    barrier.arrive()?;
    barrier.wait().await?;
    barrier.close()
}

/// The range of a work's buffers that a part uses: bytes at the same offset of every rank's mapping.
struct Region {
    buffer: Buffer,
    offset: u64,
    bytes: usize,
}

impl Region {
    fn new(block: &Block, buffer: Buffer, first: u64, part: &Part) -> Self {
        let element = block.element() as u64;
        Self {
            buffer,
            offset: (first + part.begin) * element,
            bytes: (part.count * element) as usize,
        }
    }

    fn of(&self, block: &Block, rank: usize) -> Result<View, Stop> {
        let team = block.launch.team;
        self.buffer
            .view(block.memory(), team, rank, self.offset, self.bytes)
    }

    /// Returns the region of every rank, beginning with rank `first` and wrapping around.
    fn from(&self, block: &Block, first: usize) -> Result<Vec<View>, Stop> {
        let team = block.launch.team;
        team.from(first).map(|rank| self.of(block, rank)).collect()
    }

    fn address(&self) -> u64 {
        self.buffer.plus(self.offset).own()
    }
}

fn still_valid<'a>(views: impl IntoIterator<Item = &'a View>) -> Result<(), Stop> {
    for view in views {
        view.still_valid()?;
    }
    Ok(())
}

/// Stores the own input into every rank's output.
async fn all_gather(block: &Block, part: &Part) -> Result<(), Stop> {
    if part.count == 0 {
        return Ok(());
    }
    let team = block.launch.team;
    let (input, output) = block.buffers(&part.work)?;
    let input = Region::new(block, input, 0, part);
    let output = Region::new(block, output, team.rank as u64 * part.work.elements, part);
    let in_place = input.address() == output.address();
    let from = input.of(block, team.rank)?;
    let mut to = output.from(block, team.rank)?;
    if in_place {
        to.remove(0);
    }
    let mut bytes = Vec::new();
    for (at, length) in stretch(part, 1) {
        block.context.meter.grant(length * team.ranks).await;
        bytes.resize(length, 0);
        from.read(at as usize, &mut bytes)?;
        for view in &to {
            view.write(at as usize, &bytes)?;
        }
    }
    still_valid(to.iter().chain([&from]))
}

/// Returns the sum of a kernel. NCCL's kernels use the factor of the first work.
pub(super) fn sum(block: &Block, part: &Part) -> Option<Sum> {
    let kernel = block.launch.kernel;
    let first = block.launch.works.first().unwrap_or(&part.work);
    Some(Sum::new(kernel.ty?, kernel.average, first.argument))
}

/// Reduces pieces of all inputs, which begin with the own one, into outputs.
async fn reduce(
    block: &Block,
    sum: Sum,
    pieces: impl Iterator<Item = Piece>,
    inputs: &[View],
    outputs: &[View],
) -> Result<(), Stop> {
    let (mut sums, mut bytes) = (Vec::new(), Vec::new());
    for (at, length) in pieces {
        let at = at as usize;
        let moved = length * (inputs.len() + outputs.len());
        block.context.meter.grant(moved).await;
        bytes.resize(length, 0);
        for (index, input) in inputs.iter().enumerate() {
            input.read(at, &mut bytes)?;
            match index {
                0 => sum.begin(&bytes, &mut sums),
                _ => sum.add(&bytes, &mut sums),
            }
        }
        sum.finish(&sums, &mut bytes);
        for output in outputs {
            output.write(at, &bytes)?;
        }
    }
    still_valid(inputs.iter().chain(outputs))
}

/// Reduces the own block of all inputs into the own output.
async fn reduce_scatter(block: &Block, part: &Part) -> Result<(), Stop> {
    let Some(sum) = sum(block, part).filter(|_| part.count > 0) else {
        return Ok(());
    };
    let team = block.launch.team;
    let (input, output) = block.buffers(&part.work)?;
    let first = team.rank as u64 * part.work.elements;
    let inputs = Region::new(block, input, first, part).from(block, team.rank)?;
    let output = Region::new(block, output, 0, part).of(block, team.rank)?;
    let pieces = stretch(part, block.element());
    reduce(block, sum, pieces, &inputs, &[output]).await
}

/// Reduces the own tiles of all inputs into all outputs.
async fn all_reduce(block: &Block, part: &Part) -> Result<(), Stop> {
    let Some(sum) = sum(block, part).filter(|_| part.count > 0) else {
        return Ok(());
    };
    let team = block.launch.team;
    let (input, output) = block.buffers(&part.work)?;
    let input = Region::new(block, input, 0, part);
    let output = Region::new(block, output, 0, part);
    let pieces = tiles(
        part,
        block.element(),
        [&input, &output].map(Region::address),
        block.launch.kernel.algorithm == Algorithm::Bulk,
        team.rank,
        team.ranks,
    );
    let inputs = input.from(block, team.rank)?;
    let outputs = output.from(block, team.rank)?;
    reduce(block, sum, pieces, &inputs, &outputs).await
}
