//! The identity of this process among the ranks, and their rendezvous, as configured explicitly.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::address::{Address, FORMS, split};
use super::discovery::{Discovery, DiscoveryHandle, FileDiscovery};
use super::interface::Interface;
use super::job::Job;
use super::limits;
use super::secret::Secret;
use super::tcp;
use crate::error::{Error, Result, ranks};

/// The identity of this process among the ranks, and where the ranks meet. The fields are settings; all but `timeout`
/// and `was_restarted` should be the same on all ranks.
///
/// ```
/// use std::time::Duration;
/// use nccl::Rendezvous;
///
/// let rendezvous = Rendezvous::unix("/tmp/my-job.sock", 0, 2)?.with(|rendezvous| {
///     rendezvous.job = "pretraining-7".into();
///     rendezvous.timeout = Duration::from_secs(300);
/// });
/// assert_eq!((rendezvous.rank(), rendezvous.world_size()), (0, 2));
/// # Ok::<(), nccl::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Rendezvous {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) local_rank: usize,
    /// The address at which rank 0 listens first.
    pub(super) address: Address,
    /// Further addresses at which new processes look for the coordinator when rank 0 has ended.
    pub(super) further_addresses: Vec<Address>,
    /// How long the ranks wait for each other; default 60 s.
    pub timeout: Duration,
    /// The name of the job, of 2048 bytes at most; a rank of another job is refused with that reason. Empty by default;
    /// after [`from_env`](Self::from_env), the launcher's name for the job, or `NCCL_RUN_JOB`.
    pub job: String,
    /// The number of the first membership generation; default 0, or `NCCL_RUN_GENERATION`, or torchrun's restart count.
    /// A launcher that restarts the job increments it, so that a process left over from an earlier attempt is refused.
    pub generation: u64,
    /// The secret of the job; after [`from_env`](Self::from_env) `NCCL_RUN_SECRET`, or the content of the file
    /// `NCCL_RUN_SECRET_FILE`. `World::join` fails for a secret of less than 16 bytes.
    ///
    /// With `None` (default), connections are neither authenticated nor encrypted; rank 0 reports that on stderr when
    /// it listens over TCP.
    pub secret: Option<Secret>,
    /// Whether addresses are translated between the ranks (NAT, a published port of a container, a Kubernetes service
    /// with an address of its own), so that a rank dials a different address from the one at which its peer listens.
    /// `NCCL_RUN_TRANSLATED=1` after [`from_env`](Self::from_env). Default `false`.
    ///
    /// With `false`, a connection is accepted only at the address that was dialled: a listener at another port or
    /// address cannot relay it. With `true`, the address is not checked: a relay learns when ranks communicate and how
    /// much, but neither reads nor changes their messages.
    pub translated_addresses: bool,
    /// The number of processes without a rank ([`Witness`](crate::Witness)) that vote in the job, 64 at most; rank 0
    /// waits for them as for the ranks. `NCCL_RUN_WITNESSES` after [`from_env`](Self::from_env). Default 0.
    pub witnesses: u32,
    /// How long a process that does not reach a majority waits for one before it counts as permanently cut off and
    /// reports that (default 12 s; less than 6 s counts as 6 s). After a shorter outage the job can continue, and until
    /// the timeout an operator can decide which side continues (`World::decide_split`).
    pub majority_timeout: Duration,
    /// Whether ranks stay together while NCCL still moves data between all of them, although the control connection
    /// between some of them is lost. The ranks without a connection are reported as unreachable 3 s after NCCL stops
    /// moving data. With `false`, they are reported as soon as the connection is given up. Default `true`;
    /// `NCCL_RUN_UNREACHABLE=abort` or `tolerate` after [`from_env`](Self::from_env).
    ///
    /// If any rank sets `false`, that applies to all ranks; the log names that rank.
    ///
    /// Only calls, groups and replays of captured plans that need data of every rank (`all_reduce`, `all_gather`,
    /// `reduce_scatter`, `all_to_all`, messages from all other ranks), on communicators of all ranks of the world, show
    /// that NCCL moves data.
    pub tolerate_unreachable: bool,
    /// Whether this process was started in place of one that has ended, while the other ranks continue
    /// (`NCCL_RUN_RESTARTED`, which `nccl-run --restart failed` and `Fleet::restart` set). Such a process joins with
    /// `World::join_running` instead of `World::join`.
    ///
    /// ```no_run
    /// use nccl::{Rendezvous, World};
    ///
    /// let rendezvous = Rendezvous::from_env()?;
    /// let world = match rendezvous.was_restarted {
    ///     false => World::join(rendezvous)?,
    ///     true => World::join_running(rendezvous)?,
    /// };
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub was_restarted: bool,
    /// Whether the local rank is derived by counting the ranks of the host, because it was not configured.
    pub(super) counts_local_rank: bool,
    /// Describes which of two contradicting launchers takes precedence; for errors.
    pub(super) launcher_conflict: Option<String>,
}

