//! The page in `docs/results`.

use std::fmt::Write as _;

use nccl_tools::build_info::BUILD;
use nccl_tools::statistics::median;

use super::compare::{Comparison, EAGER, Spread};
use super::operation::Operation;
use super::options::{self, Options};

/// The machine and the software that the figures depend on.
pub(crate) struct Machine {
    pub(crate) mpi: String,
    pub(crate) compiler: String,
    /// The load before and after.
    pub(crate) before: String,
    pub(crate) after: String,
}

/// Writes the page.
pub(crate) fn write(options: &Options, machine: &Machine, results: &[Comparison]) -> String {
    let mut page = String::from(
        "# The emulator against Open MPI and memcpy\n\nWritten by `cargo bench -p nccl-benches --bench against_mpi`. No GPU: these \
         figures say nothing about one.\n\n",
    );
    let _ = writeln!(
        page,
        "- command: `{}`, {}\n- {}\n- {}, mpicc: {}\n- {}\n- load (1, 5 and 15 minutes) before: {}; after: {}\n",
        options.command,
        nccl_tools::clock::now(),
        BUILD.line(),
        machine.mpi,
        machine.compiler,
        nccl_tools::machine::line(),
        machine.before,
        machine.after
    );
    how(&mut page, options, results);
    verdicts(&mut page, results);
    by_crate(&mut page, results);
    eager(&mut page, results);
    page += "![Time over size](against-mpi.svg)\n";
    for &ranks in &options.ranks {
        for operation in [
            Operation::SendRecv,
            Operation::AllToAll,
            Operation::AllReduce,
        ] {
            let of_it = |one: &&Comparison| one.operation == operation && one.ranks == ranks;
            let rows: Vec<_> = results.iter().filter(of_it).collect();
            table(&mut page, operation, ranks, &rows);
        }
    }
    page
}

fn how(page: &mut String, options: &Options, results: &[Comparison]) {
    let cores = nccl_tools::machine::cores().map_or(0, |cores| cores.len());
    let mut commands: Vec<String> = Vec::new();
    for &ranks in &options.ranks {
        commands.push(format!(
            "`mpirun {}`",
            options::mpirun(ranks, cores).join(" ")
        ));
    }
    let _ = writeln!(
        page,
        "## How this was measured\n\n\
         Ranks are processes of one machine, rank i of every program bound to core i modulo {cores} (each says where it \
         is; another place would end the run). The emulator's are called by NCCL's C functions, 20 operations and then a \
         `cuStreamSynchronize`, as in nccl-tests, and by the safe crate; MPI's by {}: `MPI_Alltoall` and `MPI_Allreduce` of floats, \
         `MPI_Sendrecv` of bytes (`benches/mpi/all_to_all.c`). memcpy is the C library's, by all of MPI's ranks at the \
         same time, in memory of malloc's. Sizes are bytes of a rank's send buffer. Buffers shift from one operation to \
         the next through {} MiB, as in nccl-tests, so none stays in a first-level cache. Before a size is timed, one \
         operation of each program is checked, element by element.\n\n\
         They take turns in one run, for short messages with an Open MPI that is not eager as well, {} turns each for each line, in a random order each round; those that wait \
         sleep outside of NCCL and MPI. A turn takes about {} ms, or three operations; it is from when its first rank \
         begins, behind a barrier, until its last one is done, by one monotonic clock, divided by the number of \
         operations. Times are medians of the turns, in brackets the least and the greatest; ratios are medians of the \
         ratios within a round, so that what disturbs a round counts on both sides.\n",
        commands.join(" and "),
        options.max >> 20,
        options.rounds,
        options.turn * 1e3
    );
    let noise = |of: fn(&Comparison) -> &Vec<f64>| {
        let widths: Vec<f64> = results
            .iter()
            .map(|one| Spread::of(of(one)))
            .map(|spread| (spread.greatest - spread.least) / spread.median * 100.0)
            .collect();
        median(&widths).unwrap_or(f64::NAN)
    };
    let _ = writeln!(
        page,
        "Noise: between the least and the greatest turn of a line lie {:.0} % of its median for the emulator, {:.0} % for \
         Open MPI and {:.0} % for memcpy (medians over all lines).\n",
        noise(|one| &one.ours),
        noise(|one| &one.mpi),
        noise(|one| &one.memcpy)
    );
}

