//! The JSON file.

use serde_json::Value;

use super::program::{run, run_with};

#[test]
fn the_json_file_has_what_the_table_has_and_the_emulators_name() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("out.json");
    let arguments = format!(
        "-b 1K -e 64K -f 8 -n 3 --ranks 2 -I 1 -J {}",
        path.display()
    );
    let run = run_with(
        &arguments,
        &[("NCCL_TOKEN", "secret"), ("MY_OWN", "private")],
    )
    .expect(0);
    assert!(
        run.stdout
            .starts_with(&format!("# Writing JSON output to {}\n", path.display()))
    );
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(
        !text.contains("secret") && !text.contains("private"),
        "{text}"
    );
    let json: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json["version"], 3);
    assert!(json["nccl_version"].as_u64().unwrap() > 20_000, "{json}");
    assert!(
        json["emulator"].as_str().unwrap().contains("emulat"),
        "{json}"
    );
    assert!(
        json["producer"]
            .as_str()
            .unwrap()
            .starts_with("nccl-tools "),
        "{json}"
    );
    let env: Vec<&str> = json["env"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(Value::as_str)
        .collect();
    assert!(env.contains(&"NCCL_EMULATOR=1"), "{env:?}");
    let devices = json["config"]["devices"].as_array().unwrap();
    assert_eq!(devices.len(), 2);
    for device in devices {
        assert!(
            device["device_info"]
                .as_str()
                .unwrap()
                .to_lowercase()
                .contains("emulat")
        );
    }
    let results = json["results"].as_array().unwrap();
    let rows = run.rows();
    assert_eq!(results.len(), rows.len());
    for (result, row) in results.iter().zip(&rows) {
        assert_eq!(result["size"].to_string(), row[0]);
        assert_eq!(result["count"].to_string(), row[1]);
        assert_eq!(result["type"], row[2]);
        let shown: f64 = row[5].parse().unwrap();
        let time = result["out_of_place"]["time"].as_f64().unwrap();
        assert!((shown - time).abs() <= 0.005 + time * 0.1, "{shown} {time}");
        assert_eq!(result["out_of_place"]["nwrong"], 0.0);
        assert_eq!(result["in_place"]["nwrong"], 0.0);
        let iterations = &result["in_place_per_iter"];
        assert_eq!(iterations["times_us"].as_array().unwrap().len(), 3);
        assert_eq!(
            iterations["per_process_max_times_us"]
                .as_array()
                .unwrap()
                .len(),
            2
        );
        assert!(
            result["memcpy_ratio"]["ratio"].as_f64().unwrap() > 0.0,
            "{result}"
        );
    }
    assert_eq!(
        json["out_of_bounds"],
        serde_json::json!({"count": 0, "okay": "true"})
    );
    assert_eq!(json["average_bus_bandwidth"]["okay"], "unchecked");
    assert_eq!(json["errors"], serde_json::json!([]));
}

#[test]
fn a_second_json_file_does_not_overwrite_the_first() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("out.json");
    let arguments = format!(
        "-b 1K -e 1K -n 1 --ranks 1 --memcpy_ratio 0 -J {}",
        path.display()
    );
    for name in ["out.json", "out.json.0", "out.json.1"] {
        run(&arguments).expect(0);
        let text = std::fs::read_to_string(directory.path().join(name)).unwrap();
        assert_eq!(
            serde_json::from_str::<Value>(&text).unwrap()["version"],
            3,
            "{name}"
        );
    }
}
