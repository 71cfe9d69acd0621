//! How received messages get into the mailbox.

use super::notice::Notice;
use super::state::Mailbox;
use crate::events::WorldEvent;
use crate::incoming::Push;

impl Mailbox {
    pub(crate) fn push(&self, push: Push) {
        let mut state = self.state.lock();
        let notice = match push {
            Push::Notice { from, topic, bytes } => Notice::Announced { from, topic, bytes },
            Push::Gone { rank, .. } if state.departed.contains_key(&rank) => return,
            Push::Gone { rank, departure } => Notice::Gone { rank, departure },
            Push::Told { from, topic, bytes } => {
                // Not kept for a successor.
                state.inbox.push_back(Notice::Told { from, topic, bytes });
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
            // Not kept for a successor.
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
            // For observers, or answered by the reader of the connection.
            Push::Size(_) | Push::GoesOn(_) | Push::Member(_) | Push::Look { .. } => return,
        };
        state.deliver(notice);
    }
}
