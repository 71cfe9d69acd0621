//! Recordings of several ranks become one page; unreadable files are reported.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use nccl::recorder::{self, Timeline};
use nccl::{Rendezvous, World};
use serde_json::{Value, json};

use super::{doctor, doctor_behind, run, text};

/// A recording of one rank of two, as its process would have written it.
fn recording(rank: u64, calls: u64) -> String {
    let mut value: Value = serde_json::from_str(&recorder::snapshot().to_json()).unwrap();
    value["pid"] = json!(5000 + rank);
    value["place"] =
        json!({ "job": "\u{1b}[2Jjob", "generation": 1, "rank": rank, "world_size": 3 });
    let calls: Vec<_> = (1..=calls)
        .map(|number| {
            json!({
                "sequence": number, "kind": "all_reduce", "since_ns": number * 1_000_000, "unix_ns": 1,
                "stream": "0x7f00", "state": "issued", "operations": [],
            })
        })
        .collect();
    value["communicators"] = json!([{
        "name": "\u{1b}[2Jtp", "key": "abcd", "generation": 1, "number": 1, "rank": rank, "world_size": 3,
        "life": "ready", "calls": calls,
    }]);
    value.to_string()
}

fn write(directory: &Path, name: &str, text: &str) {
    std::fs::write(directory.join(name), text).unwrap();
}

#[test]
fn a_directory_of_recordings_becomes_a_page_and_the_summary_names_who_is_behind() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).display().to_string();
    let whole = recording(0, 3);
    write(directory.path(), "rank-0.pid-5000.json", &whole);
    write(directory.path(), "rank-1.pid-5001.json", &recording(1, 2));
    write(
        directory.path(),
        "rank-2.pid-5002.json",
        &whole[..whole.len() / 2],
    );
    write(directory.path(), "other.json", "{}");
    let faults = directory.path().display().to_string();
    let arguments = [
        "timeline",
        "--out",
        &path("page.html"),
        "--trace",
        &path("t.json"),
        "--json",
        &path("all.json"),
        "--pytorch",
        &path("traces"),
        &faults,
    ];
    let output = run(doctor(&arguments));
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    assert!(said.contains("recordings of 2 of 3 ranks"), "{said}");
    assert!(
        said.contains("rank 2: none: there is no recording of it"),
        "{said}"
    );
    assert!(said.contains("is behind, at all_reduce #2"), "{said}");
    assert!(
        said.contains("rank-2.pid-5002.json: ") && said.contains("it was cut off"),
        "{said}"
    );
    assert!(!said.contains('\u{1b}'), "{said}");
    let page = std::fs::read_to_string(path("page.html")).unwrap();
    assert!(page.contains("is behind, at all_reduce #2"));
    let trace: Value =
        serde_json::from_str(&std::fs::read_to_string(path("t.json")).unwrap()).unwrap();
    assert_eq!(trace["otherData"]["generation"], 1);
    let all = std::fs::read_to_string(path("all.json")).unwrap();
    assert_eq!(Timeline::from_json(&all).unwrap().ranks.len(), 2);
    let analyser = format!("torchfrtrace --allow-incomplete-ranks {}", path("traces"));
    assert!(said.contains(&analyser), "{said}");
    let files = std::fs::read_dir(path("traces")).unwrap();
    let mut names: Vec<_> = files.map(|file| file.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["nccl_trace_rank_0", "nccl_trace_rank_1"]);
    // With files of another job among them, the analyser would compare unrelated recordings.
    let again = run(doctor(&arguments));
    assert_eq!(again.status.code(), Some(3), "{again:?}");
    assert!(text(&again.stderr).contains("is not empty"), "{again:?}");
    // The doctor reads its own output.
    let again = run(doctor(&[
        "timeline",
        "--out",
        &path("again.html"),
        &path("all.json"),
    ]));
    assert!(again.status.success(), "{again:?}");
}

