//! Reads the kernel's log, `/dev/kmsg`: within a limited time, and without waiting for further lines.
//!
//! `/dev/kmsg` returns one record per read, the oldest first. It may be read where `kernel.dmesg_restrict` is 0, or
//! with CAP_SYSLOG, and most containers do not have it at all. Both cases have results of their own, because an unread
//! log is not a clean one.

use std::fs::File;
use std::io::{ErrorKind, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::time::{Duration, Instant};
use std::{fmt, io};

use rustix::fs::OFlags;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::kernel_event::{self, KernelEvent};
use super::kernel_line::Lines;
use nccl_base::departure::cut;
use nccl_base::sanitize;

/// Names a file to read instead of `/dev/kmsg`: a copy of the log, or one that a test has written.
pub(super) const VARIABLE: &str = "NCCL_RUN_KMSG";

/// The kernel's own buffer for one record.
const LONGEST_RECORD: usize = 16 << 10;

/// How much is read of such a file, from its end.
const LONGEST_FILE: u64 = 4 << 20;

/// Maximum number of records read from the device.
const MOST_RECORDS: usize = 1 << 20;

/// What the kernel's log shows about devices and killed processes.
///
/// ```
/// use nccl::host_evidence::{HostEvidence, LogAccess};
///
/// let log = HostEvidence::gather().kernel_log;
/// match log.access {
///     LogAccess::Read => println!("{} events since this process was started", log.events.len()),
///     other => println!("nothing is known: {other}"),
/// }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct KernelLog {
    /// Whether the log could be read.
    pub access: LogAccess,
    /// The events, oldest first.
    pub events: Vec<KernelEvent>,
    /// Number of events left out.
    #[serde(default)]
    pub omitted: usize,
}

/// Whether the kernel's log could be read.
///
/// ```
/// assert_eq!(nccl::host_evidence::LogAccess::Absent.to_string(), "there is no /dev/kmsg here");
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LogAccess {
    /// It was read to its end.
    Read,
    /// The time ran out before its end.
    Partial,
    /// This process may not read it.
    NotPermitted,
    /// The file is not there, as in most containers.
    Absent,
    /// Reading it failed for another reason.
    Failed(String),
    /// It was not examined.
    #[default]
    NotRead,
}

impl fmt::Display for LogAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Read => f.write_str("it was read"),
            Self::Partial => f.write_str("it is too long to be read in time"),
            Self::NotPermitted => f.write_str(
                "this process may not read /dev/kmsg: kernel.dmesg_restrict is set, and it lacks CAP_SYSLOG",
            ),
            Self::Absent => f.write_str("there is no /dev/kmsg here"),
            Self::Failed(why) => write!(f, "/dev/kmsg cannot be read: {why}"),
            Self::NotRead => f.write_str("it was not read"),
        }
    }
}

impl KernelLog {
    /// Returns whether the whole log was read, and has no event.
    #[must_use]
    pub(super) fn is_clean(&self) -> bool {
        self.access == LogAccess::Read && self.events.is_empty()
    }

    pub(super) fn bound(&mut self) {
        kernel_event::bound(&mut self.events);
        if let LogAccess::Failed(why) = &mut self.access {
            *why = sanitize::name(why);
            cut(why, 256);
        }
    }

    /// Reads the log until `deadline`. Lines older than `since` are ignored; `since` and `now` count from the host's
    /// start.
    pub(super) fn read(path: &Path, since: Duration, now: Duration, deadline: Instant) -> Self {
        let mut lines = Lines::new(since, now);
        let access = match read(path, &mut lines, deadline) {
            Ok(true) => LogAccess::Read,
            Ok(false) => LogAccess::Partial,
            Err(error) => access_of(&error),
        };
        Self {
            access,
            events: lines.events,
            omitted: lines.omitted,
        }
    }
}

