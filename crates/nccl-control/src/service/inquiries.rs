//! Inquiries: which ranks have not entered an operation, asked once for all ranks that wait in it.
//!
//! The last inquired operation of each communicator is kept; later suspicions of the same operation
//! get no answer of their own, since the result goes to all ranks anyway. At 1024 ranks an inquiry is one message to and from each
//! rank, and one more to each when a rank is late.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::inquiry::{Heard, Inquiry, Stage};
use super::state::{Service, To};
use crate::incoming::Push;
use crate::inquiry::{Attendance, Latecomer, Lateness, Suspicion};

/// How long ranks may take to answer.
const PATIENCE: Duration = Duration::from_secs(1);

/// The most communicators with a kept inquiry; beyond it, the oldest inquiry is dropped.
const MOST: usize = 256;

/// How many late ranks are listed by name.
const LISTED: usize = 8;

impl Service {
    /// Handles that `rank` waits in an operation, which others may not have entered.
    pub(super) fn inquire(&mut self, rank: usize, suspicion: Suspicion, now: Instant) {
        let Suspicion {
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
        let entered = Heard::Entered(now.checked_sub(since).unwrap_or(now));
        if let Some(known) = self.inquiries.get_mut(&subject.key) {
            if known.subject.turn == subject.turn && (known.sample_for.is_none() || is_sample) {
                if let Some(place) = known.place_of(rank) {
                    known.heard[place] = entered;
                }
                return self.look_at(&subject.key, now);
            }
            let is_busy = known.stage != Stage::Over && known.sample_for.is_none();
            if known.subject.turn > subject.turn || (is_sample && is_busy) {
                return;
            }
        }
        let inquiries = &mut self.inquiries;
        if inquiries.len() >= MOST && !inquiries.contains_key(&subject.key) {
            let oldest = inquiries.iter().min_by_key(|(_, one)| one.opened);
            if let Some(oldest) = oldest.map(|(key, _)| key.clone()) {
                inquiries.remove(&oldest);
            }
        }
        let mut inquiry = Inquiry {
            heard: vec![Heard::Nothing; members.len()],
            members,
            opened: now,
            sample_for: is_sample.then_some(rank),
            stage: Stage::Asking,
            subject,
        };
        if let Some(place) = inquiry.place_of(rank) {
            inquiry.heard[place] = entered;
        }
        let key = inquiry.subject.key.clone();
        let push = Push::Inquire {
            key: key.clone(),
            turn: inquiry.subject.turn,
            is_sample,
        };
        let others = inquiry.members.iter().filter(|&&member| member != rank);
        let others = others.copied().collect();
        self.push(To::Ranks(others), push);
        self.inquiries.insert(key.clone(), inquiry);
        self.due(now + PATIENCE);
        self.look_at(&key, now);
    }

    /// Handles a rank's report whether it has entered.
    pub(super) fn attends(&mut self, rank: usize, attendance: Attendance, now: Instant) {
        let Attendance {
            key,
            turn,
            entered,
            last,
        } = attendance;
        let Some(inquiry) = self.inquiries.get_mut(&key) else {
            return;
        };
        let Some(place) = inquiry
            .place_of(rank)
            .filter(|_| inquiry.subject.turn == turn)
        else {
            return;
        };
        let is_first = inquiry.heard[place] == Heard::Nothing;
        inquiry.heard[place] = match entered {
            Some(since) => {
                // A first answer took about half of the round trip; later reports are unsolicited.
                let way = match is_first {
                    true => now.saturating_duration_since(inquiry.opened) / 2,
                    false => Duration::ZERO,
                };
                let at = now.checked_sub(since.saturating_add(way.min(PATIENCE)));
                Heard::Entered(at.unwrap_or(inquiry.opened))
            }
            None => Heard::NotYet(last),
        };
        let is_late = inquiry.stage == Stage::Late && entered.is_some();
        if is_late {
            self.tell_of(&key, &[place], now);
        }
        self.look_at(&key, now);
    }

    /// Reports the result once it is complete.
    fn look_at(&mut self, key: &str, now: Instant) {
        let Some(inquiry) = self.inquiries.get_mut(key) else {
            return;
        };
        let is_over = now >= inquiry.opened + PATIENCE;
        match inquiry.stage {
            Stage::Asking if inquiry.is_answered() || is_over => {}
            Stage::Late if inquiry.have_all_entered() => {
                inquiry.stage = Stage::Over;
                return;
            }
            _ => return,
        }
        if let Some(asker) = inquiry.sample_for {
            inquiry.stage = Stage::Over;
            if inquiry.have_all_entered()
                && let (Some(first), Some((last, place))) = (inquiry.first(), inquiry.last())
            {
                let push = Push::Skew {
                    key: key.to_owned(),
                    skew: last.saturating_duration_since(first),
                    last: place,
                };
                self.push(To::Rank(asker), push);
            }
            return;
        }
        // Departed ranks are reported elsewhere.
        let is_there = |place: &usize| {
            let rank = inquiry.members[*place];
            !matches!(inquiry.heard[*place], Heard::Entered(_))
                && self.ranks[rank].departure.is_none()
        };
        let late: Vec<_> = (0..inquiry.members.len()).filter(is_there).collect();
        match late.is_empty() {
            true => inquiry.stage = Stage::Over,
            false => {
                inquiry.stage = Stage::Late;
                self.tell_of(key, &late, now);
            }
        }
    }

    /// Reports late ranks, or ranks that were late, to all members and observers.
    fn tell_of(&mut self, key: &str, places: &[usize], now: Instant) {
        let Some(inquiry) = self.inquiries.get(key) else {
            return;
        };
        let first = inquiry.first().unwrap_or(now);
        let late = places.iter().take(LISTED).map(|&place| {
            let rank = inquiry.members[place];
            let member = &self.ranks[rank];
            let (entered, last) = match &inquiry.heard[place] {
                Heard::Entered(at) => (Some(*at), String::new()),
                Heard::NotYet(last) => (None, last.clone()),
                Heard::Nothing => (None, String::new()),
            };
            Latecomer {
                rank,
                place,
                host: member.host.clone(),
                pid: u32::try_from(member.pid).unwrap_or_default(),
                behind: entered.unwrap_or(now).saturating_duration_since(first),
                has_entered: entered.is_some(),
                answers: inquiry.heard[place] != Heard::Nothing,
                phase: member
                    .phase
                    .as_ref()
                    .map_or_else(String::new, |(phase, _)| phase.name().to_owned()),
                last,
            }
        });
        let lateness = Lateness {
            subject: inquiry.subject.clone(),
            ranks: inquiry.members.len(),
            late: late.collect(),
            more: places.len().saturating_sub(LISTED),
            teller: inquiry.teller(),
        };
        let push = Push::Lateness(Arc::new(lateness));
        let members = inquiry.members.clone();
        self.push(To::Ranks(members), push.clone());
        self.push(To::Observers, push);
    }

    /// Ends the inquiries whose patience is over.
    pub(super) fn end_asking(&mut self, now: Instant) {
        let asking = self.inquiries.iter();
        let asking = asking.filter(|(_, inquiry)| inquiry.stage == Stage::Asking);
        let keys: Vec<_> = asking.map(|(key, _)| key.clone()).collect();
        for key in keys {
            self.look_at(&key, now);
        }
    }

    /// Returns when the next patience is over.
    pub(super) fn next_inquiry_deadline(&self) -> Option<Instant> {
        let inquiries = self.inquiries.values();
        let asking = inquiries.filter(|inquiry| inquiry.stage == Stage::Asking);
        asking.map(|inquiry| inquiry.opened + PATIENCE).min()
    }
}
