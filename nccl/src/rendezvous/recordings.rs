//! The recordings of all ranks, asked for by one of them or by an observer, whatever their threads do.
//!
//! Every rank has a door of its own, at which its process's reading thread listens ([`server`](super::server)).
//! Whoever asks goes from door to door, so that nothing passes through rank 0, which may itself be what hangs:
//!
//! ```text
//! asks                                   a rank's reading thread
//!   greeting, with the job's secret ───▶
//!   what is the time?  (five times) ───▶ answers at once
//!   what have you recorded?         ───▶ has a thread of its own copy and write it
//!                                   ◀─── no more than so many bytes, the oldest left out
//! ```
//!
//! At most [`WORKERS`] ranks are asked at once, and all answers together have at most [`TOTAL`] bytes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::client::{self, Claim, Tried};
use super::connection::Connection;
use super::door::PATIENCE;
use super::frame::{Decoder, Frame};
use super::incoming::{Answer, Incoming};
use super::launcher;
use super::line::Line;
use super::observer::Observer;
use super::place::Address;
use super::process;
use super::request::Request;
use super::server::Job;
use super::world::World;
use crate::forked;
use crate::supervision::recorder::{self, Clock, MissingRank, RankRecording, Snapshot, Timeline};
use crate::sync::Mutex;
use crate::time::deadline_after;

/// How many ranks are asked at once.
const WORKERS: usize = 32;

/// Bytes of all answers together, as far as [`LEAST`] allows.
const TOTAL: usize = 64 << 20;

/// What one rank may answer: not less, however many there are, and not more, however few.
const LEAST: usize = 32 << 10;
const MOST: usize = 4 << 20;

/// The largest that a rank answers, whatever it is asked for.
pub(super) const LARGEST_ANSWER: usize = 8 << 20;

/// How often a clock is read; the shortest round trip counts.
const READINGS: usize = 5;

/// One try to be let in.
const TRY: Duration = Duration::from_secs(2);

/// A rank that is gone, as far as is known, may still have a door.
const GONE: Duration = Duration::from_millis(300);

/// A rank that is to be asked.
pub(super) struct Target {
    pub(super) rank: usize,
    pub(super) host: Option<String>,
    pub(super) pid: Option<u32>,
    /// Where its door is.
    pub(super) at: Option<String>,
    /// How it ended.
    pub(super) end: Option<String>,
    /// What else is known of it, for when it does not answer.
    pub(super) known: Option<String>,
}

/// Who asks whom.
struct Asker<'a> {
    job: &'a Job,
    size: usize,
    limit: Duration,
}

impl World {
    /// What all ranks did last, on one time axis: for whoever asks why nothing goes on.
    ///
    /// Each rank answers from the thread that reads its connections, so that it does not matter what its other
    /// threads hang in, and whether rank 0 lives. Ranks that do not answer within `limit` are in
    /// [`Timeline::missing`], with what is known of them. Clocks are compared by round trips.
    ///
    /// All answers together have about 64 MiB at most, or 32 KiB for each of more than 2048 ranks: where there
    /// are many, the oldest calls are left out, and counted ([`Recording::left_out`](recorder::Recording)).
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// let worlds = nccl::World::threads(2);
    /// let timeline = worlds[1].recordings(Duration::from_secs(2));
    /// assert_eq!((timeline.ranks.len(), timeline.missing.len()), (2, 0));
    /// ```
    #[must_use]
    pub fn recordings(&self, limit: Duration) -> Timeline {
        self.line.recordings(limit)
    }
}

impl Observer {
    /// What all ranks did last, as [`World::recordings`], for a process that is no rank: that of an HTTP
    /// server, or a tool that looks at a job which hangs.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use nccl::{Observer, Rendezvous};
    /// # let observer = Observer::start(Rendezvous::unix("/tmp/nccl-doc-nobody.sock", 0, 4)?)?;
    /// let timeline = observer.recordings(Duration::from_secs(2));
    /// assert_eq!(timeline.missing.len(), 4);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn recordings(&self, limit: Duration) -> Timeline {
        let (job, targets) = self.targets();
        let host = crate::host::name();
        let reference = format!("an observer ({host}, pid {})", std::process::id());
        let asker = Asker {
            job: &job,
            size: targets.len(),
            limit,
        };
        asker.ask(Vec::new(), targets, reference)
    }
}

