//! The known launchers, and the identity that their variables give this process.

use std::cell::RefCell;
use std::ffi::OsString;

use crate::error::{Error, Result};

/// How ranks on several hosts find their meeting address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scheme {
    /// A caller or a variable sets it.
    Run,
    Torchrun,
    OpenMpi,
    Hydra,
    Slurm,
    Kubernetes,
}

/// A launcher's variables; where several names are listed, the first one that is set counts.
pub(super) struct Launcher {
    pub(super) name: &'static str,
    pub(super) rank: &'static str,
    size: &'static [&'static str],
    /// The rank among those of this host.
    local_rank: &'static str,
    /// The number of ranks on this host.
    local_size: &'static [&'static str],
    /// The variables that distinguish the launcher's jobs, for the derived rendezvous name.
    job: &'static [&'static str],
    pub(super) scheme: Scheme,
}

/// When the variables of two launchers are set, the one that is earlier in this list counts: it started the process
/// last.
const LAUNCHERS: [Launcher; 6] = [
    Launcher {
        name: "nccl-run",
        rank: "NCCL_RUN_RANK",
        size: &["NCCL_RUN_WORLD_SIZE"],
        local_rank: "NCCL_RUN_LOCAL_RANK",
        local_size: &["NCCL_RUN_LOCAL_WORLD_SIZE"],
        job: &[],
        scheme: Scheme::Run,
    },
    Launcher {
        name: "torchrun",
        rank: "RANK",
        size: &["WORLD_SIZE"],
        local_rank: "LOCAL_RANK",
        local_size: &["LOCAL_WORLD_SIZE"],
        job: &[
            "TORCHELASTIC_RUN_ID",
            RESTART_COUNT,
            "MASTER_ADDR",
            "MASTER_PORT",
        ],
        scheme: Scheme::Torchrun,
    },
    Launcher {
        name: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        size: &["OMPI_COMM_WORLD_SIZE"],
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_size: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
        job: &["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"],
        scheme: Scheme::OpenMpi,
    },
    Launcher {
        name: "Hydra (MPICH, Intel MPI)",
        rank: "PMI_RANK",
        size: &["PMI_SIZE"],
        local_rank: "MPI_LOCALRANKID",
        local_size: &["MPI_LOCALNRANKS"],
        job: &[],
        scheme: Scheme::Hydra,
    },
    Launcher {
        name: "Slurm",
        rank: "SLURM_PROCID",
        size: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
        local_rank: "SLURM_LOCALID",
        local_size: &["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"],
        job: &["SLURM_JOB_ID", "SLURM_STEP_ID"],
        scheme: Scheme::Slurm,
    },
    // One rank for each pod. Kubernetes does not pass the number of pods to the pods.
    Launcher {
        name: "an indexed job of Kubernetes",
        rank: "JOB_COMPLETION_INDEX",
        size: &["NCCL_RUN_WORLD_SIZE"],
        local_rank: "NCCL_RUN_LOCAL_RANK",
        local_size: &["NCCL_RUN_LOCAL_WORLD_SIZE"],
        job: &[],
        scheme: Scheme::Kubernetes,
    },
];

/// How often torchrun's agent has started its ranks again.
const RESTART_COUNT: &str = "TORCHELASTIC_RESTART_COUNT";

/// Returns the variable with the number of this attempt, if it is the same for all ranks of the attempt. torchrun has an agent
/// on each host, and each counts the failures of its own ranks alone (`LocalElasticAgent::_start_workers` of PyTorch).
pub(super) fn attempt(get: impl Fn(&str) -> Option<String>) -> Option<(&'static str, String)> {
    let names: &[_] = match has_one_agent(&get) {
        true => &["NCCL_RUN_GENERATION", RESTART_COUNT],
        false => &["NCCL_RUN_GENERATION"],
    };
    first_set(names, get)
}

/// Whether all ranks of torchrun were started by one agent.
fn has_one_agent(get: impl Fn(&str) -> Option<String>) -> bool {
    let number = |name| get(name).and_then(|text| text.trim().parse::<usize>().ok());
    let is_whole = match (number("LOCAL_WORLD_SIZE"), number("WORLD_SIZE")) {
        (Some(here), Some(all)) => here == all,
        _ => true,
    };
    is_whole && number("GROUP_WORLD_SIZE").is_none_or(|agents| agents == 1)
}

/// Variables that distinguish torchrun from a `RANK` that was set by hand.
const TORCHRUNS_OWN: [&str; 3] = ["LOCAL_RANK", "TORCHELASTIC_RUN_ID", "GROUP_RANK"];

/// The launcher that counts, and those that agree with it. For example, `srun` also provides PMI variables to its
/// processes, and only one of the two sets states the local rank.
pub(super) struct Launch {
    pub(super) rank: usize,
    pub(super) size: usize,
    agreeing: Vec<&'static Launcher>,
    /// Other variables that are set and disagree.
    others: Vec<String>,
}

