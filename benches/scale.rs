//! Measures the emulator with many ranks: 2 to 256, as threads of one process, against a model.
//!
//! ```text
//! cargo bench -p nccl-benches --bench scale                              all of it; writes docs/results/scale.md
//! cargo bench -p nccl-benches --bench scale -- --output DIRECTORY --ranks 256 --rounds 7
//! ```
//!
//! Each number of ranks runs in a process of its own, to measure its memory. In it, every thread creates a communicator
//! of the world a number of times; then, for each size, all-to-alls are enqueued and waited for, in turns behind a
//! barrier of the threads. A turn lasts from when its first rank begins until its last one is done.
//!
//! The model: `T = 2 barrier(n) + ceil(n/c) n m/B` for n ranks on c cores and m bytes per pair, where
//! `barrier(n) = ceil(n/c) barrier(2)`, and B is the speed at which a rank of two moves as many bytes, n m. Both
//! constants together are what two ranks need for n m bytes each, measured in the same run.

#[path = "against_mpi/root.rs"]
mod root;

use std::error::Error;
use std::fmt::Write as _;
use std::process::{Command, ExitCode};
use std::sync::{Arc, Barrier, Mutex};
use std::time::Instant;

use nccl::World;
use nccl::cudarc::driver::CudaContext;
use nccl_tools::build_info::BUILD;
use nccl_tools::spawn::threads;
use nccl_tools::statistics::median;
use nccl_tools::{machine, perf};
use root::root;

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

/// The numbers of ranks and rounds that a process is to measure.
const ROLE: &str = "NCCL_SCALE_ROLE";
/// Bytes for each pair of ranks.
const SIZES: [usize; 3] = [64, 4 << 10, 64 << 10];
/// Operations that are enqueued before the stream is waited for: the default of nccl-tests.
const BATCH: usize = 20;
/// The duration of a turn in seconds.
const TURN: f64 = 0.005;

/// The bytes per pair that are measured with `ranks` ranks: with two, what the model needs for all.
fn sizes(ranks: usize) -> Vec<usize> {
    match ranks {
        2 => (6..=23).map(|power| 1 << power).collect(),
        _ => SIZES.to_vec(),
    }
}

