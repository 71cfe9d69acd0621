//! Signals to nccl-run.

use std::io::Write;
use std::process::Command;
use std::time::{Duration, Instant};

use nccl::launch::Signal;
use nccl_tools::testing::{eventually, lives};

use super::running::{Notes, PROGRAM, Running, script};

/// Starts two ranks that run `text`, and waits until both have started.
fn two_ranks(options: &str, notes: &Notes, text: &str) -> Running {
    let text = format!(
        "{text}; {} while :; do sleep 0.05; done",
        notes.noting("rank-$NCCL_RUN_RANK", "$$")
    );
    let running = Running::start(script(&format!("-n 2 {options}"), &text));
    notes.pid("rank-0");
    notes.pid("rank-1");
    running
}

/// Whether this process, and so its children, ignores a signal.
fn is_ignored(signal: Signal) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = u64::from_str_radix(mask.unwrap().trim(), 16).unwrap();
    mask >> (signal.number() - 1) & 1 == 1
}

#[test]
fn the_first_ctrl_c_is_passed_on_and_the_exit_code_says_so() {
    let notes = Notes::new();
    let running = two_ranks("", &notes, "trap 'echo saved; exit 1' INT");
    running.signal(Signal::Int);
    let run = running.finish();
    assert_eq!(run.code, 130, "{run:?}");
    assert_eq!(run.stdout().matches("saved").count(), 2, "{run:?}");
    assert!(
        run.report()
            .starts_with("ended by SIGINT\n  ranks 0, 1: exit code 1"),
        "{run:?}"
    );
}

#[test]
fn ranks_that_end_well_when_asked_are_a_success() {
    let notes = Notes::new();
    for signal in [Signal::Term, Signal::Hup] {
        if is_ignored(signal) {
            nccl_tools::gpu_check::not_tested(format_args!(
                "{signal}, which was ignored at the start (nohup)"
            ));
            continue;
        }
        let running = two_ranks("", &notes, "trap 'exit 0' TERM HUP");
        running.signal(signal);
        let run = running.finish();
        assert_eq!(run.code, 0, "{run:?}");
        for rank in ["rank-0", "rank-1"] {
            std::fs::remove_file(notes.file(rank)).unwrap();
        }
    }
}

#[test]
fn what_does_not_end_is_killed_after_the_grace_period() {
    let notes = Notes::new();
    let running = two_ranks("--grace 300ms", &notes, "trap '' INT");
    running.signal(Signal::Int);
    let run = running.finish();
    assert_eq!(run.code, 130, "{run:?}");
    assert!(
        run.report()
            .contains("ranks 0, 1: ended by SIGKILL from here"),
        "{run:?}"
    );
}

#[test]
fn an_interrupt_is_no_success_where_others_are_kept() {
    // Rank 0 ends successfully when it is asked, and rank 1 has to be killed.
    let notes = Notes::new();
    let text = "if [ $NCCL_RUN_RANK = 0 ]; then trap 'exit 0' INT; else trap '' INT; fi";
    let running = two_ranks("--keep-others --grace 300ms", &notes, text);
    running.signal(Signal::Int);
    let run = running.finish();
    assert_eq!(run.code, 130, "{run:?}");
    // Rank 1 has died before, and rank 0 ends by the signal.
    let notes = Notes::new();
    let text = format!(
        "if [ $NCCL_RUN_RANK = 1 ]; then {} kill -KILL $$; fi",
        notes.noting("rank-1", "$$")
    );
    let running = two_ranks("--keep-others", &notes, &text);
    let dead = notes.pid("rank-1");
    eventually("rank 1 is dead", || !lives(dead));
    running.signal(Signal::Int);
    let run = running.finish();
    assert_eq!(run.code, 130, "{run:?}");
}

#[test]
fn a_second_ctrl_c_kills_at_once() {
    let notes = Notes::new();
    let running = two_ranks("--grace 50s", &notes, "trap '' INT");
    running.signal(Signal::Int);
    // A signal that a wrapper passes on as well is no second one.
    std::thread::sleep(Duration::from_millis(5));
    running.signal(Signal::Int);
    std::thread::sleep(Duration::from_secs(2));
    assert!(nccl_tools::testing::lives(notes.pid("rank-0")));
    running.signal(Signal::Int);
    let run = running.finish();
    assert_eq!(run.code, 130, "{run:?}");
    assert!(run.took < Duration::from_secs(20), "{run:?}");
    assert!(
        run.stderr.contains("SIGINT again: the ranks are killed"),
        "{run:?}"
    );
}

