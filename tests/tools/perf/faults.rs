//! Wrong elements, ranks that die or are stopped, and readers that close the pipe.

use std::io::{BufReader, Read};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;

use super::program::{Endless, SHORT, endless, finish, gone, run_with, signal};

#[test]
fn a_wrong_element_on_one_rank_ends_in_exit_code_seven() {
    for spawn in ["processes", "threads"] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("out.json");
        let arguments = format!(
            "{SHORT} --ranks 3 --spawn {spawn} -d double -J {}",
            path.display()
        );
        let run = run_with(&arguments, &[("NCCL_TOOLS_SELF_TEST", "flip:2")]).expect(7);
        for row in run.rows() {
            assert_eq!((row[8], row[12]), ("1", "1"), "{row:?}");
        }
        assert!(
            run.stdout.contains("# Out of bounds values : 6 FAILED\n"),
            "{run:#?}"
        );
        assert!(run.stderr.contains("wrong elements"), "{run:#?}");
        let json: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        assert_eq!(
            json["out_of_bounds"],
            serde_json::json!({"count": 6, "okay": "false"})
        );
        assert_eq!(json["results"][0]["out_of_place"]["nwrong"], 1.0);
    }
}

#[test]
fn too_little_bandwidth_ends_in_exit_code_seven_where_some_is_needed() {
    let run = run_with(
        &format!("{SHORT} --ranks 2"),
        &[("NCCL_TESTS_MIN_BW", "1e9")],
    )
    .expect(7);
    let line = run
        .stdout
        .lines()
        .find(|line| line.starts_with("# Avg bus bandwidth"))
        .unwrap();
    assert!(line.ends_with("FAILED"), "{line}");
    run_with(&format!("{SHORT} --ranks 2"), &[("NCCL_TESTS_MIN_BW", "0")]).expect(0);
}

#[test]
fn a_killed_rank_ends_the_run_within_seconds_and_is_named() {
    for victim in [0, 2, 3] {
        let Endless {
            child,
            pids,
            _stdout: stdout,
        } = endless("--ranks 4");
        let begun = Instant::now();
        signal(pids[victim], Signal::KILL);
        let drained = std::thread::spawn(move || {
            let mut rest = String::new();
            let _ = BufReader::new(stdout).read_to_string(&mut rest);
        });
        let run = finish(child);
        let took = begun.elapsed();
        drained.join().unwrap();
        assert_eq!(run.status.code(), Some(137), "{run:#?}");
        let named = format!(
            "rank {victim} (pid {}) was killed by signal 9 (SIGKILL)",
            pids[victim]
        );
        assert!(run.stderr.contains(&named), "{run:#?}");
        assert!(took < Duration::from_secs(10), "{took:?}");
        assert!(pids.iter().all(|&pid| gone(pid)), "{pids:?}");
    }
}

#[test]
fn a_rank_that_stands_still_ends_the_run_at_the_time_limit() {
    let Endless {
        child,
        pids,
        _stdout: stdout,
    } = endless("--ranks 3 -T 5");
    let begun = Instant::now();
    signal(pids[1], Signal::STOP);
    let drained = std::thread::spawn(move || {
        let mut rest = String::new();
        let _ = BufReader::new(stdout).read_to_string(&mut rest);
    });
    let run = finish(child);
    drained.join().unwrap();
    assert!(
        begun.elapsed() < Duration::from_secs(20),
        "{:?}",
        begun.elapsed()
    );
    // The waiting ranks can only report that they waited too long: in an operation, or in the rendezvous.
    assert!(matches!(run.status.code(), Some(1 | 4)), "{run:#?}");
    assert!(run.stderr.contains("all_to_all_perf: rank "), "{run:#?}");
    assert!(run.stderr.contains("rank 1 had been stopped"), "{run:#?}");
    assert!(
        pids.iter().all(|&pid| gone(pid)),
        "the stopped rank, too: {pids:?}"
    );
}

#[test]
fn killing_the_program_leaves_no_rank_behind() {
    let Endless {
        mut child,
        pids,
        _stdout,
    } = endless("--ranks 3");
    assert!(!pids.iter().any(|&pid| gone(pid)));
    child.kill().unwrap();
    child.wait().unwrap();
    let begun = Instant::now();
    while !pids.iter().all(|&pid| gone(pid)) {
        assert!(begun.elapsed() < Duration::from_secs(10), "{pids:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_reader_that_goes_away_ends_the_run_quietly() {
    for spawn in ["processes", "threads"] {
        let Endless {
            child,
            pids,
            _stdout: stdout,
        } = endless(&format!("--ranks 2 --spawn {spawn}"));
        drop(stdout);
        let run = finish(child);
        assert_eq!(run.status.code(), Some(141), "{run:#?}");
        assert_eq!(run.stderr, "", "{spawn}");
        assert!(pids.iter().all(|&pid| gone(pid)), "{pids:?}");
    }
}
