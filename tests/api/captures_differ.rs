//! Ranks that are about to capture different operations get an error before NCCL is called, all the same one.

use std::time::{Duration, Instant};

use nccl::{Communicator, ErrorKind, OperationKind, ReduceOp, World};
use nccl_emulator::faults;

use crate::support::{self, Ranks, ranks_as_processes, ranks_as_threads};

type Outcome = Result<(), Box<dyn std::error::Error>>;

/// Far below the timeout of an operation.
const SOON: Duration = Duration::from_secs(10);

fn start(world: &World) -> Result<Communicator, Box<dyn std::error::Error>> {
    let stream = support::device(world)?.new_stream()?;
    let comm = world.communicator("test").stream(&stream);
    Ok(comm
        .with(|comm| comm.timeouts.operation = Duration::from_secs(60))
        .build()?)
}

/// Asserts that the communicator still works.
fn is_usable(comm: &Communicator) -> Outcome {
    let y = comm.stream().clone_htod(&[1.0f32])?;
    let mut plan = comm.capture(y, |capture, y| {
        capture.group(|group| group.all_reduce_in_place(y, ReduceOp::Sum))
    })?;
    plan.launch()?.wait()?;
    let sum = comm.stream().clone_dtoh(&plan.views())?;
    assert_eq!(sum, [comm.world_size() as f32]);
    Ok(())
}

#[test]
fn with_the_check_on_calls_that_differ_are_the_error_of_all_and_nothing_is_launched() {
    let check = Ranks::new(3).variable("NCCL_RUN_CHECK", "1");
    check.processes(|world| -> Outcome {
        let comm = start(&world)?;
        let is_odd = world.rank() == 1;
        let begun = Instant::now();
        let mut y = comm.stream().clone_htod(&[1.0f32; 8])?;
        let reduction = if is_odd { ReduceOp::Max } else { ReduceOp::Sum };
        // NCCL would return a wrong result without an error.
        let differs = comm.all_reduce_in_place(&mut y, reduction).unwrap_err();
        // And this would hang: rank 1 sends 3 to every rank, and the others expect 2.
        let x = comm.stream().alloc_zeros::<f32>(9)?;
        let mut z = comm.stream().alloc_zeros::<f32>(6)?;
        let send = if is_odd { [3, 2, 3] } else { [2, 2, 2] };
        let sent = x.slice(..send.iter().sum::<usize>());
        let expects = comm.all_to_all_v(&sent, &send, &mut z, &[2, 2, 2]);
        assert!(begun.elapsed() < SOON);
        let ErrorKind::CallsDiffer { number, difference } = differs.kind() else {
            return Err(differs.into());
        };
        assert_eq!(*number, 1);
        assert!(
            difference.contains("rank 1 (") && difference.contains("(max)"),
            "{difference}"
        );
        let expects = expects.unwrap_err();
        let said = expects.to_string();
        assert!(
            said.contains("from rank 1 (") && said.contains("3 f32"),
            "{said}"
        );
        let all = world.all_gather("said", differs.kind().to_string().as_bytes())?;
        assert!(all.iter().all(|other| *other == all[0]), "{all:?}");
        // The ranks' data is unchanged, and the next matching call succeeds.
        assert!(comm.fault().is_none());
        comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
        assert_eq!(comm.stream().clone_dtoh(&y)?, [3.0; 8]);
        Ok(())
    });
}

#[test]
fn what_the_check_takes_counts_against_the_limit_of_the_call() {
    if !support::needs_emulator("a call that is delayed on purpose") {
        return;
    }
    let check = Ranks::new(2).variable("NCCL_RUN_CHECK", "1");
    check.processes(|world| -> Outcome {
        let timeout = Duration::from_secs(2);
        let stream = support::device(&world)?.new_stream()?;
        let comm = world
            .communicator("test")
            .stream(&stream)
            .with(|comm| comm.timeouts.operation = timeout);
        let comm = comm.build()?;
        let (x, mut y) = (stream.alloc_zeros::<u8>(8)?, stream.alloc_zeros::<u8>(8)?);
        let mut z = stream.alloc_zeros::<u8>(8)?;
        comm.all_reduce_in_place(&mut z, ReduceOp::Sum)?.wait()?;
        world.barrier("both")?;
        if world.rank() == 1 {
            std::thread::sleep(timeout / 2);
            // The other rank waits inside NCCL, to be connected.
            faults::at_call("ncclSend").delay(timeout * 2).keep();
        }
        let issued = comm.group(|group| {
            group.isend(&x, 1 - world.rank())?;
            group.irecv(&mut y, 1 - world.rank())?;
            group.all_reduce_in_place(&mut z, ReduceOp::Sum)
        });
        let error = issued.map(drop).unwrap_err();
        if world.rank() == 0 {
            // The guard of the call reports it, at the timeout; the watchdog ends it later, after it has queried the
            // other rank.
            let kind = error.local_kind().unwrap_or(error.kind());
            let ErrorKind::TimedOut { what, .. } = kind else {
                return Err(error.into());
            };
            assert_eq!(what, "putting the operation on its stream", "{error:#}");
            let took = error.operation().ok_or("an operation")?.elapsed;
            assert!(timeout <= took && took < timeout * 3 / 2, "{took:?}");
        }
        world.barrier("over")?;
        Ok(())
    });
}

