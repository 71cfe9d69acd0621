//! Ranks as processes of a test, on this host or on hosts that are network namespaces.
//!
//! A test binary that uses this has a test `a_rank`, which calls [`run_a_rank`]: the code of the ranks.

#![allow(dead_code, reason = "not every test binary uses all of it")]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use nccl::{Rendezvous, World};

/// The code of a rank; returns at once if this process is none.
pub(crate) fn run_a_rank() {
    let Ok(script) = std::env::var("NCCL_TEST_SCRIPT") else {
        return;
    };
    let limit = Duration::from_millis(std::env::var("NCCL_TEST_LIMIT").unwrap().parse().unwrap());
    let rendezvous = Rendezvous::from_env()
        .unwrap()
        .with(|meet| meet.timeout = limit);
    if let Ok(files) = std::env::var("NCCL_TEST_FILES") {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        let current = Some(files.parse().unwrap());
        let limit = rustix::process::Rlimit { current, ..limit };
        rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
    }
    let run = || -> nccl::Result<()> {
        let world = World::join(rendezvous)?;
        println!("met as local rank {}", world.local_rank());
        let own = [world.rank() as u8];
        let parts = world.all_gather("ranks", &own)?;
        assert_eq!(parts.len(), world.size());
        match &script[..] {
            "meet" | "meet cheaply" => world.barrier("end"),
            "die" => {
                let own = rustix::process::getpid();
                rustix::process::kill_process(own, rustix::process::Signal::KILL).unwrap();
                Ok(())
            }
            "leave a child and wait" => {
                // SAFETY: the child only sleeps, and ends without any of this process's code.
                unsafe {
                    if libc::fork() == 0 {
                        libc::sleep(12);
                        libc::_exit(0);
                    }
                }
                world.phase("waiting");
                let world = world.with_timeout(Duration::from_secs(20));
                world.get("a key that nobody sets").map(drop)
            }
            "fail while starting" => {
                world.phase("look for the ranks of this host");
                let why = "cannot tell which ranks are on this host: permission denied";
                world.fail(&std::io::Error::other(why));
                Ok(())
            }
            "wait in a phase" => {
                world.phase("waiting");
                let world = world.with_timeout(Duration::from_secs(20));
                world.get("a key that nobody sets").map(drop)
            }
            "hear of ranks 0 and 1" => {
                world.phase("waiting");
                let world = world.with_timeout(Duration::from_secs(20));
                let first = world.get("a key that nobody sets").expect_err("it dies");
                world.phase("heard of rank 0");
                if world.rank() == 1 {
                    std::thread::sleep(Duration::from_secs(20));
                }
                let rest: Vec<_> = (1..world.size()).collect();
                let second = world.subgroup("rest", &rest)?.barrier("rest");
                let second = second.expect_err("it dies as well");
                world.phase("heard of rank 1");
                println!("result: {first} / {second}");
                // So that an observer finds the successor.
                std::thread::sleep(Duration::from_secs(1));
                Ok(())
            }
            "go on without the dead" => {
                let mut world = world;
                world.phase("waiting");
                loop {
                    while world.departed().is_empty() {
                        std::thread::sleep(Duration::from_millis(2));
                    }
                    let next = world.next_generation(Duration::from_secs(60))?;
                    world = next;
                    // It stays: an observer enters the generation when it has received that.
                    world.phase(&format!("in a generation of {}", world.size()));
                    if world.size() == 1 {
                        println!("result: alone");
                        // So that an observer receives it.
                        std::thread::sleep(Duration::from_secs(1));
                        return Ok(());
                    }
                }
            }
            "go on once" => {
                world.phase("waiting");
                while world.departed().is_empty() {
                    std::thread::sleep(Duration::from_millis(2));
                }
                let next = world.next_generation(Duration::from_secs(30))?;
                next.barrier("all that are left")?;
                let before: Vec<_> = (0..next.size())
                    .map(|rank| next.previous_rank(rank))
                    .collect();
                println!("result: rank {} of {before:?}", next.rank());
                Ok(())
            }
            "spin and be heard" => {
                let seconds = std::env::var("NCCL_TEST_SOAK_SECONDS");
                let seconds = seconds.map_or(3, |seconds| seconds.parse().unwrap());
                let until = std::time::Instant::now() + Duration::from_secs(seconds);
                let (mut worst, mut heard) = (Duration::ZERO, 0);
                while std::time::Instant::now() < until {
                    (0..100_000).for_each(|_| std::hint::spin_loop());
                    let stats = nccl::stats();
                    let ages = stats.worlds.iter().flat_map(|world| &world.heartbeat_ages);
                    heard = ages.clone().count();
                    worst = ages
                        .map(|(_, age)| *age)
                        .max()
                        .unwrap_or_default()
                        .max(worst);
                }
                world.barrier("end")?;
                println!("result: {heard} {}", worst.as_millis());
                Ok(())
            }
            "wait 6 s for all" => {
                let world = world.with_timeout(Duration::from_secs(6));
                world.barrier("wait")
            }
            "wait for all" => world.with_timeout(Duration::from_secs(20)).barrier("cut"),
            "stand still" => {
                std::thread::sleep(Duration::from_secs(20));
                Ok(())
            }
            other => panic!("{other}"),
        }
    };
    match run() {
        Ok(()) if script == "meet cheaply" => {
            let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
            println!("result: {}", time.tv_sec * 1000 + time.tv_nsec / 1_000_000);
        }
        Ok(()) => println!("result: fine"),
        Err(error) => println!("result: {error:#}"),
    }
}

