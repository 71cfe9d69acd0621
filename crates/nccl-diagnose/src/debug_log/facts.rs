//! The facts of the logs about each process and its communicators.

use std::collections::BTreeMap;
use std::net::IpAddr;

use nccl_sys::Version;

use nccl_base::warning::Class;

/// The facts about one process.
///
/// They come from lines that carry its host and process number. A fact that the log does not hold is missing, or empty.
///
/// ```
/// use nccl::debug_log::DebugLog;
///
/// let mut log = DebugLog::new();
/// log.read("rank0.log", &b"node-a:4021:4077 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.5<0>\n"[..])?;
/// let process = &log.processes()[0];
/// assert_eq!((&process.host[..], process.pid), ("node-a", 4021));
/// assert_eq!(process.bootstrap.as_ref().unwrap().interface, "eth0");
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Process {
    /// Its host, up to the first dot; empty in a log whose prefixes were removed.
    pub host: String,
    /// Its process number on that host.
    pub pid: u32,
    /// The release of NCCL that it has loaded.
    pub version: Option<Version>,
    /// The interface and address at which it first met the other ranks.
    pub bootstrap: Option<Endpoint>,
    /// The interfaces that sockets use for data.
    pub sockets: Vec<Endpoint>,
    /// The InfiniBand and RoCE adapters that it uses, as NCCL writes them: `mlx5_0:1/IB`.
    pub adapters: Vec<String>,
    /// Whether NCCL looked for such adapters and found none.
    pub no_adapters: bool,
    /// Plugins that are loaded, missing, or failed; by kind: `NET`, `TUNER`, …
    pub plugins: Vec<PluginFact>,
    /// Variables that NCCL took from the environment.
    pub variables: BTreeMap<String, String>,
    /// Settings of its communicators.
    pub config: BTreeMap<String, String>,
    /// How often each algorithm was chosen: `AllReduce RING SIMPLE`.
    pub tuning: BTreeMap<String, u64>,
    /// Whether each adapter can access device memory directly (GPU Direct RDMA).
    pub direct_rdma: BTreeMap<String, bool>,
    /// Why devices of the host have no peer access to each other.
    pub no_peer_access: Vec<String>,
    /// Its communicators, in the order of their starts.
    pub communicators: Vec<Membership>,
    /// Connections that failed at the first attempt.
    pub retries: Vec<Retry>,
    /// Its warnings; equal texts are one entry.
    pub warnings: Vec<Warning>,
    /// Whether it has communicators of launch mode `BlockingChild`, each of which NCCL sees as two.
    pub(super) has_idle_parents: bool,
    /// Idle parents that were named, and whose `Init START` has not been read yet.
    pub(super) idle_to_come: usize,
    /// How many more warnings there were, which are not kept.
    pub more_warnings: u64,
    /// Where in NCCL's source a function first returned an error, and its code (`ncclResult_t`).
    pub first_error: Option<(String, u32)>,
    /// The rank that a launcher wrote before the lines, or into the name of the file.
    pub tag: Option<usize>,
}

/// An interface and its address.
///
/// ```
/// fn show(at: &nccl::debug_log::Endpoint) {
///     println!("{} {:?}", at.interface, at.address);
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Endpoint {
    /// The interface's name.
    pub interface: String,
    /// The address, if the line has one.
    pub address: Option<IpAddr>,
}

/// The state of a plugin.
///
/// ```
/// fn show(plugin: &nccl::debug_log::PluginFact) {
///     println!("{}: {:?} ({})", plugin.kind, plugin.state, plugin.text);
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PluginFact {
    /// `NET`, `TUNER`, `PROFILER`, `ENV`, `GIN`, `RMA`.
    pub kind: String,
    /// Whether it was loaded.
    pub state: PluginState,
    /// Its name, the names that were tried, or the loader's error.
    pub text: String,
}

/// Whether a plugin is used.
///
/// ```
/// use nccl::debug_log::PluginState;
/// assert_ne!(PluginState::Missing, PluginState::Failed);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PluginState {
    /// Not found: the usual case, and a fault only where the plugin was requested.
    Missing,
    /// Loaded and used.
    Loaded,
    /// Found, and not usable.
    Failed,
}

