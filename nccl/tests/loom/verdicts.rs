//! The verdict on a communicator: a fault that comes before the communicator, while it is made, while it is dropped; two
//! faults at once, and a death beside one.
//!
//! What the threads of `supervision/{board,watch}.rs` do around the docket is repeated here: the watch begins the
//! abort of a struck communicator, if that is set, and a board that has found its verdict begins it itself.

use std::sync::Arc as Plain;

use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use loom::thread;

use crate::docket::{Docket, Heard, Verdict, Who};
use crate::state::Phase;

const KEY: &str = "key";
const DEATH: u32 = 100;

/// One rank's side of a communicator, and what it heard.
struct Rank {
    docket: Docket<u32, (), &'static str>,
    verdict: Plain<Verdict<u32>>,
    /// What is to be ended, once it is set.
    phase: Phase,
    is_set: AtomicBool,
    /// How often the watch struck it.
    struck: AtomicUsize,
    /// How often an abort began.
    begun: AtomicUsize,
    /// `Board::conclusion`: whether its end has been reported, or will not be reported again.
    concluded: AtomicBool,
    /// How often its end was reported to the other ranks, which hear the first report only.
    said: AtomicUsize,
}

impl Rank {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            docket: Docket::new(),
            verdict: Plain::default(),
            phase: Phase::new(),
            is_set: AtomicBool::new(false),
            struck: AtomicUsize::new(0),
            begun: AtomicUsize::new(0),
            concluded: AtomicBool::new(false),
            said: AtomicUsize::new(0),
        })
    }

    /// `Board::new`.
    fn register(&self) {
        let (members, name) = ([0, 1].into(), Plain::from("name"));
        let who = Who {
            members: &members,
            name: &name,
        };
        let death = |_: usize, _: &&str| Some(DEATH);
        let key = Plain::from(KEY);
        if self.docket.register(&key, &who, &self.verdict, (), death) {
            self.concluded.store(true, Ordering::SeqCst);
        }
    }

    /// `Board::conclude`.
    fn conclude(&self) {
        if !self.concluded.swap(true, Ordering::SeqCst) {
            self.said.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// `Inner::come_under_protection`.
    fn protect(&self) {
        // Relaxed: the docket orders it.
        let set = || self.is_set.store(true, Ordering::Relaxed);
        if self.docket.protect(&self.verdict, set).is_some() {
            self.begin();
        }
    }

    fn begin(&self) {
        if self.phase.begin_abort("struck") {
            self.begun.fetch_add(1, Ordering::SeqCst);
            self.conclude();
        }
    }

    /// `Watch::respond`.
    fn respond(&self) {
        self.struck.fetch_add(1, Ordering::SeqCst);
        if self.is_set.load(Ordering::Relaxed) {
            self.begin();
        }
    }

    /// `Watch::strike`.
    fn strike(&self, fault: u32) {
        match self.docket.strike(KEY, fault) {
            Heard::Struck(_) => self.respond(),
            Heard::Late => {}
            // There is nothing to end here.
            Heard::Kept => drop(self.said.fetch_add(1, Ordering::SeqCst)),
        }
    }

    /// `Watch::bury`.
    fn bury(&self) {
        for _ in self.docket.bury(1, "died", |_| Some(DEATH)) {
            self.respond();
        }
    }

    /// `Board::drop`.
    fn forget(&self) {
        if self.docket.forget(KEY) {
            self.conclude();
        }
    }

    fn begun(&self) -> usize {
        self.begun.load(Ordering::SeqCst)
    }

    fn said(&self) -> usize {
        self.said.load(Ordering::SeqCst)
    }
}

fn on_a_thread(rank: &Arc<Rank>, act: impl FnOnce(&Rank) + 'static) -> thread::JoinHandle<()> {
    let rank = Arc::clone(rank);
    thread::spawn(move || act(&rank))
}

#[test]
fn a_fault_ends_a_communicator_that_is_being_made_once_whenever_it_comes() {
    loom::model(|| {
        let rank = Rank::new();
        let hearing = on_a_thread(&rank, |rank| rank.strike(1));
        rank.register();
        rank.protect();
        hearing.join().unwrap();
        assert_eq!(rank.verdict.get(), Some(&1));
        assert_eq!(rank.begun(), 1);
        assert_eq!(rank.said(), 1);
    });
}

#[test]
fn a_death_ends_a_communicator_that_is_being_made_once_whenever_it_comes() {
    loom::model(|| {
        let rank = Rank::new();
        let hearing = on_a_thread(&rank, Rank::bury);
        rank.register();
        rank.protect();
        hearing.join().unwrap();
        assert_eq!(rank.verdict.get(), Some(&DEATH));
        assert_eq!(rank.begun(), 1);
        assert_eq!(rank.said(), 1);
    });
}

#[test]
fn of_what_is_heard_one_after_the_other_the_first_is_the_verdict() {
    loom::model(|| {
        let rank = Rank::new();
        // In the order in which all ranks hear.
        let hearing = on_a_thread(&rank, |rank| {
            rank.strike(1);
            rank.bury();
            rank.strike(2);
        });
        rank.register();
        rank.protect();
        hearing.join().unwrap();
        assert_eq!(rank.verdict.get(), Some(&1));
        assert_eq!(rank.begun(), 1);
        assert_eq!(rank.said(), 1);
    });
}

#[test]
fn a_verdict_that_was_seen_stays() {
    loom::model(|| {
        let rank = Rank::new();
        rank.register();
        let first = on_a_thread(&rank, |rank| rank.strike(1));
        let second = on_a_thread(&rank, |rank| rank.strike(2));
        rank.protect();
        let seen = rank.verdict.get().copied();
        first.join().unwrap();
        second.join().unwrap();
        let verdict = rank.verdict.get().copied();
        assert!(verdict.is_some());
        assert!(seen.is_none() || seen == verdict);
        assert_eq!(rank.struck.load(Ordering::SeqCst), 1);
        assert_eq!(rank.begun(), 1);
    });
}

/// A rank that hears of the end a second time waits for the others in vain: they do not report again.
#[test]
fn an_end_is_said_once_of_what_is_made_and_dropped_beside_a_fault() {
    loom::model(|| {
        let rank = Rank::new();
        let hearing = on_a_thread(&rank, |rank| rank.strike(1));
        rank.register();
        rank.protect();
        rank.forget();
        hearing.join().unwrap();
        assert_eq!(rank.said(), 1);
    });
}

#[test]
fn of_a_communicator_that_is_dropped_beside_a_fault_one_says_that_it_has_ended() {
    loom::model(|| {
        let rank = Rank::new();
        rank.register();
        let hearing = on_a_thread(&rank, |rank| rank.strike(1));
        rank.forget();
        hearing.join().unwrap();
        assert_eq!(rank.said(), 1);
    });
}
