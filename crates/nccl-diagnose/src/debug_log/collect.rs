//! Collects facts from log lines, one line after another, with bounded memory.
//!
//! A line names host, process and thread, never the rank; `state` knows the communicator of each thread.

use std::collections::HashMap;
use std::io::{self, BufRead};

use super::facts::{
    Ended, Endpoint, Membership, PluginFact, PluginState, Process, Retry, Warning, cut,
};
use super::line::{self, Level, Record};
use super::message::{self, Ending, Message, Plugin};
use super::state::{COMM_NAME, State};
use super::tokens::Interface;
use nccl_sys::Version;

use nccl_base::launch_mode::IDLE_PARENT;
use nccl_base::warning::Class;

/// Bytes after which a line is cut. NCCL's longest line lists the ranks of a ring.
const LONGEST_LINE: usize = 16 << 10;
const MOST_PROCESSES: usize = 1 << 16;
const MOST_WARNINGS: usize = 64;
/// Maximum number of entries of each other list and map.
const MOST: usize = 256;

/// NCCL's debug logs of any number of processes, as facts.
///
/// Lines of other programs, partial lines and bytes that are not text are skipped. Memory grows with the number of
/// processes and of connections between them, not with the length of the logs.
///
/// ```
/// use nccl::debug_log::DebugLog;
///
/// let text = "\
/// epoch 1, loss 2.3
/// node-a:77:80 [0] NCCL INFO NET/IB : No device found.
/// node-a:77:80 [0] NCCL INFO Using network Socket
/// ";
/// let mut log = DebugLog::new();
/// log.read("rank0.log", text.as_bytes())?;
/// assert!(log.processes()[0].no_adapters);
/// for finding in log.report().findings {
///     println!("{finding}");
/// }
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct DebugLog {
    states: Vec<State>,
    facts: Vec<Process>,
    index: HashMap<(String, u32, String), usize>,
    /// Processes by number, to recognise a host's name that follows an unfinished line.
    by_pid: HashMap<u32, Vec<usize>>,
    /// Releases from lines without a prefix, each with the name of its log.
    versions: Vec<(String, Version)>,
    /// Kept connections of all processes.
    links: usize,
    counts: Counts,
}

/// How many lines were read, and how many of them were NCCL's.
///
/// ```
/// let mut log = nccl::debug_log::DebugLog::new();
/// log.read("log", &b"hello\na:1:1 [0] NCCL INFO hello\n"[..])?;
/// assert_eq!((log.counts().lines, log.counts().nccl), (2, 1));
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// Lines read.
    pub lines: u64,
    /// Lines written by NCCL.
    pub nccl: u64,
    /// Lines written by NCCL at the level `NCCL_DEBUG=INFO`.
    pub info: u64,
    /// Lines with NCCL's mark and no prefix: partial lines.
    pub broken: u64,
    /// Lines written by NCCL that were not kept, because there are too many processes.
    pub left_out: u64,
}

impl DebugLog {
    /// An empty set of logs.
    ///
    /// ```
    /// let log = nccl::debug_log::DebugLog::new();
    /// ```
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Reads one log to its end; `name` is its name in the report. Several logs of one job are judged together.
    ///
    /// # Errors
    /// Those of reading; the lines read until then are kept.
    ///
    /// ```
    /// let mut log = nccl::debug_log::DebugLog::new();
    /// for path in ["/tmp/nccl.node-a.77", "/tmp/nccl.node-b.78"] {
    ///     if let Ok(file) = std::fs::File::open(path) {
    ///         log.read(path, std::io::BufReader::new(file))?;
    ///     }
    /// }
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn read(&mut self, name: &str, mut input: impl BufRead) -> io::Result<()> {
        let mut line = Vec::new();
        let mut number = 0;
        while next_line(&mut input, &mut line)? {
            number += 1;
            self.counts.lines += 1;
            let text = line::without_colour(String::from_utf8_lossy(&line).into_owned());
            self.line((name, number), &text);
        }
        Ok(())
    }

    /// The processes with lines in the logs, in the order of their first lines.
    ///
    /// ```
    /// assert!(nccl::debug_log::DebugLog::new().processes().is_empty());
    /// ```
    #[must_use]
    pub fn processes(&self) -> &[Process] {
        &self.facts
    }

    /// How many lines were read.
    ///
    /// ```
    /// assert_eq!(nccl::debug_log::DebugLog::new().counts().lines, 0);
    /// ```
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// The releases that are in the logs without a process: `NCCL version …` as rank 0 prints it.
    pub(super) fn versions(&self) -> &[(String, Version)] {
        &self.versions
    }

