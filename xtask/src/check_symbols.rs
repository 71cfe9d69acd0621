//! `check-symbols`: compares the functions of real libraries with those that nccl-sys lists for their releases, and
//! with the emulator acting as each release. Compares the functions of NCCL EP's libraries with the table of nccl-sys, and the
//! sizes of its structs with its header; its libraries also run on the emulator's driver, as far as they do.

use crate::arguments::Arguments;
use crate::wheels::Unavailable;
use crate::{Result, ep, header, workspace};

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
    let of_ep = match of_ep() {
        // Unlike NCCL itself, it is a young package, without which a change can be judged.
        Err(error) if error.is::<Unavailable>() => {
            println!("{:<8} NOT TESTED: {error}", "NCCL EP");
            Ok(())
        }
        outcome => {
            let verdict = match &outcome {
                Ok(()) => "as the table says",
                Err(_) => "DIFFERENT (above)",
            };
            println!("{:<8} {verdict}", "NCCL EP");
            outcome
        }
    };
    if failed.is_empty() {
        return of_ep;
    }
    Err(format!(
        "nccl-sys/src/since.rs, nccl-emulator/tests/real_symbols.rs or the emulator is wrong about {}",
        failed.join(", ")
    )
    .into())
}

/// Checks NCCL EP's libraries for both versions of CUDA, with its header.
fn of_ep() -> Result {
    let release = ep::release()?;
    workspace::run(
        workspace::cargo()
            .args([
                "test",
                "--quiet",
                "--package",
                "nccl-sys",
                "--features",
                "nccl-sys/ep",
            ])
            .args([
                "--test",
                "ep",
                "--package",
                "nccl-emulator",
                "--test",
                "real_ep",
            ])
            .args(["--", "--nocapture"])
            .env("NCCL_HEADER", header::release()?.header)
            .env("NCCL_EP_HEADER", &release.header)
            .env("NCCL_EP_TEST_LIBRARIES", release.list())
            // The tests choose their NCCL themselves.
            .env_remove("NCCL_REAL_LIBRARIES"),
    )
}
