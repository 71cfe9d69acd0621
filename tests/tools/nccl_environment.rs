//! What NCCL reads as its environment: the interface of the rendezvous and the program's retries, without a variable.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use nccl::preflight::nccl_variables_for;
use nccl::process::NetworkRetries;
use nccl::{Communicator, ErrorKind, Library, ReduceOp, Rendezvous, UniqueId, Version, World};
use nccl_tools::gpu_check::not_tested;
use nccl_tools::testing::{again, name};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::{Context, SubscriberExt as _};

use crate::support::{self, Ranks};

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

/// The variable with a directory of the test, for its ranks.
const PLACE: &str = "NCCL_TEST_PLACE";

fn place() -> Outcome<PathBuf> {
    Ok(std::env::var_os(PLACE).ok_or("it is set")?.into())
}

/// The ranks of `world` join another one over TCP, at this interface.
fn join_at(world: &World, interface: &str) -> nccl::Result<World> {
    let name = format!("address-{}", interface.replace('/', "-"));
    let published = place().expect("it is set").join(name);
    let rendezvous = Rendezvous::tcp("127.0.0.1", 0, world.rank(), world.size())?;
    World::join(rendezvous.publish(published).interface(interface)?)
}

fn all_reduce(world: &World) -> Outcome {
    let stream = support::device(world)?.new_stream()?;
    let comm = world.communicator("work").stream(&stream).build()?;
    let mut y = stream.clone_htod(&[1.0f32; 100])?;
    comm.all_reduce_in_place(&mut y, ReduceOp::Sum)?.wait()?;
    assert_eq!(stream.clone_dtoh(&y)?, vec![world.size() as f32; 100]);
    Ok(())
}

/// Ranks with a directory, and NCCL's log of each in it.
fn ranks(directory: &Path) -> Ranks {
    Ranks::new(2)
        .variable(PLACE, directory)
        .variable("NCCL_DEBUG", "INFO")
        .variable("NCCL_DEBUG_SUBSYS", "ALL")
        .variable("NCCL_DEBUG_FILE", directory.join("log.%p"))
}

fn log() -> Outcome<String> {
    let file = place()?.join(format!("log.{}", std::process::id()));
    Ok(std::fs::read_to_string(file)?)
}

/// Whether the library reads its environment through a plugin.
fn takes_plugins() -> Outcome<bool> {
    Ok(Library::load()?.version() >= Version::new(2, 28, 7))
}

#[test]
fn nccl_uses_the_interface_of_the_rendezvous_without_a_variable() {
    let directory = tempfile::tempdir().unwrap();
    ranks(directory.path()).processes(|world: World| -> Outcome {
        assert!(std::env::var_os("NCCL_SOCKET_IFNAME").is_none());
        let inner = join_at(&world, "lo")?;
        all_reduce(&inner)?;
        let log = log()?;
        if !takes_plugins()? {
            assert!(!log.contains("ENV/Plugin: Using nccl-rs"), "{log}");
            return Ok(());
        }
        assert!(log.contains("ENV/Plugin: Using nccl-rs (v"), "{log}");
        assert!(
            log.contains("NCCL_SOCKET_IFNAME set by environment to =lo"),
            "{log}"
        );
        if support::on_nvidias() {
            assert!(log.contains("Bootstrap: Using lo:127.0.0.1"), "{log}");
        }
        Ok(())
    });
}

#[test]
fn another_interface_for_a_second_world_of_the_process_is_an_error() {
    let directory = tempfile::tempdir().unwrap();
    ranks(directory.path()).processes(|world: World| -> Outcome {
        let _inner = join_at(&world, "lo")?;
        let other = nccl_variables_for("0.0.0.0/0")?;
        if other.iter().any(|(_, value)| value == "=lo") {
            not_tested(format_args!("a second interface is needed"));
            return Ok(());
        }
        let error = join_at(&world, "0.0.0.0/0").map(drop).unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Rendezvous { .. }),
            "{error}"
        );
        for words in ["NCCL_SOCKET_IFNAME==lo, from an earlier world", "0.0.0.0/0"] {
            assert!(error.to_string().contains(words), "{error}");
        }
        Ok(())
    });
}

