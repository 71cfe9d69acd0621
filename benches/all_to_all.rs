//! The all-to-all family on the emulator, for monitoring from day to day: criterion keeps its last results and reports
//! changes.
//!
//! ```text
//! cargo bench -p nccl-benches --bench all_to_all                   all of it, about two minutes
//! cargo bench -p nccl-benches --bench all_to_all -- two-level      what has this in its name
//! ```
//!
//! Four ranks, threads of this process, on two nodes of two. Each iteration enqueues one exchange on every rank; 20 are
//! enqueued before the streams are waited for, as in nccl-tests. The figures compare builds on one machine and say
//! nothing about GPUs; `against_mpi` and `scale` measure the published figures.

use std::error::Error;
use std::num::NonZeroUsize;
use std::process::ExitCode;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput};
use nccl::all_to_all::{AllToAll, AllToAllAlgorithm as By, AllToAllBuilder, Parts};
use nccl::cudarc::driver::CudaContext;
use nccl::moe::{DispatchWay, ExpertParallel};
use nccl::{Communicator, DataType, Request, World};

type Outcome<T = ()> = Result<T, Box<dyn Error + Send + Sync>>;

const RANKS: usize = 4;
const RANKS_PER_NODE: usize = 2;
/// Exchanges that are enqueued before the stream is waited for.
const BATCH: u64 = 20;
/// Bytes for each pair of ranks.
const SIZES: [usize; 3] = [64, 4 << 10, 64 << 10];

/// A measured case: in the same order on all ranks.
struct Case<'c> {
    name: String,
    /// The parameter that is part of the name.
    bytes: usize,
    /// What a rank sends in all, for the throughput.
    total: usize,
    enqueue: Box<dyn FnMut() -> nccl::Result<Request> + 'c>,
}

/// An order to a rank: the case, and the number of repetitions.
type Order = (usize, u64);

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("all_to_all: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Outcome {
    nccl_emulator::install_unless_gpu()?;
    if CudaContext::device_count()? < RANKS as i32 {
        return Err(format!("{RANKS} devices are needed; NCCL_EMULATOR=1 emulates them").into());
    }
    let mut worlds = World::threads(RANKS).into_iter();
    let first = worlds.next().ok_or("no world")?;
    let (done, finished) = mpsc::channel();
    std::thread::scope(|scope| {
        let mut orders = Vec::new();
        for world in worlds {
            let (order, given) = mpsc::channel();
            orders.push(order);
            let done = done.clone();
            scope.spawn(move || follow(&world, &given, &done));
        }
        lead(&first, orders, &finished)
    })
}

fn start(world: &World) -> Outcome<Communicator> {
    let stream = CudaContext::new(world.local_rank())?.new_stream()?;
    Ok(world.communicator("bench").stream(&stream).build()?)
}

/// Runs every rank but the first.
fn follow(world: &World, orders: &Receiver<Order>, done: &Sender<Result<(), String>>) {
    let all = || -> Outcome {
        let comm = start(world)?;
        let mut cases = cases(&comm)?;
        for (case, count) in orders {
            repeat(&mut cases[case], count)?;
            done.send(Ok(()))?;
        }
        Ok(())
    };
    if let Err(error) = all() {
        let _ = done.send(Err(error.to_string()));
    }
}

/// Runs the first rank, which gets its orders from criterion.
fn lead(
    world: &World,
    orders: Vec<Sender<Order>>,
    finished: &Receiver<Result<(), String>>,
) -> Outcome {
    let comm = start(world)?;
    let mut cases = cases(&comm)?;
    let mut criterion = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .configure_from_args();
    let mut failed = None;
    for (number, case) in cases.iter_mut().enumerate() {
        let mut group = criterion.benchmark_group(&case.name);
        group.throughput(Throughput::Bytes(case.total as u64));
        group.bench_function(BenchmarkId::from_parameter(case.bytes), |bencher| {
            bencher.iter_custom(|count| {
                let begun = Instant::now();
                if failed.is_none() {
                    failed = together(case, number, count, &orders, finished).err();
                }
                begun.elapsed()
            });
        });
        group.finish();
        if let Some(error) = failed {
            return Err(error);
        }
    }
    criterion.final_summary();
    Ok(())
}

/// Runs one case on all ranks, `count` times.
fn together(
    case: &mut Case<'_>,
    number: usize,
    count: u64,
    orders: &[Sender<Order>],
    finished: &Receiver<Result<(), String>>,
) -> Outcome {
    for order in orders {
        order.send((number, count))?;
    }
    repeat(case, count)?;
    for _ in orders {
        finished.recv()??;
    }
    Ok(())
}

fn repeat(case: &mut Case<'_>, count: u64) -> nccl::Result<()> {
    for at in 1..=count {
        let request = (case.enqueue)()?;
        if at % BATCH == 0 || at == count {
            request.wait()?;
        }
    }
    Ok(())
}

fn number(of: usize) -> NonZeroUsize {
    NonZeroUsize::new(of).unwrap_or(NonZeroUsize::MIN)
}

