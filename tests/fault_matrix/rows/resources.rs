//! Resources that run out on one rank.

use nccl::fault::FaultClass::Failed;
use nccl_emulator::faults;

use crate::cgroup::Group;
use crate::row::{Cast, Ends, LONG, ROW, Row, Then};
use crate::stage::{Stage, Unable};
use crate::support;

const NCCL_LOG: &str = "/tmp/nccl-test-device-memory.%p.log";

pub(crate) const ROWS: &[Row] = &[
    Row {
        name: "out-of-memory",
        fault: "the kernel kills a process that takes more memory than its control group has",
        cast: Cast::Fleet(3),
        play: |actor| {
            if actor.is(1) {
                println!("may be limited");
                let mut held = Vec::new();
                // Another process puts this one under its limit meanwhile.
                for _ in 0..2000 {
                    held.push(vec![1u8; 1 << 20]);
                    std::thread::sleep(std::time::Duration::from_micros(500));
                }
                println!("not limited: {}", held.len());
            }
            actor.work()
        },
        harm: Some(|stage| {
            let within = std::time::Duration::from_secs(20);
            stage.says(1, "may be limited", within)?;
            let Some(group) = Group::new("memory", 128 << 20) else {
                return Err(Unable::NotHere(
                    "it needs a control group that can be written",
                ));
            };
            let taken = group.take(stage.pid(1));
            stage.group = Some(group);
            taken.map_err(|error| Unable::Failed(format!("the control group: {error:#}")))
        }),
        ends: Ends::died(&[1], &["killed by SIGKILL"]),
        lost: &[1],
        bound: std::time::Duration::from_secs(8),
        then: Then::Generation,
        ..ROW
    },
    Row {
        name: "device-memory",
        fault: "NCCL finds no memory on a device when it starts there: it warns, and returns `ncclUnhandledCudaError` (the test says and returns both for it)",
        variables: &[("NCCL_DEBUG_FILE", NCCL_LOG)],
        built: false,
        play: |actor| {
            actor.harm();
            if !actor.is(1) {
                return actor.build("unborn").map(drop);
            }
            if support::on_nvidias() {
                let _fault = faults::at_call("cuMemCreate").fail(2);
                return actor.build("unborn").map(drop);
            }
            // NCCL's own allocations inside its init are not calls of the driver here.
            let own = std::process::id();
            let log = NCCL_LOG.replace("%p", &own.to_string());
            let words = "alloc.h:236 NCCL WARN Failed to CUDA calloc 33554432 bytes";
            std::fs::write(&log, format!("here:{own}:{own} [0] {words}\n")).expect("a file");
            let _fault = faults::at_call("ncclCommInitRankConfig").fail(1);
            let ended = actor.build("unborn").map(drop);
            std::fs::remove_file(log).expect("it is there");
            ended
        },
        ends: Ends::Cause {
            culprits: &[1],
            class: Failed,
            root: "resource_exhausted",
            says: &["device memory", "Failed to CUDA calloc"],
        },
        ..ROW
    },
    Row {
        name: "descriptors",
        fault: "a rank has no file descriptors left for another communicator",
        play: |actor| {
            actor.harm();
            let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
            if actor.is(1) {
                let used = std::fs::read_dir("/proc/self/fd").expect("/proc").count();
                set_files(used as u64 - 1);
            }
            let result = actor.build("one too many").map(drop);
            set_files(limit.current.unwrap_or(1024));
            result
        },
        ends: Ends::Cause {
            culprits: &[1],
            class: Failed,
            root: "resource_exhausted",
            says: &["ncclCommInitRankConfig returned 2"],
        },
        ..ROW
    },
    Row {
        name: "threads",
        fault: "a rank can start no more threads, and makes another communicator",
        play: |actor| {
            if actor.is(1) {
                until_limited();
            }
            actor.build("one too many").map(drop)
        },
        harm: Some(no_threads),
        ends: Ends::Cause {
            culprits: &[1],
            class: Failed,
            root: "resource_exhausted",
            says: &["starting a thread", "pids.max leaves 0"],
        },
        leave: &[1],
        then: Then::Generation,
        ..ROW
    },
    Row {
        name: "threads-when-told",
        fault: "a rank can start no more threads, not even to end its communicator, and another one is killed",
        play: |actor| {
            let mut y = actor.memory::<f32>(64);
            if actor.is(2) {
                actor.world.barrier("waiting").expect("all are there");
                std::thread::sleep(LONG);
            }
            let sum = actor
                .comm()
                .all_reduce_in_place(&mut y, nccl::ReduceOp::Sum)?;
            actor.world.barrier("waiting").expect("all are there");
            if actor.is(1) {
                until_limited();
            }
            sum.wait()
        },
        harm: Some(|stage| {
            no_threads(stage)?;
            stage.signal(2, nccl::launch::Signal::Kill);
            Ok(())
        }),
        ends: Ends::died(&[2], &["died"]),
        lost: &[2],
        leave: &[1],
        then: Then::Generation,
        ..ROW
    },
];

/// Announces that this process may be limited, and waits until it is.
fn until_limited() {
    println!("may be limited");
    let groups = || std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    while !groups().contains("nccl-test-") {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// From now on rank 1 can start no thread.
fn no_threads(stage: &mut Stage) -> Result<(), Unable> {
    stage.says(1, "may be limited", std::time::Duration::from_secs(20))?;
    let Some(group) = Group::new("pids", 1) else {
        return Err(Unable::NotHere(
            "it needs a control group that can be written",
        ));
    };
    let taken = group.take(stage.pid(1));
    stage.group = Some(group);
    taken.map_err(|error| Unable::Failed(format!("the control group: {error:#}")))
}

fn set_files(files: u64) {
    let resource = rustix::process::Resource::Nofile;
    let limit = rustix::process::getrlimit(resource);
    let limit = rustix::process::Rlimit {
        current: Some(files),
        ..limit
    };
    rustix::process::setrlimit(resource, limit).expect("below the hard limit");
}
