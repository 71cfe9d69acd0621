//! A communicator's lifecycle: abort against init, issue, poll, finalize, drop and split.
//!
//! The steps are those of `state.rs`. A cell stands in for NCCL's communicator:
//! loom reports two threads in it at once, and the cell a use after it was freed and a second free. Around
//! the steps, the other work of the crate's threads is modelled, without time,
//! other ranks, and memory.

use std::time::Duration;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::sync::{Arc, Mutex};
use loom::thread;

use crate::state::{FreeMethod, Lifecycle, NcclSide, PartialInit, State, retire};

/// No wait of the model reaches it: loom has no time.
const LONG: Duration = Duration::from_secs(3600);

/// Stands in for NCCL's communicator.
struct Cell {
    freed: UnsafeCell<bool>,
    frees: AtomicUsize,
}

// SAFETY: the cell's accesses are what loom checks.
unsafe impl Sync for Cell {}

impl Cell {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            freed: UnsafeCell::new(false),
            frees: AtomicUsize::new(0),
        })
    }

    /// Any call on the communicator.
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

    fn frees(&self) -> usize {
        self.frees.load(Ordering::SeqCst)
    }
}

/// The slot behind a communicator's lock.
type RingSlot = Mutex<Option<()>>;

struct Communicator {
    lifecycle: Lifecycle,
    slot: RingSlot,
    cell: Arc<Cell>,
    /// Whether waits for other ranks end by themselves.
    settles: bool,
}

impl NcclSide for Communicator {
    type Raw = ();
    type Failure = ();

    fn slot<R>(&self, look: impl FnOnce(&mut Option<()>) -> R) -> R {
        look(&mut self.slot.lock().unwrap())
    }

    fn free(&self, _: FreeMethod, (): ()) -> Result<(), ()> {
        self.cell.free();
        Ok(())
    }
}

impl Communicator {
    fn supervise_init(settles: bool) -> Arc<Self> {
        Arc::new(Self {
            lifecycle: Lifecycle::new(),
            slot: Mutex::new(None),
            cell: Cell::new(),
            settles,
        })
    }

    fn ready() -> Arc<Self> {
        Self::that_settles(true)
    }

    fn that_settles(settles: bool) -> Arc<Self> {
        let comm = Self::supervise_init(settles);
        assert!(comm.lifecycle.set_ready(&*comm, ()));
        comm
    }

    /// `Inner::join_nccl`, and its consequences. Returns whether the communicator was made.
    fn make(&self, is_void: impl Fn() -> bool) -> bool {
        // The call itself.
        self.cell.call();
        let settled = loop {
            if self.lifecycle.get().abort_has_begun() || is_void() {
                break false;
            }
            self.cell.call();
            if self.settles {
                break true;
            }
            thread::yield_now();
        };
        if settled && self.lifecycle.set_ready(self, ()) {
            return true;
        }
        let ours = self.lifecycle.begin_abort("it was not made");
        let freed = self.lifecycle.free_unfinished(self, PartialInit::Here(()));
        assert!(freed);
        if ours {
            assert!(self.lifecycle.set_aborted());
        }
        false
    }

    /// `Inner::issue_on`, with the poll. Returns whether it was issued.
    fn issue(&self) -> bool {
        let slot = self.slot.lock().unwrap();
        let Some(()) = self.lifecycle.usable(*slot) else {
            return false;
        };
        self.cell.call();
        while !self.settles && !self.lifecycle.get().abort_has_begun() {
            self.cell.call();
            thread::yield_now();
        }
        true
    }

    /// `Request::check_nccl`.
    fn poll(&self) {
        if let Ok(slot) = self.slot.try_lock()
            && slot.is_some()
        {
            self.cell.call();
        }
    }

    /// `Inner::abort`. Returns whether NCCL freed the communicator.
    fn abort(&self, reason: &str) -> bool {
        if !self.lifecycle.begin_abort(reason) {
            return self.ended();
        }
        let freed = self.lifecycle.end(self, LONG);
        assert!(if freed {
            self.lifecycle.set_aborted()
        } else {
            self.lifecycle.set_leaked()
        });
        freed
    }

    /// `Inner::wait_for_end`.
    fn ended(&self) -> bool {
        while !self.lifecycle.get().is_final() {
            thread::yield_now();
        }
        matches!(self.lifecycle.get(), State::Finalized | State::Aborted)
    }

