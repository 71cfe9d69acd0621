//! Windows, puts and signals: between threads, between processes, on the emulator and on NVIDIA's library.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl::cudarc::driver::CudaStream;
use nccl::device_api::LoadStoreAllToAll;
use nccl::one_sided::{Signals, Target, Window};
use nccl::{Buffer, Communicator, ErrorKind, World};
use nccl_emulator::faults;

use crate::support::gate::Gate;
use crate::support::{self, ranks_as_processes, ranks_as_threads};

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn start(world: &World) -> Result<(Arc<CudaStream>, Communicator), Box<dyn std::error::Error>> {
    let stream = support::device(world)?.new_stream()?;
    let comm = world.communicator("windows").stream(&stream).build()?;
    Ok((stream, comm))
}

/// What `from` puts for `to` in a round.
fn block(round: usize, from: usize, to: usize, len: usize) -> Vec<u32> {
    let number = |at| (round * 1_000_000 + from * 10_000 + to * 100 + at % 100) as u32;
    (0..len).map(number).collect()
}

/// A rank's blocks reach all others, again and again: a signal in the other direction says when a block may be overwritten.
fn exchange(world: &World) -> Outcome {
    let (stream, comm) = start(world)?;
    let (own, ranks) = (comm.rank(), comm.world_size());
    for len in [1, 1000, 70_001] {
        let mut source: Window<u32> = comm.window(ranks * len)?;
        let mut inbox: Window<u32> = comm.window(ranks * len)?;
        assert_eq!(inbox.len(), ranks * len);
        for round in 1..4 {
            let blocks: Vec<u32> = (0..ranks)
                .flat_map(|to| block(round, own, to, len))
                .collect();
            stream.memcpy_htod(&blocks, &mut source.view_mut())?;
            comm.group(|group| {
                (0..ranks).try_for_each(|peer| {
                    let part = source.view().slice(peer * len..(peer + 1) * len);
                    group.put(part, &inbox, Target::rank(peer).at(own * len))
                })
            })?;
            let from_all: Vec<_> = (0..ranks).map(Signals::from).collect();
            inbox.wait(&from_all)?.wait()?;
            let expected: Vec<u32> = (0..ranks)
                .flat_map(|from| block(round, from, own, len))
                .collect();
            assert_eq!(stream.clone_dtoh(&inbox.view())?, expected, "{round} {len}");
            // Read: may be written again.
            comm.group(|group| (0..ranks).try_for_each(|peer| group.signal(Target::rank(peer))))?;
            inbox.wait(&from_all)?;
        }
    }
    comm.finalize()?;
    Ok(())
}

#[test]
fn blocks_arrive_between_threads() {
    for ranks in [1, 2, 3] {
        ranks_as_threads(ranks, |world| exchange(&world));
    }
}

#[test]
fn blocks_arrive_between_processes() {
    for ranks in [2, 4] {
        ranks_as_processes(ranks, |world| exchange(&world));
    }
}

/// Puts issued one after another, with one wait for several of them.
#[test]
fn signals_are_counted() {
    ranks_as_threads(2, |world| {
        let (stream, comm) = start(&world)?;
        let mut source: Window<i64> = comm.window(8)?;
        let mut inbox: Window<i64> = comm.window(8)?;
        if comm.rank() == 0 {
            stream.memcpy_htod(&[1i64, 2, 3, 4, 5, 6, 7, 8], &mut source.view_mut())?;
            for at in 0..8 {
                let one = source.view().slice(at..at + 1);
                inbox.put(one, Target::rank(1).at(7 - at))?;
            }
        } else {
            inbox.wait(&[Signals::from(0).times(3)])?;
            inbox.wait(&[Signals::from(0).times(5)])?.wait()?;
            assert_eq!(stream.clone_dtoh(&inbox.view())?, [8, 7, 6, 5, 4, 3, 2, 1]);
        }
        comm.barrier()?;
        Ok::<(), Box<dyn std::error::Error>>(())
    });
}

/// Once a rank has its window, it puts at once, whatever work the stream had before.
#[test]
fn the_zeros_of_a_window_come_before_what_is_put() {
    ranks_as_threads(2, |world| {
        let (stream, comm) = start(&world)?;
        let other = 1 - comm.rank();
        let mut source: Window<u32> = comm.window(2)?;
        stream.memcpy_htod(&[7, 8], &mut source.view_mut())?;
        let gate = (other == 1).then(|| Gate::closed_on(&stream)).transpose()?;
        let opens = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(300));
            drop(gate);
        });
        let mut inbox: Window<u32> = comm.window(2)?;
        inbox.put(source.view(), Target::rank(other))?;
        inbox.wait(&[Signals::from(other)])?.wait()?;
        assert_eq!(stream.clone_dtoh(&inbox.view())?, [7, 8]);
        opens.join().expect("it does not panic");
        comm.barrier()?;
        Ok::<(), Box<dyn std::error::Error>>(())
    });
}

