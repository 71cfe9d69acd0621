//! The places of a job, which its processes keep for their lives.

use serde::{Deserialize, Serialize};

/// A place in a job, and which process has it.
///
/// A process keeps its slot as long as it is in the world, whereas ranks are counted anew in each generation. The slot is free
/// when the process has ended or left, or was left behind. A process that joins the running world
/// ([`join_running`](crate::World::join_running)) takes the slot with the number of the rank it was started as, if there is such a
/// slot and it is free, and otherwise the lowest free one. So whatever a program assigns to slots, such as the experts of a
/// model, stays where it is when other ranks end.
///
/// ```
/// use std::time::Duration;
/// use nccl::World;
///
/// let mut worlds = World::threads(3);
/// drop(worlds.remove(1)); // rank 1 leaves
/// std::thread::scope(|scope| {
///     for world in &worlds {
///         scope.spawn(|| {
///             let next = world.next_generation(Duration::from_secs(10)).unwrap();
///             assert_eq!(next.size(), 2);
///             // The rank that was 2 is 1 now. Its slot is what it was.
///             assert_eq!(next.slot(1).unwrap().number, 2);
///             assert_eq!(next.rank_in_slot(2), Some(1));
///             assert_eq!((next.slot_count(), next.rank_in_slot(1)), (3, None));
///         });
///     }
/// });
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Slot {
    /// Its number. In the first generation, it is the rank.
    pub number: usize,
    /// Distinguishes the processes that have had this slot one after another: a random number that each one chose. All ranks
    /// that are threads of one process have the same number, because no thread ever takes the slot of another one.
    pub incarnation: u64,
}
