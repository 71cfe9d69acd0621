//! The resources of a rank after its communicator's init: the segment, and every rank's device
//! memory.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use cuda_emulator::sync::Mutex;

use super::identity;
use super::route::{self, Route};
use crate::transport::teardown::GONE;
use crate::transport::{Action, KEPT, RankBlock, RankInfo, Segment};
use cuda_emulator::memory::{Mapping, Span};

/// How long a process that was seen alive counts as alive, in milliseconds; at most twice that.
const LIFE_SIGN: u64 = 20;
const DEAD: u64 = u64::MAX;

/// See the module. Jobs keep it alive, so it outlives the communicator while they run.
#[derive(Debug)]
pub(crate) struct Session {
    /// The shared segment.
    pub(crate) segment: Segment,
    /// This rank.
    pub(crate) rank: usize,
    /// A random number that is the same for all ranks of the communicator.
    pub(crate) token: u64,
    pools: Vec<Arc<Mapping>>,
    infos: Vec<RankInfo>,
    /// The number of collectives that this rank has arrived at.
    collectives: AtomicU64,
    /// The number of splits that this rank has taken part in.
    splits: AtomicU64,
    /// The number of barriers that this rank has reached.
    barriers: AtomicU64,
    /// The number of windows that this rank has registered.
    windows: AtomicU64,
    /// The signals that this rank has consumed, by source and signal.
    taken: Mutex<HashMap<(usize, usize), u64>>,
    /// Held while this rank adds to a log of its puts and signals.
    logging: Mutex<()>,
    /// The puts, by source and number, whose memory was used too early, and which were reported.
    raced: Mutex<HashSet<(usize, u64)>>,
    /// See [`Session::has_lost_waits`]. Stays set when the flag of an abort is lowered.
    has_lost_waits: AtomicBool,
    /// See [`Session::has_given_up`].
    has_given_up: AtomicBool,
    /// The routes of the data between this rank and each other rank.
    routes: OnceLock<Box<[Route]>>,
    /// When the process of each rank has to be looked at again, in milliseconds; [`DEAD`] once it has ended.
    looks: Box<[AtomicU64]>,
}

impl Session {
    /// Returns the route of the data between this rank and `rank`.
    pub(crate) fn route(&self, rank: usize) -> Route {
        self.routes()[rank]
    }

    /// Whether this rank exchanges data with any rank over the network.
    pub(crate) fn has_network_peers(&self) -> bool {
        self.routes().contains(&Route::Network)
    }

    fn routes(&self) -> &[Route] {
        self.routes
            .get_or_init(|| route::routes(&self.infos, self.rank))
    }

    /// Creates a session. `pools` holds the memory of each rank's device.
    pub(crate) fn new(segment: Segment, rank: usize, token: u64, pools: Vec<Arc<Mapping>>) -> Self {
        assert_eq!(pools.len(), segment.ranks());
        let infos = (0..segment.ranks())
            .map(|rank| segment.info(rank))
            .collect();
        let looks = pools.iter().map(|_| AtomicU64::default()).collect();
        Self {
            segment,
            rank,
            token,
            pools,
            infos,
            collectives: AtomicU64::new(0),
            splits: AtomicU64::new(0),
            barriers: AtomicU64::new(0),
            windows: AtomicU64::new(0),
            taken: Mutex::default(),
            logging: Mutex::default(),
            raced: Mutex::default(),
            has_lost_waits: AtomicBool::new(false),
            has_given_up: AtomicBool::new(false),
            routes: OnceLock::new(),
            looks,
        }
    }

    /// Returns the number of ranks.
    pub(crate) fn ranks(&self) -> usize {
        self.pools.len()
    }

    /// Returns the published state of this rank.
    pub(crate) fn own(&self) -> &RankBlock {
        self.segment.block(self.rank)
    }

