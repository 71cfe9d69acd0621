//! A rank's part of going on: the next epoch of a world, and how a new process comes into it.
//!
//! ```text
//! world ──agree (over the line that there is)──▶ epoch n + 1 ──meet (a new line)──▶ world of epoch n + 1
//!   ▲                                                │
//!   └────────a rank died on its way there────────────┘
//! ```

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::client::Claim;
use super::environment::Rendezvous;
use super::going::Epoch;
use super::incoming::{Answer, Push};
use super::launcher;
use super::line::{Line, Link};
use super::message::Incomplete;
use super::node::{self, Vain};
use super::place::Address;
use super::reader::{Reader, Sink};
use super::request::Request;
use super::search::Search;
use super::server::Server;
use super::succession::Loss;
use super::world::{Open, Origin, World};
use crate::departure::{Departure, How, Unfinished};
use crate::error::{Error, ErrorKind, Result};
use crate::forked;
use crate::sync::{Condvar, Mutex};
use crate::time::{deadline_after, later};
use nccl_base::from_outside::{FromOutside, world as world_limit};

/// How long the coordinator may take to say what those do that did not come.
const ANSWER: Duration = Duration::from_secs(1);

/// The topic, in errors.
const TOPIC: &str = "the next epoch";

impl World {
    /// Which epoch of its job this world is: 0 unless the [`Rendezvous`] or the launcher says otherwise,
    /// and one more (at least) each time it goes on.
    pub fn epoch(&self) -> u64 {
        self.line.job().1
    }

    /// Which rank `rank` was in the epoch before; `None` for one that is new, and in the first epoch.
    pub fn previous_rank(&self, rank: usize) -> Option<usize> {
        *self.from.get(rank)?
    }

    /// How many processes wait to be taken into the next epoch ([`rejoin`](Self::rejoin)).
    pub fn newcomers(&self) -> usize {
        self.line.mailbox.newcomers()
    }

    /// The ranks that are gone, and how each ended.
    pub fn departed(&self) -> Vec<(usize, String)> {
        if forked::is_child() {
            return Vec::new();
        }
        let mut departed = self.line.departures();
        departed.sort_by_key(|(rank, _)| *rank);
        let text = |(rank, departure): (usize, Departure)| (rank, departure.to_string());
        departed.into_iter().map(text).collect()
    }

    /// Comes as a new rank into a world that runs: in the place of a process that died, or in addition.
    pub fn rejoin(rendezvous: Rendezvous) -> Result<Self> {
        rendezvous.job.check()?;
        FromOutside::of_process()?;
        let begun = Instant::now();
        let deadline = deadline_after(world_limit(rendezvous.timeout));
        if node::is_chosen() {
            return Self::rejoin_by_node(&rendezvous, deadline);
        }
        loop {
            let waited = wait_for_invitation(&rendezvous, begun, deadline)?;
            let Admitted {
                place: waiting,
                found,
                invitation: (epoch, rank),
            } = waited;
            let mut next = rendezvous.clone();
            next.rank = rank;
            next.world_size = epoch.from.len();
            next.job.epoch = epoch.number;
            let name = beside(epoch.number, rank);
            // Who invited it is rank 0 there.
            let in_vain = || waiting.lost();
            let entered = Self::enter(next, found, None, &name, deadline, Some(&in_vain));
            waiting.leave();
            match entered {
                Ok(mut world) => {
                    world.from = epoch.from.clone();
                    return Ok(world);
                }
                // Another rank died on its way there, and they agree again.
                Err((error, _)) if Instant::now() < deadline => {
                    tracing::info!(name: "nccl.rendezvous.retry", target: "nccl", %error, "asking once more to come in");
                    std::thread::sleep(PAUSE);
                }
                Err((error, _)) => return Err(error),
            }
        }
    }

