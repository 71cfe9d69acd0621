//! The environment variables of a rank.

use std::ffi::OsString;
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use nccl_base::variables::RECORD_DIR;

/// The maximum number of addresses of other ranks that a restarted rank gets: each of these ranks knows the
/// coordinator.
const MAX_ADDRESSES: usize = 8;

/// What all ranks of a fleet have in common.
#[derive(Clone, Debug)]
pub(super) struct Environment {
    pub(super) world_size: usize,
    pub(super) first_rank: usize,
    /// Ranks on this host.
    pub(super) here: usize,
    /// As in `NCCL_RUN_RENDEZVOUS`.
    pub(super) rendezvous: OsString,
    pub(super) job: String,
    pub(super) secret_file: Option<PathBuf>,
    pub(super) interface: Option<String>,
    /// The variables that make NCCL use that interface, too.
    pub(super) nccl_interface: Vec<(String, String)>,
    pub(super) nccl_debug: Option<PathBuf>,
    pub(super) record_dir: Option<PathBuf>,
    /// Devices of this host: each rank sees one of them.
    pub(super) devices: Option<Vec<String>>,
    /// Whether the fleet takes part as an observer.
    pub(super) observe: bool,
}

impl Environment {
    /// Returns where the ranks meet; for a rank restarted `alone` in a world of several hosts, also where the other
    /// ranks listen.
    fn places(&self, alone: Option<&[String]>) -> OsString {
        let mut places = self.rendezvous.clone();
        let several_hosts = self.here < self.world_size;
        let addresses = alone.unwrap_or_default().iter();
        for door in addresses.filter(|_| several_hosts).take(MAX_ADDRESSES) {
            places.push(",");
            places.push(door);
        }
        places
    }

    /// Returns the variables to set for a rank, and those to remove (`None`). For a rank that is restarted while others
    /// run, `alone` has the addresses of other ranks that may know the coordinator, and a variable tells the rank that
    /// it was restarted.
    pub(super) fn of(
        &self,
        rank: usize,
        generation: u64,
        alone: Option<&[String]>,
    ) -> Vec<(&str, Option<OsString>)> {
        let local = rank - self.first_rank;
        let number = |n: usize| Some(OsString::from(n.to_string()));
        let mut set = vec![
            ("NCCL_RUN_RANK", number(rank)),
            ("NCCL_RUN_WORLD_SIZE", number(self.world_size)),
            ("NCCL_RUN_LOCAL_RANK", number(local)),
            ("NCCL_RUN_LOCAL_WORLD_SIZE", number(self.here)),
            ("NCCL_RUN_RENDEZVOUS", Some(self.places(alone))),
            ("NCCL_RUN_RESTARTED", alone.map(|_| "1".into())),
            ("NCCL_RUN_OBSERVED", self.observe.then(|| "1".into())),
            ("NCCL_RUN_JOB", Some(self.job.clone().into())),
            ("NCCL_RUN_GENERATION", Some(generation.to_string().into())),
            // Removes the secret of an enclosing fleet, or of the user's shell.
            ("NCCL_RUN_SECRET", None),
            (
                "NCCL_RUN_SECRET_FILE",
                self.secret_file.clone().map(Into::into),
            ),
        ];
        if let Some(interface) = &self.interface {
            set.push(("NCCL_RUN_INTERFACE", Some(interface.into())));
        }
        for (name, value) in &self.nccl_interface {
            set.push((name, Some(value.into())));
        }
        if let Some(directory) = &self.nccl_debug {
            // Each attempt has a log of its own, so that it does not overwrite the previous one.
            let name = match generation {
                0 => format!("nccl.rank-{rank}.log"),
                generation => format!("nccl.rank-{rank}.generation-{generation}.log"),
            };
            set.push(("NCCL_DEBUG_FILE", Some(directory.join(name).into())));
        }
        if let Some(directory) = &self.record_dir {
            set.push((RECORD_DIR, Some(directory.into())));
        }
        if let Some(device) = self.devices.as_ref().and_then(|all| all.get(local)) {
            set.push(("CUDA_VISIBLE_DEVICES", Some(device.into())));
        }
        set
    }
}

/// Creates a directory that only this user can enter, for the sockets and the secret of a fleet. A socket address holds
/// about a hundred bytes, so the path of the temporary directory must be short.
pub(super) fn private_directory() -> io::Result<TempDir> {
    private_directory_in(std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from))
}

