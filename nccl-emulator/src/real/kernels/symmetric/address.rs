//! Buffers that every rank of a team maps, at equal distances.

use super::super::block::{Stop, Trouble};
use super::super::memory::{self, Memory, View};
use super::layout::Window;

/// The ranks whose kernels work together, and this rank among them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Team {
    pub(super) rank: usize,
    pub(super) ranks: usize,
}

impl Team {
    /// Returns all ranks, beginning with `first` and wrapping around.
    pub(super) fn from(self, first: usize) -> impl Iterator<Item = usize> {
        (first..first + self.ranks).map(move |rank| rank % self.ranks)
    }

    pub(super) fn peers(self) -> impl Iterator<Item = usize> {
        (0..self.ranks).filter(move |&rank| rank != self.rank)
    }
}

/// A buffer as a rank addresses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Buffer {
    /// This rank's mapping of its own buffer.
    own: u64,
    /// The distance between the mappings of two neighbouring ranks, in units of 4 GiB. `None` if only this rank's buffer is
    /// mapped.
    stride: Option<u64>,
    /// The position of this rank's mapping among them.
    rank: usize,
}

impl Buffer {
    /// Creates a buffer that is mapped at `own`, with the peers' mappings around it.
    pub(super) fn new(own: u64, stride: u64, rank: usize) -> Self {
        Self {
            own,
            stride: Some(stride),
            rank,
        }
    }

    /// Creates the buffer of rank `rank`; that of rank 0 begins at `base`.
    pub(super) fn flat(base: u64, stride: u64, rank: usize) -> Self {
        Self::new(
            base.wrapping_add((rank as u64 * stride) << 32),
            stride,
            rank,
        )
    }

    /// Creates a buffer outside of windows.
    pub(super) fn private(address: u64) -> Self {
        Self {
            own: address,
            stride: None,
            rank: 0,
        }
    }

    /// Opens the buffer at `offset` of a window, or at the address `offset` if the window is null.
    pub(super) fn open(
        memory: &dyn Memory,
        layout: &Window,
        window: u64,
        offset: u64,
    ) -> Result<Self, Stop> {
        if window == 0 {
            return Ok(Self::private(offset));
        }
        let bytes = memory::load(memory, window, layout.size)?;
        let base = layout.base.get(&bytes);
        let rank = layout.rank.get(&bytes) as usize;
        let buffer = Self::flat(base, layout.stride.get(&bytes), rank);
        Ok(buffer.plus(offset))
    }

    /// Returns the buffer from `offset` on.
    pub(super) fn plus(self, offset: u64) -> Self {
        Self {
            own: self.own.wrapping_add(offset),
            ..self
        }
    }

    pub(super) fn own(self) -> u64 {
        self.own
    }

    /// Returns the address of the buffer of `rank`; this rank is `team.rank`.
    fn of(self, team: Team, rank: usize) -> Result<u64, Stop> {
        if rank == team.rank {
            return Ok(self.own);
        }
        let stride = self.stride.ok_or(Trouble::NoBuffer { peer: rank })?;
        let distance = (rank as u64).wrapping_sub(team.rank as u64);
        Ok(self
            .own
            .wrapping_add(distance.wrapping_mul(stride).wrapping_shl(32)))
    }

    /// Returns a view of `length` bytes of the buffer of `rank`, from `offset` on.
    pub(super) fn view(
        self,
        memory: &dyn Memory,
        team: Team,
        rank: usize,
        offset: u64,
        length: usize,
    ) -> Result<View, Stop> {
        let address = self.plus(offset).of(team, rank)?;
        Ok(memory::view(memory, address, length)?)
    }

    /// Returns views of `length` bytes of the buffers of all ranks, by rank.
    pub(super) fn views(
        self,
        memory: &dyn Memory,
        team: Team,
        offset: u64,
        length: usize,
    ) -> Result<Vec<View>, Stop> {
        (0..team.ranks)
            .map(|rank| self.view(memory, team, rank, offset, length))
            .collect()
    }
}
