//! Hosts that share only a kernel and the files of its disk, for tests on one machine.
//!
//! A host has network, PID, UTS, IPC and mount namespaces of its own: its own name, addresses, processes, shared memory
//! in `/dev/shm`, `/proc` and `/sys`. NCCL distinguishes hosts by these. A cable leads from its `eth0` to a switch; it
//! can be cut, throttled and delayed, and its traffic can be filtered and reset.
//!
//! The first process of a host ends with the test, however that ends, and all processes of the host end with it.

#![allow(dead_code, reason = "not every test binary uses all of it")]

use std::ffi::CString;
use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::delayed_cable::DelayedCable;
use crate::switch::{Hosts, Interface, Kind, run, try_run};

/// Why a feature cannot be tried on this machine.
#[derive(Debug)]
pub(crate) struct Unable(String);

impl fmt::Display for Unable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The kind of cables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cables {
    /// The kernel's: fast, and without a delay.
    Direct,
    /// A thread's, which can delay its traffic: some 100 MB/s.
    Delayed,
}

/// The properties of the hosts.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) hosts: usize,
    pub(crate) cables: Cables,
    /// Bytes of `/dev/shm` of each host.
    pub(crate) shared_memory: u64,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            hosts: 2,
            cables: Cables::Direct,
            shared_memory: 1 << 30,
        }
    }
}

/// `host1`, `host2`, … with the addresses 10.78.0.1, 10.78.0.2, …
pub(crate) struct IsolatedHosts {
    // First, so that they are dropped before the network that they are in.
    hosts: Vec<Host>,
    cables: Vec<DelayedCable>,
    network: Hosts,
}

/// The namespaces of a host, which its first process holds.
struct Host {
    // Taken on drop.
    first: Option<Child>,
    /// Of that process.
    pidfd: OwnedFd,
}

/// The interface of each host.
const INTERFACE: &str = "eth0";

/// The script of a host's first process. A pipe from the test is its standard input: it ends when the test does.
const FIRST: &str = r#"
mount --make-rprivate / &&
mount -t proc proc /proc &&
mount -t sysfs sysfs /sys &&
mount -t tmpfs -o "size=$2" tmpfs /dev/shm &&
echo "$1" >/proc/sys/kernel/hostname &&
echo ready &&
read -r _
"#;

/// The namespaces of a host, except that of processes, which only children enter.
const NAMESPACES: libc::c_int =
    libc::CLONE_NEWNET | libc::CLONE_NEWNS | libc::CLONE_NEWUTS | libc::CLONE_NEWIPC;