fn private_directory_in(named: Option<PathBuf>) -> io::Result<TempDir> {
    // A path that is not absolute is invalid according to the specification of the variable.
    let fits = |path: &PathBuf| path.is_absolute() && path.as_os_str().len() <= 60;
    let places = [named, Some(std::env::temp_dir()), Some("/tmp".into())];
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for place in places.into_iter().flatten().filter(fits) {
        let made = tempfile::Builder::new()
            .prefix("nccl-run-")
            .permissions(PermissionsExt::from_mode(0o700))
            .tempdir_in(&place);
        match made {
            Ok(directory) => return Ok(directory),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Writes a fresh secret, or the given one, to a file that only this user can read.
pub(super) fn secret_file(directory: &Path, secret: Option<&[u8]>) -> io::Result<PathBuf> {
    let path = directory.join("secret");
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&path)?;
    match secret {
        Some(secret) => file.write_all(secret)?,
        None => file.write_all(random(32)?.as_bytes())?,
    }
    Ok(path)
}

/// Returns `bytes` random bytes, as hexadecimal digits.
pub(super) fn random(bytes: usize) -> io::Result<String> {
    let mut buffer = vec![0u8; bytes];
    let mut filled = 0;
    while filled < bytes {
        let rest = &mut buffer[filled..];
        filled += rustix::rand::getrandom(rest, rustix::rand::GetRandomFlags::empty())?;
    }
    Ok(buffer.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment() -> Environment {
        Environment {
            world_size: 8,
            first_rank: 4,
            here: 4,
            rendezvous: "tcp:10.0.0.5:29400".into(),
            job: String::from("j"),
            secret_file: Some("/x/secret".into()),
            interface: Some(String::from("eth")),
            nccl_interface: vec![(String::from("NCCL_SOCKET_IFNAME"), String::from("=eth0"))],
            nccl_debug: Some("/logs".into()),
            record_dir: Some("/faults".into()),
            devices: Some(vec!["2".into(), "3".into(), "4".into(), "5".into()]),
            observe: true,
        }
    }

    #[test]
    fn a_rank_of_the_second_host_learns_who_it_is() {
        let environment = environment();
        let set = environment.of(5, 2, None);
        let get = |name: &str| {
            let found = set.iter().find(|(key, _)| *key == name);
            found.and_then(|(_, value)| value.as_ref()?.to_str())
        };
        for (name, value) in [
            ("NCCL_RUN_RANK", "5"),
            ("NCCL_RUN_WORLD_SIZE", "8"),
            ("NCCL_RUN_LOCAL_RANK", "1"),
            ("NCCL_RUN_LOCAL_WORLD_SIZE", "4"),
            ("NCCL_RUN_RENDEZVOUS", "tcp:10.0.0.5:29400"),
            ("NCCL_RUN_GENERATION", "2"),
            ("NCCL_RUN_OBSERVED", "1"),
            ("NCCL_RUN_SECRET_FILE", "/x/secret"),
            ("NCCL_RUN_INTERFACE", "eth"),
            ("NCCL_SOCKET_IFNAME", "=eth0"),
            ("NCCL_DEBUG_FILE", "/logs/nccl.rank-5.generation-2.log"),
            ("NCCL_RUN_RECORD_DIR", "/faults"),
            ("CUDA_VISIBLE_DEVICES", "3"),
        ] {
            assert_eq!(get(name), Some(value), "{name}");
        }
        assert!(set.contains(&("NCCL_RUN_SECRET", None)));
        let unobserved = Environment {
            observe: false,
            ..environment.clone()
        };
        // The variable of an enclosing fleet does not reach them.
        let set = unobserved.of(5, 2, None);
        assert!(set.contains(&("NCCL_RUN_OBSERVED", None)));
    }

    #[test]
    fn a_rank_that_is_started_again_alone_learns_that_and_where_the_others_listen() {
        let environment = environment();
        let get = |alone: Option<&[String]>, name: &str| {
            let set = environment.of(5, 2, alone);
            let (_, value) = set.into_iter().find(|(key, _)| *key == name)?;
            value?.into_string().ok()
        };
        let addresses = [
            String::from("tcp:10.0.0.6:31001"),
            String::from("tcp:10.0.0.6:31002"),
        ];
        let places = "tcp:10.0.0.5:29400,tcp:10.0.0.6:31001,tcp:10.0.0.6:31002";
        assert_eq!(
            get(Some(&addresses), "NCCL_RUN_RENDEZVOUS").as_deref(),
            Some(places)
        );
        assert_eq!(
            get(Some(&addresses), "NCCL_RUN_RESTARTED").as_deref(),
            Some("1")
        );
        assert_eq!(get(None, "NCCL_RUN_RESTARTED"), None);
    }

    #[test]
    fn the_private_directory_is_not_in_the_working_directory() {
        for named in ["", ".", "relative"] {
            let directory = private_directory_in(Some(named.into())).unwrap();
            let here = std::env::current_dir().unwrap();
            assert!(!directory.path().starts_with(here), "{directory:?}");
        }
    }

    #[test]
    fn the_secret_is_new_each_time_and_nobody_elses() {
        let mut texts = Vec::new();
        for _ in 0..2 {
            let directory = private_directory().unwrap();
            let path = secret_file(directory.path(), None).unwrap();
            let mode = std::fs::metadata(&path).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
            let mode = std::fs::metadata(directory.path()).unwrap().permissions();
            assert_eq!(mode.mode() & 0o777, 0o700);
            texts.push(std::fs::read_to_string(path).unwrap());
        }
        assert_eq!(texts[0].len(), 64);
        assert_ne!(texts[0], texts[1]);
    }
}
