//! The command line of a chore.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;

use crate::Result;

/// An invalid command line, with the reason.
#[derive(Debug)]
pub(crate) struct Usage(pub(crate) String);

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// The arguments that have not been read yet.
pub(crate) struct Arguments(Vec<OsString>);

impl Arguments {
    pub(crate) fn new(arguments: impl Iterator<Item = OsString>) -> Self {
        Self(arguments.collect())
    }

    /// Returns the name of the chore, the first argument.
    pub(crate) fn chore(&mut self) -> Result<String> {
        if self.0.is_empty() {
            return Err(Usage("which chore?".into()).into());
        }
        Ok(self.0.remove(0).to_string_lossy().into_owned())
    }

    /// Returns the next argument; `what` names it in an error.
    pub(crate) fn word(&mut self, what: &str) -> Result<String> {
        if self.0.is_empty() {
            return Err(Usage(format!("missing: {what}")).into());
        }
        Ok(self.0.remove(0).to_string_lossy().into_owned())
    }

    /// Returns the value of the option `name`, if the option is given.
    pub(crate) fn value(&mut self, name: &str) -> Result<Option<String>> {
        let value = self.after(name, "a value")?;
        Ok(value.map(|value| value.to_string_lossy().into_owned()))
    }

    /// Returns the path of the option `name`, if the option is given.
    pub(crate) fn path(&mut self, name: &str) -> Result<Option<PathBuf>> {
        Ok(self.after(name, "a path")?.map(PathBuf::from))
    }

    fn after(&mut self, name: &str, what: &str) -> Result<Option<OsString>> {
        let Some(at) = self.0.iter().position(|argument| argument == name) else {
            return Ok(None);
        };
        self.0.remove(at);
        if at == self.0.len() {
            return Err(Usage(format!("{name} takes {what}")).into());
        }
        Ok(Some(self.0.remove(at)))
    }

    /// Returns whether the option `name`, which takes no value, is given.
    pub(crate) fn flag(&mut self, name: &str) -> bool {
        let before = self.0.len();
        self.0.retain(|argument| argument != name);
        self.0.len() < before
    }

    /// Returns the arguments after the first `--`, for another program; `None` without `--`. Call this before any option is
    /// read: the other program's options may have the same names.
    pub(crate) fn after_dashes(&mut self) -> Option<Vec<OsString>> {
        let at = self.0.iter().position(|argument| argument == "--")?;
        let behind = self.0.split_off(at);
        Some(behind.into_iter().skip(1).collect())
    }

    /// Returns all remaining arguments, for another program.
    pub(crate) fn rest(&mut self) -> Vec<OsString> {
        std::mem::take(&mut self.0)
    }

    /// Fails if arguments remain.
    pub(crate) fn finish(&self) -> Result {
        match self.0.first() {
            None => Ok(()),
            Some(argument) => {
                Err(Usage(format!("`{}` is not expected", argument.to_string_lossy())).into())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(text: &[&str]) -> Arguments {
        Arguments::new(text.iter().map(OsString::from))
    }

    fn is_usage<T>(result: Result<T>) -> bool {
        result.is_err_and(|error| error.is::<Usage>())
    }

    #[test]
    fn an_option_may_be_absent_but_not_without_its_value() {
        let mut given = arguments(&["--header", "/a/nccl.h"]);
        assert_eq!(given.path("--header").unwrap(), Some("/a/nccl.h".into()));
        given.finish().unwrap();
        assert_eq!(arguments(&[]).path("--header").unwrap(), None);
        assert!(is_usage(arguments(&["--header"]).path("--header")));
    }

    #[test]
    fn what_stands_behind_two_dashes_belongs_to_another_program() {
        let mut given = arguments(&["run", "--", "ls", "--header", "--"]);
        assert_eq!(
            given.after_dashes().unwrap(),
            ["ls", "--header", "--"].map(OsString::from)
        );
        assert_eq!(given.path("--header").unwrap(), None);
        assert!(arguments(&["run"]).after_dashes().is_none());
    }

    #[test]
    fn a_flag_is_there_or_not() {
        let mut given = arguments(&["--no-libnccl"]);
        assert!(given.flag("--no-libnccl") && !given.flag("--no-libnccl"));
        given.finish().unwrap();
    }

    #[test]
    fn what_no_chore_asked_for_is_wrong_usage() {
        assert!(is_usage(arguments(&["--heeder", "x"]).finish()));
        assert!(is_usage(arguments(&[]).chore()));
        assert!(is_usage(arguments(&[]).word("a name")));
    }
}
