//! The files for PyTorch's analyser. `tests/tools/pytorch_analyser.rs` gives such files to the analyser itself.

use std::collections::BTreeMap;

use nccl_core::recorder::{Call, CallState, RecordedOperation};
use nccl_core::{DataType, OperationKind};
use serde_json::{Value, json};

use super::{call, message, reduce, snapshot};
use crate::timeline::Timeline;

/// The files, by rank, as Python would read them.
fn files(timeline: &Timeline) -> BTreeMap<usize, Value> {
    let read = |(rank, pickle): (usize, Vec<u8>)| {
        assert_eq!(pickle[..2], [0x80, 2], "a pickle of protocol 2");
        let options = serde_pickle::DeOptions::new();
        let value = serde_pickle::from_slice(&pickle, options).unwrap();
        (rank, value)
    };
    timeline.to_pytorch_traces().map(read).collect()
}

/// The timeline of ranks 0, 1, … with these calls, of a world of three.
fn timeline(ranks: Vec<Vec<Call>>) -> Timeline {
    let ranks = ranks.into_iter().enumerate();
    Timeline::merge(
        ranks
            .map(|(rank, calls)| snapshot(rank, "", calls))
            .collect(),
    )
    .unwrap()
}

/// What the analyser compares: group, number, name, sizes and state of each entry.
fn compared(file: &Value) -> Vec<String> {
    let entries = file["entries"].as_array().unwrap();
    let text = |entry: &Value| {
        let text = |key: &str| entry[key].as_str().unwrap().to_owned();
        format!(
            "{} #{} {} {}->{} {}",
            entry["process_group"][0].as_str().unwrap(),
            entry["collective_seq_id"],
            text("profiling_name"),
            entry["input_sizes"],
            entry["output_sizes"],
            text("state")
        )
    };
    entries.iter().map(text).collect()
}

fn named(kind: OperationKind, mut call: Call) -> Call {
    call.kind = kind;
    call
}

fn plain(kind: OperationKind, count: u64) -> RecordedOperation {
    RecordedOperation::new(kind, count, DataType::Float32)
}

fn part(kind: OperationKind, peer: usize, count: u64) -> RecordedOperation {
    let mut part = plain(kind, count);
    part.peer = Some(peer);
    part
}

#[test]
fn no_number_of_large_communicators_makes_the_files_large() {
    let mut snapshot = snapshot(0, "", Vec::new());
    let recording = snapshot.communicators.remove(0);
    snapshot.communicators = (0..100)
        .map(|number| {
            let mut large = recording.clone();
            large.key = Some(format!("key {number}"));
            large.world_size = 4000;
            large
        })
        .collect();
    let files = files(&Timeline::merge(vec![snapshot]).unwrap());
    let groups = files[&0]["pg_config"].as_object().unwrap().len();
    assert_eq!(groups, (1 << 16) / 4000);
}

#[test]
fn an_entry_has_what_pytorch_writes() {
    let zero = vec![call(1, 10, CallState::Issued, &[reduce(6)])];
    let files = files(&timeline(vec![zero, Vec::new()]));
    assert_eq!(files.len(), 2);
    let config = json!({ "0": { "name": "0", "desc": super::NAME, "ranks": "[0, 1, 2]" } });
    for file in files.values() {
        assert_eq!(
            (&file["version"], &file["pg_config"]),
            (&json!("2.10"), &config)
        );
    }
    assert_eq!(files[&1]["entries"], json!([]));
    assert_eq!(
        files[&0]["pg_status"],
        json!({ "0": {
            "last_enqueued_collective": 1, "last_started_collective": 0, "last_completed_collective": 0,
        } })
    );
    assert_eq!(
        files[&0]["entries"],
        json!([{
            "record_id": 0, "pg_id": 0, "process_group": ["0", super::NAME],
            "collective_seq_id": 1, "p2p_seq_id": 0, "op_id": 1, "profiling_name": "nccl:all_reduce",
            "time_created_ns": 1_760_000_000_133_456_789_u64,
            "input_sizes": [[6]], "input_dtypes": ["BFloat16"],
            "output_sizes": [[6]], "output_dtypes": ["BFloat16"],
            "state": "scheduled",
            "time_discovered_started_ns": null, "time_discovered_completed_ns": null,
            "retired": false, "timeout_ms": 0, "is_p2p": false,
            "frames": [
                { "name": "all_reduce", "filename": super::NAME, "line": 1 },
                { "name": "<step>", "filename": "step=17 user=\"<b>\"", "line": 0x1000_0000_0000_0001_u64 },
            ],
        }])
    );
}