impl Rendezvous {
    /// Creates the rendezvous for ranks of one host that meet at the Unix socket `path`, which rank 0 creates.
    ///
    /// # Errors
    /// [`ErrorKind::Rendezvous`](crate::error::ErrorKind::Rendezvous) when `rank` is not below `world_size`, or
    /// `world_size` is more than 1048576.
    ///
    /// ```
    /// assert!(nccl::Rendezvous::unix("/tmp/my-job.sock", 2, 2).is_err());
    /// ```
    pub fn unix(path: impl Into<PathBuf>, rank: usize, world_size: usize) -> Result<Self> {
        Self::new(rank, world_size, rank, Address::Path(path.into()))
    }

    /// Creates the rendezvous for ranks on several hosts that meet over TCP at `host` and `port`, where rank 0 runs.
    /// Rank 0 listens at that one address, never at all addresses of the host.
    ///
    /// # Errors
    /// [`ErrorKind::Rendezvous`](crate::error::ErrorKind::Rendezvous) when `rank` is not below `world_size`, or
    /// `world_size` is more than 1048576.
    ///
    /// ```
    /// let rendezvous = nccl::Rendezvous::tcp("10.0.0.5", 29_400, 3, 16)?;
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn tcp(host: impl Into<String>, port: u16, rank: usize, world_size: usize) -> Result<Self> {
        let host_ports = tcp::HostPorts::new(host, (port, port));
        let mut rendezvous = Self::new(rank, world_size, rank, Address::Tcp(host_ports))?;
        rendezvous.counts_local_rank = true;
        Ok(rendezvous)
    }

