//! `examples/all_to_all_perf` as a person uses it: its output, its exit codes, and what happens when
//! something breaks.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use nccl_tools::build_info::BUILD;
use nccl_tools::element;
use rustix::process::{Pid, Signal};
use serde_json::Value;

/// How long one run may take.
const DEADLINE: Duration = Duration::from_secs(120);

/// The example that belongs to this test binary, built if it is not there or is old.
fn example() -> &'static Path {
    static EXAMPLE: OnceLock<PathBuf> = OnceLock::new();
    EXAMPLE.get_or_init(|| {
        // <target>/[<triple>/]<profile>/deps/<this test>
        let this = std::env::current_exe().unwrap();
        let profile = this.ancestors().nth(2).unwrap();
        let mut target = profile.parent().unwrap();
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "--example", "all_to_all_perf"]);
        match profile.file_name().and_then(|name| name.to_str()) {
            Some("debug") | None => {}
            Some(name) => drop(cargo.args(["--profile", name])),
        }
        if target.file_name().is_some_and(|name| name == BUILD.target) {
            target = target.parent().unwrap();
            cargo.args(["--target", BUILD.target]);
        }
        cargo
            .arg("--target-dir")
            .arg(target)
            .current_dir(env!("CARGO_MANIFEST_DIR"));
        let built = cargo.status();
        let example = profile.join("examples/all_to_all_perf");
        // A machine that only runs what was built elsewhere has no cargo.
        let built = built.is_ok_and(|status| status.success());
        assert!(built || example.exists(), "the example could not be built");
        example
    })
}

/// Variables by which launchers tell a process that it is a rank.
const LAUNCHERS: [&str; 11] = [
    "NCCL_RUN_RANK",
    "NCCL_RUN_WORLD_SIZE",
    "RANK",
    "WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "SLURM_PROCID",
    "SLURM_STEP_ID",
    "NCCL_TOOLS_SELF_TEST",
];

