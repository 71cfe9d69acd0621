//! Every interleaving of the exchange, over loom's memory, in which a store becomes visible late unless something
//! orders it.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p lsa-protocol --test loom --release
//! ```
//!
//! loom tracks each slot: a test fails where a rank writes a slot that another may still read. The planted mistakes
//! show that such a write is detected.
#![cfg(loom)]

use std::convert::Infallible;
use std::task::Poll;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use lsa_protocol::{Exchange, Machine, Outcome};

/// What a test breaks on purpose.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mistake {
    None,
    /// Slots exist once.
    OneBuffer,
    /// A flag is set without ordering what was written before it.
    RelaxedSet,
    /// A flag is seen without ordering what is read after it.
    RelaxedLook,
    /// A flag is set before the block is copied.
    FlagFirst,
    /// A flag is set before the size beside it.
    SizeLast,
    /// A rank goes on after an exchange that failed.
    GoesOn,
}

/// The window of one rank, for one word in each slot.
struct Window {
    flags: Vec<AtomicU32>,
    slots: Vec<UnsafeCell<u32>>,
    /// Beside the flags, the sizes of the blocks.
    sizes: Vec<UnsafeCell<u64>>,
    failed: AtomicU32,
}

struct World {
    ranks: u32,
    mistake: Mistake,
    windows: Vec<Window>,
    /// The rank whose blocks are larger than those of the others.
    larger: Option<u32>,
    /// Steps after which an exchange gives up.
    patience: u32,
    /// The host's flag, in a test that has one: each check of it is one more point where threads can switch.
    aborted: Option<AtomicBool>,
}

impl World {
    fn new(ranks: u32, mistake: Mistake) -> Self {
        let window = |_| Window {
            flags: (0..2 * ranks).map(|_| AtomicU32::new(0)).collect(),
            slots: (0..2 * ranks).map(|_| UnsafeCell::new(0)).collect(),
            sizes: (0..2 * ranks).map(|_| UnsafeCell::new(0)).collect(),
            failed: AtomicU32::new(0),
        };
        Self {
            ranks,
            mistake,
            windows: (0..ranks).map(window).collect(),
            larger: None,
            patience: u32::MAX,
            aborted: None,
        }
    }
}

/// What a rank sends to another one in an epoch.
fn block(from: u32, to: u32, epoch: u32) -> u32 {
    epoch * 100 + from * 10 + to
}

/// One rank in one epoch.
struct Rank<'a> {
    world: &'a World,
    rank: u32,
    epoch: u32,
    steps: u32,
    received: Vec<u32>,
}

impl Rank<'_> {
    fn flag(&self, window: u32, source: u32) -> &AtomicU32 {
        let index = self.epoch % 2 * self.world.ranks + source;
        &self.world.windows[window as usize].flags[index as usize]
    }

    fn slot(&self, window: u32, source: u32) -> &UnsafeCell<u32> {
        let buffer = match self.world.mistake {
            Mistake::OneBuffer => 0,
            _ => self.epoch % 2,
        };
        let index = buffer * self.world.ranks + source;
        &self.world.windows[window as usize].slots[index as usize]
    }

    fn size(&self, window: u32, source: u32) -> &UnsafeCell<u64> {
        let index = self.epoch % 2 * self.world.ranks + source;
        &self.world.windows[window as usize].sizes[index as usize]
    }

    /// The size of this rank's blocks.
    fn bytes(&self) -> u64 {
        4 + u64::from(self.world.larger == Some(self.rank))
    }

    fn tell_size(&self, peer: u32) {
        let bytes = self.bytes();
        self.size(peer, self.rank).with_mut(|size| {
            // SAFETY: loom fails here if another thread may use the size; none has a reference to it.
            unsafe { *size = bytes }
        });
    }

    fn copy(&self, peer: u32) {
        let value = block(self.rank, peer, self.epoch);
        self.slot(peer, self.rank).with_mut(|slot| {
            // SAFETY: loom fails here if another thread may use the slot; none has a reference to the word.
            unsafe { *slot = value }
        });
    }
}

