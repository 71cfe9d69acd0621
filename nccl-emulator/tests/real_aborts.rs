//! How NVIDIA's own library treats memory when communicators are ended while one of their launches is in progress. Programs
//! must avoid this: these tests show the effects, so that the rules of `docs/real-nccl.md` do not rest on the sources alone.
//!
//! A fault holds the launch inside a driver call, so that the order of events is fixed.

mod ranks;
mod real;

use std::cell::Cell;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::Duration;

use nccl_emulator::faults::{self, FaultGuard};
use nccl_sys::ncclComm_t;
use ranks::{Process, Rank, Started, is_child_of, nccl, processes, processes_started};
use real::{
    Buffers, P2P, environment_of, last_error, libraries, processes_on_each, version, within,
};

const IN_PROGRESS: u32 = 7;
/// The exit code of a process whose release has no `ncclCommRevoke`.
const NO_REVOKE: i32 = 77;
/// Longer than any call takes that does not wait, under valgrind as well.
const SOON: Duration = Duration::from_secs(20);

/// A communicator's handle that another thread may use.
#[derive(Clone, Copy)]
struct Handle(ncclComm_t);

// SAFETY: a number for NCCL; the tests say which thread uses it when.
unsafe impl Send for Handle {}

impl Handle {
    fn abort(self) -> u32 {
        nccl!(ncclCommAbort(self.0))
    }

    fn revoke(self) -> u32 {
        nccl!(ncclCommRevoke(self.0, 0))
    }
}

/// A non-blocking communicator of all processes, whose ranks are connected.
fn connected(process: &Process, name: &str) -> (Rank, Buffers) {
    let id = process.id(name);
    let rank = Rank::join_nonblocking(id, process.ranks, process.rank);
    let buffers = Buffers::of(&rank);
    buffers.check(&rank);
    (rank, buffers)
}

/// A group with an all-reduce on each communicator, whose launch hangs in the driver until the guard is dropped.
fn held_launch(all: &[(Rank, Buffers)]) -> FaultGuard {
    let held = faults::at_call("cuLaunchKernelEx")
        .on_other_threads()
        .hang();
    assert_eq!(nccl!(ncclGroupStart()), 0);
    for (rank, buffers) in all {
        assert!(matches!(buffers.issue(rank), 0 | IN_PROGRESS));
    }
    assert_eq!(nccl!(ncclGroupEnd()), IN_PROGRESS, "{}", last_error());
    assert!(held.wait_for_hits(1, SOON), "nobody launches");
    held
}

/// Judges how the ranks ended: rank 0 by `ending`, the others by success.
fn rank_0(ending: impl Fn(ExitStatus) -> bool + Copy) -> impl Fn(i32, ExitStatus) -> bool + Copy {
    move |rank, status| match rank {
        0 => ending(status),
        _ => status.success(),
    }
}

/// Ends the communicators of a rank other than 0, once rank 0 is done.
fn wait_and_abort(process: &Process, all: &[(Rank, Buffers)]) {
    process.wait_for("over");
    for (rank, _) in all {
        assert_eq!(rank.abort(), 0);
    }
}

#[test]
fn two_aborts_at_once_free_a_communicator_that_the_launch_of_their_group_still_uses() {
    let name = "two_aborts_at_once_free_a_communicator_that_the_launch_of_their_group_still_uses";
    let crashes = |status: ExitStatus| {
        matches!(
            status.signal(),
            Some(libc::SIGSEGV | libc::SIGABRT | libc::SIGBUS)
        )
    };
    // The allocator overwrites freed memory at once.
    let environment = [P2P[0], ("MALLOC_PERTURB_", "165")];
    processes_on_each(name, 2, &environment, rank_0(crashes), |process| {
        let all = ["x", "y"].map(|name| connected(&process, name));
        if process.rank != 0 {
            return wait_and_abort(&process, &all);
        }
        let held = held_launch(&all);
        let [x, y] = [0, 1].map(|at: usize| Handle(all[at].0.comm));
        let first = thread::spawn(move || x.abort());
        // By now the first abort waits for the launch.
        thread::sleep(Duration::from_millis(500));
        assert!(!first.is_finished(), "the first abort did not wait");
        let second = within(SOON, move || y.abort());
        assert_eq!(second, Some(0), "the second abort has waited as well");
        assert!(!first.is_finished());
        process.mark("over");
        drop(held);
        let _ = first.join();
        // The launch writes to memory that is freed, and the process crashes.
        thread::sleep(Duration::from_secs(5));
        panic!("nothing has come of it");
    });
}

/// Freed memory is reused at once, often by the thread that freed it, so valgrind has to detect the read.
#[test]
fn a_revoke_under_a_launch_leaves_a_communicator_that_reads_what_is_freed() {
    let name = "a_revoke_under_a_launch_leaves_a_communicator_that_reads_what_is_freed";
    let body = |process: Process| {
        if version() < 22807 {
            std::process::exit(NO_REVOKE);
        }
        let all = ["x"].map(|name| connected(&process, name));
        if process.rank != 0 {
            return wait_and_abort(&process, &all);
        }
        let held = held_launch(&all);
        let rank = &all[0].0;
        let release = thread::spawn(move || {
            thread::sleep(Duration::from_millis(500));
            drop(held);
        });
        let comm = Handle(rank.comm);
        let code = within(SOON, move || comm.revoke());
        assert_eq!(code, Some(IN_PROGRESS), "{}", last_error());
        release.join().unwrap();
        println!("revoked: {}", rank.settle());
        process.mark("over");
    };
    if is_child_of(name) {
        return processes(name, 2, &[], body);
    }
    if Command::new("valgrind").arg("--version").output().is_err() {
        println!("NOT TESTED: {name}: there is no valgrind (apt-get install valgrind)");
        return;
    }
    for library in libraries(name) {
        println!("{name} on {library}");
        let logs = tempfile::tempdir().unwrap();
        let log = logs.path().join("rank-0");
        let started = Started {
            start: &|rank, command| match rank {
                0 => under_valgrind(&command, &log).spawn().unwrap(),
                _ => {
                    let mut command = command;
                    command.spawn().unwrap()
                }
            },
            meanwhile: &|_| (),
        };
        let all = environment_of(&library, &P2P);
        let can_revoke = Cell::new(true);
        let ending = |_, status: ExitStatus| {
            can_revoke.set(status.code() != Some(NO_REVOKE));
            status.success() || !can_revoke.get()
        };
        processes_started(name, 2, &all, started, ending, body);
        if !can_revoke.get() {
            println!("NOT TESTED: {name}: this release has no ncclCommRevoke");
            continue;
        }
        let said = fs::read_to_string(log).unwrap();
        println!("{said}");
        for word in [
            "Invalid read",
            "ncclCommGetAsyncError",
            "free'd",
            "ncclCommRevoke",
        ] {
            assert!(said.contains(word), "{word}");
        }
    }
}

/// The same command under valgrind.
fn under_valgrind(command: &Command, log: &Path) -> Command {
    let mut valgrind = Command::new("valgrind");
    // Code is generated at run time, and NCCL waits in busy loops.
    valgrind.args(["--smc-check=all", "--fair-sched=yes"]);
    valgrind.arg(format!("--log-file={}", log.display()));
    valgrind.arg(command.get_program()).args(command.get_args());
    let variables = command.get_envs();
    valgrind.envs(variables.filter_map(|(name, value)| Some((name, value?))));
    valgrind.stdin(Stdio::null());
    valgrind
}
