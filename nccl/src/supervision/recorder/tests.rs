//! What was recorded survives being written and read; what somebody else wrote is refused in words; and what is
//! shown of it says what it should, whatever it was called.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, SystemTime};

use serde_json::Value;

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

#[test]
fn a_snapshot_and_a_timeline_survive_the_way_through_json() {
    let timeline = two_of_three();
    for rank in &timeline.ranks {
        let json = rank.snapshot.to_json();
        assert_eq!(Snapshot::from_json(&json).unwrap(), rank.snapshot);
    }
    let json = timeline.to_json();
    assert_eq!(Timeline::from_json(&json).unwrap(), timeline);
    let value: Value = serde_json::from_str(&timeline.ranks[0].snapshot.to_json()).unwrap();
    let first = &value["communicators"][0]["calls"][0];
    assert_eq!(
        (&value["kind"], &value["schema"]),
        (&"nccl-recording".into(), &1.into())
    );
    assert_eq!(first["stream"], "0x7f0012345678");
    assert!(first["span"].is_null());
    let open = &value["communicators"][0]["calls"][2];
    assert_eq!(
        open["span"].to_string(),
        r#"{"about":"step=17 user=\"<b>\"","id":"0x1000000000000001","name":"<step>"}"#
    );
    assert_eq!(
        first["operations"][0].to_string(),
        r#"{"count":6,"kind":"all_reduce","reduction":"sum","type":"bf16"}"#
    );
}

#[test]
fn fields_of_a_later_release_are_skipped_and_another_format_is_refused() {
    let json = two_of_three().ranks[0].snapshot.to_json();
    let later = json.replacen("\"pid\"", "\"later\":[{\"x\":1}],\"pid\"", 1);
    assert!(Snapshot::from_json(&later).is_ok());
    for (text, word) in [
        (
            json.replacen("\"schema\":1", "\"schema\":2", 1),
            "version 2",
        ),
        (json.replacen("nccl-recording", "cat", 1), "\"kind\""),
        (two_of_three().to_json(), "it is a nccl-timeline"),
        (String::from("[]"), "invalid length"),
        (String::new(), "it is empty"),
        (json.replacen("all_reduce", "all_reduze", 1), "all_reduze"),
        (json.replacen("\"bf16\"", "\"bf17\"", 1), "bf17"),
        (
            json.replacen("\"world_size\":3", "\"world_size\":18446744073709551615", 1),
            "no number of ranks",
        ),
        (json[..json.len() / 2].to_owned(), "cut off"),
    ] {
        let error = Snapshot::from_json(&text).unwrap_err().to_string();
        assert!(error.contains(word), "{word:?} in {error:?}");
    }
}

#[test]
fn whatever_becomes_of_the_bytes_of_a_file_nothing_panics() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let timeline = two_of_three();
    let whole = [timeline.to_json(), timeline.ranks[0].snapshot.to_json()];
    let pieces = [
        "18446744073709551615",
        "-1",
        "1e999",
        "null",
        "[",
        "{",
        "\"",
        "\\",
        "0x",
        "ready",
        "\u{0}",
        "}",
        "]",
        ",",
        ":",
        "1.5",
        "true",
        "ncclDataType_t(7)",
        "0xffffffffffffffff",
        "9007199254740993",
    ];
    let (mut read, until) = (0, std::time::Instant::now() + Duration::from_millis(1500));
    while std::time::Instant::now() < until {
        let mut text = whole[random.usize(..2)].clone();
        for _ in 0..random.usize(1..4) {
            let mut at = random.usize(..=text.len());
            while !text.is_char_boundary(at) {
                at -= 1;
            }
            let mut end = (at + random.usize(..24)).min(text.len());
            while !text.is_char_boundary(end) {
                end -= 1;
            }
            match random.usize(..8) {
                0 => text.truncate(at),
                1 => text.replace_range(at.min(end)..end.max(at), ""),
                _ => text.replace_range(
                    at.min(end)..end.max(at),
                    pieces[random.usize(..pieces.len())],
                ),
            }
            if random.bool() {
                // A number that fits, so that the rest is looked at as well.
                let number = random.u64(..).to_string();
                text = text.replacen(
                    "\"since_ns\":20000000",
                    &format!("\"since_ns\":{number}"),
                    1,
                );
            }
        }
        if let Ok(snapshot) = Snapshot::from_json(&text) {
            let merged = Timeline::merge(vec![snapshot]).unwrap();
            let _ = (
                merged.to_html(),
                merged.to_chrome_trace(),
                merged.standings(),
            );
            read += 1;
        }
        if let Ok(timeline) = Timeline::from_json(&text) {
            let _ = (timeline.to_html(), timeline.to_chrome_trace());
            read += 1;
        }
    }
    assert!(read > 0, "some of it can be read");
}

