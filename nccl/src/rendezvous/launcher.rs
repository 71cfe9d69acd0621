//! What a launcher says about this process, and where its ranks meet.

use std::path::PathBuf;

use super::environment::Rendezvous;
use super::interface::Interface;
use super::place::Address;
use super::secret::Secret;
use super::server::Job;
use super::tcp;
use crate::error::{Error, Result, ranks};

/// A launcher's variables: rank, number of ranks, rank on this host, number of ranks on this host.
struct Launcher {
    name: &'static str,
    rank: &'static str,
    size: &'static str,
    local_rank: &'static str,
    local_size: &'static str,
    /// What tells its jobs apart, for the name of the meeting place.
    job: &'static [&'static str],
}

/// Of the variables of two launchers, the earlier one counts: what started the process last.
const LAUNCHERS: [Launcher; 5] = [
    Launcher {
        name: "nccl-run",
        rank: "NCCL_RUN_RANK",
        size: "NCCL_RUN_WORLD_SIZE",
        local_rank: "NCCL_RUN_LOCAL_RANK",
        local_size: "NCCL_RUN_LOCAL_WORLD_SIZE",
        job: &[],
    },
    Launcher {
        name: "torchrun",
        rank: "RANK",
        size: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
        local_size: "LOCAL_WORLD_SIZE",
        job: &[
            "TORCHELASTIC_RUN_ID",
            "TORCHELASTIC_RESTART_COUNT",
            "MASTER_ADDR",
            "MASTER_PORT",
        ],
    },
    Launcher {
        name: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
        job: &["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"],
    },
    Launcher {
        name: "Hydra (MPICH, Intel MPI)",
        rank: "PMI_RANK",
        size: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
        local_size: "MPI_LOCALNRANKS",
        job: &[],
    },
    Launcher {
        name: "Slurm",
        rank: "SLURM_PROCID",
        size: "SLURM_NTASKS",
        local_rank: "SLURM_LOCALID",
        local_size: "SLURM_TASKS_PER_NODE",
        job: &["SLURM_JOB_ID", "SLURM_STEP_ID"],
    },
];

impl Rendezvous {
    /// As [`from_env`](Self::from_env), with other variables than those of this process: `get` is asked for them
    /// by name.
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env).
    ///
    /// ```
    /// let rendezvous = nccl::Rendezvous::from_variables(|name| match name {
    ///     "NCCL_RUN_RANK" => Some(String::from("1")),
    ///     "NCCL_RUN_WORLD_SIZE" => Some(String::from("2")),
    ///     "NCCL_RUN_RENDEZVOUS" => Some(String::from("tcp:10.0.0.5:29400")),
    ///     _ => None,
    /// })?;
    /// assert_eq!(rendezvous.rank(), 1);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn from_variables(get: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let Some(launcher) = LAUNCHERS
            .iter()
            .find(|launcher| get(launcher.rank).is_some())
        else {
            let names: Vec<_> = LAUNCHERS
                .iter()
                .map(|l| format!("{} ({})", l.rank, l.name))
                .collect();
            return Err(Error::rendezvous(format!(
                "no launcher said which rank this process is: none of {} is set",
                names.join(", ")
            )));
        };
        let rank = number(launcher, launcher.rank, &get)?;
        let world_size = number(launcher, launcher.size, &get)?;
        let local_rank = match get(launcher.local_rank) {
            Some(_) => number(launcher, launcher.local_rank, &get)?,
            None => rank,
        };
        let several_hosts = match get(launcher.local_size) {
            Some(text) => {
                let here = local_size(launcher, &text)?;
                (here != world_size).then(|| {
                    format!(
                        "{} started {world_size} ranks, {here} of them on this host ({}={text}): ranks \
                         on several hosts",
                        launcher.name, launcher.local_size
                    )
                })
            }
            None => None,
        };
        let address = match get("NCCL_RUN_RENDEZVOUS") {
            Some(text) => parse_address(&text, &get)?,
            None if launcher.name == "nccl-run" => {
                return Err(Error::rendezvous(format!(
                    "{} is set, but not NCCL_RUN_RENDEZVOUS=unix:PATH or tcp:HOST:PORT, where the ranks \
                     meet",
                    launcher.rank
                )));
            }
            None => match &several_hosts {
                None => Address::Abstract(meeting_place(launcher, &get)),
                Some(several) => Address::Tcp(master(launcher, several, &get)?),
            },
        };
        if let (Some(several), false) = (several_hosts, matches!(address, Address::Tcp(_))) {
            return Err(Error::rendezvous(format!(
                "{several} cannot meet at {address}: set NCCL_RUN_RENDEZVOUS=tcp:HOST:PORT"
            )));
        }
        let mut rendezvous = Self::new(rank, world_size, local_rank, address).map_err(|_| {
            Error::rendezvous(format!(
                "{}={rank} contradicts {}={world_size}: {}",
                launcher.rank,
                launcher.size,
                ranks(world_size)
            ))
        })?;
        rendezvous.job = job(launcher, &get)?;
        Ok(rendezvous)
    }
}

