//! The rendezvous of another process of this host.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::address::JobOrigin;
use crate::address;
use crate::environment::Rendezvous;
use crate::error::{Error, Result};
use crate::process;

impl Rendezvous {
    /// As [`from_env`](Self::from_env), but for another process of this host that is one of the ranks, whichever
    /// launcher started it. Uses that process's initial environment (`/proc/PID/environ`), with which an `Observer`
    /// finds the job; settings that the process's program made in code are not visible.
    ///
    /// # Errors
    /// [`ErrorKind::Rendezvous`](crate::error::ErrorKind::Rendezvous) when there is no such process, when it belongs to
    /// another user, or as [`from_env`](Self::from_env); [`ErrorKind::Io`](crate::error::ErrorKind::Io) when the system
    /// does not allow reading its environment.
    ///
    /// ```no_run
    /// use std::time::Duration;
    /// use nccl::{Observer, Rendezvous};
    ///
    /// let observer = Observer::join(Rendezvous::of_process(4107)?)?;
    /// let timeline = observer.recordings(Duration::from_secs(10));
    /// std::fs::write("job.html", timeline.to_html())?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn of_process(pid: u32) -> Result<Self> {
        let directory = PathBuf::from(format!("/proc/{pid}"));
        let failed = |what: &str, error: io::Error| match error.kind() {
            io::ErrorKind::NotFound => Error::rendezvous(format!("there is no process {pid} here")),
            _ => Error::io(format!("reading {what} of process {pid}"))(error),
        };
        let user = directory
            .metadata()
            .map_err(|error| failed("the user", error))?;
        let (user, own) = (user.uid(), rustix::process::geteuid().as_raw());
        // The process's environment chooses which files are read here, and to which process the job's secret is proved.
        if user != own {
            return Err(Error::rendezvous(format!(
                "process {pid} belongs to user {user}, and this one to user {own}: ask as that user"
            )));
        }
        let variables = std::fs::read(directory.join("environ"));
        let variables = variables.map_err(|error| failed("the environment", error))?;
        let parent = process::parent_of(pid);
        let parent = parent.ok_or_else(|| failed("the parent", io::ErrorKind::NotFound.into()))?;
        let variables = parse_environment(&variables);
        let at = directory.join("cwd");
        let get = |name: &str| {
            let value = *variables.get(name.as_bytes())?;
            Some(match (name, value.to_str()) {
                ("NCCL_RUN_SECRET_FILE" | "NCCL_RUN_PUBLISH", _) => at.join(value).into(),
                ("NCCL_RUN_RENDEZVOUS", Some(addresses)) => resolve_paths(&at, addresses).into(),
                _ => value.to_owned(),
            })
        };
        Self::from_variables_of(JobOrigin { user, parent }, get)
    }
}

/// Parses an environment as [`std::env::var_os`] does: the first variable with a name counts.
fn parse_environment(environment: &[u8]) -> BTreeMap<&[u8], &OsStr> {
    let mut variables = BTreeMap::new();
    for variable in environment.split(|&byte| byte == 0) {
        if let Some(end) = variable.iter().position(|&byte| byte == b'=') {
            let value = OsStr::from_bytes(&variable[end + 1..]);
            variables.entry(&variable[..end]).or_insert(value);
        }
    }
    variables
}

/// Resolves the relative paths in a list of addresses.
fn resolve_paths(directory: &Path, addresses: &str) -> String {
    let address = |address: &str| match address.strip_prefix("unix:") {
        Some(path) if !path.starts_with('@') => format!("unix:{}", directory.join(path).display()),
        _ => address.to_owned(),
    };
    let addresses: Vec<_> = address::split(addresses).map(address).collect();
    addresses.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_those_that_a_program_would_see() {
        let variables = parse_environment(b"A=1\0B=x=y\0A=2\0C=\xff\0D=\0no variable\0");
        let seen: Vec<_> = variables
            .iter()
            .map(|(name, value)| (*name, value.as_bytes()))
            .collect();
        let expected: [(&[u8], &[u8]); 4] =
            [(b"A", b"1"), (b"B", b"x=y"), (b"C", b"\xff"), (b"D", b"")];
        assert_eq!(seen, expected);
    }

    #[test]
    fn paths_are_those_of_the_other_process() {
        let at = Path::new("/proc/7/cwd");
        for (text, expected) in [
            ("unix:job.sock", "unix:/proc/7/cwd/job.sock"),
            ("unix:/run/job.sock", "unix:/run/job.sock"),
            ("unix:@job", "unix:@job"),
            ("tcp:h1:7,unix:x", "tcp:h1:7,unix:/proc/7/cwd/x"),
        ] {
            assert_eq!(resolve_paths(at, text), expected);
        }
    }

    #[test]
    fn who_is_not_there_or_somebody_elses_is_refused() {
        let error = Rendezvous::of_process(u32::MAX).unwrap_err().to_string();
        assert!(
            error.contains("there is no process 4294967295 here"),
            "{error}"
        );
        // This process has no rank, unless a launcher runs the tests.
        let own = std::process::id();
        let read = Rendezvous::of_process(own).map(|rendezvous| rendezvous.rank());
        let same = Rendezvous::from_env().map(|rendezvous| rendezvous.rank());
        assert_eq!(
            read.map_err(|e| e.to_string()),
            same.map_err(|e| e.to_string())
        );
    }
}
