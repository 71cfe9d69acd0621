//! `-G` and `-R`.

use serde_json::Value;

use super::program::{PROGRAMS, SHORT, run_of};

#[test]
fn every_program_replays_its_iterations_and_what_is_replayed_is_right() {
    let directory = tempfile::tempdir().unwrap();
    for program in PROGRAMS {
        for (number, more) in ["", "-m 3", "-R 1 --spawn threads"].iter().enumerate() {
            let path = directory.path().join(format!("{program}{number}.json"));
            let line = format!("{SHORT} --ranks 3 -G 4 {more} -J {}", path.display());
            let line = line.replace("--memcpy_ratio 0", "");
            let run = run_of(program, &line, &[]).expect(0);
            run.expect_nothing_wrong();
            assert!(
                run.stdout.contains(" validation: 1 graph: 4 unalign: 0\n"),
                "{run:#?}"
            );
            assert!(
                !run.stdout.contains("# memcpy ratio"),
                "single operations are not graphs"
            );
            let json: Value =
                serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
            assert_eq!(json["config"]["graph"], 4);
        }
    }
}

#[test]
fn what_a_replay_gets_wrong_is_found() {
    for program in PROGRAMS {
        let spoiled = [("NCCL_TOOLS_SELF_TEST", "flip:1")];
        let run = run_of(
            program,
            &format!("{SHORT} --ranks 2 -G 2").replace("--memcpy_ratio 0", ""),
            &spoiled,
        );
        let run = run.expect(7);
        assert!(
            run.rows().iter().all(|row| (row[8], row[12]) == ("1", "1")),
            "{run:#?}"
        );
    }
}

#[test]
fn sizes_that_leave_nothing_for_a_rank_can_be_captured() {
    let run = run_of(
        "all_to_all_perf",
        "-b 8 -e 64 -f 8 -n 2 --ranks 4 -G 2",
        &[],
    )
    .expect(0);
    run.expect_nothing_wrong();
}

#[test]
fn buffers_are_said_to_be_registered_when_they_are() {
    let directory = tempfile::tempdir().unwrap();
    for (line, variables, text) in [
        ("-R 0", &[][..], "ncclMemAlloc"),
        ("-R 1", &[][..], "ncclMemAlloc, registered"),
        (
            "-R 1",
            &[("NCCL_LOCAL_REGISTER", "0")][..],
            "ncclMemAlloc, registered, of which NCCL makes no use",
        ),
    ] {
        let path = directory
            .path()
            .join(format!("{}{}.json", line, variables.len()).replace(' ', ""));
        let line = format!("{SHORT} --ranks 2 {line} -J {}", path.display());
        let run = run_of("all_reduce_perf", &line, variables).expect(0);
        run.expect_nothing_wrong();
        let buffers = format!("# Buffers              : {text}\n");
        assert!(run.stdout.contains(&buffers), "{}", run.stdout);
        let json: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        assert_eq!(json["buffers"], text);
    }
}
