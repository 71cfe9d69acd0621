//! The values in the file of one rank, with PyTorch's names.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use nccl_core::recorder::{Call, CallState};
use serde::Serialize;

use super::super::{RankRecording, layout};
use super::groups::{Group, Groups, Message, Part};
use super::sizes::Sizes;
use crate::operation::OperationKind;

/// PyTorch's version of the format. From 2.7 on the analyser compares collectives one by one.
const VERSION: &str = "2.10";

/// The content of a file.
#[derive(Serialize)]
pub(super) struct Dump<'t> {
    version: &'static str,
    /// By name, which is the group's number.
    pg_config: BTreeMap<String, GroupConfig<'t>>,
    /// By number; without the groups whose collectives cannot be numbered.
    pg_status: BTreeMap<String, GroupStatus>,
    /// In the order in which they were called.
    entries: Vec<Entry<'t>>,
}

/// A process group and its ranks.
#[derive(Serialize)]
struct GroupConfig<'t> {
    name: String,
    desc: &'t str,
    /// A list as Python writes it.
    ranks: String,
}

/// The numbers of the last collectives, from 1; 0 for none.
#[derive(Default, Serialize)]
struct GroupStatus {
    last_enqueued_collective: u64,
    last_started_collective: u64,
    last_completed_collective: u64,
}

/// One call.
#[derive(Serialize)]
struct Entry<'t> {
    record_id: usize,
    pg_id: usize,
    /// Its name and description.
    process_group: (String, &'t str),
    collective_seq_id: u64,
    p2p_seq_id: u64,
    /// The recorder's own number of the call.
    op_id: u64,
    profiling_name: String,
    time_created_ns: u64,
    input_sizes: Vec<Vec<u64>>,
    input_dtypes: Vec<&'static str>,
    output_sizes: Vec<Vec<u64>>,
    output_dtypes: Vec<&'static str>,
    state: &'static str,
    time_discovered_started_ns: Option<u64>,
    time_discovered_completed_ns: Option<u64>,
    /// Whether nothing more will become known of it.
    retired: bool,
    /// Not recorded.
    timeout_ms: u64,
    is_p2p: bool,
    /// The call and the span in which it was called, where PyTorch has the stack.
    frames: Vec<Frame<'t>>,
}

#[derive(Serialize)]
struct Frame<'t> {
    name: &'t str,
    filename: &'t str,
    line: u64,
}

impl<'t> Dump<'t> {
    /// The file of rank `rank`.
    pub(super) fn of(groups: &Groups<'t>, rank: usize) -> Self {
        let mut dump = Self {
            version: VERSION,
            pg_config: BTreeMap::new(),
            pg_status: BTreeMap::new(),
            entries: Vec::new(),
        };
        let Some(&file) = groups.files.get(&rank) else {
            return dump;
        };
        for (number, group) in groups.groups.iter().enumerate() {
            if let Some(part) = group.parts.get(&rank) {
                dump.name_group(number.to_string(), group.name, &group.members);
                dump.add_collectives(number, group, part, file);
                dump.add_messages(number, group, part, file);
            }
        }
        dump.entries
            .sort_by_key(|entry| (entry.time_created_ns, entry.op_id));
        for (at, entry) in dump.entries.iter_mut().enumerate() {
            entry.record_id = at;
        }
        dump
    }

    fn name_group(&mut self, name: String, desc: &'t str, members: &[usize]) {
        let mut ranks = String::from("[");
        for (at, member) in members.iter().enumerate() {
            let comma = if at == 0 { "" } else { ", " };
            // Writing to a string does not fail.
            let _ = write!(ranks, "{comma}{member}");
        }
        ranks.push(']');
        let config = GroupConfig {
            name: name.clone(),
            desc,
            ranks,
        };
        self.pg_config.insert(name, config);
    }

    fn add_collectives(
        &mut self,
        group_number: usize,
        group: &Group<'t>,
        part: &Part<'t>,
        file: &RankRecording,
    ) {
        let mut status = GroupStatus::default();
        for (number, call) in part.collectives() {
            let Some(name) = name(call.kind).filter(|_| call.state != CallState::Failed) else {
                continue;
            };
            let is_done = group.is_done(number);
            status.last_enqueued_collective = number;
            if is_done {
                status.last_started_collective = number;
                status.last_completed_collective = number;
            }
            if number < group.first {
                continue;
            }
            let block = group.block(number);
            let sizes = match group.has_sizes(number, call.kind) {
                true => Sizes::of(call, part.recording.rank, group.members.len(), block),
                false => Sizes::unknown(block),
            };
            let mut entry = Entry::new((group_number, group.name), part, call, file);
            entry.collective_seq_id = number;
            entry.profiling_name = format!("nccl:{name}");
            entry.state = state(is_done);
            entry.set_sizes(sizes);
            self.entries.push(entry);
        }
        if part.is_numbered() {
            self.pg_status.insert(group_number.to_string(), status);
        }
    }