/// One rank of a communicator, as its process describes it.
///
/// ```
/// fn show(member: &nccl::debug_log::Membership) {
///     println!("rank {} of {}: {:?}", member.rank, member.ranks, member.state);
/// }
/// ```
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Membership {
    /// The communicator's address in that process.
    pub comm: String,
    /// The rank.
    pub rank: usize,
    /// The number of ranks.
    pub ranks: usize,
    /// CUDA's number of the device.
    pub device: Option<u32>,
    /// The identifier that all ranks of a communicator share; not written for a split by 2.23 to 2.31.
    pub id: Option<String>,
    /// The communicator that it was split from, shrunk or grown.
    pub parent: Option<String>,
    /// How far its start has come.
    pub state: InitState,
    /// How long the start took, in seconds, and its longest part.
    pub init_seconds: Option<(f64, String, f64)>,
    /// The network for data to other hosts.
    pub network: Option<String>,
    /// The number of hosts, and of ranks on its own host.
    pub layout: Option<(u32, u32)>,
    /// The number of channels of each connection.
    pub links: BTreeMap<Link, u32>,
    /// How many more lines about connections there were, which are not kept.
    pub more_links: u64,
    /// Whether NCCL says that rings use GPU Direct RDMA.
    pub ring_gdr: Option<bool>,
    /// The order of the ranks in the first ring.
    pub ring: Option<String>,
    /// How it ended, if it has.
    pub ended: Option<Ended>,
    /// Whether it carries no data: in launch mode `BlockingChild` it is the idle parent of the communicator that does.
    pub is_idle: bool,
    pub(super) nvml_device: Option<u32>,
    pub(super) net_links: usize,
}

impl Membership {
    /// Whether its start completed, so that all ranks were there. `false` for an idle parent, whose start does not show
    /// that.
    ///
    /// ```
    /// assert!(!nccl::debug_log::Membership::default().came_up());
    /// ```
    #[must_use]
    pub fn came_up(&self) -> bool {
        self.state == InitState::Completed && !self.is_idle
    }

    /// Whether it is a split of `parent` with the same rank and number of ranks.
    pub(super) fn carries_data_of(&self, parent: &Self) -> bool {
        self.parent.as_ref() == Some(&parent.comm)
            && (self.rank, self.ranks) == (parent.rank, parent.ranks)
    }
}

/// How far the start of a communicator has come.
///
/// ```
/// use nccl::debug_log::InitState;
/// assert_eq!(InitState::default(), InitState::Started);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum InitState {
    /// Begun, and not known to be complete.
    #[default]
    Started,
    /// All of its ranks are there.
    Completed,
}

/// How a communicator ended.
///
/// ```
/// use nccl::debug_log::{Ended, Membership};
///
/// fn was_aborted(member: &Membership) -> bool {
///     member.ended == Some(Ended::Aborted)
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Ended {
    /// All of its work is done; the communicator still exists.
    Finalized,
    /// Destroyed in order.
    Destroyed,
    /// Aborted, perhaps in the middle of an operation.
    Aborted,
    /// Its work was stopped; the communicator can be shrunk or split.
    Revoked,
}

/// A connection between two ranks; its value in [`Membership::links`] is the number of channels.
///
/// ```
/// fn show(link: &nccl::debug_log::Link) {
///     println!("{} -> {} by {:?}", link.from, link.to, link.via);
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub struct Link {
    /// The sending rank.
    pub from: usize,
    /// The receiving rank.
    pub to: usize,
    /// The transport.
    pub via: Transport,
}

/// The transport of a connection.
///
/// ```
/// use nccl::debug_log::Transport;
///
/// fn leaves_the_host(via: &Transport) -> bool {
///     matches!(via, Transport::Net { .. })
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Transport {
    /// From device to device: `IPC`, `CUMEM`, `direct pointer`, `MNNVL`, `indirect`.
    P2p(String),
    /// Through host memory.
    Shm,
    /// Over a network, through the adapter with this number.
    Net {
        /// `IB`, `Socket`, or a plugin's name.
        net: String,
        /// The adapter's number.
        adapter: String,
        /// Whether the adapter accesses device memory directly.
        gdr: bool,
    },
}

