//! The test's side of a row: starts the ranks, reads their output with its times, and causes the fault.

use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use nccl::launch::{Event, Exit, Fleet, Output, Signal, Stream};
use nccl_tools::testing::again;

use crate::cgroup::Group;
use crate::row::{Cast, Row};
use crate::support;
use crate::switch::{Hosts, Kind};

enum Heard {
    Line(usize, String, Instant),
    /// Comes after the last line of a rank.
    Ended(usize, Exit),
}

/// The ranks of a row, which do not outlive it.
pub(crate) struct Stage {
    fleet: Fleet,
    pids: Vec<u32>,
    heard: Receiver<Heard>,
    said: Vec<Vec<(String, Instant)>>,
    ended: Vec<Option<Exit>>,
    /// Whether ranks do not end by themselves.
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
        let tell = say.clone();
        let output = Output::Lines(Arc::new(move |line| {
            let text = String::from_utf8_lossy(line.bytes);
            let text = match line.stream {
                Stream::Stdout => text.into_owned(),
                Stream::Stderr => format!("stderr: {text}"),
            };
            let _ = say.send(Heard::Line(line.rank, text, Instant::now()));
        }));
        // Only a fleet's ranks are told how the others end.
        let mut fleet = Fleet::builder(ranks);
        fleet.output = output;
        fleet.keep_others = true;
        fleet.observe = matches!(row.cast, Cast::Fleet(_));
        let (mut hosts, mut inside) = (None, Vec::new());
        fleet.rendezvous = match row.cast {
            Cast::Fleet(_) => None,
            Cast::Processes(_) => {
                let place = format!("unix:@{test}-{}-{}", row.name, std::process::id());
                Some(place)
            }
            Cast::Hosts(per_host) => {
                const ADDRESSES: [&[&str]; 3] =
                    [&["10.79.0.1/24"], &["10.79.0.2/24"], &["10.79.0.3/24"]];
                let cables = ADDRESSES.map(|addresses| [("eth0", Kind::Cable, addresses)]);
                let cables: Vec<_> = cables.iter().map(|cable| &cable[..]).collect();
                let Some(made) = Hosts::new(&cables[..per_host.len()]) else {
                    return Err(Unable::NotHere("it needs root, for network namespaces"));
                };
                for (host, &here) in per_host.iter().enumerate() {
                    let place = [made.namespace(host), format!("h{}", host + 1)];
                    inside.extend(std::iter::repeat_n(place, here));
                }
                hosts = Some(made);
                Some("tcp:10.79.0.1:29400".into())
            }
        };
        let test = test.to_owned();
        let fleet = fleet.start(move |rank| command(&test, row, inside.get(rank)));
        let fleet = fleet.map_err(|error| format!("the ranks cannot be started: {error:#}"))?;
        let events = fleet.events();
        std::thread::spawn(move || {
            for event in events {
                if let Event::Exited(end) = event {
                    let _ = tell.send(Heard::Ended(end.rank, end.exit));
                }
            }
        });
        Ok(Self {
            pids: fleet.pids().into_iter().flatten().collect(),
            fleet,
            heard,
            said: vec![Vec::new(); ranks],
            ended: vec![None; ranks],
            stays: !row.aside.is_empty(),
            hosts,
            group: None,
        })
    }

    /// Also of an ended rank.
    pub(crate) fn pid(&self, rank: usize) -> u32 {
        self.pids[rank]
    }

    /// Sends a signal to a rank; returns once it is sent.
    pub(crate) fn signal(&mut self, rank: usize, signal: Signal) {
        self.fleet.signal(rank, signal);
    }

    /// Receives the next line or end; returns whether there was one before `deadline`.
    fn hear(&mut self, deadline: Instant) -> bool {
        let left = deadline.saturating_duration_since(Instant::now());
        match self.heard.recv_timeout(left) {
            Ok(Heard::Line(rank, line, at)) => self.said[rank].push((line, at)),
            Ok(Heard::Ended(rank, exit)) => self.ended[rank] = Some(exit),
            Err(_) => return false,
        }
        true
    }

    /// Waits until a rank has printed a line that begins with `word`; returns the rest, and when it was received.
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
            if self.ended[rank].is_some() {
                return Err(self.told(&format!("rank {rank} ended without {word:?}")));
            }
            if !self.hear(deadline) {
                let what = format!("rank {rank} did not say {word:?} within {within:?}");
                return Err(self.told(&what));
            }
        }
    }

    /// The rest of a line of a rank that begins with `word`, if there is one.
    pub(crate) fn has_said(&self, rank: usize, word: &str) -> Option<&str> {
        let mut lines = self.said[rank].iter();
        lines.find_map(|(line, _)| line.strip_prefix(word))
    }

    /// How every process has ended: its exit code or signal, or that it runs, for one that is stopped or hangs.
    pub(crate) fn ends(&mut self) -> Vec<String> {
        const SOON: Duration = Duration::from_secs(1);
        let deadline = Instant::now() + SOON;
        while self.ended.iter().any(Option::is_none) && self.hear(deadline) {}
        let ends = self.ended.iter();
        ends.map(|end| end.map_or_else(|| String::from("runs"), |exit| exit.to_string()))
            .collect()
    }

    /// All output so far, to find the reason of a failure.
    pub(crate) fn told(&self, what: &str) -> String {
        let mut text = what.to_owned();
        for (rank, said) in self.said.iter().enumerate() {
            for (line, _) in said {
                text.push_str(&format!("\n    [{rank}] {line}"));
            }
        }
        text
    }

    /// Waits until a rank has ended successfully.
    pub(crate) fn ends_well(&mut self, rank: usize, within: Duration) -> Result<(), String> {
        self.says(rank, "main returns", within)?;
        if self.stays {
            return Ok(());
        }
        let deadline = Instant::now() + within;
        loop {
            let ended = self.ended[rank];
            match ended {
                Some(exit) if exit.is_success() => return Ok(()),
                Some(exit) => return Err(self.told(&format!("rank {rank}: {exit}"))),
                None if !self.hear(deadline) => {
                    return Err(self.told(&format!("rank {rank} did not end within {within:?}")));
                }
                None => {}
            }
        }
    }
}

/// The command of a rank, in the namespace and under the host name of `inside`, if it is on a host.
fn command(test: &str, row: &Row, inside: Option<&[String; 2]>) -> Command {
    let mut command = again(test, row.name);
    if let Some([namespace, name]) = inside {
        let plain = command;
        // The emulator's own NCCL does not cross namespaces: there only the world is inside.
        let whole = support::on_nvidias();
        command = match whole {
            true => Command::new("ip"),
            false => Command::new("unshare"),
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
    command
        .env("RUST_BACKTRACE", "0")
        .envs(row.variables.iter().copied());
    command
}
