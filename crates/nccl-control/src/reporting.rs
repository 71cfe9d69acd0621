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
                    "rank {rank} ({}, pid {}) is in phase {:?} since {:.0} s",
                    member.host,
                    member.pid,
                    phase.name(),
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
            hub.attach(rank, outlet, ("node", 70 + rank as u64, ""), None)
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

    /// Keeps what is logged about waiting, on whatever thread.
    struct Log(crate::sync::Mutex<Vec<String>>);

    impl tracing::Subscriber for &'static Log {
        fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
            *metadata.level() == tracing::Level::INFO && metadata.is_event()
        }

        fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
            tracing::span::Id::from_u64(1)
        }

        fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

        fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

        fn event(&self, event: &tracing::Event<'_>) {
            struct Text(String);
            impl tracing::field::Visit for Text {
                fn record_debug(&mut self, _: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                    self.0.push_str(&format!("{value:?}"));
                }
            }
            let mut text = Text(String::new());
            event.record(&mut text);
            self.0.lock().push(text.0);
        }

        fn enter(&self, _: &tracing::span::Id) {}

        fn exit(&self, _: &tracing::span::Id) {}
    }

    #[test]
    fn a_rank_0_that_waits_alone_and_a_rank_that_finds_nobody_say_so_in_the_log() {
        static LOG: Log = Log(crate::sync::Mutex::new(Vec::new()));
        tracing::subscriber::set_global_default(&LOG).unwrap();
        let meet = |name: &str, rank| {
            let path =
                std::env::temp_dir().join(format!("nccl-{name}-{}.sock", std::process::id()));
            let meet = crate::Rendezvous::unix(path, rank, 2).unwrap();
            meet.timeout(REPORT + Duration::from_secs(5))
        };
        std::thread::scope(|scope| {
            scope.spawn(|| crate::World::join(meet("log-alone", 0)).unwrap_err());
            scope.spawn(|| crate::World::join(meet("log-nobody", 1)).unwrap_err());
        });
        let log = LOG.0.lock();
        for words in [
            &[
                "still waiting: 1 of 2 ranks wait at \"join\"",
                "rank 1 has never come",
            ][..],
            &["still waiting: rank 1 does not reach rank 0", "log-nobody"],
        ] {
            let has = |line: &&String| words.iter().all(|word| line.contains(word));
            assert!(log.iter().any(|line| has(&line)), "{words:?} in {log:#?}");
        }
    }
}
