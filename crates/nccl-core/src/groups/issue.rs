//! The operations of several communicators, issued in one group.
//!
//! The steps are those of `issue`; each step is done for all communicators before the next begins. When one
//! communicator fails, all are aborted, because any of them may have launched its part. The locks are taken in the
//! order of their addresses, so that two threads with the same communicators do not deadlock.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::active_calls::CallKind;
use crate::communicator::abort_flag_parent::{AbortFlagParent, BlockingCall};
use crate::communicator::handle::{HandleGuard, NotIdle, RawComm};
use crate::communicator::registry::abort_together;
use crate::communicator::stream_order::{self, ForeignCapture};
use crate::communicator::{Communicator, Inner, SharedLaunch};
use crate::error::{Error, ErrorKind, Result};
use crate::ffi::Progress;
use crate::group::Group;
use crate::issuing::issue::{EndProcessOnPanic, not_issued_in_time};
use crate::operation::{OperationKind, Shape};
use crate::queued_op;
use crate::queued_op::CallContext;
use crate::request::Request;
use crate::supervision::watchdog;

/// Why nothing, or not everything, was issued.
enum GroupFailure {
    /// NCCL was not called.
    NotStarted(usize, Error),
    /// NCCL was called, and no communicator of the group can be used again.
    PartlyIssued(usize, Error),
    /// As [`PartlyIssued`](Self::PartlyIssued); another thread's capture may have taken the work of the communicators marked in `captured`.
    Captured {
        captured: Vec<bool>,
        /// Whether all other work is on the streams.
        is_settled: bool,
        at: usize,
        error: Error,
    },
}

const KIND: OperationKind = OperationKind::Group;