/// A limit on some of the results.
struct Goal {
    what: &'static str,
    operation: Operation,
    ranks: usize,
    sizes: std::ops::RangeInclusive<usize>,
    of: fn(&Comparison) -> f64,
    must: f64,
    aim: f64,
    unit: &'static str,
}

const ALL: usize = usize::MAX;

fn goals() -> Vec<Goal> {
    let over_memcpy: fn(&Comparison) -> f64 = |one| one.ratio(&one.memcpy).median;
    let over_mpi: fn(&Comparison) -> f64 = |one| one.ratio(&one.mpi).median;
    let microseconds: fn(&Comparison) -> f64 = |one| Spread::of(&one.ours).median * 1e6;
    let goal = |what, operation, ranks, sizes, of, (must, aim), unit| Goal {
        what,
        operation,
        ranks,
        sizes,
        of,
        must,
        aim,
        unit,
    };
    use Operation::{AllReduce, AllToAll, SendRecv};
    vec![
        goal(
            "8 B send+recv in a group",
            SendRecv,
            2,
            8..=8,
            microseconds,
            (2.0, 0.6),
            " µs",
        ),
        goal(
            "all-to-all ≥ 4 MiB over memcpy",
            AllToAll,
            2,
            4 << 20..=ALL,
            over_memcpy,
            (1.25, 1.10),
            "",
        ),
        goal(
            "all-to-all to 16 KiB over Open MPI",
            AllToAll,
            2,
            0..=16 << 10,
            over_mpi,
            (1.25, 1.0),
            "",
        ),
        goal(
            "all-to-all of less than 8 KiB over Open MPI that is not eager",
            AllToAll,
            2,
            0..=EAGER,
            |one| one.ratio(&one.meeting).median,
            (1.0, 1.0),
            "",
        ),
        goal(
            "all-to-all above 16 KiB over Open MPI",
            AllToAll,
            2,
            (16 << 10) + 1..=ALL,
            over_mpi,
            (1.0, 1.0),
            "",
        ),
        goal(
            "all-to-all over Open MPI",
            AllToAll,
            4,
            0..=ALL,
            over_mpi,
            (f64::INFINITY, 1.0),
            "",
        ),
        goal(
            "all-to-all of 16 KiB and more by the safe crate over the C functions",
            AllToAll,
            2,
            16 << 10..=ALL,
            |one| one.crate_ratio().median,
            (1.1, 1.0),
            "",
        ),
        goal(
            "all-to-all by the example program over the C functions, in cycles",
            AllToAll,
            2,
            0..=ALL,
            |one| one.example_ratio().median,
            (1.1, 1.0),
            "",
        ),
        goal(
            "all-to-all by the example program over the safe crate, in cycles",
            AllToAll,
            2,
            0..=ALL,
            |one| one.example_over_crate().median,
            (1.1, 1.0),
            "",
        ),
        goal(
            "what the safe crate adds to a shorter one",
            AllToAll,
            2,
            0..=(16 << 10) - 1,
            |one| one.added().median * 1e6,
            (0.35, 0.15),
            " µs",
        ),
        goal(
            "all-reduce ≥ 1 MiB over memcpy",
            AllReduce,
            2,
            1 << 20..=ALL,
            over_memcpy,
            (3.0, 2.0),
            "",
        ),
    ]
}

impl Goal {
    /// The values that the limit applies to, with the sizes.
    fn measured(&self, results: &[Comparison]) -> Vec<(f64, usize)> {
        let fits = |one: &&Comparison| {
            one.operation == self.operation
                && one.ranks == self.ranks
                && self.sizes.contains(&one.bytes)
        };
        results
            .iter()
            .filter(fits)
            .map(|one| ((self.of)(one), one.bytes))
            .filter(|(value, _)| value.is_finite())
            .collect()
    }
}

