//! No call that hangs inside NCCL or CUDA makes a rank hang: every row of the table is tried with two processes, and
//! each of them ends, as in the row, within its bound.

mod table;

use std::process::ExitStatus;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl::all_to_all::AllToAllAlgorithm;
use nccl::cudarc::driver::{CudaSlice, CudaStream};
use nccl::plan::CapturedPlan;
use nccl::{Communicator, ErrorKind, LaunchMode, ReduceOp, World};
use nccl_emulator::faults;
use nccl_tools::testing::name;
use table::{
    CONFIRM, Ends, FINALIZE, INIT, NEVER_CALLED, OPERATION, Others, Program, ROWS, Row, abort,
    never_called,
};

use crate::support;
use crate::support::apart::{self, Apart};
use crate::support::table::try_all;

const RANKS: usize = 2;
/// Allowance for a loaded machine on top of every bound.
const LOADED: Duration = Duration::from_secs(15);
/// The timeout of ranks that are not meant to time out.
const LONG: Duration = Duration::from_secs(60);
/// Announces that the tried call has returned.
const TRIED: &str = "tried";
/// Rows that are tried at the same time: they mostly sleep.
const TOGETHER: usize = 12;

/// A communicator with the timeouts of the table, or with [`LONG`] for a rank that is not meant to time out.
fn build(world: &World, stream: &Arc<CudaStream>, patient: bool) -> nccl::Result<Communicator> {
    let timeout = |timeout| if patient { LONG } else { timeout };
    world
        .communicator("hangs")
        .stream(stream)
        .with(|comm| {
            comm.timeouts.init = timeout(INIT);
            comm.timeouts.operation = timeout(OPERATION);
            comm.timeouts.finalize = timeout(FINALIZE);
            comm.timeouts.abort = abort();
            comm.timeouts.confirm = CONFIRM;
            comm.preflight = false;
        })
        .build()
}

fn memory(stream: &Arc<CudaStream>) -> CudaSlice<f32> {
    stream.alloc_zeros(1 << 10).expect("memory")
}

fn all_reduce(comm: &Communicator, y: &mut CudaSlice<f32>) -> nccl::Result<()> {
    comm.all_reduce_in_place(y, ReduceOp::Sum)?.wait()
}

/// Sends to the other rank and receives from it.
fn exchange(comm: &Communicator, stream: &Arc<CudaStream>) -> nccl::Result<()> {
    exchange_of(comm, &memory(stream), &mut memory(stream))
}

fn exchange_of(
    comm: &Communicator,
    x: &CudaSlice<f32>,
    y: &mut CudaSlice<f32>,
) -> nccl::Result<()> {
    let peer = 1 - comm.rank();
    comm.group(|group| {
        group.isend(x, peer)?;
        group.irecv(y, peer)
    })?
    .wait()
}

fn all_to_all(comm: &Communicator, x: &CudaSlice<f32>, y: &mut CudaSlice<f32>) -> nccl::Result<()> {
    let width = std::num::NonZero::<usize>::MIN;
    comm.all_to_all_with(x, y, AllToAllAlgorithm::Pairwise { width })?
        .wait()
}

fn plan(
    comm: &Communicator,
    stream: &Arc<CudaStream>,
) -> nccl::Result<CapturedPlan<CudaSlice<f32>>> {
    comm.capture(memory(stream), |capture, y| {
        capture.group(|group| group.all_reduce_in_place(y, ReduceOp::Sum))
    })
}

/// The communicator to grow: of rank 0 alone.
fn part(comm: &Communicator) -> nccl::Result<Option<Communicator>> {
    comm.split("part", (comm.rank() == 0).then_some(0), 0)
}

/// Grows to both ranks.
fn grow(
    world: &World,
    part: Option<&Communicator>,
    stream: &Arc<CudaStream>,
    patient: bool,
) -> nccl::Result<Communicator> {
    match part {
        Some(part) => part.grow(world, "hangs").map(|grown| grown.communicator),
        None => build(world, stream, patient),
    }
}

