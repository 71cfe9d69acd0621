//! What NVIDIA's own library reports to a profiler: kernels write the times at which their channels begin and end, which NCCL's
//! proxies read and pass on.

mod ranks;
mod real;

use std::collections::BTreeSet;
use std::{env, fs};

use nccl_emulator::{State, real_coverage};
use nccl_sys::{ncclDataType_t as Kind, ncclRedOp_t as Op};
use ranks::cases::{Case, Function};
use ranks::{Process, Rank, last_error, nccl, threads, wait_until};
use real::profiler::{self, CHANNEL, COLLECTIVE, Event, PLUGIN, POINT_TO_POINT, PROXY};
use real::{P2P, SOCKETS, on_each, version};
use serde_json::Value;

const ROUNDS: usize = 10;

/// Names NVIDIA's example of a profiler plugin, which is for 2.28 and newer: `cargo xtask real-nccl test` compiles it.
const EXAMPLE: &str = "NCCL_REAL_EXAMPLE_PROFILER";

/// Collectives and messages.
fn work(rank: &Rank) {
    for count in 0..ROUNDS {
        Case::new(Function::AllReduce, 1000 * count + 1).check(rank);
        Case::new(Function::ReduceScatter, 70_000).check(rank);
    }
    let (from, to) = (rank.memory(&[1f32; 5000]), rank.memory(&[0f32; 5000]));
    let (next, previous) = (
        (rank.rank + 1) % rank.ranks,
        (rank.rank + rank.ranks - 1) % rank.ranks,
    );
    for _ in 0..ROUNDS {
        assert_eq!(nccl!(ncclGroupStart()), 0);
        assert_eq!(rank.send(&from, Kind::ncclFloat32, next), 0);
        assert_eq!(rank.receive(&to, Kind::ncclFloat32, previous), 0);
        assert_eq!(nccl!(ncclGroupEnd()), 0, "{}", last_error());
    }
    rank.sync();
    assert_eq!(to.read(), [1.; 5000]);
}

fn of(events: &[Event], kind: u8) -> Vec<Event> {
    events
        .iter()
        .filter(|event| event.kind == kind)
        .copied()
        .collect()
}

#[test]
fn a_profiler_is_told_when_each_channel_of_a_kernel_begins_and_ends() {
    let name = "a_profiler_is_told_when_each_channel_of_a_kernel_begins_and_ends";
    for environment in [&P2P[..], &SOCKETS] {
        let environment = [environment, &[PLUGIN]].concat();
        on_each(name, 1, &environment, |process| {
            ranks::api();
            profiler::install();
            threads(3, |rank| {
                work(rank);
                // The proxies read what the kernels wrote, and report it later.
                wait_until("all channels have been told of", || {
                    let events = profiler::events();
                    let operations = events
                        .iter()
                        .filter(|event| matches!(event.kind, COLLECTIVE | POINT_TO_POINT));
                    let channels: usize = operations.map(|event| usize::from(event.channels)).sum();
                    let told = of(&events, CHANNEL);
                    told.len() >= channels && told.iter().all(|event| event.stopped)
                });
            });
            let events = profiler::events();
            let ranks = 3;
            assert_eq!(of(&events, COLLECTIVE).len(), ranks * 2 * ROUNDS);
            assert_eq!(of(&events, POINT_TO_POINT).len(), ranks * 2 * ROUNDS);
            let channels = of(&events, CHANNEL);
            assert!(channels.len() >= ranks * 4 * ROUNDS, "{}", channels.len());
            for event in &channels {
                assert!(0 < event.begun && event.begun <= event.ended, "{event:?}");
            }
            let sockets = process.log().contains(" via NET/Socket");
            assert_eq!(!of(&events, PROXY).is_empty(), sockets);
        });
    }
}

