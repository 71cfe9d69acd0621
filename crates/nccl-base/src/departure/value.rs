//! How a rank departed, and what is known of that.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::exit::{Exit, OomKill, Signal};
use crate::wire::clean;

/// How a rank departed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[doc(hidden)]
pub enum Departure {
    /// With a leave message.
    Left,
    /// The rank reported why it fails.
    Failed(Failure),
    /// Without a report of its own.
    Lost(Lost),
}

/// Why a rank fails, as it reports.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[doc(hidden)]
pub enum Failure {
    /// The whole chain of its program's error, or the message of a panic.
    Error(#[serde(deserialize_with = "clean")] String),
    /// Its process ends with this exit status, which is not 0.
    Exits(i32),
}

/// What is known of a rank that departed without a report of its own: it died, was left behind, or is out of reach.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[doc(hidden)]
pub struct Lost {
    pub how: LossKind,
    /// The call that the rank's last heartbeat before the loss reported.
    pub last_call: Option<LastCall>,
}

/// A rank's last call, as its last heartbeat reported it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[doc(hidden)]
pub struct LastCall {
    #[serde(deserialize_with = "clean")]
    pub call: String,
    /// Time between that heartbeat and the loss.
    #[serde(deserialize_with = "clean")]
    pub before: Duration,
}

/// How a loss became known. The order of the values is the order of their quality, the best first: where several ranks
/// detect a loss independently, the smallest value is announced to all.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[doc(hidden)]
pub enum LossKind {
    /// The rank's process ended, as reported by the process that started it.
    Ended(Box<ProcessEnd>),
    /// The kernel closed the rank's connection.
    Closed,
    /// The rank's process with this PID ended, as reported by the kernel.
    Exited { pid: u64 },
    /// The address at which the rank listens is not known.
    NoAddress,
    /// The rank violated the protocol, and its connection was closed.
    ProtocolViolation(#[serde(deserialize_with = "clean")] String),
    /// The rank did not join the next generation within `after`, and the other ranks formed that generation without it.
    LeftBehind {
        #[serde(deserialize_with = "clean")]
        after: Duration,
    },
    /// The other ranks have another coordinator, and the lost rank lacks the state to follow that one.
    Superseded,
    /// The reporting rank is cut off from the lost rank; the text has the details.
    CutOff(#[serde(deserialize_with = "clean")] String),
    /// The rank has departed, and nothing else is known.
    Unknown,
    /// A report about the rank by the system or by another process.
    Reported(#[serde(deserialize_with = "clean")] String),
    /// The rank's host does not answer; the rank may be alive.
    Unreachable(Box<UnreachableHost>),
}

/// A host that does not answer.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[doc(hidden)]
pub struct UnreachableHost {
    pub evidence: UnreachableEvidence,
    /// Set if the rank was heard nevertheless.
    pub heard: Option<HeardOnly>,
    /// Why the reporting rank may not decide which of the two sides is at fault.
    #[serde(deserialize_with = "clean")]
    pub undecided: Option<String>,
}

/// How a host was found to be unreachable.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[doc(hidden)]
pub enum UnreachableEvidence {
    /// The host refuses connections to the address at which the rank listened. A firewall may do that while the rank is
    /// alive.
    Refused,
    /// The other end closed the connection and made no new one. A middlebox may close a connection while the rank is
    /// alive.
    Closed,
    /// The connection broke, or could not be made; the text is the error of the local system.
    Error(#[serde(deserialize_with = "clean")] String),
    /// The other host gave the connection up after it had acknowledged nothing for `unacknowledged`.
    GaveUp {
        #[serde(deserialize_with = "clean")]
        unacknowledged: Duration,
    },
    /// The rank was not heard, and acknowledged nothing.
    Unheard {
        #[serde(deserialize_with = "clean")]
        unheard: Duration,
        #[serde(deserialize_with = "clean")]
        unacknowledged: Duration,
    },
}

/// A rank that was heard recently, although its host acknowledges nothing.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[doc(hidden)]
pub struct HeardOnly {
    /// Time since the rank was heard.
    #[serde(deserialize_with = "clean")]
    pub heard: Duration,
    #[serde(deserialize_with = "clean")]
    pub unacknowledged: Duration,
}

/// How the process of a rank ended, as reported by the process that started it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[doc(hidden)]
pub struct ProcessEnd {
    pub report: ExitReport,
    /// The last lines that the process wrote to stderr; `None` if there are none.
    #[serde(deserialize_with = "clean")]
    pub stderr: Option<String>,
}

/// What the process that started a rank observed of the rank's end.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[doc(hidden)]
pub enum ExitReport {
    /// Reported by a launcher of this crate (`nccl-launch`).
    Status {
        exit: Exit,
        /// The signal that the launcher had sent to the process before the end.
        sent: Option<Signal>,
        oom: Option<OomKill>,
    },
    /// Reported by a foreign launcher, in its own words; the exit is parsed from them.
    Text {
        #[serde(deserialize_with = "clean")]
        words: String,
        exit: Option<Exit>,
        out_of_memory: bool,
    },
}

/// Maximum length in bytes of the description of an unreachable host together with [`UnreachableHost::undecided`].
const MAX_UNDECIDED_BYTES: usize = 4096;

/// Maximum length in bytes of the part of a process's stderr in an error.
const MAX_STDERR_BYTES: usize = 1000;

impl Departure {
    /// Returns the departure of a lost rank.
    #[doc(hidden)]
    pub fn lost(how: LossKind) -> Self {
        Self::Lost(Lost::from(how))
    }
}

impl From<LossKind> for Lost {
    fn from(how: LossKind) -> Self {
        Self {
            how,
            last_call: None,
        }
    }
}

impl From<ProcessEnd> for Lost {
    fn from(end: ProcessEnd) -> Self {
        LossKind::Ended(Box::new(end)).into()
    }
}

impl From<UnreachableEvidence> for Lost {
    fn from(evidence: UnreachableEvidence) -> Self {
        let (heard, undecided) = (None, None);
        LossKind::Unreachable(Box::new(UnreachableHost {
            evidence,
            heard,
            undecided,
        }))
        .into()
    }
}

impl Lost {
    /// Returns a loss that is known only from a text of the system or of another process.
    #[doc(hidden)]
    pub fn reported(text: impl Into<String>) -> Self {
        LossKind::Reported(text.into()).into()
    }

    /// Returns whether the rank may still be alive but out of reach.
    #[doc(hidden)]
    pub fn may_live(&self) -> bool {
        self.unreachable_host().is_some()
    }

    /// Returns whether connections to the rank are closed or refused; its host may then be up.
    #[doc(hidden)]
    pub fn is_refused(&self) -> bool {
        self.unreachable_host().is_some_and(|host| {
            matches!(
                host.evidence,
                UnreachableEvidence::Refused | UnreachableEvidence::Closed
            )
        })
    }

    #[doc(hidden)]
    pub fn unreachable_host(&self) -> Option<&UnreachableHost> {
        match &self.how {
            LossKind::Unreachable(host) => Some(host),
            _ => None,
        }
    }

    /// Returns the unreachable host, to be completed.
    #[doc(hidden)]
    pub fn unreachable_host_mut(&mut self) -> Option<&mut UnreachableHost> {
        match &mut self.how {
            LossKind::Unreachable(host) => Some(host),
            _ => None,
        }
    }
}

impl UnreachableHost {
    /// Returns whether packets pass in one direction only: the host was heard although it acknowledged nothing, or it
    /// gave the connection up.
    #[doc(hidden)]
    pub fn is_one_way(&self) -> bool {
        self.heard.is_some() || matches!(self.evidence, UnreachableEvidence::GaveUp { .. })
    }
}

impl ProcessEnd {
    /// Builds the end that a foreign launcher reported in its own words, with the end of the process's stderr.
    #[doc(hidden)]
    pub fn in_words(words: &str, stderr: &str) -> Self {
        Self {
            report: ExitReport::Text {
                words: words.to_owned(),
                exit: Exit::read(words),
                out_of_memory: words.contains("out of memory"),
            },
            stderr: last_of(stderr),
        }
    }

    /// Builds the end that `nccl-launch` observed.
    #[doc(hidden)]
    pub fn seen(exit: Exit, sent: Option<Signal>, oom: Option<OomKill>, stderr: &str) -> Self {
        Self {
            report: ExitReport::Status { exit, sent, oom },
            stderr: last_of(stderr),
        }
    }

    /// Returns how the process ended, where that is known.
    #[doc(hidden)]
    pub fn exit(&self) -> Option<Exit> {
        match &self.report {
            ExitReport::Status { exit, .. } => Some(*exit),
            ExitReport::Text { exit, .. } => *exit,
        }
    }

    /// Returns whether the kernel ended the process because memory was exhausted.
    #[doc(hidden)]
    pub fn is_out_of_memory(&self) -> bool {
        match &self.report {
            ExitReport::Status { oom, .. } => oom.is_some(),
            ExitReport::Text { out_of_memory, .. } => *out_of_memory,
        }
    }

    /// Cuts the texts of another process to at most `longest` bytes each.
    #[doc(hidden)]
    pub fn cut(&mut self, longest: usize) {
        if let ExitReport::Text { words, .. } = &mut self.report {
            cut(words, longest);
        }
        if let ExitReport::Status { oom: Some(oom), .. } = &mut self.report {
            cut(&mut oom.group, longest);
        }
        if let Some(stderr) = &mut self.stderr {
            cut(stderr, longest);
        }
    }
}

/// Returns the last lines that a process wrote, joined into one line.
fn last_of(stderr: &str) -> Option<String> {
    let lines = stderr.lines().map(str::trim_end);
    let lines: Vec<_> = lines.filter(|line| !line.is_empty()).collect();
    let last = lines[lines.len().saturating_sub(5)..].join(" | ");
    if last.is_empty() {
        return None;
    }
    let mut start = last.len().saturating_sub(MAX_STDERR_BYTES);
    while !last.is_char_boundary(start) {
        start += 1;
    }
    let cut = if start > 0 { "…" } else { "" };
    Some(format!("{cut}{}", &last[start..]))
}

/// Cuts a text at a character boundary.
#[doc(hidden)]
pub fn cut(text: &mut String, longest: usize) {
    let mut end = longest.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
}

impl fmt::Display for Departure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Left => f.write_str("it left the world"),
            Self::Failed(failure) => write!(f, "it failed: {failure}"),
            Self::Lost(lost) => lost.fmt(f),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Error(chain) => f.write_str(chain),
            Self::Exits(status) => write!(f, "its process ended with exit status {status}"),
        }
    }
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.how.fmt(f)?;
        match &self.last_call {
            Some(last) => write!(f, "; {last}"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for LastCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { call, before } = self;
        let before = before.as_secs_f64();
        write!(
            f,
            "its last heartbeat, {before:.1} s before, told of {call}"
        )
    }
}

impl fmt::Display for LossKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ended(end) => write!(f, "its process ended: {end}"),
            Self::Closed => f.write_str("its connection closed without goodbye: it died"),
            Self::Exited { pid } => {
                write!(f, "its process (pid {pid}) ended without goodbye: it died")
            }
            Self::NoAddress => f.write_str("it has no address"),
            Self::ProtocolViolation(what) => write!(f, "it sent {what}"),
            Self::LeftBehind { after } => write!(
                f,
                "it did not come to the next generation within {:.1} s, and was left behind",
                after.as_secs_f64()
            ),
            Self::Superseded => f.write_str("the others went on without it"),
            Self::CutOff(why) => write!(f, "it cannot be reached: this rank is {why}"),
            Self::Unknown => f.write_str("it died"),
            Self::Reported(text) => f.write_str(text),
            Self::Unreachable(host) => host.fmt(f),
        }
    }
}