fn difference(error: &nccl::Error, plan: u64) -> &str {
    assert_eq!(
        error.operation().map(|o| o.kind),
        Some(OperationKind::Capture)
    );
    match error.kind() {
        ErrorKind::CaptureDiffers {
            plan: number,
            difference,
        } => {
            assert_eq!(*number, plan);
            difference
        }
        other => panic!("{other}"),
    }
}

#[test]
fn other_parts_on_one_rank_are_the_error_of_all_and_end_nothing() {
    ranks_as_processes(3, |world| -> Outcome {
        let comm = start(&world)?;
        let y = comm.stream().alloc_zeros::<f32>(8)?;
        let error = comm
            .capture(y, |capture, mut y| {
                for group in 0..3 {
                    capture.group(|group| group.all_reduce_in_place(&mut y, ReduceOp::Sum))?;
                    if group == usize::from(world.rank() == 1) {
                        capture.next_part();
                    }
                }
                Ok(())
            })
            .unwrap_err();
        let text = difference(&error, 1);
        assert!(text.contains("differently: rank 0 ("), "{text}");
        assert!(
            text.contains(") into 1 + 2, ") && text.contains(") into 2 + 1, "),
            "{text}"
        );
        let all = world.all_gather("texts", text.as_bytes())?;
        assert!(all.iter().all(|other| *other == all[0]), "{all:?}");
        is_usable(&comm)
    });
}

#[test]
fn another_length_on_one_rank_is_the_error_of_all_and_ends_nothing() {
    ranks_as_processes(3, |world| -> Outcome {
        let comm = start(&world)?;
        is_usable(&comm)?;
        let len = if world.rank() == 1 { 1024 } else { 2048 };
        let memory = |len| comm.stream().alloc_zeros::<f32>(len);
        let begun = Instant::now();
        let error = comm
            .capture((memory(8)?, memory(len)?), |capture, (x, y)| {
                capture.group(|group| group.broadcast_in_place(x, 0))?;
                capture.group(|group| group.all_reduce_in_place(y, ReduceOp::Sum))
            })
            .unwrap_err();
        assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
        let text = difference(&error, 2);
        let who = "pid ";
        assert!(text.starts_with("rank 1 (") && text.contains(who), "{text}");
        let what = "captured all_reduce of 1024 f32 (sum) as operation 2 of 2; the others all_reduce of 2048 f32 (sum)";
        assert!(text.ends_with(what), "{text}");
        // The same on all ranks.
        let all = world.all_gather("texts", text.as_bytes())?;
        assert!(all.iter().all(|other| other == &all[0]), "{all:?}");
        is_usable(&comm)?;
        comm.finalize()?;
        Ok(())
    });
}

#[test]
fn messages_that_do_not_meet_are_named_with_both_sides() {
    ranks_as_threads(3, |world| -> Outcome {
        let comm = start(&world)?;
        let own = comm.rank();
        let memory = |len| comm.stream().alloc_zeros::<f32>(len);
        // Rank 2 expects less of rank 1 than rank 1 sends.
        let len = if own == 2 { 16 } else { 64 };
        let error = comm
            .capture((memory(64)?, memory(len)?), |capture, (x, y)| {
                capture.group(|group| {
                    group.isend(&x, (own + 1) % 3)?;
                    group.irecv(y, (own + 2) % 3)
                })
            })
            .unwrap_err();
        let text = difference(&error, 1);
        assert!(text.contains("of message 1 from rank 1 ("), "{text}");
        assert!(
            text.contains("64 f32 (256 bytes, operation 1) are sent"),
            "{text}"
        );
        assert!(
            text.contains("16 f32 (64 bytes, operation 2) received"),
            "{text}"
        );
        is_usable(&comm)?;
        Ok(())
    });
}

/// The ranks of a split differ from those of the world, and the world may be dropped.
#[test]
fn ranks_of_a_split_compare_among_themselves_also_without_their_world() {
    ranks_as_processes(3, |world| -> Outcome {
        let comm = start(&world)?;
        let own = world.rank();
        let part = comm.split("part", Some(u32::from(own == 2)), -(own as i64))?;
        let part = part.ok_or("a colour was given")?;
        world.barrier("made")?;
        drop((world, comm));
        is_usable(&part)?;
        if own == 2 {
            return Ok(());
        }
        let kind = if own == 0 {
            ReduceOp::Sum
        } else {
            ReduceOp::Max
        };
        let error = part
            .capture(part.stream().alloc_zeros::<u8>(8)?, |capture, y| {
                capture.group(|group| group.all_reduce_in_place(y, kind))
            })
            .unwrap_err();
        let text = difference(&error, 2);
        // Rank 0 of the world is rank 1 of the part, whose order is reversed.
        assert!(
            text.starts_with("rank 1 (") && text.contains("u8 (sum)"),
            "{text}"
        );
        assert!(
            text.ends_with("the others all_reduce of 8 u8 (max)"),
            "{text}"
        );
        is_usable(&part)?;
        Ok(())
    });
}

