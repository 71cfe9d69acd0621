//! Determines what marks prove, and which call is overdue. Times are counted from [`origin`](crate::recorder::origin);
//! nothing here reads a clock or queries a device.

use std::time::Duration;

use crate::operation::OperationKind;
use crate::pending_call::{CallStage, PendingCall};
use crate::recorder::RecordedCall;

/// A mark that was not reached when it was last queried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PendingMark {
    /// The mark is after all calls of its stream up to this one.
    pub(super) covers: u64,
    /// When it was put there.
    pub(super) at: Duration,
    /// Whether it is directly after that call, with nothing between them.
    pub(super) is_right_behind: bool,
}

/// The state of one stream.
#[derive(Debug, Default)]
pub(super) struct StreamState {
    /// CUDA's handle.
    pub(super) stream: u64,
    /// Its calls up to this one were done before it was watched.
    pub(super) floor: u64,
    /// Its calls up to this one are done.
    done: u64,
    /// When a mark was last seen to be reached.
    last_reached_at: Duration,
    /// The first call that is not done.
    first_pending: Option<RecordedCall>,
    /// How many calls are not done.
    depth: u64,
    /// Up to which call everything is on the stream, so that a mark put there now covers it.
    pub(super) issued: u64,
    pub(super) unreached: Vec<PendingMark>,
}

impl StreamState {
    pub(super) fn new(stream: u64) -> Self {
        Self {
            stream,
            ..Self::default()
        }
    }

    /// Records that a mark was reached.
    pub(super) fn reached(&mut self, covers: u64, now: Duration) {
        self.done = self.done.max(covers);
        self.last_reached_at = now;
    }

    /// Applies the recorded calls, and up to which call the stream was seen to be done.
    pub(super) fn update(&mut self, calls: &[RecordedCall], done: u64, now: Duration) {
        if done > self.done {
            self.reached(done, now);
        }
        let here = || calls.iter().filter(|call| call.stream == self.stream);
        let issuing = here().filter(|call| call.issuing).map(|call| call.sequence);
        let issuing = issuing.min().unwrap_or(u64::MAX);
        let issued = here().map(|call| call.sequence).filter(|&n| n < issuing);
        self.issued = issued.max().unwrap_or(0);
        // A captured call runs when its graph is replayed.
        let is_pending = |call: &&RecordedCall| {
            call.sequence > self.done.max(self.floor)
                && (call.issuing || call.kind != OperationKind::Capture)
        };
        let mut depth = here().filter(is_pending).count() as u64;
        let mut first_pending = here().find(is_pending).copied();
        let oldest = calls.first().map_or(u64::MAX, |call| call.sequence);
        if let Some(known) = self.first_pending
            && known.sequence > self.done.max(self.floor)
            && known.sequence < oldest
            && oldest < u64::MAX
        {
            // The call's record was overwritten; some of the calls in between were on other streams.
            depth += oldest - known.sequence;
            first_pending = Some(RecordedCall {
                issuing: false,
                ..known
            });
        }
        (self.first_pending, self.depth) = (first_pending, depth);
    }

    /// Returns up to which call everything is done, if any call is.
    pub(super) fn done(&self) -> Option<u64> {
        (self.done > 0).then_some(self.done)
    }

    pub(super) fn is_idle(&self) -> bool {
        self.first_pending.is_none()
    }

    /// Whether the stream has calls that no mark covers, if marks cover the calls up to `marked`.
    pub(super) fn is_uncovered(&self, marked: u64) -> bool {
        self.issued > marked.max(self.done)
            && self
                .first_pending
                .is_some_and(|first_pending| first_pending.sequence <= self.issued)
    }
}

/// Tracks which call of one communicator is the first that is not done.
#[derive(Debug, Default)]
pub(super) struct CallTracker {
    /// The first pending call, and since when it is the first.
    first_since: Option<(u64, Duration)>,
    /// No clock may start before this time.
    restarted: Duration,
}

impl CallTracker {
    /// Restarts all clocks.
    pub(super) fn restart(&mut self, now: Duration) {
        self.restarted = now;
    }

