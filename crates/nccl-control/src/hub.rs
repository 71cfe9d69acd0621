//! The coordinator: which ranks are there, how each is reached, and what is done for them.
//!
//! Lives in rank 0's process, or in the one process when the ranks are its threads. Nothing here waits
//! or reads a socket: a request comes in, and answers and pushes go out to the [`Outlet`]s of the ranks
//! that they concern. Time passes by [`Hub::tick`].

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use super::connection::Connection;
use super::frame::Outgoing;
use super::going::Going;
use super::handover::Doubt;
use super::heartbeat::{Beats, Said};
use super::incoming::{Answer, Push};
use super::mailbox::Mailbox;
use super::request::Request;
use super::service::{LONGEST_NAME, Service};
use super::state::{Member, State};
use super::succession::Loss;
pub(super) use crate::departure::cut;
use crate::departure::{Departure, How, Lost};
use crate::sync::Mutex;
use crate::time::later;
use nccl_base::clock;

/// Where to reach a rank.
#[derive(Clone)]
pub(super) enum Outlet {
    /// In this process.
    Local(Arc<Mailbox>),
    Remote(Arc<Connection>),
}

pub(super) struct Hub {
    size: usize,
    pub(super) state: Mutex<State>,
    /// Where the ranks listen, as far as they do; known when all have met.
    addresses: OnceLock<Vec<Option<String>>>,
    #[cfg(test)]
    fuse: Mutex<Fuse>,
}

/// In tests: after so many sends, the coordinator's process is as if it had died.
#[cfg(test)]
#[derive(Default)]
enum Fuse {
    #[default]
    None,
    Burning(usize, Arc<super::server::Server>),
    Burnt,
}

impl Hub {
    pub(super) fn new(size: usize) -> Self {
        Self::of_epoch(size, 0)
    }

    pub(super) fn of_epoch(size: usize, number: u64) -> Self {
        let members = (0..size).map(|_| Member::default()).collect();
        let state = State {
            members,
            service: Service::new(size),
            earliest: None,
            dirty: Vec::new(),
            observers: HashMap::new(),
            going: Going::of_epoch(number),
            handover: None,
            doubt: Doubt::default(),
            beats: Beats::default(),
            said: Vec::new(),
        };
        Self {
            size,
            state: Mutex::new(state),
            addresses: OnceLock::new(),
            #[cfg(test)]
            fuse: Mutex::default(),
        }
    }

    pub(super) fn size(&self) -> usize {
        self.size
    }

    pub(super) fn know(&self, addresses: Vec<Option<String>>) {
        let mut known = addresses.iter().flatten();
        self.state.lock().doubt.is_on_one_host = known.all(|at| at.starts_with("unix:"));
        let _ = self.addresses.set(addresses);
    }

    /// Where a rank listens, as far as that is known here.
    pub(super) fn address_of(&self, rank: usize) -> Option<String> {
        self.addresses.get()?.get(rank)?.clone()
    }

    /// A rank has come, as process `pid` of `host` under `kernel`. `welcome` is the first that it is sent.
    ///
    /// # Errors
    /// Who is this rank already.
    pub(super) fn attach(
        &self,
        rank: usize,
        outlet: Outlet,
        (host, pid, kernel): (&str, u64, &str),
        welcome: Option<Outgoing>,
    ) -> Result<(), String> {
        let mut state = self.state.lock();
        let successor = state.is_successor();
        let known = state.service.rank(rank);
        let end = match &known.departure {
            Some(departure) => format!("; {departure}"),
            None => String::new(),
        };
        if known.has_come() {
            return Err(format!(
                "rank {rank} has joined already, as {}, pid {}{end}: this one is {host}, pid {pid}, and \
                 two processes cannot be one rank",
                known.host, known.pid
            ));
        }
        // One that has failed may still have communicators.
        let failed = matches!(known.departure, Some(Departure::Failed(_)));
        if known.departure.is_some() && !(successor && failed) {
            return Err(format!("rank {rank} is not expected any more{end}"));
        }
        if let (Outlet::Remote(connection), Some(welcome)) = (&outlet, welcome) {
            connection.enqueue(welcome);
        }
        state.members[rank].outlet = Some(outlet.clone());
        let now = Instant::now();
        state.service.arrive(now, rank, host, pid);
        state.feel(rank, kernel, now);
        // A successor tells of them in the order in which all have heard.
        for rank in (0..self.size).filter(|_| !successor) {
            if let Some(departure) = state.service.departure(rank).cloned() {
                outlet.push(&Push::Gone { rank, departure }, &mut None);
            }
        }
        if let Some((rank, departure)) = state.service.over().cloned() {
            outlet.push(&Push::Over { rank, departure }, &mut None);
        }
        let me = state.me();
        if state.members[me].parent.is_some() {
            outlet.push(&Push::Watched(true), &mut None);
        }
        if state.going.newcomers() > 0 {
            let count = state.going.newcomers();
            outlet.push(&Push::Newcomers(count), &mut None);
        }
        state.dirty.push(outlet);
        state.show(rank);
        Ok(())
    }

