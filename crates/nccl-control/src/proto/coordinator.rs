//! Leading a term of a generation: orders the log entries for all members, detects unreachable members, and makes the next generation.
//!
//! Each entry waits for one of two conditions:
//!
//! - a majority has answered a beat within the last [`Timing::lease`]: enough for certain knowledge;
//! - a majority has answered a beat that was sent after the doubt arose: for a member that is merely out of reach, because this
//!   side may be the one that is cut off.
//!
//! The next generation is one decision of the members of this one: proposed once, accepted by each of them once, active when a
//! majority has accepted. A later coordinator that finds an accepted proposal proposes the same again.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::core::{Core, Event};
use super::id::{Generation, MemberId, Membership, Peer, SharedMembership, Term, Time};
use super::log::{Entry, Said};
use super::message::{
    Beat, Ended, Exclusion, Frame, Message, Place, Proof, Pulse, Report, Solicit, Wish,
};
use super::mistake::Mistake;
#[cfg(doc)]
use super::timing::Timing;
use crate::departure::{Departure, How, LastCall};

/// The next role of the coordinator's member.
#[derive(Debug)]
pub(super) enum Next {
    /// The next generation is active, for certain not before that time.
    Enter(SharedMembership, Time),
    /// This member takes part no more.
    Out(Exclusion),
    /// Another member coordinates in this term.
    Follow(Term),
    /// This member has to lead in a later term than that one, because a vote was promised for it.
    Stand(Term),
    /// This process has left.
    Left,
}

#[derive(Debug)]
struct Follower {
    heard: Time,
    /// How many turns had passed then.
    turn: u64,
    /// The last beat that it has answered.
    answered: u64,
    /// Whether it follows; until then its vote may still come.
    admitted: bool,
    suspected: bool,
    /// When its session was lost.
    lost: Option<Time>,
    /// Its wish, and until when that is valid.
    wish: Option<(Wish, Time)>,
    /// Whether it was told that the others go on without it.
    told: bool,
}

impl Follower {
    fn new(heard: Time, turn: u64, admitted: bool) -> Self {
        Self {
            heard,
            turn,
            answered: 0,
            admitted,
            suspected: false,
            lost: None,
            wish: None,
            told: false,
        }
    }
}

#[derive(Debug)]
struct SentBeat {
    number: u64,
    at: Time,
    turn: u64,
    answers: usize,
}

/// An entry that waits to be sent to all members.
#[derive(Debug)]
struct Order {
    entry: Entry,
    since: Time,
    /// The beat that a majority has to answer; none where the lease is enough.
    needs: Option<u64>,
}

#[derive(Debug)]
struct Proposal {
    membership: SharedMembership,
    /// Whether another coordinator may have made it active before.
    adopted: bool,
    since: Time,
    accepted: BTreeSet<MemberId>,
}

/// The state of a coordinator; see the module.
#[derive(Debug)]
pub(super) struct Coordinator {
    term: Term,
    followers: BTreeMap<MemberId, Follower>,
    /// The members that are gone without proof, and how many turns had passed when each was last heard.
    unproven: BTreeMap<MemberId, u64>,
    beat: u64,
    /// The beats that were due, without those that were sent between two of them.
    turns: u64,
    next_beat: Time,
    beats: VecDeque<SentBeat>,
    /// The last beat that a majority has answered, and when it was sent.
    confirmed: (u64, Time),
    /// The same, with more than half of the votes: a claim lets this side go on, and does not show what others have decided.
    sure: (u64, Time),
    /// The turn since which every beat has been confirmed. Before that, another coordinator may have led for a while, and given
    /// leases that this one does not know of.
    steady: u64,
    /// How many turns had passed when the last confirmed beat was sent.
    confirmed_turn: u64,
    /// How many beats follow at once, so that members get their lease.
    burst: u32,
    orders: VecDeque<Order>,
    /// Reports of parents about members whose goodbye may be on its way, and until when they wait for that.
    words: Vec<(Time, Ended)>,
    wishes: usize,
    /// The members that go on into no successor, and how many of them have not departed.
    abstaining: BTreeSet<MemberId>,
    abstainers: usize,
    proposal: Option<Proposal>,
    /// A proposal that an earlier coordinator may have made active.
    adopted: Option<SharedMembership>,
    /// Set if there was such a proposal, so that a generation may exist without this member or its followers: none of them gets a lease.
    inherits: bool,
    claims: bool,
    leaving: Option<Time>,
}

/// How many turns may lie between two confirmed beats, and between the last one and a decision.
const GAP: u64 = 2;

/// How many beats are remembered.
const REMEMBERED: usize = 8;

/// How long a leaving coordinator waits until the others know, in nanoseconds.
const FAREWELL: u64 = 1_000_000_000;

impl Coordinator {
    /// Makes the coordinator of a generation that has just become active.
    pub(super) fn of_generation(core: &mut Core) -> Self {
        let now = core.now;
        let mut this = Self::new(core, now, usize::MAX / 2);
        for id in core.others() {
            this.followers.insert(id, Follower::new(now, 0, true));
            if let Some(peer) = core.membership.peer(id) {
                core.links.open(now, id, &peer.at);
            }
            core.links.keep(id, true);
        }
        for ended in core.ends() {
            this.end_is_known(core, &ended);
        }
        this.start(core);
        if !core.joiners.is_empty() {
            core.events.push_back(Event::Joiners(core.joiners.len()));
        }
        this
    }