    /// `Inner::finalize`. Returns whether it ended in order.
    fn finalize(&self) -> bool {
        if !self.lifecycle.begin_finalize() {
            return false;
        }
        let mut ours = false;
        let wait_until_idle = |()| {
            self.cell.call();
            while !self.settles {
                if self.lifecycle.get() != State::Finalizing {
                    return Err(());
                }
                self.cell.call();
                thread::yield_now();
            }
            Ok(())
        };
        let aborting = |(): &()| ours = self.lifecycle.begin_abort("its finalize failed");
        let Some(retired) = self.lifecycle.retire(self, wait_until_idle, aborting) else {
            return false;
        };
        if ours {
            assert!(self.lifecycle.set_aborted());
        }
        retired.finalized.is_ok() && self.lifecycle.set_finalized()
    }
}

impl Drop for Communicator {
    /// `Inner::drop`, and the drop queue.
    fn drop(&mut self) {
        let raw = self
            .lifecycle
            .take_for_drop(&mut *self.slot.lock().unwrap());
        if let Some(raw) = raw {
            let wait_until_idle = |()| {
                self.cell.call();
                Ok::<(), ()>(())
            };
            let _ = retire(
                raw,
                wait_until_idle,
                |()| {},
                |way, raw| self.free(way, raw),
            );
        }
        assert_eq!(self.cell.frees(), 1, "freed by exactly one");
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
fn an_abort_beside_the_making_frees_it_once_and_it_is_not_ready_afterwards() {
    loom::model(|| {
        let comm = Communicator::supervise_init(true);
        let making = on_a_thread(&comm, |comm| comm.make(|| false));
        assert!(comm.abort("now"));
        assert_eq!(comm.cell.frees(), 1);
        assert_eq!(comm.lifecycle.get(), State::Aborted);
        // It may have been made before.
        making.join().unwrap();
        assert!(!comm.issue());
    });
}

#[test]
fn an_abort_ends_a_making_that_would_wait_for_ever() {
    loom::model(|| {
        let comm = Communicator::supervise_init(false);
        let making = on_a_thread(&comm, |comm| comm.make(|| false));
        assert!(comm.abort("now"));
        assert!(!making.join().unwrap());
        assert_eq!(comm.lifecycle.reason().as_deref(), Some("now"));
    });
}

#[test]
fn what_is_used_as_soon_as_it_is_made_is_there() {
    loom::model(|| {
        let comm = Communicator::supervise_init(true);
        let making = on_a_thread(&comm, |comm| comm.make(|| false));
        let issued = comm.issue();
        assert!(making.join().unwrap());
        let _ = issued;
        assert!(comm.issue());
    });
}

#[test]
fn a_split_ends_with_its_parent_while_it_is_made() {
    loom::model(|| {
        let parent = Communicator::ready();
        let split = Communicator::supervise_init(false);
        let making = {
            let (parent, split) = (Arc::clone(&parent), Arc::clone(&split));
            thread::spawn(move || split.make(|| parent.lifecycle.get().abort_has_begun()))
        };
        assert!(parent.abort("the parent"));
        assert!(!making.join().unwrap());
        assert_eq!(split.lifecycle.get(), State::Aborted);
    });
}

#[test]
fn an_abort_of_a_split_beside_that_of_its_parent_frees_both_once() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let parent = Communicator::ready();
        let split = Communicator::supervise_init(true);
        let making = {
            let (parent, split) = (Arc::clone(&parent), Arc::clone(&split));
            thread::spawn(move || split.make(|| parent.lifecycle.get().abort_has_begun()))
        };
        let aborting = on_a_thread(&split, |split| split.abort("the split"));
        assert!(parent.abort("the parent"));
        assert!(aborting.join().unwrap());
        making.join().unwrap();
    });
}

#[test]
fn an_abort_waits_for_the_call_that_is_being_made_and_lets_none_in() {
    loom::model(|| {
        let comm = Communicator::ready();
        let issuing = on_a_thread(&comm, |comm| {
            let aborted = comm.lifecycle.get().abort_has_begun();
            let first = comm.issue();
            assert!(!(aborted && first), "issued after the abort had begun");
            (first, comm.issue())
        });
        assert!(comm.abort("now"));
        assert!(!comm.issue());
        let (first, second) = issuing.join().unwrap();
        assert!(first || !second);
        assert_eq!(comm.lifecycle.get(), State::Aborted);
    });
}

