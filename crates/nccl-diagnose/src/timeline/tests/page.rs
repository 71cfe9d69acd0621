//! The page of a timeline, as text and as its script draws it.

use std::time::Duration;

use serde_json::Value;

use super::{NAME, call, message, reduce, snapshot, two_of_three};
use crate::timeline::Timeline;
use nccl_core::OperationKind;
use nccl_core::recorder::{Call, CallState};

/// What the page's script draws.
fn data(page: &str) -> Value {
    let data = page.split_once("id=\"data\">").unwrap().1;
    serde_json::from_str(data.split_once("</script>").unwrap().0).unwrap()
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
    let data = data(&page);
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

/// The numbers come from a file.
#[test]
fn numbers_of_calls_that_were_left_out_do_not_overflow() {
    let mut timeline = two_of_three();
    let snapshot = &mut timeline.ranks[0].snapshot;
    snapshot
        .communicators
        .push(snapshot.communicators[0].clone());
    for one in &mut snapshot.communicators {
        one.left_out = usize::MAX;
    }
    snapshot.notes_left_out = 1;
    let words = format!("{} older calls and 1 notes left out", usize::MAX);
    assert!(timeline.to_html().contains(&words));
}

/// What the page's script draws and shows, run by node; `None` where node is not installed.
fn driven(timeline: &Timeline) -> Option<Value> {
    let directory = tempfile::tempdir().unwrap();
    let page = directory.path().join("page.html");
    std::fs::write(&page, timeline.to_html()).unwrap();
    let driver = concat!(env!("CARGO_MANIFEST_DIR"), "/src/timeline/page_driver.js");
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
    // The same call on the other rank is lit as well, if it is there.
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
    // A bar at the beginning is out of the picture when the view is zoomed in at its middle.
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

#[test]
fn the_same_collective_on_other_ranks_is_lit_whatever_messages_lie_before_it() {
    let long = |mut call: Call| {
        call.done = Some(call.since + Duration::from_millis(200));
        call
    };
    let of_both = |sequence| call(sequence, 500, CallState::Done, &[reduce(6)]);
    let send = [message(OperationKind::Send, 1, 1)];
    let zero = vec![long(call(1, 100, CallState::Done, &send)), long(of_both(2))];
    let one = vec![long(of_both(1))];
    let ranks = vec![snapshot(0, "a", zero), snapshot(1, "a", one)];
    let timeline = Timeline::merge(ranks).unwrap();
    let data = data(&timeline.to_html());
    let lanes = &data["lanes"];
    let index = |lane: usize, bar: usize| lanes[lane]["bars"][bar][8].as_u64();
    assert_eq!(
        [index(0, 0), index(0, 1), index(1, 0)],
        [None, Some(1), Some(1)]
    );
    let Some(seen) = driven(&timeline) else {
        return;
    };
    let tips = seen["tips"].as_array().unwrap();
    for (beginning, lit) in [
        ("send #1 on ", 1),
        ("all_reduce #2 on ", 2),
        ("all_reduce #1 on ", 2),
    ] {
        let is_it = |tip: &&Value| tip["text"].as_str().unwrap().starts_with(beginning);
        assert_eq!(tips.iter().find(is_it).unwrap()["lit"], lit, "{beginning}");
    }
}
