//! Logs: of recorded releases, and of emulated ranks.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Output;

use serde_json::Value;
use tempfile::TempDir;

use super::{Ranks, code, doctor, json, log, one, run, text};

#[test]
fn the_logs_of_several_ranks_are_judged_together() {
    let (a, b) = (log("2.27-node-a-of-two.log"), log("2.27-node-b-of-two.log"));
    let value = json(&run(doctor(&["log", "--json", &a, &b])));
    assert_eq!(value["kind"], "log");
    let network = one(&value, "log-network");
    assert_eq!(
        (&network["ranks"], &network["hosts"]),
        (&serde_json::json!([2, 3]), &serde_json::json!(["node-b"]))
    );
    assert_eq!(value["processes"].as_array().unwrap().len(), 4);
    assert_eq!(
        value["processes"][3]["communicators"][0]["network"],
        "Socket"
    );

    let output = run(doctor(&["log", &a, &b]));
    let stdout = text(&output.stdout);
    assert!(
        stdout.contains("rank 3, node-b pid 5021, NCCL 2.27.7"),
        "{stdout}"
    );
    assert!(stdout.contains("✗ log-network: "), "{stdout}");
    assert!(stdout.contains("    fix: "), "{stdout}");
    assert_eq!(code(output.status), 2);
}

#[test]
fn the_exit_code_tells_how_bad_it_is() {
    let cases = [
        ("2.30-fine.log", 0),
        ("2.18-no-p2p.log", 1),
        ("2.26-shared-memory.log", 2),
    ];
    for (name, expected) in cases {
        let output = run(doctor(&["log", &log(name)]));
        assert_eq!(
            code(output.status),
            expected,
            "{name}: {}",
            text(&output.stdout)
        );
    }
}

/// Launch mode `BlockingChild`: of its two communicators the one that carries the data is the user's.
#[test]
fn idle_parents_are_no_communicators() {
    let whole = std::fs::read_to_string(log("real-2.32.3-blocking-child-rank-0.log")).unwrap();
    let split = "ncclCommSplit comm";
    let without = |what: &str| -> String {
        let lines = whole.lines().filter(|line| !line.contains(what));
        lines.flat_map(|line| [line, "\n"]).collect()
    };
    let directory = tempfile::tempdir().unwrap();
    let judge = |name: &str, content: &str| {
        let path = file(&directory, name, content.as_bytes());
        let value = json(&run(doctor(&["log", "--json", &path])));
        (value, text(&run(doctor(&["log", &path])).stdout))
    };
    // The second one without the lines that identify it.
    for (name, content) in [("named", whole.clone()), ("unnamed", without("Comm name"))] {
        let (value, stdout) = judge(name, &content);
        let all = value["processes"][0]["communicators"].as_array().unwrap();
        assert_eq!(all.len(), 1, "{name}: {value:#}");
        assert!(all[0]["parent"].is_string(), "{name}: {value:#}");
        assert!(stdout.contains("came up"), "{name}: {stdout}");
    }
    // Where the split does not complete, the user's communicator has not come up.
    let begun: String = whole
        .lines()
        .take_while(|line| !line.contains(split))
        .flat_map(|line| [line, "\n"])
        .collect();
    let (value, stdout) = judge("begun", &begun);
    assert_eq!(
        value["processes"][0]["communicators"][0]["state"],
        "started"
    );
    assert!(stdout.contains("did not come up"), "{stdout}");
    assert_eq!(one(&value, "log-init")["severity"], "error", "{value:#}");
}

#[test]
fn a_log_comes_from_standard_input_as_well() {
    let mut command = doctor(&["log", "-", "--json"]);
    command.stdin(std::fs::File::open(log("2.30-fine.log")).unwrap());
    let value = json(&run(command));
    assert_eq!(value["processes"].as_array().unwrap().len(), 4);
}

/// A file in a directory that lives as long as the test.
fn file(directory: &TempDir, name: &str, content: &[u8]) -> String {
    let path = directory.path().join(name);
    std::fs::write(&path, content).unwrap();
    path.display().to_string()
}

