//! What the emulator's NCCL reports to a profiler plugin.

mod captures;
mod plugin;
mod ranks;

use std::fs;
use std::process::Command;

use captures::RELAXED;
use nccl_sys::{
    NCCL_COLLCONFIG_INITIALIZER, NCCL_CONFIG_INITIALIZER, ncclDataType_t as Kind, ncclRedOp_t as Op,
};
use plugin::*;
use ranks::{Gate, Rank, alone, api, is_child_of, nccl, threads, unique_id, wait_until};

/// Runs `body` in a process of its own for each of these environments.
fn alone_in_each(test: &str, environments: &[&[(&str, &str)]], body: impl Fn()) {
    if is_child_of(test) {
        return body();
    }
    for environment in environments {
        alone(test, environment, &body);
    }
}

#[test]
fn each_release_takes_the_newest_table_that_it_knows() {
    let name = "each_release_takes_the_newest_table_that_it_knows";
    let releases = [
        ("2.26.2", "0"),
        ("2.27.7", "4"),
        ("2.28.9", "5"),
        ("2.29.3", "6"),
        ("2.30.7", "6"),
        ("2.32.3", "7"),
    ];
    let environments = releases
        .map(|(release, version)| [("NCCL_EMULATOR_VERSION", release), ("WANTED", version)]);
    let environments: Vec<&[_]> = environments.iter().map(|one| &one[..]).collect();
    alone_in_each(name, &environments, || {
        api();
        install(&[4, 5, 6, 7]);
        threads(2, |rank| sum(rank, &rank.memory(&[1.])));
        let told = told();
        let wanted: u32 = std::env::var("WANTED").unwrap().parse().unwrap();
        let taken: Vec<u32> = told.communicators.iter().map(|one| one.version).collect();
        assert_eq!(taken, vec![wanted; if wanted == 0 { 0 } else { 2 }]);
        assert_eq!(told.of(COLL).is_empty(), wanted == 0);
        assert_eq!(told.of(COLL_API).is_empty(), wanted < 5);
    });
}

#[test]
fn tasks_are_below_their_group_for_a_plugin_of_version_4() {
    let name = "tasks_are_below_their_group_for_a_plugin_of_version_4";
    alone(name, &[], || {
        api();
        install(&[4]);
        threads(2, |rank| {
            let (from, to) = (rank.memory(&[1.; 100]), rank.memory(&[0.; 100]));
            sum(rank, &from);
            exchange(rank, &from, &to);
        });
        wait_for_ends(KERNEL_CH, 6);
        let told = told();
        assert!(told.communicators.iter().all(|one| one.version == 4));
        let groups = told.of(GROUP);
        assert_eq!(groups.len(), 4);
        let below: usize = groups
            .iter()
            .map(|group| told.below(group, COLL).len() + told.below(group, P2P).len())
            .sum();
        assert_eq!(below, 2 + 4);
        for kind in [GROUP_API, COLL_API, P2P_API, KERNEL_LAUNCH] {
            assert_eq!(told.of(kind).len(), 0);
        }
    });
}

#[test]
fn a_communicator_is_described_and_finalized_once() {
    let name = "a_communicator_is_described_and_finalized_once";
    alone(name, &[], || {
        api();
        install(&[7]);
        let id = unique_id();
        let mut rank = Rank::alone(1, 0);
        let mut config = NCCL_CONFIG_INITIALIZER;
        config.commName = c"named".as_ptr();
        let code = nccl!(ncclCommInitRankConfig(
            &mut rank.comm,
            1,
            id,
            0,
            &mut config
        ));
        assert_eq!(code, 0);
        let of = told().communicators[0].clone();
        assert_eq!(
            (of.name.as_str(), of.nodes, of.ranks, of.rank),
            ("named", 1, 1, 0)
        );
        assert!(!of.is_finalized);
        rank.destroy();
        assert!(told().communicators[0].is_finalized);
        assert_eq!(told().communicators[0].name_at_the_end, "named");
        threads(2, |_| {});
        let all = told().communicators.clone();
        assert_eq!(all.len(), 3);
        assert!(all.iter().all(|one| one.is_finalized));
        assert_eq!(all[1].hash, all[2].hash);
        assert_ne!(all[0].hash, all[1].hash);
        assert_eq!(all[1].name, "");
        // An abort ends it as well.
        let id = unique_id();
        let rank = Rank::join(id, 1, 0);
        assert_eq!(rank.abort(), 0);
        assert!(told().communicators[3].is_finalized);
    });
}

