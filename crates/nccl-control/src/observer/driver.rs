//! The driver of an observer's machine, and the observer's thread.

use std::collections::HashSet;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use nccl_base::wire;

use super::state::{Shared, Word};
use crate::client::{Claim, Met};
use crate::clock::Clock;
use crate::departure::{Departure, How, Lost, ProcessEnd};
use crate::envelope::{Asking, Saying, replied};
use crate::incoming::{Incoming, Known, Push};
use crate::job::Job;
use crate::message::Incomplete;
use crate::node::Node;
use crate::process;
use crate::proto::{
    self, Command, Entry, Event, Input, MemberId, Mistakes, Observer, OperatorWord, Output, Peer,
    Proof, SharedMembership, Timing,
};
use crate::reactor::{EventFlags, Reactor, Source};
use crate::request::Request;
use crate::search::{Looked, Search};
use crate::sync::Mutex;
use crate::time::deadline_after;
use crate::transport::{Dialer, Driver, Ports};

/// How long the last reports of a leaving observer may take to arrive.
const FAREWELL: Duration = Duration::from_secs(1);

/// How often the thread checks by itself; events wake it.
const LOOK: Duration = Duration::from_secs(1);

/// Why there is nothing more to see, when no rank is known to have died.
const LEFT: &str = "the ranks have left the world";

struct Watching {
    this: Weak<Self>,
    job: Job,
    dialer: Dialer,
    shared: Arc<Shared>,
    state: Mutex<State>,
}

struct State {
    observer: Observer,
    clock: Clock,
    ports: Ports,
    alarm: Option<Instant>,
    membership: Option<SharedMembership>,
    /// Before there is a membership: the number of the first generation, which is being formed.
    forming: Option<u64>,
    /// Whether the coordinator answers, or the process that forms the first generation.
    hears: bool,
    /// The ranks that have coordinated in this generation, as far as seen.
    coordinators: Vec<usize>,
    /// Why there is nothing more to see.
    over: Option<String>,
    /// Changes for the board.
    seen: Vec<Seen>,
}

enum Seen {
    Forming(u64),
    Size(usize),
    /// Whether it is the generation that was being formed.
    Generation(SharedMembership, bool),
    Coordinator(usize),
    Gone(usize, Departure),
    Known(Known),
    Late(Arc<crate::inquiry::Lateness>),
    Decided(Vec<usize>),
}

