//! A rank's line to the others: what its world and its communicators share.
//!
//! A program may drop its [`World`](super::World) and go on with its communicators, and these still have
//! to hear of a rank that died. So the connection is theirs together: it stays open until the last of
//! them is gone, and only then says goodbye. Of a world that is gone while communicators live, the
//! others learn at once that this rank comes to no exchange any more ([`Request::Stay`]); should its
//! process die after that, they hear of it like of any other death.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use super::connection::Connection;
use super::frame::LARGEST;
use super::heartbeat::Suspect;
use super::heir::{self, Heir, Way};
use super::hub::Hub;
use super::incoming::Answer;
use super::inquiry::{Attendance, Suspicion};
use super::mailbox::{Mailbox, Notice, Waited};
use super::message::{Departure, ENDS, Incomplete, Missing, Round};
use super::panics;
use super::request::Request;
use super::server::{PATIENCE, Server};
use crate::communicator::lock;
use crate::error::{Error, Result};
use crate::reaper;
use crate::stats::{RanksByState, WorldStats};
use crate::supervision::recorder::Home;
use crate::supervision::{Fault, Watch};
use crate::time::{deadline_after, later};

pub(crate) struct Line {
    pub(super) rank: usize,
    pub(super) size: usize,
    pub(super) way: Arc<Mutex<Way>>,
    /// Whether it has communicators, or had.
    watched: Arc<AtomicBool>,
    pub(super) mailbox: Arc<Mailbox>,
    /// Known when all have met.
    members: Arc<OnceLock<Vec<Member>>>,
    /// Made with the first communicator.
    watch: OnceLock<Arc<Watch>>,
    /// The job's name and epoch.
    pub(super) job: (String, u64),
    /// How often each topic was used: the n-th use on one rank meets the n-th use on every other.
    rounds: Mutex<HashMap<String, u64>>,
    /// The epoch to which the world has gone on; 0 before.
    gone_on: AtomicU64,
    /// Under which its communicators record what they do.
    home: Arc<Home>,
    /// What the program does, as it says, and since when.
    phase: Mutex<Option<(String, Instant)>>,
    /// What the others are told when this value goes.
    farewell: Mutex<Departure>,
}

#[derive(Clone)]
pub(super) enum Link {
    Here {
        hub: Arc<Hub>,
        server: Option<Arc<Server>>,
    },
    Elsewhere {
        connection: Arc<Connection>,
        /// This rank's own door, which stays open as long as the line.
        server: Arc<Server>,
    },
    /// The coordinator is gone, and there is no other yet.
    Between { server: Arc<Server> },
}

/// What [`Line::end`] came to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// The parts of all members; that of one that is gone is empty.
    All(Vec<Vec<u8>>),
    /// Who has not said that it is done.
    Missing(Vec<usize>),
    /// There is no connection to the others any more.
    Unheard,
}

/// How long a goodbye may take to be written.
const FAREWELL: Duration = Duration::from_secs(1);

/// What is known of a rank.
#[derive(Clone, Debug)]
pub(crate) struct Member {
    pub(crate) host: String,
    pub(crate) pid: u32,
    /// Where it listens, unless it is a thread of this process.
    pub(super) at: Option<String>,
}

impl Member {
    /// A thread of this process.
    pub(super) fn here() -> Self {
        Self {
            host: crate::host::name().to_string(),
            pid: std::process::id(),
            at: None,
        }
    }
}

/// How the worlds of this process stand.
pub(crate) fn world_stats() -> Vec<WorldStats> {
    panics::lines().iter().map(|line| line.stats()).collect()
}

impl Line {
    fn stats(&self) -> WorldStats {
        let mut ranks = RanksByState::default();
        let departures = self.departures();
        ranks.present = self.size.saturating_sub(departures.len());
        for (_, departure) in departures {
            match departure {
                Departure::Left => ranks.left += 1,
                Departure::Failed(_) => ranks.failed += 1,
                Departure::Lost(_) => ranks.gone += 1,
            }
        }
        WorldStats {
            job: self.job.0.clone(),
            epoch: self.job.1,
            rank: self.rank,
            ranks,
            heartbeat_ages: self.heartbeat_ages(),
        }
    }

