//! Random ranks: whatever they report, comparing them ends, does not panic, and gives the same findings in whatever
//! order the reports came.

use crate::host_evidence::{DeviceState, DeviceTrouble, Devices, NvmlAccess};
use crate::preflight::Loaded;
use crate::preflight::device::Device;
use crate::preflight::facts::{Facts, LoopbackName, Namespaces, PROTOCOL, ProcessFacts};
use crate::preflight::interfaces::Address;
use crate::preflight::rdma::Port;
use crate::preflight::reachability::{Failure, ProbeListener};
use crate::preflight::rules::{FactsView, check, check_reachability};
use nccl_base::report::Report;
use nccl_base::system::env_drift::DriftedVariable;
use nccl_base::system::limits::Limits;
use nccl_base::system::variables::Variable;
use nccl_base::wire;

/// Few words, so that ranks often agree.
const WORDS: [&str; 8] = ["a", "b", "", "1", "0x10", "eth0", "\"q\"", "ü,^=:"];

const NAMES: [&str; 12] = [
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_SOCKET_IFNAME",
    "NCCL_SOCKET_FAMILY",
    "NCCL_COMM_ID",
    "NCCL_HOSTID",
    "NCCL_IB_HCA",
    "NCCL_IB_GID_INDEX",
    "NCCL_IB_DISABLE",
    "NCCL_COMM_BLOCKING",
    "NCCL_SOCKET_IFNAMES",
    " export NCCL_X",
];

fn word(random: &mut fastrand::Rng) -> String {
    (*random.choice(&WORDS).unwrap()).to_owned()
}

fn number(random: &mut fastrand::Rng) -> u64 {
    *random
        .choice(&[0, 1, 2, 8, 63, 64, 1 << 20, 1 << 40, u64::MAX])
        .unwrap()
}

fn maybe<T>(random: &mut fastrand::Rng, make: impl FnOnce(&mut fastrand::Rng) -> T) -> Option<T> {
    random.bool().then(|| make(random))
}

fn several<T>(
    random: &mut fastrand::Rng,
    most: usize,
    make: impl Fn(&mut fastrand::Rng) -> T,
) -> Vec<T> {
    (0..random.usize(..=most)).map(|_| make(random)).collect()
}

fn limits(random: &mut fastrand::Rng) -> Limits {
    Limits {
        files: maybe(random, number),
        files_hard: maybe(random, number),
        files_used: number(random),
        processes: maybe(random, number),
        threads_used: number(random),
        tasks_left: maybe(random, number),
        tasks_file: word(random),
        locked: maybe(random, number),
        memory: maybe(random, number),
        memory_file: word(random),
        processors: maybe(random, number),
        shared_size: maybe(random, number),
        shared_free: maybe(random, number),
        leaked: number(random),
        leaked_bytes: number(random),
        first_port: maybe(random, number),
        last_port: maybe(random, number),
    }
}

fn process(random: &mut fastrand::Rng) -> ProcessFacts {
    let address = |random: &mut fastrand::Rng| Address {
        interface: word(random),
        address: random
            .choice(&[
                "10.0.0.1",
                "10.0.0.2",
                "127.0.0.1",
                "fd00::1",
                "::1",
                "fe80::1",
            ])
            .unwrap()
            .parse()
            .unwrap(),
        prefix: number(random),
        scope: number(random),
        up: random.bool(),
    };
    ProcessFacts {
        host: word(random),
        pid: number(random),
        architecture: word(random),
        little_endian: random.bool(),
        boot: word(random),
        namespaces: Namespaces {
            network: word(random),
            ipc: word(random),
            pid: word(random),
            user: word(random),
        },
        variables: several(random, 6, |random| Variable {
            name: (*random.choice(&NAMES).unwrap()).to_owned(),
            value: word(random),
            file: word(random),
        }),
        late: several(random, 2, |random| DriftedVariable {
            name: word(random),
            was: maybe(random, word),
            is: maybe(random, word),
        }),
        missing_file: maybe(random, word),
        visible_devices: maybe(random, word),
        addresses: several(random, 4, address),
        control: maybe(random, |_| "10.0.0.1".parse().unwrap()),
        interface: maybe(random, word),
        meeting: maybe(random, |_| "10.0.0.2".parse().unwrap()),
        loopback_names: several(random, 2, |random| LoopbackName {
            name: word(random),
            address: word(random),
            line: number(random),
        }),
        takes_virtual: random.bool(),
        ports: several(random, 3, |random| Port {
            adapter: word(random),
            port: number(random),
            active: random.bool(),
            ethernet: random.bool(),
            gids: several(random, 3, number),
        }),
        limits: limits(random),
    }
}

