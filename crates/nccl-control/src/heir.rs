//! What a rank does when its coordinator is gone: it goes to the next, or becomes it.
//!
//! On a thread of its own, which ends when the rank follows somebody, coordinates, or is cut off. What to do
//! is said by [`succession`](super::succession); this dials, waits and asks around. What the rank's program
//! asks meanwhile is kept ([`Way`]); what is told of faults and ends is told again to whoever comes next.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::client::{self, Claim, MUTE, Met, Tried};
use super::connection::Connection;
use super::frame::Decoder;
use super::handover::{Standing, apart};
use super::hub::Hub;
use super::launcher;
use super::line::{Link, Member};
use super::mailbox::{Mailbox, Notice};
use super::reader::{Reader, Sink};
use super::request::Request;
use super::server::Server;
use super::succession::{Action, Event, Loss};
use super::tcp;
use crate::departure::{Departure, How, Lost, ProcessEnd, Sign};
use crate::sync::Mutex;
use nccl_base::threads;

/// How long a host may take to acknowledge, and a process at most to answer.
const SILENCE: Duration = Duration::from_secs(2);
const MUTENESS: Duration = Duration::from_secs(3);

/// How long all ranks together may take to hear that the coordinator is gone: as long as the kernel takes to
/// find a host silent, and then the tries of those that are between.
const PATIENCE: Duration = Duration::from_secs(6);

/// How long a rank whose coordinator has left in order waits before it looks for another: most leave together.
const LEAVING: Duration = Duration::from_millis(500);

/// How many ranks are asked at once.
const ASKED: usize = 32;

/// How many ends are kept for a successor that all members have said, as those have heard who may take over;
/// and how many at all.
const ENDS: usize = 128;
const MOST_ENDS: usize = 1024;

/// How many of those that were said to one rank alone are kept for a successor, and for how long: whoever collects
/// them waits no longer for a verdict.
const TOLD: usize = 16;
const STALE: Duration = Duration::from_secs(2);

/// The way to the coordinator, and what its successor has to be told.
pub(super) struct Way {
    pub(super) link: Link,
    pub(super) left: bool,
    /// The ends that this rank has said.
    ends: VecDeque<(u64, Request)>,
    /// What it said to one rank alone, when. Whoever is told twice does not mind.
    told: VecDeque<(Instant, Request)>,
    phase: Option<Request>,
    stay: Option<Request>,
    /// The last wish to go on, which every coordinator hears as long as it is waited for.
    wish: Option<(u64, Request)>,
    /// What was asked while there was nobody.
    later: Vec<(u64, Request)>,
}

impl Way {
    pub(super) fn new(link: Link) -> Self {
        Self {
            link,
            left: false,
            ends: VecDeque::new(),
            told: VecDeque::new(),
            phase: None,
            stay: None,
            wish: None,
            later: Vec::new(),
        }
    }

    /// Keeps what a successor has to be told. Whether it waits for one already.
    pub(super) fn keep(&mut self, id: u64, request: &Request, mailbox: &Mailbox) -> bool {
        let between = matches!(self.link, Link::Between { .. });
        match request {
            Request::Collect { round, .. } if round.is_of_ends() => {
                while self.ends.len() >= ENDS
                    && (self.ends.len() >= MOST_ENDS || !mailbox.is_waited_for(self.ends[0].0))
                {
                    self.ends.pop_front();
                }
                self.ends.push_back((id, request.clone()));
            }
            Request::Tell { .. } => {
                if self.told.len() == TOLD {
                    self.told.pop_front();
                }
                self.told.push_back((Instant::now(), request.clone()));
            }
            Request::Phase { .. } => self.phase = Some(request.clone()),
            Request::Stay { .. } => self.stay = Some(request.clone()),
            Request::GoOn { .. } => self.wish = Some((id, request.clone())),
            // The report has it.
            Request::Announce { .. } => {}
            _ if between => self.later.push((id, request.clone())),
            _ => {}
        }
        between
    }

