//! The division of works among blocks, and of a block's part into pieces.

use super::super::block::{Stop, Trouble};
use super::arguments::{Launch, THREADS};
use super::works::{Range, Work};

/// The bytes of the cells by which works are divided among channels.
const CELL: u64 = 1024;
/// The bytes of a pack of lines.
pub(super) const PACK: usize = 8;
/// The threads of a warp.
const WARP: u64 = 32;

/// A block's part of a work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) work: Work,
    /// The first element, and the number of elements.
    pub(super) begin: u64,
    pub(super) count: u64,
    /// The block's position among the blocks that share the part.
    pub(super) block: u64,
    pub(super) blocks: u64,
}

impl Launch {
    /// Returns the element at a fraction of a work, rounded down to a cell.
    fn at(&self, work: &Work, fraction: u64, element: u64) -> u64 {
        let cell = CELL / element;
        let cells = work.elements.div_ceil(cell);
        ((u128::from(fraction) * u128::from(cells)) >> 16) as u64 * cell
    }

    fn range(&self, channel: u64) -> Result<Range, Stop> {
        let range = usize::try_from(channel)
            .ok()
            .and_then(|channel| self.ranges.get(channel));
        let (field, value) = ("a channel", channel);
        Ok(*range.ok_or(Trouble::Work { field, value })?)
    }

    fn work(&self, index: usize) -> Result<&Work, Stop> {
        let (field, value) = ("a work", index as u64);
        let work = self.works.get(index);
        Ok(work.ok_or(Trouble::Work { field, value })?)
    }

    /// Returns the works in which a block begins and ends, each with an element.
    fn bounds(&self, block: u64, element: u64) -> Result<[(usize, u64); 2], Stop> {
        let (mut first, mut fraction) = (0, 0);
        if let Some(before) = block.checked_sub(1) {
            let before = self.range(before)?;
            (first, fraction) = (before.work, before.fraction + 1);
            if fraction == 1 << 16 {
                (first, fraction) = (first + 1, 0);
            }
        }
        let end = self.range(block)?;
        let last = self.work(end.work)?;
        let to = self.at(last, end.fraction + 1, element).min(last.elements);
        let from = match self.works.get(first) {
            Some(work) => self.at(work, fraction, element),
            // The earlier blocks have all elements.
            None => 0,
        };
        Ok([(first, from), (end.work, to)])
    }

    /// Returns the parts of a block of an algorithm that works in place.
    pub(super) fn parts(&self, block: usize, element: usize) -> Result<Vec<Part>, Stop> {
        let (block, element) = (block as u64, element as u64);
        if self.ranges.is_empty() {
            let work = *self.work(0)?;
            return Ok(vec![Part {
                work,
                begin: 0,
                count: work.elements,
                block,
                blocks: self.blocks as u64,
            }]);
        }
        let [(first, from), (last, to)] = self.bounds(block, element)?;
        let mut parts = Vec::new();
        for index in first..=last {
            let work = *self.work(index)?;
            let shared = work.first_channel..work.first_channel + work.channels;
            let (begin, end, block, blocks) = if shared.contains(&block) {
                let begin = match work.first_channel.checked_sub(1) {
                    Some(before) => match self.range(before)? {
                        before if before.work == index => (before.fraction + 1) & 0xffff,
                        _ => 0,
                    },
                    None => 0,
                };
                let end = match self.range(shared.end - 1)? {
                    end if end.work == index => end.fraction + 1,
                    _ => 1 << 16,
                };
                (
                    self.at(&work, begin, element),
                    self.at(&work, end, element).min(work.elements),
                    block - shared.start,
                    work.channels,
                )
            } else {
                let begin = if index > first { 0 } else { from };
                let end = if index < last { work.elements } else { to };
                (begin, end, 0, 1)
            };
            parts.push(Part {
                work,
                begin,
                count: end.saturating_sub(begin),
                block,
                blocks,
            });
        }
        Ok(parts)
    }

