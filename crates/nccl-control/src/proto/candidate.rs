//! A failover: one member asks the others for their votes, and coordinates once a majority has voted for it.

use std::collections::{BTreeMap, BTreeSet};

use super::coordinator::{Coordinator, Transition};
use super::core::Core;
use super::id::{MemberId, Term, Time};
use super::link::Links;
use super::message::{Ended, Exclusion, Message, Proof, VoteReport, VoteRequest};
use super::mistake::Mistake;

/// The state of a candidate; see the module.
#[derive(Debug)]
pub(super) struct Candidate {
    term: Term,
    /// The time at which it became a candidate.
    since: Time,
    /// The time at which it first asked for votes in this term.
    asked: Time,
    votes: BTreeMap<MemberId, VoteReport>,
    /// The time since which it has the votes of a majority.
    majority_since: Option<Time>,
    next_try: Time,
    unresponsive: bool,
    /// Whether it already coordinates a majority, and must coordinate in a later term because a vote was promised for
    /// one.
    already_coordinates: bool,
    /// The half for which it has made a claim.
    claimed: BTreeSet<MemberId>,
}

/// The result of a candidacy.
pub(super) enum Outcome {
    Coordinates(Box<Coordinator>),
    Stops(Transition),
    /// Gives up this candidacy, so that others can try.
    Waits,
}

impl Candidate {
    /// With `unresponsive`, the coordinator answers nothing, although its process may be alive.
    pub(super) fn start(core: &mut Core, unresponsive: bool, already_coordinates: bool) -> Self {
        let mut this = Self {
            term: core.term,
            since: core.now,
            asked: core.now,
            votes: BTreeMap::new(),
            majority_since: None,
            next_try: core.now,
            unresponsive,
            already_coordinates,
            claimed: BTreeSet::new(),
        };
        this.start_next_term(core);
        this
    }

    /// Starts a term later than all known terms.
    fn start_next_term(&mut self, core: &mut Core) {
        let round = match core.mistakes.makes(Mistake::RoundReused) {
            true => 1,
            false => core.term.round + 1,
        };
        let coordinator = core.id();
        core.term = Term { round, coordinator };
        (self.term, self.asked, self.majority_since) = (core.term, core.now, None);
        self.votes.clear();
        self.request_votes(core, may_ask);
    }

    pub(super) fn term(&self) -> Term {
        self.term
    }

    fn awaited(&self, core: &Core) -> Vec<MemberId> {
        let others = core.others().into_iter();
        others
            .filter(|id| !self.votes.contains_key(id) && !core.is_departed(*id))
            .collect()
    }

    /// Asks the voters that have not voted and whose links satisfy `may_ask`.
    fn request_votes(&mut self, core: &mut Core, may_ask: fn(&Links, MemberId) -> bool) {
        self.next_try = core.now.after(core.timing.heartbeat_interval);
        let ended = core.known_ends();
        for id in self.awaited(core) {
            if may_ask(&core.links, id) {
                let (term, ended) = (self.term, ended.clone());
                let (unresponsive, already_coordinates) =
                    (self.unresponsive, self.already_coordinates);
                core.reach(
                    id,
                    Message::RequestVote(VoteRequest {
                        term,
                        ended,
                        unresponsive,
                        already_coordinates,
                    }),
                );
            }
        }
    }

    pub(super) fn vote(&mut self, core: &mut Core, from: MemberId, term: Term, report: VoteReport) {
        if term == self.term
            && core.membership.votes(from)
            && core.log.departure_proven(from).is_none()
        {
            for ended in &report.ended {
                core.learn_end(ended);
            }
            if let Some(departure) = report.leaves.clone() {
                let (member, proof, reduces_electorate) = (from, Proof::Leave(departure), true);
                core.learn_end(&Ended {
                    member,
                    proof,
                    reduces_electorate,
                });
            }
            self.votes.insert(from, report);
        }
    }

    /// Handles a later term. Returns whether this candidate defers to that term's candidate.
    pub(super) fn overtaken(&mut self, core: &mut Core, term: Term) -> bool {
        core.term = core.term.max(term);
        let defers = !self.already_coordinates
            && (core.sent_leave || core.is_before(term.coordinator, core.id()))
            && !core.is_departed(term.coordinator)
            && !core.links.is_unreachable(term.coordinator);
        if !defers {
            self.start_next_term(core);
        }
        defers
    }

    pub(super) fn next_timeout(&self, core: &Core) -> Time {
        let majority_since = self.majority_since.map(|at| at.after(core.timing.grace));
        majority_since
            .into_iter()
            .chain([self.next_try])
            .chain(core.majority_deadline())
            .filter(|at| *at > core.now)
            .min()
            .unwrap_or(self.next_try)
    }

    /// Returns the living voters that have voted for this candidate, including itself.
    fn side<'a>(&'a self, core: &'a Core) -> impl Iterator<Item = MemberId> + 'a {
        let votes = self.votes.keys().copied();
        votes
            .filter(|id| !core.has_ended(*id))
            .chain(core.own_voter())
    }

