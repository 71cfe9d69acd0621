//! The settings of a fleet.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use super::environment::{Environment, private_directory, random, secret_file};
use super::fleet::Fleet;
use super::output::{Output, Settings};
use super::watcher::FleetPlan;
use crate::error::{Error, Result};
use crate::forked;
use crate::nccl_interface::nccl_variables_for;
use nccl_control::limits;

/// What to start, and how.
///
/// ```no_run
/// use std::process::Command;
/// use std::time::Duration;
/// use nccl::launch::{Fleet, Output};
///
/// let fleet = Fleet::builder(4)
///     .output(Output::Timed)
///     .grace(Duration::from_secs(10))
///     .log_dir("/var/log/server")
///     .start(|rank| {
///         let mut command = Command::new("/opt/server/rank");
///         command.arg(format!("--shard={rank}"));
///         command
///     })?;
/// let report = fleet.wait();
/// # Ok::<(), nccl::Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct FleetBuilder {
    ranks: usize,
    among: Option<(usize, usize)>,
    rendezvous: Option<String>,
    job: Option<String>,
    generation: u64,
    secret: Secret,
    interface: Option<String>,
    nccl_debug: Option<PathBuf>,
    record_dir: Option<PathBuf>,
    devices: Option<Vec<String>>,
    settings: Settings,
    end_all: bool,
    linger: Duration,
    grace: Duration,
    stdin: bool,
    observe: bool,
}

/// Where the secret comes from.
#[derive(Clone)]
enum Secret {
    /// A random one, that only the ranks of this host get.
    Fresh,
    Given(Vec<u8>),
    File(PathBuf),
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(…)")
    }
}

impl Fleet {
    /// Prepares `ranks` ranks on this host, which are the whole world unless [`FleetBuilder::among`] is called.
    ///
    /// ```
    /// # use std::process::Command;
    /// # use nccl::launch::Fleet;
    /// let fleet = Fleet::builder(2).start(|_| Command::new("true"))?;
    /// # Ok::<(), nccl::Error>(())
    /// ```
    pub fn builder(ranks: usize) -> FleetBuilder {
        FleetBuilder::new(ranks)
    }
}

impl FleetBuilder {
    pub(super) fn new(ranks: usize) -> Self {
        Self {
            ranks,
            among: None,
            rendezvous: None,
            job: None,
            generation: 0,
            secret: Secret::Fresh,
            interface: None,
            nccl_debug: None,
            record_dir: None,
            devices: None,
            settings: Settings {
                output: Output::Prefixed,
                files: None,
                tail: 12,
            },
            end_all: true,
            linger: Duration::from_secs(1),
            grace: Duration::from_secs(5),
            stdin: false,
            observe: true,
        }
    }

    /// Makes the ranks of this host part of a world of `world_size`, from rank `first_rank` on. The ranks meet at
    /// [`rendezvous`](Self::rendezvous), which then has to be given, and have no secret but that of
    /// [`secret`](Self::secret) or [`secret_file`](Self::secret_file).
    ///
    /// ```
    /// # use nccl::launch::Fleet;
    /// // The second of two hosts with eight ranks each.
    /// let builder = Fleet::builder(8)
    ///     .among(16, 8)
    ///     .rendezvous("tcp:node-a:29400")
    ///     .secret_file("/etc/server/secret");
    /// ```
    pub fn among(mut self, world_size: usize, first_rank: usize) -> Self {
        self.among = Some((world_size, first_rank));
        self
    }

    /// Where the ranks meet, as in `NCCL_RUN_RENDEZVOUS`: `tcp:HOST:PORT`, say. Unless set, at a Unix socket in a
    /// directory that only this user can enter, and that is removed with the fleet.
    ///
    /// ```
    /// # use nccl::launch::Fleet;
    /// let builder = Fleet::builder(8).among(16, 0).rendezvous("tcp:10.0.0.5:29400-29415");
    /// ```
    pub fn rendezvous(mut self, address: impl Into<String>) -> Self {
        self.rendezvous = Some(address.into());
        self
    }