fn cases(comm: &Communicator) -> Outcome<Vec<Case<'_>>> {
    let mut cases = Vec::new();
    let algorithms = [
        By::Native,
        By::Grouped,
        By::Chunked { pieces: number(4) },
        By::Pairwise { width: number(1) },
        By::TwoLevel,
    ];
    for bytes in SIZES {
        for by in algorithms {
            let plan = planned(comm)
                .per_peer(DataType::UInt8, bytes)
                .with(|plan| plan.algorithm = by);
            cases.push(exchange(comm, by.to_string(), bytes, plan)?);
        }
        // Half of the bytes to even ranks, one and a half times to odd ones.
        let to = |rank: usize| bytes / 2 + rank % 2 * bytes;
        let sent: Vec<usize> = (0..RANKS).map(to).collect();
        let received = vec![to(comm.rank()); RANKS];
        for by in [By::Grouped, By::TwoLevel] {
            let parts = (Parts::from(&sent), Parts::from(&received));
            let plan = planned(comm)
                .parts(DataType::UInt8, parts.0, parts.1)
                .with(|plan| plan.algorithm = by);
            cases.push(exchange(comm, format!("{by}, unequal parts"), bytes, plan)?);
        }
        cases.push(in_place(comm, bytes)?);
        cases.push(captured(comm, bytes)?);
    }
    for way in [DispatchWay::Rows, DispatchWay::AllGather] {
        for captured in [false, true] {
            cases.push(experts(comm, way, captured)?);
        }
    }
    Ok(cases)
}

fn planned(comm: &Communicator) -> AllToAllBuilder<'_> {
    AllToAll::plan(comm).with(|plan| plan.ranks_per_node = Some(RANKS_PER_NODE))
}

fn exchange<'c>(
    comm: &'c Communicator,
    name: String,
    bytes: usize,
    plan: AllToAllBuilder<'_>,
) -> Outcome<Case<'c>> {
    let mut plan = plan.build()?;
    // Enough for unequal parts as well.
    let memory = || comm.stream().alloc_zeros::<u8>(2 * RANKS * bytes);
    let (x, mut y) = (memory()?, memory()?);
    Ok(Case {
        name,
        bytes,
        total: RANKS * bytes,
        enqueue: Box::new(move || plan.enqueue(&x, &mut y)),
    })
}

fn in_place(comm: &Communicator, bytes: usize) -> Outcome<Case<'_>> {
    let mut plan = planned(comm)
        .per_peer(DataType::UInt8, bytes)
        .with(|plan| plan.in_place = true)
        .build()?;
    let mut y = comm.stream().alloc_zeros::<u8>(RANKS * bytes)?;
    Ok(Case {
        name: "in place".to_owned(),
        bytes,
        total: RANKS * bytes,
        enqueue: Box::new(move || plan.enqueue_in_place(&mut y)),
    })
}

fn captured(comm: &Communicator, bytes: usize) -> Outcome<Case<'_>> {
    let plan = planned(comm)
        .per_peer(DataType::UInt8, bytes)
        .with(|plan| plan.algorithm = By::Grouped);
    let memory = || comm.stream().alloc_zeros::<u8>(RANKS * bytes);
    let mut plan = plan.build()?.capture(memory()?, memory()?)?;
    Ok(Case {
        name: "grouped, as a graph".to_owned(),
        bytes,
        total: RANKS * bytes,
        enqueue: Box::new(move || plan.launch()),
    })
}

/// Route, dispatch and combine of 64 tokens of 512 bytes, each for two of 8 experts.
fn experts(comm: &Communicator, way: DispatchWay, captured: bool) -> Outcome<Case<'_>> {
    let (tokens, experts, top_k, width) = (64, 8, 2, 128);
    let mut parallel = ExpertParallel::builder(comm)
        .with(|ep| {
            ep.experts = experts;
            ep.top_k = top_k;
            ep.max_tokens = tokens;
            ep.way = way;
            ep.max_row_bytes = width * size_of::<f32>();
        })
        .build()?;
    let mut routing = parallel.routing()?;
    let stream = comm.stream();
    let choice = |at: usize| ((at * 5 + at / top_k + comm.rank()) % experts) as i32;
    let chosen: Vec<i32> = (0..tokens * top_k).map(choice).collect();
    let chosen = stream.clone_htod(&chosen)?;
    let weights = stream.clone_htod(&vec![0.5f32; tokens * top_k])?;
    let x = stream.clone_htod(&vec![1.0f32; tokens * width])?;
    let mut y = stream.alloc_zeros::<f32>(experts * parallel.capacity() * width)?;
    let mut out = stream.alloc_zeros::<f32>(tokens * width)?;
    let (by, bytes) = (format!("{way:?}"), tokens * width * size_of::<f32>());
    if captured {
        let buffers = (routing, chosen, weights, x, y, out);
        let mut plan = comm.capture(
            buffers,
            |capture, (mut routing, chosen, weights, x, mut y, out)| {
                let mut experts = parallel.capture(capture)?;
                experts.route(&chosen, &mut routing)?;
                experts.dispatch(&routing, &x, &mut y)?;
                experts.next_part();
                experts.combine(&routing, &y, &weights, out)
            },
        )?;
        return Ok(Case {
            name: format!("route, dispatch ({by}) and combine, as two graphs"),
            bytes,
            total: bytes,
            enqueue: Box::new(move || plan.launch()),
        });
    }
    Ok(Case {
        name: format!("route, dispatch ({by}) and combine"),
        bytes,
        total: bytes,
        enqueue: Box::new(move || {
            parallel.route(&chosen, &mut routing)?;
            parallel.dispatch(&routing, &x, &mut y)?;
            parallel.combine(&routing, &y, &weights, &mut out)
        }),
    })
}
