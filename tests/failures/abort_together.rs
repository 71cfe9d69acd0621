//! The end of a communicator on one rank ends it on all ranks, soon, and all report the same cause.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl::cudarc::driver::{CudaContext, CudaStream};
use nccl::fault::FaultClass;
use nccl::{AbortSignal, Communicator, ErrorKind, ReduceOp, World};
use nccl_emulator::faults;
use nccl_tools::testing::name;

use crate::support::apart::{self, Apart};
use crate::support::sums::{all_reduce, work_until_the_end};
use crate::support::{self, Ranks, ranks_as_processes, ranks_as_threads};

type Outcome = Result<(), Box<dyn std::error::Error>>;

/// The users' documentation of these messages.
const PAGE: &str = include_str!("../../docs/start-up-faults.md");

/// Timeout of operations: reaching it means that no report of another rank ended the operation.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Time within which all ranks must have the fault: generous, for a loaded machine.
const SOON: Duration = Duration::from_secs(15);

fn start(world: &World, name: &str) -> Result<(Arc<CudaStream>, Communicator), nccl::Error> {
    let stream = support::device(world)
        .and_then(|context| context.new_stream())
        .expect("a stream");
    let comm = world
        .communicator(name)
        .stream(&stream)
        .with(|comm| comm.timeouts.operation = TIMEOUT)
        .build()?;
    Ok((stream, comm))
}

/// Kills one rank, and returns what the others report.
fn kill(ranks: Vec<Apart>, victim: usize) -> Vec<(String, Duration)> {
    let mut ranks = ranks;
    apart::all_say(&mut ranks, "working");
    let mut victim = ranks.remove(victim);
    let pid = victim.pid();
    victim.kill();
    let killed = Instant::now();
    ranks
        .into_iter()
        .map(|mut rank| {
            let cause = rank.says("ended: ");
            let took = killed.elapsed();
            assert!(cause.contains(&format!("pid {pid}) is gone")), "{cause}");
            let (_, status) = rank.end(SOON);
            assert!(status.success(), "{status}");
            (cause, took)
        })
        .collect()
}

#[test]
fn a_killed_rank_ends_all_others_at_once_and_is_named() {
    const RANKS: usize = 4;
    let test = name(&|| ());
    if let Some((role, world)) = apart::rank(&test, RANKS) {
        let (stream, comm) = start(&world, "doomed").expect("a communicator");
        // Also where the communicator alone keeps the connection open.
        let world = (role != "without world").then_some(world);
        work_until_the_end(&comm, &stream);
        drop((comm, world));
        return;
    }
    if !support::needs_processes(RANKS) {
        return;
    }
    for (victim, role) in [(2, "with world"), (2, "without world"), (0, "coordinator")] {
        let ended = kill(apart::start(&test, role, RANKS, &[]), victim);
        for (cause, took) in &ended {
            println!("{role}: {took:?}");
            assert!(*took < SOON, "{took:?}");
            assert_eq!(*cause, ended[0].0, "all tell the same");
            assert!(cause.contains(&format!("Gone rank {victim} (")), "{cause}");
            assert!(cause.contains("it died"), "{cause}");
        }
    }
}

#[test]
fn only_communicators_of_a_killed_rank_end() {
    const RANKS: usize = 3;
    let test = name(&|| ());
    if let Some((_, world)) = apart::rank(&test, RANKS) {
        let (stream, comm) = start(&world, "all").expect("a communicator");
        let color = u32::from(world.rank() == 2);
        let part = comm.split("part", Some(color), 0).expect("all split");
        let part = part.expect("a colour was given");
        work_until_the_end(&comm, &stream);
        all_reduce(&part, &stream).expect("its ranks live");
        assert!(part.fault().is_none());
        part.finalize().expect("both are there");
        return;
    }
    if support::needs_processes(RANKS) {
        kill(apart::start(&test, "", RANKS, &[]), 2);
    }
}

#[test]
fn a_split_of_ranks_ends_with_one_of_them() {
    const RANKS: usize = 4;
    let test = name(&|| ());
    if let Some((_, world)) = apart::rank(&test, RANKS) {
        let (stream, comm) = start(&world, "all").expect("a communicator");
        // In reverse order, so that its ranks differ from the world's.
        let part = comm.split("part", Some(0), -(world.rank() as i64));
        work_until_the_end(&part.expect("all split").expect("a colour"), &stream);
        return;
    }
    if support::needs_processes(RANKS) {
        for (cause, _) in kill(apart::start(&test, "", RANKS, &[]), 3) {
            let of_part = "rank 0 of \"part\" (world rank 3, ";
            assert!(cause.contains(of_part), "its rank in the split: {cause}");
        }
    }
}

