//! Straggler queries: which ranks have not entered an operation, asked once for all ranks that wait in it.
//!
//! The last queried operation of each communicator is kept. Later requests about the same operation get no answer of
//! their own, since the result goes to all ranks anyway. With 1024 ranks, a straggler query is one message to and from
//! each rank, and one more to each when a rank is late.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::state::{Recipients, Service};
use super::straggler_query::{EntryState, QueryStage, StragglerQuery};
use crate::coordinator_message::Push;
use crate::straggler::{EntryReport, LateRank, StragglerQueryRequest, StragglerReport};

/// How long ranks may take to answer.
const QUERY_TIMEOUT: Duration = Duration::from_secs(1);

/// The maximum number of communicators with a kept query; beyond it, the oldest query is dropped.
const MAX_QUERIES: usize = 256;

/// How many late ranks are listed by name.
const MAX_LISTED: usize = 8;

impl Service {
    /// Handles a report that `rank` waits in an operation that others may not have entered.
    pub(super) fn open_straggler_query(
        &mut self,
        rank: usize,
        request: StragglerQueryRequest,
        now: Instant,
    ) {
        let StragglerQueryRequest {
            subject,
            members,
            since,
            is_sample,
        } = request;
        let members = match members.is_empty() {
            true => (0..self.ranks.len()).collect(),
            false => members,
        };
        let size = self.ranks.len();
        if members.len() > size
            || members.iter().any(|&member| member >= size)
            || !members.contains(&rank)
        {
            return;
        }
        let entered = EntryState::Entered(now.checked_sub(since).unwrap_or(now));
        if let Some(known) = self.straggler_queries.get_mut(&subject.key) {
            if known.subject.collective_index == subject.collective_index
                && (known.sample_for.is_none() || is_sample)
            {
                if let Some(communicator_rank) = known.communicator_rank_of(rank) {
                    known.entries[communicator_rank] = entered;
                }
                return self.evaluate_query(&subject.key, now);
            }
            let is_busy = known.stage != QueryStage::Over && known.sample_for.is_none();
            if known.subject.collective_index > subject.collective_index || (is_sample && is_busy) {
                return;
            }
        }
        let straggler_queries = &mut self.straggler_queries;
        if straggler_queries.len() >= MAX_QUERIES && !straggler_queries.contains_key(&subject.key) {
            let oldest = straggler_queries.iter().min_by_key(|(_, one)| one.opened);
            if let Some(oldest) = oldest.map(|(key, _)| key.clone()) {
                straggler_queries.remove(&oldest);
            }
        }
        let mut query = StragglerQuery {
            entries: vec![EntryState::Nothing; members.len()],
            members,
            opened: now,
            sample_for: is_sample.then_some(rank),
            stage: QueryStage::Queried,
            subject,
        };
        if let Some(communicator_rank) = query.communicator_rank_of(rank) {
            query.entries[communicator_rank] = entered;
        }
        let key = query.subject.key.clone();
        let push = Push::StragglerQuery {
            key: key.clone(),
            collective_index: query.subject.collective_index,
            is_sample,
        };
        let others = query.members.iter().filter(|&&member| member != rank);
        let others = others.copied().collect();
        self.push(Recipients::Ranks(others), push);
        self.straggler_queries.insert(key.clone(), query);
        self.note_deadline(now + QUERY_TIMEOUT);
        self.evaluate_query(&key, now);
    }

    /// Handles a rank's report whether it has entered.
    pub(super) fn record_entry(&mut self, rank: usize, report: EntryReport, now: Instant) {
        let EntryReport {
            key,
            collective_index,
            entered,
            last,
        } = report;
        let Some(query) = self.straggler_queries.get_mut(&key) else {
            return;
        };
        let Some(communicator_rank) = query
            .communicator_rank_of(rank)
            .filter(|_| query.subject.collective_index == collective_index)
        else {
            return;
        };
        let is_first = query.entries[communicator_rank] == EntryState::Nothing;
        query.entries[communicator_rank] = match entered {
            Some(since) => {
                // The first answer took about half of the round trip; later reports are unsolicited.
                let latency = match is_first {
                    true => now.saturating_duration_since(query.opened) / 2,
                    false => Duration::ZERO,
                };
                let at = now.checked_sub(since.saturating_add(latency.min(QUERY_TIMEOUT)));
                EntryState::Entered(at.unwrap_or(query.opened))
            }
            None => EntryState::NotYet(last),
        };
        let is_late = query.stage == QueryStage::Late && entered.is_some();
        if is_late {
            self.report_stragglers(&key, &[communicator_rank], now);
        }
        self.evaluate_query(&key, now);
    }

