//! What ends the ranks when the process that started them is killed.
//!
//! The kernel ends a rank's first process when the thread that started it ends (`PR_SET_PDEATHSIG`), but not
//! what that has started, nor a program with other rights than its parent's. So one small process per fleet, a
//! shell, holds the other end of a socket. Each rank names its process group there before it becomes the
//! rank's program, and the fleet says which groups are over. When the socket closes without a goodbye, the
//! shell kills the groups that are left and removes the fleet's directory.
//!
//! A shell, because it is the one program that can be expected to be there: this code lives in other people's
//! programs, and a process that forks and goes on as a keeper would hold a copy of all their memory.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType};
use rustix::process::Pid;

/// Builtins alone, but for `rm`. Signals of a terminal or an impatient person are not for it.
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

/// How long it may take to leave when it is told to.
const LEAVE: Duration = Duration::from_secs(2);

pub(super) struct Keeper {
    child: Child,
    socket: OwnedFd,
}

impl Keeper {
    /// One that removes `directory` at the end.
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
            // What is preloaded into ranks is not for it.
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

    /// The way for a rank to say that its group exists; see [`say_started`].
    pub(super) fn door(&self) -> io::Result<OwnedFd> {
        Ok(rustix::io::fcntl_dupfd_cloexec(&self.socket, 0)?)
    }

    /// Watches over a group that was started before it.
    pub(super) fn remember(&self, group: Pid) {
        let line = format!("+ {}\n", group.as_raw_nonzero());
        let _ = send(self.socket.as_fd(), line.as_bytes());
    }

    pub(super) fn id(&self) -> u32 {
        self.child.id()
    }

    /// The group is over: nothing of it is left, or it was killed.
    pub(super) fn forget(&self, group: Pid) {
        let line = format!("- {}\n", group.as_raw_nonzero());
        // A keeper that is gone has been told of already.
        let _ = send(self.socket.as_fd(), line.as_bytes());
    }

    /// Whether it still watches.
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
    // No waiting: a keeper that somebody has stopped must not stop us.
    rustix::net::send(socket, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
    Ok(())
}

/// Says that this process leads a group that is to be killed. For a process between fork and exec: system
/// calls only, no memory from the heap.
pub(super) fn say_started(door: BorrowedFd<'_>) -> io::Result<()> {
    let mut line = *b"+ 0000000000\n";
    let mut pid = rustix::process::getpid().as_raw_nonzero().get();
    let mut at = line.len() - 2;
    while pid > 0 {
        line[at] = b'0' + (pid % 10) as u8;
        pid /= 10;
        at -= 1;
    }
    // The shell would write the number back as it came: the digits begin behind the last leading zero.
    line[at] = b' ';
    line[at - 1] = b'+';
    send(door, &line[at - 1..])
}
