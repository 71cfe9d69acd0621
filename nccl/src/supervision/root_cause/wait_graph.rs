//! Waits between ranks, over all communicators that are known. Ranks in a cycle wait for ever, whichever rank is late.
//!
//! A call that is not done waits for
//!
//! - the calls in front of it on its own rank: on its stream, and on its communicator, whose calls NCCL runs one after
//!   another;
//! - its counterparts: the other halves of its messages, or the same collective on the other ranks. A counterpart that
//!   has been called waits in turn for the calls in front of it; one that has not been called is called when its rank is done
//!   with what it waits in, which is the first of its calls that is not done.
//!
//! A call on another communicator that became done only a moment ago, after a long wait, counts as well: the rank whose
//! operation times out first releases what is behind its call.
//!
//! A call needs all of these, so that any cycle is a deadlock. A rank that waits only for idle ranks is in no cycle.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use super::input::{Candidate, DiagnosisInput};
use crate::operation::OperationKind;
use crate::supervision::rank_report::EnteredCall;
use crate::supervision::run_length_counts::RunLengthCounts;
use nccl_base::fault::FaultOperation;
use nccl_base::fault::Roster;
use nccl_base::fault::cause::{FaultRole, RootCause};

/// The state of a rank on a communicator.
struct RankState<'c> {
    /// Its number in that communicator.
    rank: usize,
    /// Number of calls entered that all ranks enter, if known.
    entered: Option<u64>,
    calls: Vec<&'c EnteredCall>,
    /// `Some` where only calls that are not done are reported: whether all of those are.
    only_pending: Option<bool>,
    counts: Option<[&'c RunLengthCounts; 2]>,
}

impl RankState<'_> {
    /// Returns whether the collective with this index is known to be done here, for longer than a moment.
    fn is_done(&self, collective_index: u64) -> bool {
        let call = self
            .calls
            .iter()
            .find(|call| call.collective_index == Some(collective_index));
        match (call, self.only_pending) {
            (Some(call), None) => !call.is_pending(),
            (Some(_), Some(_)) => false,
            (None, Some(all)) => {
                let last = self.calls.last().and_then(|call| call.collective_index);
                let is_reported = all || last.is_some_and(|last| collective_index <= last);
                is_reported
                    && self
                        .entered
                        .is_some_and(|entered| collective_index <= entered)
            }
            (None, None) => false,
        }
    }

    /// Returns how many messages the rank has sent to, or received from, `peer`.
    fn count(&self, sent: bool, peer: usize) -> Option<u64> {
        match self.counts {
            Some([sends, receives]) => if sent { sends } else { receives }.get(peer),
            // The rank has no such communicator.
            None => Some(0),
        }
    }
}

struct Communicator<'c> {
    name: &'c str,
    /// The name with the communicator's ranks of the world.
    named: String,
    key: &'c str,
    /// State by rank of the communicator under diagnosis.
    ranks: BTreeMap<usize, RankState<'c>>,
}

/// A call that is not done, or was not until a moment ago.
struct Node<'c> {
    rank: usize,
    communicator: usize,
    call: &'c EnteredCall,
}

/// Why one call waits for another.
#[derive(Clone, Copy, Debug)]
enum WaitReason {
    /// The call is behind the other one on its own rank.
    Behind,
    Collective,
    Sends,
    Receives,
}

/// Maximum number of edges: more would take longer than the ranks wait for a decided fault. 1024 ranks that all wait for each
/// other on two communicators have as many.
const MAX_EDGES: usize = 4 << 20;

/// One side of a message: rank, whether it sends, the communicator's number of the peer, the message's number.
type Side = (usize, bool, usize, u64);