    fn line(&mut self, at: (&str, u64), text: &str) {
        let parts = line::parse(text);
        self.counts.broken += u64::from(parts.broken);
        if let Some(Message::Version(version)) = parts.version.map(message::read) {
            self.counts.nccl += 1;
            let entry = (cut(at.0), version);
            if self.versions.len() < MOST && !self.versions.contains(&entry) {
                self.versions.push(entry);
            }
        }
        for record in &parts.records {
            self.counts.nccl += 1;
            self.counts.info += u64::from(record.level == Level::Info);
            match self.process(at.0, record) {
                Some(index) => self.record(index, at, record),
                None => self.counts.left_out += 1,
            }
        }
    }

    /// The process of a record, new or known.
    fn process(&mut self, file: &str, record: &Record<'_>) -> Option<usize> {
        // Without a host and a process number, a device within one log stands for the process.
        let anonymous = match record.host {
            "" => format!("{}#{:?}", cut(file), record.device),
            _ => String::new(),
        };
        let key = (cut(record.host), record.pid, anonymous);
        if let Some(&index) = self.index.get(&key) {
            return Some(index);
        }
        let same_number = self.by_pid.get(&record.pid).into_iter().flatten().copied();
        let glued = same_number.take(64).find(|&index| {
            let host = &self.facts[index].host;
            !host.is_empty() && record.host.ends_with(&host[..])
        });
        if glued.is_some() {
            return glued;
        }
        if self.facts.len() == MOST_PROCESSES {
            return None;
        }
        let index = self.facts.len();
        self.facts.push(Process {
            host: key.0.clone(),
            pid: record.pid,
            ..Process::default()
        });
        self.states.push(State::default());
        self.by_pid.entry(record.pid).or_default().push(index);
        self.index.insert(key, index);
        Some(index)
    }

    fn record(&mut self, index: usize, at: (&str, u64), record: &Record<'_>) {
        let (process, state) = (&mut self.facts[index], &mut self.states[index]);
        if process.tag.is_none() {
            process.tag = line::tag(record.lead).or_else(|| line::tag_of_file(at.0));
        }
        if record.level == Level::Warn {
            let rank = state.rank(process, record.tid);
            warning(process, rank, at, record);
            return;
        }
        match message::read(record.text) {
            Message::Init(stage, init) => state.init(process, record.tid, stage, &init),
            Message::Network(name) => state.network(process, record.tid, name),
            Message::Channel(channel) => {
                state.channel(process, record.tid, &channel, &mut self.links)
            }
            Message::Rings { gdr } => {
                if let Some(membership) = state.current(process, record.tid) {
                    membership.ring_gdr = gdr;
                }
            }
            Message::Ring(order) => {
                if let Some(membership) = state.current(process, record.tid)
                    && membership.ring.is_none()
                {
                    let words: Vec<_> = order.split_whitespace().collect();
                    membership.ring = Some(cut(&words.join(" ")));
                }
            }
            other => fact(process, other),
        }
    }
}

