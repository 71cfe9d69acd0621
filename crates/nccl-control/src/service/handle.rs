//! The interface of a service for its driver.

use std::sync::Arc;
use std::time::Instant;

use super::state::{LONGEST_NAME, Output, Service, departure_error};
use crate::coordinator_message::Answer;
use crate::departure::{Departure, cut};
use crate::phase::Phase;
use crate::request::Request;
use crate::round::RequestError;

/// The maximum number of notes kept for the errors of waiting ranks.
const MAX_NOTES: usize = 8;

impl Service {
    /// Sets the process that is expected to become `rank`.
    pub(crate) fn expect(&mut self, rank: usize, host: &str, pid: u64) {
        let own = &mut self.ranks[rank];
        host.clone_into(&mut own.host);
        own.pid = pid;
    }

    /// Records that `rank` has joined, as this process.
    pub(crate) fn arrive(&mut self, now: Instant, rank: usize, host: &str, pid: u64) {
        self.expect(rank, host, pid);
        let own = &mut self.ranks[rank];
        own.is_connected = true;
        own.phase = Some((Phase::Joined, now));
    }

    /// Records that the connection of `rank` has ended. A departed rank then does not take part in rounds of ends any
    /// more either.
    pub(crate) fn disconnect(&mut self, rank: usize) {
        self.ranks[rank].is_connected = false;
    }

    /// Records that `rank` departed before this coordinator began; the ranks have already received that.
    pub(crate) fn departed_before(&mut self, rank: usize, departure: Departure) {
        self.ranks[rank].departure = Some(departure.clone());
        self.channels.closed_by.get_or_insert((rank, departure));
    }

    /// Handles one request of a rank that is connected: [`Exchange`](Request::Exchange), [`Cancel`](Request::Cancel),
    /// [`Follow`](Request::Follow), [`Outcome`](Request::Outcome), those of the store ([`Request::uses_store`]), [`Phase`](Request::Phase), [`Send`](Request::Send),
    /// [`Consumed`](Request::Consumed), [`QueryStragglers`](Request::QueryStragglers) or
    /// [`EntryReport`](Request::EntryReport). Others are about membership, and have no effect here.
    pub(crate) fn handle(&mut self, now: Instant, rank: usize, id: u64, request: Request) {
        match request {
            Request::Exchange {
                round,
                waited,
                timeout,
                part,
            } => self.exchange(now, (rank, id), round, (waited, timeout), part),
            Request::Cancel { reason } => {
                self.cancel_get(rank, id);
                self.cancel_round(now, rank, id, reason);
            }
            Request::Follow { outcomes, before } => {
                self.hear_followed_before(now, rank, before);
                self.hear_outcomes(now, rank, outcomes);
            }
            Request::Outcome { round, answer } => self.hear_outcome(now, rank, &round, answer),
            Request::Set { key, value } => self.set(rank, id, key, value.into()),
            Request::Get { key, timeout } => self.get(now, (rank, id), key, timeout),
            Request::TryGet { key } => self.try_get(rank, id, &key),
            Request::AwaitKeys { keys, timeout } => self.await_keys(now, (rank, id), keys, timeout),
            Request::Add { key, amount } => self.add(rank, id, key, amount),
            Request::CompareSet {
                key,
                expected,
                value,
            } => self.compare_set((rank, id), key, expected, value.into()),
            Request::Delete { key } => self.delete(rank, id, &key),
            Request::Phase { mut name } => {
                cut(&mut name, LONGEST_NAME);
                self.ranks[rank].phase = Some((Phase::Named(name), now));
            }
            Request::Send {
                channel,
                to,
                timeout,
                bytes,
            } => self.send(now, (rank, id), channel, to, timeout, bytes.into()),
            Request::Consumed { channel, taken } => self.consume(rank, &channel, taken),
            Request::QueryStragglers(query) => self.open_straggler_query(rank, query, now),
            Request::EntryReport(report) => self.record_entry(rank, report, now),
            _ => {}
        }
    }

