//! The all-to-all by loads and stores: between threads, between processes, on the emulator's NCCL and on NVIDIA's.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl::cudarc::driver::{CudaStream, sys};
use nccl::device_api::LoadStoreAllToAll;
use nccl::{Communicator, ErrorKind, LaunchMode, ReduceOp, ResizeWay, World};
use nccl_emulator::faults;
use nccl_tools::testing::name;

use crate::support::{self, Ranks, apart, ranks_as_processes, ranks_as_threads};

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn start(world: &World) -> Result<(Arc<CudaStream>, Communicator), Box<dyn std::error::Error>> {
    let stream = support::device(world)?.new_stream()?;
    let comm = world.communicator("direct").stream(&stream).build()?;
    Ok((stream, comm))
}

/// What `from` sends to `to`.
fn block(round: usize, from: usize, to: usize, len: usize) -> Vec<u32> {
    let number = |at| (round * 10_007 + from * 1009 + to * 101 + at) as u32;
    (0..len).map(number).collect()
}

/// Blocks of all lengths, with NCCL's own operations in between, and requests that are waited for late or never.
fn exchange(world: &World) -> Outcome {
    let (stream, comm) = start(world)?;
    let (own, ranks) = (comm.rank(), comm.world_size());
    let mut all_to_all = LoadStoreAllToAll::new(&comm, 5000)?;
    assert_eq!(all_to_all.capacity(), 5008);
    let mut pending = Vec::new();
    let mut sum = stream.clone_htod(&[1.0f32])?;
    for (round, len) in [1, 0, 7, 8, 1252, 100, 1250].into_iter().enumerate() {
        let sent: Vec<u32> = (0..ranks)
            .flat_map(|to| block(round, own, to, len))
            .collect();
        let x = comm.buffer::<u32>(ranks * len)?;
        let mut y = comm.buffer::<u32>(ranks * len)?;
        let mut x = x;
        stream.memcpy_htod(&sent, &mut x.view_mut())?;
        let done = all_to_all.exchange(&x, &mut y)?;
        comm.all_reduce_in_place(&mut sum, ReduceOp::Sum)?;
        match round % 3 {
            0 => done.wait()?,
            1 => pending.push(done),
            _ => drop(done),
        }
        let expected: Vec<u32> = (0..ranks)
            .flat_map(|from| block(round, from, own, len))
            .collect();
        assert_eq!(stream.clone_dtoh(&y.view())?, expected, "{round} {len}");
    }
    for done in pending {
        assert!(done.is_over()?);
        done.wait()?;
    }
    drop(all_to_all);
    comm.finalize()?;
    Ok(())
}

#[test]
fn blocks_arrive_between_threads() {
    if !support::needs_nvrtc() {
        return;
    }
    for ranks in [1, 2, 3] {
        ranks_as_threads(ranks, |world| exchange(&world));
    }
}

#[test]
fn blocks_arrive_between_processes() {
    if !support::needs_nvrtc() {
        return;
    }
    for ranks in [2, 4] {
        ranks_as_processes(ranks, |world| exchange(&world));
    }
}

#[test]
fn what_does_not_fit_is_refused_and_nothing_is_lost() {
    if !support::needs_nvrtc() {
        return;
    }
    ranks_as_threads(2, |world| {
        let (stream, comm) = start(&world)?;
        for wrong in [0, usize::MAX, usize::MAX / 8] {
            let error = LoadStoreAllToAll::new(&comm, wrong).unwrap_err();
            let is_capacity = |kind: &ErrorKind| match kind {
                ErrorKind::InvalidConfig { field, .. } => *field == "capacity",
                _ => false,
            };
            assert!(is_capacity(error.kind()), "{error}");
        }
        let mut all_to_all = LoadStoreAllToAll::new(&comm, 16)?;
        let (x, mut y) = (
            stream.clone_htod(&[1u8; 64])?,
            stream.clone_htod(&[0u8; 64])?,
        );
        for (from, to) in [(3, 3), (8, 6), (34, 34)] {
            let error = all_to_all
                .exchange(x.slice(..from), y.slice_mut(..to))
                .unwrap_err();
            assert!(matches!(error.kind(), ErrorKind::Length { .. }), "{error}");
        }
        all_to_all
            .exchange(x.slice(..32), y.slice_mut(..32))?
            .wait()?;
        assert_eq!(
            stream.clone_dtoh(&y)?[..33],
            [[1u8; 32].as_slice(), &[0]].concat()
        );
        comm.barrier()?;
        Outcome::Ok(())
    });
}

