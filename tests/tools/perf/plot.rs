//! `--plot`.

use nccl_tools::algorithm::TABLE;

use super::program::{PROGRAMS, SHORT, run, run_of};

#[test]
fn every_program_draws_its_figures_and_says_that_they_are_emulated() {
    let directory = tempfile::tempdir().unwrap();
    for program in PROGRAMS {
        for spawn in ["processes", "threads"] {
            let path = directory.path().join(format!("{program}.svg"));
            let line = format!(
                "{SHORT} --ranks 2 --spawn {spawn} --plot {}",
                path.display()
            );
            let run = run_of(program, &line, &[]).expect(0);
            let said = format!("# Plot                 : {}\n", path.display());
            assert!(run.stdout.contains(&said), "{}", run.stdout);
            let svg = std::fs::read_to_string(&path).unwrap();
            for words in [
                program,
                "2 ranks",
                "mulat",
                "not a GPU",
                "bus bandwidth (GB/s)",
                ">1K<",
                ">64K<",
                "NCCL 2.32.3",
            ] {
                assert!(svg.contains(words), "{program}: {words} is missing:\n{svg}");
            }
            // ms on a busy machine.
            assert!(svg.contains("µs<") || svg.contains("ms<"), "{svg}");
            // A mark for each size in both panels, and one in the legend.
            assert_eq!(svg.matches("<circle").count(), 2 * 3 + 1, "{svg}");
        }
    }
}

#[test]
fn all_algorithms_are_in_one_picture() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("out.svg");
    run(&format!(
        "{SHORT} --ranks 2 --algo all -I 1 --plot {}",
        path.display()
    ))
    .expect(0);
    let svg = std::fs::read_to_string(&path).unwrap();
    for algorithm in TABLE
        .iter()
        .filter(|one| !one.by_copy_engines && !one.between_nodes)
    {
        assert!(
            svg.contains(&format!(">{}</text>", algorithm.name)),
            "{svg}"
        );
    }
    assert!(svg.contains("fastest iteration"), "{svg}");
}

#[test]
fn a_run_that_fails_early_leaves_an_older_picture_alone() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("out.svg");
    std::fs::write(&path, "precious").unwrap();
    run_of(
        "all_to_all_perf",
        &format!("{SHORT} --ranks 2 --plot {}", path.display()),
        &[("NCCL_TESTS_DEVICE", "x")],
    )
    .expect(2);
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
    let others = std::fs::read_dir(directory.path()).unwrap().count();
    assert_eq!(others, 1, "nothing else is left there");
}