#[test]
fn what_is_no_log_cannot_be_checked() {
    let directory = tempfile::tempdir().unwrap();
    let other = file(&directory, "other.log", b"epoch 1\nepoch 2\n");
    let packed = file(&directory, "packed.log.gz", &[0x1f, 0x8b, 8, 0]);
    let nowhere = directory.path().join("nowhere").display().to_string();
    let empty = directory.path().join("empty");
    std::fs::create_dir(&empty).unwrap();
    let empty = empty.display().to_string();
    for (path, says) in [
        (&other, "NCCL_DEBUG=INFO"),
        (&packed, "gunzip"),
        (&nowhere, "No such file"),
        (&empty, "no file in it"),
    ] {
        let output = run(doctor(&["log", path]));
        let all = text(&output.stdout) + &text(&output.stderr);
        assert_eq!(code(output.status), 3, "{all}");
        assert!(all.contains(says), "no {says:?} in {all}");
    }
    // Of a directory, all files are read.
    let logs = log("");
    let value = json(&run(doctor(&["log", "--json", &logs])));
    assert!(
        value["processes"].as_array().unwrap().len() > 15,
        "{value:#}"
    );
    // Readable files are read even if others are not.
    let output = run(doctor(&["log", &nowhere, &log("2.30-fine.log")]));
    assert_eq!(code(output.status), 1);
    assert!(text(&output.stdout).contains("! log-file: "));
}

/// Runs three emulated ranks that create a communicator, with logs; `fault` is for rank 2.
fn emulated(release: Option<&str>, fault: Option<&str>) -> (TempDir, Vec<PathBuf>, Vec<Output>) {
    let logs = tempfile::tempdir().unwrap();
    let pattern = logs.path().join("nccl.%h.%p").display().to_string();
    let mut more = vec![
        ("NCCL_DEBUG", "INFO"),
        ("NCCL_DEBUG_SUBSYS", "INIT,BOOTSTRAP,ENV,DESTROY"),
        ("NCCL_DEBUG_FILE", &pattern[..]),
    ];
    more.extend(release.map(|release| ("NCCL_EMULATOR_VERSION", release)));
    let mut ranks = Ranks::new(3);
    for rank in 0..3 {
        let mut own = more.clone();
        own.extend(
            fault
                .filter(|_| rank == 2)
                .map(|fault| ("NCCL_EMULATOR_FAULTS", fault)),
        );
        ranks.start(
            rank,
            &["--emulator", "--communicate", "--json", "--timeout", "5"],
            &own,
        );
    }
    let outputs = ranks.finish();
    let files = std::fs::read_dir(logs.path()).unwrap();
    let files = files.map(|entry| entry.unwrap().path()).collect();
    (logs, files, outputs)
}

/// The doctor's report on these files.
fn judged(files: &[PathBuf]) -> Value {
    let mut arguments: Vec<OsString> = vec!["log".into(), "--json".into()];
    arguments.extend(
        files
            .iter()
            .map(|file| Path::new(file).as_os_str().to_owned()),
    );
    let mut command = doctor(&[]);
    command.args(arguments);
    json(&run(command))
}

#[test]
fn the_emulators_own_logs_are_understood_as_every_release() {
    for release in [None, Some("2.18.3"), Some("2.22.3"), Some("2.27.7")] {
        let (_kept, files, outputs) = emulated(release, None);
        assert_eq!(files.len(), 3);
        for output in outputs {
            assert!(code(output.status) < 2, "{}", text(&output.stdout));
        }
        let value = judged(&files);
        assert_eq!(value["worst"], "ok", "{release:?}: {value:#}");
        let processes = value["processes"].as_array().unwrap();
        let mut ranks: Vec<_> = processes.iter().map(|one| one["rank"].as_u64()).collect();
        ranks.sort_unstable();
        assert_eq!(ranks, [Some(0), Some(1), Some(2)], "{release:?}");
        for process in processes {
            let all = process["communicators"].as_array().unwrap();
            assert_eq!(all.len(), 1, "the idle parent is none: {process:#}");
            let one = &all[0];
            assert_eq!(
                (&one["ranks"], &one["state"]),
                (&3.into(), &"completed".into()),
                "{process:#}"
            );
            assert_eq!(
                (&one["network"], &one["hosts"]),
                (&"Emulator".into(), &1.into()),
                "{process:#}"
            );
            assert_eq!(one["links"][0]["via"], "P2P/CUMEM", "{process:#}");
            assert_eq!(one["ended"], "destroyed", "{process:#}");
            let version = release.unwrap_or("2.32.3");
            assert_eq!(process["nccl_version"], version);
        }
    }
}

#[test]
fn a_rank_that_is_killed_in_its_init_is_named_by_the_check_and_by_the_logs() {
    let fault = "call=ncclCommInitRankConfig,action=kill";
    let (_kept, files, outputs) = emulated(None, Some(fault));
    assert_eq!(outputs[2].status.code(), None, "it was killed");
    let value = json(&outputs[0]);
    let findings = value["findings"].as_array().unwrap();
    let named = findings
        .iter()
        .any(|one| one["severity"] == "error" && one["what"].to_string().contains("rank 2"));
    assert!(named, "{value:#}");
    // The logs alone show which rank is missing.
    let value = judged(&files);
    let init = one(&value, "log-init");
    assert!(
        init["what"]
            .as_str()
            .unwrap()
            .contains("rank 2 never began"),
        "{init}"
    );
}
