//! Ends in the wrong order, in the wrong place, twice.

use std::time::Duration;

use nccl::ReduceOp;
use nccl::fault::FaultClass::{Asked, TimedOut};
use nccl::launch::Signal;

use crate::row::{Ends, ROW, Row, SHORT, Then};

pub(crate) const ROWS: &[Row] = &[
    Row {
        name: "one-aborts",
        fault: "one rank alone aborts, on one host; the others are in an operation that waits for it",
        play: |actor| {
            actor.harm();
            if actor.is(1) {
                std::thread::sleep(Duration::from_millis(200));
                actor.comm().abort("enough")?;
            }
            actor.all_reduce()
        },
        ends: Ends::Cause {
            culprits: &[1],
            class: Asked,
            root: "asked",
            says: &["enough"],
        },
        ..ROW
    },
    Row {
        name: "orders-of-drops",
        fault: "two communicators are dropped in another order by one rank",
        play: |actor| {
            let other = actor.build("other")?;
            let third = actor.build("third")?;
            actor.harm();
            if actor.is(1) {
                drop(third);
                drop(other);
            } else {
                drop(other);
                drop(third);
            }
            Ok(())
        },
        ends: Ends::Nothing,
        then: Then::Same,
        ..ROW
    },
    Row {
        name: "dropped-under-work",
        fault: "a communicator is dropped while an operation is pending whose peer is dead",
        play: |actor| {
            let other = actor.build("other")?;
            let mut y = actor.memory::<f32>(64);
            actor.harm();
            if actor.is(1) {
                std::thread::sleep(Duration::from_millis(100));
                std::process::abort();
            }
            drop(other.all_reduce_in_place(&mut y, ReduceOp::Sum)?);
            drop(other);
            actor.work()
        },
        ends: Ends::died(&[1], &["died"]),
        lost: &[1],
        then: Then::Generation,
        ..ROW
    },
    Row {
        name: "aborted-init",
        fault: "an abort while the ranks wait for each other in order to start NCCL",
        built: false,
        play: |actor| {
            let signal = nccl::AbortSignal::new();
            actor.harm();
            if actor.is(1) {
                let abort = signal.clone();
                std::thread::spawn(move || {
                    std::thread::sleep(Duration::from_millis(200));
                    abort.abort();
                });
            }
            // Rank 2 does not take part until rank 1 has given up, so that no init completes.
            if actor.is(2) {
                actor.world.get("given up")?;
            }
            let comm = actor.world.communicator("unborn").stream(&actor.stream);
            let comm = comm.with(|comm| {
                comm.preflight = false;
                comm.abort_signals.push(signal.clone());
            });
            let ended = comm.build().map(drop);
            if actor.is(1) {
                actor.world.set("given up", &[])?;
            }
            ended
        },
        ends: Ends::Cause {
            culprits: &[1],
            class: Asked,
            root: "asked",
            says: &["abort signal"],
        },
        ..ROW
    },
    Row {
        name: "used-after-abort",
        fault: "a communicator is used after it was aborted, by all, and aborted again",
        play: |actor| {
            actor.harm();
            if actor.is(1) {
                actor.comm().abort("enough")?;
                actor.comm().abort("once more")?;
            }
            actor.hear()
        },
        ends: Ends::Cause {
            culprits: &[1],
            class: Asked,
            root: "asked",
            says: &["enough"],
        },
        ..ROW
    },
    Row {
        name: "plan-under-death",
        fault: "a captured graph is alive when its communicator has to be aborted",
        play: |actor| {
            let y = actor.memory::<f32>(64);
            let mut plan = actor.comm().capture(y, |capture, y| {
                capture.group(|group| group.all_reduce_in_place(y, ReduceOp::Sum))
            })?;
            plan.launch()?.wait()?;
            println!("captured");
            loop {
                plan.launch()?.wait()?;
            }
        },
        harm: Some(|stage| {
            stage.says(1, "captured", Duration::from_secs(20))?;
            stage.signal(1, Signal::Kill);
            Ok(())
        }),
        ends: Ends::died(&[1], &["died"]),
        lost: &[1],
        then: Then::Generation,
        ..ROW
    },
    Row {
        name: "finalizes-alone",
        fault: "one rank finalizes, the others still wait for it in an operation",
        timeout: SHORT,
        play: |actor| {
            actor.harm();
            if actor.is(1) {
                actor.comm().clone().finalize()?;
                return Ok(());
            }
            actor.all_reduce()
        },
        ends: Ends::Cause {
            culprits: &[1],
            class: TimedOut,
            root: "never_entered",
            says: &["has not entered all_reduce"],
        },
        bound: Duration::from_secs(3),
        ..ROW
    },
];