/// The rank with the hanging call: what it does before, and how long the call took.
fn victim(row: &Row, world: &World, stream: &Arc<CudaStream>) -> (Duration, nccl::Result<()>) {
    let hang = || {
        if !row.call.is_empty() {
            let fault = faults::at_call(row.call).nth(1);
            let fault = match row.program {
                // The watchdog makes the same query, and either may come first.
                Program::Wait => fault.on_this_thread(),
                // The watchdog and the awaiting thread query too.
                Program::Await => fault.on_threads_named("nccl-poller"),
                _ => fault,
            };
            fault.hang().keep();
        }
        Instant::now()
    };
    if matches!(row.program, Program::Absent | Program::Build) {
        let begun = hang();
        let built = build(world, stream, false);
        return (begun.elapsed(), built.map(drop));
    }
    let comm = build(world, stream, false).expect("a communicator");
    let mut y = memory(stream);
    if row.program == Program::FirstContact {
        let begun = Instant::now();
        let received = comm.group(|group| group.irecv(&mut y, 1)).map(drop);
        return (begun.elapsed(), received);
    }
    if row.program != Program::First {
        // The timeouts under test do not apply to the set-up.
        let calm = comm.within(LONG);
        exchange(&calm, stream).expect("both are there");
        all_reduce(&calm, &mut y).expect("both are there");
    }
    let meet = || world.barrier("it begins").expect("both are there");
    let waiting = || {
        let mut y = memory(stream);
        let waiting = comm.group(|group| group.irecv(&mut y, 1 - comm.rank()));
        waiting.expect("they are connected")
    };
    let timed = |begun: Instant, result: nccl::Result<()>| (begun.elapsed(), result);
    match row.program {
        Program::Absent | Program::Build | Program::FirstContact => unreachable!("they are above"),
        Program::AllReduce => {
            meet();
            // By now the thread that looks for hanging calls sleeps.
            std::thread::sleep(Duration::from_millis(1500));
            let begun = hang();
            timed(begun, all_reduce(&comm, &mut y))
        }
        Program::AllReduceElsewhere => {
            let other = stream.context().new_stream().expect("a stream");
            let mut y = memory(&other);
            meet();
            let begun = hang();
            timed(begun, all_reduce(&comm, &mut y))
        }
        Program::First => {
            let x = memory(stream);
            meet();
            // Not the same query of the wait, of the watchdog or of another thread.
            let fault = faults::at_call(row.call).nth(1).on_this_thread().hang();
            let begun = Instant::now();
            let posted = comm.group(|group| {
                group.isend(&x, 1 - comm.rank())?;
                group.irecv(&mut y, 1 - comm.rank())
            });
            drop(fault);
            timed(begun, posted.and_then(|posted| posted.wait()))
        }
        Program::Group => {
            let x = memory(stream);
            meet();
            let begun = hang();
            timed(begun, exchange_of(&comm, &x, &mut y))
        }
        Program::AllToAll => {
            let x = memory(stream);
            meet();
            let begun = hang();
            timed(begun, all_to_all(&comm, &x, &mut y))
        }
        Program::Wait => {
            let waiting = waiting();
            meet();
            let begun = hang();
            timed(begun, waiting.wait())
        }
        Program::Await => {
            let waiting = waiting();
            let runtime = tokio::runtime::Builder::new_current_thread()
                .build()
                .expect("a runtime");
            meet();
            let begun = hang();
            timed(begun, runtime.block_on(waiting))
        }
        Program::Abort => {
            meet();
            let begun = hang();
            timed(begun, comm.abort("on purpose"))
        }
        Program::AbortLent => {
            meet();
            let begun = hang();
            // A message without a receiver: its launch waits, with the memory.
            let fresh = comm.split("fresh", Some(0), 0);
            let _ = fresh.map(|fresh| fresh.map(|fresh| exchange(&fresh, stream)));
            timed(begun, Ok(()))
        }
        Program::AbortOwned => {
            let mut plan = plan(&comm, stream).expect("a plan");
            meet();
            let begun = hang();
            let waited = plan.launch().and_then(|done| done.wait());
            assert!(waited.is_err_and(|error| error.is_timeout()));
            // The buffers are not returned: NCCL may still use them.
            timed(begun, plan.into_buffers().map(drop))
        }
        Program::Finalize => {
            meet();
            let begun = hang();
            timed(begun, comm.finalize())
        }
        Program::DropCommunicator => {
            if row.call == "ncclCommAbort" {
                // No rank sends: its finalize does not end, and an abort has to end it.
                drop(waiting());
            }
            meet();
            let begun = hang();
            drop(comm);
            timed(begun, Ok(()))
        }
        Program::Buffer => {
            meet();
            let begun = hang();
            timed(begun, comm.buffer::<f32>(8).map(drop))
        }
        Program::DropBuffer => {
            let buffer = comm.buffer::<f32>(8).expect("memory");
            meet();
            let begun = hang();
            drop(buffer);
            timed(begun, Ok(()))
        }
        Program::Register => {
            let buffer = comm.buffer::<f32>(8).expect("memory");
            meet();
            let begun = hang();
            timed(begun, comm.register(buffer).map(drop))
        }
        Program::RegisterWindow => {
            let buffer = comm.buffer::<f32>(8).expect("memory");
            meet();
            let begun = hang();
            timed(begun, comm.register_window(buffer).map(drop))
        }
        Program::Memory => {
            meet();
            let begun = hang();
            timed(begun, comm.memory().map(drop))
        }
        Program::Suspend => {
            meet();
            let begun = hang();
            timed(begun, comm.suspend())
        }
        Program::IntoInner | Program::DropRegistered => {
            let buffer = comm.buffer::<f32>(8).expect("memory");
            let registered = comm.register(buffer).expect("it is registered");
            meet();
            let begun = hang();
            if row.program == Program::IntoInner {
                return timed(begun, registered.into_inner().map(drop));
            }
            drop(registered);
            timed(begun, Ok(()))
        }
        Program::PreMulSum => {
            meet();
            let begun = hang();
            timed(begun, comm.pre_mul_sum(2.0f32).map(drop))
        }
        Program::DropOperator => {
            let operator = comm.pre_mul_sum(2.0f32).expect("an operator");
            meet();
            let begun = hang();
            drop(operator);
            timed(begun, Ok(()))
        }
        Program::FromRaw => {
            meet();
            let raw = comm.as_raw().expect("it is in use");
            let begun = hang();
            // SAFETY: the call fails before it uses the handle.
            let other = unsafe { Communicator::from_raw(comm.library(), raw, "other", stream) };
            timed(begun, other.map(drop))
        }
        Program::Capture => {
            meet();
            let begun = hang();
            timed(begun, plan(&comm, stream).map(drop))
        }
        Program::Launch => {
            let mut plan = plan(&comm, stream).expect("a plan");
            meet();
            let begun = hang();
            timed(begun, plan.launch().and_then(|done| done.wait()))
        }
        Program::IntoBuffers | Program::DropPlan => {
            let plan = plan(&comm, stream).expect("a plan");
            meet();
            let begun = hang();
            if row.program == Program::IntoBuffers {
                return timed(begun, plan.into_buffers().map(drop));
            }
            drop(plan);
            timed(begun, Ok(()))
        }
        Program::Split => {
            meet();
            let begun = hang();
            timed(begun, comm.split("part", Some(0), 0).map(drop))
        }
        Program::Shrink => {
            meet();
            let begun = hang();
            timed(begun, comm.shrink("alone", &[0]).map(drop))
        }
        Program::Revoke => {
            meet();
            let begun = hang();
            timed(begun, comm.revoke("on purpose"))
        }
        Program::Grow | Program::GrowNew => {
            let part = part(&comm).expect("both are there");
            meet();
            let begun = hang();
            timed(begun, grow(world, part.as_ref(), stream, false).map(drop))
        }
        Program::ShrinkAborting => {
            meet();
            let begun = hang();
            timed(begun, comm.shrink_aborting("alone", &[0]).map(drop))
        }
    }
}

