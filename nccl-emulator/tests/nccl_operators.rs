//! User-defined operators, reductions of 8-bit floats, argument checks, and configurations of single
//! calls.

mod ranks;

use std::ptr::null_mut;

use cudarc::driver::result;
use cudarc::driver::sys::{CUevent_flags, CUgraphInstantiate_flags, CUstreamCaptureMode};
use nccl_sys::{
    NCCL_COLLCONFIG_INITIALIZER, ncclCollConfig_t, ncclDataType_t as Kind, ncclRedOp_t as Op,
    ncclScalarResidence_t as Residence,
};
use ranks::cases::{Case, FUNCTIONS, Function};
use ranks::{Gate, Memory, Rank, alone, last_error, nccl, threads};

/// An operator that multiplies by a value.
fn scaling<T>(rank: &Rank, kind: Kind, mut by: T) -> Op {
    let mut op = Op(0);
    let scalar = (&raw mut by).cast();
    let host = Residence::ncclScalarHostImmediate;
    let code = nccl!(ncclRedOpCreatePreMulSum(
        &mut op, scalar, kind, host, rank.comm
    ));
    assert_eq!(code, 0, "{}", last_error());
    assert!(op.0 >= Op::ncclNumOps.0);
    op
}

fn scaling_from_device<T>(rank: &Rank, kind: Kind, by: &Memory<T>) -> Op {
    let mut op = Op(0);
    let device = Residence::ncclScalarDevice;
    let code = nccl!(ncclRedOpCreatePreMulSum(
        &mut op,
        by.ptr(),
        kind,
        device,
        rank.comm
    ));
    assert_eq!(code, 0, "{}", last_error());
    op
}

#[test]
fn every_rank_scales_by_its_own_factor_before_the_sum() {
    alone(
        "every_rank_scales_by_its_own_factor_before_the_sum",
        &[],
        || {
            threads(2, |rank| {
                let factor = [3.0f32, 0.5][rank.rank as usize];
                let op = scaling(rank, Kind::ncclFloat32, factor);
                let memory = rank.memory(&[10.0f32, 2.0]);
                assert_eq!(rank.all_reduce(&memory, &memory, Kind::ncclFloat32, op), 0);
                rank.sync();
                assert_eq!(memory.read(), [35.0, 7.0]);
                let (comm, stream) = (rank.comm, rank.cuda_stream());
                let (from, to) = (rank.memory(&[10.0f32, 2.0]), rank.memory(&[0.0f32]));
                let kind = Kind::ncclFloat32;
                assert_eq!(
                    nccl!(ncclReduceScatter(
                        from.ptr(),
                        to.ptr(),
                        1,
                        kind,
                        op,
                        comm,
                        stream
                    )),
                    0
                );
                rank.sync();
                assert_eq!(to.read(), [[35.0f32, 7.0][rank.rank as usize]]);
            });
        },
    );
}

#[test]
fn a_scalar_of_the_host_is_read_at_once_and_one_of_the_device_when_the_stream_gets_there() {
    let name =
        "a_scalar_of_the_host_is_read_at_once_and_one_of_the_device_when_the_stream_gets_there";
    alone(name, &[], || {
        for ranks in [1, 2] {
            threads(ranks, |rank| {
                let n = i64::from(rank.ranks);
                let scalar = rank.memory(&[2i64]);
                let op = scaling_from_device(rank, Kind::ncclInt64, &scalar);
                let memory = rank.memory(&[5i64; 3]);
                rank.sync();
                let gate = Gate::on(rank);
                assert_eq!(rank.all_reduce(&memory, &memory, Kind::ncclInt64, op), 0);
                // The operation no longer needs the operator, but still reads the scalar's memory.
                assert_eq!(nccl!(ncclRedOpDestroy(op, rank.comm)), 0);
                let other = rank.gpu.new_stream().unwrap();
                // SAFETY: the scalar has room for one value, and lives.
                unsafe {
                    result::memcpy_htod_async(scalar.address, &[7i64], other.cu_stream()).unwrap();
                }
                other.synchronize().unwrap();
                gate.open();
                rank.sync();
                assert_eq!(memory.read(), [35 * n; 3]);
            });
        }
    });
}

#[test]
fn a_scalar_that_was_freed_fails_the_context_when_it_is_read() {
    let name = "a_scalar_that_was_freed_fails_the_context_when_it_is_read";
    alone(name, &[], || {
        let id = ranks::unique_id();
        let rank = Rank::join(id, 1, 0);
        let scalar = rank.memory(&[2.0f32]);
        let op = scaling_from_device(&rank, Kind::ncclFloat32, &scalar);
        let memory = rank.memory(&[1.0f32]);
        scalar.free();
        assert_eq!(rank.all_reduce(&memory, &memory, Kind::ncclFloat32, op), 0);
        assert!(rank.stream.synchronize().is_err());
        let told = nccl_emulator::violations();
        let text = told.first().map(ToString::to_string).unwrap_or_default();
        assert!(text.contains("scalar"), "{told:?}");
    });
}

