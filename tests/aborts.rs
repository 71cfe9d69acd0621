//! Many aborts at random moments: each ends all ranks soon, and leaks nothing.
//!
//! 400 for each arrangement unless `NCCL_TEST_ABORTS` says otherwise; a thousand are
//! `NCCL_TEST_ABORTS=1000 cargo test -p nccl-tests --test aborts -- --nocapture`.
//!
//! The test counts descriptors, threads, and bytes in use on the heap, and finds even a kibibyte that every abort
//! leaks. Other memory of the process (including that of the emulator's devices) is checked as a whole.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nccl::cudarc::driver::CudaStream;
use nccl::{AbortSignal, Communicator, ReduceOp, World};
use support::held::{Counted, growth, heap, held};
use support::{FIGURE, Ranks};

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

#[global_allocator]
static ALLOCATOR: Counted = Counted;

const RANKS: usize = 3;
/// Timeout of operations: none takes as long, unless its abort fails.
const TIMEOUT: Duration = Duration::from_secs(40);
/// Aborts after which every pool is full, and a connection keeps as many faults as it ever does.
const WARM: u64 = 200;
/// The most bytes of a device that may be in use after that.
const DEVICE: usize = 1 << 20;
/// The most bytes by which the heap may grow with each abort, for each rank of a process, as the median of many
/// samples: the heap varies by 20 to 60 KB from one abort to the next, so that it takes hundreds. Not 0: an ended init
/// leaves NCCL's root behind, and reports about communicators that do not exist yet are kept, the last 256.
const GROWTH: f64 = 512.0;
/// Aborts between two samples.
const STRIDE: u64 = 5;

fn turns() -> u64 {
    std::env::var("NCCL_TEST_ABORTS")
        .ok()
        .and_then(|turns| turns.parse().ok())
        .unwrap_or(if support::on_nvidias() { 20 } else { 400 })
}

/// On NVIDIA's library an abort takes half a second, too slow for enough samples of the heap.
fn warm() -> u64 {
    if support::on_nvidias() { 10 } else { WARM }
}

/// How one rank ends a communicator.
#[derive(Clone, Copy, Debug)]
enum Way {
    Signal,
    Abort,
    /// One rank does not enter the others' operations, until one of them times out.
    StayAway,
}

/// What the ranks do when the communicator is ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Operations,
    /// All ranks finalize.
    Finalize,
    /// All ranks drop the communicator, with operations in progress.
    Drop,
}

/// One operation, of one of several kinds.
fn operation(
    comm: &Communicator,
    stream: &Arc<CudaStream>,
    random: &mut fastrand::Rng,
) -> nccl::Result<()> {
    let elements = 1 << random.usize(0..16);
    let memory = || stream.alloc_zeros::<f32>(elements).expect("memory");
    match random.u8(..7) {
        0 => {
            let part = comm.split("part", Some(comm.rank() as u32 % 2), 0)?;
            let mut y = memory();
            let part = part.expect("a colour was given");
            part.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()
        }
        1 => {
            let mut plan = comm.capture(memory(), |capture, y| {
                capture.group(|group| group.all_reduce_in_place(y, ReduceOp::Max))
            })?;
            plan.launch()?;
            plan.launch()?.wait()
        }
        2 => {
            let (x, mut y) = (memory(), memory());
            let (rank, size) = (comm.rank(), comm.world_size());
            comm.group(|group| {
                group.isend(&x, (rank + 1) % size)?;
                group.irecv(&mut y, (rank + size - 1) % size)
            })?
            .wait()
        }
        // Not waited for: the next operation finds the error.
        3 => {
            let mut y = comm.buffer::<f32>(elements)?;
            comm.all_reduce_in_place(&mut y, ReduceOp::Sum).map(drop)
        }
        4 => {
            let mut y = memory();
            let done = comm.all_reduce_in_place(&mut y, ReduceOp::Min)?;
            for _ in 0..100 {
                if done.is_complete()? {
                    return Ok(());
                }
                std::thread::yield_now();
            }
            done.wait()
        }
        _ => {
            let mut y = memory();
            comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()
        }
    }
}

