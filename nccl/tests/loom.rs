//! The ends of a communicator in every interleaving: abort, issue, finalize and drop, against each other.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p nccl --test loom --release
//! ```
//!
//! The state machine is the crate's own. Around it stands what `communicator/lifecycle.rs` and
//! `communicator/issue.rs` do with it, with a cell in place of NCCL's communicator: loom reports two
//! threads in it at once, and the cell reports a use after it was freed, and a second free.
#![cfg(loom)]

#[allow(dead_code)]
#[path = "../src/communicator/state.rs"]
mod state;

#[allow(dead_code)]
#[path = "../src/supervision/recorder/lane.rs"]
mod lane;

use std::time::Duration;

use lane::{Lane, Slot};
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use loom::sync::{Arc, Mutex};
use loom::thread;
use state::{Phase, State};

/// No wait of the model runs into it: loom has no time.
const LONG: Duration = Duration::from_secs(3600);

/// NCCL's communicator.
struct Native {
    freed: UnsafeCell<bool>,
    frees: AtomicUsize,
}

// SAFETY: the cell's accesses are what loom checks.
unsafe impl Sync for Native {}

impl Native {
    /// Any call on it.
    fn call(&self) {
        // SAFETY: loom fails if another thread is inside, and the reference does not leave.
        self.freed
            .with_mut(|freed| assert!(!unsafe { *freed }, "used after it was freed"));
    }

    fn free(&self) {
        // SAFETY: likewise.
        self.freed.with_mut(|freed| {
            assert!(
                !unsafe { std::mem::replace(&mut *freed, true) },
                "freed twice"
            )
        });
        self.frees.fetch_add(1, Ordering::SeqCst);
    }
}

struct Communicator {
    phase: Phase,
    /// Whether it has not been taken by whoever frees it.
    handle: Mutex<bool>,
    native: Arc<Native>,
    /// Whether a finalize comes to its end by itself.
    settles: bool,
}

impl Communicator {
    fn new(settles: bool) -> Arc<Self> {
        Arc::new(Self {
            phase: Phase::new(),
            handle: Mutex::new(true),
            native: Arc::new(Native {
                freed: UnsafeCell::new(false),
                frees: AtomicUsize::new(0),
            }),
            settles,
        })
    }

    fn take(&self) -> bool {
        std::mem::take(&mut *self.handle.lock().unwrap())
    }

    /// `Inner::issue_on`: whether it was issued.
    fn issue(&self) -> bool {
        let handle = self.handle.lock().unwrap();
        if !*handle || self.phase.get() != State::Ready {
            return false;
        }
        self.native.call();
        true
    }

    /// `Inner::abort`: whether NCCL let go of it.
    fn abort(&self, reason: &str) -> bool {
        if !self.phase.begin_abort(reason) {
            while !self.phase.get().is_final() {
                thread::yield_now();
            }
            return matches!(self.phase.get(), State::Finalized | State::Aborted);
        }
        let freed = if self.take() {
            self.native.free();
            self.phase.set_freed(true);
            true
        } else {
            self.phase.wait_freed(LONG)
        };
        if freed {
            assert!(self.phase.aborted());
        } else {
            assert!(self.phase.leaked());
        }
        freed
    }

    /// `Inner::finalize`: whether it was in order.
    fn finalize(&self) -> bool {
        if !self.phase.begin_finalize() {
            return false;
        }
        if !self.take() {
            return false;
        }
        let mut ours = false;
        self.native.call();
        if !self.settles {
            while self.phase.get() == State::Finalizing {
                self.native.call();
                thread::yield_now();
            }
            ours = self.phase.begin_abort("its finalize failed");
        }
        self.native.free();
        self.phase.set_freed(true);
        if ours {
            assert!(self.phase.aborted());
        }
        self.settles && self.phase.finalized()
    }
}

impl Drop for Communicator {
    /// `Inner::drop`, and the reaper.
    fn drop(&mut self) {
        if self.take() {
            self.native.call();
            self.native.free();
        }
        assert_eq!(self.native.frees.load(Ordering::SeqCst), 1);
    }
}

fn on_a_thread<T: 'static>(
    communicator: &Arc<Communicator>,
    act: impl FnOnce(&Communicator) -> T + 'static,
) -> thread::JoinHandle<T> {
    let communicator = Arc::clone(communicator);
    thread::spawn(move || act(&communicator))
}