#[test]
fn an_operator_belongs_to_its_communicator_and_its_type() {
    alone(
        "an_operator_belongs_to_its_communicator_and_its_type",
        &[],
        || {
            threads(1, |rank| {
                let other = Rank::join(ranks::unique_id(), 1, 0);
                let memory = rank.memory(&[1.0f32, 2.0]);
                let op = scaling(rank, Kind::ncclFloat32, 2.0f32);
                let float = Kind::ncclFloat32;
                assert_eq!(other.all_reduce(&memory, &memory, float, op), 4);
                let unknown = format!(
                    "AllReduce : reduction operation {} unknown to this communicator",
                    op.0
                );
                assert_eq!(last_error(), unknown);
                assert_eq!(nccl!(ncclRedOpDestroy(op, other.comm)), 4);
                assert_eq!(
                    last_error(),
                    "ncclRedOpDestroy : operator unknown to this communicator."
                );
                assert_eq!(rank.all_reduce(&memory, &memory, Kind::ncclInt32, op), 4);
                let wrong = "Data type supplied to user-created ncclRedOp_t does not match type given to reduction operation";
                assert_eq!(last_error(), wrong);
                // No element is reduced, so only the handle of the operator is checked.
                let nothing = rank.memory::<f32>(&[]);
                assert_eq!(rank.all_reduce(&nothing, &nothing, Kind::ncclInt32, op), 0);
                assert_eq!(rank.all_reduce(&memory, &memory, float, op), 0);
                rank.sync();
                assert_eq!(memory.read(), [2.0, 4.0]);
                assert_eq!(nccl!(ncclRedOpDestroy(op, rank.comm)), 0);
                assert_eq!(nccl!(ncclRedOpDestroy(op, rank.comm)), 4);
                assert_eq!(rank.all_reduce(&memory, &memory, float, op), 4);
                assert_eq!(last_error(), unknown);
                // The next operator gets the same number.
                assert_eq!(scaling(rank, Kind::ncclInt8, 1i8), op);
                other.destroy();
            });
            assert!(nccl_emulator::violations().is_empty());
        },
    );
}

#[test]
fn what_is_no_operator_is_refused() {
    alone("what_is_no_operator_is_refused", &[], || {
        threads(1, |rank| {
            let destroy = |op: u32, comm| nccl!(ncclRedOpDestroy(Op(op), comm));
            assert_eq!(destroy(4, rank.comm), 4);
            assert_eq!(
                last_error(),
                "ncclRedOpDestroy : operator is a NCCL builtin."
            );
            assert_eq!(destroy(u32::MAX, rank.comm), 4);
            assert_eq!(last_error(), "ncclRedOpDestroy :  operator is garbage.");
            assert_eq!(destroy(77, null_mut()), 4);
            assert_eq!(
                last_error(),
                "ncclRedOpDestroy : invalid communicator passed."
            );
            let mut op = Op(123);
            let mut value = 1.0f64;
            let scalar = (&raw mut value).cast();
            let host = Residence::ncclScalarHostImmediate;
            let double = Kind::ncclFloat64;
            assert_eq!(
                nccl!(ncclRedOpCreatePreMulSum(
                    &mut op,
                    scalar,
                    double,
                    host,
                    null_mut()
                )),
                4
            );
            assert_eq!(
                last_error(),
                "ncclRedOpCreatePreMulSum : comm argument is NULL"
            );
            assert_eq!(
                nccl!(ncclRedOpCreatePreMulSum(
                    &mut op,
                    scalar,
                    Kind(12),
                    host,
                    rank.comm
                )),
                3
            );
            let none = null_mut();
            assert_eq!(
                nccl!(ncclRedOpCreatePreMulSum(
                    &mut op, none, double, host, rank.comm
                )),
                4
            );
            assert_eq!(op, Op(123));
            let memory = rank.memory(&[1.0f64]);
            assert_eq!(rank.all_reduce(&memory, &memory, double, Op(u32::MAX)), 4);
            assert_eq!(last_error(), "AllReduce : invalid reduction operation -1");
        });
    });
}

