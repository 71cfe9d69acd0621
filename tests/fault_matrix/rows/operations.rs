//! Operations that do not fit together, and errors of NCCL and CUDA.

use std::time::Duration;

use nccl::FaultClass::{Failed, TimedOut};
use nccl::ReduceOp;
use nccl_emulator::faults;

use crate::actor::{Actor, hear};
use crate::row::{Ends, ROW, Row, SHORT, Then};

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

/// A row in which rank 1 does something else than the others.
const DIFFERS: Row = Row {
    limit: SHORT,
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
            hear(actor.comm())
        },
        ends: Ends::Cause {
            culprits: &[0, 1, 2],
            class: TimedOut,
            root: "inverse_order",
            says: &["other", "work"],
        },
        not_yet: Some(
            "the rank is right; what is said is that its operation is queued behind other work, not behind what",
        ),
        ..DIFFERS
    },
    Row {
        name: "nccl-fails",
        fault: "NCCL's call fails on one rank (`ncclUnhandledCudaError`, as when its GPU is lost)",
        play: |actor| {
            actor.harm();
            let _fault = actor
                .is(1)
                .then(|| faults::at_call("ncclAllReduce").fail(1));
            actor.work()
        },
        ends: failed(&["ncclAllReduce returned 1"]),
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
        ..ROW
    },
    Row {
        name: "cuda-fails",
        fault: "a kernel of the program's own made CUDA fail for good (`CUDA_ERROR_ILLEGAL_ADDRESS`)",
        play: |actor| {
            actor.harm();
            let _fault = actor.is(1).then(|| {
                let calls = ["cuEventQuery", "cuEventRecord", "cuStreamQuery"];
                calls.map(|call| faults::at_call(call).fail(700))
            });
            actor.work()
        },
        ends: failed(&["CUDA", "ILLEGAL_ADDRESS"]),
        not_yet: Some(
            "the rank itself has the error at once; where it is found before NCCL is called, the others are not told, and come to their limit",
        ),
        ..ROW
    },
];
