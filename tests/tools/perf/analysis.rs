//! The requirements of `tools/analyze_perf_json.py` of nccl-tests 2.19.6 for a JSON file, beyond the existence of keys:
//! the script divides by some of the numbers, and compares others.

use serde_json::Value;

use super::program::{PROGRAMS, run_of};

fn number(value: &Value) -> f64 {
    value
        .as_f64()
        .unwrap_or_else(|| panic!("{value} is no number"))
}

fn numbers(value: &Value) -> Vec<f64> {
    value
        .as_array()
        .unwrap_or_else(|| panic!("{value} is no list"))
        .iter()
        .map(number)
        .collect()
}

/// Follows the script through a file; `rows` is the number of processes that it should find.
fn analyse(json: &Value, rows: usize) {
    assert_eq!(json["version"], 3);
    let config = &json["config"];
    for key in ["iterations", "aggregated_iterations", "per_iter_skip"] {
        assert!(config[key].is_u64(), "{key}: {config}");
    }
    // By these the script groups processes into nodes.
    let devices = config["devices"].as_array().unwrap();
    assert!(devices.iter().all(|device| device["hostname"].is_string()) && devices.len() >= rows);
    let results = json["results"].as_array().unwrap();
    assert!(!results.is_empty());
    for result in results {
        assert!(result["size"].is_u64(), "{result}");
        for key in ["out_of_place_per_iter", "in_place_per_iter"] {
            let iterations = &result[key];
            for key in [
                "min_us", "p50_us", "p95_us", "p99_us", "max_us", "stdev_us", "cv_pct",
            ] {
                assert!(number(&iterations[key]).is_finite(), "{key}: {iterations}");
            }
            assert!(
                number(&iterations["avg_us"]) > 0.0,
                "the script divides by it: {iterations}"
            );
            let times = numbers(&iterations["times_us"]);
            assert_eq!(times.len() as u64, config["iterations"].as_u64().unwrap());
            let rows_given = iterations["per_process_max_times_us"].as_array();
            if rows == 1 {
                assert!(rows_given.is_none(), "one process is no list: {iterations}");
                continue;
            }
            let processes: Vec<_> = rows_given.unwrap().iter().map(numbers).collect();
            assert_eq!(processes.len(), rows);
            for (iteration, time) in times.iter().enumerate() {
                let longest = processes
                    .iter()
                    .map(|times| times[iteration])
                    .fold(0.0, f64::max);
                assert!((time - longest).abs() < 0.001, "{iteration}: {iterations}");
            }
            // It divides by the average of each process, too.
            assert!(
                processes
                    .iter()
                    .all(|times| times.iter().sum::<f64>() > 0.0),
                "{iterations}"
            );
        }
    }
}

#[test]
fn nccl_tests_own_script_can_read_what_every_program_writes() {
    let directory = tempfile::tempdir().unwrap();
    for program in PROGRAMS {
        for (spawn, rows) in [("processes", 3), ("threads", 1)] {
            let path = directory.path().join(format!("{program}-{spawn}.json"));
            let line = format!(
                "-b 8 -e 4K -f 8 -n 4 -I 1 -K 1 --ranks 3 --spawn {spawn} --memcpy_ratio 0 -J {}",
                path.display()
            );
            let run = run_of(program, &line, &[]).expect(0);
            let json: Value =
                serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
            analyse(&json, rows);
            let results = json["results"].as_array().unwrap();
            assert_eq!(results.len(), run.rows().len());
            for (result, row) in results.iter().zip(run.rows()) {
                assert_eq!(
                    (&result["redop"], &result["root"]),
                    (&row[3].into(), &format!("{:>6}", row[4]).into())
                );
                // Threads of one process are one row in the script, and one row each here.
                let ranks = &result["out_of_place_per_iter"]["per_rank_times_us"];
                assert_eq!(
                    ranks.as_array().map(Vec::len),
                    (spawn == "threads").then_some(3)
                );
            }
        }
    }
}

#[test]
fn only_variables_of_nccl_cuda_and_ours_are_written() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("out.json");
    let variables = [
        ("NCCL_DEBUG", "WARN"),
        ("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
        ("NCCL_TESTS_ALLTOALLV_SPREAD", "0.5"),
        ("NCCL_EMULATOR_DEVICES", "4"),
        ("PASSWORD", "hunter2"),
        ("MY_NCCL_DEBUG", "x"),
        ("AWS_ACCESS_KEY_ID", "x"),
    ];
    let line = format!(
        "-b 64 -e 64 -n 1 --ranks 2 --memcpy_ratio 0 -J {}",
        path.display()
    );
    run_of("all_to_all_v_perf", &line, &variables).expect(0);
    let json: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    let env: Vec<&str> = json["env"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(Value::as_str)
        .collect();
    for (name, value) in &variables[..4] {
        assert!(
            env.contains(&&*format!("{name}={value}")),
            "{name}: {env:?}"
        );
    }
    for entry in env {
        assert!(
            entry.starts_with("NCCL_") || entry.starts_with("CUDA_"),
            "{entry}"
        );
        assert!(!entry.starts_with("NCCL_RUN_"), "{entry}");
    }
}
