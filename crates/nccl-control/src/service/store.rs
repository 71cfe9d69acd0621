//! The store: keys that a rank sets, and for which other ranks wait. Each change is one step.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::reporting::WAIT_LOG_INTERVAL;
use super::state::{LONGEST_NAME, MAX_OPEN, PendingGet, Service, Wanted, departure_error};
use crate::coordinator_message::Answer;
use crate::departure::Departure;
use crate::frame::LARGEST;
use crate::request::ExpectedValue;
use crate::round::RequestError;
use crate::time::later;

/// The longest part of a value in an error, in bytes.
const LONGEST_SHOWN: usize = 64;

impl Service {
    pub(super) fn set(&mut self, rank: usize, id: u64, key: String, value: Arc<[u8]>) {
        self.store((rank, id), key, value, Answer::Done);
    }

    /// Stores a value, and answers the request that led to it.
    fn store(&mut self, request: (usize, u64), key: String, value: Arc<[u8]>, answer: Answer) {
        let before = self.keys.get(&key).map_or(0, |old| old.len() + key.len());
        let kept = self.kept - before + value.len() + key.len();
        if kept > LARGEST || key.len() > LONGEST_NAME {
            let (rank, id) = request;
            return self.refuse(rank, id, RequestError::TooLarge { bytes: kept });
        }
        self.kept = kept;
        self.answer(vec![request], answer);
        let (mut value_wanted, mut all_set) = (Vec::new(), Vec::new());
        for get in self
            .gets
            .extract_if(.., |get| get.wanted.is_complete_with(&key))
        {
            let to = match get.wanted {
                Wanted::Value(_) => &mut value_wanted,
                Wanted::Keys { .. } => &mut all_set,
            };
            to.push((get.rank, get.id));
        }
        self.keys.insert(key, Arc::clone(&value));
        self.answer(value_wanted, Answer::Value(value));
        self.answer(all_set, Answer::Done);
    }

    pub(super) fn add(&mut self, rank: usize, id: u64, key: String, amount: i64) {
        let counter = match self.keys.get(&key) {
            None => 0,
            Some(value) => match number(value) {
                Some(counter) => counter,
                None => {
                    let shown = &value[..value.len().min(LONGEST_SHOWN)];
                    let found = String::from_utf8_lossy(shown).into_owned();
                    return self.refuse(rank, id, RequestError::NotANumber { found });
                }
            },
        };
        match counter.checked_add(amount) {
            Some(sum) => {
                let value = sum.to_string().into_bytes().into();
                self.store((rank, id), key, value, Answer::Sum(sum));
            }
            None => self.refuse(rank, id, RequestError::SumOverflows { counter, amount }),
        }
    }

    pub(super) fn compare_set(
        &mut self,
        request: (usize, u64),
        key: String,
        expected: Option<ExpectedValue>,
        value: Arc<[u8]>,
    ) {
        let current = self.keys.get(&key);
        let expected = expected.as_ref().map(|ExpectedValue(bytes)| &bytes[..]);
        if current.map(|bytes| &bytes[..]) == expected {
            return self.store(request, key, value, Answer::Done);
        }
        let current = value_or_absent(current);
        self.answer(vec![request], current);
    }

    /// Refuses a request with a key that is too long. Returns whether it has.
    fn refuse_long_key(&mut self, (rank, id): (usize, u64), key: &str) -> bool {
        let is_too_long = key.len() > LONGEST_NAME;
        if is_too_long {
            let bytes = key.len();
            self.refuse(rank, id, RequestError::TooLarge { bytes });
        }
        is_too_long
    }

    pub(super) fn delete(&mut self, rank: usize, id: u64, key: &str) {
        if self.refuse_long_key((rank, id), key) {
            return;
        }
        let answer = match self.keys.remove(key) {
            None => Answer::Absent,
            Some(value) => {
                self.kept -= value.len() + key.len();
                for get in &mut self.gets {
                    get.wanted.record_deletion(key);
                }
                Answer::Done
            }
        };
        self.answer(vec![(rank, id)], answer);
    }

