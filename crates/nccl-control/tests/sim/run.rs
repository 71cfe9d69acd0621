//! Runs a schedule and checks the guarantees (`nccl_control::proto`, numbers 1 to 6).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use nccl_control::proto::{
    Command, Entry, Event, Exclusion, Generation, Input, MILLI, MemberId, MemberMachine, Mistakes,
    OperatorDecision, SharedMembership, StartRole, Timing,
};

use super::network::{Machine, Network, Path, Process, UNACKNOWLEDGED};
use super::schedule::KINDS;
use super::schedule::{Schedule, Step};
use super::store::{Counters, StoreProgram};
use nccl_base::departure::Departure;

/// How long after the last step the job must be at rest.
const BOUND: u64 = 45_000 * MILLI;

/// How often rest is checked.
const CHECK: u64 = 300 * MILLI;

/// No schedule that comes to rest sends this many frames.
const MOST_FRAMES: u64 = 100_000;

/// How long the programs wait for the next generation.
const RECONFIGURE_TIMEOUT: u64 = 3000 * MILLI;

/// How often NCCL reports progress.
const PROGRESS: u64 = 500 * MILLI;

/// How long NCCL's progress continues after an outage that should end nothing: until the last process has dialled
/// again.
const DIALS_AGAIN: u64 = 6000 * MILLI;

/// How long the programs wait for the first generation: the coordinator's program, and the others.
const FORMS: u64 = 3000 * MILLI;
const JOINS: u64 = 8000 * MILLI;

/// A broken guarantee.
#[derive(Debug)]
pub(crate) struct Broken {
    pub(crate) promise: u8,
    pub(crate) how: String,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.promise {
            RULE => write!(f, "a rule: {}", self.how),
            promise => write!(f, "promise {promise}: {}", self.how),
        }
    }
}

/// The length of a test request that is not a request of the store.
const QUESTION: usize = size_of::<u32>();

/// Used instead of a guarantee's number: a rule on which a guarantee depends.
const RULE: u8 = 0;

fn broken<T>(promise: u8, how: impl Into<String>) -> Result<T, Broken> {
    let how = how.into();
    Err(Broken { promise, how })
}

/// The outcome of a schedule.
#[derive(Default)]
pub(crate) struct Outcome {
    /// Whether a process that coordinated ended, or packets between two kernels were blocked.
    pub(crate) counts: bool,
    pub(crate) kinds: [u32; KINDS.len()],
    pub(crate) generations: u64,
    pub(crate) excluded: u32,
    /// The number of additions that have returned a sum.
    pub(crate) sums: u64,
    /// The number of exchanges that have returned all parts to a process.
    pub(crate) exchanged: u64,
    /// The number of messages that processes have received over the channel.
    pub(crate) messages: u64,
    pub(crate) seconds: u64,
}

/// What the checker knows about a process.
#[derive(Default)]
struct Notes {
    generation: Option<Generation>,
    log: Vec<Arc<Entry>>,
    excluded: Option<Exclusion>,
    /// The time at which it was left behind.
    left_behind: Option<u64>,
    left: bool,
    /// Whether its program has requested to leave.
    leaves: bool,
    told: BTreeSet<Vec<u8>>,
    wished: bool,
    /// Whether the process knows that there will be no first generation.
    dismissed: bool,
    /// The time since which it abstains.
    abstains: Option<u64>,
    /// Its requests, and whether each has a reply.
    asked: BTreeMap<u32, bool>,
    /// Created with its first event.
    store: Option<StoreProgram>,
}

pub(crate) struct Run<'s> {
    schedule: &'s Schedule,
    pub(crate) net: Network,
    notes: Vec<Notes>,
    /// The current process of each slot.
    slots: Vec<usize>,
    /// How many slots, from 0 on, belong to ranks, and how many to voters.
    ranks: usize,
    voters: usize,
    /// Each generation by its number, and when it became active.
    active: BTreeMap<u64, (u64, SharedMembership)>,
    /// The slot of each member that has been in an active generation.
    slot_of: BTreeMap<MemberId, usize>,
    /// Whether no event can keep two processes disconnected for a while.
    is_reachable: bool,
    /// Whether processes are delayed, but nothing else happens.
    is_calm: bool,
    /// The entries that the members of a successor had received before it.
    heard: BTreeMap<u64, Vec<Arc<Entry>>>,
    claimed: BTreeMap<Generation, MemberId>,
    counters: Counters,
    /// Whether a program adds.
    has_additions: bool,
    mistakes: Mistakes,
    said: u32,
    outcome: Outcome,
    /// When the first step of the schedule may happen, and when the last one happens.
    begun: u64,
    last: u64,
    trace: bool,
}

