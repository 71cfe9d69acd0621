//! How an inbox is closed: waiting threads learn why no answer will arrive.

use std::time::Instant;

use super::notice::Notice;
use super::state::{Inbox, State};
use crate::departure::Lost;
use crate::events::WorldEvent;

impl Inbox {
    /// Whether no more messages will arrive.
    pub(crate) fn is_closed(&self) -> bool {
        self.state.lock().closed.is_some()
    }

    /// Returns the ranks that this rank cannot reach any more, and why, if the inbox was closed for that reason.
    pub(crate) fn cut_off_from(&self) -> Option<(Vec<usize>, String)> {
        self.state.lock().cut_off.clone()
    }

    /// Closes the inbox, because this rank and the ranks `from` cannot reach each other any more.
    pub(crate) fn cut_off(&self, from: Vec<usize>, why: &str) {
        {
            let mut state = self.state.lock();
            if state.closed.is_some() {
                return;
            }
            let why = why.to_owned();
            state.cut_off = Some((from.clone(), why.clone()));
            state.record_event(|| WorldEvent::CutOff {
                from: from.clone(),
                why: why.clone(),
            });
            state.notices.push_back(Notice::CutOff { from, why });
        }
        self.end(&Lost::reported(why));
    }

    /// Closes the inbox: every waiting request ends with `why`.
    pub(crate) fn end(&self, why: &Lost) {
        let mut state = self.state.lock();
        if state.closed.is_some() {
            return;
        }
        state.closed = Some(why.clone());
        let coordinator = state.coordinator;
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        self.message_arrived.notify_all();
        for slot in waiting.into_values() {
            slot.complete(Err((coordinator, why.clone())));
        }
    }

    /// Ends the requests that wait for the coordinator, which another rank has replaced. Requests that are repeated to
    /// its successor continue.
    pub(crate) fn interrupt(&self, why: &Lost) {
        let mut state = self.state.lock();
        state.suspects.begin_anew(Instant::now());
        // The joiners will ask the successor again.
        state.joiners = 0;
        let coordinator = state.coordinator;
        let State {
            waiting,
            repeatable,
            ..
        } = &mut *state;
        let ended: Vec<_> = waiting
            .extract_if(|id, _| !repeatable.contains(id))
            .collect();
        drop(state);
        for (_, slot) in ended {
            slot.complete(Err((coordinator, why.clone())));
        }
    }
}
