//! What a rank's hub does when its rank takes over from a coordinator that is gone, and what any hub does
//! about a host that does not answer.
//!
//! A rank's door has a hub from the start, which is dormant: it says who coordinates. When the rank is next,
//! the hub takes the reports of those who come and keeps all else that they ask until its rank may decide
//! ([`succession`](super::succession)). From then on it is a coordinator like the first, without what that
//! one had in its rounds and in its store.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::heartbeat::Said;
use super::hub::{Hub, Outlet};
use super::incoming::Push;
use super::line;
use super::mailbox::{Mailbox, Notice};
use super::message::Incomplete;
use super::process;
use super::reader::Sink as _;
use super::request::Request;
use super::state::State;
use super::succession::{Action, Event, Loss, is_majority};
use crate::departure::{Departure, How, Lost};

/// How long the kernel takes to find a host silent to which something was sent.
const SILENCE: Duration = Duration::from_millis(3500);

/// The hub of a rank that did not coordinate at first.
pub(super) struct Handover {
    me: usize,
    mailbox: Arc<Mailbox>,
    stage: Stage,
    /// What was asked before this rank could decide.
    queued: Vec<(usize, u64, Request)>,
}

/// What a rank's hub is to somebody who is new to the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// Another rank coordinates.
    Follows,
    TakesOver,
    Leads,
    /// There is a later epoch, which has a hub of its own.
    HasGoneOn,
    /// It has found itself on the side of a cut that may not decide.
    Apart,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Dormant,
    Collecting,
    Leading,
}

/// Ranks whose connections have broken in silence: it may be this host that is cut off.
#[derive(Default)]
pub(super) struct Doubt {
    suspects: Vec<(usize, Lost)>,
    /// The question that was asked then.
    asked: u64,
    /// Who has answered it.
    present: BTreeSet<usize>,
    pub(super) until: Option<Instant>,
    /// Who was given up so, and may live.
    out_of_reach: BTreeSet<usize>,
    /// This rank has found that it may not decide.
    pub(super) is_apart: bool,
    /// All ranks are reached over Unix sockets: no network is between them.
    pub(super) is_on_one_host: bool,
}

impl Hub {
    /// The hub of rank `me`, which does not coordinate.
    pub(super) fn dormant(size: usize, me: usize, epoch: u64, mailbox: Arc<Mailbox>) -> Self {
        let hub = Self::of_epoch(size, epoch);
        hub.state.lock().handover = Some(Handover {
            me,
            mailbox,
            stage: Stage::Dormant,
            queued: Vec::new(),
        });
        hub
    }

    /// Whether ranks are let in here.
    pub(super) fn coordinates(&self) -> bool {
        let state = self.state.lock();
        let dormant = |handover: &Handover| handover.stage == Stage::Dormant;
        !state.handover.as_ref().is_some_and(dormant)
    }

    /// What this hub is to somebody who is new.
    pub(super) fn standing(&self) -> Standing {
        let state = self.state.lock();
        let handover = state.handover.as_ref();
        let hears_nobody = handover.is_some_and(|handover| handover.mailbox.is_closed());
        match handover.map(|handover| handover.stage) {
            _ if state.doubt.is_apart || hears_nobody => Standing::Apart,
            Some(Stage::Dormant) => Standing::Follows,
            Some(Stage::Collecting) => Standing::TakesOver,
            _ if state.going.has_gone_on() => Standing::HasGoneOn,
            Some(Stage::Leading) | None => Standing::Leads,
        }
    }

    /// Who coordinates, as far as this rank knows.
    pub(super) fn coordinator(&self) -> usize {
        let state = self.state.lock();
        let handover = state.handover.as_ref();
        handover.map_or(0, |handover| handover.mailbox.coordinator())
    }

    /// From now on, reports are taken here.
    pub(super) fn take_over(&self, members: &[line::Member]) {
        let mut state = self.state.lock();
        let State {
            handover: Some(handover),
            members: known,
            service,
            ..
        } = &mut *state
        else {
            return;
        };
        handover.stage = Stage::Collecting;
        for (rank, (known, member)) in known.iter_mut().zip(members).enumerate() {
            let pid = member.pid.into();
            match rank == handover.me {
                true => service.arrive(Instant::now(), rank, &member.host, pid),
                false => service.expect(rank, &member.host, pid),
            }
            known.at = member.at.clone().unwrap_or_default();
        }
        let own = &mut known[handover.me];
        process::kernel().clone_into(&mut own.kernel);
        own.outlet = Some(Outlet::Local(Arc::clone(&handover.mailbox)));
    }

    /// Somebody else coordinates after all.
    pub(super) fn stand_down(&self) {
        let mut state = self.state.lock();
        if let Some(handover) = &mut state.handover {
            handover.stage = Stage::Dormant;
            handover.queued.clear();
            state.members.fill_with(super::state::Member::default);
            state.service.forget_ranks();
        }
    }