#[test]
fn eight_bit_floats_are_reduced_with_rounding_and_saturation() {
    let name = "eight_bit_floats_are_reduced_with_rounding_and_saturation";
    alone(name, &[], || {
        threads(3, |rank| {
            // By rank. E4M3: 1.0 is 0x38, 16 is 0x58, 448 is 0x7e; NaN is 0x7f.
            let input = [
                [0x58u8, 0x7e, 0x7f, 0x38],
                [0x38, 0x7e, 0x38, 0x38],
                [0x38, 0xfe, 0x38, 0x38],
            ][rank.rank as usize];
            let (from, to) = (rank.memory(&input), rank.memory(&[0u8; 4]));
            let kind = Kind::ncclFloat8e4m3;
            let run = |op| {
                assert_eq!(rank.all_reduce(&from, &to, kind, op), 0, "{}", last_error());
                rank.sync();
                to.read()
            };
            // 16 + 1 goes down to 16, twice; 448 + 448 stays 448.
            assert_eq!(run(Op::ncclSum), [0x58, 0x00, 0x7f, 0x44]);
            assert_eq!(run(Op::ncclMax), [0x58, 0x7e, 0x38, 0x38]);
            assert_eq!(run(Op::ncclMin), [0x38, 0xfe, 0x38, 0x38]);
            // A third is 0.34375 here: 5.5, 0.34375 and 0.34375.
            assert_eq!(run(Op::ncclAvg)[3], 0x38);
        });
        threads(1, |rank| {
            let memory = rank.memory(&[0x38u8]);
            let kind = Kind::ncclFloat8e5m2;
            assert_eq!(rank.all_reduce(&memory, &memory, kind, Op::ncclSum), 0);
            // NCCL has no kernel for a single rank that scales 8-bit floats.
            assert_eq!(rank.all_reduce(&memory, &memory, kind, Op::ncclAvg), 4);
        });
    });
}

#[test]
fn roots_and_types_out_of_range_are_refused_by_every_collective() {
    let name = "roots_and_types_out_of_range_are_refused_by_every_collective";
    alone(name, &[], || {
        threads(1, |rank| {
            use Function::{Bcast, Broadcast, Gather, Reduce, Scatter};
            let stream = rank.cuda_stream();
            for function in FUNCTIONS {
                // Invalid arguments are errors even with a count of 0.
                for count in [0, 10] {
                    let case = Case::new(function, count);
                    let name = function.name();
                    let issue = |change: &dyn Fn(&mut Case)| {
                        let mut prepared = case.prepare(rank);
                        change(&mut prepared.case);
                        prepared.issue(rank)
                    };
                    if let Broadcast | Bcast | Gather | Reduce | Scatter = function {
                        for root in [-1, 1] {
                            assert_eq!(issue(&|case| case.root = root), 4);
                            let text = format!(
                                "{name} : invalid root {root} (root should be in the 0..1 range)"
                            );
                            assert_eq!(last_error(), text);
                        }
                    }
                    assert_eq!(issue(&|case| case.kind = Kind(12)), 4);
                    assert_eq!(last_error(), format!("{name} : invalid type 12"));
                }
            }
            // The communicator is checked before all other arguments.
            let (null, kind) = (null_mut(), Kind(99));
            assert_eq!(
                nccl!(ncclGather(null, null, 1, kind, -1, null_mut(), stream)),
                4
            );
            assert_eq!(last_error(), "Gather : comm argument is NULL");
            // An invalid argument is detected inside the group, and makes the group fail.
            assert_eq!(nccl!(ncclGroupStart()), 0);
            assert_eq!(nccl!(ncclBcast(null, 1, kind, 0, rank.comm, stream)), 4);
            assert_eq!(nccl!(ncclGroupEnd()), 4);
        });
    });
}

/// An all-gather of `input`, with a configuration.
fn gather(
    rank: &Rank,
    input: &Memory<u32>,
    output: &Memory<u32>,
    config: &ncclCollConfig_t,
) -> u32 {
    let (comm, stream) = (rank.comm, rank.cuda_stream());
    nccl!(ncclAllGatherConfig(
        input.ptr(),
        output.ptr(),
        input.len,
        Kind::ncclUint32,
        comm,
        stream,
        config,
    ))
}

#[test]
fn the_configuration_of_a_call_is_checked_before_anything_else() {
    let name = "the_configuration_of_a_call_is_checked_before_anything_else";
    alone(name, &[], || {
        threads(2, |rank| {
            let input = rank.memory(&[rank.rank as u32; 3]);
            let output = rank.memory(&[9u32; 6]);
            let with = |change: &dyn Fn(&mut ncclCollConfig_t)| {
                let mut config = NCCL_COLLCONFIG_INITIALIZER;
                change(&mut config);
                gather(rank, &input, &output, &config)
            };
            assert_eq!(nccl!(ncclGroupStart()), 0);
            assert_eq!(with(&|config| config.magic = 1), 4);
            assert_eq!(with(&|config| config.forceAlgSelection = 2), 4);
            assert_eq!(with(&|config| config.CTAPolicy = 4), 4);
            // These errors do not make the group fail.
            assert_eq!(nccl!(ncclGroupEnd()), 0);
            // As a program built with 2.31.2 passes it: the fields beyond `size` are not read.
            let older = |config: &mut ncclCollConfig_t| {
                config.size = 64;
                config.launchCompletionEvent = std::ptr::without_provenance_mut(1);
                config.CTAPolicy = 3;
                config.maxCTAs = 2;
                config.userProfilerTag = 77;
            };
            assert_eq!(with(&older), 0, "{}", last_error());
            rank.sync();
            assert_eq!(output.read(), [0, 0, 0, 1, 1, 1]);
        });
    });
}

