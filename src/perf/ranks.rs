//! Adapts a world of the safe layer to the benchmark method.

use nccl::World;

use crate::bench::Ranks;
use crate::failure::Failure;

/// The ranks of a world.
pub struct WorldRanks<'a>(pub &'a World);

impl Ranks for WorldRanks<'_> {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn size(&self) -> usize {
        self.0.size()
    }

    fn barrier(&self) -> Result<(), Failure> {
        Ok(self.0.barrier("perf/barrier")?)
    }

    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Failure> {
        Ok(self.0.all_gather("perf/gather", bytes)?)
    }
}