#[test]
fn a_rank_that_is_killed_while_all_come_together_is_named() {
    const RANKS: usize = 3;
    let test = name(&|| ());
    if let Some((_, world)) = apart::rank(&test, RANKS) {
        let begun = Instant::now();
        let error = start(&world, "unborn").unwrap_err();
        assert!(begun.elapsed() < TIMEOUT / 2);
        println!("{}", format!("{error:#}").replace('\n', " "));
        return;
    }
    if !support::needs_emulator("a process that is killed in a chosen call") {
        return;
    }
    let fault = "call=ncclCommInitRankConfig,rank=1,action=kill";
    let mut ranks = apart::start(&test, "", RANKS, &[("NCCL_EMULATOR_FAULTS", fault)]);
    let _killed = ranks.remove(1);
    for mut rank in ranks {
        let said = rank.says("unborn");
        support::table::is_as_quoted(PAGE, "a rank dies in NCCL's init", &said);
    }
}

#[test]
fn a_process_that_exits_with_an_error_is_heard_of_with_its_status() {
    const RANKS: usize = 2;
    let test = name(&|| ());
    if let Some((_, world)) = apart::rank(&test, RANKS) {
        let (stream, comm) = start(&world, "left").expect("a communicator");
        all_reduce(&comm, &stream).expect("both are there");
        // An exit before that counts as the death of the rank.
        world.barrier("both know").expect("both are there");
        if world.rank() == 1 {
            std::process::exit(7);
        }
        work_until_the_end(&comm, &stream);
        return;
    }
    if support::needs_processes(RANKS) {
        let mut ranks = apart::start(&test, "", RANKS, &[]);
        let cause = ranks[0].says("ended: ");
        assert!(
            cause.contains("rank 1 (") && cause.contains("exit status 7"),
            "{cause}"
        );
    }
}

#[test]
fn a_rank_that_leaves_in_order_ends_nothing() {
    ranks_as_processes(3, |world| -> Outcome {
        let (stream, comm) = start(&world, "all")?;
        let color = (world.rank() < 2).then_some(0);
        let part = comm.split("part", color, 0)?;
        comm.finalize()?;
        let Some(part) = part else { return Ok(()) };
        drop(world);
        for _ in 0..100 {
            all_reduce(&part, &stream)?;
            std::thread::sleep(Duration::from_millis(3));
        }
        part.finalize()?;
        Ok(())
    });
}

/// Rank 0's all-reduce times out because the last rank does not enter it; the others wait, and all must report the same
/// cause.
fn one_does_not_come(world: World) -> Outcome {
    let (stream, comm) = start(&world, "late")?;
    all_reduce(&comm, &stream)?;
    let last = world.size() - 1;
    let begun = Instant::now();
    let error = if world.rank() == last {
        while comm.fault().is_none() {
            assert!(begun.elapsed() < SOON, "nobody told");
            std::thread::sleep(Duration::from_millis(1));
        }
        // This rank issued nothing, and finds its communicator ended.
        all_reduce(&comm, &stream).unwrap_err()
    } else {
        let comm = match world.rank() {
            0 => comm.within(Duration::from_secs(2)),
            _ => comm.clone(),
        };
        all_reduce(&comm, &stream).unwrap_err()
    };
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    let fault = error.fault().expect("a cause that all know").clone();
    assert_eq!(fault.class, FaultClass::TimedOut);
    // The first to detect it reports it, the waiting thread or the watchdog.
    assert_eq!(
        (fault.culprit(), fault.operation()),
        (Some(3), Some("all_reduce #2 of f32 × 4096, sum"))
    );
    assert!(fault.cause.contains("2s"), "{fault}");
    // The same kind on every rank, also where no timeout passed.
    assert!(error.is_timeout(), "{error:#}");
    assert!(
        matches!(error.kind(), ErrorKind::TimedOut { timeout, .. } if *timeout == Duration::from_secs(2)),
        "{error:?}"
    );
    let seen = format!("{error:#}").contains("\n  seen here:  ");
    assert_eq!(seen, world.rank() == 0, "{error:#}");
    let text = format!("{error:#}");
    assert!(
        text.contains("rank 3 (") && text.contains("rank 0 waited") && text.contains("2s"),
        "{text}"
    );
    assert!(text.contains("hint:"), "{text}");
    let all = world.all_gather("fault", fault.to_string().as_bytes())?;
    assert!(all.iter().all(|other| *other == all[0]), "{all:?}");
    assert_eq!(comm.fault().as_ref(), Some(&fault));
    assert_eq!(world.fault().as_ref(), Some(&fault));
    // The explanation also has which rank waited for which.
    let explained = fault.explain();
    for part in [
        "  root cause: rank 3 (",
        "its last operation on \"late\" was all_reduce #1, ",
        "\n  hint: ",
    ] {
        assert!(explained.contains(part), "{explained}");
    }
    assert!(
        explained.contains("ranks 0-2 were waiting in all_reduce #2"),
        "{explained}"
    );
    let all = world.all_gather("explained", explained.as_bytes())?;
    assert!(all.iter().all(|other| *other == all[0]), "{all:?}");
    assert!(text.lines().count() <= 9, "{text}");
    let line = error.to_string();
    assert_eq!(line.lines().count(), 1, "{line}");
    let prefix = line.find("nccl: all_reduce #2");
    assert!(
        prefix == Some(0) && line.contains("root cause: ") && line.contains("rank 3 ("),
        "{line}"
    );
    assert!(std::error::Error::source(&error).is_none(), "{error:#}");
    Ok(())
}

