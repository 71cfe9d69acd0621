//! The counters of live communicators, and the sums of those that ended, by name.
//!
//! The number of names is limited: a program that uses a new name for each request would otherwise fill memory, here
//! and in the system that stores the numbers. All further names are counted as one.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::durations::{Durations, Timer};
use super::tally::{FUNCTIONS, KINDS, Tally, Total};
use crate::op::Function;
use crate::operation::OperationKind;
use crate::state::Lifecycle;
use crate::sync::{Mutex, MutexGuard};

/// How many names are counted separately.
#[doc(hidden)]
pub const NAMES: usize = 128;

/// The name under which all others are counted.
pub(crate) const OTHERS: &str = "(others)";

/// A communicator's handle to its counters. They can be read while the communicator lives, and remain in the sums when
/// it ends.
pub(crate) struct CounterHandle {
    tally: Arc<Tally>,
    number: u64,
}

struct CounterRegistry {
    made: u64,
    names: Vec<NameCounters>,
    live: Vec<LiveCommunicator>,
}

/// The counters of one name.
struct NameCounters {
    name: Arc<str>,
    ended: u64,
    sums: Sums,
    /// How long calls took on their stream, for a sample of the calls.
    took: Vec<(OperationKind, Timer)>,
    skew: ArrivalSkews,
}

/// How far apart ranks entered operations.
#[derive(Default)]
struct ArrivalSkews {
    timer: Timer,
    /// How often each rank was the last, for the first `LAST` ranks that were.
    last: BTreeMap<usize, u64>,
}

/// For how many ranks the number of times that they were last is counted.
const LAST: usize = 64;

struct LiveCommunicator {
    number: u64,
    /// The index of its name.
    named: usize,
    tally: Arc<Tally>,
    lifecycle: Arc<Lifecycle>,
}

/// The sums of tallies.
#[derive(Clone, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub struct Sums {
    #[doc(hidden)]
    pub calls: [u64; KINDS],
    #[doc(hidden)]
    pub totals: [Total; FUNCTIONS],
}

/// The counters of one name.
#[doc(hidden)]
pub struct NameStats {
    #[doc(hidden)]
    pub name: Arc<str>,
    #[doc(hidden)]
    pub sums: Sums,
    #[doc(hidden)]
    pub ended: u64,
    #[doc(hidden)]
    pub took: Vec<(OperationKind, Durations)>,
    #[doc(hidden)]
    pub skew: (Durations, Vec<(usize, u64)>),
    /// The states of its live communicators.
    #[doc(hidden)]
    pub live: Vec<Arc<Lifecycle>>,
}

impl Sums {
    const NONE: Self = Self {
        calls: [0; KINDS],
        totals: [Total {
            operations: 0,
            bytes: 0,
        }; FUNCTIONS],
    };

    fn add(&mut self, tally: &Tally) {
        for kind in OperationKind::ALL {
            let calls = &mut self.calls[kind as usize];
            *calls = calls.wrapping_add(tally.calls(kind));
        }
        for function in Function::ALL {
            let more = tally.total(function);
            let total = &mut self.totals[function as usize];
            total.operations = total.operations.wrapping_add(more.operations);
            total.bytes = total.bytes.wrapping_add(more.bytes);
        }
    }
}

impl NameCounters {
    fn durations(&self) -> Vec<(OperationKind, Durations)> {
        let read = |(kind, timer): &(OperationKind, Timer)| (*kind, timer.read());
        let mut all: Vec<_> = self.took.iter().map(read).collect();
        all.sort_unstable_by_key(|(kind, _)| *kind as usize);
        all
    }
}

impl CounterRegistry {
    fn took(&mut self, name: &Arc<str>, kind: OperationKind, took: Duration) {
        let index = self.named(name);
        let timers = &mut self.names[index].took;
        let known = timers.iter().position(|(known, _)| *known == kind);
        let known = known.unwrap_or_else(|| {
            timers.push((kind, Timer::new()));
            timers.len() - 1
        });
        timers[known].1.add(took);
    }

    /// The index of a name.
    fn named(&mut self, name: &Arc<str>) -> usize {
        if let Some(index) = self.names.iter().position(|named| named.name == *name) {
            return index;
        }
        let name = match self.names.len() {
            0..NAMES => Arc::clone(name),
            NAMES => Arc::from(OTHERS),
            _ => return NAMES,
        };
        self.names.push(NameCounters {
            name,
            ended: 0,
            sums: Sums::NONE,
            took: Vec::new(),
            skew: ArrivalSkews::default(),
        });
        self.names.len() - 1
    }

    /// Makes the tally of a new communicator. Returns it with the communicator's number in the registry.
    fn begin(
        &mut self,
        name: &Arc<str>,
        world_size: usize,
        lifecycle: &Arc<Lifecycle>,
    ) -> (Arc<Tally>, u64) {
        self.made += 1;
        let tally = Arc::new(Tally::new(world_size));
        let live = LiveCommunicator {
            number: self.made,
            named: self.named(name),
            tally: Arc::clone(&tally),
            lifecycle: Arc::clone(lifecycle),
        };
        self.live.push(live);
        (tally, self.made)
    }

