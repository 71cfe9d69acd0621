//! The coordinator's part for those who watch: observers see what becomes of the ranks, and the one that
//! started a rank says how its process ended.

use std::time::{Duration, Instant};

use super::hub::Outlet;
use super::incoming::{Answer, Push};
use super::request::Request;
use super::state::State;
use super::succession::Loss;
use crate::departure::{Departure, How, Lost, ProcessEnd};

/// How long the end of a connection waits for the word of the one that started the process, or the word
/// for the end of the connection.
pub(super) const WORD: Duration = Duration::from_millis(500);

/// The longest text of what is told about the end of a process, in bytes.
pub(super) const LONGEST_WORD: usize = 8 << 10;

/// Whether another observer is let in beside so many, of a world of so many ranks.
///
/// # Errors
/// That there are too many already.
pub(super) fn has_room(observers: usize, ranks: usize) -> Result<(), String> {
    // One for each host at least, when each has a launcher that observes.
    let most = 64 + ranks;
    match observers < most {
        true => Ok(()),
        false => Err(format!("there are {most} observers already")),
    }
}

impl State {
    /// # Errors
    /// That there are too many already.
    pub(super) fn has_room_to_observe(&self) -> Result<(), String> {
        has_room(self.observers.len(), self.members.len())
    }

    /// An observer has come: it is told everything, and from now on what changes.
    pub(super) fn observe(&mut self, number: u64, outlet: Outlet) {
        let now = Instant::now();
        outlet.push(&Push::Size(self.members.len()), &mut None);
        for rank in 0..self.members.len() {
            let own = self.service.rank(rank);
            if own.has_come() || own.departure.is_some() {
                outlet.push(&Push::Member(self.known(rank, now)), &mut None);
            }
        }
        self.observers.insert(number, outlet.clone());
        self.dirty.push(outlet);
    }

    /// An observer is gone; nobody tells any more how the ranks end that it has started.
    pub(super) fn unobserve(&mut self, number: u64) {
        self.observers.remove(&number);
        let now = Instant::now();
        let orphans = |rank: &usize| self.members[*rank].parent == Some(number);
        let orphans: Vec<_> = (0..self.members.len()).filter(orphans).collect();
        for rank in orphans {
            let member = &mut self.members[rank];
            member.parent = None;
            if member.until.is_some() {
                member.until = Some(now);
                self.due(now);
            }
            if rank == self.me() {
                self.push(&Push::Watched(false));
            }
        }
    }

    /// One request of an observer.
    pub(super) fn handle_observer(
        &mut self,
        number: u64,
        id: u64,
        request: Request,
    ) -> Result<(), &'static str> {
        match request {
            Request::Watches { ranks } => {
                for (rank, _) in ranks {
                    let Some(member) = self.members.get_mut(rank) else {
                        return Err("it watches a rank that does not exist");
                    };
                    member.parent = Some(number);
                    if rank == self.me() {
                        self.push(&Push::Watched(true));
                    }
                }
            }
            Request::Ended { rank, pid, mut end } => {
                if rank >= self.members.len() {
                    return Err("a rank ended that does not exist");
                }
                end.cut(LONGEST_WORD);
                // The coordinator is the process that reads this.
                if rank != self.me() && !self.is_word_for_successor(rank, pid, &end) {
                    self.ended(rank, pid, end);
                }
                if let Some(outlet) = self.observers.get(&number).cloned() {
                    outlet.answer(id, &Answer::Done, &mut None);
                    self.dirty.push(outlet);
                }
            }
            _ => return Err("it is an observer, and no rank"),
        }
        Ok(())
    }

    /// A rank's connection has ended without goodbye.
    pub(super) fn lost(&mut self, rank: usize, why: Lost) {
        let member = &mut self.members[rank];
        if self.service.rank(rank).is_closed() || member.closed.is_some() {
            return;
        }
        match (member.word.take(), member.parent) {
            (Some(word), _) => self.leave(rank, Departure::Lost(word.into()), false),
            (None, None) => self.leave(rank, Departure::Lost(why), false),
            (None, Some(_)) => {
                member.closed = Some(why);
                self.wait_for_the_other(rank);
            }
        }
    }

    /// While this rank takes over, the word on an end is one of the answers that it waits for: it orders nothing
    /// yet. On a process that had another number, the connections decide.
    fn is_word_for_successor(&mut self, rank: usize, pid: u64, end: &ProcessEnd) -> bool {
        if !self.is_taking_over() {
            return false;
        }
        if self.service.rank(rank).pid == pid {
            self.is_found(rank, &Loss::Lost(end.clone().into()));
        }
        true
    }

    /// A rank's process has ended, says who started it.
    fn ended(&mut self, rank: usize, pid: u64, end: ProcessEnd) {
        let (member, own) = (&mut self.members[rank], self.service.rank(rank));
        if own.is_closed() {
            return;
        }
        if member.closed.is_some() || !own.has_come() {
            return self.leave(rank, Departure::Lost(end.into()), false);
        }
        // What it has said before may still be on its way, a goodbye as well. A process that had another
        // number may have been another, from which this one was started: then the connection decides.
        member.word = Some(end);
        if own.pid == pid {
            self.wait_for_the_other(rank);
        }
    }

    fn wait_for_the_other(&mut self, rank: usize) {
        let until = Instant::now() + WORD;
        self.members[rank].until = Some(until);
        self.due(until);
    }

    /// Those who have waited long enough for a word, or for the end of a connection.
    pub(super) fn give_up_waiting(&mut self, now: Instant) {
        for rank in 0..self.members.len() {
            let member = &mut self.members[rank];
            if member.until.is_some_and(|until| until <= now) {
                let word = member.word.take().map(Lost::from);
                let lost = word.or_else(|| member.closed.take());
                let lost = lost.unwrap_or_else(|| How::Unknown.into());
                self.leave(rank, Departure::Lost(lost), false);
            }
        }
    }

    /// Tells the observers how it stands with a rank.
    pub(super) fn show(&mut self, rank: usize) {
        if self.observers.is_empty() {
            return;
        }
        let push = Push::Member(self.known(rank, Instant::now()));
        self.show_all(&push);
    }

    /// To all observers.
    pub(super) fn show_all(&mut self, push: &Push) {
        let mut encoded = None;
        for outlet in self.observers.values() {
            outlet.push(push, &mut encoded);
            self.dirty.push(outlet.clone());
        }
    }
}
