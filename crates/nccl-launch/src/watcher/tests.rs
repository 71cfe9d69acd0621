//! What the thread tells the keeper.

use rustix::event::{EventfdFlags, eventfd};

use super::*;
use crate::output::Output;

/// Writes what the keeper is told to a file, until it is told to leave.
const RECORDING: &str = r#"
while read -r line; do
  [ "$line" = bye ] && exit
  echo "$line" >> "$1/told"
done
"#;

/// A watcher of `ranks` ranks, none of which is started.
fn watcher(ranks: usize, command: impl FnMut(usize) -> Command + Send + 'static) -> Watcher {
    let plan = FleetPlan {
        environment: Environment {
            world_size: ranks,
            first_rank: 0,
            here: ranks,
            rendezvous: "unix:/nowhere".into(),
            job: String::from("j"),
            secret_file: None,
            interface: None,
            nccl_interface: Vec::new(),
            nccl_debug: None,
            record_dir: None,
            devices: None,
            observe: false,
        },
        command: Box::new(command),
        settings: Settings {
            output: Output::Discard,
            files: None,
            tail: 0,
        },
        end_all: false,
        linger: Duration::ZERO,
        grace: Duration::ZERO,
        generation: 0,
        stdin: false,
        directory: tempfile::tempdir().unwrap(),
    };
    let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    // Without commands, which a test gives by itself.
    let (_, inbox) = mpsc::channel();
    let state = Arc::new(FleetState::new(ranks));
    Watcher::new(plan, state, inbox, Arc::new(wake)).unwrap()
}

fn sleeping(_rank: usize) -> Command {
    let mut command = Command::new("sleep");
    command.arg("60");
    command
}

#[test]
fn the_keeper_forgets_a_process_that_could_not_execute_its_program() {
    let directory = tempfile::tempdir().unwrap();
    let told = directory.path().join("told");
    let mut watcher = watcher(2, |rank| match rank {
        0 => sleeping(rank),
        _ => Command::new("no-such-program"),
    });
    watcher.keeper = Some(Keeper::run(RECORDING, directory.path()).unwrap());

    watcher.start(0, None).unwrap();
    watcher.start(1, None).unwrap_err();
    let sleeps = watcher.running[&0].id().to_string();
    watcher.end_started();
    drop(watcher.keeper.take());

    let told = std::fs::read_to_string(told).unwrap();
    let told: Vec<&str> = told.lines().collect();
    let [started, failed, only, ended] = told[..] else {
        panic!("{told:?}");
    };
    assert_eq!(started, format!("+ {sleeps}"));
    assert!(failed.starts_with("+ "), "{told:?}");
    assert_eq!(only, format!("= {sleeps}"));
    assert_eq!(ended, format!("- {sleeps}"));
}

#[test]
fn ranks_that_cannot_be_ended_are_listed_in_order() {
    let mut watcher = watcher(8, sleeping);
    watcher.start_all().unwrap();
    watcher.give_up();
    let left = watcher.fleet_state.lock().left.clone();
    assert_eq!(left, [0, 1, 2, 3, 4, 5, 6, 7]);
}

#[test]
fn a_rank_that_has_died_before_it_is_asked_to_end_has_failed() {
    let mut watcher = watcher(1, |_| Command::new("false"));
    watcher.start_all().unwrap();
    let stat = format!("/proc/{}/stat", watcher.running[&0].id());
    let begun = Instant::now();
    while !std::fs::read_to_string(&stat).unwrap().contains(") Z ") {
        assert!(begun.elapsed() < Duration::from_secs(20), "it does not end");
        std::thread::sleep(Duration::from_millis(1));
    }
    // The thread has not looked for ended ranks yet.
    watcher.ask_to_end(Signal::Term);
    while !watcher.running.is_empty() {
        watcher.poll_exits();
        watcher.collect();
        std::thread::sleep(Duration::from_millis(1));
    }
    let failures = watcher.fleet_state.lock().failures.clone();
    assert_eq!(failures.len(), 1);
    assert_eq!(failures[0].asked_by, None);
}

#[test]
fn nothing_is_left_when_the_thread_ends_before_its_ranks() {
    let directory = tempfile::tempdir().unwrap();
    let child = directory.path().join("child");
    let script = format!(
        "sleep 60 & echo $! > {0}.p; mv {0}.p {0}; wait",
        child.display()
    );
    let mut watcher = watcher(1, move |_| {
        let mut command = Command::new("sh");
        command.args(["-c", &script]);
        command
    });
    watcher.start_all().unwrap();
    let begun = Instant::now();
    let wait = |done: &dyn Fn() -> bool| {
        while !done() {
            assert!(
                begun.elapsed() < Duration::from_secs(20),
                "it takes too long"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    wait(&|| child.exists());
    let child = std::fs::read_to_string(child).unwrap();
    let stat = format!("/proc/{}/stat", child.trim());
    let state = Arc::clone(&watcher.fleet_state);
    drop(watcher);
    assert!(state.lock().closed);
    assert_eq!(state.lock().left, [0]);
    wait(&|| std::fs::read_to_string(&stat).map_or(true, |stat| stat.contains(") Z ")));
}
