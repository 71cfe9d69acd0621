//! Every interleaving of the two protocols that decide whether a thread sleeps for ever.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p cuda-emulator --test loom --release
//! ```
#![cfg(loom)]

#[allow(
    unreachable_pub,
    reason = "public in the library, and a module of this test here"
)]
#[path = "../src/exec/bell.rs"]
mod bell;
#[allow(dead_code)]
#[path = "../src/exec/waiters.rs"]
mod waiters;

use std::time::Duration;

use bell::Bell;
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use loom::sync::{Arc, Mutex};
use waiters::Waiters;

#[test]
fn no_ring_is_lost() {
    loom::model(|| {
        let shared = Arc::new((Bell::default(), AtomicBool::new(false)));
        let ringer = loom::thread::spawn({
            let shared = Arc::clone(&shared);
            move || {
                shared.1.store(true, Ordering::SeqCst);
                shared.0.ring();
            }
        });
        loop {
            let seen = shared.0.value();
            if shared.1.load(Ordering::SeqCst) {
                break;
            }
            // Without a timeout here: a lost ring is a deadlock.
            shared.0.wait(seen, Duration::ZERO);
        }
        ringer.join().unwrap();
    });
}

/// A stream as far as its waiters see it: two jobs, a token, a number.
struct Model {
    token: Mutex<()>,
    completed: AtomicU64,
    waiters: Waiters,
}

impl Model {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            token: Mutex::new(()),
            completed: AtomicU64::new(0),
            waiters: Waiters::new(),
        })
    }

    /// Runs until `target` with the token, as `exec::run` does.
    fn run(&self, target: u64) {
        loop {
            let done = self.completed.load(Ordering::Relaxed);
            if done >= target {
                return;
            }
            self.completed.store(done + 1, Ordering::SeqCst);
            self.waiters.finished(done + 1);
        }
    }

    fn try_run(&self, target: u64) -> bool {
        let Ok(guard) = self.token.try_lock() else {
            return false;
        };
        self.run(target);
        drop(guard);
        self.waiters.released();
        true
    }

    fn wait(&self, target: u64) {
        loop {
            if self.completed.load(Ordering::SeqCst) >= target {
                return;
            }
            let seen = self.waiters.announce(target);
            if self.try_run(target) || self.completed.load(Ordering::SeqCst) >= target {
                continue;
            }
            self.waiters.bell().wait(seen, Duration::ZERO);
        }
    }
}

#[test]
fn a_waiter_takes_over_or_is_woken() {
    loom::model(|| {
        let model = Model::new();
        // Runs the first job and leaves the second to the thread that waits for it.
        let first = loom::thread::spawn({
            let model = Arc::clone(&model);
            move || model.wait(1)
        });
        model.wait(2);
        first.join().unwrap();
    });
}

#[test]
fn a_poll_that_holds_the_token_for_a_moment_strands_nobody() {
    loom::model(|| {
        let model = Model::new();
        let poll = loom::thread::spawn({
            let model = Arc::clone(&model);
            move || {
                model.try_run(0);
            }
        });
        model.wait(1);
        poll.join().unwrap();
    });
}

#[test]
fn waiters_for_different_jobs_all_wake() {
    let mut builder = loom::model::Builder::new();
    // Three threads: all interleavings with up to this many switches.
    builder.preemption_bound = Some(3);
    builder.check(|| {
        let model = Model::new();
        let others: Vec<_> = [1, 2]
            .map(|target| {
                let model = Arc::clone(&model);
                loom::thread::spawn(move || model.wait(target))
            })
            .into_iter()
            .collect();
        model.try_run(1);
        for other in others {
            other.join().unwrap();
        }
    });
}
