//! Special properties of the launch modes: what ends a thread inside NCCL, settings that must agree on all ranks, and
//! refusals. The tests of the operations themselves run in both (`tests/non_blocking.rs`).

use std::fmt::Write as _;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nccl::cudarc::driver::CudaStream;
use nccl::{
    AbortSignal, Communicator, CommunicatorBuilder, ErrorKind, LaunchMode, OperationKind, ReduceOp,
    Version, World,
};
use nccl_emulator::faults;
use nccl_tools::testing::name;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};

use crate::support::apart;
use crate::support::{self, Ranks, ranks_as_processes, ranks_as_threads};

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

/// Timeout of operations: reaching it means that the subject of the test did not end the operation.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Generous, for a loaded machine.
const SOON: Duration = Duration::from_secs(10);

fn start<'a>(
    world: &'a World,
    set: impl FnOnce(CommunicatorBuilder<'a>) -> CommunicatorBuilder<'a>,
) -> Outcome<(Arc<CudaStream>, Communicator)> {
    let stream = support::device(world)?.new_stream()?;
    let builder = world.communicator("switched").stream(&stream).with(|comm| {
        comm.timeouts.operation = TIMEOUT;
        comm.launch_mode = Some(LaunchMode::BlockingChild);
    });
    let comm = set(builder).build()?;
    assert_eq!(comm.launch_mode(), Some(LaunchMode::BlockingChild));
    Ok((stream, comm))
}

/// Issues the first operation, which the other ranks do not enter: the thread is inside NCCL until the operation is ended.
fn first(comm: &Communicator, stream: &Arc<CudaStream>) -> (nccl::Error, Duration) {
    let mut y = stream.alloc_zeros::<f32>(1 << 10).expect("memory");
    let begun = Instant::now();
    let error = comm
        .all_reduce_in_place(&mut y, ReduceOp::Sum)
        .expect_err("nobody else comes");
    (error, begun.elapsed())
}

/// Waits for the fault of the communicator; returns the text that all ranks report.
fn fault(comm: &Communicator) -> String {
    let begun = Instant::now();
    loop {
        if let Some(fault) = comm.fault() {
            return fault.to_string();
        }
        assert!(begun.elapsed() < SOON, "nothing was heard");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_thread_inside_nccl_is_freed_at_its_limit_and_all_ranks_hear_why() {
    ranks_as_threads(2, |world| -> Outcome {
        let (stream, comm) = start(&world, |builder| builder)?;
        if world.rank() == 0 {
            let timeout = Duration::from_millis(300);
            let (error, took) = first(&comm.within(timeout), &stream);
            assert!(error.is_timeout(), "{error:#}");
            assert!((timeout..SOON).contains(&took), "{took:?}");
            let operation = error.operation().expect("an operation");
            assert_eq!(operation.kind, OperationKind::AllReduce);
            assert_eq!(operation.sequence, Some(1));
            assert!(
                format!("{error:#}").contains("1024"),
                "the count: {error:#}"
            );
        }
        let said = fault(&comm);
        assert!(
            said.contains("rank 0") && said.contains("all_reduce #1"),
            "{said}"
        );
        world.barrier("both heard")?;
        Ok(())
    });
}

#[test]
fn a_thread_inside_nccl_is_freed_by_an_abort_from_another_thread() {
    ranks_as_threads(2, |world| -> Outcome {
        let (stream, comm) = start(&world, |builder| builder)?;
        if world.rank() == 0 {
            let other = comm.clone();
            let aborting = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(200));
                other.abort("it is time")
            });
            let (error, took) = first(&comm, &stream);
            assert!(took < SOON, "{took:?}");
            assert!(
                matches!(error.kind(), ErrorKind::Aborted { .. }),
                "{error:#}"
            );
            assert!(format!("{error:#}").contains("it is time"), "{error:#}");
            aborting.join().expect("no panic")?;
        }
        assert!(fault(&comm).contains("it is time"));
        world.barrier("both heard")?;
        Ok(())
    });
}