    /// The name of the job (`NCCL_RUN_JOB`); unless set, a unique one for ranks of one host, and an empty one for
    /// several hosts.
    ///
    /// ```
    /// # use nccl::launch::Fleet;
    /// let builder = Fleet::builder(4).job("prefill");
    /// ```
    pub fn job(mut self, name: impl Into<String>) -> Self {
        self.job = Some(name.into());
        self
    }

    /// The number of this attempt of the job (`NCCL_RUN_GENERATION`); 0 unless set. Restarts count on from there.
    ///
    /// ```
    /// # use nccl::launch::Fleet;
    /// let builder = Fleet::builder(4).generation(3);
    /// ```
    pub fn generation(mut self, generation: u64) -> Self {
        self.generation = generation;
        self
    }

    /// The secret by which the ranks authenticate each other. Unless set, a fresh one for ranks of one host. The ranks
    /// get it in a file that only this user can read. A secret of less than 16 bytes is an error of
    /// [`start`](Self::start); see [`Rendezvous::secret`](nccl_control::Rendezvous::secret) for what makes a good one.
    ///
    /// ```no_run
    /// # use nccl::launch::Fleet;
    /// let secret = std::fs::read("/etc/server/secret").expect("the job's secret");
    /// let builder = Fleet::builder(4).secret(secret);
    /// ```
    pub fn secret(mut self, secret: impl Into<Vec<u8>>) -> Self {
        self.secret = Secret::Given(secret.into());
        self
    }

