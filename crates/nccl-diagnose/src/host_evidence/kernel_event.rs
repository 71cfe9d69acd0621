//! The relevant lines of the kernel's log, as values and as text: NVIDIA's Xid and SXid messages, and the victims of
//! the out-of-memory killer.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::xid;
use nccl_base::departure::cut;
use nccl_base::sanitize;

/// Maximum length of a text kept from a line, in bytes; `SHORT` for names and addresses.
pub(super) const LONG: usize = 256;
pub(super) const SHORT: usize = 64;

/// Maximum number of events kept. A GPU that fails permanently fills the log with the same Xid, which counts as one
/// event.
pub(super) const MOST: usize = 64;

/// A line of the kernel's log about a device that failed, or a process that the kernel ended.
///
/// ```
/// let evidence = nccl::host_evidence::HostEvidence::gather();
/// for event in &evidence.kernel_log.events {
///     println!("{event}, {:?} ago, {} times", event.age, event.times);
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct KernelEvent {
    /// Time since the line; of a repeated Xid since its last line, of an OOM victim since its first; serialized in
    /// milliseconds.
    #[serde(rename = "age_ms", with = "super::millis")]
    pub age: Duration,
    /// The number of such lines.
    pub times: u32,
    /// What the line says.
    #[serde(flatten)]
    pub kind: KernelEventKind,
}

/// What a line of the kernel's log says.
///
/// ```
/// use nccl::host_evidence::KernelEventKind;
///
/// let log = nccl::host_evidence::HostEvidence::gather().kernel_log;
/// let failed = |event: &&nccl::host_evidence::KernelEvent| matches!(event.kind, KernelEventKind::Xid(_));
/// println!("{} devices or links failed", log.events.iter().filter(failed).count());
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[non_exhaustive]
pub enum KernelEventKind {
    /// A GPU or an NVSwitch reported an error.
    Xid(Xid),
    /// The out-of-memory killer ended a process.
    OomKill(OomKill),
}

/// An Xid message of NVIDIA's driver for GPUs, or an SXid message of that for NVSwitches.
///
/// ```
/// # fn example(xid: &nccl::host_evidence::Xid) {
/// println!("{} of {}: {}", xid.number, xid.device, xid.explanation().unwrap_or(&xid.text));
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Xid {
    /// The number in NVIDIA's catalogue.
    pub number: u32,
    /// Whether an NVSwitch reported it (SXid).
    pub of_switch: bool,
    /// The PCI address of the device: `0000:3b:00.0`.
    pub device: String,
    /// The process that the driver names, as the host numbers it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// The driver's text behind the number.
    pub text: String,
}

impl Xid {
    /// Returns the meaning of the number, if this crate knows it.
    ///
    /// ```
    /// # fn example(xid: &nccl::host_evidence::Xid) {
    /// if xid.number == 79 {
    ///     assert_eq!(xid.explanation(), Some("GPU has fallen off the bus"));
    /// }
    /// # }
    /// ```
    #[must_use]
    pub fn explanation(&self) -> Option<&'static str> {
        if self.of_switch {
            return None;
        }
        xid::explanation(self.number)
    }

    /// Returns whether such an error usually follows from a program or the end of its process, and not from the device.
    ///
    /// ```
    /// # fn example(xid: &nccl::host_evidence::Xid) {
    /// let blame = if xid.is_of_program() { "the program" } else { "the device" };
    /// # }
    /// ```
    #[must_use]
    pub fn is_of_program(&self) -> bool {
        !self.of_switch && xid::is_of_program(self.number)
    }
}

/// A process that the out-of-memory killer ended. The numbers and paths are those of the host, also in a container.
///
/// ```
/// # fn example(kill: &nccl::host_evidence::OomKill) {
/// println!("{} ({}) of {}", kill.pid, kill.name, kill.cgroup.as_deref().unwrap_or("?"));
/// # }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct OomKill {
    /// The process.
    pub pid: u32,
    /// Its name, of at most 15 bytes.
    pub name: String,
    /// The control group of the process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
    /// The control group whose limit was reached; `None` where the host itself had no memory left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limited: Option<String>,
    /// Whether the host itself had no memory left, rather than a control group.
    pub whole_host: bool,
    /// Anonymous memory of the process, in KiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub anonymous_kib: Option<u64>,
}

impl fmt::Display for KernelEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.kind {
            KernelEventKind::Xid(xid) => xid.fmt(f)?,
            KernelEventKind::OomKill(kill) => kill.fmt(f)?,
        }
        match self.times {
            0 | 1 => Ok(()),
            times => write!(f, " ({times} times)"),
        }
    }
}

impl fmt::Display for Xid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.of_switch { "SXid" } else { "Xid" };
        write!(f, "{kind} {}", self.number)?;
        if let Some(explanation) = self.explanation() {
            write!(f, " ({explanation})")?;
        }
        write!(f, " for {}", self.device)?;
        if let Some(pid) = self.pid {
            write!(f, ", process {pid}")?;
        }
        if self.explanation().is_none() && !self.text.is_empty() {
            write!(f, ": {}", self.text)?;
        }
        Ok(())
    }
}

impl fmt::Display for OomKill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the OOM killer ended pid {} ({})", self.pid, self.name)?;
        if let Some(kib) = self.anonymous_kib {
            write!(f, ", which had {} MiB of memory", kib / 1024)?;
        }
        match (&self.limited, &self.cgroup) {
            _ if self.whole_host => f.write_str(": the host had no memory left"),
            (Some(limited), _) => write!(f, ": the limit of control group {limited} was reached"),
            (None, Some(cgroup)) => write!(f, ": control group {cgroup} had no memory left"),
            (None, None) => f.write_str(": its control group had no memory left"),
        }
    }
}

/// Returns a text for display, on one line and cut.
pub(super) fn shown(text: &str, most: usize) -> String {
    let mut text = sanitize::name(text).replace('\t', " ");
    cut(&mut text, most);
    text
}

impl KernelEvent {
    /// Bounds and sanitises the texts of an event of another process.
    pub(super) fn bound(&mut self) {
        let texts: Vec<(&mut String, usize)> = match &mut self.kind {
            KernelEventKind::Xid(xid) => {
                vec![(&mut xid.device, SHORT), (&mut xid.text, LONG)]
            }
            KernelEventKind::OomKill(kill) => {
                let groups = kill.cgroup.iter_mut().chain(&mut kill.limited);
                let groups = groups.map(|group| (group, LONG));
                groups.chain([(&mut kill.name, SHORT)]).collect()
            }
        };
        for (text, most) in texts {
            *text = shown(text, most);
        }
    }
}

/// Limits the events of another process to [`MOST`], and bounds each of them.
pub(super) fn bound(events: &mut Vec<KernelEvent>) {
    events.truncate(MOST);
    events.iter_mut().for_each(KernelEvent::bound);
}
