//! Process groups: the communicators of a timeline, and what the recordings of their ranks say together.

use std::collections::{BTreeMap, HashMap};

use nccl_core::recorder::{Call, CallState, RecordedOperation, Recording, is_of_some_ranks};

use super::super::{RankRecording, Timeline, describe, layout, standing};
use super::sizes::{BlockSize, is_uneven, own_block};
use crate::operation::OperationKind;

/// Maximum number of ranks that a communicator may have beyond those of the timeline, so that no number in a file
/// decides how much memory is allocated.
const UNKNOWN_RANKS: usize = 4096;

/// Maximum number of members of all communicators together.
const MEMBERS: usize = if cfg!(test) { 1 << 16 } else { 1 << 22 };

/// A number that no rank has reached: no call of the group can be compared.
const NEVER: u64 = u64::MAX;

/// The communicators of a timeline.
pub(super) struct Groups<'t> {
    /// The recording of each rank, by rank.
    pub(super) files: BTreeMap<usize, &'t RankRecording>,
    /// By number.
    pub(super) groups: Vec<Group<'t>>,
}

/// One communicator on all ranks.
pub(super) struct Group<'t> {
    /// The communicator's name.
    pub(super) name: &'t str,
    /// The ranks of the timeline, by rank in the communicator.
    pub(super) members: Vec<usize>,
    /// The recordings, by rank of the timeline.
    pub(super) parts: BTreeMap<usize, Part<'t>>,
    /// The number of the first collective that can be compared.
    pub(super) first: u64,
    /// What is known about each collective, by number.
    collectives: HashMap<u64, Collective>,
    /// The highest number of a collective that needs every rank and is known to be done on one.
    all_done: u64,
    /// The number of the first message that can be compared, by sender and receiver in the communicator.
    first_messages: HashMap<(usize, usize), u64>,
}

/// One rank's recording of a communicator.
pub(super) struct Part<'t> {
    pub(super) recording: &'t Recording,
    /// Whether earlier calls, or operations of calls, have been lost.
    is_cut: bool,
}

/// One end of a message.
pub(super) struct Message<'t> {
    /// Ranks in the communicator.
    pub(super) from: usize,
    pub(super) to: usize,
    /// The number among the messages from that rank to that rank, from 1.
    pub(super) number: u64,
    pub(super) is_received: bool,
    pub(super) operation: &'t RecordedOperation,
    pub(super) call: &'t Call,
}

/// What the recordings of several ranks say about one collective.
#[derive(Default)]
struct Collective {
    /// The size of a block, from the first rank that knows it.
    block: Option<BlockSize>,
    /// Whether a rank does not know all of its operations.
    is_incomplete: bool,
    /// How many ranks have called it, and how many know that it is done.
    called: usize,
    done: usize,
}

impl<'t> Groups<'t> {
    pub(super) fn of(timeline: &'t Timeline) -> Self {
        // Of a rank that was started again the last recording counts.
        let files: BTreeMap<usize, &RankRecording> =
            timeline.ranks.iter().map(|one| (one.rank, one)).collect();
        let most = files.len() + timeline.missing.len() + UNKNOWN_RANKS;
        let mut numbers = HashMap::new();
        let mut found: Vec<BTreeMap<usize, Part<'t>>> = Vec::new();
        for (&rank, file) in &files {
            let mut seen = HashMap::new();
            for recording in &file.snapshot.communicators {
                // Without a key, communicators of one name are told apart by their order.
                let identity = standing::identity(recording);
                let times = seen.entry(identity.clone()).or_insert(0_usize);
                *times += 1;
                if recording.world_size > most || recording.rank >= recording.world_size {
                    continue;
                }
                let number = *numbers.entry((identity, *times)).or_insert(found.len());
                if number == found.len() {
                    found.push(BTreeMap::new());
                }
                found[number].insert(rank, Part::of(recording));
            }
        }
        let mut room = MEMBERS;
        let groups = found.into_iter().filter_map(|parts| {
            let sample = parts.values().next()?.recording;
            room = room.checked_sub(sample.world_size)?;
            Group::of(timeline, &files, parts)
        });
        let groups = groups.collect();
        Self { files, groups }
    }
}

impl<'t> Part<'t> {
    fn of(recording: &'t Recording) -> Self {
        let first = recording.calls.first().map_or(1, |call| call.sequence);
        // An operation of a call that goes on may not have been called yet.
        let has_lost = |call: &Call| call.missing > 0 && !describe::is_open(call.state);
        Self {
            recording,
            is_cut: first > 1 || recording.left_out > 0 || recording.calls.iter().any(has_lost),
        }
    }

    /// The number of the first collective that is recorded, or would be.
    fn first_collective(&self) -> u64 {
        let earlier = layout::earlier_messages(self.recording);
        match (self.recording.calls.first(), earlier) {
            (Some(call), Some(earlier)) => call.sequence.saturating_sub(earlier),
            (Some(_), None) => NEVER,
            (None, _) if self.is_cut => NEVER,
            (None, _) => 1,
        }
    }

