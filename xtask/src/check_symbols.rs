//! `check-symbols`: compares the functions of real libraries with those that nccl-sys lists for their releases, and
//! with the emulator acting as each release.

use crate::arguments::Arguments;
use crate::{Result, header, workspace};

pub(crate) fn run(arguments: &mut Arguments) -> Result {
    let mut failed = Vec::new();
    for release in header::asked_for(arguments)? {
        let tests = workspace::run(
            workspace::cargo()
                .args([
                    "test",
                    "--quiet",
                    "--package",
                    "nccl-sys",
                    "--test",
                    "loader",
                ])
                .args(["--package", "nccl-emulator", "--test", "real_symbols"])
                .args(["--", "real", "release", "--nocapture"])
                .env("NCCL_TEST_LIBRARY", &release.library),
        );
        let verdict = match &tests {
            Ok(()) => "as the tables say",
            Err(_) => "DIFFERENT (above)",
        };
        println!("{:<8} {verdict}", release.version);
        if tests.is_err() {
            failed.push(release.version);
        }
    }
    if failed.is_empty() {
        return Ok(());
    }
    Err(format!(
        "nccl-sys/src/since.rs, nccl-emulator/tests/real_symbols.rs or the emulator is wrong about {}",
        failed.join(", ")
    )
    .into())
}