impl Line {
    fn recordings(&self, limit: Duration) -> Timeline {
        if forked::is_child() {
            return Timeline::default();
        }
        let own = recorder::of_place(self.home().place());
        let reference = self.describe(self.rank);
        let (mut here, mut targets) = (Vec::new(), Vec::new());
        let job = match self.own_door() {
            Some(server) => server.job().clone(),
            // All ranks are threads of this process.
            None => {
                let place = self.home().place();
                let others = (0..self.size).filter(|rank| *rank != self.rank);
                here.extend(others.map(|rank| {
                    let snapshot = recorder::of_place(&place.of_rank(rank));
                    part(rank, Clock::REFERENCE, snapshot)
                }));
                Job {
                    name: place.job.clone(),
                    epoch: place.epoch,
                    secret: None,
                }
            }
        };
        if self.own_door().is_some() {
            let departures = self.departures();
            let members = self.members();
            let members = members.get();
            targets.extend(
                (0..self.size)
                    .filter(|rank| *rank != self.rank)
                    .map(|rank| {
                        let member = members.and_then(|members| members.get(rank));
                        let end = departures.iter().find(|(gone, _)| *gone == rank);
                        Target {
                            rank,
                            host: member.map(|member| member.host.clone()),
                            pid: member.map(|member| member.pid),
                            at: member.and_then(|member| member.at.clone()),
                            end: end.map(|(_, departure)| departure.to_string()),
                            known: None,
                        }
                    }),
            );
        }
        here.push(part(self.rank, Clock::REFERENCE, own));
        let asker = Asker {
            job: &job,
            size: self.size,
            limit,
        };
        asker.ask(here, targets, reference)
    }
}

impl Line {
    /// Measures how the clock of this process stands to that of rank 0, where faults are recorded: those who
    /// merge the files later can ask nobody.
    pub(super) fn compare_clocks(&self) {
        if !recorder::is_wanted(self.home()) {
            return;
        }
        if self.rank == 0 {
            return self.home().set_clock(Clock::REFERENCE);
        }
        let deadline = deadline_after(PATIENCE);
        let mut readings = Readings::default();
        for _ in 0..READINGS {
            let ask = || match self.ask("clock", |_| Request::Clock, deadline, None, None) {
                Ok(Answer::Value(value)) => Some(value),
                _ => None,
            };
            if readings.take(ask).is_none() {
                break;
            }
        }
        if let Some((round_trip, ahead)) = readings.best {
            // What is to be added to the times of this process for those of rank 0.
            self.home().set_clock(Clock::measured(-ahead, round_trip));
        }
    }
}

/// Readings of another process's clock.
#[derive(Default)]
struct Readings {
    /// The one with the shortest round trip: how long that took, and by how much the other clock was ahead.
    best: Option<(u128, i128)>,
}

impl Readings {
    /// Reads it once; `None` where there is no time in the answer.
    fn take(&mut self, ask: impl FnOnce() -> Option<Arc<[u8]>>) -> Option<()> {
        let own = i128::from(recorder::clock());
        let begun = Instant::now();
        let answer = ask()?;
        let round_trip = begun.elapsed().as_nanos();
        let theirs = u64::from_le_bytes(answer[..].try_into().ok()?);
        let ahead = i128::from(theirs) - own - (round_trip / 2).cast_signed();
        if self.best.is_none_or(|(shortest, _)| round_trip < shortest) {
            self.best = Some((round_trip, ahead));
        }
        Some(())
    }
}

fn part(rank: usize, clock: Clock, snapshot: Snapshot) -> RankRecording {
    RankRecording {
        rank,
        clock,
        snapshot,
    }
}

