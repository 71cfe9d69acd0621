//! The recordings of all ranks, requested by one rank or by an observer, regardless of what the ranks' threads are
//! doing.
//!
//! Every process listens at an address of its own, and answers on the thread that reads its connections
//! ([`node`](super::node)). The requesting process connects to each of them directly, so that nothing passes through
//! rank 0, which may itself hang:
//!
//! ```text
//! asks                                   a rank's reading thread
//!   handshake, with the job's secret ───▶
//!   what is the time?  (five times) ───▶ answers at once
//!   what have you recorded?         ───▶ has a thread of its own copy and write it
//!                                   ◀─── no more than so many bytes, the oldest left out
//! ```
//!
//! At most [`WORKERS`] ranks are asked at once, and all answers together have at most [`TOTAL`] bytes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl_base::clock;

use super::address::Address;
use super::application::ClockReading;
use super::connect::{self, AttemptOutcome, ClaimedRole};
use super::connection::Connection;
use super::coordinator_message::{Answer, CoordinatorMessage};
use super::frame::{Decoder, Frame};
use super::job::Job;
use super::process;
use super::request::Request;
use crate::sync::Mutex;
use crate::time::deadline_after;

/// How many ranks are asked at once.
const WORKERS: usize = 32;

/// The maximum number of bytes of all answers together, as far as [`LEAST`] allows.
const TOTAL: usize = 64 << 20;

/// The bounds of the limit for one rank's answer, regardless of the number of ranks.
const LEAST: usize = 32 << 10;
const MOST: usize = 4 << 20;

/// The largest recording that is sent.
pub(super) const LARGEST_ANSWER: usize = 8 << 20;

/// How often a clock is read; the reading with the shortest round trip is used.
pub(super) const READINGS: usize = 5;

/// The timeout for a rank that is known to have departed, which may still answer.
const DEPARTED_TIMEOUT: Duration = Duration::from_millis(300);

/// A rank to ask.
pub(super) struct RecordingTarget {
    pub(super) rank: usize,
    pub(super) host: Option<String>,
    pub(super) pid: Option<u32>,
    /// The address at which it listens.
    pub(super) at: Option<String>,
    /// How it ended.
    pub(super) end: Option<String>,
    /// What else is known about the rank, in case it does not answer.
    pub(super) known: Option<String>,
}

/// The asking process.
pub(super) struct RecordingQuery<'a> {
    pub(super) job: &'a Job,
    pub(super) size: usize,
    pub(super) timeout: Duration,
}

/// The answers of the ranks of a job.
#[doc(hidden)]
pub struct RecordingAnswers<T> {
    pub job: String,
    pub generation: u64,
    /// The answers, by rank.
    pub answers: Vec<T>,
    /// The ranks without a usable answer, in order.
    pub missing: Vec<MissingRecording>,
}

/// A rank that did not answer.
#[derive(Debug)]
#[doc(hidden)]
pub struct MissingRecording {
    pub rank: usize,
    pub host: Option<String>,
    pub pid: Option<u32>,
    pub why: String,
}

/// Converts a rank's answer to a value, given the reading of its clock.
pub(crate) type Decode<'d, T> = dyn Fn(usize, ClockReading, &[u8]) -> Result<T, String> + Sync + 'd;

/// Readings of another process's clock.
#[derive(Default)]
pub(super) struct Readings {
    /// The reading with the shortest round trip: its duration, and how far the other clock was ahead.
    pub(super) best: Option<ClockReading>,
}

impl Readings {
    /// Takes one reading; `None` if the answer contains no time.
    pub(super) fn take(&mut self, ask: impl FnOnce() -> Option<Arc<[u8]>>) -> Option<()> {
        let own = i128::from(clock::clock());
        let begun = Instant::now();
        let answer = ask()?;
        let round_trip = begun.elapsed().as_nanos();
        let theirs = u64::from_le_bytes(answer[..].try_into().ok()?);
        let ahead = i128::from(theirs) - own - (round_trip / 2).cast_signed();
        if self.best.is_none_or(|best| round_trip < best.round_trip) {
            self.best = Some(ClockReading { ahead, round_trip });
        }
        Some(())
    }
}

