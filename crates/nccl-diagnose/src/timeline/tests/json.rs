//! JSON round trips, and files of other programs.

use std::time::Duration;

use serde_json::Value;

use super::two_of_three;
use crate::timeline::Timeline;
use nccl_core::recorder::Snapshot;

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
        (&"nccl-recording".into(), &2.into())
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
            json.replacen("\"schema\":2", "\"schema\":3", 1),
            "version 3",
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
                // A number that fits, so that the rest is checked as well.
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
                merged.to_pytorch_traces().count(),
                merged.standings(),
            );
            read += 1;
        }
        if let Ok(timeline) = Timeline::from_json(&text) {
            let _ = (timeline.to_html(), timeline.to_chrome_trace());
            let _ = timeline.to_pytorch_traces().count();
            read += 1;
        }
    }
    assert!(read > 0, "some of it can be read");
}
