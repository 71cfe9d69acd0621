//! Ranks started by a program itself (`nccl::launch`), rather than by nccl-run.

use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nccl::launch::{Event, Exit, Fleet, FleetBuilder, Output, Signal, Stream};
use nccl::{Rendezvous, World};
use nccl_tools::testing::{Role, again, end_with, eventually, lives, name};

/// Limit of everything here.
const LONG: Duration = Duration::from_secs(30);

fn quiet(ranks: usize) -> FleetBuilder {
    Fleet::builder(ranks).with(|fleet| {
        fleet.output = Output::Discard;
        fleet.linger = Duration::from_millis(200);
    })
}

fn shell(script: &str) -> impl FnMut(usize) -> Command + Send + 'static {
    let script = script.to_owned();
    move |_| {
        let mut command = Command::new("sh");
        command.args(["-c", &script]);
        command
    }
}

/// Runs the rest of the test in a process of its own, so that it counts only its own resources.
fn alone(test: &str, body: impl FnOnce()) {
    if Role::of(test) != Role::Test {
        end_with(body);
    }
    let output = again(test, "alone").output().expect("the test runs");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
}

fn held() -> (usize, usize) {
    let entries = |path: &str| std::fs::read_dir(path).expect("of this process").count();
    (entries("/proc/self/fd"), entries("/proc/self/task"))
}

/// The resources of the process once they are stable: ended threads may still be exiting.
fn settled() -> (usize, usize) {
    let (mut known, mut since) = (held(), Instant::now());
    while since.elapsed() < Duration::from_secs(1) {
        std::thread::sleep(Duration::from_millis(20));
        let now = held();
        if now != known {
            (known, since) = (now, Instant::now());
        }
    }
    known
}

/// Starts the permanent resources of a process that has joined a world: the thread that reads its connections.
fn warm_up() {
    let directory = tempfile::tempdir().unwrap();
    let rendezvous = Rendezvous::unix(directory.path().join("meet"), 0, 1);
    drop(World::join(rendezvous.unwrap()).unwrap());
}

/// All children of this process, zombies as well.
fn children() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").expect("threads");
    let texts = tasks
        .flatten()
        .map(|task| std::fs::read_to_string(task.path().join("children")).unwrap_or_default());
    let texts: Vec<String> = texts.collect();
    let pids = texts.iter().flat_map(|text| text.split_whitespace());
    pids.map(str::to_owned).collect()
}

#[test]
fn a_restarted_rank_meets_the_survivors_in_the_next_generation() {
    let test = name(&|| ());
    if let Role::Child(directory) = Role::of(&test) {
        end_with(|| survivor_or_victim(Path::new(&directory)));
    }
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let role = directory.path().display().to_string();
    let fleet = quiet(3).with(|fleet| fleet.keep_others = true);
    let fleet = fleet.start(move |_| again(&test, &role)).unwrap();
    for rank in 0..3 {
        eventually("the first world is there", || {
            at(&format!("{rank}-0")).exists()
        });
    }
    let before = fleet.pids();
    fleet.signal(1, Signal::Kill);
    let mut events = fleet.events();
    let died = events.find_map(|event| match event {
        Event::Exited(end) => Some(end),
        _ => None,
    });
    let died = died.expect("rank 1 was killed");
    assert_eq!((died.rank, died.exit.signal()), (1, Some(Signal::Kill)));
    let generation = fleet.restart(1).unwrap();
    assert_eq!(generation, 1);
    // By then the restarted rank has found a rank 0 that does not know a new generation yet.
    std::thread::sleep(Duration::from_millis(300));
    // Atomically: the file is complete, or missing.
    std::fs::write(at("generation.partial"), generation.to_string()).unwrap();
    std::fs::rename(at("generation.partial"), at("generation")).unwrap();
    let report = fleet.wait_timeout(LONG).expect("they end");
    assert!(report.is_success(), "{report}");
    // The survivors are the same processes.
    let ends: Vec<(u32, u64)> = report
        .ranks
        .iter()
        .map(|end| (end.pid, end.generation))
        .collect();
    assert_eq!((Some(ends[0].0), Some(ends[2].0)), (before[0], before[2]));
    assert_eq!((ends[1].1, ends[2].1), (1, 0));
}