    /// Whether this is the phase of a rank.
    pub(crate) fn is_in_phase(&self, rank: usize, mut name: String) -> bool {
        cut(&mut name, LONGEST_NAME);
        let phase = self.ranks[rank].phase.as_ref();
        phase.is_some_and(|(phase, _)| *phase == Phase::Named(name))
    }

    /// Records that `rank` does not take part in rounds any more. A rank that `keeps_communicators` still takes part in
    /// rounds of ends, and leaves a second time after them. Returns whether the departure is new.
    pub(crate) fn record_departure(
        &mut self,
        now: Instant,
        rank: usize,
        departure: Departure,
        keeps_communicators: bool,
    ) -> bool {
        let own = &mut self.ranks[rank];
        if own.is_closed() || (keeps_communicators && own.departure.is_some()) {
            return false;
        }
        own.is_connected &= keeps_communicators;
        // A failed rank has already reported its reason.
        if !matches!(own.departure, Some(Departure::Failed(_))) {
            own.departure = Some(departure.clone());
        }
        if keeps_communicators {
            // Another thread of the rank may wait, and the rank still receives answers.
            let why = departure_error(rank, &departure);
            self.refuse_waiting(|waiting, is_of_ends| waiting == rank && !is_of_ends, &why);
        }
        self.leave_rounds(now, rank, &departure, keeps_communicators);
        self.leave_store(rank, &departure);
        self.end_channels(rank, departure);
        true
    }

    /// Answers the waiting requests for which `is_refused` is true: it is called with the rank, and with whether the
    /// request is a part of a round of ends.
    pub(crate) fn refuse_waiting(
        &mut self,
        is_refused: impl Fn(usize, bool) -> bool,
        why: &RequestError,
    ) {
        let mut refused = Vec::new();
        for (key, open) in &mut self.rounds {
            let is_of_ends = key.is_of_ends();
            let own = open
                .waiting
                .extract_if(.., |(rank, _)| is_refused(*rank, is_of_ends));
            refused.extend(own);
        }
        let gets = self.gets.extract_if(.., |get| is_refused(get.rank, false));
        refused.extend(gets.map(|get| (get.rank, get.id)));
        for channel in self.channels.by_name.values_mut() {
            channel.held.retain(|sending| {
                let ends = is_refused(sending.from, false);
                if ends {
                    refused.push((sending.from, sending.id));
                }
                !ends
            });
        }
        self.answer(refused, Answer::Failed(Arc::new(why.clone())));
    }

    /// Ends the requests whose deadline has passed.
    pub(crate) fn handle_timeout(&mut self, now: Instant) {
        if self.earliest.is_none_or(|earliest| earliest > now) {
            return;
        }
        self.handle_outcome_timeout(now);
        self.end_late_rounds(now);
        self.give_up_gets(now);
        self.give_up_former(now);
        self.give_up_sending(now);
        self.end_overdue_queries(now);
        let deadlines = [
            self.next_round_deadline(),
            self.outcomes.next_timeout(),
            self.next_answer_timeout(),
            self.gets.iter().map(|get| get.deadline).min(),
            self.next_send_deadline(),
            self.next_former_deadline(),
            self.next_query_deadline(),
        ];
        self.earliest = deadlines.into_iter().flatten().min();
    }

    /// Returns when to call [`handle_timeout`](Self::handle_timeout) and [`reports`](Self::reports) next.
    pub(crate) fn next_timeout(&self) -> Option<Instant> {
        self.earliest.into_iter().chain(self.next_report()).min()
    }

    /// Returns the next output.
    pub(crate) fn poll(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Records a refused connection, for the errors of waiting ranks.
    pub(crate) fn note_for_errors(&mut self, text: String) {
        self.note_count += 1;
        if self.notes.len() == MAX_NOTES {
            self.notes.pop_front();
        }
        self.notes.push_back(text);
    }
}
