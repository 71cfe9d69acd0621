//! What the coordinator's process says now and then about those who wait: one line for all ranks.

use std::time::{Duration, Instant};

use super::explain::ranges;
use super::state::State;

/// How long somebody waits before it is said, and again.
pub(super) const REPORT: Duration = Duration::from_secs(10);

/// The most lines at once: whoever waits for more waits for the same ranks.
const MOST: usize = 8;

impl State {
    /// What to say now. Only what has waited for [`REPORT`] since it began, or since it was said.
    pub(super) fn reports(&mut self, now: Instant) -> Vec<String> {
        let mut said = Vec::new();
        let members = &self.members;
        let describe = |rank: usize| {
            let member = &members[rank];
            match &member.phase {
                None => format!("rank {rank} has never come"),
                Some((phase, since)) => format!(
                    "rank {rank} ({}, pid {}) is in phase {phase:?} since {:.0} s",
                    member.host,
                    member.pid,
                    now.saturating_duration_since(*since).as_secs_f64()
                ),
            }
        };
        for (round, open) in &mut self.rounds {
            if open.verdict.is_some() || open.waiting.is_empty() || open.report > now {
                continue;
            }
            open.report = now + REPORT;
            let missing: Vec<_> = open.absent().collect();
            let waited = now.saturating_duration_since(open.begun).as_secs_f64();
            let mut text = format!(
                "{} of {} ranks wait at {:?} since {waited:.0} s for {}",
                open.waiting.len(),
                open.came.len(),
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
            said.push(text);
        }
        for get in &mut self.gets {
            if get.report > now {
                continue;
            }
            get.report = now + REPORT;
            let waited = now.saturating_duration_since(get.begun).as_secs_f64();
            let (rank, key) = (get.rank, &get.key);
            said.push(format!(
                "rank {rank} waits for {key:?} since {waited:.0} s, which nobody has set"
            ));
        }
        said.truncate(MOST);
        said
    }

    /// When to look next.
    pub(super) fn next_report(&self) -> Option<Instant> {
        let rounds = self.rounds.values();
        let rounds = rounds
            .filter(|open| open.verdict.is_none() && !open.waiting.is_empty())
            .map(|open| open.report);
        rounds.chain(self.gets.iter().map(|get| get.report)).min()
    }
}

#[cfg(test)]
mod tests {
    use super::super::hub::{Hub, Outlet};
    use super::super::mailbox::Mailbox;
    use super::super::message::Round;
    use super::super::request::Request;
    use super::*;
    use std::sync::Arc;

    #[test]
    fn those_who_wait_are_spoken_of_every_ten_seconds_with_whom_they_wait_for() {
        let hub = Hub::new(6);
        for rank in [0, 1, 2] {
            let outlet = Outlet::Local(Arc::new(Mailbox::default()));
            hub.attach(rank, outlet, ("node", 70 + rank as u64), None)
                .unwrap();
        }
        let name = String::from("load weights");
        hub.handle(2, 0, Request::Phase { name });
        for rank in [0, 1] {
            let request = Request::Collect {
                round: Round {
                    topic: String::from("barrier/x"),
                    number: 0,
                    members: None,
                },
                patience: Duration::from_secs(60),
                part: Vec::new(),
            };
            hub.handle(rank, 0, request);
        }
        let request = Request::Get {
            key: String::from("hash"),
            patience: Duration::from_secs(60),
        };
        hub.handle(1, 1, request);
        let begun = Instant::now();
        let at = |seconds| hub.reports(begun + Duration::from_secs(seconds));
        // The door wakes up for it.
        assert!(hub.next_deadline().unwrap() <= begun + Duration::from_secs(10));
        assert_eq!(at(9), Vec::<String>::new());
        let said = at(11);
        assert_eq!(said.len(), 2, "{said:?}");
        for word in [
            "2 of 6 ranks wait at \"barrier/x\" since 11 s for 2-5",
            "rank 2 (node, pid 72) is in phase \"load weights\" since 11 s",
            "rank 3 has never come",
        ] {
            assert!(said[0].contains(word), "{word:?} in {said:?}");
        }
        assert!(said[1].contains("rank 1 waits for \"hash\""), "{said:?}");
        assert_eq!(at(15), Vec::<String>::new());
        assert_eq!(at(22).len(), 2);
    }
}
