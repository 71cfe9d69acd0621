//! The log lines of the coordinator's process while ranks wait; one line covers all of them.

use std::time::{Duration, Instant};

use nccl_base::ranges::ranges;

use super::state::Service;

/// How long a request waits before each log line about it.
pub(crate) const WAIT_LOG_INTERVAL: Duration = Duration::from_secs(10);

/// The maximum number of lines at once: further requests wait for the same ranks.
const MAX_LINES: usize = 8;

/// The maximum number of keys that a text names.
const MAX_NAMED: usize = 8;

/// Lists keys for a log line or an error.
pub(crate) fn names<'k>(mut keys: impl Iterator<Item = &'k String>) -> String {
    let named: Vec<_> = keys
        .by_ref()
        .take(MAX_NAMED)
        .map(|key| format!("{key:?}"))
        .collect();
    let mut text = named.join(", ");
    match keys.count() {
        0 => {}
        more => text.push_str(&format!(" and {more} more keys")),
    }
    text
}

impl Service {
    /// Returns the due lines, which concern requests that have waited for [`WAIT_LOG_INTERVAL`] since they began or
    /// since the last line about them.
    pub(crate) fn reports(&mut self, now: Instant) -> Vec<String> {
        let mut lines = Vec::new();
        let ranks = &self.ranks;
        let describe = |rank: usize| {
            let own = &ranks[rank];
            match &own.phase {
                None => format!("rank {rank} has never joined"),
                Some((phase, since)) => format!(
                    "rank {rank} ({}, pid {}) has been in phase {:?} for {:.0} s",
                    own.host,
                    own.pid,
                    phase.name(),
                    now.saturating_duration_since(*since).as_secs_f64()
                ),
            }
        };
        for (round, open) in &mut self.rounds {
            if open.outcome.is_some() || open.waiting.is_empty() || open.next_report > now {
                continue;
            }
            open.next_report = now + WAIT_LOG_INTERVAL;
            let missing: Vec<_> = open.absent().collect();
            let waited = now.saturating_duration_since(open.begun).as_secs_f64();
            let mut text = format!(
                "{} of {} ranks have been waiting in {:?} for {waited:.0} s; missing: {}",
                open.waiting.len(),
                open.arrived.len(),
                round.topic,
                ranges(&missing),
            );
            for &rank in missing.iter().take(4) {
                text.push_str("; ");
                text.push_str(&describe(rank));
            }
            if missing.len() > 4 {
                text.push_str("; …");
            }
            lines.push(text);
        }
        for get in &mut self.gets {
            if get.next_report > now {
                continue;
            }
            get.next_report = now + WAIT_LOG_INTERVAL;
            let waited = now.saturating_duration_since(get.begun).as_secs_f64();
            let (rank, keys) = (get.rank, names(get.wanted.missing()));
            lines.push(format!(
                "rank {rank} has been waiting for {keys} for {waited:.0} s, which no rank has set"
            ));
        }
        lines.truncate(MAX_LINES);
        lines
    }

    /// Returns when the next line is due.
    pub(super) fn next_report(&self) -> Option<Instant> {
        let rounds = self.rounds.values();
        let rounds = rounds
            .filter(|open| open.outcome.is_none() && !open.waiting.is_empty())
            .map(|open| open.next_report);
        rounds
            .chain(self.gets.iter().map(|get| get.next_report))
            .min()
    }
}
