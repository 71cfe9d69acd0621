//! Several communicators: in one group, in one process, and derived from one another.

use std::panic::AssertUnwindSafe;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nccl::all_to_all::AllToAllAlgorithm;
use nccl::cudarc::driver::CudaContext;
use nccl::recorder::CallState;
use nccl::{Communicator, ErrorKind, LaunchMode, ReduceOp, UniqueId, World};

use crate::support::{self, Ranks, ranks_as_processes, ranks_as_threads};

type Outcome = Result<(), Box<dyn std::error::Error>>;

/// All ranks on one thread: operations that would deadlock without a group.
#[test]
fn one_thread_drives_several_gpus_with_one_group() {
    if !support::needs_devices(3) {
        return;
    }
    Ranks::new(3).threads(|world| -> Outcome {
        if world.rank() > 0 {
            return Ok(());
        }
        let streams = (0..3)
            .map(|device| CudaContext::new(device)?.new_stream())
            .collect::<Result<Vec<_>, _>>()?;
        let comms = Communicator::init_all("all", &streams)?;
        let mut ys = streams
            .iter()
            .enumerate()
            .map(|(rank, stream)| stream.clone_htod(&[rank as i32 + 1; 1000]))
            .collect::<Result<Vec<_>, _>>()?;
        for _ in 0..3 {
            nccl::group(|group| {
                for (comm, y) in comms.iter().zip(&mut ys) {
                    group.on(comm)?.all_reduce_in_place(y, ReduceOp::Max)?;
                }
                Ok(())
            })?
            .wait()?;
        }
        for (stream, y) in streams.iter().zip(&ys) {
            assert_eq!(stream.clone_dtoh(y)?, [3; 1000]);
        }
        let x = streams[0].clone_htod(&[7u8; 10])?;
        let mut y = streams[2].alloc_zeros::<u8>(10)?;
        let done = nccl::group(|group| {
            group.on(&comms[0])?.isend(&x, 2)?;
            group.on(&comms[2])?.irecv(&mut y, 0)
        })?;
        done.wait_timeout(Duration::from_secs(20))?;
        assert!(done.is_complete()?);
        assert_eq!(streams[2].clone_dtoh(&y)?, [7; 10]);
        // Finalize waits for all ranks, so one thread cannot do one after the other.
        std::thread::scope(|scope| {
            let ends: Vec<_> = comms
                .iter()
                .map(|comm| scope.spawn(|| comm.finalize()))
                .collect();
            ends.into_iter()
                .try_for_each(|end| end.join().expect("no panic"))
        })?;
        Ok(())
    });
}

#[test]
fn a_group_that_fails_aborts_all_its_communicators() {
    if !support::needs_devices(3) {
        return;
    }
    Ranks::new(3).threads(|world| -> Outcome {
        if world.rank() > 0 {
            return Ok(());
        }
        let streams = (0..3)
            .map(|device| CudaContext::new(device)?.new_stream())
            .collect::<Result<Vec<_>, _>>()?;
        let mut comms = Communicator::init_all_with("all", &streams, |builder| {
            builder.with(|comm| comm.timeouts.operation = Duration::from_millis(300))
        })?;
        let mut ys = streams
            .iter()
            .map(|stream| stream.alloc_zeros::<f32>(8))
            .collect::<Result<Vec<_>, _>>()?;
        let left_out = comms.pop().expect("three were made");
        // The first collective of a communicator waits for all its ranks, on the host.
        let error = nccl::group(|group| {
            for (comm, y) in comms.iter().zip(&mut ys) {
                group.on(comm)?.all_reduce_in_place(y, ReduceOp::Sum)?;
            }
            Ok(())
        })
        .unwrap_err();
        assert!(error.is_timeout(), "{error:#}");
        for (comm, y) in comms.iter().zip(&mut ys) {
            let error = comm.all_reduce_in_place(y, ReduceOp::Sum).unwrap_err();
            assert!(
                matches!(error.kind(), ErrorKind::TimedOut { .. }),
                "{error:#}"
            );
            assert!(
                format!("{error:#}").contains("has not entered group #1"),
                "{error:#}"
            );
        }
        left_out.abort("the others are gone")?;
        Ok(())
    });
}