impl Rendezvous {
    /// What an observer's process is told by the variables of `nccl-run`.
    pub(super) fn observer_from_variables(get: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let Some(text) = get("NCCL_RUN_RENDEZVOUS") else {
            return Err(Error::rendezvous(format!(
                "NCCL_RUN_RENDEZVOUS is not set, where the ranks meet that are to be observed: {FORMS}"
            )));
        };
        let mut rendezvous = Self::observing(parse_address(&text, &get)?);
        rendezvous.job = job(&LAUNCHERS[0], &get)?;
        Ok(rendezvous)
    }
}

/// What the ranks of this launch have in common.
fn job(launcher: &Launcher, get: impl Fn(&str) -> Option<String>) -> Result<Job> {
    let epoch = ["NCCL_RUN_EPOCH", "TORCHELASTIC_RESTART_COUNT"]
        .into_iter()
        .find_map(|name| Some((name, get(name)?)));
    let epoch = match epoch {
        None => 0,
        Some((name, text)) => text.trim().parse().map_err(|_| {
            Error::rendezvous(format!("{name}={text:?} is not the number of an attempt"))
        })?,
    };
    let of_launcher = || {
        let names = launcher.job.iter().filter_map(|name| get(name));
        names.collect::<Vec<_>>().join("/")
    };
    Ok(Job {
        name: get("NCCL_RUN_JOB").unwrap_or_else(of_launcher),
        epoch,
        secret: Secret::from_variables(&get)?,
    })
}

fn number(
    launcher: &Launcher,
    name: &'static str,
    get: impl Fn(&str) -> Option<String>,
) -> Result<usize> {
    let Some(text) = get(name) else {
        return Err(Error::rendezvous(format!(
            "{} is set, but not {name}: {} sets both",
            launcher.rank, launcher.name
        )));
    };
    text.trim().parse().map_err(|_| {
        Error::rendezvous(format!(
            "{name}={text:?} of {} is not a number",
            launcher.name
        ))
    })
}

/// Slurm writes `4`, or `4(x2),3` for several hosts; the first number suffices to see that.
fn local_size(launcher: &Launcher, text: &str) -> Result<usize> {
    let digits: String = text
        .trim()
        .chars()
        .take_while(char::is_ascii_digit)
        .collect();
    digits.parse().map_err(|_| {
        let name = launcher.local_size;
        Error::rendezvous(format!(
            "{name}={text:?} of {} is not a number",
            launcher.name
        ))
    })
}

/// `unix:PATH`, `unix:@NAME`, `tcp:HOST:PORT` and so on.
pub(super) fn place(text: &str) -> Option<Address> {
    if let Some(place) = text.strip_prefix("tcp:").and_then(tcp::Place::parse) {
        return Some(Address::Tcp(place));
    }
    match text.strip_prefix("unix:")? {
        "" | "@" => None,
        name if name.starts_with('@') => Some(Address::Abstract(name[1..].to_owned())),
        path => Some(Address::Path(PathBuf::from(path))),
    }
}

/// What is said where an address is not understood.
pub(super) const FORMS: &str =
    "write unix:PATH, unix:@NAME, tcp:HOST:PORT, tcp:HOST:FIRST-LAST or tcp:[IPV6]:PORT";

