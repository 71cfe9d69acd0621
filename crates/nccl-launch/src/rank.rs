//! A process of a rank, from its start until its end is fully known.

use std::fs::File;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::Pid;

use super::oom::Counter;
use super::output::{Settings, Stream};
use super::process::{Pipes, Process, ProcessPhase};
use super::pumps::{Pumps, Source, StreamEnd, Tail};
use super::report::RankEnd;
use crate::departure::{Exit, OomKill, ProcessEnd, Signal};
use crate::sync::Mutex;

/// How long the report of an end waits for the rank's last output. The other ranks wait a little longer for the report.
const OUTPUT_WAIT: Duration = Duration::from_millis(60);

/// How long the rest of an ended rank's group may take to write its last output, for example a `tee` that a shell has
/// started.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(500);

/// One process of a rank.
pub(super) struct Running {
    rank: usize,
    process: Process,
    generation: u64,
    begun: Instant,
    streams: [Arc<StreamEnd>; 2],
    tail: Arc<Mutex<Tail>>,
    /// The OOM counter of its control group, and the count at the start.
    oom: Option<(Counter, u64)>,
    /// The signal that was sent to end it.
    sent: Option<Signal>,
    stopped: bool,
    was_ending: bool,
    ended: Option<(Exit, Instant)>,
    /// Whether its end has been reported to the other ranks.
    is_reported: bool,
}

impl Running {
    pub(super) fn start(
        rank: usize,
        generation: u64,
        command: Command,
        report_socket: Option<OwnedFd>,
        (pumps, settings): (&Pumps, &Settings),
    ) -> Result<Self, String> {
        let mut files = [None, None];
        if let Some(directory) = &settings.files {
            for (file, stream) in files.iter_mut().zip([Stream::Stdout, Stream::Stderr]) {
                *file = Some(log_file(directory, rank, stream)?);
            }
        }
        let [stdout_file, stderr_file] = files;
        let (process, Pipes { stdout, stderr }) = Process::start(command, report_socket)?;
        let tail = Arc::new(Mutex::new(Tail::new(settings.tail)));
        let streams = [(); 2].map(|()| Arc::<StreamEnd>::default());
        pumps.add(
            Stream::Stdout,
            Source {
                rank,
                pipe: stdout.into(),
                file: stdout_file,
                tail: None,
                end: Arc::clone(&streams[0]),
            },
        );
        pumps.add(
            Stream::Stderr,
            Source {
                rank,
                pipe: stderr.into(),
                file: stderr_file,
                tail: Some(Arc::clone(&tail)),
                end: Arc::clone(&streams[1]),
            },
        );
        let oom = Counter::of(process.id());
        Ok(Self {
            rank,
            generation,
            begun: Instant::now(),
            streams,
            tail,
            oom: oom.and_then(|counter| counter.read().map(|before| (counter, before))),
            sent: None,
            stopped: false,
            was_ending: false,
            ended: None,
            is_reported: false,
            process,
        })
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    pub(super) fn id(&self) -> u32 {
        self.process.id()
    }

    pub(super) fn group(&self) -> Pid {
        self.process.group()
    }

    pub(super) fn pidfd(&self) -> Option<BorrowedFd<'_>> {
        self.process.pidfd()
    }

    pub(super) fn close_pidfd(&mut self) {
        self.process.close_pidfd();
    }

    /// Sends the rank's group a signal that is not meant to end it.
    pub(super) fn signal(&self, signal: Signal) -> io::Result<()> {
        self.process.signal(signal)
    }

    /// Sends the rank's group a signal that is meant to end it, and SIGCONT, so that a stopped process handles the
    /// signal.
    pub(super) fn end(&mut self, signal: Signal) {
        // A process that has ended before is not one that was asked to, even if its end has not been handled yet.
        if self.ended.is_none() && self.process.ended().is_none() {
            self.stopped |= self.process.phase() == ProcessPhase::Stopped;
            self.sent = Some(signal);
        }
        let _ = self.process.signal(signal);
        let _ = self.process.signal(Signal::Cont);
    }

    /// Records whether the process is stopped or being ended, when another rank has failed.
    pub(super) fn record_state(&mut self) {
        match self.process.phase() {
            ProcessPhase::Stopped => self.stopped = true,
            ProcessPhase::Ending => self.was_ending = true,
            ProcessPhase::Running => {}
        }
    }

    /// Returns how the process ended, on the first call that finds it ended.
    pub(super) fn take_exit(&mut self, now: Instant) -> Option<Exit> {
        if self.ended.is_some() {
            return None;
        }
        let exit = self.process.ended()?;
        self.ended = Some((exit, now));
        Some(exit)
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended.is_some()
    }

    pub(super) fn was_asked(&self) -> bool {
        self.sent.is_some()
    }

    /// Whether all of its output has been read.
    pub(super) fn is_drained(&self) -> bool {
        self.streams.iter().all(|end| end.is_drained())
    }

    /// When to stop waiting for its last output.
    pub(super) fn drain_until(&self) -> Option<Instant> {
        self.ended.map(|(_, at)| at + DRAIN_TIMEOUT)
    }

    /// When to report its end to the other ranks; `None` if it runs or has been reported.
    pub(super) fn report_due(&self) -> Option<Instant> {
        let (_, at) = self.ended.filter(|_| !self.is_reported)?;
        Some(at + OUTPUT_WAIT)
    }

    /// Returns how the rank ended, with its last output, for the other ranks. Returns it only once, and only after that
    /// output has been read or the time to wait for it has passed.
    pub(super) fn take_exit_report(&mut self, now: Instant) -> Option<ProcessEnd> {
        let (exit, _) = self.ended?;
        let due = self
            .report_due()
            .is_some_and(|at| at <= now || self.is_drained());
        if !due {
            return None;
        }
        self.is_reported = true;
        let stderr = self.last_stderr().join("\n");
        Some(ProcessEnd::seen(exit, self.sent, self.oom(), &stderr))
    }

    fn oom(&self) -> Option<OomKill> {
        let (exit, _) = self.ended?;
        let (counter, before) = self.oom.as_ref()?;
        // For a rank that was asked to end, the OOM killer is not considered.
        let failed = self.sent.is_none() && !exit.is_success();
        failed.then(|| counter.since(*before)).flatten()
    }

    fn last_stderr(&self) -> Vec<String> {
        let tail = self.tail.lock();
        tail.lines()
    }

    /// Returns the ends of its streams, which outlive this value.
    pub(super) fn streams(&self) -> [Arc<StreamEnd>; 2] {
        self.streams.clone()
    }

    /// Kills the rest of the rank's group, and returns how the rank ended; `None` if it has not.
    pub(super) fn collect(self, begun: Instant, host: &Arc<str>) -> Option<RankEnd> {
        let (exit, at) = self.ended?;
        let (oom, stderr, pid) = (self.oom(), self.last_stderr(), self.process.id());
        self.process.collect();
        Some(RankEnd {
            rank: self.rank,
            pid,
            host: Arc::clone(host),
            generation: self.generation,
            exit,
            ran: at - self.begun,
            at: at - begun,
            stderr,
            oom,
            asked_by: self.sent,
            was_stopped: self.stopped,
            was_ending: self.was_ending,
        })
    }
}

/// Opens the file before the rank is started, so that a full disk or a wrong name is reported as an error instead of
/// losing the log.
fn log_file(directory: &Path, rank: usize, stream: Stream) -> Result<File, String> {
    let path = directory.join(format!("rank-{rank}.{stream}"));
    let file = File::options().create(true).append(true).open(&path);
    file.map_err(|error| format!("its log {}: {error}", path.display()))
}