    pub(super) fn open(
        rank: usize,
        size: usize,
        job: (String, u64),
        link: Link,
        mailbox: Arc<Mailbox>,
    ) -> Arc<Self> {
        let home = Home::new(&job.0, job.1, rank, size);
        let line = Arc::new(Self {
            rank,
            size,
            way: Arc::new(Mutex::new(Way::new(link))),
            watched: Arc::default(),
            mailbox,
            members: Arc::default(),
            watch: OnceLock::new(),
            job,
            rounds: Mutex::default(),
            gone_on: AtomicU64::new(0),
            home,
            phase: Mutex::default(),
            farewell: Mutex::new(Departure::Left),
        });
        if let Some(server) = line.own_door() {
            server.set_home(&line.home);
        }
        panics::remember(Arc::downgrade(&line));
        line
    }

    /// All have said who they are. From now on, another takes over when the coordinator goes.
    pub(super) fn meet(&self, members: Vec<Member>) {
        let _ = self.members.set(members);
        if matches!(self.link(), Link::Elsewhere { .. }) {
            let heir = Heir {
                rank: self.rank,
                size: self.size,
                way: Arc::clone(&self.way),
                mailbox: Arc::clone(&self.mailbox),
                members: Arc::clone(&self.members),
                watched: Arc::clone(&self.watched),
            };
            self.mailbox.on_loss(move |loss| heir::bereave(&heir, loss));
        }
    }

    /// The way to the coordinator, as it is now.
    pub(super) fn link(&self) -> Link {
        lock(&self.way).link.clone()
    }

    /// Who coordinates, as far as this rank knows.
    pub(crate) fn coordinator(&self) -> usize {
        self.mailbox.coordinator()
    }

    /// A rank with its host and process.
    pub(crate) fn describe(&self, rank: usize) -> String {
        match self.members.get().and_then(|members| members.get(rank)) {
            Some(Member { host, pid, .. }) => format!("rank {rank} ({host}, pid {pid})"),
            None => format!("rank {rank}"),
        }
    }

    /// As if this process died.
    #[cfg(test)]
    pub(super) fn cut_for_a_test(&self) {
        match self.link() {
            Link::Here {
                server: Some(server),
                ..
            } => server.cut_for_a_test(),
            Link::Here { .. } => {}
            Link::Elsewhere { connection, server } => {
                server.cut_for_a_test();
                connection.shut();
            }
            Link::Between { server } => server.cut_for_a_test(),
        }
    }

    /// Says that this rank fails, whatever becomes of this value.
    pub(super) fn fail(&self, chain: String) {
        if self.watch.get().is_some() {
            // Its communicators still have to end, and the others wait for that.
            return self.send(u64::MAX, Request::Stay { chain: Some(chain) });
        }
        match self.link() {
            Link::Here { hub, .. } => hub.leave(self.rank, Departure::Failed(chain)),
            Link::Elsewhere { connection, .. } => {
                connection.enqueue(Request::Fail { chain }.encode(0));
                let _ = connection.drain(Instant::now() + FAREWELL);
            }
            Link::Between { .. } => self.send(u64::MAX, Request::Fail { chain }),
        }
    }

    /// The world has gone on to `epoch`: what is left of this one ends, but communicators with the keys `kept`.
    pub(super) fn has_gone_on(&self, epoch: u64, kept: &[&str]) {
        self.gone_on.store(epoch, Ordering::Release);
        if let Some(watch) = self.watch.get() {
            watch.end_all(&format!("the world has gone on to epoch {epoch}"), kept);
        }
    }

    /// The epoch to which the world has gone on.
    pub(crate) fn gone_on(&self) -> Option<u64> {
        let epoch = self.gone_on.load(Ordering::Acquire);
        (epoch > 0).then_some(epoch)
    }

    /// The coordinator's door, where that is this rank's.
    pub(super) fn server(&self) -> Option<Arc<Server>> {
        match self.link() {
            Link::Here { server, .. } => server,
            Link::Elsewhere { .. } | Link::Between { .. } => None,
        }
    }