fn main() -> ExitCode {
    let outcome = match std::env::var(ROLE) {
        Ok(role) => measure(&role),
        Err(_) => drive(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("scale: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The least, the median and the greatest of some turns, in seconds.
#[derive(Clone, Copy, Debug)]
struct Times {
    least: f64,
    median: f64,
    greatest: f64,
}

impl Times {
    fn of(seconds: &[f64]) -> Self {
        Self {
            least: seconds.iter().copied().fold(f64::INFINITY, f64::min),
            median: median(seconds).unwrap_or(f64::NAN),
            greatest: seconds.iter().copied().fold(0.0, f64::max),
        }
    }
}

// The code of one number of ranks.

/// The begin and end of a turn on each rank.
struct Turns {
    barrier: Barrier,
    begun: Instant,
    spans: Mutex<Vec<(f64, f64)>>,
}

impl Turns {
    /// Runs `body` on every rank, and returns its duration to all of them.
    fn time(&self, body: impl FnOnce() -> Outcome) -> Outcome<f64> {
        self.barrier.wait();
        let begun = self.begun.elapsed().as_secs_f64();
        let outcome = body();
        let ended = self.begun.elapsed().as_secs_f64();
        self.spans.lock().expect("no panic").push((begun, ended));
        self.barrier.wait();
        let span = {
            let spans = self.spans.lock().expect("no panic");
            let first = spans
                .iter()
                .map(|span| span.0)
                .fold(f64::INFINITY, f64::min);
            spans.iter().map(|span| span.1).fold(0.0, f64::max) - first
        };
        if self.barrier.wait().is_leader() {
            self.spans.lock().expect("no panic").clear();
        }
        outcome.map(|()| span)
    }
}

/// Prints the measurements: a name, and numbers.
fn measure(role: &str) -> Outcome {
    let (ranks, rounds) = role.split_once(' ').ok_or("two numbers are needed")?;
    let (ranks, rounds): (usize, usize) = (ranks.parse()?, rounds.parse()?);
    perf::install(ranks).map_err(|failure| failure.to_string())?;
    let turns = Arc::new(Turns {
        barrier: Barrier::new(ranks),
        begun: Instant::now(),
        spans: Mutex::default(),
    });
    let outcome = threads::run(World::threads(ranks), None, move |rank, world| {
        be_a_rank(rank, &world, rounds, &turns).map_err(|error| error.to_string())
    });
    outcome.map_err(|failure| failure.to_string().into())
}

fn be_a_rank(rank: usize, world: &World, rounds: usize, turns: &Turns) -> Outcome {
    let say = |name: &str, times: &[f64]| {
        if rank == 0 {
            let Times {
                least,
                median,
                greatest,
            } = Times::of(times);
            println!("{name} {least:e} {median:e} {greatest:e}");
        }
    };
    machine::bind(rank)?;
    let stream = CudaContext::new(world.local_rank())?.new_stream()?;
    turns.barrier.wait();
    let before = resident()?;
    let mut inits = Vec::new();
    let mut comm = None;
    for round in 0..=rounds {
        let mut made = None;
        let seconds = turns.time(|| {
            made = Some(
                world
                    .communicator(&format!("round {round}"))
                    .stream(&stream)
                    .build()?,
            );
            Ok(())
        })?;
        // The first init also finds the library; the memory is measured after it.
        if round > 0 {
            inits.push(seconds);
        } else {
            let made = made.as_ref().ok_or("no communicator")?;
            let x = stream.alloc_zeros::<u8>(world.size() * SIZES[0])?;
            let mut y = stream.alloc_zeros::<u8>(world.size() * SIZES[0])?;
            made.all_to_all(&x, &mut y)?.wait()?;
            turns.barrier.wait();
            if rank == 0 {
                // First, as the text of the other file needs memory itself.
                let each = (resident()? - before) / world.size() as f64;
                let (size, used) = segments()?;
                println!("memory {each:e} {size:e} {used:e}");
            }
            // The other ranks free nothing before that.
            turns.barrier.wait();
        }
        if round < rounds {
            made.ok_or("no communicator")?.finalize()?;
        } else {
            comm = made;
        }
    }
    let comm = comm.ok_or("no communicator")?;
    say("init", &inits);
    for bytes in sizes(world.size()) {
        turns.barrier.wait();
        let room = available()?;
        turns.barrier.wait();
        let all = 2 * world.size() * world.size() * bytes;
        if all > room / 2 {
            if rank == 0 {
                println!("skipped {bytes} {all}");
            }
            continue;
        }
        let x = stream.alloc_zeros::<u8>(world.size() * bytes)?;
        let mut y = stream.alloc_zeros::<u8>(world.size() * bytes)?;
        let mut run = |count: usize| {
            turns.time(|| {
                for turn in 0..count {
                    drop(comm.all_to_all(&x, &mut y)?);
                    if (turn + 1) % BATCH == 0 {
                        stream.synchronize()?;
                    }
                }
                Ok(stream.synchronize()?)
            })
        };
        // Establishes connections, and touches every page.
        run(1)?;
        // The same on all ranks, as are the times.
        let count = ((TURN / run(2)? * 2.0) as usize).clamp(1, 2000);
        let times = (0..rounds).map(|_| Ok(run(count)? / count as f64));
        let times: Outcome<Vec<f64>> = times.collect();
        say(&format!("all-to-all-{bytes}"), &times?);
    }
    comm.finalize()?;
    Ok(())
}

/// A line of a file of the kernel, in bytes.
fn kilobytes(path: &str, name: &str) -> Outcome<f64> {
    let text = std::fs::read_to_string(path)?;
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let number = line.and_then(|rest| rest.split_whitespace().next());
    Ok(number
        .ok_or_else(|| format!("{path} has no {name}"))?
        .parse::<f64>()?
        * 1024.0)
}

/// Resident memory of this process.
fn resident() -> Outcome<f64> {
    kilobytes("/proc/self/status", "VmRSS:")
}

fn available() -> Outcome<usize> {
    Ok(kilobytes("/proc/meminfo", "MemAvailable:")? as usize)
}

/// The size of the segments of communicators, and their resident part.
fn segments() -> Outcome<(f64, f64)> {
    let maps = std::fs::read_to_string("/proc/self/smaps")?;
    let (mut inside, mut size, mut resident) = (false, 0.0, 0.0);
    for line in maps.lines() {
        let number = || {
            line.split_whitespace()
                .nth(1)
                .and_then(|word| word.parse::<f64>().ok())
                .unwrap_or(0.0)
        };
        if !line.split(' ').next().unwrap_or("").ends_with(':') {
            inside = line.contains("nccl-emulator:communicator");
        } else if inside && line.starts_with("Size:") {
            size += number() * 1024.0;
        } else if inside && line.starts_with("Rss:") {
            resident += number() * 1024.0;
        }
    }
    Ok((size, resident))
}

// The code for all numbers of ranks.

struct Row {
    ranks: usize,
    init: Times,
    /// The memory of a rank; the size of the segment, and its resident part.
    memory: [f64; 3],
    /// By bytes per pair; sizes that do not fit into memory are missing.
    all_to_all: Vec<(usize, Times)>,
}

impl Row {
    /// The times of an all-to-all of `bytes` per pair.
    fn at(&self, bytes: usize) -> Option<Times> {
        let found = self.all_to_all.iter().find(|(size, _)| *size == bytes);
        found.map(|(_, times)| *times)
    }
}

fn drive() -> Outcome {
    let (mut output, mut most, mut rounds) = (root().join("docs/results"), 256, 15);
    let arguments: Vec<String> = std::env::args()
        .skip(1)
        .filter(|argument| argument != "--bench")
        .collect();
    let mut words = arguments.iter();
    while let Some(option) = words.next() {
        let value = words
            .next()
            .ok_or_else(|| format!("{option} needs a value"))?;
        match option.as_str() {
            "--output" => output = root().join(value),
            "--ranks" => most = value.parse()?,
            "--rounds" => rounds = value.parse()?,
            _ => return Err(format!("{option}: there are --output, --ranks and --rounds").into()),
        }
    }
    if most < 2 || rounds == 0 {
        return Err("--ranks: at least 2 are needed; --rounds: at least 1".into());
    }
    let before = machine::load();
    let mut rows = Vec::new();
    for ranks in std::iter::successors(Some(2usize), |ranks| Some(2 * ranks))
        .take_while(|&ranks| ranks <= most)
    {
        let row = row(ranks, rounds)?;
        eprintln!("{ranks} ranks: init {:.2} ms", row.init.median * 1e3);
        rows.push(row);
    }
    std::fs::create_dir_all(&output)?;
    let path = output.join("scale.md");
    std::fs::write(&path, page(&arguments.join(" "), rounds, &before, &rows))?;
    eprintln!("wrote {}", path.display());
    Ok(())
}

fn row(ranks: usize, rounds: usize) -> Outcome<Row> {
    let mut command = Command::new(std::env::current_exe()?);
    let output = command
        .env(ROLE, format!("{ranks} {rounds}"))
        .stderr(std::process::Stdio::inherit())
        .output()?;
    if !output.status.success() {
        return Err(format!("{ranks} ranks: {}", output.status).into());
    }
    let text = String::from_utf8(output.stdout)?;
    let find = |name: &str| -> Outcome<Option<[f64; 3]>> {
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        let Some(line) = line else { return Ok(None) };
        let numbers: Result<Vec<f64>, _> = line.split(' ').map(str::parse).collect();
        Ok(Some(
            numbers?
                .try_into()
                .map_err(|_| format!("{name}: not three numbers"))?,
        ))
    };
    let times = |[least, median, greatest]: [f64; 3]| Times {
        least,
        median,
        greatest,
    };
    let mut all_to_all = Vec::new();
    for bytes in sizes(ranks) {
        if let Some(found) = find(&format!("all-to-all-{bytes}"))? {
            all_to_all.push((bytes, times(found)));
        }
    }
    Ok(Row {
        ranks,
        init: times(find("init")?.ok_or("no init")?),
        memory: find("memory")?.ok_or("no memory")?,
        all_to_all,
    })
}

fn page(arguments: &str, rounds: usize, before: &str, rows: &[Row]) -> String {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let shares = |ranks: usize| ranks.div_ceil(cores) as f64;
    let arguments = if arguments.is_empty() {
        String::new()
    } else {
        format!(" -- {arguments}")
    };
    let mut page = format!(
        "# Many ranks on the emulator\n\nWritten by `cargo bench -p nccl-benches --bench scale{arguments}`, {}. No GPU: these figures \
         say nothing about one.\n\n- {}\n- {}\n- load (1, 5 and 15 \
         minutes) before: {before}; after: {}\n\nRanks are threads of one process, rank i bound to core i modulo {cores}, and use the crate \
         `nccl`. Times are from when the first rank begins, behind a barrier, until the last one is done: medians of \
         {rounds} turns, in brackets the least and the greatest. An init is `communicator(…).build()` with the check of \
         what must agree. All-to-alls are enqueued 20 at a time before the stream is waited for, as many in a turn as fit \
         into 5 ms, and at most 2000.\n",
        nccl_tools::clock::now(),
        BUILD.line(),
        machine::line(),
        machine::load()
    );
    let Some(two) = rows.first() else { return page };
    let _ = writeln!(
        page,
        "\nColumns in *italics* are a model, not measured: n ranks on c = {cores} cores take ⌈n/c⌉ times what two ranks take. For \
         an all-to-all that is T = 2 barrier(n) + ⌈n/c⌉ n m/B, with barrier(n) = ⌈n/c⌉ barrier(2) and B the speed at which a \
         rank of two moves as many bytes, n m, in one message; both constants together are what two ranks needed in this run \
         for n m bytes each. The model knows no cost of a message, of which there are n² instead of 4: \"per message\" is the \
         measured time times c over n², and that cost while messages are small.\n"
    );
    init_table(&mut page, rows, shares);
    for bytes in SIZES {
        let _ = writeln!(
            page,
            "\n## All-to-all, {bytes} B per pair\n\n| ranks | time (µs) | *model (µs)* | time / *model* | per message (µs) |\n\
             |--:|--:|--:|--:|--:|"
        );
        for row in rows {
            let (ranks, share) = (row.ranks, shares(row.ranks));
            let Some(alike) = two.at(ranks * bytes / 2) else {
                continue;
            };
            let model = alike.median * share / shares(2);
            let Some(time) = row.at(bytes) else {
                let gigabytes = (2 * ranks * ranks * bytes) >> 30;
                let _ = writeln!(
                    page,
                    "| {ranks} | not measured: {gigabytes} GiB of buffers | *{:.0}* | | |",
                    model * 1e6
                );
                continue;
            };
            let message = time.median * cores as f64 / (ranks * ranks) as f64;
            let _ = writeln!(
                page,
                "| {ranks} | {:.1} ({:.1}–{:.1}) | *{:.1}* | {:.2} | {:.2} |",
                time.median * 1e6,
                time.least * 1e6,
                time.greatest * 1e6,
                model * 1e6,
                time.median / model,
                message * 1e6
            );
        }
    }
    page
}

fn init_table(page: &mut String, rows: &[Row], shares: impl Fn(usize) -> f64) {
    *page += "## Init, and memory\n\nMemory per rank is by how much the process grew (VmRSS) from when every rank had a device \
              and a stream until the first all-to-all of 64 B of the first communicator was done, over the number of ranks; \
              with few ranks, most of it is the program's own. The segment is what the ranks of a communicator share, once for all; its second number is \
              what of it is in memory.\n\n\
              | ranks | init (ms) | *model (ms)* | time / *model* | memory per rank (KiB) | segment (KiB) |\n\
              |--:|--:|--:|--:|--:|--:|\n";
    let Some(two) = rows.first() else { return };
    for row in rows {
        let model = two.init.median * shares(row.ranks) / shares(2);
        let _ = writeln!(
            page,
            "| {} | {:.2} ({:.2}–{:.2}) | *{:.2}* | {:.2} | {:.0} | {:.0}, {:.0} |",
            row.ranks,
            row.init.median * 1e3,
            row.init.least * 1e3,
            row.init.greatest * 1e3,
            model * 1e3,
            row.init.median / model,
            row.memory[0] / 1024.0,
            row.memory[1] / 1024.0,
            row.memory[2] / 1024.0
        );
    }
}