    fn end(&mut self, number: u64) {
        if let Some(at) = self.live.iter().position(|live| live.number == number) {
            let live = self.live.remove(at);
            let named = &mut self.names[live.named];
            named.ended += 1;
            named.sums.add(&live.tally);
        }
    }

    fn read(&self) -> Vec<NameStats> {
        let names = self.names.iter().map(|named| NameStats {
            name: Arc::clone(&named.name),
            sums: named.sums.clone(),
            ended: named.ended,
            took: named.durations(),
            skew: (
                named.skew.timer.read(),
                named
                    .skew
                    .last
                    .iter()
                    .map(|(&rank, &times)| (rank, times))
                    .collect(),
            ),
            live: Vec::new(),
        });
        let mut all: Vec<_> = names.collect();
        for live in &self.live {
            let counted = &mut all[live.named];
            counted.sums.add(&live.tally);
            counted.live.push(Arc::clone(&live.lifecycle));
        }
        all
    }
}

/// Returns the list of counters. Not used on the path of an operation: it is locked when communicators are made or end,
/// and by readers.
fn registry() -> MutexGuard<'static, CounterRegistry> {
    static ALL: Mutex<CounterRegistry> = Mutex::new(CounterRegistry {
        made: 0,
        names: Vec::new(),
        live: Vec::new(),
    });
    ALL.lock()
}

/// Adds the duration of a call on the stream of a communicator of this name.
pub(crate) fn took(name: &Arc<str>, kind: OperationKind, took: Duration) {
    registry().took(name, kind, took);
}

/// Adds the time between the first and the last rank's entry into an operation, on a communicator of this name, and the
/// rank that was last.
#[doc(hidden)]
pub fn arrival_skew(name: &Arc<str>, skew: Duration, last: usize) {
    let mut registry = registry();
    let named = registry.named(name);
    let known = &mut registry.names[named].skew;
    known.timer.add(skew);
    if known.last.len() < LAST || known.last.contains_key(&last) {
        *known.last.entry(last).or_default() += 1;
    }
}

/// Returns the counters, in the order in which the names first occurred.
#[doc(hidden)]
pub fn read() -> Vec<NameStats> {
    match crate::forked::is_child() {
        false => registry().read(),
        true => Vec::new(),
    }
}

impl CounterHandle {
    /// Starts counting for a communicator.
    pub(crate) fn new(name: &Arc<str>, world_size: usize, lifecycle: &Arc<Lifecycle>) -> Self {
        let (tally, number) = registry().begin(name, world_size, lifecycle);
        Self { tally, number }
    }

    pub(crate) fn tally(&self) -> &Arc<Tally> {
        &self.tally
    }
}

impl Drop for CounterHandle {
    fn drop(&mut self) {
        registry().end(self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn empty() -> CounterRegistry {
        CounterRegistry {
            made: 0,
            names: Vec::new(),
            live: Vec::new(),
        }
    }

    fn begin(registry: &mut CounterRegistry, name: &str) -> (Arc<Tally>, u64) {
        registry.begin(&Arc::from(name), 1, &Arc::new(Lifecycle::new()))
    }

    #[test]
    fn what_was_counted_stays_counted_after_the_end() {
        let mut registry = empty();
        let (first, number) = begin(&mut registry, "tp");
        first.call(OperationKind::Group);
        let (second, _) = begin(&mut registry, "tp");
        second.call(OperationKind::Group);
        second.call(OperationKind::Replay);
        registry.end(number);
        registry.end(number);
        let [counted] = &registry.read()[..] else {
            panic!("one name")
        };
        assert_eq!(counted.sums.calls[OperationKind::Group as usize], 2);
        assert_eq!(counted.sums.calls[OperationKind::Replay as usize], 1);
        assert_eq!((counted.live.len(), counted.ended), (1, 1));
    }

    #[test]
    fn what_calls_took_is_kept_by_name_and_kind() {
        let mut registry = empty();
        let (name, seconds) = (Arc::from("tp"), Duration::from_secs);
        let (_tally, number) = begin(&mut registry, "tp");
        registry.took(&name, OperationKind::Group, seconds(2));
        registry.took(&name, OperationKind::AllReduce, seconds(1));
        registry.end(number);
        registry.took(&name, OperationKind::Group, seconds(3));
        let took = &registry.read()[0].took;
        let sums: Vec<_> = took.iter().map(|(kind, took)| (*kind, took.sum)).collect();
        let expected = [
            (OperationKind::AllReduce, seconds(1)),
            (OperationKind::Group, seconds(5)),
        ];
        assert_eq!(sums, expected);
    }

    #[test]
    fn names_are_bounded_and_those_that_came_first_keep_theirs() {
        let mut registry = empty();
        for number in 0..NAMES + 10 {
            let (tally, number) = begin(&mut registry, &format!("request {number}"));
            tally.call(OperationKind::AllReduce);
            registry.end(number);
        }
        let _known = begin(&mut registry, "request 7");
        let read = registry.read();
        assert_eq!(read.len(), NAMES + 1);
        assert_eq!(&*read[NAMES].name, OTHERS);
        assert_eq!(read[NAMES].ended, 10);
        assert_eq!(
            read[NAMES].sums.calls[OperationKind::AllReduce as usize],
            10
        );
        assert_eq!((read[7].live.len(), read[7].ended), (1, 1));
    }
}
