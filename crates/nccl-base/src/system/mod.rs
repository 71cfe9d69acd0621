//! The facts of a machine: files under one root directory, and this process's environment variables. Tests provide
//! both.
//!
//! - `variables`: the variables that NCCL will see, and where each comes from; `nccl_variables`: the variables that NCCL knows;
//!   `env_drift`: variables that were changed after NCCL had read them;
//! - `limits`: the system's limits for this process.

use std::io::Read as _;
use std::path::{Path, PathBuf};

pub mod env_drift;
pub mod limits;
pub mod nccl_variables;
pub mod variables;

#[cfg(test)]
mod fake_tree;

/// The maximum number of bytes that are read of a file; no file used here is longer.
const LONGEST_FILE: u64 = 256 << 10;

/// See the module.
#[derive(Clone, Debug)]
#[doc(hidden)]
pub struct System {
    root: PathBuf,
    /// The process's environment variables that are relevant here.
    variables: Vec<(String, String)>,
    /// Whether the user is the super-user, to whom limits on the number of processes do not apply.
    pub is_super_user: bool,
}

#[doc(hidden)]
impl System {
    /// Returns this machine, and this process's environment as it is now.
    pub fn real() -> Self {
        let wanted = |name: &str| {
            name.contains("NCCL_")
                || ["HOME", "CUDA_VISIBLE_DEVICES", "MASTER_ADDR"].contains(&name)
        };
        let variables = std::env::vars_os().filter_map(|(name, value)| {
            let name = name.to_string_lossy().into_owned();
            wanted(&name).then(|| (name, value.to_string_lossy().into_owned()))
        });
        Self {
            root: PathBuf::from("/"),
            variables: variables.collect(),
            is_super_user: rustix::process::geteuid().is_root(),
        }
    }

    /// Returns a machine for tests: files under `root`.
    pub fn fake(root: &Path, variables: &[(&str, &str)]) -> Self {
        let own = |&(name, value): &(&str, &str)| (name.to_owned(), value.to_owned());
        Self {
            root: root.to_owned(),
            variables: variables.iter().map(own).collect(),
            is_super_user: false,
        }
    }

    pub fn variable(&self, name: &str) -> Option<&str> {
        let found = self.variables.iter().find(|(own, _)| own == name);
        found.map(|(_, value)| &value[..])
    }

    pub fn variables(&self) -> impl Iterator<Item = (&str, &str)> {
        self.variables
            .iter()
            .map(|(name, value)| (&name[..], &value[..]))
    }

    /// Returns an absolute path of the machine, below the root.
    pub fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    pub fn bytes(&self, path: impl AsRef<Path>) -> std::io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let file = std::fs::File::open(self.path(path))?;
        file.take(LONGEST_FILE).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    pub fn text(&self, path: impl AsRef<Path>) -> Option<String> {
        let bytes = self.bytes(path).ok()?;
        Some(String::from_utf8_lossy(&bytes).trim().to_owned())
    }

    pub fn number(&self, path: impl AsRef<Path>) -> Option<u64> {
        self.text(path)?.parse().ok()
    }

    /// Returns the target of a symbolic link.
    pub fn link(&self, path: impl AsRef<Path>) -> Option<String> {
        let target = std::fs::read_link(self.path(path)).ok()?;
        Some(target.to_string_lossy().into_owned())
    }

    /// Returns the names in a directory, in order.
    pub fn names(&self, path: impl AsRef<Path>) -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(self.path(path)) else {
            return Vec::new();
        };
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let mut names: Vec<_> = names.take(1 << 16).collect();
        names.sort_unstable();
        names
    }
}
