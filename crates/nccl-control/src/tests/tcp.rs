//! Ranks that meet over TCP, on the loopback of this host.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};

use super::*;
use crate::Discovery;
use crate::sync::Mutex;

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

fn published(name: &str) -> std::path::PathBuf {
    std::env::temp_dir().join(format!("nccl-{name}-{}.address", std::process::id()))
}

fn meet(rendezvous: impl Fn(usize) -> Rendezvous + Sync, size: usize) {
    std::thread::scope(|scope| {
        for rank in 0..size {
            let rendezvous = rendezvous(rank).with(|meet| meet.timeout = Duration::from_secs(20));
            scope.spawn(move || {
                let world = World::join(rendezvous).unwrap();
                let parts = world.all_gather("x", &[rank as u8]).unwrap();
                assert_eq!(parts.concat(), (0..size as u8).collect::<Vec<_>>());
                assert_eq!(world.local_rank(), rank);
                world.barrier("end").unwrap();
            });
        }
    });
}

#[test]
fn ranks_meet_at_any_port_that_is_published() {
    for host in ["127.0.0.1", "::1"] {
        let path = published("any");
        let at = |rank| Rendezvous::tcp(host, 0, rank, 3).unwrap().publish(&path);
        meet(
            |rank| at(rank).with(|meet| meet.secret = Some(SECRET.into())),
            3,
        );
        assert!(
            !path.exists(),
            "the published address goes with its listener"
        );
    }
    let error = World::join(Rendezvous::tcp("127.0.0.1", 0, 0, 1).unwrap());
    assert!(error.unwrap_err().to_string().contains("publish"));
}

/// Withdraws slowly, and records which threads have withdrawn an address.
#[derive(Default)]
struct Slow {
    at: Mutex<Option<SocketAddr>>,
    withdrawn_by: Mutex<Vec<Option<String>>>,
}

impl Discovery for Slow {
    fn name(&self) -> String {
        String::from("slow")
    }

    fn publish(&self, at: SocketAddr) -> io::Result<()> {
        *self.at.lock() = Some(at);
        Ok(())
    }

    fn withdraw(&self, at: SocketAddr) {
        std::thread::sleep(Duration::from_millis(300));
        self.at.lock().take_if(|known| *known == at);
        let by = std::thread::current().name().map(str::to_owned);
        self.withdrawn_by.lock().push(by);
    }

