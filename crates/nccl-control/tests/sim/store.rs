//! Programs that add to a counter of the store, and the check that each addition is made once and in one order.

use std::collections::{BTreeMap, BTreeSet};

use nccl_control::proto::{Command, Entry, Event, MemberId, Mistakes};
use nccl_control::simulated_store::{AddResult, PendingAdd, SimulatedStore};

/// How often a thread adds.
const ADDITIONS: u32 = 8;

/// The store of a process, and the threads of its program that add.
pub(crate) struct StoreProgram {
    store: SimulatedStore,
    threads: Vec<Thread>,
}

/// A thread that waits for the result of an addition.
struct Thread {
    pending: PendingAdd,
    /// The largest sum that was known when the addition began.
    before: i64,
    left: u32,
}

/// The counter of each generation, as its programs see it.
#[derive(Default)]
pub(crate) struct Counters {
    of: BTreeMap<u64, Counter>,
    /// How many additions have returned a sum.
    pub(crate) sums: u64,
}

#[derive(Default)]
struct Counter {
    /// How many additions have begun.
    begun: i64,
    /// The sums that were returned.
    sums: BTreeSet<i64>,
}

impl Counter {
    /// Checks a sum: those of additions are distinct and not larger than their number, and that of a later addition is larger.
    fn check(&mut self, sum: i64, before: i64) -> Result<(), String> {
        let (begun, is_new) = (self.begun, self.sums.insert(sum));
        match () {
            () if !is_new => Err(format!("two additions of 1 have returned {sum}")),
            () if sum > begun => Err(format!("the sum is {sum} after {begun} additions of 1")),
            () if sum <= before => Err(format!("the sum is {sum}, and was {before} before")),
            () => Ok(()),
        }
    }
}

impl StoreProgram {
    pub(crate) fn new(me: MemberId, mistakes: Mistakes) -> Self {
        Self {
            store: SimulatedStore::new(me, mistakes),
            threads: Vec::new(),
        }
    }

    /// Handles an event of the machine. Returns what the machine is to do.
    pub(crate) fn handle(&mut self, event: &Event) -> Vec<Command> {
        match event {
            Event::Active(membership) => self.store.active(membership),
            Event::Coordinator(id) => return self.store.coordinator(*id),
            Event::Entry(entry) => {
                if let Entry::Departed {
                    member, departure, ..
                } = &**entry
                {
                    self.store.departed(*member, departure);
                }
            }
            Event::Request(from, bytes) => return self.store.request(*from, bytes),
            Event::Reply(bytes) => self.store.reply(bytes),
            Event::Excluded(_) | Event::Left => self.store.end(),
            _ => {}
        }
        Vec::new()
    }

    /// Begins a thread. Returns what the machine is to do.
    pub(crate) fn begin(
        &mut self,
        has_coordinator: bool,
        counters: &mut Counters,
    ) -> Option<Command> {
        self.add(ADDITIONS, has_coordinator, counters)
    }

    fn add(
        &mut self,
        left: u32,
        has_coordinator: bool,
        counters: &mut Counters,
    ) -> Option<Command> {
        let (pending, command) = self.store.add(has_coordinator)?;
        let counter = counters.of.entry(pending.generation()).or_default();
        counter.begun += 1;
        let before = counter.sums.last().copied().unwrap_or_default();
        self.threads.push(Thread {
            pending,
            before,
            left: left - 1,
        });
        command
    }

    /// Checks the results that have arrived; the threads that have them add again. Returns what the machine is to do.
    pub(crate) fn go_on(
        &mut self,
        has_coordinator: bool,
        counters: &mut Counters,
    ) -> Result<Vec<Command>, String> {
        let mut commands = Vec::new();
        for thread in std::mem::take(&mut self.threads) {
            match thread.pending.take() {
                None => self.threads.push(thread),
                Some(AddResult::Failed) => {}
                Some(AddResult::Sum(sum)) => {
                    let counter = counters.of.entry(thread.pending.generation()).or_default();
                    counter.check(sum, thread.before)?;
                    counters.sums += 1;
                    if thread.left > 0 {
                        commands.extend(self.add(thread.left, has_coordinator, counters));
                    }
                }
            }
        }
        Ok(commands)
    }

    /// Whether a thread waits for the store of a generation.
    pub(crate) fn waits_for(&self, generation: u64) -> bool {
        let mut threads = self.threads.iter();
        threads.any(|thread| thread.pending.generation() == generation)
    }
}
