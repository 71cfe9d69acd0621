//! Evidence of a failure on the host: the kernel's log, the memory of the control group, the threads of this process,
//! its devices, and the identity of the loaded library.
//!
//! - `kernel_log` reads `/dev/kmsg`, `kernel_line` parses its lines into values of `kernel_event`, `xid` explains
//!   NVIDIA's numbers;
//! - `memory`: the control group; `threads`: `/proc/self/task`;
//! - `devices`: what NVML reports about the devices on which communicators were made, with the feature `nvml`;
//! - `library`: the build id of libnccl, which preflight compares among ranks.
//!
//! A rank gathers this evidence when a diagnosis asks for its report, and when one of its communicators has ended by a
//! fault. Reading may block, as all files of a kernel in trouble may, so a thread of its own reads, within [`LIMIT`];
//! evidence that is not there by then is not reported.
//!
//! Only events since the start of this process are evidence. The log's clock is not adjusted as other clocks are, so
//! after a month it may be seconds away from them.

mod devices;
mod kernel_event;
mod kernel_line;
mod kernel_log;
mod library;
mod memory;
mod threads;
mod xid;

pub use devices::{DeviceState, DeviceTrouble, Devices, NvlinkError, NvmlAccess, ThrottleReason};
#[doc(hidden)]
pub use devices::{bound as bound_devices, bus_id, of_device, watch as watch_device};
pub use kernel_event::{KernelEvent, KernelEventKind, OomKill, Xid};
pub use kernel_log::{KernelLog, LogAccess};
pub use library::build_id;
pub use memory::Memory;
pub use threads::ThreadState;
#[doc(hidden)]
pub use threads::ThreadsOfInterest;

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::sync::Mutex;
use devices::{Question, Which};
use nccl_base::system::System;

/// The time within which evidence is gathered.
#[doc(hidden)]
pub const LIMIT: Duration = Duration::from_millis(250);

/// What a host shows, as one of its processes sees it.
///
/// ```
/// let evidence = nccl::host_evidence::HostEvidence::gather();
/// println!("kernel log: {}", evidence.kernel_log.access);
/// for event in &evidence.kernel_log.events {
///     println!("{event}, {:?} ago", event.age);
/// }
/// println!("{}", evidence.memory);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct HostEvidence {
    /// The kernel's log.
    #[serde(default)]
    pub kernel_log: KernelLog,
    /// The memory of this process's control group.
    #[serde(default)]
    pub memory: Memory,
    /// Threads of this process that are stuck in the kernel, or in a call that has not returned.
    #[serde(default)]
    pub threads: Vec<ThreadState>,
    /// The devices on which communicators of this process were made; those of the host in [`of_host`](Self::of_host).
    #[serde(default)]
    pub devices: Devices,
}

impl HostEvidence {
    /// Gathers what has happened since this process was started, within 250 ms. Evidence that cannot be read by then is
    /// missing; [`KernelLog::access`] shows that for the kernel's log.
    #[must_use]
    pub fn gather() -> Self {
        Self::of_process(ThreadsOfInterest::default())
    }

    /// As [`gather`](Self::gather), with the threads `of_interest`.
    #[doc(hidden)]
    #[must_use]
    pub fn of_process(of_interest: ThreadsOfInterest) -> Self {
        within(LIMIT, move |deadline| {
            let mut evidence = shared(deadline);
            if of_interest != ThreadsOfInterest::default() {
                evidence.threads = threads::gather(&System::real(), of_interest);
            }
            evidence
        })
    }

    /// Gathers everything that the kernel's log still has, including the time before this process was started.
    ///
    /// ```
    /// let evidence = nccl::host_evidence::HostEvidence::of_host();
    /// println!("{} events in the kernel's log", evidence.kernel_log.events.len());
    /// ```
    #[must_use]
    pub fn of_host() -> Self {
        const PATIENCE: Duration = Duration::from_secs(2);
        // NVML takes some seconds to start where no process keeps the driver awake.
        const START: Duration = Duration::from_secs(6);
        within(PATIENCE + START, |deadline| {
            let question = Question::ask(Which::All);
            let evidence = read(Duration::ZERO, Instant::now() + PATIENCE);
            HostEvidence {
                devices: question.wait(deadline),
                ..evidence
            }
        })
    }

    /// Returns whether the kernel's log was read to its end, and has nothing of interest.
    ///
    /// ```
    /// let clean = nccl::host_evidence::HostEvidence::gather().has_clean_log();
    /// ```
    #[must_use]
    pub fn has_clean_log(&self) -> bool {
        self.kernel_log.is_clean()
    }

