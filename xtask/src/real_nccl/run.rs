//! `real-nccl run`: one program on NVIDIA's library.

use std::env;
use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;

use super::environment::Environment;
use super::topology::Topology;
use super::{Asked, FEATURE};
use crate::Result;
use crate::arguments::{Arguments, Usage};
use crate::workspace::{self, cargo, run as run_command};

/// The program to run.
#[derive(Debug, PartialEq, Eq)]
enum Program {
    /// An example of this workspace, with its arguments.
    Example(String, Vec<OsString>),
    /// A command, with its arguments, and whether the emulator is preloaded.
    Command(Vec<OsString>, bool),
}

impl Program {
    fn parse(arguments: &mut Arguments, behind: Option<Vec<OsString>>) -> Result<Self> {
        let example = arguments.value("--example")?;
        let preload = arguments.flag("--preload");
        match (example, behind) {
            (Some(_), _) if preload => {
                let text = "--preload is for a COMMAND: an example of this workspace has the emulator in it";
                Err(Usage(text.into()).into())
            }
            (Some(name), behind) => Ok(Self::Example(name, behind.unwrap_or_default())),
            (None, Some(command)) if !command.is_empty() => Ok(Self::Command(command, preload)),
            (None, _) => Err(Usage("what runs: --example NAME, or -- COMMAND".into()).into()),
        }
    }

    /// Builds this workspace's parts of the program, and returns the command.
    fn prepare(self) -> Result<Command> {
        let release = workspace::target_directory().join("release");
        match self {
            Self::Example(name, arguments) => {
                let own = ["--package", "nccl-tools", "--features", FEATURE];
                build(&own, &["--example", &name])?;
                let mut command = Command::new(release.join("examples").join(name));
                command.args(arguments);
                Ok(command)
            }
            Self::Command(words, preload) => {
                let mut words = words.into_iter();
                let mut command = Command::new(words.next().unwrap_or_default());
                command.args(words);
                if preload {
                    let package = "nccl-emulator-preload";
                    build(&["--package", package, "--features", "real-nccl"], &[])?;
                    let emulator = release.join("libnccl_emulator_preload.so");
                    Environment::preload(&mut command, &emulator);
                }
                Ok(command)
            }
        }
    }
}

fn build(package: &[&str], target: &[&str]) -> Result {
    let mut command = cargo();
    command
        .args(["build", "--quiet", "--release"])
        .args(package)
        .args(target);
    run_command(&mut command)
}

/// Replaces this process with the program, so that exit code and signals are the program's.
pub(super) fn run(
    asked: &Asked,
    arguments: &mut Arguments,
    behind: Option<Vec<OsString>>,
) -> Result {
    let topology: Option<PathBuf> = arguments.path("--topology")?;
    let program = Program::parse(arguments, behind)?;
    arguments.finish()?;
    let topology = topology.as_deref().map(Topology::find).transpose()?;
    let release = asked.one()?;
    let mut command = program.prepare()?;
    let environment = Environment::new(&release, topology.as_ref());
    environment.apply(&mut command);
    eprintln!("{environment}");
    let name = command.get_program().to_string_lossy().into_owned();
    let error = command.exec();
    Err(format!("cannot run {name} in {}: {error}", here()).into())
}

fn here() -> String {
    env::current_dir().map_or_else(|error| error.to_string(), |path| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(text: &[&str]) -> Result<Program> {
        let mut arguments = Arguments::new(text.iter().map(OsString::from));
        let behind = arguments.after_dashes();
        Program::parse(&mut arguments, behind)
    }

    fn words(text: &[&str]) -> Vec<OsString> {
        text.iter().map(OsString::from).collect()
    }

    #[test]
    fn an_example_is_run_with_what_stands_behind_the_dashes() {
        assert_eq!(
            program(&["--example", "all_to_all_perf", "--", "--preload", "-n", "2"]).unwrap(),
            Program::Example("all_to_all_perf".into(), words(&["--preload", "-n", "2"]))
        );
        assert_eq!(
            program(&["--example", "ring"]).unwrap(),
            Program::Example("ring".into(), Vec::new())
        );
    }

    #[test]
    fn a_command_is_preloaded_if_that_is_asked_for() {
        assert_eq!(
            program(&["--preload", "--", "python3", "-c", "1"]).unwrap(),
            Program::Command(words(&["python3", "-c", "1"]), true)
        );
        assert_eq!(
            program(&["--", "./service"]).unwrap(),
            Program::Command(words(&["./service"]), false)
        );
    }

    #[test]
    fn nothing_to_run_is_wrong_usage_and_so_is_an_example_that_is_preloaded() {
        for text in [
            &[][..],
            &["--"],
            &["--preload"],
            &["--example", "x", "--preload"],
        ] {
            assert!(program(text).unwrap_err().is::<Usage>(), "{text:?}");
        }
    }
}
