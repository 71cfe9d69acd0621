//! The output of ranks, and its destinations.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::ffi::OsStrExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nccl_tools::spawn::end_within;

use super::running::{Notes, PROGRAM, Running, run, script};

#[test]
fn lines_stay_whole_and_say_whose_they_are() {
    // Each line is written in two pieces, by both ranks at once.
    let run = run(
        "-n 2",
        "i=0; while [ $i -lt 200 ]; do printf 'be'; printf 'gin %s end\\n' $i; i=$((i+1)); done; printf rest",
    );
    let text = run.stdout();
    for rank in 0..2 {
        let mine: Vec<&str> = text
            .lines()
            .filter_map(|line| line.strip_prefix(&format!("[{rank}] ")))
            .collect();
        assert_eq!(mine.len(), 201, "{text}");
        for (i, line) in mine[..200].iter().enumerate() {
            assert_eq!(*line, format!("begin {i} end"));
        }
        assert_eq!(mine[200], "rest");
    }
    assert_eq!(text.lines().count(), 402);
}

#[test]
fn each_stream_stays_itself() {
    let run = run("-n 1 --tag-time", "echo out; echo err >&2");
    let is_timed = |line: &str, text: &str| {
        let seconds = line
            .strip_prefix("[0 +")
            .and_then(|line| line.strip_suffix(&format!("s] {text}\n")));
        seconds.is_some_and(|seconds| seconds.parse::<f64>().is_ok_and(|s| s < 30.0))
    };
    assert!(is_timed(&run.stdout(), "out"), "{run:?}");
    assert!(is_timed(&run.stderr, "err"), "{run:?}");
}

#[test]
fn bytes_that_are_no_text_come_through_as_they_are() {
    let run = run(
        "-n 1 --no-prefix",
        "printf 'a\\000\\377b\\r\\n\\n'; printf '\\376no end'",
    );
    assert_eq!(run.stdout, b"a\0\xffb\r\n\n\xfeno end");
    let run = super::running::run("-n 1", "printf 'a\\000\\377b\\nrest'");
    assert_eq!(run.stdout, b"[0] a\0\xffb\n[0] rest\n");
}

#[test]
fn ranks_wide_as_the_largest() {
    let run = run("-n 11", "[ $NCCL_RUN_RANK -gt 8 ] && echo x; exit 0");
    let text = run.stdout();
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[ 9] x", "[10] x"]);
}

#[test]
fn a_rank_that_floods_holds_up_nobody_and_fills_nothing() {
    const BYTES: usize = 100_000_000;
    let notes = Notes::new();
    // Half of it in lines, half of it without a newline.
    let text = format!(
        "if [ $NCCL_RUN_RANK = 0 ]; then yes 'much ado' | head -c {half}; head -c {half} /dev/zero; {}
         else i=0; while ! [ -e {}/flooded ]; do echo tick $i >&2; i=$((i+1)); sleep 0.02; done; fi",
        notes.noting("flooded", "yes"),
        notes.path().display(),
        half = BYTES / 2,
    );
    let mut running = Running::start(script("-n 2", &text));
    let status = format!("/proc/{}/status", running.id());
    let mut stdout = running.take_stdout();
    let reader = std::thread::spawn(move || {
        let mut buffer = vec![0u8; 1 << 20];
        let (mut zeros, mut lines, mut most) = (0usize, 0usize, 0u64);
        while let Ok(length @ 1..) = stdout.read(&mut buffer) {
            zeros += buffer[..length].iter().filter(|&&byte| byte == 0).count();
            lines += buffer[..length]
                .iter()
                .filter(|&&byte| byte == b'\n')
                .count();
            let text = std::fs::read_to_string(&status).unwrap_or_default();
            let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
            let used = line.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok());
            most = most.max(used.unwrap_or(0));
        }
        (zeros, lines, most)
    });
    let run = running.finish();
    let (zeros, lines, most) = reader.join().unwrap();
    assert_eq!(run.code, 0, "{run:?}");
    assert_eq!(zeros, BYTES / 2);
    assert!(lines >= BYTES / 2 / "much ado\n".len(), "{lines} lines");
    assert!(most < 64 << 10, "nccl-run used {most} KiB");
    assert!(
        run.stderr.lines().count() > 3,
        "the other rank was held up: {}",
        run.stderr
    );
}

