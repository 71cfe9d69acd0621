//! Operations that do not match, and errors of NCCL and CUDA.

use std::time::Duration;

use nccl::ReduceOp;
use nccl::cudarc::driver::{DevicePtr, result};
use nccl::fault::FaultClass::{Failed, TimedOut};
use nccl_emulator::faults;

use crate::actor::{Actor, hear, hear_any};
use crate::row::{Ends, OnNvidias, ROW, Row, SHORT, Then};
use crate::support;

const fn differ(says: &'static [&'static str]) -> Ends {
    Ends::Cause {
        culprits: &[1],
        class: TimedOut,
        root: "mismatch",
        says,
    }
}

const fn failed(says: &'static [&'static str]) -> Ends {
    Ends::Cause {
        culprits: &[1],
        class: Failed,
        root: "call_failed",
        says,
    }
}

/// A row in which rank 1 issues another operation than the others.
const DIFFERS: Row = Row {
    timeout: SHORT,
    bound: Duration::from_secs(3),
    ..ROW
};

fn all_reduce_of(actor: &Actor, len: usize) -> nccl::Result<()> {
    let mut y = actor.memory::<f32>(len);
    actor
        .comm()
        .all_reduce_in_place(&mut y, ReduceOp::Sum)?
        .wait()
}

/// Has the effect of a kernel that writes to an invalid address: from now on, every call into this context fails.
fn lose_the_context(actor: &Actor) {
    // A stream without operations, because operations may be waiting on the rank's own stream.
    let stream = actor.stream.context().new_stream().expect("a stream");
    let gone = stream.alloc_zeros::<u8>(1 << 20).expect("memory");
    let (address, guard) = gone.device_ptr(&stream);
    drop(guard);
    drop(gone);
    stream.synchronize().expect("all is well");
    // SAFETY: the emulator checks the address, and finds that it is invalid.
    let written = unsafe {
        result::memset_d8_async(address, 1, 1 << 20, stream.cu_stream())
            .and_then(|()| result::stream::synchronize(stream.cu_stream()))
    };
    written.expect_err("nothing is there");
}

