//! The trace of a timeline, and what every viewer needs.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use serde_json::Value;

use super::{call, message, reduce, snapshot, two_of_three};
use crate::timeline::Timeline;
use nccl_core::OperationKind;
use nccl_core::recorder::CallState;

/// The events of a trace, after checking what every viewer needs.
fn events(trace: &str) -> Vec<Value> {
    let trace: Value = serde_json::from_str(trace).unwrap();
    let events = trace["traceEvents"].as_array().unwrap().clone();
    let mut slices: HashMap<(u64, u64), Vec<(f64, f64)>> = HashMap::new();
    for event in &events {
        for field in ["ph", "name"] {
            assert!(event[field].is_string(), "{event}");
        }
        let place = (
            event["pid"].as_u64().unwrap(),
            event["tid"].as_u64().unwrap(),
        );
        if event["ph"] == "X" {
            let (start, span) = (
                event["ts"].as_f64().unwrap(),
                event["dur"].as_f64().unwrap(),
            );
            assert!(start >= 0.0 && span >= 0.0, "{event}");
            slices.entry(place).or_default().push((start, start + span));
        }
    }
    for slices in slices.values_mut() {
        slices.sort_by(|one, other| one.partial_cmp(other).unwrap());
        for pair in slices.windows(2) {
            assert!(pair[0].1 <= pair[1].0 + 1e-6, "{pair:?} overlap");
        }
    }
    for event in &events {
        if ["s", "t", "f"].iter().any(|step| event["ph"] == *step) {
            let place = (
                event["pid"].as_u64().unwrap(),
                event["tid"].as_u64().unwrap(),
            );
            let at = event["ts"].as_f64().unwrap();
            let inside = slices[&place]
                .iter()
                .any(|(from, to)| *from <= at && at <= *to);
            assert!(inside, "an arrow without a slice: {event}");
        }
    }
    events
}

#[test]
fn a_trace_has_a_slice_for_each_call_and_arrows_that_begin_and_end() {
    let events = events(&two_of_three().to_chrome_trace());
    let of = |step: &str| events.iter().filter(|event| event["ph"] == step).count();
    assert_eq!(of("X"), 5);
    // One through the all-reduce of both, one for each of two messages.
    assert_eq!((of("s"), of("t"), of("f")), (3, 0, 3));
    let ids = |step: &str| -> HashSet<u64> {
        let those = events.iter().filter(|event| event["ph"] == step);
        those.map(|event| event["id"].as_u64().unwrap()).collect()
    };
    assert_eq!(ids("s"), ids("f"));
    let names: Vec<_> = events
        .iter()
        .filter(|event| event["name"] == "process_name")
        .map(|event| event["args"]["name"].as_str().unwrap())
        .collect();
    assert_eq!(names[0], "rank 0 (node-0, pid 4000)");
    assert_eq!(names[2], "rank 2: no recording");
    let open = events
        .iter()
        .find(|event| event["name"] == "all_reduce #3 (not done)")
        .unwrap();
    assert_eq!(open["dur"], 970_000.0);
    assert_eq!(open["args"]["operations"][0], "all_reduce 6 × bf16, sum");
    let span = r#"span "<step>", number 0x1000000000000001: step=17 user="<b>""#;
    assert_eq!(open["args"]["span"], span);
}

#[test]
fn calls_that_overlap_lie_in_rows_and_never_upon_each_other() {
    let calls = (1..=20).map(|number| {
        let mut call = call(number, number, CallState::Done, &[reduce(1)]);
        call.done = Some(call.since + Duration::from_millis(1 + number % 11));
        call
    });
    let timeline = Timeline::merge(vec![snapshot(0, "a", calls.collect())]).unwrap();
    let events = events(&timeline.to_chrome_trace());
    assert_eq!(events.iter().filter(|event| event["ph"] == "X").count(), 20);
}

#[test]
fn an_arrow_joins_one_collective_whatever_was_called_before_it_and_no_one_sided_calls() {
    use CallState::Done;
    let one_sided = |kind, peer| {
        let mut one = message(kind, peer, 1);
        one.message = None;
        [one]
    };
    let zero = vec![
        call(1, 10, Done, &one_sided(OperationKind::Put, 1)),
        call(2, 20, Done, &[reduce(6)]),
    ];
    let one = vec![
        call(1, 11, Done, &one_sided(OperationKind::WaitSignal, 0)),
        call(2, 12, Done, &one_sided(OperationKind::Signal, 0)),
        call(3, 21, Done, &[reduce(6)]),
    ];
    let timeline = Timeline::merge(vec![snapshot(0, "a", zero), snapshot(1, "a", one)]);
    let events = events(&timeline.unwrap().to_chrome_trace());
    let flow = events.iter().filter(|event| event["cat"] == "flow");
    let flow = flow.map(|event| (event["pid"].as_u64(), event["ts"].as_f64()));
    assert_eq!(
        flow.collect::<Vec<_>>(),
        [(Some(0), Some(15_000.0)), (Some(1), Some(16_000.0))]
    );
}

#[test]
fn calls_whose_place_among_the_collectives_is_not_known_have_no_arrow() {
    let calls = || vec![call(513, 10, CallState::Done, &[reduce(6)])];
    let ranks = vec![snapshot(0, "a", calls()), snapshot(1, "a", calls())];
    let mut timeline = Timeline::merge(ranks).unwrap();
    let arrows = |timeline: &Timeline| timeline.to_chrome_trace().matches("\"flow\"").count();
    assert_eq!(arrows(&timeline), 0);
    for rank in &mut timeline.ranks {
        rank.snapshot.communicators[0].earlier_messages = Some(rank.rank as u64);
    }
    // Known, but not the same collective.
    assert_eq!(arrows(&timeline), 0);
    for rank in &mut timeline.ranks {
        rank.snapshot.communicators[0].earlier_messages = Some(7);
    }
    assert_eq!(arrows(&timeline), 2);
}