/// Returns the rank that a launcher gave this process, if any.
///
/// # Errors
/// [`ErrorKind::Rendezvous`](crate::error::ErrorKind::Rendezvous) for a launcher's variable that is not text.
pub(crate) fn launched_rank() -> Result<Option<usize>> {
    rank(|name| std::env::var_os(name))
}

/// Returns whether a launcher has given this process a rank, including a rank that cannot be parsed.
#[doc(hidden)]
#[must_use]
pub fn is_launched() -> bool {
    let mut ranks = LAUNCHERS.iter().map(|launcher| launcher.rank);
    ranks.any(|rank| std::env::var_os(rank).is_some())
}

/// Whether the launcher takes part in the world as an observer, which reports how the processes it has started end.
pub(crate) fn is_observed() -> bool {
    std::env::var_os("NCCL_RUN_OBSERVED").is_some_and(|value| value == "1")
}

pub(super) fn rank(get: impl Fn(&str) -> Option<OsString>) -> Result<Option<usize>> {
    as_text(get, |get| {
        Ok(Launch::find(get).ok().map(|launch| launch.rank))
    })
}

impl Launch {
    pub(super) fn find(get: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let mut set = LAUNCHERS
            .iter()
            .filter(|launcher| get(launcher.rank).is_some());
        let Some(launcher) = set.next() else {
            let names: Vec<_> = LAUNCHERS
                .iter()
                .map(|l| format!("{} ({})", l.rank, l.name))
                .collect();
            return Err(Error::rendezvous(format!(
                "no launcher said which rank this process is: none of {} is set",
                names.join(", ")
            )));
        };
        let (rank, size) = launcher.rank_and_size(&get)?;
        let mut launch = Self {
            rank,
            size,
            agreeing: vec![launcher],
            others: Vec::new(),
        };
        for other in set {
            match other.rank_and_size(&get) {
                Ok(other_rank_and_size) if other_rank_and_size == (rank, size) => {
                    launch.agreeing.push(other)
                }
                found => {
                    let by_hand = launcher.scheme == Scheme::Torchrun
                        && TORCHRUNS_OWN.iter().all(|name| get(name).is_none());
                    if by_hand && found.is_ok_and(|(_, other)| other == size) {
                        return Err(Error::rendezvous(format!(
                            "{} and {} say that this process is another rank each: unset {} and {} if \
                             no torchrun set them",
                            launcher.describe(&get),
                            other.describe(&get),
                            launcher.rank,
                            launcher.size[0]
                        )));
                    }
                    launch.others.push(other.describe(&get));
                }
            }
        }
        Ok(launch)
    }

    pub(super) fn launcher(&self) -> &'static Launcher {
        self.agreeing[0]
    }

    pub(super) fn schemes(&self) -> impl Iterator<Item = Scheme> + '_ {
        self.agreeing.iter().map(|launcher| launcher.scheme)
    }

    /// Returns the launcher's name for its job.
    pub(super) fn job_name(&self, get: impl Fn(&str) -> Option<String>) -> String {
        let names =
            |launcher: &&Launcher| Some(launcher.job_name(&get)).filter(|name| !name.is_empty());
        self.agreeing.iter().find_map(names).unwrap_or_default()
    }

    /// Returns the name that the launcher of this scheme has for the job.
    pub(super) fn job_name_of(
        &self,
        scheme: Scheme,
        get: impl Fn(&str) -> Option<String>,
    ) -> String {
        let launcher = self
            .agreeing
            .iter()
            .find(|launcher| launcher.scheme == scheme);
        launcher.map_or_else(String::new, |launcher| launcher.job_name(get))
    }

    pub(super) fn local_rank(&self, get: impl Fn(&str) -> Option<String>) -> Result<usize> {
        let said = |launcher: &&&Launcher| get(launcher.local_rank).is_some();
        match self.agreeing.iter().find(said) {
            Some(launcher) => launcher.number(launcher.local_rank, get),
            None if self.launcher().scheme == Scheme::Kubernetes => Ok(0),
            None => Ok(self.rank),
        }
    }

    /// Describes the ranks, if they are on several hosts.
    pub(super) fn several_hosts(
        &self,
        get: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<String>> {
        let size = self.size;
        for launcher in &self.agreeing {
            let Some((name, text)) = first_set(launcher.local_size, &get) else {
                continue;
            };
            let here = leading_number(&text).ok_or_else(|| launcher.no_number(name, &text))?;
            return Ok((here != size).then(|| {
                format!(
                    "{} started {size} ranks, {here} of them on this host ({name}={text}): ranks on \
                     several hosts",
                    launcher.name
                )
            }));
        }
        if let Some(host) = self.elsewhere(&get) {
            let launcher = self.launcher();
            return Err(Error::rendezvous(format!(
                "{}, and MASTER_ADDR={host}, which may be another host, but not {}: set it to the number of ranks on this \
                 host, and {}",
                launcher.describe(&get),
                launcher.local_size[0],
                launcher.local_rank
            )));
        }
        if self.launcher().scheme == Scheme::Kubernetes && size > 1 {
            return Ok(Some(format!(
                "{} started {size} ranks, each in a pod of its own: ranks on several hosts",
                self.launcher().name
            )));
        }
        Ok(None)
    }

    /// Returns the host that `MASTER_ADDR` names, if that may be another one, and nothing else says where the ranks meet.
    fn elsewhere(&self, get: impl Fn(&str) -> Option<String>) -> Option<String> {
        if self.launcher().scheme != Scheme::Torchrun
            || self.size == 1
            || get("NCCL_RUN_RENDEZVOUS").is_some()
        {
            return None;
        }
        get("MASTER_ADDR").filter(|host| {
            let host = host.trim();
            let is_loopback = host.parse::<std::net::IpAddr>();
            let is_loopback = is_loopback.is_ok_and(|address| address.is_loopback());
            !(host.is_empty() || host.eq_ignore_ascii_case("localhost") || is_loopback)
        })
    }

    /// Describes for errors where the rank and the number of ranks come from, if the variables of several launchers are
    /// set.
    pub(super) fn conflict_text(&self, get: impl Fn(&str) -> Option<String>) -> Option<String> {
        if self.others.is_empty() {
            return None;
        }
        Some(format!(
            "rank and number are those of {}; {} was set, too, and does not count",
            self.launcher().describe(get),
            self.others.join(", ")
        ))
    }
}

