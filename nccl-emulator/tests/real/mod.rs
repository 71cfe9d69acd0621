//! Ranks on NVIDIA's own library: each test runs once for each library of `NCCL_REAL_LIBRARIES`, whose paths are
//! separated by colons; without it a test says that nothing was tested. `cargo xtask real-nccl test` sets it.

// Each test file uses its own part of this.
#![allow(dead_code)]

pub(crate) mod page;
pub(crate) mod profiler;
pub(crate) mod windows;

use std::env;
use std::fs;
use std::process::ExitStatus;
use std::thread;
use std::time::{Duration, Instant};

use nccl_sys::{NCCL_CONFIG_INITIALIZER, ncclDataType_t as Kind, ncclRedOp_t as Op};

use crate::ranks::{self, Memory, Process, Rank, is_child_of, nccl, processes_ending, wait_until};

const LIBRARIES: &str = "NCCL_REAL_LIBRARIES";

/// What is set for every test: the library's warnings go to a file for each process, and InfiniBand is off.
const SETTINGS: [(&str, &str); 6] = [
    ("NCCL_DEBUG", "INFO"),
    ("NCCL_DEBUG_SUBSYS", "ALL"),
    ("NCCL_DEBUG_FILE", "{place}/log.{rank}"),
    ("NCCL_NET", "Socket"),
    ("NCCL_IB_DISABLE", "1"),
    ("NCCL_RAS_ENABLE", "0"),
];

/// Neighbours use sockets, as ranks of different hosts do.
pub(crate) const SOCKETS: [(&str, &str); 2] =
    [("NCCL_P2P_DISABLE", "1"), ("NCCL_SHM_DISABLE", "1")];
/// Neighbours write to each other's memory.
pub(crate) const P2P: [(&str, &str); 1] = [("NCCL_P2P_LEVEL", "SYS")];
/// Neighbours share host memory.
pub(crate) const SHM: [(&str, &str); 1] = [("NCCL_P2P_DISABLE", "1")];

/// The libraries to test on.
pub(crate) fn libraries(test: &str) -> Vec<String> {
    let paths = env::var(LIBRARIES).unwrap_or_default();
    let paths: Vec<String> = paths
        .split(':')
        .filter(|path| !path.is_empty())
        .map(String::from)
        .collect();
    if paths.is_empty() {
        println!(
            "NOT TESTED: {test}: {LIBRARIES} names no libnccl.so.2 (cargo xtask real-nccl test)"
        );
    }
    paths
}

/// Runs `body` in `ranks` processes, on each library; `ending` judges how each of them ended.
pub(crate) fn processes_on_each(
    test: &str,
    ranks: i32,
    environment: &[(&str, &str)],
    ending: impl Fn(i32, ExitStatus) -> bool + Copy,
    body: impl Fn(Process),
) {
    if is_child_of(test) {
        processes_ending(test, ranks, &[], ending, body);
        // A test that tries several environments comes here once in each child.
        std::process::exit(0);
    }
    for library in libraries(test) {
        println!("{test} on {library}");
        let all = environment_of(&library, environment);
        processes_ending(test, ranks, &all, ending, &body);
    }
}

/// The settings of every test on this library, and those of one test.
pub(crate) fn environment_of<'a>(
    library: &'a str,
    of_test: &[(&'a str, &'a str)],
) -> Vec<(&'a str, &'a str)> {
    let mut all = SETTINGS.to_vec();
    // An empty variable counts as not set.
    let library = if library == OWN { "" } else { library };
    all.push(("NCCL_EMULATOR_NCCL", library));
    all.retain(|(name, _)| of_test.iter().all(|(other, _)| other != name));
    all.extend(of_test);
    all
}

/// The emulator's own NCCL, among libraries.
const OWN: &str = "the emulator's own NCCL";

/// [`processes_on_each`], and the same on the emulator's own NCCL.
pub(crate) fn processes_on_both(
    test: &str,
    ranks: i32,
    environment: &[(&str, &str)],
    ending: impl Fn(i32, ExitStatus) -> bool + Copy,
    body: impl Fn(Process),
) {
    if !is_child_of(test) {
        println!("{test} on {OWN}");
        let all = environment_of(OWN, environment);
        processes_ending(test, ranks, &all, ending, &body);
    }
    processes_on_each(test, ranks, environment, ending, body);
}

/// [`processes_on_both`], ending well.
pub(crate) fn on_both(
    test: &str,
    ranks: i32,
    environment: &[(&str, &str)],
    body: impl Fn(Process),
) {
    processes_on_both(test, ranks, environment, |_, status| status.success(), body);
}

