//! What a launcher says about this process, and where its ranks meet.

use std::path::PathBuf;
use std::time::Duration;

use super::interface::Interface;
use super::place::Address;
use super::secret::Secret;
use super::server::Job;
use super::tcp;
use crate::error::{Error, Result, ranks};

/// Who this process is among the ranks, and where they meet.
///
/// ```
/// use nccl::Rendezvous;
///
/// let rendezvous = Rendezvous::unix("/tmp/my-job.sock", 0, 2)?;
/// assert_eq!((rendezvous.rank(), rendezvous.world_size()), (0, 2));
/// # Ok::<(), nccl::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendezvous {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) local_rank: usize,
    pub(super) address: Address,
    pub(super) timeout: Duration,
    pub(super) job: Job,
    /// The local rank is the place among the ranks of the host, which nobody has told.
    pub(super) counts_local: bool,
}

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
    /// Ranks of one host that meet at the Unix socket `path`, which rank 0 makes.
    ///
    /// # Errors
    /// [`ErrorKind::Rendezvous`](crate::ErrorKind::Rendezvous) when `rank` is not below `world_size`.
    ///
    /// ```
    /// assert!(nccl::Rendezvous::unix("/tmp/my-job.sock", 2, 2).is_err());
    /// ```
    pub fn unix(path: impl Into<PathBuf>, rank: usize, world_size: usize) -> Result<Self> {
        Self::new(rank, world_size, rank, Address::Path(path.into()))
    }

    /// Ranks on several hosts that meet over TCP at `host` and `port`, where rank 0 runs and listens:
    /// at that one address, never at all of the host's.
    ///
    /// # Errors
    /// [`ErrorKind::Rendezvous`](crate::ErrorKind::Rendezvous) when `rank` is not below `world_size`.
    ///
    /// ```
    /// let rendezvous = nccl::Rendezvous::tcp("10.0.0.5", 29_400, 3, 16)?;
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn tcp(host: impl Into<String>, port: u16, rank: usize, world_size: usize) -> Result<Self> {
        let place = tcp::Place::new(host, (port, port));
        let mut rendezvous = Self::new(rank, world_size, rank, Address::Tcp(place))?;
        rendezvous.counts_local = true;
        Ok(rendezvous)
    }

    /// Over TCP: rank 0 takes the first free port from its own to `last`, and the others look at all.
    ///
    /// ```
    /// let rendezvous = nccl::Rendezvous::tcp("10.0.0.5", 29_400, 3, 16)?.up_to_port(29_415);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn up_to_port(mut self, last: u16) -> Self {
        if let Address::Tcp(place) = &mut self.address {
            place.ports.1 = last.max(place.ports.0);
        }
        self
    }

    /// Over TCP: rank 0 writes its address into the file at `path`, which all ranks can read, and the
    /// others take it from there. Port 0 is any that is free.
    ///
    /// ```
    /// let rendezvous = nccl::Rendezvous::tcp("10.0.0.5", 0, 3, 16)?.publish("/shared/job-7.address");
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn publish(mut self, path: impl Into<PathBuf>) -> Self {
        if let Address::Tcp(place) = &mut self.address {
            place.publish = Some(path.into());
        }
        self
    }

    /// Over TCP: where rank 0 listens: an interface (`eth0`), the beginning of its name (`eth`), a subnet
    /// (`10.0.0.0/8`), an address, or `*` for all. The address of `host`, unless set.
    ///
    /// # Errors
    /// [`ErrorKind::Rendezvous`](crate::ErrorKind::Rendezvous) when it is none of these.
    ///
    /// ```
    /// let rendezvous = nccl::Rendezvous::tcp("10.0.0.5", 29_400, 3, 16)?.interface("eth0")?;
    /// assert!(nccl::Rendezvous::tcp("10.0.0.5", 29_400, 3, 16)?.interface("10.0.0.0/40").is_err());
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn interface(mut self, interface: &str) -> Result<Self> {
        let interface = Interface::parse(interface)?;
        if let Address::Tcp(place) = &mut self.address {
            place.interface = Some(interface);
        }
        Ok(self)
    }

    /// What the launcher that started this process says: `nccl-run`, `torchrun`, `mpirun` of Open MPI,
    /// MPICH and Intel MPI, or `srun`.
    ///
    /// Processes that a program starts by itself may set the variables of `nccl-run`:
    /// `NCCL_RUN_RANK`, `NCCL_RUN_WORLD_SIZE`, `NCCL_RUN_LOCAL_RANK` (the rank, unless set) and
    /// `NCCL_RUN_RENDEZVOUS`: `unix:PATH`, `unix:@NAME`, `tcp:HOST:PORT` or `tcp:HOST:FIRST-LAST`. Over TCP,
    /// `NCCL_RUN_INTERFACE` is as [`interface`](Self::interface) and `NCCL_RUN_PUBLISH` as
    /// [`publish`](Self::publish). A torchrun job on several hosts that sets none of this meets at
    /// `MASTER_ADDR`, at one of the 16 ports behind `MASTER_PORT`, which torchrun uses itself.
    ///
    /// # Errors
    /// [`ErrorKind::Rendezvous`](crate::ErrorKind::Rendezvous) names the variable that is missing,
    /// unreadable, or contradicts another, with the value seen.
    ///
    /// ```no_run
    /// let world = nccl::World::join(nccl::Rendezvous::from_env()?)?;
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn from_env() -> Result<Self> {
        Self::from_variables(|name| std::env::var(name).ok())
    }

    /// How long the ranks wait for each other; 60 s unless set.
    ///
    /// ```
    /// use std::time::Duration;
    /// let rendezvous = nccl::Rendezvous::unix("/tmp/my-job.sock", 0, 1)?.timeout(Duration::from_secs(5));
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.timeout = limit;
        self
    }

    /// What to call the job: a rank of another job is turned away, and told so. Empty unless set; the
    /// launcher's own name for it after [`from_env`](Self::from_env), or `NCCL_RUN_JOB`.
    ///
    /// ```
    /// let rendezvous = nccl::Rendezvous::unix("/tmp/my-job.sock", 0, 1)?.job("pretraining-7");
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn job(mut self, name: impl Into<String>) -> Self {
        self.job.name = name.into();
        self
    }

    /// Which attempt of the job this is; 0 unless set, or `NCCL_RUN_EPOCH`, or torchrun's count of
    /// restarts. A process that is left over from another attempt is turned away.
    ///
    /// ```
    /// let rendezvous = nccl::Rendezvous::unix("/tmp/my-job.sock", 0, 1)?.epoch(2);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn epoch(mut self, epoch: u64) -> Self {
        self.job.epoch = epoch;
        self
    }

    /// What the processes of the job know and nobody else; `NCCL_RUN_SECRET`, or the content of the file
    /// `NCCL_RUN_SECRET_FILE`, after [`from_env`](Self::from_env). Both sides of every connection prove
    /// that they know it, without sending it.
    ///
    /// ```
    /// let rendezvous = nccl::Rendezvous::unix("/tmp/my-job.sock", 0, 1)?.secret("correct horse");
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn secret(mut self, secret: impl Into<Vec<u8>>) -> Self {
        self.job.secret = Some(Secret::new(secret));
        self
    }

    /// This process's rank.
    ///
    /// ```
    /// assert_eq!(nccl::Rendezvous::unix("/tmp/my-job.sock", 1, 2)?.rank(), 1);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks.
    ///
    /// ```
    /// assert_eq!(nccl::Rendezvous::unix("/tmp/my-job.sock", 1, 2)?.world_size(), 2);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    fn new(rank: usize, world_size: usize, local_rank: usize, address: Address) -> Result<Self> {
        if rank >= world_size {
            return Err(Error::rendezvous(format!(
                "rank {rank} of {world_size} does not exist: {}",
                ranks(world_size)
            )));
        }
        Ok(Self {
            rank,
            world_size,
            local_rank,
            address,
            timeout: Duration::from_secs(60),
            job: Job {
                name: String::new(),
                epoch: 0,
                secret: None,
            },
            counts_local: false,
        })
    }

    fn from_variables(get: impl Fn(&str) -> Option<String>) -> Result<Self> {
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

fn parse_address(text: &str, get: impl Fn(&str) -> Option<String>) -> Result<Address> {
    if let Some(place) = text.strip_prefix("tcp:").and_then(tcp::Place::parse) {
        return settled(place, get).map(Address::Tcp);
    }
    match text.strip_prefix("unix:") {
        Some(name) if name.starts_with('@') && name.len() > 1 => {
            Ok(Address::Abstract(name[1..].to_owned()))
        }
        Some(path) if !path.is_empty() => Ok(Address::Path(PathBuf::from(path))),
        _ => Err(Error::rendezvous(format!(
            "NCCL_RUN_RENDEZVOUS={text:?} is not understood: write unix:PATH, unix:@NAME, \
             tcp:HOST:PORT, tcp:HOST:FIRST-LAST or tcp:[IPV6]:PORT"
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