#[test]
fn what_one_rank_cannot_have_is_refused_on_all() {
    if !support::needs_nvrtc() {
        return;
    }
    ranks_as_threads(2, |world| {
        let (_, comm) = start(&world)?;
        let error = LoadStoreAllToAll::new(&comm, 16 - comm.rank()).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("16 bytes") && text.contains("of 15"),
            "{text}"
        );
        let error = LoadStoreAllToAll::new(&comm, comm.rank()).unwrap_err();
        let text = error.to_string();
        match comm.rank() {
            0 => assert!(text.contains("at least one byte"), "{text}"),
            _ => assert!(text.contains("rank 0 cannot take part"), "{text}"),
        }
        comm.barrier()?;
        Outcome::Ok(())
    });
}

/// The exchange needs windows, and none of NCCL's one-sided operations.
#[test]
fn blocks_arrive_without_one_sided_operations() {
    if !support::needs_nvrtc() {
        return;
    }
    Ranks::new(2)
        .variable("NCCL_NUM_RMA_CTX", "0")
        .processes(|world| exchange(&world));
}

/// An exchange on rank 0 that waits for a block in vain, until the timeout or `other` on rank 1 ends the wait.
fn waits_in_vain(world: &World, timeout: Duration, other: impl FnOnce(&Communicator)) -> Outcome {
    let (stream, comm) = start(world)?;
    let comm = comm.within(timeout);
    let mut all_to_all = LoadStoreAllToAll::new(&comm, 16)?;
    let (x, mut y) = (
        stream.clone_htod(&[1u8; 32])?,
        stream.alloc_zeros::<u8>(32)?,
    );
    all_to_all.exchange(&x, &mut y)?.wait()?;
    comm.barrier()?;
    if comm.rank() == 1 {
        other(&comm);
        return Ok(());
    }
    let begun = Instant::now();
    let error = all_to_all.exchange(&x, &mut y)?.wait().unwrap_err();
    assert!(begun.elapsed() < Duration::from_secs(20), "{error:#}");
    println!("vain: {}", format!("{error:#}").replace('\n', " "));
    let again = all_to_all.exchange(&x, &mut y).unwrap_err();
    assert!(
        comm.state().is_final() || again.fault().is_some(),
        "{again:#}"
    );
    // The buffers are this rank's again, and the device works.
    drop(all_to_all);
    assert_eq!(stream.clone_dtoh(&x)?, [1u8; 32]);
    match timeout < Duration::from_secs(5) {
        true => {
            assert!(error.is_timeout(), "{error:#}");
            assert!(format!("{error:#}").contains("rank 1"), "{error:#}");
        }
        false => assert!(error.fault().is_some(), "{error:#}"),
    }
    Ok(())
}

#[test]
fn a_block_that_does_not_come_is_an_error_that_names_its_rank() {
    if !support::needs_nvrtc() {
        return;
    }
    ranks_as_processes(2, |world| {
        waits_in_vain(&world, Duration::from_secs(1), |comm| {
            // Here, and not there.
            let deadline = Instant::now() + Duration::from_secs(15);
            while !comm.state().is_final() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(10));
            }
        })
    });
}

#[test]
fn blocks_of_different_sizes_are_an_error_and_not_wrong_bytes() {
    if !support::needs_nvrtc() {
        return;
    }
    ranks_as_processes(2, |world| {
        let (stream, comm) = start(&world)?;
        let mut all_to_all = LoadStoreAllToAll::new(&comm, 64)?;
        let x = stream.clone_htod(&[1u8; 64])?;
        let mut y = stream.alloc_zeros::<u8>(64)?;
        all_to_all
            .exchange(x.slice(..32), y.slice_mut(..32))?
            .wait()?;
        world.barrier("of one size")?;
        let len = 32 << comm.rank();
        let error = all_to_all
            .exchange(x.slice(..len), y.slice_mut(..len))
            .and_then(|done| done.wait())
            .unwrap_err();
        let text = format!("{error:#}");
        assert!(text.contains("of the same size"), "{text}");
        let culprit = error.fault().and_then(|fault| fault.culprit());
        assert!(
            culprit.is_some() || matches!(error.kind(), ErrorKind::InvalidConfig { .. }),
            "{text}"
        );
        world.barrier("told")?;
        assert!(comm.barrier().is_err());
        Outcome::Ok(())
    });
}