#[test]
fn an_abort_waits_for_the_call_that_is_being_made_and_lets_none_in() {
    loom::model(|| {
        let comm = Communicator::new(true);
        let issuing = on_a_thread(&comm, |comm| (comm.issue(), comm.issue()));
        assert!(comm.abort("now"));
        assert!(!comm.issue());
        let (first, second) = issuing.join().unwrap();
        assert!(first || !second);
        assert_eq!(comm.phase.get(), State::Aborted);
    });
}

#[test]
fn two_aborts_free_it_once_and_both_return_when_it_is_free() {
    loom::model(|| {
        let comm = Communicator::new(true);
        let other = on_a_thread(&comm, |comm| {
            let freed = comm.abort("theirs");
            (freed, comm.native.frees.load(Ordering::SeqCst))
        });
        assert!(comm.abort("ours"));
        assert_eq!(comm.native.frees.load(Ordering::SeqCst), 1);
        assert_eq!(other.join().unwrap(), (true, 1));
        assert!(comm.phase.reason().is_some());
    });
}

#[test]
fn whoever_sees_an_abort_finds_its_reason() {
    loom::model(|| {
        let comm = Communicator::new(true);
        let aborting = on_a_thread(&comm, |comm| comm.abort("a reason"));
        if comm.phase.get().is_aborted() {
            assert_eq!(comm.phase.reason().as_deref(), Some("a reason"));
        }
        aborting.join().unwrap();
    });
}

#[test]
fn a_finalize_and_an_abort_free_it_once_and_agree_on_how_it_ended() {
    loom::model(|| {
        let comm = Communicator::new(true);
        let finalizing = on_a_thread(&comm, |comm| comm.finalize());
        assert!(comm.abort("now"));
        let in_order = finalizing.join().unwrap();
        let ended = comm.phase.get();
        assert_eq!(in_order, ended == State::Finalized, "{ended:?}");
        assert!(ended.is_final());
    });
}

#[test]
fn an_abort_ends_a_finalize_that_would_wait_for_ever() {
    loom::model(|| {
        let comm = Communicator::new(false);
        let finalizing = on_a_thread(&comm, |comm| comm.finalize());
        assert!(comm.abort("now"));
        assert!(!finalizing.join().unwrap());
        assert_eq!(comm.phase.get(), State::Aborted);
    });
}

#[test]
fn of_two_finalizes_one_is_in_order_and_operations_come_before_or_not_at_all() {
    loom::model(|| {
        let comm = Communicator::new(true);
        let first = on_a_thread(&comm, |comm| comm.finalize());
        let issued = comm.issue();
        let second = comm.finalize();
        assert!(first.join().unwrap() != second);
        assert!(!comm.issue());
        let _ = issued;
    });
}

#[test]
fn the_last_of_the_clones_frees_what_nobody_has_ended() {
    loom::model(|| {
        let comm = Communicator::new(true);
        let native = Arc::clone(&comm.native);
        let issuing = on_a_thread(&comm, |comm| comm.issue());
        drop(comm);
        assert!(issuing.join().unwrap());
        assert_eq!(native.frees.load(Ordering::SeqCst), 1);
    });
}

#[test]
fn a_drop_beside_an_abort_does_not_free_it_again() {
    loom::model(|| {
        let comm = Communicator::new(true);
        let native = Arc::clone(&comm.native);
        let aborting = on_a_thread(&comm, |comm| comm.abort("now"));
        drop(comm);
        assert!(aborting.join().unwrap());
        assert_eq!(native.frees.load(Ordering::SeqCst), 1);
    });
}

/// A record of two words, which are to be of one number.
#[derive(Default)]
struct Pair([AtomicU64; 2]);

impl Slot for Pair {
    type Record = [u64; 2];

    fn copy(&self) -> [u64; 2] {
        self.0.each_ref().map(|word| word.load(Ordering::Relaxed))
    }
}

#[test]
fn a_record_that_is_read_is_whole_and_the_one_that_was_asked_for() {
    loom::model(|| {
        let lane = Arc::new(Lane::<Pair>::new(2));
        let writing = Arc::clone(&lane);
        let writer = thread::spawn(move || {
            // The third is written over the first.
            for number in 0..3 {
                writing.begin(number, 1);
                for word in &writing.slot(number).0 {
                    word.store(number + 1, Ordering::Relaxed);
                }
                writing.publish(number + 1);
            }
        });
        let read = lane.read();
        for (number, record) in (read.first..).zip(&read.records) {
            assert_eq!(*record, [number + 1; 2]);
        }
        writer.join().unwrap();
        let read = lane.read();
        assert_eq!((read.first, &read.records[..]), (1, &[[2; 2], [3; 2]][..]));
    });
}
