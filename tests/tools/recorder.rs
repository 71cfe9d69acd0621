//! The flight recorder: issued calls are found, in order, from any thread and at any time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nccl::cudarc::driver::CudaStream;
use nccl::recorder::{self, CallState, RecordedReduction, Recording};
use nccl::{Communicator, DataType, OperationKind, ReduceOp, World};
use nccl_tools::overhead::{Tracking, Workload};
use nccl_tools::queueing::Ending;

use crate::support::{self, ranks_as_threads};

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

fn start(world: &World, name: &str) -> Outcome<(Arc<CudaStream>, Communicator)> {
    let stream = support::device(world)?.new_stream()?;
    let comm = world.communicator(name).stream(&stream).build()?;
    Ok((stream, comm))
}

fn states(recording: &Recording) -> Vec<CallState> {
    recording.calls.iter().map(|call| call.state).collect()
}

fn every_call_leaves_what_it_was(world: World) -> Outcome {
    let (stream, comm) = start(&world, "fingerprints")?;
    let other = stream.context().new_stream()?;
    let (rank, next) = (world.rank(), (world.rank() + 1) % world.size());
    let x = stream.clone_htod(&[1.0f32; 6])?;
    let mut y = stream.alloc_zeros::<f32>(6)?;
    let mut z = other.alloc_zeros::<u8>(10)?;
    comm.all_reduce(&x, &mut y, ReduceOp::Max)?.wait()?;
    comm.on(&other).broadcast_in_place(&mut z, 1)?.wait()?;
    for _ in 0..2 {
        let group = comm.group(|group| {
            group.isend(x.slice(..5), next)?;
            group.irecv(y.slice_mut(..5), (rank + world.size() - 1) % world.size())
        })?;
        group.wait()?;
    }
    let recording = comm.recording();
    assert_eq!(recording.name, "fingerprints");
    assert_eq!((recording.rank, recording.world_size), (rank, world.size()));
    assert_eq!((&recording.life[..], &recording.reason), ("ready", &None));
    assert_eq!(recording.key.as_ref().map(String::len), Some(32));
    assert_eq!((recording.generation, &recording.members), (0, &None));
    let keys = world.all_gather("key", recording.key.as_deref().unwrap_or("").as_bytes())?;
    assert!(keys.iter().all(|key| *key == keys[0]), "{keys:?}");
    let namesake = world.communicator("fingerprints").stream(&stream).build()?;
    assert_ne!(namesake.recording().key, recording.key);
    assert_eq!(states(&recording), [CallState::Done; 4]);
    let [reduce, broadcast, _, group] = &recording.calls[..] else {
        return Err("four calls".into());
    };

    let operation = reduce.operations[0];
    assert_eq!(
        (reduce.sequence, reduce.kind),
        (1, OperationKind::AllReduce)
    );
    assert_eq!(
        (operation.kind, operation.count),
        (OperationKind::AllReduce, 6)
    );
    assert_eq!(operation.data_type, DataType::Float32);
    assert_eq!(
        operation.reduction,
        Some(RecordedReduction::Op(ReduceOp::Max))
    );
    assert_eq!((operation.peer, operation.root), (None, None));
    assert_eq!(reduce.stream, stream.cu_stream().addr() as u64);

    let operation = broadcast.operations[0];
    assert_eq!((operation.root, operation.count), (Some(1), 10));
    assert_eq!(
        (operation.data_type, operation.reduction),
        (DataType::UInt8, None)
    );
    assert_eq!(broadcast.stream, other.cu_stream().addr() as u64);
    assert!(reduce.since < broadcast.since && reduce.at < broadcast.at);

    let [send, recv] = group.operations[..] else {
        return Err("two messages".into());
    };
    assert_eq!((group.sequence, group.kind), (4, OperationKind::Group));
    assert_eq!(
        (send.kind, send.peer, send.count),
        (OperationKind::Send, Some(next), 5)
    );
    assert_eq!((send.message, recv.message), (Some(2), Some(2)));
    assert_eq!(recv.kind, OperationKind::Recv);
    comm.finalize()?;
    assert_eq!(comm.recording().life, "finalized");
    Ok(())
}

#[test]
fn a_call_leaves_its_number_kind_count_type_root_and_peers() {
    ranks_as_threads(3, every_call_leaves_what_it_was);
}

