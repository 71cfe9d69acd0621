//! Chrome's trace events, which Perfetto and `chrome://tracing` show.
//!
//! A process is a rank and a thread is a row of a [`Lane`](super::layout::Lane), so that no slice overlaps
//! another of its thread. An arrow goes through the calls that are one collective on all ranks, in the order in which
//! they were made, and from each message to where it is received.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::layout::{Bar, Lane, Layout};
use super::{Timeline, describe};
use crate::operation::OperationKind;
use nccl_core::recorder::is_of_some_ranks;

/// One bar in the trace.
#[derive(Clone, Copy)]
struct Slice {
    process: usize,
    thread: usize,
    start: i128,
    end: i128,
}

impl Timeline {
    /// Returns a trace of Chrome's format (JSON): to be opened at <https://ui.perfetto.dev> or in `chrome://tracing`.
    ///
    /// ```
    /// let timeline = nccl::recorder::Timeline::merge(vec![nccl::recorder::snapshot()])?;
    /// assert!(timeline.to_chrome_trace().contains("\"traceEvents\""));
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn to_chrome_trace(&self) -> String {
        let layout = Layout::of(self);
        let mut events = Events::default();
        let processes = self.processes();
        for (rank, &process) in self.ranks.iter().zip(&processes) {
            events.name_process(
                process,
                rank.rank,
                &rank.who(),
                &describe::clock(&rank.clock),
            );
            events.name_thread(process, 0, "notes and phases");
        }
        for rank in &self.missing {
            let name = format!("{}: no recording", rank.who());
            events.name_process(rank.rank, rank.rank, &name, &rank.why);
            events.instant(rank.rank, 0, &format!("no recording: {}", rank.why), "p");
        }
        for mark in &layout.marks {
            let (name, scope) = match mark.is_phase {
                true => (format!("phase: {}", mark.text), "p"),
                false => (mark.text.to_owned(), "t"),
            };
            events.instant(processes[mark.rank], mark.at, &name, scope);
        }
        let mut threads = vec![1; self.ranks.len()];
        let mut flows = Flows::default();
        for lane in &layout.lanes {
            let process = processes[lane.rank];
            let first = threads[lane.rank];
            threads[lane.rank] += lane.rows;
            for row in 0..lane.rows {
                let mut name = format!("{} · stream {:#x}", lane.recording.name, lane.stream);
                if row > 0 {
                    name.push_str(&format!(" ({})", row + 1));
                }
                events.name_thread(process, first + row, &name);
            }
            for bar in &lane.bars {
                let slice = Slice {
                    process,
                    thread: first + bar.row,
                    start: bar.start,
                    end: bar.end,
                };
                events.slice(slice, lane, bar);
                flows.see(slice, lane, bar);
            }
        }
        flows.draw(&mut events);
        self.sealed(&layout, &events.text)
    }

    /// The process number of each rank in a trace: its rank, unless an earlier process had that rank.
    fn processes(&self) -> Vec<usize> {
        const AGAIN: usize = 1_000_000;
        let mut seen = HashMap::new();
        let ranks = self.ranks.iter().map(|one| {
            let times = seen.entry(one.rank).or_insert(0);
            *times += 1;
            one.rank + AGAIN * (*times - 1)
        });
        ranks.collect()
    }

    fn sealed(&self, layout: &Layout<'_>, events: &str) -> String {
        let clocks: Map<String, Value> = self
            .ranks
            .iter()
            .map(|rank| {
                let clock = json!({
                    "offset_ns": rank.clock.offset_ns,
                    "uncertainty_ns": rank.clock.uncertainty_ns,
                    "source": rank.clock.source,
                    "meaning": describe::clock(&rank.clock),
                });
                (rank.who(), clock)
            })
            .collect();
        let missing: Map<String, Value> = self
            .missing
            .iter()
            .map(|rank| (rank.who(), rank.why.as_str().into()))
            .collect();
        let other = json!({
            "job": self.job,
            "generation": self.generation,
            "times": format!("µs after {} ns since 1970, by the clock of {}", layout.start, self.reference),
            "clocks": clocks,
            "missing": missing,
            "left_out": self.left_out,
        });
        format!(
            "{{\"displayTimeUnit\":\"ns\",\"otherData\":{other},\"traceEvents\":[{events}\n]}}\n"
        )
    }
}

/// The list of events, as text.
#[derive(Default)]
struct Events {
    text: String,
}

impl Events {
    fn push(&mut self, event: &Value) {
        if !self.text.is_empty() {
            self.text.push(',');
        }
        self.text.push('\n');
        self.text.push_str(&event.to_string());
    }

    fn name_process(&mut self, process: usize, rank: usize, name: &str, label: &str) {
        for (what, key, value) in [
            ("process_name", "name", Value::from(name)),
            ("process_labels", "labels", label.into()),
            ("process_sort_index", "sort_index", rank.into()),
        ] {
            self.push(&json!({
                "ph": "M", "name": what, "pid": process, "tid": 0, "args": { key: value },
            }));
        }
    }