#[test]
fn an_abort_of_one_ends_the_launch_of_the_whole_group() {
    if !support::needs_devices(3) {
        return;
    }
    Ranks::new(3).threads(|world| -> Outcome {
        if world.rank() > 0 {
            return Ok(());
        }
        let streams = (0..3)
            .map(|device| CudaContext::new(device)?.new_stream())
            .collect::<Result<Vec<_>, _>>()?;
        let mut comms = Communicator::init_all("all", &streams)?;
        let left_out = comms.pop().expect("three were made");
        let mut ys = streams
            .iter()
            .map(|stream| stream.alloc_zeros::<f32>(8))
            .collect::<Result<Vec<_>, _>>()?;
        let begun = std::time::Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(200));
                // The communicator whose launch is not polled yet.
                comms[1].abort("no patience")
            });
            let error = nccl::group(|group| {
                for (comm, y) in comms.iter().zip(&mut ys) {
                    group.on(comm)?.all_reduce_in_place(y, ReduceOp::Sum)?;
                }
                Ok(())
            })
            .unwrap_err();
            assert!(
                matches!(error.kind(), ErrorKind::Aborted { .. }),
                "{error:#}"
            );
        });
        // Far below the timeout of an operation, and that of an abort.
        assert!(begun.elapsed() < Duration::from_secs(8));
        left_out.abort("the others are gone")?;
        Ok(())
    });
}

