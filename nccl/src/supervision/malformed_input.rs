//! Parsers of what other ranks send, fed with nearly valid bytes: none of them may panic.

use std::collections::{BTreeMap, BTreeSet};

use super::rank_report::RankReport;
use super::root_cause::{DiagnosisInput, SeenByRank, completed_calls, find_root_cause, sentences};
use nccl_base::departure::{Failure, ProcessEnd, UnreachableEvidence};
use nccl_base::fault::{Cause, Fault};
use nccl_base::roster::Roster;
use nccl_diagnose::host_evidence::HostEvidence;

/// Returns `seed` with some bytes changed: to digits and JSON punctuation more often than to others.
fn like(seed: &[u8], random: &mut fastrand::Rng) -> Vec<u8> {
    const SIGNS: &[u8] = b"0123456789-{}[]\",:.eE nul";
    let mut bytes = seed.to_vec();
    for _ in 0..random.usize(1..4) {
        let at = random.usize(0..bytes.len().max(1)).min(bytes.len() - 1);
        match random.u8(0..6) {
            0 => bytes[at] = random.u8(..),
            1 => bytes.insert(at, SIGNS[random.usize(0..SIGNS.len())]),
            2 if bytes.len() > 1 => drop(bytes.remove(at)),
            3 if bytes.len() > 2 => bytes.truncate(at.max(1)),
            // Mostly replaces a digit with another digit, which still parses.
            _ => {
                let digits = bytes.iter().enumerate();
                let digits = digits.filter(|(_, byte)| byte.is_ascii_digit());
                let digits: Vec<usize> = digits.map(|(at, _)| at).collect();
                if let Some(&at) = digits.get(random.usize(0..digits.len().max(1))) {
                    bytes[at] = b"123456789"[random.usize(0..9)];
                }
            }
        }
    }
    bytes
}

#[test]
fn no_bytes_of_a_fault_make_a_rank_panic_and_what_is_understood_survives_its_way() {
    let causes = [
        Cause::died(&ProcessEnd::in_words("killed by SIGKILL", "out").into()),
        Cause::failed(&Failure::Error(String::from("no such file: weights"))),
        Cause::host_lost(
            "node-b",
            vec![1, 2],
            &Roster::default(),
            &UnreachableEvidence::Error(String::from("timed out")).into(),
        ),
        Cause::cut_off("cut off", &[0, 2], &Roster::default()),
        Cause::asked("enough"),
    ];
    let mut random = fastrand::Rng::with_seed(7);
    let mut understood = 0;
    for cause in causes {
        let seed =
            Fault::here(cause, ("model/tp", &Roster::default()), 1, 3, |_| None).encode(&[0, 4, 7]);
        for _ in 0..4000 {
            let Ok((fault, members)) = Fault::decode(&like(&seed, &mut random)) else {
                continue;
            };
            understood += 1;
            let _ = (fault.explain(), fault.operation_values());
            let (back, ranks) = Fault::decode(&fault.encode(&members)).unwrap();
            assert_eq!((&back, ranks), (&fault, members));
        }
    }
    assert!(understood > 1000, "{understood}");
}

#[test]
fn no_bytes_of_a_report_make_a_rank_panic_that_elects_with_it() {
    let call = |number: u64, state: &str| {
        serde_json::json!({
            "number": number, "is_for_all": true, "place": number, "kind": "all_reduce", "stream": 3, "since_ns": 5,
            "age_ms": 400, "state": state, "operations": [], "missing": 1,
        })
    };
    let empty = serde_json::to_value(RankReport::default()).unwrap();
    let seed = |rank: usize| {
        let mut report = empty.clone();
        report["rank"] = rank.into();
        report["exists"] = true.into();
        report["phase"] = serde_json::json!({"what": "serve", "ago_ms": 12});
        report["entered"] = 4.into();
        report["host"] = serde_json::json!({
            "kernel_log": {"access": "read", "events": [
                {"age_ms": 5, "times": 1, "kind": "xid", "number": 79, "of_switch": false, "device": "0000:3b:00.0", "text": "x"},
                {"age_ms": 5, "times": 1, "kind": "oom_kill", "pid": 7, "name": "py", "cgroup": "/a", "whole_host": true},
            ]},
            "memory": {"cgroup": "/a", "oom_kills": 1, "pressure": 50.0},
            "threads": [{"tid": 3, "name": "t", "state": "D", "stack": ["nv_wait"]}],
        });
        report["inside"] = serde_json::json!({"calls": [{"number": 4, "operations": [{
            "function": "Send", "channels": 4294967295u32, "kernel": [4294967295u32, 4294967295u32],
        }, {
            "function": "AllReduce", "algorithm": "RING", "protocol": "LL", "channels": 2, "kernel": [1, 0], "has_transfers": true,
            "transfers": [{
                "peer": 1, "channel": 0, "is_send": true, "steps": 8, "done": 3, "is_over": false, "waits_for": "network",
                "still_ms": 700,
            }, {
                "peer": 1, "channel": 0, "is_send": false, "steps": 8, "done": 2, "is_over": false, "waits_for": "peer_data",
                "still_ms": 900,
            }],
        }]}]});
        report["calls"] = vec![call(3, "done"), call(4, "pending")].into();
        report["elsewhere"] = serde_json::json!([{
            "key": "0f", "name": "other", "rank": 1, "entered": 2, "waiting": [call(2, "issuing")], "more": true,
            "sent": empty["sent"], "received": empty["received"],
        }]);
        serde_json::to_vec(&report).unwrap()
    };
    let symptom = Fault::here(
        Cause::asked("late"),
        ("model/tp", &Roster::default()),
        0,
        0,
        |_| None,
    );
    let hosts = ["a", "a", "b"].map(String::from);
    let mut random = fastrand::Rng::with_seed(9);
    let mut understood = 0;
    for _ in 0..6000 {
        let reports: BTreeMap<usize, RankReport> = (0..3)
            .filter_map(|rank| {
                let report = serde_json::from_slice(&like(&seed(rank), &mut random)).ok()?;
                Some((rank, report))
            })
            .collect();
        understood += reports.len();
        let diagnosis = find_root_cause(&DiagnosisInput {
            roster: &Roster::default(),
            name: "model/tp",
            key: "0f",
            hosts: &hosts,
            symptoms: std::slice::from_ref(&symptom),
            reports: &reports,
            departed_in_order: &BTreeSet::new(),
            suspended: &BTreeMap::new(),
            done: &completed_calls(&reports),
            slack: std::time::Duration::ZERO,
        });
        assert!(!diagnosis.cause.text().is_empty());
        let evidence = reports.values().filter_map(|report| report.host.clone());
        let evidence: Vec<_> = evidence.map(HostEvidence::bounded).collect();
        let seen: Vec<_> = evidence
            .iter()
            .zip(0..)
            .map(|(evidence, rank)| SeenByRank {
                rank,
                evidence,
                is_stuck: true,
            })
            .collect();
        let places = hosts.clone().map(|host| (host, 7));
        for said in sentences(&seen, &places, &Roster::default()) {
            assert!(
                said.len() < 8192 && !said.contains(char::is_control),
                "{said:?}"
            );
        }
    }
    assert!(understood > 3000, "{understood}");
}