#[test]
fn each_collective_has_the_name_and_the_sizes_that_the_analyser_checks() {
    use OperationKind::{
        AllGather, AllToAll, AllToAllV, Broadcast, Capture, Gather, Recv, ReduceScatter, Replay,
        Scatter, Send,
    };
    let done = |number, operations: &[_]| call(number, number, CallState::Done, operations);
    let messages = [part(Send, 1, 3), part(Recv, 1, 5), part(Recv, 2, 7)];
    let calls = vec![
        done(1, &[plain(AllGather, 2)]),
        done(2, &[plain(ReduceScatter, 2)]),
        done(3, &[plain(AllToAll, 2)]),
        named(AllToAllV, done(4, &messages)),
        named(Gather, done(5, &[part(Recv, 1, 2), part(Recv, 2, 2)])),
        named(Scatter, done(6, &[part(Recv, 1, 2)])),
        done(7, &[plain(Broadcast, 2)]),
        named(Capture, done(8, &messages)),
        named(Replay, done(9, &[])),
        // A group, which is not numbered with the others.
        done(10, &[]),
        done(11, &[reduce(4)]),
        call(12, 12, CallState::Failed, &[reduce(4)]),
    ];
    let files = files(&timeline(vec![calls]));
    assert_eq!(
        compared(&files[&0]),
        [
            "0 #1 nccl:all_gather [[2]]->[[6]] completed",
            "0 #2 nccl:reduce_scatter [[6]]->[[2]] completed",
            "0 #3 nccl:all_to_all [[6]]->[[6]] completed",
            "0 #4 nccl:all_to_all [[3]]->[[12]] completed",
            "0 #5 nccl:gather [[2]]->[[6]] completed",
            "0 #6 nccl:scatter []->[[2]] completed",
            "0 #7 nccl:broadcast [[2]]->[[2]] completed",
            "0 #9 nccl:all_reduce_barrier [[0]]->[[0]] completed",
            "0 #10 nccl:all_reduce [[4]]->[[4]] completed",
        ]
    );
}

#[test]
fn messages_from_a_rank_to_another_are_a_group_of_two_with_numbers_of_their_own() {
    use OperationKind::{Recv, Send};
    let both = |peer, number| [message(Send, peer, number), message(Recv, peer, number)];
    let zero = vec![
        call(1, 1, CallState::Done, &both(1, 1)),
        call(2, 2, CallState::Issued, &both(2, 1)),
        call(3, 3, CallState::Issued, &[reduce(6)]),
    ];
    let two = vec![call(1, 1, CallState::Issued, &[message(Recv, 0, 1)])];
    let files = files(&timeline(vec![zero, Vec::new(), two]));
    assert_eq!(
        compared(&files[&0]),
        [
            "0/0->1 #1 nccl:send 0->1 [[4096]]->[[4096]] completed",
            "0/1->0 #1 nccl:recv 0<-1 [[4096]]->[[4096]] completed",
            "0/0->2 #1 nccl:send 0->1 [[4096]]->[[4096]] scheduled",
            "0/2->0 #1 nccl:recv 0<-1 [[4096]]->[[4096]] scheduled",
            "0 #1 nccl:all_reduce [[6]]->[[6]] scheduled",
        ]
    );
    assert_eq!(
        compared(&files[&2]),
        ["0/0->2 #1 nccl:recv 1<-0 [[4096]]->[[4096]] scheduled"]
    );
    let config = &files[&2]["pg_config"];
    assert_eq!(config["0/0->2"]["ranks"], "[0, 2]");
    assert_eq!(config["0/0->2"]["desc"], super::NAME);
}

