//! Straggler queries: which ranks have not entered an operation, asked once for all ranks that wait in it.
//!
//! The last queried operation of each communicator is kept; later suspicions of the same operation
//! get no answer of their own, since the result goes to all ranks anyway. At 1024 ranks a straggler query is one message to and from each
//! rank, and one more to each when a rank is late.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::state::{Recipients, Service};
use super::straggler_query::{EntryState, QueryStage, StragglerQuery};
use crate::coordinator_message::Push;
use crate::straggler::{EntryReport, LateRank, StragglerReport, StragglerSuspicion};

/// How long ranks may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// The most communicators with a kept query; beyond it, the oldest query is dropped.
const MOST: usize = 256;

/// How many late ranks are listed by name.
const MAX_LISTED: usize = 8;

impl Service {
    /// Handles that `rank` waits in an operation, which others may not have entered.
    pub(super) fn open_straggler_query(
        &mut self,
        rank: usize,
        suspicion: StragglerSuspicion,
        now: Instant,
    ) {
        let StragglerSuspicion {
            subject,
            members,
            since,
            is_sample,
        } = suspicion;
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
            if known.subject.turn == subject.turn && (known.sample_for.is_none() || is_sample) {
                if let Some(place) = known.place_of(rank) {
                    known.heard[place] = entered;
                }
                return self.evaluate_query(&subject.key, now);
            }
            let is_busy = known.stage != QueryStage::Over && known.sample_for.is_none();
            if known.subject.turn > subject.turn || (is_sample && is_busy) {
                return;
            }
        }
        let straggler_queries = &mut self.straggler_queries;
        if straggler_queries.len() >= MOST && !straggler_queries.contains_key(&subject.key) {
            let oldest = straggler_queries.iter().min_by_key(|(_, one)| one.opened);
            if let Some(oldest) = oldest.map(|(key, _)| key.clone()) {
                straggler_queries.remove(&oldest);
            }
        }
        let mut query = StragglerQuery {
            heard: vec![EntryState::Nothing; members.len()],
            members,
            opened: now,
            sample_for: is_sample.then_some(rank),
            stage: QueryStage::NumberedRequest,
            subject,
        };
        if let Some(place) = query.place_of(rank) {
            query.heard[place] = entered;
        }
        let key = query.subject.key.clone();
        let push = Push::StragglerQuery {
            key: key.clone(),
            turn: query.subject.turn,
            is_sample,
        };
        let others = query.members.iter().filter(|&&member| member != rank);
        let others = others.copied().collect();
        self.push(Recipients::Ranks(others), push);
        self.straggler_queries.insert(key.clone(), query);
        self.note_deadline(now + ANSWER_TIMEOUT);
        self.evaluate_query(&key, now);
    }

    /// Handles a rank's report whether it has entered.
    pub(super) fn record_entry(&mut self, rank: usize, attendance: EntryReport, now: Instant) {
        let EntryReport {
            key,
            turn,
            entered,
            last,
        } = attendance;
        let Some(query) = self.straggler_queries.get_mut(&key) else {
            return;
        };
        let Some(place) = query.place_of(rank).filter(|_| query.subject.turn == turn) else {
            return;
        };
        let is_first = query.heard[place] == EntryState::Nothing;
        query.heard[place] = match entered {
            Some(since) => {
                // A first answer took about half of the round trip; later reports are unsolicited.
                let way = match is_first {
                    true => now.saturating_duration_since(query.opened) / 2,
                    false => Duration::ZERO,
                };
                let at = now.checked_sub(since.saturating_add(way.min(ANSWER_TIMEOUT)));
                EntryState::Entered(at.unwrap_or(query.opened))
            }
            None => EntryState::NotYet(last),
        };
        let is_late = query.stage == QueryStage::Late && entered.is_some();
        if is_late {
            self.report_stragglers(&key, &[place], now);
        }
        self.evaluate_query(&key, now);
    }

    /// Reports the result once it is complete.
    fn evaluate_query(&mut self, key: &str, now: Instant) {
        let Some(query) = self.straggler_queries.get_mut(key) else {
            return;
        };
        let is_over = now >= query.opened + ANSWER_TIMEOUT;
        match query.stage {
            QueryStage::NumberedRequest if query.is_answered() || is_over => {}
            QueryStage::Late if query.have_all_entered() => {
                query.stage = QueryStage::Over;
                return;
            }
            _ => return,
        }
        if let Some(asker) = query.sample_for {
            query.stage = QueryStage::Over;
            if query.have_all_entered()
                && let (Some(first), Some((last, place))) = (query.first(), query.last())
            {
                let push = Push::Skewed {
                    key: key.to_owned(),
                    skew: last.saturating_duration_since(first),
                    last: place,
                };
                self.push(Recipients::Rank(asker), push);
            }
            return;
        }
        // Departed ranks are reported elsewhere.
        let is_there = |place: &usize| {
            let rank = query.members[*place];
            !matches!(query.heard[*place], EntryState::Entered(_))
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
    fn report_stragglers(&mut self, key: &str, places: &[usize], now: Instant) {
        let Some(query) = self.straggler_queries.get(key) else {
            return;
        };
        let first = query.first().unwrap_or(now);
        let late = places.iter().take(MAX_LISTED).map(|&place| {
            let rank = query.members[place];
            let member = &self.ranks[rank];
            let (entered, last) = match &query.heard[place] {
                EntryState::Entered(at) => (Some(*at), String::new()),
                EntryState::NotYet(last) => (None, last.clone()),
                EntryState::Nothing => (None, String::new()),
            };
            LateRank {
                rank,
                place,
                host: member.host.clone(),
                pid: u32::try_from(member.pid).unwrap_or_default(),
                behind: entered.unwrap_or(now).saturating_duration_since(first),
                has_entered: entered.is_some(),
                answers: query.heard[place] != EntryState::Nothing,
                phase: member
                    .phase
                    .as_ref()
                    .map_or_else(String::new, |(phase, _)| phase.name().to_owned()),
                last,
            }
        });
        let lateness = StragglerReport {
            subject: query.subject.clone(),
            ranks: query.members.len(),
            late: late.collect(),
            more: places.len().saturating_sub(MAX_LISTED),
            reporter: query.reporter(),
        };
        let push = Push::Stragglers(Arc::new(lateness));
        let members = query.members.clone();
        self.push(Recipients::Ranks(members), push.clone());
        self.push(Recipients::Observers, push);
    }

    /// Ends the straggler queries whose timeout is over.
    pub(super) fn end_overdue_queries(&mut self, now: Instant) {
        let numbered = self.straggler_queries.iter();
        let numbered = numbered.filter(|(_, query)| query.stage == QueryStage::NumberedRequest);
        let keys: Vec<_> = numbered.map(|(key, _)| key.clone()).collect();
        for key in keys {
            self.evaluate_query(&key, now);
        }
    }

    /// Returns when the next timeout is over.
    pub(super) fn next_query_deadline(&self) -> Option<Instant> {
        let straggler_queries = self.straggler_queries.values();
        let numbered = straggler_queries.filter(|query| query.stage == QueryStage::NumberedRequest);
        numbered.map(|query| query.opened + ANSWER_TIMEOUT).min()
    }
}
