//! The settings of a fleet.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::environment::{Environment, private_directory, random, secret_file};
use super::fleet::Fleet;
use super::output::{Output, Settings};
use super::watcher::FleetPlan;
use crate::error::{Error, Result};
use crate::forked;
use crate::nccl_interface::nccl_variables_for;
use nccl_control::{Secret, limits, split_addresses};

/// What to start, and how: the fields are the settings.
///
/// ```no_run
/// use std::process::Command;
/// use std::time::Duration;
/// use nccl::launch::{Fleet, Output};
///
/// let fleet = Fleet::builder(4)
///     .with(|fleet| {
///         fleet.output = Output::Timed;
///         fleet.log_dir = Some("/var/log/server".into());
///         fleet.keep_others = true;
///         fleet.grace = Duration::from_secs(30);
///     })
///     .start(|rank| {
///         let mut command = Command::new("/opt/server/rank");
///         command.arg(format!("--shard={rank}"));
///         command
///     })?;
/// let report = fleet.wait();
/// # Ok::<(), nccl::Error>(())
/// ```
///
/// The second of two hosts with eight ranks each:
///
/// ```no_run
/// # use std::process::Command;
/// # use nccl::launch::Fleet;
/// let mut builder = Fleet::builder(8);
/// builder.world_size = Some(16);
/// builder.first_rank = 8;
/// builder.rendezvous = Some("tcp:node-a:29400-29415".into());
/// builder.secret_file = Some("/etc/server/secret".into());
/// let fleet = builder.start(|_| Command::new("/opt/server/rank"))?;
/// # Ok::<(), nccl::Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use]
#[non_exhaustive]
pub struct FleetBuilder {
    /// The number of ranks on this host.
    pub ranks: usize,
    /// The number of ranks of the world; `None` (default) if all of them are on this host. If it exceeds
    /// [`ranks`](Self::ranks), the ranks meet at [`rendezvous`](Self::rendezvous), which then is required and must be a
    /// TCP address, and no secret is generated: the ranks have the one of [`secret`](Self::secret) or
    /// [`secret_file`](Self::secret_file), or none.
    pub world_size: Option<usize>,
    /// The first rank of this host; default 0. The others follow it.
    pub first_rank: usize,
    /// Where the ranks meet, as in `NCCL_RUN_RENDEZVOUS`, for example `tcp:HOST:PORT`. `None` (default) is a Unix
    /// socket in a directory that only this user can enter, and that is removed with the fleet.
    pub rendezvous: Option<String>,
    /// The name of the job (`NCCL_RUN_JOB`). `None` (default) is a unique name for ranks of one host, and an empty one for
    /// several hosts.
    pub job: Option<String>,
    /// The number of this attempt of the job (`NCCL_RUN_GENERATION`); default 0. Each restart gets the next number.
    pub generation: u64,
    /// The secret by which the ranks authenticate each other. The ranks get it in a file that only this user can read.
    /// `None` (default) is a fresh secret for ranks of one host. [`start`](Self::start) fails for a secret of less than
    /// 16 bytes.
    pub secret: Option<Secret>,
    /// The file of the secret (`NCCL_RUN_SECRET_FILE`), which the ranks read themselves; instead of [`secret`](Self::secret).
    pub secret_file: Option<PathBuf>,
    /// The network interface for both the rendezvous (`NCCL_RUN_INTERFACE`) and NCCL (`NCCL_SOCKET_IFNAME`): a
    /// name, the beginning of one, a subnet, or an address, as for
    /// [`Rendezvous::interface`](nccl_control::Rendezvous::interface).
    pub interface: Option<String>,
    /// A directory for NCCL's own log, a file for each rank (`NCCL_DEBUG_FILE`). `NCCL_DEBUG` sets how much NCCL logs.
    pub nccl_debug: Option<PathBuf>,
    /// A directory for recordings of the ranks' last operations: each rank writes a file there when one of its
    /// communicators is aborted (`NCCL_RUN_RECORD_DIR`, `World::record_faults_to`). `Timeline::read` reads these files.
    pub record_dir: Option<PathBuf>,
    /// A device for each rank of this host (`CUDA_VISIBLE_DEVICES`); the rank sees it as device 0. With `None`
    /// (default) ranks see the devices of this process.
    pub one_device_each: Option<Vec<String>>,
    /// Where the ranks' output goes; default [`Output::Prefixed`].
    pub output: Output,
    /// A directory, created if needed, for a copy of the ranks' output: for example `rank-3.stdout` and
    /// `rank-3.stderr`, unchanged. A restarted rank appends to the same files.
    pub log_dir: Option<PathBuf>,
    /// The number of last lines of standard error kept for a report; default 12.
    pub stderr_tail: usize,
    /// Whether the other ranks continue when one fails, so that it can be restarted alone. By default all are ended.
    pub keep_others: bool,
    /// How long the other ranks may continue after the first failure before they are asked to end, so that they can
    /// report what they know; default 1 s.
    pub linger: Duration,
    /// How long ranks that were asked to end may take before they are killed; default 5 s.
    pub grace: Duration,
    /// Whether the first rank of this host reads this process's standard input. By default no rank reads it; the other
    /// ranks never do.
    ///
    /// Ranks are not in the terminal's foreground process group: a rank that reads from a terminal is stopped by it.
    pub first_reads_stdin: bool,
    /// Whether this process takes part in the ranks' `World` as an `Observer`, and reports to the other ranks how a
    /// rank ended; default `true`. Programs that join no such world need no observer. Without the observer, the ranks
    /// detect an end by themselves, as under another launcher, and [`Fleet::joined`] is empty.
    pub observe: bool,
}