fn parse_address(text: &str, get: impl Fn(&str) -> Option<String>) -> Result<Address> {
    match place(text) {
        Some(Address::Tcp(place)) => settled(place, get).map(Address::Tcp),
        Some(address) => Ok(address),
        None => Err(Error::rendezvous(format!(
            "NCCL_RUN_RENDEZVOUS={text:?} is not understood: {FORMS}"
        ))),
    }
}

/// With what the variables say about interface and publishing.
fn settled(mut place: tcp::Place, get: impl Fn(&str) -> Option<String>) -> Result<tcp::Place> {
    if let Some(text) = get("NCCL_RUN_INTERFACE") {
        place.interface = Some(Interface::parse(&text)?);
    }
    place.publish = get("NCCL_RUN_PUBLISH").map(PathBuf::from);
    Ok(place)
}

/// Where torchrun's own ranks meet, some ports further: that one is in use by torchrun.
fn master(
    launcher: &Launcher,
    several: &str,
    get: impl Fn(&str) -> Option<String>,
) -> Result<tcp::Place> {
    let port = get("MASTER_PORT").and_then(|port| port.trim().parse::<u16>().ok());
    match (get("MASTER_ADDR"), port) {
        (Some(host), Some(port))
            if port > 0 && port < u16::MAX - 16 && launcher.name == "torchrun" =>
        {
            settled(tcp::Place::new(host, (port + 1, port + 16)), get)
        }
        _ => Err(Error::rendezvous(format!(
            "{several} need an address to meet at: set NCCL_RUN_RENDEZVOUS=tcp:HOST:PORT, with the host \
             of rank 0"
        ))),
    }
}

/// A name that all ranks of one launch derive alike, and another launch does not: the launcher's own
/// job, or where it has no name for it, the process that started the ranks of this host.
fn meeting_place(launcher: &Launcher, get: impl Fn(&str) -> Option<String>) -> String {
    let job: Vec<String> = launcher.job.iter().filter_map(|name| get(name)).collect();
    // SAFETY: takes no arguments and cannot fail.
    let user = unsafe { libc::getuid() };
    let job = if job.is_empty() {
        format!("parent-{}", std::os::unix::process::parent_id())
    } else {
        job.join("/")
    };
    let name = format!("nccl/{user}/{}/{job}", launcher.rank);
    // The system takes 107 bytes; what tells two jobs apart may stand behind them.
    if name.len() <= LONGEST {
        return name;
    }
    let head: String = name
        .chars()
        .filter(char::is_ascii)
        .take(LONGEST - 17)
        .collect();
    format!("{head}/{:016x}", fingerprint(name.as_bytes()))
}

/// The longest name of a meeting place, in bytes.
const LONGEST: usize = 100;