struct WaitGraph<'c> {
    communicators: Vec<Communicator<'c>>,
    /// Rank of the communicator under diagnosis, by communicator and rank there.
    by_own: HashMap<(usize, usize), usize>,
    /// By rank, in the order in which they were called.
    nodes: Vec<Node<'c>>,
    /// The first node of each rank, of each of its streams, and on each of its communicators.
    first: HashMap<usize, usize>,
    on_stream: HashMap<(usize, u64), usize>,
    on_communicator: HashMap<(usize, usize), usize>,
    collectives: HashMap<(usize, usize, u64), usize>,
    sides: HashMap<(usize, Side), usize>,
}

/// Finds the smallest cycle; of several, that of the lowest rank.
pub(super) fn cycle(input: &DiagnosisInput<'_>) -> Option<Candidate> {
    let waits = WaitGraph::of(input);
    let edges = waits.all_edges()?;
    let path = smallest_cycle(&edges)?;
    waits.candidate(input, &path, &edges)
}

/// Returns the messages of a call: whether it sends, the peer, and the message's number.
fn messages(call: &EnteredCall) -> impl Iterator<Item = (bool, usize, u64)> {
    call.operations.iter().filter_map(|one| {
        let sends = one.kind == OperationKind::Send;
        Some((sends, one.peer?, u64::from(one.message?)))
    })
}

impl<'c> WaitGraph<'c> {
    fn of(input: &DiagnosisInput<'c>) -> Self {
        let communicators = communicators(input);
        let mut nodes = Vec::new();
        for (at, communicator) in communicators.iter().enumerate() {
            // A rank that waits in the call has not done it, so that no rank has to be left out.
            let mut done: HashMap<u64, bool> = HashMap::new();
            let mut is_done = |collective_index| {
                let somewhere = || {
                    communicator
                        .ranks
                        .values()
                        .any(|there| there.is_done(collective_index))
                };
                *done.entry(collective_index).or_insert_with(somewhere)
            };
            for (&rank, there) in &communicator.ranks {
                let is_elsewhere = there.only_pending.is_some();
                let open = there.calls.iter().copied().filter(|call| {
                    (call.is_pending() || is_elsewhere)
                        && !(call.is_symmetric() && call.collective_index.is_some_and(&mut is_done))
                });
                nodes.extend(open.map(|call| Node {
                    rank,
                    communicator: at,
                    call,
                }));
            }
        }
        nodes.sort_by_key(|node| {
            let call = node.call;
            (node.rank, call.since_ns, node.communicator, call.number)
        });
        let ranks = communicators.iter().enumerate().flat_map(|(at, one)| {
            let ranks = one.ranks.iter();
            ranks.map(move |(rank, there)| ((at, there.rank), *rank))
        });
        let mut waits = Self {
            by_own: ranks.collect(),
            communicators,
            nodes: Vec::new(),
            first: HashMap::new(),
            on_stream: HashMap::new(),
            on_communicator: HashMap::new(),
            collectives: HashMap::new(),
            sides: HashMap::new(),
        };
        for (at, node) in nodes.iter().enumerate() {
            let (rank, communicator, call) = (node.rank, node.communicator, node.call);
            waits.first.entry(rank).or_insert(at);
            waits.on_stream.entry((rank, call.stream)).or_insert(at);
            waits
                .on_communicator
                .entry((rank, communicator))
                .or_insert(at);
            if let Some(collective_index) = call.collective_index {
                waits
                    .collectives
                    .insert((communicator, rank, collective_index), at);
            }
            for (sends, peer, number) in messages(call) {
                let side = (rank, sends, peer, number);
                waits.sides.insert((communicator, side), at);
            }
        }
        waits.nodes = nodes;
        waits
    }

    /// Returns the calls that are in front of a call on its rank, and not done.
    fn in_front(&self, at: usize) -> impl Iterator<Item = usize> {
        let Node {
            rank,
            communicator,
            call,
        } = &self.nodes[at];
        let stream = self.on_stream.get(&(*rank, call.stream));
        let own = self.on_communicator.get(&(*rank, *communicator));
        let both = stream.into_iter().chain(own).copied();
        both.filter(move |other| *other != at)
    }

