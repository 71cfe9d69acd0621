//! What was recorded survives being written and read; what somebody else wrote is refused in words; and what is
//! shown of it says what it should, whatever it was called.
//!
//! Here are the calls and snapshots that all of these are about.

mod json;
mod large;
mod merging;
mod page;
mod trace;

use std::time::{Duration, SystemTime};

use super::*;
use crate::{DataType, OperationKind, ReduceOp};

const NAME: &str = "model/</script><b>tp</b>";

fn call(sequence: u64, since_ms: u64, state: CallState, operations: &[RecordedOperation]) -> Call {
    let since = Duration::from_millis(since_ms);
    Call {
        sequence,
        kind: match operations {
            [one] => one.kind,
            _ => OperationKind::Group,
        },
        since,
        at: origin() + since,
        stream: 0x7f00_1234_5678,
        state,
        done: (state == CallState::Done).then(|| since + Duration::from_millis(2)),
        span: (state == CallState::Issued).then(|| CallSpan {
            id: (1 << 60) + 1,
            name: String::from("<step>"),
            about: Some(String::from("step=17 user=\"<b>\"")),
        }),
        operations: operations.to_vec(),
        missing: 0,
    }
}

fn origin() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_nanos(1_760_000_000_123_456_789)
}

fn reduce(count: u64) -> RecordedOperation {
    RecordedOperation {
        kind: OperationKind::AllReduce,
        count,
        data_type: DataType::BFLOAT16,
        peer: None,
        message: None,
        root: None,
        reduction: Some(RecordedReduction::Op(ReduceOp::Sum)),
    }
}

fn message(kind: OperationKind, peer: usize, number: u32) -> RecordedOperation {
    RecordedOperation {
        kind,
        count: 4096,
        data_type: DataType::from_raw(99),
        peer: Some(peer),
        message: Some(number),
        root: None,
        reduction: None,
    }
}

fn recording(rank: usize, calls: Vec<Call>) -> Recording {
    Recording {
        name: NAME.to_owned(),
        key: Some("0123456789abcdef0123456789abcdef".to_owned()),
        epoch: 3,
        number: 1,
        rank,
        world_size: 3,
        members: None,
        launcher_ranks: None,
        life: "ready".to_owned(),
        reason: None,
        calls,
        left_out: 0,
    }
}

/// Rank `rank` of three on hosts of their own, or of one.
fn snapshot(rank: usize, boot: &str, calls: Vec<Call>) -> Snapshot {
    Snapshot {
        host: format!("node-{rank}"),
        boot: boot.to_owned(),
        pid: 4000 + rank as u32,
        place: Some(Place {
            job: "job".to_owned(),
            epoch: 3,
            rank,
            world_size: 3,
        }),
        origin: origin(),
        taken: origin() + Duration::from_secs(1),
        reason: None,
        clock: None,
        communicators: vec![recording(rank, calls)],
        notes: vec![Note {
            since: Duration::from_millis(5),
            at: origin() + Duration::from_millis(5),
            text: "<img src=x onerror=alert(1)>".to_owned(),
            is_phase: true,
        }],
        notes_left_out: 0,
    }
}

/// Three calls on rank 0, of which rank 1 never made the last; nothing of rank 2.
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
