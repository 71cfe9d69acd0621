//! The fault decided for a communicator: a fault that arrives before the communicator, while it is made, or while it is
//! dropped; two faults at once; and a death at the same time as a fault.
//!
//! These tests repeat what the threads of `supervision/{supervisor,fault_listener}.rs` do around the fault registry:
//! the fault listener begins the abort of a failed communicator, if its target is set, and a supervisor that has found
//! its decided fault begins the abort itself.

use std::sync::Arc as Plain;

use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use loom::thread;

use crate::fault_registry::{CommunicatorRef, FaultCell, FaultOutcome, FaultRegistry};
use crate::state::Lifecycle;

const KEY: &str = "key";
const DEATH: u32 = 100;

/// One rank's side of a communicator, and what it heard.
struct Rank {
    fault_registry: FaultRegistry<u32, (), &'static str>,
    decided: Plain<FaultCell<u32>>,
    /// What is to be ended, once it is set.
    lifecycle: Lifecycle,
    is_set: AtomicBool,
    /// How often the fault listener failed it.
    failed: AtomicUsize,
    /// How often an abort began.
    begun: AtomicUsize,
    /// `ControlPlaneSupervisor::unconfirmed_text`: whether its end has been reported, or will not be reported again.
    has_reported: AtomicBool,
    /// How often its end was reported to the other ranks, which use only the first report.
    said: AtomicUsize,
}

impl Rank {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            fault_registry: FaultRegistry::new(),
            decided: Plain::default(),
            lifecycle: Lifecycle::new(),
            is_set: AtomicBool::new(false),
            failed: AtomicUsize::new(0),
            begun: AtomicUsize::new(0),
            has_reported: AtomicBool::new(false),
            said: AtomicUsize::new(0),
        })
    }

    /// `ControlPlaneSupervisor::new`.
    fn register(&self) {
        let (members, name) = ([0, 1].into(), Plain::from("name"));
        let communicator = CommunicatorRef {
            members: &members,
            name: &name,
        };
        let departure_fault = |_: usize, _: &&str| Some(DEATH);
        let key = Plain::from(KEY);
        if self
            .fault_registry
            .register(&key, &communicator, &self.decided, (), departure_fault)
        {
            self.has_reported.store(true, Ordering::SeqCst);
        }
    }

    /// `Supervisor::report_abort_returned`.
    fn report_abort_returned(&self) {
        if !self.has_reported.swap(true, Ordering::SeqCst) {
            self.said.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// `Inner::register`.
    fn attach(&self) {
        // Relaxed: the fault registry orders it.
        let set = || self.is_set.store(true, Ordering::Relaxed);
        if self.fault_registry.attach(&self.decided, set).is_some() {
            self.begin();
        }
    }

    fn begin(&self) {
        if self.lifecycle.begin_abort("failed") {
            self.begun.fetch_add(1, Ordering::SeqCst);
            self.report_abort_returned();
        }
    }

    /// `CommunicatorFaultListener::end_in_background`.
    fn end_in_background(&self) {
        self.failed.fetch_add(1, Ordering::SeqCst);
        if self.is_set.load(Ordering::Relaxed) {
            self.begin();
        }
    }

    /// `CommunicatorFaultListener::fail`.
    fn fail(&self, fault: u32) {
        match self.fault_registry.fail(KEY, fault) {
            FaultOutcome::Failed(_) => self.end_in_background(),
            FaultOutcome::AlreadyFailed => {}
            // There is nothing to end here.
            FaultOutcome::Deferred => drop(self.said.fetch_add(1, Ordering::SeqCst)),
        }
    }

    /// `CommunicatorFaultListener::mark_departed`.
    fn mark_departed(&self) {
        for _ in self
            .fault_registry
            .mark_departed(1, "died", |_| Some(DEATH))
        {
            self.end_in_background();
        }
    }

    /// `ControlPlaneSupervisor::drop`.
    fn forget(&self) {
        if self.fault_registry.forget(KEY) {
            self.report_abort_returned();
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
        let hearing = on_a_thread(&rank, |rank| rank.fail(1));
        rank.register();
        rank.attach();
        hearing.join().unwrap();
        assert_eq!(rank.decided.get(), Some(&1));
        assert_eq!(rank.begun(), 1);
        assert_eq!(rank.said(), 1);
    });
}

#[test]
fn a_death_ends_a_communicator_that_is_being_made_once_whenever_it_comes() {
    loom::model(|| {
        let rank = Rank::new();
        let hearing = on_a_thread(&rank, Rank::mark_departed);
        rank.register();
        rank.attach();
        hearing.join().unwrap();
        assert_eq!(rank.decided.get(), Some(&DEATH));
        assert_eq!(rank.begun(), 1);
        assert_eq!(rank.said(), 1);
    });
}

#[test]
fn of_what_is_heard_one_after_the_other_the_first_is_the_verdict() {
    loom::model(|| {
        let rank = Rank::new();
        // The notices, in the order in which all ranks receive them.
        let hearing = on_a_thread(&rank, |rank| {
            rank.fail(1);
            rank.mark_departed();
            rank.fail(2);
        });
        rank.register();
        rank.attach();
        hearing.join().unwrap();
        assert_eq!(rank.decided.get(), Some(&1));
        assert_eq!(rank.begun(), 1);
        assert_eq!(rank.said(), 1);
    });
}

#[test]
fn a_verdict_that_was_seen_stays() {
    loom::model(|| {
        let rank = Rank::new();
        rank.register();
        let first = on_a_thread(&rank, |rank| rank.fail(1));
        let second = on_a_thread(&rank, |rank| rank.fail(2));
        rank.attach();
        let seen = rank.decided.get().copied();
        first.join().unwrap();
        second.join().unwrap();
        let decided = rank.decided.get().copied();
        assert!(decided.is_some());
        assert!(seen.is_none() || seen == decided);
        assert_eq!(rank.failed.load(Ordering::SeqCst), 1);
        assert_eq!(rank.begun(), 1);
    });
}

/// A rank that receives the end a second time waits for the others in vain: they do not report again.
#[test]
fn an_end_is_said_once_of_what_is_made_and_dropped_beside_a_fault() {
    loom::model(|| {
        let rank = Rank::new();
        let hearing = on_a_thread(&rank, |rank| rank.fail(1));
        rank.register();
        rank.attach();
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
        let hearing = on_a_thread(&rank, |rank| rank.fail(1));
        rank.forget();
        hearing.join().unwrap();
        assert_eq!(rank.said(), 1);
    });
}
