//! The store: keys that a rank sets, for which other ranks wait.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::reporting::WAIT_LOG_INTERVAL;
use super::state::{LONGEST_NAME, MAX_OPEN, PendingGet, Service, departure_error};
use crate::coordinator_message::Answer;
use crate::departure::Departure;
use crate::frame::LARGEST;
use crate::round::RequestError;
use crate::time::later;

impl Service {
    pub(super) fn set(&mut self, rank: usize, id: u64, key: String, value: Arc<[u8]>) {
        let before = self.keys.get(&key).map_or(0, |old| old.len() + key.len());
        let kept = self.kept - before + value.len() + key.len();
        if kept > LARGEST || key.len() > LONGEST_NAME {
            return self.refuse(rank, id, RequestError::TooLarge { bytes: kept });
        }
        self.kept = kept;
        self.answer(vec![(rank, id)], Answer::Done);
        let waiting = self
            .gets
            .extract_if(.., |get| get.key == key)
            .map(|get| (get.rank, get.id))
            .collect();
        self.keys.insert(key, Arc::clone(&value));
        self.answer(waiting, Answer::Value(value));
    }

    pub(super) fn get(
        &mut self,
        now: Instant,
        (rank, id): (usize, u64),
        key: String,
        timeout: Duration,
    ) {
        if let Some(value) = self.keys.get(&key) {
            let value = Answer::Value(Arc::clone(value));
            return self.answer(vec![(rank, id)], value);
        }
        if self.gets.len() >= MAX_OPEN {
            let bytes = key.len();
            return self.refuse(rank, id, RequestError::TooLarge { bytes });
        }
        let deadline = later(now, timeout);
        self.note_deadline(deadline);
        self.gets.push(PendingGet {
            key,
            rank,
            id,
            begun: now,
            next_report: now + WAIT_LOG_INTERVAL,
            deadline,
        });
    }

    pub(super) fn cancel_get(&mut self, rank: usize, id: u64) {
        self.gets.retain(|get| (get.rank, get.id) != (rank, id));
    }

    /// Ends the gets of a rank that leaves. A rank that dies or fails may be the one that would have set a key, so all waiting gets end.
    pub(super) fn leave_store(&mut self, rank: usize, departure: &Departure) {
        self.gets.retain(|get| get.rank != rank);
        if *departure != Departure::Left {
            let waiting = self.gets.drain(..).map(|get| (get.rank, get.id)).collect();
            let why = departure_error(rank, departure);
            self.answer(waiting, Answer::Failed(Arc::new(why)));
        }
    }

    pub(super) fn give_up_gets(&mut self, now: Instant) {
        let late: Vec<_> = self
            .gets
            .extract_if(.., |get| get.deadline <= now)
            .collect();
        for get in late {
            let waited = now.saturating_duration_since(get.begun);
            self.refuse(get.rank, get.id, RequestError::NoKey { waited });
        }
    }
}