    pub(super) fn try_get(&mut self, rank: usize, id: u64, key: &str) {
        if self.refuse_long_key((rank, id), key) {
            return;
        }
        let value = value_or_absent(self.keys.get(key));
        self.answer(vec![(rank, id)], value);
    }

    pub(super) fn get(
        &mut self,
        now: Instant,
        request: (usize, u64),
        key: String,
        timeout: Duration,
    ) {
        if self.refuse_long_key(request, &key) {
            return;
        }
        match self.keys.get(&key) {
            Some(value) => {
                let value = Answer::Value(Arc::clone(value));
                self.answer(vec![request], value);
            }
            None => self.wait(now, request, Wanted::Value(key), timeout),
        }
    }

    pub(super) fn await_keys(
        &mut self,
        now: Instant,
        (rank, id): (usize, u64),
        keys: Vec<String>,
        timeout: Duration,
    ) {
        if keys.len() > MAX_OPEN || keys.iter().any(|key| key.len() > LONGEST_NAME) {
            let bytes = keys.iter().map(String::len).sum();
            return self.refuse(rank, id, RequestError::TooLarge { bytes });
        }
        let keys = keys.into_iter();
        let is_set: BTreeMap<_, _> = keys
            .map(|key| {
                let is_set = self.keys.contains_key(&key);
                (key, is_set)
            })
            .collect();
        match is_set.values().filter(|is_set| !**is_set).count() {
            0 => self.answer(vec![(rank, id)], Answer::Done),
            missing => self.wait(now, (rank, id), Wanted::Keys { is_set, missing }, timeout),
        }
    }

    fn wait(&mut self, now: Instant, (rank, id): (usize, u64), wanted: Wanted, timeout: Duration) {
        if self.gets.len() >= MAX_OPEN {
            let bytes = wanted.missing().map(String::len).sum();
            return self.refuse(rank, id, RequestError::TooLarge { bytes });
        }
        let deadline = later(now, timeout);
        self.note_deadline(deadline);
        self.gets.push(PendingGet {
            wanted,
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
            let why = match &get.wanted {
                Wanted::Value(_) => RequestError::NoKey { waited },
                Wanted::Keys { .. } => {
                    let missing = get.wanted.missing().cloned().collect();
                    RequestError::NoKeys { missing, waited }
                }
            };
            self.refuse(get.rank, get.id, why);
        }
    }
}

impl Wanted {
    /// Returns the keys that are not set.
    pub(super) fn missing(&self) -> impl Iterator<Item = &String> {
        let (one, all) = match self {
            Self::Value(key) => (Some(key), None),
            Self::Keys { is_set, .. } => (None, Some(is_set)),
        };
        let missing = all.into_iter().flatten().filter(|(_, is_set)| !**is_set);
        one.into_iter().chain(missing.map(|(key, _)| key))
    }

    /// Records that `key` is set. Returns whether no key is missing any more.
    fn is_complete_with(&mut self, key: &str) -> bool {
        match self {
            Self::Value(wanted) => wanted == key,
            Self::Keys { is_set, missing } => {
                if let Some(is_set @ false) = is_set.get_mut(key) {
                    *is_set = true;
                    *missing -= 1;
                }
                *missing == 0
            }
        }
    }

    /// Records that `key` is not set any more.
    fn record_deletion(&mut self, key: &str) {
        if let Self::Keys { is_set, missing } = self
            && let Some(is_set @ true) = is_set.get_mut(key)
        {
            *is_set = false;
            *missing += 1;
        }
    }
}

fn value_or_absent(value: Option<&Arc<[u8]>>) -> Answer {
    value.map_or(Answer::Absent, |value| Answer::Value(Arc::clone(value)))
}

/// Parses a decimal number.
fn number(value: &[u8]) -> Option<i64> {
    std::str::from_utf8(value).ok()?.parse().ok()
}
