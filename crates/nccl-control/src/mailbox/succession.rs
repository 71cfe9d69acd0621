//! What a rank keeps and does so that another can take over when the coordinator is gone.

use std::sync::Arc;
use std::time::Instant;

use super::{Mailbox, Notice, State};
use crate::departure::{Departure, Lost};
use crate::events::WorldEvent;
use crate::succession::{Action, Event, Loss, Report, Stage, Succession};

/// What to do when the coordinator is gone.
pub(super) type OnLoss = Box<dyn Fn(Loss) + Send + Sync>;

impl Mailbox {
    /// From now on, what is told is kept for a successor: this is number `rank` of `size`.
    pub(crate) fn keep_log(&self, rank: usize, size: usize) {
        self.state.lock().succession = Some(Succession::new(rank, size));
    }

    /// From now on, the end of the connection to the coordinator is not the end.
    pub(crate) fn on_loss(&self, handler: impl Fn(Loss) + Send + Sync + 'static) {
        *self.on_loss.lock() = Some(Arc::new(Box::new(handler)));
    }

    /// Nobody looks for another coordinator any more.
    pub(crate) fn forget_loss(&self) {
        self.on_loss.lock().take();
    }

    /// Who left, and how, in the order in which all have heard.
    pub(crate) fn gone(&self) -> Vec<(usize, Departure)> {
        let state = self.state.lock();
        let Some(succession) = &state.succession else {
            return Vec::new();
        };
        let told = succession.log().iter().filter_map(|notice| match notice {
            Notice::Gone { rank, departure } => Some((*rank, departure.clone())),
            _ => None,
        });
        let left = succession.lost().iter();
        let left = left.filter(|(_, loss)| **loss == Loss::Left);
        told.chain(left.map(|(rank, _)| (*rank, Departure::Left)))
            .collect()
    }

    /// Whose hosts this rank found silent itself, and how.
    pub(crate) fn silent(&self) -> Vec<(usize, Lost)> {
        let state = self.state.lock();
        let lost = state
            .succession
            .iter()
            .flat_map(|succession| succession.lost());
        lost.filter_map(|(rank, loss)| match loss {
            Loss::Lost(lost) if lost.may_live() => Some((*rank, lost.clone())),
            _ => None,
        })
        .collect()
    }

    /// Whose reports this rank waits for, while it takes over.
    pub(crate) fn awaited(&self) -> Option<Vec<usize>> {
        let state = self.state.lock();
        let succession = state.succession.as_ref()?;
        matches!(succession.stage(), Stage::Collecting(_)).then(|| succession.awaited())
    }

    pub(crate) fn report(&self) -> Option<Report<Notice>> {
        Some(self.state.lock().succession.as_ref()?.report())
    }

    /// Something that all are to hear, which is kept until it is heard.
    pub(crate) fn say(&self, notice: Notice) {
        if let Some(succession) = &mut self.state.lock().succession {
            succession.say(notice);
        }
    }

    /// One step of the succession. What this rank is to hear by it waits for [`settle`](crate::reader::Sink::settle).
    pub(crate) fn step(&self, event: Event<Notice>) -> Vec<Action<Notice>> {
        let mut state = self.state.lock();
        let Some(succession) = &mut state.succession else {
            return Vec::new();
        };
        let followed = match &event {
            Event::Succeeded { by, .. } => Some(*by),
            _ => None,
        };
        let mut actions = succession.step(event);
        let leads = actions.iter().any(|action| matches!(action, Action::Lead));
        let coordinator = followed.or(leads.then(|| succession.coordinator()));
        if let Some(rank) = coordinator {
            state.happens(|| WorldEvent::Coordinator { rank });
        }
        for told in actions.extract_if(.., |action| matches!(action, Action::Deliver(_))) {
            if let Action::Deliver(notice) = told {
                state.deliver(notice);
            }
        }
        actions
    }

    /// Those who wait for the coordinator's answer learn that it is gone, but for those whose question goes
    /// on to its successor.
    pub(crate) fn interrupt(&self, why: &Lost) {
        let mut state = self.state.lock();
        state.watched = false;
        state.suspects.begin_anew(Instant::now());
        // They ask its successor once more.
        state.newcomers = 0;
        let coordinator = state.coordinator();
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
