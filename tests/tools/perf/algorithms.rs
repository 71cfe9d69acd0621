//! `--algo`: several algorithms in one run.

use nccl_tools::algorithm::TABLE;
use serde_json::Value;

use super::program::{SHORT, run, run_with};

/// The names in the comment lines above the tables.
fn tables(stdout: &str) -> Vec<&str> {
    let names = stdout
        .lines()
        .filter_map(|line| line.strip_prefix("# algorithm: "));
    names.collect()
}

#[test]
fn every_algorithm_has_its_table_and_is_verified() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("out.json");
    let line = format!(
        "{SHORT} --ranks 4 --ranks_per_node 2 --algo all -J {}",
        path.display()
    );
    let run = run(&line).expect(0);
    run.expect_nothing_wrong();
    let all: Vec<_> = TABLE
        .iter()
        .filter(|algorithm| !algorithm.by_copy_engines)
        .map(|algorithm| algorithm.name)
        .collect();
    assert_eq!(tables(&run.stdout), all);
    assert_eq!(run.rows().len(), 3 * all.len());
    let heads = run
        .stdout
        .lines()
        .filter(|line| line.contains("  busbw  #wrong"));
    assert_eq!(heads.count(), all.len());
    let json: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    let named: Vec<_> = json["results"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| &row["algorithm"])
        .collect();
    let expected: Vec<_> = all.iter().flat_map(|name| [*name; 3]).collect();
    assert_eq!(named, expected);
}

#[test]
fn named_ones_come_in_their_order_and_one_alone_is_named_too() {
    let both = run(&format!("{SHORT} --ranks 2 --algo grouped,native")).expect(0);
    assert_eq!(tables(&both.stdout), ["grouped", "native"]);
    let one = run(&format!("{SHORT} --ranks 2 --algo grouped")).expect(0);
    assert_eq!(tables(&one.stdout), ["grouped"]);
    let none = run(&format!("{SHORT} --ranks 2")).expect(0);
    assert_eq!(tables(&none.stdout), [""; 0], "as in nccl-tests");
}

#[test]
fn an_older_library_lacks_an_algorithm_and_that_is_said() {
    let old = [("NCCL_EMULATOR_VERSION", "2.27.7")];
    let all = run_with(&format!("{SHORT} --ranks 2 --algo all"), &old).expect(0);
    all.expect_nothing_wrong();
    assert!(!tables(&all.stdout).contains(&"native"), "{all:#?}");
    assert!(tables(&all.stdout).contains(&"grouped"), "{all:#?}");
    let line = "# algorithm native is left out: it needs NCCL 2.28.3, and this is 2.27.7\n";
    assert!(all.stdout.contains(line), "{}", all.stdout);
    let named = run_with(&format!("{SHORT} --ranks 2 --algo native"), &old).expect(2);
    assert!(
        named.stderr.contains("--algo native: it needs NCCL 2.28.3"),
        "{named:#?}"
    );
}

#[test]
fn a_ratio_says_whose_it_is() {
    let run = run("-b 1K -e 1K -n 1 --ranks 2 --algo grouped,native").expect(0);
    for name in ["grouped", "native"] {
        let line = format!("# memcpy ratio         1024 B    float {name} : ");
        assert!(run.stdout.contains(&line), "{}", run.stdout);
    }
}

#[test]
fn ways_between_nodes_need_nodes_and_those_of_copy_engines_need_windows() {
    let all = run(&format!("{SHORT} --ranks 2 --algo all")).expect(0);
    for name in ["two-level", "copy-engine"] {
        assert!(
            all.stdout
                .contains(&format!("# algorithm {name} is left out: ")),
            "{}",
            all.stdout
        );
        let alone = run(&format!("{SHORT} --ranks 2 --algo {name}")).expect(2);
        assert_eq!(alone.stderr.lines().count(), 1, "{alone:#?}");
    }
}
