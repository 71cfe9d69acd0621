//! Where threads of this process are in the kernel: their state, the function and the system call in which they wait, and
//! their kernel stack where that may be read (CAP_SYS_ADMIN).
//!
//! Nothing stops a thread, and nothing here waits for one: `/proc` shows what the scheduler knows.

use std::fmt;
use std::io::ErrorKind;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::kernel_event::shown;
use nccl_base::system::System;

/// Maximum number of threads examined, and reported.
const MOST_THREADS: usize = 4096;
const MOST_REPORTED: usize = 8;

/// Maximum number of frames of a kernel stack.
const MOST_FRAMES: usize = 8;

/// Maximum length of a text of a thread.
const LONGEST: usize = 96;

/// Time between the two looks at a thread, because a thread that waits for a disk for a moment is not stuck.
const AGAIN: Duration = Duration::from_millis(20);

/// A thread of this process, as the kernel sees it.
///
/// ```
/// for thread in nccl::host_evidence::HostEvidence::gather().threads {
///     println!("{thread}");
/// }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ThreadState {
    /// The thread's number (`gettid`), as its own PID namespace counts.
    pub tid: u32,
    /// Its name, of at most 15 bytes.
    pub name: String,
    /// The letter of its state: `R` (running), `S` (sleeping), `D` (uninterruptible sleep), `T` (stopped), …
    pub state: char,
    /// The function of the kernel in which it waits; `None` while it runs, or where that is not permitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_function: Option<String>,
    /// The number of the system call in which it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system_call: Option<u32>,
    /// The functions of its kernel stack, the innermost first; empty where that is not permitted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stack: Vec<String>,
    /// Files about the thread that this process may not read: names in `/proc/self/task/TID`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_permitted: Vec<String>,
}

impl ThreadState {
    /// Returns whether the thread sleeps in the kernel and cannot be killed, or was stopped.
    ///
    /// ```
    /// let threads = nccl::host_evidence::HostEvidence::gather().threads;
    /// println!("{} threads are stuck", threads.iter().filter(|thread| thread.is_stuck()).count());
    /// ```
    #[must_use]
    pub fn is_stuck(&self) -> bool {
        matches!(self.state, 'D' | 'T' | 't')
    }

    /// Returns whether the thread waits in NVIDIA's driver, as far as the names of functions show it.
    fn is_in_driver(&self) -> bool {
        const BEGINNINGS: [&str; 4] = ["nv", "_nv", "uvm_", "os_acquire"];
        let functions = self.wait_function.iter().chain(&self.stack);
        functions.map(|function| function.as_str()).any(|function| {
            BEGINNINGS
                .iter()
                .any(|beginning| function.starts_with(beginning))
        })
    }

    /// Returns name and state of thread `tid`; `None` if it has ended.
    fn state_of(system: &System, tid: u32) -> Option<Self> {
        let stat = system.text(format!("/proc/self/task/{tid}/stat"))?;
        // The name may contain parentheses.
        let (head, fields) = stat.rsplit_once(')')?;
        let name = head.split_once('(')?.1;
        let state = fields.trim_start().chars().next()?;
        Some(Self {
            tid,
            name: shown(name, LONGEST),
            state,
            ..Self::default()
        })
    }

    /// Looks at thread `tid`; `None` if it has ended.
    fn look(system: &System, tid: u32) -> Option<Self> {
        let mut thread = Self::state_of(system, tid)?;
        let file = |name: &str| format!("/proc/self/task/{tid}/{name}");
        let mut text = |name: &str| match system.bytes(file(name)) {
            Ok(bytes) => Some(String::from_utf8_lossy(&bytes).trim().to_owned()),
            Err(error) => {
                if error.kind() == ErrorKind::PermissionDenied {
                    thread.not_permitted.push(name.to_owned());
                }
                None
            }
        };
        let wait_function = text("wchan").filter(|text| text != "0" && !text.is_empty());
        let system_call = text("syscall");
        let stack = text("stack");
        thread.wait_function = wait_function.map(|text| shown(&text, LONGEST));
        // `running`, `-1` outside of a call, or the number and its arguments.
        thread.system_call = system_call.and_then(|text| {
            let number = text.split_ascii_whitespace().next()?;
            number.parse().ok()
        });
        let frames = stack.as_deref().unwrap_or_default().lines();
        // `[<0>] futex_wait+0x12/0x34`.
        let frames = frames.filter_map(|frame| {
            let function = frame.split_ascii_whitespace().nth(1)?;
            function.split('+').next()
        });
        let frames = frames.filter(|frame| !frame.is_empty());
        thread.stack = frames
            .take(MOST_FRAMES)
            .map(|frame| shown(frame, LONGEST))
            .collect();
        Some(thread)
    }