    /// Returns the first of all pending calls. `queue_timeout` is how long a call may wait for its turn.
    pub(super) fn first_pending<'q>(
        &mut self,
        stream_states: impl Iterator<Item = &'q StreamState>,
        queue_timeout: Option<Duration>,
        now: Duration,
    ) -> Option<PendingCall> {
        let first = stream_states
            .filter_map(|stream_state| Some((stream_state.first_pending?, stream_state)))
            .min_by_key(|(first_pending, _)| first_pending.sequence);
        let Some((call, stream_state)) = first else {
            self.first_since = None;
            return None;
        };
        // NCCL runs the calls of a communicator one after another, whatever their streams.
        let since = match self.first_since {
            Some((sequence, since)) if sequence == call.sequence => since,
            Some(_) => now,
            None => call.since,
        };
        self.first_since = Some((call.sequence, since));
        let is_behind = stream_state
            .unreached
            .iter()
            .any(|mark| mark.covers < call.sequence && !call.issuing);
        let (stage, began, timeout) = match (call.issuing, is_behind) {
            (true, _) => (
                CallStage::Issuing,
                call.since.max(self.restarted),
                call.timeout,
            ),
            (false, true) => (
                CallStage::Queued,
                call.since.max(self.restarted),
                queue_timeout,
            ),
            (false, false) => (
                CallStage::Running,
                call.since
                    .max(stream_state.last_reached_at)
                    .max(since)
                    .max(self.restarted),
                call.timeout,
            ),
        };
        let behind = stream_state
            .unreached
            .iter()
            .filter(|mark| mark.covers >= call.sequence)
            .min_by_key(|mark| (mark.covers, mark.at));
        let is_alone =
            behind.is_some_and(|mark| mark.is_right_behind && mark.covers == call.sequence);
        let deadline = timeout.and_then(|timeout| match (stage, behind) {
            // The thread in the call enforces the timeout as well, and reports more, so it gets an eighth more time.
            (CallStage::Issuing, _) => {
                Some(began.saturating_add(timeout).saturating_add(timeout / 8))
            }
            (CallStage::Queued, _) => Some(began.saturating_add(timeout)),
            (CallStage::Running, Some(_)) if is_alone => Some(began.saturating_add(timeout)),
            // Other work may precede a mark that was put later.
            (CallStage::Running, Some(mark)) => Some(began.max(mark.at).saturating_add(timeout)),
            (CallStage::Running, None) => None,
        });
        Some(PendingCall {
            call,
            stage,
            began,
            timeout,
            deadline,
            last: behind.map_or(call.sequence, |mark| mark.covers.max(call.sequence)),
            is_alone: is_alone || stage != CallStage::Running,
        })
    }
}