    fn all_kept(&mut self, mailbox: &Mailbox) -> Vec<(u64, Request)> {
        self.told.retain(|(at, _)| at.elapsed() < STALE);
        let told = self.told.iter().map(|(_, request)| request);
        let unasked = [&self.phase, &self.stay].into_iter().flatten();
        let unasked = unasked.chain(told);
        let unasked = unasked.map(|request| (u64::MAX, request.clone()));
        let ends = self.ends.iter().cloned();
        let wish = self
            .wish
            .iter()
            .filter(|(id, _)| mailbox.is_waited_for(*id));
        let later = std::mem::take(&mut self.later);
        unasked
            .chain(ends)
            .chain(wish.cloned())
            .chain(later)
            .collect()
    }
}

/// What of a line its succession needs: the line itself may go at any time.
#[derive(Clone)]
pub(super) struct Heir {
    pub(super) rank: usize,
    pub(super) size: usize,
    pub(super) way: Arc<Mutex<Way>>,
    pub(super) mailbox: Arc<Mailbox>,
    pub(super) members: Arc<OnceLock<Vec<Member>>>,
    /// Set when the line has communicators, or had.
    pub(super) watched: Arc<AtomicBool>,
}

impl Heir {
    /// Whether all ranks are reached over Unix sockets.
    fn is_on_one_host(&self) -> bool {
        let mut known = self.members.get().into_iter().flatten();
        known.all(|member| member.is_at_unix_socket())
    }
}

/// The connection to the coordinator has ended.
pub(super) fn bereave(heir: &Heir, loss: Loss) {
    if heir.mailbox.is_closed() {
        return;
    }
    let their = heir.clone();
    let spawned = std::thread::Builder::new()
        .name(String::from("nccl-successor"))
        .spawn(move || go_on(&their, loss));
    if let Err(error) = spawned {
        let why = format!("the coordinator is gone, and no thread to look for another: {error}");
        heir.mailbox.end(&Lost::said(why));
        heir.mailbox.settle();
    }
}

fn go_on(heir: &Heir, loss: Loss) {
    let mailbox = &heir.mailbox;
    let before = mailbox.coordinator();
    let why = loss.clone().into_lost();
    let has_left = mailbox.departure(before) == Some(Departure::Left);
    {
        let mut way = heir.way.lock();
        let server = match &way.link {
            Link::Elsewhere { server, .. } | Link::Between { server } => Arc::clone(server),
            _ => return,
        };
        way.link = Link::Between { server };
        mailbox.interrupt(&why);
    }
    if has_left {
        if !heir.watched.load(Ordering::Acquire) {
            return mailbox.end(&why);
        }
        // Whoever leaves meanwhile has nobody to tell.
        std::thread::sleep(LEAVING);
    }
    if heir.way.lock().left {
        return;
    }
    let loss = if has_left { Loss::Left } else { loss };
    tracing::warn!(name: "nccl.rendezvous.handover", target: "nccl", rank = before, why = why.to_string(), "the coordinator is gone");
    let mut actions = VecDeque::from(mailbox.step(Event::Lost(loss)));
    mailbox.settle();
    while let Some(action) = actions.pop_front() {
        let next = match action {
            Action::Seek(rank) => heir.seek(rank, has_left, None),
            Action::Collect(_) => heir.collect(std::mem::take(&mut actions).into(), has_left),
            Action::CutOff { from, .. } => {
                mailbox.cut_off(from.clone(), &apart(&from, heir.is_on_one_host()));
                Vec::new()
            }
            _ => Vec::new(),
        };
        mailbox.settle();
        actions.extend(next);
    }
}

/// What one try to reach a rank came to.
enum Answered {
    Met(Box<Met>),
    Follows(usize),
    Refused,
    /// There is nobody.
    Closed(How),
    Silent {
        lost: Lost,
        /// Nobody says that there is no way: a second look may find one.
        is_unanswered: bool,
    },
    Mute,
    /// Perhaps the next time.
    Busy,
}

impl Heir {
    fn address_of(&self, rank: usize) -> Option<&str> {
        self.members.get()?.get(rank)?.at.as_deref()
    }

    /// This rank's door, unless the line is gone.
    fn server(&self) -> Option<Arc<Server>> {
        let way = self.way.lock();
        if way.left {
            return None;
        }
        match &way.link {
            Link::Here { server, .. }
            | Link::Elsewhere { server, .. }
            | Link::Between { server } => Some(Arc::clone(server)),
            Link::Node { .. } | Link::Threads(_) => None,
        }
    }

