//! The log lines while ranks wait.

use std::time::Duration;

use crate::service::WAIT_LOG_INTERVAL;

/// Keeps the log lines about waiting, from any thread.
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
        let path = std::env::temp_dir().join(format!("nccl-{name}-{}.sock", std::process::id()));
        let meet = crate::Rendezvous::unix(path, rank, 2).unwrap();
        meet.with(|meet| meet.timeout = WAIT_LOG_INTERVAL + Duration::from_secs(5))
    };
    std::thread::scope(|scope| {
        scope.spawn(|| crate::World::join(meet("log-alone", 0)).unwrap_err());
        scope.spawn(|| crate::World::join(meet("log-nobody", 1)).unwrap_err());
    });
    let log = LOG.0.lock();
    for words in [
        &[
            "still waiting: 1 of 2 ranks have been waiting in World::join",
            "rank 1 has never joined",
        ][..],
        &["still waiting: rank 1 does not reach rank 0", "log-nobody"],
    ] {
        let has = |line: &&String| words.iter().all(|word| line.contains(word));
        assert!(log.iter().any(|line| has(&line)), "{words:?} in {log:#?}");
    }
}