/// How many calls of all streams are not done.
pub(super) fn depth<'q>(stream_states: impl Iterator<Item = &'q StreamState>) -> u64 {
    stream_states.map(|stream_state| stream_state.depth).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{ErrorKind, ErrorProperty};
    use crate::pending_call::Overdue;

    const TIMEOUT: Duration = Duration::from_secs(30);

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn call(sequence: u64, stream: u64, since: u64) -> RecordedCall {
        RecordedCall {
            sequence,
            kind: OperationKind::AllReduce,
            since: at(since),
            timeout: Some(TIMEOUT),
            stream,
            issuing: false,
        }
    }

    fn mark(covers: u64, seconds: u64, is_right_behind: bool) -> PendingMark {
        PendingMark {
            covers,
            at: at(seconds),
            is_right_behind,
        }
    }

    fn first_pending(
        tracker: &mut CallTracker,
        stream_states: &[StreamState],
        now: u64,
    ) -> PendingCall {
        tracker
            .first_pending(stream_states.iter(), Some(at(300)), at(now))
            .expect("something is pending")
    }

    #[test]
    fn a_call_behind_other_work_is_queued_and_its_timeout_counts_from_its_turn() {
        let (mut stream_state, mut tracker) = (StreamState::new(7), CallTracker::default());
        stream_state.update(&[call(1, 7, 10)], 0, at(10));
        stream_state.unreached = vec![mark(0, 10, false), mark(1, 10, true)];
        let pending_call = first_pending(&mut tracker, std::slice::from_ref(&stream_state), 200);
        assert_eq!(pending_call.stage, CallStage::Queued);
        assert_eq!(pending_call.deadline, Some(at(310)));
        assert!(pending_call.overdue(at(309)).is_none());
        let kind = pending_call.overdue(at(310)).expect("late").kind();
        assert!(matches!(kind, ErrorKind::Queued { .. }), "{kind}");
        // The work in front of it is done.
        stream_state.reached(0, at(201));
        stream_state.unreached.remove(0);
        let pending_call = first_pending(&mut tracker, std::slice::from_ref(&stream_state), 201);
        assert_eq!(
            (pending_call.stage, pending_call.began),
            (CallStage::Running, at(201))
        );
        assert_eq!(pending_call.deadline, Some(at(231)));
        let text = pending_call
            .overdue(at(232))
            .expect("late")
            .kind()
            .to_string();
        assert!(text.contains("the operation, running for 31s,"), "{text}");
    }

    #[test]
    fn the_clock_of_a_call_begins_when_the_one_before_it_ends() {
        let (mut stream_state, mut tracker) = (StreamState::new(7), CallTracker::default());
        let calls = [call(1, 7, 0), call(2, 7, 0)];
        stream_state.update(&calls, 0, at(0));
        stream_state.unreached = vec![mark(1, 0, true), mark(2, 0, true)];
        assert_eq!(
            first_pending(&mut tracker, std::slice::from_ref(&stream_state), 1)
                .call
                .sequence,
            1
        );
        stream_state.reached(1, at(20));
        stream_state.unreached.remove(0);
        stream_state.update(&calls, 0, at(20));
        let second = first_pending(&mut tracker, std::slice::from_ref(&stream_state), 20);
        assert_eq!(second.call.sequence, 2);
        assert_eq!(second.deadline, Some(at(50)));
    }

    #[test]
    fn a_call_waits_for_those_of_its_communicator_on_other_streams() {
        let (mut one, mut other, mut tracker) = (
            StreamState::new(7),
            StreamState::new(8),
            CallTracker::default(),
        );
        let calls = [call(1, 7, 0), call(2, 8, 0)];
        for stream_state in [&mut one, &mut other] {
            stream_state.update(&calls, 0, at(0));
        }
        one.unreached = vec![mark(1, 0, true)];
        other.unreached = vec![mark(2, 0, true)];
        let mut stream_states = [one, other];
        assert_eq!(
            first_pending(&mut tracker, &stream_states, 25)
                .call
                .sequence,
            1
        );
        assert_eq!(depth(stream_states.iter()), 2);
        stream_states[0].reached(1, at(25));
        stream_states[0].unreached.clear();
        stream_states[0].update(&calls, 0, at(25));
        let pending_call = first_pending(&mut tracker, &stream_states, 25);
        assert_eq!(
            (pending_call.call.sequence, pending_call.deadline),
            (2, Some(at(55)))
        );
    }

    #[test]
    fn a_call_without_a_mark_behind_it_has_no_deadline() {
        let (mut stream_state, mut tracker) = (StreamState::new(7), CallTracker::default());
        stream_state.update(&[call(1, 7, 0)], 0, at(0));
        assert!(stream_state.is_uncovered(0));
        let pending_call = first_pending(&mut tracker, std::slice::from_ref(&stream_state), 1000);
        assert_eq!(pending_call.deadline, None);
        // As after a capture of the stream: other work may be in front of the mark.
        stream_state.unreached = vec![mark(1, 1000, false)];
        assert!(!stream_state.is_uncovered(1));
        let pending_call = first_pending(&mut tracker, std::slice::from_ref(&stream_state), 1001);
        assert_eq!(pending_call.deadline, Some(at(1030)));
        let text = pending_call
            .overdue(at(1030))
            .expect("late")
            .kind()
            .to_string();
        assert!(text.contains("or what was put on its stream"), "{text}");
    }

    #[test]
    fn a_mark_covers_nothing_behind_a_call_that_is_being_made() {
        let mut stream_state = StreamState::new(7);
        let issuing = RecordedCall {
            issuing: true,
            kind: OperationKind::Replay,
            ..call(2, 7, 0)
        };
        stream_state.update(&[call(1, 7, 0), issuing, call(3, 7, 0)], 0, at(0));
        assert_eq!(stream_state.issued, 1);
        stream_state.update(&[call(1, 7, 0), issuing, call(3, 7, 0)], 1, at(1));
        let pending_call = first_pending(
            &mut CallTracker::default(),
            std::slice::from_ref(&stream_state),
            1,
        );
        assert_eq!(pending_call.stage, CallStage::Issuing);
        assert!(
            pending_call.overdue(TIMEOUT).is_none(),
            "its caller is first"
        );
        let error = pending_call.overdue(at(60)).expect("late").error();
        assert!(error.is(ErrorProperty::Inside), "{error}");
        let text = error.to_string();
        assert!(text.contains("the launch of the replay"), "{text}");
        // NCCL connects ranks in the launch, and waits for them.
        let overdue = pending_call.overdue(at(60)).expect("late");
        let error = Overdue {
            may_connect: true,
            ..overdue
        };
        assert!(!error.error().is(ErrorProperty::Inside), "{error:?}");
    }

    #[test]
    fn a_call_whose_record_was_overwritten_is_still_in_front() {
        let (mut stream_state, mut tracker) = (StreamState::new(7), CallTracker::default());
        stream_state.update(&[call(1, 7, 0)], 0, at(0));
        let later: Vec<_> = (600..1112).map(|sequence| call(sequence, 7, 5)).collect();
        stream_state.update(&later, 0, at(5));
        stream_state.unreached = vec![mark(1111, 5, false)];
        let pending_call = first_pending(&mut tracker, std::slice::from_ref(&stream_state), 5);
        assert_eq!(pending_call.call.sequence, 1);
        let error = pending_call.overdue(at(35)).expect("late").error();
        assert!(!error.is(ErrorProperty::Inside), "{error}");
        let text = error.to_string();
        assert!(text.contains("or another operation up to #1111"), "{text}");
        // A call that was seen done is forgotten; so is a call that failed.
        stream_state.update(&later, 599, at(6));
        assert_eq!(
            first_pending(&mut tracker, std::slice::from_ref(&stream_state), 6)
                .call
                .sequence,
            600
        );
        stream_state.update(&later[1..], 599, at(7));
        stream_state.update(&later, 1111, at(8));
        assert!(stream_state.is_idle());
    }

    #[test]
    fn calls_done_before_a_stream_is_watched_and_time_without_polls_do_not_count() {
        let (mut stream_state, mut tracker) = (StreamState::new(7), CallTracker::default());
        stream_state.floor = 4;
        stream_state.update(&[call(4, 7, 0), call(5, 7, 100)], 0, at(100));
        stream_state.unreached = vec![mark(4, 100, false), mark(5, 100, true)];
        let pending_call = first_pending(&mut tracker, std::slice::from_ref(&stream_state), 101);
        assert_eq!(
            (pending_call.call.sequence, pending_call.stage),
            (5, CallStage::Queued)
        );
        stream_state.unreached.remove(0);
        tracker.restart(at(1000));
        let pending_call = first_pending(&mut tracker, std::slice::from_ref(&stream_state), 1000);
        assert_eq!(pending_call.deadline, Some(at(1030)));
    }

    #[test]
    fn a_call_without_a_timeout_is_never_overdue_and_a_captured_call_does_not_run() {
        let mut stream_state = StreamState::new(7);
        let patient = RecordedCall {
            timeout: None,
            ..call(1, 7, 0)
        };
        stream_state.update(&[patient], 0, at(0));
        stream_state.unreached = vec![mark(1, 0, true)];
        let pending_call = first_pending(
            &mut CallTracker::default(),
            std::slice::from_ref(&stream_state),
            1,
        );
        assert!(pending_call.overdue(Duration::MAX).is_none());
        let captured = RecordedCall {
            kind: OperationKind::Capture,
            ..call(2, 7, 0)
        };
        stream_state.update(&[captured], 1, at(0));
        assert!(stream_state.is_idle());
    }
}