    /// This rank's own door; none where all ranks are threads.
    pub(super) fn own_door(&self) -> Option<Arc<Server>> {
        match self.link() {
            Link::Here { server, .. } => server,
            Link::Elsewhere { server, .. } | Link::Between { server } => Some(server),
        }
    }

    /// Where a rank listens; `None` for one that is a thread of this process.
    pub(crate) fn address_of(&self, rank: usize) -> Option<&str> {
        self.members.get()?.get(rank)?.at.as_deref()
    }

    /// The world is gone; `alone` if nothing else has the line.
    pub(super) fn world_ends(&self, farewell: Departure, alone: bool) {
        if alone {
            *lock(&self.farewell) = farewell;
            return;
        }
        let chain = match farewell {
            Departure::Failed(chain) => Some(chain),
            Departure::Left | Departure::Lost(_) => None,
        };
        self.send(u64::MAX, Request::Stay { chain });
    }

    /// Sends a request and waits for its answer; with `refused`, only to take it back.
    pub(super) fn ask(
        &self,
        topic: &str,
        request: impl FnOnce(Duration) -> Request,
        deadline: Instant,
        interrupted: Option<&dyn Fn() -> bool>,
        refused: Option<Incomplete>,
    ) -> Result<Answer> {
        let started = Instant::now();
        // The others go on without this rank, and nobody would answer.
        if let Some(Departure::Lost(how)) = self.mailbox.departure(self.rank) {
            let rank = self.rank;
            let text = format!("rank {rank} cannot take part in {topic:?} any more: {how}");
            return Err(Error::rendezvous(text));
        }
        if let Some(epoch) = self.gone_on() {
            return Err(Error::rendezvous(format!(
                "{topic:?} was asked of a world of epoch {}, which has gone on to epoch {epoch}: use the \
                 world that next_epoch has returned",
                self.job.1
            )));
        }
        let request = request(deadline.saturating_duration_since(started));
        let ticket = match &request {
            // Those who go on without a coordinator ask the next one.
            Request::GoOn { .. } => self.mailbox.lasting_ticket(),
            _ => self.mailbox.ticket(),
        };
        self.send(ticket.id, request);
        let give_up = |incomplete: &Incomplete, reason: &str| {
            let reason = reason.to_owned();
            self.send(ticket.id, Request::Cancel { reason });
            Err(self.explain(topic, incomplete))
        };
        if let Some(incomplete) = refused {
            return give_up(&incomplete, "its part is too large");
        }
        let mut patience = deadline;
        loop {
            match ticket.wait(patience, interrupted) {
                Waited::Answer(Answer::Incomplete(incomplete)) => {
                    return Err(self.explain(topic, &incomplete));
                }
                Waited::Answer(answer) => return Ok(answer),
                Waited::Closed(coordinator, why) => {
                    let departure = self.mailbox.departure(coordinator);
                    let departure = departure.unwrap_or(Departure::Lost(why));
                    let who = self.describe(coordinator);
                    let mut text = format!("{who} is gone, and {topic:?} with it: {departure}");
                    // It may have left because of somebody else.
                    if let Some((rank, first)) = self.mailbox.first_failed()
                        && rank != coordinator
                    {
                        let first = format!("; before that, {}: {first}", self.describe(rank));
                        text.push_str(&first);
                    }
                    return Err(Error::rendezvous(text));
                }
                Waited::Interrupted => {
                    return give_up(&Incomplete::Interrupted, "its abort signal was given");
                }
                // The hub keeps the deadline, so that all hear the same.
                Waited::Late => match self.link() {
                    Link::Here { hub, .. } => {
                        hub.tick(Instant::now());
                        patience = Instant::now() + Duration::from_millis(1);
                    }
                    _ if patience == deadline => patience = deadline + PATIENCE,
                    // This is for the case that the coordinator stands still.
                    _ => {
                        let silent = Incomplete::TimedOut {
                            missing: vec![Missing {
                                rank: self.coordinator(),
                                phase: Some((String::from("no answer"), started.elapsed())),
                            }],
                            waited: started.elapsed(),
                            remarks: Vec::new(),
                        };
                        return give_up(&silent, "it got no answer");
                    }
                },
            }
        }
    }

