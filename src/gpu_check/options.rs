//! The command line of `gpu-check run`.

use std::path::PathBuf;

use crate::failure::Failure;

/// The options of the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The directory of the bundle.
    pub bundle: PathBuf,
    /// Where the reports go.
    pub out: PathBuf,
    /// Whether to run all steps, not only those of a few minutes.
    pub full: bool,
    /// Whether to use the emulator, although there may be a GPU.
    pub emulated: bool,
    /// Only steps whose names begin with one of these; empty: all.
    pub only: Vec<String>,
    /// Whether to keep the unpacked files.
    pub keep: bool,
}

/// The text of `--help`.
pub const HELP: &str = "\
usage: run.sh [quick|full] [--emulated] [--out DIRECTORY] [--only STEP,STEP...] [--keep]

quick        tests, conformance, a short benchmark; minutes (this is what happens without a word)
full         and the measurements, and the comparison with nccl-tests if the bundle has it
--emulated   on the emulator: to see that the check works; says nothing about a GPU
--out        where the reports go; ./report unless given
--only       only steps whose names begin like this
--keep       leave the unpacked programs in DIRECTORY/unpacked
exit codes: 0 something passed and nothing failed, 1 otherwise, 2 it could not be tried
";

impl Options {
    /// Reads the arguments after `gpu-check run`; `None`: help was requested.
    ///
    /// # Errors
    /// What is wrong with the arguments.
    pub fn parse(arguments: impl IntoIterator<Item = String>) -> Result<Option<Self>, Failure> {
        let mut options = Self {
            bundle: ".".into(),
            out: "report".into(),
            full: false,
            emulated: false,
            only: Vec::new(),
            keep: false,
        };
        let mut arguments = arguments.into_iter();
        while let Some(argument) = arguments.next() {
            let mut value = || {
                let value = arguments.next();
                value.ok_or_else(|| Failure::usage(format!("{argument} needs a value")))
            };
            match argument.as_str() {
                "quick" => options.full = false,
                "full" => options.full = true,
                "--emulated" => options.emulated = true,
                "--keep" => options.keep = true,
                "--bundle" => options.bundle = value()?.into(),
                "--out" => options.out = value()?.into(),
                "--only" => options.only = value()?.split(',').map(str::to_owned).collect(),
                "--help" | "-h" => return Ok(None),
                other => {
                    return Err(Failure::usage(format!(
                        "`{other}` is not known; --help lists what is"
                    )));
                }
            }
        }
        Ok(Some(options))
    }

    /// Whether a step of this name is to run.
    #[must_use]
    pub fn wants(&self, step: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|name| step.starts_with(&**name))
    }

    /// Whether a step is to run whose name begins like this, if there is one.
    #[must_use]
    pub fn wants_some(&self, beginning: &str) -> bool {
        self.wants(beginning) || self.only.iter().any(|name| name.starts_with(beginning))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Option<Options>, Failure> {
        Options::parse(text.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn the_command_line_says_how_much_and_where() {
        let options = parse("full --emulated --out r --only tests,measure").unwrap();
        let options = options.unwrap();
        assert!(options.full && options.emulated && !options.keep);
        assert!(options.wants("tests memory") && !options.wants("conformance"));
        assert!(!parse("").unwrap().unwrap().full);
        assert_eq!(parse("--help").unwrap(), None);
    }

    #[test]
    fn the_beginning_of_names_is_wanted_if_one_of_them_may_be() {
        let options = parse("--only tests.api.plans::kept").unwrap().unwrap();
        assert!(options.wants_some("tests") && options.wants_some("tests.api.plans::"));
        assert!(options.wants_some("tests.api.plans::kept_twice"));
        assert!(!options.wants_some("tests.api.memory::") && !options.wants_some("measure"));
        assert!(parse("").unwrap().unwrap().wants_some("measure"));
    }

    #[test]
    fn what_is_not_known_is_named() {
        let text = parse("fool").unwrap_err().to_string();
        assert!(text.contains("`fool`"), "{text}");
        assert!(parse("--out").is_err());
    }
}
