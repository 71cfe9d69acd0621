//! The keeper: a process that kills the ranks when the process that started them is killed.
//!
//! The kernel kills a rank's first process when the thread that started it ends (`PR_SET_PDEATHSIG`). It kills neither
//! the children of that process, nor a program whose credentials differ from its parent's. So one small process per
//! fleet, a shell, holds the other end of a socket. Each rank sends its process group over the socket before it
//! executes the rank's program, and the fleet sends the groups that have ended, and the remaining ones when a program
//! could not be executed. When the socket closes without a leave message, the shell kills the remaining groups and
//! removes the fleet's directory.
//!
//! The keeper is a shell because that is the one program that can be expected to exist: this code is linked into other
//! programs, and a forked keeper would hold a copy of all their memory.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType};
use rustix::process::Pid;

/// Uses only builtins, except for `rm`. Ignores the signals that a terminal or a user may send.
const SCRIPT: &str = r#"
trap '' HUP INT QUIT TERM USR1 USR2 TSTP TTIN TTOU PIPE
groups=
while read -r what group; do
  case $what in
  +) groups="$groups $group" ;;
  -) rest=
     for g in $groups; do [ "$g" = "$group" ] || rest="$rest $g"; done
     groups=$rest ;;
  =) groups=$group ;;
  bye) exit 0 ;;
  esac
done
for g in $groups; do kill -KILL "-$g" 2>/dev/null; done
rm -rf -- "$1"
"#;

/// How long the keeper may take to exit when asked to.
const LEAVE: Duration = Duration::from_secs(2);

pub(super) struct Keeper {
    child: Child,
    socket: OwnedFd,
    /// Whether a message may have been lost, because the socket was full: it needs all groups again.
    is_behind: bool,
}

impl Keeper {
    /// Starts a keeper that removes `directory` when this process ends without a leave message.
    pub(super) fn start(directory: &Path) -> io::Result<Self> {
        Self::run(SCRIPT, directory)
    }