impl Asker<'_> {
    /// Asks all of them, and puts them together with those that are `here`.
    fn ask(self, here: Vec<RankRecording>, targets: Vec<Target>, reference: String) -> Timeline {
        let until = deadline_after(self.limit);
        // Ranks that do not answer must not use up the time of those behind them.
        let each = match targets.len() {
            ..=WORKERS => self.limit,
            _ => (self.limit / 4).max(Duration::from_millis(250)),
        };
        let workers = targets.len().min(WORKERS);
        let rest = Mutex::new(targets.into_iter());
        let found = Mutex::new((here, Vec::new()));
        let work = || {
            loop {
                let Some(target) = rest.lock().next() else {
                    break;
                };
                let patience = match target.end {
                    Some(_) => each.min(GONE),
                    None => each,
                };
                let deadline = until.min(deadline_after(patience));
                let answer = self.ask_one(&target, deadline);
                let (ranks, missing) = &mut *found.lock();
                match answer {
                    Ok(rank) => ranks.push(rank),
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
        let (mut ranks, mut missing) = found.into_inner();
        ranks.sort_by_key(|one| one.rank);
        missing.sort_by_key(|one: &MissingRank| one.rank);
        Timeline {
            job: self.job.name.clone(),
            epoch: self.job.epoch,
            reference,
            ranks,
            missing,
            left_out: Vec::new(),
        }
    }

    /// One rank, until it answers or the deadline passes; why it did not.
    fn ask_one(&self, target: &Target, deadline: Instant) -> Result<RankRecording, String> {
        let Some(at) = &target.at else {
            return Err(String::from(
                "it never joined, or has not said where it listens",
            ));
        };
        let address = launcher::place(at).ok_or("its address cannot be read")?;
        let begun = Instant::now();
        let mut pause = Duration::from_millis(5);
        loop {
            let why = match self.talk(&address, target, deadline) {
                Ok(answer) => return Ok(answer),
                Err(Unanswered::Finally(why)) => return Err(why),
                Err(Unanswered::SoFar(why)) => why,
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

    fn talk(
        &self,
        address: &Address,
        target: &Target,
        deadline: Instant,
    ) -> Result<RankRecording, Unanswered> {
        use std::io::ErrorKind::{ConnectionRefused, NotFound};
        let claim = Claim::asker(self.size);
        let soon = deadline.min(Instant::now() + TRY);
        let (connection, decoder) = match client::attempt(address, self.job, claim, 0, soon) {
            Tried::Met(met) if met.by == target.rank => (met.connection, met.decoder),
            // Who has taken over listens where the one did that is gone.
            Tried::Met(met) => {
                met.connection.shut();
                let why = format!("rank {} listens at {address} by now", met.by);
                return Err(Unanswered::Finally(why));
            }
            Tried::Refused(why) | Tried::Follows { why, .. } => {
                return Err(Unanswered::Finally(why));
            }
            Tried::NotYet(error, _) if matches!(error.kind(), ConnectionRefused | NotFound) => {
                let why = format!("nobody listens at {address} any more ({error})");
                return Err(Unanswered::Finally(why));
            }
            Tried::NotYet(error, _) => return Err(Unanswered::SoFar(error.to_string())),
        };
        let mut talk = Talk {
            connection: &connection,
            decoder,
            deadline,
            next: 0,
        };
        let answer = talk.hear(target.rank, self.budget());
        connection.shut();
        answer
    }

    /// How many bytes each may answer.
    fn budget(&self) -> usize {
        (TOTAL / self.size.max(1)).clamp(LEAST, MOST)
    }
}

/// Why there is no answer, and whether another try may have one.
enum Unanswered {
    Finally(String),
    SoFar(String),
}

impl From<std::io::Error> for Unanswered {
    fn from(error: std::io::Error) -> Self {
        Self::SoFar(error.to_string())
    }
}

/// With one rank.
struct Talk<'c> {
    connection: &'c Connection,
    decoder: Decoder,
    deadline: Instant,
    next: u64,
}

impl Talk<'_> {
    fn hear(&mut self, rank: usize, budget: usize) -> Result<RankRecording, Unanswered> {
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
                let unread = || Unanswered::Finally(String::from("it tells no time"));
                return Err(failed.unwrap_or_else(unread));
            }
        }
        let answer = self.request(Request::Recording { bytes: budget })?;
        let broken =
            |why: String| Unanswered::Finally(format!("what it answered cannot be used: {why}"));
        let text = std::str::from_utf8(&answer).map_err(|error| broken(error.to_string()))?;
        let snapshot = Snapshot::from_json(text).map_err(|error| broken(error.to_string()))?;
        let (round_trip, ahead) = readings.best.unwrap_or_default();
        Ok(part(rank, Clock::measured(ahead, round_trip), snapshot))
    }

    fn request(&mut self, request: Request) -> Result<Arc<[u8]>, Unanswered> {
        let id = self.next;
        self.next += 1;
        self.connection.enqueue(request.encode(id));
        self.connection.drain(self.deadline)?;
        loop {
            let frame: Frame = self.connection.expect(&mut self.decoder, self.deadline)?;
            match Incoming::decode(frame) {
                Ok(Incoming::Answer(answered, Answer::Value(value))) if answered == id => {
                    return Ok(value);
                }
                Ok(Incoming::Answer(answered, _)) if answered == id => {
                    return Err(Unanswered::SoFar(String::from(
                        "it is busy with others who ask",
                    )));
                }
                Ok(_) => {}
                Err(broken) => return Err(Unanswered::Finally(format!("it sent {}", broken.0))),
            }
        }
    }
}

impl Target {
    fn missing(self, why: &str) -> MissingRank {
        let mut text = match &self.end {
            Some(end) => end.clone(),
            None => why.to_owned(),
        };
        if let Some(known) = &self.known {
            text.push_str("; ");
            text.push_str(known);
        }
        MissingRank::new(self.rank, self.host, self.pid, text)
    }
}

/// What the kernel says of the process that listens there, where it runs under the same one.
fn state_at(address: &Address) -> Option<&'static str> {
    if matches!(address, Address::Tcp(_)) {
        return None;
    }
    let socket = super::place::dial(address, 0, Instant::now()).ok()?;
    process::state_of_peer(&socket)
}