    /// Goes on with the ranks that are left, and those that have asked to come in: the world of the next epoch. `leaves_behind`: without
    /// those that do not come in time, if all want it so. Communicators with the keys `kept` do not end with this one.
    pub fn go_on(&self, limit: Duration, leaves_behind: bool, kept: &[&str]) -> Result<Self> {
        forked::check()?;
        let begun = Instant::now();
        let limit = world_limit(limit);
        // Which epoch that makes is only known in the end.
        let span = tracing::info_span!(target: "nccl", "nccl.recover", epoch = self.epoch());
        let _entered = span.enter();
        if let Link::Node { node, generation } = self.line.link() {
            self.line.takes_part(TOPIC)?;
            let entered = node
                .go_on(generation, limit, leaves_behind)
                .map_err(|vain| self.in_vain(vain))?;
            let mut next = Self::entered(&entered, self.local_rank, self.timeout());
            next.interface = self.interface.clone();
            next.from = node.ranks_before(generation, &entered.membership);
            self.went_on(&next, kept, begun);
            return Ok(next);
        }
        if let Link::Threads(threads) = self.line.link() {
            self.line.takes_part(TOPIC)?;
            let next = threads
                .go_on(self.rank(), limit, leaves_behind)
                .map_err(|why| self.explain(TOPIC, &why))?;
            let place = next.from.iter().position(|&before| before == self.rank());
            let rank = place.expect("who agrees to go on has a rank");
            let mut world = Self::local(&next.threads, rank, self.local_rank, self.timeout());
            world.from = next.from.iter().copied().map(Some).collect();
            self.went_on(&world, kept, begun);
            return Ok(world);
        }
        // What came to nothing, and has to say so to those who come late.
        let mut failed = Vec::new();
        for attempt in 0.. {
            let deadline = match leaves_behind {
                true => deadline_after(limit),
                false => later(begun, limit),
            };
            let outcome = self
                .agree(deadline, leaves_behind)
                .and_then(|epoch| self.meet_in(&epoch, deadline_after(limit), &mut failed));
            match outcome {
                Ok(next) => {
                    self.went_on(&next, kept, begun);
                    return Ok(next);
                }
                // Somebody died on the way: what is left agrees again.
                Err((error, Step::Meeting))
                    if attempt < self.size() && (leaves_behind || begun.elapsed() < limit) =>
                {
                    tracing::warn!(name: "nccl.rendezvous.retry", target: "nccl", %error, "an epoch came to nothing; once more");
                }
                Err((error, _)) => {
                    self.reopen(&failed);
                    return Err(error);
                }
            }
        }
        unreachable!("the last attempt returns")
    }

    /// The operator's word: `ranks` may go on although fewer than a majority are left of this epoch's.
    pub fn decide_split(&self, ranks: &[usize]) -> Result<()> {
        forked::check()?;
        self.line.takes_part(TOPIC)?;
        if let Some(&rank) = ranks.iter().find(|rank| **rank >= self.size()) {
            return Err(Error::new(ErrorKind::NoSuchRank {
                role: "rank",
                rank,
                world_size: self.size(),
            }));
        }
        if !ranks.contains(&self.rank()) {
            return Err(Error::rendezvous(format!(
                "rank {} cannot say that ranks {} go on, of which it is none",
                self.rank(),
                crate::explain::ranges(ranks)
            )));
        }
        match self.line.link() {
            Link::Node { node, generation } => node.decide(generation, ranks),
            Link::Threads(_) => {}
            _ => {
                return Err(Error::rendezvous(
                    "an operator decides nothing in this control plane",
                ));
            }
        }
        Ok(())
    }

    /// The error of a wish to go on that came to nothing.
    fn in_vain(&self, vain: Vain) -> Error {
        let now = Instant::now();
        match vain {
            Vain::Missing { ranks, waited } => {
                let late = Incomplete::TimedOut {
                    missing: Vec::new(),
                    waited,
                    remarks: Vec::new(),
                };
                // The coordinator knows what they do.
                let request = |_| Request::Missing { ranks, waited };
                let asked = self.ask(TOPIC, request, now + ANSWER, None, None);
                asked.map_or_else(|error| error, |_| self.explain(TOPIC, &late))
            }
            Vain::Excluded => match (self.line.takes_part(TOPIC), self.line.mailbox.parted()) {
                (Err(error), _) => error,
                (Ok(()), Some((from, why))) => {
                    let rank = self.rank();
                    let text = format!("rank {rank} cannot take part in {TOPIC:?} any more: {why}");
                    Error::rendezvous(text).of_exchange(Some(Unfinished::CutOff { from, why }))
                }
                (Ok(()), None) => {
                    let lost = (self.line.coordinator(), How::PassedOver.into());
                    self.line.lost_with_coordinator(TOPIC, lost, now, None)
                }
            },
        }
    }

    fn went_on(&self, next: &Self, kept: &[&str], begun: Instant) {
        tracing::info!(
            name: "nccl.rendezvous.next_epoch",
            target: "nccl",
            epoch = next.epoch(),
            rank = next.rank(),
            nranks = next.size(),
            elapsed_ms = crate::time::millis(begun.elapsed()),
            "the world goes on"
        );
        next.line.attached().goes_on_from(self.line.attached());
        next.line.goes_on_from(&self.line);
        self.line.has_gone_on(next.epoch(), kept);
    }