    /// Returns the edges of all calls that others can wait for; `None` above [`MAX_EDGES`], which would take too long.
    fn all_edges(&self) -> Option<Vec<Vec<(usize, WaitReason)>>> {
        let mut edges = vec![Vec::new(); self.nodes.len()];
        let mut remaining = MAX_EDGES;
        for (at, own) in edges
            .iter_mut()
            .enumerate()
            .filter(|(at, _)| self.is_front(*at))
        {
            *own = self.edges(at);
            remaining = remaining.checked_sub(own.len())?;
        }
        Some(edges)
    }

    /// Returns whether a call is the first on its stream, or on its communicator. Other calls are in no cycle: no call waits
    /// for them.
    fn is_front(&self, at: usize) -> bool {
        let node = &self.nodes[at];
        let first = [
            self.on_stream.get(&(node.rank, node.call.stream)),
            self.on_communicator.get(&(node.rank, node.communicator)),
        ];
        first.contains(&Some(&at))
    }

    /// Returns the calls for which a call waits, and why.
    fn edges(&self, at: usize) -> Vec<(usize, WaitReason)> {
        let node = &self.nodes[at];
        let communicator = &self.communicators[node.communicator];
        let mut edges: Vec<(usize, WaitReason)> = Vec::new();
        edges.extend(self.in_front(at).map(|front| (front, WaitReason::Behind)));
        let Some(own) = communicator.ranks.get(&node.rank) else {
            return edges;
        };
        let mut wait = |rank: usize, has_come: Option<bool>, counterpart: Option<&usize>, why| {
            match has_come {
                Some(false) => edges.extend(self.first.get(&rank).map(|first| (*first, why))),
                Some(true) => {
                    let fronts = counterpart.into_iter().flat_map(|at| self.in_front(*at));
                    edges.extend(fronts.map(|front| (front, why)));
                }
                None => {}
            }
        };
        for (sends, peer, number) in messages(node.call) {
            let rank = self.by_own.get(&(node.communicator, peer));
            let Some(&rank) = rank.filter(|rank| **rank != node.rank) else {
                continue;
            };
            let there = &communicator.ranks[&rank];
            let count = there.count(!sends, own.rank);
            let side = (rank, !sends, own.rank, number);
            let counterpart = self.sides.get(&(node.communicator, side));
            let why = if sends {
                WaitReason::Sends
            } else {
                WaitReason::Receives
            };
            wait(rank, count.map(|count| count >= number), counterpart, why);
        }
        if let Some(collective_index) = node.call.collective_index {
            let root = match &node.call.operations[..] {
                [one] => one.root.filter(|root| *root != own.rank),
                _ => None,
            };
            for (&rank, there) in &communicator.ranks {
                // A rank that is not the root needs the root only.
                if rank == node.rank || root.is_some_and(|root| root != there.rank) {
                    continue;
                }
                let has_come = match there.counts {
                    Some(_) => there.entered.map(|entered| entered >= collective_index),
                    None => Some(false),
                };
                let counterpart =
                    self.collectives
                        .get(&(node.communicator, rank, collective_index));
                wait(rank, has_come, counterpart, WaitReason::Collective);
            }
        }
        edges.sort_by_key(|(to, _)| *to);
        edges.dedup_by_key(|(to, _)| *to);
        edges
    }

