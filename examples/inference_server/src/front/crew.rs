//! The front's view of the ranks: their processes, their connections, and their generations.

use std::error::Error;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use nccl::Observer;
use nccl::launch::{Fleet, Signal};
use parking_lot::Mutex;

use super::engine::Event;
use super::moves::{Moves, pause_at};
use super::options::{Options, Recovery};
use super::view::process_state;
use super::vote::Vote;
use crate::wire::{self, Copies, ToRank};

/// How long the ranks may take to end; and how much later than others a rank may leave a generation, besides the timeout of an
/// operation.
const GOODBYE: Duration = Duration::from_secs(3);

/// The time without all ranks after which all ranks are restarted.
const TOO_LONG: Duration = Duration::from_secs(60);
/// When ranks are told once more to go on with a rank that has come, or one is started once more, because nothing came of it.
const AGAIN: Duration = Duration::from_millis(300);
/// How long a rank that is to leave waits for copies of what it has.
const COPIED: Duration = Duration::from_secs(5);
/// How many processes may end before they serve, while the number of ranks grows.
const SPARE_STARTS: usize = 3;
/// The first pause before a failed start of a process is tried again. It doubles each time.
const PAUSE: Duration = Duration::from_millis(100);
/// The first pause before the restart of a process that ends each time.
const REST: Duration = Duration::from_millis(50);
const LONGEST_REST: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Why the server cannot go on.
pub(super) type Failure = Box<dyn Error + Send + Sync>;

/// The observer of the present world; replaced when all ranks are restarted.
pub(super) type SharedObserver = Arc<Mutex<Arc<Observer>>>;

pub(super) struct Crew {
    fleet: Fleet,
    vote: Option<Vote>,
    observer: SharedObserver,
    recovery: Recovery,
    /// How long a rank may be stopped while the others wait for it.
    deadline: Duration,
    /// The present attempt. Processes of earlier attempts are being ended.
    attempt: u64,
    pub(super) members: Vec<Worker>,
    /// Connections that have not named their rank yet.
    strangers: Vec<(usize, u32, UnixStream)>,
    /// The processes before the restart of all ranks, whose messages are ignored.
    given_up: Vec<u32>,
    owed: Option<Owed>,
    scale: Option<Scale>,
    /// How many ranks were asked for last.
    target: usize,
    /// Experts that are on their way, and the pause between two rounds.
    pub(super) moves: Option<Moves>,
    pause: Duration,
}

/// A change of the number of ranks.
struct Scale {
    /// How many there are to be.
    wanted: usize,
    /// How many processes were started for that, and how many may be.
    starts: usize,
    most_starts: usize,
    /// When a process was started, when the ranks were told to go on with one, and how often since then.
    started: Option<Instant>,
    told: Option<Instant>,
    tells: u32,
    /// Since when a rank could leave but for copies that lack.
    waits: Option<Instant>,
}

/// Processes that could not be started, for example for want of system resources.
struct Owed {
    what: Start,
    next: Instant,
    pause: Duration,
}

#[derive(Clone, Debug, PartialEq)]
enum Start {
    These(Vec<usize>),
    All,
}

/// One rank, by the launcher's number.
#[derive(Default)]
pub(super) struct Worker {
    pub(super) pid: Option<u32>,
    pub(super) link: Option<(usize, UnixStream)>,
    /// The generation that the rank has entered.
    pub(super) generation: Option<u64>,
    pub(super) serves: Option<Serves>,
    /// Whether this process has ever served.
    pub(super) has_served: bool,
    /// The last process of this place that has ended. Its connection may be heard of later than its end.
    ended: Option<u32>,
    /// How many positions of each slot were in a cache when it began to serve.
    kept: Vec<usize>,
    /// The beginning of the service.
    since: Option<Instant>,
    pub(super) restarts: u64,
    /// Restarts of this rank since the ranks last completed work.
    in_vain: usize,
    killed: bool,
    /// Whether it was asked to leave.
    pub(super) leaves: bool,
    /// When it was started beside ranks that serve, until it serves. Its process is known a moment later.
    comes_since: Option<Instant>,
    /// The generation that the rank has left, and the time.
    left: Option<(u64, Instant)>,
    /// When the process was first seen stopped, while no generation serves or its work takes long.
    stopped: Option<Instant>,
    /// When it was told to leave the generation that it serves in, because that was given up.
    told_to_give_up: Option<Instant>,
    /// When it was asked to leave for good, or last said something about its generation since then.
    leaving: Option<Instant>,
}

