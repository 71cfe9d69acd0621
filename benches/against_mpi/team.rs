//! The ranks of one of the competitors: processes that sleep until they get an order.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use nccl::launch::{Fleet, Output};

use super::Outcome;
use super::operation::Operation;

/// Limit of the start, and of every order.
const PATIENCE: Duration = Duration::from_secs(120);

/// The ranks of one program. They end when this is dropped.
pub(crate) struct Team {
    name: &'static str,
    /// A rank ends when its connection is closed, which happens before the processes are waited for.
    ranks: Vec<Member>,
    /// The ranks' own processes, or the launcher that started them.
    fleet: Fleet,
}

struct Member {
    orders: UnixStream,
    answers: BufReader<UnixStream>,
    /// The text after the rank's number in its introduction.
    introduction: String,
}

impl Team {
    /// Starts `commands` and waits until `ranks` ranks have connected to a socket in `directory`, whose path the
    /// commands get.
    pub(crate) fn start(
        name: &'static str,
        ranks: usize,
        directory: &Path,
        commands: impl FnOnce(&Path) -> Vec<Command>,
    ) -> Outcome<Self> {
        let path = directory.join(format!("{name}-{ranks}"));
        let listener = UnixListener::bind(&path)?;
        listener.set_nonblocking(true)?;
        let mut commands = commands(&path);
        // They get no reports about each other during the measurement.
        let fleet = Fleet::builder(commands.len()).with(|fleet| {
            fleet.output = Output::Plain;
            fleet.observe = false;
        });
        let fleet =
            fleet.start(move |i| std::mem::replace(&mut commands[i], Command::new("false")))?;
        let mut team = Self {
            name,
            ranks: Vec::new(),
            fleet,
        };
        let mut members: Vec<Option<Member>> = (0..ranks).map(|_| None).collect();
        let deadline = Instant::now() + PATIENCE;
        while members.iter().any(Option::is_none) {
            match listener.accept() {
                Ok((stream, _)) => {
                    let (rank, member) = Member::meet(stream)?;
                    *members.get_mut(rank).ok_or("a rank too many")? = Some(member);
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    team.check_that_it_runs()?;
                    if Instant::now() > deadline {
                        return Err(
                            format!("{name}: not all ranks came within {PATIENCE:?}").into()
                        );
                    }
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(error) => return Err(error.into()),
            }
        }
        team.ranks = members.into_iter().flatten().collect();
        Ok(team)
    }

    fn check_that_it_runs(&self) -> Outcome {
        if self.fleet.pids().contains(&None) {
            self.fleet.kill();
            return Err(format!("{}: {}", self.name, self.fleet.wait()).into());
        }
        Ok(())
    }

    /// The introduction of each rank.
    pub(crate) fn introductions(&self) -> impl Iterator<Item = &str> {
        self.ranks.iter().map(|rank| rank.introduction.as_str())
    }

    /// Sends the same order to all ranks, and returns the answer of each.
    pub(crate) fn tell(&mut self, order: &str) -> Outcome<Vec<String>> {
        for rank in &mut self.ranks {
            writeln!(rank.orders, "{order}")?;
        }
        let answers = self.ranks.iter_mut().map(Member::answer);
        let answers: Outcome<_> = answers.collect();
        answers.map_err(|error| format!("{}: {order}: {error}", self.name).into())
    }

    /// Fails if a rank receives anything but the expected data.
    pub(crate) fn check(&mut self, operation: Operation, bytes: usize) -> Outcome {
        let answers = self.tell(&format!("check {} {bytes}", operation.name()))?;
        match answers.iter().position(|answer| answer != "right") {
            None => Ok(()),
            Some(rank) => Err(format!(
                "{}: {} of {bytes} bytes: rank {rank} says {}",
                self.name,
                operation.name(),
                answers[rank]
            )
            .into()),
        }
    }

    /// Seconds of one operation of `count`: from when the first rank begins until the last one is done.
    pub(crate) fn time(
        &mut self,
        operation: Operation,
        bytes: usize,
        count: usize,
    ) -> Outcome<f64> {
        let answers = self.tell(&format!("run {} {bytes} {count}", operation.name()))?;
        let (mut first, mut last) = (u64::MAX, 0u64);
        for answer in answers {
            let (begun, ended) = answer.split_once(' ').ok_or("no two times")?;
            first = first.min(begun.parse()?);
            last = last.max(ended.parse()?);
        }
        let span = last.checked_sub(first).ok_or("an end before the begin")?;
        Ok(span as f64 * 1e-9 / count as f64)
    }
}

impl Member {
    /// Reads the introduction of a connection.
    fn meet(stream: UnixStream) -> Outcome<(usize, Self)> {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut member = Self {
            orders: stream.try_clone()?,
            answers: BufReader::new(stream),
            introduction: String::new(),
        };
        let line = member.answer()?;
        let rest = line.strip_prefix("rank ").ok_or("no rank")?;
        let (rank, rest) = rest.split_once(' ').ok_or("no rank")?;
        member.introduction = rest.to_owned();
        Ok((rank.parse()?, member))
    }

    fn answer(&mut self) -> Outcome<String> {
        let mut line = String::new();
        if self.answers.read_line(&mut line)? == 0 {
            return Err("a rank has ended".into());
        }
        Ok(line.trim_end().to_owned())
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.ranks.clear();
        let _ = self.fleet.wait_timeout(Duration::from_secs(10));
    }
}