    /// What is known of a rank whose report is waited for.
    pub(super) fn found(&self, rank: usize, loss: Loss) {
        let mut state = self.state.lock();
        if let Some(handover) = &state.handover {
            let actions = handover.mailbox.step(Event::Found { rank, loss });
            state.act(actions);
        }
        drop(state);
        self.go_on();
    }

    /// What the succession has this rank's hub do.
    pub(super) fn act(&self, actions: Vec<Action<Notice>>) {
        self.state.lock().act(actions);
        self.go_on();
    }

    /// Answers what had to wait.
    pub(super) fn go_on(&self) {
        loop {
            let queued = {
                let mut state = self.state.lock();
                match &mut state.handover {
                    Some(handover) if handover.stage == Stage::Leading => {
                        std::mem::take(&mut handover.queued)
                    }
                    _ => Vec::new(),
                }
            };
            if queued.is_empty() {
                break;
            }
            for (rank, id, request) in queued {
                self.handle(rank, id, request);
            }
        }
        self.flush();
        let mailbox = {
            let state = self.state.lock();
            let handover = state.handover.as_ref();
            handover.map(|handover| Arc::clone(&handover.mailbox))
        };
        if let Some(mailbox) = mailbox {
            mailbox.settle();
        }
    }
}

impl State {
    /// Whether a successor takes over here, or has.
    pub(super) fn is_successor(&self) -> bool {
        self.handover.is_some()
    }

    /// The rank in whose process this is.
    pub(super) fn me(&self) -> usize {
        self.handover.as_ref().map_or(0, |handover| handover.me)
    }

    /// A request, unless it is of the succession, or has to wait for its end.
    pub(super) fn sift(&mut self, rank: usize, id: u64, request: Request) -> Option<Request> {
        if let Request::Pong(number) = request {
            if number >= self.doubt.asked {
                self.doubt.present.insert(rank);
                self.weigh(Instant::now());
            }
            return None;
        }
        let Some(handover) = &mut self.handover else {
            return Some(request);
        };
        match (request, handover.stage) {
            (Request::Report(report), _) => {
                let from = rank;
                let actions = handover.mailbox.step(Event::Reported { from, report });
                self.act(actions);
                None
            }
            (request, Stage::Leading) => match request {
                // It had what nobody has any more.
                Request::Set { .. } | Request::Get { .. } => {
                    let mut gone = (0..self.members.len()).filter_map(|rank| {
                        let departure = self.service.departure(rank).cloned()?;
                        Some(Incomplete::Gone { rank, departure })
                    });
                    if let Some(why) = gone.next() {
                        self.refuse(rank, id, why);
                    }
                    None
                }
                request => Some(request),
            },
            (request, _) => {
                handover.queued.push((rank, id, request));
                None
            }
        }
    }

    /// Whether reports are taken here, and nothing is decided yet.
    pub(super) fn is_taking_over(&self) -> bool {
        let stage = self.handover.as_ref().map(|handover| handover.stage);
        stage == Some(Stage::Collecting)
    }

    /// While reports are taken, the end of a connection is one of the answers.
    pub(super) fn is_found(&mut self, rank: usize, loss: &Loss) -> bool {
        let Some(handover) = &self.handover else {
            return false;
        };
        if handover.stage != Stage::Collecting {
            return false;
        }
        let loss = loss.clone();
        let actions = handover.mailbox.step(Event::Found { rank, loss });
        self.disconnect(rank);
        self.act(actions);
        true
    }

    pub(super) fn act(&mut self, actions: Vec<Action<Notice>>) {
        for action in actions {
            match action {
                Action::Lead => self.lead(),
                Action::Admit { to, start, entries } => {
                    let by = self.me();
                    self.push_to([to], &Push::Succeeded { by, start, entries });
                }
                Action::TurnAway(rank) => {
                    let from = (0..self.members.len()).filter(|other| *other != rank);
                    let why = format!(
                        "rank {} coordinates now, and the others went on without this rank",
                        self.me()
                    );
                    let from = from.collect();
                    self.push_to([rank], &Push::CutOff { from, why });
                    self.leave(rank, Departure::lost(How::PassedOver), false);
                }
                Action::CutOff { from, with } => {
                    let why = apart(&from, self.doubt.is_on_one_host);
                    self.part();
                    for rank in with.into_iter().chain([self.me()]) {
                        let (from, why) = (from.clone(), why.clone());
                        self.push_to([rank], &Push::CutOff { from, why });
                    }
                }
                Action::Deliver(_) | Action::Seek(_) | Action::Collect(_) => {}
            }
        }
    }

    /// Nobody comes in here any more; who waits for that looks elsewhere.
    fn part(&mut self) {
        self.doubt.is_apart = true;
        self.dismiss_newcomers();
    }