    pub(super) fn run(script: &str, directory: &Path) -> io::Result<Self> {
        let (ours, its) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )?;
        let child = Command::new("/bin/sh")
            .args(["-c", script, "nccl-keeper"])
            .arg(directory)
            .current_dir("/")
            // Variables meant for the ranks, such as preloaded libraries, must not reach the keeper.
            .env_clear()
            .env("PATH", "/usr/bin:/bin")
            .stdin(Stdio::from(its))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Ctrl-C is for the process that started the keeper.
            .process_group(0)
            .spawn()?;
        Ok(Self {
            child,
            socket: ours,
            is_behind: false,
        })
    }

    /// A descriptor by which a rank reports that its group exists; see [`report_started`].
    pub(super) fn report_socket(&self) -> io::Result<OwnedFd> {
        Ok(rustix::io::fcntl_dupfd_cloexec(&self.socket, 0)?)
    }

    /// Checks whether the socket has room for the report of a rank that is about to be started, which cannot tell this
    /// process that there was none.
    pub(super) fn check_room(&mut self) {
        let mut polled = [PollFd::new(&self.socket, PollFlags::OUT)];
        let has_room = rustix::event::poll(&mut polled, Some(&Timespec::default()));
        self.is_behind |= has_room != Ok(1);
    }

    pub(super) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Removes a group that has ended: it is empty, or was killed. `left` are the remaining ones.
    pub(super) fn forget(&mut self, group: Pid, left: impl Iterator<Item = Pid>) {
        if self.is_behind {
            return self.remember_only(left);
        }
        let line = format!("- {}\n", group.as_raw_nonzero());
        self.send(&line);
    }

    /// Sends all groups again if a message may have been lost.
    pub(super) fn catch_up(&mut self, groups: impl Iterator<Item = Pid>) {
        if self.is_behind {
            self.remember_only(groups);
        }
    }

    /// Replaces all groups by these.
    pub(super) fn remember_only(&mut self, groups: impl Iterator<Item = Pid>) {
        let groups: Vec<String> = groups
            .map(|group| group.as_raw_nonzero().to_string())
            .collect();
        let line = format!("= {}\n", groups.join(" "));
        self.send(&line);
    }

    fn send(&mut self, line: &str) {
        // A lost keeper is replaced at the next start of a rank.
        self.is_behind = send(self.socket.as_fd(), line.as_bytes()).is_err();
    }

    /// Whether the keeper runs.
    pub(super) fn lives(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        let _ = send(self.socket.as_fd(), b"bye\n");
        let until = Instant::now() + LEAVE;
        while self.lives() {
            if Instant::now() > until {
                let _ = self.child.kill();
                let _ = self.child.wait();
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn send(socket: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<()> {
    // No SIGPIPE: in a forked child before exec, a death by SIGPIPE would look like a successful start. DONTWAIT: a
    // stopped keeper must not block this process.
    rustix::net::send(socket, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
    Ok(())
}

/// Reports that this process leads a group that is to be killed. If the socket is full, the fleet does that later
/// ([`Keeper::catch_up`]). Called between fork and exec: makes system calls only, and allocates no memory.
pub(super) fn report_started(report_socket: BorrowedFd<'_>) -> io::Result<()> {
    let mut line = *b"+ 0000000000\n";
    let mut pid = rustix::process::getpid().as_raw_nonzero().get();
    let mut at = line.len() - 2;
    while pid > 0 {
        line[at] = b'0' + (pid % 10) as u8;
        pid /= 10;
        at -= 1;
    }
    // The shell keeps the number as text, so the line starts after the leading zeros.
    line[at] = b' ';
    line[at - 1] = b'+';
    match send(report_socket, &line[at - 1..]) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
        sent => sent,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_remembered_groups_are_killed() {
        let directory = tempfile::tempdir().unwrap();
        let group = || {
            let mut sleep = Command::new("sleep");
            sleep.arg("60").process_group(0).spawn().unwrap()
        };
        let mut children = [group(), group(), group()];
        let [kept, forgotten, late] = children
            .each_ref()
            .map(|child| Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap());
        let mut keeper = Keeper::start(directory.path()).unwrap();
        let remember = |keeper: &mut Keeper, group: Pid| {
            keeper.send(&format!("+ {}\n", group.as_raw_nonzero()));
        };
        remember(&mut keeper, forgotten);
        remember(&mut keeper, kept);
        keeper.remember_only([kept].into_iter());
        remember(&mut keeper, late);
        // As when this process is killed.
        rustix::net::shutdown(&keeper.socket, rustix::net::Shutdown::Both).unwrap();
        for killed in [0, 2] {
            assert!(!children[killed].wait().unwrap().success());
        }
        drop(keeper);
        assert!(children[1].try_wait().unwrap().is_none());
        children[1].kill().unwrap();
        children[1].wait().unwrap();
    }

    #[test]
    fn a_keeper_that_reads_nothing_for_a_while_gets_all_groups_again() {
        const LATE: &str = r#"
            while ! [ -e "$1/go" ]; do sleep 0.01; done
            while read -r line && [ "$line" != bye ]; do echo "$line" > "$1/last"; done
        "#;
        let directory = tempfile::tempdir().unwrap();
        let [gone, left] = [11, 22].map(|pid| Pid::from_raw(pid).unwrap());
        let mut keeper = Keeper::run(LATE, directory.path()).unwrap();
        let mut sent = 0;
        while !keeper.is_behind {
            keeper.forget(gone, std::iter::empty());
            sent += 1;
            assert!(sent < 1_000_000, "the socket is never full");
        }
        // A rank can be started nevertheless.
        report_started(keeper.report_socket().unwrap().as_fd()).unwrap();
        std::fs::write(directory.path().join("go"), "").unwrap();
        let begun = Instant::now();
        while keeper.is_behind {
            assert!(
                begun.elapsed() < Duration::from_secs(20),
                "it does not catch up"
            );
            std::thread::sleep(Duration::from_millis(10));
            keeper.catch_up([left].into_iter());
        }
        let last = || std::fs::read_to_string(directory.path().join("last")).unwrap_or_default();
        while last() != "= 22\n" {
            assert!(begun.elapsed() < Duration::from_secs(20), "{}", last());
            std::thread::sleep(Duration::from_millis(10));
        }
        drop(keeper);
    }

    #[test]
    fn a_report_that_may_not_fit_is_repeated() {
        let directory = tempfile::tempdir().unwrap();
        let mut keeper = Keeper::run("exec sleep 60", directory.path()).unwrap();
        keeper.check_room();
        assert!(!keeper.is_behind);
        while send(keeper.socket.as_fd(), b"+ 1\n").is_ok() {}
        keeper.check_room();
        assert!(keeper.is_behind);
        let _ = keeper.child.kill();
    }
}
