//! A lane: the messages of one launch to or from one peer, of which the first one is posted.

use crate::nccl::communicator::Session;
use crate::transport::{CHUNK, Direction, Exchange, Posted};
use cuda_emulator::memory::{Mapping, Span};
use cuda_emulator::violations::Violation;

/// The state of a lane's head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Head {
    /// Posted; the peer has not posted its half, or chunks may be left.
    Open,
    /// The peer copies the rest.
    Theirs,
    /// Never completes.
    Stuck,
    /// Never completes, because the peer has given it up or its process has ended.
    Abandoned,
    /// No message is left.
    Empty,
}

/// The fault of a message, by the end that caused it.
pub(super) enum Wrong {
    Own(Violation),
    Peer(Violation),
    Size { theirs: u64 },
}

/// Messages of one peer and direction.
pub(super) struct Lane {
    pub(super) peer: usize,
    pub(super) direction: Direction,
    /// The indices of the head and one past the last message.
    pub(super) next: usize,
    pub(super) end: usize,
    pub(super) head: Head,
    /// The number of the head between the two ranks.
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

    /// Returns the direction of this lane as seen by the peer.
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

    /// Compares the head with the peer's last posted message.
    pub(super) fn compare(&self, session: &Session) -> std::cmp::Ordering {
        let side = session.segment.side(self.peer, session.rank);
        side.compare(self.opposite(), self.number)
    }

    /// Whether only the peer can move the head on.
    pub(super) fn awaits_peer(&self, session: &Session) -> bool {
        match self.head {
            Head::Open => self.compare(session) == std::cmp::Ordering::Greater,
            Head::Theirs | Head::Abandoned => !self.exchange(session).is_done(self.number),
            Head::Stuck | Head::Empty => false,
        }
    }

    /// Whether a message waits for the head to be done.
    pub(super) fn has_successor(&self) -> bool {
        matches!(self.head, Head::Open | Head::Theirs) && self.next + 1 < self.end
    }
}

/// Returns the address of a span in this process, if it may be used now. An empty span has a
/// dangling address.
pub(super) fn view(pool: &Mapping, span: &Span) -> Result<*mut u8, Violation> {
    if span.len == 0 {
        Ok(std::ptr::dangling_mut())
    } else {
        pool.view(span)
    }
}

/// Checks that a span may still be used.
pub(super) fn still_valid(pool: &Mapping, span: &Span) -> Result<(), Violation> {
    if span.len == 0 {
        Ok(())
    } else {
        pool.still_valid(span)
    }
}

/// Describes the head for messages.
pub(super) fn describe(lane: &Lane) -> String {
    match lane.direction {
        Direction::Send => format!("Send of {} bytes to rank {}", lane.span.len, lane.peer),
        Direction::Receive => format!("Recv of {} bytes from rank {}", lane.span.len, lane.peer),
    }
}