    /// Returns the number of the collective that this rank is about to arrive at.
    pub(crate) fn next_collective(&self) -> u64 {
        self.collectives.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Returns the number of the split that this rank is about to take part in.
    pub(crate) fn next_split(&self) -> u64 {
        self.splits.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Returns the number of the window that this rank is about to register.
    pub(crate) fn next_window(&self) -> u64 {
        self.windows.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Takes the given count of signals of each (source, signal), if all of them have arrived.
    /// Otherwise takes none.
    pub(crate) fn take_signals(&self, wanted: &[(usize, usize, u64)]) -> bool {
        let mut taken = self.taken.lock();
        let there = wanted.iter().all(|&(source, signal, count)| {
            let before = taken.get(&(source, signal)).copied().unwrap_or(0);
            let now = self.segment.signals(source, self.rank, signal);
            now.load(Ordering::SeqCst) - before >= count
        });
        if there {
            for &(source, signal, count) in wanted {
                *taken.entry((source, signal)).or_default() += count;
            }
        }
        there
    }

    /// Logs that this rank is about to write `span` of a window of rank `peer`, and to signal it afterwards.
    pub(crate) fn begin_put(&self, peer: usize, signal: usize, span: Span) {
        if span.len > 0 {
            let _turn = self.logging.lock();
            let log = self.segment.puts(self.rank, peer);
            log.add(signal, Action::Put(span));
        }
    }

    /// Signals `peer`, which then sees all earlier writes of this rank to its memory.
    pub(crate) fn signal(&self, peer: usize, signal: usize) {
        let _turn = self.logging.lock();
        let log = self.segment.puts(self.rank, peer);
        // Without a put there is nothing to wait for.
        if log.last() > 0 {
            let sent = self.segment.signals(self.rank, peer, signal);
            log.add(signal, Action::Signal(sent.load(Ordering::SeqCst) + 1));
        }
        self.segment.signal(self.rank, peer, signal);
    }

    /// Returns the number of the last entry in the log of each rank's puts to this rank.
    pub(super) fn logged(&self) -> Vec<u64> {
        let log = |source| self.segment.puts(source, self.rank).last();
        (0..self.ranks()).map(log).collect()
    }

    /// Returns the puts for which this rank has not waited, and which are into `used` and `part` and later than the entries
    /// `before` in the logs; with their sources, each of them once. A context has so many `signals`.
    ///
    /// The operations of a source in one context arrive in their order, so a signal counts for all earlier puts of its context.
    pub(super) fn new_races(
        &self,
        used: &Span,
        part: &Span,
        before: &[u64],
        signals: usize,
    ) -> Vec<(usize, Span)> {
        let mut races = Vec::new();
        for (source, before) in before.iter().enumerate() {
            let log = self.segment.puts(source, self.rank);
            for put in log.entries().filter(|put| put.number > *before) {
                let Action::Put(span) = put.action else {
                    continue;
                };
                if !span.overlaps(used) || !span.overlaps(part) {
                    continue;
                }
                let was_taken = log.entries().any(|other| match other.action {
                    Action::Signal(count) => {
                        other.number > put.number
                            && other.signal / signals == put.signal / signals
                            && self.has_taken(source, other.signal) >= count
                    }
                    Action::Put(_) => false,
                });
                // If the put has left the log meanwhile, its signal may have as well.
                let is_kept = |number: u64| number + KEPT > log.last();
                if was_taken || !is_kept(put.number) {
                    continue;
                }
                let mut raced = self.raced.lock();
                raced.retain(|&(of, number)| of != source || is_kept(number));
                if raced.insert((source, put.number)) {
                    races.push((source, span));
                }
            }
        }
        races
    }

    fn has_taken(&self, source: usize, signal: usize) -> u64 {
        let taken = self.taken.lock();
        taken.get(&(source, signal)).copied().unwrap_or(0)
    }

    /// Notes that this rank's waits for signals may be incomplete from now on.
    pub(crate) fn lose_waits(&self) {
        self.has_lost_waits.store(true, Ordering::Release);
    }

    /// Whether a wait for signals was ended by an abort, or none is possible any more.
    pub(super) fn has_lost_waits(&self) -> bool {
        self.has_lost_waits.load(Ordering::Acquire)
    }

    /// Notes that this rank has given up operations.
    pub(crate) fn give_up(&self) {
        self.has_given_up.store(true, Ordering::Release);
    }

    /// Whether this rank has given up operations, so that none can begin any more: the peers count differently.
    pub(crate) fn has_given_up(&self) -> bool {
        self.has_given_up.load(Ordering::Acquire)
    }

    /// Reaches the next barrier on the host, and returns its number. The last rank rings.
    pub(super) fn reach_barrier(&self) -> u64 {
        let number = self.barriers.fetch_add(1, Ordering::Relaxed) + 1;
        self.own().barriers.store(number, Ordering::SeqCst);
        let arrivals = &self.segment.header().barrier;
        if arrivals.fetch_add(1, Ordering::SeqCst) + 1 == number * self.ranks() as u64 {
            self.segment.ring_others(self.rank);
        }
        number
    }

    /// Whether a rank has reached this barrier.
    pub(super) fn has_reached_barrier(&self, rank: usize, number: u64) -> bool {
        self.segment.block(rank).barriers.load(Ordering::SeqCst) >= number
    }

    /// The memory of `rank`'s device.
    pub(crate) fn pool(&self, rank: usize) -> &Mapping {
        &self.pools[rank]
    }

    /// The memory of `rank`'s device, to be kept.
    pub(super) fn shared_pool(&self, rank: usize) -> &Arc<Mapping> {
        &self.pools[rank]
    }

    /// Returns the identity of `rank`.
    pub(crate) fn info(&self, rank: usize) -> &RankInfo {
        &self.infos[rank]
    }

    /// Returns the identities of all ranks, in order.
    pub(crate) fn infos(&self) -> &[RankInfo] {
        &self.infos
    }

    /// Returns whether a rank, as of now, never takes part in an operation again: it has aborted or freed its communicator,
    /// or its process has ended.
    pub(crate) fn is_lost(&self) -> impl Fn(usize) -> bool {
        let now = milliseconds();
        move |rank| self.has_left(rank) || self.has_died(rank, now)
    }

    /// Whether a rank has aborted or freed its communicator.
    pub(crate) fn has_left(&self, rank: usize) -> bool {
        let teardown = &self.segment.block(rank).teardown;
        teardown.load(Ordering::SeqCst) & GONE != 0
    }

    /// Whether the process of a rank has ended, as seen at a look every [`LIFE_SIGN`].
    fn has_died(&self, rank: usize, now: u64) -> bool {
        if self.is_local(rank) {
            return false;
        }
        let look = &self.looks[rank];
        match look.load(Ordering::Relaxed) {
            DEAD => true,
            next if now < next => false,
            _ => {
                let is_dead = identity::is_gone(&self.infos[rank]);
                // Different times for the ranks, so that one operation does not look at all of them.
                let soon = now + LIFE_SIGN + rank as u64 % LIFE_SIGN;
                let next = if is_dead { DEAD } else { soon };
                look.store(next, Ordering::Relaxed);
                is_dead
            }
        }
    }

    /// Whether `rank` runs in this process.
    pub(crate) fn is_local(&self, rank: usize) -> bool {
        self.infos[rank].process == self.infos[self.rank].process
    }
}

/// Returns a coarse time since boot. Reading it is nearly free.
fn milliseconds() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is ours to write to.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &mut time) };
    time.tv_sec as u64 * 1000 + time.tv_nsec as u64 / 1_000_000
}