#[test]
fn an_address_is_of_rank_0_alone_and_says_nothing_to_nccl() {
    let directory = tempfile::tempdir().unwrap();
    ranks(directory.path()).processes(|world: World| -> Outcome {
        let inner = join_at(&world, "127.0.0.1")?;
        all_reduce(&inner)?;
        assert!(!log()?.contains("set by environment to =lo"));
        // The address set no interface for NCCL, so this setting is the first, and no error.
        join_at(&world, "lo").map(drop)?;
        Ok(())
    });
}

/// How often the log reported an exported variable that contradicts the rendezvous.
static CONTRADICTED: AtomicUsize = AtomicUsize::new(0);

struct Count;

impl<S: tracing::Subscriber> Layer<S> for Count {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        if event.metadata().name() == "nccl.environment.contradicted" {
            CONTRADICTED.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[test]
fn an_exported_variable_counts_and_the_contradiction_is_reported() {
    let directory = tempfile::tempdir().unwrap();
    let ranks = ranks(directory.path()).variable("NCCL_SOCKET_IFNAME", "^docker0");
    ranks.processes(|world: World| -> Outcome {
        let subscriber = tracing_subscriber::registry().with(Count);
        tracing::subscriber::set_global_default(subscriber)?;
        let inner = join_at(&world, "lo")?;
        assert_eq!(CONTRADICTED.load(Ordering::Relaxed), 1);
        all_reduce(&inner)?;
        let log = log()?;
        assert!(!log.contains("set by environment to =lo"), "{log}");
        assert!(
            log.contains("NCCL_SOCKET_IFNAME set by environment to ^docker0"),
            "{log}"
        );
        Ok(())
    });
}

#[test]
fn a_plugin_of_the_users_is_not_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let ranks = ranks(directory.path()).variable("NCCL_ENV_PLUGIN", "none");
    ranks.processes(|world: World| -> Outcome {
        let inner = join_at(&world, "lo")?;
        all_reduce(&inner)?;
        let log = log()?;
        let mut lines = log.lines().filter(|line| !line.contains("PROFILER/"));
        assert!(!lines.any(|line| line.contains("nccl-rs")), "{log}");
        Ok(())
    });
}

/// Returns the id of a root whose process has ended, which refuses connections.
fn id_of_a_root_that_is_gone(test: &str) -> Outcome<UniqueId> {
    let root = again(test, "root").env(ROOT, "1").output()?;
    let said = String::from_utf8(root.stdout)?;
    let id = said.lines().find_map(|line| line.strip_prefix("id "));
    let bytes: Vec<u8> = serde_json::from_str(id.ok_or_else(|| said.clone())?)?;
    Ok(UniqueId::from_bytes(bytes.try_into().map_err(|_| said)?))
}

/// The variable that makes a process a root and nothing else.
const ROOT: &str = "NCCL_TEST_ROOT";

#[test]
fn nccl_gives_up_after_as_many_retries_as_the_program_wants() {
    if std::env::var_os(ROOT).is_some() {
        nccl_emulator::install_unless_gpu().expect("an emulator or a GPU");
        let id = Library::load().and_then(|library| UniqueId::new(&library));
        println!("\nid {:?}", id.expect("an id").as_bytes());
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    ranks(directory.path()).processes(|world: World| -> Outcome {
        let retries = |sockets| {
            NetworkRetries::default().with(|retries| {
                retries.sockets = Some(sockets);
                retries.socket_pause = Some(Duration::from_millis(10));
            })
        };
        if !takes_plugins()? {
            let error = retries(2).apply().unwrap_err();
            assert!(
                matches!(error.kind(), ErrorKind::Unsupported { .. }),
                "{error}"
            );
            return Ok(());
        }
        retries(2).apply()?;
        retries(2).apply()?;
        let error = retries(3).apply().unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::InvalidConfig { .. }),
            "{error}"
        );
        assert!(
            error.to_string().contains("NCCL_SOCKET_RETRY_CNT=2"),
            "{error}"
        );
        let test = name(&nccl_gives_up_after_as_many_retries_as_the_program_wants);
        let id = id_of_a_root_that_is_gone(&test)?;
        let stream = support::device(&world)?.new_stream()?;
        let builder = Communicator::builder("orphan", id, 1, 2).stream(&stream);
        let error = builder
            .with(|comm| comm.timeouts.init = Duration::from_secs(60))
            .build()
            .unwrap_err();
        assert!(!error.is_timeout(), "{error:#}");
        let log = log()?;
        assert!(
            log.contains("retrying (2/2) after sleep for 20 msec"),
            "{log}"
        );
        Ok(())
    });
}
