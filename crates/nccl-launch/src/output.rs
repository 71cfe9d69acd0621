//! Where the output of ranks goes, and the lines that a caller gets.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// Which of its two streams a rank wrote to.
///
/// ```
/// use nccl::launch::{Line, Stream};
///
/// fn is_error(line: &Line<'_>) -> bool {
///     line.stream == Stream::Stderr
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// `stdout` or `stderr`.
impl fmt::Display for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stdout => "stdout",
            Self::Stderr => "stderr",
        })
    }
}

/// A line that a rank wrote.
///
/// ```
/// fn show(line: nccl::launch::Line<'_>) {
///     println!("{}: {}", line.rank, String::from_utf8_lossy(line.bytes));
/// }
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Line<'a> {
    /// The rank that wrote the line.
    pub rank: usize,
    /// The stream that the line was written to.
    pub stream: Stream,
    /// The bytes without the line terminator; not necessarily text. A line of more than a mebibyte is delivered in
    /// pieces.
    pub bytes: &'a [u8],
}

/// Where the ranks' output goes.
///
/// ```
/// use std::sync::Arc;
/// use nccl::launch::{Fleet, Output};
///
/// let lines = Output::Lines(Arc::new(|line| println!("{} bytes", line.bytes.len())));
/// let builder = Fleet::builder(4).with(|fleet| fleet.output = lines);
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub enum Output {
    /// To this process's standard output and standard error, in whole lines, each prefixed with the rank.
    Prefixed,
    /// As `Prefixed`, with the seconds since the start of the fleet as well.
    Timed,
    /// To this process's standard output and standard error, each rank's bytes unchanged. Lines of several ranks are
    /// not mixed, except lines of more than a mebibyte.
    Plain,
    /// Discarded.
    Discard,
    /// To a function, line by line, on a thread of the fleet. While the function runs, ranks that write to the same
    /// stream may block. If it panics, the rest of the stream is discarded ([`Event::OutputCut`](super::Event::OutputCut)).
    Lines(Arc<dyn Fn(Line<'_>) + Send + Sync>),
}

impl fmt::Debug for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Prefixed => "Prefixed",
            Self::Timed => "Timed",
            Self::Plain => "Plain",
            Self::Discard => "Discard",
            Self::Lines(_) => "Lines(..)",
        })
    }
}

/// The settings of a fleet's output.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    pub(super) output: Output,
    /// The directory with two files for each rank.
    pub(super) files: Option<PathBuf>,
    /// The number of lines of standard error kept for each rank.
    pub(super) tail: usize,
}