    fn find(&self) -> io::Result<SocketAddr> {
        let at = *self.at.lock();
        at.ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

#[test]
fn an_address_is_withdrawn_on_a_thread_of_its_own_before_its_rank_has_left() {
    let discovery = Arc::new(Slow::default());
    let at = |rank| {
        Rendezvous::tcp("127.0.0.1", 0, rank, 2)
            .unwrap()
            .discovery(Arc::<Slow>::clone(&discovery))
            .with(|meet| {
                meet.timeout = Duration::from_secs(20);
                meet.secret = Some(SECRET.into());
            })
    };
    std::thread::scope(|scope| {
        let one = scope.spawn(|| World::join(at(1)).unwrap());
        let zero = World::join(at(0)).unwrap();
        // Rank 1 stays: the thread that reads the connections learns that rank 0 may leave.
        let one = one.join().unwrap();
        drop(zero);
        let by = discovery.withdrawn_by.lock().clone();
        assert_eq!(by, [Some(String::from("nccl-listen"))]);
        drop(one);
    });
}

#[test]
fn an_address_is_published_through_no_link_of_another_user() {
    let directory = tempfile::tempdir().unwrap();
    let precious = directory.path().join("precious");
    std::fs::write(&precious, "mine").unwrap();
    let path = directory.path().join("address");
    let part = directory
        .path()
        .join(format!("address.{}", std::process::id()));
    std::os::unix::fs::symlink(&precious, part).unwrap();
    let at = |rank| Rendezvous::tcp("127.0.0.1", 0, rank, 2).unwrap();
    meet(
        |rank| {
            at(rank)
                .publish(&path)
                .with(|meet| meet.secret = Some(SECRET.into()))
        },
        2,
    );
    assert_eq!(std::fs::read(&precious).unwrap(), b"mine");
}

#[test]
fn ranks_meet_at_the_first_free_port_of_a_range_whoever_listens_before_it() {
    // Silent listeners on the first two ports, like another program's server.
    let (first, _held) = (0..50)
        .find_map(|_| {
            let first = free_port();
            let a = TcpListener::bind(("127.0.0.1", first)).ok()?;
            let b = TcpListener::bind(("127.0.0.1", first.checked_add(1)?)).ok()?;
            first.checked_add(5)?;
            Some((first, (a, b)))
        })
        .unwrap();
    let at = |rank| Rendezvous::tcp("127.0.0.1", first, rank, 2).unwrap();
    meet(|rank| at(rank).up_to_port(first + 5), 2);
}

#[test]
fn a_port_that_cannot_be_had_is_said_with_its_holder() {
    let listener = TcpListener::bind("0.0.0.0:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let at = Rendezvous::tcp("127.0.0.1", port, 0, 2).unwrap();
    let error = World::join(at.clone()).unwrap_err().to_string();
    let pid = format!("pid {} (", std::process::id());
    for word in [
        "on lo (127.0.0.1)",
        &pid,
        "listens at 0.0.0.0",
        "all addresses",
    ] {
        assert!(error.contains(word), "{word:?} in {error:?}");
    }
    drop(listener);

    // An outgoing connection that happens to use that port.
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(server.local_addr().unwrap()).unwrap();
    let port = client.local_addr().unwrap().port();
    let at = Rendezvous::tcp("127.0.0.1", port, 0, 2).unwrap();
    let error = World::join(at).unwrap_err().to_string();
    for word in ["has a connection from", &pid, "ip_local_port_range"] {
        assert!(error.contains(word), "{word:?} in {error:?}");
    }
}

#[test]
fn what_is_left_of_ended_connections_keeps_nobody_out() {
    let port = free_port();
    for _ in 0..3 {
        meet(
            |rank| Rendezvous::tcp("127.0.0.1", port, rank, 3).unwrap(),
            3,
        );
    }
}

#[test]
fn the_wildcard_and_addresses_of_others_are_refused_with_what_there_is() {
    for (host, words) in [
        (
            "0.0.0.0",
            &["no address that others could reach", "lo 127.0.0.1"][..],
        ),
        (
            "203.0.113.7",
            &["not an address of this host", "lo 127.0.0.1"],
        ),
    ] {
        let error = World::join(Rendezvous::tcp(host, 29_400, 0, 2).unwrap());
        let error = error.unwrap_err().to_string();
        for word in words {
            assert!(error.contains(word), "{word:?} in {error:?}");
        }
    }
    let asked = published("asked");
    let at = |rank| {
        let at = Rendezvous::tcp("127.0.0.1", free_port(), rank, 1).unwrap();
        at.interface("*").unwrap().publish(&asked)
    };
    World::join(at(0)).unwrap();
    let lo = Rendezvous::tcp("ignored", free_port(), 0, 1).unwrap();
    World::join(lo.interface("lo").unwrap()).unwrap();
}

#[test]
fn nobody_at_a_port_and_somebody_silent_are_told_apart() {
    let port = free_port();
    let at = || {
        let at = Rendezvous::tcp("127.0.0.1", port, 1, 2).unwrap();
        at.with(|meet| meet.timeout = Duration::from_millis(400))
    };
    let error = World::join(at()).unwrap_err().to_string();
    assert!(error.contains("refused"), "{error}");
    let _listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
    let error = World::join(at()).unwrap_err().to_string();
    assert!(error.contains("does not answer"), "{error}");
}

#[test]
fn a_name_of_slurm_that_does_not_resolve_ends_the_wait_of_every_rank() {
    let read = |rank: &'static str| {
        let variables = [
            ("SLURM_PROCID", rank),
            ("SLURM_NTASKS", "2"),
            ("SLURM_TASKS_PER_NODE", "1(x2)"),
            ("SLURM_STEP_NODELIST", "n[1-2].invalid"),
        ];
        Rendezvous::from_variables(|name| {
            let set = variables.iter().find(|(key, _)| *key == name)?;
            Some(set.1.to_owned())
        })
        .unwrap()
        .with(|meet| meet.timeout = Duration::from_secs(120))
    };
    for rank in ["0", "1"] {
        let begun = Instant::now();
        let error = World::join(read(rank)).unwrap_err().to_string();
        for word in [
            "\"n1.invalid\"",
            "SLURM_STEP_NODELIST",
            "NCCL_RUN_RENDEZVOUS",
        ] {
            assert!(error.contains(word), "{word:?} in {error:?}");
        }
        assert!(!error.contains("is it running"), "{error}");
        assert!(begun.elapsed() < Duration::from_secs(60), "{error}");
    }
}

#[test]
fn a_port_that_is_taken_on_another_address_only_is_free_on_this_one() {
    let other = TcpListener::bind("127.0.0.2:0").unwrap();
    let port = other.local_addr().unwrap().port();
    meet(
        |rank| Rendezvous::tcp("127.0.0.1", port, rank, 2).unwrap(),
        2,
    );
}

#[test]
fn a_range_that_is_taken_is_said_port_by_port_with_who_has_it() {
    let (first, _held) = (0..50)
        .find_map(|_| {
            let first = free_port();
            let held: Vec<_> = (first..first.checked_add(3)?)
                .map_while(|port| TcpListener::bind(("127.0.0.1", port)).ok())
                .collect();
            (held.len() == 3).then_some((first, held))
        })
        .unwrap();
    let at = Rendezvous::tcp("127.0.0.1", first, 0, 2).unwrap();
    let begun = Instant::now();
    let error = World::join(at.up_to_port(first + 2))
        .unwrap_err()
        .to_string();
    println!("said after {:?}: {error}", begun.elapsed());
    for port in first..first + 3 {
        let word = format!(
            "port {port} on lo (127.0.0.1): pid {} (",
            std::process::id()
        );
        assert!(error.contains(&word), "{word:?} in {error:?}");
    }
}

#[test]
fn a_port_in_time_wait_can_be_had_at_once() {
    // The side that closes first keeps the port in TIME_WAIT: here, the listener's.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    let client = TcpStream::connect(at).unwrap();
    let (server, _) = listener.accept().unwrap();
    drop(server);
    drop(listener);
    std::io::Read::read_to_end(&mut &client, &mut Vec::new()).unwrap();
    drop(client);
    let left = crate::port_owner::port_owners(at);
    let text: Vec<_> = left.iter().map(ToString::to_string).collect();
    assert!(
        text.iter().any(|text| text.contains("TIME_WAIT")),
        "{text:?}"
    );
    println!(
        "in the way, for one that does not ask for its reuse: {}",
        text.join("; ")
    );
    let begun = Instant::now();
    meet(
        |rank| Rendezvous::tcp("127.0.0.1", at.port(), rank, 2).unwrap(),
        2,
    );
    assert!(begun.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_rank_0_that_keeps_nobody_out_over_tcp_says_so_once_in_each_process() {
    const CHILD: &str = "NCCL_TEST_OPEN_DOOR";
    let Some(kind) = std::env::var_os(CHILD) else {
        let warnings = |kind: &str| {
            let test =
                "tests::tcp::a_rank_0_that_keeps_nobody_out_over_tcp_says_so_once_in_each_process";
            let output = std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", test, "--nocapture"])
                .env(CHILD, kind)
                .output()
                .unwrap();
            assert!(output.status.success(), "{output:?}");
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            let count = said.matches("without a secret").count();
            let remedy = "(umask 077; openssl rand -hex 32 > FILE)";
            assert!(count == 0 || said.contains(remedy), "{said}");
            count
        };
        let counts = ["open", "secret", "unix"].map(warnings);
        assert_eq!(counts, [1, 0, 0]);
        return;
    };
    for _ in 0..3 {
        let alone = match kind.to_str().unwrap() {
            "open" => Rendezvous::tcp("127.0.0.1", free_port(), 0, 1).unwrap(),
            "secret" => {
                let alone = Rendezvous::tcp("127.0.0.1", free_port(), 0, 1).unwrap();
                alone.with(|meet| meet.secret = Some(SECRET.into()))
            }
            _ => rendezvous("open", 0, 1),
        };
        World::join(alone).unwrap();
    }
}
