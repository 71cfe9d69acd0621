//! How what the connection reads gets into the mailbox.

use std::time::Instant;

use super::{Mailbox, Notice};
use crate::events::WorldEvent;
use crate::heartbeat::{Said, Turn};
use crate::incoming::{Answer, Push};
use crate::process_state::ProcessState;
use crate::reader::Sink;
use crate::succession::{Event, Loss};

impl Mailbox {
    pub(crate) fn push(&self, push: Push) {
        let mut state = self.state.lock();
        let notice = match push {
            Push::Notice { from, topic, bytes } => Notice::Announced { from, topic, bytes },
            Push::Gone { rank, .. } if state.departed.contains_key(&rank) => return,
            Push::Gone { rank, departure } => Notice::Gone { rank, departure },
            Push::Succeeded { by, start, entries } => {
                drop(state);
                self.step(Event::Succeeded { by, start, entries });
                return;
            }
            Push::CutOff { from, why } => {
                drop(state);
                return self.cut_off(from, &why);
            }
            Push::Told { from, topic, bytes } => {
                // No successor has to know it.
                state.inbox.push_back(Notice::Told { from, topic, bytes });
                return;
            }
            Push::Watched(watched) => {
                state.watched = watched;
                return;
            }
            Push::Message {
                channel,
                from,
                bytes,
            } => {
                let queue = state.channels.entry(channel).or_default();
                queue.waiting.push_back((from, bytes));
                drop(state);
                self.bell.notify_all();
                return;
            }
            Push::Over { rank, departure } => {
                state.over.get_or_insert((rank, departure));
                drop(state);
                self.bell.notify_all();
                return;
            }
            Push::Newcomers(count) => {
                state.newcomers = count;
                return;
            }
            Push::Suspected {
                rank,
                silent,
                state: seen,
            } => {
                if !state.departed.contains_key(&rank) {
                    state.suspects.learn(rank, silent, seen.as_ref());
                    state.happens(|| match silent {
                        Some(silent) => WorldEvent::Silent {
                            rank,
                            silent,
                            process: seen.as_ref().map(ToString::to_string),
                        },
                        None => WorldEvent::Answers { rank },
                    });
                }
                return;
            }
            // Of these, no successor has to know.
            Push::Inquire {
                key,
                turn,
                is_sample,
            } => {
                let inquired = Notice::Inquired {
                    key,
                    turn,
                    is_sample,
                };
                return state.inbox.push_back(inquired);
            }
            Push::Lateness(lateness) => {
                WorldEvent::late(&lateness).for_each(|event| state.happens(|| event));
                return state.inbox.push_back(Notice::Late(lateness));
            }
            Push::Skew { key, skew, last } => {
                return state.inbox.push_back(Notice::Skewed { key, skew, last });
            }
            // What others are told, and what the reader of the connection answers.
            Push::Size(_)
            | Push::GoesOn(_)
            | Push::Member(_)
            | Push::Invited { .. }
            | Push::Ping(_)
            | Push::Look { .. } => return,
        };
        if let Some(succession) = &mut state.succession {
            succession.record(notice.clone());
        }
        state.deliver(notice);
    }
}

impl Sink for Mailbox {
    fn answer(&self, id: u64, answer: Answer) {
        Mailbox::answer(self, id, answer);
    }

    fn push(&self, push: Push) {
        Mailbox::push(self, push);
    }

    fn settle(&self) {
        self.run_handlers();
    }

    fn waits_for_word(&self) -> bool {
        self.state.lock().watched
    }

    fn coordinator_heard(&self, now: Instant) {
        self.state.lock().suspects.coordinator_heard(now);
    }

    fn coordinator_turns(&self, turn: Turn, seen: Option<ProcessState>) {
        let mut state = self.state.lock();
        let rank = state.coordinator();
        let said = match turn {
            Turn::Same => return,
            Turn::Silent(silent) => {
                state.suspects.learn(rank, Some(silent), seen.as_ref());
                state.happens(|| WorldEvent::Silent {
                    rank,
                    silent,
                    process: seen.as_ref().map(ToString::to_string),
                });
                Said::Silent(rank, silent, seen)
            }
            Turn::Heard(silent) => {
                state.suspects.forget(rank);
                state.happens(|| WorldEvent::Answers { rank });
                Said::HeardAgain(rank, silent)
            }
        };
        drop(state);
        said.say();
    }

    fn close(&self, loss: Loss) {
        Mailbox::close(self, loss);
        self.run_handlers();
    }
}