    /// The first step alone.
    #[cfg(test)]
    pub(super) fn agree_for_a_test(&self, limit: Duration) -> Result<u64> {
        let agreed = self.agree(deadline_after(limit), false);
        agreed.map(|epoch| epoch.number).map_err(|(error, _)| error)
    }

    /// The first step: which epoch it is.
    fn agree(&self, deadline: Instant, leaves_behind: bool) -> Result<Arc<Epoch>, (Error, Step)> {
        let request = |patience| Request::GoOn {
            patience,
            leaves_behind,
        };
        let agreeing = |error| (error, Step::Agreeing);
        match self
            .ask(TOPIC, request, deadline, None, None)
            .map_err(agreeing)?
        {
            Answer::Epoch(epoch) => Ok(epoch),
            _ => Err(agreeing(self.explain(TOPIC, &Incomplete::OtherMembers))),
        }
    }

    /// The second: its ranks meet.
    fn meet_in(
        &self,
        epoch: &Epoch,
        deadline: Instant,
        failed: &mut Vec<Arc<Line>>,
    ) -> Result<Self, (Error, Step)> {
        let meeting = |error| (error, Step::Meeting);
        let Some(rank) = epoch.rank_of(self.rank()) else {
            let text = format!("rank {} is not in epoch {}", self.rank(), epoch.number);
            return Err((Error::rendezvous(text), Step::Agreeing));
        };
        let mut world = match (&self.origin, self.line.link()) {
            (None, _) => unreachable!("who meets elsewhere knows where"),
            (
                Some(Origin {
                    places,
                    address,
                    job,
                }),
                link,
            ) => {
                let found = self
                    .address_of_coordinator(address, epoch)
                    .map_err(meeting)?;
                let mut rendezvous = Rendezvous::observing(places[0].clone());
                rendezvous.others = places[1..].to_vec();
                rendezvous.rank = rank;
                rendezvous.world_size = epoch.from.len();
                rendezvous.local_rank = self.local_rank;
                rendezvous.timeout = self.timeout();
                rendezvous.job = job.clone();
                rendezvous.job.epoch = epoch.number;
                let coordinating = match link {
                    Link::Here { hub, server } => {
                        let hub = hub.next().ok_or_else(|| meeting(given_up(epoch)))?;
                        let doors = failed.iter().rev().filter_map(|line| line.server());
                        let doors = doors.chain([Arc::clone(&server)]);
                        let listeners = doors
                            .map(|door| door.hand_over())
                            .find(|listeners| !listeners.is_empty());
                        // What came to nothing has been heard of by all who go on.
                        failed.clear();
                        let listeners = listeners.ok_or_else(|| {
                            meeting(Error::rendezvous("rank 0 does not listen any more"))
                        })?;
                        let (job, places) = (rendezvous.job.clone(), places.clone());
                        let open: Open =
                            Box::new(move |hub| Server::of_next(listeners, hub, job, places));
                        Some((hub, open))
                    }
                    Link::Elsewhere { .. } => None,
                    Link::Node { .. } | Link::Threads(_) | Link::Between { .. } => {
                        return Err(meeting(Error::rendezvous("the coordinator is gone")));
                    }
                };
                let beside = beside(epoch.number, rank);
                // Rank 0 of the next epoch is the one that coordinates this one.
                let in_vain = || {
                    let follows = matches!(self.line.link(), Link::Elsewhere { .. });
                    let is_there = follows && is_made_by(epoch, self.line.coordinator());
                    (!is_there).then(|| String::from("the rank that coordinated is gone"))
                };
                let entered = World::enter(
                    rendezvous,
                    found,
                    coordinating,
                    &beside,
                    deadline,
                    Some(&in_vain),
                );
                entered.map_err(|(error, line)| {
                    failed.extend(line.filter(|line| line.server().is_some()));
                    meeting(error)
                })?
            }
        };
        world.interface = self.interface.clone();
        world.from = epoch.from.clone();
        Ok(world)
    }

    /// Where the ranks of the next epoch meet: where those of this one did, or at the door of the one that has taken
    /// over.
    fn address_of_coordinator(&self, first: &Address, epoch: &Epoch) -> Result<Address> {
        let coordinator = self.line.coordinator();
        if !is_made_by(epoch, coordinator) {
            // One that said nothing was passed over, and has come; or who made the epoch is gone.
            return Err(Error::rendezvous(format!(
                "rank {coordinator} coordinates by now, and has not made epoch {}",
                epoch.number
            )));
        }
        if coordinator == 0 {
            return Ok(first.clone());
        }
        let at = self.line.address_of(coordinator).and_then(launcher::place);
        at.ok_or_else(|| Error::rendezvous(format!("rank {coordinator} has no address")))
    }