    /// Makes the coordinator of a later term, with the votes of these members, which were asked for at `since`.
    pub(super) fn recovered(
        core: &mut Core,
        since: Time,
        reports: BTreeMap<MemberId, Report>,
    ) -> Self {
        let now = core.now;
        let living = reports.keys().filter(|id| !core.has_ended(**id)).count();
        let mut this = Self::new(core, since, core.own_vote() + living);
        for id in core.others() {
            if core.log.gone(id).is_some() {
                this.unproven.insert(id, 0);
                continue;
            }
            this.followers.insert(id, Follower::new(now, 0, false));
        }
        core.synced = core.term;
        let mut accepted = core.accepted.clone();
        let mut unheard = BTreeSet::new();
        unheard.extend(core.unheard.iter().cloned());
        for report in reports.values() {
            if let Some(other) = &report.accepted
                && accepted.as_ref().is_none_or(|(term, _)| *term < other.0)
            {
                accepted = Some(other.clone());
            }
            unheard.extend(report.unheard.iter().cloned());
        }
        if !core.mistakes.makes(Mistake::DecisionForgotten) {
            this.adopted = accepted.map(|(_, membership)| membership);
        }
        this.inherits = this.adopted.is_some() && !core.mistakes.makes(Mistake::BoundTestify);
        for ended in core.ends() {
            this.end_is_known(core, &ended);
        }
        for (id, report) in &reports {
            this.admit(core, *id, report);
        }
        if core.mistakes.makes(Mistake::AbstentionForgotten) {
            (this.abstaining, this.abstainers) = (BTreeSet::new(), 0);
        }
        this.invite(core);
        if core.mistakes.makes(Mistake::UnheardForgotten) {
            unheard.clear();
        }
        for said in unheard {
            this.say(core, said);
        }
        this.order_operator(core);
        this.start(core);
        this
    }

    /// Orders the operator's decision for all members, once.
    fn order_operator(&mut self, core: &Core) {
        let is_ordered = |order: &Order| matches!(order.entry, Entry::Operator(_));
        if let Some(word) = core.operator.clone()
            && !core.operator_heard
            && !self.orders.iter().any(is_ordered)
        {
            self.order(core, Entry::Operator(word), None);
        }
    }

    /// Makes a coordinator confirmed by so many votes, its own included, which were asked for at `since`.
    fn new(core: &Core, since: Time, votes: usize) -> Self {
        let sure = match core.is_more_than_half(votes) {
            true => since,
            false => Time::default(),
        };
        Self {
            term: core.term,
            followers: BTreeMap::new(),
            unproven: BTreeMap::new(),
            beat: 0,
            turns: 0,
            next_beat: core.now,
            beats: VecDeque::new(),
            confirmed: (0, since),
            sure: (0, sure),
            steady: 0,
            confirmed_turn: 0,
            burst: 3,
            orders: VecDeque::new(),
            words: Vec::new(),
            wishes: 0,
            abstaining: BTreeSet::new(),
            abstainers: 0,
            proposal: None,
            adopted: None,
            inherits: false,
            claims: false,
            leaving: None,
        }
    }

    fn start(&mut self, core: &mut Core) {
        self.renew(core);
        core.lost = None;
        core.events.push_back(Event::Coordinator(core.id()));
        let observers: Vec<_> = core.observers.keys().copied().collect();
        for id in observers {
            self.inform(core, id);
        }
        self.send_beat(core);
    }

    /// Returns for how many nanoseconds each follower has not been heard.
    pub(super) fn ages(&self, now: Time) -> Vec<(MemberId, u64)> {
        let followers = self.followers.iter();
        let admitted = followers.filter(|(_, follower)| follower.admitted);
        admitted
            .map(|(id, follower)| (*id, now.since(follower.heard)))
            .collect()
    }

    /// Renews its own lease.
    fn renew(&self, core: &mut Core) {
        if !self.inherits {
            core.lease.renew(self.sure.1);
            core.count_ends_before(self.sure.1);
        }
    }

    /// About how many bytes it has beside itself.
    pub(super) fn size(&self) -> usize {
        self.followers.len() * size_of::<(MemberId, Follower)>()
    }

    /// Whether a majority has answered within the lease.
    pub(super) fn is_current(&self, core: &Core) -> bool {
        core.now <= self.confirmed.1.after(core.timing.lease)
    }

    // --- beats ---

    fn send_beat(&mut self, core: &mut Core) {
        self.beat += 1;
        let late = core.now.since(self.next_beat) > core.timing.beat;
        self.next_beat = core.now.after(core.timing.beat);
        self.beats.push_back(SentBeat {
            number: self.beat,
            at: core.now,
            turn: self.turns,
            answers: 0,
        });
        if self.beats.len() > REMEMBERED {
            self.beats.pop_front();
        }
        let (generation, term) = (core.generation(), self.term);
        let confirmed = if self.inherits { 0 } else { self.sure.0 };
        for (&id, follower) in &mut self.followers {
            if !follower.admitted {
                continue;
            }
            let beat = Beat {
                generation,
                term,
                number: self.beat,
                answered: follower.answered,
                confirmed,
            };
            core.links.send_now(id, Frame::Beat(beat));
            let silent = core.now.since(follower.heard);
            if silent >= core.timing.suspect
                && !late
                && !std::mem::replace(&mut follower.suspected, true)
            {
                core.events.push_back(Event::Suspected(id, silent));
            }
        }
        for id in core.observers.keys() {
            let beat = Beat {
                generation,
                term,
                number: self.beat,
                answered: 0,
                confirmed,
            };
            core.links.send_now(*id, Frame::Beat(beat));
        }
        self.confirm(core);
    }

