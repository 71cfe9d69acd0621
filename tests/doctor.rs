//! `nccl-doctor`: on one host, among ranks that are processes, and over logs.

mod meeting;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use nccl_tools::spawn::rank_variables;
use serde_json::Value;
use tempfile::TempDir;

/// How long a doctor may take, on a machine that has other work to do.
const DEADLINE: Duration = Duration::from_secs(60);

/// Like `nccl-doctor ARGUMENTS`, without what the environment of the test says about ranks and NCCL.
fn doctor(arguments: &[&str]) -> Command {
    doctor_behind(&[], arguments)
}

/// The same, run by the command `before`.
fn doctor_behind(before: &[&str], arguments: &[&str]) -> Command {
    let words = [before, &[env!("CARGO_BIN_EXE_nccl-doctor")], arguments].concat();
    let mut command = Command::new(words[0]);
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        let launchers = ["NCCL_", "SLURM_", "OMPI_", "PMI_", "MPI_"];
        let others = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "NO_COLOR"];
        if launchers.iter().any(|prefix| name.starts_with(prefix)) || others.contains(&&name[..]) {
            command.env_remove(name);
        }
    }
    command.args(&words[1..]).stdin(Stdio::null());
    command
}

/// Runs it to its end, which has to come before the deadline.
fn run(mut command: Command) -> Output {
    let child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    finish(child)
}

fn finish(mut child: Child) -> Output {
    // What a doctor prints fits into a pipe, so that it can be read at the end.
    let deadline = Instant::now() + DEADLINE;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            child.kill().unwrap();
            panic!("it did not end: {:?}", child.wait_with_output());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.wait_with_output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[track_caller]
fn code(status: ExitStatus) -> i32 {
    status.code().expect("it was not killed")
}

/// The JSON that it printed, whose severities and exit code have to fit.
#[track_caller]
fn json(output: &Output) -> Value {
    let stdout = text(&output.stdout);
    let value: Value = serde_json::from_str(&stdout)
        .unwrap_or_else(|error| panic!("{error} in {stdout}\n{}", text(&output.stderr)));
    let findings = value["findings"].as_array().unwrap();
    let has = |severity: &str| findings.iter().any(|one| one["severity"] == severity);
    let expected = match (has("error"), has("warning")) {
        (true, _) => ("error", 2),
        (_, true) => ("warning", 1),
        _ => ("ok", 0),
    };
    assert_eq!(value["worst"], expected.0, "{stdout}");
    assert_eq!(value["exit_code"], expected.1, "{stdout}");
    assert_eq!(code(output.status), expected.1, "{stdout}");
    value
}

/// The findings of this name.
fn named<'v>(value: &'v Value, check: &str) -> Vec<&'v Value> {
    let findings = value["findings"].as_array().unwrap();
    findings
        .iter()
        .filter(|one| one["check"] == check)
        .collect()
}

#[track_caller]
fn one<'v>(value: &'v Value, check: &str) -> &'v Value {
    let found = named(value, check);
    assert_eq!(found.len(), 1, "{check} in {value:#}");
    found[0]
}

fn log(name: &str) -> String {
    format!(
        "{}/nccl/src/debug_log/tests/logs/{name}",
        env!("CARGO_MANIFEST_DIR")
    )
}

/// Doctors that are ranks.
struct Ranks {
    directory: TempDir,
    size: usize,
    children: Vec<Child>,
}

impl Ranks {
    fn new(size: usize) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let children = Vec::new();
        Self {
            directory,
            size,
            children,
        }
    }

    fn start(&mut self, rank: usize, arguments: &[&str], more: &[(&str, &str)]) {
        let mut command = doctor(arguments);
        let meeting = self.directory.path().join("world");
        let variables = rank_variables(rank, self.size, &meeting);
        // Without the end of the starter's life, which these have nothing to do with.
        command.envs(
            variables
                .into_iter()
                .filter(|(name, _)| name.starts_with("NCCL_RUN_")),
        );
        command.env_remove("NCCL_RUN_LIFELINE");
        command.envs(more.iter().copied());
        let child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        self.children.push(child);
    }

    fn finish(self) -> Vec<Output> {
        self.children.into_iter().map(finish).collect()
    }
}