/// Windows on a stream other than the communicator's: later work on it reads what was put.
#[test]
fn the_stream_of_a_window_waits() {
    ranks_as_threads(2, |world| {
        let (stream, comm) = start(&world)?;
        let elsewhere = stream.context().new_stream()?;
        let mut source = comm.on(&elsewhere).window::<u8>(1 << 20)?;
        let mut inbox = comm.on(&elsewhere).window::<u8>(1 << 20)?;
        let other = 1 - comm.rank();
        elsewhere.memcpy_htod(&vec![7u8; 1 << 20], &mut source.view_mut())?;
        comm.group(|group| group.put(source.view(), &inbox, Target::rank(other)))?;
        comm.group(|group| group.wait_signals(&mut inbox, &[Signals::from(other)]))?;
        assert_eq!(elsewhere.clone_dtoh(&inbox.view())?, vec![7u8; 1 << 20]);
        drop(source);
        drop(inbox);
        comm.barrier()?;
        Ok::<(), Box<dyn std::error::Error>>(())
    });
}

#[test]
fn contexts_have_signals_of_their_own() {
    ranks_as_threads(2, |world| {
        let stream = support::device(&world)?.new_stream()?;
        let builder = world.communicator("contexts").stream(&stream);
        let comm = builder
            .with(|comm| {
                comm.config.rma_contexts = Some(2);
                comm.config.rma_signals = Some(3);
            })
            .build()?;
        let other = 1 - comm.rank();
        let mut source: Window<f32> = comm.window(2)?;
        let mut inbox: Window<f32> = comm.window(2)?;
        stream.memcpy_htod(&[1.0, 2.0], &mut source.view_mut())?;
        let second = Target::rank(other).context(1).signal(2);
        inbox.put(source.view(), second)?;
        comm.signal(Target::rank(other).signal(1))?;
        inbox.wait(&[
            Signals::from(other).signal(1),
            Signals::from(other).context(1).signal(2),
        ])?;
        assert_eq!(stream.clone_dtoh(&inbox.view())?, [1.0, 2.0]);
        for wrong in [
            Target::rank(other).context(2),
            Target::rank(other).signal(3),
        ] {
            let error = comm.signal(wrong).unwrap_err();
            assert!(
                matches!(error.kind(), ErrorKind::InvalidConfig { .. }),
                "{error}"
            );
        }
        comm.barrier()?;
        Ok::<(), Box<dyn std::error::Error>>(())
    });
}

#[test]
fn what_cannot_be_put_is_refused_before_nccl() {
    ranks_as_threads(2, |world| {
        let (stream, comm) = start(&world)?;
        let source: Window<f32> = comm.window(16)?;
        let mut inbox: Window<f32> = comm.window(16)?;
        let plain = stream.alloc_zeros::<f32>(16)?;
        let another = world.communicator("another").stream(&stream).build()?;
        let elsewhere: Window<f32> = another.window(16)?;
        let errors = [
            inbox.put(source.view(), Target::rank(2)).unwrap_err(),
            inbox.put(source.view(), Target::rank(0).at(1)).unwrap_err(),
            inbox
                .put(source.view(), Target::rank(0).at(usize::MAX))
                .unwrap_err(),
            inbox.put(&plain, Target::rank(0)).unwrap_err(),
            inbox.put(elsewhere.view(), Target::rank(0)).unwrap_err(),
            comm.group(|group| group.put(source.view(), &elsewhere, Target::rank(0)))
                .unwrap_err(),
            comm.signal(Target::rank(9)).unwrap_err(),
            inbox.wait(&[]).unwrap_err(),
            inbox.wait(&[Signals::from(0).times(0)]).unwrap_err(),
            inbox.wait(&[Signals::from(7)]).unwrap_err(),
        ];
        let kinds: Vec<&str> = errors
            .iter()
            .map(|error| match error.kind() {
                ErrorKind::NoSuchRank { .. } => "rank",
                ErrorKind::Length { .. } => "length",
                ErrorKind::InvalidConfig { field, .. } => field,
                other => panic!("{other}"),
            })
            .collect();
        assert_eq!(
            kinds,
            [
                "rank", "length", "length", "put", "put", "window", "rank", "signals", "signals",
                "rank"
            ]
        );
        // Nothing of that has reached NCCL.
        comm.barrier()?;
        let operation = errors[1].operation().ok_or("it has an operation")?;
        assert_eq!(operation.kind, nccl::OperationKind::Put);
        Ok::<(), Box<dyn std::error::Error>>(())
    });
}

