//! What the hosts show.

use super::*;
use crate::supervision::root_cause::host::EvidencePart;
use nccl_diagnose::host_evidence::HostEvidence;
use serde_json::json;

fn evidence(value: serde_json::Value) -> HostEvidence {
    serde_json::from_value(value).expect("evidence")
}

fn xid(number: u32, age_ms: u64) -> serde_json::Value {
    json!({"age_ms": age_ms, "times": 1, "kind": "xid", "number": number, "of_switch": false, "device": "0000:3b:00.0",
        "pid": 12, "text": ""})
}

fn log(events: &[serde_json::Value]) -> HostEvidence {
    evidence(json!({"kernel_log": {"access": "read", "events": events}, "has_host_pids": true}))
}

fn seen(evidence: &[HostEvidence]) -> Vec<SeenByRank<'_>> {
    let of = |(rank, evidence)| SeenByRank {
        rank,
        evidence,
        is_stuck: false,
    };
    evidence.iter().enumerate().map(of).collect()
}

fn places(hosts: &[(&str, u32)]) -> Vec<(String, u32)> {
    hosts
        .iter()
        .map(|(host, pid)| ((*host).to_owned(), *pid))
        .collect()
}

#[test]
fn an_event_that_several_ranks_of_a_host_have_read_is_said_once_and_the_device_before_its_victims()
{
    let all = [
        log(&[xid(45, 6000), xid(79, 4000)]),
        log(&[xid(45, 6010), xid(79, 4020)]),
        log(&[]),
    ];
    let places = places(&[("node-a", 11), ("node-a", 12), ("node-b", 11)]);
    let said = sentences(&seen(&all), &places, &Roster::default());
    assert_eq!(
        said,
        [
            "host node-a: Xid 79 (GPU has fallen off the bus) for 0000:3b:00.0, process 12 (the process of rank 1), 4 s ago; \
             Xid 45 (the driver ended the work of a process: it was killed, or another error came before) for 0000:3b:00.0, \
             process 12 (the process of rank 1), 6 s ago"
        ]
    );
}

#[test]
fn a_process_that_the_oom_killer_ended_is_named_and_one_of_another_job_is_not() {
    let kill = |pid: u32| {
        json!({"age_ms": 2500, "times": 1, "kind": "oom_kill", "pid": pid, "name": "python", "cgroup": "/job/b",
            "limited": "/job", "whole_host": false})
    };
    let all = [log(&[kill(7), kill(99)])];
    let places = places(&[("node-a", 6), ("node-a", 7)]);
    assert_eq!(
        sentences(&seen(&all), &places, &Roster::default()),
        [
            "host node-a: the OOM killer ended pid 7 (python): the limit of control group /job was reached (the process of \
             rank 1), 2 s ago"
        ]
    );
    // Where the log cannot be read, the counter of the control group is left.
    let counted = evidence(json!({
        "kernel_log": {"access": "not_permitted", "events": []}, "memory": {"cgroup": "/", "oom_kills": 1},
    }));
    assert_eq!(
        sentences(&seen(&[counted]), &places, &Roster::default()),
        ["host node-a: the OOM killer has ended 1 process of the ranks' control group"]
    );
}

#[test]
fn a_process_is_named_with_all_its_ranks_unless_the_ranks_have_other_pids_than_the_log() {
    let all = [log(&[xid(79, 4000)]), log(&[])];
    let places = places(&[("node-a", 12), ("node-a", 12)]);
    let said = sentences(&seen(&all), &places, &Roster::default());
    assert!(
        said[0].contains("process 12 (the process of ranks 0-1), 4 s ago"),
        "{said:?}"
    );
    // Evidence that was not gathered says nothing of PIDs.
    let beside = [all[0].clone(), evidence(json!({}))];
    assert_eq!(sentences(&seen(&beside), &places, &Roster::default()), said);
    // In a PID namespace.
    let kill = json!({"age_ms": 2500, "times": 1, "kind": "oom_kill", "pid": 12, "name": "python", "cgroup": "/job/b",
        "limited": "/job", "whole_host": false});
    let other = evidence(
        json!({"kernel_log": {"access": "read", "events": [xid(79, 4000), kill]}, "has_host_pids": false}),
    );
    let said = sentences(&seen(&[other]), &places, &Roster::default());
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(said[0].ends_with("process 12, 4 s ago"), "{said:?}");
}

#[test]
fn a_rank_that_is_inside_a_call_has_the_place_of_its_threads() {
    let threads = json!([
        {"tid": 3, "name": "main", "state": "S", "system_call": 202},
        {"tid": 4, "name": "nccl-call", "state": "D", "wait_function": "nv_wait", "not_permitted": ["stack"]},
    ]);
    let all = [evidence(json!({ "threads": threads }))];
    let places = places(&[("node-a", 6)]);
    let mut seen = seen(&all);
    let stuck = "rank 0: thread \"nccl-call\" (tid 4) sleeps in the kernel and cannot be killed, at nv_wait; not permitted: \
                 stack";
    let said = sentences(&seen, &places, &Roster::default());
    assert_eq!(said, [format!("host node-a: {stuck}")]);
    seen[0].is_stuck = true;
    let said = sentences(&seen, &places, &Roster::default());
    assert!(
        said[0].contains("thread \"main\" (tid 3) sleeps, in system call 202"),
        "{said:?}"
    );
    assert!(said[0].ends_with(stuck), "{said:?}");
}

