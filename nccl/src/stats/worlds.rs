//! How the worlds of this process stand.

#[cfg(feature = "world")]
pub(super) use with_worlds::{all, strangers};

#[cfg(feature = "world")]
mod with_worlds {
    use nccl_base::departure::Departure;

    use super::super::{RanksByState, WorldStats};
    use crate::rendezvous::{self, Line};

    pub(in super::super) use rendezvous::strangers;

    pub(in super::super) fn all() -> Vec<WorldStats> {
        rendezvous::lines().iter().map(|line| world(line)).collect()
    }

    /// How a world of this process stands.
    fn world(line: &Line) -> WorldStats {
        let mut ranks = RanksByState::default();
        let departures = line.departures();
        ranks.present = line.size().saturating_sub(departures.len());
        for (_, departure) in departures {
            match departure {
                Departure::Left => ranks.left += 1,
                Departure::Failed(_) => ranks.failed += 1,
                Departure::Lost(_) => ranks.gone += 1,
            }
        }
        let (job, epoch) = line.job();
        let members = line.members();
        WorldStats {
            job: job.to_owned(),
            epoch,
            rank: line.rank(),
            launcher_rank: members
                .get()
                .and_then(|members| members.get(line.rank())?.launched),
            ranks,
            heartbeat_ages: line.heartbeat_ages(),
        }
    }
}

#[cfg(not(feature = "world"))]
pub(super) fn all() -> Vec<super::WorldStats> {
    Vec::new()
}

#[cfg(not(feature = "world"))]
pub(super) fn strangers() -> u64 {
    0
}
