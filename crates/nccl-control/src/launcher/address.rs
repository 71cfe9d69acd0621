//! Where the ranks of a launch meet: at the configured address, or at one that all ranks derive in the same way.

use std::sync::Arc;

use super::launch::{Launch, Scheme, first_set};
use super::nodelist::expand;
use crate::address::{Address, FORMS, split};
use crate::discovery::{DiscoveryHandle, FileDiscovery};
use crate::error::{Error, Result};
use crate::interface::Interface;
use crate::tcp::{self, NameOrigin};

/// The number of ports of a derived address; some of the ports may be in use.
const PORTS: u16 = 16;

/// The first port derived from a Slurm job, and the number of port ranges. They lie below the ports of outgoing
/// connections.
const SLURM: u16 = 20_000;
const SLURM_RANGES: u16 = 624;

/// The port of a pod, whose addresses no other pod shares.
const POD: u16 = 29_400;

/// The user and the parent process of a rank, which the ranks of a launcher without job names have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct JobOrigin {
    pub(super) user: u32,
    pub(super) parent: u32,
}

impl JobOrigin {
    pub(super) fn own() -> Self {
        Self {
            user: rustix::process::getuid().as_raw(),
            parent: std::os::unix::process::parent_id(),
        }
    }
}

/// Parses `NCCL_RUN_RENDEZVOUS`: the first address, and the others.
pub(super) fn parse(
    text: &str,
    get: impl Fn(&str) -> Option<String>,
) -> Result<(Address, Vec<Address>)> {
    let mut list = split(text);
    let first = parse_one(list.next().unwrap_or_default(), text, &get)?;
    // The discovery file holds one address: that of the coordinating rank.
    let get = |name: &str| get(name).filter(|_| name != "NCCL_RUN_PUBLISH");
    let others = list.map(|host_ports| parse_one(host_ports, text, get));
    Ok((first, others.collect::<Result<_>>()?))
}

fn parse_one(one: &str, text: &str, get: impl Fn(&str) -> Option<String>) -> Result<Address> {
    match Address::parse(one) {
        Some(Address::Tcp(host_ports)) => {
            with_interface_and_discovery(host_ports, get).map(Address::Tcp)
        }
        Some(address) => Ok(address),
        None => Err(Error::rendezvous(format!(
            "NCCL_RUN_RENDEZVOUS={text:?} is not understood: {FORMS}"
        ))),
    }
}

/// Applies the variables for the interface and for publishing.
fn with_interface_and_discovery(
    mut host_ports: tcp::HostPorts,
    get: impl Fn(&str) -> Option<String>,
) -> Result<tcp::HostPorts> {
    if let Some(text) = get("NCCL_RUN_INTERFACE") {
        host_ports.interface = Some(Interface::parse(&text)?);
    }
    let file = get("NCCL_RUN_PUBLISH").map(FileDiscovery::new);
    host_ports.discovery = file.map(|file| DiscoveryHandle(Arc::new(file)));
    Ok(host_ports)
}

/// Derives where ranks on several hosts meet, without a configured address; `several` describes the ranks.
pub(super) fn between_hosts(
    launch: &Launch,
    several: &str,
    get: impl Fn(&str) -> Option<String>,
) -> Result<tcp::HostPorts> {
    let mut why = String::new();
    for scheme in launch.schemes() {
        let found = match scheme {
            Scheme::Torchrun => torchrun(&get),
            Scheme::Kubernetes => pod(launch.rank, &get),
            // In a Slurm allocation, the first host is known even if mpirun started the ranks.
            Scheme::OpenMpi | Scheme::Hydra if get("SLURM_JOB_ID").is_none() => Err(String::from(
                "the environment of an MPI launcher does not say where rank 0 runs",
            )),
            // Its ranks have the variables of different steps: those of its daemons, and none on its own host.
            Scheme::OpenMpi => {
                let job = launch.job_name_of(Scheme::OpenMpi, &get);
                slurm(&["SLURM_JOB_NODELIST", "SLURM_NODELIST"], &job, &get)
            }
            Scheme::Slurm | Scheme::Hydra => {
                let lists = [
                    "SLURM_STEP_NODELIST",
                    "SLURM_JOB_NODELIST",
                    "SLURM_NODELIST",
                ];
                slurm(&lists, &get("SLURM_STEP_ID").unwrap_or_default(), &get)
            }
            Scheme::Run => continue,
        };
        match found {
            Ok(host_ports) => return with_interface_and_discovery(host_ports, get),
            Err(text) if why.is_empty() => why = format!(" ({text})"),
            Err(_) => {}
        }
    }
    Err(Error::rendezvous(format!(
        "{several} need an address to meet at{why}: set NCCL_RUN_RENDEZVOUS=tcp:HOST:PORT, with the \
         host of rank 0"
    )))
}

