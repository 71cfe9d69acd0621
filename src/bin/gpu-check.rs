//! The check for a machine with a GPU: `gpu-check run`, called by the bundle's `run.sh`.
//!
//! [`nccl_tools::gpu_check`] describes it.

use std::process::ExitCode;

use nccl_tools::failure::Failure;
use nccl_tools::gpu_check::check;
use nccl_tools::gpu_check::options::{HELP, Options};

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let outcome = match arguments.next().as_deref() {
        Some("run") => Options::parse(arguments).and_then(|options| match options {
            Some(options) => check::run(&options),
            None => {
                print!("{HELP}");
                Ok(0)
            }
        }),
        _ => Err(Failure::usage(
            "usage: gpu-check run [OPTIONS]; run --help lists them",
        )),
    };
    match outcome {
        Ok(code) => code.into(),
        Err(failure) => {
            eprintln!("gpu-check: {failure}");
            failure.exit().into()
        }
    }
}