/// The example on the emulator, wherever this runs: with GPUs the figures would be others.
fn command(arguments: &str) -> Command {
    let mut command = Command::new(example());
    command
        .args(arguments.split_whitespace())
        .env("NCCL_EMULATOR", "1");
    for name in LAUNCHERS {
        command.env_remove(name);
    }
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// What a run printed, and how it ended.
#[derive(Debug)]
struct Run {
    status: ExitStatus,
    stdout: String,
    stderr: String,
}

fn run(arguments: &str) -> Run {
    finish(command(arguments).spawn().unwrap())
}

fn run_with(arguments: &str, variables: &[(&str, &str)]) -> Run {
    finish(
        command(arguments)
            .envs(variables.iter().copied())
            .spawn()
            .unwrap(),
    )
}

/// Waits for the end, and kills it at the deadline.
fn finish(mut child: Child) -> Run {
    let read = |stream: Option<Box<dyn Read + Send>>| {
        std::thread::spawn(move || {
            let mut text = String::new();
            if let Some(mut stream) = stream {
                stream.read_to_string(&mut text).unwrap();
            }
            text
        })
    };
    let stdout = read(child.stdout.take().map(|stream| Box::new(stream) as _));
    let stderr = read(child.stderr.take().map(|stream| Box::new(stream) as _));
    let begun = Instant::now();
    let mut late = false;
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if begun.elapsed() > DEADLINE && !late {
            late = true;
            child.kill().unwrap();
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let run = Run {
        status,
        stdout: stdout.join().unwrap(),
        stderr: stderr.join().unwrap(),
    };
    assert!(!late, "killed after {DEADLINE:?}: {run:#?}");
    run
}

impl Run {
    fn expect(self, code: i32) -> Self {
        assert_eq!(self.status.code(), Some(code), "{self:#?}");
        self
    }

    /// The rows of the table, cut into fields.
    fn rows(&self) -> Vec<Vec<&str>> {
        let rows = self
            .stdout
            .lines()
            .filter(|line| !line.starts_with('#') && !line.is_empty());
        rows.map(|row| row.split_whitespace().collect()).collect()
    }

    /// The lines about devices.
    fn devices(&self) -> Vec<&str> {
        self.stdout
            .lines()
            .filter(|line| line.starts_with("#  Rank "))
            .collect()
    }
}

#[test]
fn without_arguments_four_emulated_ranks_are_measured_and_verified() {
    let run = run("").expect(0);
    assert_eq!(
        run.stderr, "",
        "there is no terminal, so there is no progress"
    );
    let lines: Vec<&str> = run.stdout.lines().collect();
    assert!(lines[0].starts_with("# nccl-tests version 2.19.6 nccl-headers=23203 nccl-library="));
    assert_eq!(lines[1], "# Collective test starting: all_to_all_perf");
    assert_eq!(
        lines[2],
        "# nThread 1 nGpus 1 minBytes 1024 maxBytes 16777216 step: 2(factor) warmup iters: 1 \
         iters: 20 agg iters: 1 validation: 1 graph: 0 unalign: 0"
    );
    assert_eq!(lines[3..5], ["#", "# Using devices"]);
    let devices = run.devices();
    assert_eq!(devices.len(), 4, "{}", run.stdout);
    for (rank, line) in devices.iter().enumerate() {
        assert!(
            line.starts_with(&format!("#  Rank {rank:>2} Group  0 Pid ")),
            "{line}"
        );
        assert!(line.contains(&format!(" device {rank:>2} [")), "{line}");
        assert!(
            line.to_lowercase().contains("emulat"),
            "it must say what it is: {line}"
        );
    }
    let rows = run.rows();
    assert_eq!(rows.len(), 15, "{}", run.stdout);
    for (index, row) in rows.iter().enumerate() {
        let size = 1024usize << index;
        assert_eq!(
            row[..5],
            [
                &size.to_string(),
                &(size / 16).to_string(),
                "float",
                "none",
                "-1"
            ]
        );
        assert_eq!(row.len(), 13, "{row:?}");
        assert_eq!((row[8], row[12]), ("0", "0"), "wrong elements: {row:?}");
        for bandwidth in [row[6], row[7], row[10], row[11]] {
            assert!(bandwidth.parse::<f64>().is_ok(), "{row:?}");
        }
    }
    let ratios = run
        .stdout
        .lines()
        .filter(|line| line.starts_with("# memcpy ratio "))
        .count();
    assert_eq!(
        ratios,
        1 + 15,
        "a line that explains, and one for each size:\n{}",
        run.stdout
    );
    let footer = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : ";
    assert!(run.stdout.contains(footer), "{}", run.stdout);
    let end = "\n#\n# Collective test concluded: all_to_all_perf\n#\n\n";
    assert!(run.stdout.ends_with(end), "{}", run.stdout);
}

/// Few sizes and iterations, for tests that look at something else than figures.
const SHORT: &str = "-b 1K -e 64K -f 8 -n 3 --memcpy_ratio 0";

#[test]
fn any_number_of_ranks_runs_as_processes_and_as_threads() {
    for spawn in ["processes", "threads"] {
        for ranks in [1, 2, 3, 4, 8] {
            let run = run(&format!("{SHORT} --ranks {ranks} --spawn {spawn}")).expect(0);
            assert_eq!(run.devices().len(), ranks, "{run:#?}");
            let pids: BTreeSet<&str> = run.devices().iter().map(|line| pid_of(line)).collect();
            let expected = if spawn == "threads" { 1 } else { ranks };
            assert_eq!(pids.len(), expected, "{ranks} {spawn}: {:?}", run.devices());
            assert_eq!(run.rows().len(), 3, "{run:#?}");
            for row in run.rows() {
                assert_eq!((row[8], row[12]), ("0", "0"), "{ranks} {spawn}: {row:?}");
                if ranks == 1 {
                    assert_eq!(row[7], "0.00", "one rank has no bus");
                }
            }
        }
    }
}

fn pid_of(line: &str) -> &str {
    line.split(" Pid ")
        .nth(1)
        .unwrap()
        .split_whitespace()
        .next()
        .unwrap()
}

#[test]
fn nccl_tests_ways_to_say_how_many_ranks_are_understood() {
    for (arguments, ranks, threads) in [
        ("-g 3", 3, false),
        ("-t 3", 3, true),
        ("-t 2 -g 2", 4, true),
    ] {
        let run = run(&format!("{SHORT} {arguments}")).expect(0);
        assert_eq!(run.devices().len(), ranks, "{arguments}");
        let pids: BTreeSet<&str> = run.devices().iter().map(|line| pid_of(line)).collect();
        assert_eq!(pids.len() == 1, threads, "{arguments}: {:?}", run.devices());
    }
}

#[test]
fn every_element_type_is_moved_without_a_mistake() {
    let run = run("-b 1K -e 1M -f 1024 -n 2 -d all --ranks 3 --memcpy_ratio 0").expect(0);
    let types: Vec<String> = run.rows().iter().map(|row| row[2].to_owned()).collect();
    let expected: Vec<String> = element::ALL
        .iter()
        .flat_map(|element| [element.name, element.name])
        .map(str::to_owned)
        .collect();
    assert_eq!(types, expected);
    for row in run.rows() {
        assert_eq!((row[8], row[12]), ("0", "0"), "{row:?}");
    }
}

#[test]
fn options_that_change_the_method_change_no_result() {
    for options in [
        "-w 0 -n 1",
        "-m 4",
        "-m 3 -z 1",
        "-z 1",
        "-z 2",
        "-z 3",
        "-C 1",
        "-a 0",
        "-a 2",
        "-a 3",
        "-c 3",
        "-u 3",
        "-u 1 -d int8",
        "-y 1",
        "-f 1 -i 20K -b 1K -e 50K",
        "-f 1 -b 0 -e 100 -i 50",
        "-N 2",
        "-M 1",
        "-S 1",
        "-I 1 -K 1",
        "-I 1 -z 3",
        "-x 0",
        "-p 1 -T 30 -o max -r 1 -R 0 -G 0 -D 0 -V 4",
    ] {
        let run = run(&format!("{SHORT} --ranks 2 {options}")).expect(0);
        assert!(!run.rows().is_empty(), "{options}: {run:#?}");
        for row in run.rows() {
            assert_eq!(row[8], "0", "{options}: {row:?}");
        }
    }
}

#[test]
fn an_unverified_run_says_so() {
    let run = run(&format!("{SHORT} --ranks 2 -c 0")).expect(0);
    for row in run.rows() {
        assert_eq!((row[8], row[12]), ("N/A", "N/A"), "{row:?}");
    }
}

#[test]
fn sizes_that_leave_nothing_for_a_rank_are_shown_as_nothing() {
    let run = run("-b 8 -e 128 -n 2 --ranks 4").expect(0);
    let sizes: Vec<(&str, &str)> = run.rows().iter().map(|row| (row[0], row[1])).collect();
    assert_eq!(
        sizes,
        [
            ("0", "0"),
            ("0", "0"),
            ("0", "0"),
            ("64", "4"),
            ("128", "8")
        ]
    );
}

#[test]
fn the_json_file_has_what_the_table_has_and_the_emulators_name() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("out.json");
    let arguments = format!(
        "-b 1K -e 64K -f 8 -n 3 --ranks 2 -I 1 -J {}",
        path.display()
    );
    let run = run_with(
        &arguments,
        &[("NCCL_TOKEN", "secret"), ("MY_OWN", "private")],
    )
    .expect(0);
    assert!(
        run.stdout
            .starts_with(&format!("# Writing JSON output to {}\n", path.display()))
    );
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(
        !text.contains("secret") && !text.contains("private"),
        "{text}"
    );
    let json: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json["version"], 3);
    assert!(json["nccl_version"].as_u64().unwrap() > 20_000, "{json}");
    assert!(
        json["emulator"].as_str().unwrap().contains("emulat"),
        "{json}"
    );
    assert!(
        json["producer"]
            .as_str()
            .unwrap()
            .starts_with("nccl-tools "),
        "{json}"
    );
    let env: Vec<&str> = json["env"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(Value::as_str)
        .collect();
    assert!(env.contains(&"NCCL_EMULATOR=1"), "{env:?}");
    let devices = json["config"]["devices"].as_array().unwrap();
    assert_eq!(devices.len(), 2);
    for device in devices {
        assert!(
            device["device_info"]
                .as_str()
                .unwrap()
                .to_lowercase()
                .contains("emulat")
        );
    }
    let results = json["results"].as_array().unwrap();
    let rows = run.rows();
    assert_eq!(results.len(), rows.len());
    for (result, row) in results.iter().zip(&rows) {
        assert_eq!(result["size"].to_string(), row[0]);
        assert_eq!(result["count"].to_string(), row[1]);
        assert_eq!(result["type"], row[2]);
        let shown: f64 = row[5].parse().unwrap();
        let time = result["out_of_place"]["time"].as_f64().unwrap();
        assert!((shown - time).abs() <= 0.005 + time * 0.1, "{shown} {time}");
        assert_eq!(result["out_of_place"]["nwrong"], 0.0);
        assert_eq!(result["in_place"]["nwrong"], 0.0);
        let iterations = &result["in_place_per_iter"];
        assert_eq!(iterations["times_us"].as_array().unwrap().len(), 3);
        assert_eq!(
            iterations["per_process_max_times_us"]
                .as_array()
                .unwrap()
                .len(),
            2
        );
        assert!(
            result["memcpy_ratio"]["ratio"].as_f64().unwrap() > 0.0,
            "{result}"
        );
    }
    assert_eq!(
        json["out_of_bounds"],
        serde_json::json!({"count": 0, "okay": "true"})
    );
    assert_eq!(json["average_bus_bandwidth"]["okay"], "unchecked");
    assert_eq!(json["errors"], serde_json::json!([]));
}

#[test]
fn a_second_json_file_does_not_overwrite_the_first() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("out.json");
    let arguments = format!(
        "-b 1K -e 1K -n 1 --ranks 1 --memcpy_ratio 0 -J {}",
        path.display()
    );
    for name in ["out.json", "out.json.0", "out.json.1"] {
        run(&arguments).expect(0);
        let text = std::fs::read_to_string(directory.path().join(name)).unwrap();
        assert_eq!(
            serde_json::from_str::<Value>(&text).unwrap()["version"],
            3,
            "{name}"
        );
    }
}

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