    /// Returns the events that concern a job with these processes on the host. An Xid and a host without memory may
    /// concern every process of a host; a process that was ended in another control group does not.
    #[doc(hidden)]
    pub fn events_of(&self, pids: &[u32]) -> impl Iterator<Item = &KernelEvent> {
        let concerns = move |event: &&KernelEvent| match &event.kind {
            KernelEventKind::Xid(_) => true,
            KernelEventKind::OomKill(kill) => {
                kill.whole_host
                    || pids.contains(&kill.pid)
                    || kill
                        .cgroup
                        .as_deref()
                        .is_some_and(|group| self.may_be_of_own_group(group))
            }
        };
        self.kernel_log.events.iter().filter(concerns)
    }

    /// Returns whether a process that was killed in `group` was in this process's control group; one below it may be of another
    /// job. A group that is the root in its namespace has another path on the host: there the count of kills decides.
    fn may_be_of_own_group(&self, group: &str) -> bool {
        match self.memory.cgroup.trim_end_matches('/') {
            "" => self.memory.oom_kills > Some(0),
            own => own == group,
        }
    }

    /// Bounds and sanitises the evidence of another process.
    #[doc(hidden)]
    #[must_use]
    pub fn bounded(mut self) -> Self {
        self.kernel_log.bound();
        self.memory.bound();
        threads::bound(&mut self.threads);
        devices::bound(&mut self.devices);
        self
    }
}

/// Records the counters from which kills are counted.
#[doc(hidden)]
pub fn begin() {
    let _ = memory::baseline();
}

/// Runs `gather` on a thread of its own, and returns its result; empty if it has not returned within `limit`.
fn within(
    limit: Duration,
    gather: impl FnOnce(Instant) -> HostEvidence + Send + 'static,
) -> HostEvidence {
    /// Limits the threads on a kernel whose files do not return: each fault would add one.
    const MOST_THREADS: usize = 64;
    static RUNNING: AtomicUsize = AtomicUsize::new(0);

    let deadline = Instant::now() + limit;
    if RUNNING.fetch_add(1, Ordering::Relaxed) >= MOST_THREADS {
        RUNNING.fetch_sub(1, Ordering::Relaxed);
        return HostEvidence::default();
    }
    let (to, found) = mpsc::sync_channel(1);
    let spawned = std::thread::Builder::new()
        .name(String::from("nccl-evidence"))
        .spawn(move || {
            // The other files are read in the rest of the time.
            let _ = to.send(gather(deadline - limit / 4));
            RUNNING.fetch_sub(1, Ordering::Relaxed);
        });
    if spawned.is_err() {
        RUNNING.fetch_sub(1, Ordering::Relaxed);
        return HostEvidence::default();
    }
    let left = deadline.saturating_duration_since(Instant::now());
    found.recv_timeout(left).unwrap_or_default()
}

/// Returns the evidence of this process, cached for a moment for its ranks and communicators.
fn shared(deadline: Instant) -> HostEvidence {
    const FRESH: Duration = Duration::from_millis(100);
    static KEPT: Mutex<Option<(Instant, HostEvidence)>> = Mutex::new(None);

    let mut kept = KEPT.lock();
    match &*kept {
        Some((at, evidence)) if at.elapsed() < FRESH => evidence.clone(),
        _ => {
            let system = System::real();
            // Meanwhile, NVML answers on a thread of its own.
            let question = Question::ask(Which::Watched);
            let evidence = HostEvidence {
                threads: threads::gather(&system, ThreadsOfInterest::default()),
                ..read(started(&system).unwrap_or_default(), deadline)
            };
            let evidence = HostEvidence {
                // Gathering the rest needs some of the time.
                devices: question.wait(deadline - LIMIT / 4),
                ..evidence
            };
            *kept = Some((Instant::now(), evidence.clone()));
            evidence
        }
    }
}

/// Reads the log from `since` on, counted from the host's start, and the memory of the control group.
fn read(since: Duration, deadline: Instant) -> HostEvidence {
    let path = std::env::var_os(kernel_log::VARIABLE).filter(|path| !path.is_empty());
    let path = path.map_or_else(|| PathBuf::from("/dev/kmsg"), PathBuf::from);
    HostEvidence {
        kernel_log: KernelLog::read(&path, since, clock(ClockId::Monotonic), deadline),
        memory: Memory::gather(&System::real(), memory::baseline()),
        threads: Vec::new(),
        devices: Devices::default(),
    }
}

