//! Measures what the safe crate adds to bare calls of the library below it.
//!
//! ```text
//! cargo bench -p nccl-benches --bench overhead [-- FILTER]
//! ```
//!
//! Both ways do the same over a library that only queues; streams are the emulator's, so no figure says anything about
//! a GPU. First comes a table: in each of many turns every size is run both ways, one right after the other, and the
//! printed values are the median of the turns and, behind ±, half the distance of their quartiles. A straight line
//! through the differences of all sizes, weighted by 1/size², gives the cost of a message and of a group. Then
//! criterion measures the same calls one by one, and compares them with its last run.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion};
use nccl::LaunchMode;
use nccl_tools::overhead::{MOST_MESSAGES, Tracking, Workload};
use nccl_tools::queueing::Ending;

const SIZES: [usize; 4] = [2, 8, 16, MOST_MESSAGES];
const TURNS: usize = 201;
/// Messages of one turn, so that it is long compared with the clock's resolution.
const MESSAGES_PER_TURN: usize = 8192;

const VARIANTS: [(&str, LaunchMode, Ending, Tracking); 5] = [
    (
        "success, tracking off",
        LaunchMode::NonBlocking,
        Ending::Success,
        Tracking::Off,
    ),
    (
        "in progress, tracking off",
        LaunchMode::NonBlocking,
        Ending::InProgress,
        Tracking::Off,
    ),
    (
        "blocking child, tracking off",
        LaunchMode::BlockingChild,
        Ending::Success,
        Tracking::Off,
    ),
    (
        "success, tracking on",
        LaunchMode::NonBlocking,
        Ending::Success,
        Tracking::On,
    ),
    (
        "in progress, tracking on",
        LaunchMode::NonBlocking,
        Ending::InProgress,
        Tracking::On,
    ),
];

fn main() {
    nccl_emulator::install().expect("no driver is loaded yet");
    // Other arguments are those of a test run, or a query.
    if std::env::args().any(|argument| argument == "--bench") {
        table();
    }
    let mut criterion = Criterion::default()
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(800))
        .configure_from_args();
    one_by_one(&mut criterion);
    criterion.final_summary();
}

/// Nanoseconds of one `call`, over `count` of them.
fn time(workload: &mut Workload, count: usize, mut call: impl FnMut(&mut Workload)) -> f64 {
    let start = Instant::now();
    for _ in 0..count {
        call(workload);
    }
    let elapsed = start.elapsed();
    // Work on the stream of the event tracking must not pile up.
    workload.synchronize().expect("the stream works");
    elapsed.as_secs_f64() * 1e9 / count as f64
}

fn safe_group(workload: &mut Workload, messages: usize) {
    workload.safe_group(black_box(messages)).expect("a group");
}

fn raw_group(workload: &mut Workload, messages: usize) {
    workload.raw_group(black_box(messages)).expect("a group");
}

