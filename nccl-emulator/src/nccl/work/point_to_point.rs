//! The messages of a launch: sends and receives, and the all-to-all that consists of them.
//!
//! The messages to or from one peer form a lane, and run one after the other; lanes are independent.
//! The head of every lane is posted at once. From then on this rank looks for
//! lanes whose other half is posted too, claims them one at a time, and copies. The peers do the
//! same, so that two ranks with a core each share the work of an all-to-all, and the chunks of a
//! large message. A message that a peer completes is counted in `delivered`, so a waiting rank has to
//! look only there.
//!
//! The head of a peer that died is still posted. Nobody may complete it, so a launch begins with a look for lost peers.

use std::sync::atomic::Ordering;

use super::lane::{Head, Lane, Wrong, still_valid, view};
use super::scope::{Outcome, Scope};
use crate::nccl::communicator::Session;
use crate::nccl::task::MessageTask;
use crate::options::options;
use crate::transport::{self, CHUNK, Claim, Direction, Posted, busy, prefetch};
use cuda_emulator::memory::Span;
use cuda_emulator::violations::Violation;

/// The number of chunks from which on a message wakes a sleeping peer, so that the peer helps.
const WORTH_WAKING: u32 = 4;

/// The number of lanes whose cache lines are prefetched.
const FETCHED: usize = 8;

/// See the module.
#[derive(Default)]
pub(super) struct PointToPoint {
    pub(super) lanes: Vec<Lane>,
    begun: bool,
    /// The progress of the messages to the own rank.
    own: OwnMessages,
    /// The value of `delivered` before this launch, and its expected increase.
    delivered_before: u64,
    expected: u64,
    /// Messages that this rank completed itself.
    completed: u64,
    /// The last seen value of the rank's `attention`.
    attention: u32,
    copying: Option<Copying>,
    /// A peer, and the number of its completed messages that it was not told of yet.
    owed: (usize, u64),
}

#[derive(Default)]
struct OwnMessages {
    first_send: usize,
    first_receive: usize,
    count: usize,
    next: usize,
    copied: u64,
}

/// A part of a message that this rank is copying.
struct Copying {
    lane: usize,
    from: *const u8,
    to: *mut u8,
    left: usize,
    peer_span: Span,
}

// SAFETY: the pointers are into pools that the session keeps mapped, and are used by one executor
// at a time.
unsafe impl Send for Copying {}

impl PointToPoint {
    /// Creates an empty value. `lanes` is empty and only gives its capacity.
    pub(super) fn new(lanes: Vec<Lane>) -> Self {
        Self {
            lanes,
            ..Self::default()
        }
    }

    /// Whether all messages are complete.
    pub(super) fn are_complete(&self, session: &Session) -> bool {
        let mut posted = self.lanes.iter().filter(|lane| lane.head != Head::Empty);
        posted.all(|lane| lane.next + 1 == lane.end && lane.exchange(session).is_done(lane.number))
    }

    /// Gives up the messages that are not complete.
    pub(super) fn withdraw(&mut self, session: &Session) {
        self.copying = None;
        for lane in self.lanes.iter().filter(|lane| lane.head != Head::Empty) {
            lane.exchange(session).withdraw(lane.number);
        }
    }

    /// Takes the lanes, for their capacity.
    pub(super) fn take_lanes(&mut self) -> Vec<Lane> {
        std::mem::take(&mut self.lanes)
    }