impl Fleet {
    /// Prepares `ranks` ranks on this host, which are the whole world unless [`FleetBuilder::world_size`] is set.
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
            world_size: None,
            first_rank: 0,
            rendezvous: None,
            job: None,
            generation: 0,
            secret: None,
            secret_file: None,
            interface: None,
            nccl_debug: None,
            record_dir: None,
            one_device_each: None,
            output: Output::Prefixed,
            log_dir: None,
            stderr_tail: 12,
            keep_others: false,
            linger: Duration::from_secs(1),
            grace: Duration::from_secs(5),
            first_reads_stdin: false,
            observe: true,
        }
    }

    /// Sets fields in a chain of calls.
    ///
    /// ```
    /// # use nccl::launch::{Fleet, Output};
    /// let builder = Fleet::builder(4).with(|fleet| fleet.output = Output::Timed);
    /// assert_eq!(builder.stderr_tail, 12);
    /// ```
    pub fn with(mut self, set: impl FnOnce(&mut Self)) -> Self {
        set(&mut self);
        self
    }

    /// Starts the ranks: all or none. `command` is called with a rank each time that rank is started. The command's
    /// environment, directory and arguments are kept, and the rank's variables are added to the environment; the fleet
    /// sets the command's standard streams.
    ///
    /// # Errors
    /// [`ErrorKind::Launch`](crate::error::ErrorKind::Launch) names the rank that cannot be started, the program, and
    /// why; or the contradictory setting. A panic of `command` is such an error as well.
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
        let (world_size, first_rank) = (self.world_size.unwrap_or(here), self.first_rank);
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
        if let Some(devices) = &self.one_device_each
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
        let secret_file = match (&self.secret, &self.secret_file) {
            (Some(_), Some(path)) => {
                return Err(Error::launch(format!(
                    "both the ranks' secret and its file {} are given: leave one",
                    path.display()
                )));
            }
            (None, Some(path)) => Some(absolute(path)?),
            (Some(secret), None) => {
                let secret = secret.bytes();
                limits::secret("the ranks' secret", secret).map_err(Error::launch)?;
                Some(written(Some(secret))?)
            }
            // A fresh secret would be unknown to the other hosts.
            (None, None) if several_hosts => None,
            (None, None) => Some(written(None)?),
        };
        for made in [&self.log_dir, &self.nccl_debug, &self.record_dir]
            .into_iter()
            .flatten()
        {
            let what = format!("making the directory {}", made.display());
            std::fs::create_dir_all(made).map_err(Error::io(what))?;
        }
        let nccl_debug = self.nccl_debug.as_deref().map(absolute).transpose()?;
        let record_dir = self.record_dir.as_deref().map(absolute).transpose()?;
        let rendezvous = match self.rendezvous {
            Some(addresses) => with_absolute_paths(&addresses)?,
            None => {
                let mut address = OsString::from("unix:");
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
                nccl_debug,
                record_dir,
                devices: self.one_device_each,
                observe: self.observe,
            },
            command: Box::new(command),
            settings: Settings {
                output: self.output,
                files: self.log_dir,
                tail: self.stderr_tail,
            },
            end_all: !self.keep_others,
            linger: self.linger,
            grace: self.grace,
            generation: self.generation,
            stdin: self.first_reads_stdin,
            directory,
        })
    }
}

fn is_tcp(address: &str) -> bool {
    address.starts_with("tcp:")
}

/// Returns the absolute form of a path for the ranks, which may have another working directory.
fn absolute(path: &Path) -> Result<PathBuf> {
    let what = || format!("finding the path {}", path.display());
    std::path::absolute(path).map_err(|error| Error::io(what())(error))
}

/// The most bytes of a socket's path (unix(7), less the NUL).
const LONGEST_SOCKET_PATH: usize = 107;