impl<'s> Run<'s> {
    pub(crate) fn new(schedule: &'s Schedule, mistakes: Mistakes, trace: bool) -> Self {
        let size = schedule.kernels.len();
        let kernels = schedule.kernels.iter().max().map_or(1, |most| most + 1);
        let mut net = Network::new(schedule.seed, kernels, Timing::default(), mistakes);
        net.launcher = schedule.launcher;
        net.watches = schedule.watches;
        net.trace = trace;
        let number = 0;
        let voters = schedule.kernels.iter().chain(&schedule.witnesses);
        for (slot, &kernel) in voters.enumerate() {
            let at = String::from("0");
            let role = match slot {
                0 => StartRole::InitialCoordinator {
                    number,
                    size: size as u32,
                    witnesses: schedule.witnesses.len() as u32,
                },
                slot if slot < size => StartRole::Rank { number, at },
                _ => StartRole::Witness { number, at },
            };
            net.start(slot as u32, 1000 + slot as u64, kernel, role);
        }
        let voters = net.processes.len();
        for (kernel, slot) in schedule.observers.iter().zip(voters..) {
            let parent = schedule.parent && slot == voters;
            net.observe(slot as u32, *kernel, parent, size as u32);
        }
        let all = net.processes.len();
        let steps = || schedule.steps.iter().map(|(_, step)| step);
        let hinders = |step: &Step| {
            matches!(
                step,
                Step::Freeze(_)
                    | Step::Late(_)
                    | Step::Jump(..)
                    | Step::Cut { .. }
                    | Step::Reset(..)
            )
        };
        let is_calm = |step: &Step| {
            matches!(
                step,
                Step::Late(1..)
                    | Step::Thaw(_)
                    | Step::Jump(1.., _)
                    | Step::Say(_)
                    | Step::Ask(_)
                    | Step::Add(_)
            )
        };
        Self {
            schedule,
            net,
            notes: (0..all).map(|_| Notes::default()).collect(),
            slots: (0..all).collect(),
            ranks: size,
            voters,
            active: BTreeMap::new(),
            slot_of: BTreeMap::new(),
            is_reachable: schedule.forming.is_empty() && !steps().any(hinders),
            is_calm: schedule.forming.is_empty() && !schedule.goes_on && steps().all(is_calm),
            heard: BTreeMap::new(),
            claimed: BTreeMap::new(),
            counters: Counters::default(),
            has_additions: steps().any(|step| matches!(step, Step::Add(_))),
            mistakes,
            said: 0,
            outcome: Outcome::default(),
            begun: 0,
            last: 0,
            trace,
        }
    }

    pub(crate) fn run(mut self) -> Result<Outcome, Broken> {
        if !self.form()? {
            return Ok(self.outcome);
        }
        // Until the leases have been granted as well.
        self.begun = self.net.now + 20 * MILLI;
        while self.net.step(self.begun) {
            self.look()?;
        }
        for (step, (time, _)) in self.schedule.steps.iter().enumerate() {
            self.last = self.begun + time;
            self.net.plan(self.last, step);
        }
        let mut check = self.last + CHECK;
        let mut rests = 0;
        loop {
            if !self.net.step(check) {
                // Twice, so that the job is not merely between two steps.
                rests = if self.rests().is_ok() { rests + 1 } else { 0 };
                if rests == 2 {
                    break;
                }
                if check > self.last + BOUND {
                    let why = self.rests().expect_err("it does not rest");
                    return broken(5, why);
                }
                check += CHECK;
                continue;
            }
            if self.net.frames > MOST_FRAMES {
                return broken(6, "frames are sent for ever");
            }
            self.happen_all()?;
            self.look()?;
        }
        self.is_available()?;
        self.majority_goes_on()?;
        self.half_goes_on()?;
        self.is_tolerated()?;
        self.counts_by_the_rule()?;
        self.outcome.generations = self.active.keys().next_back().copied().unwrap_or(0);
        self.outcome.excluded = self
            .notes
            .iter()
            .filter(|notes| notes.excluded.is_some())
            .count() as u32;
        self.outcome.sums = self.counters.sums;
        self.outcome.exchanged = self.counters.exchanged;
        self.outcome.messages = self.counters.messages;
        self.outcome.seconds = self.net.now / (1000 * MILLI);
        Ok(self.outcome)
    }

    /// Runs until the first generation is active, or all processes know that there will be none; returns whether it is
    /// active.
    fn form(&mut self) -> Result<bool, Broken> {
        let forming = &self.schedule.forming;
        if forming.is_empty() {
            while self.notes.iter().any(|notes| notes.generation.is_none()) {
                if !self.net.step(2000 * MILLI) {
                    return broken(5, "the first generation is not active after two seconds");
                }
                self.look()?;
            }
            return Ok(true);
        }
        for (number, (time, _)) in forming.iter().enumerate() {
            self.net.plan(*time, self.schedule.steps.len() + number);
        }
        let first = self.slots[0];
        self.form_until(FORMS)?;
        let dismiss = Command::AbortFormation(Arc::from(&b"too few"[..]));
        self.net.command(first, dismiss);
        self.form_until(JOINS)?;
        for process in self.forms().collect::<Vec<_>>() {
            self.net.command(process, Command::Leave(Departure::Left));
        }
        self.form_until(JOINS + 2000 * MILLI)?;
        if let Some(process) = self.forms().next() {
            return broken(
                6,
                format!("process {process} waits for the first generation"),
            );
        }
        let (formed, dismissed) = (!self.active.is_empty(), self.notes[first].dismissed);
        let has_link = self.net.processes[first].alive && !self.notes[first].left;
        if formed == dismissed && (formed || has_link) {
            return broken(3, "a generation is active that was dismissed, or neither");
        }
        Ok(formed)
    }

    /// Returns the processes that wait for the first generation.
    fn forms(&self) -> impl Iterator<Item = usize> {
        let waits = |process: &usize| {
            let (own, notes) = (&self.net.processes[*process], &self.notes[*process]);
            own.alive && notes.generation.is_none() && !notes.dismissed && !notes.left
        };
        (0..self.voters).filter(waits)
    }

    fn form_until(&mut self, time: u64) -> Result<(), Broken> {
        self.look()?;
        while self.forms().next().is_some() && self.net.step(time) {
            self.happen_all()?;
            self.look()?;
        }
        Ok(())
    }