#[test]
fn a_thread_inside_nccl_is_freed_by_the_abort_signal() {
    ranks_as_processes(2, |world| -> Outcome {
        let stop = AbortSignal::new();
        let (stream, comm) = start(&world, |builder| {
            builder.with(|comm| comm.abort_signals.push(stop.clone()))
        })?;
        if world.rank() == 0 {
            let given = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(200));
                stop.abort();
            });
            let (error, took) = first(&comm, &stream);
            assert!(took < SOON, "{took:?}");
            assert!(
                matches!(error.kind(), ErrorKind::Aborted { .. }),
                "{error:#}"
            );
            given.join().expect("no panic");
        }
        fault(&comm);
        world.barrier("both heard")?;
        Ok(())
    });
}

#[test]
fn a_thread_inside_nccl_is_freed_by_the_death_of_a_peer() {
    const RANKS: usize = 3;
    let test = name(&|| ());
    if let Some((_, world)) = apart::rank(&test, RANKS) {
        let (stream, comm) = start(&world, |builder| builder).expect("a communicator");
        println!("working");
        if world.rank() == 1 {
            std::thread::sleep(TIMEOUT);
        }
        let (error, took) = first(&comm, &stream);
        assert!(took < TIMEOUT / 2, "{took:?}");
        println!("error: {}", format!("{error:#}").replace('\n', " "));
        drop((comm, stream, world));
        assert!(nccl_emulator::violations().is_empty());
        return;
    }
    if !support::needs_processes(RANKS) {
        return;
    }
    let mut ranks = apart::start(&test, "", RANKS, &[]);
    apart::all_say(&mut ranks, "working");
    std::thread::sleep(Duration::from_millis(200));
    ranks.remove(1).kill();
    let killed = Instant::now();
    for mut rank in ranks {
        let said = rank.says("error: ");
        assert!(killed.elapsed() < SOON);
        assert!(
            said.contains("rank 1 (") && said.contains("is gone"),
            "{said}"
        );
        rank.succeeds(SOON);
    }
}

#[test]
fn aborts_at_random_moments_free_every_thread_and_use_nothing_after_its_end() {
    // On NVIDIA's library an abort takes half a second.
    let turns = if support::on_nvidias() { 20 } else { 200 };
    Ranks::new(2)
        .deadline(Duration::from_secs(150))
        .threads(move |world| -> Outcome {
            let stream = support::device(&world)?.new_stream()?;
            for turn in 0..turns {
                // The same on both ranks.
                let mut random = fastrand::Rng::with_seed(turn);
                let (aborts, comes) = (random.usize(..2), random.u8(..3));
                let after = Duration::from_micros(random.u64(..3000));
                let comm = world
                    .communicator("brief")
                    .stream(&stream)
                    .with(|comm| {
                        comm.timeouts.operation = TIMEOUT;
                        comm.launch_mode = Some(LaunchMode::BlockingChild);
                    })
                    .build();
                let comm = match comm {
                    Ok(comm) => comm,
                    // The other rank had the fault a little earlier.
                    Err(error) => {
                        assert!(format!("{error:#}").contains("at random"), "{error:#}");
                        world.barrier("next")?;
                        continue;
                    }
                };
                let begun = Instant::now();
                std::thread::scope(|scope| {
                    if world.rank() == aborts {
                        scope.spawn(|| {
                            std::thread::sleep(after);
                            let _ = comm.abort("at random");
                        });
                    }
                    // One of the two ranks does not enter, so that the other waits inside NCCL.
                    if usize::from(comes) == world.rank() {
                        return;
                    }
                    let mut y = stream.alloc_zeros::<f32>(64).expect("memory");
                    while begun.elapsed() < TIMEOUT {
                        let done = comm.all_reduce_in_place(&mut y, ReduceOp::Sum);
                        if done.and_then(|done| done.wait()).is_err() {
                            break;
                        }
                    }
                });
                assert!(begun.elapsed() < SOON, "turn {turn}: {:?}", begun.elapsed());
                drop(comm);
                world.barrier("next")?;
            }
            Ok(())
        });
}