    /// This rank decides from now on; what was decided before is known.
    fn lead(&mut self) {
        let Some(handover) = &mut self.handover else {
            return;
        };
        handover.stage = Stage::Leading;
        let (me, mailbox) = (handover.me, Arc::clone(&handover.mailbox));
        for (rank, departure) in mailbox.gone() {
            if matches!(departure, Departure::Lost(_) | Departure::Left) {
                self.disconnect(rank);
            }
            self.service.departed_before(rank, departure);
            self.show(rank);
        }
        self.said.push(Said::Leads(me));
        if let Some((rank, departure)) = self.service.over().cloned() {
            self.push(&Push::Over { rank, departure });
        }
    }

    /// A rank's connection broke, and nobody knows whether the rank lives: this host may be the one that is
    /// cut off. Decides when enough others are there.
    pub(super) fn suspect(&mut self, rank: usize, mut lost: Lost) {
        if self.service.rank(rank).is_closed()
            || self.doubt.suspects.iter().any(|(r, _)| *r == rank)
        {
            return;
        }
        if let Some(silence) = lost.silence_mut()
            && !silence.is_one_way()
        {
            silence.heard = self.speaks_unheard(rank, Instant::now());
        }
        self.disconnect(rank);
        self.doubt.suspects.push((rank, lost));
        self.doubt.present.clear();
        self.beats.number += 1;
        self.doubt.asked = self.beats.number;
        let ping = Push::Ping(self.beats.number);
        let now = Instant::now();
        self.doubt.until = Some(now + SILENCE);
        self.due(now + SILENCE);
        let outlets: Vec<_> = self
            .members
            .iter()
            .filter_map(|member| member.outlet.clone())
            .collect();
        let mut encoded = None;
        for outlet in outlets {
            if matches!(outlet, Outlet::Remote(_)) {
                outlet.push(&ping, &mut encoded);
                self.dirty.push(outlet);
            }
        }
        self.weigh(now);
    }

    /// Whether it can be decided that the suspects are gone, or that it cannot.
    pub(super) fn weigh(&mut self, now: Instant) {
        if self.doubt.suspects.is_empty() {
            return;
        }
        let suspected = |rank: usize| self.doubt.suspects.iter().any(|(r, _)| *r == rank);
        let here = |rank: usize| {
            let outlet = self.members[rank].outlet.as_ref();
            !suspected(rank) && outlet.is_some()
        };
        let local = |rank: usize| matches!(self.members[rank].outlet, Some(Outlet::Local(_)));
        let all = 0..self.members.len();
        let alive = all.clone().filter(|rank| {
            let own = self.service.rank(*rank);
            let gone = own.departure.is_some() && !here(*rank);
            own.has_come() && (!gone || self.doubt.out_of_reach.contains(rank))
        });
        let alive = alive.count();
        let late = self.doubt.until.is_some_and(|until| until <= now);
        let most = all.clone().filter(|rank| here(*rank)).count();
        let answered =
            |rank: &usize| here(*rank) && (local(*rank) || self.doubt.present.contains(rank));
        // A connection that stands so long after something was sent is acknowledged by its kernel.
        let sure = if late {
            most
        } else {
            all.filter(answered).count()
        };
        if is_majority(sure, alive) {
            self.doubt.until = None;
            for (rank, lost) in std::mem::take(&mut self.doubt.suspects) {
                self.doubt.out_of_reach.insert(rank);
                self.leave(rank, Departure::Lost(lost), false);
            }
        } else if !is_majority(most, alive) && (late || sure == most) {
            // All that can be known of the others is known.
            self.doubt.until = None;
            let suspects = std::mem::take(&mut self.doubt.suspects);
            let mut from: Vec<_> = suspects.iter().map(|(rank, _)| *rank).collect();
            from.extend(&self.doubt.out_of_reach);
            from.sort_unstable();
            let why = apart(&from, self.doubt.is_on_one_host);
            if let Some(handover) = &self.handover {
                handover.mailbox.step(Event::Parted);
            }
            self.part();
            self.push(&Push::CutOff {
                from,
                why: why.clone(),
            });
            for (rank, mut lost) in suspects {
                if let Some(silence) = lost.silence_mut() {
                    silence.undecided = Some(why.clone());
                }
                self.leave(rank, Departure::Lost(lost), false);
            }
        }
    }
}

/// What is said of those who are out of reach of a side that may not decide.
pub(super) fn apart(from: &[usize], is_on_one_host: bool) -> String {
    let ranks = super::explain::ranges(from);
    let (who, fault) = match from.len() {
        1 => (format!("rank {ranks}"), "it or this side is at fault"),
        _ => (format!("ranks {ranks}"), "they or this side are at fault"),
    };
    let how = match is_on_one_host {
        true => "on this host one side stands still or did (stopped, frozen, no processor)",
        false => "a partition of the network",
    };
    format!(
        "cut off from {who}: {how}, and the ranks on this side are no majority, so that nobody here can tell \
         whether {fault}"
    )
}
