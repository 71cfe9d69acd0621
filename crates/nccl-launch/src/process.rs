//! One process of a rank: it does not outlive the thread that started it, is watched, and is ended with its process
//! group.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStderr, ChildStdout, Command, Stdio};

use procfs::FromRead;
use procfs::process::{Stat, StatFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal as Raw, WaitId, WaitIdOptions};

use super::keeper;
use crate::departure::{Exit, Signal};

pub(super) struct Process {
    child: Child,
    pid: Pid,
    /// Becomes readable when the process ends; `None` where the kernel has no pidfd.
    pidfd: Option<OwnedFd>,
    /// Whether this process has yet to collect the exit status; until then the process id cannot be reused.
    ours: bool,
}

/// The output pipes of a process.
pub(super) struct Pipes {
    pub(super) stdout: ChildStdout,
    pub(super) stderr: ChildStderr,
}

impl Process {
    /// Starts `command` as the leader of a process group of its own. The calling thread must outlive the process: the
    /// kernel kills the process when that thread ends.
    ///
    /// `report_socket` leads to the keeper.
    pub(super) fn start(
        mut command: Command,
        report_socket: Option<OwnedFd>,
    ) -> Result<(Self, Pipes), String> {
        let parent = rustix::process::getpid();
        let prepare = move || {
            rustix::process::set_parent_process_death_signal(Some(Raw::KILL))?;
            // The parent may have ended before the call above.
            if rustix::process::getppid() != Some(parent) {
                return Err(Errno::SRCH.into());
            }
            match &report_socket {
                Some(report_socket) => keeper::report_started(report_socket.as_fd()),
                None => Ok(()),
            }
        };
        command
            .process_group(0)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        // SAFETY: between fork and exec of a process with threads only what is safe in a signal handler may be
        // called. `prepare` makes four system calls by way of rustix, which reaches the kernel directly,
        // formats a number on its stack, and takes no lock and no memory from the heap.
        unsafe { command.pre_exec(prepare) };
        let mut child = command
            .spawn()
            .map_err(|error| why_not_started(&command, &error))?;
        let pipes = (child.stdout.take(), child.stderr.take());
        let (Some(stdout), Some(stderr)) = pipes else {
            unreachable!("both streams were asked for as pipes")
        };
        let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) else {
            unreachable!("a process has a positive number")
        };
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok();
        let process = Self {
            child,
            pid,
            pidfd,
            ours: true,
        };
        Ok((process, Pipes { stdout, stderr }))
    }

    pub(super) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(super) fn group(&self) -> Pid {
        self.pid
    }

    pub(super) fn pidfd(&self) -> Option<BorrowedFd<'_>> {
        self.pidfd.as_ref().map(AsFd::as_fd)
    }

    pub(super) fn close_pidfd(&mut self) {
        self.pidfd = None;
    }

    /// Returns how the process ended, if it has. The process stays a zombie until [`collect`](Self::collect), so that
    /// its process id, which is also that of its group, is not reused.
    pub(super) fn ended(&mut self) -> Option<Exit> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        match rustix::process::waitid(WaitId::Pid(self.pid), options) {
            Ok(None) => None,
            Ok(Some(status)) => Some(match (status.exit_status(), status.terminating_signal()) {
                (Some(code), _) => Exit::Code(code),
                (None, Some(signal)) => Exit::Signal {
                    signal: Signal::new(signal),
                    core_dumped: status.dumped(),
                },
                (None, None) => Exit::Unknown,
            }),
            // Another part of this program waits for every child of this process, or `SIGCHLD` is ignored.
            Err(_) => {
                self.ours = false;
                Some(Exit::Unknown)
            }
        }
    }

    /// Sends `signal` to the process group, as a terminal would. SIGUSR1, SIGUSR2 and SIGALRM go only to the process
    /// itself: programs give them a meaning of their own, and they would end other processes of the group.
    pub(super) fn signal(&self, signal: Signal) -> io::Result<()> {
        let Some(raw) = signal.raw() else {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{signal} cannot be sent"),
            ));
        };
        if !self.ours {
            return Ok(());
        }
        let own = [libc::SIGUSR1, libc::SIGUSR2, libc::SIGALRM].contains(&signal.number());
        let sent = if own {
            rustix::process::kill_process(self.pid, raw)
        } else {
            rustix::process::kill_process_group(self.pid, raw)
        };
        match sent {
            // The process has just ended.
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Kills the rest of the group, and takes the exit status of the process, which has ended.
    pub(super) fn collect(mut self) {
        let _ = self.signal(Signal::Kill);
        let _ = self.child.try_wait();
    }

    /// The state of the process according to `/proc`.
    pub(super) fn phase(&self) -> ProcessPhase {
        let stat = Stat::from_file(format!("/proc/{}/stat", self.id()));
        stat.map_or(ProcessPhase::Running, |stat| ProcessPhase::of(&stat))
    }
}