fn nvml(random: &mut fastrand::Rng) -> Devices {
    let trouble = |random: &mut fastrand::Rng| match random.u8(..5) {
        0 => DeviceTrouble::Lost,
        1 => DeviceTrouble::InactiveNvlinks(several(random, 3, |random| random.u32(..18))),
        2 => DeviceTrouble::PcieWidth { lanes: 8, most: 16 },
        3 => DeviceTrouble::Unreadable(word(random)),
        _ => DeviceTrouble::OtherProcess {
            pid: random.u32(..),
            name: word(random),
        },
    };
    let device = |random: &mut fastrand::Rng| DeviceState {
        bus_id: word(random),
        troubles: several(random, 2, trouble),
        nvlinks: random.u32(..3),
        active_nvlinks: random.u32(..3),
    };
    Devices {
        access: match random.u8(..4) {
            0 => NvmlAccess::NoAnswer,
            1 => NvmlAccess::Absent(word(random)),
            2 => NvmlAccess::Answered,
            _ => NvmlAccess::NotAsked,
        },
        list: several(random, 2, device),
    }
}

pub(super) fn facts(random: &mut fastrand::Rng) -> Facts {
    Facts {
        protocol: PROTOCOL,
        off: random.u8(..16) == 0,
        launch_mode: random.u64(..5),
        process: maybe(random, process),
        library: maybe(random, |random| Loaded {
            version: word(random),
            path: word(random),
            build_id: maybe(random, word),
        }),
        device: maybe(random, |random| Device {
            ordinal: number(random),
            uuid: word(random),
            name: word(random),
            bound_to: maybe(random, number),
            count: number(random),
            driver: word(random),
            nvml: nvml(random),
        }),
    }
}

#[test]
fn random_ranks_never_panic_the_rules_and_come_to_one_report_whatever_the_order() {
    let mut random = fastrand::Rng::with_seed(23);
    let mut findings = 0;
    for _ in 0..400 {
        let facts = several(&mut random, 12, facts);
        let some = |random: &mut fastrand::Rng| random.usize(..14);
        let mut listeners = several(&mut random, 6, |random| ProbeListener {
            rank: some(random),
            interface: word(random),
            at: word(random),
            token: word(random),
            mtu: random.u64(..3) * 1500,
            failed: word(random),
        });
        listeners.sort_by_key(|listener| listener.rank);
        listeners.dedup_by_key(|listener| listener.rank);
        let mut failures = several(&mut random, 12, |random| Failure {
            from: some(random),
            to: some(random),
            source: word(random),
            error: number(random),
            stranger: random.bool(),
            silent: random.bool(),
            large: random.bool(),
        });
        let view = FactsView::of(&facts);
        let first = check_reachability(&view, &listeners, &failures);
        for _ in 0..3 {
            random.shuffle(&mut listeners);
            random.shuffle(&mut failures);
            assert_eq!(check_reachability(&view, &listeners, &failures), first);
        }
        findings += first.findings.len();
        // The report survives the wire, and names only existing ranks.
        assert_eq!(
            wire::decode::<Report>(&wire::encode(&first)),
            Ok(first.clone())
        );
        for finding in first.findings {
            assert!(
                finding.ranks.iter().all(|&rank| rank < facts.len()),
                "{finding:?}"
            );
            assert!(!finding.what.is_empty());
        }
        if let Some(one) = facts.first() {
            let _ = check(&FactsView::alone(std::slice::from_ref(one), 8, 64));
        }
    }
    assert!(findings > 2000, "{findings}");
}