impl IsolatedHosts {
    /// `None`, with a message, where this process may not create them.
    pub(crate) fn new(plan: &Plan) -> Option<Self> {
        let addresses: Vec<String> = (0..plan.hosts)
            .map(|host| format!("{}/24", address(host)))
            .collect();
        let direct = plan.cables == Cables::Direct;
        let lists: Vec<[&str; 1]> = addresses.iter().map(|address| [&**address]).collect();
        let interfaces: Vec<Vec<Interface<'_>>> = lists
            .iter()
            .map(|list| match direct {
                true => vec![(INTERFACE, Kind::Cable, &list[..])],
                false => Vec::new(),
            })
            .collect();
        let interfaces: Vec<&[Interface<'_>]> = interfaces.iter().map(|all| &all[..]).collect();
        let network = Hosts::new(&interfaces)?;
        let mut made = Self {
            hosts: Vec::new(),
            cables: Vec::new(),
            network,
        };
        for (host, address) in addresses.iter().enumerate() {
            let laid = match direct {
                true => Ok(()),
                false => made.lay_cable(host, address),
            };
            let begun = laid.and_then(|()| Host::begin(&made.network.namespace(host), host, plan));
            match begun {
                Ok(begun) => made.hosts.push(begun),
                Err(error) => {
                    nccl_tools::gpu_check::not_tested(format_args!(
                        "hosts with namespaces of their own: {error:#}"
                    ));
                    return None;
                }
            }
        }
        Some(made)
    }

    fn lay_cable(&mut self, host: usize, address: &str) -> io::Result<()> {
        let own = self.network.namespace(host);
        let (switch, port) = (self.network.switch(), port(host));
        let cable = DelayedCable::lay((&own, INTERFACE), (switch, &port))?;
        run(
            "ip",
            &format!("-n {switch} link set {port} master switch up"),
        );
        run("ip", &format!("-n {own} link set {INTERFACE} up"));
        run(
            "ip",
            &format!("-n {own} addr add {address} dev {INTERFACE}"),
        );
        self.cables.push(cable);
        Ok(())
    }

    pub(crate) fn address(&self, host: usize) -> Ipv4Addr {
        address(host)
    }

    /// Starts a command on a host. Its process number differs here and on the host.
    pub(crate) fn spawn(&self, host: usize, command: &mut Command) -> io::Result<Child> {
        let pidfd = self.hosts[host].pidfd.as_raw_fd();
        let directory = match command.get_current_dir() {
            Some(directory) => directory.to_owned(),
            None => std::env::current_dir()?,
        };
        let directory = CString::new(directory.as_os_str().as_bytes())?;
        let in_child = move || {
            enter(pidfd, NAMESPACES)?;
            // Another mount namespace begins at its root.
            // SAFETY: the path is a C string that the closure owns.
            match unsafe { libc::chdir(directory.as_ptr()) } {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        };
        // SAFETY: between fork and exec the closure makes two system calls, and allocates nothing.
        unsafe { command.pre_exec(in_child) };
        let own = File::open("/proc/self/ns/pid")?;
        enter(pidfd, libc::CLONE_NEWPID)?;
        let child = command.spawn();
        // The thread itself has not moved; this restores the namespace of its later children.
        enter(own.as_raw_fd(), libc::CLONE_NEWPID)?;
        child
    }

    /// The output of a command on a host; the command must succeed.
    pub(crate) fn output(&self, host: usize, command: &mut Command) -> String {
        let child = self.spawn(host, command.stdout(Stdio::piped()));
        let output = child.and_then(Child::wait_with_output).expect("a process");
        assert!(output.status.success(), "{command:?}: {}", output.status);
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    /// Runs `body` on a thread that is in the network of a host. A socket stays in the network where it was created.
    pub(crate) fn inside<T: Send>(&self, host: usize, body: impl FnOnce() -> T + Send) -> T {
        let pidfd = self.hosts[host].pidfd.as_raw_fd();
        let inside = || {
            enter(pidfd, libc::CLONE_NEWNET).expect("the network of a host");
            body()
        };
        std::thread::scope(|scope| scope.spawn(inside).join().expect("no panic"))
    }

    /// Stops all traffic; connections are not reset.
    pub(crate) fn cut(&self, host: usize) {
        self.on_port(host, "down");
    }

    /// Restores the traffic after [`cut`](Self::cut).
    pub(crate) fn mend(&self, host: usize) {
        self.on_port(host, "up");
    }

    fn on_port(&self, host: usize, state: &str) {
        let (switch, port) = (self.network.switch(), port(host));
        run("ip", &format!("-n {switch} link set {port} {state}"));
    }

    /// Limits the traffic to `bits` per second in each direction.
    pub(crate) fn throttle(&self, host: usize, bits: u64) -> Result<(), Unable> {
        let limit = format!("root tbf rate {bits}bit burst 64kb latency 200ms");
        self.on_both_ends(host, "replace", &limit)
            .map_err(|why| Unable(format!("a throttle takes tc, and tbf in the kernel: {why}")))
    }

    /// Removes the limit of [`throttle`](Self::throttle).
    pub(crate) fn unthrottle(&self, host: usize) {
        let undone = self.on_both_ends(host, "del", "root");
        undone.unwrap_or_else(|why| panic!("{why}"));
    }

    fn on_both_ends(&self, host: usize, verb: &str, what: &str) -> Result<(), String> {
        let (own, switch) = (self.network.namespace(host), self.network.switch());
        let port = port(host);
        for (namespace, interface) in [(own.as_str(), INTERFACE), (switch, port.as_str())] {
            let command = format!("-n {namespace} qdisc {verb} dev {interface} {what}");
            try_run("tc", &command)?;
        }
        Ok(())
    }

    /// Delays each packet to and from this host by `delay`.
    ///
    /// # Panics
    /// When the cables are [`Cables::Direct`].
    pub(crate) fn delay(&self, host: usize, delay: Duration) {
        self.cables[host].delay(delay);
    }

    /// Filters incoming packets of a host: a rule of nft, such as `tcp dport 29400 drop`.
    pub(crate) fn filter(&self, host: usize, rule: &str) -> Result<(), Unable> {
        let own = self.network.namespace(host);
        let rules = format!(
            "add table inet hosts; add chain inet hosts input {{ type filter hook input priority 0; }}; \
             add rule inet hosts input {rule}"
        );
        let output = Command::new("ip")
            .args(["netns", "exec", &own, "nft", &rules])
            .output()
            .map_err(|error| Unable(format!("a filter takes ip: {error:#}")))?;
        let said = String::from_utf8_lossy(&output.stderr);
        match output.status.success() {
            true => Ok(()),
            false => Err(Unable(format!(
                "a filter takes nft, and nftables in the kernel: {}",
                said.trim()
            ))),
        }
    }

    /// Removes the rule of [`filter`](Self::filter).
    pub(crate) fn unfilter(&self, host: usize) {
        self.network.on(host, "nft delete table inet hosts");
    }

    /// Resets connections of a host, all or those that a filter of ss matches, such as `dport = 29400`. Returns how
    /// many.
    pub(crate) fn reset(&self, host: usize, filter: &str) -> Result<usize, Unable> {
        let own = self.network.namespace(host);
        let output = Command::new("ip")
            .args(["netns", "exec", &own, "ss", "--kill", "--no-header"])
            .args(["--tcp", "state", "established"])
            .args(filter.split_whitespace())
            .output()
            .map_err(|error| Unable(format!("a reset takes ip: {error:#}")))?;
        let said = String::from_utf8_lossy(&output.stderr);
        if !output.status.success() || !said.trim().is_empty() {
            let why = said.trim();
            return Err(Unable(format!(
                "a reset takes ss, and its --kill in the kernel: {why}"
            )));
        }
        Ok(String::from_utf8_lossy(&output.stdout).lines().count())
    }
}

impl Host {
    fn begin(namespace: &str, host: usize, plan: &Plan) -> io::Result<Self> {
        let network = File::open(format!("/run/netns/{namespace}"))?;
        let mut command = Command::new("sh");
        command
            .args(["-c", FIRST, "sh", &format!("host{}", host + 1)])
            .arg(plan.shared_memory.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let network = network.as_raw_fd();
        let in_child = move || {
            enter(network, libc::CLONE_NEWNET)?;
            unshare(libc::CLONE_NEWNS | libc::CLONE_NEWUTS | libc::CLONE_NEWIPC)
        };
        // SAFETY: between fork and exec the closure makes two system calls, and allocates nothing; the descriptor is
        // open in this function, and so in the child.
        unsafe { command.pre_exec(in_child) };
        // On a thread of its own: all of its later children would be in the new namespace.
        let begin = || {
            unshare(libc::CLONE_NEWPID)?;
            command.spawn()
        };
        let mut first = std::thread::scope(|scope| scope.spawn(begin).join().expect("no panic"))?;
        let said = first.stdout.take().expect("a pipe");
        let mut line = String::new();
        BufReader::new(said).read_line(&mut line)?;
        if line.trim() != "ready" {
            let _ = first.kill();
            let status = first.wait()?;
            let text = format!("its first process could not mount what it needs ({status})");
            return Err(io::Error::other(text));
        }
        let pid = libc::c_long::from(first.id());
        // SAFETY: the process is our child and not waited for; the call takes two numbers.
        let pidfd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0 as libc::c_long) };
        if pidfd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new, and no other value owns it.
        let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd as libc::c_int) };
        Ok(Self {
            first: Some(first),
            pidfd,
        })
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // The kernel kills all processes of a namespace with the first one, which ends only after the others have been
        // waited for: by the test, which may do so after this.
        if let Some(mut first) = self.first.take() {
            let _ = first.kill();
            std::thread::spawn(move || first.wait());
        }
    }
}

fn address(host: usize) -> Ipv4Addr {
    let last = u8::try_from(host + 1).expect("no more than 254 hosts");
    Ipv4Addr::new(10, 78, 0, last)
}

/// The switch's end of a host's cable.
fn port(host: usize) -> String {
    format!("port{host}-0")
}

fn enter(namespace: libc::c_int, kinds: libc::c_int) -> io::Result<()> {
    // SAFETY: the call takes two numbers, and concerns the calling thread, or its children, alone.
    match unsafe { libc::setns(namespace, kinds) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn unshare(kinds: libc::c_int) -> io::Result<()> {
    // SAFETY: the call takes a number, and concerns the calling thread, or its children, alone.
    match unsafe { libc::unshare(kinds) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
