//! The identity of this process, from the variables of its launcher.

use std::ffi::OsString;

use super::address::{self, JobOrigin};
use super::launch::{Launch, Scheme, as_text, attempt};
use crate::address::{Address, FORMS};
use crate::environment::Rendezvous;
use crate::error::{Error, Result, ranks};
use crate::job::Job;
use crate::limits;
use crate::secret::Secret;

impl Rendezvous {
    /// Reads the rendezvous that the launcher of this process has set: `nccl-run`, `torchrun`, `mpirun` of Open MPI,
    /// MPICH and Intel MPI, `srun`, or an indexed job of Kubernetes. If several are set and differ, the first in this
    /// order counts, and errors name both.
    ///
    /// Processes that a program starts by itself can use the variables of `nccl-run`: `NCCL_RUN_RANK`,
    /// `NCCL_RUN_WORLD_SIZE`, `NCCL_RUN_LOCAL_RANK` (the rank, unless set) and `NCCL_RUN_RENDEZVOUS`: `unix:PATH`,
    /// `unix:@NAME`, `tcp:HOST:PORT` or `tcp:HOST:FIRST-LAST`. Over TCP, `NCCL_RUN_INTERFACE` is as
    /// [`interface`](Self::interface), `NCCL_RUN_PUBLISH` as [`publish`](Self::publish) and `NCCL_RUN_TRANSLATED` as
    /// [`translated_addresses`](Self::translated_addresses).
    ///
    /// Jobs on several hosts that set none of these meet at an address that depends on the launcher. A torchrun job
    /// meets at `MASTER_ADDR`, at one of the 16 ports after `MASTER_PORT`, which torchrun uses itself. A Slurm job
    /// meets at the first host of `SLURM_STEP_NODELIST` or `SLURM_JOB_NODELIST`, at 16 consecutive ports between
    /// 20000 and 29983, derived from the numbers of the job and the step. An indexed job of Kubernetes, which must set
    /// `NCCL_RUN_WORLD_SIZE` and `NCCL_RUN_SERVICE` (the headless service of its pods), meets at port 29400 of the pod
    /// with index 0.
    ///
    /// # Errors
    /// [`ErrorKind::Rendezvous`](crate::error::ErrorKind::Rendezvous) names the variable that is missing, cannot be
    /// read, or contradicts another, with its value.
    ///
    /// ```no_run
    /// let world = nccl::World::join(nccl::Rendezvous::from_env()?)?;
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn from_env() -> Result<Self> {
        Self::from_variables(|name| std::env::var_os(name))
    }

