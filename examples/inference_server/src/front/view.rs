//! The observable state of the server: written by the engine, read by HTTP handlers.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;
use serde_json::{Value, json};

use super::engine::Work;
use crate::wire::Copies;

/// How long a step may take before the server is not ready: a multiple of the usual duration, and at least `SLOW`.
const SLOWER: u32 = 20;
const SLOW: Duration = Duration::from_secs(1);
/// The usual duration of a step is the median of this many steps.
const RECENT: usize = 11;

/// The state of the server.
#[derive(Clone, Debug)]
pub(super) struct View {
    pub(super) started: Instant,
    /// The ranks by place.
    pub(super) members: Vec<Member>,
    /// The generation that serves, the beginning of its service, and its number of parts.
    pub(super) serving: Option<(u64, Instant, usize)>,
    /// The number of ranks that there are to be, while it changes.
    pub(super) scaling_to: Option<usize>,
    /// How many rounds of moving experts are over, and how many there are, while experts move.
    pub(super) moving: Option<(usize, usize)>,
    /// What the busiest rank has to do over the mean of all, as it was found when the experts were placed by that.
    pub(super) imbalance: Option<f64>,
    /// The reason why no generation serves.
    pub(super) trouble: Trouble,
    /// The work of the ranks, its number, and its beginning.
    pub(super) given: Option<(Work, u64, Instant)>,
    /// When the ranks last completed work.
    answered: Option<Instant>,
    /// The durations of the last steps, the oldest first.
    recent: VecDeque<Duration>,
    pub(super) ending: bool,
    pub(super) last_fault: Option<LastFault>,
    pub(super) numbers: Numbers,
}

/// One of the launcher's ranks.
#[derive(Clone, Debug, Default)]
pub(super) struct Member {
    pub(super) pid: Option<u32>,
    /// The generation of the rank.
    pub(super) generation: Option<u64>,
    /// The rank's number in the generation.
    pub(super) rank: Option<usize>,
    /// The rank's part of the model, when it serves.
    pub(super) shard: Option<usize>,
    pub(super) serves: bool,
    /// The rank's CUDA device, when it serves.
    pub(super) device: Option<usize>,
    /// The copies of experts, where experts have copies.
    pub(super) copies: Option<Copies>,
    pub(super) restarts: u64,
}

impl Member {
    /// Returns the state in a word, given the kernel's state of the process.
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

/// The cause of an interruption.
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

/// The last fault.
#[derive(Clone, Debug, Serialize)]
pub(super) struct LastFault {
    #[serde(flatten)]
    pub(super) trouble: Trouble,
    /// The generation of the fault, if it was in one.
    pub(super) generation: Option<u64>,
    pub(super) unix_seconds: u64,
    /// The report of the ranks, if they had a communicator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) report: Option<String>,
    pub(super) evidence: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) hint: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) stderr: Vec<String>,
    /// The time until the server was ready again.
    pub(super) ready_after_seconds: Option<f64>,
}

impl LastFault {
    /// Creates a fault of the present time without further details.
    pub(super) fn of(trouble: Trouble) -> Self {
        Self {
            trouble,
            generation: None,
            unix_seconds: unix_seconds(),
            report: None,
            evidence: Vec::new(),
            hint: None,
            stderr: Vec::new(),
            ready_after_seconds: None,
        }
    }
}

/// The counters.
#[derive(Clone, Debug, Default)]
pub(super) struct Numbers {
    /// Finished requests, by outcome.
    pub(super) requests: BTreeMap<&'static str, u64>,
    pub(super) prompt_tokens: u64,
    pub(super) made_tokens: u64,
    pub(super) steps: u64,
    /// Rounds in which experts moved, and how often they were placed by how often they were chosen.
    pub(super) expert_rounds: u64,
    pub(super) balances: u64,
    pub(super) step_seconds: f64,
    pub(super) communication_seconds: f64,
    pub(super) rank_ends: u64,
    pub(super) recoveries: u64,
    pub(super) recovery_seconds: f64,
    pub(super) last_recovery_seconds: f64,
    pub(super) waiting: usize,
    pub(super) running: usize,
}

/// Returns the state of a process: its letter in `/proc`, such as `T` for a stopped process.
pub(super) fn process_state(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // After the name, which may contain any characters.
    stat.rsplit_once(')')?.1.trim_start().chars().next()
}