impl RecordingQuery<'_> {
    /// Asks all targets.
    pub(super) fn ask<T: Send>(
        self,
        targets: Vec<RecordingTarget>,
        decode: &Decode<'_, T>,
    ) -> RecordingAnswers<T> {
        let until = deadline_after(self.timeout);
        // Ranks that do not answer must not use up the time for later ranks.
        let each = match targets.len() {
            ..=WORKERS => self.timeout,
            _ => (self.timeout / 4).max(Duration::from_millis(250)),
        };
        let workers = targets.len().min(WORKERS);
        let rest = Mutex::new(targets.into_iter());
        let found = Mutex::new((Vec::new(), Vec::new()));
        let work = || {
            loop {
                let Some(target) = rest.lock().next() else {
                    break;
                };
                let timeout = match target.end {
                    Some(_) => each.min(DEPARTED_TIMEOUT),
                    None => each,
                };
                let deadline = until.min(deadline_after(timeout));
                let answer = self.ask_one(&target, deadline, decode);
                let (answers, missing) = &mut *found.lock();
                match answer {
                    Ok(answer) => answers.push((target.rank, answer)),
                    Err(why) => missing.push(target.missing(&why)),
                }
            }
        };
        std::thread::scope(|scope| {
            let mut started = 0;
            for _ in 0..workers {
                let thread = std::thread::Builder::new().name(String::from("nccl-recordings"));
                started += usize::from(thread.spawn_scoped(scope, work).is_ok());
            }
            if started == 0 {
                work();
            }
        });
        let (mut answers, mut missing) = found.into_inner();
        answers.sort_by_key(|(rank, _)| *rank);
        missing.sort_by_key(|one: &MissingRecording| one.rank);
        RecordingAnswers {
            job: self.job.name.clone(),
            generation: self.job.generation,
            answers: answers.into_iter().map(|(_, answer)| answer).collect(),
            missing,
        }
    }

    /// Asks one rank until it answers or the deadline passes; the error states why there is no answer.
    fn ask_one<T>(
        &self,
        target: &RecordingTarget,
        deadline: Instant,
        decode: &Decode<'_, T>,
    ) -> Result<T, String> {
        let Some(at) = &target.at else {
            return Err(String::from(
                "it never joined, or has not said where it listens",
            ));
        };
        let address = Address::parse(at).ok_or("its address cannot be read")?;
        let begun = Instant::now();
        let mut pause = Duration::from_millis(5);
        loop {
            let why = match self.query(&address, target, deadline, decode) {
                Ok(answer) => return Ok(answer),
                Err(QueryError::Permanent(why)) => return Err(why),
                Err(QueryError::Transient(why)) => why,
            };
            if Instant::now() + pause >= deadline {
                let state =
                    state_at(&address).map_or_else(String::new, |state| format!(": {state}"));
                return Err(format!(
                    "it did not answer within {:?}{state} ({why})",
                    begun.elapsed().max(Duration::from_millis(1))
                ));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(100));
        }
    }

    fn query<T>(
        &self,
        address: &Address,
        target: &RecordingTarget,
        deadline: Instant,
        decode: &Decode<'_, T>,
    ) -> Result<T, QueryError> {
        use std::io::ErrorKind::{ConnectionRefused, NotFound};
        let claimed_role = ClaimedRole::recording_reader(self.size);
        let soon = deadline.min(Instant::now() + connect::ATTEMPT_TIMEOUT);
        let (connection, decoder) = match connect::attempt(address, self.job, claimed_role, 0, soon)
        {
            AttemptOutcome::Connected(established)
                if established.accepted_by_rank == target.rank =>
            {
                (established.connection, established.decoder)
            }
            // A coordinator that has taken over listens at its predecessor's address.
            AttemptOutcome::Connected(established) => {
                established.connection.shut();
                let why = format!(
                    "rank {} listens at {address} by now",
                    established.accepted_by_rank
                );
                return Err(QueryError::Permanent(why));
            }
            AttemptOutcome::Refused(why) | AttemptOutcome::Follows { why, .. } => {
                return Err(QueryError::Permanent(why));
            }
            AttemptOutcome::NotYet(error, _)
                if matches!(error.kind(), ConnectionRefused | NotFound) =>
            {
                let why = format!("no process listens at {address} any more ({error})");
                return Err(QueryError::Permanent(why));
            }
            AttemptOutcome::NotYet(error, _) => {
                return Err(QueryError::Transient(error.to_string()));
            }
        };
        let mut query = RecordingConnection {
            connection: &connection,
            decoder,
            deadline,
            next: 0,
        };
        let answer = query.receive(target.rank, self.budget(), decode);
        connection.shut();
        answer
    }

    /// Returns the maximum number of bytes of each rank's answer.
    fn budget(&self) -> usize {
        (TOTAL / self.size.max(1)).clamp(LEAST, MOST)
    }
}