/// Whether a process runs, is stopped, or is being ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProcessPhase {
    Running,
    /// Stopped by a signal or a debugger.
    Stopped,
    /// The end has begun: the kernel is freeing the process's memory, which can take seconds if a driver has much to
    /// clean up, or is writing its core dump.
    Ending,
}

impl ProcessPhase {
    fn of(stat: &Stat) -> Self {
        let ending = StatFlags::PF_EXITING | StatFlags::PF_DUMPCORE;
        match stat.state {
            'Z' | 'X' => Self::Ending,
            _ if StatFlags::from_bits_retain(stat.flags).intersects(ending) => Self::Ending,
            'T' | 't' => Self::Stopped,
            _ => Self::Running,
        }
    }
}

/// Describes the system's error, and what it means for the given command.
fn why_not_started(command: &Command, error: &io::Error) -> String {
    let program = command.get_program();
    let name = program.to_string_lossy();
    let is_path = name.contains('/');
    let directory = command.get_current_dir();
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    let why = match errno {
        Some(Errno::NOENT) if directory.is_some_and(|path| !path.is_dir()) => format!(
            "there is no directory {} to run it in",
            directory.unwrap_or(program.as_ref()).display()
        ),
        Some(Errno::NOENT) if is_path && std::path::Path::new(program).exists() => String::from(
            "it is there, but not what it needs to run: the interpreter that its first line names, or the \
             dynamic linker it was built for",
        ),
        Some(Errno::NOENT) if is_path => String::from("there is no such file"),
        Some(Errno::NOENT) => String::from("no directory in PATH has it"),
        Some(Errno::ACCESS) if std::path::Path::new(program).is_dir() => {
            String::from("it is a directory")
        }
        Some(Errno::ACCESS) => String::from("it is not executable for this user (chmod +x?)"),
        Some(Errno::AGAIN) => String::from(
            "no more processes may be started (ulimit -u, or pids.max of the control group)",
        ),
        Some(Errno::MFILE) => {
            String::from("this process has as many files open as it may (ulimit -n)")
        }
        Some(Errno::NOMEM) => String::from("there is not enough memory to start a process"),
        Some(Errno::TOOBIG) => String::from("its arguments and environment are too long"),
        _ => return format!("{name}: {error}"),
    };
    format!("{name}: {why} ({error})")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_on_its_way_out_is_told_from_one_that_runs() {
        let stat = |state: &str, flags: u32| {
            let text = format!(
                "77 (a) b) {state} 1 77 1 0 -1 {flags} 100{}",
                " 0".repeat(42)
            );
            ProcessPhase::of(&Stat::from_read(text.as_bytes()).unwrap())
        };
        assert_eq!(stat("S", 0x40_0000), ProcessPhase::Running);
        assert_eq!(stat("R", 0x40_0004), ProcessPhase::Ending);
        assert_eq!(stat("D", 0x40_0200), ProcessPhase::Ending);
        assert_eq!(stat("Z", 0x40_000c), ProcessPhase::Ending);
        assert_eq!(stat("T", 0x40_0000), ProcessPhase::Stopped);
    }

    #[test]
    fn a_program_that_cannot_be_started_is_explained() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("script");
        for (text, mode, words) in [
            ("#!/no/such/interpreter\n", 0o755, "interpreter"),
            ("#!/bin/sh\n", 0o644, "not executable"),
        ] {
            use std::os::unix::fs::PermissionsExt;
            std::fs::write(&file, text).unwrap();
            std::fs::set_permissions(&file, PermissionsExt::from_mode(mode)).unwrap();
            let Err(why) = Process::start(Command::new(&file), None) else {
                panic!("{text:?} was started");
            };
            assert!(why.contains(words), "{why}");
            assert!(why.contains("/script: "), "{why}");
        }
        for (program, words) in [
            ("/no/such/file", "no such file"),
            ("no-such-program-anywhere", "no directory in PATH"),
            ("/tmp/", "it is a directory"),
        ] {
            let Err(why) = Process::start(Command::new(program), None) else {
                panic!("{program} was started");
            };
            assert!(why.contains(words), "{why}");
        }
        let mut command = Command::new("/bin/true");
        command.current_dir("/no/such/directory");
        let Err(why) = Process::start(command, None) else {
            panic!("it was started nowhere");
        };
        assert!(why.contains("/no/such/directory"), "{why}");
    }
}