/// Failed attempts to connect to one address.
///
/// ```
/// fn show(retry: &nccl::debug_log::Retry) {
///     println!("{:?}: {} ({} times)", retry.address, retry.reason, retry.times);
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Retry {
    /// The address; releases before 2.24 do not write it.
    pub address: Option<IpAddr>,
    /// The system's reason.
    pub reason: String,
    /// How often NCCL reported it.
    pub times: u64,
}

impl Retry {
    /// Whether the host is up, and no process listens: as the C library words `ECONNREFUSED` in NCCL's line.
    pub(in crate::debug_log) fn is_refused(&self) -> bool {
        self.reason.contains("refused")
    }
}

/// A warning.
///
/// ```
/// fn show(warning: &nccl::debug_log::Warning) {
///     println!("{}:{}: {}", warning.at.0, warning.at.1, warning.text);
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Warning {
    /// The relation of the warning to the cause.
    pub class: Class,
    /// NCCL's text.
    pub text: String,
    /// Its place in NCCL's source.
    pub place: String,
    /// When, as the log writes it: `2026-11-21 02:17:39`.
    pub time: Option<String>,
    /// The log, and its line.
    pub at: (String, u64),
    /// The rank, if the thread is known.
    pub rank: Option<usize>,
    /// How often it occurred.
    pub times: u64,
}

impl Process {
    /// The rank in its largest communicator; where it has several there, the first. Without a communicator, the rank
    /// that a launcher wrote before the lines.
    ///
    /// ```
    /// use nccl::debug_log::DebugLog;
    ///
    /// let line = b"a:1:1 [0] NCCL INFO ncclCommInitRank comm 0x1 rank 3 nranks 8 cudaDev 0 nvmlDev 0 busId 10 commId 0x2 - Init START";
    /// let mut log = DebugLog::new();
    /// log.read("log", &line[..])?;
    /// assert_eq!(log.processes()[0].rank(), Some(3));
    /// # Ok::<(), std::io::Error>(())
    /// ```
    #[must_use]
    pub fn rank(&self) -> Option<usize> {
        self.ranks().first().copied().or(self.tag)
    }

    /// Its ranks in its largest communicator: several when the ranks are threads.
    ///
    /// ```
    /// assert!(nccl::debug_log::DebugLog::new().processes().iter().all(|process| process.ranks().is_empty()));
    /// ```
    #[must_use]
    pub fn ranks(&self) -> Vec<usize> {
        let largest = self.communicators.iter().map(|one| one.ranks).max();
        let of_largest = self
            .communicators
            .iter()
            .filter(|one| Some(one.ranks) == largest);
        let mut ranks: Vec<usize> = of_largest.map(|one| one.rank).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// Its communicators without the idle parents of launch mode `BlockingChild`. An idle parent whose child has not
    /// begun stands for that child.
    ///
    /// ```
    /// assert!(nccl::debug_log::DebugLog::new().processes().iter().all(|process| process.working().next().is_none()));
    /// ```
    pub fn working(&self) -> impl Iterator<Item = &Membership> {
        let all = self.communicators.iter().enumerate();
        all.filter(|(at, one)| !one.is_idle || !self.has_child(*at))
            .map(|(_, one)| one)
    }

    fn has_child(&self, at: usize) -> bool {
        let parent = &self.communicators[at];
        let mut later = self.communicators[at + 1..].iter();
        later.any(|child| child.carries_data_of(parent))
    }

    /// All known addresses of this process's host.
    pub(super) fn addresses(&self) -> impl Iterator<Item = (&str, IpAddr)> {
        let endpoints = self.bootstrap.iter().chain(&self.sockets);
        endpoints.filter_map(|endpoint| Some((&endpoint.interface[..], endpoint.address?)))
    }

    pub(super) fn variable(&self, name: &str) -> Option<&str> {
        self.variables.get(name).map(String::as_str)
    }
}

/// Bytes of a kept text.
const LONGEST_TEXT: usize = 400;

/// Returns the text, cut to [`LONGEST_TEXT`].
pub(super) fn cut(text: &str) -> String {
    let mut end = text.len().min(LONGEST_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}