#[test]
fn who_is_behind_is_said_with_the_call_and_who_is_not_there() {
    let timeline = two_of_three();
    let [standing] = &timeline.standings()[..] else {
        panic!("one communicator");
    };
    assert_eq!(standing.behind, [1]);
    assert_eq!(
        standing.sentence,
        "rank 1 (node-1, pid 4001) is behind, at group #2 (done); rank 0 is at all_reduce #3 (issued, and not \
         known to be done); nothing is known of rank 2"
    );
    assert_eq!(timeline.missing.len(), 1);
    assert_eq!(timeline.missing[0].rank, 2);
}

#[test]
fn clocks_are_one_on_one_machine_corrected_where_measured_and_otherwise_said_to_be_wrong() {
    let sources = |mut snapshots: Vec<Snapshot>, measured: bool| {
        for (at, snapshot) in snapshots.iter_mut().enumerate() {
            let clock = Clock::measured(1_000_000 * at as i128, 2_000);
            snapshot.clock = measured.then_some(clock);
        }
        let timeline = Timeline::merge(snapshots).unwrap();
        let clock = timeline.ranks[1].clock;
        (clock.source, clock.offset_ns, clock.uncertainty_ns)
    };
    let two = |boots: [&str; 2]| {
        let ranks = boots.into_iter().enumerate();
        ranks
            .map(|(rank, boot)| snapshot(rank, boot, vec![]))
            .collect()
    };
    assert_eq!(
        sources(two(["a", "b"]), false),
        (ClockSource::Wall, 0, None)
    );
    assert_eq!(
        sources(two(["a", "a"]), true),
        (ClockSource::SameMachine, 0, None)
    );
    assert_eq!(
        sources(two(["a", "b"]), true),
        (ClockSource::RoundTrip, -1_000_000, Some(2_000))
    );
}

#[test]
fn of_several_worlds_the_latest_is_merged_and_of_one_process_the_last_recording() {
    let mut old = snapshot(0, "a", vec![]);
    old.place.as_mut().unwrap().epoch = 2;
    old.taken = origin();
    let mut early = snapshot(1, "a", vec![]);
    early.taken = origin() + Duration::from_millis(1);
    let late = snapshot(1, "a", vec![call(1, 2, CallState::Done, &[reduce(1)])]);
    let timeline = Timeline::merge(vec![old, late.clone(), early]).unwrap();
    assert_eq!(timeline.epoch, 3);
    assert_eq!(timeline.ranks.len(), 1);
    assert_eq!(timeline.ranks[0].snapshot, late);
    assert!(timeline.left_out[0].contains("epoch 2"), "{timeline:?}");
}

#[test]
fn what_is_too_much_is_left_out_from_the_oldest_on_and_counted() {
    let calls = (1..=500).map(|number| call(number, number, CallState::Done, &[reduce(number)]));
    let mut limited = snapshot(0, "a", calls.collect());
    limited.limit_to(20_000);
    let recording = &limited.communicators[0];
    let length = limited.to_json().len();
    assert!((15_000..20_500).contains(&length), "{length}");
    assert_eq!(recording.calls.last().unwrap().sequence, 500);
    assert_eq!(recording.calls.len() + recording.left_out, 500);
    assert_eq!(recording.calls[0].sequence as usize, recording.left_out + 1);
    let mut nothing = limited.clone();
    nothing.limit_to(0);
    assert_eq!(nothing.communicators[0].left_out, 500);
    assert_eq!((nothing.notes.len(), nothing.notes_left_out), (0, 1));
}

#[test]
fn a_page_has_no_markup_but_its_own_and_the_names_in_it() {
    let page = two_of_three().to_html();
    for forbidden in [
        "<b>tp", "<img", "<link", "<iframe", "http:", "https:", "url(",
    ] {
        assert!(!page.contains(forbidden), "{forbidden}");
    }
    assert_eq!(page.matches("</script>").count(), 2);
    assert_eq!(page.matches("<script").count(), 2);
    let data = page.split_once("id=\"data\">").unwrap().1;
    let data = data.split_once("</script>").unwrap().0;
    let data: Value = serde_json::from_str(data).unwrap();
    assert_eq!(data["lanes"][0]["name"], NAME);
    assert_eq!(data["lanes"][0]["bars"].as_array().unwrap().len(), 3);
    for word in [
        "Who is behind",
        "rank 1 (node-1, pid 4001) is behind",
        "No recording of <b>rank 2</b>",
        "&lt;img src=x onerror=alert(1)&gt;",
        "another machine&#39;s clock on the wall",
        "model/&lt;/script&gt;&lt;b&gt;tp",
        "in span &quot;&lt;step&gt;&quot;, number 0x1000000000000001: step=17",
    ] {
        assert!(page.contains(word), "{word:?} is not in the page");
    }
}