#[test]
fn events_of_a_collective_have_their_parents_and_their_order() {
    let name = "events_of_a_collective_have_their_parents_and_their_order";
    alone(name, &[], || {
        api();
        install(&[7]);
        threads(2, |rank| {
            let memory = rank.memory(&[1f32; 1000]);
            let mut config = NCCL_COLLCONFIG_INITIALIZER;
            config.userProfilerTag = 77;
            let code = nccl!(ncclAllReduceConfig(
                memory.ptr(),
                memory.ptr(),
                memory.len,
                Kind::ncclFloat32,
                Op::ncclSum,
                rank.comm,
                rank.cuda_stream(),
                &config
            ));
            assert_eq!(code, 0);
            rank.sync();
            let code = nccl!(ncclAllGather(
                memory.ptr(),
                rank.memory(&[0f32; 2000]).ptr(),
                1000,
                Kind::ncclFloat32,
                rank.comm,
                rank.cuda_stream()
            ));
            assert_eq!(code, 0);
            sum(rank, &memory);
        });
        wait_for_ends(KERNEL_CH, 6);
        let told = told();
        for context in 1..=2 {
            let of = |kind| {
                let mut events = told.of(kind);
                events.retain(|event| event.context == context);
                events
            };
            let group = of(GROUP_API).swap_remove(0);
            let call = &told.below(&group, COLL_API)[0];
            assert_eq!((call.function.as_str(), call.count), ("AllReduce", 1000));
            assert_eq!((call.data_type.as_str(), call.tag), ("ncclFloat32", 77));
            let task = &told.below(call, COLL)[0];
            let launch = &told.below(&group, KERNEL_LAUNCH)[0];
            let in_launch = &told.events[task.group - 1];
            assert_eq!(in_launch.kind, GROUP);
            assert_eq!(task.algorithm, "RING/SIMPLE");
            assert_eq!((task.channels, task.tag), (1, 77));
            assert_eq!(task.rank, told.communicators[context - 1].rank);
            let channel = &told.below(task, KERNEL_CH)[0];
            let [(state, ended)] = channel.states[..] else {
                panic!("{channel:?}");
            };
            assert_eq!(state, KERNEL_CH_STOP);
            assert!(0 < channel.time && channel.time <= ended);
            assert_eq!(states(&group), [GROUP_START_STOP, GROUP_END_START]);

            use Moment::{Start, Stop};
            let order = [
                Start(group.handle),
                Start(call.handle),
                Stop(call.handle),
                Start(launch.handle),
                Stop(launch.handle),
                Start(in_launch.handle),
                Start(task.handle),
                Stop(task.handle),
                Stop(in_launch.handle),
                Stop(group.handle),
            ];
            let places: Vec<usize> = order.iter().map(|&moment| told.when(moment)).collect();
            assert!(places.is_sorted(), "{places:?}");
            assert!(told.when(Start(task.handle)) < told.when(Start(channel.handle)));

            let tasks: Vec<_> = of(COLL)
                .into_iter()
                .map(|task| (task.function, task.count, task.data_type, task.sequence))
                .collect();
            let float = String::from("ncclFloat32");
            assert_eq!(
                tasks,
                [
                    ("AllReduce".into(), 1000, float.clone(), 0),
                    ("AllGather".into(), 4000, "ncclInt8".into(), 0),
                    ("AllReduce".into(), 1000, float, 1),
                ]
            );
        }
        assert!(told.events.iter().all(|event| event.stops == 1));
        // Messages within a host do not use a proxy.
        assert_eq!(told.of(PROXY_OP).len(), 0);
    });
}