    /// An observer has come; `welcome` is the first that it is sent.
    ///
    /// # Errors
    /// There are too many.
    pub(super) fn observe(
        &self,
        number: u64,
        connection: Arc<Connection>,
        welcome: Outgoing,
    ) -> Result<(), String> {
        let mut state = self.state.lock();
        state.has_room_to_observe()?;
        connection.enqueue(welcome);
        state.observe(number, Outlet::Remote(connection));
        Ok(())
    }

    /// Somebody asks to be taken into the next epoch.
    ///
    /// # Errors
    /// There are too many.
    pub(super) fn receive_newcomer(
        &self,
        number: u64,
        connection: Arc<Connection>,
        welcome: Outgoing,
    ) -> Result<(), String> {
        self.state
            .lock()
            .receive_newcomer(number, connection, welcome)
    }

    pub(super) fn newcomer_gone(&self, number: u64, lost: Lost) {
        self.state.lock().newcomer_gone(number, lost);
        self.flush();
    }

    /// A rank will not come, unless it has.
    pub(super) fn never_comes(&self, rank: usize, departure: Departure) {
        let mut state = self.state.lock();
        if !state.service.rank(rank).has_come() {
            state.leave(rank, departure, false);
        }
    }

    /// The hub of the epoch that was agreed upon last.
    pub(super) fn next(&self) -> Option<Arc<Hub>> {
        self.state.lock().going.next().cloned()
    }

    /// This rank is in a later epoch. Should it come to coordinate what is left of this one, nobody comes in here.
    pub(super) fn has_gone_on(&self) {
        self.state.lock().has_gone_on();
    }

    /// Whether this rank is in a later epoch.
    pub(super) fn is_past(&self) -> bool {
        self.state.lock().going.is_past()
    }

    /// The epoch that was agreed upon last came to nothing.
    pub(super) fn give_up_next(&self) {
        self.state.lock().going.give_up_next();
    }

    pub(super) fn unobserve(&self, number: u64) {
        self.state.lock().unobserve(number);
    }