#[test]
fn windows_of_different_lengths_are_refused_on_all_ranks_alike() {
    ranks_as_threads(3, |world| {
        let (_, comm) = start(&world)?;
        let len = if comm.rank() == 2 { 9 } else { 8 };
        let error = comm.window::<u8>(len).unwrap_err();
        let text = "rank 0 asks for a window of 8 bytes of u8, rank 2 for 9 of u8";
        assert!(error.to_string().contains(text), "{error}");
        // As many elements, and more bytes.
        let error = match comm.rank() {
            1 => comm.window::<f64>(8).unwrap_err(),
            _ => comm.window::<u8>(8).unwrap_err(),
        };
        let text = "rank 0 asks for a window of 8 bytes of u8, rank 1 for 64 of f64";
        assert!(error.to_string().contains(text), "{error}");
        assert!(comm.window::<u8>(0).is_err());
        assert_eq!(comm.window::<u8>(8)?.len(), 8);
        comm.barrier()?;
        Ok::<(), Box<dyn std::error::Error>>(())
    });
}

/// What fails on rank 1 alone, after the ranks have agreed or while they do.
#[test]
fn a_rank_that_cannot_have_its_part_of_a_window_is_not_waited_for() {
    if !support::needs_emulator("calls that fail on purpose") {
        return;
    }
    const FAILED: u32 = 2;
    type Call = fn(&Communicator, Buffer<u8>) -> nccl::Result<()>;
    let window: Call = |comm, _| comm.window::<u8>(8).map(drop);
    let register: Call = |comm, buffer| comm.register_window(buffer).map(drop);
    // The function that fails, on a thread of `nccl` or on that of the program, and which of its calls; else each.
    let cases: [(&str, bool, Option<u64>, Call); 6] = [
        ("ncclCommQueryProperties", true, None, window),
        // For the comparison, behind the registration, and for the connections.
        ("cuStreamCreate", false, Some(1), window),
        ("cuStreamCreate", false, Some(2), window),
        ("cuStreamCreate", false, Some(3), window),
        ("cuEventCreate", false, None, register),
        ("cuCtxSetCurrent", true, None, register),
    ];
    for (function, is_detached, nth, call) in cases {
        ranks_as_processes(2, move |world| {
            let (_, comm) = start(&world)?;
            let buffer = comm.buffer(8)?;
            world.barrier("started")?;
            let fault = (comm.rank() == 1).then(|| {
                let fault = faults::at_call(function);
                let fault = match nth {
                    Some(nth) => fault.nth(nth),
                    None => fault,
                };
                match is_detached {
                    true => fault.on_threads_named("nccl-call").fail(FAILED),
                    false => fault.on_this_thread().fail(FAILED),
                }
            });
            let begun = Instant::now();
            let Err(error) = call(&comm, buffer) else {
                panic!("a window without {function} {nth:?}")
            };
            let (took, text) = (begun.elapsed(), format!("{function} {nth:?}: {error:#}"));
            assert!(took < Duration::from_secs(10), "{took:?} {text}");
            assert!(fault.is_none_or(|fault| fault.hits() > 0), "{text}");
            let fault = error.fault().unwrap_or_else(|| panic!("{text}"));
            assert_eq!(fault.culprit(), Some(1), "{text}");
            world.barrier("told")?;
            Ok::<(), Box<dyn std::error::Error>>(())
        });
    }
}

#[test]
fn a_rank_without_memory_for_its_part_of_a_window_costs_no_communicator() {
    if !support::needs_emulator("an allocation that fails on purpose") {
        return;
    }
    const FAILED: u32 = 2;
    type Call = fn(&Communicator) -> nccl::Result<()>;
    let window: Call = |comm| comm.window::<u8>(8).map(drop);
    let load_store: Call = |comm| LoadStoreAllToAll::new(comm, 16).map(drop);
    for call in [window, load_store] {
        ranks_as_processes(2, move |world| {
            let (_, comm) = start(&world)?;
            world.barrier("started")?;
            let fault = (comm.rank() == 1).then(|| faults::at_call("ncclMemAlloc").fail(FAILED));
            let begun = Instant::now();
            let error = call(&comm).unwrap_err();
            assert!(begun.elapsed() < Duration::from_secs(10), "{error:#}");
            assert!(error.fault().is_none(), "{error:#}");
            let is_told = matches!(error.kind(), ErrorKind::Unavailable { .. });
            assert_eq!(is_told, comm.rank() == 0, "{error:#}");
            let names = error.to_string().contains("rank 1 cannot ");
            assert_eq!(names, comm.rank() == 0, "{error:#}");
            drop(fault);
            // The ranks can try again.
            comm.window::<u8>(8)?;
            Ok::<(), Box<dyn std::error::Error>>(())
        });
    }
}

