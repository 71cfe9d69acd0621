//! When nothing comes any more: who waits learns why.

use std::time::Instant;

use super::notice::Notice;
use super::state::{Mailbox, State};
use crate::departure::Lost;
use crate::events::WorldEvent;

impl Mailbox {
    /// Whether nothing comes any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.state.lock().closed.is_some()
    }

    /// Whom this rank cannot reach any more, and why, if that is why nothing comes.
    pub(crate) fn parted(&self) -> Option<(Vec<usize>, String)> {
        self.state.lock().cut_off.clone()
    }

    /// This rank hears no more of those others, and they not of it.
    pub(crate) fn cut_off(&self, from: Vec<usize>, why: &str) {
        {
            let mut state = self.state.lock();
            if state.closed.is_some() {
                return;
            }
            let why = why.to_owned();
            state.cut_off = Some((from.clone(), why.clone()));
            state.happens(|| WorldEvent::CutOff {
                from: from.clone(),
                why: why.clone(),
            });
            state.inbox.push_back(Notice::CutOff { from, why });
        }
        self.end(&Lost::said(why));
    }

    /// Nobody gets an answer any more.
    pub(crate) fn end(&self, why: &Lost) {
        let mut state = self.state.lock();
        if state.closed.is_some() {
            return;
        }
        state.closed = Some(why.clone());
        let coordinator = state.coordinator;
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        self.bell.notify_all();
        for slot in waiting.into_values() {
            slot.put(Err((coordinator, why.clone())));
        }
    }

    /// Those who wait for the coordinator's answer learn that it is gone, but for those whose question goes
    /// on to the next one.
    pub(crate) fn interrupt(&self, why: &Lost) {
        let mut state = self.state.lock();
        state.suspects.begin_anew(Instant::now());
        // They ask it once more.
        state.newcomers = 0;
        let coordinator = state.coordinator;
        let State {
            waiting, lasting, ..
        } = &mut *state;
        let ended: Vec<_> = waiting.extract_if(|id, _| !lasting.contains(id)).collect();
        drop(state);
        for (_, slot) in ended {
            slot.put(Err((coordinator, why.clone())));
        }
    }
}