/// Returns where torchrun's own ranks meet, but at the ports after it: torchrun uses that port itself.
fn torchrun(get: impl Fn(&str) -> Option<String>) -> Result<tcp::HostPorts, String> {
    let shown = |name: &str| {
        get(name).map_or_else(
            || format!("{name} unset"),
            |text| format!("{name}={text:?}"),
        )
    };
    let port = get("MASTER_PORT").and_then(|port| port.trim().parse::<u16>().ok());
    match (get("MASTER_ADDR"), port) {
        (Some(host), Some(port)) if port > 0 && port < u16::MAX - PORTS => Ok(tcp::HostPorts {
            origin: NameOrigin::Torchrun,
            ..tcp::HostPorts::new(host, (port + 1, port + PORTS))
        }),
        _ => Err(format!(
            "{}, {}",
            shown("MASTER_ADDR"),
            shown("MASTER_PORT")
        )),
    }
}

/// Returns the first host of the first of these lists that is set, at ports derived from Slurm's job and from `part`, which
/// distinguishes what runs in the job.
fn slurm(
    lists: &[&'static str],
    part: &str,
    get: impl Fn(&str) -> Option<String>,
) -> Result<tcp::HostPorts, String> {
    let list = first_set(lists, &get);
    let Some((name, list)) = list else {
        return Err(String::from("SLURM_JOB_NODELIST is not set"));
    };
    let hosts = expand(&list).map_err(|why| format!("{name}={list:?} has {why}"))?;
    let ids = format!("{}/{part}", get("SLURM_JOB_ID").unwrap_or_default());
    let range = fingerprint(ids.as_bytes()) % u64::from(SLURM_RANGES);
    let first = SLURM + PORTS * u16::try_from(range).unwrap_or_default();
    let host = hosts.into_iter().next().unwrap_or_default();
    Ok(tcp::HostPorts {
        origin: NameOrigin::Slurm { list: name },
        ..tcp::HostPorts::new(host, (first, first + PORTS - 1))
    })
}

/// Returns the pod with index 0, by its name in a headless service. The pod itself resolves that name without a
/// service.
fn pod(rank: usize, get: impl Fn(&str) -> Option<String>) -> Result<tcp::HostPorts, String> {
    let index = get("JOB_COMPLETION_INDEX").unwrap_or_default();
    let own = get("HOSTNAME").unwrap_or_default();
    let Some(job) = own.strip_suffix(&format!("-{}", index.trim())) else {
        return Err(format!(
            "HOSTNAME={own:?} does not end with JOB_COMPLETION_INDEX={index}, as the name of a pod of an \
             indexed job does"
        ));
    };
    let Some(service) = get("NCCL_RUN_SERVICE") else {
        return Err(String::from(
            "NCCL_RUN_SERVICE is not set: the headless service that the pod template names as its subdomain",
        ));
    };
    let host = match rank {
        0 => own.clone(),
        _ => format!("{job}-0.{service}"),
    };
    Ok(tcp::HostPorts {
        origin: NameOrigin::Kubernetes,
        ..tcp::HostPorts::new(host, (POD, POD))
    })
}

/// Derives a name that is the same on all ranks of one launch, and different for another launch: from the launcher's
/// job name, or if there is none, from the process that started the ranks of this host.
pub(super) fn on_one_host(
    launch: &Launch,
    own: JobOrigin,
    get: impl Fn(&str) -> Option<String>,
) -> Address {
    let job = launch.job_name(get);
    let user = own.user;
    let job = if job.is_empty() {
        format!("parent-{}", own.parent)
    } else {
        job
    };
    let name = format!("nccl/{user}/{}/{job}", launch.launcher().rank);
    // The system accepts 107 bytes; the part of the name that differs between jobs may be beyond them.
    if name.len() <= LONGEST {
        return Address::Abstract(name);
    }
    let head: String = name
        .chars()
        .filter(char::is_ascii)
        .take(LONGEST - 17)
        .collect();
    Address::Abstract(format!("{head}/{:016x}", fingerprint(name.as_bytes())))
}

/// The longest name of an abstract socket, in bytes.
pub(super) const LONGEST: usize = 100;

/// FNV-1a, because it is the same in every build of this crate, unlike the hashers of the standard library.
fn fingerprint(bytes: &[u8]) -> u64 {
    nccl_base::wire::checksum(bytes)
}