impl Watching {
    fn new(shared: &Arc<Shared>, met: Met, found: &str) -> Arc<Self> {
        let me = Peer {
            id: MemberId {
                slot: u32::MAX / 2,
                incarnation: RandomState::new().build_hasher().finish().max(1),
            },
            host: crate::host::name().to_string(),
            pid: std::process::id(),
            started: process::started(),
            kernel: process::kernel_sum(),
            at: String::new(),
            launched: None,
            observed: false,
        };
        let at = vec![found.to_owned()];
        let observer = Observer::new(
            me,
            at,
            Timing::default(),
            Mistakes::default(),
            Clock::ORIGIN,
        );
        Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            job: shared.rendezvous.job.clone(),
            dialer: Dialer::default(),
            shared: Arc::clone(shared),
            state: Mutex::new(State {
                observer,
                clock: Clock::start(),
                ports: Ports::starting_with(Some(met)),
                alarm: None,
                membership: None,
                forming: None,
                hears: false,
                coordinators: Vec::new(),
                over: None,
                seen: Vec::new(),
            }),
        })
    }

    fn driver(&self) -> Weak<dyn Driver> {
        Weak::clone(&self.this) as Weak<dyn Driver>
    }

    fn input(&self, input: Input) {
        let mut state = self.state.lock();
        state.handle(input);
        self.pump(&mut state);
        drop(state);
        self.settle();
    }

    fn pump(&self, state: &mut State) {
        while let Some(output) = state.observer.poll() {
            match output {
                Output::Wire(wire) => {
                    if let Some(input) = state.ports.wire(&self.driver(), wire) {
                        state.handle(input);
                    }
                }
                Output::Event(event) => state.event(event),
            }
        }
    }

    /// Sends a request to the coordinator's program, for the generation that is watched or formed.
    fn ask(&self, request: Request) {
        let mut state = self.state.lock();
        let active = state.membership.as_ref();
        let active = active.map(|membership| membership.generation.number);
        if let Some(generation) = active.or(state.forming) {
            let asking = Asking {
                generation,
                id: u64::MAX,
                request,
            };
            state.handle(Input::Command(Command::Ask(asking.encode())));
            self.pump(&mut state);
        }
        drop(state);
        self.settle();
    }

    /// Applies what was seen to the board, and sends the reports that are due.
    fn report(&self, told: &mut HashSet<usize>) {
        let (seen, membership, hears, is_flushed) = {
            let mut state = self.state.lock();
            let seen = std::mem::take(&mut state.seen);
            let is_flushed = state.observer.is_flushed();
            (seen, state.membership.clone(), state.hears, is_flushed)
        };
        let (mut watches, mut tell_again) = (false, false);
        let mut ends = Vec::new();
        let mut asks = Vec::new();
        let mut decision = None;
        {
            let mut state = self.shared.state();
            let is_news = !seen.is_empty();
            for seen in seen {
                match seen {
                    Seen::Forming(generation) => {
                        state.set_generation(generation);
                        (state.was_there, state.coordinator) = (true, 0);
                        state.board.connected = true;
                        watches = true;
                        tell_again = true;
                    }
                    Seen::Size(size) => state.board.set_size(size),
                    Seen::Generation(membership, was_formed) => {
                        tell_again |= was_formed;
                        state.set_generation(membership.generation.number);
                        state.board.set_size(membership.members.len());
                        for (rank, peer) in membership.members.iter().enumerate() {
                            state.board.learn(Known::of(rank, peer));
                        }
                        state.was_there = true;
                    }
                    Seen::Coordinator(rank) => {
                        state.coordinator = rank;
                        state.board.connected = true;
                        watches = true;
                    }
                    Seen::Gone(rank, departure) => state.board.gone(rank, departure),
                    Seen::Known(known) => state.board.learn(known),
                    Seen::Late(lateness) => state.board.late(&lateness),
                    Seen::Decided(ranks) => state.board.decided(ranks),
                }
            }
            // Reports to the program of the process that forms the generation may have been lost.
            if tell_again {
                told.clear();
                state.words.iter_mut().for_each(|word| word.told = false);
            }
            for index in 0..state.words.len() {
                let Word { rank, pid, end, .. } = state.words[index].clone();
                if state.words[index].told || !hears {
                    continue;
                }
                if told.contains(&index) {
                    state.words[index].told = is_flushed;
                    continue;
                }
                let Some(rank) = state.rank_now(rank, pid) else {
                    continue;
                };
                match &membership {
                    Some(membership) => {
                        let Some(peer) = membership.members.get(rank) else {
                            continue;
                        };
                        if u64::from(peer.pid) == pid {
                            ends.push((peer.id, end));
                        } else {
                            asks.push(Request::Ended { rank, pid, end });
                        }
                    }
                    None => asks.push(Request::Ended { rank, pid, end }),
                }
                told.insert(index);
            }
            if is_news {
                self.shared.notify();
            }
            if membership.is_some() {
                decision = state.decision.take();
            }
        }
        if let (Some(ranks), Some(membership)) = (decision, &membership) {
            let peers = ranks
                .iter()
                .filter_map(|rank| membership.members.get(*rank));
            let word = OperatorWord {
                generation: membership.generation.number,
                members: peers.map(|peer| peer.id).collect(),
            };
            self.input(Input::Command(Command::Operator(word)));
        }
        for (member, end) in ends {
            self.input(Input::Ended(member, Proof::Parent(Box::new(end))));
        }
        asks.into_iter().for_each(|request| self.ask(request));
        if watches {
            self.watch();
        }
    }

    /// Describes how the world ended when no rank is left to report it: the ends that only this process knows, and the coordinators.
    fn story(&self) -> String {
        let (membership, coordinators) = {
            let state = self.state.lock();
            (state.membership.clone(), state.coordinators.clone())
        };
        let Some(membership) = membership else {
            return String::from(LEFT);
        };
        let mut shared = self.shared.state();
        let ranks = membership.members.iter().enumerate();
        let (last, others): (Vec<_>, Vec<_>) =
            ranks.partition(|(rank, _)| coordinators.contains(rank));
        for (rank, peer) in others.into_iter().chain(last) {
            let pid = u64::from(peer.pid);
            let mut words = shared.words.iter();
            let word = words
                .find(|word| word.pid == pid && shared.rank_now(word.rank, word.pid) == Some(rank));
            let is_here = peer.kernel != 0 && peer.kernel == process::kernel_sum();
            let how = match word {
                Some(word) => Some(Lost::from(word.end.clone())),
                None => (is_here && process::find(peer.pid, peer.started).has_ended())
                    .then(|| How::Exited { pid }.into()),
            };
            if let Some(how) = how {
                shared.board.gone(rank, Departure::Lost(how));
            }
        }
        self.shared.notify();
        let ends = coordinators.iter().filter_map(|rank| {
            let departure = shared.board.departure(*rank)?;
            (*departure != Departure::Left).then(|| format!("rank {rank} is gone: {departure}"))
        });
        let ends: Vec<_> = ends.collect();
        match ends.is_empty() {
            true => String::from(LEFT),
            false => ends.join("; then "),
        }
    }

    /// Reports which processes this one has started, and asks for the state of all ranks.
    fn watch(&self) {
        let ranks = {
            let state = self.shared.state();
            let started = state.started.iter();
            started
                .filter_map(|&(rank, pid)| Some((state.rank_now(rank, pid)?, pid)))
                .collect()
        };
        self.ask(Request::Watches { ranks });
    }

    fn close(&self) {
        let mut state = self.state.lock();
        state.ports.close_all();
        drop(state);
        self.settle();
    }
}