#[test]
fn a_page_that_is_there_is_not_replaced_unless_it_is_named() {
    let directory = tempfile::tempdir().unwrap();
    write(directory.path(), "rank-0.pid-5000.json", &recording(0, 1));
    write(directory.path(), "timeline.html", "mine");
    let mut command = doctor(&["timeline", "."]);
    command.current_dir(directory.path());
    let output = run(command);
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("--out"),
        "{output:?}"
    );
    let text = std::fs::read_to_string(directory.path().join("timeline.html")).unwrap();
    assert_eq!(text, "mine");
    let mut command = doctor(&["timeline", ".", "--out", "timeline.html"]);
    command.current_dir(directory.path());
    assert!(run(command).status.success());
}

#[test]
fn where_there_is_no_recording_that_is_said_with_the_reasons() {
    let directory = tempfile::tempdir().unwrap();
    let empty = directory.path().join("rank-0.json");
    std::fs::write(&empty, "").unwrap();
    let output = run(doctor(&[
        "timeline",
        &empty.display().to_string(),
        "/nowhere/at/all",
    ]));
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        said.contains("it is empty") && said.contains("/nowhere/at/all"),
        "{said}"
    );
}

#[test]
fn a_job_is_asked_with_the_secret_of_the_file_as_its_ranks_read_it() {
    let directory = tempfile::tempdir().unwrap();
    let secret = directory.path().join("secret");
    let socket = directory.path().join("world");
    std::fs::write(&secret, "hush, and nobody hears it\n").unwrap();
    let rank = Rendezvous::unix(&socket, 0, 1)
        .unwrap()
        .with(|meet| meet.secret = Some("hush, and nobody hears it".into()));
    let _world = World::join(rank).unwrap();
    let ask = |mode: u32| {
        std::fs::set_permissions(&secret, Permissions::from_mode(mode)).unwrap();
        let address = format!("unix:{}", socket.display());
        let page = directory.path().join("page.html").display().to_string();
        let mut command = doctor(&["timeline", "--rendezvous", &address, "--out", &page]);
        command.env("NCCL_RUN_SECRET_FILE", &secret);
        run(command)
    };
    let output = ask(0o600);
    assert!(output.status.success(), "{output:?}");
    let output = ask(0o644);
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    assert!(text(&output.stderr).contains("chmod 600"), "{output:?}");
}

#[test]
fn of_a_page_that_a_full_disk_does_not_take_no_piece_is_left() {
    let directory = tempfile::tempdir().unwrap();
    let faults = directory.path().display().to_string();
    write(directory.path(), "rank-0.pid-5000.json", &recording(0, 3));
    let output = run(doctor(&["timeline", "--out", "/dev/full", &faults]));
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    assert!(text(&output.stderr).contains("No space left"), "{output:?}");
    assert!(Path::new("/dev/full").exists());

    let full = directory.path().join("full");
    std::fs::create_dir(&full).unwrap();
    // A file system of one page, which only this process sees.
    let script = "mount -t tmpfs -o size=4k full $0 || exit 99
        cd $0; \"$@\"; code=$?; echo left: $(ls -A); exit $code";
    let at = full.display().to_string();
    let before = ["unshare", "--mount", "sh", "-c", script, &at];
    for out in [&[][..], &["--out", "page.html"]] {
        let arguments = [&["timeline"], out, &[&faults]].concat();
        let output = run(doctor_behind(&before, &arguments));
        if output.status.code() == Some(99) || output.stderr.starts_with(b"unshare:") {
            let why = text(&output.stderr);
            nccl_tools::gpu_check::not_tested(format_args!(
                "no file system can be mounted here: {why}"
            ));
            return;
        }
        assert_eq!(output.status.code(), Some(3), "{output:?}");
        assert!(text(&output.stderr).contains("No space left"), "{output:?}");
        assert!(text(&output.stdout).ends_with("left:\n"), "{output:?}");
    }
}
