//! Isolated hosts for tests: resources of one host are invisible on another, and faults of a cable affect its traffic.
//!
//! Needs root; without, each test reports that it was not run.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nccl_tools::testing::lives;

use crate::hosts::{Cables, IsolatedHosts, Plan};

/// Long enough for any traffic.
const SOON: Duration = Duration::from_secs(20);

fn two() -> Option<IsolatedHosts> {
    IsolatedHosts::new(&Plan::default())
}

fn sh(script: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", script]);
    command
}

/// The ends of a connection from the first host to the second.
fn connection(hosts: &IsolatedHosts) -> (TcpStream, TcpStream) {
    let listener = hosts.inside(1, || TcpListener::bind("0.0.0.0:0").expect("a listener"));
    let port = listener.local_addr().expect("an address").port();
    let address = SocketAddr::from((hosts.address(1), port));
    let near = hosts.inside(0, || TcpStream::connect_timeout(&address, SOON));
    let near = near.expect("a way");
    let (far, _) = listener.accept().expect("a connection");
    for end in [&near, &far] {
        end.set_nodelay(true).unwrap();
        end.set_read_timeout(Some(SOON)).unwrap();
    }
    (near, far)
}

/// The time of a byte there and back.
fn round_trip(near: &mut TcpStream, far: &mut TcpStream) -> Duration {
    let begun = Instant::now();
    let mut byte = [7];
    near.write_all(&byte).unwrap();
    far.read_exact(&mut byte).unwrap();
    far.write_all(&byte).unwrap();
    near.read_exact(&mut byte).unwrap();
    begun.elapsed()
}

/// Bytes per second from one end to the other.
fn rate(near: &mut TcpStream, far: &mut TcpStream, bytes: usize) -> f64 {
    let begun = Instant::now();
    thread::scope(|scope| {
        scope.spawn(|| near.write_all(&vec![1; bytes]).unwrap());
        far.read_exact(&mut vec![0; bytes]).unwrap();
    });
    bytes as f64 / begun.elapsed().as_secs_f64()
}

#[test]
fn each_host_has_a_name_of_its_own() {
    let Some(hosts) = two() else { return };
    let name = || Command::new("uname").arg("-n").output().unwrap().stdout;
    let before = name();
    for (host, expected) in ["host1", "host2"].into_iter().enumerate() {
        assert_eq!(
            hosts.output(host, Command::new("uname").arg("-n")),
            expected
        );
    }
    assert_eq!(name(), before, "that of the machine is what it was");
}

#[test]
fn shared_memory_is_shared_by_the_processes_of_one_host() {
    let plan = Plan {
        shared_memory: 1 << 20,
        ..Plan::default()
    };
    let Some(hosts) = IsolatedHosts::new(&plan) else {
        return;
    };
    let name = format!("nccl-isolated-{}", std::process::id());
    hosts.output(0, &mut sh(&format!("echo here >/dev/shm/{name}")));
    assert_eq!(
        hosts.output(0, &mut sh(&format!("cat /dev/shm/{name}"))),
        "here"
    );
    assert_eq!(hosts.output(1, &mut sh("ls /dev/shm")), "");
    assert!(!fs::exists(format!("/dev/shm/{name}")).unwrap());
    let fill = "head -c 2000000 /dev/zero >/dev/shm/much 2>/dev/null; stat -c %s /dev/shm/much";
    assert_eq!(hosts.output(1, &mut sh(fill)), (1 << 20).to_string());
}

#[test]
fn processes_are_seen_on_their_own_host_alone_and_end_with_it() {
    let Some(hosts) = two() else { return };
    let word = format!("isolated-{}", std::process::id());
    let script = format!("echo here; : {word}; read -r _");
    let mut command = sh(&script);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = hosts.spawn(0, &mut command).unwrap();
    let mut said = [0; 4];
    child
        .stdout
        .as_mut()
        .unwrap()
        .read_exact(&mut said)
        .unwrap();
    // The searching process does not find itself: the word is not whole in the command lines of it and its children.
    let (start, rest) = word.split_at(4);
    let look = format!(
        "w={start}; all=$(cat /proc/[0-9]*/cmdline | tr '\\0' ' '); \
         case \"$all\" in *\"${{w}}{rest}\"*) echo 1;; *) echo 0;; esac"
    );
    assert_eq!(hosts.output(0, &mut sh(&look)), "1");
    assert_eq!(hosts.output(1, &mut sh(&look)), "0");
    assert!(lives(child.id()));
    let here = thread::spawn(|| Command::new("true").status().unwrap().success());
    assert!(here.join().unwrap(), "this process starts others as before");
    drop(hosts);
    let status = child.wait().unwrap();
    assert!(!status.success(), "{status}");
}