    fn ask(&self, server: &Server, rank: usize) -> Answered {
        let Some(address) = self.address_of(rank).and_then(launcher::place) else {
            return Answered::Closed(How::NoAddress);
        };
        let claim = Claim::rank(self.rank, self.size);
        let deadline = Instant::now() + MUTENESS;
        match client::attempt(&address, server.job(), claim, 0, deadline) {
            Tried::Met(met) if met.by == rank => Answered::Met(Box::new(met)),
            Tried::Met(met) => {
                met.connection.shut();
                Answered::Closed(How::Replaced { by: met.by })
            }
            Tried::Follows { rank, .. } => Answered::Follows(rank),
            Tried::Refused(why) => {
                tracing::warn!(name: "nccl.rendezvous.handover", target: "nccl", rank, why, "a successor lets this rank not in");
                Answered::Refused
            }
            Tried::NotYet(error, _) => match error.kind() {
                io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound => {
                    Answered::Closed(How::NobodyListens)
                }
                kind if kind == MUTE => Answered::Mute,
                io::ErrorKind::TimedOut
                | io::ErrorKind::HostUnreachable
                | io::ErrorKind::NetworkUnreachable
                | io::ErrorKind::NetworkDown => Answered::Silent {
                    lost: Sign::Error(error.to_string()).into(),
                    is_unanswered: tcp::is_unanswered(&error),
                },
                _ => Answered::Busy,
            },
        }
    }