    fn happen_all(&mut self) -> Result<(), Broken> {
        while let Some(number) = self.net.due.pop() {
            let Schedule { steps, forming, .. } = self.schedule;
            let forming = || forming[number - steps.len()];
            let (_, step) = steps.get(number).copied().unwrap_or_else(forming);
            self.happen(step);
            if matches!(step, Step::Add(_)) {
                self.exchange_once_more()?;
            }
        }
        Ok(())
    }

    /// Makes the programs of all processes enter one more exchange.
    fn exchange_once_more(&mut self) -> Result<(), Broken> {
        self.counters.more_exchanges();
        for process in 0..self.net.processes.len() {
            let own = &self.net.processes[process];
            if own.alive && !own.frozen {
                self.go_on(process, Vec::new())?;
            }
        }
        Ok(())
    }

    fn happen(&mut self, step: Step) {
        if self.trace {
            println!(
                "{:>10.3} ms ---- {step:?}",
                self.net.now as f64 / MILLI as f64
            );
        }
        self.outcome.kinds[step.kind()] += 1;
        let ends = |run: &Self, slot: usize| match &run.net.processes[run.slots[slot]].machine {
            Machine::Member(member) => member.is_coordinator(),
            Machine::Observer(_) => false,
        };
        match step {
            Step::Kill(slot) => {
                self.outcome.counts |= ends(self, slot);
                self.net.kill(self.slots[slot]);
            }
            Step::Fuse(slot, frames) => {
                self.outcome.counts |= ends(self, slot);
                let process = &mut self.net.processes[self.slots[slot]];
                process.fuse = process.alive.then_some(frames);
            }
            Step::Freeze(slot) | Step::Late(slot) => self.net.freeze(self.slots[slot]),
            Step::Thaw(slot) => self.net.thaw(self.slots[slot]),
            Step::Cut { from, to, rejects } => {
                self.outcome.counts = true;
                let path = if rejects { Path::Rejects } else { Path::Drops };
                self.net.set_path(from, to, path);
            }
            Step::Heal { from, to } => self.net.set_path(from, to, Path::Open),
            Step::Reset(one, other) => {
                for line in self.net.between(self.slots[one], self.slots[other]) {
                    self.net.reset(line);
                }
            }
            Step::Restart(slot) => {
                if slot >= self.ranks || self.net.processes[self.slots[slot]].alive {
                    return;
                }
                let others = (0..self.ranks).filter(|other| *other != slot);
                let at = others.map(|slot| slot.to_string()).collect();
                let incarnation = 2000 + self.net.processes.len() as u64;
                let kernel = self.schedule.kernels[slot];
                self.slots[slot] =
                    self.net
                        .start(slot as u32, incarnation, kernel, StartRole::Joiner { at });
                self.notes.push(Notes::default());
            }
            Step::Say(slot) => {
                self.said += 1;
                let bytes = self.said.to_le_bytes().to_vec();
                let topic = String::from("fault");
                self.net
                    .command(self.slots[slot], Command::Broadcast { topic, bytes });
            }
            Step::Tell(slot, to) => {
                self.said += 1;
                let bytes = self.said.to_le_bytes().to_vec();
                let to = self.net.processes[self.slots[to]].id;
                self.net
                    .command(self.slots[slot], Command::SendDirect { to, bytes });
            }
            Step::GoOn(_) => {
                for slot in 0..self.ranks {
                    self.reconfigure_request(self.slots[slot]);
                }
            }
            Step::Abstain(slot) => {
                let process = self.slots[slot];
                let own = &self.net.processes[process];
                if !own.frozen && own.member().is_in() && !own.member().is_joining() {
                    self.notes[process].abstains.get_or_insert(self.net.now);
                    self.net.command(process, Command::Abstain);
                }
            }
            Step::Ask(slot) => {
                self.said += 1;
                let process = self.slots[slot];
                self.notes[process].asked.insert(self.said, false);
                self.ask(process, self.said);
            }
            Step::Add(slot) => self.begin_to_add(self.slots[slot]),
            Step::Operator(side) => self.operator(side),
            Step::Progress(long) => {
                let members = (0..self.ranks).map(|slot| self.slots[slot]);
                for process in members.collect::<Vec<_>>() {
                    for at in (0..long).step_by(PROGRESS as usize) {
                        self.net.input_in(at, process, Input::Progress);
                    }
                }
            }
            Step::Jump(slot, by) => self.net.jump(self.slots[slot], by),
            Step::Leave(slot) => {
                self.outcome.counts |= ends(self, slot);
                self.notes[self.slots[slot]].leaves = true;
                self.net
                    .command(self.slots[slot], Command::Leave(Departure::Left));
            }
        }
    }

    fn ask(&mut self, process: usize, number: u32) {
        let bytes = Arc::from(&number.to_le_bytes()[..]);
        self.net
            .input_in(1, process, Input::Command(Command::Request(bytes)));
    }

