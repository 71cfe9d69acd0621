//! Timelines survive writing and reading; files of other programs are refused with a message; the outputs are correct
//! whatever the names in them.
//!
//! The calls and snapshots of all these tests are here.

mod json;
mod large;
mod merging;
mod page;
mod pytorch;
mod trace;

use std::time::{Duration, SystemTime};

use nccl_core::recorder::{
    Call, CallState, RecordedOperation, RecordedReduction, Recording, Snapshot,
};
use nccl_core::{DataType, OperationKind, ReduceOp};
use serde_json::json;

use super::Timeline;

const NAME: &str = "model/</script><b>tp</b>";

/// A recording with one of every possible entry, as another process would send it.
fn sample() -> Snapshot {
    let text = json!({
        "kind": "nccl-recording", "schema": 2,
        "host": "node", "boot": "boot", "pid": 4000,
        "place": { "job": "job", "generation": 3, "rank": 0, "world_size": 3 },
        "origin_unix_ns": 1_760_000_000_123_456_789_u64,
        "taken_unix_ns": 1_760_000_001_123_456_789_u64,
        "communicators": [{
            "name": NAME, "key": "0123456789abcdef0123456789abcdef", "generation": 3, "number": 1,
            "rank": 0, "world_size": 3, "life": "ready",
            "calls": [{
                "sequence": 1, "kind": "group", "since_ns": 0, "unix_ns": 0, "stream": "0x7f0012345678",
                "state": "done", "operations": [],
                "span": { "id": "0x1000000000000001", "name": "<step>", "about": "step=17 user=\"<b>\"" },
            }],
        }],
        "notes": [{
            "since_ns": 5_000_000, "unix_ns": 1_760_000_000_128_456_789_u64,
            "text": "<img src=x onerror=alert(1)>", "phase": true,
        }],
    });
    Snapshot::from_json(&text.to_string()).unwrap()
}

fn call(sequence: u64, since_ms: u64, state: CallState, operations: &[RecordedOperation]) -> Call {
    let since = Duration::from_millis(since_ms);
    let mut call = sample().communicators.remove(0).calls.remove(0);
    if let [one] = operations {
        call.kind = one.kind;
    }
    call.sequence = sequence;
    call.since = since;
    call.at = origin() + since;
    call.state = state;
    call.done = (state == CallState::Done).then(|| since + Duration::from_millis(2));
    call.span = call.span.filter(|_| state == CallState::Issued);
    call.operations = operations.to_vec();
    call
}

fn origin() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_nanos(1_760_000_000_123_456_789)
}

fn reduce(count: u64) -> RecordedOperation {
    let mut reduce = RecordedOperation::new(OperationKind::AllReduce, count, DataType::BFloat16);
    reduce.reduction = Some(RecordedReduction::Op(ReduceOp::Sum));
    reduce
}

fn message(kind: OperationKind, peer: usize, number: u32) -> RecordedOperation {
    let mut message = RecordedOperation::new(kind, 4096, DataType::from_raw(99));
    message.peer = Some(peer);
    message.message = Some(number);
    message
}

fn recording(rank: usize, calls: Vec<Call>) -> Recording {
    let mut recording = sample().communicators.remove(0);
    recording.rank = rank;
    recording.calls = calls;
    recording
}

/// The snapshot of rank `rank` of three; `boot` says on which machine.
fn snapshot(rank: usize, boot: &str, calls: Vec<Call>) -> Snapshot {
    let mut snapshot = sample();
    snapshot.host = format!("node-{rank}");
    snapshot.boot = boot.to_owned();
    snapshot.pid = 4000 + rank as u32;
    if let Some(place) = &mut snapshot.place {
        place.rank = rank;
    }
    snapshot.communicators = vec![recording(rank, calls)];
    snapshot
}

/// Three calls on rank 0, of which rank 1 never made the last; no recording of rank 2.
fn two_of_three() -> Timeline {
    let group = |peer| {
        [
            message(OperationKind::Send, peer, 1),
            message(OperationKind::Recv, peer, 1),
        ]
    };
    let zero = vec![
        call(1, 10, CallState::Done, &[reduce(6)]),
        call(2, 20, CallState::Done, &group(1)),
        call(3, 30, CallState::Issued, &[reduce(6)]),
    ];
    let one = vec![
        call(1, 11, CallState::Done, &[reduce(6)]),
        call(2, 21, CallState::Done, &group(0)),
    ];
    Timeline::merge(vec![snapshot(1, "b", one), snapshot(0, "a", zero)]).unwrap()
}