/// Why there is no answer, and whether another attempt may get one.
enum QueryError {
    Permanent(String),
    Transient(String),
}

impl From<std::io::Error> for QueryError {
    fn from(error: std::io::Error) -> Self {
        Self::Transient(error.to_string())
    }
}

/// A connection to one rank.
struct RecordingConnection<'c> {
    connection: &'c Connection,
    decoder: Decoder,
    deadline: Instant,
    next: u64,
}

impl RecordingConnection<'_> {
    fn receive<T>(
        &mut self,
        rank: usize,
        budget: usize,
        decode: &Decode<'_, T>,
    ) -> Result<T, QueryError> {
        let mut readings = Readings::default();
        for _ in 0..READINGS {
            let mut failed = None;
            let ask = || match self.request(Request::Clock) {
                Ok(answer) => Some(answer),
                Err(why) => {
                    failed = Some(why);
                    None
                }
            };
            if readings.take(ask).is_none() {
                let unread = || QueryError::Permanent(String::from("it tells no time"));
                return Err(failed.unwrap_or_else(unread));
            }
        }
        let answer = self.request(Request::Recording { bytes: budget })?;
        let reading = readings.best.unwrap_or_default();
        decode(rank, reading, &answer)
            .map_err(|why| QueryError::Permanent(format!("what it answered cannot be used: {why}")))
    }

    fn request(&mut self, request: Request) -> Result<Arc<[u8]>, QueryError> {
        let id = self.next;
        self.next += 1;
        self.connection.enqueue(request.encode(id));
        self.connection.drain(self.deadline)?;
        loop {
            let frame: Frame = self.connection.expect(&mut self.decoder, self.deadline)?;
            match CoordinatorMessage::decode(&frame) {
                Ok(CoordinatorMessage::Answer(Answer::Value(value))) if frame.id == id => {
                    return Ok(value);
                }
                Ok(CoordinatorMessage::Answer(_)) if frame.id == id => {
                    return Err(QueryError::Transient(String::from(
                        "it is busy with others who ask",
                    )));
                }
                Ok(_) => {}
                Err(broken) => return Err(QueryError::Permanent(format!("it sent {}", broken.0))),
            }
        }
    }
}

impl RecordingTarget {
    fn missing(self, why: &str) -> MissingRecording {
        let mut text = match &self.end {
            Some(end) => end.clone(),
            None => why.to_owned(),
        };
        if let Some(known) = &self.known {
            text.push_str("; ");
            text.push_str(known);
        }
        MissingRecording {
            rank: self.rank,
            host: self.host,
            pid: self.pid,
            why: text,
        }
    }
}

/// Describes the state of the process that listens at the address, if it runs under the same kernel.
fn state_at(address: &Address) -> Option<&'static str> {
    if matches!(address, Address::Tcp(_)) {
        return None;
    }
    let socket = super::socket::dial(address, 0, Instant::now()).ok()?;
    process::state_of_peer(&socket)
}