    /// As the operator, ends every member of the latest generation that is not on these kernels, and decides that the
    /// others may continue.
    fn operator(&mut self, side: u32) {
        let latest = self.active.keys().next_back().copied().unwrap_or(0);
        let (mut all, mut others) = (Vec::new(), Vec::new());
        for (number, process) in self.net.processes.iter().enumerate() {
            let Machine::Member(member) = &process.machine else {
                continue;
            };
            let is_here = side & (1 << process.kernel) != 0 && process.alive && !process.frozen;
            let is_latest = member.is_in()
                && !member.is_joining()
                && member.membership().generation.number == latest;
            match is_here && is_latest {
                true => all.push(number),
                // Also those that an earlier generation could still admit to this one.
                false => others.push(number),
            }
        }
        for number in others {
            self.net.kill(number);
        }
        let id = |number: &usize| self.net.processes[*number].id;
        let decision = OperatorDecision {
            generation: latest,
            members: all.iter().map(id).collect(),
        };
        // Send the decision to one of them, to all of them, or to the observers.
        let observers = self.voters..self.slots.len();
        let to: Vec<_> = match self.net.random.u8(0..3) {
            0 => all.first().copied().into_iter().collect(),
            1 => all,
            _ => observers.map(|slot| self.slots[slot]).collect(),
        };
        for process in to {
            self.net
                .command(process, Command::OperatorDecision(decision.clone()));
        }
    }

    fn reconfigure_request(&mut self, process: usize) {
        let notes = &mut self.notes[process];
        let slot = self.net.processes[process].id.slot as usize;
        if slot >= self.ranks
            || notes.abstains.is_some()
            || std::mem::replace(&mut notes.wished, true)
        {
            return;
        }
        let (timeout, leaves_behind) = (RECONFIGURE_TIMEOUT, self.schedule.leaves_behind);
        self.net.input_in(
            1,
            process,
            Input::Command(Command::Reconfigure {
                timeout,
                leaves_behind,
            }),
        );
    }

    /// Starts a thread that adds, in the program of a process that takes part.
    fn begin_to_add(&mut self, process: usize) {
        let own = &self.net.processes[process];
        let Machine::Member(member) = &own.machine else {
            return;
        };
        let runs = own.alive && !own.frozen && member.is_in();
        let has_coordinator = member.has_coordinator();
        let Some(store) = self.notes[process].store.as_mut().filter(|_| runs) else {
            return;
        };
        if let Some(command) = store.begin(has_coordinator, &mut self.counters) {
            self.net.command(process, command);
        }
    }

    /// Passes an event of the machine to the store of a process, and the results to the program.
    fn run_store(&mut self, process: usize, event: &Event) -> Result<(), Broken> {
        let own = &self.net.processes[process];
        if !self.has_additions || !matches!(own.machine, Machine::Member(_)) {
            return Ok(());
        }
        let (id, mistakes) = (own.id, self.mistakes);
        let store = self.notes[process].store.as_mut();
        let Some(store) = store else {
            self.notes[process].store = Some(StoreProgram::new(id, mistakes));
            return self.run_store(process, event);
        };
        let commands = store.handle(event);
        self.go_on(process, commands)
    }

    /// Lets the program of a process continue, and passes the resulting commands to the machine, after `commands`.
    fn go_on(&mut self, process: usize, mut commands: Vec<Command>) -> Result<(), Broken> {
        let own = &self.net.processes[process];
        let (Machine::Member(member), Some(store)) = (&own.machine, &mut self.notes[process].store)
        else {
            return Ok(());
        };
        let has_coordinator = member.has_coordinator();
        match store.go_on(has_coordinator, &mut self.counters) {
            Ok(more) => commands.extend(more),
            Err(how) => return broken(RULE, format!("process {process}: {how}")),
        }
        for command in commands {
            self.net.command(process, command);
        }
        Ok(())
    }

    /// Checks the new events of the processes.
    fn look(&mut self) -> Result<(), Broken> {
        while let Some(process) = self.net.touched.pop() {
            while let Some(event) = self.net.processes[process].events.pop_front() {
                if self.trace {
                    println!(
                        "{:>10.3} ms process {process}: {}",
                        self.net.now as f64 / MILLI as f64,
                        brief(&event)
                    );
                }
                self.run_store(process, &event)?;
                self.judge(process, event)?;
            }
        }
        Ok(())
    }

