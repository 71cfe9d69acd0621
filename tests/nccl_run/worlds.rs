//! Ranks that find each other under nccl-run.

use nccl::{Rendezvous, World};
use nccl_tools::testing::{Role, again, end_with, name};
use std::process::Command;

use super::running::{Running, options_only};

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
    let rendezvous = Rendezvous::from_env().map_err(|error| error.to_string())?;
    World::join(rendezvous).map_err(|error| error.to_string())
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
    std::fs::write(&secret, "between us").unwrap();
    std::fs::set_permissions(&secret, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
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
    assert!(!first.stderr.contains("no secret"), "{first:?}");
}