#[test]
fn the_launch_completion_event_comes_when_the_stream_gets_to_the_launch_not_when_it_is_over() {
    let name =
        "the_launch_completion_event_comes_when_the_stream_gets_to_the_launch_not_when_it_is_over";
    alone(name, &[], || {
        let meet = std::sync::Barrier::new(2);
        threads(2, |rank| {
            let input = rank.memory(&[rank.rank as u32; 3]);
            let output = rank.memory(&[9u32; 6]);
            let event = rank
                .gpu
                .new_event(Some(CUevent_flags::CU_EVENT_DISABLE_TIMING))
                .unwrap();
            let mut config = NCCL_COLLCONFIG_INITIALIZER;
            config.launchCompletionEvent = event.cu_event().cast();
            assert_eq!(
                gather(rank, &input, &output, &config),
                0,
                "{}",
                last_error()
            );
            rank.sync();
            // Rank 0's stream is blocked; rank 1's operation is launched, and waits for rank 0.
            let gate = (rank.rank == 0).then(|| Gate::on(rank));
            assert_eq!(
                gather(rank, &input, &output, &config),
                0,
                "{}",
                last_error()
            );
            if rank.rank == 1 {
                event.synchronize().unwrap();
                assert!(!rank.is_idle());
            } else {
                assert!(!event.is_complete());
            }
            meet.wait();
            if let Some(gate) = gate {
                gate.open();
            }
            rank.sync();
            assert!(event.is_complete());
            // A group takes one such event, and no event that records the time.
            assert_eq!(nccl!(ncclGroupStart()), 0);
            assert_eq!(gather(rank, &input, &output, &config), 0);
            assert_eq!(gather(rank, &input, &output, &config), 0);
            assert_eq!(nccl!(ncclGroupEnd()), 5);
            assert_eq!(
                last_error(),
                "Only one launch-completion event may be provided in one NCCL group"
            );
            let timing = rank
                .gpu
                .new_event(Some(CUevent_flags::CU_EVENT_DEFAULT))
                .unwrap();
            config.launchCompletionEvent = timing.cu_event().cast();
            assert_eq!(gather(rank, &input, &output, &config), 1);
        });
    });
}

#[test]
fn a_graph_reads_the_scalar_and_records_the_event_each_time_it_runs() {
    let name = "a_graph_reads_the_scalar_and_records_the_event_each_time_it_runs";
    alone(name, &[], || {
        threads(2, |rank| {
            let scalar = rank.memory(&[0i32]);
            let op = scaling_from_device(rank, Kind::ncclInt32, &scalar);
            let (from, to) = (rank.memory(&[5i32; 4]), rank.memory(&[0i32; 4]));
            let flags = Some(CUevent_flags::CU_EVENT_DISABLE_TIMING);
            let event = rank.gpu.new_event(flags).unwrap();
            let mut config = NCCL_COLLCONFIG_INITIALIZER;
            config.launchCompletionEvent = event.cu_event().cast();
            let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            rank.gpu.bind_to_thread().unwrap();
            rank.stream.begin_capture(mode).unwrap();
            let (comm, stream) = (rank.comm, rank.cuda_stream());
            let (send, receive, kind) = (from.ptr(), to.ptr(), Kind::ncclInt32);
            let code = nccl!(ncclAllReduceConfig(
                send, receive, 4, kind, op, comm, stream, &config
            ));
            assert_eq!(code, 0, "{}", last_error());
            let graph = rank
                .stream
                .end_capture(CUgraphInstantiate_flags(0))
                .unwrap()
                .unwrap();
            assert_eq!(nccl!(ncclRedOpDestroy(op, comm)), 0);
            for factor in [2, 3] {
                // SAFETY: the scalar has room for one value, and nothing runs.
                unsafe { result::memcpy_htod_sync(scalar.address, &[factor]).unwrap() };
                let gate = Gate::on(rank);
                graph.launch().unwrap();
                // An event that was never recorded would be complete.
                assert!(!event.is_complete());
                gate.open();
                event.synchronize().unwrap();
                rank.sync();
                assert_eq!(to.read(), [10 * factor; 4]);
            }
        });
    });
}