    fn judge(&mut self, process: usize, event: Event) -> Result<(), Broken> {
        let is_observer = matches!(self.net.processes[process].machine, Machine::Observer(_));
        let notes = &mut self.notes[process];
        match event {
            Event::Active(membership) => {
                let is_departed = notes.excluded.is_some() || notes.left || notes.dismissed;
                let is_other = notes.generation.is_some() && notes.abstains.is_some();
                if is_departed || is_other {
                    return broken(3, format!("process {process} takes part again"));
                }
                let generation = membership.generation;
                let number = generation.number;
                let now = self.net.now;
                let is_new = !self.active.contains_key(&number);
                let one = self.active.entry(number);
                let (_, one) = one.or_insert_with(|| (now, Arc::clone(&membership)));
                let one = one.generation;
                if one != generation {
                    return broken(
                        1,
                        format!("two generations {number} are active: {one:?} and {generation:?}"),
                    );
                }
                let ranks = 0..membership.members.len();
                for rank in ranks.filter(|_| is_new) {
                    let id = membership.members[rank].id;
                    let slot = membership.slot(rank).map(|slot| slot.number);
                    let slot = slot.unwrap_or(usize::MAX);
                    if *self.slot_of.entry(id).or_insert(slot) != slot {
                        return broken(RULE, format!("{id:?} changes its slot"));
                    }
                }
                let members: BTreeSet<_> = membership.voters().map(|voter| voter.id).collect();
                if members.len() != membership.voters().count() {
                    return broken(RULE, format!("a member is twice in generation {number}"));
                }
                let before = std::mem::take(&mut notes.log);
                let before_it = notes.generation.map(|before| before.number + 1);
                if before_it == Some(number) && !is_observer {
                    let known = self.heard.entry(number).or_default();
                    let both = known.len().min(before.len());
                    if known[..both] != before[..both] {
                        return broken(
                            2,
                            format!(
                                "before generation {number}, {known:?} and {before:?} were heard"
                            ),
                        );
                    }
                    if before.len() > known.len() {
                        *known = before;
                    }
                }
                notes.generation = Some(generation);
                notes.wished = false;
                if !is_observer {
                    self.net.watch(process, &membership);
                }
            }
            Event::Entry(entry) => {
                notes.log.push(Arc::clone(&entry));
                let is_fault = match &*entry {
                    Entry::Departed {
                        member,
                        departure,
                        proven,
                    } => {
                        let of = self.net.process_of(*member);
                        let lives = of.is_some_and(|of| self.net.processes[of].alive);
                        let calls_dead = calls_dead(departure);
                        if lives && calls_dead {
                            return broken(
                                4,
                                format!("process {process} hears that {member:?} died: it lives"),
                            );
                        }
                        let notes = of.map(|of| &self.notes[of]);
                        let takes_part =
                            notes.is_some_and(|notes| notes.excluded.is_none() && !notes.left);
                        let is_leaving = !calls_dead;
                        if *proven && lives && takes_part && !is_leaving {
                            return broken(
                                4,
                                format!("the end of {member:?} is proven, and it takes part"),
                            );
                        }
                        *departure != Departure::Left
                    }
                    Entry::Broadcast(_) => true,
                    Entry::OperatorDecision(_) => false,
                };
                let log = &self.notes[process].log;
                if !is_observer && log.iter().filter(|other| **other == entry).count() > 1 {
                    return broken(2, format!("process {process} hears {entry:?} twice"));
                }
                if is_fault && self.schedule.goes_on {
                    self.reconfigure_request(process);
                }
            }
            Event::Direct(_, bytes) => {
                if !notes.told.insert(bytes) {
                    return broken(2, format!("process {process} is told the same twice"));
                }
            }
            Event::Excluded(why) => {
                if matches!(why, Exclusion::LeftBehind(_)) {
                    notes.left_behind = Some(self.net.now);
                }
                notes.excluded = Some(why);
            }
            Event::Left => notes.left = true,
            Event::ReconfigureFailed(missing) => {
                notes.wished = true;
                for id in missing.iter().filter(|_| self.is_reachable) {
                    let of = self.net.process_of(*id).expect("a member is a process");
                    let abstains = self.notes[of].abstains;
                    let long = abstains.is_some_and(|since| self.net.now - since > 2500 * MILLI);
                    if long && self.net.processes[of].alive {
                        return broken(6, format!("{id:?} is waited for, which abstains"));
                    }
                }
            }
            Event::Coordinator(of) => {
                if of.slot as usize >= self.ranks {
                    return broken(RULE, format!("a witness coordinates: {of:?}"));
                }
                if self.is_calm && of.slot != 0 {
                    return broken(RULE, "a process that was late has given a coordinator up");
                }
                let asked = notes.asked.iter().filter(|(_, replied)| !**replied);
                for number in asked.map(|(number, _)| *number).collect::<Vec<_>>() {
                    self.ask(process, number);
                }
            }
            // Requests and replies of the store are longer.
            Event::Request(_, bytes) | Event::Reply(bytes) if bytes.len() > QUESTION => {}
            Event::Request(to, bytes) => {
                let later = self.net.random.u64(1..20 * MILLI);
                let reply = Command::Reply { to, bytes };
                self.net.input_in(later, process, Input::Command(reply));
            }
            Event::Reply(bytes) => {
                let number = (*bytes).try_into().map(u32::from_le_bytes).unwrap_or(0);
                match notes.asked.get_mut(&number) {
                    Some(replied) => *replied = true,
                    None => return broken(2, format!("{process} gets a reply to no question")),
                }
            }
            Event::FormationAborted(_) => notes.dismissed = true,
            Event::JoinRevoked(slot, departure) => {
                let lives = self.net.processes[self.slots[slot as usize]].alive;
                if lives && calls_dead(&departure) {
                    return broken(4, format!("slot {slot} is called dead: it lives"));
                }
                // The coordinator's program does not wait for another process.
                let dismiss = Command::AbortFormation(Arc::from(&b"one is gone"[..]));
                let later = self.net.random.u64(1..50 * MILLI);
                self.net.input_in(later, process, Input::Command(dismiss));
            }
            Event::JobUnreachable(open) => {
                // The operator knows the members of one generation. All of them may be gone, and other members may have
                // joined.
                let latest = self.active.last_key_value().map(|(number, _)| *number);
                let has_link = |id: &MemberId| {
                    let of = self.net.process_of(*id).filter(|of| self.takes_part(*of));
                    let of = of.map(|of| &self.net.processes[of]);
                    let of = of.filter(|of| of.alive).map(Process::member);
                    let number = of.map(|of| of.membership().generation.number);
                    of.is_some_and(MemberMachine::is_in) && number == latest
                };
                let known = match &self.net.processes[process].machine {
                    Machine::Observer(observer) => observer.membership().cloned(),
                    Machine::Member(_) => None,
                };
                let them = known.iter().flat_map(|known| &known.members);
                let one = them.map(|voter| voter.id).find(has_link);
                if let Some(id) = one.filter(|_| self.is_reachable) {
                    return broken(
                        6,
                        format!("observer {process} has given up, {id:?} takes part ({open:?})"),
                    );
                }
            }
            Event::Claim(generation, half) => {
                let smallest = half.first().copied().expect("half of some voters");
                let voter = *self.claimed.entry(generation).or_insert(smallest);
                if self.schedule.claims && half.contains(&voter) {
                    let won = Command::Claimed(generation, voter);
                    self.net.input_in(5 * MILLI, process, Input::Command(won));
                }
            }
            Event::Suspected(..)
            | Event::Heard(..)
            | Event::Resumed(..)
            | Event::Joined(_)
            | Event::Forming(_)
            | Event::Joiners(_) => {}
        }
        Ok(())
    }

