//! Timelines with as many ranks as large jobs have.

use serde_json::Value;

use super::{call, message, reduce, snapshot};
use crate::operation::OperationKind;
use crate::timeline::Timeline;
use crate::timeline::layout::Layout;
use nccl_core::recorder::{CallState, Snapshot};

/// Snapshots of `ranks` ranks with `calls` calls each; rank `behind` lacks the last.
fn large(ranks: usize, calls: u64, behind: usize) -> Vec<Snapshot> {
    let one = |rank: usize| {
        let calls = calls - u64::from(rank == behind);
        let calls = (1..=calls).map(|number| {
            let next = (rank + 1) % ranks;
            let last = (rank + ranks - 1) % ranks;
            let messages = [
                message(OperationKind::Send, next, number as u32),
                message(OperationKind::Recv, last, number as u32),
            ];
            match number % 2 {
                0 => call(number, number, CallState::Done, &messages),
                _ => call(number, number, CallState::Done, &[reduce(number)]),
            }
        });
        let mut one = snapshot(rank, "", calls.collect());
        one.place.as_mut().unwrap().world_size = ranks;
        one.communicators[0].world_size = ranks;
        one
    };
    (0..ranks).map(one).collect()
}

/// Writes recordings to files, reads them as one timeline, and writes it; prints sizes and times.
fn one_file_of(ranks: usize, calls: u64, behind: usize) {
    let directory = tempfile::tempdir().unwrap();
    let mut bytes = 0;
    for one in large(ranks, calls, behind) {
        let rank = one.place.as_ref().unwrap().rank;
        let json = one.to_json();
        bytes += json.len();
        std::fs::write(directory.path().join(format!("rank-{rank}.json")), json).unwrap();
    }
    let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
    println!(
        "{ranks} ranks, {calls} calls each: {:.1} MiB in {ranks} files",
        mib(bytes)
    );
    let timed = |what: &str, begun: std::time::Instant, bytes: usize| {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let peak = status.lines().find(|line| line.starts_with("VmHWM:"));
        let peak = peak.and_then(|line| line.split_whitespace().nth(1)?.parse::<usize>().ok());
        println!(
            "{what}: {:.2} s, {:.1} MiB; the process has had {:.0} MiB",
            begun.elapsed().as_secs_f64(),
            mib(bytes),
            mib(peak.unwrap_or_default() << 10)
        );
    };
    let begun = std::time::Instant::now();
    let timeline = Timeline::read(&[directory.path()]).unwrap();
    timed("read and merged", begun, bytes);
    assert_eq!((timeline.ranks.len(), timeline.missing.len()), (ranks, 0));
    assert!(timeline.left_out.is_empty(), "{:?}", timeline.left_out);
    let begun = std::time::Instant::now();
    let standings = timeline.standings();
    timed("who is behind", begun, 0);
    assert_eq!(standings.len(), 1);
    assert_eq!(standings[0].behind, [behind]);
    let begun = std::time::Instant::now();
    let page = timeline.to_html();
    timed("page", begun, page.len());
    assert!(page.contains(&format!(
        "rank {behind} (node-{behind}, pid {}) is behind",
        4000 + behind
    )));
    let data = page.split_once("id=\"data\">").unwrap().1;
    let data: Value = serde_json::from_str(data.split_once("</script>").unwrap().0).unwrap();
    assert_eq!(data["lanes"].as_array().unwrap().len(), ranks);
    drop((data, page));
    let begun = std::time::Instant::now();
    let trace = timeline.to_chrome_trace();
    timed("trace", begun, trace.len());
    let slices = trace.matches("\"ph\":\"X\"").count() as u64;
    assert_eq!(slices, calls * ranks as u64 - 1);
    drop(trace);
    let begun = std::time::Instant::now();
    let json = timeline.to_json();
    timed("JSON", begun, json.len());
    let file = directory.path().join("all.json");
    std::fs::write(&file, json).unwrap();
    let begun = std::time::Instant::now();
    let again = Timeline::read(&[&file]).unwrap();
    timed("read again", begun, 0);
    assert_eq!(again, timeline);
}

#[test]
fn a_thousand_ranks_make_one_file() {
    one_file_of(1024, 4, 700);
}

/// As many calls as a recording in an answer may have, for a thousand ranks, and a full ring.
#[test]
#[ignore = "for figures: docs/flight-recorder.md"]
fn a_thousand_ranks_with_all_their_calls_make_one_file() {
    one_file_of(1024, 200, 700);
    one_file_of(1024, 512, 700);
}

// The inputs of the following tests are so large that they end only if the time does not grow with the square of the size.

#[test]
fn as_many_streams_as_calls_are_as_many_lanes() {
    const STREAMS: u64 = 300_000;
    let sample = call(1, 1, CallState::Done, &[reduce(1)]);
    let calls = (1..=STREAMS).map(|number| {
        let mut call = sample.clone();
        (call.sequence, call.stream) = (number, number);
        call
    });
    let one = snapshot(0, "", calls.collect());
    let timeline = Timeline::merge(vec![one]).unwrap();
    let lanes = Layout::of(&timeline).lanes;
    assert_eq!(lanes.len() as u64, STREAMS);
    assert!(lanes.iter().all(|lane| lane.bars.len() == 1));
}

#[test]
fn many_processes_of_one_rank_are_told_apart() {
    const PROCESSES: u32 = 100_000;
    let mut sample = snapshot(0, "", Vec::new());
    sample.communicators.clear();
    sample.notes.clear();
    // Each process twice.
    let all = (0..PROCESSES).chain(0..PROCESSES).map(|pid| {
        let mut one = sample.clone();
        one.pid = pid;
        one
    });
    let timeline = Timeline::merge(all.collect()).unwrap();
    assert_eq!(timeline.ranks.len() as u32, PROCESSES);
}

#[test]
fn many_communicators_of_one_name_are_named_with_their_keys() {
    const COMMUNICATORS: usize = 200_000;
    let mut one = snapshot(0, "", Vec::new());
    let sample = one.communicators.remove(0);
    let all = (0..COMMUNICATORS).map(|number| {
        let mut recording = sample.clone();
        recording.key = Some(format!("{number:08x}"));
        recording
    });
    one.communicators = all.collect();
    let standings = Timeline::merge(vec![one]).unwrap().standings();
    assert_eq!(standings.len(), COMMUNICATORS);
    for (number, standing) in standings.iter().enumerate() {
        let key = format!(", key {number:08x}");
        assert!(standing.named.ends_with(&key), "{}", standing.named);
    }
}

#[test]
fn many_ranks_that_are_all_at_different_calls_are_each_named() {
    const RANKS: usize = 100_000;
    let mut sample = snapshot(0, "", vec![call(1, 1, CallState::Done, &[reduce(1)])]);
    sample.notes.clear();
    sample.communicators[0].world_size = RANKS;
    let all = (0..RANKS).map(|rank| {
        let mut one = sample.clone();
        one.place.as_mut().unwrap().rank = rank;
        one.communicators[0].rank = rank;
        one.communicators[0].calls[0].sequence = rank as u64 + 1;
        one
    });
    let standings = Timeline::merge(all.collect()).unwrap().standings();
    let [standing] = &standings[..] else {
        panic!("one communicator");
    };
    assert_eq!(standing.behind.len(), RANKS - 1);
    let sentence = &standing.sentence;
    assert_eq!(
        sentence.matches(" is behind, at all_reduce #").count(),
        RANKS - 1
    );
    let leader = format!("rank {} is at all_reduce #{RANKS} (done)", RANKS - 1);
    assert!(sentence.ends_with(&leader));
}
