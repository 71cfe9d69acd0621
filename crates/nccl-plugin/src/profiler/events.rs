//! Events that NCCL has reported: rings that are never freed, and whose handles name a place and the turn in which it
//! was assigned.
//!
//! NCCL calls on its own threads, with handles that may be old: after an abort, from a thread that lags, at the exit of
//! the process. So a handle is a number, and a handle is ignored when its place has been reused. Nothing here locks or
//! allocates.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicI32, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

use super::abi::SEND_WAIT;

/// The number of operations, transfers and communicators that are kept.
pub(super) const OPERATIONS: usize = 8192;
pub(super) const TRANSFERS: usize = 8192;
pub(super) const COMMUNICATORS: usize = 1024;

/// Steps of a transfer that may be under way at once: `NCCL_STEPS`.
pub(super) const STEPS: usize = 8;

/// What a handle stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Communicator = 1,
    Operation = 2,
    Transfer = 3,
    /// `part` is the step's place in its transfer.
    Step = 4,
    /// `part` is the channel.
    Kernel = 5,
    /// Operations that are launched together; no data is kept for it.
    Group = 6,
}

/// A handle that NCCL keeps: the kind of the event, a part of it, and the turn of its place, from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Handle {
    pub(super) kind: Kind,
    pub(super) part: u8,
    pub(super) turn: u64,
}

const TURN_BITS: u32 = 48;

impl Handle {
    pub(super) fn of(kind: Kind, turn: u64) -> Self {
        Self {
            kind,
            part: 0,
            turn,
        }
    }

    pub(super) fn to_pointer(self) -> *mut c_void {
        let value =
            (self.kind as u64) << 60 | u64::from(self.part) << TURN_BITS | self.turn & TURN_MASK;
        std::ptr::without_provenance_mut(value as usize)
    }

    pub(super) fn from_pointer(pointer: *mut c_void) -> Option<Self> {
        let value = pointer.addr() as u64;
        let kind = match value >> 60 {
            1 => Kind::Communicator,
            2 => Kind::Operation,
            3 => Kind::Transfer,
            4 => Kind::Step,
            5 => Kind::Kernel,
            6 => Kind::Group,
            _ => return None,
        };
        Some(Self {
            kind,
            part: (value >> TURN_BITS & 0xff) as u8,
            turn: value & TURN_MASK,
        })
    }
}

const TURN_MASK: u64 = (1 << TURN_BITS) - 1;

/// A place in a ring.
pub(super) trait Slot {
    /// The turn in which the place was assigned; 0 for never, or [`FILLING`].
    fn turn(&self) -> &AtomicU64;
}

/// Instead of a turn, while a thread fills the place.
const FILLING: u64 = u64::MAX;

pub(super) struct Ring<S, const N: usize> {
    next: AtomicU64,
    slots: [S; N],
}

impl<S: Slot, const N: usize> Ring<S, N> {
    pub(super) const fn new(slots: [S; N]) -> Self {
        Self {
            next: AtomicU64::new(0),
            slots,
        }
    }

    /// Assigns the next place, lets `fill` write it, and returns its turn; `None` if other threads are still filling
    /// the places tried.
    pub(super) fn push(&self, fill: impl FnOnce(&S)) -> Option<u64> {
        self.push_beside(|_| false, fill)
    }

    /// As [`push`](Self::push), but passes over places that are in use, unless all are.
    pub(super) fn push_beside(
        &self,
        is_in_use: impl Fn(&S) -> bool,
        fill: impl FnOnce(&S),
    ) -> Option<u64> {
        const ATTEMPTS: usize = 8;
        let mut passed = 0;
        let mut attempts = 0;
        while attempts < ATTEMPTS {
            let turn = self.next.fetch_add(1, Ordering::Relaxed) + 1;
            let slot = &self.slots[(turn % N as u64) as usize];
            // Acquires what was written in that turn, so that `is_in_use` looks at no earlier one.
            let before = slot.turn().load(Ordering::Acquire);
            if before != 0 && before != FILLING && passed < N && is_in_use(slot) {
                passed += 1;
                continue;
            }
            attempts += 1;
            // A thread may be stopped while it fills a place, until the others have gone round the ring and reach that
            // place.
            let is_claimed = before != FILLING
                && slot
                    .turn()
                    .compare_exchange(before, FILLING, Ordering::Relaxed, Ordering::Relaxed)
                    .is_ok();
            if is_claimed {
                fence(Ordering::Release);
                fill(slot);
                slot.turn().store(turn, Ordering::Release);
                return Some(turn);
            }
        }
        None
    }

    /// Returns the place that was assigned in this turn, unless it has been reused.
    pub(super) fn get(&self, turn: u64) -> Option<&S> {
        let slot = &self.slots[(turn % N as u64) as usize];
        (turn != 0 && slot.turn().load(Ordering::Acquire) == turn).then_some(slot)
    }

    /// Returns whether places have been reused.
    pub(super) fn has_wrapped(&self) -> bool {
        self.next.load(Ordering::Relaxed) >= N as u64
    }

