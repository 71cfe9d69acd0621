//! The small examples, as a reader runs them: each is its own launcher, and checks its own results.

use std::process::{Command, Output};
use std::time::{Duration, Instant};

use crate::programs::program;

/// The output of an example that ends well.
#[track_caller]
fn run(program: &str) -> String {
    let Output {
        status,
        stdout,
        stderr,
    } = Command::new(program).output().expect("it starts");
    let (stdout, stderr) = (
        String::from_utf8_lossy(&stdout),
        String::from_utf8_lossy(&stderr),
    );
    assert!(status.success(), "{status}\n{stdout}\n{stderr}");
    stdout.into_owned()
}

#[track_caller]
fn on_each_rank(said: &str, ranks: usize, line: &str) {
    for rank in 0..ranks {
        let found = said
            .lines()
            .any(|one| one.starts_with(&format!("[{rank}] ")) && one.contains(line));
        assert!(found, "{line:?} of rank {rank} in\n{said}");
    }
}

#[test]
fn hello_all_reduce() {
    let said = run(env!("CARGO_BIN_EXE_hello-all-reduce-under-test"));
    on_each_rank(&said, 2, "became [3.0, 3.0, 3.0, 3.0]");
}

#[test]
fn ring_sendrecv() {
    let said = run(env!("CARGO_BIN_EXE_ring-sendrecv-under-test"));
    on_each_rank(&said, 4, "its block is back after 4 rounds");
}

#[test]
fn data_parallel() {
    let said = run(env!("CARGO_BIN_EXE_data-parallel-under-test"));
    on_each_rank(&said, 2, "after 300 steps");
}

#[test]
fn subgroups() {
    let said = run(env!("CARGO_BIN_EXE_subgroups-under-test"));
    on_each_rank(&said, 8, "in the tensor parallel group");
}

#[test]
fn moe() {
    let said = run(env!("CARGO_BIN_EXE_moe-under-test"));
    on_each_rank(&said, 4, "have been at 2 of 8 experts each");
}

#[test]
fn survive_a_death() {
    let said = run(env!("CARGO_BIN_EXE_survive-a-death-under-test"));
    for (rank, now) in [(0, 0), (2, 1)] {
        let line = format!("[{rank}] goes on as rank {now} of 2");
        assert!(said.contains(&line), "{said}");
        let named =
            |line: &str| line.starts_with(&format!("[{rank}] step ")) && line.contains("rank 1");
        assert!(said.lines().any(named), "{said}");
    }
}

/// On a machine with fewer devices than the example has ranks.
#[test]
fn survive_a_death_fails_if_another_rank_dies_than_the_one_that_it_aborts() {
    let output = Command::new(env!("CARGO_BIN_EXE_survive-a-death-under-test"))
        .envs([("NCCL_EMULATOR", "1"), ("NCCL_EMULATOR_DEVICES", "2")])
        .output()
        .expect("it starts");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("rank 2"), "{output:?}");
}

#[test]
fn a_launcher_whose_variables_are_incomplete_is_an_error_and_starts_no_other_ranks() {
    for (name, value, says) in [
        ("JOB_COMPLETION_INDEX", "0", "NCCL_RUN_WORLD_SIZE"),
        ("NCCL_RUN_RANK", "x", "NCCL_RUN_RANK"),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_hello-all-reduce-under-test"))
            .env(name, value)
            .output()
            .expect("it starts");
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(
            String::from_utf8_lossy(&output.stderr).contains(says),
            "{output:?}"
        );
        assert!(output.stdout.is_empty(), "{output:?}");
    }
}

/// On a machine with fewer devices than the example has ranks.
#[test]
fn the_examples_with_several_ranks_say_at_once_why_a_rank_did_not_start() {
    for name in ["root_cause", "going_on"] {
        let mut example = Command::new(program(name));
        let begun = Instant::now();
        let output = example
            .envs([("NCCL_EMULATOR", "1"), ("NCCL_EMULATOR_DEVICES", "2")])
            .output()
            .expect("an example");
        assert!(begun.elapsed() < Duration::from_secs(25), "{output:?}");
        assert!(!output.status.success(), "{output:?}");
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        // The parent stops the others at the first that ends, which may be any of these.
        let told = (2..8).any(|rank| {
            let reason = format!("device {rank} does not exist: this process sees 2");
            said.contains(&reason)
        });
        assert!(told, "{said}");
    }
}