    /// The calls of all ranks, with their numbers among these; none where the numbers are not known.
    pub(super) fn collectives(&self) -> impl Iterator<Item = (u64, &'t Call)> + use<'t> {
        layout::indexed(self.recording).filter_map(|(index, call)| Some((index?, call)))
    }

    /// Whether the numbers of its collectives are known.
    pub(super) fn is_numbered(&self) -> bool {
        layout::earlier_messages(self.recording).is_some()
    }

    /// The messages between this rank and others, other than those that collectives are made of, and those of calls that
    /// failed.
    pub(super) fn messages(&self) -> impl Iterator<Item = Message<'t>> + use<'t> {
        let own = self.recording.rank;
        let calls = self.recording.calls.iter();
        let calls =
            calls.filter(|call| is_of_some_ranks(call.kind) && call.state != CallState::Failed);
        calls.flat_map(move |call| {
            call.operations.iter().filter_map(move |operation| {
                let peer = operation.peer.filter(|peer| *peer != own)?;
                let is_received = operation.kind == OperationKind::Recv;
                let (from, to) = if is_received {
                    (peer, own)
                } else {
                    (own, peer)
                };
                Some(Message {
                    from,
                    to,
                    number: u64::from(operation.message?),
                    is_received,
                    operation,
                    call,
                })
            })
        })
    }

    /// The number of the first message from rank `from` to rank `to` of the communicator, one of which is this rank, that is
    /// recorded or would be.
    fn first_message(&self, from: usize, to: usize) -> u64 {
        if !self.is_cut {
            return 1;
        }
        let own = self.recording.rank;
        let operations = self
            .recording
            .calls
            .iter()
            .flat_map(|call| &call.operations);
        let numbers = operations.filter_map(|one| {
            let is_it = match one.kind {
                OperationKind::Recv => (one.peer?, own) == (from, to),
                _ => (own, one.peer?) == (from, to),
            };
            one.message.filter(|_| is_it)
        });
        numbers.min().map_or(NEVER, u64::from)
    }
}

impl<'t> Group<'t> {
    /// `None` if the ranks of the timeline that these are cannot be determined.
    fn of(
        timeline: &Timeline,
        files: &BTreeMap<usize, &'t RankRecording>,
        parts: BTreeMap<usize, Part<'t>>,
    ) -> Option<Self> {
        let sample = parts.values().next()?.recording;
        let members = members(timeline, sample, &parts)?;
        let mut group = Self {
            name: &sample.name,
            first: 1,
            collectives: HashMap::new(),
            all_done: 0,
            first_messages: HashMap::new(),
            members,
            parts,
        };
        // A rank with a recording, but not of this communicator, which ended long ago there.
        let is_lost =
            |member: &usize| files.contains_key(member) && !group.parts.contains_key(member);
        group.first = match group.members.iter().any(is_lost) {
            true => NEVER,
            false => {
                let firsts = group.parts.values().map(Part::first_collective);
                firsts.max().unwrap_or(1)
            }
        };
        group.compare_collectives();
        group.compare_messages();
        Some(group)
    }

    fn compare_collectives(&mut self) {
        use OperationKind::{AllGather, AllReduce, AllToAll, ReduceScatter};
        for part in self.parts.values() {
            for (number, call) in part.collectives() {
                if number < self.first || call.state == CallState::Failed {
                    continue;
                }
                let one = self.collectives.entry(number).or_default();
                one.called += 1;
                one.is_incomplete |= call.missing > 0;
                one.block = one.block.or_else(|| own_block(call));
                if call.state == CallState::Done {
                    one.done += 1;
                    // NCCL runs the operations of a communicator in order.
                    if matches!(call.kind, AllReduce | AllGather | ReduceScatter | AllToAll) {
                        self.all_done = self.all_done.max(number);
                    }
                }
            }
        }
    }

    fn compare_messages(&mut self) {
        let comparable = self.first < NEVER;
        let mut firsts = HashMap::new();
        for part in self.parts.values() {
            for Message { from, to, .. } in part.messages() {
                firsts.entry((from, to)).or_insert_with(|| {
                    if !comparable {
                        return NEVER;
                    }
                    let ends = [from, to].into_iter();
                    let ends = ends.filter_map(|end| self.parts.get(self.members.get(end)?));
                    let firsts = ends.map(|part| part.first_message(from, to));
                    firsts.max().unwrap_or(NEVER)
                });
            }
        }
        self.first_messages = firsts;
    }

    /// The size of a block of collective `number`, as far as a rank knows it.
    pub(super) fn block(&self, number: u64) -> Option<BlockSize> {
        self.collectives.get(&number)?.block
    }

    /// Whether the sizes on all ranks are known, where each rank has its own.
    pub(super) fn has_sizes(&self, number: u64, kind: OperationKind) -> bool {
        let one = self.collectives.get(&number);
        !is_uneven(kind) || one.is_some_and(|one| !one.is_incomplete)
    }

    /// Whether collective `number` is done, as far as is known: on all ranks that called it, or on one rank after all
    /// have called it.
    pub(super) fn is_done(&self, number: u64) -> bool {
        let one = self.collectives.get(&number);
        number <= self.all_done || one.is_some_and(|one| one.called == one.done)
    }

    /// Whether a message can be compared.
    pub(super) fn has_message(&self, message: &Message<'_>) -> bool {
        let first = self.first_messages.get(&(message.from, message.to));
        message.number >= first.copied().unwrap_or(NEVER)
    }
}

/// The ranks of the timeline, by rank in the communicator.
fn members(
    timeline: &Timeline,
    sample: &Recording,
    parts: &BTreeMap<usize, Part<'_>>,
) -> Option<Vec<usize>> {
    let mut known = HashMap::new();
    for (&rank, part) in parts {
        known.insert(part.recording.rank, rank);
    }
    let roster = sample.roster();
    // In another generation of the world, the ranks had other numbers.
    let is_current = sample.generation == timeline.generation;
    let members = (0..sample.world_size).map(|place| {
        let other = is_current.then(|| roster.world_rank(place));
        known.get(&place).copied().or(other)
    });
    let members: Vec<usize> = members.collect::<Option<_>>()?;
    let mut distinct = members.clone();
    distinct.sort_unstable();
    distinct.dedup();
    (distinct.len() == members.len()).then_some(members)
}