    fn bound(&mut self) {
        self.name = shown(&self.name, LONGEST);
        if self.state.is_control() {
            self.state = '?';
        }
        self.stack.truncate(MOST_FRAMES);
        self.not_permitted.truncate(MOST_FRAMES);
        let lists = self.stack.iter_mut().chain(&mut self.not_permitted);
        lists
            .chain(&mut self.wait_function)
            .for_each(|text| *text = shown(text, LONGEST));
    }
}

impl fmt::Display for ThreadState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match self.state {
            'R' => "runs",
            'S' => "sleeps",
            'D' => "sleeps in the kernel and cannot be killed",
            'T' => "is stopped",
            't' => "is stopped by a debugger",
            'Z' | 'X' => "has ended",
            'I' => "is idle",
            _ => "is in an unknown state",
        };
        write!(f, "thread {:?} (tid {}) {state}", self.name, self.tid)?;
        if let Some(call) = self.system_call {
            write!(f, ", in system call {call}")?;
            if let Some(name) = call_name(call) {
                write!(f, " ({name})")?;
            }
        }
        if let Some(function) = &self.wait_function {
            write!(f, ", at {function}")?;
        }
        if !self.stack.is_empty() {
            write!(f, "; kernel stack: {}", self.stack.join(" < "))?;
        }
        if !self.not_permitted.is_empty() {
            write!(f, "; not permitted: {}", self.not_permitted.join(", "))?;
        }
        Ok(())
    }
}

/// Returns the name of a system call in which threads wait.
fn call_name(number: u32) -> Option<&'static str> {
    #[cfg(target_arch = "x86_64")]
    const NAMES: [(u32, &str); 14] = [
        (0, "read"),
        (1, "write"),
        (3, "close"),
        (7, "poll"),
        (9, "mmap"),
        (11, "munmap"),
        (16, "ioctl"),
        (24, "sched_yield"),
        (35, "nanosleep"),
        (45, "recvfrom"),
        (202, "futex"),
        (230, "clock_nanosleep"),
        (232, "epoll_wait"),
        (281, "epoll_pwait"),
    ];
    #[cfg(not(target_arch = "x86_64"))]
    const NAMES: [(u32, &str); 9] = [
        (22, "epoll_pwait"),
        (29, "ioctl"),
        (57, "close"),
        (63, "read"),
        (64, "write"),
        (73, "ppoll"),
        (98, "futex"),
        (101, "nanosleep"),
        (115, "clock_nanosleep"),
    ];
    let known = NAMES.iter().find(|(known, _)| *known == number);
    known.map(|(_, name)| *name)
}

/// Which threads to report, beside those that are stuck in the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[doc(hidden)]
pub struct ThreadsOfInterest {
    /// Whether a call of this process into NCCL or CUDA has not returned: then the first thread, those on which this
    /// library makes calls, and those in NVIDIA's driver.
    pub in_calls: bool,
}

/// The beginning of the names of threads on which this library makes calls that may not return.
const CALLERS: [&str; 2] = ["nccl-call", "nccl-finalize"];

