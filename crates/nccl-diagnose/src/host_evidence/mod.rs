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
//! fault. Reading may block, as all files of a kernel in trouble may, so a thread of its own reads, part by part; what is there
//! after [`LIMIT`] is reported.
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
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::sync::{Condvar, Mutex};
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
    /// Whether this process knows PIDs by the numbers that the kernel's log has, if that was read.
    #[serde(default)]
    has_host_pids: Option<bool>,
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
        let deadline = Instant::now() + LIMIT;
        let shared = shared(deadline);
        let own = (of_interest != ThreadsOfInterest::default()).then(|| {
            Gathering::start(move |gathering| {
                let until = deadline - LIMIT / 8;
                let threads = threads::gather(&System::real(), of_interest, until);
                gathering.add(|evidence| evidence.threads = threads);
            })
        });
        let mut evidence = shared.wait(deadline);
        if let Some(own) = own.map(|own| own.wait(deadline))
            && !own.threads.is_empty()
        {
            evidence.threads = own.threads;
        }
        evidence
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
        let begun = Instant::now();
        let gathering = Gathering::start(move |gathering| {
            let question = Question::ask(Which::All);
            read(gathering, Duration::ZERO, begun + PATIENCE);
            let devices = question.wait(begun + START);
            gathering.add(|evidence| evidence.devices = devices);
        });
        gathering.wait(begun + PATIENCE + START)
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
    /// concern every process of a host; a process that was ended in another control group does not. In a PID namespace, `pids` are
    /// not the numbers of the log.
    #[doc(hidden)]
    pub fn events_of(&self, pids: &[u32]) -> impl Iterator<Item = &KernelEvent> {
        let concerns = move |event: &&KernelEvent| match &event.kind {
            KernelEventKind::Xid(_) => true,
            KernelEventKind::OomKill(kill) => {
                kill.whole_host
                    || (self.has_host_pids == Some(true) && pids.contains(&kill.pid))
                    || kill
                        .cgroup
                        .as_deref()
                        .is_some_and(|group| self.may_be_of_own_group(group))
            }
        };
        self.kernel_log.events.iter().filter(concerns)
    }

    /// Returns whether the processes have the same PIDs here as in the kernel's log, if that was read.
    #[doc(hidden)]
    #[must_use]
    pub fn has_host_pids(&self) -> Option<bool> {
        self.has_host_pids
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

/// Evidence that a thread gathers part by part, so that a part that does not come costs no other part.
#[derive(Default)]
struct Gathering {
    so_far: Mutex<SoFar>,
    /// Notified when the thread has ended.
    ended: Condvar,
}

#[derive(Default)]
struct SoFar {
    evidence: HostEvidence,
    has_ended: bool,
}

impl Gathering {
    /// Runs `gather` on a thread of its own.
    fn start(gather: impl FnOnce(&Self) + Send + 'static) -> Arc<Self> {
        let gathering = Arc::new(Self::default());
        if let Some(running) = Running::new(&gathering) {
            // Without a thread, `running` is dropped with the closure.
            let _ = std::thread::Builder::new()
                .name(String::from("nccl-evidence"))
                .spawn(move || gather(&running.0));
        }
        gathering
    }

    fn add(&self, add: impl FnOnce(&mut HostEvidence)) {
        add(&mut self.so_far.lock().evidence);
    }

    /// Returns all evidence, or at `deadline` what is there.
    fn wait(&self, deadline: Instant) -> HostEvidence {
        let mut so_far = self.so_far.lock();
        while !so_far.has_ended {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            self.ended.wait_for(&mut so_far, left);
        }
        so_far.evidence.clone()
    }
}

/// A gathering until its thread ends, by a panic too.
struct Running(Arc<Gathering>);

/// The number of threads that gather.
static RUNNING: AtomicUsize = AtomicUsize::new(0);

impl Running {
    fn new(gathering: &Arc<Gathering>) -> Option<Self> {
        /// Limits the threads on a kernel whose files do not return: each fault would add one.
        const MOST_THREADS: usize = 64;
        let running = Self(Arc::clone(gathering));
        (RUNNING.fetch_add(1, Ordering::Relaxed) < MOST_THREADS).then_some(running)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        RUNNING.fetch_sub(1, Ordering::Relaxed);
        self.0.so_far.lock().has_ended = true;
        self.0.ended.notify_all();
    }
}

/// When a gathering began, and the gathering.
type Last = Mutex<Option<(Instant, Arc<Gathering>)>>;

/// Returns the gathering of this process's evidence, one for all ranks and communicators that ask within a moment.
fn shared(deadline: Instant) -> Arc<Gathering> {
    static LAST: Last = Mutex::new(None);
    last_or(&LAST, || {
        Gathering::start(move |gathering| {
            let system = System::real();
            // Meanwhile, NVML answers on a thread of its own.
            let question = Question::ask(Which::Watched);
            let since = started(&system).unwrap_or_default();
            read(gathering, since, deadline - LIMIT / 4);
            let until = deadline - LIMIT / 8;
            let threads = threads::gather(&system, ThreadsOfInterest::default(), until);
            gathering.add(|evidence| evidence.threads = threads);
            let devices = question.wait(until);
            gathering.add(|evidence| evidence.devices = devices);
        })
    })
}

/// Returns the last gathering if it has just begun, else the one that `start` starts. Waits for neither.
fn last_or(last: &Last, start: impl FnOnce() -> Arc<Gathering>) -> Arc<Gathering> {
    const FRESH: Duration = Duration::from_millis(100);
    let mut last = last.lock();
    match &*last {
        Some((begun, gathering)) if begun.elapsed() < FRESH => Arc::clone(gathering),
        _ => {
            let begun = Instant::now();
            let (_, gathering) = last.insert((begun, start()));
            Arc::clone(gathering)
        }
    }
}

/// Reads the log from `since` on, counted from the host's start, until `deadline`, and the memory of the control group.
fn read(gathering: &Gathering, since: Duration, deadline: Instant) {
    let path = std::env::var_os(kernel_log::VARIABLE).filter(|path| !path.is_empty());
    let path = path.map_or_else(|| PathBuf::from("/dev/kmsg"), PathBuf::from);
    // Before the log, because events are of no rank without it.
    let has_host_pids = has_host_pids(&System::real());
    gathering.add(|evidence| evidence.has_host_pids = has_host_pids);
    let log = KernelLog::read(&path, since, clock(ClockId::Monotonic), deadline);
    gathering.add(|evidence| evidence.kernel_log = log);
    let memory = Memory::gather(&System::real(), memory::baseline());
    gathering.add(|evidence| evidence.memory = memory);
}

/// Returns whether this process is in the host's PID namespace, the number of which is fixed in the kernel (`PROC_PID_INIT_INO`).
fn has_host_pids(system: &System) -> Option<bool> {
    let namespace = system.link("/proc/self/ns/pid")?;
    Some(namespace == "pid:[4026531836]")
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
        let mut evidence = HostEvidence {
            has_host_pids: Some(true),
            ..HostEvidence::default()
        };
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
        evidence.has_host_pids = Some(false);
        assert_eq!(
            pids(&evidence, &[4]),
            [1, 5],
            "another process has that PID"
        );
        // The root of a namespace of control groups.
        evidence.memory.cgroup = String::from("/");
        assert_eq!(pids(&evidence, &[]), [5]);
        evidence.memory.oom_kills = Some(1);
        assert_eq!(pids(&evidence, &[]), [1, 2, 3, 4, 5]);
    }

    #[test]
    fn the_pid_namespace_of_the_host_is_known_by_its_number() {
        let root = tempfile::tempdir().unwrap();
        let system = System::fake(root.path(), &[]);
        assert_eq!(has_host_pids(&system), None);
        let directory = root.path().join("proc/self/ns");
        std::fs::create_dir_all(&directory).unwrap();
        for (link, is_of_host) in [("pid:[4026531836]", true), ("pid:[4026532201]", false)] {
            let _ = std::fs::remove_file(directory.join("pid"));
            std::os::unix::fs::symlink(link, directory.join("pid")).unwrap();
            assert_eq!(has_host_pids(&system), Some(is_of_host));
        }
    }

    #[test]
    fn this_process_was_started_before_now_and_after_the_host() {
        let started = started(&System::real()).unwrap();
        let age = clock(ClockId::Monotonic).checked_sub(started).unwrap();
        assert!(age < Duration::from_secs(3600), "{age:?}");
    }

    #[test]
    fn evidence_that_does_not_come_is_not_waited_for_and_what_is_there_is_kept() {
        let begun = Instant::now();
        let (added, is_there) = std::sync::mpsc::channel();
        let gathering = Gathering::start(move |gathering| {
            let events = vec![killed(1, "/job/a", true)];
            gathering.add(|evidence| evidence.kernel_log.events = events);
            added.send(()).unwrap();
            std::thread::sleep(Duration::from_secs(20));
        });
        is_there.recv_timeout(Duration::from_secs(10)).unwrap();
        let evidence = gathering.wait(Instant::now() + Duration::from_millis(30));
        assert!(begun.elapsed() < Duration::from_secs(15));
        assert_eq!(evidence.kernel_log.access, LogAccess::NotRead);
        assert_eq!(evidence.kernel_log.events.len(), 1);
    }

    #[test]
    fn a_gathering_that_hangs_does_not_stop_the_next_one() {
        let hangs = Gathering::start(|_| std::thread::sleep(Duration::from_secs(5)));
        let later = Instant::now() + Duration::from_secs(60);
        let last: Last = Mutex::new(Some((later, hangs)));
        let joined = last_or(&last, || unreachable!("one has just begun"));
        assert!(!joined.so_far.lock().has_ended);
        let earlier = Instant::now().checked_sub(Duration::from_secs(1)).unwrap();
        *last.lock() = Some((earlier, joined));
        let next = last_or(&last, || {
            Gathering::start(|gathering| gathering.add(|evidence| evidence.kernel_log.omitted = 7))
        });
        let evidence = next.wait(Instant::now() + Duration::from_secs(10));
        assert_eq!(evidence.kernel_log.omitted, 7);
    }

    #[test]
    fn gatherings_that_panic_do_not_use_up_the_threads() {
        let soon = Duration::from_secs(10);
        for _ in 0..200 {
            let gathering = Gathering::start(|_| std::panic::resume_unwind(Box::new(())));
            gathering.wait(Instant::now() + soon);
        }
        let gathering =
            Gathering::start(|gathering| gathering.add(|evidence| evidence.kernel_log.omitted = 7));
        let evidence = gathering.wait(Instant::now() + soon);
        assert_eq!(evidence.kernel_log.omitted, 7);
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
