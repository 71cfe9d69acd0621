//! `sendrecv_perf`: a ring of messages.

use super::program::{SHORT, run_of};

const PROGRAM: &str = "sendrecv_perf";

#[test]
fn a_ring_of_any_length_is_measured_and_verified() {
    for ranks in [1, 2, 3, 4] {
        let run = run_of(PROGRAM, &format!("{SHORT} --ranks {ranks}"), &[]).expect(0);
        run.expect_nothing_wrong();
        for (row, bytes) in run.rows().iter().zip([1024usize, 8192, 65536]) {
            // All of the size goes to one neighbour; nccl-tests prints an operator and no root.
            let elements = bytes / 4;
            let expected = [
                &bytes.to_string(),
                &elements.to_string(),
                "float",
                "sum",
                "-1",
            ];
            assert_eq!(row[..5], expected);
            assert_eq!(
                (row[6], row[10]),
                (row[7], row[11]),
                "all of it is on the bus"
            );
        }
    }
}

#[test]
fn sizes_are_whole_elements_and_not_rounded_any_further() {
    let run = run_of(
        PROGRAM,
        "-b 4 -e 13 -i 3 -n 2 --ranks 3 --memcpy_ratio 0 -d half",
        &[],
    );
    let run = run.expect(0);
    run.expect_nothing_wrong();
    let sizes: Vec<_> = run.rows().iter().map(|row| (row[0], row[1])).collect();
    assert_eq!(sizes, [("4", "2"), ("6", "3"), ("10", "5"), ("12", "6")]);
}

#[test]
fn all_operators_are_only_names_here() {
    let run = run_of(
        PROGRAM,
        "-b 64 -e 64 -n 1 --ranks 2 -o all --memcpy_ratio 0",
        &[],
    )
    .expect(0);
    let names: Vec<_> = run.rows().iter().map(|row| row[3]).collect();
    assert_eq!(names, ["sum", "prod", "max", "min", "avg"]);
}

#[test]
fn a_wrong_element_ends_in_exit_code_seven() {
    let spoiled = [("NCCL_TOOLS_SELF_TEST", "flip:1")];
    let run = run_of(PROGRAM, &format!("{SHORT} --ranks 3"), &spoiled).expect(7);
    for row in run.rows() {
        assert_eq!((row[8], row[12]), ("1", "1"), "{row:?}");
    }
    assert!(
        run.stderr.contains("sendrecv_perf: wrong elements arrived"),
        "{run:#?}"
    );
}

#[test]
fn there_is_only_one_way() {
    let run = run_of(PROGRAM, "--algo native", &[]).expect(2);
    assert!(run.stderr.contains("only one way"), "{run:#?}");
    let help = run_of(PROGRAM, "--help", &[]).expect(0).stdout;
    assert!(
        help.contains("a ring of messages") && !help.contains("--algo"),
        "{help}"
    );
}