#[test]
fn a_rank_that_does_not_come_is_the_cause_on_all_threads() {
    ranks_as_threads(4, one_does_not_come);
}

#[test]
fn a_rank_that_does_not_come_is_the_cause_on_all_processes() {
    ranks_as_processes(4, one_does_not_come);
}

/// The same text in two generations is not the same fault.
#[test]
fn faults_and_errors_say_of_which_generation_they_are() {
    ranks_as_processes(2, |world| -> Outcome {
        for generation in 0..2 {
            let next;
            let world = match generation {
                0 => &world,
                _ => {
                    next = world.next_generation(TIMEOUT)?;
                    &next
                }
            };
            let (stream, comm) = start(world, "again")?;
            all_reduce(&comm, &stream)?;
            world.barrier("all are done")?;
            if world.rank() == 1 {
                comm.abort("enough")?;
            }
            let error = all_reduce(&comm, &stream).unwrap_err();
            let fault = error.fault().expect("a cause that all know");
            assert_eq!(
                (fault.culprit(), fault.generation),
                (Some(1), generation),
                "{fault}"
            );
            assert_eq!(
                fault.to_string().contains("generation 1)"),
                generation == 1,
                "{fault}"
            );
            let operation = error.operation().expect("an operation");
            assert_eq!(operation.generation, generation);
            let text = operation.to_string();
            assert_eq!(
                text.contains(", 2 ranks, generation 1)"),
                generation == 1,
                "{text}"
            );
            assert_eq!(comm.recording().generation, generation);
        }
        Ok(())
    });
}

#[test]
fn ranks_that_fail_at_the_same_time_tell_one_cause() {
    Ranks::new(4).processes(|world| -> Outcome {
        for round in 0..8 {
            let (stream, comm) = start(&world, "race")?;
            all_reduce(&comm, &stream)?;
            world.barrier("ready")?;
            let comm = comm.within(Duration::from_millis(50));
            let error = match world.rank() {
                3 => loop {
                    // The fault arrives without any call on the communicator.
                    if let Some(fault) = comm.fault() {
                        break fault;
                    }
                    std::thread::sleep(Duration::from_millis(1));
                },
                _ => all_reduce(&comm, &stream)
                    .unwrap_err()
                    .fault()
                    .expect("a cause")
                    .clone(),
            };
            let all = world.all_gather("fault", format!("{error:#}").as_bytes())?;
            assert!(
                all.iter().all(|other| *other == all[0]),
                "round {round}: {all:?}"
            );
        }
        Ok(())
    });
}