/// A call by itself, bare and safe.
type Single = (&'static str, fn(&mut Workload), fn(&mut Workload));

const SINGLES: [Single; 3] = [
    (
        "all_to_all",
        |workload| workload.raw_all_to_all().expect("an all-to-all"),
        |workload| workload.safe_all_to_all().expect("an all-to-all"),
    ),
    (
        "all_reduce",
        |workload| workload.raw_all_reduce().expect("an all-reduce"),
        |workload| workload.safe_all_reduce().expect("an all-reduce"),
    ),
    (
        "on, all_reduce",
        |workload| workload.raw_all_reduce().expect("an all-reduce"),
        |workload| workload.safe_all_reduce_on().expect("an all-reduce"),
    ),
];

fn table() {
    println!("ns, median of {TURNS} turns ± half the distance of the quartiles");
    for (name, mode, ending, tracking) in VARIANTS {
        let mut workload = Workload::in_mode(mode, ending, tracking).expect("a workload");
        println!("\n{name}");
        println!(
            "{:<16} {:>18} {:>18} {:>18}",
            "", "raw", "safe", "difference"
        );
        let mut differences = vec![Vec::new(); SIZES.len()];
        let mut all = vec![(Vec::new(), Vec::new()); SIZES.len()];
        let (mut slopes, mut starts) = (Vec::new(), Vec::new());
        let mut singles = SINGLES.map(|_| (Vec::new(), Vec::new(), Vec::new()));
        let mut drivers = Vec::new();
        for turn in 0..TURNS {
            let mut points = Vec::new();
            for (index, &size) in SIZES.iter().enumerate() {
                let count = MESSAGES_PER_TURN / size / 4;
                let (raw, safe) = both(turn, |safe| {
                    let call = if safe { safe_group } else { raw_group };
                    time(&mut workload, count, |workload| call(workload, size))
                });
                all[index].0.push(raw);
                all[index].1.push(safe);
                differences[index].push(safe - raw);
                points.push((size as f64, safe - raw));
            }
            let (slope, start) = line(&points);
            slopes.push(slope);
            starts.push(start);
            for ((_, raw, safe), measured) in SINGLES.iter().zip(&mut singles) {
                let (raw, safe) = both(turn, |is_safe| {
                    time(&mut workload, 1000, if is_safe { safe } else { raw })
                });
                measured.0.push(raw);
                measured.1.push(safe);
                measured.2.push(safe - raw);
            }
            drivers.push(time(&mut workload, 1000, |workload| {
                workload.driver_calls().expect("a stream");
            }));
        }
        for (index, size) in SIZES.iter().enumerate() {
            let (raw, safe) = (&all[index].0, &all[index].1);
            row(&format!("group of {size}"), raw, safe, &differences[index]);
        }
        for ((name, ..), (raw, safe, difference)) in SINGLES.iter().zip(&singles) {
            row(name, raw, safe, difference);
        }
        println!("added per message  {}", Spread::of(&slopes));
        println!("added per group    {}", Spread::of(&starts));
        println!("the driver's part  {} per group", Spread::of(&drivers));
    }
    println!();
}

/// Raw and safe, each first as often as the other.
fn both(turn: usize, mut measure: impl FnMut(bool) -> f64) -> (f64, f64) {
    if turn.is_multiple_of(2) {
        let raw = measure(false);
        (raw, measure(true))
    } else {
        let safe = measure(true);
        (measure(false), safe)
    }
}

/// Slope and start of the line through `points`; a point's error grows with its size.
fn line(points: &[(f64, f64)]) -> (f64, f64) {
    let sum =
        |of: fn(f64, f64) -> f64| -> f64 { points.iter().map(|&(x, y)| of(x, y) / (x * x)).sum() };
    let weight = sum(|_, _| 1.0);
    let (x, y) = (sum(|x, _| x) / weight, sum(|_, y| y) / weight);
    let (xx, xy) = (sum(|x, _| x * x) / weight, sum(|x, y| x * y) / weight);
    let slope = (xy - x * y) / (xx - x * x);
    (slope, y - slope * x)
}

fn row(name: &str, raw: &[f64], safe: &[f64], difference: &[f64]) {
    let [raw, safe, difference] =
        [raw, safe, difference].map(|values| Spread::of(values).to_string());
    println!("{name:<16} {raw:>18} {safe:>18} {difference:>18}");
}

struct Spread {
    median: f64,
    half: f64,
}

impl Spread {
    fn of(values: &[f64]) -> Self {
        let mut values = values.to_vec();
        values.sort_by(f64::total_cmp);
        let at = |part: usize| values[(values.len() - 1) * part / 4];
        Self {
            median: at(2),
            half: (at(3) - at(1)) / 2.0,
        }
    }
}

impl std::fmt::Display for Spread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:.1} ± {:.1}", self.median, self.half)
    }
}

fn one_by_one(criterion: &mut Criterion) {
    for (name, mode, ending, tracking) in VARIANTS {
        let mut workload = Workload::in_mode(mode, ending, tracking).expect("a workload");
        let mut group = criterion.benchmark_group(name);
        for size in SIZES {
            for (way, call) in [
                ("raw", raw_group as fn(&mut Workload, usize)),
                ("safe", safe_group),
            ] {
                group.bench_function(BenchmarkId::new(way, size), |bencher| {
                    bencher.iter_custom(|count| {
                        let nanoseconds =
                            in_batches(&mut workload, count, |workload| call(workload, size));
                        Duration::from_secs_f64(nanoseconds / 1e9)
                    });
                });
            }
        }
        for (name, raw, safe) in SINGLES {
            for (way, call) in [("raw", raw), ("safe", safe)] {
                group.bench_function(BenchmarkId::new(way, name), |bencher| {
                    bencher.iter_custom(|count| {
                        let nanoseconds = in_batches(&mut workload, count, call);
                        Duration::from_secs_f64(nanoseconds / 1e9)
                    });
                });
            }
        }
        group.finish();
    }
}

/// Nanoseconds of `count` calls; the stream is synchronised regularly, which is not counted.
fn in_batches(workload: &mut Workload, count: u64, call: impl Fn(&mut Workload)) -> f64 {
    const BATCH: u64 = 256;
    let (mut left, mut sum) = (count, 0.0);
    while left > 0 {
        let batch = left.min(BATCH);
        sum += time(workload, batch as usize, &call) * batch as f64;
        left -= batch;
    }
    sum
}