/// As [`wire::FromRank::Serves`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Serves {
    pub(super) generation: u64,
    pub(super) rank: usize,
    pub(super) shard: Option<usize>,
    pub(super) shards: usize,
    pub(super) device: usize,
    pub(super) copies: Option<Copies>,
}

impl Worker {
    /// Forgets the process but keeps its counts.
    fn begin_anew(&mut self) {
        *self = Self {
            restarts: self.restarts,
            in_vain: self.in_vain,
            ended: self.ended,
            ..Self::default()
        };
    }

    /// Whether it was started beside ranks that serve, and has not served yet.
    pub(super) fn is_new(&self) -> bool {
        self.comes_since.is_some()
    }

    /// Notes a sign of life. One that leaves may have to go on with the others before it reads that it is to leave.
    fn goes_on(&mut self) {
        self.leaving = self.leaving.map(|_| Instant::now());
    }

    fn is_started_again(&mut self) {
        self.restarts += 1;
        self.in_vain += 1;
    }
}

/// Returns the pause before the restart of a rank that was restarted `in_vain` times without success: a cause outside the
/// rank may pass.
fn pause_after(in_vain: usize) -> Duration {
    match in_vain {
        0..=2 => Duration::ZERO,
        more => LONGEST_REST.min(REST * (1 << (more - 3).min(8))),
    }
}

/// Whether the front votes with the ranks: where those that are left go on without one that stands still.
fn votes(recovery: Recovery) -> bool {
    matches!(recovery, Recovery::Elastic { .. } | Recovery::Shrink)
}

impl Crew {
    /// Starts the ranks. The engine gets the events of their processes.
    pub(super) fn start(options: &Options, link: &str, to: Sender<Event>) -> Result<Self, Failure> {
        let program = std::env::current_exe()?;
        let arguments = options.of_rank(link);
        let votes = votes(options.recovery);
        let rank = move || {
            let mut command = Command::new(&program);
            command.args(&arguments);
            command.envs(votes.then_some(Vote::OF_RANKS));
            command
        };
        Self::start_as(options, to, rank)
    }

    /// Starts as [`start`](Self::start) does, with ranks that run the given command.
    pub(super) fn start_as(
        options: &Options,
        to: Sender<Event>,
        rank: impl Fn() -> Command + Send + 'static,
    ) -> Result<Self, Failure> {
        let fleet = Fleet::builder(options.ranks).with(|fleet| fleet.keep_others = true);
        let fleet = fleet.start(move |_| rank())?;
        let events = fleet.events();
        let tell = move || {
            for event in events {
                if to.send(Event::Fleet(event)).is_err() {
                    return;
                }
            }
        };
        std::thread::Builder::new()
            .name(String::from("ends of ranks"))
            .spawn(tell)?;
        let observer = Observer::start(fleet.rendezvous()?)?;
        let vote = votes(options.recovery).then(Vote::default);
        if let Some(vote) = &vote {
            vote.join(0, fleet.rendezvous()?)?;
        }
        Ok(Self {
            fleet,
            vote,
            observer: Arc::new(Mutex::new(Arc::new(observer))),
            recovery: options.recovery,
            deadline: options.deadline,
            attempt: 0,
            members: (0..options.ranks).map(|_| Worker::default()).collect(),
            strangers: Vec::new(),
            given_up: Vec::new(),
            owed: None,
            scale: None,
            target: options.ranks,
            moves: None,
            pause: pause_at(options.move_rate),
        })
    }

    pub(super) fn observer(&self) -> SharedObserver {
        Arc::clone(&self.observer)
    }

    /// Records that a process runs.
    pub(super) fn started(&mut self, place: usize, pid: u32, attempt: u64) {
        let worker = &mut self.members[place];
        if attempt < self.attempt {
            return;
        }
        // The system may use the number of an ended process again.
        worker.ended.take_if(|ended| *ended == pid);
        if worker.pid.is_some_and(|known| known != pid) {
            // The former process of this place is another one.
            worker.begin_anew();
        }
        worker.pid = Some(pid);
    }