fn access_of(error: &io::Error) -> LogAccess {
    match error.kind() {
        ErrorKind::PermissionDenied => LogAccess::NotPermitted,
        ErrorKind::NotFound => LogAccess::Absent,
        _ => match error.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::PERM) => LogAccess::NotPermitted,
            Some(Errno::NXIO | Errno::NODEV) => LogAccess::Absent,
            _ => LogAccess::Failed(error.to_string()),
        },
    }
}

/// Reads all lines; returns whether the end was reached.
fn read(path: &Path, lines: &mut Lines, deadline: Instant) -> io::Result<bool> {
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    let mut file = File::options()
        .read(true)
        .custom_flags(flags.bits().cast_signed())
        .open(path)?;
    if !file.metadata()?.file_type().is_char_device() {
        return read_file(file, lines);
    }
    let mut record = vec![0; LONGEST_RECORD];
    for _ in 0..MOST_RECORDS {
        if Instant::now() >= deadline {
            return Ok(false);
        }
        match file.read(&mut record) {
            Ok(0) => return Ok(true),
            Ok(length) => lines.add(&record[..length]),
            Err(error) => match error.raw_os_error().map(Errno::from_raw_os_error) {
                Some(Errno::AGAIN) => return Ok(true),
                // Overwritten before it was read, or a signal: the next read returns another record.
                Some(Errno::PIPE | Errno::INTR) => {}
                _ => return Err(error),
            },
        }
    }
    Ok(false)
}

fn read_file(mut file: File, lines: &mut Lines) -> io::Result<bool> {
    let length = file.metadata()?.len();
    if length > LONGEST_FILE {
        file.seek(SeekFrom::Start(length - LONGEST_FILE))?;
    }
    let mut text = Vec::new();
    file.take(LONGEST_FILE).read_to_end(&mut text)?;
    text.split(|byte| *byte == b'\n')
        .for_each(|line| lines.add(line));
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(path: &Path) -> KernelLog {
        let deadline = Instant::now() + Duration::from_secs(10);
        KernelLog::read(path, Duration::ZERO, Duration::from_secs(1000), deadline)
    }

    #[test]
    fn a_file_in_the_place_of_the_device_is_read_to_its_end() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("kmsg");
        let xid = "4,1,990000000,-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n SUBSYSTEM=pci\n";
        let filler = "6,2,990000000,-;usb 1-1: new device\n".repeat(200_000);
        std::fs::write(&path, format!("{xid}{filler}{xid}{xid}")).unwrap();
        let log = read(&path);
        assert_eq!(log.access, LogAccess::Read);
        // The first line is beyond the limit.
        assert_eq!((log.events.len(), log.events[0].times), (1, 2));
        std::fs::write(&path, "").unwrap();
        assert!(read(&path).is_clean());
    }

    #[test]
    fn a_log_that_is_not_there_or_not_permitted_is_not_a_clean_one() {
        let directory = tempfile::tempdir().unwrap();
        let log = read(&directory.path().join("kmsg"));
        assert_eq!(log.access, LogAccess::Absent);
        assert!(!log.is_clean());
        for (errno, access) in [
            (Errno::PERM, LogAccess::NotPermitted),
            (Errno::ACCESS, LogAccess::NotPermitted),
            (Errno::NXIO, LogAccess::Absent),
        ] {
            let error = io::Error::from_raw_os_error(errno.raw_os_error());
            assert_eq!(access_of(&error), access);
        }
        assert!(matches!(
            access_of(&io::Error::from_raw_os_error(Errno::IO.raw_os_error())),
            LogAccess::Failed(_)
        ));
    }

    #[test]
    fn the_log_of_this_machine_is_read_without_waiting_or_the_reason_is_known() {
        let begun = Instant::now();
        let log = read(Path::new("/dev/kmsg"));
        assert!(begun.elapsed() < Duration::from_secs(10), "{log:?}");
        assert!(!matches!(log.access, LogAccess::NotRead), "{log:?}");
        // If the time runs out at once, nothing is known.
        let now = Instant::now();
        let log = KernelLog::read(Path::new("/dev/kmsg"), Duration::ZERO, Duration::ZERO, now);
        assert!(!log.is_clean(), "{log:?}");
    }
}