fn survivor_or_victim(directory: &Path) -> Result<(), String> {
    let rendezvous = Rendezvous::from_env().map_err(|error| format!("{error:#}"))?;
    let rendezvous = rendezvous.with(|meet| meet.timeout = LONG);
    let join = |generation: Option<u64>| {
        let mut rendezvous = rendezvous.clone();
        rendezvous.generation = generation.unwrap_or(rendezvous.generation);
        World::join(rendezvous).map_err(|error| format!("{error:#}"))
    };
    let world = join(None)?;
    let told = std::env::var("NCCL_RUN_GENERATION").map_err(|error| format!("{error:#}"))?;
    let note = directory.join(format!("{}-{told}", world.rank()));
    std::fs::write(note, "").map_err(|error| format!("{error:#}"))?;
    let world = if told == "0" {
        // A service learns the generation from the launcher that restarts ranks.
        let file = directory.join("generation");
        eventually("there is another generation", || file.exists());
        let text = std::fs::read_to_string(file).map_err(|error| format!("{error:#}"))?;
        drop(world);
        let generation = text
            .parse()
            .map_err(|error| format!("{text:?}: {error:#}"))?;
        join(Some(generation))?
    } else {
        world
    };
    assert_eq!(world.size(), 3);
    Ok(())
}

#[test]
fn events_come_in_order_and_to_everybody() {
    let fleet = quiet(2)
        .start(shell("sleep $NCCL_RUN_RANK; exit $NCCL_RUN_RANK"))
        .unwrap();
    let seen = |fleet: &Fleet| -> Vec<String> {
        let mut events = Vec::new();
        for event in fleet.events() {
            events.push(match event {
                Event::Started {
                    rank, generation, ..
                } => format!("started {rank} generation {generation}"),
                Event::Exited(end) => format!("rank {} {}", end.rank, end.exit),
                Event::Ending(signal) => format!("ending by {signal}"),
                Event::Finished => break,
                other => format!("{other:?}"),
            });
        }
        events
    };
    let expected = [
        "started 0 generation 0",
        "started 1 generation 0",
        "rank 0 exit code 0",
        "rank 1 exit code 1",
    ];
    assert_eq!(seen(&fleet), expected);
    assert_eq!(seen(&fleet), expected);
    drop(fleet);
}

#[test]
fn events_end_with_the_fleet() {
    let fleet = quiet(1).start(shell("sleep 60")).unwrap();
    let events = fleet.events();
    drop(fleet);
    let last = events.last();
    assert!(matches!(last, Some(Event::Finished)), "{last:?}");
}

#[test]
fn twenty_restarts_leave_descriptors_and_threads_as_they_were() {
    alone(&name(&|| ()), || {
        warm_up();
        let none = settled();
        let fleet = quiet(2)
            .with(|fleet| fleet.keep_others = true)
            .start(shell("sleep 60"))
            .unwrap();
        fleet.restart(1).unwrap();
        let with = settled();
        for turn in 0..20 {
            assert_eq!(fleet.restart(turn % 2).unwrap(), turn as u64 + 2);
        }
        eventually("descriptors are as they were", || held() == with);
        let generation = fleet.restart_all().unwrap();
        assert_eq!(generation, 22);
        eventually("descriptors are as they were", || held() == with);
        drop(fleet);
        // The last thread may still be exiting.
        eventually("nothing is kept", || held() == none);
        assert!(children().is_empty(), "{:?}", children());
    });
}

#[test]
fn a_fleet_that_is_dropped_leaves_no_process_and_no_file() {
    alone(&name(&|| ()), || {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("place");
        let script = format!(
            "echo $NCCL_RUN_RENDEZVOUS > {0}.$$; mv {0}.$$ {0}; trap '' TERM; sleep 60 & wait",
            file.display()
        );
        let fleet = quiet(3).start(shell(&script)).unwrap();
        eventually("a rank runs", || file.exists());
        let pids: Vec<u32> = fleet.pids().into_iter().flatten().collect();
        let keeper = fleet.keeper().expect("there is a shell");
        let begun = Instant::now();
        drop(fleet);
        assert!(begun.elapsed() < Duration::from_secs(5));
        assert!(children().is_empty(), "{:?}", children());
        assert!(!pids.iter().any(|&pid| lives(pid)) && !lives(keeper));
        let place = std::fs::read_to_string(file).unwrap();
        let socket = Path::new(place.trim().strip_prefix("unix:").unwrap());
        assert!(!socket.parent().unwrap().exists());
    });
}

#[test]
fn ranks_do_not_end_with_the_thread_that_started_them() {
    let starter = std::thread::spawn(|| quiet(2).start(shell("sleep 60")));
    let fleet = starter.join().unwrap().unwrap();
    assert!(fleet.wait_timeout(Duration::from_millis(300)).is_none());
    assert_eq!(fleet.pids().iter().flatten().count(), 2);
}