impl View {
    pub(super) fn new(ranks: usize) -> Self {
        Self {
            started: Instant::now(),
            members: vec![Member::default(); ranks],
            serving: None,
            scaling_to: None,
            moving: None,
            imbalance: None,
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

    /// Returns a needed rank whose process is stopped: frozen, but not dead. While a generation serves, it needs the ranks with a
    /// part of the model; the next generation needs all ranks.
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

    /// Returns `None` if the server would process a request now, otherwise the reason why not.
    pub(super) fn trouble(&self) -> Option<Trouble> {
        if self.ending {
            return Some(Trouble {
                cause: String::from("the server is ending"),
                ..Trouble::default()
            });
        }
        if self.serving.is_none() {
            // A frozen rank is a better cause than the ranks' verdict that a rank does not answer. If another rank has died,
            // the frozen rank is the one that the others wait for.
            return Some(self.frozen().unwrap_or_else(|| self.trouble.clone()));
        }
        if let Some(frozen) = self.frozen() {
            return Some(frozen);
        }
        let (work, number, since) = self.given?;
        let (usual, age) = (self.usual(), since.elapsed());
        let most = match work {
            Work::Step => self.slow(),
            Work::Probe | Work::Move | Work::Balance => SLOW,
        };
        let (usual, seconds) = (usual.as_secs_f64(), age.as_secs_f64());
        let cause = match work {
            Work::Step => format!(
                "step {number} has been under way for {seconds:.1} s; usually they take {usual:.3} s"
            ),
            Work::Probe => format!(
                "the ranks were asked for a sign of life {seconds:.1} s ago, and have not given it"
            ),
            Work::Move | Work::Balance => {
                format!("a part of moving experts has been under way for {seconds:.1} s")
            }
        };
        (age > most).then(|| Trouble {
            cause,
            ..Trouble::default()
        })
    }

    /// Records that the ranks got work.
    pub(super) fn given(&mut self, work: Work, number: u64) {
        self.given = Some((work, number, Instant::now()));
    }

    /// Records that the ranks have completed the work, and returns its duration.
    pub(super) fn answered(&mut self) -> Option<Duration> {
        self.answered = Some(Instant::now());
        let (.., since) = self.given.take()?;
        Some(since.elapsed())
    }

    /// Counts a finished step.
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

    /// Returns how long a step may take before the server is not ready.
    pub(super) fn slow(&self) -> Duration {
        SLOW.max(self.usual() * SLOWER)
    }

    /// Returns the usual duration of a step. As a median, it is robust against a step that waited for a frozen rank.
    fn usual(&self) -> Duration {
        let mut recent: Vec<_> = self.recent.iter().copied().collect();
        recent.sort_unstable();
        recent.get(recent.len() / 2).copied().unwrap_or_default()
    }

    /// Returns the contents of `/health`, without the parts that need a query of the ranks.
    pub(super) fn health(&self) -> Value {
        let trouble = self.trouble();
        let members = self.members.iter().enumerate().map(|(rank, member)| {
            let state = member.state(member.pid.and_then(process_state));
            json!({
                "rank": rank,
                "pid": member.pid,
                "state": state,
                "generation": member.generation,
                "world_rank": member.rank,
                "shard": member.shard,
                "device": member.device,
                "restarts": member.restarts,
            })
        });
        // A rank that has not moved its experts yet has fewer.
        let copies = self.members.iter().filter_map(|member| member.copies);
        let copies = copies.min_by_key(|copies| copies.now);
        json!({
            "ready": trouble.is_none(),
            "trouble": trouble,
            "pid": std::process::id(),
            "uptime_seconds": self.started.elapsed().as_secs_f64(),
            "generation": self.serving.map(|(generation, ..)| generation),
            "parts": self.serving.map(|(.., parts)| parts),
            "scaling_to": self.scaling_to,
            "copies": copies.map(|copies| copies.now),
            "copies_planned": copies.map(|copies| copies.planned),
            "moving": self.moving.map(|(done, rounds)| json!({"done": done, "rounds": rounds})),
            "imbalance": self.imbalance,
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

    /// Starts a process and stops it.
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
        // The others wait for the frozen rank, not for the dead one.
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
        // When all steps become slower, that becomes usual after a while.
        for _ in 0..RECENT {
            view.remember(quick * 4);
        }
        assert_eq!(view.usual(), quick * 4);
    }
}