/// Returns the threads of interest, those that are found until `deadline`.
pub(super) fn gather(
    system: &System,
    of_interest: ThreadsOfInterest,
    deadline: Instant,
) -> Vec<ThreadState> {
    let tids = system.names("/proc/self/task").into_iter();
    let mut tids: Vec<u32> = tids.filter_map(|tid| tid.parse().ok()).collect();
    tids.sort_unstable();
    let first = tids.first().copied();
    let is_of_interest = |thread: &ThreadState| {
        let is_caller = Some(thread.tid) == first
            || CALLERS.iter().any(|name| thread.name.starts_with(name))
            || thread.is_in_driver();
        thread.is_stuck() || (of_interest.in_calls && is_caller)
    };
    // The place of a thread in the kernel takes three more files, so it is read for few threads only.
    let is_candidate = |tid: &u32| {
        of_interest.in_calls
            || ThreadState::state_of(system, *tid).is_some_and(|thread| thread.is_stuck())
    };
    let threads = tids
        .into_iter()
        .take(MOST_THREADS)
        .take_while(|_| Instant::now() < deadline)
        .filter(is_candidate)
        .filter_map(|tid| ThreadState::look(system, tid));
    let mut threads: Vec<_> = threads.filter(is_of_interest).take(MOST_REPORTED).collect();
    if threads.iter().any(ThreadState::is_stuck) {
        std::thread::sleep(AGAIN);
        threads.retain_mut(|thread| {
            let Some(now) = ThreadState::look(system, thread.tid) else {
                return false;
            };
            let stays = (now.state, &now.wait_function, now.system_call)
                == (thread.state, &thread.wait_function, thread.system_call);
            *thread = now;
            stays || (is_of_interest(thread) && !thread.is_stuck())
        });
    }
    threads
}

pub(super) fn bound(threads: &mut Vec<ThreadState>) {
    threads.truncate(MOST_REPORTED);
    threads.iter_mut().for_each(ThreadState::bound);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    fn write(root: &std::path::Path, tid: u32, file: &str, text: &str) {
        let directory = root.join(format!("proc/self/task/{tid}"));
        std::fs::create_dir_all(&directory).unwrap();
        std::fs::write(directory.join(file), text).unwrap();
    }

    #[test]
    fn a_thread_that_is_stuck_in_the_driver_is_reported_with_its_place() {
        let root = tempfile::tempdir().unwrap();
        write(root.path(), 7, "stat", "7 (a) R) D 1 7 7 0 -1");
        write(root.path(), 7, "wchan", "nv_wait");
        write(root.path(), 7, "syscall", "16 0x3 0x0\n");
        write(
            root.path(),
            7,
            "stack",
            "[<0>] nv_wait+0x1/0x2\n[<0>] nvidia_ioctl+0x3/0x4 [nvidia]\n",
        );
        write(root.path(), 3, "stat", "3 (main) S 1 7 7 0 -1");
        write(root.path(), 3, "wchan", "0");
        write(root.path(), 3, "syscall", "running\n");
        let system = System::fake(root.path(), &[]);
        let none = gather(&system, ThreadsOfInterest::default(), Instant::now());
        assert_eq!(none, [], "there is no time left");
        let threads = gather(&system, ThreadsOfInterest::default(), soon());
        let [stuck] = &threads[..] else {
            panic!("{threads:?}")
        };
        assert!(
            stuck.to_string().starts_with(
                "thread \"a) R\" (tid 7) sleeps in the kernel and cannot be killed, in system call 16"
            ),
            "{stuck}"
        );
        assert_eq!(stuck.wait_function.as_deref(), Some("nv_wait"));
        assert_eq!(stuck.stack[0], "nv_wait");
        write(root.path(), 5, "stat", "5 (worker) S 1 7 7 0 -1");
        write(root.path(), 5, "wchan", "os_acquire_mutex");
        write(root.path(), 6, "stat", "6 (other) S 1 7 7 0 -1");
        let threads = gather(&system, ThreadsOfInterest { in_calls: true }, soon());
        let tids: Vec<_> = threads.iter().map(|thread| thread.tid).collect();
        assert_eq!(tids, [3, 5, 7]);
        assert_eq!(threads[0].to_string(), "thread \"main\" (tid 3) sleeps");
    }

    #[test]
    fn the_threads_of_this_process_are_read_and_what_is_not_permitted_is_said() {
        let threads = gather(
            &System::real(),
            ThreadsOfInterest { in_calls: true },
            soon(),
        );
        let first = threads
            .iter()
            .find(|thread| thread.tid == std::process::id());
        let first = first.unwrap_or_else(|| panic!("{threads:?}"));
        assert!(!first.name.is_empty(), "{first:?}");
        let may_read_stack = !first.stack.is_empty() || first.state == 'R';
        let is_said = first.not_permitted.iter().any(|file| file == "stack");
        // A kernel may have none of these files.
        let has_stack = std::path::Path::new("/proc/self/stack").exists();
        assert!(may_read_stack || is_said || !has_stack, "{first:?}");
    }
}