#[test]
fn a_group_has_one_event_and_each_message_its_own() {
    let name = "a_group_has_one_event_and_each_message_its_own";
    alone(name, &[], || {
        api();
        install(&[6]);
        threads(3, |rank| {
            let (from, to) = (rank.memory(&[1.; 100]), rank.memory(&[0.; 100]));
            exchange(rank, &from, &to);
            rank.sync();
            let (from, to) = (rank.memory(&[1.; 30]), rank.memory(&[0.; 30]));
            assert_eq!(rank.all_to_all(&from, &to, Kind::ncclFloat32), 0);
        });
        // A message to itself has no event of a kernel.
        wait_for_ends(KERNEL_CH, 3 * (2 + 4));
        let told = told();
        for rank in 0..3 {
            let context = told.communicators.iter().position(|one| one.rank == rank);
            let mut groups = told.of(GROUP_API);
            groups.retain(|group| group.context == context.unwrap() + 1);
            let [messages, all_to_all] = &groups[..] else {
                panic!("{groups:?}");
            };
            // The depth is that of the program's group and of the call in it.
            assert_eq!((messages.steps, all_to_all.steps), (2, 1));
            let tasks = |group: &Event| {
                let calls = told.below(group, P2P_API);
                let below = |call: &Event| told.below(call, P2P);
                let mut tasks: Vec<_> = calls.iter().flat_map(below).collect();
                tasks.sort_by_key(|task| (task.function.clone(), task.peer));
                tasks
                    .into_iter()
                    .map(|task| (task.function, task.peer, task.count))
                    .collect::<Vec<_>>()
            };
            let (next, previous) = ((rank + 1) % 3, (rank + 2) % 3);
            assert_eq!(
                tasks(messages),
                [("Recv".into(), previous, 100), ("Send".into(), next, 100),]
            );
            assert_eq!(tasks(all_to_all).len(), 6);
        }
        assert!(told.events.iter().all(|event| event.stops == 1));
    });
}

#[test]
fn the_mask_counts_as_it_is_when_a_call_is_made() {
    let name = "the_mask_counts_as_it_is_when_a_call_is_made";
    alone(name, &[], || {
        api();
        install(&[7]);
        want(0);
        threads(1, |_| {});
        let kinds = || {
            let told = told();
            let kinds = told.events.iter().map(|event| event.kind);
            kinds
                .filter(|&kind| kind != 0)
                .collect::<std::collections::BTreeSet<_>>()
        };
        let run = |mask: i32| {
            want(mask);
            forget();
            threads(2, |rank| {
                let memory = rank.memory(&[1.]);
                sum(rank, &memory);
                rank.sync();
            });
            kinds()
        };
        assert!(run(0).is_empty());
        // An enabled kind of event brings its ancestors, and no others.
        assert_eq!(run(GROUP_API as i32), [GROUP_API].into());
        assert_eq!(run(COLL as i32), [GROUP, COLL, GROUP_API, COLL_API].into());
        assert_eq!(
            run(KERNEL_CH as i32),
            [GROUP, COLL, KERNEL_CH, GROUP_API, COLL_API].into()
        );
        assert_eq!(run(P2P as i32), [GROUP, GROUP_API].into());

        // The mask changes during the communicator's life.
        want(0);
        forget();
        threads(1, |rank| {
            let (from, to) = (rank.memory(&[1.]), rank.memory(&[0.]));
            let step = |mask: i32, wanted: usize| {
                want(mask);
                exchange(rank, &from, &to);
                assert_eq!(told().of(P2P).len(), wanted);
            };
            // The init has set the first mask.
            step(0, 0);
            step(P2P as i32, 2);
            step(0, 2);
            step(P2P as i32, 4);
        });
    });
}