    /// Reads all places, oldest turn first; `read` returns `None` for unwanted ones.
    pub(super) fn read_all<T>(&self, read: impl Fn(&S) -> Option<T>) -> Vec<(u64, T)> {
        let mut all: Vec<(u64, T)> = (self.slots.iter())
            .filter_map(|slot| {
                let turn = slot.turn().load(Ordering::Acquire);
                let is_filled = turn != 0 && turn != FILLING;
                let value = is_filled.then(|| read(slot)).flatten()?;
                // Checks that the place was not reused while it was read.
                fence(Ordering::Acquire);
                (slot.turn().load(Ordering::Relaxed) == turn).then_some((turn, value))
            })
            .collect();
        all.sort_by_key(|(turn, _)| *turn);
        all
    }
}

/// Lengths that stand for no name: a communicator without a name, and one whose name NCCL does not report.
pub(super) const NO_NAME: u32 = u32::MAX - 1;
pub(super) const UNKNOWN_NAME: u32 = u32::MAX;

/// Longest name of a communicator that is kept, in bytes.
pub(super) const NAME: usize = 256;

pub(super) struct Communicator {
    pub(super) turn: AtomicU64,
    /// NCCL's number of the communicator; 0 if NCCL reports none.
    pub(super) hash: AtomicU64,
    /// Bytes of its name, `name_length` of them, or [`NO_NAME`], or [`UNKNOWN_NAME`].
    pub(super) name: [AtomicU8; NAME],
    pub(super) name_length: AtomicU32,
    /// -1 if NCCL does not report it.
    pub(super) rank: AtomicI32,
    pub(super) world_size: AtomicI32,
    /// The mask when it was made.
    pub(super) mask: AtomicU64,
    /// 1 once it has ended.
    pub(super) is_over: AtomicU8,
}

impl Communicator {
    const fn new() -> Self {
        Self {
            turn: AtomicU64::new(0),
            hash: AtomicU64::new(0),
            name: [const { AtomicU8::new(0) }; NAME],
            name_length: AtomicU32::new(0),
            rank: AtomicI32::new(0),
            world_size: AtomicI32::new(0),
            mask: AtomicU64::new(0),
            is_over: AtomicU8::new(0),
        }
    }
}

/// A collective operation, a send or a receive.
pub(super) struct Operation {
    pub(super) turn: AtomicU64,
    pub(super) communicator: AtomicU64,
    /// When it was enqueued, on the monotonic clock.
    pub(super) since_ns: AtomicU64,
    pub(super) count: AtomicU64,
    /// Root of a collective operation, peer of a message.
    pub(super) peer: AtomicI32,
    /// Indices into the tables of names.
    pub(super) function: AtomicU8,
    pub(super) algorithm: AtomicU8,
    pub(super) protocol: AtomicU8,
    pub(super) channels: AtomicU8,
    /// The mask at that time, and since when it was in effect.
    pub(super) mask: AtomicU64,
    pub(super) mask_since_ns: AtomicU64,
    /// Number of its transfers.
    pub(super) transfers: AtomicU32,
    /// A bit for each channel whose kernel has started, and ended.
    pub(super) started: AtomicU64,
    pub(super) ended: AtomicU64,
    /// First start and last end of its kernel, on the GPU's clock; 0 for none.
    pub(super) kernel_begin_ns: AtomicU64,
    pub(super) kernel_end_ns: AtomicU64,
    /// Bytes of an element; 0 where that is not known.
    pub(super) element_size: AtomicU8,
    /// Whether it was counted as finished.
    pub(super) is_counted: AtomicU8,
}

impl Operation {
    const fn new() -> Self {
        Self {
            turn: AtomicU64::new(0),
            communicator: AtomicU64::new(0),
            since_ns: AtomicU64::new(0),
            count: AtomicU64::new(0),
            peer: AtomicI32::new(0),
            function: AtomicU8::new(0),
            algorithm: AtomicU8::new(0),
            protocol: AtomicU8::new(0),
            channels: AtomicU8::new(0),
            mask: AtomicU64::new(0),
            mask_since_ns: AtomicU64::new(0),
            transfers: AtomicU32::new(0),
            started: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            kernel_begin_ns: AtomicU64::new(0),
            kernel_end_ns: AtomicU64::new(0),
            element_size: AtomicU8::new(0),
            is_counted: AtomicU8::new(0),
        }
    }
}