/// The other rank.
fn other(row: &Row, world: &World, stream: &Arc<CudaStream>) -> nccl::Result<()> {
    if row.program == Program::Absent {
        // It runs, and never enters.
        std::thread::sleep(INIT + Duration::from_secs(2));
        return Ok(());
    }
    let comm = build(world, stream, true)?;
    match row.program {
        Program::Build if row.others == Others::Unharmed => return Ok(()),
        Program::Build | Program::FirstContact => return heard(&comm),
        Program::First => {
            world.barrier("it begins")?;
            return exchange(&comm, stream);
        }
        _ => {}
    }
    let mut y = memory(stream);
    exchange(&comm, stream)?;
    all_reduce(&comm, &mut y)?;
    let kept = match row.program {
        Program::AbortOwned | Program::Launch | Program::IntoBuffers | Program::DropPlan => {
            Some(plan(&comm, stream)?)
        }
        _ => None,
    };
    let part = match row.program {
        Program::Grow | Program::GrowNew => part(&comm)?,
        _ => None,
    };
    world.barrier("it begins")?;
    match (row.program, row.others) {
        (Program::Finalize, _) => comm.finalize(),
        (Program::Grow | Program::GrowNew, Others::Unharmed) => {
            grow(world, part.as_ref(), stream, true).map(drop)
        }
        (Program::Grow | Program::GrowNew, _) => {
            grow(world, part.as_ref(), stream, true).and_then(|grown| heard(&grown))
        }
        (_, Others::Unharmed) => {
            drop(kept);
            Ok(())
        }
        (Program::AllReduce | Program::AllReduceElsewhere, _) => all_reduce(&comm, &mut y),
        (Program::Group, _) => exchange(&comm, stream),
        (Program::AllToAll, _) => all_to_all(&comm, &memory(stream), &mut y),
        (Program::Capture, _) => plan(&comm, stream).and_then(|_| heard(&comm)),
        (Program::AbortLent, _) => {
            comm.split("fresh", Some(0), 0)?;
            heard(&comm)
        }
        (Program::Split, _) => comm.split("part", Some(0), 0).map(drop),
        _ => heard(&comm),
    }
}