#[test]
fn a_group_begins_with_the_first_collective_that_all_of_its_ranks_still_have() {
    let from = |first: u64, earlier: u64| {
        let calls = (first..=first + 5).map(|number| {
            let state = CallState::Done;
            call(number, number, state, &[reduce(number - earlier)])
        });
        (calls.collect::<Vec<_>>(), earlier)
    };
    // The 100 messages of rank 1 are no collectives, so that its call 103 is the third.
    let parts = [from(2, 0), from(103, 100), from(1, 0)];
    let mut timeline = timeline(parts.iter().map(|(calls, _)| calls.clone()).collect());
    for (rank, (_, earlier)) in timeline.ranks.iter_mut().zip(parts) {
        rank.snapshot.communicators[0].earlier_messages = Some(earlier);
    }
    let first = |file: &Value| (file["entries"][0].clone(), compared(file)[0].clone());
    for file in files(&timeline).values() {
        let (entry, text) = first(file);
        assert_eq!(text, "0 #3 nccl:all_reduce [[3]]->[[3]] completed");
        // The analyser drops entries before the highest first one.
        assert_eq!(entry["record_id"], 0);
    }
}

#[test]
fn a_collective_has_one_state_on_all_ranks_and_what_is_lost_on_one_is_taken_from_another() {
    use CallState::{Aborted, Done, Issued};
    let zero = vec![
        call(1, 1, Issued, &[plain(OperationKind::Broadcast, 2)]),
        call(2, 2, Done, &[reduce(6)]),
        call(3, 3, Done, &[plain(OperationKind::Broadcast, 2)]),
    ];
    let mut one = zero.clone();
    one[0].state = Done;
    one[1].state = Aborted;
    one[1].operations.clear();
    one[1].missing = 1;
    one[2].state = Aborted;
    let files = files(&timeline(vec![zero, one]));
    let expected = [
        // A later all-reduce is done.
        "0 #1 nccl:broadcast [[2]]->[[2]] completed",
        "0 #2 nccl:all_reduce [[6]]->[[6]] completed",
        // The root of a broadcast may be done before others come.
        "0 #3 nccl:broadcast [[2]]->[[2]] scheduled",
    ];
    assert_eq!(compared(&files[&0]), expected);
    assert_eq!(compared(&files[&1]), expected);
    assert_eq!(files[&1]["entries"][1]["input_dtypes"], json!(["BFloat16"]));
}

#[test]
fn the_ranks_of_a_smaller_communicator_are_those_of_the_world() {
    let mut timeline = timeline(vec![Vec::new(); 3]);
    for (place, rank) in [(0, 2), (1, 0)] {
        let own = &mut timeline.ranks[rank].snapshot.communicators;
        let mut small = own[0].clone();
        small.name = String::from("small");
        small.key = Some(String::from("small"));
        small.rank = place;
        small.world_size = 2;
        small.members = Some(vec![2, 0]);
        small.calls = vec![call(1, 1, CallState::Issued, &[reduce(6)])];
        // Of an earlier generation, in which the ranks had other numbers.
        let mut old = small.clone();
        old.key = Some(String::from("old"));
        old.generation -= 1;
        old.world_size = 3;
        own.extend([small, old]);
    }
    let files = files(&timeline);
    for rank in [0, 2] {
        let groups = files[&rank]["pg_config"].as_object().unwrap();
        let ranks: Vec<_> = groups.values().map(|group| &group["ranks"]).collect();
        assert_eq!(ranks, ["[0, 1, 2]", "[2, 0]"]);
        assert_eq!(
            files[&rank]["entries"][0]["process_group"],
            json!(["1", "small"])
        );
    }
    assert_eq!(files[&1]["pg_config"].as_object().unwrap().len(), 1);
}

#[test]
fn a_rank_whose_collectives_cannot_be_numbered_is_compared_with_no_other() {
    let calls = |numbers: std::ops::RangeInclusive<u64>| {
        let calls = numbers.map(|number| {
            let state = CallState::Done;
            call(number, number, state, &[reduce(6)])
        });
        calls.collect::<Vec<_>>()
    };
    // How many of rank 1's first 100 calls were messages is not known.
    let timeline = timeline(vec![calls(1..=150), calls(101..=103)]);
    assert_eq!(
        timeline.ranks[1].snapshot.communicators[0].earlier_messages,
        None
    );
    let files = files(&timeline);
    for file in files.values() {
        assert_eq!(file["entries"], json!([]));
    }
    let status = &files[&0]["pg_status"]["0"];
    assert_eq!(status["last_enqueued_collective"], 150);
    assert_eq!(files[&1]["pg_status"], json!({}));
}