pub(crate) const ROWS: &[Row] = &[
    Row {
        name: "order",
        fault: "one rank makes another collective than the others",
        play: |actor| {
            actor.harm();
            if actor.is(1) {
                let x = actor.memory::<f32>(64);
                let mut y = actor.memory::<f32>(64 * 3);
                return actor.comm().all_gather(&x, &mut y)?.wait();
            }
            all_reduce_of(actor, 192)
        },
        on_nvidias: OnNvidias::MismatchField(
            "the rank with the other collective goes on with a wrong result, and is told nothing; the others are told the `mismatch`, and that it is rank 1",
        ),
        ends: differ(&["all_gather", "all_reduce"]),
        ..DIFFERS
    },
    Row {
        name: "count",
        fault: "one rank has another number of elements",
        play: |actor| {
            actor.harm();
            all_reduce_of(actor, if actor.is(1) { 2048 } else { 1024 })
        },
        ends: differ(&["2048", "1024"]),
        ..DIFFERS
    },
    Row {
        name: "dtype",
        fault: "one rank has another element type, of the same size (on a GPU a wrong result, which nobody notices)",
        play: |actor| {
            actor.harm();
            if actor.is(1) {
                let mut y = actor.memory::<half::bf16>(64);
                return actor
                    .comm()
                    .all_reduce_in_place(&mut y, ReduceOp::Sum)?
                    .wait();
            }
            let mut y = actor.memory::<half::f16>(64);
            actor
                .comm()
                .all_reduce_in_place(&mut y, ReduceOp::Sum)?
                .wait()
        },
        on_nvidias: OnNvidias::MismatchField(
            "NCCL does not compare, and nobody is told: the operation ends, with a wrong result",
        ),
        ends: differ(&["bf16", "f16"]),
        ..DIFFERS
    },
    Row {
        name: "root",
        fault: "one rank takes another for the root",
        play: |actor| {
            actor.harm();
            let mut y = actor.memory::<f32>(64);
            let root = usize::from(actor.is(1));
            actor.comm().broadcast_in_place(&mut y, root)?.wait()
        },
        on_nvidias: OnNvidias::MismatchField(
            "NCCL does not compare, and nobody is told: the operation ends, with a wrong result",
        ),
        ends: differ(&["root 1", "root 0"]),
        ..DIFFERS
    },
    Row {
        name: "reduction",
        fault: "one rank reduces by another operator (on a GPU a wrong result, which nobody notices)",
        play: |actor| {
            actor.harm();
            let operator = if actor.is(1) {
                ReduceOp::Max
            } else {
                ReduceOp::Sum
            };
            let mut y = actor.memory::<f32>(64);
            actor.comm().all_reduce_in_place(&mut y, operator)?.wait()
        },
        on_nvidias: OnNvidias::MismatchField(
            "NCCL does not compare, and nobody is told: the operation ends, with a wrong result",
        ),
        ends: differ(&["max", "sum"]),
        ..DIFFERS
    },
    Row {
        name: "reduction-checked",
        fault: "the same, with `NCCL_RUN_CHECK=1`, which finds it before NCCL is called",
        variables: &[("NCCL_RUN_CHECK", "1")],
        play: |actor| {
            actor.harm();
            let operator = match actor.is(1) {
                true => ReduceOp::Max,
                false => ReduceOp::Sum,
            };
            let mut y = actor.memory::<f32>(64);
            actor.comm().all_reduce_in_place(&mut y, operator)?.wait()
        },
        ends: Ends::Refused {
            on: &[0, 1, 2],
            says: &["max", "sum"],
        },
        then: Then::Same,
        ..ROW
    },
    Row {
        name: "two-communicators",
        fault: "two communicators, used in another order by one rank",
        play: |actor| {
            let other = actor.build("other")?;
            actor.harm();
            let (mut x, mut y) = (actor.memory::<f32>(64), actor.memory::<f32>(64));
            let (first, second) = match actor.is(1) {
                true => (actor.comm(), &other),
                false => (&other, actor.comm()),
            };
            let first = first.all_reduce_in_place(&mut x, ReduceOp::Sum)?;
            let second = second.all_reduce_in_place(&mut y, ReduceOp::Sum)?;
            first.wait().and_then(|()| second.wait())?;
            // The end of one communicator on another rank may have let both operations complete here.
            hear_any(&[actor.comm(), &other])
                .all_reduce_in_place(&mut x, ReduceOp::Sum)?
                .wait()
        },
        ends: Ends::Cause {
            culprits: &[0, 1],
            class: TimedOut,
            root: "inverse_order",
            says: &["other", "work"],
        },
        ..DIFFERS
    },
    Row {
        name: "nccl-fails",
        fault: "NCCL's call fails on one rank (`ncclUnhandledCudaError`, as when its GPU is lost)",
        play: |actor| {
            actor.harm();
            let fault = || match support::on_nvidias() {
                true => faults::at_call("cuLaunchKernelEx").fail(999),
                false => faults::at_call("ncclAllReduce").fail(1),
            };
            let _fault = actor.is(1).then(fault);
            actor.work()
        },
        ends: failed(&["returned 1 (unhandled cuda error"]),
        ..ROW
    },
    Row {
        name: "nccl-fails-late",
        fault: "NCCL notices an error in the background",
        play: |actor| {
            actor.harm();
            let _fault = actor
                .is(1)
                .then(|| faults::at_operation("AllReduce").fail(3));
            actor.work()
        },
        ends: failed(&["3 ("]),
        on_nvidias: OnNvidias::NotTried("its fault is one of the emulator's own NCCL"),
        ..ROW
    },
    Row {
        name: "cuda-fails",
        fault: "a kernel of the program's own made CUDA fail for good (`CUDA_ERROR_ILLEGAL_ADDRESS`)",
        play: |actor| {
            let mut y = actor.memory::<f32>(1 << 10);
            actor.harm();
            if actor.is(1) {
                lose_the_context(actor);
            }
            loop {
                actor
                    .comm()
                    .all_reduce_in_place(&mut y, ReduceOp::Sum)?
                    .wait()?;
            }
        },
        ends: failed(&[
            "CUDA: ",
            "ILLEGAL_ADDRESS",
            "\"cuda\":700",
            "\"failed_before\":true",
        ]),
        leave: &[1],
        then: Then::Generation,
        ..ROW
    },
    Row {
        name: "cuda-refuses",
        fault: "CUDA refuses a call in front of an operation (`CUDA_ERROR_INVALID_VALUE`), and is as good as before",
        play: |actor| {
            let mut y = actor.memory::<f32>(1 << 10);
            actor.harm();
            if !actor.is(1) {
                return Ok(());
            }
            let calls = faults::at_call("cuStreamIsCapturing").on_this_thread();
            let _fault = calls.fail(1);
            let refused = actor.comm().all_reduce_in_place(&mut y, ReduceOp::Sum);
            refused.map(drop)
        },
        ends: Ends::Refused {
            on: &[1],
            says: &["CUDA: ", "INVALID_VALUE"],
        },
        then: Then::Same,
        ..ROW
    },
    Row {
        name: "cuda-fails-later",
        fault: "the same, while the rank waits for an operation, and another communicator is idle",
        play: |actor| {
            let idle = actor.build("idle").expect("all are there");
            let mut y = actor.memory::<f32>(1 << 10);
            actor.harm();
            let mut sum = || actor.comm().all_reduce_in_place(&mut y, ReduceOp::Sum);
            if actor.is(1) {
                let waits = sum()?;
                std::thread::sleep(Duration::from_millis(100));
                lose_the_context(actor);
                waits.wait()?;
            }
            hear(&idle)?;
            let fault = idle.fault().expect("it has ended as well");
            assert_eq!(fault.class, Failed, "{fault}");
            sum()?.wait()
        },
        ends: failed(&["CUDA: ", "ILLEGAL_ADDRESS", "\"cuda\":700"]),
        leave: &[1],
        then: Then::Generation,
        ..ROW
    },
    Row {
        name: "cuda-fails-unseen",
        fault: "the same, while operations are pending for which the rank's program does not ask",
        play: |actor| {
            let mut y = actor.memory::<f32>(1 << 10);
            actor.harm();
            if actor.is(1) {
                let sum = actor.comm().all_reduce_in_place(&mut y, ReduceOp::Sum)?;
                drop(sum);
                lose_the_context(actor);
            }
            hear(actor.comm())?;
            actor
                .comm()
                .all_reduce_in_place(&mut y, ReduceOp::Sum)?
                .wait()
        },
        ends: failed(&["CUDA: ", "ILLEGAL_ADDRESS", "\"cuda\":700"]),
        leave: &[1],
        then: Then::Generation,
        ..ROW
    },
];