    /// As [`from_env`](Self::from_env), with variables from `get` instead of this process's environment: `get` is
    /// called with a variable's name, and returns a `String` or an `OsString`.
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
        Self::from_variables_of(JobOrigin::own(), |name| get(name).map(Into::into))
    }

    /// Reads the variables of a rank with this origin.
    pub(super) fn from_variables_of(
        own: JobOrigin,
        get: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Self> {
        let secret = Secret::from_variables(&get)?;
        let mut rendezvous = as_text(get, |get| Self::from_text(own, get))?;
        rendezvous.secret = secret;
        Ok(rendezvous)
    }

    /// Reads everything except the secret, which need not be text.
    fn from_text(own: JobOrigin, get: &dyn Fn(&str) -> Option<String>) -> Result<Self> {
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
            (Some(_), Address::Tcp(host_ports)) => host_ports.across = true,
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
            Error::rendezvous(format!("{}: {why}", launcher.describe(get)))
        })?;
        rendezvous.further_addresses = others;
        rendezvous.was_restarted = get("NCCL_RUN_RESTARTED").is_some_and(|text| text == "1");
        rendezvous.set_job(job(launch.job_name(get), get)?);
        if let Some(text) = get("NCCL_RUN_WITNESSES") {
            let count = text.trim().parse().map_err(|_| {
                let most = limits::WITNESSES;
                Error::rendezvous(format!(
                    "NCCL_RUN_WITNESSES={text:?} is not a number of witnesses: 0 to {most}"
                ))
            })?;
            rendezvous.witnesses = count;
        }
        rendezvous.tolerate_unreachable =
            match get("NCCL_RUN_UNREACHABLE").as_deref().map(str::trim) {
                None | Some("tolerate") => true,
                Some("abort") => false,
                Some(other) => {
                    return Err(Error::rendezvous(format!(
                        "NCCL_RUN_UNREACHABLE={other:?} is neither tolerate nor abort"
                    )));
                }
            };
        rendezvous.launcher_conflict = launch.conflict_text(get);
        if let Some(conflict) = &rendezvous.launcher_conflict {
            tracing::info!(name: "nccl.rendezvous.launchers", target: "nccl", said = conflict, "two launchers");
        }
        Ok(rendezvous)
    }

    /// Creates the rendezvous for an `Observer` from the variables of `nccl-run`, except the rank and the number of
    /// ranks, as in [`from_env`](Self::from_env).
    ///
    /// # Errors
    /// [`ErrorKind::Rendezvous`](crate::error::ErrorKind::Rendezvous) names the variable that is missing or cannot be
    /// read, with its value.
    ///
    /// ```no_run
    /// let observer = nccl::Observer::join(nccl::Rendezvous::observer_from_env()?)?;
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn observer_from_env() -> Result<Self> {
        Self::observer_from_variables(|name| std::env::var_os(name))
    }

    /// Applies the job's settings from the environment, as [`from_env`](Self::from_env) does: its name, the generation,
    /// the secret, and whether addresses are translated. For a process that gets the address in another way.
    ///
    /// # Errors
    /// [`ErrorKind::Rendezvous`](crate::error::ErrorKind::Rendezvous) names the variable that cannot be parsed;
    /// [`ErrorKind::Io`](crate::error::ErrorKind::Io) when the secret's file cannot be read.
    ///
    /// ```no_run
    /// let rendezvous = nccl::Rendezvous::observer("tcp:10.0.0.5:29400")?.job_from_env()?;
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn job_from_env(self) -> Result<Self> {
        self.job_from_variables(|name| std::env::var_os(name))
    }

    /// Creates a rendezvous from the variables of `nccl-run` for an observer.
    fn observer_from_variables(get: impl Fn(&str) -> Option<OsString>) -> Result<Self> {
        let rendezvous = as_text(&get, |get| {
            let Some(text) = get("NCCL_RUN_RENDEZVOUS") else {
                return Err(Error::rendezvous(format!(
                    "NCCL_RUN_RENDEZVOUS is not set, where the ranks meet that are to be observed: {FORMS}"
                )));
            };
            let (first, others) = address::parse(&text, get)?;
            let mut rendezvous = Self::observing(first);
            rendezvous.further_addresses = others;
            Ok(rendezvous)
        })?;
        rendezvous.job_from_variables(get)
    }

    fn job_from_variables(mut self, get: impl Fn(&str) -> Option<OsString>) -> Result<Self> {
        self.set_job(as_text(&get, |get| job(String::new(), get))?);
        self.secret = Secret::from_variables(get)?;
        Ok(self)
    }

    /// Applies the settings of a job other than its secret.
    fn set_job(&mut self, job: Job) {
        self.job = job.name;
        self.generation = job.generation;
        self.translated_addresses = job.translated;
    }
}

/// Returns the job of this launch, except the secret.
fn job(of_launcher: String, get: impl Fn(&str) -> Option<String>) -> Result<Job> {
    let generation = match attempt(&get) {
        None => 0,
        Some((name, text)) => text.trim().parse().map_err(|_| {
            Error::rendezvous(format!("{name}={text:?} is not the number of an attempt"))
        })?,
    };
    Ok(Job {
        name: get("NCCL_RUN_JOB").unwrap_or(of_launcher),
        generation,
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