    /// Goes to the next coordinator; `met` when its door has been found already.
    fn seek(&self, rank: usize, has_left: bool, mut met: Option<Box<Met>>) -> Vec<Action<Notice>> {
        let begun = Instant::now();
        let mailbox = &self.mailbox;
        let closed = |how: How| match has_left {
            true => Loss::Left,
            false => Loss::Lost(how.into()),
        };
        let mut pause = Duration::from_micros(500);
        loop {
            let Some(server) = self.server() else {
                return Vec::new();
            };
            if let Some(how) = self.is_beside_a_silent_one(rank) {
                return mailbox.step(Event::Lost(Loss::Lost(how)));
            }
            let answer = match met.take() {
                Some(met) => Answered::Met(met),
                None => self.ask(&server, rank),
            };
            let late = begun.elapsed() > PATIENCE;
            match answer {
                Answered::Met(met) => {
                    let Met {
                        connection,
                        decoder,
                        ..
                    } = *met;
                    return match self.follow(rank, server, connection, decoder) {
                        Ok(()) => Vec::new(),
                        Err(error) => {
                            mailbox.step(Event::Lost(closed(How::Said(error.to_string()))))
                        }
                    };
                }
                Answered::Follows(by) if by > rank => return mailbox.step(Event::Overtaken { by }),
                Answered::Closed(how) => return mailbox.step(Event::Lost(closed(how))),
                Answered::Silent {
                    lost,
                    is_unanswered,
                } if begun.elapsed() > SILENCE || !is_unanswered => {
                    return mailbox.step(Event::Lost(Loss::Lost(lost)));
                }
                Answered::Mute => return mailbox.step(Event::Lost(Loss::Mute)),
                Answered::Refused => return mailbox.step(Event::Refused),
                // It still hears the one that this rank has lost.
                Answered::Follows(_) if late => return mailbox.step(Event::Refused),
                Answered::Busy if late => return mailbox.step(Event::Lost(Loss::Mute)),
                _ => {}
            }
            drop(server);
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(50));
        }
    }

    /// Takes over: waits for the others, and finds out about those that do not come.
    fn collect(&self, rest: Vec<Action<Notice>>, has_left: bool) -> Vec<Action<Notice>> {
        let begun = Instant::now();
        let mailbox = &self.mailbox;
        let Some(hub) = self.take_over() else {
            return Vec::new();
        };
        hub.act(rest);
        let awaits = |rank: usize| {
            mailbox
                .awaited()
                .is_some_and(|awaited| awaited.contains(&rank))
        };
        let mut pause = Duration::from_millis(4);
        loop {
            let awaited = match mailbox.awaited() {
                Some(awaited) if !awaited.is_empty() => awaited,
                _ => {
                    self.take_places(has_left);
                    return Vec::new();
                }
            };
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(200));
            let Some(server) = self.server() else {
                return Vec::new();
            };
            let overtaken = Mutex::new(None);
            let left = Mutex::new(awaited.iter().copied());
            let late = begun.elapsed() > PATIENCE;
            let inquire = || loop {
                let Some(rank) = left.lock().next() else {
                    return;
                };
                if !awaits(rank) {
                    continue;
                }
                let loss = match self.ask(&server, rank) {
                    Answered::Closed(_) if has_left => Some(Loss::Left),
                    Answered::Closed(how) => Some(Loss::Lost(how.into())),
                    Answered::Silent {
                        lost,
                        is_unanswered,
                    } if begun.elapsed() > SILENCE || !is_unanswered => Some(Loss::Lost(lost)),
                    Answered::Mute => Some(Loss::Mute),
                    Answered::Met(met) => {
                        *overtaken.lock() = Some((rank, Some(met)));
                        None
                    }
                    Answered::Follows(by) if by > self.rank => {
                        overtaken.lock().get_or_insert((by, None));
                        None
                    }
                    // It is about to come, or hears the one that this rank has lost.
                    Answered::Follows(_) | Answered::Refused if late => Some(Loss::Elsewhere),
                    Answered::Busy | Answered::Silent { .. } if late => Some(Loss::Mute),
                    _ => None,
                };
                if let Some(loss) = loss
                    && awaits(rank)
                {
                    hub.found(rank, loss);
                }
            };
            let askers = awaited.len().min(ASKED);
            threads::together(
                askers,
                "nccl-asker",
                "to ask several ranks at once",
                inquire,
            );
            if let Some((by, met)) = overtaken.into_inner() {
                // It was mute for a while, and another was next.
                hub.stand_down();
                self.way.lock().link = Link::Between { server };
                if mailbox.step(Event::Overtaken { by }).is_empty() {
                    return Vec::new();
                }
                return self.seek(by, has_left, met);
            }
        }
    }

    /// This rank coordinates, if it was let: those who are new find it where they would have found the last one. Of
    /// a coordinator that has left in order most leave together, and others may meet there already.
    fn take_places(&self, has_left: bool) {
        if let Some(server) = self.server()
            && !has_left
            && server.hub().standing() == Standing::Leads
        {
            server.take_places();
        }
    }

    /// Whether a rank's host was found silent already: then why.
    fn is_beside_a_silent_one(&self, rank: usize) -> Option<Lost> {
        let members = self.members.get()?;
        let own = members.get(rank)?;
        let silent = self.mailbox.silent();
        silent
            .into_iter()
            .find_map(|(other, how)| own.is_beside(members.get(other)?).then_some(how))
    }

    /// From now on, `rank` coordinates, at the other end of this connection.
    fn follow(
        &self,
        rank: usize,
        server: Arc<Server>,
        connection: Arc<Connection>,
        decoder: Decoder,
    ) -> io::Result<()> {
        {
            let mut way = self.way.lock();
            if way.left {
                connection.shut();
                return Ok(());
            }
            if let Some(report) = self.mailbox.report() {
                connection.enqueue(Request::Report(report).encode(u64::MAX));
            }
            for (id, request) in way.all_kept(&self.mailbox) {
                connection.enqueue(request.encode(id));
            }
            let connection = Arc::clone(&connection);
            let server = Arc::clone(&server);
            way.link = Link::Elsewhere { connection, server };
        }
        let sink = Arc::clone(&self.mailbox) as Arc<dyn Sink>;
        let reader = Reader::start(connection, decoder, sink)?;
        // Which keeps it, too: it has to be there until the word has come, or has not.
        let coming = Arc::clone(&reader);
        server.on_word(move |end: &ProcessEnd| coming.rank_0_ended(end));
        if let Some(member) = self.members.get().and_then(|members| members.get(rank)) {
            reader.watch_rank_0(member.pid.into(), "");
        }
        Ok(())
    }

    /// From now on, this rank coordinates, as soon as it may.
    fn take_over(&self) -> Option<Arc<Hub>> {
        let (hub, kept) = {
            let mut way = self.way.lock();
            let Link::Between { server } = &way.link else {
                return None;
            };
            if way.left {
                return None;
            }
            let server = Arc::clone(server);
            let hub = Arc::clone(server.hub());
            hub.take_over(self.members.get()?);
            way.link = Link::Here {
                hub: Arc::clone(&hub),
                server,
            };
            (hub, way.all_kept(&self.mailbox))
        };
        for (id, request) in kept {
            hub.handle(self.rank, id, request);
        }
        Some(hub)
    }
}
