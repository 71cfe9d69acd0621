//! How received messages get into the inbox.

use super::notice::Notice;
use super::state::{Inbox, State};
use crate::coordinator_message::Push;
use crate::events::WorldEvent;
use crate::round::RequestError;
use crate::sync::MutexGuard;

impl Inbox {
    fn end_channels(&self, mut state: MutexGuard<'_, State>, why: RequestError) {
        // It is sent again behind the messages that were sent before it.
        if !state.awaits_messages {
            state.channels_ended.get_or_insert(why);
            drop(state);
            self.message_arrived.notify_all();
        }
    }

    pub(crate) fn push(&self, push: Push) {
        let mut state = self.state.lock();
        let notice = match push {
            Push::Announced { from, topic, bytes } => Notice::Announced { from, topic, bytes },
            Push::Departed { rank, .. } if state.departed.contains_key(&rank) => return,
            Push::Departed { rank, departure } => Notice::Departed { rank, departure },
            Push::Direct { from, topic, bytes } => {
                // Only queued for the handlers; no other state changes.
                state
                    .notices
                    .push_back(Notice::Direct { from, topic, bytes });
                return;
            }
            Push::Message {
                channel,
                from,
                number,
                bytes,
            } => {
                if state.ignores_messages {
                    return;
                }
                let queue = state.channels.entry(channel).or_default();
                // A message before it was lost with the connection: the coordinator sends both once it knows.
                if number != queue.received + 1 {
                    return;
                }
                queue.received = number;
                queue.waiting.push_back((from, bytes));
                drop(state);
                self.message_arrived.notify_all();
                return;
            }
            Push::ChannelsClosed { rank, departure } => {
                return self.end_channels(state, RequestError::Departed { rank, departure });
            }
            Push::ChannelsLost { rank } => {
                return self.end_channels(state, RequestError::ChannelsLost { rank });
            }
            Push::NotServed => {
                state.awaits_messages = false;
                return self.end_channels(state, RequestError::OldGeneration);
            }
            Push::Followed(number) => {
                state.awaits_messages &= number != state.follow_number;
                return;
            }
            Push::Joiners(count) => {
                state.joiners = count;
                return;
            }
            Push::Suspected {
                rank,
                silence,
                state: seen,
            } => {
                if !state.departed.contains_key(&rank) {
                    state.suspects.learn(rank, silence, seen.as_ref());
                    state.record_event(|| match silence {
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
            // Not repeated to a successor.
            Push::StragglerQuery {
                key,
                collective_index,
                is_sample,
            } => {
                let query = Notice::StragglerQuery {
                    key,
                    collective_index,
                    is_sample,
                };
                return state.notices.push_back(query);
            }
            Push::Stragglers(report) => {
                WorldEvent::late(&report).for_each(|event| state.record_event(|| event));
                return state.notices.push_back(Notice::Stragglers(report));
            }
            Push::Skewed { key, skew, last } => {
                return state.notices.push_back(Notice::Skewed { key, skew, last });
            }
            // For observers, or answered by the reader of the connection.
            Push::WorldSize(_)
            | Push::Rank(_)
            | Push::ProbeProcess { .. }
            | Push::WantOutcome(_) => return,
        };
        state.deliver(notice);
    }
}