    /// One round of all ranks or of `members`: gives a part, gets the parts of all.
    pub(crate) fn round(
        &self,
        topic: &str,
        members: Option<&Arc<[usize]>>,
        part: &[u8],
        deadline: Instant,
        interrupted: Option<&dyn Fn() -> bool>,
    ) -> Result<Vec<Vec<u8>>> {
        let number = {
            let mut rounds = lock(&self.rounds);
            let key = match members {
                None => topic.to_owned(),
                Some(members) => format!("{topic} of {members:?}"),
            };
            let next = rounds.entry(key).or_insert(0);
            *next += 1;
            *next - 1
        };
        let round = Round {
            topic: topic.to_owned(),
            number,
            members: members.cloned(),
        };
        let too_large = part.len() > LARGEST;
        let request = |patience| Request::Collect {
            round,
            patience,
            // The hub has to hear of the round, so that it can end it for all.
            part: if too_large { Vec::new() } else { part.to_vec() },
        };
        let refused = too_large.then_some(Incomplete::TooLarge { bytes: part.len() });
        match self.ask(topic, request, deadline, interrupted, refused)? {
            Answer::Parts(parts) => {
                Ok(Arc::try_unwrap(parts).unwrap_or_else(|parts| parts.to_vec()))
            }
            _ => Err(self.explain(topic, &Incomplete::OtherMembers)),
        }
    }

    /// Tells all ranks, this one included.
    pub(crate) fn announce(&self, topic: &str, bytes: &[u8]) {
        self.mailbox.say(Notice::Announced {
            from: self.rank,
            topic: topic.to_owned(),
            bytes: bytes.into(),
        });
        let (topic, bytes) = (topic.to_owned(), bytes.to_vec());
        self.send(u64::MAX, Request::Announce { topic, bytes });
    }

    /// Tells rank `to` alone. It is lost when the coordinator dies.
    pub(crate) fn tell(&self, to: usize, topic: &str, bytes: Vec<u8>) {
        let topic = topic.to_owned();
        self.send(u64::MAX, Request::Tell { to, topic, bytes });
    }

    /// What the program of this rank does, as it says, and for how long.
    pub(crate) fn phase(&self) -> Option<(String, Duration)> {
        let phase = lock(&self.phase);
        phase
            .as_ref()
            .map(|(name, since)| (name.clone(), since.elapsed()))
    }

    pub(super) fn set_phase(&self, name: &str) {
        *lock(&self.phase) = Some((name.to_owned(), Instant::now()));
    }

