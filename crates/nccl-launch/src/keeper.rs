//! The keeper: a process that kills the ranks when the process that started them is killed.
//!
//! The kernel kills a rank's first process when the thread that started it ends (`PR_SET_PDEATHSIG`), but not the
//! processes started by that, nor a program with other rights than its parent's. So one small process per fleet, a
//! shell, holds the other end of a socket. Each rank names its process group there before it becomes the rank's
//! program, and the fleet names the groups that are over. When the socket closes without a leave message, the shell kills the
//! groups that are left and removes the fleet's directory.
//!
//! A shell, because that is the one program that can be expected to exist: this code lives in other people's programs,
//! and a forked keeper would hold a copy of all their memory.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType};
use rustix::process::Pid;

/// Builtins alone, but for `rm`. Ignores the signals of a terminal or an impatient user.
const SCRIPT: &str = r#"
trap '' HUP INT QUIT TERM USR1 USR2 TSTP TTIN TTOU PIPE
groups=
while read -r what group; do
  case $what in
  +) groups="$groups $group" ;;
  -) rest=
     for g in $groups; do [ "$g" = "$group" ] || rest="$rest $g"; done
     groups=$rest ;;
  bye) exit 0 ;;
  esac
done
for g in $groups; do kill -KILL "-$g" 2>/dev/null; done
rm -rf -- "$1"
"#;

/// How long the keeper may take to leave when requested to.
const LEAVE: Duration = Duration::from_secs(2);

pub(super) struct Keeper {
    child: Child,
    socket: OwnedFd,
}

impl Keeper {
    /// Starts a keeper that removes `directory` at the end.
    pub(super) fn start(directory: &Path) -> io::Result<Self> {
        let (ours, its) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )?;
        let child = Command::new("/bin/sh")
            .args(["-c", SCRIPT, "nccl-keeper"])
            .arg(directory)
            .current_dir("/")
            // Variables for the ranks, such as preloaded libraries, must not reach it.
            .env_clear()
            .env("PATH", "/usr/bin:/bin")
            .stdin(Stdio::from(its))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Ctrl-C is for the process that started it.
            .process_group(0)
            .spawn()?;
        Ok(Self {
            child,
            socket: ours,
        })
    }

    /// A descriptor by which a rank reports that its group exists; see [`report_started`].
    pub(super) fn report_socket(&self) -> io::Result<OwnedFd> {
        Ok(rustix::io::fcntl_dupfd_cloexec(&self.socket, 0)?)
    }

    /// Adds a group that was started before this keeper.
    pub(super) fn remember(&self, group: Pid) {
        let line = format!("+ {}\n", group.as_raw_nonzero());
        let _ = send(self.socket.as_fd(), line.as_bytes());
    }

    pub(super) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Removes a group that is over: it is empty, or was killed.
    pub(super) fn forget(&self, group: Pid) {
        let line = format!("- {}\n", group.as_raw_nonzero());
        // The loss of a keeper has been reported already.
        let _ = send(self.socket.as_fd(), line.as_bytes());
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
    // No SIGPIPE: in a rank that has not become its program yet, that would look like a start.
    // No waiting: a stopped keeper must not block this process.
    rustix::net::send(socket, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
    Ok(())
}

/// Reports that this process leads a group that is to be killed. For a process between fork and exec: system calls
/// only, no memory from the heap.
pub(super) fn report_started(report_socket: BorrowedFd<'_>) -> io::Result<()> {
    let mut line = *b"+ 0000000000\n";
    let mut pid = rustix::process::getpid().as_raw_nonzero().get();
    let mut at = line.len() - 2;
    while pid > 0 {
        line[at] = b'0' + (pid % 10) as u8;
        pid /= 10;
        at -= 1;
    }
    // The shell would write the number back as given: the digits begin behind the last leading zero.
    line[at] = b' ';
    line[at - 1] = b'+';
    send(report_socket, &line[at - 1..])
}