impl Machine for Rank<'_> {
    type Error = Infallible;

    fn keep(&mut self) -> Result<(), Infallible> {
        self.received[self.rank as usize] = block(self.rank, self.rank, self.epoch);
        Ok(())
    }

    fn push(&mut self, peer: u32) -> Result<(), Infallible> {
        if self.world.mistake != Mistake::FlagFirst {
            self.copy(peer);
        }
        Ok(())
    }

    fn release(&mut self, peer: u32) -> Result<(), Infallible> {
        let order = match self.world.mistake {
            Mistake::RelaxedSet => Ordering::Relaxed,
            _ => Ordering::Release,
        };
        if self.world.mistake != Mistake::SizeLast {
            self.tell_size(peer);
        }
        self.flag(peer, self.rank).store(self.epoch, order);
        if self.world.mistake == Mistake::SizeLast {
            self.tell_size(peer);
        }
        if self.world.mistake == Mistake::FlagFirst {
            self.copy(peer);
        }
        Ok(())
    }

    fn acquire(&mut self, source: u32) -> Result<bool, Infallible> {
        let order = match self.world.mistake {
            Mistake::RelaxedLook => Ordering::Relaxed,
            _ => Ordering::Acquire,
        };
        let flag = self.flag(self.rank, source).load(order);
        assert!(
            flag <= self.epoch || self.world.mistake == Mistake::GoesOn,
            "a flag of a later epoch"
        );
        Ok(flag == self.epoch)
    }

    fn is_as_large(&mut self, source: u32) -> Result<bool, Infallible> {
        let size = self.size(self.rank, source);
        // SAFETY: loom fails here if another thread may write the size.
        Ok(size.with(|size| unsafe { *size }) == self.bytes())
    }

    fn take(&mut self, source: u32) -> Result<(), Infallible> {
        let slot = self.slot(self.rank, source);
        // SAFETY: loom fails here if another thread may write the slot.
        self.received[source as usize] = slot.with(|slot| unsafe { *slot });
        Ok(())
    }

    fn is_aborted(&mut self) -> Result<bool, Infallible> {
        let flag = self.world.aborted.as_ref();
        Ok(flag.is_some_and(|flag| flag.load(Ordering::Relaxed)))
    }

    fn failed(&mut self) -> Result<Option<Outcome>, Infallible> {
        // One thread runs one exchange after another, like launches on one stream.
        let own = &self.world.windows[self.rank as usize];
        let outcome = Outcome::from_status(own.failed.load(Ordering::Relaxed));
        let is_known = outcome != Outcome::Done && self.world.mistake != Mistake::GoesOn;
        Ok(is_known.then_some(outcome))
    }

    fn fail(&mut self, outcome: Outcome) -> Result<(), Infallible> {
        let own = &self.world.windows[self.rank as usize];
        own.failed.store(outcome.status(), Ordering::Relaxed);
        Ok(())
    }

    fn is_overdue(&mut self) -> bool {
        self.steps += 1;
        self.steps >= self.world.patience
    }
}

/// One exchange of one rank, to its end.
fn exchange(world: &World, rank: u32, epoch: u32) -> (Outcome, Vec<u32>) {
    let mut machine = Rank {
        world,
        rank,
        epoch,
        steps: 0,
        received: vec![0; world.ranks as usize],
    };
    let mut exchange = Exchange::new(rank, world.ranks);
    loop {
        let Ok(polled) = exchange.step(&mut machine);
        match polled {
            Poll::Ready(outcome) => return (outcome, machine.received),
            Poll::Pending => loom::thread::yield_now(),
        }
    }
}

/// Runs the epochs of one rank; returns whether all were completed.
fn all_epochs(world: &World, rank: u32, epochs: u32) -> bool {
    for epoch in 1..=epochs {
        let (outcome, received) = exchange(world, rank, epoch);
        if matches!(outcome, Outcome::Missing(_)) {
            return false;
        }
        assert_eq!(outcome, Outcome::Done);
        let expected: Vec<_> = (0..world.ranks)
            .map(|source| block(source, rank, epoch))
            .collect();
        assert_eq!(received, expected, "rank {rank} in epoch {epoch}");
    }
    true
}

