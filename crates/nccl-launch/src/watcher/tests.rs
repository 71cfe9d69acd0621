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

#[test]
fn the_keeper_forgets_a_process_that_could_not_execute_its_program() {
    let directory = tempfile::tempdir().unwrap();
    let told = directory.path().join("told");
    let plan = FleetPlan {
        environment: Environment {
            world_size: 2,
            first_rank: 0,
            here: 2,
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
        command: Box::new(|rank| {
            let mut command = Command::new(["sleep", "no-such-program"][rank]);
            command.arg("60");
            command
        }),
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
    let (_orders, inbox) = mpsc::channel();
    let state = Arc::new(FleetState::new(2));
    let mut watcher = Watcher::new(plan, state, inbox, Arc::new(wake)).unwrap();
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
