//! The proxies of an operation for a profiler, and how far their data has got.

use crate::nccl::communicator::{Route, Session};
use crate::nccl::profiler::{Flow, Proxy};
use crate::nccl::task::{CollectiveTask, Function, MessageTask};
use crate::transport::{CHUNK, Direction};

/// Returns the proxy of a message: one, if its peer is beyond a network.
pub(super) fn proxies_of_message(session: &Session, task: &MessageTask) -> Vec<Proxy> {
    let peer = task.peer as usize;
    if peer == session.rank || session.route(peer) != Route::Network {
        return Vec::new();
    }
    let steps = task.bytes.div_ceil(CHUNK).max(1) as u32;
    let is_send = task.direction == Direction::Send;
    vec![Proxy::new(peer, is_send, task.bytes, CHUNK, steps)]
}

/// Returns the proxies of a collective, whose data goes around a ring: those to neighbours on other hosts, the receiving proxy
/// first.
pub(super) fn proxies_of_collective(session: &Session, task: &CollectiveTask) -> Vec<Proxy> {
    let ring = Ring::of(session, task);
    let ranks = ring.ranks;
    let (previous, next) = ((ring.rank + ranks - 1) % ranks, (ring.rank + 1) % ranks);
    let bytes = task.bytes();
    // Each step moves a rank's part.
    let chunk = match task.function {
        Function::AllReduce => bytes.div_ceil(ranks as u64),
        _ => bytes,
    };
    let ends = [
        (previous, false, ring.receives()),
        (next, true, ring.sends()),
    ];
    let beyond =
        |&(peer, _, steps): &(usize, bool, u32)| steps > 0 && session.route(peer) == Route::Network;
    let proxy = |(peer, is_send, steps): (usize, bool, u32)| {
        Proxy::new(peer, is_send, chunk * u64::from(steps), chunk, steps)
    };
    ends.into_iter().filter(beyond).map(proxy).collect()
}

/// A collective's path around the ring, as seen by one rank.
pub(super) struct Ring {
    function: Function,
    root: usize,
    rank: usize,
    ranks: usize,
}

impl Ring {
    pub(super) fn of(session: &Session, task: &CollectiveTask) -> Self {
        Self {
            function: task.function,
            root: task.root as usize,
            rank: session.rank,
            ranks: session.ranks(),
        }
    }

    /// Returns how many hops `to` is behind `from` on the ring.
    fn hops(&self, from: usize, to: usize) -> usize {
        (to + self.ranks - from) % self.ranks
    }

    /// Returns the first rank of a chain, for functions whose data does not go all the way around.
    fn first(&self) -> usize {
        match self.function {
            Function::Reduce => (self.root + 1) % self.ranks,
            _ => self.root,
        }
    }

    fn is_chain(&self) -> bool {
        matches!(self.function, Function::Broadcast | Function::Reduce)
    }

    /// Returns the number of steps that the rank receives.
    fn receives(&self) -> u32 {
        let others = self.ranks as u32 - 1;
        match self.function {
            Function::AllReduce => 2 * others,
            _ if self.is_chain() => u32::from(self.rank != self.first()),
            _ => others,
        }
    }

    /// Returns the number of steps that the rank sends.
    fn sends(&self) -> u32 {
        let last = (self.first() + self.ranks - 1) % self.ranks;
        match self.is_chain() {
            true => u32::from(self.rank != last),
            false => self.receives(),
        }
    }

    /// Returns the steps that this rank can have received: what the ranks before it have sent, up to the nearest one that has not arrived.
    fn reachable(&self, arrived: &impl Fn(usize) -> bool) -> u32 {
        let before = |hops: usize| (self.rank + self.ranks - hops) % self.ranks;
        let nearest = (1..self.ranks).find(|&hops| !arrived(before(hops)));
        let Some(hops) = nearest else {
            return self.receives();
        };
        match self.is_chain() {
            true => u32::from(hops > self.hops(self.first(), self.rank)).min(self.receives()),
            false => self.receives().min(hops as u32 - 1),
        }
    }

    /// Returns the part of `steps` that corresponds to the finished blocks.
    fn share(steps: u32, progress: Option<(u32, u32)>) -> u32 {
        progress.map_or(0, |(finished, all)| {
            (u64::from(steps) * u64::from(finished) / u64::from(all.max(1))) as u32
        })
    }

    pub(super) fn received(
        &self,
        arrived: &impl Fn(usize) -> bool,
        progress: Option<(u32, u32)>,
    ) -> Flow {
        let previous = (self.rank + self.ranks - 1) % self.ranks;
        let done = match progress {
            Some(_) => Self::share(self.receives(), progress),
            // The last step is over with the collective.
            None => self
                .reachable(arrived)
                .min(self.receives().saturating_sub(1)),
        };
        Flow {
            is_ready: true,
            has_peer: arrived(previous),
            done,
        }
    }

    pub(super) fn sent(
        &self,
        arrived: &impl Fn(usize) -> bool,
        progress: Option<(u32, u32)>,
    ) -> Flow {
        let next = (self.rank + 1) % self.ranks;
        let received = self.reachable(arrived).min(self.receives());
        let own = !self.is_chain() || self.rank == self.first();
        let can_send = (received + u32::from(own)).min(self.sends());
        let has_peer = arrived(next);
        let done = match (progress, has_peer) {
            (Some(_), _) => Self::share(self.sends(), progress),
            (None, true) => can_send.min(self.sends().saturating_sub(1)),
            (None, false) => 0,
        };
        Flow {
            is_ready: arrived(self.rank) && can_send > done,
            has_peer,
            done,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring(function: Function, rank: usize) -> Ring {
        Ring {
            function,
            root: 0,
            rank,
            ranks: 4,
        }
    }

    #[test]
    fn a_rank_receives_as_many_steps_as_ranks_have_arrived_before_it() {
        let without_1 = |rank: usize| rank != 1;
        let received =
            |function| [2, 3, 0].map(|rank| ring(function, rank).received(&without_1, None).done);
        assert_eq!(received(Function::AllReduce), [0, 1, 2]);
        assert_eq!(received(Function::AllGather), [0, 1, 2]);
        // From 0 over 1 to 2 and 3.
        assert_eq!(received(Function::Broadcast), [0, 0, 0]);
        // From 1 over 2 and 3 to 0.
        assert_eq!(received(Function::Reduce), [0, 0, 0]);
    }

    #[test]
    fn a_rank_sends_its_own_part_unless_the_next_rank_has_not_arrived() {
        let without_1 = |rank: usize| rank != 1;
        let sent = |rank| ring(Function::AllReduce, rank).sent(&without_1, None);
        assert_eq!(sent(2).done, 1);
        assert_eq!(
            sent(0),
            Flow {
                is_ready: true,
                has_peer: false,
                done: 0
            }
        );
        assert_eq!(ring(Function::Broadcast, 3).sends(), 0);
        assert_eq!(ring(Function::Broadcast, 0).receives(), 0);
        assert_eq!(ring(Function::Reduce, 0).sends(), 0);
        assert_eq!(ring(Function::Reduce, 1).receives(), 0);
    }

    #[test]
    fn steps_follow_the_blocks_once_all_ranks_have_arrived() {
        let all = |_: usize| true;
        let ring = ring(Function::AllReduce, 0);
        assert_eq!(ring.received(&all, Some((1, 4))).done, 1);
        assert_eq!(ring.received(&all, Some((4, 4))).done, 6);
        assert_eq!(ring.received(&all, None).done, 5);
    }
}