    /// Finds the last beat that a majority has answered.
    fn confirm(&mut self, core: &mut Core) {
        let mute = match core.mistakes.makes(Mistake::MuteVotes) {
            true => self
                .followers
                .keys()
                .filter(|id| core.links.is_ready(**id))
                .count(),
            false => 0,
        };
        let me = core.id();
        let answered = |number: u64| {
            let followers = &self.followers;
            move |id: MemberId| {
                id == me
                    || followers
                        .get(&id)
                        .is_some_and(|follower| follower.answered >= number)
            }
        };
        let own = core.own_vote();
        let votes = |beat: &SentBeat| own + beat.answers.max(mute);
        let sure = self
            .beats
            .iter()
            .rev()
            .find(|beat| core.is_more_than_half(votes(beat)));
        if let Some(beat) = sure
            && beat.number > self.sure.0
        {
            self.sure = (beat.number, beat.at.max(self.sure.1));
            self.renew(core);
        }
        let mut beats = self.beats.iter().rev();
        let confirmed =
            beats.find(|beat| core.is_majority(votes(beat), self.term, answered(beat.number)));
        if let Some(beat) = confirmed
            && beat.number > self.confirmed.0
        {
            self.confirmed = (beat.number, beat.at.max(self.confirmed.1));
            let turn = std::mem::replace(&mut self.confirmed_turn, beat.turn);
            if beat.turn - turn > GAP && !core.mistakes.makes(Mistake::GapForgotten) {
                self.steady = self.turns;
            }
            if self.burst > 0 {
                self.burst -= 1;
                self.send_beat(core);
            }
        }
    }

    pub(super) fn pulse(&mut self, core: &mut Core, from: MemberId, pulse: Pulse) -> Option<Next> {
        if pulse.term != self.term || pulse.generation != core.generation() {
            return None;
        }
        if pulse.progress {
            core.progress = Some(core.now);
        }
        self.hear(core, from);
        // A member that has said goodbye votes no more.
        let is_vote = !core.has_ended(from);
        let follower = self.followers.get_mut(&from).filter(|_| is_vote)?;
        for beat in &mut self.beats {
            if beat.number <= pulse.number && beat.number > follower.answered {
                beat.answers += 1;
            }
        }
        follower.answered = follower.answered.max(pulse.number);
        self.confirm(core);
        self.settle(core)
    }

    fn hear(&mut self, core: &mut Core, from: MemberId) {
        if let Some(follower) = self.followers.get_mut(&from) {
            (follower.heard, follower.turn) = (core.now, self.turns);
            if std::mem::take(&mut follower.suspected) {
                core.events.push_back(Event::Heard(from));
            }
        }
    }

    /// Whether a member has not answered for so long that its lease has run out.
    ///
    /// Its lease may come from another coordinator, which it has promised its vote to after its last answer here. That coordinator had a
    /// majority for a moment, so that this one had none then: not longer than [`GAP`] if the beats were confirmed since.
    fn is_silent(&self, core: &Core, id: MemberId) -> bool {
        if core.mistakes.makes(Mistake::LeftOutEarly) {
            return true;
        }
        let follower = self.followers.get(&id).map(|follower| follower.turn);
        let heard = follower.or_else(|| self.unproven.get(&id).copied());
        heard.is_none_or(|turn| self.turns - turn.max(self.steady) > core.timing.silent_beats)
    }

    /// Asks the members that do not follow yet. A member that cannot be reached is doubted when its session is lost.
    fn invite(&mut self, core: &mut Core) {
        let ended = core.ends();
        let all = self.followers.iter();
        let absent = all.filter(|(id, follower)| !follower.admitted && !core.is_out(**id));
        let absent: Vec<_> = absent.map(|(id, _)| *id).collect();
        for id in absent {
            if core.links.is_ready(id) || !core.links.is_there(id) {
                let (term, ended) = (self.term, ended.clone());
                let (mute, leads) = (false, true);
                core.reach(
                    id,
                    Message::Solicit(Solicit {
                        term,
                        ended,
                        mute,
                        leads,
                    }),
                );
                core.links.keep(id, true);
            }
        }
    }

    // --- received messages ---