/// What the proxy thread does for one operation, on one channel, with one peer.
pub(super) struct Transfer {
    pub(super) turn: AtomicU64,
    pub(super) operation: AtomicU64,
    pub(super) peer: AtomicI32,
    pub(super) steps: AtomicI32,
    pub(super) channel: AtomicU8,
    pub(super) is_send: AtomicU8,
    pub(super) is_over: AtomicU8,
    /// Whether a step of it was reported.
    pub(super) has_steps: AtomicU8,
    /// Whether the wait for the peer's credit has its own state in this version.
    pub(super) has_credit_state: AtomicU8,
    pub(super) done: AtomicU32,
    /// When it began, and when a step ended last, on the monotonic clock.
    pub(super) since_ns: AtomicU64,
    pub(super) moved_ns: AtomicU64,
    /// Steps in progress: number + 1, with the state in the low byte; 0 for none. And when each entered its state.
    pub(super) under_way: [AtomicU64; STEPS],
    pub(super) state_since_ns: [AtomicU64; STEPS],
    /// Number of steps handed to the network and not yet taken, since when there are any, and for how long there were
    /// any before.
    pub(super) in_network: AtomicU32,
    pub(super) in_network_since_ns: AtomicU64,
    pub(super) in_network_ns: AtomicU64,
}

impl Transfer {
    const fn new() -> Self {
        Self {
            turn: AtomicU64::new(0),
            operation: AtomicU64::new(0),
            peer: AtomicI32::new(0),
            steps: AtomicI32::new(0),
            channel: AtomicU8::new(0),
            is_send: AtomicU8::new(0),
            is_over: AtomicU8::new(0),
            has_steps: AtomicU8::new(0),
            has_credit_state: AtomicU8::new(0),
            done: AtomicU32::new(0),
            since_ns: AtomicU64::new(0),
            moved_ns: AtomicU64::new(0),
            under_way: [const { AtomicU64::new(0) }; STEPS],
            state_since_ns: [const { AtomicU64::new(0) }; STEPS],
            in_network: AtomicU32::new(0),
            in_network_since_ns: AtomicU64::new(0),
            in_network_ns: AtomicU64::new(0),
        }
    }
}

impl Transfer {
    /// Records that a step changes from state `from` to state `to`. NCCL makes all calls for one transfer on one
    /// thread.
    pub(super) fn change_state(&self, from: u8, to: u8, now: u64) {
        let is_network = |state: u8| c_int::from(state) == SEND_WAIT;
        let steps = self.in_network.load(Ordering::Relaxed);
        match (is_network(from), is_network(to)) {
            (false, true) => {
                if steps == 0 {
                    self.in_network_since_ns.store(now, Ordering::Relaxed);
                }
                self.in_network.store(steps + 1, Ordering::Relaxed);
            }
            (true, false) => {
                if steps == 1 {
                    let since = self.in_network_since_ns.load(Ordering::Relaxed);
                    let before = self.in_network_ns.load(Ordering::Relaxed);
                    let total = before + now.saturating_sub(since);
                    self.in_network_ns.store(total, Ordering::Relaxed);
                }
                self.in_network
                    .store(steps.saturating_sub(1), Ordering::Relaxed);
            }
            _ => {}
        }
    }

    /// Returns for how long the network has had steps of this transfer.
    pub(super) fn network_ns(&self, now: u64) -> u64 {
        let before = self.in_network_ns.load(Ordering::Relaxed);
        match self.in_network.load(Ordering::Relaxed) {
            0 => before,
            _ => before + now.saturating_sub(self.in_network_since_ns.load(Ordering::Relaxed)),
        }
    }
}

macro_rules! slots {
    ($($slot:ty),*) => {
        $(impl Slot for $slot {
            fn turn(&self) -> &AtomicU64 {
                &self.turn
            }
        })*
    };
}
slots!(Communicator, Operation, Transfer);

pub(super) static ALL_COMMUNICATORS: Ring<Communicator, COMMUNICATORS> =
    Ring::new([const { Communicator::new() }; COMMUNICATORS]);
pub(super) static ALL_OPERATIONS: Ring<Operation, OPERATIONS> =
    Ring::new([const { Operation::new() }; OPERATIONS]);
pub(super) static ALL_TRANSFERS: Ring<Transfer, TRANSFERS> =
    Ring::new([const { Transfer::new() }; TRANSFERS]);

/// Returns the time of the monotonic clock, as `std::time::Instant` uses it.
#[must_use]
pub fn monotonic_ns() -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: writes one value of this type.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_communicator_in_use_keeps_its_place_while_others_come_and_go() {
        let ring: Ring<Communicator, 8> = Ring::new([const { Communicator::new() }; 8]);
        let make = |is_over: u8| {
            let is_in_use = |slot: &Communicator| slot.is_over.load(Ordering::Relaxed) == 0;
            let fill = |slot: &Communicator| slot.is_over.store(is_over, Ordering::Relaxed);
            ring.push_beside(is_in_use, fill).unwrap()
        };
        let first = make(0);
        for _ in 0..100 {
            make(1);
        }
        assert!(ring.get(first).is_some());
        let last: Vec<u64> = (0..7).map(|_| make(0)).collect();
        assert!(
            last.iter()
                .chain([&first])
                .all(|turn| ring.get(*turn).is_some())
        );
        // All are in use: an old one goes.
        let more = make(0);
        assert!(ring.get(more).is_some());
        let all = last.iter().chain([&first]);
        assert_eq!(all.filter(|turn| ring.get(**turn).is_none()).count(), 1);
    }
}
