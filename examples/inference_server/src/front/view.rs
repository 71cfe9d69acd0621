//! What can be seen of the server: written by the engine, read by whoever asks over HTTP.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;
use serde_json::{Value, json};

use super::engine::Work;

/// How long a step may take before the server is not ready: so many times what it takes usually, and at least this.
const SLOWER: u32 = 20;
const SLOW: Duration = Duration::from_secs(1);
/// What a step takes usually is the median of so many.
const RECENT: usize = 11;

/// How it stands with the server.
#[derive(Clone, Debug)]
pub(super) struct View {
    pub(super) started: Instant,
    /// By place.
    pub(super) members: Vec<Member>,
    /// The epoch that serves, since when, and in how many parts.
    pub(super) serving: Option<(u64, Instant, usize)>,
    /// Why none does.
    pub(super) trouble: Trouble,
    /// What the ranks have been given to do, its number, and since when.
    pub(super) given: Option<(Work, u64, Instant)>,
    /// When they did something last.
    answered: Option<Instant>,
    /// How long the last steps took, the oldest first.
    recent: VecDeque<Duration>,
    pub(super) ending: bool,
    pub(super) last_fault: Option<LastFault>,
    pub(super) numbers: Numbers,
}

/// One of the launcher's ranks.
#[derive(Clone, Debug, Default)]
pub(super) struct Member {
    pub(super) pid: Option<u32>,
    /// The epoch that it is in.
    pub(super) epoch: Option<u64>,
    /// Its number there.
    pub(super) rank: Option<usize>,
    /// Its part of the model, when it serves.
    pub(super) shard: Option<usize>,
    pub(super) serves: bool,
    /// Its CUDA device, when it serves.
    pub(super) device: Option<usize>,
    pub(super) restarts: u64,
}

impl Member {
    /// In a word, with what the kernel says of the process.
    pub(super) fn state(&self, process: Option<char>) -> &'static str {
        match (process, self.serves, self.shard) {
            (None | Some('Z'), ..) => "gone",
            (Some('T' | 't'), ..) => "frozen",
            (_, true, Some(_)) => "serving",
            (_, true, None) => "spare",
            (_, false, _) => "coming",
        }
    }
}

/// What keeps the server from serving.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Trouble {
    pub(super) cause: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) rank: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) pid: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) signal: Option<String>,
}

/// The last thing that went wrong.
#[derive(Clone, Debug, Serialize)]
pub(super) struct LastFault {
    #[serde(flatten)]
    pub(super) trouble: Trouble,
    /// The epoch in which it was, if it was in one.
    pub(super) epoch: Option<u64>,
    pub(super) unix_seconds: u64,
    /// What the ranks found out, if they had a communicator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) report: Option<String>,
    pub(super) evidence: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) hint: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) stderr: Vec<String>,
    /// How long it took until the server was ready again.
    pub(super) ready_after_seconds: Option<f64>,
}

impl LastFault {
    /// One of now, of which no more is known yet.
    pub(super) fn of(trouble: Trouble) -> Self {
        Self {
            trouble,
            epoch: None,
            unix_seconds: unix_seconds(),
            report: None,
            evidence: Vec::new(),
            hint: None,
            stderr: Vec::new(),
            ready_after_seconds: None,
        }
    }
}

/// What is counted.
#[derive(Clone, Debug, Default)]
pub(super) struct Numbers {
    /// Requests that are over, by how.
    pub(super) requests: BTreeMap<&'static str, u64>,
    pub(super) prompt_tokens: u64,
    pub(super) made_tokens: u64,
    pub(super) steps: u64,
    pub(super) step_seconds: f64,
    pub(super) communication_seconds: f64,
    pub(super) rank_ends: u64,
    pub(super) recoveries: u64,
    pub(super) recovery_seconds: f64,
    pub(super) last_recovery_seconds: f64,
    pub(super) waiting: usize,
    pub(super) running: usize,
}

/// What the kernel says of a process: its letter in `/proc`, such as `T` for one that is stopped.
pub(super) fn process_state(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Behind the name, which may have anything in it.
    stat.rsplit_once(')')?.1.trim_start().chars().next()
}

impl View {
    pub(super) fn new(ranks: usize) -> Self {
        Self {
            started: Instant::now(),
            members: vec![Member::default(); ranks],
            serving: None,
            trouble: Trouble {
                cause: String::from("the ranks are being started"),
                ..Trouble::default()
            },
            given: None,
            answered: None,
            recent: VecDeque::new(),
            ending: false,
            last_fault: None,
            numbers: Numbers::default(),
        }
    }

    /// A rank that is needed and whose process is stopped: frozen, and not dead. While an epoch serves, those are needed that
    /// have a part of the model; for the next one all are.
    fn frozen(&self) -> Option<Trouble> {
        let pids = self.members.iter().enumerate();
        let pids = pids.filter(|(_, member)| self.serving.is_none() || member.shard.is_some());
        let mut pids = pids.filter_map(|(rank, member)| Some((rank, member.pid?)));
        let (rank, pid) = pids.find(|&(_, pid)| matches!(process_state(pid), Some('T' | 't')))?;
        Some(Trouble {
            cause: format!(
                "rank {rank} (pid {pid}) is frozen: its process is stopped, by SIGSTOP or a debugger, and not dead"
            ),
            rank: Some(rank),
            pid: Some(pid),
            signal: None,
        })
    }

