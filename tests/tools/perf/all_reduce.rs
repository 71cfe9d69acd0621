//! `all_reduce_perf`: every operator on every type, also in place.

use nccl_tools::element;

use super::program::{SHORT, run_of};

const PROGRAM: &str = "all_reduce_perf";

#[test]
fn every_operator_on_every_type_is_right_on_any_number_of_ranks() {
    for ranks in [1, 2, 3, 8] {
        let line =
            format!("-b 48 -e 4K -f 85 -n 1 -w 0 -d all -o all --memcpy_ratio 0 --ranks {ranks}");
        let run = run_of(PROGRAM, &line, &[]).expect(0);
        run.expect_nothing_wrong();
        let seen: Vec<_> = run
            .rows()
            .iter()
            .map(|row| format!("{} {}", row[2], row[3]))
            .collect();
        let expected: Vec<_> = element::ALL
            .iter()
            .flat_map(|element| {
                ["sum", "prod", "max", "min", "avg"].map(|op| [element.name, op].join(" "))
            })
            // NCCL lacks this combination.
            .filter(|case| !(ranks == 1 && case.starts_with("f8") && case.ends_with("avg")))
            .flat_map(|case| [case.clone(), case])
            .collect();
        assert_eq!(seen, expected);
    }
}

#[test]
fn the_bus_carries_twice_what_the_others_have() {
    let run = run_of(PROGRAM, "-b 1M -e 1M -n 3 --ranks 4 --memcpy_ratio 0", &[]).expect(0);
    run.expect_nothing_wrong();
    let rows = run.rows();
    let [row] = &rows[..] else { panic!("{run:#?}") };
    assert_eq!(row[..5], ["1048576", "262144", "float", "sum", "-1"]);
    for (algorithm, bus) in [(row[6], row[7]), (row[10], row[11])] {
        let (algorithm, bus): (f64, f64) = (algorithm.parse().unwrap(), bus.parse().unwrap());
        // Two decimals of each are printed.
        assert!(
            (bus - algorithm * 1.5).abs() <= 0.005 * 2.5 + 1e-9,
            "{row:?}"
        );
    }
    // It is really in place, so there is no comment about it.
    assert!(!run.stdout.contains("# In-place"), "{}", run.stdout);
}

#[test]
fn a_wrong_result_is_found_in_every_type_and_for_every_operator() {
    let line = "-b 64 -e 64 -n 1 -w 0 -d all -o all --memcpy_ratio 0 --ranks 2";
    let run = run_of(PROGRAM, line, &[("NCCL_TOOLS_SELF_TEST", "flip:0")]).expect(7);
    assert_eq!(run.rows().len(), 5 * element::ALL.len());
    for row in run.rows() {
        assert_eq!((row[8], row[12]), ("1", "1"), "{row:?}");
    }
}

#[test]
fn what_nccl_lacks_is_left_out_of_all_and_refused_alone() {
    let line = "-b 64 -e 64 -n 1 --memcpy_ratio 0 --ranks 1 -d f8e5m2";
    let all = run_of(PROGRAM, &format!("{line} -o all"), &[]).expect(0);
    assert_eq!(all.rows().len(), 4);
    let said = "# left out: NCCL has no mean of 8-bit floats of one rank\n";
    assert!(all.stdout.contains(said), "{}", all.stdout);
    let one = run_of(PROGRAM, &format!("{line} -o avg"), &[]).expect(2);
    assert!(one.stderr.contains("no mean of 8-bit floats"), "{one:#?}");
    let refused = run_of(PROGRAM, "-o mulsum", &[]).expect(2);
    assert!(refused.stderr.contains("mulsum"), "{refused:#?}");
}

#[test]
fn groups_of_reductions_are_verified_too() {
    let run = run_of(PROGRAM, &format!("{SHORT} --ranks 2 -c 2 -m 3"), &[]).expect(0);
    run.expect_nothing_wrong();
}