#[test]
fn an_abort_ends_a_call_that_would_wait_for_ever() {
    loom::model(|| {
        let comm = Communicator::that_settles(false);
        let issuing = on_a_thread(&comm, |comm| comm.issue());
        assert!(comm.abort("now"));
        issuing.join().unwrap();
        assert_eq!(comm.lifecycle.get(), State::Aborted);
    });
}

#[test]
fn a_question_beside_an_abort_does_not_use_what_is_freed() {
    loom::model(|| {
        let comm = Communicator::ready();
        let asking = on_a_thread(&comm, |comm| {
            comm.poll();
            comm.poll();
        });
        assert!(comm.abort("now"));
        asking.join().unwrap();
    });
}

#[test]
fn two_aborts_free_it_once_and_both_return_when_it_is_free() {
    loom::model(|| {
        let comm = Communicator::ready();
        let other = on_a_thread(&comm, |comm| {
            let freed = comm.abort("theirs");
            (freed, comm.cell.frees())
        });
        assert!(comm.abort("ours"));
        assert_eq!(comm.cell.frees(), 1);
        assert_eq!(other.join().unwrap(), (true, 1));
        assert!(comm.lifecycle.reason().is_some());
    });
}

#[test]
fn a_thread_that_sees_an_abort_finds_its_reason() {
    loom::model(|| {
        let comm = Communicator::ready();
        let aborting = on_a_thread(&comm, |comm| comm.abort("a reason"));
        if comm.lifecycle.get().abort_has_begun() {
            assert_eq!(comm.lifecycle.reason().as_deref(), Some("a reason"));
        }
        aborting.join().unwrap();
    });
}

#[test]
fn a_finalize_and_an_abort_free_it_once_and_agree_on_how_it_ended() {
    loom::model(|| {
        let comm = Communicator::ready();
        let finalizing = on_a_thread(&comm, |comm| comm.finalize());
        assert!(comm.abort("now"));
        let in_order = finalizing.join().unwrap();
        let ended = comm.lifecycle.get();
        assert_eq!(in_order, ended == State::Finalized, "{ended:?}");
        assert!(ended.is_final());
    });
}

#[test]
fn an_abort_ends_a_finalize_that_would_wait_for_ever() {
    loom::model(|| {
        let comm = Communicator::that_settles(false);
        let finalizing = on_a_thread(&comm, |comm| comm.finalize());
        assert!(comm.abort("now"));
        assert!(!finalizing.join().unwrap());
        assert_eq!(comm.lifecycle.get(), State::Aborted);
    });
}

#[test]
fn of_two_finalizes_one_is_in_order_and_operations_come_before_or_not_at_all() {
    loom::model(|| {
        let comm = Communicator::ready();
        let first = on_a_thread(&comm, |comm| comm.finalize());
        let issued = comm.issue();
        let second = comm.finalize();
        assert!(first.join().unwrap() != second);
        assert!(!comm.issue());
        let _ = issued;
    });
}

#[test]
fn the_last_of_the_clones_frees_a_communicator_that_was_not_ended() {
    loom::model(|| {
        let comm = Communicator::ready();
        let cell = Arc::clone(&comm.cell);
        let issuing = on_a_thread(&comm, |comm| comm.issue());
        drop(comm);
        assert!(issuing.join().unwrap());
        assert_eq!(cell.frees(), 1);
    });
}

#[test]
fn a_drop_beside_an_abort_does_not_free_it_again() {
    loom::model(|| {
        let comm = Communicator::ready();
        let cell = Arc::clone(&comm.cell);
        let aborting = on_a_thread(&comm, |comm| comm.abort("now"));
        drop(comm);
        assert!(aborting.join().unwrap());
        assert_eq!(cell.frees(), 1);
    });
}

/// A thread that was to free the communicator has been given up, and the last handle is dropped.
#[test]
fn a_leaked_communicator_is_not_touched() {
    loom::model(|| {
        let lifecycle = Arc::new(Lifecycle::new());
        let slot = Arc::new(Mutex::new(Some(())));
        assert!(lifecycle.begin_abort("now"));
        let dropping = {
            let (lifecycle, slot) = (Arc::clone(&lifecycle), Arc::clone(&slot));
            thread::spawn(move || {
                lifecycle.get() == State::Leaked
                    && lifecycle
                        .take_for_drop(&mut *slot.lock().unwrap())
                        .is_some()
            })
        };
        assert!(lifecycle.set_leaked());
        assert!(!dropping.join().unwrap());
        assert!(
            lifecycle
                .take_for_drop(&mut *slot.lock().unwrap())
                .is_none()
        );
    });
}
