//! The first call of a communicator that is not done, and the error if it is overdue. The watchdog determines both; a request
//! for the call reports the same error.

use std::time::Duration;

use crate::error::{Error, ErrorKind, ErrorProperty};
use crate::operation::{OperationKind, Shape};
use crate::recorder::RecordedCall;

/// The state of a call that is not done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub enum CallStage {
    /// NCCL, or the launch of a graph, has not returned.
    Issuing,
    /// The call waits for its turn on its stream.
    Queued,
    /// No known work is in front of it.
    Running,
}

/// The first call of a communicator that is not done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PendingCall {
    pub(crate) call: RecordedCall,
    pub(crate) stage: CallStage,
    /// When that state began, as far as known.
    pub(crate) began: Duration,
    /// The maximum duration of that state; `None` for no limit.
    pub(crate) timeout: Option<Duration>,
    /// When that duration ends. `None` for no limit, and while no mark can show the call's progress.
    pub(crate) deadline: Option<Duration>,
    /// The last of the calls that cannot be distinguished from it.
    pub(crate) last: u64,
    /// Whether the call can be distinguished from all other work on the stream.
    pub(crate) is_alone: bool,
}

impl PendingCall {
    /// A call about which only its issue is known.
    pub(crate) fn of_new(call: RecordedCall) -> Self {
        Self {
            call,
            stage: CallStage::Issuing,
            began: call.since,
            timeout: call.timeout,
            deadline: call
                .timeout
                .map(|timeout| call.since.saturating_add(timeout)),
            last: call.sequence,
            is_alone: true,
        }
    }

    /// Returns the call if it is overdue, judged without polling it.
    pub(crate) fn overdue_without_poll(&self, now: Duration) -> Option<Overdue> {
        let deadline = self.deadline_without_poll();
        Self { deadline, ..*self }.overdue(now)
    }

    fn deadline_without_poll(&self) -> Option<Duration> {
        let deadline = self
            .timeout
            .map(|timeout| self.began.saturating_add(timeout));
        self.deadline.or(deadline)
    }

    /// Whether this call's deadline is before the other's.
    pub(crate) fn ends_before(&self, other: &Self) -> bool {
        match (self.deadline_without_poll(), other.deadline_without_poll()) {
            (Some(this), Some(other)) => this < other,
            (this, None) => this.is_some(),
            (None, _) => false,
        }
    }

    /// Returns the call if it is overdue.
    pub(crate) fn overdue(&self, now: Duration) -> Option<Overdue> {
        let late = self.deadline.is_some_and(|deadline| now >= deadline);
        late.then_some(Overdue {
            pending_call: *self,
            waited: now.saturating_sub(self.began),
            shape: Shape::default(),
            may_connect: false,
            stuck: None,
        })
    }
}

/// An overdue call, and why its communicator is ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Overdue {
    pub(crate) pending_call: PendingCall,
    pub(crate) waited: Duration,
    /// The shape of the call, as far as its record was kept.
    pub(crate) shape: Shape,
    /// Whether NCCL may connect ranks in the call, and so wait for them.
    pub(crate) may_connect: bool,
    /// The call in which the watchdog is stuck, and for how long.
    pub(crate) stuck: Option<(&'static str, Duration)>,
}

impl Overdue {
    /// The number of the call.
    pub(crate) fn sequence(&self) -> u64 {
        self.pending_call.call.sequence
    }

    pub(crate) fn call(&self) -> RecordedCall {
        self.pending_call.call
    }

    /// The error of the call.
    pub(crate) fn error(&self) -> Error {
        let error = Error::new(self.kind());
        let is_inside = match self.pending_call.stage {
            CallStage::Queued => false,
            CallStage::Issuing if !self.may_connect => true,
            CallStage::Issuing | CallStage::Running => self.stuck.is_some(),
        };
        match is_inside {
            true => error.with_property(ErrorProperty::Inside),
            false => error,
        }
    }

    pub(crate) fn kind(&self) -> ErrorKind {
        let PendingCall {
            call,
            stage,
            timeout,
            last,
            is_alone,
            ..
        } = self.pending_call;
        let timeout = timeout.unwrap_or(Duration::MAX);
        // Milliseconds are precise enough.
        let waited = Duration::from_millis(u64::try_from(self.waited.as_millis()).unwrap_or(0));
        let what = match call.kind {
            OperationKind::Replay => "the replay",
            _ => "the operation",
        };
        let mut text = match stage {
            CallStage::Queued => {
                return ErrorKind::Queued {
                    what,
                    waited,
                    timeout,
                };
            }
            CallStage::Issuing if call.kind == OperationKind::Replay => {
                format!("the launch of the replay, under way for {waited:?},")
            }
            CallStage::Issuing => format!("the call into NCCL, under way for {waited:?},"),
            CallStage::Running if is_alone => format!("{what}, running for {waited:?},"),
            CallStage::Running if last == call.sequence => format!(
                "{what}, or what was put on its stream right behind it, running for {waited:?},"
            ),
            CallStage::Running => format!(
                "{what}, or another operation up to #{last} or other work put on the stream at about the \
                 same time, running for {waited:?},"
            ),
        };
        if let Some((call, since)) = self.stuck {
            let since = Duration::from_millis(u64::try_from(since.as_millis()).unwrap_or(0));
            text.push_str(&format!(
                " whose progress could not be queried because {call} has not returned for {since:?},"
            ));
        }
        ErrorKind::TimedOut {
            what: text,
            timeout,
        }
    }
}
