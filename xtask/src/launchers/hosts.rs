//! Hosts for launchers: network, PID, UTS, IPC and mount namespaces, connected by a switch.
//!
//! Each host has a first process, a shell that waits on a pipe of this program. When that process ends, the kernel kills all
//! processes of its host and removes its interfaces. So nothing remains after [`Hosts`] is dropped, or after this program ends
//! in any way. The network namespaces have no names in `/run/netns`.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::Result;

/// The script of a first process: `NAME HOSTS RESOLVER`. Prints its process number outside of its namespace.
const FIRST: &str = r#"
read -r pid _ </proc/self/stat &&
mount --make-rprivate / &&
mount -t proc proc /proc &&
mount -t sysfs sysfs /sys &&
mount -t tmpfs tmpfs /dev/shm &&
mount -t tmpfs tmpfs /run &&
mount --bind "$2" /etc/hosts &&
mount --bind "$3" /etc/resolv.conf &&
echo "$1" >/proc/sys/kernel/hostname &&
ip link set lo up &&
echo "$pid" &&
read -r _
"#;

/// Whether the hosts know each other's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Names {
    /// By `/etc/hosts`.
    Known,
    /// Neither by `/etc/hosts` nor by a name server.
    Unknown,
}

/// A set of hosts on one switch.
pub(super) struct Hosts {
    // Before the switch, in this order: a host's cable ends there.
    hosts: Vec<Host>,
    switch: Host,
    /// The files that the hosts have mounted, including those of a cluster.
    directory: tempfile::TempDir,
}

struct Host {
    name: String,
    shell: RefCell<Child>,
    first: u32,
}

impl Hosts {
    /// Creates the hosts; `names[i]` has the address 10.79.0.`i+1`.
    pub(super) fn new(names: &[&str], knows: Names) -> Result<Self> {
        let directory = tempfile::Builder::new()
            .prefix("nccl-launchers-")
            .tempdir()?;
        let mut known = String::from("127.0.0.1 localhost\n");
        if knows == Names::Known {
            for (host, name) in names.iter().enumerate() {
                known += &format!("{} {name}\n", address(host));
            }
        }
        let files = [
            ("hosts", known.as_str()),
            ("resolv.conf", "options attempts:1 timeout:1\n"),
        ];
        for (name, text) in files {
            fs::write(directory.path().join(name), text)?;
        }
        let switch = Host::start("switch", directory.path())?;
        switch.run("ip link add switch type bridge")?;
        switch.run("ip link set switch up")?;
        let mut hosts = Vec::new();
        for (number, name) in names.iter().enumerate() {
            let host = Host::start(name, directory.path())?;
            let (own, at, far) = (host.first, address(number), format!("port{number}"));
            outside(&format!(
                "ip link add eth0 netns {own} type veth peer name {far} netns {}",
                switch.first
            ))?;
            switch.run(&format!("ip link set {far} master switch up"))?;
            host.run(&format!("ip addr add {at}/24 dev eth0"))?;
            host.run("ip link set eth0 up")?;
            hosts.push(host);
        }
        Ok(Self {
            hosts,
            switch,
            directory,
        })
    }

    pub(super) fn directory(&self) -> &Path {
        self.directory.path()
    }

    pub(super) fn name(&self, host: usize) -> &str {
        &self.hosts[host].name
    }

    /// Returns a command that runs on a host; `program` and its arguments are to be appended.
    pub(super) fn command(&self, host: usize) -> Command {
        self.hosts[host].command()
    }

    /// Returns the processes on these hosts that run `program`: process number outside, and environment.
    pub(super) fn processes(&self, program: &Path) -> Vec<Process> {
        let namespace = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
        let own: Vec<PathBuf> = self
            .hosts
            .iter()
            .filter_map(|host| namespace(&host.first.to_string()))
            .collect();
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let Ok(pid) = name.parse::<u32>() else {
                continue;
            };
            let runs = fs::read_link(entry.path().join("exe")).is_ok_and(|exe| exe == program);
            if !runs || !namespace(&name).is_some_and(|namespace| own.contains(&namespace)) {
                continue;
            }
            // The process may have ended meanwhile.
            let Ok(environment) = fs::read(entry.path().join("environ")) else {
                continue;
            };
            let text = String::from_utf8_lossy(&environment).into_owned();
            let variables = text.split('\0').filter_map(|pair| pair.split_once('='));
            let variables = variables.map(|(name, value)| (name.to_owned(), value.to_owned()));
            found.push(Process {
                pid,
                variables: variables.collect(),
            });
        }
        found
    }

    /// Ends a host as a power failure does: disconnects the cable first, so that the host's kernel closes no connection.
    pub(super) fn lose(&self, host: usize) -> Result {
        self.switch.run(&format!("ip link set port{host} down"))?;
        self.hosts[host].end();
        Ok(())
    }
}

/// A process on a host.
pub(super) struct Process {
    pub(super) pid: u32,
    pub(super) variables: BTreeMap<String, String>,
}

impl Process {
    pub(super) fn kill(&self) {
        // It may be gone already.
        let _ = Command::new("kill")
            .args(["-KILL", &self.pid.to_string()])
            .stderr(Stdio::null())
            .status();
    }
}

impl Host {
    fn start(name: &str, directory: &Path) -> Result<Self> {
        let mut shell = Command::new("unshare")
            .args(["--net", "--pid", "--uts", "--ipc", "--mount"])
            .args(["--fork", "--kill-child", "sh", "-c", FIRST, "sh", name])
            .arg(directory.join("hosts"))
            .arg(directory.join("resolv.conf"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("unshare (util-linux) is needed: {error}"))?;
        let said = shell.stdout.take().ok_or("no pipe")?;
        let mut line = String::new();
        BufReader::new(said).read_line(&mut line)?;
        let first = line.trim().parse();
        let mut host = Self {
            name: name.to_owned(),
            shell: RefCell::new(shell),
            first: 0,
        };
        host.first = first.map_err(|_| {
            format!("the host {name} cannot be made: namespaces take root, and `ip` of iproute2")
        })?;
        Ok(host)
    }

    fn command(&self) -> Command {
        let mut command = Command::new("nsenter");
        command
            .args(["-m", "-u", "-i", "-n", "-p", "-t", &self.first.to_string()])
            .stdin(Stdio::null());
        command
    }

    fn run(&self, words: &str) -> Result {
        let mut command = self.command();
        command.args(words.split(' '));
        crate::workspace::run(&mut command)
    }

    fn end(&self) {
        let mut shell = self.shell.borrow_mut();
        let _ = shell.kill();
        let _ = shell.wait();
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.end();
    }
}

fn outside(words: &str) -> Result {
    let mut words = words.split(' ');
    let mut command = Command::new(words.next().unwrap_or_default());
    crate::workspace::run(command.args(words))
}

pub(super) fn address(host: usize) -> String {
    format!("10.79.0.{}", host + 1)
}
