//! Which rank is reported to have died first, how, and the exit code.

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use nccl::launch::Signal;
use nccl_tools::testing::{eventually, lives};

use super::running::{Notes, Running, options_only, run, script, send};
use crate::cgroup::Group;

#[test]
fn the_first_that_died_is_reported_although_others_die_of_it() {
    let notes = Notes::new();
    // The others see that rank 2 has died, report it, and fail with other codes.
    let text = format!(
        "if [ $NCCL_RUN_RANK = 2 ]; then {} echo no such weights >&2; exit 3; fi
         while ! [ -e {dead}/dead ]; do sleep 0.01; done; read -r pid < {dead}/dead
         while kill -0 $pid 2>/dev/null; do sleep 0.01; done
         echo rank 2 is gone >&2; exit 9",
        notes.noting("dead", "$$"),
        dead = notes.path().display()
    );
    let run = run("-n 4 --linger 20s", &text);
    assert_eq!(run.code, 3, "{run:?}");
    let report = run.report();
    let first: Vec<&str> = report.lines().collect();
    assert!(first[0].starts_with("rank 2 ("), "{report}");
    assert!(
        first[0].contains("died first: exit code 3 after"),
        "{report}"
    );
    assert_eq!(first[1].trim(), "the last it said on standard error:");
    assert_eq!(first[2].trim(), "no such weights");
    assert_eq!(first[3].trim(), "ranks 0, 1, 3: exit code 9 as well");
    assert!(run.stderr.contains("[0] rank 2 is gone\n"), "{run:?}");
}

#[test]
fn a_killed_rank_is_named_with_its_signal_and_the_others_are_ended() {
    let notes = Notes::new();
    let text = format!(
        "{} exec sleep 50",
        notes.noting("rank-$NCCL_RUN_RANK", "$$")
    );
    let running = Running::start(script("-n 3 --linger 100ms", &text));
    let pids: Vec<u32> = (0..3)
        .map(|rank| notes.pid(&format!("rank-{rank}")))
        .collect();
    send(pids[1], Signal::Kill);
    let run = running.finish();
    assert_eq!(run.code, 137, "{run:?}");
    let report = run.report();
    let start = format!("rank 1 ({}, pid {})", host(), pids[1]);
    assert!(report.starts_with(&start), "{report}");
    assert!(report.contains("died first: killed by SIGKILL"), "{report}");
    assert!(
        report.contains("ranks 0, 2: ended by SIGTERM from here"),
        "{report}"
    );
    super::running::all_gone(&pids);
}

fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").expect("a name");
    name.trim().to_owned()
}

#[test]
fn a_rank_that_ignores_sigterm_is_killed_after_the_grace_period() {
    let run = run(
        "-n 2 --linger 0 --grace 500ms",
        "[ $NCCL_RUN_RANK = 1 ] && { sleep 0.5; exit 5; }; trap '' TERM; while :; do sleep 1; done",
    );
    assert_eq!(run.code, 5, "{run:?}");
    let report = run.report();
    assert!(
        report.contains("rank 0: ended by SIGKILL from here"),
        "{report}"
    );
    assert!(run.took >= Duration::from_millis(900), "{run:?}");
}

#[test]
fn a_stopped_rank_is_ended_and_named_as_stopped() {
    let run = run(
        "-n 2 --linger 300ms",
        "[ $NCCL_RUN_RANK = 0 ] && { sleep 0.5; exit 4; }; kill -STOP $$; sleep 50",
    );
    assert_eq!(run.code, 4, "{run:?}");
    let report = run.report();
    assert!(
        report.contains("rank 1: ended by SIGTERM from here; it had been stopped"),
        "{report}"
    );
}

#[test]
fn a_rank_that_ends_well_ends_nobody() {
    let run = run("-n 3", "sleep 0.$NCCL_RUN_RANK; echo done");
    assert_eq!((run.code, run.stderr.as_str()), (0, ""));
    assert_eq!(run.stdout().matches("done").count(), 3);
}

#[test]
fn a_program_that_cannot_be_run_is_one_clear_error() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("not-executable");
    std::fs::write(&file, "#!/bin/sh\n").unwrap();
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o644)).unwrap();
    for (program, words) in [
        ("no-such-program", "no directory in PATH has it"),
        ("./no/such/file", "there is no such file"),
        (file.to_str().unwrap(), "not executable"),
    ] {
        let mut command = options_only("-n 4");
        command.arg(program);
        let run = Running::start(command).finish();
        assert_eq!(run.code, 127, "{run:?}");
        assert_eq!(run.stderr.lines().count(), 1, "{run:?}");
        assert!(run.stderr.contains(words), "{run:?}");
        assert!(
            run.stderr.contains("nccl-run: rank 0 cannot be started: "),
            "{run:?}"
        );
    }
    let run = Running::start(options_only("-n many true")).finish();
    assert_eq!(run.code, 2, "{run:?}");
    assert_eq!(run.stderr, "nccl-run: -n many: not a number\n");
}

