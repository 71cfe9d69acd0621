//! The paths of the programs that tests start: `nccl-run`, `nccl-doctor` and examples. For tests of this package alone:
//! only to these, Cargo passes the paths of the programs in `tests/Cargo.toml`.

use std::path::PathBuf;

use nccl_tools::gpu_check::PROGRAMS;

/// The program of this name, as it was built with this test, or from the directory that [`PROGRAMS`] names.
///
/// # Panics
/// When it does not exist.
pub(crate) fn program(name: &str) -> PathBuf {
    let program = match std::env::var_os(PROGRAMS) {
        Some(directory) => {
            let directory = PathBuf::from(directory);
            let program = directory.join(name);
            match program.is_file() {
                true => program,
                false => directory.join("examples").join(name),
            }
        }
        None => built(name).into(),
    };
    assert!(program.is_file(), "there is no {}", program.display());
    program
}

/// The programs of `tests/Cargo.toml`.
fn built(name: &str) -> &'static str {
    match name {
        "nccl-run" => env!("CARGO_BIN_EXE_nccl-run-under-test"),
        "nccl-doctor" => env!("CARGO_BIN_EXE_nccl-doctor-under-test"),
        "all_reduce_perf" => env!("CARGO_BIN_EXE_all_reduce_perf"),
        "all_to_all_perf" => env!("CARGO_BIN_EXE_all_to_all_perf"),
        "all_to_all_v_perf" => env!("CARGO_BIN_EXE_all_to_all_v_perf"),
        "going_on" => env!("CARGO_BIN_EXE_going_on"),
        "root_cause" => env!("CARGO_BIN_EXE_root_cause"),
        "sendrecv_perf" => env!("CARGO_BIN_EXE_sendrecv_perf"),
        _ => panic!("tests/Cargo.toml has no program {name}"),
    }
}
