//! Checks whether NCCL can work on this host, or among all ranks of a launcher, and reads NCCL's logs after a failure.
//! `nccl-doctor --help` has the usage; [`nccl_tools::doctor`] does the work.

use std::process::ExitCode;

fn main() -> ExitCode {
    nccl_tools::doctor::main()
}