#[test]
fn progress_counters_are_read_and_their_clock_is_that_of_the_device() {
    let name = "progress_counters_are_read_and_their_clock_is_that_of_the_device";
    let environment = [
        ("NCCL_PROGRESS_COUNTERS", "1"),
        ("NCCL_RAS_ENABLE", "1"),
        ("NCCL_PROGRESS_COUNTER_MONITOR_POLL_MS", "1"),
    ];
    on_each(name, 2, &environment, |process| {
        let rank = process.join();
        let (from, to) = (rank.memory(&[1f32; 500]), rank.memory(&[0f32; 500]));
        for _ in 0..100 {
            let code = rank.all_reduce(&from, &to, Kind::ncclFloat32, Op::ncclSum);
            assert_eq!(code, 0);
        }
        rank.sync();
        assert_eq!(to.read(), [2.; 500]);
        std::thread::sleep(std::time::Duration::from_millis(100));
        let log = process.log();
        let complaint = log.lines().find(|line| {
            line.contains("rogress counter monitor: ") || line.contains("calibration failed")
        });
        assert_eq!(complaint, None);
        // The kernel by which 2.32 reads the device's clock.
        let kernels = real_coverage().unwrap().kernels;
        let clock = kernels
            .iter()
            .find(|one| one.name.contains("CaptureGpuTime"));
        let ran = clock.is_some_and(|one| matches!(one.state, State::Interpreted { times: 1.. }));
        assert_eq!(ran, version() >= 23200);
        rank.destroy();
    });
}

/// What NVIDIA's plugin wrote of this process's rank: events of Chrome's format for traces.
fn trace(process: &Process) -> Vec<Value> {
    let end = format!("_{}.json", process.rank);
    let place = process.file("");
    let written = fs::read_dir(&place).unwrap().map(|entry| entry.unwrap());
    let mut written = written.filter(|entry| entry.file_name().to_string_lossy().ends_with(&end));
    let file = written.next().expect("it wrote a trace").path();
    let text = fs::read_to_string(file).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// The beginnings of events of this category.
fn begun<'a>(trace: &'a [Value], category: &str) -> Vec<&'a Value> {
    trace
        .iter()
        .filter(|event| event["cat"] == *category && event["ph"] == *"b")
        .collect()
}

#[test]
fn nvidias_example_of_a_plugin_traces_kernels_and_proxies() {
    let name = "nvidias_example_of_a_plugin_traces_kernels_and_proxies";
    let Ok(plugin) = env::var(EXAMPLE) else {
        println!("NOT TESTED: {name}: {EXAMPLE} names no plugin (cargo xtask real-nccl test)");
        return;
    };
    for environment in [&P2P[..], &SOCKETS] {
        let own = [
            ("NCCL_PROFILER_PLUGIN", plugin.as_str()),
            ("NCCL_PROFILE_EVENT_MASK", "4095"),
            ("NCCL_PROFILE_DUMP_FILE", "{place}/trace"),
            // By default the plugin keeps 8 events of each of the first four kinds.
            ("NCCL_PROFILE_GROUP_API_POOL_SIZE", "256"),
            ("NCCL_PROFILE_COLL_API_POOL_SIZE", "256"),
            ("NCCL_PROFILE_P2P_API_POOL_SIZE", "256"),
            ("NCCL_PROFILE_KERNEL_LAUNCH_POOL_SIZE", "256"),
            ("NCCL_PROFILE_GROUP_POOL_SIZE", "256"),
            ("NCCL_PROFILE_COLL_POOL_SIZE", "256"),
            ("NCCL_PROFILE_P2P_POOL_SIZE", "256"),
        ];
        let environment = [environment, &own].concat();
        on_each(name, 2, &environment, |process| {
            let rank = process.join();
            work(&rank);
            rank.destroy();
            if version() < 22800 {
                let log = process.log();
                assert!(log.contains("ncclProfiler_v"), "{log}");
                return;
            }
            let trace = trace(&process);
            let collectives = begun(&trace, "COLL");
            assert_eq!(collectives.len(), 2 * ROUNDS);
            assert_eq!(begun(&trace, "P2P").len(), 2 * ROUNDS);
            let names: BTreeSet<_> = collectives
                .iter()
                .map(|event| event["name"].as_str())
                .collect();
            assert_eq!(names, [Some("AllReduce"), Some("ReduceScatter")].into());
            let channels = begun(&trace, "GPU");
            assert!(channels.len() >= 3 * ROUNDS, "{}", channels.len());
            for event in &channels {
                let clock = |name: &str| event["args"][name].as_u64().unwrap();
                assert!(clock("StartGpuClk") > 0, "{event}");
                // The plugin records no end for other channels: where it reads the kind of an event, the channel is a part of it.
                if clock("Channel") == 0 {
                    assert!(clock("StartGpuClk") <= clock("StopGpuClk"), "{event}");
                }
            }
            let sockets = process.log().contains(" via NET/Socket");
            let proxies = begun(&trace, "PROXY");
            let operations = proxies
                .iter()
                .filter(|event| !event["args"]["Steps"].is_null());
            assert_eq!(operations.count() > 0, sockets);
        });
    }
}
