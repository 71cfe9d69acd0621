//! Passes the ranks' output on: two threads per fleet, one for each stream, so that a blocked reader of standard output
//! does not hold up standard error.
//!
//! A rank that prints without end is read in pieces, in turn with the others. The thread keeps only the current line,
//! and the last lines of standard error. When the reader does not keep up, the rank blocks, as it would on a pipe. When
//! the reader has closed its end, the rank's pipe is closed, so that the rank notices, unless a log file or the kept
//! last lines still need the output. When the output cannot be written for another reason, the rank's output is read
//! and dropped.

mod lines;
mod tail;

use std::any::Any;
use std::fs::File;
use std::io::{self, IsTerminal, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};
use rustix::io::Errno;

use self::lines::Lines;
pub(super) use self::tail::Tail;
use super::event::{Event, FleetState};
use super::output::{Line, Output, Stream};
use crate::bounded_write::piece;
use crate::sanitize;
use crate::sync::Mutex;

/// The number of bytes read from a rank before the next rank's turn.
const PIECE: usize = 64 << 10;

/// One stream of one rank.
pub(crate) struct Source {
    pub(crate) rank: usize,
    pub(crate) pipe: OwnedFd,
    pub(crate) file: Option<File>,
    pub(crate) tail: Option<Arc<Mutex<Tail>>>,
    pub(crate) end: Arc<StreamEnd>,
}

/// The end of one stream of one rank.
#[derive(Default)]
pub(crate) struct StreamEnd {
    /// Set when all that the rank has written has been read, or the stream closed.
    drained: AtomicBool,
    /// Set when the rank's group has been killed: only processes that have left the group may still write.
    has_rank_ended: AtomicBool,
}

impl StreamEnd {
    pub(crate) fn is_drained(&self) -> bool {
        self.drained.load(Ordering::Acquire)
    }
}

/// The threads of both streams.
pub(crate) struct Pumps {
    shared: [Arc<Shared>; 2],
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    incoming: Mutex<Vec<Source>>,
    wake: OwnedFd,
    leave: AtomicBool,
    /// The time since which the reader of this process's output has accepted nothing of the current write, or since
    /// which the function of [`Output::Lines`] has been running.
    writing: Mutex<Option<Instant>>,
}

impl Pumps {
    /// Starts both threads. `stream_ended` is signalled when a stream has ended.
    pub(crate) fn start(
        output: &Output,
        world_size: usize,
        begun: Instant,
        stream_ended: &Arc<OwnedFd>,
        fleet_state: &Arc<FleetState>,
    ) -> io::Result<Self> {
        let mut threads = Vec::new();
        let mut start = |stream: Stream| {
            let shared = Arc::new(Shared {
                incoming: Mutex::default(),
                wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
                leave: AtomicBool::new(false),
                writing: Mutex::default(),
            });
            let pump = Pump {
                shared: Arc::clone(&shared),
                stream,
                sources: Vec::new(),
                output: output.clone(),
                width: world_size.saturating_sub(1).max(1).ilog10() as usize + 1,
                begun,
                is_screen: match stream {
                    Stream::Stdout => io::stdout().is_terminal(),
                    Stream::Stderr => io::stderr().is_terminal(),
                },
                closed: false,
                is_unread: false,
                stream_ended: Arc::clone(stream_ended),
                fleet_state: Arc::clone(fleet_state),
            };
            let thread = std::thread::Builder::new()
                .name(format!("nccl {stream}"))
                .spawn(move || pump.run())?;
            threads.push(thread);
            Ok::<_, io::Error>(shared)
        };
        let shared = [start(Stream::Stdout)?, start(Stream::Stderr)?];
        Ok(Self { shared, threads })
    }

    pub(crate) fn add(&self, stream: Stream, source: Source) {
        let shared = &self.shared[stream as usize];
        shared.incoming.lock().push(source);
        wake(&shared.wake);
    }