/// Each limit that was missed, with the sizes.
pub(crate) fn missed(results: &[Comparison]) -> Vec<String> {
    let missed = goals().into_iter().filter_map(|goal| {
        let mut sizes = goal.measured(results);
        sizes.retain(|(value, _)| *value > goal.must);
        let sizes: Vec<_> = sizes
            .into_iter()
            .map(|(value, bytes)| format!("{value:.2}{} at {}", goal.unit, size(bytes)))
            .collect();
        (!sizes.is_empty()).then(|| {
            format!(
                "{}, {} ranks: at most {}{}, but {}",
                goal.what,
                goal.ranks,
                goal.must,
                goal.unit,
                sizes.join(", ")
            )
        })
    });
    missed.collect()
}

fn verdicts(page: &mut String, results: &[Comparison]) {
    *page += "## Against what the emulator is to reach\n\nThe worst size counts, by the median of its rounds, without an interval. \
              The program ends with an error that names each limit that was missed.\n\n\
              | what | ranks | at most | aim | worst | |\n|---|---|---|---|---|---|\n";
    for goal in goals() {
        let measured = goal.measured(results);
        let Some(&(value, bytes)) = measured.iter().max_by(|a, b| a.0.total_cmp(&b.0)) else {
            continue;
        };
        let above = |limit: f64| measured.iter().filter(|(value, _)| *value > limit).count();
        let verdict = match (above(goal.must), above(goal.aim)) {
            (0, 0) if goal.must.is_finite() => "met, and the aim".to_owned(),
            (0, 0) => "aim met".to_owned(),
            (0, some) if goal.must.is_finite() => {
                format!("met; aim missed at {some} of {} sizes", measured.len())
            }
            (0, some) => format!("aim missed at {some} of {} sizes", measured.len()),
            (some, _) => format!("**missed** at {some} of {} sizes", measured.len()),
        };
        let must = if goal.must.is_finite() {
            format!("{}{}", goal.must, goal.unit)
        } else {
            "reported".to_owned()
        };
        let _ = writeln!(
            page,
            "| {} | {} | {must} | {}{} | {value:.2}{} ({}) | {verdict} |",
            goal.what,
            goal.ranks,
            goal.aim,
            goal.unit,
            goal.unit,
            size(bytes)
        );
    }
    *page += "\n";
}

/// The cost of the safe crate.
fn by_crate(page: &mut String, results: &[Comparison]) {
    *page += "## By the safe crate\n\n\
              `Communicator::all_to_all` in the default launch mode, with the flight recorder and the watchdog, in the same \
              processes as the C functions and in turns with them; after 20 the stream is synchronized and the last request waited for, as in the benchmark examples. What it adds \
              does not depend on the size: a reading of the clock, four locked instructions, two questions to the driver about \
              captures and one about the context, and the record. So for messages which the emulator passes in a microsecond the \
              limit is one of time; a ratio would be missed the sooner the emulator gets.\n\n\
              The example is `all_to_all_perf`, started for each of its turns with ranks of its own, and with buffers of the same size: cycles \
              of 20 operations, its default and that of nccl-tests, behind a barrier, each by the time of its slowest rank. The C functions and \
              the safe crate are measured in such cycles as well, and medians of the cycles of a turn are compared: the ratio to the safe crate is what \
              the example itself adds.\n\n\
              | all-to-all | ranks | C functions (µs) | safe crate (µs) | added (µs) | safe crate / C functions | C functions in cycles (µs) | safe crate in cycles (µs) | example (µs) | example / C functions | example / safe crate |\n|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n";
    for row in results.iter().filter(|one| !one.by_crate.is_empty()) {
        let example = match row.by_example.is_empty() {
            true => String::from("| | | | "),
            false => format!(
                "{} | {} | {} | {} | {}",
                spread(Spread::of(&row.in_cycles), 1e6),
                spread(Spread::of(&row.crate_in_cycles), 1e6),
                spread(Spread::of(&row.by_example), 1e6),
                spread(row.example_ratio(), 1.0),
                spread(row.example_over_crate(), 1.0)
            ),
        };
        let _ = writeln!(
            page,
            "| {} | {} | {} | {} | {} | {} | {example} |",
            size(row.bytes),
            row.ranks,
            spread(Spread::of(&row.ours), 1e6),
            spread(Spread::of(&row.by_crate), 1e6),
            spread(row.added(), 1e6),
            spread(row.crate_ratio(), 1.0)
        );
    }
    *page += "\n";
}