#[test]
fn a_group_that_waits_for_one_communicator_ends_with_another_of_its_communicators() {
    ranks_as_threads(2, |world| -> Outcome {
        let (stream, one) = start(&world, |builder| builder)?;
        let two = one.split("other", Some(0), 0)?.expect("a colour was given");
        assert_eq!(
            two.launch_mode(),
            Some(LaunchMode::BlockingChild),
            "as its parent"
        );
        // After this, only the other communicator waits to connect.
        let mut y = stream.alloc_zeros::<f32>(4)?;
        one.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
        if world.rank() == 0 {
            let (mut x, begun) = (stream.alloc_zeros::<f32>(4)?, Instant::now());
            let error = std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(200));
                    one.abort("the one that does not wait")
                });
                nccl::group(|group| {
                    group.on(&one)?.all_reduce_in_place(&mut y, ReduceOp::Sum)?;
                    group.on(&two)?.all_reduce_in_place(&mut x, ReduceOp::Sum)
                })
                .map(drop)
            });
            let error = error.expect_err("it was aborted");
            assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
            assert!(
                matches!(error.kind(), ErrorKind::Aborted { .. }),
                "{error:#}"
            );
        }
        fault(&one);
        fault(&two);
        world.barrier("both heard")?;
        Ok(())
    });
}

#[test]
fn a_group_has_the_shortest_limit_of_its_communicators() {
    ranks_as_threads(2, |world| -> Outcome {
        let (stream, one) = start(&world, |builder| builder)?;
        let two = one.split("other", Some(0), 0)?.expect("a colour was given");
        if world.rank() == 0 {
            let timeout = Duration::from_millis(300);
            let (patient, impatient) = (one.clone(), two.within(timeout));
            let (mut x, mut y) = (stream.alloc_zeros::<f32>(4)?, stream.alloc_zeros::<f32>(4)?);
            let begun = Instant::now();
            let error = nccl::group(|group| {
                group
                    .on(&patient)?
                    .all_reduce_in_place(&mut y, ReduceOp::Sum)?;
                group
                    .on(&impatient)?
                    .all_reduce_in_place(&mut x, ReduceOp::Sum)
            })
            .map(drop)
            .expect_err("nobody else comes");
            assert!(error.is_timeout(), "{error:#}");
            assert!((timeout..SOON).contains(&begun.elapsed()));
        }
        fault(&one);
        fault(&two);
        world.barrier("both heard")?;
        Ok(())
    });
}

#[test]
fn communicators_of_both_modes_in_one_group_are_refused_before_nccl_is_asked() {
    ranks_as_threads(1, |world| -> Outcome {
        let (stream, blocks) = start(&world, |builder| builder)?;
        let other = world.communicator("polled").stream(&stream);
        let other = other
            .with(|comm| comm.launch_mode = Some(LaunchMode::NonBlocking))
            .build()?;
        for both in [[&blocks, &other], [&other, &blocks]] {
            let mut ys = [stream.alloc_zeros::<f32>(4)?, stream.alloc_zeros::<f32>(4)?];
            let error = nccl::group(|group| {
                for (comm, y) in both.into_iter().zip(&mut ys) {
                    group.on(comm)?.all_reduce_in_place(y, ReduceOp::Sum)?;
                }
                Ok(())
            })
            .map(drop)
            .expect_err("the modes differ");
            let text = format!("{error:#}");
            assert!(
                matches!(error.kind(), ErrorKind::InvalidConfig { .. }),
                "{text}"
            );
            assert!(
                text.contains("\"switched\" is of launch mode BlockingChild")
                    && text.contains("\"polled\" of NonBlocking"),
                "{text}"
            );
        }
        // Both still work.
        for comm in [blocks, other] {
            let mut y = stream.alloc_zeros::<f32>(4)?;
            comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
            comm.finalize()?;
        }
        Ok(())
    });
}

