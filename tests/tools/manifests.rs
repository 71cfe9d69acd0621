//! The manifests and scripts of `deploy/`: each is valid in its format, and calls `nccl-run` with options that exist. They were
//! not run on a cluster.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize as _;
use serde_yaml_ng::Value;

fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy")
}

/// The documents of all manifests, with the names of their files.
fn manifests() -> Vec<(String, Value)> {
    let files = std::fs::read_dir(deploy().join("kubernetes")).expect("a directory");
    let mut all = Vec::new();
    for file in files {
        let path = file.expect("an entry").path();
        let name = path.display().to_string();
        let text = std::fs::read_to_string(&path).expect("text");
        for document in serde_yaml_ng::Deserializer::from_str(&text) {
            let value =
                Value::deserialize(document).unwrap_or_else(|error| panic!("{name}: {error}"));
            all.push((name.clone(), value));
        }
    }
    all
}

/// All containers in a manifest, wherever they are.
fn containers<'v>(value: &'v Value, found: &mut Vec<&'v Value>) {
    match value {
        Value::Mapping(entries) => {
            for (key, value) in entries {
                if key == "containers" {
                    found.extend(value.as_sequence().into_iter().flatten());
                }
                containers(value, found);
            }
        }
        Value::Sequence(values) => values.iter().for_each(|value| containers(value, found)),
        _ => {}
    }
}

fn text(value: &Value) -> String {
    let words = value.as_sequence().into_iter().flatten();
    let words: Vec<_> = words.filter_map(Value::as_str).collect();
    words.join(" ")
}

/// The options of a call of `nccl-run` before the program.
fn options(call: &str) -> Vec<String> {
    let (_, call) = call.split_once("nccl-run").expect("it calls nccl-run");
    let words = call.split_whitespace().take_while(|word| *word != "--");
    let options = words.filter(|word| word.starts_with('-'));
    options.map(str::to_owned).collect()
}

fn help() -> String {
    let help = Command::new(env!("CARGO_BIN_EXE_nccl-run-under-test"))
        .arg("--help")
        .output()
        .expect("it starts");
    String::from_utf8(help.stdout).expect("text")
}

#[test]
fn each_manifest_is_one_of_kubernetes_and_calls_nccl_run_with_options_that_it_has() {
    let help = help();
    let manifests = manifests();
    assert_eq!(manifests.len(), 3);
    for (name, manifest) in &manifests {
        for field in ["apiVersion", "kind"] {
            assert!(manifest[field].is_string(), "{name}: {field}");
        }
        assert!(manifest["metadata"]["name"].is_string(), "{name}");
        let mut all = Vec::new();
        containers(manifest, &mut all);
        assert!(!all.is_empty(), "{name} has no container");
        for container in all {
            let call = format!(
                "{} {}",
                text(&container["command"]),
                text(&container["args"])
            );
            for option in options(&call) {
                assert!(help.contains(&option), "{name}: nccl-run has no {option}");
            }
            assert_eq!(
                container["resources"]["limits"]["nvidia.com/gpu"],
                Value::from(8)
            );
            let mounts = container["volumeMounts"].as_sequence().expect("mounts");
            let shm = mounts.iter().any(|mount| mount["mountPath"] == "/dev/shm");
            assert!(
                shm,
                "{name}: NCCL needs more than a container's default of shared memory"
            );
        }
    }
}

#[test]
fn the_script_for_slurm_is_shell_and_calls_nccl_run_with_options_that_it_has() {
    let script = deploy().join("slurm/train.sbatch");
    let checked = Command::new("sh")
        .arg("-n")
        .arg(&script)
        .status()
        .expect("a shell");
    assert!(checked.success());
    let text = std::fs::read_to_string(&script)
        .expect("text")
        .replace("\\\n", " ");
    let call = text
        .lines()
        .find(|line| line.contains("exec nccl-run"))
        .expect("a call");
    let help = help();
    let options = options(call);
    assert!(!options.is_empty());
    for option in options {
        assert!(help.contains(&option), "nccl-run has no {option}");
    }
}
