//! A lane: the messages of one launch to or from one peer, of which the first one is posted.

use crate::nccl::communicator::Session;
use crate::transport::{CHUNK, Direction, Exchange, Posted};
use cuda_emulator::memory::{Mapping, Span};
use cuda_emulator::violations::Violation;

/// What a lane's head is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Head {
    /// Posted; the peer's half is not there, or chunks may be left.
    Open,
    /// In the peer's hands.
    Theirs,
    /// Never completes.
    Stuck,
    /// There was no message left.
    Empty,
}

/// What is wrong with a message, and with whom.
pub(super) enum Wrong {
    Own(Violation),
    Peer(Violation),
    Size { theirs: u64 },
}

/// Messages of one peer and direction.
pub(super) struct Lane {
    pub(super) peer: usize,
    pub(super) direction: Direction,
    /// The head, and one past the last message.
    pub(super) next: usize,
    pub(super) end: usize,
    pub(super) head: Head,
    /// Number of the head between the two ranks.
    pub(super) number: u64,
    pub(super) span: Span,
}

impl Lane {
    pub(super) fn exchange<'a>(&self, session: &'a Session) -> &'a Exchange {
        let own = session.rank;
        match self.direction {
            Direction::Send => session.segment.exchange(own, self.peer),
            Direction::Receive => session.segment.exchange(self.peer, own),
        }
    }

    /// How the peer sees this lane.
    pub(super) fn opposite(&self) -> Direction {
        match self.direction {
            Direction::Send => Direction::Receive,
            Direction::Receive => Direction::Send,
        }
    }

    pub(super) fn chunks(&self) -> u32 {
        self.span.len.div_ceil(CHUNK).max(1) as u32
    }

    /// Posts the head, which is the message of this span.
    pub(super) fn post(&mut self, session: &Session, span: Span) {
        self.span = span;
        let side = session.segment.side(session.rank, self.peer);
        self.number = side.last(self.direction) + 1;
        self.head = Head::Open;
        side.post(self.direction, self.number, &self.span);
    }

    pub(super) fn peer_half(&self, session: &Session) -> Posted {
        session
            .segment
            .side(self.peer, session.rank)
            .posted(self.opposite())
    }

    /// The head, compared with what the peer has posted.
    pub(super) fn compare(&self, session: &Session) -> std::cmp::Ordering {
        let side = session.segment.side(self.peer, session.rank);
        side.compare(self.opposite(), self.number)
    }

    /// Whether a message waits for the head to be done.
    pub(super) fn has_successor(&self) -> bool {
        matches!(self.head, Head::Open | Head::Theirs) && self.next + 1 < self.end
    }
}

/// Where a span lies in this process, if it may be used now; nothing lies anywhere.
pub(super) fn view(pool: &Mapping, span: &Span) -> Result<*mut u8, Violation> {
    if span.len == 0 {
        Ok(std::ptr::dangling_mut())
    } else {
        pool.view(span)
    }
}

/// Whether a span may still be used.
pub(super) fn still_valid(pool: &Mapping, span: &Span) -> Result<(), Violation> {
    if span.len == 0 {
        Ok(())
    } else {
        pool.still_valid(span)
    }
}

/// The head, for messages.
pub(super) fn describe(lane: &Lane) -> String {
    match lane.direction {
        Direction::Send => format!("Send of {} bytes to rank {}", lane.span.len, lane.peer),
        Direction::Receive => format!("Recv of {} bytes from rank {}", lane.span.len, lane.peer),
    }
}
