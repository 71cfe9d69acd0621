//! One stream of frames, written from any thread, read by one.
//!
//! Writing never waits: what the system does not take is kept, and goes out when there is room. A peer
//! that takes nothing is bounded by [`LARGEST_BACKLOG`].

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use super::acknowledged::Acknowledged;
use super::frame::{Decoder, Frame, HEADER, LARGEST_FRAME, Outgoing};
use super::reactor::{EventFlags, Reactor, poll};
use crate::sync::Mutex;

/// The most bytes that wait for one peer: it has not read several of the largest answers.
const LARGEST_BACKLOG: usize = 4 * LARGEST_FRAME;

/// How much is read for one connection before others have their turn.
const TURN: usize = 256 << 10;

pub(super) struct Connection {
    socket: OwnedFd,
    out: Mutex<Out>,
    token: OnceLock<u64>,
    acknowledged: Acknowledged,
}

#[derive(Default)]
struct Out {
    queue: VecDeque<Outgoing>,
    /// How much of the first frame is written.
    written: usize,
    bytes: usize,
    /// Whether the reactor tells when there is room.
    armed: bool,
    failed: Option<io::ErrorKind>,
    /// What the system said to a write. It says so once, to whoever asks first; then a reader sees a plain end.
    error: Option<Errno>,
}

/// What reading came to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Received {
    /// All that there is for now.
    Some,
    /// The peer sends no more.
    End,
}

impl Connection {
    /// `socket` does not block.
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self {
            socket,
            out: Mutex::default(),
            token: OnceLock::new(),
            acknowledged: Acknowledged::default(),
        }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The reactor reads it from now on.
    pub(super) fn set_token(&self, token: u64) {
        let _ = self.token.set(token);
    }

    /// Keeps a frame for [`flush`](Self::flush).
    pub(super) fn enqueue(&self, frame: Outgoing) {
        let mut out = self.out.lock();
        if out.failed.is_some() {
            return;
        }
        out.bytes += frame.len();
        out.queue.push_back(frame);
        if out.bytes > LARGEST_BACKLOG {
            out.fail(io::ErrorKind::StorageFull);
            drop(out);
            self.shut();
        }
    }

    /// Writes what the system takes.
    pub(super) fn flush(&self) -> io::Result<()> {
        let mut out = self.out.lock();
        if let Some(kind) = out.failed {
            return Err(kind.into());
        }
        while let Some(first) = out.queue.front() {
            let written = out.written;
            let rest = if written < HEADER {
                // Head and payload as one piece where that is cheap; small frames are most.
                if first.payload.len() <= 8192 {
                    let mut whole = Vec::with_capacity(16384);
                    for frame in out.queue.iter().take(64) {
                        if frame.payload.len() > 8192 || whole.len() > 16384 {
                            break;
                        }
                        whole.extend_from_slice(&frame.head);
                        whole.extend_from_slice(&frame.payload);
                    }
                    rustix::net::send(&self.socket, &whole[written..], SendFlags::NOSIGNAL)
                } else {
                    let flags = SendFlags::NOSIGNAL | SendFlags::MORE;
                    rustix::net::send(&self.socket, &first.head[written..], flags)
                }
            } else {
                let payload = &first.payload[written - HEADER..];
                rustix::net::send(&self.socket, payload, SendFlags::NOSIGNAL)
            };
            match rest {
                Ok(count) => out.advance(count),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(error) => {
                    out.error = Some(error);
                    let error = io::Error::from(error);
                    out.fail(error.kind());
                    return Err(error);
                }
            }
        }
        let wanted = !out.queue.is_empty();
        if wanted != out.armed
            && let (Some(&token), Ok(reactor)) = (self.token.get(), Reactor::get())
        {
            out.armed = wanted;
            let mut events = EventFlags::IN | EventFlags::RDHUP;
            events.set(EventFlags::OUT, wanted);
            reactor.modify(&self.socket, token, events);
        }
        Ok(())
    }

    /// As [`flush`](Self::flush); a failure shows on the reading side, too.
    pub(super) fn flush_quietly(&self) {
        if self.flush().is_err() {
            self.shut();
        }
    }

    /// Writes what the system takes, and remembers when: for [`unacknowledged_for`](Self::unacknowledged_for).
    pub(super) fn flush_and_mark(&self, now: Instant) {
        self.flush_quietly();
        self.acknowledged.mark(&self.socket, now);
    }

    /// For how long the host at the other end has not acknowledged what was sent to it, if that is too long.
    pub(super) fn unacknowledged_for(&self, now: Instant) -> Option<Duration> {
        self.acknowledged.missing_for(&self.socket, now)
    }

    /// Waits until all is written, at most until `deadline`; for those who are not the reactor.
    pub(super) fn drain(&self, deadline: Instant) -> io::Result<()> {
        loop {
            self.flush()?;
            if self.out.lock().queue.is_empty() {
                return Ok(());
            }
            if !poll(&self.socket, PollFlags::OUT, deadline)? {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
    }

    pub(super) fn has_backlog(&self) -> bool {
        let out = self.out.lock();
        out.failed.is_none() && !out.queue.is_empty()
    }

    /// Reads what is there, a turn's worth at most.
    pub(super) fn receive(&self, decoder: &mut Decoder) -> io::Result<Received> {
        let mut buffer = [0; 32 << 10];
        let mut taken = 0;
        while taken < TURN {
            match rustix::net::recv(&self.socket, &mut buffer, RecvFlags::empty()) {
                Ok((0, _)) => return self.end(),
                Ok((count, _)) => {
                    decoder.push(&buffer[..count]);
                    taken += count;
                    if count < buffer.len() {
                        return Ok(Received::Some);
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(Received::Some),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Received::Some)
    }

    /// The end of what can be read: because the peer sends no more, or why a write failed before.
    fn end(&self) -> io::Result<Received> {
        match self.out.lock().error {
            // The peer is gone, which is an end.
            None | Some(Errno::PIPE | Errno::CONNRESET) => Ok(Received::End),
            Some(error) => Err(error.into()),
        }
    }

    /// One frame, for those who are not the reactor.
    pub(super) fn expect(&self, decoder: &mut Decoder, deadline: Instant) -> io::Result<Frame> {
        loop {
            match decoder.next() {
                Ok(Some(frame)) => return Ok(frame),
                Ok(None) => {}
                Err(broken) => {
                    return Err(io::Error::new(io::ErrorKind::InvalidData, broken.0));
                }
            }
            if !poll(&self.socket, PollFlags::IN, deadline)? {
                return Err(io::ErrorKind::TimedOut.into());
            }
            if self.receive(decoder)? == Received::End {
                return match decoder.next() {
                    Ok(Some(frame)) => Ok(frame),
                    _ => Err(io::ErrorKind::UnexpectedEof.into()),
                };
            }
        }
    }

    /// Neither end reads or writes any more; the descriptor stays until this value goes.
    pub(super) fn shut(&self) {
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }

    /// The reactor reads it no more.
    pub(super) fn forget(&self) {
        if let (Some(&token), Ok(reactor)) = (self.token.get(), Reactor::get()) {
            reactor.remove(&self.socket, token);
        }
    }
}

impl Out {
    fn advance(&mut self, count: usize) {
        self.bytes = self.bytes.saturating_sub(count);
        self.written += count;
        while let Some(first) = self.queue.front() {
            if self.written < first.len() {
                break;
            }
            self.written -= first.len();
            self.queue.pop_front();
        }
    }

    fn fail(&mut self, kind: io::ErrorKind) {
        self.failed = Some(kind);
        self.queue.clear();
        self.bytes = 0;
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").finish_non_exhaustive()
    }
}