#[test]
fn a_command_starts_in_the_directory_of_the_test() {
    let Some(hosts) = two() else { return };
    let here = std::env::current_dir().unwrap();
    assert_eq!(
        hosts.output(1, &mut Command::new("pwd")),
        here.to_str().unwrap()
    );
}

#[test]
fn nothing_passes_a_cable_that_is_cut_until_it_is_mended() {
    for cables in [Cables::Direct, Cables::Delayed] {
        let plan = Plan {
            cables,
            ..Plan::default()
        };
        let Some(hosts) = IsolatedHosts::new(&plan) else {
            return;
        };
        let (mut near, mut far) = connection(&hosts);
        round_trip(&mut near, &mut far);
        hosts.cut(1);
        near.write_all(&[1]).expect("nobody is told");
        far.set_read_timeout(Some(Duration::from_millis(500)))
            .unwrap();
        let silence = far.read(&mut [0]).expect_err("nothing passes");
        assert_eq!(silence.kind(), ErrorKind::WouldBlock);
        hosts.mend(1);
        far.set_read_timeout(Some(SOON)).unwrap();
        assert_eq!(far.read(&mut [0]).expect("it is sent again"), 1);
    }
}

#[test]
fn a_throttle_sets_the_rate() {
    let Some(hosts) = two() else { return };
    let (mut near, mut far) = connection(&hosts);
    let free = rate(&mut near, &mut far, 16 << 20);
    let bits = 40_000_000;
    if let Err(unable) = hosts.throttle(1, bits) {
        nccl_tools::gpu_check::not_tested(format_args!("{unable}"));
        return;
    }
    let throttled = rate(&mut near, &mut far, 4 << 20);
    let asked = bits as f64 / 8.0;
    assert!(
        (0.05..1.2).contains(&(throttled / asked)),
        "{throttled} of {asked} bytes per second, {free} without"
    );
    assert!(free > 4.0 * throttled, "{free} bytes per second without");
    hosts.unthrottle(1);
    let again = rate(&mut near, &mut far, 16 << 20);
    assert!(
        again > 4.0 * throttled,
        "{again} bytes per second afterwards"
    );
}

#[test]
fn a_delay_is_that_of_each_direction() {
    let plan = Plan {
        cables: Cables::Delayed,
        ..Plan::default()
    };
    let Some(hosts) = IsolatedHosts::new(&plan) else {
        return;
    };
    let (mut near, mut far) = connection(&hosts);
    let best = |near: &mut TcpStream, far: &mut TcpStream| {
        let all = (0..5).map(|_| round_trip(near, far));
        all.min().expect("some")
    };
    let before = best(&mut near, &mut far);
    assert!(before < Duration::from_millis(20), "{before:?}");
    hosts.delay(1, Duration::from_millis(30));
    let delayed = best(&mut near, &mut far);
    let expected = Duration::from_millis(60)..Duration::from_millis(90);
    assert!(expected.contains(&delayed), "{delayed:?}");
    hosts.delay(1, Duration::ZERO);
    let after = best(&mut near, &mut far);
    assert!(after < Duration::from_millis(20), "{after:?}");
    // A delay does not throttle.
    let rate = rate(&mut near, &mut far, 8 << 20);
    assert!(rate > 2e6, "{rate} bytes per second");
}

#[test]
fn a_filter_keeps_out_what_it_names() {
    let Some(hosts) = two() else { return };
    let listener = hosts.inside(1, || TcpListener::bind("0.0.0.0:0").unwrap());
    let port = listener.local_addr().unwrap().port();
    let address = SocketAddr::from((hosts.address(1), port));
    let connect = |patience| hosts.inside(0, || TcpStream::connect_timeout(&address, patience));
    connect(SOON).expect("a way");
    for (verdict, expected) in [
        ("drop", ErrorKind::TimedOut),
        ("reject with tcp reset", ErrorKind::ConnectionRefused),
    ] {
        if let Err(unable) = hosts.filter(1, &format!("tcp dport {port} {verdict}")) {
            nccl_tools::gpu_check::not_tested(format_args!("{unable}"));
            return;
        }
        let error = connect(Duration::from_millis(500)).expect_err("it is kept out");
        assert_eq!(error.kind(), expected, "{verdict}");
        hosts.unfilter(1);
        connect(SOON).expect("a way again");
    }
}

#[test]
fn a_reset_ends_the_connections_that_it_names() {
    let Some(hosts) = two() else { return };
    let (near, mut far) = connection(&hosts);
    let (mut other_near, mut other_far) = connection(&hosts);
    let port = far.local_addr().unwrap().port();
    match hosts.reset(0, &format!("dport = {port}")) {
        Ok(count) => assert_eq!(count, 1),
        Err(unable) => {
            nccl_tools::gpu_check::not_tested(format_args!("{unable}"));
            return;
        }
    }
    let error = far.read(&mut [0]).expect_err("it was reset");
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    round_trip(&mut other_near, &mut other_far);
    drop(near);
}
