//! The variables of launchers, and the rendezvous that follows from them.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use super::address::LONGEST;
use crate::address::Address;
use crate::environment::Rendezvous;
use crate::error::Result;

fn read(variables: &[(&str, &str)]) -> Result<Rendezvous> {
    Rendezvous::from_variables(|name| {
        variables
            .iter()
            .find(|(key, _)| *key == name)
            .map(|(_, value)| (*value).to_owned())
    })
}

#[test]
fn each_launcher_is_understood() {
    for variables in [
        &[
            ("NCCL_RUN_RANK", "1"),
            ("NCCL_RUN_WORLD_SIZE", "4"),
            ("NCCL_RUN_RENDEZVOUS", "unix:/tmp/x"),
        ][..],
        &[
            ("RANK", "1"),
            ("WORLD_SIZE", "4"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "4"),
        ],
        &[("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "4")],
        &[
            ("PMI_RANK", "1"),
            ("PMI_SIZE", "4"),
            ("MPI_LOCALRANKID", "1"),
        ],
        &[
            ("SLURM_PROCID", "1"),
            ("SLURM_NTASKS", "4"),
            ("SLURM_TASKS_PER_NODE", "4"),
            ("SLURM_STEP_ID", "0"),
        ],
    ] {
        let rendezvous = read(variables).unwrap();
        assert_eq!(
            (
                rendezvous.rank,
                rendezvous.world_size,
                rendezvous.local_rank
            ),
            (1, 4, 1)
        );
    }
}

#[test]
fn what_is_missing_or_wrong_is_named_with_its_value() {
    for (variables, words) in [
        (&[][..], &["RANK", "SLURM_PROCID", "none of"][..]),
        (&[("RANK", "0")], &["RANK", "WORLD_SIZE"]),
        (
            &[("RANK", "x"), ("WORLD_SIZE", "2")],
            &["RANK=\"x\"", "torchrun"],
        ),
        (
            &[
                ("NCCL_RUN_RANK", "0"),
                ("NCCL_RUN_WORLD_SIZE", "18446744073709551615"),
                ("NCCL_RUN_RENDEZVOUS", "unix:/tmp/x"),
            ],
            &[
                "NCCL_RUN_WORLD_SIZE=18446744073709551615",
                "1048576 is the most",
            ],
        ),
        (
            &[("RANK", "0"), ("WORLD_SIZE", "1000000000000")],
            &["WORLD_SIZE=1000000000000", "1048576 is the most"],
        ),
        (
            &[("RANK", "2"), ("WORLD_SIZE", "2")],
            &["RANK=2", "WORLD_SIZE=2"],
        ),
        (
            &[
                ("RANK", "0"),
                ("WORLD_SIZE", "8"),
                ("LOCAL_WORLD_SIZE", "4"),
            ],
            &["LOCAL_WORLD_SIZE=4", "several hosts"],
        ),
        (
            &[
                ("SLURM_PROCID", "0"),
                ("SLURM_NTASKS", "8"),
                ("SLURM_TASKS_PER_NODE", "4(x2)"),
                ("SLURM_STEP_ID", "0"),
            ],
            &["4(x2)", "several hosts", "SLURM_JOB_NODELIST is not set"],
        ),
        (
            &[
                ("SLURM_PROCID", "0"),
                ("SLURM_NTASKS", "8"),
                ("SLURM_TASKS_PER_NODE", "4(x2)"),
                ("SLURM_JOB_NODELIST", "n[2-1]"),
            ],
            &["n[2-1]", "backwards"],
        ),
        (
            &[
                ("PMI_RANK", "0"),
                ("PMI_SIZE", "8"),
                ("MPI_LOCALNRANKS", "4"),
            ],
            &[
                "MPI_LOCALNRANKS=4",
                "several hosts",
                "does not say where rank 0 runs",
            ],
        ),
        (
            &[("JOB_COMPLETION_INDEX", "0")],
            &["NCCL_RUN_WORLD_SIZE", "number of completions"],
        ),
        (
            &[
                ("JOB_COMPLETION_INDEX", "1"),
                ("NCCL_RUN_WORLD_SIZE", "2"),
                ("HOSTNAME", "train-1"),
            ],
            &["NCCL_RUN_SERVICE", "NCCL_RUN_RENDEZVOUS"],
        ),
        (
            &[("NCCL_RUN_RANK", "0"), ("NCCL_RUN_WORLD_SIZE", "1")],
            &["NCCL_RUN_RENDEZVOUS"],
        ),
        (
            &[
                ("NCCL_RUN_RANK", "0"),
                ("NCCL_RUN_WORLD_SIZE", "1"),
                ("NCCL_RUN_RENDEZVOUS", "tcp:1"),
            ],
            &["tcp:1", "unix:PATH"],
        ),
        (
            &[
                ("NCCL_RUN_RANK", "0"),
                ("NCCL_RUN_WORLD_SIZE", "2"),
                ("NCCL_RUN_LOCAL_WORLD_SIZE", "1"),
                ("NCCL_RUN_RENDEZVOUS", "unix:/tmp/x"),
            ],
            &["several hosts", "unix:/tmp/x", "tcp:HOST:PORT"],
        ),
    ] {
        let error = read(variables).unwrap_err().to_string();
        for word in words {
            assert!(error.contains(word), "{word:?} in {error:?}");
        }
    }
}

#[test]
fn ranks_on_several_hosts_meet_over_tcp() {
    for (text, shown) in [
        ("tcp:10.0.0.5:29400", "tcp:10.0.0.5:29400"),
        ("tcp:node-a:29400-29415", "tcp:node-a:29400-29415"),
        ("tcp:[fd00::1]:29400", "tcp:[fd00::1]:29400"),
    ] {
        let variables = [
            ("NCCL_RUN_RANK", "1"),
            ("NCCL_RUN_WORLD_SIZE", "4"),
            ("NCCL_RUN_LOCAL_WORLD_SIZE", "2"),
            ("NCCL_RUN_RENDEZVOUS", text),
            ("NCCL_RUN_INTERFACE", "eth0"),
        ];
        let address = read(&variables).unwrap().address.to_string();
        assert_eq!(address, format!("{shown} on interface eth0"));
    }
    let variables = [
        ("RANK", "1"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("MASTER_ADDR", "node-a"),
        ("MASTER_PORT", "29500"),
    ];
    let rendezvous = read(&variables).unwrap();
    assert_eq!(rendezvous.address.to_string(), "tcp:node-a:29501-29516");
}

#[test]
fn the_agents_of_torchrun_on_several_hosts_may_have_counted_different_restarts() {
    let job = |agents: &'static str, here: &'static str, restarts: &'static str| {
        let rendezvous = read(&[
            ("RANK", "1"),
            ("WORLD_SIZE", "4"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", here),
            ("GROUP_WORLD_SIZE", agents),
            ("MASTER_ADDR", "node-a"),
            ("MASTER_PORT", "29500"),
            ("TORCHELASTIC_RUN_ID", "train"),
            ("TORCHELASTIC_RESTART_COUNT", restarts),
        ]);
        let rendezvous = rendezvous.unwrap();
        (rendezvous.job, rendezvous.generation)
    };
    let meeting = (String::from("train/node-a/29500"), 0);
    assert_eq!(job("2", "2", "0"), meeting);
    assert_eq!(job("2", "2", "1"), meeting);
    // Without the variable, the numbers of ranks tell.
    assert_eq!(job("", "2", "1"), meeting);
    let alone = (String::from("train/1/node-a/29500"), 1);
    assert_eq!(job("1", "4", "1"), alone);
}

#[test]
fn ranks_whose_number_on_this_host_is_not_known_do_not_look_for_each_other_on_it() {
    let with = |variables: &[(&'static str, &'static str)]| {
        let rank = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "29500")];
        let all: Vec<_> = rank.into_iter().chain(variables.iter().copied()).collect();
        read(&all)
    };
    let error = with(&[("MASTER_ADDR", "job-master-0")])
        .unwrap_err()
        .to_string();
    for word in [
        "RANK=1 WORLD_SIZE=2",
        "MASTER_ADDR=job-master-0",
        "LOCAL_WORLD_SIZE",
        "LOCAL_RANK",
    ] {
        assert!(error.contains(word), "{word:?} in {error:?}");
    }
    for host in ["localhost", "127.0.0.1", "::1", ""] {
        let address = with(&[("MASTER_ADDR", host)]).unwrap().address;
        assert!(matches!(address, Address::Abstract(_)), "{address}");
    }
    let set = ("NCCL_RUN_RENDEZVOUS", "tcp:10.0.0.5:29400");
    let address = with(&[("MASTER_ADDR", "job-master-0"), set])
        .unwrap()
        .address;
    assert_eq!(address.to_string(), "tcp:10.0.0.5:29400");
}

#[test]
fn addresses_are_translated_when_a_variable_says_so() {
    let read = |value: &'static str| {
        read(&[
            ("NCCL_RUN_RANK", "1"),
            ("NCCL_RUN_WORLD_SIZE", "4"),
            ("NCCL_RUN_RENDEZVOUS", "tcp:10.0.0.5:29400"),
            ("NCCL_RUN_TRANSLATED", value),
        ])
    };
    for (value, translated) in [("1", true), ("0", false), ("", false)] {
        assert_eq!(
            read(value).unwrap().translated_addresses,
            translated,
            "{value:?}"
        );
    }
    let error = read("yes").unwrap_err().to_string();
    assert!(
        error.contains("NCCL_RUN_TRANSLATED=\"yes\" is neither 1 nor 0"),
        "{error}"
    );
}

