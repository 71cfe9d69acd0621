//! What ranks print, on its way to the person.

use std::collections::VecDeque;
use std::io::{self, IsTerminal, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Where the ranks' output goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// Rank 0's standard output goes to ours as it is; all other lines go to standard error, with the
    /// rank before them.
    Forward,
    /// Nowhere: the last lines are kept, for whoever asks.
    Collect,
}

/// Lines kept of each stream.
const KEPT_FORWARDED: usize = 12;
const KEPT_COLLECTED: usize = 500;
/// Bytes kept of a line that is not finished.
const LONGEST_LINE: usize = 64 << 10;

/// The reading end of one stream of one rank.
pub(super) struct Stream {
    rank: usize,
    is_stdout: bool,
    /// `None` once the writing end is closed.
    pipe: Option<OwnedFd>,
    partial: Vec<u8>,
    kept: VecDeque<String>,
    keep: usize,
}

impl Stream {
    pub(super) fn new(
        rank: usize,
        is_stdout: bool,
        pipe: OwnedFd,
        output: Output,
    ) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&pipe, true)?;
        let keep = match output {
            Output::Forward => KEPT_FORWARDED,
            Output::Collect => KEPT_COLLECTED,
        };
        let (partial, kept) = (Vec::new(), VecDeque::new());
        Ok(Self {
            rank,
            is_stdout,
            pipe: Some(pipe),
            partial,
            kept,
            keep,
        })
    }

    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.pipe.as_ref().map(AsFd::as_fd)
    }

    /// The last lines, the unfinished one included.
    pub(super) fn lines(&self) -> Vec<String> {
        let mut lines: Vec<String> = self.kept.iter().cloned().collect();
        if !self.partial.is_empty() {
            lines.push(String::from_utf8_lossy(&self.partial).into_owned());
        }
        lines
    }

    /// Takes what is there, without waiting.
    ///
    /// # Errors
    /// Only those of writing it on.
    pub(super) fn pump(&mut self, forwarder: Option<&mut Forwarder>) -> io::Result<()> {
        let Some(pipe) = self.pipe.take() else {
            return Ok(());
        };
        let mut file = std::fs::File::from(pipe);
        let mut buffer = [0u8; 16 << 10];
        let mut taken = Vec::new();
        let open = loop {
            match file.read(&mut buffer) {
                Ok(0) => break false,
                Ok(n) => taken.extend_from_slice(&buffer[..n]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => break error.kind() == io::ErrorKind::WouldBlock,
            }
            // A rank that never stops printing must not keep us from the others.
            if taken.len() >= 1 << 20 {
                break true;
            }
        };
        if open {
            self.pipe = Some(file.into());
        }
        let verbatim = self.is_stdout && self.rank == 0;
        let mut forwarder = forwarder;
        if let (true, Some(forwarder)) = (verbatim, forwarder.as_deref_mut()) {
            forwarder.verbatim(&taken)?;
        }
        let mut text = std::mem::take(&mut self.partial);
        text.extend_from_slice(&taken);
        let mut rest = &text[..];
        while let Some(end) = rest.iter().position(|byte| matches!(byte, b'\n' | b'\r')) {
            let (line, progress) = (String::from_utf8_lossy(&rest[..end]), rest[end] == b'\r');
            rest = &rest[end + 1..];
            if progress {
                // A line that will be overwritten: worth showing while it is true, not worth keeping.
                if let Some(forwarder) = forwarder.as_deref_mut() {
                    forwarder.progress(&line);
                }
                continue;
            }
            if let (false, Some(forwarder)) = (verbatim, forwarder.as_deref_mut()) {
                forwarder.line(self.rank, &line);
            }
            if self.kept.len() == self.keep {
                self.kept.pop_front();
            }
            self.kept.push_back(line.into_owned());
        }
        // Whoever never ends a line does not get all of our memory.
        self.partial = rest[rest.len().saturating_sub(LONGEST_LINE)..].to_vec();
        Ok(())
    }

    /// Ends a line that will not be finished any more.
    pub(super) fn finish(&mut self, forwarder: Option<&mut Forwarder>) {
        if self.partial.is_empty() {
            return;
        }
        let line = String::from_utf8_lossy(&std::mem::take(&mut self.partial)).into_owned();
        if let (false, Some(forwarder)) = (self.is_stdout && self.rank == 0, forwarder) {
            forwarder.line(self.rank, &line);
        }
        self.kept.push_back(line);
    }
}

/// Erases the line that the cursor is in, on a terminal.
pub const CLEAR_LINE: &str = "\r\x1b[K";

/// Writes to our own standard output and standard error, with at most one line of progress shown.
#[derive(Default)]
pub(super) struct Forwarder {
    progress_shown: bool,
}

impl Forwarder {
    fn verbatim(&mut self, bytes: &[u8]) -> io::Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.hide_progress();
        let mut stdout = io::stdout().lock();
        stdout.write_all(bytes)?;
        stdout.flush()
    }

    // Standard error that nobody reads any more is no reason to stop.

    fn line(&mut self, rank: usize, line: &str) {
        self.hide_progress();
        let _ = writeln!(io::stderr().lock(), "[rank {rank}] {line}");
    }

    fn progress(&mut self, line: &str) {
        // Shown by overwriting, so only where that works; an empty line takes it away.
        if io::stderr().is_terminal() {
            let _ = write!(io::stderr().lock(), "{CLEAR_LINE}{line}");
            self.progress_shown = !line.is_empty();
        }
    }

    pub(super) fn hide_progress(&mut self) {
        if std::mem::take(&mut self.progress_shown) {
            let _ = write!(io::stderr().lock(), "{CLEAR_LINE}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(bytes: &[u8], output: Output) -> Stream {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let mut stream = Stream::new(3, false, reader, output).unwrap();
        rustix::io::write(&writer, bytes).unwrap();
        stream.pump(None).unwrap();
        assert!(stream.fd().is_some(), "the writer still has it open");
        drop(writer);
        stream.pump(None).unwrap();
        assert!(stream.fd().is_none(), "everybody closed it");
        stream
    }

    #[test]
    fn lines_are_kept_and_progress_is_not() {
        let mut stream = stream(b"one\n 1/3\r 2/3\rtwo\nunfinished", Output::Collect);
        assert_eq!(stream.lines(), ["one", "two", "unfinished"]);
        stream.finish(None);
        assert_eq!(stream.lines(), ["one", "two", "unfinished"]);
    }

    #[test]
    fn only_the_last_lines_are_kept() {
        let text: String = (0..100).map(|i| format!("line {i}\n")).collect();
        let lines = stream(text.as_bytes(), Output::Forward).lines();
        assert_eq!(lines.len(), KEPT_FORWARDED);
        assert_eq!(lines.last().map(String::as_str), Some("line 99"));
    }
}