    pub(super) fn advance(&mut self, core: &mut Core) -> Option<Outcome> {
        let unresponsive = match core.mistakes.makes(Mistake::UnresponsiveVotes) {
            true => self
                .awaited(core)
                .iter()
                .filter(|id| core.links.is_ready(**id))
                .count(),
            false => 0,
        };
        let me = core.id();
        let votes = self.side(core).count() + unresponsive;
        let has = |id: MemberId| id == me || self.votes.contains_key(&id);
        if core.is_majority(votes, has) {
            let since = *self.majority_since.get_or_insert(core.now);
            let awaited = self.awaited(core);
            let mut reachable = awaited.iter().filter(|id| !core.links.is_unreachable(**id));
            if self.already_coordinates
                || reachable.next().is_none()
                || core.now.since(since) >= core.timing.grace
            {
                return Some(self.coordinate(core));
            }
            // An earlier request may have belonged to the previous generation. A voter whose link is lost is not waited
            // for.
            if self.next_try <= core.now {
                self.request_votes(core, |links, id| links.is_ready(id));
            }
            return None;
        }
        self.majority_since = None;
        if core.is_half(votes) && core.now.since(self.since) >= core.timing.resume {
            let side = self.side(core).collect();
            core.claim(side, &mut self.claimed);
        }
        if self.next_try <= core.now {
            self.request_votes(core, may_ask);
        }
        if core.has_no_majority() {
            let why = no_majority(core, &self.votes.keys().copied().collect());
            let term = self.term;
            for id in self.votes.keys() {
                let why = why.clone();
                core.send(*id, Message::CutOff { term, why });
            }
            return Some(Outcome::Stops(Transition::Exclude(why)));
        }
        (core.now.since(self.since) >= core.timing.elect).then_some(Outcome::Waits)
    }

    fn coordinate(&mut self, core: &mut Core) -> Outcome {
        let reports = std::mem::take(&mut self.votes);
        if reports.values().any(|report| report.synced > core.synced) {
            // Another member has coordinated since, and may have sent further replies.
            core.held_replies.clear();
        }
        let own = (core.synced, core.log.end());
        let best = reports
            .values()
            .max_by_key(|report| (report.synced, report.log.end()));
        let best = best.filter(|best| {
            (best.synced, best.log.end()) > own && !core.mistakes.makes(Mistake::ShorterLogKept)
        });
        if let Some(best) = best {
            let begins = best.log.continues_from(&core.log);
            let start = core.log.end();
            if !begins {
                // This member has received entries that the members of a later coordinator have not.
                let why = Exclusion::Superseded(best.synced.coordinator);
                return Outcome::Stops(Transition::Exclude(why));
            }
            let known = usize::try_from(start.saturating_sub(best.log.first)).unwrap_or(usize::MAX);
            for entry in best.log.entries.iter().skip(known).cloned() {
                core.deliver(entry);
            }
        }
        if core.log.departure_proven(core.id()).is_some() {
            let coordinator = core.synced.coordinator;
            return Outcome::Stops(Transition::Exclude(Exclusion::Superseded(coordinator)));
        }
        Outcome::Coordinates(Box::new(Coordinator::elected(core, self.asked, reports)))
    }
}

/// Whether to ask an awaited voter: a link that is not ready repeats earlier messages once it is ready.
fn may_ask(links: &Links, id: MemberId) -> bool {
    links.is_ready(id) || !links.has_link(id)
}

/// Returns the exclusion of a member that reaches only itself and `reached`, which is no majority.
pub(super) fn no_majority(core: &Core, reached: &BTreeSet<MemberId>) -> Exclusion {
    let mut unreached = core.others();
    unreached.retain(|id| !reached.contains(id) && core.may_be_on_other_side(*id));
    // A connected member may be on this side although it votes for no candidate. Connected members are named only if
    // all unreached members are connected.
    let has_link = |id: &MemberId| core.links.is_ready(*id);
    if unreached.iter().any(|id| !has_link(id)) {
        unreached.retain(|id| !has_link(id));
    }
    Exclusion::NoMajority {
        reached: 1 + reached.len() as u32,
        of: core.electorate() as u32,
        unreached,
    }
}

#[cfg(test)]
mod tests {
    use super::super::coordinator::tests::{core, id};
    use super::*;

    #[test]
    fn a_vote_of_an_earlier_candidacy_does_not_count_and_a_second_vote_counts_once() {
        let mut core = core(1, 5);
        let mut candidate = Candidate::start(&mut core, false, false);
        let earlier = candidate.term();
        let report = || self::core(2, 5).report();
        candidate.vote(&mut core, id(2), earlier, report());
        let (round, coordinator) = (earlier.round + 3, id(4));
        assert!(!candidate.overtaken(&mut core, Term { round, coordinator }));
        let term = candidate.term();
        assert!(term > earlier);
        let is_elected = |candidate: &mut Candidate, core: &mut Core| {
            let first = candidate.advance(core);
            core.now = core.now.after(core.timing.grace);
            let outcome = first.or_else(|| candidate.advance(core));
            matches!(outcome, Some(Outcome::Coordinates(_)))
        };
        for voter in 2..5 {
            candidate.vote(&mut core, id(voter), earlier, report());
        }
        assert!(!is_elected(&mut candidate, &mut core));
        for _ in 0..2 {
            candidate.vote(&mut core, id(2), term, report());
        }
        assert!(!is_elected(&mut candidate, &mut core));
        candidate.vote(&mut core, id(3), term, report());
        assert!(is_elected(&mut candidate, &mut core));
    }
}