#[test]
fn an_abort_of_another_rank_ends_the_wait() {
    if !support::needs_nvrtc() {
        return;
    }
    ranks_as_processes(2, |world| {
        waits_in_vain(&world, Duration::from_secs(30), |comm| {
            std::thread::sleep(Duration::from_millis(300));
            comm.abort("enough").unwrap();
        })
    });
}

#[test]
fn the_death_of_another_rank_ends_the_wait() {
    if !support::needs_nvrtc() {
        return;
    }
    const RANKS: usize = 2;
    let test = name(&|| ());
    if let Some((_, world)) = apart::rank(&test, RANKS) {
        let waited = waits_in_vain(&world, Duration::from_secs(30), |_| {
            println!("working");
            std::thread::sleep(Duration::from_secs(60));
        });
        println!("ended: {waited:?}");
        return;
    }
    if !support::needs_processes(RANKS) {
        return;
    }
    let mut ranks = apart::start(&test, "", RANKS, &[]);
    ranks[1].says("working");
    // Rank 0 waits by then.
    std::thread::sleep(Duration::from_millis(300));
    ranks[1].kill();
    let told = ranks[0].says("vain: ");
    assert!(told.contains("rank 1"), "{told}");
    assert_eq!(ranks[0].says("ended: "), "ended: Ok(())");
}

/// Finalizes or drops while the kernels of an exchange are running.
#[test]
fn an_orderly_end_waits_for_exchanges_under_way() {
    if !support::needs_nvrtc() {
        return;
    }
    ranks_as_threads(3, |world| {
        for round in 0..20 {
            let (stream, comm) = start(&world)?;
            let mut all_to_all = LoadStoreAllToAll::new(&comm, 4096)?;
            let x = stream.clone_htod(&vec![7u8; 3 * 4096])?;
            let mut y = stream.alloc_zeros::<u8>(3 * 4096)?;
            for _ in 0..5 {
                drop(all_to_all.exchange(&x, &mut y)?);
            }
            match round % 3 {
                0 => comm.finalize()?,
                1 => drop(all_to_all),
                _ => {}
            }
            assert_eq!(stream.clone_dtoh(&y)?, vec![7u8; 3 * 4096]);
        }
        Outcome::Ok(())
    });
}

/// One rank is late; the other has dropped everything by then, and each end waits for the kernels.
#[test]
fn what_is_dropped_ends_after_its_kernels() {
    if !support::needs_nvrtc() {
        return;
    }
    for end in ["finalize", "drop", "hold"] {
        ranks_as_threads(2, move |world| {
            let (stream, comm) = start(&world)?;
            // Without a timeout, too.
            let comm = comm.within(Duration::MAX);
            let mut all_to_all = LoadStoreAllToAll::new(&comm, 64)?;
            let x = stream.clone_htod(&[3u8; 128])?;
            let mut y = stream.alloc_zeros::<u8>(128)?;
            if comm.rank() == 1 {
                std::thread::sleep(Duration::from_millis(700));
            }
            let begun = Instant::now();
            drop(all_to_all.exchange(&x, &mut y)?);
            drop(all_to_all.exchange(&x, &mut y)?);
            drop(all_to_all);
            match end {
                "finalize" => comm.finalize()?,
                "hold" => {
                    comm.hold_windows()?.until(&stream)?;
                    comm.finalize()?;
                }
                _ => drop(comm),
            }
            if world.rank() == 0 && end != "drop" {
                assert!(
                    begun.elapsed() > Duration::from_millis(400),
                    "{:?}",
                    begun.elapsed()
                );
            }
            assert_eq!(stream.clone_dtoh(&y)?, [3u8; 128]);
            Outcome::Ok(())
        });
    }
}