/// Adds a fact that belongs to the process, or names its communicator itself.
fn fact(process: &mut Process, message: Message<'_>) {
    let named = |process: &mut Process, comm: &str, change: &dyn Fn(&mut Membership)| {
        let found = process
            .communicators
            .iter_mut()
            .rev()
            .find(|one| one.comm == comm);
        found.map(change)
    };
    match message {
        Message::Version(version) => process.version = Some(version),
        Message::Bootstrap(interface) => process.bootstrap = Some(endpoint(interface)),
        Message::Sockets(list) => process.sockets = list.into_iter().map(endpoint).collect(),
        Message::Adapters(names, beside) => {
            process.adapters = names.into_iter().map(cut).collect();
            let beside = beside.filter(|interface| !interface.name.is_empty());
            if process.bootstrap.is_none() {
                process.bootstrap = beside.map(endpoint);
            }
        }
        Message::NoAdapters => process.no_adapters = true,
        Message::Plugin(kind, plugin) => {
            let (state, text) = match plugin {
                Plugin::Missing(text) => (PluginState::Missing, text),
                Plugin::Loaded(text) => (PluginState::Loaded, text),
                Plugin::Failed(text) => (PluginState::Failed, text),
            };
            let (kind, text) = (cut(kind), cut(text));
            add(&mut process.plugins, PluginFact { kind, state, text });
        }
        Message::Layout {
            comm,
            nodes,
            local_ranks,
        } => {
            named(process, comm, &|one| {
                one.layout = Some((nodes, local_ranks))
            });
        }
        Message::Timings {
            rank,
            ranks,
            total,
            longest,
        } => {
            let mut members = process.communicators.iter_mut().rev();
            if let Some(one) = members.find(|one| (one.rank, one.ranks) == (rank, ranks)) {
                let (name, seconds) = longest.unwrap_or_default();
                one.init_seconds = Some((total, cut(name), seconds));
            }
        }
        Message::DirectRdma { adapter, enabled } => {
            put(&mut process.direct_rdma, adapter, enabled);
        }
        Message::NoPeerAccess(text) => add(&mut process.no_peer_access, cut(text)),
        Message::Variable { name, value } => put(&mut process.variables, name, cut(value)),
        Message::Config { field, value } => {
            if field == COMM_NAME && value.ends_with(IDLE_PARENT) {
                process.has_idle_parents = true;
                process.idle_to_come += 1;
            }
            put(&mut process.config, field, cut(value));
        }
        Message::Tuning {
            operation,
            algorithm,
            protocol,
        } => {
            let key = cut(&format!("{operation} {algorithm} {protocol}"));
            if process.tuning.len() < MOST || process.tuning.contains_key(&key) {
                *process.tuning.entry(key).or_default() += 1;
            }
        }
        Message::Retry { address, reason } => {
            let reason = cut(reason);
            let same = |one: &&mut Retry| one.address == address && one.reason == reason;
            match process.retries.iter_mut().find(same) {
                Some(one) => one.times += 1,
                None => add(
                    &mut process.retries,
                    Retry {
                        address,
                        reason,
                        times: 1,
                    },
                ),
            }
        }
        Message::Ended { comm, how } => {
            let how = match how {
                Ending::Finalized => Ended::Finalized,
                Ending::Destroyed => Ended::Destroyed,
                Ending::Aborted => Ended::Aborted,
                Ending::Revoked => Ended::Revoked,
            };
            named(process, comm, &|one| one.ended = Some(how));
        }
        Message::Trace { place, code } => {
            process
                .first_error
                .get_or_insert_with(|| (cut(place), code));
        }
        Message::Other => {}
        // The caller has handled these, because they need the thread.
        Message::Init(..)
        | Message::Network(_)
        | Message::Channel(_)
        | Message::Rings { .. }
        | Message::Ring(_) => unreachable!("the caller took these"),
    }
}

fn warning(process: &mut Process, rank: Option<usize>, at: (&str, u64), record: &Record<'_>) {
    let text = cut(record.text);
    // The same warning of a later attempt differs in a number at most; the whole text is compared.
    if let Some(known) = process.warnings.iter_mut().find(|one| one.text == text) {
        known.times += 1;
        return;
    }
    match message::read(record.text) {
        Message::NoPeerAccess(text) => add(&mut process.no_peer_access, cut(text)),
        Message::NoAdapters => process.no_adapters = true,
        _ => {}
    }
    if process.warnings.len() == MOST_WARNINGS {
        process.more_warnings += 1;
        return;
    }
    process.warnings.push(Warning {
        class: Class::of(&text),
        text,
        place: cut(record.place),
        time: line::stamp(record.lead).map(|(time, _)| time),
        at: (cut(at.0), at.1),
        rank,
        times: 1,
    });
}

fn endpoint(interface: Interface<'_>) -> Endpoint {
    Endpoint {
        interface: cut(interface.name),
        address: interface.address,
    }
}

fn add<T: PartialEq>(list: &mut Vec<T>, value: T) {
    if list.len() < MOST && !list.contains(&value) {
        list.push(value);
    }
}

fn put<T>(map: &mut std::collections::BTreeMap<String, T>, key: &str, value: T) {
    if map.len() < MOST || map.contains_key(key) {
        map.insert(cut(key), value);
    }
}

/// Fills `line` with the next line, without its end and cut where it is too long; `false` at the end.
fn next_line(input: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<bool> {
    line.clear();
    let mut any = false;
    loop {
        let available = match input.fill_buf() {
            Ok(available) => available,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        if available.is_empty() {
            return Ok(any);
        }
        any = true;
        let end = available.iter().position(|&byte| byte == b'\n');
        let part = &available[..end.unwrap_or(available.len())];
        let room = LONGEST_LINE - line.len();
        line.extend_from_slice(&part[..part.len().min(room)]);
        let used = end.map_or(available.len(), |end| end + 1);
        input.consume(used);
        if end.is_some() {
            return Ok(true);
        }
    }
}