    fn name_thread(&mut self, process: usize, thread: usize, name: &str) {
        for (what, key, value) in [
            ("thread_name", "name", Value::from(name)),
            ("thread_sort_index", "sort_index", thread.into()),
        ] {
            self.push(&json!({
                "ph": "M", "name": what, "pid": process, "tid": thread, "args": { key: value },
            }));
        }
    }

    fn instant(&mut self, process: usize, at: i128, name: &str, scope: &str) {
        self.push(&json!({
            "ph": "i", "s": scope, "name": name, "cat": "note", "pid": process, "tid": 0,
            "ts": microseconds(at),
        }));
    }

    fn slice(&mut self, slice: Slice, lane: &Lane<'_>, bar: &Bar<'_>) {
        let call = bar.call;
        let mut name = describe::title(call);
        if describe::is_open(call.state) {
            name.push_str(" (not done)");
        }
        let operations: Vec<_> = call.operations.iter().map(describe::operation).collect();
        let mut event = json!({
            "ph": "X", "name": name, "cat": call.kind.to_string(),
            "pid": slice.process, "tid": slice.thread,
            "ts": microseconds(slice.start), "dur": microseconds(slice.end - slice.start),
            "args": {
                "communicator": lane.recording.name,
                "key": lane.recording.key,
                "generation": lane.recording.generation,
                "rank": lane.recording.rank,
                "sequence": call.sequence,
                "state": describe::state(call.state),
                "stream": format!("{:#x}", call.stream),
                "operations": operations,
                "operations_missing": call.missing,
            },
        });
        if let Some(span) = &call.span {
            event["args"]["span"] = describe::in_span(span).into();
        }
        if describe::is_open(call.state) {
            event["cname"] = "terrible".into();
        }
        self.push(&event);
    }

    /// An arrow through these places.
    fn flow(&mut self, number: usize, name: &str, places: &[(Slice, i128)]) {
        for (at, (slice, when)) in places.iter().enumerate() {
            let step = match at {
                0 => "s",
                at if at + 1 == places.len() => "f",
                _ => "t",
            };
            let mut event = json!({
                "ph": step, "id": number, "name": name, "cat": "flow",
                "pid": slice.process, "tid": slice.thread, "ts": microseconds(*when),
            });
            if step == "f" {
                event["bp"] = "e".into();
            }
            self.push(&event);
        }
    }
}

/// With three decimals, which are nanoseconds; counted from the first event, so that they are exact.
fn microseconds(nanoseconds: i128) -> Value {
    (nanoseconds as f64 / 1000.0).into()
}

/// A message: its communicator, sender, receiver, and number.
type MessageKey = (usize, usize, usize, u32);

/// The slices that arrows connect.
#[derive(Default)]
struct Flows {
    /// By communicator and number among the calls of all ranks.
    calls: HashMap<(usize, u64), Vec<Slice>>,
    sent: HashMap<MessageKey, Slice>,
    received: HashMap<MessageKey, Slice>,
}

impl Flows {
    fn see(&mut self, slice: Slice, lane: &Lane<'_>, bar: &Bar<'_>) {
        use OperationKind::{Capture, Recv, Replay, Send};
        let call = bar.call;
        let own = lane.recording.rank;
        if let Some(index) = bar.index
            && !matches!(call.kind, Capture | Replay)
        {
            let calls = self.calls.entry((lane.communicator, index));
            calls.or_default().push(slice);
        }
        if !is_of_some_ranks(call.kind) && call.kind != Capture {
            return;
        }
        for operation in &call.operations {
            let (Some(peer), Some(number)) = (operation.peer, operation.message) else {
                continue;
            };
            match operation.kind {
                Recv => {
                    let message = (lane.communicator, peer, own, number);
                    self.received.insert(message, slice);
                }
                Send => {
                    let message = (lane.communicator, own, peer, number);
                    self.sent.insert(message, slice);
                }
                _ => {}
            }
        }
    }

    fn draw(mut self, events: &mut Events) {
        let mut number = 0;
        let mut calls: Vec<_> = self.calls.into_iter().collect();
        calls.sort_unstable_by_key(|(key, _)| *key);
        for (_, mut slices) in calls {
            slices.sort_by_key(|slice| slice.start);
            let places: Vec<_> = slices.iter().map(|slice| (*slice, slice.start)).collect();
            if places.len() > 1 {
                number += 1;
                events.flow(number, "call", &places);
            }
        }
        let mut sent: Vec<_> = self.sent.into_iter().collect();
        sent.sort_unstable_by_key(|(key, _)| *key);
        for (message, from) in sent {
            let Some(to) = self.received.remove(&message) else {
                continue;
            };
            // A receive may have been called first: the arrow ends inside its slice.
            let there = from.start.min(to.end).max(to.start);
            number += 1;
            events.flow(number, "message", &[(from, from.start), (to, there)]);
        }
    }
}