#[test]
fn a_kernel_begins_when_its_stream_comes_to_it() {
    let name = "a_kernel_begins_when_its_stream_comes_to_it";
    alone(name, &[], || {
        api();
        install(&[7]);
        threads(2, |rank| {
            let memory = rank.memory(&[1.]);
            sum(rank, &memory);
            rank.sync();
            static BOTH: std::sync::Barrier = std::sync::Barrier::new(2);
            BOTH.wait();
            if rank.rank == 0 {
                wait_for_ends(KERNEL_CH, 2);
                forget();
            }
            BOTH.wait();
            let gate = Gate::on(rank);
            sum(rank, &memory);
            BOTH.wait();
            // The operation is reported, and has not begun on the device.
            std::thread::sleep(std::time::Duration::from_millis(30));
            {
                let told = told();
                assert_eq!(told.of(COLL).len(), 2);
                assert!(told.of(COLL).iter().all(|event| event.stops == 1));
                assert_eq!(told.of(KERNEL_CH).len(), 0);
            }
            BOTH.wait();
            if rank.rank == 0 {
                gate.open();
                // The kernel of rank 0 waits for rank 1 on the device.
                wait_until("the kernel of rank 0 has begun", || {
                    rank.is_idle();
                    told().of(KERNEL_CH).len() == 1
                });
                let channel = told().of(KERNEL_CH)[0].clone();
                assert_eq!((channel.stops, channel.states.len()), (0, 0));
                BOTH.wait();
            } else {
                BOTH.wait();
                gate.open();
            }
            rank.sync();
            BOTH.wait();
            wait_for_ends(KERNEL_CH, 2);
        });
    });
}

/// Captures a sum, and launches the graph twice. Returns the numbers of events of `kind`: at first, captured, after each launch.
fn replays(mask: i32, kind: u64) -> [usize; 4] {
    let counts = std::sync::Mutex::new([0; 4]);
    want(mask);
    threads(2, |rank| {
        let memory = rank.memory(&[1.]);
        let at = |place: usize| {
            static BOTH: std::sync::Barrier = std::sync::Barrier::new(2);
            rank.sync();
            BOTH.wait();
            counts.lock().unwrap()[place] = told().of(kind).len();
            BOTH.wait();
        };
        sum(rank, &memory);
        rank.sync();
        if rank.rank == 0 {
            forget();
        }
        at(0);
        rank.gpu.bind_to_thread().unwrap();
        rank.stream.begin_capture(RELAXED).unwrap();
        sum(rank, &memory);
        let graph = captures::end(&rank.stream);
        at(1);
        graph.launch().unwrap();
        at(2);
        graph.launch().unwrap();
        at(3);
        drop(graph);
    });
    counts.into_inner().unwrap()
}

#[test]
fn a_graph_posts_its_operations_at_each_replay_if_a_proxy_takes_part() {
    let name = "a_graph_posts_its_operations_at_each_replay_if_a_proxy_takes_part";
    alone(name, &[], || {
        api();
        install(&[7]);
        let (all, tasks) = (ALL, COLL as i32);
        assert_eq!(replays(all, COLL), [0, 0, 2, 4]);
        assert_eq!(replays(all, KERNEL_CH), [0, 0, 2, 4]);
        assert_eq!(replays(all, KERNEL_LAUNCH), [0, 2, 2, 2]);
        assert_eq!(replays(tasks, COLL), [0, 2, 2, 2]);
        assert_eq!(replays(tasks, COLL_API), [0, 2, 2, 2]);
        let calls = told().of(COLL_API);
        assert!(calls.iter().all(|call| call.is_captured));
    });
}