/// Waits until the communicator has ended, without a call on it; returns the result of the next call.
fn heard(comm: &Communicator) -> nccl::Result<()> {
    let begun = Instant::now();
    while comm.fault().is_none() && begun.elapsed() < LONG {
        std::thread::sleep(Duration::from_millis(2));
    }
    all_reduce(comm, &mut memory(comm.stream()))
}

/// One rank of one row; the test reads its output.
fn rank(row: &Row, world: &World) {
    // The last output of a process is part of it.
    // SAFETY: both are open.
    unsafe { libc::dup2(1, 2) };
    let stream = support::device(world)
        .and_then(|context| context.new_stream())
        .expect("a stream");
    if world.rank() == row.rank {
        let (took, result) = victim(row, world, &stream);
        println!("ended: {} {}", took.as_millis(), said(result));
        if row.program == Program::ShrinkAborting {
            let _ = world.barrier(TRIED);
        }
    } else {
        println!("other: {}", said(other(row, world, &stream)));
        if row.program == Program::ShrinkAborting {
            // The rank under test may still agree with this one on a communicator, and must not get the report that this one
            // left.
            let _ = world.barrier(TRIED);
        }
    }
    println!("main returns");
}

/// The kind of an error, the rank that it names, and its text, in one line.
fn said(result: nccl::Result<()>) -> String {
    let error = match result {
        Ok(()) => return String::from("returned"),
        Err(error) => error,
    };
    let kind = match error.kind() {
        ErrorKind::TimedOut { .. } => "TimedOut",
        ErrorKind::Aborted { .. } => "Aborted",
        ErrorKind::Rendezvous { .. } => "Rendezvous",
        ErrorKind::InvalidConfig { .. } => "InvalidConfig",
        _ => "another kind",
    };
    let cause = error
        .fault()
        .and_then(nccl::fault::Fault::culprit)
        .map_or(String::from("nobody"), |rank| rank.to_string());
    format!(
        "{kind} because of {cause}: {}",
        format!("{error:#}").replace('\n', " ")
    )
}

/// A row in the launch mode of these tests.
fn row(index: usize) -> Row {
    ROWS[index].of(support::launch_mode())
}

/// Tries one row; the error says what is wrong with it.
fn attempt(test: &str, index: usize) -> Result<(), String> {
    let row = &row(index);
    // An undisturbed abort is complete within its timeout.
    let quick = [("NCCL_EMULATOR_PROXY_POLL_MS", "100")];
    let mut ranks = apart::start(test, &index.to_string(), RANKS, &quick);
    let victim = ranks.remove(row.rank);
    let begun = Instant::now();
    let within = row.bound.time() + LOADED;
    match row.ends {
        Ends::Process(sentence) => {
            let (said, status) = end(victim, Duration::from_secs(20) + within)?;
            if status.success() || !said.contains(sentence) || !said.contains("ending the process")
            {
                return Err(format!("{status}, and it said:\n{said}"));
            }
        }
        Ends::Error(..) | Ends::Returns => {
            let (said, status) = end(victim, Duration::from_secs(20) + within)?;
            let ended = said
                .lines()
                .find_map(|line| line.split_once("ended: "))
                .map(|(_, ended)| ended.to_owned());
            let ended = ended.ok_or_else(|| format!("{status}, and it said:\n{said}"))?;
            let (took, ended) = ended.split_once(' ').unwrap_or_default();
            let took = Duration::from_millis(took.parse().unwrap_or(u64::MAX));
            let right = match row.ends {
                Ends::Error(kinds, words) => {
                    kinds.split(" or ").any(|kind| ended.starts_with(kind)) && ended.contains(words)
                }
                _ => ended == "returned",
            };
            if !right {
                return Err(format!("it said: {ended}"));
            }
            if took > within {
                return Err(format!("{took:?} instead of {:?}", row.bound.time()));
            }
            if !status.success() || !said.contains("main returns") {
                return Err(format!("{status}, and it said:\n{said}"));
            }
        }
    }
    for other in ranks {
        let (said, status) = end(other, within)?;
        let heard = said.lines().find_map(|line| line.split_once("other: "));
        let heard = heard.map_or("", |(_, heard)| heard);
        let told = format!("because of {}:", row.rank);
        let right = match row.others {
            Others::Told => heard.contains(&told),
            Others::ToldFirst => {
                let first = format!("first to run out of time: rank {} (", row.rank);
                heard.contains("because of nobody:") && heard.contains(&first)
            }
            Others::ToldOfPeer => heard.contains(&format!("because of {}:", 1 - row.rank)),
            Others::Fail => !heard.is_empty() && heard != "returned",
            Others::Unharmed => heard == "returned",
        };
        if !right || !status.success() {
            return Err(format!("{status}, and the other rank said:\n{said}"));
        }
    }
    println!("{:?} {}: {:?}", row.program, row.call, begun.elapsed());
    Ok(())
}