impl fmt::Display for UnreachableHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = format!("its connection broke without goodbye: {}", self.evidence);
        if let Some(heard) = &self.heard {
            text.push_str(&format!("; {heard}"));
        }
        if let Some(why) = &self.undecided {
            text.push_str("; ");
            text.push_str(why);
            cut(&mut text, MAX_UNDECIDED_BYTES);
        }
        f.write_str(&text)
    }
}

/// The text for a connection on which this side hears the other, but not the other way round.
pub(super) const ONE_WAY: &str = "packets come through one way only";

impl fmt::Display for UnreachableEvidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused => f.write_str(
                "its host refuses connections to the address at which it listened: its process has ended, or a \
                 firewall refuses them",
            ),
            Self::Closed => f.write_str("it was closed from the other end, which did not reconnect"),
            Self::Error(error) => f.write_str(error),
            Self::GaveUp { unacknowledged } => write!(
                f,
                "{ONE_WAY}: its host gave it up, and had acknowledged nothing that was sent to it for {:.1} s",
                unacknowledged.as_secs_f64()
            ),
            Self::Unheard {
                unheard,
                unacknowledged,
            } => write!(
                f,
                "it was not heard for {:.1} s, and its host has acknowledged nothing that was sent to it for {:.1} s",
                unheard.as_secs_f64(),
                unacknowledged.as_secs_f64()
            ),
        }
    }
}

impl fmt::Display for HeardOnly {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{ONE_WAY}: it was heard {:.1} s ago, and its host has acknowledged nothing that was sent to it for {:.1} s",
            self.heard.as_secs_f64(),
            self.unacknowledged.as_secs_f64()
        )
    }
}

impl fmt::Display for ProcessEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.report.fmt(f)?;
        match &self.stderr {
            Some(stderr) => write!(f, "; stderr ended with: {stderr}"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for ExitReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (exit, sent, oom) = match self {
            Self::Text { words, .. } => return f.write_str(words),
            Self::Status { exit, sent, oom } => (exit, sent, oom),
        };
        exit.fmt(f)?;
        if let Some(sent) = sent {
            write!(f, ", after {sent} from the process that started it")?;
        }
        match oom {
            Some(oom) => write!(f, "; {oom}"),
            None => Ok(()),
        }
    }
}