    /// Makes one bounded step.
    pub(super) fn step(
        &mut self,
        scope: &Scope<'_>,
        messages: &[MessageTask],
        budget: usize,
    ) -> Outcome {
        if messages.is_empty() {
            return Outcome::Done;
        }
        let mut budget = budget.max(1);
        let block = scope.session.own();
        if !self.begun {
            self.begun = true;
            self.attention = block.attention.load(Ordering::SeqCst);
            self.delivered_before = block.delivered.load(Ordering::SeqCst);
            if let Err(violation) = self.begin(scope, messages) {
                return scope.fail(violation, "a send or receive");
            }
        }
        if block.attention.load(Ordering::SeqCst) != self.attention {
            self.attention = block.attention.load(Ordering::SeqCst);
            if let Some(outcome) = self.look_for_spoiled(scope) {
                return outcome;
            }
        }
        let mut moved = false;
        if let Some(copying) = self.copying.take() {
            moved = true;
            if let Some(outcome) = self.continue_copy(scope, messages, copying, &mut budget) {
                return outcome;
            }
        }
        while self.copying.is_none() && budget > 0 {
            match self.copy_own(scope, messages, &mut budget) {
                Ok(true) => moved = true,
                Ok(false) => break,
                Err(violation) => return scope.fail(violation, "a message to itself"),
            }
        }
        for at in 0..self.lanes.len() {
            // `is_done` sees the peers' progress without a look at each exchange.
            if self.copying.is_some() || budget == 0 || self.is_done(scope) {
                break;
            }
            match self.try_lane(scope, messages, at, &mut budget) {
                None => {}
                Some(Outcome::Progress) => moved = true,
                Some(other) => {
                    self.pay(scope);
                    return other;
                }
            }
        }
        self.pay(scope);
        if self.copying.is_some() || moved {
            return if self.is_done(scope) {
                Outcome::Done
            } else {
                Outcome::Progress
            };
        }
        self.wait(scope)
    }

    /// Whether the messages have begun.
    pub(super) fn has_begun(&self) -> bool {
        self.begun
    }

    /// Whether a message of the rank to itself is over, by its index.
    pub(super) fn own_is_over(&self, at: usize, direction: Direction) -> bool {
        let first = match direction {
            Direction::Send => self.own.first_send,
            Direction::Receive => self.own.first_receive,
        };
        at < first + self.own.next
    }

    /// Makes the lanes and posts the head of each.
    fn begin(&mut self, scope: &Scope<'_>, messages: &[MessageTask]) -> Result<(), Violation> {
        let own = scope.session.rank;
        let mut at = 0;
        // Messages are sorted: those of a lane are neighbours.
        for lane in messages.chunk_by(|a, b| a.peer == b.peer && a.direction == b.direction) {
            let (peer, direction) = (lane[0].peer as usize, lane[0].direction);
            let next = at;
            at += lane.len();
            if peer == own {
                match direction {
                    Direction::Send => self.own.first_send = next,
                    Direction::Receive => self.own.first_receive = next,
                }
                self.own.count = lane.len();
                continue;
            }
            self.expected += lane.len() as u64;
            let span = Span {
                index: 0,
                generation: 0,
                offset: 0,
                len: 0,
            };
            self.lanes.push(Lane {
                peer,
                direction,
                next,
                end: at,
                head: Head::Open,
                number: 0,
                span,
            });
        }
        // The second rank of a pair needs these lines, and the peer's core has had them since the last
        // message.
        for lane in self.lanes.iter().take(FETCHED) {
            prefetch::to_write(lane.exchange(scope.session));
            prefetch::to_write(scope.session.segment.side(own, lane.peer));
            prefetch::to_read(scope.session.segment.side(lane.peer, own));
        }
        let is_lost = scope.session.is_lost();
        for lane in &mut self.lanes {
            let message = &messages[lane.next];
            let span = scope
                .resolve(message.address, message.bytes)
                .map_err(|violation| violation.during(message.function.name()))?;
            lane.post(scope.session, span);
            if !options().late_writes && is_lost(lane.peer) {
                lane.head = Head::Abandoned;
            }
        }
        Ok(())
    }