/// A plugin in C, which writes to a file when it is loaded, used and closed.
const LIBRARY: &str = r#"
#include <stdio.h>
#include <stdlib.h>
static void say(const char* what) {
    FILE* file = fopen(getenv("SAID"), "a");
    fprintf(file, "%s\n", what);
    fclose(file);
}
__attribute__((constructor)) static void opened(void) { say("opened"); }
__attribute__((destructor)) static void closed(void) { say("closed"); }
static int init(void** context, int* mask, const char* name, unsigned long hash, int nodes, int ranks, int rank,
                void (*log)(int, unsigned long, const char*, int, const char*, ...)) {
    log(3, ~0ul, __FILE__, __LINE__, "logged: %s %d %.2f %d %ld %s %g", "text", ranks, 2.5, -4, 5l, "6", 0.5);
    *context = context; *mask = 2; say("init"); return 0;
}
static int start(void* context, void** handle, void* descriptor) { *handle = handle; say("start"); return 0; }
static int stop(void* handle) { say("stop"); return 0; }
static int record(void* handle, int state, void* arguments) { return 0; }
static int finalize(void* context) { say("finalize"); return 0; }
struct { const char* name; void *init, *start, *stop, *record, *finalize; } ncclProfiler_v4 =
    {"in C", init, start, stop, record, finalize};
"#;

#[test]
fn the_library_that_a_variable_names_is_closed_with_the_last_communicator() {
    let name = "the_library_that_a_variable_names_is_closed_with_the_last_communicator";
    if is_child_of(name) {
        for _ in 0..2 {
            threads(2, |rank| sum(rank, &rank.memory(&[1.])));
        }
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (source, library) = (
        directory.path().join("plugin.c"),
        directory.path().join("libnccl-profiler-mine.so"),
    );
    fs::write(&source, LIBRARY).unwrap();
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-w", "-o"])
        .args([&library, &source])
        .status();
    assert!(compiled.unwrap().success());
    let (library, directory) = (
        library.to_str().unwrap(),
        directory.path().to_str().unwrap(),
    );
    let log = format!("{directory}/log");
    // As a profiler plugin by its path and by the middle of its file name, and as a network plugin.
    for (variable, value) in [
        ("NCCL_PROFILER_PLUGIN", library),
        ("NCCL_PROFILER_PLUGIN", "mine"),
        ("NCCL_NET_PLUGIN", library),
    ] {
        let said = format!("{directory}/said");
        let _ = fs::remove_file(&said);
        let environment = [
            (variable, value),
            ("LD_LIBRARY_PATH", directory),
            ("SAID", said.as_str()),
            ("NCCL_DEBUG", "INFO"),
            ("NCCL_DEBUG_FILE", log.as_str()),
        ];
        alone(name, &environment, || ());
        let said = fs::read_to_string(said).unwrap();
        let count = |what: &str| said.lines().filter(|&line| line == what).count();
        assert_eq!((count("opened"), count("closed")), (2, 2), "{said}");
        assert_eq!((count("init"), count("finalize")), (4, 4), "{said}");
        // A group and a collective for each rank.
        assert_eq!((count("start"), count("stop")), (8, 8), "{said}");
        assert!(said.ends_with("closed\n"));
        let log = fs::read_to_string(&log).unwrap();
        assert!(log.contains("PROFILER/Plugin: Loaded in C (v4)"), "{log}");
        // On other architectures the log has the format without its values.
        if cfg!(target_arch = "x86_64") {
            assert!(log.contains("logged: text 2 2.50 -4 5 6 0.5\n"), "{log}");
        }
    }
}

#[test]
fn without_a_plugin_or_with_none_nothing_is_loaded() {
    let name = "without_a_plugin_or_with_none_nothing_is_loaded";
    let environments = ["none", "no-such-plugin"].map(|value| [("NCCL_PROFILER_PLUGIN", value)]);
    let environments: Vec<&[_]> = environments.iter().map(|one| &one[..]).collect();
    alone_in_each(name, &environments, || {
        api();
        install(&[4, 5, 6, 7]);
        threads(2, |rank| sum(rank, &rank.memory(&[1.])));
        assert!(told().communicators.is_empty());
    });
}