    /// Records that a process is gone. Returns whether the engine must react.
    pub(super) fn ended(&mut self, place: usize, pid: u32) -> bool {
        let worker = &mut self.members[place];
        worker.ended = Some(pid);
        let news = worker.pid == Some(pid);
        if news {
            worker.begin_anew();
        }
        // A process that was started together with others that failed to start is ended again.
        let in_vain = |owed: &Owed| owed.what == Start::All;
        news && !self.owed.as_ref().is_some_and(in_vain)
    }

    pub(super) fn opened(&mut self, link: usize, pid: u32, stream: UnixStream) {
        self.strangers.push((link, pid, stream));
    }

    /// Assigns a connection to the rank that it names. The process id shows whether the connection comes from the present
    /// process of this place; it may arrive before the launcher reports that id.
    pub(super) fn hello(&mut self, link: usize, place: usize) {
        let Some(at) = self.strangers.iter().position(|one| one.0 == link) else {
            return;
        };
        let (_, pid, stream) = self.strangers.swap_remove(at);
        if self.given_up.contains(&pid) {
            return;
        }
        if let Some(worker) = self.members.get_mut(place)
            && worker.pid.is_none_or(|known| known == pid)
            && worker.ended != Some(pid)
        {
            worker.pid = Some(pid);
            worker.link = Some((link, stream));
        }
    }

    /// Returns the place of a connection's rank.
    pub(super) fn place_of(&self, link: usize) -> Option<usize> {
        let is_its = |worker: &Worker| worker.link.as_ref().is_some_and(|(its, _)| *its == link);
        self.members.iter().position(is_its)
    }

    /// Removes a closed connection.
    pub(super) fn closed(&mut self, link: usize) {
        self.strangers.retain(|one| one.0 != link);
        if let Some(place) = self.place_of(link) {
            let worker = &mut self.members[place];
            worker.link = None;
            worker.serves = None;
        }
    }

    pub(super) fn place_of_process(&self, pid: u32) -> Option<usize> {
        let is_its = |worker: &Worker| worker.pid == Some(pid);
        self.members.iter().position(is_its)
    }

    /// Returns the number of parts that serve in `generation`, if all parts do.
    pub(super) fn complete(&self, generation: u64) -> Option<usize> {
        let serve = self.members.iter().filter_map(|worker| worker.serves);
        let serve: Vec<_> = serve
            .filter(|serves| serves.generation == generation)
            .collect();
        let shards = serve.first()?.shards;
        let there = |shard| serve.iter().any(|serves| serves.shard == Some(shard));
        (0..shards).all(there).then_some(shards)
    }

    /// How many positions of each slot are in a cache as this generation begins; the same on all of its ranks.
    pub(super) fn kept(&self, generation: u64) -> &[usize] {
        let serves = |worker: &&Worker| {
            worker
                .serves
                .is_some_and(|serves| serves.generation == generation)
        };
        let first = self.members.iter().find(serves);
        first.map_or(&[], |worker| &worker.kept)
    }

    /// Begins to move experts, if there is something to move.
    pub(super) fn begin_moves(&mut self, generation: u64) {
        let mut serve = self.members.iter().filter_map(|worker| worker.serves);
        let copies = serve.find(|serves| serves.generation == generation);
        let copies = copies.and_then(|serves| serves.copies);
        self.moves = copies.and_then(|copies| Moves::begin(generation, copies, self.pause));
    }

    /// Records that other places of the experts are planned.
    pub(super) fn balanced(&mut self, generation: u64, copies: Copies) {
        for worker in &mut self.members {
            let serves = worker.serves.as_mut();
            if let Some(serves) = serves.filter(|serves| serves.generation == generation) {
                serves.copies = Some(copies);
            }
        }
        self.begin_moves(generation);
    }

    /// Records that the experts of a rank are in their places.
    pub(super) fn placed(&mut self, place: usize, generation: u64, now: usize) {
        let serves = self.members[place].serves.as_mut();
        if let Some(serves) = serves.filter(|serves| serves.generation == generation) {
            serves.copies = Some(Copies {
                now,
                planned: now,
                rounds: None,
            });
        }
    }

