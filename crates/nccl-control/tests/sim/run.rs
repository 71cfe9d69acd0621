//! Runs a schedule and checks what is promised (`nccl_control::proto`, numbers 1 to 6).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use nccl_control::proto::{
    Command, Entry, Event, Exclusion, Generation, Input, MILLI, MemberId, Mistakes, Seat, Timing,
};

use super::network::{Network, Path};
use super::schedule::KINDS;
use super::schedule::{Schedule, Step};
use nccl_base::departure::Departure;

/// How long after the last step everything has to have come to rest.
const BOUND: u64 = 45_000 * MILLI;

/// So many frames are sent by no schedule that comes to rest.
const MOST_FRAMES: u64 = 100_000;

/// How long the programs wait for a next generation.
const PATIENCE: u64 = 3000 * MILLI;

/// What was promised and not kept.
#[derive(Debug)]
pub(crate) struct Broken {
    pub(crate) promise: u8,
    pub(crate) how: String,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "promise {}: {}", self.promise, self.how)
    }
}

fn broken<T>(promise: u8, how: impl Into<String>) -> Result<T, Broken> {
    let how = how.into();
    Err(Broken { promise, how })
}

/// What a schedule came to.
#[derive(Default)]
pub(crate) struct Outcome {
    /// A process that coordinated ended, or packets were kept from going between two kernels.
    pub(crate) counts: bool,
    pub(crate) kinds: [u32; KINDS.len()],
    pub(crate) generations: u64,
    pub(crate) excluded: u32,
    pub(crate) seconds: u64,
}

/// What the checker knows of a process.
#[derive(Default)]
struct Notes {
    /// Events that were looked at.
    looked: usize,
    generation: Option<Generation>,
    log: Vec<Arc<Entry>>,
    excluded: Option<Exclusion>,
    left: bool,
    told: BTreeSet<Vec<u8>>,
    wished: bool,
    faulty: bool,
}

pub(crate) struct Run<'s> {
    schedule: &'s Schedule,
    pub(crate) net: Network,
    notes: Vec<Notes>,
    /// The process that has each slot now.
    slots: Vec<usize>,
    /// The one successor by number.
    active: BTreeMap<u64, Generation>,
    /// What the members of a successor had heard before it.
    heard: BTreeMap<u64, Vec<Arc<Entry>>>,
    claimed: BTreeSet<u64>,
    said: u32,
    outcome: Outcome,
    last: u64,
    trace: bool,
}

impl<'s> Run<'s> {
    pub(crate) fn new(schedule: &'s Schedule, mistakes: Mistakes, trace: bool) -> Self {
        let size = schedule.kernels.len();
        let kernels = schedule.kernels.iter().max().map_or(1, |most| most + 1);
        let mut net = Network::new(schedule.seed, kernels, Timing::default(), mistakes);
        net.launcher = schedule.launcher;
        net.trace = trace;
        let number = 0;
        for (slot, &kernel) in schedule.kernels.iter().enumerate() {
            let seat = match slot {
                0 => Seat::First {
                    number,
                    size: size as u32,
                    witnesses: 0,
                },
                _ => Seat::Rank {
                    number,
                    at: String::from("0"),
                },
            };
            net.start(slot as u32, 1000 + slot as u64, kernel, seat);
        }
        Self {
            schedule,
            net,
            notes: (0..size).map(|_| Notes::default()).collect(),
            slots: (0..size).collect(),
            active: BTreeMap::new(),
            heard: BTreeMap::new(),
            claimed: BTreeSet::new(),
            said: 0,
            outcome: Outcome::default(),
            last: 0,
            trace,
        }
    }

    pub(crate) fn run(mut self) -> Result<Outcome, Broken> {
        while self.notes.iter().any(|notes| notes.generation.is_none()) {
            if !self.net.step(2000 * MILLI) {
                return broken(5, "the first generation is not active after two seconds");
            }
            self.look()?;
        }
        // The leases, too.
        let begun = self.net.now + 20 * MILLI;
        while self.net.step(begun) {
            self.look()?;
        }
        for (step, (time, _)) in self.schedule.steps.iter().enumerate() {
            self.net.plan(begun + time, step);
            self.last = begun + time;
        }
        let mut check = self.last + 500 * MILLI;
        let mut rests = 0;
        loop {
            if !self.net.step(check) {
                // Twice, so that nothing is merely between two steps.
                rests = if self.rests().is_ok() { rests + 1 } else { 0 };
                if rests == 2 {
                    break;
                }
                if check > self.last + BOUND {
                    let why = self.rests().expect_err("it does not rest");
                    return broken(5, why);
                }
                check += 500 * MILLI;
                continue;
            }
            if self.net.frames > MOST_FRAMES {
                return broken(6, "frames are sent for ever");
            }
            while let Some(step) = self.net.due.pop() {
                let (_, step) = self.schedule.steps[step];
                self.happen(step);
            }
            self.look()?;
        }
        self.is_available()?;
        self.outcome.generations = self.active.keys().next_back().copied().unwrap_or(0);
        self.outcome.excluded = self
            .notes
            .iter()
            .filter(|notes| notes.excluded.is_some())
            .count() as u32;
        self.outcome.seconds = self.net.now / (1000 * MILLI);
        Ok(self.outcome)
    }