impl Driver for Watching {
    fn came(&self, number: proto::Connection, frames: Vec<proto::Frame>, lost: Option<Lost>) {
        let mut state = self.state.lock();
        for input in state.ports.inputs(number, frames, lost.is_some()) {
            state.handle(input);
        }
        self.pump(&mut state);
    }

    fn settle(&self) {
        loop {
            let mut state = self.state.lock();
            let work = std::mem::take(&mut state.ports.work);
            if work.is_empty() {
                let next = state.clock.instant(state.observer.next_timeout());
                let next = next.filter(|next| state.alarm.is_none_or(|alarm| alarm > *next));
                if let (Some(next), Ok(reactor)) = (next, Reactor::get()) {
                    state.alarm = Some(next);
                    reactor.wake_at(next, Weak::clone(&self.this) as Weak<dyn Source>);
                }
                let has_seen = state.has_seen();
                drop(state);
                if has_seen {
                    // The lock ensures that the thread is either waiting or has not checked yet.
                    drop(self.shared.state());
                    self.shared.notify();
                }
                return;
            }
            drop(state);
            work.carry_out(&self.driver(), &self.dialer);
        }
    }

    fn dialled(&self, peer: MemberId, met: Met) {
        let mut state = self.state.lock();
        let input = state.ports.connected(&self.driver(), peer, met);
        state.handle(input);
        self.pump(&mut state);
        drop(state);
        self.settle();
    }

    fn dial_failed(&self, peer: MemberId, _: Lost) {
        self.input(Input::DialFailed(peer));
    }

    fn job(&self) -> &Job {
        &self.job
    }

    fn slot(&self) -> usize {
        0
    }
}

impl Source for Watching {
    fn ready(self: Arc<Self>, _: EventFlags) {}

    fn due(self: Arc<Self>, now: Instant) {
        let mut state = self.state.lock();
        state.alarm.take_if(|alarm| *alarm <= now);
        let time = state.clock.time(now);
        if state.observer.next_timeout() <= time {
            state.observer.handle_timeout(time);
        }
        self.pump(&mut state);
        drop(state);
        self.settle();
    }
}

impl State {
    fn handle(&mut self, input: Input) {
        self.observer.handle(self.clock.time(Instant::now()), input);
    }

    /// Whether there is something for the observer's thread.
    fn has_seen(&self) -> bool {
        !self.seen.is_empty() || self.over.is_some()
    }

    fn rank_of(&self, id: MemberId) -> Option<usize> {
        self.membership.as_ref()?.rank_of(id)
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Active(membership) => {
                self.membership = Some(Arc::clone(&membership));
                self.hears = false;
                self.coordinators.clear();
                let was_formed = self.forming.take().is_some();
                self.seen.push(Seen::Generation(membership, was_formed));
            }
            Event::Forms(generation) => {
                (self.forming, self.hears) = (Some(generation), true);
                self.seen.push(Seen::Forming(generation));
            }
            Event::Coordinator(id) => {
                self.hears = true;
                let rank = self.rank_of(id);
                let is_new = rank.filter(|rank| self.coordinators.last() != Some(rank));
                self.coordinators.extend(is_new);
                self.seen.extend(rank.map(Seen::Coordinator));
            }
            Event::Entry(entry) => match &*entry {
                Entry::Gone {
                    member, departure, ..
                } => {
                    let rank = self.rank_of(*member);
                    let gone = rank.map(|rank| Seen::Gone(rank, departure.clone()));
                    self.seen.extend(gone);
                }
                Entry::Said(said) => {
                    if let Ok(Saying::Failed { why, .. }) = wire::decode(&said.bytes) {
                        let rank = self.rank_of(said.from);
                        let gone = rank.map(|rank| Seen::Gone(rank, Departure::Failed(why)));
                        self.seen.extend(gone);
                    }
                }
                Entry::Operator(word) => {
                    let ranks = word.members.iter().filter_map(|id| self.rank_of(*id));
                    let ranks = ranks.collect();
                    self.seen.push(Seen::Decided(ranks));
                }
            },
            Event::Replied(bytes) => match replied(&bytes) {
                Ok((_, _, Incoming::Push(Push::Member(known)))) => {
                    self.seen.push(Seen::Known(known));
                }
                Ok((_, _, Incoming::Push(Push::Size(size)))) => self.seen.push(Seen::Size(size)),
                Ok((_, _, Incoming::Push(Push::Lateness(late)))) => {
                    self.seen.push(Seen::Late(late))
                }
                _ => {}
            },
            Event::Ended(_) if self.membership.is_some() => {
                self.over = Some(String::from(LEFT));
            }
            Event::Ended(_) => self.over = Some(String::from("the ranks have not met")),
            Event::Dismissed(bytes) => {
                if let Ok(Incomplete::Gone { rank, departure }) = wire::decode(&bytes) {
                    self.seen.push(Seen::Gone(rank, departure));
                }
                self.over = Some(String::from("the ranks have not met"));
            }
            Event::Left => {
                self.over
                    .get_or_insert(String::from("the observer was dropped"));
            }
            _ => {}
        }
    }
}