    pub(super) fn message(
        &mut self,
        core: &mut Core,
        from: MemberId,
        message: Message,
    ) -> Option<Next> {
        self.hear(core, from);
        if self.leaving.is_some() {
            return self.settle(core);
        }
        match message {
            Message::Vote { report, .. } => {
                if report.promised > self.term && core.log.gone(from).is_none() {
                    return Some(self.stand(core, report.promised));
                }
                self.admit(core, from, &report);
            }
            Message::Say(said) => self.say(core, said),
            Message::Tell { from, to, bytes } if to == core.id() => {
                core.events.push_back(Event::Told(from, bytes));
            }
            Message::Tell { from, to, bytes } => core.send(to, Message::Tell { from, to, bytes }),
            Message::Testify(ended) if self.may_have_said_goodbye(core, &ended) => {
                self.words.push((core.now.after(core.timing.word), ended));
            }
            Message::Testify(mut ended) => {
                ended.counts |= core.is_current();
                self.end_is_known(core, &ended);
            }
            Message::Ask(bytes) => {
                let follower = self.followers.get(&from);
                if follower.is_some_and(|follower| follower.admitted)
                    || core.observers.contains_key(&from)
                {
                    core.events.push_back(Event::Asked(from, bytes));
                }
            }
            Message::Abstain => self.abstains(core, from),
            Message::GoOn(wish) if core.membership.rank_of(from).is_some() => {
                if let Some(follower) = self.followers.get_mut(&from)
                    && !self.abstaining.contains(&from)
                {
                    // Wishes of the other members are on their way, too, when a coordinator is new.
                    let until = core.now.after(wish.patience.max(core.timing.suspect));
                    if follower.wish.replace((wish, until)).is_none() {
                        self.wishes += 1;
                    }
                }
            }
            Message::StayHere(number) => {
                if let Some(follower) = self.followers.get_mut(&from)
                    && follower
                        .wish
                        .take_if(|(wish, _)| wish.number == number)
                        .is_some()
                {
                    self.wishes -= 1;
                }
            }
            Message::Leave(_) if !core.membership.votes(from) => {
                forget_joiner(core, from);
                core.observers.remove(&from);
                core.links.acknowledge(from);
                core.links.keep(from, false);
            }
            Message::Leave(departure) => self.goodbye(core, from, departure),
            Message::Released => {
                let after = self.waited(core);
                self.goodbye(core, from, Departure::lost(How::LeftBehind { after }));
            }
            Message::Join {
                peer,
                seat: Place::Joiner,
            } => {
                core.links.keep(from, true);
                core.joiners.insert(from, peer);
                core.events.push_back(Event::Joiners(core.joiners.len()));
            }
            Message::Observe(peer) => self.observe(core, from, peer),
            Message::Accepted { term, generation } => {
                if let Some(proposal) = &mut self.proposal
                    && term == self.term
                    && proposal.membership.generation == generation
                {
                    proposal.accepted.insert(from);
                }
            }
            Message::Follows { term, leads } if term > self.term => {
                return Some(match leads {
                    true => Next::Follow(term),
                    false => self.stand(core, term),
                });
            }
            Message::Operator(word) if word.generation == core.generation() => {
                // The decision counts before it is in the log: without it, no entry can be sent.
                core.operator.get_or_insert_with(|| Arc::new(word));
                self.order_operator(core);
            }
            _ => {}
        }
        self.settle(core)
    }

    /// Handles that a member does not know of this generation.
    pub(super) fn is_behind(&mut self, core: &mut Core, from: MemberId) {
        if !core.membership.votes(from) {
            return;
        }
        let membership = Arc::clone(&core.membership);
        core.send(from, Message::Ahead(membership));
        let (term, start) = (self.term, 0);
        let entries = core.log.since(0);
        let message = match entries.filter(|_| self.followers.contains_key(&from)) {
            Some(entries) => Message::Lead {
                term,
                start,
                entries,
            },
            None => Message::TurnAway(Exclusion::PassedOver(core.id())),
        };
        core.send(from, message);
    }

    /// Handles a vote promised for a later term. A coordinator that has a majority leads it in a still later one.
    pub(super) fn stand(&self, core: &Core, term: Term) -> Next {
        match self.is_current(core) && !core.said_goodbye {
            true => Next::Stand(term),
            false => Next::Follow(term),
        }
    }

    /// Records that a member goes on into no successor: it counts as one that agrees to be left out. It has no lease any more.
    fn abstains(&mut self, core: &Core, id: MemberId) {
        if core.membership.rank_of(id).is_none() || !self.abstaining.insert(id) {
            return;
        }
        self.abstainers += usize::from(core.log.gone(id).is_none());
        if let Some(follower) = self.followers.get_mut(&id) {
            self.wishes -= usize::from(follower.wish.take().is_some());
        }
    }

    /// Returns for how long the members that go on have waited for the others.
    fn waited(&self, core: &Core) -> Duration {
        let shortest = core.timing.suspect;
        let wishes = self.followers.values().filter_map(|follower| follower.wish);
        let wishes = wishes.map(|(wish, until)| Time(until.0 - wish.patience.max(shortest)));
        let first = wishes.chain(core.wish.map(|(_, since)| since)).min();
        Duration::from_nanos(core.now.since(first.unwrap_or(core.now)))
    }

    fn goodbye(&mut self, core: &mut Core, from: MemberId, departure: Departure) {
        if from != core.id() {
            let (member, proof, counts) = (from, Proof::Goodbye(departure), true);
            let ended = Ended {
                member,
                proof,
                counts,
            };
            return self.end_is_known(core, &ended);
        }
        let entry = Entry::Gone {
            member: from,
            departure,
            proven: true,
        };
        self.order(core, entry, None);
    }

    /// Whether it has told all that it leaves.
    pub(super) fn is_leaving(&self) -> bool {
        self.leaving.is_some()
    }

    fn observe(&mut self, core: &mut Core, from: MemberId, peer: Peer) {
        core.links.keep(from, true);
        core.observers.insert(from, peer);
        self.inform(core, from);
    }

    /// Tells an observer that this member leads, and sends it the log.
    fn inform(&self, core: &mut Core, to: MemberId) {
        let (term, membership) = (self.term, Arc::clone(&core.membership));
        core.send(to, Message::Leads { term, membership });
        let (start, entries) = (core.log.first(), core.log.part().entries);
        let lead = Message::Lead {
            term,
            start,
            entries,
        };
        core.send(to, lead);
    }

    pub(super) fn say(&mut self, core: &mut Core, said: Arc<Said>) {
        let is_waiting =
            |order: &Order| matches!(&order.entry, Entry::Said(other) if *other == said);
        if !core.log.has(&said) && !self.orders.iter().any(is_waiting) {
            self.order(core, Entry::Said(said), None);
        }
    }

