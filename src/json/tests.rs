use super::*;
use crate::bench::{PerIteration, Ratio};
use crate::element;
use crate::options::{Command, parse};
use crate::program;
use crate::shape::{Case, Shape};
use crate::statistics::Summary;

fn options(line: &str) -> Options {
    match parse(&program::ALL_TO_ALL, line.split_whitespace()) {
        Ok(Command::Run(options)) => *options,
        other => panic!("{other:?}"),
    }
}

fn measurement(per_iteration: bool) -> Measurement {
    let times = vec![2e-6, 4e-6];
    Measurement {
        seconds: 1e-3,
        host_seconds: 5e-6,
        wrong: Some(0),
        wrong_here: false,
        per_iteration: per_iteration.then(|| PerIteration {
            summary: Summary::of(&times).unwrap(),
            longest: times.clone(),
            by_rank: vec![times.clone(), times],
        }),
    }
}

fn report(line: &str, per_iteration: bool, ended: bool) -> serde_json::Value {
    let directory = tempfile::tempdir().unwrap();
    let path = reserve(&directory.path().join("out.json")).unwrap();
    let options = options(line);
    let mut report = Report::new(path.clone(), 23203);
    let device = DeviceLine {
        rank: 0,
        pid: 7,
        host: "here".into(),
        device: 1,
        pci: [0, 0x18, 0],
        name: "CPU".into(),
    };
    report.config(&options, &[device]);
    let ratio = Ratio {
        copy_seconds: 1e-6,
        operation_seconds: 2e-6,
        ratio: 2.0,
        lowest: 1.5,
        highest: 3.0,
    };
    report.row(
        &options,
        &Row {
            shape: Shape::split(4000, Case::of(element::FLOAT), 4),
            out_of_place: measurement(per_iteration),
            in_place: Measurement {
                wrong: None,
                ..measurement(per_iteration)
            },
            ratio: Some(ratio),
            notes: Vec::new(),
        },
    );
    if ended {
        let totals = Totals {
            out_of_bounds: 1,
            average_bus: 0.5,
        };
        let footer = Footer {
            out_of_bounds: 1,
            average_bus: 0.5,
            needed_bus: None,
        };
        report.totals(&totals, &footer);
    }
    report
        .write(
            &["late".to_owned()],
            Some("the emulator"),
            "threads",
            "cuMemAlloc",
        )
        .unwrap();
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn keys(value: &serde_json::Value) -> Vec<&str> {
    value
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect()
}

#[test]
fn the_file_has_the_keys_of_nccl_tests() {
    let read = report("-J out.json", false, true);
    for key in [
        "version",
        "start_time",
        "args",
        "env",
        "nccl_version",
        "config",
        "results",
        "out_of_bounds",
        "average_bus_bandwidth",
        "errors",
        "end_time",
    ] {
        assert!(read.get(key).is_some(), "{key} is missing from {read}");
    }
    assert_eq!(
        (&read["version"], &read["nccl_version"]),
        (&3.into(), &23203.into())
    );
    let config = &read["config"];
    assert_eq!(
        (&config["step_factor"], config.get("step_bytes")),
        (&2.into(), None)
    );
    assert_eq!(config["blocking_collectives"], "false");
    let device = &config["devices"][0];
    assert_eq!(
        (&device["device_hex"], &device["device_info"]),
        (&"0000:18:00".into(), &"CPU".into())
    );
    let row = &read["results"][0];
    assert_eq!(
        (&row["size"], &row["count"]),
        (&(248 * 4 * 4).into(), &248.into())
    );
    assert_eq!(
        (&row["root"], &row["redop"]),
        (&"    -1".into(), &"none".into())
    );
    assert_eq!(
        keys(&row["out_of_place"]),
        ["alg_bw", "bus_bw", "nwrong", "time"]
    );
    assert_eq!(row["out_of_place"]["nwrong"], 0.0);
    assert_eq!(row["in_place"]["nwrong"], serde_json::Value::Null);
    assert_eq!(
        read["out_of_bounds"],
        serde_json::json!({"count": 1, "okay": "false"})
    );
    assert_eq!(read["average_bus_bandwidth"]["okay"], "unchecked");
    assert_eq!(read["errors"], serde_json::json!(["late"]));
}

#[test]
fn what_nccl_tests_lacks_comes_in_further_keys() {
    let read = report("-J out.json", false, true);
    assert_eq!(
        (&read["emulator"], &read["spawn"]),
        (&"the emulator".into(), &"threads".into())
    );
    assert!(read["producer"].as_str().unwrap().contains("nccl-tools"));
    assert_eq!(read["results"][0]["memcpy_ratio"]["ratio"], 2.0);
}

#[test]
fn options_change_the_keys_as_in_nccl_tests() {
    let read = report("-J out.json -C 1 -i 8 -I 1 -z 1 -n 2", true, true);
    assert_eq!(read["config"]["step_bytes"], 8);
    assert_eq!(read["config"]["blocking_collectives"], "true");
    let row = &read["results"][0];
    assert_eq!(row["out_of_place"]["cpu_time"], 5.0);
    assert_eq!(row["out_of_place"].get("time"), None);
    let iterations = &row["in_place_per_iter"];
    assert_eq!(iterations["times_us"], serde_json::json!([2.0, 4.0]));
    assert_eq!(
        iterations["per_process_max_times_us"][1],
        serde_json::json!([2.0, 4.0])
    );
    assert_eq!(
        (&iterations["p50_us"], &iterations["skipped_iterations"]),
        (&4.0.into(), &0.into())
    );
}

#[test]
fn a_run_that_failed_leaves_what_it_measured_and_why_it_ended() {
    let read = report("-J out.json", false, false);
    assert_eq!(read["results"].as_array().unwrap().len(), 1);
    assert_eq!(read.get("average_bus_bandwidth"), None);
    assert_eq!(read["errors"][0], "late");
}

#[test]
fn an_existing_file_is_never_overwritten() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("out.json");
    std::fs::write(&path, "precious").unwrap();
    let names: Vec<_> = (0..3).map(|_| reserve(&path).unwrap()).collect();
    let expected = ["out.json.0", "out.json.1", "out.json.2"].map(|n| directory.path().join(n));
    assert_eq!(names, expected);
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
}

#[test]
fn a_place_where_nothing_can_be_written_is_bad_input() {
    let failure = reserve(Path::new("/no/such/directory/out.json")).unwrap_err();
    assert_eq!(failure.exit(), crate::failure::Exit::Usage);
    assert!(
        failure.to_string().contains("/no/such/directory/out.json"),
        "{failure}"
    );
}

#[test]
fn the_environment_is_kept_as_far_as_it_concerns_nccl_and_is_no_secret() {
    let all = [
        ("NCCL_DEBUG", "INFO"),
        ("CUDA_VISIBLE_DEVICES", "0"),
        ("NCCL_SECRET", "x"),
        ("NCCL_RUN_RENDEZVOUS", "unix:/tmp/x"),
        ("NCCL_API_KEY", "x"),
        ("HOME", "/root"),
        ("AWS_SECRET_ACCESS_KEY", "x"),
        ("PATH", "/bin"),
    ];
    let kept = environment(
        all.iter()
            .map(|(name, value)| ((*name).into(), (*value).into())),
    );
    assert_eq!(kept, ["CUDA_VISIBLE_DEVICES=0", "NCCL_DEBUG=INFO"]);
}