    /// Checks that nothing is pending any more.
    fn rests(&self) -> Result<(), String> {
        let processes = &self.net.processes;
        for (number, process) in processes.iter().enumerate() {
            let member = match &process.machine {
                Machine::Member(member) => member,
                Machine::Observer(_) => {
                    self.observer_rests(number)?;
                    continue;
                }
            };
            if !process.alive || process.frozen || !member.is_in() || member.is_joining() {
                continue;
            }
            let say = |what: &str| Err(format!("process {number} {what}"));
            if !member.is_idle() {
                return say("waits");
            }
            // A frozen process cannot be distinguished from its predecessor at its address.
            let at_its_address = &processes[self.slots[member.coordinator().slot as usize]];
            if at_its_address.alive && at_its_address.frozen {
                continue;
            }
            let coordinator = self.net.process_of(member.coordinator());
            let coordinator_member = coordinator.unwrap_or(number);
            let Some(coordinator) = coordinator.map(|of| &processes[of]).filter(|of| of.alive)
            else {
                return say("follows a process that ended");
            };
            if coordinator.frozen {
                continue;
            }
            if !coordinator.member().is_coordinator() {
                return say("follows a process that does not coordinate");
            }
            let generation = |of: &Process| of.member().membership().generation;
            if generation(coordinator) != generation(process) {
                return say("follows a process of another generation");
            }
            if member.log_end() != coordinator.member().log_end() {
                return say("has not heard everything");
            }
            if self.notes[number].asked.values().any(|replied| !replied) {
                return say("waits for a reply");
            }
            let generation = generation(process).number;
            let store = self.notes[number].store.as_ref();
            if store.is_some_and(|store| store.waits_for(generation)) {
                return say("waits for the store");
            }
            let answers = |id: MemberId| {
                let of = self.net.process_of(id).map(|of| &processes[of]);
                of.is_some_and(|of| of.alive && !of.frozen && of.member().is_in())
            };
            if store.is_some_and(|store| store.waits_in_vain(&self.counters, answers)) {
                return say("waits in an exchange that all have entered");
            }
            let of_coordinator = self.notes[coordinator_member].store.as_ref();
            if of_coordinator.is_none_or(|store| !store.awaits_former())
                && let Some(rank) = store.and_then(|store| store.misses_message_of(&self.counters))
            {
                return say(&format!("has not received all messages of rank {rank}"));
            }
            self.counters.check_order(generation)?;
            let log = &self.notes[number].log;
            let has_gone = |id: MemberId| {
                log.iter().any(
                    |entry| matches!(&**entry, Entry::Departed { member, .. } if *member == id),
                )
            };
            // A member that the others have lost, and that follows a frozen process, cannot know what the others
            // received later.
            let goes_on = |id: MemberId| answers(id) && !has_gone(id);
            self.counters.agree(generation, goes_on)?;
            for voter in member.membership().voters() {
                let of = self
                    .net
                    .process_of(voter.id)
                    .expect("a member is a process");
                let takes_part =
                    processes[of].alive && (processes[of].frozen || processes[of].member().is_in());
                let has_link =
                    of == coordinator_member || self.net.is_connected(coordinator_member, of);
                let at_its_address = &processes[self.slots[voter.id.slot as usize]];
                if at_its_address.alive && at_its_address.frozen {
                    continue;
                }
                if (!takes_part || (!has_link && !processes[of].frozen)) && !has_gone(voter.id) {
                    return say(&format!("has not heard of the end of {:?}", voter.id));
                }
            }
        }
        Ok(())
    }

    /// Whether a process has neither left nor begun to.
    fn takes_part(&self, process: usize) -> bool {
        let (notes, id) = (&self.notes[process], self.net.processes[process].id);
        let is_own = |entry: &Arc<Entry>| matches!(&**entry, Entry::Departed { member, .. } if *member == id);
        !notes.left && !notes.leaves && notes.excluded.is_none() && !notes.log.iter().any(is_own)
    }

    /// Checks that an observer watches the coordinator, if it can reach one.
    fn observer_rests(&self, number: usize) -> Result<(), String> {
        let processes = &self.net.processes;
        let own = &processes[number];
        let Machine::Observer(observer) = &own.machine else {
            return Ok(());
        };
        if !own.alive || own.frozen || observer.is_over() {
            return Ok(());
        }
        let say = |what: &str| Err(format!("observer {number} {what}"));
        let leads = |of: &usize| {
            let process = &processes[*of];
            let leads =
                matches!(&process.machine, Machine::Member(member) if member.is_coordinator());
            leads && process.alive && !process.frozen && self.net.is_connected(number, *of)
        };
        let coordinators: Vec<_> = (0..processes.len()).filter(leads).collect();
        let watched = observer
            .coordinator()
            .and_then(|id| self.net.process_of(id));
        let Some(watched) = watched else {
            return match coordinators.is_empty() {
                true => Ok(()),
                false => say("looks for a coordinator that is there"),
            };
        };
        if !coordinators.contains(&watched) {
            let is_frozen = processes[watched].alive && processes[watched].frozen;
            return match is_frozen || !self.net.is_connected(number, watched) {
                true => Ok(()),
                false => say("watches a process that does not coordinate"),
            };
        }
        let coordinator_member = processes[watched].member();
        let membership = observer
            .membership()
            .map(|membership| membership.generation);
        if membership != Some(coordinator_member.membership().generation) {
            return say("is in another generation");
        }
        if observer.log_end() != coordinator_member.log_end() {
            return say("has not heard everything");
        }
        if self.notes[number].asked.values().any(|replied| !replied) {
            return say("waits for a reply");
        }
        Ok(())
    }