#[test]
fn the_programs_own_signals_are_passed_on() {
    let notes = Notes::new();
    let trap = format!(
        "trap '{}' USR1; trap '{}' USR2",
        notes.noting("one-$NCCL_RUN_RANK", "1"),
        notes.noting("two-$NCCL_RUN_RANK", "2")
    );
    let running = two_ranks("", &notes, &trap);
    running.signal(Signal::Usr1);
    running.signal(Signal::Usr2);
    for name in ["one-0", "one-1", "two-0", "two-1"] {
        notes.read(name);
    }
    running.signal(Signal::Term);
    assert_eq!(running.finish().code, 143);
}

/// The kernel's letter for the state of a process.
fn state(pid: u32) -> char {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat
        .rsplit_once(") ")
        .and_then(|(_, rest)| rest.chars().next());
    state.unwrap_or('-')
}

#[test]
fn all_stop_together_and_go_on_together() {
    let notes = Notes::new();
    // No shell: a shell that has just started a child shows as waiting for that, not as stopped.
    let text = format!(
        "{} exec sleep 60",
        notes.noting("rank-$NCCL_RUN_RANK", "$$")
    );
    let running = Running::start(script("-n 2", &text));
    let sleeps = |rank: &str| {
        let comm = std::fs::read_to_string(format!("/proc/{}/comm", notes.pid(rank)));
        comm.is_ok_and(|comm| comm == "sleep\n")
    };
    eventually("both sleep", || sleeps("rank-0") && sleeps("rank-1"));
    let all = [running.id(), notes.pid("rank-0"), notes.pid("rank-1")];
    running.signal(Signal::Tstp);
    eventually("all stand still", || {
        all.iter().all(|&pid| state(pid) == 'T')
    });
    running.signal(Signal::Cont);
    eventually("none stands still", || {
        all.iter().all(|&pid| state(pid) != 'T')
    });
    running.signal(Signal::Term);
    assert_eq!(running.finish().code, 143);
}

#[test]
fn what_was_ignored_at_the_start_stays_ignored() {
    let notes = Notes::new();
    let mut command = Command::new("sh");
    let text = format!("{} sleep 1; echo done", notes.noting("there", "$$"));
    command.args(["-c", "trap '' HUP; exec \"$0\" \"$@\"", &PROGRAM]);
    command.args(["-n", "1", "--", "sh", "-c", &text]);
    let running = Running::start(command);
    notes.pid("there");
    running.signal(Signal::Hup);
    let run = running.finish();
    assert_eq!((run.code, run.stdout().as_str()), (0, "[0] done\n"));
}

#[test]
fn how_ranks_end_is_known_although_sigchld_was_ignored_at_the_start() {
    let mut command = Command::new("env");
    command.args([
        "--ignore-signal=CHLD",
        &PROGRAM,
        "-n",
        "2",
        "--linger",
        "60",
    ]);
    command.args(["--", "sh", "-c", "exit $((NCCL_RUN_RANK * 3))"]);
    let run = Running::start(command).finish();
    assert_eq!(run.code, 3, "{run:?}");
}

#[test]
fn a_standard_error_that_nobody_reads_delays_no_signal() {
    let (unread, mut stderr) = std::io::pipe().unwrap();
    let size = rustix::pipe::fcntl_setpipe_size(&stderr, 4096).unwrap();
    stderr.write_all(&vec![b'x'; size]).unwrap();
    let notes = Notes::new();
    let text = format!(
        "trap '' INT; {} while :; do sleep 0.05; done",
        notes.noting("rank", "$$")
    );
    let mut command = script("-n 1 --grace 50s", &text);
    let mut child = command.stderr(stderr).spawn().unwrap();
    let rank = notes.pid("rank");
    let begun = Instant::now();
    // The first is passed on, and the next kills the rank: each with a message, for which 3 s are waited.
    while lives(rank) && begun.elapsed() < Duration::from_secs(20) {
        super::running::send(child.id(), Signal::Int);
        std::thread::sleep(Duration::from_millis(400));
    }
    let took = begun.elapsed();
    child.kill().unwrap();
    child.wait().unwrap();
    drop(unread);
    assert!(took < Duration::from_secs(5), "it took {took:?}");
}
