//! No process outlives nccl-run, however it ends.

use std::path::PathBuf;
use std::process::Command;

use nccl::launch::Signal;
use nccl_tools::testing::{eventually, lives};

use super::running::{Notes, Run, Running, all_gone, options_only, run, script, send};

/// The child of a rank of the tests below: it ignores signals, has a child of its own, and its output goes elsewhere.
fn family(notes: &Notes) -> String {
    format!(
        "r=$NCCL_RUN_RANK
         sh -c 'trap \"\" HUP INT TERM; sleep 60 & {} sleep 60' >/dev/null 2>&1 &
         {} {}",
        notes.noting("child-$NCCL_RUN_RANK", "$$ $!"),
        notes.noting("rank-$r", "$$"),
        notes.noting("place-$r", "$NCCL_RUN_RENDEZVOUS"),
    )
}

/// The process numbers of all processes that the ranks have started.
fn members(notes: &Notes, ranks: usize) -> Vec<u32> {
    let mut pids = Vec::new();
    for rank in 0..ranks {
        pids.push(notes.pid(&format!("rank-{rank}")));
        let children = notes.read(&format!("child-{rank}"));
        pids.extend(
            children
                .split(' ')
                .map(|pid| pid.parse::<u32>().expect("a process")),
        );
    }
    assert!(pids.iter().all(|&pid| lives(pid)), "{pids:?}");
    pids
}

fn private_directory(notes: &Notes) -> PathBuf {
    let place = notes.read("place-0");
    let socket = PathBuf::from(place.strip_prefix("unix:").expect("a socket"));
    socket.parent().expect("a directory").to_owned()
}

/// The children of a process: ranks, and the keeper.
fn children(pid: u32) -> Vec<u32> {
    let path = format!("/proc/{pid}/task");
    let tasks = std::fs::read_dir(path).expect("it is there").flatten();
    let texts = tasks.map(|task| std::fs::read_to_string(task.path().join("children")));
    let texts: Vec<String> = texts.map(Result::unwrap_or_default).collect();
    let numbers = texts.iter().flat_map(|text| text.split_whitespace());
    numbers.map(|pid| pid.parse().expect("a process")).collect()
}

#[test]
fn killing_nccl_run_leaves_no_process_and_no_file() {
    let notes = Notes::new();
    let text = format!("{} wait", family(&notes));
    let running = Running::start(script("-n 3", &text));
    let mut all = members(&notes, 3);
    let directory = private_directory(&notes);
    assert!(directory.join("secret").exists());
    let children = children(running.id());
    // Three ranks and the keeper.
    assert_eq!(children.len(), 4, "{children:?}");
    all.extend(children);
    running.signal(Signal::Kill);
    assert_eq!(running.finish().code, 137);
    all_gone(&all);
    eventually("the directory is gone", || !directory.exists());
}

#[test]
fn killing_nccl_run_ends_even_what_is_stopped() {
    let notes = Notes::new();
    let text = format!("{} kill -STOP 0; wait", family(&notes));
    let running = Running::start(script("-n 2", &text));
    let all = members_stopped(&notes);
    running.signal(Signal::Kill);
    assert_eq!(running.finish().code, 137);
    all_gone(&all);
}

fn members_stopped(notes: &Notes) -> Vec<u32> {
    let ranks = [notes.pid("rank-0"), notes.pid("rank-1")];
    let stopped = |pid: u32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        status.contains("T (stopped)")
    };
    eventually("the ranks stand still", || {
        ranks.iter().all(|&pid| stopped(pid))
    });
    ranks.to_vec()
}

#[test]
fn a_rank_that_ends_takes_with_it_what_it_has_started() {
    let notes = Notes::new();
    let text = format!(
        "{} while ! [ -e {}/child-$r ]; do sleep 0.01; done; exit 0",
        family(&notes),
        notes.path().display()
    );
    let run = run("-n 2", &text);
    assert_eq!(run.code, 0, "{run:?}");
    let pids: Vec<u32> = (0..2)
        .flat_map(|rank| {
            notes
                .read(&format!("child-{rank}"))
                .split(' ')
                .map(str::to_owned)
                .collect::<Vec<_>>()
        })
        .map(|pid| pid.parse().expect("a process"))
        .collect();
    assert_eq!(pids.len(), 4);
    all_gone(&pids);
}