/// The events of a trace, checked for what every viewer needs.
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

/// What the page's script draws and shows, by node; `None` where there is none.
fn driven(timeline: &Timeline) -> Option<Value> {
    let directory = tempfile::tempdir().unwrap();
    let page = directory.path().join("page.html");
    std::fs::write(&page, timeline.to_html()).unwrap();
    let driver = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/src/supervision/recorder/timeline/page_driver.js"
    );
    let output = std::process::Command::new("node")
        .arg(driver)
        .arg(page)
        .output();
    let output = match output {
        Ok(output) => output,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            eprintln!("skipped: the page's script is not run without node");
            return None;
        }
        Err(error) => panic!("node: {error}"),
    };
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    Some(serde_json::from_slice(&output.stdout).unwrap())
}

/// Left edge and width of each bar.
fn bars(value: &Value) -> Vec<(f64, f64)> {
    let bars = value.as_array().unwrap().iter();
    bars.map(|bar| (bar[0].as_f64().unwrap(), bar[2].as_f64().unwrap()))
        .collect()
}

#[test]
fn the_page_shows_the_call_under_the_pointer_and_moves_by_keys() {
    let Some(seen) = driven(&two_of_three()) else {
        return;
    };
    let words: Vec<_> = seen["words"].as_array().unwrap().iter().collect();
    for word in ["rank 0 (node-0, pid 4000)", "rank 2: no recording"] {
        let found = words
            .iter()
            .any(|text| text.as_str().unwrap().starts_with(word));
        assert!(found, "{word:?} of {words:?}");
    }
    let tips: Vec<_> = seen["tips"].as_array().unwrap().iter().collect();
    let tip = |beginning: &str| {
        let found = tips
            .iter()
            .filter(|tip| tip["text"].as_str().unwrap().starts_with(beginning));
        found.copied().collect::<Vec<_>>()
    };
    let open = tip("all_reduce #3 on ");
    assert_eq!(open.len(), 1, "{tips:?}");
    let text = open[0]["text"].as_str().unwrap();
    for word in [
        "issued, and not known to be done",
        "stream 0x7f0012345678",
        "in span \"<step>\", number 0x1000000000000001: step=17",
        "all_reduce 6 × bf16, sum",
        "on this page",
    ] {
        assert!(text.contains(word), "{word:?} in {text}");
    }
    // The same call on the other rank is lit as well, where there is one.
    assert_eq!(open[0]["lit"], 1);
    let both = tip("all_reduce #1 on ");
    assert_eq!(
        both.iter()
            .map(|tip| tip["lit"].clone())
            .collect::<Vec<_>>(),
        [2, 2]
    );
    // The same on both ranks, at the same time.
    assert_eq!(tip("phase: <img src=x onerror=alert(1)>").len(), 1);
    assert_eq!(
        [&seen["nothing"], &seen["something"], &seen["left"]],
        ["none", "block", "none"]
    );

    let whole = bars(&seen["bars"]);
    assert_eq!(whole.len(), 5, "{whole:?}");
    let after = |keys: &str| {
        let one = &seen["keys"][keys];
        assert_eq!(one["prevented"], keys != "x", "{keys}");
        bars(&one["bars"])
    };
    let widest = |bars: &[(f64, f64)]| bars.iter().map(|bar| bar.1).fold(0.0, f64::max);
    // What is at the beginning is out of the picture when one looks closer at its middle.
    assert!(after("w").len() < whole.len());
    assert!(bars(&seen["plus"]).len() < whole.len());
    assert!(widest(&after("s")) < widest(&whole) * 0.95);
    let first = |bars: &[(f64, f64)]| bars[0].0;
    assert!(first(&after("a")) > first(&whole) + 50.0);
    // Out of the picture, to the left.
    assert!(after("d").len() < whole.len() || first(&after("d")) < first(&whole));
    for keys in ["w0", "wwad0", "x"] {
        assert_eq!(after(keys), whole, "{keys}");
    }
}

/// Each of so many ranks with so many calls; one of them is behind.
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

/// From files to files; what it came to is printed.
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

/// As many calls as the answers of so many ranks may have, and a full ring.
#[test]
#[ignore = "for figures: docs/flight-recorder.md"]
fn a_thousand_ranks_with_all_their_calls_make_one_file() {
    one_file_of(1024, 200, 700);
    one_file_of(1024, 512, 700);
}