/// The output of a rank, and how it ended; or that it did not.
fn end(rank: Apart, timeout: Duration) -> Result<(String, ExitStatus), String> {
    let ended = rank.try_end(timeout);
    ended.map_err(|said| format!("its process did not end within {timeout:?}; it said:\n{said}"))
}

#[test]
fn every_call_that_hangs_ends_as_the_table_says() {
    let test = name(&|| ());
    if let Some((role, world)) = apart::rank(&test, RANKS) {
        let index: usize = role.parse().expect("a number");
        rank(&row(index), &world);
        return;
    }
    if !support::needs_emulator("calls that hang on purpose") {
        return;
    }
    let only = std::env::var("NCCL_TEST_HANG").ok();
    let wanted = |row: &Row| {
        let words = format!("{:?} {}", row.program, row.call);
        only.as_ref()
            .is_none_or(|only| words.contains(only.as_str()))
    };
    let rows: Vec<usize> = (0..ROWS.len())
        .filter(|&index| wanted(&ROWS[index]))
        .collect();
    let failures = try_all(rows.len(), TOGETHER, |turn| {
        let row = &ROWS[rows[turn]];
        attempt(&test, rows[turn]).map_err(|why| format!("{:?}, {}: {why}", row.program, row.call))
    });
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}

#[test]
fn the_page_has_the_table() {
    let page = include_str!("../../../docs/deadlines-and-abort.md");
    // Calls that only one mode makes have no line for the other mode.
    let is_made = |row: &&Row| !(row.call == "ncclCommSplit" && row.program == Program::Build);
    let other = ROWS.iter().filter(|row| row.differs()).filter(is_made);
    let other = other.map(|row| row.of(LaunchMode::NonBlocking).line());
    let never = NEVER_CALLED.iter().map(|&never| never_called(never));
    let lines = ROWS
        .iter()
        .map(|row| row.of(LaunchMode::BlockingChild).line())
        .chain(other)
        .chain(never);
    let missing: Vec<_> = lines
        .filter(|line| !page.lines().any(|other| other == line))
        .collect();
    assert!(
        missing.is_empty(),
        "docs/deadlines-and-abort.md lacks these lines:\n{}",
        missing.join("\n")
    );
}

#[test]
fn what_is_said_never_to_be_called_is_not() {
    fn sources(room: &std::path::Path, all: &mut String) {
        for entry in std::fs::read_dir(room).expect("the sources").flatten() {
            let path = entry.path();
            match path.is_dir() {
                true => sources(&path, all),
                false => all.push_str(&std::fs::read_to_string(&path).unwrap_or_default()),
            }
        }
    }
    let mut all = String::new();
    let root = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    sources(&root.join("nccl/src"), &mut all);
    for entry in std::fs::read_dir(root.join("crates"))
        .expect("the crates")
        .flatten()
    {
        if entry.file_name().to_string_lossy().starts_with("nccl-") {
            sources(&entry.path().join("src"), &mut all);
        }
    }
    assert!(all.contains("Api::ncclCommGrow)"), "as calls are written");
    for (call, _) in NEVER_CALLED {
        for made in [
            format!("Api::{call})"),
            format!("api().{call} "),
            format!("api().{call})"),
        ] {
            assert!(!all.contains(&made), "{made}");
        }
    }
}
