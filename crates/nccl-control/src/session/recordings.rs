//! A rank's requests to the other processes about their recorders and clocks.

use std::time::Duration;

use super::handle::{RankSession, SessionBackend};
use crate::coordinator_message::Answer;
use crate::recordings::{
    Decode, READINGS, Readings, RecordingAnswers, RecordingQuery, RecordingTarget,
};
use crate::refusal::HANDSHAKE_TIMEOUT;
use crate::request::Request;
use crate::time::deadline_after;

impl RankSession {
    /// Returns the recordings of all other ranks, each from its own process; `None` where all ranks are threads of this one.
    pub fn ask_for_recordings<T: Send>(
        &self,
        timeout: Duration,
        decode: &Decode<'_, T>,
    ) -> Option<RecordingAnswers<T>> {
        let job = match self.backend() {
            SessionBackend::Node { node, generation } => node.job_of(generation),
            SessionBackend::Threads(_) => return None,
        };
        let departures = self.departures();
        let members = self.members();
        let members = members.get();
        let targets = (0..self.size)
            .filter(|rank| *rank != self.rank)
            .map(|rank| {
                let member = members.and_then(|members| members.get(rank));
                let end = departures.iter().find(|(gone, _)| *gone == rank);
                RecordingTarget {
                    rank,
                    host: member.map(|member| member.host.clone()),
                    pid: member.map(|member| member.pid),
                    at: member.and_then(|member| member.at.clone()),
                    end: end.map(|(_, departure)| departure.to_string()),
                    known: None,
                }
            })
            .collect();
        let asker = RecordingQuery {
            job: &job,
            size: self.size,
            timeout,
        };
        Some(asker.ask(targets, decode))
    }

    /// Measures the offset of this process's clock to rank 0's, if the recorder needs it.
    pub(crate) fn compare_clocks(&self) {
        if !self.recorder().wants_clock() {
            return;
        }
        if self.rank == 0 {
            return self.recorder().set_clock(None);
        }
        let deadline = deadline_after(HANDSHAKE_TIMEOUT);
        let mut readings = Readings::default();
        for _ in 0..READINGS {
            let ask = || match self.ask("clock", |_| Request::Clock, deadline, None) {
                Ok(Answer::Value(value)) => Some(value),
                _ => None,
            };
            if readings.take(ask).is_none() {
                break;
            }
        }
        if let Some(reading) = readings.best {
            self.recorder().set_clock(Some(reading));
        }
    }
}
