//! A stream of frames, written from any thread and read by one.
//!
//! Handshake frames are sent in plaintext; all later frames are under the seal of the connection. Both directions use
//! the seal's keys without a lock. The message number of the writer is under the lock of the queue; that of the reader
//! is in its [`Decoder`]. Frames to many ranks share their payload until they are sealed, one message at a time, when
//! the system accepts more data.
//!
//! Writing never blocks: data that the system does not accept stays in the queue until there is room. The queue for a
//! peer that does not read is limited to [`LARGEST_BACKLOG`].

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use super::ack_tracker::AckTracker;
use super::frame::{Decoder, Frame, LARGEST_FRAME, Outgoing};
use super::handshake::HandshakeMessage;
use super::noise::{LARGEST_PLAIN, Seal};
use super::reactor::{EventFlags, Reactor, poll};
use crate::sync::Mutex;

/// The maximum number of bytes queued for one peer; at that point the peer has not read several of the largest answers.
const LARGEST_BACKLOG: usize = 4 * LARGEST_FRAME;

/// Frames of at most this many bytes are sealed together.
const SMALL: usize = 8192;
const TOGETHER: usize = 2 * SMALL;

/// How much memory for sealed bytes is kept after all of them have been written.
const KEPT: usize = 4096;

/// How many bytes are read from one connection before other connections have their turn.
const TURN: usize = 256 << 10;

pub(super) struct Connection {
    socket: OwnedFd,
    out: Mutex<Out>,
    token: OnceLock<u64>,
    /// Whether the reactor is not to read this connection any more.
    forgotten: AtomicBool,
    acknowledged: AckTracker,
}

#[derive(Default)]
struct Out {
    /// The seal of all frames after the handshake.
    seal: Option<Arc<Seal>>,
    /// The number of the next sealed message.
    number: u64,
    /// The sealed bytes to be written, and how many of them have been written.
    ready: Vec<u8>,
    written: usize,
    /// The frames that are not sealed yet. Of the payload of the first frame, `begun` bytes are sealed already.
    queue: VecDeque<Outgoing>,
    /// The frames that overtake the queue.
    urgent: VecDeque<Outgoing>,
    begun: usize,
    /// The bytes in the queue.
    bytes: usize,
    /// Whether the reactor reports when the socket is writable.
    armed: bool,
    failed: Option<io::ErrorKind>,
    /// The system's error of a write. The system reports it once; afterwards the reader sees only an ordinary end.
    error: Option<Errno>,
}

/// The result of reading.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Received {
    /// All available bytes were read, or the maximum for one turn.
    Some,
    /// The peer has closed its sending side.
    End,
}

impl Connection {
    /// Creates a connection; `socket` must be non-blocking.
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self {
            socket,
            out: Mutex::default(),
            token: OnceLock::new(),
            forgotten: AtomicBool::new(false),
            acknowledged: AckTracker::default(),
        }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Stores the token under which the reactor reads this connection. Another thread may have forgotten the connection
    /// since it was added to the reactor; then removes it, because its end would be reported again and again.
    pub(super) fn set_token(&self, token: u64) {
        let _ = self.token.set(token);
        if self.forgotten.load(Ordering::SeqCst) {
            self.forget();
        }
    }

    /// Seals all frames that are enqueued from now on.
    pub(super) fn seal(&self, seal: Arc<Seal>) {
        self.out.lock().seal = Some(seal);
    }

    /// Queues a handshake message for [`flush`](Self::flush): in plaintext, as long as there is no seal.
    pub(super) fn send_handshake(&self, handshake_message: &HandshakeMessage) {
        let frame = handshake_message.encode();
        let mut out = self.out.lock();
        if out.seal.is_some() {
            drop(out);
            return self.enqueue(frame);
        }
        out.ready.extend_from_slice(&frame.head);
        out.ready.extend_from_slice(&frame.payload);
    }

    /// Queues a frame for [`flush`](Self::flush), which seals it.
    pub(super) fn enqueue(&self, frame: Outgoing) {
        self.enqueue_in(frame, |out| &mut out.queue);
    }

    /// Queues a small frame that precedes the frames already queued.
    pub(super) fn enqueue_first(&self, frame: Outgoing) {
        self.enqueue_in(frame, |out| &mut out.urgent);
    }

    fn enqueue_in(&self, frame: Outgoing, queue: fn(&mut Out) -> &mut VecDeque<Outgoing>) {
        let mut out = self.out.lock();
        if out.failed.is_some() {
            return;
        }
        out.bytes += frame.len();
        queue(&mut out).push_back(frame);
        // Without a seal, only a handshake message may be sent.
        let wrong = match &out.seal {
            None => Some(io::ErrorKind::NotConnected),
            Some(_) => (out.bytes > LARGEST_BACKLOG).then_some(io::ErrorKind::StorageFull),
        };
        if let Some(wrong) = wrong {
            out.fail(wrong);
            drop(out);
            self.shut();
        }
    }