#[test]
fn ranks_that_choose_differently_all_hear_who_did() {
    ranks_as_processes(3, |world| -> Outcome {
        let stream = support::device(&world)?.new_stream()?;
        let mode = match world.rank() {
            1 => LaunchMode::BlockingChild,
            _ => LaunchMode::NonBlocking,
        };
        let begun = Instant::now();
        let builder = world.communicator("mixed").stream(&stream);
        let error = builder
            .with(|comm| comm.launch_mode = Some(mode))
            .build()
            .unwrap_err();
        assert!(begun.elapsed() < SOON);
        let text = format!("{error:#}");
        assert!(
            matches!(error.kind(), ErrorKind::InvalidConfig { .. }),
            "{text}"
        );
        let odd = if world.rank() == 1 {
            "rank 0 ("
        } else {
            "rank 1 ("
        };
        assert!(
            text.contains(odd) && text.contains("BlockingChild"),
            "{text}"
        );
        // The same for a split.
        let comm = world.communicator("all").stream(&stream).build()?;
        let split = comm.split_with("mixed part", Some(0), 0, |builder| {
            builder.with(|comm| comm.launch_mode = Some(mode))
        });
        let text = split.map(drop).unwrap_err().to_string();
        assert!(text.contains("BlockingChild"), "{text}");
        comm.finalize()?;
        Ok(())
    });
}

#[test]
fn a_rank_that_does_not_come_to_the_split_of_the_data_is_given_up_at_the_limit() {
    ranks_as_threads(2, |world| -> Outcome {
        let stream = support::device(&world)?.new_stream()?;
        // The ranks cannot tell each other which mode they choose.
        let builder = support::strangers(&world, "odd")?.stream(&stream);
        if world.rank() == 0 {
            let timeout = Duration::from_millis(500);
            let begun = Instant::now();
            let error = builder
                .with(|comm| {
                    comm.launch_mode = Some(LaunchMode::BlockingChild);
                    comm.timeouts.init = timeout;
                })
                .build()
                .unwrap_err();
            assert!(error.is_timeout(), "{error:#}");
            assert!((timeout..SOON).contains(&begun.elapsed()), "{error:#}");
            world.barrier("given up")?;
        } else {
            let comm = builder
                .with(|comm| comm.launch_mode = Some(LaunchMode::NonBlocking))
                .build()?;
            world.barrier("given up")?;
            comm.abort("the other one has")?;
        }
        Ok(())
    });
}

/// An abort that makes a thread return from NCCL ends kernels of other operations of the communicator as well.
#[test]
fn what_ends_because_another_call_was_too_long_is_no_success() {
    if !support::needs_emulator("messages whose first contact can be seen to wait") {
        return;
    }
    for _ in 0..5 {
        ranks_as_processes(2, |world| -> Outcome {
            let (stream, comm) = start(&world, |builder| builder)?;
            let mut y = stream.clone_htod(&[1f32; 1 << 10])?;
            comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
            world.barrier("connected")?;
            if world.rank() == 0 {
                // The other rank enters neither.
                let waiting = comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?;
                let other = comm.within(Duration::from_millis(300));
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        let stream = stream.context().new_stream().expect("a stream");
                        let x = stream.clone_htod(&[1u8; 8]).expect("memory");
                        let sent = other.on(&stream).group(|group| group.isend(&x, 1));
                        assert!(sent.is_err_and(|error| error.is_timeout()));
                    });
                    let begun = Instant::now();
                    while begun.elapsed() < TIMEOUT {
                        match waiting.is_complete() {
                            Ok(false) => std::hint::spin_loop(),
                            Ok(true) => panic!("nobody else was in it"),
                            Err(_) => return,
                        }
                    }
                    panic!("it does not end");
                });
            }
            fault(&comm);
            world.barrier("both heard")?;
            Ok(())
        });
    }
}

#[test]
fn the_default_is_a_blocking_child_and_a_world_can_have_another() {
    Ranks::new(1)
        .variable(support::LAUNCH_MODE, "default")
        .threads(|world| -> Outcome {
            let stream = support::device(&world)?.new_stream()?;
            let comm = world.communicator("as usual").stream(&stream).build()?;
            assert_eq!(comm.launch_mode(), Some(LaunchMode::BlockingChild));
            let world = world.with_launch_mode(LaunchMode::NonBlocking);
            let comm = world.communicator("polled").stream(&stream).build()?;
            assert_eq!(comm.launch_mode(), Some(LaunchMode::NonBlocking));
            let own = world.communicator("own").stream(&stream);
            let comm = own
                .with(|comm| comm.launch_mode = Some(LaunchMode::BlockingChild))
                .build()?;
            assert_eq!(comm.launch_mode(), Some(LaunchMode::BlockingChild));
            Ok(())
        });
}