    /// Sends work to all ranks with a part. A failed write needs no handling: other events report a rank that is gone.
    pub(super) fn send(&mut self, generation: u64, message: &ToRank) {
        for worker in &mut self.members {
            let has_part =
                |serves: Serves| serves.generation == generation && serves.shard.is_some();
            if worker.serves.is_some_and(has_part)
                && let Some((_, stream)) = &mut worker.link
            {
                let _ = wire::write(stream, message);
            }
        }
    }

    /// Tells all ranks that have entered this generation to leave it, also those that do not serve yet.
    pub(super) fn go_on(&mut self, generation: u64) {
        for worker in &mut self.members {
            if worker.generation == Some(generation)
                && let Some((_, stream)) = &mut worker.link
            {
                let _ = wire::write(stream, &ToRank::GoOn { generation });
            }
        }
    }

    /// Tells all ranks of this generation to leave it, because they do not complete their work.
    pub(super) fn give_up(&mut self, generation: u64) {
        for worker in &mut self.members {
            if worker.generation == Some(generation) {
                worker.told_to_give_up = Some(Instant::now());
            }
        }
        self.go_on(generation);
    }

    /// Changes the number of ranks, one after another.
    pub(super) fn scale_to(&mut self, ranks: usize) {
        self.target = ranks;
        let scale = self.scale.get_or_insert(Scale {
            wanted: ranks,
            starts: 0,
            most_starts: ranks + SPARE_STARTS,
            started: None,
            told: None,
            tells: 0,
            waits: None,
        });
        if scale.wanted != ranks {
            // The times stay: a process may have been started a moment ago.
            (scale.wanted, scale.starts, scale.waits) = (ranks, 0, None);
            scale.most_starts = ranks + SPARE_STARTS;
        }
    }

    /// Takes the next step to the number of ranks that there are to be, between two steps of a generation that serves. Returns whether that
    /// generation is over.
    pub(super) fn scale(&mut self, generation: u64) -> bool {
        let patience = self.patience();
        let Some(scale) = &mut self.scale else {
            return false;
        };
        if self.members.iter().any(|worker| worker.leaves) {
            // Its end is an event.
            return false;
        }
        let serves = |worker: &Worker| {
            let serves = worker.serves.map(|serves| serves.generation);
            serves == Some(generation)
        };
        let serving = self.members.iter().filter(|worker| serves(worker)).count();
        if serving > scale.wanted {
            // With the next one the last copy of an expert might go.
            let lacks = |copies: Copies| copies.now < copies.planned;
            let all = self.members.iter().filter_map(|worker| worker.serves);
            if all.filter_map(|serves| serves.copies).any(lacks)
                // Copies that move come, or the generation ends.
                && (self.moves.is_some() || scale.waits.get_or_insert_with(Instant::now).elapsed() < COPIED)
            {
                return false;
            }
            scale.waits = None;
            let last = self.members.iter().rposition(serves);
            if let Some(worker) = last.map(|place| &mut self.members[place])
                && let Some((_, stream)) = &mut worker.link
            {
                let _ = wire::write(stream, &ToRank::Leave);
                worker.leaves = true;
                worker.leaving = Some(Instant::now());
            }
            self.go_on(generation);
            return true;
        }
        let is_soon =
            |at: Option<Instant>, pause| at.is_some_and(|at: Instant| at.elapsed() < pause);
        let comes = |worker: &Worker| (worker.pid.is_some() || worker.is_new()) && !serves(worker);
        if serving == scale.wanted {
            // One that was started for a larger number that was asked for before.
            if let Some(place) = self.members.iter().position(comes) {
                self.members[place].leaves = true;
                self.signal(place, Signal::Kill);
                return false;
            }
            self.scale = None;
            return false;
        }
        match self.members.iter().find(|worker| comes(worker)) {
            // It hangs or is stopped, and the next one can only be started when it has ended.
            Some(worker)
                if worker.comes_since.is_some_and(|at| at.elapsed() > patience)
                    // One that has connected is told of this generation first.
                    && (worker.link.is_none() || scale.tells > 0) =>
            {
                if let Some(pid) = worker.pid {
                    self.kill_frozen(pid);
                }
            }
            // It has connected, and waits to be taken into the next generation, or will at once.
            Some(worker)
                if worker.link.is_some()
                    && !is_soon(scale.told, AGAIN * (1 << scale.tells.min(5))) =>
            {
                // Each time it has not come, all have begun again for nothing.
                scale.told = Some(Instant::now());
                scale.tells += 1;
                self.go_on(generation);
                return true;
            }
            Some(_) => {}
            None if is_soon(scale.started, AGAIN) => {}
            None if scale.starts == scale.most_starts => {
                note!("ranks that are started do not come: it stays at {serving} of them");
                self.scale = None;
            }
            None => {
                scale.starts += 1;
                if let Some(place) = self.members.iter().position(|worker| worker.pid.is_none()) {
                    scale.started = Some(Instant::now());
                    (scale.told, scale.tells) = (None, 0);
                    self.members[place].comes_since = scale.started;
                    if let Err((_, error)) = self.start_these(vec![place]) {
                        note!("{error}");
                        self.members[place].comes_since = None;
                    }
                }
            }
        }
        false
    }

