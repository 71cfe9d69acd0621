//! Every order in which messages, deaths and a cut of the network can come, tried out.
//!
//! Four ranks, each with a [`Succession`] as it runs in a process; around them what the rest does, as small as
//! it can be: connections that keep their order, of which one that was closed gives what was sent before
//! and then its end; doors that say who coordinates; a coordinator that tells its followers one after
//! another, and may die between any two of them. Time does not pass: whatever can happen at all, a cut host
//! found silent included, happens in any order with everything else.
//!
//! In every state, ranks that can reach each other and are more than half of those alive have heard the
//! same, as far as they have heard, and nothing twice; the first of it is their verdict. In every state from
//! which nothing happens any more, each of them has one; and whoever cannot reach more than half of those that
//! may live, for all that it knows, knows that it is cut off. Somebody who is new is then let in by one rank at most,
//! and by one of that majority where there is one.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::*;
use crate::departure::{How, Sign};

const RANKS: usize = 4;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Fact {
    Fault(usize),
    Gone { rank: usize, lives: bool },
}

impl Entry for Fact {
    fn gone(rank: usize, lost: &Lost) -> Self {
        let lives = lost.may_live();
        Self::Gone { rank, lives }
    }

    fn departed(&self) -> Option<(usize, bool)> {
        match self {
            Self::Fault(_) => None,
            Self::Gone { rank, lives } => Some((*rank, *lives)),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Message {
    Told(Fact),
    Succeeded { start: usize, entries: Vec<Fact> },
    CutOff,
    Say(Fact),
    Report(Report<Fact>),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Node {
    machine: Succession<Fact>,
    alive: bool,
    cut_off: bool,
    /// Whom it is connected to, as a rank.
    link: Option<usize>,
    /// What it is about to send.
    outbox: Vec<(usize, Message)>,
    /// Who is connected to it.
    followers: Vec<usize>,
    /// Whose connections have broken in silence.
    suspects: Vec<usize>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    nodes: Vec<Node>,
    /// What is on its way, by sender and receiver.
    wires: Vec<Vec<Vec<Message>>>,
    /// Which side of the cut a rank is on.
    side: [bool; RANKS],
    deaths: usize,
    is_cut: bool,
    faults: Vec<usize>,
}

/// What is tried out.
#[derive(Clone, Debug)]
struct Plan {
    deaths: usize,
    /// The side that is cut off at some time, if any is.
    cut: Option<[bool; RANKS]>,
    /// Who says at some time that something failed.
    faults: Vec<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Happening {
    Dies(usize),
    IsCut,
    Says(usize),
    Sends(usize),
    Hears { from: usize, to: usize },
    LosesItsLink(usize),
    Seeks(usize),
    AsksAround { at: usize, about: usize },
    LosesAFollower { at: usize, follower: usize },
}

impl World {
    fn new(plan: &Plan) -> Self {
        let node = |rank| Node {
            machine: Succession::new(rank, RANKS),
            alive: true,
            cut_off: false,
            link: (rank > 0).then_some(0),
            outbox: Vec::new(),
            followers: if rank == 0 {
                (1..RANKS).collect()
            } else {
                Vec::new()
            },
            suspects: Vec::new(),
        };
        Self {
            nodes: (0..RANKS).map(node).collect(),
            wires: vec![vec![Vec::new(); RANKS]; RANKS],
            side: [false; RANKS],
            deaths: plan.deaths,
            is_cut: plan.cut.is_none(),
            faults: plan.faults.clone(),
        }
    }

    fn reach(&self, one: usize, other: usize) -> bool {
        self.side[one] == self.side[other]
    }

    fn takes_part(&self, rank: usize) -> bool {
        self.nodes[rank].alive && !self.nodes[rank].cut_off
    }

    fn happenings(&self) -> Vec<Happening> {
        let mut all = Vec::new();
        for rank in 0..RANKS {
            if self.deaths > 0 && self.nodes[rank].alive {
                all.push(Happening::Dies(rank));
            }
            if !self.takes_part(rank) {
                continue;
            }
            let node = &self.nodes[rank];
            if self.faults.contains(&rank) {
                all.push(Happening::Says(rank));
            }
            if !node.outbox.is_empty() {
                all.push(Happening::Sends(rank));
            }
            if let Some(to) = node.link {
                let ended = !self.nodes[to].alive && self.wires[to][rank].is_empty();
                if ended || !self.reach(rank, to) {
                    all.push(Happening::LosesItsLink(rank));
                }
            }
            if *node.machine.stage() == Stage::Seeking && node.link.is_none() {
                all.push(Happening::Seeks(rank));
            }
            for about in node.machine.awaited() {
                let at = rank;
                all.push(Happening::AsksAround { at, about });
            }
            for &follower in &node.followers {
                let ended = !self.nodes[follower].alive && self.wires[follower][rank].is_empty();
                if ended || !self.reach(rank, follower) {
                    all.push(Happening::LosesAFollower { at: rank, follower });
                }
            }
            for from in 0..RANKS {
                if !self.wires[from][rank].is_empty() && self.reach(from, rank) {
                    all.push(Happening::Hears { from, to: rank });
                }
            }
        }
        if !self.is_cut {
            all.push(Happening::IsCut);
        }
        all
    }

    /// What follows; `None` when nothing does.
    fn after(&self, plan: &Plan, happening: Happening) -> Option<Self> {
        let mut next = self.clone();
        match happening {
            Happening::Dies(rank) => {
                next.deaths -= 1;
                next.nodes[rank].alive = false;
                next.nodes[rank].outbox.clear();
            }
            Happening::IsCut => {
                next.is_cut = true;
                next.side = plan.cut?;
            }
            Happening::Says(rank) => {
                next.faults.retain(|other| *other != rank);
                let fact = Fact::Fault(rank);
                if next.leads(rank) {
                    next.order(rank, fact);
                } else {
                    let node = &mut next.nodes[rank];
                    node.machine.say(fact.clone());
                    if let Some(to) = node.link {
                        node.outbox.push((to, Message::Say(fact)));
                    }
                }
            }
            Happening::Sends(rank) => {
                let (to, message) = next.nodes[rank].outbox.remove(0);
                let connected =
                    next.nodes[to].link == Some(rank) || next.nodes[rank].link == Some(to);
                if connected && next.nodes[to].alive && next.reach(rank, to) {
                    next.wires[rank][to].push(message);
                }
            }
            Happening::Hears { from, to } => {
                let message = next.wires[from][to].remove(0);
                next.hear(from, to, message);
            }
            Happening::LosesItsLink(rank) => {
                let to = next.nodes[rank].link.take()?;
                let loss = next.loss(rank, to);
                next.wires[to][rank].clear();
                next.nodes[rank].outbox.clear();
                next.step(rank, Event::Lost(loss));
            }
            Happening::Seeks(rank) => {
                let to = next.nodes[rank].machine.coordinator();
                let other = &next.nodes[to].machine;
                let collects = matches!(other.stage(), Stage::Collecting(_) | Stage::Leading);
                if !next.nodes[to].alive || !next.reach(rank, to) {
                    let loss = next.loss(rank, to);
                    next.step(rank, Event::Lost(loss));
                } else if next.nodes[to].cut_off {
                    next.step(rank, Event::Refused);
                } else if collects {
                    next.nodes[rank].link = Some(to);
                    next.nodes[to].followers.push(rank);
                    let report = next.nodes[rank].machine.report();
                    next.wires[rank][to] = vec![Message::Report(report)];
                } else if other.coordinator() > to {
                    let by = other.coordinator();
                    next.step(rank, Event::Overtaken { by });
                } else {
                    // It does not know yet that it is next.
                    return None;
                }
            }
            Happening::AsksAround { at, about } => {
                let other = &next.nodes[about];
                let event = if !next.reach(at, about) || !other.alive {
                    let loss = next.loss(at, about);
                    Event::Found { rank: about, loss }
                } else if other.cut_off {
                    let loss = Loss::Elsewhere;
                    Event::Found { rank: about, loss }
                } else if other.machine.coordinator() > at {
                    let by = other.machine.coordinator();
                    Event::Overtaken { by }
                } else {
                    return None;
                };
                next.step(at, event);
            }
            Happening::LosesAFollower { at, follower } => {
                next.nodes[at].followers.retain(|other| *other != follower);
                next.wires[follower][at].clear();
                let loss = next.loss(at, follower);
                if next.leads(at) {
                    let known =
                        |fact: &Fact| fact.departed().is_some_and(|(rank, _)| rank == follower);
                    let known = next.nodes[at].machine.log().iter().any(known);
                    if !known && loss.is_certain() {
                        let rank = follower;
                        next.order(at, Fact::Gone { rank, lives: false });
                    } else if !known {
                        next.nodes[at].suspects.push(follower);
                    }
                    next.weigh(at);
                } else {
                    let rank = follower;
                    next.step(at, Event::Found { rank, loss });
                }
            }
        }
        (next != *self).then_some(next)
    }

    fn leads(&self, rank: usize) -> bool {
        *self.nodes[rank].machine.stage() == Stage::Leading
    }

    fn loss(&self, at: usize, of: usize) -> Loss {
        match self.reach(at, of) {
            true => Loss::Lost(How::Closed.into()),
            false => Loss::Lost(Sign::Error(String::from("silent")).into()),
        }
    }

    /// As `handover` does: decides about those who are silent when enough of the others answer, and finds that
    /// it may not when even all of whom nothing is known would be too few.
    fn weigh(&mut self, at: usize) {
        let node = &self.nodes[at];
        if node.suspects.is_empty() {
            return;
        }
        let log = node.machine.log();
        let dead = |rank: usize| {
            log.iter()
                .any(|fact| fact.departed() == Some((rank, false)))
        };
        let alive = (0..RANKS).filter(|rank| !dead(*rank)).count();
        let answers = |rank: &&usize| self.nodes[**rank].alive && self.reach(at, **rank);
        let sure = node.followers.iter().filter(answers).count();
        if is_majority(1 + sure, alive) {
            for rank in std::mem::take(&mut self.nodes[at].suspects) {
                self.order(at, Fact::Gone { rank, lives: true });
            }
        } else if !is_majority(1 + node.followers.len(), alive) {
            self.nodes[at].cut_off = true;
            for to in self.nodes[at].followers.clone() {
                self.nodes[at].outbox.push((to, Message::CutOff));
            }
            self.flush(at);
        }
    }

    /// A coordinator tells something: itself, and one after another all that follow.
    fn order(&mut self, rank: usize, fact: Fact) {
        let node = &mut self.nodes[rank];
        node.machine.record(fact.clone());
        for to in node.followers.clone() {
            node.outbox.push((to, Message::Told(fact.clone())));
        }
    }

    fn flush(&mut self, rank: usize) {
        for (to, message) in std::mem::take(&mut self.nodes[rank].outbox) {
            if self.nodes[to].alive && self.reach(rank, to) {
                self.wires[rank][to].push(message);
            }
        }
    }

    fn hear(&mut self, from: usize, to: usize, message: Message) {
        match message {
            Message::Told(fact) if self.nodes[to].link == Some(from) => {
                self.nodes[to].machine.record(fact);
            }
            Message::Succeeded { start, entries } if self.nodes[to].link == Some(from) => {
                let by = from;
                self.step(to, Event::Succeeded { by, start, entries });
            }
            Message::CutOff if self.nodes[to].link == Some(from) => self.nodes[to].cut_off = true,
            Message::Say(fact)
                if self.leads(to) && !self.nodes[to].machine.log().contains(&fact) =>
            {
                self.order(to, fact);
            }
            Message::Report(report) => self.step(to, Event::Reported { from, report }),
            _ => {}
        }
    }

    fn step(&mut self, rank: usize, event: Event<Fact>) {
        for action in self.nodes[rank].machine.step(event) {
            let node = &mut self.nodes[rank];
            match action {
                Action::Admit { to, start, entries } => {
                    node.outbox
                        .push((to, Message::Succeeded { start, entries }));
                }
                Action::TurnAway(to) => node.outbox.push((to, Message::CutOff)),
                Action::CutOff { with, .. } => {
                    for to in with {
                        node.outbox.push((to, Message::CutOff));
                    }
                    node.cut_off = true;
                    self.flush(rank);
                }
                Action::Deliver(_) | Action::Seek(_) | Action::Collect(_) | Action::Lead => {}
            }
        }
    }

    fn verdict(&self, rank: usize) -> Option<&Fact> {
        self.nodes[rank].machine.log().first()
    }

    /// Those that can reach each other and are more than half of those alive.
    fn majority(&self) -> Vec<usize> {
        let alive: Vec<_> = (0..RANKS).filter(|rank| self.nodes[*rank].alive).collect();
        [false, true]
            .into_iter()
            .map(|side| {
                let here = alive.iter().filter(|rank| self.side[**rank] == side);
                here.copied().collect::<Vec<_>>()
            })
            .find(|here| is_majority(here.len(), alive.len()))
            .unwrap_or_default()
    }

    /// What must be so in every state.
    fn check_always(&self) -> Result<(), String> {
        let majority = self.majority();
        let log = |rank: usize| self.nodes[rank].machine.log();
        let longest = majority.iter().map(|rank| log(*rank));
        let longest = longest.max_by_key(|log| log.len()).unwrap_or_default();
        for &rank in &majority {
            if !longest.starts_with(log(rank)) {
                let heard = log(rank);
                return Err(format!(
                    "of {majority:?}, rank {rank} heard {heard:?} and another {longest:?}"
                ));
            }
        }
        for rank in 0..RANKS {
            let twice = |(at, entry): (usize, &Fact)| log(rank)[..at].contains(entry);
            if log(rank).iter().enumerate().any(twice) {
                return Err(format!("rank {rank} heard something twice"));
            }
        }
        Ok(())
    }

    /// Who lets somebody in who is new, by the rule of the doors.
    fn admitting(&self) -> Vec<usize> {
        let admits = |rank: &usize| self.takes_part(*rank) && self.leads(*rank);
        (0..RANKS).filter(admits).collect()
    }

    /// What must be so when nothing happens any more.
    fn check_end(&self, plan: &Plan) -> Result<(), String> {
        let majority = self.majority();
        let admitting = self.admitting();
        let is_elsewhere = |rank: &usize| !majority.is_empty() && !majority.contains(rank);
        if admitting.len() > 1 || admitting.iter().any(is_elsewhere) {
            return Err(format!(
                "ranks {admitting:?} let newcomers in, and {majority:?} are the majority"
            ));
        }
        let dead = self.deaths < plan.deaths;
        let something = plan.cut.is_some() || !plan.faults.is_empty() || dead;
        for rank in (0..RANKS).filter(|rank| self.nodes[*rank].alive) {
            let node = &self.nodes[rank];
            // Whoever died on the other side may live, for all that this side knows.
            let own_dead = |other: &usize| !self.nodes[*other].alive && self.reach(rank, *other);
            let may_live = RANKS - (0..RANKS).filter(own_dead).count();
            if majority.contains(&rank) && is_majority(majority.len(), may_live) {
                if node.cut_off {
                    return Err(format!("rank {rank} of {majority:?} is cut off"));
                }
                if something && self.verdict(rank).is_none() {
                    return Err(format!("rank {rank} of {majority:?} waits for ever"));
                }
                let follows = node.machine.coordinator();
                if !self.leads(follows) || !self.nodes[follows].alive {
                    return Err(format!(
                        "rank {rank} follows rank {follows}, which does not lead"
                    ));
                }
            }
            let log = node.machine.log();
            let told_dead = |other: usize| {
                log.iter()
                    .any(|fact| fact.departed() == Some((other, false)))
            };
            let may_live = (0..RANKS).filter(|other| !own_dead(other) && !told_dead(*other));
            let side =
                (0..RANKS).filter(|other| self.nodes[*other].alive && self.reach(rank, *other));
            if !is_majority(side.count(), may_live.count()) && !node.cut_off {
                return Err(format!("rank {rank}, in no majority, is not cut off"));
            }
        }
        Ok(())
    }
}

/// Tries everything; how many states there are, or what is wrong and how it came to that.
fn explore(plan: &Plan) -> Result<usize, String> {
    let hash = |world: &World| {
        let mut one = DefaultHasher::new();
        world.hash(&mut one);
        let mut other = DefaultHasher::new();
        (world, "salt").hash(&mut other);
        (one.finish(), other.finish())
    };
    let start = World::new(plan);
    let mut seen = HashSet::from([hash(&start)]);
    // With the way that led there, as far as one can be told.
    let mut trail: Vec<(usize, Happening)> = Vec::new();
    let mut todo = vec![(start, usize::MAX)];
    while let Some((world, at)) = todo.pop() {
        let story = |why: String| {
            let mut story = Vec::new();
            let mut at = at;
            while let Some((before, happening)) = trail.get(at) {
                story.push(format!("{happening:?}"));
                at = *before;
            }
            story.reverse();
            format!("{why}\n{plan:?}\n{}\n{world:#?}", story.join("\n"))
        };
        world.check_always().map_err(&story)?;
        let mut ends = true;
        let mut found = Vec::new();
        for happening in world.happenings() {
            if let Some(next) = world.after(plan, happening) {
                // Nobody has to die, say something, or be cut off.
                let optional = matches!(happening, Happening::Dies(_));
                ends &= optional;
                if seen.insert(hash(&next)) {
                    found.push((next, happening));
                }
            }
        }
        if ends {
            world.check_end(plan).map_err(&story)?;
        }
        for (next, happening) in found {
            trail.push((at, happening));
            todo.push((next, trail.len() - 1));
        }
    }
    Ok(seen.len())
}

fn explore_all(plans: impl IntoIterator<Item = Plan>) {
    for plan in plans {
        let begun = std::time::Instant::now();
        match explore(&plan) {
            Ok(states) => println!("{states} states in {:.1?}: {plan:?}", begun.elapsed()),
            Err(why) => panic!("{why}"),
        }
    }
}

/// Every way to put some of the ranks on the other side.
fn cuts() -> impl Iterator<Item = [bool; RANKS]> {
    (1..1 << (RANKS - 1)).map(|bits: usize| std::array::from_fn(|rank| bits & (1 << rank) != 0))
}

fn deaths(deaths: usize, faults: &[usize]) -> Plan {
    Plan {
        deaths,
        cut: None,
        faults: faults.to_vec(),
    }
}

fn cuts_and(deaths: usize, faults: &[usize]) -> impl Iterator<Item = Plan> {
    let faults = faults.to_vec();
    cuts().map(move |cut| Plan {
        deaths,
        cut: Some(cut),
        faults: faults.clone(),
    })
}

#[test]
fn two_deaths_at_any_time_leave_one_verdict_and_nobody_waiting() {
    explore_all([deaths(2, &[]), deaths(2, &[3]), deaths(2, &[1])]);
}

#[test]
fn a_cut_at_any_time_leaves_one_verdict_in_a_majority_and_nobody_waiting() {
    explore_all(cuts_and(0, &[]).chain(cuts_and(0, &[3])));
}

#[test]
fn a_cut_and_a_death_leave_one_verdict_in_a_majority_and_nobody_waiting() {
    explore_all(cuts_and(1, &[]));
}

/// Some minutes: `cargo test -p nccl --lib --release check:: -- --ignored --nocapture`.
#[test]
#[ignore = "takes minutes"]
fn more_of_all_that_together() {
    explore_all([deaths(2, &[2, 3]), deaths(3, &[3])]);
    explore_all(
        cuts_and(0, &[1, 2])
            .chain(cuts_and(1, &[3]))
            .chain(cuts_and(2, &[])),
    );
}