/// A run without end, once its rows come; and the processes of its ranks.
struct Endless {
    child: Child,
    pids: Vec<i32>,
    // Read no further, but kept open.
    _stdout: BufReader<std::process::ChildStdout>,
}

fn endless(arguments: &str) -> Endless {
    let mut child = command(&format!("{SHORT} -N 0 {arguments}"))
        .spawn()
        .unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut pids = Vec::new();
    let mut line = String::from("#");
    while line.starts_with('#') {
        line.clear();
        stdout.read_line(&mut line).unwrap();
        if line.starts_with("#  Rank ") {
            pids.push(pid_of(&line).parse().unwrap());
        }
    }
    if line.is_empty() {
        panic!("it ended by itself: {:#?}", finish(child));
    }
    Endless {
        child,
        pids,
        _stdout: stdout,
    }
}

fn signal(pid: i32, signal: Signal) {
    rustix::process::kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
}

fn gone(pid: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    !status
        .lines()
        .any(|line| line.starts_with("State:") && !line.contains("Z (zombie)"))
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
    } = endless("--ranks 3 -T 1");
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
    // Those that wait can only tell that they waited too long: in an operation, or to meet the others.
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

#[test]
fn on_a_terminal_progress_is_shown_and_taken_away_again() {
    use rustix::pty;
    for spawn in ["processes", "threads"] {
        let master = pty::openpt(pty::OpenptFlags::RDWR | pty::OpenptFlags::NOCTTY).unwrap();
        pty::grantpt(&master).unwrap();
        pty::unlockpt(&master).unwrap();
        let name = pty::ptsname(&master, Vec::new())
            .unwrap()
            .into_string()
            .unwrap();
        let open = || {
            std::fs::File::options()
                .read(true)
                .write(true)
                .open(&name)
                .unwrap()
        };
        let mut command = command(&format!("{SHORT} --ranks 2 --spawn {spawn}"));
        let child = command
            .stdin(open())
            .stdout(open())
            .stderr(open())
            .spawn()
            .unwrap();
        // The command keeps its ends of the terminal open.
        drop(command);
        let screen = std::thread::spawn(move || {
            let mut screen = Vec::new();
            // Once all others have closed it, a terminal is an error rather than at its end.
            let _ = std::fs::File::from(master).read_to_end(&mut screen);
            String::from_utf8(screen).unwrap()
        });
        finish(child).expect(0);
        let screen = screen.join().unwrap();
        assert!(screen.contains("\r\x1b[K"), "{spawn}: {screen:?}");
        assert!(screen.contains(" B of float, "), "{spawn}: {screen:?}");
        // What is left on the screen is what a pipe would have got.
        let left: Vec<&str> = screen
            .lines()
            .map(|line| line.rsplit("\x1b[K").next().unwrap_or(line))
            .collect();
        assert!(
            !left.iter().any(|line| line.contains(" B of float, ")),
            "{spawn}: {left:#?}"
        );
        assert_eq!(
            left.iter()
                .filter(|line| line.ends_with("       0"))
                .count(),
            3,
            "{left:#?}"
        );
    }
}

