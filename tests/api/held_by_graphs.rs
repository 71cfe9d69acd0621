//! Graphs that hold a communicator: the report of an abort that waits for them, and what it leaves behind.

use std::time::{Duration, Instant};

use nccl::cudarc::driver::sys;
use nccl::{Communicator, CommunicatorState, OperationKind, ReduceOp, World};

use crate::support::{self, ranks_as_processes, ranks_as_threads};

type Outcome = Result<(), Box<dyn std::error::Error>>;

const SOON: Duration = Duration::from_secs(10);
const ABORT: Duration = Duration::from_millis(500);

/// Code outside this crate captured operations of the communicator through NCCL's pointer, into a graph unknown to this crate.
#[test]
fn a_graph_that_was_captured_elsewhere_is_said_to_be_possible_and_the_communicator_is_leaked() {
    // In one process only the abort of the last rank would wait.
    ranks_as_processes(2, |world| -> Outcome {
        let stream = support::device(&world)?.new_stream()?;
        let comm = support::strangers(&world, "held")?.stream(&stream);
        let comm = comm.with(|comm| comm.timeouts.abort = ABORT).build()?;
        let raw = comm.as_raw().ok_or("it is ready")?;
        let mut y = stream.alloc_zeros::<f32>(8)?;
        // Connects the ranks, so that the call below returns at once.
        comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
        let address =
            nccl::cudarc::driver::DevicePtr::device_ptr(&y, &stream).0 as *mut std::ffi::c_void;
        // SAFETY: loads what is loaded already.
        let loaded = unsafe { nccl_sys::Loader::new().load() }?;
        let reduce = loaded.api.ncclAllReduce.ok_or("every release has it")?;
        stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
        // SAFETY: the buffer outlives the graph, which is never launched, and no other call is under way.
        let code = unsafe {
            reduce(
                address,
                address,
                8,
                nccl_sys::ncclDataType_t::ncclFloat32,
                nccl_sys::ncclRedOp_t::ncclSum,
                raw,
                stream.cu_stream().cast(),
            )
        };
        let ask = loaded
            .api
            .ncclCommGetAsyncError
            .ok_or("every release has it")?;
        let mut state = code;
        while state == nccl_sys::ncclResult_t::ncclInProgress {
            // SAFETY: the communicator lives, and `state` is a valid place.
            unsafe { ask(raw, &mut state) };
        }
        assert_eq!(state, nccl_sys::ncclResult_t::ncclSuccess);
        let foreign = stream.end_capture(sys::CUgraphInstantiate_flags(0))?;
        assert!(foreign.is_some());
        world.barrier("captured")?;
        let leaked = nccl::stats().leaked_communicators;
        let begun = Instant::now();
        let error = comm.abort("on purpose").unwrap_err();
        assert!(
            begun.elapsed() >= ABORT && begun.elapsed() < SOON,
            "{:?}",
            begun.elapsed()
        );
        assert!(error.is_timeout(), "{error:#}");
        assert!(
            format!("{error:#}").contains("graphs captured elsewhere"),
            "{error:#}"
        );
        assert_eq!(comm.state(), CommunicatorState::Leaked);
        assert!(format!("{comm:?}").contains("Leaked"), "{comm:?}");
        assert_eq!(nccl::stats().leaked_communicators, leaked + 1);
        // Every later call reports the abort.
        let mut z = stream.alloc_zeros::<f32>(8)?;
        let error = comm.all_reduce_in_place(&mut z, ReduceOp::Sum).unwrap_err();
        assert!(format!("{error:#}").contains("on purpose"), "{error:#}");
        world.barrier("over")?;
        drop(foreign);
        drop(y);
        Ok(())
    });
}

fn sum_plan(comm: &Communicator) -> nccl::Result<nccl::plan::CapturedPlan<nccl::Buffer<f32>>> {
    let y = comm.buffer::<f32>(8)?;
    comm.capture(y, |capture, y| {
        capture.group(|group| group.all_reduce_in_place(y, ReduceOp::Sum))
    })
}

#[test]
fn an_error_of_a_replay_says_of_which_plan() {
    ranks_as_threads(2, |world: World| -> Outcome {
        let stream = support::device(&world)?.new_stream()?;
        let comm = world.communicator("test").stream(&stream).build()?;
        let comm = comm.within(Duration::from_secs(3));
        let _first = sum_plan(&comm)?;
        let mut second = sum_plan(&comm)?;
        second.launch()?.wait()?;
        world.barrier("both can")?;
        if world.rank() == 0 {
            // The other rank does not enter.
            let error = second.launch()?.wait().unwrap_err();
            let operation = error.operation().ok_or("it has one")?;
            assert_eq!(
                (operation.kind, operation.plan),
                (OperationKind::Replay, Some(2))
            );
            assert!(
                format!("{error:#}").contains("replay of plan 2 #"),
                "{error:#}"
            );
            let fault = error.fault().ok_or("all ranks know")?;
            let during = fault.operation().ok_or("it was in one")?;
            assert!(during.contains("replay of plan 2"), "{during}");
        }
        world.barrier("over")?;
        let error = second.launch().unwrap_err();
        assert_eq!(
            error.operation().and_then(|operation| operation.plan),
            Some(2)
        );
        Ok(())
    });
}

/// An abort completes a stream; its pending operations never count as successful.
#[test]
fn what_ends_by_an_abort_is_no_success_on_any_way() {
    ranks_as_threads(2, |world| -> Outcome {
        let stream = support::device(&world)?.new_stream()?;
        let build = |name: &'static str| world.communicator(name).stream(&stream);
        let (comm, other) = (build("test").build()?, build("other").build()?);
        // Connected, so that later operations wait on the device.
        let mut y = stream.clone_htod(&[1.0f32; 8])?;
        comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
        let mut plan = sum_plan(&comm)?;
        world.barrier("connected")?;
        if world.rank() == 1 {
            world.barrier("issued")?;
            comm.abort("enough")?;
            world.barrier("over")?;
            return Ok(());
        }
        let launched = plan.launch()?;
        let issued = comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?;
        let awaited = comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?;
        let mut z = stream.clone_htod(&[1.0f32; 8])?;
        let grouped = nccl::group(|group| {
            group
                .on(&comm)?
                .all_reduce_in_place(&mut z, ReduceOp::Sum)?;
            group.on(&other).map(drop)
        })?;
        let polled = comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?;
        world.barrier("issued")?;
        let is_abort = |error: nccl::Error| {
            assert!(format!("{error:#}").contains("enough"), "{error:#}");
        };
        is_abort(issued.wait().unwrap_err());
        is_abort(launched.wait_timeout(SOON).unwrap_err());
        is_abort(grouped.wait().unwrap_err());
        let begun = Instant::now();
        is_abort(loop {
            match polled.is_complete() {
                Ok(false) => assert!(begun.elapsed() < SOON, "no end"),
                Ok(true) => panic!("an aborted operation is complete"),
                Err(error) => break error,
            }
        });
        let runtime = tokio::runtime::Builder::new_current_thread().build()?;
        is_abort(runtime.block_on(awaited).unwrap_err());
        is_abort(comm.warm_up(SOON).unwrap_err());
        is_abort(comm.split("part", Some(0), 0).unwrap_err());
        is_abort(plan.launch().unwrap_err());
        is_abort(comm.finalize().unwrap_err());
        // The stream itself has completed, and the memory is the caller's again.
        stream.synchronize()?;
        assert_eq!(stream.clone_dtoh(&plan.views())?.len(), 8);
        world.barrier("over")?;
        Ok(())
    });
}