    /// Over TCP: rank 0 takes the first free port from its own to `last`, and the other ranks try all of them.
    ///
    /// ```
    /// let rendezvous = nccl::Rendezvous::tcp("10.0.0.5", 29_400, 3, 16)?.up_to_port(29_415);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn up_to_port(mut self, last: u16) -> Self {
        if let Address::Tcp(host_ports) = &mut self.address {
            host_ports.ports.1 = last.max(host_ports.ports.0);
        }
        self
    }

    /// Over TCP: rank 0 writes its address into the file at `path`, and the other ranks read it there; all ranks must
    /// be able to read the file. Claims are files beside it, with `.claim-` after its name; the file system must
    /// support hard links. Port 0 means any free port.
    ///
    /// ```
    /// let rendezvous = nccl::Rendezvous::tcp("10.0.0.5", 0, 3, 16)?.publish("/shared/job-7.address");
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn publish(self, path: impl Into<PathBuf>) -> Self {
        self.discovery(Arc::new(FileDiscovery::new(path)))
    }

    /// Over TCP: rank 0 publishes its address in `discovery`, and the other ranks find it there. Port 0 means any free port.
    ///
    /// ```
    /// # fn example(discovery: std::sync::Arc<dyn nccl::control::Discovery>) -> nccl::Result<()> {
    /// let rendezvous = nccl::Rendezvous::tcp("10.0.0.5", 0, 3, 16)?.discovery(discovery);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn discovery(mut self, discovery: Arc<dyn Discovery>) -> Self {
        if let Address::Tcp(host_ports) = &mut self.address {
            host_ports.discovery = Some(DiscoveryHandle(discovery));
        }
        self
    }

    /// Over TCP: sets where rank 0 listens: an interface (`eth0`), the beginning of its name (`eth`), a subnet
    /// (`10.0.0.0/8`), an address, or `*` for all. Default: the address of `host`.
    ///
    /// # Errors
    /// [`ErrorKind::Rendezvous`](crate::error::ErrorKind::Rendezvous) when `interface` is none of these.
    ///
    /// ```
    /// let rendezvous = nccl::Rendezvous::tcp("10.0.0.5", 29_400, 3, 16)?.interface("eth0")?;
    /// assert!(nccl::Rendezvous::tcp("10.0.0.5", 29_400, 3, 16)?.interface("10.0.0.0/40").is_err());
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn interface(mut self, interface: &str) -> Result<Self> {
        let interface = Interface::parse(interface)?;
        if let Address::Tcp(host_ports) = &mut self.address {
            host_ports.interface = Some(interface);
        }
        Ok(self)
    }

    /// Returns the interface that was set.
    #[doc(hidden)]
    pub fn interface_text(&self) -> Option<String> {
        self.address.interface()
    }

    /// Adds an address at which the coordinator may be found when rank 0 has ended, for example `tcp:HOST:PORT` on
    /// another host. A rank that takes over listens at those addresses of its own host that are among these and rank
    /// 0's; a new process (`World::join_running`, `Observer`) tries all of them. The addresses should be the same on
    /// all ranks. In `NCCL_RUN_RENDEZVOUS`, they follow the first, separated by commas.
    ///
    /// # Errors
    /// [`ErrorKind::Rendezvous`](crate::error::ErrorKind::Rendezvous) when `address` has none of the forms of
    /// [`observer`](Self::observer).
    ///
    /// ```
    /// let rendezvous = nccl::Rendezvous::tcp("10.0.0.5", 29_400, 3, 16)?.add_address("tcp:10.0.0.6:29400")?;
    /// assert!(nccl::Rendezvous::tcp("10.0.0.5", 29_400, 3, 16)?.add_address("10.0.0.6").is_err());
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn add_address(mut self, address: &str) -> Result<Self> {
        self.further_addresses.push(parse_address(address)?);
        Ok(self)
    }

    /// Sets fields in a chain of calls.
    ///
    /// ```
    /// use std::time::Duration;
    /// let rendezvous = nccl::Rendezvous::unix("/tmp/my-job.sock", 0, 1)?;
    /// let rendezvous = rendezvous.with(|rendezvous| rendezvous.timeout = Duration::from_secs(5));
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn with(mut self, set: impl FnOnce(&mut Self)) -> Self {
        set(&mut self);
        self
    }

    /// Returns this process's rank.
    ///
    /// ```
    /// assert_eq!(nccl::Rendezvous::unix("/tmp/my-job.sock", 1, 2)?.rank(), 1);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of ranks.
    ///
    /// ```
    /// assert_eq!(nccl::Rendezvous::unix("/tmp/my-job.sock", 1, 2)?.world_size(), 2);
    /// # Ok::<(), nccl::Error>(())
    /// ```
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Creates a rendezvous for an `Observer`, which has no rank and need not know the number of ranks. `address` is
    /// `unix:PATH`, `unix:@NAME`, `tcp:HOST:PORT` or `tcp:HOST:FIRST-LAST`, or a comma-separated list of these, which
    /// is equivalent to [`add_address`](Self::add_address).
    ///
    /// # Errors
    /// [`ErrorKind::Rendezvous`](crate::error::ErrorKind::Rendezvous) when `address` is none of these.
    ///
    /// ```no_run
    /// let secret = std::fs::read("/etc/server/secret").expect("the job's secret");
    /// let rendezvous = nccl::Rendezvous::observer("tcp:10.0.0.5:29400")?;
    /// let rendezvous = rendezvous.with(|rendezvous| rendezvous.secret = Some(secret.into()));
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn observer(address: &str) -> Result<Self> {
        let mut addresses = split(address).map(parse_address);
        let mut rendezvous = match addresses.next() {
            Some(first) => Self::observing(first?),
            None => Self::observing(parse_address(address)?),
        };
        rendezvous.further_addresses = addresses.collect::<Result<_>>()?;
        Ok(rendezvous)
    }

    /// Returns what identifies the job in every handshake.
    pub(super) fn job_identity(&self) -> Job {
        Job {
            name: self.job.clone(),
            generation: self.generation,
            secret: self.secret.clone(),
            translated: self.translated_addresses,
        }
    }

    /// Returns the number of witnesses to wait for.
    pub(super) fn expected_witnesses(&self) -> u32 {
        self.witnesses.min(limits::WITNESSES)
    }

    /// Returns how long a process without a majority waits for one.
    pub(super) fn bounded_majority_timeout(&self) -> Duration {
        let longest = Duration::from_secs(1 << 30);
        self.majority_timeout
            .clamp(DEFAULT_MAJORITY_TIMEOUT / 2, longest)
    }

    /// Returns the addresses at which a new process looks for the coordinator.
    pub(super) fn addresses(&self) -> Vec<Address> {
        let first = std::iter::once(&self.address);
        first.chain(&self.further_addresses).cloned().collect()
    }

    pub(super) fn new(
        rank: usize,
        world_size: usize,
        local_rank: usize,
        address: Address,
    ) -> Result<Self> {
        limits::size(world_size).map_err(Error::rendezvous)?;
        if rank >= world_size {
            return Err(Error::rendezvous(format!(
                "rank {rank} of {world_size} does not exist: {}",
                ranks(world_size)
            )));
        }
        let mut rendezvous = Self::observing(address);
        rendezvous.rank = rank;
        rendezvous.world_size = world_size;
        rendezvous.local_rank = local_rank;
        Ok(rendezvous)
    }

    /// Creates a rendezvous of a world whose number of ranks is not known yet (0).
    pub(super) fn observing(address: Address) -> Self {
        Self {
            rank: 0,
            world_size: 0,
            local_rank: 0,
            address,
            further_addresses: Vec::new(),
            timeout: Duration::from_secs(60),
            job: String::new(),
            generation: 0,
            secret: None,
            translated_addresses: false,
            witnesses: 0,
            majority_timeout: DEFAULT_MAJORITY_TIMEOUT,
            tolerate_unreachable: true,
            was_restarted: false,
            counts_local_rank: false,
            launcher_conflict: None,
        }
    }
}

/// See [`Rendezvous::majority_timeout`].
const DEFAULT_MAJORITY_TIMEOUT: Duration = Duration::from_secs(12);

fn parse_address(address: &str) -> Result<Address> {
    Address::parse(address).ok_or_else(|| {
        let forms = FORMS;
        Error::rendezvous(format!("{address:?} is not understood: {forms}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::Timing;

    #[test]
    fn a_majority_timeout_of_less_than_6_s_counts_as_6_s() {
        let seconds = Duration::from_secs;
        for (set, counts) in [
            (Duration::ZERO, seconds(6)),
            (Duration::from_millis(5999), seconds(6)),
            (seconds(7), seconds(7)),
            (Duration::MAX, seconds(1 << 30)),
        ] {
            let mut rendezvous = Rendezvous::unix("/tmp/socket", 0, 1).unwrap();
            rendezvous.majority_timeout = set;
            assert_eq!(rendezvous.bounded_majority_timeout(), counts, "{set:?}");
        }
        let shortest = seconds(6).as_nanos() as u64;
        let timing = Timing::default();
        assert!(shortest >= 2 * timing.confirm && shortest > timing.elect + timing.hold);
    }
}
