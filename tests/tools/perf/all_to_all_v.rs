//! `all_to_all_v_perf`: nccl-tests' patterns.

use super::program::{SHORT, run_of};

const PROGRAM: &str = "all_to_all_v_perf";
const MATRIX_FILE: &str = "NCCL_TESTS_ALLTOALLV_MATRIX_FILE";

#[test]
fn any_pattern_is_measured_and_every_element_verified() {
    for (ranks, spread) in [(1, "1"), (2, "1"), (3, "0.5"), (4, "1"), (4, "0")] {
        let variables = [("NCCL_TESTS_ALLTOALLV_SPREAD", spread)];
        let run = run_of(
            PROGRAM,
            &format!("{SHORT} --ranks {ranks} -d half"),
            &variables,
        );
        let run = run.expect(0);
        run.expect_nothing_wrong();
        assert_eq!(run.rows()[2][2..5], ["half", "none", "-1"]);
        let spread = [
            ("NCCL_TESTS_ALLTOALLV_SPREAD", spread),
            ("NCCL_TOOLS_SELF_TEST", "flip:0"),
        ];
        let run = run_of(
            PROGRAM,
            &format!("{SHORT} --ranks {ranks} -d half"),
            &spread,
        )
        .expect(7);
        assert!(
            run.rows().iter().all(|row| (row[8], row[12]) == ("1", "1")),
            "{run:#?}"
        );
    }
}

#[test]
fn a_matrix_says_who_sends_how_much() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("traffic.txt");
    // Rank 3 is not used, rank 1 sends nothing.
    std::fs::write(&file, "100 200 150 1\n0 0 0 1\n300 150 200 1\n1 1 1 1e9\n").unwrap();
    let variables = [
        (MATRIX_FILE, file.to_str().unwrap()),
        ("NCCL_TESTS_ALLTOALLV_MATRIX_SCALE", "2"),
        ("NCCL_TESTS_ALLTOALLV_PRINT_SUMMARY", "1"),
    ];
    for more in ["", "-G 2", "-m 2", "--spawn threads"] {
        let line = format!("-b 4K -e 4K -n 2 --ranks 3 --memcpy_ratio 0 {more}");
        let run = run_of(PROGRAM, &line, &variables).expect(0);
        run.expect_nothing_wrong();
        // Rank 2 sends 592 + 288 + 400 bytes, of 16 each.
        assert_eq!(run.rows()[0][..3], ["1280", "0", "float"], "{more}");
        let lines = |begin: &str| {
            run.stdout
                .lines()
                .filter(|line| line.starts_with(begin))
                .count()
        };
        assert_eq!(
            lines("# NCCL_TESTS_ALLTOALLV_PRINT_SUMMARY: mode=matrix nranks=3 matrix_dim=4 "),
            2
        );
        assert_eq!(
            lines("#   rank=2 send_bytes=1280 recv_bytes=688 alg_bw="),
            2
        );
        assert_eq!(lines("#   rank=1 send_bytes=0 recv_bytes=688 alg_bw="), 2);
    }
}

#[test]
fn a_matrix_that_does_not_fit_is_one_sentence_and_exit_code_two() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("traffic.txt");
    for (text, line, words) in [
        ("1 2\n3", "-b 1K -e 1K --ranks 2", "row 1 has 1 columns"),
        ("1 2 3\n4 5 6", "-b 1K -e 1K --ranks 2", "square"),
        ("1 -2\n3 4", "-b 1K -e 1K --ranks 2", "negative"),
        ("1 two\n3 4", "-b 1K -e 1K --ranks 2", "two"),
        ("", "-b 1K -e 1K --ranks 2", "empty"),
        ("1 2\n3 4", "-b 1K -e 1K --ranks 3", "there are 3"),
        ("16 32\n16 16", "-b 1K -e 2K --ranks 2", "-b and -e"),
        ("16 32\n16 999999", "-b 1K -e 1K --ranks 2", "1000016 bytes"),
    ] {
        std::fs::write(&file, text).unwrap();
        let variables = [(MATRIX_FILE, file.to_str().unwrap())];
        let run = run_of(PROGRAM, line, &variables).expect(2);
        assert_eq!(
            (run.stdout.as_str(), run.stderr.lines().count()),
            ("", 1),
            "{run:#?}"
        );
        assert!(run.stderr.contains(words), "{text:?}: {run:#?}");
    }
}

#[test]
fn ranks_with_different_matrices_say_so_instead_of_hanging() {
    use super::launchers::{free_port, torchrun};
    use super::program::{command_of, finish};
    let port = free_port();
    let directory = tempfile::tempdir().unwrap();
    let children: Vec<_> = (0..2)
        .map(|rank| {
            let file = directory.path().join(rank.to_string());
            std::fs::write(&file, format!("16 {}\n16 16", 16 * (rank + 1))).unwrap();
            let mut command = command_of(PROGRAM, "-b 1K -e 1K --memcpy_ratio 0");
            command
                .envs(torchrun(rank, 2, &port))
                .env(MATRIX_FILE, file);
            command.spawn().unwrap()
        })
        .collect();
    for child in children {
        let run = finish(child);
        assert!(!run.status.success(), "{run:#?}");
        assert!(
            run.stderr.contains("rank 1 has other data than rank 0"),
            "{run:#?}"
        );
    }
}
