//! The metrics are those of the page.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use metrics_exporter_prometheus::PrometheusBuilder;
use nccl::{OperationKind, ReduceOp, World};

use crate::Outcome;
use crate::lateness::until_skewed;
use crate::numbers::await_took;
use crate::page::{quoted, rows};
use crate::recovering::a_fault_is_recovered_from;
use crate::support::{self, Ranks};

fn ranks_work(world: World) -> Outcome {
    let world = a_fault_is_recovered_from(world)?;
    until_skewed(&world, "observed/metrics/skewed")?;
    let stream = support::device(&world)?.new_stream()?;
    let comm = world
        .communicator("observed/metrics")
        .stream(&stream)
        .build()?;
    let mut y = stream.alloc_zeros::<f32>(4)?;
    for _ in 0..4 {
        comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
    }
    let (peer, mut received) = (1 - comm.rank(), stream.alloc_zeros::<f32>(4)?);
    comm.group(|group| {
        group.isend(&y, peer)?;
        group.irecv(&mut received, peer)
    })?
    .wait()?;
    world.barrier("all is done")?;
    if world.rank() == 1 {
        return Ok(());
    }
    await_took("observed/metrics", OperationKind::AllReduce, 1)?;
    let recorder = PrometheusBuilder::new().build_recorder();
    let handle = recorder.handle();
    let sample = || metrics::with_local_recorder(&recorder, nccl::metrics::sample);
    sample();
    let text = handle.render();
    let value = |text: &str, metric: &str, labels: &[&str]| {
        let of = |line: &&str| {
            line.starts_with(&format!("{metric}{{"))
                && labels.iter().all(|label| line.contains(label))
        };
        let line = text.lines().find(of)?;
        Some(line.rsplit(' ').next()?.to_owned())
    };
    // The labels name the rank of this thread; the other rank has labels of its own.
    let own = [
        r#"comm="observed/metrics""#,
        r#"rank="0""#,
        r#"world_rank="0""#,
    ];
    assert_eq!(
        value(&text, "nccl_communicator_info", &own).as_deref(),
        Some("1"),
        "{text}"
    );
    let this = [r#"rank="0""#];
    assert_eq!(
        value(&text, "nccl_rank_info", &this).as_deref(),
        Some("1"),
        "{text}"
    );
    comm.abort("an abort has a duration")?;
    sample();
    let text = handle.render();
    assert_eq!(
        value(&text, "nccl_communicator_info", &own).as_deref(),
        Some("NaN"),
        "{text}"
    );
    metrics::with_local_recorder(&recorder, || {
        nccl::metrics::sample();
        nccl::metrics::sample();
    });
    let text = handle.render();
    let name = |line: &str| {
        let (name, _) = line.strip_prefix("# TYPE ")?.split_once(' ')?;
        Some(name.to_owned())
    };
    let mut exported: BTreeSet<String> = text.lines().filter_map(name).collect();
    // Threads have none; the other test has.
    assert!(exported.insert(AGE.to_owned()), "{text}");
    let listed = rows("nccl_");
    let names = listed.iter().filter_map(|row| quoted(row[0]).next());
    let listed: BTreeSet<String> = names.map(str::to_owned).collect();
    assert_eq!(exported, listed, "{text}");
    values_are_those_of_the_page(&text);
    for expected in [
        r#"nccl_ops_total{comm="observed/metrics",op="all_reduce"} 8"#,
        r#"nccl_bytes_total{comm="observed/metrics",op="all_reduce"} 128"#,
        // Sampled twice, recorded once: three communicators of two ranks.
        "nccl_init_seconds_count 6",
        "nccl_recover_seconds_count 2",
    ] {
        assert!(
            text.lines().any(|line| line == expected),
            "{expected}: {text}"
        );
    }
    Ok(())
}

/// Asserts that all exported values of labels are listed in the row of their metric, and that all listed values are
/// exported, unless they depend on events.
fn values_are_those_of_the_page(text: &str) {
    let exported = |metric: &str, label: &str| -> BTreeSet<String> {
        let lines = text
            .lines()
            .filter(|line| line.starts_with(&format!("{metric}{{")));
        let value = |line: &str| {
            let (_, rest) = line.split_once(&format!("{label}=\""))?;
            Some(rest.split_once('"')?.0.to_owned())
        };
        lines.filter_map(value).collect()
    };
    // The last cell lists the values.
    let listed = |metric: &str| -> BTreeSet<String> {
        let rows = rows(metric);
        let row = rows
            .iter()
            .find(|row| quoted(row[0]).next() == Some(metric));
        let last = row.and_then(|row| row.iter().rev().find(|cell| !cell.trim().is_empty()));
        let quotes = last.into_iter().flat_map(|cell| quoted(cell));
        quotes.map(str::to_owned).collect()
    };
    for (metric, label) in [
        ("nccl_faults_total", "class"),
        ("nccl_aborts_total", "result"),
        ("nccl_communicators", "state"),
        ("nccl_world_ranks", "state"),
    ] {
        assert_eq!(exported(metric, label), listed(metric), "{metric}: {text}");
    }
    // Operations have the same names as in errors.
    for metric in [
        "nccl_calls_total",
        "nccl_ops_total",
        "nccl_bytes_total",
        "nccl_op_seconds",
        "nccl_enqueue_seconds",
    ] {
        for op in exported(metric, "op") {
            assert!(OPERATIONS.contains(&&*op), "{metric} has {op:?}");
        }
    }
}

/// The counted operations, as [`OperationKind`] prints them.
const OPERATIONS: [&str; 18] = [
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "all_to_all_v",
    "gather",
    "scatter",
    "send",
    "recv",
    "group",
    "capture",
    "replay",
    "split",
    "route",
    "dispatch",
    "combine",
];

const AGE: &str = "nccl_peer_heartbeat_age_seconds";

fn a_process_is_heard(world: World) -> Outcome {
    if world.rank() == 1 {
        return Ok(world.barrier("seen")?);
    }
    let recorder = PrometheusBuilder::new().build_recorder();
    let handle = recorder.handle();
    let beginning = format!("{AGE}{{peer=\"1\"}} ");
    let age = || {
        metrics::with_local_recorder(&recorder, nccl::metrics::sample);
        let text = handle.render();
        let line = text.lines().find_map(|line| line.strip_prefix(&beginning));
        line.and_then(|age| age.parse::<f64>().ok())
    };
    let deadline = Instant::now() + Duration::from_secs(20);
    let until = |wanted: &dyn Fn(f64) -> bool| {
        while !age().is_some_and(wanted) {
            assert!(Instant::now() < deadline, "{}", handle.render());
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    until(&|age| age < 5.0);
    world.barrier("seen")?;
    until(&f64::is_nan);
    Ok(())
}

#[test]
fn another_process_is_heard_until_it_is_gone() {
    if support::needs_processes(2) {
        support::ranks_as_processes(2, a_process_is_heard);
    }
}

#[test]
fn the_metrics_are_those_of_the_page() {
    Ranks::new(2)
        .variable("NCCL_RUN_PROFILER", "kernels")
        .threads(ranks_work);
}

#[test]
fn a_sampler_ends_when_it_is_dropped() -> Outcome {
    let sampler = nccl::metrics::Sampler::start(Duration::from_secs(3600))?;
    let dropped = Instant::now();
    drop(sampler);
    assert!(dropped.elapsed() < Duration::from_secs(60));
    Ok(())
}