    /// Whether a parent's report may have overtaken a goodbye.
    fn may_have_said_goodbye(&self, core: &Core, ended: &Ended) -> bool {
        let id = ended.member;
        let is_word = matches!(ended.proof, Proof::Parent(_));
        is_word && self.followers.contains_key(&id) && core.links.is_ready(id) && !core.is_out(id)
    }

    /// Applies the parents' reports that have waited long enough.
    fn take_words(&mut self, core: &mut Core) {
        let is_due = |(until, ended): &mut (Time, Ended)| {
            *until <= core.now || !core.links.is_ready(ended.member)
        };
        let due: Vec<_> = self.words.extract_if(.., is_due).collect();
        for (_, mut ended) in due {
            ended.counts |= core.is_current();
            self.end_is_known(core, &ended);
        }
    }

    /// Handles the certain end of a process.
    pub(super) fn end_is_known(&mut self, core: &mut Core, ended: &Ended) {
        // The others may have gone on as soon as they learned that this member leaves.
        if self.leaving.is_some() {
            return;
        }
        let id = ended.member;
        let known = self.words.iter().position(|(_, word)| word.member == id);
        let known = known.map(|at| self.words.swap_remove(at).1);
        let ended = match known {
            // The parent's report is more specific.
            Some(word) if ended.proof == Proof::Kernel => {
                let counts = ended.counts | word.counts;
                &Ended { counts, ..word }
            }
            _ => ended,
        };
        core.learn_end(ended);
        // It is no vote any more, whatever it has answered.
        if let Some(follower) = self.followers.get_mut(&id) {
            let answered = std::mem::take(&mut follower.answered);
            for beat in self.beats.iter_mut().filter(|beat| beat.number <= answered) {
                beat.answers -= 1;
            }
        }
        if id == core.id() || !core.membership.votes(id) || core.log.gone(id).is_some() {
            return;
        }
        // A doubt about it is settled.
        self.orders
            .retain(|order| !(order.needs.is_some() && gone(&order.entry) == Some(id)));
        let pid = core.membership.peer(id).map_or(0, |peer| peer.pid);
        let departure = ended.proof.departure(pid);
        let proven = true;
        self.order(
            core,
            Entry::Gone {
                member: id,
                departure,
                proven,
            },
            None,
        );
    }

    /// Handles that the program of this member leaves.
    pub(super) fn leave(&mut self, core: &mut Core, departure: Departure) -> Option<Next> {
        let me = core.id();
        self.goodbye(core, me, departure);
        self.settle(core)
    }

    /// Handles a lost session.
    pub(super) fn lost(&mut self, core: &mut Core, id: MemberId) -> Option<Next> {
        forget_joiner(core, id);
        core.observers.remove(&id);
        if let Some(follower) = self.followers.get_mut(&id) {
            // Messages on their way in both directions are lost with it.
            (follower.lost, follower.admitted) = (Some(core.now), false);
            self.wishes -= usize::from(follower.wish.take().is_some());
            if core.mistakes.makes(Mistake::ClosedIsDead) {
                let (member, proof, counts) = (id, Proof::Kernel, true);
                self.end_is_known(
                    core,
                    &Ended {
                        member,
                        proof,
                        counts,
                    },
                );
            } else {
                self.doubt(core);
            }
        }
        self.settle(core)
    }

    /// Handles that the peer has begun another session: it follows once it has been asked again.
    pub(super) fn renewed(&mut self, core: &mut Core, id: MemberId) -> Option<Next> {
        if let Some(follower) = self.followers.get_mut(&id) {
            follower.admitted = false;
            self.wishes -= usize::from(follower.wish.take().is_some());
            core.links.keep(id, true);
        }
        self.settle(core)
    }

    /// Asks for a majority without the unreachable members, unless NCCL reaches them.
    fn doubt(&mut self, core: &mut Core) {
        if core.progresses() {
            return;
        }
        let waits = |id: MemberId| {
            self.orders
                .iter()
                .any(|order| gone(&order.entry) == Some(id))
        };
        let lost = self
            .followers
            .iter()
            .filter(|(id, follower)| follower.lost.is_some() && !core.is_out(**id) && !waits(**id));
        let lost: Vec<_> = lost.map(|(id, follower)| (*id, follower.heard)).collect();
        if lost.is_empty() {
            return;
        }
        let needs = Some(self.beat + 1);
        for (member, heard) in lost {
            let departure = core.unreachable(member, heard, core.now.since(heard));
            let proven = false;
            self.order(
                core,
                Entry::Gone {
                    member,
                    departure,
                    proven,
                },
                needs,
            );
        }
        self.send_beat(core);
    }