    fn add_messages(
        &mut self,
        group_number: usize,
        group: &Group<'t>,
        part: &Part<'t>,
        file: &RankRecording,
    ) {
        for message in part.messages() {
            let ends = [message.from, message.to].map(|end| group.members.get(end).copied());
            let [Some(from), Some(to)] = ends else {
                continue;
            };
            if from == to || !group.has_message(&message) {
                continue;
            }
            let name = format!("{group_number}/{from}->{to}");
            if !self.pg_config.contains_key(&name) {
                self.name_group(name.clone(), group.name, &[from, to]);
            }
            let Message {
                number,
                operation,
                call,
                ..
            } = message;
            let mut entry = Entry::new((group_number, group.name), part, call, file);
            entry.process_group.0 = name;
            entry.collective_seq_id = number;
            entry.p2p_seq_id = number;
            entry.is_p2p = true;
            // Ranks in the group of two, in the order of their numbers.
            let sender = usize::from(from > to);
            let receiver = 1 - sender;
            entry.profiling_name = match message.is_received {
                true => format!("nccl:recv {receiver}<-{sender}"),
                false => format!("nccl:send {sender}->{receiver}"),
            };
            entry.state = state(call.state == CallState::Done);
            entry.set_sizes(Sizes::of_message(operation.count, operation.data_type));
            self.entries.push(entry);
        }
    }
}

impl<'t> Entry<'t> {
    /// An entry with what it has from the call itself.
    fn new(
        (number, name): (usize, &'t str),
        part: &Part<'t>,
        call: &'t Call,
        file: &RankRecording,
    ) -> Self {
        let wall = |since| u64::try_from(layout::corrected(file, since)).unwrap_or(0);
        let mut frames = vec![Frame {
            name: call.kind.name(),
            filename: &part.recording.name,
            line: call.sequence,
        }];
        frames.extend(call.span.as_ref().map(|span| Frame {
            name: &span.name,
            filename: span.about.as_deref().unwrap_or_default(),
            line: span.id,
        }));
        Self {
            record_id: 0,
            pg_id: number,
            process_group: (number.to_string(), name),
            collective_seq_id: 0,
            p2p_seq_id: 0,
            op_id: call.sequence,
            profiling_name: String::new(),
            time_created_ns: wall(call.since),
            input_sizes: Vec::new(),
            input_dtypes: Vec::new(),
            output_sizes: Vec::new(),
            output_dtypes: Vec::new(),
            state: state(false),
            time_discovered_started_ns: None,
            time_discovered_completed_ns: call.done.map(wall),
            retired: matches!(call.state, CallState::Done | CallState::Aborted),
            timeout_ms: 0,
            is_p2p: false,
            frames,
        }
    }

    fn set_sizes(&mut self, sizes: Sizes) {
        self.input_dtypes = vec![sizes.data_type; sizes.input.len()];
        self.output_dtypes = vec![sizes.data_type; sizes.output.len()];
        self.input_sizes = sizes.input;
        self.output_sizes = sizes.output;
    }
}

/// PyTorch's state of a call. `started` is not known: recordings do not say when the device began.
fn state(is_done: bool) -> &'static str {
    if is_done { "completed" } else { "scheduled" }
}

/// PyTorch's name of a collective, which decides what the analyser compares; `None` for what is not an operation of all ranks.
fn name(kind: OperationKind) -> Option<&'static str> {
    use OperationKind::{
        AllGather, AllReduce, AllToAll, AllToAllV, Broadcast, Combine, Dispatch, Gather, Reduce,
        ReduceScatter, Replay, Route, Scatter,
    };
    Some(match kind {
        AllReduce => "all_reduce",
        Broadcast => "broadcast",
        Reduce => "reduce",
        AllGather => "all_gather",
        ReduceScatter => "reduce_scatter",
        AllToAll | AllToAllV | Route | Dispatch | Combine => "all_to_all",
        Gather => "gather",
        Scatter => "scatter",
        // Of a replay nothing but its place among the calls is compared; the analyser knows no name for it.
        Replay => "all_reduce_barrier",
        _ => return None,
    })
}
