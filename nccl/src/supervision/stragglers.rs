//! Who has not entered an operation in which this rank waits, a rank's part: when to ask, and what to answer.
//!
//! The watchdog does both, and nothing is on the way of an operation. It suspects somebody when a collective has
//! run for a tenth of its limit ([`Timeouts::straggler`](crate::Timeouts::straggler)), and says so to the coordinator
//! ([`inquiry`](crate::rendezvous)), which asks each rank once. What a rank answers comes from what its communicator
//! has recorded and counted anyway; one that has not entered is looked at until it has. Ranks at higher places
//! wait up to a quarter longer before they suspect anybody, so that mostly one of them asks, and whoever was asked
//! about an operation does not ask.
//!
//! The first rank also asks every half minute about one that is done, to know how far apart the ranks come
//! ([`CommunicatorStats::arrival_skew`](crate::CommunicatorStats)).

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::board::Board;
use crate::communicator::{State, Visit};
use crate::rendezvous::{Attendance, Line, Subject, Suspicion};
use crate::supervision::recorder::{Track, Turn, Turns, origin};

/// How often the first rank of a communicator asks how far apart the ranks come; and how long before it does so for
/// the first time.
pub(super) const SAMPLES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];

/// How often one that has not entered is looked at.
const PAUSES: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(50)];

/// An operation that others wait in, and of which this rank was asked whether it has entered it.
pub(super) struct Inquired {
    line: Weak<Line>,
    /// There is none when this rank has no such communicator.
    board: Option<Weak<Board>>,
    key: String,
    turn: u64,
    is_sample: bool,
    has_answered: bool,
    /// When to look again.
    pub(super) next: Instant,
    pause: Duration,
}

impl Inquired {
    pub(super) fn new(
        line: &Weak<Line>,
        board: Option<Weak<Board>>,
        key: &str,
        turn: u64,
        is_sample: bool,
    ) -> Self {
        Self {
            line: Weak::clone(line),
            board,
            key: key.to_owned(),
            turn,
            is_sample,
            has_answered: false,
            next: Instant::now(),
            pause: PAUSES[0],
        }
    }

    /// Whether both are about one communicator of one rank.
    pub(super) fn is_about(&self, other: &Self) -> bool {
        self.key == other.key && Weak::ptr_eq(&self.line, &other.line)
    }

    /// Answers what can be answered. Whether it is to be looked at again.
    pub(super) fn look(&mut self) -> bool {
        let Some(line) = self.line.upgrade() else {
            return false;
        };
        self.next = Instant::now() + self.pause;
        self.pause = (self.pause * 2).min(PAUSES[1]);
        let board = self.board.as_ref().map(Weak::upgrade);
        let board = match board {
            Some(Some(board)) => board,
            // Gone meanwhile, or not there.
            Some(None) | None => {
                self.not_yet(&line, "it has no such communicator");
                return false;
            }
        };
        let Some(inner) = board.target().as_ref().and_then(Visit::of) else {
            self.not_yet(&line, "it is about to make the communicator");
            return !self.is_sample;
        };
        if inner.phase.get() != State::Ready {
            return false;
        }
        let track = inner.tracked.track();
        let Some(turns) = track.turns() else {
            return true;
        };
        if turns.called < self.turn {
            self.not_yet(&line, &last(track, &turns));
            return !self.is_sample;
        }
        let turn = turns.get(self.turn);
        match (turn, self.is_sample) {
            // What is not known in full is no sample.
            (None, true) => self.not_yet(&line, ""),
            (turn, _) => {
                let since = turn.or(turns.newest_first().last().map(|(_, turn)| turn));
                let age = since.map_or(Duration::ZERO, |turn| age(turn.since));
                self.answer(&line, Some(age), "");
            }
        }
        if !self.is_sample {
            board.was_asked_about(self.turn);
        }
        false
    }

    /// Says so once.
    fn not_yet(&mut self, line: &Line, last: &str) {
        if !self.has_answered {
            self.answer(line, None, last);
        }
    }

    fn answer(&mut self, line: &Line, entered: Option<Duration>, last: &str) {
        self.has_answered = true;
        line.attends(Attendance {
            key: self.key.clone(),
            turn: self.turn,
            entered,
            last: last.to_owned(),
        });
    }
}

fn age(since: Duration) -> Duration {
    origin().monotonic.elapsed().saturating_sub(since)
}

/// What a communicator did last, for those who wait for it.
fn last(track: &Track, turns: &Turns) -> String {
    let Some(last) = turns.last else {
        return String::from("it has called nothing on the communicator");
    };
    let state = match track.done_on(last.stream) >= last.number {
        true => "which is done",
        false => "not known to be done",
    };
    format!(
        "its last call was {} #{}, {:.1} s ago, {state}",
        last.kind,
        last.number,
        age(last.since).as_secs_f64()
    )
}

/// Asks who has not entered a call of this rank, if that can be told; whether it could.
pub(super) fn ask(board: &Arc<Board>, track: &Track, number: u64) -> bool {
    let Some(turns) = track.turns() else {
        return false;
    };
    let Some((turn, call)) = turns.of(number).and_then(|turn| {
        let call = turns.get(turn)?;
        Some((turn, *call))
    }) else {
        return true;
    };
    if !board.is_asked_about(turn) {
        say(board, turn, &call, false);
    }
    true
}

/// Asks how far apart the ranks entered the last collective that is done; whether there was one.
pub(super) fn sample(board: &Arc<Board>, track: &Track) -> bool {
    let Some(turns) = track.turns() else {
        return false;
    };
    let mut newest = turns.newest_first();
    let done = newest.find(|(_, turn)| turn.number <= track.done_on(turn.stream));
    let Some((turn, call)) = done else {
        return false;
    };
    say(board, turn, call, true);
    true
}

fn say(board: &Arc<Board>, turn: u64, call: &Turn, is_sample: bool) {
    let (line, members) = board.line();
    let everybody = members.iter().copied().eq(0..line.size());
    line.suspect(Suspicion {
        subject: Subject {
            key: board.key().to_owned(),
            name: board.name().to_owned(),
            turn,
            kind: call.kind,
            sequence: call.number,
        },
        members: match everybody {
            true => Vec::new(),
            false => members.to_vec(),
        },
        since: age(call.since),
        is_sample,
    });
}