/// Arguments, variables, and what the sentence has to name.
type BadInput<'a> = (&'a str, &'a [(&'a str, &'a str)], &'a str);

#[test]
fn bad_input_is_one_sentence_and_exit_code_two() {
    let cases: &[BadInput<'_>] = &[
        ("-Q", &[], "-Q"),
        ("--no-such-option", &[], "--no-such-option"),
        ("surplus", &[], "surplus"),
        ("-b", &[], "-b"),
        ("-b eight", &[], "eight"),
        ("-b -8", &[], "negative"),
        ("-b 2M -e 1M", &[], "-e"),
        ("-e 100000G", &[], "-e"),
        ("-e 1e30", &[], "-e"),
        ("-b 0", &[], "-b"),
        ("-i 0", &[], "-i"),
        ("-n 0", &[], "-n"),
        ("-z 7", &[], "-z"),
        ("-d quaternion", &[], "quaternion"),
        ("-J out.yaml", &[], ".json"),
        ("-J /no/such/directory/out.json", &[], "/no/such/directory"),
        ("-G 2", &[], "-G"),
        ("-R 2", &[], "-R"),
        ("--ranks 0", &[], "--ranks"),
        ("--ranks many", &[], "many"),
        ("--spawn fibers", &[], "fibers"),
        // A world that does not fit.
        (
            "--ranks 3",
            &[("NCCL_EMULATOR_DEVICES", "2")],
            "3 ranks need as many devices",
        ),
        (
            "--ranks 2",
            &[("NCCL_TESTS_DEVICE", "3"), ("NCCL_EMULATOR_DEVICES", "4")],
            "from number 3 on",
        ),
        ("", &[("NCCL_TESTS_DEVICE", "first")], "NCCL_TESTS_DEVICE"),
        ("", &[("NCCL_TESTS_MIN_BW", "fast")], "NCCL_TESTS_MIN_BW"),
        ("", &[("NCCL_TESTS_SPLIT", "MOD 2")], "NCCL_TESTS_SPLIT"),
        // A launcher that is there, and its variables nonsense, or its number of ranks doubted.
        ("", &[("RANK", "x"), ("WORLD_SIZE", "2")], "RANK"),
        (
            "--ranks 2",
            &[("RANK", "0"), ("WORLD_SIZE", "2")],
            "torchrun",
        ),
        // No library.
        (
            "",
            &[("NCCL_LIBRARY", "/no/such/libnccl.so")],
            "/no/such/libnccl.so",
        ),
        (
            "",
            &[("NCCL_EMULATOR_MEMORY", "lots")],
            "NCCL_EMULATOR_MEMORY",
        ),
    ];
    for (arguments, variables, word) in cases {
        let run = run_with(arguments, variables).expect(2);
        assert_eq!(run.stdout, "", "{arguments}");
        let lines = run.stderr.lines().count();
        assert_eq!(lines, 1, "{arguments} {variables:?}: {}", run.stderr);
        assert!(
            run.stderr.contains(word),
            "{arguments} {variables:?}: {}",
            run.stderr
        );
        assert!(
            run.stderr.starts_with("all_to_all_perf: "),
            "{arguments}: {}",
            run.stderr
        );
    }
}

