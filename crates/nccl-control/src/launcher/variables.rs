//! Who this process is, by the variables of whatever started it.

use std::cell::RefCell;
use std::ffi::OsString;

use super::address::{self, FORMS};
use super::of_process::Descent;
use crate::environment::Rendezvous;
use crate::error::{Error, Result, ranks};
use crate::job::Job;
use crate::limits;
use crate::place::Address;
use crate::secret::Secret;

/// How ranks on several hosts find where to meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scheme {
    /// Somebody says it.
    Run,
    Torchrun,
    Mpi,
    Slurm,
    Kubernetes,
}

/// A launcher's variables; of several names, the first that is set.
pub(super) struct Launcher {
    pub(super) name: &'static str,
    pub(super) rank: &'static str,
    size: &'static [&'static str],
    /// The rank among those of this host.
    local_rank: &'static str,
    /// How many there are on this host.
    local_size: &'static [&'static str],
    /// What tells its jobs apart, for the name of the meeting place.
    job: &'static [&'static str],
    scheme: Scheme,
}

/// Of the variables of two launchers, the earlier one counts: what started the process last.
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
            "TORCHELASTIC_RESTART_COUNT",
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
        scheme: Scheme::Mpi,
    },
    Launcher {
        name: "Hydra (MPICH, Intel MPI)",
        rank: "PMI_RANK",
        size: &["PMI_SIZE"],
        local_rank: "MPI_LOCALRANKID",
        local_size: &["MPI_LOCALNRANKS"],
        job: &[],
        scheme: Scheme::Mpi,
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
    // One rank for each pod. How many there are is not told to pods.
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

/// What set torchrun apart from somebody who set `RANK` by hand.
const TORCHRUNS_OWN: [&str; 3] = ["LOCAL_RANK", "TORCHELASTIC_RUN_ID", "GROUP_RANK"];

/// The launcher that counts, and those that say the same: `srun` also speaks PMI to its processes, for
/// example, and only one of the two says where they are.
pub(super) struct Launch {
    pub(super) rank: usize,
    size: usize,
    agreeing: Vec<&'static Launcher>,
    /// What is set beside it, and says something else.
    others: Vec<String>,
}

/// Which rank the launcher started this process as, where one says so.
pub(super) fn rank(get: impl Fn(&str) -> Option<OsString>) -> Result<Option<usize>> {
    as_text(get, |get| {
        Ok(Launch::find(get).ok().map(|launch| launch.rank))
    })
}

impl Launch {
    fn find(get: impl Fn(&str) -> Option<String>) -> Result<Self> {
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
        let (rank, size) = launcher.identity(&get)?;
        let mut launch = Self {
            rank,
            size,
            agreeing: vec![launcher],
            others: Vec::new(),
        };
        for other in set {
            match other.identity(&get) {
                Ok(identity) if identity == (rank, size) => launch.agreeing.push(other),
                found => {
                    let by_hand = launcher.scheme == Scheme::Torchrun
                        && TORCHRUNS_OWN.iter().all(|name| get(name).is_none());
                    if by_hand && found.is_ok_and(|(_, other)| other == size) {
                        return Err(Error::rendezvous(format!(
                            "{} and {} say that this process is another rank each: unset {} and {} if \
                             no torchrun set them",
                            launcher.says(&get),
                            other.says(&get),
                            launcher.rank,
                            launcher.size[0]
                        )));
                    }
                    launch.others.push(other.says(&get));
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

    /// What the launcher calls its job.
    pub(super) fn job_name(&self, get: impl Fn(&str) -> Option<String>) -> String {
        let names = |launcher: &&Launcher| {
            let values: Vec<_> = launcher.job.iter().filter_map(|name| get(name)).collect();
            (!values.is_empty()).then(|| values.join("/"))
        };
        self.agreeing.iter().find_map(names).unwrap_or_default()
    }

    fn local_rank(&self, get: impl Fn(&str) -> Option<String>) -> Result<usize> {
        let said = |launcher: &&&Launcher| get(launcher.local_rank).is_some();
        match self.agreeing.iter().find(said) {
            Some(launcher) => launcher.number(launcher.local_rank, get),
            None if self.launcher().scheme == Scheme::Kubernetes => Ok(0),
            None => Ok(self.rank),
        }
    }

    /// What the ranks are, if they are on several hosts.
    fn several_hosts(&self, get: impl Fn(&str) -> Option<String>) -> Result<Option<String>> {
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
        if self.launcher().scheme == Scheme::Kubernetes && size > 1 {
            return Ok(Some(format!(
                "{} started {size} ranks, each in a pod of its own: ranks on several hosts",
                self.launcher().name
            )));
        }
        Ok(None)
    }

    /// What errors say about where rank and number come from, when it could be doubted.
    fn said(&self, get: impl Fn(&str) -> Option<String>) -> Option<String> {
        if self.others.is_empty() {
            return None;
        }
        Some(format!(
            "rank and number are those of {}; {} was set, too, and does not count",
            self.launcher().says(get),
            self.others.join(", ")
        ))
    }
}

impl Rendezvous {
    /// As [`from_env`](Self::from_env), with other variables than those of this process: `get` is asked for them
    /// by name, and answers with a `String` or an `OsString`.
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
    pub fn from_variables<V: Into<OsString>>(get: impl Fn(&str) -> Option<V>) -> Result<Self> {
        Self::from_variables_of(Descent::own(), |name| get(name).map(Into::into))
    }

    /// As a rank that descends from these.
    pub(super) fn from_variables_of(
        own: Descent,
        get: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Self> {
        let secret = Secret::from_variables(&get)?;
        let mut rendezvous = as_text(get, |get| Self::from_text(own, get))?;
        rendezvous.job.secret = secret;
        Ok(rendezvous)
    }

    /// Without a secret, which need not be text.
    fn from_text(own: Descent, get: &dyn Fn(&str) -> Option<String>) -> Result<Self> {
        let launch = Launch::find(get)?;
        let launcher = launch.launcher();
        let (rank, world_size) = (launch.rank, launch.size);
        let local_rank = launch.local_rank(get)?;
        let several_hosts = launch.several_hosts(get)?;
        let mut others = Vec::new();
        let mut address = match get("NCCL_RUN_RENDEZVOUS") {
            Some(text) => {
                let (first, rest) = address::parse(&text, get)?;
                others = rest;
                first
            }
            None if launcher.scheme == Scheme::Run => {
                return Err(Error::rendezvous(format!(
                    "{} is set, but not NCCL_RUN_RENDEZVOUS=unix:PATH or tcp:HOST:PORT, where the ranks \
                     meet",
                    launcher.rank
                )));
            }
            None => match &several_hosts {
                None => address::on_one_host(&launch, own, get),
                Some(several) => Address::Tcp(address::between_hosts(&launch, several, get)?),
            },
        };
        match (several_hosts, &mut address) {
            (None, _) => {}
            (Some(_), Address::Tcp(place)) => place.across = true,
            (Some(several), _) => {
                return Err(Error::rendezvous(format!(
                    "{several} cannot meet at {address}: set NCCL_RUN_RENDEZVOUS=tcp:HOST:PORT"
                )));
            }
        }
        let mut rendezvous = Self::new(rank, world_size, local_rank, address).map_err(|_| {
            let why = limits::size(world_size)
                .err()
                .unwrap_or_else(|| format!("they contradict each other: {}", ranks(world_size)));
            Error::rendezvous(format!("{}: {why}", launcher.says(get)))
        })?;
        rendezvous.others = others;
        rendezvous.restarted = get("NCCL_RUN_RESTARTED").is_some_and(|text| text == "1");
        rendezvous.job = job(launch.job_name(get), get)?;
        if let Some(text) = get("NCCL_RUN_WITNESSES") {
            let count = text.trim().parse().map_err(|_| {
                let most = limits::WITNESSES;
                Error::rendezvous(format!(
                    "NCCL_RUN_WITNESSES={text:?} is not a number of witnesses: 0 to {most}"
                ))
            })?;
            rendezvous = rendezvous.witnesses(count);
        }
        rendezvous.said = launch.said(get);
        if let Some(said) = &rendezvous.said {
            tracing::info!(name: "nccl.rendezvous.launchers", target: "nccl", said, "two launchers");
        }
        Ok(rendezvous)
    }

    /// What an observer's process is told by the variables of `nccl-run`.
    pub(crate) fn observer_from_variables(get: impl Fn(&str) -> Option<OsString>) -> Result<Self> {
        let rendezvous = as_text(&get, |get| {
            let Some(text) = get("NCCL_RUN_RENDEZVOUS") else {
                return Err(Error::rendezvous(format!(
                    "NCCL_RUN_RENDEZVOUS is not set, where the ranks meet that are to be observed: {FORMS}"
                )));
            };
            let (first, others) = address::parse(&text, get)?;
            let mut rendezvous = Self::observing(first);
            rendezvous.others = others;
            Ok(rendezvous)
        })?;
        rendezvous.job_from_variables(get)
    }

    pub(crate) fn job_from_variables(
        mut self,
        get: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Self> {
        self.job = as_text(&get, |get| job(String::new(), get))?;
        self.job.secret = Secret::from_variables(get)?;
        Ok(self)
    }
}

/// What `read` makes of variables that have to be text: an error where one that it asks for is not, because to take
/// it as unset would mean another job.
fn as_text<T>(
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

/// What the ranks of this launch have in common, except the secret.
fn job(of_launcher: String, get: impl Fn(&str) -> Option<String>) -> Result<Job> {
    let epoch = match first_set(&["NCCL_RUN_EPOCH", "TORCHELASTIC_RESTART_COUNT"], &get) {
        None => 0,
        Some((name, text)) => text.trim().parse().map_err(|_| {
            Error::rendezvous(format!("{name}={text:?} is not the number of an attempt"))
        })?,
    };
    Ok(Job {
        name: get("NCCL_RUN_JOB").unwrap_or(of_launcher),
        epoch,
        secret: None,
        translated: match get("NCCL_RUN_TRANSLATED").as_deref().map(str::trim) {
            None | Some("" | "0") => false,
            Some("1") => true,
            Some(other) => {
                return Err(Error::rendezvous(format!(
                    "NCCL_RUN_TRANSLATED={other:?} is neither 1 nor 0: whether addresses are translated between the ranks"
                )));
            }
        },
    })
}

fn first_set(
    names: &[&'static str],
    get: impl Fn(&str) -> Option<String>,
) -> Option<(&'static str, String)> {
    names.iter().find_map(|name| Some((*name, get(name)?)))
}

impl Launcher {
    /// Rank and number of ranks.
    fn identity(&self, get: impl Fn(&str) -> Option<String>) -> Result<(usize, usize)> {
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

    /// `RANK=1 WORLD_SIZE=4 (torchrun)`
    fn says(&self, get: impl Fn(&str) -> Option<String>) -> String {
        let rank = get(self.rank).unwrap_or_default();
        let size = match first_set(self.size, get) {
            Some((name, size)) => format!(" {name}={size}"),
            None => String::new(),
        };
        format!("{}={rank}{size} ({})", self.rank, self.name)
    }
}

/// Slurm writes `4`, or `4(x2),3` for several hosts; the first number suffices to see that.
fn leading_number(text: &str) -> Option<usize> {
    let text = text.trim();
    let end = text
        .find(|letter: char| !letter.is_ascii_digit())
        .unwrap_or(text.len());
    text[..end].parse().ok()
}