fn clock(clock: ClockId) -> Duration {
    Duration::try_from(clock_gettime(clock)).unwrap_or_default()
}

/// Returns when this process was started, in the time of the kernel's log.
fn started(system: &System) -> Option<Duration> {
    /// The unit of `/proc/self/stat` on x86-64 and aarch64.
    const TICKS_PER_SECOND: u64 = 100;
    const START_TIME: usize = 19;
    let stat = system.text("/proc/self/stat")?;
    let fields = stat.rsplit_once(')')?.1;
    let ticks: u64 = fields
        .split_ascii_whitespace()
        .nth(START_TIME)?
        .parse()
        .ok()?;
    let started = Duration::from_millis(ticks * (1000 / TICKS_PER_SECOND));
    // The clock of the process includes the time in which the host was suspended; the log's clock does not.
    let age = clock(ClockId::Boottime).saturating_sub(started);
    Some(clock(ClockId::Monotonic).saturating_sub(age))
}

/// Durations as milliseconds.
mod millis {
    use std::time::Duration;

    use serde::{Deserialize as _, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u64(u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
    }

    pub(super) fn deserialize<'d, D: Deserializer<'d>>(from: D) -> Result<Duration, D::Error> {
        u64::deserialize(from).map(Duration::from_millis)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn killed(pid: u32, cgroup: &str, whole_host: bool) -> KernelEvent {
        KernelEvent {
            age: Duration::from_secs(1),
            times: 1,
            kind: KernelEventKind::OomKill(OomKill {
                pid,
                cgroup: Some(cgroup.to_owned()),
                whole_host,
                ..OomKill::default()
            }),
        }
    }

    #[test]
    fn a_process_that_was_ended_in_another_group_is_no_evidence() {
        let mut evidence = HostEvidence::default();
        evidence.memory.cgroup = String::from("/job/a");
        evidence.kernel_log.events = vec![
            killed(1, "/job/a", false),
            killed(2, "/job/a/loader", false),
            killed(3, "/job/abc", false),
            killed(4, "/other", false),
            killed(5, "/other", true),
        ];
        let pids = |evidence: &HostEvidence, of: &[u32]| -> Vec<u32> {
            let pid = |event: &KernelEvent| match &event.kind {
                KernelEventKind::OomKill(kill) => kill.pid,
                KernelEventKind::Xid(_) => 0,
            };
            evidence.events_of(of).map(pid).collect()
        };
        assert_eq!(pids(&evidence, &[]), [1, 5]);
        assert_eq!(pids(&evidence, &[4]), [1, 4, 5]);
        // The root of a namespace of control groups.
        evidence.memory.cgroup = String::from("/");
        assert_eq!(pids(&evidence, &[]), [5]);
        evidence.memory.oom_kills = Some(1);
        assert_eq!(pids(&evidence, &[]), [1, 2, 3, 4, 5]);
    }

    #[test]
    fn this_process_was_started_before_now_and_after_the_host() {
        let started = started(&System::real()).unwrap();
        let age = clock(ClockId::Monotonic).checked_sub(started).unwrap();
        assert!(age < Duration::from_secs(3600), "{age:?}");
    }

    #[test]
    fn evidence_that_does_not_come_is_not_waited_for() {
        let limit = Duration::from_millis(30);
        let begun = Instant::now();
        let evidence = within(limit, |_| {
            std::thread::sleep(Duration::from_secs(5));
            HostEvidence::default()
        });
        assert!(begun.elapsed() < Duration::from_secs(3));
        assert_eq!(evidence.kernel_log.access, LogAccess::NotRead);
    }

    #[test]
    fn evidence_goes_through_json_and_is_bounded_on_its_way() {
        let evidence = HostEvidence::of_process(ThreadsOfInterest { in_calls: true });
        let json = serde_json::to_string(&evidence).unwrap();
        let back: HostEvidence = serde_json::from_str(&json).unwrap();
        let bounded = back.bounded();
        assert_eq!(bounded.threads.len(), evidence.threads.len());
        assert_eq!(
            serde_json::from_str::<HostEvidence>("{}").unwrap(),
            HostEvidence::default()
        );
        let mut long = HostEvidence::default();
        long.memory.cgroup = "/\x1b[2J".repeat(1000);
        long.kernel_log.events = vec![killed(1, &"x\n".repeat(1000), false); 1000];
        let long = long.bounded();
        assert!(serde_json::to_string(&long).unwrap().len() < 40_000);
        assert!(!long.memory.cgroup.contains('\x1b'));
    }
}