    /// Whoever comes is let in here again.
    fn reopen(&self, failed: &[Arc<Line>]) {
        let Link::Here { hub, server } = self.line.link() else {
            return;
        };
        hub.give_up_next();
        for line in failed {
            if let Some(listeners) = line.server().map(|server| server.hand_over())
                && !listeners.is_empty()
                && let Err(error) = server.take_back(listeners)
            {
                tracing::error!(name: "nccl.rendezvous.trouble", target: "nccl", what = "door", why = %error, "nobody can come to this world any more");
            }
        }
    }
}

/// Where an attempt to go on ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Agreeing,
    Meeting,
}

/// Before a newcomer asks again.
const PAUSE: Duration = Duration::from_millis(10);

/// Whether the rank `coordinator` is the one that made the epoch: it is rank 0 there.
fn is_made_by(epoch: &Epoch, coordinator: usize) -> bool {
    epoch.from.first() == Some(&Some(coordinator))
}

fn given_up(epoch: &Epoch) -> Error {
    Error::rendezvous(format!("epoch {} was given up by rank 0", epoch.number))
}

/// What a rank's own door is called: those of the epoch before may still be open.
fn beside(epoch: u64, rank: usize) -> String {
    format!("{epoch}-{rank}")
}

type Invitation = (Arc<Epoch>, usize);

/// Where a newcomer was let in, and what it was told there.
struct Admitted {
    place: AtTheDoor,
    found: Address,
    invitation: Invitation,
}

/// What a newcomer's connection has brought.
#[derive(Default)]
struct Waiting {
    heard: Mutex<Option<Result<Invitation, String>>>,
    bell: Condvar,
}

/// A newcomer's place at the door.
struct AtTheDoor {
    reader: Arc<Reader>,
    waiting: Arc<Waiting>,
}

impl AtTheDoor {
    /// Why whoever was waited for is not there any more.
    fn lost(&self) -> Option<String> {
        match &*self.waiting.heard.lock() {
            Some(Err(why)) => Some(why.clone()),
            _ => None,
        }
    }

    fn leave(self) {
        let connection = &self.reader.connection;
        connection.enqueue(Request::Goodbye.encode(0));
        let _ = connection.drain(Instant::now() + Duration::from_secs(1));
        connection.forget();
        connection.shut();
    }
}

impl Sink for Waiting {
    fn answer(&self, _: u64, _: Answer) {}

    fn push(&self, push: Push) {
        if let Push::Invited { epoch, rank } = push {
            self.heard.lock().get_or_insert(Ok((epoch, rank)));
            self.bell.notify_all();
        }
    }

    fn waits_for_word(&self) -> bool {
        false
    }

    fn close(&self, loss: Loss) {
        self.heard.lock().get_or_insert(Err(loss.to_string()));
        self.bell.notify_all();
    }
}

/// Asks to come in, and waits until the others go on.
fn wait_for_invitation(
    rendezvous: &Rendezvous,
    begun: Instant,
    deadline: Instant,
) -> Result<Admitted> {
    let mut search = Search::new(rendezvous, Claim::newcomer());
    loop {
        let waiting = Arc::new(Waiting::default());
        let sink = Arc::clone(&waiting) as Arc<dyn Sink>;
        let (met, found) = search.run(deadline)?;
        let reader = Reader::start(met.connection, met.decoder, sink)
            .map_err(Error::io(format!("asking to come in at {found}")))?;
        let place = AtTheDoor {
            reader,
            waiting: Arc::clone(&waiting),
        };
        let mut heard = waiting.heard.lock();
        loop {
            match heard.take() {
                Some(Ok(invitation)) => {
                    drop(heard);
                    return Ok(Admitted {
                        place,
                        found,
                        invitation,
                    });
                }
                // The door was that of an epoch that ends.
                Some(Err(_)) if Instant::now() < deadline => break,
                Some(Err(why)) => {
                    return Err(Error::rendezvous(format!(
                        "the world at {found} took nobody in: {why}"
                    )));
                }
                None => {}
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                drop(heard);
                place.leave();
                return Err(Error::rendezvous(format!(
                    "the world at {found} did not go on to a next epoch within {:.1} s, so that this \
                     process could not come in: its ranks have to call World::next_epoch",
                    begun.elapsed().as_secs_f64()
                )));
            }
            waiting.bell.wait_for(&mut heard, left);
        }
        drop(heard);
        std::thread::sleep(PAUSE);
    }
}
