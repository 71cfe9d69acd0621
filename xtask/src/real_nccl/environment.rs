//! The environment of a process that runs on NVIDIA's library, and the header that shows it.

use std::env;
use std::ffi::OsString;
use std::fmt::{self, Display, Write as _};
use std::path::Path;
use std::process::Command;

use super::topology::Topology;
use crate::wheels::Release;

/// Read by `nccl_emulator::install`: the library to run on its driver.
pub(super) const LIBRARY: &str = "NCCL_EMULATOR_NCCL";

/// Other settings of the choice of a library, which would select a different one.
const CONTRADICTING: [&str; 2] = ["NCCL_LIBRARY", "NCCL_EMULATOR_VERSION"];

/// Settings of NCCL that the user may override. An emulated GPU has no InfiniBand, even if the machine has an adapter, which
/// NCCL finds without CUDA.
const DEFAULTS: [(&str, &str); 2] = [("NCCL_NET", "Socket"), ("NCCL_IB_DISABLE", "1")];

/// A variable of the network, and its value for the process.
#[derive(Debug, PartialEq, Eq)]
struct Setting {
    name: &'static str,
    value: OsString,
    /// Whether the user has set it.
    own: bool,
}

/// The environment of a process on NVIDIA's library.
#[derive(Debug)]
pub(super) struct Environment<'a> {
    release: &'a Release,
    topology: Option<&'a Topology>,
    network: Vec<Setting>,
}

impl<'a> Environment<'a> {
    pub(super) fn new(release: &'a Release, topology: Option<&'a Topology>) -> Self {
        Self::beside(release, topology, |name| env::var_os(name))
    }

    fn beside(
        release: &'a Release,
        topology: Option<&'a Topology>,
        given: impl Fn(&str) -> Option<OsString>,
    ) -> Self {
        let setting = |(name, default): (&'static str, &str)| match given(name) {
            Some(value) => Setting {
                name,
                value,
                own: true,
            },
            None => Setting {
                name,
                value: default.into(),
                own: false,
            },
        };
        Self {
            release,
            topology,
            network: DEFAULTS.map(setting).into(),
        }
    }

    /// Sets the environment of a command.
    pub(super) fn apply(&self, command: &mut Command) {
        for name in CONTRADICTING {
            command.env_remove(name);
        }
        command
            .env("NCCL_EMULATOR", "1")
            .env(LIBRARY, &self.release.library);
        if let Some(topology) = self.topology {
            command.env("NCCL_TOPO_FILE", &topology.file);
        }
        self.apply_network(command);
    }

    /// Sets only the network's part, for a command that chooses its libraries itself.
    pub(super) fn apply_network(&self, command: &mut Command) {
        for setting in &self.network {
            command.env(setting.name, &setting.value);
        }
    }

    /// Makes a program that is not built in this workspace find the emulator as well.
    pub(super) fn preload(command: &mut Command, emulator: &Path) {
        let mut list = OsString::from(emulator);
        if let Some(others) = env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
            list.push(":");
            list.push(others);
        }
        command.env("LD_PRELOAD", list);
    }
}

/// The header: the library, and how far its results can be trusted.
impl Display for Environment<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Release {
            version,
            cuda,
            library,
            ..
        } = self.release;
        let library = library.display();
        writeln!(f, "real-nccl: NCCL {version} for CUDA {cuda}, {library}")?;
        writeln!(
            f,
            "real-nccl: NVIDIA's library on the CPU emulator: kernels are interpreted, times mean nothing"
        )?;
        match self.topology {
            Some(topology) => writeln!(f, "real-nccl: topology: {topology}")?,
            None => writeln!(f, "real-nccl: topology: what NCCL finds on this machine")?,
        }
        let mut settings = String::new();
        for setting in &self.network {
            let by = if setting.own {
                "as it was set"
            } else {
                "by default"
            };
            let value = setting.value.to_string_lossy();
            write!(settings, ", {}={value} {by}", setting.name)?;
        }
        let infiniband = self.network.iter().any(|setting| {
            setting.own && setting.name == "NCCL_IB_DISABLE" && setting.value == "0"
        });
        let state = if infiniband { "is not" } else { "is" };
        write!(f, "real-nccl: InfiniBand {state} switched off{settings}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wheels::Cuda;

    fn variables(environment: &Environment<'_>) -> Vec<(String, Option<String>)> {
        let mut command = Command::new("true");
        environment.apply(&mut command);
        let text = |value: &std::ffi::OsStr| value.to_string_lossy().into_owned();
        command
            .get_envs()
            .map(|(name, value)| (text(name), value.map(text)))
            .collect()
    }

    fn has(environment: &Environment<'_>, name: &str, value: Option<&str>) -> bool {
        variables(environment).contains(&(name.to_owned(), value.map(str::to_owned)))
    }

    #[test]
    fn the_process_gets_the_library_and_sockets() {
        let release = Release::new("2.32.3", Cuda::Thirteen);
        let environment = Environment::beside(&release, None, |_| None);
        let library = release.library.to_string_lossy();
        assert!(has(&environment, "NCCL_EMULATOR", Some("1")));
        assert!(has(&environment, LIBRARY, Some(&library)));
        assert!(has(&environment, "NCCL_NET", Some("Socket")));
        assert!(has(&environment, "NCCL_IB_DISABLE", Some("1")));
        assert!(has(&environment, "NCCL_LIBRARY", None));
        let text = environment.to_string();
        assert!(text.contains("NCCL 2.32.3 for CUDA 13, /"), "{text}");
        assert!(text.contains("times mean nothing"), "{text}");
        assert!(text.contains("InfiniBand is switched off"), "{text}");
    }

    #[test]
    fn what_the_user_has_set_stays_and_the_header_says_so() {
        let release = Release::new("2.27.7", Cuda::Twelve);
        let given = |name: &str| (name == "NCCL_IB_DISABLE").then(|| OsString::from("0"));
        let environment = Environment::beside(&release, None, given);
        assert!(has(&environment, "NCCL_IB_DISABLE", Some("0")));
        assert!(has(&environment, "NCCL_NET", Some("Socket")));
        let text = environment.to_string();
        assert!(text.contains("NCCL_IB_DISABLE=0 as it was set"), "{text}");
        assert!(text.contains("InfiniBand is not switched off"), "{text}");
    }

    #[test]
    fn a_topology_is_handed_on_and_named() {
        let release = Release::new("2.32.3", Cuda::Thirteen);
        let topology = Topology::find("nvswitch8".as_ref()).unwrap();
        let environment = Environment::beside(&release, Some(&topology), |_| None);
        let file = topology.file.to_string_lossy();
        assert!(has(&environment, "NCCL_TOPO_FILE", Some(&file)));
        assert!(environment.to_string().contains("topology: nvswitch8 (/"));
    }
}