#[test]
fn killing_a_program_ends_the_ranks_that_it_started() {
    let test = name(&|| ());
    if let Role::Child(directory) = Role::of(&test) {
        end_with(|| {
            // The rank's own child closes all descriptors by which it could be found, and ignores signals.
            let script = format!(
                "sh -c 'trap \"\" HUP INT TERM; echo $$ > {0}/c.$$; mv {0}/c.$$ {0}/child-'$NCCL_RUN_RANK'; \
                 exec sleep 60' >/dev/null 2>&1 </dev/null & \
                 echo $$ > {0}/r.$$; mv {0}/r.$$ {0}/rank-$NCCL_RUN_RANK; wait",
                directory
            );
            let fleet = quiet(2).start(shell(&script)).unwrap();
            let report = fleet.wait();
            Err::<(), _>(format!("this process was to be killed: {report}"))
        });
    }
    let directory = tempfile::tempdir().unwrap();
    let mut program = again(&test, &directory.path().display().to_string());
    let mut program = program.spawn().unwrap();
    let pid = |name: &str| {
        let file = directory.path().join(name);
        eventually(name, || file.exists());
        let text = std::fs::read_to_string(file).unwrap();
        text.trim().parse::<u32>().unwrap()
    };
    let pids = ["rank-0", "rank-1", "child-0", "child-1"].map(pid);
    assert!(pids.iter().all(|&pid| lives(pid)));
    program.kill().unwrap();
    program.wait().unwrap();
    eventually("nothing is left", || !pids.iter().any(|&pid| lives(pid)));
}

#[test]
fn a_rank_can_be_restarted_while_it_ignores_that_it_should_end() {
    let fleet = quiet(1)
        .with(|fleet| {
            fleet.keep_others = true;
            fleet.grace = Duration::from_millis(200);
        })
        .start(shell("trap '' TERM; while :; do sleep 0.1; done"))
        .unwrap();
    std::thread::sleep(Duration::from_millis(100));
    let before = fleet.pids();
    assert_eq!(fleet.restart(0).unwrap(), 1);
    assert_ne!(fleet.pids(), before);
    let error = fleet.restart(7).unwrap_err().to_string();
    assert!(
        error.contains("rank 7 is not one of this fleet"),
        "{error:#}"
    );
}

#[test]
fn a_failure_is_forgotten_when_its_rank_is_restarted() {
    let directory = tempfile::tempdir().unwrap();
    let flag = directory.path().join("flag");
    let script = format!("[ -e {0} ] && exit 0; exit 3", flag.display());
    let fleet = quiet(2)
        .with(|fleet| fleet.keep_others = true)
        .start(shell(&script))
        .unwrap();
    let report = fleet.wait_timeout(LONG).expect("both end");
    assert_eq!(report.exit_code(), 3);
    std::fs::write(&flag, "").unwrap();
    for rank in 0..2 {
        fleet.restart(rank).unwrap();
    }
    let report = fleet.wait_timeout(LONG).expect("both end");
    assert!(report.is_success() && report.first.is_none(), "{report}");
}

#[test]
fn a_fleet_that_is_being_ended_is_not_restarted_in_parts() {
    let fleet = quiet(2)
        .start(shell("trap '' TERM; sleep 1; sleep 1"))
        .unwrap();
    std::thread::sleep(Duration::from_millis(100));
    fleet.stop(Signal::Term);
    let error = fleet.restart(0).unwrap_err().to_string();
    assert!(
        error.contains("while the fleet is being ended"),
        "{error:#}"
    );
    fleet.kill();
    let report = fleet.wait_timeout(LONG).expect("killed");
    assert_eq!(
        (report.exit_code(), report.interrupted),
        (143, Some(Signal::Term))
    );
}

#[test]
fn a_fleet_of_which_one_cannot_be_started_leaves_nothing() {
    alone(&name(&|| ()), || {
        warm_up();
        let (before, begun) = (settled(), Instant::now());
        let error = quiet(3).start(|rank| {
            if rank == 2 {
                return Command::new("no-such-program");
            }
            let mut command = Command::new("sleep");
            command.arg("60");
            command
        });
        let error = error.unwrap_err().to_string();
        assert!(begun.elapsed() < Duration::from_secs(3));
        assert!(
            error.starts_with("rank 2 cannot be started: no-such-program"),
            "{error:#}"
        );
        assert!(children().is_empty(), "{:?}", children());
        eventually("nothing is kept", || held() == before);
    });
}