    /// Nothing, if a request would be worked on now; otherwise why not.
    pub(super) fn trouble(&self) -> Option<Trouble> {
        if self.ending {
            return Some(Trouble {
                cause: String::from("the server is ending"),
                ..Trouble::default()
            });
        }
        if self.serving.is_none() {
            // A verdict of the ranks, that one of them does not answer, is better said with what can be seen of it; and when
            // another one has died, this is what they wait for.
            return Some(self.frozen().unwrap_or_else(|| self.trouble.clone()));
        }
        if let Some(frozen) = self.frozen() {
            return Some(frozen);
        }
        let (work, number, since) = self.given?;
        let (usual, age) = (self.usual(), since.elapsed());
        let most = match work {
            Work::Step => SLOW.max(usual * SLOWER),
            Work::Probe => SLOW,
        };
        let (usual, seconds) = (usual.as_secs_f64(), age.as_secs_f64());
        let cause = match work {
            Work::Step => format!(
                "step {number} has been under way for {seconds:.1} s; usually they take {usual:.3} s"
            ),
            Work::Probe => format!(
                "the ranks were asked for a sign of life {seconds:.1} s ago, and have not given it"
            ),
        };
        (age > most).then(|| Trouble {
            cause,
            ..Trouble::default()
        })
    }

    /// The ranks have something to do.
    pub(super) fn given(&mut self, work: Work, number: u64) {
        self.given = Some((work, number, Instant::now()));
    }

    /// They have done it. How long that was.
    pub(super) fn answered(&mut self) -> Option<Duration> {
        self.answered = Some(Instant::now());
        let (.., since) = self.given.take()?;
        Some(since.elapsed())
    }

    /// A step is over.
    pub(super) fn took(&mut self, seconds: f64, communicating: f64) {
        let numbers = &mut self.numbers;
        numbers.steps += 1;
        numbers.step_seconds += seconds;
        numbers.communication_seconds += communicating;
        if let Some(took) = self.answered() {
            self.remember(took);
        }
    }

    fn remember(&mut self, took: Duration) {
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back(took);
    }

    /// How long a step takes usually: one that waited for a frozen rank does not count for more than another.
    fn usual(&self) -> Duration {
        let mut recent: Vec<_> = self.recent.iter().copied().collect();
        recent.sort_unstable();
        recent.get(recent.len() / 2).copied().unwrap_or_default()
    }

    /// As `/health` shows it, but for what the ranks themselves would have to be asked.
    pub(super) fn health(&self) -> Value {
        let trouble = self.trouble();
        let members = self.members.iter().enumerate().map(|(rank, member)| {
            let state = member.state(member.pid.and_then(process_state));
            json!({
                "rank": rank,
                "pid": member.pid,
                "state": state,
                "epoch": member.epoch,
                "world_rank": member.rank,
                "shard": member.shard,
                "device": member.device,
                "restarts": member.restarts,
            })
        });
        json!({
            "ready": trouble.is_none(),
            "trouble": trouble,
            "pid": std::process::id(),
            "uptime_seconds": self.started.elapsed().as_secs_f64(),
            "epoch": self.serving.map(|(epoch, ..)| epoch),
            "parts": self.serving.map(|(.., parts)| parts),
            "running": self.numbers.running,
            "waiting": self.numbers.waiting,
            "steps": self.numbers.steps,
            "answered_seconds_ago": self.answered.map(|at| at.elapsed().as_secs_f64()),
            "ranks": members.collect::<Vec<_>>(),
            "last_fault": self.last_fault,
        })
    }
}

pub(super) fn unix_seconds() -> u64 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use rustix::process::{Pid, Signal, kill_process};

    use super::*;

    /// A process that is stopped.
    fn stopped() -> Child {
        let child = Command::new("sleep").arg("600").spawn().unwrap();
        kill_process(Pid::from_child(&child), Signal::STOP).unwrap();
        while process_state(child.id()) != Some('T') {
            std::thread::yield_now();
        }
        child
    }

    #[test]
    fn a_frozen_rank_is_named_unless_the_others_serve_without_it() {
        let mut child = stopped();
        let mut view = View::new(2);
        view.members[1].pid = Some(child.id());
        let frozen = view.trouble().unwrap();
        assert_eq!((frozen.rank, frozen.pid), (Some(1), Some(child.id())));
        // What the others wait for is not the one that has died.
        view.trouble.signal = Some(String::from("SIGKILL"));
        assert_eq!(view.trouble(), Some(frozen.clone()));
        view.serving = Some((0, Instant::now(), 1));
        assert_eq!(view.trouble(), None);
        view.members[1].shard = Some(0);
        assert_eq!(view.trouble(), Some(frozen));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn one_step_that_took_very_long_does_not_change_what_is_usual() {
        let mut view = View::new(1);
        assert_eq!(view.usual(), Duration::ZERO);
        let quick = Duration::from_millis(5);
        for _ in 0..RECENT {
            view.remember(quick);
        }
        view.remember(Duration::from_secs(9));
        assert_eq!(view.usual(), quick);
        // When all become slower, that is usual after a while.
        for _ in 0..RECENT {
            view.remember(quick * 4);
        }
        assert_eq!(view.usual(), quick * 4);
    }
}