/// On the emulator and on NVIDIA's library alike, NCCL reports success and creates no window.
#[test]
fn where_nccl_makes_no_windows_that_is_an_error_on_all_ranks() {
    let ranks = support::Ranks::new(2).variable("NCCL_WIN_ENABLE", "0");
    ranks.processes(|world| {
        let (_, comm) = start(&world)?;
        let error = comm.window::<u8>(8).unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Unavailable { .. }),
            "{error}"
        );
        comm.barrier()?;
        Ok::<(), Box<dyn std::error::Error>>(())
    });
}

/// The request times out, and the call that leaks the communicator returns.
#[test]
fn a_signal_that_never_comes_is_an_error() {
    if !support::needs_emulator("a stream that is given up") {
        return;
    }
    ranks_as_processes(2, |world| {
        let (_, comm) = start(&world)?;
        let mut inbox: Window<u8> = comm.window(8)?;
        comm.barrier()?;
        if comm.rank() == 0 {
            let begun = Instant::now();
            let short = comm.within(Duration::from_secs(1));
            let waiting =
                short.group(|group| group.wait_signals(&mut inbox, &[Signals::from(1)]))?;
            let error = waiting.wait().unwrap_err();
            assert!(error.is_timeout(), "{error:#}");
            assert!(begun.elapsed() < Duration::from_secs(25));
        } else {
            std::thread::sleep(Duration::from_secs(2));
        }
        Ok::<(), Box<dyn std::error::Error>>(())
    });
}

/// A wait holds up what comes behind it; and a graph that signals waits for an answer that never comes.
#[test]
fn groups_and_plans_in_which_ranks_would_wait_for_ever_are_refused() {
    ranks_as_threads(2, |world| {
        let (stream, comm) = start(&world)?;
        let early = comm.signal(Target::rank(0)).unwrap_err();
        assert!(early.to_string().contains("make a window first"), "{early}");
        let source: Window<f32> = comm.window(4)?;
        let mut inbox: Window<f32> = comm.window(4)?;
        let other: Window<f32> = comm.window(4)?;
        let peer = 1 - comm.rank();
        for behind in [false, true] {
            let error = comm
                .group(|group| {
                    group.wait_signals(&mut inbox, &[Signals::from(peer)])?;
                    match behind {
                        true => group.put(source.view(), &other, Target::rank(peer)),
                        false => group.signal(Target::rank(peer)),
                    }
                })
                .unwrap_err();
            assert!(error.to_string().contains("before the waits"), "{error}");
        }
        let captured = comm.capture(stream.alloc_zeros::<f32>(1)?, |capture, _| {
            capture.group(|group| group.signal(Target::rank(peer)))
        });
        let error = captured.map(drop).unwrap_err();
        assert!(error.to_string().contains("cannot be captured"), "{error}");
        comm.barrier()?;
        Ok::<(), Box<dyn std::error::Error>>(())
    });
}

/// Ranks put and wait any number of times; neither the comparison of calls nor a diagnosis treats that as a difference.
#[test]
fn one_sided_operations_are_no_calls_of_all_ranks() {
    let ranks = support::Ranks::new(2).variable("NCCL_RUN_CHECK", "1");
    ranks.processes(|world| {
        let (stream, comm) = start(&world)?;
        let source: Window<u8> = comm.window(8)?;
        let mut inbox: Window<u8> = comm.window(8)?;
        if comm.rank() == 0 {
            for at in 0..8 {
                inbox.put(source.view().slice(at..at + 1), Target::rank(1).at(at))?;
            }
        } else {
            inbox.wait(&[Signals::from(0).times(8)])?;
        }
        comm.barrier()?;
        assert_eq!(stream.clone_dtoh(&inbox.view())?, [0; 8]);
        Ok::<(), Box<dyn std::error::Error>>(())
    });
}

#[test]
fn a_verdict_does_not_count_puts() {
    if !support::needs_emulator("ranks that end early") {
        return;
    }
    ranks_as_processes(2, |world| {
        let (stream, comm) = start(&world)?;
        let source: Window<u8> = comm.window(8)?;
        let mut inbox: Window<u8> = comm.window(8)?;
        if comm.rank() == 1 {
            inbox.wait(&[Signals::from(0).times(8)])?.wait()?;
            std::thread::sleep(Duration::from_secs(3));
            return Ok(());
        }
        for _ in 0..8 {
            inbox.put(source.view(), Target::rank(1))?;
        }
        let mut y = stream.alloc_zeros::<f32>(1)?;
        let short = comm.within(Duration::from_secs(1));
        let waiting = short.all_reduce_in_place(&mut y, nccl::ReduceOp::Sum);
        let error = waiting.and_then(|done| done.wait()).unwrap_err();
        let text = format!("{error:#}");
        assert!(
            text.contains("root cause: rank 1") && text.contains("has not entered all_reduce"),
            "{text}"
        );
        Ok::<(), Box<dyn std::error::Error>>(())
    });
}