fn a_rank_that_waits_alone(world: World) -> Outcome {
    let (stream, comm) = start(&world, "alone")?;
    let mut y = stream.alloc_zeros::<f32>(4)?;
    comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
    if world.rank() == 1 {
        return Ok(world.barrier("seen")?);
    }
    let alone = comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?;
    assert!(alone.wait_timeout(Duration::from_millis(50)).is_err());
    assert_eq!(
        states(&comm.recording()),
        [CallState::Done, CallState::Issued]
    );
    comm.abort("nobody comes")?;
    let recording = comm.recording();
    assert_eq!(states(&recording), [CallState::Done, CallState::Aborted]);
    assert!(
        recording
            .reason
            .is_some_and(|reason| reason.contains("nobody comes"))
    );
    Ok(world.barrier("seen")?)
}

#[test]
fn an_abort_leaves_what_was_not_done() {
    ranks_as_threads(2, a_rank_that_waits_alone);
}

/// A communicator over the library that only queues.
fn queueing() -> Workload {
    Workload::new(Ending::Success, Tracking::Off).expect("a workload")
}

#[test]
fn the_last_calls_are_kept_and_those_that_are_lost_are_counted() {
    if !support::needs_emulator("a library of one's own") {
        return;
    }
    let mut workload = queueing();
    for _ in 0..700 {
        workload.safe_group(8).expect("a group");
    }
    let calls = workload.communicator().recording().calls;
    assert_eq!(calls.len(), 512);
    let numbers: Vec<u64> = calls.iter().map(|call| call.sequence).collect();
    assert_eq!(numbers, (189..=700).collect::<Vec<u64>>());
    let (early, late) = calls.split_at(512 - 2048 / 8);
    assert!(early.iter().all(|call| call.missing == 8));
    for call in late {
        assert_eq!((call.operations.len(), call.missing), (8, 0));
        assert_eq!(call.operations[7].peer, Some(3));
        assert_eq!(call.operations[7].message, Some(call.sequence as u32));
    }
}

#[test]
fn a_reader_never_sees_half_a_call_and_holds_nobody_up() {
    if !support::needs_emulator("a library of one's own") {
        return;
    }
    let mut workload = queueing();
    let comm = workload.communicator().clone();
    let stop = Arc::new(AtomicBool::new(false));
    let reader = {
        let stop = Arc::clone(&stop);
        std::thread::spawn(move || {
            let mut seen = 0;
            while !stop.load(Ordering::Relaxed) {
                let calls = comm.recording().calls;
                let rising = calls
                    .windows(2)
                    .all(|pair| pair[0].sequence + 1 == pair[1].sequence);
                assert!(rising, "calls are in order");
                for call in &calls {
                    // Calls number n, from 1, have 2 messages for odd n and 16 for even n.
                    let messages = if call.sequence % 2 == 1 { 2 } else { 16 };
                    assert_eq!(call.operations.len() + call.missing, messages);
                    for (at, operation) in call.operations.iter().enumerate() {
                        assert_eq!(operation.count, 4);
                        if call.missing == 0 {
                            assert_eq!(operation.peer, Some(at / 2));
                        }
                        if operation.peer == Some(0) {
                            assert_eq!(operation.message, Some(call.sequence as u32));
                        }
                        seen += 1;
                    }
                }
            }
            seen
        })
    };
    let until = Instant::now() + Duration::from_secs(2);
    while Instant::now() < until {
        workload.safe_group(2).expect("a group");
        workload.safe_group(16).expect("a group");
    }
    stop.store(true, Ordering::Relaxed);
    let seen: usize = reader.join().expect("the reader found nothing wrong");
    assert!(seen > 0, "the reader saw something");
}

#[test]
fn a_communicator_that_ended_can_still_be_read_and_notes_stand_beside_it() {
    ranks_as_threads(1, |world: World| -> Outcome {
        let (stream, comm) = start(&world, "gone")?;
        let mut y = stream.alloc_zeros::<i8>(3)?;
        comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
        recorder::note("step 17");
        world.phase("tear down");
        comm.finalize()?;
        drop(comm);
        let snapshot = recorder::snapshot();
        assert_eq!(snapshot.pid, std::process::id());
        let gone = snapshot.communicators.iter().find(|one| one.name == "gone");
        let gone = gone.ok_or("it is still there")?;
        assert_eq!(gone.life, "finalized");
        assert_eq!(gone.calls[0].operations[0].data_type, DataType::Int8);
        let notes: Vec<_> = snapshot
            .notes
            .iter()
            .map(|note| (&note.text[..], note.is_phase))
            .collect();
        assert!(
            notes.ends_with(&[("step 17", false), ("tear down", true)]),
            "{notes:?}"
        );
        Ok(())
    });
}