    fn candidate(
        &self,
        input: &DiagnosisInput<'_>,
        path: &[usize],
        edges: &[Vec<(usize, WaitReason)>],
    ) -> Option<Candidate> {
        let mut ranks: Vec<usize> = path.iter().map(|at| self.nodes[*at].rank).collect();
        ranks.dedup();
        if ranks.len() > 1 && ranks.first() == ranks.last() {
            ranks.pop();
        }
        // The calls of one rank are in order.
        let (&[a, ..], 2..) = (&ranks[..], ranks.len()) else {
            return None;
        };
        let mut used: Vec<usize> = path.iter().map(|at| self.nodes[*at].communicator).collect();
        used.sort_unstable();
        used.dedup();
        let is_here = |at: &usize| self.communicators[*at].key == input.key;
        let only_here = used.iter().all(is_here);
        let next = path.iter().skip(1).chain(path.first());
        let steps = path
            .iter()
            .zip(next)
            .map(|(from, to)| self.step(input, *from, *to, edges, only_here));
        let evidence: Vec<_> = steps.take(8).collect();
        let first_of = |rank: usize| path.iter().find(|at| self.nodes[**at].rank == rank);
        let name_of = |rank: usize| {
            let at = first_of(rank)?;
            Some(&self.communicators[self.nodes[*at].communicator])
        };
        let all_collective = path
            .iter()
            .all(|at| self.nodes[*at].call.collective_index.is_some());
        if let (&[a, b], 2, true) = (&ranks[..], used.len(), all_collective) {
            return Some(opposite_order(
                input,
                [a, b],
                [name_of(a)?, name_of(b)?],
                evidence,
            ));
        }
        let mut path_text: Vec<_> = ranks.iter().map(ToString::to_string).collect();
        path_text.push(a.to_string());
        // Where several communicators are stalled, each may have its own symptom.
        let symptom_text = match only_here {
            true => format!("; {}", input.symptom_text()),
            false => String::new(),
        };
        let mut sorted = ranks.clone();
        sorted.sort_unstable();
        Some(Candidate {
            rank: a,
            role: FaultRole::Initiating,
            text: format!(
                "waits in a circle ({}): each of {} waits for the next one's call before it makes its own{symptom_text}",
                path_text.join(" → "),
                input.roster.who(&sorted),
            ),
            operation: (!only_here).then(FaultOperation::default),
            evidence,
            root: RootCause::Cycle { ranks },
            hint: String::from(
                "put sends and receives that need each other into one group, and collectives before or behind them on \
                 all ranks alike",
            ),
        })
    }

    /// Describes one step of a cycle.
    fn step(
        &self,
        input: &DiagnosisInput<'_>,
        from: usize,
        to: usize,
        edges: &[Vec<(usize, WaitReason)>],
        only_here: bool,
    ) -> String {
        let (from_node, to_node) = (&self.nodes[from], &self.nodes[to]);
        let name = |node: &Node<'_>| match only_here {
            true => node.call.name(),
            false => format!(
                "{} on {}",
                node.call.name(),
                self.communicators[node.communicator].named
            ),
        };
        let edge = edges[from].iter().find(|(target, _)| *target == to);
        let why = edge.map_or(WaitReason::Behind, |(_, why)| *why);
        let who = |node: &Node<'_>| input.roster.who(&[node.rank]);
        let (rank, other, call) = (who(from_node), who(to_node), name(from_node));
        match why {
            WaitReason::Behind => format!("on {rank}, {call} is behind {}", name(to_node)),
            WaitReason::Collective => {
                format!(
                    "{rank} waits in {call} for {other}, which is in {}",
                    name(to_node)
                )
            }
            WaitReason::Sends => format!("{rank} sends to {other} in {call}"),
            WaitReason::Receives => format!("{rank} receives from {other} in {call}"),
        }
    }
}

fn communicators<'c>(input: &DiagnosisInput<'c>) -> Vec<Communicator<'c>> {
    type Known<'c> = (&'c Roster, BTreeMap<usize, RankState<'c>>);
    let mut all: BTreeMap<(&str, &str), Known<'c>> = BTreeMap::new();
    for (&rank, report) in input.reports {
        let here = RankState {
            rank,
            entered: report.entered,
            calls: report.calls.iter().collect(),
            only_pending: None,
            counts: report.exists.then_some([&report.sent, &report.received]),
        };
        all.entry((input.name, input.key))
            .or_insert_with(|| (input.roster, BTreeMap::new()))
            .1
            .insert(rank, here);
        for other in &report.elsewhere {
            let there = RankState {
                rank: other.rank,
                entered: other.entered,
                calls: other
                    .recently_done
                    .iter()
                    .chain(&other.pending_calls)
                    .collect(),
                only_pending: Some(!other.has_more_pending),
                counts: Some([&other.sent, &other.received]),
            };
            all.entry((&other.name, &other.key))
                .or_insert_with(|| (&other.roster, BTreeMap::new()))
                .1
                .insert(rank, there);
        }
    }
    all.into_iter()
        .map(|((name, key), (roster, ranks))| Communicator {
            name,
            named: roster.named(name),
            key,
            ranks,
        })
        .collect()
}

