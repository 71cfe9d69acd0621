//! Machines that are presented to NCCL in place of this one: files of `nccl-emulator/topologies`, or the user's own.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use crate::arguments::Usage;
use crate::{Result, workspace};

/// A machine presented to NCCL by `NCCL_TOPO_FILE`.
#[derive(Debug)]
pub(super) struct Topology {
    /// Its name, if it comes with the emulator.
    name: Option<String>,
    /// The absolute path of its description: the process may run in another directory.
    pub(super) file: PathBuf,
}

impl Topology {
    /// Finds a machine by its name, or by its file. A name comes first: `./NAME` is always a file.
    pub(super) fn find(asked: &Path) -> Result<Self> {
        let directory = directory();
        if asked.components().count() == 1 && asked.extension().is_none() {
            let file = directory.join(asked).with_extension("xml");
            if file.is_file() {
                return Ok(Self {
                    name: Some(asked.display().to_string()),
                    file,
                });
            }
        }
        match asked.canonicalize() {
            Ok(file) if file.is_file() => Ok(Self { name: None, file }),
            _ => {
                let names = names(&directory)?.join(", ");
                let text = format!(
                    "--topology {} is neither a file nor one of {names}",
                    asked.display()
                );
                Err(Usage(text).into())
            }
        }
    }
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.name {
            Some(name) => write!(f, "{name} ({})", self.file.display()),
            None => write!(f, "{}", self.file.display()),
        }
    }
}

fn directory() -> PathBuf {
    workspace::root().join("nccl-emulator/topologies")
}

/// The names of the machines that come with the emulator.
fn names(directory: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.extension().is_some_and(|end| end == "xml") {
            let stem = path.file_stem().unwrap_or_default();
            names.push(stem.to_string_lossy().into_owned());
        }
    }
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_is_found_by_its_name() {
        let found = Topology::find("nvswitch8".as_ref()).unwrap();
        assert!(found.file.is_absolute() && found.file.ends_with("nvswitch8.xml"));
    }

    #[test]
    fn a_machine_of_the_users_own_is_found_by_its_path() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("mine.xml");
        fs::write(&file, "<system version=\"1\"/>").unwrap();
        let found = Topology::find(&file).unwrap();
        assert_eq!(found.file, file.canonicalize().unwrap());
    }

    #[test]
    fn an_unknown_machine_is_refused_with_those_that_there_are() {
        let error = Topology::find("nvswitch9".as_ref()).unwrap_err();
        assert!(error.is::<Usage>());
        assert_eq!(
            error.to_string(),
            "--topology nvswitch9 is neither a file nor one of nvswitch8, pcie8"
        );
    }
}
