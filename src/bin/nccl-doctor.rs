//! Whether NCCL can work on this host, or among all ranks of a launcher; and what NCCL's logs say when it
//! did not. `nccl-doctor --help` explains; [`nccl_tools::doctor`] does the work.

use std::process::ExitCode;

fn main() -> ExitCode {
    nccl_tools::doctor::main()
}
