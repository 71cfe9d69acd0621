//! A group of non-blocking communicators, between `ncclGroupEnd` and success.
//!
//! ```text
//! Waiting ──poll, nothing to wait for──▶ Running (by the poll) ──▶ Over
//!    ├────poll, something to wait for──▶ Running (on a thread) ──▶ Over
//!    ├────nobody polled for a while────▶ Running (on a thread or the timer's)
//!    └────abort────────────────────────▶ Over, nothing was done
//!
//! Running ──abort of one of its communicators──▶ the flags of all are up ──▶ Over
//! ```
//!
//! A group without jobs never begins before `ncclGroupEnd` has returned: NCCL's thread may be just
//! as late, and a caller that does not poll finds its stream empty. Until the group is over, the
//! state of its communicators is `ncclInProgress`.

use std::sync::Arc;
use std::thread;

use cuda_emulator::sync::{Condvar, Mutex, MutexGuard};

use super::end::Work;
use crate::code::{IN_PROGRESS, INTERNAL, SYSTEM};
use crate::nccl::communicator::{Background, Communicator};
use crate::nccl::debug::warn;
use crate::nccl::timer;

enum State {
    Waiting(Work),
    /// The communicators whose abort flags end the group. Empty if the group waits for nothing.
    Running(Vec<Arc<Communicator>>),
    Over,
}

/// See the module.
pub(crate) struct Pending {
    state: Mutex<State>,
    over: Condvar,
    since: u64,
}

impl Pending {
    /// Moves `work` to the background. Jobs begin at once, because they wait for other ranks.
    pub(super) fn begin(work: Work) {
        let has_jobs = work.has_jobs();
        let pending = Arc::new(Self {
            state: Mutex::new(State::Over),
            over: Condvar::new(),
            since: timer::tick(),
        });
        // The communicators become busy before any thread can take the work.
        for communicator in work.communicators() {
            communicator.set_state(Err(IN_PROGRESS));
            *communicator.pending() = Some(Arc::<Self>::clone(&pending));
        }
        *pending.lock() = State::Waiting(work);
        if has_jobs {
            pending.start_on_thread();
        } else {
            timer::notify();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Takes the work, if it has not begun. With `quick`, takes only work that does not wait.
    fn take(&self, quick: bool) -> Option<Work> {
        let mut state = self.lock();
        match std::mem::replace(&mut *state, State::Over) {
            State::Waiting(work) if !quick || !work.waits() => {
                let waiting = if quick {
                    Vec::new()
                } else {
                    work.communicators().cloned().collect()
                };
                *state = State::Running(waiting);
                Some(work)
            }
            other => {
                *state = other;
                None
            }
        }
    }

    fn run(&self, mut work: Work) {
        // The communicators learn the result from the work itself.
        let _ = work.run();
        *self.lock() = State::Over;
        self.over.notify_all();
    }

    fn start_on_thread(self: &Arc<Self>) {
        let Some(work) = self.take(false) else { return };
        // Kept outside the closure, in case the thread cannot start.
        let communicators: Vec<_> = work.communicators().cloned().collect();
        let pending = Arc::clone(self);
        let spawned = thread::Builder::new()
            .name("nccl-group".to_owned())
            .spawn(move || pending.run(work));
        if let Err(error) = spawned {
            warn!("nccl-emulator cannot start a thread: {error}");
            communicators
                .iter()
                .for_each(|communicator| communicator.set_state(Err(SYSTEM)));
            *self.lock() = State::Over;
            self.over.notify_all();
        }
    }
}

impl Background for Pending {
    fn is_waiting(&self) -> bool {
        matches!(*self.lock(), State::Waiting(_))
    }

    fn poll(self: Arc<Self>) {
        match self.take(true) {
            Some(work) => self.run(work),
            None => self.start_on_thread(),
        }
    }

    fn start_if_due(self: Arc<Self>) {
        if timer::is_due(self.since) {
            self.poll();
        }
    }

    fn cancel(&self) {
        let mut state = self.lock();
        if let State::Waiting(work) = &*state {
            work.give_up(INTERNAL);
            *state = State::Over;
            return;
        }
        if let State::Running(communicators) = &*state {
            let busy = communicators
                .iter()
                .filter(|c| c.state() == Err(IN_PROGRESS));
            busy.for_each(|c| c.raise_abort());
        }
        while matches!(*state, State::Running(_)) {
            self.over.wait(&mut state);
        }
    }
}