/// Makes the paths of Unix sockets in a list of addresses [`absolute`], where a socket can have that path.
fn with_absolute_paths(addresses: &str) -> Result<OsString> {
    let mut list = OsString::new();
    for address in split_addresses(addresses) {
        if !list.is_empty() {
            list.push(",");
        }
        match address.strip_prefix("unix:") {
            Some(path) if !path.is_empty() && !path.starts_with('@') => {
                list.push("unix:");
                let path: &Path = path.as_ref();
                let absolute = absolute(path)?;
                // The ranks may find the socket by the short form, if they stay in the working directory.
                let fits = |path: &Path| path.as_os_str().len() <= LONGEST_SOCKET_PATH;
                list.push(if fits(&absolute) { &absolute } else { path });
            }
            _ => list.push(address),
        }
    }
    Ok(list)
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
        type Set = fn(&mut FleetBuilder);
        let settings: [(Set, &str); 10] = [
            (|fleet| fleet.ranks = 0, "at least one"),
            (
                |fleet| (fleet.world_size, fleet.first_rank) = (Some(4), 3),
                "2 ranks beginning with rank 3",
            ),
            (
                |fleet| (fleet.world_size, fleet.first_rank) = (Some(4), 2),
                "tcp:HOST:PORT",
            ),
            (
                |fleet| {
                    (fleet.world_size, fleet.first_rank) = (Some(4), 2);
                    fleet.rendezvous = Some("unix:/somewhere/else".into());
                },
                "tcp:HOST:PORT",
            ),
            (|fleet| fleet.first_rank = usize::MAX, "do not fit"),
            (
                |fleet| fleet.ranks = 1_000_000_000_000,
                "1048576 is the most",
            ),
            (
                |fleet| fleet.generation = u64::MAX,
                "9223372036854775807 is the last",
            ),
            (
                |fleet| fleet.job = Some("x".repeat(2049)),
                "2048 is the most",
            ),
            (
                |fleet| fleet.interface = Some("no-such-interface".into()),
                "no-such-interface",
            ),
            (
                |fleet| fleet.one_device_each = Some(vec![String::from("0")]),
                "there are 1 (0)",
            ),
        ];
        for (set, words) in settings {
            let text = refused(Fleet::builder(2).with(set));
            assert!(text.contains(words), "{text}");
        }
        let both = Fleet::builder(2).with(|fleet| {
            fleet.secret = Some([b'x'; 32].into());
            fleet.secret_file = Some("/etc/server/secret".into());
        });
        let text = refused(both);
        assert!(text.contains("leave one"), "{text}");
    }

    #[test]
    fn paths_lead_to_the_same_files_in_every_working_directory() {
        let directory = tempfile::tempdir().unwrap();
        let (here, path) = (std::env::current_dir().unwrap(), directory.path());
        let up = "../".repeat(here.components().count() - 1);
        let relative = Path::new(&up).join(path.strip_prefix("/").unwrap());
        let builder = Fleet::builder(1).with(|fleet| {
            fleet.observe = false;
            fleet.output = Output::Discard;
            fleet.secret_file = Some(relative.join("secret"));
            fleet.nccl_debug = Some(relative.clone());
            fleet.record_dir = Some(relative.clone());
            fleet.rendezvous = Some(format!("unix:{}", relative.join("world").display()));
        });
        std::fs::write(path.join("secret"), "x".repeat(32)).unwrap();
        // Deeper than this one, so that the relative paths lead elsewhere.
        let other = path.join("deep/".repeat(here.components().count()));
        std::fs::create_dir_all(&other).unwrap();
        let fleet = builder.start(move |_| {
            let mut command = Command::new("sh");
            let text = r#": > "$NCCL_DEBUG_FILE"; [ -s "$NCCL_RUN_SECRET_FILE" ] && : > "$NCCL_RUN_RECORD_DIR/record" \
                && : > "${NCCL_RUN_RENDEZVOUS#unix:}""#;
            command.args(["-c", text]).current_dir(&other);
            command
        });
        let report = fleet.unwrap().wait();
        assert!(report.is_success(), "{report}");
        for file in ["nccl.rank-0.log", "record", "world"] {
            assert!(path.join(file).exists(), "{file}");
        }
    }

    #[test]
    fn only_paths_of_a_list_of_addresses_are_made_absolute() {
        let here = std::env::current_dir().unwrap();
        let list = with_absolute_paths("unix:a,b,tcp:h:1-2,unix:@c,unix:/d").unwrap();
        let expected = format!("unix:{}/a,b,tcp:h:1-2,unix:@c,unix:/d", here.display());
        assert_eq!(list, expected.as_str());
    }

    #[test]
    fn a_secret_is_not_printed() {
        let mut builder = Fleet::builder(2);
        builder.secret = Some("hush, and nobody hears it".into());
        let text = format!("{builder:?}");
        assert!(text.contains("secret: Some(Secret(…))"), "{text}");
    }
}