    fn happen(&mut self, step: Step) {
        if self.trace {
            println!(
                "{:>10.3} ms ---- {step:?}",
                self.net.now as f64 / MILLI as f64
            );
        }
        self.outcome.kinds[step.kind()] += 1;
        let ends = |run: &Self, slot: usize| run.net.processes[run.slots[slot]].member.leads();
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
            Step::Freeze(slot) => self.net.freeze(self.slots[slot]),
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
                if self.net.processes[self.slots[slot]].alive {
                    return;
                }
                let others = (0..self.slots.len()).filter(|other| *other != slot);
                let at = others.map(|slot| slot.to_string()).collect();
                let incarnation = 2000 + self.net.processes.len() as u64;
                let kernel = self.schedule.kernels[slot];
                self.slots[slot] =
                    self.net
                        .start(slot as u32, incarnation, kernel, Seat::Joiner { at });
                self.notes.push(Notes::default());
            }
            Step::Say(slot) => {
                self.said += 1;
                let bytes = self.said.to_le_bytes().to_vec();
                let topic = String::from("fault");
                self.net
                    .command(self.slots[slot], Command::Say { topic, bytes });
            }
            Step::Tell(slot, to) => {
                self.said += 1;
                let bytes = self.said.to_le_bytes().to_vec();
                let to = self.net.processes[self.slots[to]].id;
                self.net
                    .command(self.slots[slot], Command::Tell { to, bytes });
            }
            Step::GoOn(_) => {
                for slot in 0..self.slots.len() {
                    self.wish(self.slots[slot]);
                }
            }
            Step::Jump(slot, by) => self.net.jump(self.slots[slot], by),
            Step::Leave(slot) => {
                self.outcome.counts |= ends(self, slot);
                self.net
                    .command(self.slots[slot], Command::Leave(Departure::Left));
            }
        }
    }

    fn wish(&mut self, process: usize) {
        let notes = &mut self.notes[process];
        if std::mem::replace(&mut notes.wished, true) {
            return;
        }
        let (patience, leaves_behind) = (PATIENCE, self.schedule.leaves_behind);
        self.net.input_in(
            1,
            process,
            Input::Command(Command::GoOn {
                patience,
                leaves_behind,
            }),
        );
    }

    /// Looks at what the processes have seen.
    fn look(&mut self) -> Result<(), Broken> {
        while let Some(process) = self.net.touched.pop() {
            while let Some((_, event)) = self.net.processes[process]
                .seen
                .events
                .get(self.notes[process].looked)
                .cloned()
            {
                self.notes[process].looked += 1;
                if self.trace {
                    println!(
                        "{:>10.3} ms process {process}: {}",
                        self.net.now as f64 / MILLI as f64,
                        brief(&event)
                    );
                }
                self.judge(process, event)?;
            }
        }
        Ok(())
    }

    fn judge(&mut self, process: usize, event: Event) -> Result<(), Broken> {
        let notes = &mut self.notes[process];
        match event {
            Event::Active(membership) => {
                if notes.excluded.is_some() || notes.left {
                    return broken(3, format!("process {process} takes part again"));
                }
                let generation = membership.generation;
                let number = generation.number;
                let one = *self.active.entry(number).or_insert(generation);
                if one != generation {
                    return broken(
                        1,
                        format!("two generations {number} are active: {one:?} and {generation:?}"),
                    );
                }
                let before = std::mem::take(&mut notes.log);
                if notes
                    .generation
                    .is_some_and(|before| before.number + 1 == number)
                {
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
                self.net.watch(process, &membership);
                let notes = &mut self.notes[process];
                (notes.wished, notes.faulty) = (false, false);
            }
            Event::Entry(entry) => {
                notes.log.push(Arc::clone(&entry));
                let is_fault = match &*entry {
                    Entry::Gone {
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
                    Entry::Said(_) => true,
                    Entry::Operator(_) => false,
                };
                let log = &self.notes[process].log;
                if log.iter().filter(|other| **other == entry).count() > 1 {
                    return broken(2, format!("process {process} hears {entry:?} twice"));
                }
                if is_fault && self.schedule.goes_on {
                    self.wish(process);
                }
            }
            Event::Told(_, bytes) => {
                if !notes.told.insert(bytes) {
                    return broken(2, format!("process {process} is told the same twice"));
                }
            }
            Event::Excluded(why) => {
                notes.excluded = Some(why);
            }
            Event::Left => notes.left = true,
            Event::NoSuccessor(_) => notes.wished = true,
            Event::Claim(generation) => {
                if self.schedule.claims && self.claimed.insert(generation.number) {
                    self.net.input_in(
                        5 * MILLI,
                        process,
                        Input::Command(Command::Claimed(generation)),
                    );
                }
            }
            Event::Coordinator(_)
            | Event::Suspected(..)
            | Event::Heard(_)
            | Event::Resumed(..)
            | Event::Joiners(_)
            | Event::Ended(_)
            | Event::Joined(_)
            | Event::Fell(..)
            | Event::Asked(..)
            | Event::Replied(_)
            | Event::Dismissed(_) => {}
        }
        Ok(())
    }

    /// Whether nothing is to be waited for any more.
    fn rests(&self) -> Result<(), String> {
        let processes = &self.net.processes;
        for (number, process) in processes.iter().enumerate() {
            let member = &process.member;
            if !process.alive || process.frozen || !member.is_in() || member.is_joining() {
                continue;
            }
            let say = |what: &str| Err(format!("process {number} {what}"));
            if !member.is_settled() {
                return say("waits");
            }
            // A process that is frozen cannot be told from the one that it was before at its address.
            let at_its_address = &processes[self.slots[member.coordinator().slot as usize]];
            if at_its_address.alive && at_its_address.frozen {
                continue;
            }
            let coordinator = self.net.process_of(member.coordinator());
            let leader = coordinator.unwrap_or(number);
            let Some(coordinator) = coordinator.map(|of| &processes[of]).filter(|of| of.alive)
            else {
                return say("follows a process that ended");
            };
            if coordinator.frozen {
                continue;
            }
            if !coordinator.member.leads() {
                return say("follows a process that does not lead");
            }
            let generation = |of: &super::network::Process| of.member.membership().generation;
            if generation(coordinator) != generation(process) {
                return say("follows a process of another generation");
            }
            if member.heard() != coordinator.member.heard() {
                return say("has not heard everything");
            }
            let log = &self.notes[number].log;
            let has_gone = |id: MemberId| {
                log.iter()
                    .any(|entry| matches!(&**entry, Entry::Gone { member, .. } if *member == id))
            };
            for peer in &member.membership().members {
                let of = self.net.process_of(peer.id).expect("a member is a process");
                let takes_part =
                    processes[of].alive && (processes[of].frozen || processes[of].member.is_in());
                let is_there = of == leader || self.net.is_connected(leader, of);
                let at_its_address = &processes[self.slots[peer.id.slot as usize]];
                if at_its_address.alive && at_its_address.frozen {
                    continue;
                }
                if (!takes_part || (!is_there && !processes[of].frozen)) && !has_gone(peer.id) {
                    return say(&format!("has not heard of the end of {:?}", peer.id));
                }
            }
        }
        Ok(())
    }

    /// A side that may go on does.
    fn is_available(&self) -> Result<(), Broken> {
        let steps = self.schedule.steps.iter().map(|(_, step)| step);
        let may_exclude = |step: &Step| {
            matches!(
                step,
                Step::Freeze(_)
                    | Step::Jump(..)
                    | Step::Cut { .. }
                    | Step::Leave(_)
                    | Step::GoOn(_)
            )
        };
        let kernels = self.schedule.kernels.iter().collect::<BTreeSet<_>>();
        let is_proven = self.schedule.launcher || kernels.len() == 1;
        if !is_proven || self.schedule.leaves_behind || steps.clone().any(may_exclude) {
            return Ok(());
        }
        for (number, notes) in self.notes.iter().enumerate() {
            if let Some(why) = notes
                .excluded
                .as_ref()
                .filter(|_| self.net.processes[number].alive)
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

/// Whether these words say that a process ended.
fn calls_dead(departure: &Departure) -> bool {
    use nccl_base::departure::How;
    match departure {
        Departure::Left | Departure::Failed(_) => false,
        Departure::Lost(lost) => matches!(
            lost.how,
            How::Ended(_) | How::Closed | How::Exited { .. } | How::Orphaned { .. }
        ),
    }
}

fn brief(event: &Event) -> String {
    match event {
        Event::Active(membership) => {
            let members: Vec<_> = membership.members.iter().map(|peer| peer.id).collect();
            format!("{:?} of {members:?} is active", membership.generation)
        }
        Event::Entry(entry) => match &**entry {
            Entry::Gone {
                member,
                departure,
                proven,
            } => format!("{member:?} is gone, proven {proven}: {departure}"),
            entry => format!("{entry:?}"),
        },
        event => format!("{event:?}"),
    }
}
