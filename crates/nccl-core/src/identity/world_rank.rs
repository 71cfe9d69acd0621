//! A rank of a world.

use serde::{Deserialize, Serialize};

/// A rank of a world.
///
/// ```
/// fn show(place: &nccl::recorder::WorldRank) -> String {
///     format!("rank {} of {} of job {}, generation {}", place.rank, place.world_size, place.job, place.generation)
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct WorldRank {
    /// The name of the job.
    pub job: String,
    /// The attempt of the job.
    pub generation: u64,
    /// The rank.
    pub rank: usize,
    /// The number of ranks.
    pub world_size: usize,
}

impl WorldRank {
    /// Another rank of the same world.
    #[doc(hidden)]
    pub fn of_rank(&self, rank: usize) -> Self {
        Self {
            rank,
            ..self.clone()
        }
    }
}
