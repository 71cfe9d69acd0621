//! nccl-run at a terminal, where keys are signals for the foreground.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use nccl_tools::spawn::wait_within;
use nccl_tools::testing::eventually;
use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};

use super::running::{Notes, PROGRAM, all_gone};

/// A shell in a session of its own, at a terminal of its own.
struct Terminal {
    keys: File,
    seen: Arc<Mutex<String>>,
    shell: Child,
}

impl Terminal {
    fn new(script: &str, arguments: &[&str]) -> Self {
        let keys = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a terminal");
        grantpt(&keys).expect("a terminal");
        unlockpt(&keys).expect("a terminal");
        let other = ioctl_tiocgptpeer(&keys, OpenptFlags::RDWR | OpenptFlags::NOCTTY);
        let other: OwnedFd = other.expect("its other side");
        let copy = || Stdio::from(other.try_clone().expect("a descriptor"));
        // `setsid --ctty` makes it the terminal of the shell, which then controls jobs as for a user. Processes that a
        // shell starts in the background ignore the keys' signals, and so may this process.
        let shell = Command::new("env")
            .args([
                "--default-signal=INT,QUIT",
                "setsid",
                "--ctty",
                "--wait",
                "bash",
                "-c",
                script,
                "shell",
            ])
            .args(arguments)
            .stdin(copy())
            .stdout(copy())
            .stderr(copy())
            .spawn()
            .expect("setsid and bash are there");
        drop(other);
        let seen = Arc::new(Mutex::new(String::new()));
        let keys = File::from(keys);
        let (mut screen, shown) = (keys.try_clone().expect("a descriptor"), Arc::clone(&seen));
        // Ends when the last process at the terminal has ended.
        std::thread::spawn(move || {
            let mut buffer = [0u8; 4096];
            while let Ok(length @ 1..) = screen.read(&mut buffer) {
                let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
                shown.lock().unwrap().push_str(&text);
            }
        });
        Self { keys, seen, shell }
    }

    fn press(&mut self, keys: &[u8]) {
        self.keys.write_all(keys).expect("a terminal");
    }

    fn seen(&self) -> String {
        self.seen.lock().unwrap().clone()
    }

    fn shows(&self, what: &str) {
        eventually(&format!("{what:?} is shown"), || self.seen().contains(what));
    }

    fn code(&mut self) -> Option<i32> {
        let ended = wait_within(&mut self.shell, Duration::from_secs(20)).expect("it is our child");
        ended.expect("the shell ends").code()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.shell.kill();
        let _ = self.shell.wait();
    }
}

#[test]
fn ctrl_c_reaches_each_rank_once() {
    let notes = Notes::new();
    let rank = format!(
        "trap 'echo interrupted; exit 9' INT; {} while :; do sleep 0.05; done",
        notes.noting("rank-$NCCL_RUN_RANK", "$$")
    );
    let script = "\"$1\" -n 2 -- sh -c \"$2\"; echo code $?";
    let mut terminal = Terminal::new(script, &[&PROGRAM, &rank]);
    let ranks = [notes.pid("rank-0"), notes.pid("rank-1")];
    terminal.press(b"\x03");
    all_gone(&ranks);
    eventually("nccl-run says so", || {
        terminal.seen().contains("ended by SIGINT")
    });
    let seen = terminal.seen();
    for rank in 0..2 {
        let line = format!("[{rank}] interrupted");
        assert_eq!(seen.matches(&line).count(), 1, "{seen}");
    }
}

#[test]
fn ctrl_z_stops_all_and_fg_goes_on() {
    let notes = Notes::new();
    let rank = format!(
        "{} while ! [ -e {}/go ]; do sleep 0.05; done; echo went on",
        notes.noting("rank-$NCCL_RUN_RANK", "$$"),
        notes.path().display()
    );
    // Ends the shell's wait when the job is stopped.
    let script = "set -m; \"$1\" -n 2 -- sh -c \"$2\"; echo stopped with $?; touch \"$3/go\"; fg; echo code $?";
    let directory = notes.path().display().to_string();
    let mut terminal = Terminal::new(script, &[&PROGRAM, &rank, &directory]);
    notes.pid("rank-0");
    notes.pid("rank-1");
    terminal.press(b"\x1a");
    // 128 and the signal, of which there are two.
    terminal.shows("stopped with 14");
    terminal.shows("code 0");
    let seen = terminal.seen();
    assert!(
        seen.contains("[0] went on") && seen.contains("[1] went on"),
        "{seen}"
    );
    assert_eq!(terminal.code(), Some(0), "{seen}");
}

#[test]
fn a_terminal_that_goes_away_ends_all() {
    let notes = Notes::new();
    let rank = format!(
        "{} while :; do sleep 0.05; done",
        notes.noting("rank-$NCCL_RUN_RANK", "$$")
    );
    let terminal = Terminal::new("\"$1\" -n 2 -- sh -c \"$2\"", &[&PROGRAM, &rank]);
    let ranks = [notes.pid("rank-0"), notes.pid("rank-1")];
    // The session's leader has ended, as when a connection to the host is closed.
    drop(terminal);
    all_gone(&ranks);
}

#[test]
fn what_a_rank_prints_cannot_reach_the_rank_in_front_of_it() {
    let rank = r"printf '\r[0] forged\n\033[99D[0] forged\n\033[31mred\n'";
    let script = "\"$1\" -n 1 -- sh -c \"$2\"; echo code $?";
    let mut terminal = Terminal::new(script, &[&PROGRAM, rank]);
    assert_eq!(terminal.code(), Some(0));
    terminal.shows("code 0");
    let shown = "[0] [0] forged\r\n[0] \u{fffd}[99D[0] forged\r\n[0] \x1b[31mred\x1b[0m\r\n";
    terminal.shows(shown);
}