#[test]
fn what_a_program_or_a_signal_ends_is_ended_on_all_with_its_reason() {
    ranks_as_threads(3, |world| -> Outcome {
        let stream = support::device(&world)?.new_stream()?;
        for by_signal in [false, true] {
            let stop = AbortSignal::new();
            let comm = world
                .communicator("stop")
                .stream(&stream)
                .with(|comm| {
                    comm.timeouts.operation = TIMEOUT;
                    comm.abort_signals.push(stop.clone());
                })
                .build()?;
            all_reduce(&comm, &stream)?;
            let begun = Instant::now();
            let error = if world.rank() == 1 {
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        std::thread::sleep(Duration::from_millis(100));
                        match by_signal {
                            true => stop.abort(),
                            false => comm.abort("tired of waiting").expect("in time"),
                        }
                    });
                    // Rank 2 does not enter.
                    all_reduce(&comm, &stream).unwrap_err()
                })
            } else if world.rank() == 0 {
                all_reduce(&comm, &stream).unwrap_err()
            } else {
                while comm.fault().is_none() && begun.elapsed() < SOON {
                    std::thread::sleep(Duration::from_millis(1));
                }
                all_reduce(&comm, &stream).unwrap_err()
            };
            assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
            let fault = error.fault().expect("a cause");
            assert_eq!(
                (fault.culprit(), fault.class),
                (Some(1), FaultClass::Asked),
                "{fault}"
            );
            let word = if by_signal {
                "signal"
            } else {
                "tired of waiting"
            };
            assert!(format!("{error:#}").contains(word), "{error:#}");
            assert!(
                matches!(error.kind(), ErrorKind::Aborted { .. }),
                "{error:#}"
            );
            world.barrier("next")?;
        }
        Ok(())
    });
}

#[test]
fn plans_and_requests_that_are_awaited_or_asked_end_as_well() {
    ranks_as_threads(4, |world| -> Outcome {
        let (stream, comm) = start(&world, "plans")?;
        let gradients = stream.alloc_zeros::<f32>(256)?;
        let mut plan = comm.capture(gradients, |capture, gradients| {
            capture.group(|group| group.all_reduce_in_place(gradients, ReduceOp::Sum))
        })?;
        plan.launch()?.wait()?;
        let begun = Instant::now();
        let error = match world.rank() {
            0 => {
                world.barrier("launched")?;
                comm.abort("enough")?;
                plan.launch().unwrap_err()
            }
            1 => {
                let done = plan.launch()?;
                world.barrier("launched")?;
                done.wait().unwrap_err()
            }
            2 => {
                let done = plan.launch()?;
                world.barrier("launched")?;
                loop {
                    match done.is_complete() {
                        Ok(_) => std::thread::sleep(Duration::from_millis(1)),
                        Err(error) => break error,
                    }
                }
            }
            _ => {
                let runtime = tokio::runtime::Builder::new_current_thread().build()?;
                let done = plan.launch()?;
                world.barrier("launched")?;
                runtime.block_on(done).unwrap_err()
            }
        };
        assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
        let fault = error.fault().expect("a cause");
        assert_eq!((fault.culprit(), &*fault.cause), (Some(0), "enough"));
        // The buffers come back when nothing can write into them any more.
        let buffers = plan.into_buffers()?;
        assert_eq!(stream.clone_dtoh(&buffers)?.len(), 256);
        Ok(())
    });
}

#[test]
fn ranks_of_one_thread_end_together() {
    if !support::needs_devices(2) {
        return;
    }
    ranks_as_threads(2, |world| -> Outcome {
        if world.rank() == 1 {
            world.barrier("end")?;
            return Ok(());
        }
        let device = |ordinal| CudaContext::new(ordinal)?.new_stream();
        let streams = [device(0)?, device(1)?];
        let comms = Communicator::init_all_with("both", &streams, |builder| {
            builder.with(|comm| comm.timeouts.operation = TIMEOUT)
        })?;
        nccl::group(|group| comms.iter().try_for_each(|comm| group.on(comm).map(drop)))?.wait()?;
        let begun = Instant::now();
        // Rank 0 does not enter, because its calls come from this same thread.
        let error = all_reduce(&comms[1].within(Duration::from_millis(100)), &streams[1]);
        let error = error.unwrap_err();
        assert!(error.is_timeout(), "{error:#}");
        let other = all_reduce(&comms[0], &streams[0]).unwrap_err();
        assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
        assert_eq!(other.fault(), error.fault());
        // The culprit is the rank that did not enter.
        assert_eq!(
            other.fault().and_then(nccl::fault::Fault::culprit),
            Some(0),
            "{other}"
        );
        world.barrier("end")?;
        Ok(())
    });
}

