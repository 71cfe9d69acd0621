//! Ranks of which one may be killed or stopped while the others continue.
//!
//! The usual launcher ends all ranks when one fails. These are processes that the test starts itself; they report in
//! lines on stdout.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io::{BufRead, BufReader, Lines};
use std::process::{Child, ChildStdout, ExitStatus, Stdio};
use std::time::Duration;

use nccl::{Rendezvous, World};
use nccl_tools::perf;
use nccl_tools::spawn::end_within;
use nccl_tools::testing::{Role, again};
use rustix::process::{Pid, Signal, kill_process};

/// One rank; it does not outlive this value.
pub struct Apart {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

/// Starts the ranks of `test`, each with `role` and these variables in its environment.
///
/// # Panics
/// When they cannot be started.
pub fn start(test: &str, role: &str, ranks: usize, variables: &[(&str, &str)]) -> Vec<Apart> {
    (0..ranks)
        .map(|rank| start_one(test, role, role, (rank, ranks), variables))
        .collect()
}

/// As [`start`], each with a role of its own; `variables` include the address of the rendezvous.
///
/// # Panics
/// When they cannot be started.
pub fn start_each(
    test: &str,
    ranks: usize,
    variables: &[(&str, &str)],
    role: impl Fn(usize) -> String,
) -> Vec<Apart> {
    (0..ranks)
        .map(|rank| start_one(test, "", &role(rank), (rank, ranks), variables))
        .collect()
}

/// Starts one more process, with another role, that asks to join the world of the ranks with `role` ([`join_running`]); it
/// uses the device of number `local_rank`.
///
/// # Panics
/// When it cannot be started.
pub fn start_newcomer(
    test: &str,
    role: &str,
    own_role: &str,
    local_rank: usize,
    variables: &[(&str, &str)],
) -> Apart {
    start_one(
        test,
        role,
        own_role,
        (local_rank, local_rank + 1),
        variables,
    )
}

fn start_one(
    test: &str,
    role: &str,
    own_role: &str,
    (rank, ranks): (usize, usize),
    variables: &[(&str, &str)],
) -> Apart {
    // Abstract, so that it leaves no file. Such a name has at most 107 bytes, of which a test with its module may have more.
    let mut which = DefaultHasher::new();
    test.hash(&mut which);
    let place = format!("unix:@{:x}-{}-{role}", which.finish(), std::process::id());
    let mut child = again(test, own_role)
        .env("NCCL_RUN_RANK", rank.to_string())
        .env("NCCL_RUN_LOCAL_RANK", rank.to_string())
        .env("NCCL_RUN_WORLD_SIZE", ranks.to_string())
        .env("NCCL_RUN_RENDEZVOUS", &place)
        .envs(variables.iter().copied())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .expect("a rank");
    let stdout = child.stdout.take().expect("a pipe");
    let lines = BufReader::new(stdout).lines();
    Apart { child, lines }
}

/// In a process that [`start_newcomer`] has started: returns the world that it joined.
///
/// # Panics
/// When no world takes it in.
pub fn join_running(devices: usize) -> World {
    perf::install(devices).unwrap_or_else(|failure| panic!("{failure}"));
    let rendezvous = Rendezvous::from_env().expect("the test set our variables");
    let world = World::join_running(rendezvous).expect("the others go on");
    super::in_launch_mode(world)
}

/// In a rank: its role and its world; `None` in the test itself.
///
/// # Panics
/// When the ranks do not meet.
pub fn rank(test: &str, ranks: usize) -> Option<(String, World)> {
    rank_from(test, ranks, |_| ())
}

/// As [`rank`], with a callback right before and after the rendezvous of the ranks: with `Some` of the role, and with
/// `None`.
///
/// # Panics
/// When the ranks do not meet.
pub fn rank_from(
    test: &str,
    ranks: usize,
    meeting: impl Fn(Option<&str>),
) -> Option<(String, World)> {
    let Role::Child(role) = Role::of(test) else {
        return None;
    };
    perf::install(ranks).unwrap_or_else(|failure| panic!("{failure}"));
    let rendezvous = Rendezvous::from_env().expect("the test set our variables");
    meeting(Some(&role));
    let world = World::join(rendezvous).expect("the ranks meet");
    meeting(None);
    Some((role, super::in_launch_mode(world)))
}

/// Reads until each rank prints `word`; returns those lines.
///
/// # Panics
/// When a rank ends before that.
pub fn all_say(ranks: &mut [Apart], word: &str) -> Vec<String> {
    ranks.iter_mut().map(|rank| rank.says(word)).collect()
}

impl Apart {
    /// Reads until the rank prints `word`; returns that line.
    ///
    /// # Panics
    /// When the rank ends before that.
    pub fn says(&mut self, word: &str) -> String {
        let mut all = String::new();
        for line in self.lines.by_ref() {
            let line = line.expect("text");
            if line.contains(word) {
                return line;
            }
            all.push_str(&line);
            all.push('\n');
        }
        panic!("the rank never said {word:?}, but:\n{all}");
    }

    /// Stops the process; returns when none of its threads runs any more.
    pub fn stop(&self) {
        self.signal(Signal::STOP);
        while !self.is_stopped() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn is_stopped(&self) -> bool {
        let tasks = format!("/proc/{}/task", self.child.id());
        let tasks = std::fs::read_dir(tasks).expect("it runs").flatten();
        tasks
            .map(|task| std::fs::read_to_string(task.path().join("stat")))
            .all(|stat| stat.is_ok_and(|stat| stat.contains(") T ")))
    }

    /// Continues it after [`stop`](Self::stop).
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        kill_process(pid.expect("a process"), signal).expect("it runs");
    }

    /// Lets a rank continue that reads a line from stdin.
    pub fn go_on(&mut self) {
        drop(self.child.stdin.take());
    }

    pub fn kill(&mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it ends");
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the rest of its output, and how it ended, within `timeout`.
    ///
    /// # Panics
    /// When it does not end.
    pub fn end(self, timeout: Duration) -> (String, ExitStatus) {
        self.try_end(timeout)
            .unwrap_or_else(|said| panic!("a rank did not end in {timeout:?}; it said:\n{said}"))
    }

    /// Waits until it has ended successfully.
    ///
    /// # Panics
    /// When it does not end within `timeout`, or fails: with the rest of its output.
    pub fn succeeds(self, timeout: Duration) {
        let (rest, status) = self.end(timeout);
        assert!(status.success(), "{status}: {rest}");
    }

    /// As [`end`](Self::end).
    ///
    /// # Errors
    /// When it does not end: its output until then.
    pub fn try_end(mut self, timeout: Duration) -> Result<(String, ExitStatus), String> {
        let status = end_within(&mut self.child, timeout).expect("a child");
        let mut said = String::new();
        for line in self.lines.by_ref().map_while(Result::ok) {
            said.push_str(&line);
            said.push('\n');
        }
        match status {
            Some(status) => Ok((said, status)),
            None => Err(said),
        }
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