    /// Writes as much as the system accepts.
    pub(super) fn flush(&self) -> io::Result<()> {
        let mut out = self.out.lock();
        if let Some(kind) = out.failed {
            return Err(kind.into());
        }
        loop {
            if out.written == out.ready.len() && !out.refill()? {
                break;
            }
            match rustix::net::send(&self.socket, &out.ready[out.written..], SendFlags::NOSIGNAL) {
                Ok(count) => out.written += count,
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
        let wanted = !out.is_empty();
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

    /// As [`flush`](Self::flush); a failure is then visible to the reading side, too.
    pub(super) fn flush_quietly(&self) {
        if self.flush().is_err() {
            self.shut();
        }
    }

    /// Writes as much as the system accepts, and records when, for [`unacknowledged_for`](Self::unacknowledged_for).
    pub(super) fn flush_and_mark(&self, now: Instant) {
        self.flush_quietly();
        self.acknowledged.mark(&self.socket, now);
    }

    /// Returns for how long the host at the other end has not acknowledged sent data, if that is too long.
    pub(super) fn unacknowledged_for(&self, now: Instant) -> Option<Duration> {
        self.acknowledged.missing_for(&self.socket, now)
    }

    /// Waits until everything is written, at most until `deadline`. Must not be called on the reactor's thread.
    pub(super) fn drain(&self, deadline: Instant) -> io::Result<()> {
        loop {
            self.flush()?;
            if self.out.lock().is_empty() {
                return Ok(());
            }
            if !poll(&self.socket, PollFlags::OUT, deadline)? {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
    }

    /// Returns the number of bytes that wait to be written.
    pub(super) fn backlog(&self) -> usize {
        let out = self.out.lock();
        match out.failed {
            None => out.ready.len() - out.written + out.bytes - out.begun,
            Some(_) => 0,
        }
    }

    /// Reads what is available, at most the maximum for one turn.
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

    /// Returns the end of the stream: the peer sends no more, or an earlier write failed.
    fn end(&self) -> io::Result<Received> {
        match self.out.lock().error {
            // The peer has ended: an ordinary end.
            None | Some(Errno::PIPE | Errno::CONNRESET) => Ok(Received::End),
            Some(error) => Err(error.into()),
        }
    }

    /// Waits for one frame. Must not be called on the reactor's thread.
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

    /// Shuts both directions down; the descriptor stays open until this value is dropped.
    pub(super) fn shut(&self) {
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }

    /// Removes the connection from the reactor.
    pub(super) fn forget(&self) {
        // Set before the token is read: this thread sees the token, or the thread that stores it sees this.
        self.forgotten.store(true, Ordering::SeqCst);
        if let (Some(&token), Ok(reactor)) = (self.token.get(), Reactor::get()) {
            reactor.remove(&self.socket, token);
        }
    }
}

impl Out {
    fn is_empty(&self) -> bool {
        self.written == self.ready.len() && self.queue.is_empty() && self.urgent.is_empty()
    }

    /// Seals the next frames after all sealed bytes are written; returns whether there are bytes to write.
    fn refill(&mut self) -> io::Result<bool> {
        self.ready.clear();
        self.written = 0;
        if let Some(seal) = &self.seal
            && self.begun == 0
            && !self.urgent.is_empty()
        {
            let mut plain = Vec::new();
            while let Some(frame) = self.urgent.front()
                && plain.len() + frame.len() <= TOGETHER
            {
                plain.extend_from_slice(&frame.head);
                plain.extend_from_slice(&frame.payload);
                self.urgent.pop_front();
            }
            self.bytes = self.bytes.saturating_sub(plain.len());
            seal.seal(self.number, &plain, &mut self.ready)?;
            self.number += 1;
            return Ok(true);
        }
        let (Some(seal), Some(first)) = (&self.seal, self.queue.front()) else {
            if self.ready.capacity() > KEPT {
                self.ready = Vec::new();
            }
            return Ok(false);
        };
        if first.payload.len() > SMALL {
            // The head is sealed separately, so that the payload is sealed without copying it.
            if self.begun == 0 {
                seal.seal(self.number, &first.head, &mut self.ready)?;
                self.number += 1;
            }
            let rest = &first.payload[self.begun..];
            let part = &rest[..rest.len().min(LARGEST_PLAIN)];
            seal.seal(self.number, part, &mut self.ready)?;
            self.number += 1;
            self.begun += part.len();
            if self.begun == first.payload.len() {
                self.bytes = self.bytes.saturating_sub(first.len());
                self.begun = 0;
                self.queue.pop_front();
            }
            return Ok(true);
        }
        let mut plain = Vec::with_capacity(first.len());
        while let Some(frame) = self.queue.front()
            && frame.payload.len() <= SMALL
            && plain.len() + frame.len() <= TOGETHER
        {
            plain.extend_from_slice(&frame.head);
            plain.extend_from_slice(&frame.payload);
            self.queue.pop_front();
        }
        self.bytes = self.bytes.saturating_sub(plain.len());
        seal.seal(self.number, &plain, &mut self.ready)?;
        self.number += 1;
        Ok(true)
    }

    fn fail(&mut self, kind: io::ErrorKind) {
        self.failed = Some(kind);
        self.queue.clear();
        self.urgent.clear();
        self.ready = Vec::new();
        (self.bytes, self.begun, self.written) = (0, 0, 0);
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::reactor::Source;

    struct Quiet;

    impl Source for Quiet {
        fn ready(self: Arc<Self>, _: EventFlags) {}
    }

    #[test]
    fn a_connection_that_is_forgotten_while_it_is_added_to_the_reactor_is_not_read() {
        for is_forgotten_first in [true, false] {
            let (near, _far) = UnixStream::pair().unwrap();
            let connection = Connection::new(near.into());
            let source = Arc::new(Quiet);
            let reactor = Reactor::get().unwrap();
            let known = Arc::clone(&source) as Arc<dyn Source>;
            let token = reactor.add(connection.fd(), EventFlags::IN, known);
            if is_forgotten_first {
                connection.forget();
                assert_eq!(Arc::strong_count(&source), 2);
            }
            connection.set_token(token.unwrap());
            if !is_forgotten_first {
                connection.forget();
            }
            assert_eq!(Arc::strong_count(&source), 1);
        }
    }
}