    /// Whether nothing comes any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.mailbox.is_closed()
    }

    /// Calls `handler` with everything that is announced, and with every rank that leaves, fails or
    /// dies, in the order in which the coordinator saw it; on the thread that received it, so it must
    /// not wait.
    pub(crate) fn on_notice(&self, handler: impl Fn(&Notice) + Send + Sync + 'static) {
        self.mailbox.on_notice(Box::new(handler));
    }

    /// Tells `members` that this rank is done with `name`, and waits until all of them are that are
    /// still there: at most for `patience` after the first of them came here, or until it is
    /// `interrupted`.
    ///
    /// A rank whose world is gone comes here all the same, as long as it has communicators.
    pub(crate) fn end(
        &self,
        name: &str,
        members: &Arc<[usize]>,
        part: &[u8],
        patience: Duration,
        interrupted: Option<&dyn Fn() -> bool>,
    ) -> Ended {
        let ticket = self.mailbox.lasting_ticket();
        self.send(ticket.id, Self::end_request(name, members, part, patience));
        let mut deadline = deadline_after(patience);
        // The coordinator keeps the time; if it stands still, it is the one that is missing.
        let last = later(deadline, Duration::from_secs(1));
        loop {
            match ticket.wait(deadline, interrupted) {
                Waited::Answer(Answer::Parts(parts)) => {
                    return Ended::All(Arc::unwrap_or_clone(parts));
                }
                Waited::Answer(Answer::Incomplete(incomplete)) => {
                    return match &*incomplete {
                        Incomplete::TimedOut { missing, .. } => {
                            Ended::Missing(missing.iter().map(|missing| missing.rank).collect())
                        }
                        _ => Ended::Unheard,
                    };
                }
                Waited::Answer(_) | Waited::Closed(..) | Waited::Interrupted => {
                    return Ended::Unheard;
                }
                Waited::Late => match self.link() {
                    Link::Here { hub, .. } => {
                        hub.tick(Instant::now());
                        deadline = Instant::now() + Duration::from_millis(1);
                    }
                    _ if deadline < last => deadline = last,
                    _ => return Ended::Missing(vec![self.coordinator()]),
                },
            }
        }
    }

    /// As [`end`](Self::end), without waiting for the others.
    pub(crate) fn end_alone(
        &self,
        name: &str,
        members: &Arc<[usize]>,
        part: &[u8],
        patience: Duration,
    ) {
        self.send(u64::MAX, Self::end_request(name, members, part, patience));
    }

    /// This rank waits in an operation, and somebody may not have entered it: all hear who.
    pub(crate) fn suspect(&self, suspicion: Suspicion) {
        self.send(u64::MAX, Request::Suspect(suspicion));
    }

    /// Whether this rank has entered an operation, for those who wait in it.
    pub(crate) fn attends(&self, attendance: Attendance) {
        self.send(u64::MAX, Request::Attends(attendance));
    }

    /// Waits until the handlers have heard what came before now.
    pub(crate) fn catch_up(&self) {
        let deadline = Instant::now() + Duration::from_millis(500);
        while !self.mailbox.run_handlers() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// The job's name and epoch.
    pub(crate) fn job(&self) -> (&str, u64) {
        (&self.job.0, self.job.1)
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks there are.
    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// Under which its communicators record what they do.
    pub(crate) fn home(&self) -> &Arc<Home> {
        &self.home
    }

    /// Who the ranks are; known when all have met.
    pub(crate) fn members(&self) -> Arc<OnceLock<Vec<Member>>> {
        Arc::clone(&self.members)
    }

    /// Those that can be reached no more, and why.
    pub(crate) fn departures(&self) -> Vec<(usize, Departure)> {
        self.mailbox.departures()
    }

    /// The ranks whose processes are silent although their kernels answer, as far as this one has heard: what to
    /// look at when something runs out of time, and no cause by itself.
    pub(crate) fn suspects(&self) -> Vec<Suspect> {
        let mut suspects = self.mailbox.suspects();
        suspects.retain(|suspect| suspect.rank != self.rank);
        suspects
    }

    /// For how long other processes have not been heard: all on the coordinator, which all others answer once in
    /// a second; elsewhere the coordinator.
    pub(crate) fn heartbeat_ages(&self) -> Vec<(usize, Duration)> {
        match self.link() {
            Link::Here { hub, .. } => hub.heartbeat_ages(),
            Link::Elsewhere { .. } | Link::Between { .. } => {
                let age = self.mailbox.coordinator_age();
                let age = age.map(|age| (self.coordinator(), age));
                age.into_iter().collect()
            }
        }
    }

    /// The verdict on one of its communicators that was written last.
    pub(crate) fn fault(&self) -> Option<Arc<Fault>> {
        self.watch.get()?.latest()
    }

    /// What looks after the communicators of this line.
    pub(crate) fn watch(self: &Arc<Self>) -> Arc<Watch> {
        Arc::clone(self.watch.get_or_init(|| {
            let mut open = lock(&OPEN);
            open.retain(|line| line.strong_count() > 0);
            open.push(Arc::downgrade(self));
            *lock(&UNSAID) += 1;
            self.watched.store(true, Ordering::Release);
            reaper::register_exit();
            Watch::start(self)
        }))
    }

    fn end_request(name: &str, members: &Arc<[usize]>, part: &[u8], patience: Duration) -> Request {
        let round = Round {
            topic: format!("{ENDS}{name}"),
            number: 0,
            members: Some(Arc::clone(members)),
        };
        let part = part.to_vec();
        Request::Collect {
            round,
            patience,
            part,
        }
    }

    /// Sends a request whose answer, if any, comes under `id`.
    pub(super) fn send(&self, id: u64, request: Request) {
        let link = {
            let mut way = lock(&self.way);
            // Whoever was told meanwhile that there is no answer does not ask any more.
            if matches!(way.link, Link::Between { .. })
                && id != u64::MAX
                && !self.mailbox.is_waited_for(id)
            {
                return;
            }
            way.keep(id, &request, &self.mailbox);
            if let Link::Elsewhere { connection, .. } = &way.link {
                connection.enqueue(request.encode(id));
            }
            way.link.clone()
        };
        match link {
            Link::Here { hub, server } => {
                hub.handle(self.rank, id, request);
                hub.flush();
                if let Some(server) = server {
                    server.schedule();
                }
            }
            Link::Elsewhere { connection, .. } => connection.flush_quietly(),
            Link::Between { .. } => {}
        }
    }
}

/// The lines that communicators have.
static OPEN: Mutex<Vec<Weak<Line>>> = Mutex::new(Vec::new());

/// How many of them have not said goodbye yet, and who waits for that.
static UNSAID: Mutex<usize> = Mutex::new(0);
static SAID: Condvar = Condvar::new();

/// The process exits with this status, and with communicators that were not dropped. When it is not 0,
/// the other ranks are not to wait for it.
pub(crate) fn say_goodbye(status: i32) {
    let open: Vec<_> = lock(&OPEN).iter().filter_map(Weak::upgrade).collect();
    for line in &open {
        if matches!(line.link(), Link::Here { server: None, .. }) {
            // The other ranks are threads that end as well.
            line.has_left();
            continue;
        }
        if status != 0 {
            let chain = format!("its process ended with exit status {status}");
            *lock(&line.farewell) = Departure::Failed(chain);
        }
        line.leave();
    }
    // Their own goodbye would be the second.
    open.into_iter().for_each(std::mem::forget);
    // Another thread has dropped one just now, and is about to say it.
    let unsaid = lock(&UNSAID);
    let _ = SAID.wait_timeout_while(unsaid, FAREWELL, |unsaid| *unsaid > 0);
}

impl Drop for Line {
    fn drop(&mut self) {
        self.leave();
        // Who looks for another coordinator just now may have a hand on it.
        if let Some(server) = self.own_door() {
            server.finish();
        }
        self.mailbox.forget_loss();
    }
}

impl Line {
    /// Says goodbye, for good.
    fn leave(&self) {
        let farewell = std::mem::replace(&mut *lock(&self.farewell), Departure::Left);
        let link = self.last_link();
        match &link {
            Link::Here { hub, .. } => hub.leave(self.rank, farewell),
            Link::Between { .. } => {}
            Link::Elsewhere { connection, .. } => {
                let last = match farewell {
                    Departure::Failed(chain) => Request::Fail { chain },
                    _ => Request::Goodbye,
                };
                connection.enqueue(last.encode(0));
                // A rank 0 that is gone misses nothing.
                let _ = connection.drain(Instant::now() + FAREWELL);
                connection.forget();
                connection.shut();
            }
        }
        self.has_left();
    }

    /// The way over which to say goodbye: while there is no coordinator, the next one is waited for, unless
    /// the last has left in order, and most leave with it.
    fn last_link(&self) -> Link {
        let deadline = Instant::now() + FAREWELL;
        loop {
            let mut way = lock(&self.way);
            let has_left = self.mailbox.departure(self.coordinator()) == Some(Departure::Left);
            if !matches!(way.link, Link::Between { .. })
                || has_left
                || self.mailbox.is_closed()
                || Instant::now() >= deadline
            {
                way.left = true;
                return way.link.clone();
            }
            drop(way);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Whoever ends the process need not wait for it any more.
    fn has_left(&self) {
        if self.watch.get().is_some() {
            *lock(&UNSAID) -= 1;
            SAID.notify_all();
        }
    }
}

impl fmt::Debug for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Line")
            .field("rank", &self.rank)
            .field("size", &self.size)
            .finish_non_exhaustive()
    }
}
