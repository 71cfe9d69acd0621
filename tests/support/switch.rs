//! Hosts that are network namespaces on one switch.

#![allow(dead_code, reason = "not every test binary uses all of it")]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// Where an interface leads.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// To the switch.
    Cable,
    /// Up, and to no other host, like those that container engines create.
    Nowhere,
}

/// Name, kind and addresses of an interface.
pub(crate) type Interface<'a> = (&'a str, Kind, &'a [&'a str]);

/// `h1`, `h2`, …: each a network namespace with a host name of its own.
pub(crate) struct Hosts {
    prefix: String,
    count: usize,
}

pub(crate) fn run(program: &str, arguments: &str) {
    try_run(program, arguments).unwrap_or_else(|why| panic!("{why}"));
}

pub(crate) fn try_run(program: &str, arguments: &str) -> Result<(), String> {
    let output = Command::new(program)
        .args(arguments.split_whitespace())
        .output()
        .map_err(|error| format!("{program}: {error:#}"))?;
    if output.status.success() {
        return Ok(());
    }
    let why = String::from_utf8_lossy(&output.stderr);
    Err(format!("{program} {arguments}: {why}"))
}

impl Hosts {
    /// `None`, with a message, where this process may not create them.
    pub(crate) fn new(hosts: &[&[Interface<'_>]]) -> Option<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let prefix = format!("ncclp-{}-{number}", std::process::id());
        let made = Command::new("ip").args(["netns", "add", &prefix]).output();
        if !made.is_ok_and(|made| made.status.success()) {
            eprintln!("SKIPPED: network namespaces need root and ip of iproute2");
            return None;
        }
        let built = Self {
            prefix,
            count: hosts.len(),
        };
        let switch = &built.prefix;
        run("ip", &format!("-n {switch} link add switch type bridge"));
        run("ip", &format!("-n {switch} link set switch up"));
        for (host, interfaces) in hosts.iter().enumerate() {
            let own = built.namespace(host);
            run("ip", &format!("netns add {own}"));
            run("ip", &format!("-n {own} link set lo up"));
            for (place, (name, kind, addresses)) in interfaces.iter().enumerate() {
                match kind {
                    Kind::Cable => {
                        let far = format!("port{host}-{place}");
                        run(
                            "ip",
                            &format!(
                                "link add {name} netns {own} type veth peer name {far} netns {switch}"
                            ),
                        );
                        run(
                            "ip",
                            &format!("-n {switch} link set {far} master switch up"),
                        );
                    }
                    // Its other end exists as well, so that it is up.
                    Kind::Nowhere => {
                        run(
                            "ip",
                            &format!("-n {own} link add {name} type veth peer name {name}x"),
                        );
                        run("ip", &format!("-n {own} link set {name}x up"));
                    }
                }
                run("ip", &format!("-n {own} link set {name} up"));
                for address in *addresses {
                    let nodad = if address.contains(':') { "nodad" } else { "" };
                    run(
                        "ip",
                        &format!("-n {own} addr add {address} dev {name} {nodad}"),
                    );
                }
            }
        }
        Some(built)
    }

    pub(crate) fn namespace(&self, host: usize) -> String {
        format!("{}-h{}", self.prefix, host + 1)
    }

    /// The namespace of the switch; the end of a host's first cable there is called `port0-0`, `port1-0`, …
    pub(crate) fn switch(&self) -> &str {
        &self.prefix
    }

    /// Runs a command in a host's namespace.
    pub(crate) fn on(&self, host: usize, command: &str) {
        self.try_on(host, command)
            .unwrap_or_else(|why| panic!("{why}"));
    }

    /// As [`on`](Self::on), where the kernel may not support it.
    pub(crate) fn try_on(&self, host: usize, command: &str) -> Result<(), String> {
        try_run(
            "ip",
            &format!("netns exec {} {command}", self.namespace(host)),
        )
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for host in 0..self.count {
            let _ = Command::new("ip")
                .args(["netns", "del", &self.namespace(host)])
                .status();
        }
        let _ = Command::new("ip")
            .args(["netns", "del", &self.prefix])
            .status();
    }
}

/// The variable with the network namespace of a rank's host, for its world. The emulator's NCCL does not cross
/// namespaces, so it stays in that of the test; only the ranks' own connections are cut off.
pub(crate) const NAMESPACE: &str = "NCCL_TEST_NAMESPACE";

/// Runs `body` on a thread that is in the namespace of this rank's host.
pub(crate) fn on_the_host<T: Send>(body: impl FnOnce() -> T + Send) -> T {
    let Ok(name) = std::env::var(NAMESPACE) else {
        return body();
    };
    let inside = || {
        let namespace = File::open(format!("/run/netns/{name}")).expect("a namespace");
        // SAFETY: the descriptor is open; this thread alone moves, and does nothing else afterwards.
        let moved = unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) };
        assert_eq!(moved, 0, "{}", std::io::Error::last_os_error());
        body()
    };
    std::thread::scope(|scope| scope.spawn(inside).join().expect("no panic"))
}