#[test]
fn the_variable_sets_the_mode_where_the_program_sets_none() {
    for (value, mode) in [
        ("non-blocking", LaunchMode::NonBlocking),
        ("blocking-child", LaunchMode::BlockingChild),
    ] {
        Ranks::new(2)
            .variable(support::LAUNCH_MODE, "default")
            .variable("NCCL_RUN_LAUNCH_MODE", value)
            .threads(move |world| -> Outcome {
                let stream = support::device(&world)?.new_stream()?;
                let comm = world.communicator("as said").stream(&stream).build()?;
                assert_eq!(comm.launch_mode(), Some(mode));
                for asked in [LaunchMode::BlockingChild, LaunchMode::NonBlocking] {
                    let name = format!("asked for {asked}");
                    let own = world.communicator(&name).stream(&stream);
                    let comm = own.with(|comm| comm.launch_mode = Some(asked)).build()?;
                    assert_eq!(comm.launch_mode(), Some(asked));
                }
                Ok(())
            });
    }
    Ranks::new(1)
        .variable(support::LAUNCH_MODE, "default")
        .variable("NCCL_RUN_LAUNCH_MODE", "fast")
        .threads(|world| -> Outcome {
            let stream = support::device(&world)?.new_stream()?;
            let made = world.communicator("none").stream(&stream).build();
            let text = made.map(drop).unwrap_err().to_string();
            assert!(text.contains("NCCL_RUN_LAUNCH_MODE=fast"), "{text}");
            assert!(text.contains("blocking-child or non-blocking"), "{text}");
            Ok(())
        });
}

/// Log lines in which this process reports why its communicators are in another mode.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<String>>>);

impl<S: tracing::Subscriber> Layer<S> for Lines {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        if event.metadata().name() == "nccl.comm.launch_mode" {
            let mut line = String::new();
            event.record(
                &mut |field: &tracing::field::Field, value: &dyn std::fmt::Debug| {
                    let _ = write!(line, "{field}={value:?} ");
                },
            );
            self.0.lock().expect("no panic").push(line);
        }
    }
}

/// Only rank 1 has an obstacle; no rank asked for a mode.
fn agree_not_to_block(world: &World, older: bool) -> Outcome {
    let is_older = older && world.rank() == 1;
    let lines = Lines::default();
    let subscriber = tracing_subscriber::registry().with(lines.clone());
    tracing::subscriber::set_global_default(subscriber)?;
    let stream = support::device(world)?.new_stream()?;
    let library = match is_older {
        true => {
            // SAFETY: the emulator's library; the claimed version supports less than it does.
            let loaded = Box::leak(Box::new(unsafe { nccl_sys::Loader::new().load() }?));
            // SAFETY: as above.
            unsafe { nccl::Library::from_api(loaded.api, Version::new(2, 25, 1)) }?
        }
        false => nccl::Library::load()?,
    };
    let comm = world.communicator("agreed").stream(&stream);
    let comm = comm
        .with(|comm| {
            comm.library = Some(library.clone());
            comm.preflight = false;
        })
        .build()?;
    assert_eq!(comm.launch_mode(), Some(LaunchMode::NonBlocking));
    let mut y = stream.clone_htod(&[1f32])?;
    comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
    // A split asks for no mode either.
    let part = comm.split("part", Some(0), 0)?.expect("a color was given");
    assert_eq!(part.launch_mode(), Some(LaunchMode::NonBlocking));
    part.finalize()?;
    comm.finalize()?;
    let again = world.communicator("again").stream(&stream);
    let again = again
        .with(|comm| {
            comm.library = Some(library.clone());
            comm.preflight = false;
        })
        .build()?;
    again.finalize()?;
    // Each process logs once which rank had the obstacle, and why.
    let lines = lines.0.lock().expect("no panic").clone();
    let why = match older {
        true => "NCCL 2.25.1 is older than 2.26.2",
        false => "NCCL_COMM_BLOCKING=0 in",
    };
    assert!(
        matches!(&lines[..], [line] if line.contains("rank=1 ") && line.contains(why)),
        "{lines:?}"
    );
    // Where another rank requires the mode, all ranks get the error that this one cannot use it.
    let comm = world.communicator("insisting").stream(&stream);
    let comm = comm.with(|comm| {
        comm.library = Some(library.clone());
        comm.preflight = false;
    });
    let comm = match world.rank() {
        0 => comm.with(|comm| comm.launch_mode = Some(LaunchMode::BlockingChild)),
        _ => comm,
    };
    let text = comm.build().map(drop).unwrap_err().to_string();
    assert!(
        text.contains("rank 1 (") && text.contains("BlockingChild"),
        "{text}"
    );
    Ok(())
}

