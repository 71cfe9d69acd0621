//! State of the worlds of this process.

use std::time::Duration;

/// State of a world, seen from one of its ranks.
///
/// ```
/// let world = nccl::World::single();
/// let stats = nccl::stats();
/// assert!(stats.worlds.iter().any(|world| world.ranks.present == 1));
/// # drop(world);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorldStats {
    /// The job's name; empty without one.
    pub job: String,
    /// The generation of the world.
    pub generation: u64,
    /// This rank.
    pub rank: usize,
    /// The number under which the launcher started this process, and which prefixes the lines of its output; `None`
    /// where no launcher gave it one.
    pub launcher_rank: Option<usize>,
    /// Number of ranks in each state.
    pub ranks: RanksByState,
    /// Ranks in other processes, and the time since each was last heard. All ranks answer the heartbeats of the
    /// coordinator (rank 0 at first) twice a second, so the coordinator lists all of them; another rank lists the
    /// coordinator only. Empty where all ranks are threads of this process.
    pub heartbeat_ages: Vec<(usize, Duration)>,
}

/// How many ranks of a world are present, and how many ended in which way.
///
/// ```
/// let ranks = nccl::stats().worlds.first().map(|world| world.ranks);
/// if ranks.is_some_and(|ranks| ranks.gone + ranks.failed > 0) {
///     eprintln!("not all ranks are there any more");
/// }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RanksByState {
    /// Present, or still to come.
    pub present: usize,
    /// Ended with a leave message.
    pub left: usize,
    /// Reported that they fail.
    pub failed: usize,
    /// Departed without a leave message.
    pub gone: usize,
}

#[cfg(feature = "world")]
pub(super) use with_worlds::{all, refused_connections};

#[cfg(feature = "world")]
mod with_worlds {
    use nccl_base::departure::Departure;

    use super::{RanksByState, WorldStats};
    use nccl_control::{self, RankSession};

    pub(in super::super) use nccl_control::refused_connections;

    pub(in super::super) fn all() -> Vec<WorldStats> {
        nccl_control::sessions()
            .iter()
            .map(|session| world(session))
            .collect()
    }

    /// Returns the state of a world of this process.
    fn world(session: &RankSession) -> WorldStats {
        let mut ranks = RanksByState::default();
        let departures = session.departures();
        ranks.present = session.size().saturating_sub(departures.len());
        for (_, departure) in departures {
            match departure {
                Departure::Left => ranks.left += 1,
                Departure::Failed(_) => ranks.failed += 1,
                Departure::Lost(_) => ranks.gone += 1,
            }
        }
        let (job, generation) = session.job();
        let members = session.members();
        WorldStats {
            job: job.to_owned(),
            generation,
            rank: session.rank(),
            launcher_rank: members
                .get()
                .and_then(|members| members.get(session.rank())?.launcher_rank),
            ranks,
            heartbeat_ages: session.heartbeat_ages(),
        }
    }
}

#[cfg(not(feature = "world"))]
pub(super) fn all() -> Vec<WorldStats> {
    Vec::new()
}

#[cfg(not(feature = "world"))]
pub(super) fn refused_connections() -> u64 {
    0
}
