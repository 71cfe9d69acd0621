//! The output of the examples, and that the page on observability shows lines of it.

use std::process::Command;

#[test]
fn the_metrics_of_two_ranks_are_printed_as_prometheus_reads_them() {
    let output = Command::new(env!("CARGO_BIN_EXE_metrics"))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    assert!(said.contains("# TYPE nccl_"), "{said}");
}

#[test]
fn a_trace_of_opentelemetry_holds_both_ranks_and_the_recorder_names_it() {
    let example = env!("CARGO_BIN_EXE_opentelemetry");
    let output = Command::new(example).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    let of = |beginning: &str| -> Vec<&str> {
        let lines = said.lines().filter(|line| line.starts_with(beginning));
        lines
            .map(|line| line.split_once("trace ").unwrap().1)
            .collect()
    };
    let trace = |line: &&str| line.split_once(' ').unwrap().0.to_owned();
    let (zero, one) = (
        of("rank 0: all_reduce #1 in request"),
        of("rank 1: all_reduce #1 in request"),
    );
    assert_eq!((zero.len(), one.len()), (1, 1), "{said}");
    assert_eq!(trace(&zero[0]), trace(&one[0]), "{said}");
    let exported = of("exported: ");
    let requests: Vec<_> = exported
        .iter()
        .filter(|line| line.contains(" request "))
        .collect();
    assert_eq!(requests.len(), 2, "{said}");
    assert!(
        requests.iter().all(|line| trace(line) == trace(&zero[0])),
        "{said}"
    );
    let inits = exported.iter().filter(|line| {
        line.contains(" nccl.comm.init ")
            && line.contains("comm=model/tp")
            && line.contains("communicator ready")
    });
    assert_eq!(inits.count(), 2, "{said}");
}

#[test]
fn the_page_shows_lines_of_the_example() {
    let page = include_str!("../../docs/observability.md");
    let (_, text) = page.split_once("### With OpenTelemetry").unwrap();
    let (_, code) = text.split_once("```rust,ignore\n").unwrap();
    let (code, _) = code.split_once("```").unwrap();
    let example = include_str!("opentelemetry.rs");
    let flat = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(flat(example).contains(&flat(code)), "{code}");
}
