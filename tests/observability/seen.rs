//! The log entries that a subscriber got, of all tests of a process.

use std::collections::BTreeMap;
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use tracing::field::{Field, Visit};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};
use tracing_subscriber::registry::LookupSpan;

/// One log entry.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub(super) name: &'static str,
    pub(super) target: &'static str,
    pub(super) level: String,
    pub(super) fields: BTreeMap<String, String>,
}

pub(super) static SEEN: Mutex<Vec<Seen>> = Mutex::new(Vec::new());

struct Collector;

#[derive(Default)]
pub(super) struct Values(pub(super) BTreeMap<String, String>);

impl Visit for Values {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.to_owned());
    }
}

fn see(metadata: &'static tracing::Metadata<'static>, values: Values) {
    SEEN.lock().unwrap().push(Seen {
        name: metadata.name(),
        target: metadata.target(),
        level: metadata.level().to_string().to_lowercase(),
        fields: values.0,
    });
}

impl<S: tracing::Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Collector {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        let mut values = Values::default();
        event.record(&mut values);
        see(event.metadata(), values);
    }

    fn on_new_span(
        &self,
        attributes: &tracing::span::Attributes<'_>,
        _: &tracing::span::Id,
        _: Context<'_, S>,
    ) {
        let mut values = Values::default();
        attributes.record(&mut values);
        see(attributes.metadata(), values);
    }

    fn on_record(
        &self,
        id: &tracing::span::Id,
        more: &tracing::span::Record<'_>,
        context: Context<'_, S>,
    ) {
        let mut values = Values::default();
        more.record(&mut values);
        see(context.span(id).unwrap().metadata(), values);
    }
}

/// Subscribes to all entries from here on, of all tests of this file.
pub(super) fn subscribe() {
    static ONCE: OnceLock<()> = OnceLock::new();
    ONCE.get_or_init(|| {
        let subscriber = tracing_subscriber::registry().with(Collector);
        tracing::subscriber::set_global_default(subscriber).unwrap();
    });
}

pub(super) fn seen(name: &str, comm: &str) -> Vec<Seen> {
    let all = SEEN.lock().unwrap();
    let of = |seen: &&Seen| seen.name == name && seen.fields.get("comm").is_some_and(|c| c == comm);
    all.iter().filter(of).cloned().collect()
}

/// Waits for `number` entries of this name and communicator.
pub(super) fn await_seen(name: &str, comm: &str, number: usize) -> Vec<Seen> {
    await_which(name, comm, number, |_| true)
}

/// As [`await_seen`], for entries that match a condition.
pub(super) fn await_which(
    name: &str,
    comm: &str,
    number: usize,
    which: impl Fn(&Seen) -> bool,
) -> Vec<Seen> {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let mut seen = seen(name, comm);
        seen.retain(&which);
        if seen.len() >= number || Instant::now() > deadline {
            assert_eq!(seen.len(), number, "{name} of {comm}: {seen:?}");
            return seen;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