    /// Checks that of two generations that could become active, one has no majority: a member that was left out counts no later end.
    fn counts_by_the_rule(&self) -> Result<(), Broken> {
        let members = self
            .net
            .processes
            .iter()
            .filter_map(|process| match &process.machine {
                Machine::Member(member) => Some((process.id, member)),
                Machine::Observer(_) => None,
            });
        for (id, member) in members {
            let generation = member.membership().generation.number;
            let next = self.active.get(&(generation + 1));
            let Some((since, _)) = next.filter(|(_, next)| !next.votes(id)) else {
                continue;
            };
            for voter in member.membership().voters() {
                // The end of a process that had left before is counted because of the leave.
                let of = self.net.process_of(voter.id);
                let of = of.filter(|of| self.takes_part(*of));
                let killed = of.and_then(|of| self.net.processes[of].killed);
                let is_after = killed.is_some_and(|at| at > *since);
                if is_after && member.has_removed_voter(voter.id) {
                    let end = voter.id;
                    return broken(
                        RULE,
                        format!("{id:?} counts the end of {end:?} and is left out before"),
                    );
                }
            }
        }
        Ok(())
    }

    /// Checks that nothing ends if the only event is one outage, and NCCL connects all ranks during it and for some
    /// seconds afterwards.
    fn is_tolerated(&self) -> Result<(), Broken> {
        let schedule = self.schedule;
        let (mut cut, mut healed, mut reaches) = (None, None, None);
        for (time, step) in &schedule.steps {
            match step {
                Step::Cut { .. } if cut.is_none_or(|cut| cut == *time) => cut = Some(*time),
                Step::Heal { .. } => healed = Some(*time),
                Step::Progress(long) if reaches.is_none() => reaches = Some((*time, time + long)),
                Step::Tell(..) | Step::Add(_) => {}
                // Messages that only the coordinator's side has received separate that side from the others.
                _ => return Ok(()),
            }
        }
        let (Some(cut), Some(healed), Some((begins, ends))) = (cut, healed, reaches) else {
            return Ok(());
        };
        if schedule.goes_on
            || !schedule.forming.is_empty()
            || begins > cut
            || ends < healed + DIALS_AGAIN
        {
            return Ok(());
        }
        // NCCL does not reach witnesses.
        let is_rank = |slot: usize| slot < self.ranks;
        let is_gone = |entry: &Arc<Entry>| matches!(**entry, Entry::Departed { member, .. } if is_rank(member.slot as usize));
        for (process, notes) in self.notes.iter().enumerate() {
            let is_excluded = notes.excluded.is_some() && is_rank(process);
            if is_excluded || notes.log.iter().any(is_gone) {
                let how = format!("process {process} has lost another, which NCCL reached");
                return broken(5, how);
            }
        }
        Ok(())
    }

    /// If the only event is that the network is cut permanently into two halves and a claim decides between them,
    /// checks that one half continues.
    fn half_goes_on(&self) -> Result<(), Broken> {
        let Schedule {
            kernels,
            witnesses,
            claims,
            forming,
            steps,
            ..
        } = self.schedule;
        let is_harmless = |step: &Step| {
            matches!(
                step,
                Step::Cut { .. }
                    | Step::Late(_)
                    | Step::Thaw(_)
                    | Step::Say(_)
                    | Step::Tell(..)
                    | Step::GoOn(_)
                    | Step::Add(_)
            )
        };
        let ranks = || 0..kernels.len();
        let (side, other): (Vec<_>, Vec<_>) =
            ranks().partition(|rank| *rank == 0 || self.net.is_connected(0, *rank));
        let is_side = |side: &[usize]| {
            let reaches =
                |one: usize, other: usize| one == other || self.net.is_connected(one, other);
            side.iter()
                .all(|one| ranks().all(|other| reaches(*one, other) == side.contains(&other)))
        };
        if !claims
            || !forming.is_empty()
            || !witnesses.is_empty()
            || side.len() != other.len()
            || !steps.iter().all(|(_, step)| is_harmless(step))
            || !is_side(&side)
            || !is_side(&other)
        {
            return Ok(());
        }
        // A half from which a member was left behind is no longer a half.
        let is_left_behind =
            |notes: &Notes| matches!(notes.excluded, Some(Exclusion::LeftBehind(_)));
        if self.notes.iter().any(is_left_behind) {
            return Ok(());
        }
        let is_out = |rank: &usize| self.notes[*rank].excluded.is_some();
        if side.iter().any(is_out) && other.iter().any(is_out) {
            return broken(
                5,
                format!("{side:?} and {other:?} are two halves, and neither goes on"),
            );
        }
        Ok(())
    }