    /// Returns the part of a block of an algorithm over lines, which has only one work.
    pub(super) fn single(&self, block: usize, element: usize) -> Result<Part, Stop> {
        let (work, begin, end);
        if self.ranges.is_empty() {
            work = *self.work(0)?;
            let per_pack = (PACK / element) as u64;
            let packs = work.elements.div_ceil(per_pack);
            let (blocks, block) = (self.blocks as u64, block as u64);
            let to = |block: u64| packs / blocks * block + block.min(packs % blocks);
            begin = to(block) * per_pack;
            end = (to(block + 1) * per_pack).min(work.elements);
        } else {
            let [(_, from), (last, to)] = self.bounds(block as u64, element as u64)?;
            (work, begin, end) = (*self.work(last)?, from, to);
        }
        Ok(Part {
            work,
            begin,
            count: end.saturating_sub(begin),
            block: 0,
            blocks: 1,
        })
    }
}

/// A piece of a part: its offset and its length, in bytes.
pub(super) type Piece = (u64, usize);

/// Returns the pieces of a part that only the blocks of this rank share: a contiguous range of the part.
pub(super) fn stretch(part: &Part, element: usize) -> impl Iterator<Item = Piece> + use<> {
    /// The most bytes of a piece.
    const PIECE: u64 = 16 << 10;
    // Blocks are divided at packs of 16 bytes.
    let units = (part.count * element as u64).div_ceil(16);
    let to = |block: u64| units / part.blocks * block + block.min(units % part.blocks);
    let end = (16 * to(part.block + 1)).min(part.count * element as u64);
    let begin = (16 * to(part.block)).min(end);
    (begin..end)
        .step_by(PIECE as usize)
        .map(move |at| (at, (end - at).min(PIECE) as usize))
}

/// Returns the pieces of an all-reduce that one block of a rank reduces for all ranks: tiles, distributed over ranks and then
/// over blocks. `offsets` are those of input and output, by which NCCL aligns the tiles; the tiles of `bulk` kernels are
/// longer.
pub(super) fn tiles(
    part: &Part,
    element: usize,
    offsets: [u64; 2],
    bulk: bool,
    rank: usize,
    ranks: usize,
) -> impl Iterator<Item = Piece> + use<> {
    /// The tiles of a chunk: the number of warps of the smallest block.
    const TILES: u64 = 4;
    let bytes = part.count * element as u64;
    let owners = ranks as u64 * part.blocks;
    let own = rank as u64 + ranks as u64 * part.block;
    let [input, output] = offsets;
    let distance = input.wrapping_sub(output);
    let before = (input.wrapping_neg() % 16).min(bytes);
    let mut at = before;
    let mut regions = Vec::new();
    let mut region = |pack: u64, packs: u64, fits: bool| {
        let tile = pack * packs * WARP;
        let chunks = (bytes - at) / (TILES * tile);
        let chunks = chunks - chunks % owners;
        if fits && chunks > 0 {
            regions.push((at, tile, TILES * chunks));
            at += TILES * tile * chunks;
        }
    };
    region(16, if bulk { 8 } else { 4 }, distance % 16 == 0);
    region(4, 4, element == 4 || distance % 4 == 0);
    let behind = at;
    let deep = regions.into_iter().flat_map(move |(at, tile, tiles)| {
        (own..tiles)
            .step_by(owners as usize)
            .map(move |index| (at + index * tile, tile as usize))
    });
    // The elements before and after the tiles form one row, which is divided into units of a warp.
    let row = before + (bytes - behind);
    let unit = WARP * element as u64;
    let ends = (own * unit..row)
        .step_by((owners * unit) as usize)
        .flat_map(move |from| {
            let to = (from + unit).min(row);
            let split = before.clamp(from, to);
            let shift = behind - before;
            [(from, split), (split + shift, to + shift)]
        })
        .filter(|(from, to)| from < to)
        .map(|(from, to)| (from, (to - from) as usize));
    deep.chain(ends)
}

/// The number of packs exchanged at a time: one by each thread.
pub(super) const PACKS: usize = THREADS;
