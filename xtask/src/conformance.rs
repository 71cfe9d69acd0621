//! `conformance`: the emulator against NVIDIA's library, as far as that answers without a GPU.
//!
//! Without a driver the library still loads, counts group calls, makes unique ids and checks arguments;
//! the programs that ask only for such things run on both, and every difference is either listed in
//! `src/conformance/intended.rs` or fails this.

use std::process::Command;

use crate::arguments::Arguments;
use crate::workspace::{self, cargo, run as run_command};
use crate::{Result, header};

pub(crate) fn run(arguments: &mut Arguments) -> Result {
    let library = arguments.path("--library")?;
    arguments.finish()?;
    let library = match library {
        Some(library) => library,
        None => header::release()?.library,
    };
    run_command(cargo().args([
        "build",
        "--release",
        "--package",
        "nccl-tools",
        "--bin",
        "conformance",
    ]))?;
    let program = workspace::target_directory().join("release/conformance");
    let directory = tempfile::tempdir()?;
    let [theirs, ours] =
        ["library", "emulator"].map(|name| directory.path().join(format!("{name}.json")));
    for (out, emulator) in [(&theirs, "0"), (&ours, "1")] {
        let mut command = Command::new(&program);
        command.args(["run", "--library-only", "--out"]).arg(out);
        command
            .env("NCCL_EMULATOR", emulator)
            .env_remove("NCCL_DEBUG");
        match emulator {
            "0" => command.env("NCCL_LIBRARY", &library),
            _ => command.env_remove("NCCL_LIBRARY"),
        };
        run_command(&mut command)?;
    }
    run_command(Command::new(&program).arg("compare").args([&theirs, &ours])).map_err(|_| {
        "the emulator differs from NCCL where nobody meant it to; see the table".into()
    })
}