#[test]
fn ranks_agree_on_what_all_can_with_other_variables_and_releases() {
    for older in [false, true] {
        Ranks::new(2)
            .variable(support::LAUNCH_MODE, "default")
            .processes(move |world| -> Outcome {
                if world.rank() == 1 && !older {
                    // SAFETY: this process runs this test alone, and no other thread of it reads its environment now.
                    unsafe { std::env::set_var("NCCL_COMM_BLOCKING", "0") };
                }
                agree_not_to_block(&world, older)
            });
    }
}

#[test]
fn a_world_of_one_rank_without_nccl_knows_both_modes() {
    ranks_as_threads(1, |world| -> Outcome {
        let stream = support::device(&world)?.new_stream()?;
        let world = World::single().with_launch_mode(LaunchMode::BlockingChild);
        let comm = world.communicator("alone").stream(&stream).build()?;
        let mut y = stream.clone_htod(&[1.0f32, 2.0])?;
        comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
        comm.finalize()?;
        assert_eq!(stream.clone_dtoh(&y)?, [1.0, 2.0]);
        Ok(())
    });
}

#[test]
fn variables_that_contradict_a_mode_are_refused_with_what_to_unset() {
    for (variable, value) in [
        ("NCCL_COMM_BLOCKING", "1"),
        ("NCCL_COMM_BLOCKING", "0"),
        ("NCCL_COMM_SPLIT_SHARE_RESOURCES", "1"),
        ("NCCL_COMM_SPLIT_SHARE_RESOURCES", "0"),
    ] {
        Ranks::new(1)
            .variable(variable, value)
            .threads(move |world| -> Outcome {
                let error = start(&world, |builder| {
                    builder.with(|comm| comm.preflight = false)
                })
                .map(drop)
                .expect_err("it is refused");
                let text = format!("{error:#}");
                assert!(
                    text.contains(&format!("{variable}={value}"))
                        && text.contains(&format!("unset {variable}")),
                    "{text}"
                );
                Ok(())
            });
    }
}

#[test]
fn a_file_that_contradicts_a_mode_is_found_and_named() {
    for (variable, value, refused) in [
        ("NCCL_COMM_BLOCKING", "0", true),
        ("NCCL_COMM_SPLIT_SHARE_RESOURCES", "0", true),
        ("NCCL_DEBUG", "WARN", false),
    ] {
        let path = std::env::temp_dir().join(format!(
            "nccl-launch-mode-{variable}-{}.conf",
            std::process::id()
        ));
        std::fs::write(&path, format!("{variable}={value}\n")).expect("a file");
        Ranks::new(2)
            .variable("NCCL_CONF_FILE", &path)
            .processes(move |world| -> Outcome {
                let made = start(&world, |builder| builder);
                assert_eq!(made.is_err(), refused, "{variable}={value}");
                if let Err(error) = made {
                    let text = format!("{error:#}");
                    assert!(text.contains(&format!("{variable}={value}")), "{text}");
                    assert!(text.contains("BlockingChild"), "{text}");
                }
                Ok(())
            });
        std::fs::remove_file(&path).expect("it is there");
    }
}

#[test]
fn a_release_whose_aborts_cannot_be_relied_on_is_refused_with_what_is_needed() {
    if !support::needs_emulator("an older release") {
        return;
    }
    Ranks::new(1)
        .variable("NCCL_EMULATOR_VERSION", "2.25.1")
        .threads(|world| -> Outcome {
            let stream = support::device(&world)?.new_stream()?;
            let builder = world.communicator("old").stream(&stream);
            let error = builder
                .with(|comm| comm.launch_mode = Some(LaunchMode::BlockingChild))
                .build()
                .unwrap_err();
            let ErrorKind::Unsupported { needs, found, .. } = error.kind() else {
                return Err(error.into());
            };
            assert_eq!(
                (*needs, *found),
                (Version::new(2, 26, 2), Version::new(2, 25, 1))
            );
            world.communicator("old").stream(&stream).build()?;
            Ok(())
        });
}

