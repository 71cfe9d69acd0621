//! Whether the kernel at the other end of a connection acknowledges sent data.
//!
//! As long as packets pass in both directions, the end of a connection shows that the peer process has ended. When
//! packets pass in one direction only, the host that receives nothing gives up the connection and reports so, although
//! its process is alive. This side can distinguish the two cases: a reachable host acknowledges everything that was
//! sent to it before the end within moments.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd as _};
use std::time::{Duration, Instant};

use crate::sync::Mutex;

/// A kernel that acknowledges data does so within this time, even if some packets are lost. A host that receives
/// nothing waits longer than this before it gives up.
pub(super) const PROMPT: Duration = Duration::from_secs(1);

/// The maximum number of marks kept; the first one determines the age.
const MOST: usize = 8;

/// The marks of one connection; see the module.
#[derive(Debug, Default)]
pub(super) struct AckTracker(Mutex<SentMarks>);

impl AckTracker {
    /// Records how many bytes have been sent by now.
    pub(super) fn mark(&self, socket: impl AsFd, now: Instant) {
        if let Some(counts) = Counts::of(socket) {
            self.0.lock().mark(counts, now);
        }
    }

    /// Returns for how long the other kernel has not acknowledged sent data, if that is too long. This also works after
    /// the connection has ended.
    pub(super) fn missing_for(&self, socket: impl AsFd, now: Instant) -> Option<Duration> {
        let counts = Counts::of(socket)?;
        self.0.lock().missing_for(counts, now)
    }
}

/// Pairs of a time and the number of bytes sent by then, of which the last byte has not been acknowledged yet.
#[derive(Debug, Default)]
struct SentMarks(VecDeque<(Instant, u64)>);

impl SentMarks {
    fn mark(&mut self, counts: Counts, now: Instant) {
        self.forget(counts);
        let last = self.0.back().map_or(counts.acknowledged, |(_, sent)| *sent);
        if counts.sent > last && self.0.len() < MOST {
            self.0.push_back((now, counts.sent));
        }
    }

    fn forget(&mut self, counts: Counts) {
        while self
            .0
            .front()
            .is_some_and(|(_, sent)| *sent <= counts.acknowledged)
        {
            self.0.pop_front();
        }
    }

    fn missing_for(&mut self, counts: Counts, now: Instant) -> Option<Duration> {
        self.forget(counts);
        let (at, _) = self.0.front()?;
        let missing = now.saturating_duration_since(*at);
        (missing >= PROMPT).then_some(missing)
    }
}

/// Byte counts of one direction, from the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Counts {
    /// Counts each byte once, retransmissions excluded. Bytes for which the peer has no room are not sent.
    sent: u64,
    acknowledged: u64,
}

impl Counts {
    /// Returns `None` if the socket is not TCP, and before Linux 4.19.
    fn of(socket: impl AsFd) -> Option<Self> {
        /// Offsets in `struct tcp_info` of linux/tcp.h, which only ever grows.
        const ACKNOWLEDGED: usize = 120;
        const SENT: usize = 200;
        const SENT_AGAIN: usize = 208;
        let mut info = [0u8; SENT_AGAIN + 8];
        let mut length = info.len() as libc::socklen_t;
        // SAFETY: the descriptor is open, and the kernel writes `length` bytes at most, which `info` has.
        let code = unsafe {
            libc::getsockopt(
                socket.as_fd().as_raw_fd(),
                libc::IPPROTO_TCP,
                libc::TCP_INFO,
                info.as_mut_ptr().cast(),
                &mut length,
            )
        };
        if code != 0 || (length as usize) < info.len() {
            return None;
        }
        let at = |offset: usize| {
            let bytes = info[offset..].first_chunk()?;
            Some(u64::from_ne_bytes(*bytes))
        };
        Some(Self {
            sent: at(SENT)?.saturating_sub(at(SENT_AGAIN)?),
            acknowledged: at(ACKNOWLEDGED)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};

    use super::*;

    fn counts(acknowledged: u64, sent: u64) -> Counts {
        Counts { sent, acknowledged }
    }

    #[test]
    fn what_is_not_acknowledged_is_missing_from_when_it_was_sent() {
        let begun = Instant::now();
        let at = |millis: u64| begun + Duration::from_millis(millis);
        let mut marks = SentMarks::default();
        marks.mark(counts(0, 10), at(0));
        assert_eq!(marks.missing_for(counts(10, 10), at(5000)), None);
        marks.mark(counts(10, 20), at(5000));
        marks.mark(counts(10, 30), at(6000));
        assert_eq!(marks.missing_for(counts(10, 30), at(5999)), None);
        let two = Some(Duration::from_secs(2));
        assert_eq!(marks.missing_for(counts(10, 30), at(7000)), two);
        // The rest was sent a moment ago.
        assert_eq!(marks.missing_for(counts(20, 30), at(6500)), None);
    }

    #[test]
    fn what_was_not_sent_for_want_of_room_is_not_missing() {
        let begun = Instant::now();
        let mut marks = SentMarks::default();
        // The kernel of a stopped process has acknowledged what it has room for.
        marks.mark(counts(10, 10), begun);
        let later = begun + Duration::from_secs(9);
        assert_eq!(marks.missing_for(counts(10, 10), later), None);
    }

    #[test]
    fn the_oldest_counts_however_much_comes_after_it() {
        let begun = Instant::now();
        let mut marks = SentMarks::default();
        for second in 0..100 {
            let at = begun + Duration::from_secs(second);
            marks.mark(counts(0, second + 1), at);
        }
        assert_eq!(marks.0.len(), MOST);
        let at = begun + Duration::from_secs(100);
        let missing = marks.missing_for(counts(0, 100), at);
        assert_eq!(missing, Some(Duration::from_secs(100)));
    }

    #[test]
    fn the_kernel_counts_what_the_other_end_has_also_when_that_has_closed() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut other, _) = listener.accept().unwrap();
        let marks = AckTracker::default();
        one.write_all(b"twelve bytes").unwrap();
        let begun = Instant::now();
        marks.mark(&one, begun);
        other.read_exact(&mut [0; 6]).unwrap();
        // With unread data, so that the end is a reset.
        drop(other);
        assert!(one.read(&mut [0; 1]).is_err());
        let late = begun + 2 * PROMPT;
        assert_eq!(marks.missing_for(&one, late), None);
        let counts = Counts::of(&one).unwrap();
        assert!(counts.sent == 12 && counts.acknowledged >= 12, "{counts:?}");
        let (pair, _) = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::STREAM,
            rustix::net::SocketFlags::empty(),
            None,
        )
        .unwrap();
        assert_eq!(Counts::of(&pair), None);
    }
}