    /// Copies some of the messages to the own rank. Returns false when none is left.
    fn copy_own(
        &mut self,
        scope: &Scope<'_>,
        messages: &[MessageTask],
        budget: &mut usize,
    ) -> Result<bool, Violation> {
        let own = &mut self.own;
        if own.next == own.count {
            return Ok(false);
        }
        let (send, receive) = (
            &messages[own.first_send + own.next],
            &messages[own.first_receive + own.next],
        );
        if send.address != receive.address {
            let bytes = send.bytes.min(receive.bytes);
            let (from, to) = (
                scope.resolve(send.address, bytes)?,
                scope.resolve(receive.address, bytes)?,
            );
            let pool = scope.session.pool(scope.session.rank);
            let (source, destination) = (view(pool, &from)?, view(pool, &to)?);
            let n = (bytes - own.copied).min(*budget as u64) as usize;
            // SAFETY: both views are valid for `bytes` bytes.
            unsafe {
                let at = own.copied as usize;
                transport::copy(source.add(at), destination.add(at), n);
            }
            *budget -= n;
            own.copied += n as u64;
            if own.copied < bytes {
                return Ok(true);
            }
            still_valid(pool, &from)?;
            still_valid(pool, &to)?;
        }
        own.copied = 0;
        own.next += 1;
        Ok(true)
    }

    /// Moves the head of a lane, if possible now.
    fn try_lane(
        &mut self,
        scope: &Scope<'_>,
        messages: &[MessageTask],
        at: usize,
        budget: &mut usize,
    ) -> Option<Outcome> {
        let lane = &mut self.lanes[at];
        match lane.head {
            Head::Empty | Head::Stuck | Head::Abandoned => None,
            Head::Theirs => {
                // The last message of a lane needs no check: it is counted in `delivered`.
                if !lane.has_successor() || !lane.exchange(scope.session).is_done(lane.number) {
                    return None;
                }
                Some(self.advance(scope, messages, at))
            }
            Head::Open => {
                let (session, exchange) = (scope.session, lane.exchange(scope.session));
                match lane.compare(session) {
                    std::cmp::Ordering::Greater => return None,
                    // The peer has completed the message and posted a later one.
                    std::cmp::Ordering::Less if exchange.is_done(lane.number) => {
                        return Some(self.advance(scope, messages, at));
                    }
                    // Or it has given the message up.
                    std::cmp::Ordering::Less | std::cmp::Ordering::Equal => {}
                }
                session
                    .segment
                    .set_busy(session.rank, busy::with(lane.peer));
                let claim = exchange.claim(lane.number, lane.chunks());
                if !matches!(claim, Claim::Chunk(_)) {
                    session.segment.set_busy(session.rank, busy::IDLE);
                }
                match claim {
                    Claim::Theirs => {
                        lane.head = Head::Theirs;
                        None
                    }
                    Claim::Spoiled(why) => self.spoiled(scope, at, why),
                    Claim::Chunk(chunk) => match self.prepare(scope, at, chunk) {
                        Ok(copying) => Some(
                            self.continue_copy(scope, messages, copying, budget)
                                .unwrap_or(Outcome::Progress),
                        ),
                        Err(wrong) => {
                            session.segment.set_busy(session.rank, busy::IDLE);
                            self.report(scope, at, wrong)
                        }
                    },
                }
            }
        }
    }

    /// Checks both halves of a message of which this rank holds a chunk.
    fn prepare(&self, scope: &Scope<'_>, at: usize, chunk: u32) -> Result<Copying, Wrong> {
        let lane = &self.lanes[at];
        let Posted(peer_span) = lane.peer_half(scope.session);
        if peer_span.len != lane.span.len {
            return Err(Wrong::Size {
                theirs: peer_span.len,
            });
        }
        let own = view(scope.session.pool(scope.session.rank), &lane.span).map_err(Wrong::Own)?;
        let peer = view(scope.session.pool(lane.peer), &peer_span).map_err(Wrong::Peer)?;
        let (from, to) = match lane.direction {
            Direction::Send => (own, peer),
            Direction::Receive => (peer, own),
        };
        let start = u64::from(chunk) * CHUNK;
        let part = CHUNK.min(lane.span.len - start);
        if chunk == 0 && lane.chunks() >= WORTH_WAKING {
            scope.session.segment.block(lane.peer).bell.ring();
        }
        // SAFETY: both views are valid for the message's length, and `start` is inside of it.
        let (from, to) = unsafe {
            (
                from.add(start as usize).cast_const(),
                to.add(start as usize),
            )
        };
        Ok(Copying {
            lane: at,
            from,
            to,
            left: part as usize,
            peer_span,
        })
    }