/// Calls `read` with access to variables that must be text. A requested variable that is not text is an error: if it
/// were treated as unset, the rank could end up in another job.
pub(super) fn as_text<T>(
    get: impl Fn(&str) -> Option<OsString>,
    read: impl FnOnce(&dyn Fn(&str) -> Option<String>) -> Result<T>,
) -> Result<T> {
    let unreadable = RefCell::new(None);
    let read = read(&|name| match get(name)?.into_string() {
        Ok(text) => Some(text),
        Err(value) => {
            unreadable.borrow_mut().get_or_insert_with(|| {
                let why = format!("{name}={value:?} is not UTF-8: set it to text, or unset it");
                Error::rendezvous(why)
            });
            None
        }
    });
    match unreadable.into_inner() {
        Some(error) => Err(error),
        None => read,
    }
}

pub(super) fn first_set(
    names: &[&'static str],
    get: impl Fn(&str) -> Option<String>,
) -> Option<(&'static str, String)> {
    names.iter().find_map(|name| Some((*name, get(name)?)))
}

impl Launcher {
    /// Returns its own name for its job; empty if it has none.
    fn job_name(&self, get: impl Fn(&str) -> Option<String>) -> String {
        let is_of_all = |name: &&&str| **name != RESTART_COUNT || has_one_agent(&get);
        let names = self.job.iter().filter(is_of_all);
        let values: Vec<_> = names.filter_map(|name| get(name)).collect();
        values.join("/")
    }

    /// Reads the rank and the number of ranks.
    fn rank_and_size(&self, get: impl Fn(&str) -> Option<String>) -> Result<(usize, usize)> {
        let rank = self.number(self.rank, &get)?;
        let Some((size, _)) = first_set(self.size, &get) else {
            let both = match self.scheme {
                Scheme::Kubernetes => "set it to the number of completions".to_owned(),
                _ => format!("{} sets both", self.name),
            };
            let name = self.size[self.size.len() - 1];
            return Err(Error::rendezvous(format!(
                "{} is set, but not {name}: {both}",
                self.rank
            )));
        };
        Ok((rank, self.number(size, get)?))
    }

    fn number(&self, name: &'static str, get: impl Fn(&str) -> Option<String>) -> Result<usize> {
        let text = get(name).unwrap_or_default();
        let number = text.trim().parse();
        number.map_err(|_| self.no_number(name, &text))
    }

    fn no_number(&self, name: &str, text: &str) -> Error {
        let launcher = self.name;
        Error::rendezvous(format!("{name}={text:?} of {launcher} is not a number"))
    }

    /// Formats `RANK=1 WORLD_SIZE=4 (torchrun)`.
    pub(super) fn describe(&self, get: impl Fn(&str) -> Option<String>) -> String {
        let rank = get(self.rank).unwrap_or_default();
        let size = match first_set(self.size, get) {
            Some((name, size)) => format!(" {name}={size}"),
            None => String::new(),
        };
        format!("{}={rank}{size} ({})", self.rank, self.name)
    }
}

/// Slurm writes `4`, or `4(x2),3` for several hosts; the first number suffices here.
fn leading_number(text: &str) -> Option<usize> {
    let text = text.trim();
    let end = text
        .find(|letter: char| !letter.is_ascii_digit())
        .unwrap_or(text.len());
    text[..end].parse().ok()
}