/// Waits until rank 0 is inside its group, which includes "a".
fn until_inside(name: &str) {
    let is_inside = || {
        let all = nccl::recorder::snapshot().communicators;
        all.iter().any(|one| {
            let is_it = one.name == name && one.rank == 0;
            is_it
                && one
                    .calls
                    .iter()
                    .any(|call| call.state == CallState::Issuing)
        })
    };
    let deadline = Instant::now() + Duration::from_secs(30);
    while !is_inside() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Rank 0 is inside a group of a communicator of ranks 0 and 2 and of another one, and rank 2 aborts the first.
fn one_ends_with_another(world: World) -> Outcome {
    let stream = support::device(&world)?.new_stream()?;
    let whole = world.communicator("whole").stream(&stream).build()?;
    for (round, others) in [("member", [0, 1, 2]), ("no member", [0, 1, 1])] {
        let name = |what: &str| format!("{what}, {round}");
        let rank = world.rank();
        let first = whole.split(&name("first"), (rank != 1).then_some(0), rank as i64)?;
        let is_of_other = others.contains(&rank);
        let other = whole.split(&name("other"), is_of_other.then_some(0), rank as i64)?;
        let (mut y, mut z) = (stream.alloc_zeros::<f32>(8)?, stream.alloc_zeros::<f32>(8)?);
        world.barrier(&name("made"))?;
        match (rank, first, other) {
            (0, Some(first), Some(other)) => {
                nccl::group(|group| {
                    group
                        .on(&first)?
                        .all_reduce_in_place(&mut y, ReduceOp::Sum)?;
                    group
                        .on(&other)?
                        .all_reduce_in_place(&mut z, ReduceOp::Sum)?;
                    Ok(())
                })
                .unwrap_err();
            }
            (1, _, Some(other)) => {
                let error = other
                    .all_reduce_in_place(&mut z, ReduceOp::Sum)
                    .and_then(|request| request.wait())
                    .unwrap_err();
                let fault = error.fault().ok_or("it ended on all ranks")?;
                let is_member = others.contains(&2);
                assert_eq!(fault.culprit(), is_member.then_some(2), "{fault}");
                assert_eq!(fault.world_rank(), Some(2), "{fault}");
                assert_eq!(fault.pid, std::process::id());
                let who = if is_member {
                    "rank 2 ("
                } else {
                    "world rank 2 ("
                };
                let text = fault.to_string();
                let why = format!(
                    "asked for it: to end {:?} (world ranks 0,2): enough",
                    name("first")
                );
                assert!(text.starts_with(who) && text.ends_with(&why), "{text}");
            }
            (_, Some(first), _) => {
                until_inside(&name("first"));
                first.abort("enough")?;
            }
            _ => return Err("its part".into()),
        }
        world.barrier(round)?;
    }
    Ok(whole.finalize()?)
}

#[test]
fn what_ends_with_another_communicator_names_who_ended_that_one() {
    ranks_as_threads(3, one_ends_with_another);
}

fn split(world: &World) -> Outcome {
    let stream = support::device(world)?.new_stream()?;
    let comm = world.communicator("all").stream(&stream).build()?;
    let rank = comm.rank();
    // Even ranks in reverse order; rank 3 in none; rank 1 alone.
    let color = (rank != 3).then_some(rank as u32 % 2);
    let part = comm.split("part", color, -(rank as i64))?;
    let Some(part) = part else {
        assert_eq!(rank, 3);
        world.barrier("used")?;
        comm.finalize()?;
        return Ok(());
    };
    let expected = match rank {
        0 => (1, 2),
        1 => (0, 1),
        _ => (0, 2),
    };
    assert_eq!((part.rank(), part.world_size()), expected);
    let mut y = stream.clone_htod(&[rank as i32])?;
    part.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
    assert_eq!(stream.clone_dtoh(&y)?, [if rank == 1 { 1 } else { 2 }]);
    // Nothing is shared: the end of one is not the end of the other.
    world.barrier("used")?;
    part.abort("no longer needed")?;
    comm.finalize()?;
    Ok(())
}

#[test]
fn a_split_orders_ranks_by_color_and_key() {
    ranks_as_threads(4, |world| split(&world));
    ranks_as_processes(4, |world| split(&world));
}

#[test]
fn a_rank_that_cannot_take_part_in_a_split_is_the_reason_on_all() {
    ranks_as_threads(3, |world| -> Outcome {
        let stream = support::device(&world)?.new_stream()?;
        let comm = world.communicator("all").stream(&stream).build()?;
        let rank = comm.rank();
        let error = comm
            .split_with("part", Some(0), 0, |builder| {
                if rank == 1 {
                    builder.with(|comm| comm.config.min_ctas = Some(0))
                } else {
                    builder
                }
            })
            .unwrap_err();
        let text = format!("{error:#}");
        assert!(text.contains("min_ctas"), "{text}");
        if rank != 1 {
            assert!(text.contains("rank 1"), "{text}");
        }
        comm.finalize()?;
        Ok(())
    });
}

#[test]
fn the_builder_of_a_split_cannot_be_built_by_its_settings() {
    ranks_as_threads(1, |world| -> Outcome {
        let stream = support::device(&world)?.new_stream()?;
        let comm = world.communicator("whole").stream(&stream).build()?;
        let id = UniqueId::new(comm.library())?;
        let part = comm.split_with("part", Some(0), 0, |builder| {
            let error = builder.build().unwrap_err();
            assert!(format!("{error:#}").contains("split"), "{error:#}");
            Communicator::builder("part", id, 0, 1).stream(&stream)
        })?;
        assert!(part.is_some());
        Ok(())
    });
}

#[test]
fn a_warm_up_connects_all_ranks_or_names_its_limit() {
    ranks_as_threads(3, |world| -> Outcome {
        let stream = support::device(&world)?.new_stream()?;
        let comm = world.communicator("warm").stream(&stream).build()?;
        comm.warm_up(Duration::from_secs(20))?;
        comm.finalize()?;
        let comm = world.communicator("cold").stream(&stream).build()?;
        if comm.rank() == 0 {
            let error = comm.warm_up(Duration::from_millis(200)).unwrap_err();
            assert!(error.is_timeout(), "{error:#}");
            assert!(format!("{error:#}").contains("200ms"), "{error:#}");
        }
        world.barrier("end")?;
        comm.abort("rank 0 did")?;
        Ok(())
    });
}

/// The peer enters the messages late, and never the collective.
#[test]
fn a_warm_up_ends_at_one_limit_for_all_of_it() {
    static PEER_CALLS: Mutex<Option<Instant>> = Mutex::new(None);
    ranks_as_threads(2, |world| -> Outcome {
        let timeout = Duration::from_secs(4);
        let stream = support::device(&world)?.new_stream()?;
        let comm = world.communicator("late").stream(&stream).build()?;
        world.barrier("made")?;
        if comm.rank() == 0 {
            let error = comm.warm_up(timeout).unwrap_err();
            let ended = Instant::now();
            assert!(error.is_timeout(), "{error:#}");
            let called = PEER_CALLS.lock().unwrap().ok_or("the peer came")?;
            // A timeout of the collective's own would have begun after the messages.
            assert!(ended < called + timeout, "{:?}", ended - called);
        } else {
            std::thread::sleep(timeout * 3 / 4);
            *PEER_CALLS.lock().unwrap() = Some(Instant::now());
            let x = stream.alloc_zeros::<u8>(2)?;
            let mut y = stream.alloc_zeros::<u8>(2)?;
            comm.all_to_all_with(&x, &mut y, AllToAllAlgorithm::Grouped)?
                .wait()?;
        }
        world.barrier("end")?;
        comm.abort("rank 0 did")?;
        Ok(())
    });
}

#[test]
fn a_panic_in_the_settings_of_one_rank_ends_the_others() {
    if !support::needs_devices(2) {
        return;
    }
    Ranks::new(2).threads(|world| -> Outcome {
        if world.rank() > 0 {
            return Ok(());
        }
        let streams = [
            CudaContext::new(0)?.new_stream()?,
            CudaContext::new(1)?.new_stream()?,
        ];
        let first = AtomicBool::new(true);
        let begun = Instant::now();
        let made = std::panic::catch_unwind(AssertUnwindSafe(|| {
            Communicator::init_all_with("both", &streams, |builder| {
                assert!(!first.swap(false, Ordering::Relaxed), "the settings");
                builder.with(|comm| comm.timeouts.init = Duration::from_secs(25))
            })
        }));
        assert!(made.is_err());
        assert!(begun.elapsed() < Duration::from_secs(15));
        Ok(())
    });
}

/// Groups are plain values: swapped, each is still issued on its own communicator.
#[test]
fn groups_that_trade_places_stay_with_their_communicators() {
    ranks_as_threads(2, |world| -> Outcome {
        let stream = support::device(&world)?.new_stream()?;
        let all = world.communicator("all").stream(&stream).build()?;
        let alone = World::single()
            .communicator("alone")
            .stream(&stream)
            .build()?;
        let x = stream.clone_htod(&[world.rank() as u8 + 1; 64])?;
        let mut gathered = stream.alloc_zeros::<u8>(128)?;
        let mut copied = stream.alloc_zeros::<u8>(64)?;
        all.group(|outer| {
            outer.all_gather(&x, &mut gathered)?;
            alone
                .group(|inner| {
                    inner.all_gather(&x, &mut copied)?;
                    std::mem::swap(outer, inner);
                    Ok(())
                })?
                .wait()
        })?
        .wait()?;
        assert_eq!(stream.clone_dtoh(&copied)?, [world.rank() as u8 + 1; 64]);
        let expected = [[1u8; 64], [2; 64]].concat();
        assert_eq!(stream.clone_dtoh(&gathered)?, expected);
        all.finalize()?;
        Ok(())
    });
}

#[test]
fn a_communicator_of_another_binding_is_taken_over() {
    ranks_as_threads(2, |world| -> Outcome {
        let stream = support::device(&world)?.new_stream()?;
        let library = nccl::Library::load()?;
        let id = world.all_gather("id", nccl::UniqueId::new(&library)?.as_bytes())?;
        let raw = foreign(&id[0], world.rank() as i32)?;
        // SAFETY: made for this device a moment ago, with NCCL's defaults, and given up here.
        let comm = unsafe { Communicator::from_raw_blocking(&library, raw, "foreign", &stream) }?;
        assert_eq!((comm.rank(), comm.world_size()), (world.rank(), 2));
        assert_eq!(comm.as_raw(), Some(raw));
        let mut y = stream.clone_htod(&[1.5f32])?;
        comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
        assert_eq!(stream.clone_dtoh(&y)?, [3.0]);
        for (mode, why) in [
            // NCCL does not accept it in one group with a non-blocking one.
            (
                LaunchMode::NonBlocking,
                "\"foreign\" blocks and \"ours\" does not",
            ),
            (
                LaunchMode::BlockingChild,
                "nothing ends a call that waits for communicator \"foreign\"",
            ),
        ] {
            let ours = world.communicator("ours").stream(&stream);
            let ours = ours.with(|comm| comm.launch_mode = Some(mode)).build()?;
            let error = nccl::group(|group| {
                group.on(&ours)?;
                group.on(&comm).map(drop)
            })
            .unwrap_err()
            .to_string();
            assert!(error.contains(why), "{error:#}");
            ours.finalize()?;
        }
        comm.finalize()?;
        assert_eq!(comm.as_raw(), None);
        // SAFETY: a null pointer is refused.
        let refused =
            unsafe { Communicator::from_raw(&library, std::ptr::null_mut(), "none", &stream) };
        assert!(refused.is_err());
        Ok(())
    });
}

#[test]
fn settings_that_contradict_how_nccl_is_used_are_refused_before_anybody_waits() {
    for (variable, field) in [
        ("NCCL_COMM_BLOCKING", "blocking"),
        ("NCCL_COMM_SPLIT_SHARE_RESOURCES", "splitShare"),
    ] {
        for (value, refused) in [("1", true), ("0", false)] {
            Ranks::new(1)
                .variable(variable, value)
                .threads(move |world| -> Outcome {
                    let stream = support::device(&world)?.new_stream()?;
                    match world.communicator("ours").stream(&stream).build() {
                        Ok(_) => assert!(!refused, "{variable}={value} was taken"),
                        Err(error) => {
                            assert!(refused, "{error:#}");
                            let text = format!("{error:#}");
                            assert!(text.contains(&format!("{variable}={value}")), "{text}");
                            assert!(text.contains(&format!("`{field}`")), "{text}");
                            assert!(text.contains(&format!("unset {variable}")), "{text}");
                        }
                    }
                    Ok(())
                });
        }
    }
}

#[test]
fn a_split_ends_with_the_signal_of_its_parent_or_its_own() {
    ranks_as_threads(2, |world| -> Outcome {
        let stream = support::device(&world)?.new_stream()?;
        for own in [false, true] {
            let (parents, childs) = (nccl::AbortSignal::new(), nccl::AbortSignal::new());
            let name = format!("own: {own}");
            let comm = world
                .communicator(&name)
                .stream(&stream)
                .with(|comm| comm.abort_signals.push(parents.clone()));
            let comm = comm.build()?;
            let part = comm.split_with("part", Some(0), 0, |builder| {
                builder.with(|comm| comm.abort_signals.push(childs.clone()))
            });
            let part = part?.expect("a colour was given");
            world.barrier("split")?;
            match own {
                true => childs.abort(),
                false => parents.abort(),
            }
            let mut y = stream.alloc_zeros::<f32>(4)?;
            let error = part.all_reduce_in_place(&mut y, ReduceOp::Sum).unwrap_err();
            assert!(
                format!("{error:#}").contains("its abort signal was given"),
                "{error:#}"
            );
            assert!(!own || !parents.is_aborted());
            world.barrier("end")?;
        }
        Ok(())
    });
}

#[test]
fn a_signal_of_the_program_ends_an_init_of_all_as_a_rank_that_fails_does() {
    if !support::needs_devices(2) {
        return;
    }
    ranks_as_threads(2, |world| -> Outcome {
        if world.rank() == 1 {
            return Ok(());
        }
        let device = |ordinal| CudaContext::new(ordinal)?.new_stream();
        let streams = [device(0)?, device(1)?];
        for given in [false, true] {
            let stop = nccl::AbortSignal::new();
            let begun = std::time::Instant::now();
            // One of the two cannot take part, and the other waits for it.
            let first = std::sync::atomic::AtomicBool::new(!given);
            let error = Communicator::init_all_with("both", &streams, |builder| {
                let builder = builder.with(|comm| comm.abort_signals.push(stop.clone()));
                if given {
                    stop.abort();
                }
                match first.swap(false, std::sync::atomic::Ordering::SeqCst) {
                    true => builder.with(|comm| comm.config.min_ctas = Some(0)),
                    false => builder,
                }
            })
            .unwrap_err();
            let word = if given { "abort" } else { "min_ctas" };
            assert!(format!("{error:#}").contains(word), "{error:#}");
            assert!(
                begun.elapsed() < Duration::from_secs(10),
                "{:?}",
                begun.elapsed()
            );
        }
        Ok(())
    });
}

/// As another binding would: a communicator with NCCL's defaults, which block.
fn foreign(id: &[u8], rank: i32) -> Result<nccl_sys::ncclComm_t, Box<dyn std::error::Error>> {
    // SAFETY: whatever is found is NCCL or the emulator, and stays loaded.
    let loaded = unsafe { nccl_sys::Loader::new().load() }?;
    let mut raw_id = nccl_sys::ncclUniqueId { internal: [0; 128] };
    for (to, from) in raw_id.internal.iter_mut().zip(id) {
        *to = std::ffi::c_char::from_ne_bytes([*from]);
    }
    let mut raw = std::ptr::null_mut();
    let init = loaded.api.ncclCommInitRank()?;
    // SAFETY: `raw` is a valid place, and the device of this thread is the rank's.
    let code = unsafe { init(&mut raw, 2, raw_id, rank) };
    assert_eq!(code, nccl_sys::ncclResult_t::ncclSuccess);
    Ok(raw)
}