    /// Reports that the rank has ended, so that its streams end with what is in their pipes, even if a process that has left
    /// the rank's group goes on writing to them.
    pub(crate) fn rank_has_ended(&self, streams: &[Arc<StreamEnd>; 2]) {
        for (shared, end) in self.shared.iter().zip(streams) {
            end.has_rank_ended.store(true, Ordering::Release);
            wake(&shared.wake);
        }
    }

    /// Returns the time since which the reader of this process's output has accepted nothing of a current write; `None`
    /// while no thread writes.
    pub(crate) fn writing_since(&self) -> Option<Instant> {
        let since = |shared: &Arc<Shared>| *shared.writing.lock();
        self.shared.iter().filter_map(since).min()
    }
}

impl Drop for Pumps {
    /// Ends both threads. A thread that is blocked by its reader is left running after `timeout`; it holds only its
    /// pipes.
    fn drop(&mut self) {
        let timeout = Duration::from_secs(1);
        for shared in &self.shared {
            shared.leave.store(true, Ordering::Release);
            wake(&shared.wake);
        }
        let until = Instant::now() + timeout;
        for thread in self.threads.drain(..) {
            while !thread.is_finished() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(1));
            }
            if thread.is_finished() {
                let _ = thread.join();
            }
        }
    }
}

/// Drops what a caught panic has left, whose drop could panic again.
pub(crate) fn drop_panic(panic: Box<dyn Any + Send>) {
    if let Err(again) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
        std::mem::forget(again);
    }
}

pub(crate) fn wake(eventfd: &OwnedFd) {
    // A full counter means that a wake-up is pending.
    let _ = rustix::io::write(eventfd, &1u64.to_ne_bytes());
}

struct Reading {
    rank: usize,
    /// `None` at the end of the stream.
    pipe: Option<File>,
    lines: Lines,
    file: Option<File>,
    tail: Option<Arc<Mutex<Tail>>>,
    end: Arc<StreamEnd>,
    /// The bytes that were in the pipe when the rank had ended: more is not the rank's.
    rest: Option<u64>,
}

impl Drop for Reading {
    /// Ends the wait for a stream that is not read any more, also after a panic of the thread.
    fn drop(&mut self) {
        self.end.drained.store(true, Ordering::Release);
    }
}

impl Reading {
    /// Whether the rank has ended, and all that it can have written has been read.
    fn is_rest_read(&mut self) -> bool {
        let Some(pipe) = &self.pipe else { return false };
        if self.end.is_drained() || !self.end.has_rank_ended.load(Ordering::Acquire) {
            return false;
        }
        let left = || rustix::io::ioctl_fionread(pipe).unwrap_or_default();
        *self.rest.get_or_insert_with(left) == 0
    }
}

struct Pump {
    shared: Arc<Shared>,
    stream: Stream,
    sources: Vec<Reading>,
    output: Output,
    /// Digits of the highest rank.
    width: usize,
    begun: Instant,
    /// Whether the output goes to a terminal, which obeys escape sequences.
    is_screen: bool,
    /// Whether writing or the function of [`Output::Lines`] has failed, and nothing more can be printed.
    closed: bool,
    /// Whether the reader of the output has closed its end.
    is_unread: bool,
    stream_ended: Arc<OwnedFd>,
    fleet_state: Arc<FleetState>,
}

impl Pump {
    fn run(mut self) {
        let mut buffer = vec![0u8; PIECE];
        while !self.shared.leave.load(Ordering::Acquire) {
            self.sources
                .extend(self.shared.incoming.lock().drain(..).map(|source| Reading {
                    rank: source.rank,
                    pipe: Some(source.pipe.into()),
                    lines: Lines::default(),
                    file: source.file,
                    tail: source.tail,
                    end: source.end,
                    rest: None,
                }));
            for index in 0..self.sources.len() {
                if self.sources[index].is_rest_read() {
                    self.finish(index);
                }
            }
            let ready = match self.wait() {
                Ok(ready) => ready,
                Err(_) => {
                    // Most likely out of memory; the sleep prevents a busy loop on any error.
                    std::thread::sleep(Duration::from_millis(10));
                    continue;
                }
            };
            for index in ready {
                self.read(index, &mut buffer);
            }
            self.sources.retain(|source| source.pipe.is_some());
        }
    }

