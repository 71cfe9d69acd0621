//! Ranks as processes: no rank outlives the process that started it.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nccl_tools::spawn::{Job, Output};
use nccl_tools::testing::{Role, again, end_with, eventually, lives, name};

const LONG: Duration = Duration::from_secs(60);

/// Writes a note of a rank of the tests below.
fn note(directory: &Path, text: &str) {
    let rank = std::env::var("NCCL_RUN_RANK").unwrap();
    let partial = directory.join(format!("{rank}.partial"));
    std::fs::write(&partial, text).unwrap();
    std::fs::rename(partial, directory.join(format!("rank-{rank}"))).unwrap();
}

fn notes(directory: &Path) -> Vec<String> {
    let mut paths: Vec<PathBuf> = std::fs::read_dir(directory)
        .unwrap()
        .flatten()
        .map(|entry| entry.path())
        .collect();
    paths.retain(|path| {
        path.file_name()
            .is_some_and(|n| n.to_string_lossy().starts_with("rank-"))
    });
    paths.sort();
    paths
        .iter()
        .map(|path| std::fs::read_to_string(path).unwrap())
        .collect()
}

/// The test as the launcher of three ranks, which it is about to leave behind.
fn starter_and_ranks(test: &str, role: &str, stopped: bool) {
    let directory = PathBuf::from(role.split_once(' ').map_or("", |(_, path)| path));
    if role.starts_with("starter") {
        end_with(|| {
            let ranks = format!("rank {}", directory.display());
            let ended = Job::new(3)
                .output(Output::Collect)
                .run(|_| again(test, &ranks));
            Err(format!(
                "this process was to be killed, but its job ended: {ended:?}"
            ))
        });
    }
    end_with(|| {
        let rendezvous = std::env::var("NCCL_RUN_RENDEZVOUS").unwrap();
        note(&directory, &format!("{} {rendezvous}", std::process::id()));
        if stopped {
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::STOP)
                .unwrap();
        }
        std::thread::sleep(LONG);
    });
}

fn killing_the_starter_ends_the_ranks(test: &str, stopped: bool) {
    if let Role::Child(role) = Role::of(test) {
        starter_and_ranks(test, &role, stopped);
    }
    let directory = tempfile::tempdir().unwrap();
    let mut starter = again(test, &format!("starter {}", directory.path().display()));
    let mut starter = starter.spawn().unwrap();
    eventually("three ranks run", || notes(directory.path()).len() == 3);
    let notes = notes(directory.path());
    let ranks: Vec<(u32, &str)> = notes
        .iter()
        .map(|note| note.split_once(' ').unwrap())
        .map(|(pid, rendezvous)| (pid.parse().unwrap(), rendezvous))
        .collect();
    assert!(ranks.iter().all(|&(pid, _)| lives(pid)), "{ranks:?}");
    // SIGKILL: the launcher has no chance to end its ranks.
    starter.kill().unwrap();
    starter.wait().unwrap();
    let begun = Instant::now();
    eventually("no rank is left", || {
        !ranks.iter().any(|&(pid, _)| lives(pid))
    });
    assert!(
        begun.elapsed() < Duration::from_secs(5),
        "it took {:?}",
        begun.elapsed()
    );
    let rendezvous = Path::new(ranks[0].1.strip_prefix("unix:").unwrap());
    let private = rendezvous.parent().unwrap();
    eventually("the private directory is gone", || !private.exists());
}

#[test]
fn killing_the_starter_ends_the_ranks_and_removes_their_directory() {
    killing_the_starter_ends_the_ranks(&name(&|| ()), false);
}

#[test]
fn killing_the_starter_ends_even_ranks_that_are_stopped() {
    killing_the_starter_ends_the_ranks(&name(&|| ()), true);
}