#[test]
fn a_rank_whose_closure_fails_is_the_reason_of_all_at_once() {
    ranks_as_threads(2, |world| -> Outcome {
        let comm = start(&world)?;
        let begun = Instant::now();
        let y = comm.stream().alloc_zeros::<f32>(8)?;
        let error = comm
            .capture(y, |capture, mut y| {
                if comm.rank() == 1 {
                    return capture.group(|group| group.irecv(&mut y, 9));
                }
                capture.group(|group| group.all_reduce_in_place(y, ReduceOp::Sum))
            })
            .unwrap_err();
        assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
        if comm.rank() == 1 {
            assert!(
                matches!(error.kind(), ErrorKind::NoSuchRank { .. }),
                "{error:#}"
            );
        } else {
            let text = difference(&error, 1);
            assert!(
                text.starts_with("rank 1 (") && text.contains("captured nothing, because"),
                "{text}"
            );
            assert!(text.contains('9'), "{text}");
        }
        is_usable(&comm)?;
        Ok(())
    });
}

#[test]
fn a_rank_that_does_not_come_is_named_at_the_limit() {
    ranks_as_processes(3, |world| -> Outcome {
        let timeout = Duration::from_secs(2);
        let comm = start(&world)?;
        if world.rank() == 1 {
            world.barrier("given up")?;
            // It enters too late, and gets the same error.
        }
        let begun = Instant::now();
        let impatient = comm.within(timeout);
        let y = comm.stream().alloc_zeros::<f32>(8)?;
        let error = impatient
            .capture(y, |capture, y| {
                capture.group(|group| group.all_reduce_in_place(y, ReduceOp::Sum))
            })
            .unwrap_err();
        assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
        assert!(error.is_timeout(), "{error:#}");
        let text = format!("{error:#}");
        assert!(
            text.contains("the capture of plan 1 is missing rank 1 ("),
            "{text}"
        );
        if world.rank() != 1 {
            world.barrier("given up")?;
        }
        is_usable(&comm)?;
        Ok(())
    });
}

#[test]
fn an_abort_ends_the_wait_for_the_others() {
    ranks_as_threads(2, |world| -> Outcome {
        let comm = start(&world)?;
        let begun = Instant::now();
        if world.rank() == 1 {
            std::thread::sleep(Duration::from_millis(200));
            comm.abort("enough")?;
        } else {
            let y = comm.stream().alloc_zeros::<f32>(8)?;
            let error = comm
                .capture(y, |capture, y| {
                    capture.group(|group| group.all_reduce_in_place(y, ReduceOp::Sum))
                })
                .unwrap_err();
            assert!(
                matches!(error.kind(), ErrorKind::Aborted { .. }),
                "{error:#}"
            );
            assert!(
                error.fault().is_some_and(|fault| fault.cause == "enough"),
                "{error:#}"
            );
        }
        assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
        world.barrier("over")?;
        Ok(())
    });
}

/// Measures the cost: `cargo test --release -p nccl-tests --test api -- --nocapture --ignored captures_differ::`.
#[test]
#[ignore = "a measurement"]
fn the_comparison_takes_as_long_as_an_exchange() {
    let ended = Ranks::new(2).outcome(|world| -> Outcome {
        let stream = support::device(&world)?.new_stream()?;
        let compared = world.communicator("compared").stream(&stream).build()?;
        let alone = support::strangers(&world, "alone")?
            .stream(&stream)
            .build()?;
        let mut took = Vec::new();
        for comm in [&compared, &alone] {
            let mut each = Vec::new();
            for _ in 0..200 {
                world.barrier("next")?;
                let y = stream.alloc_zeros::<f32>(8)?;
                let begun = Instant::now();
                let plan = comm.capture(y, |capture, y| {
                    capture.group(|group| group.all_reduce_in_place(y, ReduceOp::Sum))
                })?;
                each.push(begun.elapsed());
                drop(plan);
            }
            each.sort_unstable();
            took.push(each[each.len() / 2]);
        }
        println!("compared {:?}, not compared {:?}", took[0], took[1]);
        Ok(())
    });
    support::expect_success(&ended);
    let lines = ended.ranks.iter().flat_map(|rank| &rank.stdout);
    lines
        .filter(|line| line.contains("not compared"))
        .for_each(|line| println!("{line}"));
}