/// Two namespaces, joined by a cable whose ends have different names, each with an interface that looks like docker's
/// and leads nowhere.
pub(crate) struct Hosts {
    pub(crate) names: [String; 2],
}

pub(crate) const ENDS: [&str; 2] = ["eth7", "ens3"];

pub(crate) fn ip(arguments: &str) {
    let output = Command::new("ip")
        .args(arguments.split_whitespace())
        .output()
        .expect("ip of iproute2");
    assert!(
        output.status.success(),
        "ip {arguments}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

impl Hosts {
    /// `None`, with a message, where this process may not create them.
    pub(crate) fn new(addresses: [&[&str]; 2]) -> Option<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = |end| format!("nccl-{}-{number}{end}", std::process::id());
        let hosts = Self {
            names: [name("a"), name("b")],
        };
        let [a, b] = &hosts.names;
        let made = Command::new("ip").args(["netns", "add", a]).output();
        if !made.is_ok_and(|made| made.status.success()) {
            eprintln!("SKIPPED: network namespaces need root and ip of iproute2");
            return None;
        }
        ip(&format!("netns add {b}"));
        ip(&format!(
            "link add {} netns {a} type veth peer name {} netns {b}",
            ENDS[0], ENDS[1]
        ));
        for (host, end, addresses) in [(a, ENDS[0], addresses[0]), (b, ENDS[1], addresses[1])] {
            ip(&format!("-n {host} link set lo up"));
            ip(&format!("-n {host} link add docker0 type bridge"));
            ip(&format!("-n {host} addr add 172.17.0.1/16 dev docker0"));
            ip(&format!("-n {host} link set {end} up"));
            for address in addresses {
                let nodad = if address.contains(':') { "nodad" } else { "" };
                ip(&format!("-n {host} addr add {address} dev {end} {nodad}"));
            }
        }
        Some(hosts)
    }

    /// Sets the host's `/etc/hosts`.
    pub(crate) fn know(&self, host: usize, names: &str) {
        // The directory whose files `ip netns exec` mounts over those of `/etc`.
        let directory = format!("/etc/netns/{}", self.names[host]);
        std::fs::create_dir_all(&directory).expect("a directory of the namespace");
        std::fs::write(format!("{directory}/hosts"), names).expect("its hosts");
    }

    /// Starts a rank on host `host`.
    pub(crate) fn start(
        &self,
        host: usize,
        rank: usize,
        size: usize,
        script: &str,
        more: &[(&str, &str)],
    ) -> Child {
        let inside = ["ip", "netns", "exec", &self.names[host]];
        start(&inside, rank, size, script, more)
    }
}

/// Starts a rank through the command `before`.
pub(crate) fn start(
    before: &[&str],
    rank: usize,
    size: usize,
    script: &str,
    more: &[(&str, &str)],
) -> Child {
    let before = [&["timeout", "-s", "KILL", "40"], before].concat();
    start_with(&before, rank, size, script, more)
}

/// Starts a rank as a child of this process, or of the command `before`.
pub(crate) fn start_with(
    before: &[&str],
    rank: usize,
    size: usize,
    script: &str,
    more: &[(&str, &str)],
) -> Child {
    let own = std::env::current_exe().unwrap();
    let mut words: Vec<_> = before.iter().map(std::ffi::OsStr::new).collect();
    words.push(own.as_os_str());
    Command::new(words[0])
        .args(&words[1..])
        .args(["--exact", "a_rank", "--nocapture", "--test-threads=1"])
        .env("NCCL_TEST_SCRIPT", script)
        .env("NCCL_TEST_LIMIT", "15000")
        .env("NCCL_RUN_RANK", rank.to_string())
        .env("NCCL_RUN_WORLD_SIZE", size.to_string())
        .env("NCCL_RUN_SECRET", "hush, and nobody hears it")
        .envs(more.iter().copied())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("a rank")
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = Command::new("ip").args(["netns", "del", name]).status();
            let _ = std::fs::remove_dir_all(format!("/etc/netns/{name}"));
        }
    }
}

pub(crate) fn result(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stdout);
    let at = text.find("result: ");
    let at = at.unwrap_or_else(|| {
        panic!(
            "no result in {text}{}",
            String::from_utf8_lossy(&output.stderr)
        )
    });
    let rest = &text[at + 8..];
    rest.lines().next().unwrap_or(rest).to_owned()
}

/// The result line of a rank; a child of it may hold its output open for longer.
pub(crate) fn last_words(mut rank: Child) -> String {
    let mut out = BufReader::new(rank.stdout.take().expect("a pipe"));
    let mut line = String::new();
    while !line.starts_with("result: ") {
        line.clear();
        let read = out.read_line(&mut line).expect("its output");
        assert!(read > 0, "no result");
    }
    rank.wait().expect("its end");
    line["result: ".len()..].trim_end().to_owned()
}

pub(crate) fn results(ranks: Vec<Child>) -> Vec<String> {
    ranks
        .into_iter()
        .map(|rank| result(&rank.wait_with_output().expect("its output")))
        .collect()
}