#[test]
fn a_finalize_that_the_others_do_not_come_to_ends_at_its_limit() {
    ranks_as_threads(2, |world| -> Outcome {
        let timeout = Duration::from_millis(300);
        let (stream, comm) = start(&world, |builder| {
            builder.with(|comm| comm.timeouts.finalize = timeout)
        })?;
        let mut y = stream.alloc_zeros::<f32>(4)?;
        comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
        if world.rank() == 0 {
            let begun = Instant::now();
            let error = comm.finalize().unwrap_err();
            assert!(error.is_timeout(), "{error:#}");
            assert!((timeout..SOON).contains(&begun.elapsed()));
        }
        fault(&comm);
        world.barrier("both heard")?;
        Ok(())
    });
}

#[test]
fn a_finalize_is_ended_by_an_abort_from_another_thread() {
    ranks_as_threads(2, |world| -> Outcome {
        let (_stream, comm) = start(&world, |builder| {
            builder.with(|comm| comm.timeouts.finalize = TIMEOUT)
        })?;
        if world.rank() == 0 {
            let other = comm.clone();
            let aborting = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(200));
                other.abort("it is time")
            });
            let begun = Instant::now();
            let error = comm.finalize().unwrap_err();
            assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
            assert!(format!("{error:#}").contains("it is time"), "{error:#}");
            aborting.join().expect("no panic")?;
        }
        fault(&comm);
        world.barrier("both heard")?;
        Ok(())
    });
}

#[test]
fn a_capture_that_the_others_do_not_come_to_ends_at_its_limit() {
    ranks_as_threads(2, |world| -> Outcome {
        // The ranks cannot ask each other first whether all enter.
        let stream = support::device(&world)?.new_stream()?;
        let builder = support::strangers(&world, "alone")?.stream(&stream);
        let comm = builder
            .with(|comm| comm.launch_mode = Some(LaunchMode::BlockingChild))
            .build()?;
        if world.rank() == 0 {
            let timeout = Duration::from_millis(300);
            let (y, begun) = (stream.alloc_zeros::<f32>(4)?, Instant::now());
            let error = comm
                .within(timeout)
                .capture(y, |capture, y| {
                    capture.group(|group| group.all_reduce_in_place(y, ReduceOp::Sum))
                })
                .map(drop)
                .unwrap_err();
            assert!(error.is_timeout(), "{error:#}");
            assert!((timeout..SOON).contains(&begun.elapsed()));
        }
        world.barrier("given up")?;
        comm.abort("the other one has")?;
        Ok(())
    });
}

#[test]
fn a_call_that_does_not_come_back_after_all_ends_the_process_with_a_sentence() {
    const RANKS: usize = 2;
    let test = name(&|| ());
    if let Some((_, world)) = apart::rank(&test, RANKS) {
        let abort = Duration::from_millis(500);
        let (stream, comm) = start(&world, |builder| {
            builder.with(|comm| comm.timeouts.abort = abort)
        })
        .expect("a communicator");
        if world.rank() == 0 {
            // Not even an abort ends it.
            let _fault = faults::at_call("ncclAllReduce").hang();
            let timeout = Duration::from_millis(300);
            let (error, _) = first(&comm.within(timeout), &stream);
            println!("returned: {error:#}");
        } else {
            println!("heard: {}", fault(&comm));
        }
        return;
    }
    if !support::needs_emulator("a call that hangs on purpose") {
        return;
    }
    let mut ranks = apart::start(&test, "", RANKS, &[]);
    let said = ranks[1].says("heard: ");
    assert!(
        said.contains("rank 0") && said.contains("all_reduce #1"),
        "{said}"
    );
    let (rest, status) = ranks.remove(0).end(SOON);
    assert!(
        !status.success() && !rest.contains("returned"),
        "{status}: {rest}"
    );
}