#[test]
fn two_launches_meet_at_two_places() {
    let place = |id: &str| {
        let variables = [
            ("RANK", "0"),
            ("WORLD_SIZE", "1"),
            ("TORCHELASTIC_RUN_ID", id),
        ];
        read(&variables).unwrap().address
    };
    assert_eq!(place("a"), place("a"));
    assert_ne!(place("a"), place("b"));
    let long = "x".repeat(200);
    let (a, b) = (place(&(long.clone() + "a")), place(&(long + "b")));
    assert_ne!(a, b);
    for address in [a, b, place(&"ä".repeat(200))] {
        let Address::Abstract(name) = address else {
            panic!("{address}")
        };
        assert!(name.len() <= LONGEST, "{name}");
    }
}

#[test]
fn ranks_of_slurm_on_several_hosts_meet_at_the_first_at_ports_of_their_own() {
    let variables = |job: &'static str, step: &'static str| {
        [
            ("SLURM_PROCID", "5"),
            ("SLURM_NTASKS", "16"),
            ("SLURM_STEP_NUM_TASKS", "8"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_TASKS_PER_NODE", "8(x2)"),
            ("SLURM_STEP_TASKS_PER_NODE", "4(x2)"),
            ("SLURM_JOB_NODELIST", "a1,node[07-12]"),
            ("SLURM_STEP_NODELIST", "node[07-08]"),
            ("SLURM_JOB_ID", job),
            ("SLURM_STEP_ID", step),
        ]
    };
    let meets = |job, step| {
        let rendezvous = read(&variables(job, step)).unwrap();
        assert_eq!((rendezvous.rank, rendezvous.world_size), (5, 8));
        assert_eq!(rendezvous.local_rank, 1);
        let Address::Tcp(place) = rendezvous.address else {
            panic!("{}", rendezvous.address)
        };
        assert_eq!(place.host, "node07");
        let (first, last) = place.ports;
        assert!((20_000..=29_983).contains(&first) && last == first + 15);
        assert_eq!(first % 16, 0);
        first
    };
    assert_eq!(meets("4711", "0"), meets("4711", "0"));
    let jobs: std::collections::HashSet<_> = ["1", "2", "3", "4", "5", "6"]
        .into_iter()
        .map(|job| meets(job, "0"))
        .collect();
    assert!(jobs.len() > 3, "{jobs:?}");
}

/// As in a batch job of Slurm, where mpirun runs on the first node: it starts the ranks there itself, and those of the other
/// nodes by a step.
#[test]
fn ranks_of_mpirun_meet_whatever_step_of_slurm_has_started_their_daemon() {
    let meets = |rank: &'static str, step: &[(&'static str, &'static str)], job: &'static str| {
        let all = [
            ("OMPI_COMM_WORLD_RANK", rank),
            ("OMPI_COMM_WORLD_SIZE", "3"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "1"),
            ("PMIX_NAMESPACE", job),
            ("SLURM_JOB_NODELIST", "n[1-3]"),
            ("SLURM_JOB_ID", "7"),
        ];
        let all: Vec<_> = all.into_iter().chain(step.iter().copied()).collect();
        read(&all).unwrap().address.to_string()
    };
    let daemon = [
        ("SLURM_STEP_NODELIST", "n[2-3]"),
        ("SLURM_STEP_ID", "0"),
        ("SLURM_PROCID", "0"),
        ("SLURM_STEP_NUM_TASKS", "2"),
    ];
    let first = meets("0", &[], "4711");
    assert!(first.starts_with("tcp:n1:2"), "{first}");
    assert_eq!(meets("1", &daemon, "4711"), first);
    assert_ne!(meets("1", &daemon, "4712"), first);
    // A script may pass the rank on under names that PyTorch reads.
    let script = [
        daemon,
        [("RANK", "1"), ("WORLD_SIZE", "3"), ("", ""), ("", "")],
    ]
    .concat();
    assert_eq!(meets("1", &script, "4711"), first);
}

#[test]
fn an_indexed_job_of_kubernetes_meets_at_its_first_pod() {
    let at = |index: &'static str, host: &'static str| {
        read(&[
            ("JOB_COMPLETION_INDEX", index),
            ("NCCL_RUN_WORLD_SIZE", "16"),
            ("NCCL_RUN_SERVICE", "train.default.svc"),
            ("HOSTNAME", host),
        ])
    };
    let rendezvous = at("11", "train-11").unwrap();
    assert_eq!((rendezvous.rank, rendezvous.world_size), (11, 16));
    assert_eq!(rendezvous.local_rank, 0);
    let shown = rendezvous.address.to_string();
    assert_eq!(shown, "tcp:train-0.train.default.svc:29400");
    // The first pod has its own name in its own /etc/hosts, also before the service knows it.
    let shown = at("0", "train-0").unwrap().address.to_string();
    assert_eq!(shown, "tcp:train-0:29400");
    let error = at("3", "other").unwrap_err().to_string();
    assert!(error.contains("HOSTNAME=\"other\""), "{error}");
}

#[test]
fn srun_that_speaks_pmi_is_one_launcher_and_not_two() {
    let rendezvous = read(&[
        ("PMI_RANK", "5"),
        ("PMI_SIZE", "8"),
        ("SLURM_PROCID", "5"),
        ("SLURM_NTASKS", "8"),
        ("SLURM_LOCALID", "1"),
        ("SLURM_TASKS_PER_NODE", "4(x2)"),
        ("SLURM_JOB_NODELIST", "n[3-4]"),
        ("SLURM_JOB_ID", "7"),
    ]);
    let rendezvous = rendezvous.unwrap();
    assert_eq!(
        (rendezvous.local_rank, rendezvous.launcher_conflict),
        (1, None)
    );
    let address = rendezvous.address.to_string();
    assert!(address.starts_with("tcp:n3:2"), "{address}");
}

#[test]
fn of_two_launchers_the_later_one_counts_and_both_are_named() {
    let torchrun_in_srun = [
        ("RANK", "5"),
        ("WORLD_SIZE", "8"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "8"),
        ("SLURM_PROCID", "1"),
        ("SLURM_NTASKS", "2"),
    ];
    let rendezvous = read(&torchrun_in_srun).unwrap();
    assert_eq!((rendezvous.rank, rendezvous.world_size), (5, 8));
    let said = rendezvous.launcher_conflict.clone().unwrap();
    for word in [
        "RANK=5 WORLD_SIZE=8 (torchrun)",
        "SLURM_PROCID=1 SLURM_NTASKS=2 (Slurm)",
    ] {
        assert!(said.contains(word), "{word:?} in {said:?}");
    }
    // Every later error then names it.
    let timeout = std::time::Duration::from_millis(50);
    let error = crate::World::join(rendezvous.with(|meet| meet.timeout = timeout)).unwrap_err();
    let error = error.to_string();
    assert!(error.contains("SLURM_PROCID=1"), "{error}");

    // Set by hand, and by srun: one of the two is wrong.
    let by_hand = [
        ("RANK", "0"),
        ("WORLD_SIZE", "4"),
        ("SLURM_PROCID", "3"),
        ("SLURM_NTASKS", "4"),
    ];
    let error = read(&by_hand).unwrap_err().to_string();
    for word in [
        "RANK=0 WORLD_SIZE=4",
        "SLURM_PROCID=3 SLURM_NTASKS=4",
        "unset RANK",
    ] {
        assert!(error.contains(word), "{word:?} in {error:?}");
    }
}

#[test]
fn a_variable_that_is_no_text_is_named_and_not_taken_as_unset() {
    let set = [
        ("NCCL_RUN_RANK", &b"1"[..]),
        ("NCCL_RUN_WORLD_SIZE", b"4"),
        ("NCCL_RUN_RENDEZVOUS", b"tcp:10.0.0.5:29400"),
    ];
    for name in ["NCCL_RUN_INTERFACE", "NCCL_RUN_JOB", "NCCL_RUN_GENERATION"] {
        let read = Rendezvous::from_variables(|asked| {
            let mut all = set.into_iter().chain([(name, &b"eth\xff"[..])]);
            let value = all.find(|(known, _)| *known == asked)?.1;
            Some(OsStr::from_bytes(value).to_owned())
        });
        let error = read.unwrap_err().to_string();
        let named = format!("{name}=\"eth\\xFF\" is not UTF-8");
        assert!(error.contains(&named), "{error}");
    }
}

#[test]
fn nccl_run_comes_before_the_variables_of_torchrun_that_it_sets_as_well() {
    let rendezvous = read(&[
        ("NCCL_RUN_RANK", "5"),
        ("NCCL_RUN_WORLD_SIZE", "8"),
        ("NCCL_RUN_LOCAL_RANK", "1"),
        ("NCCL_RUN_LOCAL_WORLD_SIZE", "4"),
        ("NCCL_RUN_RENDEZVOUS", "tcp:10.0.0.5:29400"),
        ("NCCL_RUN_JOB", "mine"),
        ("NCCL_RUN_GENERATION", "2"),
        ("RANK", "5"),
        ("WORLD_SIZE", "8"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "4"),
        ("MASTER_ADDR", "10.0.0.9"),
        ("MASTER_PORT", "29500"),
        ("TORCHELASTIC_RESTART_COUNT", "7"),
    ])
    .unwrap();
    assert_eq!(rendezvous.address.to_string(), "tcp:10.0.0.5:29400");
    assert_eq!((rendezvous.rank, rendezvous.local_rank), (5, 1));
    assert_eq!((&rendezvous.job[..], rendezvous.generation), ("mine", 2));
    assert_eq!(rendezvous.launcher_conflict, None);
}

#[test]
fn the_rank_of_a_launcher_that_is_no_text_is_an_error() {
    let rank = |value: &[u8]| {
        super::launch::rank(|name| (name == "RANK").then(|| OsStr::from_bytes(value).to_owned()))
    };
    let error = rank(b"1\xff").unwrap_err().to_string();
    assert!(error.contains("RANK=\"1\\xFF\" is not UTF-8"), "{error}");
    assert_eq!(super::launch::rank(|_| None).unwrap(), None);
}
