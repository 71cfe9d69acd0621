//! When nothing comes any more: who waits learns why.

use super::{Mailbox, Notice};
use crate::departure::{Departure, Lost};
use crate::events::WorldEvent;
use crate::succession::Loss;

impl Mailbox {
    /// Whether nothing comes any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.state.lock().closed.is_some()
    }

    /// Whom this rank cannot reach any more, and why, if that is why nothing comes.
    pub(crate) fn parted(&self) -> Option<(Vec<usize>, String)> {
        self.state.lock().cut_off.clone()
    }

    /// This rank hears no more of those others, and they not of it. The handlers hear it with
    /// [`settle`](crate::reader::Sink::settle).
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

    /// Nothing comes any more: everybody who waits learns why. Unless the coordinator has said that it
    /// leaves, that is how its death shows.
    pub(crate) fn close(&self, loss: Loss) {
        let on_loss = self.on_loss.lock().clone();
        if let Some(on_loss) = on_loss {
            return on_loss(loss);
        }
        let mut state = self.state.lock();
        let coordinator = state.coordinator();
        let why = loss.into_lost();
        if state.closed.is_none() && !state.departed.contains_key(&coordinator) {
            let departure = Departure::Lost(why.clone());
            let rank = coordinator;
            state.deliver(Notice::Gone { rank, departure });
        }
        drop(state);
        self.end(&why);
    }

    /// Nobody gets an answer any more.
    pub(crate) fn end(&self, why: &Lost) {
        let mut state = self.state.lock();
        if state.closed.is_some() {
            return;
        }
        state.closed = Some(why.clone());
        let coordinator = state.coordinator();
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        self.bell.notify_all();
        for slot in waiting.into_values() {
            slot.put(Err((coordinator, why.clone())));
        }
    }
}
