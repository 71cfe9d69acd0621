//! Ranks that join a world under nccl-run.

use nccl::control::WorldEvent;
use nccl::launch::Signal;
use nccl::{Observer, Rendezvous, World};
use nccl_tools::testing::{Role, again, end_with, eventually, lives, name};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::process::Command;
use std::time::Duration;

use super::running::{Running, options_only, send};

/// The command that runs a test again, as a rank, under nccl-run.
fn under(options: &str, test: &str) -> Command {
    let rank = again(test, "rank");
    let mut command = options_only(options);
    command
        .arg("--")
        .arg(rank.get_program())
        .args(rank.get_args());
    for (name, value) in rank.get_envs() {
        command.env(name, value.unwrap_or_default());
    }
    command
}

fn join() -> Result<World, String> {
    let rendezvous = Rendezvous::from_env().map_err(|error| format!("{error:#}"))?;
    World::join(rendezvous).map_err(|error| format!("{error:#}"))
}

#[test]
fn ranks_find_each_other() {
    let test = name(&|| ());
    if Role::of(&test) != Role::Test {
        end_with(|| {
            let world = join()?;
            println!("rank {} of {}", world.rank(), world.size());
            Ok::<(), String>(())
        });
    }
    let run = Running::start(under("-n 3 --no-prefix", &test)).finish();
    assert_eq!(run.code, 0, "{run:?}");
    for rank in 0..3 {
        assert!(
            run.stdout().contains(&format!("rank {rank} of 3\n")),
            "{run:?}"
        );
    }
}

#[test]
fn ranks_find_each_other_whatever_the_shell_around_says_of_torchruns_variables() {
    let test = name(&|| ());
    if Role::of(&test) != Role::Test {
        end_with(|| {
            let world = join()?;
            let says = |name: &str| std::env::var(name).unwrap_or_default();
            let all = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"].map(says);
            println!(
                "rank {} of {}: {}",
                world.rank(),
                world.size(),
                all.join(" ")
            );
            Ok::<(), String>(())
        });
    }
    let mut command = under("-np 2 --no-prefix", &test);
    for (name, value) in [
        ("RANK", "7"),
        ("WORLD_SIZE", "9"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "3"),
        ("MASTER_ADDR", "10.0.0.1"),
        ("MASTER_PORT", "29500"),
        ("TORCHELASTIC_RESTART_COUNT", "4"),
    ] {
        command.env(name, value);
    }
    let run = Running::start(command).finish();
    assert_eq!(run.code, 0, "{run:?}");
    for rank in 0..2 {
        let line = format!("rank {rank} of 2: {rank} 2 {rank} 2\n");
        assert!(run.stdout().contains(&line), "{run:?}");
    }
}

