//! The output: the table, for any number of ranks, type and option, and progress.

use std::collections::BTreeSet;
use std::io::Read;

use nccl_tools::element;

use super::program::{SHORT, command, finish, pid_of, run};

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
            // Once all others have closed it, reading a terminal is an error rather than its end.
            let _ = std::fs::File::from(master).read_to_end(&mut screen);
            String::from_utf8(screen).unwrap()
        });
        finish(child).expect(0);
        let screen = screen.join().unwrap();
        assert!(screen.contains("\r\x1b[K"), "{spawn}: {screen:?}");
        assert!(screen.contains(" B of float, "), "{spawn}: {screen:?}");
        // The final contents of the screen are what a pipe would have got.
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