#[test]
fn an_abort_ends_kernels_that_were_dropped() {
    if !support::needs_nvrtc() {
        return;
    }
    ranks_as_processes(2, |world| {
        let (stream, comm) = start(&world)?;
        let mut all_to_all = LoadStoreAllToAll::new(&comm, 64)?;
        let x = stream.clone_htod(&[3u8; 128])?;
        let mut y = stream.alloc_zeros::<u8>(128)?;
        // Not before the other rank has its own: an abort would end that as well.
        world.barrier("both have one")?;
        if comm.rank() == 0 {
            drop(all_to_all.exchange(&x, &mut y)?);
            drop(all_to_all.exchange(&x, &mut y)?);
            drop(all_to_all);
            let begun = Instant::now();
            comm.abort("it takes too long")?;
            assert!(
                begun.elapsed() < Duration::from_secs(5),
                "{:?}",
                begun.elapsed()
            );
        } else {
            let deadline = Instant::now() + Duration::from_secs(15);
            while !comm.state().is_final() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        assert_eq!(nccl::stats().leaked_communicators, 0);
        assert_eq!(stream.clone_dtoh(&x)?, [3u8; 128]);
        Outcome::Ok(())
    });
}

/// No thread waits for the exchange that fails.
#[test]
fn a_failure_that_was_dropped_is_told_by_the_orderly_end() {
    if !support::needs_nvrtc() {
        return;
    }
    ranks_as_processes(2, |world| {
        let (stream, comm) = start(&world)?;
        let comm = comm.within(Duration::from_millis(500));
        let mut all_to_all = LoadStoreAllToAll::new(&comm, 64)?;
        let x = stream.clone_htod(&[3u8; 128])?;
        let mut y = stream.alloc_zeros::<u8>(128)?;
        if comm.rank() == 0 {
            drop(all_to_all.exchange(&x, &mut y)?);
            // Behind the failed exchange, without effect.
            drop(all_to_all.exchange(&x, &mut y)?);
            drop(all_to_all);
            let error = comm.finalize().unwrap_err();
            assert!(error.to_string().contains("the block of rank 1"), "{error}");
        } else {
            comm.finalize()?;
        }
        Outcome::Ok(())
    });
}

/// Rank 1 does not wait for the exchange in which the block of rank 2 is missing, and goes on to a collective.
#[test]
fn the_rank_whose_block_is_missing_is_the_culprit_on_all_ranks() {
    if !support::needs_nvrtc() {
        return;
    }
    ranks_as_processes(3, |world| {
        let (stream, comm) = start(&world)?;
        let comm = comm.within(Duration::from_secs(1));
        let mut all_to_all = LoadStoreAllToAll::new(&comm, 64)?;
        let x = stream.clone_htod(&[3u8; 96])?;
        let mut y = stream.alloc_zeros::<u8>(96)?;
        let mut sum = stream.alloc_zeros::<f32>(4)?;
        world.barrier("all have one")?;
        let error = match comm.rank() {
            0 => all_to_all.exchange(&x, &mut y)?.wait().unwrap_err(),
            1 => {
                drop(all_to_all.exchange(&x, &mut y)?);
                let summed = comm.all_reduce_in_place(&mut sum, ReduceOp::Sum);
                summed.and_then(|done| done.wait()).unwrap_err()
            }
            _ => {
                let deadline = Instant::now() + Duration::from_secs(20);
                while !comm.state().is_final() && Instant::now() < deadline {
                    std::thread::sleep(Duration::from_millis(5));
                }
                comm.barrier().unwrap_err()
            }
        };
        let fault = error.fault().expect("a fault of the world");
        assert_eq!(fault.culprit(), Some(2), "{error:#}");
        assert!(fault.to_string().contains("all_to_all"), "{error:#}");
        Outcome::Ok(())
    });
}

/// No thread waits: only the watchdog can find it.
#[test]
fn an_exchange_that_fails_ends_the_communicator_although_nobody_waits() {
    if !support::needs_nvrtc() {
        return;
    }
    ranks_as_processes(2, |world| {
        let (stream, comm) = start(&world)?;
        let comm = comm.within(Duration::from_millis(500));
        let mut all_to_all = LoadStoreAllToAll::new(&comm, 64)?;
        let x = stream.clone_htod(&[3u8; 128])?;
        let mut y = stream.alloc_zeros::<u8>(128)?;
        world.barrier("both have one")?;
        if comm.rank() == 0 {
            drop(all_to_all.exchange(&x, &mut y)?);
        }
        let deadline = Instant::now() + Duration::from_secs(20);
        while !comm.state().is_final() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        let error = comm.barrier().unwrap_err();
        let culprit = error.fault().and_then(|fault| fault.culprit());
        assert_eq!(culprit, Some(1), "{error:#}");
        Outcome::Ok(())
    });
}

/// The exchange begins only after the operation in front of it, which hangs.
#[test]
fn an_end_is_not_held_up_by_an_exchange_behind_an_operation_that_hangs() {
    if !support::needs_nvrtc() {
        return;
    }
    for mode in [LaunchMode::BlockingChild, LaunchMode::NonBlocking] {
        for end in ["abort", "finalize", "drop", "drop without a window"] {
            ranks_as_processes(2, move |world| {
                let stream = support::device(&world)?.new_stream()?;
                let builder = world.communicator("direct").stream(&stream);
                let comm = builder
                    .with(|comm| {
                        comm.launch_mode = Some(mode);
                        comm.timeouts.finalize = Duration::from_secs(1);
                    })
                    .build()?;
                let mut all_to_all = match end {
                    "drop without a window" => None,
                    _ => Some(LoadStoreAllToAll::new(&comm, 64)?),
                };
                let x = stream.clone_htod(&[3u8; 128])?;
                let mut y = stream.alloc_zeros::<u8>(128)?;
                let mut sum = stream.alloc_zeros::<f32>(4)?;
                comm.all_reduce_in_place(&mut sum, ReduceOp::Sum)?.wait()?;
                world.barrier("connected")?;
                if comm.rank() == 0 {
                    drop(comm.all_reduce_in_place(&mut sum, ReduceOp::Sum)?);
                    match &mut all_to_all {
                        Some(all_to_all) => drop(all_to_all.exchange(&x, &mut y)?),
                        None => comm.hold_windows()?.until(&stream)?,
                    }
                    match end {
                        "abort" => comm.abort("enough")?,
                        "finalize" => drop(comm.finalize().unwrap_err()),
                        _ => drop((comm, all_to_all)),
                    }
                    let event = stream.record_event(None)?;
                    let deadline = Instant::now() + Duration::from_secs(20);
                    while !event.is_complete() && Instant::now() < deadline {
                        std::thread::sleep(Duration::from_millis(5));
                    }
                    assert!(event.is_complete(), "{mode:?}, {end}");
                }
                // The other rank has never entered it.
                world.barrier("over")?;
                drop(stream);
                assert_eq!(nccl::stats().leaked_communicators, 0, "{mode:?}, {end}");
                Outcome::Ok(())
            });
        }
    }
}

/// The kernel leaves, and NCCL's communicator is left for the shrink.
#[test]
fn a_revoke_during_an_exchange_is_no_abort() {
    if !support::needs_nvrtc() {
        return;
    }
    ranks_as_processes(3, |world| {
        let stream = support::device(&world)?.new_stream()?;
        let builder = world.communicator("direct").stream(&stream);
        let comm = builder
            .with(|comm| comm.launch_mode = Some(LaunchMode::NonBlocking))
            .build()?;
        let mut all_to_all = LoadStoreAllToAll::new(&comm, 64)?;
        let x = stream.clone_htod(&[3u8; 96])?;
        let mut y = stream.alloc_zeros::<u8>(96)?;
        world.barrier("both have one")?;
        if comm.rank() == 0 {
            drop(all_to_all.exchange(&x, &mut y)?);
            comm.revoke("enough")?;
        } else {
            let deadline = Instant::now() + Duration::from_secs(15);
            while !comm.state().is_final() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        if comm.rank() < 2 {
            let shrunk = comm.shrink("both", &[2])?;
            assert_eq!(shrunk.way, ResizeWay::Native, "{}", shrunk.way);
            shrunk.communicator.finalize()?;
        }
        Outcome::Ok(())
    });
}

/// The drop of a window does not unmap it under a kernel of the program.
#[test]
fn a_window_that_is_held_outlives_its_drop() {
    ranks_as_threads(1, |world| {
        let stream = support::device(&world)?.new_stream()?;
        let comm = world.communicator("held").stream(&stream).build()?;
        let window = comm.window::<u32>(4)?;
        let address = window.peer_address(0)?.expect("its own");
        let hold = comm.hold_windows()?;
        drop(window);
        // Made later, so that it does not concern the window.
        let later = comm.hold_windows()?;
        std::thread::sleep(Duration::from_millis(300));
        stream.context().bind_to_thread()?;
        // SAFETY: an element of the window, which is held.
        let write = || unsafe { nccl::cudarc::driver::result::memcpy_htod_sync(address, &[7u32]) };
        write()?;
        hold.until(&stream)?;
        if support::on_nvidias() {
            drop(later);
            return Outcome::Ok(comm.finalize()?);
        }
        let deadline = Instant::now() + Duration::from_secs(10);
        while write().is_ok() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(write().is_err(), "it is unmapped");
        drop(later);
        Outcome::Ok(())
    });
}

/// A reference to the windows delays an abort, also one without a timeout.
#[test]
fn windows_that_are_held_are_not_unmapped() {
    if !support::needs_nvrtc() {
        return;
    }
    for timeout in [Duration::from_secs(4), Duration::MAX] {
        ranks_as_threads(1, move |world| is_held(&world, timeout));
    }
}

fn is_held(world: &World, timeout: Duration) -> Outcome {
    let stream = support::device(world)?.new_stream()?;
    let builder = world.communicator("held").stream(&stream);
    let comm = builder.with(|comm| comm.timeouts.abort = timeout).build()?;
    let window = comm.window::<u32>(4)?;
    let address = window.peer_address(0)?.expect("its own");
    let hold = comm.hold_windows()?;
    let ended = std::thread::scope(|scope| {
        let abort = scope.spawn(|| comm.abort("held"));
        std::thread::sleep(Duration::from_millis(500));
        assert!(!abort.is_finished());
        stream.context().bind_to_thread().unwrap();
        // SAFETY: an element of the window, which is held.
        unsafe { nccl::cudarc::driver::result::memcpy_htod_sync(address, &[7u32]) }.unwrap();
        hold.until(&stream).unwrap();
        abort.join().expect("no panic")
    });
    ended?;
    let error = comm.hold_windows().unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Aborted { .. }), "{error}");
    Ok(())
}

