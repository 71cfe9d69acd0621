//! Processes that end: killed, on their own, in a call, during their start.

use std::time::Duration;

use nccl::fault::FaultClass::{Failed, Gone, TimedOut};
use nccl::launch::Signal;
use nccl_emulator::faults;

use crate::actor::Actor;
use crate::row::{Cast, Ends, ROW, Row, Then};
use crate::stage::{Stage, Unable};
use crate::support;

fn kill_rank_1(stage: &mut Stage) -> Result<(), Unable> {
    stage.signal(1, Signal::Kill);
    Ok(())
}

/// Rank 1 ends itself with `how`, in the middle of work.
fn end(actor: &Actor, how: impl FnOnce()) -> nccl::Result<()> {
    actor.harm();
    if actor.is(1) {
        actor.all_reduce()?;
        how();
    }
    actor.work()
}

pub(crate) const WHILE_STARTING: &[Row] = &[
    Row {
        name: "killed-in-init",
        fault: "a process is killed inside NCCL's init",
        built: false,
        play: |actor| {
            actor.harm();
            // NVIDIA's library can be made to fail where it calls CUDA.
            let call = match support::on_nvidias() {
                true => "cuMemCreate",
                false => "ncclCommInitRankConfig",
            };
            let killed = || faults::at_call(call).kill();
            let _fault = actor.is(1).then(killed);
            actor.build("unborn").map(drop)
        },
        ends: Ends::died(&[1], &["died"]),
        lost: &[1],
        then: Then::Generation,
        ..ROW
    },
    Row {
        name: "killed-before-init",
        fault: "a process ends while the others wait for it in order to start NCCL",
        built: false,
        play: |actor| {
            actor.harm();
            if actor.is(1) {
                std::thread::sleep(Duration::from_millis(300));
                std::process::abort();
            }
            actor.build("unborn").map(drop)
        },
        ends: Ends::died(&[1], &["died"]),
        lost: &[1],
        then: Then::Generation,
        ..ROW
    },
    Row {
        name: "coordinator-before-init",
        fault: "rank 0, which coordinates, ends while the others wait for it in order to start NCCL",
        built: false,
        play: |actor| {
            actor.harm();
            if actor.is(0) {
                std::thread::sleep(Duration::from_millis(300));
                std::process::abort();
            }
            actor.build("unborn").map(drop)
        },
        ends: Ends::died(&[0], &["died"]),
        lost: &[0],
        then: Then::Generation,
        ..ROW
    },
    Row {
        name: "unfit",
        fault: "a rank finds something wrong with its own settings, before NCCL is started",
        built: false,
        play: |actor| {
            actor.harm();
            let most = if actor.is(1) { 4 } else { 8 };
            let comm = actor.world.communicator("unborn").stream(&actor.stream);
            comm.with(|comm| (comm.config.min_ctas, comm.config.max_ctas) = (Some(8), Some(most)))
                .build()
                .map(drop)
        },
        ends: Ends::Cause {
            culprits: &[1],
            class: Failed,
            root: "program_failed",
            says: &["min_ctas"],
        },
        ..ROW
    },
    Row {
        name: "stays-away",
        fault: "a rank does something else while the others wait for it in order to start NCCL",
        built: false,
        play: |actor| {
            actor.harm();
            if actor.is(1) {
                actor.world.phase("read the weights");
                actor.world.get("told")?;
            }
            let comm = actor.world.communicator("unborn").stream(&actor.stream);
            let comm = comm.with(|comm| comm.timeouts.init = Duration::from_secs(3));
            let ended = comm.with(|comm| comm.preflight = false).build().map(drop);
            if actor.is(0) {
                actor.world.set("told", &[])?;
            }
            ended
        },
        ends: Ends::Cause {
            culprits: &[1],
            class: TimedOut,
            root: "never_entered",
            says: &["read the weights"],
        },
        bound: Duration::from_secs(5),
        ..ROW
    },
];