#[test]
fn a_host_is_checked_without_a_gpu_and_without_others() {
    let value = json(&run(doctor(&["--emulator", "--json", "--communicate"])));
    assert_eq!(
        (&value["kind"], &value["emulator"]),
        (&"host".into(), &true.into())
    );
    assert!(
        one(&value, "devices")["what"]
            .as_str()
            .unwrap()
            .contains("CPU emulator")
    );
    assert_eq!(one(&value, "communicate")["severity"], "ok");

    let output = run(doctor(&["--emulator"]));
    let stdout = text(&output.stdout);
    assert!(
        stdout.contains("nothing is said about its GPUs"),
        "{stdout}"
    );
    assert!(stdout.contains("✓ devices: "), "{stdout}");
    assert!(!stdout.contains('\x1b'), "no colour in a pipe: {stdout:?}");
    let quiet = text(&run(doctor(&["--emulator", "--quiet"])).stdout);
    assert!(!quiet.contains('✓'), "{quiet}");
}

#[test]
fn a_library_that_is_not_there_is_an_error_with_what_to_do() {
    let mut command = doctor(&["--json"]);
    command.env("NCCL_LIBRARY", "/nowhere/libnccl.so.2");
    let value = json(&run(command));
    let library = one(&value, "library");
    assert_eq!(library["severity"], "error");
    assert!(
        library["what"]
            .as_str()
            .unwrap()
            .contains("/nowhere/libnccl.so.2")
    );
    assert!(
        library["fix"].as_str().unwrap().contains("NCCL_LIBRARY"),
        "{library}"
    );
}

#[test]
fn what_three_ranks_agree_on_is_told_once_by_rank_0() {
    let mut ranks = Ranks::new(3);
    for rank in 0..3 {
        ranks.start(rank, &["--emulator", "--json", "--communicate"], &[]);
    }
    let outputs = ranks.finish();
    let value = json(&outputs[0]);
    assert_eq!(
        (&value["kind"], &value["ranks"]),
        (&"world".into(), &3.into())
    );
    let communicate = one(&value, "communicate");
    assert_eq!(communicate["severity"], "ok", "{communicate}");
    assert!(
        communicate["what"]
            .as_str()
            .unwrap()
            .starts_with("all ranks: ")
    );
    assert_eq!(communicate["ranks"], serde_json::json!([0, 1, 2]));
    assert_eq!(
        one(&value, "devices")["ranks"],
        serde_json::json!([0, 1, 2])
    );
    // Preflight compares them.
    assert_eq!(one(&value, "device")["severity"], "ok");
    for output in &outputs[1..] {
        assert_eq!(text(&output.stdout), "");
        assert_eq!(
            code(output.status),
            code(outputs[0].status),
            "all ranks end alike"
        );
    }
}

#[test]
fn a_variable_that_one_of_three_ranks_has_is_an_error_on_all() {
    let mut ranks = Ranks::new(3);
    for rank in 0..3 {
        let more: &[_] = if rank == 1 {
            &[("NCCL_ALGO", "Ring")]
        } else {
            &[]
        };
        ranks.start(rank, &["--emulator", "--json"], more);
    }
    let outputs = ranks.finish();
    let value = json(&outputs[0]);
    let findings = value["findings"].as_array().unwrap();
    let told = findings.iter().any(|one| {
        one["severity"] == "error"
            && one["what"].as_str().unwrap().contains("NCCL_ALGO")
            && one["ranks"] == serde_json::json!([1])
    });
    assert!(told, "{value:#}");
    for output in &outputs {
        assert_eq!(code(output.status), 2);
    }
}

#[test]
fn a_rank_that_never_comes_is_named() {
    let mut ranks = Ranks::new(3);
    for rank in 0..2 {
        ranks.start(rank, &["--emulator", "--json", "--timeout", "2"], &[]);
    }
    let outputs = ranks.finish();
    let value = json(&outputs[0]);
    let world = one(&value, "world");
    assert_eq!(world["severity"], "error");
    assert!(
        world["what"].as_str().unwrap().contains("rank 2"),
        "{world}"
    );
    assert_eq!(code(outputs[1].status), 2);
    assert!(text(&outputs[1].stderr).contains("rank 1 of 3"));
}