#[test]
fn without_gpu_and_emulator_there_is_nothing_to_run_on() {
    if Path::new("/dev/nvidiactl").exists() {
        return;
    }
    let run = run_with("", &[("NCCL_EMULATOR", "0")]).expect(2);
    assert_eq!(
        (run.stdout.as_str(), run.stderr.lines().count()),
        ("", 1),
        "{run:#?}"
    );
}

#[test]
fn help_lists_the_options() {
    let run = run("--help").expect(0);
    for option in [
        "--minbytes",
        "--ranks",
        "--spawn",
        "-J",
        "NCCL_TOOLS_SELF_TEST",
    ] {
        assert!(run.stdout.contains(option), "{}", run.stdout);
    }
}

/// Starts the ranks as a launcher does, with these variables for rank and number of ranks.
fn launched(variables: impl Fn(usize, usize) -> Vec<(&'static str, String)>) {
    const RANKS: usize = 3;
    let children: Vec<Child> = (0..RANKS)
        .map(|rank| command(SHORT).envs(variables(rank, RANKS)).spawn().unwrap())
        .collect();
    let runs: Vec<Run> = children
        .into_iter()
        .map(|child| finish(child).expect(0))
        .collect();
    assert_eq!(runs[0].devices().len(), RANKS, "{runs:#?}");
    assert_eq!(runs[0].rows().len(), 3);
    for other in &runs[1..] {
        assert_eq!(other.stdout, "", "only rank 0 prints");
    }
}

fn free_port() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port().to_string()
}

#[test]
fn under_torchrun_it_is_one_rank() {
    let port = free_port();
    launched(|rank, size| {
        vec![
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", size.to_string()),
            ("LOCAL_RANK", rank.to_string()),
            ("LOCAL_WORLD_SIZE", size.to_string()),
            ("MASTER_ADDR", "127.0.0.1".to_owned()),
            ("MASTER_PORT", port.clone()),
        ]
    });
}