    /// Lets the voter follow if the log here continues the log of its report.
    fn admit(&mut self, core: &mut Core, from: MemberId, report: &Report) {
        for ended in &report.ended {
            if core.learn_end(ended) {
                self.end_is_known(core, ended);
            }
        }
        let is_gone = core.log.gone(from).is_some() || !core.membership.votes(from);
        let continues =
            core.log.continues(&report.log) || core.mistakes.makes(Mistake::DivergentFollows);
        if report.abstains {
            self.abstains(core, from);
        }
        let start = report.log.end().min(core.log.end());
        let entries = core.log.since(start).filter(|_| continues && !is_gone);
        let Some(entries) = entries else {
            core.send(from, Message::TurnAway(Exclusion::PassedOver(core.id())));
            return;
        };
        let now = core.now;
        let follower = self
            .followers
            .entry(from)
            .or_insert_with(|| Follower::new(now, self.turns, false));
        (follower.heard, follower.turn) = (now, self.turns);
        (follower.lost, follower.admitted, follower.told) = (None, true, false);
        // A doubted member is reachable again.
        self.orders
            .retain(|order| !(order.needs.is_some() && gone(&order.entry) == Some(from)));
        let term = self.term;
        let lead = Message::Lead {
            term,
            start,
            entries,
        };
        core.reach(from, lead);
        core.links.keep(from, true);
        for said in &report.unheard {
            self.say(core, Arc::clone(said));
        }
        if let Some(proposal) = &self.proposal {
            let membership = Arc::clone(&proposal.membership);
            core.send(from, Message::Propose { term, membership });
        }
    }

    // --- entries for all members ---

    fn order(&mut self, core: &Core, mut entry: Entry, needs: Option<u64>) {
        let since = core.now;
        if let Entry::Gone {
            member,
            departure: Departure::Lost(lost),
            ..
        } = &mut entry
            && let Some((at, call)) = core.calls.get(member)
        {
            let before = Duration::from_nanos(since.since(*at));
            let call = call.clone();
            lost.last_call.get_or_insert(LastCall { call, before });
        }
        self.orders.push_back(Order {
            entry,
            since,
            needs,
        });
    }

    /// Sends the entries that may be sent. None while a successor is proposed: its members have to have received the same entries.
    fn tell(&mut self, core: &mut Core) {
        if self.proposal.is_some() || self.adopted.is_some() || self.leaving.is_some() {
            return;
        }
        let mut waiting = VecDeque::new();
        while let Some(order) = self.orders.pop_front() {
            let is_ready = match order.needs {
                None => self.is_current(core),
                Some(number) => self.confirmed.0 >= number,
            };
            if !is_ready && !core.mistakes.makes(Mistake::WakesAndSpeaks) {
                waiting.push_back(order);
                continue;
            }
            if gone(&order.entry).is_some_and(|id| core.log.gone(id).is_some()) {
                continue;
            }
            self.append(core, order.entry);
            if self.leaving.is_some() {
                break;
            }
        }
        self.orders.append(&mut waiting);
    }

    fn append(&mut self, core: &mut Core, entry: Entry) {
        let entry = Arc::new(entry);
        let at = core.log.end();
        core.deliver(Arc::clone(&entry));
        let (generation, term) = (core.generation(), self.term);
        let admitted = self
            .followers
            .iter()
            .filter(|(_, follower)| follower.admitted);
        for &id in admitted.map(|(id, _)| id).chain(core.observers.keys()) {
            let entry = Arc::clone(&entry);
            let append = Message::Append { term, at, entry };
            core.links.send(id, generation, append);
        }
        if let Entry::Gone { member, proven, .. } = &*entry {
            if *member == core.id() {
                self.leaving = Some(core.now);
            }
            self.abstainers -= usize::from(self.abstaining.contains(member));
            if let Some(follower) = self.followers.remove(member) {
                core.links.keep(*member, false);
                self.wishes -= usize::from(follower.wish.is_some());
                if !proven {
                    self.unproven.insert(*member, follower.turn);
                }
            }
        }
    }

    /// Does what has become possible.
    pub(super) fn settle(&mut self, core: &mut Core) -> Option<Next> {
        self.take_words(core);
        self.confirm(core);
        self.tell(core);
        if let Some(since) = self.leaving {
            let all = self.followers.keys().all(|id| core.links.is_flushed(*id));
            let next = match core.leaving {
                Some(_) => Next::Left,
                // The others go on without it. Which of them proposes that generation is open.
                None => Next::Out(Exclusion::LeftBehind(Generation {
                    number: core.generation() + 1,
                    proposer: core.id(),
                })),
            };
            return (all || core.now.since(since) >= FAREWELL).then_some(next);
        }
        self.consider(core).or_else(|| self.give_up(core))
    }

    /// Gives up if no majority has answered for too long.
    fn give_up(&mut self, core: &mut Core) -> Option<Next> {
        let orders = self.orders.front().map(|order| order.since);
        let proposal = self.proposal.as_ref().map(|proposal| proposal.since);
        let since = orders.into_iter().chain(proposal).min()?;
        if core.now.since(since) < core.timing.confirm || core.progresses() {
            return None;
        }
        let me = core.id();
        let answers = |id: &MemberId| {
            let follower = &self.followers[id];
            follower.admitted && core.now.since(follower.heard) < core.timing.suspect
        };
        let reached: BTreeSet<_> = self.followers.keys().copied().filter(answers).collect();
        if self.claim(core) {
            return None;
        }
        let limit = match &self.proposal {
            // A majority answers: the wait is for the silence of the members that have not accepted.
            Some(_) if self.is_current(core) => core.timing.give_up,
            _ => (2 * core.timing.confirm).max(core.timing.give_up / 2),
        };
        if core.now.since(since) < limit {
            return None;
        }
        let all = core.others();
        let unreached = all
            .into_iter()
            .filter(|id| !reached.contains(id) && core.is_apart(*id));
        let why = Exclusion::NoMajority {
            reached: 1 + reached.len() as u32,
            of: core.electorate() as u32,
            unreached: unreached.filter(|id| *id != me).collect(),
        };
        let (generation, term) = (core.generation(), self.term);
        for id in self.followers.keys().chain(core.observers.keys()) {
            let why = why.clone();
            let cut_off = Message::CutOff { term, why };
            core.links.send(*id, generation, cut_off);
        }
        Some(Next::Out(why))
    }

