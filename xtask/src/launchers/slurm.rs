//! The Slurm of a run: munge with a separate key, a controller, and a slurmd on each node.
//!
//! All daemons are processes of [`Hosts`] and end with them. Nodes have an address in the configuration (`NodeAddr`), so
//! that Slurm itself works where names do not resolve. There may be neither systemd nor control groups: processes are tracked by
//! `/proc`, and a node has more CPUs than the machine (`config_overrides`).

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::Read as _;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use super::hosts::{Hosts, address};
use super::job::wait;
use crate::Result;

/// The limit for a daemon to start, and for the nodes to become idle.
const LIMIT: Duration = Duration::from_secs(60);

/// The CPUs of a node: more than the ranks of any job.
const CPUS: u32 = 8;

/// Starts Slurm: the controller on the last host, nodes on the first `nodes` hosts. Returns the path of `slurm.conf`.
pub(super) fn start(hosts: &Hosts, nodes: usize, controller: usize) -> Result<PathBuf> {
    let directory = hosts.directory();
    let key = directory.join("munge.key");
    let mut random = [0; 128];
    File::open("/dev/urandom")?.read_exact(&mut random)?;
    fs::write(&key, random)?;
    // munged refuses a key that other users can read.
    let mut permissions = fs::metadata(&key)?.permissions();
    std::os::unix::fs::PermissionsExt::set_mode(&mut permissions, 0o400);
    fs::set_permissions(&key, permissions)?;
    let configuration = directory.join("slurm.conf");
    fs::write(
        &configuration,
        text(hosts, nodes, controller, &directory.to_string_lossy()),
    )?;
    // Without this, slurmd looks for control groups, and ends if there are none.
    fs::write(directory.join("cgroup.conf"), "CgroupPlugin=cgroup/v1\n")?;
    fs::create_dir_all(directory.join("state"))?;
    let mut munged: Vec<usize> = (0..nodes).collect();
    if controller >= nodes {
        munged.push(controller);
    }
    for &host in &munged {
        let log = directory.join(format!("munged-{host}.log"));
        daemon(hosts, host, &["mkdir", "-p", "/run/munge"])?;
        let key = format!("--key-file={}", key.display());
        let log = format!("--log-file={}", log.display());
        let words = [
            "munged",
            "--force",
            &key,
            &log,
            "--seed-file=/run/munge/seed",
            "--pid-file=/run/munge/munged.pid",
            "--socket=/run/munge/munge.socket.2",
        ];
        daemon(hosts, host, &words)?;
    }
    daemon(hosts, controller, &["slurmctld"])?;
    for node in 0..nodes {
        daemon(hosts, node, &["slurmd", "-N", hosts.name(node)])?;
    }
    await_idle(hosts, nodes, controller)?;
    Ok(configuration)
}

fn text(hosts: &Hosts, nodes: usize, controller: usize, directory: &str) -> String {
    let (name, at) = (hosts.name(controller), address(controller));
    let mut text = format!(
        "ClusterName=launchers\n\
         SlurmctldHost={name}({at})\n\
         SlurmUser=root\n\
         SlurmdUser=root\n\
         AuthType=auth/munge\n\
         StateSaveLocation={directory}/state\n\
         SlurmdSpoolDir={directory}/spool-%n\n\
         SlurmctldPidFile=/run/slurmctld.pid\n\
         SlurmdPidFile=/run/slurmd.pid\n\
         SlurmctldLogFile={directory}/slurmctld.log\n\
         SlurmdLogFile={directory}/slurmd-%n.log\n\
         ProctrackType=proctrack/linuxproc\n\
         TaskPlugin=task/none\n\
         SlurmdParameters=config_overrides\n\
         MpiDefault=none\n\
         SelectType=select/cons_tres\n\
         SelectTypeParameters=CR_Core\n\
         SwitchType=switch/none\n\
         JobAcctGatherType=jobacct_gather/none\n\
         AccountingStorageType=accounting_storage/none\n\
         ReturnToService=2\n\
         KillWait=5\n\
         SlurmdTimeout=10\n"
    );
    for node in 0..nodes {
        let (name, at) = (hosts.name(node), address(node));
        let _ = writeln!(
            text,
            "NodeName={name} NodeAddr={at} CPUs={CPUS} State=UNKNOWN"
        );
    }
    let list: Vec<&str> = (0..nodes).map(|node| hosts.name(node)).collect();
    let list = list.join(",");
    text += &format!("PartitionName=all Nodes={list} Default=YES MaxTime=INFINITE State=UP\n");
    text
}

/// Runs a program that becomes a daemon. Its output goes to a file: a daemon that holds a pipe open would block the pipe's
/// reader.
fn daemon(hosts: &Hosts, host: usize, words: &[&str]) -> Result {
    let directory = hosts.directory();
    let said = directory.join("daemon.out");
    let output = File::create(&said)?;
    let mut command = hosts.command(host);
    command
        .args(words)
        .env("SLURM_CONF", directory.join("slurm.conf"))
        .stdout(output.try_clone()?)
        .stderr(output);
    let mut child = command.spawn()?;
    match wait(&mut child, Instant::now() + LIMIT)? {
        Some(status) if status.success() => Ok(()),
        ended => {
            let said = fs::read_to_string(said).unwrap_or_default();
            Err(format!("{} on {}: {ended:?}\n{said}", words[0], hosts.name(host)).into())
        }
    }
}

fn await_idle(hosts: &Hosts, nodes: usize, controller: usize) -> Result {
    let end = Instant::now() + LIMIT;
    let mut said = String::new();
    while Instant::now() < end {
        let mut command = hosts.command(controller);
        let output = command
            .args(["timeout", "5", "sinfo", "-h", "-t", "idle", "-o", "%D"])
            .env("SLURM_CONF", hosts.directory().join("slurm.conf"))
            .stderr(Stdio::null())
            .output()?;
        said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        if said == nodes.to_string() {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    let logs = fs::read_to_string(hosts.directory().join("slurmctld.log")).unwrap_or_default();
    Err(format!("of {nodes} nodes of Slurm, {said:?} are idle\n{logs}").into())
}