#[test]
fn ranks_of_two_nodes_find_each_other_with_the_same_secret() {
    let test = name(&|| ());
    if Role::of(&test) != Role::Test {
        end_with(|| {
            let world = join()?;
            println!(
                "rank {} (local {}) of {}",
                world.rank(),
                world.local_rank(),
                world.size()
            );
            Ok::<(), String>(())
        });
    }
    let directory = tempfile::tempdir().unwrap();
    let secret = directory.path().join("secret");
    std::fs::write(&secret, "between us, and nobody else").unwrap();
    std::fs::set_permissions(&secret, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let port = free_port();
    let node = |node: usize| {
        let options = format!(
            "-n 2 --nodes 2 --node-rank {node} --rendezvous tcp:127.0.0.1:{port} --secret-file {}",
            secret.display()
        );
        Running::start(under(&options, &test))
    };
    let (first, second) = (node(0), node(1));
    let (first, second) = (first.finish(), second.finish());
    assert_eq!((first.code, second.code), (0, 0), "{first:?} {second:?}");
    assert!(
        first.stdout().contains("rank 1 (local 1) of 4\n"),
        "{first:?}"
    );
    assert!(
        second.stdout().contains("rank 2 (local 0) of 4\n"),
        "{second:?}"
    );
    assert!(!first.stderr.contains("without a secret"), "{first:?}");
}

#[test]
fn a_secret_that_is_no_text_keeps_strangers_out() {
    let test = name(&|| ());
    if Role::of(&test) != Role::Test {
        end_with(|| {
            let world = join()?;
            // The ranks wait here until the test has looked.
            world.barrier("over").map_err(|error| format!("{error:#}"))
        });
    }
    let secret = OsStr::from_bytes(b"\xff\xfe\x80 binary, sixteen bytes");
    let port = free_port();
    let address = format!("tcp:127.0.0.1:{port}");
    let options = format!("-n 1 --nodes 2 --node-rank 0 --rendezvous {address} --job binary");
    let mut command = under(&options, &test);
    command.env("NCCL_RUN_SECRET", secret);
    let launched = Running::start(command);
    let rank = Rendezvous::from_variables(|name| {
        Some(match name {
            "NCCL_RUN_RANK" => "1".into(),
            "NCCL_RUN_WORLD_SIZE" => "2".into(),
            "NCCL_RUN_RENDEZVOUS" => address.clone().into(),
            "NCCL_RUN_JOB" => "binary".into(),
            "NCCL_RUN_SECRET" => secret.to_owned(),
            _ => return None::<OsString>,
        })
    });
    let world = World::join(rank.unwrap()).unwrap();
    let stranger = Rendezvous::observer(&address)
        .unwrap()
        .with(|meet| meet.job = "binary".into());
    let error = Observer::join(stranger).unwrap_err().to_string();
    assert!(error.contains("secret"), "{error:#}");
    world.barrier("over").unwrap();
    let run = launched.finish();
    assert_eq!(run.code, 0, "{run:?}");
    assert!(!run.stderr.contains("without a secret"), "{run:?}");
}

fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

#[test]
fn the_others_are_told_how_a_rank_was_killed_and_what_it_said_last() {
    let test = name(&|| ());
    if Role::of(&test) != Role::Test {
        end_with(|| {
            let world = join()?;
            if world.rank() == victim() {
                world
                    .barrier("ready")
                    .map_err(|error| format!("{error:#}"))?;
                // By then nccl-run has joined the world as well.
                std::thread::sleep(Duration::from_millis(500));
                eprintln!("no memory for layer 7");
                send(std::process::id(), Signal::Kill);
            }
            world
                .barrier("ready")
                .map_err(|error| format!("{error:#}"))?;
            // The victim does not enter this barrier.
            let error = world.barrier("work").err();
            Err(error.map_or_else(
                || "nothing went wrong".to_owned(),
                |error| format!("{error:#}"),
            ))
        });
    }
    for victim in [1, 0] {
        let options = format!("-n 3 --linger 5s --job victim-{victim}");
        let run = Running::start(under(&options, &test)).finish();
        assert_eq!(run.code, 137, "{run:?}");
        for rank in (0..3).filter(|&rank| rank != victim) {
            let mut lines = run.stderr.lines();
            let said = lines.find(|line| {
                line.starts_with(&format!("[{rank}] ")) && line.contains("rendezvous")
            });
            let said = said.unwrap_or_else(|| panic!("rank {rank} says nothing: {run:?}"));
            assert!(said.contains(&format!("rank {victim} (")), "{run:?}");
            let how = "its process ended: killed by SIGKILL; stderr ended with: ";
            assert!(
                said.contains(how) && said.contains("no memory for layer 7"),
                "{run:?}"
            );
        }
        let start = format!("rank {victim} (");
        assert!(run.report().starts_with(&start), "{run:?}");
        assert!(run.took < Duration::from_secs(20), "{run:?}");
    }
}

fn victim() -> usize {
    let job = std::env::var("NCCL_RUN_JOB").unwrap_or_default();
    if job.ends_with('0') { 0 } else { 1 }
}

#[test]
fn ranks_that_join_are_told_that_one_died_before_it_joined() {
    let test = name(&|| ());
    if Role::of(&test) != Role::Test {
        end_with(|| {
            let rank = std::env::var("NCCL_RUN_RANK").unwrap_or_default();
            if rank == victim().to_string() {
                // The others wait for it by then.
                std::thread::sleep(Duration::from_secs(1));
                eprintln!("no such weights");
                std::process::exit(3);
            }
            Err::<(), _>(
                join()
                    .err()
                    .unwrap_or_else(|| "nothing went wrong".to_owned()),
            )
        });
    }
    for victim in [1, 0] {
        let options = format!("-n 3 --linger 10s --job victim-{victim}");
        let run = Running::start(under(&options, &test)).finish();
        assert_eq!(run.code, 3, "{run:?}");
        let told = "its process ended: exit code 3; stderr ended with: ";
        assert_eq!(run.stderr.matches(told).count(), 2, "{run:?}");
        assert!(run.took < Duration::from_secs(8), "{run:?}");
    }
}

#[test]
fn a_rank_that_stood_still_on_one_host_is_not_said_to_be_behind_a_network() {
    let test = name(&|| ());
    if Role::of(&test) != Role::Test {
        end_with(|| {
            let world = join()?;
            // Before this rank can be stopped: earlier events are not among these.
            let mut events = world.events();
            let pids = world.all_gather("pid", &std::process::id().to_ne_bytes());
            let pids = pids.map_err(|error| format!("{error:#}"))?;
            let pid = |rank: usize| {
                let bytes = pids[rank].as_slice().try_into();
                bytes.map(u32::from_ne_bytes).map_err(|_| "four bytes")
            };
            if world.rank() == 0 {
                send(pid(3)?, Signal::Stop);
                std::thread::sleep(Duration::from_millis(300));
                send(pid(0)?, Signal::Kill);
            }
            let error = world.barrier("work").expect_err("rank 0 is gone");
            println!("{error:#}");
            if world.rank() == 3 {
                let limit = Duration::from_secs(20);
                while let Some(event) = events.next_within(limit) {
                    match event {
                        WorldEvent::CutOff { why, .. } => {
                            println!("{why}");
                            break;
                        }
                        WorldEvent::Gone { rank: 3, how, .. } => {
                            println!("gone itself: {how}");
                            break;
                        }
                        _ => {}
                    }
                }
                return Ok(());
            }
            let next = world.next_generation_leaving_behind(Duration::from_secs(4));
            let next = next.map_err(|error| format!("{error:#}"))?;
            send(pid(3)?, Signal::Cont);
            eventually("rank 3 has ended", || !pid(3).is_ok_and(lives));
            next.barrier("end").map_err(|error| format!("{error:#}"))
        });
    }
    let run = Running::start(under("-n 4 --linger 60s", &test)).finish();
    assert_eq!(run.code, 137, "{run:?}");
    let said = run.stdout();
    let told = "[3] gone itself: it was left behind";
    assert!(said.contains(told), "{run:?}");
    assert!(!said.contains("partition"), "{run:?}");
}