    /// Sends the result once it is complete.
    fn evaluate_query(&mut self, key: &str, now: Instant) {
        let Some(query) = self.straggler_queries.get_mut(key) else {
            return;
        };
        let is_timed_out = now >= query.opened + QUERY_TIMEOUT;
        match query.stage {
            QueryStage::Queried if query.is_answered() || is_timed_out => {}
            QueryStage::Late if query.have_all_entered() => {
                query.stage = QueryStage::Over;
                return;
            }
            _ => return,
        }
        if let Some(for_rank) = query.sample_for {
            query.stage = QueryStage::Over;
            if query.have_all_entered()
                && let (Some(first), Some((last, communicator_rank))) =
                    (query.first(), query.last())
            {
                let push = Push::Skewed {
                    key: key.to_owned(),
                    skew: last.saturating_duration_since(first),
                    last: communicator_rank,
                };
                self.push(Recipients::Rank(for_rank), push);
            }
            return;
        }
        // Departed ranks are reported elsewhere.
        let is_there = |communicator_rank: &usize| {
            let rank = query.members[*communicator_rank];
            !matches!(query.entries[*communicator_rank], EntryState::Entered(_))
                && self.ranks[rank].departure.is_none()
        };
        let late: Vec<_> = (0..query.members.len()).filter(is_there).collect();
        match late.is_empty() {
            true => query.stage = QueryStage::Over,
            false => {
                query.stage = QueryStage::Late;
                self.report_stragglers(key, &late, now);
            }
        }
    }

    /// Reports late ranks, or ranks that were late, to all members and observers.
    fn report_stragglers(&mut self, key: &str, communicator_ranks: &[usize], now: Instant) {
        let Some(query) = self.straggler_queries.get(key) else {
            return;
        };
        let first = query.first().unwrap_or(now);
        let late = communicator_ranks
            .iter()
            .take(MAX_LISTED)
            .map(|&communicator_rank| {
                let rank = query.members[communicator_rank];
                let member = &self.ranks[rank];
                let (entered, last) = match &query.entries[communicator_rank] {
                    EntryState::Entered(at) => (Some(*at), String::new()),
                    EntryState::NotYet(last) => (None, last.clone()),
                    EntryState::Nothing => (None, String::new()),
                };
                LateRank {
                    rank,
                    communicator_rank,
                    host: member.host.clone(),
                    pid: u32::try_from(member.pid).unwrap_or_default(),
                    behind: entered.unwrap_or(now).saturating_duration_since(first),
                    has_entered: entered.is_some(),
                    answers: query.entries[communicator_rank] != EntryState::Nothing,
                    phase: member
                        .phase
                        .as_ref()
                        .map_or_else(String::new, |(phase, _)| phase.name().to_owned()),
                    last,
                }
            });
        let report = StragglerReport {
            subject: query.subject.clone(),
            ranks: query.members.len(),
            late: late.collect(),
            more: communicator_ranks.len().saturating_sub(MAX_LISTED),
            reporter: query.reporter(),
        };
        let push = Push::Stragglers(Arc::new(report));
        let members = query.members.clone();
        self.push(Recipients::Ranks(members), push.clone());
        self.push(Recipients::Observers, push);
    }

    /// Ends the straggler queries whose timeout has passed.
    pub(super) fn end_overdue_queries(&mut self, now: Instant) {
        let queried = self.straggler_queries.iter();
        let queried = queried.filter(|(_, query)| query.stage == QueryStage::Queried);
        let keys: Vec<_> = queried.map(|(key, _)| key.clone()).collect();
        for key in keys {
            self.evaluate_query(&key, now);
        }
    }

    /// Returns the time of the next timeout.
    pub(super) fn next_query_deadline(&self) -> Option<Instant> {
        let straggler_queries = self.straggler_queries.values();
        let queried = straggler_queries.filter(|query| query.stage == QueryStage::Queried);
        queried.map(|query| query.opened + QUERY_TIMEOUT).min()
    }
}