    /// Returns the number of ranks that there are to be, while it changes.
    pub(super) fn scales_to(&self) -> Option<usize> {
        self.scale.as_ref().map(|scale| scale.wanted)
    }

    /// Whether a rank is left that can go on.
    pub(super) fn has_survivors(&self) -> bool {
        let survives = |worker: &Worker| {
            worker.link.is_some() && worker.generation.is_some() && !worker.leaves
        };
        self.members.iter().any(survives)
    }

    /// Starts the recovery from the loss of a rank, and returns a description. `gave_up` means that the rank ended by itself
    /// and has never served.
    pub(super) fn mend(&mut self, place: usize, gave_up: bool) -> &'static str {
        if gave_up {
            // A new process would fail in the same way.
            self.start_all_again();
            return "it did not come together with the others: all ranks are started again";
        }
        if !self.has_survivors() {
            self.start_all_again();
            return "nobody is left to go on: all ranks are started again";
        }
        if self.recovery != Recovery::Respawn {
            return "the others go on without it";
        }
        let pause = pause_after(self.members[place].in_vain);
        self.members[place].is_started_again();
        match &mut self.owed {
            // The place joins those that are waiting for a start.
            Some(Owed {
                what: Start::These(places),
                ..
            }) => places.push(place),
            _ if !pause.is_zero() => self.put_off(Start::These(vec![place]), pause),
            _ => {
                if let Err((what, error)) = self.start_these(vec![place]) {
                    self.owe(what, PAUSE, &error);
                }
            }
        }
        "it is started again, and the others wait for it"
    }

    /// Retries failed starts that are due.
    pub(super) fn catch_up(&mut self) {
        let Some(owed) = self.owed.take_if(|owed| owed.next <= Instant::now()) else {
            return;
        };
        let started = match owed.what {
            Start::These(places) => self.start_these(places),
            Start::All => self.start_all().map_err(|error| (Start::All, error)),
        };
        if let Err((what, error)) = started {
            self.owe(what, LONGEST_PAUSE.min(owed.pause * 2), &error);
        }
    }

    fn owe(&mut self, what: Start, pause: Duration, error: &Failure) {
        note!("{error}; it is tried again in {} ms", pause.as_millis());
        self.put_off(what, pause);
    }

    /// Whether a start is pending.
    #[cfg(test)]
    pub(super) fn is_owed(&self) -> bool {
        self.owed.is_some()
    }

    fn put_off(&mut self, what: Start, pause: Duration) {
        self.owed = Some(Owed {
            what,
            next: Instant::now() + pause,
            pause,
        });
    }

    /// Starts these places. On a failure returns the places that are left, and the error.
    fn start_these(&self, places: Vec<usize>) -> Result<(), (Start, Failure)> {
        for (number, &place) in places.iter().enumerate() {
            if let Err(error) = self.fleet.restart(place) {
                return Err((Start::These(places[number..].to_vec()), error.into()));
            }
        }
        Ok(())
    }

    pub(super) fn start_all_again(&mut self) {
        self.owed = None;
        let pause = pause_after(self.in_vain());
        if !pause.is_zero() {
            self.put_off(Start::All, pause);
        } else if let Err(error) = self.start_all() {
            self.owe(Start::All, PAUSE, &error);
        }
    }

    fn start_all(&mut self) -> Result<(), Failure> {
        self.strangers.clear();
        self.given_up = self.fleet.pids().into_iter().flatten().collect();
        for worker in &mut self.members {
            worker.begin_anew();
        }
        self.attempt = self.fleet.restart_all()?;
        let all = self.members.iter_mut();
        all.for_each(Worker::is_started_again);
        // All were started, and fewer may have been asked for.
        if self.target < self.members.len() {
            self.scale_to(self.target);
        }
        let observer = Arc::new(Observer::start(self.fleet.rendezvous()?)?);
        if let Some(vote) = &self.vote {
            vote.join(self.attempt, self.fleet.rendezvous()?)?;
        }
        let mut shared = self.observer.lock();
        let before = std::mem::replace(&mut *shared, observer);
        drop(shared);
        // The former observer may still send messages, so another thread drops it.
        let farewell = std::thread::Builder::new().name(String::from("farewell"));
        let _ = farewell.spawn(move || drop(before));
        Ok(())
    }

    /// Kills a process that does not answer, for which the other ranks would wait.
    pub(super) fn kill_frozen(&mut self, pid: u32) {
        let Some(place) = self.place_of_process(pid) else {
            return;
        };
        // Every other rank reports it, but it is killed once.
        if !std::mem::replace(&mut self.members[place].killed, true) {
            let state = process_state(pid).unwrap_or('?');
            note!("rank {place} (pid {pid}, state {state}) does not answer, and is killed");
            self.signal(place, Signal::Kill);
        }
    }

    /// Records that a rank has entered a generation.
    pub(super) fn entered(&mut self, place: usize, generation: u64) {
        let worker = &mut self.members[place];
        worker.generation = Some(generation);
        worker.serves = None;
        (worker.stopped, worker.left, worker.told_to_give_up) = (None, None, None);
        worker.goes_on();
    }

    /// Records that a rank has left a generation, and waits for the others.
    pub(super) fn left(&mut self, place: usize, generation: u64) {
        let worker = &mut self.members[place];
        worker.serves = None;
        worker.left = Some((generation, Instant::now()));
        worker.goes_on();
    }

    /// Records that a rank serves in a generation.
    pub(super) fn serves_in(&mut self, place: usize, serves: Serves, kept: Vec<usize>) {
        let worker = &mut self.members[place];
        worker.kept = kept;
        (worker.serves, worker.since) = (Some(serves), Some(Instant::now()));
        (worker.has_served, worker.comes_since) = (true, None);
        worker.goes_on();
    }

    /// Records that a generation serves: a pending restart of all ranks is not needed.
    pub(super) fn serves(&mut self) {
        self.owed.take_if(|owed| owed.what == Start::All);
    }

    /// Records that the ranks have completed work, and resets the counts of unsuccessful restarts.
    pub(super) fn achieved(&mut self) {
        for worker in &mut self.members {
            worker.in_vain = 0;
        }
    }

    /// Returns the most restarts of a rank since the ranks last completed work.
    pub(super) fn in_vain(&self) -> usize {
        let in_vain = self.members.iter().map(|worker| worker.in_vain);
        in_vain.max().unwrap_or_default()
    }

    /// How long a rank may take to do what it was told to. A hang in an operation is detected earlier.
    pub(super) fn timeout(&self) -> Duration {
        self.deadline + GOODBYE
    }

    /// While a generation serves: kills ranks that were asked to leave and have not ended for too long. The others go on without
    /// such a rank, but their number cannot change again before it has ended.
    pub(super) fn kill_those_that_do_not_leave(&mut self) {
        let timeout = self.timeout();
        let stays = |worker: &&Worker| worker.leaving.is_some_and(|at| at.elapsed() > timeout);
        let stay = self.members.iter().filter(stays);
        let stay: Vec<_> = stay.filter_map(|worker| worker.pid).collect();
        for pid in stay {
            self.kill_frozen(pid);
        }
    }

    /// While no generation serves: kills ranks that still serve in a generation that others have left long ago, or that was given
    /// up long ago. Such a rank hangs outside any operation, and the others wait for it. A rank that has begun to serve since
    /// then may be about to leave, and is spared.
    pub(super) fn kill_wedged(&mut self) {
        let timeout = self.timeout();
        let is_long_ago = |at: Instant| at.elapsed() > timeout;
        let left = |worker: &Worker| {
            let (generation, at) = worker.left?;
            is_long_ago(at).then_some(generation)
        };
        let over: Vec<_> = self.members.iter().filter_map(left).collect();
        let hangs = |worker: &&Worker| {
            let is_over = |serves: Serves| {
                over.contains(&serves.generation) || worker.told_to_give_up.is_some_and(is_long_ago)
            };
            worker.serves.is_some_and(is_over) && worker.since.is_some_and(is_long_ago)
        };
        let wedged = self.members.iter().filter(hangs);
        let wedged: Vec<_> = wedged.filter_map(|worker| worker.pid).collect();
        for pid in wedged {
            self.kill_frozen(pid);
        }
    }

    /// Whether this process was seen stopped.
    #[cfg(test)]
    pub(super) fn is_seen_stopped(&self, place: usize) -> bool {
        self.members[place].stopped.is_some()
    }

    /// Moves all past events back in time.
    #[cfg(test)]
    pub(super) fn age(&mut self, by: Duration) {
        self.shift(|at| at.checked_sub(by).unwrap());
    }

    /// Changes the times of all past events.
    pub(super) fn shift(&mut self, to: impl Fn(Instant) -> Instant) {
        for worker in &mut self.members {
            worker.left = worker.left.map(|(generation, at)| (generation, to(at)));
            worker.since = worker.since.map(&to);
            worker.stopped = worker.stopped.map(&to);
            worker.told_to_give_up = worker.told_to_give_up.map(&to);
            worker.leaving = worker.leaving.map(&to);
            worker.comes_since = worker.comes_since.map(&to);
        }
        if let Some(scale) = &mut self.scale {
            scale.started = scale.started.map(&to);
            scale.told = scale.told.map(&to);
            scale.waits = scale.waits.map(&to);
        }
    }

    /// While no generation serves: kills processes that have been stopped for too long. The other ranks cannot continue without
    /// them, and detect a stopped rank by themselves only in an operation.
    pub(super) fn kill_stopped(&mut self) {
        self.watch_stopped(true);
        let is_over = |at: Instant| at.elapsed() > self.deadline;
        let over = self.members.iter();
        let over = over.filter(|worker| worker.stopped.is_some_and(is_over));
        let over: Vec<_> = over.filter_map(|worker| worker.pid).collect();
        for pid in over {
            self.kill_frozen(pid);
        }
    }

    /// Records since when each process has been stopped, or forgets it while nothing waits for the ranks.
    pub(super) fn watch_stopped(&mut self, is_waited_for: bool) {
        let is_stopped = |pid: u32| is_waited_for && matches!(process_state(pid), Some('T' | 't'));
        for worker in &mut self.members {
            worker.stopped = match worker.pid.is_some_and(is_stopped) {
                true => worker.stopped.or_else(|| Some(Instant::now())),
                false => None,
            };
        }
    }

    /// Returns a rank with a part of the model whose process has been stopped for so long that the others would have reported it
    /// if they were in an operation.
    pub(super) fn stopped_too_long(&self, generation: u64) -> Option<(usize, u32)> {
        let has_part = |serves: Serves| serves.generation == generation && serves.shard.is_some();
        let timeout = self.timeout();
        let place = self.members.iter().position(|worker| {
            worker.serves.is_some_and(has_part)
                && worker.stopped.is_some_and(|at| at.elapsed() > timeout)
        })?;
        Some((place, self.members[place].pid?))
    }

    /// Returns how long after a death all ranks should have met, including a rank that was stopped or hung; and how long after
    /// its start a rank that is added should serve.
    pub(super) fn patience(&self) -> Duration {
        TOO_LONG + self.deadline
    }

    pub(super) fn signal(&self, place: usize, signal: Signal) {
        self.fleet.signal(place, signal);
    }

    /// Ends all ranks: asks them to end, and kills them after a while.
    pub(super) fn end(mut self) {
        for worker in &mut self.members {
            if let Some((_, stream)) = &mut worker.link {
                let _ = wire::write(stream, &ToRank::End);
            }
        }
        if self.fleet.wait_timeout(GOODBYE).is_none() {
            self.fleet.kill();
        }
    }
}