#[test]
fn a_reader_that_stands_still_does_not_hide_what_is_said_on_standard_error() {
    let text = "if [ $NCCL_RUN_RANK = 0 ]; then yes; else sleep 0.3; echo help >&2; exit 3; fi";
    let mut running = Running::start(script("-n 2 --linger 0 --grace 100ms", text));
    let held = running.take_stdout();
    let begun = Instant::now();
    std::thread::sleep(Duration::from_secs(2));
    // Only now is the output of rank 0 read.
    let drain = std::thread::spawn(move || std::io::copy(&mut { held }, &mut std::io::sink()));
    let run = running.finish();
    drain.join().unwrap().unwrap();
    assert_eq!(run.code, 3, "{run:?}");
    assert!(run.stderr.starts_with("[1] help\n"), "{run:?}");
    assert!(begun.elapsed() < Duration::from_secs(20));
}

#[test]
fn a_failure_is_told_although_nobody_ever_reads_standard_output() {
    let text = "if [ $NCCL_RUN_RANK = 0 ]; then yes; else sleep 0.3; exit 3; fi";
    let mut running = Running::start(script("-n 2 --linger 0 --grace 100ms", text));
    let held = running.take_stdout();
    let run = running.finish();
    drop(held);
    assert_eq!(run.code, 3, "{run:?}");
    assert!(run.report().starts_with("rank 1 ("), "{run:?}");
    assert!(
        run.report()
            .contains("is lost: its reader took nothing for 3.0 s"),
        "{run:?}"
    );
    assert!(run.took < Duration::from_secs(20), "{run:?}");
}

#[test]
fn a_slow_reader_loses_nothing_of_a_rank_that_failed() {
    // With the rank before each line, three times as much as the rank prints.
    const BYTES: usize = 60_000;
    let text = format!("yes | head -c {BYTES}; exit 3");
    let mut running = Running::start(script("-n 1", &text));
    let mut slow = running.take_stdout();
    let read = std::thread::spawn(move || {
        let (mut all, mut piece) = (0, [0; 4096]);
        while let Ok(length @ 1..) = slow.read(&mut piece) {
            all += length;
            std::thread::sleep(Duration::from_millis(150));
        }
        all
    });
    let run = running.finish();
    assert_eq!(run.code, 3, "{run:?}");
    assert!(!run.report().contains("is lost"), "{run:?}");
    assert_eq!(read.join().unwrap(), 3 * BYTES);
}

#[test]
fn a_reader_that_comes_late_loses_nothing_of_ranks_that_ended_well() {
    let text = "head -c 200000 /dev/zero | tr '\\0' x";
    let mut running = Running::start(script("-n 2 --no-prefix", text));
    let mut late = running.take_stdout();
    std::thread::sleep(Duration::from_secs(4));
    let read = std::thread::spawn(move || std::io::copy(&mut late, &mut std::io::sink()));
    let run = running.finish();
    assert_eq!(run.code, 0, "{run:?}");
    assert_eq!(read.join().unwrap().unwrap(), 400_000);
}

#[test]
fn a_rank_may_close_its_streams_and_go_on() {
    let notes = Notes::new();
    let text = format!(
        "exec >&- 2>&-; sleep 0.3; {} exit 7",
        notes.noting("on-$NCCL_RUN_RANK", "x")
    );
    let run = run("-n 2 --linger 5s", &text);
    assert_eq!(run.code, 7, "{run:?}");
    notes.read("on-0");
    notes.read("on-1");
}

#[test]
fn ranks_notice_that_nobody_reads_any_more() {
    let mut running = Running::start(script("-n 2 --linger 100ms", "while :; do echo y; done"));
    let mut lines = BufReader::new(running.take_stdout()).lines();
    assert!(lines.next().unwrap().unwrap().ends_with("] y"));
    drop(lines);
    let run = running.finish();
    // As with `yes | head -1`: SIGPIPE, or the shell's code for it.
    assert!(run.code == 141 || run.code == 2 || run.code == 1, "{run:?}");
    assert!(run.took < Duration::from_secs(20), "{run:?}");
}

#[test]
fn every_rank_has_its_own_files_if_asked() {
    let directory = tempfile::tempdir().unwrap();
    let logs = directory.path().join("a/b");
    let options = format!("-n 2 --log-dir {}", logs.display());
    let run = run(
        &options,
        "printf 'out %s\\r\\n' $NCCL_RUN_RANK; printf err >&2",
    );
    assert_eq!(run.code, 0, "{run:?}");
    for rank in 0..2 {
        let read = |name: &str| std::fs::read_to_string(logs.join(name)).unwrap();
        assert_eq!(
            read(&format!("rank-{rank}.stdout")),
            format!("out {rank}\r\n")
        );
        assert_eq!(read(&format!("rank-{rank}.stderr")), "err");
    }
}

