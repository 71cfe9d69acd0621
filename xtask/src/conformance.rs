//! `conformance`: the emulator against NVIDIA's libraries, as far as those answer without a GPU.
//!
//! Without a driver a library still loads, counts group calls, makes unique ids and checks arguments;
//! the programs that ask only for such things run on it, and on the emulator as the same release. Every
//! difference is either listed in `src/conformance/intended.rs` or fails this.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::arguments::Arguments;
use crate::workspace::{self, cargo, run as run_command};
use crate::{Result, header};

pub(crate) fn run(arguments: &mut Arguments) -> Result {
    let libraries: Vec<(String, PathBuf)> = match arguments.path("--library")? {
        Some(library) => {
            arguments.finish()?;
            vec![(library.display().to_string(), library)]
        }
        None => header::asked_for(arguments)?
            .into_iter()
            .map(|release| (format!("NCCL {}", release.version), release.library))
            .collect(),
    };
    run_command(cargo().args(["build", "--package", "nccl-tools", "--bin", "conformance"]))?;
    let program = workspace::target_directory().join("debug/conformance");
    let mut different = Vec::new();
    for (name, library) in libraries {
        eprintln!("{name} and the emulator:");
        if let Err(error) = compare(&program, &library) {
            eprintln!("{error}");
            different.push(name);
        }
    }
    if different.is_empty() {
        return Ok(());
    }
    Err(format!(
        "the emulator differs from {} where nobody meant it to; see the tables",
        different.join(", ")
    )
    .into())
}

fn compare(program: &Path, library: &Path) -> Result {
    let directory = tempfile::tempdir()?;
    let [theirs, ours] =
        ["library", "emulator"].map(|name| directory.path().join(format!("{name}.json")));
    let run = |out: &Path, prepare: &dyn Fn(&mut Command)| {
        let mut command = Command::new(program);
        command.args(["run", "--library-only", "--out"]).arg(out);
        for variable in ["NCCL_DEBUG", "NCCL_LIBRARY", "NCCL_EMULATOR_VERSION"] {
            command.env_remove(variable);
        }
        prepare(&mut command);
        match run_command(&mut command) {
            // How each program ended is compared as well: some do not come to their end on old releases.
            Err(_) if out.exists() => Ok(()),
            outcome => outcome,
        }
    };
    run(&theirs, &|command| {
        command
            .env("NCCL_EMULATOR", "0")
            .env("NCCL_LIBRARY", library);
    })?;
    run(&ours, &|command| {
        command.env("NCCL_EMULATOR", "1").arg("--like").arg(&theirs);
    })?;
    run_command(Command::new(program).arg("compare").args([&theirs, &ours]))
}