    /// Waits until a source is readable, or until [`wake`] is called; returns the indices of the readable sources.
    fn wait(&self) -> io::Result<Vec<usize>> {
        let mut polled = vec![PollFd::new(&self.shared.wake, PollFlags::IN)];
        let pipes = self.sources.iter().flat_map(|source| &source.pipe);
        polled.extend(pipes.map(|pipe| PollFd::from_borrowed_fd(pipe.as_fd(), PollFlags::IN)));
        match rustix::event::poll(&mut polled, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        if !polled[0].revents().is_empty() {
            let _ = rustix::io::read(&self.shared.wake, &mut [0u8; 8]);
        }
        let ready = polled.iter().skip(1).enumerate();
        let ready = ready.filter(|(_, polled)| !polled.revents().is_empty());
        Ok(ready.map(|(index, _)| index).collect())
    }

    fn read(&mut self, index: usize, buffer: &mut [u8]) {
        let source = &mut self.sources[index];
        let Some(pipe) = &mut source.pipe else { return };
        let length = match pipe.read(buffer) {
            Ok(length) => length,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return,
            Err(_) => 0,
        };
        if let Some(rest) = &mut source.rest {
            *rest = rest.saturating_sub(length as u64);
        }
        self.pass_on(index, &buffer[..length]);
        let source = &mut self.sources[index];
        let unread = self.is_unread && source.file.is_none() && source.tail.is_none();
        if length == 0 || unread {
            source.pipe = None;
            source.file = None;
            self.drained(index);
        }
    }

    /// Passes on an unfinished line, and reports that the rank's output has been read. What other processes write later is
    /// passed on as well.
    fn finish(&mut self, index: usize) {
        self.pass_on(index, &[]);
        self.drained(index);
    }

    fn drained(&self, index: usize) {
        self.sources[index]
            .end
            .drained
            .store(true, Ordering::Release);
        wake(&self.stream_ended);
    }

    /// Passes on what was read; nothing is the end of the stream.
    fn pass_on(&mut self, index: usize, bytes: &[u8]) {
        let source = &mut self.sources[index];
        let logged = source.file.as_mut().map_or(Ok(()), |file| {
            // A file system may block as well.
            *self.shared.writing.lock() = Some(Instant::now());
            let logged = file.write_all(bytes);
            *self.shared.writing.lock() = None;
            logged
        });
        if let Err(error) = logged {
            let (rank, stream) = (source.rank, self.stream);
            tracing::warn!(
                name: "nccl.launch.trouble",
                target: "nccl",
                rank,
                "the file of its {stream} cannot be written any more: {error}"
            );
            source.file = None;
            let error = Arc::new(error);
            let cut = Event::LogCut {
                rank,
                stream,
                error,
            };
            self.fleet_state.post(cut, |_| {});
        }
        let mut out = Vec::new();
        let stamp = matches!(self.output, Output::Timed).then(|| self.begun.elapsed());
        let prefix = prefix(&self.output, self.width, source.rank, stamp);
        let tail = source.tail.as_ref();
        let (output, rank, stream) = (&self.output, source.rank, self.stream);
        let (is_screen, writing) = (self.is_screen, &self.shared.writing);
        let (was_closed, mut has_panicked) = (self.closed, false);
        let mut each = |line: &[u8]| {
            let text = line.strip_suffix(b"\n").unwrap_or(line);
            // Not locked during the function below, which may wait for the thread that reads the last lines.
            if let Some(tail) = tail {
                tail.lock().push(text);
            }
            match output {
                Output::Discard => {}
                Output::Plain => out.extend_from_slice(line),
                Output::Lines(_) if was_closed || has_panicked => {}
                Output::Lines(function) => {
                    let line = Line {
                        rank,
                        stream,
                        bytes: text,
                    };
                    *writing.lock() = Some(Instant::now());
                    // The ranks do not depend on their caller's function: without this thread, they would block.
                    let called = catch_unwind(AssertUnwindSafe(|| function(line)));
                    *writing.lock() = None;
                    has_panicked = called.is_err();
                    called.unwrap_or_else(drop_panic);
                }
                Output::Prefixed | Output::Timed => {
                    out.extend_from_slice(prefix.as_bytes());
                    match is_screen {
                        true => out.extend_from_slice(sanitize::line(text).as_bytes()),
                        false => out.extend_from_slice(text),
                    }
                    out.push(b'\n');
                }
            }
        };
        if bytes.is_empty() {
            let rest = source.lines.finish();
            if !rest.is_empty() {
                each(&rest);
            }
        } else {
            source.lines.feed(bytes, &mut each);
        }
        if has_panicked {
            self.close(io::Error::other(
                "the function that takes the lines has panicked",
            ));
        }
        self.print(&out);
    }

    fn print(&mut self, bytes: &[u8]) {
        if bytes.is_empty() || self.closed {
            return;
        }
        let writing = || *self.shared.writing.lock() = Some(Instant::now());
        writing();
        // The process's own output can come between these writes, not into the middle of one.
        let written = match self.stream {
            Stream::Stdout => write(&mut io::stdout().lock(), bytes, writing),
            Stream::Stderr => write(&mut io::stderr().lock(), bytes, writing),
        };
        *self.shared.writing.lock() = None;
        if let Err(error) = written {
            self.close(error);
        }
    }

    /// Prints nothing more.
    fn close(&mut self, error: io::Error) {
        self.closed = true;
        // A rank whose reader is gone notices that, as it would without this process. A full disk is no reason to stop
        // the rank.
        self.is_unread = error.kind() == io::ErrorKind::BrokenPipe;
        if !self.is_unread {
            let (stream, error) = (self.stream, Arc::new(error));
            self.fleet_state
                .post(Event::OutputCut { stream, error }, |_| {});
        }
    }
}

/// Writes `bytes` in pieces, and calls `taken` after each write, which shows that a slow reader still reads.
fn write(
    to: &mut (impl Write + AsFd),
    mut bytes: &[u8],
    mut taken: impl FnMut(),
) -> io::Result<()> {
    to.flush()?;
    while !bytes.is_empty() {
        let mut polled = [PollFd::new(to, PollFlags::OUT)];
        let _ = rustix::event::poll(&mut polled, None);
        match rustix::io::write(to.as_fd(), piece(bytes)) {
            Ok(written) => {
                bytes = &bytes[written..];
                taken();
            }
            // AGAIN: another process has made the terminal or pipe non-blocking.
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn prefix(output: &Output, width: usize, rank: usize, stamp: Option<Duration>) -> String {
    match (output, stamp) {
        (Output::Timed, Some(stamp)) => {
            format!("[{rank:>width$} +{:.3}s] ", stamp.as_secs_f64())
        }
        _ => format!("[{rank:>width$}] "),
    }
}

#[cfg(test)]
mod tests {
    use rustix::pipe::PIPE_BUF;

    use super::*;

    #[test]
    fn each_piece_that_a_reader_takes_counts() {
        let (mut reader, mut writer) = io::pipe().expect("a pipe");
        // More than a pipe holds.
        let text = "what a rank prints\n".repeat(20_000);
        let read = std::thread::spawn(move || io::read_to_string(&mut reader));
        let mut taken = 0;
        write(&mut writer, text.as_bytes(), || taken += 1).expect("somebody reads");
        drop(writer);
        assert_eq!(read.join().expect("a reader").expect("text"), text);
        assert!(taken >= text.len() / PIPE_BUF, "{taken}");
    }
}