/// Runs the ranks of a world as threads, in all interleavings with up to `preemptions` switches. Returns in how many of them
/// all ranks completed all epochs.
fn check(
    preemptions: Option<usize>,
    epochs: u32,
    world: impl Fn() -> World + Sync + Send + 'static,
) -> u32 {
    let complete = std::sync::Arc::new(std::sync::atomic::AtomicU32::new(0));
    let count = std::sync::Arc::clone(&complete);
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.check(move || {
        let world = Arc::new(world());
        let others: Vec<_> = (1..world.ranks)
            .map(|rank| {
                let world = Arc::clone(&world);
                loom::thread::spawn(move || all_epochs(&world, rank, epochs))
            })
            .collect();
        let mut done = all_epochs(&world, 0, epochs);
        for other in others {
            done &= other.join().unwrap();
        }
        count.fetch_add(u32::from(done), std::sync::atomic::Ordering::Relaxed);
    });
    complete.load(std::sync::atomic::Ordering::Relaxed)
}

#[test]
fn two_ranks_exchange_three_times() {
    let complete = check(None, 3, || World::new(2, Mistake::None));
    println!("{complete} interleavings");
}

/// Of three waiting threads, two can take turns for ever. So each rank gives up after a few steps.
#[test]
fn three_ranks_exchange_twice_or_give_up() {
    let complete = check(Some(2), 2, || World {
        patience: 2,
        ..World::new(3, Mistake::None)
    });
    println!("{complete} interleavings in which none gives up");
    assert!(complete > 0);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn one_buffer_is_overwritten_before_it_is_read() {
    check(Some(3), 2, || World::new(2, Mistake::OneBuffer));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_flag_without_release_shows_a_block_that_is_not_there() {
    check(None, 1, || World::new(2, Mistake::RelaxedSet));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_flag_without_acquire_shows_a_block_that_is_not_there() {
    check(None, 1, || World::new(2, Mistake::RelaxedLook));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_flag_before_its_block_shows_a_block_that_is_not_there() {
    check(None, 1, || World::new(2, Mistake::FlagFirst));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_flag_before_its_size_shows_a_size_that_is_not_there() {
    check(None, 1, || World::new(2, Mistake::SizeLast));
}

#[test]
fn ranks_whose_blocks_differ_find_that_whoever_comes_first() {
    loom::model(|| {
        let world = Arc::new(World {
            larger: Some(1),
            ..World::new(2, Mistake::None)
        });
        let theirs = Arc::clone(&world);
        let other = loom::thread::spawn(move || exchange(&theirs, 1, 1));
        for (peer, (outcome, received)) in [(1, exchange(&world, 0, 1)), (0, other.join().unwrap())]
        {
            assert_eq!(outcome, Outcome::Differs(peer));
            assert_eq!(received[peer as usize], 0, "it is not taken");
        }
    });
}

#[test]
fn an_abort_ends_a_wait_for_a_rank_that_never_comes() {
    loom::model(|| {
        let world = Arc::new(World {
            aborted: Some(AtomicBool::new(false)),
            ..World::new(2, Mistake::None)
        });
        let host = loom::thread::spawn({
            let world = Arc::clone(&world);
            move || {
                let flag = world.aborted.as_ref().unwrap();
                flag.store(true, Ordering::Relaxed);
            }
        });
        assert_eq!(exchange(&world, 0, 1).0, Outcome::Aborted);
        host.join().unwrap();
    });
}

/// Three epochs, enqueued on the rank's stream before the first ends; the first may fail. What a rank received with
/// success must be right.
fn queued_epochs(world: &World, rank: u32) {
    for epoch in 1..=3 {
        let (outcome, received) = exchange(world, rank, epoch);
        if outcome == Outcome::Done {
            let other = 1 - rank;
            assert_eq!(received[other as usize], block(other, rank, epoch));
        }
    }
}

fn check_queued(mistake: Mistake) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let world = Arc::new(World {
            patience: 2,
            ..World::new(2, mistake)
        });
        let theirs = Arc::clone(&world);
        let other = loom::thread::spawn(move || queued_epochs(&theirs, 1));
        queued_epochs(&world, 0);
        other.join().unwrap();
    });
}

#[test]
fn exchanges_behind_one_that_failed_touch_nothing() {
    check_queued(Mistake::None);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn an_exchange_behind_one_that_failed_would_overwrite_its_blocks() {
    check_queued(Mistake::GoesOn);
}