    /// Copies as much as the budget allows. Returns an outcome only for a fault.
    fn continue_copy(
        &mut self,
        scope: &Scope<'_>,
        messages: &[MessageTask],
        mut copying: Copying,
        budget: &mut usize,
    ) -> Option<Outcome> {
        let n = copying.left.min(*budget);
        // SAFETY: the part was inside of both views when it was taken, and the pools stay mapped;
        // whether the memory still belongs to the message is checked when the part is complete.
        unsafe { transport::copy(copying.from, copying.to, n) };
        *budget -= n;
        copying.left -= n;
        if copying.left > 0 {
            // SAFETY: `n` bytes further is still inside of the part.
            (copying.from, copying.to) = unsafe { (copying.from.add(n), copying.to.add(n)) };
            self.copying = Some(copying);
            return None;
        }
        let at = copying.lane;
        let lane = &self.lanes[at];
        let session = scope.session;
        let own = still_valid(session.pool(session.rank), &lane.span).map_err(Wrong::Own);
        let valid = own.and_then(|()| {
            still_valid(session.pool(lane.peer), &copying.peer_span).map_err(Wrong::Peer)
        });
        // After the check: a peer that has given the message up may free its memory now.
        session.segment.set_busy(session.rank, busy::IDLE);
        if let Err(wrong) = valid {
            return self.report(scope, at, wrong);
        }
        if !lane.exchange(session).finish(lane.number, lane.chunks()) {
            return None;
        }
        let (peer, more, bytes) = (lane.peer, lane.next + 1 < lane.end, lane.span.len);
        if self.owed.0 != peer {
            self.pay(scope);
            self.owed.0 = peer;
        }
        self.owed.1 += 1;
        if more || bytes >= CHUNK {
            self.pay(scope);
        }
        self.completed += 1;
        match self.advance(scope, messages, at) {
            Outcome::Progress => None,
            other => Some(other),
        }
    }

    /// Tells a peer of the messages that this rank completed for it.
    pub(super) fn pay(&mut self, scope: &Scope<'_>) {
        let (peer, messages) = self.owed;
        if messages > 0 {
            self.owed.1 = 0;
            scope.session.segment.deliver(peer, messages);
        }
    }

    /// Posts the next message of a lane whose head is done.
    fn advance(&mut self, scope: &Scope<'_>, messages: &[MessageTask], at: usize) -> Outcome {
        let lane = &mut self.lanes[at];
        lane.next += 1;
        if lane.next == lane.end {
            lane.head = Head::Empty;
            return Outcome::Progress;
        }
        let message = &messages[lane.next];
        match scope.resolve(message.address, message.bytes) {
            Ok(span) => {
                lane.post(scope.session, span);
                Outcome::Progress
            }
            Err(violation) => scope.fail(violation, message.function.name()),
        }
    }

    fn delivered(&self, scope: &Scope<'_>) -> u64 {
        scope
            .session
            .own()
            .delivered
            .load(Ordering::SeqCst)
            .wrapping_sub(self.delivered_before)
    }

    fn is_done(&self, scope: &Scope<'_>) -> bool {
        self.own.next == self.own.count && self.completed + self.delivered(scope) == self.expected
    }

    /// Prepares to block: sets the value at which the bell rings, and checks once more.
    fn wait(&mut self, scope: &Scope<'_>) -> Outcome {
        if self.is_done(scope) {
            return Outcome::Done;
        }
        let successors = self.lanes.iter().any(Lane::has_successor);
        let seen = self.delivered(scope);
        let missing = if successors {
            seen + 1
        } else {
            self.expected - self.completed
        };
        let wake_at = &scope.session.own().wake_at;
        let value = self.delivered_before.wrapping_add(missing);
        if wake_at.load(Ordering::Relaxed) != value {
            wake_at.store(value, Ordering::SeqCst);
            if self.delivered(scope) != seen {
                return Outcome::Progress;
            }
        }
        Outcome::Blocked
    }
}