#[test]
fn ranks_are_named_by_hand_where_there_is_no_launcher() {
    let directory = tempfile::tempdir().unwrap();
    let place = format!("unix:{}", directory.path().join("world").display());
    let children: Vec<_> = ["0", "1"]
        .into_iter()
        .map(|rank| {
            let arguments = [
                "--emulator",
                "--rank",
                rank,
                "--world-size",
                "2",
                "--rendezvous",
                &place,
                "--json",
            ];
            doctor(&arguments)
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    let outputs: Vec<_> = children.into_iter().map(finish).collect();
    assert_eq!(json(&outputs[0])["ranks"], 2);
}

#[test]
fn hosts_that_do_not_reach_each_other_where_nccl_tries_are_told_apart() {
    let Some(hosts) = meeting::Hosts::new([&["10.77.0.1/24"], &["10.77.0.2/24"]]) else {
        return;
    };
    let check = |interfaces: [&str; 2]| {
        let children: Vec<_> = [0, 1]
            .into_iter()
            .map(|host: usize| {
                let before = ["ip", "netns", "exec", &hosts.names[host]];
                let rank = host.to_string();
                let arguments = [
                    "--emulator",
                    "--json",
                    "--rank",
                    &rank,
                    "--world-size",
                    "2",
                    "--rendezvous",
                    "tcp:10.77.0.1:29400",
                ];
                let mut command = doctor_behind(&before, &arguments);
                command.env("NCCL_SOCKET_IFNAME", interfaces[host]);
                command.stdout(Stdio::piped()).stderr(Stdio::piped());
                command.spawn().unwrap()
            })
            .collect();
        let outputs: Vec<_> = children.into_iter().map(finish).collect();
        assert_eq!(code(outputs[0].status), code(outputs[1].status));
        json(&outputs[0])
    };
    let good = check(["eth7", "ens3"]);
    assert_eq!(
        named(&good, "reachable")
            .iter()
            .filter(|one| one["severity"] == "error")
            .count(),
        0,
        "{good:#}"
    );
    // A variable that is right on another host.
    let bad = check(["eth7", "docker0"]);
    let findings = bad["findings"].as_array().unwrap();
    let told = findings.iter().any(|one| {
        one["severity"] == "error"
            && one["what"].to_string().contains("docker0")
            && one["fix"].is_string()
            && one["ranks"] == serde_json::json!([1])
    });
    assert!(told, "{bad:#}");
}

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
    // What can be read of several is.
    let output = run(doctor(&["log", &nowhere, &log("2.30-fine.log")]));
    assert_eq!(code(output.status), 1);
    assert!(text(&output.stdout).contains("! log-file: "));
}

#[test]
fn wrong_arguments_are_one_sentence_that_names_them() {
    for (arguments, says) in [
        (&["--bogus"][..], "--bogus"),
        (&["job.log"], "nccl-doctor log job.log"),
        (&["--rank", "0"], "--world-size and --rendezvous"),
        (&["log"], "standard input"),
        (
            &[
                "--rank",
                "2",
                "--world-size",
                "2",
                "--rendezvous",
                "unix:/tmp/x",
            ],
            "NCCL_RUN_RANK=2",
        ),
        (
            &[
                "--rank",
                "0",
                "--world-size",
                "2",
                "--rendezvous",
                "nonsense",
            ],
            "nonsense",
        ),
    ] {
        let output = run(doctor(arguments));
        let stderr = text(&output.stderr);
        assert_eq!(
            (code(output.status), stderr.lines().count()),
            (3, 1),
            "{stderr}"
        );
        assert!(stderr.contains(says), "no {says:?} in {stderr}");
        assert_eq!(text(&output.stdout), "");
    }
    let help = run(doctor(&["--help"]));
    assert_eq!(code(help.status), 0);
    assert!(text(&help.stdout).contains("torchrun --nproc-per-node 8"));
}

/// What three emulated ranks that make a communicator do and log; `fault` is for rank 2.
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

/// What the doctor says of these.
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
            let one = &process["communicators"][0];
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
    // Whoever only has the logs sees who never came.
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