/// Creates one communicator and ends it at a random moment.
fn life(world: &World, turn: u64) -> Outcome {
    // The same on all ranks.
    let mut random = fastrand::Rng::with_seed(turn);
    let ends = random.usize(..world.size()) == world.rank();
    let way = [Way::Signal, Way::Abort, Way::StayAway][random.usize(..3)];
    let after = Duration::from_micros(random.u64(..12_000));
    let work = match random.u8(..8) {
        0 => Work::Finalize,
        1 => Work::Drop,
        _ => Work::Operations,
    };
    let operations = random.usize(..4);
    let stream = support::device(world)?.new_stream()?;
    let stop = AbortSignal::new();
    let done = AtomicBool::new(false);
    let begun = Instant::now();
    let pause = || {
        while begun.elapsed() < after && !done.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_micros(100));
        }
    };
    let ended = std::thread::scope(|scope| {
        let comm = world
            .communicator("brief")
            .stream(&stream)
            .with(|comm| {
                comm.timeouts.operation = TIMEOUT;
                comm.timeouts.finalize = Duration::from_millis(200);
                comm.abort_signals.push(stop.clone());
            })
            .build()?;
        if let (true, Way::Signal) = (ends, way) {
            scope.spawn(|| {
                pause();
                stop.abort();
            });
        }
        if let (true, Way::Abort) = (ends, way) {
            let (comm, pause) = (comm.clone(), &pause);
            scope.spawn(move || {
                pause();
                let _ = comm.abort("it is time");
            });
        }
        for number in 0.. {
            if work != Work::Operations && number == operations {
                let ended = match work {
                    // The finalize may be the first call.
                    Work::Finalize => comm.finalize(),
                    _ => {
                        drop(comm);
                        Ok(())
                    }
                };
                done.store(true, Ordering::Release);
                return Ok(ended);
            }
            if let (true, Way::StayAway) = (ends && begun.elapsed() > after, way) {
                // Ranks that finalize or drop the communicator do not depend on this one.
                let patience = match work {
                    Work::Operations => TIMEOUT,
                    Work::Finalize | Work::Drop => Duration::from_millis(300),
                };
                while comm.fault().is_none() && begun.elapsed() < patience {
                    std::thread::sleep(Duration::from_micros(200));
                }
            }
            let impatient = match way {
                // Any rank may time out.
                Way::StayAway => comm.within(Duration::from_millis(50)),
                Way::Signal | Way::Abort => comm.clone(),
            };
            if let Err(error) = operation(&impatient, &stream, &mut random) {
                done.store(true, Ordering::Release);
                // Not every error ends the communicator: a capture that another rank did not enter has issued nothing.
                if comm.fault().is_none() {
                    let _ = comm.abort("one of its operations failed");
                }
                return Ok(Err(error));
            }
        }
        unreachable!("it ends before")
    });
    done.store(true, Ordering::Release);
    // The outer error: the communicator was ended during its creation.
    let ended = ended.and_then(|ended: nccl::Result<()>| ended);
    let took = begun.elapsed();
    if took > TIMEOUT / 2 || (ended.is_ok() && work == Work::Operations) {
        return Err(format!("turn {turn}, {way:?}, {work:?}: {took:?} until {ended:?}").into());
    }
    Ok(())
}

fn lives(world: &World, ranks_here: usize) -> Outcome {
    let context = support::device(world)?;
    let device = || context.mem_get_info().map(|(free, total)| total - free);
    let mut before = None;
    let mut samples = Vec::new();
    for turn in 0..warm() + turns() {
        life(world, turn)?;
        world.barrier("next")?;
        if turn >= warm() && turn.is_multiple_of(STRIDE) {
            // The last ends continue in the background for a moment.
            std::thread::sleep(Duration::from_millis(50));
            samples.push((turn as f64, heap() as f64));
            world.barrier("looked")?;
        }
        if turn + 1 == warm() {
            std::thread::sleep(Duration::from_millis(500));
            before = Some((held()?, device()?));
        }
    }
    let (before, device_before) = before.ok_or("never warm")?;
    // The last ends continue in the background, on a busy machine for a while.
    let ended = Instant::now();
    let (after, device_after) = loop {
        std::thread::sleep(Duration::from_millis(500));
        let (after, device_after) = (held()?, device()?);
        let is_over = !after.is_more_than(&before) && device_after <= device_before + DEVICE;
        if is_over || ended.elapsed() > TIMEOUT / 2 {
            break (after, device_after);
        }
    };
    // Pools and caches are full after the first third.
    let growth = growth(&samples[samples.len() / 3..]).ok_or("too few aborts")?;
    // A call that NCCL is in when it is ended returns soon, and is freed. A loaded machine may take longer.
    let leaked = nccl::stats().leaked_communicators;
    println!(
        "{FIGURE}rank {}: {before:?} became {after:?}; the heap grows by {growth:.0} bytes with each abort; \
         {device_before} bytes of the device became {device_after}; {leaked} communicators were leaked",
        world.rank()
    );
    if leaked > turns() / 100 {
        return Err(format!("{leaked} communicators were leaked").into());
    }
    let device_grows = device_after > device_before + DEVICE;
    let heap_grows = growth > GROWTH * ranks_here as f64 && !support::on_nvidias();
    if heap_grows || device_grows || after.is_more_than(&before) {
        let turns = turns();
        return Err(
            format!(
                "{turns} aborts: {before:?} became {after:?}, {growth} bytes each; {device_before} bytes of the \
                 device became {device_after}"
            )
            .into(),
        );
    }
    Ok(())
}

/// Longer than idle threads live: those of the reaper and of the emulator's workers.
const IDLE: Duration = Duration::from_secs(4);

/// Returns when idle threads have ended. The leak sanitizer reports memory of a thread that ends during its scan.
fn quiet_at_the_end(world: World, ranks_here: usize) -> Outcome {
    let outcome = lives(&world, ranks_here);
    drop(world);
    std::thread::sleep(IDLE);
    outcome
}

#[test]
fn aborts_at_random_moments_leave_nothing_between_threads() {
    if !support::needs_devices(RANKS) {
        return;
    }
    Ranks::new(RANKS)
        .deadline(Duration::from_secs(120 + turns()))
        .threads(|world| quiet_at_the_end(world, RANKS));
}

#[test]
fn aborts_at_random_moments_leave_nothing_between_processes() {
    Ranks::new(RANKS)
        .deadline(Duration::from_secs(120 + turns()))
        // Some hundred aborts, each of which would take half a second.
        .variable("NCCL_EMULATOR_PROXY_POLL_MS", "0")
        .processes(|world| quiet_at_the_end(world, 1));
}
