//! One line of progress, on a terminal and nowhere else.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use crate::spawn::{CLEAR_LINE, PROGRESS};

/// Set for a rank whose progress is shown by the process that started it.
pub const VARIABLE: &str = "NCCL_TOOLS_PROGRESS";

/// How often the line changes at most; a terminal is slow.
const INTERVAL: Duration = Duration::from_millis(100);

/// The destination of progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum To {
    /// Nowhere.
    Nobody,
    /// Standard error of this process, which is a terminal.
    Terminal,
    /// The process that started this one, through a pipe: lines that begin with [`PROGRESS`].
    Starter,
}

/// Shows the progress of a measurement.
#[derive(Debug)]
pub struct Progress {
    to: To,
    shown: bool,
    last: Option<Instant>,
}

impl Progress {
    /// No progress: for all ranks but the first.
    #[must_use]
    pub fn silent() -> Self {
        Self {
            to: To::Nobody,
            shown: false,
            last: None,
        }
    }

    /// Progress if standard error leads to a terminal.
    #[must_use]
    pub fn on_a_terminal() -> Self {
        let to = if std::env::var_os(VARIABLE).is_some() {
            To::Starter
        } else if io::stderr().is_terminal() {
            To::Terminal
        } else {
            To::Nobody
        };
        Self {
            to,
            shown: false,
            last: None,
        }
    }

    /// Replaces the line of progress by `text`, at most every 100 ms.
    pub fn show(&mut self, text: impl FnOnce() -> String) {
        if self.to == To::Nobody || self.last.is_some_and(|last| last.elapsed() < INTERVAL) {
            return;
        }
        let text = text();
        // Failed writes of progress are ignored.
        let _ = match self.to {
            To::Terminal => write!(io::stderr(), "{CLEAR_LINE}{text}"),
            _ => writeln!(io::stderr(), "{PROGRESS}{text}"),
        };
        self.shown = true;
        self.last = Some(Instant::now());
    }

    /// Removes the line of progress, before other output.
    pub fn hide(&mut self) {
        if std::mem::take(&mut self.shown) {
            let _ = match self.to {
                To::Terminal => write!(io::stderr(), "{CLEAR_LINE}"),
                _ => writeln!(io::stderr(), "{PROGRESS}"),
            };
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.hide();
    }
}
