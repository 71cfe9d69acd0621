//! Puts, signals and waits of a launch, one after the other.
//!
//! The source copies into the peer's memory by itself, then counts the signal; the peer has no part in
//! that. A rank that waits for signals consumes them.

use std::sync::atomic::{Ordering, fence};

use super::lane::{still_valid, view};
use super::scope::{Outcome, Scope};
use crate::nccl::task::OneSidedTask;
use crate::transport::{self, busy};
use cuda_emulator::memory::Span;
use cuda_emulator::violations::{Violation, ViolationKind};

/// See the module.
#[derive(Default)]
pub(super) struct OneSided {
    /// The index of the current task.
    at: usize,
    /// The put in progress: source, destination, bytes copied.
    put: Option<(Span, Span, u64)>,
}

impl OneSided {
    /// Returns the current task, if one is left.
    pub(super) fn current<'a>(&self, tasks: &'a [OneSidedTask]) -> Option<&'a OneSidedTask> {
        tasks.get(self.at)
    }

    /// Makes one bounded step. Returns `None` when all tasks are done.
    pub(super) fn step(
        &mut self,
        scope: &Scope<'_>,
        tasks: &[OneSidedTask],
        budget: usize,
    ) -> Option<Outcome> {
        let task = tasks.get(self.at)?;
        let done = match task {
            OneSidedTask::Put {
                peer,
                from,
                bytes,
                window,
                offset,
                signal,
            } => {
                let part = &window.parts[*peer];
                let to = (part, *offset, *signal);
                let segment = &scope.session.segment;
                segment.set_busy(scope.session.rank, busy::with(*peer));
                // A rank that leaves says so before it looks for the ranks that use its memory.
                fence(Ordering::SeqCst);
                let put = self.put(scope, *peer, (*from, *bytes), to, budget);
                segment.set_busy(scope.session.rank, busy::IDLE);
                match put {
                    Ok(done) => done,
                    Err(violation) => return Some(scope.fail(violation, "PutSignal")),
                }
            }
            OneSidedTask::Signal { peer, signal } => {
                scope.session.signal(*peer, *signal);
                true
            }
            OneSidedTask::Wait(wanted) => {
                if !scope.session.take_signals(wanted) {
                    return Some(Outcome::Blocked);
                }
                true
            }
        };
        if done {
            self.at += 1;
            self.put = None;
        }
        Some(Outcome::Progress)
    }

    fn put(
        &mut self,
        scope: &Scope<'_>,
        peer: usize,
        (from, bytes): (u64, u64),
        (part, offset, signal): (&Span, u64, usize),
        budget: usize,
    ) -> Result<bool, Violation> {
        let session = scope.session;
        let (source, target) = (session.pool(session.rank), session.pool(peer));
        let has_left = session.has_left(peer);
        let (read, write, copied) = match self.put {
            // Nobody sees what would be written.
            Some(_) if has_left => return Ok(true),
            Some(put) => put,
            None => {
                let inside = offset.checked_add(bytes).is_some_and(|end| end <= part.len);
                if !inside {
                    return Err(Violation::new(
                        ViolationKind::OutOfBounds,
                        Some(scope.communicator.device),
                        format!(
                            "{bytes} bytes at {offset} of the window of rank {peer}, which has {}",
                            part.len
                        ),
                    ));
                }
                if has_left {
                    return Ok(true);
                }
                let write = Span {
                    offset: part.offset + offset,
                    len: bytes,
                    ..*part
                };
                let read = scope.resolve(from, bytes)?;
                view(target, &write)?;
                // Before the first byte is written.
                session.begin_put(peer, signal, write);
                (read, write, 0)
            }
        };
        let n = (bytes - copied).min(budget.max(1) as u64);
        let (to, from) = (view(target, &write)?, view(source, &read)?);
        if n > 0 {
            // SAFETY: both views are valid for `bytes` bytes, and `copied + n` are no more.
            unsafe {
                transport::copy(
                    from.add(copied as usize),
                    to.add(copied as usize),
                    n as usize,
                );
            }
        }
        if copied + n < bytes {
            self.put = Some((read, write, copied + n));
            return Ok(false);
        }
        still_valid(source, &read)?;
        still_valid(target, &write)?;
        Ok(true)
    }
}

/// Describes a task for messages.
pub(super) fn describe(task: &OneSidedTask) -> String {
    match task {
        OneSidedTask::Put { peer, bytes, .. } => {
            format!("PutSignal of {bytes} bytes to rank {peer}")
        }
        OneSidedTask::Signal { peer, .. } => format!("Signal to rank {peer}"),
        OneSidedTask::Wait(wanted) => format!("WaitSignal from {} ranks", wanted.len()),
    }
}