    /// The file of the secret (`NCCL_RUN_SECRET_FILE`), which the ranks read themselves.
    ///
    /// ```
    /// # use nccl::launch::Fleet;
    /// let builder = Fleet::builder(4).secret_file("/etc/server/secret");
    /// ```
    pub fn secret_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.secret = Secret::File(path.into());
        self
    }

    /// The network interface for both the rendezvous (`NCCL_RUN_INTERFACE`) and NCCL (`NCCL_SOCKET_IFNAME`): a
    /// name, the beginning of one, a subnet, or an address, as for
    /// [`Rendezvous::interface`](nccl_control::Rendezvous::interface).
    ///
    /// ```
    /// # use nccl::launch::Fleet;
    /// let builder = Fleet::builder(4).interface("10.0.0.0/8");
    /// ```
    pub fn interface(mut self, interface: impl Into<String>) -> Self {
        self.interface = Some(interface.into());
        self
    }

    /// A directory for NCCL's own log, a file for each rank (`NCCL_DEBUG_FILE`). `NCCL_DEBUG` sets how much NCCL logs.
    ///
    /// ```
    /// # use nccl::launch::Fleet;
    /// let builder = Fleet::builder(4).nccl_debug("/var/log/server");
    /// ```
    pub fn nccl_debug(mut self, directory: impl Into<PathBuf>) -> Self {
        self.nccl_debug = Some(directory.into());
        self
    }

    /// A directory for recordings of the ranks' last operations: each rank writes a file there when one of its
    /// communicators is aborted (`NCCL_RUN_RECORD_DIR`, `World::record_faults_to`), to be read by `Timeline::read`.
    ///
    /// ```
    /// # use nccl::launch::Fleet;
    /// let builder = Fleet::builder(4).record_dir("/var/log/server/faults");
    /// ```
    pub fn record_dir(mut self, directory: impl Into<PathBuf>) -> Self {
        self.record_dir = Some(directory.into());
        self
    }

    /// Gives each rank of this host one of these devices (`CUDA_VISIBLE_DEVICES`), which is device 0 to the rank.
    /// Unless set, ranks see the devices of this process.
    ///
    /// ```
    /// # use nccl::launch::Fleet;
    /// let builder = Fleet::builder(2).one_device_each(vec!["4".into(), "5".into()]);
    /// ```
    pub fn one_device_each(mut self, devices: Vec<String>) -> Self {
        self.devices = Some(devices);
        self
    }

    /// Where the ranks' output goes; [`Output::Prefixed`] unless set.
    ///
    /// ```
    /// # use nccl::launch::{Fleet, Output};
    /// let builder = Fleet::builder(4).output(Output::Timed);
    /// ```
    pub fn output(mut self, output: Output) -> Self {
        self.settings.output = output;
        self
    }

    /// A directory, created if needed, for a copy of the ranks' output: `rank-3.stdout` and `rank-3.stderr`, unchanged.
    /// A restarted rank appends to the same files.
    ///
    /// ```
    /// # use nccl::launch::Fleet;
    /// let builder = Fleet::builder(4).log_dir("/var/log/server");
    /// ```
    pub fn log_dir(mut self, directory: impl Into<PathBuf>) -> Self {
        self.settings.files = Some(directory.into());
        self
    }

    /// Last lines of standard error to keep for a report; 12 unless set.
    ///
    /// ```
    /// # use nccl::launch::Fleet;
    /// let builder = Fleet::builder(4).stderr_tail(50);
    /// ```
    pub fn stderr_tail(mut self, lines: usize) -> Self {
        self.settings.tail = lines;
        self
    }

    /// Whether the other ranks go on when one fails, so that it can be restarted alone. Unless set, all are ended.
    ///
    /// ```
    /// # use nccl::launch::Fleet;
    /// let builder = Fleet::builder(4).keep_others(true);
    /// ```
    pub fn keep_others(mut self, keep: bool) -> Self {
        self.end_all = !keep;
        self
    }

    /// How long after the first failure the other ranks may go on before they are asked to end, so that they can report
    /// what they know; 1 s unless set.
    ///
    /// ```
    /// # use nccl::launch::Fleet;
    /// let builder = Fleet::builder(4).linger(std::time::Duration::from_millis(300));
    /// ```
    pub fn linger(mut self, linger: Duration) -> Self {
        self.linger = linger;
        self
    }

    /// How long ranks that were asked to end may take before they are killed; 5 s unless set.
    ///
    /// ```
    /// # use nccl::launch::Fleet;
    /// let builder = Fleet::builder(4).grace(std::time::Duration::from_secs(30));
    /// ```
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Whether the first rank of this host reads this process's standard input. Other ranks, and unless this is set the
    /// first as well, read nothing.
    ///
    /// Ranks are not in the terminal's foreground: a rank that reads from a terminal is stopped by it.
    ///
    /// ```
    /// # use nccl::launch::Fleet;
    /// let builder = Fleet::builder(4).first_reads_stdin(true);
    /// ```
    pub fn first_reads_stdin(mut self, reads: bool) -> Self {
        self.stdin = reads;
        self
    }

    /// Whether this process takes part in the ranks' `World` as an `Observer`, and tells the other ranks how a rank
    /// ended; set unless this is called. Programs that join no such world need no observer. Without it the ranks notice
    /// an end by themselves, as under another launcher, and [`Fleet::joined`] is empty.
    ///
    /// ```
    /// # use nccl::launch::Fleet;
    /// let builder = Fleet::builder(4).observe(false);
    /// ```
    pub fn observe(mut self, observe: bool) -> Self {
        self.observe = observe;
        self
    }

    /// Starts the ranks: all or none. `command` is called with a rank each time the rank is started; its environment,
    /// directory and arguments are kept, and the rank's variables are added to the environment. The fleet sets its
    /// standard streams.
    ///
    /// # Errors
    /// [`ErrorKind::Launch`](crate::error::ErrorKind::Launch) names the rank that cannot be started, the program, and
    /// why; or the contradictory setting.
    ///
    /// ```
    /// use std::process::Command;
    /// use nccl::launch::Fleet;
    ///
    /// let error = Fleet::builder(2).start(|_| Command::new("no-such-program")).unwrap_err();
    /// assert!(error.to_string().contains("rank 0 cannot be started: no-such-program: no directory in PATH"));
    /// ```
    pub fn start(self, command: impl FnMut(usize) -> Command + Send + 'static) -> Result<Fleet> {
        forked::begin()?;
        let here = self.ranks;
        let (world_size, first_rank) = self.among.unwrap_or((here, 0));
        if here == 0 {
            return Err(Error::launch("a fleet has at least one rank"));
        }
        limits::size(world_size).map_err(Error::launch)?;
        limits::job(self.job.as_deref().unwrap_or_default(), self.generation)
            .map_err(Error::launch)?;
        if first_rank
            .checked_add(here)
            .is_none_or(|end| end > world_size)
        {
            return Err(Error::launch(format!(
                "{here} ranks beginning with rank {first_rank} do not fit into a world of {world_size}"
            )));
        }
        let several_hosts = here < world_size;
        if several_hosts && !self.rendezvous.as_deref().is_some_and(is_tcp) {
            return Err(Error::launch(format!(
                "{here} of {world_size} ranks are on this host: say where all of them meet, as tcp:HOST:PORT"
            )));
        }
        if let Some(devices) = &self.devices
            && devices.len() < here
        {
            return Err(Error::launch(format!(
                "{here} ranks cannot have a device each: there are {} ({})",
                devices.len(),
                devices.join(", ")
            )));
        }
        let nccl_interface = match &self.interface {
            Some(interface) => nccl_variables_for(interface)?,
            None => Vec::new(),
        };
        let directory =
            private_directory().map_err(Error::io("making a directory for the ranks"))?;
        let written = |secret: Option<&[u8]>| {
            secret_file(directory.path(), secret).map_err(Error::io("writing the job's secret"))
        };
        let secret_file = match &self.secret {
            Secret::File(path) => Some(path.clone()),
            Secret::Given(secret) => {
                limits::secret("the ranks' secret", secret).map_err(Error::launch)?;
                Some(written(Some(secret))?)
            }
            // A fresh secret would be unknown to the other hosts.
            Secret::Fresh if several_hosts => None,
            Secret::Fresh => Some(written(None)?),
        };
        for made in [&self.settings.files, &self.nccl_debug, &self.record_dir]
            .into_iter()
            .flatten()
        {
            let what = format!("making the directory {}", made.display());
            std::fs::create_dir_all(made).map_err(Error::io(what))?;
        }
        // A rank may change its directory.
        let record_dir = self.record_dir.map(std::path::absolute).transpose();
        let record_dir = record_dir.map_err(Error::io("finding the directory of recordings"))?;
        let rendezvous = match self.rendezvous {
            Some(address) => address.into(),
            None => {
                let mut address = std::ffi::OsString::from("unix:");
                address.push(directory.path().join("world"));
                address
            }
        };
        let job = match self.job {
            Some(job) => job,
            None if several_hosts => String::new(),
            None => {
                let random = random(4).map_err(Error::io("naming the job"))?;
                format!("fleet-{}-{random}", std::process::id())
            }
        };
        Fleet::start(FleetPlan {
            environment: Environment {
                world_size,
                first_rank,
                here,
                rendezvous,
                job,
                secret_file,
                interface: self.interface,
                nccl_interface,
                nccl_debug: self.nccl_debug,
                record_dir,
                devices: self.devices,
                observe: self.observe,
            },
            command: Box::new(command),
            settings: self.settings,
            end_all: self.end_all,
            linger: self.linger,
            grace: self.grace,
            generation: self.generation,
            stdin: self.stdin,
            directory,
        })
    }
}