/// The cost of a short message when both sides have to meet for it.
fn eager(page: &mut String, results: &[Comparison]) {
    let rows: Vec<_> = results
        .iter()
        .filter(|one| !one.meeting.is_empty())
        .collect();
    if rows.is_empty() {
        return;
    }
    let _ = writeln!(
        page,
        "## Short messages\n\n\
         Below {} a message Open MPI sends *eagerly*: the sender copies it into memory that was set aside for that, and goes \
         on, whether or not anybody ever receives it. In the emulator the two sides meet, and it is copied once, from buffer to \
         buffer, so that a message that nobody receives never looks as if it had been sent: to show that is what people \
         have the emulator for. For the same, Open MPI with `{}` needs longer:\n\n\
         | all-to-all, 2 ranks | emulator (µs) | Open MPI, not eager (µs) | emulator / Open MPI, not eager |\n|--:|--:|--:|--:|",
        size(EAGER),
        options::NOT_EAGER.join(" ")
    );
    for row in rows {
        let _ = writeln!(
            page,
            "| {} | {} | {} | {} |",
            size(row.bytes),
            spread(Spread::of(&row.ours), 1e6),
            spread(Spread::of(&row.meeting), 1e6),
            spread(row.ratio(&row.meeting), 1.0)
        );
    }
    *page += "\n";
}

fn spread(values: Spread, unit: f64) -> String {
    let Spread {
        median,
        least,
        greatest,
    } = values;
    format!(
        "{} ({}–{})",
        number(median * unit),
        number(least * unit),
        number(greatest * unit)
    )
}

fn table(page: &mut String, operation: Operation, ranks: usize, rows: &[&Comparison]) {
    if rows.is_empty() {
        return;
    }
    let name = match operation {
        Operation::SendRecv => "Send and receive in a group",
        Operation::AllToAll | Operation::AllToAllByCrate => "All-to-all",
        Operation::AllReduce => "All-reduce, sum of floats",
        Operation::Memcpy => "memcpy",
    };
    let _ = writeln!(
        page,
        "\n## {name}, {ranks} ranks\n\n\
         | size | emulator (µs) | Open MPI (µs) | memcpy (µs) | emulator / Open MPI | emulator / memcpy |\n\
         |--:|--:|--:|--:|--:|--:|"
    );
    for row in rows {
        let time = |seconds: &[f64]| spread(Spread::of(seconds), 1e6);
        let ratio = |others: &[f64]| spread(row.ratio(others), 1.0);
        let _ = writeln!(
            page,
            "| {} | {} | {} | {} | {} | {} |",
            size(row.bytes),
            time(&row.ours),
            time(&row.mpi),
            time(&row.memcpy),
            ratio(&row.mpi),
            ratio(&row.memcpy)
        );
    }
}

/// Three digits, if the value has as many places.
fn number(value: f64) -> String {
    match value {
        100.0.. => format!("{value:.0}"),
        10.0..100.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// A size in bytes.
fn size(bytes: usize) -> String {
    match bytes {
        0x10_0000.. => format!("{} MiB", bytes >> 20),
        0x400.. => format!("{} KiB", bytes >> 10),
        _ => format!("{bytes} B"),
    }
}