    /// One request of an observer; what follows from it waits for [`flush`](Self::flush).
    pub(super) fn handle_observer(
        &self,
        number: u64,
        id: u64,
        request: Request,
    ) -> Result<(), &'static str> {
        self.state.lock().handle_observer(number, id, request)
    }

    /// Somebody was turned away: told to those who wait in vain.
    pub(super) fn remark(&self, text: String) {
        self.state.lock().service.remark(text);
    }

    /// One request of `rank`; what follows from it waits for [`flush`](Self::flush).
    pub(super) fn handle(&self, rank: usize, id: u64, request: Request) {
        let now = Instant::now();
        let mut locked = self.state.lock();
        let state = &mut *locked;
        if state.members[rank].outlet.is_none() {
            return;
        }
        state.hear(rank, now);
        let Some(request) = state.sift(rank, id, request) else {
            drop(locked);
            return self.go_on();
        };
        match request {
            Request::Collect { .. }
            | Request::Set { .. }
            | Request::Get { .. }
            | Request::Send { .. }
            | Request::Took { .. }
            | Request::Suspect(_)
            | Request::Attends(_) => state.serve(now, rank, id, request),
            Request::Cancel { .. } => {
                state.cancel_going_on(rank, id);
                state.serve(now, rank, id, request);
            }
            Request::Phase { .. } => {
                state.serve(now, rank, id, request);
                state.show(rank);
            }
            Request::GoOn {
                patience,
                leaves_behind,
            } => state.go_on(rank, id, later(now, patience), leaves_behind),
            Request::Announce { topic, bytes } => state.push(&Push::Notice {
                from: rank,
                topic,
                bytes: bytes.into(),
            }),
            Request::Tell { to, topic, bytes } => {
                let bytes = bytes.into();
                let push = Push::Told {
                    from: rank,
                    topic,
                    bytes,
                };
                state.push_to([to], &push);
            }
            Request::Fail { why } => state.leave(rank, Departure::Failed(why), false),
            Request::Stay { why } => {
                let departure = why.map_or(Departure::Left, Departure::Failed);
                state.leave(rank, departure, true);
            }
            Request::Goodbye => state.leave(rank, Departure::Left, false),
            Request::Listens { mut at } => {
                cut(&mut at, LONGEST_NAME);
                state.members[rank].at = at;
                state.show(rank);
            }
            Request::Last { mut call } => {
                cut(&mut call, LONGEST_NAME);
                state.members[rank].last = Some((call, now));
            }
            Request::Saw { rank, state: seen } => state.saw(rank, seen, now),
            Request::Report(_) | Request::Pong(_) | Request::Missing { .. } => {}
            Request::Clock => {
                let now = clock::clock().to_le_bytes();
                let now = Answer::Value(now.as_slice().into());
                state.answer_all(&[(rank, id)], &now);
            }
            // Recordings are asked for at the doors, where they pass through nobody else.
            Request::Watches { .. } | Request::Ended { .. } | Request::Recording { .. } => {
                let sent = String::from("what only an observer may send");
                state.lost(rank, How::Sent(sent).into())
            }
        }
    }

    /// A rank's connection has ended without goodbye.
    pub(super) fn lost(&self, rank: usize, loss: Loss) {
        let mut state = self.state.lock();
        if state.is_found(rank, &loss) {
            drop(state);
            return self.go_on();
        }
        match loss {
            Loss::Lost(lost) if lost.may_live() => state.suspect(rank, lost),
            Loss::Lost(lost) => state.lost(rank, lost),
            Loss::Mute | Loss::Elsewhere | Loss::Left => {}
        }
        drop(state);
        self.flush();
    }

    /// It dies after so many sends to ranks.
    #[cfg(test)]
    pub(super) fn die_after(&self, sends: usize, server: Arc<super::server::Server>) {
        *self.fuse.lock() = Fuse::Burning(sends, server);
    }

    #[cfg(test)]
    fn is_dead(&self, outlet: &Outlet) -> bool {
        let mut fuse = self.fuse.lock();
        match (&mut *fuse, outlet) {
            (Fuse::None, _) | (Fuse::Burning(..), Outlet::Local(_)) => false,
            (Fuse::Burnt, _) => true,
            (Fuse::Burning(0, server), Outlet::Remote(_)) => {
                let server = Arc::clone(server);
                *fuse = Fuse::Burnt;
                drop(fuse);
                server.cut_for_a_test();
                true
            }
            (Fuse::Burning(left, _), Outlet::Remote(_)) => {
                *left -= 1;
                false
            }
        }
    }

    /// Whether all ranks have gone.
    pub(super) fn is_over(&self) -> bool {
        self.present().is_empty()
    }

    /// The ranks that have not gone.
    pub(super) fn present(&self) -> Vec<usize> {
        let state = self.state.lock();
        let is_present = |rank: &usize| state.service.departure(*rank).is_none();
        (0..self.size).filter(is_present).collect()
    }

    /// A rank takes part in nothing any more; the first reason stays.
    pub(super) fn leave(&self, rank: usize, departure: Departure) {
        self.state.lock().leave(rank, departure, false);
        self.flush();
    }

    /// Ends what has run out of time.
    pub(super) fn tick(&self, now: Instant) {
        let reports = {
            let mut state = self.state.lock();
            state.tick(now);
            state.service.reports(now)
        };
        self.flush();
        for text in reports {
            tracing::info!(name: "nccl.rendezvous.waiting", target: "nccl", "still waiting: {text}");
        }
    }

    /// When to call [`tick`](Self::tick) next.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let state = self.state.lock();
        let service = state.service.next_timeout();
        state.earliest.into_iter().chain(service).min()
    }

    /// Whether somebody waits for something.
    pub(super) fn is_waited_for(&self) -> bool {
        self.state.lock().service.is_waited_for()
    }

    /// Sends what was queued, and then says what was to be said. Outside of the lock, because it runs the handlers
    /// of notices, and those who listen to the log may ask how the world is.
    pub(super) fn flush(&self) {
        let (dirty, said, next) = {
            let mut state = self.state.lock();
            (
                std::mem::take(&mut state.dirty),
                std::mem::take(&mut state.said),
                state.going.next().cloned(),
            )
        };
        for outlet in dirty {
            #[cfg(test)]
            if self.is_dead(&outlet) {
                continue;
            }
            match outlet {
                Outlet::Local(mailbox) => {
                    mailbox.run_handlers();
                }
                Outlet::Remote(connection) => connection.flush_quietly(),
            }
        }
        // What happened here may have been told there.
        if let Some(next) = next {
            next.flush();
        }
        said.into_iter().for_each(Said::say);
    }
}

impl Outlet {
    pub(super) fn answer(&self, id: u64, answer: &Answer, encoded: &mut Option<Arc<[u8]>>) {
        match self {
            Self::Local(mailbox) => mailbox.answer(id, answer.clone()),
            Self::Remote(connection) => {
                let payload = encoded.get_or_insert_with(|| answer.encode());
                connection.enqueue(Outgoing::new(id, Arc::clone(payload)));
            }
        }
    }

    pub(super) fn push(&self, push: &Push, encoded: &mut Option<Outgoing>) {
        match self {
            Self::Local(mailbox) => mailbox.push(push.clone()),
            Self::Remote(connection) => {
                connection.enqueue(encoded.get_or_insert_with(|| push.encode()).clone());
            }
        }
    }
}

impl fmt::Debug for Hub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hub")
            .field("size", &self.size)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Outlet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Local(_) => "Local",
            Self::Remote(_) => "Remote",
        })
    }
}