/// Issues the queued operations of each communicator. All communicators use the same library.
pub(crate) fn issue_together(all: &[Group<'_>]) -> Result<Vec<Request>> {
    let started = Instant::now();
    match issue_locked(all, started) {
        Ok(sequences) => Ok(all
            .iter()
            .zip(sequences)
            .map(|(group, sequence)| {
                let is_empty = group.buffers.batch().queued.is_empty();
                Request::new(
                    group.comm,
                    KIND,
                    Shape::default(),
                    sequence,
                    started,
                    is_empty,
                )
            })
            .collect()),
        Err(failure) => {
            let (GroupFailure::NotStarted(at, _)
            | GroupFailure::PartlyIssued(at, _)
            | GroupFailure::Captured { at, .. }) = failure;
            let inner = &all[at].comm.inner;
            let describe = || inner.operation(KIND, Shape::default(), None, started);
            let error = match failure {
                GroupFailure::NotStarted(_, error) => {
                    return Err(inner.final_error_before_issue(error.during(describe)));
                }
                GroupFailure::PartlyIssued(_, error) => {
                    let error = with_cause(inner, error.during(describe));
                    abort_all_failed(all, at, &error);
                    error
                }
                GroupFailure::Captured {
                    captured,
                    is_settled,
                    error,
                    ..
                } => {
                    let error = with_cause(inner, error.during(describe));
                    let lent = EndProcessOnPanic::of(inner);
                    let captured = wait_for_captures(all, &captured);
                    match is_settled && captured.contains(&true) {
                        true => abort_remaining(all, &captured, &error),
                        // Work that has not settled may still get onto the stream.
                        false => abort_all_failed(all, at, &error),
                    }
                    std::mem::forget(lent);
                    error
                }
            };
            Err(inner.final_error(error).during(describe))
        }
    }
}

/// Waits until one common deadline for the ends of the captures that interfered. Returns for each group whether its
/// capture has not ended.
fn wait_for_captures(all: &[Group<'_>], captured: &[bool]) -> Vec<bool> {
    let both = || all.iter().zip(captured);
    let in_the_way = both().filter(|(_, captured)| **captured);
    let deadline = in_the_way
        .map(|(group, _)| group.comm.inner.capture_deadline())
        .min();
    both()
        .map(|(group, captured)| {
            let buffers = &group.buffers;
            let deadline = deadline.filter(|_| *captured);
            deadline.is_some_and(|deadline| {
                group
                    .comm
                    .inner
                    .wait_for_capture(buffers, deadline)
                    .is_none()
            })
        })
        .collect()
}

/// Aborts all communicators at the same time, because an abort may wait for the aborts of the others in the group.
/// Begins with communicator `at`, so that all ranks report the error that the call returns.
fn abort_all_failed(all: &[Group<'_>], at: usize, reason: &Error) {
    let lent = EndProcessOnPanic::of(&all[at].comm.inner);
    let first = std::iter::once(&all[at]);
    let all_of_them = first.chain(all).map(|group| &*group.comm.inner);
    abort_together(all_of_them, || reason.into());
    for group in all {
        group.comm.inner.abort_and_order(reason, &group.buffers);
    }
    std::mem::forget(lent);
}

/// Aborts all communicators. Does not wait for those whose work is entirely in a capture that does not end, because
/// NCCL waits for that capture.
fn abort_remaining(all: &[Group<'_>], captured: &[bool], reason: &Error) {
    let Some(first) = all.first() else { return };
    let lent = EndProcessOnPanic::of(&first.comm.inner);
    let is_captured = |inner: &Arc<Inner>| {
        let both = all.iter().zip(captured);
        let mut own = both.filter(|(group, _)| Arc::ptr_eq(&group.comm.inner, inner));
        own.all(|(_, captured)| *captured)
    };
    let inners = || all.iter().map(|group| &*group.comm.inner);
    for inner in inners().filter(|inner| is_captured(inner)) {
        inner.abort_in_background(reason);
    }
    abort_together(inners().filter(|inner| !is_captured(inner)), || {
        reason.into()
    });
    for group in all {
        if !is_captured(&group.comm.inner) {
            group.comm.inner.abort_and_order(reason, &group.buffers);
        }
    }
    std::mem::forget(lent);
}

fn issue_locked(all: &[Group<'_>], started: Instant) -> Result<Vec<u64>, GroupFailure> {
    let mut inners: Vec<&Arc<Inner>> = all.iter().map(|group| &*group.comm.inner).collect();
    inners.sort_by_key(|inner| Arc::as_ptr(inner));
    inners.dedup_by_key(|inner| Arc::as_ptr(inner));
    let mut handles: Vec<HandleGuard<'_>> = Vec::with_capacity(inners.len());
    let mut started = started;
    for &inner in &inners {
        let at = all
            .iter()
            .position(|group| Arc::ptr_eq(&group.comm.inner, inner));
        let at = at.unwrap_or_else(|| unreachable!("every communicator is of a group"));
        let turn = inner
            .handle
            .lock_within(Some(OperationKind::Group), all[at].comm.timeout);
        let (handle, waited) = turn.map_err(|error| GroupFailure::NotStarted(at, error))?;
        if waited {
            // The wait for other calls does not count against this group.
            started = Instant::now();
        }
        handles.push(handle);
    }
    let handle_of = |comm: &Communicator| {
        let found =
            inners.binary_search_by_key(&Arc::as_ptr(&comm.inner), |inner| Arc::as_ptr(inner));
        found.unwrap_or_else(|_| unreachable!("every communicator is in the list"))
    };

    // 1. None of this calls NCCL.
    let mut raws: Vec<RawComm> = Vec::with_capacity(all.len());
    for (at, group) in all.iter().enumerate() {
        let comm = group.comm;
        let handle = &handles[handle_of(comm)];
        let ready = comm.inner.ready(handle).and_then(|raw| {
            comm.inner.prepare(handle, &group.buffers)?;
            Ok(raw)
        });
        raws.push(ready.map_err(|error| GroupFailure::NotStarted(at, error))?);
    }
    let Some(first) = all.first() else {
        return Ok(Vec::new());
    };
    watchdog::ensure().map_err(|error| GroupFailure::NotStarted(0, error))?;
    let library = first.comm.library();
    let _inside = first.comm.inner.enter(CallKind::Issue, first.comm.timeout);

    // Steps 2 and 3.
    let lent = EndProcessOnPanic::of(&first.comm.inner);
    let mut sequences = Vec::with_capacity(all.len());
    let mut tickets = Vec::with_capacity(all.len());
    let group_members = GroupMembers::enter(all, started);
    let made = queued_op::group(library, || {
        all.iter().zip(&raws).try_for_each(|(group, raw)| {
            let handle = &mut *handles[handle_of(group.comm)];
            handle.sequence += 1;
            sequences.push(handle.sequence);
            let batch = group.buffers.batch();
            let count = batch.queued.len();
            let (on, timeout) = (group.buffers.on, group.comm.timeout);
            let ticket = handle
                .recorder
                .begin(handle.sequence, KIND, started, on, timeout, count);
            let issue = watchdog::ReportedCall {
                inner: &group.comm.inner,
                on,
                sequence: handle.sequence,
                kind: KIND,
                timeout,
            };
            // Cannot fail: the watchdog's threads run.
            let is_marked = ticket.needs_report && watchdog::report_before(issue).unwrap_or(false);
            tickets.push((ticket, is_marked.then_some(issue)));
            let calls = CallContext {
                library,
                comm: raw.as_ptr(),
                stream: group.buffers.on.cu_stream().cast(),
            };
            queued_op::call_each(batch, &calls, &mut handle.recorder)
        })
    });
    // The abort of one communicator ends the thread's calls on all of them.
    let ended = |at: usize| {
        let is_ending = |group: &Group<'_>| group.comm.inner.interrupted();
        let ending = || all.iter().position(is_ending);
        let at_first = Some(at).filter(|&at| is_ending(&all[at]));
        at_first.or_else(ending).unwrap_or(at)
    };
    let failed = |failure| {
        let at = ended(0);
        let Communicator { inner, timeout, .. } = all[at].comm;
        (at, inner.error_of_failed_call(failure, *timeout))
    };
    let launched = match group_members.leave().and(made.map_err(failed)) {
        Ok(Progress::Done) => Ok(()),
        Ok(Progress::Pending) => {
            let shares = |launch: Option<Arc<SharedLaunch>>| {
                for inner in &inners {
                    *inner.shared_launch.lock() = launch.clone();
                }
            };
            // Done while the locks are still held, so that no abort has taken the pointers yet.
            shares(Some(Arc::default()));
            let wait_until_on_stream =
                all.iter()
                    .zip(&raws)
                    .enumerate()
                    .try_for_each(|(at, (group, raw))| {
                        // The abort of any communicator waits for all locks, so an interruption of one ends the wait
                        // for every communicator.
                        let is_ended = || all.iter().any(|group| group.comm.inner.interrupted());
                        let comm = group.comm;
                        let wait_until_on_stream =
                            comm.inner
                                .wait_until_on_stream(*raw, started, comm.timeout, is_ended);
                        wait_until_on_stream.map_err(|error| (at, error))
                    });
            match wait_until_on_stream {
                Ok(()) => shares(None),
                Err(_) => inners
                    .iter()
                    .for_each(|inner| inner.record_unfinished_launch()),
            }
            wait_until_on_stream
        }
        Err(failed) => Err(failed),
    };
    let launched = launched.map_err(|(at, error)| (ended(at), error));

    for (group, (ticket, marked)) in all.iter().zip(tickets) {
        handles[handle_of(group.comm)]
            .recorder
            .end(ticket, launched.as_ref().err().map(|(_, error)| error));
        if let Some(issue) = marked {
            watchdog::report_after(issue);
        }
    }

    // Step 4, on every path and for every communicator.
    let (mut ordered, mut captured) = (Ok(()), Vec::with_capacity(all.len()));
    for (at, group) in all.iter().enumerate() {
        let ordering_event = &handles[handle_of(group.comm)].ordering_event;
        let ordering_outcome = group.comm.inner.order_after(&group.buffers, ordering_event);
        captured.push(ordering_outcome.is_none());
        let ordering_outcome = ordering_outcome.unwrap_or(Ok(()));
        ordered = ordered.and(ordering_outcome.map_err(|error| (at, error)));
    }
    std::mem::forget(lent);
    let is_settled = launched.is_ok();
    let failed = launched.and(ordered).err();
    let first = captured.iter().position(|captured| *captured);
    match (failed, first) {
        (None, None) => Ok(sequences),
        (Some((at, error)), None) => Err(GroupFailure::PartlyIssued(at, error)),
        (failed, Some(first)) => {
            let (at, failed) = failed.map_or((first, None), |(at, error)| (at, Some(error)));
            Err(GroupFailure::Captured {
                captured,
                is_settled,
                at,
                error: stream_order::capture_error(ForeignCapture::Void, failed),
            })
        }
    }
}

/// Blocking communicators while one thread is inside all of them: an abort that ends one call has to end the others,
/// and the shortest timeout applies to all.
struct GroupMembers<'g> {
    all: &'g [Group<'g>],
    inside: Vec<(usize, BlockingCall<'g>)>,
    timeout: Duration,
}

impl<'g> GroupMembers<'g> {
    fn enter(all: &'g [Group<'g>], started: Instant) -> Self {
        let timeouts = all.iter().map(|group| group.comm.timeout);
        let timeout = timeouts.min().unwrap_or_default();
        let mut abort_flag_parents: Vec<(usize, &'g Arc<AbortFlagParent>)> = all
            .iter()
            .enumerate()
            .filter_map(|(at, group)| Some((at, group.comm.inner.abort_flag_parent.as_ref()?)))
            .collect();
        abort_flag_parents.sort_by_key(|(_, abort_flag_parent)| Arc::as_ptr(abort_flag_parent));
        abort_flag_parents.dedup_by_key(|(_, abort_flag_parent)| Arc::as_ptr(abort_flag_parent));
        for (at, abort_flag_parent) in &abort_flag_parents {
            let others = abort_flag_parents.iter().filter(|(other, _)| other != at);
            abort_flag_parent
                .set_group_members(others.map(|(_, other)| Arc::downgrade(other)).collect());
        }
        let remaining = timeout.saturating_sub(started.elapsed());
        let inside = abort_flag_parents
            .into_iter()
            .map(|(at, abort_flag_parent)| (at, abort_flag_parent.enter(remaining)))
            .collect();
        Self {
            all,
            inside,
            timeout,
        }
    }

    /// Returns which call was ended, and why. If several were ended, the call whose timeout passed takes precedence.
    fn leave(self) -> Result<(), (usize, Error)> {
        let mut ended: Vec<(usize, NotIdle)> = self
            .inside
            .into_iter()
            .filter_map(|(at, inside)| Some((at, inside.leave()?)))
            .collect();
        for group in self.all {
            if let Some(abort_flag_parent) = &group.comm.inner.abort_flag_parent {
                abort_flag_parent.set_group_members(Vec::new());
            }
        }
        ended.sort_by_key(|(_, ended)| !matches!(ended, NotIdle::TimedOut));
        match ended.into_iter().next() {
            None => Ok(()),
            Some((at, ended)) => Err((at, not_issued_in_time(ended, self.timeout))),
        }
    }
}

/// Adds the root cause to an error that follows from the end of this communicator.
fn with_cause(inner: &Inner, error: Error) -> Error {
    let cause = inner
        .supervisor
        .as_ref()
        .and_then(|supervisor| supervisor.fault_or_announced());
    match (error.kind(), cause) {
        (ErrorKind::Aborted { .. }, Some(cause)) => error.with_fault(cause),
        _ => error,
    }
}