#[test]
fn a_log_that_cannot_be_written_any_more_is_told_once_and_the_ranks_go_on() {
    let directory = tempfile::tempdir().unwrap();
    for rank in 0..2 {
        let log = directory.path().join(format!("rank-{rank}.stdout"));
        std::os::unix::fs::symlink("/dev/full", log).unwrap();
    }
    let options = format!("-n 2 --log-dir {}", directory.path().display());
    let run = run(&options, "echo first; sleep 0.2; echo second; echo err >&2");
    assert_eq!(run.code, 0, "{run:?}");
    assert_eq!(run.stdout().matches("second").count(), 2, "{run:?}");
    let told = "stdout ends here, and is not written any more: No space left on device";
    assert_eq!(run.stderr.matches(told).count(), 1, "{run:?}");
    let other = directory.path().join("rank-1.stderr");
    assert_eq!(std::fs::read_to_string(other).unwrap(), "err\n");
}

#[test]
fn rank_0_reads_what_nccl_run_is_given_to_read() {
    let mut command = script("-n 2", "cat");
    let (reader, mut writer) = std::io::pipe().unwrap();
    command.stdin(Stdio::from(reader));
    let running = Running::start(command);
    std::io::Write::write_all(&mut writer, b"for you\n").unwrap();
    drop(writer);
    let run = running.finish();
    assert_eq!((run.code, run.stdout().as_str()), (0, "[0] for you\n"));
}

#[test]
fn ncclls_own_log_has_a_file_per_rank() {
    let directory = tempfile::tempdir().unwrap();
    let options = format!(
        "-n 2 --interface lo --nccl-debug {}",
        directory.path().display()
    );
    let run = run(
        &options,
        "echo $NCCL_DEBUG ${NCCL_DEBUG_FILE##*/} $NCCL_SOCKET_IFNAME $NCCL_RUN_INTERFACE",
    );
    let text = run.stdout();
    assert!(text.contains("[1] INFO nccl.rank-1.log =lo lo\n"), "{text}");
}

#[test]
fn what_is_no_terminal_gets_the_bytes_of_a_rank_as_they_are() {
    let run = run("-n 1", r"printf '\r[0] forged\033[99D\n'");
    assert_eq!(run.stdout, b"[0] \r[0] forged\x1b[99D\n", "{run:?}");
}

#[test]
fn an_output_that_cannot_be_written_is_told_once_with_its_cause_and_the_ranks_go_on() {
    let notes = Notes::new();
    let text = format!(
        "i=0; while [ $i -lt 20000 ]; do echo $i; i=$((i+1)); done; {}",
        notes.noting("done-$NCCL_RUN_RANK", "x")
    );
    let mut command = Command::new("sh");
    command.args(["-c", "exec \"$@\" >/dev/full", "sh", &PROGRAM]);
    command.args(["-n", "2", "--", "sh", "-c", &text]);
    let run = Running::start(command).finish();
    assert_eq!(run.code, 0, "{run:?}");
    let told = "nccl-run: standard output cannot be written any more: No space left on device";
    assert_eq!(run.stderr.matches(told).count(), 1, "{run:?}");
    assert_eq!(run.stderr.lines().count(), 1, "{run:?}");
    notes.read("done-0");
    notes.read("done-1");
}

#[test]
fn nccl_run_ends_although_its_report_and_its_output_share_a_pipe_that_nobody_reads() {
    let (unread, pipe) = std::io::pipe().unwrap();
    let mut command = script(
        "-n 2 --linger 0 --grace 100ms",
        "if [ $NCCL_RUN_RANK = 0 ]; then yes; else sleep 0.3; exit 3; fi",
    );
    command.stdout(pipe.try_clone().unwrap()).stderr(pipe);
    let mut child = command.spawn().unwrap();
    drop(command);
    let status = end_within(&mut child, Duration::from_secs(20)).unwrap();
    assert_eq!(status.expect("nccl-run ends").code(), Some(3));
    drop(unread);
}

#[test]
fn gpus_whose_names_are_no_text_are_an_error() {
    let mut command = script("-n 1", "true");
    command.env("CUDA_VISIBLE_DEVICES", OsStr::from_bytes(b"0,\xff"));
    let run = Running::start(command).finish();
    assert_eq!(run.code, 2, "{run:?}");
    let named = "CUDA_VISIBLE_DEVICES=\"0,\\xFF\" is not UTF-8";
    assert!(run.stderr.contains(named), "{run:?}");
}
