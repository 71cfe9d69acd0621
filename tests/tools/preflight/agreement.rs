//! Ranks of one host.

use std::process::Child;
use std::time::{Duration, Instant};

use super::hosts::{agreed, contains, said, start};

/// Ranks of this host, each with the variables of `more`.
fn ranks(
    size: usize,
    script: &str,
    more: &dyn Fn(usize) -> Vec<(&'static str, &'static str)>,
) -> Vec<Child> {
    // An abstract socket, which vanishes with its last user.
    let place = format!(
        "unix:@nccl-preflight-{}-{}",
        std::process::id(),
        fastrand::u64(..)
    );
    (0..size)
        .map(|rank| {
            let mut more = more(rank);
            more.push(("NCCL_RUN_RENDEZVOUS", &place));
            start(&[], rank, size, script, &more)
        })
        .collect()
}

#[test]
fn ranks_that_agree_are_fine_and_a_communicator_is_made() {
    let said = agreed(ranks(3, "build", &|_| vec![("NCCL_ALGO", "Ring")]));
    assert_eq!(said, "built");
    let report = agreed(ranks(3, "check", &|_| vec![("NCCL_ALGO", "Ring")]));
    assert!(!report.contains("error ("), "{report}");
    contains(
        &report,
        &[
            "ok (nccl-version): NCCL 2.32.3 is loaded",
            "the variables of NCCL agree: NCCL_ALGO",
        ],
    );
}

#[test]
fn a_variable_that_differs_on_one_rank_fails_the_build_on_all() {
    let differs = |rank| vec![("NCCL_PROTO", if rank == 2 { "LL" } else { "Simple" })];
    for script in ["check", "build"] {
        let said = agreed_but_for_the_rank(ranks(4, script, &differs), script);
        contains(
            &said,
            &[
                "rank 2 (",
                "NCCL_PROTO=LL (from the process's environment), the other 3 ranks",
                "NCCL_PROTO=Simple",
                "give NCCL_PROTO the same value on every rank",
            ],
        );
    }
}

/// The error of an operation begins with its rank; the rest is the same on all ranks.
#[track_caller]
fn agreed_but_for_the_rank(ranks: Vec<Child>, script: &str) -> String {
    if script == "check" {
        return agreed(ranks);
    }
    let causes: Vec<String> = said(ranks)
        .into_iter()
        .map(|said| {
            assert!(said.took < Duration::from_secs(8), "{:?}", said.took);
            let cause = said.text.split_once("cause:");
            cause
                .unwrap_or_else(|| panic!("{}", said.text))
                .1
                .to_owned()
        })
        .collect();
    assert!(
        causes.iter().all(|cause| *cause == causes[0]),
        "{causes:#?}"
    );
    causes.into_iter().next().unwrap()
}

#[test]
fn a_release_with_a_known_fault_is_named_and_what_triggers_it() {
    let release = ("NCCL_EMULATOR_VERSION", "2.27.7");
    let report = agreed(ranks(2, "check", &|_| vec![release]));
    contains(
        &report,
        &[
            "warning (nccl-release): NCCL 2.27.7 has crashed in its RAS service",
            "NCCL_RAS_ENABLE=0",
        ],
    );
    let off = ("NCCL_RAS_ENABLE", "0");
    let report = agreed(ranks(2, "check", &|_| vec![release, off]));
    contains(&report, &["ok (nccl-release): NCCL 2.27.7 has crashed"]);
}

#[test]
fn another_release_on_one_rank_is_named_with_both_releases() {
    let older = |rank| match rank {
        1 => vec![("NCCL_EMULATOR_VERSION", "2.28.3")],
        _ => Vec::new(),
    };
    for script in ["check", "build"] {
        let said = agreed_but_for_the_rank(ranks(3, script, &older), script);
        contains(
            &said,
            &[
                "rank 1 (",
                "loaded NCCL 2.28.3 from",
                "the other 2 ranks",
                "loaded NCCL 2.32.3 from",
                "NCCL_LIBRARY",
            ],
        );
    }
}

#[test]
fn two_ranks_on_one_device_are_named_unless_nccl_may_share_it() {
    let shared = |rank| vec![("NCCL_TEST_DEVICE", if rank == 0 { "0" } else { "1" })];
    for script in ["check", "build"] {
        let said = agreed_but_for_the_rank(ranks(3, script, &shared), script);
        contains(
            &said,
            &[
                "ranks 1,2 (",
                "use the same device",
                "as device 1",
                "CudaContext::new(world.local_rank())",
            ],
        );
    }
    let allowed = |_| {
        vec![
            ("NCCL_TEST_DEVICE", "0"),
            ("NCCL_MULTI_RANK_GPU_ENABLE", "1"),
        ]
    };
    assert_eq!(agreed(ranks(3, "build", &allowed)), "built");
}

#[test]
fn a_rank_with_too_few_open_files_left_is_named_with_the_number_it_needs() {
    let few = |rank| match rank {
        2 => vec![("NCCL_TEST_FILES_LEFT", "20")],
        _ => Vec::new(),
    };
    let said = agreed_but_for_the_rank(ranks(3, "build", &few), "build");
    contains(
        &said,
        &[
            "rank 2 (",
            "files are open, and NCCL needs 38 to start",
            "ulimit -n 1024",
        ],
    );
}

