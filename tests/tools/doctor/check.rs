//! `nccl-doctor` on one host, and among ranks that are processes.

use std::process::Stdio;

use nccl_tools::gpu_check::not_tested;

use super::{Ranks, code, doctor, doctor_behind, finish, json, named, one, run, text};
use crate::meeting;

#[test]
fn a_host_is_checked_without_a_gpu_and_without_others() {
    let value = json(&run(doctor(&["--emulator", "--json", "--communicate"])));
    assert_eq!(
        (&value["kind"], &value["emulator"]),
        (&"host".into(), &true.into())
    );
    assert!(
        one(&value, "devices")["what"]
            .as_str()
            .unwrap()
            .contains("CPU emulator")
    );
    assert_eq!(one(&value, "communicate")["severity"], "ok");

    // The check uses NCCL, and several ranks use as many devices.
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("nccl.log");
    let mut command = doctor(&["--emulator", "--json", "--communicate", "--ranks", "3"]);
    command
        .env("NCCL_DEBUG", "INFO")
        .env("NCCL_DEBUG_FILE", &log);
    let value = json(&run(command));
    let communicate = one(&value, "communicate");
    assert_eq!(communicate["severity"], "ok", "{communicate}");
    assert_eq!(communicate["ranks"], serde_json::json!([0, 1, 2]));
    let log = std::fs::read_to_string(log).unwrap();
    // Each rank has an idle parent, and the child that carries the data.
    for call in ["ncclCommInitRankConfig", "ncclCommSplit"] {
        let made = |line: &&str| line.contains(call) && line.contains("Init COMPLETE");
        assert_eq!(log.lines().filter(made).count(), 3, "{log}");
    }
    // More ranks than devices are an error.
    let value = json(&run(doctor(&[
        "--emulator",
        "--json",
        "--communicate",
        "--ranks",
        "99",
    ])));
    assert_eq!(one(&value, "communicate")["severity"], "warning");

    let output = run(doctor(&["--emulator"]));
    let stdout = text(&output.stdout);
    assert!(
        stdout.contains("nothing is said about its GPUs"),
        "{stdout}"
    );
    assert!(stdout.contains("✓ devices: "), "{stdout}");
    assert!(!stdout.contains('\x1b'), "no colour in a pipe: {stdout:?}");
    let quiet = text(&run(doctor(&["--emulator", "--quiet"])).stdout);
    assert!(!quiet.contains('✓'), "{quiet}");
}