#[test]
fn a_device_in_trouble_is_said_once_with_its_ranks_and_a_healthy_one_is_not() {
    let device =
        |bus_id: &str, troubles: serde_json::Value| json!({"bus_id": bus_id, "troubles": troubles});
    let of = |access: &str, list: serde_json::Value| {
        evidence(json!({"devices": {"access": access, "list": list}}))
    };
    let other = |pid: u32| json!({"other_process": {"pid": pid, "name": "python"}});
    let ecc = json!({"uncorrected_ecc": {"errors": 2, "since_driver_start": false}});
    let all = [
        of("answered", json!([device("0000:01:00.0", json!([]))])),
        of(
            "answered",
            json!([device("0000:02:00.0", json!([ecc, other(11)]))]),
        ),
        // Two ranks of one process have the same devices.
        of("answered", json!([device("0000:03:00.0", json!(["lost"]))])),
        of("answered", json!([device("0000:03:00.0", json!(["lost"]))])),
        of("no_answer", json!([])),
        of(
            "answered",
            json!([device("0000:04:00.0", json!([other(99), other(11)]))]),
        ),
    ];
    let hosts = [11, 12, 13, 13, 14, 15].map(|pid| ("node-a", pid));
    let said = sentences(&seen(&all), &places(&hosts), &Roster::default());
    assert_eq!(
        said,
        [
            "host node-a: device 0000:02:00.0 of rank 1: 2 uncorrected ECC errors since the first communicator; device \
             0000:03:00.0 of ranks 2-3: the driver does not reach it any more (GPU is lost); device 0000:04:00.0 of rank 5: \
             process 99 (python), which is not of the job, uses it; NVML did not answer (rank 4)"
        ]
    );
    let healthy = [of("answered", json!([device("0000:01:00.0", json!([]))]))];
    let said = sentences(&seen(&healthy), &places(&hosts[..1]), &Roster::default());
    assert!(said.is_empty(), "{said:?}");
}

#[test]
fn the_number_of_hosts_and_of_sentences_about_each_is_bounded() {
    let events: Vec<_> = (200..300).map(|number| xid(number, 1000)).collect();
    let all = vec![log(&events); 100];
    let places: Vec<_> = (0..100).map(|host| (format!("node-{host}"), 1)).collect();
    let said = sentences(&seen(&all), &places, &Roster::default());
    assert_eq!(said.len(), 13);
    assert_eq!(said[12], "and on 88 more hosts");
    assert!(said[0].ends_with("; and 94 more"), "{}", said[0]);
}

/// Three ranks on two hosts that wait for nothing that is known.
fn hint(hosts: [Option<HostEvidence>; 3]) -> String {
    let mut table = Table::of((0..3).map(|rank| entered(rank, 2, false)).collect());
    table.hosts = ["node-a", "node-a", "node-b"].map(String::from).to_vec();
    for (report, host) in table.reports.values_mut().zip(hosts) {
        report.host = host;
    }
    let diagnosis = table.find_root_cause();
    assert_eq!(diagnosis.cause.root, RootCause::Unknown);
    diagnosis.cause.hint
}

#[test]
fn the_hint_sends_nobody_to_a_log_that_was_read() {
    let clean = || Some(log(&[]));
    let closed = || {
        let access = json!({"access": "not_permitted", "events": []});
        Some(evidence(json!({ "kernel_log": access })))
    };
    assert!(hint([None, None, None]).contains("look at dmesg for Xid messages, at nvidia-smi"));
    let said = hint([clean(), closed(), clean()]);
    assert!(
        said.contains("was read and has no Xid since the ranks were started"),
        "{said}"
    );
    assert!(!said.contains("dmesg"), "{said}");
    let said = hint([clean(), clean(), closed()]);
    assert!(
        said.contains("look at dmesg for Xid messages on node-b (this process may not read"),
        "{said}"
    );
    let said = hint([clean(), clean(), Some(log(&[xid(79, 1)]))]);
    assert!(
        said.contains("`hosts` has what the kernel log of every host shows"),
        "{said}"
    );
}

#[test]
fn what_a_rank_sends_at_the_end_comes_back_and_other_bytes_are_nothing() {
    let part = EvidencePart::gather();
    let back = EvidencePart::decode(&part.encode());
    assert_eq!(
        (back.evidence(), back.is_clean()),
        (part.evidence(), part.is_clean())
    );
    for bytes in [&b""[..], b"{", b"\xff", b"{\"evidence\":3}"] {
        let nothing = EvidencePart::decode(bytes);
        assert_eq!((nothing.evidence(), nothing.is_clean()), (None, false));
    }
}
