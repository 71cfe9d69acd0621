//! The places of calls on the time axis: one lane for each rank, communicator and stream, with as many rows as needed
//! so that no two calls of a row overlap.

use std::collections::HashMap;

use super::{RankRecording, Timeline, describe, standing};
use nccl_core::recorder::{Call, CallState, Recording, is_of_some_ranks, since_1970};

/// Rows of a lane. If more calls overlap, a call is cut short where the next call of its row begins.
const ROWS: usize = 6;

/// All bars and marks; times in nanoseconds after the first event.
pub(super) struct Layout<'t> {
    /// The first event, in nanoseconds since 1970, by the reference's clock.
    pub(super) start: i128,
    pub(super) end: i128,
    pub(super) lanes: Vec<Lane<'t>>,
    pub(super) marks: Vec<Mark<'t>>,
    /// The communicators, by number.
    pub(super) communicators: Vec<&'t Recording>,
}

pub(super) struct Lane<'t> {
    /// The index of the rank in the timeline.
    pub(super) rank: usize,
    pub(super) recording: &'t Recording,
    /// The number of the communicator: the same on all ranks.
    pub(super) communicator: usize,
    pub(super) stream: u64,
    pub(super) rows: usize,
    /// In the order of the calls.
    pub(super) bars: Vec<Bar<'t>>,
}

pub(super) struct Bar<'t> {
    pub(super) call: &'t Call,
    /// See [`indexed`].
    pub(super) index: Option<u64>,
    pub(super) row: usize,
    pub(super) start: i128,
    pub(super) end: i128,
}

/// A note or a phase.
pub(super) struct Mark<'t> {
    pub(super) rank: usize,
    pub(super) at: i128,
    pub(super) text: &'t str,
    pub(super) is_phase: bool,
}

/// Nanoseconds since 1970 by the reference's clock.
pub(super) fn corrected(rank: &RankRecording, since: std::time::Duration) -> i128 {
    let own = since_1970(rank.snapshot.origin).as_nanos() + since.as_nanos();
    own.cast_signed() + i128::from(rank.clock.offset_ns)
}

/// How many messages and groups of messages a rank made before the first recorded call; `None` if that is not known.
pub(super) fn earlier_messages(recording: &Recording) -> Option<u64> {
    let first = recording.calls.first().map_or(1, |call| call.sequence);
    let none = || (first <= 1).then_some(0);
    recording.earlier_messages.or_else(none)
}

/// The recorded calls with their numbers among those that all ranks make, which are the same on all ranks. `None` for a call
/// that only some ranks make, and where the number of earlier ones is not known.
pub(super) fn indexed(recording: &Recording) -> impl Iterator<Item = (Option<u64>, &Call)> {
    let mut messages = earlier_messages(recording);
    recording.calls.iter().map(move |call| {
        if is_of_some_ranks(call.kind) {
            messages = messages.map(|messages| messages.saturating_add(1));
            return (None, call);
        }
        let index = messages.map(|messages| call.sequence.saturating_sub(messages));
        (index, call)
    })
}

impl<'t> Layout<'t> {
    pub(super) fn of(timeline: &'t Timeline) -> Self {
        let mut layout = Self {
            start: 0,
            end: 0,
            lanes: Vec::new(),
            marks: Vec::new(),
            communicators: Vec::new(),
        };
        let mut numbers = HashMap::new();
        for (at, rank) in timeline.ranks.iter().enumerate() {
            let taken = since_1970(rank.snapshot.taken).as_nanos().cast_signed()
                + i128::from(rank.clock.offset_ns);
            for (identity, recording) in standing::identified(&rank.snapshot) {
                let next = numbers.len();
                let number = *numbers.entry(identity).or_insert_with(|| {
                    layout.communicators.push(recording);
                    next
                });
                layout.place(at, rank, recording, number, taken);
            }
            for note in &rank.snapshot.notes {
                layout.marks.push(Mark {
                    rank: at,
                    at: corrected(rank, note.since),
                    text: &note.text,
                    is_phase: note.is_phase,
                });
            }
            layout.end = layout.end.max(taken);
        }
        let bars = layout.lanes.iter().flat_map(|lane| &lane.bars);
        let marks = layout.marks.iter().map(|mark| mark.at);
        let first = bars.map(|bar| bar.start).chain(marks).min();
        layout.start = first.unwrap_or(layout.end);
        let start = layout.start;
        layout.end -= start;
        for lane in &mut layout.lanes {
            for bar in &mut lane.bars {
                bar.start -= start;
                bar.end -= start;
            }
        }
        for mark in &mut layout.marks {
            mark.at -= start;
        }
        layout
    }

    /// Places the calls of one communicator of one rank.
    fn place(
        &mut self,
        at: usize,
        rank: &RankRecording,
        recording: &'t Recording,
        communicator: usize,
        taken: i128,
    ) {
        let first = self.lanes.len();
        let mut lane_of = HashMap::new();
        for (index, call) in indexed(recording) {
            let lane = *lane_of.entry(call.stream).or_insert(self.lanes.len());
            if lane == self.lanes.len() {
                self.lanes.push(Lane {
                    rank: at,
                    recording,
                    communicator,
                    stream: call.stream,
                    rows: 1,
                    bars: Vec::new(),
                });
            }
            let start = corrected(rank, call.since);
            let end = match call.done {
                _ if describe::is_open(call.state) => taken,
                Some(done) => corrected(rank, done),
                None => start,
            };
            self.lanes[lane].bars.push(Bar {
                call,
                index,
                row: 0,
                start,
                end: end.max(start),
            });
        }
        if recording.calls.is_empty() {
            self.lanes.push(Lane {
                rank: at,
                recording,
                communicator,
                stream: 0,
                rows: 1,
                bars: Vec::new(),
            });
        }
        for lane in &mut self.lanes[first..] {
            lane.settle();
        }
    }
}

impl Lane<'_> {
    /// Gives each bar a row.
    fn settle(&mut self) {
        // A call that is done without a time of its end was done when its successor was: its real duration is unknown.
        for at in 0..self.bars.len() {
            let next = self.bars.get(at + 1).map(|next| next.start);
            let bar = &mut self.bars[at];
            if bar.call.state == CallState::Done
                && bar.call.done.is_none()
                && let Some(next) = next
            {
                bar.end = next.max(bar.start);
            }
        }
        // The last bar of each row.
        let mut rows: Vec<usize> = Vec::new();
        for at in 0..self.bars.len() {
            let start = self.bars[at].start;
            let free = rows.iter().position(|&last| self.bars[last].end <= start);
            let row = match free {
                Some(row) => row,
                None if rows.len() < ROWS => {
                    rows.push(at);
                    rows.len() - 1
                }
                None => {
                    let ends = rows.iter().enumerate();
                    let row = ends.min_by_key(|(_, last)| self.bars[**last].end);
                    let (row, last) = row.map_or((0, 0), |(row, last)| (row, *last));
                    // Calls are in order, so that this bar began no later.
                    let before = &mut self.bars[last];
                    before.end = start.max(before.start);
                    row
                }
            };
            rows[row] = at;
            self.bars[at].row = row;
        }
        self.rows = rows.len().max(1);
    }
}
