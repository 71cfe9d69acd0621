//! Invalid options and variables.

use std::path::Path;

use super::program::run_with;

/// Arguments, variables, and a word that the error must contain.
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
        ("-G -2", &[], "-G"),
        ("-G 2 -I 1", &[], "-I times single iterations"),
        ("--algo fast", &[], "auto, native, grouped"),
        ("--plot out.png", &[], ".svg"),
        (
            "--plot /no/such/directory/out.svg",
            &[],
            "/no/such/directory",
        ),
        ("-R 3", &[], "0 to 2"),
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
        // A launcher with invalid variables, or with another number of ranks.
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