#[test]
fn an_error_is_handed_out_when_no_peer_can_write_any_more() {
    if !support::needs_emulator("a peer that writes late on purpose") {
        return;
    }
    // Both are measured from about the moment at which rank 0 gives up.
    const GIVES_UP: Duration = Duration::from_millis(200);
    const WRITES: Duration = Duration::from_millis(1000);
    const ABORTS: Duration = Duration::from_millis(1800);
    const WORDS: usize = 1 << 10;
    let ranks = Ranks::new(2).variable("NCCL_EMULATOR_LATE_WRITES", "1");
    ranks.processes(|world| -> Outcome {
        let (stream, comm) = start(&world, "late writer")?;
        let peer = 1 - world.rank();
        let x = stream.clone_htod(&[7u32; WORDS])?;
        let mut y = stream.alloc_zeros::<u32>(WORDS)?;
        // Connects the ranks, so that later operations wait on the device.
        comm.group(|group| {
            group.isend(&x, peer)?;
            group.irecv(&mut y, peer)
        })?
        .wait()?;
        stream.memset_zeros(&mut y)?;
        stream.synchronize()?;
        world.barrier("connected")?;
        if world.rank() == 1 {
            // The message is delayed, and the abort of this rank's NCCL takes long.
            let _slow = faults::at_operation("Send").delay(WRITES);
            let _slower = faults::at_call("ncclCommAbort").delay(ABORTS);
            let sent = comm.group(|group| group.isend(&x, 0))?;
            world.barrier("sent")?;
            let error = sent.wait().unwrap_err();
            let fault = error.fault().ok_or_else(|| format!("{error:#}"))?;
            assert_eq!(
                (fault.culprit(), fault.reported_by()),
                (None, Some(0)),
                "{error:#}"
            );
        } else {
            world.barrier("sent")?;
            let begun = Instant::now();
            let waiting = comm
                .within(GIVES_UP)
                .group(|group| group.irecv(&mut y, 1))?;
            waiting.wait().unwrap_err();
            let took = begun.elapsed();
            // The point of this test: the peer did write after this rank's abort.
            assert_eq!(
                stream.clone_dtoh(&y)?,
                [7; WORDS],
                "the peer wrote when it was expected to"
            );
            // The error is returned after the peer's kernels have ended; the peer's abort need not have returned.
            assert!(took > GIVES_UP, "{took:?}");
            stream.memset_zeros(&mut y)?;
            stream.synchronize()?;
            std::thread::sleep(WRITES + ABORTS);
            assert_eq!(
                stream.clone_dtoh(&y)?,
                [0; WORDS],
                "somebody wrote into memory of this rank"
            );
        }
        world.barrier("end")?;
        Ok(())
    });
}

#[test]
fn a_rank_that_does_not_confirm_delays_the_error_by_the_bound_and_is_named() {
    const RANKS: usize = 3;
    const BOUND: Duration = Duration::from_millis(800);
    let test = name(&|| ());
    if let Some((_, world)) = apart::rank(&test, RANKS) {
        let stream = support::device(&world).unwrap().new_stream().unwrap();
        let comm = world
            .communicator("stopped")
            .stream(&stream)
            .with(|comm| comm.timeouts.operation = TIMEOUT);
        let comm = comm
            .with(|comm| comm.timeouts.confirm = BOUND)
            .build()
            .unwrap();
        all_reduce(&comm, &stream).unwrap();
        println!("ready");
        // Until the test has stopped one rank.
        std::io::stdin().read_line(&mut String::new()).unwrap();
        let begun = Instant::now();
        let comm = match world.rank() {
            0 | 1 => comm.within(Duration::from_millis(300)),
            _ => comm,
        };
        let error = all_reduce(&comm, &stream).unwrap_err();
        println!("ended after {} ms", begun.elapsed().as_millis());
        println!("error: {}", format!("{error:#}").replace('\n', " "));
        return;
    }
    if !support::needs_processes(RANKS) {
        return;
    }
    for stopped in [2, 0] {
        let mut ranks = apart::start(&test, &stopped.to_string(), RANKS, &[]);
        for rank in &mut ranks {
            rank.says("ready");
        }
        ranks[stopped].stop();
        for rank in &mut ranks {
            rank.go_on();
        }
        let pid = ranks[stopped].pid();
        for (number, rank) in ranks.iter_mut().enumerate() {
            if number == stopped {
                continue;
            }
            let took = rank.says("ended after");
            let millis = took
                .split(' ')
                .nth(2)
                .and_then(|number| number.parse().ok());
            let took = Duration::from_millis(millis.expect("a number"));
            let error = rank.says("error:");
            println!("{stopped} stopped: {took:?} {error:#}");
            let who = format!("pid {pid}) did not confirm within 800ms");
            // Rank 2 waits for the report that rank 0 would forward.
            assert!(error.contains(&who), "{error:#}");
            assert!(took > BOUND && took < SOON, "{took:?}");
            if stopped == 0 {
                break;
            }
        }
        ranks[stopped].resume();
        if stopped == 2 {
            let error = ranks[2].says("error:");
            assert!(
                error.contains("300ms"),
                "it hears the cause as well: {error:#}"
            );
        }
    }
}