pub(crate) const ROWS: &[Row] = &[
    Row {
        name: "killed",
        fault: "SIGKILL, nobody tells how it ended",
        harm: Some(kill_rank_1),
        ends: Ends::died(&[1], &["died"]),
        lost: &[1],
        then: Then::Generation,
        ..ROW
    },
    Row {
        name: "killed-after-a-while",
        fault: "SIGKILL after some seconds of work: heartbeats have told of its last call",
        harm: Some(|stage| {
            std::thread::sleep(Duration::from_millis(2500));
            kill_rank_1(stage)
        }),
        ends: Ends::died(
            &[1],
            &[
                "died",
                "its last heartbeat, ",
                "told of all_reduce #",
                "\"work\"",
            ],
        ),
        lost: &[1],
        bound: Duration::from_millis(4500),
        then: Then::Generation,
        ..ROW
    },
    Row {
        name: "killed-and-told",
        fault: "SIGKILL, its parent tells",
        cast: Cast::Fleet(3),
        harm: Some(kill_rank_1),
        ends: Ends::died(&[1], &["killed by SIGKILL"]),
        lost: &[1],
        then: Then::Generation,
        ..ROW
    },
    Row {
        name: "killed-and-shrunk",
        fault: "SIGKILL; the others shrink their communicator",
        harm: Some(kill_rank_1),
        ends: Ends::died(&[1], &["died"]),
        lost: &[1],
        then: Then::Shrink,
        ..ROW
    },
    Row {
        name: "killed-coordinator",
        fault: "SIGKILL of rank 0, which coordinates",
        harm: Some(|stage| {
            stage.signal(0, Signal::Kill);
            Ok(())
        }),
        ends: Ends::died(&[0], &["died"]),
        lost: &[0],
        then: Then::Shrink,
        ..ROW
    },
    Row {
        name: "killed-two",
        fault: "SIGKILL of two at the same time",
        cast: Cast::Fleet(4),
        harm: Some(|stage| {
            stage.signal(1, Signal::Kill);
            stage.signal(3, Signal::Kill);
            Ok(())
        }),
        ends: Ends::died(&[1, 3], &["killed by SIGKILL"]),
        lost: &[1, 3],
        then: Then::Generation,
        ..ROW
    },
    Row {
        name: "killed-in-a-call",
        fault: "SIGKILL inside an operation, between its begin and its end",
        play: |actor| {
            actor.harm();
            let killed = || match support::on_nvidias() {
                true => faults::at_call("cuLaunchKernelEx").nth(5).kill(),
                false => faults::at_operation("AllReduce").nth(5).kill(),
            };
            let _fault = actor.is(1).then(killed);
            actor.work()
        },
        ends: Ends::died(&[1], &["died"]),
        lost: &[1],
        then: Then::Generation,
        ..ROW
    },
    Row {
        name: "exits",
        fault: "`exit(3)` in the middle of work",
        play: |actor| end(actor, || std::process::exit(3)),
        ends: Ends::died(&[1], &["exit status 3"]),
        lost: &[1],
        then: Then::Generation,
        ..ROW
    },
    Row {
        name: "exits-and-told",
        fault: "`exit(3)`, its parent tells",
        cast: Cast::Fleet(3),
        play: |actor| end(actor, || std::process::exit(3)),
        ends: Ends::died(&[1], &["status 3"]),
        lost: &[1],
        then: Then::Generation,
        ..ROW
    },
    Row {
        name: "panics",
        fault: "a panic",
        play: |actor| end(actor, || panic!("no such expert: 7")),
        ends: Ends::Cause {
            culprits: &[1],
            class: Gone,
            root: "program_failed",
            says: &["panicked", "no such expert: 7"],
        },
        lost: &[1],
        then: Then::Generation,
        ..ROW
    },
    Row {
        name: "aborts",
        fault: "`abort()`, its parent tells",
        cast: Cast::Fleet(3),
        play: |actor| end(actor, || std::process::abort()),
        ends: Ends::died(&[1], &["killed by SIGABRT"]),
        lost: &[1],
        then: Then::Generation,
        ..ROW
    },
    Row {
        name: "segfaults",
        fault: "a segmentation fault, its parent tells",
        cast: Cast::Fleet(3),
        play: |actor| {
            end(actor, || {
                // SAFETY: not sound, which is the point: nothing is mapped there, and the process ends.
                unsafe { std::ptr::without_provenance_mut::<u8>(8).write_volatile(1) }
            })
        },
        ends: Ends::died(&[1], &["killed by SIGSEGV"]),
        lost: &[1],
        then: Then::Generation,
        ..ROW
    },
];