/// The observer's thread; runs until there is nothing more to see.
pub(super) fn run(shared: &Arc<Shared>) {
    let why = observe(shared);
    let mut state = shared.state();
    state.board.end(&why);
    state.done = true;
    drop(state);
    shared.notify();
}

fn observe(shared: &Arc<Shared>) -> String {
    let deadline = deadline_after(shared.rendezvous.timeout);
    let (met, found) = match look(shared, deadline) {
        Ok(found) => found,
        Err(why) => return why,
    };
    let watching = Watching::new(shared, met, &found);
    {
        let mut state = watching.state.lock();
        watching.pump(&mut state);
    }
    watching.settle();
    let mut told = HashSet::new();
    let mut started = 0;
    loop {
        let over = watching.state.lock().over.clone();
        watching.report(&mut told);
        if let Some(why) = over {
            watching.close();
            return match why == LEFT {
                true => watching.story(),
                false => why,
            };
        }
        let mut state = shared.state();
        if state.stop {
            break;
        }
        let now = state.started.len();
        if now != started {
            started = now;
            drop(state);
            watching.watch();
            continue;
        }
        #[cfg(test)]
        if std::mem::take(&mut state.cut) {
            watching.state.lock().ports.cut_for_a_test();
        }
        if watching.state.lock().has_seen() {
            continue;
        }
        let until = Instant::now() + LOOK;
        shared.wait(&mut state, until);
    }
    // The last reports are delivered before the goodbye.
    let deadline = Instant::now() + FAREWELL;
    loop {
        watching.report(&mut told);
        let all = shared.state().words.iter().all(|word| word.told);
        let is_heard = watching.state.lock().hears;
        if all || !is_heard || Instant::now() >= deadline {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    watching.input(Input::Command(Command::Leave(Departure::Left)));
    watching.close();
    String::from("the observer was dropped")
}

/// Finds a process of the job.
fn look(shared: &Arc<Shared>, deadline: Instant) -> Result<(Met, String), String> {
    let rendezvous = &shared.rendezvous;
    let mut search = Search::new(rendezvous, Claim::onlooker(rendezvous.world_size));
    let mut pause = Duration::from_millis(2);
    loop {
        let is_alive = match search.step(deadline) {
            Looked::Met(met, address) => return Ok((met, address.to_string())),
            Looked::Refused(why) => return Err(why),
            Looked::Alive(_) => true,
            Looked::Nobody(_) => false,
        };
        let mut state = shared.state();
        if state.stop {
            return Err(String::from("the observer was dropped"));
        }
        if search.has_lead() {
            continue;
        }
        let is_numbered = state.is_numbered();
        let mut words = state.words.iter();
        let word = words.find(|word| word.rank == 0 && is_numbered);
        // Where other processes answer, rank 0 was a rank of an earlier generation.
        if let Some(end) = word.filter(|_| !is_alive).map(|word| word.end.clone()) {
            drop(state);
            return Err(stand_in(shared, &end, deadline));
        }
        if Instant::now() >= deadline {
            return Err(search.failure());
        }
        shared.wait(&mut state, Instant::now() + pause);
        pause = (pause * 2).min(Duration::from_millis(50));
    }
}

/// Listens in rank 0's place, and tells joining processes that rank 0 will not come.
fn stand_in(shared: &Arc<Shared>, end: &ProcessEnd, deadline: Instant) -> String {
    let lost = Lost::from(end.clone());
    let over = format!("rank 0 never came: {lost}");
    {
        let mut state = shared.state();
        state.board.gone(0, Departure::Lost(lost.clone()));
        for word in &mut state.words {
            word.told = true;
        }
    }
    shared.notify();
    if shared.rendezvous.world_size == 0 {
        return over;
    }
    let enough = || shared.state().stop || Instant::now() >= deadline;
    match Node::stand_in(&shared.rendezvous, Departure::Lost(lost), enough) {
        Ok(()) => over,
        Err(error) => format!("{over}; {error}"),
    }
}