#[test]
fn a_failed_job_is_started_again_as_often_as_asked() {
    let notes = Notes::new();
    let text = format!(
        "echo generation $NCCL_RUN_GENERATION; {} [ $NCCL_RUN_GENERATION = 2 ] || exit 6; \
         [ $NCCL_RUN_RANK = 0 ] && cat {}/*",
        notes.noting("$NCCL_RUN_RANK-$NCCL_RUN_GENERATION", "x"),
        notes.path().display()
    );
    let run = run(
        "-n 2 --restarts 3 --linger 200ms",
        &format!("{text}; exit 0"),
    );
    assert_eq!(run.code, 0, "{run:?}");
    assert!(run.stdout().contains("[1] generation 2\n"), "{run:?}");
    assert_eq!(
        run.stderr.matches("died first: exit code 6").count(),
        2,
        "{run:?}"
    );
    assert!(run.stderr.contains(", generation 1\n"), "{run:?}");
    assert!(
        run.stderr.contains("as generation 2; 1 restarts are left"),
        "{run:?}"
    );
}

#[test]
fn a_rank_that_fails_when_the_others_have_ended_well_does_not_start_the_job_again() {
    let text = "echo ran; [ $NCCL_RUN_RANK = 2 ] || exit 0; sleep 1; exit 6";
    let run = run("-n 3 --restarts 5 --restart failed", text);
    assert_eq!(run.code, 6, "{run:?}");
    assert_eq!(run.stdout().matches("ran\n").count(), 3, "{run:?}");
    let why = "ranks have ended well, and none is left that could take it in";
    assert_eq!(run.stderr.matches(why).count(), 1, "{run:?}");
    // All failed ranks are restarted, as one restart; they die while nccl-run is stopped.
    let notes = Notes::new();
    let text = format!(
        "[ $NCCL_RUN_GENERATION = 0 ] || {{ echo ran; exit 0; }}; {} exec sleep 50",
        notes.noting("rank-$NCCL_RUN_RANK", "$$")
    );
    let running = Running::start(script("-n 3 --restarts 1 --restart failed", &text));
    let pids = [0, 1, 2].map(|rank| notes.pid(&format!("rank-{rank}")));
    running.signal(Signal::Stop);
    for pid in pids {
        send(pid, Signal::Kill);
    }
    eventually("all are dead", || !pids.iter().any(|&pid| lives(pid)));
    running.signal(Signal::Cont);
    let all = running.finish();
    assert_eq!(all.code, 0, "{all:?}");
    assert_eq!(all.stdout().matches("ran\n").count(), 3, "{all:?}");
}

#[test]
fn ranks_that_outlive_a_death_may_go_on_and_give_the_exit_code() {
    // Rank 1 is killed, rank 2 too if `SECOND` says so, and the others work on for longer than the linger time.
    let text = "case $NCCL_RUN_RANK in
        1) kill -KILL $$;;
        2) sleep 1; [ $SECOND = killed ] && kill -KILL $$; exit $SECOND;;
        *) sleep 2; echo still here;;
        esac";
    for (second, code) in [("0", 0), ("5", 5), ("killed", 0)] {
        let mut command = script("-n 4 --keep-others --linger 0", text);
        command.env("SECOND", second);
        let run = Running::start(command).finish();
        assert_eq!(run.code, code, "{second}: {run:?}");
        assert_eq!(run.stdout().matches("still here").count(), 2, "{run:?}");
        assert!(run.report().starts_with("rank 1 ("), "{run:?}");
        assert!(
            run.report().contains("died first: killed by SIGKILL"),
            "{run:?}"
        );
    }
    // If no rank survives, the code is that of the dead rank.
    let alone = run("-n 1 --keep-others", "kill -KILL $$");
    assert_eq!(alone.code, 137, "{alone:?}");
    let well = run("-n 2 --keep-others", "exit 0");
    assert_eq!((well.code, &well.stderr[..]), (0, ""), "{well:?}");
}

#[test]
fn the_report_repeats_no_escape_sequence_of_a_rank() {
    let run = run(
        "-n 2",
        r"[ $NCCL_RUN_RANK = 1 ] || exec sleep 30
        printf '\033]0;title\007\033[2Jall is well\r[0] forged\n' >&2; printf '\033[31mred\n' >&2; exit 3",
    );
    assert_eq!(run.code, 3, "{run:?}");
    let report = run.report();
    assert!(
        report.contains("[0] forged") && report.contains("[31mred"),
        "{run:?}"
    );
    let control = |c: char| c.is_control() && c != '\n';
    assert!(!report.contains(control), "{run:?}");
}

#[test]
fn the_oom_killer_is_named() {
    let Some(group) = Group::new("memory", 48 << 20) else {
        nccl_tools::gpu_check::not_tested(
            "no memory control group can be made here (needs root, and a writable one)",
        );
        return;
    };
    // The launcher and its ranks are in the group; the kernel kills the largest process.
    let enter = format!(
        "echo $$ > {}/cgroup.procs; exec \"$0\" \"$@\"",
        group.0.display()
    );
    let mut command = std::process::Command::new("sh");
    command
        .args(["-c", &enter, &super::running::PROGRAM])
        .args(["-n", "2", "--", "sh", "-c"])
        .arg("[ $NCCL_RUN_RANK = 0 ] && sleep 30; exec tail -n 1 /dev/zero");
    let run = Running::start(command).finish();
    assert_eq!(run.code, 137, "{run:?}");
    let report = run.report();
    assert!(report.starts_with("rank 1 ("), "{report}");
    assert!(report.contains("killed by SIGKILL"), "{report}");
    assert!(
        report.contains("out of memory: the kernel's OOM killer ended 1 process"),
        "{report}"
    );
    assert!(report.contains("(limit 48 MiB)"), "{report}");
}