#[test]
fn a_device_that_failed_and_a_process_that_was_killed_are_found_in_the_kernels_log() {
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("kmsg");
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let now = now.tv_sec * 1_000_000;
    let lines = format!(
        "4,1,{now},-;NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, name=python, GPU has fallen off the bus.\n\
         3,2,{now},-;Out of memory: Killed process 4712 (loader) total-vm:9kB, anon-rss:2048kB, x\n"
    );
    std::fs::write(&log, lines).unwrap();
    let with_log = |arguments: &[&str]| {
        let mut command = doctor(arguments);
        command.env("NCCL_RUN_KMSG", &log);
        run(command)
    };
    let output = with_log(&["--emulator", "--json"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let value = json(&output);
    assert_eq!(one(&value, "kernel-log")["severity"], "ok");
    let xid = one(&value, "xid");
    assert_eq!(xid["severity"], "error");
    let what = xid["what"].as_str().unwrap();
    assert!(
        what.starts_with("Xid 79 (GPU has fallen off the bus) for 0000:3b:00.0, process 4711, "),
        "{what}"
    );
    let killed = one(&value, "oom-killer")["what"].as_str().unwrap();
    assert!(killed.contains("pid 4712 (loader)"), "{killed}");
    let memory = one(&value, "memory-pressure")["what"].as_str().unwrap();
    assert!(memory.contains("control group "), "{memory}");
    let said = text(&with_log(&["--emulator"]).stdout);
    assert!(said.contains("✗ xid: Xid 79 "), "{said}");

    // A log that is not there is no clean one.
    let mut command = doctor(&["--emulator", "--json"]);
    command.env("NCCL_RUN_KMSG", directory.path().join("none"));
    let value = json(&run(command));
    let what = one(&value, "kernel-log")["what"].as_str().unwrap();
    assert!(what.starts_with("nothing is known: "), "{what}");
}

#[test]
fn a_device_in_trouble_is_found_by_nvml_and_healthy_ones_are_one_line() {
    if !cfg!(feature = "nvml") {
        not_tested("what NVML says of devices: it was built without the feature `nvml`");
        return;
    }
    let value = json(&run(doctor(&["--emulator", "--json"])));
    let state = one(&value, "device-state");
    assert_eq!(state["severity"], "ok");
    assert_eq!(state["what"], "NVML shows nothing wrong with 8 devices");

    let mut command = doctor(&["--emulator", "--json"]);
    command.env(
        "NCCL_EMULATOR_NVML",
        "device=1,ecc=1; device=2,row-remap=failed,pcie-width=8; device=5,lost",
    );
    let output = run(command);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let value = json(&output);
    let said: Vec<_> = named(&value, "device-state")
        .iter()
        .map(|one| {
            (
                one["severity"].as_str().unwrap(),
                one["what"].as_str().unwrap(),
            )
        })
        .collect();
    assert_eq!(
        said,
        [
            (
                "error",
                "device 0000:03:00.0: a faulty row of its memory could not be remapped, its PCIe link has 8 of 16 lanes"
            ),
            (
                "error",
                "device number 5: the driver does not reach it any more (GPU is lost)"
            ),
            (
                "warning",
                "device 0000:02:00.0: 1 uncorrected ECC error since the driver was started"
            ),
        ]
    );
    let mut command = doctor(&["--emulator"]);
    command.env("NCCL_EMULATOR_NVML", "device=5,lost");
    let said = text(&run(command).stdout);
    assert!(said.contains("✗ device-state: device number 5: "), "{said}");

    // Preflight reports the state of a rank's device, and a hanging NVML does not keep the doctor from its report.
    let mut command = doctor(&["--emulator", "--json"]);
    command.env("NCCL_EMULATOR_NVML", "device=0,row-remap=failed");
    let value = json(&run(command));
    let warned = named(&value, "device-state").iter().any(|one| {
        one["severity"] == "warning" && one["what"].as_str().unwrap().starts_with("this host (")
    });
    assert!(warned, "{value:#}");
    let mut command = doctor(&["--emulator", "--json"]);
    command.env("NCCL_EMULATOR_NVML", "hang");
    let value = json(&run(command));
    let said = named(&value, "device-state");
    assert_eq!(said.len(), 2, "{value:#}");
    for one in said {
        assert!(
            one["what"]
                .as_str()
                .unwrap()
                .contains("NVML did not answer"),
            "{one}"
        );
    }
}

/// Three ranks of this host communicate; `fault` stops one of them.
fn three_with(fault: &str) -> serde_json::Value {
    let mut command = doctor(&["--emulator", "--json", "--ranks", "3", "--communicate"]);
    command.args(["--timeout", "3"]);
    command.env("NCCL_EMULATOR_FAULTS", fault);
    let output = run(command);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    json(&output)
}

#[test]
fn a_device_that_cannot_be_opened_is_named_and_nobody_waits_for_its_rank() {
    // The last device is opened first, for the check.
    let value = three_with("call=cuDevicePrimaryCtxRetain,nth=3,action=fail=2");
    let driver = one(&value, "driver");
    assert_eq!(driver["severity"], "error");
    let what = driver["what"].as_str().unwrap();
    assert!(what.contains("opening device 1"), "{what}");
    let communicate = one(&value, "communicate");
    assert_eq!(communicate["severity"], "warning");
    assert!(communicate["what"].as_str().unwrap().contains("not tried"));
}

#[test]
fn a_driver_that_does_not_come_back_does_not_keep_the_doctor_from_its_report() {
    let value = three_with("call=cuMemcpyDtoHAsync,nth=1,action=hang");
    let findings = value["findings"].as_array().unwrap();
    let communicate = findings.iter().filter(|one| one["check"] == "communicate");
    // The others cannot end their communicator without it, and report that.
    let (away, back): (Vec<_>, Vec<_>) = communicate.partition(|one| {
        let what = one["what"].as_str().unwrap();
        what.contains("has not returned")
    });
    let ranks = |all: &[&serde_json::Value]| -> usize {
        let counts = all.iter().map(|one| one["ranks"].as_array().unwrap().len());
        counts.sum()
    };
    assert_eq!((ranks(&away), ranks(&back)), (1, 2), "{value:#}");
    assert_eq!(away[0]["severity"], "error");
}

#[test]
fn a_library_that_is_not_there_is_an_error_with_what_to_do() {
    let mut command = doctor(&["--json"]);
    command.env("NCCL_LIBRARY", "/nowhere/libnccl.so.2");
    let value = json(&run(command));
    let library = one(&value, "library");
    assert_eq!(library["severity"], "error");
    assert!(
        library["what"]
            .as_str()
            .unwrap()
            .contains("/nowhere/libnccl.so.2")
    );
    assert!(
        library["fix"].as_str().unwrap().contains("NCCL_LIBRARY"),
        "{library}"
    );
}

#[test]
fn what_three_ranks_agree_on_is_told_once_by_rank_0() {
    let mut ranks = Ranks::new(3);
    for rank in 0..3 {
        ranks.start(rank, &["--emulator", "--json", "--communicate"], &[]);
    }
    let outputs = ranks.finish();
    let value = json(&outputs[0]);
    assert_eq!(
        (&value["kind"], &value["ranks"]),
        (&"world".into(), &3.into())
    );
    let communicate = one(&value, "communicate");
    assert_eq!(communicate["severity"], "ok", "{communicate}");
    assert!(
        communicate["what"]
            .as_str()
            .unwrap()
            .starts_with("all ranks: ")
    );
    assert_eq!(communicate["ranks"], serde_json::json!([0, 1, 2]));
    assert_eq!(
        one(&value, "devices")["ranks"],
        serde_json::json!([0, 1, 2])
    );
    // Preflight compares them.
    assert_eq!(one(&value, "device")["severity"], "ok");
    for output in &outputs[1..] {
        assert_eq!(text(&output.stdout), "");
        assert_eq!(
            code(output.status),
            code(outputs[0].status),
            "all ranks end alike"
        );
    }
}

#[test]
fn a_variable_that_one_of_three_ranks_has_is_an_error_on_all() {
    let mut ranks = Ranks::new(3);
    for rank in 0..3 {
        let more: &[_] = if rank == 1 {
            &[("NCCL_ALGO", "Ring")]
        } else {
            &[]
        };
        ranks.start(rank, &["--emulator", "--json"], more);
    }
    let outputs = ranks.finish();
    let value = json(&outputs[0]);
    let findings = value["findings"].as_array().unwrap();
    let told = findings.iter().any(|one| {
        one["severity"] == "error"
            && one["what"].as_str().unwrap().contains("NCCL_ALGO")
            && one["ranks"] == serde_json::json!([1])
    });
    assert!(told, "{value:#}");
    for output in &outputs {
        assert_eq!(code(output.status), 2);
    }
}

#[test]
fn a_rank_that_never_comes_is_named() {
    let mut ranks = Ranks::new(3);
    for rank in 0..2 {
        ranks.start(rank, &["--emulator", "--json", "--timeout", "2"], &[]);
    }
    let outputs = ranks.finish();
    let value = json(&outputs[0]);
    let world = one(&value, "world");
    assert_eq!(world["severity"], "error");
    assert!(
        world["what"].as_str().unwrap().contains("rank 2"),
        "{world}"
    );
    assert_eq!(code(outputs[1].status), 2);
    assert!(text(&outputs[1].stderr).contains("rank 1 of 3"));
}

#[test]
fn ranks_are_named_by_hand_where_there_is_no_launcher() {
    let directory = tempfile::tempdir().unwrap();
    let place = format!("unix:{}", directory.path().join("world").display());
    let children: Vec<_> = ["0", "1"]
        .into_iter()
        .map(|rank| {
            let arguments = [
                "--emulator",
                "--rank",
                rank,
                "--world-size",
                "2",
                "--rendezvous",
                &place,
                "--json",
            ];
            doctor(&arguments)
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    let outputs: Vec<_> = children.into_iter().map(finish).collect();
    assert_eq!(json(&outputs[0])["ranks"], 2);
}

#[test]
fn hosts_that_do_not_reach_each_other_where_nccl_tries_are_told_apart() {
    let Some(hosts) = meeting::Hosts::new([&["10.77.0.1/24"], &["10.77.0.2/24"]]) else {
        return;
    };
    let check = |interfaces: [&str; 2]| {
        let children: Vec<_> = [0, 1]
            .into_iter()
            .map(|host: usize| {
                let before = ["ip", "netns", "exec", &hosts.names[host]];
                let rank = host.to_string();
                let arguments = [
                    "--emulator",
                    "--json",
                    "--rank",
                    &rank,
                    "--world-size",
                    "2",
                    "--rendezvous",
                    "tcp:10.77.0.1:29400",
                ];
                let mut command = doctor_behind(&before, &arguments);
                command.env("NCCL_SOCKET_IFNAME", interfaces[host]);
                command.stdout(Stdio::piped()).stderr(Stdio::piped());
                command.spawn().unwrap()
            })
            .collect();
        let outputs: Vec<_> = children.into_iter().map(finish).collect();
        assert_eq!(code(outputs[0].status), code(outputs[1].status));
        json(&outputs[0])
    };
    let good = check(["eth7", "ens3"]);
    assert_eq!(
        named(&good, "reachable")
            .iter()
            .filter(|one| one["severity"] == "error")
            .count(),
        0,
        "{good:#}"
    );
    // A variable that is right on another host.
    let bad = check(["eth7", "docker0"]);
    let findings = bad["findings"].as_array().unwrap();
    let told = findings.iter().any(|one| {
        one["severity"] == "error"
            && one["what"].to_string().contains("docker0")
            && one["fix"].is_string()
            && one["ranks"] == serde_json::json!([1])
    });
    assert!(told, "{bad:#}");
}

#[test]
fn wrong_arguments_are_one_sentence_that_names_them() {
    for (arguments, says) in [
        (&["--bogus"][..], "--bogus"),
        (&["job.log"], "nccl-doctor log job.log"),
        (&["--rank", "0"], "--world-size and --rendezvous"),
        (&["log"], "standard input"),
        (
            &[
                "--rank",
                "2",
                "--world-size",
                "2",
                "--rendezvous",
                "unix:/tmp/x",
            ],
            "NCCL_RUN_RANK=2",
        ),
        (
            &[
                "--rank",
                "0",
                "--world-size",
                "2",
                "--rendezvous",
                "nonsense",
            ],
            "nonsense",
        ),
    ] {
        let output = run(doctor(arguments));
        let stderr = text(&output.stderr);
        assert_eq!(
            (code(output.status), stderr.lines().count()),
            (3, 1),
            "{stderr}"
        );
        assert!(stderr.contains(says), "no {says:?} in {stderr}");
        assert_eq!(text(&output.stdout), "");
    }
    let help = run(doctor(&["--help"]));
    assert_eq!(code(help.status), 0);
    assert!(text(&help.stdout).contains("torchrun --nproc-per-node 8"));
}