fn is_tcp(address: &str) -> bool {
    address.starts_with("tcp:")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(builder: FleetBuilder) -> String {
        let started = builder.start(|_| Command::new("true"));
        started.unwrap_err().to_string()
    }

    #[test]
    fn what_cannot_be_is_refused_with_a_sentence() {
        for (builder, words) in [
            (Fleet::builder(0), "at least one"),
            (
                Fleet::builder(2).among(4, 3),
                "2 ranks beginning with rank 3",
            ),
            (Fleet::builder(2).among(4, 2), "tcp:HOST:PORT"),
            (
                Fleet::builder(2)
                    .among(4, 2)
                    .rendezvous("unix:/somewhere/else"),
                "tcp:HOST:PORT",
            ),
            (Fleet::builder(2).among(4, usize::MAX), "do not fit"),
            (Fleet::builder(1_000_000_000_000), "1048576 is the most"),
            (
                Fleet::builder(2).generation(u64::MAX),
                "9223372036854775807 is the last",
            ),
            (Fleet::builder(2).job("x".repeat(2049)), "2048 is the most"),
            (
                Fleet::builder(2).interface("no-such-interface"),
                "no-such-interface",
            ),
            (
                Fleet::builder(2).one_device_each(vec![String::from("0")]),
                "there are 1 (0)",
            ),
        ] {
            let text = refused(builder);
            assert!(text.contains(words), "{text}");
        }
    }
}