    /// If the only event is that the network is cut permanently, checks that ranks that all reach each other and are a
    /// majority stay together, even if other ranks become unreachable while the next generation is formed.
    fn majority_goes_on(&self) -> Result<(), Broken> {
        let is_cut = |step: &Step| matches!(step, Step::Cut { .. });
        let is_harmless = |step: &Step| {
            is_cut(step)
                || matches!(
                    step,
                    Step::Say(_) | Step::Tell(..) | Step::GoOn(_) | Step::Add(_)
                )
        };
        let Schedule {
            kernels,
            witnesses,
            forming,
            steps,
            ..
        } = self.schedule;
        let steps = || steps.iter().map(|(_, step)| step);
        if !forming.is_empty()
            || !witnesses.is_empty()
            || !steps().any(is_cut)
            || !steps().all(is_harmless)
        {
            return Ok(());
        }
        let is_side = |side: &Vec<usize>| {
            let pairs = || {
                side.iter()
                    .flat_map(|one| side.iter().map(move |other| (*one, *other)))
            };
            side.len() > kernels.len() / 2
                && pairs().all(|(one, other)| self.net.is_connected(one, other))
        };
        // The sides are whole kernels.
        let many = kernels.iter().max().map_or(1, |most| most + 1);
        let sides = (1u32..1 << many).map(|side| {
            let ranks = 0..kernels.len();
            ranks
                .filter(|rank| side & (1 << kernels[*rank]) != 0)
                .collect::<Vec<_>>()
        });
        // The members of one side need not stay together with those of an overlapping side.
        let sides: Vec<_> = sides.filter(is_side).collect();
        let Some(side) = sides.iter().max_by_key(|side| side.len()) else {
            return Ok(());
        };
        if !sides
            .iter()
            .all(|other| other.iter().all(|rank| side.contains(rank)))
        {
            return Ok(());
        }
        // Those left behind before the cut, by messages that may arrive later, are no longer members; without them, the
        // side may be no majority.
        let is_cut = |(_, step): &&(u64, Step)| matches!(step, Step::Cut { .. });
        let cut = self
            .schedule
            .steps
            .iter()
            .find(is_cut)
            .map_or(0, |(time, _)| *time);
        let was_member = |rank: &&usize| {
            let left_behind = self.notes[**rank].left_behind;
            left_behind.is_none_or(|at| at > self.begun + cut + UNACKNOWLEDGED)
                || !self.schedule.leaves_behind
        };
        let members = (0..kernels.len()).filter(|rank| was_member(&rank)).count();
        if 2 * side.iter().filter(was_member).count() <= members {
            return Ok(());
        }
        for &rank in side {
            let is_wanted = |why: &&Exclusion| {
                self.schedule.leaves_behind && matches!(why, Exclusion::LeftBehind(_))
            };
            if let Some(why) = self.notes[rank]
                .excluded
                .as_ref()
                .filter(|why| !is_wanted(why))
            {
                return broken(
                    5,
                    format!(
                        "process {rank} takes part no more ({why:?}), and it reaches {side:?}, a majority"
                    ),
                );
            }
        }
        Ok(())
    }

    /// Checks that a side that may continue does so.
    fn is_available(&self) -> Result<(), Broken> {
        let steps = self.schedule.steps.iter().map(|(_, step)| step);
        let may_exclude = |step: &Step| {
            matches!(
                step,
                Step::Freeze(_)
                    | Step::Jump(..)
                    | Step::Cut { .. }
                    | Step::Leave(_)
                    | Step::Late(_)
                    | Step::Abstain(_)
                    | Step::GoOn(_)
            )
        };
        let kernels = self.schedule.kernels.iter().collect::<BTreeSet<_>>();
        let is_proven = self.schedule.launcher || (kernels.len() == 1 && self.schedule.watches);
        let is_proven = is_proven && self.schedule.forming.is_empty();
        if !is_proven
            || !self.schedule.witnesses.is_empty()
            || self.schedule.leaves_behind
            || steps.clone().any(may_exclude)
        {
            return Ok(());
        }
        // A process that has joined and never had a lease may have been left out of a later generation, all of whose members
        // have ended, so that it counts no end.
        let could_go_on = |process: &Process| match &process.machine {
            Machine::Member(member) => process.alive && member.has_had_lease(),
            Machine::Observer(_) => process.alive,
        };
        for (number, notes) in self.notes.iter().enumerate() {
            if let Some(why) = notes
                .excluded
                .as_ref()
                .filter(|_| could_go_on(&self.net.processes[number]))
            {
                return broken(
                    5,
                    format!(
                        "process {number} takes part no more ({why:?}), and nothing kept it from that"
                    ),
                );
            }
        }
        Ok(())
    }
}

/// Whether this departure states that a process ended.
fn calls_dead(departure: &Departure) -> bool {
    use nccl_base::departure::LossKind;
    match departure {
        Departure::Left | Departure::Failed(_) => false,
        Departure::Lost(lost) => {
            matches!(
                lost.how,
                LossKind::Ended(_) | LossKind::Closed | LossKind::Exited { .. }
            )
        }
    }
}

fn brief(event: &Event) -> String {
    match event {
        Event::Active(membership) => {
            let members: Vec<_> = membership.members.iter().map(|voter| voter.id).collect();
            format!("{:?} of {members:?} is active", membership.generation)
        }
        Event::Entry(entry) => match &**entry {
            Entry::Departed {
                member,
                departure,
                proven,
            } => format!("{member:?} is gone, proven {proven}: {departure}"),
            entry => format!("{entry:?}"),
        },
        event => format!("{event:?}"),
    }
}