/// Returns the shortest cycle of nodes; of several, that with the lowest node, where it begins.
fn smallest_cycle(edges: &[Vec<(usize, WaitReason)>]) -> Option<Vec<usize>> {
    // A node that waits for nothing is in no cycle, nor is a node that waits only for such nodes.
    let mut behind: Vec<Vec<usize>> = vec![Vec::new(); edges.len()];
    let mut remaining: Vec<usize> = edges.iter().map(Vec::len).collect();
    for (from, to) in edges.iter().enumerate() {
        to.iter().for_each(|(to, _)| behind[*to].push(from));
    }
    let mut free: Vec<usize> = (0..edges.len()).filter(|at| remaining[*at] == 0).collect();
    while let Some(at) = free.pop() {
        for &from in &behind[at] {
            remaining[from] -= 1;
            if remaining[from] == 0 {
                free.push(from);
            }
        }
    }
    let mut best: Option<Vec<usize>> = None;
    for start in (0..edges.len()).filter(|at| remaining[*at] > 0) {
        let max_length = best.as_ref().map_or(usize::MAX, |best| best.len() - 1);
        if max_length < 2 {
            break;
        }
        let found = shortest_cycle_through(edges, start, max_length, |at| remaining[at] > 0);
        best = found.or(best);
    }
    best
}

/// Returns the shortest path from a node back to it over higher nodes, of at most `max_length` nodes.
fn shortest_cycle_through(
    edges: &[Vec<(usize, WaitReason)>],
    start: usize,
    max_length: usize,
    can_be_on_cycle: impl Fn(usize) -> bool,
) -> Option<Vec<usize>> {
    let mut from: HashMap<usize, usize> = HashMap::new();
    let mut seen = HashSet::from([start]);
    let mut next = VecDeque::from([(start, 1)]);
    while let Some((at, length)) = next.pop_front() {
        for &(to, _) in &edges[at] {
            if to == start {
                let mut path = vec![at];
                while let Some(before) = path.last().and_then(|at| from.get(at)) {
                    path.push(*before);
                }
                path.reverse();
                return Some(path);
            }
            if to > start && length < max_length && can_be_on_cycle(to) && seen.insert(to) {
                from.insert(to, at);
                next.push_back((to, length + 1));
            }
        }
    }
    None
}

/// Builds the finding on two communicators called in opposite orders: `first` holds the one that each rank called first.
fn opposite_order(
    input: &DiagnosisInput<'_>,
    [a, b]: [usize; 2],
    first: [&Communicator<'_>; 2],
    evidence: Vec<String>,
) -> Candidate {
    let [of_a, of_b] = first.map(|communicator| &communicator.named);
    let [who_a, who_b] = [a, b].map(|rank| input.roster.who(&[rank]));
    Candidate {
        rank: a.min(b),
        role: FaultRole::Initiating,
        text: format!(
            "and {who_b} called two communicators in different orders: {who_a} {of_a} before {of_b}, {who_b} {of_b} \
             before {of_a}",
        ),
        // Both communicators are stalled, in different operations.
        operation: Some(FaultOperation::default()),
        root: RootCause::InverseOrder {
            ranks: [a, b],
            communicators: first.map(|communicator| communicator.name.to_owned()),
        },
        evidence,
        hint: String::from(
            "call operations of several communicators in the same order on all ranks, or in one nccl::group",
        ),
    }
}