#[test]
fn what_a_rank_leaves_to_write_its_log_may_finish_that() {
    // As with `exec > >(tee log)` in bash: the rank ends before the process that writes for it.
    let run = run("-n 1", "(sleep 0.05; echo late) & exit 0");
    assert_eq!((run.code, run.stdout().as_str()), (0, "[0] late\n"));
}

#[test]
fn every_ordinary_end_leaves_nothing() {
    for (options, text) in [
        ("-n 2", "exit 0"),
        ("-n 2 --linger 0", "exit 3"),
        ("-n 2 --linger 0", "kill -KILL $$"),
    ] {
        let notes = Notes::new();
        let text = format!("{} {text}", notes.noting("place-0", "$NCCL_RUN_RENDEZVOUS"));
        let run = run(options, &text);
        assert!(!private_directory(&notes).exists(), "{run:?}");
    }
}

#[test]
fn a_keeper_that_is_killed_is_missed_by_nobody() {
    let notes = Notes::new();
    let text = format!(
        "{} {} exec sleep 60",
        notes.noting("place-0", "$NCCL_RUN_RENDEZVOUS"),
        notes.noting("rank-$NCCL_RUN_RANK", "$$")
    );
    let running = Running::start(script("-n 2", &text));
    let ranks = [notes.pid("rank-0"), notes.pid("rank-1")];
    let keeper = children(running.id())
        .into_iter()
        .find(|pid| !ranks.contains(pid));
    send(keeper.expect("there is one"), Signal::Kill);
    running.signal(Signal::Kill);
    assert_eq!(running.finish().code, 137);
    // The kernel ends the processes that nccl-run itself has started.
    all_gone(&ranks);
    // The keeper was killed, and could not do that.
    std::fs::remove_dir_all(private_directory(&notes)).unwrap();
}

#[test]
fn a_job_under_a_job_ends_with_it() {
    let notes = Notes::new();
    let inner = format!("{} wait", family(&notes));
    let mut command = options_only("-n 1 --");
    command
        .arg(&*super::running::PROGRAM)
        .args(["-n", "2", "--", "sh", "-c", &inner]);
    let running = Running::start(command);
    let all = members(&notes, 2);
    running.signal(Signal::Kill);
    let Run { code, .. } = running.finish();
    assert_eq!(code, 137);
    all_gone(&all);
}

#[test]
fn ranks_inherit_nothing_but_their_streams() {
    // The environment of the tests may leave inheritable descriptors open.
    let without = Command::new("ls").arg("/proc/self/fd").output().unwrap();
    let without = String::from_utf8(without.stdout).unwrap();
    let mut command = options_only("-n 2 --no-prefix --");
    command.args(["ls", "/proc/self/fd"]);
    let run = Running::start(command).finish();
    assert_eq!(run.stdout(), without.repeat(2), "{run:?}");
}

#[test]
fn as_the_first_process_of_a_container_it_keeps_no_zombies() {
    // The rank's child leaves grandchildren behind, which become children of nccl-run and end: one in the group of the rank, one
    // in a session of its own, and one that leads a group (`timeout`).
    let rank = "sh -c 'sleep 0.1 & setsid sleep 0.1 & timeout 9 sleep 0.1 &'; sleep 0.6
        for s in /proc/[0-9]*/stat; do read -r line < $s && case $line in *') Z '*) echo zombie $line;; esac; done
        echo pid 1 is $(cat /proc/1/comm)";
    let mut command = Command::new("unshare");
    command
        .args([
            "--pid",
            "--fork",
            "--mount-proc",
            "--kill-child",
            &super::running::PROGRAM,
        ])
        .args(["-n", "1", "--", "sh", "-c", rank]);
    let run = Running::start(command).finish();
    if run.stderr.starts_with("unshare:") {
        nccl_tools::gpu_check::not_tested(format_args!(
            "no namespace of processes can be made here: {}",
            run.stderr
        ));
        return;
    }
    // The kernel keeps 15 bytes of a name.
    let (_, name) = super::running::PROGRAM.rsplit_once('/').unwrap();
    let expected = format!("[0] pid 1 is {}\n", &name[..name.len().min(15)]);
    assert_eq!(run.stdout(), expected, "{run:?}");
}
