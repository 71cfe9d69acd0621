//! Queries between processes: one process requests a report, the other sends it, and the connection ends.

use std::net::TcpStream;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

use super::client::Format;
use super::peers::{Peer, Peers, ProcessId};
use super::report::{Gathered, Report};
use super::socket::Stream;
use super::wire::{LARGEST_REPORT, REQUEST, decode_report, encode_report, request};

/// How long a connection on one host may take.
const CONNECT: Duration = Duration::from_millis(100);

/// The state of a connection after it was looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    Open,
    Over,
}

/// A query of this process, on behalf of a client.
#[derive(Debug)]
pub(super) struct Query {
    pub(super) client: u64,
    pub(super) format: Format,
    began: Instant,
    deadline: Instant,
    asks: Vec<Ask>,
    reports: Vec<Report>,
    timeouts: usize,
}

/// A queried process.
#[derive(Debug)]
struct Ask {
    process: ProcessId,
    stream: Stream,
    answer: Vec<u8>,
}

impl Query {
    /// Queries all these processes. Processes that refuse the connection are gone, and are left out.
    pub(super) fn new(
        client: u64,
        format: Format,
        own: Report,
        peers: Vec<Peer>,
        timeout: Duration,
    ) -> Self {
        let began = Instant::now();
        let asks = peers.iter().filter_map(Ask::new).collect();
        Self {
            client,
            format,
            began,
            deadline: began + timeout,
            asks,
            reports: vec![own],
            timeouts: 0,
        }
    }

    pub(super) fn fds(&self) -> impl Iterator<Item = (RawFd, bool)> + '_ {
        let fd = |ask: &Ask| (ask.stream.fd(), ask.stream.waiting() > 0);
        self.asks.iter().map(fd)
    }

    pub(super) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Handles received data. Returns whether the query is over, and the processes that have not answered in time.
    pub(super) fn advance(&mut self, now: Instant) -> (bool, Vec<ProcessId>) {
        let reports = &mut self.reports;
        self.asks.retain_mut(|ask| match ask.advance() {
            Ok(Progress::Open) => true,
            Ok(Progress::Over) => {
                // Ignores an answer from a process other than the queried one.
                let report = decode_report(&ask.answer[4..]);
                reports.extend(report.filter(|report| report.process == ask.process));
                false
            }
            Err(()) => false,
        });
        let mut late = Vec::new();
        if now >= self.deadline {
            late = self.asks.drain(..).map(|ask| ask.process).collect();
            self.timeouts += late.len();
        }
        (self.asks.is_empty(), late)
    }

    /// Returns the gathered reports.
    pub(super) fn finish(self, peers: Peers) -> Gathered {
        let seconds = self.began.elapsed().as_secs_f64();
        Gathered::of(self.reports, peers, self.timeouts, seconds)
    }
}

impl Ask {
    fn new(peer: &Peer) -> Option<Self> {
        let address = peer.query_address().into();
        let stream = TcpStream::connect_timeout(&address, CONNECT).ok()?;
        let mut stream = Stream::new(stream).ok()?;
        stream.queue(&request(), REQUEST);
        Some(Self {
            process: peer.process,
            stream,
            answer: Vec::new(),
        })
    }

    fn advance(&mut self) -> Result<Progress, ()> {
        self.stream.flush().map_err(drop)?;
        loop {
            let Some(bytes) = self.stream.read().map_err(drop)? else {
                return Err(());
            };
            if bytes.is_empty() {
                return Ok(Progress::Open);
            }
            self.answer.extend(bytes);
            let Some((size, rest)) = self.answer.split_first_chunk() else {
                continue;
            };
            let size = u32::from_le_bytes(*size) as usize;
            if size > LARGEST_REPORT || rest.len() > size {
                return Err(());
            }
            if rest.len() == size {
                return Ok(Progress::Over);
            }
        }
    }
}

/// A query of another process.
#[derive(Debug)]
pub(super) struct Answering {
    stream: Stream,
    request: Vec<u8>,
    deadline: Instant,
}

impl Answering {
    pub(super) fn new(stream: Stream, deadline: Instant) -> Self {
        Self {
            stream,
            request: Vec::new(),
            deadline,
        }
    }

    pub(super) fn fd(&self) -> (RawFd, bool) {
        (self.stream.fd(), self.stream.waiting() > 0)
    }

    pub(super) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Reads the request, and sends what `report` returns.
    pub(super) fn advance(&mut self, now: Instant, report: impl FnOnce() -> Report) -> Progress {
        let is_asked = self.request.len() == REQUEST;
        match self.stream.read() {
            Ok(Some(bytes)) if !is_asked => self.request.extend(bytes),
            // Nothing more is to come.
            Ok(Some(bytes)) if bytes.is_empty() => {}
            _ => return Progress::Over,
        }
        if !is_asked && self.request.len() >= REQUEST {
            if self.request != request() {
                return Progress::Over;
            }
            let report = encode_report(&report());
            if !self.stream.queue(&report, LARGEST_REPORT) {
                return Progress::Over;
            }
        }
        let has_answered = self.request.len() == REQUEST;
        match self.stream.flush() {
            Err(_) => Progress::Over,
            Ok(()) if has_answered && self.stream.waiting() == 0 => Progress::Over,
            Ok(()) if now >= self.deadline => Progress::Over,
            Ok(()) => Progress::Open,
        }
    }
}
