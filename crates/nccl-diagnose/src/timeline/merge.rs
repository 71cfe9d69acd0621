//! Chooses the recordings of one world, and relates their clocks.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

use nccl_core::recorder::{Clock, ClockSource};

use super::{MissingRank, RankRecording, Timeline};
use crate::error::{Error, Result};
use nccl_core::recorder::Snapshot;

/// Maximum number of missing ranks that are listed: a larger world size is probably a mistake.
const NAMED: usize = 4096;

impl Timeline {
    /// The recordings of several ranks on one time axis: those of the world with the latest recording. Of several
    /// recordings of one process, the last counts; recordings that are left out are listed in
    /// [`left_out`](Self::left_out).
    ///
    /// Times are those of the lowest rank. Processes on one machine share a clock. Between machines, times are
    /// corrected where both ranks measured the offset of their clock to that of rank 0, and unchanged elsewhere;
    /// [`RankRecording::clock`] says which.
    ///
    /// # Errors
    /// [`ErrorKind::Io`](nccl_core::ErrorKind::Io) when `snapshots` is empty.
    ///
    /// ```
    /// use nccl::recorder::{self, Timeline};
    ///
    /// let timeline = Timeline::merge(vec![recorder::snapshot()])?;
    /// assert_eq!(timeline.ranks.len(), 1);
    /// assert!(Timeline::merge(Vec::new()).is_err());
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn merge(snapshots: Vec<Snapshot>) -> Result<Self> {
        let latest = snapshots.iter().max_by_key(|snapshot| snapshot.taken);
        let Some(latest) = latest else {
            let error = std::io::Error::new(std::io::ErrorKind::NotFound, "there is none");
            return Err(Error::io("merging the recordings of ranks")(error));
        };
        let place = latest.place.clone();
        let world = |snapshot: &Snapshot| {
            let place = snapshot.place.as_ref();
            place.map(|place| (place.job.clone(), place.generation))
        };
        let wanted = world(latest);
        let mut left_out = Vec::new();
        let mut ranks: Vec<(usize, Snapshot)> = Vec::new();
        let mut processes = HashMap::new();
        for (at, snapshot) in snapshots.into_iter().enumerate() {
            if world(&snapshot) != wanted {
                left_out.push(other_world(&snapshot));
                continue;
            }
            let rank = rank_of(&snapshot, at);
            match processes.entry((rank, snapshot.host.clone(), snapshot.pid)) {
                Entry::Occupied(same) => {
                    let at: usize = *same.get();
                    let held = &mut ranks[at].1;
                    if held.taken < snapshot.taken {
                        *held = snapshot;
                    }
                }
                Entry::Vacant(free) => {
                    free.insert(ranks.len());
                    ranks.push((rank, snapshot));
                }
            }
        }
        ranks.sort_by_key(|(rank, snapshot)| (*rank, snapshot.taken));
        let reference = &ranks[0].1;
        let clocks: Vec<_> = ranks
            .iter()
            .map(|(_, snapshot)| stored_clock(snapshot, reference))
            .collect();
        let ranks = ranks.into_iter().zip(clocks);
        let ranks = ranks.map(|((rank, snapshot), clock)| RankRecording {
            rank,
            clock,
            snapshot,
        });
        let ranks: Vec<_> = ranks.collect();
        let there: HashSet<usize> = ranks.iter().map(|one| one.rank).collect();
        let size = place.as_ref().map_or(0, |place| place.world_size);
        let missing = (0..size.min(NAMED)).filter(|rank| !there.contains(rank));
        let missing = missing
            .map(|rank| MissingRank::new(rank, None, None, "there is no recording of it"))
            .collect();
        let (job, generation) = wanted.unwrap_or_default();
        Ok(Self {
            job,
            generation,
            reference: ranks[0].who(),
            ranks,
            missing,
            left_out,
        })
    }
}

fn other_world(snapshot: &Snapshot) -> String {
    let process = format!("{}, pid {}", snapshot.host, snapshot.pid);
    match &snapshot.place {
        Some(place) => format!(
            "the recording of rank {} ({process}) is of generation {} of job {:?}",
            place.rank, place.generation, place.job
        ),
        None => format!("the recording of {process} is of no world"),
    }
}

/// The rank of a recording; without a world, its rank in the largest of its communicators.
fn rank_of(snapshot: &Snapshot, at: usize) -> usize {
    let largest = || {
        let all = snapshot.communicators.iter();
        all.max_by_key(|one| one.world_size).map(|one| one.rank)
    };
    let place = snapshot.place.as_ref().map(|place| place.rank);
    place.or_else(largest).unwrap_or(at)
}

/// The relation of two clocks, from the recordings alone.
fn stored_clock(snapshot: &Snapshot, reference: &Snapshot) -> Clock {
    if std::ptr::eq(snapshot, reference) {
        return Clock::REFERENCE;
    }
    if !snapshot.boot.is_empty() && snapshot.boot == reference.boot {
        return Clock::new(0, None, ClockSource::SameMachine);
    }
    match (&snapshot.clock, &reference.clock) {
        (Some(own), Some(base)) => {
            let uncertainty = own.uncertainty_ns.zip(base.uncertainty_ns);
            Clock::new(
                own.offset_ns.saturating_sub(base.offset_ns),
                uncertainty.map(|(own, base)| own.saturating_add(base)),
                ClockSource::RoundTrip,
            )
        }
        _ => Clock::new(0, None, ClockSource::Wall),
    }
}