#[test]
fn lines_come_to_a_function_with_rank_and_stream() {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&lines);
    let output = Output::Lines(Arc::new(move |line| {
        let text = String::from_utf8_lossy(line.bytes).into_owned();
        kept.lock().unwrap().push((line.rank, line.stream, text));
    }));
    let fleet = Fleet::builder(2).with(|fleet| fleet.output = output);
    let fleet = fleet
        .start(shell("echo out $NCCL_RUN_RANK; printf err >&2"))
        .unwrap();
    assert!(fleet.wait_timeout(LONG).expect("they end").is_success());
    let mut lines = lines.lock().unwrap().clone();
    lines.sort_by_key(|(rank, stream, _)| (*rank, *stream == Stream::Stderr));
    let text = |text: &str| text.to_owned();
    assert_eq!(
        *lines,
        [
            (0, Stream::Stdout, text("out 0")),
            (0, Stream::Stderr, text("err")),
            (1, Stream::Stdout, text("out 1")),
            (1, Stream::Stderr, text("err")),
        ]
    );
}

#[test]
fn an_exit_status_that_other_code_takes_is_unknown_and_no_success() {
    let test = name(&|| ());
    if Role::of(&test) != Role::Test {
        end_with(|| {
            let fleet = quiet(1).start(shell("exit 0")).unwrap();
            let report = fleet.wait_timeout(LONG).expect("it ends");
            let end = report
                .first
                .as_ref()
                .expect("nobody knows that it went well");
            assert_eq!((end.exit, report.exit_code()), (Exit::Unknown, 1));
        });
    }
    // A program that ignores SIGCHLD gets no exit statuses from the kernel.
    let program = again(&test, "ignorant");
    let mut command = Command::new("env");
    command
        .arg("--ignore-signal=CHLD")
        .arg(program.get_program())
        .args(program.get_args())
        .envs(
            program
                .get_envs()
                .filter_map(|(name, value)| Some((name, value?))),
        );
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
}

#[test]
fn the_programs_own_children_are_left_to_it() {
    alone(&name(&|| ()), || {
        let fleet = quiet(2).start(shell("sleep 60")).unwrap();
        for code in 0..20 {
            let mut own = Command::new("sh");
            let status = own.args(["-c", &format!("exit {code}")]).status().unwrap();
            assert_eq!(status.code(), Some(code));
        }
        drop(fleet);
    });
}

#[test]
fn a_function_that_is_slow_is_given_everything_that_a_rank_said_before_it_ended() {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&lines);
    let output = Output::Lines(Arc::new(move |line| {
        // Longer than the rest of an ended rank is given to close its output.
        std::thread::sleep(Duration::from_millis(700));
        kept.lock().unwrap().push(line.bytes.to_vec());
    }));
    let fleet = Fleet::builder(1).with(|fleet| fleet.output = output);
    let fleet = fleet.start(shell("echo 1; sleep 0.1; echo 2; echo 3"));
    let report = fleet.unwrap().wait();
    assert!(report.is_success(), "{report}");
    assert_eq!(*lines.lock().unwrap(), [b"1", b"2", b"3"]);
}

#[test]
fn a_fleet_that_does_not_observe_knows_of_no_world() {
    let test = name(&|| ());
    if let Role::Child(_) = Role::of(&test) {
        end_with(|| -> Result<(), String> {
            let rendezvous = Rendezvous::from_env().map_err(|error| format!("{error:#}"))?;
            let world = World::join(rendezvous.with(|meet| meet.timeout = LONG))
                .map_err(|error| format!("{error:#}"))?;
            println!("met");
            // The fleet ends it.
            std::thread::sleep(LONG);
            Err(format!("nobody ended rank {}", world.rank()))
        });
    }
    for observe in [true, false] {
        let met = Arc::new(Mutex::new(0));
        let seen = Arc::clone(&met);
        let output = Output::Lines(Arc::new(move |line| {
            *seen.lock().unwrap() += usize::from(line.bytes.ends_with(b"met"));
        }));
        let test = test.clone();
        let fleet = Fleet::builder(1).with(|fleet| {
            fleet.output = output;
            fleet.observe = observe;
        });
        let fleet = fleet.start(move |_| again(&test, "rank")).unwrap();
        eventually("the rank has its world", || *met.lock().unwrap() == 1);
        if observe {
            eventually("the fleet knows", || fleet.joined() == [0]);
        } else {
            std::thread::sleep(Duration::from_millis(300));
            assert!(fleet.joined().is_empty());
        }
    }
}