/// FNV-1a: the same in every build of this crate, which a hasher of the standard library need not be.
fn fingerprint(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Rendezvous> {
        Rendezvous::from_variables(|name| {
            variables
                .iter()
                .find(|(key, _)| *key == name)
                .map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn each_launcher_is_understood() {
        for variables in [
            &[
                ("NCCL_RUN_RANK", "1"),
                ("NCCL_RUN_WORLD_SIZE", "4"),
                ("NCCL_RUN_RENDEZVOUS", "unix:/tmp/x"),
            ][..],
            &[
                ("RANK", "1"),
                ("WORLD_SIZE", "4"),
                ("LOCAL_RANK", "1"),
                ("LOCAL_WORLD_SIZE", "4"),
            ],
            &[("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "4")],
            &[
                ("PMI_RANK", "1"),
                ("PMI_SIZE", "4"),
                ("MPI_LOCALRANKID", "1"),
            ],
            &[
                ("SLURM_PROCID", "1"),
                ("SLURM_NTASKS", "4"),
                ("SLURM_TASKS_PER_NODE", "4"),
                ("SLURM_STEP_ID", "0"),
            ],
        ] {
            let rendezvous = read(variables).unwrap();
            assert_eq!(
                (
                    rendezvous.rank,
                    rendezvous.world_size,
                    rendezvous.local_rank
                ),
                (1, 4, 1)
            );
        }
    }

    #[test]
    fn what_is_missing_or_wrong_is_named_with_its_value() {
        for (variables, words) in [
            (&[][..], &["RANK", "SLURM_PROCID", "none of"][..]),
            (&[("RANK", "0")], &["RANK", "WORLD_SIZE"]),
            (
                &[("RANK", "x"), ("WORLD_SIZE", "2")],
                &["RANK=\"x\"", "torchrun"],
            ),
            (
                &[("RANK", "2"), ("WORLD_SIZE", "2")],
                &["RANK=2", "WORLD_SIZE=2"],
            ),
            (
                &[
                    ("RANK", "0"),
                    ("WORLD_SIZE", "8"),
                    ("LOCAL_WORLD_SIZE", "4"),
                ],
                &["LOCAL_WORLD_SIZE=4", "several hosts"],
            ),
            (
                &[
                    ("SLURM_PROCID", "0"),
                    ("SLURM_NTASKS", "8"),
                    ("SLURM_TASKS_PER_NODE", "4(x2)"),
                    ("SLURM_STEP_ID", "0"),
                ],
                &["4(x2)", "several hosts"],
            ),
            (
                &[("NCCL_RUN_RANK", "0"), ("NCCL_RUN_WORLD_SIZE", "1")],
                &["NCCL_RUN_RENDEZVOUS"],
            ),
            (
                &[
                    ("NCCL_RUN_RANK", "0"),
                    ("NCCL_RUN_WORLD_SIZE", "1"),
                    ("NCCL_RUN_RENDEZVOUS", "tcp:1"),
                ],
                &["tcp:1", "unix:PATH"],
            ),
            (
                &[
                    ("NCCL_RUN_RANK", "0"),
                    ("NCCL_RUN_WORLD_SIZE", "2"),
                    ("NCCL_RUN_LOCAL_WORLD_SIZE", "1"),
                    ("NCCL_RUN_RENDEZVOUS", "unix:/tmp/x"),
                ],
                &["several hosts", "unix:/tmp/x", "tcp:HOST:PORT"],
            ),
        ] {
            let error = read(variables).unwrap_err().to_string();
            for word in words {
                assert!(error.contains(word), "{word:?} in {error:?}");
            }
        }
    }

    #[test]
    fn ranks_on_several_hosts_meet_over_tcp() {
        for (text, shown) in [
            ("tcp:10.0.0.5:29400", "tcp:10.0.0.5:29400"),
            ("tcp:node-a:29400-29415", "tcp:node-a:29400-29415"),
            ("tcp:[fd00::1]:29400", "tcp:[fd00::1]:29400"),
        ] {
            let variables = [
                ("NCCL_RUN_RANK", "1"),
                ("NCCL_RUN_WORLD_SIZE", "4"),
                ("NCCL_RUN_LOCAL_WORLD_SIZE", "2"),
                ("NCCL_RUN_RENDEZVOUS", text),
                ("NCCL_RUN_INTERFACE", "eth0"),
            ];
            let address = read(&variables).unwrap().address.to_string();
            assert_eq!(address, format!("{shown} on interface eth0"));
        }
        let variables = [
            ("RANK", "1"),
            ("WORLD_SIZE", "4"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("MASTER_ADDR", "node-a"),
            ("MASTER_PORT", "29500"),
            ("TORCHELASTIC_RESTART_COUNT", "3"),
        ];
        let rendezvous = read(&variables).unwrap();
        assert_eq!(rendezvous.address.to_string(), "tcp:node-a:29501-29516");
        assert_eq!(rendezvous.job.epoch, 3);
    }

    #[test]
    fn two_launches_meet_at_two_places() {
        let place = |id: &str| {
            let variables = [
                ("RANK", "0"),
                ("WORLD_SIZE", "1"),
                ("TORCHELASTIC_RUN_ID", id),
            ];
            read(&variables).unwrap().address
        };
        assert_eq!(place("a"), place("a"));
        assert_ne!(place("a"), place("b"));
        let long = "x".repeat(200);
        let (a, b) = (place(&(long.clone() + "a")), place(&(long + "b")));
        assert_ne!(a, b);
        for address in [a, b, place(&"ä".repeat(200))] {
            let Address::Abstract(name) = address else {
                panic!("{address}")
            };
            assert!(name.len() <= LONGEST, "{name}");
        }
    }
}