/// [`processes_on_each`], ending well.
pub(crate) fn on_each(
    test: &str,
    ranks: i32,
    environment: &[(&str, &str)],
    body: impl Fn(Process),
) {
    processes_on_each(test, ranks, environment, |_, status| status.success(), body);
}

/// The release of the library of this process: 2.28.3 is 22803.
pub(crate) fn version() -> i32 {
    ranks::api();
    let mut version = 0;
    assert_eq!(nccl!(ncclGetVersion(&mut version)), 0);
    version
}

/// Whether a rank was killed.
pub(crate) fn killed(status: ExitStatus) -> bool {
    use std::os::unix::process::ExitStatusExt;
    status.signal() == Some(libc::SIGKILL)
}

/// Kills this process with SIGKILL.
pub(crate) fn die() -> ! {
    // SAFETY: ends the process.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    unreachable!()
}

/// Two buffers of floats: the input and the output of an all-reduce.
pub(crate) struct Buffers {
    pub(crate) from: Memory<f32>,
    pub(crate) to: Memory<f32>,
}

impl Buffers {
    /// Two buffers of 1000 floats each.
    pub(crate) fn of(rank: &Rank) -> Self {
        Self::sized(rank, 1000)
    }

    pub(crate) fn sized(rank: &Rank, count: usize) -> Self {
        Self {
            from: rank.memory(&vec![1.0; count]),
            to: rank.memory(&vec![0.0; count]),
        }
    }

    /// Issues an all-reduce, and returns the code.
    pub(crate) fn issue(&self, rank: &Rank) -> u32 {
        rank.all_reduce(&self.from, &self.to, Kind::ncclFloat, Op::ncclSum)
    }

    /// Issues an all-reduce, which NCCL accepts at once or on a thread of its own.
    pub(crate) fn begin(&self, rank: &Rank) {
        let code = self.issue(rank);
        assert!(matches!(code, 0 | 7), "{code}: {}", last_error());
        assert!(matches!(rank.settle(), 0 | 6), "{}", last_error());
    }

    /// Runs an all-reduce, and checks its result.
    pub(crate) fn check(&self, rank: &Rank) {
        self.begin(rank);
        wait_until("the all-reduce is over", || rank.is_idle());
        assert!(
            self.to
                .read()
                .iter()
                .all(|&value| value == rank.ranks as f32)
        );
    }
}

impl Process {
    /// The library's log of this process.
    pub(crate) fn log(&self) -> String {
        let file = self.file(&format!("log.{}", self.rank));
        fs::read_to_string(file).unwrap_or_default()
    }

    /// This process's rank of a non-blocking communicator of all processes.
    pub(crate) fn join_nonblocking(&self) -> Rank {
        Rank::join_nonblocking(self.id("id"), self.ranks, self.rank)
    }

    /// Begins a non-blocking init, and returns its code.
    pub(crate) fn begin(&self, ranks: i32, rank: i32) -> (Rank, u32) {
        let id = self.id("id");
        let mut this = Rank::alone(self.ranks, self.rank);
        let mut config = NCCL_CONFIG_INITIALIZER;
        config.blocking = 0;
        let code = nccl!(ncclCommInitRankConfig(
            &mut this.comm,
            ranks,
            id,
            rank,
            &mut config
        ));
        (this, code)
    }

    /// Waits until ranks 0 and 2 have come to a point.
    pub(crate) fn meet_of_two(&self, point: &str) {
        self.mark(&format!("{point}.{}", self.rank));
        [0, 2]
            .iter()
            .for_each(|rank| self.wait_for(&format!("{point}.{rank}")));
    }

    /// Waits until every rank has come to a point.
    pub(crate) fn meet(&self, point: &str) {
        self.mark(&format!("{point}.{}", self.rank));
        (0..self.ranks).for_each(|rank| self.wait_for(&format!("{point}.{rank}")));
    }
}

/// Whether `condition` stays true for `time`.
pub(crate) fn stays(time: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while start.elapsed() < time {
        if !condition() {
            return false;
        }
        thread::sleep(Duration::from_millis(1));
    }
    true
}

/// Runs `call` on a thread of its own and returns its result, if it comes back within `limit`.
pub(crate) fn within<T: Send + 'static>(
    limit: Duration,
    call: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (sender, receiver) = std::sync::mpsc::channel();
    thread::spawn(move || sender.send(call()));
    receiver.recv_timeout(limit).ok()
}

/// The communicator's state once it is an error.
pub(crate) fn asynchronous_error(rank: &Rank) -> u32 {
    wait_until("the communicator reports an error", || {
        !matches!(rank.state(), 0 | 7)
    });
    rank.state()
}

/// The text of the last error.
pub(crate) fn last_error() -> String {
    ranks::last_error()
}
