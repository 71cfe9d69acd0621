//! Forwards or keeps the ranks' output.

use std::collections::VecDeque;
use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use nccl::launch::{Line, Stream, sanitize};
use parking_lot::Mutex;

/// Where the ranks' output goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// Rank 0's standard output goes to that of this process unchanged; all other lines go to standard error, with the
    /// rank before them.
    Forward,
    /// Nowhere: only the last lines are kept.
    Collect,
}

/// Lines kept of each stream.
const KEPT_FORWARDED: usize = 12;
const KEPT_COLLECTED: usize = 500;

/// Erases the line that the cursor is in, on a terminal.
pub const CLEAR_LINE: &str = "\r\x1b[K";

/// The beginning of a progress line on standard error: it replaces the previous progress line, and is not kept.
pub const PROGRESS: &str = "\r";

/// The output of all ranks: keeps the last lines, and forwards. Both threads of a fleet use it.
pub(super) struct Printed {
    output: Output,
    /// By rank and stream.
    kept: Vec<[Mutex<VecDeque<String>>; 2]>,
    /// Whether a line of progress is on standard error.
    progress_shown: Mutex<bool>,
    /// Whether standard output has no reader any more.
    closed: AtomicBool,
}

impl Printed {
    pub(super) fn new(ranks: usize, output: Output) -> Self {
        Self {
            output,
            kept: (0..ranks).map(|_| Default::default()).collect(),
            progress_shown: Mutex::new(false),
            closed: AtomicBool::new(false),
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// The last lines of a stream.
    pub(super) fn lines(&self, rank: usize, stream: Stream) -> Vec<String> {
        let kept = self.kept[rank][stream as usize].lock();
        kept.iter().cloned().collect()
    }

    /// Keeps a line, and forwards it.
    pub(super) fn take(&self, line: Line<'_>) {
        let text = String::from_utf8_lossy(line.bytes);
        let is_forwarded = self.output == Output::Forward;
        if line.stream == Stream::Stderr
            && let Some(progress) = text.strip_prefix(PROGRESS)
        {
            // Shown by overwriting, so only on a terminal; an empty line removes it.
            if is_forwarded && io::stderr().is_terminal() {
                let mut shown = self.progress_shown.lock();
                let progress = sanitize::line(progress.as_bytes());
                let _ = write!(io::stderr().lock(), "{CLEAR_LINE}{progress}");
                *shown = !progress.is_empty();
            }
            return;
        }
        let keep = match self.output {
            Output::Forward => KEPT_FORWARDED,
            Output::Collect => KEPT_COLLECTED,
        };
        let mut kept = self.kept[line.rank][line.stream as usize].lock();
        if kept.len() == keep {
            kept.pop_front();
        }
        kept.push_back(text.clone().into_owned());
        drop(kept);
        if !is_forwarded {
            return;
        }
        self.hide_progress();
        if (line.rank, line.stream) == (0, Stream::Stdout) {
            let mut stdout = io::stdout().lock();
            let written = stdout.write_all(line.bytes);
            let written = written.and_then(|()| stdout.write_all(b"\n"));
            if written.and_then(|()| stdout.flush()).is_err() {
                self.closed.store(true, Ordering::Release);
            }
        } else {
            let mut stderr = io::stderr().lock();
            // Control sequences of a rank cannot overwrite the prefix on a terminal.
            let text = match stderr.is_terminal() {
                true => sanitize::line(line.bytes).into(),
                false => text,
            };
            // A standard error without a reader is no reason to stop.
            let _ = writeln!(stderr, "[rank {}] {text}", line.rank);
        }
    }

    pub(super) fn hide_progress(&self) {
        if std::mem::take(&mut *self.progress_shown.lock()) {
            let _ = write!(io::stderr().lock(), "{CLEAR_LINE}");
        }
    }
}
