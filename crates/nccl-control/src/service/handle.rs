//! The interface of a service to its driver.

use std::time::Instant;

use super::state::{LONGEST_NAME, Output, Service};
use crate::departure::{Departure, cut};
use crate::phase::Phase;
use crate::request::Request;

/// How many remarks are kept for the errors of waiting ranks.
const REMARKS: usize = 8;

impl Service {
    /// Sets the process as which `rank` is expected.
    pub(crate) fn expect(&mut self, rank: usize, host: &str, pid: u64) {
        let own = &mut self.ranks[rank];
        host.clone_into(&mut own.host);
        own.pid = pid;
    }

    /// Records that `rank` is there, as this process.
    pub(crate) fn arrive(&mut self, now: Instant, rank: usize, host: &str, pid: u64) {
        self.expect(rank, host, pid);
        let own = &mut self.ranks[rank];
        own.is_connected = true;
        own.phase = Some((Phase::Joined, now));
    }

    /// Records that the connection of `rank` is gone. A departed rank then takes part in no round of ends any more either.
    pub(crate) fn disconnect(&mut self, rank: usize) {
        self.ranks[rank].is_connected = false;
    }

    /// Records that `rank` departed before this coordinator began: the ranks know.
    pub(crate) fn departed_before(&mut self, rank: usize, departure: Departure) {
        self.ranks[rank].departure = Some(departure.clone());
        self.channels.over.get_or_insert((rank, departure));
    }

    /// Handles one request of a rank that is connected: [`Collect`](Request::Collect), [`Cancel`](Request::Cancel), [`Set`](Request::Set),
    /// [`Get`](Request::Get), [`Phase`](Request::Phase), [`Send`](Request::Send), [`Took`](Request::Consumed),
    /// [`Suspect`](Request::SuspectStragglers) or [`Attends`](Request::EntryReport). Others are about membership, and have no effect here.
    pub(crate) fn handle(&mut self, now: Instant, rank: usize, id: u64, request: Request) {
        match request {
            Request::Collect {
                round,
                timeout,
                part,
            } => self.collect(now, (rank, id), round, timeout, part),
            Request::Cancel { reason } => {
                self.cancel_get(rank, id);
                self.cancel_round(rank, id, reason);
            }
            Request::Set { key, value } => self.set(rank, id, key, value.into()),
            Request::Get { key, timeout } => self.get(now, (rank, id), key, timeout),
            Request::Phase { mut name } => {
                cut(&mut name, LONGEST_NAME);
                self.ranks[rank].phase = Some((Phase::Said(name), now));
            }
            Request::Send {
                channel,
                to,
                timeout,
                bytes,
            } => self.send(now, (rank, id), channel, to, timeout, bytes.into()),
            Request::Consumed { channel, count } => self.consume(rank, &channel, count),
            Request::SuspectStragglers(suspicion) => {
                self.open_straggler_query(rank, suspicion, now)
            }
            Request::EntryReport(attendance) => self.record_entry(rank, attendance, now),
            _ => {}
        }
    }

    /// Records that `rank` takes part in no round any more; a rank that `stays` still takes part in those of ends, and leaves a second time
    /// after them. Returns whether that is new.
    pub(crate) fn leave(&mut self, rank: usize, departure: Departure, stays: bool) -> bool {
        let own = &mut self.ranks[rank];
        if own.is_closed() || (stays && own.departure.is_some()) {
            return false;
        }
        own.is_connected &= stays;
        // A failed rank has already reported its reason.
        if !matches!(own.departure, Some(Departure::Failed(_))) {
            own.departure = Some(departure.clone());
        }
        self.leave_rounds(rank, &departure, stays);
        self.leave_store(rank, &departure);
        self.end_channels(rank, departure);
        true
    }

    /// Ends the requests whose time has run out.
    pub(crate) fn handle_timeout(&mut self, now: Instant) {
        if self.earliest.is_none_or(|earliest| earliest > now) {
            return;
        }
        self.end_late_rounds(now);
        self.give_up_gets(now);
        self.give_up_sending(now);
        self.end_overdue_queries(now);
        let deadlines = [
            self.next_round_deadline(),
            self.gets.iter().map(|get| get.deadline).min(),
            self.next_send_deadline(),
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

    /// Records a refused connection for the errors of waiting ranks.
    pub(crate) fn remark(&mut self, text: String) {
        self.remarked += 1;
        if self.remarks.len() == REMARKS {
            self.remarks.pop_front();
        }
        self.remarks.push_back(text);
    }
}
