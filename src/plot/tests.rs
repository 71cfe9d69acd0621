use super::*;
use crate::bench::Measurement;
use crate::element;
use crate::shape::{Case, Shape};

fn row(bytes: u64, seconds: f64) -> Row {
    let measured = Measurement {
        seconds,
        host_seconds: seconds / 8.0,
        wrong: Some(0),
        wrong_here: false,
        per_iteration: None,
    };
    Row {
        shape: Shape::split(bytes, Case::of(element::FLOAT), 4),
        out_of_place: measured.clone(),
        in_place: measured,
        ratio: None,
        notes: Vec::new(),
    }
}

fn heading() -> Heading {
    Heading {
        title: "all_to_all_perf: 4 ranks on <A> & B".to_owned(),
        details: "2026-01-02".to_owned(),
        warning: Some("emulated".to_owned()),
        time: "time",
    }
}

#[test]
fn every_algorithm_has_a_curve_with_a_mark_for_each_size_in_both_panels() {
    let mut plot = Plot::default();
    for (name, factor) in [("native", 1.0), ("grouped", 3.0)] {
        for power in 10..=24 {
            plot.add(
                name,
                &row(1 << power, factor * 1e-9 * f64::from(1 << power)),
                false,
            );
        }
    }
    let svg = plot.svg(&heading());
    // Fifteen sizes in two panels, and one mark in the legend; the first is round, the second is not.
    assert_eq!(svg.matches("<circle").count(), 2 * 15 + 1);
    assert_eq!(svg.matches("h8l-4 -7.5z").count(), 2 * 15 + 1);
    for words in [
        ">native<",
        ">grouped<",
        ">1K<",
        ">16M<",
        ">10 µs<",
        ">1 ms<",
        "bus bandwidth (GB/s)",
        "bytes per rank",
        "&lt;A&gt; &amp; B",
        ">emulated<",
        ">2026-01-02<",
    ] {
        assert!(svg.contains(words), "{words} is missing:\n{svg}");
    }
    assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
}

#[test]
fn what_cannot_be_shown_on_a_logarithmic_axis_is_left_out() {
    let mut plot = Plot::default();
    plot.add("auto", &row(8, 1e-6), false); // nothing for four ranks
    assert!(plot.svg(&heading()).contains("nothing to show"));
    plot.add("auto", &row(1024, 1e-6), false);
    let svg = plot.svg(&heading());
    assert!(!svg.contains("nothing to show"), "{svg}");
    assert_eq!(svg.matches("<circle").count(), 2 + 1);
    assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
}

#[test]
fn the_last_of_several_cycles_counts() {
    let mut plot = Plot::default();
    for seconds in [1e-6, 2e-6] {
        plot.add("auto", &row(1024, seconds), false);
    }
    plot.add("host", &row(1024, 8e-6), true);
    let seconds = |at: usize| plot.series[at].points.iter().map(|point| point.seconds);
    assert_eq!(seconds(0).collect::<Vec<_>>(), [2e-6]);
    assert_eq!(seconds(1).collect::<Vec<_>>(), [1e-6]);
}

#[test]
fn an_older_picture_is_replaced_and_a_bad_place_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("out.svg");
    check(&path).unwrap();
    assert!(!path.exists(), "looking leaves nothing behind");
    for _ in 0..2 {
        let mut plot = Plot::default();
        plot.add("auto", &row(1024, 1e-6), false);
        plot.write(&path, &heading()).unwrap();
        assert!(
            std::fs::read_to_string(&path)
                .unwrap()
                .ends_with("</svg>\n")
        );
    }
    for bad in [directory.path(), Path::new("/no/such/directory/out.svg")] {
        let failure = check(bad).unwrap_err();
        assert_eq!(failure.exit(), Exit::Usage);
        assert!(failure.to_string().contains("--plot"), "{failure}");
    }
}