    // --- the next generation ---

    /// Handles a wish of this member's program to go on, or its end.
    pub(super) fn own_wish(&mut self, core: &mut Core) -> Option<Next> {
        self.settle(core)
    }

    fn consider(&mut self, core: &mut Core) -> Option<Next> {
        if self.proposal.is_some() {
            let is_accepted = self.is_accepted(core) || core.mistakes.makes(Mistake::ActiveAlone);
            return is_accepted.then(|| self.activate(core)).flatten();
        }
        if let Some(membership) = self.adopted.take() {
            return self.propose(core, membership, true);
        }
        let own = core
            .wish
            .map(|(wish, since)| (wish, since.after(wish.patience)));
        if self.wishes == 0 && own.is_none() {
            return None;
        }
        // A proposal without a majority would bind members to it in vain.
        if !self.is_current(core) {
            self.wait_for_majority(core);
            return None;
        }
        let all = core.membership.members.len();
        let deadline = self
            .followers
            .values()
            .filter_map(|follower| follower.wish.map(|(_, until)| until));
        let complete = self.wishes + self.abstainers + core.departed;
        let is_complete = complete + usize::from(own.is_some() || core.abstains) >= all;
        if !is_complete {
            let deadline = deadline.chain(own.map(|(_, until)| until)).min()?;
            if core.now < deadline {
                return None;
            }
        }
        let me = core.id();
        let wishing = self
            .followers
            .iter()
            .filter(|(_, follower)| follower.wish.is_some());
        let mut wishing: BTreeSet<_> = wishing.map(|(id, _)| *id).collect();
        wishing.extend(own.map(|_| me));
        let before = Arc::clone(&core.membership);
        let members = before.members.iter().map(|peer| peer.id);
        let missing: Vec<_> = members
            .filter(|id| !wishing.contains(id) && !core.is_out(*id))
            .filter(|id| !self.abstaining.contains(id) && (*id != me || !core.abstains))
            .collect();
        if !missing.is_empty() {
            let wishes = self.followers.values().filter_map(|follower| follower.wish);
            let mut wishes = wishes.chain(own);
            if !wishes.all(|(wish, _)| wish.leaves_behind) {
                self.refuse_wishes(core, &missing);
                return None;
            }
            if missing.contains(&me) {
                return self.step_aside(core);
            }
            for id in &missing {
                if let Some(follower) = self.followers.get_mut(id)
                    && !std::mem::replace(&mut follower.told, true)
                {
                    core.send(*id, Message::LeaveBehind);
                }
            }
        }
        if core.abstains {
            return self.step_aside(core);
        }
        let unproven = before.voters().map(|peer| peer.id);
        let unproven =
            unproven.filter(|id| core.log.gone(*id) == Some(false) && !core.has_ended(*id));
        // A witness that does not follow may have received other entries.
        let follows = |id: &MemberId| {
            let follower = self.followers.get(id);
            follower.is_some_and(|follower| follower.admitted)
        };
        let witnesses = before.witnesses.iter().map(|peer| peer.id);
        let strange = witnesses.filter(|id| !follows(id) && !core.has_ended(*id));
        if !unproven
            .chain(missing.iter().copied())
            .chain(strange)
            .all(|id| self.abstaining.contains(&id) || self.is_silent(core, id))
        {
            return None;
        }
        let kept = before
            .members
            .iter()
            .filter(|peer| wishing.contains(&peer.id) && !core.is_out(peer.id));
        let mut kept: Vec<_> = kept.cloned().collect();
        let ready = core
            .joiners
            .iter()
            .filter(|(id, _)| core.links.is_ready(**id));
        for (_, joiner) in ready {
            kept.push(joiner.clone());
        }
        let generation = Generation {
            number: core.generation() + 1,
            proposer: me,
        };
        let witnesses = before.witnesses.iter();
        let witnesses = witnesses.filter(|peer| follows(&peer.id) && !core.is_out(peer.id));
        let membership = Membership::new(generation, kept, witnesses.cloned().collect());
        self.propose(core, Arc::new(membership), false)
    }

    /// Leaves, because the others go on without this member: it cannot lead them.
    fn step_aside(&mut self, core: &mut Core) -> Option<Next> {
        let (me, after) = (core.id(), self.waited(core));
        self.goodbye(core, me, Departure::lost(How::LeftBehind { after }));
        self.tell(core);
        None
    }

    /// Whether the proposal may become active.
    ///
    /// A member that has not accepted it may count the ends of those that have, as long as its lease runs. So all members that go on have
    /// accepted, have ended, or are silent for longer than a lease; and only members that were heard since then are votes.
    fn is_accepted(&self, core: &Core) -> bool {
        let Some(proposal) = &self.proposal else {
            return false;
        };
        let me = core.id();
        let lately = GAP * core.timing.beat;
        let is_steady =
            self.turns - self.confirmed_turn <= GAP && core.now.since(self.confirmed.1) <= lately;
        if !is_steady && !core.mistakes.makes(Mistake::GapForgotten) {
            return false;
        }
        let is_vote = |id: &MemberId| {
            let heard = self.followers.get(id);
            let heard = heard.is_some_and(|heard| core.now.since(heard.heard) < lately);
            let is_own = *id == me && core.own_vote() == 1;
            is_own || (*id != me && heard && core.membership.votes(*id) && !core.has_ended(*id))
        };
        let votes: BTreeSet<_> = proposal.accepted.iter().filter(|id| is_vote(id)).collect();
        let mut others = proposal.membership.voters().map(|peer| peer.id);
        let all = others.all(|id| {
            // A new member needs its lease as well, and gets a moment for it.
            let is_new = !core.membership.votes(id);
            let waited = core.now.since(proposal.since) >= core.timing.grace;
            (is_new && (waited || !core.links.is_ready(id)))
                || proposal.accepted.contains(&id)
                || core.has_ended(id)
                || (!is_new && self.is_silent(core, id))
        });
        all && core.is_majority(votes.len(), self.term, |id| votes.contains(&id))
    }