#[test]
fn a_file_that_makes_nccl_block_is_found_and_named() {
    let path = std::env::temp_dir().join(format!("nccl-blocking-{}.conf", std::process::id()));
    std::fs::write(&path, "# a comment\nNCCL_COMM_BLOCKING=1\n").unwrap();
    let path: &'static str = path.to_str().unwrap().to_owned().leak();
    let said = agreed_but_for_the_rank(
        ranks(2, "build", &|_| vec![("NCCL_CONF_FILE", path)]),
        "build",
    );
    contains(
        &said,
        &[
            "NCCL_COMM_BLOCKING=1 (from",
            path,
            "block without a deadline",
        ],
    );
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_misspelt_variable_is_a_warning_and_no_error() {
    let misspelt = |_| vec![("NCCL_SOCKET_IFNAMES", "eth0")];
    let report = agreed(ranks(2, "check", &misspelt));
    contains(
        &report,
        &[
            "warning (variable-names)",
            "did you mean NCCL_SOCKET_IFNAME?",
        ],
    );
    assert_eq!(agreed(ranks(2, "build", &misspelt)), "built");
}

#[test]
fn the_checks_can_be_switched_off_on_all_ranks_and_are_off_when_one_wants_none() {
    let differs = |off: fn(usize) -> bool| {
        move |rank: usize| {
            let mut more = vec![("NCCL_PROTO", if rank == 1 { "LL" } else { "Simple" })];
            if off(rank) {
                more.push(("NCCL_RUN_PREFLIGHT", "off"));
            }
            more
        }
    };
    assert_eq!(agreed(ranks(2, "build", &differs(|_| true))), "built");
    assert_eq!(
        agreed(ranks(2, "build", &differs(|rank| rank == 0))),
        "built"
    );
}

#[test]
fn a_rank_that_does_not_come_is_named_at_the_deadline() {
    let begun = Instant::now();
    let mut worlds = nccl::World::threads(2);
    let (_one, zero) = (worlds.pop().unwrap(), worlds.pop().unwrap());
    let zero = zero.with_timeout(Duration::from_millis(200));
    let error = zero
        .preflight(&nccl::preflight::Settings::default())
        .unwrap_err()
        .to_string();
    assert!(error.contains("rank 1 of 2 did not come"), "{error:#}");
    assert!(begun.elapsed() < Duration::from_secs(5));
}

#[test]
fn threads_of_one_process_are_compared_by_their_devices_only() {
    nccl_emulator::install_unless_gpu().unwrap();
    let said = |devices: [usize; 3]| {
        std::thread::scope(|scope| {
            let ranks: Vec<_> = nccl::World::threads(3)
                .into_iter()
                .zip(devices)
                .map(|(world, device)| {
                    scope.spawn(move || {
                        let context = nccl::cudarc::driver::CudaContext::new(device).unwrap();
                        let stream = context.new_stream().unwrap();
                        let built = world.communicator("threads").stream(&stream).build();
                        world.barrier("end").unwrap();
                        built.map(drop).map_err(|error| format!("{error:#}"))
                    })
                })
                .collect();
            ranks
                .into_iter()
                .map(|rank| rank.join().unwrap())
                .collect::<Vec<_>>()
        })
    };
    assert_eq!(said([0, 1, 2]), [Ok(()), Ok(()), Ok(())]);
    for error in said([0, 1, 1]) {
        contains(&error.unwrap_err(), &["ranks 1,2 (", "use the same device"]);
    }
}

#[test]
fn a_rank_that_shares_no_memory_with_the_others_of_its_machine_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let place = format!("unix:{}/meet", directory.path().display());
    let apart = std::process::Command::new("unshare")
        .args(["--ipc", "true"])
        .status();
    if !apart.is_ok_and(|status| status.success()) {
        eprintln!("SKIPPED: an IPC namespace needs root and unshare of util-linux");
        return;
    }
    let ranks = (0..3).map(|rank| {
        let before: &[&str] = if rank == 2 {
            &["unshare", "--ipc"]
        } else {
            &[]
        };
        start(before, rank, 3, "check", &[("NCCL_RUN_RENDEZVOUS", &place)])
    });
    let report = agreed(ranks.collect());
    contains(
        &report,
        &[
            "warning (namespaces): ranks of one machine",
            "are in different IPC namespaces: rank 2 (",
            "--ipc=host",
        ],
    );
}

#[test]
fn a_variable_that_is_changed_when_nccl_has_read_it_is_a_warning() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "NCCL_ALGO=Ring\n").unwrap();
    // Lives as long as the test process.
    let path: &'static str = file.path().to_str().unwrap().to_owned().leak();
    let report = agreed(ranks(2, "late", &|_| vec![("NCCL_CONF_FILE", path)]));
    contains(
        &report,
        &[
            "warning (variable-late): ranks 0,1 (",
            "NCCL_ALGO=Tree was set after NCCL had been started in this process, which keeps NCCL_ALGO=Ring",
        ],
    );
}
