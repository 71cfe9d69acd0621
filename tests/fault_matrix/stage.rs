//! The test's side of a row: starts the ranks, hears what they say and when, and does them harm.

use std::io::{BufRead, BufReader};
use std::process::{Child, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use nccl::launch::{Fleet, Output, Signal};
use nccl_tools::testing::again;

use crate::cgroup::Group;
use crate::row::{Cast, Row};
use crate::support;
use crate::switch::{Hosts, Kind};

/// A line of a rank; none when it has closed its output.
type Heard = (usize, Option<String>, Instant);

enum Players {
    Children(Vec<Child>),
    Fleet(Box<Fleet>),
}

/// The ranks of a row, which do not outlive it.
pub(crate) struct Stage {
    players: Players,
    pids: Vec<u32>,
    heard: Receiver<Heard>,
    said: Vec<Vec<(String, Instant)>>,
    closed: Vec<bool>,
    /// Ranks do not end by themselves.
    stays: bool,
    pub(crate) hosts: Option<Hosts>,
    pub(crate) group: Option<Group>,
}

/// Why a row is not tried here.
pub(crate) enum Unable {
    Failed(String),
    NotHere(&'static str),
}

impl From<String> for Unable {
    fn from(why: String) -> Self {
        Self::Failed(why)
    }
}

impl Stage {
    /// Starts the ranks of `row` as ranks of `test`.
    pub(crate) fn start(test: &str, row: &'static Row) -> Result<Self, Unable> {
        let ranks = row.cast.ranks();
        let (say, heard) = mpsc::channel();
        let mut hosts = None;
        let players = match row.cast {
            Cast::Fleet(ranks) => Players::Fleet(Box::new(fleet(test, row, ranks, say)?)),
            Cast::Processes(ranks) => {
                let place = format!("unix:@{test}-{}-{}", row.name, std::process::id());
                let starts =
                    (0..ranks).map(|rank| child(test, row, rank, ranks, &place, &[], &say));
                Players::Children(starts.collect::<Result<_, _>>()?)
            }
            Cast::Hosts(per_host) => {
                const ADDRESSES: [&[&str]; 3] =
                    [&["10.79.0.1/24"], &["10.79.0.2/24"], &["10.79.0.3/24"]];
                let cables = ADDRESSES.map(|addresses| [("eth0", Kind::Cable, addresses)]);
                let cables: Vec<_> = cables.iter().map(|cable| &cable[..]).collect();
                let Some(made) = Hosts::new(&cables[..per_host.len()]) else {
                    return Err(Unable::NotHere("it needs root, for network namespaces"));
                };
                let mut children = Vec::new();
                for (host, &here) in per_host.iter().enumerate() {
                    for _ in 0..here {
                        let namespace = made.namespace(host);
                        let name = format!("h{}", host + 1);
                        let place = "tcp:10.79.0.1:29400";
                        let inside = [&namespace[..], &name];
                        let rank = children.len();
                        children.push(child(test, row, rank, ranks, place, &inside, &say)?);
                    }
                }
                hosts = Some(made);
                Players::Children(children)
            }
        };
        let pids = match &players {
            Players::Children(children) => children.iter().map(Child::id).collect(),
            Players::Fleet(fleet) => fleet.pids().into_iter().flatten().collect(),
        };
        Ok(Self {
            players,
            pids,
            heard,
            said: vec![Vec::new(); ranks],
            closed: vec![false; ranks],
            stays: !row.aside.is_empty(),
            hosts,
            group: None,
        })
    }

    /// Also of a rank that is gone.
    pub(crate) fn pid(&self, rank: usize) -> u32 {
        self.pids[rank]
    }

    /// Sends a signal to a rank; it has begun when this returns.
    pub(crate) fn signal(&mut self, rank: usize, signal: Signal) {
        match &self.players {
            Players::Fleet(fleet) => fleet.signal(rank, signal),
            Players::Children(_) => {
                let pid = i32::try_from(self.pid(rank)).expect("a process");
                let pid = rustix::process::Pid::from_raw(pid).expect("a process");
                let signal = rustix::process::Signal::from_named_raw(signal.number());
                let signal = signal.expect("a signal with a name");
                rustix::process::kill_process(pid, signal).expect("it runs");
            }
        }
    }

    /// Waits until a rank has said a line that begins with `word`; what follows, and when it was heard.
    pub(crate) fn says(
        &mut self,
        rank: usize,
        word: &str,
        within: Duration,
    ) -> Result<(String, Instant), String> {
        let deadline = Instant::now() + within;
        loop {
            let found = self.said[rank].iter().find_map(|(line, at)| {
                let rest = line.strip_prefix(word)?;
                Some((rest.to_owned(), *at))
            });
            if let Some(found) = found {
                return Ok(found);
            }
            if self.closed[rank] {
                return Err(self.told(&format!("rank {rank} ended without {word:?}")));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match self.heard.recv_timeout(left) {
                Ok((of, Some(line), at)) => self.said[of].push((line, at)),
                Ok((of, None, _)) => self.closed[of] = true,
                Err(_) => {
                    let what = format!("rank {rank} did not say {word:?} within {within:?}");
                    return Err(self.told(&what));
                }
            }
        }
    }

    /// What a rank has said in a line that begins with `word`, if it has.
    pub(crate) fn has_said(&self, rank: usize, word: &str) -> Option<&str> {
        let mut lines = self.said[rank].iter();
        lines.find_map(|(line, _)| line.strip_prefix(word))
    }

    /// How every process has ended: its exit code or signal, or that it runs, for one that is stopped or hangs.
    pub(crate) fn ends(&mut self) -> Vec<String> {
        const SOON: Duration = Duration::from_secs(1);
        let runs = || String::from("runs");
        let deadline = Instant::now() + SOON;
        match &mut self.players {
            Players::Children(children) => children
                .iter_mut()
                .map(|child| {
                    loop {
                        match child.try_wait().expect("a child") {
                            Some(status) => return status.to_string(),
                            None if Instant::now() > deadline => return runs(),
                            None => std::thread::sleep(Duration::from_millis(2)),
                        }
                    }
                })
                .collect(),
            Players::Fleet(fleet) => match fleet.wait_timeout(SOON) {
                Some(report) => report.ranks().map(|end| end.exit().to_string()).collect(),
                None => fleet
                    .pids()
                    .into_iter()
                    .map(|pid| pid.map_or_else(|| String::from("has ended"), |_| runs()))
                    .collect(),
            },
        }
    }

    /// What was heard, for somebody who has to find out why.
    pub(crate) fn told(&self, what: &str) -> String {
        let mut text = what.to_owned();
        for (rank, said) in self.said.iter().enumerate() {
            for (line, _) in said {
                text.push_str(&format!("\n    [{rank}] {line}"));
            }
        }
        text
    }

    /// Waits until a rank has ended, well.
    pub(crate) fn ends_well(&mut self, rank: usize, within: Duration) -> Result<(), String> {
        self.says(rank, "main returns", within)?;
        let deadline = Instant::now() + within;
        loop {
            let status: Option<ExitStatus> = match &mut self.players {
                Players::Children(_) if self.stays => return Ok(()),
                Players::Children(children) => children[rank].try_wait().expect("a child"),
                // It tells of all at once, at the end.
                Players::Fleet(_) => return Ok(()),
            };
            match status {
                Some(status) if status.success() => return Ok(()),
                Some(status) => return Err(self.told(&format!("rank {rank}: {status}"))),
                None if Instant::now() > deadline => {
                    return Err(self.told(&format!("rank {rank} did not end within {within:?}")));
                }
                None => std::thread::sleep(Duration::from_millis(2)),
            }
        }
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        match &mut self.players {
            Players::Children(children) => {
                for child in children {
                    let _ = child.kill();
                    let _ = child.wait();
                }
            }
            Players::Fleet(fleet) => fleet.kill(),
        }
    }
}

/// One rank, in the namespace and under the host name of `inside`, if it is on a host.
fn child(
    test: &str,
    row: &Row,
    rank: usize,
    ranks: usize,
    place: &str,
    inside: &[&str],
    say: &Sender<Heard>,
) -> Result<Child, String> {
    let mut command = again(test, row.name);
    if let [namespace, name] = inside {
        let plain = command;
        // The emulator's own NCCL does not go from one namespace to another: there the world alone is inside.
        let whole = support::on_nvidias();
        command = match whole {
            true => std::process::Command::new("ip"),
            false => std::process::Command::new("unshare"),
        };
        if whole {
            command.args(["netns", "exec", namespace, "unshare"]);
        }
        let rename = "echo $0 > /proc/sys/kernel/hostname; exec \"$@\"";
        command.args(["--uts", "sh", "-c", rename, name]);
        command.arg(plain.get_program()).args(plain.get_args());
        command.envs(
            plain
                .get_envs()
                .filter_map(|(name, value)| Some((name, value?))),
        );
        if !whole {
            command.env(crate::switch::NAMESPACE, namespace);
        }
    }
    let mut child = command
        .env("RUST_BACKTRACE", "0")
        .env("NCCL_RUN_RANK", rank.to_string())
        .env("NCCL_RUN_LOCAL_RANK", rank.to_string())
        .env("NCCL_RUN_WORLD_SIZE", ranks.to_string())
        .env("NCCL_RUN_RENDEZVOUS", place)
        .env("NCCL_RUN_SECRET", "hush")
        .envs(row.variables.iter().copied())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| format!("rank {rank} cannot be started: {error}"))?;
    let stdout = child.stdout.take().expect("a pipe");
    let stderr = child.stderr.take().expect("a pipe");
    let of_stdout = say.clone();
    let of_stderr = say.clone();
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            let _ = of_stdout.send((rank, Some(line), Instant::now()));
        }
        let _ = of_stdout.send((rank, None, Instant::now()));
    });
    std::thread::spawn(move || {
        for line in BufReader::new(stderr).lines().map_while(Result::ok) {
            let _ = of_stderr.send((rank, Some(format!("stderr: {line}")), Instant::now()));
        }
    });
    Ok(child)
}

/// Ranks whose parent tells the others how they end.
fn fleet(test: &str, row: &'static Row, ranks: usize, say: Sender<Heard>) -> Result<Fleet, String> {
    let output = Output::Lines(Arc::new(move |line| {
        let text = String::from_utf8_lossy(line.bytes).into_owned();
        let _ = say.send((line.rank, Some(text), Instant::now()));
    }));
    let test = test.to_owned();
    let fleet = Fleet::builder(ranks).output(output).keep_others(true);
    let fleet = fleet.start(move |_| {
        let mut command = again(&test, row.name);
        command.env("RUST_BACKTRACE", "0");
        command.envs(row.variables.iter().copied());
        command
    });
    fleet.map_err(|error| format!("the ranks cannot be started: {error}"))
}