/// NCCL unmaps its windows at any moment.
#[test]
fn no_hold_is_given_while_a_communicator_is_finalized() {
    if !support::needs_emulator("a call that hangs on purpose") {
        return;
    }
    ranks_as_threads(1, |world| {
        let (_, comm) = start(&world)?;
        let other = comm.clone();
        let finalize = faults::at_call("ncclCommFinalize").hang();
        std::thread::scope(|scope| {
            let finalized = scope.spawn(|| comm.finalize());
            assert!(finalize.wait_for_hits(1, Duration::from_secs(10)));
            let error = other.hold_windows().unwrap_err();
            assert!(matches!(error.kind(), ErrorKind::Closed { .. }), "{error}");
            finalize.release();
            finalized.join().expect("no panic")
        })?;
        Outcome::Ok(())
    });
}

/// The end of a captured graph cannot be seen in an event.
#[test]
fn a_hold_does_not_end_with_a_stream_that_is_capturing() {
    ranks_as_processes(1, |world| {
        let (stream, comm) = start(&world)?;
        let hold = comm.hold_windows()?;
        stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
        let error = hold.until(&stream).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Stream { .. }), "{error}");
        stream.end_capture(sys::CUgraphInstantiate_flags(0))?;
        // The communicator would be leaked, after a while.
        std::process::exit(0);
        #[expect(unreachable_code, reason = "the type of the outcome")]
        Outcome::Ok(())
    });
}