    /// Handles the absence of a majority: a claim may replace it, and the wishes do not wait for ever.
    fn wait_for_majority(&mut self, core: &mut Core) {
        let wishes = self.followers.values();
        let wishes = wishes.filter_map(|follower| follower.wish.map(|(_, until)| until));
        let own = core.wish.map(|(wish, since)| since.after(wish.patience));
        let Some(deadline) = wishes.chain(own).min() else {
            return;
        };
        let late = core.now.since(deadline);
        if late >= core.timing.confirm {
            let mut missing = core.others();
            missing.retain(|id| !core.is_out(*id) && !self.abstaining.contains(id));
            self.refuse_wishes(core, &missing);
        } else if core.now >= deadline {
            self.claim(core);
        }
    }

    /// Asks for the decision between two halves, once.
    fn claim(&mut self, core: &mut Core) -> bool {
        let answers = |follower: &&Follower| {
            follower.admitted && core.now.since(follower.heard) < core.timing.suspect
        };
        let reached = 1 + self.followers.values().filter(answers).count();
        let claims = core.is_half(reached) && !std::mem::replace(&mut self.claims, true);
        if claims {
            let generation = core.membership.generation;
            core.events.push_back(Event::Claim(generation));
        }
        claims
    }

    fn refuse_wishes(&mut self, core: &mut Core, missing: &[MemberId]) {
        for (id, follower) in &mut self.followers {
            follower.told = false;
            if let Some((wish, _)) = follower.wish.take() {
                let (wish, missing) = (wish.number, missing.to_vec());
                core.send(*id, Message::NoSuccessor { wish, missing });
            }
        }
        self.wishes = 0;
        if core.wish.take().is_some() {
            core.events.push_back(Event::NoSuccessor(missing.to_vec()));
        }
    }

    fn propose(
        &mut self,
        core: &mut Core,
        membership: SharedMembership,
        adopted: bool,
    ) -> Option<Next> {
        let me = core.id();
        core.accept(self.term, &membership);
        let others = core
            .membership
            .voters()
            .chain(&membership.members)
            .map(|peer| peer.id);
        let others: BTreeSet<_> = others.filter(|id| *id != me).collect();
        for id in others {
            let (term, membership) = (self.term, Arc::clone(&membership));
            core.send(id, Message::Propose { term, membership });
        }
        self.proposal = Some(Proposal {
            membership,
            adopted,
            since: core.now,
            accepted: BTreeSet::from([me]),
        });
        self.consider(core)
    }

    fn activate(&mut self, core: &mut Core) -> Option<Next> {
        let Proposal {
            membership,
            adopted,
            accepted,
            ..
        } = self.proposal.take()?;
        let me = core.id();
        for id in membership
            .voters()
            .map(|peer| peer.id)
            .filter(|id| *id != me)
        {
            let activate = Message::Activate {
                membership: Arc::clone(&membership),
                accepted: accepted.contains(&id),
            };
            core.reach_in(&membership, id, activate);
        }
        for id in core
            .others()
            .into_iter()
            .filter(|id| !membership.votes(*id))
        {
            core.send(id, Message::Ahead(Arc::clone(&membership)));
        }
        let lease = match adopted {
            false => core.now,
            true if core.consents_in_time => core.consented,
            true => Time::default(),
        };
        Some(Next::Enter(membership, lease))
    }

    // --- time ---

    pub(super) fn next_timeout(&self, core: &Core) -> Time {
        let own = core.wish.map(|(wish, since)| since.after(wish.patience));
        let wishes = match self.wishes {
            0 => None,
            _ => self
                .followers
                .values()
                .filter_map(|follower| follower.wish.map(|(_, until)| until))
                .min(),
        };
        let words = self.words.iter().map(|(until, _)| *until);
        let due = own
            .into_iter()
            .chain(wishes)
            .chain(words)
            .filter(|until| *until > core.now);
        due.chain([self.next_beat]).min().unwrap_or(self.next_beat)
    }

    pub(super) fn timeout(&mut self, core: &mut Core) -> Option<Next> {
        if self.next_beat <= core.now {
            self.turns += 1;
            if self.leaving.is_some() {
                self.next_beat = core.now.after(core.timing.beat);
                return self.settle(core);
            }
            self.send_beat(core);
            self.doubt(core);
            self.invite(core);
        }
        self.settle(core)
    }
}

fn forget_joiner(core: &mut Core, id: MemberId) {
    if core.joiners.remove(&id).is_some() {
        core.events.push_back(Event::Joiners(core.joiners.len()));
    }
}

/// Returns the member that departs with an entry.
fn gone(entry: &Entry) -> Option<MemberId> {
    match entry {
        Entry::Gone { member, .. } => Some(*member),
        Entry::Said(_) | Entry::Operator(_) => None,
    }
}
